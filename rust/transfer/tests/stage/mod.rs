//! An engine without its sockets, and clients of objects that talk to it as real ones do.
#![allow(dead_code, reason = "each test program uses its part")]

use std::collections::BTreeMap;
use std::sync::Arc;

use pyengine_transfer::engine::{Engine, Input, Output, Settings};
use pyengine_transfer::memory::Arena;
use pyengine_transfer::messages::{LocalEvent, LocalRequest, Refusal, Ticket};
use pyengine_transfer::objects::messages::{At, ObjectEvent, ObjectRequest, Reserved, Sighting, Wanted, chain};
use pyengine_transfer::objects::reader::{Answer, Reader};
use pyengine_transfer::pool::tier::Tier;
use pyengine_transfer::types::{BlockKey, ClientId, NodeAddress};

pub const SECOND: u64 = 1_000_000_000;
/// Looks at a medium without threads after which what was asked must be done.
const LOOKS: usize = 200;

/// An engine, and its clients' reading sides.
pub struct Stage {
    pub engine: Engine,
    readers: BTreeMap<ClientId, Reader>,
    now: u64,
    ticket: Ticket,
    /// Answers that nobody has taken yet.
    inbox: Vec<(ClientId, LocalEvent)>,
}

impl Stage {
    pub fn new(dram_bytes: u64, tier: Option<Box<dyn Tier>>) -> Self {
        Self::with(Settings::new(dram_bytes), tier)
    }

    pub fn with(settings: Settings, tier: Option<Box<dyn Tier>>) -> Self {
        let node = NodeAddress { node: "n".into(), address: String::new(), incarnation: 1 };
        let engine = match tier {
            Some(tier) => Engine::with_tier(node, settings, tier),
            None => Engine::new(node, settings),
        };
        engine.check();
        Self { engine, readers: BTreeMap::new(), now: 0, ticket: 0, inbox: Vec::new() }
    }

    pub fn handle(&mut self, input: Input) {
        self.now += SECOND / 100;
        let mut out = Vec::new();
        self.engine.handle(input, self.now, &mut out);
        self.engine.check();
        for output in out {
            match output {
                Output::Local { client, event } => self.inbox.push((client, event)),
                Output::Report(report) => {
                    let report = format!("{report:?}");
                    assert!(report.starts_with("Heartbeat"), "the conductor hears of objects: {report}");
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// What whoever runs the daemon does: `work` appends to the outputs.
    pub fn administer<R>(&mut self, work: impl FnOnce(&mut Engine, u64, &mut Vec<Output>) -> R) -> R {
        let mut out = Vec::new();
        let result = work(&mut self.engine, self.now, &mut out);
        self.engine.check();
        result
    }

    /// Says something, and takes the answer if there is one at once.
    pub fn say(&mut self, client: ClientId, request: ObjectRequest) -> Option<ObjectEvent> {
        let catalog = self.engine.catalog().clone();
        let reader = self.readers.entry(client).or_insert_with(|| Reader::new(catalog));
        match reader.answer(request) {
            Answer::Pass(request) => {
                self.handle(Input::Local { client, request: LocalRequest::Objects(request) });
                None
            }
            Answer::Tell(event, _) => Some(event),
            Answer::Done => None,
        }
    }

    /// Asks, and has time pass and the medium work until there is an answer.
    pub fn ask(&mut self, client: ClientId, make: impl FnOnce(Ticket) -> ObjectRequest) -> ObjectEvent {
        self.ticket += 1;
        let ticket = self.ticket;
        if let Some(event) = self.say(client, make(ticket)) {
            return event;
        }
        self.answer(client, ticket).unwrap_or_else(|| panic!("no answer: {:?}", self.engine.unfinished()))
    }

    /// The answer to something that was said. `None`: there is none, however long one waits.
    pub fn answer(&mut self, client: ClientId, ticket: Ticket) -> Option<ObjectEvent> {
        for _ in 0..LOOKS {
            let answers = |(to, event): &(ClientId, LocalEvent)| {
                let of = match event {
                    LocalEvent::Objects(event) => event.ticket(),
                    LocalEvent::Flushed { ticket, .. } => *ticket,
                    other => panic!("{other:?}"),
                };
                *to == client && of == ticket
            };
            if let Some(at) = self.inbox.iter().position(answers) {
                return Some(match self.inbox.swap_remove(at).1 {
                    LocalEvent::Objects(event) => event,
                    LocalEvent::Flushed { ticket, ok } => ObjectEvent::Flushed { ticket, ok },
                    other => panic!("{other:?}"),
                });
            }
            self.handle(Input::Tick);
        }
        None
    }

    pub fn reserve(&mut self, client: ClientId, wanted: Wanted) -> Reserved {
        match self.ask(client, |ticket| ObjectRequest::Reserve { ticket, wanted: vec![wanted] }) {
            ObjectEvent::Reserved { blocks, .. } => blocks[0],
            other => panic!("{other:?}"),
        }
    }

    pub fn commit(&mut self, client: ClientId, put: u64, index: u32) -> bool {
        match self.ask(client, |ticket| ObjectRequest::Commit { ticket, blocks: vec![(put, index)] }) {
            ObjectEvent::Committed { stored, .. } => stored[0],
            other => panic!("{other:?}"),
        }
    }

    pub fn remove(&mut self, client: ClientId, key: BlockKey) -> bool {
        match self.ask(client, |ticket| ObjectRequest::Remove { ticket, keys: vec![key] }) {
            ObjectEvent::Removed { removed, .. } => removed[0],
            other => panic!("{other:?}"),
        }
    }

    pub fn abandon(&mut self, client: ClientId, put: u64) {
        self.say(client, ObjectRequest::Abandon { puts: vec![put] });
    }

    pub fn flush(&mut self, client: ClientId) -> bool {
        match self.ask(client, |ticket| ObjectRequest::Flush { ticket }) {
            ObjectEvent::Flushed { ok, .. } => ok,
            other => panic!("{other:?}"),
        }
    }

    pub fn await_room(&mut self, client: ClientId) -> bool {
        match self.ask(client, |ticket| ObjectRequest::AwaitRoom { ticket }) {
            ObjectEvent::Room { more, .. } => more,
            other => panic!("{other:?}"),
        }
    }

    pub fn bring(&mut self, client: ClientId, key: BlockKey, class: u8) -> Result<(), Refusal> {
        let wanted = Wanted { put: 0, class, key, parent: BlockKey::default(), index: 0 };
        match self.ask(client, |ticket| ObjectRequest::Bring { ticket, wanted: vec![wanted] }) {
            ObjectEvent::Brought { blocks, .. } => blocks[0],
            other => panic!("{other:?}"),
        }
    }

    /// (pin, where).
    pub fn sight(&mut self, client: ClientId, key: BlockKey) -> Sighting<(u64, At)> {
        match self.ask(client, |ticket| ObjectRequest::Pin { ticket, keys: vec![key], names: true }) {
            ObjectEvent::Pinned { first, found, .. } => found[0].map(|at| (first, at)),
            other => panic!("{other:?}"),
        }
    }

    /// What lies in DRAM.
    pub fn pin(&mut self, client: ClientId, key: BlockKey) -> Option<(u64, At)> {
        self.sight(client, key).here().copied()
    }

    /// Wherever it lies. `Err(None)`: nowhere.
    pub fn get(&mut self, client: ClientId, key: BlockKey) -> Result<(u64, At), Option<Refusal>> {
        let mut brought = Ok(());
        for round in 0..20 {
            let class = match self.sight(client, key) {
                Sighting::Here(here) => return Ok(here),
                Sighting::Missing => return Err(None),
                Sighting::Behind { class } => class,
            };
            match brought {
                Ok(()) => assert!(round == 0, "what has been brought stays until it is pinned"),
                Err(Refusal::Full) if self.await_room(client) => {}
                Err(refusal) => return Err(Some(refusal)),
            }
            brought = self.bring(client, key, class);
        }
        panic!("room is promised again and again");
    }

    pub fn release(&mut self, client: ClientId, pin: u64) {
        self.say(client, ObjectRequest::Release { pins: vec![pin] });
    }

    /// The client's process dies.
    pub fn gone(&mut self, client: ClientId) {
        self.readers.remove(&client);
        self.handle(Input::LocalGone { client });
    }

    pub fn has(&self, key: &BlockKey) -> bool {
        self.engine.catalog().find(key).is_some()
    }

    fn arena(&self, (region, _): At) -> Arc<Arena> {
        self.engine.catalog().arena(region).expect("it was named")
    }

    /// Writes a block as this put's.
    pub fn stamp(&self, at: At, put: u64) {
        let arena = self.arena(at);
        let mut block = vec![0; arena.layout().block_bytes()];
        block[..8].copy_from_slice(&put.to_le_bytes());
        arena.store(at.1, 0, &block).expect("in range");
    }

    /// Whose the block is; `None`: it is damaged.
    pub fn stamped(&self, at: At) -> Option<u64> {
        let arena = self.arena(at);
        let mut strip = vec![0; arena.layout().strip_bytes as usize];
        let intact = arena.load_held(at.1, 0, &mut strip).expect("in range");
        intact.then(|| u64::from_le_bytes(strip[..8].try_into().expect("8 bytes")))
    }

    /// A bit of a block flips.
    pub fn damage(&self, at: At) {
        self.arena(at).corrupt_for_test(at.1.slot, 0);
    }

    /// The engine ends well: what is in DRAM only is written.
    pub fn stop(mut self) {
        for client in self.readers.keys().copied().collect::<Vec<_>>() {
            self.gone(client);
        }
        self.handle(Input::Stop);
        for _ in 0..LOOKS {
            if self.engine.has_left() {
                self.engine.close(std::time::Duration::from_secs(60));
                return;
            }
            self.handle(Input::Tier);
        }
        panic!("it does not end");
    }
}

pub fn name_key(name: u8) -> BlockKey {
    BlockKey([name; 16])
}

pub fn chunk_key(put: u64, index: u32) -> BlockKey {
    let mut key = [0xee; 16];
    key[..8].copy_from_slice(&put.to_le_bytes());
    key[8..12].copy_from_slice(&index.to_le_bytes());
    BlockKey(key)
}

/// Block `index` of `blocks`.
pub fn wanted(put: u64, class: u8, name: u8, (index, blocks): (u32, u32)) -> Wanted {
    let key = |index| if index == 0 { name_key(name) } else { chunk_key(put, index) };
    let second = (blocks > 1).then(|| key(1));
    let parent = if index == 0 { chain(blocks, second.as_ref()) } else { key(index - 1) };
    Wanted { put, class, key: key(index), parent, index }
}

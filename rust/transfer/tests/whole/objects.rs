//! Objects of one node, beside a dict from name to the put that is there. (Large values, which take blocks of a megabyte, are
//! the business of `object_tiers.rs`; those of several blocks here are small, and on nodes without an SSD.)

use std::collections::{BTreeMap, BTreeSet};

use pyengine_transfer::messages::{LocalEvent, LocalRequest, Refusal, Ticket};
use pyengine_transfer::objects::messages::{At, ObjectEvent, ObjectRequest, Reserved, Sighting, Wanted, chain};
use pyengine_transfer::objects::reader::{Answer, Reader};
use pyengine_transfer::types::{BlockKey, ClientId};

use crate::behind::Behind;
use crate::model::Model;

/// Classes of blocks, by number: 4 KiB, and twice that. (The engine does not mind a value that is cut into small ones.)
pub const CLASSES: [u8; 2] = [0, 1];
const NAMES: u64 = 6;
/// Clients of objects on each node.
const CLIENTS: u64 = 2;

/// The number of a put of an earlier life, until somebody has looked which it is.
const UNKNOWN: u64 = 0;

/// What is written, or was, under one name.
#[derive(Clone, Debug)]
struct Put {
    client: ClientId,
    number: u64,
    name: u8,
    blocks: u32,
}

/// A block that somebody reads.
#[derive(Clone, Debug)]
struct View {
    client: ClientId,
    pin: u64,
    at: At,
    put: u64,
    name: u8,
}

#[derive(Debug, Default)]
pub struct Objects {
    readers: BTreeMap<ClientId, Reader>,
    dict: BTreeMap<u8, Put>,
    open: Vec<Put>,
    views: Vec<View>,
    /// What is being brought from the SSD: for whom, by his question.
    brings: BTreeMap<(ClientId, Ticket), u8>,
    /// Puts that a name may be found to have after a crash, and when each was committed: all that it ever had and that are
    /// not durably gone.
    past: BTreeMap<u8, BTreeMap<u64, u64>>,
    /// Names that must be there after any crash.
    durable: BTreeSet<u8>,
    /// Flushes that are not answered yet: what was there then, by name.
    asked: BTreeMap<Ticket, BTreeMap<u8, u64>>,
}

impl Objects {
    /// A life of the node ends. `all`: by a stop that had time and room for all.
    pub fn end(&mut self, behind: &Behind, all: bool, spoiled: bool) {
        let mut durable = std::mem::take(&mut self.durable);
        durable.retain(|name| self.dict.contains_key(name) && behind.has(&name_key(*name)));
        if all {
            durable.extend(self.dict.keys());
        }
        if spoiled {
            durable.clear();
        }
        let past = std::mem::take(&mut self.past);
        *self = Self { durable, past, ..Self::default() };
    }

    pub fn has(&self, client: ClientId) -> bool {
        self.readers.contains_key(&client)
    }

    pub fn has_asked(&self, ticket: Ticket) -> bool {
        self.asked.contains_key(&ticket)
    }

    /// A flush is asked for.
    pub fn flush(&mut self, ticket: Ticket) {
        self.asked.insert(ticket, self.dict.iter().map(|(name, put)| (*name, put.number)).collect());
    }

    /// And answered.
    pub fn flushed(&mut self, ticket: Ticket, ok: bool, behind: &Behind) {
        let Some(asked) = self.asked.remove(&ticket).filter(|_| ok) else { return };
        for (name, past) in &mut self.past {
            // What it had before is gone for good; what it has got since is nothing that was asked for.
            let current = asked.get(name).copied();
            past.retain(|put, when| *when > ticket || current.is_some_and(|it| it == UNKNOWN || it == *put));
        }
        for (name, number) in asked {
            let same = self.dict.get(&name).is_some_and(|put| put.number == number);
            let there = behind.has(&name_key(name));
            assert!(there || !same || !behind.has_room(), "{name} is called durable, and is not on the SSD");
            // A small tier may have let go of it just now.
            if same && there {
                self.durable.insert(name);
            }
        }
    }
}

fn name_key(name: u8) -> BlockKey {
    BlockKey([0xa0 + name; 16])
}

/// Puts are numbered over all nodes and lives, so that no two of these are the same.
fn chunk_key(put: u64, index: u32) -> BlockKey {
    let mut key = [0xee; 16];
    key[..8].copy_from_slice(&put.to_le_bytes());
    key[8..12].copy_from_slice(&index.to_le_bytes());
    BlockKey(key)
}

fn block_key(put: &Put, index: u32) -> BlockKey {
    if index == 0 { name_key(put.name) } else { chunk_key(put.number, index) }
}

impl Model {
    fn objects(&mut self, node: &str) -> &mut Objects {
        self.objects.get_mut(node).expect("each node has some")
    }

    /// A node has begun.
    pub fn begin_objects(&mut self, node: &str) {
        let here: BTreeSet<BlockKey> = self.engine(node).catalog().keys();
        let objects = self.objects(node);
        let lost: Vec<_> = objects.durable.iter().filter(|name| !here.contains(&name_key(**name))).collect();
        assert!(lost.is_empty(), "{node} has lost the objects {lost:?}, which were durable");
        for name in (0..NAMES as u8).filter(|name| here.contains(&name_key(*name))) {
            let maybe = objects.past.get(&name).is_some_and(|past| !past.is_empty());
            assert!(maybe, "{node} has an object {name} that was never put, or durably removed");
            objects.dict.insert(name, Put { client: 0, number: UNKNOWN, name, blocks: 1 });
        }
        let back = objects.dict.len() as u64;
        self.done.add("objects back", back);
        for _ in 0..CLIENTS {
            let client = self.client();
            let catalog = self.engine(node).catalog().clone();
            self.objects(node).readers.insert(client, Reader::new(catalog));
        }
    }

    /// All clients of objects let go of everything.
    pub fn end_objects(&mut self, node: &str) {
        for client in self.objects(node).readers.keys().copied().collect::<Vec<_>>() {
            self.object_client_dies(node, client);
        }
    }

    fn ask_objects(
        &mut self,
        node: &str,
        client: ClientId,
        make: impl FnOnce(Ticket) -> ObjectRequest,
    ) -> Option<ObjectEvent> {
        // Numbered as puts are, so that it says what came first.
        let ticket = self.tag().request;
        let reader = self.objects(node).readers.get_mut(&client).expect("it lives");
        let request = match reader.answer(make(ticket)) {
            Answer::Pass(request) => LocalRequest::Objects(request),
            Answer::Tell(event, _) => return Some(event),
            Answer::Done => return None,
        };
        self.world.request(node, client, request);
        let mut answer = None;
        for (node, told, event) in self.world.take_events() {
            match event {
                LocalEvent::Objects(event) if told == client && event.ticket() == ticket => answer = Some(event),
                event => self.told(&node, told, event),
            }
        }
        self.take_reports();
        answer
    }

    pub fn act_on_objects(&mut self, node: &str) {
        let clients: Vec<ClientId> = self.objects(node).readers.keys().copied().collect();
        let client = self.pick(&clients);
        match self.random.below(100) {
            0..32 => self.begin_put(node, client),
            32..56 => self.finish_put(node),
            56..78 => self.view(node, client),
            78..88 => self.close_view(node),
            88..93 => self.remove_object(node, client),
            93..97 => self.abandon_put(node),
            _ => self.object_client_dies(node, client),
        }
    }

    fn begin_put(&mut self, node: &str, client: ClientId) {
        let (number, name) = (self.tag().request, self.random.below(NAMES) as u8);
        let several = !self.behind[node].is_there() && self.random.permille(400);
        let blocks = if several { 2 + self.random.below(3) as u32 } else { 1 };
        let class = self.pick(&CLASSES);
        let put = Put { client, number, name, blocks };
        let there = self.has_object(node, &name_key(name));
        for index in 0..blocks {
            let key = block_key(&put, index);
            let second = (blocks > 1).then(|| block_key(&put, 1));
            let parent = if index == 0 { chain(blocks, second.as_ref()) } else { block_key(&put, index - 1) };
            let wanted = vec![Wanted { put: number, class, key, parent, index }];
            let answer = self.ask_objects(node, client, |ticket| ObjectRequest::Reserve { ticket, wanted });
            let Some(ObjectEvent::Reserved { blocks, .. }) = answer else { panic!("{answer:?}") };
            match blocks[0] {
                Reserved::Slot { region, slot } => {
                    if index == 0 && there {
                        // Nobody could get it from a medium that fails: it has made way.
                        assert!(!self.has_object(node, &key));
                        self.objects(node).dict.remove(&name);
                    }
                    self.stamp(node, (region, slot), number);
                }
                Reserved::There => {
                    assert!(index == 0 && there);
                    return;
                }
                Reserved::Refused(Refusal::Full) => {
                    self.ask_objects(node, client, |_| ObjectRequest::Abandon { puts: vec![number] });
                    return;
                }
                Reserved::Refused(other) => panic!("{other:?}"),
            }
        }
        self.objects(node).open.push(put);
    }

    fn take_open(&mut self, node: &str) -> Option<Put> {
        let count = self.objects(node).open.len();
        let at = (count > 0).then(|| self.random.below(count as u64) as usize)?;
        Some(self.objects(node).open.swap_remove(at))
    }

    fn commit(&mut self, node: &str, put: &Put, index: u32) -> bool {
        let blocks = vec![(put.number, index)];
        match self.ask_objects(node, put.client, |ticket| ObjectRequest::Commit { ticket, blocks }) {
            Some(ObjectEvent::Committed { stored, .. }) => stored[0],
            other => panic!("{other:?}"),
        }
    }

    fn finish_put(&mut self, node: &str) {
        let Some(put) = self.take_open(node) else { return };
        if put.blocks > 1 && self.random.permille(200) {
            // The head too early: refused, and the put goes on.
            assert!(!self.commit(node, &put, 0));
            return self.objects(node).open.push(put);
        }
        for index in 1..put.blocks {
            assert!(self.commit(node, &put, index), "{put:?}");
        }
        let there = self.has_object(node, &name_key(put.name));
        let first = self.commit(node, &put, 0);
        assert_eq!(first, !there, "the first commit of a name counts");
        if first {
            self.done.add("stored", 1);
            let when = self.tag().request;
            let objects = self.objects(node);
            objects.durable.remove(&put.name);
            objects.past.entry(put.name).or_default().insert(put.number, when);
            objects.dict.insert(put.name, put);
        }
    }

    /// At any step: some of its blocks are committed.
    fn abandon_put(&mut self, node: &str) {
        let Some(put) = self.take_open(node) else { return };
        for index in 1..1 + self.random.below(put.blocks.into()) as u32 {
            assert!(self.commit(node, &put, index), "{put:?}");
        }
        self.ask_objects(node, put.client, |_| ObjectRequest::Abandon { puts: vec![put.number] });
    }

    fn view(&mut self, node: &str, client: ClientId) {
        // Rather one that is there than not.
        let there: Vec<u8> = self.objects(node).dict.keys().copied().collect();
        let likely = !there.is_empty() && self.random.permille(700);
        let name = if likely { self.pick(&there) } else { self.random.below(NAMES) as u8 };
        match self.pin(node, client, name_key(name)) {
            Sighting::Here((pin, at)) => self.look_at(node, client, name, (pin, at)),
            Sighting::Behind { class } => {
                let (put, index, parent) = (UNKNOWN, 0, BlockKey::default());
                let wanted = vec![Wanted { put, class, key: name_key(name), parent, index }];
                let mut asked = 0;
                let answer = self.ask_objects(node, client, |ticket| {
                    asked = ticket;
                    ObjectRequest::Bring { ticket, wanted }
                });
                self.objects(node).brings.insert((client, asked), name);
                if let Some(event) = answer {
                    self.brought(node, client, &event);
                }
            }
            Sighting::Missing => {}
        }
    }

    /// What was asked for may be in DRAM now.
    pub fn brought(&mut self, node: &str, client: ClientId, event: &ObjectEvent) {
        let ObjectEvent::Brought { ticket, blocks } = event else { return };
        let Some(name) = self.objects(node).brings.remove(&(client, *ticket)) else { return };
        if blocks[..] == [Ok(())]
            && let Sighting::Here(seen) = self.pin(node, client, name_key(name))
        {
            self.done.add("brought", 1);
            self.look_at(node, client, name, seen);
        }
    }

    fn look_at(&mut self, node: &str, client: ClientId, name: u8, (pin, at): (u64, At)) {
        let mut put = self.objects(node).dict.get(&name).expect("nothing was put there").clone();
        if put.number == UNKNOWN
            && let Some(number) = self.stamped(node, at)
        {
            let known = self.objects(node).past.get(&name).is_some_and(|past| past.contains_key(&number));
            assert!(known, "{name} at {node} is back with what was durably removed, or never put: {number}");
            put.number = number;
            self.objects(node).dict.insert(name, put.clone());
        }
        let mut damaged = self.read_stamp(node, at, &put);
        for index in 1..put.blocks {
            let Sighting::Here((pin, at)) = self.pin(node, client, block_key(&put, index)) else {
                panic!("an object is there as a whole")
            };
            damaged |= self.read_stamp(node, at, &put);
            self.ask_objects(node, client, |_| ObjectRequest::Release { pins: vec![pin] });
        }
        if damaged {
            self.done.add("rotten", 1);
            self.ask_objects(node, client, |_| ObjectRequest::Damaged { blocks: vec![at] });
            self.ask_objects(node, client, |_| ObjectRequest::Release { pins: vec![pin] });
            self.sync_objects(node);
            return;
        }
        self.done.add("viewed", 1);
        self.objects(node).views.push(View { client, pin, at, put: put.number, name });
    }

    fn pin(&mut self, node: &str, client: ClientId, key: BlockKey) -> Sighting<(u64, At)> {
        match self.ask_objects(node, client, |ticket| ObjectRequest::Pin { ticket, keys: vec![key], names: true }) {
            Some(ObjectEvent::Pinned { first, found, .. }) => {
                found.into_iter().next().expect("one").map(|at| (first, at))
            }
            other => panic!("{other:?}"),
        }
    }

    fn close_view(&mut self, node: &str) {
        let count = self.objects(node).views.len();
        if count > 0 {
            let at = self.random.below(count as u64) as usize;
            let view = self.objects(node).views.swap_remove(at);
            self.ask_objects(node, view.client, |_| ObjectRequest::Release { pins: vec![view.pin] });
        }
    }

    fn remove_object(&mut self, node: &str, client: ClientId) {
        let name = self.random.below(NAMES) as u8;
        let there = self.has_object(node, &name_key(name));
        let keys = vec![name_key(name)];
        match self.ask_objects(node, client, |ticket| ObjectRequest::Remove { ticket, keys }) {
            Some(ObjectEvent::Removed { removed, .. }) => assert_eq!(removed, [there]),
            other => panic!("{other:?}"),
        }
        assert!(!self.has_object(node, &name_key(name)));
        let objects = self.objects(node);
        objects.durable.remove(&name);
        objects.dict.remove(&name);
    }

    /// And another comes.
    fn object_client_dies(&mut self, node: &str, client: ClientId) {
        let objects = self.objects(node);
        objects.readers.remove(&client);
        objects.open.retain(|put| put.client != client);
        objects.views.retain(|view| view.client != client);
        objects.brings.retain(|(by, _), _| *by != client);
        self.world.client_gone(node, client);
        let (another, catalog) = (self.client(), self.engine(node).catalog().clone());
        self.objects(node).readers.insert(another, Reader::new(catalog));
    }

    fn has_object(&self, node: &str, key: &BlockKey) -> bool {
        self.engine(node).catalog().find(key).is_some()
    }

    /// Marks a block as this put's.
    fn stamp(&self, node: &str, (region, slot): At, put: u64) {
        let arena = self.engine(node).catalog().arena(region).expect("it was named");
        let mut strip = vec![0; arena.layout().strip_bytes as usize];
        strip[..8].copy_from_slice(&put.to_le_bytes());
        arena.store(slot, 0, &strip).expect("in range");
    }

    /// Asserts that the block is this put's. True: it has rotten.
    fn read_stamp(&self, node: &str, at: At, put: &Put) -> bool {
        match self.stamped(node, at) {
            Some(stamp) => {
                assert!(put.number != UNKNOWN, "whoever looks first learns it");
                assert_eq!(stamp, put.number, "another value than was put last: {put:?}");
                false
            }
            None => true,
        }
    }

    /// Whose a block is. `None`: it has rotten.
    fn stamped(&self, node: &str, (region, slot): At) -> Option<u64> {
        let arena = self.engine(node).catalog().arena(region).expect("it was named");
        let mut strip = vec![0; arena.layout().strip_bytes as usize];
        if !arena.load_held(slot, 0, &mut strip).expect("in range") {
            assert!(self.rotten.contains(&(node.to_owned(), region, slot)), "{slot:?} has rotten by itself");
            return None;
        }
        Some(u64::from_le_bytes(strip[..8].try_into().expect("8 bytes")))
    }

    /// What is there is what was put, all of it; what is viewed is as it was.
    pub fn check_objects(&mut self, node: &str) {
        let here: BTreeSet<BlockKey> = self.engine(node).catalog().keys();
        let objects = &self.objects[node];
        for View { at, put, name, .. } in &objects.views {
            assert!(
                self.stamped(node, *at).is_none_or(|stamp| stamp == *put),
                "a view of {name} at {node} has changed"
            );
        }
        let under_way =
            |key: &BlockKey| objects.open.iter().any(|put| (1..put.blocks).any(|index| block_key(put, index) == *key));
        let mut expected = BTreeSet::new();
        for put in objects.dict.values().filter(|put| here.contains(&name_key(put.name))) {
            expected.extend((0..put.blocks).map(|index| block_key(put, index)));
        }
        for key in &here {
            assert!(expected.remove(key) || under_way(key), "{key:?} at {node} is of no object");
        }
        assert!(expected.is_empty(), "objects at {node} with parts missing: {expected:?}");
        self.sync_objects(node);
    }

    /// Forgets what was evicted.
    pub fn sync_objects(&mut self, node: &str) {
        let here: BTreeSet<BlockKey> = self.engine(node).catalog().keys();
        let objects = self.objects(node);
        let before = objects.dict.len();
        objects.dict.retain(|name, _| here.contains(&name_key(*name)));
        let Objects { dict, durable, .. } = objects;
        durable.retain(|name| dict.contains_key(name));
        let evicted = (before - dict.len()) as u64;
        self.done.add("evicted", evicted);
    }
}

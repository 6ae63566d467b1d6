//! Random things that happen to the nodes and their workers.

use std::collections::{BTreeMap, BTreeSet};

use pyengine_transfer::admin::{Cursor, Evicted, Listed, Prefix};
use pyengine_transfer::engine::{Engine, OBJECTS};
use pyengine_transfer::messages::{DaemonOrder, DaemonReport, GrantMode, LocalRequest, Ticket};
use pyengine_transfer::pool::tier::Whose;
use pyengine_transfer::random::Random;
use pyengine_transfer::transport::sim::{Faults, World};
use pyengine_transfer::types::{BlockKey, ClientId, Kind as Transport, Medium, NodeAddress, RegionId, SlotRef, Tag};

use crate::behind::Behind;
use crate::blocks::{
    Fill, Kind, LAYOUTS, Part, ROOT, Task, all_prompts, kinds, namespace_of, prompt, tenant, tenant_of,
};
use crate::books::Books;
use crate::objects::Objects;

pub const MILLISECOND: u64 = 1_000_000;
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// What has happened, and how often: a model that never gets anywhere proves nothing.
///
/// Of blocks: `completed` hand-offs, `fetched` from peers, `read` from this node's SSD and `read_there` from a peer's, `shared`
/// with whoever got it first, `written` to SSDs, `dropped` without, made `durable` and `deleted` by request, `kept` over a
/// restart, read `back` in the end, found `rotten` by whoever wanted them and by whoever `verified`. Of objects:
/// `stored`, `viewed`, and found `evicted`.
#[derive(Clone, Debug, Default)]
pub struct Done(BTreeMap<&'static str, u64>);

impl Done {
    pub fn add(&mut self, what: &'static str, times: u64) {
        *self.0.entry(what).or_default() += times;
    }

    pub fn of(&self, what: &str) -> u64 {
        self.0.get(what).copied().unwrap_or(0)
    }

    pub fn add_all(&mut self, other: &Self) {
        other.0.iter().for_each(|(what, times)| self.add(what, *times));
    }
}

pub struct Model {
    pub world: World,
    pub random: Random,
    pub nodes: Vec<&'static str>,
    pub addresses: BTreeMap<String, NodeAddress>,
    /// Workers that live: (node, client).
    pub clients: BTreeSet<(String, ClientId)>,
    /// What every worker makes that ever was.
    pub kinds: BTreeMap<ClientId, Kind>,
    /// How much memory each node has.
    pub memory: BTreeMap<String, u64>,
    /// And how much of it the tenant [`LIMITED`] may have, if there is a limit for him.
    pub limits: BTreeMap<String, Option<u64>>,
    pub tasks: BTreeMap<(String, ClientId, Tag), Task>,
    /// Local tag of a pusher -> the tag that it pushes to.
    pub pushed_as: BTreeMap<Tag, Tag>,
    next_request: u64,
    next_client: ClientId,
    pub books: BTreeMap<String, Books>,
    pub behind: BTreeMap<String, Behind>,
    /// Nodes whose disk does not do what it should.
    pub sick: BTreeSet<String>,
    /// Blocks that were deleted at a node when nobody else had them and nobody was about to make them: until somebody
    /// does, they are not to come back there.
    pub banished: BTreeSet<(String, BlockKey)>,
    /// Blocks in DRAM of which a bit has flipped.
    pub rotten: BTreeSet<(String, RegionId, SlotRef)>,
    pub objects: BTreeMap<String, Objects>,
    /// Answers to flushes, in order.
    pub flushed: Vec<(Ticket, bool)>,
    pub done: Done,
    /// Nothing dies, nothing rots and no link breaks.
    pub calm: bool,
}

impl Model {
    pub fn new(seed: u64, calm: bool) -> Self {
        let (corrupt, lose) = if calm { (0, 0) } else { (20, 20) };
        let faults = Faults { corrupt, lose, ..Faults::default() };
        let mut random = Random(seed ^ 0xABCD);
        let nodes: Vec<&str> = NAMES[..2 + seed as usize % 3].to_vec();
        let behind = nodes.iter().map(|node| ((*node).into(), Behind::any(&mut random))).collect();
        let mut model = Self {
            world: World::new(seed, faults),
            random,
            nodes: nodes.clone(),
            addresses: BTreeMap::new(),
            clients: BTreeSet::new(),
            kinds: BTreeMap::new(),
            memory: BTreeMap::new(),
            limits: BTreeMap::new(),
            tasks: BTreeMap::new(),
            pushed_as: BTreeMap::new(),
            next_request: 1,
            next_client: 1,
            books: BTreeMap::new(),
            behind,
            sick: BTreeSet::new(),
            banished: BTreeSet::new(),
            rotten: BTreeSet::new(),
            objects: BTreeMap::new(),
            flushed: Vec::new(),
            done: Done::default(),
            calm,
        };
        nodes.iter().for_each(|node| model.start(node));
        model
    }

    pub fn engine(&self, node: &str) -> &Engine {
        self.world.engine(node).expect("all nodes live")
    }

    pub fn order(&mut self, node: &str, order: DaemonOrder) {
        self.world.order(node, order);
        assert!(!self.engine(node).is_dumping(), "so few blocks are told at once");
        self.take_reports();
    }

    pub fn attach(&mut self, node: &str, kind: Kind) {
        let client = self.client();
        self.kinds.insert(client, kind);
        let (layout, namespace) = (LAYOUTS[kind.layout], kind.namespace);
        self.world.request(node, client, LocalRequest::Attach { ticket: client, layout, namespace });
        self.clients.insert((node.into(), client));
    }

    pub fn client(&mut self) -> ClientId {
        self.next_client += 1;
        self.next_client - 1
    }

    // -- choices -----------------------------------------------------------------------------------------------------

    pub fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.random.below(from.len() as u64) as usize].clone()
    }

    pub fn pick_client(&mut self, node: &str, kind: Option<Kind>) -> Option<ClientId> {
        let suits = |client: &ClientId| kind.is_none_or(|kind| self.kinds[client] == kind);
        let here = self.clients.iter().filter(|(at, _)| at == node).map(|(_, client)| *client);
        let here: Vec<ClientId> = here.filter(suits).collect();
        (!here.is_empty()).then(|| self.pick(&here))
    }

    pub fn tag(&mut self) -> Tag {
        self.next_request += 1;
        Tag { request: self.next_request, attempt: 0, worker: 7 }
    }

    fn sources(&mut self, most: u64) -> Vec<NodeAddress> {
        let nodes: Vec<NodeAddress> = self.addresses.values().cloned().collect();
        (0..self.random.below(most + 1)).map(|_| self.pick(&nodes)).collect()
    }

    fn some_key(&mut self, node: &str) -> Option<BlockKey> {
        let keys: Vec<BlockKey> = self.books[node].keys().into_iter().collect();
        (!keys.is_empty()).then(|| self.pick(&keys))
    }

    // -- workers -----------------------------------------------------------------------------------------------------

    pub fn begin(&mut self, node: &str, client: ClientId, tag: Tag, task: Task) {
        let Task { keys, private, part } = &task;
        let request = match part {
            Part::Holder { .. } => {
                let mode = if self.random.permille(700) { GrantMode::Wait } else { GrantMode::Now };
                let (private, tenant) = (u8::from(*private), tenant(keys));
                LocalRequest::Grant { tag, keys: keys.clone(), private, parent: ROOT, position: 0, mode, tenant }
            }
            Part::Pusher { to, .. } => {
                LocalRequest::Open { tag, to: to.clone(), within_ms: 1 + self.random.below(200) }
            }
            Part::Looker => LocalRequest::Lookup { tag, keys: keys.clone() },
        };
        if makes(&task) {
            self.banished.retain(|(_, key)| !task.keys.contains(key));
        }
        self.tasks.insert((node.into(), client, tag), task);
        self.world.request(node, client, request);
    }

    pub fn end(&mut self, node: &str, client: ClientId, tag: Tag) {
        self.tasks.remove(&(node.to_owned(), client, tag));
        self.world.request(node, client, LocalRequest::End { tag });
    }

    /// A request: a grant here, a pusher there (maybe on the same node), each begun at its own time.
    fn hand_off(&mut self, node: &str, client: ClientId, other: &str) {
        let kind = self.kinds[&client];
        let (keys, private) = (prompt(kind, &mut self.random), self.random.permille(800));
        let (tag, local) = (self.tag(), self.tag());
        let Some(pusher) = self.pick_client(other, Some(kind)) else { return };
        if other == node && pusher == client {
            return;
        }
        self.pushed_as.insert(local, tag);
        let fill = if self.random.permille(500) { Fill::Own } else { Fill::Layers };
        let push = Part::pusher(self.addresses[node].clone(), local);
        let begin: [(&str, ClientId, Tag, Part); 3] = [
            (node, client, tag, Part::holder(Fill::Pushed)),
            (other, pusher, local, Part::holder(fill)),
            (other, pusher, tag, push),
        ];
        let first = self.random.below(3) as usize;
        for step in 0..3 {
            let (at, by, tag, part) = begin[(first + step) % 3].clone();
            if self.clients.contains(&(at.to_owned(), by)) {
                self.begin(at, by, tag, Task { keys: keys.clone(), private, part });
            }
            self.pass();
        }
    }

    fn fetch(&mut self, node: &str, client: ClientId, other: &str) {
        let kind = self.kinds[&client];
        let mut keys = prompt(kind, &mut self.random);
        // Rather something that is there than not.
        for _ in 0..4 {
            if keys.first().is_none_or(|key| !self.books[other].has(key)) {
                keys = prompt(kind, &mut self.random);
            }
        }
        let mut sources = self.sources(2);
        sources.push(self.addresses[other].clone());
        let task = Task { keys, private: false, part: Part::holder(Fill::Fetch(sources)) };
        // Sometimes two want the same at once.
        let again = self.pick_client(node, Some(kind)).filter(|_| self.random.permille(400));
        for client in again.into_iter().chain([client]) {
            let tag = self.tag();
            self.begin(node, client, tag, task.clone());
        }
        if self.random.permille(100) {
            // While they are read.
            self.handle_events();
            self.evict(node, task.keys);
        }
    }

    /// Several: else all room is soon held, and nothing goes on.
    fn end_some(&mut self) {
        for _ in 0..self.random.below(16) {
            let running: Vec<_> = self.tasks.keys().cloned().collect();
            if !running.is_empty() {
                let (node, client, tag) = self.pick(&running);
                self.end(&node, client, tag);
            }
        }
    }

    // -- whoever runs a daemon ---------------------------------------------------------------------------------------

    /// What is there now is to be durable.
    pub fn flush(&mut self, node: &str, ticket: Ticket) {
        self.sync_objects(node);
        self.books.get_mut(node).expect("it lives").flush(ticket);
        self.objects.get_mut(node).expect("each has some").flush(ticket);
    }

    fn evict_some(&mut self, node: &str) {
        let keys: BTreeSet<BlockKey> = (0..1 + self.random.below(6)).filter_map(|_| self.some_key(node)).collect();
        self.evict(node, keys.into_iter().collect());
    }

    fn evict(&mut self, node: &str, keys: Vec<BlockKey>) {
        let evicted = self.world.act(node, |engine, now, out| engine.evict(&keys, now, out)).expect("it lives");
        self.take_reports();
        let Evicted { dropped, held, missing } = evicted;
        assert_eq!(dropped + held + missing, keys.len() as u64, "{evicted:?} of {keys:?}");
        // Not what was reported: a tier may have let go of a block and not told it yet.
        let there: BTreeSet<BlockKey> = self.listed(node).iter().map(|listed| listed.key).collect();
        let left = keys.iter().filter(|key| there.contains(key)).count() as u64;
        assert_eq!(left, held, "what nobody holds is gone: {evicted:?} of {keys:?}");
        self.await_deletion(node, keys);
    }

    /// A namespace, a tenant, or everything.
    fn clear(&mut self, node: &str) {
        let kind = self.pick(&kinds().collect::<Vec<_>>());
        let whose = match self.random.below(5) {
            0 => None,
            1 | 2 => Some(Whose::Namespace(kind.namespace)),
            _ => Some(Whose::Tenant(1 + self.random.below(4))),
        };
        let (mut from, mut held) = (Some(Cursor { store: 0, slot: 0 }), 0);
        while let Some(at) = from {
            let walk = |engine: &mut Engine, now, out: &mut Vec<_>| engine.evict_stretch(at, whose, now, out);
            let (evicted, next) = self.world.act(node, walk).expect("it lives");
            (from, held) = (next, held + evicted.held);
        }
        self.take_reports();
        let meant = |key: &BlockKey| match whose {
            None => true,
            Some(Whose::Namespace(namespace)) => namespace_of(key) == namespace,
            Some(Whose::Tenant(tenant)) => tenant_of(key) == tenant,
        };
        let mut left = self.listed(node);
        left.retain(|listed| listed.owner.namespace != OBJECTS && meant(&listed.key));
        assert!(left.len() as u64 <= held, "{left:?} are left of {whose:?} at {node}, and {held} are held");
        let every = kinds().flat_map(|kind| all_prompts(kind).flatten()).filter(meant);
        self.await_deletion(node, every.collect());
    }

    /// All that is published, as `transferd keys` shows it.
    fn listed(&self, node: &str) -> Vec<Listed> {
        let (mut all, mut from) = (Vec::new(), Some(Cursor { store: 0, slot: 0 }));
        while let Some(at) = from {
            let (mut listed, next) = self.engine(node).keys(at, &Prefix::default(), None);
            all.append(&mut listed);
            from = next;
        }
        all
    }

    fn await_deletion(&mut self, node: &str, keys: Vec<BlockKey>) {
        self.banish(node, &keys);
        let flushed = self.world.act(node, Engine::flush_tier).expect("it lives");
        if let Some(number) = flushed {
            self.books.get_mut(node).expect("it lives").delete(number, keys);
        }
        self.take_reports();
    }

    fn banish(&mut self, node: &str, keys: &[BlockKey]) {
        // What comes from a peer comes although it was deleted here.
        if self.engine(node).unfinished().iter().any(|what| what.starts_with("fetch ")) {
            return;
        }
        let there: BTreeSet<BlockKey> = self.listed(node).iter().map(|listed| listed.key).collect();
        for key in keys {
            let others = self.books.iter().any(|(other, books)| other != node && books.has(key));
            let made = self.tasks.values().any(|task| makes(task) && task.keys.contains(key));
            if !there.contains(key) && !others && !made {
                self.banished.insert((node.into(), *key));
            }
        }
    }

    /// Looks for rot in DRAM, as `transferd verify` does.
    fn verify(&mut self, node: &str) {
        let mut from = Some(Cursor { store: 0, slot: 0 });
        while let Some(at) = from {
            let (stretch, next) = self.engine(node).stretch(at, Some(Medium::Dram));
            from = next;
            let Some(stretch) = stretch else { continue };
            let (arena, blocks) = (stretch.arena, stretch.blocks);
            let rotten = |slot: &SlotRef| arena.begin_read(*slot).is_some() && !arena.intact(*slot);
            let rotten: Vec<SlotRef> = blocks.iter().map(|(_, slot, _)| *slot).filter(rotten).collect();
            for slot in &rotten {
                assert!(self.is_rotten(node, &arena, *slot), "{slot:?} at {node} has rotten by itself");
            }
            let found = self.world.act(node, |engine, now, out| engine.found_rotten(&arena, &rotten, now, out));
            self.done.add("verified", found.expect("it lives"));
        }
        self.take_reports();
    }

    // -- faults ------------------------------------------------------------------------------------------------------

    /// A bit of a block in DRAM flips.
    fn rot(&mut self, node: &str) {
        let arenas: Vec<RegionId> = self.engine(node).arenas().map(|(region, _)| region).collect();
        let region = self.pick(&arenas);
        let (stretch, _) = self.engine(node).stretch(Cursor { store: region.0, slot: 0 }, None);
        let Some(stretch) = stretch.filter(|stretch| !stretch.blocks.is_empty()) else { return };
        let (_, slot, _) = self.pick(&stretch.blocks);
        // Twice would heal it.
        if self.rotten.insert((node.into(), region, slot)) {
            let strip = self.random.below(stretch.arena.layout().strips.into()) as u32;
            stretch.arena.corrupt_for_test(slot.slot, strip);
        }
    }

    fn harm(&mut self, node: &str) {
        let key = self.some_key(node);
        self.sick.insert(node.into());
        let behind = self.behind.get_mut(node).expect("each has some");
        if behind.harm(&mut self.random, key) {
            self.books.get_mut(node).expect("it lives").spoil();
        }
    }

    fn client_dies(&mut self, node: &str, client: ClientId) {
        self.clients.remove(&(node.to_owned(), client));
        self.tasks.retain(|(at, by, _), _| (at.as_str(), *by) != (node, client));
        self.world.client_gone(node, client);
        self.attach(node, self.kinds[&client]);
    }

    // -- one thing after the other -----------------------------------------------------------------------------------

    /// One random thing happens.
    pub fn act(&mut self) {
        let (node, other) = (self.pick(&self.nodes.clone()), self.pick(&self.nodes.clone()));
        let choice = self.random.below(if self.calm { 82 } else { 112 });
        let Some(client) = self.pick_client(node, None) else { return };
        let kind = self.kinds[&client];
        match choice {
            0..22 => self.hand_off(node, client, other),
            22..36 => self.fetch(node, client, other),
            36..38 => {
                let (keys, from) = (prompt(kind, &mut self.random), self.sources(2));
                let prefetch = LocalRequest::Prefetch { keys, parent: ROOT, position: 0, from };
                self.world.request(node, client, prefetch);
            }
            38..42 => {
                let (keys, private, tag) = (prompt(kind, &mut self.random), false, self.tag());
                self.begin(node, client, tag, Task { keys, private, part: Part::Looker });
            }
            42..52 => self.end_some(),
            52..56 => {
                let (keys, order) = (prompt(kind, &mut self.random), self.random.bits());
                let from = self.addresses[other].clone();
                self.order(node, DaemonOrder::Replicate { order, keys, parent: ROOT, position: 0, from });
            }
            56..59 => {
                let ticket = self.tag().request;
                self.take_reports();
                self.flush(node, ticket);
                self.world.request(node, client, LocalRequest::Flush { ticket });
            }
            59 => self.evict_some(node),
            60 => {
                if self.random.permille(300) {
                    self.clear(node);
                }
            }
            61 => self.verify(node),
            62 => {
                let on = self.random.permille(300);
                self.world.act(node, |engine, _, _| engine.drain(on));
            }
            63..82 => self.act_on_objects(node),
            82..87 => self.client_dies(node, client),
            87 | 88 => self.start(node),
            89..92 => self.world.break_session(node, other),
            92..95 if node != other => self.world.cut(node, other),
            95..98 => self.world.heal(node, other),
            98 => self.world.network.corrupt_next(),
            99 => self.world.network.drop_strip_of_next(),
            100 => (0..4).for_each(|_| self.world.network.lose_next()),
            101 => self.world.network.break_path(node, other, Transport::Sim),
            102 => self.harm(node),
            103..105 => {
                self.behind[node].heal();
                self.sick.remove(node);
            }
            105..107 => self.rot(node),
            // One does not listen to its peers, maybe for longer than they wait for it.
            107 | 108 => {
                self.world.deafen(node);
                if self.random.permille(500) {
                    self.world.run(6_000 * MILLISECOND);
                }
            }
            109 | 110 => self.world.listen(node),
            _ => {
                let held: Vec<_> = self.tasks.keys().filter(|(at, ..)| at == node).cloned().collect();
                if !held.is_empty() {
                    let (node, client, tag) = self.pick(&held);
                    self.world.request(&node, client, LocalRequest::Corrupt { tag, index: 0 });
                }
            }
        }
        self.pass();
        self.check_objects(node);
        self.behind[node].check();
    }

    pub fn pass(&mut self) {
        // Now and then several things happen at once.
        let time = if self.random.permille(200) { 0 } else { self.random.below(20 * MILLISECOND) };
        self.world.run(time);
        self.handle_events();
    }

    // -- what is told ------------------------------------------------------------------------------------------------

    pub fn handle_events(&mut self) {
        // What clients do in answer may be answered at once.
        for _ in 0..100 {
            self.take_reports();
            let events = self.world.take_events();
            if events.is_empty() {
                return;
            }
            events.into_iter().for_each(|(node, client, event)| self.told(&node, client, event));
        }
        panic!("clients and daemons talk without end");
    }

    pub fn take_reports(&mut self) {
        for (node, report) in self.world.take_reports() {
            if let DaemonReport::Stored { key, medium: Medium::Dram, .. } = report {
                let back = self.banished.contains(&(node.clone(), key));
                assert!(!back, "{key:?} is back at {node}, where it was deleted, and nobody has made it since");
                self.banished.retain(|(_, other)| *other != key);
            }
            self.books.get_mut(&node).expect("every node has some").report(&node, report);
        }
        for (node, number, ok) in self.world.take_flushed() {
            self.done.add("deleted", self.books.get_mut(&node).expect("every node has some").deleted(number, ok));
        }
    }
}

/// True if somebody may write the blocks of this task.
fn makes(task: &Task) -> bool {
    !matches!(task.part, Part::Holder { fill: Fill::Fetch(_), .. } | Part::Looker)
}

//! The medium behind the arena, in virtual time.
//!
//! Goal: what leaves the arena is still there, comes back when it is wanted by anybody, right or not at all; nobody fetches
//! what is on its way already; a stop loses nothing and a start remembers.
//! Method: two nodes with small arenas and a tier in memory each, whose shelf the test can see and spoil; the engines'
//! `check` runs after every input.

use std::collections::BTreeMap;
use std::sync::Arc;

use pyengine_transfer::engine::{Engine, Settings};
use pyengine_transfer::memory::{Arena, slot_bytes};
use pyengine_transfer::messages::{
    DaemonOrder, DaemonReport, Found, GrantMode, GrantedSlot, LocalEvent, LocalRequest, Refusal,
};
use pyengine_transfer::pool::tier::Health;
use pyengine_transfer::pool::twin::Shelf;
use pyengine_transfer::transport::sim::{Faults, World};
use pyengine_transfer::types::{BlockKey, ClientId, Layout, Medium, NodeAddress, SlotRef, Tag};

const LAYOUT: Layout = Layout { strips: 3, strip_bytes: 16 };
const SECOND: u64 = 1_000_000_000;
const ROOT: BlockKey = BlockKey([0; 16]);
const SLOTS: u64 = 8;
/// Clients, by their node.
const A: ClientId = 1;
const A2: ClientId = 2;
const B: ClientId = 3;

fn key(number: u8) -> BlockKey {
    BlockKey([number; 16])
}

fn tag(request: u64) -> Tag {
    Tag { request, attempt: 1, worker: 9 }
}

fn block(number: u8) -> Vec<u8> {
    (0..48).map(|byte| byte ^ number).collect()
}

fn node_of(client: ClientId) -> &'static str {
    if client == B { "b" } else { "a" }
}

struct Stage {
    world: World,
    shelves: BTreeMap<&'static str, Shelf>,
    nodes: BTreeMap<&'static str, NodeAddress>,
    told: Vec<(ClientId, LocalEvent)>,
    reports: Vec<(String, DaemonReport)>,
    next_tag: u64,
}

impl Stage {
    fn new() -> Self {
        let shelves = ["a", "b"].map(|node| (node, Shelf::default())).into();
        let world = World::new(7, Faults::default());
        let mut stage =
            Self { world, shelves, nodes: BTreeMap::new(), told: Vec::new(), reports: Vec::new(), next_tag: 1000 };
        ["a", "b"].into_iter().for_each(|node| stage.start(node, 1 << 20));
        [A, A2, B].into_iter().for_each(|client| stage.attach(client));
        stage
    }

    fn start(&mut self, node: &'static str, limit: u64) {
        let settings = Settings::new(4096 + SLOTS * slot_bytes(LAYOUT).expect("possible"));
        let tier = Some((self.shelves[node].clone(), limit));
        let address = self.world.start_over(node, settings, tier);
        self.nodes.insert(node, address);
    }

    fn attach(&mut self, client: ClientId) {
        self.ask(client, LocalRequest::Attach { ticket: 0, layout: LAYOUT, namespace: 40 + client });
        assert!(matches!(self.told(client).as_slice(), [LocalEvent::Attached { .. }]));
    }

    fn ask(&mut self, client: ClientId, request: LocalRequest) {
        self.world.request(node_of(client), client, request);
        self.look();
    }

    fn look(&mut self) {
        self.told.extend(self.world.take_events().into_iter().map(|(_, client, event)| (client, event)));
        self.reports.extend(self.world.take_reports());
    }

    fn run(&mut self, time: u64) {
        self.world.run(time);
        self.look();
    }

    fn told(&mut self, client: ClientId) -> Vec<LocalEvent> {
        self.look();
        let (mine, others): (Vec<_>, Vec<_>) = self.told.drain(..).partition(|(told, _)| *told == client);
        self.told = others;
        mine.into_iter().map(|(_, event)| event).collect()
    }

    fn engine(&self, node: &str) -> &Engine {
        self.world.engine(node).expect("it lives")
    }

    fn arena(&self, client: ClientId) -> Arc<Arena> {
        self.engine(node_of(client)).arena(client).expect("attached")
    }

    fn counter(&self, node: &str, name: &str, labels: &str) -> u64 {
        let mut counters = self.engine(node).counters().into_iter();
        let found = counters.find(|(sample, _)| sample.starts_with(name) && sample.contains(labels));
        found.unwrap_or_else(|| panic!("no {name} {labels}")).1
    }

    /// A grant that is held at once.
    fn granted(&mut self, client: ClientId, tag: Tag, numbers: &[u8]) -> Vec<GrantedSlot> {
        let keys = numbers.iter().map(|number| key(*number)).collect();
        let mode = GrantMode::Wait;
        self.ask(client, LocalRequest::Grant { tag, keys, private: 0, parent: ROOT, position: 0, mode, tenant: 6 });
        match self.told(client).as_slice() {
            [LocalEvent::Granted { slots, .. }] => slots.clone(),
            other => panic!("not granted but {other:?}"),
        }
    }

    fn end(&mut self, client: ClientId, tag: Tag) {
        self.ask(client, LocalRequest::End { tag });
    }

    fn tag(&mut self) -> Tag {
        self.next_tag += 1;
        tag(self.next_tag)
    }

    /// Makes blocks, each by itself, and lets go of them.
    fn store(&mut self, client: ClientId, numbers: impl IntoIterator<Item = u8>) {
        for number in numbers {
            let tag = self.tag();
            let slots = self.granted(client, tag, &[number]);
            self.arena(client).store(slots[0].slot, 0, &block(number)).expect("in range");
            self.ask(client, LocalRequest::Commit { tag, indices: vec![0] });
            self.end(client, tag);
        }
    }

    fn fetch(&mut self, client: ClientId, tag: Tag, count: u32, from: &[&str]) {
        let from = from.iter().map(|node| self.nodes[node].clone()).collect();
        self.ask(client, LocalRequest::Fetch { tag, indices: (0..count).collect(), from });
    }

    /// Fetches one block under a tag of its own: where it came from, and its slot, checked.
    fn fetch_one(&mut self, client: ClientId, number: u8, from: &[&str]) -> Result<(bool, Medium), Refusal> {
        let tag = self.tag();
        let slots = self.granted(client, tag, &[number]);
        assert!(!slots[0].committed, "{number} is in the arena");
        self.fetch(client, tag, 1, from);
        self.run(SECOND / 10);
        let found = self.fetched(client, tag, 0);
        if let Ok(found) = found {
            assert_eq!(self.load(client, found.slot), Some(block(number)));
        }
        self.end(client, tag);
        found.map(|found| (found.peer, found.medium))
    }

    fn fetched(&mut self, client: ClientId, tag: Tag, index: u32) -> Result<Found, Refusal> {
        let told = self.told(client);
        match told.as_slice() {
            [LocalEvent::Fetched { tag: its, index: of, found }] if *its == tag && *of == index => *found,
            other => panic!("not fetched but {other:?}"),
        }
    }

    fn load(&self, client: ClientId, slot: SlotRef) -> Option<Vec<u8>> {
        let mut bytes = vec![0; LAYOUT.block_bytes()];
        self.arena(client).load(slot, 0, &mut bytes).expect("in range").then_some(bytes)
    }

    /// Which of these are in the arena.
    fn here(&mut self, client: ClientId, numbers: impl IntoIterator<Item = u8>) -> Vec<u8> {
        let mut here = Vec::new();
        for number in numbers {
            let tag = self.tag();
            self.ask(client, LocalRequest::Lookup { tag, keys: vec![key(number)] });
            let told = self.told(client);
            let [LocalEvent::Located { slots, .. }] = told.as_slice() else { panic!("{told:?}") };
            here.extend((slots.len() == 1).then_some(number));
            self.end(client, tag);
        }
        here
    }

    /// What the conductor would know of a node from a dump: block and medium.
    fn dump(&mut self, node: &str) -> Vec<(u8, Medium)> {
        self.look();
        self.reports.clear();
        self.world.order(node, DaemonOrder::Dump);
        self.look();
        let mut known = Vec::new();
        for (_, report) in &self.reports {
            if let DaemonReport::Dump { blocks, .. } = report {
                known.extend(blocks.iter().map(|(key, _, _, medium)| (key.0[0], *medium)));
            }
        }
        known.sort_unstable();
        known
    }

    fn expect_idle(&mut self) {
        self.run(SECOND);
        for node in ["a", "b"] {
            if let Some(engine) = self.world.engine(node) {
                assert!(engine.idle(), "{node}: {:#?}", engine.unfinished());
            }
        }
    }
}

// Goal: what is used twice is written, and what is about to go; so the arena can be used for new blocks and the old ones
// are found on the disk, by their maker and by a peer. Method: more blocks than there are slots, in steps.
#[test]
fn what_leaves_the_arena_is_on_the_disk() {
    let mut stage = Stage::new();
    stage.store(A, 1..=3);
    stage.run(SECOND);
    assert_eq!(stage.counter("a", "pyengine_pool_demotions_total", ""), 0, "nobody needs room, nobody came twice");
    assert_eq!(stage.here(A, [2]), [2]);
    stage.run(SECOND);
    assert_eq!(stage.dump("a"), [(1, Medium::Dram), (2, Medium::Dram), (2, Medium::Ssd), (3, Medium::Dram)]);
    // One at a time: there is always time to write what goes next.
    for number in 4..=20 {
        stage.store(A, [number]);
        stage.run(SECOND);
    }
    assert_eq!(stage.counter("a", "pyengine_pool_dropped_total", ""), 0);
    let known: Vec<u8> = stage.dump("a").iter().filter(|(_, medium)| *medium == Medium::Ssd).map(|at| at.0).collect();
    assert!((1..=12).all(|number| known.contains(&number)), "{known:?}");
    // Its own client reads it, and so does a peer, through the arena.
    assert_eq!(stage.fetch_one(A, 1, &[]), Ok((false, Medium::Ssd)));
    assert_eq!(stage.here(A2, [1]), [1], "it is in the arena again");
    assert_eq!(stage.fetch_one(B, 3, &["a"]), Ok((true, Medium::Ssd)));
    assert_eq!(stage.here(A, [3]), [3], "it went through the arena there");
    assert_eq!(stage.fetch_one(B, 1, &["a"]), Ok((true, Medium::Dram)));
    assert_eq!(stage.counter("a", "pyengine_pool_promotions_total", ""), 2);
    assert_eq!(stage.counter("a", "pyengine_pool_hits_total", "ssd"), 2);
    stage.expect_idle();
}

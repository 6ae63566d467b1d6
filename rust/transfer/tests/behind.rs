//! The medium behind the arena, in virtual time.
//!
//! Goal: what leaves the arena is still there, comes back when it is wanted by anybody, right or not at all; nobody fetches
//! what is on its way already; a stop loses nothing and a start remembers.
//! Method: two nodes with small arenas and a tier in memory each, whose shelf the test can see and spoil; the engines'
//! `check` runs after every input.

use std::collections::BTreeMap;
use std::sync::Arc;

use pyengine_transfer::admin::{Cursor, Prefix};
use pyengine_transfer::engine::{Engine, Settings};
use pyengine_transfer::memory::{Arena, slot_bytes};
use pyengine_transfer::messages::{
    DaemonOrder, DaemonReport, Found, GrantMode, GrantedSlot, LocalEvent, LocalRequest, Refusal,
};
use pyengine_transfer::pool::policy::Policy;
use pyengine_transfer::pool::tier::Health;
use pyengine_transfer::pool::twin::Shelf;
use pyengine_transfer::transport::sim::{Faults, World};
use pyengine_transfer::types::{BlockKey, ClientId, Layout, Medium, NodeAddress, Owner, SlotRef, Tag};

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
        let bytes = 4096 + SLOTS * slot_bytes(LAYOUT).expect("possible");
        // What is used last goes last: these tests say what that is.
        let settings = Settings { eviction: Policy::named("lru").expect("known"), ..Settings::new(bytes) };
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

// Goal: who looks a prefix up learns how much more of it the disk has, and need ask for no more. Method: a prefix in the
// arena, on the disk, in both and nowhere, in turns.
#[test]
fn a_lookup_tells_what_is_on_the_disk_behind() {
    let mut stage = Stage::new();
    stage.store(A, 1..=6);
    stage.run(SECOND);
    // Used once more, so written; the others are in the arena only.
    assert_eq!(stage.here(A, [2, 3, 5]), [2, 3, 5]);
    stage.run(SECOND);
    let located = |stage: &mut Stage, numbers: &[u8]| {
        let tag = stage.tag();
        let keys = numbers.iter().map(|number| key(*number)).collect();
        stage.ask(A, LocalRequest::Lookup { tag, keys });
        let told = stage.told(A);
        let [LocalEvent::Located { slots, behind, .. }] = told.as_slice() else { panic!("{told:?}") };
        let found = (slots.len(), *behind);
        stage.end(A, tag);
        found
    };
    assert_eq!(located(&mut stage, &[1, 2, 3]), (3, 0), "all is in the arena");
    stage.store(A, 7..=8);
    assert_eq!(
        located(&mut stage, &[1, 2, 3, 4, 5, 6, 7, 8]),
        (7, 0),
        "a slot that may not be pinned is not read either"
    );
    stage.world.stop("a");
    stage.start("a", 1 << 20);
    stage.attach(A);
    // A stop has written all. Some come back into the arena.
    assert_eq!(stage.fetch_one(A, 1, &[]), Ok((false, Medium::Ssd)));
    assert_eq!(stage.fetch_one(A, 4, &[]), Ok((false, Medium::Ssd)));
    assert_eq!(located(&mut stage, &[1, 2, 3, 4, 5, 6, 99, 7]), (1, 5));
    assert_eq!(located(&mut stage, &[1, 2, 99, 3]), (1, 1), "up to the first that is nowhere");
    assert_eq!(located(&mut stage, &[2, 1]), (0, 2));
    assert_eq!(located(&mut stage, &[99, 1]), (0, 0));
    assert_eq!(located(&mut stage, &[1, 4]), (2, 0));
    stage.expect_idle();
}

// Goal: nothing is dropped where the disk has time, however many slots a grant takes. Method: grants of three of eight slots.
#[test]
fn as_much_is_written_ahead_as_grants_take() {
    let mut stage = Stage::new();
    for first in (1..=40).step_by(3) {
        let numbers = [first, first + 1, first + 2];
        let tag = stage.tag();
        let slots = stage.granted(A, tag, &numbers);
        for (slot, number) in slots.iter().zip(numbers) {
            stage.arena(A).store(slot.slot, 0, &block(number)).expect("in range");
        }
        stage.ask(A, LocalRequest::Commit { tag, indices: vec![0, 1, 2] });
        stage.end(A, tag);
        stage.run(SECOND);
    }
    assert!(stage.counter("a", "pyengine_pool_demotions_total", "") >= 42 - SLOTS);
    assert_eq!(stage.counter("a", "pyengine_pool_dropped_total", ""), 0);
}

// Goal: several clients that want one block get it by one read or one copy, each in a slot that it holds; if the one for
// whom it is fetched leaves, the next goes on. Method: two clients of one node and one block, by disk and by peer.
#[test]
fn one_flight_for_all_who_want_it() {
    let mut stage = Stage::new();
    stage.store(B, [1, 2, 3, 4]);
    // From a peer: the second asks while the first one's copy is on its way.
    for (number, first_leaves) in [(1, false), (2, true)] {
        let (first, second) = (stage.tag(), stage.tag());
        let slots = [(A, first), (A2, second)].map(|(client, tag)| stage.granted(client, tag, &[number])[0].slot);
        assert_ne!(slots[0], slots[1]);
        stage.fetch(A, first, 1, &["b"]);
        stage.fetch(A2, second, 1, &["b"]);
        if first_leaves {
            stage.end(A, first);
        }
        stage.run(SECOND / 10);
        let second_has = stage.fetched(A2, second, 0).expect("it is there");
        assert!(second_has.peer && stage.load(A2, second_has.slot) == Some(block(number)));
        if first_leaves {
            assert_eq!(second_has.slot, slots[1], "it was fetched for this one then");
            assert_eq!(stage.told(A), []);
        } else {
            let first_has = stage.fetched(A, first, 0).expect("it is there");
            assert_eq!((first_has.slot, second_has.slot), (slots[0], slots[0]), "both have the one that came");
            // It stays for the second when the first lets go.
            stage.end(A, first);
            assert_eq!(stage.load(A2, slots[0]), Some(block(number)));
        }
        stage.end(A2, second);
    }
    assert_eq!(stage.counter("a", "pyengine_single_flight_total", ""), 2);
    let copies = stage.counter("b", "pyengine_transfer_blocks_total", r#"transport="sim",direction="out""#);
    assert!((2..=3).contains(&copies), "one copy for the first block, at most two for the second, not {copies}");

    // From the disk: the same.
    stage.world.stop("a");
    stage.start("a", 1 << 20);
    [A, A2].into_iter().for_each(|client| stage.attach(client));
    let (first, second) = (stage.tag(), stage.tag());
    let slot = stage.granted(A, first, &[1])[0].slot;
    stage.granted(A2, second, &[1]);
    stage.fetch(A, first, 1, &[]);
    stage.fetch(A2, second, 1, &[]);
    stage.run(SECOND / 10);
    for (client, tag) in [(A, first), (A2, second)] {
        assert_eq!(stage.fetched(client, tag, 0), Ok(Found { slot, peer: false, medium: Medium::Ssd }));
        stage.end(client, tag);
    }
    assert_eq!(stage.counter("a", "pyengine_pool_promotions_total", ""), 1);
    assert_eq!(stage.counter("a", "pyengine_pool_hits_total", "ssd"), 2);
    // What came meanwhile by other means is found, and the slot that was reserved for it goes back.
    let late = stage.tag();
    let mine = stage.granted(A2, late, &[77])[0].slot;
    stage.store(A, [77]);
    stage.fetch(A2, late, 1, &["b"]);
    let found = stage.fetched(A2, late, 0).expect("it is there");
    assert!(!found.peer && found.medium == Medium::Dram && found.slot != mine);
    assert_eq!(stage.load(A2, found.slot), Some(block(77)));
    stage.end(A2, late);
    stage.expect_idle();
}

// Goal: sources are asked in their order, the own disk first; what one lacks or has rotten the next may have; at the end
// the last one's refusal is told; parts of one fetch come from several. Method: blocks that are here and there, and rot.
#[test]
fn each_source_is_tried_once_and_in_order() {
    let mut stage = Stage::new();
    stage.store(B, [1, 2, 3]);
    stage.store(A, [3, 4]);
    stage.world.stop("a");
    stage.start("a", 1 << 20);
    stage.attach(A);
    assert_eq!(stage.dump("a"), [(3, Medium::Ssd), (4, Medium::Ssd)]);
    let nobody = NodeAddress { node: "c".into(), address: "c:1".into(), incarnation: 9 };
    let (b, a) = (stage.nodes["b"].clone(), stage.nodes["a"].clone());
    let wanted = stage.tag();
    stage.granted(A, wanted, &[1, 3, 4, 5]);
    let from = vec![a, nobody.clone(), b.clone()];
    stage.ask(A, LocalRequest::Fetch { tag: wanted, indices: (0..4).collect(), from });
    stage.run(SECOND);
    let mut told = stage.told(A);
    told.sort_by_key(|event| format!("{event:?}"));
    let origin = |event: &LocalEvent| match event {
        LocalEvent::Fetched { found, .. } => found.map(|found| (found.peer, found.medium)),
        other => panic!("{other:?}"),
    };
    let expected =
        [Ok((true, Medium::Dram)), Ok((false, Medium::Ssd)), Ok((false, Medium::Ssd)), Err(Refusal::Missing)];
    assert_eq!(told.iter().map(origin).collect::<Vec<_>>(), expected);
    stage.end(A, wanted);
    // The last refusal counts.
    let wanted = stage.tag();
    stage.granted(A, wanted, &[6]);
    stage.ask(A, LocalRequest::Fetch { tag: wanted, indices: vec![0], from: vec![b, nobody] });
    stage.run(SECOND);
    assert_eq!(stage.fetched(A, wanted, 0), Err(Refusal::Unreachable));
    stage.end(A, wanted);
    // Rotten on the disk: dropped there and told, and the peer has it.
    stage.world.stop("a");
    stage.start("a", 1 << 20);
    stage.attach(A);
    stage.run(SECOND);
    assert!(stage.shelves["a"].rot(&key(3)) && stage.shelves["a"].rot(&key(4)));
    assert_eq!(stage.fetch_one(A, 3, &["b"]), Ok((true, Medium::Dram)));
    assert_eq!(stage.fetch_one(A, 4, &[]), Err(Refusal::Corrupt));
    assert_eq!(stage.fetch_one(A, 4, &["b"]), Err(Refusal::Missing));
    assert_eq!(stage.counter("a", "pyengine_checksum_failures_total", "ssd"), 2);
    assert_eq!(stage.dump("a"), [(1, Medium::Ssd), (3, Medium::Dram)], "and so the conductor knows");
    // Rotten in the arena: the disk still has it.
    assert_eq!(stage.fetch_one(A, 1, &[]), Ok((false, Medium::Ssd)));
    let held = stage.tag();
    let slot = stage.granted(A, held, &[1])[0].slot;
    stage.arena(A).corrupt_for_test(slot.slot, 0);
    assert_eq!(stage.load(A, slot), None);
    stage.ask(A, LocalRequest::Corrupt { tag: held, index: 0 });
    stage.end(A, held);
    assert_eq!(stage.fetch_one(A, 1, &[]), Ok((false, Medium::Ssd)));
    stage.expect_idle();
}

// Goal: a stop loses nothing that is published, a start remembers it with all that is known of it, and serves it though no
// client has come back. Method: stop and start; ask from the peer; a kill loses what was not written, and only that.
#[test]
fn a_stop_loses_nothing() {
    let mut stage = Stage::new();
    stage.store(A, 1..=5);
    let held = stage.tag();
    stage.granted(A, held, &[9]);
    let before = stage.dump("a");
    assert_eq!(before, [1, 2, 3, 4, 5].map(|number| (number, Medium::Dram)));
    stage.world.stop("a");
    stage.start("a", 1 << 20);
    assert_eq!(stage.engine("a").next_sequence(), 5, "so that whoever keeps an index asks for a dump");
    assert_eq!(stage.dump("a"), [1, 2, 3, 4, 5].map(|number| (number, Medium::Ssd)), "nobody has attached");
    stage.reports.clear();
    stage.run(2 * SECOND);
    let beat = stage.reports.iter().rev().find_map(|(node, report)| match report {
        DaemonReport::Heartbeat { count, xor, .. } if node == "a" => Some((*count, xor.0)),
        _ => None,
    });
    let sum = (1..=5).fold(0, |sum, number: u8| sum ^ number);
    assert_eq!(beat, Some((5, [sum; 16])));
    for number in [2, 4] {
        assert_eq!(stage.fetch_one(B, number, &["a"]), Ok((true, Medium::Ssd)), "served with no client of its own");
    }
    // All that is known of them came back too.
    stage.attach(A);
    let keys = (1..=5).map(key).collect();
    let (parent, from) = (ROOT, Vec::new());
    stage.ask(A, LocalRequest::Prefetch { keys, parent, position: 0, from });
    stage.run(SECOND);
    assert_eq!(stage.told(A), [], "a hint is never answered");
    assert_eq!(stage.here(A, 1..=5), [1, 2, 3, 4, 5]);
    // A kill loses what was not written.
    stage.store(A, [6]);
    stage.world.kill("a");
    stage.start("a", 1 << 20);
    assert_eq!(stage.dump("a"), [1, 2, 3, 4, 5].map(|number| (number, Medium::Ssd)));
    stage.expect_idle();
}

// Goal: a hint brings blocks from peers too, as far as there is room, and holds nothing. Method: more than fit.
#[test]
fn hints_are_taken_as_far_as_there_is_room() {
    let mut stage = Stage::new();
    stage.store(B, 1..=7);
    let keys = (1..=7).chain([99]).map(key).collect();
    let from = vec![stage.nodes["b"].clone()];
    stage.ask(A, LocalRequest::Prefetch { keys, parent: ROOT, position: 0, from });
    stage.run(SECOND);
    assert_eq!(stage.here(A, 1..=7).len(), 7);
    assert_eq!(stage.counter("a", "pyengine_pool_hits_total", "ssd"), 0);
    stage.expect_idle();
    // Nobody attached may hint at anything.
    stage.ask(77, LocalRequest::Prefetch { keys: vec![key(50)], parent: ROOT, position: 0, from: Vec::new() });
    stage.expect_idle();
}

// Goal: a block that nobody has asked for stays whose it was, so that a deletion finds every copy. Method: a tenant's blocks
// come back from the disk by another client's hint, and to a peer by its hint and by an order; each node says whose they are.
#[test]
fn what_is_brought_for_nobody_stays_whose_it_was() {
    let mut stage = Stage::new();
    stage.store(A, 1..=2);
    assert_eq!(stage.here(A, 1..=2), [1, 2]);
    stage.run(SECOND);
    stage.world.stop("a");
    stage.start("a", 1 << 20);
    stage.attach(A2);
    let from = vec![stage.nodes["a"].clone()];
    let hint = |numbers: std::ops::RangeInclusive<u8>, from| LocalRequest::Prefetch {
        keys: numbers.map(key).collect(),
        parent: ROOT,
        position: 0,
        from,
    };
    let owners = |stage: &Stage, node| {
        let (blocks, _) = stage.engine(node).keys(Cursor::default(), &Prefix::default(), Some(Medium::Dram));
        let mut owners: Vec<(u8, Owner)> = blocks.iter().map(|block| (block.key.0[0], block.owner)).collect();
        owners.sort_unstable();
        owners
    };
    let his = Owner { namespace: 40 + A, tenant: 6 };
    // The peer's by way of the arena there, and from it.
    stage.ask(B, hint(1..=1, from.clone()));
    stage.run(SECOND);
    assert_eq!((owners(&stage, "a"), owners(&stage, "b")), (vec![(1, his)], vec![(1, his)]));
    stage.ask(A2, hint(1..=2, Vec::new()));
    stage.run(SECOND);
    assert_eq!(owners(&stage, "a"), [(1, his), (2, his)]);
    let (order, keys, parent, position) = (1, vec![key(2)], key(1), 1);
    stage.world.order("b", DaemonOrder::Replicate { order, keys, parent, position, from: from[0].clone() });
    stage.run(SECOND);
    assert_eq!(owners(&stage, "b"), [(1, his), (2, his)]);
    // What a client has asked for is its own.
    stage.store(A2, [3]);
    assert_eq!(stage.fetch_one(B, 3, &["a"]), Ok((true, Medium::Dram)));
    assert_eq!(owners(&stage, "b")[2], (3, Owner { namespace: 40 + B, tenant: 6 }));
    stage.expect_idle();
}

// Goal: a disk that fails or is full costs its blocks and nothing else: what is in the arena is served, what leaves it is
// counted, and a disk that does well again is used again. Method: let it fail, and make it too small.
#[test]
fn a_failing_disk_costs_only_its_blocks() {
    let mut stage = Stage::new();
    stage.store(A, 1..=4);
    assert_eq!(stage.here(A, 1..=2), [1, 2]);
    stage.run(SECOND);
    stage.shelves["a"].set_health(Health::Failed);
    for number in 5..=14 {
        stage.store(A, [number]);
        stage.run(SECOND);
    }
    assert!(stage.counter("a", "pyengine_pool_dropped_total", "") >= 4);
    assert!(stage.counter("a", "pyengine_tier_refused_writes_total", "") > 0);
    assert_eq!(stage.counter("a", "pyengine_tier_trouble", ""), 2);
    assert_eq!(stage.fetch_one(A, 1, &[]), Err(Refusal::Missing));
    stage.shelves["a"].set_health(Health::Good);
    assert_eq!(stage.fetch_one(A, 1, &[]), Ok((false, Medium::Ssd)), "it was there all the time");
    stage.run(2 * SECOND);
    for number in 20..=30 {
        stage.store(A, [number]);
        stage.run(SECOND);
    }
    assert_eq!(stage.fetch_one(A, 21, &[]), Ok((false, Medium::Ssd)));
    // One block fits: the newest stays, and each that goes is told.
    stage.world.stop("a");
    stage.shelves.insert("a", Shelf::default());
    stage.start("a", 48);
    stage.attach(A);
    for number in 40..=60 {
        stage.store(A, [number]);
        stage.run(SECOND);
    }
    let there: Vec<_> = stage.dump("a").into_iter().filter(|(_, medium)| *medium == Medium::Ssd).collect();
    assert_eq!(there.len(), 1);
    stage.world.stop("a");
    stage.start("a", 48);
    assert_eq!(stage.dump("a"), [(60, Medium::Ssd)], "what was used last is written first, and is not pushed out");
}

// Goal: what was published when a client asked for durability is on the disk when it is told yes, and outlives a kill; a no
// is said if there is no disk, it fails, or the end is near. Who asks during a round is not told with that round. Method: ask,
// kill, look; more blocks than may wait for the disk at once; a failing disk; a stop.
#[test]
fn what_is_flushed_outlives_a_kill() {
    let mut stage = Stage::new();
    // A quarter of the limit may wait: two blocks.
    stage.start("a", 8 * 48);
    [A, A2].into_iter().for_each(|client| stage.attach(client));
    stage.ask(B, LocalRequest::Flush { ticket: 1 });
    stage.run(SECOND);
    assert_eq!(
        stage.told(B),
        [LocalEvent::Flushed { ticket: 1, ok: true }],
        "nothing is there, and all of it is durable"
    );
    stage.store(A, 1..=5);
    stage.ask(A, LocalRequest::Flush { ticket: 2 });
    // The round has begun.
    stage.store(A2, [6]);
    stage.ask(A2, LocalRequest::Flush { ticket: 3 });
    assert_eq!((stage.told(A), stage.told(A2)), (vec![], vec![]));
    assert!(!stage.engine("a").idle());
    stage.run(SECOND);
    assert_eq!(stage.told(A), [LocalEvent::Flushed { ticket: 2, ok: true }]);
    assert_eq!(stage.told(A2), [LocalEvent::Flushed { ticket: 3, ok: true }]);
    stage.expect_idle();
    stage.world.kill("a");
    stage.start("a", 8 * 48);
    assert_eq!(stage.dump("a"), [1, 2, 3, 4, 5, 6].map(|number| (number, Medium::Ssd)));

    [A, A2].into_iter().for_each(|client| stage.attach(client));
    stage.shelves["a"].set_health(Health::Failed);
    stage.store(A, 10..=12);
    stage.ask(A, LocalRequest::Flush { ticket: 4 });
    stage.run(SECOND);
    assert_eq!(stage.told(A), [LocalEvent::Flushed { ticket: 4, ok: false }]);
    stage.shelves["a"].set_health(Health::Good);
    stage.run(2 * SECOND);
    stage.ask(A, LocalRequest::Flush { ticket: 5 });
    // Who is gone is not waited for, nor told.
    stage.ask(A2, LocalRequest::Flush { ticket: 6 });
    stage.world.client_gone("a", A2);
    stage.run(SECOND);
    assert_eq!(stage.told(A), [LocalEvent::Flushed { ticket: 5, ok: true }]);
    assert_eq!(stage.told(A2), []);
    stage.store(A, [13]);
    stage.ask(A, LocalRequest::Flush { ticket: 7 });
    stage.world.stop("a");
    assert_eq!(stage.told(A), [LocalEvent::Flushed { ticket: 7, ok: false }]);
}

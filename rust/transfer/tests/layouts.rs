//! Blocks of several layouts on one node, in one amount of memory.
//!
//! Goal: each layout is as well off as if it were alone while the others need nothing; memory goes where it is used, the
//! coldest first, never what is held; nodes whose layouts came in another order understand each other.
//! Method: engines over the simulated network, clients with different layouts; `Engine::check` runs after every input and
//! adds up all bytes.

use std::sync::Arc;

use pyengine_transfer::engine::{Engine, Settings};
use pyengine_transfer::memory::{Arena, slot_bytes};
use pyengine_transfer::messages::{
    DaemonOrder, DaemonReport, GrantMode, GrantedSlot, LocalEvent, LocalRequest, Refusal,
};
use pyengine_transfer::pool::policy::Policy;
use pyengine_transfer::transport::sim::{Faults, World};
use pyengine_transfer::types::{BlockKey, ClientId, Layout, NodeAddress, RegionId, Tag};

const SMALL: Layout = Layout { strips: 3, strip_bytes: 16 };
/// Four times the memory of a small one.
const LARGE: Layout = Layout { strips: 7, strip_bytes: 2048 };
const SECOND: u64 = 1_000_000_000;
const ROOT: BlockKey = BlockKey([0; 16]);

fn key(number: u16) -> BlockKey {
    let mut key = [9; 16];
    key[..2].copy_from_slice(&number.to_le_bytes());
    BlockKey(key)
}

fn tag(request: u64) -> Tag {
    Tag { request, attempt: 0, worker: 1 }
}

fn block(layout: Layout, number: u16) -> Vec<u8> {
    (0..layout.block_bytes()).map(|byte| (byte as u16 ^ number) as u8).collect()
}

struct Stage {
    world: World,
    told: Vec<(ClientId, LocalEvent)>,
    reports: Vec<DaemonReport>,
    looks: u64,
}

impl Stage {
    fn new() -> Self {
        Self { world: World::new(1, Faults::default()), told: Vec::new(), reports: Vec::new(), looks: 0 }
    }

    /// A node with memory for so many small blocks, if they are all it has.
    fn start(&mut self, node: &str, small: u64) -> NodeAddress {
        let bytes = 4096 + small * slot_bytes(SMALL).expect("possible");
        let settings = Settings { eviction: Policy::named("lru").expect("known"), ..Settings::new(bytes) };
        self.world.start(node, settings)
    }

    fn ask(&mut self, node: &str, client: ClientId, request: LocalRequest) {
        self.world.request(node, client, request);
        self.look();
    }

    fn look(&mut self) {
        self.told.extend(self.world.take_events().into_iter().map(|(_, client, event)| (client, event)));
        self.reports.extend(self.world.take_reports().into_iter().map(|(_, report)| report));
    }

    fn run(&mut self, time: u64) {
        self.world.run(time);
        self.look();
    }

    fn told(&mut self, client: ClientId) -> Vec<LocalEvent> {
        let (mine, others): (Vec<_>, Vec<_>) = self.told.drain(..).partition(|(told, _)| *told == client);
        self.told = others;
        mine.into_iter().map(|(_, event)| event).collect()
    }

    fn attach(&mut self, node: &str, client: ClientId, layout: Layout) -> Result<u32, String> {
        self.attach_of(node, client, layout, 0)
    }

    fn attach_of(&mut self, node: &str, client: ClientId, layout: Layout, namespace: u64) -> Result<u32, String> {
        self.ask(node, client, LocalRequest::Attach { ticket: 1, layout, namespace });
        match self.told(client).pop() {
            Some(LocalEvent::Attached { slots, layout: its, .. }) => {
                assert_eq!(its, layout);
                Ok(slots)
            }
            Some(LocalEvent::AttachRefused { reason, .. }) => Err(reason),
            other => panic!("not attached but {other:?}"),
        }
    }

    fn engine(&self, node: &str) -> &Engine {
        self.world.engine(node).expect("it lives")
    }

    fn arena(&self, node: &str, client: ClientId) -> Arc<Arena> {
        self.engine(node).arena(client).expect("attached")
    }

    fn ask_grant(&mut self, node: &str, client: ClientId, tag: Tag, numbers: std::ops::Range<u16>, mode: GrantMode) {
        let keys = numbers.map(key).collect();
        self.ask(
            node,
            client,
            LocalRequest::Grant { tag, keys, private: 0, parent: ROOT, position: 0, mode, tenant: 0 },
        );
    }

    fn granted(&mut self, client: ClientId) -> Option<Vec<GrantedSlot>> {
        match self.told(client).as_slice() {
            [] => None,
            [LocalEvent::Granted { slots, .. }] => Some(slots.clone()),
            other => panic!("{other:?}"),
        }
    }

    /// Puts blocks into the pool, held under the tag.
    fn store(&mut self, node: &str, client: ClientId, tag: Tag, numbers: std::ops::Range<u16>) {
        self.ask_grant(node, client, tag, numbers.clone(), GrantMode::Wait);
        let slots = self.granted(client).expect("there is room");
        let arena = self.arena(node, client);
        let wanted: Vec<u32> = (0..slots.len() as u32).filter(|&index| !slots[index as usize].committed).collect();
        for &index in &wanted {
            let number = numbers.start + index as u16;
            arena.store(slots[index as usize].slot, 0, &block(arena.layout(), number)).expect("in range");
        }
        self.ask(node, client, LocalRequest::Commit { tag, indices: wanted });
    }

    fn end(&mut self, node: &str, client: ClientId, tag: Tag) {
        self.ask(node, client, LocalRequest::End { tag });
    }

    /// How many of these leading blocks are there, and right.
    fn found(&mut self, node: &str, client: ClientId, numbers: std::ops::Range<u16>) -> usize {
        self.looks += 1;
        let look = tag(self.looks << 32);
        self.ask(node, client, LocalRequest::Lookup { tag: look, keys: numbers.clone().map(key).collect() });
        let told = self.told(client);
        let [LocalEvent::Located { slots, .. }] = told.as_slice() else { panic!("{told:?}") };
        let arena = self.arena(node, client);
        for (number, slot) in numbers.zip(slots) {
            let mut bytes = vec![0; arena.layout().block_bytes()];
            assert!(arena.load(*slot, 0, &mut bytes).expect("in range") && bytes == block(arena.layout(), number));
        }
        self.end(node, client, look);
        slots.len()
    }

    fn blocks(&self, node: &str, state: &str) -> u64 {
        let name = format!(r#"pyengine_pool_blocks{{node="{node}",tier="dram",state="{state}"}}"#);
        self.engine(node).counters().into_iter().find(|(sample, _)| *sample == name).expect("a counter").1
    }
}

// Goal: nothing is set aside for layouts that are not there, and memory moves to the one that needs it: from the coldest
// blocks, page by page, and back. Method: fill a node with small blocks, then with large ones, then with small ones.
#[test]
fn memory_goes_where_it_is_used() {
    let mut stage = Stage::new();
    stage.start("a", 40);
    assert_eq!(stage.attach("a", 1, SMALL), Ok(40));
    assert_eq!(stage.blocks("a", "free"), 40);
    for number in 0..39 {
        let request = 100 + u64::from(number);
        stage.store("a", 1, tag(request), number..number + 1);
        stage.end("a", 1, tag(request));
        stage.run(SECOND);
    }
    assert_eq!((stage.blocks("a", "cached"), stage.blocks("a", "free")), (39, 1));
    let small = stage.arena("a", 1);
    let (full, page) = (small.resident(), 4096);

    // It is given its minimum at once, from the coldest of the others.
    stage.attach("a", 2, LARGE).expect("there is room for its minimum");
    assert_eq!(stage.arena("a", 1).slots(), 40, "the first one's mapping has not changed");
    let cached = stage.blocks("a", "cached");
    assert_eq!(cached, 32, "two large ones take the empty slot and seven blocks");
    assert!(small.resident() <= full - (39 - cached) * page, "their memory went back to the system");
    for number in 39 - cached as u16..39 {
        assert_eq!(stage.found("a", 1, number..number + 1), 1, "the newest stay, and this is {number}");
    }

    // And more as it needs it, but not what is held: the small blocks keep three.
    stage.ask("a", 1, LocalRequest::Lookup { tag: tag(7), keys: vec![key(36), key(0)] });
    stage.ask("a", 1, LocalRequest::Lookup { tag: tag(7), keys: vec![key(37)] });
    stage.told(1);
    stage.store("a", 2, tag(8), 100..106);
    stage.end("a", 2, tag(8));
    assert_eq!(stage.found("a", 2, 100..106), 6);
    let large = stage.arena("a", 2);
    assert!(large.resident() >= 6 * 14336);
    let left = stage.blocks("a", "cached") + stage.blocks("a", "pinned") - 6;
    assert_eq!(left, 12, "seven large slots take the room of 28 of 40 small ones");
    stage.end("a", 1, tag(7));
    assert_eq!(stage.found("a", 1, 36..38), 2, "they were held");

    // And back.
    stage.store("a", 1, tag(9), 200..228);
    stage.end("a", 1, tag(9));
    assert_eq!(stage.found("a", 1, 200..228), 28);
    assert!(stage.blocks("a", "cached") >= 29);
    assert!(large.resident() <= 4096 + 3 * 16384, "{} bytes of large blocks are left", large.resident());
    stage.run(SECOND);
    assert!(stage.engine("a").idle(), "{:?}", stage.engine("a").unfinished());
}

// Goal: an empty store takes no memory for what it may ever hold; where there is no room for the least a layout needs, it
// is refused with a sentence; what could never fit any more is refused, not left to wait for ever.
// Method: the limits, one after the other.
#[test]
fn limits_are_those_of_all() {
    let mut stage = Stage::new();
    stage.start("a", 12);
    assert_eq!(stage.attach("a", 1, SMALL), Ok(12));
    // Held: a part, so that a wish for all but one waits.
    stage.store("a", 1, tag(1), 0..4);
    stage.ask_grant("a", 1, tag(2), 10..21, GrantMode::Wait);
    assert_eq!(stage.granted(1), None);
    let enormous = Layout { strips: 7, strip_bytes: 4096 };
    let refusal = stage.attach("a", 2, enormous).expect_err("twelve small blocks have no room for it");
    assert!(refusal.contains("--dram-bytes") && refusal.contains("besides"), "{refusal}");
    assert_eq!(stage.granted(1), None, "it waits on");
    // Another layout comes: now this can never be.
    let other = Layout { strips: 4, ..SMALL };
    stage.attach("a", 3, other).expect("room for two");
    assert_eq!(stage.told(1), [LocalEvent::Refused { tag: tag(2), refusal: Refusal::TooLarge }]);
    stage.end("a", 1, tag(2));
    stage.ask_grant("a", 1, tag(3), 10..19, GrantMode::Wait);
    assert_eq!(stage.told(1), [LocalEvent::Refused { tag: tag(3), refusal: Refusal::TooLarge }]);
    stage.end("a", 1, tag(3));
    stage.end("a", 1, tag(1));
    stage.ask_grant("a", 1, tag(4), 10..18, GrantMode::Wait);
    assert!(stage.granted(1).is_some(), "all that the other does not need");
    stage.end("a", 1, tag(4));
    assert!(stage.engine("a").idle());
}

// Goal: who waits longest is served first, whatever his layout; those who come later get only what their own store has;
// every store has one slot for staging. Method: two stores that hold all there is, and wishes of both.
#[test]
fn who_waits_longest_is_first() {
    let mut stage = Stage::new();
    let other = Layout { strips: 4, ..SMALL };
    stage.start("a", 13);
    stage.attach("a", 1, SMALL).expect("room");
    stage.attach("a", 2, other).expect("room");
    stage.store("a", 1, tag(1), 0..5);
    stage.store("a", 2, tag(2), 100..105);
    // All is held but what each keeps for staging. The first to wait is the second store's.
    stage.ask_grant("a", 2, tag(3), 110..113, GrantMode::Wait);
    stage.ask_grant("a", 1, tag(4), 10..13, GrantMode::Wait);
    assert_eq!((stage.granted(1), stage.granted(2)), (None, None));
    // Somebody asks for one slot of the first store: it has none to spare, and gets none of what nobody has.
    stage.ask_grant("a", 1, tag(5), 20..21, GrantMode::Now);
    assert_eq!(stage.told(1), [LocalEvent::Refused { tag: tag(5), refusal: Refusal::Full }]);
    for (client, number) in [(1, 30), (2, 130)] {
        let staging = tag(number);
        stage.ask_grant("a", client, staging, number as u16..number as u16 + 1, GrantMode::Staging);
        assert!(stage.granted(client).is_some(), "staging goes on in each store");
        stage.end("a", client, staging);
    }
    // The first store lets go of its five: three of them go to who waited first, and he to who came second.
    stage.end("a", 1, tag(1));
    assert!(stage.granted(2).is_some(), "it waited longest");
    assert_eq!(stage.granted(1), None);
    stage.end("a", 2, tag(3));
    assert!(stage.granted(1).is_some());
    for (client, number) in [(1, 4), (1, 5), (2, 2)] {
        stage.end("a", client, tag(number));
    }
    assert!(stage.engine("a").idle(), "{:?}", stage.engine("a").unfinished());
}

// Goal: two nodes agree on which arena a slot is in, though their layouts came in another order, and a push or fetch of one
// layout never touches another's. Method: push and fetch blocks of both layouts between two such nodes; then mix them up.
#[test]
fn nodes_with_other_orders_of_layouts_understand_each_other() {
    let mut stage = Stage::new();
    let (a, b) = (stage.start("a", 60), stage.start("b", 60));
    for (node, client, layout) in [("a", 1, SMALL), ("a", 2, LARGE), ("b", 3, LARGE), ("b", 4, SMALL)] {
        stage.attach(node, client, layout).expect("room");
    }
    let region = |stage: &Stage, node: &str, client| {
        let arena = stage.arena(node, client);
        stage.engine(node).arenas().find(|(_, other)| Arc::ptr_eq(other, &arena)).expect("it has a number").0
    };
    assert_eq!((region(&stage, "a", 1), region(&stage, "b", 4)), (RegionId(0), RegionId(1)));
    for (from, to, first) in [(1, 4, 10), (2, 3, 20)] {
        // Pushed from a to b.
        let (here, there) = (tag(u64::from(first)), tag(u64::from(first) + 1));
        stage.store("a", from, here, first..first + 3);
        stage.ask_grant("b", to, there, first..first + 3, GrantMode::Wait);
        assert!(stage.granted(to).is_some());
        stage.ask("a", from, LocalRequest::Open { tag: there, to: b.clone(), within_ms: 1000 });
        stage.run(SECOND / 10);
        assert!(matches!(stage.told(from).as_slice(), [LocalEvent::Opened { .. }]));
        let note = Some(b"note".to_vec());
        stage.ask(
            "a",
            from,
            LocalRequest::Push { local: here, tag: there, indices: vec![0, 1, 2], first: 0, strips: None, note },
        );
        stage.run(SECOND / 10);
        assert!(matches!(stage.told(to).last(), Some(LocalEvent::Complete { .. })));
        assert!(!stage.told(from).is_empty());
        stage.end("a", from, there);
        stage.end("a", from, here);
        stage.end("b", to, there);
        assert_eq!(stage.found("b", to, first..first + 3), 3);
        // Fetched by b from a.
        stage.store("a", from, tag(77 + u64::from(first)), first + 3..first + 5);
        stage.end("a", from, tag(77 + u64::from(first)));
        let wanted = tag(99 + u64::from(first));
        stage.ask_grant("b", to, wanted, first + 3..first + 5, GrantMode::Wait);
        stage.told(to);
        stage.ask("b", to, LocalRequest::Fetch { tag: wanted, indices: vec![0, 1], from: vec![a.clone()] });
        stage.run(SECOND / 10);
        let told = stage.told(to);
        assert!(told.len() == 2 && told.iter().all(|event| matches!(event, LocalEvent::Fetched { found: Ok(_), .. })));
        stage.end("b", to, wanted);
        assert_eq!(stage.found("b", to, first + 3..first + 5), 2);
    }
    // A grant of small blocks is no place for large ones, and a key of small ones is not found as large ones.
    stage.ask_grant("b", 4, tag(1000), 50..51, GrantMode::Wait);
    stage.told(4);
    stage.ask("a", 2, LocalRequest::Open { tag: tag(1000), to: b.clone(), within_ms: 1000 });
    stage.run(SECOND / 10);
    assert_eq!(stage.told(2), [LocalEvent::Refused { tag: tag(1000), refusal: Refusal::Protocol }]);
    stage.ask("b", 3, LocalRequest::Open { tag: tag(1000), to: b.clone(), within_ms: 1000 });
    assert_eq!(stage.told(3), [LocalEvent::Refused { tag: tag(1000), refusal: Refusal::Protocol }]);
    stage.store("a", 1, tag(1001), 60..61);
    stage.ask_grant("b", 3, tag(1002), 60..61, GrantMode::Wait);
    stage.told(3);
    stage.ask("b", 3, LocalRequest::Fetch { tag: tag(1002), indices: vec![0], from: vec![a.clone()] });
    stage.run(SECOND / 10);
    let missing = LocalEvent::Fetched { tag: tag(1002), index: 0, found: Err(Refusal::Missing) };
    assert_eq!(stage.told(3), [missing]);
    for (node, client, number) in [("b", 4, 1000), ("a", 2, 1000), ("b", 3, 1000), ("a", 1, 1001), ("b", 3, 1002)] {
        stage.end(node, client, tag(number));
    }
    // The conductor knows no layouts: a replica goes where it belongs.
    for (order, holder, client, keys) in [(1, 1, 4, 60..61), (2, 2, 3, 70..72)] {
        stage.store("a", holder, tag(2000 + order), keys.clone());
        stage.end("a", holder, tag(2000 + order));
        let order = DaemonOrder::Replicate {
            order,
            keys: keys.clone().map(key).collect(),
            parent: ROOT,
            position: 0,
            from: a.clone(),
        };
        stage.world.order("b", order);
        stage.run(SECOND / 10);
        assert_eq!(stage.found("b", client, keys.clone()), keys.len());
    }
    let replicated: Vec<_> =
        stage.reports.iter().filter(|report| matches!(report, DaemonReport::Replicated { .. })).collect();
    let expected = [(1, 1), (2, 2)].map(|(order, stored)| DaemonReport::Replicated { order, stored, missing: 0 });
    assert_eq!(replicated, expected.iter().collect::<Vec<_>>());
    stage.run(SECOND);
    for node in ["a", "b"] {
        assert!(stage.engine(node).idle(), "{node}: {:?}", stage.engine(node).unfinished());
    }
}

// Goal: a block of another model never comes under a key of this one, though it has the same size and somebody offers it
// under that very key. Method: a client of each namespace, on the node of the grant and on another; the right one is let in
// after the others were refused.
#[test]
fn a_grant_is_filled_in_its_own_namespace_only() {
    let mut stage = Stage::new();
    let (_, b, _) = (stage.start("a", 60), stage.start("b", 60), stage.start("c", 60));
    let (mine, another) = (7, 8);
    for (node, client, namespace) in [("a", 1, another), ("c", 2, mine), ("b", 3, another), ("b", 4, mine)] {
        stage.attach_of(node, client, SMALL, namespace).expect("room");
    }
    let there = tag(1);
    stage.store("c", 2, tag(10), 10..13);
    stage.ask_grant("b", 4, there, 10..13, GrantMode::Wait);
    assert!(stage.granted(4).is_some());
    for (node, client) in [("a", 1), ("b", 3)] {
        stage.ask(node, client, LocalRequest::Open { tag: there, to: b.clone(), within_ms: 1000 });
        stage.run(SECOND / 10);
        assert_eq!(stage.told(client), [LocalEvent::Refused { tag: there, refusal: Refusal::Protocol }], "{node}");
        stage.end(node, client, there);
        stage.run(SECOND / 10);
    }
    stage.ask("c", 2, LocalRequest::Open { tag: there, to: b, within_ms: 1000 });
    stage.run(SECOND / 10);
    assert!(matches!(stage.told(2).as_slice(), [LocalEvent::Opened { .. }]));
    let push =
        LocalRequest::Push { local: tag(10), tag: there, indices: vec![0, 1, 2], first: 0, note: None, strips: None };
    stage.ask("c", 2, push);
    stage.run(SECOND / 10);
    for (node, client, tag) in [("c", 2, there), ("c", 2, tag(10)), ("b", 4, there)] {
        stage.end(node, client, tag);
    }
    stage.run(SECOND);
    assert_eq!(stage.told(4).len(), 3, "three blocks have arrived");
    assert_eq!(stage.found("b", 4, 10..13), 3);
    for node in ["a", "b", "c"] {
        assert!(stage.engine(node).idle(), "{node}: {:?}", stage.engine(node).unfinished());
    }
}

// Goal: a key is announced once, though two stores were made to publish it. Method: commit it in both, then drop one.
#[test]
fn a_key_is_published_by_one_store() {
    let mut stage = Stage::new();
    stage.start("a", 60);
    stage.attach("a", 1, SMALL).expect("room");
    stage.attach("a", 2, LARGE).expect("room");
    stage.store("a", 1, tag(1), 5..6);
    stage.store("a", 2, tag(2), 5..6);
    let stored = stage.reports.iter().filter(|report| matches!(report, DaemonReport::Stored { .. })).count();
    assert_eq!(stored, 1);
    stage.end("a", 2, tag(2));
    stage.end("a", 1, tag(1));
    assert_eq!((stage.found("a", 1, 5..6), stage.found("a", 2, 5..6)), (1, 0));
    assert!(stage.engine("a").idle());
}

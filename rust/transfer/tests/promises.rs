//! The engine's promises, one by one (the random model test covers their mixtures).
//!
//! Goal: each refusal, hand-off and release is what `messages.rs` says. Method: short scripts over the simulated
//! network in virtual time; every engine's `check()` runs after every input (in `World`).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use pyengine_transfer::engine::Settings;
use pyengine_transfer::memory::Arena;
use pyengine_transfer::messages::{
    DaemonOrder, DaemonReport, Found, GrantMode, GrantedSlot, LocalEvent, LocalRequest, NOTE_LIMIT, Refusal,
};
use pyengine_transfer::transport::sim::{Faults, World};
use pyengine_transfer::types::{BlockKey, ClientId, Layout, Medium, NodeAddress, SlotRef, Tag};

const LAYOUT: Layout = Layout { strips: 3, strip_bytes: 16 };
const SECOND: u64 = 1_000_000_000;
const ROOT: BlockKey = BlockKey([0; 16]);
/// Clients: a prefill worker on `a`, a decode worker on `b`, and a second one on `b`.
const PREFILL: ClientId = 1;
const DECODE: ClientId = 2;
const NEIGHBOUR: ClientId = 3;

fn key(number: u8) -> BlockKey {
    BlockKey([number; 16])
}

fn keys(numbers: &[u8]) -> Vec<BlockKey> {
    numbers.iter().map(|number| key(*number)).collect()
}

fn tag(request: u64) -> Tag {
    Tag { request, attempt: 1, worker: 9 }
}

fn block(number: u8) -> Vec<u8> {
    (0..48).map(|byte| byte ^ number).collect()
}

struct Stage {
    world: World,
    nodes: BTreeMap<&'static str, NodeAddress>,
    told: Vec<(ClientId, LocalEvent)>,
    reports: Vec<(String, DaemonReport)>,
}

impl Stage {
    /// Nodes `a` and `b`, with so many slots each.
    fn new(slots: u64) -> Self {
        let mut world = World::new(3, Faults::default());
        let settings = || Settings::new(4096 + slots * (4096 + 4 * 4));
        let nodes = ["a", "b"].map(|name| (name, world.start(name, settings()))).into();
        let mut stage = Self { world, nodes, told: Vec::new(), reports: Vec::new() };
        for (node, client) in [("a", PREFILL), ("b", DECODE), ("b", NEIGHBOUR)] {
            stage.ask(node, client, LocalRequest::Attach { ticket: 0, layout: LAYOUT, namespace: 0 });
        }
        stage.told.clear();
        stage
    }

    fn ask(&mut self, node: &str, client: ClientId, request: LocalRequest) {
        self.world.request(node, client, request);
        self.look();
    }

    fn look(&mut self) {
        self.told.extend(self.world.take_events().into_iter().map(|(_, client, event)| (client, event)));
        self.reports.extend(self.world.take_reports());
    }

    fn run(&mut self, duration: u64) {
        self.world.run(duration);
        self.look();
    }

    /// Takes what a client was told so far.
    fn told(&mut self, client: ClientId) -> Vec<LocalEvent> {
        self.look();
        let (mine, others) = self.told.drain(..).partition(|(told, _)| *told == client);
        self.told = others;
        let mine: Vec<(ClientId, LocalEvent)> = mine;
        mine.into_iter().map(|(_, event)| event).collect()
    }

    fn arena(&self, node: &str) -> Arc<Arena> {
        let engine = self.world.engine(node).expect("it lives");
        engine.arenas().next().expect("a client has attached").1.clone()
    }

    fn grant(&mut self, node: &str, client: ClientId, tag: Tag, numbers: &[u8], private: u8, mode: GrantMode) {
        let request =
            LocalRequest::Grant { tag, keys: keys(numbers), private, parent: ROOT, position: 0, mode, tenant: 0 };
        self.ask(node, client, request);
    }

    /// A grant that is held at once.
    fn granted(&mut self, node: &str, client: ClientId, tag: Tag, numbers: &[u8], private: u8) -> Vec<GrantedSlot> {
        self.grant(node, client, tag, numbers, private, GrantMode::Wait);
        match self.told(client).as_slice() {
            [LocalEvent::Granted { slots, .. }] => slots.clone(),
            other => panic!("not granted but {other:?}"),
        }
    }

    /// Puts blocks into a node's pool; the private one has number 200.
    fn store(&mut self, node: &str, client: ClientId, tag: Tag, numbers: &[u8], private: u8) {
        let slots = self.granted(node, client, tag, numbers, private);
        let wanted: Vec<u32> = (0..slots.len() as u32).filter(|index| !slots[*index as usize].committed).collect();
        for &index in &wanted {
            let number = numbers.get(index as usize).copied().unwrap_or(200);
            self.arena(node).store(slots[index as usize].slot, 0, &block(number)).expect("in range");
        }
        self.ask(node, client, LocalRequest::Commit { tag, indices: wanted });
        assert_eq!(self.told(client), []);
    }

    fn open(&mut self, node: &str, client: ClientId, tag: Tag, to: &str, within_ms: u64) {
        let to = self.nodes[to].clone();
        self.ask(node, client, LocalRequest::Open { tag, to, within_ms });
    }

    fn push(&mut self, node: &str, client: ClientId, local: Tag, tag: Tag, indices: &[u32], note: Option<&str>) {
        let note = note.map(|note| note.as_bytes().to_vec());
        self.ask(
            node,
            client,
            LocalRequest::Push { local, tag, indices: indices.to_vec(), first: 0, strips: None, note },
        );
    }

    /// Pushes strips of one block.
    fn push_strips(&mut self, (local, tag): (Tag, Tag), index: u32, strips: Range<u32>) {
        let strips = Some((strips.start, strips.end));
        let push = LocalRequest::Push { local, tag, indices: vec![index], first: 0, strips, note: None };
        self.ask("a", PREFILL, push);
    }

    fn end(&mut self, node: &str, client: ClientId, tag: Tag) {
        self.ask(node, client, LocalRequest::End { tag });
    }

    fn load(&self, node: &str, slot: SlotRef) -> Option<Vec<u8>> {
        let mut bytes = vec![0; LAYOUT.block_bytes()];
        self.arena(node).load(slot, 0, &mut bytes).expect("in range").then_some(bytes)
    }

    fn counter(&self, node: &str, name: &str) -> u64 {
        let counters = self.world.engine(node).expect("it lives").counters();
        let (_, value) = counters.iter().find(|(sample, _)| sample == name).unwrap_or_else(|| panic!("no {name}"));
        *value
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

fn refused(tag: Tag, refusal: Refusal) -> LocalEvent {
    LocalEvent::Refused { tag, refusal }
}

// Goal: strips leave before their block is written to its end, and the block counts as pushed, and as arrived, when all of
// them have; and its own node may read it from its commit on. Method: write and push it in three parts, with time between.
#[test]
fn strips_are_pushed_before_their_block_is_complete() {
    let mut stage = Stage::new(8);
    let (at_decode, at_prefill) = (tag(1), tag(2));
    let theirs = stage.granted("b", DECODE, at_decode, &[1], 1);
    let own = stage.granted("a", PREFILL, at_prefill, &[1], 1);
    stage.open("a", PREFILL, at_decode, "b", 1000);
    stage.run(SECOND / 10);
    assert_eq!(stage.told(PREFILL).len(), 1, "opened");
    let bytes = LAYOUT.strip_bytes as usize;
    for (index, number) in [(0, 1), (1, 200)] {
        for strip in 0..LAYOUT.strips {
            let block = block(number);
            let part = &block[strip as usize * bytes..][..bytes];
            stage.arena("a").store(own[index as usize].slot, strip, part).expect("in range");
            assert_eq!((stage.told(PREFILL), stage.told(DECODE)), (vec![], vec![]), "nothing is whole yet");
            stage.push_strips((at_prefill, at_decode), index, strip..strip + 1);
            stage.run(SECOND / 10);
        }
        assert_eq!(stage.told(PREFILL), [LocalEvent::Pushed { tag: at_decode, indices: vec![index], note: false }]);
        assert_eq!(stage.told(DECODE), [LocalEvent::Arrived { tag: at_decode, indices: vec![index] }]);
        assert_eq!(stage.load("b", theirs[index as usize].slot), Some(block(number)));
        stage.ask("a", PREFILL, LocalRequest::Commit { tag: at_prefill, indices: vec![index] });
    }
    stage.push("a", PREFILL, at_prefill, at_decode, &[], Some("n"));
    stage.run(SECOND / 10);
    assert_eq!(stage.told(DECODE), [LocalEvent::Complete { tag: at_decode, note: b"n".to_vec() }]);
    for (node, bytes) in [("b", "in"), ("a", "out")] {
        let of = format!(r#"{{transport="sim",direction="{bytes}",node="{node}"}}"#);
        assert_eq!(stage.counter(node, &format!("pyengine_transfer_bytes_total{of}")), 2 * 48);
        assert_eq!(stage.counter(node, &format!("pyengine_transfer_blocks_total{of}")), 2);
    }
    for (node, client, tag) in [("a", PREFILL, at_decode), ("a", PREFILL, at_prefill), ("b", DECODE, at_decode)] {
        stage.end(node, client, tag);
    }
    stage.expect_idle();
}

// Goal: strips that were not written, a gap, an end beyond the block, and strips in one arena are refused, and whoever lets
// go of a block whose strips are on their way leaves nothing behind. Method: each of them.
#[test]
fn strips_are_pushed_in_order_once_written() {
    for (first, then, refusal) in [
        // The first was never written in this life: its checksum cannot hold, however often it is sent.
        (0..1, 1..2, Refusal::Corrupt),
        (1..2, 2..3, Refusal::Protocol),
        (1..1, 1..2, Refusal::Protocol),
        (0..LAYOUT.strips + 1, 0..1, Refusal::Protocol),
    ] {
        let mut stage = Stage::new(8);
        let (at_decode, at_prefill) = (tag(1), tag(2));
        stage.granted("b", DECODE, at_decode, &[1], 0);
        stage.granted("a", PREFILL, at_prefill, &[1], 0);
        stage.open("a", PREFILL, at_decode, "b", 1000);
        stage.run(SECOND / 10);
        stage.told(PREFILL);
        stage.push_strips((at_prefill, at_decode), 0, first.clone());
        stage.run(SECOND);
        assert_eq!(stage.told(PREFILL), [refused(at_decode, refusal)], "{first:?}");
        stage.push_strips((at_prefill, at_decode), 0, then);
        stage.end("a", PREFILL, at_prefill);
        stage.end("a", PREFILL, at_decode);
        stage.end("b", DECODE, at_decode);
        stage.expect_idle();
    }
}

// Goal: the life of a request (design §3.4 to 3.6) over two nodes: a block can be committed at decode before prefill
// has made the next, the note comes last, and after the ends only the cache is left. Method: push in two parts.
#[test]
fn push_over_two_nodes() {
    let mut stage = Stage::new(8);
    let (at_decode, at_prefill) = (tag(1), tag(2));
    let slots = stage.granted("b", DECODE, at_decode, &[1, 2], 1);
    stage.store("a", PREFILL, at_prefill, &[1, 2], 1);
    stage.open("a", PREFILL, at_decode, "b", 1000);
    stage.run(SECOND / 10);
    let committed = vec![false; 3];
    assert_eq!(stage.told(PREFILL), [LocalEvent::Opened { tag: at_decode, committed, slots: vec![] }]);
    stage.push("a", PREFILL, at_prefill, at_decode, &[0], None);
    stage.run(SECOND / 10);
    assert_eq!(stage.told(PREFILL), [LocalEvent::Pushed { tag: at_decode, indices: vec![0], note: false }]);
    assert_eq!(stage.told(DECODE), [LocalEvent::Arrived { tag: at_decode, indices: vec![0] }]);
    assert_eq!(stage.load("b", slots[0].slot), Some(block(1)));
    stage.push("a", PREFILL, at_prefill, at_decode, &[1, 2], Some("first token"));
    // The source's own tag may end: what is being copied is pinned.
    stage.end("a", PREFILL, at_prefill);
    stage.run(SECOND / 10);
    let told = stage.told(DECODE);
    assert_eq!(told.last(), Some(&LocalEvent::Complete { tag: at_decode, note: b"first token".to_vec() }));
    assert_eq!(stage.load("b", slots[2].slot), Some(block(200)));
    stage.end("a", PREFILL, at_decode);
    stage.run(SECOND / 10);
    assert_eq!(stage.told(DECODE), [], "an end after the note is no news");
    stage.end("b", DECODE, at_decode);
    stage.expect_idle();
    // Two full blocks are cached on both sides, the private one on none.
    for node in ["a", "b"] {
        assert_eq!(
            stage.counter(node, &format!(r#"pyengine_pool_blocks{{node="{node}",tier="dram",state="cached"}}"#)),
            2
        );
    }
    let bytes = r#"pyengine_transfer_bytes_total{transport="sim",direction="in",node="b"}"#;
    assert_eq!(stage.counter("b", bytes), 3 * 48);
    let stored: Vec<_> = stage
        .reports
        .iter()
        .filter(|(node, report)| node == "b" && matches!(report, DaemonReport::Stored { .. }))
        .collect();
    assert_eq!(stored.len(), 2, "{stored:?}");
    stage.ask("b", DECODE, LocalRequest::Lookup { tag: tag(5), keys: keys(&[1, 2, 3]) });
    assert!(matches!(stage.told(DECODE).as_slice(), [LocalEvent::Located { slots, .. }] if slots.len() == 2));
}

// Goal: on one arena the opener gets the slots, writes them itself, and the hand-off counts blocks and no bytes; if the
// owner ends first, the slots stay in quarantine until the writer lets go or dies. Method: both ways of letting go.
#[test]
fn push_within_one_arena() {
    let mut stage = Stage::new(8);
    for round in 0..4 {
        let grant = tag(10 + round);
        let number = 10 + round as u8;
        stage.open("b", NEIGHBOUR, grant, "b", 1000);
        let slots = stage.granted("b", DECODE, grant, &[number], 1);
        let told = stage.told(NEIGHBOUR);
        assert_eq!(told, [LocalEvent::Opened { tag: grant, committed: vec![false; 2], slots: slots.clone() }]);
        let quarantine = r#"pyengine_pool_blocks{node="b",tier="dram",state="quarantine"}"#;
        if round < 2 {
            for (slot, number) in slots.iter().zip([number, 200]) {
                stage.arena("b").store(slot.slot, 0, &block(number)).expect("in range");
            }
            stage.push("b", NEIGHBOUR, tag(99), grant, &[0], None);
            assert_eq!(stage.told(DECODE), [LocalEvent::Arrived { tag: grant, indices: vec![0] }]);
            assert_eq!(stage.load("b", slots[0].slot), Some(block(number)));
            stage.push("b", NEIGHBOUR, tag(99), grant, &[1], Some("note"));
            let told = stage.told(DECODE);
            assert_eq!(told.last(), Some(&LocalEvent::Complete { tag: grant, note: b"note".to_vec() }));
            stage.end("b", DECODE, grant);
            assert_eq!(stage.counter("b", quarantine), 0, "what was committed is written no more");
            stage.end("b", NEIGHBOUR, grant);
        } else {
            stage.end("b", DECODE, grant);
            assert_eq!(stage.told(NEIGHBOUR), [refused(grant, Refusal::Ended)]);
            assert_eq!(stage.counter("b", quarantine), 2);
            // A late write goes nowhere.
            stage.arena("b").store(slots[0].slot, 0, &block(66)).expect("in range");
            if round == 2 {
                stage.end("b", NEIGHBOUR, grant);
            } else {
                stage.world.client_gone("b", NEIGHBOUR);
            }
            assert_eq!(stage.counter("b", quarantine), 0);
        }
        stage.told.clear();
    }
    assert_eq!(stage.counter("b", r#"pyengine_transfer_blocks_total{transport="arena",direction="in",node="b"}"#), 4);
    assert_eq!(stage.counter("b", r#"pyengine_transfer_bytes_total{transport="tcp",direction="out",node="b"}"#), 0);
    stage.expect_idle();
}

// Goal: opens wait for their grants, each on its own, and end with the right word. Method: several at once.
#[test]
fn opens_wait_side_by_side() {
    let mut stage = Stage::new(8);
    for (request, within_ms) in [(1, 300), (2, 5000), (3, 5000), (4, 5000)] {
        stage.open("a", PREFILL, tag(request), "b", within_ms);
    }
    stage.run(SECOND / 10);
    assert_eq!(stage.told(PREFILL), []);
    // A later one is granted first.
    stage.granted("b", DECODE, tag(3), &[1], 0);
    stage.run(SECOND / 10);
    let opened = LocalEvent::Opened { tag: tag(3), committed: vec![false], slots: vec![] };
    assert_eq!(stage.told(PREFILL), [opened]);
    stage.run(SECOND / 2);
    assert_eq!(stage.told(PREFILL), [refused(tag(1), Refusal::Deadline)]);
    // Its worker has ended one, before or after the open came.
    stage.end("b", DECODE, tag(2));
    stage.end("b", DECODE, tag(3));
    stage.end("b", DECODE, tag(5));
    stage.open("a", PREFILL, tag(5), "b", 5000);
    stage.run(SECOND / 10);
    let mut told = stage.told(PREFILL);
    told.sort_by_key(|event| format!("{event:?}"));
    assert_eq!(told, [2, 3, 5].map(|request| refused(tag(request), Refusal::Ended)));
    // The peer dies.
    stage.world.kill("b");
    stage.run(SECOND / 10);
    assert_eq!(stage.told(PREFILL), [refused(tag(4), Refusal::Unreachable)]);
    // It cannot be reached, or is another one by now.
    stage.open("a", PREFILL, tag(6), "b", 5000);
    stage.run(SECOND / 10);
    assert_eq!(stage.told(PREFILL), [refused(tag(6), Refusal::Unreachable)]);
    stage.world.start("b", Settings::new(1 << 20));
    stage.open("a", PREFILL, tag(7), "b", 5000);
    stage.run(SECOND / 10);
    assert_eq!(stage.told(PREFILL), [refused(tag(7), Refusal::Unreachable)]);
    for request in 1..=7 {
        stage.end("a", PREFILL, tag(request));
    }
    stage.expect_idle();
}

// Goal: what can never be is refused at once, and misuse with `Protocol`. Method: the cases.
#[test]
fn refusals() {
    let mut stage = Stage::new(4);
    stage.grant("b", DECODE, tag(1), &[1, 2, 3, 4], 1, GrantMode::Wait);
    assert_eq!(stage.told(DECODE), [refused(tag(1), Refusal::TooLarge)]);
    stage.end("b", DECODE, tag(1));
    stage.grant("b", DECODE, tag(1), &[1], 0, GrantMode::Wait);
    assert_eq!(stage.told(DECODE), [refused(tag(1), Refusal::Ended)]);
    stage.end("b", DECODE, tag(1));
    stage.granted("b", DECODE, tag(2), &[1], 1);
    stage.grant("b", NEIGHBOUR, tag(2), &[1], 1, GrantMode::Wait);
    assert_eq!(stage.told(NEIGHBOUR), [refused(tag(2), Refusal::Protocol)], "granted twice");
    stage.end("b", NEIGHBOUR, tag(2));
    stage.grant("b", NEIGHBOUR, tag(3), &[5, 6, 7], 0, GrantMode::Now);
    assert_eq!(stage.told(NEIGHBOUR), [refused(tag(3), Refusal::Full)]);
    stage.ask("b", DECODE, LocalRequest::Commit { tag: tag(2), indices: vec![2] });
    assert_eq!(stage.told(DECODE), [refused(tag(2), Refusal::Protocol)], "no such index");
    stage.push("b", DECODE, tag(2), tag(4), &[0], None);
    assert_eq!(stage.told(DECODE), [refused(tag(4), Refusal::Protocol)], "not opened");
    // Attached once more with another layout, with an impossible one, or not at all.
    for (client, layout, says) in [
        (DECODE, Layout { strips: 4, ..LAYOUT }, "another layout"),
        (7, Layout { strips: 0, ..LAYOUT }, "impossible"),
        (7, Layout { strips: 5, strip_bytes: 1000 }, "--dram-bytes"),
    ] {
        stage.ask("b", client, LocalRequest::Attach { ticket: 5, layout, namespace: 0 });
        let told = stage.told(client);
        assert!(
            matches!(told.as_slice(), [LocalEvent::AttachRefused { ticket: 5, reason }] if reason.contains(says)),
            "{told:?}"
        );
    }
    stage.grant("b", 7, tag(8), &[1], 0, GrantMode::Wait);
    assert_eq!(stage.told(7), [refused(tag(8), Refusal::Protocol)]);
    // A push of what is not committed, twice the same, and too long a note.
    stage.granted("a", PREFILL, tag(20), &[1], 1);
    stage.open("a", PREFILL, tag(2), "b", 1000);
    stage.run(SECOND / 10);
    stage.told.clear();
    stage.push("a", PREFILL, tag(20), tag(2), &[0], None);
    assert_eq!(stage.told(PREFILL), [refused(tag(2), Refusal::Protocol)]);
    stage.push("a", PREFILL, tag(20), tag(2), &[], Some(&"x".repeat(NOTE_LIMIT + 1)));
    assert_eq!(stage.told(PREFILL), [refused(tag(2), Refusal::Protocol)]);
    for (node, client, request) in [("b", DECODE, 2), ("b", DECODE, 4), ("a", PREFILL, 20), ("a", PREFILL, 2)] {
        stage.end(node, client, tag(request));
    }
    stage.end("b", NEIGHBOUR, tag(3));
    stage.expect_idle();
}

/// A push of one block from `a` to `b`, up to its outcome.
fn push_one(stage: &mut Stage, request: u64, number: u8) -> (Vec<LocalEvent>, Vec<LocalEvent>) {
    let (grant, local) = (tag(request), tag(request + 1));
    stage.granted("b", DECODE, grant, &[number], 0);
    stage.store("a", PREFILL, local, &[number], 0);
    stage.open("a", PREFILL, grant, "b", 1000);
    stage.run(SECOND / 10);
    stage.told.clear();
    stage.push("a", PREFILL, local, grant, &[0], Some("note"));
    stage.run(SECOND);
    (stage.told(PREFILL), stage.told(DECODE))
}

// Goal: a flipped bit is found wherever it flips, counted once and healed where it can be; a lost lane is tried again;
// a transport that drops a strip and says `Done` is found out. Method: one fault per push.
#[test]
fn faults_are_found() {
    let mut stage = Stage::new(8);
    let failures =
        |place: &str, node: &str| format!(r#"pyengine_checksum_failures_total{{node="{node}",where="{place}"}}"#);
    let complete = |request| LocalEvent::Complete { tag: tag(request), note: b"note".to_vec() };
    stage.world.network.corrupt_next();
    let (pusher, holder) = push_one(&mut stage, 1, 1);
    assert!(matches!(pusher.as_slice(), [LocalEvent::Pushed { note: true, .. }]), "sent again: {pusher:?}");
    assert_eq!(holder.last(), Some(&complete(1)));
    assert_eq!(stage.counter("a", &failures("wire", "a")), 1);
    assert_eq!(stage.counter("a", r#"pyengine_transfer_retries_total{node="a"}"#), 1);

    stage.world.network.lose_next();
    let (_, holder) = push_one(&mut stage, 3, 2);
    assert_eq!(holder.last(), Some(&complete(3)));
    assert_eq!(stage.counter("a", r#"pyengine_transfer_retries_total{node="a"}"#), 2);

    stage.world.network.corrupt_next();
    stage.world.network.corrupt_next();
    let (pusher, holder) = push_one(&mut stage, 5, 3);
    assert_eq!(pusher, [refused(tag(5), Refusal::Corrupt)]);
    assert_eq!(holder, [refused(tag(5), Refusal::Ended)], "the pusher has given up");

    stage.world.network.drop_strip_of_next();
    let (pusher, _) = push_one(&mut stage, 7, 4);
    assert_eq!(pusher, [refused(tag(7), Refusal::Corrupt)]);
    assert_eq!(stage.counter("b", &failures("wire", "b")), 1);

    // Rot in the source's own arena: counted once, there, and nobody finds the block any more.
    stage.store("a", PREFILL, tag(31), &[9], 0);
    let slot = stage.granted("a", PREFILL, tag(32), &[9], 0)[0];
    assert!(slot.committed);
    stage.arena("a").corrupt_for_test(slot.slot.slot, 1);
    stage.end("a", PREFILL, tag(31));
    stage.granted("b", DECODE, tag(33), &[9], 0);
    stage.open("a", PREFILL, tag(33), "b", 1000);
    stage.run(SECOND / 10);
    stage.told.clear();
    stage.push("a", PREFILL, tag(32), tag(33), &[0], None);
    stage.run(SECOND);
    assert_eq!(stage.told(PREFILL), [refused(tag(33), Refusal::Corrupt)]);
    assert_eq!(stage.counter("a", &failures("arena", "a")), 1);
    assert_eq!(stage.counter("a", &failures("wire", "a")), 3, "none more");
    assert!(
        stage
            .reports
            .iter()
            .any(|(_, report)| matches!(report, DaemonReport::Removed { key: of, .. } if *of == key(9)))
    );

    // A reader finds rot itself and says so.
    stage.told.clear();
    let slot = stage.granted("b", DECODE, tag(40), &[1], 0)[0];
    stage.arena("b").corrupt_for_test(slot.slot.slot, 0);
    assert_eq!(stage.load("b", slot.slot), None);
    stage.ask("b", DECODE, LocalRequest::Corrupt { tag: tag(40), index: 0 });
    assert_eq!(stage.counter("b", &failures("arena", "b")), 1);
    stage.ask("b", DECODE, LocalRequest::Lookup { tag: tag(41), keys: keys(&[1]) });
    assert_eq!(stage.told(DECODE), [LocalEvent::Located { tag: tag(41), slots: vec![], behind: 0 }]);
    for request in 1..=41 {
        stage.end("a", PREFILL, tag(request));
        stage.end("b", DECODE, tag(request));
    }
    stage.expect_idle();
}

// Goal: a fetch fills own slots from a peer's pool, block by block, and says what is missing; replication does the same
// for nobody. Method: a has blocks 1 and 2; b asks for 1, 2, 3.
#[test]
fn fetch_and_replicate() {
    let mut stage = Stage::new(8);
    stage.store("a", PREFILL, tag(1), &[1, 2], 0);
    stage.end("a", PREFILL, tag(1));
    let slots = stage.granted("b", DECODE, tag(2), &[1, 2, 3], 0);
    let from = stage.nodes["a"].clone();
    stage.ask("b", DECODE, LocalRequest::Fetch { tag: tag(2), indices: vec![0, 1, 2], from: vec![from.clone()] });
    stage.run(SECOND);
    let mut told = stage.told(DECODE);
    told.sort_by_key(|event| format!("{event:?}"));
    let fetched = |index, found| LocalEvent::Fetched { tag: tag(2), index, found };
    let here = |index: usize| Ok(Found { slot: slots[index].slot, peer: true, medium: Medium::Dram });
    assert_eq!(told, [fetched(0, here(0)), fetched(1, here(1)), fetched(2, Err(Refusal::Missing))]);
    assert_eq!(stage.load("b", slots[1].slot), Some(block(2)));
    stage.end("b", DECODE, tag(2));

    // What comes for nobody is cached, too; what was there counts as stored.
    stage.store("a", PREFILL, tag(3), &[4], 0);
    stage.end("a", PREFILL, tag(3));
    stage.reports.clear();
    let replicate = |order, numbers: &[u8], from: &NodeAddress| DaemonOrder::Replicate {
        order,
        keys: keys(numbers),
        parent: ROOT,
        position: 0,
        from: from.clone(),
    };
    stage.world.order("b", replicate(77, &[1, 4, 5], &from));
    stage.world.order("b", replicate(78, &[30, 31, 32, 33, 34, 35, 36, 37, 38], &from));
    stage.run(SECOND);
    for expected in [
        DaemonReport::Replicated { order: 77, stored: 2, missing: 1 },
        DaemonReport::Replicated { order: 78, stored: 0, missing: 9 },
    ] {
        assert!(stage.reports.iter().any(|(node, report)| node == "b" && *report == expected), "{:?}", stage.reports);
    }
    stage.ask("b", DECODE, LocalRequest::Lookup { tag: tag(6), keys: keys(&[1, 4]) });
    assert!(matches!(stage.told(DECODE).as_slice(), [LocalEvent::Located { slots, .. }] if slots.len() == 2));
    stage.end("b", DECODE, tag(6));

    // The holder dies under a fetch; the asker ends another.
    stage.granted("b", DECODE, tag(7), &[6], 0);
    stage.world.kill("a");
    stage.ask("b", DECODE, LocalRequest::Fetch { tag: tag(7), indices: vec![0], from: vec![from.clone()] });
    stage.run(SECOND);
    assert_eq!(stage.told(DECODE), [LocalEvent::Fetched { tag: tag(7), index: 0, found: Err(Refusal::Unreachable) }]);
    stage.granted("b", DECODE, tag(8), &[7], 0);
    stage.ask("b", DECODE, LocalRequest::Fetch { tag: tag(8), indices: vec![0], from: vec![from] });
    stage.end("b", DECODE, tag(7));
    stage.end("b", DECODE, tag(8));
    stage.expect_idle();
}

// Goal: a dead client's grants, pins and waiting wishes go with its connection, and the next in the queue is served; a
// dead pusher is reported to the one who waits for it. Method: kill each in turn.
#[test]
fn deaths_release() {
    let mut stage = Stage::new(5);
    stage.granted("b", NEIGHBOUR, tag(1), &[1, 2, 3], 1);
    stage.grant("b", DECODE, tag(2), &[4, 5], 1, GrantMode::Wait);
    assert_eq!(stage.told(DECODE), []);
    stage.world.client_gone("b", NEIGHBOUR);
    assert!(matches!(stage.told(DECODE).as_slice(), [LocalEvent::Granted { .. }]));
    // The pusher's process dies: its daemon says so. Then a whole node.
    stage.open("a", PREFILL, tag(2), "b", 1000);
    stage.run(SECOND / 10);
    stage.world.client_gone("a", PREFILL);
    stage.run(SECOND / 10);
    assert_eq!(stage.told(DECODE), [refused(tag(2), Refusal::Ended)]);
    stage.end("b", DECODE, tag(2));
    stage.granted("b", DECODE, tag(3), &[4, 5], 1);
    stage.ask("a", 11, LocalRequest::Attach { ticket: 1, layout: LAYOUT, namespace: 0 });
    stage.open("a", 11, tag(3), "b", 1000);
    stage.run(SECOND / 10);
    stage.world.kill("a");
    stage.run(SECOND / 10);
    assert_eq!(stage.told(DECODE), [refused(tag(3), Refusal::Unreachable)]);
    stage.end("b", DECODE, tag(3));
    stage.expect_idle();
}

// Goal: a dump names the sequence at which it was cut, and holds what is published then. Method: store, dump, compare.
#[test]
fn dump_is_cut_at_its_sequence() {
    let mut stage = Stage::new(8);
    stage.world.order("a", DaemonOrder::Dump);
    stage.look();
    assert!(
        matches!(&stage.reports.last(), Some((_, DaemonReport::Dump { sequence: 0, part: 0, blocks, last: true })) if blocks.is_empty())
    );
    stage.store("a", PREFILL, tag(1), &[1, 2], 1);
    stage.world.order("a", DaemonOrder::Dump);
    stage.look();
    let blocks = vec![(key(1), ROOT, 0, Medium::Dram), (key(2), key(1), 1, Medium::Dram)];
    let expected = DaemonReport::Dump { sequence: 2, part: 0, blocks, last: true };
    assert_eq!(stage.reports.last().map(|(_, report)| report), Some(&expected));
    stage.run(2 * SECOND);
    let beat = stage.reports.iter().rev().find_map(|(node, report)| match report {
        DaemonReport::Heartbeat { next_sequence, count, xor, .. } if node == "a" => {
            Some((*next_sequence, *count, *xor))
        }
        _ => None,
    });
    assert_eq!(beat, Some((2, 2, key(1 ^ 2))));
}

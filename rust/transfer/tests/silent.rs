//! A peer whose session stands and who does not answer.
//!
//! Goal: whoever waits for its blocks gets them from others, or is told, within what is due; it is not asked for a while,
//! and once more when that is over; what it writes late harms nobody. Method: three nodes in virtual time, of which one is
//! deaf; the engines' `check` runs after every input.

use pyengine_transfer::engine::{Engine, Input, Output, Settings};
use pyengine_transfer::memory::slot_bytes;
use pyengine_transfer::messages::{
    DaemonOrder, DaemonReport, GrantMode, GrantedSlot, LocalEvent, LocalRequest, PeerMessage, Refusal,
};
use pyengine_transfer::transport::sim::{Faults, World};
use pyengine_transfer::types::{BlockKey, ClientId, Layout, NodeAddress, SlotRef, Tag};

const LAYOUT: Layout = Layout { strips: 3, strip_bytes: 16 };
const SECOND: u64 = 1_000_000_000;
const ROOT: BlockKey = BlockKey([0; 16]);
/// Longer than anything that is answered takes, and shorter than a peer may be silent.
const SOON: u64 = 3 * SECOND;
/// Longer than a peer may be silent.
const LATE: u64 = 6 * SECOND;

fn key(number: u8) -> BlockKey {
    BlockKey([number; 16])
}

fn tag(request: u64) -> Tag {
    Tag { request, attempt: 1, worker: 9 }
}

fn block(number: u8) -> Vec<u8> {
    (0..48).map(|byte| byte ^ number).collect()
}

/// One client at each node, numbered as they are, from 1 on.
const A: ClientId = 1;
const NODES: [&str; 3] = ["a", "b", "c"];

struct Stage {
    world: World,
    nodes: Vec<NodeAddress>,
}

impl Stage {
    /// `b` and `c` have the blocks 1 to 9.
    fn new() -> Self {
        Self::with_fetches(4096)
    }

    /// With so many fetches at once.
    fn with_fetches(fetches: usize) -> Self {
        let mut world = World::new(5, Faults::default());
        let bytes = 4096 + 16 * slot_bytes(LAYOUT).expect("possible");
        let nodes = NODES.map(|node| world.start(node, Settings { fetches, ..Settings::new(bytes) })).into();
        for (client, node) in (A..).zip(NODES) {
            world.request(node, client, LocalRequest::Attach { ticket: 0, layout: LAYOUT, namespace: 1 });
        }
        world.take_events();
        let mut stage = Self { world, nodes };
        for client in [A + 1, A + 2] {
            let slots = stage.granted(client, tag(1), &(1..=9).collect::<Vec<u8>>());
            for (number, slot) in (1..).zip(&slots) {
                stage.arena(client).store(slot.slot, 0, &block(number)).expect("in range");
            }
            stage.ask(client, LocalRequest::Commit { tag: tag(1), indices: (0..9).collect() });
            stage.ask(client, LocalRequest::End { tag: tag(1) });
        }
        stage
    }

    fn arena(&self, client: ClientId) -> std::sync::Arc<pyengine_transfer::memory::Arena> {
        self.world.engine(NODES[client as usize - 1]).and_then(|engine| engine.arena(client)).expect("attached")
    }

    fn ask(&mut self, client: ClientId, request: LocalRequest) {
        self.world.request(NODES[client as usize - 1], client, request);
    }

    fn told(&mut self, client: ClientId) -> Vec<LocalEvent> {
        self.world.take_events().into_iter().filter(|(_, to, _)| *to == client).map(|(.., event)| event).collect()
    }

    fn granted(&mut self, client: ClientId, tag: Tag, numbers: &[u8]) -> Vec<GrantedSlot> {
        let keys = numbers.iter().map(|number| key(*number)).collect();
        let mode = GrantMode::Now;
        self.ask(client, LocalRequest::Grant { tag, keys, private: 0, parent: ROOT, position: 0, mode, tenant: 0 });
        match self.told(client).pop() {
            Some(LocalEvent::Granted { slots, .. }) => slots,
            other => panic!("not granted: {other:?}"),
        }
    }

    /// `a` wants these blocks of these peers.
    fn fetch(&mut self, tag: Tag, numbers: &[u8], from: &[usize]) -> Vec<GrantedSlot> {
        let slots = self.granted(A, tag, numbers);
        let from = from.iter().map(|node| self.nodes[*node].clone()).collect();
        self.ask(A, LocalRequest::Fetch { tag, indices: (0..numbers.len() as u32).collect(), from });
        slots
    }

    /// What has become of a fetch of these blocks by now, by place: where each is, all being right, or why not.
    fn fetched(&mut self, numbers: &[u8]) -> Vec<Option<Result<SlotRef, Refusal>>> {
        let mut outcomes = vec![None; numbers.len()];
        for event in self.told(A) {
            let LocalEvent::Fetched { index, found, .. } = event else { panic!("{event:?}") };
            outcomes[index as usize] = Some(found.map(|found| found.slot));
        }
        for (number, outcome) in numbers.iter().zip(&outcomes) {
            if let Some(Ok(slot)) = outcome {
                self.expect(*slot, *number);
            }
        }
        outcomes
    }

    fn expect(&self, slot: SlotRef, number: u8) {
        let mut bytes = vec![0; LAYOUT.block_bytes()];
        assert!(
            self.arena(A).load(slot, 0, &mut bytes).expect("in range"),
            "block {number} does not fit its checksums"
        );
        assert_eq!(bytes, block(number));
    }

    fn abandoned(&self) -> u64 {
        let counters = self.world.engine("a").expect("it lives").counters();
        counters.iter().find(|(name, _)| name.starts_with("pyengine_fetches_abandoned")).expect("counted").1
    }

    fn idle(&self) -> bool {
        NODES.iter().all(|node| self.world.engine(node).expect("it lives").idle())
    }
}

#[test]
fn another_holder_is_asked_and_the_silent_one_rests() {
    let mut stage = Stage::new();
    stage.world.deafen("b");
    let slots = stage.fetch(tag(10), &[1, 2], &[1, 2]);
    stage.world.run(SOON);
    assert_eq!(stage.fetched(&[1, 2]), [None, None], "it may still answer");
    stage.world.run(LATE - SOON);
    let found = stage.fetched(&[1, 2]);
    let moved = |(slot, found): (&GrantedSlot, &Option<Result<SlotRef, Refusal>>)| match found {
        Some(Ok(found)) => *found != slot.slot,
        other => panic!("{other:?}"),
    };
    assert!(slots.iter().zip(&found).all(moved), "the silent one may still write what it was told of");
    assert_eq!(stage.abandoned(), 1);
    // It rests: nobody waits for it now.
    stage.fetch(tag(11), &[3], &[1, 2]);
    stage.world.run(SECOND / 10);
    assert!(matches!(stage.fetched(&[3])[..], [Some(Ok(_))]));
    stage.fetch(tag(12), &[4], &[1]);
    assert_eq!(stage.fetched(&[4]), [Some(Err(Refusal::Unreachable))]);
    assert!(!stage.idle(), "what it may write is not forgotten");
    // It wakes up and does what it was asked to do; nobody is harmed, and it is asked again.
    stage.world.listen("b");
    stage.world.run(SECOND);
    for (found, number) in found.into_iter().zip([1, 2]) {
        stage.expect(found.expect("found").expect("found"), number);
    }
    stage.fetch(tag(13), &[5], &[1]);
    stage.world.run(SECOND / 10);
    assert!(matches!(stage.fetched(&[5])[..], [Some(Ok(_))]));
    (10..=13).for_each(|request| stage.ask(A, LocalRequest::End { tag: tag(request) }));
    stage.world.run(SECOND);
    assert!(stage.idle());
}

#[test]
fn after_a_rest_it_is_asked_once_more_and_rests_longer() {
    let mut stage = Stage::new();
    stage.world.deafen("b");
    let mut rests = Vec::new();
    for request in 10..13 {
        stage.fetch(tag(request), &[1], &[1]);
        stage.world.run(LATE);
        assert_eq!(stage.fetched(&[1]), [Some(Err(Refusal::Unreachable))]);
        stage.ask(A, LocalRequest::End { tag: tag(request) });
        let began = stage.world.now();
        for probe in 0.. {
            let tag = tag(1000 * request + probe);
            stage.fetch(tag, &[2], &[1]);
            let rests = stage.fetched(&[2]) == [Some(Err(Refusal::Unreachable))];
            stage.ask(A, LocalRequest::End { tag });
            if !rests {
                break;
            }
            stage.world.run(SECOND);
        }
        rests.push((stage.world.now() - began) / SECOND);
    }
    assert!(rests[0] >= 8 && rests[1] >= 2 * rests[0] && rests[2] >= 2 * rests[1] - 8, "{rests:?}");
}

// Goal: one that never answers leaves room for the others, however long it goes on. Method: it is asked whenever it may be, until
// fetches are scarce; then another peer is.
#[test]
fn whoever_never_answers_does_not_use_up_all_fetches() {
    const FETCHES: usize = 8;
    let mut stage = Stage::with_fetches(FETCHES);
    stage.world.deafen("b");
    for request in 10..10 + 2 * FETCHES as u64 {
        stage.fetch(tag(request), &[1], &[1]);
        stage.world.run(LATE);
        stage.ask(A, LocalRequest::End { tag: tag(request) });
        // Longer than it ever rests.
        stage.world.run(310 * SECOND);
    }
    assert!(stage.abandoned() >= FETCHES as u64 / 2, "{}", stage.abandoned());
    stage.told(A);
    stage.fetch(tag(50), &[1], &[1, 2]);
    stage.world.run(SECOND / 10);
    assert!(matches!(stage.fetched(&[1])[..], [Some(Ok(_))]));
}

#[test]
fn with_nobody_else_to_ask_whoever_waits_is_told_and_must_not_write_there() {
    let mut stage = Stage::new();
    stage.world.deafen("b");
    let slots = stage.fetch(tag(10), &[1, 2], &[1]);
    // Another client's wish for the same block waits for that one, and goes on with its own sources.
    stage.ask(
        A,
        LocalRequest::Prefetch { keys: vec![key(2)], parent: ROOT, position: 0, from: vec![stage.nodes[2].clone()] },
    );
    stage.world.run(LATE);
    assert_eq!(stage.fetched(&[1, 2])[0], Some(Err(Refusal::Unreachable)));
    stage.arena(A).store(slots[0].slot, 0, &block(1)).expect("in range");
    stage.ask(A, LocalRequest::Commit { tag: tag(10), indices: vec![0] });
    let told = stage.told(A);
    assert!(matches!(told[..], [LocalEvent::Refused { refusal: Refusal::Corrupt, .. }]), "{told:?}");
    stage.ask(A, LocalRequest::End { tag: tag(10) });
    // A slot of another life is anybody's at once.
    let slots = stage.granted(A, tag(11), &[1]);
    stage.arena(A).store(slots[0].slot, 0, &block(1)).expect("in range");
    stage.ask(A, LocalRequest::Commit { tag: tag(11), indices: vec![0] });
    stage.world.listen("b");
    stage.world.run(SECOND);
    stage.expect(slots[0].slot, 1);
    stage.ask(A, LocalRequest::End { tag: tag(11) });
    stage.world.run(SECOND);
    assert!(stage.told(A).is_empty());
    assert!(stage.idle());
}

#[test]
fn an_end_of_the_link_ends_what_is_owed_on_it() {
    let mut stage = Stage::new();
    stage.world.deafen("b");
    stage.fetch(tag(10), &[1], &[1]);
    stage.world.run(LATE);
    stage.ask(A, LocalRequest::End { tag: tag(10) });
    stage.world.break_session("a", "b");
    stage.world.run(SECOND);
    assert!(stage.idle());
}

#[test]
fn a_replication_from_a_silent_peer_ends_too() {
    let mut stage = Stage::new();
    stage.world.deafen("b");
    let (keys, from) = (vec![key(1), key(2)], stage.nodes[1].clone());
    stage.world.order("a", DaemonOrder::Replicate { order: 3, keys, parent: ROOT, position: 0, from });
    stage.world.run(LATE);
    let reports = stage.world.take_reports();
    let done =
        reports.iter().any(|(_, report)| *report == DaemonReport::Replicated { order: 3, stored: 0, missing: 2 });
    assert!(done, "{reports:?}");
}

// Goal: a node that was itself stopped takes nobody for silent. Method: an engine by hand, whose time jumps.
#[test]
fn time_in_which_nobody_ticked_is_nobodys_silence() {
    let address = |node: &str| NodeAddress { node: node.into(), address: format!("{node}:1"), incarnation: 1 };
    let mut engine = Engine::new(address("a"), Settings::new(4096 + 16 * slot_bytes(LAYOUT).expect("possible")));
    let mut feed = |input: Input, now: u64| {
        let mut out = Vec::new();
        engine.handle(input, now, &mut out);
        engine.check();
        out
    };
    let cancels = |out: &[Output]| {
        out.iter().any(|output| matches!(output, Output::Peer { message: PeerMessage::FetchCancel { .. }, .. }))
    };
    let mut now = 50 * SECOND;
    feed(Input::PeerUp { peer: address("b") }, now);
    feed(Input::Local { client: 1, request: LocalRequest::Attach { ticket: 0, layout: LAYOUT, namespace: 1 } }, now);
    let (keys, mode) = (vec![key(1)], GrantMode::Now);
    let grant = LocalRequest::Grant { tag: tag(1), keys, private: 0, parent: ROOT, position: 0, mode, tenant: 0 };
    feed(Input::Local { client: 1, request: grant }, now);
    let fetch = LocalRequest::Fetch { tag: tag(1), indices: vec![0], from: vec![address("b")] };
    feed(Input::Local { client: 1, request: fetch }, now);
    for _ in 0..3 {
        now += 20 * SECOND;
        assert!(!cancels(&feed(Input::Tick, now)), "the answer may be the next input");
    }
    let mut ticks = 0;
    while !cancels(&feed(Input::Tick, now)) {
        (ticks, now) = (ticks + 1, now + SECOND / 10);
    }
    assert!((40..=60).contains(&ticks), "given up after {ticks} ticks");
}

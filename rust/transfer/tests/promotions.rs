//! Reads of the medium behind the arena that do not go as they should, in one engine that the test drives by hand.
//!
//! Goal: whoever waits for such a read is told, however many they are; what was removed meanwhile stays away.
//! Method: a block on a tier in memory, which works when it is polled: the test does its mischief before.

use std::time::Duration;

use pyengine_transfer::engine::{Engine, Input, Output, Settings};
use pyengine_transfer::messages::{GrantMode, LocalEvent, LocalRequest, PeerMessage, Refusal, Ticket};
use pyengine_transfer::pool::tier::Tier;
use pyengine_transfer::pool::twin::{MemoryTier, Shelf};
use pyengine_transfer::types::{BlockKey, ClientId, Layout, NodeAddress, RegionId, SlotRef, Tag};

const LAYOUT: Layout = Layout { strips: 3, strip_bytes: 16 };
const ROOT: BlockKey = BlockKey([0; 16]);
const KEY: BlockKey = BlockKey([9; 16]);

fn address(node: &str) -> NodeAddress {
    NodeAddress { node: node.into(), address: "127.0.0.1:1".into(), incarnation: 5 }
}

/// One engine and all that it has said.
struct Alone {
    engine: Engine,
    now: u64,
    out: Vec<Output>,
}

impl Alone {
    fn new(tier: Box<dyn Tier>) -> Self {
        Self { engine: Engine::with_tier(address("a"), Settings::new(1 << 20), tier), now: 0, out: Vec::new() }
    }

    fn over(shelf: &Shelf) -> Self {
        Self::new(Box::new(MemoryTier::new(shelf.clone(), 1 << 20, 1 << 20)))
    }

    fn handle(&mut self, input: Input) {
        self.now += 1;
        self.engine.handle(input, self.now, &mut self.out);
        self.engine.check();
    }

    fn ask(&mut self, client: ClientId, request: LocalRequest) {
        self.handle(Input::Local { client, request });
    }

    fn attach(&mut self, client: ClientId) {
        self.ask(client, LocalRequest::Attach { ticket: 0, layout: LAYOUT, namespace: 4 });
    }

    /// A grant of the block that is held at once.
    fn granted(&mut self, client: ClientId) -> (Tag, SlotRef) {
        let tag = Tag { request: client, attempt: 1, worker: 1 };
        let (keys, mode) = (vec![KEY], GrantMode::Now);
        self.ask(client, LocalRequest::Grant { tag, keys, private: 0, parent: ROOT, position: 0, mode, tenant: 0 });
        match self.out.last() {
            Some(Output::Local { event: LocalEvent::Granted { slots, .. }, .. }) => (tag, slots[0].slot),
            other => panic!("not granted but {other:?}"),
        }
    }

    /// A peer asks for the block, this often.
    fn peer_asks(&mut self, peer: &str, ticket: Ticket, count: usize) {
        let slot = |slot: usize| SlotRef { slot: slot as u32, generation: 1 };
        let blocks = (0..count).map(|number| (KEY, slot(number))).collect();
        let message = PeerMessage::Fetch { ticket, region: RegionId(0), layout: LAYOUT, blocks };
        self.handle(Input::Peer { peer: peer.into(), message });
    }

    /// How often a peer was told this of the block.
    fn refused(&self, of: Refusal) -> usize {
        let told = |output: &&Output| match output {
            Output::Peer { message: PeerMessage::Fetched { copied: Err(refusal), .. }, .. } => *refusal == of,
            _ => false,
        };
        self.out.iter().filter(told).count()
    }
}

/// A shelf with the block.
fn shelf() -> Shelf {
    let shelf = Shelf::default();
    let mut maker = Alone::over(&shelf);
    maker.attach(1);
    let (tag, slot) = maker.granted(1);
    maker.engine.arena(1).expect("attached").store(slot, 0, &[7; 48]).expect("in range");
    maker.ask(1, LocalRequest::Commit { tag, indices: vec![0] });
    maker.ask(1, LocalRequest::End { tag });
    maker.handle(Input::Stop);
    while !maker.engine.has_left() {
        maker.handle(Input::Tier);
    }
    maker.engine.close(Duration::ZERO);
    shelf
}

// Goal: however many wait for one block, and the last hope fails: each is told, on a thread with an ordinary stack.
// Method: a peer names one block sixty thousand times in one fetch, and it rots.
#[test]
fn many_wait_for_a_rotten_block() {
    const COUNT: usize = 60_000;
    let shelf = shelf();
    let mut alone = Alone::over(&shelf);
    alone.handle(Input::PeerUp { peer: address("b") });
    alone.peer_asks("b", 1, COUNT);
    assert_eq!(alone.refused(Refusal::Missing), 0, "all wait");
    assert!(shelf.rot(&KEY));
    alone.handle(Input::Tier);
    assert_eq!(alone.refused(Refusal::Corrupt), 1, "for this one it was read");
    assert_eq!(alone.refused(Refusal::Missing), COUNT - 1);
    assert!(alone.engine.idle(), "{:#?}", alone.engine.unfinished());
}

// Goal: what waits for one peer has a limit, over all its fetches; others are not concerned. Method: three fetches that add
// up to more, while the block is still on its way, and one of another peer.
#[test]
fn what_a_peer_may_wait_for_has_a_limit() {
    let limit = 100;
    let settings = Settings { copies_waiting: limit, ..Settings::new(1 << 20) };
    let mut alone = Alone::over(&shelf());
    alone.engine = Engine::with_tier(address("a"), settings, Box::new(MemoryTier::new(shelf(), 1 << 20, 1 << 20)));
    ["b", "c"].into_iter().for_each(|peer| alone.handle(Input::PeerUp { peer: address(peer) }));
    for (ticket, count, refused) in [(1, limit - 10, 0), (2, 20, 10), (3, 5, 15)] {
        alone.peer_asks("b", ticket, count);
        assert_eq!(alone.refused(Refusal::Full), refused);
    }
    alone.peer_asks("c", 1, 5);
    assert_eq!(alone.refused(Refusal::Full), 15);
    alone.handle(Input::Tier);
    assert_eq!(alone.refused(Refusal::Missing), 0);
    // All wait for copies now, and the limit is the same.
    alone.peer_asks("b", 4, 5);
    assert_eq!(alone.refused(Refusal::Full), 20);
}

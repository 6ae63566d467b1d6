//! Reads of the medium behind the arena that do not go as they should, in one engine that the test drives by hand.
//!
//! Goal: whoever waits for such a read is told, however many they are; what was removed meanwhile stays away.
//! Method: a block on a tier in memory, which works when it is polled: the test does its mischief before. Or on one that
//! is ahead of what it tells, and hangs when the test says so.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use pyengine_transfer::admin::Cursor;
use pyengine_transfer::engine::{Engine, Input, Output, Settings};
use pyengine_transfer::memory::{ReadHold, WriteHold, checksum};
use pyengine_transfer::messages::{DaemonReport, GrantMode, LocalEvent, LocalRequest, PeerMessage, Refusal, Ticket};
use pyengine_transfer::pool::tier::{Capacity, Health, OpId, Record, Tier, TierEvent, Whose};
use pyengine_transfer::pool::twin::{MemoryTier, Shelf};
use pyengine_transfer::types::{
    BlockKey, ClientId, Kind, Layout, Medium, NodeAddress, NodeId, Owner, RegionId, SlotRef, Tag,
};

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

    /// The client wants the block in its slot, from here or from these.
    fn fetch(&mut self, client: ClientId, from: &[&str]) -> (Tag, SlotRef) {
        self.attach(client);
        let (tag, slot) = self.granted(client);
        let from = from.iter().map(|node| address(node)).collect();
        self.ask(client, LocalRequest::Fetch { tag, indices: vec![0], from });
        (tag, slot)
    }

    /// A peer that was asked for the block puts it where it is to be.
    fn peer_brings(&mut self, client: ClientId) -> SlotRef {
        let asked = self.out.iter().rev().find_map(|output| match output {
            Output::Peer { peer, message: PeerMessage::Fetch { ticket, blocks, .. } } => {
                Some((peer.clone(), *ticket, blocks[0].1))
            }
            _ => None,
        });
        let (peer, ticket, slot): (NodeId, Ticket, SlotRef) = asked.expect("a peer was asked");
        let arena = self.engine.arena(client).expect("attached");
        let mut hold = arena.begin_write(slot, 0..LAYOUT.strips).expect("nobody writes it");
        hold.strips_mut(0..LAYOUT.strips).fill(8);
        (0..LAYOUT.strips).for_each(|strip| hold.set_checksum(strip, checksum(&[8; 16])));
        drop(hold);
        let message =
            PeerMessage::Fetched { ticket, place: 0, copied: Ok((Kind::Tcp, Medium::Dram, Owner::default())) };
        self.handle(Input::Peer { peer, message });
        slot
    }

    fn expect_idle(&mut self, tags: impl IntoIterator<Item = (ClientId, Tag)>) {
        tags.into_iter().for_each(|(client, tag)| self.ask(client, LocalRequest::End { tag }));
        self.handle(Input::Tier);
        self.handle(Input::Tick);
        assert!(self.engine.idle(), "{:#?}", self.engine.unfinished());
    }

    /// What the clients were told of their fetches.
    fn fetched(&self) -> Vec<(ClientId, Result<bool, Refusal>)> {
        let told = |output: &Output| match output {
            Output::Local { client, event: LocalEvent::Fetched { found, .. } } => {
                Some((*client, found.map(|found| found.peer)))
            }
            _ => None,
        };
        self.out.iter().filter_map(told).collect()
    }
}

/// How an [`Ahead`] does.
const WELL: u8 = 0;
/// It hangs, and has not noticed.
const HANGS: u8 = 1;
const FAILED: u8 = 2;

/// A tier that has done what it has not told yet, and can hang: then what is read is neither done nor given back.
struct Ahead {
    tier: MemoryTier,
    done: Vec<TierEvent>,
    stuck: Vec<(OpId, BlockKey, WriteHold)>,
    stuck_checks: Vec<(OpId, BlockKey)>,
    hangs: Arc<AtomicU8>,
}

impl Ahead {
    fn over(shelf: &Shelf) -> (Alone, Arc<AtomicU8>) {
        let hangs = Arc::new(AtomicU8::new(WELL));
        let tier = MemoryTier::new(shelf.clone(), 1 << 20, 1 << 20);
        let ahead = Self { tier, done: Vec::new(), stuck: Vec::new(), stuck_checks: Vec::new(), hangs: hangs.clone() };
        (Alone::new(Box::new(ahead)), hangs)
    }
}

impl Tier for Ahead {
    fn write(&mut self, op: OpId, record: Record, block: ReadHold) {
        self.tier.write(op, record, block);
    }

    fn read(&mut self, op: OpId, key: &BlockKey, into: WriteHold) {
        if self.hangs.load(Ordering::Relaxed) != WELL {
            return self.stuck.push((op, *key, into));
        }
        self.tier.read(op, key, into);
        self.done.append(&mut self.tier.poll());
    }

    fn verify(&mut self, op: OpId, key: &BlockKey) -> bool {
        if self.hangs.load(Ordering::Relaxed) != WELL {
            self.stuck_checks.push((op, *key));
            return true;
        }
        self.tier.verify(op, key)
    }

    fn remove(&mut self, key: &BlockKey) -> bool {
        self.tier.remove(key)
    }

    fn clear(&mut self, whose: Whose) -> Vec<BlockKey> {
        self.tier.clear(whose)
    }

    fn find(&self, key: &BlockKey) -> Option<Record> {
        self.tier.find(key)
    }

    fn records(&self) -> Box<dyn Iterator<Item = Record> + '_> {
        self.tier.records()
    }

    fn page(&self, from: u32, count: u32) -> (Vec<Record>, Option<u32>) {
        self.tier.page(from, count)
    }

    fn flush(&mut self, op: OpId) {
        self.tier.flush(op);
    }

    fn poll(&mut self) -> Vec<TierEvent> {
        if self.hangs.load(Ordering::Relaxed) == WELL {
            self.stuck.drain(..).for_each(|(op, key, into)| self.tier.read(op, &key, into));
            self.stuck_checks.drain(..).for_each(|(op, key)| assert!(self.tier.verify(op, &key)));
            self.done.append(&mut self.tier.poll());
        }
        std::mem::take(&mut self.done)
    }

    fn capacity(&self) -> Capacity {
        let health = if self.hangs.load(Ordering::Relaxed) == FAILED { Health::Failed } else { Health::Good };
        Capacity { health, ..self.tier.capacity() }
    }

    fn close(&mut self, within: Duration) {
        self.tier.close(within);
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

// Goal: what is removed while it is read, by its key or with its namespace, is not here again afterwards, for nobody: it may
// have been made by other weights. Method: both, for a hint, a client and a peer.
#[test]
fn what_is_removed_while_it_is_read_stays_away() {
    for whose in [None, Some(Whose::Namespace(4))] {
        let (mut alone, _) = Ahead::over(&shelf());
        alone.attach(1);
        alone.handle(Input::PeerUp { peer: address("b") });
        let (keys, from) = (vec![KEY], Vec::new());
        alone.ask(1, LocalRequest::Prefetch { keys, parent: ROOT, position: 0, from });
        let (tag, _) = alone.fetch(2, &[]);
        alone.peer_asks("b", 1, 1);
        let evicted = match whose {
            None => alone.engine.evict(&[KEY], 9, &mut alone.out),
            Some(_) => {
                let tier =
                    alone.engine.keys(Default::default(), &Default::default(), None).1.expect("the tier is next");
                alone.engine.evict_stretch(tier, whose, 9, &mut alone.out).0
            }
        };
        assert_eq!(evicted.dropped, 1);
        alone.handle(Input::Tier);
        assert_eq!(alone.fetched(), [(2, Err(Refusal::Missing))]);
        assert_eq!(alone.refused(Refusal::Missing), 1);
        alone.expect_idle([(2, tag)]);
        let mut from = Some(Default::default());
        while let Some(cursor) = from {
            let (listed, next) = alone.engine.keys(cursor, &Default::default(), None);
            assert!(listed.is_empty(), "removed, and here again: {listed:?}");
            from = next;
        }
    }
}

// Goal: a medium that hangs keeps nobody: who waits for it goes on with the peers that he has named, who comes later does not
// begin with it, and who has nobody else is told. When it answers again it is used again, and no slot is missing.
// Method: a client with a peer, one without and a peer wait when it hangs; another client comes later.
#[test]
fn a_medium_that_hangs_keeps_nobody() {
    let (mut alone, health) = Ahead::over(&shelf());
    ["b", "c"].into_iter().for_each(|peer| alone.handle(Input::PeerUp { peer: address(peer) }));
    health.store(HANGS, Ordering::Relaxed);
    let (first, mine) = alone.fetch(1, &["b"]);
    alone.peer_asks("c", 1, 1);
    let (second, _) = alone.fetch(2, &[]);
    alone.handle(Input::Tick);
    assert!(alone.fetched().is_empty() && alone.refused(Refusal::Missing) == 0, "all wait");
    health.store(FAILED, Ordering::Relaxed);
    alone.handle(Input::Tick);
    assert_eq!(alone.refused(Refusal::Missing), 1, "that peer cannot wait for another one");
    let came_to = alone.peer_brings(1);
    assert_ne!(came_to, mine, "the medium may still write to that one");
    let arena = alone.engine.arena(1).expect("attached");
    assert!(arena.begin_write(mine, 0..LAYOUT.strips).is_err(), "so it may");
    assert_eq!(alone.fetched(), [(1, Ok(true)), (2, Ok(true))]);
    let mut bytes = [0; 48];
    assert!(arena.load(came_to, 0, &mut bytes).expect("in range") && bytes == [8; 48]);
    [(1, first), (2, second)].into_iter().for_each(|(client, tag)| alone.ask(client, LocalRequest::End { tag }));
    assert!(!alone.engine.idle(), "a slot is written still");
    alone.engine.evict(&[KEY], 9, &mut alone.out);
    health.store(WELL, Ordering::Relaxed);
    alone.expect_idle([]);
}

// Goal: one who has named nobody is told when the medium hangs, and who comes then does not begin with it. Leaving is possible
// at any time. Method: clients that fetch before and after, and one that ends.
#[test]
fn who_has_no_other_source_is_told() {
    let (mut alone, health) = Ahead::over(&shelf());
    alone.handle(Input::PeerUp { peer: address("b") });
    health.store(HANGS, Ordering::Relaxed);
    let (first, _) = alone.fetch(1, &[]);
    let (second, _) = alone.fetch(2, &["b"]);
    health.store(FAILED, Ordering::Relaxed);
    alone.handle(Input::Tick);
    assert_eq!(alone.fetched(), [(1, Err(Refusal::Missing))]);
    // The second goes on by itself, and the third with it: then the second leaves.
    let (third, slot) = alone.fetch(3, &["b"]);
    alone.ask(2, LocalRequest::End { tag: second });
    assert_eq!(alone.peer_brings(3), slot, "nothing else writes there");
    assert_eq!(alone.fetched()[1..], [(3, Ok(true))]);
    let cancelled = alone.out.iter().find_map(|output| match output {
        Output::Peer { message: PeerMessage::FetchCancel { ticket }, .. } => Some(*ticket),
        _ => None,
    });
    let message = PeerMessage::FetchEnded { ticket: cancelled.expect("nobody wants that one") };
    alone.handle(Input::Peer { peer: "b".into(), message });
    health.store(WELL, Ordering::Relaxed);
    alone.expect_idle([(1, first), (3, third)]);
}

// Goal: who has a tier verified does not wait for one that hangs, and what it says later is heeded. Method: a verification of a block
// that has rotted hangs, is told to have failed, and ends when the medium answers.
#[test]
fn who_verifies_waits_for_no_medium_that_hangs() {
    let shelf = shelf();
    let (mut alone, health) = Ahead::over(&shelf);
    assert!(shelf.rot(&KEY));
    health.store(HANGS, Ordering::Relaxed);
    let from = alone.engine.verifies_tier(Cursor::default(), None).expect("it has one");
    let (number, next) = alone.engine.scrub(from, 9, &mut alone.out);
    alone.handle(Input::Tick);
    let found = |alone: &Alone| {
        let told = alone.out.iter().filter_map(|output| match output {
            Output::Scrubbed { number, found } => Some((*number, found.failed, found.blocks)),
            _ => None,
        });
        told.collect::<Vec<_>>()
    };
    assert_eq!((found(&alone), next), (vec![], None), "it may still answer");
    health.store(FAILED, Ordering::Relaxed);
    alone.handle(Input::Tick);
    assert_eq!(found(&alone), [(number, 1, 0)]);
    health.store(WELL, Ordering::Relaxed);
    alone.handle(Input::Tick);
    assert_eq!(found(&alone).len(), 1, "told once");
    let gone = |output: &Output| matches!(output, Output::Report(DaemonReport::Removed { key: KEY, .. }));
    assert_eq!(alone.out.iter().filter(|output| gone(output)).count(), 1);
}

// Goal: a block that another store has published already serves all who wait for it, also peers, from where it has landed.
// Method: two layouts; the block is made in the other one while it is read in this one.
#[test]
fn what_is_not_published_serves_all_who_wait() {
    let (mut alone, _) = Ahead::over(&shelf());
    let other = Layout { strips: 2, strip_bytes: 16 };
    alone.ask(5, LocalRequest::Attach { ticket: 0, layout: other, namespace: 4 });
    let (made, slot) = alone.granted(5);
    alone.handle(Input::PeerUp { peer: address("b") });
    let (first, _) = alone.fetch(1, &["b"]);
    alone.peer_asks("b", 1, 1);
    let (second, _) = alone.fetch(2, &["b"]);
    alone.peer_asks("b", 2, 1);
    alone.engine.arena(5).expect("attached").store(slot, 0, &[7; 32]).expect("in range");
    alone.ask(5, LocalRequest::Commit { tag: made, indices: vec![0] });
    alone.handle(Input::Tier);
    assert_eq!(alone.refused(Refusal::Missing), 0);
    let copies = alone.out.iter().map(|output| match output {
        Output::Submit { copies, .. } => copies.len(),
        _ => 0,
    });
    assert_eq!(copies.sum::<usize>(), 2, "both fetches of the peer are served");
    alone.handle(Input::Tier);
    assert_eq!(alone.fetched(), [(1, Ok(false)), (2, Ok(false))]);
    [(5, made), (1, first), (2, second)]
        .into_iter()
        .for_each(|(client, tag)| alone.ask(client, LocalRequest::End { tag }));
}

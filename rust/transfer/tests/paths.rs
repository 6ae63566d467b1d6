//! The mover's promises about paths, time and order, one by one.
//!
//! Goal: falling back, coming back, giving up, and who goes first are as `mover` says, and visible. Method: two nodes
//! over the simulated network with a shm and a tcp path between them; virtual time.

use std::sync::Arc;

use pyengine_transfer::mover::{
    BreakerState, Ended, Failure, Mover, Part, Priority, Progress, Request, Settings, TransferId, Via,
};
use pyengine_transfer::region::{Access, Buffer, By, Regions};
use pyengine_transfer::transport::sim::{Faults, Network};
use pyengine_transfer::transport::{Busy, Kind, Op, PIECE_BYTES, Path, Transport};
use pyengine_transfer::types::{Nanos, NodeAddress, NodeId, RegionId, Span};

const MILLISECOND: Nanos = 1_000_000;
const SECOND: Nanos = 1_000 * MILLISECOND;
const ALL: Access = Access { read: true, write: true };
const PIECE: u64 = PIECE_BYTES as u64;

struct Stage {
    network: Network,
    mover: Mover,
    peer: NodeAddress,
    regions: Arc<Regions>,
    local: RegionId,
    remote: RegionId,
    ended: Vec<(TransferId, Ended)>,
}

fn node(name: &str, incarnation: u64) -> NodeAddress {
    NodeAddress { node: name.into(), address: format!("{name}:1"), incarnation }
}

impl Stage {
    /// With settings and faults; not connected.
    fn with(settings: Settings, faults: Faults) -> Self {
        let network = Network::new(7, faults);
        let (me, peer) = (node("a", 1), node("b", 2));
        drop(network.join(&me));
        let transport = |kind| -> (Kind, Box<dyn Transport>) { (kind, Box::new(network.transport(&me, kind))) };
        // The order of preference is not the order given.
        let mut mover = Mover::new([Kind::Tcp, Kind::Shm].map(transport).into(), settings);
        let regions = Regions::new();
        mover.register(regions.clone());
        let there = Regions::new();
        network.join(&peer).register(there.clone());
        let local = regions.add(Arc::new(Buffer::owned(16 * PIECE as usize, ALL)));
        let remote = there.add(Arc::new(Buffer::owned(16 * PIECE as usize, ALL)));
        Self { network, mover, peer, regions, local, remote, ended: Vec::new() }
    }

    fn new() -> Self {
        Self::with(Settings::default(), Faults { queue: 4096, ..Faults::default() })
    }

    fn connected(via: Via) -> Self {
        let mut stage = Self::new();
        stage.connect(via);
        stage
    }

    fn connect(&mut self, via: Via) {
        self.mover.connect(&self.peer, via, self.network.now());
    }

    fn request(&self, bytes: u64) -> Request {
        let span = |region| Span { region, life: 0, offset: 0 };
        let part = Part { local: span(self.local), remote: span(self.remote), bytes, grain: 0 };
        Request::new(Op::Write, [part].into())
    }

    fn submit(&mut self, request: Request) -> TransferId {
        let id = self.mover.submit(&"b".into(), request, self.network.now()).expect("room");
        self.mover.check();
        id
    }

    /// Lets the next thing happen. False if nothing ever will.
    fn step(&mut self) -> bool {
        let (tick, event) = (self.mover.next_tick(), self.network.next());
        match tick.filter(|tick| event.is_none_or(|event| *tick < event)) {
            Some(tick) => self.network.wait(tick.max(self.network.now())),
            None if event.is_some() => assert!(self.network.step()),
            None => return false,
        }
        self.ended.extend(self.mover.poll(self.network.now()));
        self.mover.check();
        true
    }

    /// Waits for the end of a transfer.
    fn end(&mut self, id: TransferId) -> Ended {
        loop {
            if let Some(index) = self.ended.iter().position(|(ended, _)| *ended == id) {
                return self.ended.remove(index).1;
            }
            assert!(self.step(), "it never ends");
        }
    }

    /// Waits for these ends, with little looking at what happens in between: for tests with many copies.
    fn run_until(&mut self, ids: &[TransferId]) {
        while !ids.iter().all(|id| self.ended.iter().any(|(ended, _)| ended == id)) {
            let steps = (0..64).filter(|_| self.network.step()).count();
            assert!(steps > 0 || !self.ended.is_empty(), "they never end");
            self.ended.extend(self.mover.poll(self.network.now()));
        }
    }

    fn move_all(&mut self, bytes: u64) -> Ended {
        let id = self.submit(self.request(bytes));
        self.end(id)
    }

    fn breaker(&self, kind: Kind) -> BreakerState {
        let paths = self.mover.paths(&"b".into());
        paths.iter().find(|path| path.kind == kind).expect("allowed").breaker
    }

    fn taken(&self) -> Option<Kind> {
        self.mover.paths(&"b".into()).iter().find(|path| path.taken).map(|path| path.kind)
    }
}

fn done(via: Kind, fallback: bool) -> Ended {
    Ended::Done { via, fallback, retries: 0 }
}

/// `auto` takes the best path that can be made, and that is no fall-back; the ones behind it are not even asked for.
#[test]
fn the_best_path_that_stands_is_taken() {
    let mut stage = Stage::connected(Via::Auto);
    assert_eq!(stage.move_all(10 * PIECE), done(Kind::Shm, false));
    let paths: Vec<_> = stage.mover.paths(&"b".into()).into_iter().map(|path| (path.kind, path.path)).collect();
    assert_eq!(paths, [(Kind::Shm, Path::Up), (Kind::Tcp, Path::None)]);

    let mut stage = Stage::new();
    stage.network.allow("a", "b", Kind::Shm, false);
    stage.connect(Via::Auto);
    assert_eq!(stage.move_all(10), done(Kind::Tcp, false), "shm has never stood");
    let paths = stage.mover.paths(&"b".into());
    assert!(matches!(&paths[0].path, Path::Down(why) if why == "refused"), "{paths:?}");
    assert_eq!(stage.taken(), Some(Kind::Tcp));
}

/// The path asked for is the one used, or an error that says why.
#[test]
fn the_path_asked_for_or_none() {
    let mut stage = Stage::connected(Via::Only(Kind::Tcp));
    assert_eq!(stage.move_all(10), done(Kind::Tcp, false));
    let mut stage = Stage::new();
    stage.network.allow("a", "b", Kind::Shm, false);
    stage.connect(Via::Only(Kind::Shm));
    let Ended::Failed { why: Failure::Unreachable, message, .. } = stage.move_all(10) else { panic!("no such path") };
    assert_eq!(message, "b cannot be reached: shm: refused");
    stage.connect(Via::Only(Kind::Rdma));
    let Ended::Failed { why: Failure::Unreachable, message, .. } = stage.move_all(10) else { panic!("no such path") };
    assert_eq!(message, "b is to be reached by rdma only, which is not there");
    stage.connect(Via::Auto);
    assert_eq!(stage.move_all(10), done(Kind::Tcp, false), "a change of mind");
}

/// A path that breaks in the middle is fallen back from, visibly; when it can be made again, it is used again.
#[test]
fn falling_back_and_coming_back() {
    let mut stage = Stage::connected(Via::Auto);
    assert_eq!(stage.move_all(10), done(Kind::Shm, false));
    let id = stage.submit(stage.request(16 * PIECE));
    stage.network.allow("a", "b", Kind::Shm, false);
    stage.network.break_path("a", "b", Kind::Shm);
    let Ended::Done { via: Kind::Tcp, fallback: true, retries: 1.. } = stage.end(id) else { panic!("no fall-back") };
    assert!(matches!(stage.breaker(Kind::Shm), BreakerState::Open { .. }), "it was tried in vain");
    assert_eq!(stage.move_all(10), done(Kind::Tcp, true));
    stage.network.allow("a", "b", Kind::Shm, true);
    // Traffic finds out, within the longest rest and a connect.
    let until = stage.network.now() + 3 * SECOND;
    while stage.move_all(PIECE) != done(Kind::Shm, false) {
        assert!(stage.network.now() < until, "it never comes back: {:?}", stage.mover.paths(&"b".into()));
    }
    assert_eq!(stage.breaker(Kind::Shm), BreakerState::Closed);
    let stats = stage.mover.stats();
    let [(Kind::Shm, shm), (Kind::Tcp, tcp)] = &stats[0].paths[..] else { panic!("{stats:?}") };
    assert!(shm.lost > 0 && shm.retries == shm.lost && shm.rests > 0 && tcp.lost == 0, "{stats:?}");
    assert_eq!(shm.latency.counts().iter().sum::<u64>(), shm.copies);
}

/// A path that stands but loses everything rests, is probed by single copies, and heals; nothing is banned for ever.
#[test]
fn a_path_that_loses_everything_rests() {
    let faults = Faults { queue: 4096, ..Faults::default() };
    let mut stage = Stage::with(Settings::default(), faults);
    stage.connect(Via::Only(Kind::Tcp));
    assert_eq!(stage.move_all(10), done(Kind::Tcp, false));
    stage.network.set_faults(Faults { lose: 1000, ..faults });
    let id = stage.submit(Request { retries: 6, ..stage.request(10) });
    let began = stage.network.now();
    let Ended::Failed { part: 0, why: Failure::Unreachable, message } = stage.end(id) else { panic!("it was lost") };
    assert!(message.contains("lost") && message.contains("tcp: it stands, but loses what is sent"), "{message}");
    assert!(stage.network.now() - began > 100 * MILLISECOND, "no rest between the tries");
    stage.network.set_faults(faults);
    assert_eq!(stage.move_all(10 * PIECE), done(Kind::Tcp, false));
    assert_eq!(stage.breaker(Kind::Tcp), BreakerState::Closed);
}

/// A dead peer is noticed within the 3 s that transports give it; who waits fails when all paths have failed more often
/// than it wants to retry, or at its deadline.
#[test]
fn a_peer_that_is_gone() {
    let mut stage = Stage::connected(Via::Auto);
    assert_eq!(stage.move_all(10), done(Kind::Shm, false));
    stage.network.cut("a", "b", None);
    let began = stage.network.now();
    let id = stage.submit(Request { retries: 0, ..stage.request(10) });
    let Ended::Failed { why: Failure::Unreachable, .. } = stage.end(id) else { panic!("there is no way") };
    assert!(
        stage.network.now() - began < 3 * SECOND + 100 * MILLISECOND,
        "{} s",
        (stage.network.now() - began) / SECOND
    );
    let deadline = Some(stage.network.now() + SECOND);
    let id = stage.submit(Request { deadline, retries: u32::MAX, ..stage.request(10) });
    assert_eq!(stage.end(id), Ended::DeadlinePassed);
    assert_eq!(Some(stage.network.now()), deadline, "nothing was under way, so it is told at once");
    let id = stage.submit(stage.request(10));
    let Ended::Failed { why: Failure::Unreachable, message, .. } = stage.end(id) else { panic!("there is no way") };
    assert_eq!(message, "b cannot be reached: shm: connecting took 3 s; tcp: connecting took 3 s");
    let id = stage.submit(Request { retries: u32::MAX, ..stage.request(10) });
    for _ in 0..50 {
        stage.step();
    }
    stage.network.heal("a", "b", None);
    assert!(matches!(stage.end(id), Ended::Done { .. }), "whoever waits long enough");
}

/// An idle path that has died is replaced, and the caller does not notice.
#[test]
fn an_idle_path_is_replaced() {
    let mut stage = Stage::connected(Via::Only(Kind::Tcp));
    assert_eq!(stage.move_all(10), done(Kind::Tcp, false));
    stage.network.break_path("a", "b", Kind::Tcp);
    assert_eq!(stage.move_all(10), done(Kind::Tcp, false));
}

/// A list for one life of a peer never reaches the next one.
#[test]
fn another_life_is_another_peer() {
    let mut stage = Stage::connected(Via::Auto);
    assert_eq!(stage.move_all(10), done(Kind::Shm, false));
    let id = stage.submit(stage.request(16 * PIECE));
    let there = Regions::new();
    let buffer = Arc::new(Buffer::owned(16 * PIECE as usize, ALL));
    assert_eq!(there.add(buffer.clone()), stage.remote, "the same handle, as it happens");
    stage.peer = node("b", 3);
    stage.network.join(&stage.peer).register(there.clone());
    stage.connect(Via::Auto);
    let Ended::Failed { why: Failure::Fenced, message, .. } = stage.end(id) else { panic!("that life is over") };
    assert_eq!(message, "the peer has begun another life");
    let at = Span { region: stage.remote, life: 0, offset: 0 };
    let held = there.begin_read(at, buffer.bytes(), By::Owner).expect("registered");
    assert!(held.bytes().iter().all(|byte| *byte == 0), "something was written");
    assert!(matches!(stage.move_all(10), Ended::Done { .. }));
}

/// Cancelling stops what is queued, waits for what is under way, and tells the truth if that was all.
#[test]
fn cancelling() {
    let settings = Settings { window_bytes: 2 * PIECE, ..Settings::default() };
    let mut stage = Stage::with(settings, Faults { queue: 4096, ..Faults::default() });
    stage.connect(Via::Auto);
    assert_eq!(stage.move_all(10), done(Kind::Shm, false));
    let [first, second] = [(); 2].map(|()| stage.submit(stage.request(16 * PIECE)));
    for id in [first, second] {
        stage.mover.cancel(id, stage.network.now());
        stage.mover.check();
    }
    assert_eq!(stage.mover.progress(first), Some(Progress { bytes_done: 0, bytes: 16 * PIECE }), "it comes to rest");
    assert_eq!(stage.mover.progress(second), None, "nothing of it was under way");
    assert_eq!(stage.mover.next_tick(), Some(0), "so it is told at once");
    assert_eq!(stage.end(second), Ended::Cancelled);
    let began = stage.network.now();
    assert_eq!(stage.end(first), Ended::Cancelled);
    assert!(stage.network.now() - began < 50 * MILLISECOND, "no more than the window was waited for");
    let id = stage.submit(stage.request(PIECE));
    stage.mover.cancel(id, stage.network.now());
    assert_eq!(stage.end(id), done(Kind::Shm, false), "all of it was under way");
    stage.mover.cancel(id, stage.network.now());
    assert!(stage.mover.idle());
}

/// Urgent copies pass big ones; yet under a stream of urgent ones without end the others arrive.
#[test]
fn priorities() {
    let settings = Settings { window_bytes: 2 * PIECE, window_copies: 16, ..Settings::default() };
    let mut stage = Stage::with(settings, Faults { queue: 4096, ..Faults::default() });
    stage.connect(Via::Auto);
    let with = |stage: &Stage, bytes, priority| Request { priority, ..stage.request(bytes) };
    let big = stage.submit(with(&stage, 5 * PIECE, Priority::Normal));
    let background = stage.submit(with(&stage, 5 * PIECE, Priority::Background));
    let urgent = stage.submit(with(&stage, 4096, Priority::Urgent));
    assert_eq!(stage.end(urgent), done(Kind::Shm, false));
    for id in [big, background] {
        let progress = stage.mover.progress(id).expect("it goes on");
        assert!(progress.bytes_done <= 3 * PIECE, "the urgent one has waited for {progress:?}");
    }
    let (mut streams, mut left) = (0, vec![big, background]);
    while !left.is_empty() {
        while stage.mover.stats()[0].transfers < 64 {
            stage.submit(with(&stage, 4096, Priority::Urgent));
            streams += 1;
        }
        stage.step();
        let over = std::mem::take(&mut stage.ended);
        left.retain(|id| over.iter().all(|(ended, _)| ended != id));
        assert!(streams < 10_000, "these starve: {left:?}");
    }
    assert!(streams > 1_000, "the urgent ones had little: {streams}");
}

/// A peer that takes nothing slows nobody else.
#[test]
fn a_slow_peer_slows_nobody() {
    let mut stage = Stage::connected(Via::Auto);
    let other = node("c", 9);
    let there = Regions::new();
    stage.network.join(&other).register(there.clone());
    assert_eq!(there.add(Arc::new(Buffer::owned(16 * PIECE as usize, ALL))), stage.remote);
    stage.mover.connect(&other, Via::Auto, stage.network.now());
    assert_eq!(stage.move_all(10), done(Kind::Shm, false));
    stage.network.cut("a", "b", None);
    let stuck: Vec<TransferId> = (0..100).map(|_| stage.submit(stage.request(16 * PIECE))).collect();
    let began = stage.network.now();
    for _ in 0..10 {
        let request = stage.request(16 * PIECE);
        let id = stage.mover.submit(&"c".into(), request, stage.network.now()).expect("room");
        assert_eq!(stage.end(id), done(Kind::Shm, false));
    }
    assert!(stage.network.now() - began < 2 * SECOND && stuck.iter().all(|id| stage.mover.progress(*id).is_some()));
    stage.mover.disconnect(&"b".into(), stage.network.now());
    for id in stuck {
        assert!(matches!(stage.end(id), Ended::Failed { why: Failure::Unreachable, .. }));
    }
}

/// A hundred thousand parts are one call; the list can be submitted again; too much is refused, and nothing is kept of
/// what was refused.
#[test]
fn long_lists_and_limits() {
    let faults = Faults { queue: 4096, lanes: 4, delay: 1000, ..Faults::default() };
    let mut stage = Stage::with(Settings { parts_per_peer: 250_000, ..Settings::default() }, faults);
    stage.connect(Via::Auto);
    let span = |region, offset| Span { region, life: 0, offset };
    let (local, remote) = (stage.local, stage.remote);
    let part =
        |index: u64| Part { local: span(local, index * 8), remote: span(remote, index * 16), bytes: 8, grain: 0 };
    let parts: Arc<[Part]> = (0..100_000).map(part).collect();
    let prepared = Request::new(Op::Write, parts.clone());
    let [first, second] = [(); 2].map(|()| stage.submit(prepared.clone()));
    assert_eq!(stage.mover.submit(&"b".into(), prepared.clone(), stage.network.now()), Err(Busy));
    assert_eq!(Arc::strong_count(&parts), 4, "two transfers share the list");
    stage.mover.cancel(second, stage.network.now());
    stage.run_until(&[first, second]);
    assert_eq!(stage.end(first), done(Kind::Shm, false));
    assert_eq!(stage.end(second), Ended::Cancelled);
    assert_eq!(Arc::strong_count(&parts), 2);
    assert_eq!(stage.mover.stats()[0].parts, 0);
    let beyond: Arc<[Part]> = (0..300_000).map(|index| part(index % 1000)).collect();
    let id = stage.submit(Request::new(Op::Write, beyond));
    assert_eq!(stage.mover.submit(&"b".into(), stage.request(8), stage.network.now()), Err(Busy));
    stage.mover.cancel(id, stage.network.now());
    stage.run_until(&[id]);
    assert_eq!(stage.end(id), Ended::Cancelled, "alone it was taken");
}

/// What can be seen to be wrong is told without anything having moved; so is a peer that is not connected.
#[test]
fn wrong_requests() {
    let mut stage = Stage::connected(Via::Auto);
    let good = stage.request(10);
    let bad = Part { bytes: 17 * PIECE, ..good.parts[0] };
    let id = stage.submit(Request::new(Op::Write, [good.parts[0], bad].into()));
    assert!(matches!(stage.end(id), Ended::Failed { part: 1, why: Failure::Denied, .. }));
    let id = stage.mover.submit(&NodeId::from("nobody"), good.clone(), 0).expect("it is told by the outcome");
    let Ended::Failed { why: Failure::Unreachable, message, .. } = stage.end(id) else { panic!("nobody is there") };
    assert_eq!(message, "nobody is not connected");
    let remote = Span { offset: 16 * PIECE, ..good.parts[0].remote };
    let beyond = Part { remote, ..good.parts[0] };
    let id = stage.submit(Request::new(Op::Write, [good.parts[0], beyond].into()));
    assert!(matches!(stage.end(id), Ended::Failed { part: 1, why: Failure::Denied, .. }), "the peer looks as well");
    stage.regions.remove(stage.local);
    let id = stage.submit(good);
    assert!(matches!(stage.end(id), Ended::Failed { part: 0, why: Failure::Fenced, .. }));
    assert_eq!(stage.move_nothing(), done(Kind::Shm, false));
}

impl Stage {
    fn move_nothing(&mut self) -> Ended {
        let id = self.submit(Request::new(Op::Read, [].into()));
        self.end(id)
    }
}

/// Corruption is sent again, and given up as such.
#[test]
fn corruption() {
    let mut stage = Stage::connected(Via::Auto);
    stage.network.corrupt_next();
    assert_eq!(stage.move_all(10), Ended::Done { via: Kind::Shm, fallback: false, retries: 1 });
    (0..4).for_each(|_| stage.network.corrupt_next());
    let Ended::Failed { part: 0, why: Failure::Corrupt, message } = stage.move_all(10) else { panic!("four times") };
    assert_eq!(message, "sent 4 times, the checksum did not hold, at last over shm");
}

//! What every transport promises (`transport::Transport`), as one suite over all implementations.
//!
//! Goal: an outcome means what it says, on every transport. Method: two arenas joined by the transport; each
//! expectation below is a function over a [`Harness`], and `suite!` makes it a test of each implementation.

mod lanes;
#[cfg(feature = "rdma")]
mod rails;

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};

use pyengine_transfer::memory::Arena;
use pyengine_transfer::region::Regions;
use pyengine_transfer::transport::lanes::LaneTransport;
use pyengine_transfer::transport::shm::ShmTransport;
use pyengine_transfer::transport::sim::{Faults, Network, SimTransport};
use pyengine_transfer::transport::{Busy, Completion, Copy, CopyId, Outcome, Transport};
use pyengine_transfer::types::{Layout, NodeAddress, SlotRef};

const LAYOUT: Layout = Layout { strips: 6, strip_bytes: 512 };
const SLOTS: u64 = 16;

/// Two nodes that can reach each other.
trait Harness {
    type Transport: Transport;
    /// Why this machine cannot run it: its tests then say so and end.
    fn absent() -> Option<String> {
        None
    }
    /// Arenas are registered; nothing is connected.
    fn new(source: Arc<Arena>, destination: Arc<Arena>) -> Self;
    /// The sending node's transport.
    fn transport(&mut self) -> &mut Self::Transport;
    /// The node that the copies go to.
    fn peer(&self) -> NodeAddress;
    /// Returns when something has happened, in real or virtual time.
    ///
    /// # Panics
    /// If nothing happens any more.
    fn progress(&mut self);
    /// The receiving node dies.
    fn kill_peer(&mut self);
}

struct Sim {
    network: Network,
    transport: SimTransport,
    /// The receiving end lives as long as this.
    peer: (NodeAddress, SimTransport),
}

fn node(name: &str) -> NodeAddress {
    NodeAddress { node: name.into(), address: "127.0.0.1:1".into(), incarnation: 1 }
}

impl Harness for Sim {
    type Transport = SimTransport;

    fn new(source: Arc<Arena>, destination: Arc<Arena>) -> Self {
        let network = Network::new(11, Faults::default());
        let mut transport = network.join(&node("source"));
        transport.register(Regions::of(source));
        let mut receiving = network.join(&node("destination"));
        receiving.register(Regions::of(destination));
        Self { network, transport, peer: (node("destination"), receiving) }
    }

    fn transport(&mut self) -> &mut SimTransport {
        &mut self.transport
    }

    fn peer(&self) -> NodeAddress {
        self.peer.0.clone()
    }

    fn progress(&mut self) {
        assert!(self.network.step(), "nothing is under way any more");
    }

    fn kill_peer(&mut self) {
        self.network.leave(&self.peer.0.node);
    }
}

/// Real sockets over loopback.
struct Tcp {
    transport: LaneTransport,
    woken: mpsc::Receiver<()>,
    receiver: lanes::Receiver,
}

impl Harness for Tcp {
    type Transport = LaneTransport;

    fn new(source: Arc<Arena>, destination: Arc<Arena>) -> Self {
        let (transport, woken) = lanes::sender(source);
        Self { transport, woken, receiver: lanes::Receiver::new(destination) }
    }

    fn transport(&mut self) -> &mut LaneTransport {
        &mut self.transport
    }

    fn peer(&self) -> NodeAddress {
        self.receiver.address.clone()
    }

    fn progress(&mut self) {
        self.woken.recv_timeout(lanes::PATIENCE).expect("every copy completes");
    }

    fn kill_peer(&mut self) {
        self.receiver.kill();
    }
}

/// Verbs devices, where there are some.
#[cfg(feature = "rdma")]
struct Rdma {
    sending: rails::Node,
    receiving: rails::Node,
}

#[cfg(feature = "rdma")]
impl Harness for Rdma {
    type Transport = pyengine_transfer::transport::rdma::RdmaTransport;

    fn absent() -> Option<String> {
        rails::absent()
    }

    fn new(source: Arc<Arena>, destination: Arc<Arena>) -> Self {
        let sending = rails::Node::new("source", 2, rails::side(0), Regions::of(source));
        let receiving = rails::Node::new("destination", 1, rails::side(1), Regions::of(destination));
        Self { sending, receiving }
    }

    fn transport(&mut self) -> &mut Self::Transport {
        &mut self.sending.transport
    }

    fn peer(&self) -> NodeAddress {
        self.receiving.address.clone()
    }

    fn progress(&mut self) {
        self.sending.woken.recv_timeout(rails::PATIENCE).expect("every copy completes");
    }

    fn kill_peer(&mut self) {
        self.receiving.kill();
    }
}

/// Memory of one host, read by the side that writes.
struct Shm {
    transport: ShmTransport,
    woken: mpsc::Receiver<()>,
    peer: NodeAddress,
    /// The receiving end lives as long as this.
    receiver: Option<ShmTransport>,
}

impl Harness for Shm {
    type Transport = ShmTransport;

    fn new(source: Arc<Arena>, destination: Arc<Arena>) -> Self {
        let (_, transport, woken) = lanes::shm("source", source);
        let (peer, receiver, _) = lanes::shm("destination", destination);
        Self { transport, woken, peer, receiver: Some(receiver) }
    }

    fn transport(&mut self) -> &mut ShmTransport {
        &mut self.transport
    }

    fn peer(&self) -> NodeAddress {
        self.peer.clone()
    }

    fn progress(&mut self) {
        self.woken.recv_timeout(lanes::PATIENCE).expect("every copy completes");
    }

    fn kill_peer(&mut self) {
        self.receiver = None;
    }
}

// -- the bench the expectations stand on -----------------------------------------------------------------------------

struct Bench<H: Harness> {
    source: Arc<Arena>,
    destination: Arc<Arena>,
    harness: H,
    next: CopyId,
    outcomes: BTreeMap<CopyId, Outcome>,
}

impl<H: Harness> Bench<H> {
    /// Two arenas; slot i of the source is sealed and holds `block(i)`.
    fn new() -> Self {
        let arena = || Arena::create(4096 + SLOTS * (4096 + 4 * 7), LAYOUT).expect("it fits");
        let (source, destination) = (arena(), arena());
        for slot in 0..SLOTS as u32 {
            let life = source.issue(slot);
            source.store(life, 0, &block(slot)).expect("in range");
            assert!(source.seal(life));
        }
        let harness = H::new(source.clone(), destination.clone());
        Self { source, destination, harness, next: 1, outcomes: BTreeMap::new() }
    }

    fn connected() -> Self {
        let mut bench = Self::new();
        let peer = bench.harness.peer();
        bench.harness.transport().connect(&peer);
        bench
    }

    fn copy(&mut self, source: u32, destination: SlotRef) -> Copy {
        self.next += 1;
        Copy::block(&self.source, self.next, SlotRef { slot: source, generation: 1 }, destination)
    }

    fn submit(&mut self, copies: &[Copy]) -> Result<(), Busy> {
        let peer = self.harness.peer().node;
        self.harness.transport().submit(&peer, copies)
    }

    fn poll(&mut self) {
        let mut completions = Vec::new();
        self.harness.transport().poll(&mut completions);
        for Completion { id, outcome } in completions {
            assert!(self.outcomes.insert(id, outcome).is_none(), "copy {id} completes twice");
        }
    }

    /// Waits until so many copies have completed in all; then that no more do.
    fn wait(&mut self, count: usize) -> Vec<Outcome> {
        self.poll();
        while self.outcomes.len() < count {
            self.harness.progress();
            self.poll();
        }
        assert_eq!(self.outcomes.len(), count, "more completions than copies");
        self.outcomes.values().copied().collect()
    }

    fn one(&mut self, source: u32, destination: SlotRef) -> Outcome {
        let copy = self.copy(source, destination);
        let before = self.outcomes.len();
        self.submit(&[copy]).expect("an empty queue takes one");
        self.wait(before + 1);
        self.outcomes[&copy.id]
    }

    fn holds(&self, slot: SlotRef, expected: &[u8]) -> bool {
        let mut bytes = vec![0; LAYOUT.block_bytes()];
        self.destination.load(slot, 0, &mut bytes).expect("in range") && bytes == expected
    }

    fn sources_are_quiet(&self) -> bool {
        (0..SLOTS as u32).all(|slot| self.source.quiet(slot))
    }
}

fn block(slot: u32) -> Vec<u8> {
    (0..LAYOUT.block_bytes()).map(|byte| (byte as u32 * 7 + slot * 31) as u8).collect()
}

// -- the expectations ------------------------------------------------------------------------------------------------

/// `Done` means applied and verified, checksums beside it; the source is read no more.
fn done_means_applied<H: Harness>() {
    let mut bench = Bench::<H>::connected();
    let slots: Vec<SlotRef> = (0..SLOTS as u32).map(|slot| bench.destination.issue(slot)).collect();
    let copies: Vec<Copy> = (0..).zip(&slots).map(|(index, slot)| bench.copy(index, *slot)).collect();
    // One by one: a lane may take fewer at once.
    for (count, copy) in copies.iter().enumerate() {
        bench.submit(&[*copy]).expect("an empty queue takes one");
        assert!(bench.wait(count + 1).iter().all(|outcome| *outcome == Outcome::Done));
    }
    for (index, slot) in (0..).zip(slots) {
        assert!(bench.destination.arrived_all(slot) && bench.destination.quiet(slot.slot));
        assert!(bench.holds(slot, &block(index)), "slot {index}");
        assert!(bench.destination.seal(slot), "its write hold has been given back");
        let sums = |arena: &Arc<Arena>, slot| arena.begin_read(slot).expect("sealed").checksums();
        assert_eq!(sums(&bench.destination, slot), sums(&bench.source, SlotRef { slot: index, generation: 1 }));
    }
    assert!(bench.sources_are_quiet());
}

/// A copy to an old life, to a sealed block or to no slot at all completes `Fenced` and changes no byte.
fn late_copies_are_fenced<H: Harness>() {
    let mut bench = Bench::<H>::connected();
    let old = bench.destination.issue(0);
    bench.destination.retire(old);
    let new = bench.destination.issue(0);
    bench.destination.store(new, 0, &block(99)).expect("in range");
    assert_eq!(bench.one(1, old), Outcome::Fenced);
    assert!(bench.holds(new, &block(99)));
    assert!(bench.destination.seal(new));
    assert_eq!(bench.one(1, new), Outcome::Fenced, "it is sealed");
    assert!(bench.holds(new, &block(99)));
    assert_eq!(bench.one(1, SlotRef { slot: SLOTS as u32, generation: 1 }), Outcome::Denied, "no such slot");
    assert!(bench.destination.fenced() >= 2 && bench.sources_are_quiet());
    let open = bench.destination.issue(2);
    assert_eq!(bench.one(3, open), Outcome::Done, "the path still works");
}

/// A strip whose checksum does not hold is not accepted; the slot stays reserved and the copy may be sent again.
fn corruption_is_found<H: Harness>() {
    let mut bench = Bench::<H>::connected();
    let slot = bench.destination.issue(5);
    bench.source.corrupt_for_test(7, 3);
    assert_eq!(bench.one(7, slot), Outcome::Corrupt);
    assert!(!bench.destination.arrived_all(slot) && bench.destination.quiet(5));
    bench.source.corrupt_for_test(7, 3);
    assert_eq!(bench.one(7, slot), Outcome::Done);
    assert!(bench.destination.arrived_all(slot) && bench.holds(slot, &block(7)));
}

/// With no path, copies are `Lost`; so are those that are under way when the path is closed, or the peer dies. Each
/// completes once, and then its source is quiet.
fn every_copy_completes_once<H: Harness>() {
    let mut bench = Bench::<H>::new();
    let slot = bench.destination.issue(0);
    assert_eq!(bench.one(0, slot), Outcome::Lost, "not connected");
    for dies in [false, true] {
        let peer = bench.harness.peer();
        bench.harness.transport().connect(&peer);
        let before = bench.outcomes.len();
        let mut taken = 0;
        for source in 0..SLOTS as u32 {
            let copy = bench.copy(source, slot);
            taken += usize::from(bench.submit(&[copy]).is_ok());
        }
        if dies {
            bench.harness.kill_peer();
        }
        bench.harness.transport().close(&peer.node);
        let outcomes = bench.wait(before + taken);
        assert!(taken > 0 && outcomes.iter().all(|outcome| *outcome != Outcome::Corrupt));
        assert!(bench.sources_are_quiet());
    }
    assert_eq!(bench.one(0, slot), Outcome::Lost, "closed");
    let peer = bench.harness.peer();
    bench.harness.transport().connect(&peer);
    assert_eq!(bench.one(0, slot), Outcome::Lost, "the peer is dead");
    assert!(bench.sources_are_quiet());
}

/// A full queue says `Busy` and takes nothing of what it refuses; after completions it takes more.
fn a_full_queue_is_busy<H: Harness>() {
    let mut bench = Bench::<H>::connected();
    let slot = bench.destination.issue(0);
    let mut taken = 0;
    let mut busy = false;
    for _ in 0..20_000 {
        let copy = bench.copy(1, slot);
        match bench.submit(&[copy]) {
            Ok(()) => taken += 1,
            Err(Busy) => {
                busy = true;
                break;
            }
        }
    }
    assert!(busy, "{taken} copies were taken without end");
    // Copies to one slot may meet there, and then the later one is refused; none is lost or doubled.
    let outcomes = bench.wait(taken);
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Done | Outcome::Fenced)));
    assert!(outcomes.contains(&Outcome::Done) && bench.sources_are_quiet());
    assert_eq!(bench.one(1, slot), Outcome::Done);
}

macro_rules! suite {
    ($name:ident, $harness:ty) => {
        mod $name {
            use super::*;

            #[test]
            fn done_means_applied() {
                if let Some(why) = <$harness>::absent() {
                    return eprintln!("skipped: {why}");
                }
                super::done_means_applied::<$harness>();
            }

            #[test]
            fn late_copies_are_fenced() {
                if let Some(why) = <$harness>::absent() {
                    return eprintln!("skipped: {why}");
                }
                super::late_copies_are_fenced::<$harness>();
            }

            #[test]
            fn corruption_is_found() {
                if let Some(why) = <$harness>::absent() {
                    return eprintln!("skipped: {why}");
                }
                super::corruption_is_found::<$harness>();
            }

            #[test]
            fn every_copy_completes_once() {
                if let Some(why) = <$harness>::absent() {
                    return eprintln!("skipped: {why}");
                }
                super::every_copy_completes_once::<$harness>();
            }

            #[test]
            fn a_full_queue_is_busy() {
                if let Some(why) = <$harness>::absent() {
                    return eprintln!("skipped: {why}");
                }
                super::a_full_queue_is_busy::<$harness>();
            }
        }
    };
}

suite!(sim, Sim);
suite!(tcp, Tcp);
suite!(shm, Shm);
#[cfg(feature = "rdma")]
suite!(rdma, Rdma);

//! What every transport promises (`transport::Transport`), as one suite over all implementations.
//!
//! Goal: an outcome means what it says, on every transport. Method: two nodes with arenas and buffers, joined by the
//! transport; each expectation below is a function over a [`Harness`], and `suites!` at the end makes it a test of each
//! implementation. `tests/tidy/conformance_table.py` prints the table transports x expectations.

mod buffers;
mod lanes;
#[cfg(feature = "rdma")]
mod rails;

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use pyengine_transfer::memory::Arena;
use pyengine_transfer::region::{Access, Buffer, By, Regions};
use pyengine_transfer::transport::lanes::{LaneTransport, Settings};
use pyengine_transfer::transport::shm::ShmTransport;
use pyengine_transfer::transport::sim::{Faults, Network, SimTransport};
use pyengine_transfer::transport::{Busy, Completion, Copy, CopyId, Op, Outcome, PIECE_BYTES, Path, Transport};
use pyengine_transfer::types::{Layout, NodeAddress, RegionId, SlotRef, Span};

use buffers::content;

const LAYOUT: Layout = Layout { strips: 6, strip_bytes: 512 };
const SLOTS: u64 = 16;
const ALL: Access = Access { read: true, write: true };

/// Two nodes that can reach each other.
trait Harness {
    type Transport: Transport;
    /// Regions are registered at both ends; nothing is connected.
    fn new(here: Arc<Regions>, there: Arc<Regions>) -> Self;
    /// The transport of the node that submits.
    fn transport(&mut self) -> &mut Self::Transport;
    /// The other node, in its life.
    fn peer(&self) -> NodeAddress;
    /// Returns when something has happened, in real or virtual time.
    ///
    /// # Panics
    /// If nothing happens any more.
    fn progress(&mut self);
    /// The other node dies.
    fn kill_peer(&mut self);
    /// It begins another life, with this memory, maybe elsewhere.
    fn revive_peer(&mut self, there: Arc<Regions>);
}

struct Sim {
    network: Network,
    transport: SimTransport,
    /// The other end lives as long as this.
    peer: (NodeAddress, SimTransport),
}

fn node(name: &str, incarnation: u64) -> NodeAddress {
    NodeAddress { node: name.into(), address: "127.0.0.1:1".into(), incarnation }
}

impl Harness for Sim {
    type Transport = SimTransport;

    fn new(here: Arc<Regions>, there: Arc<Regions>) -> Self {
        let network = Network::new(11, Faults { queue: 64, ..Faults::default() });
        let mut transport = network.join(&node("source", 1));
        transport.register(here);
        let mut receiving = network.join(&node("destination", 1));
        receiving.register(there);
        Self { network, transport, peer: (node("destination", 1), receiving) }
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

    fn revive_peer(&mut self, there: Arc<Regions>) {
        let address = node("destination", self.peer.0.incarnation + 1);
        let mut receiving = self.network.join(&address);
        receiving.register(there);
        self.peer = (address, receiving);
    }
}

/// Real sockets over loopback, with TLS or without.
struct Tcp<const TLS: bool> {
    transport: LaneTransport,
    woken: mpsc::Receiver<()>,
    receiver: lanes::Receiver,
}

impl<const TLS: bool> Tcp<TLS> {
    fn settings() -> Settings {
        Settings { tls: TLS, ..lanes::short_queue() }
    }
}

impl<const TLS: bool> Harness for Tcp<TLS> {
    type Transport = LaneTransport;

    fn new(here: Arc<Regions>, there: Arc<Regions>) -> Self {
        let (transport, woken) = lanes::sender_with(here, Self::settings());
        Self { transport, woken, receiver: lanes::Receiver::at("127.0.0.1:0", there, Self::settings()) }
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

    fn revive_peer(&mut self, there: Arc<Regions>) {
        let incarnation = self.receiver.address.incarnation + 1;
        self.receiver = lanes::Receiver::start("127.0.0.1:0", there, incarnation, Self::settings());
    }
}

/// Verbs devices: `make test-rdma` runs these in a machine that has some.
#[cfg(feature = "rdma")]
struct Rdma {
    sending: rails::Node,
    receiving: rails::Node,
}

#[cfg(feature = "rdma")]
impl Harness for Rdma {
    type Transport = pyengine_transfer::transport::rdma::RdmaTransport;

    fn new(here: Arc<Regions>, there: Arc<Regions>) -> Self {
        let sending = rails::Node::new("source", 1, rails::side(0), here);
        let receiving = rails::Node::new("destination", 1, rails::side(1), there);
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

    fn revive_peer(&mut self, there: Arc<Regions>) {
        let incarnation = self.receiving.address.incarnation + 1;
        self.receiving = rails::Node::new("destination", incarnation, rails::side(1), there);
    }
}

/// Memory of one host, read by the side that writes.
struct Shm {
    transport: ShmTransport,
    woken: mpsc::Receiver<()>,
    peer: NodeAddress,
    /// The other end lives as long as this.
    receiver: Option<ShmTransport>,
}

impl Harness for Shm {
    type Transport = ShmTransport;

    fn new(here: Arc<Regions>, there: Arc<Regions>) -> Self {
        let (_, transport, woken) = lanes::shm_with("source", here, lanes::short_queue());
        let (peer, receiver, _) = lanes::shm_with("destination", there, lanes::short_queue());
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

    fn revive_peer(&mut self, there: Arc<Regions>) {
        let (peer, receiver, _) = lanes::shm_with("destination", there, lanes::short_queue());
        (self.peer, self.receiver) = (peer, Some(receiver));
    }
}

// -- the bench the expectations stand on -----------------------------------------------------------------------------

struct Bench<H: Harness> {
    source: Arc<Arena>,
    destination: Arc<Arena>,
    here: Arc<Regions>,
    there: Arc<Regions>,
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
        let (here, there) = (Regions::of(source.clone()), Regions::of(destination.clone()));
        let harness = H::new(here.clone(), there.clone());
        Self { source, destination, here, there, harness, next: 1, outcomes: BTreeMap::new() }
    }

    fn connected() -> Self {
        let mut bench = Self::new();
        bench.connect();
        bench
    }

    fn connect(&mut self) {
        let peer = self.harness.peer();
        self.harness.transport().connect(&peer);
    }

    fn copy(&mut self, source: u32, destination: SlotRef) -> Copy {
        self.next += 1;
        let slot = SlotRef { slot: source, generation: 1 };
        Copy::block(&self.source, self.next, (RegionId::ARENA, slot), (RegionId::ARENA, destination))
    }

    /// Between buffers.
    fn raw(&mut self, op: Op, local: (RegionId, u64), remote: (RegionId, u64), bytes: u32, grain: u32) -> Copy {
        self.next += 1;
        let span = |(region, offset)| Span { region, life: 0, offset };
        Copy { id: self.next, op, local: span(local), remote: span(remote), bytes, grain }
    }

    fn submit(&mut self, copies: &[Copy]) -> Result<(), Busy> {
        let peer = self.harness.peer().node;
        self.harness.transport().submit(&peer, copies)
    }

    /// Submits all, waiting where the queue is full.
    fn submit_all(&mut self, copies: &[Copy]) {
        for copies in copies.chunks(8) {
            while self.submit(copies).is_err() {
                self.harness.progress();
                self.poll();
            }
        }
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

    /// Waits until the path to the peer is so.
    fn wait_path(&mut self, wanted: impl Fn(&Path) -> bool) {
        let peer = self.harness.peer().node;
        while !wanted(&self.harness.transport().path(&peer)) {
            self.harness.progress();
        }
    }

    fn run(&mut self, copy: Copy) -> Outcome {
        let before = self.outcomes.len();
        self.submit(&[copy]).expect("an empty queue takes one");
        self.wait(before + 1);
        self.outcomes[&copy.id]
    }

    fn one(&mut self, source: u32, destination: SlotRef) -> Outcome {
        let copy = self.copy(source, destination);
        self.run(copy)
    }

    fn all_done(&mut self, copies: &[Copy]) {
        let before = self.outcomes.len();
        self.submit_all(copies);
        self.wait(before + copies.len());
        copies.iter().for_each(|copy| assert_eq!(self.outcomes[&copy.id], Outcome::Done, "{copy:?}"));
    }

    fn holds(&self, slot: SlotRef, expected: &[u8]) -> bool {
        let mut bytes = vec![0; LAYOUT.block_bytes()];
        self.destination.load(slot, 0, &mut bytes).expect("in range") && bytes == expected
    }

    fn sources_are_quiet(&self) -> bool {
        (0..SLOTS as u32).all(|slot| self.source.quiet(slot))
    }
}

/// Waits for what no completion tells.
fn eventually(mut holds: impl FnMut() -> bool, what: &str) {
    let until = Instant::now() + lanes::PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "{what}");
        std::thread::yield_now();
    }
}

fn block(slot: u32) -> Vec<u8> {
    (0..LAYOUT.block_bytes()).map(|byte| (byte as u32 * 7 + slot * 31) as u8).collect()
}

/// Bytes that are different everywhere.
fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut random = pyengine_transfer::random::Random(seed);
    (0..bytes).map(|_| random.bits() as u8).collect()
}

/// A registered buffer that holds these bytes.
fn buffer(regions: &Regions, bytes: &[u8], access: Access) -> (RegionId, Arc<Buffer>) {
    let buffer = Arc::new(Buffer::owned(bytes.len(), access));
    let id = regions.add(buffer.clone());
    let at = Span { region: id, life: 0, offset: 0 };
    let mut writing = regions.begin_write(at, bytes.len() as u64, By::Owner).expect("registered");
    writing.bytes_mut().copy_from_slice(bytes);
    (id, buffer)
}

/// What a buffer holds, also one that is closed. Only where nothing is under way to it.
fn arena_span(arena: &Arena, slot: SlotRef, strip: u32) -> Span {
    Span { region: RegionId::ARENA, life: slot.generation, offset: arena.offset_of(slot.slot, strip) }
}

// -- the expectations ------------------------------------------------------------------------------------------------

/// `Done` means applied and verified, checksums beside it; the source is read no more.
fn done_means_applied<H: Harness>() {
    let mut bench = Bench::<H>::connected();
    let slots: Vec<SlotRef> = (0..SLOTS as u32).map(|slot| bench.destination.issue(slot)).collect();
    let copies: Vec<Copy> = (0..).zip(&slots).map(|(index, slot)| bench.copy(index, *slot)).collect();
    bench.all_done(&copies);
    for (index, slot) in (0..).zip(slots) {
        assert!(bench.destination.arrived_all(slot) && bench.destination.quiet(slot.slot));
        assert!(bench.holds(slot, &block(index)), "slot {index}");
        assert!(bench.destination.seal(slot), "its write hold has been given back");
        let sums = |arena: &Arc<Arena>, slot| arena.begin_read(slot).expect("sealed").checksums();
        assert_eq!(sums(&bench.destination, slot), sums(&bench.source, SlotRef { slot: index, generation: 1 }));
    }
    assert!(bench.sources_are_quiet());
}

/// A read is verified where it lands: from an arena into an arena, whose strips have then arrived.
fn a_read_lands_verified<H: Harness>() {
    let mut bench = Bench::<H>::connected();
    bench.source.retire(SlotRef { slot: 8, generation: 1 });
    let (theirs, mine) = (bench.destination.issue(3), bench.source.issue(8));
    bench.destination.store(theirs, 0, &block(77)).expect("in range");
    let copy = |bench: &mut Bench<H>| {
        bench.next += 1;
        let (local, remote) = (arena_span(&bench.source, mine, 0), arena_span(&bench.destination, theirs, 0));
        Copy { id: bench.next, op: Op::Read, local, remote, bytes: 6 * 512, grain: 512 }
    };
    let early = copy(&mut bench);
    assert_eq!(bench.run(early), Outcome::Fenced, "it is not committed there");
    assert!(bench.destination.seal(theirs));
    bench.destination.corrupt_for_test(3, 2);
    let corrupt = copy(&mut bench);
    assert_eq!(bench.run(corrupt), Outcome::Corrupt);
    assert!(!bench.source.arrived_all(mine) && bench.source.quiet(mine.slot));
    bench.destination.corrupt_for_test(3, 2);
    let good = copy(&mut bench);
    assert_eq!(bench.run(good), Outcome::Done);
    assert!(bench.source.arrived_all(mine) && bench.source.seal(mine) && bench.source.intact(mine));
    let late = copy(&mut bench);
    assert_eq!(bench.run(late), Outcome::Fenced, "here it is sealed now");
    // The holder lets go when it has sent the bytes, or has heard that they were read: maybe after the outcome.
    eventually(|| bench.destination.quiet(3), "the holder lets go");
}

/// Buffers are written and read, at any offset and length, with any grain, and nothing beside that is touched.
fn buffers_are_written_and_read<H: Harness>() {
    let mut bench = Bench::<H>::connected();
    let (mine, theirs) = (noise(16_384, 1), noise(16_384, 2));
    let (local, here) = buffer(&bench.here, &mine, ALL);
    let (remote, there) = buffer(&bench.there, &theirs, ALL);
    let (mut expected_here, mut expected_there) = (mine, theirs);
    for (index, (bytes, grain)) in
        [(1, 0), (1, 1), (999, 0), (1000, 1000), (1001, 1000), (3000, 7)].into_iter().enumerate()
    {
        let (from, to) = (index * 100 + 1, index * 1300 + 3);
        let write = bench.raw(Op::Write, (local, from as u64), (remote, to as u64), bytes as u32, grain);
        assert_eq!(bench.run(write), Outcome::Done, "{write:?}");
        expected_there[to..to + bytes].copy_from_slice(&expected_here[from..from + bytes]);
        assert_eq!(content(&there), expected_there, "{write:?}");
        let read = bench.raw(Op::Read, (local, to as u64 + 2000), (remote, from as u64), bytes as u32, grain);
        assert_eq!(bench.run(read), Outcome::Done, "{read:?}");
        expected_here[to + 2000..to + 2000 + bytes].copy_from_slice(&expected_there[from..from + bytes]);
        assert_eq!(content(&here), expected_here, "{read:?}");
    }
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

/// A region that was given back is fenced for ever, also when the next one is registered; that one works.
fn a_region_does_not_come_back<H: Harness>() {
    let mut bench = Bench::<H>::connected();
    let (local, _) = buffer(&bench.here, &noise(100, 1), ALL);
    let (old, _) = buffer(&bench.there, &[0; 100], ALL);
    let write = bench.raw(Op::Write, (local, 0), (old, 0), 100, 0);
    assert_eq!(bench.run(write), Outcome::Done);
    assert!(bench.there.remove(old).is_some_and(|buffer| buffer.is_quiet()));
    let (new, buffer) = buffer(&bench.there, &[0; 100], ALL);
    for op in [Op::Write, Op::Read] {
        let late = bench.raw(op, (local, 0), (old, 0), 100, 0);
        assert_eq!(bench.run(late), Outcome::Fenced);
    }
    assert_eq!(content(&buffer), [0; 100]);
    assert_eq!(bench.there.fenced(), 2, "counted");
    let write = bench.raw(Op::Write, (local, 0), (new, 0), 100, 0);
    assert_eq!(bench.run(write), Outcome::Done);
    assert_eq!(content(&buffer), noise(100, 1));
}

/// What is outside a region, not permitted, or not registered is refused, at either end, and changes no byte.
fn strangers_are_denied<H: Harness>() {
    let mut bench = Bench::<H>::connected();
    let (local, here) = buffer(&bench.here, &[1; 100], ALL);
    let (readable, first) = buffer(&bench.there, &[2; 100], Access { read: true, write: false });
    let (writable, second) = buffer(&bench.there, &[3; 100], Access { read: false, write: true });
    let none = RegionId(99);
    let cases = [
        (Op::Write, (local, 0), (readable, 0), Outcome::Denied),
        (Op::Read, (local, 0), (writable, 0), Outcome::Denied),
        (Op::Write, (local, 0), (writable, 91), Outcome::Denied),
        (Op::Read, (local, 0), (readable, 91), Outcome::Denied),
        (Op::Write, (local, 0), (writable, u64::MAX - 5), Outcome::Denied),
        (Op::Read, (local, 0), (readable, u64::MAX), Outcome::Denied),
        (Op::Write, (local, 0), (none, 0), Outcome::Fenced),
        (Op::Read, (local, 0), (none, 0), Outcome::Fenced),
        (Op::Write, (local, 0), (RegionId::ARENA, 0), Outcome::Denied),
        (Op::Write, (none, 0), (writable, 0), Outcome::Fenced),
        (Op::Read, (none, 0), (readable, 0), Outcome::Fenced),
        (Op::Write, (local, 91), (writable, 0), Outcome::Denied),
        (Op::Read, (local, u64::MAX), (readable, 0), Outcome::Denied),
    ];
    for (op, from, to, expected) in cases {
        let copy = bench.raw(op, from, to, 10, 0);
        assert_eq!(bench.run(copy), expected, "{copy:?}");
    }
    assert_eq!([content(&here), content(&first), content(&second)], [[1; 100], [2; 100], [3; 100]]);
    let good = bench.raw(Op::Write, (local, 90), (writable, 90), 10, 0);
    assert_eq!(bench.run(good), Outcome::Done, "the path still works, and to the last byte");
}

/// A copy of no bytes is checked like any other: done where it may be, refused where not.
fn copies_of_no_bytes<H: Harness>() {
    let mut bench = Bench::<H>::connected();
    let (local, _) = buffer(&bench.here, &[1; 100], ALL);
    let (remote, there) = buffer(&bench.there, &[2; 100], Access { read: true, write: false });
    for (op, at, grain, expected) in [
        (Op::Read, 0, 0, Outcome::Done),
        (Op::Read, 100, 16, Outcome::Done),
        (Op::Read, 101, 0, Outcome::Denied),
        (Op::Write, 0, 0, Outcome::Denied),
    ] {
        let copy = bench.raw(op, (local, 100), (remote, at), 0, grain);
        assert_eq!(bench.run(copy), expected, "{copy:?}");
    }
    let copy = bench.raw(Op::Read, (local, 0), (RegionId(99), 0), 0, 0);
    assert_eq!(bench.run(copy), Outcome::Fenced);
    assert_eq!(content(&there), [2; 100]);
}

/// Copies to the same bytes of a buffer: one after the other all succeed. At once each byte is of one of them, and who
/// finds another one's bytes in the midst of its own says `Corrupt`, never `Done`.
fn overlapping_copies<H: Harness>() {
    let mut bench = Bench::<H>::connected();
    let (local, _) = buffer(&bench.here, &[[1; 4096], [2; 4096], [3; 4096]].concat(), ALL);
    let (remote, there) = buffer(&bench.there, &[0; 6144], ALL);
    let write = |bench: &mut Bench<H>, index: u64| {
        bench.raw(Op::Write, (local, index % 3 * 4096), (remote, index % 3 * 1024), 4096, 512)
    };
    for index in 0..6 {
        let copy = write(&mut bench, index);
        assert_eq!(bench.run(copy), Outcome::Done);
    }
    let copies: Vec<Copy> = (0..24).map(|index| write(&mut bench, index)).collect();
    let before = bench.outcomes.len();
    bench.submit_all(&copies);
    let outcomes = bench.wait(before + copies.len());
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Done | Outcome::Corrupt)), "{outcomes:?}");
    let allowed: [&[u8]; 6] = [&[1], &[1, 2], &[1, 2, 3], &[1, 2, 3], &[2, 3], &[3]];
    for (index, byte) in content(&there).into_iter().enumerate() {
        assert!(allowed[index / 1024].contains(&byte), "byte {index} is {byte}");
    }
}

/// Thousands of small copies, both ways, none lost and none mixed up.
fn thousands_of_small_copies<H: Harness>() {
    const COUNT: u64 = 3000;
    let mut bench = Bench::<H>::connected();
    let bytes = noise(COUNT as usize * 64, 4);
    let (local, _) = buffer(&bench.here, &bytes, ALL);
    let (remote, there) = buffer(&bench.there, &vec![0; bytes.len()], ALL);
    let (back, returned) = buffer(&bench.here, &vec![0; bytes.len()], ALL);
    let writes: Vec<Copy> =
        (0..COUNT).map(|index| bench.raw(Op::Write, (local, index * 64), (remote, index * 64), 64, 0)).collect();
    bench.all_done(&writes);
    assert_eq!(content(&there), bytes);
    let reads: Vec<Copy> =
        (0..COUNT).map(|index| bench.raw(Op::Read, (back, index * 64), (remote, index * 64), 64, 0)).collect();
    bench.all_done(&reads);
    assert_eq!(content(&returned), bytes);
}

/// Pieces of full size, more than one lane carries at once, and a grain that is larger than a piece.
fn large_pieces<H: Harness>() {
    const COUNT: u64 = 24;
    let piece = u64::from(PIECE_BYTES);
    let mut bench = Bench::<H>::connected();
    let bytes = noise((COUNT * piece) as usize, 5);
    let (local, _) = buffer(&bench.here, &bytes, ALL);
    let (remote, there) = buffer(&bench.there, &vec![0; bytes.len()], ALL);
    let (back, returned) = buffer(&bench.here, &vec![0; bytes.len()], ALL);
    for (op, local) in [(Op::Write, local), (Op::Read, back)] {
        let copies: Vec<Copy> = (0..COUNT)
            .map(|index| bench.raw(op, (local, index * piece), (remote, index * piece), PIECE_BYTES, 65536))
            .collect();
        bench.all_done(&copies);
    }
    assert!(content(&there) == bytes && content(&returned) == bytes);
    let grain = 4 * PIECE_BYTES;
    let large = bench.raw(Op::Write, (local, piece), (remote, 0), grain, grain);
    assert_eq!(bench.run(large), Outcome::Done);
    assert!(content(&there)[..grain as usize] == bytes[piece as usize..][..grain as usize]);
}

/// Several copies fill one slot of an arena, strips apart; it is whole when the last one is done.
fn strips_of_one_slot<H: Harness>() {
    let mut bench = Bench::<H>::connected();
    let (slot, from) = (bench.destination.issue(4), SlotRef { slot: 9, generation: 1 });
    let copy = |bench: &mut Bench<H>, strip: u32, strips: u32| {
        bench.next += 1;
        let (local, remote) = (arena_span(&bench.source, from, strip), arena_span(&bench.destination, slot, strip));
        Copy { id: bench.next, op: Op::Write, local, remote, bytes: strips * 512, grain: 512 }
    };
    let parts = [copy(&mut bench, 3, 2), copy(&mut bench, 0, 3)];
    bench.all_done(&parts);
    assert!(!bench.destination.arrived_all(slot));
    let last = copy(&mut bench, 5, 1);
    assert_eq!(bench.run(last), Outcome::Done);
    assert!(bench.destination.arrived_all(slot) && bench.holds(slot, &block(9)));
    let crooked = Copy { bytes: 100, ..copy(&mut bench, 0, 1) };
    assert_eq!(bench.run(crooked), Outcome::Denied, "not whole strips");
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
        bench.connect();
        let before = bench.outcomes.len();
        let mut taken = 0;
        for source in 0..SLOTS as u32 {
            let copy = bench.copy(source, slot);
            taken += usize::from(bench.submit(&[copy]).is_ok());
        }
        if dies {
            bench.harness.kill_peer();
        }
        let peer = bench.harness.peer();
        bench.harness.transport().close(&peer.node);
        let outcomes = bench.wait(before + taken);
        assert!(taken > 0 && outcomes.iter().all(|outcome| *outcome != Outcome::Corrupt));
        assert!(bench.sources_are_quiet());
    }
    assert_eq!(bench.one(0, slot), Outcome::Lost, "closed");
    bench.connect();
    assert_eq!(bench.one(0, slot), Outcome::Lost, "the peer is dead");
    assert!(bench.sources_are_quiet());
}

/// What was lost is not applied over what was submitted after its loss was told, however late its bytes come.
fn lost_means_never_later<H: Harness>() {
    const COUNT: u64 = 32;
    const EACH: u32 = 32 << 10;
    let mut bench = Bench::<H>::connected();
    let bytes = COUNT as usize * EACH as usize;
    let [old, new] = [1, 2].map(|byte| buffer(&bench.here, &vec![byte; bytes], ALL).0);
    let mut written = Vec::new();
    for _ in 0..12 {
        let (remote, there) = buffer(&bench.there, &vec![0; bytes], ALL);
        let mut writes = |local| -> Vec<Copy> {
            let at = |index| index * u64::from(EACH);
            (0..COUNT).map(|index| bench.raw(Op::Write, (local, at(index)), (remote, at(index)), EACH, 0)).collect()
        };
        let (lost, newer) = (writes(old), writes(new));
        let before = bench.outcomes.len();
        bench.submit_all(&lost);
        let peer = bench.harness.peer().node;
        bench.harness.transport().close(&peer);
        bench.wait(before + lost.len());
        bench.connect();
        bench.all_done(&newer);
        written.push(there);
    }
    // What has not come until then never will.
    bench.harness.kill_peer();
    for (round, there) in written.iter().enumerate() {
        let late = content(there).iter().filter(|byte| **byte != 2).count();
        assert_eq!(late, 0, "bytes of round {round} came late");
    }
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
    let many: Vec<Copy> = (0..20_000).map(|_| bench.copy(1, slot)).collect();
    let before = bench.outcomes.len();
    assert_eq!(bench.submit(&many), Ok(()), "an empty queue takes any number");
    bench.wait(before + many.len());
}

/// Memory that is given back, at either end, while copies are under way is quiet within their time, and stays as it is.
fn removal_waits_for_what_is_under_way<H: Harness>() {
    let mut bench = Bench::<H>::connected();
    for (op, remote_goes) in [(Op::Write, true), (Op::Write, false), (Op::Read, true), (Op::Read, false)] {
        let (local, here) = buffer(&bench.here, &vec![1; 1 << 20], ALL);
        let (remote, there) = buffer(&bench.there, &vec![2; 1 << 20], ALL);
        let copies: Vec<Copy> =
            (0..32).map(|index| bench.raw(op, (local, index << 15), (remote, index << 15), 1 << 15, 0)).collect();
        let before = bench.outcomes.len();
        bench.submit_all(&copies);
        let gone = if remote_goes { bench.there.remove(remote) } else { bench.here.remove(local) };
        let gone = gone.expect("registered");
        while !gone.is_quiet() && bench.outcomes.len() < before + copies.len() {
            bench.harness.progress();
            bench.poll();
        }
        assert!(gone.wait_quiet(lanes::PATIENCE), "all copies have completed");
        let then = content(&gone);
        bench.wait(before + copies.len());
        let outcomes: Vec<Outcome> = copies.iter().map(|copy| bench.outcomes[&copy.id]).collect();
        assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Done | Outcome::Fenced)), "{outcomes:?}");
        assert_eq!(content(&gone), then, "it was written after it had been given back");
        let (from, to) = if op == Op::Write { (1, &there) } else { (2, &here) };
        let to = content(to);
        for (copy, outcome) in copies.iter().zip(outcomes) {
            let at = copy.local.offset as usize;
            assert!(outcome != Outcome::Done || to[at..at + (1 << 15)].iter().all(|byte| *byte == from), "{copy:?}");
        }
    }
}

/// `path` tells how it is, and why it is not.
fn paths_tell<H: Harness>() {
    let mut bench = Bench::<H>::new();
    let peer = bench.harness.peer();
    assert_eq!(bench.harness.transport().path(&peer.node), Path::None);
    bench.connect();
    let path = bench.harness.transport().path(&peer.node);
    assert!(matches!(path, Path::Connecting | Path::Up), "{path:?}");
    bench.wait_path(|path| *path == Path::Up);
    bench.connect();
    assert_eq!(bench.harness.transport().path(&peer.node), Path::Up, "it stands");
    bench.harness.transport().close(&peer.node);
    assert_eq!(bench.harness.transport().path(&peer.node), Path::None);
    bench.connect();
    bench.wait_path(|path| *path == Path::Up);
    let slot = bench.destination.issue(0);
    assert_eq!(bench.one(0, slot), Outcome::Done, "closed, and opened again");
    bench.harness.kill_peer();
    // A path that carries nothing need not notice.
    assert_eq!(bench.one(1, slot), Outcome::Lost);
    bench.wait_path(|path| matches!(path, Path::Down(why) if !why.is_empty()));
    bench.connect();
    bench.wait_path(|path| matches!(path, Path::Down(why) if !why.is_empty()));
}

/// A peer that has died comes back in another life: only who means that one reaches it, and old handles are of no use.
fn a_dead_peer_comes_back<H: Harness>() {
    let mut bench = Bench::<H>::connected();
    let (local, _) = buffer(&bench.here, &[1; 100], ALL);
    let (remote, _) = buffer(&bench.there, &[2; 100], ALL);
    let write = bench.raw(Op::Write, (local, 0), (remote, 0), 100, 0);
    assert_eq!(bench.run(write), Outcome::Done);
    let before = bench.harness.peer();
    bench.harness.kill_peer();
    let there = Regions::new();
    let (again, buffer) = buffer(&there, &[3; 100], ALL);
    bench.harness.revive_peer(there);
    assert_eq!(remote, again, "numbers begin anew");
    let now = bench.harness.peer();
    assert_ne!(before.incarnation, now.incarnation);
    bench.harness.transport().connect(&NodeAddress { incarnation: before.incarnation, ..now.clone() });
    let write = bench.raw(Op::Write, (local, 0), (remote, 0), 100, 0);
    assert_eq!(bench.run(write), Outcome::Lost, "that life is over");
    assert_eq!(content(&buffer), [3; 100]);
    bench.connect();
    let write = bench.raw(Op::Write, (local, 0), (again, 0), 100, 0);
    assert_eq!(bench.run(write), Outcome::Done);
    assert_eq!(content(&buffer), [1; 100]);
}

// -- transports x expectations ---------------------------------------------------------------------------------------

macro_rules! suites {
    ($expectations:tt; $($transport:ident: $harness:ty),+; in a VM: $($rare:ident: $device:ty),+) => {
        $(suite!($transport, $harness, $expectations, []);)+
        $(
            #[cfg(feature = "rdma")]
            suite!($rare, $device, $expectations, [ignore = "needs RDMA devices: make test-rdma has some"]);
        )+
    };
}

macro_rules! suite {
    ($transport:ident, $harness:ty, [$($expectation:ident),+ $(,)?], $attribute:tt) => {
        mod $transport {
            use super::*;

            $(expectation!($expectation, $harness, $attribute);)+
        }
    };
}

macro_rules! expectation {
    ($expectation:ident, $harness:ty, [$($attribute:meta)?]) => {
        #[test]
        $(#[$attribute])?
        fn $expectation() {
            super::$expectation::<$harness>();
        }
    };
}

suites!([
    done_means_applied,
    a_read_lands_verified,
    buffers_are_written_and_read,
    late_copies_are_fenced,
    a_region_does_not_come_back,
    strangers_are_denied,
    copies_of_no_bytes,
    overlapping_copies,
    thousands_of_small_copies,
    large_pieces,
    strips_of_one_slot,
    corruption_is_found,
    every_copy_completes_once,
    lost_means_never_later,
    a_full_queue_is_busy,
    removal_waits_for_what_is_under_way,
    paths_tell,
    a_dead_peer_comes_back,
]; sim: Sim, tcp: Tcp<false>, tcp_tls: Tcp<true>, shm: Shm; in a VM: rdma: Rdma);

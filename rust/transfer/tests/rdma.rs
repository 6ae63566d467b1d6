//! The rdma transport beyond what all transports promise (`conformance.rs`): several lines, failures of the network and
//! of either side, and what is given back afterwards.
//!
//! Goal: see each test. Method: two or more nodes of this process (for deaths, a child process) over verbs devices; a
//! test ends with its reason where there are none. `make test-rdma` has four rails in a VM; tests that need to take one
//! down run only there. One at a time (`--test-threads 1`), as they share the rails.
#![cfg(feature = "rdma")]

mod rails;

use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pyengine_transfer::region::{Access, Buffer, By, Regions};
use pyengine_transfer::transport::rdma::Settings;
use pyengine_transfer::transport::{Completion, Copy, CopyId, Op, Outcome, Path, Transport};
use pyengine_transfer::types::{NodeAddress, RegionId, Span};
use rails::{Node, PATIENCE, absent, side};

const ALL: Access = Access { read: true, write: true };
const PIECE: u32 = 256 << 10;

macro_rules! needs_rails {
    () => {
        if let Some(why) = absent() {
            eprintln!("skipped: {why}");
            return;
        }
    };
}

fn pattern(bytes: usize, seed: u32) -> Vec<u8> {
    (0..bytes as u32).map(|at| (at.wrapping_mul(0x9E37_79B1).wrapping_add(seed) >> 13) as u8).collect()
}

fn at(region: RegionId, offset: u64) -> Span {
    Span { region, life: 0, offset }
}

fn add(node: &Node, bytes: usize, access: Access) -> RegionId {
    node.regions.add(Arc::new(Buffer::owned(bytes, access)))
}

fn fill(node: &Node, region: RegionId, bytes: &[u8]) {
    let mut hold = node.regions.begin_write(at(region, 0), bytes.len() as u64, By::Owner).expect("registered");
    hold.bytes_mut().copy_from_slice(bytes);
}

fn look(node: &Node, region: RegionId, bytes: usize) -> Vec<u8> {
    node.regions.begin_read(at(region, 0), bytes as u64, By::Owner).expect("registered").bytes().to_vec()
}

/// A sender, and what has become of its copies.
struct Sender {
    node: Node,
    next: CopyId,
    outcomes: BTreeMap<CopyId, Outcome>,
}

impl Sender {
    fn new() -> Self {
        Self::with(side(0))
    }

    fn with(settings: Settings) -> Self {
        let node = Node::new("source", 2, settings, Regions::new());
        Self { node, next: 0, outcomes: BTreeMap::new() }
    }

    fn connected(peer: &NodeAddress) -> Self {
        let mut sender = Self::new();
        sender.connect(peer);
        sender
    }

    /// Returns when the path stands.
    fn connect(&mut self, peer: &NodeAddress) {
        self.node.transport.connect(peer);
        while self.node.transport.path(&peer.node) == Path::Connecting {
            self.node.woken.recv_timeout(PATIENCE).expect("it ends");
        }
        assert_eq!(self.node.transport.path(&peer.node), Path::Up);
    }

    /// Returns why the path does not stand.
    fn refused(&mut self, peer: &NodeAddress) -> String {
        self.node.transport.connect(peer);
        loop {
            match self.node.transport.path(&peer.node) {
                Path::Connecting => self.node.woken.recv_timeout(PATIENCE).expect("it ends"),
                Path::Down(why) => return why,
                other => panic!("{other:?}"),
            }
        }
    }

    fn submit(&mut self, peer: &NodeAddress, op: Op, local: Span, remote: Span, bytes: u32, grain: u32) -> CopyId {
        self.next += 1;
        let copy = Copy { id: self.next, op, local, remote, bytes, grain };
        while self.node.transport.submit(&peer.node, &[copy]).is_err() {
            self.node.woken.recv_timeout(PATIENCE).expect("a full queue empties");
            self.poll();
        }
        self.next
    }

    /// All of `bytes` by pieces.
    fn submit_all(&mut self, peer: &NodeAddress, op: Op, local: RegionId, remote: RegionId, bytes: usize, grain: u32) {
        for offset in (0..bytes as u64).step_by(PIECE as usize) {
            let piece = (bytes as u64 - offset).min(u64::from(PIECE)) as u32;
            self.submit(peer, op, at(local, offset), at(remote, offset), piece, grain);
        }
    }

    fn poll(&mut self) {
        let mut completions = Vec::new();
        self.node.transport.poll(&mut completions);
        for Completion { id, outcome } in completions {
            assert!(self.outcomes.insert(id, outcome).is_none(), "copy {id} completes twice");
        }
    }

    /// Waits until `count` copies have completed in all.
    fn wait(&mut self, count: usize) {
        self.poll();
        while self.outcomes.len() < count {
            self.node.woken.recv_timeout(PATIENCE).expect("every copy completes");
            self.poll();
        }
    }

    /// Waits for all copies; returns what has become of them, in order of submission.
    fn finish(&mut self) -> Vec<Outcome> {
        self.wait(self.next as usize);
        self.outcomes.values().copied().collect()
    }

    /// Waits for all copies, each of which must be done.
    fn all_done(&mut self, peer: &NodeAddress) {
        let outcomes = self.finish();
        let path = self.node.transport.path(&peer.node);
        assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Done), "{outcomes:?}, path: {path:?}");
    }

    fn one(&mut self, peer: &NodeAddress, op: Op, local: Span, remote: Span, bytes: u32, grain: u32) -> Outcome {
        let id = self.submit(peer, op, local, remote, bytes, grain);
        self.finish();
        self.outcomes[&id]
    }
}

fn receiver() -> Node {
    Node::new("destination", 1, side(1), Regions::new())
}

/// Queue pairs of a device, as the kernel counts them.
fn queue_pairs(device: &str) -> usize {
    let output = Command::new("rdma").args(["resource", "show", "qp", "link", device]).output().expect("iproute2");
    String::from_utf8_lossy(&output.stdout).lines().filter(|line| line.contains("type RC")).count()
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().expect("iproute2");
    assert!(status.success(), "ip {arguments}");
}

/// Packets that a device has sent.
fn packets(device: &str) -> u64 {
    let path = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts");
    std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

// Goal: bytes arrive whole, both ways, whatever the sizes, and every rail carries some. Method: megabytes at odd offsets
// with grains of all kinds, compared byte for byte; the devices' own packet counters.
#[test]
fn bytes_arrive_over_every_rail() {
    needs_rails!();
    let peer = receiver();
    let mut sender = Sender::connected(&peer.address);
    const BYTES: usize = 4 << 20;
    let before: Vec<u64> = sender_devices().iter().map(|device| packets(device)).collect();
    for (round, grain) in [0, 4096, 1000, PIECE].into_iter().enumerate() {
        let (local, remote, back) =
            (add(&sender.node, BYTES, ALL), add(&peer, BYTES, ALL), add(&sender.node, BYTES, ALL));
        let bytes = pattern(BYTES, round as u32);
        fill(&sender.node, local, &bytes);
        sender.submit_all(&peer.address, Op::Write, local, remote, BYTES, grain);
        sender.all_done(&peer.address);
        assert!(look(&peer, remote, BYTES) == bytes, "written with grain {grain}");
        sender.submit_all(&peer.address, Op::Read, back, remote, BYTES, grain);
        sender.all_done(&peer.address);
        assert!(look(&sender.node, back, BYTES) == bytes, "read with grain {grain}");
    }
    for (device, before) in sender_devices().iter().zip(before) {
        assert!(packets(device) > before, "{device} has carried nothing");
    }
    // Small, crooked, empty.
    let (local, remote) = (add(&sender.node, 10_000, ALL), add(&peer, 10_000, ALL));
    let bytes = pattern(10_000, 9);
    fill(&sender.node, local, &bytes);
    for (from, to, count) in [(1, 3, 1), (7, 4099, 4097), (0, 10_000, 0), (5000, 0, 3)] {
        assert_eq!(sender.one(&peer.address, Op::Write, at(local, from), at(remote, to), count, 0), Outcome::Done);
        let (from, to, count) = (from as usize, to as usize, count as usize);
        assert_eq!(look(&peer, remote, 10_000)[to..to + count], bytes[from..from + count]);
    }
    let ids: Vec<CopyId> = (0..5000)
        .map(|index| sender.submit(&peer.address, Op::Write, at(local, index), at(remote, 9999 - index), 1, 0))
        .collect();
    sender.finish();
    assert!(ids.iter().all(|id| sender.outcomes[id] == Outcome::Done));
    let reversed: Vec<u8> = bytes[..5000].iter().rev().copied().collect();
    assert!(look(&peer, remote, 10_000)[5000..] == reversed, "5000 copies of one byte");
}

fn sender_devices() -> Vec<String> {
    side(0).devices
}

// Goal: a peer touches only what is registered, within bounds, as permitted, in that life. Method: one wrong copy of
// each kind, at either end; nothing changes, and the path goes on.
#[test]
fn the_side_whose_memory_it_is_decides() {
    needs_rails!();
    let peer = receiver();
    let mut sender = Sender::connected(&peer.address);
    let local = add(&sender.node, 100, ALL);
    let (readable, writable) =
        (add(&peer, 100, Access { read: true, write: false }), add(&peer, 100, Access { read: false, write: true }));
    let gone = add(&peer, 100, ALL);
    peer.regions.remove(gone).expect("registered");
    let mut ask = |op, local, remote, bytes| sender.one(&peer.address, op, local, remote, bytes, 0);
    assert_eq!(ask(Op::Write, at(local, 0), at(readable, 0), 10), Outcome::Denied);
    assert_eq!(ask(Op::Read, at(local, 0), at(writable, 0), 10), Outcome::Denied);
    assert_eq!(ask(Op::Read, at(local, 0), at(readable, 91), 10), Outcome::Denied);
    assert_eq!(ask(Op::Write, at(local, 0), at(writable, u64::MAX), 10), Outcome::Denied);
    assert_eq!(ask(Op::Write, at(local, 0), at(gone, 0), 10), Outcome::Fenced);
    assert_eq!(ask(Op::Write, at(local, 91), at(writable, 0), 10), Outcome::Denied, "its own end");
    assert_eq!(ask(Op::Write, at(RegionId(99), 0), at(writable, 0), 10), Outcome::Fenced, "its own end");
    assert_eq!(ask(Op::Write, at(local, 0), at(writable, 90), 10), Outcome::Done);
    assert_eq!(ask(Op::Read, at(local, 0), at(readable, 90), 10), Outcome::Done);
    assert_eq!(peer.regions.fenced(), 1);
}

// Goal: memory is pinned once, and given back when it is unregistered, also in the middle of a transfer. Method: remove
// a region under way; the buffer becomes quiet, its chunks are gone, what comes later is fenced and changes nothing.
#[test]
fn unregistered_memory_is_given_back() {
    needs_rails!();
    let peer = receiver();
    let mut sender = Sender::connected(&peer.address);
    const BYTES: usize = 8 << 20;
    let (local, remote, other) = (add(&sender.node, BYTES, ALL), add(&peer, BYTES, ALL), add(&peer, 64, ALL));
    sender.submit_all(&peer.address, Op::Write, local, remote, BYTES, 0);
    sender.finish();
    assert_eq!((sender.node.transport.shared().pinned_chunks(), peer.transport.shared().pinned_chunks()), (1, 1));
    for _ in 0..4 {
        sender.submit_all(&peer.address, Op::Write, local, remote, BYTES, 0);
    }
    let before = sender.outcomes.len();
    sender.wait(before + 1);
    let buffer = peer.regions.remove(remote).expect("registered");
    let late = sender.submit(&peer.address, Op::Write, at(local, 0), at(remote, 0), PIECE, 0);
    assert!(buffer.wait_quiet(PATIENCE));
    assert_eq!(peer.transport.shared().pinned_chunks(), 0, "the cards have forgotten it");
    let outcomes = sender.finish();
    let path = sender.node.transport.path(&peer.address.node);
    assert!(outcomes.iter().all(|it| matches!(it, Outcome::Done | Outcome::Fenced)), "{outcomes:?}, path: {path:?}");
    assert_eq!(sender.outcomes[&late], Outcome::Fenced);
    assert_eq!(sender.one(&peer.address, Op::Write, at(local, 0), at(other, 0), 64, 0), Outcome::Done);
    let mine = sender.node.regions.remove(local).expect("registered");
    assert!(mine.wait_quiet(PATIENCE) && sender.node.transport.shared().pinned_chunks() == 0);
}

// Goal: another life, another secret's owner, a side without devices: refused with a sentence. Method: the cases.
#[test]
fn a_path_that_cannot_be_says_why() {
    let nothing = || Settings { devices: vec!["none".into()], ..Settings::default() };
    let peer = Node::new("destination", 1, nothing(), Regions::new());
    let why = Sender::with(nothing()).refused(&peer.address);
    assert!(why.contains("no RDMA device") || why.contains("no libibverbs"), "{why}");
    needs_rails!();
    let why = Sender::new().refused(&peer.address);
    assert!(why.contains("refused by the other side") && why.contains("no RDMA device"), "{why}");
    let peer = receiver();
    let why = Sender::new().refused(&NodeAddress { incarnation: 9, ..peer.address.clone() });
    assert!(why.contains("in life 1, not destination in life 9"), "{why}");
    let wrong_gid = Settings { gid_index: Some(77), ..side(0) };
    let why = Sender::with(wrong_gid).refused(&peer.address);
    assert!(why.contains("no entry 77"), "{why}");
    peer.kill();
    let why = Sender::new().refused(&peer.address);
    assert!(why.contains("cannot reach"), "{why}");
}

// Goal: an idle path that died is replaced unseen; a restarted peer is not mistaken for the old one. Method: end the
// incoming paths by the peer's limit of one, from two senders in turn.
#[test]
fn a_path_put_away_by_the_other_side_comes_back() {
    needs_rails!();
    let settings = Settings { paths: 1, ..side(1) };
    let peer = Node::new("destination", 1, settings, Regions::new());
    let remote = add(&peer, 64, ALL);
    let mut senders = [Sender::connected(&peer.address), Sender::new()];
    for round in 0..6 {
        let sender = &mut senders[round % 2];
        if round < 2 {
            sender.connect(&peer.address);
        }
        let local = add(&sender.node, 64, ALL);
        fill(&sender.node, local, &[round as u8; 64]);
        // The first copy may meet the path's end; then the next `connect` makes a new one, as for any broken path.
        while sender.one(&peer.address, Op::Write, at(local, 0), at(remote, 0), 64, 0) != Outcome::Done {
            sender.connect(&peer.address);
        }
        assert_eq!(look(&peer, remote, 64), [round as u8; 64]);
    }
    assert!(peer.transport.shared().counters().paths_opened.load(Ordering::Relaxed) >= 6);
}

// Goal: paths are bounded: the least used idle one makes room, unseen. Method: five peers, two paths, copies in turn.
#[test]
fn paths_are_bounded_and_make_room() {
    needs_rails!();
    let peers: Vec<Node> =
        (0..5).map(|number| Node::new(&format!("peer {number}"), 1, side(1), Regions::new())).collect();
    let remotes: Vec<RegionId> = peers.iter().map(|peer| add(peer, 64, ALL)).collect();
    let mut sender = Sender::with(Settings { paths: 2, queues_per_port: 1, ..side(0) });
    let local = add(&sender.node, 64, ALL);
    for (peer, remote) in peers.iter().zip(&remotes) {
        sender.connect(&peer.address);
        assert_eq!(sender.one(&peer.address, Op::Write, at(local, 0), at(*remote, 0), 64, 0), Outcome::Done);
    }
    for _ in 0..2 {
        for (peer, remote) in peers.iter().zip(&remotes) {
            assert_eq!(sender.one(&peer.address, Op::Write, at(local, 0), at(*remote, 0), 64, 0), Outcome::Done);
            assert_eq!(sender.node.transport.path(&peer.address.node), Path::Up);
        }
    }
    assert!(sender.node.transport.shared().counters().paths_evicted.load(Ordering::Relaxed) >= 3);
    drop(sender);
    drop(peers);
    assert_eq!(all_queue_pairs(), 0);
}

fn all_queue_pairs() -> usize {
    rails::devices().iter().map(|device| queue_pairs(device)).sum()
}

// Goal: nothing leaks. Method: forty paths made and closed, with a copy on each; then queue pairs, descriptors and
// threads are as before.
#[test]
fn connecting_again_and_again_leaks_nothing() {
    needs_rails!();
    let peer = receiver();
    let mut sender = Sender::connected(&peer.address);
    let (local, remote) = (add(&sender.node, 64, ALL), add(&peer, 64, ALL));
    let count = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).expect("procfs").count();
    let mut then = None;
    for round in 1..=40 {
        sender.connect(&peer.address);
        assert_eq!(sender.one(&peer.address, Op::Write, at(local, 0), at(remote, 0), 64, 0), Outcome::Done);
        sender.node.transport.close(&peer.address.node);
        if round % 20 == 0 {
            let now = [count("fd"), count("task"), all_queue_pairs()];
            // Some paths may still be on their way out: as much again as was once seen, and no more.
            let then = then.get_or_insert(now);
            assert!(now.iter().zip(&*then).all(|(now, then)| *now <= 2 * then + 8), "{now:?}, earlier {then:?}");
        }
    }
    drop(sender);
    drop(peer);
    assert_eq!(all_queue_pairs(), 0);
}

// Goal: one rail that goes down in mid-transfer costs nothing but time, and carries again when it is back. Method: take
// its link down under load, and up again; every copy is done, every byte right.
#[test]
fn a_rail_that_goes_down_is_done_without_and_comes_back() {
    needs_rails!();
    if rails::devices().len() < 4 {
        return eprintln!("skipped: needs four rails to take one down");
    }
    let peer = receiver();
    let mut sender = Sender::connected(&peer.address);
    const BYTES: usize = 4 << 20;
    let (local, remote) = (add(&sender.node, BYTES, ALL), add(&peer, BYTES, ALL));
    let shared = sender.node.transport.shared();
    let counters = shared.counters();
    for round in 0..12 {
        let bytes = pattern(BYTES, 77 + round);
        fill(&sender.node, local, &bytes);
        let before = sender.outcomes.len();
        sender.submit_all(&peer.address, Op::Write, local, remote, BYTES, 4096);
        sender.wait(before + 2);
        if round == 1 {
            ip("link set rail0 down");
        }
        sender.all_done(&peer.address);
        assert!(look(&peer, remote, BYTES) == bytes, "round {round}");
    }
    assert!(counters.lines_failed.load(Ordering::Relaxed) > 0 && counters.slices_resent.load(Ordering::Relaxed) > 0);
    let back = add(&sender.node, BYTES, ALL);
    let bytes = look(&peer, remote, BYTES);
    sender.submit_all(&peer.address, Op::Read, back, remote, BYTES, 0);
    sender.all_done(&peer.address);
    assert!(look(&sender.node, back, BYTES) == bytes);
    ip("link set rail0 up");
    for other in 1..4 {
        ip(&format!("route replace 10.99.{other}.1 dev rail0 src 10.99.0.1 metric 1 table 100"));
    }
    let until = std::time::Instant::now() + PATIENCE;
    while counters.lines_renewed.load(Ordering::Relaxed) == 0 {
        assert!(std::time::Instant::now() < until, "the rail does not come back");
        sender.submit_all(&peer.address, Op::Write, local, remote, BYTES, 0);
        sender.all_done(&peer.address);
    }
    let before = packets("rxe0");
    sender.submit_all(&peer.address, Op::Write, local, remote, BYTES, 0);
    sender.submit_all(&peer.address, Op::Write, local, remote, BYTES, 0);
    sender.all_done(&peer.address);
    assert!(packets("rxe0") > before, "it carries again");
}

// Goal: lost packets cost time only. Method: netem drops 1 % on one rail; both ways, byte for byte.
#[test]
fn loss_on_a_rail_harms_nothing() {
    needs_rails!();
    if rails::devices().len() < 4 {
        return eprintln!("skipped: needs the rails of the VM");
    }
    struct Lossy;
    impl Drop for Lossy {
        fn drop(&mut self) {
            // Gone already if the test could not set it.
            let _ = Command::new("tc").args("qdisc del dev rail0 root".split(' ')).status();
        }
    }
    let status = Command::new("tc").args("qdisc add dev rail0 root netem loss 1%".split(' ')).status();
    assert!(status.expect("iproute2").success());
    let _lossy = Lossy;
    let peer = receiver();
    let mut sender = Sender::connected(&peer.address);
    const BYTES: usize = 8 << 20;
    let (local, remote, back) = (add(&sender.node, BYTES, ALL), add(&peer, BYTES, ALL), add(&sender.node, BYTES, ALL));
    let bytes = pattern(BYTES, 5);
    fill(&sender.node, local, &bytes);
    sender.submit_all(&peer.address, Op::Write, local, remote, BYTES, 0);
    sender.all_done(&peer.address);
    sender.submit_all(&peer.address, Op::Read, back, remote, BYTES, 0);
    sender.all_done(&peer.address);
    assert!(look(&peer, remote, BYTES) == bytes && look(&sender.node, back, BYTES) == bytes);
}

// -- deaths: the other side is a process of its own -------------------------------------------------------------------

/// Bytes of the region that a child works with.
const CHILD_BYTES: usize = 8 << 20;

struct Other(Child);

impl Other {
    /// Runs one of the `child_…` below, with a word for it.
    fn start(test: &str, word: &str) -> Self {
        let child = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", test, "--ignored", "--nocapture", "--test-threads", "1"])
            .env("PYENGINE_TEST_WORD", word)
            .stdout(Stdio::piped())
            .spawn();
        Self(child.expect("this test runs again"))
    }

    /// The first line of its own that starts with `#`.
    fn says(&mut self) -> String {
        let output = self.0.stdout.take().expect("piped");
        let line = std::io::BufRead::lines(std::io::BufReader::new(output))
            .map_while(Result::ok)
            .find_map(|line| line.split_once('#').map(|(_, said)| said.trim().to_owned()));
        line.expect("it says something")
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may be dead already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn word() -> String {
    std::env::var("PYENGINE_TEST_WORD").expect("set by the parent")
}

/// Serves a region until it is killed.
#[test]
#[ignore = "started by a_dead_target_is_noticed"]
fn child_serves() {
    let node = receiver();
    let region = add(&node, CHILD_BYTES, ALL);
    println!("# {} {}", node.address.address, region.0);
    std::thread::sleep(PATIENCE);
}

/// Writes into a region of the parent until it is killed.
#[test]
#[ignore = "started by a_dead_initiator_leaves_quiet_memory"]
fn child_writes() {
    let word = word();
    let (address, region) = word.split_once(' ').expect("two words");
    let peer = NodeAddress { node: "destination".into(), address: address.into(), incarnation: 1 };
    let mut sender = Sender::connected(&peer);
    let (local, remote) = (add(&sender.node, CHILD_BYTES, ALL), RegionId(region.parse().expect("a number")));
    for round in 0.. {
        fill(&sender.node, local, &pattern(CHILD_BYTES, round));
        sender.submit_all(&peer, Op::Write, local, remote, CHILD_BYTES, 0);
        if round > 1 {
            sender.wait(sender.next as usize - 16);
        }
        if round == 2 {
            println!("# going");
        }
    }
}

// Goal: a target that dies in mid-transfer is noticed, every copy completes, and this side is quiet. Method: kill -9.
#[test]
fn a_dead_target_is_noticed() {
    needs_rails!();
    let mut other = Other::start("child_serves", "");
    let said = other.says();
    let (address, region) = said.split_once(' ').expect("two words");
    let peer = NodeAddress { node: "destination".into(), address: address.into(), incarnation: 1 };
    let remote = RegionId(region.parse().expect("a number"));
    let mut sender = Sender::connected(&peer);
    let local = add(&sender.node, CHILD_BYTES, ALL);
    for _ in 0..8 {
        sender.submit_all(&peer, Op::Write, local, remote, CHILD_BYTES, 0);
    }
    sender.wait(3);
    drop(other);
    let outcomes = sender.finish();
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Outcome::Done | Outcome::Lost)));
    assert!(outcomes.contains(&Outcome::Lost), "it died too late for this test to say anything");
    assert!(matches!(sender.node.transport.path(&peer.node), Path::Down(_)));
    let buffer = sender.node.regions.remove(local).expect("registered");
    assert!(buffer.is_quiet());
}

// Goal: an initiator that dies leaves memory that nobody writes any more, as soon as it is given back. Method: kill -9
// in mid-transfer; the buffer becomes quiet, and from then on no byte of it changes.
#[test]
fn a_dead_initiator_leaves_quiet_memory() {
    needs_rails!();
    let peer = receiver();
    let buffer = Arc::new(Buffer::owned(CHILD_BYTES, ALL));
    let remote = peer.regions.add(buffer.clone());
    let mut other = Other::start("child_writes", &format!("{} {}", peer.address.address, remote.0));
    assert_eq!(other.says(), "going");
    drop(other);
    peer.regions.remove(remote).expect("registered");
    assert!(buffer.wait_quiet(PATIENCE), "quarantine ends");
    // SAFETY: the memory belongs to `buffer`, which is quiet: nobody writes it.
    let bytes = || unsafe { std::slice::from_raw_parts(buffer.pointer().as_ptr(), CHILD_BYTES) }.to_vec();
    let then = bytes();
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(20));
        assert!(bytes() == then, "a late write");
    }
    assert_eq!(peer.transport.shared().pinned_chunks(), 0);
    drop(peer);
    assert_eq!(all_queue_pairs(), 0);
}

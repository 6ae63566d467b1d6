//! The transfer engine of a process, over real sockets.
//!
//! Goal: its promises hold (`endpoint.rs`, top). Method: engines in this process over loopback, some behind a proxy that
//! freezes or cuts; memory is compared byte by byte. Every wait is for an event, with a limit that only a hang reaches.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant};

use pyengine_transfer::endpoint::{Copies, Endpoint, How, Peer, RegionHandle, Registration, Settings, Transfer};
use pyengine_transfer::error::ErrorKind;
use pyengine_transfer::link::{Connection, Link, Stream, nonce, now};
use pyengine_transfer::messages::Purpose;
use pyengine_transfer::mover::{Ended, Failure, Priority, Via};
use pyengine_transfer::region::{Access, Buffer, By};
use pyengine_transfer::server::{Listener, Threads, accept_all};
use pyengine_transfer::session::{Event, Session};
use pyengine_transfer::transport::{Kind, Op, Path};
use pyengine_transfer::types::{NodeAddress, RegionId, Span};

const KEY: [u8; 32] = [7; 32];
/// What takes longer never comes.
const PATIENCE: Duration = Duration::from_secs(60);
const ALL: Access = Access { read: true, write: true };
const MIB: usize = 1 << 20;

fn settings(node: &str, listen: &str) -> Settings {
    Settings { node: Some(node.into()), key: Some(KEY), listen: Some(listen.into()), ..Settings::default() }
}

fn engine(node: &str) -> Endpoint {
    Endpoint::start(settings(node, "127.0.0.1:0")).expect("starts")
}

fn connect(from: &Endpoint, to: &Endpoint) -> Peer {
    from.connect(&to.address().address, Via::Auto, PATIENCE).expect("reachable")
}

/// Bytes that differ from place to place and from seed to seed.
fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    (0..bytes as u64).map(|i| (i.wrapping_mul(31) ^ (i >> 8) ^ seed.wrapping_mul(97)) as u8).collect()
}

/// Memory of an engine, with this content.
fn memory(of: &Endpoint, content: &[u8], name: Option<&str>) -> Registration {
    let region = of.allocate(content.len(), ALL, name).expect("registers");
    fill(of, &region, content);
    region
}

fn span(region: &Registration) -> Span {
    Span { region: region.region(), life: 0, offset: 0 }
}

fn fill(of: &Endpoint, region: &Registration, content: &[u8]) {
    let mut writing = of.regions().begin_write(span(region), content.len() as u64, By::Owner).expect("registered");
    writing.bytes_mut().copy_from_slice(content);
}

fn content(of: &Endpoint, region: &Registration) -> Vec<u8> {
    of.regions().begin_read(span(region), region.bytes(), By::Owner).expect("registered").bytes().to_vec()
}

/// The whole of one region into, or from, the whole of another.
fn whole(local: &Registration, remote: &RegionHandle) -> Copies {
    let mut copies = Copies::build();
    copies.add(local, 0, remote, 0, remote.bytes).expect("fits");
    copies.finish()
}

fn end(transfer: &Transfer) -> Ended {
    assert!(transfer.wait(PATIENCE), "it has not ended: {:?}", transfer.progress());
    transfer.outcome().expect("it has ended")
}

fn done(transfer: &Transfer) {
    let ended = end(transfer);
    assert!(matches!(ended, Ended::Done { .. }), "{ended:?}");
}

fn failure(transfer: &Transfer) -> Failure {
    match end(transfer) {
        Ended::Failed { why, .. } => why,
        other => panic!("{other:?}"),
    }
}

fn how(notify: &[u8]) -> How {
    How { notify: Some(notify.to_vec()), ..How::default() }
}

fn sample(of: &Endpoint, name: &str) -> u64 {
    let samples = of.samples();
    let found: Vec<u64> = samples.iter().filter(|(sample, _)| sample.starts_with(name)).map(|(_, v)| *v).collect();
    assert!(!found.is_empty(), "no {name} among {samples:?}");
    found.iter().sum()
}

/// Asks again and again, as nothing tells when it comes true.
fn eventually(what: &str, mut met: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !met() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

// -- a proxy that freezes and cuts ----------------------------------------------------------------------------------

struct Proxy {
    address: String,
    /// Bytes that it still passes on, in whatever direction.
    left: Arc<(Mutex<usize>, Condvar)>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    over: Arc<AtomicBool>,
}

impl Proxy {
    fn new(to: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
        let address = listener.local_addr().expect("bound").to_string();
        let left = Arc::new((Mutex::new(usize::MAX), Condvar::new()));
        let streams: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
        let over = Arc::new(AtomicBool::new(false));
        let (to, budget, all, stop) = (to.to_string(), left.clone(), streams.clone(), over.clone());
        std::thread::spawn(move || {
            for incoming in listener.incoming() {
                let Ok(incoming) = incoming else { return };
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(outgoing) = TcpStream::connect(&to) else { continue };
                let ends = [(&incoming, &outgoing), (&outgoing, &incoming)];
                for (from, to) in ends {
                    let (from, to) = (from.try_clone().expect("a descriptor"), to.try_clone().expect("a descriptor"));
                    let budget = budget.clone();
                    std::thread::spawn(move || pass_on(from, to, &budget));
                }
                all.lock().expect("whole").extend([incoming, outgoing]);
            }
        });
        Self { address, left, streams, over }
    }

    fn freeze(&self, frozen: bool) {
        self.freeze_after(if frozen { 0 } else { usize::MAX });
    }

    /// Freezes when so many more bytes have passed: in the middle of something.
    fn freeze_after(&self, bytes: usize) {
        *self.left.0.lock().expect("whole") = bytes;
        self.left.1.notify_all();
    }

    fn is_frozen(&self) -> bool {
        *self.left.0.lock().expect("whole") == 0
    }

    fn cut(&self) {
        for stream in self.streams.lock().expect("whole").drain(..) {
            // It may have ended already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        self.freeze(false);
        self.cut();
        let _ = TcpStream::connect(&self.address);
    }
}

fn pass_on(mut from: TcpStream, mut to: TcpStream, left: &(Mutex<usize>, Condvar)) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        let mut passed = 0;
        while passed < bytes {
            let mut budget = left.1.wait_while(left.0.lock().expect("whole"), |left| *left == 0).expect("whole");
            let step = (bytes - passed).min(*budget);
            *budget -= if *budget == usize::MAX { 0 } else { step };
            drop(budget);
            if to.write_all(&buffer[passed..passed + step]).is_err() {
                break;
            }
            passed += step;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

// -- moving ----------------------------------------------------------------------------------------------------------

/// By which paths the promises are looked at. (The proxy stands in the way of tcp only.)
const VIAS: [Via; 3] = [Via::Only(Kind::Tcp), Via::Only(Kind::Shm), Via::Auto];

#[test]
fn done_means_applied_in_both_directions() {
    for via in VIAS {
        let (a, b) = (engine("a"), engine("b"));
        let peer = a.connect(&b.address().address, via, PATIENCE).expect("reachable");
        for bytes in [0, 1, 4096, 3 * MIB + 17] {
            let source = memory(&a, &pattern(bytes, 1), None);
            // Memory that only its process sees, and memory that others can map.
            let own = a.register(Buffer::owned(bytes, ALL), None).expect("registers");
            let target = memory(&b, &pattern(bytes, 2), None);
            let list = whole(&source, target.handle());
            let transfer = a.submit(&peer, Op::Write, &list, How::default()).expect("room");
            done(&transfer);
            assert_eq!(transfer.progress().bytes_done, bytes as u64);
            assert_eq!(content(&b, &target), pattern(bytes, 1));
            fill(&b, &target, &pattern(bytes, 3));
            // The same list again, the other way.
            done(&a.submit(&peer, Op::Read, &list, How::default()).expect("room"));
            assert_eq!(content(&a, &source), pattern(bytes, 3));
            fill(&a, &own, &pattern(bytes, 4));
            let transfer = a.submit(&peer, Op::Write, &whole(&own, target.handle()), How::default()).expect("room");
            done(&transfer);
            assert_eq!(content(&b, &target), pattern(bytes, 4));
            if let (Via::Only(asked), Some(Ended::Done { via, fallback, .. })) = (peer.via(), transfer.outcome()) {
                assert_eq!((asked, fallback), (via, false), "the one asked for is the one used");
            }
        }
        a.driver().check();
        assert!(sample(&a, "pyengine_engine_bytes_total") >= 9 * MIB as u64);
        // In `Auto` the other paths were not needed.
        assert_eq!(peer.paths().iter().filter(|report| report.path == Path::Up).count(), 1);
    }
}

#[test]
fn many_small_copies_are_one_call() {
    for via in VIAS {
        let (a, b) = (engine("a"), engine("b"));
        let peer = a.connect(&b.address().address, via, PATIENCE).expect("reachable");
        let (source, target) = (memory(&a, &pattern(MIB, 1), None), memory(&b, &vec![0; MIB], None));
        let mut copies = Copies::build();
        for index in 0..16384u64 {
            // Each piece of 64 bytes to the mirrored place.
            copies.add(&source, index * 64, target.handle(), (16383 - index) * 64, 64).expect("fits");
        }
        let list = copies.finish();
        assert_eq!((list.len(), list.bytes()), (16384, MIB as u64));
        done(&a.submit(&peer, Op::Write, &list, How::default()).expect("room"));
        let mirrored: Vec<u8> = pattern(MIB, 1).chunks(64).rev().flatten().copied().collect();
        assert_eq!(content(&b, &target), mirrored);
    }
}

#[test]
fn auto_says_what_it_took_and_why() {
    let a = engine("a");
    let b = Endpoint::start(Settings { transports: vec![Kind::Tcp], ..settings("b", "127.0.0.1:0") }).expect("starts");
    let peer = connect(&a, &b);
    let (source, target) = (memory(&a, &[1; 64], None), memory(&b, &[0; 64], None));
    let transfer = a.submit(&peer, Op::Write, &whole(&source, target.handle()), How::default()).expect("room");
    let ended = end(&transfer);
    assert!(matches!(ended, Ended::Done { via: Kind::Tcp, .. }), "{ended:?}");
    let paths = peer.paths();
    for report in &paths {
        match report.kind {
            Kind::Tcp => assert!(report.taken && report.path == Path::Up, "{paths:?}"),
            _ => assert!(!report.taken && matches!(&report.path, Path::Down(why) if !why.is_empty()), "{paths:?}"),
        }
    }
    // Asked for one that the peer does not have, there is no other.
    peer.close();
    let error = a.connect(&b.address().address, Via::Only(Kind::Shm), PATIENCE).map(|_| ()).expect_err("not there");
    assert!(error.kind == ErrorKind::Retry && error.message.contains("no copies would reach it: shm:"), "{error}");
}

#[test]
fn what_cannot_be_is_refused_with_a_sentence() {
    let (a, b, c) = (engine("a"), engine("b"), engine("c"));
    let peer = connect(&a, &b);
    let (local, remote, of_c) = (memory(&a, &[1; 100], None), memory(&b, &[2; 100], None), memory(&c, &[3; 100], None));
    let refusal = |copies: &[(u64, u64, u64)], op| {
        let mut list = Copies::build();
        for &(from, to, bytes) in copies {
            if let Err(error) = list.add(&local, from, remote.handle(), to, bytes) {
                return error;
            }
        }
        a.submit(&peer, op, &list.finish(), How::default()).map(|_| ()).expect_err("impossible")
    };
    assert!(refusal(&[(0, 0, 100), (0, 1, 100)], Op::Write).message.contains("copy 1: 100 bytes at 1 are outside"));
    assert!(refusal(&[(u64::MAX, 0, 2)], Op::Write).message.contains("its local region"));
    assert!(refusal(&[(0, 10, 20), (50, 0, 10), (60, 29, 5)], Op::Write).message.contains("copies 0 and 2"));
    assert!(refusal(&[(0, 0, 20), (19, 50, 10)], Op::Read).message.contains("read into the same bytes"));
    let mut list = Copies::build();
    list.add(&local, 0, remote.handle(), 0, 10).expect("fits");
    assert!(
        list.add(&local, 0, of_c.handle(), 0, 10).expect_err("another peer").message.contains("one list, one peer")
    );
    let foreign = whole(&local, of_c.handle());
    let error = a.submit(&peer, Op::Write, &foreign, How::default()).map(|_| ()).expect_err("another peer");
    assert!(error.kind == ErrorKind::Bug && error.message.contains("handles are of c"), "{error}");
    let long = a.submit(&peer, Op::Write, &whole(&local, remote.handle()), how(&[0; 65537])).map(|_| ());
    assert!(long.expect_err("too long").message.contains("at most 65536"));

    // Not permitted: refused here by what the handle says, and there whatever it says.
    let shown = b.allocate(100, Access { read: true, write: false }, None).expect("registers");
    let error = a.submit(&peer, Op::Write, &whole(&local, shown.handle()), How::default()).map(|_| ());
    assert!(error.expect_err("read only").message.contains("not registered for peers to write"));
    let forged = RegionHandle { access: ALL, ..shown.handle().clone() };
    assert_eq!(
        failure(&a.submit(&peer, Op::Write, &whole(&local, &forged), How::default()).expect("room")),
        Failure::Denied
    );
    let larger = RegionHandle { bytes: 101, ..remote.handle().clone() };
    let big = memory(&a, &[1; 101], None);
    assert_eq!(
        failure(&a.submit(&peer, Op::Read, &whole(&big, &larger), How::default()).expect("room")),
        Failure::Denied
    );
    let nowhere = RegionHandle { region: RegionId(999), ..remote.handle().clone() };
    let transfer = a.submit(&peer, Op::Write, &whole(&local, &nowhere), How::default()).expect("room");
    assert_eq!(failure(&transfer), Failure::Fenced);
    let error = transfer.result().expect_err("failed");
    assert!(error.kind == ErrorKind::GiveUp && error.message.contains("new handle"), "{error}");
    assert_eq!((content(&b, &remote), content(&b, &shown)), (vec![2; 100], vec![0; 100]));

    // Memory that nobody can write is no destination.
    // SAFETY: a static lives for ever; nobody writes it (that is what is tested).
    let constant = unsafe {
        Buffer::new(std::ptr::NonNull::from(b"constant").cast(), 8, Access { read: true, write: false }, Box::new(()))
    };
    let constant = a.register_source(constant, None).expect("registers");
    let mut list = Copies::build();
    list.add(&constant, 0, remote.handle(), 0, 8).expect("fits");
    let list = list.finish();
    assert!(
        a.submit(&peer, Op::Read, &list, How::default())
            .map(|_| ())
            .expect_err("read only")
            .message
            .contains("read-only")
    );
    done(&a.submit(&peer, Op::Write, &list, How::default()).expect("room"));
    assert_eq!(content(&b, &remote)[..8], *b"constant");

    local.unregister(PATIENCE).expect("quiet");
    let error = a.submit(&peer, Op::Write, &foreign, How::default()).map(|_| ()).expect_err("unregistered");
    assert!(error.message.contains("was unregistered"), "{error}");
}

#[test]
fn urgent_copies_pass_big_ones_and_are_not_alone() {
    let (a, b) = (engine("a"), engine("b"));
    let peer = connect(&a, &b);
    let (big, there) = (memory(&a, &vec![5; 64 * MIB], None), memory(&b, &vec![0; 64 * MIB], None));
    let (small, here) = (memory(&a, &[6; 4096], None), memory(&b, &[0; 4096], None));
    let mut list = Copies::build();
    list.add(&big, 0, there.handle(), 0, 64 * MIB as u64).expect("fits");
    let (list, urgent) = (list.finish(), whole(&small, here.handle()));
    // Nine passes of the big one are queued; an urgent one between them does not wait for them.
    let low = How { priority: Priority::Background, ..How::default() };
    let all: Vec<Transfer> = (0..9).map(|_| a.submit(&peer, Op::Write, &list, low.clone()).expect("room")).collect();
    let first = How { priority: Priority::Urgent, ..How::default() };
    done(&a.submit(&peer, Op::Write, &urgent, first).expect("room"));
    assert!(!all[8].is_over(), "the urgent copy waited for 576 MiB");
    all.iter().for_each(done);
    assert!(content(&b, &there).iter().all(|byte| *byte == 5));
}

#[test]
fn a_slow_peer_slows_nobody() {
    let (a, slow, quick) = (engine("a"), engine("slow"), engine("quick"));
    let proxy = Proxy::new(&slow.address().address);
    let to_slow = a.connect(&proxy.address, Via::Only(Kind::Tcp), PATIENCE).expect("reachable");
    let to_quick = connect(&a, &quick);
    let source = memory(&a, &pattern(8 * MIB, 1), None);
    let (there, here) = (memory(&slow, &vec![0; 8 * MIB], None), memory(&quick, &vec![0; 8 * MIB], None));
    proxy.freeze(true);
    let stuck = a.submit(&to_slow, Op::Write, &whole(&source, there.handle()), How::default()).expect("room");
    for _ in 0..20 {
        done(&a.submit(&to_quick, Op::Write, &whole(&source, here.handle()), How::default()).expect("room"));
    }
    assert_eq!(content(&quick, &here), pattern(8 * MIB, 1));
    proxy.freeze(false);
    done(&stuck);
    assert_eq!(content(&slow, &there), pattern(8 * MIB, 1));
}

#[test]
fn a_full_engine_says_so_and_waits_if_asked() {
    let (a, b) = (engine("a"), engine("b"));
    let proxy = Proxy::new(&b.address().address);
    let peer = a.connect(&proxy.address, Via::Only(Kind::Tcp), PATIENCE).expect("reachable");
    let (source, target) = (memory(&a, &[1; 64], None), memory(&b, &[0; 64], None));
    let list = whole(&source, target.handle());
    proxy.freeze(true);
    let mut begun = Vec::new();
    let error = loop {
        match a.submit(&peer, Op::Write, &list, How { retries: 100, ..How::default() }) {
            Ok(transfer) => begun.push(transfer),
            Err(error) => break error,
        }
        assert!(begun.len() < 1 << 20, "a queue without a limit");
    };
    assert!(error.kind == ErrorKind::Retry && error.message.contains("too much is queued"), "{error}");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| a.submit(&peer, Op::Write, &list, How { wait: PATIENCE, ..How::default() }));
        proxy.freeze(false);
        done(&waiting.join().expect("no panic").expect("room has come"));
    });
    begun.iter().for_each(done);
}

// -- ends ------------------------------------------------------------------------------------------------------------

#[test]
fn what_ended_early_is_quiet_and_what_is_not_stays_fenced() {
    let (a, b) = (engine("a"), engine("b"));
    let proxy = Proxy::new(&b.address().address);
    let peer = a.connect(&proxy.address, Via::Only(Kind::Tcp), PATIENCE).expect("reachable");
    let within = Duration::from_secs(1);
    for deadline in [None, Some(within)] {
        // More than is ever under way, so that it cannot be done by what is.
        let into = memory(&a, &vec![0; 32 * MIB], None);
        let from = memory(&b, &vec![9; 32 * MIB], None);
        let list = whole(&into, from.handle());
        // It stops in the middle of a piece, which may go on coming into the memory at any time.
        proxy.freeze_after(1_000_000);
        let transfer = a.submit(&peer, Op::Read, &list, How { deadline, ..How::default() }).expect("room");
        eventually("it is in the middle", || proxy.is_frozen());
        match deadline {
            None => transfer.cancel(),
            Some(within) => assert!(!transfer.wait(within), "it has ended, and the lane is still writing"),
        }
        let error = into.unregister(Duration::from_millis(30)).expect_err("it is under way");
        assert!(error.kind == ErrorKind::Retry && error.message.contains("stays fenced"), "{error}");
        assert!(into.is_fenced() && !into.is_quiet() && !transfer.is_over());
        proxy.freeze(false);
        assert_eq!(end(&transfer), if deadline.is_some() { Ended::DeadlinePassed } else { Ended::Cancelled });
        assert!(into.is_quiet(), "it has ended, and its memory is touched");
        into.unregister(Duration::ZERO).expect("quiet");
    }
    a.driver().check();
}

#[test]
fn unregistering_waits_for_a_peers_write_and_fences_the_next() {
    let (a, b) = (engine("a"), engine("b"));
    let proxy = Proxy::new(&b.address().address);
    let peer = a.connect(&proxy.address, Via::Only(Kind::Tcp), PATIENCE).expect("reachable");
    let source = memory(&a, &vec![1; 4 * MIB], None);
    let target = memory(&b, &vec![0; 4 * MIB], None);
    let list = whole(&source, target.handle());
    // It stops within the first piece.
    proxy.freeze_after(100_000);
    let transfer = a.submit(&peer, Op::Write, &list, How { retries: 1000, ..How::default() }).expect("room");
    eventually("it is in the middle", || proxy.is_frozen() && target.buffer().holds() > 0);
    let error = target.unregister(Duration::from_millis(30)).expect_err("a lane is writing");
    assert!(error.message.contains("stays fenced") && !target.is_quiet(), "{error}");
    proxy.freeze(false);
    target.unregister(PATIENCE).expect("the lane lets go of its frame");
    assert_eq!(failure(&transfer), Failure::Fenced);
    // Another region, which may lie in the same place, is another number: the late write hits nothing.
    let next = memory(&b, &vec![7; 4 * MIB], None);
    let late = a.submit(&peer, Op::Write, &list, How::default()).expect("room");
    assert_eq!(failure(&late), Failure::Fenced);
    assert!(content(&b, &next).iter().all(|byte| *byte == 7));
    assert!(sample(&b, "pyengine_engine_fenced_total") > 0);
}

#[test]
fn dropping_an_engine_ends_what_it_had_begun() {
    let (a, b) = (engine("a"), engine("b"));
    let proxy = Proxy::new(&b.address().address);
    let peer = a.connect(&proxy.address, Via::Only(Kind::Tcp), PATIENCE).expect("reachable");
    let (source, target) = (memory(&a, &vec![1; 16 * MIB], None), memory(&b, &vec![0; 16 * MIB], None));
    proxy.freeze(true);
    let transfer = a.submit(&peer, Op::Write, &whole(&source, target.handle()), how(b"x")).expect("room");
    let (tell, told) = mpsc::channel();
    transfer.then(move || tell.send(()).expect("somebody listens"));
    drop(a);
    told.recv_timeout(PATIENCE).expect("its end is told");
    assert_eq!(failure(&transfer), Failure::Unreachable);
    source.unregister(Duration::ZERO).expect("quiet");
    assert!(peer.find("x", Duration::ZERO).is_err());
}

#[test]
fn closing_a_peer_ends_its_transfers_and_no_others() {
    let (a, b, c) = (engine("a"), engine("b"), engine("c"));
    let proxy = Proxy::new(&b.address().address);
    let peer = a.connect(&proxy.address, Via::Only(Kind::Tcp), PATIENCE).expect("reachable");
    let other = connect(&a, &c);
    let source = memory(&a, &vec![1; 16 * MIB], None);
    let (there, elsewhere) = (memory(&b, &vec![0; 16 * MIB], None), memory(&c, &vec![0; 16 * MIB], None));
    proxy.freeze(true);
    let stuck = a.submit(&peer, Op::Write, &whole(&source, there.handle()), how(b"never")).expect("room");
    let going = a.submit(&other, Op::Write, &whole(&source, elsewhere.handle()), How::default()).expect("room");
    peer.close();
    assert_eq!(failure(&stuck), Failure::Unreachable);
    done(&going);
    let late = a.submit(&peer, Op::Write, &whole(&source, there.handle()), How::default()).map(|_| ());
    assert!(late.expect_err("closed").message.contains("closed"));
    source.unregister(PATIENCE).expect("quiet");
    a.driver().check();
}

// -- notifications ---------------------------------------------------------------------------------------------------

#[test]
fn notifications_come_after_the_data_in_order_and_once() {
    let (a, b) = (engine("a"), engine("b"));
    let proxy = Proxy::new(&b.address().address);
    let peer = a.connect(&proxy.address, Via::Only(Kind::Tcp), PATIENCE).expect("reachable");
    let (source, target) = (memory(&a, &[0; 8], None), memory(&b, &[0; 8], None));
    let list = whole(&source, target.handle());
    for round in 1..=50u64 {
        fill(&a, &source, &round.to_le_bytes());
        let transfer = a.submit(&peer, Op::Write, &list, how(&round.to_le_bytes())).expect("room");
        if round % 10 == 0 {
            proxy.cut();
        }
        assert!(b.wait_notification(PATIENCE));
        let notification = b.notifications(1).remove(0);
        assert_eq!(notification.from.node, "a");
        assert_eq!(notification.payload, round.to_le_bytes(), "in order, once");
        assert_eq!(content(&b, &target), round.to_le_bytes(), "after the data");
        done(&transfer);
    }
    assert!(b.notifications(1).is_empty());
}

/// A connection that was closed leaves nothing behind: the next one's session stands, and its notifications arrive.
#[test]
fn notifications_go_on_after_a_reconnect() {
    let (a, b) = (engine("a"), engine("b"));
    for round in 0..3 {
        let peer = connect(&a, &b);
        for text in ["1", "2"] {
            done(&a.submit(&peer, Op::Write, &Copies::build().finish(), how(text.as_bytes())).expect("room"));
            assert!(b.wait_notification(PATIENCE), "round {round}");
            assert_eq!(b.notifications(2).iter().map(|told| &told.payload[..]).collect::<Vec<_>>(), [text.as_bytes()]);
        }
        peer.round_trip(PATIENCE).expect("the session stands");
        peer.close();
    }
}

#[test]
fn a_full_inbox_holds_its_peers_back() {
    let a = engine("a");
    let b = Endpoint::start(Settings { inbox: 2, ..settings("b", "127.0.0.1:0") }).expect("starts");
    let peer = connect(&a, &b);
    let nothing = Copies::build().finish();
    let notify = |text: &str, deadline| {
        a.submit(&peer, Op::Write, &nothing, How { deadline, ..how(text.as_bytes()) }).expect("room")
    };
    let (one, two) = (notify("1", None), notify("2", None));
    done(&one);
    done(&two);
    let (three, four) = (notify("3", None), notify("4", Some(Duration::from_millis(30))));
    let five = notify("5", None);
    assert_eq!(end(&four), Ended::DeadlinePassed);
    five.cancel();
    assert_eq!(end(&five), Ended::Cancelled);
    assert!(!three.is_over(), "nobody has taken anything");
    let six = notify("6", None);
    let mut got = Vec::new();
    while got.len() < 4 {
        assert!(b.wait_notification(PATIENCE), "{got:?}");
        got.extend(b.notifications(1).into_iter().map(|notification| notification.payload));
    }
    assert_eq!(got, [b"1", b"2", b"3", b"6"]);
    done(&three);
    done(&six);
    assert!(!b.wait_notification(Duration::ZERO));
}

// -- peers -----------------------------------------------------------------------------------------------------------

#[test]
fn regions_are_found_by_name_and_by_handle() {
    let (a, b) = (engine("a"), engine("b"));
    let peer = connect(&a, &b);
    let error = peer.find("cache", PATIENCE).expect_err("not yet");
    assert!(error.kind == ErrorKind::Retry && error.message.contains("no region \"cache\""), "{error}");
    let region = memory(&b, &[4; 10], Some("cache"));
    let found = peer.find("cache", PATIENCE).expect("registered");
    assert_eq!(found, *region.handle());
    assert_eq!(RegionHandle::from_bytes(&region.handle().to_bytes()), Ok(found));
    let twice = b.allocate(1, ALL, Some("cache")).map(|_| ()).expect_err("taken");
    assert!(twice.message.contains("unregister it first"), "{twice}");
    assert!(b.allocate(1, ALL, Some("")).is_err() && peer.find(&"x".repeat(257), PATIENCE).is_err());
    drop(region);
    assert!(peer.find("cache", PATIENCE).is_err(), "gone with its region");
    memory(&b, &[4; 10], Some("cache"));
}

#[test]
fn who_cannot_be_reached_is_told_why() {
    let (a, b) = (engine("a"), engine("b"));
    let refusal = |address: &str, via| a.connect(address, via, PATIENCE).map(|_| ()).expect_err("impossible");
    let error = refusal("127.0.0.1:1", Via::Auto);
    assert!(error.kind == ErrorKind::Retry && error.message.contains("is its engine running"), "{error}");
    assert_eq!(refusal("nonsense", Via::Auto).kind, ErrorKind::Retry);
    let error = refusal(&b.address().address, Via::Only(Kind::Sim));
    assert!(error.kind == ErrorKind::GiveUp && error.message.contains("no sim"), "{error}");
    let error = refusal(&a.address().address, Via::Auto);
    assert!(error.message.contains("this engine itself") || error.message.contains("your node id is mine"), "{error}");
    let other = Endpoint::start(Settings { key: Some([8; 32]), ..settings("c", "127.0.0.1:0") }).expect("starts");
    let error = refusal(&other.address().address, Via::Auto);
    assert!(error.kind == ErrorKind::GiveUp && error.message.contains("secret"), "{error}");
    let peer = a.connect(&b.address().address, Via::Only(Kind::Tcp), PATIENCE).expect("reachable");
    let error = refusal(&b.address().address, Via::Auto);
    assert!(error.kind == ErrorKind::Bug && error.message.contains("connected by tcp already"), "{error}");
    let again = a.connect(&b.address().address, Via::Only(Kind::Tcp), PATIENCE).expect("the same one");
    peer.close();
    assert!(again.find("x", PATIENCE).expect_err("closed").message.contains("closed"));
    let fresh = connect(&a, &b);
    let paths = fresh.paths();
    assert!(paths.iter().any(|report| report.path == Path::Up), "{paths:?}");
    for wrong in [settings("a b", "127.0.0.1:0"), settings("x", "nonsense"), settings("x", &b.address().address)] {
        assert!(Endpoint::start(wrong).is_err());
    }
    let open = Settings { key: None, ..settings("x", "0.0.0.0:0") };
    assert!(Endpoint::start(open).map(|_| ()).expect_err("open to all").message.contains("secret"));
}

#[test]
fn a_broken_connection_is_replaced_unnoticed() {
    let (a, b) = (engine("a"), engine("b"));
    let proxy = Proxy::new(&b.address().address);
    let peer = a.connect(&proxy.address, Via::Only(Kind::Tcp), PATIENCE).expect("reachable");
    let (source, target) = (memory(&a, &[0; 4096], None), memory(&b, &[0; 4096], Some("it")));
    for round in 0..10 {
        fill(&a, &source, &[round; 4096]);
        proxy.cut();
        done(&a.submit(&peer, Op::Write, &whole(&source, target.handle()), how(&[round])).expect("room"));
        assert_eq!(content(&b, &target), [round; 4096]);
        assert_eq!(peer.find("it", PATIENCE).expect("asked again"), *target.handle());
    }
    assert_eq!(b.notifications(100).len(), 10);
}

#[test]
fn a_silent_peer_is_noticed() {
    let (a, b) = (engine("a"), engine("b"));
    let proxy = Proxy::new(&b.address().address);
    let peer = a.connect(&proxy.address, Via::Only(Kind::Tcp), PATIENCE).expect("reachable");
    eventually("the session stands", || peer.down().is_none());
    proxy.freeze(true);
    eventually("it is held dead", || peer.down().is_some());
    let error = peer.down().expect("just seen");
    assert!(error.message.contains("nothing heard") || error.message.contains("handshake"), "{error}");
    let list = Copies::build().finish();
    let transfer = a.submit(&peer, Op::Write, &list, How { deadline: Some(Duration::from_millis(50)), ..how(b"late") });
    assert_eq!(end(&transfer.expect("room")), Ended::DeadlinePassed);
    proxy.freeze(false);
    eventually("it is back", || peer.down().is_none());
    done(&a.submit(&peer, Op::Write, &list, how(b"back")).expect("room"));
    assert_eq!(b.notifications(10).last().expect("one at least").payload, b"back");
}

#[test]
fn a_restarted_peer_fences_its_old_handles() {
    VIAS.into_iter().for_each(restart);
}

fn restart(via: Via) {
    let (a, b) = (engine("a"), engine("b"));
    let peer = a.connect(&b.address().address, via, PATIENCE).expect("reachable");
    let source = memory(&a, &[1; 64], None);
    let old = memory(&b, &[0; 64], Some("it"));
    let list = whole(&source, old.handle());
    done(&a.submit(&peer, Op::Write, &list, How::default()).expect("room"));
    let (address, life) = (b.address().address.clone(), b.address().incarnation);
    drop(b);
    let restarted = Endpoint::start(settings("b", &address)).expect("the port is free again");
    // The first region of the new life has the number that the old one had.
    let new = memory(&restarted, &[2; 64], Some("it"));
    assert_eq!(new.region(), old.region());
    let found = peer.find("it", PATIENCE).expect("reached again");
    assert!(found.incarnation > life && peer.address().incarnation == found.incarnation);
    let late = a.submit(&peer, Op::Write, &list, How::default()).expect("room");
    assert_eq!(failure(&late), Failure::Fenced);
    assert!(late.result().expect_err("failed").message.contains("restarted"));
    assert_eq!(content(&restarted, &new), [2; 64], "not touched by what was meant for the life before");
    done(&a.submit(&peer, Op::Write, &whole(&source, &found), How::default()).expect("room"));
    assert_eq!(content(&restarted, &new), [1; 64]);
}

#[test]
fn a_restart_under_way_ends_what_was_meant_for_the_life_before() {
    let (a, b) = (engine("a"), engine("b"));
    let proxy = Proxy::new(&b.address().address);
    let peer = a.connect(&proxy.address, Via::Only(Kind::Tcp), PATIENCE).expect("reachable");
    let source = memory(&a, &vec![1; 8 * MIB], None);
    let old = memory(&b, &vec![0; 8 * MIB], None);
    proxy.freeze(true);
    let long = How { retries: 1000, ..how(b"done") };
    let transfer = a.submit(&peer, Op::Write, &whole(&source, old.handle()), long).expect("room");
    let address = b.address().address.clone();
    drop(b);
    let restarted = Endpoint::start(settings("b", &address)).expect("the port is free again");
    let new = memory(&restarted, &vec![2; 8 * MIB], None);
    proxy.cut();
    proxy.freeze(false);
    assert_eq!(failure(&transfer), Failure::Fenced);
    assert!(content(&restarted, &new).iter().all(|byte| *byte == 2));
    assert!(restarted.notifications(1).is_empty());
    source.unregister(PATIENCE).expect("quiet");
}

#[test]
fn a_restarted_initiator_is_welcome_and_its_old_life_is_not() {
    let b = engine("b");
    let target = memory(&b, &[0; 64], None);
    let first = engine("a");
    connect(&first, &b);
    let second = engine("a");
    let peer = connect(&second, &b);
    let source = memory(&second, &[1; 64], None);
    done(&second.submit(&peer, Op::Write, &whole(&source, target.handle()), how(b"new life")).expect("room"));
    assert_eq!(b.notifications(10).len(), 1);
    let stale = first.connect(&b.address().address, Via::Auto, Duration::from_millis(500));
    let refused = |peer: &Peer| peer.find("x", Duration::from_millis(500)).expect_err("stale").message;
    match stale {
        Err(error) => assert!(error.message.contains("stale"), "{error}"),
        // It still had its session; another one it does not get.
        Ok(peer) => assert!(refused(&peer).contains("did not say") || refused(&peer).contains("no region")),
    }
}

#[test]
fn strangers_get_nothing_and_harm_nobody() {
    let (a, b) = (engine("a"), engine("b"));
    let peer = connect(&a, &b);
    let address = &b.address().address;
    let mut slow = Vec::new();
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 4096], b"pyEN", &[0xff; 64], b""] {
        let mut stranger = TcpStream::connect(address).expect("a port is a port");
        stranger.write_all(bytes).expect("sent");
        slow.push(stranger);
    }
    for (index, stranger) in slow.iter_mut().enumerate().take(2) {
        stranger.set_read_timeout(Some(PATIENCE)).expect("a time");
        let mut answer = Vec::new();
        // The end may come as a reset.
        let _ = stranger.read_to_end(&mut answer);
        assert!(answer.len() < 512, "stranger {index} was told {} bytes", answer.len());
    }
    let (source, target) = (memory(&a, &[1; 64], None), memory(&b, &[0; 64], None));
    done(&a.submit(&peer, Op::Write, &whole(&source, target.handle()), How::default()).expect("room"));
    eventually("they are counted", || sample(&b, "pyengine_engine_refused_connections_total") >= 3);
    // Who knows the secret, but speaks out of turn, loses its session.
    let link = Link::new().expect("an eventfd");
    let stream = TcpStream::connect(address).expect("listens");
    let me = NodeAddress { node: "odd".into(), address: String::new(), incarnation: 1 };
    let session = Session::dial(KEY, Purpose::Engine { node: me }, nonce().expect("random"), now());
    let mut connection = Connection::new(Stream::Tcp(stream), session, link.clone()).expect("a socket");
    assert!(matches!(connection.handshake(), Ok(Event::Established(_))));
    link.send(vec![0xff; 100]).expect("room");
    connection.drive(|_, _| Ok(()));
}

#[test]
fn a_process_that_listens_itself_hands_connections_over() {
    let a = engine("a");
    let (listener, at) = Listener::tcp("127.0.0.1:0").expect("binds");
    let me = NodeAddress { node: "b".into(), address: at.to_string(), incarnation: 5 };
    let b = Arc::new(Endpoint::embed(Settings { key: Some(KEY), ..Settings::default() }, me.clone()).expect("starts"));
    let (threads, until) = (Arc::new(Threads::default()), Link::new().expect("an eventfd"));
    let (all, stop, to) = (threads.clone(), until.clone(), b.clone());
    let accept = move || {
        accept_all(&[listener], &stop, |stream| {
            let (to, me, link) = (to.clone(), me.clone(), Link::new().expect("an eventfd"));
            let within = link.clone();
            let serve = move || {
                let session = Session::accept(KEY, me, nonce().expect("random"), now());
                let mut connection = Connection::new(stream, session, within.clone()).expect("a socket");
                if let Ok(Event::Proven(purpose)) = connection.handshake() {
                    // Its end is no news here.
                    let _ = to.serve(connection, purpose, &within);
                }
            };
            all.spawn("connection", &link, serve).expect("not stopping");
        });
    };
    threads.spawn("accept", &until, accept).expect("starts");
    let peer = a.connect(&at.to_string(), Via::Auto, PATIENCE).expect("reachable");
    let (source, target) = (memory(&a, &[1; 64], None), memory(&b, &[0; 64], Some("it")));
    let found = peer.find("it", PATIENCE).expect("registered");
    done(&a.submit(&peer, Op::Write, &whole(&source, &found), how(b"hello")).expect("room"));
    assert_eq!((content(&b, &target), b.notifications(1).len()), (vec![1; 64], 1));
    b.close();
    until.close("over");
    threads.stop("over");
}

// -- nothing stays ---------------------------------------------------------------------------------------------------

fn count(folder: &str) -> usize {
    std::fs::read_dir(folder).expect("proc").count()
}

#[test]
fn connecting_again_and_again_leaves_nothing_behind() {
    let (a, b) = (engine("a"), engine("b"));
    let (source, target) = (memory(&a, &[1; 64], None), memory(&b, &[0; 64], None));
    let cycle = || {
        let peer = connect(&a, &b);
        done(&a.submit(&peer, Op::Write, &whole(&source, target.handle()), How::default()).expect("room"));
    };
    cycle();
    // Other tests of this program would be counted too, but each test is a process of its own under nextest.
    let things = || (count("/proc/self/fd"), count("/proc/self/task"));
    let before = (usize::MAX, usize::MAX);
    let mut least = before;
    let cycles = std::env::var("PYENGINE_CYCLES").ok().and_then(|text| text.parse().ok()).unwrap_or(200);
    (0..cycles).for_each(|_| cycle());
    if std::env::var_os("NEXTEST").is_some() {
        // Threads that have been told to end take a moment.
        eventually("it is as quiet as after few cycles", || {
            let now = things();
            least = (least.0.min(now.0), least.1.min(now.1));
            least.0 < 60 && least.1 < 30
        });
    }
    a.driver().check();
    assert_eq!(sample(&b, "pyengine_engine_regions"), 1);
}

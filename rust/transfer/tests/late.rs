//! Goal: nothing is written late. What was on a path that is lost is not applied any more once something else was written,
//! by whatever transport. Method: the test itself plays one side, so that it decides what lies where: half a frame that the
//! target waits for, or the answers that a target gives.

mod lanes;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, mpsc};

use pyengine_transfer::link::{Connection, Link, Stream, nonce, now};
use pyengine_transfer::memory::{Arena, checksum};
use pyengine_transfer::messages::Purpose;
use pyengine_transfer::mover::{Ended, Mover, Part, Request, Settings as MoverSettings, Via};
use pyengine_transfer::paths;
use pyengine_transfer::region::{Access, Buffer, By, Regions};
use pyengine_transfer::server::{Listener, Threads, accept_all};
use pyengine_transfer::session::{Event, Session};
use pyengine_transfer::transport::fence::{Fences, next_path};
use pyengine_transfer::transport::lanes::Settings;
use pyengine_transfer::transport::lanes::frames::{self, Entry, Flags, HEADER_BYTES, Header, Table};
use pyengine_transfer::transport::shm::{self, ShmTransport};
use pyengine_transfer::transport::{Completion, Copy, Kind, Op, Outcome, Transport, tcp};
use pyengine_transfer::types::{Layout, NodeAddress, RegionId, Span};

use lanes::{KEY, PATIENCE};

const BYTES: u32 = 4096;
const LAYOUT: Layout = Layout { strips: 1, strip_bytes: BYTES };

fn buffer(byte: u8) -> Arc<Buffer> {
    let buffer = Buffer::owned(BYTES as usize, Access { read: true, write: true });
    // SAFETY: its own memory, which nobody else knows yet.
    unsafe { buffer.pointer().as_ptr().write_bytes(byte, BYTES as usize) };
    Arc::new(buffer)
}

fn span(region: RegionId) -> Span {
    Span { region, life: 0, offset: 0 }
}

/// A process with all of its doors: both transports, one port.
struct Target {
    address: NodeAddress,
    regions: Arc<Regions>,
    threads: Arc<Threads>,
    accepting: Link,
    /// Serve the lanes.
    _transports: paths::Transports,
}

impl Target {
    fn new(node: &str) -> Self {
        let (listener, at) = Listener::tcp("127.0.0.1:0").expect("binds");
        let address = NodeAddress { node: node.into(), address: at.to_string(), incarnation: 1 };
        let kinds = [Kind::Shm, Kind::Tcp];
        let (mut transports, doors) =
            paths::open(&kinds, KEY, &address, &Settings::default(), || Box::new(|| {})).expect("opens");
        let regions = Regions::new();
        transports.iter_mut().for_each(|(_, transport)| transport.register(regions.clone()));
        let (threads, accepting) = (Arc::new(Threads::default()), Link::new().expect("an eventfd"));
        let (all, until, me) = (threads.clone(), accepting.clone(), address.clone());
        let accept = move || {
            accept_all(&[listener], &until, |stream| {
                let (doors, me, link) = (doors.clone(), me.clone(), Link::new().expect("an eventfd"));
                let within = link.clone();
                let serve = move || {
                    let session = Session::accept(KEY, me, nonce().expect("random"), now());
                    let mut connection = Connection::new(stream, session, within.clone()).expect("a socket");
                    if let Ok(Event::Proven(purpose)) = connection.handshake() {
                        // How a lane ends is its dialler's to see.
                        let _ = doors.serve(connection, purpose, &within);
                    }
                };
                all.spawn("lane", &link, serve).expect("not stopping");
            });
        };
        threads.spawn("accept", &accepting, accept).expect("starts");
        Self { address, regions, threads, accepting, _transports: transports }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.accepting.close("over");
        self.threads.stop("over");
    }
}

trait Wire: Read + Write {}

impl<T: Read + Write> Wire for T {}

fn raw(kind: Kind, to: &NodeAddress, path: u64) -> Box<dyn Wire> {
    match kind {
        Kind::Shm => Box::new(lanes::raw_shm_lane(to, path)),
        _ => Box::new(lanes::raw_lane(to, path)),
    }
}

/// A sender of the same life as `raw` lanes, and what tells that completions wait.
fn sender(kind: Kind, regions: Arc<Regions>, fences: Fences) -> (Box<dyn Transport>, mpsc::Receiver<()>) {
    let (notify, woken) = lanes::alarm();
    let mut transport: Box<dyn Transport> = match kind {
        Kind::Shm => {
            Box::new(ShmTransport::new(KEY, lanes::source(), Settings::default(), fences, notify).expect("starts"))
        }
        _ => Box::new(tcp::transport(KEY, lanes::source(), Settings::default(), fences, notify).expect("starts")),
    };
    transport.register(regions);
    (transport, woken)
}

fn run(transport: &mut dyn Transport, woken: &mpsc::Receiver<()>, peer: &NodeAddress, copy: Copy) -> Outcome {
    transport.submit(&peer.node, &[copy]).expect("room");
    let mut completions: Vec<Completion> = Vec::new();
    while completions.is_empty() {
        woken.recv_timeout(PATIENCE).expect("every copy completes");
        transport.poll(&mut completions);
    }
    completions[0].outcome
}

/// Half of a WRITE of fives, for which its target holds memory.
fn half_a_write(wire: &mut dyn Wire, at: Span) {
    let mut table = Vec::new();
    frames::put_entry(&mut table, &Entry { at, bytes: BYTES, grain: BYTES });
    frames::put_sums(&mut table, &[checksum(&[5; BYTES as usize])]);
    wire.write_all(&frames::encode(frames::Kind::Write, Flags::NONE, 1, 1, BYTES.into(), &table)).expect("it stands");
    wire.write_all(&[5; BYTES as usize / 2]).expect("it stands");
}

/// The other half comes too late: the target has ended the path, and said so before the next write.
fn the_other_half(mut wire: Box<dyn Wire>) {
    // What is sent to a closed socket may be refused or lost.
    let _ = wire.write_all(&[5; BYTES as usize / 2]);
    let mut rest = Vec::new();
    let end = wire.read_to_end(&mut rest);
    assert!(rest.is_empty(), "an answer on a path that was lost: {rest:?}");
    let silent = |error: &std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
    assert!(!end.as_ref().is_err_and(silent), "the lost path still stands");
}

/// A path that is lost in the midst of a write, then a newer write by every transport, over a path that stands already: it
/// is applied at once, also where the old one holds a slot of an arena, and the old one is not applied any more.
#[test]
fn a_newer_write_fences_a_lost_one_across_transports() {
    let kinds = [Kind::Tcp, Kind::Shm];
    for (index, (old, new)) in kinds.into_iter().flat_map(|old| kinds.map(|new| (old, new))).enumerate() {
        let name = format!("lost by {}, then by {}", old.name(), new.name());
        let target = Target::new(&format!("late-{index}-{}", std::process::id()));
        let arena = Arena::create(1 << 16, LAYOUT).expect("it fits");
        target.regions.set_arena(RegionId::ARENA, arena.clone());
        let here = Regions::new();
        let (sink, newer) = (buffer(0), here.add(buffer(7)));
        let (remote, slot) = (target.regions.add(sink), arena.issue(0));
        let in_arena = Span { region: RegionId::ARENA, life: slot.generation, offset: arena.offset_of(0, 0) };

        let fences = Fences::default();
        let (mut transport, woken) = sender(new, here, fences.clone());
        let write = |id, remote| Copy { id, op: Op::Write, local: span(newer), remote, bytes: BYTES, grain: BYTES };
        transport.connect(&target.address);
        assert_eq!(run(&mut *transport, &woken, &target.address, write(1, span(remote))), Outcome::Done, "{name}");
        for (id, at) in [(2, span(remote)), (3, in_arena)] {
            let path = next_path();
            let mut wire = raw(old, &target.address, path);
            half_a_write(&mut *wire, at);
            while id == 3 && arena.quiet(0) {
                std::thread::yield_now();
            }
            fences.trail(&target.address).lost(path);
            assert_eq!(run(&mut *transport, &woken, &target.address, write(id, at)), Outcome::Done, "{name}");
            the_other_half(wire);
        }
        assert!(arena.arrived_all(slot), "{name}");
        let held = target.regions.begin_read(span(remote), BYTES.into(), By::Owner).expect("registered");
        assert!(held.bytes().iter().all(|byte| *byte == 7), "{name}: an older write came late");
    }
}

/// Another node's paths have their own numbers, and a path that there is not is no obstacle; a lane that names itself ends.
#[test]
fn a_fence_ends_what_it_names_and_nothing_else() {
    let target = Target::new(&format!("late-fences-{}", std::process::id()));
    let fence = |wire: &mut dyn Wire, sequence, paths: &[u64]| {
        let table = frames::fence_table(paths);
        let frame = frames::encode(frames::Kind::Fence, Flags::NONE, paths.len(), sequence, 0, &table);
        wire.write_all(&frame).expect("it stands");
    };
    let (one, two) = (next_path(), next_path());
    let (mut first, mut second) = (raw(Kind::Tcp, &target.address, one), raw(Kind::Shm, &target.address, two));
    fence(&mut *first, 1, &[u64::MAX, 0]);
    assert!(matches!(frame(&mut *first), (_, Table::Ack { outcomes }, _) if outcomes.is_empty()));
    fence(&mut *first, 2, &[two, two]);
    assert!(matches!(frame(&mut *first), (header, Table::Ack { .. }, _) if header.sequence == 2));
    assert_eq!(second.read(&mut [0]).expect("it was ended"), 0);
    fence(&mut *first, 3, &[one]);
    assert!(matches!(first.read(&mut [0]), Ok(0) | Err(_)), "an answer by a path that has ended");
    // The same number may not come twice while it stands.
    let three = next_path();
    let third = raw(Kind::Shm, &target.address, three);
    let again = TcpStream::connect(&target.address.address).expect("listening");
    assert!(!lanes::prove(Stream::Tcp(again), three), "two paths with one number");
    drop(third);
}

/// A frame, its table and its body.
fn frame(wire: &mut dyn Wire) -> (Header, Table, Vec<u8>) {
    let mut head = [0; HEADER_BYTES];
    wire.read_exact(&mut head).expect("a frame");
    let header = frames::parse_header(&head).expect("a header");
    let (mut table, mut body) = (vec![0; header.table as usize], vec![0; header.body as usize]);
    wire.read_exact(&mut table).expect("a table");
    wire.read_exact(&mut body).expect("a body");
    (header, frames::parse_table(&header, &table).expect("a table"), body)
}

/// Accepts a lane as `me`, and tells its number.
fn accept(stream: Stream, me: &NodeAddress) -> u64 {
    let session = Session::accept(KEY, me.clone(), nonce().expect("random"), now());
    let mut connection = Connection::new(stream, session, Link::new().expect("an eventfd")).expect("a socket");
    let Ok(Event::Proven(Purpose::Lane { path, .. })) = connection.handshake() else { panic!("no lane") };
    connection.welcome();
    drop(connection.into_lane().expect("fresh"));
    path
}

/// A write that was lost by shm goes on by tcp: there the first word is a FENCE that names the lost path, and nothing is
/// written before its answer.
#[test]
fn a_fall_back_tells_of_the_path_that_was_lost() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
    let node = format!("late-scripted-{}", std::process::id());
    let address = listener.local_addr().expect("bound").to_string();
    let peer = NodeAddress { node, address, incarnation: 1 };
    let (me, on_host) = (peer.clone(), shm::listen(&peer).expect("a fresh name"));
    let script = std::thread::spawn(move || {
        let (stream, _) = on_host.accept().expect("dialled");
        drop(on_host);
        let mut wire: UnixStream = stream.try_clone().expect("clones");
        let lost = accept(Stream::Unix(stream), &me);
        wire.set_nonblocking(false).expect("a socket");
        while frame(&mut wire).0.kind != frames::Kind::Write {}
        drop(wire);

        let (stream, _) = listener.accept().expect("dialled");
        let mut wire = stream.try_clone().expect("clones");
        assert_ne!(accept(Stream::Tcp(stream), &me), lost);
        wire.set_nonblocking(false).expect("a socket");
        let (header, table, _) = frame(&mut wire);
        assert_eq!(table, Table::Fence { paths: vec![lost] });
        // Whoever waits for the answer is silent.
        wire.set_nonblocking(true).expect("a socket");
        assert!(wire.peek(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock));
        wire.set_nonblocking(false).expect("a socket");
        let answer = |header: Header| frames::encode(frames::Kind::Ack, Flags::NONE, 1, header.sequence, 0, &[]);
        wire.write_all(&answer(header)).expect("it stands");
        let (header, table, body) = frame(&mut wire);
        assert!(matches!(table, Table::Write { .. }) && body == [7; BYTES as usize]);
        wire.write_all(&answer(header)).expect("it stands");
        wire
    });
    let (tell, told) = mpsc::channel::<()>();
    let notify = || -> paths::Notify {
        let tell = tell.clone();
        Box::new(move || {
            // Nobody listens any more when the test is over.
            let _ = tell.send(());
        })
    };
    let kinds = [Kind::Shm, Kind::Tcp];
    let settings = Settings { lanes_per_peer: 1, ..Settings::default() };
    let (transports, _doors) = paths::open(&kinds, KEY, &lanes::source(), &settings, notify).expect("opens");
    let regions = Regions::new();
    let local = regions.add(buffer(7));
    let mut mover = Mover::new(transports, MoverSettings::default());
    mover.register(regions);
    mover.connect(&peer, Via::Auto, now());
    let part = Part { local: span(local), remote: span(RegionId(1)), bytes: BYTES.into(), grain: 0 };
    mover.submit(&peer.node, Request::new(Op::Write, [part].into()), now()).expect("room");
    let ended = loop {
        if let Some((_, ended)) = mover.poll(now()).pop() {
            break ended;
        }
        let tick = mover.next_tick().map_or(PATIENCE, |at| std::time::Duration::from_nanos(at.saturating_sub(now())));
        let _ = told.recv_timeout(tick.min(PATIENCE));
    };
    assert_eq!(ended, Ended::Done { via: Kind::Tcp, fallback: true, retries: 1 });
    drop(script.join().expect("as expected"));
}

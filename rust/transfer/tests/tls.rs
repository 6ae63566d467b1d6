//! TLS 1.3 between engines.
//!
//! Goal: with TLS nobody on the way reads or changes anything, whoever ends TLS in the middle gets no session, and a
//! process with TLS and one without tell their users so. Method: engines in this process over loopback, with relays in
//! between that write down what passes, or that speak TLS to both sides with the engine's own code.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pyengine_transfer::config::Config;
use pyengine_transfer::daemon::Daemon;
use pyengine_transfer::endpoint::{Copies, Endpoint, How, Registration, Settings};
use pyengine_transfer::error::{Error, ErrorKind};
use pyengine_transfer::link::{Connection, Link, Stream, nonce, now};
use pyengine_transfer::messages::Purpose;
use pyengine_transfer::mover::{Ended as Finished, Via};
use pyengine_transfer::region::{Access, By};
use pyengine_transfer::report::{EndpointEvent, ReportEndpoint};
use pyengine_transfer::session::{Ended, Event, Session};
use pyengine_transfer::tls::{Shaken, Side, Tls};
use pyengine_transfer::transport::fence::Fences;
use pyengine_transfer::transport::lanes::Settings as LaneSettings;
use pyengine_transfer::transport::{Kind, Op, Path, Transport, tcp};
use pyengine_transfer::types::{NodeAddress, Span};
use pyengine_transfer::wire::WireError;

const KEY: [u8; 32] = [7; 32];
/// What takes longer never comes.
const PATIENCE: Duration = Duration::from_secs(60);
const ALL: Access = Access { read: true, write: true };

fn settings(node: &str, tls: bool) -> Settings {
    let listen = Some("127.0.0.1:0".into());
    Settings { node: Some(node.into()), key: Some(KEY), listen, tls, ..Settings::default() }
}

fn engine(node: &str, tls: bool) -> Endpoint {
    Endpoint::start(settings(node, tls)).expect("starts")
}

fn span(region: &Registration) -> Span {
    Span { region: region.region(), life: 0, offset: 0 }
}

fn memory(of: &Endpoint, content: &[u8]) -> Registration {
    let region = of.allocate(content.len(), ALL, None).expect("registers");
    let mut writing = of.regions().begin_write(span(&region), content.len() as u64, By::Owner).expect("registered");
    writing.bytes_mut().copy_from_slice(content);
    drop(writing);
    region
}

fn content(of: &Endpoint, region: &Registration) -> Vec<u8> {
    of.regions().begin_read(span(region), region.bytes(), By::Owner).expect("registered").bytes().to_vec()
}

/// Moves the whole of a region of `a` to or from one of `b`, which is reached at `address`.
fn moves(a: &Endpoint, address: &str, op: Op, here: &Registration, there: &Registration, notify: &[u8]) {
    let peer = a.connect(address, Via::Only(Kind::Tcp), PATIENCE).expect("reachable");
    let mut copies = Copies::build();
    copies.add(here, 0, there.handle(), 0, here.bytes()).expect("fits");
    let how = How { notify: Some(notify.to_vec()), ..How::default() };
    let transfer = a.submit(&peer, op, &copies.finish(), how).expect("room");
    assert!(transfer.wait(PATIENCE), "{:?}", transfer.progress());
    let ended = transfer.outcome().expect("it has ended");
    assert!(matches!(ended, Finished::Done { via: Kind::Tcp, .. }), "{ended:?}");
}

fn refusal(from: &Endpoint, address: &str) -> Error {
    from.connect(address, Via::Only(Kind::Tcp), PATIENCE).map(|_| ()).expect_err("no session")
}

/// Listens before an address, and does `between` with both ends of each connection.
fn relay(to: &str, between: impl Fn(TcpStream, TcpStream) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
    let (address, to, between) = (listener.local_addr().expect("bound").to_string(), to.to_owned(), Arc::new(between));
    std::thread::spawn(move || {
        for dialler in listener.incoming().map_while(Result::ok) {
            let Ok(acceptor) = TcpStream::connect(&to) else { continue };
            let between = between.clone();
            std::thread::spawn(move || between(dialler, acceptor));
        }
    });
    address
}

/// A relay that writes down all that passes.
fn listener(to: &str) -> (String, Arc<Mutex<Vec<u8>>>) {
    let seen = Arc::<Mutex<Vec<u8>>>::default();
    let all = seen.clone();
    let address = relay(to, move |dialler, acceptor| {
        let twice = |stream: &TcpStream| stream.try_clone().expect("clones");
        for (mut from, mut to) in [(twice(&dialler), twice(&acceptor)), (acceptor, dialler)] {
            let seen = all.clone();
            std::thread::spawn(move || {
                let mut buffer = [0; 65536];
                while let Ok(bytes @ 1..) = from.read(&mut buffer) {
                    seen.lock().expect("whole").extend(&buffer[..bytes]);
                    let _ = to.write_all(&buffer[..bytes]);
                }
                let _ = to.shutdown(Shutdown::Write);
            });
        }
    });
    (address, seen)
}

/// One end of a TLS connection, driven by a thread that has nothing else to do.
struct End(TcpStream, Tls);

impl End {
    fn new(stream: TcpStream, side: Side) -> Option<Self> {
        stream.set_nonblocking(true).expect("a socket");
        let mut end = Self(stream, Tls::new(side).expect("a key"));
        loop {
            match end.1.shake(end.0.as_fd()).ok()? {
                Shaken::Done => return Some(end),
                Shaken::Waits(wants) => end.wait(wants),
            }
        }
    }

    fn wait(&self, wants: PollFlags) {
        poll(&mut [PollFd::new(self.0.as_fd(), wants)], PollTimeout::NONE).expect("a socket");
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Option<usize> {
        self.1.receive(self.0.as_fd(), &mut [IoSliceMut::new(buffer)]).unwrap_or(Some(0))
    }

    fn send(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match self.1.send(self.0.as_fd(), &[IoSlice::new(bytes)]) {
                Ok(Some(sent)) => bytes = &bytes[sent..],
                Ok(None) => self.wait(PollFlags::POLLOUT),
                Err(_) => return,
            }
        }
    }
}

/// A man in the middle: speaks TLS with both sides, and passes on what each says to the other. Tells how much.
fn man_in_the_middle(to: &str) -> (String, mpsc::Receiver<usize>) {
    let (tell, told) = mpsc::channel();
    let address = relay(to, move |dialler, acceptor| {
        let Some(mut near) = End::new(dialler, Side::Acceptor) else { return };
        let Some(mut far) = End::new(acceptor, Side::Dialler) else { return };
        let mut buffer = vec![0; 65536];
        loop {
            let mut moved = false;
            for back in [false, true] {
                let (from, to) = if back { (&mut far, &mut near) } else { (&mut near, &mut far) };
                match from.receive(&mut buffer) {
                    Some(0) => return,
                    Some(bytes) => {
                        to.send(&buffer[..bytes]);
                        // Nobody listens any more when the test is over.
                        let _ = tell.send(bytes);
                        moved = true;
                    }
                    None => {}
                }
            }
            if !moved {
                let mut both =
                    [PollFd::new(near.0.as_fd(), PollFlags::POLLIN), PollFd::new(far.0.as_fd(), PollFlags::POLLIN)];
                poll(&mut both, PollTimeout::NONE).expect("sockets");
            }
        }
    });
    (address, told)
}

/// Bytes that appear nowhere by chance.
fn marked(bytes: usize) -> Vec<u8> {
    b"seen by whoever looks ".iter().copied().cycle().take(bytes).collect()
}

fn finds(seen: &Mutex<Vec<u8>>, marker: &[u8]) -> bool {
    seen.lock().expect("whole").windows(marker.len()).any(|window| window == marker)
}

#[test]
fn nothing_passes_in_clear() {
    for tls in [false, true] {
        let (a, b) = (engine("a", tls), engine("b", tls));
        let (address, seen) = listener(&b.address().address);
        let bytes = marked(3_000_000);
        let (source, target) = (memory(&a, &bytes), memory(&b, &vec![0; bytes.len()]));
        moves(&a, &address, Op::Write, &source, &target, b"a secret notification");
        assert!(content(&b, &target) == bytes, "other bytes arrived");
        assert!(b.wait_notification(PATIENCE));
        // Read back, so that both ways are looked at.
        let back = memory(&a, &vec![0; bytes.len()]);
        moves(&a, &address, Op::Read, &back, &target, b"");
        assert!(content(&a, &back) == bytes, "other bytes came back");
        for marker in [&bytes[..22], b"a secret notification", b"pyEN"] {
            assert_eq!(finds(&seen, marker), !tls, "{:?} with tls = {tls}", String::from_utf8_lossy(marker));
        }
    }
}

#[test]
fn large_transfers_arrive_whole() {
    let (a, b) = (engine("a", true), engine("b", true));
    let bytes: Vec<u8> = (0..64u64 << 17).flat_map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15)).to_le_bytes()).collect();
    let (source, target) = (memory(&a, &bytes), memory(&b, &vec![0; bytes.len()]));
    moves(&a, &b.address().address, Op::Write, &source, &target, b"");
    assert!(content(&b, &target) == bytes, "other bytes arrived");
    let back = memory(&a, &vec![0; bytes.len()]);
    moves(&a, &b.address().address, Op::Read, &back, &target, b"");
    assert!(content(&a, &back) == bytes, "other bytes came back");
}

#[test]
fn small_copies_wait_for_nothing_that_does_not_come() {
    let (a, b) = (engine("a", true), engine("b", true));
    let (source, target) = (memory(&a, &[3; 4096]), memory(&b, &[0; 4096]));
    // Each is waited for by the thread that submits, which takes the answer off the socket itself.
    for _ in 0..500 {
        moves(&a, &b.address().address, Op::Write, &source, &target, b"");
    }
    assert_eq!(content(&b, &target), [3; 4096]);
}

#[test]
fn another_secret_is_refused() {
    let a = engine("a", true);
    let b = Endpoint::start(Settings { key: Some([8; 32]), ..settings("b", true) }).expect("starts");
    let error = refusal(&a, &b.address().address);
    assert!(error.kind == ErrorKind::GiveUp && error.message.contains("secret"), "{error}");
}

#[test]
fn a_man_in_the_middle_gets_no_session() {
    // He is a good one: what is not bound to the channel he passes on.
    let echo = TcpListener::bind("127.0.0.1:0").expect("binds");
    let (address, told) = man_in_the_middle(&echo.local_addr().expect("bound").to_string());
    let answering = std::thread::spawn(move || {
        let mut end = End::new(echo.accept().expect("dialled").0, Side::Acceptor).expect("TLS");
        let mut buffer = [0; 5];
        // The first bytes may have come with the end of the handshake: to wait before looking would be for ever.
        while end.receive(&mut buffer).is_none() {
            end.wait(PollFlags::POLLIN);
        }
        end.send(&buffer);
        (end.1.exporter().expect("it stands"), end)
    });
    let mut end = End::new(TcpStream::connect(address).expect("listens"), Side::Dialler).expect("TLS");
    end.send(b"hello");
    let mut buffer = [0; 5];
    while end.receive(&mut buffer).is_none() {
        end.wait(PollFlags::POLLIN);
    }
    assert_eq!(&buffer, b"hello");
    assert_eq!(told.iter().take(2).sum::<usize>(), 10);
    let (there, _end) = answering.join().expect("no panic");
    assert_ne!(end.1.exporter().expect("it stands"), there, "two channels");

    let (a, b) = (engine("a", true), engine("b", true));
    let (address, told) = man_in_the_middle(&b.address().address);
    let error = refusal(&a, &address);
    assert!(error.kind == ErrorKind::GiveUp && error.message.contains("secret"), "{error}");
    assert!(told.recv_timeout(PATIENCE).is_ok(), "he passed nothing on");
    a.connect(&b.address().address, Via::Only(Kind::Tcp), PATIENCE).expect("without him it stands");
}

/// How the handshake between a dialler and an acceptor ends on both sides.
fn handshake(dials: bool, accepts: bool) -> [Result<Event, Ended>; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
    let near = TcpStream::connect(listener.local_addr().expect("bound")).expect("listens");
    let far = listener.accept().expect("dialled").0;
    let me = NodeAddress { node: "a".into(), address: String::new(), incarnation: 1 };
    let there = NodeAddress { node: "b".into(), ..me.clone() };
    let session = Session::accept(KEY, there, nonce().expect("random"), now());
    let accepting = std::thread::spawn(move || shake(far, accepts, Side::Acceptor, session));
    let session = Session::dial(KEY, Purpose::Engine { node: me }, nonce().expect("random"), now());
    let here = shake(near, dials, Side::Dialler, session);
    [here, accepting.join().expect("no panic")]
}

fn shake(stream: TcpStream, tls: bool, side: Side, session: Session) -> Result<Event, Ended> {
    let stream = Stream::Tcp(stream).secured(tls, side).expect("a key");
    let mut connection = Connection::new(stream, session, Link::new().expect("an eventfd"))?;
    let event = connection.handshake()?;
    if side == Side::Acceptor {
        connection.welcome();
        // Until the dialler has heard it and leaves.
        connection.drive(|_, _| Ok(()));
    }
    Ok(event)
}

#[test]
fn sides_that_differ_are_told_so() {
    for tls in [false, true] {
        let [here, there] = handshake(tls, tls);
        assert!(
            matches!(here, Ok(Event::Established(_))) && matches!(there, Ok(Event::Proven(_))),
            "{here:?} {there:?}"
        );
    }
    let [here, there] = handshake(true, false);
    assert_eq!((here, there), (Err(Ended::Wire(WireError::Clear)), Err(Ended::Wire(WireError::Tls))));
    let [here, there] = handshake(false, true);
    assert_eq!(there, Err(Ended::Wire(WireError::Clear)));
    assert!(matches!(here, Err(Ended::Refused(reason)) if reason == WireError::Tls.to_string()));

    // As users see it.
    for tls in [false, true] {
        let (a, b) = (engine("a", tls), engine("b", !tls));
        let error = refusal(&a, &b.address().address);
        assert!(error.kind == ErrorKind::GiveUp && error.message.contains("start both with --tls"), "{error}");
    }
}

#[test]
fn strangers_get_nothing_and_end_in_time() {
    let b = engine("b", true);
    let mut strangers = Vec::new();
    let hello = [22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3];
    let noise = [0xa5; 5000];
    let beginnings: [&[u8]; 8] = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"pyEN",
        &noise,
        &hello,
        &hello[..1],
        b"",
        &[22, 3, 1, 0xff, 0xff],
        &[23, 3, 3, 0, 1, 0],
    ];
    for bytes in beginnings {
        let mut stranger = TcpStream::connect(&b.address().address).expect("a port is a port");
        stranger.write_all(bytes).expect("sent");
        strangers.push(stranger);
    }
    // Each ends, also those that say no more: the handshake has its time, and TLS is part of it.
    for (index, mut stranger) in strangers.into_iter().enumerate() {
        stranger.set_read_timeout(Some(PATIENCE)).expect("a time");
        let mut answer = Vec::new();
        if let Err(error) = stranger.read_to_end(&mut answer) {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "stranger {index}");
        }
        assert!(answer.len() < 512, "stranger {index} was told {} bytes", answer.len());
    }
    let a = engine("a", true);
    a.connect(&b.address().address, Via::Only(Kind::Tcp), PATIENCE).expect("nobody is harmed");
}

#[test]
fn a_lane_to_a_silent_acceptor_is_given_up() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("binds");
    let address = silent.local_addr().expect("bound").to_string();
    let me = NodeAddress { node: "a".into(), address: String::new(), incarnation: 1 };
    let (wake, woken) = mpsc::channel();
    let wake = Mutex::new(wake);
    let notify = Box::new(move || {
        // Nobody listens any more when the test is over.
        let _ = wake.lock().expect("whole").send(());
    });
    let lanes = LaneSettings { tls: true, ..LaneSettings::default() };
    let mut transport = tcp::transport(KEY, me, lanes, Fences::default(), notify).expect("starts");
    let peer = NodeAddress { node: "b".into(), address, incarnation: 1 };
    transport.connect(&peer);
    woken.recv_timeout(PATIENCE).expect("it ends");
    let path = transport.path(&peer.node);
    assert!(matches!(&path, Path::Down(reason) if reason.contains("no handshake")), "{path:?}");
}

#[cfg(feature = "rdma")]
#[test]
fn rdma_is_barred_and_says_so() {
    let rdma = Settings { transports: vec![Kind::Rdma], ..settings("x", true) };
    let error = Endpoint::start(rdma).map(|_| ()).expect_err("not encrypted");
    assert!(error.kind == ErrorKind::GiveUp && error.message.contains("not encrypted"), "{error}");
    let (a, b) = (engine("a", true), engine("b", true));
    let error =
        a.connect(&b.address().address, Via::Only(Kind::Rdma), PATIENCE).map(|_| ()).expect_err("not encrypted");
    assert!(error.kind == ErrorKind::GiveUp && error.message.contains("not encrypted"), "{error}");
    let peer = a.connect(&b.address().address, Via::Auto, PATIENCE).expect("reachable");
    let paths = peer.paths();
    let rdma = paths.iter().find(|report| report.kind == Kind::Rdma).expect("listed");
    assert!(matches!(&rdma.path, Path::Down(reason) if reason.contains("TLS is on")), "{paths:?}");
    assert!(paths.iter().any(|report| report.kind == Kind::Shm && report.path == Path::Up), "{paths:?}");
}

#[test]
fn daemons_report_over_tls_to_a_conductor_that_wants_it() {
    let config = |node: &str, conductor: &ReportEndpoint, tls| Config {
        listen: Some("127.0.0.1:0".into()),
        transport: Via::Only(Kind::Tcp),
        conductor: Some(conductor.address().to_string()),
        session_key: Some(KEY),
        tls,
        ..Config::new(node, 1 << 20)
    };
    let conductor = ReportEndpoint::new("127.0.0.1:0", Some(KEY), true, 1).expect("listens");
    let clear = Daemon::start(&config("clear", &conductor, false)).expect("starts");
    let secured = Daemon::start(&config("secured", &conductor, true)).expect("starts");
    let mut wait = [PollFd::new(conductor.descriptor(), PollFlags::POLLIN)];
    assert_eq!(poll(&mut wait, PollTimeout::from(60_000u16)), Ok(1), "nobody reports");
    let events = conductor.events();
    let from: Vec<&str> = events
        .iter()
        .map(|event| match event {
            EndpointEvent::Report(node, _) | EndpointEvent::Changed(node, ..) | EndpointEvent::Gone(node) => {
                node.node.as_str()
            }
            EndpointEvent::Dumped { node, .. } => node.node.as_str(),
        })
        .collect();
    assert!(from.iter().all(|node| *node == "secured") && !from.is_empty(), "{events:?}");
    drop((clear, secured));
}

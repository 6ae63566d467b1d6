//! Goal: whole daemons over real sockets keep the promises: bytes arrive exact, strangers stay out, deaths release
//! everything, late writes are fenced, damage on the wire is found. Method: two daemons in this process over loopback
//! TCP, clients over a unix socket and in process, a proxy in the middle that cuts and damages. Every wait is for an
//! event, with a generous limit that only a failure reaches.

mod lanes;
mod proxy;
mod scratch;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use index::CHANGE_BYTES;
use pyengine_transfer::client::{ClientEvent, PoolClient};
use pyengine_transfer::config::Config;
use pyengine_transfer::daemon::Daemon;
use pyengine_transfer::error::ErrorKind;
use pyengine_transfer::memory::{Arena, Runs};
use pyengine_transfer::messages::{
    DaemonOrder, DaemonReport, GrantMode, GrantedSlot, LocalEvent, LocalRequest, Purpose, Refusal,
};
use pyengine_transfer::mover::Via;
use pyengine_transfer::report::{EndpointEvent, ReportEndpoint};
use pyengine_transfer::session::Session;
use pyengine_transfer::transport::lanes::LaneTransport;
use pyengine_transfer::transport::{Completion, Copy, Outcome, Transport};
use pyengine_transfer::types::{BlockKey, Kind, Layout, Medium, NodeAddress, RegionId, SlotRef, Tag};
use pyengine_transfer::wire;

use lanes::{KEY, PATIENCE};
use proxy::Proxy;
use scratch::Scratch;

const LAYOUT: Layout = Layout { strips: 6, strip_bytes: 512 };
const HEAD: BlockKey = BlockKey([0; 16]);

fn config(node: &str) -> Config {
    Config {
        listen: Some("127.0.0.1:0".into()),
        transport: Via::Only(Kind::Tcp),
        session_key: Some(KEY),
        ..Config::new(node, 256 << 10)
    }
}

fn daemon(node: &str) -> Daemon {
    Daemon::start(&config(node)).expect("a daemon starts")
}

fn attach(daemon: &Daemon, incarnation: u64) -> PoolClient {
    daemon.attach(incarnation, LAYOUT, 0).expect("a client attaches")
}

fn key(number: u8) -> BlockKey {
    BlockKey([number; 16])
}

fn tag(request: u64, worker: u64) -> Tag {
    Tag { request, attempt: 0, worker }
}

/// Bytes that belong to one block and no other.
fn content(seed: u64) -> Vec<u8> {
    (0..LAYOUT.block_bytes() as u64).map(|i| ((seed + 1) * 0x9E37_79B9 + i * 31 + (i >> 8)) as u8).collect()
}

/// Waits for the first event that `pick` accepts.
fn expect<R>(client: &PoolClient, what: &str, mut pick: impl FnMut(&LocalEvent) -> Option<R>) -> R {
    let until = Instant::now() + PATIENCE;
    let mut seen = Vec::new();
    let mut found = None;
    while found.is_none() {
        assert!(Instant::now() < until, "no {what}; seen: {seen:?}");
        client.wait(Duration::from_millis(200));
        for event in client.events() {
            match event {
                ClientEvent::Event(event) => {
                    if found.is_none() {
                        found = pick(&event);
                    }
                    seen.push(event);
                }
                other => panic!("{other:?} while waiting for {what}; seen: {seen:?}"),
            }
        }
    }
    found.expect("the loop ends with it")
}

fn grant(client: &PoolClient, tag: Tag, keys: &[BlockKey], private: u8) -> Vec<GrantedSlot> {
    let keys = keys.to_vec();
    let request =
        LocalRequest::Grant { tag, keys, private, parent: HEAD, position: 0, mode: GrantMode::Wait, tenant: 0 };
    client.request(request).expect("sent");
    expect(client, "Granted", |event| match event {
        LocalEvent::Granted { tag: of, slots } if *of == tag => Some(slots.clone()),
        _ => None,
    })
}

fn open(client: &PoolClient, tag: Tag, to: &Daemon) -> Result<(), Refusal> {
    let to = to.address().clone();
    client.request(LocalRequest::Open { tag, to, within_ms: 30_000 }).expect("sent");
    expect(client, "Opened", |event| match event {
        LocalEvent::Opened { tag: of, .. } if *of == tag => Some(Ok(())),
        LocalEvent::Refused { tag: of, refusal } if *of == tag => Some(Err(*refusal)),
        _ => None,
    })
}

/// Grants, writes and commits blocks in one's own pool; block i holds `content(i)`.
fn fill(client: &PoolClient, tag: Tag, keys: &[BlockKey], private: u8) {
    let slots = grant(client, tag, keys, private);
    for (seed, granted) in slots.iter().enumerate() {
        client.store(granted.slot, Runs::from(0), &content(seed as u64)).expect("in range");
    }
    let indices = (0..slots.len() as u32).collect();
    client.request(LocalRequest::Commit { tag, indices }).expect("sent");
}

fn push(client: &PoolClient, local: Tag, tag: Tag, blocks: u32, note: &[u8]) -> Result<(), Refusal> {
    let request = LocalRequest::Push {
        local,
        tag,
        indices: (0..blocks).collect(),
        first: 0,
        strips: None,
        note: Some(note.to_vec()),
    };
    client.request(request).expect("sent");
    expect(client, "Pushed", |event| match event {
        LocalEvent::Pushed { tag: of, note: true, .. } if *of == tag => Some(Ok(())),
        LocalEvent::Refused { tag: of, refusal } if *of == tag => Some(Err(*refusal)),
        _ => None,
    })
}

fn assert_holds(client: &PoolClient, slots: &[GrantedSlot]) {
    for (seed, granted) in slots.iter().enumerate() {
        let mut bytes = vec![0; LAYOUT.block_bytes()];
        assert!(client.load(granted.slot, Runs::from(0), &mut bytes).expect("in range"), "block {seed} is intact");
        assert_eq!(bytes, content(seed as u64), "block {seed}");
    }
}

/// The sum of all counters whose name has all of these parts.
fn counter(daemon: &Daemon, parts: &[&str]) -> u64 {
    let counters = daemon.counters().expect("the daemon runs");
    counters.iter().filter(|(name, _)| parts.iter().all(|part| name.contains(part))).map(|(_, value)| value).sum()
}

/// Waits until nothing but cached blocks is held.
fn assert_comes_to_rest(daemon: &Daemon) {
    let until = Instant::now() + PATIENCE;
    loop {
        let busy: u64 = ["pinned", "reserved", "quarantine"]
            .iter()
            .map(|state| counter(daemon, &["pyengine_pool_blocks", &format!("state=\"{state}\"")]))
            .sum::<u64>()
            + counter(daemon, &["pyengine_pool_grants"]);
        if busy == 0 {
            return;
        }
        assert!(Instant::now() < until, "something is held: {:?}", daemon.counters());
        std::thread::yield_now();
    }
}

#[test]
fn a_push_over_tcp_is_exact_and_leaves_nothing_behind() {
    a_push_is_exact_and_leaves_nothing_behind(Via::Only(Kind::Tcp), "tcp");
}

#[test]
fn a_push_over_shm_is_exact_and_leaves_nothing_behind() {
    a_push_is_exact_and_leaves_nothing_behind(Via::Only(Kind::Shm), "shm");
}

#[test]
fn daemons_of_one_host_choose_shm() {
    a_push_is_exact_and_leaves_nothing_behind(Via::Auto, "shm");
}

fn a_push_is_exact_and_leaves_nothing_behind(transport: Via, name: &str) {
    let start = |node| Daemon::start(&Config { transport, ..config(node) }).expect("a daemon starts");
    let (a, b) = (start("a"), start("b"));
    let (prefill, decode) = (attach(&a, 1), attach(&b, 2));
    let (there, here) = (tag(1, 2), tag(1, 1));
    let keys: Vec<BlockKey> = (1..=10).map(key).collect();

    // The open waits for a grant that is still to come.
    prefill.request(LocalRequest::Open { tag: there, to: b.address().clone(), within_ms: 30_000 }).expect("sent");
    fill(&prefill, here, &keys, 1);
    let slots = grant(&decode, there, &keys, 1);
    expect(&prefill, "Opened", |event| matches!(event, LocalEvent::Opened { tag, .. } if *tag == there).then_some(()));
    push(&prefill, here, there, 11, b"first token").expect("pushed");
    let note = expect(&decode, "Complete", |event| match event {
        LocalEvent::Complete { tag, note } if *tag == there => Some(note.clone()),
        _ => None,
    });
    assert_eq!(note, b"first token");
    assert_holds(&decode, &slots);
    let bytes = 11 * LAYOUT.block_bytes() as u64;
    assert_eq!(counter(&a, &["transfer_bytes_total", name, "\"out\""]), bytes);
    assert_eq!(counter(&b, &["transfer_bytes_total", name, "\"in\""]), bytes);

    prefill.request(LocalRequest::End { tag: here }).expect("sent");
    prefill.request(LocalRequest::End { tag: there }).expect("sent");
    decode.request(LocalRequest::End { tag: there }).expect("sent");
    assert_comes_to_rest(&a);
    assert_comes_to_rest(&b);
    assert_eq!(counter(&b, &["pool_blocks", "cached"]), 10, "full blocks stay, the private one does not");
}

#[test]
fn two_nodes_push_to_each_other_at_once() {
    let (a, b) = (daemon("a"), daemon("b"));
    let (on_a, on_b) = (attach(&a, 1), attach(&b, 2));
    let (to_a, to_b) = (tag(1, 1), tag(2, 2));
    let keys: Vec<BlockKey> = (1..=5).map(key).collect();
    fill(&on_a, tag(3, 1), &keys, 0);
    fill(&on_b, tag(4, 2), &keys, 0);
    // Both pools hold the keys, so the grants pin them: nothing need be sent, but both daemons dial.
    grant(&on_a, to_a, &keys, 1);
    grant(&on_b, to_b, &keys, 1);
    for (client, tag, to) in [(&on_a, to_b, &b), (&on_b, to_a, &a)] {
        client.request(LocalRequest::Open { tag, to: to.address().clone(), within_ms: 30_000 }).expect("sent");
    }
    for (client, tag) in [(&on_a, to_b), (&on_b, to_a)] {
        expect(client, "Opened", |event| match event {
            LocalEvent::Opened { tag: of, committed, .. } if *of == tag => {
                assert_eq!(*committed, [true, true, true, true, true, false]);
                Some(())
            }
            _ => None,
        });
    }
    fill(&on_a, tag(5, 1), &[], 1);
    let request = LocalRequest::Push {
        local: tag(5, 1),
        tag: to_b,
        indices: vec![5],
        first: 5,
        strips: None,
        note: Some(b"n".to_vec()),
    };
    on_a.request(request).expect("sent");
    expect(&on_b, "Complete", |event| matches!(event, LocalEvent::Complete { tag, .. } if *tag == to_b).then_some(()));
}

#[test]
fn fetch_and_replicate_bring_blocks_from_a_peer() {
    let endpoint = ReportEndpoint::new("127.0.0.1:0", Some(KEY), false, 1).expect("binds");
    let a = daemon("a");
    let reporting = Config { conductor: Some(endpoint.address().to_string()), ..config("b") };
    let b = Daemon::start(&reporting).expect("starts");
    // What happens before the conductor is reached it learns from a dump only.
    let mut log = Log::default();
    log.until(&endpoint, "Hello", |event| matches!(event, EndpointEvent::Report(_, DaemonReport::Hello { .. })));
    let (holder, asker) = (attach(&a, 1), attach(&b, 2));
    let keys: Vec<BlockKey> = (1..=4).map(key).collect();
    fill(&holder, tag(1, 1), &keys, 0);

    let wanted = tag(2, 2);
    let slots = grant(&asker, wanted, &keys[..2], 0);
    let from = a.address().clone();
    asker.request(LocalRequest::Fetch { tag: wanted, indices: vec![0, 1], from: vec![from.clone()] }).expect("sent");
    let mut left = 2;
    expect(&asker, "Fetched", |event| {
        if let LocalEvent::Fetched { found, .. } = event {
            assert!(found.is_ok_and(|found| found.peer), "{found:?}");
            left -= 1;
        }
        (left == 0).then_some(())
    });
    assert_holds(&asker, &slots);

    let order = DaemonOrder::Replicate { order: 9, keys: keys[2..].to_vec(), parent: keys[1], position: 2, from };
    endpoint.order("b", &order).expect("connected");
    log.until(&endpoint, "Replicated", |event| {
        matches!(event, EndpointEvent::Report(_, DaemonReport::Replicated { order: 9, stored: 2, missing: 0 }))
    });
    endpoint.order("b", &DaemonOrder::Dump).expect("connected");
    log.until(&endpoint, "Dump", |event| match event {
        EndpointEvent::Dumped { blocks, last: true, .. } => {
            assert_eq!(blocks.len(), 4 * CHANGE_BYTES);
            true
        }
        _ => false,
    });
    let stored = log.0.iter().map(|event| match event {
        EndpointEvent::Changed(_, _, changes) => changes.len() / CHANGE_BYTES,
        _ => 0,
    });
    assert_eq!(stored.sum::<usize>(), 4, "two fetched, two replicated: {:?}", log.0);
    log.until(&endpoint, "Heartbeat", |event| {
        matches!(event, EndpointEvent::Report(_, DaemonReport::Heartbeat { count: 4, .. }))
    });
    drop(b);
    log.until(&endpoint, "Gone", |event| matches!(event, EndpointEvent::Gone(node) if node.node == "b"));
    assert!(endpoint.order("b", &DaemonOrder::Dump).is_err_and(|error| error.kind == ErrorKind::Retry));
}

/// All that an endpoint has said.
#[derive(Default)]
struct Log(Vec<EndpointEvent>);

impl Log {
    fn until(&mut self, endpoint: &ReportEndpoint, what: &str, mut accept: impl FnMut(&EndpointEvent) -> bool) {
        let until = Instant::now() + PATIENCE;
        loop {
            for event in endpoint.events() {
                self.0.push(event);
            }
            if self.0.iter().any(&mut accept) {
                return;
            }
            assert!(Instant::now() < until, "no {what}: {:?}", self.0);
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_restarted_conductor_is_found_again() {
    let first = ReportEndpoint::new("127.0.0.1:0", Some(KEY), false, 1).expect("binds");
    let address = first.address().to_string();
    let _daemon = Daemon::start(&Config { conductor: Some(address.clone()), ..config("a") }).expect("starts");
    let hello = |event: &EndpointEvent| matches!(event, EndpointEvent::Report(_, DaemonReport::Hello { .. }));
    Log::default().until(&first, "Hello", hello);
    drop(first);
    let second = ReportEndpoint::new(&address, Some(KEY), false, 2).expect("binds again");
    Log::default().until(&second, "Hello", hello);
}

#[test]
fn a_dead_client_lets_go_and_its_partner_is_told() {
    let directory = Scratch::new();
    let a = Daemon::start(&Config { socket: Some(directory.socket()), ..config("a") }).expect("starts");
    let b = daemon("b");
    let connect = |incarnation| {
        PoolClient::connect(&directory.socket(), KEY, incarnation, LAYOUT, 0, PATIENCE).expect("a client attaches")
    };
    let (dying, decode) = (connect(1), attach(&b, 2));
    let there = tag(1, 2);
    let keys: Vec<BlockKey> = (1..=3).map(key).collect();
    fill(&dying, tag(1, 1), &keys, 0);
    grant(&decode, there, &keys, 0);
    open(&dying, there, &b).expect("granted");
    grant(&dying, tag(2, 1), &[key(50), key(51)], 1);
    drop(dying);
    assert_comes_to_rest(&a);
    assert_eq!(counter(&a, &["pool_blocks", "cached"]), 3, "what was committed stays");
    decode.request(LocalRequest::End { tag: there }).expect("sent");
    assert_comes_to_rest(&b);

    // The arena is the same one, and a second client reads what the first has left.
    let next = connect(3);
    next.request(LocalRequest::Lookup { tag: tag(9, 3), keys }).expect("sent");
    let slots = expect(&next, "Located", |event| match event {
        LocalEvent::Located { slots, .. } => Some(slots.clone()),
        _ => None,
    });
    let slots: Vec<GrantedSlot> = slots.into_iter().map(|slot| GrantedSlot { slot, committed: true }).collect();
    assert_eq!(slots.len(), 3);
    assert_holds(&next, &slots);
}

#[test]
fn a_dead_daemon_is_told_to_clients_and_peers() {
    let directory = Scratch::new();
    let mut a = Daemon::start(&Config { socket: Some(directory.socket()), ..config("a") }).expect("starts");
    let b = daemon("b");
    let client = PoolClient::connect(&directory.socket(), KEY, 1, LAYOUT, 0, PATIENCE).expect("attaches");
    let decode = attach(&b, 2);
    let there = tag(1, 2);
    let slots = grant(&decode, there, &[key(1)], 0);
    open(&client, there, &b).expect("granted");
    a.stop();
    assert!(!directory.socket().exists(), "the socket file is gone");
    let until = Instant::now() + PATIENCE;
    let mut events = Vec::new();
    while !events.iter().any(|event| matches!(event, ClientEvent::Disconnected(_))) {
        assert!(Instant::now() < until, "no Disconnected: {events:?}");
        client.wait(Duration::from_millis(200));
        events.extend(client.events());
    }
    assert!(client.store(slots[0].slot, Runs::from(0), &content(0)).is_err_and(|error| error.kind == ErrorKind::Retry));
    // The grant's owner goes on, and can end it.
    decode.request(LocalRequest::End { tag: there }).expect("sent");
    assert_comes_to_rest(&b);
    // Whoever asks for the dead one is refused.
    let other = Tag { request: 7, attempt: 0, worker: 1 };
    decode.request(LocalRequest::Open { tag: other, to: a.address().clone(), within_ms: 30_000 }).expect("sent");
    let refusal = expect(&decode, "Refused", |event| match event {
        LocalEvent::Refused { tag, refusal } if *tag == other => Some(*refusal),
        _ => None,
    });
    assert_eq!(refusal, Refusal::Unreachable);
}

#[test]
fn another_life_and_another_secret_are_refused() {
    let directory = Scratch::new();
    let a = Daemon::start(&Config { socket: Some(directory.socket()), ..config("a") }).expect("starts");
    let wrong = PoolClient::connect(&directory.socket(), [8; 32], 1, LAYOUT, 0, PATIENCE).map(|_| ());
    assert!(wrong.is_err_and(|error| error.kind == ErrorKind::GiveUp && error.message.contains("secret")));
    let impossible = Layout { strips: 0, ..LAYOUT };
    let _first = attach(&a, 1);
    let refused = PoolClient::connect(&directory.socket(), KEY, 1, impossible, 0, PATIENCE).map(|_| ());
    assert!(refused.is_err_and(|error| error.kind == ErrorKind::GiveUp && error.message.contains("impossible")));
    let refused = a.attach(2, impossible, 0).map(|_| ());
    assert!(refused.is_err_and(|error| error.kind == ErrorKind::GiveUp && error.message.contains("impossible")));

    let stranger = Daemon::start(&Config { session_key: Some([8; 32]), ..config("b") }).expect("starts");
    let client = attach(&stranger, 2);
    assert_eq!(open(&client, tag(1, 1), &a), Err(Refusal::Unreachable));

    let other_life = NodeAddress { incarnation: 5, ..a.address().clone() };
    let c = daemon("c");
    let client = attach(&c, 3);
    client.request(LocalRequest::Open { tag: tag(2, 1), to: other_life, within_ms: 30_000 }).expect("sent");
    let refusal = expect(&client, "Refused", |event| match event {
        LocalEvent::Refused { refusal, .. } => Some(*refusal),
        _ => None,
    });
    assert_eq!(refusal, Refusal::Unreachable);
}

#[test]
fn strangers_with_noise_get_nothing_and_stop_nothing() {
    let directory = Scratch::new();
    let a = Daemon::start(&Config { socket: Some(directory.socket()), ..config("a") }).expect("starts");
    let mut noises: Vec<Vec<u8>> = vec![b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0; 4096], vec![0xff; 100_000]];
    noises.push((0..5000u32).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect());
    let mut cut = wire::frame(wire::Kind::Hello, &[1; 40]);
    cut.truncate(20);
    noises.push(cut);
    let mut huge = wire::frame(wire::Kind::Message, b"");
    huge[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    noises.push(huge);
    for noise in &noises {
        let mut tcp = TcpStream::connect(&a.address().address).expect("listening");
        let mut unix = UnixStream::connect(directory.socket()).expect("listening");
        // Each may be cut off before it has said all.
        let _ = tcp.write_all(noise).and_then(|()| tcp.shutdown(Shutdown::Write));
        let _ = unix.write_all(noise).and_then(|()| unix.shutdown(Shutdown::Write));
        let (mut answer, mut other) = (Vec::new(), Vec::new());
        let _ = tcp.read_to_end(&mut answer);
        let _ = unix.read_to_end(&mut other);
        for answer in [answer, other] {
            // At most a refusal, never a challenge's worth of service.
            assert!(answer.len() < 300, "{} bytes for a stranger", answer.len());
        }
    }
    let client = attach(&a, 1);
    grant(&client, tag(1, 1), &[key(1)], 0);
}

#[test]
fn a_stale_life_is_refused() {
    let a = daemon("a");
    let lives = [100, 99];
    let mut answers = Vec::new();
    for life in lives {
        let node = NodeAddress { node: "ghost".into(), address: "127.0.0.1:1".into(), incarnation: life };
        let mut session = Session::dial(KEY, Purpose::Peer { node }, [1; 32], 0);
        let mut stream = TcpStream::connect(&a.address().address).expect("listening");
        let mut events = Vec::new();
        let mut buffer = [0; 4096];
        let result = loop {
            stream.write_all(&session.take_output()).expect("connected");
            let read = stream.read(&mut buffer).expect("connected");
            let result = session.receive(&buffer[..read], 0, &mut events);
            if result.is_err() || !events.is_empty() {
                break result;
            }
        };
        answers.push((stream, result));
    }
    assert_eq!(answers[0].1, Ok(()));
    assert!(answers[1].1.as_ref().is_err_and(|ended| ended.to_string().contains("stale")), "{:?}", answers[1].1);
}

// Goal: a daemon whose host's clock was set back is not taken for a leftover of its earlier life. Method: the earlier one
// began in an hour, as far as it has written down, and its peer remembers.
#[test]
fn a_clock_that_was_set_back_makes_no_leftover() {
    let directory = Scratch::new();
    let place = || Config { socket: Some(directory.socket()), ..config("b") };
    let (a, first) = (daemon("a"), Daemon::start(&place()).expect("starts"));
    let mut life = directory.socket().into_os_string();
    life.push(".life");
    let hour_later = first.address().incarnation + 3_600_000_000_000;
    assert_eq!(std::fs::read_to_string(&life).expect("written"), format!("{}\n", first.address().incarnation));
    drop(first);
    std::fs::write(&life, hour_later.to_string()).expect("ours");
    for _ in 0..2 {
        let b = Daemon::start(&place()).expect("starts");
        assert!(b.address().incarnation > hour_later);
        // It opens what `a` grants, so `a` lets it in.
        let (holder, opener) = (attach(&a, 1), attach(&b, 2));
        let tag = tag(b.address().incarnation, 1);
        grant(&holder, tag, &[key(1)], 0);
        opener.request(LocalRequest::Open { tag, to: a.address().clone(), within_ms: 60_000 }).expect("sent");
        expect(&opener, "Opened", |event| matches!(event, LocalEvent::Opened { .. }).then_some(()));
        holder.request(LocalRequest::End { tag }).expect("sent");
    }
}

#[test]
fn impossible_configurations_are_refused_and_leave_nothing_open() {
    let directory = Scratch::new();
    let taken = TcpListener::bind("127.0.0.1:0").expect("binds");
    let address = taken.local_addr().expect("bound").to_string();
    let refusal = |config: Config| Daemon::start(&config).map(|_| ()).expect_err("impossible").message;
    let in_use = Config { listen: Some(address), socket: Some(directory.socket()), ..config("a") };
    assert!(refusal(in_use).contains("in use"));
    assert!(!directory.socket().exists());
    let one = Daemon::start(&Config { socket: Some(directory.socket()), ..config("a") }).expect("starts");
    assert!(refusal(Config { socket: Some(directory.socket()), ..config("b") }).contains("another daemon"));
    drop(one);
    // A dead daemon's file is replaced.
    drop(std::os::unix::net::UnixListener::bind(directory.socket()).expect("binds"));
    assert!(directory.socket().exists());
    Daemon::start(&Config { socket: Some(directory.socket()), ..config("a") }).expect("starts");
}

// -- the transport alone, with a hostile middle --------------------------------------------------------------------

struct Sink {
    arena: Arc<Arena>,
    lanes: lanes::Receiver,
}

fn sink() -> Sink {
    let arena = Arena::create(256 << 10, LAYOUT).expect("fits");
    Sink { lanes: lanes::Receiver::new(arena.clone()), arena }
}

struct Source {
    arena: Arc<Arena>,
    transport: LaneTransport,
    woken: mpsc::Receiver<()>,
}

fn source() -> Source {
    let arena = Arena::create(256 << 10, LAYOUT).expect("fits");
    let (transport, woken) = lanes::sender(arena.clone());
    Source { arena, transport, woken }
}

impl Source {
    /// A sealed slot with `content(seed)`.
    fn block(&self, slot: u32, seed: u64) -> SlotRef {
        let slot = self.arena.issue(slot);
        self.arena.store(slot, 0, &content(seed)).expect("in range");
        assert!(self.arena.seal(slot));
        slot
    }

    fn outcomes(&mut self, count: usize) -> Vec<Completion> {
        let mut completions = Vec::new();
        while completions.len() < count {
            self.woken.recv_timeout(PATIENCE).expect("every copy completes");
            self.transport.poll(&mut completions);
        }
        assert_eq!(completions.len(), count, "each completes once");
        completions.sort_by_key(|completion| completion.id);
        completions
    }
}

#[test]
fn a_byte_flipped_on_the_wire_is_found_wherever_it_is() {
    let (mut source, sink) = (source(), sink());
    let proxy = Proxy::new(&sink.lanes.address.address);
    let peer = NodeAddress { address: proxy.address.clone(), ..sink.lanes.address.clone() };
    let head = 40 + 24 + 4 * i64::from(LAYOUT.strips);
    source.transport.connect(&peer);
    // One clean copy first, so that the handshake is over.
    let mut id = 0;
    let mut send = |source: &mut Source, flip: i64| {
        let slot = id as u32 % 16;
        id += 1;
        let block = source.block(slot, id);
        let destination = sink.arena.issue(slot);
        proxy.flip.store(flip, Ordering::SeqCst);
        source.transport.connect(&peer);
        source
            .transport
            .submit(
                &peer.node,
                &[Copy::block(&source.arena, id, (RegionId::ARENA, block), (RegionId::ARENA, destination))],
            )
            .expect("room");
        let outcome = source.outcomes(1)[0].outcome;
        assert_eq!(sink.arena.arrived_all(destination), outcome == Outcome::Done);
        source.arena.retire(block);
        sink.arena.retire(destination);
        outcome
    };
    assert_eq!(send(&mut source, -1), Outcome::Done);
    for body in [0, 511, 512, LAYOUT.block_bytes() as i64 - 1] {
        assert_eq!(send(&mut source, head + body), Outcome::Corrupt, "byte {body} of the body");
        assert_eq!(send(&mut source, -1), Outcome::Done, "the lane goes on");
    }
    for front in [0, 5, 8, 17, 21, 41, head - 1] {
        assert_eq!(send(&mut source, front), Outcome::Lost, "byte {front} of the header");
        // A new lane, whose handshake passes the proxy unharmed.
        assert_eq!(send(&mut source, -1), Outcome::Done, "the next lane works");
    }
}

#[test]
fn daemons_survive_cut_and_damaged_lanes() {
    let a = daemon("a");
    let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
    let port = listener.local_addr().expect("bound").to_string();
    drop(listener);
    let proxy = Proxy::new(&port);
    let behind = Config { listen: Some(port), advertise: Some(proxy.address.clone()), ..config("b") };
    let b = Daemon::start(&behind).expect("starts");
    let (prefill, decode) = (attach(&a, 1), attach(&b, 2));
    let keys: Vec<BlockKey> = (1..=20).map(key).collect();
    fill(&prefill, tag(1, 1), &keys, 0);
    let pushed = |request: u64| {
        let there = tag(request, 2);
        let slots = grant(&decode, there, &keys, 0);
        open(&prefill, there, &b).and_then(|()| push(&prefill, tag(1, 1), there, 20, b"note")).map(|()| slots)
    };

    // Far enough in to be in the data: the first bytes are handshakes and short control frames.
    proxy.flip.store(30_000, Ordering::SeqCst);
    let slots = pushed(10).expect("the damaged block is sent again");
    assert_eq!(proxy.flip.load(Ordering::SeqCst), -1, "a byte was flipped");
    assert_holds(&decode, &slots);
    let noticed = counter(&a, &["checksum_failures_total", "wire"]) + counter(&b, &["checksum_failures_total", "wire"]);
    assert_eq!(noticed, 1);
    assert_eq!(counter(&a, &["transfer_retries_total"]), 1);

    // Cut everything between the two; whoever holds an open grant is told, and a new attempt works.
    let there = tag(11, 2);
    grant(&decode, there, &[key(90)], 0);
    open(&prefill, there, &b).expect("granted");
    proxy.cut();
    let refusal = expect(&prefill, "Refused", |event| match event {
        LocalEvent::Refused { tag, refusal } if *tag == there => Some(*refusal),
        _ => None,
    });
    assert_eq!(refusal, Refusal::Unreachable);
    let slots = pushed(12).expect("a new session, a new lane");
    assert_holds(&decode, &slots);
    for (client, tags) in
        [(&prefill, [tag(1, 1), tag(10, 2), there, tag(12, 2)]), (&decode, [tag(10, 2), there, tag(12, 2), there])]
    {
        for tag in tags {
            client.request(LocalRequest::End { tag }).expect("sent");
        }
    }
    assert_comes_to_rest(&a);
    assert_comes_to_rest(&b);
}

// Goal: what a daemon has cached outlives it on a real disk: a clean stop writes it, a new life announces it, and a peer and a
// client get the right bytes. Method: daemons with a directory each way, a report endpoint, and blocks of two layouts.
#[test]
fn blocks_outlive_their_daemon() {
    let directory = Scratch::new();
    let ssd = Scratch::new();
    let with_ssd = |node: &str| Config { ssd_dirs: vec![ssd.0.clone()], ssd_bytes: 64 << 20, ..config(node) };
    let other = Layout { strips: 70, strip_bytes: 100 };
    let of_other: Vec<u8> = (0..7000).map(|byte| (byte * 7) as u8).collect();
    let (keys, other_key) = ([key(1), key(2), key(3)], key(77));
    {
        let a = Daemon::start(&with_ssd("a")).expect("starts");
        let client = attach(&a, 1);
        fill(&client, tag(1, 1), &keys, 0);
        let second = a.attach(2, other, 5).expect("another layout");
        let slots = grant(&second, tag(2, 2), &[other_key], 0);
        second.store(slots[0].slot, Runs::from(0), &of_other).expect("in range");
        second.request(LocalRequest::Commit { tag: tag(2, 2), indices: vec![0] }).expect("sent");
        // Its answer comes behind the commit.
        second.request(LocalRequest::Counters { ticket: 1 }).expect("sent");
        expect(&second, "Counters", |event| matches!(event, LocalEvent::Counters { .. }).then_some(()));
        client.request(LocalRequest::Counters { ticket: 1 }).expect("sent");
        expect(&client, "Counters", |event| matches!(event, LocalEvent::Counters { .. }).then_some(()));
        // What comes twice is written. A stop writes the rest, but in so much time and no more.
        grant(&client, tag(5, 1), &keys, 0);
        grant(&second, tag(5, 2), &[other_key], 0);
        let until = Instant::now() + PATIENCE;
        while counter(&a, &["pyengine_pool_blocks", "ssd"]) < 4 {
            assert!(Instant::now() < until, "blocks that came twice are not written");
            std::thread::yield_now();
        }
    }
    let a = Daemon::start(&Config { socket: Some(directory.socket()), ..with_ssd("a") }).expect("starts again");
    assert_eq!(counter(&a, &["pyengine_pool_blocks", "ssd"]), 4);
    // A peer asks before any client has come back.
    let b = daemon("b");
    let asker = attach(&b, 2);
    let wanted = tag(3, 2);
    grant(&asker, wanted, &keys[..1], 0);
    asker
        .request(LocalRequest::Fetch { tag: wanted, indices: vec![0], from: vec![a.address().clone()] })
        .expect("sent");
    let found = expect(&asker, "Fetched", |event| match event {
        LocalEvent::Fetched { found, .. } => Some(*found),
        _ => None,
    });
    let found = found.expect("it is on the disk there");
    assert_eq!((found.peer, found.medium), (true, Medium::Ssd));
    let mut bytes = vec![0; LAYOUT.block_bytes()];
    assert!(asker.load(found.slot, Runs::from(0), &mut bytes).expect("in range") && bytes == content(0));
    // Clients of both layouts, over the socket.
    let back = PoolClient::connect(&directory.socket(), KEY, 3, other, 5, PATIENCE).expect("attaches");
    let wanted = tag(4, 3);
    grant(&back, wanted, &[other_key], 0);
    back.request(LocalRequest::Fetch { tag: wanted, indices: vec![0], from: Vec::new() }).expect("sent");
    let found = expect(&back, "Fetched", |event| match event {
        LocalEvent::Fetched { found, .. } => Some(*found),
        _ => None,
    });
    let found = found.expect("it is on the disk here");
    assert_eq!((found.peer, found.medium), (false, Medium::Ssd));
    let mut bytes = vec![0; other.block_bytes()];
    assert!(back.load(found.slot, Runs::from(0), &mut bytes).expect("in range") && bytes == of_other);
    assert_eq!(counter(&a, &["pyengine_pool_promotions_total"]), 2);
    let refused = Daemon::start(&with_ssd("c")).map(|_| ());
    assert!(refused.is_err_and(|error| error.kind == ErrorKind::GiveUp), "one daemon a directory");
}

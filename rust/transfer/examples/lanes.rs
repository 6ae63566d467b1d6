//! How fast the lanes alone are: a transport in this process, its target in a child, nothing above them.
//!
//! ```text
//! lanes OP BLOCK BATCH SECONDS [bare] [threads=N] [lanes=N]            over tcp; OP: write, read; bare: no checksums
//! lanes OP BLOCK BATCH SECONDS shm [private] [bare] ...                over shm, from mappable or private memory
//! lanes write BLOCK 1 SECONDS                                          one copy at a time, by a caller that waits
//! ```
//!
//! As the bare limit does (`bare` in `rust/transferd/examples`), a batch is scattered and every batch takes the next of a
//! pool of buffers that is larger than the last-level cache. Prints one JSON object.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use pyengine_transfer::link::{Connection, Link, nonce, now};
use pyengine_transfer::messages::Purpose;
use pyengine_transfer::region::{Access, Buffer, Regions};
use pyengine_transfer::server::{Listener, Threads, accept_all};
use pyengine_transfer::session::{Event, Session};
use pyengine_transfer::transport::fence::Fences;
use pyengine_transfer::transport::lanes::Settings;
use pyengine_transfer::transport::shm::ShmTransport;
use pyengine_transfer::transport::{Copy, Op, Outcome, PIECE_BYTES, Transport, tcp};
use pyengine_transfer::types::{NodeAddress, RegionId, Span};

const KEY: [u8; 32] = [7; 32];
const HELP: Duration = Duration::from_millis(1);
const POOL_BYTES: u64 = 128 << 20;
const ALL: Access = Access { read: true, write: true };

fn node(name: &str, address: &str) -> NodeAddress {
    NodeAddress { node: name.into(), address: address.into(), incarnation: 1 }
}

fn regions(bytes: u64, arguments: &[String]) -> Arc<Regions> {
    let regions = Regions::new();
    let mappable = has(arguments, "shm") && !has(arguments, "private");
    let buffer =
        if mappable { Buffer::shared(bytes, ALL).expect("memory") } else { Buffer::owned(bytes as usize, ALL) };
    let buffer = Arc::new(buffer);
    // SAFETY: just made, and nobody else knows it; written once so that every page is there.
    unsafe { std::ptr::write_bytes(buffer.pointer().as_ptr(), 7, bytes as usize) };
    assert_eq!(regions.add(buffer), RegionId(1));
    regions
}

fn has(arguments: &[String], word: &str) -> bool {
    arguments.iter().any(|argument| argument == word)
}

/// Processor time of a process so far, in seconds: all its threads' by the scheduler's books.
fn processor_seconds(process: u32) -> f64 {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let nanos = tasks.filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    });
    nanos.sum::<u64>() as f64 / 1e9
}

/// The child: serves until its input ends.
fn target(bytes: u64, settings: Settings, arguments: &[String]) {
    if has(arguments, "shm") {
        let me = node("target", "");
        let me = NodeAddress { incarnation: std::process::id().into(), ..me };
        let mut transport = ShmTransport::new(KEY, me, settings, Fences::default(), Box::new(|| {})).expect("starts");
        transport.register(regions(bytes, arguments));
        println!("{}", std::process::id());
        let _ = std::io::stdin().read_line(&mut String::new());
        return;
    }
    let (listener, at) = Listener::tcp("127.0.0.1:0").expect("binds");
    let me = node("target", &at.to_string());
    let mut transport = tcp::transport(KEY, me.clone(), settings, Fences::default(), Box::new(|| {})).expect("starts");
    transport.register(regions(bytes, arguments));
    let (acceptor, threads) = (transport.acceptor(), Arc::new(Threads::default()));
    let accepting = Link::new().expect("an eventfd");
    let (all, until) = (threads.clone(), accepting.clone());
    let accept = move || {
        accept_all(&[listener], &until, |stream| {
            let (acceptor, me, link) = (acceptor.clone(), me.clone(), Link::new().expect("an eventfd"));
            let within = link.clone();
            let serve = move || {
                let session = Session::accept(KEY, me, nonce().expect("random"), now());
                let mut connection = Connection::new(stream, session, within).expect("a socket");
                if let Ok(Event::Proven(Purpose::Lane { node, path })) = connection.handshake() {
                    acceptor.welcome(connection, &node, path).expect("room");
                }
            };
            all.spawn("accepted", &link, serve).expect("not stopping");
        });
    };
    threads.spawn("accept", &accepting, accept).expect("starts");
    println!("{at}");
    let _ = std::io::stdin().read_line(&mut String::new());
    threads.stop("over");
}

struct Initiator {
    transport: Box<dyn Transport>,
    woken: mpsc::Receiver<()>,
}

impl Initiator {
    fn batch(&mut self, copies: &[Copy]) {
        self.transport.submit(&"target".to_owned(), copies).expect("room");
        let (mut left, mut done) = (copies.len(), Vec::new());
        while left > 0 {
            self.transport.poll(&mut done);
            for completion in done.drain(..) {
                assert_eq!(completion.outcome, Outcome::Done);
                left -= 1;
            }
            // As an engine does for whoever waits for a small transfer.
            let alone = copies.len() == 1 && left > 0;
            if alone && self.transport.helper(&"target".to_owned()).is_some_and(|helper| helper.help(HELP)) {
                continue;
            }
            if left > 0 {
                self.woken.recv_timeout(Duration::from_secs(10)).expect("completes");
            }
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut settings = Settings::default();
    for argument in &arguments {
        match argument.split_once('=') {
            Some(("threads", number)) => settings.threads = number.parse().expect("a number"),
            Some(("lanes", number)) => settings.lanes_per_peer = number.parse().expect("a number"),
            _ => {}
        }
    }
    settings.checksums = !has(&arguments, "bare");
    let number = |at: usize| arguments[at].parse::<u64>().expect("a number");
    if arguments[0] == "target" {
        return target(number(1), settings, &arguments);
    }
    let (op, block, batch, seconds) = (arguments[0].as_str(), number(1), number(2), number(3));
    let sets = (POOL_BYTES / (block * batch)).max(2);
    let bytes = sets * block * batch;
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["target", &bytes.to_string()])
        .args(&arguments[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("starts");
    let mut at = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut at).expect("says where");

    let (wake, woken) = mpsc::channel();
    let notify = Box::new(move || {
        // Nobody listens any more at the end.
        let _ = wake.send(());
    });
    let (mut transport, peer): (Box<dyn Transport>, _) = if has(&arguments, "shm") {
        let incarnation = at.trim().parse().expect("a number");
        let me = NodeAddress { incarnation, ..node("initiator", "") };
        let transport = ShmTransport::new(KEY, me, settings, Fences::default(), notify).expect("starts");
        (Box::new(transport), NodeAddress { incarnation, ..node("target", "") })
    } else {
        let transport =
            tcp::transport(KEY, node("initiator", ""), settings, Fences::default(), notify).expect("starts");
        (Box::new(transport), node("target", at.trim()))
    };
    transport.register(regions(bytes, &arguments));
    transport.connect(&peer);
    let mut initiator = Initiator { transport, woken };
    let batches: Vec<Vec<Copy>> = (0..sets)
        .map(|set| {
            let mut copies = Vec::new();
            for index in 0..batch {
                // An odd factor that is no multiple of a power of two visits all blocks of such a batch.
                let there = (index * 7 + 3) % batch;
                let (from, to) = ((set * batch + index) * block, (set * batch + there) * block);
                for piece in (0..block).step_by(PIECE_BYTES as usize) {
                    let bytes = (block - piece).min(PIECE_BYTES.into()) as u32;
                    let span = |offset| Span { region: RegionId(1), life: 0, offset };
                    let (local, remote) = (span(from + piece), span(to + piece));
                    let op = if op == "read" { Op::Read } else { Op::Write };
                    copies.push(Copy { id: copies.len() as u64, op, local, remote, bytes, grain: 0 });
                }
            }
            copies
        })
        .collect();
    let mut times = Vec::new();
    let warm = Instant::now() + Duration::from_millis(300);
    let (mut begin, mut moved) = (None::<Instant>, 0);
    let spent = || processor_seconds(std::process::id()) + processor_seconds(child.id());
    let mut spent_before = 0.0;
    for copies in batches.iter().cycle() {
        let before = Instant::now();
        if before >= warm {
            let began = *begin.get_or_insert_with(|| {
                spent_before = spent();
                before
            });
            if began.elapsed() >= Duration::from_secs(seconds) {
                break;
            }
        }
        initiator.batch(copies);
        if begin.is_some() {
            times.push(before.elapsed().as_nanos() as u64);
            moved += block * batch;
        }
    }
    let total = begin.map_or(0.0, |begin| begin.elapsed().as_secs_f64());
    times.sort_unstable();
    println!(
        r#"{{"op": "{op}", "block": {block}, "batch": {batch}, "gbps": {:.3}, "p50_us": {:.1}, "p99_us": {:.1}, "cpu_s_per_gb": {:.3}}}"#,
        moved as f64 / total / 1e9,
        times[times.len() / 2] as f64 / 1e3,
        times[times.len() * 99 / 100] as f64 / 1e3,
        (spent() - spent_before) / (moved as f64 / 1e9),
    );
    let _ = child.stdin.take().expect("piped").write_all(b"\n");
    let _ = child.wait();
}

//! `transferd ping`: by which path a peer is reached, how fast it answers, in which life it is; and if not, why not.

use std::time::{Duration, Instant};

use serde::Serialize;
use transfer::endpoint::{Copies, Endpoint, How, Peer, RegionHandle};
use transfer::error::Error;
use transfer::region::Access;
use transfer::transport::{Op, Path};

use crate::engine::{EngineArguments, REGION, microseconds};

/// What is read from a target.
const READ_BYTES: u64 = 4096;

/// Flags.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// `host:port` of a daemon, a target or any engine that listens
    #[arg(value_name = "PEER")]
    peer: String,
    #[command(flatten)]
    engine: EngineArguments,
    /// How often
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    count: u32,
    /// One JSON object instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Answer {
    node: String,
    address: String,
    incarnation: u64,
    paths: Vec<PathLine>,
    /// A question and its answer on the control session.
    session: Times,
    /// 4 KiB read from the memory that a `transferd target` offers, by the path that is taken. Others offer none.
    read_4kib: Option<Times>,
}

#[derive(Serialize)]
struct PathLine {
    transport: &'static str,
    state: &'static str,
    why: String,
    taken: bool,
}

#[derive(Serialize)]
struct Times {
    min_us: f64,
    p50_us: f64,
    max_us: f64,
}

/// Prints what it found.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    let endpoint = arguments.engine.start(None, |_| {})?;
    let peer = endpoint.connect(&arguments.peer, arguments.engine.transport.via(), arguments.engine.timeout)?;
    let timeout = arguments.engine.timeout;
    let mut session = Vec::new();
    for _ in 0..arguments.count {
        session.push(peer.round_trip(timeout)?);
    }
    // Only targets have it; a daemon's memory is for its own peers.
    let read_4kib = match peer.find(REGION, timeout) {
        Ok(region) if region.access.read && region.bytes >= READ_BYTES => {
            Some(times(read(&endpoint, &peer, &region, arguments.count, timeout)?))
        }
        _ => None,
    };
    let reports = peer.paths();
    // Before the first copy none is taken yet: it will be the first that stands.
    let taken = reports.iter().position(|report| report.taken);
    let taken = taken.or_else(|| reports.iter().position(|report| report.path == Path::Up));
    let paths = reports.iter().enumerate().map(|(index, report)| {
        let (state, why) = match &report.path {
            Path::Up => ("up", String::new()),
            Path::Connecting => ("connecting", String::new()),
            Path::Down(why) => ("down", why.clone()),
            Path::None => ("none", "not tried".into()),
        };
        PathLine { transport: report.kind.name(), state, why, taken: taken == Some(index) }
    });
    let address = peer.address();
    let answer = Answer {
        node: address.node,
        address: address.address,
        incarnation: address.incarnation,
        paths: paths.collect(),
        session: times(session),
        read_4kib,
    };
    endpoint.close();
    if arguments.json {
        println!("{}", serde_json::to_string(&answer).map_err(|error| Error::bug(error.to_string()))?);
    } else {
        print!("{}", text(&answer));
    }
    Ok(())
}

fn read(
    endpoint: &Endpoint,
    peer: &Peer,
    remote: &RegionHandle,
    count: u32,
    timeout: Duration,
) -> Result<Vec<Duration>, Error> {
    let local = endpoint.allocate(READ_BYTES as usize, Access { read: false, write: false }, None)?;
    let mut copies = Copies::build();
    copies.add(&local, 0, remote, 0, READ_BYTES)?;
    let copies = copies.finish();
    let mut took = Vec::new();
    for _ in 0..count {
        let start = Instant::now();
        let transfer = endpoint.submit(peer, Op::Read, &copies, How { deadline: Some(timeout), ..How::default() })?;
        // It ends at its deadline at the latest, and 3 s later it is quiet.
        while !transfer.wait(timeout) {}
        transfer.result()?;
        took.push(start.elapsed());
    }
    local.unregister(timeout)?;
    Ok(took)
}

fn times(mut took: Vec<Duration>) -> Times {
    took.sort_unstable();
    let [min_us, p50_us, max_us] = [0, 500, 1000].map(|per_mille| microseconds(&took, per_mille));
    Times { min_us, p50_us, max_us }
}

fn text(answer: &Answer) -> String {
    let mut text = format!("{} at {}, incarnation {}\n", answer.node, answer.address, answer.incarnation);
    for path in &answer.paths {
        let mark = if path.taken { " <- taken" } else { "" };
        let why = if path.why.is_empty() { String::new() } else { format!(": {}", path.why) };
        text += &format!("  {:<12}{}{why}{mark}\n", path.transport, path.state);
    }
    for (what, times) in [("session", Some(&answer.session)), ("4 KiB read", answer.read_4kib.as_ref())] {
        if let Some(Times { min_us, p50_us, max_us }) = times {
            text += &format!("  {what:<12}min {min_us:.1} us, median {p50_us:.1} us, max {max_us:.1} us\n");
        }
    }
    text
}

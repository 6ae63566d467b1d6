//! The commands that speak to a running daemon on this machine, over its unix socket: how it does, what it keeps, and to
//! take on nothing new.

use std::collections::BTreeMap;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Subcommand, ValueEnum};
use serde::Serialize;
use transfer::admin::{
    AdminClient, AdminReply, AdminRequest, Cursor, Evicted, Held, KEYS_LIMIT, Listed, Moving, Prefix, Status, Verified,
    hex,
};
use transfer::config::open_key;
use transfer::error::Error;
use transfer::pool::tier::Whose;
use transfer::types::{BlockKey, Medium};

mod keeping;

use crate::engine::{seconds, size_name};
use crate::settings::way_in;

/// In whose name this command keeps blocks.
const BY: &str = "transferd pin";

/// How often a drain says what is still held.
const PROGRESS: Duration = Duration::from_secs(1);

/// They end with 0 if all is well, 1 if not, 2 for a mistake in the arguments.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Says how a running daemon does: its tiers, its workers, its peers, what is held
    Status {
        #[command(flatten)]
        daemon: Way,
    },
    /// Shows a running daemon's counters
    Stats {
        #[command(flatten)]
        daemon: Way,
    },
    /// Lists the blocks that a running daemon has
    Keys {
        #[command(flatten)]
        daemon: Way,
        /// Only keys that begin so
        #[arg(long, value_name = "HEX", default_value = "", hide_default_value = true, value_parser = prefix)]
        prefix: Prefix,
        /// Only so many
        #[arg(long, value_name = "N")]
        limit: Option<u64>,
        /// Only those on this medium
        #[arg(long)]
        medium: Option<OnMedium>,
    },
    /// Computes the checksums of all blocks that a running daemon has; what is rotten is dropped, and it ends with 1. SSDs are
    /// read slowly, so that serving goes on; end it whenever you like
    Verify {
        #[command(flatten)]
        daemon: Way,
        /// Only those on this medium
        #[arg(long)]
        medium: Option<OnMedium>,
    },
    /// Drops blocks that nobody holds from all tiers of a running daemon; ends with 1 if one of those named stays or is not there
    Evict {
        #[command(flatten)]
        daemon: Way,
        /// Keys of 32 hex digits
        #[arg(value_name = "KEY", required_unless_present = "all", conflicts_with = "all", value_parser = key)]
        keys: Vec<BlockKey>,
        /// All that nobody holds
        #[arg(long)]
        all: bool,
    },
    /// Drops an owner's blocks that nobody holds from all tiers of a running daemon; ends with 1 if some are held and stay
    #[command(group = clap::ArgGroup::new("whose").required(true))]
    Clear {
        #[command(flatten)]
        daemon: Way,
        /// All blocks of this namespace
        #[arg(long, value_name = "HEX", group = "whose", value_parser = digest)]
        namespace: Option<u64>,
        /// All blocks of this tenant, in every namespace
        #[arg(long, value_name = "HEX", group = "whose", value_parser = digest)]
        tenant: Option<u64>,
    },
    /// Keeps blocks in a running daemon's memory for a time, reading them from its SSD if need be; ends with 1 if some are not
    /// there, or do not fit
    Pin {
        #[command(flatten)]
        daemon: Way,
        /// Keys of 32 hex digits
        #[arg(value_name = "KEY", required = true, value_parser = key)]
        keys: Vec<BlockKey>,
        /// For how long, in seconds: at most a day
        #[arg(long, value_name = "SECONDS", value_parser = seconds)]
        ttl: Duration,
        /// Who wants it, for `transferd pins`
        #[arg(long, value_name = "NAME", default_value = BY)]
        by: String,
    },
    /// Keeps blocks no more; ends with 1 if some were not kept
    Unpin {
        #[command(flatten)]
        daemon: Way,
        /// Keys of 32 hex digits
        #[arg(value_name = "KEY", required = true, value_parser = key)]
        keys: Vec<BlockKey>,
        /// Only in this name; without it, in all names
        #[arg(long, value_name = "NAME")]
        by: Option<String>,
    },
    /// Says who keeps how much in a running daemon's memory, and for how long
    Pins {
        #[command(flatten)]
        daemon: Way,
    },
    /// Says what owners have in a running daemon, and what their quotas are
    Quotas {
        #[command(flatten)]
        daemon: Way,
    },
    /// Lets a running daemon take on nothing new, and waits until nothing is held and what only it has is on other nodes, as
    /// far as that is in use: then it can be stopped
    Drain {
        #[command(flatten)]
        daemon: Way,
        /// Seconds to wait; the daemon drains on when they are over
        #[arg(long, value_name = "N", default_value = "25", value_parser = seconds)]
        within: Duration,
        /// Let it take on work again
        #[arg(long)]
        cancel: bool,
    },
}

/// Which daemon, and how it answers.
#[derive(clap::Args, Debug)]
pub struct Way {
    /// The file that the daemon was started with
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Its unix socket, if not as the file says
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The cluster's secret, if not as the file says
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
    /// JSON instead of text
    #[arg(long)]
    json: bool,
    /// Seconds to wait for an answer
    #[arg(long, default_value = "30", value_parser = seconds)]
    timeout: Duration,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnMedium {
    /// The arena
    Dram,
    /// Solid-state disks
    Ssd,
}

impl From<OnMedium> for Medium {
    fn from(medium: OnMedium) -> Self {
        match medium {
            OnMedium::Dram => Self::Dram,
            OnMedium::Ssd => Self::Ssd,
        }
    }
}

fn prefix(text: &str) -> Result<Prefix, String> {
    Prefix::parse(text).map_err(|error| error.message)
}

fn key(text: &str) -> Result<BlockKey, String> {
    let whole = Prefix::parse(text).map_err(|error| error.message)?.whole();
    whole.ok_or_else(|| format!("a key has 32 hex digits, not {}", text.len()))
}

pub fn digest(text: &str) -> Result<u64, String> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = digits.then(|| u64::from_str_radix(text, 16).ok()).flatten();
    number.ok_or_else(|| format!("{text:?} is no owner: write at most 16 hex digits, as `keys --json` shows them"))
}

/// Does one of them.
pub fn run(command: &Command) -> Result<(), Error> {
    match command {
        Command::Status { daemon } => status(daemon),
        Command::Stats { daemon } => stats(daemon),
        Command::Keys { daemon, prefix, limit, medium } => keys(daemon, *prefix, *limit, *medium),
        Command::Verify { daemon, medium } => verify(daemon, *medium),
        Command::Evict { daemon, all: true, .. } => evict_all(daemon, None),
        Command::Evict { daemon, keys, .. } => evict(daemon, keys),
        Command::Clear { daemon, namespace, tenant } => {
            evict_all(daemon, namespace.map(Whose::Namespace).or(tenant.map(Whose::Tenant)))
        }
        Command::Pin { daemon, keys, ttl, by } => keeping::pin(daemon, keys, *ttl, by),
        Command::Unpin { daemon, keys, by } => keeping::unpin(daemon, keys, by.as_deref()),
        Command::Pins { daemon } => keeping::pins(daemon),
        Command::Quotas { daemon } => keeping::quotas(daemon),
        Command::Drain { daemon, cancel: true, .. } => cancel(daemon),
        Command::Drain { daemon, within, .. } => drain(daemon, *within),
    }
}

impl Way {
    fn connect(&self) -> Result<AdminClient, Error> {
        let (socket, key) = way_in(self.config.as_deref(), self.socket.as_deref(), self.secret_file.as_deref())?;
        AdminClient::connect(&socket, key.unwrap_or_else(open_key), self.timeout)
    }

    /// One JSON object, or the text.
    fn print(&self, value: &impl Serialize, text: impl FnOnce() -> String) -> Result<(), Error> {
        let mut out = io::stdout().lock();
        let written = if self.json { writeln!(out, "{}", json(value)?) } else { write!(out, "{}", text()) };
        written.and_then(|()| out.flush()).or_else(gone).map(|_| ())
    }
}

fn json(value: &impl Serialize) -> Result<String, Error> {
    serde_json::to_string(value).map_err(|error| Error::bug(error.to_string()))
}

/// Nobody reads the rest: then there is no more to do. True if so.
fn gone(error: io::Error) -> Result<(), Error> {
    if error.kind() == io::ErrorKind::BrokenPipe { Ok(()) } else { Err(Error::retry(format!("stdout: {error}"))) }
}

fn another(reply: &AdminReply) -> Error {
    Error::bug(format!("the daemon answers something else than it was asked: {reply:?}"))
}

fn status(way: &Way) -> Result<(), Error> {
    match way.connect()?.ask(&AdminRequest::Status)? {
        AdminReply::Status(status) => way.print(&status, || status_text(&status)),
        other => Err(another(&other)),
    }
}

fn status_text(status: &Status) -> String {
    let Status { node, address, incarnation, version, .. } = status;
    let address = if address.is_empty() { "no peers" } else { address };
    let state = match (status.draining, status.listening) {
        (true, _) => "draining",
        (false, true) => "serving",
        (false, false) => "accepting no connections",
    };
    let mut text = format!("{node}: {state} for {}\n", duration(Duration::from_millis(status.uptime_ms)));
    let mut line = |name: &str, value: String| text += &format!("  {name:<12}{value}\n");
    line("address", address.into());
    line("life", incarnation.to_string());
    line("version", version.clone());
    line(
        "conductor",
        match &status.conductor {
            None => "none".into(),
            Some(conductor) if conductor.connected => format!("{}, connected", conductor.address),
            Some(conductor) => format!("{}, does not answer", conductor.address),
        },
    );
    line("http", status.http.clone().unwrap_or_else(|| "none".into()));
    line("held", held_text(&status.held));
    let tiers = status.tiers.iter().map(|tier| {
        let share = 100.0 * tier.used_bytes as f64 / (tier.limit_bytes.max(1) as f64);
        [
            tier.medium.clone(),
            size_name(tier.limit_bytes),
            tier.used_bytes.to_string(),
            format!("{share:.1}%"),
            tier.blocks.to_string(),
            tier.health.clone(),
            tier.io.clone(),
        ]
    });
    text += &table(["tier", "limit", "used bytes", "used", "blocks", "health", "io"], tiers);
    let layouts = status.layouts.iter().map(|layout| {
        let block = u64::from(layout.strips) * u64::from(layout.strip_bytes);
        let numbers = [layout.slots, layout.free, layout.cached, layout.pinned, layout.reserved, layout.quarantine];
        let [slots, free, cached, pinned, reserved, quarantine] = numbers.map(|number| number.to_string());
        let layout = format!("{} x {}", layout.strips, size_name(layout.strip_bytes.into()));
        [layout, size_name(block), slots, free, cached, pinned, reserved, quarantine]
    });
    text += &table(["layout", "block", "slots", "free", "cached", "pinned", "reserved", "quarantine"], layouts);
    let clients = status.clients.iter().map(|client| [client.client.to_string(), client.tags.to_string()]);
    text += &table(["worker", "tags"], clients);
    let peers = status.peers.iter().map(|peer| {
        let state = if peer.connected { "connected" } else { "connecting" };
        [peer.node.clone(), peer.address.clone(), peer.incarnation.to_string(), state.into(), peer.copies.to_string()]
    });
    text + &table(["peer", "address", "life", "session", "copies"], peers)
}

/// A head and its rows, in columns; nothing if there are none.
fn table<const N: usize>(head: [&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let rows: Vec<[String; N]> = rows.collect();
    if rows.is_empty() {
        return String::new();
    }
    let wide = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(|column| wide(column).max(head[column].len())).collect();
    let line = |cells: [&str; N]| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        format!("  {}", padded.collect::<Vec<_>>().join("  ")).trim_end().to_owned() + "\n"
    };
    let mut text = "\n".to_owned() + &line(head);
    for row in &rows {
        text += &line(std::array::from_fn(|column| row[column].as_str()));
    }
    text
}

fn held_text(held: &Held) -> String {
    let counts = [
        (held.tags, "tag", "tags"),
        (held.grants, "grant", "grants"),
        (held.waiting, "waiting grant", "waiting grants"),
        (held.opens, "open", "opens"),
        (held.visits, "visitor", "visitors"),
        (held.fetches, "fetch", "fetches"),
        (held.serving, "fetch by a peer", "fetches by peers"),
        (held.copies, "copy", "copies"),
        (held.leaving, "object to leave", "objects to leave"),
        (held.quarantine, "slot in quarantine", "slots in quarantine"),
    ];
    let some: Vec<String> = counts
        .iter()
        .filter(|(count, ..)| *count > 0)
        .map(|(count, one, many)| format!("{count} {}", if *count == 1 { one } else { many }))
        .collect();
    if some.is_empty() { "nothing".into() } else { some.join(", ") }
}

fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{:.1} s", time.as_secs_f64()),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, _, _) => format!("{hours} h {minutes} min"),
        _ => format!("{days} d {hours} h"),
    }
}

fn stats(way: &Way) -> Result<(), Error> {
    match way.connect()?.ask(&AdminRequest::Counters)? {
        AdminReply::Counters(values) => {
            let object: serde_json::Map<_, _> =
                values.iter().map(|(name, value)| (name.clone(), (*value).into())).collect();
            let width = values.iter().map(|(_, value)| value.to_string().len()).max().unwrap_or(0);
            let lines = values.iter().map(|(name, value)| format!("{value:>width$}  {name}\n"));
            way.print(&object, || lines.collect())
        }
        other => Err(another(&other)),
    }
}

#[derive(Serialize)]
struct KeyLine {
    key: String,
    medium: &'static str,
    position: u32,
    bytes: u64,
    held: bool,
    parent: String,
    namespace: String,
    tenant: String,
}

fn keys(way: &Way, prefix: Prefix, limit: Option<u64>, medium: Option<OnMedium>) -> Result<(), Error> {
    let medium = medium.map(Medium::from);
    let mut client = way.connect()?;
    let mut out = BufWriter::new(io::stdout().lock());
    if !way.json {
        let head = format!("{:<32}  medium  position  held  {:>10}  parent", "key", "bytes");
        if let Err(error) = writeln!(out, "{head}") {
            return gone(error);
        }
    }
    let mut left = limit.unwrap_or(u64::MAX);
    let mut from = Some(Cursor::default());
    while let Some(at) = from.filter(|_| left > 0) {
        let (blocks, next) = match client.ask(&AdminRequest::Keys { from: at, prefix, medium })? {
            AdminReply::Keys { blocks, next } => (blocks, next),
            other => return Err(another(&other)),
        };
        for block in blocks.iter().take(usize::try_from(left).unwrap_or(usize::MAX)) {
            if let Err(error) = writeln!(out, "{}", key_line(block, way.json)?) {
                return gone(error);
            }
        }
        left = left.saturating_sub(blocks.len() as u64);
        from = next;
    }
    out.flush().or_else(gone)
}

fn key_line(block: &Listed, as_json: bool) -> Result<String, Error> {
    let Listed { position, bytes, held, .. } = *block;
    let line = KeyLine {
        key: hex(&block.key),
        medium: block.medium.name(),
        position,
        bytes,
        held,
        parent: hex(&block.parent),
        namespace: format!("{:016x}", block.owner.namespace),
        tenant: format!("{:016x}", block.owner.tenant),
    };
    if as_json {
        return json(&line);
    }
    let KeyLine { key, medium, parent, .. } = line;
    let held = if held { "yes" } else { "no" };
    Ok(format!("{key}  {medium:<6}  {position:<8}  {held:<4}  {bytes:>10}  {parent}"))
}

#[derive(Serialize, Default)]
struct VerifyLine {
    blocks: u64,
    bytes: u64,
    gone: u64,
    failed: u64,
    bad: Vec<String>,
}

impl VerifyLine {
    fn add(&mut self, found: &Verified) {
        self.blocks += found.blocks;
        self.bytes += found.bytes;
        self.gone += found.gone;
        self.failed += found.failed;
        self.bad.extend(found.bad.iter().map(hex));
    }

    fn text(&self, medium: &str) -> String {
        let Self { blocks, bytes, gone, failed, .. } = self;
        let mut text = format!("{medium}: {blocks} blocks, {bytes} bytes read; {gone} were gone before their turn\n");
        if *failed > 0 {
            text += &format!("{medium}: {failed} blocks could not be read\n");
        }
        self.bad.iter().for_each(|key| text += &format!("{medium}: rotten: {key}\n"));
        text
    }
}

fn verify(way: &Way, medium: Option<OnMedium>) -> Result<(), Error> {
    let (mut client, medium) = (way.connect()?, medium.map(Medium::from));
    let stored: BTreeMap<String, u64> = match client.ask(&AdminRequest::Status)? {
        AdminReply::Status(status) => status.tiers.into_iter().map(|tier| (tier.medium, tier.blocks)).collect(),
        other => return Err(another(&other)),
    };
    let mut all: BTreeMap<&str, VerifyLine> = BTreeMap::new();
    let (mut from, mut told) = (Some(Cursor::default()), Instant::now());
    while let Some(at) = from {
        let (on, found, next) = match client.ask(&AdminRequest::Verify { from: at, medium })? {
            AdminReply::Verified { medium, found, next } => (medium, found, next),
            other => return Err(another(&other)),
        };
        let line = all.entry(on.name()).or_default();
        line.add(&found);
        if told.elapsed() >= PROGRESS {
            let of = stored.get(on.name()).copied().unwrap_or(0).max(line.blocks);
            eprintln!("{}: {} of {of} blocks read", on.name(), line.blocks);
            told = Instant::now();
        }
        from = next;
    }
    way.print(&all, || all.iter().map(|(medium, line)| line.text(medium)).collect())?;
    let sum = |medium: &str, count: fn(&VerifyLine) -> u64| all.get(medium).map_or(0, count);
    let bad = |medium| sum(medium, |line| line.bad.len() as u64);
    let (dram, ssd, failed) = (bad("dram"), bad("ssd"), sum("ssd", |line| line.failed));
    let mut wrong = Vec::new();
    if dram + ssd > 0 {
        let test = match (dram, ssd) {
            (_, 0) => "memory",
            (0, _) => "disks",
            _ => "memory and disks",
        };
        wrong.push(format!(
            "{} blocks did not fit their checksums and were dropped: they will be computed again; test this machine's {test}",
            dram + ssd
        ));
    }
    if failed > 0 {
        wrong.push(format!("{failed} blocks on SSD could not be read: the disk fails; see `transferd status`"));
    }
    if wrong.is_empty() { Ok(()) } else { Err(Error::retry(wrong.join("; "))) }
}

fn evict(way: &Way, keys: &[BlockKey]) -> Result<(), Error> {
    let mut client = way.connect()?;
    let mut sum = Evicted::default();
    for keys in keys.chunks(KEYS_LIMIT) {
        drop_some(&mut client, &AdminRequest::Evict { keys: keys.to_vec() }, &mut sum)?;
    }
    say_evicted(way, sum)?;
    match sum.held + sum.missing {
        0 => Ok(()),
        left => Err(Error::retry(format!("{left} of {} were not dropped", keys.len()))),
    }
}

/// All that nobody holds, or what an owner has.
fn evict_all(way: &Way, whose: Option<Whose>) -> Result<(), Error> {
    let mut client = way.connect()?;
    let mut sum = Evicted::default();
    let mut from = Some(Cursor::default());
    while let Some(at) = from {
        from = drop_some(&mut client, &AdminRequest::EvictAll { from: at, whose }, &mut sum)?;
    }
    say_evicted(way, sum)?;
    match (whose, sum.held) {
        (None, _) | (_, 0) => Ok(()),
        (_, held) => Err(Error::retry(format!("{held} blocks are held and were kept: ask again when they are let go"))),
    }
}

fn drop_some(client: &mut AdminClient, request: &AdminRequest, sum: &mut Evicted) -> Result<Option<Cursor>, Error> {
    match client.ask(request)? {
        AdminReply::Evicted { evicted, next } => {
            sum.dropped += evicted.dropped;
            sum.held += evicted.held;
            sum.missing += evicted.missing;
            Ok(next)
        }
        other => Err(another(&other)),
    }
}

fn say_evicted(way: &Way, sum: Evicted) -> Result<(), Error> {
    let Evicted { dropped, held, missing } = sum;
    way.print(&sum, || format!("{dropped} dropped, {held} held and kept, {missing} not there\n"))
}

#[derive(Serialize)]
struct DrainLine {
    draining: bool,
    held: Held,
    moving: Moving,
}

fn drain(way: &Way, within: Duration) -> Result<(), Error> {
    let mut client = way.connect()?;
    let until = Instant::now() + within;
    let mut told = String::new();
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let within_ms = left.min(PROGRESS).as_millis() as u64;
        let (draining, held, moving) = match client.ask(&AdminRequest::Drain { on: true, within_ms })? {
            AdminReply::Drain { draining, held, moving } => (draining, held, moving),
            other => return Err(another(&other)),
        };
        let line = DrainLine { draining, held, moving };
        let node = &client.node().node;
        if held.is_nothing() && moving.over {
            let text = drain_text(&held, &moving);
            return way.print(&line, || format!("{node} is drained: {text}, nothing new is taken on\n"));
        }
        let text = drain_text(&held, &moving);
        if left.is_zero() {
            way.print(&line, || format!("{node} drains: {text}\n"))?;
            return Err(Error::retry(
                "it is not done; nothing new is taken on: ask again, stop the daemon anyway, or `drain --cancel`",
            ));
        }
        if text != told {
            eprintln!("{node} drains: {text}");
            told = text;
        }
    }
}

/// What a drain has done and waits for, as far as there is anything.
fn drain_text(held: &Held, moving: &Moving) -> String {
    let Moving { blocks, objects, left, over } = *moving;
    let mut text = match (blocks, over) {
        (0, true) => String::new(),
        (_, true) => format!("{blocks} blocks moved, "),
        (_, false) => format!("{blocks} blocks moved, {left} to go, "),
    };
    if objects > 0 {
        text += &format!("{objects} objects moved, ");
    }
    text += &held_text(held);
    text + if held.is_nothing() { " is held" } else { " held" }
}

fn cancel(way: &Way) -> Result<(), Error> {
    let mut client = way.connect()?;
    match client.ask(&AdminRequest::Drain { on: false, within_ms: 0 })? {
        AdminReply::Drain { draining, held, moving } => {
            let node = &client.node().node;
            way.print(&DrainLine { draining, held, moving }, || format!("{node} takes on work again\n"))
        }
        other => Err(another(&other)),
    }
}

#[cfg(test)]
mod tests {
    //! Goal: numbers and tables read well. Method: examples.
    use super::*;

    #[test]
    fn times_and_tables() {
        let seconds = [0.25, 61.0, 3600.0 * 5.0 + 120.0, 86_400.0 * 3.0 + 3600.0];
        let texts = seconds.map(|seconds| duration(Duration::from_secs_f64(seconds)));
        assert_eq!(texts, ["0.2 s", "1 min 1 s", "5 h 2 min", "3 d 1 h"]);
        let rows = [["a".to_owned(), "22".to_owned()], ["long name".to_owned(), String::new()]];
        assert_eq!(table(["x", "number"], rows.into_iter()), "\n  x          number\n  a          22\n  long name\n");
        assert_eq!(table(["x"], std::iter::empty()), "");
        assert_eq!(held_text(&Held { tags: 1, copies: 2, ..Held::default() }), "1 tag, 2 copies");
        assert_eq!(held_text(&Held::default()), "nothing");
        let moving = Moving { blocks: 3, objects: 5, left: 2, over: false };
        let text = "3 blocks moved, 2 to go, 5 objects moved, nothing is held";
        assert_eq!(drain_text(&Held::default(), &moving), text);
        let held = Held { tags: 1, ..Held::default() };
        let moving = Moving { objects: 0, over: true, ..moving };
        assert_eq!(drain_text(&held, &moving), "3 blocks moved, 1 tag held");
        assert_eq!(drain_text(&held, &Moving { over: true, ..Moving::default() }), "1 tag held");
    }

    #[test]
    fn a_drain_waits_as_long_as_a_signal_does() {
        use clap::Parser;

        #[derive(Parser)]
        struct Line {
            #[command(subcommand)]
            command: Command,
        }

        let line = Line::try_parse_from(["transferd", "drain"]).expect("good flags");
        let default = Duration::from_secs(transfer::config::DRAIN_SECONDS);
        assert!(matches!(line.command, Command::Drain { within, cancel: false, .. } if within == default));
    }

    #[test]
    fn keys_are_whole() {
        assert_eq!(key(&"0f".repeat(16)), Ok(BlockKey([15; 16])));
        assert!(key("0f").expect_err("short").contains("32 hex digits, not 2"));
        assert!(key("no").is_err());
        assert_eq!(digest("00000000000000ff"), Ok(255));
        for wrong in ["", "+5", "0x5", "12345678123456781"] {
            assert!(digest(wrong).is_err(), "{wrong:?}");
        }
    }
}

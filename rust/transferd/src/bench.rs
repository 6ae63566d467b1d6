//! `transferd bench`: copies to and from a `transferd target`, in every combination of the sizes asked for.
//!
//! A transfer is a batch of scattered blocks: block `i` of the one side is block `i * step mod batch` of the other. One is
//! under way at a time, each takes the next part of the memory, so that neither end is warm once the memory is larger
//! than the caches. Its latency is from the call to its end.

use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::Serialize;
use transfer::endpoint::{Copies, Endpoint, How, Peer, RegionHandle, Registration};
use transfer::error::Error;
use transfer::mover::Ended;
use transfer::region::Access;
use transfer::transport::Op;

use crate::engine::{EngineArguments, REGION, microseconds, seconds, size, size_name};

/// Latencies that are kept of one combination (64 MiB of them); later ones replace the earliest.
const SAMPLES: usize = 4 << 20;
/// Most places in the memory that the batches of one combination take turns in.
const PLACES: u64 = 1024;
/// Transfers that do not end by themselves are given up after this long.
const DEADLINE: Duration = Duration::from_secs(60);

/// Flags.
#[derive(clap::Args, Debug)]
pub struct Arguments {
    /// `host:port` of a `transferd target`
    #[arg(value_name = "TARGET")]
    peer: String,
    #[command(flatten)]
    engine: EngineArguments,
    /// Which ways
    #[arg(long, value_delimiter = ',', default_value = "write,read")]
    op: Vec<Way>,
    /// Bytes of a block
    #[arg(long, value_delimiter = ',', default_value = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB", value_parser = size)]
    block: Vec<u64>,
    /// Blocks of a transfer
    #[arg(long, value_delimiter = ',', default_value = "1,16,128,1024", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    batch: Vec<u64>,
    /// Most lanes (connections); as many as the engine finds best, if not given
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=64))]
    lanes: Vec<u16>,
    /// How long to measure each combination
    #[arg(long, default_value = "1", value_parser = seconds)]
    seconds: Duration,
    /// Write fresh bytes, read them back into other memory, and compare every byte (instead of `--op`)
    #[arg(long)]
    verify: bool,
    /// Send no checksums
    #[arg(long)]
    no_checksums: bool,
    /// One JSON object a line instead of a table
    #[arg(long)]
    json: bool,
}

/// Which way bytes go, seen from here.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// Into the target's memory
    Write,
    /// Out of it
    Read,
}

impl Way {
    fn op(self) -> Op {
        match self {
            Self::Write => Op::Write,
            Self::Read => Op::Read,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
        }
    }
}

/// One line of the table.
#[derive(Serialize)]
struct Row {
    op: &'static str,
    block: u64,
    batch: u64,
    lanes: Option<u16>,
    checksums: bool,
    /// The path of the last transfer.
    transport: &'static str,
    gb_per_s: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    transfers: usize,
    /// Pieces that were sent again, and transfers that fell back to another path.
    retries: u64,
    fallbacks: u64,
    /// Bytes that were compared.
    verified: u64,
}

/// Measures and prints.
pub fn run(arguments: &Arguments) -> Result<(), Error> {
    let mut table = Table { json: arguments.json, begun: false };
    let lanes: Vec<_> = match arguments.lanes.as_slice() {
        [] => vec![None],
        lanes => lanes.iter().copied().map(Some).collect(),
    };
    for lanes in lanes {
        let endpoint = arguments.engine.start(None, |settings| {
            settings.checksums = !arguments.no_checksums;
            settings.lanes = lanes.map(usize::from);
        })?;
        let peer = endpoint.connect(&arguments.peer, arguments.engine.transport.via(), arguments.engine.timeout)?;
        let remote = peer.find(REGION, arguments.engine.timeout)?;
        let mut measuring = Measuring::new(arguments, &endpoint, &peer, remote, lanes)?;
        for &block in &arguments.block {
            for &batch in &arguments.batch {
                // What is larger than the memory is left out.
                if block > 0 && block.checked_mul(batch).is_some_and(|bytes| bytes <= measuring.remote.bytes) {
                    measuring.combination(block, batch, &mut table)?;
                }
            }
        }
        endpoint.close();
    }
    if table.begun {
        Ok(())
    } else {
        Err(Error::give_up("nothing fits: the target has less memory than one batch (start it with more --bytes)"))
    }
}

struct Measuring<'a> {
    arguments: &'a Arguments,
    endpoint: &'a Endpoint,
    peer: &'a Peer,
    remote: RegionHandle,
    lanes: Option<u16>,
    /// What is written, and what is read where nothing is verified.
    source: Registration,
    /// What is read back into.
    back: Option<Registration>,
    /// So that no two rounds write the same bytes.
    seed: u64,
}

impl<'a> Measuring<'a> {
    fn new(
        arguments: &'a Arguments,
        endpoint: &'a Endpoint,
        peer: &'a Peer,
        remote: RegionHandle,
        lanes: Option<u16>,
    ) -> Result<Self, Error> {
        let bytes =
            usize::try_from(remote.bytes).map_err(|_| Error::give_up("the target has more memory than fits"))?;
        // Nobody but this engine itself may touch it.
        let allocate = || endpoint.allocate(bytes, Access { read: false, write: false }, None);
        let back = if arguments.verify { Some(allocate()?) } else { None };
        Ok(Self { arguments, endpoint, peer, remote, lanes, source: allocate()?, back, seed: 0 })
    }

    fn combination(&mut self, block: u64, batch: u64, table: &mut Table) -> Result<(), Error> {
        let places = (self.remote.bytes / (block * batch)).clamp(1, PLACES);
        let copies = |local: &Registration| {
            (0..places).map(|place| scattered(local, &self.remote, place * block * batch, block, batch)).collect()
        };
        let there: Vec<Copies> = copies(&self.source)?;
        let back: Option<Vec<Copies>> = self.back.as_ref().map(copies).transpose()?;
        let shape = (block, batch);
        if let Some(back) = back {
            let (mut write, mut read) = (Samples::default(), Samples::default());
            let mut verified = 0;
            let start = Instant::now();
            for place in (0..there.len()).cycle() {
                let at = place * (block * batch) as usize..(place + 1) * (block * batch) as usize;
                self.seed += 1;
                fill(&mut bytes_of(&mut self.source)[at.clone()], self.seed);
                // Were nothing read, this would be found.
                let into = self.back.as_mut().unwrap_or_else(|| unreachable!("allocated if bytes are to be verified"));
                fill(&mut bytes_of(into)[at.clone()], !self.seed);
                self.transfer(Op::Write, &there[place], &mut write)?;
                self.transfer(Op::Read, &back[place], &mut read)?;
                let into = self.back.as_mut().unwrap_or_else(|| unreachable!("as above"));
                compare(&bytes_of(into)[at.clone()], self.seed, at.start)?;
                verified += block * batch;
                if start.elapsed() >= self.arguments.seconds {
                    break;
                }
            }
            table.row(&self.row(Way::Write, shape, write, verified))?;
            table.row(&self.row(Way::Read, shape, read, verified))?;
            return Ok(());
        }
        for &way in &self.arguments.op {
            // The first one makes lanes and page tables.
            self.transfer(way.op(), &there[0], &mut Samples::default())?;
            let mut samples = Samples::default();
            let start = Instant::now();
            for copies in there.iter().cycle() {
                self.transfer(way.op(), copies, &mut samples)?;
                if start.elapsed() >= self.arguments.seconds {
                    break;
                }
            }
            table.row(&self.row(way, shape, samples, 0))?;
        }
        Ok(())
    }

    fn transfer(&self, op: Op, copies: &Copies, samples: &mut Samples) -> Result<(), Error> {
        let how = How { deadline: Some(DEADLINE), wait: DEADLINE, ..How::default() };
        let start = Instant::now();
        let transfer = self.endpoint.run(self.peer, op, copies, how, DEADLINE)?;
        // It ends at its deadline at the latest, and 3 s later it is quiet.
        while !transfer.wait(DEADLINE) {}
        samples.add(start.elapsed());
        transfer.result()?;
        if let Some(Ended::Done { via, fallback, retries }) = transfer.outcome() {
            samples.transport = via.name();
            samples.fallbacks += u64::from(fallback);
            samples.retries += u64::from(retries);
        }
        Ok(())
    }

    fn row(&self, way: Way, (block, batch): (u64, u64), mut samples: Samples, verified: u64) -> Row {
        samples.times.sort_unstable();
        let [p50_us, p99_us, p999_us] = [500, 990, 999].map(|per_mille| microseconds(&samples.times, per_mille));
        Row {
            op: way.name(),
            block,
            batch,
            lanes: self.lanes,
            checksums: !self.arguments.no_checksums,
            transport: samples.transport,
            gb_per_s: samples.transfers as f64 * (block * batch) as f64 / samples.all.as_secs_f64() / 1e9,
            p50_us,
            p99_us,
            p999_us,
            transfers: samples.transfers,
            retries: samples.retries,
            fallbacks: samples.fallbacks,
            verified,
        }
    }
}

/// A batch of blocks at `offset` of both sides.
fn scattered(
    local: &Registration,
    remote: &RegionHandle,
    offset: u64,
    block: u64,
    batch: u64,
) -> Result<Copies, Error> {
    // The golden section spreads best; with no factor in common every block is met once.
    let step = (batch * 618 / 1000..).find(|&step| step > 0 && common_divisor(step, batch) == 1).unwrap_or(1);
    let mut copies = Copies::build();
    for index in 0..batch {
        copies.add(local, offset + index * block, remote, offset + index * step % batch * block, block)?;
    }
    Ok(copies.finish())
}

fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// The memory of a region that only this engine's own transfers touch, while none is under way.
fn bytes_of(region: &mut Registration) -> &mut [u8] {
    let buffer = region.buffer();
    // SAFETY: the registration keeps the memory mapped, and nobody else has a reference: peers may neither read nor write
    // it, and this thread waits for each transfer before it comes here again.
    unsafe { std::slice::from_raw_parts_mut(buffer.pointer().as_ptr(), buffer.bytes() as usize) }
}

/// What the word at this place has to be.
fn word(seed: u64, index: usize) -> u64 {
    // The first factor keeps rounds apart by more than a region has words.
    seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(index as u64).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

/// Fills with bytes that no other seed and no other place has.
fn fill(bytes: &mut [u8], seed: u64) {
    for (index, bytes) in bytes.chunks_mut(8).enumerate() {
        bytes.copy_from_slice(&word(seed, index).to_le_bytes()[..bytes.len()]);
    }
}

/// Whether all bytes are those of `fill`. `at` is where they begin in the region.
fn compare(bytes: &[u8], seed: u64, at: usize) -> Result<(), Error> {
    for (index, bytes) in bytes.chunks(8).enumerate() {
        let expected = &word(seed, index).to_le_bytes()[..bytes.len()];
        if bytes != expected {
            return Err(Error::bug(format!(
                "wrong bytes at {} of round {seed}: {bytes:02x?} came back, {expected:02x?} were written",
                at + 8 * index
            )));
        }
    }
    Ok(())
}

#[derive(Default)]
struct Samples {
    times: Vec<Duration>,
    transfers: usize,
    all: Duration,
    transport: &'static str,
    retries: u64,
    fallbacks: u64,
}

impl Samples {
    fn add(&mut self, took: Duration) {
        if self.times.len() < SAMPLES {
            self.times.push(took);
        } else {
            self.times[self.transfers % SAMPLES] = took;
        }
        self.transfers += 1;
        self.all += took;
    }
}

struct Table {
    json: bool,
    begun: bool,
}

impl Table {
    fn row(&mut self, row: &Row) -> Result<(), Error> {
        if self.json {
            println!("{}", serde_json::to_string(row).map_err(|error| Error::bug(error.to_string()))?);
        } else {
            if !self.begun {
                println!(
                    "{:<6}{:>8}{:>7}{:>6}{:>6}{:>9}{:>12}{:>12}{:>12}{:>11}{:>11}",
                    "op",
                    "block",
                    "batch",
                    "lanes",
                    "path",
                    "GB/s",
                    "p50 us",
                    "p99 us",
                    "p99.9 us",
                    "transfers",
                    "verified"
                );
            }
            let lanes = row.lanes.map_or_else(|| "auto".into(), |lanes| lanes.to_string());
            let mut line = format!(
                "{:<6}{:>8}{:>7}{:>6}{:>6}{:>9.3}{:>12.1}{:>12.1}{:>12.1}{:>11}{:>11}",
                row.op,
                size_name(row.block),
                row.batch,
                lanes,
                row.transport,
                row.gb_per_s,
                row.p50_us,
                row.p99_us,
                row.p999_us,
                row.transfers,
                if row.verified > 0 { format!("{:.1} GB", row.verified as f64 / 1e9) } else { "-".into() },
            );
            if row.retries + row.fallbacks > 0 {
                line += &format!("  {} pieces sent again, {} fell back", row.retries, row.fallbacks);
            }
            println!("{line}");
        }
        self.begun = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    //! Goal: what `--verify` compares with is what it wrote, and any wrong byte is found. Method: flip each byte.
    use super::*;

    #[test]
    fn every_byte_counts() {
        let mut bytes = vec![0; 4097];
        fill(&mut bytes, 7);
        assert_eq!(compare(&bytes, 7, 0), Ok(()));
        for at in 0..bytes.len() {
            bytes[at] ^= 1;
            let error = compare(&bytes, 7, 100).expect_err("a byte is wrong").message;
            assert!(error.contains(&format!("at {}", 100 + at / 8 * 8)), "{error}");
            bytes[at] ^= 1;
        }
        for (old, new) in [(8, 7), (!7, 7)] {
            fill(&mut bytes, old);
            assert!(compare(&bytes, new, 0).is_err(), "bytes of round {old} pass for those of {new}");
        }
    }
}

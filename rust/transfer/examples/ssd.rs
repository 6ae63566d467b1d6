//! Measures the SSD tier on a directory, turn by turn: what `bench/pool_ssd.py` puts beside fio.
//!
//! `cargo run --release -p pyengine-transfer --example ssd -- DIR LIMIT BLOCK [ring|threads]`
//!
//! LIMIT is what the tier may take of DIR, BLOCK the bytes of a block. Each line of the standard input is a turn, answered by a line
//! with one JSON object: turn, seconds, bytes, blocks (that are there now), io (how the tier speaks to the disk).
//!
//! ```text
//! write BYTES DEPTH      new blocks are written with DEPTH of them under way, and flushed
//! read BYTES DEPTH       blocks are read in the order in which they were written, from any of them on
//! randread BYTES DEPTH   blocks are read in no order
//! open                   the directory is opened, which it is anyway before the first of these
//! close                  it is closed well, so that all segments have their footers
//! kill                   the process ends as if it were killed
//! scan DEPTH             all pages of the directory's segments are read, DEPTH MiB at a time: what a start must be faster than
//! bare-... BYTES DEPTH   the first three, by DEPTH threads on one file (DIR/bare), with a sync where the tier has one
//! ```

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant, SystemTime};

use pyengine_transfer::memory::{Arena, checksum};
use pyengine_transfer::pool::Place;
use pyengine_transfer::pool::disk::io::Pages;
use pyengine_transfer::pool::disk::{By, Ssd, segment_bytes};
use pyengine_transfer::pool::tier::{Fate, OpId, Record, Tier, TierEvent};
use pyengine_transfer::random::Random;
use pyengine_transfer::types::{BlockKey, Layout, Owner, SlotRef};

const MIB: u64 = 1 << 20;
/// The most blocks under way.
const DEPTH: u64 = 64;

struct Bench {
    ssd: Ssd,
    rung: mpsc::Receiver<()>,
    arena: Arc<Arena>,
    layout: Layout,
    free: Vec<u32>,
    under_way: HashMap<OpId, SlotRef>,
    next_op: OpId,
    fates: BTreeMap<String, u64>,
}

fn key(number: u64) -> BlockKey {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&number.to_le_bytes());
    BlockKey(key)
}

fn number(key: &BlockKey) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&key.0[..8]);
    u64::from_le_bytes(number)
}

impl Bench {
    fn open(directory: &Path, limit: u64, layout: Layout, by: Option<By>) -> Self {
        let (ring, rung) = mpsc::channel();
        let notify = move || {
            // The tier may outlive the receiver for a moment.
            let _ = ring.send(());
        };
        let directories = [directory.to_owned()];
        let ssd = match by {
            None => Ssd::open(&directories, limit, notify),
            Some(by) => Ssd::open_by(by, &directories, limit, notify),
        };
        let ssd = ssd.unwrap_or_else(|error| fail(&error.message));
        let arena = Arena::create((DEPTH + 1) * (layout.block_bytes() as u64 + 4096), layout);
        let arena = arena.unwrap_or_else(|error| fail(&error.message));
        let (free, under_way, fates) = (Vec::new(), HashMap::new(), BTreeMap::new());
        Self { ssd, rung, arena, layout, free, under_way, next_op: 0, fates }
    }

    fn turn(&mut self, turn: &str, bytes: u64, depth: u64) -> Duration {
        let (count, numbers) = (bytes / self.layout.block_bytes() as u64, self.numbers());
        self.free = (0..depth.min(DEPTH) as u32).collect();
        // Never twice the same, and rising from turn to turn: keys must be new.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_nanos() as u64;
        let mut random = Random(now);
        let pick = |at: u64| numbers[(at % numbers.len() as u64) as usize];
        let time = match turn {
            "write" => self.write(now..now + count),
            "read" | "randread" if numbers.is_empty() => fail("nothing was written"),
            "read" => {
                let first = random.below(numbers.len() as u64);
                self.read((first..first + count).map(pick))
            }
            "randread" => self.read((0..count).map(|_| pick(random.bits()))),
            other => fail(&format!("there is no turn {other:?}")),
        };
        if !self.fates.is_empty() {
            fail(&format!("not all ended well: {:?}", self.fates));
        }
        time
    }

    fn record(&self, number: u64) -> Record {
        let place = Place { key: key(number), parent: BlockKey([0; 16]), position: 0 };
        Record { place, owner: Owner::default(), layout: self.layout }
    }

    /// Takes in what has ended, at least one operation.
    fn step(&mut self) {
        loop {
            let mut ended = false;
            for event in self.ssd.poll() {
                if let TierEvent::Ended { op, fate } = event {
                    ended = true;
                    if fate != Fate::Done {
                        *self.fates.entry(format!("{fate:?}")).or_default() += 1;
                    }
                    if let Some(slot) = self.under_way.remove(&op) {
                        self.arena.retire(slot);
                        self.free.push(slot.slot);
                    }
                }
            }
            if ended {
                return;
            }
            self.rung.recv().expect("the tier has the other end");
        }
    }

    fn slot(&mut self) -> SlotRef {
        loop {
            if let Some(slot) = self.free.pop() {
                self.next_op += 1;
                return self.arena.issue(slot);
            }
            self.step();
        }
    }

    fn drain(&mut self) {
        while !self.under_way.is_empty() {
            self.step();
        }
    }

    fn write(&mut self, numbers: impl Iterator<Item = u64>) -> Duration {
        let strip = checksum(&vec![0; self.layout.strip_bytes as usize]);
        let begun = Instant::now();
        for number in numbers {
            let slot = self.slot();
            // The bytes lie there already: zeros, but for a number; whoever made them made the checksums.
            let mut hold = self.arena.begin_write(slot, 0..self.layout.strips).expect("a new life");
            let first = hold.strips_mut(0..1);
            first[..8].copy_from_slice(&number.to_le_bytes());
            let sum = checksum(first);
            hold.set_checksum(0, sum);
            (1..self.layout.strips).for_each(|index| hold.set_checksum(index, strip));
            drop(hold);
            assert!(self.arena.seal(slot));
            self.under_way.insert(self.next_op, slot);
            let block = self.arena.begin_read(slot).expect("sealed");
            self.ssd.write(self.next_op, self.record(number), block);
        }
        self.drain();
        self.next_op += 1;
        self.ssd.flush(self.next_op);
        self.step();
        begun.elapsed()
    }

    fn read(&mut self, numbers: impl Iterator<Item = u64>) -> Duration {
        let begun = Instant::now();
        for number in numbers {
            let slot = self.slot();
            let into = self.arena.begin_write(slot, 0..self.layout.strips).expect("a new life");
            self.under_way.insert(self.next_op, slot);
            self.ssd.read(self.next_op, &key(number), into);
        }
        self.drain();
        begun.elapsed()
    }

    /// All that are there, in the order in which they were written.
    fn numbers(&self) -> Vec<u64> {
        let mut numbers: Vec<u64> = self.ssd.records().map(|record| number(&record.place.key)).collect();
        numbers.sort_unstable();
        numbers
    }
}

/// The same by threads over one file.
fn bare(path: &Path, limit: u64, turn: &str, bytes: u64, depth: u64, block: u64) -> Duration {
    const DIRECT: i32 = 0o40000;
    let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).custom_flags(DIRECT).open(path);
    let file = open.unwrap_or_else(|error| fail(&format!("{}: {error}", path.display())));
    // As the tier's are after its first round: written before, so that none of it is allocated in the measured time.
    let length = limit / 5 * 4 / block * block;
    if file.metadata().map_or(0, |data| data.len()) < length {
        let mut pages = Pages::zeroed((MIB / 4096) as u32);
        pages.bytes_mut().fill(1);
        for offset in (0..length).step_by(MIB as usize) {
            file.write_all_at(&pages.bytes()[..MIB.min(length - offset) as usize], offset).expect("room");
        }
        file.sync_all().expect("a disk that works");
    }
    let (blocks, every) = (length / block, segment_bytes(limit) / block);
    static TURNS: AtomicU64 = AtomicU64::new(0);
    let seed = TURNS.fetch_add(1, Ordering::Relaxed) << 32;
    let (next, count, first) = (AtomicU64::new(0), bytes / block, Random(seed).below(blocks));
    let labour = |file: &File| {
        let mut pages = Pages::zeroed((block / 4096) as u32);
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count {
                return;
            }
            let place = if turn == "bare-randread" { Random(seed + at).below(blocks) } else { (first + at) % blocks };
            if turn == "bare-write" {
                file.write_all_at(pages.bytes(), place * block).expect("a disk that works");
                if at % every == every - 1 {
                    file.sync_data().expect("a disk that works");
                }
            } else {
                file.read_exact_at(pages.bytes_mut(), place * block).expect("a disk that works");
            }
        }
    };
    let begun = Instant::now();
    std::thread::scope(|scope| (0..depth).for_each(|_| drop(scope.spawn(|| labour(&file)))));
    if turn == "bare-write" {
        file.sync_data().expect("a disk that works");
    }
    begun.elapsed()
}

/// Reads all segments of a directory: seconds and bytes.
fn scan(directory: &Path, depth: u64) -> (Duration, u64) {
    let files = std::fs::read_dir(directory.join("segments")).unwrap_or_else(|error| fail(&error.to_string()));
    let mut parts = Vec::new();
    for file in files.map(|file| file.expect("a file").path()) {
        let opened = Arc::new(OpenOptions::new().read(true).custom_flags(0o40000).open(&file).expect("readable"));
        let bytes = opened.metadata().expect("a file").len();
        parts.extend((0..bytes).step_by(MIB as usize).map(|at| (opened.clone(), at, MIB.min(bytes - at))));
    }
    let next = AtomicU64::new(0);
    let labour = || {
        let mut pages = Pages::zeroed((MIB / 4096) as u32);
        while let Some((file, at, bytes)) = parts.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
            file.read_exact_at(&mut pages.bytes_mut()[..*bytes as usize], *at).expect("a disk that works");
        }
    };
    let begun = Instant::now();
    std::thread::scope(|scope| (0..depth).for_each(|_| drop(scope.spawn(labour))));
    (begun.elapsed(), parts.iter().map(|(_, _, bytes)| bytes).sum())
}

fn fail(why: &str) -> ! {
    eprintln!("{why}");
    std::process::exit(1);
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok());
    let (Some(directory), Some(limit), Some(block)) = (words.first(), number(1), number(2)) else {
        eprintln!("usage: ssd DIR LIMIT BLOCK [ring|threads], and turns on the standard input");
        std::process::exit(2);
    };
    let by = match words.get(3).map(String::as_str) {
        None => None,
        Some("ring") => Some(By::Ring),
        Some("threads") => Some(By::Threads),
        Some(other) => fail(&format!("there is no way {other}")),
    };
    let (directory, layout) = (PathBuf::from(directory), Layout { strips: 16, strip_bytes: (block / 16) as u32 });
    let mut bench = None;
    for line in std::io::stdin().lines() {
        let line = line.unwrap_or_else(|error| fail(&error.to_string()));
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok()).unwrap_or(16);
        let (turn, mut bytes, depth) = (words.first().copied().unwrap_or(""), number(1), number(2));
        let time = match turn {
            "scan" => {
                let (time, all) = scan(&directory, bytes);
                bytes = all;
                time
            }
            "kill" => std::process::exit(0),
            "close" => {
                let begun = Instant::now();
                let open: Option<Bench> = bench.take();
                open.into_iter().for_each(|mut open| open.ssd.close(Duration::from_secs(60)));
                begun.elapsed()
            }
            bare if bare.starts_with("bare-") => {
                std::fs::create_dir_all(&directory).unwrap_or_else(|error| fail(&error.to_string()));
                self::bare(&directory.join("bare"), limit, bare, bytes, depth, block)
            }
            _ => {
                let begun = Instant::now();
                let open = bench.get_or_insert_with(|| Bench::open(&directory, limit, layout, by));
                if turn == "open" { begun.elapsed() } else { open.turn(turn, bytes, depth) }
            }
        };
        let (seconds, open) = (time.as_secs_f64(), bench.as_ref());
        let (blocks, io) = open.map_or((0, ""), |open| (open.ssd.capacity().blocks, open.ssd.io()));
        println!(
            "{{\"turn\": \"{turn}\", \"seconds\": {seconds}, \"bytes\": {bytes}, \"blocks\": {blocks}, \"io\": \"{io}\"}}"
        );
    }
}

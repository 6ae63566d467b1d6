//! Measures the SSD tier on a directory: writes, reads and restarts, one JSON object a line.
//!
//! `cargo run --release -p pyengine-transfer --example ssd -- DIR [BYTES [DEPTH [BLOCK_BYTES...]]]`
//!
//! BYTES (2 GiB) are written and read with DEPTH (16) blocks under way, for each size of block (64 KiB and 1 MiB). What is in DIR/ssd-bench
//! afterwards is removed. The same with fio: `--rw=write|read|randread --bs=BLOCK_BYTES --iodepth=DEPTH --size=BYTES --direct=1`.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use pyengine_transfer::memory::{Arena, checksum};
use pyengine_transfer::pool::Place;
use pyengine_transfer::pool::disk::Ssd;
use pyengine_transfer::pool::tier::{Fate, OpId, Record, Tier, TierEvent};
use pyengine_transfer::random::Random;
use pyengine_transfer::types::{BlockKey, Layout, Owner, SlotRef};

struct Bench {
    ssd: Ssd,
    rung: mpsc::Receiver<()>,
    arena: Arc<Arena>,
    layout: Layout,
    free: Vec<u32>,
    under_way: HashMap<OpId, SlotRef>,
    next_op: OpId,
    fates: HashMap<Fate, u64>,
}

fn open(directory: &PathBuf, limit: u64) -> (Ssd, mpsc::Receiver<()>) {
    let (ring, rung) = mpsc::channel();
    let notify = move || {
        // The receiver goes last.
        let _ = ring.send(());
    };
    let ssd = Ssd::open(std::slice::from_ref(directory), limit, notify).unwrap_or_else(|error| {
        eprintln!("{error}");
        std::process::exit(1);
    });
    (ssd, rung)
}

impl Bench {
    fn record(&self, number: u64) -> Record {
        let mut key = [0; 16];
        key[..8].copy_from_slice(&number.to_le_bytes());
        let place = Place { key: BlockKey(key), parent: BlockKey([0; 16]), position: 0 };
        Record { place, owner: Owner::default(), layout: self.layout }
    }

    /// Takes in what has ended, at least one operation.
    fn step(&mut self) {
        loop {
            let mut ended = false;
            for event in self.ssd.poll() {
                if let TierEvent::Ended { op, fate } = event {
                    ended = true;
                    *self.fates.entry(fate).or_default() += 1;
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
            first.fill(0);
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
            let key = self.record(number).place.key;
            self.ssd.read(self.next_op, &key, into);
        }
        self.drain();
        begun.elapsed()
    }
}

fn size(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 20) { format!("{}MiB", bytes >> 20) } else { format!("{}KiB", bytes >> 10) }
}

fn line(case: &str, value: f64, unit: &str) {
    println!("{{\"bench\": \"ssd\", \"case\": \"{case}\", \"value\": {value:.4}, \"unit\": \"{unit}\"}}");
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let Some(directory) = arguments.next() else {
        eprintln!("usage: ssd DIR [BYTES [DEPTH [BLOCK_BYTES...]]]");
        std::process::exit(2);
    };
    let numbers: Vec<u64> = arguments.map(|text| text.parse().expect("a number")).collect();
    let (bytes, depth) = (numbers.first().copied().unwrap_or(2 << 30), numbers.get(1).copied().unwrap_or(16));
    let sizes = numbers.get(2..).filter(|sizes| !sizes.is_empty()).unwrap_or(&[64 << 10, 1 << 20]).to_vec();
    let directory = PathBuf::from(directory).join("ssd-bench");
    for block in sizes {
        let layout = Layout { strips: 16, strip_bytes: (block / 16) as u32 };
        // So that all of it is there when it is read, and what is written after that must make room.
        let limit = bytes / 4 * 5;
        let arena = Arena::create((depth + 1) * (block + 4096), layout).expect("memory for what is under way");
        let (ssd, rung) = open(&directory, limit);
        let free = (0..depth as u32).collect();
        let mut bench =
            Bench { ssd, rung, arena, layout, free, under_way: HashMap::new(), next_op: 0, fates: HashMap::new() };
        let count = bytes / block;
        let rate = |time: Duration, count: u64| (count * block) as f64 / time.as_secs_f64() / 1e9;
        let case = |what: &str| format!("ssd {what} {} depth {depth}", size(block));
        let time = bench.write(0..count);
        line(&case("write"), rate(time, count), "GB/s");
        let time = bench.read(0..count);
        line(&case("read"), rate(time, count), "GB/s");
        let mut random = Random(1);
        let time = bench.read((0..count).map(|_| random.below(count)));
        line(&case("randread"), rate(time, count), "GB/s");
        let time = bench.write(count..2 * count);
        line(&case("overwrite"), rate(time, count), "GB/s");
        let mut fates: Vec<_> = bench.fates.iter().map(|(fate, count)| format!("{fate:?}: {count}")).collect();
        fates.sort();
        eprintln!("{}, {:?}", fates.join(", "), bench.ssd.capacity());
        for clean in [false, true] {
            if clean {
                bench.ssd.close(Duration::from_secs(60));
            }
            let blocks = bench.ssd.capacity().blocks;
            drop(bench.ssd);
            let begun = Instant::now();
            (bench.ssd, bench.rung) = open(&directory, limit);
            let what = if clean { "start" } else { "start after a crash" };
            line(&format!("ssd {what} {blocks} blocks"), begun.elapsed().as_secs_f64(), "s");
            assert!(bench.ssd.capacity().blocks >= blocks);
        }
        drop(bench.ssd);
        std::fs::remove_dir_all(&directory).expect("it was ours");
    }
}

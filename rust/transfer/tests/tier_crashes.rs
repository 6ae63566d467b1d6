//! The segment log against a naive model, with crashes.
//!
//! Goal: whatever is done and wherever it stops, a block is right or missing; what was flushed is there. Method: a [`World`] does
//! random things to a log over a medium in memory, and keeps for each key the states that a crash may leave: all those since
//! the last flush, and the one it made durable. Then it stops (well, by `kill -9`, by power failure, at every single operation of
//! the medium), begins again and reads everything. A failing run prints its seed.

mod shelves;

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::sync::Arc;

use pyengine_transfer::memory::checksum;
use pyengine_transfer::pool::disk::format::{Entry, Life, Says, block_pages, digest, encode_batch, encode_life};
use pyengine_transfer::pool::disk::io::Medium;
use pyengine_transfer::pool::disk::twin::MemoryDisk;
use pyengine_transfer::pool::disk::{OVERHEAD, Ssd};
use pyengine_transfer::pool::null::Null;
use pyengine_transfer::pool::tier::{Fate, Health, OpId, Tier, TierEvent, Whose};
use pyengine_transfer::random::Random;

use shelves::{Bytes, Desk, PATIENCE, bell, content, key, number, number as number_of, record};

/// Eight segments of 64 KiB: about thirty blocks fill it.
const LIMIT: u64 = (8 << 16) + OVERHEAD;
const KEYS: u32 = 40;

/// What a key may be found as: this version, or not at all.
#[derive(Clone, Copy, Debug)]
struct State {
    version: Option<u32>,
    /// A flush makes it the oldest that may be found. (What the tier dropped or failed to write may be found as it was before.)
    hard: bool,
}

struct World {
    seed: u64,
    stop: Option<u64>,
    random: Random,
    disk: MemoryDisk,
    desk: Desk,
    states: BTreeMap<u32, Vec<State>>,
    /// What `find` must say when nothing is under way.
    live: BTreeMap<u32, u32>,
    writes: BTreeMap<OpId, (u32, u32, usize)>,
    /// How many states of each key a flush covers.
    flushes: BTreeMap<OpId, BTreeMap<u32, usize>>,
    versions: u32,
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {}, stopped after {:?}", self.seed, self.stop);
        }
    }
}

fn null_desk() -> Desk {
    let (ring, rung) = bell();
    Desk::new(Box::new(Null::default().notifying(ring)), rung)
}

impl World {
    /// A log on an empty disk; `None` if the disk fails before it is open.
    fn new(seed: u64, disk: MemoryDisk) -> Option<Self> {
        let mut world = Self {
            seed,
            stop: None,
            random: Random(seed),
            disk,
            desk: null_desk(),
            states: (0..KEYS).map(|key| (key, vec![State { version: None, hard: true }])).collect(),
            live: BTreeMap::new(),
            writes: BTreeMap::new(),
            flushes: BTreeMap::new(),
            versions: 0,
        };
        world.open().then_some(world)
    }

    fn open(&mut self) -> bool {
        let (ring, rung) = bell();
        let Ok(ssd) = Ssd::over(vec![Arc::new(self.disk.clone())], LIMIT, 0, self.seed, ring) else { return false };
        ssd.check();
        self.desk.replace(Box::new(ssd), rung);
        (self.writes, self.flushes) = (BTreeMap::new(), BTreeMap::new());
        true
    }

    fn push(&mut self, number: u32, version: Option<u32>, hard: bool) {
        self.states.get_mut(&number).expect("a key of the test").push(State { version, hard });
    }

    /// Takes in what the tier has told.
    fn heed(&mut self) {
        for event in std::mem::take(&mut self.desk.told) {
            match event {
                TierEvent::Dropped(key) => {
                    self.live.remove(&number(&key));
                    self.push(number(&key), None, false);
                }
                TierEvent::Ended { op, fate } => {
                    if let Some((number, version, at)) = self.writes.remove(&op) {
                        let later = self.states[&number].get(at + 1..).unwrap_or_default();
                        let removed = later.iter().any(|state| state.hard && state.version.is_none());
                        if fate == Fate::Done && !removed {
                            self.live.insert(number, version);
                        } else if fate != Fate::Done {
                            self.states.get_mut(&number).expect("a key of the test")[at].hard = false;
                        }
                    }
                    if let Some(covered) = self.flushes.remove(&op)
                        && fate == Fate::Done
                    {
                        self.flushed(covered);
                    }
                }
            }
        }
    }

    fn flushed(&mut self, covered: BTreeMap<u32, usize>) {
        for (number, count) in covered {
            let states = self.states.get_mut(&number).expect("a key of the test");
            let gone = states[..count].iter().rposition(|state| state.hard).expect("one is");
            for count in self.flushes.values_mut().filter_map(|flush| flush.get_mut(&number)) {
                *count -= gone;
            }
            for (_, _, at) in self.writes.values_mut().filter(|(key, _, _)| *key == number) {
                *at = at.saturating_sub(gone);
            }
            states.drain(..gone);
        }
    }

    /// Does something.
    fn step(&mut self) {
        let number = self.random.below(u64::from(KEYS)) as u32;
        match self.random.below(100) {
            0..45 => self.write(number),
            45..60 => self.read(number),
            60..70 => {
                // Also what the tier has dropped by itself: a copy may still lie there.
                self.desk.tier.remove(&key(number));
                self.live.remove(&number);
                self.push(number, None, true);
            }
            70 => {
                let whose = if self.random.permille(500) {
                    Whose::Tenant(self.random.below(3))
                } else {
                    Whose::Namespace(self.random.below(2))
                };
                self.desk.tier.clear(whose);
                for number in (0..KEYS).filter(|&number| whose.has(record(number).owner)) {
                    self.live.remove(&number);
                    self.push(number, None, true);
                }
            }
            71..77 => {
                let op = self.desk.flush();
                self.flushes.insert(op, self.states.iter().map(|(&key, states)| (key, states.len())).collect());
            }
            77..93 => self.desk.poll(),
            // Now and then something fails: half of the worlds have such a disk.
            93..95 => {
                let after = self.random.below(8);
                self.disk.fail_once_after((self.seed % 2 == 1).then_some(after));
            }
            _ => {
                self.desk.wait_all();
                self.desk.poll();
                self.heed();
                let found: Vec<u32> = self.desk.keys().iter().map(shelves::number).collect();
                let mut live: Vec<u32> = self.live.keys().copied().collect();
                live.sort_by_key(|&number| key(number));
                assert_eq!(found, live, "what is there when nothing is under way");
            }
        }
        self.heed();
    }

    fn write(&mut self, number: u32) {
        // One that is there or under way is not written again; its bytes would be the same.
        let under_way =
            self.writes.values().filter(|(key, _, _)| *key == number).map(|(_, version, _)| *version).next_back();
        let there = self.desk.tier.find(&key(number)).and_then(|_| self.live.get(&number).copied());
        let removed = self.states[&number].last().is_some_and(|state| state.version.is_none() && state.hard);
        let version = under_way.filter(|_| !removed).or(there).unwrap_or_else(|| {
            self.versions += 1;
            self.versions
        });
        self.push(number, Some(version), true);
        let op = self.desk.write(record(number), version);
        self.writes.insert(op, (number, version, self.states[&number].len() - 1));
    }

    fn read(&mut self, number: u32) {
        let op = self.desk.read(&record(number));
        self.desk.wait(op);
        let before = self.live.get(&number).copied();
        self.heed();
        match self.desk.read_result(op) {
            Ok(bytes) => {
                let versions = [before, self.live.get(&number).copied()];
                let right = versions.into_iter().flatten().any(|version| bytes == content(&record(number), version));
                assert!(right, "key {number}: not what was written");
            }
            // What is there can be read, if the disk works.
            Err(fate) => {
                let gone = before.is_none() || !self.live.contains_key(&number);
                assert!(gone || fate == Fate::Failed, "key {number}: {fate:?}");
            }
        }
    }

    /// Begins again on what a crash has left, and reads everything.
    fn verify(&mut self, left: MemoryDisk) {
        self.disk = left;
        self.disk.fail_once_after(None);
        assert!(self.open(), "a whole disk opens");
        self.live.clear();
        for number in 0..KEYS {
            let found = self.desk.get(&record(number));
            // It may have had to make room for its next segment.
            self.heed();
            let states = &self.states[&number];
            let version = match found {
                Ok(bytes) => {
                    let mut versions = states.iter().filter_map(|state| state.version);
                    let version = versions.find(|&version| bytes == content(&record(number), version));
                    assert!(version.is_some(), "key {number}: bytes that it cannot have: {states:?}");
                    version
                }
                Err(fate) => {
                    let durable = states.len() == 1 && states[0].version.is_some();
                    assert!(!durable, "key {number} was flushed, and is {fate:?}: {states:?}");
                    None
                }
            };
            self.states.insert(number, vec![State { version, hard: true }]);
            // It may have been dropped in the moment after it was read.
            let there = self.desk.tier.find(&key(number)).and(version);
            self.live.extend(there.map(|version| (number, version)));
        }
        // Torn blocks that the reads have found are removed durably with this.
        let op = self.desk.flush();
        assert_eq!(self.desk.wait(op), Fate::Done);
        self.heed();
        let found: Vec<u32> = self.desk.keys().iter().map(shelves::number).collect();
        assert_eq!(found.len(), self.live.len());
        assert!(self.disk.peak() + OVERHEAD <= LIMIT);
    }

    fn close_and_open(&mut self) {
        self.desk.wait_all();
        self.desk.poll();
        self.heed();
        self.desk.tier.close(PATIENCE);
        self.desk.poll();
        self.heed();
        let well = self.desk.tier.capacity().health == Health::Good;
        let before = self.live.clone();
        self.verify(self.disk.clone());
        if !well {
            return;
        }
        for (number, version) in before {
            assert_eq!(self.live.get(&number), Some(&version), "a clean stop loses nothing: key {number}");
        }
    }
}

// Goal: the model's, over long runs. Method: stops of each kind between random steps.
#[test]
fn random_lives() {
    for seed in 0..60 {
        let mut world = World::new(seed, MemoryDisk::default()).expect("it opens");
        for _ in 0..8 {
            for _ in 0..world.random.below(150) {
                world.step();
            }
            // What it has let go of by now; what it begins with this is not done before the next look.
            world.desk.poll();
            world.heed();
            match world.random.below(3) {
                0 => world.close_and_open(),
                1 => world.verify(world.disk.clone()),
                _ => {
                    let left = world.disk.crashed(&mut world.random);
                    world.verify(left);
                }
            }
        }
    }
}

/// Random steps on a disk that fails after so many operations; how many it has done.
fn run_until(seed: u64, stop: Option<u64>) -> (Option<World>, MemoryDisk) {
    let disk = MemoryDisk::default();
    disk.stop_after(stop);
    let world = World::new(seed, disk.clone()).map(|mut world| {
        for _ in 0..120 {
            world.step();
        }
        world.desk.wait_all();
        world.heed();
        world
    });
    (world, disk)
}

// Goal: a disk that fails at any moment harms nothing, and leaves what was flushed. Method: the same run, stopped at each of its
// operations; then a restart with and without the loss of what was not synced, which is itself stopped at each operation.
#[test]
fn stopped_at_every_operation() {
    for seed in [100, 102] {
        let operations = run_until(seed, None).1.operations();
        assert!(operations > 100, "{operations}");
        for stop in 0..operations {
            let (world, disk) = run_until(seed, Some(stop));
            let Some(mut world) = world else { continue };
            world.stop = Some(stop);
            disk.stop_after(None);
            let left = if stop.is_multiple_of(2) { disk.copy() } else { disk.crashed(&mut world.random) };
            // A restart that fails half-way, and the one after it.
            left.stop_after(Some(stop % 23));
            let mut other = Desk::new(Box::new(Null::default()), bell().1);
            let (ring, rung) = bell();
            if let Ok(ssd) = Ssd::over(vec![Arc::new(left.clone())], LIMIT, 0, 1, ring) {
                other.replace(Box::new(ssd), rung);
                (0..5).for_each(|_| other.poll());
            }
            for key in std::mem::take(&mut other.dropped) {
                world.push(number(&key), None, false);
            }
            drop(other);
            left.stop_after(None);
            let left = if stop.is_multiple_of(3) { left.crashed(&mut world.random) } else { left.copy() };
            world.verify(left);
        }
    }
}

/// A disk with some flushed blocks and a last one in the same segment; the segment's number, and the page of that last record.
fn disk_with_a_last_record(close: bool) -> (MemoryDisk, Vec<(u32, Bytes)>) {
    let disk = MemoryDisk::default();
    let (ring, rung) = bell();
    let mut desk =
        Desk::new(Box::new(Ssd::over(vec![Arc::new(disk.clone())], LIMIT, 0, 1, ring).expect("it opens")), rung);
    let blocks = [1, 2, 4, 5];
    for number in blocks {
        assert_eq!(desk.put(record(number), 9), Fate::Done);
    }
    let op = desk.flush();
    assert_eq!(desk.wait(op), Fate::Done);
    if close {
        desk.tier.close(PATIENCE);
    }
    (disk, blocks.map(|number| (number, content(&record(number), 9))).into())
}

/// Which of these blocks are there, right; the others must be missing.
fn survivors(desk: &mut Desk, disk: MemoryDisk, blocks: &[(u32, Bytes)]) -> Vec<u32> {
    let (ring, rung) = bell();
    desk.replace(Box::new(Ssd::over(vec![Arc::new(disk)], LIMIT, 0, 1, ring).expect("it opens")), rung);
    let there = blocks.iter().filter(|(number, expected)| match desk.get(&record(*number)) {
        Ok(bytes) => {
            assert_eq!(bytes, *expected, "a wrong byte of {number}");
            true
        }
        Err(fate) => {
            assert!(matches!(fate, Fate::Missing | Fate::Corrupt), "{fate:?}");
            assert_eq!(desk.tier.find(&key(*number)), None);
            false
        }
    });
    there.map(|(number, _)| *number).collect()
}

/// A log without threads on this disk.
fn desk_over(disk: &MemoryDisk) -> Desk {
    let (ring, rung) = bell();
    Desk::new(Box::new(Ssd::over(vec![Arc::new(disk.clone())], LIMIT, 0, 1, ring).expect("it opens")), rung)
}

// Goal: a device that fails for a moment while a log begins costs nothing: what could not be read is no torn end. Method: each
// operation of a start fails once, on a disk with footers and on one without; the start says so, and the next one has all.
#[test]
fn a_read_that_fails_at_the_start_costs_nothing() {
    let mut desk = null_desk();
    for close in [true, false] {
        let (disk, blocks) = disk_with_a_last_record(close);
        let all: Vec<u32> = blocks.iter().map(|(number, _)| *number).collect();
        for fails in 0.. {
            let disk = disk.copy();
            disk.fail_once_after(Some(fails));
            let begun = Ssd::over(vec![Arc::new(disk.clone())], LIMIT, 0, 1, || {});
            let failed = begun.is_err();
            if let Ok(mut ssd) = begun {
                // It goes on: what it takes for a torn end would be cut off.
                (0..20).for_each(|_| drop(ssd.poll()));
            }
            disk.fail_once_after(None);
            assert_eq!(survivors(&mut desk, disk, &blocks), all, "operation {fails} fails, closed: {close}");
            if !failed {
                assert!(fails > 3, "a start reads more than that");
                break;
            }
        }
    }
}

// Goal: a block that a crash caught half moved is where it was, after the next start and after the one behind it. Method: a
// segment as such a crash leaves it, with the header of the batch and nothing of the block; two clean stops.
#[test]
fn a_torn_move_costs_nothing_later_either() {
    let disk = MemoryDisk::default();
    let (mut desk, block) = (desk_over(&disk), record(1));
    let bytes = content(&block, 9);
    assert_eq!(desk.put(block, 9), Fate::Done);
    let op = desk.flush();
    assert_eq!(desk.wait(op), Fate::Done);
    desk.tier.close(PATIENCE);
    let life = Life { store: disk.store(), number: 50, nonce: 77 };
    let sums = bytes.0.chunks(block.layout.strip_bytes as usize).map(checksum);
    let entry = Entry { says: Says::Block(block, digest(sums)), page: 2 };
    let batch = encode_batch(life, 1, 1 + block_pages(block.layout), &[entry]);
    let write = |page: u64, bytes: &[u8]| disk.write(9, page * 4096, &mut [IoSlice::new(bytes)]);
    disk.allocate(9, 1 << 16).expect("there is room");
    write(0, encode_life(life).bytes()).and_then(|()| write(1, batch.bytes())).expect("a disk that works");
    for restart in 1..=3 {
        let mut desk = desk_over(&disk);
        assert_eq!(desk.get(&block), Ok(bytes.clone()), "restart {restart}");
        desk.tier.close(PATIENCE);
    }
}

// Goal: what was removed and flushed stays so, also what the tier had dropped a moment before. Method: a full log with some warm
// blocks; removals at each moment of a reclaim, a flush, a kill.
#[test]
fn removed_just_after_it_was_dropped() {
    let mut flushed = 0;
    for (warm, polls) in [3, 6, 9, 12].into_iter().flat_map(|warm| (0..6).map(move |polls| (warm, polls))) {
        let disk = MemoryDisk::default();
        let mut desk = desk_over(&disk);
        for number in 1..=warm {
            assert_eq!(desk.put(record(number), 9), Fate::Done);
            assert_eq!(desk.get(&record(number)), Ok(content(&record(number), 9)));
        }
        let mut number = 100;
        while desk.dropped.is_empty() {
            desk.write(record(number), 9);
            desk.poll();
            number += 1;
            assert!(number < 600, "it is never full");
        }
        (0..polls).for_each(|_| desk.poll());
        let gone = desk.dropped.clone();
        gone.iter().for_each(|key| assert!(!desk.tier.remove(key), "it was dropped"));
        let op = desk.flush();
        // No look more than it takes: the file may be used again by then.
        let done = |desk: &mut Desk| {
            desk.poll();
            desk.fates.get(&op) == Some(&Fate::Done)
        };
        if (0..8).any(|_| done(&mut desk)) {
            flushed += 1;
            let again = desk_over(&disk.copy());
            let back: Vec<u32> = gone.iter().filter(|key| again.tier.find(key).is_some()).map(number_of).collect();
            assert_eq!(back, [0; 0], "{warm} warm, {polls} polls");
        }
    }
    assert!(flushed > 0, "no flush was quick enough to prove anything");
}

/// The one segment with something in it.
fn written_file(disk: &MemoryDisk) -> u16 {
    let mut written = None;
    for (file, _) in disk.files() {
        disk.alter(file, |bytes| {
            if bytes.len() > 4096 && bytes[4096..4104] == *b"pyengBAT" {
                written = Some(file);
            }
        });
    }
    written.expect("one is")
}

// Goal: a torn last record harms none before it. Method: four blocks of two pages, each behind a header; the file is cut, and
// overwritten, from each byte of the last record (pages 10 to 12).
#[test]
fn torn_at_every_byte() {
    let (mut desk, (disk, blocks)) = (null_desk(), disk_with_a_last_record(false));
    let file = written_file(&disk);
    let last = 4096 * (1 + 3 + 3 + 3);
    disk.alter(file, |bytes| assert_eq!(bytes[last..last + 8], *b"pyengBAT"));
    assert_eq!(survivors(&mut desk, disk.copy(), &blocks), [1, 2, 4, 5]);
    for at in last..last + 3 * 4096 {
        let cut = disk.copy();
        cut.alter(file, |bytes| bytes.truncate(at));
        assert_eq!(survivors(&mut desk, cut, &blocks), [1, 2, 4], "cut at {at}");
        // The header's entries, and the edges of what follows; the rest in steps.
        if at > last + 200 && !at.is_multiple_of(61) {
            continue;
        }
        let torn = disk.copy();
        torn.alter(file, |bytes| bytes[at..last + 3 * 4096].fill(0xEE));
        // Behind the block's 6000 bytes there is only padding.
        let expected: &[u32] = if at >= last + 4096 + 6000 { &[1, 2, 4, 5] } else { &[1, 2, 4] };
        assert_eq!(survivors(&mut desk, torn, &blocks), expected, "torn at {at}");
    }
}

// Goal: rot anywhere costs blocks, never a wrong byte. Method: some bits of each page of a disk that was closed, and of one that
// was not.
#[test]
fn flipped_bits() {
    let (mut desk, mut random) = (null_desk(), Random(3));
    for close in [true, false] {
        let (disk, blocks) = disk_with_a_last_record(close);
        for (file, bytes) in disk.files() {
            for page in 0..bytes as usize / 4096 {
                for _ in 0..6 {
                    let rotten = disk.copy();
                    let bit = random.below(4096 * 8) as usize;
                    rotten.alter(file, |bytes| bytes[page * 4096 + bit / 8] ^= 1 << (bit % 8));
                    let there = survivors(&mut desk, rotten, &blocks).len();
                    // A flip in a header can cost what follows, one in a block that block.
                    assert!(
                        page == 0 || there > 0 || !close || page == bytes as usize / 4096 - 1,
                        "page {page}: {there}"
                    );
                }
            }
        }
    }
}

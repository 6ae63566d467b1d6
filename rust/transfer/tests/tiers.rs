//! What every tier promises (`pool::tier`), as one suite over all implementations.
//!
//! Goal: blocks are right or missing, limits hold, every operation ends once. Method: each expectation below is a function
//! over a [`Kind`] of tier, and `suites!` at the end makes it a test of each.

mod scratch;
mod shelves;

use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use pyengine_transfer::error::Error;
use pyengine_transfer::pool::disk::io::Medium;
use pyengine_transfer::pool::disk::twin::MemoryDisk;
use pyengine_transfer::pool::disk::{By, Ssd};
use pyengine_transfer::pool::null::Null;
use pyengine_transfer::pool::tier::{Fate, Health, Record, Tier, TierEvent, Whose};
use pyengine_transfer::pool::twin::{MemoryTier, Shelf};
use pyengine_transfer::types::{BlockKey, Layout};

use scratch::Scratch;
use shelves::{Desk, LAYOUTS, bell, content, key, number, record};

/// Small enough to be filled in a moment.
const LIMIT: u64 = 2 << 20;

/// A tier that can be opened again with what it kept.
trait Kind {
    fn new() -> Self;
    fn open(&self) -> (Box<dyn Tier>, mpsc::Receiver<()>);
    /// A directory with room for nothing keeps nothing, and says so.
    const KEEPS: bool = true;
    /// Why this machine has no such tier.
    fn refusal() -> Option<String> {
        None
    }
}

struct Memory(Shelf);

impl Kind for Memory {
    fn new() -> Self {
        Self(Shelf::default())
    }

    fn open(&self) -> (Box<dyn Tier>, mpsc::Receiver<()>) {
        let (ring, rung) = bell();
        (Box::new(MemoryTier::new(self.0.clone(), LIMIT, LIMIT / 8).notifying(ring)), rung)
    }
}

struct Nothing;

impl Kind for Nothing {
    const KEEPS: bool = false;

    fn new() -> Self {
        Self
    }

    fn open(&self) -> (Box<dyn Tier>, mpsc::Receiver<()>) {
        let (ring, rung) = bell();
        (Box::new(Null::default().notifying(ring)), rung)
    }
}

/// The log over memory; with threads or without.
struct Ssds<const DISKS: usize, const THREADS: usize>(Vec<MemoryDisk>);

impl<const DISKS: usize, const THREADS: usize> Kind for Ssds<DISKS, THREADS> {
    fn new() -> Self {
        Self((0..DISKS).map(|_| MemoryDisk::default()).collect())
    }

    fn open(&self) -> (Box<dyn Tier>, mpsc::Receiver<()>) {
        let (ring, rung) = bell();
        let disks = self.0.iter().map(|disk| Arc::new(disk.clone()) as Arc<dyn Medium>).collect();
        (Box::new(Ssd::over(disks, LIMIT, THREADS, 5, ring).expect("it opens")), rung)
    }
}

fn open_directory(scratch: &Scratch, ring: bool) -> Result<(Box<dyn Tier>, mpsc::Receiver<()>), Error> {
    let ((ring_bell, rung), by) = (bell(), if ring { By::Ring } else { By::Threads });
    let ssd = Ssd::open_by(by, std::slice::from_ref(&scratch.0), LIMIT, ring_bell)?;
    assert_eq!(ssd.io(), by.name());
    Ok((Box::new(ssd), rung))
}

/// Files where tests are built: on a disk.
struct OnDisk<const RING: bool>(Scratch);

impl<const RING: bool> Kind for OnDisk<RING> {
    fn new() -> Self {
        Self(Scratch::under(env!("CARGO_TARGET_TMPDIR")))
    }

    fn open(&self) -> (Box<dyn Tier>, mpsc::Receiver<()>) {
        open_directory(&self.0, RING).expect("it opens")
    }

    fn refusal() -> Option<String> {
        open_directory(&Self::new().0, RING).err().map(|error| error.message)
    }
}

/// Files in memory: a file system that may know no direct I/O.
struct OnTmpfs<const RING: bool>(Scratch);

impl<const RING: bool> Kind for OnTmpfs<RING> {
    fn new() -> Self {
        Self(Scratch::under("/dev/shm"))
    }

    fn open(&self) -> (Box<dyn Tier>, mpsc::Receiver<()>) {
        open_directory(&self.0, RING).expect("it opens")
    }

    fn refusal() -> Option<String> {
        OnDisk::<RING>::refusal()
    }
}

fn desk(kind: &impl Kind) -> Desk {
    let (tier, rung) = kind.open();
    Desk::new(tier, rung)
}

// -- what is expected ----------------------------------------------------------------------------------------------------

/// Goal: what was written is read, strip by strip, with all that was said of it. Method: blocks of two layouts.
fn what_is_written_is_read<K: Kind>(kind: K) {
    let mut desk = desk(&kind);
    for block in (0..20).map(record) {
        let fate = desk.put(block, 0);
        assert_eq!(fate, if K::KEEPS { Fate::Done } else { Fate::Full });
        assert_eq!(desk.tier.find(&block.place.key), K::KEEPS.then_some(block));
    }
    assert_eq!(desk.tier.records().count(), if K::KEEPS { 20 } else { 0 });
    // In steps of any size it is the same, each once.
    for count in [1, 7, 20, 100_000] {
        let (mut stepped, mut from) = (Vec::new(), Some(0));
        while let Some(at) = from {
            let (records, next) = desk.tier.page(at, count);
            assert!(records.len() <= count as usize && next.is_none_or(|next| next > at));
            stepped.extend(records);
            from = next;
        }
        let sorted = |mut all: Vec<Record>| {
            all.sort_unstable_by_key(|record| record.place.key);
            all
        };
        assert_eq!(sorted(stepped), sorted(desk.tier.records().collect()), "in steps of {count}");
    }
    assert_eq!(desk.tier.page(u32::MAX, 10), (Vec::new(), None));
    for block in (0..20).map(record) {
        let expected = if K::KEEPS { Ok(content(&block, 0)) } else { Err(Fate::Missing) };
        assert_eq!(desk.get(&block), expected);
    }
    let capacity = desk.tier.capacity();
    assert_eq!((capacity.blocks, capacity.waiting, capacity.health), (if K::KEEPS { 20 } else { 0 }, 0, Health::Good));
}

/// Goal: what is not there is missing, also into a slot of another shape. Method: an unknown key, another layout.
fn what_is_not_there_is_missing<K: Kind>(kind: K) {
    let mut desk = desk(&kind);
    assert_eq!(desk.get(&record(1)), Err(Fate::Missing));
    assert!(!desk.tier.remove(&key(1)));
    assert_eq!(desk.tier.clear(Whose::Tenant(1)), []);
    desk.put(record(1), 0);
    let mut other = record(1);
    other.layout = LAYOUTS[1];
    assert_eq!(desk.get(&other), Err(Fate::Missing), "a slot of another shape");
}

/// Goal: what is as it was written is found so, however often, and what is not there is missing. Method: blocks and an unknown key;
/// what is verified while it is removed.
fn what_is_written_verifies<K: Kind>(kind: K) {
    let mut desk = desk(&kind);
    for block in (0..20).map(record) {
        desk.put(block, 0);
    }
    for _ in 0..2 {
        let ops: Vec<_> = (0..21).map(|number| desk.verify(&key(number))).collect();
        desk.wait_all();
        let fates: Vec<Fate> = ops.iter().map(|op| desk.fates[op]).collect();
        assert_eq!((&fates[..20], fates[20]), (&[Fate::Done; 20][..], Fate::Missing));
    }
    let op = desk.verify(&key(3));
    assert!(desk.tier.remove(&key(3)));
    assert!(matches!(desk.wait(op), Fate::Missing | Fate::Done));
    assert_eq!((desk.tier.find(&key(3)), desk.tier.capacity().blocks), (None, 19));
}

/// Goal: a removed block is gone, wherever it was, and can be written anew. Method: remove at each stage of its life.
fn what_is_removed_is_gone<K: Kind>(kind: K) {
    let mut desk = desk(&kind);
    desk.put(record(1), 0);
    assert!(desk.tier.remove(&key(1)));
    assert_eq!((desk.tier.find(&key(1)), desk.get(&record(1))), (None, Err(Fate::Missing)));
    assert!(!desk.tier.remove(&key(1)));
    assert_eq!(desk.put(record(1), 1), Fate::Done);
    assert_eq!(desk.get(&record(1)), Ok(content(&record(1), 1)));
    // Under way: it is there or not when it is removed, and in no case afterwards.
    for block in (10..30).map(record) {
        let op = desk.write(block, 0);
        if block.place.position.is_multiple_of(2) {
            desk.poll();
        }
        assert!(desk.tier.remove(&block.place.key));
        let again = desk.write(block, 1);
        let fate = desk.wait(op);
        assert!(matches!(fate, Fate::Missing | Fate::Done), "{fate:?}");
        assert_eq!(desk.wait(again), Fate::Done);
        assert_eq!(desk.get(&block), Ok(content(&block, 1)));
    }
    // A read under way still ends.
    let op = desk.read(&record(1));
    assert!(desk.tier.remove(&key(1)));
    assert!(matches!(desk.wait(op), Fate::Missing | Fate::Done));
    assert!(
        desk.read_result(op).is_ok_and(|bytes| bytes == content(&record(1), 1)) || desk.fates[&op] == Fate::Missing
    );
}

/// Goal: a key is written once. Method: twice at once, and again when it is there.
fn a_key_is_written_once<K: Kind>(kind: K) {
    let mut desk = desk(&kind);
    let ops = [desk.write(record(1), 0), desk.write(record(1), 0)];
    assert_eq!(desk.wait(ops[1]), Fate::Done);
    assert!(desk.tier.find(&key(1)).is_some(), "done is done");
    assert_eq!((desk.wait(ops[0]), desk.put(record(1), 0)), (Fate::Done, Fate::Done));
    assert_eq!(desk.tier.capacity().blocks, 1);
}

/// Goal: an owner's blocks go, all of them and no others, those under way too. Method: two namespaces, three tenants.
fn an_owner_is_cleared<K: Kind>(kind: K) {
    let mut desk = desk(&kind);
    let all: Vec<_> = (0..30).map(record).collect();
    for block in &all[..24] {
        desk.put(*block, 0);
    }
    for block in &all[24..] {
        desk.write(*block, 0);
    }
    let theirs = |whose: Whose| -> BTreeSet<BlockKey> {
        all.iter().filter(|block| whose.has(block.owner)).map(|block| block.place.key).collect()
    };
    let (tenant, namespace) = (theirs(Whose::Tenant(1)), theirs(Whose::Namespace(0)));
    let gone: BTreeSet<BlockKey> = desk.tier.clear(Whose::Tenant(1)).into_iter().collect();
    assert_eq!(gone, tenant);
    desk.wait_all();
    let gone: BTreeSet<BlockKey> = desk.tier.clear(Whose::Namespace(0)).into_iter().collect();
    assert_eq!(gone, &namespace - &tenant);
    let left = |block: &&Record| !Whose::Tenant(1).has(block.owner) && !Whose::Namespace(0).has(block.owner);
    let left: BTreeSet<BlockKey> = all.iter().filter(left).map(|block| block.place.key).collect();
    assert_eq!(desk.keys(), left);
    // And they can come back.
    assert_eq!(desk.put(record(4), 1), Fate::Done);
    let op = desk.flush();
    assert_eq!(desk.wait(op), Fate::Done);
    desk.tier.close(shelves::PATIENCE);
    desk.replace(Box::new(Null::default()), mpsc::channel().1);
    let (tier, rung) = kind.open();
    desk.replace(tier, rung);
    assert_eq!(desk.keys(), &left | &BTreeSet::from([key(4)]));
    assert_eq!(desk.get(&record(4)), Ok(content(&record(4), 1)));
}

/// Goal: it never takes more than its limit, tells what it lets go of, and lets go of the oldest. Method: write three times
/// what fits (`Desk::poll` looks at the limit all the time).
fn it_makes_room<K: Kind>(kind: K) {
    let mut desk = desk(&kind);
    let blocks = 3 * LIMIT as u32 / 12_000;
    for block in (0..blocks).map(record) {
        let mut op = desk.write(block, 0);
        while desk.wait(op) == Fate::Busy {
            op = desk.write(block, 0);
        }
        assert_eq!(desk.fates[&op], Fate::Done);
    }
    desk.wait_all();
    let dropped: BTreeSet<BlockKey> = desk.dropped.iter().copied().collect();
    assert_eq!(dropped.len(), desk.dropped.len(), "told once");
    let all: BTreeSet<BlockKey> = (0..blocks).map(key).collect();
    assert_eq!(desk.keys(), &all - &dropped);
    // The room is used: but for padding (a quarter, with these blocks) and the segments that are being filled and emptied
    // (two or three of the eight that so small a limit makes).
    let bytes: u64 = desk.tier.records().map(|record| record.layout.block_bytes() as u64).sum();
    assert!(bytes > LIMIT / 3, "{bytes} bytes of {LIMIT}");
    assert!(desk.tier.find(&key(blocks - 1)).is_some() && desk.tier.find(&key(0)).is_none());
    for block in desk.tier.records().collect::<Vec<_>>() {
        assert_eq!(desk.get(&block), Ok(content(&block, 0)));
    }
}

/// Goal: a block is not let go of while it is read. Method: reads that have begun when twice the limit is written.
fn what_is_read_stays<K: Kind>(kind: K) {
    let mut desk = desk(&kind);
    for block in (0..10).map(record) {
        desk.put(block, 0);
    }
    let reads: Vec<_> = (0..10).map(|number| (number, desk.read(&record(number)))).collect();
    for block in (10..10 + 2 * LIMIT as u32 / 12_000).map(record) {
        desk.put(block, 0);
    }
    for (number, op) in reads {
        assert_eq!(desk.wait(op), Fate::Done);
        assert_eq!(desk.read_result(op), Ok(content(&record(number), 0)));
    }
}

/// Goal: more than is queued is refused at once, and its memory is free. Method: write without looking until it is busy.
fn it_gets_busy<K: Kind>(kind: K) {
    let mut desk = desk(&kind);
    let ops: Vec<_> = (0..80).map(|number| desk.write(record(3 * number), 0)).collect();
    desk.wait_all();
    let fates: Vec<Fate> = ops.iter().map(|op| desk.fates[op]).collect();
    assert!(fates.iter().all(|fate| matches!(fate, Fate::Done | Fate::Busy)), "{fates:?}");
    assert_eq!(desk.tier.capacity().waiting, 0);
    for (number, fate) in (0..).zip(fates) {
        assert_eq!(desk.tier.find(&key(3 * number)).is_some(), fate == Fate::Done);
    }
    assert_eq!(desk.put(record(1000), 0), Fate::Done);
}

/// Goal: what was written is there in the next life. Method: close; and a flush without a close.
fn it_survives<K: Kind>(kind: K) {
    let mut desk = desk(&kind);
    for round in 0..4u32 {
        for block in (round * 20..round * 20 + 20).map(record) {
            assert_eq!(desk.put(block, round), Fate::Done);
        }
        if round > 0 {
            assert!(desk.tier.remove(&key(round * 20 - 1)), "the last of the round before");
        }
        if round.is_multiple_of(2) {
            desk.tier.close(shelves::PATIENCE);
        } else {
            let op = desk.flush();
            assert_eq!(desk.wait(op), Fate::Done);
        }
        desk.poll();
        let before = desk.keys();
        // A daemon that was killed lets go of its directory before the next comes.
        desk.replace(Box::new(Null::default()), mpsc::channel().1);
        let (tier, rung) = kind.open();
        desk.replace(tier, rung);
        desk.check_found(&before);
        for block in desk.tier.records().collect::<Vec<_>>() {
            let number = number(&block.place.key);
            assert_eq!(block, record(number));
            assert_eq!(desk.get(&block), Ok(content(&block, number / 20)));
        }
    }
}

/// Goal: a block that can never fit is refused. Method: one larger than the limit.
fn too_large_is_full<K: Kind>(kind: K) {
    let (mut tier, _rung) = kind.open();
    let layout = Layout { strips: 1, strip_bytes: LIMIT as u32 + 1 };
    let arena = pyengine_transfer::memory::Arena::create(2 * LIMIT, layout).expect("one block fits");
    let slot = arena.issue(0);
    let mut hold = arena.begin_write(slot, 0..1).expect("a new life");
    hold.set_checksum(0, 0);
    drop(hold);
    assert!(arena.seal(slot));
    tier.write(1, Record { layout, ..record(1) }, arena.begin_read(slot).expect("sealed"));
    let events = tier.poll();
    assert_eq!(events, [TierEvent::Ended { op: 1, fate: Fate::Full }]);
    arena.retire(slot);
    assert!(arena.quiet(0));
}

/// Goal: a flush ends, and so does a close that may not wait. Method: both with much under way.
fn it_ends<K: Kind>(kind: K) {
    let mut desk = desk(&kind);
    for block in (0..20).map(record) {
        desk.write(block, 0);
    }
    let op = desk.flush();
    assert_eq!(desk.wait(op), Fate::Done);
    for block in (20..30).map(record) {
        desk.write(block, 0);
    }
    desk.tier.close(Duration::ZERO);
}

macro_rules! suites {
    ($($kind:ident: $type:ty => $expectations:tt;)*) => { $(suite! { $kind, $type, $expectations })* };
}

macro_rules! suite {
    ($kind:ident, $type:ty, all) => {
        suite! { $kind, $type, [
            what_is_written_is_read, what_is_written_verifies, what_is_not_there_is_missing, what_is_removed_is_gone,
            a_key_is_written_once, an_owner_is_cleared, it_makes_room, what_is_read_stays, it_gets_busy, it_survives,
            too_large_is_full, it_ends,
        ] }
    };
    ($kind:ident, $type:ty, [$($expectation:ident),* $(,)?]) => {
        mod $kind {
            use super::*;
            $(#[test] fn $expectation() {
                match <$type>::refusal() {
                    None => super::$expectation(<$type>::new()),
                    Some(why) => eprintln!("skipped: {why}"),
                }
            })*
        }
    };
}

suites! {
    memory: Memory => all;
    null: Nothing => [what_is_written_is_read, what_is_not_there_is_missing, too_large_is_full, it_ends];
    log: Ssds<1, 0> => all;
    log_with_threads: Ssds<1, 3> => all;
    two_logs: Ssds<2, 2> => all;
    disk_by_threads: OnDisk<false> => all;
    disk_by_ring: OnDisk<true> => all;
    tmpfs_by_threads: OnTmpfs<false> => all;
    tmpfs_by_ring: OnTmpfs<true> => all;
}

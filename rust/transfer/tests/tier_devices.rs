//! The SSD tier on directories and devices that are not as they should be.
//!
//! Goal: what is wrong is refused with a sentence that says what to do, or costs blocks and never more. Method: each case by itself.

mod scratch;
mod shelves;

use std::io::{self, IoSlice};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use pyengine_transfer::memory::{Arena, checksum};
use pyengine_transfer::pool::disk::io::{FileId, Medium};
use pyengine_transfer::pool::disk::twin::MemoryDisk;
use pyengine_transfer::pool::disk::{OVERHEAD, Ssd, format};
use pyengine_transfer::pool::null::Null;
use pyengine_transfer::pool::tier::{Fate, Health, Record, Tier, TierEvent};
use pyengine_transfer::types::Layout;

use scratch::{Mount, Scratch};
use shelves::{Desk, PATIENCE, bell, content, key, record};

const LIMIT: u64 = (16 << 16) + OVERHEAD;

fn scratch() -> Scratch {
    Scratch::under(env!("CARGO_TARGET_TMPDIR"))
}

fn open(path: &Path) -> Result<Desk, String> {
    let (ring, rung) = bell();
    let ssd = Ssd::open(&[path.to_owned()], LIMIT, ring).map_err(|error| error.message)?;
    Ok(Desk::new(Box::new(ssd), rung))
}

fn over(disk: &MemoryDisk) -> Desk {
    let (ring, rung) = bell();
    let ssd = Ssd::over(vec![Arc::new(disk.clone())], LIMIT, 0, 1, ring).expect("it opens");
    Desk::new(Box::new(ssd), rung)
}

fn refusal(path: &Path) -> String {
    open(path).map(|_| ()).expect_err("it is refused")
}

// -- directories ---------------------------------------------------------------------------------------------------------

// Goal: a directory is made, for its owner alone, and with all that leads to it. Method: one that is not there.
#[test]
fn a_missing_directory_is_made() {
    let scratch = scratch();
    let path = scratch.0.join("a/b");
    drop(open(&path).expect("it is made"));
    let mode = std::fs::metadata(&path).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    for name in ["lock", "format", "segments"] {
        assert!(path.join(name).exists(), "{name}");
    }
}

// Goal: what others may read or change is not used. Method: modes.
#[test]
fn an_open_directory_is_refused() {
    let scratch = scratch();
    for mode in [0o755, 0o770, 0o701] {
        std::fs::create_dir_all(&scratch.0).expect("a directory");
        std::fs::set_permissions(&scratch.0, PermissionsExt::from_mode(mode)).expect("a mode");
        let refusal = refusal(&scratch.0);
        assert!(refusal.contains("chmod 700") && refusal.contains(&*scratch.0.to_string_lossy()), "{refusal}");
    }
    std::fs::set_permissions(&scratch.0, PermissionsExt::from_mode(0o700)).expect("a mode");
    open(&scratch.0).expect("now it is private");
}

// Goal: one daemon a directory. Method: a second while the first lives, and when it is gone; the same twice in one list.
#[test]
fn a_second_daemon_is_refused() {
    let scratch = scratch();
    let first = open(&scratch.0).expect("it opens");
    let refusal = refusal(&scratch.0);
    assert!(refusal.contains("another daemon") && refusal.contains(&*scratch.0.to_string_lossy()), "{refusal}");
    drop(first);
    open(&scratch.0).expect("the first is gone");
    let twice = vec![scratch.0.clone(), scratch.0.clone()];
    assert!(Ssd::open(&twice, 2 * LIMIT, || {}).is_err());
}

// Goal: a directory of another version, or of somebody else's, is named and left as it is. Method: its `format` changed.
#[test]
fn another_version_is_refused() {
    let scratch = scratch();
    drop(open(&scratch.0).expect("it opens"));
    let file = scratch.0.join("format");
    let page = std::fs::read(&file).expect("a page");
    let mut newer = page.clone();
    newer[8..12].copy_from_slice(&(format::VERSION + 1).to_le_bytes());
    std::fs::write(&file, &newer).expect("written");
    let refusal_newer = refusal(&scratch.0);
    assert!(refusal_newer.contains("format 2") && refusal_newer.contains("newer daemon"), "{refusal_newer}");
    assert_eq!(std::fs::read(&file).expect("a page"), newer, "left as it is");
    for damaged in [&b""[..], &page[..100], &[0; 4096], b"something else"] {
        std::fs::write(&file, damaged).expect("written");
        let refusal = refusal(&scratch.0);
        assert!(refusal.contains("empty the directory"), "{refusal}");
    }
}

// Goal: nothing is written over, or forgotten, that a newer daemon has written. Method: one segment of a later version in a
// directory whose `format` is ours.
#[test]
fn a_segment_of_a_newer_version_is_refused() {
    let scratch = scratch();
    let mut desk = open(&scratch.0).expect("it opens");
    assert_eq!(desk.put(record(1), 0), Fate::Done);
    desk.tier.close(PATIENCE);
    drop(desk);
    let files = std::fs::read_dir(scratch.0.join("segments")).expect("a folder");
    let file = files.map(|file| file.expect("a file").path()).max().expect("a segment");
    let page = std::fs::read(&file).expect("a segment");
    let mut newer = page.clone();
    newer[8..12].copy_from_slice(&(format::VERSION + 1).to_le_bytes());
    std::fs::write(&file, &newer).expect("written");
    let name = file.file_stem().expect("a name").to_string_lossy().into_owned();
    let refusal = refusal(&scratch.0);
    assert!(refusal.contains(&name) && refusal.contains("format 2") && refusal.contains("newer daemon"), "{refusal}");
    assert_eq!(std::fs::read(&file).expect("a segment"), newer, "left as it is");
    std::fs::write(&file, &page).expect("written");
    assert_eq!(open(&scratch.0).expect("it opens").get(&record(1)), Ok(content(&record(1), 0)));
}

// Goal: a segment that somebody has copied counts once, and its bytes towards the limit. Method: one under another name.
#[test]
fn a_copy_of_a_segment_is_room() {
    let scratch = scratch();
    let mut desk = open(&scratch.0).expect("it opens");
    assert_eq!(desk.put(record(1), 0), Fate::Done);
    desk.tier.close(PATIENCE);
    drop(desk);
    let segments = scratch.0.join("segments");
    let sizes = || -> u64 {
        let files = std::fs::read_dir(&segments).expect("a folder");
        files.map(|file| file.expect("a file").metadata().expect("its size").len()).sum()
    };
    let files = std::fs::read_dir(&segments).expect("a folder").map(|file| file.expect("a file").path());
    let written = |path: &PathBuf| std::fs::read(path).is_ok_and(|bytes| bytes.windows(8).any(|at| at == b"pyengBAT"));
    std::fs::copy(files.filter(written).max().expect("a segment"), segments.join("0100.seg")).expect("copied");
    let mut desk = open(&scratch.0).expect("it opens");
    assert_eq!(desk.get(&record(1)), Ok(content(&record(1), 0)));
    let capacity = desk.tier.capacity();
    assert_eq!((capacity.blocks, capacity.used), (1, sizes() + OVERHEAD));
}

// Goal: foreign files are left alone, and counted in nothing. Method: a name of no segment, a folder, and a segment of another
// directory.
#[test]
fn alien_files_are_left_alone() {
    let (scratch, other) = (scratch(), scratch());
    for path in [&scratch.0, &other.0] {
        let mut desk = open(path).expect("it opens");
        assert_eq!(desk.put(record(1), 0), Fate::Done);
        desk.tier.close(PATIENCE);
    }
    let segments = scratch.0.join("segments");
    std::fs::write(segments.join("notes.txt"), "keep me").expect("written");
    std::fs::create_dir(segments.join("0009.seg")).expect("a folder");
    let own: Vec<PathBuf> = std::fs::read_dir(other.0.join("segments"))
        .expect("a folder")
        .map(|file| file.expect("a file").path())
        .collect();
    let foreign = own.iter().max_by_key(|path| {
        std::fs::read(path).map(|bytes| bytes[4096..].iter().filter(|byte| **byte != 0).count()).unwrap_or(0)
    });
    std::fs::copy(foreign.expect("a segment"), segments.join("0007.seg")).expect("copied");
    let kept = std::fs::read(segments.join("0007.seg")).expect("there");
    let mut desk = open(&scratch.0).expect("it opens");
    let before = desk.tier.capacity();
    assert_eq!((before.blocks, desk.get(&record(1))), (1, Ok(content(&record(1), 0))));
    // Enough to use every segment several times.
    for block in (10..300).map(record) {
        let op = desk.write(block, 0);
        desk.wait(op);
    }
    drop(desk);
    assert_eq!(std::fs::read_to_string(segments.join("notes.txt")).expect("there"), "keep me");
    assert_eq!(std::fs::read(segments.join("0007.seg")).expect("there"), kept);
}

// Goal: a file system with less room than the limit says so and serves on. Method: a tmpfs half as large.
#[test]
fn a_full_file_system_degrades() {
    let Some(mount) = Mount::new("tmpfs", "size=512k") else {
        eprintln!("skipped: only root can mount a small tmpfs");
        return;
    };
    let mut desk = open(&mount.0.0).expect("it opens");
    let mut fates = Vec::new();
    for block in (0..60).map(record) {
        fates.push(desk.put(block, 0));
    }
    assert!(fates.starts_with(&[Fate::Done; 10]), "{fates:?}");
    assert_eq!((fates[59], desk.tier.capacity().health), (Fate::Failed, Health::ReadOnly));
    let there: Vec<Record> = desk.tier.records().collect();
    assert!(there.len() >= 10);
    for block in there {
        assert_eq!(desk.get(&block), Ok(content(&block, 0)));
    }
}

// Goal: a read-only file system is refused, naming it. Method: a tmpfs, mounted again read-only.
#[test]
fn a_read_only_directory_is_refused() {
    let Some(mount) = Mount::new("tmpfs", "size=4m") else {
        eprintln!("skipped: only root can mount a small tmpfs");
        return;
    };
    drop(open(&mount.0.0).expect("it opens"));
    let remounted = Command::new("mount").args(["-o", "remount,ro"]).arg(&mount.0.0).status();
    assert!(remounted.is_ok_and(|status| status.success()));
    let refusal = refusal(&mount.0.0);
    assert!(refusal.contains("not writable") && refusal.contains(&*mount.0.0.to_string_lossy()), "{refusal}");
}

// Goal: a limit that holds nothing is refused with the least that does. Method: limits.
#[test]
fn too_small_a_limit_is_refused() {
    let scratch = scratch();
    for limit in [0, 1, OVERHEAD, 500_000] {
        let refusal = Ssd::open(std::slice::from_ref(&scratch.0), limit, || {}).map(|_| ()).expect_err("too small");
        assert!(refusal.message.contains("at least 532480"), "{refusal}");
    }
    Ssd::open(std::slice::from_ref(&scratch.0), 532_480, || {}).expect("just enough");
    assert!(Ssd::open(&[], 1 << 30, || {}).is_err());
}

// Goal: a lower limit is kept from the start, and the newest blocks with it. Method: fill, halve, open.
#[test]
fn a_lower_limit_is_kept() {
    let scratch = scratch();
    let (ring, rung) = bell();
    let ssd = Ssd::open(std::slice::from_ref(&scratch.0), 4 * LIMIT, ring).expect("it opens");
    let mut desk = Desk::new(Box::new(ssd), rung);
    for block in (0..200).map(record) {
        assert_eq!(desk.put(block, 0), Fate::Done);
    }
    desk.tier.close(PATIENCE);
    desk.replace(Box::new(Null::default()), bell().1);
    let mut desk = open(&scratch.0).expect("it opens");
    let capacity = desk.tier.capacity();
    assert!(capacity.used <= LIMIT && capacity.blocks > 10, "{capacity:?}");
    assert_eq!(desk.get(&record(199)), Ok(content(&record(199), 0)));
    let on_disk: u64 = std::fs::read_dir(scratch.0.join("segments"))
        .expect("a folder")
        .map(|file| file.expect("a file").metadata().expect("a size").len())
        .sum();
    assert_eq!(on_disk + OVERHEAD, capacity.used);
    for block in (200..300).map(record) {
        assert_eq!(desk.put(block, 0), Fate::Done);
    }
}

// -- devices -------------------------------------------------------------------------------------------------------------

/// Looks until it is so. Each look counts as time for a log without threads.
fn look_until(desk: &mut Desk, what: impl Fn(&mut Desk) -> bool) {
    let until = Instant::now() + PATIENCE;
    while !what(desk) {
        assert!(Instant::now() < until, "it never happens");
        desk.poll();
    }
}

fn health(desk: &Desk) -> Health {
    desk.tier.capacity().health
}

// Goal: a disk that takes no writes still serves reads, remembers removals, and is used again when it works. Method: writes fail
// for a while.
#[test]
fn a_disk_that_cannot_be_written() {
    let disk = MemoryDisk::default();
    let mut desk = over(&disk);
    for block in (0..10).map(record) {
        assert_eq!(desk.put(block, 0), Fate::Done);
    }
    disk.fail(false, true);
    let ops: Vec<_> = (10..20).map(|number| desk.write(record(number), 0)).collect();
    desk.wait_all();
    assert!(ops.iter().all(|op| desk.fates[op] == Fate::Failed));
    assert_eq!((health(&desk), desk.put(record(30), 0)), (Health::ReadOnly, Fate::Failed));
    assert_eq!(desk.get(&record(3)), Ok(content(&record(3), 0)));
    assert!(desk.tier.remove(&key(3)) && desk.tier.find(&key(3)).is_none());
    let op = desk.flush();
    assert_eq!(desk.wait(op), Fate::Failed);
    // It is tried again all the time, in vain.
    (0..1000).for_each(|_| desk.poll());
    assert_eq!(health(&desk), Health::ReadOnly);
    disk.fail(false, false);
    look_until(&mut desk, |desk| health(desk) == Health::Good);
    assert_eq!(desk.put(record(30), 0), Fate::Done);
    let op = desk.flush();
    assert_eq!(desk.wait(op), Fate::Done);
    let mut desk = over(&disk.copy());
    assert_eq!(desk.get(&record(3)), Err(Fate::Missing), "its removal was remembered");
    assert_eq!(desk.get(&record(4)), Ok(content(&record(4), 0)));
    assert_eq!(desk.get(&record(30)), Ok(content(&record(30), 0)));
    assert_eq!(desk.get(&record(10)), Err(Fate::Missing), "it was said to have failed");
}

// Goal: a disk that cannot be read fails visibly, and comes back. Method: reads fail for a while; one alone is no failure.
#[test]
fn a_disk_that_cannot_be_read() {
    let disk = MemoryDisk::default();
    let mut desk = over(&disk);
    for block in (0..10).map(record) {
        assert_eq!(desk.put(block, 0), Fate::Done);
    }
    disk.fail(true, false);
    assert_eq!((desk.get(&record(1)), health(&desk)), (Err(Fate::Failed), Health::Good));
    assert_eq!(desk.get(&record(2)), Err(Fate::Failed));
    assert_eq!((desk.get(&record(3)), health(&desk)), (Err(Fate::Failed), Health::Failed));
    let operations = disk.operations();
    assert_eq!((desk.get(&record(4)), desk.put(record(40), 0)), (Err(Fate::Failed), Fate::Failed));
    assert_eq!(disk.operations(), operations, "it is left in peace");
    (0..1000).for_each(|_| desk.poll());
    assert!(disk.operations() > operations && health(&desk) == Health::Failed);
    disk.fail(false, false);
    look_until(&mut desk, |desk| health(desk) == Health::Good);
    assert_eq!((desk.get(&record(4)), desk.put(record(40), 0)), (Ok(content(&record(4), 0)), Fate::Done));
}

// Goal: a disk that is full before the limit says so, and takes blocks again when there is room. Method: room for five of its eight segments.
#[test]
fn a_disk_that_is_full() {
    let disk = MemoryDisk::default();
    disk.set_room(Some(5 << 17));
    let mut desk = over(&disk);
    let mut number = 0;
    while desk.put(record(number), 0) == Fate::Done {
        number += 1;
    }
    assert!(number > 20, "{number}");
    assert_eq!(health(&desk), Health::ReadOnly);
    assert_eq!(desk.get(&record(number - 1)), Ok(content(&record(number - 1), 0)));
    disk.set_room(None);
    look_until(&mut desk, |desk| health(desk) == Health::Good);
    assert_eq!(desk.put(record(number), 0), Fate::Done);
}

// Goal: so does one that had room for nothing from the start, so that nothing was ever begun. Method: no room, then room.
#[test]
fn a_disk_that_is_full_at_first() {
    let disk = MemoryDisk::default();
    disk.set_room(Some(0));
    let mut desk = over(&disk);
    assert_eq!((desk.put(record(1), 0), health(&desk)), (Fate::Failed, Health::ReadOnly));
    disk.set_room(None);
    // Each look counts as 10 ms: far beyond the longest pause of a minute.
    let looks = (0..20_000).find(|_| {
        desk.poll();
        health(&desk) == Health::Good
    });
    assert!(looks.is_some(), "it is never tried again");
    assert_eq!(desk.put(record(1), 0), Fate::Done);
}

/// A disk that answers when it is let.
struct Stuck {
    disk: MemoryDisk,
    stuck: Mutex<bool>,
    /// Only reads hang.
    reads_only: bool,
    freed: Condvar,
}

impl Stuck {
    fn set(&self, stuck: bool) {
        *self.stuck.lock().expect("no test panics in it") = stuck;
        self.freed.notify_all();
    }

    fn pass(&self, reads: bool) {
        if self.reads_only && !reads {
            return;
        }
        let stuck = self.stuck.lock().expect("no test panics in it");
        drop(self.freed.wait_while(stuck, |stuck| *stuck).expect("no test panics in it"));
    }
}

impl Medium for Stuck {
    fn list(&self) -> io::Result<Vec<(FileId, u64)>> {
        self.disk.list()
    }
    fn allocate(&self, file: FileId, bytes: u64) -> io::Result<()> {
        self.pass(false);
        self.disk.allocate(file, bytes)
    }
    fn remove(&self, file: FileId) -> io::Result<()> {
        self.pass(false);
        self.disk.remove(file)
    }
    fn read(&self, file: FileId, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.pass(true);
        self.disk.read(file, offset, into)
    }
    fn write(&self, file: FileId, offset: u64, parts: &mut [IoSlice<'_>]) -> io::Result<()> {
        self.pass(false);
        self.disk.write(file, offset, parts)
    }
    fn sync(&self, file: FileId) -> io::Result<()> {
        self.pass(false);
        self.disk.sync(file)
    }
    fn store(&self) -> u64 {
        self.disk.store()
    }
    fn name(&self) -> String {
        "stuck".into()
    }
}

// Goal: a device that does not answer holds nobody up but what it has, and is used again when it answers. Method: one that hangs.
#[test]
fn a_disk_that_hangs() {
    let medium = Arc::new(Stuck {
        disk: MemoryDisk::default(),
        stuck: Mutex::new(false),
        reads_only: false,
        freed: Condvar::new(),
    });
    let (ring, rung) = bell();
    let ssd = Ssd::over(vec![medium.clone()], LIMIT, 2, 1, ring).expect("it opens");
    let mut desk = Desk::new(Box::new(ssd), rung);
    for block in (0..5).map(record) {
        assert_eq!(desk.put(block, 0), Fate::Done);
    }
    medium.set(true);
    // Two hang, one a thread; the others are not begun.
    let mut ops: Vec<_> = (0..5).map(|number| (number, desk.read(&record(number)))).collect();
    look_until(&mut desk, |desk| health(desk) == Health::Failed);
    for (_, op) in ops.split_off(2) {
        desk.wait(op);
        assert_eq!(desk.read_result(op), Err(Fate::Failed), "it waited for nothing");
    }
    assert!(ops.iter().all(|(_, op)| desk.open.contains(op)), "the device has their slots");
    assert_eq!((desk.get(&record(4)), desk.put(record(10), 0)), (Err(Fate::Failed), Fate::Failed), "at once");
    medium.set(false);
    for (number, op) in ops {
        desk.wait(op);
        assert_eq!(desk.read_result(op), Ok(content(&record(number), 0)));
    }
    look_until(&mut desk, |desk| health(desk) == Health::Good);
    assert_eq!(desk.put(record(10), 0), Fate::Done);
}

// Goal: it is known which blocks are on a device that does not answer: those on another one are read as ever. Method: two
// devices, of which one hangs.
#[test]
fn one_of_two_disks_hangs() {
    let stuck =
        || Stuck { disk: MemoryDisk::default(), stuck: Mutex::new(false), reads_only: false, freed: Condvar::new() };
    let (hangs, works) = (Arc::new(stuck()), Arc::new(stuck()));
    let (ring, rung) = bell();
    let ssd = Ssd::over(vec![hangs.clone(), works], 2 * LIMIT, 2, 1, ring).expect("it opens");
    let mut desk = Desk::new(Box::new(ssd), rung);
    for block in (0..12).map(record) {
        assert_eq!(desk.put(block, 0), Fate::Done);
    }
    hangs.set(true);
    (0..12).for_each(|number| {
        desk.read(&record(number));
    });
    look_until(&mut desk, |desk| health(desk) == Health::Failed);
    let (failed, good): (Vec<u32>, Vec<u32>) =
        (0..12).partition(|number| desk.tier.health_of(&record(*number).place.key) == Health::Failed);
    assert!(!failed.is_empty() && !good.is_empty());
    for number in good {
        assert_eq!(desk.get(&record(number)), Ok(content(&record(number), 0)));
    }
    for number in failed {
        assert_eq!(desk.get(&record(number)), Err(Fate::Failed));
    }
    hangs.set(false);
}

// Goal: a block that is being read is not let go of, however much is written. Method: reads of the oldest blocks hang until their
// neighbour was let go of.
#[test]
fn what_is_read_is_not_let_go_of() {
    let stuck = Mutex::new(false);
    let medium = Arc::new(Stuck { disk: MemoryDisk::default(), stuck, reads_only: true, freed: Condvar::new() });
    let (ring, rung) = bell();
    let ssd = Ssd::over(vec![medium.clone()], LIMIT, 4, 1, ring).expect("it opens");
    let mut desk = Desk::new(Box::new(ssd), rung);
    for block in (0..3).map(record) {
        assert_eq!(desk.put(block, 0), Fate::Done);
    }
    medium.set(true);
    let reads: Vec<_> = (0..2).map(|number| (number, desk.read(&record(number)))).collect();
    // Until their neighbour has gone, which lay in the same segment.
    let (until, mut number) = (Instant::now() + PATIENCE, 10);
    while !desk.dropped.contains(&key(2)) && Instant::now() < until {
        if desk.tier.capacity().waiting == 0 {
            desk.write(record(number), 0);
            number += 1;
        }
        desk.poll();
    }
    let gone = |desk: &Desk, number| desk.dropped.contains(&key(number)) || desk.tier.find(&key(number)).is_none();
    let letgo = [gone(&desk, 0), gone(&desk, 1), gone(&desk, 2)];
    medium.set(false);
    assert_eq!(letgo, [false, false, true]);
    for (number, op) in reads {
        desk.wait(op);
        assert_eq!(desk.read_result(op), Ok(content(&record(number), 0)));
    }
    desk.wait_all();
    assert_eq!(desk.put(record(5), 0), Fate::Done);
}

// Goal: a key that two devices hold counts once, and goes from both. Method: a directory that is away while all is written again; then
// removals, and another start.
#[test]
fn a_directory_that_was_away() {
    let (one, two) = (MemoryDisk::default(), MemoryDisk::default());
    let open = |disks: &[&MemoryDisk]| {
        let (ring, rung) = bell();
        let mediums: Vec<Arc<dyn Medium>> =
            disks.iter().map(|&disk| Arc::new(disk.clone()) as Arc<dyn Medium>).collect();
        let limit = LIMIT * mediums.len() as u64;
        Desk::new(Box::new(Ssd::over(mediums, limit, 0, 1, ring).expect("it opens")), rung)
    };
    for disks in [&[&one, &two][..], &[&one]] {
        let mut desk = open(disks);
        (0..10).for_each(|number| assert_eq!(desk.put(record(number), 9), Fate::Done));
        desk.tier.close(PATIENCE);
    }
    let mut desk = open(&[&one, &two]);
    assert_eq!((desk.tier.records().count(), desk.keys().len(), desk.tier.capacity().blocks), (10, 10, 10));
    (0..10).for_each(|number| assert_eq!(desk.get(&record(number)), Ok(content(&record(number), 9))));
    for number in 0..5 {
        assert!(desk.tier.remove(&key(number)));
        assert_eq!((desk.tier.find(&key(number)), desk.tier.remove(&key(number))), (None, false));
    }
    let op = desk.flush();
    assert_eq!((desk.wait(op), desk.tier.capacity().blocks), (Fate::Done, 5));
    // As it is after a kill.
    let mut desk = open(&[&one.copy(), &two.copy()]);
    assert_eq!(desk.keys(), (5..10).map(key).collect());
    (5..10).for_each(|number| assert_eq!(desk.get(&record(number)), Ok(content(&record(number), 9))));
}

// -- what else is promised -------------------------------------------------------------------------------------------------

// Goal: what is read again and again stays when the rest goes. Method: two small blocks read between writes of
// five times the limit.
#[test]
fn warm_blocks_move_on() {
    let mut desk = over(&MemoryDisk::default());
    for block in (1..3).map(record) {
        desk.put(block, 0);
    }
    for block in (10..500).map(record) {
        assert_eq!(desk.put(block, 0), Fate::Done);
        let warm = record(1 + block.place.position % 2);
        assert_eq!(desk.get(&warm), Ok(content(&warm, 0)));
    }
    assert!(desk.dropped.len() > 300);
}

// Goal: a hundred thousand blocks are known again at once, after a clean stop and after none, in at most 128 bytes of memory each.
// Method: blocks of a page on a disk; the times are printed.
#[test]
fn a_hundred_thousand_blocks() {
    const BLOCKS: u32 = 100_000;
    let layout = Layout { strips: 4, strip_bytes: 16 };
    let arena = Arena::create(2000 * 4200, layout).expect("a small arena");
    let scratch = scratch();
    let open = || Ssd::open(std::slice::from_ref(&scratch.0), 1 << 30, || {}).expect("it opens");
    let mut ssd = open();
    let (mut done, mut next) = (0, 0);
    while done < BLOCKS {
        let quiet = (0..arena.slots()).filter(|&slot| arena.quiet(slot)).collect::<Vec<_>>();
        for slot in quiet.into_iter().take((BLOCKS - next) as usize) {
            let slot = arena.issue(slot);
            let mut hold = arena.begin_write(slot, 0..4).expect("a new life");
            hold.strips_mut(0..4)[..4].copy_from_slice(&next.to_le_bytes());
            (0..4).for_each(|strip| {
                let sum = checksum(hold.strips_mut(strip..strip + 1));
                hold.set_checksum(strip, sum);
            });
            drop(hold);
            assert!(arena.seal(slot));
            ssd.write(u64::from(next), Record { layout, ..record(next) }, arena.begin_read(slot).expect("sealed"));
            arena.retire(slot);
            next += 1;
        }
        for event in ssd.poll() {
            assert!(matches!(event, TierEvent::Ended { fate: Fate::Done, .. }), "{event:?}");
            done += 1;
        }
        std::thread::yield_now();
    }
    let per_block = ssd.index_bytes() / BLOCKS as usize;
    assert!(per_block <= 128, "{per_block} bytes a block");
    for clean in [false, true] {
        if clean {
            ssd.close(PATIENCE);
        }
        drop(ssd);
        let begun = Instant::now();
        ssd = open();
        let took = begun.elapsed();
        eprintln!("{BLOCKS} blocks known after {took:?}, clean stop: {clean}, {per_block} bytes a block");
        assert_eq!(ssd.capacity().blocks, u64::from(BLOCKS));
        assert!((0..BLOCKS).all(|number| ssd.find(&key(number)).is_some()));
        ssd.check();
    }
    let slot = arena.issue(0);
    let into = arena.begin_write(slot, 0..4).expect("a new life");
    ssd.read(1_000_000, &key(77_777), into);
    let until = Instant::now() + PATIENCE;
    let ended = loop {
        if let Some(event) = ssd.poll().pop() {
            break event;
        }
        assert!(Instant::now() < until, "it never ends");
        std::thread::sleep(Duration::from_millis(1));
    };
    assert_eq!(ended, TierEvent::Ended { op: 1_000_000, fate: Fate::Done });
    assert!(arena.seal(slot) && arena.intact(slot));
    assert_eq!(arena.begin_read(slot).expect("sealed").bytes()[..4], 77_777u32.to_le_bytes());
}

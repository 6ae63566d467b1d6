//! The SSD tier on real files that are not as it left them, and on file systems that cannot do all.
//!
//! Goal: a block is right or missing, and the tier serves on. Method: each case by itself, by io_uring (where the kernel allows it) and by
//! threads.

mod scratch;
mod shelves;

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use pyengine_transfer::pool::disk::{By, OVERHEAD, Ssd};
use pyengine_transfer::pool::null::Null;
use pyengine_transfer::pool::tier::{Fate, Health, Tier};

use scratch::{Mount, Scratch};
use shelves::{Desk, PATIENCE, bell, content, key, record};

const LIMIT: u64 = (16 << 16) + OVERHEAD;
const PAGE: u64 = 4096;

fn scratch() -> Scratch {
    Scratch::under(env!("CARGO_TARGET_TMPDIR"))
}

/// Those that this kernel allows.
fn ways() -> Vec<By> {
    let place = scratch();
    let allowed = |by: &By| match Ssd::open_by(*by, std::slice::from_ref(&place.0), LIMIT, || {}) {
        Ok(_) => true,
        Err(error) => {
            eprintln!("skipped: {error}");
            false
        }
    };
    [By::Threads, By::Ring].into_iter().filter(allowed).collect()
}

fn open(by: By, path: &Path) -> Desk {
    let (ring, rung) = bell();
    let ssd = Ssd::open_by(by, &[path.to_owned()], LIMIT, ring).expect("it opens");
    assert_eq!(ssd.io(), by.name());
    Desk::new(Box::new(ssd), rung)
}

/// Another life of the tier, after a kill.
fn killed(desk: &mut Desk, by: By, path: &Path) {
    desk.replace(Box::new(Null::default()), bell().1);
    let (ring, rung) = bell();
    desk.replace(Box::new(Ssd::open_by(by, &[path.to_owned()], LIMIT, ring).expect("it opens")), rung);
}

/// The segment with the most blocks in it, and where its batches end: page by page from the first.
fn segment(path: &Path) -> (PathBuf, Vec<u8>) {
    let files = std::fs::read_dir(path.join("segments")).expect("a folder").map(|file| file.expect("a file").path());
    let batches = |path: &PathBuf| {
        let bytes = std::fs::read(path).expect("readable");
        bytes.chunks(PAGE as usize).filter(|page| page.starts_with(b"pyengBAT")).count()
    };
    let fullest = files.max_by_key(batches).expect("a segment");
    let bytes = std::fs::read(&fullest).expect("readable");
    (fullest, bytes)
}

// Goal: a file system without direct I/O and without preallocation serves as well. Method: ramfs, which knows neither.
#[test]
fn a_file_system_without_direct_io() {
    let Some(mount) = Mount::new("ramfs", "") else {
        eprintln!("skipped: only root can mount a ramfs");
        return;
    };
    let direct = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(OFlag::O_DIRECT.bits())
        .open(mount.0.0.join("probe"));
    assert!(direct.is_err(), "this kernel's ramfs knows direct I/O: another file system has to be found");
    for by in ways() {
        let path = mount.0.0.join(by.name());
        let mut desk = open(by, &path);
        // Several times what fits, so that segments are used again.
        for block in (0..300).map(record) {
            assert_eq!(desk.put(block, 0), Fate::Done);
            assert_eq!(desk.get(&block), Ok(content(&block, 0)));
        }
        desk.tier.close(PATIENCE);
        // What it dropped meanwhile.
        desk.poll();
        let before = desk.keys();
        killed(&mut desk, by, &path);
        assert!(before.len() > 30, "{} blocks", before.len());
        desk.check_found(&before);
        for block in desk.tier.records().collect::<Vec<_>>() {
            assert_eq!(desk.get(&block), Ok(content(&block, 0)));
        }
        assert_eq!(desk.get(&record(299)), Ok(content(&record(299), 0)));
    }
}

// Goal: what a kill and a cut leave of a segment is right or missing, whatever the file's length is then. Method: four blocks, each behind
// a header; the file cut around each page's edge of the last record, and inside.
#[test]
fn a_segment_that_was_cut() {
    for by in ways() {
        let place = scratch();
        let mut desk = open(by, &place.0);
        let blocks = [1, 2, 4, 5];
        blocks.iter().for_each(|&number| assert_eq!(desk.put(record(number), 0), Fate::Done));
        let op = desk.flush();
        assert_eq!(desk.wait(op), Fate::Done);
        desk.replace(Box::new(Null::default()), bell().1);
        let (file, whole) = segment(&place.0);
        // Each record is three pages, behind the segment's header.
        let last = PAGE * (1 + 3 * 3);
        assert!(whole[last as usize..].starts_with(b"pyengBAT"), "the last record");
        for edge in (0..=3).map(|page| last + page * PAGE) {
            for length in [edge - 1, edge, edge + 1, edge + 2000] {
                std::fs::write(&file, &whole).expect("writable");
                OpenOptions::new().write(true).open(&file).and_then(|file| file.set_len(length)).expect("writable");
                killed(&mut desk, by, &place.0);
                let right = |number: &u32| match desk.get(&record(*number)) {
                    Ok(bytes) => {
                        assert_eq!(bytes, content(&record(*number), 0), "a wrong byte of {number}, cut at {length}");
                        true
                    }
                    Err(fate) => {
                        assert!(matches!(fate, Fate::Missing | Fate::Corrupt), "{fate:?}");
                        false
                    }
                };
                let there = blocks.into_iter().filter(right).count();
                let expected = match length {
                    length if length < last => 2,
                    length if length < last + 3 * PAGE => 3,
                    _ => 4,
                };
                assert!(there >= expected, "{there} left, cut at {length}");
                // And it serves on.
                assert_eq!(desk.put(record(100), 0), Fate::Done, "cut at {length}");
                assert_eq!(desk.get(&record(100)), Ok(content(&record(100), 0)));
                desk.replace(Box::new(Null::default()), bell().1);
                for file in std::fs::read_dir(place.0.join("segments")).expect("a folder") {
                    std::fs::remove_file(file.expect("a file").path()).expect("ours");
                }
            }
        }
    }
}

// Goal: a file that somebody cuts, or writes over, under a tier that runs costs its blocks and nothing else. Method: both; reads and
// verifications of all blocks.
#[test]
fn a_file_that_changes_under_the_tier() {
    for by in ways() {
        for cut in [true, false] {
            let place = scratch();
            let mut desk = open(by, &place.0);
            (1..8).for_each(|number| assert_eq!(desk.put(record(number), 0), Fate::Done));
            let (file, _) = segment(&place.0);
            let opened = OpenOptions::new().write(true).open(&file).expect("writable");
            if cut {
                opened.set_len(PAGE * 3).expect("cut");
            } else {
                opened.write_all_at(&[0xEE; 64], PAGE * 2).expect("written");
            }
            let read = desk.read(&record(1));
            let checks: Vec<_> = (2..8).map(|number| desk.verify(&key(number))).collect();
            desk.wait_all();
            assert_eq!(desk.read_result(read), Err(Fate::Corrupt));
            let expected = if cut { Fate::Corrupt } else { Fate::Done };
            assert!(checks.iter().all(|op| desk.fates[op] == expected), "{:?}", desk.fates);
            assert_eq!(desk.tier.capacity().health, Health::Good);
            assert_eq!((desk.tier.find(&key(1)), desk.put(record(1), 0)), (None, Fate::Done));
            assert_eq!(desk.get(&record(1)), Ok(content(&record(1), 0)), "written anew");
        }
    }
}

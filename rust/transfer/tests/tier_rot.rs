//! The SSD tier and bytes that have changed behind its back.
//!
//! Goal: rot costs the copy that has it, never another and never a wrong byte. Method: each case by itself.

mod shelves;

use std::sync::Arc;

use pyengine_transfer::pool::disk::twin::MemoryDisk;
use pyengine_transfer::pool::disk::{OVERHEAD, Ssd};
use pyengine_transfer::pool::tier::{Fate, Health, Record};

use shelves::{Desk, bell, content, key, record};

/// Sixteen segments of 64 KiB.
const LIMIT: u64 = (16 << 16) + OVERHEAD;

fn over(disk: &MemoryDisk) -> Desk {
    let (ring, rung) = bell();
    let ssd = Ssd::over(vec![Arc::new(disk.clone())], LIMIT, 0, 1, ring).expect("it opens");
    Desk::new(Box::new(ssd), rung)
}

// Goal: rot in DRAM is not made durable unseen. Method: a block whose bytes no longer fit their checksums is written.
#[test]
fn rot_in_dram_shows() {
    let mut desk = over(&MemoryDisk::default());
    let op = desk.write_rotten(record(1));
    assert_eq!(desk.wait(op), Fate::Done);
    assert_eq!(desk.get(&record(1)), Err(Fate::Corrupt));
    assert_eq!((desk.tier.find(&key(1)), desk.put(record(1), 0)), (None, Fate::Done), "and can be written anew");
    assert_eq!(desk.get(&record(1)), Ok(content(&record(1), 0)));
}

/// Changes a bit of each copy of a block.
fn rot(disk: &MemoryDisk, block: &Record) {
    let bytes = content(block, 0).0;
    let mut copies = 0;
    for (file, _) in disk.files() {
        disk.alter(file, |all| {
            for page in all.chunks_exact_mut(4096).filter(|page| page[..64] == bytes[..64]) {
                page[100] ^= 1;
                copies += 1;
            }
        });
    }
    assert!(copies > 0, "it lies nowhere");
}

// Goal: a read that meets rot drops the copy that it read, and no other. Method: rot; the key is removed and written anew while the read
// is under way.
#[test]
fn rot_costs_no_later_copy() {
    let disk = MemoryDisk::default();
    let mut desk = over(&disk);
    assert_eq!(desk.put(record(1), 0), Fate::Done);
    rot(&disk, &record(1));
    let read = desk.read(&record(1));
    assert!(desk.tier.remove(&key(1)));
    let write = desk.write(record(1), 0);
    desk.wait_all();
    assert_eq!((desk.read_result(read), desk.fates[&write]), (Err(Fate::Corrupt), Fate::Done));
    assert_eq!(desk.get(&record(1)), Ok(content(&record(1), 0)));
}

// Goal: a block that is read as rotten is gone, also when it moved meanwhile. Method: a warm block in a full log rots, and is read, at
// each moment of a reclaim.
#[test]
fn rot_moves_nowhere() {
    for polls in 0..8 {
        let disk = MemoryDisk::default();
        let mut desk = over(&disk);
        assert_eq!((desk.put(record(1), 0), desk.get(&record(1)).is_ok()), (Fate::Done, true));
        let mut number = 10;
        while desk.dropped.is_empty() {
            desk.write(record(number), 0);
            desk.poll();
            number += 1;
        }
        (0..polls).for_each(|_| desk.poll());
        assert!(desk.tier.find(&key(1)).is_some(), "it is warm");
        rot(&disk, &record(1));
        let read = desk.read(&record(1));
        desk.wait(read);
        assert_eq!(desk.read_result(read), Err(Fate::Corrupt));
        assert_eq!(desk.tier.find(&key(1)), None, "after {polls}");
    }
}

// Goal: a verification drops what has rotted, for good, and warms nothing. Method: rot in one of three blocks; verification, a kill, and
// as many writes as push out what nobody has read.
#[test]
fn verification_drops_what_has_rotted() {
    let disk = MemoryDisk::default();
    let mut desk = over(&disk);
    (1..4).for_each(|number| assert_eq!(desk.put(record(number), 0), Fate::Done));
    rot(&disk, &record(2));
    let fates = [1, 2, 3, 2].map(|number| {
        let op = desk.verify(&key(number));
        desk.wait(op)
    });
    assert_eq!(fates, [Fate::Done, Fate::Corrupt, Fate::Done, Fate::Missing]);
    let op = desk.flush();
    assert_eq!(desk.wait(op), Fate::Done);
    let again = over(&disk.copy());
    assert_eq!(again.keys(), [key(1), key(3)].into());
    let mut number = 10;
    while !desk.dropped.contains(&key(3)) {
        assert_eq!(desk.put(record(number), 0), Fate::Done);
        number += 1;
        assert!(number < 1000, "it has become warm");
    }
}

// Goal: a verification waits for no device that has failed. Method: reads fail; then verifications, until the device counts as failed.
#[test]
fn verification_meets_a_failing_disk() {
    let disk = MemoryDisk::default();
    let mut desk = over(&disk);
    (1..4).for_each(|number| assert_eq!(desk.put(record(number), 0), Fate::Done));
    disk.fail(true, false);
    for number in [1, 2, 3, 1] {
        let op = desk.verify(&key(number));
        assert_eq!(desk.wait(op), Fate::Failed);
    }
    assert_eq!(desk.tier.capacity().health, Health::Failed);
    assert_eq!(desk.tier.capacity().blocks, 3, "what cannot be read is not known to be rotten");
}

//! What is where, in memory: 60 bytes a block, and at most 12 more to find it by its key.
//!
//! Entries lie in chunks that never move, so that memory grows in small steps; a table of their numbers finds them by key; a
//! list through the entries joins those of one segment. What few blocks differ in (owner, layout) is kept once.

use std::collections::HashMap;

use hashbrown::HashTable;
use rustc_hash::FxHashMap;

use crate::types::{BlockKey, Layout, Owner};

use super::super::Place;
use super::super::tier::Record;
use super::io::FileId;

const NONE: u32 = u32::MAX;
/// Entries in a chunk: 60 KiB, the step in which memory grows.
const CHUNK: usize = 1024;

/// Where a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// In which file.
    pub file: FileId,
    /// From which page.
    pub page: u32,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    key: [u8; 16],
    parent: [u8; 16],
    position: u32,
    kind: u32,
    digest: u32,
    page: u32,
    /// Neighbours in the list of the segment.
    before: u32,
    behind: u32,
    file: u16,
    used: bool,
    /// Read since it was written.
    warm: bool,
}

const EMPTY: Slot = Slot {
    key: [0; 16],
    parent: [0; 16],
    position: 0,
    kind: 0,
    digest: 0,
    page: 0,
    before: NONE,
    behind: NONE,
    file: 0,
    used: false,
    warm: false,
};

/// Owners and layouts that blocks share.
#[derive(Debug, Default)]
struct Kinds {
    numbers: HashMap<(Owner, Layout), u32>,
    kinds: Vec<((Owner, Layout), u32)>,
    free: Vec<u32>,
}

impl Kinds {
    fn take(&mut self, kind: (Owner, Layout)) -> u32 {
        if let Some(&number) = self.numbers.get(&kind) {
            self.kinds[number as usize].1 += 1;
            return number;
        }
        let number = self.free.pop().unwrap_or(self.kinds.len() as u32);
        if number as usize == self.kinds.len() {
            self.kinds.push((kind, 1));
        } else {
            self.kinds[number as usize] = (kind, 1);
        }
        self.numbers.insert(kind, number);
        number
    }

    fn give(&mut self, number: u32) {
        let (kind, users) = &mut self.kinds[number as usize];
        *users -= 1;
        if *users == 0 {
            self.numbers.remove(kind);
            self.free.push(number);
        }
    }
}

/// What is known of a block on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// What it is.
    pub record: Record,
    /// Where it lies.
    pub location: Location,
    /// What its strips' checksums come to.
    pub digest: u32,
    /// It was read since it was written.
    pub warm: bool,
}

/// All blocks of one device.
#[derive(Debug, Default)]
pub struct Index {
    chunks: Vec<Box<[Slot; CHUNK]>>,
    table: HashTable<u32>,
    /// First of the unused entries, joined by `behind`.
    free: Option<u32>,
    used: u32,
    /// First entry of each segment.
    firsts: FxHashMap<FileId, u32>,
    kinds: Kinds,
}

/// A hash of a key, the same in every life. Keys are digests already, but a test's need not be.
pub fn hash(key: &[u8; 16]) -> u64 {
    let (low, high) = (u64::from_le_bytes(half(key, 0)), u64::from_le_bytes(half(key, 8)));
    let mixed = (low ^ high.rotate_left(32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ (mixed >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

fn half(key: &[u8; 16], at: usize) -> [u8; 8] {
    let mut half = [0; 8];
    half.copy_from_slice(&key[at..at + 8]);
    half
}

impl Index {
    /// How many blocks.
    pub fn len(&self) -> usize {
        self.used as usize
    }

    /// Bytes of memory that it takes.
    pub fn memory(&self) -> usize {
        let kind = size_of::<((Owner, Layout), u32)>();
        // A table has room for a seventh more than it says, and a byte for each place.
        let table = (self.table.capacity() * 8 / 7) * (size_of::<u32>() + 1);
        self.chunks.len() * CHUNK * size_of::<Slot>()
            + self.chunks.capacity() * size_of::<usize>()
            + table
            + (self.kinds.kinds.capacity() + 2 * self.kinds.numbers.capacity()) * kind
            + self.firsts.capacity() * 16
    }

    /// The number of a block's entry.
    pub fn number(&self, key: &BlockKey) -> Option<u32> {
        self.table.find(hash(&key.0), |&number| self.slot(number).key == key.0).copied()
    }

    /// What is known of a block.
    pub fn find(&self, key: &BlockKey) -> Option<Found> {
        self.number(key).map(|number| self.at(number))
    }

    /// What an entry says.
    pub fn at(&self, number: u32) -> Found {
        let slot = self.slot(number);
        let (owner, layout) = self.kinds.kinds[slot.kind as usize].0;
        let place = Place { key: BlockKey(slot.key), parent: BlockKey(slot.parent), position: slot.position };
        let location = Location { file: slot.file, page: slot.page };
        Found { record: Record { place, owner, layout }, location, digest: slot.digest, warm: slot.warm }
    }

    /// A block lies there now; what was known of it before is forgotten.
    pub fn insert(&mut self, record: Record, location: Location, digest: u32) {
        self.remove(&record.place.key);
        let number = match self.free {
            Some(number) => {
                let next = self.slot(number).behind;
                self.free = (next != NONE).then_some(next);
                number
            }
            None => {
                let number = (self.chunks.len() * CHUNK) as u32;
                self.chunks.push(Box::new([EMPTY; CHUNK]));
                // All of it but the first is free.
                for next in number + 1..number + CHUNK as u32 {
                    self.slot_mut(next).behind = if next + 1 < number + CHUNK as u32 { next + 1 } else { NONE };
                }
                self.free = Some(number + 1);
                number
            }
        };
        let behind = self.firsts.insert(location.file, number).unwrap_or(NONE);
        if behind != NONE {
            self.slot_mut(behind).before = number;
        }
        let kind = self.kinds.take((record.owner, record.layout));
        let Place { key, parent, position } = record.place;
        *self.slot_mut(number) = Slot {
            key: key.0,
            parent: parent.0,
            position,
            kind,
            digest,
            page: location.page,
            before: NONE,
            behind,
            file: location.file,
            used: true,
            warm: false,
        };
        let chunks = &self.chunks;
        self.table.insert_unique(hash(&key.0), number, |&number| hash(&slot_in(chunks, number).key));
        self.used += 1;
    }

    /// It was read.
    pub fn warm(&mut self, key: &BlockKey) {
        if let Some(number) = self.number(key) {
            self.slot_mut(number).warm = true;
        }
    }

    /// Forgets a block. True if there was one.
    pub fn remove(&mut self, key: &BlockKey) -> bool {
        let chunks = &self.chunks;
        let Ok(entry) = self.table.find_entry(hash(&key.0), |&number| slot_in(chunks, number).key == key.0) else {
            return false;
        };
        let (number, _) = entry.remove();
        let slot = *self.slot(number);
        if slot.before != NONE {
            self.slot_mut(slot.before).behind = slot.behind;
        } else if slot.behind != NONE {
            self.firsts.insert(slot.file, slot.behind);
        } else {
            self.firsts.remove(&slot.file);
        }
        if slot.behind != NONE {
            self.slot_mut(slot.behind).before = slot.before;
        }
        self.kinds.give(slot.kind);
        *self.slot_mut(number) = Slot { behind: self.free.unwrap_or(NONE), ..EMPTY };
        self.free = Some(number);
        self.used -= 1;
        true
    }

    /// How many blocks each owner has, by layout.
    pub fn usage(&self) -> impl Iterator<Item = (Owner, Layout, u64)> + '_ {
        let kinds = self.kinds.kinds.iter().filter(|(_, users)| *users > 0);
        kinds.map(|((owner, layout), users)| (*owner, *layout, u64::from(*users)))
    }

    /// The keys in a segment, the last written first.
    pub fn keys_in(&self, file: FileId) -> Vec<BlockKey> {
        let first = self.firsts.get(&file).copied();
        let next = |&number: &u32| Some(self.slot(number).behind).filter(|&number| number != NONE);
        std::iter::successors(first, next).map(|number| BlockKey(self.slot(number).key)).collect()
    }

    /// True if no block lies in this segment.
    pub fn is_empty_in(&self, file: FileId) -> bool {
        !self.firsts.contains_key(&file)
    }

    /// Numbers that entries have had: below this one.
    pub fn places(&self) -> u32 {
        (self.chunks.len() * CHUNK) as u32
    }

    /// What the entry of this number says, if it is one.
    pub fn place(&self, number: u32) -> Option<Found> {
        (number < self.places() && self.slot(number).used).then(|| self.at(number))
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = Found> + '_ {
        (0..self.places()).filter_map(|number| self.place(number))
    }

    /// Panics if its parts contradict each other.
    pub fn check(&self) {
        assert_eq!(self.iter().count(), self.len());
        assert_eq!(self.table.len(), self.len());
        for found in self.iter() {
            assert_eq!(self.find(&found.record.place.key), Some(found));
        }
        let listed: usize = self.firsts.keys().map(|&file| self.keys_in(file).len()).sum();
        assert_eq!(listed, self.len(), "lists of segments");
        for &file in self.firsts.keys() {
            let inside = |key: &BlockKey| self.find(key).is_some_and(|found| found.location.file == file);
            assert!(self.keys_in(file).iter().all(inside));
        }
        assert_eq!(self.kinds.kinds.iter().map(|(_, users)| *users as usize).sum::<usize>(), self.len());
    }

    fn slot(&self, number: u32) -> &Slot {
        slot_in(&self.chunks, number)
    }

    fn slot_mut(&mut self, number: u32) -> &mut Slot {
        &mut self.chunks[number as usize / CHUNK][number as usize % CHUNK]
    }
}

fn slot_in(chunks: &[Box<[Slot; CHUNK]>], number: u32) -> &Slot {
    &chunks[number as usize / CHUNK][number as usize % CHUNK]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use std::collections::BTreeMap;

    fn record(key: u64, tenant: u64) -> Record {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&key.to_le_bytes());
        let place = Place { key: BlockKey(bytes), parent: BlockKey([1; 16]), position: key as u32 };
        Record { place, owner: Owner { namespace: 1, tenant }, layout: Layout { strips: 2, strip_bytes: 64 } }
    }

    // Goal: it is a map, whose lists by segment are right. Method: random operations beside a BTreeMap.
    #[test]
    fn a_map_with_lists() {
        let (mut index, mut model, mut random) = (Index::default(), BTreeMap::new(), Random(5));
        for step in 0..20_000u32 {
            let record = record(random.below(3000), random.below(5));
            let key = record.place.key;
            if random.permille(600) {
                let location = Location { file: random.below(7) as FileId, page: step };
                index.insert(record, location, step);
                model.insert(key, (record, location));
            } else {
                assert_eq!(index.remove(&key), model.remove(&key).is_some());
            }
            let found = index.find(&key).map(|found| (found.record, found.location));
            assert_eq!(found, model.get(&key).copied());
            if step % 1000 == 0 {
                index.check();
            }
        }
        for file in 0..8 {
            let inside = model.values().filter(|(_, location)| location.file == file).count();
            assert_eq!(index.keys_in(file).len(), inside);
            assert_eq!(index.is_empty_in(file), inside == 0);
        }
    }

    // Goal: at most 128 bytes a block, whatever their number. Method: counted from capacities at every size.
    #[test]
    fn small() {
        assert_eq!(size_of::<Slot>(), 60);
        let mut index = Index::default();
        for key in 0..300_000u64 {
            index.insert(record(key, key % 10), Location { file: (key / 1000) as FileId, page: 1 }, 0);
            if key > 5000 {
                assert!(index.memory() as u64 <= 128 * key, "{} bytes for {key} blocks", index.memory());
            }
        }
        assert!(index.memory() <= 80 * 300_000, "{} bytes", index.memory());
    }
}

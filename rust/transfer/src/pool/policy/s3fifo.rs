//! S3-FIFO: blocks seen once pass through a small queue, and only what was used again enters the main one.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use super::ranks::{Ranks, cover, shrink};
use super::{Evict, Gone};
use crate::pool::Place;
use crate::types::BlockKey;

/// The small queue gives way while it has more than a tenth of all candidates: the share of the paper ("FIFO queues are
/// all you need for cache eviction"), which found results to differ little between 5 and 20 %.
const SMALL: usize = 10;
/// Uses are counted up to here.
const USES: u8 = 3;

/// Three queues, each in order of entry. A block enters the small one, or the main one if it was evicted from the small
/// one not long ago (its key is a ghost). Used more than once in the small queue: it moves to the end of the main one.
/// Used in the main queue: it goes to its end once more for each use, up to three. Else it goes.
///
/// Only candidates are looked at, and shares are counted over them: a block that may not go keeps its place. With no
/// prefixes and nothing in use this is S3-FIFO to the letter.
#[derive(Debug, Default)]
pub struct S3Fifo {
    /// Counts entries into queues.
    clock: u64,
    small: Ranks<u64>,
    main: Ranks<u64>,
    blocks: Vec<Block>,
    /// Blocks that are here.
    known: usize,
    ghosts: Ghosts,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    fingerprint: u32,
    in_main: bool,
    uses: u8,
}

/// First bytes of the key, which is a hash. Two blocks of one fingerprint: one may enter the main queue too early.
fn fingerprint(key: BlockKey) -> u32 {
    u32::from_le_bytes([key.0[0], key.0[1], key.0[2], key.0[3]])
}

impl S3Fifo {
    fn queue(&mut self, slot: u32) -> &mut Ranks<u64> {
        if self.blocks[slot as usize].in_main { &mut self.main } else { &mut self.small }
    }

    /// The block takes the last place of its queue.
    fn enter(&mut self, slot: u32) {
        self.clock += 1;
        let clock = self.clock;
        self.queue(slot).set(slot, clock);
    }
}

/// True if it is the small queue's turn to give a block.
fn small_gives(small: usize, main: usize) -> bool {
    small > 0 && (main == 0 || small > (small + main) / SMALL)
}

impl Evict for S3Fifo {
    fn publish(&mut self, slot: u32, place: &Place) {
        let number = slot as usize;
        let fingerprint = fingerprint(place.key);
        let block = Block { fingerprint, in_main: self.ghosts.remove(fingerprint), uses: 0 };
        cover(&mut self.blocks, number, block);
        self.blocks[number] = block;
        self.known += 1;
        self.enter(slot);
    }

    fn hit(&mut self, slot: u32) {
        let block = &mut self.blocks[slot as usize];
        block.uses = (block.uses + 1).min(USES);
    }

    fn rest(&mut self, _: u32) {}

    fn allow(&mut self, slot: u32) {
        self.queue(slot).add(slot);
    }

    fn forbid(&mut self, slot: u32) {
        self.queue(slot).remove(slot);
    }

    fn pop(&mut self) -> Option<u32> {
        // Ends: each turn takes a use away or moves a block out of the small queue, for good.
        loop {
            let from_small = small_gives(self.small.len(), self.main.len());
            let slot = if from_small { self.small.first() } else { self.main.first() }?;
            let block = &mut self.blocks[slot as usize];
            let stays = if from_small { block.uses > 1 } else { block.uses > 0 };
            if from_small {
                self.small.remove(slot);
            } else {
                self.main.remove(slot);
            }
            if !stays {
                return Some(slot);
            }
            block.uses = if from_small { 0 } else { block.uses - 1 };
            block.in_main = true;
            self.enter(slot);
            self.main.add(slot);
        }
    }

    fn remove(&mut self, slot: u32, gone: Gone) {
        self.known -= 1;
        let block = self.blocks[slot as usize];
        if gone == Gone::Evicted && !block.in_main {
            self.ghosts.insert(block.fingerprint);
        }
        self.ghosts.shrink(self.known);
    }

    fn renumber(&mut self, last: u32, to: u32) {
        self.blocks[to as usize] = self.blocks[last as usize];
        self.blocks.truncate(last as usize);
        shrink(&mut self.blocks);
        // Each knows those that have ever been in it.
        self.small.renumber(last, to);
        self.main.renumber(last, to);
    }

    fn len(&self) -> usize {
        self.small.len() + self.main.len()
    }

    fn contains(&self, slot: u32) -> bool {
        self.small.contains(slot) || self.main.contains(slot)
    }

    /// `pop` played through beside the queues, which stay as they are.
    fn coldest(&self, limit: usize) -> Vec<u32> {
        let (mut small, mut main) = (self.small.ascending(), self.main.ascending());
        let (mut smalls, mut mains) = (self.small.len(), self.main.len());
        let mut moved: VecDeque<(u32, u8)> = VecDeque::new();
        let mut victims = Vec::new();
        while victims.len() < limit && smalls + mains > 0 {
            if small_gives(smalls, mains) {
                let slot = small.next().expect("as many as were counted");
                smalls -= 1;
                if self.blocks[slot as usize].uses > 1 {
                    mains += 1;
                    moved.push_back((slot, 0));
                } else {
                    victims.push(slot);
                }
            } else {
                let first = main.next().map(|slot| (slot, self.blocks[slot as usize].uses));
                let (slot, uses) = first.or_else(|| moved.pop_front()).expect("as many as were counted");
                if uses > 0 {
                    moved.push_back((slot, uses - 1));
                } else {
                    mains -= 1;
                    victims.push(slot);
                }
            }
        }
        victims
    }

    fn bytes(&self) -> usize {
        self.small.bytes() + self.main.bytes() + self.blocks.capacity() * size_of::<Block>() + self.ghosts.bytes()
    }
}

/// Fingerprints of what went from the small queue, oldest first. As many as blocks are here, at most.
#[derive(Debug, Default)]
struct Ghosts {
    queue: VecDeque<u32>,
    /// Number of a fingerprint's latest entry: those in `queue` end before `next`.
    latest: FxHashMap<u32, u32>,
    next: u32,
}

impl Ghosts {
    fn insert(&mut self, fingerprint: u32) {
        self.queue.push_back(fingerprint);
        self.latest.insert(fingerprint, self.next);
        self.next = self.next.wrapping_add(1);
    }

    /// True if it was there.
    fn remove(&mut self, fingerprint: u32) -> bool {
        self.latest.remove(&fingerprint).is_some()
    }

    fn shrink(&mut self, limit: usize) {
        while self.queue.len() > limit {
            let number = self.next.wrapping_sub(self.queue.len() as u32);
            let Some(oldest) = self.queue.pop_front() else { return };
            // It may have left and come again since.
            if self.latest.get(&oldest) == Some(&number) {
                self.latest.remove(&oldest);
            }
        }
    }

    fn bytes(&self) -> usize {
        // A table of pairs with a byte of control each.
        self.queue.capacity() * size_of::<u32>() + self.latest.capacity() * 8 / 7 * (size_of::<(u32, u32)>() + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Goal: a fingerprint that left and came again stays as long as its latest entry. Method: let the first entry go.
    #[test]
    fn ghosts_come_again() {
        let mut ghosts = Ghosts { next: u32::MAX, ..Ghosts::default() };
        ghosts.insert(7);
        assert!(ghosts.remove(7) && !ghosts.remove(7));
        ghosts.insert(8);
        ghosts.insert(7);
        ghosts.shrink(2);
        assert_eq!((ghosts.queue.len(), ghosts.latest.len()), (2, 2));
        ghosts.shrink(1);
        assert!(!ghosts.remove(8) && ghosts.remove(7));
    }
}

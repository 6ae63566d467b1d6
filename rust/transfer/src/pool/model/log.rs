//! The tier behind a modelled pool, reduced to what `pool/disk` decides.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::pool::Place;
use crate::types::BlockKey;

/// A tier that writes segments one after the other and gives up the oldest. Blocks in it that were read since they were
/// written are written again, up to a quarter of it.
#[derive(Debug)]
pub(super) struct Log {
    capacity: usize,
    /// Oldest first. Those whose number is not that of `here` any more were given up meanwhile.
    order: VecDeque<(Place, u64)>,
    here: FxHashMap<BlockKey, Block>,
    written: u64,
    /// Blocks that it let go of to make room.
    pub dropped: u64,
    /// XOR of the keys that are here.
    pub xor: [u8; 16],
}

#[derive(Clone, Copy, Debug)]
struct Block {
    number: u64,
    /// Since it was written.
    read: bool,
}

impl Log {
    /// Segments in a tier.
    const SEGMENTS: usize = 64;

    pub(super) fn new(capacity: u32) -> Self {
        Self {
            capacity: capacity as usize,
            order: VecDeque::new(),
            here: FxHashMap::default(),
            written: 0,
            dropped: 0,
            xor: [0; 16],
        }
    }

    pub(super) fn exists(&self) -> bool {
        self.capacity > 0
    }

    pub(super) fn len(&self) -> usize {
        self.here.len()
    }

    pub(super) fn has(&self, key: &BlockKey) -> bool {
        self.here.contains_key(key)
    }

    /// True if the block is there.
    pub(super) fn read(&mut self, key: &BlockKey) -> bool {
        self.here.get_mut(key).map(|block| block.read = true).is_some()
    }

    /// True if it was not there. `gone` is told of each block that makes room.
    pub(super) fn write(&mut self, place: Place, gone: &mut impl FnMut(BlockKey)) -> bool {
        if self.capacity == 0 || self.has(&place.key) {
            return false;
        }
        while self.here.len() >= self.capacity {
            self.reclaim(gone);
        }
        if self.order.len() > 2 * self.capacity {
            self.order.retain(|(place, number)| self.here.get(&place.key).is_some_and(|block| block.number == *number));
        }
        self.order.push_back((place, self.written));
        self.here.insert(place.key, Block { number: self.written, read: false });
        self.written += 1;
        self.mark(place.key);
        true
    }

    /// Those that are there, the oldest first.
    pub(super) fn blocks(&self) -> impl Iterator<Item = Place> {
        let here =
            |(place, number): &&(Place, u64)| self.here.get(&place.key).is_some_and(|block| block.number == *number);
        self.order.iter().filter(here).map(|(place, _)| *place)
    }

    fn remove(&mut self, key: &BlockKey) {
        if self.here.remove(key).is_some() {
            self.mark(*key);
        }
    }

    fn reclaim(&mut self, gone: &mut impl FnMut(BlockKey)) {
        let segment = (self.capacity / Self::SEGMENTS).max(1).min(self.order.len());
        let mut may_move = segment / 4;
        for (place, number) in self.order.drain(..segment).collect::<Vec<_>>() {
            let Some(block) = self.here.get_mut(&place.key).filter(|block| block.number == number) else { continue };
            if may_move > 0 && std::mem::take(&mut block.read) {
                may_move -= 1;
                self.order.push_back((place, number));
            } else {
                self.remove(&place.key);
                self.dropped += 1;
                gone(place.key);
            }
        }
    }

    fn mark(&mut self, key: BlockKey) {
        self.xor.iter_mut().zip(key.0).for_each(|(sum, byte)| *sum ^= byte);
    }

    pub(super) fn check(&self) {
        assert_eq!(self.blocks().count(), self.here.len(), "the tier's order and its blocks differ");
        assert!(self.here.len() <= self.capacity, "the tier is too full");
        assert!(self.order.len() <= 2 * self.capacity + 1, "the tier remembers too much");
        let mut xor = [0; 16];
        self.here.keys().for_each(|key| xor.iter_mut().zip(key.0).for_each(|(sum, byte)| *sum ^= byte));
        assert_eq!(xor, self.xor, "the tier's digest has drifted");
    }
}

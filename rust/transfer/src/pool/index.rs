//! Which slot has a block: slot numbers by key, 5 bytes each and what a table keeps free.
//!
//! The keys are not kept a second time: they are read in the slots, which are needed next anyway.

use std::hash::BuildHasher;

use hashbrown::HashTable;
use rustc_hash::FxBuildHasher;

use super::slot::Slot;
use crate::types::BlockKey;

/// The published blocks. Every method is given the pool's slots.
#[derive(Debug, Default)]
pub(super) struct Index(HashTable<u32>);

/// Keys are keyed hashes, so those who could choose them to fall into one place of the table have the secret.
fn hash(key: &BlockKey) -> u64 {
    FxBuildHasher.hash_one(key)
}

fn key(slots: &[Slot], slot: u32) -> Option<BlockKey> {
    slots[slot as usize].place().map(|place| place.key)
}

impl Index {
    /// How many blocks there are.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The slot of a block.
    pub(super) fn get(&self, slots: &[Slot], wanted: &BlockKey) -> Option<u32> {
        self.0.find(hash(wanted), |&slot| key(slots, slot) == Some(*wanted)).copied()
    }

    /// The slot, whose place has the key, has that block now. No other has it.
    pub(super) fn insert(&mut self, slots: &[Slot], slot: u32) {
        let hash_of = |&slot: &u32| key(slots, slot).map_or(0, |key| hash(&key));
        self.0.insert_unique(hash_of(&slot), slot, hash_of);
    }

    /// The slot, whose place still has the key, has that block no more.
    pub(super) fn remove(&mut self, slots: &[Slot], slot: u32) {
        let hash = key(slots, slot).map_or(0, |key| hash(&key));
        if let Ok(entry) = self.0.find_entry(hash, |&other| other == slot) {
            entry.remove();
        }
    }
}

//! Least recently used first.

use std::collections::{BTreeMap, HashMap};

use super::Evict;

/// Evicts the slot whose last use is longest ago. As the pool adds a prefix from tail to head, its tail goes first.
#[derive(Debug, Default)]
pub struct Lru {
    /// Counts uses; at a billion a second it lasts for centuries.
    clock: u64,
    by_use: BTreeMap<u64, u32>,
    used: HashMap<u32, u64>,
}

impl Evict for Lru {
    fn add(&mut self, slot: u32) {
        self.remove(slot);
        self.clock += 1;
        self.by_use.insert(self.clock, slot);
        self.used.insert(slot, self.clock);
    }

    fn remove(&mut self, slot: u32) {
        if let Some(used) = self.used.remove(&slot) {
            self.by_use.remove(&used);
        }
    }

    fn pop(&mut self) -> Option<u32> {
        let (_, slot) = self.by_use.pop_first()?;
        self.used.remove(&slot);
        Some(slot)
    }

    fn peek(&self) -> Option<u32> {
        self.by_use.first_key_value().map(|(_, slot)| *slot)
    }

    fn len(&self) -> usize {
        self.by_use.len()
    }

    fn contains(&self, slot: u32) -> bool {
        self.used.contains_key(&slot)
    }

    fn order(&self) -> Vec<u32> {
        self.by_use.values().copied().collect()
    }
}

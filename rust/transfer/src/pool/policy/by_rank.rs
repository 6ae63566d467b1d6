//! Policies that are a rank of each block, lowest first: all but those with queues.

use std::fmt::Debug;

use super::ranks::Ranks;
use super::{Evict, Gone};
use crate::pool::Place;

/// What a block's rank is and how uses change it.
pub trait Rule: Debug + Send {
    /// What blocks are ordered by, with what has to be remembered of a block. Different for all blocks.
    type Rank: Copy + Debug + Default + Ord + Send;
    /// A block was published. `time` is larger than all before.
    fn publish(&self, place: &Place, time: u64) -> Self::Rank;
    /// It was found.
    fn hit(&self, rank: Self::Rank) -> Self::Rank;
    /// A use of it has ended.
    fn rest(&self, rank: Self::Rank, time: u64) -> Self::Rank;
    /// A block of this rank was chosen to go.
    fn evicted(&mut self, _: Self::Rank) {}
}

/// The candidate of the lowest rank goes first.
#[derive(Debug)]
pub struct ByRank<R: Rule> {
    rule: R,
    /// Counts uses; at a billion a second it lasts for centuries.
    clock: u64,
    ranks: Ranks<R::Rank>,
}

impl<R: Rule> ByRank<R> {
    /// No block yet.
    pub fn new(rule: R) -> Self {
        Self { rule, clock: 0, ranks: Ranks::default() }
    }
}

impl<R: Rule> Evict for ByRank<R> {
    fn publish(&mut self, slot: u32, place: &Place) {
        self.clock += 1;
        self.ranks.set(slot, self.rule.publish(place, self.clock));
    }

    fn hit(&mut self, slot: u32) {
        self.ranks.set(slot, self.rule.hit(self.ranks.rank(slot)));
    }

    fn rest(&mut self, slot: u32) {
        self.clock += 1;
        self.ranks.set(slot, self.rule.rest(self.ranks.rank(slot), self.clock));
    }

    fn allow(&mut self, slot: u32) {
        self.ranks.add(slot);
    }

    fn forbid(&mut self, slot: u32) {
        self.ranks.remove(slot);
    }

    fn pop(&mut self) -> Option<u32> {
        let slot = self.ranks.first()?;
        self.ranks.remove(slot);
        self.rule.evicted(self.ranks.rank(slot));
        Some(slot)
    }

    fn remove(&mut self, _: u32, _: Gone) {}

    fn renumber(&mut self, last: u32, to: u32) {
        self.ranks.renumber(last, to);
    }

    fn len(&self) -> usize {
        self.ranks.len()
    }

    fn contains(&self, slot: u32) -> bool {
        self.ranks.contains(slot)
    }

    fn coldest(&self, limit: usize) -> Vec<u32> {
        self.ranks.ascending().take(limit).collect()
    }

    fn bytes(&self) -> usize {
        self.ranks.bytes()
    }
}

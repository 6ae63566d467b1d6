//! Candidates by rank, lowest first: what most policies are made of.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Where a slot is that is no candidate.
const ABSENT: u32 = u32::MAX;
/// Children of a node. Four lie in one line of a cache, and the heap is half as deep as with two.
const WIDTH: usize = 4;

/// A rank for each slot, and a heap of the slots that are candidates. Every operation is O(log candidates); a slot takes
/// 8 bytes beside its rank. Ranks are distinct, or slots of one rank come in any order.
#[derive(Clone, Debug, Default)]
pub struct Ranks<K> {
    ranks: Vec<K>,
    heap: Vec<u32>,
    /// Index in `heap`, by slot.
    at: Vec<u32>,
}

impl<K: Copy + Default + Ord> Ranks<K> {
    /// Gives a slot its rank; a candidate is moved to where it then belongs.
    pub fn set(&mut self, slot: u32, rank: K) {
        let number = slot as usize;
        if number >= self.ranks.len() {
            cover(&mut self.ranks, number, K::default());
            cover(&mut self.at, number, ABSENT);
        }
        self.ranks[number] = rank;
        if self.at[number] != ABSENT {
            let at = self.rise(self.at[number] as usize);
            self.sink(at);
        }
    }

    /// A slot's rank, which has been set.
    pub fn rank(&self, slot: u32) -> K {
        self.ranks[slot as usize]
    }

    /// Makes a slot, whose rank has been set, a candidate.
    pub fn add(&mut self, slot: u32) {
        if !self.contains(slot) {
            self.heap.push(slot);
            self.rise(self.heap.len() - 1);
        }
    }

    /// The slot is no candidate any more. It keeps its rank.
    pub fn remove(&mut self, slot: u32) {
        if !self.contains(slot) {
            return;
        }
        let at = std::mem::replace(&mut self.at[slot as usize], ABSENT) as usize;
        self.heap.swap_remove(at);
        if at < self.heap.len() {
            let at = self.rise(at);
            self.sink(at);
        }
    }

    /// The slot `last`, the highest one, is called `to` from now on, where none is any more; or it is that one itself.
    pub fn renumber(&mut self, last: u32, to: u32) {
        let Some(&at) = self.at.get(last as usize) else { return };
        if last != to {
            self.ranks[to as usize] = self.ranks[last as usize];
            self.at[to as usize] = at;
            if at != ABSENT {
                self.heap[at as usize] = to;
            }
        }
        self.ranks.truncate(last as usize);
        self.at.truncate(last as usize);
        shrink(&mut self.ranks);
        shrink(&mut self.at);
        shrink(&mut self.heap);
    }

    /// The candidate of the lowest rank.
    pub fn first(&self) -> Option<u32> {
        self.heap.first().copied()
    }

    /// How many candidates there are.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// True if there is none.
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }

    /// True if the slot is a candidate.
    pub fn contains(&self, slot: u32) -> bool {
        self.at.get(slot as usize).is_some_and(|&at| at != ABSENT)
    }

    /// The candidates from the lowest rank up. Each costs O(log of those taken so far).
    pub fn ascending(&self) -> impl Iterator<Item = u32> {
        let mut open: BinaryHeap<Reverse<(K, usize)>> = BinaryHeap::new();
        open.extend(self.heap.first().map(|&slot| Reverse((self.rank(slot), 0))));
        std::iter::from_fn(move || {
            let Reverse((_, at)) = open.pop()?;
            let children = (WIDTH * at + 1..=WIDTH * (at + 1)).take_while(|&child| child < self.heap.len());
            open.extend(children.map(|child| Reverse((self.rank(self.heap[child]), child))));
            Some(self.heap[at])
        })
    }

    /// Bytes taken.
    pub fn bytes(&self) -> usize {
        self.ranks.capacity() * size_of::<K>() + (self.heap.capacity() + self.at.capacity()) * size_of::<u32>()
    }

    /// Moves the slot at this index towards the top; returns where it ends. Notes its place in any case.
    fn rise(&mut self, mut at: usize) -> usize {
        let slot = self.heap[at];
        while at > 0 {
            let parent = (at - 1) / WIDTH;
            if self.rank(self.heap[parent]) <= self.rank(slot) {
                break;
            }
            self.put(at, self.heap[parent]);
            at = parent;
        }
        self.put(at, slot);
        at
    }

    fn sink(&mut self, mut at: usize) {
        let slot = self.heap[at];
        loop {
            let children = WIDTH * at + 1..(WIDTH * (at + 1) + 1).min(self.heap.len());
            let Some(least) = children.min_by_key(|&child| self.rank(self.heap[child])) else { break };
            if self.rank(self.heap[least]) >= self.rank(slot) {
                break;
            }
            self.put(at, self.heap[least]);
            at = least;
        }
        self.put(at, slot);
    }

    fn put(&mut self, at: usize, slot: u32) {
        self.heap[at] = slot;
        self.at[slot as usize] = at as u32;
    }
}

/// Makes a vector have this index. What is kept ready for more is an eighth, not as much again: a pool has millions of slots.
pub fn cover<T: Clone>(all: &mut Vec<T>, index: usize, empty: T) {
    if index >= all.capacity() {
        all.reserve_exact(index + 1 - all.len() + index / 8);
    }
    if index >= all.len() {
        all.resize(index + 1, empty);
    }
}

/// Gives back what is kept ready for more, once that is most of it.
pub fn shrink<T>(all: &mut Vec<T>) {
    if all.capacity() > 4 * all.len() + 1024 {
        all.shrink_to(2 * all.len());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::random::Random;

    // Goal: the heap is a sorted set. Method: random operations beside one, whose order is compared after each.
    #[test]
    fn sorted() {
        let mut random = Random(7);
        let (mut ranks, mut model) = (Ranks::default(), BTreeSet::new());
        for time in 0..20_000u64 {
            let slot = random.below(64) as u32;
            match random.below(5) {
                4 => {
                    // Somebody takes a place that is nobody's, and the last one takes it over from him.
                    let last = ranks.at.len().saturating_sub(1) as u32;
                    if slot < last && !ranks.contains(slot) {
                        if ranks.contains(last) {
                            model.remove(&(ranks.rank(last), last));
                            model.insert((ranks.rank(last), slot));
                        }
                        ranks.renumber(last, slot);
                    }
                }
                0 | 1 => {
                    let rank = (random.below(8), time);
                    if ranks.contains(slot) {
                        model.remove(&(ranks.rank(slot), slot));
                        model.insert((rank, slot));
                    }
                    ranks.set(slot, rank);
                    if random.permille(500) {
                        ranks.add(slot);
                        model.insert((rank, slot));
                    }
                }
                2 => {
                    let was = ranks.contains(slot);
                    assert_eq!(was, model.iter().any(|(_, known)| *known == slot));
                    if was {
                        model.remove(&(ranks.rank(slot), slot));
                    }
                    ranks.remove(slot);
                }
                _ => {
                    if let Some(first) = ranks.first() {
                        ranks.remove(first);
                        assert_eq!(model.pop_first().map(|(_, slot)| slot), Some(first));
                    }
                }
            }
            assert!(ranks.ascending().eq(model.iter().map(|(_, slot)| *slot)));
            assert_eq!(ranks.len(), model.len());
        }
    }
}

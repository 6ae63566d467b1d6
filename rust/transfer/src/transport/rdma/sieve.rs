//! Which of many things of one kind goes when there is no room for another: SIEVE (NSDI '24).
//!
//! ```text
//! newest -> [k] [h*] [d] [c*] [a] <- oldest       * = used since the hand last passed
//!                     ^ hand, moves towards the newest: takes marks away, and takes the first that has none
//! ```
//!
//! What is used often keeps its place without being moved, and what was used once goes first.

use std::collections::VecDeque;

/// Keys in order of age, a mark on each, and a hand.
#[derive(Debug)]
pub struct Sieve<K> {
    /// Oldest first.
    entries: VecDeque<(K, bool)>,
    hand: usize,
}

impl<K> Default for Sieve<K> {
    fn default() -> Self {
        Self { entries: VecDeque::new(), hand: 0 }
    }
}

impl<K: PartialEq> Sieve<K> {
    /// How many keys there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds a key that is not there yet, unmarked.
    pub fn insert(&mut self, key: K) {
        debug_assert!(self.entries.iter().all(|(other, _)| *other != key), "inserted twice");
        self.entries.push_back((key, false));
    }

    /// It is used: it survives the hand's next pass.
    pub fn touch(&mut self, key: &K) {
        if let Some(entry) = self.entries.iter_mut().find(|(other, _)| other == key) {
            entry.1 = true;
        }
    }

    /// Takes a key out. False if it was not there.
    pub fn remove(&mut self, key: &K) -> bool {
        let Some(at) = self.entries.iter().position(|(other, _)| other == key) else { return false };
        self.entries.remove(at);
        if at < self.hand {
            self.hand -= 1;
        }
        true
    }

    /// Takes out the key that should go, among those that `may`. `None` if none may.
    pub fn evict(&mut self, mut may: impl FnMut(&K) -> bool) -> Option<K> {
        // Twice around: the first pass may do nothing but take marks away.
        for _ in 0..2 * self.entries.len() {
            if self.hand >= self.entries.len() {
                self.hand = 0;
            }
            let (key, marked) = &mut self.entries[self.hand];
            if *marked {
                *marked = false;
            } else if may(key) {
                // What stood behind it stands under the hand now.
                return self.entries.remove(self.hand).map(|(key, _)| key);
            }
            self.hand += 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Goal: the paper's example. Method: marks on some keys, then evictions one by one, the hand going on in between.
    #[test]
    fn unused_keys_go_oldest_first_and_used_ones_stay() {
        let mut sieve = Sieve::default();
        "abcde".chars().for_each(|key| sieve.insert(key));
        sieve.touch(&'a');
        sieve.touch(&'c');
        assert_eq!(sieve.evict(|_| true), Some('b'));
        sieve.insert('f');
        assert_eq!(sieve.evict(|_| true), Some('d'), "c had a mark, and has none now");
        assert_eq!(sieve.evict(|_| true), Some('e'));
        assert_eq!(sieve.evict(|_| true), Some('f'));
        assert_eq!(sieve.evict(|_| true), Some('a'), "around the end");
        assert_eq!((sieve.evict(|_| true), sieve.evict(|_| true), sieve.len()), (Some('c'), None, 0));
    }

    // Goal: what may not go stays, whatever its mark, and the search ends. Method: forbid all, then all but one.
    #[test]
    fn what_is_busy_is_passed_over() {
        let mut sieve = Sieve::default();
        (0..4).for_each(|key| sieve.insert(key));
        assert_eq!(sieve.evict(|_| false), None);
        sieve.touch(&3);
        assert_eq!(sieve.evict(|key| *key == 3), Some(3));
        assert!(sieve.remove(&0) && !sieve.remove(&0));
        assert_eq!(sieve.evict(|_| true), Some(1));
        assert_eq!(sieve.evict(|_| true), Some(2));
        assert!(sieve.is_empty());
    }
}

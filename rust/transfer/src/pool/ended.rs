//! A bounded memory of what is over.

use std::collections::{HashSet, VecDeque};
use std::hash::Hash;

/// Remembers the last `limit` values that were inserted.
#[derive(Clone, Debug)]
pub struct Remembered<T> {
    set: HashSet<T>,
    order: VecDeque<T>,
    limit: usize,
}

impl<T: Copy + Eq + Hash> Remembered<T> {
    /// Remembers nothing yet.
    pub fn new(limit: usize) -> Self {
        Self { set: HashSet::new(), order: VecDeque::new(), limit }
    }

    /// Remembers a value; beyond the limit the oldest is forgotten.
    pub fn insert(&mut self, value: T) {
        if self.set.insert(value) {
            self.order.push_back(value);
            if self.order.len() > self.limit
                && let Some(oldest) = self.order.pop_front()
            {
                self.set.remove(&oldest);
            }
        }
    }

    /// True if it is remembered.
    pub fn contains(&self, value: &T) -> bool {
        self.set.contains(value)
    }
}

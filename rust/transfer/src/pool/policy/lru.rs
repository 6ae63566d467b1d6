//! Least recently used first.

use super::by_rank::Rule;
use crate::pool::Place;

/// Evicts the candidate whose last use is longest ago. A parent that was used before its child and becomes a candidate
/// when the child goes is older than all others, so a prefix goes at one stretch.
#[derive(Debug)]
pub struct Lru;

impl Rule for Lru {
    /// Time of the last use.
    type Rank = u64;

    fn publish(&self, _: &Place, time: u64) -> u64 {
        time
    }

    fn hit(&self, last: u64) -> u64 {
        last
    }

    fn rest(&self, _: u64, time: u64) -> u64 {
        time
    }
}

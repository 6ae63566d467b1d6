//! Least often used first. For comparison: it never forgets, so what was popular once stays.

use super::by_rank::Rule;
use crate::pool::Place;

/// Evicts the candidate with the fewest uses since it was published; among those, the one used longest ago.
#[derive(Debug)]
pub struct Lfu;

impl Rule for Lfu {
    /// Uses, and time of the last one.
    type Rank = (u32, u64);

    fn publish(&self, _: &Place, time: u64) -> Self::Rank {
        (1, time)
    }

    fn hit(&self, (uses, last): Self::Rank) -> Self::Rank {
        (uses.saturating_add(1), last)
    }

    fn rest(&self, (uses, _): Self::Rank, time: u64) -> Self::Rank {
        (uses, time)
    }
}

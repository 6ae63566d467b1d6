//! LengthAware of the paper: LFU that prefers to evict blocks late in a request. For comparison.

use std::cmp::Reverse;

use super::by_rank::Rule;
use crate::pool::Place;

/// Evicts the candidate with the fewest uses since it was published; among those, the one that stands latest in its
/// prefix; among those, the one used longest ago.
#[derive(Debug)]
pub struct LengthAware;

impl Rule for LengthAware {
    /// Uses, position, and time of the last use.
    type Rank = (u32, Reverse<u32>, u64);

    fn publish(&self, place: &Place, time: u64) -> Self::Rank {
        (1, Reverse(place.position), time)
    }

    fn hit(&self, (uses, position, last): Self::Rank) -> Self::Rank {
        (uses.saturating_add(1), position, last)
    }

    fn rest(&self, (uses, position, _): Self::Rank, time: u64) -> Self::Rank {
        (uses, position, time)
    }
}

//! Cost-aware: what saves the fewest seconds goes first.

use std::cmp::Ordering;

use super::by_rank::Rule;
use crate::pool::Place;

/// What the loss of a block costs, after the cost model of the paper: prefill of n tokens of which p are cached takes
/// `fixed + per_token (n - p) + per_pair (n^2 - p^2)` seconds.
///
/// A pool has blocks of one size, so seconds per block are seconds per byte.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Seconds to compute a token.
    pub per_token: f64,
    /// Seconds for each pair of tokens in attention.
    pub per_pair: f64,
    /// Tokens of a block.
    pub block_tokens: f64,
}

impl Default for Costs {
    /// LLaMA3-70B on eight A800 (a fit of the paper's figures), and blocks as pyengine makes them. The order
    /// depends only on how much dearer late blocks are than early ones: per_pair x block_tokens / per_token.
    fn default() -> Self {
        Self { per_token: 1.106e-4, per_pair: 7.58e-10, block_tokens: 16.0 }
    }
}

impl Costs {
    /// Seconds to compute a block again that stands at this position, if all before it is there.
    pub fn seconds(&self, position: u32) -> f64 {
        let pairs = 2.0 * f64::from(position) + 1.0;
        self.block_tokens * (self.per_token + self.per_pair * self.block_tokens * pairs)
    }
}

/// GreedyDual-Size-Frequency: a block is worth its uses times the seconds that each saves, on top of what the last
/// victim was worth when this block was last used. So what was once popular ages, with no clock: with each victim.
#[derive(Debug)]
pub struct Cost {
    costs: Costs,
    /// Worth of the dearest victim so far.
    inflation: f64,
}

impl Cost {
    /// By these costs.
    pub fn new(costs: Costs) -> Self {
        Self { costs, inflation: 0.0 }
    }
}

impl Rule for Cost {
    type Rank = Worth;

    fn publish(&self, place: &Place, time: u64) -> Worth {
        let position = u16::try_from(place.position).unwrap_or(u16::MAX);
        self.rest(Worth { uses: 1, position, ..Worth::default() }, time)
    }

    fn hit(&self, worth: Worth) -> Worth {
        Worth { uses: worth.uses.saturating_add(1), ..worth }
    }

    fn rest(&self, worth: Worth, time: u64) -> Worth {
        let seconds = self.inflation + f64::from(worth.uses) * self.costs.seconds(worth.position.into());
        Worth { seconds, time: time as u32, ..worth }
    }

    fn evicted(&mut self, victim: Worth) {
        self.inflation = self.inflation.max(victim.seconds);
    }
}

/// What keeping a block is worth. Ordered by that, then by its last use.
///
/// 16 bytes, as every block has one: the time decides only between equals, so that it wraps does no harm; uses beyond
/// 65,535 are not counted, and no block is dearer than the one at that position (a million tokens with 16 in a block).
#[derive(Clone, Copy, Debug, Default)]
pub struct Worth {
    seconds: f64,
    time: u32,
    uses: u16,
    position: u16,
}

impl Ord for Worth {
    fn cmp(&self, other: &Self) -> Ordering {
        self.seconds.total_cmp(&other.seconds).then(self.time.cmp(&other.time))
    }
}

impl PartialOrd for Worth {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Eq for Worth {}

impl PartialEq for Worth {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

//! What the mover counts, per peer and path.

use crate::transport::{Kind, Op, Outcome};
use crate::types::{Nanos, NodeId};

/// Bounds of [`Histogram`]: 16 us, doubling, up to 8.4 s.
const BUCKETS: usize = 20;

/// How long things took, in buckets that double.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; BUCKETS + 1],
    sum: Nanos,
}

impl Histogram {
    /// Upper bound of a bucket, in nanoseconds. The bucket behind the last of these has none.
    pub fn bound(bucket: usize) -> Nanos {
        16_000 << bucket
    }

    pub(super) fn add(&mut self, took: Nanos) {
        // How often the first bound must be doubled to hold it: places of the quotient, rounded down for the borders.
        let doublings = u64::BITS - (took.saturating_sub(1) / Self::bound(0)).leading_zeros();
        let bucket = BUCKETS.min(doublings as usize);
        self.counts[bucket] += 1;
        self.sum = self.sum.saturating_add(took);
    }

    /// How many fell into each bucket; the last one holds what is above all bounds.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Sum of all, in nanoseconds.
    pub fn sum(&self) -> Nanos {
        self.sum
    }
}

/// One path to one peer. All but the first two count from the start of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathStats {
    /// Copies under way.
    pub copies_in_flight: u64,
    /// Bytes of these.
    pub bytes_in_flight: u64,
    /// Bytes written into the peer's memory: applied and verified there.
    pub bytes_written: u64,
    /// Bytes read from the peer's memory: applied and verified here.
    pub bytes_read: u64,
    /// Copies that are done.
    pub copies: u64,
    /// Copies that were sent again, having been lost or corrupted on this path.
    pub retries: u64,
    /// Copies that were fenced.
    pub fenced: u64,
    /// Copies that were denied.
    pub denied: u64,
    /// Copies whose checksum did not hold.
    pub corrupt: u64,
    /// Copies that were lost.
    pub lost: u64,
    /// How often the path was given a rest.
    pub rests: u64,
    /// From the submission of a copy to its completion, of those that are done.
    pub latency: Histogram,
}

impl PathStats {
    pub(super) fn completed(&mut self, outcome: Outcome, op: Op, bytes: u64, took: Nanos) {
        match outcome {
            Outcome::Done => {
                self.copies += 1;
                self.latency.add(took);
                match op {
                    Op::Write => self.bytes_written += bytes,
                    Op::Read => self.bytes_read += bytes,
                }
            }
            Outcome::Fenced => self.fenced += 1,
            Outcome::Denied => self.denied += 1,
            Outcome::Corrupt => self.corrupt += 1,
            Outcome::Lost => self.lost += 1,
        }
    }

    /// Takes over what another path has counted.
    pub(super) fn absorb(&mut self, other: &Self) {
        self.bytes_written += other.bytes_written;
        self.bytes_read += other.bytes_read;
        self.copies += other.copies;
        self.retries += other.retries;
        self.fenced += other.fenced;
        self.denied += other.denied;
        self.corrupt += other.corrupt;
        self.lost += other.lost;
        self.rests += other.rests;
        self.latency.sum = self.latency.sum.saturating_add(other.latency.sum);
        self.latency.counts.iter_mut().zip(other.latency.counts).for_each(|(mine, theirs)| *mine += theirs);
    }
}

/// One peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerStats {
    /// Which.
    pub peer: NodeId,
    /// Its transfers that have not ended.
    pub transfers: u64,
    /// The parts of these, those that are done included.
    pub parts: u64,
    /// Its paths, the preferred first.
    pub paths: Vec<(Kind, PathStats)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    // Goal: every duration has its bucket, and sums of histograms are right. Method: the borders.
    #[test]
    fn histogram_borders() {
        let mut stats = PathStats::default();
        for took in [0, 16_000, 16_001, Histogram::bound(BUCKETS - 1), u64::MAX / 2] {
            stats.completed(Outcome::Done, Op::Write, 10, took);
        }
        let counts = stats.latency.counts();
        assert_eq!((counts[0], counts[1], counts[BUCKETS - 1], counts[BUCKETS]), (2, 1, 1, 1));
        assert!((8e9..9e9).contains(&(Histogram::bound(BUCKETS - 1) as f64)));
        let mut sum = stats;
        sum.absorb(&stats);
        assert_eq!((sum.latency.counts()[0], sum.bytes_written, sum.copies), (4, 100, 10));
    }
}

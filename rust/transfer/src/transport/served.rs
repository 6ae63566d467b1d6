//! What peers have moved into and out of this process's memory by one transport, counted where they are served.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::transport::{Op, Outcome};

/// Counted by many threads.
#[derive(Debug, Default)]
pub struct Served {
    bytes_written: AtomicU64,
    bytes_read: AtomicU64,
    done: AtomicU64,
    corrupt: AtomicU64,
    fenced: AtomicU64,
    denied: AtomicU64,
}

/// What was counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Bytes that peers have written here, applied and verified.
    pub bytes_written: u64,
    /// Bytes that were handed out to peers; whether they arrived whole is the peer's to say.
    pub bytes_read: u64,
    /// Copies that these bytes belong to.
    pub done: u64,
    /// Writes whose checksum did not hold here.
    pub corrupt: u64,
    /// Copies that were refused because the life of the region or slot was over.
    pub fenced: u64,
    /// Copies that were refused as outside the region, not whole strips, or not permitted.
    pub denied: u64,
}

impl Served {
    /// So many bytes were moved.
    pub fn moved(&self, op: Op, bytes: u64) {
        let counter = match op {
            Op::Write => &self.bytes_written,
            Op::Read => &self.bytes_read,
        };
        counter.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So many copies ended so. `Lost` is the initiator's to count: here nothing is known of them.
    pub fn ended(&self, outcome: Outcome, copies: u64) {
        let counter = match outcome {
            Outcome::Done => &self.done,
            Outcome::Corrupt => &self.corrupt,
            Outcome::Fenced => &self.fenced,
            Outcome::Denied => &self.denied,
            Outcome::Lost => return,
        };
        counter.fetch_add(copies, Ordering::Relaxed);
    }

    /// As [`Served::ended`], of all copies of a frame.
    pub fn all_ended(&self, outcomes: &[Outcome]) {
        for outcome in [Outcome::Done, Outcome::Corrupt, Outcome::Fenced, Outcome::Denied] {
            match outcomes.iter().filter(|other| **other == outcome).count() {
                0 => {}
                copies => self.ended(outcome, copies as u64),
            }
        }
    }

    /// All counters.
    pub fn totals(&self) -> Totals {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Totals {
            bytes_written: read(&self.bytes_written),
            bytes_read: read(&self.bytes_read),
            done: read(&self.done),
            corrupt: read(&self.corrupt),
            fenced: read(&self.fenced),
            denied: read(&self.denied),
        }
    }
}

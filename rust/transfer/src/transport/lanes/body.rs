//! The bytes of a frame's copies on their way into registered memory: where each goes, how far it has come, and
//! whether the checksums hold. Bytes are verified as they come, while they are in cache.

use crc_fast::{CrcAlgorithm, Digest};

use crate::memory::checksum;
use crate::region::{Denied, Writing, sum_count};
use crate::transport::Outcome;

use super::socket::Slices;

/// Where bytes of refused copies are thrown, piece by piece.
pub const DISCARD_BYTES: usize = 64 << 10;

/// Where one copy goes.
struct Sink {
    /// None: refused, its bytes are thrown away.
    hold: Option<Hold>,
    bytes: u32,
    grain: u32,
    /// Its first checksum among the frame's.
    sum: usize,
    outcome: Outcome,
}

struct Hold {
    writing: Writing,
    pointer: *mut u8,
}

// SAFETY: the pointer is into the memory of `writing`, which goes with it and may be used by any thread.
unsafe impl Send for Hold {}

/// A frame's body.
pub struct Body {
    sinks: Vec<Sink>,
    /// One per grain of all copies; empty if nothing is to be verified.
    sums: Vec<u32>,
    /// Which copy is being filled, and how far.
    sink: usize,
    at: usize,
    left: u64,
    /// Of a grain of which only a part has come.
    digest: Digest,
}

impl Body {
    /// A body of no copies yet. `sums` is empty, or has all checksums of all copies.
    pub fn new(sums: Vec<u32>) -> Self {
        let digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
        Self { sinks: Vec::new(), sums, sink: 0, at: 0, left: 0, digest }
    }

    /// Appends a copy: into the memory that was taken for it, or, refused, into nothing.
    pub fn push(&mut self, held: Result<Writing, Denied>, bytes: u32, grain: u32) {
        let sum = self.sinks.last().map_or(0, |last| last.sum + sum_count(last.bytes.into(), last.grain));
        let outcome = held.as_ref().map_or_else(|denied| outcome_of(*denied), |_| Outcome::Done);
        let hold = held.ok().map(|mut writing| {
            let pointer = writing.bytes_mut().as_mut_ptr();
            Hold { writing, pointer }
        });
        self.sinks.push(Sink { hold, bytes, grain, sum, outcome });
        self.left += u64::from(bytes);
    }

    /// How many bytes are still to come.
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Lists memory for the next bytes, at most `limit` of them; `discard` stands for that of refused copies. Returns how
    /// many bytes have a place.
    pub fn list(&self, slices: &mut Slices, limit: usize, discard: &mut [u8]) -> usize {
        let before = slices.bytes();
        let (mut sink, mut at) = (self.sink, self.at);
        while let Some(current) = self.sinks.get(sink) {
            let room = limit - (slices.bytes() - before);
            let mut step = (current.bytes as usize - at).min(room);
            let pointer = match &current.hold {
                // The sum stays within the hold: `at` is less than its bytes.
                Some(hold) => hold.pointer.wrapping_add(at),
                None => {
                    step = step.min(discard.len());
                    discard.as_mut_ptr()
                }
            };
            if !slices.push(pointer, step) || room == 0 {
                break;
            }
            at += step;
            if at == current.bytes as usize {
                (sink, at) = (sink + 1, 0);
            }
        }
        slices.bytes() - before
    }

    /// The next bytes, as memory that was listed or otherwise: the first place, at most `limit` bytes. None: refused.
    pub fn place(&self, limit: usize) -> (Option<*mut u8>, usize) {
        let Some(current) = self.sinks.get(self.sink) else { return (None, 0) };
        let step = (current.bytes as usize - self.at).min(limit);
        (current.hold.as_ref().map(|hold| hold.pointer.wrapping_add(self.at)), step)
    }

    /// So many bytes now lie at the places that `list` has named, in its order. They are verified here.
    pub fn advance(&mut self, mut bytes: usize) {
        self.left -= bytes as u64;
        while bytes > 0 {
            self.skip_filled();
            let step = (self.sinks[self.sink].bytes as usize - self.at).min(bytes);
            self.verify(step);
            self.at += step;
            bytes -= step;
        }
        self.skip_filled();
    }

    /// Bytes that came otherwise (with a header): copies them to their places.
    pub fn copy_from(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.left > 0 {
            self.skip_filled();
            let (place, step) = self.place(bytes.len());
            if let Some(place) = place {
                // SAFETY: `place` has room for `step` bytes by its contract, and is registered memory, not our buffer.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, step) };
            }
            self.advance(step);
            bytes = &bytes[step..];
        }
    }

    fn skip_filled(&mut self) {
        while self.sinks.get(self.sink).is_some_and(|sink| self.at == sink.bytes as usize) {
            (self.sink, self.at) = (self.sink + 1, 0);
        }
    }

    fn verify(&mut self, bytes: usize) {
        let sink = &mut self.sinks[self.sink];
        let Some(hold) = &sink.hold else { return };
        if self.sums.is_empty() {
            return;
        }
        let whole = sink.bytes as usize;
        let grain = if sink.grain == 0 { whole } else { sink.grain as usize };
        let (mut at, end) = (self.at, self.at + bytes);
        while at < end {
            let (first, last) = (at / grain * grain, (at / grain * grain + grain).min(whole));
            let until = last.min(end);
            // SAFETY: within the hold, which is ours; other threads of a buffer's owner may write there, and then the
            // checksum fails or not, as the contract of buffers says.
            let piece = unsafe { std::slice::from_raw_parts(hold.pointer.add(at), until - at) };
            let sum = if at == first && until == last {
                Some(checksum(piece))
            } else {
                if at == first {
                    self.digest.reset();
                }
                self.digest.update(piece);
                // The algorithm is 32 bits wide.
                (until == last).then(|| self.digest.finalize() as u32)
            };
            if sum.is_some_and(|sum| sum != self.sums[sink.sum + first / grain]) {
                sink.outcome = Outcome::Corrupt;
            }
            at = until;
        }
    }

    /// Bytes of the copies that are good so far.
    pub fn bytes_held(&self) -> u64 {
        let good = self.sinks.iter().filter(|sink| sink.outcome == Outcome::Done);
        good.map(|sink| u64::from(sink.bytes)).sum()
    }

    /// Gives the memory back: what holds counts as arrived. One outcome per copy.
    pub fn finish(self) -> Vec<Outcome> {
        debug_assert_eq!(self.left, 0, "a body is finished when it is there");
        let sums = self.sums;
        let finish = |sink: Sink| {
            if let (Some(hold), Outcome::Done) = (sink.hold, sink.outcome) {
                let count = sum_count(sink.bytes.into(), sink.grain);
                hold.writing.finish(sink.grain, sums.get(sink.sum..sink.sum + count).unwrap_or_default());
            }
            sink.outcome
        };
        self.sinks.into_iter().map(finish).collect()
    }
}

/// What a refusal means for a copy.
pub fn outcome_of(denied: Denied) -> Outcome {
    match denied {
        Denied::Fenced => Outcome::Fenced,
        Denied::Bounds | Denied::Permission => Outcome::Denied,
    }
}

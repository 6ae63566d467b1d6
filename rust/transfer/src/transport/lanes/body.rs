//! The bytes of a frame's copies on their way into registered memory: where each goes, how far it has come, and
//! whether the checksums hold. Bytes are verified as they come, while they are in cache.

use std::io;
use std::sync::Arc;

use crc::Crc;
use nix::libc;

use crate::region::{Denied, Writing, sum_count};
use crate::transport::Outcome;

use super::frames::Place;
use super::sharing::{Source, View};
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

/// Bytes that are copied out of a mapping before they are verified: source and copy are still in the second-level cache
/// then, and smaller pieces of cold memory are copied more slowly (64 KiB: 4.2 GB/s with a checksum, 16 KiB: 3.7, 1 KiB:
/// 2.6; without 5.1; EPYC, glibc).
const PULL_BYTES: usize = 64 << 10;
/// Bytes that one `process_vm_readv` takes: they are still in the second-level cache when they are verified.
const READV_BYTES: usize = 128 << 10;
/// Copies that one `process_vm_readv` takes.
const READV_COPIES: usize = 64;

/// A frame's body.
pub struct Body {
    sinks: Vec<Sink>,
    /// One per grain of all copies; empty if they have none.
    sums: Vec<u32>,
    /// Pulled bytes are compared with their source, where that can be seen.
    compares: bool,
    /// Which copy is being filled, and how far.
    sink: usize,
    at: usize,
    left: u64,
    /// Of a grain of which only a part has come.
    partial: Crc,
}

impl Body {
    /// A body of no copies yet. `sums` is empty (nothing is verified), or has all checksums of all copies.
    pub fn new(sums: Vec<u32>) -> Self {
        Self { sinks: Vec::new(), sums, compares: false, sink: 0, at: 0, left: 0, partial: Crc::new() }
    }

    /// A body without checksums whose bytes are compared with their source when they are pulled.
    pub fn comparing() -> Self {
        Self { compares: true, ..Self::new(Vec::new()) }
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

    /// Takes the next bytes from where they lie: `places` has one per copy, `views` the regions they are in. Takes what it
    /// moves off `budget`. True: all is there.
    ///
    /// # Errors
    /// The other process's memory is out of reach: it is dead, or lies.
    pub fn pull(&mut self, places: &[Place], views: &[Arc<View>], budget: &mut usize) -> io::Result<bool> {
        loop {
            self.skip_filled();
            let Some(sink) = self.sinks.get(self.sink) else { return Ok(true) };
            if *budget == 0 {
                return Ok(false);
            }
            let left = sink.bytes as usize - self.at;
            if sink.hold.is_none() {
                self.advance(left);
                continue;
            }
            let place = &places[self.sink];
            let source = views[self.sink].source(place.offset, sink.bytes.into());
            let moved = match source.ok_or_else(|| io::Error::other("a copy from outside its region"))? {
                Source::Mapped(from) => self.pull_mapped(from.wrapping_add(self.at), left),
                Source::Private(..) => self.pull_private(places, views)?,
            };
            *budget = budget.saturating_sub(moved);
        }
    }

    /// Copies the next bytes of the current copy.
    fn pull_mapped(&mut self, from: *const u8, left: usize) -> usize {
        let sink = &mut self.sinks[self.sink];
        let Some(hold) = &sink.hold else { return 0 };
        let into = hold.pointer.wrapping_add(self.at);
        let step = left.min(PULL_BYTES);
        // SAFETY: `from` is inside a read-only mapping of sealed memory that its view keeps (checked by the caller against
        // the copy's whole length), `into` inside our hold. The owner may write there meanwhile; the bytes are plain, and
        // a copy whose source was not held to its end is thrown away.
        unsafe { std::ptr::copy_nonoverlapping(from, into, step) };
        if self.compares {
            // SAFETY: as above. A source that its owner changes meanwhile differs or not; it may be torn, and says so.
            let same = unsafe { std::slice::from_raw_parts(from, step) == std::slice::from_raw_parts(into, step) };
            if !same {
                sink.outcome = Outcome::Corrupt;
            }
        }
        self.advance(step);
        step
    }

    /// Lets the kernel copy the next bytes of this and some following copies.
    fn pull_private(&mut self, places: &[Place], views: &[Arc<View>]) -> io::Result<usize> {
        let mut local = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; READV_COPIES];
        let mut remote = local;
        let (mut count, mut total, mut at, mut process) = (0, 0, self.at, None);
        for (index, sink) in self.sinks.iter().enumerate().skip(self.sink) {
            let Some(hold) = &sink.hold else { break };
            let Some(Source::Private(pid, address)) = views[index].source(places[index].offset, sink.bytes.into())
            else {
                break;
            };
            if count == READV_COPIES || total == READV_BYTES || process.is_some_and(|known| known != pid) {
                break;
            }
            process = Some(pid);
            let step = (sink.bytes as usize - at).min(READV_BYTES - total);
            local[count] = libc::iovec { iov_base: hold.pointer.wrapping_add(at).cast(), iov_len: step };
            remote[count] = libc::iovec { iov_base: (address as usize + at) as *mut libc::c_void, iov_len: step };
            (count, total, at) = (count + 1, total + step, 0);
        }
        let Some(pid) = process else { return Err(io::Error::other("a copy from outside its region")) };
        // SAFETY: the local pieces are inside our holds; the remote ones are the kernel's to check.
        let read =
            unsafe { libc::process_vm_readv(pid.as_raw(), local.as_ptr(), count as _, remote.as_ptr(), count as _, 0) };
        match usize::try_from(read) {
            Ok(bytes) if bytes > 0 => {
                self.advance(bytes);
                Ok(bytes)
            }
            Ok(_) => Err(io::Error::other("the other process's memory is out of reach")),
            Err(_) => Err(io::Error::last_os_error()),
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
            if at == first {
                self.partial = Crc::new();
            }
            self.partial.update(piece);
            if until == last && self.partial.sum() != self.sums[sink.sum + first / grain] {
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

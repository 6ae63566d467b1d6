//! Where room comes from: a spare segment is kept ready. When the limit is reached the oldest becomes one: its warm blocks move on,
//! the others go.

use super::super::tier::TierEvent;
use super::format::{Life, PAGE, block_pages, encode_life};
use super::index::Location;
use super::io::{FileId, Work};
use super::log::{Asker, Doing, FILES, Log, Segment, Stage};
use crate::types::BlockKey;

/// Blocks that move at once.
const MOVES: u32 = 4;
/// At most so much of a segment moves on, as one part of that many: so to reclaim always makes room, and what is read again
/// and again costs a third more writes at most.
const SHARE: u64 = 4;

/// A segment that is being reclaimed.
pub(super) struct Reclaim {
    number: u64,
    file: FileId,
    to_move: Vec<BlockKey>,
    /// Blocks that are on their way.
    moving: u32,
    durability: Durability,
    /// There is no room to move to.
    given_up: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Durability {
    /// Something may have moved, perhaps for an earlier try that was given up, and a crash could lose it.
    Needed,
    Asked,
    Reached,
}

impl Log {
    /// Sees to it that a spare segment is there. True if something else may be possible now.
    pub(super) fn make_room(&mut self) -> bool {
        // Nothing is dropped before something is written; and at the end only what is needed. A device that took no writes
        // is tried with this, as nothing is queued for it.
        let needed = self.has_work() || self.tries();
        let writing = (self.head.is_some() && !self.closing) || (self.head.is_none() && needed);
        let wanted = self.spare.is_none() && writing;
        let busy = |doing: &Doing| matches!(doing, Doing::Prepare { .. } | Doing::Remove { .. });
        if !wanted || !self.may_write() || self.jobs.values().any(busy) {
            return false;
        }
        let vacant = self.segments.iter().find(|(_, segment)| segment.stage == Stage::Vacant).map(|(&file, _)| file);
        if let Some(file) = vacant {
            if self.used - self.segments[&file].bytes + self.segment_bytes <= self.limit {
                self.prepare(file);
            } else {
                self.submit(file, Work::Remove, Doing::Remove { file });
            }
            return false;
        }
        let unused =
            (0..FILES as FileId).find(|file| !self.segments.contains_key(file) && !self.foreign.contains(file));
        if let Some(file) = unused.filter(|_| self.used + self.segment_bytes <= self.limit) {
            let life = Life { store: 0, number: 0, nonce: 0 };
            self.segments.insert(file, Segment::vacant(life, 0));
            self.prepare(file);
            return false;
        }
        self.reclaim_oldest()
    }

    pub(super) fn prepare(&mut self, file: FileId) {
        let life = Life { store: self.io.medium().store(), number: self.next_number, nonce: self.random.bits() };
        self.next_number += 1;
        let bytes = self.segment_bytes;
        let segment = self.segment(file);
        let before = segment.bytes;
        *segment = Segment { stage: Stage::Preparing, ..Segment::vacant(life, bytes) };
        self.used = self.used - before + bytes;
        self.submit(file, Work::Prepare { bytes, header: encode_life(life) }, Doing::Prepare { file });
    }

    /// Goes on to reclaim the oldest segment. True if something else may be possible now.
    pub(super) fn reclaim_oldest(&mut self) -> bool {
        if self.reclaim.is_none() && !self.begin_reclaim() {
            return false;
        }
        self.move_some();
        let Some(reclaim) = &mut self.reclaim else { return false };
        if reclaim.moving > 0 {
            return false;
        }
        let (number, file) = (reclaim.number, reclaim.file);
        match reclaim.durability {
            // The old copy is what a crash would leave: so first the new one.
            Durability::Needed => {
                reclaim.durability = Durability::Asked;
                self.ask_flush(Asker::Reclaim(number));
                return true;
            }
            Durability::Asked => return false,
            Durability::Reached => {}
        }
        for key in self.index.keys_in(file) {
            self.drop_unread(&key);
        }
        if !self.index.is_empty_in(file) || self.segment(file).readers > 0 {
            return false;
        }
        self.order.pop_front();
        self.segment(file).stage = Stage::Vacant;
        self.reclaim = None;
        true
    }

    /// Chooses what moves and drops what does not.
    fn begin_reclaim(&mut self) -> bool {
        let Some(&file) = self.order.front() else { return false };
        if self.segment(file).stage != Stage::Sealed {
            return false;
        }
        let (mut to_move, mut left) = (Vec::new(), self.segment(file).bytes / SHARE);
        // The last written first: they were read although they are young.
        for key in self.index.keys_in(file) {
            let Some(found) = self.index.find(&key) else { continue };
            let bytes = u64::from(block_pages(found.record.layout)) * PAGE as u64;
            if found.warm && bytes <= left {
                left -= bytes;
                to_move.push(key);
            } else {
                self.drop_unread(&key);
            }
        }
        self.reclaims += 1;
        let number = self.reclaims;
        let durability = Durability::Needed;
        self.reclaim = Some(Reclaim { number, file, to_move, moving: 0, durability, given_up: false });
        true
    }

    /// Lets go of a block, unless it is being read: then later.
    fn drop_unread(&mut self, key: &BlockKey) {
        if !self.reading.contains_key(key) {
            self.forget_silently(key);
            self.tell(TierEvent::Dropped(*key));
        }
    }

    fn move_some(&mut self) {
        while let Some(reclaim) = &mut self.reclaim
            && reclaim.moving < MOVES
            && let Some(key) = reclaim.to_move.pop()
        {
            let (number, file) = (reclaim.number, reclaim.file);
            let Some(found) = self.index.find(&key).filter(|found| found.location.file == file) else { continue };
            reclaim.moving += 1;
            reclaim.durability = Durability::Needed;
            self.segment(file).readers += 1;
            *self.reading.entry(key).or_default() += 1;
            let Location { page, .. } = found.location;
            let work = Work::Fetch { offset: u64::from(page) * PAGE as u64, pages: block_pages(found.record.layout) };
            let (record, digest, from) = (found.record, found.digest, found.location);
            self.submit(file, work, Doing::Fetch { reclaim: number, record, digest, from });
        }
    }

    /// True if blocks still move for this one.
    pub(super) fn moves(&self, number: u64) -> bool {
        self.reclaim.as_ref().is_some_and(|reclaim| reclaim.number == number && !reclaim.given_up)
    }

    /// A block has moved, or will not.
    pub(super) fn moved(&mut self, number: u64) {
        if let Some(reclaim) = self.reclaim.as_mut().filter(|reclaim| reclaim.number == number) {
            reclaim.moving -= 1;
        }
    }

    pub(super) fn moves_are_durable(&mut self, number: u64, done: bool) {
        if let Some(reclaim) = self.reclaim.as_mut().filter(|reclaim| reclaim.number == number) {
            reclaim.durability = if done { Durability::Reached } else { Durability::Needed };
        }
    }

    /// There is no segment to move to: what has not moved goes. True if anything was to move.
    pub(super) fn give_up_moves(&mut self) -> bool {
        let Some(reclaim) = self.reclaim.as_mut().filter(|reclaim| !reclaim.given_up) else { return false };
        reclaim.given_up = true;
        reclaim.to_move.clear();
        self.drop_moves();
        true
    }
}

//! How what was written becomes durable.

use super::super::io::{FileId, Work};
use super::{Doing, Log};
use crate::pool::tier::{Fate, OpId};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::pool::disk) enum Asker {
    User(OpId),
    Reclaim(u64),
    Probe,
}

pub(super) struct Flush {
    pub asker: Asker,
    /// Items with a lower number count.
    pub before: u64,
    /// How many of those are not written yet.
    pub left: usize,
}

pub(super) struct Syncing {
    pub askers: Vec<Asker>,
    pub left: usize,
    pub failed: bool,
}

impl Log {
    pub(in crate::pool::disk) fn ask_flush(&mut self, asker: Asker) {
        let flush = match asker {
            // The moved blocks are written; those that wait may be waiting for just this.
            Asker::Reclaim(_) => Flush { asker, before: 0, left: 0 },
            _ => Flush { asker, before: self.next_sequence, left: self.unfinished },
        };
        self.flushes.push_back(flush);
    }

    pub(in crate::pool::disk) fn has_spare(&self) -> bool {
        self.spare.is_some()
    }

    /// Makes durable what was asked for. True if something else may be possible now.
    pub(super) fn sync(&mut self) -> bool {
        let whole = || !self.segments.values().any(|segment| segment.hole);
        let ready = self.flushes.iter().any(|flush| flush.left == 0);
        if self.syncing.is_some() || !ready || !self.may_write() || !whole() {
            return false;
        }
        let askers = self.flushes.iter().filter(|flush| flush.left == 0).map(|flush| flush.asker).collect();
        self.flushes.retain(|flush| flush.left > 0);
        let dirty: Vec<FileId> =
            self.segments.iter().filter(|(_, segment)| segment.dirty).map(|(&file, _)| file).collect();
        self.syncing = Some(Syncing { askers, left: dirty.len(), failed: false });
        for &file in &dirty {
            self.segment(file).dirty = false;
            self.submit(file, Work::Sync, Doing::Sync { file });
        }
        if dirty.is_empty() {
            self.synced();
        }
        dirty.is_empty()
    }

    pub(super) fn synced(&mut self) {
        let Some(Syncing { askers, failed, .. }) = self.syncing.take_if(|syncing| syncing.left == 0) else { return };
        askers.into_iter().for_each(|asker| self.flushed(asker, !failed));
    }

    pub(super) fn flushed(&mut self, asker: Asker, done: bool) {
        match asker {
            Asker::User(op) => self.end(op, if done { Fate::Done } else { Fate::Failed }),
            Asker::Reclaim(number) => self.moves_are_durable(number, done),
            Asker::Probe => {
                if done {
                    self.well_again();
                }
            }
        }
    }

    /// Ends the flushes that wait: nothing can be written.
    pub(in crate::pool::disk) fn drop_flushes(&mut self) {
        for flush in std::mem::take(&mut self.flushes) {
            self.flushed(flush.asker, false);
        }
    }
}

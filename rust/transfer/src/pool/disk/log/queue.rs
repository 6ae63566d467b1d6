//! What waits to be written.

use rustc_hash::FxHashSet;

use super::super::format::{Says, block_pages};
use super::super::index::Location;
use super::super::io::Pages;
use super::Log;
use crate::memory::ReadHold;
use crate::pool::tier::{Fate, OpId, Record, TierEvent};
use crate::types::BlockKey;

/// Removals that may wait: 25 MB of them. They only do while nothing can be written.
const QUEUE_REMOVALS: usize = 1 << 18;

/// What waits to be written.
pub(super) struct Item {
    pub sequence: u64,
    pub what: What,
}

pub(super) enum What {
    Write {
        op: OpId,
        record: Record,
        block: ReadHold,
    },
    /// A block that is worth more than its segment.
    Move {
        reclaim: u64,
        record: Record,
        digest: u32,
        from: Location,
        pages: Pages,
    },
    Say(Says),
}

impl Item {
    pub fn key(&self) -> Option<BlockKey> {
        match &self.what {
            What::Write { record, .. } | What::Move { record, .. } => Some(record.place.key),
            What::Say(Says::Removed(key)) => Some(*key),
            What::Say(_) => None,
        }
    }

    pub fn pages(&self) -> u32 {
        match &self.what {
            What::Write { record, .. } | What::Move { record, .. } => block_pages(record.layout),
            What::Say(_) => 0,
        }
    }
}

impl Log {
    pub(super) fn push(&mut self, what: What) {
        let item = Item { sequence: self.next_sequence, what };
        self.next_sequence += 1;
        self.unfinished += 1;
        // What moves makes the room that the others wait for.
        if matches!(item.what, What::Move { .. }) { self.queue.push_front(item) } else { self.queue.push_back(item) }
    }

    pub(super) fn say(&mut self, says: Says) {
        self.removals += 1;
        self.push(What::Say(says));
        if self.removals > QUEUE_REMOVALS {
            self.forget_all();
        }
    }

    /// More was removed than can be remembered while nothing can be written: all of it goes, as one entry. What is not
    /// under way yet is written behind that.
    pub(super) fn forget_all(&mut self) {
        tracing::warn!("{}: too many removals wait to be written: all blocks are dropped", self.io.medium().name());
        let keys: Vec<BlockKey> = self.index.iter().map(|found| found.record.place.key).collect();
        for key in keys {
            self.index.remove(&key);
            self.tell(TierEvent::Dropped(key));
        }
        self.drop_items(Fate::Missing, |what| matches!(what, What::Say(_)));
        let queued: FxHashSet<u64> = self.queue.iter().map(|item| item.sequence).collect();
        let sent: Vec<(BlockKey, u64)> = self.pending.iter().map(|(key, sequence)| (*key, *sequence)).collect();
        for (key, sequence) in sent.into_iter().filter(|(_, sequence)| !queued.contains(sequence)) {
            self.pending.remove(&key);
            self.end_joined(sequence, Fate::Missing);
        }
        let item = Item { sequence: self.next_sequence, what: What::Say(Says::ClearedAll) };
        (self.next_sequence, self.unfinished, self.removals) = (self.next_sequence + 1, self.unfinished + 1, 1);
        self.queue.push_front(item);
    }

    /// Takes an item out of the queue.
    pub(super) fn drop_item(&mut self, at: usize, fate: Fate) {
        let Some(item) = self.queue.remove(at) else { return };
        match item.what {
            What::Write { op, record, block } => {
                self.waiting -= block.pages().len() as u64;
                drop(block);
                if self.pending.get(&record.place.key) == Some(&item.sequence) {
                    self.pending.remove(&record.place.key);
                    self.end_joined(item.sequence, fate);
                }
                self.end(op, fate);
            }
            What::Move { reclaim, .. } => self.moved(reclaim),
            What::Say(_) => self.removals -= 1,
        }
        self.written(item.sequence);
    }

    /// Ends what waits to be written, except for removals.
    pub(in crate::pool::disk) fn drop_writes(&mut self, fate: Fate) {
        self.drop_items(fate, |what| !matches!(what, What::Say(_)));
    }

    /// What waits to be moved is not.
    pub(in crate::pool::disk) fn drop_moves(&mut self) {
        self.drop_items(Fate::Missing, |what| matches!(what, What::Move { .. }));
    }

    pub(super) fn drop_items(&mut self, fate: Fate, which: impl Fn(&What) -> bool) {
        let mut at = 0;
        while at < self.queue.len() {
            if which(&self.queue[at].what) { self.drop_item(at, fate) } else { at += 1 }
        }
    }

    /// This item needs to be waited for no more.
    pub(super) fn written(&mut self, sequence: u64) {
        self.unfinished -= 1;
        for flush in self.flushes.iter_mut().filter(|flush| sequence < flush.before) {
            flush.left -= 1;
        }
    }
}

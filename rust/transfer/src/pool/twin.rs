//! A tier in memory: what simulations put behind the arena, and the naive model of what every tier does.
//!
//! It has no threads: operations wait for `poll`, which does them in their order. Its [`Shelf`] outlives it, as a disk
//! outlives a daemon, and is where a test makes blocks rot and the medium fail.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::memory::{ReadHold, WriteHold, checksum};
use crate::types::BlockKey;

use super::tier::{Capacity, Fate, Health, OpId, Record, Tier, TierEvent, Whose};

/// A block on the shelf.
#[derive(Debug)]
struct Kept {
    record: Record,
    bytes: Vec<u8>,
    sums: Vec<u32>,
    /// The lowest is the oldest. Also its place for who walks over all.
    age: u64,
}

#[derive(Debug, Default)]
struct Contents {
    kept: BTreeMap<BlockKey, Kept>,
    used: u64,
    age: u64,
    health: Health,
}

impl Contents {
    fn take(&mut self, key: &BlockKey) -> Option<Kept> {
        let kept = self.kept.remove(key)?;
        self.used -= kept.bytes.len() as u64;
        Some(kept)
    }

    /// The key of the oldest block that is none of these.
    fn oldest(&self, except: &[BlockKey]) -> Option<BlockKey> {
        let may_go = self.kept.iter().filter(|(key, _)| !except.contains(key));
        may_go.min_by_key(|(_, kept)| kept.age).map(|(key, _)| *key)
    }
}

/// What a [`MemoryTier`] keeps. Clones are the same shelf.
#[derive(Clone, Debug, Default)]
pub struct Shelf(Arc<Mutex<Contents>>);

impl Shelf {
    /// Makes a block rot: one bit of it flips. False if there is no such block.
    pub fn rot(&self, key: &BlockKey) -> bool {
        match self.contents().kept.get_mut(key) {
            Some(kept) => {
                kept.bytes[0] ^= 1;
                true
            }
            None => false,
        }
    }

    /// Makes the medium fail, or do well again.
    pub fn set_health(&self, health: Health) {
        self.contents().health = health;
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        // A test that panicked has failed already.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
enum Work {
    Write { op: OpId, record: Record, block: ReadHold },
    Read { op: OpId, key: BlockKey, into: WriteHold },
    Verify { op: OpId, key: BlockKey },
    Flush { op: OpId },
}

/// A tier in memory, without threads.
pub struct MemoryTier {
    shelf: Shelf,
    limit: u64,
    /// Bytes that may wait to be written.
    queue_limit: u64,
    waiting: u64,
    work: VecDeque<Work>,
    events: Vec<TierEvent>,
    notify: Box<dyn Fn() + Send>,
}

impl MemoryTier {
    /// Blocks on this shelf take at most `limit` bytes, and at most `queue_limit` wait to be put there.
    pub fn new(shelf: Shelf, limit: u64, queue_limit: u64) -> Self {
        let (work, events) = (VecDeque::new(), Vec::new());
        Self { shelf, limit, queue_limit, waiting: 0, work, events, notify: Box::new(|| {}) }
    }

    /// `notify` is called when `poll` has something to do or to tell.
    pub fn notifying(mut self, notify: impl Fn() + Send + 'static) -> Self {
        self.notify = Box::new(notify);
        self
    }

    fn end(&mut self, op: OpId, fate: Fate) {
        self.events.push(TierEvent::Ended { op, fate });
        (self.notify)();
    }

    fn queue(&mut self, work: Work) {
        self.work.push_back(work);
        (self.notify)();
    }

    /// Keys that are being read.
    fn being_read(&self) -> Vec<BlockKey> {
        let key = |work: &Work| match work {
            Work::Read { key, .. } | Work::Verify { key, .. } => Some(*key),
            _ => None,
        };
        self.work.iter().filter_map(key).collect()
    }

    fn put(&mut self, record: Record, block: &ReadHold) -> Fate {
        let being_read = self.being_read();
        let (bytes, key) = (block.bytes().to_vec(), record.place.key);
        let mut contents = self.shelf.contents();
        if contents.health != Health::Good {
            return Fate::Failed;
        }
        if contents.kept.contains_key(&key) {
            return Fate::Done;
        }
        if bytes.len() as u64 > self.limit {
            return Fate::Full;
        }
        while contents.used + bytes.len() as u64 > self.limit {
            let Some(oldest) = contents.oldest(&being_read) else { return Fate::Full };
            contents.take(&oldest);
            self.events.push(TierEvent::Dropped(oldest));
        }
        contents.used += bytes.len() as u64;
        contents.age += 1;
        let age = contents.age;
        contents.kept.insert(key, Kept { record, bytes, sums: block.checksums(), age });
        Fate::Done
    }

    fn get(&self, key: &BlockKey, into: &mut WriteHold) -> Fate {
        let mut contents = self.shelf.contents();
        if contents.health == Health::Failed {
            return Fate::Failed;
        }
        let Some(kept) = contents.kept.get(key) else { return Fate::Missing };
        let layout = kept.record.layout;
        if into.strips() != (0..layout.strips) || into.strip_bytes() != layout.strip_bytes as usize {
            return Fate::Missing;
        }
        let bytes = into.strips_mut(0..layout.strips);
        bytes.copy_from_slice(&kept.bytes);
        let sums: Vec<u32> = bytes.chunks_exact(layout.strip_bytes as usize).map(checksum).collect();
        if sums != kept.sums {
            contents.take(key);
            return Fate::Corrupt;
        }
        (0..).zip(sums).for_each(|(strip, sum)| into.set_checksum(strip, sum));
        Fate::Done
    }

    fn check(&self, key: &BlockKey) -> Fate {
        let mut contents = self.shelf.contents();
        if contents.health == Health::Failed {
            return Fate::Failed;
        }
        let Some(kept) = contents.kept.get(key) else { return Fate::Missing };
        let strips = kept.bytes.chunks_exact(kept.record.layout.strip_bytes as usize);
        if strips.map(checksum).eq(kept.sums.iter().copied()) {
            return Fate::Done;
        }
        contents.take(key);
        Fate::Corrupt
    }

    fn step(&mut self) -> bool {
        let Some(work) = self.work.pop_front() else { return false };
        let (op, fate) = match work {
            Work::Write { op, record, block } => {
                self.waiting -= block.bytes().len() as u64;
                (op, self.put(record, &block))
            }
            Work::Read { op, key, mut into } => (op, self.get(&key, &mut into)),
            Work::Verify { op, key } => (op, self.check(&key)),
            Work::Flush { op } => {
                (op, if self.shelf.contents().health == Health::Good { Fate::Done } else { Fate::Failed })
            }
        };
        self.events.push(TierEvent::Ended { op, fate });
        true
    }
}

impl Tier for MemoryTier {
    fn write(&mut self, op: OpId, record: Record, block: ReadHold) {
        let bytes = block.bytes().len() as u64;
        if self.find(&record.place.key).is_some() {
            return self.end(op, Fate::Done);
        }
        if self.waiting > 0 && self.waiting + bytes > self.queue_limit {
            return self.end(op, Fate::Busy);
        }
        self.waiting += bytes;
        self.queue(Work::Write { op, record, block });
    }

    fn read(&mut self, op: OpId, key: &BlockKey, into: WriteHold) {
        if self.find(key).is_none() {
            drop(into);
            return self.end(op, Fate::Missing);
        }
        self.queue(Work::Read { op, key: *key, into });
    }

    fn verify(&mut self, op: OpId, key: &BlockKey) -> bool {
        self.queue(Work::Verify { op, key: *key });
        true
    }

    fn remove(&mut self, key: &BlockKey) -> bool {
        let (removed, kept): (Vec<Work>, Vec<Work>) = (self.work.drain(..))
            .partition(|work| matches!(work, Work::Write { record, .. } if record.place.key == *key));
        self.work = kept.into();
        let there = !removed.is_empty() | self.shelf.contents().take(key).is_some();
        for work in removed {
            if let Work::Write { op, block, .. } = work {
                self.waiting -= block.bytes().len() as u64;
                drop(block);
                self.end(op, Fate::Missing);
            }
        }
        there
    }

    fn clear(&mut self, whose: Whose) -> Vec<BlockKey> {
        let waiting = self
            .work
            .iter()
            .filter_map(|work| if let Work::Write { record, .. } = work { Some(*record) } else { None });
        let mut keys: Vec<BlockKey> = self
            .records()
            .chain(waiting)
            .filter(|record| whose.has(record.owner))
            .map(|record| record.place.key)
            .collect();
        keys.sort_unstable();
        keys.dedup();
        keys.retain(|key| self.remove(key));
        keys
    }

    fn find(&self, key: &BlockKey) -> Option<Record> {
        self.shelf.contents().kept.get(key).map(|kept| kept.record)
    }

    fn records(&self) -> Box<dyn Iterator<Item = Record> + '_> {
        let records: Vec<Record> = self.shelf.contents().kept.values().map(|kept| kept.record).collect();
        Box::new(records.into_iter())
    }

    fn page(&self, from: u32, count: u32) -> (Vec<Record>, Option<u32>) {
        let contents = self.shelf.contents();
        let until = u64::from(from) + u64::from(count);
        let mut kept: Vec<&Kept> = contents.kept.values().filter(|kept| kept.age >= u64::from(from)).collect();
        kept.sort_unstable_by_key(|kept| kept.age);
        let records = kept.iter().take_while(|kept| kept.age < until).map(|kept| kept.record).collect();
        (records, u32::try_from(until).ok().filter(|_| kept.last().is_some_and(|last| last.age >= until)))
    }

    fn flush(&mut self, op: OpId) {
        self.queue(Work::Flush { op });
    }

    fn poll(&mut self) -> Vec<TierEvent> {
        while self.step() {}
        std::mem::take(&mut self.events)
    }

    fn capacity(&self) -> Capacity {
        let contents = self.shelf.contents();
        let (used, blocks) = (contents.used, contents.kept.len() as u64);
        Capacity { limit: self.limit, used, blocks, waiting: self.waiting, health: contents.health }
    }

    fn close(&mut self, _within: Duration) {
        while self.step() {}
    }
}

//! A node's cache without a memory: which blocks it would have, for simulations.
//!
//! The pool, its policies and their rules are those that serve. Only the memory is missing, and the tier behind is
//! reduced to what `pool/disk` decides: blocks are written in the order in which they leave the pool, and the oldest
//! segment is given up when room is needed.

use std::collections::VecDeque;

use rustc_hash::{FxHashMap, FxHashSet};

use super::policy::{Policy, cost::Costs};
use super::{Change, Granting, Holder, Lives, Pool, Tally, Wish};
use crate::error::Error;
use crate::messages::GrantMode;
use crate::random::Random;
use crate::types::{BlockKey, Owner, SlotRef, Tag};

/// A block in a simulation: names its prefix, as a key does.
pub type Id = u64;

/// Most blocks that a model may have in memory: it takes about 100 bytes for each.
const LIMIT: u32 = 1 << 28;
/// A pool keeps one slot for staging, so it must have another.
const LEAST: u32 = 2;

/// Leading blocks of a request that were found, by where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hits {
    /// In memory.
    pub dram: u64,
    /// Behind them, on the tier.
    pub ssd: u64,
}

/// What a model has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests.
    pub requests: u64,
    /// Their blocks.
    pub blocks: u64,
    /// Of those, found.
    pub hits: Hits,
    /// Blocks that made room in memory.
    pub evictions: u64,
    /// Blocks that the tier let go of.
    pub dropped: u64,
    /// Blocks that are in memory now.
    pub in_dram: u64,
    /// Blocks that are on the tier now.
    pub in_ssd: u64,
}

/// One node's cache. The same accesses give the same hits.
#[derive(Debug)]
pub struct CacheModel {
    pool: Pool<NoMemory>,
    ssd: Log,
    counts: Counts,
}

impl CacheModel {
    /// An empty cache of `dram` blocks, with a tier of `ssd` blocks behind it (0: none).
    ///
    /// # Errors
    /// Give up: a capacity that is impossible.
    pub fn new(policy: &Policy, costs: &Costs, dram: u32, ssd: u32) -> Result<Self, Error> {
        if !(LEAST..=LIMIT).contains(&dram) || ssd > LIMIT {
            return Err(Error::give_up(format!(
                "a model of {dram} blocks in DRAM and {ssd} on SSD is impossible: use {LEAST} to {LIMIT}, and at most {LIMIT}"
            )));
        }
        let pool = Pool::new(NoMemory, dram, 0, 1, policy.make(costs));
        Ok(Self { pool, ssd: Log::new(ssd), counts: Counts::default() })
    }

    /// A request with these blocks comes: finds its longest prefix in memory and, where that ends, on the tier; has the
    /// rest computed, or as much as fits; keeps all in use until then, and lets go.
    ///
    /// # Errors
    /// Bug: a block is there twice. Nothing has happened then.
    pub fn access(&mut self, ids: &[Id]) -> Result<Hits, Error> {
        let keys: Vec<BlockKey> = ids.iter().copied().map(key).collect();
        let mut seen = FxHashSet::with_capacity_and_hasher(ids.len(), Default::default());
        if let Some(id) = ids.iter().find(|id| !seen.insert(**id)) {
            return Err(Error::bug(format!("block {id} is in the request twice: an id names a whole prefix")));
        }
        let dram = self.pool.lookup(HOLDER, &keys).len();
        let ssd = keys[dram..].iter().take_while(|key| self.ssd.read(key)).count();
        let fits = keys.len().min(self.pool.slots.len() - 1).max(dram);
        let (parent, position) = (dram.checked_sub(1).map_or(ROOT, |last| keys[last]), dram as u32);
        let wish = Wish { keys: keys[dram..fits].to_vec(), private: false, parent, position, owner: Owner::default() };
        let granted = self.pool.grant(HOLDER, wish, GrantMode::Now);
        assert!(matches!(granted, Granting::Held(_)), "nobody else uses the pool: {granted:?}");
        for index in 0..(fits - dram) as u32 {
            self.pool.commit(HOLDER, index, None).expect("nobody writes it");
        }
        self.pool.release(HOLDER);
        for change in self.pool.take_changes() {
            if let Change::Removed(key) = change {
                self.ssd.write(key);
            }
        }
        let hits = Hits { dram: dram as u64, ssd: ssd as u64 };
        self.counts.requests += 1;
        self.counts.blocks += ids.len() as u64;
        self.counts.hits.dram += hits.dram;
        self.counts.hits.ssd += hits.ssd;
        Ok(hits)
    }

    /// What has been counted.
    pub fn counts(&self) -> Counts {
        let Tally { evictions, .. } = self.pool.tally();
        let (in_dram, in_ssd) = (self.pool.index.len() as u64, self.ssd.order.len() as u64);
        Counts { evictions, dropped: self.ssd.dropped, in_dram, in_ssd, ..self.counts }
    }

    /// Asserts every invariant of the pool and of the tier.
    ///
    /// # Panics
    /// If one does not hold.
    pub fn check(&self) {
        self.pool.check();
        assert!(self.pool.idle(), "something is held between requests");
        assert_eq!(self.ssd.order.len(), self.ssd.read.len(), "the tier's order and its blocks differ");
        assert!(self.ssd.order.len() <= self.ssd.capacity, "the tier is too full");
    }
}

/// There is one user at a time.
const HOLDER: Holder = Holder { client: None, tag: Tag { request: 0, attempt: 0, worker: 0 } };
const ROOT: BlockKey = BlockKey([0; 16]);

/// Distinct for distinct ids, and as evenly spread as the hashes that it stands for.
fn key(id: Id) -> BlockKey {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&Random(id).bits().to_le_bytes());
    BlockKey(bytes)
}

/// Memory that always does as it is told: a pool over it is books and nothing else.
#[derive(Debug)]
pub struct NoMemory;

impl Lives for NoMemory {
    fn issue(&self, slot: u32) -> SlotRef {
        SlotRef { slot, generation: 1 }
    }

    fn seal(&self, _: SlotRef) -> bool {
        true
    }

    fn retire(&self, _: SlotRef) {}

    fn quiet(&self, _: u32) -> bool {
        true
    }
}

/// A tier that writes segments one after the other and gives up the oldest. Blocks in it that were read since they were
/// written are written again, up to a quarter of it.
#[derive(Debug)]
struct Log {
    capacity: usize,
    /// Oldest first.
    order: VecDeque<BlockKey>,
    /// Blocks that are there. True: read since it was written.
    read: FxHashMap<BlockKey, bool>,
    dropped: u64,
}

impl Log {
    /// Segments in a tier.
    const SEGMENTS: usize = 64;

    fn new(capacity: u32) -> Self {
        Self { capacity: capacity as usize, order: VecDeque::new(), read: FxHashMap::default(), dropped: 0 }
    }

    /// True if the block is there.
    fn read(&mut self, key: &BlockKey) -> bool {
        self.read.get_mut(key).map(|read| *read = true).is_some()
    }

    fn write(&mut self, key: BlockKey) {
        if self.capacity == 0 || self.read.contains_key(&key) {
            return;
        }
        if self.order.len() == self.capacity {
            self.reclaim();
        }
        self.order.push_back(key);
        self.read.insert(key, false);
    }

    fn reclaim(&mut self) {
        let segment = (self.capacity / Self::SEGMENTS).max(1);
        let mut may_move = segment / 4;
        for key in self.order.drain(..segment).collect::<Vec<_>>() {
            let read = self.read.get_mut(&key).expect("it is in the order");
            if may_move > 0 && std::mem::take(read) {
                may_move -= 1;
                self.order.push_back(key);
            } else {
                self.read.remove(&key);
                self.dropped += 1;
            }
        }
    }
}

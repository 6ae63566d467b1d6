//! A node's pool without a memory: which blocks it would have, for simulations.
//!
//! The pool, its policies and their rules are those that serve. Only the memory is missing, and the tier behind is
//! reduced to what `pool/disk` decides: blocks are written in the order in which they leave the pool, and the oldest
//! segment is given up when room is needed.
//!
//! A simulation that knows time has requests `take` what they need, `commit` what was computed or has arrived, and
//! `release` it all; one that only counts hits has them `access` the pool one after the other.

mod log;

use rustc_hash::{FxHashMap, FxHashSet};

use super::policy::{Policy, cost::Costs};
use super::{Change, Dropped, Granting, Holder, Lives, Place, Pool, Tally, Wish};
use crate::error::Error;
use crate::messages::{GrantMode, Refusal};
use crate::random::Random;
use crate::types::{BlockKey, Owner, SlotRef, Tag};
use log::Log;

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

/// Where a leading block of a prefix lies, as packed changes number it (`scheduler/changes.py`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Where {
    /// In memory.
    Dram = 1,
    /// On the tier alone.
    Ssd = 2,
}

/// Bytes of a packed change.
pub const CHANGE_BYTES: usize = 40;

/// Changes that nobody has asked for, in bytes: a simulation takes them after every event.
const CHANGES_LIMIT: usize = 1 << 30;

/// One node's pool. The same calls give the same answers.
#[derive(Debug)]
pub struct PoolModel {
    pool: Pool<NoMemory>,
    policy: &'static Policy,
    costs: Costs,
    ssd: Log,
    counts: Counts,
    /// The keys that each tag has taken, in their order.
    taken: FxHashMap<u64, Vec<BlockKey>>,
    /// Of blocks in memory, as the tier wants to know them when they leave it. Empty if there is none.
    places: FxHashMap<BlockKey, Place>,
    /// Packed, if anybody asks.
    changes: Option<Vec<u8>>,
    nameless: u64,
}

impl PoolModel {
    /// An empty pool of `dram` blocks, with a tier of `ssd` blocks behind it (0: none). `changes`: they will be asked for.
    ///
    /// # Errors
    /// Give up: a capacity that is impossible.
    pub fn new(policy: &'static Policy, costs: &Costs, dram: u32, ssd: u32, changes: bool) -> Result<Self, Error> {
        if !(LEAST..=LIMIT).contains(&dram) || ssd > LIMIT {
            return Err(Error::give_up(format!(
                "a model of {dram} blocks in DRAM and {ssd} on SSD is impossible: use {LEAST} to {LIMIT}, and at most {LIMIT}"
            )));
        }
        Ok(Self {
            pool: Pool::new(NoMemory, dram, 0, 1, policy.make(costs)),
            policy,
            costs: *costs,
            ssd: Log::new(ssd),
            counts: Counts::default(),
            taken: FxHashMap::default(),
            places: FxHashMap::default(),
            changes: changes.then(Vec::new),
            nameless: 0,
        })
    }

    /// Where the leading blocks of a prefix lie, as far as all are here. Changes nothing.
    pub fn find(&self, keys: &[BlockKey]) -> Vec<Where> {
        let at = |key| {
            let dram = self.pool.find(key).map(|_| Where::Dram);
            dram.or_else(|| self.ssd.has(key).then_some(Where::Ssd))
        };
        keys.iter().map_while(at).collect()
    }

    /// Pins those of these blocks that are in memory and reserves slots for the others and for `private` nameless ones: all
    /// or, if there is no room now, nothing (false). `position`, `parent`: of the first key.
    ///
    /// # Errors
    /// Give up: it can never have so many. Bug: a key is there twice, or the tag has taken something already.
    pub fn take(
        &mut self,
        tag: u64,
        keys: Vec<BlockKey>,
        private: u32,
        position: u32,
        parent: BlockKey,
    ) -> Result<bool, Error> {
        let mut all = keys;
        let named = all.len();
        // A pool knows one nameless block for a grant. More of them have keys that nothing else has, and that are never
        // committed.
        for _ in 1..private {
            self.nameless += 1;
            let mut bytes = [0xff; 16];
            bytes[..8].copy_from_slice(&self.nameless.to_le_bytes());
            all.push(BlockKey(bytes));
        }
        let wish = Wish { keys: all.clone(), private: private > 0, parent, position, owner: Owner::default() };
        match self.pool.grant(holder(tag), wish, GrantMode::Now) {
            Granting::Held(_) => {
                all.truncate(named);
                for key in all.iter().filter(|key| self.pool.find(key).is_none()) {
                    self.ssd.read(key);
                }
                self.taken.insert(tag, all);
                self.absorb();
                Ok(true)
            }
            Granting::Refused(Refusal::Full) => {
                self.absorb();
                Ok(false)
            }
            Granting::Refused(Refusal::TooLarge) => Err(Error::give_up(format!(
                "{named} blocks and {private} nameless ones can never be taken together: the pool has {} slots, of which \
                 one is kept for staging: give it more",
                self.pool.slots()
            ))),
            refused => {
                Err(Error::bug(format!("tag {tag} has taken something already, or a key is there twice: {refused:?}")))
            }
        }
    }

    /// These blocks, which the tag has taken, can be read now by all.
    ///
    /// # Errors
    /// Bug: it has taken no such block. Those before it are committed.
    pub fn commit(&mut self, tag: u64, keys: &[BlockKey]) -> Result<(), Error> {
        let taken = self.taken.get(&tag).map_or(&[][..], Vec::as_slice);
        let mut at = 0;
        for key in keys {
            // Most are committed in the order in which they were taken.
            let rest = taken[at..].iter().position(|other| other == key).map(|found| at + found);
            let found = rest.or_else(|| taken[..at].iter().position(|other| other == key));
            let Some(index) = found else {
                self.absorb();
                return Err(Error::bug(format!("tag {tag} commits a block that it has not taken")));
            };
            self.pool.commit(holder(tag), index as u32, None).expect("nobody writes it");
            at = index + 1;
        }
        self.absorb();
        Ok(())
    }

    /// Lets go of all that a tag has taken; what it has not committed is lost. False if it had nothing.
    pub fn release(&mut self, tag: u64) -> bool {
        let had = self.taken.remove(&tag).is_some();
        self.pool.release(holder(tag));
        self.absorb();
        had
    }

    /// Drops these blocks from memory, but for those that are in use, as a daemon does when it is told to forget them:
    /// what the tier has of them stays there. Returns how many.
    pub fn drop_blocks(&mut self, keys: &[BlockKey]) -> u64 {
        let mut dropped = 0;
        for key in keys {
            // What was dropped does not go to the tier, as what made room does.
            if self.pool.drop_block(key) == Dropped::Now {
                self.places.remove(key);
                dropped += 1;
            }
            self.absorb();
        }
        dropped
    }

    /// The node's next life: nothing is in memory, and nobody holds anything; the tier has what it had. The changes
    /// tell of a node that had nothing before, and what was counted goes on.
    pub fn restart(&mut self) {
        self.counts = self.counts();
        self.pool = Pool::new(NoMemory, self.pool.slots(), 0, 1, self.policy.make(&self.costs));
        self.taken.clear();
        self.places.clear();
        if let Some(changes) = &mut self.changes {
            changes.clear();
            self.ssd.blocks().for_each(|place| pack_stored(changes, Where::Ssd, place));
        }
    }

    /// What has changed since the last call, packed.
    pub fn take_changes(&mut self) -> Vec<u8> {
        self.changes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Number and XOR of all blocks, as a daemon's heartbeat says them: keys on the tier are rotated by a byte.
    pub fn digest(&self) -> (u64, [u8; 16]) {
        let (count, BlockKey(mut xor)) = self.pool.digest();
        let mut ssd = self.ssd.xor;
        ssd.rotate_left(1);
        xor.iter_mut().zip(ssd).for_each(|(sum, byte)| *sum ^= byte);
        (count + self.ssd.len() as u64, xor)
    }

    /// Slots that nobody uses: what a new tag could have, but for one.
    pub fn available(&self) -> u64 {
        (self.pool.free.len() + self.pool.room.idle()) as u64
    }

    /// A request with these blocks comes while nobody else uses the pool: finds its longest prefix in memory and, where that ends, on the tier; has the
    /// rest computed, or as much as fits; keeps all in use until then, and lets go.
    ///
    /// # Errors
    /// Bug: a block is there twice, or somebody else uses the pool. Nothing has happened then.
    pub fn access(&mut self, ids: &[Id]) -> Result<Hits, Error> {
        if !self.taken.is_empty() {
            return Err(Error::bug("others use this pool: take, commit and release"));
        }
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
        self.absorb();
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
        let (in_dram, in_ssd) = (self.pool.index.len() as u64, self.ssd.len() as u64);
        // Of earlier lives as well.
        let evictions = self.counts.evictions + evictions;
        Counts { evictions, dropped: self.ssd.dropped, in_dram, in_ssd, ..self.counts }
    }

    /// Asserts every invariant of the pool and of the tier.
    ///
    /// # Panics
    /// If one does not hold.
    pub fn check(&self) {
        self.pool.check();
        self.ssd.check();
        assert_eq!(self.pool.idle(), self.taken.is_empty(), "held by somebody else, or by nobody");
        if self.ssd.exists() {
            assert_eq!(self.places.len(), self.pool.index.len(), "places of blocks that are not in memory");
        }
    }

    /// Writes to the tier what has left the memory, and packs all changes.
    fn absorb(&mut self) {
        for change in self.pool.take_changes() {
            match change {
                Change::Stored(place) => {
                    if self.ssd.exists() {
                        self.places.insert(place.key, place);
                    }
                    if let Some(changes) = &mut self.changes {
                        pack_stored(changes, Where::Dram, place);
                    }
                }
                Change::Removed(key) => {
                    if let Some(place) = self.places.remove(&key) {
                        let changes = &mut self.changes;
                        let written = self.ssd.write(place, &mut |gone| {
                            if let Some(changes) = changes.as_mut() {
                                pack_removed(changes, Where::Ssd, gone);
                            }
                        });
                        // Written ahead, so a block is never nowhere in between.
                        if let Some(changes) = changes.as_mut().filter(|_| written) {
                            pack_stored(changes, Where::Ssd, place);
                        }
                    }
                    if let Some(changes) = &mut self.changes {
                        pack_removed(changes, Where::Dram, key);
                    }
                }
            }
        }
        let waiting = self.changes.as_ref().map_or(0, Vec::len);
        assert!(waiting <= CHANGES_LIMIT, "nobody takes the changes");
    }
}

fn pack_stored(changes: &mut Vec<u8>, tier: Where, place: Place) {
    changes.extend_from_slice(&[0, tier as u8, 0, 0]);
    changes.extend_from_slice(&place.position.to_le_bytes());
    changes.extend_from_slice(&place.key.0);
    changes.extend_from_slice(&place.parent.0);
}

fn pack_removed(changes: &mut Vec<u8>, tier: Where, key: BlockKey) {
    changes.extend_from_slice(&[1, tier as u8, 0, 0]);
    changes.extend_from_slice(&[0; 4]);
    changes.extend_from_slice(&key.0);
    changes.extend_from_slice(&ROOT.0);
}

/// A tag's blocks. Its number is another than that of whoever accesses the pool.
fn holder(tag: u64) -> Holder {
    Holder { client: None, tag: Tag { request: tag, attempt: 0, worker: 1 } }
}

/// Who accesses the pool: one at a time.
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

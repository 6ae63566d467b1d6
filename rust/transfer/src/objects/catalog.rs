//! Which objects lie where, for all threads of a daemon's process.
//!
//! The engine alone changes the catalog. Whoever reads takes the block by a hold of the memory ([`ReadHold`]): what the
//! catalog says may be over by then, and the hold is refused, which is a miss; while the hold is out the slot is given to
//! nobody. So a read needs no word with the engine's thread, which would cost more than all the rest of it. The engine
//! learns later what was read, from the **notices**: it counts a block as used, and as in use while a hold is out.
//!
//! ```text
//!    reader                      catalog                            engine (before each input)
//!    find, begin_read ---------> notice (taken) ------------------> the block is used: pinned if the hold is still out
//!    ... reads the bytes
//!    drops the hold -----------> notice (let go) -----------------> it may go again
//! ```

use std::collections::BTreeSet;
use std::collections::hash_map::Entry as Slot;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustc_hash::FxHashMap;

use super::classes::{Trailer, tail};
use super::messages::{At, Cursor, Listed, ObjectStats};
use crate::memory::{Arena, ReadHold};
use crate::types::{BlockKey, Medium, RegionId, SlotRef};

/// Parts with a lock each. Writers are one thread, so it is few readers that meet; a list takes a part at a time.
const SHARDS: usize = 64;
/// Notices that wait for the engine. It takes them at least every 50 ms; what is beyond is forgotten, and the engine then
/// looks at everything that it holds to be read.
const NOTICES: usize = 1 << 16;
/// Objects that are looked at for one part of a list: milliseconds.
const LOOKS: usize = 1 << 14;

/// A block of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its arena.
    pub region: RegionId,
    /// Its slot.
    pub slot: SlotRef,
    /// The first block of its object.
    pub head: bool,
}

/// Somebody began, or ended, to read a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Which.
    pub at: At,
    /// Began.
    pub taken: bool,
}

/// The objects of a node. See the module's head.
#[derive(Debug)]
pub struct Catalog {
    shards: [RwLock<FxHashMap<BlockKey, Entry>>; SHARDS],
    arenas: RwLock<FxHashMap<RegionId, Arc<Arena>>>,
    notices: Mutex<Vec<Notice>>,
    /// Some wait.
    noticed: AtomicBool,
    overflowed: AtomicBool,
    objects: AtomicU64,
    bytes: AtomicU64,
    capacity: u64,
    hits: AtomicU64,
    misses: AtomicU64,
    /// Other nodes may have what is not here.
    elsewhere: AtomicBool,
}

impl Catalog {
    /// An empty one, of a node with memory of `capacity` bytes.
    pub fn new(capacity: u64) -> Arc<Self> {
        Arc::new(Self {
            shards: std::array::from_fn(|_| RwLock::default()),
            arenas: RwLock::default(),
            notices: Mutex::default(),
            noticed: AtomicBool::new(false),
            overflowed: AtomicBool::new(false),
            objects: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            capacity,
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            elsewhere: AtomicBool::new(false),
        })
    }

    // -- for readers ---------------------------------------------------------------------------------------------------

    /// Pins those of these blocks that are here. `names`: they are heads, and count as asked for.
    pub fn pin(self: &Arc<Self>, keys: &[BlockKey], names: bool) -> Vec<Option<Hold>> {
        let arenas = read(&self.arenas);
        let pinned: Vec<Option<Hold>> = keys
            .iter()
            .map(|key| {
                let Entry { region, slot, .. } = self.find(key)?;
                let hold = arenas.get(&region)?.begin_read(slot)?;
                Some(Hold { hold: Some(hold), region, catalog: self.clone() })
            })
            .collect();
        drop(arenas);
        let found = pinned.iter().flatten().map(|hold| Notice { at: hold.at(), taken: true });
        self.notice(found);
        if names {
            let found = pinned.iter().flatten().count() as u64;
            self.hits.fetch_add(found, Relaxed);
            self.misses.fetch_add(keys.len() as u64 - found, Relaxed);
        }
        pinned
    }

    /// What is known of a block. It may be over a moment later.
    pub fn find(&self, key: &BlockKey) -> Option<Entry> {
        read(self.shard(key)).get(key).copied()
    }

    /// Where these are.
    pub fn contains(&self, keys: &[BlockKey]) -> Vec<Option<Medium>> {
        keys.iter().map(|key| self.find(key).map(|_| Medium::Dram)).collect()
    }

    /// True if other nodes may have what is not here.
    pub fn is_elsewhere(&self) -> bool {
        self.elsewhere.load(Relaxed)
    }

    /// Some objects whose names begin so, from `from` on; and where to go on, if there may be more. In no order; one that
    /// comes or goes meanwhile may be in the list or not, all others are in it once.
    pub fn list(&self, prefix: &[u8], from: Cursor, limit: usize) -> (Vec<Listed>, Option<Cursor>) {
        let (mut listed, mut looked, mut at) = (Vec::new(), 0, from);
        while let Some(shard) = self.shards.get(at.shard as usize) {
            let mut keys: Vec<BlockKey> = {
                let later = |key: &BlockKey| at.after.is_none_or(|after| *key > after);
                read(shard).iter().filter(|(key, entry)| entry.head && later(key)).map(|(key, _)| *key).collect()
            };
            keys.sort_unstable();
            for key in keys {
                if listed.len() >= limit || looked >= LOOKS {
                    return (listed, Some(at));
                }
                at.after = Some(key);
                looked += 1;
                let Some(hold) = self.peek(&key) else { continue };
                let mut space = tail();
                let Some(trailer) = Trailer::read(hold.arena(), hold.slot(), &mut space) else { continue };
                if trailer.name.starts_with(prefix) {
                    listed.push(Listed { name: trailer.name.to_vec(), bytes: trailer.value });
                }
            }
            at = Cursor { shard: at.shard + 1, after: None };
        }
        (listed, None)
    }

    /// The arena of this number, if there are objects in it.
    pub fn arena(&self, region: RegionId) -> Option<Arc<Arena>> {
        read(&self.arenas).get(&region).cloned()
    }

    /// Its numbers.
    pub fn stats(&self) -> ObjectStats {
        ObjectStats {
            objects: self.objects.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            capacity: self.capacity,
            hits: self.hits.load(Relaxed),
            misses: self.misses.load(Relaxed),
        }
    }

    /// A hold that does not count as a use.
    fn peek(&self, key: &BlockKey) -> Option<ReadHold> {
        let Entry { region, slot, .. } = self.find(key)?;
        self.arena(region)?.begin_read(slot)
    }

    fn notice(&self, notices: impl Iterator<Item = Notice>) {
        let mut waiting = self.lock();
        for notice in notices {
            if waiting.len() >= NOTICES {
                self.overflowed.store(true, Relaxed);
                break;
            }
            waiting.push(notice);
        }
        self.noticed.store(!waiting.is_empty(), Relaxed);
    }

    // -- for the engine ------------------------------------------------------------------------------------------------

    /// Whether other nodes may have what is not here.
    pub fn set_elsewhere(&self, elsewhere: bool) {
        self.elsewhere.store(elsewhere, Relaxed);
    }

    /// There are objects in this arena.
    pub fn add_arena(&self, region: RegionId, arena: Arc<Arena>) {
        write(&self.arenas).insert(region, arena);
    }

    /// A block can be read from now on.
    pub fn insert(&self, key: BlockKey, entry: Entry) {
        let bytes = self.block_bytes(entry.region);
        if let Slot::Vacant(vacant) = write(self.shard(&key)).entry(key) {
            vacant.insert(entry);
            self.objects.fetch_add(entry.head.into(), Relaxed);
            self.bytes.fetch_add(bytes, Relaxed);
        }
    }

    /// It cannot any more.
    pub fn remove(&self, key: &BlockKey) -> Option<Entry> {
        let entry = write(self.shard(key)).remove(key)?;
        self.objects.fetch_sub(entry.head.into(), Relaxed);
        self.bytes.fetch_sub(self.block_bytes(entry.region), Relaxed);
        Some(entry)
    }

    /// What was read since the last call. True: there was more than is told.
    pub fn take_notices(&self) -> (Vec<Notice>, bool) {
        if !self.noticed.load(Relaxed) {
            return (Vec::new(), false);
        }
        let mut waiting = self.lock();
        self.noticed.store(false, Relaxed);
        (std::mem::take(&mut *waiting), self.overflowed.swap(false, Relaxed))
    }

    /// All keys, for a test's comparison.
    pub fn keys(&self) -> BTreeSet<BlockKey> {
        self.shards.iter().flat_map(|shard| read(shard).keys().copied().collect::<Vec<_>>()).collect()
    }

    fn block_bytes(&self, region: RegionId) -> u64 {
        read(&self.arenas).get(&region).map_or(0, |arena| arena.layout().block_bytes() as u64)
    }

    fn shard(&self, key: &BlockKey) -> &RwLock<FxHashMap<BlockKey, Entry>> {
        // Keys are hashes: any bits of one are as good as others. The map uses the first ones.
        &self.shards[key.0[15] as usize % SHARDS]
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Notice>> {
        // Nothing that could panic half way runs under any of these locks, so poison says nothing here.
        self.notices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// A pinned block: its bytes stay while this lives.
#[derive(Debug)]
pub struct Hold {
    /// `None` only while it is being dropped.
    hold: Option<ReadHold>,
    region: RegionId,
    catalog: Arc<Catalog>,
}

impl Hold {
    /// Where it lies.
    pub fn at(&self) -> At {
        (self.region, self.hold().slot())
    }

    /// The arena that it lies in.
    pub fn arena(&self) -> &Arc<Arena> {
        self.hold().arena()
    }

    fn hold(&self) -> &ReadHold {
        self.hold.as_ref().expect("held until it is dropped")
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let at = self.at();
        // First let go, then tell: who is told looks whether it is quiet.
        self.hold = None;
        self.catalog.notice(std::iter::once(Notice { at, taken: false }));
    }
}

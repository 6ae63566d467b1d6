//! Which objects lie where, for all threads of a daemon's process.
//!
//! The engine alone changes the catalog. Whoever reads takes the block by a hold of the memory ([`ReadHold`]): what the
//! catalog says may be over by then, and the hold is refused, which is a miss; while the hold is out the slot is given to
//! nobody. So a read needs no word with the engine's thread, which would cost more than all the rest of it. The engine
//! learns later what was read, from the **notices**: it counts a block as used, and as in use while a hold is out. What
//! lies on the SSD only the engine has to bring first (`engine/objects/bring.rs`).
//!
//! ```text
//!    reader                      catalog                            engine (before each input)
//!    find, begin_read ---------> notice (taken) ------------------> the block is used: pinned if the hold is still out
//!    ... reads the bytes
//!    drops the hold -----------> notice (let go) -----------------> it may go again
//! ```

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustc_hash::FxHashMap;

use super::classes::{Class, Trailer, tail};
use super::messages::{At, Cursor, Listed, ObjectStats, Sighting, UNKNOWN};
use crate::memory::{Arena, ReadHold};
use crate::types::{BlockKey, Medium, RegionId, SlotRef};

/// Parts with a lock each. Writers are one thread, so it is few readers that meet; a list takes a part at a time.
const SHARDS: usize = 64;
/// Notices that wait for the engine. It takes them at least every 50 ms; what is beyond is forgotten, and the engine then
/// looks at everything that it holds to be read.
const NOTICES: usize = 1 << 16;
/// Objects that are looked at for one part of a list: milliseconds.
const LOOKS: usize = 1 << 14;

/// A block of an object, and the media of this node that have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its arena and slot, if it lies in DRAM.
    pub dram: Option<At>,
    /// It lies on the SSD.
    pub ssd: bool,
    /// The first block of its object.
    pub head: bool,
    /// How large it is.
    pub class: Class,
}

impl Entry {
    /// The best medium that has it. On none it is on its way to the SSD, and was evicted under the write.
    pub fn medium(&self) -> Medium {
        if self.dram.is_some() { Medium::Dram } else { Medium::Ssd }
    }

    fn bytes(&self) -> u64 {
        self.class.layout().block_bytes() as u64
    }
}

/// An entry in 12 bytes: there may be ten million.
#[derive(Clone, Copy, Debug)]
struct Packed {
    slot: SlotRef,
    /// Number of the arena; [`Packed::NOWHERE`]: none.
    region: u16,
    class: u8,
    flags: u8,
}

impl Packed {
    const NOWHERE: u16 = u16::MAX;
    const SSD: u8 = 1;
    const HEAD: u8 = 2;

    fn new(entry: Entry) -> Self {
        let (region, slot) = entry.dram.unwrap_or((RegionId(0), SlotRef { slot: 0, generation: 0 }));
        let region = if entry.dram.is_some() { region.0 as u16 } else { Self::NOWHERE };
        let flags = if entry.ssd { Self::SSD } else { 0 } | if entry.head { Self::HEAD } else { 0 };
        Self { slot, region, class: entry.class.number(), flags }
    }

    fn entry(self) -> Entry {
        let dram = (self.region != Self::NOWHERE).then_some((RegionId(self.region.into()), self.slot));
        let class = Class::new(self.class).expect("it was made from one");
        Entry { dram, ssd: self.flags & Self::SSD != 0, head: self.flags & Self::HEAD != 0, class }
    }
}

// Numbers of arenas are far below.
const _: () = assert!(RegionId::ARENAS < Packed::NOWHERE as u32);

/// A part of a list, see [`Catalog::list`].
#[derive(Clone, Debug)]
pub struct List {
    /// Names and sizes.
    pub objects: Vec<Listed>,
    /// Objects whose heads do not lie in DRAM: the heads' keys and classes.
    pub behind: Vec<(BlockKey, u8)>,
    /// Where it goes on.
    pub next: Option<Cursor>,
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
    shards: [RwLock<FxHashMap<BlockKey, Packed>>; SHARDS],
    arenas: RwLock<FxHashMap<RegionId, Arc<Arena>>>,
    notices: Mutex<Vec<Notice>>,
    /// Some wait.
    noticed: AtomicBool,
    overflowed: AtomicBool,
    objects: AtomicU64,
    bytes: AtomicU64,
    ssd_objects: AtomicU64,
    ssd_bytes: AtomicU64,
    capacity: u64,
    ssd_capacity: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
    /// Other nodes may have what is not here.
    elsewhere: AtomicBool,
    /// Asks them, if somebody can.
    look: OnceLock<Look>,
}

/// Asks other nodes whether these are anywhere; `None`: the engine is to be asked.
type Ask = dyn Fn(&[BlockKey]) -> Option<Vec<bool>> + Send + Sync;

struct Look(Box<Ask>);

impl std::fmt::Debug for Look {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Look")
    }
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
            ssd_objects: AtomicU64::new(0),
            ssd_bytes: AtomicU64::new(0),
            capacity,
            ssd_capacity: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            elsewhere: AtomicBool::new(false),
            look: OnceLock::new(),
        })
    }

    // -- for readers ---------------------------------------------------------------------------------------------------

    /// Pins those of these blocks that lie in DRAM. `names`: they are heads, and count as asked for.
    pub fn pin(self: &Arc<Self>, keys: &[BlockKey], names: bool) -> Vec<Sighting<Hold>> {
        let arenas = read(&self.arenas);
        let pin = |key| {
            let mut found = self.find(key);
            loop {
                let Some(Entry { dram, ssd, class, .. }) = found else { return Sighting::Missing };
                let behind = Sighting::Behind { class: class.number() };
                let Some((region, slot)) = dram else { return behind };
                if let Some(hold) = arenas.get(&region).and_then(|arena| arena.begin_read(slot)) {
                    return Sighting::Here(Hold { hold: Some(hold), region, catalog: self.clone() });
                }
                // Evicted a moment ago. It may have come to the SSD, or to another slot, since it was looked up: then it is
                // not missing, and who reads a large value must not take it for torn.
                let now = self.find(key);
                if now == found {
                    return if ssd { behind } else { Sighting::Missing };
                }
                found = now;
            }
        };
        let pinned: Vec<Sighting<Hold>> = keys.iter().map(pin).collect();
        drop(arenas);
        self.notice(pinned.iter().filter_map(Sighting::here).map(|hold| Notice { at: hold.at(), taken: true }));
        let elsewhere = names && self.is_elsewhere();
        if names {
            let missing = pinned.iter().filter(|seen| matches!(seen, Sighting::Missing)).count() as u64;
            self.hits.fetch_add(keys.len() as u64 - missing, Relaxed);
            self.misses.fetch_add(missing, Relaxed);
        }
        if elsewhere {
            let ask = |seen| if matches!(seen, Sighting::Missing) { Sighting::Behind { class: UNKNOWN } } else { seen };
            return pinned.into_iter().map(ask).collect();
        }
        pinned
    }

    /// What is known of a block. It may be over a moment later.
    pub fn find(&self, key: &BlockKey) -> Option<Entry> {
        read(self.shard(key)).get(key).map(|packed| packed.entry())
    }

    /// The best medium that has each.
    pub fn contains(&self, keys: &[BlockKey]) -> Vec<Option<Medium>> {
        keys.iter().map(|key| self.find(key).map(|entry| entry.medium())).collect()
    }

    /// True if other nodes may have what is not here.
    pub fn is_elsewhere(&self) -> bool {
        self.elsewhere.load(Relaxed)
    }

    /// Whether these, which are not here, are on other nodes; `None`: the engine is to be asked.
    pub fn look_elsewhere(&self, keys: &[BlockKey]) -> Option<Vec<bool>> {
        (self.look.get()?.0)(keys)
    }

    /// How other nodes are asked. Only the first counts.
    pub fn set_look(&self, look: Box<Ask>) {
        drop(self.look.set(Look(look)));
    }

    /// Some objects whose names begin so, from `from` on; and where to go on, if there may be more. In no order; one that
    /// comes or goes meanwhile may be in the list or not, all others are in it once. Of those that do not lie in DRAM only
    /// the keys are told, with their classes: their names, and whether these begin so, are known when they have been brought.
    pub fn list(&self, prefix: &[u8], from: Cursor, limit: usize) -> List {
        let (mut objects, mut behind, mut looked, mut at) = (Vec::new(), Vec::new(), 0, from);
        while let Some(shard) = self.shards.get(at.shard as usize) {
            let mut heads: Vec<(BlockKey, Entry)> = {
                let later = |key: &BlockKey| at.after.is_none_or(|after| *key > after);
                let entries = read(shard);
                let entries = entries.iter().map(|(key, packed)| (*key, packed.entry()));
                entries.filter(|(key, entry)| entry.head && later(key)).collect()
            };
            heads.sort_unstable_by_key(|(key, _)| *key);
            for (key, entry) in heads {
                if objects.len() + behind.len() >= limit || looked >= LOOKS {
                    return List { objects, behind, next: Some(at) };
                }
                at.after = Some(key);
                looked += 1;
                let hold = entry.dram.and_then(|(region, slot)| self.arena(region)?.begin_read(slot));
                let Some(hold) = hold else {
                    // Not even there, if it was removed meanwhile.
                    behind.push((key, entry.class.number()));
                    continue;
                };
                let mut space = tail();
                let Some(trailer) = Trailer::read(hold.arena(), hold.slot(), &mut space) else { continue };
                if trailer.name.starts_with(prefix) {
                    objects.push(Listed { name: trailer.name.to_vec(), bytes: trailer.value });
                }
            }
            at = Cursor { shard: at.shard + 1, after: None };
        }
        List { objects, behind, next: None }
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
            ssd_objects: self.ssd_objects.load(Relaxed),
            ssd_bytes: self.ssd_bytes.load(Relaxed),
            ssd_capacity: self.ssd_capacity.load(Relaxed),
            hits: self.hits.load(Relaxed),
            misses: self.misses.load(Relaxed),
        }
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

    /// Behind the arenas there is an SSD for so many bytes.
    pub fn set_ssd_capacity(&self, bytes: u64) {
        self.ssd_capacity.store(bytes, Relaxed);
    }

    /// A block lies in DRAM from now on, besides where it may be already.
    pub fn insert(&self, key: BlockKey, class: Class, head: bool, at: At) {
        self.change(&key, Entry { dram: None, ssd: false, head, class }, |entry| entry.dram = Some(at));
    }

    /// A block lies on the SSD from now on, besides where it may be already.
    pub fn insert_ssd(&self, key: BlockKey, class: Class, head: bool) {
        self.change(&key, Entry { dram: None, ssd: false, head, class }, |entry| entry.ssd = true);
    }

    /// A block is in DRAM no more. What is known of it now; `None`: nothing is.
    pub fn left_dram(&self, key: &BlockKey) -> Option<Entry> {
        let entry = self.find(key)?;
        Some(self.change(key, entry, |entry| entry.dram = None))
    }

    /// A block is on the SSD no more. What is known of it now; `None`: nothing is.
    pub fn left_ssd(&self, key: &BlockKey) -> Option<Entry> {
        let entry = self.find(key)?;
        Some(self.change(key, entry, |entry| entry.ssd = false))
    }

    /// Nobody finds a block any more.
    pub fn remove(&self, key: &BlockKey) -> Option<Entry> {
        let entry = write(self.shard(key)).remove(key)?.entry();
        self.count(&entry, false);
        Some(entry)
    }

    fn change(&self, key: &BlockKey, new: Entry, change: impl FnOnce(&mut Entry)) -> Entry {
        let mut shard = write(self.shard(key));
        let before = shard.get(key).map(|packed| packed.entry());
        let mut entry = before.unwrap_or(new);
        change(&mut entry);
        shard.insert(*key, Packed::new(entry));
        drop(shard);
        before.iter().for_each(|before| self.count(before, false));
        self.count(&entry, true);
        entry
    }

    fn count(&self, entry: &Entry, more: bool) {
        let add = |to: &AtomicU64, count: u64| {
            // The engine alone writes; wrapping, as what is taken away was added before.
            to.fetch_add(if more { count } else { count.wrapping_neg() }, Relaxed);
        };
        let head = entry.head.into();
        add(&self.objects, head);
        if entry.dram.is_some() {
            add(&self.bytes, entry.bytes());
        }
        if entry.ssd {
            add(&self.ssd_objects, head);
            add(&self.ssd_bytes, entry.bytes());
        }
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

    fn shard(&self, key: &BlockKey) -> &RwLock<FxHashMap<BlockKey, Packed>> {
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

#[cfg(test)]
mod tests {
    //! Goal: what a catalog has is not missing, whatever happens to it while it is looked for. Method: a block that goes from
    //! slot to slot as fast as may be, and a reader who looks for it all the time.
    use std::thread::scope;

    use super::*;
    use crate::memory::slot_bytes;

    #[test]
    fn what_moves_is_never_missing() {
        let (class, key) = (Class::fitting(1, 1), BlockKey([1; 16]));
        let bytes = 4 * slot_bytes(class.layout()).expect("possible") + 8192;
        let arena = Arena::create(bytes, class.layout()).expect("a small arena");
        let begin = |slot: u32| {
            let slot = arena.issue(slot);
            assert!(arena.seal(slot));
            slot
        };
        let catalog = Catalog::new(0);
        catalog.add_arena(RegionId(0), arena.clone());
        let mut last = begin(0);
        catalog.insert(key, class, true, (RegionId(0), last));
        let over = AtomicBool::new(false);
        scope(|scope| {
            let reader = scope.spawn(|| {
                let mut missing = 0;
                for _ in 0..300_000 {
                    missing += usize::from(catalog.pin(&[key], false)[0].here().is_none());
                    catalog.take_notices();
                }
                over.store(true, Relaxed);
                missing
            });
            while !over.load(Relaxed) {
                let other = 1 - last.slot;
                if !arena.quiet(other) {
                    continue;
                }
                let next = begin(other);
                catalog.insert(key, class, true, (RegionId(0), next));
                arena.retire(last);
                last = next;
            }
            assert_eq!(reader.join().expect("it does not panic"), 0);
        });
    }
}

//! Blocks that are kept: guaranteed context, for a time.
//!
//! ```text
//! keep ---> in the arena: pinned ---------------------------> its time is over, or let go by all who keep it: a block as any
//!      ---> on this node's SSD: a slot for it, and a read ---> pinned
//!      ---> nowhere here: missing. No room: full
//! ```
//!
//! Whoever keeps a block says for how long and in whose name; several may keep one. It stays when its keeper's process has
//! gone, and not when the daemon has: the keeper asks again then. What is kept is nobody's to evict, so all of it together has
//! at most a [share](KEPT_SHARE) of the memory, and a time has an [end](TTL_LIMIT). A node that drains keeps nothing; who clears
//! an owner's blocks clears these too. An object is kept as a whole.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::memory::slot_bytes;
use crate::messages::{GrantMode, LocalEvent, Ticket};
use crate::pool::tier::Whose;
use crate::pool::{Granting, Holder, Wish};
use crate::types::{BlockKey, ClientId, Nanos, Owner, Tag};

use super::fetch::KEEP;
use super::{Engine, Output};

/// Of the memory, so much may be kept: the half. The rest is for those who work, and for what comes and goes.
const KEPT_SHARE: u64 = 2;
/// Longest time for which a block is kept: a day. Who wants it longer asks again.
pub const TTL_LIMIT: Nanos = 86_400 * super::SECOND;
/// Longest name of a keeper, in bytes.
pub const NAME_LIMIT: usize = 64;
/// Most who keep one block.
const KEEPERS: usize = 16;

/// What has become of a wish to keep a block, or to keep it no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Keeping {
    /// It is in memory and stays. Or: it may go from now on, for all that he cares who let go of it.
    Done,
    /// It is being read from SSD, to stay. If that fails it is not kept; see [`Engine::pins`].
    Coming,
    /// It is not here. Or: he did not keep it.
    Missing,
    /// All that may be kept is kept, or all that there is is in use, or it is on its way to the SSD just now: ask again.
    Full,
}

/// What one keeper keeps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pins {
    /// In whose name.
    pub by: String,
    /// How many.
    pub blocks: u64,
    /// Of memory, with all that is kept beside them.
    pub bytes: u64,
    /// Milliseconds until the first of them may go.
    pub first_ms: u64,
    /// And the last.
    pub last_ms: u64,
}

/// What all keep.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Each block once.
    pub blocks: u64,
    /// Likewise.
    pub bytes: u64,
    /// Most bytes that may be kept.
    pub limit_bytes: u64,
    /// By keeper.
    pub pins: Vec<Pins>,
}

/// A block that is kept.
#[derive(Debug)]
struct Block {
    store: usize,
    /// Who has its slot, in the engine's name.
    holder: Holder,
    bytes: u64,
    owner: Owner,
    /// Until when, by name.
    keepers: BTreeMap<String, Nanos>,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Keeps {
    blocks: BTreeMap<BlockKey, Block>,
    bytes: u64,
    /// The soonest first.
    ends: BTreeSet<(Nanos, BlockKey, String)>,
}

impl Keeps {
    /// A keeper of a block has a new end, or none.
    fn set(&mut self, key: BlockKey, by: &str, until: Option<Nanos>) {
        let Some(block) = self.blocks.get_mut(&key) else { return };
        let before = match until {
            Some(until) => block.keepers.insert(by.to_owned(), until),
            None => block.keepers.remove(by),
        };
        if let Some(before) = before {
            self.ends.remove(&(before, key, by.to_owned()));
        }
        self.ends.extend(until.map(|until| (until, key, by.to_owned())));
    }

    /// Blocks and their bytes.
    pub fn size(&self) -> (u64, u64) {
        (self.blocks.len() as u64, self.bytes)
    }
}

impl Engine {
    /// Most bytes that may be kept.
    pub(super) fn keep_limit(&self) -> u64 {
        self.settings.dram_bytes / KEPT_SHARE
    }

    /// Blocks and bytes that are kept.
    pub(super) fn kept(&self) -> (u64, u64) {
        self.keeps.size()
    }

    pub(super) fn keep_for(&mut self, client: ClientId, ticket: Ticket, keys: &[BlockKey], ttl_ms: u64, by: &str) {
        let outcomes = self.keep_all(keys, ttl_ms, by);
        self.tell(client, LocalEvent::Kept { ticket, outcomes });
    }

    pub(super) fn unkeep_for(&mut self, client: ClientId, ticket: Ticket, keys: &[BlockKey], by: &str) {
        let outcomes = self.unkeep_all(keys, Some(by));
        self.tell(client, LocalEvent::Kept { ticket, outcomes });
    }

    /// Keeps these, each as it can be had: see [`Keeping`]. A name that keeps a block already has a new time for it.
    pub fn keep(
        &mut self,
        keys: &[BlockKey],
        ttl_ms: u64,
        by: &str,
        now: Nanos,
        out: &mut Vec<Output>,
    ) -> Vec<Keeping> {
        let mut outcomes = Vec::new();
        self.change(now, out, |engine| outcomes = engine.keep_all(keys, ttl_ms, by));
        outcomes
    }

    /// Keeps these no more in one name, or in any.
    pub fn unkeep(&mut self, keys: &[BlockKey], by: Option<&str>, now: Nanos, out: &mut Vec<Output>) -> Vec<Keeping> {
        let mut outcomes = Vec::new();
        self.change(now, out, |engine| outcomes = engine.unkeep_all(keys, by));
        outcomes
    }

    pub(super) fn keep_all(&mut self, keys: &[BlockKey], ttl_ms: u64, by: &str) -> Vec<Keeping> {
        let ttl = ttl_ms.saturating_mul(1_000_000).min(TTL_LIMIT);
        let until = self.now.saturating_add(ttl);
        keys.iter().map(|key| self.keep_value(*key, until, name(by))).collect()
    }

    pub(super) fn unkeep_all(&mut self, keys: &[BlockKey], by: Option<&str>) -> Vec<Keeping> {
        let let_go = |engine: &mut Self, key: &BlockKey| {
            let parts = engine.parts(*key);
            let known = parts.iter().filter(|key| engine.unkeep_block(**key, by.map(name))).count();
            if known > 0 { Keeping::Done } else { Keeping::Missing }
        };
        keys.iter().map(|key| let_go(self, key)).collect()
    }

    /// The blocks that hang together with this one: those of an object.
    fn parts(&self, key: BlockKey) -> Vec<BlockKey> {
        std::iter::once(key).chain(self.object_chunks(&key).iter().copied()).collect()
    }

    /// All blocks of a value, or none that was not kept before.
    fn keep_value(&mut self, key: BlockKey, until: Nanos, by: &str) -> Keeping {
        if self.is_draining() {
            return Keeping::Full;
        }
        let mut outcome = Keeping::Done;
        let mut new = Vec::new();
        for part in self.parts(key) {
            let keeps_already = self.keeps.blocks.get(&part).is_some_and(|block| block.keepers.contains_key(by));
            match self.keep_block(part, until, by) {
                Keeping::Done => {}
                Keeping::Coming => outcome = Keeping::Coming,
                refusal => {
                    for part in new {
                        self.unkeep_block(part, Some(by));
                    }
                    return refusal;
                }
            }
            if !keeps_already {
                new.push(part);
            }
        }
        outcome
    }

    fn keep_block(&mut self, key: BlockKey, until: Nanos, by: &str) -> Keeping {
        if let Some(block) = self.keeps.blocks.get(&key) {
            if block.keepers.len() >= KEEPERS && !block.keepers.contains_key(by) {
                return Keeping::Full;
            }
            // Somebody else's wish may have it read just now.
            let coming = self.wants.contains_key(&(block.holder, 0));
            self.keeps.set(key, by, Some(until));
            return if coming { Keeping::Coming } else { Keeping::Done };
        }
        let number = self.number();
        let holder =
            Holder { client: None, tag: Tag { request: number, attempt: KEEP, worker: self.node.incarnation } };
        let here = self.stores.iter().position(|store| store.pool.find(&key).is_some());
        let record = self.behind_record(&key);
        let layout = match (here.and_then(|at| self.stores.get(at)), record) {
            (Some(store), _) => store.layout(),
            (None, Some(record)) => record.layout,
            // It can be read in a moment.
            (None, None) if self.is_being_written(&key) => return Keeping::Full,
            (None, None) => return Keeping::Missing,
        };
        let bytes = slot_bytes(layout).unwrap_or(u64::MAX);
        if self.keeps.bytes.saturating_add(bytes) > self.keep_limit() {
            return Keeping::Full;
        }
        let block = |store, owner| Block { store, holder, bytes, owner, keepers: BTreeMap::new() };
        let coming = match (here, record) {
            (Some(at), _) => {
                let owner = self.stores.get(at).and_then(|store| store.pool.owner_at(&key)).unwrap_or_default();
                if self.stores.lookup(at, holder, &[key]).is_empty() {
                    return Keeping::Full;
                }
                self.keeps.blocks.insert(key, block(at, owner));
                false
            }
            (None, Some(record)) => {
                let Ok(at) = self.store_for(layout) else { return Keeping::Full };
                let (place, owner) = (record.place, record.owner);
                let wish =
                    Wish { keys: vec![key], private: false, parent: place.parent, position: place.position, owner };
                if !matches!(self.stores.grant(at, holder, wish, GrantMode::Now), Granting::Held(_)) {
                    return Keeping::Full;
                }
                self.keeps.blocks.insert(key, block(at, owner));
                true
            }
            (None, None) => return Keeping::Missing,
        };
        self.keeps.bytes += bytes;
        self.keeps.set(key, by, Some(until));
        if !coming {
            return Keeping::Done;
        }
        if let Some(at) = self.keeps.blocks.get(&key).map(|block| block.store) {
            self.begin_fetch(at, holder, &[0], &[]);
        }
        // The medium may not answer at all.
        if self.keeps.blocks.contains_key(&key) { Keeping::Coming } else { Keeping::Missing }
    }

    /// False: he did not keep it.
    fn unkeep_block(&mut self, key: BlockKey, by: Option<&str>) -> bool {
        let Some(block) = self.keeps.blocks.get(&key) else { return false };
        let names: Vec<String> = block.keepers.keys().filter(|name| by.is_none_or(|by| by == *name)).cloned().collect();
        names.iter().for_each(|name| self.keeps.set(key, name, None));
        if self.keeps.blocks.get(&key).is_some_and(|block| block.keepers.is_empty()) {
            self.drop_kept(key);
        }
        !names.is_empty()
    }

    /// Nobody keeps the block any more.
    fn drop_kept(&mut self, key: BlockKey) {
        let Some(block) = self.keeps.blocks.remove(&key) else { return };
        self.keeps.bytes -= block.bytes;
        for (name, until) in block.keepers {
            self.keeps.ends.remove(&(until, key, name));
        }
        let led = self.drop_wants(block.holder);
        if let Some(store) = self.stores.get_mut(block.store) {
            store.pool.release(block.holder);
        }
        self.lead_all_on(led);
    }

    /// True if these slots are a kept block's.
    pub(super) fn is_kept(holder: Holder) -> bool {
        holder.client.is_none() && holder.tag.attempt == KEEP
    }

    /// The read of a block that was to be kept has failed.
    pub(super) fn kept_lost(&mut self, holder: Holder) {
        // Not sought among all that are kept: a disk that fails loses thousands at once.
        let lost = self.stores.iter().find_map(|store| store.pool.key_at(holder, 0));
        let its = |key: &BlockKey| self.keeps.blocks.get(key).is_some_and(|block| block.holder == holder);
        lost.filter(its).into_iter().for_each(|key| self.drop_kept(key));
    }

    /// A block is published no more: it was damaged, or removed by name. It is not kept from anybody then.
    pub(super) fn kept_is_gone(&mut self, key: &BlockKey) {
        if self.keeps.blocks.contains_key(key) && self.stores.iter().all(|store| store.pool.find(key).is_none()) {
            self.drop_kept(*key);
        }
    }

    /// Who clears an owner's blocks means all of them. `None`: everybody's.
    pub(super) fn drop_all_kept(&mut self, whose: Option<Whose>) {
        let meant = |block: &Block| whose.is_none_or(|whose| whose.has(block.owner));
        let keys = self.keeps.blocks.iter().filter(|(_, block)| meant(block)).map(|(key, _)| *key);
        keys.collect::<Vec<_>>().into_iter().for_each(|key| self.drop_kept(key));
    }

    /// Lets go of what has been kept as long as was asked for.
    pub(super) fn keeps_end(&mut self) {
        while self.keeps.ends.first().is_some_and(|(until, ..)| *until <= self.now) {
            let Some((_, key, by)) = self.keeps.ends.pop_first() else { return };
            self.unkeep_block(key, Some(&by));
        }
    }

    /// Who keeps what, and for how long yet.
    pub fn pins(&self) -> Kept {
        let mut pins: BTreeMap<&str, Pins> = BTreeMap::new();
        for block in self.keeps.blocks.values() {
            for (by, &until) in &block.keepers {
                let left = until.saturating_sub(self.now) / 1_000_000;
                let none = Pins { by: by.clone(), blocks: 0, bytes: 0, first_ms: left, last_ms: left };
                let pin = pins.entry(by).or_insert(none);
                pin.blocks += 1;
                pin.bytes += block.bytes;
                (pin.first_ms, pin.last_ms) = (pin.first_ms.min(left), pin.last_ms.max(left));
            }
        }
        let (blocks, bytes) = self.keeps.size();
        Kept { blocks, bytes, limit_bytes: self.keep_limit(), pins: pins.into_values().collect() }
    }

    /// Asserts the laws of this file.
    pub(super) fn check_keeps(&self) {
        let Keeps { blocks, bytes, ends } = &self.keeps;
        assert_eq!(*bytes, blocks.values().map(|block| block.bytes).sum::<u64>(), "bytes that are kept");
        assert!(*bytes <= self.keep_limit(), "too much is kept: {bytes}");
        let mut known = BTreeSet::new();
        for (key, block) in blocks {
            assert!((1..=KEEPERS).contains(&block.keepers.len()), "kept by nobody: {block:?}");
            known.extend(block.keepers.iter().map(|(by, until)| (*until, *key, by.clone())));
            let pool = &self.stores.get(block.store).expect("stores never go").pool;
            let granted = pool.granted_at(block.holder, 0);
            let slot = granted.map(|slot| slot.slot).or_else(|| pool.looked_at(block.holder, 0));
            let comes = self.wants.contains_key(&(block.holder, 0));
            assert!(comes || slot.is_some_and(|slot| pool.find(key) == Some(slot)), "kept and not there: {block:?}");
        }
        assert_eq!(*ends, known, "ends of what is kept");
    }
}

/// Milliseconds of a time for which blocks may be kept, in this name.
///
/// # Errors
/// Give up: no such time, or no such name.
pub fn time(ttl: Duration, by: &str) -> Result<u64, Error> {
    let limit = Duration::from_nanos(TTL_LIMIT);
    if ttl.is_zero() || ttl > limit {
        return Err(Error::give_up(format!(
            "blocks cannot be kept for {} s: give more than 0 and at most {} (a day), and ask again before it is over",
            ttl.as_secs_f64(),
            limit.as_secs()
        )));
    }
    if by.is_empty() || by.len() > NAME_LIMIT {
        return Err(Error::give_up(format!(
            "{by:?} is no name to keep blocks in: it has 1 to {NAME_LIMIT} bytes, and says to people who wants them"
        )));
    }
    Ok((ttl.as_millis() as u64).max(1))
}

/// As much of a name as is kept.
fn name(by: &str) -> &str {
    let end = (0..=by.len().min(NAME_LIMIT)).rev().find(|end| by.is_char_boundary(*end));
    &by[..end.unwrap_or(0)]
}

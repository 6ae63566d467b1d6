//! What whoever runs the daemon asks of its engine: how it does, and what it keeps.
//!
//! Walks over all blocks go in stretches of a fixed number of slots, so that serving goes on between them. Reads of blocks
//! are left to the asker, who takes a hold for each: the engine's thread never touches bytes.

use std::sync::Arc;

use crate::admin::{
    AccountStatus, ClientStatus, Cursor, Evicted, Held, LayoutStatus, Listed, PeerStatus, Prefix, Status, TierStatus,
};
use crate::memory::{Arena, slot_bytes};
use crate::pool::account::Standing;
use crate::pool::tier::{Capacity, Health, Whose};
use crate::pool::{Dropped, Place};
use crate::types::{BlockKey, Medium, Nanos, Owner, SlotRef};

use super::objects::is_object;
use super::stores::Store;
use super::{Engine, Output};

/// Slots that one stretch looks at: some 100 us of the engine's thread.
const STRETCH: u32 = 4096;

/// A stretch of published blocks, to be read by others.
pub struct Stretch {
    /// Where they lie.
    pub arena: Arc<Arena>,
    /// With the cursor behind each.
    pub blocks: Vec<(BlockKey, SlotRef, Cursor)>,
}

impl Engine {
    /// True if nothing is held, awaited or under way; see [`Engine::idle`]. Quick while something is.
    pub fn is_quiet(&self) -> bool {
        self.clients.values().all(|known| known.tags.is_empty())
            && self.visits.is_empty()
            && self.opens.is_empty()
            && self.flights.is_empty()
            && self.hints.is_empty()
            && self.fetches.is_empty()
            && self.serving.is_empty()
            && self.copies.is_empty()
            && self.objects.idle()
            && self.cluster.is_quiet()
            && self.links.values().all(|link| link.waiting.is_empty())
            && self.nobody_flushes()
            && self.stores.iter().all(|store| store.pool.idle())
    }

    /// Objects that have gone to other nodes since this one began to drain.
    pub fn moved(&self) -> u64 {
        self.cluster.copying.left
    }

    /// What is held, awaited or under way.
    pub fn held(&self) -> Held {
        let grants = self.stores.iter().map(|store| store.pool.grants());
        let (grants, waiting) = grants.fold((0, 0), |sum, next| (sum.0 + next.0, sum.1 + next.1));
        Held {
            tags: self.clients.values().map(|known| known.tags.len() as u64).sum(),
            grants: grants as u64,
            waiting: waiting as u64,
            opens: self.opens.len() as u64,
            visits: self.visits.len() as u64,
            fetches: (self.flights.len() + self.hints.len() + self.abandoned()) as u64,
            serving: self.serving.len() as u64,
            copies: (self.copies.len() + self.links.values().map(|link| link.waiting.len()).sum::<usize>()) as u64,
            leaving: self.cluster.leaving() as u64,
            quarantine: self.stores.iter().map(|store| u64::from(store.pool.occupancy().quarantine)).sum(),
        }
    }

    /// How it does. What only the shell knows is left for it to fill in.
    pub fn status(&self) -> Status {
        let layouts: Vec<LayoutStatus> = self.stores.iter().map(layout_status).collect();
        let costs = |store: &Store| {
            let occupancy = store.pool.occupancy();
            let used = occupancy.cached + occupancy.pinned + occupancy.reserved + occupancy.quarantine;
            // A layout that has a store is a possible one.
            u64::from(used) * slot_bytes(store.layout()).unwrap_or(0)
        };
        let dram = TierStatus {
            medium: Medium::Dram.name().into(),
            limit_bytes: self.settings.dram_bytes,
            used_bytes: self.stores.iter().map(costs).sum(),
            blocks: self.stores.iter().map(|store| store.pool.digest().0).sum(),
            health: "good".into(),
            io: String::new(),
        };
        let copies = |serial: u64| self.copies.values().filter(|job| job.link == serial).count();
        Status {
            node: self.node.node.clone(),
            address: self.node.address.clone(),
            incarnation: self.node.incarnation,
            version: env!("CARGO_PKG_VERSION").into(),
            uptime_ms: 0,
            draining: self.is_draining(),
            listening: false,
            conductor: None,
            http: None,
            tiers: std::iter::once(dram).chain(self.ssd_status()).collect(),
            layouts,
            clients: self
                .clients
                .iter()
                .map(|(&client, known)| ClientStatus { client, tags: known.tags.len() as u64 })
                .collect(),
            peers: self
                .links
                .values()
                .map(|link| PeerStatus {
                    node: link.peer.node.clone(),
                    address: link.peer.address.clone(),
                    incarnation: link.peer.incarnation,
                    connected: link.up,
                    copies: (copies(link.serial) + link.waiting.len()) as u64,
                })
                .collect(),
            held: self.held(),
        }
    }

    fn ssd_status(&self) -> Option<TierStatus> {
        let Capacity { limit, used, blocks, health, .. } = self.tier_capacity()?;
        let health = match health {
            Health::Good => "good",
            Health::ReadOnly => "read-only",
            Health::Failed => "failed",
        };
        Some(TierStatus {
            medium: Medium::Ssd.name().into(),
            limit_bytes: limit,
            used_bytes: used,
            blocks,
            health: health.into(),
            io: self.tier_io().into(),
        })
    }

    /// What owners have, and may have: those that have something. Nothing, if they are not told apart.
    pub fn accounts(&self) -> Vec<AccountStatus> {
        let accounts = self.stores.accounts();
        if !accounts.apart() {
            return Vec::new();
        }
        let usage = self.tier_usage();
        let status = |standing: Standing| {
            let Standing { quota, used, .. } = standing;
            let theirs = usage.iter().filter(|(whose, ..)| accounts.is_of(&standing, *whose));
            AccountStatus {
                namespace: quota.namespace,
                tenant: quota.tenant,
                share: quota.share,
                dram_bytes: used,
                dram_limit: quota.dram_bytes,
                ssd_bytes: theirs.map(|(_, layout, blocks)| blocks * layout.block_bytes() as u64).sum(),
                ssd_limit: quota.ssd_bytes,
            }
        };
        accounts.standings().into_iter().map(status).collect()
    }

    /// The published blocks of the next stretch whose keys begin so, and where the stretch after it begins.
    pub fn keys(&self, from: Cursor, prefix: &Prefix, medium: Option<Medium>) -> (Vec<Listed>, Option<Cursor>) {
        let Some(store) = self.stores.get(from.store as usize) else { return self.tier_keys(from, prefix, medium) };
        let bytes = store.layout().block_bytes() as u64;
        let meant = medium.is_none_or(|medium| medium == Medium::Dram);
        let blocks = store.pool.published_within(from.slot, STRETCH);
        let listed = blocks.filter(|block| meant && prefix.begins(&block.place.key)).map(|block| {
            let (Place { key, parent, position }, owner, held) = (block.place, block.owner, block.held);
            Listed { key, parent, position, medium: Medium::Dram, bytes, owner, held }
        });
        (listed.collect(), self.next_stretch(from).or_else(|| self.tier_stretch()))
    }

    /// The published blocks of the next stretch, to be read one by one by [`Arena::begin_read`], and where the stretch
    /// after it begins; that on the tier is not this function's, see [`Engine::scrub`].
    pub fn stretch(&self, from: Cursor, medium: Option<Medium>) -> (Option<Stretch>, Option<Cursor>) {
        let Some(store) = self.stores.get(from.store as usize) else { return (None, None) };
        let blocks = store.pool.published_within(from.slot, STRETCH);
        let behind = |slot: SlotRef| Cursor { slot: slot.slot + 1, ..from };
        let blocks = blocks.map(|block| (block.place.key, block.slot, behind(block.slot))).collect();
        let tier = || self.tier_stretch().filter(|_| medium != Some(Medium::Dram));
        (Some(Stretch { arena: store.arena.clone(), blocks }), self.next_stretch(from).or_else(tier))
    }

    /// Blocks on the tier: the place behind all stores.
    fn tier_keys(&self, from: Cursor, prefix: &Prefix, medium: Option<Medium>) -> (Vec<Listed>, Option<Cursor>) {
        let Some(from) = self.on_tier(from).filter(|_| medium != Some(Medium::Dram)) else { return (Vec::new(), None) };
        let (records, next) = self.tier_page(from.slot, STRETCH);
        let listed = records.into_iter().filter(|record| prefix.begins(&record.place.key)).map(|record| {
            let (Place { key, parent, position }, bytes) = (record.place, record.layout.block_bytes() as u64);
            Listed { key, parent, position, medium: Medium::Ssd, bytes, owner: record.owner, held: false }
        });
        (listed.collect(), next.map(|slot| Cursor { slot, ..from }))
    }

    /// The blocks in so many places from this one on of which the conductor is to know, and where to go on.
    pub(super) fn dump_stretch(&self, from: Cursor, count: u32) -> (Vec<(Place, Medium)>, Option<Cursor>) {
        let Some(store) = self.stores.get(from.store as usize) else {
            let Some(from) = self.on_tier(from) else { return (Vec::new(), None) };
            let (records, next) = self.tier_page(from.slot, count);
            let told = records.into_iter().filter(|record| !is_object(record));
            let blocks = told.map(|record| (record.place, Medium::Ssd));
            return (blocks.collect(), next.map(|slot| Cursor { slot, ..from }));
        };
        let next = Cursor { slot: from.slot.saturating_add(count), ..from };
        let next = if next.slot < store.pool.slots() { next } else { Cursor { store: from.store + 1, slot: 0 } };
        if store.objects {
            return (Vec::new(), Some(Cursor { store: from.store + 1, slot: 0 }));
        }
        let blocks = store.pool.published_within(from.slot, count).map(|block| (block.place, Medium::Dram));
        (blocks.collect(), Some(next))
    }

    /// Where the blocks on the tier begin, if there is one: behind all stores, also those that come during a walk.
    pub(super) fn tier_stretch(&self) -> Option<Cursor> {
        self.behind.as_ref().map(|_| Cursor { store: u32::MAX, slot: 0 })
    }

    /// Where on the tier a walk is that is through with the stores.
    pub(super) fn on_tier(&self, from: Cursor) -> Option<Cursor> {
        let tier = self.tier_stretch()?;
        let here = if from.store == tier.store { from } else { tier };
        self.stores.get(from.store as usize).is_none().then_some(here)
    }

    fn next_stretch(&self, from: Cursor) -> Option<Cursor> {
        let next = from.slot.saturating_add(STRETCH);
        let count = self.stores.get(from.store as usize).map_or(0, |store| store.pool.slots());
        let same = (next < count).then_some(Cursor { slot: next, ..from });
        same.or_else(|| {
            let store = from.store.checked_add(1)?;
            self.stores.get(store as usize).map(|_| Cursor { store, slot: 0 })
        })
    }

    /// These bytes were found rotten: nobody finds the blocks any more. Returns how many were still published.
    pub fn found_rotten(&mut self, arena: &Arc<Arena>, slots: &[SlotRef], now: Nanos, out: &mut Vec<Output>) -> u64 {
        let mut unpublished = 0;
        self.change(now, out, |engine| {
            if let Some(store) = engine.stores.iter_mut().find(|store| Arc::ptr_eq(&store.arena, arena)) {
                unpublished = slots.iter().filter(|&&slot| store.pool.unpublish(slot)).count() as u64;
            }
            engine.stats.corrupt_arena += unpublished;
        });
        unpublished
    }

    /// Drops these blocks from every medium, unless somebody holds them.
    pub fn evict(&mut self, keys: &[BlockKey], now: Nanos, out: &mut Vec<Output>) -> Evicted {
        let mut evicted = Evicted::default();
        self.change(now, out, |engine| {
            for key in keys {
                // In whichever pool it is; a key names a whole prefix, so it cannot be in two.
                let outcomes = engine.stores.iter_mut().map(|store| store.pool.drop_block(key));
                let mut outcome = outcomes.max().unwrap_or(Dropped::Missing);
                if outcome != Dropped::Held && engine.remove_from_tier(key) {
                    outcome = Dropped::Now;
                }
                match outcome {
                    Dropped::Now => evicted.dropped += 1,
                    Dropped::Held => evicted.held += 1,
                    Dropped::Missing => evicted.missing += 1,
                }
            }
        });
        evicted
    }

    /// Drops the blocks of the next stretch that nobody holds; of one owner, or of all.
    pub fn evict_stretch(
        &mut self,
        from: Cursor,
        whose: Option<Whose>,
        now: Nanos,
        out: &mut Vec<Output>,
    ) -> (Evicted, Option<Cursor>) {
        if whose.is_some() && from == Cursor::default() {
            self.change(now, out, |engine| engine.drop_all_kept(whose));
        }
        if let Some(from) = self.on_tier(from) {
            return self.evict_tier(from, whose, now, out);
        }
        let keys = self.stores.get(from.store as usize).map(|store| {
            let blocks = store.pool.published_within(from.slot, STRETCH);
            blocks.filter(|block| meant(whose, block.owner)).map(|block| block.place.key).collect::<Vec<_>>()
        });
        let next = self.next_stretch(from).or_else(|| self.tier_stretch());
        (self.evict(&keys.unwrap_or_default(), now, out), next)
    }

    /// Drops the blocks of the next stretch from the tier; of one owner, or of all. What is held is held in the arena, and
    /// stays there. The last stretch leaves the rest of an owner's to the tier: what is still on its way there, and what has
    /// moved meanwhile.
    fn evict_tier(
        &mut self,
        from: Cursor,
        whose: Option<Whose>,
        now: Nanos,
        out: &mut Vec<Output>,
    ) -> (Evicted, Option<Cursor>) {
        let mut evicted = Evicted::default();
        let (records, next) = self.tier_page(from.slot, STRETCH);
        let records = records.iter().filter(|record| meant(whose, record.owner));
        let keys: Vec<BlockKey> = records.map(|record| record.place.key).collect();
        self.change(now, out, |engine| {
            evicted.dropped = engine.remove_all_from_tier(&keys);
            if let (Some(whose), None) = (whose, next) {
                evicted.dropped += engine.clear_tier(whose);
            }
        });
        (evicted, next.map(|slot| Cursor { slot, ..from }))
    }

    /// Makes what was dropped from the tier stay so, whatever happens to this process. `Output::Flushed` with this number
    /// follows; `None`: there is no tier.
    pub fn flush_tier(&mut self, now: Nanos, out: &mut Vec<Output>) -> Option<u64> {
        let mut number = None;
        self.change(now, out, |engine| number = engine.sync_tier());
        number
    }

    /// Something that no input has brought about, followed by what follows every input.
    pub(super) fn change(&mut self, now: Nanos, out: &mut Vec<Output>, work: impl FnOnce(&mut Self)) {
        self.now = now;
        work(self);
        self.settle();
        out.append(&mut self.out);
    }
}

/// True if blocks of this owner are meant: those of one, or all.
fn meant(whose: Option<Whose>, owner: Owner) -> bool {
    whose.is_none_or(|whose| whose.has(owner))
}

fn layout_status(store: &Store) -> LayoutStatus {
    let (layout, occupancy) = (store.layout(), store.pool.occupancy());
    LayoutStatus {
        strips: layout.strips,
        strip_bytes: layout.strip_bytes,
        slots: store.pool.size(),
        free: occupancy.free,
        cached: occupancy.cached,
        pinned: occupancy.pinned,
        reserved: occupancy.reserved,
        quarantine: occupancy.quarantine,
    }
}

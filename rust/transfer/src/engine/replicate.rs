//! Blocks that are brought here for nobody: because the conductor orders it, or a client says that they will be wanted.

use std::ops::Range;

use crate::messages::{DaemonReport, GrantMode};
use crate::pool::{Holder, Place, Wish};
use crate::types::{BlockKey, ClientId, NodeAddress, Owner, Tag};

use super::fetch::{Want, Who};
use super::stores::Store;
use super::{Engine, Output};

/// Blocks that are prefetched at once; the others wait. Enough to keep a disk or a peer busy, and each holds a slot.
const PREFETCHES: usize = 32;
/// Blocks that wait to be prefetched; beyond, a hint is not taken.
const PREFETCHES_WAITING: usize = 4096;

/// An order of the conductor under way.
#[derive(Clone, Debug)]
pub(super) struct Replication {
    keys: Vec<BlockKey>,
    parent: BlockKey,
    position: u32,
    from: NodeAddress,
    /// Number of the store that is tried.
    at: usize,
    /// Those that are still to be tried.
    stores: Range<usize>,
    /// Blocks that are under way.
    left: usize,
}

/// A block that is to be prefetched.
#[derive(Clone, Debug)]
pub(super) struct Hint {
    at: usize,
    place: Place,
    from: Vec<NodeAddress>,
}

impl Engine {
    /// The conductor wants these blocks here too: fetched for nobody, then cached. Their layout is that of the store that
    /// has some of their prefix; where none has, that of the peer's blocks is found by asking for each.
    pub(super) fn replicate(
        &mut self,
        order: u64,
        keys: Vec<BlockKey>,
        parent: BlockKey,
        position: u32,
        from: NodeAddress,
    ) {
        let prefix = || keys.iter().chain([&parent]);
        let knows = |store: &&Store| prefix().any(|key| store.pool.find(key).is_some());
        let known = self.stores.iter().find(knows).map(|store| store.layout());
        let known = known.or_else(|| prefix().find_map(|key| self.tier_layout(key)));
        let stores = match known.and_then(|layout| self.store_for(layout).ok()) {
            Some(at) => at..at + 1,
            None => 0..self.stores.iter().count(),
        };
        if self.is_draining() || self.replications.contains_key(&order) {
            let missing = keys.len() as u32;
            return self.out.push(Output::Report(DaemonReport::Replicated { order, stored: 0, missing }));
        }
        self.replicate_next(order, Replication { keys, parent, position, from, at: 0, stores, left: 0 });
    }

    /// Tries the next store.
    fn replicate_next(&mut self, order: u64, mut replication: Replication) {
        let holder = Holder { client: None, tag: Tag { request: order, attempt: 0, worker: self.node.incarnation } };
        let Replication { keys, parent, position, from, .. } = replication.clone();
        let missing = keys.len() as u32;
        let Some(at) = replication.stores.next() else {
            return self.out.push(Output::Report(DaemonReport::Replicated { order, stored: 0, missing }));
        };
        // Whose the blocks are, the peer says with each.
        let wish = Wish { keys, private: false, parent, position, owner: Owner::default() };
        if !self.grant(at, holder, wish, GrantMode::Now) {
            return self.replicate_next(order, replication);
        }
        let indices: Vec<u32> = (0..missing).filter(|&index| !self.is_committed(at, holder, index)).collect();
        // One more than there are: it does not end while it begins.
        (replication.at, replication.left) = (at, indices.len() + 1);
        self.replications.insert(order, replication);
        self.begin_fetch(at, holder, &indices, &[from]);
        self.replication_went_on(holder);
    }

    fn is_committed(&self, at: usize, holder: Holder, index: u32) -> bool {
        let slot = self.stores.get(at).and_then(|store| store.pool.granted_at(holder, index));
        slot.is_some_and(|slot| slot.committed)
    }

    /// One block of a replication has come, or will not. After the last one, what has come stays cached.
    pub(super) fn replication_went_on(&mut self, holder: Holder) {
        let order = holder.tag.request;
        let Some(replication) = self.replications.get_mut(&order) else { return };
        replication.left -= 1;
        if replication.left > 0 {
            return;
        }
        let Some(replication) = self.replications.remove(&order) else { return };
        let Some(store) = self.stores.get_mut(replication.at) else { return };
        let slots = store.pool.granted(holder).unwrap_or_default();
        let stored = slots.iter().filter(|slot| slot.committed).count() as u32;
        let missing = slots.len() as u32 - stored;
        store.pool.release(holder);
        if stored == 0 && missing > 0 {
            return self.replicate_next(order, replication);
        }
        self.out.push(Output::Report(DaemonReport::Replicated { order, stored, missing }));
    }

    /// A client will want these blocks of one prefix soon.
    pub(super) fn prefetch(
        &mut self,
        client: ClientId,
        keys: &[BlockKey],
        parent: BlockKey,
        position: u32,
        from: &[NodeAddress],
    ) {
        let Some(known) = self.clients.get(&client).filter(|_| !self.is_draining()) else { return };
        let at = known.store;
        let parents = std::iter::once(&parent).chain(keys);
        for ((key, parent), offset) in keys.iter().zip(parents).zip(0u32..) {
            let here = self.stores.get(at).is_some_and(|store| store.pool.find(key).is_some());
            let Some(position) = position.checked_add(offset) else { return };
            if here || self.flights.contains_key(&(at, *key)) {
                continue;
            }
            if self.hints.len() >= PREFETCHES_WAITING {
                return;
            }
            let place = Place { key: *key, parent: *parent, position };
            self.hints.push_back(Hint { at, place, from: from.to_vec() });
        }
    }

    /// Called after every input: begins to fetch what was hinted at, as far as others have ended.
    pub(super) fn prefetch_on(&mut self) {
        while !self.hints.is_empty() {
            let under_way = self.flights.values().flat_map(|flight| flight.wants());
            if under_way.filter(|want| want.who == Who::Cache).count() >= PREFETCHES {
                break;
            }
            let Some(Hint { at, place, from }) = self.hints.pop_front() else { break };
            let here = self.stores.get(at).is_some_and(|store| store.pool.find(&place.key).is_some());
            if !here && !self.flights.contains_key(&(at, place.key)) {
                self.want(at, place, Want::new(Who::Cache, &from));
            }
        }
    }
}

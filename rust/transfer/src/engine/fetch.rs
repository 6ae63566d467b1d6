//! Fetches: the holder of a block pushes it into slots that the asker has reserved.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::messages::{DaemonReport, Found, GrantMode, GrantedSlot, LocalEvent, PeerMessage, Refusal, Ticket};
use crate::pool::{Holder, Wish};
use crate::types::{BlockKey, ClientId, Kind, Layout, Medium, NodeAddress, NodeId, Owner, RegionId, SlotRef, Tag};

use super::copies::{Job, Why};
use super::stores::Store;
use super::{Engine, Output};

/// A fetch that this node has asked for.
#[derive(Debug)]
pub(super) struct Fetch {
    pub from: NodeAddress,
    /// Number of the store that the holder's slots are in.
    store: usize,
    holder: Holder,
    /// By place: the index in the holder's grant; `None` once answered.
    places: Vec<Option<u32>>,
    /// Nobody waits for it; it is kept until the peer says that nothing more is written.
    pub cancelled: bool,
}

impl Fetch {
    pub fn check(&self) {
        let open = self.places.iter().flatten().count();
        assert!(open > 0, "a fetch of {:?} that is answered was not forgotten", self.holder);
    }
}

/// An order of the conductor under way.
#[derive(Clone, Debug)]
pub(super) struct Replication {
    keys: Vec<BlockKey>,
    parent: BlockKey,
    position: u32,
    from: NodeAddress,
    /// Stores that are still to be tried.
    stores: Range<usize>,
}

/// A fetch that a peer has asked for.
#[derive(Debug)]
pub(super) struct Serving {
    /// Copies not completed.
    pub left: usize,
    pub cancelled: bool,
    /// Serial of the link it came on: an earlier life of the peer may have used the same ticket.
    pub link: u64,
}

impl Engine {
    pub(super) fn fetch(&mut self, client: ClientId, tag: Tag, indices: &[u32], from: Option<NodeAddress>) {
        let from = from.unwrap_or_else(|| self.node.clone());
        let Some(at) = self.home(client) else { return };
        self.begin_fetch(at, Holder { client: Some(client), tag }, indices, from);
    }

    fn begin_fetch(&mut self, at: usize, holder: Holder, indices: &[u32], from: NodeAddress) {
        let Some(store) = self.stores.get(at) else { return };
        let (pool, region, layout) = (&store.pool, store.region, store.layout());
        let mine = self.fetches.values().filter(|fetch| fetch.holder == holder && !fetch.cancelled);
        let mut under_way: BTreeSet<u32> = mine.flat_map(|fetch| fetch.places.iter().flatten().copied()).collect();
        let mut answers = Vec::new();
        let mut places = Vec::new();
        let mut blocks = Vec::new();
        for &index in indices {
            match (pool.granted_at(holder, index), pool.key_at(holder, index)) {
                (Some(slot), _) if slot.committed => answers.push((index, None)),
                (Some(slot), Some(key)) if under_way.insert(index) => {
                    places.push(Some(index));
                    blocks.push((key, slot.slot));
                }
                _ => answers.push((index, Some(Refusal::Protocol))),
            }
        }
        if !blocks.is_empty() {
            let asked: Vec<u32> = places.iter().flatten().copied().collect();
            let ticket = self.number();
            let refusal = if from.node == self.node.node {
                // What is published here was pinned when it was granted.
                Some(Refusal::Missing)
            } else if self.fetches.len() >= self.settings.fetches {
                Some(Refusal::Full)
            } else if !self.reach(&from, PeerMessage::Fetch { ticket, region, layout, blocks }) {
                Some(Refusal::Unreachable)
            } else {
                self.fetches.insert(ticket, Fetch { from, store: at, holder, places, cancelled: false });
                None
            };
            if refusal.is_some() {
                answers.extend(asked.into_iter().map(|index| (index, refusal)));
            }
        }
        for (index, refusal) in answers {
            self.tell_fetched(at, holder, index, refusal);
        }
        self.check_complete(holder.tag);
    }

    fn tell_fetched(&mut self, at: usize, holder: Holder, index: u32, refusal: Option<Refusal>) {
        if let Some(client) = holder.client {
            let slot = self.stores.get(at).and_then(|store| store.pool.granted_at(holder, index));
            let found = match (refusal, slot) {
                (None, Some(GrantedSlot { slot, .. })) => Ok(Found { slot, peer: true, medium: Medium::Dram }),
                (refusal, _) => Err(refusal.unwrap_or(Refusal::Ended)),
            };
            self.tell(client, LocalEvent::Fetched { tag: holder.tag, index, found });
        }
    }

    /// The holder says that one block is written, or why not.
    pub(super) fn peer_fetched(
        &mut self,
        peer: &NodeId,
        ticket: Ticket,
        place: u32,
        copied: Result<(Kind, Medium), Refusal>,
    ) {
        let copied = copied.map(|(via, _)| via);
        let Some(fetch) = self.fetches.get_mut(&ticket).filter(|fetch| fetch.from.node == *peer) else { return };
        let Some(index) = fetch.places.get_mut(place as usize).and_then(Option::take) else { return };
        let (at, holder, cancelled) = (fetch.store, fetch.holder, fetch.cancelled);
        if !cancelled {
            let refusal = self.settle_fetched(at, holder, index, copied);
            self.tell_fetched(at, holder, index, refusal);
            self.check_complete(holder.tag);
        }
        self.forget_answered(ticket);
    }

    fn forget_answered(&mut self, ticket: Ticket) {
        if self.fetches.get(&ticket).is_some_and(|fetch| fetch.places.iter().all(Option::is_none))
            && let Some(fetch) = self.fetches.remove(&ticket)
            && !fetch.cancelled
            && fetch.holder.client.is_none()
        {
            self.replicated(fetch.store, fetch.holder);
        }
    }

    /// Makes a fetched block readable if all its strips are here.
    fn settle_fetched(
        &mut self,
        at: usize,
        holder: Holder,
        index: u32,
        copied: Result<Kind, Refusal>,
    ) -> Option<Refusal> {
        let Some(store) = self.stores.get(at) else { return copied.err() };
        let block_bytes = store.layout().block_bytes() as u64;
        match store.pool.granted_at(holder, index) {
            None => return Some(Refusal::Ended),
            Some(slot) if slot.committed => return None,
            Some(_) if copied.is_err() => return copied.err(),
            Some(slot) if !store.arena.arrived_all(slot.slot) => {
                self.stats.corrupt_wire += 1;
                return Some(Refusal::Corrupt);
            }
            Some(_) => {}
        }
        let outcome = self.stores.commit(at, holder, index, None);
        if let (Ok(()), Ok(via)) = (outcome, copied) {
            self.stats.received[via as usize].add(1, block_bytes);
        }
        outcome.err()
    }

    /// The holder of the slots has ended: what is under way for it is called back.
    pub(super) fn cancel_fetches(&mut self, holder: Holder) {
        let mine = self.fetches.iter().filter(|(_, fetch)| fetch.holder == holder && !fetch.cancelled);
        for ticket in mine.map(|(ticket, _)| *ticket).collect::<Vec<_>>() {
            let Some(fetch) = self.fetches.get_mut(&ticket) else { continue };
            let Some(link) = self.links.get_mut(&fetch.from.node) else { continue };
            if link.up {
                fetch.cancelled = true;
                let peer = fetch.from.node.clone();
                self.say(&peer, PeerMessage::FetchCancel { ticket });
            } else {
                link.outbox
                    .retain(|said| !matches!(said, PeerMessage::Fetch { ticket: asked, .. } if *asked == ticket));
                self.fetches.remove(&ticket);
            }
        }
    }

    /// The session with a peer is over: nothing comes from it, and nothing needs to go to it.
    pub(super) fn fetches_lost(&mut self, peer: &NodeId) {
        self.serving.retain(|(asker, _), _| asker != peer);
        let lost = self.fetches.iter().filter(|(_, fetch)| fetch.from.node == *peer);
        for ticket in lost.map(|(ticket, _)| *ticket).collect::<Vec<_>>() {
            let Some(fetch) = self.fetches.remove(&ticket) else { continue };
            if fetch.cancelled {
                continue;
            }
            for index in fetch.places.into_iter().flatten() {
                let refusal = self.settle_fetched(fetch.store, fetch.holder, index, Err(Refusal::Unreachable));
                self.tell_fetched(fetch.store, fetch.holder, index, refusal);
            }
            if fetch.holder.client.is_none() {
                self.replicated(fetch.store, fetch.holder);
            }
        }
    }

    // -- the holder's side -------------------------------------------------------------------------------------------

    /// A peer wants blocks written into its slots.
    pub(super) fn serve(
        &mut self,
        peer: &NodeId,
        ticket: Ticket,
        region: RegionId,
        layout: Layout,
        blocks: Vec<(BlockKey, SlotRef)>,
    ) {
        let key = (peer.clone(), ticket);
        let busy = self.serving.len() >= self.settings.fetches || self.serving.contains_key(&key);
        let Some(link) = self.links.get_mut(peer) else { return };
        let at = self.stores.of(layout);
        let mut left = 0;
        let mut refused = Vec::new();
        for (place, (block, destination)) in (0..).zip(blocks) {
            if busy || link.waiting.len() >= self.settings.copies_waiting {
                refused.push((place, Refusal::Full));
                continue;
            }
            let found = at.and_then(|at| Some((at, self.stores.get_mut(at)?)));
            let source = found.and_then(|(at, store)| Some((at, store.pool.find(&block)?, &mut store.pool)));
            match source.and_then(|(at, source, pool)| pool.begin_copy(source).then_some((at, source))) {
                Some((store, source)) => {
                    left += 1;
                    let why = Why::Serve { peer: peer.clone(), ticket, place };
                    let destination = (region, destination);
                    link.waiting.push_back(Job { store, source, destination, why, attempt: 0, link: link.serial });
                }
                None => refused.push((place, Refusal::Missing)),
            }
        }
        if left > 0 {
            self.serving.insert(key, Serving { left, cancelled: false, link: link.serial });
        }
        for (place, refusal) in refused {
            self.say(peer, PeerMessage::Fetched { ticket, place, copied: Err(refusal) });
        }
    }

    /// A copy of a served fetch has ended for good.
    pub(super) fn served(
        &mut self,
        peer: &NodeId,
        ticket: Ticket,
        place: u32,
        link: u64,
        copied: Result<Kind, Refusal>,
    ) {
        let key = (peer.clone(), ticket);
        let Some(serving) = self.serving.get_mut(&key).filter(|serving| serving.link == link) else { return };
        serving.left -= 1;
        let (over, cancelled) = (serving.left == 0, serving.cancelled);
        if over {
            self.serving.remove(&key);
        }
        if !cancelled {
            let copied = copied.map(|via| (via, Medium::Dram));
            self.say(peer, PeerMessage::Fetched { ticket, place, copied });
        } else if over {
            self.say(peer, PeerMessage::FetchEnded { ticket });
        }
    }

    /// The asker has lost interest: what has not begun never will; the rest is waited for.
    pub(super) fn peer_cancel(&mut self, peer: &NodeId, ticket: Ticket) {
        let key = (peer.clone(), ticket);
        let dropped = self.drop_waiting(peer, |job| job.serves(&key));
        let over = match self.serving.get_mut(&key) {
            Some(serving) => {
                serving.left -= dropped;
                serving.cancelled = true;
                serving.left == 0
            }
            None => true,
        };
        if over {
            self.serving.remove(&key);
            self.say(peer, PeerMessage::FetchEnded { ticket });
        }
    }

    // -- replication -------------------------------------------------------------------------------------------------

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
        let stores = match known.and_then(|layout| self.stores.of(layout)) {
            Some(at) => at..at + 1,
            None => 0..self.stores.iter().count(),
        };
        let missing = keys.len() as u32;
        let replication = Replication { keys, parent, position, from, stores };
        if self.draining || self.replications.contains_key(&order) {
            return self.out.push(Output::Report(DaemonReport::Replicated { order, stored: 0, missing }));
        }
        self.replicate_next(order, replication);
    }

    /// Tries the next store.
    fn replicate_next(&mut self, order: u64, mut replication: Replication) {
        let holder = Holder { client: None, tag: Tag { request: order, attempt: 0, worker: self.node.incarnation } };
        let Replication { keys, parent, position, from, .. } = replication.clone();
        let missing = keys.len() as u32;
        let Some(at) = replication.stores.next() else {
            return self.out.push(Output::Report(DaemonReport::Replicated { order, stored: 0, missing }));
        };
        let wish = Wish { keys, private: false, parent, position, owner: Owner::default() };
        if !self.grant(at, holder, wish, GrantMode::Now) {
            return self.replicate_next(order, replication);
        }
        self.replications.insert(order, replication);
        let indices: Vec<u32> = (0..missing).filter(|&index| !self.is_committed(at, holder, index)).collect();
        self.begin_fetch(at, holder, &indices, from);
        if !self.fetches.values().any(|fetch| fetch.holder == holder) {
            self.replicated(at, holder);
        }
    }

    fn is_committed(&self, at: usize, holder: Holder, index: u32) -> bool {
        let slot = self.stores.get(at).and_then(|store| store.pool.granted_at(holder, index));
        slot.is_some_and(|slot| slot.committed)
    }

    /// A replication has ended: what has come stays cached.
    fn replicated(&mut self, at: usize, holder: Holder) {
        let Some(store) = self.stores.get_mut(at) else { return };
        let slots = store.pool.granted(holder).unwrap_or_default();
        let stored = slots.iter().filter(|slot| slot.committed).count() as u32;
        let missing = slots.len() as u32 - stored;
        store.pool.release(holder);
        let order = holder.tag.request;
        match self.replications.remove(&order) {
            Some(replication) if stored == 0 => self.replicate_next(order, replication),
            _ => self.out.push(Output::Report(DaemonReport::Replicated { order, stored, missing })),
        }
    }
}

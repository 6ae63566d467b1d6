//! Fetches: blocks are brought into slots that wait for them, from the medium behind the arena or from a peer's pool.
//!
//! ```text
//! wanted ---> in the arena by now? ---> found
//!        ---> on its way here?     ---> waits for that one: what has come is given to all (single flight)
//!        ---> flight: this node's SSD, then the peers that were named, in this order, each tried once
//!                 committed ---> found, for it and for all who wait
//!                 no answer in time (`pace.rs`) ---> the next source, into another slot
//!                 no source left ---> the last refusal; one of those who wait goes on, with its own sources
//! ```
//!
//! A peer pushes the block into the slot, as it does for a hand-off (`serve.rs` is its side).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::messages::{Found, GrantedSlot, LocalEvent, PeerMessage, Refusal, Ticket};
use crate::pool::tier::OpId;
use crate::pool::{Granting, Holder, Place, Wish};
use crate::types::{BlockKey, ClientId, Kind, Medium, Nanos, NodeAddress, NodeId, Owner, RegionId, SlotRef, Tag};

use super::copying::ENGINE;
use super::stores::Store;
use super::{Engine, Link, SECOND};

/// A block in a store: what a flight brings. One flight has it at a time.
pub(super) type Aim = (usize, BlockKey);

/// Tags of slots that the engine holds itself have these attempts, each its own: for what peers and hints want, for
/// objects that are brought to be pinned, for what is kept. Orders of the conductor have 0.
pub(super) const OWN: u32 = u32::MAX;
pub(super) const BRING: u32 = OWN - 1;
pub(super) const KEEP: u32 = OWN - 2;

/// Part of all fetches that one peer may leave open without end, once the half is taken.
const ABANDONED_SHARE: usize = 16;

/// For whom a block is brought here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Who {
    /// Into a slot of a grant: of a client, or of a replication.
    Holder { holder: Holder, index: u32 },
    /// For a fetch of a peer that came on this link: to be copied into a slot of an arena there.
    Peer { peer: NodeId, ticket: Ticket, place: u32, link: u64, destination: (RegionId, SlotRef) },
    /// To have it here.
    Cache,
}

/// Somebody who wants a block, and where it may be.
#[derive(Clone, Debug)]
pub(super) struct Want {
    pub who: Who,
    /// Whether the medium behind the arena is to be asked, first.
    pub tier: bool,
    pub sources: VecDeque<NodeAddress>,
    /// Why the source before has not brought it.
    pub refusal: Refusal,
}

impl Want {
    pub fn new(who: Who, sources: &[NodeAddress]) -> Self {
        Self { who, tier: true, sources: sources.iter().cloned().collect(), refusal: Refusal::Missing }
    }
}

/// Where a flight's block comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Via {
    /// To be decided.
    Nothing,
    /// A read of the medium behind the arena.
    Tier(u64),
    /// A fetch from a peer, in the next message to it.
    Asked,
    /// A fetch from a peer.
    Peer(Ticket),
}

impl Via {
    pub fn is_peer(self) -> bool {
        matches!(self, Self::Asked | Self::Peer(_))
    }
}

/// A block on its way here.
#[derive(Debug)]
pub(super) struct Flight {
    place: Place,
    want: Want,
    /// Where it goes.
    slot: Option<(Holder, u32)>,
    pub via: Via,
    /// What is under way was removed meanwhile: it is not to come back.
    stale: bool,
    waiting: VecDeque<Want>,
}

impl Flight {
    /// All for whom it is.
    pub fn wants(&self) -> impl Iterator<Item = &Want> {
        std::iter::once(&self.want).chain(&self.waiting)
    }

    /// Takes its slot, if that is the engine's own and not one that whoever leads it has brought along.
    fn take_own(&mut self) -> Option<(Holder, u32)> {
        let brought = slot_of(&self.want);
        self.slot.take_if(|slot| brought != Some(*slot))
    }
}

/// A message to a peer that was not answered in full.
#[derive(Debug)]
pub(super) struct Fetch {
    pub from: NodeAddress,
    store: usize,
    /// By place; `None` once answered.
    places: Vec<Option<BlockKey>>,
    /// Into which slots, by place.
    slots: Vec<SlotRef>,
    /// Bytes of each.
    block_bytes: u64,
    /// When it was asked, and when it is late; see `pace.rs`.
    asked: Nanos,
    until: Nanos,
    /// Nobody waits for it; it is kept until the peer says that nothing more is written.
    pub cancelled: bool,
    /// Cancelled because the peer did not answer. Those who wanted the blocks may have their slots still.
    late: bool,
}

impl Fetch {
    /// Bytes that are to come of it.
    fn owed(&self) -> u64 {
        if self.cancelled { 0 } else { self.places.iter().flatten().count() as u64 * self.block_bytes }
    }

    pub fn check(&self) {
        assert!(self.places.iter().any(Option::is_some), "{self:?} is answered and was not forgotten");
    }
}

impl Engine {
    pub(super) fn fetch(&mut self, client: ClientId, tag: Tag, indices: &[u32], from: &[NodeAddress]) {
        let Some(at) = self.home(client) else { return };
        self.begin_fetch(at, Holder { client: Some(client), tag }, indices, from);
        self.check_complete(tag);
    }

    /// Brings blocks into reserved slots of a grant; each index ends in `found` or `lost`.
    pub(super) fn begin_fetch(&mut self, at: usize, holder: Holder, indices: &[u32], from: &[NodeAddress]) {
        for &index in indices {
            let Some(pool) = self.stores.get(at).map(|store| &store.pool) else { return };
            let who = Who::Holder { holder, index };
            match (pool.granted_at(holder, index), pool.place_at(holder, index)) {
                (Some(slot), _) if slot.committed => self.tell_found(holder, index, slot.slot, false, Medium::Dram),
                (Some(_), Some(place)) if !self.wants.contains_key(&(holder, index)) => {
                    self.wants.insert((holder, index), (at, place.key));
                    self.want(at, place, Want::new(who, from));
                }
                _ => self.tell_lost(holder, index, Refusal::Protocol),
            }
        }
    }

    /// Somebody wants a block.
    pub(super) fn want(&mut self, at: usize, place: Place, want: Want) {
        let aim = (at, place.key);
        if self.stores.get(at).is_some_and(|store| store.pool.find(&place.key).is_some()) {
            self.found(aim, want, None, false, Medium::Dram);
        } else if let Some(flight) = self.flights.get_mut(&aim) {
            if flight.via.is_peer() && matches!(want.who, Who::Peer { .. }) {
                // That peer may wait for this very answer.
                return self.lost(want);
            }
            self.stats.single_flights += 1;
            flight.waiting.push_back(want);
        } else {
            let slot = slot_of(&want);
            let (via, waiting) = (Via::Nothing, VecDeque::new());
            let flight = Flight { place, want, slot, via, stale: false, waiting };
            self.flights.insert(aim, flight);
            self.go_on(aim);
        }
    }

    /// A flight goes on: with the next source of whoever leads it, or without one with those of the next who waits. A loop,
    /// as tens of thousands may wait for one block.
    fn go_on(&mut self, aim: Aim) {
        let mut lost = Vec::new();
        while !self.next_source(aim) {
            let Some(flight) = self.flights.get_mut(&aim) else { break };
            let own = flight.take_own();
            match flight.waiting.pop_front() {
                Some(next) => {
                    flight.slot = slot_of(&next);
                    lost.push(std::mem::replace(&mut flight.want, next));
                }
                None => lost.extend(self.flights.remove(&aim).map(|flight| flight.want)),
            }
            self.let_go(aim, own);
        }
        lost.into_iter().for_each(|want| self.lost(want));
    }

    /// A flight tries the next source of whoever leads it. False: he has none left.
    fn next_source(&mut self, aim: Aim) -> bool {
        loop {
            let Some(flight) = self.flights.get_mut(&aim) else { return true };
            (flight.via, flight.stale) = (Via::Nothing, false);
            let place = flight.place;
            let Some((holder, index)) = flight.slot else {
                if !flight.want.tier && flight.want.sources.is_empty() {
                    return false;
                }
                // It needs a slot of the engine's own. Whose block it is, its source says.
                let number = self.number();
                let holder = self.own(number);
                let Place { key, parent, position } = place;
                let wish = Wish { keys: vec![key], private: false, parent, position, owner: Owner::default() };
                let granting = self.stores.grant_own(aim.0, holder, wish);
                let Some(flight) = self.flights.get_mut(&aim) else { return true };
                if !matches!(granting, Granting::Held(_)) {
                    flight.want.refusal = Refusal::Full;
                    return false;
                }
                flight.slot = Some((holder, 0));
                continue;
            };
            let Some(store) = self.stores.get(aim.0) else { return false };
            let slot = match store.pool.granted_at(holder, index) {
                Some(slot) if slot.committed => {
                    self.flight_done(aim, false, Medium::Dram);
                    return true;
                }
                Some(slot) => slot.slot,
                None => {
                    flight.want.refusal = Refusal::Ended;
                    return false;
                }
            };
            if std::mem::take(&mut flight.want.tier)
                && let Some(op) = self.read_tier(aim, slot)
            {
                self.set_via(aim, Via::Tier(op));
                return true;
            }
            let Some(flight) = self.flights.get_mut(&aim) else { return true };
            let Some(from) = flight.want.sources.pop_front() else { return false };
            if self.links.get(&from.node).is_some_and(|link| !link.pace.permits(self.now)) {
                flight.want.refusal = Refusal::Unreachable;
                continue;
            }
            if from.node == self.node.node {
                // What this node has was looked for.
                flight.want.refusal = Refusal::Missing;
                continue;
            }
            self.asks.push((from, aim));
            self.set_via(aim, Via::Asked);
            self.turn_peers_away(aim);
            return true;
        }
    }

    fn set_via(&mut self, aim: Aim, via: Via) {
        if let Some(flight) = self.flights.get_mut(&aim) {
            flight.via = via;
        }
    }

    /// A holder of slots that the engine reserves for itself.
    fn own(&self, number: u64) -> Holder {
        Holder { client: None, tag: Tag { request: number, attempt: OWN, worker: self.node.incarnation } }
    }

    /// Peers do not wait for what comes from a peer: that one may be waiting for us.
    fn turn_peers_away(&mut self, aim: Aim) {
        let Some(flight) = self.flights.get_mut(&aim) else { return };
        let (peers, others) = flight.waiting.drain(..).partition(|want| matches!(want.who, Who::Peer { .. }));
        flight.waiting = others;
        let peers: VecDeque<Want> = peers;
        peers.into_iter().for_each(|want| self.lost(want));
    }

    /// Asks peers for all that was decided since the last call: in one message what one holder wants of one peer.
    pub(super) fn send_asks(&mut self) {
        while !self.asks.is_empty() {
            // By peer and its life, store and holder.
            let mut groups = BTreeMap::<_, (NodeAddress, Vec<BlockKey>)>::new();
            for (from, aim) in std::mem::take(&mut self.asks) {
                let Some(flight) = self.flights.get(&aim).filter(|flight| flight.via == Via::Asked) else { continue };
                let holder = match flight.want.who {
                    // Copies of objects end together, or by themselves.
                    Who::Holder { holder, .. } if holder.client == Some(ENGINE) => None,
                    Who::Holder { holder, .. } => Some(holder),
                    Who::Peer { .. } | Who::Cache => None,
                };
                let group = (from.node.clone(), from.incarnation, aim.0, holder);
                let (_, keys) = groups.entry(group).or_insert_with(|| (from, Vec::new()));
                if !keys.contains(&aim.1) {
                    keys.push(aim.1);
                }
            }
            for ((_, _, at, _), (from, keys)) in groups {
                self.send_ask(from, at, keys);
            }
        }
    }

    fn send_ask(&mut self, from: NodeAddress, store: usize, keys: Vec<BlockKey>) {
        let Some(Store { region, pool, arena, .. }) = self.stores.get(store) else { return };
        let (region, layout) = (*region, arena.layout());
        let slot = |key: &BlockKey| {
            let (holder, index) = self.flights.get(&(store, *key))?.slot?;
            Some((*key, pool.granted_at(holder, index)?.slot))
        };
        let blocks: Vec<(BlockKey, SlotRef)> = keys.iter().filter_map(slot).collect();
        let (keys, slots): (Vec<BlockKey>, Vec<SlotRef>) = blocks.iter().copied().unzip();
        if keys.is_empty() {
            return;
        }
        let ticket = self.number();
        let refusal = if self.fetches.len() >= self.settings.fetches || self.crowds(&from.node) {
            Refusal::Full
        } else if !self.reach(&from, PeerMessage::Fetch { ticket, region, layout, blocks }) {
            Refusal::Unreachable
        } else {
            keys.iter().for_each(|key| self.set_via((store, *key), Via::Peer(ticket)));
            let places: Vec<_> = keys.into_iter().map(Some).collect();
            let (asked, block_bytes) = (self.now, layout.block_bytes() as u64);
            let Some(Link { pace, .. }) = self.links.get_mut(&from.node) else { return };
            pace.asked(places.len() as u64 * block_bytes, asked);
            let until = asked + pace.patience();
            let (cancelled, late) = (false, false);
            let fetch = Fetch { from, store, places, slots, block_bytes, asked, until, cancelled, late };
            self.fetches.insert(ticket, fetch);
            return;
        };
        keys.into_iter().for_each(|key| self.source_failed((store, key), refusal));
    }

    pub(super) fn source_failed(&mut self, aim: Aim, refusal: Refusal) {
        if let Some(flight) = self.flights.get_mut(&aim) {
            flight.want.refusal = refusal;
            self.go_on(aim);
        }
    }

    /// The medium does not answer: who waits for this read goes on without it, and in another slot, as it may still write
    /// to this one.
    pub(super) fn leave_read(&mut self, aim: Aim, op: OpId) {
        let Some(flight) = self.flights.get_mut(&aim).filter(|flight| flight.via == Via::Tier(op)) else { return };
        let own = flight.take_own();
        flight.slot = None;
        self.let_go(aim, own);
        self.source_failed(aim, Refusal::Missing);
    }

    /// The holder says that one block is written, or why not.
    pub(super) fn peer_fetched(
        &mut self,
        peer: &NodeId,
        ticket: Ticket,
        place: u32,
        copied: Result<(Kind, Medium, Owner), Refusal>,
    ) {
        let Some(fetch) = self.fetches.get_mut(&ticket).filter(|fetch| fetch.from.node == *peer) else { return };
        let Some(key) = fetch.places.get_mut(place as usize).and_then(Option::take) else { return };
        let (aim, cancelled) = ((fetch.store, key), fetch.cancelled);
        if let Some(Link { pace, .. }) = self.links.get_mut(peer) {
            let owed = if cancelled { 0 } else { fetch.block_bytes };
            pace.answered(owed, if copied.is_ok() { fetch.block_bytes } else { 0 }, self.now);
            fetch.until = fetch.until.max(self.now + pace.patience());
        }
        if fetch.places.iter().all(Option::is_none) {
            self.fetches.remove(&ticket);
        }
        let flies = self.flights.get(&aim).is_some_and(|flight| flight.via == Via::Peer(ticket));
        if cancelled || !flies {
            return;
        }
        match copied {
            Err(refusal) => self.source_failed(aim, refusal),
            Ok((via, medium, owner)) => {
                if let Some(block_bytes) = self.land(aim, owner) {
                    self.stats.received[via as usize].add(1, block_bytes);
                    self.flight_done(aim, true, medium);
                } else {
                    self.stats.corrupt_wire += 1;
                    self.source_failed(aim, Refusal::Corrupt);
                }
            }
        }
    }

    /// Makes a flight's block readable if all its strips are here: its size. `None`: they are not. What no client has asked
    /// for stays whose it was where it comes from.
    pub(super) fn land(&mut self, aim: Aim, owner: Owner) -> Option<u64> {
        let (holder, index) = self.flights.get(&aim).filter(|flight| !flight.stale)?.slot?;
        let store = self.stores.get_mut(aim.0)?;
        let block_bytes = store.layout().block_bytes() as u64;
        let slot = store.pool.granted_at(holder, index)?;
        if slot.committed {
            return Some(block_bytes);
        }
        // Whoever wrote it said that it is done; the bitmap of strips says whether that is so.
        let whole = store.arena.arrived_all(slot.slot);
        if whole && holder.client.is_none() {
            store.pool.set_owner(holder, index, owner);
        }
        (whole && self.stores.commit(aim.0, holder, index, None).is_ok()).then_some(block_bytes)
    }

    /// A flight's block is here: for all who want it.
    pub(super) fn flight_done(&mut self, aim: Aim, peer: bool, medium: Medium) {
        let Some(mut flight) = self.flights.remove(&aim) else { return };
        if !peer && medium == Medium::Ssd {
            self.stats.hits_ssd += flight.wants().filter(|want| want.who != Who::Cache).count() as u64;
        }
        let landed = flight.slot;
        let own = flight.take_own();
        self.found(aim, flight.want, landed, peer, medium);
        for want in flight.waiting {
            let published = self.stores.get(aim.0).is_some_and(|store| store.pool.find(&aim.1).is_some());
            if published || slot_of(&want).is_none() {
                self.found(aim, want, landed, peer, medium);
            } else {
                // It was not published, or is not any more, and only its holder has a slot with it.
                self.want(aim.0, flight.place, want);
            }
        }
        self.let_go(aim, own);
    }

    /// The first of those who wait leads the flight now; without one there is none.
    fn lead_on(&mut self, aim: Aim) {
        let Some(flight) = self.flights.get_mut(&aim) else { return };
        match flight.waiting.pop_front() {
            Some(want) => {
                flight.slot = slot_of(&want);
                flight.want = want;
                self.go_on(aim);
            }
            None => drop(self.flights.remove(&aim)),
        }
    }

    /// Gives the engine's own slot of a flight back.
    fn let_go(&mut self, aim: Aim, own: Option<(Holder, u32)>) {
        if let (Some((holder, _)), Some(store)) = (own, self.stores.get_mut(aim.0)) {
            store.pool.release(holder);
        }
    }

    /// A wanted block is here, in the slot where it has landed, or published.
    fn found(&mut self, aim: Aim, want: Want, landed: Option<(Holder, u32)>, peer: bool, medium: Medium) {
        let Some(store) = self.stores.get_mut(aim.0) else { return };
        match want.who {
            Who::Holder { holder, index } => {
                let own = landed.filter(|landed| *landed == (holder, index));
                let own = own.and_then(|(holder, index)| store.pool.granted_at(holder, index));
                let slot = own.map(|slot: GrantedSlot| slot.slot).or_else(|| store.pool.adopt(holder, index));
                self.wants.remove(&(holder, index));
                match slot {
                    Some(slot) => self.tell_found(holder, index, slot, peer, medium),
                    None => self.tell_lost(holder, index, Refusal::Missing),
                }
            }
            Who::Peer { peer, ticket, place, link, destination } => {
                let landed = || landed.and_then(|(holder, index)| store.pool.granted_at(holder, index));
                let source = store.pool.find(&aim.1).or_else(|| landed().map(|slot| slot.slot));
                self.serve_found(aim.0, source, medium, (peer, ticket, place, link), destination);
            }
            Who::Cache => {}
        }
    }

    /// A wanted block was not to be had.
    fn lost(&mut self, want: Want) {
        match want.who {
            Who::Holder { holder, index } => {
                self.wants.remove(&(holder, index));
                self.tell_lost(holder, index, want.refusal);
            }
            Who::Peer { peer, ticket, place, link, .. } => self.served(&peer, ticket, place, link, Err(want.refusal)),
            Who::Cache => {}
        }
    }

    fn tell_found(&mut self, holder: Holder, index: u32, slot: SlotRef, peer: bool, medium: Medium) {
        match holder.client {
            Some(ENGINE) => self.copy_landed(holder, true),
            Some(client) => {
                let found = Ok(Found { slot, peer, medium });
                self.tell(client, LocalEvent::Fetched { tag: holder.tag, index, found });
                self.check_complete(holder.tag);
            }
            None if Self::is_bring(holder) => self.brought(holder, Ok(slot)),
            None if Self::is_kept(holder) => {}
            None => self.replication_went_on(holder),
        }
    }

    fn tell_lost(&mut self, holder: Holder, index: u32, refusal: Refusal) {
        match holder.client {
            Some(ENGINE) => self.copy_landed(holder, false),
            Some(client) => {
                self.tell(client, LocalEvent::Fetched { tag: holder.tag, index, found: Err(refusal) });
            }
            None if Self::is_bring(holder) => self.brought(holder, Err(refusal)),
            None if Self::is_kept(holder) => self.kept_lost(holder),
            None => self.replication_went_on(holder),
        }
    }

    // -- ends --------------------------------------------------------------------------------------------------------

    /// A holder has ended: it wants nothing more, and what is under way for it is called back. Returns the flights that
    /// it led, to be led on when its slots are free.
    pub(super) fn drop_wants(&mut self, holder: Holder) -> Vec<Aim> {
        let of = |index| (holder, index);
        let mine: Vec<(u32, Aim)> =
            self.wants.range(of(0)..=of(u32::MAX)).map(|((_, index), aim)| (*index, *aim)).collect();
        let mut led = Vec::new();
        let mut tickets = BTreeSet::new();
        for (index, aim) in mine {
            self.wants.remove(&(holder, index));
            let Some(flight) = self.flights.get_mut(&aim) else { continue };
            let who = Who::Holder { holder, index };
            if flight.want.who != who {
                flight.waiting.retain(|want| want.who != who);
                continue;
            }
            if let Via::Peer(ticket) = flight.via {
                tickets.insert(ticket);
            }
            let own = flight.take_own();
            (flight.via, flight.slot) = (Via::Nothing, None);
            self.let_go(aim, own);
            led.push(aim);
        }
        for ticket in tickets {
            let Some(fetch) = self.fetches.get_mut(&ticket) else { continue };
            let Some(link) = self.links.get_mut(&fetch.from.node) else { continue };
            link.pace.waived(fetch.owed());
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
        led
    }

    /// See [`Engine::drop_wants`].
    pub(super) fn lead_all_on(&mut self, aims: Vec<Aim>) {
        aims.into_iter().for_each(|aim| self.lead_on(aim));
    }

    /// A block was removed: what is on its way here is not to come, and who waits for it gets nothing.
    pub(super) fn call_off(&mut self, key: &BlockKey) {
        for at in 0..self.stores.iter().count() {
            let Some(flight) = self.flights.get_mut(&(at, *key)) else { continue };
            flight.stale = true;
            for want in std::iter::once(&mut flight.want).chain(&mut flight.waiting) {
                want.tier = false;
                want.sources.clear();
            }
        }
    }

    /// The session with a peer is over: nothing comes from it.
    pub(super) fn fetches_lost(&mut self, peer: &NodeId) {
        let lost = self.fetches.iter().filter(|(_, fetch)| fetch.from.node == *peer);
        for ticket in lost.map(|(ticket, _)| *ticket).collect::<Vec<_>>() {
            let Some(fetch) = self.fetches.remove(&ticket).filter(|fetch| !fetch.cancelled) else { continue };
            for key in fetch.places.into_iter().flatten() {
                let aim = (fetch.store, key);
                if self.flights.get(&aim).is_some_and(|flight| flight.via == Via::Peer(ticket)) {
                    self.source_failed(aim, Refusal::Unreachable);
                }
            }
        }
    }

    /// The session with a peer stands: what is to be said to it goes out now.
    pub(super) fn fetches_begin(&mut self, peer: &NodeId) {
        let Some(Link { pace, .. }) = self.links.get(peer) else { return };
        let until = self.now + pace.patience();
        for fetch in self.fetches.values_mut().filter(|fetch| fetch.from.node == *peer) {
            (fetch.asked, fetch.until) = (self.now, until);
        }
    }

    /// Peers that do not answer: what they owe is asked of others.
    pub(super) fn fetches_late(&mut self) {
        // Whoever was stopped himself has answers waiting, maybe: that time is nobody's silence.
        let missed = self.now - self.ticked;
        if missed > SECOND {
            self.fetches.values_mut().for_each(|fetch| (fetch.asked, fetch.until) = (self.now, fetch.until + missed));
        }
        let mut late = Vec::new();
        for (ticket, fetch) in self.fetches.iter().filter(|(_, fetch)| !fetch.cancelled) {
            let Some(Link { up: true, pace, .. }) = self.links.get(&fetch.from.node) else { continue };
            // The peer has so much under way at once; what waits behind that tells nothing yet.
            let under_way = self.settings.copies_in_flight as u64 * fetch.block_bytes;
            let silent = self.now >= pace.heard.max(fetch.asked) + pace.silence(under_way);
            if silent || self.now >= fetch.until {
                late.push((*ticket, silent));
            }
        }
        for (ticket, silent) in late {
            self.give_up(ticket, silent);
        }
    }

    /// A peer has not answered in time. It may still write into the slots that it was told of, so whoever waits goes on with
    /// other ones.
    fn give_up(&mut self, ticket: Ticket, silent: bool) {
        let Some(fetch) = self.fetches.get_mut(&ticket) else { return };
        let (peer, store, owed) = (fetch.from.node.clone(), fetch.store, fetch.owed());
        let keys: Vec<BlockKey> = fetch.places.iter().flatten().copied().collect();
        (fetch.cancelled, fetch.late) = (true, true);
        self.stats.fetches_late += 1;
        if let Some(Link { pace, .. }) = self.links.get_mut(&peer) {
            pace.waived(owed);
            if silent && pace.permits(self.now) {
                pace.silent(self.now);
                tracing::warn!("{peer} does not answer though its session stands: it is not asked for a while");
            }
        }
        self.say(&peer, PeerMessage::FetchCancel { ticket });
        for key in keys {
            let aim = (store, key);
            let Some(flight) = self.flights.get_mut(&aim).filter(|flight| flight.via == Via::Peer(ticket)) else {
                continue;
            };
            let own = flight.take_own();
            flight.slot = None;
            self.let_go(aim, own);
            self.source_failed(aim, Refusal::Unreachable);
        }
    }

    /// The peer says that nothing more of a fetch will be written.
    pub(super) fn fetch_ended(&mut self, peer: &NodeId, ticket: Ticket) {
        if self.fetches.get(&ticket).is_some_and(|fetch| fetch.cancelled && fetch.from.node == *peer) {
            self.fetches.remove(&ticket);
            if let Some(Link { pace, .. }) = self.links.get_mut(peer) {
                pace.answered(0, 0, self.now);
            }
        }
    }

    /// True if a peer that was given up may still write this slot: nobody else's bytes there would be safe.
    pub(super) fn may_be_written_late(&self, at: usize, slot: SlotRef) -> bool {
        let late = self.fetches.values().filter(|fetch| fetch.late && fetch.store == at);
        late.flat_map(|fetch| fetch.places.iter().zip(&fetch.slots)).any(|(place, of)| place.is_some() && *of == slot)
    }

    /// True if fetches are getting scarce, and this peer has too many that nobody waits for and that it does not end: with the
    /// months one that never answers would have all of them.
    fn crowds(&self, peer: &NodeId) -> bool {
        let limit = self.settings.fetches;
        let of_peer = |fetch: &&Fetch| fetch.cancelled && fetch.from.node == *peer;
        self.fetches.len() >= limit / 2
            && self.fetches.values().filter(of_peer).count() >= (limit / ABANDONED_SHARE).max(1)
    }

    /// Fetches that nobody waits for and that are not over.
    pub(super) fn abandoned(&self) -> usize {
        self.fetches.values().filter(|fetch| fetch.cancelled).count()
    }

    /// A peer wants nothing more of one fetch (or of all): what comes here for it comes for nobody. Returns how many.
    pub(super) fn drop_peer_wants(&mut self, peer: &NodeId, ticket: Option<Ticket>) -> usize {
        let mut dropped = 0;
        let theirs = |want: &Want| match &want.who {
            Who::Peer { peer: its, ticket: of, .. } => its == peer && ticket.is_none_or(|ticket| ticket == *of),
            Who::Holder { .. } | Who::Cache => false,
        };
        for flight in self.flights.values_mut() {
            let before = flight.waiting.len();
            flight.waiting.retain(|want| !theirs(want));
            dropped += before - flight.waiting.len();
            if theirs(&flight.want) {
                flight.want.who = Who::Cache;
                dropped += 1;
            }
        }
        dropped
    }

    /// Asserts the laws of this file.
    pub(super) fn check_fetches(&self) {
        let mut wants: BTreeMap<(Holder, u32), Aim> = BTreeMap::new();
        for (aim, flight) in &self.flights {
            assert_eq!(aim.1, flight.place.key, "a flight with another's key");
            for want in flight.wants() {
                if let Who::Holder { holder, index } = want.who {
                    assert_eq!(wants.insert((holder, index), *aim), None, "{want:?} is wanted twice");
                    let slot = self.stores.get(aim.0).and_then(|store| store.pool.granted_at(holder, index));
                    assert!(slot.is_some(), "{want:?} has no slot");
                }
            }
            assert!(flight.slot.is_some(), "a flight to nowhere: {flight:?}");
            match flight.via {
                Via::Nothing | Via::Asked => panic!("nothing goes on for {flight:?}"),
                Via::Tier(op) => assert!(self.reads_tier(op, *aim), "{flight:?} waits for a read that is over"),
                Via::Peer(ticket) => {
                    let fetch = self.fetches.get(&ticket);
                    let asked = fetch.is_some_and(|fetch| !fetch.cancelled && fetch.places.contains(&Some(aim.1)));
                    assert!(asked, "{flight:?} waits for a fetch that is over");
                    let peers = flight.waiting.iter().any(|want| matches!(want.who, Who::Peer { .. }));
                    assert!(!peers, "a peer waits for a peer: {flight:?}");
                }
            }
        }
        assert_eq!(wants, self.wants, "what is wanted, and what is on its way");
        let mut owed: BTreeMap<&NodeId, u64> = BTreeMap::new();
        for fetch in self.fetches.values() {
            fetch.check();
            assert!(self.links.contains_key(&fetch.from.node), "a fetch from nowhere");
            *owed.entry(&fetch.from.node).or_default() += fetch.owed();
        }
        for (peer, link) in &self.links {
            assert_eq!(link.pace.owed, owed.remove(peer).unwrap_or(0), "bytes that {peer} owes");
        }
    }
}

/// The slot that somebody brings along.
fn slot_of(want: &Want) -> Option<(Holder, u32)> {
    match want.who {
        Who::Holder { holder, index } => Some((holder, index)),
        Who::Peer { .. } | Who::Cache => None,
    }
}

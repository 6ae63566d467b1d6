//! Objects that do not lie in DRAM are brought there before they are read.
//!
//! ```text
//! client                engine
//! Pin ----------------> (the catalog) Behind
//! Bring --------------> a slot for each block; a flight (`engine/fetch.rs`) fills it
//!       <-- Brought --- all have landed, or have no source left; what has landed is kept
//! Pin ----------------> Here; the notice of it ends the keeping
//! ```
//!
//! What is kept for a client that never comes to pin it goes after a second.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::messages::{GrantMode, LocalEvent, Refusal, Ticket};
use crate::objects::classes::Class;
use crate::objects::messages::{At, BATCH_LIMIT, ObjectEvent, Wanted};
use crate::pool::{Granting, Holder, Place, Wish};
use crate::types::{BlockKey, ClientId, Layout, Nanos, NodeAddress, Owner, SlotRef, Tag};

use super::super::copying::Asker;
use super::super::fetch::{BRING, Want, Who};
use super::super::{Engine, SECOND};
use super::NAMESPACE;

/// How long a block is kept for who has asked for it: far more than an answer and the next question take.
const KEPT: Nanos = SECOND;

/// What a client has asked for in one message.
#[derive(Debug)]
struct Bring {
    client: ClientId,
    ticket: Ticket,
    blocks: Vec<Result<(), Refusal>>,
    left: usize,
}

/// A slot for one block of it.
#[derive(Clone, Copy, Debug)]
struct Slot {
    bring: u64,
    place: usize,
    store: usize,
}

/// A block that has been brought and is not pinned yet.
#[derive(Clone, Copy, Debug)]
struct Kept {
    client: ClientId,
    store: usize,
    holder: Holder,
    until: Nanos,
}

/// Where a block may come from, and what for a slot it needs.
struct Origin {
    layout: Layout,
    place: Place,
    peers: VecDeque<NodeAddress>,
}

#[derive(Debug, Default)]
pub(super) struct Brings {
    under_way: BTreeMap<u64, Bring>,
    /// By the number in their holders' tags.
    slots: BTreeMap<u64, Slot>,
    /// By arena and slot.
    kept: BTreeMap<(u32, u32), Vec<Kept>>,
    /// Blocks on their way to the SSD that have left DRAM already: they are brought when they are there.
    late: BTreeMap<BlockKey, Vec<(u64, usize, Wanted)>>,
    /// How many of each bring are looked for on other nodes.
    elsewhere: BTreeMap<u64, usize>,
}

impl Brings {
    pub fn idle(&self) -> bool {
        self.under_way.is_empty()
    }

    pub fn unfinished(&self) -> impl Iterator<Item = String> {
        self.under_way.values().map(|bring| format!("{bring:?}"))
    }
}

impl Engine {
    /// A client wants these blocks in DRAM.
    pub(super) fn bring(&mut self, client: ClientId, ticket: Ticket, mut wanted: Vec<Wanted>) {
        wanted.truncate(BATCH_LIMIT);
        let (bring, left) = (self.number(), wanted.len() + 1);
        // One more than there are: it does not end while it begins.
        let blocks = vec![Err(Refusal::Missing); wanted.len()];
        self.objects.brings.under_way.insert(bring, Bring { client, ticket, blocks, left });
        let mut others = Vec::new();
        for (place, wanted) in wanted.into_iter().enumerate() {
            let elsewhere = wanted.index == 0 && self.objects.catalog.find(&wanted.key).is_none();
            if elsewhere && self.join_copy(&wanted.key, Asker::Bring(bring, (place, wanted))) {
                *self.objects.brings.elsewhere.entry(bring).or_default() += 1;
            } else if elsewhere && self.objects.catalog.is_elsewhere() {
                others.push((place, wanted));
            } else {
                self.bring_block(bring, place, wanted);
            }
        }
        if !others.is_empty() {
            *self.objects.brings.elsewhere.entry(bring).or_default() += others.len();
            self.objects_come(client, bring, others);
        }
        self.bring_went_on(bring);
    }

    /// An object has come here from another node, or will not.
    pub(in crate::engine) fn bring_came(&mut self, bring: u64, place: &(usize, Wanted), end: Result<(), Refusal>) {
        let Some(left) = self.objects.brings.elsewhere.get_mut(&bring) else { return };
        *left -= 1;
        if *left == 0 {
            self.objects.brings.elsewhere.remove(&bring);
        }
        match end {
            Ok(()) => self.bring_block(bring, place.0, place.1),
            Err(refusal) => self.bring_ended(bring, place.0, Err(refusal)),
        }
    }

    fn bring_block(&mut self, bring: u64, place: usize, wanted: Wanted) {
        let Some(origin) = self.origin(&wanted) else {
            if self.is_being_written(&wanted.key) && self.objects.catalog.find(&wanted.key).is_some() {
                return self.objects.brings.late.entry(wanted.key).or_default().push((bring, place, wanted));
            }
            return self.bring_ended(bring, place, Err(Refusal::Missing));
        };
        let at = match self.store_for(origin.layout) {
            Ok(at) => at,
            Err(_) => return self.bring_ended(bring, place, Err(Refusal::TooLarge)),
        };
        let number = self.number();
        let holder =
            Holder { client: None, tag: Tag { request: number, attempt: BRING, worker: self.node.incarnation } };
        // Whose it is, its source says.
        let Place { key, parent, position } = origin.place;
        let wish = Wish { keys: vec![key], private: false, parent, position, owner: Owner::default() };
        let slot = match self.stores.grant(at, holder, wish, GrantMode::Now) {
            Granting::Held(slots) => slots[0],
            Granting::Refused(refusal) => return self.bring_ended(bring, place, Err(refusal)),
            // Not in this mode.
            Granting::Waiting => return self.bring_ended(bring, place, Err(Refusal::Full)),
        };
        self.objects.brings.slots.insert(number, Slot { bring, place, store: at });
        if slot.committed {
            return self.brought(holder, Ok(slot.slot));
        }
        self.wants.insert((holder, 0), (at, key));
        let (who, refusal) = (Who::Holder { holder, index: 0 }, Refusal::Missing);
        self.want(at, origin.place, Want { who, tier: true, sources: origin.peers, refusal });
    }

    /// Which of this node's media has a block; `None`: none. What others have is copied here as a whole before it is brought.
    fn origin(&self, wanted: &Wanted) -> Option<Origin> {
        let known = self.objects.catalog.find(&wanted.key)?;
        if known.dram.is_some() {
            // It is found there by its key; what else is said of it counts for nothing.
            let place = Place { key: wanted.key, parent: wanted.parent, position: wanted.index };
            return Some(Origin { layout: known.class.layout(), place, peers: VecDeque::new() });
        }
        let record = self.tier_record(&wanted.key, known.class.layout())?;
        let is_object = record.owner.namespace == NAMESPACE && Class::of(record.layout).is_some();
        is_object.then(|| Origin { layout: record.layout, place: record.place, peers: VecDeque::new() })
    }

    /// A block that was evicted while it was written is on the SSD now, or is lost.
    pub(super) fn bring_late(&mut self, key: &BlockKey) {
        for (bring, place, wanted) in self.objects.brings.late.remove(key).unwrap_or_default() {
            self.bring_block(bring, place, wanted);
        }
    }

    /// True if this is the holder of a slot for an object that is brought.
    pub(in crate::engine) fn is_bring(holder: Holder) -> bool {
        holder.client.is_none() && holder.tag.attempt == BRING
    }

    /// A flight has ended for one block.
    pub(in crate::engine) fn brought(&mut self, holder: Holder, landed: Result<SlotRef, Refusal>) {
        let Some(Slot { bring, place, store: at }) = self.objects.brings.slots.remove(&holder.tag.request) else {
            return;
        };
        let client = self.objects.brings.under_way.get(&bring).map_or(0, |bring| bring.client);
        let Some(store) = self.stores.get_mut(at) else { return };
        match landed {
            Ok(slot) => {
                let kept = Kept { client, store: at, holder, until: self.now + KEPT };
                self.objects.brings.kept.entry((store.region.0, slot.slot)).or_default().push(kept);
            }
            Err(_) => drop(store.pool.release(holder)),
        }
        self.bring_ended(bring, place, landed.map(|_| ()));
    }

    fn bring_ended(&mut self, bring: u64, place: usize, result: Result<(), Refusal>) {
        if let Some(bring) = self.objects.brings.under_way.get_mut(&bring) {
            bring.blocks[place] = result;
        }
        self.bring_went_on(bring);
    }

    fn bring_went_on(&mut self, bring: u64) {
        let Some(known) = self.objects.brings.under_way.get_mut(&bring) else { return };
        known.left -= 1;
        if known.left > 0 {
            return;
        }
        let Some(Bring { client, ticket, blocks, .. }) = self.objects.brings.under_way.remove(&bring) else { return };
        if blocks.contains(&Err(Refusal::Full)) {
            self.was_refused(client);
        }
        self.tell(client, LocalEvent::Objects(ObjectEvent::Brought { ticket, blocks }));
    }

    /// What lies here has been pinned: from now on the pin keeps it.
    pub(super) fn end_keeping(&mut self, (region, slot): At) {
        if self.objects.brings.kept.is_empty() {
            return;
        }
        let kept = self.objects.brings.kept.remove(&(region.0, slot.slot)).unwrap_or_default();
        self.release_kept(kept);
    }

    fn release_kept(&mut self, kept: Vec<Kept>) {
        for Kept { store, holder, .. } in kept {
            if let Some(store) = self.stores.get_mut(store) {
                store.pool.release(holder);
            }
        }
    }

    /// Lets go of what nobody has come for, as far as this says so.
    fn forget_kept(&mut self, goes: impl Fn(&Kept) -> bool) {
        let mut gone = Vec::new();
        self.objects.brings.kept.retain(|_, kept| {
            gone.extend(kept.extract_if(.., |kept| goes(kept)));
            !kept.is_empty()
        });
        self.release_kept(gone);
    }

    /// Time has passed.
    pub(super) fn keep_no_longer(&mut self) {
        let now = self.now;
        self.forget_kept(|kept| kept.until <= now);
    }

    /// A client wants nothing more.
    pub(super) fn forget_brings(&mut self, client: ClientId) {
        let brings = &mut self.objects.brings;
        let theirs = brings.under_way.iter().filter(|(_, bring)| bring.client == client);
        let theirs: BTreeSet<u64> = theirs.map(|(number, _)| *number).collect();
        brings.under_way.retain(|number, _| !theirs.contains(number));
        brings.elsewhere.retain(|number, _| !theirs.contains(number));
        let (slots, others) =
            std::mem::take(&mut brings.slots).into_iter().partition(|(_, slot)| theirs.contains(&slot.bring));
        let slots: BTreeMap<u64, Slot> = slots;
        brings.slots = others;
        for late in brings.late.values_mut() {
            late.retain(|(bring, ..)| !theirs.contains(bring));
        }
        brings.late.retain(|_, late| !late.is_empty());
        for (number, slot) in slots {
            let tag = Tag { request: number, attempt: BRING, worker: self.node.incarnation };
            let holder = Holder { client: None, tag };
            let led = self.drop_wants(holder);
            if let Some(store) = self.stores.get_mut(slot.store) {
                store.pool.release(holder);
            }
            self.lead_all_on(led);
        }
        self.forget_kept(|kept| kept.client == client);
    }

    pub(super) fn check_brings(&self) {
        let brings = &self.objects.brings;
        for slot in brings.slots.values() {
            assert!(brings.under_way.contains_key(&slot.bring), "{slot:?} is for nobody");
        }
        for key in brings.late.keys() {
            assert!(self.is_being_written(key), "{key:?} is waited for and not on its way");
        }
        for (number, bring) in &brings.under_way {
            let late = brings.late.values().flatten().filter(|(of, ..)| of == number).count();
            let slots = brings.slots.values().filter(|slot| slot.bring == *number).count();
            let elsewhere = brings.elsewhere.get(number).copied().unwrap_or(0);
            assert_eq!(bring.left, late + slots + elsewhere, "{bring:?} waits for nothing");
        }
    }
}

//! Objects and the medium behind the arena.
//!
//! A block counts as there while any medium of the node has it. So a block that leaves DRAM is no loss if it is on the SSD,
//! or on its way there; and a value of several blocks goes as a whole when one of them is on no medium any more.
//!
//! A value of one block is written when it is found again or about to be evicted, as KV is (`engine/behind.rs`), but it is not
//! evicted before it is there, unless the SSD takes nothing. The blocks of a larger one are written at once, and stay in DRAM
//! until they are: if one were lost all would be. So a value may be larger than DRAM; who puts it waits for the SSD, block by
//! block.
//!
//! ```text
//! put of a large value    Reserve --> Slot ... Commit --> held, written --> on the SSD: may leave DRAM --> room for the next
//!                         Reserve --> Full; AwaitRoom -----------------------------------> Room
//! ```

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::messages::{LocalEvent, Ticket};
use crate::objects::classes::Class;
use crate::objects::hints::Head;
use crate::objects::messages::{ObjectEvent, chained};
use crate::pool::Holder;
use crate::pool::tier::{Fate, Health, Record};
use crate::types::{BlockKey, ClientId, Owner};

use super::super::Engine;
use super::super::stores::Store;
use super::NAMESPACE;

/// Questions of one client for room that wait at once.
const ROOM_LIMIT: usize = 64;

/// Blocks of large values that stay in DRAM until they are on the SSD, and who waits for that.
#[derive(Debug, Default)]
pub(super) struct Held {
    /// Who holds each, in which store.
    holders: BTreeMap<BlockKey, (usize, Holder)>,
    /// Those whose writes have not begun.
    unwritten: VecDeque<BlockKey>,
    /// How many writes have ended.
    ended: u64,
    /// How many had when a client was last refused room.
    refused: BTreeMap<ClientId, u64>,
    waiting: Vec<(ClientId, Ticket)>,
}

impl Held {
    /// True if this holder holds it.
    pub fn is_by(&self, key: &BlockKey, holder: Holder) -> bool {
        self.holders.get(key).is_some_and(|(_, by)| *by == holder)
    }
}

/// True if a record on the tier is of an object.
pub(in crate::engine) fn is_object(record: &Record) -> bool {
    record.owner.namespace == NAMESPACE
}

impl Engine {
    /// What the tier has from an earlier life. Parts of values that are not there as a whole go: of puts that never ended,
    /// and of values that the disk has lost something of.
    pub(in crate::engine) fn recover_objects(&mut self) {
        let limit = self.tier_capacity().map_or(0, |capacity| capacity.limit);
        self.objects.catalog.set_ssd_capacity(limit);
        let mut heads: Vec<(BlockKey, BlockKey)> = Vec::new();
        // By the block before.
        let mut parts: HashMap<BlockKey, Vec<(BlockKey, u32)>> = HashMap::new();
        let mut useless = Vec::new();
        let mut count = 0;
        for record in self.tier_records().filter(is_object) {
            let place = record.place;
            match Class::of(record.layout) {
                Some(class) if place.position == 0 => {
                    self.objects.catalog.insert_ssd(place.key, class, true);
                    if chained(&place.parent, &place.key).0 > 1 {
                        heads.push((place.key, place.parent));
                    }
                }
                Some(Class::LARGEST) => {
                    parts.entry(place.parent).or_default().push((place.key, place.position));
                    count += 1;
                }
                _ => useless.push(place.key),
            }
        }
        for (head, chain) in heads {
            let (blocks, _) = chained(&chain, &head);
            let mut chunks: Vec<BlockKey> = Vec::new();
            let mut last = head;
            // A circle would be longer than all parts.
            while chunks.len() < count && chunks.len() + 1 < blocks as usize {
                let next = parts.get(&last).into_iter().flatten().find(|(key, position)| {
                    *position as usize == chunks.len() + 1 && (*position > 1 || chained(&chain, key).1)
                });
                let Some((key, _)) = next else { break };
                chunks.push(*key);
                last = *key;
            }
            if chunks.len() + 1 < blocks as usize {
                self.objects.catalog.remove(&head);
                useless.push(head);
                continue;
            }
            for chunk in &chunks {
                self.objects.catalog.insert_ssd(*chunk, Class::LARGEST, false);
            }
            self.objects.heads.extend(chunks.iter().map(|chunk| (*chunk, head)));
            self.objects.chunks.insert(head, chunks);
        }
        let heads = &self.objects.heads;
        useless.extend(parts.values().flatten().map(|(key, _)| *key).filter(|key| !heads.contains_key(key)));
        self.discard_from_tier(&useless);
    }

    // -- what the tier tells -------------------------------------------------------------------------------------------

    /// A block has been written.
    pub(in crate::engine) fn object_written(&mut self, record: &Record) {
        let key = record.place.key;
        if self.objects.catalog.find(&key).is_none() {
            // Committed within this very input.
            self.note_objects();
        }
        match Class::of(record.layout) {
            Some(class) if self.objects.catalog.find(&key).is_some() => {
                self.objects.catalog.insert_ssd(key, class, record.place.position == 0);
            }
            // Nobody would ever find it.
            _ => self.discard_from_tier(&[key]),
        }
        self.let_leave(&key);
        self.bring_late(&key);
    }

    /// A write has ended otherwise.
    pub(in crate::engine) fn object_not_written(&mut self, key: &BlockKey, fate: Fate) {
        self.note_objects();
        match fate {
            _ if !self.objects.held.holders.contains_key(key) => {}
            Fate::Busy => self.objects.held.unwritten.push_front(*key),
            Fate::Full | Fate::Failed => {
                self.objects.held.unwritten.push_back(*key);
                self.let_finished_leave();
            }
            Fate::Done | Fate::Missing | Fate::Corrupt => self.let_leave(key),
        }
        self.object_left(key);
        self.bring_late(key);
    }

    /// The tier has let go of a block. True if it is an object's.
    pub(in crate::engine) fn object_left_tier(&mut self, key: &BlockKey) -> bool {
        self.object_left(key) || self.objects.removed.iter().any(|removed| removed.contains(key))
    }

    /// Writes of these are to lead to nothing.
    pub(in crate::engine) fn objects_doomed(&mut self, keys: &[BlockKey]) {
        for key in keys {
            self.let_leave(key);
            self.object_left(key);
            // How the write ends is not told any more.
            self.bring_late(key);
        }
    }

    /// Whatever the tier still tells of these is told of nothing.
    pub(in crate::engine) fn objects_removed(&mut self, keys: &[BlockKey]) {
        self.objects.removed[0].extend(keys);
    }

    /// All that the tier had to tell has been heard.
    pub(in crate::engine) fn objects_heard(&mut self) {
        let [new, old] = &mut self.objects.removed;
        *old = std::mem::take(new);
    }

    /// A block has left a medium, or will not get there: nobody finds it any more if that was the last. False: nobody did.
    pub(in crate::engine) fn object_left(&mut self, key: &BlockKey) -> bool {
        let Some(mut entry) = self.objects.catalog.find(key) else { return false };
        if self.tier_layout(key).is_none() {
            entry = self.objects.catalog.left_ssd(key).unwrap_or(entry);
        }
        if entry.dram.is_none() && !entry.ssd && !self.is_being_written(key) {
            if self.objects.catalog.remove(key).is_some_and(|entry| entry.head) {
                // Which value it was, does not matter.
                self.cluster.note(Head { key: *key, value: *key, class: 0 }, false);
            }
            self.objects.gone.push(*key);
            self.objects_removed(&[*key]);
        }
        true
    }

    /// The tier is to have a block of an object no more, neither now nor when a write ends.
    pub(super) fn remove_object_from_tier(&mut self, key: &BlockKey) {
        let Some(behind) = &mut self.behind else { return };
        behind.removed(|of| of == key);
        self.remove_from_tier(key);
        self.object_left(key);
    }

    // -- values of several blocks --------------------------------------------------------------------------------------

    /// A block of a large value stays in DRAM until it is on the SSD, if there is one.
    pub(super) fn hold_back(&mut self, key: BlockKey, store: usize, holder: Holder) {
        self.objects.held.holders.insert(key, (store, holder));
        self.objects.held.unwritten.push_back(key);
    }

    /// True if it does.
    pub(super) fn holds_back(&self) -> bool {
        self.tier_capacity().is_some_and(|capacity| capacity.health == Health::Good)
    }

    /// Begins to write what is held back.
    pub(in crate::engine) fn write_held(&mut self) {
        while let Some(key) = self.objects.held.unwritten.pop_front() {
            let Some(&(at, _)) = self.objects.held.holders.get(&key) else { continue };
            let slot = self.stores.get(at).and_then(|store| store.pool.find(&key));
            if slot.is_some_and(|slot| !self.write_tier(at, slot)) {
                return self.objects.held.unwritten.push_front(key);
            }
            if !self.is_being_written(&key) {
                self.let_leave(&key);
            }
        }
    }

    /// The medium fails: what is of a value that is there as a whole waits no longer. A put that is under way does, as its
    /// parts may be written later.
    fn let_finished_leave(&mut self) {
        let finished = self.objects.held.holders.keys().filter(|key| !self.objects.parts.contains_key(key));
        finished.copied().collect::<Vec<_>>().iter().for_each(|key| self.let_leave(key));
    }

    /// A block need not stay in DRAM any more.
    pub(in crate::engine) fn let_leave(&mut self, key: &BlockKey) {
        if let Some((at, holder)) = self.objects.held.holders.remove(key)
            && let Some(store) = self.stores.get_mut(at)
        {
            store.pool.release(holder);
        }
    }

    // -- room ----------------------------------------------------------------------------------------------------------

    /// A write to the tier has ended, for good or ill: what was written may leave DRAM now.
    pub(in crate::engine) fn write_ended(&mut self, fate: Fate) {
        if fate != Fate::Busy {
            self.objects.held.ended += 1;
            self.answer_waiting(!matches!(fate, Fate::Full | Fate::Failed));
        }
    }

    /// There was no room for something of this client.
    pub(super) fn was_refused(&mut self, client: ClientId) {
        self.objects.held.refused.insert(client, self.objects.held.ended);
    }

    /// Before each input: whether objects that are on no other medium make room. They do if they will not get to one.
    pub(in crate::engine) fn keep_objects(&mut self) {
        let (takes, owner) = (self.takes_writes(), Owner { namespace: NAMESPACE, tenant: 0 });
        for at in 0..self.stores.iter().count() {
            let Some(layout) = self.stores.get(at).filter(|store| store.objects).map(Store::layout) else { continue };
            let keep = takes && !self.is_over_quota(owner, layout);
            self.stores.get_mut(at).into_iter().for_each(|store| store.pool.keep_dirty(keep));
        }
    }

    /// A client that was refused asks whether it is worth another try.
    pub(super) fn await_room(&mut self, client: ClientId, ticket: Ticket) {
        self.clean_ahead();
        let held = &mut self.objects.held;
        let ended = held.refused.remove(&client) != Some(held.ended);
        let theirs = held.waiting.iter().filter(|(of, _)| *of == client).count();
        if ended || theirs >= ROOM_LIMIT || !self.may_have_room() {
            return self.tell(client, LocalEvent::Objects(ObjectEvent::Room { ticket, more: ended }));
        }
        self.objects.held.waiting.push((client, ticket));
    }

    fn answer_waiting(&mut self, more: bool) {
        for (client, ticket) in std::mem::take(&mut self.objects.held.waiting) {
            self.tell(client, LocalEvent::Objects(ObjectEvent::Room { ticket, more }));
        }
    }

    /// Nobody waits for a medium that does not answer, or when nothing is written.
    pub(in crate::engine) fn give_up_room(&mut self) {
        if !self.objects.held.waiting.is_empty() && !self.may_have_room() {
            self.answer_waiting(false);
        }
    }

    fn may_have_room(&self) -> bool {
        self.holds_back() && (self.writes_tier() || !self.objects.held.unwritten.is_empty())
    }

    pub(super) fn forget_room(&mut self, client: ClientId) {
        self.objects.held.refused.remove(&client);
        self.objects.held.waiting.retain(|(of, _)| *of != client);
    }

    pub(super) fn check_held(&self) {
        for (key, (at, holder)) in &self.objects.held.holders {
            let store = self.stores.get(*at).expect("a store");
            assert!(store.pool.granted_at(*holder, 0).is_some(), "{key:?} is held back by nobody");
            let is_known = self.objects.held.unwritten.contains(key) || self.is_being_written(key);
            assert!(is_known, "{key:?} is held back and not written");
        }
    }
}

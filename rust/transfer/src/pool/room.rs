//! Which blocks may go: the pool sees to it that a prefix goes from its tail, whatever the policy.
//!
//! A published block is *idle* if nobody refers to it. What an idle block may do follows from the blocks that continue
//! its prefix and lie here, its children:
//!
//! | children | it is | it goes |
//! |---|---|---|
//! | none | a candidate | when the policy says so |
//! | some are idle | inside | after them |
//! | all are in use | a stem | when there is no candidate, as the room is needed and the prefix is broken anyway |
//!
//! So every idle block can be had, in some order: room is counted in idle blocks. Parent and child may be published in
//! any order. Only a block one position further counts as a child, so that made-up keys cannot form a circle, in which
//! nobody would go first.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use super::policy::{Evict, Gone};
use super::{Lives, Place, Pool};
use crate::types::BlockKey;

/// How far a victim is looked for that nobody reads: usually the next few; at most twice as many as are written at once.
const LOOKS: [usize; 3] = [8, 64, 512];

/// Of a block's children, how many there are, and how many of those are idle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Children {
    all: u32,
    idle: u32,
}

/// What a slot's block may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Role {
    /// In use, not published, or its children go first.
    #[default]
    Stays,
    Candidate,
    Stem,
}

/// What is noted of a published block's family.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kin {
    /// Its parent's slot at the last look: it may be another's by now.
    parent: u32,
    children: Children,
}

/// The blocks that may go.
#[derive(Debug)]
pub(super) struct Room {
    policy: Box<dyn Evict>,
    /// In the order in which they are taken; few, as each has a child in use.
    stems: BTreeSet<u32>,
    /// Children of blocks that are not here, by the parent's key and the children's position.
    orphans: FxHashMap<(BlockKey, u32), Children>,
    /// Slots of idle blocks: what could be had.
    idle: usize,
    /// What is on no other medium does not go.
    keeps_dirty: bool,
}

impl Room {
    pub(super) fn new(policy: Box<dyn Evict>) -> Self {
        Self { policy, stems: BTreeSet::new(), orphans: FxHashMap::default(), idle: 0, keeps_dirty: false }
    }

    /// How many blocks could go.
    pub(super) fn idle(&self) -> usize {
        self.idle
    }

    /// See [`Pool::keep_dirty`].
    pub(super) fn keep_dirty(&mut self, keep: bool) {
        self.keeps_dirty = keep;
    }

    /// A holder has found the block.
    pub(super) fn hit(&mut self, slot: u32) {
        self.policy.hit(slot);
    }
}

impl<M: Lives> Pool<M> {
    /// The slot's block, which is in use, is published now.
    pub(super) fn join(&mut self, slot: u32, place: Place) {
        self.room.policy.publish(slot, &place);
        let children = place.position.checked_add(1).and_then(|next| self.room.orphans.remove(&(place.key, next)));
        self.slots[slot as usize].kin = Kin { children: children.unwrap_or_default(), ..Kin::default() };
        self.tell_parent(slot, |children| children.all += 1);
    }

    /// The slot's block, which was published, is not any more.
    pub(super) fn leave(&mut self, slot: u32, place: Place, gone: Gone) {
        self.wake(slot);
        self.room.policy.remove(slot, gone);
        let children = std::mem::take(&mut self.slots[slot as usize].kin.children);
        if children.all > 0 {
            self.room.orphans.insert((place.key, place.position + 1), children);
        }
        self.tell_parent(slot, |children| children.all -= 1);
    }

    /// Somebody refers to the slot's block now. True if it was idle.
    pub(super) fn wake(&mut self, slot: u32) -> bool {
        if !std::mem::replace(&mut self.slots[slot as usize].idle, false) {
            return false;
        }
        self.room.idle -= 1;
        self.review(slot);
        self.tell_parent(slot, |children| children.idle -= 1);
        true
    }

    /// Nobody refers to the slot's published block any more.
    pub(super) fn rest(&mut self, slot: u32) {
        if std::mem::replace(&mut self.slots[slot as usize].idle, true) {
            return;
        }
        self.room.idle += 1;
        self.room.policy.rest(slot);
        self.review(slot);
        self.tell_parent(slot, |children| children.idle += 1);
    }

    /// The idle block that goes next; it is a candidate no more. One that is being read, to be written elsewhere first of
    /// all, would free nothing yet: it goes only if there is no other.
    pub(super) fn victim(&mut self) -> Option<u32> {
        let may = |slot: &u32| !self.room.keeps_dirty || self.slots[*slot as usize].clean;
        let goes = |slot: &u32| self.memory.quiet(*slot) && may(slot);
        let first = self.room.policy.coldest(1).first().copied();
        let other = first.filter(|first| !goes(first)).and_then(|_| {
            let further = |limit: usize| self.room.policy.coldest(limit).into_iter().skip(1).find(goes);
            LOOKS.into_iter().find_map(further)
        });
        let slot = match (other, first) {
            (Some(slot), _) => {
                self.room.policy.forbid(slot);
                slot
            }
            (None, Some(first)) if may(&first) => self.room.policy.pop()?,
            (None, Some(_)) => return None,
            (None, None) => {
                let stem = self.room.stems.iter().copied().find(may)?;
                self.room.stems.remove(&stem);
                stem
            }
        };
        self.slots[slot as usize].role = Role::Stays;
        Some(slot)
    }

    /// Up to `limit` of the blocks that go next, as things are: a parent joins when its last child has gone.
    pub fn coldest(&self, limit: usize) -> Vec<u32> {
        self.room.policy.coldest(limit)
    }

    fn tell_parent(&mut self, slot: u32, change: impl Fn(&mut Children)) {
        let kin = self.slots[slot as usize].kin;
        let Some(place) = self.slots[slot as usize].place() else { return };
        let Some(position) = place.position.checked_sub(1) else { return };
        let is_parent = |number: u32| {
            self.slots.get(number as usize).is_some_and(|record| {
                let place_of = record.place().filter(|_| record.is_published());
                place_of.is_some_and(|other| other.key == place.parent && other.position == position)
            })
        };
        let parent = if is_parent(kin.parent) {
            Some(kin.parent)
        } else {
            self.at(&place.parent).filter(|&number| is_parent(number))
        };
        if let Some(parent) = parent {
            self.slots[slot as usize].kin.parent = parent;
            change(&mut self.slots[parent as usize].kin.children);
            self.review(parent);
            return;
        }
        let orphans = self.room.orphans.entry((place.parent, place.position));
        let children = orphans.and_modify(&change).or_insert_with(|| {
            let mut children = Children::default();
            change(&mut children);
            children
        });
        if children.all == 0 {
            self.room.orphans.remove(&(place.parent, place.position));
        }
    }

    /// Decides what the slot's block may do after something about it has changed.
    fn review(&mut self, slot: u32) {
        let record = &mut self.slots[slot as usize];
        let role = match record.kin.children {
            _ if !record.idle => Role::Stays,
            Children { all: 0, .. } => Role::Candidate,
            Children { idle: 0, .. } => Role::Stem,
            Children { .. } => Role::Stays,
        };
        let before = std::mem::replace(&mut record.role, role);
        if before == role {
            return;
        }
        match before {
            Role::Candidate => self.room.policy.forbid(slot),
            Role::Stem => drop(self.room.stems.remove(&slot)),
            Role::Stays => {}
        }
        match role {
            Role::Candidate => self.room.policy.allow(slot),
            Role::Stem => drop(self.room.stems.insert(slot)),
            Role::Stays => {}
        }
    }

    /// Asserts the laws of this file.
    pub(super) fn check_room(&self) {
        let mut families: FxHashMap<(BlockKey, u32), Children> = FxHashMap::default();
        for (slot, place) in self.slots.iter().filter_map(|slot| Some((slot, slot.place()?))) {
            if slot.is_published() && place.position > 0 {
                let children = families.entry((place.parent, place.position)).or_default();
                children.all += 1;
                children.idle += u32::from(slot.idle);
            }
        }
        let (mut idle, mut candidates, mut stems) = (0, 0, 0);
        for (number, slot) in (0..).zip(&self.slots) {
            let published = slot.is_published();
            let unused =
                published && slot.pins == 0 && slot.reads == 0 && slot.writers == 0 && !self.viewed.contains(&number);
            assert_eq!(slot.idle, unused, "idle and slot {number}: {slot:?}");
            let next =
                slot.place().filter(|_| published).and_then(|place| Some((place.key, place.position.checked_add(1)?)));
            let children = next.and_then(|family| families.remove(&family)).unwrap_or_default();
            if published {
                assert_eq!(slot.kin.children, children, "children of slot {number}: {slot:?}");
            }
            let candidate = unused && children.all == 0;
            let stem = unused && children.all > 0 && children.idle == 0;
            assert_eq!(self.room.policy.contains(number), candidate, "the policy and slot {number}: {slot:?}");
            assert_eq!(self.room.stems.contains(&number), stem, "the stems and slot {number}: {slot:?}");
            idle += usize::from(unused);
            candidates += usize::from(candidate);
            stems += usize::from(stem);
        }
        assert_eq!(self.room.idle, idle, "the number of idle blocks has drifted");
        assert_eq!(self.room.policy.len(), candidates, "the policy has slots that are not there");
        assert_eq!(self.room.stems.len(), stems, "there are stems that are not there");
        assert_eq!(self.room.orphans, families, "children of absent parents");
        let order = self.room.policy.coldest(usize::MAX);
        let distinct: BTreeSet<u32> = order.iter().copied().collect();
        assert!(distinct.len() == candidates && order.len() == candidates, "the order is not one of the candidates");
        assert!(order.iter().all(|&slot| self.room.policy.contains(slot)), "the order has more than the candidates");
    }
}

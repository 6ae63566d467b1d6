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

use std::collections::{BTreeMap, BTreeSet};

use rustc_hash::FxHashMap;

use super::account::Account;
use super::classes::Classes;
use super::policy::{Evict, Gone};
use super::{Lives, Place, Pool};
use crate::types::BlockKey;

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
    /// Its parent's slot at the last look: it may be another's by now. In an empty slot: the next empty one.
    parent: u32,
    children: Children,
}

impl Kin {
    pub(super) fn next(self) -> u32 {
        self.parent
    }

    pub(super) fn set_next(&mut self, slot: u32) {
        self.parent = slot;
    }
}

/// The blocks that may go.
#[derive(Debug)]
pub(super) struct Room {
    /// Candidates and stems; of these there are few, as each has a child in use.
    pub classes: Classes,
    /// Children of blocks that are not here, by the parent's key and the children's position.
    orphans: FxHashMap<(BlockKey, u32), Children>,
    /// Slots of idle blocks: what could be had.
    idle: usize,
    /// What is on no other medium does not go.
    keeps_dirty: bool,
}

impl Room {
    pub(super) fn new(policy: Box<dyn Evict>) -> Self {
        Self { classes: Classes::new(policy), orphans: FxHashMap::default(), idle: 0, keeps_dirty: false }
    }

    /// How many blocks could go.
    pub(super) fn idle(&self) -> usize {
        self.idle
    }

    /// See [`Pool::keep_dirty`].
    pub(super) fn keep_dirty(&mut self, keep: bool) {
        self.keeps_dirty = keep;
    }
}

impl<M: Lives> Pool<M> {
    /// The slot's block, which is in use, is published now.
    pub(super) fn join(&mut self, slot: u32, place: Place) {
        let account = self.account(slot);
        self.room.classes.publish(account, slot, &place);
        self.owners.accounts.stir(account);
        let children = place.position.checked_add(1).and_then(|next| self.room.orphans.remove(&(place.key, next)));
        self.slots[slot as usize].kin = Kin { children: children.unwrap_or_default(), ..Kin::default() };
        self.tell_parent(slot, |children| children.all += 1);
    }

    /// The slot's block, which was published, is not any more.
    pub(super) fn leave(&mut self, slot: u32, place: Place, gone: Gone) {
        self.wake(slot);
        self.room.classes.remove(self.account(slot), slot, gone);
        let children = std::mem::take(&mut self.slots[slot as usize].kin.children);
        if children.all > 0 {
            self.room.orphans.insert((place.key, place.position + 1), children);
        }
        self.tell_parent(slot, |children| children.all -= 1);
    }

    /// Somebody refers to the slot's block now. True if it was idle.
    pub(super) fn wake(&mut self, slot: u32) -> bool {
        if !self.slots[slot as usize].wake() {
            return false;
        }
        self.room.idle -= 1;
        self.room.classes.wake(self.account(slot), slot);
        self.review(slot);
        self.tell_parent(slot, |children| children.idle -= 1);
        true
    }

    /// Nobody refers to the slot's published block any more.
    pub(super) fn rest(&mut self, slot: u32) {
        let before = self.slots[slot as usize].idle;
        self.slots[slot as usize].rest(self.turn.1);
        if before {
            return;
        }
        self.room.idle += 1;
        let account = self.account(slot);
        self.room.classes.rest(account, slot);
        self.owners.accounts.stir(account);
        self.review(slot);
        self.tell_parent(slot, |children| children.idle += 1);
    }

    /// The idle block that goes next, of one account or of all; it is a candidate no more.
    pub(super) fn victim(&mut self, of: Option<Account>) -> Option<u32> {
        let may = |slot: u32| !self.room.keeps_dirty || self.slots[slot as usize].clean;
        let slot = self.room.classes.victim(of, |slot| self.memory.quiet(slot), may)?;
        self.slots[slot as usize].role = Role::Stays;
        Some(slot)
    }

    /// Up to `limit` of the blocks that go next, as things are: a parent joins when its last child has gone.
    pub fn coldest(&self, limit: usize) -> Vec<u32> {
        self.room.classes.coldest(limit)
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
        let account = self.account(slot);
        let classes = &mut self.room.classes;
        match before {
            Role::Candidate => classes.forbid(account, slot),
            Role::Stem => classes.set_stem(account, slot, false),
            Role::Stays => {}
        }
        match role {
            Role::Candidate => classes.allow(account, slot),
            Role::Stem => classes.set_stem(account, slot, true),
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
        let mut accounts: BTreeMap<Account, (usize, usize)> = BTreeMap::new();
        for (number, slot) in (0..).zip(&self.slots) {
            let published = slot.is_published();
            let unused =
                published && slot.pins() == 0 && slot.reads == 0 && slot.writers == 0 && !self.viewed.contains(&number);
            assert_eq!(slot.idle, unused, "idle and slot {number}: {slot:?}");
            let next =
                slot.place().filter(|_| published).and_then(|place| Some((place.key, place.position.checked_add(1)?)));
            let children = next.and_then(|family| families.remove(&family)).unwrap_or_default();
            if published {
                assert_eq!(slot.kin.children, children, "children of slot {number}: {slot:?}");
            }
            let candidate = unused && children.all == 0;
            let stem = unused && children.all > 0 && children.idle == 0;
            let account = self.account(number);
            let classes = &self.room.classes;
            assert_eq!(classes.may_go(account, number), candidate, "the policy and slot {number}: {slot:?}");
            assert_eq!(classes.is_stem(account, number), stem, "the stems and slot {number}: {slot:?}");
            if published {
                let (blocks, resting) = accounts.entry(account).or_default();
                *blocks += 1;
                *resting += usize::from(unused);
            }
            idle += usize::from(unused);
            candidates += usize::from(candidate);
            stems += usize::from(stem);
        }
        assert_eq!(self.room.idle, idle, "the number of idle blocks has drifted");
        self.room.classes.check(&accounts);
        assert_eq!(self.room.classes.len(), candidates, "the policy has slots that are not there");
        assert_eq!(self.room.classes.stems(), stems, "there are stems that are not there");
        assert_eq!(self.room.orphans, families, "children of absent parents");
        let order = self.room.classes.coldest(usize::MAX);
        let distinct: BTreeSet<u32> = order.iter().copied().collect();
        assert!(distinct.len() == candidates && order.len() == candidates, "the order is not one of the candidates");
        let first = self.room.classes.coldest(7);
        assert!(order.starts_with(&first) && first.len() == candidates.min(7), "the first of them, asked for alone");
        let may_go = |&slot: &u32| self.room.classes.may_go(self.account(slot), slot);
        assert!(order.iter().all(may_go), "the order has more than the candidates");
    }
}

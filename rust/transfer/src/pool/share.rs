//! What a pool does for others that share its memory, and for a medium behind it.

use std::collections::VecDeque;

use super::slot::{Slot, State};
use super::{Holder, Lives, Place, Pool, Waiting, spare};
use crate::messages::GrantMode;
use crate::types::{BlockKey, Nanos, Owner, SlotRef};

impl<M: Lives> Pool<M> {
    /// Something is about to happen at `now`, for the so many-th time; the same for all pools that share memory.
    pub fn turn(&mut self, turn: u64, now: Nanos) {
        // In steps of 1/8 s the time wraps after 18 years.
        self.turn = (turn, (now >> 27) as u32);
    }

    /// How many slots it has.
    pub fn size(&self) -> u32 {
        (self.slots.len() - self.absent.len()) as u32
    }

    /// Most slots it can ever have. Returns who waits for more than that, and waits no more.
    pub fn set_limit(&mut self, limit: u32) -> Vec<Holder> {
        self.limit = limit;
        let fits = |waiting: &Waiting| waiting.wish.slots() + spare(waiting.mode) <= limit as usize;
        let (fit, never): (VecDeque<_>, VecDeque<_>) = self.waiting.drain(..).partition(fits);
        self.waiting = fit;
        never.iter().filter(|waiting| waiting.holder.client.is_some()).for_each(|waiting| {
            self.granted.remove(&waiting.holder.tag);
        });
        never.into_iter().map(|waiting| waiting.holder).collect()
    }

    /// It has so many more slots.
    pub fn grow(&mut self, count: u32) {
        let known = self.absent.len().min(count as usize);
        let back = self.absent.split_off(self.absent.len() - known);
        back.iter().for_each(|&slot| self.slots[slot as usize].state = State::Free);
        let first = self.slots.len() as u32;
        let new = first..first + (count - known as u32);
        // Just so many: what may never be used is not kept ready.
        self.slots.reserve_exact(new.len());
        self.slots.extend(new.clone().map(|_| Slot::new()));
        new.rev().chain(back).for_each(|slot| self.free.push(&mut self.slots, slot));
    }

    /// How many slots it could give up now: one that may be had stays, for staging.
    pub fn givable(&self) -> usize {
        (self.free.len() + self.room.idle()).saturating_sub(1)
    }

    /// How many slots are empty.
    pub fn empty(&self) -> usize {
        self.free.len()
    }

    /// When the block that it would evict next was last used; for ever, if that is not known.
    pub fn coldest_use(&self) -> u64 {
        self.coldest(1).first().and_then(|&slot| self.slots[slot as usize].used()).map_or(u64::MAX, u64::from)
    }

    /// Since when the first of those who wait for room do, in turns.
    pub fn waits_since(&self) -> Option<u64> {
        let of = |staging: bool| {
            let mut kind = self.waiting.iter().filter(move |waiting| (waiting.mode == GrantMode::Staging) == staging);
            kind.find(|waiting| waiting.blocked.is_none())
        };
        [of(true), of(false)].into_iter().flatten().map(|waiting| waiting.since).min()
    }

    /// Gives up an empty slot, or that of the block that it would evict next. `None`: it has neither, or somebody
    /// still touches the victim, which waits in quarantine.
    pub fn give_up(&mut self) -> Option<u32> {
        if self.free.len() == 0 {
            self.make_room(1);
        }
        let slot = self.free.pop(&self.slots)?;
        self.slots[slot as usize].state = State::Absent;
        self.absent.push(slot);
        Some(slot)
    }

    // -- for a medium behind this one --------------------------------------------------------------------------------

    /// From now on, [`Pool::take_hits`] is called after every input.
    pub fn watch_hits(&mut self) {
        self.hits = Some(Vec::new());
    }

    /// From now on, or no more, only what is on another medium makes room: the rest has to get there first.
    pub fn keep_dirty(&mut self, keep: bool) {
        self.room.keep_dirty(keep);
    }

    /// The published blocks that were found since the last call, and are on no other medium.
    pub fn take_hits(&mut self) -> Vec<SlotRef> {
        let hits = self.hits.as_mut().map(std::mem::take).unwrap_or_default();
        hits.into_iter().filter(|&slot| self.is_dirty(slot)).map(|slot| self.life(slot)).collect()
    }

    /// A block that is published here is, or is not any more, on another medium.
    pub fn set_clean(&mut self, key: &BlockKey, clean: bool) {
        if let Some(slot) = self.at(key) {
            self.slots[slot as usize].clean = clean;
        }
    }

    /// What is known of a published block.
    pub fn describe(&self, slot: SlotRef) -> Option<(Place, Owner)> {
        let record = self.slots.get(slot.slot as usize)?;
        let published = record.generation == slot.generation && record.is_published();
        record.place().filter(|_| published).map(|place| (place, self.owners.get(record.owner)))
    }

    /// How many slots the next grant may take at once, as the largest ones did lately.
    pub fn demand(&self) -> usize {
        self.demand
    }

    /// Of so many blocks that are about to be evicted, those that are on no other medium.
    pub fn dirty_victims(&self, limit: usize) -> Vec<SlotRef> {
        let mut victims = Vec::new();
        let mut looked = 0;
        for slot in self.coldest(limit) {
            // A prefix goes from its tail at one stretch, as far as nobody uses it.
            let mut next = Some(slot);
            while let Some(slot) = next.filter(|&slot| looked < limit && self.slots[slot as usize].idle) {
                looked += 1;
                if self.is_dirty(slot) {
                    victims.push(self.life(slot));
                }
                let place = self.slots[slot as usize].place().filter(|place| place.position > 0);
                next = place.and_then(|place| self.at(&place.parent));
                next = next.filter(|&parent| {
                    let other = self.slots[parent as usize].place();
                    place.zip(other).is_some_and(|(place, other)| other.position + 1 == place.position)
                });
            }
        }
        victims.sort_unstable();
        victims.dedup();
        victims
    }

    /// All published blocks that are on no other medium, and when they were used last.
    pub fn dirty(&self) -> Vec<(u32, SlotRef)> {
        let dirty = (0..self.slots()).filter(|&slot| self.is_dirty(slot));
        // What somebody holds is in use now.
        let used = |record: &Slot| record.used().unwrap_or(u32::MAX);
        dirty.map(|slot| (used(&self.slots[slot as usize]), self.life(slot))).collect()
    }

    fn is_dirty(&self, slot: u32) -> bool {
        let record = &self.slots[slot as usize];
        record.is_published() && !record.clean
    }
}

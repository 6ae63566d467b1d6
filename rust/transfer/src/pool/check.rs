//! The laws of a pool.

use std::collections::HashSet;

use super::slot::State;
use super::{Held, Holder, Lives, Pool};
use crate::messages::GrantMode;

impl<M: Lives> Pool<M> {
    /// Asserts every invariant of the pool.
    ///
    /// # Panics
    /// If one does not hold.
    pub fn check(&self) {
        let mut pins = vec![0u32; self.slots.len()];
        for (holder, held) in &self.held {
            assert!(held.grant.is_some() || !held.looked.is_empty(), "{holder:?} holds nothing");
            for &slot in held.grant.iter().flatten().chain(&held.looked) {
                pins[slot as usize] += 1;
            }
            if let (Some(client), Some(_)) = (holder.client, &held.grant) {
                assert_eq!(self.granted.get(&holder.tag), Some(&client), "{holder:?} is not known by its tag");
            }
        }
        let clients = |holder: &Holder, held: &Held| holder.client.is_some() && held.grant.is_some();
        let known = self.held.iter().filter(|(holder, held)| clients(holder, held)).count()
            + self.waiting.iter().filter(|waiting| waiting.holder.client.is_some()).count();
        assert_eq!(self.granted.len(), known, "a tag is known without a grant");
        let mut writers = vec![0u16; self.slots.len()];
        self.writers.values().flatten().for_each(|&slot| writers[slot as usize] += 1);
        let free: HashSet<u32> = self.free.iter(&self.slots).collect();
        assert_eq!(free.len(), self.free.len(), "a slot is free twice");
        let mut absent: HashSet<u32> = self.absent.iter().copied().collect();
        assert_eq!(absent.len(), self.absent.len(), "a slot was given up twice");
        let mut published = 0;
        let mut xor = [0; 16];
        for (number, slot) in (0..).zip(&self.slots) {
            assert_eq!(slot.pins(), pins[number as usize], "pins of slot {number}: {slot:?}");
            assert_eq!(slot.writers, writers[number as usize], "writers of slot {number}: {slot:?}");
            assert_eq!(slot.state == State::Free, free.contains(&number), "free list and slot {number}: {slot:?}");
            let quarantined = self.quarantine.contains(&number);
            assert_eq!(slot.state == State::Quarantine, quarantined, "quarantine and slot {number}: {slot:?}");
            let viewed = self.viewed.contains(&number);
            assert!(!viewed || matches!(slot.state, State::Committed { .. }), "slot {number} is viewed and {slot:?}");
            let referenced = slot.pins() > 0 || slot.reads > 0 || viewed;
            match slot.state {
                State::Free => {
                    assert!(!referenced && slot.writers == 0 && self.memory.quiet(number), "slot {number} is not free");
                }
                State::Quarantine => assert!(!referenced, "slot {number} is quarantined and referenced"),
                State::Absent => {
                    assert!(
                        !referenced && slot.writers == 0 && self.memory.quiet(number),
                        "slot {number} is not given up"
                    );
                    assert!(absent.remove(&number), "slot {number} was not given up");
                }
                State::Reserved => {
                    // Copies may read what of it is written, to their end.
                    let let_go = slot.pins() == 0 && slot.reads > 0;
                    assert!(slot.pins() == 1 || let_go, "slot {number} is reserved once");
                }
                State::Committed { published: true } => {
                    let place = slot.place().expect("a published block has a place");
                    assert_eq!(self.at(&place.key), Some(number), "the index does not lead to slot {number}");
                    published += 1;
                    xor.iter_mut().zip(place.key.0).for_each(|(sum, byte)| *sum ^= byte);
                }
                State::Committed { published: false } => {
                    assert!(referenced && !slot.clean, "slot {number} serves nobody")
                }
            }
        }
        assert!(absent.is_empty(), "given up, and not: {absent:?}");
        assert_eq!(self.index.len(), published, "the index and the published slots differ");
        assert_eq!(self.xor, xor, "the XOR of the keys has drifted");
        self.owners.check(self.slots.iter());
        self.check_room();
        let has_grant = |holder: &Holder| self.held.get(holder).is_some_and(|held| held.grant.is_some());
        assert!(self.own.iter().all(has_grant), "slots of the node's own that nobody holds");
        assert!(self.waiting.len() <= self.waiting_limit, "too many grants wait");
        let staging = self.waiting.iter().map(|waiting| waiting.mode == GrantMode::Staging);
        assert!(staging.is_sorted_by(|before, after| before >= after), "a staging grant waits behind another kind");
    }
}

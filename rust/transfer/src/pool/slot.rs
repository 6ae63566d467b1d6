//! What a pool keeps of one slot, and of whom its blocks are: a few bytes each, as a node may have millions.

use std::collections::HashMap;

use super::Place;
use super::room::{Kin, Role};
use crate::types::{BlockKey, Owner, SlotRef};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Free,
    Reserved,
    /// A private block has no place. Published: the index leads here.
    Committed {
        published: bool,
    },
    Quarantine,
    /// Given up.
    Absent,
}

/// Where a private block stands.
const NOWHERE: u32 = u32::MAX;

/// One slot: 72 bytes.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    key: BlockKey,
    parent: BlockKey,
    position: u32,
    /// Of its life, or of the last one.
    pub generation: u32,
    /// References of holders.
    pub pins: u32,
    /// When it was last let go of, on the clock of [`super::Pool::turn`].
    pub used: u32,
    /// Number of whose block it is, see [`Owners`].
    pub owner: u32,
    pub kin: Kin,
    /// Copies that read it.
    pub reads: u16,
    /// Local clients, other than the holder, that may write it.
    pub writers: u16,
    pub state: State,
    /// Published, and on another medium too.
    pub clean: bool,
    /// Published, and nobody refers to it.
    pub idle: bool,
    /// Whether it may go.
    pub role: Role,
}

impl Slot {
    pub fn new() -> Self {
        let nothing = BlockKey([0; 16]);
        Self {
            key: nothing,
            parent: nothing,
            position: NOWHERE,
            generation: 0,
            pins: 0,
            used: 0,
            owner: Owners::NOBODY,
            kin: Kin::default(),
            reads: 0,
            writers: 0,
            state: State::Free,
            clean: false,
            idle: false,
            role: Role::default(),
        }
    }

    /// A new life of it, held once.
    pub fn reserved(life: SlotRef, place: Option<Place>, owner: u32) -> Self {
        let mut slot = Self { generation: life.generation, state: State::Reserved, pins: 1, owner, ..Self::new() };
        slot.set_place(place);
        slot
    }

    /// What it is (or will be), `None` for a private block.
    pub fn place(&self) -> Option<Place> {
        let Self { key, parent, position, .. } = *self;
        (position != NOWHERE).then_some(Place { key, parent, position })
    }

    /// No position of a wish is the highest number: the one behind it is a number too.
    pub fn set_place(&mut self, place: Option<Place>) {
        match place {
            Some(Place { key, parent, position }) => {
                (self.key, self.parent, self.position) = (key, parent, position);
            }
            None => self.position = NOWHERE,
        }
    }

    pub fn is_published(&self) -> bool {
        self.state == State::Committed { published: true }
    }
}

/// Whose blocks there are: an owner has a number while any slot is his.
#[derive(Debug, Default)]
pub(super) struct Owners {
    /// By number, with how many slots are his.
    known: Vec<(Owner, u32)>,
    numbers: HashMap<Owner, u32>,
    free: Vec<u32>,
}

impl Owners {
    /// The owner of a slot with no block.
    pub const NOBODY: u32 = u32::MAX;

    /// One more slot is his.
    pub fn add(&mut self, owner: Owner) -> u32 {
        let number = *self.numbers.entry(owner).or_insert_with(|| {
            self.free.pop().unwrap_or_else(|| {
                self.known.push((owner, 0));
                self.known.len() as u32 - 1
            })
        });
        let (his, slots) = &mut self.known[number as usize];
        (*his, *slots) = (owner, *slots + 1);
        number
    }

    /// One slot less is.
    pub fn remove(&mut self, number: u32) {
        if let Some((owner, slots)) = self.known.get_mut(number as usize) {
            *slots -= 1;
            if *slots == 0 {
                self.numbers.remove(owner);
                self.free.push(number);
            }
        }
    }

    pub fn get(&self, number: u32) -> Owner {
        self.known.get(number as usize).map_or(Owner::default(), |(owner, _)| *owner)
    }

    /// Asserts that it counts right.
    pub fn check<'a>(&self, slots: impl Iterator<Item = &'a Slot>) {
        let mut counts = vec![0; self.known.len()];
        slots.filter(|slot| slot.owner != Self::NOBODY).for_each(|slot| counts[slot.owner as usize] += 1);
        assert!(counts.iter().zip(&self.known).all(|(count, (_, slots))| count == slots), "slots by owner");
        assert_eq!(self.numbers.len(), counts.iter().filter(|count| **count > 0).count(), "owners");
    }
}

//! What a pool keeps of one slot, and of whom its blocks are: a few bytes each, as a node may have millions.

use std::collections::HashMap;
use std::sync::Arc;

use super::Place;
use super::account::{Account, Accounts, EVERYBODY};
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

/// Copies that may read one slot at once: all that two bytes of it can count.
pub const COPIES_AT_ONCE: u16 = u16::MAX;

/// Where a private block stands.
const NOWHERE: u32 = u32::MAX;

/// One slot: 68 bytes.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    key: BlockKey,
    parent: BlockKey,
    position: u32,
    /// Of its life, or of the last one.
    pub generation: u32,
    /// References of holders. While the slot is idle, of which there are none: when it was last let go of, on the clock of
    /// [`super::Pool::turn`].
    pins_or_used: u32,
    /// Number of whose block it is, see [`Owners`].
    pub owner: u32,
    pub kin: Kin,
    /// Copies that read it, [`COPIES_AT_ONCE`] at most.
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
            pins_or_used: 0,
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
        let mut slot =
            Self { generation: life.generation, state: State::Reserved, pins_or_used: 1, owner, ..Self::new() };
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

    /// References of holders.
    pub fn pins(&self) -> u32 {
        if self.idle { 0 } else { self.pins_or_used }
    }

    /// One reference more, or one less, of a slot that is not idle.
    pub fn pin(&mut self, more: bool) {
        self.pins_or_used = if more { self.pins_or_used + 1 } else { self.pins_or_used - 1 };
    }

    /// When it was last let go of; `None` while it is in use.
    pub fn used(&self) -> Option<u32> {
        self.idle.then_some(self.pins_or_used)
    }

    /// Nobody refers to it, from this time on.
    pub fn rest(&mut self, now: u32) {
        (self.idle, self.pins_or_used) = (true, now);
    }

    /// Somebody does, or will. True if it was idle.
    pub fn wake(&mut self) -> bool {
        if self.idle {
            (self.idle, self.pins_or_used) = (false, 0);
            return true;
        }
        false
    }

    pub fn is_published(&self) -> bool {
        self.state == State::Committed { published: true }
    }
}

/// The empty slots, the one that was emptied last first: joined through the slots, which have nothing else to say.
#[derive(Debug)]
pub(super) struct FreeList {
    first: u32,
    count: usize,
}

impl FreeList {
    const END: u32 = u32::MAX;

    pub fn new() -> Self {
        Self { first: Self::END, count: 0 }
    }

    pub fn len(&self) -> usize {
        self.count
    }

    pub fn push(&mut self, slots: &mut [Slot], slot: u32) {
        slots[slot as usize].kin.set_next(std::mem::replace(&mut self.first, slot));
        self.count += 1;
    }

    pub fn pop(&mut self, slots: &[Slot]) -> Option<u32> {
        let slot = (self.first != Self::END).then_some(self.first)?;
        self.first = slots[slot as usize].kin.next();
        self.count -= 1;
        Some(slot)
    }

    /// All of them; one more than there are if they are not as many as were counted.
    pub fn iter<'a>(&self, slots: &'a [Slot]) -> impl Iterator<Item = u32> + 'a {
        let first = (self.first != Self::END).then_some(self.first);
        let next = |&slot: &u32| Some(slots[slot as usize].kin.next()).filter(|&next| next != Self::END);
        std::iter::successors(first, next).take(self.count + 1)
    }
}

/// Whose blocks there are: an owner has a number while any slot is his.
#[derive(Debug)]
pub(super) struct Owners {
    /// By number.
    known: Vec<Known>,
    numbers: HashMap<Owner, u32>,
    free: Vec<u32>,
    pub accounts: Arc<Accounts>,
    /// Of a slot, as accounts are charged.
    slot_bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    owner: Owner,
    slots: u32,
    account: Account,
}

impl Owners {
    /// The owner of a slot with no block.
    pub const NOBODY: u32 = u32::MAX;

    /// None yet.
    pub fn new(accounts: Arc<Accounts>, slot_bytes: u64) -> Self {
        Self { known: Vec::new(), numbers: HashMap::new(), free: Vec::new(), accounts, slot_bytes }
    }

    /// One more slot is his.
    pub fn add(&mut self, owner: Owner) -> u32 {
        let number = *self.numbers.entry(owner).or_insert_with(|| {
            let known = Known { owner, slots: 0, account: self.accounts.enter(owner) };
            match self.free.pop() {
                Some(number) => {
                    self.known[number as usize] = known;
                    number
                }
                None => {
                    self.known.push(known);
                    self.known.len() as u32 - 1
                }
            }
        });
        let known = &mut self.known[number as usize];
        known.slots += 1;
        self.accounts.charge(known.account, self.slot_bytes);
        number
    }

    /// One slot less is.
    pub fn remove(&mut self, number: u32) {
        if let Some(known) = self.known.get_mut(number as usize) {
            known.slots -= 1;
            self.accounts.discharge(known.account, self.slot_bytes);
            if known.slots == 0 {
                self.accounts.leave(known.account);
                self.numbers.remove(&known.owner);
                self.free.push(number);
            }
        }
    }

    pub fn get(&self, number: u32) -> Owner {
        self.known.get(number as usize).map_or(Owner::default(), |known| known.owner)
    }

    /// The account of an owner who has slots.
    pub fn account(&self, number: u32) -> Account {
        self.known.get(number as usize).map_or(EVERYBODY, |known| known.account)
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Bytes that are charged, by account.
    pub fn charged(&self) -> impl Iterator<Item = (Account, u64)> {
        self.known.iter().map(|known| (known.account, u64::from(known.slots) * self.slot_bytes))
    }

    /// Asserts that it counts right.
    pub fn check<'a>(&self, slots: impl Iterator<Item = &'a Slot>) {
        let mut counts = vec![0; self.known.len()];
        slots.filter(|slot| slot.owner != Self::NOBODY).for_each(|slot| counts[slot.owner as usize] += 1);
        assert!(counts.iter().zip(&self.known).all(|(count, known)| *count == known.slots), "slots by owner");
        assert_eq!(self.numbers.len(), counts.iter().filter(|count| **count > 0).count(), "owners");
    }
}

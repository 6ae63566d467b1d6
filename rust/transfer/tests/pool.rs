//! The pool against a naive model.
//!
//! Goal: grants are all or nothing and in order, pinned and uncommitted blocks are never evicted, a slot is handed out
//! only when nobody can write it, and the reported changes add up to what is published.
//! Method: random operations (proptest shrinks a failing sequence); the model keeps plain maps; `Pool::check` runs
//! after every operation. The memory behind the numbers is a twin that lets the test hold slots.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use proptest::prelude::*;
use pyengine_transfer::messages::{GrantMode, GrantedSlot, Refusal};
use pyengine_transfer::pool::policy::cost::Costs;
use pyengine_transfer::pool::policy::{Evict, POLICIES, Policy};
use pyengine_transfer::pool::{COPIES_AT_ONCE, Change, Granting, Holder, Lives, Occupancy, Pool, Wish};
use pyengine_transfer::types::{BlockKey, Owner, SlotRef, Tag};

const SLOTS: u32 = 8;
const WAITING_LIMIT: usize = 4;
const ROOT: BlockKey = BlockKey([0; 16]);
const OWNER: Owner = Owner { namespace: 3, tenant: 4 };

/// Memory without bytes; `held` slots are being written by somebody.
#[derive(Default)]
struct Twin {
    lives: BTreeMap<u32, u32>,
    open: BTreeSet<u32>,
    held: BTreeSet<u32>,
}

#[derive(Clone, Default)]
struct Memory(Rc<RefCell<Twin>>);

impl Lives for Memory {
    fn issue(&self, slot: u32) -> SlotRef {
        let mut twin = self.0.borrow_mut();
        assert!(!twin.held.contains(&slot), "slot {slot} is handed out while somebody writes it");
        assert!(twin.open.insert(slot), "slot {slot} is handed out while its life goes on");
        let generation = twin.lives.entry(slot).or_default();
        *generation += 1;
        SlotRef { slot, generation: *generation }
    }

    fn seal(&self, slot: SlotRef) -> bool {
        !self.0.borrow().held.contains(&slot.slot)
    }

    fn retire(&self, slot: SlotRef) {
        let mut twin = self.0.borrow_mut();
        assert_eq!(twin.lives[&slot.slot], slot.generation);
        assert!(twin.open.remove(&slot.slot), "slot {slot:?} is retired twice");
    }

    fn quiet(&self, slot: u32) -> bool {
        !self.0.borrow().held.contains(&slot)
    }
}

#[derive(Clone, Debug)]
enum Op {
    Grant { holder: u8, prefix: u8, from: u8, length: u8, private: bool, mode: u8 },
    Lookup { holder: u8, prefix: u8, length: u8 },
    Commit { holder: u8, index: u32 },
    Release { holder: u8, end: bool },
    AddWriter { holder: u8, writer: u8 },
    RemoveWriter { writer: u8 },
    BeginCopy { holder: u8, index: u32 },
    EndCopy { which: usize },
    Unpublish { holder: u8, index: u32 },
    Touch { slot: u32 },
    Untouch { slot: u32 },
}

fn ops() -> impl Strategy<Value = Op> {
    let holder = 0..6u8;
    prop_oneof![
        4 => (holder.clone(), 0..3u8, 0..2u8, 0..5u8, any::<bool>(), 0..5u8).prop_map(
            |(holder, prefix, from, length, private, mode)| Op::Grant { holder, prefix, from, length, private, mode }
        ),
        1 => (holder.clone(), 0..3u8, 0..5u8).prop_map(|(holder, prefix, length)| Op::Lookup { holder, prefix, length }),
        8 => (holder.clone(), 0..5u32).prop_map(|(holder, index)| Op::Commit { holder, index }),
        4 => (holder.clone(), any::<bool>()).prop_map(|(holder, end)| Op::Release { holder, end }),
        1 => (holder.clone(), 0..2u8).prop_map(|(holder, writer)| Op::AddWriter { holder, writer }),
        1 => (0..2u8).prop_map(|writer| Op::RemoveWriter { writer }),
        1 => (holder.clone(), 0..5u32).prop_map(|(holder, index)| Op::BeginCopy { holder, index }),
        1 => any::<usize>().prop_map(|which| Op::EndCopy { which }),
        1 => (holder, 0..5u32).prop_map(|(holder, index)| Op::Unpublish { holder, index }),
        1 => (0..SLOTS).prop_map(|slot| Op::Touch { slot }),
        2 => (0..SLOTS).prop_map(|slot| Op::Untouch { slot }),
    ]
}

fn key(prefix: u8, position: u8) -> BlockKey {
    let mut bytes = [7; 16];
    (bytes[0], bytes[1]) = (prefix, position);
    BlockKey(bytes)
}

struct Model {
    pool: Pool<Memory>,
    memory: Memory,
    /// The life of each holder number: an ended tag is never used again.
    lives: BTreeMap<u8, u32>,
    wishes: BTreeMap<u8, Wish>,
    held: BTreeMap<u8, Vec<GrantedSlot>>,
    /// In the order of granting: staging first, each kind in the order in which they began to wait.
    waiting: Vec<(u8, GrantMode)>,
    published: BTreeMap<BlockKey, u32>,
    copies: Vec<SlotRef>,
}

impl Model {
    fn holder(&self, number: u8) -> Holder {
        let request = u64::from(number);
        let attempt = self.lives.get(&number).copied().unwrap_or(0);
        Holder { client: Some(request), tag: Tag { request, attempt, worker: 1 } }
    }

    fn waits(&self, holder: u8) -> bool {
        self.waiting.iter().any(|(waiting, _)| *waiting == holder)
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Grant { holder, prefix, from, length, private, mode } => {
                let mode = [GrantMode::Wait, GrantMode::Wait, GrantMode::Now, GrantMode::Now, GrantMode::Staging]
                    [usize::from(mode)];
                // Staging is for one block.
                let (length, private) = if mode == GrantMode::Staging { (0, true) } else { (length, private) };
                self.grant(holder, prefix, from, length, private, mode);
            }
            Op::Lookup { holder, prefix, length } => {
                let keys: Vec<BlockKey> = (0..length).map(|position| key(prefix, position)).collect();
                let expected: Vec<u32> = keys.iter().map_while(|key| self.published.get(key).copied()).collect();
                let found = self.pool.lookup(self.holder(holder), &keys);
                let found: Vec<u32> = found.iter().map(|slot| slot.slot).collect();
                // It may stop early, to leave one slot to staging.
                assert!(expected.starts_with(&found), "{found:?} of {expected:?}");
                let Occupancy { free, cached, .. } = self.pool.occupancy();
                let next_takes_room = || {
                    let next = expected[found.len()];
                    !self.held.values().flatten().any(|slot| slot.slot.slot == next)
                };
                let for_staging = free + cached <= 1;
                assert!(
                    found == expected || (for_staging && next_takes_room()),
                    "a lookup stopped early for no reason"
                );
            }
            Op::Commit { holder, index } => self.commit(holder, index),
            Op::Release { holder, end } => {
                let had = self.pool.release(self.holder(holder));
                let waited = self.waits(holder);
                self.waiting.retain(|(waiting, _)| *waiting != holder);
                assert_eq!(had, self.held.remove(&holder).is_some() || waited);
                self.wishes.remove(&holder);
                if end {
                    let ended = self.holder(holder);
                    self.pool.end(ended.tag);
                    let wish = Wish { keys: vec![], private: false, parent: ROOT, position: 0, owner: OWNER };
                    let again = self.pool.grant(ended, wish, GrantMode::Wait);
                    assert_eq!(again, Granting::Refused(Refusal::Ended));
                    *self.lives.entry(holder).or_default() += 1;
                }
            }
            Op::AddWriter { holder, writer } => {
                self.pool.add_writer(self.holder(holder), writer_of(writer));
            }
            Op::RemoveWriter { writer } => self.pool.remove_writer(writer_of(writer)),
            Op::BeginCopy { holder, index } => {
                if let Some(slot) = self.pool.granted_at(self.holder(holder), index) {
                    assert_eq!(self.pool.begin_copy(slot.slot), slot.committed);
                    if slot.committed {
                        self.copies.push(slot.slot);
                    }
                }
            }
            Op::EndCopy { which } => {
                if !self.copies.is_empty() {
                    let slot = self.copies.swap_remove(which % self.copies.len());
                    self.pool.end_copy(slot);
                }
            }
            Op::Unpublish { holder, index } => {
                if let Some(slot) = self.pool.granted_at(self.holder(holder), index) {
                    let was = self.published.values().any(|published| *published == slot.slot.slot);
                    assert_eq!(self.pool.unpublish(slot.slot), was);
                }
            }
            Op::Touch { slot } => {
                // Only an uncommitted slot can be taken for writing.
                let mut reserved = self.held.keys().flat_map(|&holder| self.pool.granted(self.holder(holder)));
                if reserved.any(|slots| slots.iter().any(|held| held.slot.slot == slot && !held.committed)) {
                    self.memory.0.borrow_mut().held.insert(slot);
                }
            }
            Op::Untouch { slot } => {
                self.memory.0.borrow_mut().held.remove(&slot);
            }
        }
        self.settle();
    }

    fn grant(&mut self, holder: u8, prefix: u8, from: u8, length: u8, private: bool, mode: GrantMode) {
        let keys: Vec<BlockKey> = (from..from + length).map(|position| key(prefix, position)).collect();
        let parent = if from == 0 { ROOT } else { key(prefix, from - 1) };
        let wish = Wish { keys, private, parent, position: from.into(), owner: OWNER };
        let busy = self.held.contains_key(&holder) || self.waits(holder);
        match self.pool.grant(self.holder(holder), wish.clone(), mode) {
            Granting::Held(slots) => {
                assert!(!busy);
                self.expect_granted(holder, wish, slots);
            }
            Granting::Waiting => {
                assert!(mode != GrantMode::Now && !busy);
                let place = match mode {
                    GrantMode::Staging => {
                        self.waiting.iter().take_while(|(_, mode)| *mode == GrantMode::Staging).count()
                    }
                    GrantMode::Wait | GrantMode::Now => self.waiting.len(),
                };
                self.waiting.insert(place, (holder, mode));
                self.wishes.insert(holder, wish);
            }
            Granting::Refused(Refusal::Protocol) => assert!(busy),
            Granting::Refused(refusal) => {
                assert_eq!(refusal, Refusal::Full);
                assert!(mode == GrantMode::Now || self.waiting.len() == WAITING_LIMIT, "there was room to wait");
            }
        }
    }

    fn expect_granted(&mut self, holder: u8, wish: Wish, slots: Vec<GrantedSlot>) {
        let holds = self.held.values().flatten().map(|slot| slot.slot.slot).collect::<BTreeSet<_>>();
        let copied = self.copies.iter().map(|slot| slot.slot).collect::<BTreeSet<_>>();
        assert_eq!(slots.len(), wish.keys.len() + usize::from(wish.private));
        for (index, slot) in slots.iter().enumerate() {
            let present = wish.keys.get(index).and_then(|key| self.published.get(key));
            assert_eq!(slot.committed, present.is_some(), "index {index}");
            match present {
                Some(present) => assert_eq!(slot.slot.slot, *present),
                None => {
                    let number = slot.slot.slot;
                    assert!(!holds.contains(&number) && !copied.contains(&number), "slot {number} is in use");
                }
            }
        }
        self.wishes.insert(holder, wish);
        self.held.insert(holder, slots);
    }

    fn commit(&mut self, holder: u8, index: u32) {
        let held = self.pool.granted_at(self.holder(holder), index);
        let outcome = self.pool.commit(self.holder(holder), index, None);
        let writing = |slot: GrantedSlot| self.memory.0.borrow().held.contains(&slot.slot.slot);
        match held {
            None => assert_eq!(outcome, Err(Refusal::Protocol)),
            Some(slot) if !slot.committed && writing(slot) => assert_eq!(outcome, Err(Refusal::Corrupt)),
            Some(_) => assert_eq!(outcome, Ok(())),
        }
    }

    /// Replays changes, takes new grants, and compares.
    fn settle(&mut self) {
        self.replay();
        for (holder, slots) in self.pool.advance() {
            // Victims of this grant are gone before it is looked at.
            self.replay();
            let number = holder.client.expect("a client") as u8;
            assert_eq!(self.waiting.remove(0).0, number, "the head of the queue goes first");
            let wish = self.wishes.remove(&number).expect("it waited");
            self.expect_granted(number, wish, slots);
        }
        self.replay();
        self.pool.check();
        let (count, _) = self.pool.digest();
        assert_eq!(count, self.published.len() as u64);
        let Occupancy { free, cached, .. } = self.pool.occupancy();
        if let Some((head, mode)) = self.waiting.first() {
            // All or nothing, but never nothing when all would fit.
            let wish = &self.wishes[head];
            let missing = wish.keys.iter().filter(|key| !self.published.contains_key(key)).count();
            let need = missing + usize::from(wish.private);
            let spared = wish.keys.len() - missing;
            // All but staging leave one slot to staging.
            let spare = usize::from(*mode != GrantMode::Staging);
            assert!(need + spared + spare > (free + cached) as usize, "the head waits though it fits");
        }
        for (number, slots) in &self.held {
            let now = self.pool.granted(self.holder(*number)).expect("still held");
            assert!(
                slots.iter().zip(&now).all(|(then, now)| then.slot == now.slot),
                "a held slot has changed its life"
            );
        }
    }

    fn replay(&mut self) {
        for change in self.pool.take_changes() {
            match change {
                Change::Stored(place) => {
                    let slot = self.pool.find(&place.key).map_or(u32::MAX, |slot| slot.slot);
                    assert!(self.published.insert(place.key, slot).is_none(), "stored twice");
                }
                Change::Removed(key) => assert!(self.published.remove(&key).is_some(), "removed what was not there"),
            }
        }
    }
}

fn writer_of(number: u8) -> Holder {
    Holder { client: Some(100 + u64::from(number)), tag: Tag { request: 1, attempt: 1, worker: 2 } }
}

fn model(policy: &Policy) -> Model {
    let memory = Memory::default();
    Model {
        pool: Pool::new(memory.clone(), SLOTS, WAITING_LIMIT, 1000, policy.make(&Costs::default())),
        memory,
        lives: BTreeMap::new(),
        wishes: BTreeMap::new(),
        held: BTreeMap::new(),
        waiting: Vec::new(),
        published: BTreeMap::new(),
        copies: Vec::new(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_operations(policy in 0..POLICIES.len(), ops in prop::collection::vec(ops(), 1..120)) {
        let mut model = model(&POLICIES[policy]);
        for op in ops {
            model.apply(op);
        }
        // Everybody lets go: nothing but the cache is left.
        for holder in 0..6 {
            model.apply(Op::Release { holder, end: true });
        }
        while !model.copies.is_empty() {
            model.apply(Op::EndCopy { which: 0 });
        }
        for writer in 0..2 {
            model.apply(Op::RemoveWriter { writer });
        }
        for slot in 0..SLOTS {
            model.apply(Op::Untouch { slot });
        }
        prop_assert!(model.pool.idle(), "{:?}", model.pool.occupancy());
    }
}

// -- what the random test cannot say in so few words -----------------------------------------------------------------

fn lru() -> Box<dyn Evict> {
    Policy::named("lru").expect("it is there").make(&Costs::default())
}

fn holder(number: u64) -> Holder {
    Holder { client: Some(number), tag: Tag { request: number, attempt: 0, worker: 1 } }
}

fn wish(prefix: u8, positions: std::ops::Range<u8>) -> Wish {
    let parent = if positions.start == 0 { ROOT } else { key(prefix, positions.start - 1) };
    let position = positions.start.into();
    let keys = positions.map(|position| key(prefix, position)).collect();
    Wish { keys, private: false, parent, position, owner: OWNER }
}

fn store(pool: &mut Pool<Memory>, number: u64, wish: Wish) {
    let count = wish.keys.len() as u32;
    assert!(matches!(pool.grant(holder(number), wish, GrantMode::Now), Granting::Held(_)));
    for index in 0..count {
        pool.commit(holder(number), index, None).expect("nobody writes it");
    }
    pool.release(holder(number));
    pool.check();
}

fn removed(pool: &mut Pool<Memory>) -> Vec<BlockKey> {
    let changes = pool.take_changes().into_iter();
    let removed = changes.filter_map(|change| match change {
        Change::Removed(key) => Some(key),
        Change::Stored(_) => None,
    });
    removed.collect()
}

// Goal: the tail of a prefix goes before its head, the oldest prefix before a newer one, and a block that was added
// to a prefix later renews the prefix. Method: fill the pool with two prefixes, then take its room block by block.
#[test]
fn tail_before_head() {
    let mut pool = Pool::new(Memory::default(), 7, 4, 10, lru());
    store(&mut pool, 1, wish(0, 0..3));
    store(&mut pool, 2, wish(1, 0..3));
    // One more block of the older prefix, granted without its ancestors.
    store(&mut pool, 3, wish(0, 3..4));
    pool.take_changes();
    let mut order = Vec::new();
    for number in 0..7 {
        let private = Wish { keys: vec![], private: true, parent: ROOT, position: 0, owner: OWNER };
        assert!(matches!(pool.grant(holder(10 + number), private, GrantMode::Staging), Granting::Held(_)));
        order.extend(removed(&mut pool));
        pool.check();
    }
    let expected = [(1, 2), (1, 1), (1, 0), (0, 3), (0, 2), (0, 1), (0, 0)];
    assert_eq!(order, expected.map(|(prefix, position)| key(prefix, position)));
}

// Goal: a block whose child is in use goes only when nothing else can, and then from the tail; and every block that nobody
// uses can be had. Method: pin the last block of the older prefix, published before its ancestors, and take all room.
#[test]
fn ancestors_of_a_block_in_use_go_last() {
    let mut pool = Pool::new(Memory::default(), 7, 4, 10, lru());
    for part in [3..4, 0..1, 2..3, 1..2] {
        store(&mut pool, 1, wish(0, part));
    }
    store(&mut pool, 2, wish(1, 0..3));
    assert_eq!(pool.coldest(9).len(), 2, "the tails");
    assert_eq!(pool.lookup(holder(3), &[key(0, 3)]).len(), 1);
    pool.take_changes();
    let mut order = Vec::new();
    for number in 0..6 {
        let private = Wish { keys: vec![], private: true, parent: ROOT, position: 0, owner: OWNER };
        assert!(matches!(pool.grant(holder(10 + number), private, GrantMode::Staging), Granting::Held(_)));
        order.extend(removed(&mut pool));
        pool.check();
    }
    let expected = [(1, 2), (1, 1), (1, 0), (0, 2), (0, 1), (0, 0)];
    assert_eq!(order, expected.map(|(prefix, position)| key(prefix, position)));
    assert!(pool.find(&key(0, 3)).is_some());
}

// Goal: blocks that are being read, to be written to a disk say, stay while others can go, as they would free nothing; where
// all are being read, a grant that does not wait costs no more of them than it wanted. Every policy does so. Method: hold
// all but two blocks, in the order in which they go; then all.
#[test]
fn blocks_that_are_read_go_last() {
    for policy in &POLICIES {
        let memory = Memory::default();
        let mut pool = Pool::new(memory.clone(), 12, 4, 10, policy.make(&Costs::default()));
        (0..12).for_each(|prefix| store(&mut pool, 1, wish(prefix, 0..1)));
        pool.take_changes();
        let order = pool.coldest(12);
        memory.0.borrow_mut().held.extend(&order[..10]);
        let granted = pool.grant(holder(2), wish(20, 0..2), GrantMode::Now);
        let Granting::Held(slots) = granted else { panic!("{policy:?}: {granted:?}") };
        let mut slots: Vec<u32> = slots.iter().map(|slot| slot.slot.slot).collect();
        slots.sort_unstable();
        let mut quiet = order[10..].to_vec();
        quiet.sort_unstable();
        assert_eq!(slots, quiet, "{policy:?}");
        pool.check();
        // All are being read now.
        pool.take_changes();
        assert_eq!(pool.grant(holder(3), wish(21, 0..3), GrantMode::Now), Granting::Refused(Refusal::Full));
        assert_eq!(removed(&mut pool).len(), 3, "{policy:?}");
        pool.check();
        // One who waits gets what he wants, when they are read no more.
        assert_eq!(pool.grant(holder(4), wish(22, 0..5), GrantMode::Wait), Granting::Waiting);
        assert_eq!(pool.advance(), []);
        memory.0.borrow_mut().held.clear();
        assert_eq!(pool.advance().len(), 1);
        pool.check();
    }
}

// Goal: keys that somebody made up, in a circle or with impossible positions, do not keep their slots for ever.
// Method: two blocks that name each other as parent, one that names itself, one at the last position there is.
#[test]
fn circles_can_be_evicted() {
    let mut pool = Pool::new(Memory::default(), 4, 4, 10, lru());
    let (a, b, last) = (key(0, 0), key(0, 1), u32::MAX - 1);
    for (number, (key, parent, position)) in [(a, b, 1), (b, a, 1), (key(1, 0), key(1, 0), 5)].into_iter().enumerate() {
        store(&mut pool, number as u64, Wish { keys: vec![key], private: false, parent, position, owner: OWNER });
    }
    store(&mut pool, 9, Wish { keys: vec![key(2, 0)], private: false, parent: ROOT, position: last, owner: OWNER });
    for number in 0..4 {
        let private = Wish { keys: vec![], private: true, parent: ROOT, position: 0, owner: OWNER };
        assert!(matches!(pool.grant(holder(10 + number), private, GrantMode::Staging), Granting::Held(_)));
        pool.check();
    }
}

// Goal: two who reserve one key both succeed; the first commit is published, the second serves its tag only and is
// freed with it. Method: interleave two grants of one key.
#[test]
fn one_key_two_reservations() {
    let mut pool = Pool::new(Memory::default(), 4, 4, 10, lru());
    for number in [1, 2] {
        assert!(matches!(pool.grant(holder(number), wish(0, 0..1), GrantMode::Now), Granting::Held(_)));
    }
    pool.commit(holder(2), 0, None).expect("nobody writes it");
    pool.commit(holder(1), 0, None).expect("nobody writes it");
    assert_eq!(pool.take_changes().len(), 1, "announced once");
    assert_eq!(pool.find(&key(0, 0)), pool.granted_at(holder(2), 0).map(|slot| slot.slot));
    pool.release(holder(1));
    assert_eq!(pool.occupancy(), Occupancy { free: 3, pinned: 1, ..Occupancy::default() });
    pool.release(holder(2));
    assert_eq!(pool.occupancy(), Occupancy { free: 3, cached: 1, ..Occupancy::default() });
    pool.check();
}

// Goal: a wish larger than the pool is refused at once, one that must wait keeps those behind it waiting, and one that
// takes no room goes through. Method: a pool of five slots, of which one is for staging.
#[test]
fn head_of_line_waits() {
    let mut pool = Pool::new(Memory::default(), 5, 2, 10, lru());
    assert_eq!(pool.grant(holder(1), wish(0, 0..5), GrantMode::Wait), Granting::Refused(Refusal::TooLarge));
    store(&mut pool, 1, wish(0, 0..1));
    assert!(matches!(pool.grant(holder(2), wish(1, 0..2), GrantMode::Wait), Granting::Held(_)));
    assert_eq!(pool.grant(holder(3), wish(2, 0..3), GrantMode::Wait), Granting::Waiting);
    assert_eq!(pool.grant(holder(4), wish(3, 0..1), GrantMode::Wait), Granting::Waiting);
    assert_eq!(pool.grant(holder(5), wish(4, 0..1), GrantMode::Now), Granting::Refused(Refusal::Full));
    assert_eq!(pool.grant(holder(6), wish(4, 0..1), GrantMode::Wait), Granting::Refused(Refusal::Full), "queue full");
    assert!(matches!(pool.grant(holder(7), wish(0, 0..1), GrantMode::Now), Granting::Held(_)), "takes no room");
    pool.release(holder(7));
    assert!(pool.advance().is_empty());
    pool.release(holder(2));
    let granted: Vec<_> = pool.advance().into_iter().map(|(holder, _)| holder).collect();
    assert_eq!(granted, [holder(3), holder(4)]);
    pool.check();
}

// Goal: what takes no room can be had when there is none left, not even the slot that is kept for staging.
// Method: pin all of a pool of three slots, then ask twice for a block that is pinned, and once for one that is not.
#[test]
fn pinned_once_more_from_a_full_pool() {
    let mut pool = Pool::new(Memory::default(), 3, 4, 10, lru());
    store(&mut pool, 1, wish(0, 0..2));
    assert_eq!(pool.lookup(holder(2), &wish(0, 0..2).keys).len(), 2);
    let one = Wish { keys: vec![], private: true, parent: ROOT, position: 0, owner: OWNER };
    assert!(matches!(pool.grant(holder(3), one, GrantMode::Staging), Granting::Held(_)));
    assert_eq!(pool.occupancy(), Occupancy { pinned: 2, reserved: 1, ..Occupancy::default() });
    assert_eq!(pool.lookup(holder(4), &wish(0, 0..2).keys).len(), 2);
    assert!(matches!(pool.grant(holder(5), wish(0, 0..2), GrantMode::Now), Granting::Held(_)));
    assert_eq!(pool.grant(holder(6), wish(0, 0..3), GrantMode::Now), Granting::Refused(Refusal::TooLarge));
    assert_eq!(pool.grant(holder(6), wish(0, 1..3), GrantMode::Now), Granting::Refused(Refusal::Full));
    pool.check();
}

// Goal: the last slot is for staging, which overtakes those who may wait for others, and its own kind keeps its order.
// Method: fill a pool of three slots but for the last, then queue one of each kind.
#[test]
fn last_slot_is_for_staging() {
    let mut pool = Pool::new(Memory::default(), 3, 4, 10, lru());
    let one = || Wish { keys: vec![], private: true, parent: ROOT, position: 0, owner: OWNER };
    assert!(matches!(pool.grant(holder(1), wish(0, 0..2), GrantMode::Wait), Granting::Held(_)));
    assert_eq!(pool.grant(holder(2), one(), GrantMode::Wait), Granting::Waiting);
    assert!(matches!(pool.grant(holder(3), one(), GrantMode::Staging), Granting::Held(_)));
    assert_eq!(pool.grant(holder(4), one(), GrantMode::Staging), Granting::Waiting);
    assert_eq!(pool.grant(holder(5), one(), GrantMode::Staging), Granting::Waiting);
    pool.release(holder(3));
    assert_eq!(pool.advance().iter().map(|(holder, _)| *holder).collect::<Vec<_>>(), [holder(4)]);
    pool.release(holder(4));
    pool.release(holder(1));
    assert_eq!(pool.advance().iter().map(|(holder, _)| *holder).collect::<Vec<_>>(), [holder(5), holder(2)]);
    pool.check();
}

// Goal: a block has room for so many copies and no more, committed or being written; one more is refused, changes
// nothing, and is begun when one of them has ended. Method: begin as many as can be counted.
#[test]
fn copies_of_a_block_are_counted_to_their_limit() {
    let mut pool = Pool::new(Memory::default(), 3, 4, 10, lru());
    store(&mut pool, 1, wish(0, 0..1));
    assert!(matches!(pool.grant(holder(2), wish(0, 0..2), GrantMode::Now), Granting::Held(_)));
    for index in 0..2 {
        let slot = pool.granted_at(holder(2), index).expect("it was granted").slot;
        for _ in 0..COPIES_AT_ONCE {
            assert!(pool.may_copy(slot).is_ok() && pool.begin_copy_written(slot));
        }
        for _ in 0..2 {
            assert!(pool.may_copy(slot).is_err() && !pool.begin_copy_written(slot) && !pool.begin_copy(slot));
        }
        pool.check();
        pool.end_copy(slot);
        assert!(pool.may_copy(slot).is_ok() && pool.begin_copy_written(slot) && pool.may_copy(slot).is_err());
        (0..COPIES_AT_ONCE).for_each(|_| pool.end_copy(slot));
    }
    pool.release(holder(2));
    assert_eq!(pool.occupancy(), Occupancy { free: 2, cached: 1, ..Occupancy::default() });
    pool.check();
}

// Goal: who asks whether a copy may begin learns why not: "full" is said only where waiting helps.
// Method: a reserved and a committed block, a slot that holds another life, one that is free, and one whose reads are
// as many as can be counted.
#[test]
fn a_copy_is_refused_for_what_it_lacks() {
    let mut pool = Pool::new(Memory::default(), 4, 4, 10, lru());
    assert!(matches!(pool.grant(holder(1), wish(0, 0..1), GrantMode::Now), Granting::Held(_)));
    let slot = pool.granted_at(holder(1), 0).expect("it was granted").slot;
    assert_eq!(pool.may_copy(slot), Ok(()), "its holder has written strips of it");
    pool.commit(holder(1), 0, None).expect("nobody writes it");
    for _ in 0..COPIES_AT_ONCE {
        assert_eq!(pool.may_copy(slot), Ok(()));
        assert!(pool.begin_copy_written(slot));
    }
    assert_eq!(pool.may_copy(slot), Err(Refusal::Full));
    assert!(!pool.begin_copy_written(slot));
    let other = SlotRef { generation: slot.generation + 1, ..slot };
    let free = SlotRef { slot: (slot.slot + 1) % 4, generation: 0 };
    let beyond = SlotRef { slot: 4, ..slot };
    for lost in [other, free, beyond] {
        assert_eq!(pool.may_copy(lost), Err(Refusal::Missing), "{lost:?}");
    }
    (0..COPIES_AT_ONCE).for_each(|_| pool.end_copy(slot));
    assert_eq!(pool.may_copy(slot), Ok(()));
    pool.check();
}

//! The order in which blocks go: one policy over all of them, or one for each account, of which the heaviest gives first.
//!
//! A policy knows nothing of accounts. Where there are several, each has a policy of its own, in which blocks have numbers of
//! their own, dense from 0, so that what all policies take together is what one would: 8 bytes a block more are spent on
//! the numbers.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::fmt;
use std::sync::Arc;

use super::Place;
use super::account::{Account, Accounts};
use super::policy::ranks::{cover, shrink};
use super::policy::{Evict, Gone};

/// How far a victim is looked for that nobody reads: usually the next few; at most twice as many as are written at once.
const LOOKS: [usize; 3] = [8, 64, 512];

/// How many victims an account is asked for first, when several are.
const FIRST_ASKED: usize = 4;

/// Makes a policy for one more account.
pub(super) type Make = Box<dyn Fn() -> Box<dyn Evict> + Send>;

/// The order over an account's blocks.
#[derive(Debug)]
struct Class {
    policy: Box<dyn Evict>,
    /// Its published blocks, by the number that they have in the policy.
    slots: Vec<u32>,
    /// How many of them are idle.
    idle: usize,
    /// Of those that go when there is no candidate: in the order in which they are taken.
    stems: BTreeSet<u32>,
}

impl Class {
    fn may_give(&self) -> bool {
        !self.policy.is_empty() || !self.stems.is_empty()
    }
}

/// An order for each account.
struct Apart {
    accounts: Arc<Accounts>,
    slot_bytes: u64,
    make: Make,
    classes: BTreeMap<Account, Class>,
    /// Number of a slot's block within its account's policy.
    numbers: Vec<u32>,
}

impl fmt::Debug for Apart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Apart").field("classes", &self.classes).finish_non_exhaustive()
    }
}

/// Which blocks may go, and in which order. Everything that is said of a block names its slot and its account.
#[derive(Debug)]
pub(super) struct Classes {
    /// Everybody's, unless they are told apart. Its policy knows blocks by their slots.
    one: Class,
    apart: Option<Apart>,
}

impl Class {
    fn new(policy: Box<dyn Evict>) -> Self {
        Self { policy, slots: Vec::new(), idle: 0, stems: BTreeSet::new() }
    }

    /// One that is being read, to be written elsewhere first of all, would free nothing yet: it goes only if there is no
    /// other. One that may not go does not. A candidate is known by its number, `slot` says which slot that is.
    fn victim(
        &mut self,
        quiet: impl Fn(u32) -> bool,
        may: impl Fn(u32) -> bool,
        slot: impl Fn(&Self, u32) -> u32,
    ) -> Option<u32> {
        let first = self.policy.coldest(1).first().copied();
        let goes = |number: &u32| {
            let slot = slot(self, *number);
            may(slot) && quiet(slot)
        };
        let other = first.filter(|first| !goes(first)).and_then(|_| {
            let further = |limit: usize| self.policy.coldest(limit).into_iter().skip(1).find(goes);
            LOOKS.into_iter().find_map(further)
        });
        let candidate = match (other, first) {
            (Some(number), _) => {
                self.policy.forbid(number);
                number
            }
            (None, Some(first)) if may(slot(self, first)) => self.policy.pop()?,
            (None, Some(_)) => return None,
            (None, None) => {
                let stem = self.stems.iter().copied().find(|stem| may(*stem))?;
                self.stems.remove(&stem);
                return Some(stem);
            }
        };
        Some(slot(self, candidate))
    }
}

impl Apart {
    fn number(&self, slot: u32) -> u32 {
        self.numbers[slot as usize]
    }

    /// The account's class and the block's number in it.
    fn at(&mut self, account: Account, slot: u32) -> (&mut Class, u32) {
        let number = self.number(slot);
        (self.classes.get_mut(&account).expect("a published block has a class"), number)
    }

    fn publish(&mut self, account: Account, slot: u32, place: &Place) {
        let class = self.classes.entry(account).or_insert_with(|| Class::new((self.make)()));
        let number = class.slots.len() as u32;
        cover(&mut self.numbers, slot as usize, 0);
        self.numbers[slot as usize] = number;
        class.slots.push(slot);
        class.policy.publish(number, place);
    }

    /// The last of the account's blocks takes the number of the one that goes.
    fn remove(&mut self, account: Account, slot: u32, gone: Gone) {
        let (class, number) = self.at(account, slot);
        class.policy.remove(number, gone);
        let last = class.slots.len() as u32 - 1;
        class.policy.renumber(last, number);
        let moved = class.slots[last as usize];
        class.slots.swap_remove(number as usize);
        if class.slots.is_empty() {
            self.classes.remove(&account);
        } else {
            shrink(&mut class.slots);
            self.numbers[moved as usize] = number;
        }
    }

    fn heaviest(&self, which: impl Fn(&Class) -> bool) -> Option<Account> {
        self.accounts.heaviest(self.classes.iter().filter(|(_, class)| which(class)).map(|(account, _)| *account))
    }

    fn coldest(&self, limit: usize) -> Vec<u32> {
        if limit == 1 {
            let class = self.heaviest(|class| !class.policy.is_empty()).and_then(|account| self.classes.get(&account));
            return class.map_or_else(Vec::new, |class| {
                class.policy.coldest(1).iter().map(|&at| class.slots[at as usize]).collect()
            });
        }
        // Each gives until another is heavier. There may be a thousand, so only those that give are asked, for few at a time.
        let weight = |account: Account, given: usize| {
            (self.accounts.weight(account, given as u64 * self.slot_bytes), Reverse(account))
        };
        let filled = self.classes.iter().filter(|(_, class)| !class.policy.is_empty());
        let mut heaviest: BinaryHeap<_> = filled.map(|(&account, _)| weight(account, 0)).collect();
        let mut giving: BTreeMap<Account, (usize, Vec<u32>)> = BTreeMap::new();
        let mut order = Vec::new();
        while order.len() < limit
            && let Some((_, Reverse(account))) = heaviest.pop()
        {
            let Some(class) = self.classes.get(&account) else { continue };
            let (given, known) = giving.entry(account).or_default();
            if *given == known.len() {
                *known = class.policy.coldest((4 * known.len()).clamp(FIRST_ASKED.min(limit), limit));
            }
            // What it gives first it still gives first when it is asked for more.
            let Some(&at) = known.get(*given) else { continue };
            order.push(class.slots[at as usize]);
            *given += 1;
            heaviest.push(weight(account, *given));
        }
        order
    }
}

impl Classes {
    /// One order over everybody's blocks.
    pub fn new(policy: Box<dyn Evict>) -> Self {
        Self { one: Class::new(policy), apart: None }
    }

    /// An order for each account, over blocks of this size. There is no block yet.
    pub fn tell_apart(&mut self, accounts: Arc<Accounts>, slot_bytes: u64, make: Make) {
        self.apart = Some(Apart { accounts, slot_bytes, make, classes: BTreeMap::new(), numbers: Vec::new() });
    }

    fn at(&mut self, account: Account, slot: u32) -> (&mut Class, u32) {
        match &mut self.apart {
            None => (&mut self.one, slot),
            Some(apart) => apart.at(account, slot),
        }
    }

    pub fn publish(&mut self, account: Account, slot: u32, place: &Place) {
        match &mut self.apart {
            None => self.one.policy.publish(slot, place),
            Some(apart) => apart.publish(account, slot, place),
        }
    }

    /// The block, which may not go, is gone.
    pub fn remove(&mut self, account: Account, slot: u32, gone: Gone) {
        match &mut self.apart {
            None => self.one.policy.remove(slot, gone),
            Some(apart) => apart.remove(account, slot, gone),
        }
    }

    pub fn hit(&mut self, account: Account, slot: u32) {
        let (class, number) = self.at(account, slot);
        class.policy.hit(number);
    }

    /// It is idle from now on.
    pub fn rest(&mut self, account: Account, slot: u32) {
        let (class, number) = self.at(account, slot);
        class.idle += 1;
        class.policy.rest(number);
    }

    /// It is idle no more.
    pub fn wake(&mut self, account: Account, slot: u32) {
        self.at(account, slot).0.idle -= 1;
    }

    pub fn allow(&mut self, account: Account, slot: u32) {
        let (class, number) = self.at(account, slot);
        class.policy.allow(number);
    }

    pub fn forbid(&mut self, account: Account, slot: u32) {
        let (class, number) = self.at(account, slot);
        class.policy.forbid(number);
    }

    /// It goes when there is no candidate, or does not any more.
    pub fn set_stem(&mut self, account: Account, slot: u32, stem: bool) {
        let stems = &mut self.at(account, slot).0.stems;
        if stem {
            stems.insert(slot);
        } else {
            stems.remove(&slot);
        }
    }

    /// The block that goes next, of one account or of all; it may not go any more. `quiet`: whether nobody touches a slot;
    /// `may`: whether its block may go at all.
    pub fn victim(
        &mut self,
        of: Option<Account>,
        quiet: impl Fn(u32) -> bool,
        may: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        match &mut self.apart {
            None => self.one.victim(quiet, may, |_, slot| slot),
            Some(apart) => {
                let account = of.or_else(|| apart.heaviest(Class::may_give))?;
                apart.classes.get_mut(&account)?.victim(quiet, may, |class, at| class.slots[at as usize])
            }
        }
    }

    /// Up to `limit` of those that go next, but stems.
    pub fn coldest(&self, limit: usize) -> Vec<u32> {
        self.apart.as_ref().map_or_else(|| self.one.policy.coldest(limit), |apart| apart.coldest(limit))
    }

    /// What the account that gives next has for its share. 0, if they are not told apart.
    pub fn weight(&self) -> u64 {
        let heaviest = |apart: &Apart| Some(apart.accounts.weight(apart.heaviest(Class::may_give)?, 0));
        self.apart.as_ref().and_then(heaviest).unwrap_or(0)
    }

    /// How many blocks that nobody uses an account has.
    pub fn idle(&self, account: Account) -> usize {
        match &self.apart {
            None => self.one.idle,
            Some(apart) => apart.classes.get(&account).map_or(0, |class| class.idle),
        }
    }

    /// How many blocks may go when they are chosen.
    pub fn len(&self) -> usize {
        self.all().map(|class| class.policy.len()).sum()
    }

    /// How many blocks go when there is no such.
    pub fn stems(&self) -> usize {
        self.all().map(|class| class.stems.len()).sum()
    }

    pub fn may_go(&self, account: Account, slot: u32) -> bool {
        match &self.apart {
            None => self.one.policy.contains(slot),
            Some(Apart { classes, numbers, .. }) => classes.get(&account).is_some_and(|class| {
                let number = numbers.get(slot as usize).copied();
                number.is_some_and(|at| class.slots.get(at as usize) == Some(&slot) && class.policy.contains(at))
            }),
        }
    }

    pub fn is_stem(&self, account: Account, slot: u32) -> bool {
        let class = self.apart.as_ref().map_or(Some(&self.one), |apart| apart.classes.get(&account));
        class.is_some_and(|class| class.stems.contains(&slot))
    }

    fn all(&self) -> impl Iterator<Item = &Class> {
        let apart = self.apart.iter().flat_map(|apart| apart.classes.values());
        apart.chain(self.apart.is_none().then_some(&self.one))
    }

    /// Asserts that the classes hold these published blocks, of which so many are idle, by account.
    pub fn check(&self, blocks: &BTreeMap<Account, (usize, usize)>) {
        match &self.apart {
            None => assert_eq!(self.one.idle, blocks.values().map(|(_, idle)| idle).sum::<usize>(), "idle blocks"),
            Some(apart) => {
                let known = apart.classes.iter().map(|(&account, class)| (account, (class.slots.len(), class.idle)));
                assert_eq!(&known.collect::<BTreeMap<_, _>>(), blocks, "blocks and idle ones, by account");
                for class in apart.classes.values() {
                    assert!((0..).zip(&class.slots).all(|(number, &slot)| apart.number(slot) == number), "numbers");
                }
            }
        }
    }
}

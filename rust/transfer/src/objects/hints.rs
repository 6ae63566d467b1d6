//! What a home knows of the names whose home it is: who holds them, who is about to put them, and which were removed.
//!
//! ```text
//! claim ---> there is one, or somebody puts one: refused        here ---> a hint, and the claim is over
//!        \-> the claim stands until `here`, `unclaim`, or its claimer is gone
//! remove --> the hint goes, and what was removed is remembered: who comes back with it is told to drop it
//! ```
//!
//! Hints are only hints: what is missing costs a question to all, what is stale a refused fetch. But two values of one name
//! that meet here, because nobody could be asked when they were put, end in one: that with the smaller number stays.

use std::collections::VecDeque;

use rustc_hash::{FxHashMap, FxHashSet};
use serde::{Deserialize, Serialize};

use crate::types::BlockKey;

/// Holders of an object that are remembered: more are not needed to find it.
const HOLDERS: usize = 7;
/// Claims of all others that stand at once; what is beyond goes on unclaimed.
const CLAIMS: usize = 1 << 18;
/// Removed objects that are remembered. A member that is away for longer than it takes to remove so many may bring one back.
pub const REMEMBERED: usize = 1 << 16;

/// A member, by a number that is another one for each time it comes. 0 is this node itself.
pub type Member = u32;

/// This node.
pub const SELF: Member = 0;

/// The first block of an object, and so the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Head {
    /// Made from the name.
    pub key: BlockKey,
    /// Drawn for its put: two values of one name differ in it. It stands where other blocks have their parent.
    pub value: BlockKey,
    /// Number of its class.
    pub class: u8,
}

#[derive(Clone, Copy, Debug)]
struct Hint {
    value: BlockKey,
    class: u8,
    count: u8,
    holders: [Member; HOLDERS],
    /// There was one more than are remembered, at some time.
    more: bool,
    /// Tells it from an earlier hint of this name.
    stamp: u64,
}

/// Whether a name may be put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// It may: nobody else will be allowed to.
    Free,
    /// There is one, or somebody is putting one.
    Taken,
}

/// What follows when a member says that it holds an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// Nothing.
    Well,
    /// It must not stay at these: it was removed, or another value of this name stays.
    Drop(BlockKey, Vec<Member>),
}

/// See the module.
#[derive(Debug)]
pub struct Hints {
    limit: usize,
    hints: FxHashMap<BlockKey, Hint>,
    /// The oldest first; those whose stamp is another one by now count no more.
    order: VecDeque<(BlockKey, u64)>,
    stamps: u64,
    /// Who claims, and how often.
    claims: FxHashMap<BlockKey, (Member, u32)>,
    /// By key and value: a name that was removed twice may come back with either.
    removed: FxHashSet<(BlockKey, BlockKey)>,
    removals: VecDeque<(BlockKey, BlockKey)>,
    /// Some were forgotten: what is not here may be somewhere. It costs a question to all
    /// for each name that is not known.
    forgot: bool,
}

impl Hints {
    /// None; at most so many.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            hints: FxHashMap::default(),
            order: VecDeque::new(),
            stamps: 0,
            claims: FxHashMap::default(),
            removed: FxHashSet::default(),
            removals: VecDeque::new(),
            forgot: false,
        }
    }

    /// True if a name that is not here is nowhere, as far as members have told.
    pub fn complete(&self) -> bool {
        !self.forgot
    }

    /// All members will tell anew what they hold, and nothing will have been forgotten. False: there is no need, or little
    /// room yet.
    pub fn begin_anew(&mut self) -> bool {
        let begins = self.forgot && self.hints.len() <= self.limit / 2;
        self.forgot &= !begins;
        begins
    }

    /// They will not.
    pub fn end_anew(&mut self) {
        self.forgot = true;
    }

    /// How many names are known.
    pub fn len(&self) -> usize {
        self.hints.len()
    }

    /// True if none is known.
    pub fn is_empty(&self) -> bool {
        self.hints.is_empty()
    }

    /// True if nobody is about to put anything.
    pub fn unclaimed(&self) -> bool {
        self.claims.is_empty()
    }

    /// Somebody wants to put a name. `live`: which members are there.
    pub fn claim(&mut self, by: Member, key: BlockKey, live: impl Fn(Member) -> bool) -> Claim {
        if self.holders(&key, &live).is_some() {
            return Claim::Taken;
        }
        let room = self.claims.len() < CLAIMS;
        match self.claims.get_mut(&key) {
            Some((claimer, count)) if *claimer == by => *count += 1,
            Some((claimer, _)) if live(*claimer) => return Claim::Taken,
            Some(claim) => *claim = (by, 1),
            None if room => drop(self.claims.insert(key, (by, 1))),
            None => {}
        }
        Claim::Free
    }

    /// A put that was claimed has ended, one way or the other.
    pub fn unclaim(&mut self, by: Member, key: &BlockKey) {
        if let Some((claimer, count)) = self.claims.get_mut(key)
            && *claimer == by
        {
            *count -= 1;
            if *count == 0 {
                self.claims.remove(key);
            }
        }
    }

    /// Somebody else is putting this name.
    pub fn claimed(&self, key: &BlockKey) -> bool {
        self.claims.contains_key(key)
    }

    /// A member holds an object.
    pub fn here(&mut self, at: Member, head: Head, live: impl Fn(Member) -> bool) -> Heard {
        let Head { key, value, class } = head;
        if self.was_removed(&key, &value) {
            return Heard::Drop(value, vec![at]);
        }
        self.stamps += 1;
        let mut holders = [SELF; HOLDERS];
        holders[0] = at;
        let fresh = Hint { value, class, count: 1, holders, more: false, stamp: self.stamps };
        let Some(hint) = self.hints.get_mut(&key) else {
            self.hints.insert(key, fresh);
            self.order.push_back((key, self.stamps));
            self.forget_oldest();
            return Heard::Well;
        };
        let count = hint.count as usize;
        let mut others: Vec<Member> = hint.holders[..count].iter().copied().filter(|other| live(*other)).collect();
        if hint.value == value || others.is_empty() || others == [at] {
            if hint.value != value {
                others.clear();
                hint.more = false;
            }
            if !others.contains(&at) {
                if others.len() == HOLDERS {
                    // Any of them: there are enough.
                    hint.more = true;
                    return Heard::Well;
                }
                others.push(at);
            }
            (hint.value, hint.class, hint.count) = (value, class, others.len() as u8);
            hint.holders[..others.len()].copy_from_slice(&others);
            return Heard::Well;
        }
        if hint.value < value {
            return Heard::Drop(value, vec![at]);
        }
        let loser = hint.value;
        *hint = Hint { stamp: hint.stamp, ..fresh };
        Heard::Drop(loser, others)
    }

    /// A member holds it no more.
    pub fn gone(&mut self, at: Member, key: &BlockKey) {
        let Some(hint) = self.hints.get_mut(key) else { return };
        let count = hint.count as usize;
        let Some(index) = hint.holders[..count].iter().position(|holder| *holder == at) else { return };
        hint.holders[index] = hint.holders[count - 1];
        hint.count -= 1;
        if hint.count == 0 {
            // An eighth holder may have it still.
            self.forgot |= hint.more;
            self.hints.remove(key);
        }
    }

    /// Which object has this name, and who holds it.
    pub fn holders(&self, key: &BlockKey, live: impl Fn(Member) -> bool) -> Option<(Head, Vec<Member>)> {
        let Hint { value, class, count, holders, .. } = *self.hints.get(key)?;
        let holders: Vec<Member> = holders[..count as usize].iter().copied().filter(|holder| live(*holder)).collect();
        (!holders.is_empty()).then_some((Head { key: *key, value, class }, holders))
    }

    /// An object was removed from the whole cluster.
    pub fn remove(&mut self, key: BlockKey, value: BlockKey) {
        if self.hints.get(&key).is_some_and(|hint| hint.value == value) {
            self.hints.remove(&key);
        }
        if self.removed.insert((key, value)) {
            self.removals.push_back((key, value));
        }
        if self.removals.len() > REMEMBERED
            && let Some(oldest) = self.removals.pop_front()
        {
            self.removed.remove(&oldest);
        }
    }

    /// True if that very object was removed.
    pub fn was_removed(&self, key: &BlockKey, value: &BlockKey) -> bool {
        self.removed.contains(&(*key, *value))
    }

    /// Forgets the names that are others' now.
    pub fn keep(&mut self, mine: impl Fn(&BlockKey) -> bool) {
        self.hints.retain(|key, _| mine(key));
        self.claims.retain(|key, _| mine(key));
    }

    /// A member is gone: it puts nothing any more. Its hints are passed over, unless somebody else may have what it had.
    pub fn forget(&mut self, member: Member) {
        self.claims.retain(|_, (claimer, _)| *claimer != member);
        let its = |hint: &Hint| hint.more && hint.holders[..hint.count as usize].contains(&member);
        let its: Vec<BlockKey> = self.hints.iter().filter(|(_, hint)| its(hint)).map(|(key, _)| *key).collect();
        its.iter().for_each(|key| self.gone(member, key));
    }

    fn forget_oldest(&mut self) {
        while self.hints.len() > self.limit {
            let Some((key, stamp)) = self.order.pop_front() else { return };
            if self.hints.get(&key).is_some_and(|hint| hint.stamp == stamp) {
                self.hints.remove(&key);
                self.forgot = true;
            }
        }
        // Names that come and go leave their marks.
        if self.order.len() > 2 * self.limit + 64 {
            let hints = &self.hints;
            self.order.retain(|(key, stamp)| hints.get(key).is_some_and(|hint| hint.stamp == *stamp));
        }
    }

    /// Asserts its own laws.
    ///
    /// # Panics
    /// If one does not hold.
    pub fn check(&self) {
        assert!(self.hints.len() <= self.limit && self.order.len() <= 2 * self.limit + 64, "too many hints");
        assert!(self.claims.len() <= CLAIMS && self.removed.len() <= REMEMBERED, "too much is remembered");
        assert_eq!(self.removed.len(), self.removals.len(), "removals and their order");
        assert!(self.claims.values().all(|(_, count)| *count > 0), "a claim of nobody");
        assert!(self.hints.values().all(|hint| (1..=HOLDERS).contains(&usize::from(hint.count))), "a hint to nowhere");
    }
}

#[cfg(test)]
mod tests {
    //! Goal: a home knows who holds what, lets one put a name at a time, and ends with one value of each. Method: random
    //! words of members beside plain maps; then the limits.
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::random::Random;

    fn key(number: u64) -> BlockKey {
        let mut key = [0; 16];
        key[..8].copy_from_slice(&number.to_le_bytes());
        BlockKey(key)
    }

    fn head(name: u64, value: u64) -> Head {
        Head { key: key(name), value: key(1000 + value), class: 3 }
    }

    #[test]
    fn holders_are_as_they_say() {
        let mut random = Random(7);
        let mut hints = Hints::new(1000);
        let mut held: BTreeMap<u64, BTreeSet<Member>> = BTreeMap::new();
        let mut dead: BTreeSet<Member> = BTreeSet::new();
        for _ in 0..5000 {
            let (name, member) = (random.below(20), random.below(6) as Member);
            let live = |member| !dead.contains(&member);
            match random.below(10) {
                0..5 if live(member) => {
                    assert_eq!(hints.here(member, head(name, 0), live), Heard::Well);
                    held.entry(name).or_default().insert(member);
                }
                5..8 => {
                    hints.gone(member, &key(name));
                    held.entry(name).or_default().remove(&member);
                }
                8 if member != SELF && random.below(20) == 0 => {
                    hints.forget(member);
                    dead.insert(member);
                    held.values_mut().for_each(|holders| holders.retain(|holder| *holder != member));
                }
                _ => {}
            }
            hints.check();
            let live = |member| !dead.contains(&member);
            for name in 0..20 {
                let found: BTreeSet<Member> = hints
                    .holders(&key(name), live)
                    .map(|(_, holders)| holders)
                    .unwrap_or_default()
                    .into_iter()
                    .collect();
                assert_eq!(found, held.get(&name).cloned().unwrap_or_default(), "{name}");
            }
        }
        assert!(hints.complete());
    }

    #[test]
    fn one_at_a_time_puts_a_name() {
        let mut hints = Hints::new(10);
        let all = |_| true;
        assert_eq!(hints.claim(1, key(1), all), Claim::Free);
        assert_eq!(hints.claim(1, key(1), all), Claim::Free, "its own");
        assert_eq!(hints.claim(2, key(1), all), Claim::Taken);
        hints.unclaim(2, &key(1));
        hints.unclaim(1, &key(1));
        assert_eq!(hints.claim(2, key(1), all), Claim::Taken, "the other put of the first goes on");
        hints.unclaim(1, &key(1));
        assert_eq!(hints.claim(2, key(1), all), Claim::Free);
        assert_eq!(hints.claim(3, key(1), |member| member != 2), Claim::Free, "its claimer is gone");
        assert_eq!(hints.here(3, head(1, 1), all), Heard::Well);
        hints.unclaim(3, &key(1));
        assert_eq!(hints.claim(1, key(1), all), Claim::Taken, "it is there");
        hints.forget(3);
        assert!(hints.unclaimed());
        assert_eq!(hints.claim(1, key(1), |member| member != 3), Claim::Free, "its only holder is gone");
    }

    #[test]
    fn of_two_values_that_meet_one_stays() {
        let all = |_| true;
        for order in [[1, 2], [2, 1]] {
            let mut hints = Hints::new(10);
            let heard: Vec<Heard> =
                order.iter().map(|&value| hints.here(value as Member, head(1, value), all)).collect();
            assert_eq!(heard, [Heard::Well, Heard::Drop(key(1002), vec![2])], "whoever comes first");
            let (found, holders) = hints.holders(&key(1), all).expect("it is there");
            assert_eq!((found, holders), (head(1, 1), vec![1]));
        }
        let mut hints = Hints::new(10);
        hints.here(1, head(1, 1), all);
        assert_eq!(hints.here(2, head(1, 2), |member| member != 1), Heard::Well, "the other is gone with its holder");
    }

    #[test]
    fn what_was_removed_does_not_come_back() {
        let all = |_| true;
        let mut hints = Hints::new(10);
        hints.here(1, head(1, 1), all);
        hints.remove(key(1), head(1, 1).value);
        assert_eq!(hints.holders(&key(1), all), None);
        assert_eq!(hints.here(2, head(1, 1), all), Heard::Drop(head(1, 1).value, vec![2]));
        assert_eq!(hints.here(2, head(1, 0), all), Heard::Well, "put anew");
        hints.remove(key(1), head(1, 1).value);
        assert!(hints.holders(&key(1), all).is_some(), "that was another one");
        hints.remove(key(1), head(1, 0).value);
        for value in 0..2 {
            let gone = Heard::Drop(head(1, value).value, vec![2]);
            assert_eq!(hints.here(2, head(1, value), all), gone, "both stay removed");
        }
        for name in 0..2 * REMEMBERED as u64 {
            hints.remove(key(name), key(0));
        }
        hints.check();
    }

    #[test]
    fn an_eighth_holder_is_missed_when_all_others_are_gone() {
        let holders = HOLDERS as Member;
        for (count, dies) in [(holders, false), (holders + 1, false), (holders + 1, true)] {
            let mut hints = Hints::new(10);
            (1..=count).for_each(|member| assert_eq!(hints.here(member, head(1, 0), |_| true), Heard::Well));
            for member in 1..=holders {
                assert!(hints.complete() && hints.holders(&key(1), |_| true).is_some(), "{member} of {count}");
                if dies { hints.forget(member) } else { hints.gone(member, &key(1)) }
            }
            assert!(hints.is_empty());
            assert_eq!(hints.complete(), count == holders, "somebody may have it");
        }
    }

    #[test]
    fn the_oldest_hints_go_and_it_says_so() {
        let all = |_| true;
        let mut hints = Hints::new(10);
        for name in 0..10 {
            hints.here(1, head(name, 0), all);
        }
        for name in 100..1000 {
            hints.gone(1, &key(0));
            hints.here(1, head(0, 0), all);
            hints.check();
            assert!(hints.complete() && hints.len() == 10, "{name}");
        }
        hints.here(1, head(11, 0), all);
        assert!(!hints.complete() && hints.len() == 10);
        assert!(hints.holders(&key(1), all).is_none() && hints.holders(&key(0), all).is_some());
    }
}

//! Owners that are told apart: limits, shares, and who waits for whom.
//!
//! Goal: nobody has more than he may; who waits for his own blocks to be let go is in nobody's way, and those of one owner
//! are served in order; room is made by whoever has most for his share; with one owner all is as without accounts.
//! Method: random operations on two pools that share accounts, judged by what is held and published after each; and a few
//! stories in a pool of a dozen slots.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use proptest::prelude::*;
use pyengine_transfer::messages::{GrantMode, Refusal};
use pyengine_transfer::pool::account::{Accounts, Quota, SHARE_LIMIT, check_quotas};
use pyengine_transfer::pool::model::NoMemory;
use pyengine_transfer::pool::policy::cost::Costs;
use pyengine_transfer::pool::policy::{POLICIES, Policy};
use pyengine_transfer::pool::{Change, Granting, Holder, Lack, Pool, Wish};
use pyengine_transfer::random::Random;
use pyengine_transfer::types::{BlockKey, Owner, Tag};

const ROOT: BlockKey = BlockKey([0; 16]);
/// Bytes of a slot in each of two pools.
const BYTES: [u64; 2] = [100, 250];
const SLOTS: [u32; 2] = [14, 8];

fn owner(tenant: u64) -> Owner {
    Owner { namespace: 1, tenant }
}

fn quota(tenant: u64, dram_bytes: Option<u64>, share: u32) -> Quota {
    Quota { tenant: Some(tenant), dram_bytes, share, ..Quota::default() }
}

fn key(prefix: u64, position: u32) -> BlockKey {
    let mut bytes = [7; 16];
    bytes[..8].copy_from_slice(&prefix.to_le_bytes());
    bytes[8..12].copy_from_slice(&position.to_le_bytes());
    BlockKey(bytes)
}

fn holder(number: u64) -> Holder {
    Holder { client: Some(1), tag: Tag { request: number, attempt: 0, worker: 1 } }
}

/// The first blocks of a prefix.
fn wish(tenant: u64, prefix: u64, length: u32) -> Wish {
    let keys = (0..length).map(|position| key(prefix, position)).collect();
    Wish { keys, private: false, parent: ROOT, position: 0, owner: owner(tenant) }
}

fn pool(slots: u32, slot_bytes: u64, accounts: &Arc<Accounts>, policy: &'static Policy) -> Pool<NoMemory> {
    let mut pool = Pool::new(NoMemory, slots, 64, 1000, policy.make(&Costs::default()));
    pool.tell_apart(accounts.clone(), slot_bytes, move || policy.make(&Costs::default()));
    pool
}

fn store(pool: &mut Pool<NoMemory>, number: u64, wish: Wish) {
    let count = wish.keys.len() as u32;
    let granted = pool.grant(holder(number), wish, GrantMode::Now);
    assert!(matches!(granted, Granting::Held(_)), "{granted:?}");
    (0..count).for_each(|index| pool.commit(holder(number), index, None).expect("nobody writes it"));
    pool.release(holder(number));
    pool.check();
}

/// How many of the first blocks of these prefixes are here.
fn here(pool: &Pool<NoMemory>, prefixes: impl IntoIterator<Item = u64>) -> usize {
    prefixes.into_iter().filter(|&prefix| pool.find(&key(prefix, 0)).is_some()).count()
}

// -- stories ----------------------------------------------------------------------------------------------------------

// Goal: a noisy owner takes what nobody wants, and never what another has within his share. Method: one fills the pool, then
// the other stores a hundred blocks, with every policy; the first then has his share, of the blocks that he used last.
#[test]
fn a_noisy_owner_leaves_others_their_share() {
    for policy in &POLICIES {
        for (share, kept) in [(1, 6), (2, 4), (5, 2)] {
            let accounts = Accounts::new(&[quota(2, None, share)]);
            let mut pool = pool(12, 100, &accounts, policy);
            (0..12).for_each(|prefix| store(&mut pool, prefix, wish(1, prefix, 1)));
            assert_eq!(here(&pool, 0..12), 12, "all of it, while nobody else wants it");
            (100..200).for_each(|prefix| store(&mut pool, prefix, wish(2, prefix, 1)));
            assert_eq!(here(&pool, 0..12), kept, "{policy:?}, share {share}");
            // And he has it back: what the noisy one does not use is not kept for it either.
            (300..400).for_each(|prefix| store(&mut pool, prefix, wish(1, prefix, 1)));
            assert_eq!(here(&pool, 100..200), 12 - kept, "{policy:?}, share {share}");
        }
    }
}

// Goal: a limit is hard, over all pools together; what never fits is refused, what does not fit now waits, and nobody else
// waits for it. Method: an owner with four slots in a pool of twelve.
#[test]
fn a_limit_is_hard_and_in_nobodys_way() {
    let accounts = Accounts::new(&[quota(1, Some(450), 1)]);
    let mut pool = pool(12, 100, &accounts, &POLICIES[0]);
    (0..10).for_each(|prefix| store(&mut pool, prefix, wish(1, prefix, 1)));
    assert_eq!((here(&pool, 0..10), here(&pool, 6..10)), (4, 4), "eight slots are empty, and he has his four");
    assert_eq!(accounts.standings().iter().map(|known| known.used).collect::<Vec<_>>(), [400]);
    // Four with the one that is left to staging.
    assert_eq!(pool.grant(holder(1), wish(1, 50, 4), GrantMode::Wait), Granting::Refused(Refusal::TooLarge));
    assert!(matches!(pool.grant(holder(1), wish(1, 50, 3), GrantMode::Wait), Granting::Held(_)));
    assert_eq!(pool.grant(holder(2), wish(1, 51, 1), GrantMode::Now), Granting::Refused(Refusal::Full));
    assert_eq!(pool.grant(holder(2), wish(1, 51, 1), GrantMode::Wait), Granting::Waiting);
    assert_eq!(pool.grant(holder(3), wish(1, 52, 1), GrantMode::Wait), Granting::Waiting);
    assert_eq!(pool.waits_since(), None, "nobody waits for room");
    // Others pass, and staging has the last of his slots.
    assert!(matches!(pool.grant(holder(4), wish(2, 53, 5), GrantMode::Wait), Granting::Held(_)));
    assert!(matches!(pool.grant(holder(5), wish(1, 54, 1), GrantMode::Staging), Granting::Held(_)));
    assert_eq!(pool.grant(holder(6), wish(1, 55, 1), GrantMode::Staging), Granting::Waiting);
    assert_eq!(pool.grant(holder(7), wish(2, 56, 9), GrantMode::Wait), Granting::Waiting, "that one waits for room");
    assert!(matches!(pool.grant(holder(8), wish(1, 50, 3), GrantMode::Wait), Granting::Waiting), "it is not published");
    assert_eq!(pool.advance(), []);
    pool.check();
    pool.release(holder(5));
    let order = |pool: &mut Pool<NoMemory>| pool.advance().iter().map(|(held, _)| held.tag.request).collect::<Vec<_>>();
    assert_eq!(order(&mut pool), [6]);
    pool.release(holder(6));
    pool.release(holder(1));
    assert_eq!(order(&mut pool), [2, 3], "in order; what needs room keeps those behind it waiting");
    pool.release(holder(4));
    pool.release(holder(2));
    assert_eq!(order(&mut pool), [7]);
    pool.release(holder(7));
    pool.release(holder(3));
    assert_eq!(order(&mut pool), [8]);
    pool.check();
}

// Goal: who looks up what he has leaves himself a slot for staging, so that he never waits for himself. Method: an owner with
// four blocks pins a prefix of four; then he stages.
#[test]
fn lookups_leave_one_of_the_owners_slots_to_staging() {
    let accounts = Accounts::new(&[quota(1, Some(400), 1)]);
    let mut pool = pool(12, 100, &accounts, &POLICIES[0]);
    store(&mut pool, 1, wish(1, 5, 3));
    let mut last = wish(1, 5, 4);
    last.keys.drain(..3);
    store(&mut pool, 2, Wish { parent: key(5, 2), position: 3, ..last });
    assert_eq!(pool.lookup(holder(3), &wish(1, 5, 4).keys).len(), 3);
    assert!(matches!(pool.grant(holder(4), wish(1, 6, 1), GrantMode::Staging), Granting::Held(_)));
    // What others have is not his.
    store(&mut pool, 5, wish(2, 7, 4));
    assert_eq!(pool.lookup(holder(6), &wish(2, 7, 4).keys).len(), 4);
    pool.check();
}

// Goal: with one owner nothing changes, neither what goes nor when. Method: the same random stores and lookups with
// accounts and without, with every policy.
#[test]
fn one_owner_is_served_as_without_accounts() {
    for policy in &POLICIES {
        let accounts = Accounts::new(&[Quota::default()]);
        let mut random = Random(11);
        let mut apart = pool(40, 100, &accounts, policy);
        let mut plain = Pool::new(NoMemory, 40, 0, 10, policy.make(&Costs::default()));
        for number in 0..3000 {
            let (prefix, length) = (random.below(30), 1 + random.below(6) as u32);
            for pool in [&mut apart, &mut plain] {
                let wish = wish(7, prefix, length);
                let found = pool.lookup(holder(number), &wish.keys).len() as u32;
                pool.release(holder(number));
                assert!(matches!(pool.grant(holder(number), wish, GrantMode::Now), Granting::Held(_)));
                (found..length).for_each(|index| pool.commit(holder(number), index, None).expect("nobody writes it"));
                pool.release(holder(number));
            }
            assert_eq!(apart.take_changes(), plain.take_changes(), "{policy:?}");
            assert_eq!(apart.coldest(50), plain.coldest(50), "{policy:?}");
        }
        apart.check();
    }
}

// Goal: what the node does for itself goes on while somebody waits for room, with a few slots, and never so that he could not
// be served. Method: a pool of 64 slots, all but three held.
#[test]
fn the_node_overtakes_who_waits_with_a_few_slots() {
    let own = |number| Holder { client: None, tag: Tag { request: number, attempt: u32::MAX, worker: 1 } };
    let mut pool = Pool::new(NoMemory, 64, 4, 100, POLICIES[0].make(&Costs::default()));
    let take = |pool: &mut Pool<NoMemory>, number: u64| {
        matches!(pool.grant_own(own(number), wish(0, 1000 + number, 1), &mut |_, _| {}), Granting::Held(_))
    };
    assert!(matches!(pool.grant(holder(1), wish(0, 1, 55), GrantMode::Wait), Granting::Held(_)));
    assert_eq!(pool.grant(holder(2), wish(0, 2, 20), GrantMode::Wait), Granting::Waiting);
    assert_eq!(
        (0..6).map(|number| take(&mut pool, number)).collect::<Vec<_>>(),
        [true, true, true, true, false, false]
    );
    pool.check();
    pool.release(own(0));
    assert!(take(&mut pool, 7), "as many at a time");
    pool.release(holder(1));
    assert_eq!(pool.advance().len(), 1, "he is served beside them");
    // One who needs so much that he could not be: nobody overtakes him.
    for number in 0..8 {
        pool.release(own(number));
    }
    assert_eq!(pool.grant(holder(3), wish(0, 3, 62), GrantMode::Wait), Granting::Waiting);
    assert!(!take(&mut pool, 9));
    pool.release(holder(2));
    assert_eq!(pool.advance().len(), 1);
    pool.check();
    // And the last slot stays where it is.
    pool.release(holder(3));
    assert!(matches!(pool.grant(holder(4), wish(0, 4, 63), GrantMode::Wait), Granting::Held(_)));
    assert!(!take(&mut pool, 10));
    assert!(matches!(pool.grant(holder(5), wish(0, 5, 1), GrantMode::Staging), Granting::Held(_)));
    pool.check();
}

// Goal: whose an account is: the most exact quota counts, others have one each, and there is an end to their number.
#[test]
fn owners_and_their_accounts() {
    let of = |namespace, tenant| Owner { namespace, tenant };
    let quotas = [
        Quota { share: 9, ..Quota::default() },
        Quota { namespace: Some(1), ..Quota::default() },
        Quota { tenant: Some(2), ..Quota::default() },
        Quota { namespace: Some(1), tenant: Some(2), ..Quota::default() },
    ];
    let accounts = Accounts::new(&quotas);
    for (one, other, same) in [
        (of(1, 5), of(1, 6), true),
        (of(1, 2), of(1, 3), false),
        (of(1, 2), of(7, 2), false),
        (of(7, 2), of(8, 2), true),
        (of(7, 3), of(8, 3), false),
        (of(7, 3), of(7, 4), false),
    ] {
        assert_eq!(accounts.same(one, other), same, "{one:?} and {other:?}");
        let numbers = (accounts.enter(one), accounts.enter(other));
        assert_eq!(numbers.0 == numbers.1, same);
        accounts.leave(numbers.0);
        accounts.leave(numbers.1);
    }
    assert_eq!(accounts.standings().len(), 3, "those who are named");
    let all: BTreeSet<u32> = (0..5000).map(|tenant| accounts.enter(of(9, 100 + tenant))).collect();
    assert!(all.len() < 1100 && accounts.enter(of(1, 2)) != 0, "{}", all.len());
    let none = Accounts::new(&[]);
    assert!(none.same(of(1, 1), of(2, 2)) && none.enter(of(1, 1)) == none.enter(of(2, 2)));
    accounts.check(&HashMap::new());
}

// Goal: quotas that mean nothing are refused, with what to do.
#[test]
fn bad_quotas() {
    let refused = |quotas: &[Quota], words: &str| {
        let error = check_quotas(quotas).expect_err(words).message;
        assert!(error.contains(words), "{error}");
    };
    refused(&[quota(1, None, 0)], "share of 0");
    refused(&[quota(1, None, SHARE_LIMIT + 1)], "1 to 1000");
    refused(&[quota(1, Some(0), 1)], "no memory at all");
    refused(&[quota(1, None, 1), quota(2, None, 1), quota(1, Some(5), 2)], "quotas 1 and 3 are for the same");
    refused(&[Quota::default(); 2], "the same owners");
    let many: Vec<Quota> = (0..2000).map(|tenant| quota(tenant, None, 1)).collect();
    refused(&many, "at most");
    check_quotas(&[quota(1, Some(1), SHARE_LIMIT), Quota::default()]).expect("good ones");
}

// -- random operations ------------------------------------------------------------------------------------------------

#[derive(Clone, Debug)]
enum Op {
    Grant { at: usize, holder: u64, tenant: u64, prefix: u64, length: u32, mode: u8 },
    Lookup { at: usize, holder: u64, tenant: u64, prefix: u64, length: u32 },
    Commit { holder: u64 },
    Release { holder: u64 },
    Corrupt { at: usize, tenant: u64, prefix: u64 },
}

fn ops() -> impl Strategy<Value = Op> {
    let (at, holder, tenant, prefix, length) = (0..2usize, 0..10u64, 1..5u64, 0..4u64, 1..5u32);
    let named = (at.clone(), holder.clone(), tenant.clone(), prefix.clone(), length);
    prop_oneof![
        4 => (named.clone(), 0..5u8).prop_map(|((at, holder, tenant, prefix, length), mode)| Op::Grant { at, holder, tenant, prefix, length, mode }),
        1 => named.prop_map(|(at, holder, tenant, prefix, length)| Op::Lookup { at, holder, tenant, prefix, length }),
        4 => holder.clone().prop_map(|holder| Op::Commit { holder }),
        5 => holder.prop_map(|holder| Op::Release { holder }),
        1 => (at, tenant, prefix).prop_map(|(at, tenant, prefix)| Op::Corrupt { at, tenant, prefix }),
    ]
}

struct Node {
    accounts: Arc<Accounts>,
    pools: Vec<Pool<NoMemory>>,
    quotas: BTreeMap<u64, Quota>,
    /// Which pool a holder has to do with, and how many slots he was granted.
    at: BTreeMap<u64, (usize, usize)>,
    /// In order, by pool.
    waiting: [Vec<(u64, Wish, GrantMode)>; 2],
    /// Tenants of published blocks, by pool.
    published: [BTreeMap<BlockKey, u64>; 2],
}

impl Node {
    fn new(policy: &'static Policy, limits: [Option<u64>; 2], share: u32) -> Self {
        let quotas = [quota(1, limits[0], 1), quota(2, limits[1], share), quota(3, None, 3)];
        let accounts = Accounts::new(&quotas);
        let pools = (0..2).map(|at| pool(SLOTS[at], BYTES[at], &accounts, policy)).collect();
        let quotas = quotas.iter().map(|quota| (quota.tenant.expect("named"), *quota)).collect();
        let (at, waiting, published) = Default::default();
        Self { accounts, pools, quotas, at, waiting, published }
    }

    /// Lets the pool act; what its account has too much, the other one gives.
    fn act<R>(
        &mut self,
        at: usize,
        act: impl FnOnce(&mut Pool<NoMemory>, &mut dyn FnMut(&mut Pool<NoMemory>, Lack)) -> R,
    ) -> R {
        let (first, second) = self.pools.split_at_mut(1);
        let (pool, other) = if at == 0 { (&mut first[0], &mut second[0]) } else { (&mut second[0], &mut first[0]) };
        act(pool, &mut |_, lack| {
            if let Some((account, mut bytes)) = lack.over {
                while bytes > 0 && other.evict_of(account) {
                    bytes = bytes.saturating_sub(BYTES[1 - at]);
                }
            }
        })
    }

    fn used(&self, tenant: u64) -> u64 {
        let known = self.accounts.standings();
        known.iter().filter(|known| known.quota.tenant == Some(tenant)).map(|known| known.used).sum()
    }

    fn quota(&self, tenant: u64) -> Quota {
        self.quotas.get(&tenant).copied().unwrap_or_default()
    }

    /// Takes the changes in; `for_whom`: room was made for him in this pool. The victims' owners had most for their shares.
    fn replay(&mut self, for_whom: Option<(usize, u64)>) {
        let mut victims: [Vec<u64>; 2] = Default::default();
        for (at, victims) in victims.iter_mut().enumerate() {
            for change in self.pools[at].take_changes() {
                match change {
                    Change::Stored(place) => {
                        let owner = self.pools[at].owner_at(&place.key).map_or(0, |owner| owner.tenant);
                        // Removed again within the same step: nobody's.
                        assert_eq!(self.published[at].insert(place.key, owner), None);
                    }
                    Change::Removed(key) => victims.extend(self.published[at].remove(&key)),
                }
            }
        }
        let Some((at, tenant)) = for_whom else { return };
        assert!(victims[1 - at].iter().all(|victim| *victim == tenant), "another pool's blocks of another owner went");
        let may_go: BTreeSet<u64> = self.pools[at]
            .coldest(usize::MAX)
            .iter()
            .filter_map(|slot| {
                let mut all = self.pools[at].published_within(*slot, 1);
                all.next().map(|block| block.owner.tenant)
            })
            .collect();
        for victim in victims[at].iter().filter(|victim| **victim != tenant) {
            let had = (self.used(*victim) + BYTES[at]) / u64::from(self.quota(*victim).share);
            for other in &may_go {
                let has = self.used(*other) / u64::from(self.quota(*other).share);
                assert!(had >= has, "{victim} with {had} gave, and {other} with {has} did not");
            }
        }
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Grant { at, holder: number, tenant, prefix, length, mode } => {
                let mode = [GrantMode::Wait, GrantMode::Wait, GrantMode::Now, GrantMode::Now, GrantMode::Staging]
                    [usize::from(mode)];
                let length = if mode == GrantMode::Staging { 1 } else { length };
                let wish = wish(tenant, tenant * 10 + prefix, length);
                if self.at.contains_key(&number) {
                    return;
                }
                let spare = u64::from(mode != GrantMode::Staging);
                let never =
                    self.quota(tenant).dram_bytes.is_some_and(|limit| (u64::from(length) + spare) * BYTES[at] > limit);
                let granted = self.act(at, |pool, more| pool.grant_with(holder(number), wish.clone(), mode, more));
                self.replay(matches!(granted, Granting::Held(_)).then_some((at, tenant)));
                match granted {
                    Granting::Held(slots) => drop(self.at.insert(number, (at, slots.len()))),
                    Granting::Waiting => {
                        assert!(mode != GrantMode::Now && !never);
                        self.at.insert(number, (at, 0));
                        let staging =
                            self.waiting[at].iter().take_while(|(_, _, mode)| *mode == GrantMode::Staging).count();
                        let place = if mode == GrantMode::Staging { staging } else { self.waiting[at].len() };
                        self.waiting[at].insert(place, (number, wish, mode));
                    }
                    Granting::Refused(refusal) => {
                        assert_eq!(refusal == Refusal::TooLarge, never, "{refusal:?}");
                        assert!(never || mode == GrantMode::Now, "{refusal:?}");
                    }
                }
            }
            Op::Lookup { at, holder: number, tenant, prefix, length } => {
                let waits = self.waiting.iter().flatten().any(|(waiting, _, _)| *waiting == number);
                if !waits && self.at.get(&number).is_none_or(|(known, _)| *known == at) {
                    let keys = wish(tenant, tenant * 10 + prefix, length).keys;
                    if !self.pools[at].lookup(holder(number), &keys).is_empty() {
                        self.at.entry(number).or_insert((at, 0));
                    }
                }
            }
            Op::Commit { holder: number } => {
                if let Some(&(at, slots)) = self.at.get(&number) {
                    (0..slots as u32)
                        .for_each(|index| self.pools[at].commit(holder(number), index, None).expect("held"));
                }
            }
            Op::Release { holder: number } => {
                if let Some((at, _)) = self.at.remove(&number) {
                    self.waiting[at].retain(|(waiting, _, _)| *waiting != number);
                    self.pools[at].release(holder(number));
                }
            }
            Op::Corrupt { at, tenant, prefix } => {
                if let Some(slot) = self.pools[at].find(&key(tenant * 10 + prefix, 0)) {
                    self.pools[at].unpublish(slot);
                }
            }
        }
        self.settle();
    }

    fn settle(&mut self) {
        self.replay(None);
        for at in 0..2 {
            let granted = self.act(at, |pool, more| pool.advance_with(more));
            for (held, slots) in granted {
                let place = self.waiting[at].iter().position(|(waiting, _, _)| *waiting == held.tag.request);
                let place = place.expect("it waited");
                let tenant = self.waiting[at][place].1.owner.tenant;
                let mode = self.waiting[at][place].2;
                let before = &self.waiting[at][..place];
                let same = |other: &GrantMode| *other == mode;
                let overtaken = before.iter().find(|(_, wish, other)| wish.owner.tenant == tenant && same(other));
                assert!(overtaken.is_none(), "{held:?} overtook {overtaken:?}");
                self.waiting[at].remove(place);
                self.at.insert(held.tag.request, (at, slots.len()));
            }
            self.replay(None);
        }
        let mut charged = HashMap::new();
        for pool in &self.pools {
            pool.check();
            for (account, bytes) in pool.charged() {
                *charged.entry(account).or_default() += bytes;
            }
        }
        self.accounts.check(&charged);
        for (tenant, quota) in &self.quotas {
            let used = self.used(*tenant);
            assert!(quota.dram_bytes.is_none_or(|limit| used <= limit), "{tenant} has {used} bytes: {quota:?}");
        }
    }

    /// Everybody lets go, one after the other: all who wait are served.
    fn end(&mut self) {
        let waits = |node: &Self, number: u64| node.waiting.iter().flatten().any(|(waiting, _, _)| *waiting == number);
        while let Some(number) = self.at.keys().copied().find(|number| !waits(self, *number)) {
            self.apply(Op::Commit { holder: number });
            self.apply(Op::Release { holder: number });
        }
        assert!(self.pools.iter().all(Pool::idle), "{:?}", self.waiting);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_operations(
        policy in 0..POLICIES.len(),
        limits in prop::array::uniform2(prop::option::of(500..2500u64)),
        share in 1..4u32,
        ops in prop::collection::vec(ops(), 1..150),
    ) {
        let mut node = Node::new(&POLICIES[policy], limits, share);
        ops.into_iter().for_each(|op| node.apply(op));
        node.end();
    }
}

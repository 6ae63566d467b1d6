//! The conformance suite of eviction: all policies x what the pool may expect of each, and the pool's own promises with
//! each of them.
//!
//! Method: random calls within the contract of `Evict` beside a naive twin, which for LRU and S3-FIFO is the policy's
//! definition in plain lists; random requests to a pool, and to the model of a cache, beside naive ones.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use pyengine_transfer::messages::GrantMode;
use pyengine_transfer::pool::model::NoMemory;
use pyengine_transfer::pool::model::{CHANGE_BYTES, Hits, PoolModel, Where};
use pyengine_transfer::pool::policy::cost::Costs;
use pyengine_transfer::pool::policy::{Evict, Gone, POLICIES, Policy};
use pyengine_transfer::pool::{Change, Granting, Holder, Place, Pool, Wish};
use pyengine_transfer::random::Random;
use pyengine_transfer::types::{BlockKey, Owner, Tag};

const SLOTS: u32 = 32;

fn lru() -> &'static Policy {
    Policy::named("lru").expect("it is there")
}

fn make(policy: &Policy) -> Box<dyn Evict> {
    policy.make(&Costs::default())
}

fn key(number: u32) -> BlockKey {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&number.to_le_bytes());
    BlockKey(bytes)
}

fn place(number: u32) -> Place {
    Place { key: key(number), parent: key(u32::MAX), position: number % 7 }
}

// -- a policy alone ---------------------------------------------------------------------------------------------------

/// A policy's definition, in the plainest form. `may`: the slots that may go.
trait Naive {
    fn publish(&mut self, slot: u32, key: BlockKey);
    fn hit(&mut self, slot: u32);
    fn rest(&mut self, slot: u32);
    fn remove(&mut self, slot: u32, gone: Gone);
    /// This slot is called otherwise.
    fn renumber(&mut self, from: u32, to: u32);
    /// The slots that may go, first victim first.
    fn order(&self, may: &BTreeSet<u32>) -> Vec<u32>;
    /// The first of them was chosen.
    fn popped(&mut self, may: &BTreeSet<u32>);
}

/// Slots by last use, the oldest first.
#[derive(Default)]
struct NaiveLru(Vec<u32>);

impl Naive for NaiveLru {
    fn publish(&mut self, slot: u32, _: BlockKey) {
        self.rest(slot);
    }
    fn hit(&mut self, _: u32) {}
    fn rest(&mut self, slot: u32) {
        self.0.retain(|&other| other != slot);
        self.0.push(slot);
    }
    fn remove(&mut self, slot: u32, _: Gone) {
        self.0.retain(|&other| other != slot);
    }
    fn renumber(&mut self, from: u32, to: u32) {
        self.0.iter_mut().filter(|slot| **slot == from).for_each(|slot| *slot = to);
    }
    fn order(&self, may: &BTreeSet<u32>) -> Vec<u32> {
        self.0.iter().copied().filter(|slot| may.contains(slot)).collect()
    }
    fn popped(&mut self, _: &BTreeSet<u32>) {}
}

/// The algorithm of the paper over lists of (slot, key, uses), in which what may not go is passed over.
#[derive(Clone, Default)]
struct NaiveS3Fifo {
    small: Vec<(u32, BlockKey, u8)>,
    main: Vec<(u32, BlockKey, u8)>,
    /// None: it came back since.
    ghosts: Vec<Option<BlockKey>>,
}

impl NaiveS3Fifo {
    fn pop(&mut self, may: &BTreeSet<u32>) -> Option<u32> {
        loop {
            let at = |queue: &[(u32, BlockKey, u8)]| queue.iter().position(|(slot, _, _)| may.contains(slot));
            let count = |queue: &[(u32, BlockKey, u8)]| queue.iter().filter(|(slot, _, _)| may.contains(slot)).count();
            let (smalls, mains) = (count(&self.small), count(&self.main));
            if smalls > 0 && (smalls * 10 >= smalls + mains + 10 - (smalls + mains) % 10 || mains == 0) {
                let (slot, key, uses) = self.small[at(&self.small)?];
                if uses <= 1 {
                    return Some(slot);
                }
                self.small.retain(|(other, _, _)| *other != slot);
                self.main.push((slot, key, 0));
            } else {
                let (slot, key, uses) = self.main[at(&self.main)?];
                if uses == 0 {
                    return Some(slot);
                }
                self.main.retain(|(other, _, _)| *other != slot);
                self.main.push((slot, key, uses - 1));
            }
        }
    }
}

impl Naive for NaiveS3Fifo {
    fn publish(&mut self, slot: u32, key: BlockKey) {
        let ghost = self.ghosts.iter_mut().find(|ghost| **ghost == Some(key)).map(|ghost| *ghost = None);
        let queue = if ghost.is_some() { &mut self.main } else { &mut self.small };
        queue.push((slot, key, 0));
    }
    fn hit(&mut self, slot: u32) {
        for (_, _, uses) in self.small.iter_mut().chain(&mut self.main).filter(|(other, _, _)| *other == slot) {
            *uses = (*uses + 1).min(3);
        }
    }
    fn rest(&mut self, _: u32) {}
    fn remove(&mut self, slot: u32, gone: Gone) {
        if let Some(at) = self.small.iter().position(|(other, _, _)| *other == slot) {
            let (_, key, _) = self.small.remove(at);
            if gone == Gone::Evicted {
                self.ghosts.push(Some(key));
            }
        }
        self.main.retain(|(other, _, _)| *other != slot);
        let beyond = self.ghosts.len().saturating_sub(self.small.len() + self.main.len());
        self.ghosts.drain(..beyond);
    }
    fn renumber(&mut self, from: u32, to: u32) {
        let all = self.small.iter_mut().chain(&mut self.main);
        all.filter(|(slot, _, _)| *slot == from).for_each(|(slot, _, _)| *slot = to);
    }
    fn order(&self, may: &BTreeSet<u32>) -> Vec<u32> {
        let (mut queues, mut may) = (self.clone(), may.clone());
        let mut order = Vec::new();
        while let Some(slot) = queues.pop(&may) {
            may.remove(&slot);
            order.push(slot);
        }
        order
    }
    fn popped(&mut self, may: &BTreeSet<u32>) {
        self.pop(may);
    }
}

/// The definition of a policy, where there is one.
fn naive(policy: &Policy) -> Option<Box<dyn Naive>> {
    match policy.name {
        "lru" => Some(Box::<NaiveLru>::default()),
        "s3fifo" => Some(Box::<NaiveS3Fifo>::default()),
        _ => None,
    }
}

/// A policy, its naive twin, and what the pool would know.
struct Play {
    policy: Box<dyn Evict>,
    naive: Option<Box<dyn Naive>>,
    /// Blocks that are here. True: in use.
    here: BTreeMap<u32, (BlockKey, bool)>,
    may: BTreeSet<u32>,
    /// Whether slots are numbered anew when a block goes.
    dense: bool,
}

impl Play {
    fn new(policy: &Policy, dense: bool) -> Self {
        Self { policy: make(policy), naive: naive(policy), here: BTreeMap::new(), may: BTreeSet::new(), dense }
    }

    fn naive(&mut self, tell: impl FnOnce(&mut dyn Naive)) {
        if let Some(naive) = &mut self.naive {
            tell(naive.as_mut());
        }
    }

    fn forbid(&mut self, slot: u32) {
        if self.may.remove(&slot) {
            self.policy.forbid(slot);
        }
    }

    /// One call that the contract allows now, if there is one of this kind.
    fn call(&mut self, kind: u8, slot: u32, number: u32) {
        match (kind, self.here.get(&slot).copied()) {
            (0 | 1, None) if self.here.values().all(|(known, _)| *known != key(number)) => {
                self.policy.publish(slot, &place(number));
                self.naive(|naive| naive.publish(slot, key(number)));
                self.here.insert(slot, (key(number), true));
            }
            (2, Some((key, _))) => {
                self.forbid(slot);
                self.policy.hit(slot);
                self.naive(|naive| naive.hit(slot));
                self.here.insert(slot, (key, true));
            }
            (3 | 4, Some((key, true))) => {
                self.policy.rest(slot);
                self.naive(|naive| naive.rest(slot));
                self.here.insert(slot, (key, false));
            }
            (5 | 6, Some((_, false))) if !self.may.contains(&slot) => {
                self.policy.allow(slot);
                self.may.insert(slot);
            }
            (7, Some(_)) => self.forbid(slot),
            (8, _) => drop(self.pop()),
            (9, Some(_)) if number.is_multiple_of(3) => {
                self.forbid(slot);
                self.gone(slot, Gone::Removed);
            }
            // Whole stays, so that most of the time there are many candidates.
            (10, None) => [0, 3, 5].into_iter().for_each(|kind| self.call(kind, slot, number)),
            (11.., Some(_)) => [2, 3, 5].into_iter().for_each(|kind| self.call(kind, slot, number)),
            _ => {}
        }
        self.check();
    }

    fn pop(&mut self) -> Option<u32> {
        let victim = self.policy.pop();
        assert_eq!(victim.is_none(), self.may.is_empty(), "there is a victim while something may go");
        if let Some(slot) = victim {
            let may = self.may.clone();
            self.naive(|naive| naive.popped(&may));
            assert!(self.may.remove(&slot), "slot {slot} may not go");
            self.gone(slot, Gone::Evicted);
        }
        victim
    }

    fn gone(&mut self, slot: u32, gone: Gone) {
        self.policy.remove(slot, gone);
        self.naive(|naive| naive.remove(slot, gone));
        self.here.remove(&slot);
        if self.dense {
            // The last takes the place that is free now.
            let last = self.here.keys().copied().max().unwrap_or(0).max(slot);
            self.policy.renumber(last, slot);
            if let Some(block) = self.here.remove(&last) {
                self.naive(|naive| naive.renumber(last, slot));
                self.here.insert(slot, block);
                if self.may.remove(&last) {
                    self.may.insert(slot);
                }
            }
        }
    }

    fn check(&self) {
        assert_eq!(self.policy.len(), self.may.len());
        assert_eq!(self.policy.is_empty(), self.may.is_empty());
        for slot in 0..SLOTS + 1 {
            assert_eq!(self.policy.contains(slot), self.may.contains(&slot), "slot {slot}");
        }
        let order = self.policy.coldest(usize::MAX);
        assert_eq!(order.len(), self.may.len());
        assert_eq!(order.iter().copied().collect::<BTreeSet<_>>(), self.may);
        assert_eq!(self.policy.coldest(2), order[..order.len().min(2)]);
        if let Some(naive) = &self.naive {
            assert_eq!(order, naive.order(&self.may), "the order is not that of the definition");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    // Goal: `len`, `contains`, `coldest` and `pop` tell one story, which is that of the definition; what may not go is
    // never named; and every candidate is popped in the end.
    #[test]
    fn calls(
        policy in 0..POLICIES.len(),
        dense in any::<bool>(),
        calls in prop::collection::vec((0..14u8, 0..SLOTS, 0..3 * SLOTS), 1..400),
    ) {
        let mut play = Play::new(&POLICIES[policy], dense);
        for (kind, slot, number) in calls {
            play.call(kind, slot, number);
        }
        // Numbers stay as they are while these are compared.
        play.dense = false;
        let order = play.policy.coldest(usize::MAX);
        let popped: Vec<u32> = std::iter::from_fn(|| play.pop()).collect();
        prop_assert_eq!(order, popped, "coldest is not what pop names");
        play.check();
    }
}

/// Publishes blocks in these slots, and makes them candidates.
fn settle(policy: &mut dyn Evict, blocks: impl IntoIterator<Item = (u32, Place)>) {
    for (slot, place) in blocks {
        policy.publish(slot, &place);
        policy.rest(slot);
        policy.allow(slot);
    }
}

/// Uses a candidate once more.
fn use_again(policy: &mut dyn Evict, slot: u32) {
    policy.forbid(slot);
    policy.hit(slot);
    policy.rest(slot);
    policy.allow(slot);
}

// Goal: a use renews: a block that was used again outlives those that came with it and were not. Method: two more uses
// of one of ten equal blocks.
#[test]
fn uses_renew() {
    for policy in &POLICIES {
        let mut evict = make(policy);
        settle(evict.as_mut(), (0..10).map(|slot| (slot, Place { position: 3, ..place(slot) })));
        use_again(evict.as_mut(), 4);
        use_again(evict.as_mut(), 4);
        assert_eq!(evict.coldest(usize::MAX).last(), Some(&4), "{policy:?}");
    }
}

// Goal: a slot's next block inherits nothing. Method: a block that is used a lot is removed; a new one in its slot is as
// cold as an equal one elsewhere that comes after it.
#[test]
fn removal_forgets() {
    for policy in &POLICIES {
        let mut evict = make(policy);
        settle(evict.as_mut(), [(0, place(0))]);
        (0..100).for_each(|_| use_again(evict.as_mut(), 0));
        evict.forbid(0);
        evict.remove(0, Gone::Removed);
        settle(evict.as_mut(), [(0, place(7)), (1, place(14))]);
        assert_eq!(evict.coldest(usize::MAX), [0, 1], "{policy:?}");
        assert_eq!(evict.pop(), Some(0), "{policy:?}");
    }
}

// Goal: what a policy keeps is bounded by the blocks that are here, not by those that have been. Method: a hundred
// times as many different blocks as there are slots.
#[test]
fn history_is_bounded() {
    const MANY: u32 = 1000;
    for policy in &POLICIES {
        let mut evict = make(policy);
        settle(evict.as_mut(), (0..MANY).map(|slot| (slot, place(slot))));
        for number in MANY..100 * MANY {
            let slot = evict.pop().expect("all may go");
            evict.remove(slot, Gone::Evicted);
            settle(evict.as_mut(), [(slot, place(number))]);
        }
        let each = evict.bytes() / MANY as usize;
        assert!(each <= 128, "{policy:?} takes {each} bytes a block");
        (0..MANY - 1).for_each(|_| {
            let slot = evict.pop().expect("all may go");
            evict.remove(slot, Gone::Evicted);
        });
        assert_eq!(evict.len(), 1, "{policy:?}");
    }
}

// Goal: a popular block ages under the cost policy, a late block is dearer than an early one if attention costs
// anything. Method: a block of a hundred uses beside a stream of new ones; two positions, by two costs.
#[test]
fn cost_weighs_and_ages() {
    let policy = Policy::named("cost").expect("it is there");
    let mut evict = make(policy);
    let early = |number| Place { position: 0, ..place(number) };
    settle(evict.as_mut(), [(0, early(0)), (1, early(1))]);
    (0..100).for_each(|_| use_again(evict.as_mut(), 0));
    let mut victims = 0;
    loop {
        let slot = evict.pop().expect("all may go");
        evict.remove(slot, Gone::Evicted);
        if slot == 0 {
            break;
        }
        settle(evict.as_mut(), [(slot, early(10 + victims))]);
        victims += 1;
        assert!(victims < 1000, "what was popular stays for ever");
    }
    assert!(victims > 50, "it went after {victims} victims though it was used a hundred times");

    for (per_pair, first) in [(Costs::default().per_pair, 1), (0.0, 0)] {
        let mut evict = policy.make(&Costs { per_pair, ..Costs::default() });
        settle(evict.as_mut(), [(0, Place { position: 200, ..place(0) }), (1, Place { position: 1, ..place(1) })]);
        assert_eq!(evict.pop(), Some(first), "per pair {per_pair}");
    }
}

// Goal: the name of no policy is an error that lists them.
#[test]
fn unknown_policy() {
    let error = Policy::named("mru").expect_err("there is none");
    assert!(POLICIES.iter().all(|policy| error.message.contains(policy.name)), "{error}");
}

// -- a pool with each policy ------------------------------------------------------------------------------------------

/// Node `i` of a tree in which all nodes but the first three have a parent.
fn tree(seed: u64, nodes: u32) -> Vec<Place> {
    let mut random = Random(seed);
    let mut places: Vec<Place> = Vec::new();
    for number in 0..nodes {
        // Mostly the latest node, so that there are long prefixes and some forks.
        let parent =
            (number > 2).then(|| if random.permille(700) { number - 1 } else { random.below(number.into()) as u32 });
        let position = parent.map_or(0, |parent| places[parent as usize].position + 1);
        places.push(Place { key: key(number), parent: parent.map_or(key(u32::MAX), key), position });
    }
    places
}

/// The nodes from the root to this one.
fn path(tree: &[Place], node: usize) -> Vec<Place> {
    let mut path = vec![tree[node]];
    while let Some(parent) = tree.iter().find(|place| place.key == path[path.len() - 1].parent) {
        path.push(*parent);
    }
    path.reverse();
    path
}

fn holder(number: u8) -> Holder {
    Holder { client: Some(number.into()), tag: Tag { request: number.into(), attempt: 0, worker: 1 } }
}

/// The pool's promises about one eviction: the block is not in use, and if a child of it is here, nothing else could go.
fn expect_may_go(here: &BTreeMap<BlockKey, Place>, used: &BTreeSet<BlockKey>, victim: Place) {
    let has_child =
        |place: &Place| here.values().any(|other| other.parent == place.key && other.position == place.position + 1);
    assert!(!used.contains(&victim.key), "{victim:?} is in use");
    if has_child(&victim) {
        let tail = here.values().find(|place| !used.contains(&place.key) && !has_child(place));
        assert_eq!(tail, None, "{victim:?} went before its child, and this one could have gone");
        let idle_child =
            here.values().find(|other| other.parent == victim.key && !used.contains(&other.key)).map(|place| place.key);
        assert_eq!(idle_child, None, "{victim:?} went before its child");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    // Goal: with every policy a block in use never goes, and no block before a child that may go.
    // Method: four holders take and leave whole prefixes or single blocks, in a pool of twelve slots, and blocks are found
    // corrupt; each eviction is judged by what is here and in use.
    #[test]
    fn prefixes_go_from_the_tail(
        policy in 0..POLICIES.len(),
        seed in any::<u64>(),
        steps in prop::collection::vec((0..4u8, 0..4u8, 0..40usize), 1..150),
    ) {
        let places = tree(seed, 40);
        let mut pool = Pool::new(NoMemory, 12, 0, 10, make(&POLICIES[policy]));
        let mut held: BTreeMap<u8, Vec<BlockKey>> = BTreeMap::new();
        let mut here: BTreeMap<BlockKey, Place> = BTreeMap::new();
        for (kind, number, node) in steps {
            let path = path(&places, node);
            if kind == 3 {
                // A whole prefix may be found corrupt, at any block.
                if let Some(slot) = pool.find(&places[node].key) {
                    pool.unpublish(slot);
                }
                for change in pool.take_changes() {
                    prop_assert_eq!(change, Change::Removed(places[node].key));
                    here.remove(&places[node].key);
                    // Who holds it keeps a slot that nobody else knows.
                    held.values_mut().for_each(|keys| keys.retain(|key| *key != places[node].key));
                }
                pool.check();
                continue;
            }
            held.remove(&number);
            pool.release(holder(number));
            let wanted = if kind == 0 { &path[path.len() - 1..] } else { &path[..] };
            let keys: Vec<BlockKey> = wanted.iter().map(|place| place.key).collect();
            let wish = Wish {
                keys: keys.clone(),
                private: false,
                parent: wanted[0].parent,
                position: wanted[0].position,
                owner: Owner::default(),
            };
            let others: BTreeSet<BlockKey> = held.values().flatten().copied().collect();
            let granted = pool.grant(holder(number), wish, GrantMode::Now);
            let used: BTreeSet<BlockKey> = others.iter().copied().chain(keys.iter().copied()).collect();
            for change in pool.take_changes() {
                let Change::Removed(key) = change else { panic!("nothing was committed") };
                let victim = here[&key];
                expect_may_go(&here, &used, victim);
                here.remove(&key);
            }
            if let Granting::Held(_) = granted {
                // Committed from the tail, every other time.
                let mut indices: Vec<u32> = (0..keys.len() as u32).collect();
                if node.is_multiple_of(2) {
                    indices.reverse();
                }
                for index in indices {
                    pool.commit(holder(number), index, None).expect("nobody writes it");
                }
                held.insert(number, keys);
            }
            for change in pool.take_changes() {
                let Change::Stored(place) = change else { panic!("nothing needs room") };
                here.insert(place.key, place);
            }
            pool.check();
        }
    }

    // Goal: the model of a cache gives the hits that a naive LRU of whole prefixes gives.
    // Method: random prefixes of a tree; the naive one keeps a list of blocks by last use.
    #[test]
    fn model_of_a_cache(
        seed in any::<u64>(),
        dram in 2..20u32,
        nodes in prop::collection::vec(0..60usize, 1..120),
    ) {
        let places = tree(seed, 60);
        let mut model = PoolModel::new(lru(), &Costs::default(), dram, 0, false).unwrap();
        let mut kept: Vec<Place> = Vec::new();
        for node in nodes {
            let path = path(&places, node);
            let found = path.iter().take_while(|place| kept.contains(place)).count().min(dram as usize - 1);
            let fits = path.len().min(dram as usize - 1);
            prop_assert_eq!(model.access(&ids(&path)).unwrap(), Hits { dram: found as u64, ssd: 0 });
            while kept.iter().filter(|place| !path[..fits].contains(place)).count() + fits > dram as usize {
                let leaf = |place: &&Place| !path[..fits].contains(place) && !kept.iter().any(|other| other.parent == place.key);
                let victim = *kept.iter().find(leaf).expect("one may go");
                kept.retain(|place| *place != victim);
            }
            for place in path[..found].iter().rev().chain(path[found..fits].iter().rev()) {
                kept.retain(|other| other != place);
                kept.push(*place);
            }
            model.check();
            prop_assert_eq!(model.counts().in_dram, kept.len() as u64);
        }
    }

    // Goal: with every policy, memory and a large tier together lose nothing; a small tier helps and stays small.
    // Method: random prefixes; an endless cache says what could be found.
    #[test]
    fn model_with_a_tier(
        policy in 0..POLICIES.len(),
        seed in any::<u64>(),
        nodes in prop::collection::vec(0..60usize, 1..60),
    ) {
        let places = tree(seed, 60);
        let new = |dram, ssd| PoolModel::new(&POLICIES[policy], &Costs::default(), dram, ssd, false).unwrap();
        // The longest prefix is of 60 blocks, and one slot is kept for staging.
        let (mut endless, mut all, mut small, mut without) = (new(1000, 0), new(61, 60), new(61, 5), new(61, 0));
        for node in nodes {
            let ids = ids(&path(&places, node));
            let expected = endless.access(&ids).unwrap().dram;
            let Hits { dram, ssd } = all.access(&ids).unwrap();
            prop_assert_eq!(dram + ssd, expected);
            let found = small.access(&ids).unwrap();
            prop_assert_eq!(without.access(&ids).unwrap().dram, found.dram, "what lies behind changes nothing before it");
            prop_assert!(found.dram + found.ssd <= expected);
            prop_assert!(small.counts().in_ssd <= 5);
            small.check();
        }
        prop_assert_eq!(all.counts().dropped, 0);
    }
}

fn ids(path: &[Place]) -> Vec<u64> {
    path.iter().map(|place| u64::from(u32::from_le_bytes(place.key.0[..4].try_into().unwrap()))).collect()
}

// Goal: the tier gives up its oldest segment, but for blocks that were read since, up to a quarter of it.
// Method: memory for one block beside the one in use, so that each access writes one to a tier of 256 (segments of 4).
#[test]
fn tier_keeps_what_was_read() {
    let mut model = PoolModel::new(lru(), &Costs::default(), 2, 256, false).unwrap();
    let ssd = |model: &mut PoolModel, id: u64| model.access(&[id]).unwrap().ssd == 1;
    (0..256 + 2).for_each(|id| assert!(!ssd(&mut model, id)));
    let full = model.counts();
    assert_eq!((full.in_dram, full.in_ssd, full.dropped), (2, 256, 0));
    assert!(ssd(&mut model, 0), "it was read, and then the one that made room for it took the place of its segment");
    assert_eq!(model.counts().dropped, 3);
    assert_eq!([1, 2, 3].map(|id| ssd(&mut model, id)), [false; 3]);
    assert!(ssd(&mut model, 0), "it was moved on");
    assert!(ssd(&mut model, 8), "its segment is not the oldest yet");
    assert!(model.counts().in_ssd <= 256);
    model.check();
}

// Goal: an order to forget leaves the tier alone, and a node's next life finds there what its last one had written.
// Method: memory for one block beside the one in use; packed changes are read by their lengths and their second byte.
#[test]
fn tier_outlives_drops_and_restarts() {
    let mut model = PoolModel::new(lru(), &Costs::default(), 2, 8, true).unwrap();
    let keys: Vec<BlockKey> = (1..=4).map(|k| BlockKey([k; 16])).collect();
    for (tag, key) in keys.iter().enumerate() {
        assert!(model.take(tag as u64, vec![*key], 0, 0, BlockKey::default()).unwrap());
        model.commit(tag as u64, &[*key]).unwrap();
        model.release(tag as u64);
    }
    let before = model.counts();
    assert_eq!((before.in_dram, before.in_ssd, before.evictions), (2, 2, 2));
    assert_eq!(model.drop_blocks(&keys), 2);
    assert_eq!(model.find(&keys), [Where::Ssd; 2], "what was dropped did not go there");
    assert!(model.take(9, vec![keys[0]], 0, 0, BlockKey::default()).unwrap());
    model.restart();
    assert_eq!(model.find(&keys), [Where::Ssd; 2]);
    let told = model.take_changes();
    assert_eq!(
        told.chunks(CHANGE_BYTES).map(|one| (one[0], one[1], one[8])).collect::<Vec<_>>(),
        [(0, 2, 1), (0, 2, 2)]
    );
    assert!(!model.release(9), "nobody holds anything");
    let after = model.counts();
    assert_eq!((after.in_dram, after.in_ssd, after.evictions), (0, 2, 2));
    assert_eq!(model.digest().0, 2);
    model.check();
}

// Goal: what a model cannot do is an error that says so, and changes nothing.
#[test]
fn model_refuses() {
    let new = |dram, ssd| PoolModel::new(lru(), &Costs::default(), dram, ssd, false);
    for (dram, ssd) in [(0, 0), (1, 0), (u32::MAX, 0), (10, u32::MAX)] {
        assert!(new(dram, ssd).unwrap_err().message.contains("impossible"));
    }
    let mut model = new(4, 0).unwrap();
    assert!(model.access(&[1, 2, 1]).unwrap_err().message.contains("block 1 is in the request twice"));
    assert_eq!(model.counts(), new(4, 0).unwrap().counts());
    // Of a request that is too large, what fits is kept.
    assert_eq!(model.access(&[1, 2, 3, 4, 5, 6]).unwrap().dram, 0);
    assert_eq!(model.access(&[1, 2, 3, 4, 5, 6]).unwrap().dram, 3);
    assert_eq!(model.access(&[]).unwrap(), Hits::default());
    model.check();
}

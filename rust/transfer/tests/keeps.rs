//! Blocks that are kept for a time, and quotas as clients meet them: one engine, with a tier in memory, in virtual time.
//!
//! Goal: what is kept is there until its time is over, whoever needs room and whoever has gone; no more than the half is kept;
//! it is known who keeps what. Owners that are told apart do not empty each other's cache, here or on the tier. Method: stories,
//! and random operations beside a map of who keeps what until when; the engine's `check` runs after every input.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use pyengine_transfer::admin::{Cursor, Prefix};
use pyengine_transfer::engine::keep::{self, NAME_LIMIT, TTL_LIMIT};
use pyengine_transfer::engine::{Engine, Input, Keeping, Output, Settings};
use pyengine_transfer::memory::slot_bytes;
use pyengine_transfer::messages::{DaemonOrder, DaemonReport, GrantMode, LocalEvent, LocalRequest, Refusal};
use pyengine_transfer::pool::account::Quota;
use pyengine_transfer::pool::tier::{Health, Whose};
use pyengine_transfer::pool::twin::{MemoryTier, Shelf};
use pyengine_transfer::types::{BlockKey, ClientId, Layout, Medium, NodeAddress, Tag};

const LAYOUT: Layout = Layout { strips: 3, strip_bytes: 16 };
const ROOT: BlockKey = BlockKey([0; 16]);
const SLOTS: u64 = 12;
const MS: u64 = 1_000_000;

fn key(number: u8) -> BlockKey {
    BlockKey([number; 16])
}

fn keys(numbers: impl IntoIterator<Item = u8>) -> Vec<BlockKey> {
    numbers.into_iter().map(key).collect()
}

struct Alone {
    engine: Engine,
    shelf: Shelf,
    now: u64,
    out: Vec<Output>,
    requests: u64,
}

impl Alone {
    fn new(quotas: Vec<Quota>) -> Self {
        let bytes = 4096 + SLOTS * slot_bytes(LAYOUT).expect("possible");
        let node = NodeAddress { node: "a".into(), address: "127.0.0.1:1".into(), incarnation: 5 };
        let shelf = Shelf::default();
        let tier = Box::new(MemoryTier::new(shelf.clone(), 1 << 20, 1 << 20));
        let settings = Settings { quotas, ..Settings::new(bytes) };
        let engine = Engine::with_tier(node, settings, tier);
        let mut alone = Self { engine, shelf, now: 0, out: Vec::new(), requests: 0 };
        for client in 1..4 {
            alone.ask(client, LocalRequest::Attach { ticket: 0, layout: LAYOUT, namespace: 4 });
        }
        alone
    }

    fn handle(&mut self, input: Input) {
        self.now += 1;
        self.engine.handle(input, self.now, &mut self.out);
        self.engine.check();
    }

    fn ask(&mut self, client: ClientId, request: LocalRequest) {
        self.handle(Input::Local { client, request });
    }

    fn wait(&mut self, ms: u64) {
        self.now += ms * MS;
        self.handle(Input::Tick);
    }

    /// What the client was told since the last call.
    fn told(&mut self, client: ClientId) -> Vec<LocalEvent> {
        let mine = self.out.drain(..).filter_map(|output| match output {
            Output::Local { client: its, event } if its == client => Some(event),
            _ => None,
        });
        mine.collect()
    }

    /// Stores a block, if there is room, for a tenant.
    fn store(&mut self, number: u8, tenant: u64) -> Result<(), Refusal> {
        let done = self.begin_store(number, tenant);
        // What is written to the tier meanwhile would free nothing yet.
        self.handle(Input::Tier);
        done
    }

    /// The same, and the tier has not written anything yet.
    fn begin_store(&mut self, number: u8, tenant: u64) -> Result<(), Refusal> {
        self.requests += 1;
        let tag = Tag { request: self.requests, attempt: 1, worker: 1 };
        let (keys, mode) = (vec![key(number)], GrantMode::Now);
        self.told(1);
        self.ask(1, LocalRequest::Grant { tag, keys, private: 0, parent: ROOT, position: 0, mode, tenant });
        let told = self.told(1);
        let done = match told.as_slice() {
            [LocalEvent::Granted { slots, .. }] => {
                let arena = self.engine.arena(1).expect("attached");
                if !slots[0].committed {
                    arena.store(slots[0].slot, 0, &[number; 48]).expect("in range");
                }
                self.ask(1, LocalRequest::Commit { tag, indices: vec![0] });
                Ok(())
            }
            [LocalEvent::Refused { refusal, .. }] => Err(*refusal),
            other => panic!("{other:?}"),
        };
        self.ask(1, LocalRequest::End { tag });
        done
    }

    fn keep(&mut self, client: ClientId, numbers: &[u8], ttl_ms: u64, by: &str) -> Vec<Keeping> {
        self.told(client);
        let keys = keys(numbers.iter().copied());
        self.ask(client, LocalRequest::Keep { ticket: 3, keys, ttl_ms, by: by.into() });
        self.kept(client)
    }

    fn unkeep(&mut self, client: ClientId, numbers: &[u8], by: &str) -> Vec<Keeping> {
        self.told(client);
        let keys = keys(numbers.iter().copied());
        self.ask(client, LocalRequest::Unkeep { ticket: 3, keys, by: by.into() });
        self.kept(client)
    }

    fn kept(&mut self, client: ClientId) -> Vec<Keeping> {
        let told = self.told(client);
        let kept = told.iter().find_map(|event| match event {
            LocalEvent::Kept { ticket: 3, outcomes } => Some(outcomes.clone()),
            _ => None,
        });
        kept.unwrap_or_else(|| panic!("{told:?}"))
    }

    /// Blocks by medium; true: somebody holds it.
    fn listed(&self, medium: Medium) -> BTreeMap<u8, bool> {
        let mut all = BTreeMap::new();
        let mut from = Some(Cursor::default());
        while let Some(cursor) = from {
            let (listed, next) = self.engine.keys(cursor, &Prefix::default(), Some(medium));
            all.extend(listed.iter().map(|block| (block.key.0[0], block.held)));
            from = next;
        }
        all
    }

    fn clear(&mut self, whose: Option<Whose>) {
        let mut from = Some(Cursor::default());
        while let Some(cursor) = from {
            from = self.engine.evict_stretch(cursor, whose, self.now, &mut self.out).1;
            self.engine.check();
        }
    }

    fn counter(&self, name: &str) -> u64 {
        let found = self.engine.counters().into_iter().find(|(sample, _)| sample.starts_with(name));
        found.unwrap_or_else(|| panic!("no {name}")).1
    }
}

// Goal: what is kept outlives those who need room and him who keeps it, comes from SSD if need be, and goes when its time is
// over; others may keep it longer, and there is an account of it all. Method: the story of three blocks.
#[test]
fn kept_until_its_time_is_over() {
    let mut alone = Alone::new(Vec::new());
    (1..4).for_each(|number| alone.store(number, 7).expect("room"));
    alone.wait(1);
    // The third one is on SSD only.
    alone.store(3, 7).expect("found, and so written");
    alone.handle(Input::Tier);
    alone.engine.evict(&[], alone.now, &mut alone.out);
    (10..40).for_each(|number| alone.store(number, 7).expect("room"));
    assert!(!alone.listed(Medium::Dram).contains_key(&3) && alone.listed(Medium::Ssd).contains_key(&3));
    (1..3).for_each(|number| alone.store(number, 7).expect("room"));

    let outcomes = alone.keep(2, &[1, 2, 3, 200], 1000, "two");
    assert_eq!(outcomes, [Keeping::Done, Keeping::Done, Keeping::Coming, Keeping::Missing]);
    assert_eq!(alone.keep(3, &[1], 5000, "three"), [Keeping::Done]);
    alone.handle(Input::Tier);
    alone.handle(Input::LocalGone { client: 2 });
    (50..90).for_each(|number| alone.store(number, 8).expect("room"));
    let here = alone.listed(Medium::Dram);
    assert_eq!([1, 2, 3].map(|number| here.get(&number)), [Some(&true); 3]);
    let bytes = slot_bytes(LAYOUT).expect("possible");
    let kept = alone.engine.pins();
    let lines: Vec<_> = kept.pins.iter().map(|pin| (pin.by.as_str(), pin.blocks, pin.bytes)).collect();
    assert_eq!(lines, [("three", 1, bytes), ("two", 3, 3 * bytes)]);
    assert_eq!((kept.blocks, kept.bytes, alone.counter("pyengine_pool_kept_blocks")), (3, 3 * bytes, 3));
    assert!(kept.pins[0].first_ms > 4000 && kept.pins[1].last_ms < 1000, "{kept:?}");

    alone.wait(1000);
    assert_eq!(alone.engine.pins().pins.iter().map(|pin| pin.by.as_str()).collect::<Vec<_>>(), ["three"]);
    (100..140).for_each(|number| alone.store(number, 8).expect("room"));
    let here = alone.listed(Medium::Dram);
    assert_eq!([1, 2, 3].map(|number| here.contains_key(&number)), [true, false, false]);
    assert_eq!(alone.unkeep(3, &[1, 2], "two"), [Keeping::Missing; 2], "not he");
    assert_eq!(alone.unkeep(3, &[1, 2], "three"), [Keeping::Done, Keeping::Missing]);
    assert!(alone.engine.idle(), "{:?}", alone.engine.unfinished());
}

// Goal: at most the half is kept, and the rest serves on; a time has an end. Method: keep more than there may be.
#[test]
fn the_half_may_be_kept() {
    let mut alone = Alone::new(Vec::new());
    (1..12).for_each(|number| alone.store(number, 7).expect("room"));
    let all: Vec<u8> = (1..12).collect();
    let outcomes = alone.keep(2, &all, u64::MAX, &"x".repeat(1000));
    let done = outcomes.iter().filter(|outcome| **outcome == Keeping::Done).count();
    assert_eq!(done, 6, "{outcomes:?}");
    assert!(outcomes.iter().all(|outcome| matches!(outcome, Keeping::Done | Keeping::Full)));
    let kept = alone.engine.pins();
    assert_eq!(kept.pins[0].by.len(), NAME_LIMIT);
    assert!(kept.bytes <= kept.limit_bytes && kept.pins[0].last_ms <= TTL_LIMIT / MS);
    (20..60).for_each(|number| alone.store(number, 7).expect("the other half"));
    alone.wait(TTL_LIMIT / MS);
    assert_eq!(alone.engine.pins().blocks, 0);
    // Sixteen keepers, and no more.
    for number in 0..17 {
        let outcome = alone.keep(2, &[59], 1000, &format!("number {number}"));
        assert_eq!(outcome, [if number < 16 { Keeping::Done } else { Keeping::Full }]);
    }
    assert_eq!(alone.engine.unkeep(&keys([59]), None, alone.now, &mut alone.out), [Keeping::Done]);
    assert_eq!(alone.engine.pins().blocks, 0);
}

// Goal: a daemon that drains keeps nothing, and new weights clear what is kept too; a single eviction does not. Method: each.
#[test]
fn draining_and_clearing_let_go() {
    let mut alone = Alone::new(Vec::new());
    (1..5).for_each(|number| alone.store(number, u64::from(number % 2)).expect("room"));
    assert_eq!(alone.keep(2, &[1, 2, 3, 4], 1000, "x"), [Keeping::Done; 4]);
    let evicted = alone.engine.evict(&keys([1, 2]), alone.now, &mut alone.out);
    assert_eq!((evicted.held, evicted.dropped), (2, 0));
    alone.clear(None);
    assert_eq!(alone.engine.pins().blocks, 4, "all that nobody holds");
    alone.clear(Some(Whose::Tenant(1)));
    assert_eq!(alone.listed(Medium::Dram).into_keys().collect::<Vec<_>>(), [2, 4]);
    assert_eq!(alone.engine.pins().blocks, 2);
    alone.engine.drain(true);
    assert!(alone.engine.is_quiet() && alone.engine.pins().blocks == 0);
    assert_eq!(alone.keep(2, &[2], 1000, "x"), [Keeping::Full]);
    alone.engine.drain(false);
    assert_eq!(alone.keep(2, &[2], 1000, "x"), [Keeping::Done]);
    alone.shelf.set_health(Health::Failed);
    assert_eq!(alone.unkeep(2, &[2], "x"), [Keeping::Done]);
}

// Goal: an order to clear an owner's blocks reaches memory and SSD, what is kept included, and is answered when it is
// durable, or is said not to be; what is in use stays and is counted. Method: two tenants, one block in use; then a tier that
// has failed.
#[test]
fn an_order_clears_an_owner_everywhere() {
    let mut alone = Alone::new(vec![Quota::default()]);
    for number in 1..7 {
        // The second time it is found, and so written to the tier.
        (0..2).for_each(|_| alone.store(number, u64::from(number % 2)).expect("room"));
    }
    assert_eq!(alone.listed(Medium::Ssd).len(), 6);
    assert_eq!(alone.keep(2, &[1, 2], 1000, "x"), [Keeping::Done; 2]);
    let tag = Tag { request: 999, attempt: 1, worker: 1 };
    alone.ask(3, LocalRequest::Lookup { tag, keys: keys([3]) });
    let ordered = |alone: &mut Alone, order| {
        alone.out.clear();
        alone.handle(Input::Order(DaemonOrder::Clear { order, whose: Whose::Tenant(1) }));
        (0..3).for_each(|_| alone.handle(Input::Tier));
        let told = alone.out.iter().filter_map(|output| match output {
            Output::Report(DaemonReport::Cleared { order: of, dropped, held, durable }) => {
                Some((*of, *dropped, *held, *durable))
            }
            _ => None,
        });
        told.collect::<Vec<_>>()
    };
    // Of three in memory one is in use; those on the tier go all.
    assert_eq!(ordered(&mut alone, 5), [(5, 2 + 1, 1, true)]);
    assert_eq!(alone.listed(Medium::Dram).into_keys().collect::<Vec<_>>(), [2, 3, 4, 6]);
    assert_eq!(alone.listed(Medium::Ssd).into_keys().collect::<Vec<_>>(), [2, 4, 6]);
    assert_eq!(alone.engine.pins().blocks, 1);
    alone.ask(3, LocalRequest::End { tag });
    assert_eq!(ordered(&mut alone, 6), [(6, 1, 0, true)]);
    alone.shelf.set_health(Health::Failed);
    assert_eq!(ordered(&mut alone, 7), [(7, 0, 0, false)]);
}

// Goal: an order to forget blocks drops them from memory only, and tells of it; what is in use or kept stays, what is not
// there does no harm. Method: of six blocks one is in use, one kept; all are on the tier.
#[test]
fn an_order_to_forget_drops_what_nobody_holds_from_memory() {
    let mut alone = Alone::new(Vec::new());
    for number in 1..7 {
        (0..2).for_each(|_| alone.store(number, 7).expect("room"));
    }
    alone.handle(Input::Tier);
    assert_eq!(alone.listed(Medium::Ssd).len(), 6);
    assert_eq!(alone.keep(2, &[1], 1000, "x"), [Keeping::Done]);
    let tag = Tag { request: 999, attempt: 1, worker: 1 };
    alone.ask(3, LocalRequest::Lookup { tag, keys: keys([3]) });
    alone.out.clear();
    alone.handle(Input::Order(DaemonOrder::Forget { keys: keys([1, 2, 3, 4, 99, 2]) }));
    assert_eq!(alone.listed(Medium::Dram).into_keys().collect::<Vec<_>>(), [1, 3, 5, 6]);
    assert_eq!(alone.listed(Medium::Ssd).len(), 6);
    let removed = alone.out.iter().filter_map(|output| match output {
        Output::Report(DaemonReport::Removed { key, medium: Medium::Dram, .. }) => Some(*key),
        _ => None,
    });
    assert_eq!(removed.collect::<Vec<_>>(), keys([2, 4]));
    alone.ask(3, LocalRequest::End { tag });
    alone.handle(Input::Order(DaemonOrder::Forget { keys: keys([3]) }));
    assert!(!alone.listed(Medium::Dram).contains_key(&3));
}

// Goal: a block that is to be kept and turns out rotten on the tier is not kept, and leaves nothing. Method: rot.
#[test]
fn what_cannot_be_read_is_not_kept() {
    let mut alone = Alone::new(Vec::new());
    (0..2).for_each(|_| alone.store(1, 7).expect("room"));
    alone.handle(Input::Tier);
    (10..40).for_each(|number| alone.store(number, 7).expect("room"));
    assert!(!alone.listed(Medium::Dram).contains_key(&1));
    assert!(alone.shelf.rot(&key(1)));
    assert_eq!(alone.keep(2, &[1], 1000, "x"), [Keeping::Coming]);
    assert_eq!(alone.engine.pins().blocks, 1);
    alone.handle(Input::Tier);
    assert_eq!(alone.engine.pins().blocks, 0);
    // Let go while it comes: what comes is cached.
    (0..2).for_each(|_| alone.store(2, 7).expect("room"));
    alone.handle(Input::Tier);
    (10..40).for_each(|number| alone.store(number, 7).expect("room"));
    assert_eq!(alone.keep(2, &[2], 1000, "x"), [Keeping::Coming]);
    assert_eq!(alone.unkeep(2, &[2], "x"), [Keeping::Done]);
    alone.handle(Input::Tier);
    assert!(alone.engine.idle(), "{:?}", alone.engine.unfinished());
}

// Goal: what is on its way to the SSD only is not said to be nowhere. Method: the tier writes nothing while others need room.
#[test]
fn what_is_being_written_can_be_kept_in_a_moment() {
    let mut alone = Alone::new(Vec::new());
    (0..2).for_each(|_| alone.begin_store(1, 7).expect("room"));
    // As long as there is room that is not waited for.
    // What is used twice, too, is preferred to it in the end.
    let both = (10..40).flat_map(|number| [number; 2]);
    let _ = both.take_while(|number| alone.begin_store(*number, 7).is_ok()).count();
    assert!(!alone.listed(Medium::Dram).contains_key(&1) && !alone.listed(Medium::Ssd).contains_key(&1));
    assert_eq!(alone.keep(2, &[1, 200], 1000, "x"), [Keeping::Full, Keeping::Missing]);
    alone.handle(Input::Tier);
    assert_eq!(alone.keep(2, &[1], 1000, "x"), [Keeping::Coming]);
    alone.handle(Input::Tier);
    assert_eq!(alone.engine.pins().blocks, 1);
}

// Goal: a noisy tenant cannot empty another's cache, in memory or on SSD; one at his limit is refused and nobody else.
// Method: two tenants with quotas store; the SSD takes what it may of each.
#[test]
fn tenants_do_not_empty_each_others_cache() {
    let block = slot_bytes(LAYOUT).expect("possible");
    let noisy = Quota { tenant: Some(8), ssd_bytes: Some(3 * 48), ..Quota::default() };
    let small = Quota { tenant: Some(9), dram_bytes: Some(3 * block), ..Quota::default() };
    let mut alone = Alone::new(vec![noisy, small]);
    (1..6).for_each(|number| alone.store(number, 7).expect("room"));
    for number in 50..150 {
        alone.store(number, 8).expect("room");
        alone.handle(Input::Tier);
    }
    let here = alone.listed(Medium::Dram);
    assert_eq!(here.keys().filter(|number| **number < 50).count(), 5, "{here:?}");
    let on_ssd = alone.listed(Medium::Ssd);
    assert!(on_ssd.keys().filter(|number| **number >= 50).count() == 3, "{on_ssd:?}");
    assert!(alone.counter("pyengine_tier_over_quota_total") > 0);
    let status = alone.engine.accounts();
    let of = |tenant: u64| status.iter().find(|known| known.tenant == Some(tenant)).expect("known").clone();
    assert_eq!((of(7).dram_bytes, of(8).ssd_bytes, of(8).ssd_limit), (5 * block, 144, Some(144)));
    // He who may have three has three, whatever he stores.
    (200..230).for_each(|number| alone.store(number, 9).expect("of his own"));
    let here = alone.listed(Medium::Dram);
    assert_eq!(here.keys().filter(|number| **number >= 200).count(), 3, "{here:?}");
    let (keys, mode) = (keys(230..233), GrantMode::Now);
    let tag = Tag { request: 999, attempt: 1, worker: 1 };
    alone.told(1);
    alone.ask(1, LocalRequest::Grant { tag, keys, private: 0, parent: ROOT, position: 0, mode, tenant: 9 });
    assert_eq!(alone.told(1), [LocalEvent::Refused { tag, refusal: Refusal::TooLarge }]);
    assert!(Alone::new(Vec::new()).engine.accounts().is_empty());
}

// Goal: times and names that mean nothing are refused with what to do.
#[test]
fn times_and_names() {
    for seconds in [0.0, 86_400.5, 1e9] {
        let error = keep::time(Duration::from_secs_f64(seconds), "x").expect_err("no time").message;
        assert!(error.contains("at most 86400"), "{error}");
    }
    for by in [String::new(), "x".repeat(NAME_LIMIT + 1)] {
        assert!(keep::time(Duration::from_secs(1), &by).expect_err("no name").message.contains("1 to 64 bytes"));
    }
    assert_eq!(keep::time(Duration::from_nanos(1), "x"), Ok(1));
    assert_eq!(keep::time(Duration::from_secs(86_400), "x"), Ok(86_400_000));
}

#[derive(Clone, Debug)]
enum Op {
    Store { number: u8, tenant: u64 },
    Keep { number: u8, ttl_ms: u64, by: u8 },
    Unkeep { number: u8, by: u8 },
    Wait { ms: u64 },
    Evict { number: u8 },
    Clear { tenant: u64 },
    Gone { client: ClientId },
    Tier,
}

fn ops() -> impl Strategy<Value = Op> {
    let number = 1..30u8;
    prop_oneof![
        6 => (number.clone(), 0..2u64).prop_map(|(number, tenant)| Op::Store { number, tenant }),
        3 => (number.clone(), 1..200u64, 0..3u8).prop_map(|(number, ttl_ms, by)| Op::Keep { number, ttl_ms, by }),
        1 => (number.clone(), 0..3u8).prop_map(|(number, by)| Op::Unkeep { number, by }),
        2 => (1..100u64).prop_map(|ms| Op::Wait { ms }),
        1 => number.prop_map(|number| Op::Evict { number }),
        1 => (0..2u64).prop_map(|tenant| Op::Clear { tenant }),
        1 => (2..4u64).prop_map(|client| Op::Gone { client }),
        2 => Just(Op::Tier),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_operations(apart in any::<bool>(), ops in prop::collection::vec(ops(), 1..120)) {
        let mut alone = Alone::new(if apart { vec![Quota::default()] } else { Vec::new() });
        // By whom which blocks are kept, until when; and whose blocks are.
        let mut kept: BTreeMap<(u8, String), u64> = BTreeMap::new();
        let mut owners: BTreeMap<u8, u64> = BTreeMap::new();
        // Those of which only the tier has said that they come.
        let mut coming: BTreeSet<u8> = BTreeSet::new();
        for op in ops {
            match op {
                Op::Store { number, tenant } => {
                    let there = alone.listed(Medium::Dram).contains_key(&number) || alone.listed(Medium::Ssd).contains_key(&number);
                    if there || alone.store(number, tenant).is_err() {
                        continue;
                    }
                    owners.insert(number, tenant);
                }
                Op::Keep { number, ttl_ms, by } => {
                    let by = format!("by {by}");
                    let there = alone.listed(Medium::Dram).contains_key(&number);
                    let behind = alone.listed(Medium::Ssd).contains_key(&number);
                    let known = kept.keys().any(|(other, _)| *other == number);
                    let outcome = alone.keep(2, &[number], ttl_ms, &by)[0];
                    match outcome {
                        Keeping::Done => prop_assert!(there || known),
                        Keeping::Coming => prop_assert!(behind && !there && coming.insert(number) | true),
                        Keeping::Missing => prop_assert!(!there && !behind),
                        Keeping::Full => {
                            let blocks: BTreeSet<u8> = kept.keys().map(|(number, _)| *number).collect();
                            prop_assert!(!known && blocks.len() as u64 >= SLOTS / 2, "{blocks:?}");
                        }
                    }
                    if matches!(outcome, Keeping::Done | Keeping::Coming) {
                        kept.insert((number, by), alone.now + ttl_ms * MS);
                    }
                }
                Op::Unkeep { number, by } => {
                    let by = format!("by {by}");
                    let outcome = alone.unkeep(3, &[number], &by)[0];
                    prop_assert_eq!(outcome == Keeping::Done, kept.remove(&(number, by)).is_some());
                }
                Op::Wait { ms } => {
                    alone.wait(ms);
                    let now = alone.now;
                    kept.retain(|_, until| *until > now);
                }
                // What is evicted while it comes does not come.
                Op::Evict { number } if coming.contains(&number) => {}
                Op::Evict { number } => drop(alone.engine.evict(&keys([number]), alone.now, &mut alone.out)),
                Op::Clear { tenant } => {
                    alone.clear(Some(Whose::Tenant(tenant)));
                    kept.retain(|(number, _), _| owners[number] != tenant);
                }
                Op::Gone { client } => {
                    alone.handle(Input::LocalGone { client });
                    alone.ask(client, LocalRequest::Attach { ticket: 0, layout: LAYOUT, namespace: 4 });
                }
                Op::Tier => alone.handle(Input::Tier),
            }
            alone.engine.check();
            let here = alone.listed(Medium::Dram);
            if matches!(alone.engine.pins().blocks, 0) {
                coming.clear();
            }
            for (number, _) in kept.keys() {
                let comes = coming.contains(number) && !here.contains_key(number);
                prop_assert!(comes || here.get(number) == Some(&true), "{} is kept and not here", number);
            }
            coming.retain(|number| !here.contains_key(number) && kept.keys().any(|(other, _)| other == number));
            let mut pins: BTreeMap<String, u64> = BTreeMap::new();
            kept.keys().for_each(|(_, by)| *pins.entry(by.clone()).or_default() += 1);
            let told: BTreeMap<String, u64> = alone.engine.pins().pins.into_iter().map(|pin| (pin.by, pin.blocks)).collect();
            prop_assert_eq!(told, pins);
        }
        alone.wait(1000);
        alone.handle(Input::Tier);
        prop_assert!(alone.engine.idle(), "{:?}", alone.engine.unfinished());
    }
}

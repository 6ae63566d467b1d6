//! Goal: whoever runs a daemon sees what is there, drops only what nobody holds, finds what is rotten, and drains without
//! harm to what is held. Method: random operations on an engine beside a naive model; then a whole daemon in this process,
//! asked over its unix socket. Every wait is for an event, with a generous limit that only a failure reaches.

mod lanes;
mod scratch;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use pyengine_transfer::admin::{
    AdminClient, AdminReply, AdminRequest, Cursor, Evicted, Held, Moving, Prefix, Status, Verified, hex,
};
use pyengine_transfer::client::{ClientEvent, PoolClient};
use pyengine_transfer::config::Config;
use pyengine_transfer::daemon::Daemon;
use pyengine_transfer::engine::{Engine, Input, Output, Settings};
use pyengine_transfer::error::ErrorKind;
use pyengine_transfer::link::{Connection, Link, Stream, now};
use pyengine_transfer::memory::{Arena, Runs, checksum};
use pyengine_transfer::messages::{DaemonOrder, DaemonReport, GrantMode, LocalEvent, LocalRequest, Purpose, Refusal};
use pyengine_transfer::pool::Place;
use pyengine_transfer::pool::tier::{Fate, Health, Record, Tier, TierEvent, Whose};
use pyengine_transfer::pool::twin::{MemoryTier, Shelf};
use pyengine_transfer::session::{Ended, Session};
use pyengine_transfer::types::{BlockKey, Layout, Medium, NodeAddress, Owner, Tag};

use lanes::{KEY, PATIENCE};
use scratch::Scratch;

const LAYOUT: Layout = Layout { strips: 1, strip_bytes: 64 };
const HEAD: BlockKey = BlockKey([0; 16]);
/// One page and the table's eight bytes.
const SLOT_BYTES: u64 = 4096 + 8;

fn key(number: u32) -> BlockKey {
    let mut key = [0xEE; 16];
    key[..4].copy_from_slice(&number.to_be_bytes());
    BlockKey(key)
}

fn tag(request: u64) -> Tag {
    Tag { request, attempt: 0, worker: 1 }
}

// -- an engine, and a model ----------------------------------------------------------------------------------------

#[derive(Clone, Debug)]
enum Step {
    /// A grant of these keys under a new tag, for a tenant.
    Grant(BTreeSet<u32>, GrantMode, u64),
    Lookup(BTreeSet<u32>),
    /// All of a grant's blocks become readable.
    Commit(u64),
    End(u64),
    Evict(BTreeSet<u32>),
    EvictAll,
    Clear(Whose),
    Drain(bool),
    Replicate(u32),
}

fn step() -> impl Strategy<Value = Step> {
    let keys = || proptest::collection::btree_set(0..12u32, 0..5);
    let mode = prop_oneof![Just(GrantMode::Wait), Just(GrantMode::Now), Just(GrantMode::Staging)];
    prop_oneof![
        4 => (keys(), mode, 0..3u64).prop_map(|(keys, mode, tenant)| Step::Grant(keys, mode, tenant)),
        1 => keys().prop_map(Step::Lookup),
        4 => any::<u64>().prop_map(Step::Commit),
        4 => any::<u64>().prop_map(Step::End),
        2 => keys().prop_map(Step::Evict),
        1 => Just(Step::EvictAll),
        1 => (0..4u64).prop_map(|tenant| Step::Clear(Whose::Tenant(tenant))),
        1 => (5..7u64).prop_map(|namespace| Step::Clear(Whose::Namespace(namespace))),
        1 => any::<bool>().prop_map(Step::Drain),
        1 => (0..12u32).prop_map(Step::Replicate),
    ]
}

/// The namespace of the one client.
const NAMESPACE: u64 = 5;

/// What the engine is expected to have: which keys are published, for which tenant, and who holds what.
#[derive(Default)]
struct Model {
    published: BTreeMap<u32, u64>,
    /// By tag: its keys, those of them that it still has to write, and for whom.
    held: BTreeMap<u64, (BTreeSet<u32>, BTreeSet<u32>, u64)>,
    /// Tags that owe an end.
    owed: BTreeSet<u64>,
    draining: bool,
}

struct World {
    engine: Engine,
    model: Model,
    now: u64,
    next: u64,
}

impl World {
    fn new() -> Self {
        let node = NodeAddress { node: "n".into(), address: String::new(), incarnation: 1 };
        // So many slots that nothing is evicted and nothing waits: room is the pool's own tests' matter.
        let mut world = Self {
            engine: Engine::new(node, Settings::new(400 * SLOT_BYTES)),
            model: Model::default(),
            now: 0,
            next: 1,
        };
        world.ask(LocalRequest::Attach { ticket: 0, layout: LAYOUT, namespace: NAMESPACE });
        world
    }

    fn outputs(&mut self, input: Input) -> Vec<Output> {
        self.now += 1;
        let mut out = Vec::new();
        self.engine.handle(input, self.now, &mut out);
        self.engine.check();
        out
    }

    fn ask(&mut self, request: LocalRequest) -> Vec<LocalEvent> {
        let out = self.outputs(Input::Local { client: 7, request });
        out.into_iter()
            .filter_map(|output| match output {
                Output::Local { event, .. } => Some(event),
                _ => None,
            })
            .collect()
    }

    fn holds(&self, number: u32) -> bool {
        self.model.held.values().any(|(keys, ..)| keys.contains(&number))
    }

    /// Some tag that owes an end.
    fn some_tag(&self, seed: u64) -> Option<u64> {
        let tags: Vec<u64> = self.model.owed.iter().copied().collect();
        (!tags.is_empty()).then(|| tags[seed as usize % tags.len()])
    }

    fn step(&mut self, step: &Step) {
        let keys_of = |numbers: &BTreeSet<u32>| numbers.iter().copied().map(key).collect::<Vec<_>>();
        match step {
            Step::Grant(numbers, mode, tenant) => {
                let request = self.next;
                self.next += 1;
                let keys = keys_of(numbers);
                let grant = LocalRequest::Grant {
                    tag: tag(request),
                    keys,
                    private: 0,
                    parent: HEAD,
                    position: 0,
                    mode: *mode,
                    tenant: *tenant,
                };
                let events = self.ask(grant);
                if self.model.draining && *mode != GrantMode::Staging {
                    assert_eq!(events, [LocalEvent::Refused { tag: tag(request), refusal: Refusal::Full }]);
                    return;
                }
                let [LocalEvent::Granted { slots, .. }] = &events[..] else { panic!("{events:?}") };
                for (number, slot) in numbers.iter().zip(slots) {
                    assert_eq!(slot.committed, self.model.published.contains_key(number), "key {number}");
                }
                let wanted =
                    numbers.iter().copied().filter(|number| !self.model.published.contains_key(number)).collect();
                self.model.held.insert(request, (numbers.clone(), wanted, *tenant));
                self.model.owed.insert(request);
            }
            Step::Lookup(numbers) => {
                let request = self.next;
                self.next += 1;
                let events = self.ask(LocalRequest::Lookup { tag: tag(request), keys: keys_of(numbers) });
                if self.model.draining {
                    assert_eq!(events, [LocalEvent::Refused { tag: tag(request), refusal: Refusal::Full }]);
                    return;
                }
                let found: BTreeSet<u32> =
                    numbers.iter().copied().take_while(|number| self.model.published.contains_key(number)).collect();
                assert!(matches!(&events[..], [LocalEvent::Located { slots, .. }] if slots.len() == found.len()));
                self.model.held.insert(request, (found, BTreeSet::new(), 0));
                self.model.owed.insert(request);
            }
            Step::Commit(seed) => {
                let Some(request) = self.some_tag(*seed) else { return };
                let Some((keys, wanted, tenant)) = self.model.held.get_mut(&request) else { return };
                if wanted.is_empty() {
                    return;
                }
                let indices = (0..keys.len() as u32).collect();
                // Each is written once: what is evicted after that does not come back by itself. The first one counts.
                for number in std::mem::take(wanted) {
                    self.model.published.entry(number).or_insert(*tenant);
                }
                assert_eq!(self.ask(LocalRequest::Commit { tag: tag(request), indices }), []);
            }
            Step::End(seed) => {
                let Some(request) = self.some_tag(*seed) else { return };
                assert_eq!(self.ask(LocalRequest::End { tag: tag(request) }), []);
                self.model.held.remove(&request);
                self.model.owed.remove(&request);
            }
            Step::Evict(numbers) => {
                let mut expected = Evicted::default();
                for number in numbers {
                    if !self.model.published.contains_key(number) {
                        expected.missing += 1;
                    } else if self.holds_published(*number) {
                        expected.held += 1;
                    } else {
                        expected.dropped += 1;
                    }
                }
                let (evicted, removed) = self.change(|engine, now, out| engine.evict(&keys_of(numbers), now, out));
                assert_eq!(evicted, expected);
                assert_eq!(removed.len() as u64, expected.dropped, "the conductor is told");
                removed.iter().for_each(|number| assert!(numbers.contains(number)));
                self.forget(&removed);
            }
            Step::EvictAll => self.evict_all(None),
            Step::Clear(whose) => self.evict_all(Some(*whose)),
            Step::Drain(on) => {
                self.engine.drain(*on);
                self.model.draining = *on;
            }
            Step::Replicate(number) => {
                if self.model.draining {
                    let from = NodeAddress { node: "m".into(), address: "127.0.0.1:1".into(), incarnation: 1 };
                    let order =
                        DaemonOrder::Replicate { order: 1, keys: vec![key(*number)], parent: HEAD, position: 0, from };
                    let out = self.outputs(Input::Order(order));
                    assert!(
                        matches!(&out[..], [Output::Report(DaemonReport::Replicated { stored: 0, missing: 1, .. })]),
                        "{out:?}"
                    );
                }
            }
        }
    }

    fn evict_all(&mut self, whose: Option<Whose>) {
        let meant = |tenant: u64| whose.is_none_or(|whose| whose.has(Owner { namespace: NAMESPACE, tenant }));
        let published = self.model.published.iter().filter(|(_, tenant)| meant(**tenant));
        let (held, droppable): (BTreeSet<u32>, BTreeSet<u32>) =
            published.map(|(number, _)| *number).partition(|number| self.holds_published(*number));
        let ((evicted, next), removed) =
            self.change(|engine, now, out| engine.evict_stretch(Cursor::default(), whose, now, out));
        assert_eq!((evicted.dropped, evicted.missing, next), (droppable.len() as u64, 0, None));
        assert_eq!(evicted.held, held.len() as u64);
        assert_eq!(removed, droppable);
        self.forget(&removed);
    }

    /// A published block is held by who was granted or has found it, published already or by itself. A duplicate that was
    /// reserved beside it is another slot.
    fn holds_published(&self, number: u32) -> bool {
        let [slot] = &self.listed(number)[..] else { panic!("key {number} is published once") };
        // The engine's own word, which `the_list_is_the_truth` compares with what ends bring about.
        assert!(*slot <= self.holds(number), "key {number} is held by nobody");
        *slot
    }

    fn listed(&self, number: u32) -> Vec<bool> {
        let prefix = Prefix::parse(&hex(&key(number))).expect("hex");
        let (blocks, next) = self.engine.keys(Cursor::default(), &prefix, None);
        assert_eq!(next, None);
        blocks.into_iter().map(|block| block.held).collect()
    }

    /// Does something no input does; also returns which keys the conductor was told to be gone.
    fn change<T>(&mut self, work: impl FnOnce(&mut Engine, u64, &mut Vec<Output>) -> T) -> (T, BTreeSet<u32>) {
        self.now += 1;
        let mut out = Vec::new();
        let value = work(&mut self.engine, self.now, &mut out);
        self.engine.check();
        let removed = out.iter().map(|output| match output {
            Output::Report(DaemonReport::Removed { key, medium: Medium::Dram, .. }) => {
                u32::from_be_bytes([key.0[0], key.0[1], key.0[2], key.0[3]])
            }
            other => panic!("{other:?}"),
        });
        let removed = removed.collect();
        (value, removed)
    }

    fn forget(&mut self, removed: &BTreeSet<u32>) {
        self.model.published.retain(|number, _| !removed.contains(number));
    }

    fn check(&self) {
        let (blocks, _) = self.engine.keys(Cursor::default(), &Prefix::default(), Some(Medium::Dram));
        let listed: BTreeSet<BlockKey> = blocks.iter().map(|block| block.key).collect();
        assert_eq!(listed.len(), blocks.len(), "a block is listed twice");
        assert_eq!(listed, self.model.published.keys().copied().map(key).collect());
        for block in &blocks {
            let number = u32::from_be_bytes([block.key.0[0], block.key.0[1], block.key.0[2], block.key.0[3]]);
            let owner = Owner { namespace: NAMESPACE, tenant: self.model.published[&number] };
            assert_eq!(block.owner, owner, "key {number}");
        }
        let (nothing, _) = self.engine.keys(Cursor::default(), &Prefix::default(), Some(Medium::Ssd));
        assert_eq!(nothing, []);
        let held = self.engine.held();
        assert_eq!(self.engine.is_quiet(), self.engine.idle(), "{:?}", self.engine.unfinished());
        assert_eq!(self.engine.is_quiet(), held.is_nothing(), "{held:?}");
        assert_eq!(held.tags, self.model.owed.len() as u64);
        assert_eq!(held.is_nothing(), self.model.owed.is_empty());
        let status = self.engine.status();
        assert_eq!((status.draining, status.held), (self.model.draining, held));
        assert_eq!(status.tiers[0].blocks, listed.len() as u64);
        for layout in status.layouts {
            let sum = layout.free + layout.cached + layout.pinned + layout.reserved + layout.quarantine;
            assert_eq!(sum, layout.slots);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn random_orders_agree_with_the_model(steps in proptest::collection::vec(step(), 1..80)) {
        let mut world = World::new();
        for step in &steps {
            world.step(step);
            world.check();
        }
        // In the end nobody holds anything: all may go, and the engine is as new.
        for request in std::mem::take(&mut world.model.owed) {
            world.ask(LocalRequest::End { tag: tag(request) });
            world.model.held.remove(&request);
        }
        world.check();
        for number in world.model.published.clone().into_keys() {
            assert_eq!(world.listed(number), [false], "nobody holds key {number}");
        }
        world.step(&Step::EvictAll);
        world.check();
        prop_assert!(world.model.published.is_empty());
        prop_assert_eq!(world.engine.status().layouts[0].free, world.engine.status().layouts[0].slots);
    }
}

/// An engine with so many blocks in its arena, of tenants in turn, and their keys.
fn engine_with(count: u32, tenants: u64, tier: Option<Box<dyn Tier>>) -> (Engine, Vec<BlockKey>) {
    let node = NodeAddress { node: "n".into(), address: String::new(), incarnation: 1 };
    let settings = Settings::new(u64::from(count + 100) * SLOT_BYTES);
    let mut engine = match tier {
        Some(tier) => Engine::with_tier(node, settings, tier),
        None => Engine::new(node, settings),
    };
    let mut out = Vec::new();
    let mut ask = |request| engine.handle(Input::Local { client: 1, request }, 1, &mut out);
    ask(LocalRequest::Attach { ticket: 0, layout: LAYOUT, namespace: 0 });
    let all: Vec<BlockKey> = (0..count).map(key).collect();
    let (private, parent, position, mode) = (0, HEAD, 0, GrantMode::Now);
    for (tenant, keys) in (0..tenants).zip(all.chunks(all.len().div_ceil(tenants as usize))) {
        let (tag, keys, indices) = (tag(tenant), keys.to_vec(), (0..keys.len() as u32).collect());
        ask(LocalRequest::Grant { tag, keys, private, parent, position, mode, tenant });
        ask(LocalRequest::Commit { tag, indices });
        ask(LocalRequest::End { tag });
    }
    (engine, all)
}

/// Goal: clearing an SSD goes on in steps that each do a bounded part and do not begin anew. Method: more blocks of two
/// tenants than two stretches have; what each step drops, and where the next one begins.
#[test]
fn what_is_on_ssd_is_dropped_in_stretches() {
    let (count, shelf) = (20_000u32, Shelf::default());
    let tier = || Box::new(MemoryTier::new(shelf.clone(), 1 << 30, 1 << 30));
    let (mut engine, keys) = engine_with(count, 2, Some(tier()));
    let mut out = Vec::new();
    engine.handle(Input::Stop, 2, &mut out);
    while !engine.has_left() {
        engine.handle(Input::Tier, 2, &mut out);
    }
    let node = NodeAddress { node: "n".into(), address: String::new(), incarnation: 2 };
    let mut engine = Engine::with_tier(node, Settings::new(1 << 20), tier());
    let mut gone = Vec::new();
    for (whose, expected) in [(Some(Whose::Tenant(1)), count / 2), (None, count / 2)] {
        let (mut from, mut dropped) = (Some(Cursor::default()), 0);
        while let Some(at) = from {
            let (evicted, next) = engine.evict_stretch(at, whose, 3, &mut out);
            assert!(evicted.dropped <= 4096, "a step is bounded, {} were dropped", evicted.dropped);
            assert!(next.is_none_or(|next| (next.store, next.slot) > (at.store, at.slot)), "{next:?} after {at:?}");
            (from, dropped) = (next, dropped + evicted.dropped);
        }
        assert_eq!(dropped, u64::from(expected));
        gone.extend(out.drain(..).filter_map(|output| match output {
            Output::Report(DaemonReport::Removed { key, medium: Medium::Ssd, .. }) => Some(key),
            _ => None,
        }));
        assert!(gone[0] >= keys[keys.len() / 2], "another tenant's go later");
        engine.check();
    }
    gone.sort_unstable();
    assert_eq!(gone, keys, "each is told once");
    assert_eq!(engine.status().tiers[1].blocks, 0);
}

/// Goal: a dump of any size never floods its link, its parts are numbered, and a later one takes its place. Method: more
/// blocks than are told at once.
#[test]
fn a_long_dump_waits_for_room() {
    let (mut engine, keys) = engine_with(40_000, 1, None);
    let mut handle = |input| {
        let mut out = Vec::new();
        engine.handle(input, 2, &mut out);
        let parts = out.into_iter().map(|output| match output {
            Output::Report(DaemonReport::Dump { sequence: 40_000, part, blocks, last }) => (part, blocks, last),
            other => panic!("{other:?}"),
        });
        (parts.collect::<Vec<_>>(), engine.is_dumping())
    };
    let (begun, more) = handle(Input::Order(DaemonOrder::Dump));
    assert!(begun.len() <= 16 && more);
    let (mut parts, mut more) = handle(Input::Order(DaemonOrder::Dump));
    while more {
        let (next, yet) = handle(Input::DumpOn);
        assert!(!next.is_empty() && next.len() <= 16, "a step is bounded");
        parts.extend(next);
        more = yet;
    }
    assert_eq!(handle(Input::DumpOn).0.len(), 0);
    assert!(parts.iter().zip(0..).all(|((part, ..), number)| *part == number));
    let (last, others) = parts.split_last().expect("there are some");
    assert!(last.2 && others.iter().all(|(.., last)| !last));
    let mut told: Vec<BlockKey> = parts.iter().flat_map(|(_, blocks, _)| blocks.iter().map(|block| block.0)).collect();
    told.sort_unstable();
    assert_eq!(told, keys);
}

/// Goal: what was only hinted at does not hold up a drain. Method: a peer that does not answer, and more hints than are
/// followed at once.
#[test]
fn a_drain_waits_for_no_hint() {
    let mut world = World::new();
    let from = NodeAddress { node: "m".into(), address: "127.0.0.1:1".into(), incarnation: 1 };
    let keys = (0..100).map(key).collect();
    let hint = LocalRequest::Prefetch { keys, parent: HEAD, position: 0, from: vec![from.clone()] };
    assert_eq!(world.ask(hint), []);
    assert!(world.engine.held().fetches >= 100);
    world.engine.drain(true);
    world.outputs(Input::PeerDown { peer: from });
    assert!(world.engine.is_quiet(), "{:?}", world.engine.unfinished());
}

/// Writes blocks to a tier.
fn shelve(tier: &mut dyn Tier, keys: &[BlockKey]) {
    let arena = Arena::create(4 * SLOT_BYTES, LAYOUT).expect("a small arena");
    for (op, &key) in (0..).zip(keys) {
        let slot = arena.issue(0);
        let mut hold = arena.begin_write(slot, 0..1).expect("a new life");
        let bytes = hold.strips_mut(0..1);
        bytes.fill(key.0[3]);
        let sum = checksum(bytes);
        hold.set_checksum(0, sum);
        drop(hold);
        assert!(arena.seal(slot));
        let record =
            Record { place: Place { key, parent: HEAD, position: 0 }, owner: Owner::default(), layout: LAYOUT };
        tier.write(op, record, arena.begin_read(slot).expect("sealed"));
        arena.retire(slot);
        assert_eq!(tier.poll(), [TierEvent::Ended { op, fate: Fate::Done }]);
    }
}

/// All that a scrub finds, and its steps; what it reports besides goes to `out`.
fn scrub(engine: &mut Engine, out: &mut Vec<Output>) -> (Verified, u32) {
    let (mut all, mut steps, mut from) = (Verified::default(), 0, Some(Cursor::default()));
    while let Some(at) = from {
        let at = engine.verifies_tier(at, Some(Medium::Ssd)).expect("it has one");
        let (number, next) = engine.scrub(at, 3, out);
        let found = loop {
            let is_it = |output: &Output| matches!(output, Output::Scrubbed { number: of, .. } if *of == number);
            if let Some(place) = out.iter().position(is_it) {
                let Output::Scrubbed { found, .. } = out.swap_remove(place) else { panic!("it was a moment ago") };
                break found;
            }
            engine.handle(Input::Tier, 3, out);
            engine.check();
        };
        assert!(found.blocks <= 128, "a step is bounded: {}", found.blocks);
        all.blocks += found.blocks;
        all.bytes += found.bytes;
        all.gone += found.gone;
        all.failed += found.failed;
        all.bad.extend(found.bad);
        (from, steps) = (next, steps + 1);
    }
    (all, steps)
}

/// Goal: a scrub reads each block on SSD, drops what has rotted, tells it once, and says what it could not read. Method: rot in some
/// of many blocks; a second scrub; one of them dropped under a scrub; a medium that fails.
#[test]
fn what_has_rotted_on_ssd_is_found() {
    let (count, shelf) = (1000u32, Shelf::default());
    let tier = || Box::new(MemoryTier::new(shelf.clone(), 1 << 30, 1 << 30));
    let node = NodeAddress { node: "n".into(), address: String::new(), incarnation: 1 };
    let engine = || Engine::with_tier(node.clone(), Settings::new(1 << 20), tier());
    let mut out = Vec::new();
    assert_eq!(scrub(&mut engine(), &mut out).0, Verified::default(), "nothing is there yet");
    let keys: Vec<BlockKey> = (0..count).map(key).collect();
    shelve(&mut *tier(), &keys);
    let mut engine = engine();
    let rotten = [0, 7, 500, 999].map(key);
    rotten.iter().for_each(|key| assert!(shelf.rot(key)));
    let (mut found, steps) = scrub(&mut engine, &mut out);
    found.bad.sort_unstable();
    assert_eq!((found.blocks, found.bytes, found.gone, found.failed), (1000, 64_000, 0, 0));
    assert!(found.bad == rotten, "{} are said to be rotten", found.bad.len());
    assert!(steps >= 10, "{steps}");
    let mut told: Vec<BlockKey> = out
        .drain(..)
        .filter_map(|output| match output {
            Output::Report(DaemonReport::Removed { key, medium: Medium::Ssd, .. }) => Some(key),
            _ => None,
        })
        .collect();
    told.sort_unstable();
    assert!(told == rotten, "each is told once, not {} in all", told.len());
    assert_eq!((scrub(&mut engine, &mut out).0.blocks, engine.status().tiers[1].blocks), (996, 996));
    // One of a step's blocks goes while it waits for its turn, another while it is read.
    let at = engine.verifies_tier(Cursor::default(), None).expect("no store is before it");
    let (first, _) = engine.scrub(at, 3, &mut out);
    engine.evict(&keys[..64], 3, &mut out);
    while !out.iter().any(|output| matches!(output, Output::Scrubbed { number, .. } if *number == first)) {
        engine.handle(Input::Tier, 3, &mut out);
        engine.check();
    }
    out.clear();
    // A medium that fails is not waited for.
    shelf.set_health(Health::Failed);
    let (found, _) = scrub(&mut engine, &mut out);
    assert_eq!((found.blocks, found.failed, found.bad.len()), (0, engine.status().tiers[1].blocks, 0));
}

/// Goal: a long walk comes in stretches that together are the whole. Method: more slots than two stretches have.
#[test]
fn a_walk_over_many_blocks_is_whole_and_comes_in_stretches() {
    let (engine, keys) = engine_with(10_000, 1, None);
    let mut seen = Vec::new();
    let (mut from, mut stretches) = (Some(Cursor::default()), 0);
    while let Some(at) = from {
        let (blocks, next) = engine.keys(at, &Prefix::default(), None);
        assert!(blocks.len() <= 4096, "a stretch is bounded");
        seen.extend(blocks.iter().map(|block| block.key));
        (from, stretches) = (next, stretches + 1);
    }
    assert!(stretches >= 3, "{stretches}");
    seen.sort_unstable();
    assert_eq!(seen, keys);

    // Every key whose text begins so, and no other.
    let prefix = Prefix::parse("00000").expect("hex");
    let mut found = 0;
    let mut from = Some(Cursor::default());
    while let Some(at) = from {
        let (blocks, next) = engine.keys(at, &prefix, None);
        assert!(blocks.iter().all(|block| hex(&block.key).starts_with("00000")));
        (found, from) = (found + blocks.len(), next);
    }
    assert_eq!(found, 4096);
    // A cursor of another daemon, or of nowhere, is the end.
    for nowhere in [Cursor { store: 9, slot: 0 }, Cursor { store: u32::MAX, slot: u32::MAX }] {
        assert_eq!(engine.keys(nowhere, &Prefix::default(), None), (Vec::new(), None));
        assert!(engine.stretch(nowhere, None).0.is_none());
    }
    assert_eq!(engine.keys(Cursor { store: 0, slot: u32::MAX }, &Prefix::default(), None), (Vec::new(), None));
}

// -- a daemon ------------------------------------------------------------------------------------------------------

fn start(directory: &Scratch) -> Daemon {
    let config = Config {
        listen: Some("127.0.0.1:0".into()),
        socket: Some(directory.socket()),
        session_key: Some(KEY),
        http: Some("127.0.0.1:0".into()),
        ..Config::new("a", 50 * SLOT_BYTES)
    };
    Daemon::start(&config).expect("a daemon starts")
}

fn admin(directory: &Scratch) -> AdminClient {
    AdminClient::connect(&directory.socket(), KEY, PATIENCE).expect("an admin comes in")
}

fn status(admin: &mut AdminClient) -> Status {
    match admin.ask(&AdminRequest::Status).expect("answered") {
        AdminReply::Status(status) => *status,
        other => panic!("{other:?}"),
    }
}

fn expect<R>(client: &PoolClient, what: &str, mut pick: impl FnMut(&LocalEvent) -> Option<R>) -> R {
    let until = Instant::now() + PATIENCE;
    loop {
        assert!(Instant::now() < until, "no {what}");
        client.wait(Duration::from_millis(200));
        for event in client.events() {
            if let ClientEvent::Event(event) = event
                && let Some(found) = pick(&event)
            {
                return found;
            }
        }
    }
}

fn grant(client: &PoolClient, request: u64, keys: &[BlockKey]) -> Result<Vec<u32>, Refusal> {
    let (private, parent, position, mode) = (0, HEAD, 0, GrantMode::Wait);
    let keys = keys.to_vec();
    client
        .request(LocalRequest::Grant { tag: tag(request), keys, private, parent, position, mode, tenant: 0 })
        .expect("sent");
    expect(client, "grant", |event| match event {
        LocalEvent::Granted { tag: granted, slots } if *granted == tag(request) => {
            slots.iter().filter(|slot| !slot.committed).for_each(|slot| {
                client.store(slot.slot, Runs::from(0), &[slot.slot.slot as u8; 64]).expect("in range");
            });
            Some(Ok(slots.iter().map(|slot| slot.slot.slot).collect()))
        }
        LocalEvent::Refused { tag: refused, refusal } if *refused == tag(request) => Some(Err(*refusal)),
        _ => None,
    })
}

/// Blocks that are there and nobody holds.
fn publish(client: &PoolClient, request: u64, numbers: std::ops::Range<u32>) -> Vec<u32> {
    let keys: Vec<BlockKey> = numbers.map(key).collect();
    let slots = grant(client, request, &keys).expect("room");
    client
        .request(LocalRequest::Commit { tag: tag(request), indices: (0..keys.len() as u32).collect() })
        .expect("sent");
    client.request(LocalRequest::End { tag: tag(request) }).expect("sent");
    slots
}

#[test]
fn what_is_rotten_is_found_and_dropped_though_somebody_holds_it() {
    let directory = Scratch::new();
    let daemon = start(&directory);
    let client = daemon.attach(1, LAYOUT, 0).expect("attaches");
    let mut admin = admin(&directory);
    let slots = publish(&client, 1, 0..10);
    let held = grant(&client, 2, &[key(3)]).expect("there");
    assert_eq!(held, [slots[3]]);
    let request = AdminRequest::Verify { from: Cursor::default(), medium: None };
    let mut verify = || match admin.ask(&request).expect("answered") {
        AdminReply::Verified { medium: Medium::Dram, found, next: None } => found,
        other => panic!("{other:?}"),
    };
    let found = verify();
    assert_eq!((found.blocks, found.bytes, found.gone, &*found.bad), (10, 640, 0, &[][..]));
    for index in [3, 7] {
        client.arena().corrupt_for_test(slots[index], 0);
    }
    let mut found = verify();
    found.bad.sort_unstable();
    assert_eq!((found.blocks, &*found.bad), (10, &[key(3), key(7)][..]));
    let found = verify();
    assert_eq!((found.blocks, found.bad.len()), (8, 0), "what is rotten is published no more");
    let counters = daemon.counters().expect("answered");
    let rotten = counters.iter().find(|(name, _)| name.contains("checksum_failures") && name.contains("arena"));
    assert_eq!(rotten.map(|(_, value)| *value), Some(2));
    // Who holds one keeps its slot, and may end.
    client.request(LocalRequest::End { tag: tag(2) }).expect("sent");
    let refilled = publish(&client, 3, 3..4);
    assert_eq!(refilled.len(), 1);
    assert_eq!(status(&mut admin).tiers[0].blocks, 9);
}

#[test]
fn a_drain_lets_what_is_held_end_and_takes_on_nothing_new() {
    let directory = Scratch::new();
    let daemon = start(&directory);
    let client = daemon.attach(1, LAYOUT, 0).expect("attaches");
    let mut admin = admin(&directory);
    publish(&client, 1, 0..3);
    grant(&client, 2, &[key(1), key(100)]).expect("room");

    let mut drain = |on, within_ms| match admin.ask(&AdminRequest::Drain { on, within_ms }).expect("answered") {
        AdminReply::Drain { draining, held, moving } => {
            assert_eq!(moving, Moving { over: true, ..Moving::default() }, "there is no conductor");
            (draining, held)
        }
        other => panic!("{other:?}"),
    };
    let (draining, held) = drain(true, 0);
    assert_eq!((draining, held), (true, Held { tags: 1, grants: 1, ..Held::default() }));
    assert_eq!(grant(&client, 3, &[key(5)]), Err(Refusal::Full));
    assert!(get(&daemon, "/health/ready").starts_with("HTTP/1.1 503"));
    assert!(get(&daemon, "/health/live").starts_with("HTTP/1.1 200"));
    let quiet = daemon.drain().expect("told");
    // What was held before goes on as if nothing were.
    client.request(LocalRequest::Commit { tag: tag(2), indices: vec![1] }).expect("sent");
    client.request(LocalRequest::End { tag: tag(2) }).expect("sent");
    // Answered when nothing is held: far earlier than this.
    let (draining, held) = drain(true, 600_000);
    assert!(draining && held.is_nothing(), "{held:?}");
    drop(quiet);
    let (draining, _) = drain(false, 0);
    assert!(!draining);
    assert_eq!(grant(&client, 4, &[key(100)]).map(|slots| slots.len()), Ok(1));
    becomes(&daemon, "/health/ready", 200);
}

// Goal: the conductor learns of a drain at once, its word ends the wait, and so does its silence. Method: an engine by hand.
#[test]
fn a_drain_waits_for_the_conductors_word_while_it_speaks() {
    let mut world = World::new();
    let second = 1_000_000_000;
    let says = |outputs: Vec<Output>| {
        outputs.into_iter().find_map(|output| match output {
            Output::Report(DaemonReport::Heartbeat { draining, .. }) => Some(draining),
            _ => None,
        })
    };
    assert_eq!(says(world.outputs(Input::Tick)), Some(false));
    assert_eq!(says(world.outputs(Input::Tick)), None, "one a second");
    for silent in [false, true] {
        world.engine.drain(true);
        assert_eq!(says(world.outputs(Input::Tick)), Some(true), "not a second later");
        assert!(!world.engine.moving().over, "it has not spoken yet");
        let moved = |blocks, left| Input::Order(DaemonOrder::Moved { blocks, left });
        world.outputs(moved(3, 7));
        assert_eq!(world.engine.moving(), Moving { blocks: 3, objects: 0, left: 7, over: false });
        world.now += 2 * second;
        world.outputs(moved(5, 5));
        world.now += 2 * second;
        world.outputs(Input::Tick);
        assert!(!world.engine.moving().over, "it speaks each second or so");
        if silent {
            world.now += 2 * second;
            world.outputs(Input::Tick);
            assert_eq!(world.engine.moving(), Moving { blocks: 5, objects: 0, left: 5, over: true });
        } else {
            world.outputs(moved(10, 0));
            assert_eq!(world.engine.moving(), Moving { blocks: 10, objects: 0, left: 0, over: true });
        }
        world.engine.drain(false);
        assert_eq!(says(world.outputs(Input::Tick)), Some(false));
        // What comes late is of a drain that is over.
        world.outputs(moved(1, 1));
        assert_eq!(world.engine.moving(), Moving { over: true, ..Moving::default() });
    }
}

fn get(daemon: &Daemon, path: &str) -> String {
    let mut stream = TcpStream::connect(daemon.http().expect("it has one")).expect("listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answered");
    answer
}

#[test]
fn strangers_are_told_why_not() {
    let directory = Scratch::new();
    let daemon = start(&directory);
    let refusal = |socket: &std::path::Path, key| {
        AdminClient::connect(socket, key, PATIENCE).map(|_| ()).expect_err("not let in")
    };
    let error = refusal(&directory.socket(), [9; 32]);
    assert_eq!(error.kind, ErrorKind::GiveUp);
    assert!(error.message.contains("secret"), "{error}");
    let error = refusal(&directory.0.join("nobody.sock"), KEY);
    assert_eq!(error.kind, ErrorKind::Retry);
    assert!(error.message.contains("no daemon listens"), "{error}");
    std::fs::write(directory.0.join("file"), "").expect("writable");
    assert!(refusal(&directory.0.join("file"), KEY).message.contains("no daemon listens"));

    // From beyond the host nobody comes in, whatever he knows.
    let stream = TcpStream::connect(&daemon.address().address).expect("listens");
    let session = Session::dial(KEY, Purpose::Admin, [3; 32], now());
    let mut connection =
        Connection::new(Stream::Tcp(stream), session, Link::new().expect("an eventfd")).expect("a socket");
    let ended = connection.handshake().expect_err("not let in");
    assert!(matches!(&ended, Ended::Refused(why) if why.contains("unix socket")), "{ended}");

    // Who answers is something else.
    let other = directory.0.join("other.sock");
    let listener = UnixListener::bind(&other).expect("binds");
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("somebody comes");
        stream.write_all(b"220 mail.example ESMTP\r\n").expect("sent");
        // Until the other side has read enough.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let error = refusal(&other, KEY);
    assert_eq!(error.kind, ErrorKind::GiveUp);
    assert!(error.message.contains("no transferd"), "{error}");
    thread.join().expect("no panic");

    // One that is cut off in the middle learns it at the next question.
    let mut admin = admin(&directory);
    assert_eq!(status(&mut admin).node, "a");
    drop(daemon);
    assert_eq!(admin.ask(&AdminRequest::Status).expect_err("gone").kind, ErrorKind::Retry);
}

#[test]
fn the_status_has_all_who_are_there() {
    let directory = Scratch::new();
    let daemon = start(&directory);
    let client = daemon.attach(1, LAYOUT, 0).expect("attaches");
    let local = PoolClient::connect(&directory.socket(), KEY, 2, LAYOUT, 0, PATIENCE).expect("attaches");
    let mut admin = admin(&directory);
    grant(&client, 1, &[key(1), key(2)]).expect("room");
    let status = status(&mut admin);
    let me = daemon.address();
    assert_eq!((&status.node, &status.address, status.incarnation), (&me.node, &me.address, me.incarnation));
    assert_eq!(status.clients.iter().map(|client| client.tags).collect::<Vec<_>>(), [1, 0]);
    assert!(status.listening && !status.draining && status.conductor.is_none());
    assert_eq!(status.http, daemon.http().map(|http| http.to_string()));
    let [layout] = &status.layouts[..] else { panic!("{status:?}") };
    assert_eq!((layout.strips, layout.strip_bytes, layout.reserved), (1, 64, 2));
    drop(local);
    match admin.ask(&AdminRequest::Counters).expect("answered") {
        AdminReply::Counters(values) => {
            let grants = values.iter().find(|(name, _)| name.contains("grants") && name.contains("held"));
            assert_eq!(grants.map(|(_, value)| *value), Some(1));
        }
        other => panic!("{other:?}"),
    }
}

// -- HTTP ----------------------------------------------------------------------------------------------------------

#[test]
fn http_serves_many_and_is_stopped_by_nobody() {
    let directory = Scratch::new();
    let daemon = start(&directory);
    let metrics = becomes(&daemon, "/metrics?x=y", 200);
    let (head, body) = metrics.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("text/plain; version=0.0.4"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
    // Every family is explained, and every sample belongs to the family before it.
    let mut family = "";
    for line in body.lines() {
        match line.strip_prefix("# ") {
            Some(rest) if rest.starts_with("HELP ") => family = rest.split(' ').nth(1).expect("a name"),
            Some(rest) => assert_eq!(rest.split(' ').nth(1), Some(family), "no help for {rest}"),
            None => {
                assert_eq!(line.split(['{', ' ']).next(), Some(family), "{line}");
                assert!(line.rsplit(' ').next().is_some_and(|value| value.parse::<u64>().is_ok()), "{line}");
            }
        }
    }
    assert!(body.contains("pyengine_daemon_info{node=\"a\",version="), "{body}");

    let http = daemon.http().expect("it has one");
    let say = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(http).expect("listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        stream.write_all(bytes).expect("sent");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).map(|_| String::from_utf8_lossy(&answer).into_owned()).expect("answered")
    };
    assert!(say(b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello").starts_with("HTTP/1.1 405"));
    assert!(say(b"pyEN and what else").starts_with("HTTP/1.1 408"), "it is waited for, but not for ever");
    assert!(say(b"\x16\x03\x01").starts_with("HTTP/1.1 400"), "TLS");
    let head = say(b"HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200") && head.ends_with("\r\n\r\n"), "{head}");
    assert!(get(&daemon, "/nothing").starts_with("HTTP/1.1 404"));

    // Those who say nothing take all places; one more is told so; when they are gone it goes on. On a slow machine the
    // first of them may have been cut, or one of before not have gone yet: then it is tried again.
    let until = Instant::now() + PATIENCE;
    loop {
        let silent: Vec<TcpStream> = (0..16).map(|_| TcpStream::connect(http).expect("listens")).collect();
        let mut last = TcpStream::connect(http).expect("listens");
        last.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let mut answer = String::new();
        last.read_to_string(&mut answer).expect("answered");
        drop(silent);
        if answer.starts_with("HTTP/1.1 503") && answer.contains("16 connections") {
            break;
        }
        assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
        assert!(Instant::now() < until, "17 connections stand at once");
    }
    becomes(&daemon, "/health/live", 200);
}

/// Asks until the answer has this status: one that is busy answers 503, and one without a free place does not read.
fn becomes(daemon: &Daemon, path: &str, status: u16) -> String {
    let until = Instant::now() + PATIENCE;
    loop {
        let answer = get_or_nothing(daemon, path);
        if answer.starts_with(&format!("HTTP/1.1 {status} ")) {
            return answer;
        }
        assert!(Instant::now() < until, "{path} is never {status}: {answer}");
    }
}

/// As `get`, of a server that may turn it away before it has read anything.
fn get_or_nothing(daemon: &Daemon, path: &str) -> String {
    let mut stream = TcpStream::connect(daemon.http().expect("it has one")).expect("listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    let mut answer = Vec::new();
    let _ = stream.write_all(format!("GET {path} HTTP/1.1\r\n\r\n").as_bytes());
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

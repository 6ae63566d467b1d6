//! Objects in a node's pool.
//!
//! Goal: what is got under a name is what was put there last, as a whole, or nothing; what is viewed stays; whoever dies at
//! whatever step leaves nothing behind. Method: an engine without its sockets under random operations of several clients,
//! beside a dict; then whole daemons, in process and over the socket. `Engine::check` runs after every input.

mod scratch;
mod stage;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use pyengine_transfer::config::{Config, open_key};
use pyengine_transfer::daemon::Daemon;
use pyengine_transfer::engine::{Input, Keeping};
use pyengine_transfer::error::ErrorKind;
use pyengine_transfer::keys::object_key;
use pyengine_transfer::memory::Arena;
use pyengine_transfer::messages::Refusal;
use pyengine_transfer::objects::classes::{CHUNK, Class};
use pyengine_transfer::objects::messages::{At, ObjectRequest, Reserved, Wanted};
use pyengine_transfer::objects::{Pool, Value};
use pyengine_transfer::random::Random;
use pyengine_transfer::types::{BlockKey, ClientId, SlotRef};

use scratch::Scratch;
use stage::{Stage, chunk_key, name_key, wanted};

// -- an engine -------------------------------------------------------------------------------------------------------

/// A put as its client knows it.
#[derive(Clone, Debug)]
struct Open {
    client: ClientId,
    put: u64,
    name: u8,
    blocks: u32,
}

/// Random operations beside a dict from name to the put that is there.
struct Model {
    stage: Stage,
    random: Random,
    dict: BTreeMap<u8, Open>,
    open: Vec<Open>,
    /// (client, pin, where, put, name): looked at after every step.
    views: Vec<(ClientId, u64, At, u64, u8)>,
    puts: u64,
    stored: u64,
    evicted: u64,
    torn: u64,
}

impl Model {
    fn step(&mut self) {
        let client = 1 + self.random.below(3);
        match self.random.below(100) {
            0..40 => self.begin(client),
            40..65 => self.finish(),
            65..80 => self.view(client),
            80..88 => self.close(),
            88..93 => self.remove(client),
            93..96 => self.abandon(),
            96..98 => self.die(client),
            _ => self.stage.handle(Input::Tick),
        }
        self.look();
    }

    fn begin(&mut self, client: ClientId) {
        self.puts += 1;
        let (put, name) = (self.puts, self.random.below(12) as u8);
        let (class, blocks) = match self.random.below(3) {
            0 => (0, 1),
            1 => (5, 1),
            _ => (Class::LARGEST.number(), 1 + self.random.below(4) as u32),
        };
        let there = self.stage.has(&name_key(name));
        for index in 0..blocks {
            match self.stage.reserve(client, wanted(put, class, name, (index, blocks))) {
                Reserved::Slot { region, slot } => {
                    assert!(index > 0 || !there);
                    self.stage.stamp((region, slot), put);
                }
                Reserved::There => {
                    assert!(index == 0 && there);
                    return;
                }
                Reserved::Refused(Refusal::Full) => {
                    self.stage.abandon(client, put);
                    return;
                }
                Reserved::Refused(other) => panic!("{other:?}"),
            }
        }
        self.open.push(Open { client, put, name, blocks });
    }

    fn finish(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let at = self.random.below(self.open.len() as u64) as usize;
        let open = self.open.swap_remove(at);
        if open.blocks > 1 && self.random.permille(200) {
            // The head too early: refused, and the put goes on.
            assert!(!self.stage.commit(open.client, open.put, 0));
            assert!(!self.stage.has(&name_key(open.name)) || self.dict.contains_key(&open.name));
            return;
        }
        for index in 1..open.blocks {
            assert!(self.stage.commit(open.client, open.put, index));
        }
        let there = self.stage.has(&name_key(open.name));
        let first = self.stage.commit(open.client, open.put, 0);
        assert_eq!(first, !there, "the first commit of a name counts");
        if first {
            self.stored += 1;
            self.dict.insert(open.name, open);
        }
    }

    fn view(&mut self, client: ClientId) {
        let name = self.random.below(12) as u8;
        let Some((pin, at)) = self.stage.pin(client, name_key(name)) else { return };
        let put = self.stage.stamped(at).expect("a block that is pinned is damaged");
        let there = self.dict.get(&name).expect("nothing was put there");
        assert_eq!(put, there.put, "another value than was put last");
        self.views.push((client, pin, at, put, name));
        for index in 1..there.blocks {
            let (put, key) = (there.put, chunk_key(there.put, index));
            let at = self.stage.pin(client, key).expect("an object is there as a whole");
            assert_eq!(self.stage.stamped(at.1), Some(put));
            self.stage.release(client, at.0);
        }
    }

    fn close(&mut self) {
        if !self.views.is_empty() {
            let at = self.random.below(self.views.len() as u64) as usize;
            let (client, pin, ..) = self.views.swap_remove(at);
            self.stage.release(client, pin);
        }
    }

    fn remove(&mut self, client: ClientId) {
        let name = self.random.below(12) as u8;
        let there = self.stage.has(&name_key(name));
        assert_eq!(self.stage.remove(client, name_key(name)), there);
        assert!(!self.stage.has(&name_key(name)));
        self.dict.remove(&name);
    }

    fn abandon(&mut self) {
        if !self.open.is_empty() {
            let at = self.random.below(self.open.len() as u64) as usize;
            let open = self.open.swap_remove(at);
            // At any step: some of its blocks are committed.
            for index in 1..1 + self.random.below(open.blocks.into()) as u32 {
                assert!(self.stage.commit(open.client, open.put, index));
            }
            self.stage.abandon(open.client, open.put);
            self.torn += u64::from(open.blocks > 1);
        }
    }

    fn die(&mut self, client: ClientId) {
        self.stage.gone(client);
        self.open.retain(|open| open.client != client);
        self.views.retain(|view| view.0 != client);
    }

    fn look(&mut self) {
        for &(_, _, at, put, name) in &self.views {
            assert_eq!(self.stage.stamped(at), Some(put), "a view has changed");
            // The engine has heard of it by now: the object stays, unless it was removed.
            // Of several blocks only the head is pinned here, and one that loses a block is no object any more.
            if self.dict.get(&name).is_some_and(|there| there.put == put && there.blocks == 1) {
                let entry = self.stage.engine.catalog().find(&name_key(name));
                assert!(entry.is_some_and(|entry| entry.dram == Some(at)), "what is viewed was evicted");
            }
        }
        let here: BTreeSet<BlockKey> = self.stage.engine.catalog().keys();
        let before = self.dict.len();
        self.dict.retain(|name, _| here.contains(&name_key(*name)));
        self.evicted += (before - self.dict.len()) as u64;
        let under_way = |key: &BlockKey| {
            self.open.iter().any(|open| (1..open.blocks).any(|index| chunk_key(open.put, index) == *key))
        };
        let mut expected = BTreeSet::new();
        for (name, there) in &self.dict {
            expected.insert(name_key(*name));
            expected.extend((1..there.blocks).map(|index| chunk_key(there.put, index)));
        }
        for key in &here {
            assert!(expected.remove(key) || under_way(key), "{key:?} is of no object");
        }
        assert!(expected.is_empty(), "objects with parts missing: {expected:?}");
    }
}

fn model(seed: u64) -> Model {
    let stage = Stage::new(14 << 20, None);
    let (dict, open, views) = Default::default();
    let (puts, stored, evicted, torn) = Default::default();
    let mut model = Model { stage, random: Random(seed), dict, open, views, puts, stored, evicted, torn };
    for _ in 0..300 {
        model.step();
    }
    for client in 1..=3 {
        model.stage.gone(client);
    }
    model.stage.handle(Input::Tick);
    assert_eq!(model.stage.engine.unfinished(), Vec::<String>::new(), "seed {seed}");
    model
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn random_operations_keep_the_promises(seed in any::<u64>()) {
        model(seed);
    }
}

#[test]
fn the_model_reaches_what_it_is_for() {
    let (stored, evicted, torn) = (0..4)
        .map(model)
        .fold((0, 0, 0), |sum, model| (sum.0 + model.stored, sum.1 + model.evicted, sum.2 + model.torn));
    assert!(stored > 50 && evicted > 5 && torn > 2, "stored {stored}, evicted {evicted}, abandoned half way {torn}");
}

// Goal: a client that dies at any step of a put leaves no slot and no key behind. Method: each step of a value of three
// blocks, then the engine must be idle and another client must be able to put the name.
#[test]
fn a_client_may_die_at_each_step() {
    let class = Class::LARGEST.number();
    for dies_after in 0..6 {
        let mut stage = Stage::new(16 << 20, None);
        for index in 0..3.min(dies_after + 1) {
            assert!(matches!(stage.reserve(1, wanted(1, class, 7, (index, 3))), Reserved::Slot { .. }));
        }
        for index in 1..dies_after.saturating_sub(2) {
            assert!(stage.commit(1, 1, index));
        }
        let whole = dies_after == 5 && stage.commit(1, 1, 0);
        stage.gone(1);
        assert_eq!(stage.engine.unfinished(), Vec::<String>::new());
        assert_eq!(stage.engine.catalog().keys().len(), if whole { 3 } else { 0 });
        let again = stage.reserve(2, wanted(1, class, 7, (0, 1)));
        assert!(matches!((whole, again), (true, Reserved::There) | (false, Reserved::Slot { .. })), "{again:?}");
        assert!(whole || stage.commit(2, 1, 0));
    }
}

// Goal: what makes no sense is refused, and harms nobody. Method: the cases.
#[test]
fn nonsense_is_refused() {
    let mut stage = Stage::new(16 << 20, None);
    let refused = |reserved| matches!(reserved, Reserved::Refused(Refusal::Protocol));
    assert!(refused(stage.reserve(1, Wanted { class: Class::COUNT, ..wanted(1, 0, 7, (0, 1)) })), "no such class");
    assert!(matches!(stage.reserve(1, wanted(1, 0, 7, (0, 1))), Reserved::Slot { .. }));
    assert!(refused(stage.reserve(1, wanted(1, 0, 7, (0, 1)))), "reserved already");
    assert!(!stage.commit(2, 1, 0) && !stage.commit(1, 2, 0) && !stage.commit(1, 1, 1), "another's, or none");
    assert!(stage.commit(1, 1, 0) && !stage.commit(1, 1, 0), "once");
    stage.say(1, ObjectRequest::Abandon { puts: vec![1, 99] });
    assert!(stage.has(&name_key(7)), "it is over");
    let life = SlotRef { slot: 0, generation: 99 };
    let blocks = vec![(pyengine_transfer::types::RegionId(0), life), (pyengine_transfer::types::RegionId(50), life)];
    stage.say(1, ObjectRequest::Damaged { blocks });
    assert!(stage.has(&name_key(7)), "another life of the slot");
    stage.gone(1);
    stage.gone(2);
    assert!(stage.engine.idle());
}

// -- daemons ---------------------------------------------------------------------------------------------------------

const OBJECT_KEY: [u8; 32] = [5; 32];
const PATIENCE: Duration = Duration::from_secs(60);

struct Node {
    daemon: Daemon,
    directory: Scratch,
}

impl Node {
    fn new(dram_bytes: u64) -> Self {
        let directory = Scratch::new();
        let socket = Some(directory.socket());
        let config = Config { socket, ..Config::new("n", dram_bytes) };
        Self { daemon: Daemon::start(&config).expect("a daemon starts"), directory }
    }

    fn inside(&self) -> Pool {
        self.daemon.objects(OBJECT_KEY).expect("it runs")
    }

    fn over_the_socket(&self) -> Pool {
        Pool::connect(&self.directory.socket(), open_key(), OBJECT_KEY, PATIENCE).expect("it listens")
    }
}

fn bytes(length: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let mut bytes: Vec<u8> = (0..length.div_ceil(8)).flat_map(|_| random.bits().to_le_bytes()).collect();
    bytes.truncate(length);
    bytes
}

fn put(pool: &Pool, name: &[u8], value: &[u8]) -> Result<bool, pyengine_transfer::error::Error> {
    pool.put(&[(name, value)]).expect("the daemon runs").remove(0)
}

fn get(pool: &Pool, name: &[u8]) -> Option<Value> {
    pool.get(&[name]).expect("the daemon runs").remove(0)
}

fn got(pool: &Pool, name: &[u8]) -> Option<Vec<u8>> {
    get(pool, name).map(|value| value.to_vec().expect("in range").expect("intact"))
}

// Goal: values of every size come back the same, to every client. Method: the edges of the classes, both roads.
#[test]
fn values_of_every_size() {
    let node = Node::new(64 << 20);
    let pools = [node.inside(), node.over_the_socket()];
    let mut sizes = vec![0, 1, 4000, 4047, 4048, 4096, 65536, 1 << 20, (1 << 20) + 1, 5 << 20];
    sizes.extend((13..20).map(|power| (1 << power) - 49));
    for (at, &size) in sizes.iter().enumerate() {
        let (writer, name, value) = (&pools[at % 2], size.to_string(), bytes(size, at as u64));
        assert_eq!(put(writer, name.as_bytes(), &value), Ok(true));
        assert_eq!(put(&pools[1 - at % 2], name.as_bytes(), b"other"), Ok(false));
        for pool in &pools {
            assert!(got(pool, name.as_bytes()).is_some_and(|found| found == value), "{size} bytes");
            let mut into = vec![9; size + 3];
            let lengths = pool.get_into(&mut [(name.as_bytes(), &mut into)]).expect("long enough");
            assert!(lengths == [Some(size)] && into[..size] == value && into[size..] == [9; 3]);
        }
    }
    let total: u64 = sizes.iter().map(|size| *size as u64).sum();
    for pool in &pools {
        let (mut listed, mut from) = (Vec::new(), None);
        loop {
            let (objects, next) = pool.list(b"", from, 3).expect("the daemon runs");
            listed.extend(objects);
            from = next;
            if from.is_none() {
                break;
            }
        }
        assert_eq!(listed.iter().map(|object| object.bytes).sum::<u64>(), total);
        let names: BTreeSet<_> = listed.into_iter().map(|object| object.name).collect();
        assert_eq!(names, sizes.iter().map(|size| size.to_string().into_bytes()).collect());
        assert_eq!(pool.stats().expect("the daemon runs").objects, sizes.len() as u64);
    }
    let names: Vec<String> = sizes.iter().map(usize::to_string).collect();
    let names: Vec<&[u8]> = names.iter().map(|name| name.as_bytes()).collect();
    assert_eq!(pools[1].remove(&names).expect("the daemon runs"), vec![true; names.len()]);
    assert_eq!(pools[0].exists(&names).expect("the daemon runs"), vec![false; names.len()]);
    assert_eq!(pools[0].stats().expect("the daemon runs").bytes, 0);
}

// Goal: a full pool says so, names what to do, and works on. Method: views that hold everything, then none.
#[test]
fn a_full_pool_says_so() {
    let node = Node::new(8 << 20);
    let (inside, far) = (node.inside(), node.over_the_socket());
    let error = put(&inside, b"huge", &bytes(9 << 20, 1)).expect_err("larger than the pool");
    assert!(error.kind == ErrorKind::GiveUp && error.message.contains("larger"), "{error}");
    let value = bytes(1 << 20, 2);
    let mut views = Vec::new();
    let full = loop {
        let name = views.len().to_string();
        match put(&far, name.as_bytes(), &value) {
            Ok(stored) => assert!(stored),
            Err(error) => break error,
        }
        views.push(get(if views.len() % 2 == 0 { &far } else { &inside }, name.as_bytes()).expect("it is there"));
    };
    assert!(views.len() >= 5 && full.kind == ErrorKind::Retry && full.message.contains("close views"), "{full}");
    for (at, view) in views.iter().enumerate() {
        assert!(
            view.verify().expect("in range") && got(&inside, at.to_string().as_bytes()).is_some(),
            "{at} was evicted"
        );
    }
    // A value of several blocks that finds room for some leaves nothing of itself.
    views.truncate(views.len() - 2);
    let before = inside.stats().expect("the daemon runs").objects;
    assert!(put(&inside, b"wide", &bytes(4 << 20, 3)).is_err());
    assert!(got(&far, b"wide").is_none() && inside.stats().expect("the daemon runs").objects <= before);
    views.clear();
    assert_eq!(put(&inside, b"wide", &bytes(4 << 20, 3)), Ok(true));
    assert!(got(&far, b"wide").is_some_and(|found| found == bytes(4 << 20, 3)));
}

// Goal: a batch that does not fit at once is stored by and by, and what is evicted goes as a whole. Method: a pool of 8
// MiB, 40 values of 1 MiB in one call.
#[test]
fn a_batch_larger_than_the_pool() {
    let node = Node::new(8 << 20);
    let pool = node.over_the_socket();
    let names: Vec<String> = (0..40).map(|number| number.to_string()).collect();
    let values: Vec<Vec<u8>> = (0..40).map(|number| bytes(1 << 20, number)).collect();
    let items: Vec<(&[u8], &[u8])> =
        names.iter().zip(&values).map(|(name, value)| (name.as_bytes(), &value[..])).collect();
    assert_eq!(pool.put(&items).expect("the daemon runs"), vec![Ok(true); 40]);
    let names: Vec<&[u8]> = names.iter().map(|name| name.as_bytes()).collect();
    let found = pool.get(&names).expect("the daemon runs");
    assert!(found.iter().flatten().count() >= 5 && found[39].is_some() && found[0].is_none());
}

// Goal: damage is a miss, told once, and the name can be put anew. Method: flip a bit of a value in one block, and of the
// second block of a large one, behind everybody's back.
#[test]
fn damage_is_a_miss() {
    let node = Node::new(32 << 20);
    let (inside, far) = (node.inside(), node.over_the_socket());
    for (pool, size) in [(&inside, 5000), (&far, 3 << 20)] {
        let value = bytes(size, 4);
        assert_eq!(put(pool, b"name", &value), Ok(true));
        // Where it lies, as a view of it says; of the large value the blocks were made one after the other.
        let large = size as u64 > CHUNK;
        if large {
            let [first] = &mut pool.get(&[&b"name"[..]]).expect("the daemon runs")[..] else { panic!("one name") };
            assert!(matches!(first.take(), Some(Value::Copied(found)) if found == value));
        }
        let arena = arena_of(&inside, if large { CHUNK } else { size as u64 });
        (0..arena.slots().min(6)).for_each(|slot| arena.corrupt_for_test(slot, 0));
        let mut into = vec![0; size];
        assert_eq!(pool.get_into(&mut [(&b"name"[..], &mut into)]).expect("long enough"), [None]);
        // The word of it travels behind the answer.
        assert_eq!(pool.remove(&[b"name"]).expect("the daemon runs"), [false]);
        assert_eq!(put(pool, b"name", &value), Ok(true));
        assert!(got(pool, b"name").is_some_and(|found| found == value));
        assert_eq!(pool.remove(&[b"name"]).expect("the daemon runs"), [true]);
    }
}

/// The arena of values of so many bytes.
fn arena_of(pool: &Pool, bytes: u64) -> Arc<Arena> {
    assert_eq!(put(pool, b"probe", &vec![0; bytes as usize]), Ok(true));
    let arena = match get(pool, b"probe") {
        Some(Value::Pinned(pinned, _)) => pinned.arena().clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(pool.remove(&[b"probe"]).expect("the daemon runs"), [true]);
    arena
}

// Goal: a view outlives everything: its object, its pool, its daemon. Method: all roads, all ends.
#[test]
fn views_outlive_their_pools() {
    let mut node = Node::new(8 << 20);
    let (inside, far) = (node.inside(), node.over_the_socket());
    let value = bytes(300_000, 6);
    assert_eq!(put(&far, b"name", &value), Ok(true));
    let views = [get(&inside, b"name"), get(&far, b"name"), get(&node.over_the_socket(), b"name")].map(Option::unwrap);
    let same = |views: &[Value]| views.iter().all(|view| view.to_vec() == Ok(Some(value.clone())));
    assert_eq!(inside.remove(&[b"name"]).expect("the daemon runs"), [true]);
    for round in 0..20 {
        assert_eq!(put(&inside, format!("{round}").as_bytes(), &bytes(300_000, 7)), Ok(true));
    }
    assert!(same(&views), "removed");
    drop(far);
    for round in 0..20 {
        assert_eq!(put(&inside, format!("b{round}").as_bytes(), &bytes(300_000, 8)), Ok(true));
    }
    assert!(same(&views), "the pool is closed");
    node.daemon.stop();
    assert!(same(&views), "the daemon is gone");
    let error = inside.exists(&[b"name"]).and_then(|_| inside.remove(&[b"name"])).expect_err("the daemon is gone");
    assert!(error.kind == ErrorKind::Retry && error.message.contains("gone"), "{error}");
}

// Goal: many clients at once, each gets what was put. Method: threads over both roads on a pool that is too small, names
// that say what their values are.
#[test]
fn clients_at_once() {
    let node = Node::new(8 << 20);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let pool = if thread % 2 == 0 { node.inside() } else { node.over_the_socket() };
            scope.spawn(move || {
                let mut random = Random(thread);
                let mut kept = Vec::new();
                for _ in 0..150 {
                    let number = random.below(40);
                    let value = bytes(1000 + 20_000 * number as usize, number);
                    let name = number.to_string();
                    match random.below(10) {
                        0..5 => drop(put(&pool, name.as_bytes(), &value)),
                        5..8 => {
                            let Some(found) = get(&pool, name.as_bytes()) else { continue };
                            assert!(found.to_vec() == Ok(Some(value.clone())), "{name} is another's");
                            kept.push((found, value));
                        }
                        8 => drop(pool.remove(&[name.as_bytes()])),
                        _ => {
                            for (view, value) in kept.drain(..) {
                                assert!(view.to_vec() == Ok(Some(value)), "a view has changed");
                            }
                        }
                    }
                }
            });
        }
    });
    let pool = node.inside();
    let (listed, _) = pool.list(b"", None, 1000).expect("the daemon runs");
    let names: Vec<&[u8]> = listed.iter().map(|object| &object.name[..]).collect();
    assert_eq!(pool.remove(&names).expect("the daemon runs"), vec![true; names.len()]);
    assert_eq!(pool.stats().expect("the daemon runs").objects, 0);
}

// Goal: names are keys of their own. Method: the limits.
#[test]
fn impossible_names() {
    let node = Node::new(8 << 20);
    let pool = node.inside();
    for name in [vec![], vec![1; 1025]] {
        let error = pool.exists(&[&name]).expect_err("impossible");
        assert!(error.kind == ErrorKind::Bug && error.message.contains("1024"), "{error}");
        assert!(pool.put(&[(b"good", b"1"), (&name, b"2")]).is_err());
    }
    assert_eq!(pool.exists(&[b"good"]), Ok(vec![false]), "nothing of such a batch is stored");
    assert_eq!(put(&pool, &[255; 1024], b"1"), Ok(true));
    assert_eq!(got(&pool, &[255; 1024]), Some(b"1".to_vec()));
    assert_ne!(object_key(b"a", &[1; 32]), object_key(b"a", &[2; 32]));
}

// Goal: a pin means this node, whichever node the value was put at. Method: two daemons; one pins what the other has.
#[test]
fn what_another_node_has_is_pinned_here() {
    let config = |node: &str| Config { listen: Some("127.0.0.1:0".into()), ..Config::new(node, 64 << 20) };
    let one = Daemon::start(&config("one")).expect("a daemon starts");
    let peers = vec![one.address().address.clone()];
    let two = Daemon::start(&Config { peers, ..config("two") }).expect("a daemon starts");
    let pools = [&one, &two].map(|daemon| daemon.objects(OBJECT_KEY).expect("it runs"));
    let value = bytes(3 << 20, 1);
    assert_eq!(put(&pools[0], b"a", &value), Ok(true));
    let until = std::time::Instant::now() + PATIENCE;
    while pools[1].exists(&[b"a"]).expect("it runs") != [true] {
        assert!(std::time::Instant::now() < until, "they do not meet");
        std::thread::yield_now();
    }
    assert_eq!(pools[1].keep(&[b"a", b"b"], 60_000, "me"), Ok(vec![Keeping::Done, Keeping::Missing]));
    assert_eq!(pools[1].unkeep(&[b"a"], "me"), Ok(vec![Keeping::Done]));
}

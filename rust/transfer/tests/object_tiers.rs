//! Objects with an SSD behind the arena.
//!
//! Goal: what is got under a name is what was put there last, as a whole, or nothing, wherever it lies and whatever happens
//! between; what was flushed is there after any crash; what is removed does not come back; what never was put as a whole
//! leaves nothing. Method: an engine without its sockets over a medium in memory that rots, fails, loses what it has not
//! synced, and is too small; random operations beside a dict; restarts of all kinds. `Engine::check` runs after every input.

mod stage;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proptest::prelude::*;
use pyengine_transfer::engine::{Input, Keeping, OBJECTS, Settings};
use pyengine_transfer::messages::Refusal;
use pyengine_transfer::objects::classes::Class;
use pyengine_transfer::objects::messages::{At, ObjectEvent, ObjectRequest, Reserved, Sighting};
use pyengine_transfer::pool::account::Quota;
use pyengine_transfer::pool::disk::twin::MemoryDisk;
use pyengine_transfer::pool::disk::{OVERHEAD, Ssd};
use pyengine_transfer::pool::tier::{Health, Tier, Whose};
use pyengine_transfer::pool::twin::{MemoryTier, Shelf};
use pyengine_transfer::random::Random;
use pyengine_transfer::types::{BlockKey, ClientId, Medium};

use stage::{Stage, chunk_key, name_key, wanted};

/// Five large blocks, and a few small ones.
const DRAM: u64 = 7 << 20;
const NAMES: u8 = 10;

/// What outlives an engine.
#[derive(Clone)]
enum Ground {
    Shelf(Shelf),
    Disk(MemoryDisk),
}

impl Ground {
    fn tier(&self, limit: u64, seed: u64) -> Box<dyn Tier> {
        match self {
            Self::Shelf(shelf) => Box::new(MemoryTier::new(shelf.clone(), limit, 4 << 20)),
            Self::Disk(disk) => {
                let mediums: Vec<Arc<dyn pyengine_transfer::pool::disk::io::Medium>> = vec![Arc::new(disk.clone())];
                Box::new(Ssd::over(mediums, limit + OVERHEAD, 0, seed, || {}).expect("the medium works"))
            }
        }
    }
}

fn large() -> u8 {
    Class::LARGEST.number()
}

/// A value: the put that made it, and how many blocks it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Made {
    put: u64,
    blocks: u32,
}

/// A put as its client knows it. Committed up to `committed`, the head not among them.
#[derive(Clone, Debug)]
struct Open {
    client: ClientId,
    name: u8,
    made: Made,
    committed: u32,
}

/// Random operations beside a dict.
struct Model {
    seed: u64,
    random: Random,
    ground: Ground,
    limit: u64,
    stage: Stage,
    /// What a name may be found as. The last one is how things are; the others are how they may be again after a crash, `None`
    /// among them.
    states: BTreeMap<u8, Vec<Option<Made>>>,
    /// Names that must be found: they were flushed, and nothing has happened to them since.
    sure: BTreeMap<u8, Made>,
    /// Names of values that were damaged somewhere, and may or may not be read again.
    doubtful: BTreeSet<u8>,
    open: Vec<Open>,
    views: Vec<(ClientId, u64, At, u64)>,
    health: Health,
    has_failed: bool,
    puts: u64,
    tally: Tally,
}

/// That the model reaches what it is for.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    stored: u64,
    large: u64,
    brought: u64,
    missed: u64,
    crashes: u64,
    survived: u64,
    coming: u64,
}

impl Drop for Model {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {}", self.seed);
        }
    }
}

impl Model {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let shelf = random.permille(400);
        let ground = if shelf { Ground::Shelf(Shelf::default()) } else { Ground::Disk(MemoryDisk::default()) };
        // Room for all; or for one large value, or not quite.
        let limit = if random.permille(600) { 256 << 20 } else { 12 << 20 };
        let stage = Stage::new(DRAM, Some(ground.tier(limit, seed)));
        Self {
            seed,
            random,
            ground,
            limit,
            stage,
            states: (0..NAMES).map(|name| (name, vec![None])).collect(),
            sure: BTreeMap::new(),
            doubtful: BTreeSet::new(),
            open: Vec::new(),
            views: Vec::new(),
            health: Health::Good,
            has_failed: false,
            puts: 0,
            tally: Tally::default(),
        }
    }

    fn name(&mut self) -> u8 {
        self.random.below(NAMES.into()) as u8
    }

    fn now(&self, name: u8) -> Option<Made> {
        *self.states[&name].last().expect("there is one")
    }

    fn set(&mut self, name: u8, made: Option<Made>) {
        self.sure.remove(&name);
        self.doubtful.remove(&name);
        self.states.get_mut(&name).expect("a name of the test").push(made);
    }

    fn step(&mut self) {
        let client = 1 + self.random.below(3);
        match self.random.below(1080) {
            0..250 => self.put(client),
            250..600 => self.get(client),
            600..680 => self.close(),
            680..740 => self.remove(client),
            740..780 => self.abandon(),
            780..800 => self.die(client),
            800..850 => self.stage.handle(Input::Tier),
            850..890 => self.flush(client),
            890..910 => self.rot(),
            910..925 => self.fail(),
            925..940 => self.evict(),
            940..945 => self.clear(),
            945..960 => self.damage(),
            960..975 => self.restart(),
            975..985 => self.crash(),
            985..1045 => self.keep(client),
            1045..1060 => self.unkeep(client),
            _ => self.stage.handle(Input::Tick),
        }
        self.look();
    }

    fn put(&mut self, client: ClientId) {
        self.puts += 1;
        let (put, name) = (self.puts, self.name());
        let (class, blocks) = match self.random.below(4) {
            0 => (0, 1),
            1 => (5, 1),
            // Up to twice as large as DRAM.
            _ => (large(), 2 + self.random.below(12) as u32),
        };
        let made = Made { put, blocks };
        let mut open = Open { client, name, made, committed: 0 };
        let stops_at = if self.random.permille(300) { self.random.below(blocks.into()) as u32 } else { blocks };
        let mut ready = 0;
        for index in 0..blocks {
            let mut tries = 0;
            let at = loop {
                match self.stage.reserve(client, wanted(put, class, name, (index, blocks))) {
                    Reserved::Slot { region, slot } => {
                        if index == 0 && self.health == Health::Failed && self.now(name).is_some() {
                            // What nobody could get has made way for it.
                            assert!(!self.stage.has(&name_key(name)));
                            self.set(name, None);
                        }
                        break (region, slot);
                    }
                    Reserved::There => {
                        assert!(index == 0 && self.now(name).is_some(), "a name is there that nobody has put");
                        return;
                    }
                    Reserved::Refused(Refusal::Full) => {
                        while open.committed < ready {
                            open.committed += 1;
                            assert!(self.stage.commit(client, put, open.committed));
                        }
                        tries += 1;
                        if tries > 8 || !self.stage.await_room(client) {
                            return self.stage.abandon(client, put);
                        }
                    }
                    // It is torn: the medium has let go of a part.
                    Reserved::Refused(Refusal::Missing) => return self.stage.abandon(client, put),
                    Reserved::Refused(other) => panic!("{other:?}"),
                }
            };
            self.stage.stamp(at, put);
            ready = index;
            if index == stops_at {
                break;
            }
        }
        if stops_at < blocks {
            // The head too early.
            assert!(blocks == 1 || !self.stage.commit(client, put, 0));
            return self.open.push(open);
        }
        self.finish(open);
    }

    fn finish(&mut self, open: Open) {
        let Open { client, name, made, committed } = open;
        for index in committed + 1..made.blocks {
            // Not if it was torn.
            self.stage.commit(client, made.put, index);
        }
        let there = self.stage.has(&name_key(name));
        let first = self.stage.commit(client, made.put, 0);
        assert!(!first || !there, "two values of one name");
        if first {
            self.tally.stored += 1;
            self.tally.large += u64::from(made.blocks > 7);
            self.set(name, Some(made));
        } else {
            self.stage.abandon(client, made.put);
        }
    }

    /// One block, checked: true if it was to be had.
    fn see(&mut self, client: ClientId, key: BlockKey, put: u64) -> Result<(u64, At), Option<Refusal>> {
        let behind = self.stage.engine.find_object(&key) == Some(Medium::Ssd);
        let (pin, at) = self.stage.get(client, key)?;
        self.tally.brought += u64::from(behind);
        let Some(found) = self.stage.stamped(at) else {
            self.stage.release(client, pin);
            self.stage.say(client, ObjectRequest::Damaged { blocks: vec![at] });
            assert_eq!(self.stage.engine.find_object(&key), None, "what is damaged is found no more");
            return Err(None);
        };
        assert_eq!(found, put, "another value than was put last");
        Ok((pin, at))
    }

    fn get(&mut self, client: ClientId) {
        let name = self.name();
        let there = self.now(name);
        let Some(Made { put, blocks }) = there else {
            assert_eq!(self.stage.sight(client, name_key(name)), Sighting::Missing, "{name} was not put, or removed");
            return;
        };
        let mut refusal = None;
        let mut head = None;
        for index in 0..blocks {
            let key = if index == 0 { name_key(name) } else { chunk_key(put, index) };
            match self.see(client, key, put) {
                Ok(seen) if index == 0 => head = Some(seen),
                Ok((pin, _)) => self.stage.release(client, pin),
                Err(why) => {
                    refusal = Some(why);
                    break;
                }
            }
        }
        match refusal {
            None => {}
            // No room, or the medium fails: the object stays.
            Some(Some(Refusal::Full)) => {}
            Some(Some(_)) if self.health == Health::Failed => {}
            Some(_) => {
                // A client that misses a part says so.
                if let Some((_, at)) = head {
                    self.stage.say(client, ObjectRequest::Damaged { blocks: vec![at] });
                }
                assert!(!self.sure.contains_key(&name), "{name} was flushed and is lost: {refusal:?}");
                assert!(!self.stage.has(&name_key(name)), "half of {name} is there: {refusal:?}");
                self.tally.missed += 1;
                self.set(name, None);
            }
        }
        match head {
            Some((pin, at)) if self.views.len() < 2 && self.random.permille(500) => {
                self.views.push((client, pin, at, put));
            }
            Some((pin, _)) => self.stage.release(client, pin),
            None => {}
        }
    }

    /// Keeps a value: whether that works, the engine's own laws say more of than this.
    fn keep(&mut self, client: ClientId) {
        let (name, ttl_ms, by) = (self.name(), 1 + self.random.below(1000), self.keeper());
        // Of those that are on the SSD only, if there are any: they have to come.
        let behind = |name: &u8| self.stage.engine.find_object(&name_key(*name)) == Some(Medium::Ssd);
        let key = name_key((name..NAMES).chain(0..name).find(behind).unwrap_or(name));
        match self.stage.ask(client, |ticket| ObjectRequest::Keep { ticket, keys: vec![key], ttl_ms, by }) {
            ObjectEvent::Kept { outcomes, .. } => {
                let lies = self.stage.engine.find_object(&key) == Some(Medium::Dram);
                match outcomes[0] {
                    Keeping::Done => assert!(lies, "it is kept where it is not"),
                    Keeping::Coming => self.tally.coming += 1,
                    Keeping::Missing => {}
                    Keeping::Full => return,
                }
                // A medium without room for all lets go of blocks, and tells it later.
                let may_miss = !self.stage.has(&key) || self.has_failed || self.limit < 100 << 20;
                assert!(outcomes[0] != Keeping::Missing || may_miss, "it is there and is not kept");
            }
            other => panic!("{other:?}"),
        }
    }

    fn unkeep(&mut self, client: ClientId) {
        let (keys, by) = (vec![name_key(self.name())], self.keeper());
        self.stage.ask(client, |ticket| ObjectRequest::Unkeep { ticket, keys, by });
    }

    fn keeper(&mut self) -> String {
        ["one", "other"][self.random.below(2) as usize].into()
    }

    fn close(&mut self) {
        if !self.views.is_empty() {
            let at = self.random.below(self.views.len() as u64) as usize;
            let (client, pin, ..) = self.views.swap_remove(at);
            self.stage.release(client, pin);
        }
    }

    fn remove(&mut self, client: ClientId) {
        let name = self.name();
        let there = self.stage.has(&name_key(name));
        assert_eq!(self.stage.remove(client, name_key(name)), there);
        assert!(!self.stage.has(&name_key(name)));
        self.set(name, None);
    }

    fn abandon(&mut self) {
        if !self.open.is_empty() {
            let at = self.random.below(self.open.len() as u64) as usize;
            let open = self.open.swap_remove(at);
            self.stage.abandon(open.client, open.made.put);
        }
    }

    fn die(&mut self, client: ClientId) {
        self.stage.gone(client);
        self.open.retain(|open| open.client != client);
        self.views.retain(|view| view.0 != client);
    }

    fn flush(&mut self, client: ClientId) {
        self.find_all();
        if !self.stage.flush(client) {
            // A medium that has failed is given a second.
            assert!(self.has_failed || self.limit < 100 << 20, "a flush fails");
            return;
        }
        // With less room something may have gone meanwhile.
        self.find_all();
        for (name, states) in &mut self.states {
            states.drain(..states.len() - 1);
            // Where there is room for all, nothing goes by itself.
            if let (Some(made), true) = (states[0], self.limit > 100 << 20 && !self.doubtful.contains(name)) {
                self.sure.insert(*name, made);
            }
        }
    }

    /// Learns what was evicted.
    fn find_all(&mut self) {
        for name in 0..NAMES {
            if self.now(name).is_some() && !self.stage.has(&name_key(name)) {
                assert!(!self.sure.contains_key(&name), "{name} was flushed and is lost");
                self.set(name, None);
            }
        }
    }

    fn rot(&mut self) {
        let name = self.name();
        if let (Ground::Shelf(shelf), Some(made)) = (&self.ground, self.now(name)) {
            let index = self.random.below(made.blocks.into()) as u32;
            shelf.rot(&if index == 0 { name_key(name) } else { chunk_key(made.put, index) });
            self.sure.remove(&name);
            self.doubtful.insert(name);
        }
    }

    fn fail(&mut self) {
        if let Ground::Shelf(shelf) = &self.ground {
            self.health = match self.random.below(4) {
                0 => Health::Failed,
                1 => Health::ReadOnly,
                _ => Health::Good,
            };
            shelf.set_health(self.health);
            self.has_failed |= self.health != Health::Good;
        }
    }

    fn evict(&mut self) {
        let name = self.name();
        let evicted = self.stage.administer(|engine, now, out| engine.evict(&[name_key(name)], now, out));
        if evicted.dropped > 0 {
            assert!(!self.stage.has(&name_key(name)));
            self.set(name, None);
        }
    }

    fn clear(&mut self) {
        let mut from = pyengine_transfer::admin::Cursor { store: 0, slot: 0 };
        loop {
            let whose = Some(Whose::Namespace(OBJECTS));
            let (_, next) = self.stage.administer(|engine, now, out| engine.evict_stretch(from, whose, now, out));
            match next {
                Some(next) => from = next,
                None => break,
            }
        }
        for name in 0..NAMES {
            self.sure.remove(&name);
            if !self.stage.has(&name_key(name)) {
                self.set(name, None);
            }
        }
    }

    fn damage(&mut self) {
        let name = self.name();
        if let Some(at) = self.stage.engine.catalog().find(&name_key(name)).and_then(|entry| entry.dram)
            && !self.views.iter().any(|view| view.2 == at)
        {
            self.stage.damage(at);
            self.sure.remove(&name);
            self.doubtful.insert(name);
        }
    }

    /// Another life, with what the medium has.
    fn begin_again(&mut self, tier: Box<dyn Tier>) {
        self.stage = Stage::new(DRAM, Some(tier));
        (self.open, self.views) = (Vec::new(), Vec::new());
        self.tally.crashes += 1;
        let keys = self.stage.engine.catalog().keys();
        let mut expected = 0;
        for name in 0..NAMES {
            let states = self.states[&name].clone();
            let key = name_key(name);
            let Some(Medium::Ssd) = self.stage.engine.find_object(&key) else {
                assert!(!self.sure.contains_key(&name), "{name} was flushed and is lost");
                self.set(name, None);
                // What a medium without room for all lets go of while it is opened may be there again after a crash.
                if self.limit > 100 << 20 {
                    self.states.insert(name, vec![None]);
                }
                continue;
            };
            // Its parts say which of its values it is. What is damaged goes, and would be none of them.
            let whole = |made: &Made| (1..made.blocks).all(|index| keys.contains(&chunk_key(made.put, index)));
            let (pin, at) = match self.stage.get(1, key) {
                Ok(found) => found,
                Err(refusal) => {
                    assert!(refusal == Some(Refusal::Missing) || refusal.is_none(), "{refusal:?}");
                    assert!(!self.sure.contains_key(&name) || self.health == Health::Failed, "{name} was flushed");
                    if self.health == Health::Failed && self.stage.has(&key) {
                        // Which one it is will show when the medium works again.
                        self.stage.remove(1, key);
                    }
                    self.set(name, None);
                    continue;
                }
            };
            let stamped = self.stage.stamped(at).expect("it was verified when it was read");
            self.stage.release(1, pin);
            let made = states.iter().flatten().find(|made| made.put == stamped);
            let made = *made.unwrap_or_else(|| panic!("{name} is {stamped}, of {states:?}"));
            assert!(whole(&made), "half of {name} is there");
            if let Some(sure) = self.sure.get(&name) {
                assert_eq!(*sure, made, "{name} was flushed");
                self.tally.survived += 1;
            }
            expected += made.blocks as usize;
            self.states.insert(name, vec![Some(made)]);
        }
        assert!(self.stage.engine.catalog().keys().len() <= expected, "parts of no object");
    }

    /// A start after a good stop.
    fn restart(&mut self) {
        self.views.clear();
        self.find_all();
        for client in 1..=3 {
            self.die(client);
        }
        self.find_all();
        let all = !self.has_failed && self.limit > 100 << 20;
        std::mem::replace(&mut self.stage, Stage::new(DRAM, None)).stop();
        if all {
            let sound = (0..NAMES).filter(|name| !self.doubtful.contains(name));
            self.sure = sound.filter_map(|name| Some((name, self.now(name)?))).collect();
        }
        for states in self.states.values_mut() {
            states.drain(..states.len() - 1);
        }
        let seed = self.random.bits();
        self.begin_again(self.ground.tier(self.limit, seed));
    }

    /// A start after `kill -9`, or after a loss of power.
    fn crash(&mut self) {
        let power = self.random.permille(500);
        if let Ground::Disk(disk) = &self.ground {
            let disk = if power { disk.crashed(&mut self.random) } else { disk.copy() };
            self.ground = Ground::Disk(disk);
        }
        let seed = self.random.bits();
        self.begin_again(self.ground.tier(self.limit, seed));
    }

    fn look(&mut self) {
        for &(_, _, at, put) in &self.views {
            assert_eq!(self.stage.stamped(at), Some(put), "a view has changed");
        }
        self.find_all();
        let catalog = self.stage.engine.catalog();
        for key in catalog.keys() {
            if catalog.find(&key).is_some_and(|entry| entry.head) {
                assert!(self.now(key.0[0]).is_some(), "{key:?} has come back");
            }
        }
    }
}

fn model(seed: u64) -> Tally {
    let mut model = Model::new(seed);
    for _ in 0..250 {
        model.step();
    }
    for client in 1..=3 {
        model.die(client);
    }
    for _ in 0..200 {
        model.stage.handle(Input::Tick);
    }
    assert_eq!(model.stage.engine.unfinished(), Vec::<String>::new());
    model.tally
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 0, ..ProptestConfig::with_cases(12) })]
    #[test]
    fn random_operations_keep_the_promises(seed in any::<u64>()) {
        model(seed);
    }
}

#[test]
fn the_model_reaches_what_it_is_for() {
    let mut sum = Tally::default();
    for seed in 0..8 {
        let tally = model(seed);
        sum.stored += tally.stored;
        sum.large += tally.large;
        sum.brought += tally.brought;
        sum.missed += tally.missed;
        sum.crashes += tally.crashes;
        sum.survived += tally.survived;
        sum.coming += tally.coming;
    }
    let reached = sum.stored > 100 && sum.large > 10 && sum.brought > 100 && sum.crashes > 10;
    assert!(reached && sum.survived > 10 && sum.missed > 0 && sum.coming > 0, "{sum:?}");
}

// -- values of several blocks ------------------------------------------------------------------------------------------

/// Puts blocks 0 to `until` of a value of `blocks`, and commits all but the head, as a client does that has less room than
/// that. False: it has to give up.
fn put_parts(stage: &mut Stage, (put, name): (u64, u8), blocks: u32, until: u32) -> Result<(), Refusal> {
    for index in 0..until {
        loop {
            match stage.reserve(1, wanted(put, large(), name, (index, blocks))) {
                Reserved::Slot { region, slot } => break stage.stamp((region, slot), put),
                Reserved::Refused(Refusal::Full) if stage.await_room(1) => {}
                Reserved::Refused(refusal) => return Err(refusal),
                Reserved::There => panic!("it is there"),
            }
        }
        assert!(index == 0 || stage.commit(1, put, index));
    }
    Ok(())
}

fn shelved(shelf: &Shelf, limit: u64) -> Stage {
    Stage::new(DRAM, Some(Box::new(MemoryTier::new(shelf.clone(), limit, 4 << 20))))
}

/// Keys of objects that a medium has.
fn on_the_shelf(shelf: &Shelf) -> usize {
    MemoryTier::new(shelf.clone(), 1 << 30, 1 << 20).records().count()
}

// Goal: a value larger than DRAM is there as a whole, and is read again block by block, in this life and in the next.
// Method: 20 blocks through an arena of five.
#[test]
fn a_value_larger_than_dram() {
    let shelf = Shelf::default();
    let mut stage = shelved(&shelf, 1 << 30);
    put_parts(&mut stage, (1, 7), 20, 20).expect("the medium has room");
    assert!(!stage.has(&name_key(8)) && stage.commit(1, 1, 0));
    for life in 0..2 {
        for index in 0..20 {
            let key = if index == 0 { name_key(7) } else { chunk_key(1, index) };
            let (pin, at) = stage.get(2, key).expect("it is there");
            assert_eq!(stage.stamped(at), Some(1), "block {index} in life {life}");
            stage.release(2, pin);
        }
        stage.gone(2);
        stage.stop();
        stage = shelved(&shelf, 1 << 30);
        assert_eq!(stage.engine.catalog().stats().objects, 1);
    }
    assert!(stage.remove(1, name_key(7)));
    assert_eq!((stage.engine.catalog().keys().len(), on_the_shelf(&shelf)), (0, 0));
}

// Goal: of a put that does not end nothing stays, on no medium and in no later life. Method: abandoned, its client dead, the
// engine gone, each when eight of its ten blocks are committed and most have left DRAM.
#[test]
fn of_an_abandoned_put_nothing_stays() {
    for end in 0..3 {
        let shelf = Shelf::default();
        let mut stage = shelved(&shelf, 1 << 30);
        put_parts(&mut stage, (1, 7), 10, 9).expect("the medium has room");
        assert!(on_the_shelf(&shelf) > 3 && !stage.commit(1, 1, 0), "a head without all of its rest");
        match end {
            0 => stage.abandon(1, 1),
            1 => stage.gone(1),
            _ => stage = shelved(&shelf, 1 << 30),
        }
        for _ in 0..10 {
            stage.handle(Input::Tick);
        }
        assert_eq!((stage.engine.catalog().keys().len(), on_the_shelf(&shelf)), (0, 0), "end {end}");
        assert_eq!(stage.engine.unfinished(), Vec::<String>::new());
        put_parts(&mut stage, (2, 7), 3, 3).expect("the name is free");
        assert!(stage.commit(1, 2, 0));
    }
}

// Goal: a value that fits nowhere is refused while it is put, not lost afterwards. Method: a medium for four blocks; one that
// takes none.
#[test]
fn a_put_that_is_torn_ends() {
    let shelf = Shelf::default();
    let mut stage = shelved(&shelf, (4 << 20) + (1 << 16));
    let torn = put_parts(&mut stage, (1, 7), 30, 30);
    assert!(torn == Err(Refusal::Missing) && !stage.commit(1, 1, 0), "{torn:?}");
    stage.abandon(1, 1);
    stage.handle(Input::Tick);
    assert_eq!((stage.engine.catalog().keys().len(), on_the_shelf(&shelf)), (0, 0));
    shelf.set_health(Health::ReadOnly);
    assert_eq!(put_parts(&mut stage, (2, 7), 30, 30), Err(Refusal::Full), "it does not wait for what will not come");
    stage.abandon(1, 2);
    // What fits DRAM is put all the same.
    put_parts(&mut stage, (3, 7), 3, 3).expect("there is room");
    assert!(stage.commit(1, 3, 0) && stage.get(1, chunk_key(3, 2)).is_ok());
}

// Goal: a name that was removed and put anew is never found with its old value, though writes and reads of the old one are
// under way. Method: each order of the two, with a medium that works only when it is polled, then a start.
#[test]
fn a_name_put_anew_is_new() {
    for step in 0..3 {
        let shelf = Shelf::default();
        let mut stage = shelved(&shelf, 1 << 30);
        let put = |stage: &mut Stage, put| {
            let Reserved::Slot { region, slot } = stage.reserve(1, wanted(put, 0, 7, (0, 1))) else { panic!("full") };
            stage.stamp((region, slot), put);
            assert!(stage.commit(1, put, 0));
        };
        put(&mut stage, 1);
        let flush = |stage: &mut Stage| stage.say(1, ObjectRequest::Flush { ticket: 1000 });
        match step {
            // The old one is being written.
            0 => assert!(flush(&mut stage).is_none()),
            // It is there, and in DRAM.
            1 => assert!(stage.flush(1)),
            // It is there only, and being read.
            _ => {
                stage.stop();
                stage = shelved(&shelf, 1 << 30);
                let wanted = vec![wanted(0, 0, 7, (0, 1))];
                assert!(stage.say(2, ObjectRequest::Bring { ticket: 2000, wanted }).is_none());
            }
        }
        assert!(stage.remove(1, name_key(7)) && !stage.has(&name_key(7)));
        put(&mut stage, 2);
        assert!(stage.flush(1));
        let (_, at) = stage.get(1, name_key(7)).expect("it was put");
        assert_eq!(stage.stamped(at), Some(2), "step {step}");
        let mut stage = shelved(&shelf, 1 << 30);
        let (_, at) = stage.get(1, name_key(7)).expect("it was flushed");
        assert_eq!(stage.stamped(at), Some(2), "step {step}, in the next life");
    }
}

// Goal: nobody waits for a medium that has failed, and a name that only it has is no stuck key. Method: a value on the medium
// only, which fails; then works again.
#[test]
fn a_medium_that_fails_is_a_miss() {
    let shelf = Shelf::default();
    let mut stage = shelved(&shelf, 1 << 30);
    put_parts(&mut stage, (1, 7), 2, 2).expect("there is room");
    put_parts(&mut stage, (2, 8), 2, 2).expect("there is room");
    assert!(stage.commit(1, 1, 0) && stage.commit(1, 2, 0) && stage.flush(1));
    let mut stage = shelved(&shelf, 1 << 30);
    shelf.set_health(Health::Failed);
    assert_eq!(stage.get(1, name_key(7)), Err(Some(Refusal::Missing)));
    assert!(stage.has(&name_key(7)), "it is not gone");
    put_parts(&mut stage, (3, 8), 2, 2).expect("the name makes way");
    assert!(stage.commit(1, 3, 0));
    shelf.set_health(Health::Good);
    for (name, put) in [(7, 1), (8, 3)] {
        let (_, at) = stage.get(1, name_key(name)).expect("it is there");
        assert_eq!(stage.stamped(at), Some(put));
    }
}

// Goal: what has been brought stays until it is pinned, but not for ever. Method: a client that brings and never pins.
#[test]
fn nobody_keeps_what_he_does_not_pin() {
    let shelf = Shelf::default();
    let mut stage = shelved(&shelf, 1 << 30);
    put_parts(&mut stage, (1, 7), 3, 3).expect("there is room");
    assert!(stage.commit(1, 1, 0) && stage.flush(1));
    let mut stage = shelved(&shelf, 1 << 30);
    assert_eq!(stage.bring(1, name_key(7), large()), Ok(()));
    assert!(stage.engine.unfinished().iter().any(|what| what.contains("pinned: 1")), "{:?}", stage.engine.unfinished());
    for _ in 0..120 {
        stage.handle(Input::Tick);
    }
    assert_eq!(stage.engine.unfinished(), Vec::<String>::new());
    assert_eq!(stage.engine.find_object(&name_key(7)), Some(Medium::Dram), "it is still there");
}

/// Puts a value of one large block.
fn put_one(stage: &mut Stage, (put, name): (u64, u8)) -> Result<(), Refusal> {
    put_parts(stage, (put, name), 1, 1)?;
    assert!(stage.commit(1, put, 0));
    Ok(())
}

// Goal: nobody waits for ever for what is removed on its way to the SSD. Method: a value that was evicted under its write, and
// that somebody has asked for when it is removed.
#[test]
fn what_is_removed_while_it_is_written_is_waited_for_no_more() {
    let shelf = Shelf::default();
    let mut stage = Stage::new(DRAM, Some(Box::new(MemoryTier::new(shelf.clone(), 1 << 30, 1 << 30))));
    for name in 0..6 {
        put_one(&mut stage, (name.into(), name)).expect("there is room");
    }
    // All are being written until the medium is looked at. What does not wait for that is pushed out under its write.
    assert!(stage.say(1, ObjectRequest::Flush { ticket: 1000 }).is_none());
    shelf.set_health(Health::ReadOnly);
    assert_eq!(put_one(&mut stage, (7, 7)), Err(Refusal::Full));
    let nowhere = |name: &u8| {
        let entry = stage.engine.catalog().find(&name_key(*name));
        entry.is_some_and(|entry| entry.dram.is_none() && !entry.ssd)
    };
    let name = (0..6).find(nowhere).expect("one is on no medium yet");
    let wanted = vec![wanted(0, large(), name, (0, 1))];
    assert!(stage.say(2, ObjectRequest::Bring { ticket: 2000, wanted }).is_none());
    assert!(stage.remove(1, name_key(name)));
    assert_eq!(stage.answer(2, 2000), Some(ObjectEvent::Brought { ticket: 2000, blocks: vec![Err(Refusal::Missing)] }));
}

// Goal: a quota of the SSD bounds what objects have there, and nothing else: who puts finds room as without an SSD. Method:
// values that fill the quota, and then DRAM several times.
#[test]
fn a_full_quota_of_the_ssd_stops_nobody() {
    let shelf = Shelf::default();
    let quota = Quota { namespace: Some(OBJECTS), ssd_bytes: Some(5 << 20), ..Quota::default() };
    let settings = Settings { quotas: vec![quota], ..Settings::new(DRAM) };
    let tier = MemoryTier::new(shelf.clone(), 1 << 30, 4 << 20);
    let mut stage = Stage::with(settings, Some(Box::new(tier)));
    for name in 0..30 {
        put_one(&mut stage, (name.into(), name)).expect("others make room");
    }
    assert!((3..6).contains(&on_the_shelf(&shelf)), "{}", on_the_shelf(&shelf));
}

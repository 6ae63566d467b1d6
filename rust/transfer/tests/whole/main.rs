//! The whole pool of several nodes against a naive model.
//!
//! Goal: whatever workers, users of objects, links, disks, nodes and whoever runs them do,
//! * a block that is called readable holds the right bytes, and an object is the value that was put last, as a whole;
//! * no slot is given to anybody while somebody could write it;
//! * what was called durable is there after any crash, or was evicted and said so; what was deleted durably stays away;
//! * a stop loses nothing; and when all has ended nothing is left but the cache.
//!
//! Method: seeded random workers with blocks of two layouts and two namespaces each grant, fetch from several sources, open,
//! push, prefetch, look up, flush, abort and die on two to four small nodes, beside users of objects; behind an arena is
//! a segment log on disks in memory (one or two), a shelf, or nothing. Links break, are cut, and corrupt; bits flip in DRAM
//! and on disks; disks fill up and fail; nodes stop, are killed and lose their power at any moment. A block's right bytes
//! follow from its key, a private block's from its tag. [`books`] is the naive model of a node. Every engine's `check()` runs
//! after every input, every log's after every call. All of it in virtual time. A failing seed is printed with the command
//! to repeat it.

mod behind;
mod blocks;
mod books;
mod lives;
mod model;
mod objects;
mod work;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use model::{Done, Model};

/// Things that happen in one run.
const STEPS: u64 = 600;

fn run(seed: u64, calm: bool) -> Done {
    let mut model = Model::new(seed, calm);
    (0..number("PYENGINE_STEPS").unwrap_or(STEPS)).for_each(|_| model.act());
    model.finish();
    if calm {
        model.expect_alive();
    }
    for node in &model.nodes {
        for (name, value) in model.world.engine(node).expect("all nodes live").counters() {
            model.done.add("written", if name.starts_with("pyengine_pool_demotions") { value } else { 0 });
            model.done.add("dropped", if name.starts_with("pyengine_pool_dropped") { value } else { 0 });
            model.done.add("abandoned", if name.starts_with("pyengine_fetches_abandoned") { value } else { 0 });
        }
    }
    if !calm {
        model.read_back();
    }
    model.done
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

fn run_seeds(test: &str, calm: bool) {
    let seeds = match number("PYENGINE_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("PYENGINE_SEEDS").unwrap_or(20),
    };
    let count = seeds.end - seeds.start;
    let mut sum = Done::default();
    for seed in seeds {
        match catch_unwind(AssertUnwindSafe(|| run(seed, calm))) {
            Ok(done) => sum.add_all(&done),
            Err(panic) => {
                eprintln!(
                    "repeat with: PYENGINE_SEED={seed} cargo nextest run -p pyengine-transfer --test whole {test}"
                );
                resume_unwind(panic);
            }
        }
    }
    println!("{sum:?}");
    let always = ["completed", "layered", "fetched", "read", "read_there", "shared", "written", "durable", "deleted"];
    let objects = ["stored", "viewed", "evicted"];
    let rough = ["kept", "rotten", "verified", "back", "abandoned"];
    for what in always.iter().chain(&objects).chain(rough.iter().filter(|_| !calm)) {
        assert!(count < 20 || sum.of(what) >= count / 4, "too little happened of {what}: {sum:?}");
    }
}

#[test]
fn gentle_world() {
    run_seeds("gentle_world", true);
}

#[test]
fn rough_world() {
    run_seeds("rough_world", false);
}

// Goal: the same seed does the same. Method: run twice, compare all that clients were told.
#[test]
fn same_seed_same_story() {
    let story = |seed| {
        let mut model = Model::new(seed, false);
        (0..60).for_each(|_| model.act());
        format!("{:?} {:?} {}", model.tasks, model.books, model.world.now())
    };
    assert_eq!(story(5), story(5));
}

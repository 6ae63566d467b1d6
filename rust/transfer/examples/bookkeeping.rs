//! What the pool's bookkeeping costs with no memory behind it: blocks a second on one core, and bytes a block.
//!
//! `cargo run --release -p pyengine-transfer --example bookkeeping -- [BLOCKS] [POLICY...]` prints one JSON object a line
//! (bench, case, value, unit, against, ratio) for each policy, or all. `resident` is the process's growth by a full pool,
//! whatever it is spent on.

use std::hint::black_box;
use std::time::{Duration, Instant};

use pyengine_transfer::messages::GrantMode;
use pyengine_transfer::pool::model::NoMemory;
use pyengine_transfer::pool::policy::cost::Costs;
use pyengine_transfer::pool::policy::{POLICIES, Policy};
use pyengine_transfer::pool::{Granting, Holder, Pool, Wish};
use pyengine_transfer::random::Random;
use pyengine_transfer::types::{BlockKey, Owner, Tag};

/// Blocks of a prefix: 8k tokens of 16 would be 512; what is looked up in practice is some dozens to some thousands.
const PREFIX: u64 = 64;
/// The promise of the design.
const BYTES: f64 = 128.0;
/// Wanted of each core, in millions a second.
const LOOKUPS: f64 = 2.0;
const HOLDER: Holder = Holder { client: Some(1), tag: Tag { request: 1, attempt: 0, worker: 1 } };

fn main() {
    let mut arguments = std::env::args().skip(1).peekable();
    let blocks = arguments
        .next_if(|word| word.parse::<u32>().is_ok())
        .map_or(10_000_000, |word| word.parse().expect("it was a number a moment ago"));
    let named: Vec<&Policy> =
        arguments.map(|name| Policy::named(&name).unwrap_or_else(|error| panic!("{error}"))).collect();
    let policies = if named.is_empty() { POLICIES.iter().collect() } else { named };
    for policy in policies {
        measure(policy, blocks);
    }
}

fn key(prefix: u64, position: u64) -> BlockKey {
    let mut random = Random(prefix * PREFIX + position);
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&random.bits().to_le_bytes());
    bytes[8..].copy_from_slice(&random.bits().to_le_bytes());
    BlockKey(bytes)
}

fn keys(prefix: u64) -> Vec<BlockKey> {
    (0..PREFIX).map(|position| key(prefix, position)).collect()
}

fn store(pool: &mut Pool<NoMemory>, prefix: u64) {
    let wish =
        Wish { keys: keys(prefix), private: false, parent: BlockKey([0; 16]), position: 0, owner: Owner::default() };
    let granted = pool.grant(HOLDER, wish, GrantMode::Now);
    assert!(matches!(granted, Granting::Held(_)), "{granted:?}");
    for index in 0..PREFIX as u32 {
        pool.commit(HOLDER, index, None).expect("nobody writes it");
    }
    pool.release(HOLDER);
    pool.take_changes();
}

fn measure(policy: &Policy, blocks: u32) {
    let before = resident();
    let mut pool = Pool::new(NoMemory, blocks, 0, 1, policy.make(&Costs::default()));
    let prefixes = u64::from(blocks) / PREFIX;
    let filling = rate(prefixes, |prefix| store(&mut pool, prefix));
    say(policy, "fill", filling, "M blocks/s", None);
    let bytes = (resident() - before) / f64::from(blocks);
    say(policy, "resident", bytes, "B/block", Some(("target", BYTES / bytes)));

    let mut random = Random(1);
    let lookups = 1_000_000 / PREFIX;
    let wanted: Vec<Vec<BlockKey>> = (0..lookups).map(|_| keys(random.below(prefixes))).collect();
    let (mut looking, mut releasing) = (Duration::ZERO, Duration::ZERO);
    for keys in &wanted {
        let start = Instant::now();
        assert_eq!(black_box(pool.lookup(HOLDER, keys)).len() as u64, PREFIX);
        let found = Instant::now();
        pool.release(HOLDER);
        looking += found - start;
        releasing += found.elapsed();
    }
    let million = |time: Duration| (lookups * PREFIX) as f64 / time.as_secs_f64() / 1e6;
    let (found, both) = (million(looking), million(looking + releasing));
    say(policy, "lookup", found, "M blocks/s", Some(("target", found / LOOKUPS)));
    say(policy, "lookup and release", both, "M blocks/s", Some(("target", both / LOOKUPS)));
    let asked = rate(lookups, |number| {
        assert!(wanted[number as usize].iter().all(|key| black_box(pool.find(key)).is_some()));
    });
    say(policy, "find", asked, "M blocks/s", Some(("target", asked / LOOKUPS)));
    let turned = rate(lookups, |number| store(&mut pool, prefixes + number));
    say(policy, "store in a full pool", turned, "M blocks/s", None);
}

/// Millions of blocks a second of something that handles a whole prefix each time.
fn rate(times: u64, mut run: impl FnMut(u64)) -> f64 {
    let start = Instant::now();
    (0..times).for_each(&mut run);
    (times * PREFIX) as f64 / start.elapsed().as_secs_f64() / 1e6
}

/// Bytes of this process that lie in memory.
fn resident() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux has it");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("Linux says it");
    line.trim_end_matches("kB").trim().parse::<f64>().expect("a number of kB") * 1024.0
}

fn say(policy: &Policy, what: &str, value: f64, unit: &str, against: Option<(&str, f64)>) {
    let against =
        against.map_or_else(String::new, |(name, ratio)| format!(r#", "against": "{name}", "ratio": {ratio:.3}"#));
    println!(
        r#"{{"bench": "bookkeeping", "case": "{} {what}", "value": {value:.3}, "unit": "{unit}"{against}}}"#,
        policy.name
    );
}

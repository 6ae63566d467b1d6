//! How fast the index is without Python in between: blocks in, matches, and what they cost in memory. For work on it;
//! `bench/index.py` has the figures that count.

use std::time::Instant;

use index::changes::{DRAM, push};
use index::{Change, Index, Key};

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn main() {
    let count =
        |at: usize, default: usize| std::env::args().nth(at).and_then(|word| word.parse().ok()).unwrap_or(default);
    let (nodes, each, length) = (count(1, 64), count(2, 12_800), count(3, 128));
    let mut state = 1;
    let mut index = Index::new();
    let mut chains: Vec<Vec<Key>> = Vec::new();
    let mut packed: Vec<(usize, Vec<u8>)> = Vec::new();
    let mut shared: Vec<Vec<Key>> = vec![Vec::new(); (nodes * each / length / 8).max(1)];
    for node in 0..nodes {
        for _ in 0..each / length {
            let group = random(&mut state) as usize % shared.len();
            let mut key = || {
                [random(&mut state).to_le_bytes(), random(&mut state).to_le_bytes()].concat().try_into().expect("16")
            };
            if shared[group].is_empty() {
                shared[group] = (0..length / 4).map(|_| key()).collect();
            }
            let mut chain = shared[group].clone();
            chain.extend((chain.len()..length).map(|_| -> Key { key() }));
            let mut bytes = Vec::new();
            let mut parent = [0; 16];
            for (position, key) in chain.iter().enumerate() {
                push(&mut bytes, &Change { removed: false, tier: DRAM, position: position as u32, key: *key, parent });
                parent = *key;
            }
            packed.push((node, bytes));
            chains.push(chain);
        }
    }
    let names: Vec<String> = (0..nodes).map(|node| format!("node-{node}")).collect();
    let start = Instant::now();
    for (node, bytes) in &packed {
        index.apply(&names[*node], bytes).expect("well formed");
    }
    let seconds = start.elapsed().as_secs_f64();
    let blocks = chains.len() * length;
    println!(
        "ingest {:.2} M/s, {:.1} bytes a block-holder",
        blocks as f64 / seconds / 1e6,
        index.bytes() as f64 / blocks as f64
    );
    let mut times = Vec::new();
    let (mut held, mut ssd) = (vec![0; nodes], vec![0; nodes]);
    for _ in 0..20_000 {
        let chain = &chains[random(&mut state) as usize % chains.len()];
        let start = Instant::now();
        held.fill(0);
        assert_eq!(index.find_matches(chain, &mut held, &mut ssd), length);
        times.push(start.elapsed().as_nanos());
    }
    times.sort_unstable();
    println!("match p50 {:.2} us, p99 {:.2} us", times[10_000] as f64 / 1e3, times[19_800] as f64 / 1e3);
}

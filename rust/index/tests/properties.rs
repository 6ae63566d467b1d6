//! Goal: the index says what was announced. Method: random changes against sets, checked after each; the suite over both
//! implementations is `tests/scheduler/test_prefix_index.py`, this one runs where there is no Python, and is larger.

use std::collections::{BTreeMap, BTreeSet};

use index::changes::{self, DRAM, SSD};
use index::{Change, Error, Index, Key};
use proptest::prelude::*;

const KEYS: u32 = 400;
const NODES: u32 = 90;

fn key(number: u32) -> Key {
    let mut key = [0; 16];
    key[..4].copy_from_slice(&number.to_le_bytes());
    key
}

fn packed(numbers: &[(u32, u8, bool)]) -> Vec<u8> {
    let mut packed = Vec::new();
    for &(number, tier, removed) in numbers {
        let change =
            Change { removed, tier, position: number % 20, key: key(number), parent: key(number.wrapping_sub(1)) };
        changes::push(&mut packed, &change);
    }
    packed
}

#[derive(Clone, Debug)]
enum Step {
    Apply(u32, Vec<(u32, u8, bool)>),
    Everybody(u32, u8, bool),
    Clear(u32),
    Forget(u32),
    Begin(u32),
    Stage(u32, Vec<(u32, u8, bool)>),
    Adopt(u32),
    Match(Vec<u32>),
}

fn step() -> impl Strategy<Value = Step> {
    let node = 0..NODES;
    let change = (0..KEYS, 0..3_u8, prop::bool::weighted(0.3));
    let some = prop::collection::vec(change.clone(), 0..60);
    prop_oneof![
        12 => (node.clone(), some.clone()).prop_map(|(node, some)| Step::Apply(node, some)),
        3 => change.prop_map(|(number, tier, removed)| Step::Everybody(number % 20, tier, removed)),
        1 => node.clone().prop_map(Step::Clear),
        1 => node.clone().prop_map(Step::Forget),
        2 => node.clone().prop_map(Step::Begin),
        3 => (node.clone(), some).prop_map(|(node, some)| Step::Stage(node, some)),
        2 => node.prop_map(Step::Adopt),
        6 => prop::collection::vec(0..20_u32, 0..20).prop_map(Step::Match),
    ]
}

type Held = BTreeMap<u32, BTreeSet<(u32, u8)>>;

fn fold(held: &mut BTreeSet<(u32, u8)>, some: &[(u32, u8, bool)]) {
    for &(number, tier, removed) in some {
        if removed {
            held.remove(&(number, tier));
        } else {
            held.insert((number, tier));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn it_says_what_was_announced(steps in prop::collection::vec(step(), 1..120)) {
        let mut index = Index::new();
        let (mut held, mut staged) = (Held::new(), Held::new());
        let name = |node: u32| format!("node {node}");
        for step in steps {
            match step {
                Step::Apply(node, some) => {
                    index.apply(&name(node), &packed(&some)).expect("well formed");
                    fold(held.entry(node).or_default(), &some);
                }
                Step::Everybody(number, tier, removed) => {
                    for node in 0..NODES {
                        index.apply(&name(node), &packed(&[(number, tier, removed)])).expect("well formed");
                        fold(held.entry(node).or_default(), &[(number, tier, removed)]);
                    }
                }
                Step::Clear(node) => {
                    index.clear(&name(node)).expect("room");
                    held.insert(node, BTreeSet::new());
                    staged.remove(&node);
                }
                Step::Forget(node) => {
                    index.forget(&name(node));
                    held.remove(&node);
                    staged.remove(&node);
                }
                Step::Begin(node) => {
                    index.begin(&name(node)).expect("room");
                    held.entry(node).or_default();
                    staged.insert(node, BTreeSet::new());
                }
                Step::Stage(node, some) => match staged.get_mut(&node) {
                    Some(staged) => {
                        index.stage(&name(node), &packed(&some)).expect("begun");
                        fold(staged, &some);
                    }
                    None => prop_assert_eq!(index.stage(&name(node), &packed(&some)), Err(Error::NotBegun(name(node)))),
                },
                Step::Adopt(node) => match staged.remove(&node) {
                    Some(staged) => {
                        index.adopt(&name(node)).expect("begun");
                        held.insert(node, staged);
                    }
                    None => prop_assert!(index.adopt(&name(node)).is_err()),
                },
                Step::Match(numbers) => {
                    let keys: Vec<_> = numbers.iter().copied().map(key).collect();
                    let (mut counts, mut ssd) = (vec![0; index.rows()], vec![0; index.rows()]);
                    let best = index.find_matches(&keys, &mut counts, &mut ssd);
                    let leading = |has: &dyn Fn(u32) -> bool| numbers.iter().take_while(|&&number| has(number)).count();
                    let has = |node: &u32, number| (0..3).any(|tier| held[node].contains(&(number, tier)));
                    prop_assert_eq!(best, leading(&|number| held.keys().any(|node| has(node, number))));
                    for node in held.keys() {
                        let slot = index.slot(&name(*node)).expect("known");
                        let run = leading(&|number| has(node, number));
                        prop_assert_eq!(counts[slot], run as i64);
                        let on = |number, tier| held[node].contains(&(number, tier));
                        let only = |number: &&u32| on(**number, SSD) && !on(**number, DRAM) && !on(**number, 0);
                        prop_assert_eq!(ssd[slot], numbers[..run].iter().filter(only).count() as i64);
                    }
                    prop_assert_eq!(index.slot("nobody"), None);
                }
            }
            index.check();
            for (node, blocks) in &held {
                prop_assert_eq!(index.count(&name(*node)), blocks.len() as u64);
            }
        }
        for node in held.keys() {
            let dump = index.dump(&name(*node));
            let listed = changes::check(&dump).expect("well formed").iter().map(changes::read);
            let listed: BTreeSet<_> =
                listed.map(|change| (u32::from_le_bytes(*change.key.first_chunk().expect("16")), change.tier)).collect();
            prop_assert_eq!(&listed, &held[node]);
        }
    }
}

#[test]
fn a_block_of_one_holder_costs_less_than_a_hundred_bytes_however_many_there_are() {
    let mut index = Index::new();
    let mut packed = Vec::new();
    let mut worst: f64 = 0.0;
    for number in 0..400_000_u64 {
        let mut key = [0; 16];
        key[..8].copy_from_slice(&number.to_le_bytes());
        changes::push(&mut packed, &Change { removed: false, tier: DRAM, position: 0, key, parent: [0; 16] });
        if packed.len() == 40 * 1000 {
            index.apply(&format!("{}", number % 64), &packed).expect("well formed");
            packed.clear();
            if number > 100_000 {
                worst = worst.max(index.bytes() as f64 / (number + 1) as f64);
            }
        }
    }
    assert!(worst < 100.0 && worst > 48.0, "{worst} bytes");
}

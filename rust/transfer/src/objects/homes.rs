//! Which member of a cluster is an object's home: highest random weight (rendezvous hashing).
//!
//! Each member has a weight for each key, which depends on nothing else; the heaviest is the home. So all who know the same
//! members agree without a word, each is home of as many keys as the others, and when one comes or goes, only the keys
//! move of which it is the heaviest.

use crate::random::Random;
use crate::types::{BlockKey, NodeId};

/// What a member's weights are made from.
pub fn seed(node: &str) -> u64 {
    let hash = blake3::hash(node.as_bytes());
    u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("8 of 32 bytes"))
}

/// How much a member wants a key. Keys are hashes: their first bytes say as much as all.
fn weight(seed: u64, key: &BlockKey) -> u64 {
    let first = u64::from_le_bytes(key.0[..8].try_into().expect("8 of 16 bytes"));
    Random(first ^ seed).bits()
}

/// Members as they are up, each with its seed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Homes {
    /// In any order; ties, of which there are none, would go by name.
    members: Vec<(u64, NodeId)>,
}

impl Homes {
    /// Of these.
    pub fn new(nodes: impl Iterator<Item = NodeId>) -> Self {
        Self { members: nodes.map(|node| (seed(&node), node)).collect() }
    }

    /// The home of a key. `None`: there is no member.
    pub fn home(&self, key: &BlockKey) -> Option<&NodeId> {
        self.members.iter().max_by_key(|(seed, node)| (weight(*seed, key), node)).map(|(_, node)| node)
    }

    /// All members, the home first, then in the order in which they would follow it.
    pub fn ranked(&self, key: &BlockKey) -> Vec<NodeId> {
        let mut ranked: Vec<_> = self.members.iter().map(|(seed, node)| (weight(*seed, key), node)).collect();
        ranked.sort_unstable_by(|one, other| other.cmp(one));
        ranked.into_iter().map(|(_, node)| node.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    //! Goal: homes are spread evenly, and few move. Method: count over many keys, against the ideal shares.
    use super::*;

    fn keys(count: u64) -> impl Iterator<Item = BlockKey> {
        let mut random = Random(1);
        (0..count).map(move |_| {
            let mut key = [0; 16];
            key[..8].copy_from_slice(&random.bits().to_le_bytes());
            key[8..].copy_from_slice(&random.bits().to_le_bytes());
            BlockKey(key)
        })
    }

    fn homes(count: usize) -> Homes {
        // Names that differ in one letter, as launchers give them.
        Homes::new((0..count).map(|number| format!("node-{number}")))
    }

    #[test]
    fn all_have_as_many_keys() {
        for members in 1..10 {
            let homes = homes(members);
            let mut counts = std::collections::BTreeMap::<&NodeId, u64>::new();
            let all: Vec<BlockKey> = keys(20_000).collect();
            all.iter().for_each(|key| *counts.entry(homes.home(key).expect("there are members")).or_default() += 1);
            let share = 20_000 / members as u64;
            // Five standard deviations of the binomial distribution are below a tenth of each share.
            assert!(
                counts.len() == members && counts.values().all(|count| count.abs_diff(share) * 10 < share),
                "{counts:?}"
            );
        }
    }

    #[test]
    fn only_the_keys_of_who_comes_or_goes_move() {
        let (few, many) = (homes(5), homes(6));
        for key in keys(2000) {
            let (before, after) = (few.home(&key), many.home(&key).expect("there are members"));
            assert!(before == Some(after) || after == "node-5");
            // Who follows the home is the home without it.
            let ranked = many.ranked(&key);
            assert!(ranked[0] == *after && ranked.len() == 6);
            let without = Homes::new((0..6).map(|number| format!("node-{number}")).filter(|node| node != after));
            assert_eq!(without.home(&key), Some(&ranked[1]));
        }
    }

    #[test]
    fn nobody_is_home_of_anything_without_members() {
        assert_eq!(Homes::default().home(&BlockKey([1; 16])), None);
    }
}

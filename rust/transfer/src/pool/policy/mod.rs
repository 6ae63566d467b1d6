//! Which block goes first when room is needed. One seam, one file per policy.
//!
//! The pool decides what may go (`pool/room.rs`): blocks that nobody uses and none of whose children lies here, so that
//! a prefix goes from its tail. These are the candidates, and a policy is an order over them. Slots are all a policy
//! keeps, so its memory is a few bytes for each; what it remembers of blocks that are gone is bounded by those that
//! are here. There is no clock: time is a count of uses.

pub mod by_rank;
pub mod cost;
pub mod length_aware;
pub mod lfu;
pub mod lru;
pub mod ranks;
pub mod s3fifo;

use std::fmt::Debug;

use super::Place;
use crate::error::Error;
use cost::Costs;

/// How a block went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gone {
    /// It made room. It may come back.
    Evicted,
    /// It was corrupt or is unwanted.
    Removed,
}

/// An eviction order over the blocks that may go now. The pool calls, for each block:
///
/// ```text
/// publish ---> (hit* ---> rest)* ---> remove           a block's stay
///              allow <--> forbid                       while nobody uses it, as its children go and come
/// ```
///
/// A block is no candidate when it is published; `hit` and `remove` find it forbidden, unless `pop` has just named it.
/// Who lets go of a prefix does so from tail to head.
pub trait Evict: Debug + Send {
    /// A block was published in this slot, and is being used.
    fn publish(&mut self, slot: u32, place: &Place);
    /// The block was found and is used once more.
    fn hit(&mut self, slot: u32);
    /// Nobody uses it any more, for now.
    fn rest(&mut self, slot: u32);
    /// The block may go. It may not already.
    fn allow(&mut self, slot: u32);
    /// It may not any more. It may now.
    fn forbid(&mut self, slot: u32);
    /// Names the victim, which is a candidate no more; `remove` follows.
    fn pop(&mut self) -> Option<u32>;
    /// The block is gone: the slot means nothing any more.
    fn remove(&mut self, slot: u32, gone: Gone);
    /// The slot `last`, the highest of all, is called `to` from now on, whose block is gone; or it is that one itself.
    /// Where it is called for each block that goes, no more is kept than for those that are here.
    fn renumber(&mut self, last: u32, to: u32);
    /// How many may go.
    fn len(&self) -> usize;
    /// True if none may.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// True if this one may go.
    fn contains(&self, slot: u32) -> bool;
    /// The first candidates, at most `limit`, in the order in which `pop` would name them.
    fn coldest(&self, limit: usize) -> Vec<u32>;
    /// Bytes that the policy has taken for itself.
    fn bytes(&self) -> usize;
}

/// A policy that can be chosen by its name.
#[derive(Clone, Copy)]
pub struct Policy {
    /// How it is chosen.
    pub name: &'static str,
    /// What goes first.
    pub about: &'static str,
    make: fn(&Costs) -> Box<dyn Evict>,
}

impl Policy {
    /// A new order. `costs`: what a block is worth, for the policies that ask.
    pub fn make(&self, costs: &Costs) -> Box<dyn Evict> {
        (self.make)(costs)
    }

    /// The policy of this name.
    ///
    /// # Errors
    /// Give up: there is none; the error lists those that there are.
    pub fn named(name: &str) -> Result<&'static Self, Error> {
        POLICIES.iter().find(|policy| policy.name == name).ok_or_else(|| {
            let names: Vec<_> = POLICIES.iter().map(|policy| policy.name).collect();
            Error::give_up(format!("there is no eviction policy {name:?}: choose one of {}", names.join(", ")))
        })
    }
}

impl Debug for Policy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// All of them, the default first. A new one is a file and a line here; the conformance suite (`tests/policies.rs`) and
/// `bench/eviction.py` take it from there. The last two are for comparison with the paper.
pub static POLICIES: [Policy; 5] = [
    Policy { name: "cost", about: "saves the fewest seconds", make: |costs| by_rank(cost::Cost::new(*costs)) },
    Policy { name: "lru", about: "used longest ago", make: |_| by_rank(lru::Lru) },
    Policy { name: "s3fifo", about: "not used again since it came", make: |_| Box::<s3fifo::S3Fifo>::default() },
    Policy { name: "lfu", about: "used least often", make: |_| by_rank(lfu::Lfu) },
    Policy { name: "length-aware", about: "used least often, latest", make: |_| by_rank(length_aware::LengthAware) },
];

fn by_rank<R: by_rank::Rule + 'static>(rule: R) -> Box<dyn Evict> {
    Box::new(by_rank::ByRank::new(rule))
}

/// What a pool uses when nobody chooses: what did best on the paper's traces (`bench/eviction.py`; DECISIONS.md says why).
pub static DEFAULT: &Policy = &POLICIES[0];

//! What a node knows of the names whose home it is, and of other homes, for all threads of its daemon: the engine writes it,
//! and questions are answered from it by the threads that have the connections. A word with the engine's thread at both ends
//! would cost more than the question.

use std::collections::BTreeMap;

use super::hints::{Claim, Head, Heard, Hints, Member, SELF};
use super::homes::Homes;
use super::talk::Spot;
use crate::types::{BlockKey, NodeAddress, NodeId};

/// See the module.
#[derive(Debug)]
pub struct Book {
    me: NodeId,
    /// Who has joined, by number.
    pub joined: BTreeMap<Member, NodeAddress>,
    /// Of this node and all who have joined; empty while no member is known.
    pub homes: Homes,
    /// All members have told what they hold of this home's names.
    pub told: bool,
    /// Of this home.
    pub hints: Hints,
}

impl Book {
    /// Of a node that knows nobody; with at most so many hints.
    pub fn new(me: NodeId, hints: usize) -> Self {
        let (joined, homes) = Default::default();
        Self { me, joined, homes, told: true, hints: Hints::new(hints) }
    }

    /// True if this node knows all that is held of the names whose home it is.
    pub fn is_sure(&self) -> bool {
        self.told && self.hints.complete()
    }

    /// True if this node is the home of a name.
    pub fn is_home(&self, key: &BlockKey) -> bool {
        self.homes.home(key) == Some(&self.me)
    }

    /// A member wants to put a name.
    pub fn claim(&mut self, by: Member, key: BlockKey) -> Claim {
        let joined = &self.joined;
        self.hints.claim(by, key, |member| member == SELF || joined.contains_key(&member))
    }

    /// A member holds an object.
    pub fn here(&mut self, at: Member, head: Head) -> Heard {
        let joined = &self.joined;
        self.hints.here(at, head, |member| member == SELF || joined.contains_key(&member))
    }

    /// Who holds a name, by this home's hints.
    pub fn hinted(&self, key: &BlockKey) -> Option<(Head, Vec<NodeId>)> {
        let (head, holders) = self.hints.holders(key, |member| member == SELF || self.joined.contains_key(&member))?;
        let name = |member: &Member| {
            if *member == SELF { Some(&self.me) } else { self.joined.get(member).map(|peer| &peer.node) }
        };
        Some((head, holders.iter().filter_map(name).cloned().collect()))
    }

    /// What is known of a name without a look at what this node has, if it is not hinted at.
    pub fn spot(&self, key: &BlockKey) -> Spot {
        let sure = self.is_home(key) && self.is_sure() && !self.hints.claimed(key);
        match self.hinted(key) {
            Some((head, holders)) => Spot { head: Some(head), holders, sure },
            None => Spot { head: None, holders: Vec::new(), sure },
        }
    }

    /// True if it is somewhere; false if it is nowhere; `None`: that is not known for sure.
    pub fn exists(&self, key: &BlockKey) -> Option<bool> {
        let live = |member| member == SELF || self.joined.contains_key(&member);
        let known = self.hints.holders(key, live).is_some();
        if known {
            Some(true)
        } else {
            (self.is_home(key) && self.is_sure() && !self.hints.claimed(key)).then_some(false)
        }
    }
}

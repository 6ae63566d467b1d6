//! The latest life of every node that has proven itself here.

use std::collections::HashMap;

use crate::types::{Incarnation, NodeId};

/// Nodes that are remembered.
const LIMIT: usize = 1 << 14;

/// Why an earlier life of a node is not let in.
pub const STALE: &str = "a later life of your node is known here: this one is stale, or its clock was set back; set it right, \
                         or give the node another name, and start it again";

/// What a proven node's life is to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// The latest one, seen before, or the first of this node.
    Known,
    /// Later than the one we knew.
    New,
    /// A later one is known: this process is a leftover.
    Stale,
}

/// Bounded: when it is full the node that started longest ago is forgotten, so that engines with names of their own,
/// however many come by, do not lock out those that follow. What is forgotten is only that an even older life is stale.
#[derive(Default)]
pub struct Lives(HashMap<NodeId, Incarnation>);

impl Lives {
    /// Notes a life. Incarnations grow with time.
    pub fn see(&mut self, node: &NodeId, life: Incarnation) -> Seen {
        if let Some(latest) = self.0.get_mut(node) {
            let seen = match life.cmp(latest) {
                std::cmp::Ordering::Less => Seen::Stale,
                std::cmp::Ordering::Equal => Seen::Known,
                std::cmp::Ordering::Greater => Seen::New,
            };
            *latest = life.max(*latest);
            return seen;
        }
        if self.0.len() >= LIMIT
            && let Some(oldest) = self.0.iter().min_by_key(|(_, life)| **life).map(|(node, _)| node.clone())
        {
            self.0.remove(&oldest);
        }
        self.0.insert(node.clone(), life);
        Seen::Known
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Goal: leftovers are told from what lives, and no crowd of strangers locks anybody out. Method: the cases, then more
    // nodes than are remembered.
    #[test]
    fn lives_follow_each_other() {
        let mut lives = Lives::default();
        let a = "a".to_string();
        assert_eq!(lives.see(&a, 5), Seen::Known);
        assert_eq!(lives.see(&a, 5), Seen::Known);
        assert_eq!(lives.see(&a, 7), Seen::New);
        assert_eq!(lives.see(&a, 5), Seen::Stale);
        for number in 0..LIMIT as u64 + 100 {
            assert_eq!(lives.see(&format!("engine-{number}"), 10 + number), Seen::Known);
        }
        assert_eq!(lives.0.len(), LIMIT);
        assert_eq!(lives.see(&format!("engine-{}", LIMIT + 99), 9), Seen::Stale);
    }
}

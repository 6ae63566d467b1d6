//! Draining: nothing new is taken on, what is held is served to its end, and what nobody else has goes to other nodes.
//!
//! ```text
//! drain(on) --> a heartbeat says so --> the conductor sends nothing new here, and has others copy what is hot and unique
//!           <-- Moved { blocks, left } after each heartbeat, until nothing is left
//! ```
//!
//! The copies are fetches of peers, as all replication is. The conductor knows what is hot, where there is room, and who
//! else drains; without one, or if it says nothing, nothing is waited for.

use crate::admin::Moving;
use crate::messages::{GrantMode, LocalRequest};
use crate::types::{Nanos, Tag};

use super::{Engine, SECOND};

/// A conductor answers each heartbeat, so each second. One that is silent for so long is not waited for.
const SILENCE: Nanos = 3 * SECOND;

/// A drain under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Drain {
    /// Blocks that went elsewhere, and that are to go there, as the conductor says; before its first word nothing is known.
    blocks: u64,
    left: Option<u64>,
    /// When it has spoken last, or the drain began.
    heard: Nanos,
}

impl Engine {
    /// Takes on nothing new (or again): grants, lookups and opens are refused as `Full`, with which workers go on without
    /// the pool or try elsewhere. What is held is served to its end: commits, pushes and their staging, fetches, and
    /// also new fetches by peers, who may have nobody else to ask.
    pub fn drain(&mut self, on: bool) {
        let was = self.is_draining();
        if on != was {
            self.draining = on.then_some(Drain { blocks: 0, left: None, heard: self.now });
            // The conductor is told with the next tick.
            self.next_heartbeat = 0;
        }
        if !on {
            self.stop_leaving();
        } else if !was {
            self.begin_to_leave();
        }
        if on {
            // Nobody is owed what was only hinted at; a stop would wait for it, and for what is kept.
            self.hints.clear();
            self.drop_all_kept(None);
        }
    }

    /// True while it takes on nothing new.
    pub fn is_draining(&self) -> bool {
        self.draining.is_some()
    }

    /// What the conductor has said of this drain. `over` unless it is likely to say more: whoever asks knows whether there
    /// is a conductor.
    pub fn moving(&self) -> Moving {
        let Some(Drain { blocks, left, heard }) = self.draining else {
            return Moving { over: true, ..Moving::default() };
        };
        let over = left == Some(0) || self.now.saturating_sub(heard) >= SILENCE;
        Moving { blocks, objects: self.moved(), left: left.unwrap_or(0), over }
    }

    /// The conductor tells how far the drain has come.
    pub(super) fn moved_elsewhere(&mut self, blocks: u64, left: u64) {
        if let Some(drain) = &mut self.draining {
            if left == 0 && drain.left != Some(0) {
                tracing::info!("draining: {blocks} blocks were moved to other nodes, no more need to be");
            }
            *drain = Drain { blocks, left: Some(left), heard: self.now };
        }
    }

    /// True if this is something new, and nothing new is taken on.
    pub(super) fn turns_away(&self, request: &LocalRequest) -> bool {
        self.is_draining()
            && match request {
                LocalRequest::Grant { mode: GrantMode::Wait | GrantMode::Now, .. } | LocalRequest::Lookup { .. } => {
                    true
                }
                LocalRequest::Open { tag, to, .. } => to.node != self.node.node || self.turns_away_visit(*tag),
                _ => false,
            }
    }

    /// The same for who comes to fill a grant: one that is not there will not come.
    pub(super) fn turns_away_visit(&self, tag: Tag) -> bool {
        self.is_draining() && self.stores.granted_to(tag).is_none()
    }
}

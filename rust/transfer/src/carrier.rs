//! Carries the engine's block copies by the mover: each block is a transfer of one part.

use std::collections::HashMap;
use std::sync::Arc;

use crate::engine::Copied;
use crate::mover::{Ended, Failure, Mover, Part, Priority, Request, TransferId};
use crate::transport::{Copy, CopyId};
use crate::types::{Nanos, NodeId};

/// The mover, and which transfer is which copy.
pub struct Carrier {
    /// Connects and disconnects peers.
    pub mover: Mover,
    copies: HashMap<TransferId, CopyId>,
    refused: Vec<Copied>,
}

impl Carrier {
    /// Over a mover that knows the engine's arena as a region.
    pub fn new(mover: Mover) -> Self {
        Self { mover, copies: HashMap::new(), refused: Vec::new() }
    }

    /// Starts copies to a connected peer. The engine itself tries again where that can help, so the mover does not.
    pub fn submit(&mut self, peer: &NodeId, copies: &[Copy], now: Nanos) {
        for copy in copies {
            let part = Part { local: copy.local, remote: copy.remote, bytes: copy.bytes.into(), grain: copy.grain };
            let parts = Arc::from([part]);
            let request = Request { op: copy.op, parts, priority: Priority::Normal, deadline: None, retries: 0 };
            match self.mover.submit(peer, request, now) {
                Ok(transfer) => {
                    self.copies.insert(transfer, copy.id);
                }
                // Far above what the engine has under way.
                Err(_) => self.refused.push(Copied { id: copy.id, result: Err(Failure::Unreachable) }),
            }
        }
    }

    /// What has ended since the last call.
    pub fn poll(&mut self, now: Nanos) -> Vec<Copied> {
        let mut copied = std::mem::take(&mut self.refused);
        for (transfer, ended) in self.mover.poll(now) {
            let Some(id) = self.copies.remove(&transfer) else { continue };
            let result = match ended {
                Ended::Done { via, .. } => Ok(via),
                Ended::Failed { why, message, .. } => {
                    tracing::debug!(transfer, "a block was not copied: {message}");
                    Err(why)
                }
                Ended::Cancelled | Ended::DeadlinePassed => Err(Failure::Unreachable),
            };
            copied.push(Copied { id, result });
        }
        copied
    }
}

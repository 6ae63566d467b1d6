//! Carries the engine's block copies by the mover: each block is a transfer of one part. The daemon and its twin in
//! `transport/sim/world.rs` both have one.

use std::collections::HashMap;
use std::sync::Arc;

use crate::engine::{Copied, Engine};
use crate::mover::{Ended, Failure, Mover, Part, Priority, Request, TransferId};
use crate::region::Regions;
use crate::transport::{Copy, CopyId};
use crate::types::{Nanos, NodeId};

/// The mover, and which transfer is which copy.
pub struct Carrier {
    /// Connects and disconnects peers.
    pub mover: Mover,
    regions: Arc<Regions>,
    /// How many arenas are known.
    arenas: usize,
    copies: HashMap<TransferId, CopyId>,
    refused: Vec<Copied>,
}

impl Carrier {
    /// Over a mover that has no memory yet: it gets the engine's arenas.
    pub fn new(mut mover: Mover) -> Self {
        let regions = Regions::new();
        mover.register(regions.clone());
        Self { mover, regions, arenas: 0, copies: HashMap::new(), refused: Vec::new() }
    }

    /// Called after every input of the engine, before its outputs are carried out: some inputs make arenas, and some
    /// give memory of them back.
    pub fn know_arenas(&mut self, engine: &mut Engine) {
        for (region, arena) in engine.arenas().skip(self.arenas) {
            self.regions.set_arena(region, arena.clone());
            self.arenas += 1;
        }
        for (region, bytes) in engine.take_released() {
            self.regions.released(region, bytes);
        }
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

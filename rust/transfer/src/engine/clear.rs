//! Orders of the conductor to forget an owner's blocks, wherever they are: of a model whose weights have changed, or a tenant
//! who has left.
//!
//! A walk over all blocks goes in stretches, some at each tick, so that serving goes on; until it is through, nothing of that
//! owner is read from the medium behind. What was dropped from there is made durable before it is told: it is not to come
//! back with the next start.

use std::collections::VecDeque;

use crate::admin::{Cursor, Evicted};
use crate::messages::DaemonReport;
use crate::pool::tier::{OpId, Whose};
use crate::types::Owner;

use super::{Engine, Output};

/// Orders that are not done; beyond, one is answered as failed. A person gives them.
const CLEARINGS: usize = 64;
/// Stretches of one tick: a million slots a second, for some hundredths of it.
const STRETCHES: usize = 32;

/// An order under way.
#[derive(Debug)]
struct Clearing {
    order: u64,
    whose: Whose,
    /// Where to go on.
    from: Option<Cursor>,
    sum: Evicted,
    /// All is dropped, and this makes it durable.
    flush: Option<OpId>,
}

/// Orders under way, in order.
#[derive(Debug, Default)]
pub(super) struct Clearings(VecDeque<Clearing>);

impl Engine {
    pub(super) fn clear(&mut self, order: u64, whose: Whose) {
        if self.clearings.0.len() >= CLEARINGS {
            let report = DaemonReport::Cleared { order, dropped: 0, held: 0, durable: false };
            return self.out.push(Output::Report(report));
        }
        self.behind.iter_mut().for_each(|behind| behind.doom_reads(whose));
        let (from, sum) = (Some(Cursor::default()), Evicted::default());
        self.clearings.0.push_back(Clearing { order, whose, from, sum, flush: None });
        self.clear_on();
    }

    /// Goes on with the first order that is not done.
    pub(super) fn clear_on(&mut self) {
        for _ in 0..STRETCHES {
            let next = self.clearings.0.iter().position(|clearing| clearing.from.is_some());
            let Some((at, from, whose)) = next.and_then(|at| {
                let Clearing { from, whose, .. } = self.clearings.0[at];
                Some((at, from?, whose))
            }) else {
                return;
            };
            let mut out = Vec::new();
            let (evicted, next) = self.evict_stretch(from, Some(whose), self.now, &mut out);
            self.out = out;
            let flush = if next.is_none() { self.sync_tier() } else { None };
            let Some(clearing) = self.clearings.0.get_mut(at) else { return };
            clearing.sum.dropped += evicted.dropped;
            clearing.sum.held += evicted.held;
            (clearing.from, clearing.flush) = (next, flush);
            if next.is_none() && flush.is_none() {
                self.cleared(at, true);
            }
        }
    }

    /// True if all blocks of this owner are to go, and the walk over them is not through.
    pub(super) fn is_being_cleared(&self, owner: Owner) -> bool {
        self.clearings.0.iter().any(|clearing| clearing.from.is_some() && clearing.whose.has(owner))
    }

    /// True if this flush was one of an order, which is done now.
    pub(super) fn clear_flushed(&mut self, op: OpId, ok: bool) -> bool {
        let at = self.clearings.0.iter().position(|clearing| clearing.flush == Some(op));
        at.into_iter().for_each(|at| self.cleared(at, ok));
        at.is_some()
    }

    fn cleared(&mut self, at: usize, durable: bool) {
        let Some(Clearing { order, sum: Evicted { dropped, held, .. }, .. }) = self.clearings.0.remove(at) else {
            return;
        };
        self.out.push(Output::Report(DaemonReport::Cleared { order, dropped, held, durable }));
    }
}

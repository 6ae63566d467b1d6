//! Making things durable on request.
//!
//! ```text
//! a client      asked ---> a round: what is in the arena only is written ---> all writes are over ---> the tier's flush ---> told
//! the shell     what was dropped is to stay so: the tier's flush only
//! ```
//!
//! Who asks during a round is in the next one, because his blocks may have missed it. So there is one list of blocks to be
//! written, however many ask.

use std::collections::BTreeSet;

use crate::messages::{LocalEvent, Ticket};
use crate::pool::tier::{Fate, OpId};
use crate::types::{ClientId, SlotRef};

use super::super::{Engine, Output};

/// Clients' questions that wait at once; more are told no.
const ASKED_LIMIT: usize = 1024;

/// Who waits for what.
#[derive(Debug, Default)]
pub(super) struct Flushing {
    /// For the next round.
    asked: Vec<(ClientId, Ticket)>,
    round: Option<Round>,
    /// The tier's flushes that the shell waits for.
    shell: BTreeSet<OpId>,
}

#[derive(Debug)]
struct Round {
    whom: Vec<(ClientId, Ticket)>,
    /// What is still to be written: the store, and the slot in it.
    left: Vec<(usize, SlotRef)>,
    /// Writes with a lower number are waited for: set when nothing is left.
    until: Option<OpId>,
    /// The tier's flush, which comes last.
    last: Option<OpId>,
    failed: bool,
}

impl Flushing {
    /// A write could not be made: the medium fails, or no room can be made.
    pub fn write_failed(&mut self) {
        if let Some(round) = &mut self.round {
            round.failed = true;
        }
    }

    /// The tier took no more just now.
    pub fn write_again(&mut self, at: usize, slot: SlotRef) {
        if let Some(round) = &mut self.round
            && round.last.is_none()
        {
            round.left.push((at, slot));
            round.until = None;
        }
    }

    /// True if nobody waits.
    pub fn is_idle(&self) -> bool {
        self.asked.is_empty() && self.round.is_none() && self.shell.is_empty()
    }
}

impl Engine {
    /// A client wants all that is published now to survive whatever happens to this process.
    pub(in crate::engine) fn flush(&mut self, client: ClientId, ticket: Ticket) {
        let asked = self.behind.as_mut().map(|behind| (behind.leaving.is_some(), &mut behind.flushing.asked));
        match asked {
            Some((false, asked)) if asked.len() < ASKED_LIMIT => asked.push((client, ticket)),
            _ => return self.tell(client, LocalEvent::Flushed { ticket, ok: false }),
        }
        self.flush_on();
    }

    /// Makes durable what was removed and written so far; `Output::Flushed` with this number follows. `None`: there is no
    /// tier.
    pub(in crate::engine) fn sync_tier(&mut self) -> Option<OpId> {
        let op = self.number();
        let behind = self.behind.as_mut()?;
        behind.flushing.shell.insert(op);
        behind.tier.flush(op);
        Some(op)
    }

    /// Nobody waits for this client's any more.
    pub(in crate::engine) fn forget_flushes(&mut self, client: ClientId) {
        let Some(behind) = &mut self.behind else { return };
        behind.flushing.asked.retain(|(asker, _)| *asker != client);
        if let Some(round) = &mut behind.flushing.round {
            round.whom.retain(|(asker, _)| *asker != client);
        }
    }

    /// Goes on with a round, or begins the next one.
    pub(in crate::engine) fn flush_on(&mut self) {
        let begins = |flushing: &Flushing| flushing.round.is_none() && !flushing.asked.is_empty();
        if self.behind.as_ref().is_some_and(|behind| begins(&behind.flushing)) {
            let left = self.dirty();
            let Some(behind) = &mut self.behind else { return };
            let whom = std::mem::take(&mut behind.flushing.asked);
            behind.flushing.round = Some(Round { whom, left, until: None, last: None, failed: false });
        }
        loop {
            let next = self.next_number;
            let Some(behind) = &mut self.behind else { return };
            behind.busy &= !behind.writes.is_empty();
            let Some(round) = &mut behind.flushing.round else { return };
            if round.last.is_some() {
                return;
            }
            if let Some((at, slot)) = round.left.pop() {
                if self.write_tier(at, slot) {
                    continue;
                }
                let Some(behind) = &mut self.behind else { return };
                if self.now >= behind.pause {
                    return behind.flushing.write_again(at, slot);
                }
                // The medium fails: the others would wait for it in vain.
                let Some(round) = &mut behind.flushing.round else { return };
                round.failed = true;
                round.left.clear();
                continue;
            }
            let until = *round.until.get_or_insert(next);
            if behind.writes.first_key_value().is_some_and(|(op, _)| *op < until) {
                return;
            }
            // `number`, while the tier is borrowed.
            self.next_number += 1;
            round.last = Some(next);
            return behind.tier.flush(next);
        }
    }

    /// An operation of the tier that is no write and no read is over.
    pub(super) fn flush_ended(&mut self, op: OpId, fate: Fate) {
        let Some(behind) = &mut self.behind else { return };
        let flushing = &mut behind.flushing;
        if flushing.shell.remove(&op) {
            if self.clear_flushed(op, fate == Fate::Done) {
                return;
            }
            self.out.push(Output::Flushed { number: op, ok: fate == Fate::Done });
        } else if let Some(round) = flushing.round.take_if(|round| round.last == Some(op)) {
            let ok = fate == Fate::Done && !round.failed;
            round.whom.into_iter().for_each(|(client, ticket)| self.tell(client, LocalEvent::Flushed { ticket, ok }));
        }
    }

    /// The end is near: clients are told no; they can know nothing of what is done from now on.
    pub(super) fn end_flushes(&mut self) {
        let Some(behind) = &mut self.behind else { return };
        let mut whom = std::mem::take(&mut behind.flushing.asked);
        whom.extend(behind.flushing.round.take().into_iter().flat_map(|round| round.whom));
        whom.into_iter().for_each(|(client, ticket)| self.tell(client, LocalEvent::Flushed { ticket, ok: false }));
    }
}

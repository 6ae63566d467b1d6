//! The side that is asked: applies what peers write, and answers what they read.
//!
//! ```text
//! WRITE -> holds (checked: region, life, bounds, permission) -> bytes, verified as they come -> finish -> ACK
//! READ  -> remembered -> when the socket is free: holds, checksums -> DATA
//! ```

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use crate::region::By;
use crate::transport::{Outcome, STALLED_AFTER};
use crate::types::NodeId;

use super::body::{Body, outcome_of};
use super::frames::{self, Entry, Flags, FrameError, Header, Kind, Table};
use super::inflow::{Inflow, Step};
use super::io::{Lane, Ready, TURN_BYTES, Turn};
use super::outflow::Outflow;
use super::{Hub, count};

/// Reads that a lane remembers; then it listens no more until it has answered some.
pub const ASKED_LIMIT: usize = 64;
/// Answers that wait for a peer that does not read; then the lane listens no more.
const ANSWERS_LIMIT: usize = 256;

/// The asked side of one lane.
pub struct Incoming {
    hub: Arc<Hub>,
    peer: NodeId,
    token: u64,
    inflow: Inflow,
    outflow: Outflow,
    asked: VecDeque<(Header, Vec<Entry>)>,
    moved: Instant,
}

impl Incoming {
    pub(super) fn new(hub: Arc<Hub>, peer: NodeId, token: u64) -> Self {
        let (inflow, outflow) = (Inflow::new(), Outflow::new());
        Self { hub, peer, token, inflow, outflow, asked: VecDeque::new(), moved: Instant::now() }
    }

    /// True if there is more to do at once.
    fn work(&mut self, socket: BorrowedFd<'_>, now: Instant) -> io::Result<bool> {
        let mut budget = TURN_BYTES;
        let mut more = false;
        while self.asked.len() < ASKED_LIMIT && self.outflow.len() < ANSWERS_LIMIT {
            match self.inflow.next(socket, now, &mut budget)? {
                Step::Frame(header, table) => self.asked_for(header, table).map_err(io::Error::other)?,
                Step::Body(header, body) => self.applied(&header, *body),
                Step::Dry => break,
                Step::Spent => {
                    more = true;
                    break;
                }
            }
        }
        let full = self.asked.len() >= ASKED_LIMIT || self.outflow.len() >= ANSWERS_LIMIT;
        let mut sent = 0;
        while self.outflow.is_writable() && sent < TURN_BYTES {
            if self.outflow.is_empty() {
                // One at a time, so that the kernel finds in cache what the checksum has read.
                let Some((header, entries)) = self.asked.pop_front() else { break };
                self.read(&header, &entries)?;
            }
            sent += self.outflow.flush(socket)?;
        }
        if budget < TURN_BYTES || sent > 0 {
            self.moved = now;
        }
        let unsent = !self.outflow.is_empty() || !self.asked.is_empty();
        Ok(more || (self.outflow.is_writable() && (unsent || full)))
    }

    fn asked_for(&mut self, header: Header, table: Table) -> Result<(), FrameError> {
        match table {
            Table::Write { entries, sums, .. } => {
                count(&self.hub.tally.frames_in, 1);
                let regions = self.hub.regions().ok_or(FrameError::OutOfTurn(header.kind))?;
                let mut body = Body::new(sums);
                for entry in &entries {
                    let held = regions.begin_write(entry.at, entry.bytes.into(), By::Peer);
                    body.push(held, entry.bytes, entry.grain);
                }
                if header.body == 0 {
                    self.applied(&header, body);
                } else {
                    self.inflow.expect(header, body);
                }
                Ok(())
            }
            Table::Read { entries } => {
                count(&self.hub.tally.frames_in, 1);
                self.asked.push_back((header, entries));
                Ok(())
            }
            _ => Err(FrameError::OutOfTurn(header.kind)),
        }
    }

    /// All bytes of a WRITE are here and verified.
    fn applied(&mut self, header: &Header, body: Body) {
        let bytes = body.bytes_held();
        let outcomes = body.finish();
        let tally = &self.hub.tally;
        let number = |wanted| outcomes.iter().filter(|outcome| **outcome == wanted).count() as u64;
        count(&tally.copies_in, number(Outcome::Done));
        count(&tally.bytes_in, bytes);
        count(&tally.corrupt, number(Outcome::Corrupt));
        let all_done = outcomes.iter().all(|outcome| *outcome == Outcome::Done);
        let table: Vec<u8> =
            if all_done { Vec::new() } else { outcomes.into_iter().map(frames::outcome_byte).collect() };
        let ack = frames::encode(Kind::Ack, Flags::NONE, header.count as usize, header.sequence, 0, &table);
        self.outflow.push(ack, Vec::new());
    }

    /// Answers a READ.
    fn read(&mut self, header: &Header, entries: &[Entry]) -> io::Result<()> {
        let regions = self.hub.regions().ok_or_else(|| io::Error::other("a read before the regions"))?;
        let bare = header.flags.has(Flags::BARE);
        let (mut table, mut sums) = (Vec::with_capacity(entries.len() * 5), Vec::new());
        let (mut bodies, mut bytes) = (Vec::new(), 0);
        for entry in entries {
            let outcome = match regions.begin_read(entry.at, entry.bytes.into(), By::Peer) {
                Ok(reading) => {
                    if !bare {
                        reading.checksums(entry.grain, &mut sums);
                    }
                    bytes += u64::from(entry.bytes);
                    bodies.push(reading);
                    Outcome::Done
                }
                Err(denied) => outcome_of(denied),
            };
            table.push(frames::outcome_byte(outcome));
        }
        count(&self.hub.tally.copies_in, bodies.len() as u64);
        count(&self.hub.tally.bytes_in, bytes);
        frames::put_sums(&mut table, &sums);
        let flags = if bare { Flags::BARE } else { Flags::NONE };
        let data = frames::encode(Kind::Data, flags, entries.len(), header.sequence, bytes, &table);
        self.outflow.push(data, bodies);
        Ok(())
    }
}

impl Lane for Incoming {
    fn turn(&mut self, socket: BorrowedFd<'_>, ready: Ready, now: Instant) -> Turn {
        if ready.readable {
            self.inflow.set_readable(ready.hangup);
        }
        if ready.writable {
            self.outflow.set_writable();
        }
        match self.work(socket, now) {
            Ok(true) => Turn::Again,
            Ok(false) => Turn::Wait,
            Err(error) => Turn::Over(error.to_string()),
        }
    }

    fn stalls_at(&self) -> Option<Instant> {
        let busy = !self.outflow.is_empty() || self.inflow.due().is_some();
        let silent = busy.then(|| self.moved + STALLED_AFTER);
        [silent, self.inflow.due()].into_iter().flatten().min()
    }

    fn is_tired(&self, _: Instant) -> bool {
        // Whoever has dialled decides that.
        false
    }

    fn end(&mut self, reason: &str) {
        // Gives back the memory that a frame under way holds.
        self.inflow = Inflow::new();
        self.outflow = Outflow::new();
        tracing::debug!(peer = %self.peer, transport = self.hub.name, "an incoming lane ended: {reason}");
        self.hub.incoming_ended(self.token);
    }
}

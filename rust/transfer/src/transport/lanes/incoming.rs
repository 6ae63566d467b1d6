//! The side that is asked: applies what peers write, and answers what they read.
//!
//! ```text
//! WRITE -> holds (checked: region, life, bounds, permission) -> bytes, verified as they come -> finish -> ACK
//! READ  -> remembered -> when the socket is free: holds, checksums -> DATA
//! ```
//!
//! On one host (`sharing`) the bytes of a WRITE are copied by this side out of the peer's memory, and those of a DATA by the
//! peer out of this side's, whose holds last until its RELEASE or the end of the lane.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Instant;

use crate::link::Stream;
use crate::region::{By, Reading, checksums_of};
use crate::transport::fence::{Fencing, Guest};
use crate::transport::{Op, Outcome, STALLED_AFTER};
use crate::types::{NodeAddress, Span};

use super::body::{Body, outcome_of};
use super::frames::{self, Entry, Flags, FrameError, Header, Kind, Place, Table};
use super::inflow::{Inflow, Step};
use super::io::{Lane, Ready, TURN_BYTES, Turn};
use super::outflow::Outflow;
use super::sharing::{Pulling, Sharing};
use super::{Hub, count};

/// Reads that wait for their answer: more than the window of any peer (`Settings::window_frames`), so one that asks for
/// more is no lane of ours. To listen no more instead would leave RELEASE frames unread, for which reads may wait.
pub const ASKED_LIMIT: usize = 256;
/// Answers whose memory a peer is copying; then reads wait until it has given some back.
const LENT_LIMIT: usize = 64;
/// Answers that wait for a peer that does not read; then the lane listens no more.
const ANSWERS_LIMIT: usize = 256;

/// The asked side of one lane.
pub struct Incoming {
    hub: Arc<Hub>,
    peer: NodeAddress,
    token: u64,
    inflow: Inflow,
    outflow: Outflow,
    asked: VecDeque<(Header, Vec<Entry>)>,
    /// On one host: what both sides know of each other's memory.
    sharing: Option<Sharing>,
    /// The WRITE whose bytes are being copied out of the peer's memory.
    pulling: Option<Pulling>,
    /// What the peer copies out of ours, by the READ's sequence.
    lent: HashMap<u64, Vec<Reading>>,
    /// The FENCE whose paths have not all ended.
    fencing: Option<(Header, Fencing)>,
    moved: Instant,
    /// Until its end; afterwards nothing is written for this path any more.
    guest: Option<Guest>,
}

impl Incoming {
    pub(super) fn new(hub: Arc<Hub>, peer: NodeAddress, guest: Guest, token: u64, sharing: Option<Sharing>) -> Self {
        Self {
            hub,
            peer,
            token,
            inflow: Inflow::new(sharing.is_some()),
            outflow: Outflow::new(),
            asked: VecDeque::new(),
            sharing,
            pulling: None,
            lent: HashMap::new(),
            fencing: None,
            moved: Instant::now(),
            guest: Some(guest),
        }
    }

    /// True if there is more to do at once.
    fn work(&mut self, socket: &Stream, now: Instant) -> io::Result<bool> {
        let mut budget = TURN_BYTES;
        let mut more = false;
        self.fenced();
        while self.outflow.len() < ANSWERS_LIMIT {
            if !self.pull(socket, &mut budget)? {
                more = true;
                break;
            }
            match self.inflow.next(socket, now, &mut budget)? {
                Step::Frame(header, table) => self.asked_for(header, table)?,
                Step::Body(header, body) => self.applied(&header, *body),
                Step::Dry => break,
                Step::Spent => {
                    more = true;
                    break;
                }
            }
        }
        // There may be more to hear when the socket has taken some answers.
        more |= self.outflow.len() >= ANSWERS_LIMIT;
        let mut sent = 0;
        while self.outflow.is_writable() && sent < TURN_BYTES {
            if self.outflow.is_empty() && !self.read_next()? {
                break;
            }
            sent += self.outflow.flush(socket)?;
        }
        if budget < TURN_BYTES || sent > 0 {
            self.moved = now;
        }
        more |= sent >= TURN_BYTES;
        Ok(more && (self.outflow.is_writable() || self.outflow.len() < ANSWERS_LIMIT))
    }

    /// Copies what a WRITE has named out of the peer's memory. False: the budget is used up.
    fn pull(&mut self, socket: &Stream, budget: &mut usize) -> io::Result<bool> {
        let Some(pulling) = &mut self.pulling else { return Ok(true) };
        if !pulling.pull(socket, budget)? {
            return Ok(false);
        }
        if let Some(Pulling { header, body, .. }) = self.pulling.take() {
            self.applied(&header, body);
        }
        Ok(true)
    }

    fn asked_for(&mut self, header: Header, table: Table) -> io::Result<()> {
        let out_of_turn = || io::Error::other(FrameError::OutOfTurn(header.kind));
        if header.flags.has(Flags::SHARED) && self.sharing.is_none() {
            return Err(out_of_turn());
        }
        match table {
            Table::Write { entries, places, sums } => {
                count(&self.hub.tally.frames_in, 1);
                let regions = self.hub.regions().ok_or_else(out_of_turn)?;
                let mut body =
                    if header.flags.has(Flags::SHARED | Flags::COMPARE) { Body::comparing() } else { Body::new(sums) };
                let mut taker = regions.taker(By::Peer);
                for entry in &entries {
                    body.push(taker.write(entry.at, entry.bytes.into()), entry.bytes, entry.grain);
                }
                if let Some(sharing) = self.sharing.as_ref().filter(|_| header.flags.has(Flags::SHARED)) {
                    let pulling = Pulling::new(header, body, places, sharing);
                    let unknown = || io::Error::other("a place in a region that was not told of");
                    self.pulling = Some(pulling.ok_or_else(unknown)?);
                } else if header.body == 0 {
                    self.applied(&header, body);
                } else {
                    self.inflow.expect(header, body);
                }
                Ok(())
            }
            Table::Release => self.lent.remove(&header.sequence).map(drop).ok_or_else(out_of_turn),
            Table::Region(told) => {
                let descriptor = self.inflow.take_descriptor();
                let sharing = self.sharing.as_mut().ok_or_else(out_of_turn)?;
                sharing.learn(told, descriptor).map_err(|reason| {
                    let text = reason.as_bytes();
                    let text = &text[..text.len().min(frames::REFUSE_LIMIT)];
                    self.outflow.push(frames::encode(Kind::Refuse, Flags::NONE, 1, 0, 0, text), Vec::new());
                    io::Error::other(reason)
                })
            }
            Table::Read { entries } => {
                count(&self.hub.tally.frames_in, 1);
                if self.asked.len() >= ASKED_LIMIT {
                    return Err(io::Error::other("more reads at once than any window has"));
                }
                self.asked.push_back((header, entries));
                Ok(())
            }
            Table::Fence { paths } if self.fencing.is_none() => {
                let (hub, token) = (Arc::downgrade(&self.hub), self.token);
                let wake = move || {
                    if let Some(hub) = hub.upgrade()
                        && let Some(io) = hub.io()
                    {
                        io.kick(token);
                    }
                };
                self.fencing = Some((header, self.hub.fences.fence(&self.peer, &paths, wake)));
                self.fenced();
                Ok(())
            }
            _ => Err(out_of_turn()),
        }
    }

    /// Answers a FENCE once its paths have ended. The peer writes nothing before it has heard that.
    fn fenced(&mut self) {
        if let Some((header, _)) = self.fencing.take_if(|(_, fencing)| fencing.is_over()) {
            let ack = frames::encode(Kind::Ack, Flags::NONE, header.count as usize, header.sequence, 0, &[]);
            self.outflow.push(ack, Vec::new());
        }
    }

    /// All bytes of a WRITE are here and verified.
    fn applied(&mut self, header: &Header, body: Body) {
        let bytes = body.bytes_held();
        let outcomes = body.finish();
        let served = &self.hub.tally.served;
        served.moved(Op::Write, bytes);
        served.all_ended(&outcomes);
        let all_done = outcomes.iter().all(|outcome| *outcome == Outcome::Done);
        let table: Vec<u8> =
            if all_done { Vec::new() } else { outcomes.into_iter().map(frames::outcome_byte).collect() };
        let ack = frames::encode(Kind::Ack, Flags::NONE, header.count as usize, header.sequence, 0, &table);
        self.outflow.push(ack, Vec::new());
    }

    /// Answers the next READ, if it may be answered now: one at a time, so that the kernel finds in cache what the checksum
    /// has read.
    fn read_next(&mut self) -> io::Result<bool> {
        if self.lent.len() >= LENT_LIMIT {
            return Ok(false);
        }
        let Some((header, entries)) = self.asked.pop_front() else { return Ok(false) };
        self.read(&header, &entries)?;
        Ok(true)
    }

    fn read(&mut self, header: &Header, entries: &[Entry]) -> io::Result<()> {
        let regions = self.hub.regions().ok_or_else(|| io::Error::other("a read before the regions"))?;
        let (bare, shared) = (header.flags.has(Flags::BARE), header.flags.has(Flags::SHARED));
        let mut taker = regions.taker(By::Peer);
        let mut table = Vec::with_capacity(entries.len() * 5);
        let (mut bodies, mut grains, mut bytes, mut places) = (Vec::new(), Vec::new(), 0, Vec::new());
        let mut outcomes = Vec::with_capacity(entries.len());
        for entry in entries {
            let outcome = match taker.read(entry.at, entry.bytes.into()) {
                Ok(reading) => {
                    bytes += u64::from(entry.bytes);
                    bodies.push(reading);
                    grains.push(entry.grain);
                    if let Some(sharing) = self.sharing.as_mut().filter(|_| shared) {
                        let Span { region, offset, .. } = entry.at;
                        // The hold says that it exists.
                        sharing.offer(regions, region, &mut self.outflow)?;
                        frames::put_place(&mut places, &Place { region, offset });
                    }
                    Outcome::Done
                }
                Err(denied) => outcome_of(denied),
            };
            table.push(frames::outcome_byte(outcome));
            outcomes.push(outcome);
        }
        self.hub.tally.served.moved(Op::Read, bytes);
        self.hub.tally.served.all_ended(&outcomes);
        table.extend(places);
        if !bare {
            frames::put_sums(&mut table, &checksums_of(bodies.iter().zip(grains)));
        }
        if shared {
            self.lent.insert(header.sequence, std::mem::take(&mut bodies));
            bytes = 0;
        }
        let data = frames::encode(Kind::Data, header.flags, entries.len(), header.sequence, bytes, &table);
        self.outflow.push(data, bodies);
        Ok(())
    }
}

impl Lane for Incoming {
    fn turn(&mut self, socket: &Stream, ready: Ready, now: Instant) -> Turn {
        if ready.readable {
            self.inflow.set_readable(ready.hangup);
        }
        if ready.writable {
            self.outflow.set_writable();
        }
        match self.work(socket, now) {
            Ok(true) => Turn::Again,
            Ok(false) => Turn::Wait,
            Err(error) => {
                // A last word, if there is one and the socket takes it.
                let _ = self.outflow.flush(socket);
                Turn::Over(error.to_string())
            }
        }
    }

    fn stalls_at(&self) -> Option<Instant> {
        // What is lent to a peer is lent until it is given back, however long that takes (design notes, 4).
        let busy = !self.outflow.is_empty() || self.inflow.due().is_some() || self.pulling.is_some();
        let silent = busy.then(|| self.moved + STALLED_AFTER);
        [silent, self.inflow.due()].into_iter().flatten().min()
    }

    fn is_blocked(&self) -> bool {
        !self.outflow.is_writable()
    }

    fn is_tired(&self, _: Instant) -> bool {
        // Whoever has dialled decides that.
        false
    }

    fn end(&mut self, reason: &str) {
        // Gives back the memory that a frame under way holds.
        self.inflow = Inflow::new(false);
        self.outflow = Outflow::new();
        self.pulling = None;
        self.lent.clear();
        self.fencing = None;
        tracing::debug!(peer = %self.peer.node, transport = self.hub.name, "an incoming lane ended: {reason}");
        self.hub.incoming_ended(self.token);
        self.guest = None;
    }
}

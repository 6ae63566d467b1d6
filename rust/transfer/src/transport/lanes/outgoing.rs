//! The side that asks: one queue per peer, from which its lanes take frames' worth of copies.
//!
//! ```text
//!            submit            take                    ACK, DATA
//! (nowhere) -------> queued --------> sent on a lane ------------> complete
//!                      |                   |
//!                      | no lane is left   | the lane breaks
//!                      v                   v
//!                     Lost                Lost
//! ```
//!
//! A lane is **hungry** if it found the queue empty; `submit` then gives it a turn. Every other lane comes back to the
//! queue by itself. After a loss of writes nothing is taken before the peer has answered a FENCE (`transport::fence`). The
//! first lane is made by `connect`, others when the queue is long, and those go when they idle.
//! One that dies while it carries nothing is nobody's loss: the next submission dials again.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::link::{Link, Stream};
use crate::region::{By, Reading, Writing, checksums_of, sum_count};
use crate::transport::fence::{Trail, next_path};
use crate::transport::{Busy, Completion, Copy, Hand, Helper, Op, Outcome, Path, STALLED_AFTER};
use crate::types::{NodeAddress, Span};

use super::body::{Body, outcome_of};
use super::frames::{
    self, BODY_LIMIT, COPIES_LIMIT, ENTRY_BYTES, Entry, Flags, FrameError, Header, Kind, PLACE_BYTES, Place,
    TABLE_LIMIT, Table,
};
use super::inflow::{Inflow, Step};
use super::io::{Helped, Lane, Ready, Seat, TURN_BYTES, Turn};
use super::outflow::Outflow;
use super::sharing::{Pulling, Sharing};
use super::{FRAME_BYTES, Hub, count};

/// A batch of small copies is split over the lanes down to frames of so many bytes; below, a frame costs more than a core.
const SHARE_BYTES: u64 = 64 << 10;
/// Bytes that a lane is ahead of its answers with frames that have no body. They cost it nothing, so the first lane that
/// runs would take all there is; those with bodies are held back by the socket.
const BODILESS_BYTES: u64 = 1 << 20;
/// A submission up to this size is sent by the caller's thread, if a lane is free: 30 us at most.
const INLINE_BYTES: u64 = 64 << 10;
/// Bytes in the queue, per lane, above which another lane is made.
const GROW_BYTES: u64 = 1 << 20;
/// After a failed attempt to make another lane none is made for so long.
const GROW_AGAIN: Duration = Duration::from_secs(1);
/// A lane that is not the only one and was not used for so long is closed.
const TIRED_AFTER: Duration = Duration::from_secs(30);

/// A peer, and what is to be copied to and from it.
pub struct Peer {
    hub: Arc<Hub>,
    address: NodeAddress,
    trail: Arc<Trail>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Copy>,
    queued_bytes: u64,
    /// Taken by lanes and not complete.
    taken: usize,
    lanes: Vec<Arc<Seat>>,
    /// Tokens of lanes that found the queue empty.
    hungry: Vec<u64>,
    /// Attempts to make a lane, under way.
    dials: Vec<Link>,
    /// A lane has stood.
    stood: bool,
    /// A lane died idle, and none has worked since.
    redialled: bool,
    /// When another lane could not be made.
    refused: Option<Instant>,
    /// Why there is no lane any more; nothing is taken from then on.
    over: Option<String>,
}

impl Peer {
    /// Nothing is dialled yet.
    pub(super) fn new(hub: Arc<Hub>, address: NodeAddress) -> Arc<Self> {
        let trail = hub.fences.trail(&address);
        Arc::new(Self { hub, address, trail, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that could panic runs under the lock, so a poisoned state is still whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where, and which life of it.
    pub(super) fn address(&self) -> &NodeAddress {
        &self.address
    }

    /// False once its last lane has broken.
    pub(super) fn is_open(&self) -> bool {
        self.lock().over.is_none()
    }

    pub(super) fn path(&self) -> Path {
        let state = self.lock();
        match &state.over {
            Some(reason) => Path::Down(reason.clone()),
            None if state.stood => Path::Up,
            None => Path::Connecting,
        }
    }

    /// Queues copies. `Ok(false)`: the path is down, they are not taken.
    pub(super) fn submit(self: &Arc<Self>, copies: &[Copy], now: Instant) -> Result<bool, Busy> {
        let mut state = self.lock();
        if state.over.is_some() {
            return Ok(false);
        }
        let busy = state.queue.len() + state.taken;
        if busy > 0 && busy + copies.len() > self.hub.settings.queue_copies {
            return Err(Busy);
        }
        state.queue.extend(copies);
        state.queued_bytes += copies.iter().map(|copy| u64::from(copy.bytes)).sum::<u64>();
        let (queued, standing) = (state.queued_bytes, (state.lanes.len() + state.dials.len()) as u64);
        let refused = state.refused.is_some_and(|at| now.duration_since(at) < GROW_AGAIN);
        let long = queued > GROW_BYTES * standing && !refused;
        let grow = standing == 0 || (long && standing < self.hub.settings.lanes_per_peer as u64);
        let called = call(&mut state);
        drop(state);
        if grow {
            self.dial();
        }
        if let Some(lane) = called
            && (queued > INLINE_BYTES || !lane.turn_here(now))
        {
            lane.kick();
        }
        Ok(true)
    }

    /// Makes a lane on a thread of its own.
    pub(super) fn dial(self: &Arc<Self>) {
        let link = match Link::new() {
            Ok(link) => link,
            Err(error) => return self.dialled(0, None, Err(error.to_string())),
        };
        let path = next_path();
        self.lock().dials.push(link.clone());
        let (peer, dialling) = (self.clone(), link.clone());
        let work = move || {
            let result = peer.hub.dial.dial(&peer.address, path, &dialling).map_err(|error| error.to_string());
            peer.dialled(path, Some(&dialling), result);
            peer.hub.tell();
        };
        let name = format!("{}-dial", self.hub.name);
        if let Err(error) = std::thread::Builder::new().name(name).spawn(work) {
            self.dialled(path, Some(&link), Err(format!("no thread: {error}")));
        }
    }

    fn dialled(self: &Arc<Self>, path: u64, link: Option<&Link>, result: Result<Stream, String>) {
        let mut state = self.lock();
        state.dials.retain(|dial| link.is_none_or(|link| !dial.is(link)));
        if state.over.is_some() {
            return;
        }
        let seat = result.and_then(|stream| {
            let (hub, owner, sharing) = (self.hub.clone(), self.clone(), Sharing::over(&stream));
            let make = |token| -> Box<dyn Lane> { Box::new(Outgoing::new(hub, owner, path, token, sharing)) };
            self.hub.io().and_then(|io| io.seat(stream, make)).ok_or_else(|| "the engine stops".into())
        });
        let lost = match seat {
            Ok(seat) => {
                count(&self.hub.tally.lanes_out, 1);
                state.stood = true;
                state.refused = None;
                // Listed before its first turn, which waits for this lock.
                state.lanes.push(seat);
                self.hub.path_changed();
                Vec::new()
            }
            Err(reason) => {
                state.refused = Some(Instant::now());
                tracing::debug!(peer = %self.address.node, transport = self.hub.name, "no lane: {reason}");
                self.break_if_bare(&mut state, &reason)
            }
        };
        drop(state);
        self.hub.complete(lost);
    }

    /// Without a lane and without hope for one the peer is over; returns the losses.
    fn break_if_bare(&self, state: &mut State, reason: &str) -> Vec<Completion> {
        if !state.lanes.is_empty() || !state.dials.is_empty() || state.over.is_some() {
            return Vec::new();
        }
        state.over = Some(reason.into());
        self.hub.path_changed();
        take_all(state)
    }

    /// A lane has ended. `idle`: it carried nothing.
    fn lane_gone(self: &Arc<Self>, token: u64, reason: &str, idle: bool) {
        let mut state = self.lock();
        let before = state.lanes.len();
        state.lanes.retain(|lane| lane.token() != token);
        state.hungry.retain(|hungry| *hungry != token);
        if state.lanes.len() < before {
            self.hub.tally.lanes_out.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
        }
        if idle && !state.redialled {
            // Replaced without anybody noticing, now or at the next submission.
            let again = state.lanes.is_empty() && state.dials.is_empty() && !state.queue.is_empty();
            state.redialled |= again;
            let open = state.over.is_none();
            drop(state);
            if again && open {
                self.dial();
            }
            return;
        }
        let lost = self.break_if_bare(&mut state, reason);
        drop(state);
        self.hub.complete(lost);
    }

    /// Takes copies for one frame. None: the lane is hungry now, or so far ahead that an answer comes first, or a path was
    /// lost.
    fn take(&self, token: u64, ahead: u64, shared: bool) -> Vec<Copy> {
        let mut state = self.lock();
        let bodiless = |next: &Copy| shared || next.op == Op::Read;
        if ahead >= BODILESS_BYTES && state.queue.front().is_some_and(bodiless) {
            return Vec::new();
        }
        // Asked under the lock that every submission takes: what is sent again after a loss is queued after it was noted.
        if !self.trail.is_clean() {
            return Vec::new();
        }
        let share = state.queued_bytes / state.lanes.len().max(1) as u64;
        let share = share.clamp(SHARE_BYTES, FRAME_BYTES);
        let (mut bytes, mut table) = (0, 0);
        let mut copies: Vec<Copy> = Vec::new();
        while copies.len() < COPIES_LIMIT
            && let Some(next) = state.queue.front()
        {
            let (more, room) = (bytes + u64::from(next.bytes), table + table_bytes(next));
            let fits = more <= share && room <= TABLE_LIMIT && copies.first().is_none_or(|first| alike(first, next));
            if !copies.is_empty() && !fits {
                break;
            }
            (bytes, table) = (more, room);
            copies.extend(state.queue.pop_front());
        }
        state.queued_bytes -= bytes;
        state.taken += copies.len();
        if copies.is_empty() && state.over.is_none() && !state.hungry.contains(&token) {
            state.hungry.push(token);
        }
        // Each that finds more than it takes calls another one, so who submits wakes one thread and no more: that may well
        // take its place on the core, and then nobody would wake the others.
        let called = if state.queue.is_empty() { None } else { call(&mut state) };
        drop(state);
        if let Some(lane) = called {
            lane.kick();
        }
        copies
    }

    /// Copies that a lane has taken are complete.
    fn settled(&self, copies: usize) {
        self.lock().taken -= copies;
    }

    /// An answer has come: lanes to this peer work.
    fn works(&self) {
        self.lock().redialled = false;
    }

    /// True if this lane could go without loss.
    fn has_others(&self) -> bool {
        self.lock().lanes.len() > 1
    }

    fn waiting(&self, lane: Helped) -> Box<dyn Hand> {
        Box::new(Waiting { hub: self.hub.clone(), lane })
    }

    /// Takes over the only lane that is busy.
    fn take_over(&self) -> Option<Helped> {
        let lanes = self.lock().lanes.clone();
        let mut busy = lanes.iter().filter(|lane| lane.waits());
        match (busy.next(), busy.next()) {
            (Some(lane), None) => lane.take_over(true),
            _ => None,
        }
    }

    /// Takes over the lane that a small submission would go by, if all are idle.
    fn take_next(&self) -> Option<Helped> {
        let state = self.lock();
        let next = state.hungry.last().filter(|_| state.taken == 0 && state.queue.is_empty())?;
        let lane = state.lanes.iter().find(|lane| lane.token() == *next).cloned()?;
        drop(state);
        lane.take_over(false)
    }

    /// Ends all lanes and attempts. What was queued or under way is complete as `Lost` when this returns.
    pub(super) fn close(&self, reason: &str) {
        let (lanes, lost) = {
            let mut state = self.lock();
            state.over.get_or_insert_with(|| reason.into());
            state.dials.iter().for_each(|link| link.close(reason));
            (state.lanes.clone(), take_all(&mut state))
        };
        self.hub.complete(lost);
        lanes.iter().for_each(|lane| lane.end(reason));
    }
}

/// Takes a hungry lane off the list: the one whose answers somebody waits for already, else the last.
fn call(state: &mut State) -> Option<Arc<Seat>> {
    let State { hungry, lanes, .. } = state;
    let lane = |token: &u64| lanes.iter().find(|lane| lane.token() == *token);
    let helped = hungry.iter().position(|token| lane(token).is_some_and(|lane| lane.is_helped()));
    let token = helped.map(|index| hungry.remove(index)).or_else(|| hungry.pop())?;
    lane(&token).cloned()
}

/// A handle for threads that wait.
pub struct Waiter(pub(super) Arc<Peer>);

impl Helper for Waiter {
    fn take_over(&self) -> Option<Box<dyn Hand>> {
        Some(self.0.waiting(self.0.take_over()?))
    }

    fn take_next(&self) -> Option<Box<dyn Hand>> {
        Some(self.0.waiting(self.0.take_next()?))
    }
}

struct Waiting {
    hub: Arc<Hub>,
    lane: Helped,
}

impl Hand for Waiting {
    fn wait(&mut self, within: Duration) -> bool {
        let came = self.lane.wait(within);
        // Whoever waits looks himself.
        if came {
            self.hub.take_news();
        }
        came
    }
}

/// True if both can travel in one frame: the same way, and both with checksums that exist (an arena's) or both without.
fn alike(one: &Copy, other: &Copy) -> bool {
    one.op == other.op && from_arena(one) == from_arena(other)
}

/// True if the bytes come from an arena, so that they have checksums.
fn from_arena(copy: &Copy) -> bool {
    let source = if copy.op == Op::Write { copy.local } else { copy.remote };
    source.region.is_arena()
}

/// Bytes of a copy in a frame's table, at most.
fn table_bytes(copy: &Copy) -> usize {
    ENTRY_BYTES + frames::PLACE_BYTES + 4 * sum_count(copy.bytes.into(), copy.grain)
}

fn take_all(state: &mut State) -> Vec<Completion> {
    state.queued_bytes = 0;
    state.queue.drain(..).map(|copy| Completion { id: copy.id, outcome: Outcome::Lost }).collect()
}

/// A frame that waits for its answer.
struct Sent {
    sequence: u64,
    copies: Vec<Copy>,
    bytes: u64,
    /// Of a READ: where the bytes go, one per copy.
    holds: Vec<Writing>,
    /// Of a FENCE, which has no copies: the paths that it names.
    fence: Vec<u64>,
    /// Of a WRITE whose bodies stay where they are: held until the target has copied them.
    _lent: Vec<Reading>,
}

/// The asking side of one lane.
pub struct Outgoing {
    hub: Arc<Hub>,
    peer: Arc<Peer>,
    /// Its number among all paths of this process.
    path: u64,
    token: u64,
    inflow: Inflow,
    outflow: Outflow,
    sequence: u64,
    sent: VecDeque<Sent>,
    sent_bytes: u64,
    /// The frame whose DATA is coming in: its copies, and what the target said of each.
    reading: Option<(Vec<Copy>, Vec<Outcome>)>,
    /// On one host: what both sides know of each other's memory, and what is being copied out of it.
    sharing: Option<Sharing>,
    pulling: Option<Pulling>,
    /// When bytes last moved, or something became due.
    moved: Instant,
    ended: Vec<Completion>,
}

impl Outgoing {
    fn new(hub: Arc<Hub>, peer: Arc<Peer>, path: u64, token: u64, sharing: Option<Sharing>) -> Self {
        Self {
            hub,
            peer,
            path,
            token,
            inflow: Inflow::new(sharing.is_some()),
            outflow: Outflow::new(),
            sequence: 0,
            sent: VecDeque::new(),
            sent_bytes: 0,
            reading: None,
            sharing,
            pulling: None,
            moved: Instant::now(),
            ended: Vec::new(),
        }
    }

    /// How copies that are like this one travel.
    fn flags(&self, like: &Copy) -> Flags {
        let shared = if self.sharing.is_some() { Flags::SHARED } else { Flags::NONE };
        match self.hub.settings.checksums {
            false => shared | Flags::BARE,
            // To make checksums here would read all bytes once more; who copies has both sides in cache.
            true if self.sharing.is_some() && !from_arena(like) => shared | Flags::BARE | Flags::COMPARE,
            true => shared,
        }
    }

    /// True if there is more to do at once.
    fn work(&mut self, socket: &Stream, now: Instant) -> io::Result<bool> {
        let mut budget = TURN_BYTES;
        let more = self.receive(socket, now, &mut budget)?;
        if budget < TURN_BYTES {
            self.moved = now;
        }
        Ok(self.send(socket, now)? || more)
    }

    fn send(&mut self, socket: &Stream, now: Instant) -> io::Result<bool> {
        let mut bytes = 0;
        while self.outflow.is_writable() {
            // Frame by frame, so that the kernel finds in cache what the checksum has read.
            while self.outflow.is_empty() {
                if !self.build(now)? {
                    return Ok(false);
                }
            }
            if bytes >= TURN_BYTES {
                return Ok(true);
            }
            bytes += self.outflow.flush(socket)?;
            if bytes > 0 {
                self.moved = now;
            }
        }
        Ok(false)
    }

    /// Makes a FENCE. False: it is under way.
    fn fence(&mut self, now: Instant) -> bool {
        let mut fence = self.peer.trail.paths();
        fence.truncate(COPIES_LIMIT);
        if fence.is_empty() || self.sent.iter().any(|sent| !sent.fence.is_empty()) {
            // Another lane has had the answer just now: again.
            return fence.is_empty();
        }
        if self.sent.is_empty() {
            self.moved = now;
        }
        self.sequence += 1;
        let table = frames::fence_table(&fence);
        self.outflow.push(frames::encode(Kind::Fence, Flags::NONE, fence.len(), self.sequence, 0, &table), Vec::new());
        let (copies, holds, lent) = (Vec::new(), Vec::new(), Vec::new());
        self.sent.push_back(Sent { sequence: self.sequence, copies, bytes: 0, holds, fence, _lent: lent });
        true
    }

    /// Makes the next frame. False: nothing to send, or the window is full. No frame may have come of it.
    fn build(&mut self, now: Instant) -> io::Result<bool> {
        let settings = &self.hub.settings;
        if self.sent.len() >= settings.window_frames || self.sent_bytes >= settings.window_bytes {
            return Ok(false);
        }
        if !self.peer.trail.is_clean() {
            return Ok(self.fence(now));
        }
        let mut taken = self.peer.take(self.token, self.sent_bytes, self.sharing.is_some());
        let Some(first) = taken.first() else { return Ok(!self.peer.trail.is_clean()) };
        let (op, flags) = (first.op, self.flags(first));
        let Some(regions) = self.hub.regions().cloned() else {
            self.end_all(taken, Outcome::Lost);
            return Ok(true);
        };
        let mut taker = regions.taker(By::Owner);
        let mut table = Vec::with_capacity(taken.len() * (ENTRY_BYTES + PLACE_BYTES + 4));
        let (mut bodies, mut holds, mut bytes) = (Vec::new(), Vec::new(), 0);
        let mut broken = None;
        let Self { ended, sharing, outflow, .. } = self;
        taken.retain(|copy| {
            let length = u64::from(copy.bytes);
            let refused = if length > BODY_LIMIT || table_bytes(copy) > TABLE_LIMIT {
                Some(Outcome::Denied)
            } else if op == Op::Write {
                match taker.read(copy.local, length) {
                    Ok(reading) => {
                        bodies.push(reading);
                        None
                    }
                    Err(denied) => Some(outcome_of(denied)),
                }
            } else {
                match taker.write(copy.local, length) {
                    Ok(writing) => {
                        holds.push(writing);
                        None
                    }
                    Err(denied) => Some(outcome_of(denied)),
                }
            };
            if let Some(outcome) = refused {
                ended.push(Completion { id: copy.id, outcome });
                return false;
            }
            bytes += length;
            frames::put_entry(&mut table, &Entry { at: copy.remote, bytes: copy.bytes, grain: copy.grain });
            if let Some(sharing) = sharing.as_mut().filter(|_| op == Op::Write) {
                let Span { region, offset, .. } = copy.local;
                frames::put_place(&mut table, &Place { region, offset });
                // The hold says that it exists.
                broken = broken.take().or(sharing.offer(&regions, region, outflow).err());
            }
            true
        });
        if taken.is_empty() {
            return Ok(true);
        }
        if self.sent.is_empty() {
            self.moved = now;
        }
        self.sequence += 1;
        let (sequence, copies) = (self.sequence, taken.len());
        let sums = match flags.has(Flags::BARE) {
            true => Vec::new(),
            false => checksums_of(bodies.iter().zip(taken.iter().map(|copy| copy.grain))),
        };
        let lent = if flags.has(Flags::SHARED) { std::mem::take(&mut bodies) } else { Vec::new() };
        self.sent.push_back(Sent { sequence, copies: taken, bytes, holds, fence: Vec::new(), _lent: lent });
        self.sent_bytes += bytes;
        if let Some(error) = broken {
            return Err(error);
        }
        let head = if op == Op::Write {
            frames::put_sums(&mut table, &sums);
            let body = if flags.has(Flags::SHARED) { 0 } else { bytes };
            frames::encode(Kind::Write, flags, copies, sequence, body, &table)
        } else {
            frames::encode(Kind::Read, flags, copies, sequence, 0, &table)
        };
        self.outflow.push(head, bodies);
        count(&self.hub.tally.frames_out, 1);
        Ok(true)
    }

    /// True if the budget was used up before the socket was empty.
    fn receive(&mut self, socket: &Stream, now: Instant, budget: &mut usize) -> io::Result<bool> {
        loop {
            if !self.pull(socket, budget)? {
                return Ok(true);
            }
            match self.inflow.next(socket, now, budget)? {
                Step::Frame(header, table) => self.heard(header, table)?,
                Step::Body(_, body) => self.arrived(*body),
                Step::Dry => return Ok(false),
                Step::Spent => return Ok(true),
            }
        }
    }

    /// Copies what a DATA has named out of the target's memory. False: the budget is used up.
    fn pull(&mut self, socket: &Stream, budget: &mut usize) -> io::Result<bool> {
        let Some(pulling) = &mut self.pulling else { return Ok(true) };
        if !pulling.pull(socket, budget)? {
            return Ok(false);
        }
        if let Some(Pulling { header, body, .. }) = self.pulling.take() {
            self.arrived(body);
            self.outflow.push(frames::encode(Kind::Release, Flags::NONE, 1, header.sequence, 0, &[]), Vec::new());
        }
        Ok(true)
    }

    fn heard(&mut self, header: Header, table: Table) -> io::Result<()> {
        match (table, &mut self.sharing) {
            (Table::Region(told), Some(sharing)) => {
                sharing.learn(told, self.inflow.take_descriptor()).map_err(io::Error::other)
            }
            (Table::Refuse(reason), _) => Err(io::Error::other(format!("the target refuses: {reason}"))),
            (table, _) => self.answer(header, table).map_err(io::Error::other),
        }
    }

    fn answer(&mut self, header: Header, table: Table) -> Result<(), FrameError> {
        let known = self.sent.iter().position(|sent| sent.sequence == header.sequence);
        // Answers come in order but for reads that the target does later, so it is found at once.
        let sent = known.and_then(|at| self.sent.remove(at)).ok_or(FrameError::OutOfTurn(header.kind))?;
        self.sent_bytes -= sent.bytes;
        let op = sent.copies.first().map(|copy| copy.op);
        match table {
            Table::Ack { outcomes } if !sent.fence.is_empty() && outcomes.is_empty() => {
                self.peer.trail.ended(&sent.fence);
                Ok(())
            }
            Table::Ack { outcomes } if op == Some(Op::Write) => {
                if !outcomes.is_empty() && outcomes.len() != sent.copies.len() {
                    self.sent.push_back(sent);
                    return Err(FrameError::Inconsistent("number of outcomes"));
                }
                let outcomes = outcomes.into_iter().chain(std::iter::repeat(Outcome::Done));
                self.end_each(&sent.copies, outcomes);
                Ok(())
            }
            Table::Data { outcomes, places, sums } if op == Some(Op::Read) => {
                self.take_data(header, sent, outcomes, places, sums)
            }
            _ => {
                self.sent.push_back(sent);
                Err(FrameError::OutOfTurn(header.kind))
            }
        }
    }

    fn take_data(
        &mut self,
        header: Header,
        mut sent: Sent,
        outcomes: Vec<Outcome>,
        places: Vec<Place>,
        sums: Vec<u32>,
    ) -> Result<(), FrameError> {
        let done = || sent.copies.iter().zip(&outcomes).filter(|(_, outcome)| **outcome == Outcome::Done);
        let bytes: u64 = done().map(|(copy, _)| u64::from(copy.bytes)).sum();
        let expected: usize = done().map(|(copy, _)| sum_count(copy.bytes.into(), copy.grain)).sum();
        let flags = sent.copies.first().map_or(Flags::NONE, |first| self.flags(first));
        let expected = if flags.has(Flags::BARE) { 0 } else { expected };
        let inside = if flags.has(Flags::SHARED) { 0 } else { bytes };
        let fits = outcomes.len() == sent.copies.len()
            && header.flags == flags
            && header.body == inside
            && sums.len() == expected;
        if !fits {
            self.sent.push_back(sent);
            return Err(FrameError::Inconsistent("answer"));
        }
        let mut body = if flags.has(Flags::COMPARE) { Body::comparing() } else { Body::new(sums) };
        for ((copy, hold), outcome) in sent.copies.iter().zip(std::mem::take(&mut sent.holds)).zip(&outcomes) {
            if *outcome == Outcome::Done {
                body.push(Ok(hold), copy.bytes, copy.grain);
            }
        }
        self.reading = Some((sent.copies, outcomes));
        if let Some(sharing) = &self.sharing {
            let pulling = Pulling::new(header, body, places, sharing);
            self.pulling = Some(pulling.ok_or(FrameError::Inconsistent("place"))?);
        } else if header.body == 0 {
            self.arrived(body);
        } else {
            self.inflow.expect(header, body);
        }
        Ok(())
    }

    /// The bytes of a READ are here.
    fn arrived(&mut self, body: Body) {
        let Some((copies, outcomes)) = self.reading.take() else { return };
        let mut landed = body.finish().into_iter();
        let outcomes = outcomes.into_iter().map(|said| match said {
            // One per copy that the target has sent.
            Outcome::Done => landed.next().unwrap_or(Outcome::Lost),
            refused => refused,
        });
        self.end_each(&copies, outcomes.collect::<Vec<_>>());
    }

    fn end_each(&mut self, copies: &[Copy], outcomes: impl IntoIterator<Item = Outcome>) {
        let (mut done, mut bytes, mut corrupt) = (0, 0, 0);
        for (copy, outcome) in copies.iter().zip(outcomes) {
            match outcome {
                Outcome::Done => (done, bytes) = (done + 1, bytes + u64::from(copy.bytes)),
                Outcome::Corrupt => corrupt += 1,
                _ => {}
            }
            self.ended.push(Completion { id: copy.id, outcome });
        }
        let tally = &self.hub.tally;
        count(&tally.copies_out, done);
        count(&tally.bytes_out, bytes);
        count(&tally.corrupt, corrupt);
        self.peer.works();
    }

    fn end_all(&mut self, copies: Vec<Copy>, outcome: Outcome) {
        self.ended.extend(copies.iter().map(|copy| Completion { id: copy.id, outcome }));
    }

    fn settle(&mut self) {
        if !self.ended.is_empty() {
            self.peer.settled(self.ended.len());
            self.hub.complete(self.ended.drain(..));
        }
    }
}

impl Lane for Outgoing {
    fn turn(&mut self, socket: &Stream, ready: Ready, now: Instant) -> Turn {
        if ready.readable {
            self.inflow.set_readable(ready.hangup);
        }
        if ready.writable {
            self.outflow.set_writable();
        }
        let result = self.work(socket, now);
        self.settle();
        match result {
            Ok(true) => Turn::Again,
            Ok(false) => Turn::Wait,
            Err(error) => Turn::Over(error.to_string()),
        }
    }

    fn stalls_at(&self) -> Option<Instant> {
        let busy = !self.sent.is_empty() || self.reading.is_some() || !self.outflow.is_empty();
        let silent = busy.then(|| self.moved + STALLED_AFTER);
        [silent, self.inflow.due()].into_iter().flatten().min()
    }

    fn is_blocked(&self) -> bool {
        !self.outflow.is_writable()
    }

    fn is_tired(&self, now: Instant) -> bool {
        now.duration_since(self.moved) >= TIRED_AFTER && self.peer.has_others()
    }

    fn end(&mut self, reason: &str) {
        let idle = self.sent.iter().all(|sent| sent.copies.is_empty()) && self.reading.is_none();
        if self.sent.iter().any(|sent| sent.copies.first().is_some_and(|copy| copy.op == Op::Write)) {
            self.peer.trail.lost(self.path);
        }
        // The holds first: a completion says that this side's memory is quiet.
        self.inflow = Inflow::new(false);
        self.outflow = Outflow::new();
        self.pulling = None;
        let sent = std::mem::take(&mut self.sent);
        let reading = self.reading.take().map(|(copies, _)| copies);
        for copies in sent.into_iter().map(|sent| sent.copies).chain(reading) {
            self.end_all(copies, Outcome::Lost);
        }
        let (peer, transport) = (&self.peer.address.node, self.hub.name);
        if idle {
            tracing::debug!(%peer, transport, "an idle lane ended: {reason}");
        } else {
            tracing::warn!(%peer, transport, lost = self.ended.len(), "a lane ended: {reason}");
        }
        // Before the losses are told, so that whoever sees them and connects again gets a new path.
        self.peer.lane_gone(self.token, reason, idle);
        self.settle();
    }
}

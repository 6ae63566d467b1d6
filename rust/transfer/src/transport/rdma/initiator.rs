//! The end of a path that makes copies.
//!
//! ```text
//! a copy:   queued -> wanted -> granted: slices -> all landed -> (write) applied there -> complete
//!                        \-> refused: complete           \-> (read) verified here ------^
//!
//! a line:   good --a completion fails--> resting --time--> renewing --joined--> proving --one slice--> good
//!             ^                             ^---------- fails again, rests longer ---'                  |
//!             '------------------------------------------------------------------------------------------'
//! ```

use std::collections::{HashMap, VecDeque};
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, poll};

use crate::error::Error;
use crate::link::{DIAL_WITHIN, dial_tcp, nonce, now};
use crate::mailbox::poll_timeout;
use crate::memory::checksum;
use crate::messages::Purpose;
use crate::region::{By, Denied, Reading, Regions, Writing, pieces, sum_count};
use crate::session::Session;
use crate::transport::fence::{Trail, next_path};
use crate::transport::{Completion, Copy, Op, Outcome};
use crate::types::NodeAddress;

use super::control::{self, Answer, Control, Message, PortAddress, QueueAddress, SUMS_PER_MESSAGE, Wanted};
use super::device::{Pair, Side, Work};
use super::pinned::{Chunk, Run};
use super::slices::{Cut, cut};
use super::topology::Location;
use super::{Cards, End, Phase, SLICE_BYTES, STALLED_AFTER, Shared, WINDOW, broken, random};

/// Copies asked for in one message: what the other side answers while the next are gathered.
const BATCH: usize = 256;
/// Bytes under way on a path: 2 ms at 400 Gbit/s, far above any round trip.
const WINDOW_BYTES: u64 = 64 << 20;
/// How long a line rests after its first failure; twice as long after each further one.
const REST: Duration = Duration::from_millis(250);
const REST_LIMIT: Duration = Duration::from_secs(30);
/// How long a path looks again and again for completions before it sleeps: about what waking up costs.
const SPIN: Duration = Duration::from_micros(20);
/// With fewer cores, whoever spins takes the core from whoever it waits for.
const CORES_TO_SPIN: usize = 8;

/// The path's thread.
pub fn run(shared: &Shared, end: &End, peer: &NodeAddress) {
    let mut guard = Guard { shared, end, why: "the path's thread died".into() };
    match Path::open(shared, end, peer) {
        Ok(mut path) => {
            end.lock().phase = Phase::Up;
            shared.counters.paths_opened.fetch_add(1, Ordering::Relaxed);
            (shared.notify)();
            let error = path.drive();
            // Before the path is dropped, so that whoever sees its losses and connects again gets a new one.
            let mut state = end.lock();
            if path.flights.is_empty() && state.waiting.is_empty() {
                state.phase = Phase::Asleep;
            } else {
                tracing::warn!(peer = %peer.node, "an rdma path ended: {error}");
                state.phase = Phase::Over(error.to_string());
            }
        }
        Err(error) => guard.why = error.to_string(),
    }
}

/// However a path's thread ends, what still waits in its queue is lost, and later submissions are told so.
struct Guard<'a> {
    shared: &'a Shared,
    end: &'a End,
    why: String,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        let waiting = {
            let mut state = self.end.lock();
            if matches!(state.phase, Phase::Connecting | Phase::Up) {
                state.phase = Phase::Over(std::mem::take(&mut self.why));
            }
            std::mem::take(&mut state.waiting)
        };
        self.shared.complete(waiting.into_iter().map(|copy| Completion { id: copy.id, outcome: Outcome::Lost }));
    }
}

enum Hold {
    Reading(Reading),
    Writing(Writing),
    /// The card is through with it, and the other side's word is awaited.
    Given,
}

/// A copy under way.
struct Flight {
    copy: Copy,
    /// Before the hold, so that keys go before the memory does.
    runs: Vec<Run>,
    hold: Hold,
    /// Slices that have not landed.
    left: usize,
    /// Of writes ours, of reads theirs.
    sums: Vec<u32>,
}

/// A part of a copy that one work request moves.
struct Slice {
    copy: u64,
    write: bool,
    local: u64,
    chunk: Arc<Chunk>,
    remote: u64,
    /// One per port of the other side.
    keys: Arc<[u32]>,
    bytes: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Health {
    Good,
    /// Joined anew: takes one slice at a time until one has landed.
    Proving,
    /// Waits for the other side's new queue pair.
    Renewing,
    Resting(Instant),
}

/// A pair of queue pairs, one at each end.
struct Line {
    pair: Option<Pair>,
    /// Index of this side's rail, and of the other side's port.
    rail: usize,
    port: usize,
    /// Under way, by number.
    posted: VecDeque<(u64, Slice)>,
    bytes: u64,
    health: Health,
    /// Since a slice last landed.
    failures: u32,
}

struct Path<'a> {
    shared: &'a Shared,
    end: &'a End,
    regions: &'a Regions,
    cards: Arc<Cards>,
    control: Control,
    ports: Vec<PortAddress>,
    lines: Vec<Line>,
    /// Waiting for room on a line.
    ready: VecDeque<Slice>,
    flights: HashMap<u64, Flight>,
    /// Granted writes whose checksums are still to be made.
    unsummed: Vec<u64>,
    landed: Vec<u64>,
    completions: Vec<Completion>,
    next: u64,
    bytes: u64,
    /// When something last moved.
    moved: Instant,
    /// A queue pair could not be destroyed: what it may touch is never given back.
    stuck: bool,
    /// Its number among all paths of this process.
    number: u64,
    trail: Arc<Trail>,
    /// Lost paths of which the other side has been told, and when.
    fencing: Option<(Vec<u64>, Instant)>,
    spin: bool,
}

impl<'a> Path<'a> {
    fn open(shared: &'a Shared, end: &'a End, peer: &NodeAddress) -> Result<Self, Error> {
        let cards = shared.cards()?;
        let within = shared.settings.within(DIAL_WITHIN);
        let until = Instant::now() + within;
        let regions = shared.regions()?;
        let ours = cards.ports()?;
        let stream = dial_tcp(&peer.address, &end.link, within)
            .map_err(|error| Error::retry(format!("cannot reach {}: {error}", peer.address)))?;
        let number = next_path();
        let purpose = Purpose::Rdma { node: shared.me.clone(), path: number };
        let mut session = Session::dial(shared.key, purpose, nonce()?, now());
        session.slow_down(shared.settings.slowness);
        let mut control = Control::dial(stream, session, peer, &end.link, until)?;
        control.say(&Message::Open {
            ports: ours.iter().map(|(_, address)| *address).collect(),
            queues_per_port: shared.settings.queues_per_port,
        });
        let Message::Offer { ports, queues } = control.expect(&end.link, until)? else {
            return Err(broken("offers no queue pairs"));
        };
        if ports.is_empty() || ports.len() > control::PORT_LIMIT || queues.is_empty() || queues.len() > 256 {
            return Err(broken("offers an impossible number of queue pairs"));
        }
        let mut lines = Vec::with_capacity(queues.len());
        for (index, queue) in queues.iter().enumerate() {
            let (here, there) = control::joins(index, ours.len(), ports.len());
            let (rail, _) = ours[here];
            let mut pair = Pair::new(&cards.rails[rail], Side::Initiator, random()?)?;
            pair.join(&ports[there], *queue)?;
            let (posted, health) = (VecDeque::new(), Health::Good);
            lines.push(Line { pair: Some(pair), rail, port: there, posted, bytes: 0, health, failures: 0 });
        }
        let queues = lines.iter().flat_map(|line| &line.pair).map(Pair::address).collect();
        control.say(&Message::Join { queues });
        let Message::Joined = control.expect(&end.link, until)? else { return Err(broken("does not join")) };
        Ok(Self {
            shared,
            end,
            regions,
            cards,
            control,
            ports,
            lines,
            ready: VecDeque::new(),
            flights: HashMap::new(),
            unsummed: Vec::new(),
            landed: Vec::new(),
            completions: Vec::new(),
            next: 0,
            bytes: 0,
            moved: Instant::now(),
            stuck: false,
            number,
            trail: shared.fences.trail(peer),
            fencing: None,
            spin: std::thread::available_parallelism().is_ok_and(|cores| cores.get() >= CORES_TO_SPIN),
        })
    }

    /// Runs until the path ends; returns why.
    fn drive(&mut self) -> Error {
        loop {
            match self.turn() {
                Ok(()) if self.end.link.is_closed() => return Error::retry("closed"),
                Ok(()) => {}
                Err(error) => return error,
            }
        }
    }

    fn turn(&mut self) -> Result<(), Error> {
        self.end.link.wake().clear();
        if self.end.link.is_closed() {
            return Ok(());
        }
        let mut messages = Vec::new();
        let ended = self.control.exchange(&mut messages);
        let mut busy = !messages.is_empty();
        for message in messages {
            self.hear(message)?;
        }
        // What came before the end counts.
        ended?;
        busy |= self.reap()?;
        self.renew()?;
        self.spread()?;
        self.sum();
        self.land()?;
        busy |= self.refill()?;
        self.control.flush()?;
        if !self.completions.is_empty() {
            self.end.lock().taken -= self.completions.len();
            self.shared.complete(std::mem::take(&mut self.completions));
        }
        if busy || self.flights.is_empty() {
            self.moved = Instant::now();
        }
        if busy {
            return Ok(());
        }
        let (still, stalled) = (self.moved.elapsed(), self.shared.settings.within(STALLED_AFTER));
        if !self.flights.is_empty() && still >= stalled {
            return Err(Error::retry(format!("nothing moved for {} s", stalled.as_secs())));
        }
        if self.spin && !self.flights.is_empty() && still < SPIN {
            std::hint::spin_loop();
            return Ok(());
        }
        self.sleep(stalled.saturating_sub(still))
    }

    /// Waits for the socket, a completion, the queue, or time.
    fn sleep(&mut self, until_stalled: Duration) -> Result<(), Error> {
        for pair in self.lines.iter_mut().filter_map(|line| line.pair.as_mut()) {
            pair.arm();
        }
        // What came before arming is not announced.
        if self.reap()? {
            self.moved = Instant::now();
            return Ok(());
        }
        let mut left = self.control.tick_within();
        if !self.flights.is_empty() {
            left = left.min(until_stalled);
        }
        for line in &self.lines {
            if let Health::Resting(until) = line.health {
                left = left.min(until.saturating_duration_since(Instant::now()));
            }
        }
        let mut wait = vec![
            PollFd::new(self.control.as_fd(), self.control.wants()),
            PollFd::new(self.end.link.wake().as_fd(), PollFlags::POLLIN),
        ];
        let events = self.lines.iter().filter_map(|line| line.pair.as_ref()?.events());
        wait.extend(events.map(|events| PollFd::new(events, PollFlags::POLLIN)));
        // An error is an interrupted call: the next turn looks at everything anyway.
        let _ = poll(&mut wait, poll_timeout(Some(left)));
        Ok(())
    }

    /// Takes queued copies up to the window, and asks for them.
    fn refill(&mut self) -> Result<bool, Error> {
        if !self.trail.is_clean() {
            return self.fence();
        }
        let mut wanted = Vec::new();
        while self.flights.len() < WINDOW && self.bytes < WINDOW_BYTES && wanted.len() < BATCH {
            let next = {
                let mut state = self.end.lock();
                let next = state.waiting.pop_front();
                state.taken += usize::from(next.is_some());
                next
            };
            let Some(copy) = next else { break };
            let hold = match copy.op {
                Op::Write => self.regions.begin_read(copy.local, u64::from(copy.bytes), By::Owner).map(|hold| {
                    let at = NonNull::from(hold.bytes()).cast();
                    (Hold::Reading(hold), at)
                }),
                Op::Read => self.regions.begin_write(copy.local, u64::from(copy.bytes), By::Owner).map(|mut hold| {
                    let at = NonNull::from(hold.bytes_mut()).cast();
                    (Hold::Writing(hold), at)
                }),
            };
            let (hold, pointer) = match hold {
                Ok(held) => held,
                Err(denied) => {
                    let outcome = if denied == Denied::Fenced { Outcome::Fenced } else { Outcome::Denied };
                    self.completions.push(Completion { id: copy.id, outcome });
                    continue;
                }
            };
            let runs = self.cards.pinned.runs(self.regions, copy.local, pointer, copy.bytes);
            let runs = match runs {
                Ok(Some(runs)) => runs,
                // Removed between the hold and here.
                Ok(None) => {
                    self.completions.push(Completion { id: copy.id, outcome: Outcome::Fenced });
                    continue;
                }
                // Memory that cannot be pinned goes another way: the path is of no use for it.
                Err(error) => {
                    self.completions.push(Completion { id: copy.id, outcome: Outcome::Lost });
                    return Err(error);
                }
            };
            let number = self.next;
            self.next += 1;
            self.bytes += u64::from(copy.bytes);
            let Copy { remote, bytes, grain, .. } = copy;
            self.flights.insert(number, Flight { copy, runs, hold, left: 0, sums: Vec::new() });
            wanted.push(Wanted { number, write: copy.op == Op::Write, remote, bytes, grain });
        }
        let some = !wanted.is_empty();
        if some {
            self.control.say(&Message::Want { copies: wanted });
        }
        Ok(some)
    }

    /// Nothing is asked for before the other side has ended the paths that are lost.
    fn fence(&mut self) -> Result<bool, Error> {
        if let Some((_, since)) = &self.fencing {
            let within = self.shared.settings.within(STALLED_AFTER);
            return if since.elapsed() < within {
                Ok(false)
            } else {
                Err(broken("does not end the paths that are lost"))
            };
        }
        let paths = self.trail.paths();
        self.control.say(&Message::Fence { paths: paths.clone() });
        self.fencing = Some((paths, Instant::now()));
        Ok(true)
    }

    fn hear(&mut self, message: Message) -> Result<(), Error> {
        match message {
            Message::Fenced => {
                let (paths, _) = self.fencing.take().ok_or_else(|| broken("speaks out of turn"))?;
                self.trail.ended(&paths);
            }
            Message::Grant { answers } => {
                for (number, answer) in answers {
                    match answer {
                        Answer::Granted { runs, sums } => self.granted(number, &runs, sums)?,
                        Answer::Fenced => self.finish(number, Outcome::Fenced)?,
                        Answer::Denied => self.finish(number, Outcome::Denied)?,
                    }
                }
            }
            Message::Applied { outcomes } => {
                for (number, intact) in outcomes {
                    if !self.flights.get(&number).is_some_and(|flight| matches!(flight.hold, Hold::Given)) {
                        return Err(broken("speaks of a copy that has not landed"));
                    }
                    self.finish(number, control::applied(intact))?;
                }
            }
            Message::Renewed { line, queue } => self.renewed(usize::from(line), queue)?,
            Message::Retire { line } => {
                if usize::from(line) < self.lines.len() {
                    self.fail(usize::from(line), "the other side has given it up")?;
                }
            }
            _ => return Err(broken("speaks out of turn")),
        }
        Ok(())
    }

    /// The other side has checked and holds its memory: cuts the copy into slices.
    fn granted(&mut self, number: u64, theirs: &[control::Run], sums: Vec<u32>) -> Result<(), Error> {
        let flight = self.flights.get_mut(&number).ok_or_else(|| broken("grants what was not asked for"))?;
        let Copy { op, bytes, grain, .. } = flight.copy;
        let write = op == Op::Write;
        let total: u64 = theirs.iter().map(|run| u64::from(run.bytes)).sum();
        let expected = if write { 0 } else { sum_count(u64::from(bytes), grain) };
        let fresh = flight.left == 0 && !matches!(flight.hold, Hold::Given);
        if !fresh
            || total != u64::from(bytes)
            || sums.len() != expected
            || theirs.iter().any(|run| run.bytes == 0 || run.keys.len() != self.ports.len())
        {
            return Err(broken("grants something else than was asked for"));
        }
        flight.sums = sums;
        let keys: Vec<Arc<[u32]>> = theirs.iter().map(|run| run.keys.as_slice().into()).collect();
        let bytes_here: Vec<u32> = flight.runs.iter().map(|run| run.bytes).collect();
        let bytes_there: Vec<u32> = theirs.iter().map(|run| run.bytes).collect();
        for Cut { here, there, bytes } in cut(&bytes_here, &bytes_there, SLICE_BYTES) {
            let run = &flight.runs[here.0];
            self.ready.push_back(Slice {
                copy: number,
                write,
                local: run.address + u64::from(here.1),
                chunk: run.chunk.clone(),
                remote: theirs[there.0].address.wrapping_add(u64::from(there.1)),
                keys: keys[there.0].clone(),
                bytes,
            });
            flight.left += 1;
        }
        if write {
            self.unsummed.push(number);
        }
        if flight.left == 0 {
            self.landed.push(number);
        }
        Ok(())
    }

    /// Makes the checksums of what was just posted, while the cards move it.
    fn sum(&mut self) {
        for number in std::mem::take(&mut self.unsummed) {
            if let Some(Flight { hold: Hold::Reading(hold), copy, sums, .. }) = self.flights.get_mut(&number) {
                hold.checksums(copy.grain, sums);
            }
        }
    }

    /// Gives slices to lines: to the one with the least under way, of those near the memory, of those that are good.
    fn spread(&mut self) -> Result<(), Error> {
        let mut chains: Vec<Vec<Work>> = self.lines.iter().map(|_| Vec::new()).collect();
        let mut near = None;
        while let Some(slice) = self.ready.front() {
            let node = slice.chunk.node;
            if near.as_ref().is_none_or(|(of, _)| *of != node) {
                near = Some((node, self.cards.topology.near(&Location::Host(node))));
            }
            let is_near = |line: &Line| near.as_ref().is_some_and(|(_, near)| near[line.rail]);
            let good = |line: &Line| line.health == Health::Good;
            let only_near = self.lines.iter().any(|line| good(line) && is_near(line));
            let chosen = self
                .lines
                .iter()
                .enumerate()
                .filter(|(_, line)| match (line.health, &line.pair) {
                    (Health::Good, Some(pair)) => line.posted.len() < pair.depth() && (!only_near || is_near(line)),
                    (Health::Proving, Some(_)) => line.posted.is_empty(),
                    _ => false,
                })
                // One that is to be proven first, else it never would be.
                .min_by_key(|(_, line)| (line.health == Health::Good, line.bytes))
                .map(|(index, _)| index);
            let Some(index) = chosen else { break };
            let Some(slice) = self.ready.pop_front() else { break };
            let line = &mut self.lines[index];
            chains[index].push(Work {
                write: slice.write,
                local: slice.local,
                local_key: slice.chunk.local_key(line.rail),
                remote: slice.remote,
                remote_key: slice.keys[line.port],
                bytes: slice.bytes,
            });
            line.bytes += u64::from(slice.bytes);
            // Numbered below, when the chain is posted.
            line.posted.push_back((u64::MAX, slice));
        }
        for (index, chain) in chains.into_iter().enumerate().filter(|(_, chain)| !chain.is_empty()) {
            let line = &mut self.lines[index];
            let Some(pair) = &mut line.pair else { continue };
            // SAFETY: the slices' memory is held by their flights and registered by their chunks, both of which outlive
            // the work: they are let go when it has completed, or after the pair is destroyed.
            match unsafe { pair.post(&chain) } {
                Ok(first) => {
                    let from = line.posted.len() - chain.len();
                    for (number, (slot, _)) in (first..).zip(line.posted.range_mut(from..)) {
                        *slot = number;
                    }
                }
                Err(error) => self.fail(index, &error.to_string())?,
            }
        }
        Ok(())
    }

    /// Looks for completions on all lines.
    fn reap(&mut self) -> Result<bool, Error> {
        let mut any = false;
        for index in 0..self.lines.len() {
            let line = &mut self.lines[index];
            let Some(pair) = line.pair.as_mut().filter(|_| line.health != Health::Renewing) else { continue };
            let (done, failed) = pair.reap();
            any |= done.is_some() || failed.is_some();
            while let Some((number, _)) = line.posted.front()
                && done.is_some_and(|done| *number <= done)
                && let Some((_, slice)) = line.posted.pop_front()
            {
                line.bytes -= u64::from(slice.bytes);
                if line.health == Health::Proving {
                    (line.health, line.failures) = (Health::Good, 0);
                    self.shared.counters.lines_renewed.fetch_add(1, Ordering::Relaxed);
                }
                if let Some(flight) = self.flights.get_mut(&slice.copy) {
                    flight.left -= 1;
                    if flight.left == 0 {
                        self.landed.push(slice.copy);
                    }
                }
            }
            if let Some(why) = failed {
                self.fail(index, &why)?;
            }
        }
        Ok(any)
    }

    /// A line has failed: its queue pair goes, here at once and there before anything that was on it counts as landed;
    /// its slices go on over the others.
    fn fail(&mut self, index: usize, why: &str) -> Result<(), Error> {
        let line = &mut self.lines[index];
        if let Some(pair) = line.pair.take() {
            tracing::warn!(rail = pair.rail().name(), "line {index} failed: {why}");
            self.stuck |= !pair.destroy();
            self.shared.counters.lines_failed.fetch_add(1, Ordering::Relaxed);
            self.control.say(&Message::Retire { line: index as u8 });
        }
        line.health = Health::Resting(Instant::now() + (REST * (1 << line.failures.min(10))).min(REST_LIMIT));
        line.failures += 1;
        line.bytes = 0;
        self.shared.counters.slices_resent.fetch_add(line.posted.len() as u64, Ordering::Relaxed);
        while let Some((_, slice)) = line.posted.pop_back() {
            self.ready.push_front(slice);
        }
        if self.stuck {
            return Err(Error::retry("a queue pair cannot be destroyed"));
        }
        if self.lines.iter().all(|line| matches!(line.health, Health::Resting(_))) {
            return Err(Error::retry(format!("no line to the peer is left: {why}")));
        }
        Ok(())
    }

    /// Lines that have rested enough get a new queue pair, if their link is up.
    fn renew(&mut self) -> Result<(), Error> {
        for (index, line) in self.lines.iter_mut().enumerate() {
            let Health::Resting(until) = line.health else { continue };
            if Instant::now() < until {
                continue;
            }
            let rail = &self.cards.rails[line.rail];
            let pair = match rail.address() {
                Some(_) => Pair::new(rail, Side::Initiator, random()?).ok(),
                None => None,
            };
            match pair {
                Some(pair) => {
                    self.control.say(&Message::Renew { line: index as u8, queue: pair.address() });
                    (line.pair, line.health) = (Some(pair), Health::Renewing);
                }
                None => line.health = Health::Resting(Instant::now() + REST),
            }
        }
        Ok(())
    }

    fn renewed(&mut self, index: usize, queue: QueueAddress) -> Result<(), Error> {
        let line = self.lines.get_mut(index).filter(|line| line.health == Health::Renewing);
        let line = line.ok_or_else(|| broken("renews a line that was not asked for"))?;
        let Some(pair) = &mut line.pair else { return Ok(()) };
        match pair.join(&self.ports[line.port], queue) {
            Ok(()) => line.health = Health::Proving,
            Err(error) => self.fail(index, &error.to_string())?,
        }
        Ok(())
    }

    /// Copies whose slices have all landed: writes are for the other side to verify, reads are verified here.
    fn land(&mut self) -> Result<(), Error> {
        let (mut landed, mut released, mut count) = (Vec::new(), Vec::new(), 0);
        for number in std::mem::take(&mut self.landed) {
            let Some(flight) = self.flights.get_mut(&number) else { continue };
            flight.runs.clear();
            match std::mem::replace(&mut flight.hold, Hold::Given) {
                Hold::Reading(_) => {
                    let sums = std::mem::take(&mut flight.sums);
                    if count > 0 && count + sums.len() > SUMS_PER_MESSAGE {
                        self.control.say(&Message::Landed { copies: std::mem::take(&mut landed) });
                        count = 0;
                    }
                    count += sums.len();
                    landed.push((number, sums));
                }
                Hold::Writing(mut hold) => {
                    let Copy { grain, .. } = flight.copy;
                    let intact =
                        pieces(hold.bytes_mut(), grain).zip(&flight.sums).all(|(piece, sum)| checksum(piece) == *sum);
                    if intact {
                        hold.finish(grain, &flight.sums);
                    }
                    released.push(number);
                    self.finish(number, control::applied(intact))?;
                }
                Hold::Given => {}
            }
        }
        if !landed.is_empty() {
            self.control.say(&Message::Landed { copies: landed });
        }
        if !released.is_empty() {
            self.control.say(&Message::Released { numbers: released });
        }
        Ok(())
    }

    fn finish(&mut self, number: u64, outcome: Outcome) -> Result<(), Error> {
        let flight = self.flights.remove(&number).ok_or_else(|| broken("ends what was not asked for"))?;
        self.bytes -= u64::from(flight.copy.bytes);
        self.completions.push(Completion { id: flight.copy.id, outcome });
        Ok(())
    }
}

impl Drop for Path<'_> {
    /// Queue pairs first, then memory, then the word that it is quiet.
    fn drop(&mut self) {
        for line in &mut self.lines {
            if let Some(pair) = line.pair.take() {
                self.stuck |= !pair.destroy();
            }
            if self.stuck {
                line.posted.drain(..).for_each(std::mem::forget);
            }
        }
        self.ready.clear();
        self.lines.clear();
        if self.flights.values().any(|flight| flight.copy.op == Op::Write) {
            self.trail.lost(self.number);
        }
        let mut lost = std::mem::take(&mut self.completions);
        for (_, flight) in self.flights.drain() {
            lost.push(Completion { id: flight.copy.id, outcome: Outcome::Lost });
            if self.stuck {
                std::mem::forget(flight);
            }
        }
        self.end.lock().taken -= lost.len();
        self.shared.complete(lost);
    }
}

//! The end of a path that serves: checks, holds, and verifies what has landed.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, poll};

use crate::error::Error;
use crate::link::{Connection, DIAL_WITHIN, Link};
use crate::mailbox::poll_timeout;
use crate::memory::checksum;
use crate::region::{By, Denied, Reading, Regions, Writing, pieces, sum_count};
use crate::transport::fence::{Fencing, Guest};
use crate::transport::{Op, Outcome};
use crate::types::NodeAddress;

use super::control::{self, Answer, Control, Message, PortAddress, QueueAddress, SUMS_PER_MESSAGE, Wanted};
use super::device::{Pair, Side};
use super::pinned::Run;
use super::sieve::Sieve;
use super::{Cards, Shared, WINDOW, broken, random};

/// An initiator that has grants and says nothing for so long is stuck, though its session lives: a rail that fails takes
/// it 2 s, and it gives its copies up after 3.
const GRANTS_WITHIN: Duration = Duration::from_secs(10);
/// Most checksums of one copy: 256 KiB in grains of one byte.
const SUMS_LIMIT: usize = 256 << 10;
/// Most queue pairs of one path.
const LINE_LIMIT: usize = 256;

/// The incoming paths that stand.
#[derive(Default)]
pub struct Table(Mutex<Standing>);

#[derive(Default)]
struct Standing {
    next: u64,
    sieve: Sieve<u64>,
    entries: HashMap<u64, (Link, Arc<AtomicBool>)>,
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, Standing> {
        // No code that could panic runs under the lock, so a poisoned state is still whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a path; an idle one makes room for it if as many stand as may.
    fn enter(&self, limit: usize, link: &Link, busy: &Arc<AtomicBool>) -> Result<u64, Error> {
        let mut standing = self.lock();
        let Standing { next, sieve, entries } = &mut *standing;
        if sieve.len() >= limit.max(1) {
            let idle = |number: &u64| entries.get(number).is_none_or(|(_, busy)| !busy.load(Ordering::Relaxed));
            let number = sieve
                .evict(idle)
                .ok_or_else(|| Error::retry(format!("{limit} rdma paths stand here already, all of them busy")))?;
            if let Some((link, _)) = entries.remove(&number) {
                link.close("put away for a busier one");
            }
        }
        *next += 1;
        sieve.insert(*next);
        entries.insert(*next, (link.clone(), busy.clone()));
        Ok(*next)
    }

    fn leave(&self, number: u64) {
        let mut standing = self.lock();
        standing.sieve.remove(&number);
        standing.entries.remove(&number);
    }
}

/// Takes a path out of the table, however its thread ends.
struct Leave<'a>(&'a Table, u64);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0.leave(self.1);
    }
}

/// Serves an incoming path until it ends or `link` is closed. Runs on the acceptor's thread; the dialler has proven the
/// session key for `Purpose::Rdma` and was not welcomed yet.
///
/// # Errors
/// Why there was no path, or why it ended; a path that the other side has closed is no error.
pub fn serve(
    shared: &Shared,
    mut connection: Connection,
    peer: &NodeAddress,
    path: u64,
    link: &Link,
) -> Result<(), Error> {
    let busy = Arc::new(AtomicBool::new(false));
    let prepared = shared.regions().and_then(|regions| {
        let cards = shared.cards()?;
        let ports = cards.ports()?;
        let number = shared.serving.enter(shared.settings.paths, link, &busy)?;
        let entry = Leave(&shared.serving, number);
        let (guest, link) = (shared.fences.enter(peer, path)?, link.clone());
        guest.place().stands(move |reason| link.close(reason))?;
        Ok((regions, cards, ports, entry, guest))
    });
    let (regions, cards, ports, entry, guest) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            connection.refuse(&error.message);
            return Err(error);
        }
    };
    connection.welcome();
    let mut control = Control::accepted(connection, shared.settings.slowness)?;
    let serving = Serving::open(shared, regions, cards, &ports, &mut control, guest, link);
    let mut serving = match serving {
        Ok(serving) => serving,
        Err(error) => {
            control.refuse(&error.message);
            return Err(error);
        }
    };
    shared.counters.paths_opened.fetch_add(1, Ordering::Relaxed);
    let result = serving.drive(&mut control, peer, link, &busy, entry.1);
    if let Err(error) = &result {
        tracing::info!(peer = %peer.node, "an incoming rdma path ended: {error}");
        control.refuse(&error.message);
    }
    result
}

enum Hold {
    Reading(#[expect(dead_code, reason = "held for its memory only")] Reading),
    Writing(Writing),
}

/// A copy that the initiator may make.
struct Granted {
    /// Before the hold, so that keys go before the memory does.
    _runs: Vec<Run>,
    hold: Hold,
    grain: u32,
    bytes: u32,
}

struct Line {
    pair: Option<Pair>,
    rail: usize,
    /// The other side's port.
    port: PortAddress,
}

struct Serving<'a> {
    shared: &'a Shared,
    regions: &'a Regions,
    cards: Arc<Cards>,
    /// Rails of this path's ports, in the order of the offer.
    rails: Vec<usize>,
    lines: Vec<Line>,
    grants: HashMap<u64, Granted>,
    fencing: Option<Fencing>,
    /// A queue pair could not be destroyed: what it may touch is never given back.
    stuck: bool,
    /// Goes last.
    guest: Option<Guest>,
}

impl<'a> Serving<'a> {
    fn open(
        shared: &'a Shared,
        regions: &'a Regions,
        cards: Arc<Cards>,
        ours: &[(usize, PortAddress)],
        control: &mut Control,
        guest: Guest,
        link: &Link,
    ) -> Result<Self, Error> {
        let until = Instant::now() + shared.settings.within(DIAL_WITHIN);
        let Message::Open { ports: theirs, queues_per_port } = control.expect(link, until)? else {
            return Err(broken("speaks out of turn"));
        };
        let per_port = usize::from(queues_per_port.clamp(1, shared.settings.queues_per_port.max(1)));
        let count = ours.len().max(theirs.len()) * per_port;
        if theirs.is_empty() || theirs.len() > control::PORT_LIMIT || count > LINE_LIMIT {
            return Err(broken("has an impossible number of ports"));
        }
        let mut lines = Vec::with_capacity(count);
        for index in 0..count {
            let (there, here) = control::joins(index, theirs.len(), ours.len());
            let rail = ours[here].0;
            let pair = Pair::new(&cards.rails[rail], Side::Target, random()?)?;
            lines.push(Line { pair: Some(pair), rail, port: theirs[there] });
        }
        let queues = lines.iter().flat_map(|line| &line.pair).map(Pair::address).collect();
        control.say(&Message::Offer { ports: ours.iter().map(|(_, address)| *address).collect(), queues });
        let Message::Join { queues } = control.expect(link, until)? else {
            return Err(broken("speaks out of turn"));
        };
        if queues.len() != lines.len() {
            return Err(broken("joins another number of queue pairs"));
        }
        for (line, queue) in lines.iter_mut().zip(queues) {
            if let Some(pair) = &mut line.pair {
                pair.join(&line.port, queue)?;
            }
        }
        control.say(&Message::Joined);
        let rails = ours.iter().map(|(rail, _)| *rail).collect();
        Ok(Self {
            shared,
            regions,
            cards,
            rails,
            lines,
            grants: HashMap::new(),
            fencing: None,
            stuck: false,
            guest: Some(guest),
        })
    }

    fn drive(
        &mut self,
        control: &mut Control,
        peer: &NodeAddress,
        link: &Link,
        busy: &AtomicBool,
        number: u64,
    ) -> Result<(), Error> {
        let mut heard = Instant::now();
        let within = self.shared.settings.within(GRANTS_WITHIN);
        loop {
            link.wake().clear();
            if link.is_closed() {
                return Err(Error::retry("this side ends the path"));
            }
            let mut messages = Vec::new();
            let ended = control.exchange(&mut messages);
            if !messages.is_empty() || self.grants.is_empty() {
                heard = Instant::now();
            }
            if !messages.is_empty() {
                self.shared.serving.lock().sieve.touch(&number);
            }
            for message in messages {
                match message {
                    Message::Fence { paths } if self.fencing.is_none() => {
                        let wake = link.clone();
                        self.fencing = Some(self.shared.fences.fence(peer, &paths, move || wake.wake().set()));
                    }
                    message => self.hear(message, control)?,
                }
            }
            if self.fencing.take_if(|fencing| fencing.is_over()).is_some() {
                control.say(&Message::Fenced);
            }
            // What came before the end counts; an end with nothing under way is how paths are closed.
            match ended {
                Err(_) if self.grants.is_empty() => return Ok(()),
                other => other?,
            }
            control.flush()?;
            busy.store(!self.grants.is_empty(), Ordering::Relaxed);
            let silent = heard.elapsed();
            if !self.grants.is_empty() && silent >= within {
                return Err(broken("has grants and says nothing"));
            }
            let mut wait =
                [PollFd::new(control.as_fd(), control.wants()), PollFd::new(link.wake().as_fd(), PollFlags::POLLIN)];
            let left = control.tick_within().min(within.saturating_sub(silent));
            // An error is an interrupted call: the loop looks again.
            let _ = poll(&mut wait, poll_timeout(Some(left)));
        }
    }

    fn hear(&mut self, message: Message, control: &mut Control) -> Result<(), Error> {
        match message {
            Message::Want { copies } => {
                let (mut answers, mut count) = (Vec::with_capacity(copies.len()), 0);
                for wanted in copies {
                    let answer = self.grant(&wanted)?;
                    match &answer {
                        Answer::Fenced => self.shared.served.ended(Outcome::Fenced, 1),
                        Answer::Denied => self.shared.served.ended(Outcome::Denied, 1),
                        Answer::Granted { .. } => {}
                    }
                    let sums = if let Answer::Granted { sums, .. } = &answer { sums.len() } else { 0 };
                    if count > 0 && count + sums > SUMS_PER_MESSAGE {
                        control.say(&Message::Grant { answers: std::mem::take(&mut answers) });
                        count = 0;
                    }
                    count += sums;
                    answers.push((wanted.number, answer));
                }
                control.say(&Message::Grant { answers });
            }
            Message::Landed { copies } => {
                let mut outcomes = Vec::with_capacity(copies.len());
                for (number, sums) in copies {
                    match self.grants.remove(&number) {
                        Some(granted) if matches!(granted.hold, Hold::Writing(_)) => {
                            let (bytes, intact) = (granted.bytes, apply(granted, &sums));
                            if intact {
                                self.shared.served.moved(Op::Write, bytes.into());
                            }
                            self.shared.served.ended(if intact { Outcome::Done } else { Outcome::Corrupt }, 1);
                            outcomes.push((number, intact));
                        }
                        _ => return Err(broken("speaks of a write that was not granted")),
                    }
                }
                control.say(&Message::Applied { outcomes });
            }
            Message::Released { numbers } => {
                for number in numbers {
                    match self.grants.remove(&number) {
                        Some(granted) if matches!(granted.hold, Hold::Reading(_)) => {
                            self.shared.served.moved(Op::Read, granted.bytes.into());
                            self.shared.served.ended(Outcome::Done, 1);
                        }
                        _ => return Err(broken("speaks of a read that was not granted")),
                    }
                }
            }
            Message::Retire { line } => self.retire(usize::from(line))?,
            Message::Renew { line, queue } => {
                self.retire(usize::from(line))?;
                match self.renew(usize::from(line), queue) {
                    Ok(queue) => control.say(&Message::Renewed { line, queue }),
                    Err(error) => {
                        tracing::info!("line {line} is not renewed: {error}");
                        control.say(&Message::Retire { line });
                    }
                }
            }
            _ => return Err(broken("speaks out of turn")),
        }
        Ok(())
    }

    fn grant(&mut self, wanted: &Wanted) -> Result<Answer, Error> {
        // It may still count as under way what it has not heard the end of.
        if self.grants.len() >= 2 * WINDOW || self.grants.contains_key(&wanted.number) {
            return Err(broken("wants too much at once"));
        }
        let Wanted { remote: at, bytes, grain, .. } = *wanted;
        if sum_count(u64::from(bytes), grain) > SUMS_LIMIT {
            return Ok(Answer::Denied);
        }
        let refused = |denied: Denied| match denied {
            Denied::Fenced => Answer::Fenced,
            Denied::Bounds | Denied::Permission => Answer::Denied,
        };
        let mut sums = Vec::new();
        let (hold, pointer) = match wanted.op() {
            Op::Write => match self.regions.begin_write(at, u64::from(bytes), By::Peer) {
                Ok(mut hold) => {
                    let pointer = NonNull::from(hold.bytes_mut()).cast();
                    (Hold::Writing(hold), pointer)
                }
                Err(denied) => return Ok(refused(denied)),
            },
            Op::Read => match self.regions.begin_read(at, u64::from(bytes), By::Peer) {
                Ok(hold) => {
                    hold.checksums(grain, &mut sums);
                    let pointer = NonNull::from(hold.bytes()).cast();
                    (Hold::Reading(hold), pointer)
                }
                Err(denied) => return Ok(refused(denied)),
            },
        };
        // Not there: removed between the hold and here.
        let Some(held) = self.cards.pinned.runs(self.regions, at, pointer, bytes)? else { return Ok(Answer::Fenced) };
        let runs = held
            .iter()
            .map(|run| {
                let keys = self.rails.iter().map(|rail| run.chunk.remote_key(*rail)).collect();
                control::Run { address: run.address, bytes: run.bytes, keys }
            })
            .collect();
        self.grants.insert(wanted.number, Granted { _runs: held, hold, grain, bytes });
        Ok(Answer::Granted { runs, sums })
    }

    /// Destroys a line's queue pair: no packet of it gets in any more.
    fn retire(&mut self, index: usize) -> Result<(), Error> {
        let line = self.lines.get_mut(index).ok_or_else(|| broken("speaks of a line that there is not"))?;
        if let Some(pair) = line.pair.take()
            && !pair.destroy()
        {
            self.stuck = true;
            return Err(Error::retry("a queue pair cannot be destroyed"));
        }
        Ok(())
    }

    fn renew(&mut self, index: usize, queue: QueueAddress) -> Result<QueueAddress, Error> {
        let line = &mut self.lines[index];
        let mut pair = Pair::new(&self.cards.rails[line.rail], Side::Target, random()?)?;
        pair.join(&line.port, queue)?;
        let address = pair.address();
        line.pair = Some(pair);
        Ok(address)
    }
}

/// Verifies what has landed, and lets go.
fn apply(granted: Granted, sums: &[u32]) -> bool {
    let Granted { hold, grain, bytes, .. } = granted;
    let Hold::Writing(mut hold) = hold else { return false };
    let intact = sums.len() == sum_count(u64::from(bytes), grain)
        && pieces(hold.bytes_mut(), grain).zip(sums).all(|(piece, sum)| checksum(piece) == *sum);
    if intact {
        hold.finish(grain, sums);
    }
    intact
}

impl Drop for Serving<'_> {
    /// Queue pairs first, then memory: what the initiator was allowed to touch is in quarantine until here.
    fn drop(&mut self) {
        for line in &mut self.lines {
            if let Some(pair) = line.pair.take() {
                self.stuck |= !pair.destroy();
            }
        }
        if self.stuck {
            self.grants.drain().for_each(std::mem::forget);
            if let Some(guest) = self.guest.take() {
                guest.never_over();
            }
        }
    }
}

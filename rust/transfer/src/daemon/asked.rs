//! Who runs the daemon asks: over its unix socket ([`crate::admin`]), by a signal, or over HTTP (`health`).
//!
//! Questions run on the actor's thread, between two inputs; all that takes longer, checksums first of all, is done on the
//! asker's own thread.

use std::os::fd::AsFd;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, poll};

use super::{Actor, Happening, Question, Shared};
use crate::admin::{AdminReply, AdminRequest, ConductorStatus, Cursor, KEYS_LIMIT, Moving, Status, Verified};
use crate::engine::{Engine, Output};
use crate::error::Error;
use crate::link::{Connection, Link, now};
use crate::mailbox::{Wake, poll_timeout};
use crate::memory::checksum;
use crate::session::Ended;
use crate::types::{Medium, Nanos};
use crate::wire;

/// How long an answer of the engine is waited for. It looks at thousands of happenings a second; behind a full queue of
/// them the answer comes within one.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Longest wait for quiet on behalf of one request: an asker that is gone keeps its thread so long.
const DRAIN_WAIT: Duration = Duration::from_secs(10);
/// Bytes that one request verifies: about a tenth of a second. Then the asker is told how far it has come.
const VERIFY_BYTES: u64 = 1 << 30;
/// Bytes a second that a scrub of the SSDs reads at most: a terabyte in four hours, and a tenth of a slow disk.
const SCRUB_RATE: u64 = 64 << 20;
/// How long a step of it may take, on a disk that is busy with everything else.
const SCRUB_PATIENCE: Duration = Duration::from_secs(20);
/// Who wait for quiet at once; more are refused.
const WAITERS_LIMIT: usize = 64;

impl Shared {
    /// Runs `question` on the actor's thread and returns its answer.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        within: Duration,
        question: impl FnOnce(&mut Actor) -> T + Send + 'static,
    ) -> Result<T, Error> {
        let stopped = || Error::retry("the daemon has stopped");
        let until = Instant::now() + within;
        let (answer, waiting) = sync_channel(1);
        let mut happening = Happening::Ask(Question(Box::new(move |actor| {
            // The asker may have given up waiting.
            let _ = answer.try_send(question(actor));
        })));
        let late = || Error::retry(format!("the engine does not answer within {:.1} s", within.as_secs_f64()));
        // Not `send`: it would wait for ever if the engine hangs, which is what some ask to find out.
        while let Err(error) = self.happenings.try_send(happening) {
            match error {
                TrySendError::Disconnected(_) => return Err(stopped()),
                TrySendError::Full(_) if Instant::now() >= until => return Err(late()),
                TrySendError::Full(back) => {
                    happening = back;
                    // No event tells that a bounded channel has room.
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
        waiting.recv_timeout(until.saturating_duration_since(Instant::now())).map_err(|error| match error {
            RecvTimeoutError::Timeout => late(),
            RecvTimeoutError::Disconnected => stopped(),
        })
    }

    /// Takes on nothing new, or again. What is returned becomes readable when nothing is held, and nothing is left that
    /// other nodes should have.
    pub(super) fn drain(&self, on: bool) -> Result<Arc<Wake>, Error> {
        let quiet = Arc::new(Wake::new()?);
        let waiter = Arc::downgrade(&quiet);
        let known = self.ask(PATIENCE, move |actor| actor.drain(on, waiter))?;
        if known { Ok(quiet) } else { Err(Error::retry(format!("{WAITERS_LIMIT} wait for this daemon already"))) }
    }

    pub(super) fn status(&self, within: Duration) -> Result<Status, Error> {
        let mut status = self.ask(within, Actor::status)?;
        status.uptime_ms = (now() - self.began) / 1_000_000;
        status.listening = self.listening.load(std::sync::atomic::Ordering::Relaxed);
        status.http.clone_from(&self.http);
        Ok(status)
    }
}

impl Actor {
    /// Lets the engine do something, and carries out what follows.
    fn with_engine<T>(&mut self, work: impl FnOnce(&mut Engine, Nanos, &mut Vec<Output>) -> T) -> T {
        let mut outputs = Vec::new();
        let value = work(&mut self.engine, now(), &mut outputs);
        // A grant that waited may have got memory of another arena.
        self.carrier.know_arenas(&mut self.engine);
        outputs.into_iter().for_each(|output| self.carry_out(output));
        value
    }

    fn status(&mut self) -> Status {
        let mut status = self.engine.status();
        let connected = self.conductor.is_some();
        status.conductor = self.shared.conductor.clone().map(|address| ConductorStatus { address, connected });
        status
    }

    /// False: too many wait.
    fn drain(&mut self, on: bool, waiter: Weak<Wake>) -> bool {
        if on != self.engine.is_draining() {
            tracing::info!("{}", if on { "draining: nothing new is taken on" } else { "draining no more" });
        }
        self.engine.drain(on);
        self.awaiting_quiet.retain(|waiter| waiter.strong_count() > 0);
        let room = self.awaiting_quiet.len() < WAITERS_LIMIT;
        if room {
            self.awaiting_quiet.push(waiter);
        }
        room
    }

    /// Tells the waiter when the SSDs have made durable what was done to them; at once if there are none.
    fn flush(&mut self, waiter: SyncSender<bool>) {
        // Not `with_engine`: the waiter is put down before the outputs are carried out.
        let mut outputs = Vec::new();
        match self.engine.flush_tier(now(), &mut outputs) {
            // There is room for one.
            None => drop(waiter.try_send(true)),
            Some(number) => drop(self.awaiting_flush.insert(number, waiter)),
        }
        outputs.into_iter().for_each(|output| self.carry_out(output));
    }

    /// How far the blocks of a drain are elsewhere.
    fn moving(&self) -> Moving {
        let moving = self.engine.moving();
        Moving { over: moving.over || self.conductor.is_none(), ..moving }
    }

    /// Begins a step of a scrub, of whose end the waiter is told; where the step behind it begins.
    fn scrub(&mut self, from: Cursor, waiter: SyncSender<Verified>) -> Option<Cursor> {
        // Not `with_engine`: the waiter is put down before the outputs are carried out.
        let mut outputs = Vec::new();
        let (number, next) = self.engine.scrub(from, now(), &mut outputs);
        self.awaiting_scrub.insert(number, waiter);
        outputs.into_iter().for_each(|output| self.carry_out(output));
        next
    }

    /// After whatever has happened.
    pub(super) fn tell_quiet(&mut self) {
        if !self.awaiting_quiet.is_empty() && self.moving().over && self.engine.is_quiet() {
            self.awaiting_quiet.drain(..).filter_map(|waiter| waiter.upgrade()).for_each(|waiter| waiter.set());
        }
    }
}

/// Serves a session of whoever runs the daemon.
pub(super) fn serve(shared: &Arc<Shared>, mut connection: Connection, link: &Link) {
    connection.welcome();
    connection.unwatch();
    let ended = connection.drive(|payload, _| {
        let request = wire::decode(&payload)?;
        let reply = answer(shared, link, request).unwrap_or_else(|error| AdminReply::Refused(error.message));
        link.send(wire::encode(&reply)).map_err(|_| Ended::Closed("the asker does not read".into()))
    });
    tracing::debug!("an admin's session: {ended}");
}

fn answer(shared: &Shared, link: &Link, request: AdminRequest) -> Result<AdminReply, Error> {
    Ok(match request {
        AdminRequest::Status => AdminReply::Status(Box::new(shared.status(PATIENCE)?)),
        AdminRequest::Counters => AdminReply::Counters(shared.ask(PATIENCE, |actor| actor.engine.counters())?),
        AdminRequest::Keys { from, prefix, medium } => {
            let (blocks, next) = shared.ask(PATIENCE, move |actor| actor.engine.keys(from, &prefix, medium))?;
            AdminReply::Keys { blocks, next }
        }
        AdminRequest::Verify { from, medium } => {
            match shared.ask(PATIENCE, move |actor| actor.engine.verifies_tier(from, medium))? {
                Some(from) => scrub(shared, link, from)?,
                None if medium == Some(Medium::Ssd) => return Err(Error::give_up("this daemon has no SSD")),
                None => verify(shared, from, medium)?,
            }
        }
        AdminRequest::Evict { keys } if keys.len() > KEYS_LIMIT => {
            return Err(Error::bug(format!("{} keys in one request, at most {KEYS_LIMIT} are possible", keys.len())));
        }
        AdminRequest::Evict { keys } => {
            let evict = move |actor: &mut Actor| actor.with_engine(|engine, now, out| engine.evict(&keys, now, out));
            let evicted = shared.ask(PATIENCE, evict)?;
            dropped_for_good(shared)?;
            AdminReply::Evicted { evicted, next: None }
        }
        AdminRequest::EvictAll { from, whose } => {
            let evict = move |actor: &mut Actor| {
                actor.with_engine(|engine, now, out| engine.evict_stretch(from, whose, now, out))
            };
            let (evicted, next) = shared.ask(PATIENCE, evict)?;
            // Once for the whole walk.
            if next.is_none() {
                dropped_for_good(shared)?;
            }
            AdminReply::Evicted { evicted, next }
        }
        AdminRequest::Keep { keys, .. } | AdminRequest::Unkeep { keys, .. } if keys.len() > KEYS_LIMIT => {
            return Err(Error::bug(format!("{} keys in one request, at most {KEYS_LIMIT} are possible", keys.len())));
        }
        AdminRequest::Keep { keys, ttl_ms, by } => {
            let keep = move |actor: &mut Actor| {
                actor.with_engine(|engine, now, out| engine.keep(&keys, ttl_ms, &by, now, out))
            };
            AdminReply::Kept { outcomes: shared.ask(PATIENCE, keep)? }
        }
        AdminRequest::Unkeep { keys, by } => {
            let unkeep = move |actor: &mut Actor| {
                actor.with_engine(|engine, now, out| engine.unkeep(&keys, by.as_deref(), now, out))
            };
            AdminReply::Kept { outcomes: shared.ask(PATIENCE, unkeep)? }
        }
        AdminRequest::Pins => AdminReply::Pins(shared.ask(PATIENCE, |actor| actor.engine.pins())?),
        AdminRequest::Accounts => AdminReply::Accounts(shared.ask(PATIENCE, |actor| actor.engine.accounts())?),
        AdminRequest::Drain { on, within_ms } => {
            let quiet = shared.drain(on)?;
            if on {
                await_quiet(&quiet, link, Duration::from_millis(within_ms).min(DRAIN_WAIT));
            }
            let state = |actor: &mut Actor| (actor.engine.is_draining(), actor.engine.held(), actor.moving());
            let (draining, held, moving) = shared.ask(PATIENCE, state)?;
            AdminReply::Drain { draining, held, moving }
        }
    })
}

/// What was dropped from the SSDs must not come back with the next start, even after a crash.
fn dropped_for_good(shared: &Shared) -> Result<(), Error> {
    let (answer, waiting) = sync_channel(1);
    shared.ask(PATIENCE, move |actor| actor.flush(answer))?;
    match waiting.recv_timeout(PATIENCE) {
        Ok(true) => Ok(()),
        Ok(false) | Err(RecvTimeoutError::Timeout) => Err(Error::retry(
            "what was to be dropped is dropped, but the SSDs could not make that durable: after a crash some of it may \
             be back. Look at their health with `transferd status`, then ask again",
        )),
        Err(RecvTimeoutError::Disconnected) => Err(Error::retry("the daemon has stopped")),
    }
}

/// Until nothing is held, the time is over, or the session is to end.
fn await_quiet(quiet: &Wake, link: &Link, within: Duration) {
    let until = Instant::now() + within;
    while !link.is_closed() {
        let left = until.saturating_duration_since(Instant::now());
        let mut wait =
            [PollFd::new(quiet.as_fd(), PollFlags::POLLIN), PollFd::new(link.wake().as_fd(), PollFlags::POLLIN)];
        // An error here is an interrupted call: look again.
        let _ = poll(&mut wait, poll_timeout(Some(left)));
        if left.is_zero() || wait[0].any() == Some(true) {
            return;
        }
        // The session's own thread, which is this one, looks at the queue before it waits again.
        link.wake().clear();
    }
}

/// Reads blocks one by one, each held for just so long, and computes their checksums.
fn verify(shared: &Shared, from: Cursor, medium: Option<Medium>) -> Result<AdminReply, Error> {
    let (stretch, mut next) = shared.ask(PATIENCE, move |actor| actor.engine.stretch(from, medium))?;
    let (mut found, medium) = (Verified::default(), Medium::Dram);
    let Some(stretch) = stretch else { return Ok(AdminReply::Verified { medium, found, next }) };
    let mut rotten = Vec::new();
    for (key, slot, behind) in stretch.blocks {
        // It may have been evicted meanwhile.
        let Some(hold) = stretch.arena.begin_read(slot) else {
            found.gone += 1;
            continue;
        };
        let strips = hold.bytes().chunks_exact(hold.strip_bytes());
        if !strips.zip(hold.checksums()).all(|(strip, sum)| checksum(strip) == sum) {
            rotten.push(slot);
            found.bad.push(key);
        }
        found.blocks += 1;
        found.bytes += hold.bytes().len() as u64;
        if found.bytes >= VERIFY_BYTES {
            next = Some(behind);
            break;
        }
    }
    if !rotten.is_empty() {
        let arena = stretch.arena;
        let drop_them = move |actor: &mut Actor| {
            actor.with_engine(|engine, now, out| engine.found_rotten(&arena, &rotten, now, out))
        };
        let unpublished = shared.ask(PATIENCE, drop_them)?;
        tracing::error!("{unpublished} blocks in the arena do not fit their checksums: they are published no more");
    }
    Ok(AdminReply::Verified { medium, found, next })
}

/// Has the engine verify some blocks on the SSDs, and then leaves them in peace for as long as that took at least: so who wants
/// blocks has most of a busy disk, and nearly all of an idle one. One asker at a time.
fn scrub(shared: &Shared, link: &Link, from: Cursor) -> Result<AdminReply, Error> {
    // Nothing is left half done by who panics in it.
    let _turn = shared.scrubbing.lock().unwrap_or_else(PoisonError::into_inner);
    let begun = Instant::now();
    let (answer, waiting) = sync_channel(1);
    let next = shared.ask(PATIENCE, move |actor| actor.scrub(from, answer))?;
    let found = waiting.recv_timeout(SCRUB_PATIENCE).map_err(|error| match error {
        RecvTimeoutError::Timeout => Error::retry(
            "the SSDs are too slow to be verified now: look at their health with `transferd status`, and ask again later",
        ),
        RecvTimeoutError::Disconnected => Error::retry("the daemon has stopped"),
    })?;
    if !found.bad.is_empty() {
        tracing::error!("{} blocks on SSD do not fit their checksums: they are dropped", found.bad.len());
    }
    let spent = begun.elapsed();
    let at_least = Duration::from_micros(found.bytes * 1_000_000 / SCRUB_RATE);
    let until = begun + at_least.max(2 * spent);
    while !link.is_closed() && pause(link, until) {}
    Ok(AdminReply::Verified { medium: Medium::Ssd, found, next })
}

/// Sleeps until then, or until the session is to end. False when it is time.
fn pause(link: &Link, until: Instant) -> bool {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return false;
    }
    let mut wait = [PollFd::new(link.wake().as_fd(), PollFlags::POLLIN)];
    // An error here is an interrupted call: look again.
    let _ = poll(&mut wait, poll_timeout(Some(left)));
    // The session's own thread, which is this one, looks at the queue before it waits again.
    link.wake().clear();
    true
}

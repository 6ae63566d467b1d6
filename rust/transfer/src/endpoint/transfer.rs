//! A transfer as its submitter sees it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::endpoint::Peer;
use crate::error::Error;
use crate::mover::{Ended, Failure, Progress};
use crate::transport::{Hand, Helper};

/// How long a waiter looks before it sleeps: a small copy's round trip fits in, a sleep and a wake-up cost as much again.
const SPIN: Duration = Duration::from_micros(50);
/// And of which transfers.
const SPIN_BYTES: u64 = 256 << 10;
/// Transfers of at most so many bytes, in so few copies, are waited for on the socket that their answer comes by.
const SMALL: (u64, usize) = (64 << 10, 16);
/// How long a waiter takes answers itself before it leaves that to the I/O threads: ten round trips within a data centre.
const HELP: Duration = Duration::from_millis(5);
/// And how long at once: the end may come by another way (a cancel, a notification's answer).
const HELP_SLICE: Duration = Duration::from_millis(1);

/// A transfer that was submitted. Dropping it does not cancel it.
#[derive(Clone)]
pub struct Transfer {
    pub(super) state: Arc<State>,
    pub(super) peer: Peer,
}

impl Transfer {
    /// Its number in this engine, as logs name it.
    pub fn number(&self) -> u64 {
        self.state.number
    }

    /// To which peer.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Waits until it has ended; false if the time was over before (the transfer goes on).
    pub fn wait(&self, timeout: Duration) -> bool {
        let small = is_small(self.state.copies, self.state.bytes) && !self.is_over();
        let hand = if small { helper(&self.peer).and_then(|helper| helper.take_over()) } else { None };
        self.wait_with(hand, timeout)
    }

    /// As `wait`, doing an I/O thread's work meanwhile, so that it need not be woken, and then wake this thread.
    pub(super) fn wait_with(&self, hand: Option<Box<dyn Hand>>, timeout: Duration) -> bool {
        if self.is_over() {
            return true;
        }
        let began = Instant::now();
        if let Some(hand) = hand {
            self.help(hand, began, timeout.min(HELP));
        }
        self.state.wait(timeout.saturating_sub(began.elapsed()))
    }

    fn help(&self, mut hand: Box<dyn Hand>, began: Instant, within: Duration) {
        let mut asked = began;
        while !self.is_over() {
            let slice = within.saturating_sub(asked - began).min(HELP_SLICE);
            if slice.is_zero() {
                return;
            }
            let came = hand.wait(slice);
            if came {
                self.peer.driver().pump();
                if self.is_over() {
                    return;
                }
            }
            let now = Instant::now();
            if !came && now - asked < slice {
                // What is missing does not come this way.
                return;
            }
            asked = now;
        }
    }

    /// How it ended, if it has.
    pub fn outcome(&self) -> Option<Ended> {
        self.state.outcome()
    }

    /// True if it has ended.
    pub fn is_over(&self) -> bool {
        self.state.over.load(Ordering::Acquire)
    }

    /// Asks it to end early. It ends as `Cancelled` once this side's memory is quiet, at most 3 s later; or as `Done`,
    /// if only answers were missing.
    pub fn cancel(&self) {
        self.peer.cancel(self.state.number, Ended::Cancelled);
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        let bytes = self.state.bytes;
        match self.state.outcome() {
            Some(Ended::Done { .. }) => Progress { bytes_done: bytes, bytes },
            _ => self.peer.progress(self.state.number).unwrap_or(Progress { bytes_done: 0, bytes }),
        }
    }

    /// Calls this when it has ended, at once if it has already. It runs on an I/O thread: it must be short, must not
    /// block, and must not drop the last owner of an endpoint.
    pub fn then(&self, call: impl FnOnce() + Send + 'static) {
        let mut slot = self.state.lock();
        if slot.outcome.is_none() {
            slot.then.push(Box::new(call));
            return;
        }
        drop(slot);
        call();
    }

    /// Nothing if it is done; else what is wrong and what to do.
    ///
    /// # Errors
    /// Retry: not ended yet, unreachable, corrupt, its deadline passed. Give up: fenced, cancelled. Bug: denied.
    pub fn result(&self) -> Result<(), Error> {
        let what = || format!("transfer {} with {}", self.state.number, self.peer.node());
        match self.outcome() {
            None => Err(Error::retry(format!("{} has not ended yet", what()))),
            Some(Ended::Done { .. }) => Ok(()),
            Some(Ended::Cancelled) => Err(Error::give_up(format!("{} was cancelled", what()))),
            Some(Ended::DeadlinePassed) => Err(Error::retry(format!("{} was not done before its deadline", what()))),
            Some(Ended::Failed { part, why, message }) => {
                let at = if part < self.state.copies { format!("copy {part}: ") } else { String::new() };
                let (make, advice): (fn(String) -> Error, _) = match why {
                    Failure::Fenced => (Error::give_up, "register it again, or ask its owner for a new handle"),
                    Failure::Denied => (Error::bug, "check offsets and lengths, and what it was registered for"),
                    Failure::Corrupt => {
                        (Error::retry, "the memory at the source may be bad, or it is written meanwhile")
                    }
                    Failure::Unreachable => (Error::retry, "`transports` of the peer says how its paths are"),
                };
                Err(make(format!("{} failed: {at}{message}; {advice}", what())))
            }
        }
    }
}

/// For a thread that is going to wait for small copies to a peer.
pub(super) fn helper(peer: &Peer) -> Option<Box<dyn Helper>> {
    peer.driver().helper(&peer.node())
}

/// True if a thread that waits for such copies should do the work itself.
pub(super) fn is_small(copies: usize, bytes: u64) -> bool {
    bytes <= SMALL.0 && copies <= SMALL.1
}

/// What the transfer's submitter and whoever ends it share.
pub(super) struct State {
    pub number: u64,
    pub copies: usize,
    pub bytes: u64,
    over: AtomicBool,
    slot: Mutex<Slot>,
    ended: Condvar,
}

#[derive(Default)]
struct Slot {
    outcome: Option<Ended>,
    then: Vec<Box<dyn FnOnce() + Send>>,
    sleepers: usize,
}

impl State {
    pub fn new(number: u64, copies: usize, bytes: u64) -> Arc<Self> {
        let (slot, ended) = (Mutex::default(), Condvar::new());
        Arc::new(Self { number, copies, bytes, over: AtomicBool::new(false), slot, ended })
    }

    pub fn outcome(&self) -> Option<Ended> {
        self.lock().outcome.clone()
    }

    /// It has ended. Only the first call counts.
    pub fn end(&self, outcome: Ended) {
        let mut slot = self.lock();
        if slot.outcome.is_some() {
            return;
        }
        slot.outcome = Some(outcome);
        self.over.store(true, Ordering::Release);
        let (then, sleepers) = (std::mem::take(&mut slot.then), slot.sleepers);
        drop(slot);
        if sleepers > 0 {
            self.ended.notify_all();
        }
        for call in then {
            // It is the user's; the hook has printed its panic, which must not end an I/O thread.
            let _ = catch_unwind(AssertUnwindSafe(call));
        }
    }

    fn wait(&self, timeout: Duration) -> bool {
        if self.over.load(Ordering::Acquire) {
            return true;
        }
        let began = Instant::now();
        // What is large takes longer than that, and where cores are few it needs this one.
        while self.bytes <= SPIN_BYTES && began.elapsed() < SPIN.min(timeout) {
            for _ in 0..32 {
                if self.over.load(Ordering::Acquire) {
                    return true;
                }
                std::hint::spin_loop();
            }
            // Where cores are few, the I/O thread that has the answer may need this one.
            std::thread::yield_now();
        }
        let mut slot = self.lock();
        slot.sleepers += 1;
        while slot.outcome.is_none() {
            let left = timeout.saturating_sub(began.elapsed());
            if left.is_zero() {
                break;
            }
            slot = self.ended.wait_timeout(slot, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        slot.sleepers -= 1;
        slot.outcome.is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Slot> {
        // Assignments that cannot be left half done.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! One thread that calls when time has come.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::link::now;
use crate::types::Nanos;

const NEVER: Nanos = Nanos::MAX;
/// Shortest sleep: a deadline that is always due costs a thousandth of a core, not a core.
const SHORTEST: Nanos = 100_000;

/// Sleeps until the earliest time that anybody has asked for.
pub struct Timer {
    /// When the thread wakes next. Lowered without the lock, so that arming a later time costs nothing.
    armed: AtomicU64,
    stopped: Mutex<bool>,
    wake: Condvar,
}

impl Timer {
    /// Not running yet: see [`Timer::run`].
    pub fn new() -> Arc<Self> {
        Arc::new(Self { armed: AtomicU64::new(NEVER), stopped: Mutex::new(false), wake: Condvar::new() })
    }

    /// Makes sure that the thread wakes at this time or before.
    pub fn arm(&self, at: Nanos) {
        if at < self.armed.fetch_min(at, Ordering::SeqCst) {
            // Through the lock, so that it is not told between its last look and its sleep.
            drop(self.stopped.lock().unwrap_or_else(PoisonError::into_inner));
            self.wake.notify_one();
        }
    }

    /// Ends `run`.
    pub fn stop(&self) {
        *self.stopped.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.wake.notify_one();
    }

    /// The thread: calls `work` whenever a time has come, until `stop`. `work` arms the timer again itself.
    pub fn run(&self, mut work: impl FnMut(Nanos)) {
        loop {
            let mut stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
            loop {
                if *stopped {
                    return;
                }
                let (at, time) = (self.armed.load(Ordering::SeqCst), now());
                if at <= time {
                    break;
                }
                let left = Duration::from_nanos((at - time).max(SHORTEST));
                stopped = if at == NEVER {
                    self.wake.wait(stopped).unwrap_or_else(PoisonError::into_inner)
                } else {
                    self.wake.wait_timeout(stopped, left).unwrap_or_else(PoisonError::into_inner).0
                };
            }
            drop(stopped);
            // Before the work: what is armed during it must not be lost.
            self.armed.store(NEVER, Ordering::SeqCst);
            work(now());
        }
    }
}

//! Drives a [`Mover`]: any thread may ask it for something, and whoever brings news moves it on.
//!
//! ```text
//!   callers ----- submit, cancel, connect --\
//!   I/O threads - notify ------------------- +--> Mutex<Mover>, poll --> (after the lock) who waits is told
//!   timer ------- deadlines, back-off ------/
//! ```
//!
//! An I/O thread never waits for the lock: if somebody holds it, it leaves a mark, and the holder looks again before it
//! goes. So a completion is handled on the thread that saw it, without a hop, and no lock order can be wrong.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::time::Instant;

use crate::endpoint::timer::Timer;
use crate::link::now;
use crate::mover::{Ended, Failure, Mover, PathReport, PeerStats, Progress, Request, TransferId, Via};
use crate::region::Regions;
use crate::transport::{Busy, Helper};
use crate::types::{Incarnation, Nanos, NodeAddress, NodeId};

/// Told once when a transfer has ended. Runs on whichever thread saw it, so it must be short and must not block.
pub type Done = Box<dyn FnOnce(Ended) + Send>;

/// Why a transfer was not begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The queues are full: again after one has ended.
    Busy,
    /// The peer is not connected, or another life of it is.
    Stale,
    /// The driver is closed.
    Closed,
}

/// What transports call when there is news; made before the driver, because transports are.
#[derive(Clone, Default)]
pub struct Bell(Arc<OnceLock<Weak<Driver>>>);

impl Bell {
    /// A transport's `notify`.
    pub fn notify(&self) -> Box<dyn Fn() + Send + Sync> {
        let bell = self.0.clone();
        Box::new(move || {
            if let Some(driver) = bell.get().and_then(Weak::upgrade) {
                driver.pump();
            }
        })
    }
}

/// A mover that several threads share.
pub struct Driver {
    state: Mutex<Option<State>>,
    /// News came while somebody held the lock.
    news: AtomicBool,
    timer: Arc<Timer>,
    watch: Watch,
}

struct State {
    mover: Mover,
    waiting: HashMap<TransferId, Done>,
    /// The life of each peer that copies go to, and who connected it.
    lives: HashMap<NodeId, (Incarnation, u64)>,
}

/// Threads that wait for any change. Nothing is counted while nobody does.
#[derive(Default)]
struct Watch {
    watchers: AtomicUsize,
    generation: Mutex<u64>,
    changed: Condvar,
}

impl Driver {
    /// Takes the transports; `timer` must call [`Driver::pump`] when a time has come that it was armed for.
    pub fn new(mut mover: Mover, regions: Arc<Regions>, bell: &Bell, timer: Arc<Timer>) -> Arc<Self> {
        mover.register(regions);
        let state = State { mover, waiting: HashMap::new(), lives: HashMap::new() };
        let driver = Arc::new(Self {
            state: Mutex::new(Some(state)),
            news: AtomicBool::new(true),
            timer,
            watch: Watch::default(),
        });
        // The first call wins, and there is only one.
        let _ = bell.0.set(Arc::downgrade(&driver));
        driver.pump();
        driver
    }

    /// Prepares paths to a peer's life; transfers to another life of it end as fenced. `owner` is whoever connects.
    pub fn connect(&self, peer: &NodeAddress, via: Via, owner: u64) {
        self.with(|state, now| {
            state.lives.insert(peer.node.clone(), (peer.incarnation, owner));
            state.mover.connect(peer, via, now);
        });
    }

    /// Ends the paths to a peer and with them all its transfers, unless another owner has connected it since.
    pub fn disconnect(&self, peer: &NodeId, owner: u64) {
        self.with(|state, now| {
            if state.lives.get(peer).is_some_and(|(_, current)| *current == owner) {
                state.lives.remove(peer);
                state.mover.disconnect(peer, now);
            }
        });
    }

    /// Begins a transfer to this life of a peer.
    pub fn submit(
        &self,
        peer: &NodeId,
        life: Incarnation,
        request: Request,
        done: Done,
    ) -> Result<TransferId, Refused> {
        self.with(|state, now| {
            if state.lives.get(peer).is_none_or(|(current, _)| *current != life) {
                return Err(Refused::Stale);
            }
            let id = state.mover.submit(peer, request, now).map_err(|Busy| Refused::Busy)?;
            state.waiting.insert(id, done);
            Ok(id)
        })
        .unwrap_or(Err(Refused::Closed))
    }

    /// Asks a transfer to end early. It is told as any end is, when this side's memory is quiet.
    pub fn cancel(&self, id: TransferId) {
        self.with(|state, now| state.mover.cancel(id, now));
    }

    /// How far a transfer is; `None` if it has ended.
    pub fn progress(&self, id: TransferId) -> Option<Progress> {
        self.with(|state, _| state.mover.progress(id)).flatten()
    }

    /// For a thread that is going to wait for a few small copies. When it has helped, it calls [`Driver::pump`].
    pub fn helper(&self, peer: &NodeId) -> Option<Box<dyn Helper>> {
        let helper = self.lock().as_ref().and_then(|state| state.mover.helper(peer));
        if self.news.load(Ordering::SeqCst) {
            self.pump();
        }
        helper
    }

    /// How the paths to a peer are.
    pub fn paths(&self, peer: &NodeId) -> Vec<PathReport> {
        self.with(|state, _| state.mover.paths(peer)).unwrap_or_default()
    }

    /// Counters by peer and path.
    pub fn stats(&self) -> Vec<PeerStats> {
        self.with(|state, _| state.mover.stats()).unwrap_or_default()
    }

    /// Panics if the mover's books do not add up: for tests.
    pub fn check(&self) {
        self.with(|state, _| state.mover.check());
    }

    /// Looks at the transports and moves things on, unless somebody is just doing that.
    pub fn pump(&self) {
        self.news.store(true, Ordering::SeqCst);
        // Whoever holds the lock looks at `news` after it has let go.
        while self.news.load(Ordering::SeqCst) {
            let guard = match self.state.try_lock() {
                Ok(guard) => guard,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            self.move_on(guard);
        }
    }

    /// Waits until `met` or until the time is over; looks whenever something has changed. Returns what `met` said last.
    pub fn wait_until(&self, until: Instant, mut met: impl FnMut() -> bool) -> bool {
        let lock = || self.watch.generation.lock().unwrap_or_else(PoisonError::into_inner);
        self.watch.watchers.fetch_add(1, Ordering::SeqCst);
        let result = loop {
            let seen = *lock();
            if met() {
                break true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break false;
            }
            let generation = lock();
            if *generation == seen {
                drop(self.watch.changed.wait_timeout(generation, left).unwrap_or_else(PoisonError::into_inner));
            }
        };
        self.watch.watchers.fetch_sub(1, Ordering::SeqCst);
        result
    }

    /// Ends everything: returns when no transport touches memory any more. Must not be called on an I/O thread.
    pub fn close(&self) {
        let Some(State { mover, waiting, .. }) = self.lock().take() else { return };
        drop(mover);
        for done in waiting.into_values() {
            done(Ended::Failed { part: 0, why: Failure::Unreachable, message: "the engine was closed".into() });
        }
        self.changed();
    }

    fn lock(&self) -> MutexGuard<'_, Option<State>> {
        // A panic under the lock is a bug of the mover; its books may be wrong, but memory stays fenced by holds.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<R>(&self, act: impl FnOnce(&mut State, Nanos) -> R) -> Option<R> {
        let mut guard = self.lock();
        let result = act(guard.as_mut()?, now());
        self.move_on(guard);
        if self.news.load(Ordering::SeqCst) {
            self.pump();
        }
        Some(result)
    }

    /// Polls, lets go of the lock, and tells what has ended.
    fn move_on(&self, mut guard: MutexGuard<'_, Option<State>>) {
        self.news.store(false, Ordering::SeqCst);
        let Some(state) = guard.as_mut() else { return };
        let ended: Vec<(Done, Ended)> = state
            .mover
            .poll(now())
            .into_iter()
            .filter_map(|(id, ended)| state.waiting.remove(&id).map(|done| (done, ended)))
            .collect();
        let next = state.mover.next_tick();
        drop(guard);
        if let Some(at) = next {
            self.timer.arm(at);
        }
        for (done, ended) in ended {
            done(ended);
        }
        self.changed();
    }

    fn changed(&self) {
        if self.watch.watchers.load(Ordering::SeqCst) > 0 {
            *self.watch.generation.lock().unwrap_or_else(PoisonError::into_inner) += 1;
            self.watch.changed.notify_all();
        }
    }
}

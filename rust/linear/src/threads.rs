//! Threads that share out the parts of one product at a time.
//!
//! A product of a decode step takes tens of microseconds, so a helper that has just worked looks out for the next for a
//! while before it sleeps. It gives its core away at every look, and a caller waits only for helpers that have begun: where
//! cores are busy with other things (another library's threads, another process) the caller computes all parts itself
//! and loses nothing.
//!
//! ```text
//! state   closed --caller--> open --helper enters--> open, 1 inside --helper has no part left--> open, 0 inside
//!                             `--caller has no part left--> closed, n inside --last helper leaves--> the caller returns
//! ```
//!
//! Each thread has a run of parts, taken from the front; who has none left takes from the end of another's.

use std::cell::UnsafeCell;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::cores::Cores;

/// How long a helper looks out for work: the other operations of a layer take 50 to 200 us between two products.
const LOOKS_OUT: Duration = Duration::from_micros(200);
/// Looks between two times that the core is offered to others.
const LOOKS: usize = 64;

/// What is to be done with each part.
type Work<'a> = &'a (dyn Fn(usize) + Sync);

/// A caller's thread and its helpers.
#[derive(Debug)]
pub struct Threads {
    shared: Arc<Shared>,
    /// Held by the caller whose parts are shared out.
    caller: Mutex<()>,
    helpers: Vec<JoinHandle<()>>,
}

impl Threads {
    /// Starts `count - 1` helpers. `count` 0: as many threads as the process may have cores.
    pub fn new(count: usize) -> std::io::Result<Self> {
        let count = if count == 0 { thread::available_parallelism().map_or(1, Into::into) } else { count };
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            asleep: AtomicUsize::new(0),
            core: AtomicUsize::new(0),
            work: UnsafeCell::new(&|_| {}),
            runs: (0..count).map(|_| Run::default()).collect(),
            failed: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        });
        let mut threads = Self { shared, caller: Mutex::new(()), helpers: Vec::new() };
        for number in 1..count {
            let shared = threads.shared.clone();
            // If one cannot be started, those before it are ended by `drop`.
            let helper = thread::Builder::new().name(format!("linear-{number}")).spawn(move || shared.help(number))?;
            threads.helpers.push(helper);
        }
        Ok(threads)
    }

    /// The caller and its helpers.
    pub fn count(&self) -> usize {
        self.shared.runs.len()
    }

    /// Does each part below `parts` once, in any order, on any thread, and returns when all are done. Panics if one did.
    ///
    /// While another caller is in here (or from within a part) the calling thread does all by itself.
    pub fn run(&self, parts: usize, work: Work<'_>) {
        let alone = || (0..parts).for_each(work);
        if parts < 2 || self.helpers.is_empty() || parts > u32::MAX as usize {
            return alone();
        }
        let _guard = match self.caller.try_lock() {
            Ok(guard) => guard,
            // A part that panicked in the caller's own hands has left the runs as they may be: all are set anew.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return alone(),
        };
        self.shared.share_out(parts, work, &self.helpers);
        if self.shared.failed.swap(false, Ordering::Relaxed) {
            resume_unwind(Box::new("a part of a product panicked in a helping thread"));
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            // A helper that panicked has said so already.
            let _ = helper.join();
        }
    }
}

/// Parts that nobody has taken: `first << 32 | last`, on a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Run(AtomicU64);

impl Run {
    fn set(&self, first: usize, last: usize) {
        self.0.store(((first as u64) << 32) | last as u64, Ordering::Relaxed);
    }

    fn take(&self, front: bool) -> Option<usize> {
        let taken = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |run| {
            let (first, last) = (run >> 32, run & 0xFFFF_FFFF);
            (first < last).then(|| if front { ((first + 1) << 32) | last } else { (first << 32) | (last - 1) })
        });
        taken.ok().map(|run| if front { run >> 32 } else { (run & 0xFFFF_FFFF) - 1 } as usize)
    }
}

/// Helpers inside: the lower 32 bits. Then one bit for open. Above, the number of the work.
const OPEN: u64 = 1 << 32;
const INSIDE: u64 = OPEN - 1;
const NEXT: u64 = 1 << 33;

struct Shared {
    state: AtomicU64,
    /// Helpers that sleep, or are about to.
    asleep: AtomicUsize,
    /// The caller's core, plus one; 0: not known.
    core: AtomicUsize,
    /// Written by the caller while the state is closed and nobody is inside, read by those inside.
    work: UnsafeCell<Work<'static>>,
    runs: Box<[Run]>,
    failed: AtomicBool,
    ended: AtomicBool,
}

// SAFETY: `work` is used as its comment says; all else is atomic.
unsafe impl Sync for Shared {}
// SAFETY: as above; what `work` refers to is `Sync`.
unsafe impl Send for Shared {}

impl std::fmt::Debug for Shared {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Shared").field("state", &self.state).field("threads", &self.runs.len()).finish()
    }
}

impl Shared {
    /// The caller's side.
    fn share_out(&self, parts: usize, work: Work<'_>, helpers: &[JoinHandle<()>]) {
        for (number, run) in self.runs.iter().enumerate() {
            run.set(parts * number / self.runs.len(), parts * (number + 1) / self.runs.len());
        }
        // SAFETY: nobody is inside, so nobody reads it. It is used only by those inside, who have all left when `Close` has
        // been dropped, before `work` goes out of scope.
        unsafe { *self.work.get() = std::mem::transmute::<Work<'_>, Work<'static>>(work) };
        self.core.store(Cores::current().map_or(0, |core| core + 1), Ordering::Relaxed);
        // Sequentially consistent, as is the helper's order of "asleep" and a last look: one of both sees the other.
        self.state.store((self.state.load(Ordering::Relaxed) + NEXT) | OPEN, Ordering::SeqCst);
        let close = Close(self);
        if self.asleep.load(Ordering::SeqCst) > 0 {
            for helper in helpers {
                helper.thread().unpark();
            }
        }
        self.work_on(0, work);
        drop(close);
    }

    /// Takes parts until there are none.
    fn work_on(&self, number: usize, work: Work<'_>) {
        while let Some(part) = self.runs[number].take(true) {
            work(part);
        }
        for step in 1..self.runs.len() {
            while let Some(part) = self.runs[(number + step) % self.runs.len()].take(false) {
                work(part);
            }
        }
    }

    /// A helper's life.
    fn help(&self, number: usize) {
        let (mut done, cores) = (0, Cores::of_this_thread());
        while let Some(state) = self.await_work(done) {
            done = state & !INSIDE;
            if let Some(core) = Cores::current().filter(|core| core + 1 == self.core.load(Ordering::Relaxed)) {
                cores.leave(core);
            }
            if self.enter(state) {
                let _leave = Leave(self);
                // SAFETY: this thread is inside, so the caller waits for it.
                let work = unsafe { *self.work.get() };
                self.work_on(number, work);
            }
        }
    }

    /// The state with open work that is not `done`; None at the end.
    fn await_work(&self, done: u64) -> Option<u64> {
        let mut since = None;
        loop {
            for _ in 0..LOOKS {
                let state = self.state.load(Ordering::SeqCst);
                if state & OPEN != 0 && state & !INSIDE != done {
                    return Some(state);
                }
                std::hint::spin_loop();
            }
            if self.ended.load(Ordering::SeqCst) {
                return None;
            }
            if since.get_or_insert_with(Instant::now).elapsed() < LOOKS_OUT {
                thread::yield_now();
                continue;
            }
            self.asleep.fetch_add(1, Ordering::SeqCst);
            let state = self.state.load(Ordering::SeqCst);
            if (state & OPEN == 0 || state & !INSIDE == done) && !self.ended.load(Ordering::SeqCst) {
                thread::park();
            }
            self.asleep.fetch_sub(1, Ordering::SeqCst);
            since = None;
        }
    }

    /// Steps inside unless the work is closed by now.
    fn enter(&self, mut state: u64) -> bool {
        let number = state & !INSIDE;
        while state & !INSIDE == number {
            match self.state.compare_exchange_weak(state, state + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }
}

/// Closes the work and waits until nobody is inside, also if the caller's own part panics.
struct Close<'a>(&'a Shared);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_and(!OPEN, Ordering::Relaxed);
        let mut looks = 0;
        // Acquire: what helpers have written is seen by whoever returns from here.
        while self.0.state.load(Ordering::Acquire) & INSIDE != 0 {
            looks += 1;
            if looks % LOOKS == 0 {
                thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }
}

/// Leaves the work, also if a part panics; the thread is then gone, and whoever called hears of it.
struct Leave<'a>(&'a Shared);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.failed.store(true, Ordering::Relaxed);
        }
        self.0.state.fetch_sub(1, Ordering::Release);
    }
}

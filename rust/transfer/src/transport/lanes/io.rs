//! The I/O threads: each waits for the sockets of its lanes and gives every lane that can do something a turn.
//!
//! ```text
//! any thread -- kick --> inbox + eventfd --\
//! sockets -- edge-triggered epoll ----------> I/O thread: turn of lane a, turn of lane b, ... sweep (what stalls, ends)
//! submit, if the lane is free: a turn on the caller's own thread, so that a small copy waits for no other thread
//! help, of a thread that would only wait: it takes the answer itself, and the lane's I/O thread sleeps on
//! ```
//!
//! A lane is locked during its turn, and a turn is short (`TURN_BYTES`); whoever holds the lock of a peer's queue takes no
//! lane's lock. A turn that has more to do is followed by those of the other lanes, so no lane starves another.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::time::TimeSpec;

use crate::error::Error;
use crate::link::Stream;
use crate::mailbox::Wake;

/// Bytes that a lane moves in one turn, each way: half a millisecond, so that a small copy on another lane waits no longer.
pub const TURN_BYTES: usize = 1 << 20;
/// How often a thread with busy lanes looks for what has stalled.
const SWEEP_EVERY: Duration = Duration::from_millis(250);
/// How often one without does, for what has idled too long.
const DOZE: Duration = Duration::from_secs(5);
/// How long a waiting thread looks before it sleeps: to wake a sleeping core takes as long as a small copy.
const SPIN: Duration = Duration::from_micros(30);
/// Events taken at once.
const EVENTS: usize = 64;
/// The token of a thread's eventfd.
const WAKE: u64 = 0;

/// What a turn has come to.
pub enum Turn {
    /// The socket or somebody's kick will say when there is more.
    Wait,
    /// There is more now, but others first.
    Again,
    /// The lane is over: why.
    Over(String),
}

/// What the socket has told since the last turn.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ready {
    /// It has bytes, or an end.
    pub readable: bool,
    /// It takes bytes.
    pub writable: bool,
    /// The other side sends no more.
    pub hangup: bool,
}

/// One connection's side of the protocol.
pub trait Lane: Send {
    /// Does what can be done without waiting.
    fn turn(&mut self, socket: &Stream, ready: Ready, now: Instant) -> Turn;
    /// When the lane counts as stalled if nothing moves; `None` if nothing is due on it.
    fn stalls_at(&self) -> Option<Instant>;
    /// True if the socket was full: the lane goes on when it is not.
    fn is_blocked(&self) -> bool;
    /// True if it has idled so long that it is not worth its connection.
    fn is_tired(&self, now: Instant) -> bool;
    /// It is over: gives back what it holds and tells who waits. Called once.
    fn end(&mut self, reason: &str);
}

/// A lane with its socket, at one of the threads.
pub struct Seat {
    stream: Stream,
    token: u64,
    lane: Mutex<Option<Box<dyn Lane>>>,
    /// Its thread is told when the socket takes bytes again. Changed only with the lane locked.
    watches_out: AtomicBool,
    /// A waiting thread takes what comes; its own thread leaves that alone. Changed only with the lane locked.
    helped: AtomicBool,
    /// Why it gets no turn any more.
    doomed: OnceLock<String>,
    worker: Arc<Worker>,
}

impl Seat {
    /// Its number, unique in the process's engine.
    pub fn token(&self) -> u64 {
        self.token
    }

    /// Asks its thread to give it a turn.
    pub fn kick(&self) {
        self.worker.lock().kicks.push(self.token);
        self.worker.wake();
    }

    /// Gives it a turn on this thread, unless it has one just now. False: it had none.
    pub fn turn_here(&self, now: Instant) -> bool {
        let Ok(mut lane) = self.lane.try_lock() else { return false };
        let Some(open) = lane.as_mut() else { return false };
        let turn = open.turn(&self.stream, Ready::default(), now);
        self.watch(open.as_ref());
        drop(lane);
        self.follow(turn);
        true
    }

    fn follow(&self, turn: Turn) {
        match turn {
            // Its thread must watch it from now on.
            Turn::Wait => self.worker.undoze(),
            Turn::Again => self.kick(),
            Turn::Over(reason) => self.end(&reason),
        }
    }

    /// Lets the caller's thread take what comes here, so that nobody else has to be woken for it. `None`: another thread
    /// does already, or nothing is due though something should be, or the other way round.
    pub fn take_over(self: &Arc<Self>, due: bool) -> Option<Helped> {
        let lane = self.lock();
        let nothing = &mut EpollEvent::new(EpollFlags::EPOLLET, self.token);
        let fit = lane.as_ref().is_some_and(|lane| !lane.is_blocked() && lane.stalls_at().is_some() == due)
            && !self.helped.load(Ordering::Relaxed);
        if !fit || self.worker.epoll.modify(&self.stream, nothing).is_err() {
            return None;
        }
        self.helped.store(true, Ordering::Relaxed);
        Some(Helped(self.clone()))
    }

    /// Sees to it that a full socket tells when it is not. Called with the lane locked.
    fn watch(&self, lane: &dyn Lane) {
        if lane.is_blocked() && !self.watches_out.swap(true, Ordering::Relaxed) {
            // It fails only for a lane that is not in its epoll yet, and that is put in with what it wants then.
            let _ = self.worker.epoll.modify(&self.stream, &mut EpollEvent::new(wants(true), self.token));
        }
    }

    /// True while a thread that waits has taken it over.
    pub fn is_helped(&self) -> bool {
        self.helped.load(Ordering::Relaxed)
    }

    /// True if an answer is due on it, or it has a turn just now.
    pub fn waits(&self) -> bool {
        self.lane.try_lock().map_or(true, |lane| lane.as_ref().is_some_and(|lane| lane.stalls_at().is_some()))
    }

    /// Makes its thread end it, behind the turn that it may have. Waits for nobody, so a lane's turn may end another lane.
    pub fn end_soon(&self, reason: &str) {
        // Who has said so before was right too.
        let _ = self.doomed.set(reason.into());
        self.kick();
    }

    /// Ends it; waits for its turn, if it has one. What it held is given back when this returns.
    pub fn end(&self, reason: &str) {
        let lane = self.lock().take();
        if let Some(mut lane) = lane {
            self.stream.shutdown(std::net::Shutdown::Both);
            lane.end(reason);
            // Its thread forgets it.
            self.kick();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Box<dyn Lane>>> {
        // After a panic within a turn the lane is ended, whatever state it is in; `end` only drains lists.
        self.lane.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A lane whose answers a waiting thread takes.
pub struct Helped(Arc<Seat>);

impl Helped {
    /// Waits for an answer, and takes it. False: none has come, or the lane has ended.
    pub fn wait(&self, within: Duration) -> bool {
        let seat = &self.0;
        let mut wait = [PollFd::new(seat.stream.as_fd(), PollFlags::POLLIN)];
        let mut look = |within| {
            // What TLS has taken already the socket does not tell of. An error is an interrupted call, which is a wait
            // that was too short.
            seat.stream.has_rest() || ppoll(&mut wait, Some(TimeSpec::from_duration(within)), None).unwrap_or(0) > 0
        };
        let began = Instant::now();
        while !look(Duration::ZERO) {
            let waited = began.elapsed();
            if waited < SPIN.min(within) {
                std::hint::spin_loop();
            } else if look(within.saturating_sub(waited)) {
                break;
            } else {
                return false;
            }
        }
        let hangup = wait[0].revents().is_none_or(|events| events.intersects(!PollFlags::POLLIN));
        let mut lane = seat.lock();
        let Some(open) = lane.as_mut() else { return false };
        let turn = open.turn(&seat.stream, Ready { readable: true, writable: false, hangup }, Instant::now());
        seat.watch(open.as_ref());
        drop(lane);
        // Its thread need not watch it as long as this one does.
        if !matches!(turn, Turn::Wait) {
            seat.follow(turn);
        }
        true
    }
}

impl Drop for Helped {
    /// Its thread watches again, and is told of what has come meanwhile.
    fn drop(&mut self) {
        let seat = &self.0;
        let lane = seat.lock();
        seat.helped.store(false, Ordering::Relaxed);
        let Some(open) = lane.as_ref() else { return };
        let (blocked, due) = (open.is_blocked(), open.stalls_at().is_some());
        seat.watches_out.store(blocked, Ordering::Relaxed);
        let restored = seat.worker.epoll.modify(&seat.stream, &mut EpollEvent::new(wants(blocked), seat.token));
        drop(lane);
        match restored {
            Err(errno) => seat.end(&format!("epoll: {errno}")),
            Ok(()) if due => seat.worker.undoze(),
            Ok(()) => {}
        }
    }
}

/// One thread's mail.
struct Worker {
    epoll: Epoll,
    wake: Wake,
    /// The eventfd is set and not yet cleared.
    woken: AtomicBool,
    /// The thread waits long; it must be woken if a lane becomes busy behind its back.
    dozes: AtomicBool,
    inbox: Mutex<Inbox>,
}

#[derive(Default)]
struct Inbox {
    arrivals: Vec<Arc<Seat>>,
    kicks: Vec<u64>,
    stop: bool,
}

impl Worker {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        // Pushes to vectors cannot leave them half done.
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            self.wake.set();
        }
    }

    fn undoze(&self) {
        if self.dozes.swap(false, Ordering::AcqRel) {
            self.wake();
        }
    }
}

/// The threads of one transport.
pub struct Io {
    workers: Vec<Arc<Worker>>,
    handles: Mutex<Vec<JoinHandle<()>>>,
    next: AtomicU64,
}

impl Io {
    /// Starts so many threads. `after` is called by them when turns may have completed something, with no lock held.
    ///
    /// # Errors
    /// Retry: out of threads or descriptors.
    pub fn start(name: &str, threads: usize, after: Arc<dyn Fn() + Send + Sync>) -> Result<Self, Error> {
        let io = Self { workers: Vec::new(), handles: Mutex::default(), next: AtomicU64::new(WAKE) };
        (0..threads.max(1)).try_fold(io, |mut io, index| {
            let no_epoll = |errno| Error::retry(format!("no epoll: {errno}: raise the limit on open files"));
            let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(no_epoll)?;
            let wake = Wake::new()?;
            epoll.add(&wake, EpollEvent::new(EpollFlags::EPOLLIN, WAKE)).map_err(no_epoll)?;
            let worker = Arc::new(Worker {
                epoll,
                wake,
                woken: AtomicBool::new(false),
                dozes: AtomicBool::new(false),
                inbox: Mutex::default(),
            });
            let (mine, after) = (worker.clone(), after.clone());
            let handle = std::thread::Builder::new()
                .name(format!("{name}-io-{index}"))
                .spawn(move || Rounds { worker: mine, seats: HashMap::new(), after }.run())
                .map_err(|error| Error::retry(format!("no thread: {error}")))?;
            io.workers.push(worker);
            io.handles.get_mut().unwrap_or_else(PoisonError::into_inner).push(handle);
            Ok(io)
        })
    }

    /// Takes a connection; its first turn comes soon. `make` gets its token. `None`: stopped; the connection is closed.
    pub fn seat(&self, stream: Stream, make: impl FnOnce(u64) -> Box<dyn Lane>) -> Option<Arc<Seat>> {
        let token = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        let worker = self.worker(token).clone();
        let (watches_out, helped) = (AtomicBool::new(false), AtomicBool::new(false));
        let lane = Mutex::new(Some(make(token)));
        let seat = Arc::new(Seat { stream, token, lane, watches_out, helped, doomed: OnceLock::new(), worker });
        let mut inbox = seat.worker.lock();
        if inbox.stop {
            return None;
        }
        inbox.arrivals.push(seat.clone());
        drop(inbox);
        seat.worker.wake();
        Some(seat)
    }

    /// Asks the thread of a lane to give it a turn.
    pub fn kick(&self, token: u64) {
        let worker = self.worker(token);
        worker.lock().kicks.push(token);
        worker.wake();
    }

    fn worker(&self, token: u64) -> &Arc<Worker> {
        &self.workers[token as usize % self.workers.len()]
    }

    /// Makes a thread call `after` soon.
    pub fn nudge(&self) {
        self.workers[0].wake();
    }

    /// Ends all lanes and waits for the threads. Idempotent; must not be called on one of them.
    pub fn stop(&self) {
        for worker in &self.workers {
            worker.lock().stop = true;
            worker.wake();
        }
        let handles = std::mem::take(&mut *self.handles.lock().unwrap_or_else(PoisonError::into_inner));
        for handle in handles {
            // A thread's panic has been printed by the hook; the others must still be waited for.
            let _ = handle.join();
        }
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A thread's own state.
struct Rounds {
    worker: Arc<Worker>,
    seats: HashMap<u64, Arc<Seat>>,
    after: Arc<dyn Fn() + Send + Sync>,
}

impl Rounds {
    fn run(mut self) {
        let mut events = [EpollEvent::empty(); EVENTS];
        let mut again: Vec<u64> = Vec::new();
        let mut swept = Instant::now();
        let mut busy = false;
        loop {
            let pause = if !again.is_empty() {
                EpollTimeout::ZERO
            } else if busy {
                timeout(SWEEP_EVERY)
            } else if self.seats.is_empty() {
                EpollTimeout::NONE
            } else {
                self.worker.dozes.store(true, Ordering::Release);
                // Who makes a lane busy from now on sees the flag; who did so just before is seen here.
                busy = self.sweep(Instant::now());
                timeout(if busy { SWEEP_EVERY } else { DOZE })
            };
            // An error is an interrupted call: look again.
            let count = self.worker.epoll.wait(&mut events, pause).unwrap_or(0);
            busy |= count > 0;
            self.worker.dozes.store(false, Ordering::Release);
            let now = Instant::now();
            let mut waiting = std::mem::take(&mut again);
            for event in &events[..count] {
                let token = event.data();
                if token == WAKE {
                    self.worker.wake.clear();
                    continue;
                }
                let flags = event.events();
                let hangup = flags.intersects(EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLHUP | EpollFlags::EPOLLERR);
                let readable = hangup || flags.contains(EpollFlags::EPOLLIN);
                let writable = hangup || flags.contains(EpollFlags::EPOLLOUT);
                self.turn(token, Ready { readable, writable, hangup }, now, &mut again);
            }
            if self.worker.woken.swap(false, Ordering::AcqRel) {
                let inbox = std::mem::take(&mut *self.worker.lock());
                if inbox.stop {
                    // What comes later is told so.
                    self.worker.lock().stop = true;
                    self.seats.values().chain(&inbox.arrivals).for_each(|seat| seat.end("stopped"));
                    (self.after)();
                    return;
                }
                for seat in inbox.arrivals {
                    waiting.push(self.arrive(seat));
                }
                waiting.extend(inbox.kicks);
                (self.after)();
            }
            for token in waiting {
                if !again.contains(&token) {
                    self.turn(token, Ready::default(), now, &mut again);
                }
            }
            if now.duration_since(swept) >= SWEEP_EVERY {
                swept = now;
                busy = self.sweep(now);
            }
        }
    }

    fn arrive(&mut self, seat: Arc<Seat>) -> u64 {
        let token = seat.token;
        self.seats.insert(token, seat.clone());
        let added = {
            // Locked, so that nobody finds its socket full meanwhile.
            let _lane = seat.lock();
            let wants = wants(seat.watches_out.load(Ordering::Relaxed));
            self.worker.epoll.add(&seat.stream, EpollEvent::new(wants, token))
        };
        if let Err(errno) = added {
            seat.end(&format!("no room in epoll: {errno}"));
        }
        token
    }

    fn turn(&mut self, token: u64, ready: Ready, now: Instant, again: &mut Vec<u64>) {
        let Some(seat) = self.seats.get(&token) else { return };
        let turn = {
            let mut lane = seat.lock();
            let Some(open) = lane.as_mut() else {
                drop(lane);
                self.forget(token);
                return;
            };
            // What had come before the helper began to wait it finds too; afterwards epoll tells again of what is left.
            let ready = if seat.helped.load(Ordering::Relaxed) { Ready::default() } else { ready };
            let socket = &seat.stream;
            let turn = match seat.doomed.get() {
                Some(reason) => Turn::Over(reason.clone()),
                None => catch_unwind(AssertUnwindSafe(|| open.turn(socket, ready, now)))
                    .unwrap_or_else(|_| Turn::Over("a bug: its turn panicked".into())),
            };
            seat.watch(open.as_ref());
            turn
        };
        match turn {
            Turn::Wait => {}
            Turn::Again => again.push(token),
            Turn::Over(reason) => {
                seat.end(&reason);
                self.forget(token);
            }
        }
        (self.after)();
    }

    fn forget(&mut self, token: u64) {
        if let Some(seat) = self.seats.remove(&token) {
            // It fails only for one that never got in.
            let _ = self.worker.epoll.delete(&seat.stream);
        }
    }

    /// Ends what has stalled or idled too long. True if anything is due on any lane.
    fn sweep(&mut self, now: Instant) -> bool {
        let mut busy = false;
        let mut over = Vec::new();
        for (token, seat) in &self.seats {
            let Ok(lane) = seat.lane.try_lock() else {
                // It has a turn just now, so it moves.
                busy = true;
                continue;
            };
            let Some(open) = lane.as_ref() else { continue };
            match open.stalls_at() {
                Some(at) if at <= now => over.push((*token, "nothing moved for 3 s")),
                Some(_) => busy = true,
                None if open.is_tired(now) => over.push((*token, "it was idle")),
                None => {}
            }
        }
        for (token, reason) in over {
            if let Some(seat) = self.seats.get(&token) {
                seat.end(reason);
            }
            self.forget(token);
            (self.after)();
        }
        busy
    }
}

/// Room in the socket is news only if it was full: otherwise each look at it would be an event.
fn wants(out: bool) -> EpollFlags {
    let always = EpollFlags::EPOLLIN | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLET;
    if out { always | EpollFlags::EPOLLOUT } else { always }
}

fn timeout(duration: Duration) -> EpollTimeout {
    // Both constants fit.
    EpollTimeout::try_from(duration).unwrap_or(EpollTimeout::NONE)
}

//! Lanes: connections that carry copies in frames. What the tcp and the shm transport have in common.
//!
//! ```text
//! submit --> queue of the peer --> lane --\                       /--> incoming lane --> holds of the target
//!                              \-> lane --- frames over sockets ----> incoming lane -->   (applied, verified,
//! poll <------- completions <---- acks, data                      \                        then acknowledged)
//! ```
//!
//! | file | question |
//! |---|---|
//! | `frames` | what travels |
//! | `outflow`, `inflow`, `body`, `socket` | how frames get into and out of a socket without a copy in between |
//! | `sharing` | how memory of two processes on one host is read without a socket (shm) |
//! | `outgoing` | the side that asks: the queue of a peer, the window, what an answer means |
//! | `incoming` | the side that is asked |
//! | `io` | which thread does it |
//!
//! # Limits
//!
//! Per peer [`Settings::queue_copies`] copies wait or are under way (more only if the queue was empty), on each lane at
//! most [`Settings::window_bytes`] and [`Settings::window_frames`] of them. The mover gives them less on slow links
//! (`mover/window.rs`): what waits here, in lanes and in both kernels' buffers is a part of that. An incoming lane holds the memory of one
//! frame at a time, and remembers 256 reads. What stalls for 3 s is closed.

mod body;
pub mod frames;
mod incoming;
mod inflow;
mod io;
mod outflow;
mod outgoing;
mod sharing;
mod socket;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use crate::error::Error;
use crate::link::{Connection, Link, Stream};
use crate::region::Regions;
use crate::transport::fence::{Fences, Guest};
use crate::transport::served::{Served, Totals};
use crate::transport::{Busy, Completion, Copy, Helper, Outcome, PIECE_BYTES, Path, Transport};
use crate::types::{NodeAddress, NodeId};

use incoming::Incoming;
use io::{Io, Lane, Seat};
use outgoing::{Peer, Waiter};
use sharing::Sharing;

/// How the lanes of one transport behave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// I/O threads. Default: one per core, at most 4: from there on the memory bus is the limit, not the threads.
    pub threads: usize,
    /// Most lanes to one peer; more than one only under load. Default: one per core, 2 to 4: one stream keeps one core
    /// busy at either end, and above 4 they only fall out of each other's caches.
    pub lanes_per_peer: usize,
    /// Incoming lanes of all peers; one more is refused. Default 512: 128 peers with 4 lanes each.
    pub incoming_lanes: usize,
    /// Copies queued and under way to one peer; more is `Busy`. Default 16384: 4 GiB in the largest pieces.
    pub queue_copies: usize,
    /// Bytes sent or asked for on a lane and not answered. Default 4 MiB: above what both kernels' buffers hold.
    pub window_bytes: u64,
    /// Frames sent on a lane and not answered, at most 256 (the target ends a lane that asks for more). Default 64.
    pub window_frames: usize,
    /// Copies carry checksums that are verified where they land. Default true; both ends obey who submits.
    pub checksums: bool,
    /// TCP connections are dialled with TLS. Default false; whoever accepts must want the same.
    pub tls: bool,
}

impl Default for Settings {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        Self {
            threads: cores.min(4),
            lanes_per_peer: cores.clamp(2, 4),
            incoming_lanes: 512,
            queue_copies: 16384,
            window_bytes: 4 << 20,
            window_frames: 64,
            checksums: true,
            tls: false,
        }
    }
}

/// What the lanes of one transport have moved, since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Bytes written to peers and read from them, `Done`.
    pub bytes_out: u64,
    /// Bytes written here and read from here by peers.
    pub bytes_in: u64,
    /// Copies that this side has submitted and that are `Done`.
    pub copies_out: u64,
    /// Copies of peers that were applied or answered here.
    pub copies_in: u64,
    /// WRITE and READ frames sent.
    pub frames_out: u64,
    /// WRITE and READ frames received.
    pub frames_in: u64,
    /// Copies whose checksum did not hold where they landed, at either side.
    pub corrupt: u64,
    /// Lanes to peers now.
    pub lanes_out: u64,
    /// Lanes of peers now.
    pub lanes_in: u64,
}

/// The same, counted by many threads.
#[derive(Default)]
pub(super) struct Tally {
    bytes_out: AtomicU64,
    copies_out: AtomicU64,
    frames_out: AtomicU64,
    frames_in: AtomicU64,
    corrupt: AtomicU64,
    lanes_out: AtomicU64,
    served: Served,
}

fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

/// Makes connections of one kind.
pub trait Dial: Send + Sync {
    /// Connects to a peer, as its path of that number, and proves who is who, within 3 s. `link.close` ends the attempt
    /// early.
    ///
    /// # Errors
    /// Why there is no connection, for a person.
    fn dial(&self, peer: &NodeAddress, path: u64, link: &Link) -> Result<Stream, Error>;
}

/// What lanes, dialling threads and the transport share.
pub(super) struct Hub {
    pub name: &'static str,
    pub settings: Settings,
    pub fences: Fences,
    pub dial: Box<dyn Dial>,
    regions: OnceLock<Arc<Regions>>,
    completions: Mutex<Vec<Completion>>,
    /// Something is to be told to the owner.
    news: AtomicBool,
    notify: Box<dyn Fn() + Send + Sync>,
    pub tally: Tally,
    incoming: Mutex<HashMap<u64, Arc<Seat>>>,
    io: OnceLock<Io>,
}

impl Hub {
    pub fn regions(&self) -> Option<&Arc<Regions>> {
        self.regions.get()
    }

    /// Hands completions to the owner, which is told as soon as no method of its is on the way.
    pub fn complete(&self, completions: impl IntoIterator<Item = Completion>) {
        self.completions.lock().unwrap_or_else(PoisonError::into_inner).extend(completions);
        self.news.store(true, Ordering::Release);
    }

    /// The path to a peer has changed.
    pub fn path_changed(&self) {
        self.news.store(true, Ordering::Release);
    }

    /// Tells the owner, if there is anything to tell. Never called from within a method.
    pub fn tell(&self) {
        if self.take_news() {
            (self.notify)();
        }
    }

    /// True if there was something to tell; the caller does it.
    pub fn take_news(&self) -> bool {
        self.news.swap(false, Ordering::AcqRel)
    }

    /// Makes somebody else tell the owner.
    fn tell_soon(&self) {
        if self.news.load(Ordering::Acquire)
            && let Some(io) = self.io.get()
        {
            io.nudge();
        }
    }

    pub fn io(&self) -> Option<&Io> {
        self.io.get()
    }

    fn incoming(&self) -> MutexGuard<'_, HashMap<u64, Arc<Seat>>> {
        // Single inserts and removes cannot be left half done.
        self.incoming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn incoming_ended(&self, token: u64) {
        self.incoming().remove(&token);
    }
}

/// Where a process's acceptor brings the lanes that peers have dialled. Clones are the same.
#[derive(Clone)]
pub struct Acceptor(Arc<Hub>);

impl Acceptor {
    /// Welcomes a proven peer's path of that number, or refuses it. An I/O thread serves it from then on.
    ///
    /// # Errors
    /// Retry: there are too many lanes, the engine stops, or the path was lost before it stood. Else as
    /// [`Fences::enter`].
    pub fn welcome(&self, mut connection: Connection, peer: &NodeAddress, path: u64) -> Result<(), Error> {
        // Before the welcome: what the peer can lose, it can tell us of.
        match self.0.fences.enter(peer, path) {
            Ok(guest) => {
                connection.welcome();
                self.adopt(connection.into_lane()?, peer, guest)
            }
            Err(error) => {
                connection.refuse(&error.message);
                Err(error)
            }
        }
    }

    fn adopt(&self, stream: Stream, peer: &NodeAddress, guest: Guest) -> Result<(), Error> {
        let hub = &self.0;
        let io = hub.io.get().ok_or_else(|| Error::retry("the engine has not begun"))?;
        // Locked, so that a lane that ends at once is taken out after it was put in.
        let mut incoming = hub.incoming();
        if incoming.len() >= hub.settings.incoming_lanes {
            return Err(Error::retry(format!("{} lanes of peers stand already", hub.settings.incoming_lanes)));
        }
        let (sharing, place) = (Sharing::over(&stream), guest.place());
        let make =
            |token| -> Box<dyn Lane> { Box::new(Incoming::new(hub.clone(), peer.clone(), guest, token, sharing)) };
        let seat = io.seat(stream, make).ok_or_else(|| Error::retry("the engine stops"))?;
        incoming.insert(seat.token(), seat.clone());
        drop(incoming);
        place.stands(move |reason| seat.end_soon(reason))
    }

    /// What peers have moved here by these lanes.
    pub fn served(&self) -> Totals {
        self.0.tally.served.totals()
    }
}

/// A transport over lanes.
pub struct LaneTransport {
    hub: Arc<Hub>,
    peers: HashMap<NodeId, Arc<Peer>>,
}

impl LaneTransport {
    /// `fences` is the process's, shared by all its transports. `notify` is called by the I/O threads and by those that
    /// dial.
    ///
    /// # Errors
    /// Retry: out of threads or descriptors.
    pub fn new(
        name: &'static str,
        settings: Settings,
        fences: Fences,
        dial: Box<dyn Dial>,
        notify: Box<dyn Fn() + Send + Sync>,
    ) -> Result<Self, Error> {
        let hub = Arc::new(Hub {
            name,
            settings,
            fences,
            dial,
            regions: OnceLock::new(),
            completions: Mutex::default(),
            news: AtomicBool::new(false),
            notify,
            tally: Tally::default(),
            incoming: Mutex::default(),
            io: OnceLock::new(),
        });
        let telling = Arc::downgrade(&hub);
        let tell = move || {
            if let Some(hub) = telling.upgrade() {
                hub.tell();
            }
        };
        let io = Io::start(name, hub.settings.threads, Arc::new(tell))?;
        // Fresh, so nothing was set.
        let _ = hub.io.set(io);
        Ok(Self { hub, peers: HashMap::new() })
    }

    /// Where the lanes that peers dial are brought.
    pub fn acceptor(&self) -> Acceptor {
        Acceptor(self.hub.clone())
    }

    /// What has moved so far.
    pub fn counters(&self) -> Counters {
        let tally = &self.hub.tally;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let served = tally.served.totals();
        Counters {
            bytes_out: read(&tally.bytes_out),
            bytes_in: served.bytes_written + served.bytes_read,
            copies_out: read(&tally.copies_out),
            copies_in: served.done,
            frames_out: read(&tally.frames_out),
            frames_in: read(&tally.frames_in),
            corrupt: read(&tally.corrupt) + served.corrupt,
            lanes_out: read(&tally.lanes_out),
            lanes_in: self.hub.incoming().len() as u64,
        }
    }
}

impl Transport for LaneTransport {
    fn register(&mut self, regions: Arc<Regions>) {
        // Called once by contract; other regions would not be the ones that copies name.
        let _ = self.hub.regions.set(regions);
    }

    fn connect(&mut self, peer: &NodeAddress) {
        if self.peers.get(&peer.node).is_some_and(|known| known.address() == peer && known.is_open()) {
            return;
        }
        self.close(&peer.node);
        let fresh = Peer::new(self.hub.clone(), peer.clone());
        fresh.dial();
        self.peers.insert(peer.node.clone(), fresh);
    }

    fn path(&self, peer: &NodeId) -> Path {
        self.peers.get(peer).map_or(Path::None, |peer| peer.path())
    }

    fn submit(&mut self, peer: &NodeId, copies: &[Copy]) -> Result<(), Busy> {
        let taken = match self.peers.get(peer) {
            Some(peer) => peer.submit(copies, Instant::now())?,
            None => false,
        };
        if !taken {
            self.hub.complete(copies.iter().map(|copy| Completion { id: copy.id, outcome: Outcome::Lost }));
        }
        self.hub.tell_soon();
        Ok(())
    }

    fn poll(&mut self, into: &mut Vec<Completion>) {
        into.append(&mut self.hub.completions.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn helper(&self, peer: &NodeId) -> Option<Box<dyn Helper>> {
        self.peers.get(peer).map(|peer| -> Box<dyn Helper> { Box::new(Waiter(peer.clone())) })
    }

    fn close(&mut self, peer: &NodeId) {
        if let Some(peer) = self.peers.remove(peer) {
            peer.close("closed");
        }
        self.hub.tell_soon();
    }
}

impl Drop for LaneTransport {
    fn drop(&mut self) {
        for (_, peer) in self.peers.drain() {
            peer.close("the engine stops");
        }
        if let Some(io) = self.hub.io.get() {
            io.stop();
        }
    }
}

/// Most bytes of the copies that share a frame.
const FRAME_BYTES: u64 = PIECE_BYTES as u64;

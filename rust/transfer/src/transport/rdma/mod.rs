//! The rdma transport: bytes go from memory to memory by network cards, agreed on over a control connection.
//!
//! ```text
//! submit -> queue -> [path: its own thread]  -- Want, Landed ------> [serving side: its own thread]
//!                    holds, queue pairs      <- Grant, Applied ----  holds, queue pairs
//!                          |                                               |
//!                       card 0  ======== RDMA WRITE / READ =========>   card 0      line 0
//!                       card 1  ====================================>   card 1      line 1
//! ```
//!
//! * `verbs`, `device`: libibverbs, loaded at run time, and owners for what it makes.
//! * `topology`: which ports there are, their addresses, which memory they are near.
//! * `pinned`: registered memory as the cards know it.
//! * `slices`: how copies are cut; `sieve`: which path makes room for another.
//! * `control`: what both ends say to each other (a diagram), and the connection for it.
//! * `initiator`, `target`: the two ends of a path. A path has one direction; its reads come back on it.
//!
//! # Promises
//!
//! A peer gets addresses and keys only for copies that passed its check at the side whose memory it is, and that side
//! holds the memory until the initiator has said that its card is through with it, or until its own queue pairs, without
//! which no packet of the initiator gets in, are destroyed. So a slot or buffer in which a dead or silent initiator could
//! still write stays in quarantine for as long as it takes to notice (3 s), and no longer. What a peer could do on
//! purpose: within a region that it may write, a key opens the whole region (256 MiB of it), as with every one-sided
//! protocol that does not bind a window per copy.
//!
//! Checksums are computed by the processors at both ends; a byte that the card has acknowledged and that the processor
//! would not see yet fails its checksum and is `Corrupt`, never `Done`.
//!
//! A line on which a packet is not acknowledged (1.9 s) fails alone: its slices go on over the other lines; it rests, at
//! first 250 ms, then longer, and is proven with a single slice before it carries more. When no line is left, the path is
//! down. InfiniBand (LIDs) is written from the specification and was never run.

pub mod control;
pub mod device;
mod initiator;
pub mod pinned;
pub mod sieve;
mod slices;
mod target;
pub mod topology;
pub mod verbs;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::path::{Path as FilePath, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::Error;
use crate::keys::Key;
use crate::link::{self, Link};
use crate::region::Regions;
use crate::transport::fence::Fences;
use crate::transport::served::{Served, Totals};
use crate::transport::{Busy, Completion, Copy, Outcome, Path, Transport};
use crate::types::{NodeAddress, NodeId, RegionId};

use device::Rail;
use pinned::Pinned;
use sieve::Sieve;
pub use target::serve;
use topology::{Overrides, Topology};

/// A path on which something is due and nothing moves for so long is broken.
pub const STALLED_AFTER: Duration = Duration::from_secs(3);
/// Copies that may be queued and under way to one peer; more is `Busy`.
const QUEUE_LIMIT: usize = 4096;
/// Copies under way on a path: two batches of small ones, so that agreeing on one overlaps with moving the other.
const WINDOW: usize = 1024;
/// Most bytes of one work request: small enough to spread a copy of 256 KiB over four lines, large enough that posting
/// (0.1 us) is nothing beside moving it (5 us at 100 Gbit/s).
const SLICE_BYTES: u32 = 64 << 10;

fn broken(what: &str) -> Error {
    Error::retry(format!("the other side {what}"))
}

/// For the number of a queue pair's first packet: old packets of another one must not fit.
fn random() -> Result<u32, Error> {
    Ok(u32::from_le_bytes(link::random()?))
}

/// How the transport uses the machine's cards.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Names of the devices to use, in the order in which they are joined with a peer's; empty: all, by name.
    pub devices: Vec<String>,
    /// Which entry of every port's GID table; `None`: RoCE v2 over IPv4 first, see `topology`.
    pub gid_index: Option<u8>,
    /// A file that says which devices are near which memory, see [`Overrides::parse`]; `None`: as sysfs says.
    pub topology: Option<PathBuf>,
    /// Queue pairs per port and path. One carries 100 Gbit/s; the second lets a card's two engines work.
    pub queues_per_port: u8,
    /// Paths that may stand in each direction, each with `queues_per_port` queue pairs per port at both ends. A further
    /// one takes the place of an idle one.
    pub paths: usize,
    /// All limits on time are so many times longer: more than 1 only where time itself is emulated, as in `make test-rdma`.
    pub slowness: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self { devices: Vec::new(), gid_index: None, topology: None, queues_per_port: 2, paths: 256, slowness: 1 }
    }
}

impl Settings {
    fn within(&self, limit: Duration) -> Duration {
        limit * self.slowness.max(1)
    }
}

/// What has happened so far, since the start.
#[derive(Debug, Default)]
pub struct Counters {
    /// Lines that failed.
    pub lines_failed: AtomicU64,
    /// Lines that failed and carry again.
    pub lines_renewed: AtomicU64,
    /// Slices that were sent again over another line.
    pub slices_resent: AtomicU64,
    /// Paths that made room for others.
    pub paths_evicted: AtomicU64,
    /// Paths that were set up, by either side.
    pub paths_opened: AtomicU64,
}

/// The machine's cards, opened.
struct Cards {
    rails: Arc<[Arc<Rail>]>,
    pinned: Pinned,
    /// Its ports are those of `rails`, in their order.
    topology: Topology,
}

impl Cards {
    fn open(settings: &Settings) -> Result<Self, Error> {
        let overrides = settings.topology.as_deref().map(Overrides::read).transpose()?.unwrap_or_default();
        let mut topology = Topology::read(FilePath::new("/sys"), overrides);
        if !settings.devices.is_empty() {
            let rank = |name: &str| settings.devices.iter().position(|device| device == name);
            topology.ports.retain(|port| rank(&port.device).is_some());
            topology.ports.sort_by_key(|port| (rank(&port.device), port.port));
        }
        if topology.ports.is_empty() {
            let wanted = if settings.devices.is_empty() { String::new() } else { format!(" {:?}", settings.devices) };
            return Err(Error::retry(format!("no RDMA device{wanted} here (/sys/class/infiniband)")));
        }
        let (mut rails, mut first) = (Vec::new(), None);
        for port in topology.ports.iter().take(control::PORT_LIMIT) {
            match Rail::open(port.clone(), settings.gid_index, settings.slowness) {
                Ok(rail) => rails.push(Arc::new(rail)),
                Err(error) => {
                    tracing::warn!("a port is not used: {error}");
                    first.get_or_insert(error);
                }
            }
        }
        if let (true, Some(error)) = (rails.is_empty(), first) {
            return Err(error);
        }
        topology.ports = rails.iter().map(|rail| rail.port().clone()).collect();
        let rails: Arc<[_]> = rails.into();
        Ok(Self { pinned: Pinned::new(rails.clone()), rails, topology })
    }

    /// Ports whose link is up: (index of the rail, how peers reach it).
    fn ports(&self) -> Result<Vec<(usize, control::PortAddress)>, Error> {
        let up: Vec<_> =
            self.rails.iter().enumerate().filter_map(|(index, rail)| Some((index, rail.address()?))).collect();
        if up.is_empty() { Err(Error::retry("the links of all RDMA ports are down")) } else { Ok(up) }
    }
}

/// What the transport's owner, its paths, and the acceptor of incoming ones share.
pub struct Shared {
    key: Key,
    me: NodeAddress,
    settings: Settings,
    fences: Fences,
    regions: OnceLock<Arc<Regions>>,
    /// Opened when first needed; a failure is not kept, as a device may appear.
    cards: Mutex<Option<Arc<Cards>>>,
    completions: Mutex<Vec<Completion>>,
    serving: target::Table,
    counters: Counters,
    served: Served,
    notify: Box<dyn Fn() + Send + Sync>,
}

impl Shared {
    fn cards(&self) -> Result<Arc<Cards>, Error> {
        let mut cards = self.cards.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cards) = &*cards {
            return Ok(cards.clone());
        }
        let opened = Arc::new(Cards::open(&self.settings)?);
        *cards = Some(opened.clone());
        Ok(opened)
    }

    fn regions(&self) -> Result<&Arc<Regions>, Error> {
        self.regions.get().ok_or_else(|| Error::bug("an rdma path before the regions"))
    }

    fn forget(&self, region: RegionId, bytes: Range<u64>) {
        let cards = self.cards.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(cards) = cards {
            cards.pinned.forget(region, bytes);
        }
    }

    fn complete(&self, completions: impl IntoIterator<Item = Completion>) {
        self.completions.lock().unwrap_or_else(PoisonError::into_inner).extend(completions);
        (self.notify)();
    }

    /// Chunks of registered memory that the cards know.
    pub fn pinned_chunks(&self) -> usize {
        let cards = self.cards.lock().unwrap_or_else(PoisonError::into_inner);
        cards.as_ref().map_or(0, |cards| cards.pinned.len())
    }

    /// What peers have moved here.
    pub fn served(&self) -> Totals {
        self.served.totals()
    }

    /// What has happened so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }
}

/// The transport of one daemon.
pub struct RdmaTransport {
    shared: Arc<Shared>,
    endpoints: HashMap<NodeId, Endpoint>,
    /// Peers whose path has a thread.
    sieve: Sieve<NodeId>,
    /// Threads of closed paths; they end by themselves, `drop` waits for them.
    ending: Vec<JoinHandle<()>>,
}

/// A peer, with its path if it has one.
struct Endpoint {
    peer: NodeAddress,
    end: Arc<End>,
    thread: Option<JoinHandle<()>>,
}

/// What the transport and a path's thread share.
struct End {
    state: Mutex<EndState>,
    link: Link,
}

struct EndState {
    waiting: VecDeque<Copy>,
    /// Taken by the path and not complete.
    taken: usize,
    phase: Phase,
}

enum Phase {
    Connecting,
    Up,
    /// Put away while nothing was under way; the next copy makes a new path.
    Asleep,
    Over(String),
}

impl EndState {
    /// Idle, or without a thread already.
    fn may_go(&self) -> bool {
        match self.phase {
            Phase::Connecting => false,
            Phase::Up => self.waiting.is_empty() && self.taken == 0,
            Phase::Asleep | Phase::Over(_) => true,
        }
    }
}

impl End {
    fn new() -> Result<Arc<Self>, Error> {
        let state = EndState { waiting: VecDeque::new(), taken: 0, phase: Phase::Connecting };
        Ok(Arc::new(Self { state: Mutex::new(state), link: Link::new()? }))
    }

    fn lock(&self) -> MutexGuard<'_, EndState> {
        // No code that could panic runs under the lock, so a poisoned state is still whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RdmaTransport {
    /// `me` is told to peers; `fences` is the process's; `notify` is called (from paths' threads) when completions wait for
    /// `poll`, or a path has changed. Without devices, or without the library, every path is down and says why.
    pub fn new(
        key: Key,
        me: NodeAddress,
        settings: Settings,
        fences: Fences,
        notify: Box<dyn Fn() + Send + Sync>,
    ) -> Self {
        let shared = Arc::new(Shared {
            key,
            me,
            settings,
            fences,
            regions: OnceLock::new(),
            cards: Mutex::default(),
            completions: Mutex::default(),
            serving: target::Table::default(),
            counters: Counters::default(),
            served: Served::default(),
            notify,
        });
        Self { shared, endpoints: HashMap::new(), sieve: Sieve::default(), ending: Vec::new() }
    }

    /// For the acceptor of incoming paths, see [`serve`].
    pub fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    /// Whether this machine could do rdma at all.
    ///
    /// # Errors
    /// Retry: a sentence that says what is missing.
    pub fn available(&self) -> Result<(), Error> {
        self.shared.cards().and_then(|cards| cards.ports()).map(|_| ())
    }

    /// Starts a path's thread, after making room for it.
    fn start(&mut self, node: &NodeId) {
        self.reap();
        self.make_room();
        let Some(endpoint) = self.endpoints.get_mut(node) else { return };
        let (shared, end, peer) = (self.shared.clone(), endpoint.end.clone(), endpoint.peer.clone());
        let thread =
            std::thread::Builder::new().name("rdma-path".into()).spawn(move || initiator::run(&shared, &end, &peer));
        match thread {
            Ok(thread) => {
                self.sieve.remove(node);
                self.sieve.insert(node.clone());
                self.ending.extend(endpoint.thread.replace(thread));
            }
            Err(error) => endpoint.end.lock().phase = Phase::Over(format!("no thread: {error}")),
        }
    }

    /// Puts an idle path away if as many stand as may.
    fn make_room(&mut self) {
        while self.sieve.len() >= self.shared.settings.paths.max(1) {
            let endpoints = &self.endpoints;
            let may_go = |node: &NodeId| endpoints.get(node).is_none_or(|endpoint| endpoint.end.lock().may_go());
            // If all are busy there is one too many until one of them ends: a copy is not refused for that.
            let Some(node) = self.sieve.evict(may_go) else { return };
            if let Some(endpoint) = self.endpoints.get_mut(&node)
                && matches!(endpoint.end.lock().phase, Phase::Up)
                && let Ok(end) = End::new()
            {
                end.lock().phase = Phase::Asleep;
                std::mem::replace(&mut endpoint.end, end).link.close("put away for a busier one");
                self.ending.extend(endpoint.thread.take());
                self.shared.counters.paths_evicted.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn reap(&mut self) {
        let (done, ending) = self.ending.drain(..).partition(JoinHandle::is_finished);
        self.ending = ending;
        for thread in done {
            // A path's panic is a bug that its guard has already turned into `Lost` copies.
            let _ = thread.join();
        }
    }
}

impl Transport for RdmaTransport {
    fn register(&mut self, regions: Arc<Regions>) {
        let shared = Arc::downgrade(&self.shared);
        regions.on_removal(Box::new(move |region, bytes| {
            if let Some(shared) = shared.upgrade() {
                shared.forget(region, bytes);
            }
        }));
        // Opening takes a card half a second or more: done before the first path needs it, and not at all without cards.
        if FilePath::new("/sys/class/infiniband").exists() {
            let shared = self.shared.clone();
            let open = move || {
                if let Err(error) = shared.cards() {
                    tracing::info!("no rdma: {error}");
                }
            };
            self.ending.extend(std::thread::Builder::new().name("rdma-open".into()).spawn(open));
        }
        // Called once by contract; other regions would not be the ones that copies name.
        let _ = self.shared.regions.set(regions);
    }

    fn connect(&mut self, peer: &NodeAddress) {
        if let Some(endpoint) = self.endpoints.get(&peer.node)
            && endpoint.peer == *peer
            && matches!(endpoint.end.lock().phase, Phase::Connecting | Phase::Up)
        {
            return;
        }
        self.close(&peer.node);
        let Ok(end) = End::new() else {
            // Out of descriptors: submit finds no path and reports its copies as lost.
            return;
        };
        self.endpoints.insert(peer.node.clone(), Endpoint { peer: peer.clone(), end, thread: None });
        self.start(&peer.node);
    }

    fn path(&self, peer: &NodeId) -> Path {
        match self.endpoints.get(peer).map(|endpoint| endpoint.end.lock()) {
            None => Path::None,
            Some(state) => match &state.phase {
                Phase::Connecting => Path::Connecting,
                // One that sleeps wakes up by itself.
                Phase::Up | Phase::Asleep => Path::Up,
                Phase::Over(why) => Path::Down(why.clone()),
            },
        }
    }

    fn submit(&mut self, peer: &NodeId, copies: &[Copy]) -> Result<(), Busy> {
        let lost = copies.iter().map(|copy| Completion { id: copy.id, outcome: Outcome::Lost });
        let Some(endpoint) = self.endpoints.get_mut(peer) else {
            self.shared.complete(lost);
            return Ok(());
        };
        let mut state = endpoint.end.lock();
        match state.phase {
            Phase::Over(_) => {
                drop(state);
                self.shared.complete(lost);
            }
            Phase::Asleep => {
                drop(state);
                match End::new() {
                    Ok(end) => {
                        end.lock().waiting.extend(copies);
                        endpoint.end = end;
                        self.start(peer);
                    }
                    Err(_) => self.shared.complete(lost),
                }
            }
            Phase::Connecting | Phase::Up => {
                let queued = state.waiting.len() + state.taken;
                if queued > 0 && queued + copies.len() > QUEUE_LIMIT {
                    return Err(Busy);
                }
                state.waiting.extend(copies);
                drop(state);
                endpoint.end.link.wake().set();
                self.sieve.touch(peer);
            }
        }
        Ok(())
    }

    fn poll(&mut self, into: &mut Vec<Completion>) {
        into.append(&mut self.shared.completions.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn close(&mut self, peer: &NodeId) {
        self.sieve.remove(peer);
        if let Some(endpoint) = self.endpoints.remove(peer) {
            endpoint.end.link.close("closed");
            self.ending.extend(endpoint.thread);
        }
    }
}

impl Drop for RdmaTransport {
    fn drop(&mut self) {
        for (_, endpoint) in self.endpoints.drain() {
            endpoint.end.link.close("the engine stops");
            self.ending.extend(endpoint.thread);
        }
        for thread in self.ending.drain(..) {
            // As in `reap`.
            let _ = thread.join();
        }
    }
}

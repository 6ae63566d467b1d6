//! Moves lists of parts to and from peers: cuts, orders, paces, picks paths, tries again. Sans-IO, over [`Transport`]s.
//!
//! ```text
//! submit ---> queued ----------> sending ----------------------------------> Done
//!               |                  | a piece is fenced, denied, or out of     ^ all had succeeded anyway
//!               |                  | retries; or cancel, deadline, no path    |
//!               |                  v                                          |
//!               |              quiescing: nothing more is sent, what is ------+
//!               |              under way completes                            |
//!               v                                                             v
//!            Failed, Cancelled, DeadlinePassed <------------------------------/
//! ```
//!
//! * **An outcome means what it says.** Every transfer ends exactly once, and only when nothing of it is under way:
//!   then this side's memory is quiet. `Done` means that every piece was applied and verified. Cancelling, a deadline or
//!   a failure stops what is queued at once and waits for what is under way: per path what the link carries in some 4 ms,
//!   at least two pieces (`mover/window.rs`), and never longer than the 3 s after which a transport gives up on a path
//!   where nothing moves.
//! * **Nothing crosses lives.** Copies name regions of one life of a peer. When `connect` is told of another one, the
//!   transfers to the old one fail as fenced.
//! * **Paths.** Of the kinds that the peer is connected by, the first that stands is taken, in the order shm, rdma, tcp;
//!   the next is only made when those before it are down. The very first attempt at a path is waited for, so that a
//!   start is no race between paths; later ones are made in the background while another one carries. Each has a
//!   breaker (`mover/breaker.rs`).
//! * **Again.** A piece that was lost or corrupted is sent again, at most [`Request::retries`] times, on whatever path
//!   is the best then. That is safe: a read changes nothing at the peer, a write writes the same bytes again, and what
//!   was lost is not applied any more when that begins (`transport/fence.rs`). A transfer that finds no path waits until
//!   all paths have failed more often than that.
//! * **Bounded.** [`Busy`] when a peer, or all together, have too much queued. Parts are never copied, pieces exist only
//!   while they are under way.
//!
//! Parts of no bytes are sent as copies of no bytes: they say that the peer's region stands and may be used so. (In an
//! arena a span is at least a strip, so there they are denied.) A transfer without parts is done as soon as a path is up.

mod breaker;
mod queue;
mod stats;
mod transfer;
mod window;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::str::FromStr;
use std::sync::Arc;

use rustc_hash::FxHashMap;

pub use breaker::State as BreakerState;
pub use stats::{Histogram, PathStats, PeerStats};

use crate::error::Error;
use crate::random::Random;
use crate::region::Regions;
use crate::transport::{Busy, Completion, Copy, CopyId, Helper, Kind, Op, Outcome, PIECE_BYTES, Path, Transport};
use crate::types::{Nanos, NodeAddress, NodeId, Span};
use breaker::Breaker;
use queue::Queue;
use transfer::{Piece, Transfer};
use window::Window;

/// Number of a transfer, never used twice.
pub type TransferId = u64;

const MILLISECOND: Nanos = 1_000_000;
/// Copies that are submitted at once.
const BATCH: usize = 128;

/// Retries of a piece unless a request says otherwise: enough for a lane that breaks and a path that follows.
pub const RETRIES: u32 = 3;

/// Which transfers pass which. The lower ones keep a share (`mover/queue.rs`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Priority {
    /// Somebody waits for it.
    Urgent,
    /// As it comes.
    #[default]
    Normal,
    /// When there is room.
    Background,
}

/// Bytes to move between a local and a remote span; any number of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// At this side.
    pub local: Span,
    /// At the peer's side.
    pub remote: Span,
    /// How many.
    pub bytes: u64,
    /// Bytes per checksum, where the part may be cut; 0: wherever it suits. With an arena at either end: its strips' size.
    pub grain: u32,
}

/// What to move.
#[derive(Clone, Debug)]
pub struct Request {
    /// Which way.
    pub op: Op,
    /// From where to where. A list can be submitted again and again; it is not copied.
    pub parts: Arc<[Part]>,
    /// What it passes.
    pub priority: Priority,
    /// When to give up, on the mover's clock.
    pub deadline: Option<Nanos>,
    /// How often a piece is sent again.
    pub retries: u32,
}

impl Request {
    /// With normal priority, no deadline, and the usual retries.
    pub fn new(op: Op, parts: Arc<[Part]>) -> Self {
        Self { op, parts, priority: Priority::Normal, deadline: None, retries: RETRIES }
    }
}

/// Which paths a peer may be reached by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    /// The best that stands.
    Auto,
    /// This one or none.
    Only(Kind),
}

impl FromStr for Via {
    type Err = Error;

    /// `auto`, or the name of a transport.
    fn from_str(text: &str) -> Result<Self, Error> {
        let known = [Kind::Shm, Kind::Rdma, Kind::Tcp].into_iter().find(|kind| kind.name() == text);
        match (text, known) {
            ("auto", _) => Ok(Self::Auto),
            (_, Some(kind)) => Ok(Self::Only(kind)),
            _ => Err(Error::give_up(format!("transport {text:?} is unknown: use auto, shm, rdma or tcp"))),
        }
    }
}

/// How a transfer ended. This side's memory is touched no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Every byte was applied and verified.
    Done {
        /// The path that the last piece went.
        via: Kind,
        /// Pieces went by another path because a better one, which had stood before, did not stand.
        fallback: bool,
        /// How many pieces were sent again.
        retries: u32,
    },
    /// Some or all bytes were not moved; of those that should be written, some may have been.
    Failed {
        /// The part that failed first; 0 if it was none in particular.
        part: usize,
        /// What to do about it.
        why: Failure,
        /// For a person.
        message: String,
    },
    /// As asked. Some bytes may have been moved.
    Cancelled,
    /// It was not done in time. Some bytes may have been moved.
    DeadlinePassed,
}

/// Why a transfer failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// The region or slot has ended its life, at either side; or the peer's process has. Ask for new handles.
    Fenced,
    /// Outside the region, or not permitted. A bug of whoever made the list.
    Denied,
    /// Checksums did not hold, however often it was sent: the memory at its source may be bad.
    Corrupt,
    /// No path that does not lose it. Try later.
    Unreachable,
}

/// How far a transfer is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes applied and verified.
    pub bytes_done: u64,
    /// All its bytes.
    pub bytes: u64,
}

/// A path to a peer, for whoever wants to know why which one is taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathReport {
    /// Which.
    pub kind: Kind,
    /// Whether it stands, and if not, why.
    pub path: Path,
    /// Whether it is trusted.
    pub breaker: BreakerState,
    /// The last copy went this way.
    pub taken: bool,
}

/// Limits. Everything that can grow has one.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Most bytes of one copy, but for a single grain that is larger.
    pub piece_bytes: u32,
    /// Most bytes under way per peer and path: at 2 GB/s 4 ms of them, which is what an urgent copy waits, and what a
    /// cancelled transfer needs to come to rest. On slower links fewer bytes are under way (`mover/window.rs`).
    pub window_bytes: u64,
    /// Copies under way per peer and path.
    pub window_copies: usize,
    /// Transfers per peer that have not ended; beyond: `Busy`.
    pub transfers_per_peer: usize,
    /// Parts per peer of transfers that have not ended; beyond: `Busy`. They are 48 bytes each, and their submitter's.
    pub parts_per_peer: usize,
    /// As above, all peers together.
    pub parts: usize,
    /// Losses in a row after which a path rests.
    pub losses: u32,
    /// Of the numbers that spread out retries.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            piece_bytes: PIECE_BYTES,
            window_bytes: 8 << 20,
            window_copies: 2048,
            transfers_per_peer: 16 << 10,
            parts_per_peer: 1 << 20,
            parts: 4 << 20,
            losses: 3,
            seed: 0,
        }
    }
}

/// A piece that was submitted to a transport.
#[derive(Clone, Copy, Debug)]
struct Flight {
    transfer: TransferId,
    peer: u64,
    path: usize,
    piece: Piece,
    sent: Nanos,
}

/// One path to one life of a peer; its index is that of its transport.
#[derive(Debug)]
struct Way {
    allowed: bool,
    breaker: Breaker,
    /// No attempt at it has ended yet.
    fresh: bool,
    /// `connect` was called, and neither failed nor succeeded yet.
    connecting: bool,
    /// It stood when it was last looked at.
    up: bool,
    /// It has stood before.
    stood: bool,
    /// It failed in this round.
    failed: bool,
    /// The transport takes no more until something completes.
    full: bool,
    copies: usize,
    bytes: u64,
    window: Window,
    stats: PathStats,
}

/// One life of a peer.
#[derive(Debug)]
struct Peer {
    address: NodeAddress,
    via: Via,
    ways: Vec<Way>,
    queue: Queue,
    transfers: BTreeSet<TransferId>,
    parts: usize,
    in_flight: usize,
    /// Nobody has anything to send yet, but a path is wanted.
    opening: bool,
    /// Rounds in which all paths failed.
    round: u64,
    /// The value of `round` at the last answer.
    answered: u64,
    /// The path of the last copy.
    taken: Option<usize>,
    /// Disconnected, or a later life is known: it is forgotten when it is quiet.
    over: bool,
    /// When to look again, as a path's rest is over then.
    tick: Option<Nanos>,
}

/// What a path can take now.
enum Room {
    /// Nothing; another path may.
    None,
    /// Nothing yet, but it is worth waiting for.
    Soon,
    /// One copy.
    Probe,
    /// As much as the window allows.
    Window,
}

/// Moves transfers over transports that it owns. Single-threaded; `poll` it when a transport notifies, and at `next_tick`.
pub struct Mover {
    transports: Vec<(Kind, Box<dyn Transport>)>,
    settings: Settings,
    regions: Option<Arc<Regions>>,
    /// By a number that no other life has.
    peers: BTreeMap<u64, Peer>,
    names: BTreeMap<NodeId, u64>,
    /// Never walked, so its order does not matter.
    transfers: FxHashMap<TransferId, Transfer>,
    /// By the lower half of the copy's id; the upper half tells its uses apart.
    flights: Vec<(u32, Option<Flight>)>,
    free: Vec<u32>,
    deadlines: BTreeSet<(Nanos, TransferId)>,
    /// Peers that have something to send, or want a path.
    active: BTreeSet<u64>,
    parts: usize,
    last: u64,
    ended: Vec<(TransferId, Ended)>,
    random: Random,
    /// What was counted for peers that are forgotten.
    past: Vec<PathStats>,
    completions: Vec<Completion>,
    batch: Vec<Copy>,
}

impl Mover {
    /// Over these transports, at most one of a kind.
    pub fn new(mut transports: Vec<(Kind, Box<dyn Transport>)>, settings: Settings) -> Self {
        transports.sort_by_key(|(kind, _)| *kind);
        Self {
            past: vec![PathStats::default(); transports.len()],
            transports,
            settings,
            regions: None,
            peers: BTreeMap::new(),
            names: BTreeMap::new(),
            transfers: FxHashMap::default(),
            flights: Vec::new(),
            free: Vec::new(),
            deadlines: BTreeSet::new(),
            active: BTreeSet::new(),
            parts: 0,
            last: 0,
            ended: Vec::new(),
            random: Random(settings.seed),
            completions: Vec::new(),
            batch: Vec::new(),
        }
    }

    /// Makes this memory the local end of copies. Called once, first.
    pub fn register(&mut self, regions: Arc<Regions>) {
        self.transports.iter_mut().for_each(|(_, transport)| transport.register(regions.clone()));
        self.regions = Some(regions);
    }

    /// A life of a peer is known, and may be reached so. What goes to an earlier life of it fails as fenced. Called
    /// again, it may move the peer to another address, change the choice of paths, or have broken paths tried at once.
    pub fn connect(&mut self, address: &NodeAddress, via: Via, now: Nanos) {
        match self.names.get(&address.node).copied() {
            Some(number) if self.peers[&number].address.incarnation == address.incarnation => {
                self.connect_again(number, address, via, now);
            }
            earlier => {
                if let Some(number) = earlier {
                    self.forget(number, Failure::Fenced, "the peer has begun another life");
                }
                self.add_peer(address, via);
            }
        }
        let number = self.names[&address.node];
        self.active.insert(number);
        self.pump(number, now);
    }

    /// The peer is wanted no more: its paths are closed, its transfers fail as unreachable.
    pub fn disconnect(&mut self, peer: &NodeId, _now: Nanos) {
        if let Some(&number) = self.names.get(peer) {
            self.forget(number, Failure::Unreachable, "disconnected");
        }
    }

    /// Begins a transfer. To a peer that is not connected it fails as unreachable, with the next `poll`.
    ///
    /// # Errors
    /// `Busy` if too much is queued for the peer, or in all; nothing was begun, try again when a transfer has ended. A
    /// transfer that alone is above the limits is taken when nothing else is there.
    pub fn submit(&mut self, peer: &NodeId, request: Request, now: Nanos) -> Result<TransferId, Busy> {
        let Settings { transfers_per_peer, parts_per_peer, parts: all_parts, .. } = self.settings;
        let count = request.parts.len();
        let id = self.last + 1;
        let Some(&number) = self.names.get(peer) else {
            self.last = id;
            let message = format!("{peer} is not connected");
            self.ended.push((id, Ended::Failed { part: 0, why: Failure::Unreachable, message }));
            return Ok(id);
        };
        let peer = self.peers.get_mut(&number).expect("named peers exist");
        let crowded = peer.transfers.len() >= transfers_per_peer
            || (!peer.transfers.is_empty() && peer.parts + count > parts_per_peer)
            || (self.parts > 0 && self.parts + count > all_parts);
        if crowded {
            return Err(Busy);
        }
        self.last = id;
        let transfer = Transfer::new(number, peer.round, request, self.settings.piece_bytes);
        let wrong = match &self.regions {
            Some(regions) => transfer.wrong(regions),
            None => {
                Some(Ended::Failed { part: 0, why: Failure::Fenced, message: "no memory is registered here".into() })
            }
        };
        if let Some(ended) = wrong {
            self.ended.push((id, ended));
            return Ok(id);
        }
        peer.transfers.insert(id);
        peer.parts += count;
        self.parts += count;
        if let Some(deadline) = transfer.deadline {
            self.deadlines.insert((deadline, id));
        }
        self.transfers.insert(id, transfer);
        if peer.ways.iter().any(|way| way.allowed) {
            self.join(id);
            self.pump(number, now);
        } else {
            let message = self.unreachable(number);
            self.end(id, Ended::Failed { part: 0, why: Failure::Unreachable, message });
        }
        Ok(id)
    }

    /// Stops a transfer: it ends as `Cancelled` when nothing of it is under way, or as `Done` if that was all that was
    /// missing. Nothing happens if it has ended.
    pub fn cancel(&mut self, id: TransferId, now: Nanos) {
        let Some(peer) = self.transfers.get(&id).map(|transfer| transfer.peer) else { return };
        self.end(id, Ended::Cancelled);
        self.pump(peer, now);
    }

    /// Looks at the transports, moves on what can be, and tells which transfers have ended.
    pub fn poll(&mut self, now: Nanos) -> Vec<(TransferId, Ended)> {
        for path in 0..self.transports.len() {
            let mut completions = std::mem::take(&mut self.completions);
            self.transports[path].1.poll(&mut completions);
            self.completed(path, &completions, now);
            completions.clear();
            self.completions = completions;
        }
        while let Some(&(deadline, id)) = self.deadlines.first().filter(|(deadline, _)| *deadline <= now) {
            self.deadlines.remove(&(deadline, id));
            self.end(id, Ended::DeadlinePassed);
        }
        for number in self.active.iter().copied().collect::<Vec<_>>() {
            self.pump(number, now);
        }
        std::mem::take(&mut self.ended)
    }

    /// When to call `poll` even if no transport notifies; 0: at once, transfers have ended already.
    pub fn next_tick(&self) -> Option<Nanos> {
        if !self.ended.is_empty() {
            return Some(0);
        }
        let deadline = self.deadlines.first().map(|(deadline, _)| *deadline);
        let peers = self.active.iter().filter_map(|number| self.peers[number].tick);
        peers.chain(deadline).min()
    }

    /// How far a transfer is; `None` if it has ended (or never was).
    pub fn progress(&self, id: TransferId) -> Option<Progress> {
        self.transfers.get(&id).map(Transfer::progress)
    }

    /// The paths that a peer may be reached by, the preferred first. Empty if it is not connected.
    pub fn paths(&self, peer: &NodeId) -> Vec<PathReport> {
        let Some(number) = self.names.get(peer) else { return Vec::new() };
        let peer = &self.peers[number];
        let ways = self.transports.iter().zip(&peer.ways).enumerate();
        ways.filter(|(_, (_, way))| way.allowed)
            .map(|(index, ((kind, transport), way))| PathReport {
                kind: *kind,
                path: transport.path(&peer.address.node),
                breaker: way.breaker.state(),
                taken: peer.taken == Some(index),
            })
            .collect()
    }

    /// For a thread that is going to wait for a few small copies to a peer: it can do the work of the path that they went.
    pub fn helper(&self, peer: &NodeId) -> Option<Box<dyn Helper>> {
        let peer = &self.peers[self.names.get(peer)?];
        self.transports[peer.taken?].1.helper(&peer.address.node)
    }

    /// The life of a peer that is connected.
    pub fn peer(&self, node: &NodeId) -> Option<&NodeAddress> {
        self.names.get(node).map(|number| &self.peers[number].address)
    }

    /// What was counted, per connected peer.
    pub fn stats(&self) -> Vec<PeerStats> {
        self.names.values().map(|number| self.peer_stats(&self.peers[number])).collect()
    }

    /// What was counted, per path, of all peers together, also those that are forgotten: never falls.
    pub fn totals(&self) -> Vec<(Kind, PathStats)> {
        let mut totals = self.past.clone();
        for peer in self.peers.values() {
            totals.iter_mut().zip(&peer.ways).for_each(|(total, way)| total.absorb(&way.stats));
        }
        self.transports.iter().map(|(kind, _)| *kind).zip(totals).collect()
    }

    /// True if there is no transfer that has not ended, and no outcome that was not taken.
    pub fn idle(&self) -> bool {
        self.transfers.is_empty() && self.ended.is_empty()
    }

    /// Panics if the books do not balance.
    pub fn check(&self) {
        let flying = || self.flights.iter().filter_map(|(_, flight)| flight.as_ref());
        assert_eq!(flying().count() + self.free.len(), self.flights.len());
        let mut of_transfer: HashMap<TransferId, usize> = HashMap::new();
        let mut of_path: HashMap<(u64, usize), (usize, u64)> = HashMap::new();
        for flight in flying() {
            *of_transfer.entry(flight.transfer).or_default() += 1;
            let (copies, bytes) = of_path.entry((flight.peer, flight.path)).or_default();
            *copies += 1;
            *bytes += u64::from(flight.piece.bytes);
        }
        assert!(of_transfer.keys().all(|id| self.transfers.contains_key(id)), "a flight without a transfer");
        for (id, transfer) in &self.transfers {
            let peer = &self.peers[&transfer.peer];
            assert!(peer.transfers.contains(id), "{id} is unknown to its peer");
            assert_eq!(transfer.in_flight, of_transfer.get(id).copied().unwrap_or(0), "{id}: copies under way");
            assert!(transfer.ending.is_none() || transfer.in_flight > 0, "{id} has ended, and nobody was told");
            let sends = transfer.ending.is_none() && (transfer.next().is_some() || transfer.in_flight == 0);
            let entries = peer.queue.entries().filter(|entry| entry == id).count();
            assert_eq!(transfer.queued, sends, "{id}: its place in the queue");
            assert!(!sends || entries == 1, "{id} stands in the queue {entries} times");
            assert!(!sends || self.active.contains(&transfer.peer), "{id} waits for a peer that nobody looks at");
            let Progress { bytes_done, bytes } = transfer.progress();
            assert!(bytes_done <= bytes, "{id}: {bytes_done} of {bytes} bytes");
        }
        for (number, peer) in &self.peers {
            let of_peer = peer.transfers.iter().map(|id| &self.transfers[id]);
            assert_eq!(peer.parts, of_peer.map(Transfer::parts).sum::<usize>(), "{}: parts", peer.address.node);
            for (path, way) in peer.ways.iter().enumerate() {
                let expected = of_path.get(&(*number, path)).copied().unwrap_or((0, 0));
                assert_eq!((way.copies, way.bytes), expected, "{}: copies on path {path}", peer.address.node);
                assert!(way.copies <= self.settings.window_copies, "{} copies under way", way.copies);
                assert!(way.copies <= 1 || way.bytes <= self.settings.window_bytes, "{} bytes under way", way.bytes);
            }
            assert_eq!(peer.in_flight, peer.ways.iter().map(|way| way.copies).sum::<usize>());
            assert!(!peer.over || peer.in_flight > 0, "{} is over, quiet, and remembered", peer.address.node);
        }
        assert!(self.names.values().all(|number| !self.peers[number].over));
        assert_eq!(self.parts, self.peers.values().map(|peer| peer.parts).sum::<usize>());
        assert!(self.deadlines.iter().all(|(_, id)| self.transfers.contains_key(id)), "a deadline without a transfer");
    }

    // -- peers -------------------------------------------------------------------------------------------------------

    fn add_peer(&mut self, address: &NodeAddress, via: Via) {
        self.last += 1;
        let way = |kind: Kind| Way {
            allowed: via == Via::Auto || via == Via::Only(kind),
            breaker: Breaker::new(self.settings.losses),
            fresh: true,
            connecting: false,
            up: false,
            stood: false,
            failed: false,
            full: false,
            copies: 0,
            bytes: 0,
            window: Window::new(self.settings.window_bytes),
            stats: PathStats::default(),
        };
        let peer = Peer {
            address: address.clone(),
            via,
            ways: self.transports.iter().map(|(kind, _)| way(*kind)).collect(),
            queue: Queue::default(),
            transfers: BTreeSet::new(),
            parts: 0,
            in_flight: 0,
            opening: true,
            round: 0,
            answered: 0,
            taken: None,
            over: false,
            tick: None,
        };
        self.peers.insert(self.last, peer);
        self.names.insert(address.node.clone(), self.last);
    }

    /// The same life again: maybe elsewhere, maybe by other paths.
    fn connect_again(&mut self, number: u64, address: &NodeAddress, via: Via, now: Nanos) {
        let peer = self.peers.get_mut(&number).expect("named peers exist");
        let moved = peer.address != *address;
        (peer.address, peer.via, peer.opening) = (address.clone(), via, true);
        for ((kind, transport), way) in self.transports.iter_mut().zip(&mut peer.ways) {
            way.allowed = via == Via::Auto || via == Via::Only(*kind);
            if moved {
                (way.breaker, way.fresh) = (Breaker::new(self.settings.losses), true);
            }
            if moved || !way.allowed {
                transport.close(&address.node);
                (way.connecting, way.failed) = (false, false);
            }
            way.breaker.hurry(now);
        }
        if peer.ways.iter().all(|way| !way.allowed) {
            self.fail_all(number, Failure::Unreachable, "no such path", |_, _| true);
        }
    }

    /// The end of a peer's life here: its transfers fail, and when it is quiet it is gone.
    fn forget(&mut self, number: u64, why: Failure, message: &str) {
        let peer = self.peers.get_mut(&number).expect("named peers exist");
        peer.over = true;
        let node = peer.address.node.clone();
        tracing::info!(peer = %node, incarnation = peer.address.incarnation, "{message}");
        self.names.remove(&node);
        self.active.remove(&number);
        self.transports.iter_mut().for_each(|(_, transport)| transport.close(&node));
        self.fail_all(number, why, message, |_, _| true);
        self.bury(number);
    }

    /// Forgets a peer that is over, once it is quiet.
    fn bury(&mut self, number: u64) {
        if self.peers.get(&number).is_some_and(|peer| peer.over && peer.in_flight == 0)
            && let Some(peer) = self.peers.remove(&number)
        {
            self.past.iter_mut().zip(&peer.ways).for_each(|(past, way)| past.absorb(&way.stats));
        }
    }

    fn peer_stats(&self, peer: &Peer) -> PeerStats {
        let paths = self.transports.iter().zip(&peer.ways).filter(|(_, way)| way.allowed || way.stats.copies > 0);
        let stats =
            |way: &Way| PathStats { copies_in_flight: way.copies as u64, bytes_in_flight: way.bytes, ..way.stats };
        PeerStats {
            peer: peer.address.node.clone(),
            transfers: peer.transfers.len() as u64,
            parts: peer.parts as u64,
            paths: paths.map(|((kind, _), way)| (*kind, stats(way))).collect(),
        }
    }

    /// Why a peer cannot be reached, path by path.
    fn unreachable(&self, number: u64) -> String {
        let peer = &self.peers[&number];
        let node = &peer.address.node;
        let allowed = self.transports.iter().zip(&peer.ways).filter(|(_, way)| way.allowed);
        let why: Vec<String> = allowed
            .map(|((kind, transport), way)| {
                let why = match (transport.path(node), way.breaker.state()) {
                    (Path::Down(why), _) => why,
                    (Path::None, _) => "there is no path".into(),
                    (Path::Connecting, _) => "still connecting".into(),
                    (Path::Up, BreakerState::Closed) => "it stands".into(),
                    (Path::Up, _) => "it stands, but loses what is sent".into(),
                };
                format!("{}: {why}", kind.name())
            })
            .collect();
        match (why.is_empty(), peer.via) {
            (true, Via::Only(kind)) => format!("{node} is to be reached by {} only, which is not there", kind.name()),
            (true, Via::Auto) => format!("{node} cannot be reached: there are no transports"),
            (false, _) => format!("{node} cannot be reached: {}", why.join("; ")),
        }
    }

    // -- transfers ---------------------------------------------------------------------------------------------------

    /// A transfer has something to send.
    fn join(&mut self, id: TransferId) {
        let transfer = self.transfers.get_mut(&id).expect("it has not ended");
        transfer.queued = true;
        let peer = self.peers.get_mut(&transfer.peer).expect("peers outlive their transfers");
        peer.queue.join(transfer.priority, id);
        self.active.insert(transfer.peer);
    }

    /// Decides a transfer's end, unless it is decided. Told at once if nothing of it is under way.
    fn end(&mut self, id: TransferId, ended: Ended) {
        let Some(transfer) = self.transfers.get_mut(&id).filter(|transfer| transfer.ending.is_none()) else { return };
        if let Some(deadline) = transfer.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        transfer.end(ended);
        let (number, priority) = (transfer.peer, transfer.priority);
        let was_queued = std::mem::take(&mut transfer.queued);
        let quiet = transfer.in_flight == 0;
        if was_queued {
            let Self { peers, transfers, .. } = self;
            let peer = peers.get_mut(&number).expect("peers outlive their transfers");
            peer.queue.leaves(priority, |other| waits(transfers, other));
        }
        if quiet {
            self.finish(id);
        }
    }

    /// Nothing of a transfer is under way or will be: it is told.
    fn finish(&mut self, id: TransferId) {
        let mut transfer = self.transfers.remove(&id).expect("it ends once");
        let peer = self.peers.get_mut(&transfer.peer).expect("peers outlive their transfers");
        peer.transfers.remove(&id);
        peer.parts -= transfer.parts();
        self.parts -= transfer.parts();
        if let Some(deadline) = transfer.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        let ended = transfer.outcome();
        if let Ended::Failed { part, why, message } = &ended {
            tracing::warn!(transfer = id, peer = %peer.address.node, part, "failed, {why:?}: {message}");
        }
        self.ended.push((id, ended));
    }

    /// Fails the transfers of a peer that satisfy `which`.
    fn fail_all(&mut self, number: u64, why: Failure, message: &str, which: impl Fn(&Peer, &Transfer) -> bool) {
        let peer = &self.peers[&number];
        let doomed: Vec<TransferId> =
            peer.transfers.iter().copied().filter(|id| which(peer, &self.transfers[id])).collect();
        for id in doomed {
            self.end(id, Ended::Failed { part: 0, why, message: message.into() });
        }
    }

    // -- what comes back ---------------------------------------------------------------------------------------------

    fn completed(&mut self, path: usize, completions: &[Completion], now: Nanos) {
        // Peers with answers, and with losses: a path that breaks loses all its copies, but that is one loss.
        let (mut answered, mut lost): (Vec<u64>, Vec<u64>) = (Vec::new(), Vec::new());
        for completion in completions {
            let Some(flight) = self.land(completion.id) else {
                debug_assert!(false, "{completion:?} was not under way");
                continue;
            };
            debug_assert_eq!(flight.path, path);
            let known = if completion.outcome == Outcome::Lost { &mut lost } else { &mut answered };
            // They come in runs.
            if known.last() != Some(&flight.peer) && !known.contains(&flight.peer) {
                known.push(flight.peer);
            }
            self.piece_completed(flight, completion.outcome, now);
        }
        for number in answered {
            if let Some(peer) = self.peers.get_mut(&number) {
                if peer.ways[path].breaker.state() != BreakerState::Closed {
                    tracing::info!(peer = %peer.address.node, path = self.transports[path].0.name(), "works again");
                }
                peer.ways[path].breaker.answered();
                peer.ways.iter_mut().for_each(|way| way.failed = false);
                peer.answered = peer.round;
            }
        }
        for number in lost {
            let Some(peer) = self.peers.get_mut(&number).filter(|peer| !peer.over) else { continue };
            let way = &mut peer.ways[path];
            if way.allowed && way.breaker.lost(now, &mut self.random) {
                way.failed = true;
                way.stats.rests += 1;
                tracing::warn!(peer = %peer.address.node, path = self.transports[path].0.name(), "keeps losing copies");
            }
        }
    }

    /// Takes a copy out of the books of what is under way.
    fn land(&mut self, id: CopyId) -> Option<Flight> {
        let (index, use_number) = (id as u32, (id >> 32) as u32);
        let (uses, flight) = self.flights.get_mut(index as usize)?;
        if *uses != use_number {
            return None;
        }
        let flight = flight.take()?;
        self.free.push(index);
        let peer = self.peers.get_mut(&flight.peer).expect("peers outlive their copies");
        peer.in_flight -= 1;
        let way = &mut peer.ways[flight.path];
        way.copies -= 1;
        way.bytes -= u64::from(flight.piece.bytes);
        way.full = false;
        Some(flight)
    }

    fn piece_completed(&mut self, flight: Flight, outcome: Outcome, now: Nanos) {
        let Flight { transfer: id, peer: number, path, mut piece, sent } = flight;
        let transfer = self.transfers.get_mut(&id).expect("transfers outlive their copies");
        transfer.in_flight -= 1;
        let peer = self.peers.get_mut(&number).expect("peers outlive their copies");
        let Way { stats, window, bytes: under_way, .. } = &mut peer.ways[path];
        if outcome != Outcome::Lost {
            window.answered(piece.bytes.into(), sent, *under_way, now);
        }
        stats.completed(outcome, transfer.op, piece.bytes.into(), now.saturating_sub(sent));
        let again = match outcome {
            Outcome::Done => {
                transfer.piece_done(&piece);
                false
            }
            Outcome::Lost | Outcome::Corrupt => piece.attempt < transfer.retries && transfer.ending.is_none(),
            Outcome::Fenced | Outcome::Denied => false,
        };
        let (was_queued, decided) = (transfer.queued, transfer.ending.is_some());
        if again {
            stats.retries += 1;
            piece.attempt += 1;
            transfer.resent += 1;
            transfer.give_back(piece);
        } else if outcome != Outcome::Done {
            transfer.piece_missing();
        }
        let over = transfer.in_flight == 0 && (transfer.ending.is_some() || transfer.next().is_none());
        if again && !was_queued {
            self.join(id);
        } else if !again && outcome != Outcome::Done && !decided {
            let (why, message) = self.failure(number, path, outcome, piece.attempt);
            self.end(id, Ended::Failed { part: piece.part as usize, why, message });
        }
        if over && self.transfers.contains_key(&id) {
            self.finish(id);
        }
        self.bury(number);
    }

    fn failure(&self, number: u64, path: usize, outcome: Outcome, attempt: u32) -> (Failure, String) {
        let (node, kind) = (&self.peers[&number].address.node, self.transports[path].0.name());
        let times = attempt + 1;
        match outcome {
            Outcome::Fenced => (Failure::Fenced, format!("the region or slot is over, at {node} or here")),
            Outcome::Denied => {
                (Failure::Denied, format!("outside the region, not whole strips, or not permitted, at {node} or here"))
            }
            Outcome::Corrupt => {
                (Failure::Corrupt, format!("sent {times} times, the checksum did not hold, at last over {kind}"))
            }
            Outcome::Lost | Outcome::Done => {
                let message = format!("sent {times} times and lost, at last over {kind}; {}", self.unreachable(number));
                (Failure::Unreachable, message)
            }
        }
    }

    // -- what goes out -----------------------------------------------------------------------------------------------

    /// Sends what a peer's paths take, and has paths made that are missing.
    fn pump(&mut self, number: u64, now: Nanos) {
        if !self.active.contains(&number) {
            return;
        }
        if let Some(peer) = self.peers.get_mut(&number) {
            peer.tick = None;
        }
        for path in 0..self.transports.len() {
            if !self.has_work(number) {
                break;
            }
            match self.room(number, path, now) {
                Room::None => {}
                Room::Soon => return,
                Room::Probe => self.send(number, path, 1, now),
                Room::Window => {
                    self.send(number, path, usize::MAX, now);
                    break;
                }
            }
            if path + 1 == self.transports.len() {
                self.end_round(number);
            }
        }
        if !self.has_work(number) {
            self.active.remove(&number);
        }
    }

    fn has_work(&mut self, number: u64) -> bool {
        let Self { peers, transfers, .. } = self;
        let Some(peer) = peers.get_mut(&number) else { return false };
        peer.opening || peer.queue.turn(|id| waits(transfers, id)).is_some()
    }

    /// What a path takes now; asks for one that is not there, if it may be tried.
    fn room(&mut self, number: u64, path: usize, now: Nanos) -> Room {
        let Self { peers, transports, random, .. } = self;
        let (kind, transport) = &mut transports[path];
        let Some(peer) = peers.get_mut(&number) else { return Room::None };
        let Peer { address, ways, opening, tick, .. } = peer;
        let way = &mut ways[path];
        if !way.allowed {
            return Room::None;
        }
        let mut state = transport.path(&address.node);
        if let (Path::Down(why), false) = (&state, way.connecting)
            && way.up
        {
            tracing::warn!(peer = %address.node, path = kind.name(), "broke: {why}");
            way.up = false;
        }
        if matches!(state, Path::None | Path::Down(_)) && !way.connecting && way.breaker.permits(now) {
            transport.connect(address);
            way.connecting = true;
            state = transport.path(&address.node);
        }
        let room = match state {
            Path::Up => {
                if !way.up {
                    tracing::info!(peer = %address.node, path = kind.name(), "up");
                }
                (way.connecting, way.fresh, way.up, way.stood, *opening) = (false, false, true, true, false);
                match way.breaker.permits(now) {
                    true if way.breaker.state() == BreakerState::Closed => Room::Window,
                    true if way.copies == 0 => Room::Probe,
                    _ => Room::None,
                }
            }
            Path::Connecting if way.fresh => Room::Soon,
            Path::Connecting => Room::None,
            Path::None | Path::Down(_) => {
                if way.connecting {
                    let why = if let Path::Down(why) = state { why } else { "no path".into() };
                    if way.fresh || way.up {
                        tracing::info!(peer = %address.node, path = kind.name(), "no path: {why}");
                    }
                    (way.connecting, way.fresh, way.up, way.failed) = (false, false, false, true);
                    way.stats.rests += 1;
                    way.breaker.open(now, random);
                }
                Room::None
            }
        };
        // A rest that is over while the path is still being made ends when that does.
        if let BreakerState::Open { until } = way.breaker.state()
            && until > now
        {
            *tick = Some(tick.map_or(until, |tick| tick.min(until)));
        }
        room
    }

    /// If all paths have failed, a round is over: transfers that have waited for too many of them fail.
    fn end_round(&mut self, number: u64) {
        let Some(peer) = self.peers.get_mut(&number) else { return };
        if !peer.ways.iter().filter(|way| way.allowed).all(|way| way.failed) {
            return;
        }
        peer.round += 1;
        peer.opening = false;
        peer.ways.iter_mut().for_each(|way| way.failed = false);
        let (round, message) = (peer.round, self.unreachable(number));
        self.fail_all(number, Failure::Unreachable, &message, |peer, transfer| {
            round - transfer.round.max(peer.answered) > u64::from(transfer.retries)
        });
    }

    /// Submits up to `most` copies to a path, as far as its window allows. The first are on their way while the next are
    /// gathered.
    fn send(&mut self, number: u64, path: usize, most: usize, now: Nanos) {
        let mut batch = std::mem::take(&mut self.batch);
        loop {
            batch.clear();
            self.gather(number, path, most.min(BATCH), now, &mut batch);
            let node = &self.peers[&number].address.node;
            let taken = hand_over(&mut *self.transports[path].1, node, &batch);
            if taken < batch.len() {
                // The last first, so that they go again in the order that they had.
                batch[taken..].iter().rev().for_each(|copy| self.take_back(copy.id));
                let peer = self.peers.get_mut(&number).expect("it has something to send");
                let way = &mut peer.ways[path];
                way.full = way.copies > 0;
                if !way.full {
                    // No completion will wake it: the transport only now puts its own books in order.
                    peer.tick = Some(now + MILLISECOND);
                }
                break;
            }
            if taken < BATCH {
                break;
            }
        }
        self.batch = batch;
    }

    fn gather(&mut self, number: u64, path: usize, most: usize, now: Nanos, batch: &mut Vec<Copy>) {
        let Self { peers, transfers, flights, free, settings, transports, .. } = self;
        let Some(Peer { queue, ways, taken, in_flight, .. }) = peers.get_mut(&number) else { return };
        let kind = transports[path].0;
        let fallback = ways[..path].iter().any(|way| way.allowed && way.stood);
        let way = &mut ways[path];
        let mut empty = Vec::new();
        let mut turn = None;
        while !way.full && batch.len() < most && way.copies < settings.window_copies {
            let Some((priority, id)) = turn.or_else(|| queue.turn(|id| waits(transfers, id))) else { break };
            let transfer = transfers.get_mut(&id).expect("who waits has not ended");
            let piece = transfer.next();
            let bytes = piece.map_or(0, |piece| piece.bytes.into());
            if way.copies > 0 && !way.window.admits(way.bytes, bytes) {
                break;
            }
            transfer.queued = piece.is_some_and(|piece| transfer.sends(&piece));
            queue.sends(priority, bytes, transfer.queued);
            turn = (transfer.queued && queue.is_alone()).then_some((priority, id));
            (transfer.via, *taken) = (Some(kind), Some(path));
            transfer.fallback |= fallback;
            let Some(piece) = piece else {
                empty.push(id);
                continue;
            };
            transfer.in_flight += 1;
            *in_flight += 1;
            way.copies += 1;
            way.bytes += bytes;
            way.window.sent(bytes, way.bytes, now);
            let flight = Flight { transfer: id, peer: number, path, piece, sent: now };
            batch.push(transfer.copy(take_off(flights, free, flight), &piece));
        }
        empty.into_iter().for_each(|id| self.finish(id));
    }

    /// A copy was gathered, but the transport did not take it.
    fn take_back(&mut self, id: CopyId) {
        let flight = self.land(id).expect("it was just gathered");
        let transfer = self.transfers.get_mut(&flight.transfer).expect("transfers outlive their copies");
        transfer.in_flight -= 1;
        transfer.give_back(flight.piece);
        if !std::mem::replace(&mut transfer.queued, true) {
            let peer = self.peers.get_mut(&flight.peer).expect("peers outlive their copies");
            peer.queue.rejoin(transfer.priority, flight.transfer);
        }
    }
}

/// Bytes of the next copy of a transfer that waits in its peer's queue.
fn waits(transfers: &FxHashMap<TransferId, Transfer>, id: TransferId) -> Option<u64> {
    let transfer = transfers.get(&id).filter(|transfer| transfer.queued)?;
    Some(transfer.next().map_or(0, |piece| piece.bytes).into())
}

/// Enters a copy into the books of what is under way.
fn take_off(flights: &mut Vec<(u32, Option<Flight>)>, free: &mut Vec<u32>, flight: Flight) -> CopyId {
    let index = free.pop().unwrap_or_else(|| {
        flights.push((0, None));
        (flights.len() - 1) as u32
    });
    let (uses, place) = &mut flights[index as usize];
    *uses = uses.wrapping_add(1);
    *place = Some(flight);
    u64::from(*uses) << 32 | u64::from(index)
}

/// Submits as many copies as the transport takes, in few calls; returns how many.
fn hand_over(transport: &mut dyn Transport, peer: &NodeId, copies: &[Copy]) -> usize {
    let (mut taken, mut step) = (0, copies.len());
    while taken < copies.len() {
        step = step.min(copies.len() - taken);
        match transport.submit(peer, &copies[taken..taken + step]) {
            Ok(()) => taken += step,
            Err(Busy) if step > 1 => step /= 2,
            Err(Busy) => break,
        }
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::{Access, Buffer};
    use crate::types::RegionId;

    /// Says `Busy` so many times, whatever is under way; then all is done at once.
    struct Late(u32, Vec<Completion>);

    impl Transport for Late {
        fn register(&mut self, _regions: Arc<Regions>) {}

        fn connect(&mut self, _peer: &NodeAddress) {}

        fn path(&self, _peer: &NodeId) -> Path {
            Path::Up
        }

        fn submit(&mut self, _peer: &NodeId, copies: &[Copy]) -> Result<(), Busy> {
            if self.0 > 0 {
                self.0 -= 1;
                return Err(Busy);
            }
            self.1.extend(copies.iter().map(|copy| Completion { id: copy.id, outcome: Outcome::Done }));
            Ok(())
        }

        fn poll(&mut self, into: &mut Vec<Completion>) {
            into.append(&mut self.1);
        }

        fn close(&mut self, _peer: &NodeId) {}
    }

    // Goal: a transport whose books lag behind its completions stops nobody. Method: one that is busy though nothing is
    // under way; only the mover's own tick can go on.
    #[test]
    fn busy_with_nothing_under_way() {
        let mut mover = Mover::new(vec![(Kind::Tcp, Box::new(Late(5, Vec::new())))], Settings::default());
        let regions = Regions::new();
        let local = regions.add(Arc::new(Buffer::owned(100, Access { read: true, write: true })));
        mover.register(regions);
        let peer = NodeAddress { node: "b".into(), address: "b:1".into(), incarnation: 1 };
        mover.connect(&peer, Via::Auto, 0);
        let span = |region| Span { region, life: 0, offset: 0 };
        let part = Part { local: span(local), remote: span(RegionId(999)), bytes: 100, grain: 0 };
        let id = mover.submit(&peer.node, Request::new(Op::Write, [part, part].into()), 0).expect("room");
        // Until it is no more busy nobody but the clock tells the mover to look.
        while let Some(tick) = mover.next_tick() {
            assert!(tick <= 10 * MILLISECOND && mover.progress(id).is_some());
            assert_eq!(mover.poll(tick), []);
            mover.check();
        }
        assert_eq!(mover.poll(10 * MILLISECOND), [(id, Ended::Done { via: Kind::Tcp, fallback: false, retries: 0 })]);
    }
}

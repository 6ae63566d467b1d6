//! The transfer engine of a process: registers memory, reaches peers, moves copies, and tells how they ended.
//!
//! ```text
//!   user -- register, connect, submit, wait --> Endpoint
//!                                                 |-- Driver (endpoint/driver.rs): the mover over its transports
//!                                                 |-- Remote (endpoint/peer.rs), one per peer: a session that finds
//!   a peer's engine <== control session ==========|      regions by name, carries notifications, and notices deaths
//!                   <== copies: shm, rdma, tcp ===|
//!                                                 \-- Inbox (endpoint/inbox.rs): what peers notify us of
//! ```
//!
//! Each engine dials its own session to each peer that it connects to, and answers on those that peers dial: who asks
//! and who answers is never in question.
//!
//! # Promises
//! * A transfer ends once. `Done`: every byte was applied and verified at its destination, and the notification, if there
//!   was one, is in the peer's queue. Whatever the end, this side's memory is touched no more.
//! * The end comes, also after a cancel or a deadline: at most 3 s later, the time after which a transport gives up on a
//!   path where nothing moves.
//! * Memory is given back ([`Registration::unregister`]) only when nobody here touches it.
//! * A handle names a region of one life of an engine. After a restart it is fenced, never taken for another region.
//! * Notifications of one peer arrive in the order in which their transfers' data were applied, each once.

mod copies;
mod driver;
mod handle;
mod inbox;
mod metrics;
mod outbox;
mod peer;
mod region;
mod timer;
mod transfer;

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use copies::{COPIES_LIMIT, Copies, CopiesBuilder};
pub use driver::{Done, Driver, Refused};
pub use handle::RegionHandle;
pub use inbox::Notification;
pub use region::{NAME_LIMIT, Registration};
pub use transfer::Transfer;

use crate::config::{Config, encrypts, open_key};
use crate::error::Error;
use crate::incarnation::new_incarnation;
use crate::keys::Key;
use crate::link::{Connection, Link, Stream, nonce, now, random};
use crate::messages::{EngineMessage, NOTIFICATION_LIMIT, Purpose};
use crate::mover::{self, Ended, Failure, Mover, PathReport, Priority, Progress, Request, Via};
pub use crate::paths::KINDS;
use crate::paths::{self, Doors};
use crate::region::{Access, Buffer, Regions};
use crate::server::{Listener, Threads, accept_all};
use crate::session::{Ended as SessionEnded, Event, Session};
use crate::tls::Side;
use crate::transport::lanes::Settings as LaneSettings;
use crate::transport::{Kind, Op, Path};
use crate::types::{NodeAddress, NodeId};
use crate::wire;
use driver::Bell;
use inbox::{Inbox, say};
use peer::{Beginning, Remote};
use timer::Timer;
use transfer::State as TransferState;

/// Settings of one engine.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The node's id, unique among all engines that meet. None: a random one.
    pub node: Option<NodeId>,
    /// Proven by everybody who connects. None: there is no secret, and only loopback may be listened at.
    pub key: Option<Key>,
    /// `host:port` where peers connect; port 0: any. None: this engine connects to others, and nobody to it.
    pub listen: Option<String>,
    /// `host:port` that peers dial, where it is not what `listen` says.
    pub advertise: Option<String>,
    /// What travels by TCP is encrypted (TLS 1.3); both sides must want it. Rdma cannot be encrypted and is not used
    /// then.
    pub tls: bool,
    /// By which transports copies may travel, out of [`KINDS`].
    pub transports: Vec<Kind>,
    /// Copies carry checksums that are verified where they land.
    pub checksums: bool,
    /// Most lanes to one peer. None: as [`LaneSettings`] says.
    pub lanes: Option<usize>,
    /// Notifications that may wait for the user: 64 MiB of the longest ones. Beyond, peers wait.
    pub inbox: usize,
}

impl Default for Settings {
    fn default() -> Self {
        let transports = KINDS.to_vec();
        Self {
            node: None,
            key: None,
            listen: None,
            advertise: None,
            tls: false,
            transports,
            checksums: true,
            lanes: None,
            inbox: 1024,
        }
    }
}

/// How a list of copies is to be moved.
#[derive(Clone, Debug)]
pub struct How {
    /// What it passes.
    pub priority: Priority,
    /// When to give up, from now.
    pub deadline: Option<Duration>,
    /// How often a piece that was lost or corrupted is sent again.
    pub retries: u32,
    /// Told to the peer's user when all is applied: at most [`NOTIFICATION_LIMIT`] bytes.
    pub notify: Option<Vec<u8>>,
    /// How long to wait for room in the queues, before `Busy` becomes an error.
    pub wait: Duration,
}

impl Default for How {
    fn default() -> Self {
        let (priority, retries) = (Priority::Normal, mover::RETRIES);
        Self { priority, deadline: None, retries, notify: None, wait: Duration::ZERO }
    }
}

/// An engine. Dropping it closes it.
pub struct Endpoint {
    shared: Arc<Shared>,
    accepting: Link,
    threads: Arc<Threads>,
    timer: Mutex<Option<JoinHandle<()>>>,
}

/// What an engine's threads, peers and transfers know.
struct Shared {
    key: Key,
    tls: bool,
    me: NodeAddress,
    kinds: Vec<Kind>,
    regions: Arc<Regions>,
    names: Arc<region::Names>,
    driver: Arc<Driver>,
    timer: Arc<Timer>,
    threads: Arc<Threads>,
    inbox: Inbox,
    /// By node: the handles that are in use.
    peers: Mutex<HashMap<NodeId, Weak<PeerHandle>>>,
    /// All peers that are being reached, by their number.
    remotes: Mutex<HashMap<u64, Arc<Remote>>>,
    doors: Doors,
    last: AtomicU64,
    refused: AtomicU64,
    closed: AtomicBool,
}

impl Endpoint {
    /// Opens everything and serves.
    ///
    /// # Errors
    /// Give up: impossible settings, with what to do.
    pub fn start(settings: Settings) -> Result<Self, Error> {
        let node = match settings.node.clone() {
            Some(node) => node,
            None => format!("engine-{:016x}", u64::from_le_bytes(random()?)),
        };
        let config = Config {
            listen: settings.listen.clone(),
            advertise: settings.advertise.clone(),
            session_key: settings.key,
            tls: settings.tls,
            ..Config::new(node.clone(), 0)
        };
        config.check()?;
        let mut address = String::new();
        let mut listener = None;
        if let Some(listen) = &settings.listen {
            let (socket, bound) = Listener::tcp(listen)?;
            address = settings.advertise.clone().unwrap_or_else(|| bound.to_string());
            listener = Some(socket);
        }
        let me = NodeAddress { node, address, incarnation: new_incarnation() };
        let endpoint = Self::embed(settings, me)?;
        if let Some(listener) = listener {
            let (shared, until) = (endpoint.shared.clone(), endpoint.accepting.clone());
            endpoint.threads.spawn("engine-accept", &endpoint.accepting, move || {
                accept_all(&[listener], &until, |stream| accepted(&shared, stream));
            })?;
        }
        Ok(endpoint)
    }

    /// An engine within a process that listens itself: it hands over what it has accepted by [`Endpoint::serve`].
    ///
    /// # Errors
    /// Give up: impossible settings. Retry: no descriptors or threads.
    pub fn embed(settings: Settings, me: NodeAddress) -> Result<Self, Error> {
        if let ([kind], true) = (&settings.transports[..], settings.tls) {
            encrypts(Via::Only(*kind))?;
        }
        let key = settings.key.unwrap_or_else(open_key);
        let bell = Bell::default();
        let defaults = LaneSettings::default();
        let lanes_per_peer = settings.lanes.unwrap_or(defaults.lanes_per_peer);
        let of_lanes = LaneSettings { checksums: settings.checksums, tls: settings.tls, lanes_per_peer, ..defaults };
        let (transports, doors) = paths::open(&settings.transports, key, &me, &of_lanes, || bell.notify())?;
        let regions = Regions::new();
        let seed = u64::from_le_bytes(random()?);
        let mover = Mover::new(transports, mover::Settings { seed, ..mover::Settings::default() });
        let timer = Timer::new();
        let driver = Driver::new(mover, regions.clone(), &bell, timer.clone());
        let threads = Arc::new(Threads::default());
        let shared = Arc::new(Shared {
            key,
            tls: settings.tls,
            me,
            kinds: settings.transports,
            regions,
            names: Arc::default(),
            driver,
            timer: timer.clone(),
            threads: threads.clone(),
            inbox: Inbox::new(settings.inbox)?,
            peers: Mutex::default(),
            remotes: Mutex::default(),
            doors,
            last: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        });
        let at = shared.clone();
        let thread = std::thread::Builder::new()
            .name("engine-timer".into())
            .spawn(move || timer.run(|now| at.tick(now)))
            .map_err(|error| Error::retry(format!("no thread: {error}")))?;
        Ok(Self { shared, accepting: Link::new()?, threads, timer: Mutex::new(Some(thread)) })
    }

    /// Where it listens, and its life.
    pub fn address(&self) -> &NodeAddress {
        &self.shared.me
    }

    /// By which transports copies may travel.
    pub fn kinds(&self) -> &[Kind] {
        &self.shared.kinds
    }

    /// Its memory, for who keeps an arena there.
    pub fn regions(&self) -> &Arc<Regions> {
        &self.shared.regions
    }

    /// What moves copies, for who needs no handles, sessions and notifications.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.shared.driver
    }

    // -- memory ------------------------------------------------------------------------------------------------------

    /// Makes memory nameable, here and by peers; under a `name` that peers can ask for, if one is given.
    ///
    /// # Errors
    /// Bug: the name is taken or impossible, or the engine is closed.
    pub fn register(&self, buffer: Buffer, name: Option<&str>) -> Result<Registration, Error> {
        self.shared.open()?;
        Registration::new(&self.shared.me, &self.shared.regions, &self.shared.names, buffer, name, true)
    }

    /// As `register`, for memory that cannot be written, by nobody: it is only the source of copies.
    ///
    /// # Errors
    /// As `register`. Bug: peers would be permitted to write it.
    pub fn register_source(&self, buffer: Buffer, name: Option<&str>) -> Result<Registration, Error> {
        self.shared.open()?;
        if buffer.access().write {
            return Err(Error::bug(
                "memory that cannot be written is to be written by peers: permit them only to read",
            ));
        }
        Registration::new(&self.shared.me, &self.shared.regions, &self.shared.names, buffer, name, false)
    }

    /// Registers memory of the engine's own, zeroed, which engines of this host can map.
    ///
    /// # Errors
    /// As `register`. Give up: no memory.
    pub fn allocate(&self, bytes: usize, access: Access, name: Option<&str>) -> Result<Registration, Error> {
        // No mapping has 0 bytes.
        let buffer = if bytes == 0 { Buffer::owned(0, access) } else { Buffer::shared(bytes as u64, access)? };
        self.register(buffer, name)
    }

    // -- peers -------------------------------------------------------------------------------------------------------

    /// Reaches the engine that listens at `host:port`, and returns when copies would get through. Connecting twice to
    /// one peer gives the same connection, which lasts until the last of its handles and transfers is gone.
    ///
    /// # Errors
    /// Retry: it does not answer within `timeout`, or no path to it stands. Give up: the secrets differ, or that
    /// transport is not built in. Bug: it is connected already by other paths.
    pub fn connect(&self, address: &str, via: Via, timeout: Duration) -> Result<Peer, Error> {
        self.shared.open()?;
        if self.shared.tls {
            encrypts(via)?;
        }
        let until = Instant::now() + timeout;
        if let Via::Only(kind) = via
            && !self.shared.kinds.contains(&kind)
        {
            return Err(Error::give_up(format!("this engine has no {}: start it with that transport", kind.name())));
        }
        let known = self.shared.peers().values().filter_map(Weak::upgrade).find(|peer| peer.remote.address == address);
        let peer = match known.filter(|peer| !peer.remote.is_closed()) {
            Some(peer) => Peer(peer),
            None => self.dial(address, via, until)?,
        };
        if peer.0.remote.via != via {
            let by = |via: Via| match via {
                Via::Auto => "auto",
                Via::Only(kind) => kind.name(),
            };
            return Err(Error::bug(format!(
                "{} is connected by {} already, not by {}: close that connection first",
                peer.node(),
                by(peer.0.remote.via),
                by(via)
            )));
        }
        peer.wait_for_path(until)?;
        Ok(peer)
    }

    fn dial(&self, address: &str, via: Via, until: Instant) -> Result<Peer, Error> {
        let shared = &self.shared;
        let remote = Remote::new(address, via, shared.number())?;
        shared.remotes().insert(remote.number, remote.clone());
        let (at, to) = (shared.clone(), remote.clone());
        let started = self.threads.spawn("engine-peer", &remote.link, move || to.run(&at));
        let met = started.and_then(|()| remote.met(until));
        let node = match met {
            Ok(node) => node,
            Err(error) => {
                remote.close("not reached");
                shared.remotes().remove(&remote.number);
                return Err(error);
            }
        };
        let peer = Peer(Arc::new(PeerHandle { shared: shared.clone(), remote }));
        let mut peers = shared.peers();
        if let Some(known) = peers.get(&node.node).and_then(Weak::upgrade).filter(|known| !known.remote.is_closed()) {
            // The same peer by another address. Dropping this handle closes this session, and no paths.
            drop(peers);
            return Ok(Peer(known));
        }
        peers.insert(node.node.clone(), Arc::downgrade(&peer.0));
        drop(peers);
        shared.driver.connect(&node, via, peer.0.remote.number);
        Ok(peer)
    }

    // -- transfers ---------------------------------------------------------------------------------------------------

    /// Begins to move these copies: all remote ends must be of this peer.
    ///
    /// # Errors
    /// Bug: not permitted by a handle, overlapping destinations, a region that was unregistered, another peer's handle,
    /// a notification that is too long. Retry: the queues are full (and stay so for `how.wait`). What goes wrong later,
    /// a peer's restart included, is the transfer's outcome.
    pub fn submit(&self, peer: &Peer, op: Op, copies: &Copies, how: How) -> Result<Transfer, Error> {
        let shared = &self.shared;
        shared.open()?;
        copies.check(op)?;
        if !Arc::ptr_eq(shared, &peer.0.shared) {
            return Err(Error::bug("this peer was connected by another engine"));
        }
        if copies.locals.iter().any(|region| shared.regions.get(*region).is_none()) {
            return Err(Error::bug("a local region of these copies was unregistered, or is another engine's"));
        }
        if let Some(length) = how.notify.as_ref().map(Vec::len).filter(|length| *length > NOTIFICATION_LIMIT) {
            return Err(Error::bug(format!(
                "a notification of {length} bytes, at most {NOTIFICATION_LIMIT} are possible"
            )));
        }
        let state = TransferState::new(shared.number(), copies.len(), copies.bytes());
        let deadline = how.deadline.map(|within| now().saturating_add(nanos(within)));
        let mut result = peer.begin(op, copies, &how, deadline, &state);
        if !how.wait.is_zero() && result.as_ref().is_err_and(Busy::is) {
            shared.driver.wait_until(Instant::now() + how.wait, || {
                result = peer.begin(op, copies, &how, deadline, &state);
                !result.as_ref().is_err_and(Busy::is)
            });
        }
        result.map_err(Busy::error)?;
        if let Some(deadline) = deadline.filter(|_| how.notify.is_some()) {
            shared.timer.arm(deadline);
        }
        tracing::debug!(
            transfer = state.number, peer = %peer.node(), ?op, copies = state.copies, bytes = state.bytes, "begins"
        );
        Ok(Transfer { state, peer: peer.clone() })
    }

    /// As `submit`, and waits until it has ended, at most `timeout` (then it goes on). The quickest way for a small copy:
    /// no other thread has to be woken for its answer.
    ///
    /// # Errors
    /// As `submit`; how it ended, its `result` says.
    pub fn run(&self, peer: &Peer, op: Op, copies: &Copies, how: How, timeout: Duration) -> Result<Transfer, Error> {
        // Taken over before it begins: else the answer may be there before, and wakes a thread.
        let small = transfer::is_small(copies.len(), copies.bytes());
        let hand = if small { transfer::helper(peer).and_then(|helper| helper.take_next()) } else { None };
        let transfer = self.submit(peer, op, copies, how)?;
        transfer.wait_with(hand, timeout);
        Ok(transfer)
    }

    // -- notifications -----------------------------------------------------------------------------------------------

    /// Takes notifications that have come, at most so many.
    pub fn notifications(&self, at_most: usize) -> Vec<Notification> {
        self.shared.inbox.take(at_most)
    }

    /// Waits until a notification is there; false if the time is over before, or the engine is closed.
    pub fn wait_notification(&self, timeout: Duration) -> bool {
        self.shared.inbox.wait(timeout)
    }

    /// Readable while notifications wait.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.inbox.as_fd()
    }

    // -- the rest ----------------------------------------------------------------------------------------------------

    /// All counters by Prometheus sample name.
    pub fn samples(&self) -> Vec<(String, u64)> {
        metrics::samples(&self.shared)
    }

    /// For who listens himself: serves a connection whose dialler has proven itself, until it ends or is handed on.
    ///
    /// # Errors
    /// What ended it, where that is news.
    pub fn serve(&self, connection: Connection, purpose: Purpose, link: &Link) -> Result<(), Error> {
        self.shared.serve(connection, purpose, link)
    }

    /// Ends all transfers, sessions and threads; returns when memory is touched no more. Idempotent. Must not be called
    /// from a callback of a transfer.
    pub fn close(&self) {
        let shared = &self.shared;
        if shared.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        self.accepting.close("the engine is closed");
        shared.driver.close();
        let remotes: Vec<Arc<Remote>> = shared.remotes().drain().map(|(_, remote)| remote).collect();
        for remote in remotes {
            remote.close("the engine is closed");
        }
        shared.inbox.close("the engine is closed");
        self.threads.stop("the engine is closed");
        shared.timer.stop();
        if let Some(thread) = lock(&self.timer).take() {
            // Its panic has been printed by the hook.
            let _ = thread.join();
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.close();
    }
}

/// A connection to a peer. Clones are the same one; it ends with the last of them and of its transfers.
#[derive(Clone)]
pub struct Peer(Arc<PeerHandle>);

struct PeerHandle {
    shared: Arc<Shared>,
    remote: Arc<Remote>,
}

impl Drop for PeerHandle {
    fn drop(&mut self) {
        self.close();
    }
}

impl PeerHandle {
    fn close(&self) {
        let number = self.remote.number;
        if let Some(node) = self.remote.close("closed") {
            self.shared.driver.disconnect(&node.node, number);
        }
        self.shared.remotes().remove(&number);
        let mut peers = self.shared.peers();
        // Only if it is still this one: another may have come since.
        peers.retain(|_, peer| peer.strong_count() > 0 && !std::ptr::eq(peer.as_ptr(), self));
    }
}

/// Why a transfer did not begin.
enum Busy {
    /// There is no room now.
    Full(String),
    /// For good.
    Error(Error),
}

impl Busy {
    fn is(&self) -> bool {
        matches!(self, Self::Full(_))
    }

    fn error(self) -> Error {
        match self {
            Self::Full(message) => Error::retry(message),
            Self::Error(error) => error,
        }
    }
}

impl Peer {
    /// Its node's id.
    pub fn node(&self) -> NodeId {
        self.address().node
    }

    /// The latest life of it that answered.
    pub fn address(&self) -> NodeAddress {
        let unknown = || unreachable!("a handle is made when the peer has answered");
        self.0.remote.node().unwrap_or_else(unknown)
    }

    /// By which paths it was asked to be reached.
    pub fn via(&self) -> Via {
        self.0.remote.via
    }

    /// How the paths to it are, the preferred first: which one is taken, and why not the others.
    pub fn paths(&self) -> Vec<PathReport> {
        self.0.shared.driver.paths(&self.node())
    }

    /// Why its engine does not answer, if it does not.
    pub fn down(&self) -> Option<Error> {
        self.0.remote.down()
    }

    /// Transfers that have not ended.
    pub fn transfers(&self) -> usize {
        self.0.remote.pending()
    }

    /// The handle of the region that it has registered under this name.
    ///
    /// # Errors
    /// Retry: it has none (yet), or does not answer within `timeout`. Bug: closed.
    pub fn find(&self, name: &str, timeout: Duration) -> Result<RegionHandle, Error> {
        region::check_name(name)?;
        self.0.remote.find(name, timeout)
    }

    /// How long its engine takes to answer a question on the control session.
    ///
    /// # Errors
    /// Retry: it does not answer within `timeout`. Bug: closed.
    pub fn round_trip(&self, timeout: Duration) -> Result<Duration, Error> {
        let asked = Instant::now();
        // No region has an empty name, so the answer is short.
        self.0.remote.ask("", timeout)?;
        Ok(asked.elapsed())
    }

    /// Ends the connection: its transfers fail, their memory is quiet when they have. Idempotent.
    pub fn close(&self) {
        self.0.close();
    }

    fn begin(
        &self,
        op: Op,
        copies: &Copies,
        how: &How,
        deadline: Option<u64>,
        state: &Arc<TransferState>,
    ) -> Result<(), Busy> {
        let (shared, remote, number) = (&self.0.shared, &self.0.remote, state.number);
        let payload = how.notify.clone();
        let beginning = Beginning { peer: self.clone(), transfer: state.clone(), payload, deadline };
        let life = remote.begin(beginning)?;
        let of_other_life = |message: String, why| {
            remote.moved(number, Ended::Failed { part: 0, why, message });
            Ok(())
        };
        if let Some((node, incarnation)) = &copies.life {
            if *node != life.node {
                remote.unbegin(number);
                return Err(Busy::Error(Error::bug(format!("these handles are of {node}, the peer is {}", life.node))));
            }
            if *incarnation < life.incarnation {
                return of_other_life(format!("{node} has restarted, the region of before is gone"), Failure::Fenced);
            }
            if *incarnation > life.incarnation {
                return of_other_life(
                    format!("{node} has restarted, and is not reached again yet"),
                    Failure::Unreachable,
                );
            }
        }
        let request =
            Request { op, parts: copies.parts.clone(), priority: how.priority, deadline, retries: how.retries };
        let to = remote.clone();
        let done = Box::new(move |ended: Ended| {
            log(number, &to, &ended);
            to.moved(number, ended);
        });
        match shared.driver.submit(&life.node, life.incarnation, request, done) {
            Ok(id) => {
                if remote.begun(number, id) {
                    shared.driver.cancel(id);
                }
                Ok(())
            }
            Err(Refused::Stale) => {
                of_other_life(format!("{} has restarted, the region of before is gone", life.node), Failure::Fenced)
            }
            Err(Refused::Busy) => {
                remote.unbegin(number);
                Err(Busy::Full(format!("too much is queued for {}: wait for a transfer to end", life.node)))
            }
            Err(Refused::Closed) => {
                remote.unbegin(number);
                Err(Busy::Error(closed()))
            }
        }
    }

    fn driver(&self) -> &Arc<Driver> {
        &self.0.shared.driver
    }

    fn cancel(&self, number: u64, wanted: Ended) {
        if let Some(id) = self.0.remote.stop(number, wanted) {
            self.0.shared.driver.cancel(id);
        }
    }

    fn progress(&self, number: u64) -> Option<Progress> {
        match self.0.remote.progress(number)? {
            (_, Some(progress)) => Some(progress),
            (id, None) => self.0.shared.driver.progress(id?),
        }
    }

    /// Waits until copies would get through.
    fn wait_for_path(&self, until: Instant) -> Result<(), Error> {
        let mut why = None;
        self.0.shared.driver.wait_until(until, || {
            let paths = self.paths();
            // A better one that is being made is waited for, so that a start is no race between paths.
            let undecided = paths.iter().take_while(|report| report.path != Path::Up);
            let decided = undecided.clone().all(|report| matches!(report.path, Path::Down(_)));
            why = (undecided.count() == paths.len()).then(|| tell(&paths));
            decided && !paths.is_empty()
        });
        match why {
            None => Ok(()),
            Some(paths) => Err(Error::retry(format!("{} answers, but no copies would reach it: {paths}", self.node()))),
        }
    }
}

/// Why none of the paths stands.
fn tell(paths: &[PathReport]) -> String {
    let each = paths.iter().map(|report| match &report.path {
        Path::Down(why) => format!("{}: {why}", report.kind.name()),
        _ => format!("{}: still connecting", report.kind.name()),
    });
    each.collect::<Vec<_>>().join("; ")
}

fn log(number: u64, remote: &Remote, ended: &Ended) {
    let peer = &remote.address;
    match ended {
        Ended::Done { via, fallback, retries } => {
            tracing::debug!(transfer = number, %peer, via = via.name(), fallback, retries, "moved");
            if remote.fell_back(*fallback) {
                tracing::warn!(transfer = number, %peer, via = via.name(), "fell back: a better path has broken");
            }
        }
        Ended::Failed { why, message, .. } => {
            tracing::warn!(transfer = number, %peer, ?why, "failed: {message}");
        }
        Ended::Cancelled => tracing::debug!(transfer = number, %peer, "cancelled"),
        Ended::DeadlinePassed => tracing::info!(transfer = number, %peer, "its deadline passed"),
    }
}

impl Shared {
    fn open(&self) -> Result<(), Error> {
        if self.closed.load(Ordering::SeqCst) { Err(closed()) } else { Ok(()) }
    }

    fn number(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn peers(&self) -> MutexGuard<'_, HashMap<NodeId, Weak<PeerHandle>>> {
        lock(&self.peers)
    }

    fn remotes(&self) -> MutexGuard<'_, HashMap<u64, Arc<Remote>>> {
        lock(&self.remotes)
    }

    fn tick(&self, now: u64) {
        self.driver.pump();
        let remotes: Vec<Arc<Remote>> = self.remotes().values().cloned().collect();
        for remote in remotes {
            if let Some(at) = remote.expire(now) {
                self.timer.arm(at);
            }
        }
    }

    fn serve(&self, mut connection: Connection, purpose: Purpose, link: &Link) -> Result<(), Error> {
        let number = self.number();
        match purpose {
            Purpose::Engine { node } | Purpose::Lane { node, .. } | Purpose::Rdma { node, .. }
                if node.node == self.me.node =>
            {
                connection.refuse("your node id is mine: give every engine its own");
            }
            Purpose::Engine { node } | Purpose::Lane { node, .. } | Purpose::Rdma { node, .. }
                if !self.doors.knows(&node) =>
            {
                connection.refuse(crate::lives::STALE);
            }
            Purpose::Engine { node } => {
                connection.welcome();
                self.inbox.enter(number, &node, link);
                let ended = connection.drive(|payload, _| {
                    let message: EngineMessage = wire::decode(&payload)?;
                    self.asked(number, &node, link, message)
                });
                self.inbox.leave(number, &node.node, link);
                tracing::debug!(peer = %node.node, "its session ended: {ended}");
            }
            Purpose::Lane { .. } | Purpose::Rdma { .. } => self.doors.serve(connection, purpose, link)?,
            _ => connection.refuse("this is a transfer engine: only other engines connect to it"),
        }
        Ok(())
    }

    /// A peer's question or notification.
    fn asked(&self, number: u64, from: &NodeAddress, link: &Link, message: EngineMessage) -> Result<(), SessionEnded> {
        match message {
            EngineMessage::Find { ticket, name } => {
                say(link, &EngineMessage::Found { ticket, region: self.names.find(&name) });
            }
            EngineMessage::Notify { number: place, payload } if payload.len() <= NOTIFICATION_LIMIT => {
                self.inbox.offer(number, from, place, payload);
            }
            _ => return Err(SessionEnded::Closed("it said what a dialler does not say".into())),
        }
        Ok(())
    }
}

fn accepted(shared: &Arc<Shared>, stream: Stream) {
    let Ok(link) = Link::new() else { return };
    let (at, until) = (shared.clone(), link.clone());
    let started = shared.threads.spawn("engine-connection", &link, move || {
        if let Err(error) = welcome(&at, stream, &until) {
            at.refused.fetch_add(1, Ordering::Relaxed);
            tracing::info!("a connection was refused: {error}");
        }
    });
    if let Err(error) = started {
        shared.refused.fetch_add(1, Ordering::Relaxed);
        tracing::warn!("a connection was closed: {error}");
    }
}

fn welcome(shared: &Arc<Shared>, stream: Stream, link: &Link) -> Result<(), Error> {
    let session = Session::accept(shared.key, shared.me.clone(), nonce()?, now());
    let mut connection = Connection::new(stream.secured(shared.tls, Side::Acceptor)?, session, link.clone())?;
    match connection.handshake()? {
        Event::Proven(purpose) => shared.serve(connection, purpose, link),
        event => Err(Error::bug(format!("{event:?} on an accepted session"))),
    }
}

fn closed() -> Error {
    Error::bug("the engine is closed")
}

/// A duration in nanoseconds; 584 years are the most.
fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Maps and counters; single inserts and removes cannot be left half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

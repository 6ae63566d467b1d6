//! The daemon: one thread owns the engine; sockets, clients, peers and the conductor feed it, and it commands them.
//!
//! ```text
//!  local clients --\                                          /--> links of clients (unix socket, or mailbox inside)
//!  peers ----------+--> Happening (bounded channel) --> Actor +--> links of peers, dials
//!  conductor ------+                       engine.handle()    +--> tcp transport (lanes)
//!  lanes ----------/                                          \--> link of the conductor
//! ```
//!
//! The actor never blocks on any of them: what cannot be sent at once is dropped with its link, or (copies) waits in a
//! bounded backlog. Readers block on the channel while the actor is busy: back-pressure.

mod asked;
mod health;
mod lines;
mod members;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, RwLock, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, poll};

use crate::admin::Verified;
use crate::carrier::Carrier;
use crate::client::{ClientEvent, PoolClient};
use crate::config::Config;
use crate::engine::{Engine, Input, Output, Settings};
use crate::error::Error;
use crate::http;
use crate::incarnation::new_incarnation_after;
use crate::keys::{Key, watch_key};
use crate::link::{Connection, DIAL_WITHIN, Link, Stream, dial_tcp, nonce, now};
use crate::lives::STALE;
use crate::mailbox::{Mailbox, Wake, poll_timeout};
use crate::memory::Arena;
use crate::messages::{DaemonOrder, DaemonReport, EngineMessage, LocalEvent, LocalRequest, PeerMessage, Purpose};
use crate::mover::{self, Mover, Via};
use crate::objects::book::Book;
use crate::objects::catalog::Catalog;
use crate::objects::pool::Pool;
use crate::objects::reader::{Answer, Reader};
use crate::paths::{self, Doors, Notify};
use crate::pool::disk::Ssd;
use crate::pool::tier::{Capacity, Tier};
use crate::server::{Listener, Threads, accept_all};
use crate::session::{Ended, Event, Session};
use crate::tls::Side;
use crate::transport::lanes::Settings as LaneSettings;
use crate::types::{ClientId, Incarnation, Layout, Nanos, NodeAddress, NodeId};
use crate::wire;

use lines::Lines;
use members::Members;

/// Happenings that may wait for the actor.
const HAPPENINGS: usize = 4096;
/// Happenings taken between two looks at the transport.
const BATCH: usize = 256;
/// How often the engine learns the time, at least.
const TICK: Duration = Duration::from_millis(50);
/// Between two attempts to reach the conductor: from, to.
const REDIAL: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// How long a stop goes on writing to SSD what lies in DRAM only.
const LEAVE_WITHIN: Duration = Duration::from_secs(3);

/// A dump goes on when less than this waits for the conductor: an eighth of what may wait; a step is far less than one.
const DUMP_ROOM: usize = 8 << 20;

/// How long the conductor may be away before the log says so.
const OUTAGE: Duration = Duration::from_secs(5);

/// What the actor is told.
pub(crate) enum Happening {
    /// A client is here; its first request follows.
    Attach { client: ClientId, port: Port },
    /// A client's request.
    Local { client: ClientId, request: LocalRequest },
    /// A client has let go of the arena, or its process is dead.
    LocalGone { client: ClientId },
    /// A session with a peer stands.
    PeerUp { number: u64, peer: NodeAddress, link: Link, dialled: bool },
    /// A peer said something on that session.
    PeerSaid { number: u64, peer: NodeId, message: PeerMessage },
    /// That session is over.
    PeerGone { number: u64, peer: NodeAddress },
    /// No session came of a dial.
    DialFailed { peer: NodeAddress },
    /// A listed member, by its place in the list, is reached.
    MemberUp { at: usize, peer: NodeAddress },
    /// It is not any more, or was not.
    MemberGone { at: usize },
    /// The conductor's endpoint is reached.
    ConductorUp { link: Link },
    /// It is not any more.
    ConductorGone,
    /// The conductor's order.
    Order(DaemonOrder),
    /// The transport has completions.
    Completions,
    /// The SSDs have something to tell.
    Tier,
    /// Somebody in this process asks something, between two inputs.
    Ask(Question),
    /// The end.
    Stop,
}

/// How a client is reached.
pub(crate) enum Port {
    /// Over its unix socket.
    Socket(Link),
    /// In this process.
    Inside(Arc<Mailbox<ClientEvent>>),
}

/// What is asked of the actor, on its own thread. It must be quick, and must not wait.
pub(crate) struct Question(Box<dyn FnOnce(&mut Actor) + Send>);

/// A running daemon. Dropping it stops it.
pub struct Daemon {
    shared: Arc<Shared>,
    actor: Option<JoinHandle<()>>,
    threads: Arc<Threads>,
    accepting: Link,
    socket: Option<PathBuf>,
    http: Option<SocketAddr>,
    ended: Arc<Wake>,
}

/// What all of a daemon's threads know.
struct Shared {
    key: Key,
    tls: bool,
    me: NodeAddress,
    happenings: SyncSender<Happening>,
    threads: Arc<Threads>,
    doors: Doors,
    catalog: Arc<Catalog>,
    /// Whose turn it is to have the SSDs verified.
    scrubbing: Mutex<()>,
    book: Arc<RwLock<Book>>,
    lines: Lines,
    /// When it began, in [`now`]'s time.
    began: Nanos,
    /// True while connections are accepted.
    listening: AtomicBool,
    /// Where the conductor is, and where this daemon's metrics are.
    conductor: Option<String>,
    http: Option<String>,
}

impl Daemon {
    /// Opens everything and serves.
    ///
    /// # Errors
    /// Give up: an impossible configuration, with what to do.
    pub fn start(config: &Config) -> Result<Self, Error> {
        config.check()?;
        let mut listeners = Vec::new();
        let mut address = String::new();
        if let Some(listen) = &config.listen {
            let (listener, bound) = Listener::tcp(listen)?;
            address = config.advertise.clone().unwrap_or_else(|| bound.to_string());
            listeners.push(listener);
        }
        if let Some(path) = &config.socket {
            listeners.push(Listener::unix(path)?);
        }
        let http = config.http.as_deref().map(Listener::tcp).transpose()?;
        let incarnation = new_incarnation_after(&life_files(config));
        let me = NodeAddress { node: config.node.clone(), address, incarnation };
        let (happenings, inbox) = sync_channel(HAPPENINGS);
        let notify = happenings.clone();
        // If the channel is full the actor is awake and looks at the transport anyway.
        let bell = || -> Notify {
            let notify = notify.clone();
            Box::new(move || drop(notify.try_send(Happening::Completions)))
        };
        // All of them, whichever is used to reach others: a peer may have been told otherwise. Without a listener there
        // are no peers.
        let kinds = if config.listen.is_some() { paths::KINDS } else { &[] };
        let lanes = LaneSettings { tls: config.tls, ..LaneSettings::default() };
        let (transports, doors) = paths::open(kinds, config.key(), &me, &lanes, bell)?;
        let threads = Arc::new(Threads::default());
        let transports_shown = match config.transport {
            Via::Auto => kinds.to_vec(),
            Via::Only(kind) => vec![kind],
        };
        let quotas = config.quotas.clone();
        let settings = Settings { transports: transports_shown, quotas, ..Settings::new(config.dram_bytes) };
        let rung = Arc::new(AtomicBool::new(false));
        let engine = match open_ssd(config, &rung, &happenings)? {
            Some(ssd) => Engine::with_tier(me.clone(), settings, Box::new(ssd)),
            None => Engine::new(me.clone(), settings),
        };
        let shared = Arc::new(Shared {
            key: config.key(),
            tls: config.tls,
            me,
            happenings,
            threads: threads.clone(),
            doors,
            catalog: engine.catalog().clone(),
            scrubbing: Mutex::default(),
            book: engine.book(),
            lines: Lines::default(),
            began: now(),
            listening: AtomicBool::new(!listeners.is_empty()),
            conductor: config.conductor.clone(),
            http: http.as_ref().map(|(_, bound)| bound.to_string()),
        });
        let weak = Arc::downgrade(&shared);
        shared.catalog.set_look(Box::new(move |keys| {
            let shared = weak.upgrade()?;
            shared.lines.look(&shared, &shared.book, keys)
        }));
        let mover = Mover::new(transports, mover::Settings::default());
        let actor = Actor::new(shared.clone(), engine, mover, config, rung);
        let (accepting, ended) = (Link::new()?, Arc::new(Wake::new()?));
        let end = EndActor { threads: threads.clone(), accepting: accepting.clone(), ended: ended.clone() };
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || {
                let _end = end;
                actor.run(&inbox);
            })
            .map_err(|error| Error::retry(format!("no thread: {error}")))?;
        let daemon = Self {
            shared: shared.clone(),
            actor: Some(thread),
            threads: threads.clone(),
            accepting: accepting.clone(),
            socket: config.socket.clone(),
            http: http.as_ref().map(|(_, bound)| *bound),
            ended,
        };
        if !listeners.is_empty() {
            let (at, until) = (shared.clone(), accepting.clone());
            threads.spawn("accept", &accepting, move || {
                let _down = NotListening(at.clone());
                accept_all(&listeners, &until, |stream| accepted(&at, stream));
            })?;
        }
        if let Some((listener, bound)) = http {
            let beyond = !bound.ip().is_loopback();
            let key = config.session_key.as_ref().filter(|_| beyond).map(watch_key).transpose()?;
            let at = shared.clone();
            http::serve(listener, &accepting, &threads, move |request| health::answer(&at, key.as_deref(), request))?;
        }
        if let Some(conductor) = config.conductor.clone() {
            let (link, at) = (Link::new()?, shared);
            let until = link.clone();
            threads.spawn("conductor", &link, move || report(&at, &conductor, &until))?;
        }
        Ok(daemon)
    }

    /// Where it listens, and its life.
    pub fn address(&self) -> &NodeAddress {
        &self.shared.me
    }

    /// Where metrics and health are served, if they are.
    pub fn http(&self) -> Option<SocketAddr> {
        self.http
    }

    /// Readable once the engine has ended, by `stop` or by a failure.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// A client within this process.
    ///
    /// # Errors
    /// Give up: an impossible layout, or no room for its blocks. Retry: the daemon has stopped.
    pub fn attach(&self, incarnation: Incarnation, layout: Layout, namespace: u64) -> Result<PoolClient, Error> {
        let mailbox = Arc::new(Mailbox::new(crate::client::EVENT_LIMIT)?);
        let client = self.threads.number();
        let port = Port::Inside(mailbox.clone());
        tracing::debug!(client, incarnation, "a client within the process attaches");
        self.shared
            .happenings
            .send(Happening::Attach { client, port })
            .map_err(|_| Error::retry("the daemon has stopped"))?;
        PoolClient::inside(self.shared.happenings.clone(), client, mailbox, layout, namespace)
    }

    /// The pool of objects, for this process.
    ///
    /// `object_key`: names become keys by it (`derive_key` with `object`).
    ///
    /// # Errors
    /// Retry: the daemon has stopped.
    pub fn objects(&self, object_key: Key) -> Result<Pool, Error> {
        let mailbox = Arc::new(Mailbox::new(crate::client::EVENT_LIMIT)?);
        let client = self.threads.number();
        let port = Port::Inside(mailbox.clone());
        self.shared
            .happenings
            .send(Happening::Attach { client, port })
            .map_err(|_| Error::retry("the daemon has stopped"))?;
        let (happenings, catalog) = (self.shared.happenings.clone(), self.shared.catalog.clone());
        Pool::inside(happenings, client, mailbox, catalog, object_key)
    }

    /// All counters by Prometheus sample name.
    pub fn counters(&self) -> Result<Vec<(String, u64)>, Error> {
        self.shared.ask(asked::PATIENCE, |actor| actor.engine.counters())
    }

    /// Takes on nothing new from now on; see [`Engine::drain`]. What is returned becomes readable when nothing is held, and
    /// what nobody else has is on other nodes, as far as the conductor wants that.
    ///
    /// # Errors
    /// Retry: the daemon has stopped, or is too busy to be told.
    pub fn drain(&self) -> Result<Arc<Wake>, Error> {
        self.shared.drain(true)
    }

    /// Ends all links and threads; returns when they are gone. Idempotent.
    pub fn stop(&mut self) {
        let Some(actor) = self.actor.take() else { return };
        self.accepting.close("the daemon stops");
        // Fails only if the actor has ended by itself.
        let _ = self.shared.happenings.send(Happening::Stop);
        let _ = actor.join();
        self.threads.stop("the daemon stops");
        if let Some(socket) = &self.socket {
            // Somebody else may have removed it; nothing depends on it any more.
            let _ = std::fs::remove_file(socket);
        }
    }
}

/// The SSDs, if there are any, with all that they have kept.
fn open_ssd(config: &Config, rung: &Arc<AtomicBool>, happenings: &SyncSender<Happening>) -> Result<Option<Ssd>, Error> {
    if config.ssd_dirs.is_empty() {
        return Ok(None);
    }
    let (rung, happenings) = (rung.clone(), happenings.clone());
    let notify = move || {
        // Once until it is looked at. If the channel is full the actor is awake, and looks anyway.
        if !rung.swap(true, Ordering::AcqRel) {
            drop(happenings.try_send(Happening::Tier));
        }
    };
    let ssd = Ssd::open(&config.ssd_dirs, config.ssd_bytes, notify)?;
    let Capacity { limit, used, blocks, .. } = ssd.capacity();
    tracing::info!("SSD: {blocks} blocks are here, in {used} of {limit} bytes; they move by {}", ssd.io());
    Ok(Some(ssd))
}

/// However the engine's thread ends, nobody is left talking to it: all links close.
struct EndActor {
    threads: Arc<Threads>,
    accepting: Link,
    ended: Arc<Wake>,
}

impl Drop for EndActor {
    fn drop(&mut self) {
        self.accepting.close("the daemon has stopped");
        self.threads.close("the daemon has stopped");
        self.ended.set();
    }
}

/// However the accepting thread ends, nobody is told that connections are accepted.
struct NotListening(Arc<Shared>);

impl Drop for NotListening {
    fn drop(&mut self) {
        self.0.listening.store(false, Ordering::Relaxed);
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Where the number of a node's life is written down: wherever something of it outlives the process.
fn life_files(config: &Config) -> Vec<PathBuf> {
    let beside = config.socket.iter().map(|socket| {
        let mut name = socket.clone().into_os_string();
        name.push(".life");
        PathBuf::from(name)
    });
    config.ssd_dirs.iter().map(|directory| directory.join("life")).chain(beside).collect()
}

impl Shared {
    fn tell(&self, happening: Happening) {
        // It fails only when the actor has ended; then all links are being closed.
        let _ = self.happenings.send(happening);
    }
}

// -- incoming connections ------------------------------------------------------------------------------------------

fn accepted(shared: &Arc<Shared>, stream: Stream) {
    let Ok(link) = Link::new() else { return };
    let (at, until) = (shared.clone(), link.clone());
    let started = shared.threads.spawn("connection", &link, move || {
        if let Err(error) = serve(&at, stream, &until) {
            tracing::warn!("a connection was refused: {error}");
        }
    });
    if let Err(error) = started {
        tracing::warn!("a connection was closed: {error}");
    }
}

fn serve(shared: &Arc<Shared>, stream: Stream, link: &Link) -> Result<(), Error> {
    let local = matches!(stream, Stream::Unix(_));
    let session = Session::accept(shared.key, shared.me.clone(), nonce()?, now());
    let mut connection = Connection::new(stream.secured(shared.tls, Side::Acceptor)?, session, link.clone())?;
    let purpose = match connection.handshake()? {
        Event::Proven(purpose) => purpose,
        event => return Err(Error::bug(format!("{event:?} on an accepted session"))),
    };
    let number = shared.threads.number();
    match purpose {
        Purpose::Peer { node }
        | Purpose::Engine { node }
        | Purpose::Ask { node }
        | Purpose::Lane { node, .. }
        | Purpose::Rdma { node, .. }
            if !local && node.node == shared.me.node =>
        {
            connection.refuse("your node id is mine: give every daemon its own");
        }
        Purpose::Peer { node }
        | Purpose::Engine { node }
        | Purpose::Ask { node }
        | Purpose::Lane { node, .. }
        | Purpose::Rdma { node, .. }
            if !local && !shared.doors.knows(&node) =>
        {
            connection.refuse(STALE);
        }
        Purpose::Peer { node } if !local => {
            connection.welcome();
            serve_peer(shared, connection, number, &node, link, false);
        }
        Purpose::Ask { node } if !local => shared.lines.serve(&shared.book, connection, &node.node, link),
        Purpose::Engine { node } if !local => {
            connection.welcome();
            serve_engine(connection, &node, link);
        }
        Purpose::Lane { .. } | Purpose::Rdma { .. } if !local => shared.doors.serve(connection, purpose, link)?,
        Purpose::Local { incarnation } if local => {
            tracing::debug!(client = number, incarnation, "a local client attaches");
            connection.welcome();
            connection.unwatch();
            shared.tell(Happening::Attach { client: number, port: Port::Socket(link.clone()) });
            let mut reader = Reader::new(shared.catalog.clone());
            let ended = connection.converse(|payload, _| {
                let request = match wire::decode(&payload)? {
                    LocalRequest::Objects(request) => match reader.answer(request) {
                        Answer::Pass(request) => LocalRequest::Objects(request),
                        Answer::Tell(event, None) => return Ok(Some(wire::encode(&LocalEvent::Objects(event)))),
                        Answer::Tell(event, Some(arena)) => {
                            say(link, &LocalEvent::Objects(event), arena);
                            return Ok(None);
                        }
                        Answer::Done => return Ok(None),
                    },
                    request => request,
                };
                shared.tell(Happening::Local { client: number, request });
                Ok(None)
            });
            tracing::debug!("local client {number}: {ended}");
            // Ranks of a worker share its socket: what it has is given to others when the last of them has let go.
            connection.outlast();
            drop(connection);
            shared.tell(Happening::LocalGone { client: number });
        }
        Purpose::Admin if local => asked::serve(shared, connection, link),
        _ => connection.refuse("this is a daemon: peers come by TCP, local workers by its unix socket"),
    }
    Ok(())
}

/// Descriptors travel beside what is queued.
fn say(link: &Link, event: &LocalEvent, arena: Arc<Arena>) {
    if link.send_with_arena(wire::encode(event), arena).is_err() {
        tracing::warn!("a client of objects does not take its answers: asked to let go");
        link.cut();
    }
}

/// Answers an engine as one that has registered nothing: enough for `transferd ping`, which wants to know that this daemon
/// lives, in which life, and by which paths it is reached. A pool's memory is not for engines.
fn serve_engine(mut connection: Connection, node: &NodeAddress, link: &Link) {
    let say = |message: &EngineMessage| {
        if link.send(wire::encode(message)).is_err() {
            link.close("the engine does not read");
        }
    };
    say(&EngineMessage::Resume { through: 0 });
    let ended = connection.drive(|payload, _| match wire::decode(&payload)? {
        EngineMessage::Find { ticket, .. } => {
            say(&EngineMessage::Found { ticket, region: None });
            Ok(())
        }
        _ => Err(Ended::Closed("this is a pool daemon: it takes no notifications of engines".into())),
    });
    tracing::debug!(engine = %node.node, "its session ended: {ended}");
}

fn serve_peer(
    shared: &Shared,
    mut connection: Connection,
    number: u64,
    peer: &NodeAddress,
    link: &Link,
    dialled: bool,
) {
    shared.tell(Happening::PeerUp { number, peer: peer.clone(), link: link.clone(), dialled });
    let ended = connection.drive(|payload, _| {
        let message = wire::decode(&payload)?;
        shared.tell(Happening::PeerSaid { number, peer: peer.node.clone(), message });
        Ok(())
    });
    tracing::info!(peer = %peer.node, "session ended: {ended}");
    shared.tell(Happening::PeerGone { number, peer: peer.clone() });
}

// -- outgoing connections ------------------------------------------------------------------------------------------

fn dial(shared: &Arc<Shared>, peer: &NodeAddress, link: &Link) -> Result<(), Error> {
    let connection = connect(shared, &peer.address, Purpose::Peer { node: shared.me.clone() }, link)?;
    let (connection, found) = connection;
    if found.node != peer.node || found.incarnation != peer.incarnation {
        return Err(Error::retry(format!(
            "{} is {} in life {}, not {} in life {}",
            peer.address, found.node, found.incarnation, peer.node, peer.incarnation
        )));
    }
    if !shared.doors.knows(peer) {
        return Err(Error::retry(format!("a later life of {} is known", peer.node)));
    }
    serve_peer(shared, connection, shared.threads.number(), peer, link, true);
    Ok(())
}

fn connect(shared: &Shared, address: &str, purpose: Purpose, link: &Link) -> Result<(Connection, NodeAddress), Error> {
    let stream = dial_tcp(address, link, DIAL_WITHIN)
        .map_err(|error| Error::retry(format!("cannot reach {address}: {error}")))?;
    let session = Session::dial(shared.key, purpose, nonce()?, now());
    let stream = Stream::Tcp(stream).secured(shared.tls, Side::Dialler)?;
    let mut connection = Connection::new(stream, session, link.clone())?;
    match connection.handshake()? {
        Event::Established(found) => Ok((connection, found)),
        event => Err(Error::bug(format!("{event:?} on a dialled session"))),
    }
}

/// Keeps a session with the conductor's endpoint, for ever.
fn report(shared: &Arc<Shared>, conductor: &str, until: &Link) {
    let mut pause = REDIAL.0;
    let mut told = false;
    let mut met = now();
    while !until.is_closed() {
        // Each session has a link of its own, so that what was queued for a dead one is not told to the next.
        let outcome = session_with(shared, conductor, until, &mut pause);
        if until.is_closed() {
            return;
        }
        if let Err(error) = outcome {
            // Processes that start side by side miss each other for moments: only a lasting outage is news, and once.
            if pause == REDIAL.0 {
                (told, met) = (false, now());
            }
            if !told && now() - met >= OUTAGE.as_nanos() as u64 {
                told = true;
                tracing::warn!("the conductor at {conductor}: {error}; trying on");
            } else {
                tracing::debug!("the conductor at {conductor}: {error}; trying again");
            }
        }
        until.wake().clear();
        if !until.is_closed() {
            let mut wait = [PollFd::new(until.wake().as_fd(), PollFlags::POLLIN)];
            // An error here is an interrupted call: the pause is only shorter.
            let _ = poll(&mut wait, poll_timeout(Some(pause)));
        }
        pause = (pause * 2).min(REDIAL.1);
    }
}

fn session_with(shared: &Arc<Shared>, conductor: &str, until: &Link, pause: &mut Duration) -> Result<(), Error> {
    let purpose = Purpose::Report { node: shared.me.clone() };
    let (mut connection, _) = connect(shared, conductor, purpose, until)?;
    *pause = REDIAL.0;
    until.forget();
    shared.tell(Happening::ConductorUp { link: until.clone() });
    let ended = connection.drive(|payload, _| {
        shared.tell(Happening::Order(wire::decode(&payload)?));
        Ok(())
    });
    shared.tell(Happening::ConductorGone);
    Err(Error::retry(ended.to_string()))
}

// -- the actor -----------------------------------------------------------------------------------------------------

struct Actor {
    shared: Arc<Shared>,
    engine: Engine,
    carrier: Carrier,
    /// The SSDs have something to tell.
    rung: Arc<AtomicBool>,
    via: Via,
    socket: String,
    clients: HashMap<ClientId, Port>,
    peers: HashMap<NodeId, Peer>,
    dialling: HashSet<NodeAddress>,
    conductor: Option<Link>,
    inputs: VecDeque<Input>,
    /// To be set when nothing is held.
    awaiting_quiet: Vec<Weak<Wake>>,
    /// To be told when a flush of the SSDs is over, by its number.
    awaiting_flush: BTreeMap<u64, SyncSender<bool>>,
    /// To be told what a step of a scrub has found, by its number.
    awaiting_scrub: BTreeMap<u64, SyncSender<Verified>>,
    members: Members,
}

struct Peer {
    address: NodeAddress,
    /// One, or two if both sides dialled at once. Messages go out on the first; if any ends, all end, because the
    /// other side may have used just that one.
    sessions: Vec<PeerSession>,
}

struct PeerSession {
    number: u64,
    link: Link,
    dialled: bool,
}

impl Actor {
    fn new(shared: Arc<Shared>, engine: Engine, mover: Mover, config: &Config, rung: Arc<AtomicBool>) -> Self {
        Self {
            shared,
            engine,
            carrier: Carrier::new(mover),
            rung,
            via: config.transport,
            socket: config.socket.as_ref().map(|path| path.display().to_string()).unwrap_or_default(),
            clients: HashMap::new(),
            peers: HashMap::new(),
            dialling: HashSet::new(),
            conductor: None,
            inputs: VecDeque::new(),
            awaiting_quiet: Vec::new(),
            awaiting_flush: BTreeMap::new(),
            awaiting_scrub: BTreeMap::new(),
            members: Members::new(&config.peers),
        }
    }

    fn run(mut self, inbox: &Receiver<Happening>) {
        self.list_members();
        let mut ticked = now();
        loop {
            let tick = ticked + TICK.as_nanos() as u64;
            let next = self.carrier.mover.next_tick().map_or(tick, |at| at.min(tick));
            let first = match inbox.recv_timeout(Duration::from_nanos(next.saturating_sub(now()))) {
                Ok(happening) => Some(happening),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            for happening in first.into_iter().chain(inbox.try_iter().take(BATCH)) {
                if matches!(happening, Happening::Stop) {
                    return self.leave(inbox);
                }
                self.on(happening);
            }
            self.look_at_carrier();
            self.look_at_tier();
            self.look_at_dump();
            if now() >= tick {
                ticked = now();
                self.feed(Input::Tick);
                self.dial_members();
            }
            self.tell_quiet();
        }
    }

    fn look_at_tier(&mut self) {
        if self.rung.swap(false, Ordering::AcqRel) {
            self.feed(Input::Tier);
        }
    }

    /// Called at each turn, so at least at every tick: no event tells that a link has sent something.
    fn look_at_dump(&mut self) {
        let room = self.conductor.as_ref().is_some_and(|link| link.queued() < DUMP_ROOM);
        if room && self.engine.is_dumping() {
            self.feed(Input::DumpOn);
        }
    }

    /// What lies in DRAM only goes to the SSDs, and they are closed; nobody is served any more.
    fn leave(&mut self, inbox: &Receiver<Happening>) {
        let until = Instant::now() + LEAVE_WITHIN;
        let left = || until.saturating_duration_since(Instant::now());
        self.feed(Input::Stop);
        while !self.engine.has_left() && !left().is_zero() {
            // Whatever comes: only what the SSDs tell is of interest now.
            if let Err(RecvTimeoutError::Disconnected) = inbox.recv_timeout(left().min(TICK)) {
                break;
            }
            self.look_at_tier();
        }
        if !self.engine.has_left() {
            tracing::warn!("stopped before all that was in DRAM only was written to SSD");
        }
        self.engine.close(left());
    }

    fn on(&mut self, happening: Happening) {
        match happening {
            Happening::Attach { client, port } => {
                self.clients.insert(client, port);
            }
            Happening::Local { client, request } => self.feed(Input::Local { client, request }),
            Happening::LocalGone { client } => {
                self.clients.remove(&client);
                self.feed(Input::LocalGone { client });
            }
            Happening::PeerUp { number, peer, link, dialled } => self.peer_up(number, peer, link, dialled),
            Happening::PeerSaid { number, peer, message } => {
                if self.peers.get(&peer).is_some_and(|peer| peer.sessions.iter().any(|s| s.number == number)) {
                    self.feed(Input::Peer { peer, message });
                }
            }
            Happening::PeerGone { number, peer } => {
                let known = self.peers.get(&peer.node);
                if known.is_some_and(|known| known.sessions.iter().any(|session| session.number == number)) {
                    self.peer_down(&peer.node);
                }
            }
            Happening::DialFailed { peer } => {
                self.dialling.remove(&peer);
                let up = self.peers.get(&peer.node).is_some_and(|known| known.address == peer);
                if !up {
                    self.feed(Input::PeerDown { peer });
                }
            }
            Happening::MemberUp { at, peer } => self.member_up(at, peer),
            Happening::MemberGone { at } => self.member_gone(at),
            Happening::ConductorUp { link } => {
                self.conductor = Some(link);
                let hello = DaemonReport::Hello {
                    node: self.shared.me.clone(),
                    socket: self.socket.clone(),
                    next_sequence: self.engine.next_sequence(),
                };
                self.to_conductor(&hello);
            }
            Happening::ConductorGone => {
                self.conductor = None;
                self.engine.stop_dumping();
            }
            Happening::Order(order) => self.feed(Input::Order(order)),
            // The transport is looked at after every batch.
            Happening::Completions => {}
            // As are the SSDs.
            Happening::Tier => {}
            Happening::Ask(Question(question)) => question(self),
            Happening::Stop => unreachable!("run() ends on it"),
        }
    }

    fn peer_up(&mut self, number: u64, peer: NodeAddress, link: Link, dialled: bool) {
        if dialled {
            self.dialling.remove(&peer);
        }
        let replaces = self.peers.get(&peer.node).is_some_and(|known| {
            // The same direction once more: the dialler has lost the earlier one.
            known.address != peer || known.sessions.iter().any(|session| session.dialled == dialled)
        });
        if replaces {
            self.peer_down(&peer.node);
        }
        let session = PeerSession { number, link, dialled };
        if let Some(known) = self.peers.get_mut(&peer.node) {
            known.sessions.push(session);
            return;
        }
        self.peers.insert(peer.node.clone(), Peer { address: peer.clone(), sessions: vec![session] });
        self.carrier.mover.connect(&peer, self.via, now());
        self.feed(Input::PeerUp { peer });
    }

    fn peer_down(&mut self, node: &NodeId) {
        let Some(peer) = self.peers.remove(node) else { return };
        peer.sessions.iter().for_each(|session| session.link.close("another session with this peer ended"));
        self.carrier.mover.disconnect(node, now());
        self.shared.lines.forget(node);
        self.shared.doors.close(node, peer.address.incarnation.saturating_add(1), "the peer is gone");
        self.feed(Input::PeerDown { peer: peer.address });
    }

    fn look_at_carrier(&mut self) {
        let copied = self.carrier.poll(now());
        if !copied.is_empty() {
            self.feed(Input::Completed(copied));
        }
    }

    fn feed(&mut self, input: Input) {
        self.inputs.push_back(input);
        self.work_off();
    }

    fn work_off(&mut self) {
        let mut outputs = Vec::new();
        while let Some(input) = self.inputs.pop_front() {
            self.engine.handle(input, now(), &mut outputs);
            self.carrier.know_arenas(&mut self.engine);
            for output in outputs.drain(..) {
                self.carry_out(output);
            }
        }
    }

    fn carry_out(&mut self, output: Output) {
        match output {
            Output::Local { client, event } => self.to_client(client, event),
            Output::Dial { peer } => self.dial(peer),
            Output::Peer { peer, message } => {
                if let Some(session) = self.peers.get(&peer).and_then(|peer| peer.sessions.first())
                    && session.link.send(wire::encode(&message)).is_err()
                {
                    session.link.close("the peer does not keep up");
                }
            }
            // Without a session the mover does not know the peer, and nobody would commit the blocks.
            Output::Submit { peer, copies } => self.carrier.submit(&peer.node, &copies, now()),
            Output::Report(report) => self.to_conductor(&report),
            Output::Scrubbed { number, found } => {
                if let Some(waiter) = self.awaiting_scrub.remove(&number) {
                    // It may have given up waiting.
                    let _ = waiter.try_send(found);
                }
            }
            Output::Flushed { number, ok } => {
                if let Some(waiter) = self.awaiting_flush.remove(&number) {
                    // It may have given up waiting.
                    let _ = waiter.try_send(ok);
                }
            }
        }
    }

    fn to_client(&self, client: ClientId, event: LocalEvent) {
        match self.clients.get(&client) {
            None => {}
            Some(Port::Socket(link)) => {
                let arena = matches!(event, LocalEvent::Attached { .. }).then(|| self.engine.arena(client)).flatten();
                let payload = wire::encode(&event);
                let sent = match arena {
                    Some(arena) => link.send_with_arena(payload, arena),
                    None => link.send(payload),
                };
                if sent.is_err() {
                    tracing::warn!("local client {client} does not take its events: asked to let go");
                    link.cut();
                }
            }
            Some(Port::Inside(mailbox)) => {
                if matches!(event, LocalEvent::Attached { .. })
                    && let Some(arena) = self.engine.arena(client)
                {
                    mailbox.push_always(ClientEvent::Arena(arena));
                }
                if mailbox.push(ClientEvent::Event(event)).is_err() {
                    mailbox.close(ClientEvent::Disconnected("too many events were not taken".into()));
                }
            }
        }
    }

    fn to_conductor(&self, report: &DaemonReport) {
        if let Some(link) = &self.conductor
            && link.send(wire::encode(report)).is_err()
        {
            tracing::debug!("the conductor does not keep up: a report was dropped");
        }
    }

    fn dial(&mut self, peer: NodeAddress) {
        if self.peers.get(&peer.node).is_some_and(|known| known.address == peer) {
            self.inputs.push_back(Input::PeerUp { peer });
            return;
        }
        if !self.dialling.insert(peer.clone()) {
            return;
        }
        let started = Link::new().and_then(|link| {
            let (at, until, to) = (self.shared.clone(), link.clone(), peer.clone());
            self.shared.threads.spawn("peer", &link, move || {
                let outcome = if to.address.is_empty() || to.node == at.me.node {
                    Err(Error::give_up("it takes no peers"))
                } else {
                    dial(&at, &to, &until)
                };
                if let Err(error) = outcome {
                    tracing::warn!(peer = %to.node, "{error}");
                    at.tell(Happening::DialFailed { peer: to });
                }
            })
        });
        if let Err(error) = started {
            tracing::warn!(peer = %peer.node, "{error}");
            self.dialling.remove(&peer);
            self.inputs.push_back(Input::PeerDown { peer });
        }
    }
}

impl Drop for Actor {
    /// Clients within the process learn the end here; the others by their sockets.
    fn drop(&mut self) {
        for port in self.clients.values() {
            if let Port::Inside(mailbox) = port {
                mailbox.close(ClientEvent::Disconnected("the daemon has stopped".into()));
            }
        }
    }
}

//! How a client of objects reaches its daemon: over the unix socket, or within the process.
//!
//! Over the socket the calling thread itself sends and waits: no other thread is woken for an answer. One question is under
//! way at a time, bytes are copied beside that.
//!
//! While pins or slots of this client are used, its connection stands: its end is the daemon's proof that they are not. So
//! a view keeps the connection, though the pool is closed, and a connection that has failed stays open until nobody uses it.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::catalog::{Catalog, Hold};
use super::messages::{At, ObjectEvent, ObjectRequest, Sighting};
use super::unused::Unused;
use crate::client::ClientEvent;
use crate::daemon::Happening;
use crate::error::Error;
use crate::keys::Key;
use crate::link::{Connection, Link, Stream, nonce, now};
use crate::mailbox::Mailbox;
use crate::memory::Arena;
use crate::messages::{LocalEvent, LocalRequest, Purpose};
use crate::session::{Event, Session};
use crate::types::{BlockKey, ClientId, RegionId, SlotRef};
use crate::wire;

/// How long an answer may take before the daemon counts as stuck: it answers in microseconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// The way to a daemon.
#[derive(Debug)]
pub enum Road {
    /// Over its socket.
    Socket(Arc<Socket>),
    /// In its process.
    Inside(Inside),
}

impl Road {
    /// Asks, and waits for the answer. `make` gets the number that the answer repeats.
    ///
    /// # Errors
    /// Retry: the daemon is gone, or does not answer.
    pub fn ask(&self, make: impl FnOnce(u64) -> ObjectRequest) -> Result<ObjectEvent, Error> {
        self.ask_within(PATIENCE, make)
    }

    /// The same of what may take so long.
    ///
    /// # Errors
    /// As `ask`.
    pub fn ask_within(
        &self,
        patience: Duration,
        make: impl FnOnce(u64) -> ObjectRequest,
    ) -> Result<ObjectEvent, Error> {
        match self {
            Self::Socket(socket) => socket.ask(patience, make),
            Self::Inside(inside) => inside.ask(patience, make),
        }
    }

    /// Says something that is not answered.
    pub fn tell(&self, request: ObjectRequest) {
        match self {
            Self::Socket(socket) => socket.tell(request),
            Self::Inside(inside) => inside.tell(request),
        }
    }

    /// Pins those of these blocks that lie in DRAM.
    ///
    /// # Errors
    /// As `ask`; and retry if this client has too many pins.
    pub fn pin(&self, keys: &[BlockKey], names: bool) -> Result<Vec<Sighting<Pinned>>, Error> {
        match self {
            Self::Socket(socket) => socket.pin(keys, names),
            Self::Inside(inside) => {
                let seen = inside.catalog.pin(keys, names);
                Ok(seen.into_iter().map(|seen| seen.map(Pinned::Inside)).collect())
            }
        }
    }

    /// The arena of this number.
    ///
    /// # Errors
    /// As `ask`; bug: there is none.
    pub fn arena(&self, region: RegionId) -> Result<Arc<Arena>, Error> {
        match self {
            Self::Socket(socket) => socket.arena(region),
            Self::Inside(inside) => inside.catalog.arena(region).ok_or_else(|| no_arena(region)),
        }
    }
}

fn no_arena(region: RegionId) -> Error {
    Error::bug(format!("the daemon names an arena {} that it does not have", region.0))
}

fn silent(patience: Duration) -> Error {
    Error::retry(format!("the daemon has not answered for {} s: is it stopped?", patience.as_secs()))
}

fn unexpected(event: &ObjectEvent) -> Error {
    Error::bug(format!("the daemon answers something else: {event:?}"))
}

/// A block that stays where it is while this lives.
#[derive(Debug)]
pub enum Pinned {
    /// In this process's daemon.
    Inside(Hold),
    /// In the daemon behind the socket.
    Socket(Pin),
}

impl Pinned {
    /// The arena it lies in.
    pub fn arena(&self) -> &Arc<Arena> {
        match self {
            Self::Inside(hold) => hold.arena(),
            Self::Socket(pin) => &pin.arena,
        }
    }

    /// Where it lies.
    pub fn at(&self) -> At {
        match self {
            Self::Inside(hold) => hold.at(),
            Self::Socket(pin) => (pin.region, pin.slot),
        }
    }

    /// Its slot.
    pub fn slot(&self) -> SlotRef {
        self.at().1
    }
}

// -- over the socket -------------------------------------------------------------------------------------------------

/// A connection to a daemon.
pub struct Socket {
    line: Mutex<Connection>,
    /// Why it can be used no more.
    ended: Mutex<Option<String>>,
    /// Pins that are used no more, and of which the daemon is not told yet.
    unused: Unused,
    arenas: RwLock<FxHashMap<RegionId, Arc<Arena>>>,
    next: AtomicU64,
}

impl std::fmt::Debug for Socket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Socket")
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.unused.wake();
    }
}

/// A pin.
#[derive(Debug)]
pub struct Pin {
    socket: Arc<Socket>,
    number: u64,
    region: RegionId,
    slot: SlotRef,
    arena: Arc<Arena>,
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.socket.unused.add(self.number);
    }
}

impl Socket {
    /// Dials, and proves the key both ways.
    ///
    /// # Errors
    /// Retry if nobody answers within `timeout`; give up if the key is refused.
    pub fn connect(socket: &Path, key: Key, timeout: Duration) -> Result<Arc<Self>, Error> {
        let until = Instant::now() + timeout;
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() >= until => {
                    let at = socket.display();
                    return Err(Error::retry(format!(
                        "no daemon answers at {at}: {error}: start it, or name its socket"
                    )));
                }
                // The daemon may just be starting.
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        let session =
            Session::dial(key, Purpose::Local { incarnation: crate::incarnation::new_incarnation() }, nonce()?, now());
        let mut line = Connection::new(Stream::Unix(stream), session, Link::new()?)?;
        match line.handshake()? {
            Event::Established(_) => line.unwatch(),
            _ => return Err(Error::give_up(format!("what listens at {} is no daemon", socket.display()))),
        }
        let socket = Arc::new(Self {
            line: Mutex::new(line),
            ended: Mutex::default(),
            unused: Unused::default(),
            arenas: RwLock::default(),
            next: AtomicU64::new(1),
        });
        Unused::watch(&socket, |socket| &socket.unused, Self::release)?;
        Ok(socket)
    }

    fn ask(&self, patience: Duration, make: impl FnOnce(u64) -> ObjectRequest) -> Result<ObjectEvent, Error> {
        self.ask_on(&mut lock(&self.line), patience, make)
    }

    fn ask_on(
        &self,
        line: &mut Connection,
        patience: Duration,
        make: impl FnOnce(u64) -> ObjectRequest,
    ) -> Result<ObjectEvent, Error> {
        if let Some(ended) = &*lock(&self.ended) {
            return Err(gone(ended));
        }
        let ticket = self.next.fetch_add(1, SeqCst);
        let mut payloads: Vec<Vec<u8>> = self.take_unused().into_iter().collect();
        payloads.push(encode(make(ticket)));
        let until = Instant::now() + patience;
        loop {
            let payload = match line.ask(&payloads, until) {
                Ok(Some(payload)) => payload,
                Ok(None) => return Err(silent(patience)),
                Err(ended) => return Err(self.end(ended.to_string())),
            };
            payloads.clear();
            match wire::decode(&payload) {
                Ok(LocalEvent::Objects(event)) if event.ticket() == ticket => return Ok(event),
                Ok(LocalEvent::Flushed { ticket: of, ok }) if of == ticket => {
                    return Ok(ObjectEvent::Flushed { ticket, ok });
                }
                // An answer that came too late for who had asked.
                Ok(LocalEvent::Objects(ObjectEvent::Arena { .. })) => drop(line.descriptors.pop_front()),
                Ok(LocalEvent::Objects(ObjectEvent::Pinned { first, found, .. })) => {
                    let late = (first..).zip(found).filter(|(_, seen)| seen.here().is_some());
                    late.for_each(|(number, _)| self.unused.add(number));
                }
                Ok(_) => {}
                Err(error) => return Err(self.end(error.to_string())),
            }
        }
    }

    fn end(&self, reason: String) -> Error {
        gone(lock(&self.ended).get_or_insert(reason))
    }

    fn tell(&self, request: ObjectRequest) {
        let mut line = lock(&self.line);
        if lock(&self.ended).is_none()
            && let Err(ended) = line.tell(&encode(request))
        {
            self.end(ended.to_string());
        }
    }

    /// Tells the daemon which pins are not used any more, unless somebody is talking to it: the next one does it then.
    fn release(&self) {
        let mut line = match self.line.try_lock() {
            Ok(line) => line,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(std::sync::TryLockError::WouldBlock) => return,
        };
        if let Some(payload) = self.take_unused()
            && lock(&self.ended).is_none()
            && let Err(ended) = line.tell(&payload)
        {
            self.end(ended.to_string());
        }
    }

    fn take_unused(&self) -> Option<Vec<u8>> {
        let pins = self.unused.take();
        (!pins.is_empty()).then(|| encode(ObjectRequest::Release { pins }))
    }

    fn pin(self: &Arc<Self>, keys: &[BlockKey], names: bool) -> Result<Vec<Sighting<Pinned>>, Error> {
        let keys = keys.to_vec();
        let (first, found) = match self.ask(PATIENCE, |ticket| ObjectRequest::Pin { ticket, keys, names })? {
            ObjectEvent::Pinned { first, found, .. } => (first, found),
            ObjectEvent::TooManyPins { limit, .. } => {
                return Err(Error::retry(format!("{limit} views may be open, and are: close some of them")));
            }
            event => return Err(unexpected(&event)),
        };
        let mut failed = None;
        let pinned = (first..).zip(found).map(|(number, seen)| {
            let (region, slot) = match seen {
                Sighting::Here(at) => at,
                Sighting::Behind { class } => return Sighting::Behind { class },
                Sighting::Missing => return Sighting::Missing,
            };
            // On failure too: what the daemon has pinned is let go of.
            let arena = match self.arena(region) {
                Ok(arena) => arena,
                Err(error) => {
                    failed = Some(error);
                    self.unused.add(number);
                    return Sighting::Missing;
                }
            };
            let socket = self.clone();
            Sighting::Here(Pinned::Socket(Pin { socket, number, region, slot, arena }))
        });
        let pinned = pinned.collect();
        failed.map_or(Ok(pinned), Err)
    }

    fn arena(&self, region: RegionId) -> Result<Arc<Arena>, Error> {
        if let Some(arena) = self.arenas.read().unwrap_or_else(PoisonError::into_inner).get(&region) {
            return Ok(arena.clone());
        }
        let mut line = lock(&self.line);
        let arena = match self.ask_on(&mut line, PATIENCE, |ticket| ObjectRequest::Arena { ticket, region })? {
            ObjectEvent::Arena { slots, layout, bytes, .. } => {
                let fd = line.descriptors.pop_front().ok_or_else(|| Error::give_up("the daemon sent no arena"))?;
                Arena::open(fd, bytes, slots, layout)?
            }
            ObjectEvent::NoArena { .. } => return Err(no_arena(region)),
            event => return Err(unexpected(&event)),
        };
        self.arenas.write().unwrap_or_else(PoisonError::into_inner).insert(region, arena.clone());
        Ok(arena)
    }
}

fn encode(request: ObjectRequest) -> Vec<u8> {
    wire::encode(&LocalRequest::Objects(request))
}

fn gone(reason: &str) -> Error {
    Error::retry(format!("the daemon is gone ({reason}): connect again"))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic under one of these locks leaves what it guards whole: the worst is an answer that nobody waits for.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// -- in the daemon's process -----------------------------------------------------------------------------------------

/// A client in the daemon's process. It reads without the engine, and writes through it.
pub struct Inside {
    happenings: SyncSender<Happening>,
    client: ClientId,
    /// Locked by who asks, until he has his answer.
    answers: Mutex<Arc<Mailbox<ClientEvent>>>,
    catalog: Arc<Catalog>,
    next: AtomicU64,
}

impl std::fmt::Debug for Inside {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Inside({})", self.client)
    }
}

impl Inside {
    /// `mailbox` was registered with the daemon under `client`.
    pub(crate) fn new(
        happenings: SyncSender<Happening>,
        client: ClientId,
        mailbox: Arc<Mailbox<ClientEvent>>,
        catalog: Arc<Catalog>,
    ) -> Self {
        Self { happenings, client, answers: Mutex::new(mailbox), catalog, next: AtomicU64::new(1) }
    }

    fn ask(&self, patience: Duration, make: impl FnOnce(u64) -> ObjectRequest) -> Result<ObjectEvent, Error> {
        let ticket = self.next.fetch_add(1, SeqCst);
        let request = match super::reader::read_only(&self.catalog, make(ticket)) {
            Ok(event) => return Ok(event),
            Err(request) => request,
        };
        let answers = lock(&self.answers);
        // Its last word is said once, to whoever waits then.
        if answers.is_closed() {
            return Err(gone("it has stopped"));
        }
        self.tell(request);
        let until = Instant::now() + patience;
        while answers.wait(until.saturating_duration_since(Instant::now())) {
            match answers.pop() {
                Some(ClientEvent::Event(LocalEvent::Objects(event))) if event.ticket() == ticket => return Ok(event),
                Some(ClientEvent::Event(LocalEvent::Flushed { ticket: of, ok })) if of == ticket => {
                    return Ok(ObjectEvent::Flushed { ticket, ok });
                }
                Some(ClientEvent::Disconnected(reason)) => return Err(gone(&reason)),
                // An answer that came too late for who had asked.
                _ => {}
            }
        }
        Err(silent(patience))
    }

    fn tell(&self, request: ObjectRequest) {
        // Blocks while the daemon's queue is full; fails only when it has stopped, and then the mailbox says so.
        let request = LocalRequest::Objects(request);
        let _ = self.happenings.send(Happening::Local { client: self.client, request });
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = self.happenings.send(Happening::LocalGone { client: self.client });
    }
}

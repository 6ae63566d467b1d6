//! A worker's link to its node's pool: control over a unix socket or within the process, bytes in the shared arena.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::daemon;
use crate::error::Error;
use crate::keys::Key;
use crate::link::{Connection, Link, Stream, nonce, now};
use crate::mailbox::Mailbox;
use crate::memory::{Arena, Runs};
use crate::messages::{LocalEvent, LocalRequest, NOTE_LIMIT, Purpose};
use crate::session::{Ended, Event, Session};
use crate::types::{ClientId, Incarnation, Layout, NodeAddress, SlotRef};
use crate::wire;

/// Events that may wait for a client; one that leaves more has stopped reading and is let go.
pub(crate) const EVENT_LIMIT: usize = 1 << 16;
/// Most blocks of one grant: what an event about all of them takes still fits a frame.
pub const GRANT_LIMIT: usize = 1 << 17;

/// What a client gets.
#[derive(Clone, Debug)]
pub enum ClientEvent {
    /// The arena, just before `LocalEvent::Attached`.
    Arena(Arc<Arena>),
    /// From the daemon.
    Event(LocalEvent),
    /// The daemon is gone; nothing follows.
    Disconnected(String),
}

/// Whether this client may write the arena. It is shut before the connection ends, because the connection's end is the
/// daemon's proof that nobody writes for this client any more.
enum Gate {
    /// With a second handle of the socket, for those who are to write as well. (Within one process there is no socket.)
    Open(Option<UnixStream>),
    Shut,
}

enum Road {
    Socket(Link, Option<JoinHandle<()>>),
    Inside(SyncSender<daemon::Happening>, ClientId),
}

/// A link to the pool. When it is closed or its process dies, all its tags end.
pub struct PoolClient {
    road: Road,
    mailbox: Arc<Mailbox<ClientEvent>>,
    arena: Arc<Arena>,
    node: NodeAddress,
    gate: Arc<RwLock<Gate>>,
}

impl PoolClient {
    /// Dials the daemon's socket, proves the session key both ways, and maps the arena.
    ///
    /// # Errors
    /// Retry if nobody answers within `timeout`; give up if the layout or the key is refused.
    pub fn connect(
        socket: &Path,
        key: Key,
        incarnation: Incarnation,
        layout: Layout,
        namespace: u64,
        timeout: Duration,
    ) -> Result<Self, Error> {
        let until = Instant::now() + timeout;
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() >= until => {
                    return Err(Error::retry(format!("no daemon answers at {}: {error}", socket.display())));
                }
                // The daemon may just be starting.
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        let mailbox = Arc::new(Mailbox::new(EVENT_LIMIT)?);
        let second = stream.try_clone().map_err(|error| Error::retry(format!("no descriptor: {error}")))?;
        let gate = Arc::new(RwLock::new(Gate::Open(Some(second))));
        let link = Link::new()?;
        let session = Session::dial(key, Purpose::Local { incarnation }, nonce()?, now());
        let (to, at, ending) = (mailbox.clone(), link.clone(), gate.clone());
        let thread = std::thread::Builder::new()
            .name("pool-client".into())
            .spawn(move || run(stream, session, at, &to, &ending))
            .map_err(|error| Error::retry(format!("no thread: {error}")))?;
        let road = Road::Socket(link, Some(thread));
        Self::attach(road, mailbox, gate, layout, namespace, until)
    }

    /// A client within the daemon's process; `mailbox` was registered with it under `client`.
    pub(crate) fn inside(
        happenings: SyncSender<daemon::Happening>,
        client: ClientId,
        mailbox: Arc<Mailbox<ClientEvent>>,
        layout: Layout,
        namespace: u64,
    ) -> Result<Self, Error> {
        let until = Instant::now() + Duration::from_secs(5);
        let gate = Arc::new(RwLock::new(Gate::Open(None)));
        Self::attach(Road::Inside(happenings, client), mailbox, gate, layout, namespace, until)
    }

    /// Waits for the answer to `Attach`. On failure the road is closed.
    fn attach(
        mut road: Road,
        mailbox: Arc<Mailbox<ClientEvent>>,
        gate: Arc<RwLock<Gate>>,
        layout: Layout,
        namespace: u64,
        until: Instant,
    ) -> Result<Self, Error> {
        let outcome =
            road.send(LocalRequest::Attach { ticket: 0, layout, namespace }).and_then(|()| attached(&mailbox, until));
        match outcome {
            Ok((arena, node)) => Ok(Self { road, mailbox, arena, node, gate }),
            Err(error) => {
                road.close(&gate);
                Err(error)
            }
        }
    }

    /// The daemon's node.
    pub fn node(&self) -> &NodeAddress {
        &self.node
    }

    /// The arena.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Readable while events wait.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.mailbox.as_fd()
    }

    /// Takes what has come.
    pub fn events(&self) -> Vec<ClientEvent> {
        self.mailbox.take()
    }

    /// Blocks until an event waits or the time is over; true if one waits.
    pub fn wait(&self, timeout: Duration) -> bool {
        self.mailbox.wait(timeout)
    }

    /// Sends a request; the outcome comes as an event. On a lost daemon it does nothing: `Disconnected` says so.
    ///
    /// # Errors
    /// Bug: a note or a grant beyond its limit. Retry: the daemon does not keep up with this client.
    pub fn request(&self, request: LocalRequest) -> Result<(), Error> {
        let (blocks, note) = match &request {
            LocalRequest::Grant { keys, private, .. } => (keys.len() + usize::from(*private), 0),
            LocalRequest::Lookup { keys, .. } | LocalRequest::Prefetch { keys, .. } => (keys.len(), 0),
            LocalRequest::Commit { indices, .. } | LocalRequest::Fetch { indices, .. } => (indices.len(), 0),
            LocalRequest::Push { indices, note, .. } => (indices.len(), note.as_ref().map_or(0, Vec::len)),
            _ => (0, 0),
        };
        if blocks > GRANT_LIMIT {
            return Err(Error::bug(format!("{blocks} blocks in one request, at most {GRANT_LIMIT} are possible")));
        }
        if note > NOTE_LIMIT {
            return Err(Error::bug(format!("a note of {note} bytes, at most {NOTE_LIMIT} are possible")));
        }
        self.road.send(request)
    }

    /// Copies whole strips into a reserved slot, with their checksums.
    ///
    /// # Errors
    /// Bug: out of range. Retry: the daemon is gone, so nobody would read them.
    pub fn store(&self, slot: SlotRef, runs: Runs, source: &[u8]) -> Result<(), Error> {
        let gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        if let Gate::Shut = *gate {
            return Err(Error::retry("the daemon is gone: connect again and write into a new grant"));
        }
        self.arena.store_runs(slot, runs, source)
    }

    /// Copies whole strips out of a slot, verified. False: not intact, or the slot's life is over.
    ///
    /// # Errors
    /// Bug: out of range.
    pub fn load(&self, slot: SlotRef, runs: Runs, into: &mut [u8]) -> Result<bool, Error> {
        self.arena.load_runs(slot, runs, into)
    }

    /// What other processes need to write and read this client's slots as well: the arena, and a handle of the socket (none
    /// where the daemon is in this process). The daemon sees the end of this client, and gives its slots to others, when
    /// every handle is closed: who has one closes it when it writes no more, or by dying. A client that closes in
    /// an orderly way sees to it that the others have done so before; within the daemon's process nothing else would.
    ///
    /// # Errors
    /// Retry: the daemon is gone, or there are no more descriptors.
    pub fn share(&self) -> Result<(OwnedFd, Option<OwnedFd>), Error> {
        let gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        let Gate::Open(socket) = &*gate else { return Err(Error::retry("the daemon is gone: connect again")) };
        let retry = |error: std::io::Error| Error::retry(format!("no descriptor: {error}"));
        let arena = self.arena.fd().try_clone_to_owned().map_err(retry)?;
        Ok((arena, socket.as_ref().map(|socket| socket.as_fd().try_clone_to_owned()).transpose().map_err(retry)?))
    }

    /// Ends all tags and the connection. Idempotent.
    pub fn close(&mut self) {
        self.road.close(&self.gate);
        self.mailbox.close(ClientEvent::Disconnected("closed".into()));
    }
}

impl Drop for PoolClient {
    fn drop(&mut self) {
        self.close();
    }
}

impl Road {
    fn send(&self, request: LocalRequest) -> Result<(), Error> {
        match self {
            Self::Socket(link, _) => link
                .send(wire::encode(&request))
                .map_err(|_| Error::retry("the daemon does not keep up with this client's requests")),
            Self::Inside(happenings, client) => {
                // Blocks while the daemon's queue is full; fails only when it has stopped, and then `Disconnected` says so.
                let _ = happenings.send(daemon::Happening::Local { client: *client, request });
                Ok(())
            }
        }
    }

    fn close(&mut self, gate: &RwLock<Gate>) {
        let first = shut(gate);
        match self {
            Self::Socket(link, thread) => {
                link.close("closed");
                if let Some(thread) = thread.take() {
                    let _ = thread.join();
                }
            }
            Self::Inside(happenings, client) if first => {
                let _ = happenings.send(daemon::Happening::LocalGone { client: *client });
            }
            Self::Inside(..) => {}
        }
    }
}

/// Waits for a write that is under way. True if it was open.
fn shut(gate: &RwLock<Gate>) -> bool {
    let before = std::mem::replace(&mut *gate.write().unwrap_or_else(PoisonError::into_inner), Gate::Shut);
    matches!(before, Gate::Open(_))
}

fn attached(mailbox: &Mailbox<ClientEvent>, until: Instant) -> Result<(Arc<Arena>, NodeAddress), Error> {
    let mut arena = None;
    loop {
        if !mailbox.wait(until.saturating_duration_since(Instant::now())) {
            return Err(Error::retry("the daemon does not answer"));
        }
        match mailbox.pop() {
            Some(ClientEvent::Arena(found)) => arena = Some(found),
            Some(ClientEvent::Event(LocalEvent::Attached { node, .. })) => {
                let arena = arena.ok_or_else(|| Error::give_up("the daemon sent no arena"))?;
                return Ok((arena, node));
            }
            Some(ClientEvent::Event(LocalEvent::AttachRefused { reason, .. })) => return Err(Error::give_up(reason)),
            Some(ClientEvent::Disconnected(reason)) if reason.contains("secret") => return Err(Error::give_up(reason)),
            Some(ClientEvent::Disconnected(reason)) => return Err(Error::retry(reason)),
            Some(ClientEvent::Event(_)) | None => {}
        }
    }
}

/// The client's thread: session on one side, mailbox on the other.
fn run(stream: UnixStream, session: Session, link: Link, mailbox: &Mailbox<ClientEvent>, gate: &RwLock<Gate>) {
    let ended = match Connection::new(Stream::Unix(stream), session, link) {
        Err(ended) => ended,
        Ok(mut connection) => {
            let ended = match connection.handshake() {
                Err(ended) => ended,
                Ok(Event::Established(_)) => {
                    connection.unwatch();
                    connection.end_by_closing();
                    connection.drive(|payload, descriptors| {
                        let event: LocalEvent = wire::decode(&payload)?;
                        if let LocalEvent::Attached { slots, layout, arena_bytes, .. } = &event {
                            let arena = descriptors
                                .pop_front()
                                .ok_or_else(|| Error::give_up("the daemon sent no arena"))
                                .and_then(|fd| Arena::open(fd, *arena_bytes, *slots, *layout))
                                .map_err(|error| Ended::Refused(error.message))?;
                            mailbox.push_always(ClientEvent::Arena(arena));
                        }
                        mailbox
                            .push(ClientEvent::Event(event))
                            .map_err(|_| Ended::Closed(format!("{EVENT_LIMIT} events were not taken")))
                    })
                }
                Ok(_) => Ended::Closed("the other side is no daemon".into()),
            };
            shut(gate);
            drop(connection);
            ended
        }
    };
    mailbox.close(ClientEvent::Disconnected(ended.to_string()));
}

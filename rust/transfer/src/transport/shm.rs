//! The shm transport: lanes (`transport/lanes`) between two processes of one host, over a unix socket. Bodies do not travel
//! on it: whoever writes them copies them out of the other process's memory, once (`lanes/sharing`).
//!
//! Who is on this host is found out, not configured: every engine listens at an abstract socket whose name is made from its
//! node id and its life, and proves both in the session's handshake. Whoever can be reached so shares this kernel and this
//! network namespace; anybody else is refused by the kernel at once, and then another transport carries the copies.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

use crate::error::Error;
use crate::keys::Key;
use crate::link::{Connection, Link, Stream, nonce, now};
use crate::messages::Purpose;
use crate::region::Regions;
use crate::server::{Listener, Threads, accept_all};
use crate::session::{Event, Session};
use crate::transport::fence::Fences;
use crate::transport::lanes::{Acceptor, Counters, Dial, LaneTransport, Settings};
use crate::transport::{Busy, Completion, Copy, Helper, Path, Transport, tcp};
use crate::types::{NodeAddress, NodeId};

/// The abstract name at which that life of that node listens.
fn name(node: &NodeAddress) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("pyengine shm socket 1");
    hasher.update(&node.incarnation.to_le_bytes()).update(node.node.as_bytes());
    let hash = hasher.finalize().to_hex();
    let mut name = *b"pyengine-0123456789abcdef0123456";
    name[9..].copy_from_slice(&hash.as_bytes()[..23]);
    name
}

/// A transport that also listens. Dropping it ends everything.
pub struct ShmTransport {
    lanes: LaneTransport,
    accepting: Link,
    threads: Arc<Threads>,
}

impl ShmTransport {
    /// `me` is who listens; `fences` is the process's; `notify` as `Transport` says.
    ///
    /// # Errors
    /// Retry: out of threads or descriptors. Give up: this very life listens already.
    pub fn new(
        key: Key,
        me: NodeAddress,
        settings: Settings,
        fences: Fences,
        notify: Box<dyn Fn() + Send + Sync>,
    ) -> Result<Self, Error> {
        let refuse = |error: std::io::Error| Error::give_up(format!("shm: cannot listen as {}: {error}", me.node));
        let listener = listen(&me).map_err(refuse)?;
        listener.set_nonblocking(true).map_err(refuse)?;
        let lanes = LaneTransport::new("shm", settings, fences, Box::new(Dialler { key, me: me.clone() }), notify)?;
        let (threads, accepting) = (Arc::new(Threads::default()), Link::new()?);
        let (all, until, acceptor) = (threads.clone(), accepting.clone(), lanes.acceptor());
        threads.spawn("shm-accept", &accepting, move || {
            accept_all(&[Listener::Unix(listener)], &until, |stream| {
                let Ok(link) = Link::new() else { return };
                let (acceptor, me, within) = (acceptor.clone(), me.clone(), link.clone());
                let started = all.spawn("shm-accepted", &link, move || {
                    if let Err(error) = welcome(key, me, &acceptor, stream, within) {
                        tracing::warn!("an shm lane was refused: {error}");
                    }
                });
                if let Err(error) = started {
                    tracing::warn!("an shm lane was closed: {error}");
                }
            });
        })?;
        Ok(Self { lanes, accepting, threads })
    }

    /// Where the lanes that peers dial are brought.
    pub fn acceptor(&self) -> Acceptor {
        self.lanes.acceptor()
    }

    /// What has moved so far.
    pub fn counters(&self) -> Counters {
        self.lanes.counters()
    }
}

/// Proves an accepted connection and hands it to the lanes.
fn welcome(key: Key, me: NodeAddress, acceptor: &Acceptor, stream: Stream, link: Link) -> Result<(), Error> {
    let session = Session::accept(key, me.clone(), nonce()?, now());
    let mut connection = Connection::new(stream, session, link)?;
    match connection.handshake()? {
        Event::Proven(Purpose::Lane { node, path }) if node.node != me.node => {
            acceptor.welcome(connection, &node, path)
        }
        Event::Proven(Purpose::Lane { .. }) => {
            connection.refuse("your node id is mine: give every engine its own");
            Ok(())
        }
        _ => {
            connection.refuse("only lanes of the shm transport come here");
            Ok(())
        }
    }
}

struct Dialler {
    key: Key,
    me: NodeAddress,
}

impl Dial for Dialler {
    fn dial(&self, peer: &NodeAddress, path: u64, link: &Link) -> Result<Stream, Error> {
        let began = now();
        let stream = reach(peer).map_err(|errno| match errno {
            Errno::ECONNREFUSED | Errno::ENOENT => Error::retry(format!("{} is not on this host", peer.node)),
            errno => Error::retry(format!("cannot reach {} on this host: {errno}", peer.node)),
        })?;
        let purpose = Purpose::Lane { node: self.me.clone(), path };
        tcp::prove(Stream::Unix(stream), self.key, purpose, peer, began, link)
    }
}

/// Listens where peers on this host look for that life of that node.
///
/// # Errors
/// It listens already.
pub fn listen(me: &NodeAddress) -> std::io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name(me))?)
}

/// Connects to that life of that node, if it is on this host, without waiting: a full backlog is an answer too.
///
/// # Errors
/// Connection refused: it is not here.
pub fn reach(peer: &NodeAddress) -> Result<UnixStream, Errno> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let descriptor: OwnedFd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(descriptor.as_raw_fd(), &UnixAddr::new_abstract(&name(peer))?)?;
    Ok(UnixStream::from(descriptor))
}

impl Transport for ShmTransport {
    fn register(&mut self, regions: Arc<Regions>) {
        self.lanes.register(regions);
    }

    fn connect(&mut self, peer: &NodeAddress) {
        self.lanes.connect(peer);
    }

    fn path(&self, peer: &NodeId) -> Path {
        self.lanes.path(peer)
    }

    fn submit(&mut self, peer: &NodeId, copies: &[Copy]) -> Result<(), Busy> {
        self.lanes.submit(peer, copies)
    }

    fn poll(&mut self, into: &mut Vec<Completion>) {
        self.lanes.poll(into);
    }

    fn helper(&self, peer: &NodeId) -> Option<Box<dyn Helper>> {
        self.lanes.helper(peer)
    }

    fn close(&mut self, peer: &NodeId) {
        self.lanes.close(peer);
    }
}

impl Drop for ShmTransport {
    fn drop(&mut self) {
        self.accepting.close("the engine stops");
        self.threads.stop("the engine stops");
    }
}

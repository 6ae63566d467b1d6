//! The transports of one process, opened together, and the doors for the paths that peers make to it.

use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Error;
use crate::keys::Key;
use crate::link::{Connection, Link};
use crate::lives::{Lives, Seen};
use crate::messages::Purpose;
#[cfg(feature = "rdma")]
use crate::region::Regions;
use crate::transport::fence::Fences;
use crate::transport::lanes::{Acceptor, Settings};
#[cfg(feature = "rdma")]
use crate::transport::rdma;
use crate::transport::served::Totals;
use crate::transport::shm::ShmTransport;
#[cfg(feature = "rdma")]
use crate::transport::{Busy, Completion, Copy, Outcome, Path};
use crate::transport::{Kind, Transport, tcp};
use crate::types::{Incarnation, NodeAddress, NodeId};

/// The transports that are built in, in the order in which `Via::Auto` prefers them.
pub const KINDS: &[Kind] = &[
    Kind::Shm,
    #[cfg(feature = "rdma")]
    Kind::Rdma,
    Kind::Tcp,
];

/// A process's own transports, for its mover.
pub type Transports = Vec<(Kind, Box<dyn Transport>)>;

/// What a transport calls when there is something to poll.
pub type Notify = Box<dyn Fn() + Send + Sync>;

/// Where paths of peers come in.
#[derive(Clone, Default)]
pub struct Doors {
    fences: Fences,
    lives: Arc<Mutex<Lives>>,
    lanes: Vec<(Kind, Acceptor)>,
    #[cfg(feature = "rdma")]
    queue_pairs: Option<Arc<rdma::Shared>>,
}

/// Opens transports.
///
/// # Errors
/// Give up: one of them is not built in. Retry: no descriptors or threads.
pub fn open(
    kinds: &[Kind],
    key: Key,
    me: &NodeAddress,
    settings: &Settings,
    notify: impl Fn() -> Notify,
) -> Result<(Transports, Doors), Error> {
    let mut transports = Transports::new();
    let mut doors = Doors::default();
    for &kind in kinds {
        let transport: Box<dyn Transport> = match kind {
            Kind::Shm => {
                let transport = ShmTransport::new(key, me.clone(), settings.clone(), doors.fences.clone(), notify())?;
                doors.lanes.push((kind, transport.acceptor()));
                Box::new(transport)
            }
            Kind::Tcp => {
                let transport = tcp::transport(key, me.clone(), settings.clone(), doors.fences.clone(), notify())?;
                doors.lanes.push((kind, transport.acceptor()));
                Box::new(transport)
            }
            #[cfg(feature = "rdma")]
            Kind::Rdma if settings.tls => {
                tracing::info!("rdma is not used: {UNENCRYPTED}");
                Box::new(Barred { why: UNENCRYPTED, lost: Vec::new() })
            }
            #[cfg(feature = "rdma")]
            Kind::Rdma => {
                let transport = rdma::RdmaTransport::new(
                    key,
                    me.clone(),
                    rdma::Settings::default(),
                    doors.fences.clone(),
                    notify(),
                );
                doors.queue_pairs = Some(transport.shared());
                Box::new(transport)
            }
            other => {
                let name = other.name();
                return Err(Error::give_up(format!("{name} is not built in: leave it out of the transports")));
            }
        };
        transports.push((kind, transport));
    }
    Ok((transports, doors))
}

/// Why TLS bars rdma.
#[cfg(feature = "rdma")]
const UNENCRYPTED: &str = "TLS is on, and rdma is not encrypted";

/// Takes the place of a transport that must not be used, and says why.
#[cfg(feature = "rdma")]
struct Barred {
    why: &'static str,
    lost: Vec<Completion>,
}

#[cfg(feature = "rdma")]
impl Transport for Barred {
    fn register(&mut self, _regions: Arc<Regions>) {}

    fn connect(&mut self, _peer: &NodeAddress) {}

    fn path(&self, _peer: &NodeId) -> Path {
        Path::Down(self.why.into())
    }

    fn submit(&mut self, _peer: &NodeId, copies: &[Copy]) -> Result<(), Busy> {
        self.lost.extend(copies.iter().map(|copy| Completion { id: copy.id, outcome: Outcome::Lost }));
        Ok(())
    }

    fn poll(&mut self, into: &mut Vec<Completion>) {
        into.append(&mut self.lost);
    }

    fn close(&mut self, _peer: &NodeId) {}
}

impl Doors {
    /// Welcomes a path of a proven peer, or refuses it where its transport is not used.
    ///
    /// # Errors
    /// Retry: the path did not come about, or (rdma, which is served here to its end) has ended.
    pub fn serve(&self, connection: Connection, purpose: Purpose, link: &Link) -> Result<(), Error> {
        // shm has a door of its own.
        let lanes = self.lanes.iter().find(|(kind, _)| *kind == Kind::Tcp).map(|(_, lanes)| lanes);
        match (purpose, lanes) {
            // An I/O thread serves it from then on.
            (Purpose::Lane { node, path }, Some(lanes)) => lanes.welcome(connection, &node, path),
            #[cfg(feature = "rdma")]
            (Purpose::Rdma { node, path }, _) if let Some(shared) = &self.queue_pairs => {
                rdma::serve(shared, connection, &node, path, link)
            }
            (purpose, _) => {
                let name = if matches!(purpose, Purpose::Rdma { .. }) { "rdma" } else { "tcp" };
                connection
                    .refuse(&format!("this process takes no copies by {name}: it was started with other transports"));
                Ok(())
            }
        }
    }

    /// Notes a proven node's life; false if a later one is known. Paths that an earlier one still has here, if it hangs
    /// somewhere, end; those of this one wait for that.
    pub fn knows(&self, node: &NodeAddress) -> bool {
        // A map in which single inserts and removes cannot be left half done.
        let seen = self.lives.lock().unwrap_or_else(PoisonError::into_inner).see(&node.node, node.incarnation);
        if seen == Seen::New {
            self.close(&node.node, node.incarnation, "the peer restarted");
        }
        seen != Seen::Stale
    }

    /// What those lives of a peer that began before this one still have open here is to end.
    pub fn close(&self, peer: &NodeId, before: Incarnation, reason: &str) {
        // Nobody here waits: memory that it still holds stays in quarantine until it has let go.
        let _ = self.fences.close(peer, before, reason);
    }

    /// What peers have moved here, by transport.
    pub fn served(&self) -> Vec<(Kind, Totals)> {
        let lanes = self.lanes.iter().map(|(kind, lanes)| (*kind, lanes.served()));
        #[cfg(feature = "rdma")]
        let lanes = lanes.chain(self.queue_pairs.iter().map(|shared| (Kind::Rdma, shared.served())));
        lanes.collect()
    }
}

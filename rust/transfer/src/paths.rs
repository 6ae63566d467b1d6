//! The transports of one process, opened together, and the doors for the paths that peers make to it.

use std::sync::Arc;

use crate::error::Error;
use crate::keys::Key;
use crate::link::{Connection, Link};
use crate::messages::Purpose;
use crate::transport::lanes::{Acceptor, Settings};
#[cfg(feature = "rdma")]
use crate::transport::rdma;
use crate::transport::served::Totals;
use crate::transport::shm::ShmTransport;
use crate::transport::{Kind, Transport, tcp};
use crate::types::{NodeAddress, NodeId};

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
                let transport = ShmTransport::new(key, me.clone(), settings.clone(), notify())?;
                doors.lanes.push((kind, transport.acceptor()));
                Box::new(transport)
            }
            Kind::Tcp => {
                let transport = tcp::transport(key, me.clone(), settings.clone(), notify())?;
                doors.lanes.push((kind, transport.acceptor()));
                Box::new(transport)
            }
            #[cfg(feature = "rdma")]
            Kind::Rdma => {
                let transport = rdma::RdmaTransport::new(key, me.clone(), rdma::Settings::default(), notify());
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

impl Doors {
    /// Welcomes a path of a proven peer, or refuses it where its transport is not used.
    ///
    /// # Errors
    /// Retry: the path did not come about, or (rdma, which is served here to its end) has ended.
    pub fn serve(&self, mut connection: Connection, purpose: Purpose, link: &Link) -> Result<(), Error> {
        let lanes = self.lanes.iter().find(|(kind, _)| *kind == Kind::Tcp).map(|(_, lanes)| lanes);
        match (purpose, lanes) {
            (Purpose::Lane { node }, Some(lanes)) => {
                connection.welcome();
                // An I/O thread serves it from now on.
                lanes.adopt(connection.into_lane()?, &node)
            }
            #[cfg(feature = "rdma")]
            (Purpose::Rdma { node }, _) if let Some(shared) = &self.queue_pairs => {
                rdma::serve(shared, connection, &node, link)
            }
            (purpose, _) => {
                let name = if matches!(purpose, Purpose::Rdma { .. }) { "rdma" } else { "tcp" };
                connection
                    .refuse(&format!("this process takes no copies by {name}: it was started with other transports"));
                Ok(())
            }
        }
    }

    /// What peers have moved here, by transport.
    pub fn served(&self) -> Vec<(Kind, Totals)> {
        let lanes = self.lanes.iter().map(|(kind, lanes)| (*kind, lanes.served()));
        #[cfg(feature = "rdma")]
        let lanes = lanes.chain(self.queue_pairs.iter().map(|shared| (Kind::Rdma, shared.served())));
        lanes.collect()
    }

    /// Ends what a peer's life still has open here.
    pub fn close(&self, peer: &NodeId, reason: &str) {
        self.lanes.iter().for_each(|(_, lanes)| lanes.close(peer, reason));
    }
}

//! Where daemons dial in to the conductor: an authenticated session each, hosted in the conductor's process.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::config::{Config, open_key};
use crate::error::Error;
use crate::keys::Key;
use crate::link::{Connection, Link, Stream, nonce, now};
use crate::mailbox::Mailbox;
use crate::messages::{DaemonOrder, DaemonReport, Purpose};
use crate::server::{Listener, Threads, accept_all};
use crate::session::{Event, Session};
use crate::tls::Side;
use crate::types::{Incarnation, NodeAddress};
use crate::wire;

/// Reports that may wait for the conductor; beyond, they are dropped, and the gap in their numbers shows it.
const REPORT_LIMIT: usize = 1 << 18;

/// What a daemon said, or that it is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndpointEvent {
    /// A daemon's report.
    Report(NodeAddress, DaemonReport),
    /// The session ended: disconnect, or silence.
    Gone(NodeAddress),
}

/// The endpoint.
pub struct ReportEndpoint {
    shared: Arc<Shared>,
    address: SocketAddr,
    link: Link,
    threads: Arc<Threads>,
}

struct Shared {
    key: Key,
    tls: bool,
    me: NodeAddress,
    mailbox: Mailbox<EndpointEvent>,
    /// By node: the session that counts.
    daemons: Mutex<HashMap<String, Standing>>,
}

struct Standing {
    number: u64,
    node: NodeAddress,
    link: Link,
}

impl ReportEndpoint {
    /// Listens at `host:port` (port 0: any); with `tls`, for daemons that were started with it.
    ///
    /// # Errors
    /// Give up: cannot bind, or a non-loopback address without a key.
    pub fn new(listen: &str, key: Option<Key>, tls: bool, incarnation: Incarnation) -> Result<Self, Error> {
        let config = Config {
            listen: Some(listen.into()),
            // Daemons are told where the conductor is, so any address may be listened at.
            advertise: Some(listen.into()),
            session_key: key,
            tls,
            ..Config::new("conductor", 0)
        };
        config.check()?;
        let (listener, address) = Listener::tcp(listen)?;
        let me = NodeAddress { node: "conductor".into(), address: address.to_string(), incarnation };
        let shared = Arc::new(Shared {
            key: key.unwrap_or_else(open_key),
            tls,
            me,
            mailbox: Mailbox::new(REPORT_LIMIT)?,
            daemons: Mutex::default(),
        });
        let (threads, link) = (Arc::new(Threads::default()), Link::new()?);
        let (at, within, until) = (shared.clone(), threads.clone(), link.clone());
        threads.spawn("report-accept", &link, move || {
            accept_all(&[listener], &until, |stream| welcome(&at, &within, stream));
        })?;
        Ok(Self { shared, address, link, threads })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Readable while events wait.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.mailbox.as_fd()
    }

    /// Takes what has come.
    pub fn events(&self) -> Vec<EndpointEvent> {
        self.shared.mailbox.take()
    }

    /// Orders a daemon to do something.
    ///
    /// # Errors
    /// Retry: that daemon is not connected, or does not keep up.
    pub fn order(&self, node: &str, order: &DaemonOrder) -> Result<(), Error> {
        let daemons = self.shared.lock();
        let standing = daemons.get(node).ok_or_else(|| Error::retry(format!("the daemon {node} is not connected")))?;
        standing
            .link
            .send(wire::encode(order))
            .map_err(|_| Error::retry(format!("the daemon {node} does not keep up with its orders")))
    }

    /// Ends all sessions and threads. Idempotent.
    pub fn close(&self) {
        self.link.close("the conductor stops");
        self.threads.stop("the conductor stops");
    }
}

impl Drop for ReportEndpoint {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Standing>> {
        // No code that could panic runs under the lock, so a poisoned map is still whole.
        self.daemons.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn welcome(shared: &Arc<Shared>, threads: &Arc<Threads>, stream: Stream) {
    let Ok(link) = Link::new() else { return };
    let (at, number, until) = (shared.clone(), threads.number(), link.clone());
    let started = threads.spawn("report", &link, move || {
        if let Err(error) = serve(&at, number, stream, &until) {
            tracing::warn!("a daemon's session: {error}");
        }
    });
    if let Err(error) = started {
        tracing::warn!("a daemon's connection was closed: {error}");
    }
}

fn serve(shared: &Shared, number: u64, stream: Stream, link: &Link) -> Result<(), Error> {
    let session = Session::accept(shared.key, shared.me.clone(), nonce()?, now());
    let mut connection = Connection::new(stream.secured(shared.tls, Side::Acceptor)?, session, link.clone())?;
    let node = match connection.handshake()? {
        Event::Proven(Purpose::Report { node }) => node,
        Event::Proven(_) => {
            connection.refuse("this is the conductor's endpoint: daemons report here, nothing else");
            return Ok(());
        }
        event => return Err(Error::bug(format!("{event:?} on an accepted session"))),
    };
    {
        let mut daemons = shared.lock();
        let standing = Standing { number, node: node.clone(), link: link.clone() };
        if let Some(old) = daemons.insert(node.node.clone(), standing) {
            old.link.close("the daemon has dialled in again");
            shared.mailbox.push_always(EndpointEvent::Gone(old.node));
        }
    }
    connection.welcome();
    let ended = connection.drive(|payload, _| {
        let report: DaemonReport = wire::decode(&payload)?;
        let daemons = shared.lock();
        if daemons.get(&node.node).is_none_or(|standing| standing.number != number) {
            return Ok(());
        }
        let event = EndpointEvent::Report(node.clone(), report);
        if matches!(event, EndpointEvent::Report(_, DaemonReport::Hello { .. })) {
            shared.mailbox.push_always(event);
        } else if shared.mailbox.push(event).is_err() {
            tracing::debug!("a report of {} was dropped: the conductor does not read", node.node);
        }
        Ok(())
    });
    tracing::info!("{} reports no more: {ended}", node.node);
    let mut daemons = shared.lock();
    if daemons.get(&node.node).is_some_and(|standing| standing.number == number) {
        daemons.remove(&node.node);
        shared.mailbox.push_always(EndpointEvent::Gone(node));
    }
    Ok(())
}

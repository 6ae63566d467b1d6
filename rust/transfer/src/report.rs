//! Where daemons dial in to the conductor: an authenticated session each, hosted in the conductor's process.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use index::changes::{CHANGE_BYTES, Change, DRAM, SSD, push};

use crate::config::{Config, open_key};
use crate::error::Error;
use crate::keys::Key;
use crate::link::{Connection, Link, Stream, nonce, now};
use crate::mailbox::Mailbox;
use crate::messages::{DaemonOrder, DaemonReport, Purpose};
use crate::server::{Listener, Threads, accept_all};
use crate::session::{Event, Session};
use crate::tls::Side;
use crate::types::{BlockKey, Incarnation, Medium, NodeAddress};
use crate::wire;

/// Reports that may wait for the conductor; beyond, they are dropped, and the gap in their numbers shows it.
const REPORT_LIMIT: usize = 1 << 18;

/// Most changes in one batch: more would keep who takes them in from other work for longer than a millisecond.
const BATCH: usize = 4096;

/// What a daemon said, or that it is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndpointEvent {
    /// A daemon's report; never `Stored`, `Removed` or `Dump`.
    Report(NodeAddress, DaemonReport),
    /// Consecutive `Stored` and `Removed`, packed (`index::changes`), by the number of the first.
    Changed(NodeAddress, u64, Vec<u8>),
    /// A `Dump` whose blocks are packed likewise.
    #[allow(missing_docs, reason = "fields as those of `Dump`")]
    Dumped { node: NodeAddress, sequence: u64, part: u32, blocks: Vec<u8>, last: bool },
    /// The session ended: disconnect, or silence.
    Gone(NodeAddress),
}

/// As it waits for the conductor.
#[derive(Debug)]
enum Waiting {
    Report(NodeAddress, DaemonReport),
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
    mailbox: Mailbox<Waiting>,
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

    /// Takes what has come: of each daemon in its order, what changes its blocks in batches.
    pub fn events(&self) -> Vec<EndpointEvent> {
        batched(self.shared.mailbox.take())
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

/// Changes of one daemon stand together where the first of them came; what it says of something else ends the batch.
fn batched(waiting: Vec<Waiting>) -> Vec<EndpointEvent> {
    let mut events = Vec::new();
    // By node: where its open batch stands.
    let mut open: HashMap<String, usize> = HashMap::new();
    for item in waiting {
        let (from, report) = match item {
            Waiting::Gone(node) => {
                open.remove(&node.node);
                events.push(EndpointEvent::Gone(node));
                continue;
            }
            Waiting::Report(from, report) => (from, report),
        };
        let (sequence, change) = match report {
            DaemonReport::Stored { sequence, key, parent, position, medium } => {
                (sequence, stored(key, parent, position, medium))
            }
            DaemonReport::Removed { sequence, key, medium } => {
                (sequence, Change { removed: true, ..stored(key, BlockKey::default(), 0, medium) })
            }
            DaemonReport::Dump { sequence, part, blocks, last } => {
                open.remove(&from.node);
                let mut packed = Vec::with_capacity(blocks.len() * CHANGE_BYTES);
                for (key, parent, position, medium) in blocks {
                    push(&mut packed, &stored(key, parent, position, medium));
                }
                events.push(EndpointEvent::Dumped { node: from, sequence, part, blocks: packed, last });
                continue;
            }
            report => {
                open.remove(&from.node);
                events.push(EndpointEvent::Report(from, report));
                continue;
            }
        };
        let entry = open.entry(from.node.clone());
        if let Entry::Occupied(batch) = &entry
            && let EndpointEvent::Changed(node, first, packed) = &mut events[*batch.get()]
            && *node == from
            && sequence == *first + (packed.len() / CHANGE_BYTES) as u64
            && packed.len() < BATCH * CHANGE_BYTES
        {
            push(packed, &change);
            continue;
        }
        entry.insert_entry(events.len());
        let mut packed = Vec::new();
        push(&mut packed, &change);
        events.push(EndpointEvent::Changed(from, sequence, packed));
    }
    events
}

fn stored(key: BlockKey, parent: BlockKey, position: u32, medium: Medium) -> Change {
    let tier = match medium {
        Medium::Dram => DRAM,
        Medium::Ssd => SSD,
    };
    Change { removed: false, tier, position, key: key.0, parent: parent.0 }
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
            shared.mailbox.push_always(Waiting::Gone(old.node));
        }
    }
    connection.welcome();
    let ended = connection.drive(|payload, _| {
        let report: DaemonReport = wire::decode(&payload)?;
        let daemons = shared.lock();
        if daemons.get(&node.node).is_none_or(|standing| standing.number != number) {
            return Ok(());
        }
        let event = Waiting::Report(node.clone(), report);
        if matches!(event, Waiting::Report(_, DaemonReport::Hello { .. })) {
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
        shared.mailbox.push_always(Waiting::Gone(node));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    //! Goal: batches say what the reports say. Method: random reports of three daemons, packed and unpacked again.
    use index::changes::{check, read};
    use proptest::prelude::*;

    use super::*;

    fn node(number: u8) -> NodeAddress {
        NodeAddress { node: format!("node {number}"), address: "a:1".into(), incarnation: 1 }
    }

    fn key(number: u8) -> BlockKey {
        BlockKey([number; 16])
    }

    fn heartbeat() -> DaemonReport {
        DaemonReport::Heartbeat { next_sequence: 0, count: 0, xor: key(0), counters: Vec::new(), draining: false }
    }

    /// What each daemon says, in order: (sequence, change), or something else.
    fn said(events: &[EndpointEvent], of: u8) -> Vec<Result<(u64, Change), String>> {
        let mut said = Vec::new();
        for event in events {
            match event {
                EndpointEvent::Changed(from, first, packed) if *from == node(of) => {
                    let changes = check(packed).expect("well formed").iter().map(read);
                    said.extend((*first..).zip(changes).map(Ok));
                }
                EndpointEvent::Report(from, _) if *from == node(of) => said.push(Err("beat".into())),
                EndpointEvent::Gone(from) if *from == node(of) => said.push(Err("gone".into())),
                EndpointEvent::Dumped { node: from, part, .. } if *from == node(of) => {
                    said.push(Err(format!("part {part}")))
                }
                _ => {}
            }
        }
        said
    }

    proptest! {
        #[test]
        fn nothing_is_lost_or_moved(script in prop::collection::vec((0..3_u8, 0..12_u8, 0..4_u8), 0..200)) {
            let (mut waiting, mut wanted, mut next) = (Vec::new(), vec![Vec::new(); 3], [0_u64; 3]);
            for (at, kind, number) in script {
                let (from, slot) = (node(at), usize::from(at));
                let mut change = stored(key(number), key(number + 1), number.into(), Medium::Ssd);
                let sequence = next[slot];
                let report = match kind {
                    0 => heartbeat(),
                    1 => {
                        let blocks = vec![(key(1), key(0), 7, Medium::Dram)];
                        DaemonReport::Dump { sequence, part: number.into(), blocks, last: true }
                    }
                    2 => {
                        waiting.push(Waiting::Gone(from));
                        wanted[slot].push(Err("gone".into()));
                        continue;
                    }
                    // One is lost.
                    3 => {
                        next[slot] += 1;
                        continue;
                    }
                    4..8 => {
                        change = Change { removed: true, position: 0, parent: [0; 16], ..change };
                        DaemonReport::Removed { sequence, key: key(number), medium: Medium::Ssd }
                    }
                    _ => DaemonReport::Stored {
                        sequence, key: key(number), parent: key(number + 1), position: number.into(), medium: Medium::Ssd,
                    },
                };
                wanted[slot].push(match kind {
                    0 => Err("beat".into()),
                    1 => Err(format!("part {number}")),
                    _ => Ok((sequence, change)),
                });
                next[slot] += u64::from(kind > 3);
                waiting.push(Waiting::Report(from, report));
            }
            let events = batched(waiting);
            for (at, wanted) in wanted.iter().enumerate() {
                prop_assert_eq!(&said(&events, at as u8), wanted);
            }
            // No two batches of a daemon could be one.
            for at in 0..3 {
                let mine: Vec<_> = events.iter().filter(|event| match event {
                    EndpointEvent::Report(from, _) | EndpointEvent::Changed(from, ..) | EndpointEvent::Gone(from) => *from == node(at),
                    EndpointEvent::Dumped { node: from, .. } => *from == node(at),
                }).collect();
                for pair in mine.windows(2) {
                    if let [EndpointEvent::Changed(_, first, packed), EndpointEvent::Changed(_, second, _)] = pair {
                        prop_assert_ne!(first + (packed.len() / CHANGE_BYTES) as u64, *second);
                    }
                }
            }
        }
    }

    #[test]
    fn a_batch_has_a_limit() {
        let stored = |sequence| DaemonReport::Stored {
            sequence,
            key: key(1),
            parent: key(0),
            position: 0,
            medium: Medium::Dram,
        };
        let count = BATCH as u64 + 1;
        let events = batched((0..count).map(|sequence| Waiting::Report(node(0), stored(sequence))).collect());
        let sizes: Vec<_> = events
            .iter()
            .map(|event| match event {
                EndpointEvent::Changed(_, first, packed) => (*first, packed.len() / CHANGE_BYTES),
                _ => (0, 0),
            })
            .collect();
        assert_eq!(sizes, [(0, BATCH), (BATCH as u64, 1)]);
    }
}

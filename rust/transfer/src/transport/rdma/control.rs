//! What both ends of an rdma path say to each other beside the data, and the connection that carries it.
//!
//! ```text
//! initiator                                             target
//!    | -- Open     my ports ------------------------------> |  makes a queue pair per line
//!    | <- Offer    my ports, my queue pairs --------------- |
//!    | -- Join     my queue pairs ------------------------> |  both: ready to send
//!    | <- Joined ------------------------------------------ |
//!    |                                                      |
//!    | -- Want     copies: where, how many bytes ---------> |  checks, holds, pins
//!    | <- Grant    addresses, keys (reads: checksums) ----- |
//!    |    ===== RDMA WRITE or READ, by slices, on any line = |
//!    | -- Landed   checksums (writes) --------------------> |  verifies, lets go
//!    | <- Applied  outcomes ------------------------------- |
//!    | -- Released (reads) -------------------------------> |  lets go
//!    |                                                      |
//!    | -- Retire   a line that failed --------------------> |  destroys its queue pair before it reads on
//!    | -- Renew    a new queue pair for that line --------> |  makes one too
//!    | <- Renewed ----------------------------------------- |
//!    |                                                      |
//!    | -- Fence    other paths that are lost -------------> |  ends them (`transport::fence`)
//!    | <- Fenced ------------------------------------------ |
//! ```
//!
//! A line joins the k-th port of one side (counted around) with the k-th of the other. Messages are postcard in the
//! frames of an authenticated session, so keys and addresses reach only who knows the secret. The session's order does
//! the fencing: `Retire` stands before the `Landed` of any copy that the line had touched, so no late packet of that line
//! can arrive in memory that was let go.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, poll};
use serde::{Deserialize, Serialize};

use crate::link::{Connection, Link, Stream, now, ready, retry};
use crate::mailbox::poll_timeout;
use crate::session::{Ended, Event, Session};
use crate::transport::{Op, Outcome};
use crate::types::{NodeAddress, Span};
use crate::wire;

/// Most ports of one side: beyond, it is another program.
pub const PORT_LIMIT: usize = 64;
/// Checksums in one message (a copy that has more goes alone): about half a MiB.
pub const SUMS_PER_MESSAGE: usize = 100_000;
/// Bytes taken from the socket at once.
const READ_BYTES: usize = 64 << 10;

/// How to reach a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortAddress {
    /// Its GID.
    pub gid: [u8; 16],
    /// Its LID, on InfiniBand; else 0.
    pub lid: u16,
    /// True on InfiniBand.
    pub infiniband: bool,
    /// Largest packet, as verbs number it (5 = 4096 bytes).
    pub mtu: u8,
    /// RDMA READs that it serves at once, per queue pair.
    pub reads: u8,
}

/// How to reach a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueAddress {
    /// Its number.
    pub number: u32,
    /// Number of its first packet.
    pub packet: u32,
}

/// A copy that the initiator wants to make. The number is the initiator's, unique on the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Wanted {
    pub number: u64,
    pub write: bool,
    pub remote: Span,
    pub bytes: u32,
    pub grain: u32,
}

impl Wanted {
    /// Which way.
    pub fn op(&self) -> Op {
        if self.write { Op::Write } else { Op::Read }
    }
}

/// A stretch of granted memory with the keys that open it: one per port of the target, in the order of its `Offer`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Run {
    pub address: u64,
    pub bytes: u32,
    pub keys: Vec<u32>,
}

/// What the target says about a copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// Go on: the runs make up its bytes. For reads the checksums too.
    Granted {
        /// In order.
        runs: Vec<Run>,
        /// One per grain; empty for writes.
        sums: Vec<u32>,
    },
    /// That life is over; nothing is touched.
    Fenced,
    /// Out of bounds or not permitted; nothing is touched.
    Denied,
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Message {
    Open { ports: Vec<PortAddress>, queues_per_port: u8 },
    Offer { ports: Vec<PortAddress>, queues: Vec<QueueAddress> },
    Join { queues: Vec<QueueAddress> },
    Joined,
    Want { copies: Vec<Wanted> },
    Grant { answers: Vec<(u64, Answer)> },
    Landed { copies: Vec<(u64, Vec<u32>)> },
    Applied { outcomes: Vec<(u64, bool)> },
    Released { numbers: Vec<u64> },
    Retire { line: u8 },
    Renew { line: u8, queue: QueueAddress },
    Renewed { line: u8, queue: QueueAddress },
    Fence { paths: Vec<u64> },
    Fenced,
}

/// What `Applied` means for a copy.
pub fn applied(intact: bool) -> Outcome {
    if intact { Outcome::Done } else { Outcome::Corrupt }
}

/// Which ports line `k` joins: (of this side, of the other side). Every port of either side is used.
pub fn joins(line: usize, ours: usize, theirs: usize) -> (usize, usize) {
    (line % ours, line % theirs)
}

/// The session of a path on its socket, driven by the path's own thread beside its completions.
pub struct Control {
    stream: TcpStream,
    session: Session,
    /// Bytes under way, from `sent` on.
    pending: Vec<u8>,
    sent: usize,
    buffer: Vec<u8>,
    events: Vec<Event>,
}

impl Control {
    /// The dialling side: proves itself and makes sure who answers, before `until`.
    ///
    /// # Errors
    /// Why there is no session.
    pub fn dial(
        stream: TcpStream,
        session: Session,
        peer: &NodeAddress,
        link: &Link,
        until: Instant,
    ) -> Result<Self, Ended> {
        let mut control = Self::new(stream, session, Vec::new(), Vec::new())?;
        while control.events.is_empty() {
            control.wait(link, until)?;
            control.step()?;
        }
        match control.events.remove(0) {
            Event::Established(node) if node.node == peer.node && node.incarnation == peer.incarnation => Ok(control),
            Event::Established(node) => Err(Ended::Closed(format!(
                "{} is {} in life {}, not {} in life {}",
                peer.address, node.node, node.incarnation, peer.node, peer.incarnation
            ))),
            event => Err(Ended::Closed(format!("{event:?} from an acceptor"))),
        }
    }

    /// The accepting side: a connection whose session stands; it waits `slowness` times longer than normally.
    ///
    /// # Errors
    /// It is not a TCP connection.
    pub fn accepted(connection: Connection, slowness: u32) -> Result<Self, Ended> {
        let (stream, mut session, pending, events) = connection.into_parts();
        session.slow_down(slowness);
        match stream {
            Stream::Tcp(stream) => Self::new(stream, session, pending, events),
            Stream::Unix(_) | Stream::Tls(_) => {
                Err(Ended::Closed("an rdma path is set up over TCP without TLS".into()))
            }
        }
    }

    fn new(stream: TcpStream, session: Session, pending: Vec<u8>, events: Vec<Event>) -> Result<Self, Ended> {
        stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).map_err(closed)?;
        Ok(Self { stream, session, pending, sent: 0, buffer: vec![0; READ_BYTES], events })
    }

    /// Queues a message; `flush` sends it.
    pub fn say(&mut self, message: &Message) {
        self.session.send(&wire::encode(message), now());
    }

    /// Ends the session with a reason that the other side's user reads, as far as the socket takes it now.
    pub fn refuse(&mut self, reason: &str) {
        self.session.refuse(reason, now());
        // Whether it arrives changes nothing here: the end of the connection does.
        let _ = self.flush();
    }

    /// Sends what the socket takes.
    ///
    /// # Errors
    /// The connection broke.
    pub fn flush(&mut self) -> Result<(), Ended> {
        self.pending.extend(self.session.take_output());
        while self.sent < self.pending.len() {
            match self.stream.write(&self.pending[self.sent..]) {
                Ok(0) => return Err(Ended::Closed("the socket takes nothing".into())),
                Ok(bytes) => self.sent += bytes,
                Err(error) if retry(&error) => return Ok(()),
                Err(error) => return Err(closed(error)),
            }
        }
        self.pending.clear();
        self.sent = 0;
        Ok(())
    }

    /// Sends and receives what can be without waiting, and appends the messages that have come (also before an error).
    ///
    /// # Errors
    /// Why the session is over.
    pub fn exchange(&mut self, into: &mut Vec<Message>) -> Result<(), Ended> {
        let result = self.step();
        for event in std::mem::take(&mut self.events) {
            if let Event::Message(payload) = event {
                into.push(wire::decode(&payload)?);
            }
        }
        result
    }

    fn step(&mut self) -> Result<(), Ended> {
        self.session.tick(now())?;
        self.flush()?;
        loop {
            match self.stream.read(&mut self.buffer) {
                Ok(0) => return Err(Ended::Closed("the other side hung up".into())),
                Ok(bytes) => {
                    let result = self.session.receive(&self.buffer[..bytes], now(), &mut self.events);
                    self.flush()?;
                    result?;
                    if bytes < self.buffer.len() {
                        return Ok(());
                    }
                }
                Err(error) if retry(&error) => return Ok(()),
                Err(error) => return Err(closed(error)),
            }
        }
    }

    /// One message, waiting for it until `until` or until `link` is closed: for the set-up of a path.
    ///
    /// # Errors
    /// Why there is none.
    pub fn expect(&mut self, link: &Link, until: Instant) -> Result<Message, Ended> {
        loop {
            let at = self.events.iter().position(|event| matches!(event, Event::Message(_)));
            if let Some(Event::Message(payload)) = at.map(|at| self.events.remove(at)) {
                return Ok(wire::decode(&payload)?);
            }
            self.flush()?;
            self.wait(link, until)?;
            self.step()?;
        }
    }

    fn wait(&mut self, link: &Link, until: Instant) -> Result<(), Ended> {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Ended::Slow);
        }
        self.flush()?;
        let mut wait =
            [PollFd::new(self.stream.as_fd(), self.wants()), PollFd::new(link.wake().as_fd(), PollFlags::POLLIN)];
        // An error is an interrupted call: the loop above comes back.
        let _ = poll(&mut wait, poll_timeout(Some(left.min(self.tick_within()))));
        if ready(&wait[1]) {
            link.wake().clear();
        }
        if link.is_closed() { Err(Ended::Closed("closed here".into())) } else { Ok(()) }
    }

    /// What to wait for on the socket.
    pub fn wants(&self) -> PollFlags {
        if self.sent < self.pending.len() { PollFlags::POLLIN | PollFlags::POLLOUT } else { PollFlags::POLLIN }
    }

    /// How long until the session's clock has something to do.
    pub fn tick_within(&self) -> Duration {
        let at = self.session.next_tick().unwrap_or_default();
        Duration::from_nanos(at.saturating_sub(now()))
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn closed(error: io::Error) -> Ended {
    Ended::Closed(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::RegionId;
    use proptest::prelude::*;

    fn queue() -> impl Strategy<Value = QueueAddress> {
        any::<(u32, u32)>().prop_map(|(number, packet)| QueueAddress { number, packet })
    }

    fn port() -> impl Strategy<Value = PortAddress> {
        any::<([u8; 16], u16, bool, u8, u8)>().prop_map(|(gid, lid, infiniband, mtu, reads)| PortAddress {
            gid,
            lid,
            infiniband,
            mtu,
            reads,
        })
    }

    fn wanted() -> impl Strategy<Value = Wanted> {
        any::<(u64, bool, (u32, u32, u64), u32, u32)>().prop_map(
            |(number, write, (region, life, offset), bytes, grain)| Wanted {
                number,
                write,
                remote: Span { region: RegionId(region), life, offset },
                bytes,
                grain,
            },
        )
    }

    fn answer() -> impl Strategy<Value = Answer> {
        let run = any::<(u64, u32, Vec<u32>)>().prop_map(|(address, bytes, keys)| Run { address, bytes, keys });
        prop_oneof![
            (prop::collection::vec(run, 0..4), any::<Vec<u32>>())
                .prop_map(|(runs, sums)| Answer::Granted { runs, sums }),
            Just(Answer::Fenced),
            Just(Answer::Denied),
        ]
    }

    fn message() -> impl Strategy<Value = Message> {
        use prop::collection::vec;
        prop_oneof![
            (vec(port(), 0..4), any::<u8>())
                .prop_map(|(ports, queues_per_port)| Message::Open { ports, queues_per_port }),
            (vec(port(), 0..4), vec(queue(), 0..4)).prop_map(|(ports, queues)| Message::Offer { ports, queues }),
            vec(queue(), 0..4).prop_map(|queues| Message::Join { queues }),
            Just(Message::Joined),
            vec(wanted(), 0..4).prop_map(|copies| Message::Want { copies }),
            vec((any::<u64>(), answer()), 0..4).prop_map(|answers| Message::Grant { answers }),
            any::<Vec<(u64, Vec<u32>)>>().prop_map(|copies| Message::Landed { copies }),
            any::<Vec<(u64, bool)>>().prop_map(|outcomes| Message::Applied { outcomes }),
            any::<Vec<u64>>().prop_map(|numbers| Message::Released { numbers }),
            any::<u8>().prop_map(|line| Message::Retire { line }),
            (any::<u8>(), queue()).prop_map(|(line, queue)| Message::Renew { line, queue }),
            (any::<u8>(), queue()).prop_map(|(line, queue)| Message::Renewed { line, queue }),
            any::<Vec<u64>>().prop_map(|paths| Message::Fence { paths }),
            Just(Message::Fenced),
        ]
    }

    proptest! {
        // Goal: what is said is heard, and noise is refused without panic. Method: random messages, cut ones, noise.
        #[test]
        fn messages_survive_the_wire(message in message(), cut in any::<prop::sample::Index>(), noise in any::<Vec<u8>>()) {
            let bytes = wire::encode(&message);
            prop_assert_eq!(wire::decode::<Message>(&bytes).expect("ours"), message);
            let cut = cut.index(bytes.len());
            prop_assert!(wire::decode::<Message>(&bytes[..cut]).is_err());
            let _ = wire::decode::<Message>(&noise);
        }
    }

    // Goal: every port of either side carries something. Method: all pairs of small counts.
    #[test]
    fn lines_use_every_port() {
        for (ours, theirs) in (1..5).flat_map(|ours| (1..5).map(move |theirs| (ours, theirs))) {
            let lines: Vec<_> = (0..ours.max(theirs)).map(|line| joins(line, ours, theirs)).collect();
            assert!((0..ours).all(|port| lines.iter().any(|line| line.0 == port)));
            assert!((0..theirs).all(|port| lines.iter().any(|line| line.1 == port)));
        }
    }
}

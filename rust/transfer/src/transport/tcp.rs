//! The tcp transport: lanes (`transport/lanes`) over TCP connections, IPv4 or IPv6.

use std::time::Duration;

use crate::error::Error;
use crate::keys::Key;
use crate::link::{Connection, DIAL_WITHIN, Link, Stream, dial_tcp, nonce, now};
use crate::messages::Purpose;
use crate::session::{Event, HANDSHAKE_WITHIN, Session};
use crate::tls::Side;
use crate::transport::fence::Fences;
use crate::transport::lanes::{Dial, LaneTransport, Settings};
use crate::types::NodeAddress;

/// A lane transport over TCP. `me` is told to peers; `fences` is the process's; `notify` as `Transport` says.
///
/// # Errors
/// Retry: out of threads or descriptors.
pub fn transport(
    key: Key,
    me: NodeAddress,
    settings: Settings,
    fences: Fences,
    notify: Box<dyn Fn() + Send + Sync>,
) -> Result<LaneTransport, Error> {
    let dialler = Dialler { key, me, tls: settings.tls };
    LaneTransport::new("tcp", settings, fences, Box::new(dialler), notify)
}

struct Dialler {
    key: Key,
    me: NodeAddress,
    tls: bool,
}

impl Dial for Dialler {
    fn dial(&self, peer: &NodeAddress, path: u64, link: &Link) -> Result<Stream, Error> {
        let began = now();
        let stream = dial_tcp(&peer.address, link, DIAL_WITHIN)
            .map_err(|error| Error::retry(format!("cannot reach {}: {error}", peer.address)))?;
        let purpose = Purpose::Lane { node: self.me.clone(), path };
        prove(Stream::Tcp(stream).secured(self.tls, Side::Dialler)?, self.key, purpose, peer, began, link)
    }
}

/// The handshake of a lane: both sides know the key, and the other one is the peer in the life that is meant. Ends within
/// 3 s of `began`.
pub(super) fn prove(
    stream: Stream,
    key: Key,
    purpose: Purpose,
    peer: &NodeAddress,
    began: u64,
    link: &Link,
) -> Result<Stream, Error> {
    // A session's handshake has a limit of its own, counted from an earlier begin so that the path's holds.
    let earlier = HANDSHAKE_WITHIN.saturating_sub(DIAL_WITHIN.as_nanos() as u64);
    let session = Session::dial(key, purpose, nonce()?, began.saturating_sub(earlier));
    let mut connection = Connection::new(stream, session, link.clone())?;
    match connection.handshake()? {
        Event::Established(node) if node.node == peer.node && node.incarnation == peer.incarnation => {
            Ok(connection.into_lane()?)
        }
        Event::Established(node) => Err(Error::retry(format!(
            "{} is {} in life {}, not {} in life {}",
            peer.address, node.node, node.incarnation, peer.node, peer.incarnation
        ))),
        event => Err(Error::give_up(format!("{event:?} from an acceptor"))),
    }
}

const _: () = assert!(Duration::from_nanos(HANDSHAKE_WITHIN).as_millis() > DIAL_WITHIN.as_millis());

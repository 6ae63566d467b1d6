//! The asking side: a session with a daemon on this host, over its unix socket.

use std::io::ErrorKind as IoKind;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{AdminReply, AdminRequest};
use crate::error::Error;
use crate::keys::Key;
use crate::link::{Connection, Link, Stream, nonce, now};
use crate::messages::Purpose;
use crate::session::{Ended, Event, HANDSHAKE_WITHIN, Session};
use crate::types::NodeAddress;
use crate::wire;

/// A session with a daemon on this host, for whoever runs it.
pub struct AdminClient {
    link: Link,
    node: NodeAddress,
    replies: Receiver<Result<Told, Error>>,
    thread: Option<JoinHandle<()>>,
    timeout: Duration,
}

enum Told {
    Node(NodeAddress),
    Reply(AdminReply),
}

impl AdminClient {
    /// Dials the daemon's socket and proves the session key both ways. Later, each reply may take `timeout`.
    ///
    /// # Errors
    /// Retry: no daemon is there. Give up: it has another secret, or is no daemon.
    pub fn connect(socket: &Path, key: Key, timeout: Duration) -> Result<Self, Error> {
        let at = socket.display();
        let stream = UnixStream::connect(socket).map_err(|error| match error.kind() {
            IoKind::NotFound | IoKind::ConnectionRefused => Error::retry(format!(
                "no daemon listens at {at}: start it, or name the socket that it was started with"
            )),
            IoKind::PermissionDenied => {
                Error::give_up(format!("{at} is another user's: run this as the daemon's user"))
            }
            _ => Error::give_up(format!("{at} cannot be reached: {error}")),
        })?;
        let link = Link::new()?;
        let session = Session::dial(key, Purpose::Admin, nonce()?, now());
        let connection = Connection::new(Stream::Unix(stream), session, link.clone())?;
        // One reply for each request, and the last word.
        let (tell, replies) = sync_channel(2);
        let thread = std::thread::Builder::new()
            .name("admin".into())
            .spawn(move || listen(connection, &tell))
            .map_err(|error| Error::retry(format!("no thread: {error}")))?;
        let nobody = NodeAddress { node: String::new(), address: String::new(), incarnation: 0 };
        let mut client = Self { link, node: nobody, replies, thread: Some(thread), timeout };
        // The session gives its handshake up by itself.
        match client.replies.recv_timeout(Duration::from_nanos(2 * HANDSHAKE_WITHIN)) {
            Ok(Ok(Told::Node(node))) => client.node = node,
            Ok(Err(error)) => return Err(Error { message: format!("{at}: {}", error.message), ..error }),
            _ => return Err(Error::retry(format!("{at}: who listens there does not answer: is it a transferd?"))),
        }
        Ok(client)
    }

    /// Who answers.
    pub fn node(&self) -> &NodeAddress {
        &self.node
    }

    /// Asks, and waits for the reply.
    ///
    /// # Errors
    /// Retry: the daemon has ended, does not answer in time, or says why it cannot now.
    pub fn ask(&mut self, request: &AdminRequest) -> Result<AdminReply, Error> {
        self.link
            .send(wire::encode(request))
            .map_err(|_| Error::give_up("this is more than one request can hold: ask in parts"))?;
        // What the daemon is asked to wait counts extra.
        let patience = match request {
            AdminRequest::Drain { within_ms, .. } => self.timeout + Duration::from_millis(*within_ms),
            _ => self.timeout,
        };
        match self.replies.recv_timeout(patience) {
            Ok(Ok(Told::Reply(AdminReply::Refused(why)))) => Err(Error::retry(why)),
            Ok(Ok(Told::Reply(reply))) => Ok(reply),
            Ok(Ok(Told::Node(_))) => Err(Error::bug("a second handshake")),
            Ok(Err(error)) => Err(error),
            Err(RecvTimeoutError::Timeout) => {
                let node = &self.node.node;
                Err(Error::retry(format!("{node} does not answer within {} s", patience.as_secs())))
            }
            Err(RecvTimeoutError::Disconnected) => Err(Error::retry("the session is over")),
        }
    }
}

impl Drop for AdminClient {
    fn drop(&mut self) {
        self.link.close("enough");
        // A reply that nobody takes any more must not keep the thread.
        while self.replies.recv().is_ok() {}
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The client's thread.
fn listen(mut connection: Connection, tell: &SyncSender<Result<Told, Error>>) {
    let ended = match connection.handshake() {
        Ok(Event::Established(node)) => {
            connection.unwatch();
            // Fails only if nobody listens; then the link is being closed.
            let _ = tell.send(Ok(Told::Node(node)));
            connection.drive(|payload, _| {
                let reply = wire::decode(&payload)?;
                tell.send(Ok(Told::Reply(reply))).map_err(|_| Ended::Closed("enough".into()))
            })
        }
        Ok(_) => Ended::Closed("the other side is no daemon".into()),
        Err(ended) => ended,
    };
    let _ = tell.send(Err(match ended {
        Ended::Closed(why) => Error::retry(format!("the daemon has ended the session: {why}")),
        Ended::Slow => Error::retry("who listens there does not answer: is it a transferd?"),
        Ended::Wire(error) => Error::give_up(format!("who listens there is no transferd: {error}")),
        other => other.into(),
    }));
}

//! The engine: grants, pushes and fetches, written once, above `Transport`. Sans-IO.
//!
//! The shell (`daemon`) feeds [`Input`]s and carries out [`Output`]s; so does the model test, in virtual time.

use crate::messages::{DaemonOrder, DaemonReport, LocalEvent, LocalRequest, PeerMessage};
use crate::transport::{Completion, Copy};
use crate::types::{ClientId, NodeAddress, NodeId};

/// What can happen to an engine.
#[derive(Clone, Debug)]
pub enum Input {
    /// A local client sent a request (its first is `Attach`).
    Local { client: ClientId, request: LocalRequest },
    /// A local client's connection is gone: the process is proven dead or has let go; its tags end, its writes are over.
    LocalGone { client: ClientId },
    /// A session with this peer stands (dialled by either side).
    PeerUp { peer: NodeAddress },
    /// The session ended or could not be made.
    PeerDown { peer: NodeAddress },
    /// A peer said something.
    Peer { peer: NodeId, message: PeerMessage },
    /// Copies have completed.
    Completed(Vec<Completion>),
    /// The conductor ordered something.
    Order(DaemonOrder),
    /// Time has passed. The shell calls at least every 100 ms.
    Tick,
}

/// What the engine wants done, in this order.
#[derive(Clone, Debug)]
pub enum Output {
    /// Tell a local client.
    Local { client: ClientId, event: LocalEvent },
    /// Dial this peer; `PeerUp` or `PeerDown` must follow.
    Dial { peer: NodeAddress },
    /// Tell a peer (a session stands).
    Peer { peer: NodeId, message: PeerMessage },
    /// Submit copies to the transport towards this peer (connect first; on `Busy` queue and retry in order).
    Submit { peer: NodeAddress, copies: Vec<Copy> },
    /// Tell the conductor, if one is connected (the shell bounds the queue and marks a gap by dropping).
    Report(DaemonReport),
}

//! How bytes move. One seam, several twins: `tcp` for real networks, `sim` for tests in virtual time.

pub mod fence;
pub mod lanes;
#[cfg(feature = "rdma")]
pub mod rdma;
pub mod served;
pub mod shm;
pub mod sim;
pub mod tcp;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::memory::Arena;
use crate::region::Regions;
pub use crate::types::Kind;
use crate::types::{Layout, NodeAddress, NodeId, RegionId, SlotRef, Span};

/// Number that whoever submits gives to a copy; the completion repeats it.
pub type CopyId = u64;

/// Most bytes of one copy, but for a single strip that is larger: at 2.5 GB/s a piece takes 0.1 ms, so small urgent
/// copies wait no longer than a few of those, and it stays in the second-level cache between its checksum and the kernel.
pub const PIECE_BYTES: u32 = 256 << 10;

/// A path on which something is due and nothing moves for so long counts as broken.
pub const STALLED_AFTER: Duration = Duration::from_secs(3);

/// Whether copies to a peer would get through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Path {
    /// Nobody asked for it, or it was closed.
    None,
    /// On its way; ends within 3 s.
    Connecting,
    /// It stands.
    Up,
    /// It could not be made, or it broke: why, for a person. `connect` tries again.
    Down(String),
}

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// From the local span into the remote one.
    Write,
    /// From the remote span into the local one.
    Read,
}

/// Bytes on their way between a local region and a peer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Repeated by the completion.
    pub id: CopyId,
    /// Which way.
    pub op: Op,
    /// At this side.
    pub local: Span,
    /// At the peer's side.
    pub remote: Span,
    /// How many; at most [`PIECE_BYTES`] or one `grain`, whichever is more. May be 0.
    pub bytes: u32,
    /// Bytes per checksum; 0: one for the whole copy. With an arena at either end: its strips' size.
    pub grain: u32,
}

impl Copy {
    /// A whole block of a local arena into a slot of a peer's, which has the same layout and so the same geometry.
    pub fn block(arena: &Arena, id: CopyId, source: (RegionId, SlotRef), destination: (RegionId, SlotRef)) -> Self {
        Self::strips(arena, id, source, destination, 0..arena.layout().strips)
    }

    /// As `block`, of some strips.
    pub fn strips(
        arena: &Arena,
        id: CopyId,
        source: (RegionId, SlotRef),
        destination: (RegionId, SlotRef),
        strips: Range<u32>,
    ) -> Self {
        let span = |(region, slot): (RegionId, SlotRef)| Span {
            region,
            life: slot.generation,
            offset: arena.offset_of(slot.slot, strips.start),
        };
        let Layout { strip_bytes, .. } = arena.layout();
        let (local, remote) = (span(source), span(destination));
        Self { id, op: Op::Write, local, remote, bytes: strips.len() as u32 * strip_bytes, grain: strip_bytes }
    }
}

/// What became of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Applied at the destination, every checksum verified there (and, in an arena, stored beside the strips).
    Done,
    /// Refused by the side whose memory it is: that life of the region or slot is over. Nothing was touched.
    Fenced,
    /// Refused there: outside the region, not whole strips, or not permitted. Nothing was touched.
    Denied,
    /// A checksum did not hold at the destination, be it that the bytes were damaged or that another copy wrote there at
    /// the same time. The bytes there are garbage; the copy may be sent again.
    Corrupt,
    /// The path broke before the outcome was known. A write may or may not have been applied, or is applied even later,
    /// but not after anything that is submitted to that peer from now on (`fence`); this side is quiet.
    Lost,
}

/// A completion: this side's memory is touched no more, whatever the outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The copy's number.
    pub id: CopyId,
    /// What became of it.
    pub outcome: Outcome,
}

/// Moves bytes to and from peers.
///
/// Contract, for every implementation (`tests/conformance.rs`):
/// * Every submitted copy completes exactly once, also after `close`; then this side's memory is quiescent.
/// * `Done` means applied and verified; a copy that names an old life completes `Fenced` and changes no byte.
/// * Both sides take their memory through [`Regions`] and so obey lives, bounds, permissions and quarantine.
/// * `submit` never blocks. `Err(Busy)` hands all copies back when the peer's queue is full (bounded, and never when it is
///   empty); try again after a completion.
/// * Copies begin in the order of submission; no order is promised between their ends.
/// * A path on which something is due and nothing moves for 3 s counts as broken: its copies are `Lost`. The next
///   `connect` makes a new one.
/// * The owner gave a `notify` at construction. It is called, from any thread but never from within a method, when
///   there is something to poll or a path has changed.
pub trait Transport: Send {
    /// Makes this memory (what is registered now, and what will be) the local end of copies. Called once, first.
    fn register(&mut self, regions: Arc<Regions>);
    /// Prepares a path to a peer, if none stands or is on its way. Failures show in `path`, and as `Lost` copies.
    fn connect(&mut self, peer: &NodeAddress);
    /// How the path to a peer is.
    fn path(&self, peer: &NodeId) -> Path;
    /// Starts copies to a connected peer.
    fn submit(&mut self, peer: &NodeId, copies: &[Copy]) -> Result<(), Busy>;
    /// Takes the completions that have come since the last call.
    fn poll(&mut self, into: &mut Vec<Completion>);
    /// For a thread that is going to wait for a few small copies to this peer; `None`: this transport has no use for one.
    fn helper(&self, peer: &NodeId) -> Option<Box<dyn Helper>> {
        let _ = peer;
        None
    }
    /// Breaks the path to a peer: what is under way completes as `Lost`.
    fn close(&mut self, peer: &NodeId);
}

/// Lets a thread that would only wait do the transport's work meanwhile: the answer wakes it and nobody else, which saves a
/// small copy a third of its time. Usable without the transport at hand.
pub trait Helper: Send + Sync {
    /// Takes over the work on what is under way. `None`: others do it, or nothing is.
    fn take_over(&self) -> Option<Box<dyn Hand>>;
    /// Takes over the work on what is submitted next, if nothing is under way.
    fn take_next(&self) -> Option<Box<dyn Hand>>;
}

/// Work that was taken over; given back when it is dropped, which must be soon after nobody waits for it any more.
pub trait Hand {
    /// Waits at most `within` for an answer. True: something has come, `poll` now; `notify` may not tell of it. False:
    /// nothing has; if the time is not over, nothing will here.
    fn wait(&mut self, within: Duration) -> bool;
}

/// The peer's queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy;

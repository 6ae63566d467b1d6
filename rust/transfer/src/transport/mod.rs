//! How block bytes move. One seam, several twins: `tcp` for real networks, `sim` for tests in virtual time.

pub mod sim;
pub mod tcp;

use crate::types::{NodeAddress, NodeId, SlotRef};

/// Number the engine gives to a copy it submits; the completion repeats it.
pub type CopyId = u64;

/// One block on its way: all strips of a local slot into a slot of a peer's arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Repeated by the completion.
    pub id: CopyId,
    /// Read from here. The engine holds a pin on it until the completion.
    pub source: SlotRef,
    /// Written there, if that life of the slot is still open for writing.
    pub destination: SlotRef,
}

/// What became of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Applied at the destination, every strip's checksum verified there; its checksums are stored beside it.
    Done,
    /// Refused by the destination: that life of the slot is over. Nothing was written.
    Fenced,
    /// A strip's checksum did not hold at the destination. The slot is still reserved; the copy may be sent again.
    Corrupt,
    /// The lane broke before an acknowledgement. It may or may not have been applied; the source is quiet.
    Lost,
}

/// A completion: the source is read no more, whatever the outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The copy's number.
    pub id: CopyId,
    /// What became of it.
    pub outcome: Outcome,
}

/// Moves blocks to peers.
///
/// Contract, for every implementation (`tests/conformance.rs`):
/// * Every submitted copy completes exactly once, also after `close`; then its source is quiescent.
/// * `Done` means applied and verified; a copy to an old life of a slot completes `Fenced` and changes no byte.
/// * `submit` never blocks. `Err(Busy)` hands the copies back when the peer's queue is full (bounded); try again after a completion.
/// * No order is promised between copies.
/// * The receiving side applies through [`crate::memory::Arena::begin_write`] and so obeys its quarantine.
pub trait Transport {
    /// Makes the local arena the source and the destination of copies. Called once, before `connect`.
    fn register(&mut self, arena: std::sync::Arc<crate::memory::Arena>);
    /// Prepares a path to a peer. Idempotent; failures show as `Lost` copies.
    fn connect(&mut self, peer: &NodeAddress);
    /// Starts copies to a connected peer.
    fn submit(&mut self, peer: &NodeId, copies: &[Copy]) -> Result<(), Busy>;
    /// Takes the completions that have come since the last call.
    fn poll(&mut self, into: &mut Vec<Completion>);
    /// Breaks the path to a peer: what is under way completes as `Lost`.
    fn close(&mut self, peer: &NodeId);
}

/// The peer's queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Busy;

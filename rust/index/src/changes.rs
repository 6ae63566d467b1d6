//! Changes of what a holder has, packed; `scheduler/changes.py` draws the record.

use std::fmt;

use crate::Key;

/// Bytes of one change.
pub const CHANGE_BYTES: usize = 40;
/// Where a block may lie: a worker's pages, a node's DRAM, its SSD.
pub const TIERS: usize = 3;
/// See [`TIERS`].
pub const DEVICE: u8 = 0;
/// See [`TIERS`].
pub const DRAM: u8 = 1;
/// See [`TIERS`].
pub const SSD: u8 = 2;

/// One block came, or went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// It went; then only tier and key count.
    pub removed: bool,
    /// Where it lies.
    pub tier: u8,
    /// Its index in its prefix.
    pub position: u32,
    /// Its name.
    pub key: Key,
    /// The key before it.
    pub parent: Key,
}

/// These bytes are no changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// Not whole records.
    Length(usize),
    /// Of an unknown kind, or on an unknown medium.
    Kind(u8, u8),
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(bytes) => write!(f, "{bytes} bytes are not whole changes of {CHANGE_BYTES}"),
            Self::Kind(kind, tier) => {
                write!(f, "a change of kind {kind} in tier {tier}: the sender is of another version")
            }
        }
    }
}

impl std::error::Error for Malformed {}

/// Appends one.
pub fn push(packed: &mut Vec<u8>, change: &Change) {
    packed.extend_from_slice(&[u8::from(change.removed), change.tier, 0, 0]);
    packed.extend_from_slice(&change.position.to_le_bytes());
    packed.extend_from_slice(&change.key);
    packed.extend_from_slice(&change.parent);
}

/// The records, each of which is one.
pub fn check(packed: &[u8]) -> Result<&[[u8; CHANGE_BYTES]], Malformed> {
    let (records, rest) = packed.as_chunks::<CHANGE_BYTES>();
    if !rest.is_empty() {
        return Err(Malformed::Length(packed.len()));
    }
    match records.iter().find(|record| record[0] > 1 || usize::from(record[1]) >= TIERS) {
        Some(record) => Err(Malformed::Kind(record[0], record[1])),
        None => Ok(records),
    }
}

/// The key of a record.
pub(crate) fn key(record: &[u8; CHANGE_BYTES]) -> &Key {
    record[8..24].first_chunk().expect("sixteen bytes")
}

/// What a record says; it has been checked.
pub fn read(record: &[u8; CHANGE_BYTES]) -> Change {
    Change {
        removed: record[0] == 1,
        tier: record[1],
        position: u32::from_le_bytes(*record[4..8].first_chunk().expect("four bytes")),
        key: *key(record),
        parent: *record[24..40].first_chunk().expect("sixteen bytes"),
    }
}

//! Region handles: what a peer must have to name memory. Plain bytes that travel by any means.
//!
//! All numbers little-endian:
//!
//! ```text
//! offset  bytes  field
//!      0      4  magic "pyRH"
//!      4      4  CRC-32C of all that follows
//!      8      2  version, 1
//!     10      1  what peers may do: bit 0 read, bit 1 write
//!     11      1  n, bytes of the node's id: 1 to 64
//!     12      4  number of the region
//!     16      8  bytes of the region
//!     24      8  incarnation of its engine
//!     32      4  grain: bytes per checksum, 0 as the copies are cut
//!     36      n  the node's id, UTF-8
//! ```
//!
//! A handle proves nothing: whoever has the cluster's secret may make one up. What it names is checked where it lies.

use crate::config::NODE_LIMIT;
use crate::error::Error;
use crate::memory::checksum;
use crate::messages::RegionInfo;
use crate::region::Access;
use crate::types::{Incarnation, NodeAddress, NodeId, RegionId};

const MAGIC: [u8; 4] = *b"pyRH";
const VERSION: u16 = 1;
const HEAD_BYTES: usize = 36;

/// Names a region of one life of an engine, and says what may be done with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionHandle {
    /// Whose memory.
    pub node: NodeId,
    /// In which life of that node's engine: another one knows nothing of it.
    pub incarnation: Incarnation,
    /// Which region of that life.
    pub region: RegionId,
    /// How large it is.
    pub bytes: u64,
    /// Bytes per checksum; 0: as the copies are cut.
    pub grain: u32,
    /// What peers may do with it.
    pub access: Access,
}

impl RegionHandle {
    pub(super) fn of(node: &NodeAddress, info: RegionInfo) -> Self {
        let RegionInfo { region, bytes, grain, read, write } = info;
        let (node, incarnation) = (node.node.clone(), node.incarnation);
        Self { node, incarnation, region, bytes, grain, access: Access { read, write } }
    }

    /// As bytes, to be given to peers.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + self.node.len());
        bytes.extend(MAGIC);
        bytes.extend([0; 4]);
        bytes.extend(VERSION.to_le_bytes());
        // A node's id was checked when its engine started: at most 64 bytes.
        bytes.extend([u8::from(self.access.read) | u8::from(self.access.write) << 1, self.node.len() as u8]);
        bytes.extend(self.region.0.to_le_bytes());
        bytes.extend(self.bytes.to_le_bytes());
        bytes.extend(self.incarnation.to_le_bytes());
        bytes.extend(self.grain.to_le_bytes());
        bytes.extend(self.node.as_bytes());
        let sum = checksum(&bytes[8..]);
        bytes[4..8].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// From bytes. Never panics, whatever they are.
    ///
    /// # Errors
    /// Give up: not a handle, damaged on its way, or made by another version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let refuse =
            |why: &str| Err(Error::give_up(format!("these {} bytes are no region handle: {why}", bytes.len())));
        let Some((head, node)) = bytes.split_first_chunk::<HEAD_BYTES>() else { return refuse("too short") };
        if head[..4] != MAGIC {
            return refuse("pass on what `handle` returned, as it is");
        }
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let version = u16::from_le_bytes([head[8], head[9]]);
        if version != VERSION {
            return refuse(&format!("it has version {version}, this side knows {VERSION}: upgrade the older side"));
        }
        if checksum(&bytes[8..]) != word(4) {
            return refuse("they were damaged on their way");
        }
        let node = match std::str::from_utf8(node) {
            Ok(node) if node.len() == usize::from(head[11]) && (1..=NODE_LIMIT).contains(&node.len()) => {
                node.to_string()
            }
            _ => return refuse("its node is impossible"),
        };
        let access = Access { read: head[10] & 1 != 0, write: head[10] & 2 != 0 };
        let (region, grain) = (RegionId(word(12)), word(32));
        Ok(Self { node, incarnation: long(24), region, bytes: long(16), grain, access })
    }
}

#[cfg(test)]
mod tests {
    //! Goal: a handle arrives as it was made or not at all. Method: proptest over handles, flipped bits and noise.
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn handles_arrive_whole_or_not_at_all(node in "[a-z0-9._-]{1,64}", incarnation: u64, region: u32, size: u64,
                                              grain: u32, read: bool, write: bool, bit: prop::sample::Index) {
            let access = Access { read, write };
            let handle = RegionHandle { node, incarnation, region: RegionId(region), bytes: size, grain, access };
            let mut bytes = handle.to_bytes();
            prop_assert_eq!(RegionHandle::from_bytes(&bytes), Ok(handle));
            prop_assert!(RegionHandle::from_bytes(&bytes[..bytes.len() - 1]).is_err());
            let bit = bit.index(bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(RegionHandle::from_bytes(&bytes).is_err());
        }

        #[test]
        fn noise_is_refused(noise in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(RegionHandle::from_bytes(&noise).is_err());
        }
    }
}

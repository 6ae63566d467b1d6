//! The nouns of the transfer engine. Read this file first.
//!
//! Python spells them alike (`scheduler/types.py`); the glossary is in ARCHITECTURE.md.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Name of a block: keyed BLAKE3 over its tokens and its parent's key, so it names the whole prefix.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BlockKey(pub [u8; 16]);

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "key:")?;
        self.0[..4].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// One daemon and the workers attached to it. The launcher chooses it; unique in the cluster, at most 64 bytes.
pub type NodeId = String;

/// A number that changes at every start of a process: what one incarnation promised, the next does not know.
pub type Incarnation = u64;

/// Where a node's daemon listens, and which life of it is meant.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NodeAddress {
    /// The node's id.
    pub node: NodeId,
    /// `host:port` of its TCP listener.
    pub address: String,
    /// The life of the daemon that is meant; another one refuses.
    pub incarnation: Incarnation,
}

/// Names one grant: one attempt of one request on one worker's life. An ended tag is refused for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Tag {
    /// The request, a number unique in the cluster (the gateway draws 63 random bits).
    pub request: u64,
    /// Which try of the request; a retry has a new number.
    pub attempt: u32,
    /// Incarnation of the worker that asked for the grant.
    pub worker: Incarnation,
}

/// How a block's bytes are cut into strips. Strip `i` of a slot lies at `i * strip_bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Layout {
    /// Strips in a block: layers x 2 x kv_heads, summed over groups.
    pub strips: u32,
    /// Bytes of one strip: block_tokens x head_dim x itemsize.
    pub strip_bytes: u32,
}

impl Layout {
    /// Bytes of a whole block.
    pub fn block_bytes(self) -> usize {
        self.strips as usize * self.strip_bytes as usize
    }
}

/// One use of one slot: the number of the slot and of its life. A write to an older life is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SlotRef {
    /// Which slot of the arena.
    pub slot: u32,
    /// How often the slot had been handed out when this reference was made.
    pub generation: u32,
}

/// One local client of a daemon (a worker): numbered by the daemon as they attach.
pub type ClientId = u64;

/// Nanoseconds on the caller's monotonic clock. Sans-IO code gets time as an argument and never asks for it.
pub type Nanos = u64;

/// Memory that was registered with an engine, by a number that is never used twice in an incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RegionId(pub u32);

impl RegionId {
    /// A daemon's first arena.
    pub const ARENA: Self = Self(0);

    /// Numbers below this one are arenas; a daemon has one for each block layout.
    pub const ARENAS: u32 = 64;

    /// True if it names an arena: its spans are whole strips of a slot's life, and have checksums.
    pub fn is_arena(self) -> bool {
        self.0 < Self::ARENAS
    }
}

/// Where bytes begin: in which region, in which life, how far from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Span {
    /// Which region.
    pub region: RegionId,
    /// In an arena: the generation of the slot that is meant. In a buffer, which has one life: 0.
    pub life: u32,
    /// Bytes from the region's start.
    pub offset: u64,
}

/// Whose block it is: what quotas, accounts and deletions go by. Digests, chosen by the client; 0 is nobody in particular.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Owner {
    /// All that makes a block reusable (weights, KV format, ...), or objects.
    pub namespace: u64,
    /// Who had it made.
    pub tenant: u64,
}

/// Where a pool keeps a block. In the order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Medium {
    /// The arena.
    Dram,
    /// A solid-state disk.
    Ssd,
}

impl Medium {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Dram, Self::Ssd];

    /// As users and metrics spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dram => "dram",
            Self::Ssd => "ssd",
        }
    }
}

/// How bytes move: a transport. In the order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Kind {
    /// Between processes of one host: one copy from memory to memory.
    Shm,
    /// By a network card, from and into registered memory.
    Rdma,
    /// Over sockets.
    Tcp,
    /// In virtual time.
    Sim,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Shm, Self::Rdma, Self::Tcp, Self::Sim];

    /// As users and metrics spell it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
            Self::Sim => "sim",
        }
    }
}

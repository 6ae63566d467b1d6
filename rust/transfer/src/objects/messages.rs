//! What a client of objects and its daemon say to each other. Blocks are named by their keys: the daemon does not know
//! names until it reads them in a block.
//!
//! A client sees an arena for the first time in an answer, and asks for it then: it stays for the life of the daemon.

// Fields are explained by their variant.
#![allow(missing_docs)]

use serde::{Deserialize, Serialize};

use crate::engine::Keeping;
use crate::messages::{Refusal, Ticket};
use crate::types::{BlockKey, Layout, Medium, RegionId, SlotRef};

/// Most keys of one message: with the longest answer, a page of names, far below a frame's limit.
pub const BATCH_LIMIT: usize = 16384;
/// Most objects of one answer to `List`: their names have up to 1 MiB then.
pub const LIST_LIMIT: u32 = 1024;

/// A block that a client wants to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    /// Which put of this client it belongs to, by the client's number.
    pub put: u64,
    /// Number of its class.
    pub class: u8,
    pub key: BlockKey,
    /// The block before it in the value; all zero for the head.
    pub parent: BlockKey,
    /// Which block of the value; 0 is the head.
    pub index: u32,
}

/// What became of a wish to write a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reserved {
    /// It may be written here.
    Slot { region: RegionId, slot: SlotRef },
    /// It is there already.
    There,
    /// There is no room, or there never will be, or it makes no sense.
    Refused(Refusal),
}

/// A pinned block: in which arena and slot.
pub type At = (RegionId, SlotRef);

/// One object of a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    pub name: Vec<u8>,
    pub bytes: u64,
}

/// Where a list goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// A part of the catalog.
    pub shard: u32,
    /// Only what follows this key in it.
    pub after: Option<BlockKey>,
}

/// Numbers of a pool of objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectStats {
    /// Objects that can be got.
    pub objects: u64,
    /// Bytes of the blocks that they take, with all that is kept beside the values.
    pub bytes: u64,
    /// Bytes that all blocks of the node may take.
    pub capacity: u64,
    /// Names that were asked for and found, so far, by all clients.
    pub hits: u64,
    /// And not found.
    pub misses: u64,
}

/// From a client. The first kinds are answered by the thread that receives them, from the catalog; the others by the
/// engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ObjectRequest {
    /// Pins those of these blocks that are here. They have nothing to do with each other. `names`: they are heads, and
    /// count as asked for.
    Pin {
        ticket: Ticket,
        keys: Vec<BlockKey>,
        names: bool,
    },
    /// Lets go of pins. Not answered.
    Release {
        pins: Vec<u64>,
    },
    /// Which of these are here? Pins nothing.
    Contains {
        ticket: Ticket,
        keys: Vec<BlockKey>,
    },
    /// Names and sizes of objects, in no order.
    List {
        ticket: Ticket,
        prefix: Vec<u8>,
        from: Cursor,
        limit: u32,
    },
    /// The arena of this number.
    Arena {
        ticket: Ticket,
        region: RegionId,
    },
    /// How full it is.
    Stats {
        ticket: Ticket,
    },
    /// Reserves blocks, each by itself: one that finds no room is in nobody's way.
    Reserve {
        ticket: Ticket,
        wanted: Vec<Wanted>,
    },
    /// These blocks of these puts are written: (put, index). The head of a put comes last, and ends it.
    Commit {
        ticket: Ticket,
        blocks: Vec<(u64, u32)>,
    },
    /// Ends puts whose heads were not committed: nothing of them stays. Not answered.
    Abandon {
        puts: Vec<u64>,
    },
    /// Forgets objects, by the keys of their heads. Who reads one reads on.
    Remove {
        ticket: Ticket,
        keys: Vec<BlockKey>,
    },
    /// Keeps objects for so long, or in this name no more, as [`crate::messages::LocalRequest::Keep`] says, by the keys of
    /// their heads.
    Keep {
        ticket: Ticket,
        keys: Vec<BlockKey>,
        ttl_ms: u64,
        by: String,
    },
    Unkeep {
        ticket: Ticket,
        keys: Vec<BlockKey>,
        by: String,
    },
    /// What lies here is damaged, or its rest is missing: it is found no more. Not answered.
    Damaged {
        blocks: Vec<At>,
    },
}

/// To a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ObjectEvent {
    /// Per key. The first key's pin would be `first`, and so on.
    Pinned {
        ticket: Ticket,
        first: u64,
        found: Vec<Option<At>>,
    },
    /// The client holds too many pins: nothing was pinned.
    TooManyPins {
        ticket: Ticket,
        limit: u64,
    },
    /// Per key: where it is.
    Contained {
        ticket: Ticket,
        found: Vec<Option<Medium>>,
    },
    /// `next`: there may be more.
    Listed {
        ticket: Ticket,
        objects: Vec<Listed>,
        next: Option<Cursor>,
    },
    /// Its descriptor travels beside this message (SCM_RIGHTS).
    Arena {
        ticket: Ticket,
        region: RegionId,
        slots: u32,
        layout: Layout,
        bytes: u64,
    },
    /// There is none of that number.
    NoArena {
        ticket: Ticket,
    },
    Stats {
        ticket: Ticket,
        stats: ObjectStats,
    },
    /// Per block.
    Reserved {
        ticket: Ticket,
        blocks: Vec<Reserved>,
    },
    /// Per block: true if it is readable now; false if somebody else's with this key was first, or it was not reserved.
    Committed {
        ticket: Ticket,
        stored: Vec<bool>,
    },
    /// Per key: whether there was one.
    Removed {
        ticket: Ticket,
        removed: Vec<bool>,
    },
    /// Answer to `Keep` and `Unkeep`, by key.
    Kept {
        ticket: Ticket,
        outcomes: Vec<Keeping>,
    },
}

impl ObjectEvent {
    /// What it answers.
    pub fn ticket(&self) -> Ticket {
        match self {
            Self::Pinned { ticket, .. }
            | Self::TooManyPins { ticket, .. }
            | Self::Contained { ticket, .. }
            | Self::Listed { ticket, .. }
            | Self::Arena { ticket, .. }
            | Self::NoArena { ticket }
            | Self::Stats { ticket, .. }
            | Self::Reserved { ticket, .. }
            | Self::Committed { ticket, .. }
            | Self::Removed { ticket, .. }
            | Self::Kept { ticket, .. } => *ticket,
        }
    }
}

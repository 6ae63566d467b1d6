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
    /// The block before it in the value; for the head, see [`chain`].
    pub parent: BlockKey,
    /// Which block of the value; 0 is the head.
    pub index: u32,
}

/// What a head has for a parent: how its value goes on. So whoever finds the blocks of many values, and cannot read them yet,
/// knows which belong together: `first` is the key of the value's second block. All zero if there is none; see [`lone`].
pub fn chain(blocks: u32, first: Option<&BlockKey>) -> BlockKey {
    let mut chain = BlockKey::default();
    if let Some(first) = first {
        chain.0[..12].copy_from_slice(&first.0[..12]);
        chain.0[12..].copy_from_slice(&blocks.to_le_bytes());
    }
    chain
}

/// The same of a value of one block: what was drawn for its put. So two values of one name differ in what their heads have
/// for a parent.
pub fn lone(put: [u8; 12]) -> BlockKey {
    let mut chain = BlockKey::default();
    chain.0[..12].copy_from_slice(&put);
    chain.0[12..].copy_from_slice(&1_u32.to_le_bytes());
    chain
}

/// How many blocks a value has, by its head's [`chain`], and whether its second one may have this key.
pub fn chained(chain: &BlockKey, second: &BlockKey) -> (u32, bool) {
    let [.., a, b, c, d] = chain.0;
    (u32::from_le_bytes([a, b, c, d]).max(1), chain.0[..12] == second.0[..12])
}

/// The class of what is not here, and may be on another node.
pub const UNKNOWN: u8 = u8::MAX;

/// Where a block was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sighting<T> {
    /// In DRAM, and it is pinned there.
    Here(T),
    /// Not in DRAM, but it can be brought there: `Bring`. Its class; [`UNKNOWN`]: maybe another node has it.
    Behind { class: u8 },
    /// Nowhere.
    Missing,
}

impl<T> Sighting<T> {
    /// What is pinned.
    pub fn here(&self) -> Option<&T> {
        if let Self::Here(here) = self { Some(here) } else { None }
    }

    /// The same of something else.
    pub fn map<U>(self, of: impl FnOnce(T) -> U) -> Sighting<U> {
        match self {
            Self::Here(here) => Sighting::Here(of(here)),
            Self::Behind { class } => Sighting::Behind { class },
            Self::Missing => Sighting::Missing,
        }
    }
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
    /// Bytes of the blocks that they take in DRAM, with all that is kept beside the values.
    pub bytes: u64,
    /// Bytes that all blocks of the node may take in DRAM.
    pub capacity: u64,
    /// Objects whose first block is on the SSD.
    pub ssd_objects: u64,
    /// Bytes of the blocks that are on the SSD.
    pub ssd_bytes: u64,
    /// Bytes that all blocks of the node may take on the SSD; 0: there is none.
    pub ssd_capacity: u64,
    /// Names that were asked for and found, so far, by all clients.
    pub hits: u64,
    /// And not found.
    pub misses: u64,
}

/// From a client. The first kinds are answered by the thread that receives them, from the catalog; the others by the
/// engine, and so is `Contains` if something may be on other nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ObjectRequest {
    /// Pins those of these blocks that lie in DRAM. They have nothing to do with each other. `names`: they are heads, and
    /// count as asked for.
    Pin {
        ticket: Ticket,
        #[serde(with = "crate::packed")]
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
        #[serde(with = "crate::packed")]
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
    /// Has these blocks brought into DRAM, where they stay until they are pinned, for about a second at most. `put` says
    /// nothing here.
    Bring {
        ticket: Ticket,
        wanted: Vec<Wanted>,
    },
    /// Something was refused as `Full`: is there hope? Answered when a block of a large value that is being put has gone to
    /// the SSD, and so may leave DRAM.
    AwaitRoom {
        ticket: Ticket,
    },
    /// Is all that can be got now to outlive the daemon's process?
    Flush {
        ticket: Ticket,
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
        #[serde(with = "crate::packed")]
        keys: Vec<BlockKey>,
    },
    /// The same as `Copies`, which will follow for these, among others. Not answered.
    Spread {
        #[serde(with = "crate::packed")]
        keys: Vec<BlockKey>,
        wanted: u32,
    },
    /// Heads of objects that other nodes may have, and that will be asked for soon: they may come already. Not answered.
    Come {
        #[serde(with = "crate::packed")]
        keys: Vec<BlockKey>,
    },
    /// Sees to it that so many nodes have each of these, by the keys of their heads.
    Copies {
        ticket: Ticket,
        keys: Vec<BlockKey>,
        wanted: u32,
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
        found: Vec<Sighting<At>>,
    },
    /// The client holds too many pins: nothing was pinned.
    TooManyPins {
        ticket: Ticket,
        limit: u64,
    },
    /// Per key: the best medium that has it.
    Contained {
        ticket: Ticket,
        found: Vec<Option<Medium>>,
    },
    /// `next`: there may be more. `behind`: heads of objects, and their classes, whose names are known when they have been
    /// brought.
    Listed {
        ticket: Ticket,
        objects: Vec<Listed>,
        behind: Vec<(BlockKey, u8)>,
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
    /// Per block: it lies in DRAM now, or why not. `Full`: there was no room for it.
    Brought {
        ticket: Ticket,
        blocks: Vec<Result<(), Refusal>>,
    },
    /// There may be more room now; or the SSD takes nothing, and there will not be.
    Room {
        ticket: Ticket,
        more: bool,
    },
    /// `ok`: all that could be got when it was asked, and has not been evicted since, outlives the daemon's process.
    Flushed {
        ticket: Ticket,
        ok: bool,
    },
    /// Per key: whether there was one. `missing`: members that could not be told to forget theirs.
    Removed {
        ticket: Ticket,
        removed: Vec<bool>,
        missing: Vec<String>,
    },
    /// Per key: how many nodes have it.
    Copies {
        ticket: Ticket,
        copies: Vec<u32>,
    },
    /// Answer to `Keep` and `Unkeep`, by key.
    Kept {
        ticket: Ticket,
        outcomes: Vec<Keeping>,
    },
    /// Answer to `Contains`, `Remove` and `Copies`: too many questions about other nodes' objects are under way. Nothing was
    /// done, and nothing is known; ask again.
    Busy {
        ticket: Ticket,
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
            | Self::Brought { ticket, .. }
            | Self::Room { ticket, .. }
            | Self::Flushed { ticket, .. }
            | Self::Removed { ticket, .. }
            | Self::Copies { ticket, .. }
            | Self::Kept { ticket, .. }
            | Self::Busy { ticket } => *ticket,
        }
    }
}

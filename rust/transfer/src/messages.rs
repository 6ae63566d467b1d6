//! What local clients, daemons and the conductor say to each other, as data.
//!
//! `wire` turns these into frames and back; `engine` reacts to them. A block of a request is spoken of by its
//! **index** in the grant: `0..keys.len()` are the full blocks in prefix order, `keys.len()` is the private
//! partial block, if the grant has one.

// Fields are explained by their variant.
#![allow(missing_docs)]

use serde::{Deserialize, Serialize};

use crate::engine::Keeping;
use crate::objects::messages::{ObjectEvent, ObjectRequest};
use crate::objects::talk::Talk;
use crate::pool::tier::Whose;
use crate::types::{BlockKey, Incarnation, Kind, Layout, Medium, NodeAddress, Owner, RegionId, SlotRef, Tag};

/// Chosen by the sender of a request; the answer repeats it.
pub type Ticket = u64;

/// Most bytes of a notification between transfer engines.
pub const NOTIFICATION_LIMIT: usize = 64 << 10;

/// Most bytes of a push's note (first token, sampling state, counts).
pub const NOTE_LIMIT: usize = 4096;

/// Where one block of a grant lies in the granting daemon's arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrantedSlot {
    /// The slot, in the life that this grant holds.
    pub slot: SlotRef,
    /// True: holds the block already, pinned. False: reserved, wanted.
    pub committed: bool,
}

/// Why something was refused; each tells the caller what to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Refusal {
    /// No room now (only for `GrantMode::Now`), or the daemon drains and takes on nothing new. Go on without, or wait.
    Full,
    /// Larger than the whole pool: will never fit. Give up.
    TooLarge,
    /// The tag has ended, here or at the peer. Give up this attempt.
    Ended,
    /// The peer cannot be reached, died, or restarted with another incarnation. Retry on another plan.
    Unreachable,
    /// The deadline passed while waiting. Give up.
    Deadline,
    /// The tag was never granted where it must be, or was granted twice. A bug of the caller.
    Protocol,
    /// A checksum did not hold. Recompute.
    Corrupt,
    /// The holder no longer has the block. Recompute.
    Missing,
}

/// Where a fetched block came from, and where it lies now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// The slot of this index from now on: another one than was granted, if somebody else got the block first.
    pub slot: SlotRef,
    /// From a peer; otherwise it was in this node's pool.
    pub peer: bool,
    /// Where its holder had it.
    pub medium: Medium,
}

/// Whether a grant may wait for room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GrantMode {
    /// Waits, in arrival order, until all slots fit; it never times out by itself.
    Wait,
    /// All or `Refusal::Full`, at once (write-through: no slot, not cached).
    Now,
    /// As `Wait`, ahead of those, and the only mode that may take the pool's last slot. For one block that will be let
    /// go by events that wait for nobody else's slots (a push into an opened grant): so pushes between nodes that fill
    /// each other's grants always go on.
    Staging,
}

/// From a local client (a worker) to its daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LocalRequest {
    /// First request: names the block layout. Blocks of each layout have an arena of their own, all in one budget.
    /// `namespace`: of all blocks that this client will make (see [`crate::types::Owner`]).
    Attach { ticket: Ticket, layout: Layout, namespace: u64 },
    /// Reserves (or pins, where present) one slot per key plus `private` 0 or 1: all or nothing, in arrival order.
    /// `parent` is the key before `keys[0]` (all zero at the head) and `position` the index of `keys[0]` in the prefix.
    /// `tenant`: for whom (see [`crate::types::Owner`]).
    Grant { tag: Tag, keys: Vec<BlockKey>, private: u8, parent: BlockKey, position: u32, mode: GrantMode, tenant: u64 },
    /// Pins the longest leading run of `keys` that is committed here, under `tag`; reserves nothing.
    Lookup { tag: Tag, keys: Vec<BlockKey> },
    /// The client has written and checksummed all strips of these reserved blocks of its own (or opened) grant.
    Commit { tag: Tag, indices: Vec<u32> },
    /// Fills reserved blocks of the own grant: from this node's SSD, else from these peers' pools, in this order. One
    /// `Fetched` per index follows.
    Fetch { tag: Tag, indices: Vec<u32>, from: Vec<NodeAddress> },
    /// A hint: these blocks of one prefix will be asked for soon. What lies on this node's SSD, or at these peers, may be
    /// brought into DRAM now. Never answered; holds nothing.
    Prefetch { keys: Vec<BlockKey>, parent: BlockKey, position: u32, from: Vec<NodeAddress> },
    /// Asks the node `to` for its grant under `tag`, waiting until it exists, at most `within_ms`.
    /// If `to` is this very daemon, the answer carries the slots and the client becomes a writer of them.
    Open { tag: Tag, to: NodeAddress, within_ms: u64 },
    /// Sends blocks held under `local` to these indices of the opened grant `tag`; in the end the note, after the last
    /// commit. On one arena (`to` is this daemon) the blocks are committed in place.
    /// Block `index` is taken from index `index - first` of `local`.
    /// `strips`: only these of each block, `[first, end)`, which the client has written and writes no more; the block itself
    /// need not be committed. Those of one block are pushed in order, without gaps. `Pushed` and `Arrived` are about whole
    /// blocks. Only to another node: on one arena the client writes into the grant itself.
    Push { local: Tag, tag: Tag, indices: Vec<u32>, first: u32, strips: Option<(u32, u32)>, note: Option<Vec<u8>> },
    /// Reports that the strips of this block failed their checksum: it is unpublished at once.
    Corrupt { tag: Tag, index: u32 },
    /// Ends a tag in every way it is known here: waiting, granted, looked up, opened, pushing. Idempotent.
    /// Committed full blocks stay cached; everything else is released (or quarantined until provably quiet).
    End { tag: Tag },
    /// Asks for the daemon's counters.
    Counters { ticket: Ticket },
    /// From a client of objects, which need not have attached.
    Objects(ObjectRequest),
    /// Keeps these blocks in this node's memory for so long, in somebody's name; an object's head stands for all of it. They
    /// stay when the client has gone, and not when the daemon has. See [`crate::engine::Keeping`].
    Keep { ticket: Ticket, keys: Vec<BlockKey>, ttl_ms: u64, by: String },
    /// Keeps them no more in this name.
    Unkeep { ticket: Ticket, keys: Vec<BlockKey>, by: String },
    /// Wants what is published now to outlive the daemon's process: writes to SSD what is in DRAM only, and makes it
    /// durable.
    Flush { ticket: Ticket },
}

/// From a daemon to a local client. Names the tag (or ticket) it answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LocalEvent {
    /// Attached. The arena's descriptor travels beside this message (SCM_RIGHTS). `slots`: most that this layout may have.
    Attached { ticket: Ticket, slots: u32, layout: Layout, arena_bytes: u64, node: NodeAddress },
    /// The attach was refused: why, and what to do.
    AttachRefused { ticket: Ticket, reason: String },
    /// The grant is held: one slot per key, then the private one.
    Granted { tag: Tag, slots: Vec<GrantedSlot> },
    /// Answer to `Lookup`: the pinned leading blocks (maybe none). `behind`: so many keys after these can be fetched from
    /// this node's SSD (some of them may be in DRAM).
    Located { tag: Tag, slots: Vec<SlotRef>, behind: u32 },
    /// A grant, open, push or the tag as a whole failed; `End` is still owed by the client.
    Refused { tag: Tag, refusal: Refusal },
    /// Answer to `Open`. `slots` is empty unless the grant lies in this daemon's own arena.
    Opened { tag: Tag, committed: Vec<bool>, slots: Vec<GrantedSlot> },
    /// These blocks of the own grant have become readable (a peer or another local client committed them).
    Arrived { tag: Tag, indices: Vec<u32> },
    /// All blocks of the own grant are committed and the pusher's note is here. Sent once.
    Complete { tag: Tag, note: Vec<u8> },
    /// Outcome of one index of a `Fetch`: readable now, or why not.
    Fetched { tag: Tag, index: u32, found: Result<Found, Refusal> },
    /// All that was pushed so far has been applied and verified at the destination, the note included if one was given.
    Pushed { tag: Tag, indices: Vec<u32>, note: bool },
    /// Counters by Prometheus-style name with labels, e.g. `pyengine_pool_blocks{tier="dram",state="free"}`.
    Counters { ticket: Ticket, values: Vec<(String, u64)> },
    /// To a client of objects.
    Objects(ObjectEvent),
    /// Answer to `Keep` and `Unkeep`, by key.
    Kept { ticket: Ticket, outcomes: Vec<Keeping> },
    /// Answer to `Flush`. `ok`: all blocks that were published then and have not been evicted since are durable. Otherwise
    /// some may be in DRAM only: there is no SSD, it fails, or the daemon is about to stop.
    Flushed { ticket: Ticket, ok: bool },
}

/// Between two daemons, on their session. Either side may send each of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerMessage {
    /// Wait for the grant `tag` and tell where its blocks lie. `layout` and `namespace`, those of the blocks that
    /// would fill it, must be those of the client that it was granted to.
    Open { tag: Tag, layout: Layout, namespace: u64, within_ms: u64 },
    /// The grant is held, in this arena of the sender. `slots[i].committed` needs no push.
    Opened { tag: Tag, region: RegionId, slots: Vec<GrantedSlot> },
    /// No grant: why.
    OpenRefused { tag: Tag, refusal: Refusal },
    /// All strips of these blocks were copied, `via` this transport (none: no blocks); make them readable. `note` closes
    /// the push.
    Commit { tag: Tag, indices: Vec<u32>, via: Option<Kind>, note: Option<Vec<u8>> },
    /// These blocks are readable at the receiver now (`refusal` none), or not.
    Committed { tag: Tag, indices: Vec<u32>, note: bool, refusal: Option<Refusal> },
    /// The grant or the push under this tag is over at the sender's side; it will write no more and accepts no more.
    End { tag: Tag },
    /// Write your blocks with these keys into my reserved slots in this arena of mine. Answers come as they finish.
    Fetch { ticket: Ticket, region: RegionId, layout: Layout, blocks: Vec<(BlockKey, SlotRef)> },
    /// One block of a `Fetch`, by its place in the list: written and verified by that transport, where its holder had it
    /// and whose it is there; or why not.
    Fetched { ticket: Ticket, place: u32, copied: Result<(Kind, Medium, Owner), Refusal> },
    /// The asker has lost interest; write no more. Answered by `FetchEnded` when quiet.
    FetchCancel { ticket: Ticket },
    /// Nothing of this fetch will be written any more.
    FetchEnded { ticket: Ticket },
    /// About objects.
    Objects(Talk),
}

/// From a daemon to the conductor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DaemonReport {
    /// First message of a session.
    Hello { node: NodeAddress, socket: String, next_sequence: u64 },
    /// A block became readable (committed and published) from this medium.
    Stored { sequence: u64, key: BlockKey, parent: BlockKey, position: u32, medium: Medium },
    /// A block is no longer readable from this medium.
    Removed { sequence: u64, key: BlockKey, medium: Medium },
    /// Part of the answer to `Dump`: all published blocks as (key, parent, position, medium); cut before `sequence`. Parts
    /// are numbered from 0, so that a lost one is missed; `last` ends it.
    Dump { sequence: u64, part: u32, blocks: Vec<(BlockKey, BlockKey, u32, Medium)>, last: bool },
    /// Each second: next sequence, number and XOR of published blocks (drift is seen), and the counters. A block counts
    /// once for each medium that has it; in the XOR a key on SSD is rotated by one byte (`key[1..]`, then `key[0]`).
    /// `draining`: it takes on nothing new; what is unique and wanted is to be had elsewhere soon. Sent at once when that
    /// changes.
    Heartbeat { next_sequence: u64, count: u64, xor: BlockKey, counters: Vec<(String, u64)>, draining: bool },
    /// How an ordered replication went.
    Replicated { order: u64, stored: u32, missing: u32 },
    /// An ordered clearing is done. `held`: blocks that somebody uses, which stay until he lets go. `durable`: what was on SSD
    /// is gone for good, whatever happens to the daemon.
    Cleared { order: u64, dropped: u64, held: u64, durable: bool },
}

/// From the conductor to a daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DaemonOrder {
    /// Send all published blocks again.
    Dump,
    /// Copy these blocks from a peer into this pool, while there is room without waiting.
    Replicate { order: u64, keys: Vec<BlockKey>, parent: BlockKey, position: u32, from: NodeAddress },
    /// To a daemon that drains, after each of its heartbeats and whenever it changes: so many of its blocks are on other
    /// nodes now because of that, and so many are still to go there. None: it keeps nothing that anybody would miss.
    Moved { blocks: u64, left: u64 },
    /// Who shares objects with this node, which may be among them: all that were told before and are not named are no
    /// members any more.
    Members { members: Vec<NodeAddress> },
    /// Forget all blocks of an owner, on every medium; `Cleared` follows.
    Clear { order: u64, whose: Whose },
    /// Others have these blocks too, and nobody asks for them: drop them from DRAM, but for what somebody holds. Not
    /// answered; `Removed` tells what went.
    Forget { keys: Vec<BlockKey> },
}

/// Says in a session's first message what the dialling side wants to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// A daemon that speaks `PeerMessage`.
    Peer { node: NodeAddress },
    /// A data lane of the tcp or shm transport, belonging to that daemon and its life, in which no other path has its
    /// number.
    Lane { node: NodeAddress, path: u64 },
    /// A daemon that reports to a conductor's endpoint.
    Report { node: NodeAddress },
    /// A local client with its own incarnation (unix socket only).
    Local { incarnation: Incarnation },
    /// A transfer engine that speaks `EngineMessage`: the dialler asks, the acceptor answers.
    Engine { node: NodeAddress },
    /// The control connection of an rdma path, from that node and its life; numbered as lanes are.
    Rdma { node: NodeAddress, path: u64 },
    /// A daemon that asks about names of objects, and nothing else.
    Ask { node: NodeAddress },
    /// Whoever runs the daemon (unix socket only); see [`crate::admin`].
    Admin,
}

/// A registered region, as its own engine describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionInfo {
    pub region: RegionId,
    pub bytes: u64,
    /// Bytes per checksum; 0: as the copies are cut.
    pub grain: u32,
    /// What peers may do with it.
    pub read: bool,
    pub write: bool,
}

/// Between two transfer engines, on the session that one of them has dialled.
///
/// Notifications are numbered 1, 2, … for one life of either side, and taken in this order, each once: after a new
/// session `Resume` says how far the acceptor got. A refused one (`Full`) and those sent behind it are sent again, under
/// numbers of the sender's choice, once there is `Room`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EngineMessage {
    /// Acceptor, first: all notifications up to this one were taken.
    Resume { through: u64 },
    /// Dialler: which region has this name?
    Find { ticket: Ticket, name: String },
    /// Acceptor: that one, or none.
    Found { ticket: Ticket, region: Option<RegionInfo> },
    /// Dialler: a few bytes for the other side's user.
    Notify { number: u64, payload: Vec<u8> },
    /// Acceptor: all up to this one are in the user's queue.
    Taken { through: u64 },
    /// Acceptor: the queue is full; nothing after this one was taken.
    Full { through: u64 },
    /// Acceptor, after `Full`: there is room again.
    Room,
}

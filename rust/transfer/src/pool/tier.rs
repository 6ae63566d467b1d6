//! One medium behind the arena that keeps blocks: what the pool needs of it.
//!
//! ```text
//! write ---> under way ---> Ended(Done): `find` knows the block       remove, Dropped ---> `find` knows it no more
//!                     \---> Ended(anything else): as if never asked
//! ```
//!
//! A tier is used by one thread. Operations never block: they begin, and their end is polled for. Whether a tier has
//! threads of its own is its own business; one without does all the work in `poll`, so that simulations are
//! deterministic.
//!
//! What every tier promises, and `tests/tiers.rs` asks of each:
//!
//! 1. **Right or missing.** A read that is `Done` has put into the slot exactly the strips that were written under that
//!    key, verified, with their checksums set. Everything else leaves the slot unarrived.
//! 2. **Bounded.** It never takes more than its limit, what it keeps for itself included. It makes room itself, and tells
//!    what it has let go of (`Dropped`). A block that is being read is not let go of.
//! 3. **Ended once.** Each operation ends once; its hold has been dropped by then.
//! 4. **Loud.** A medium that fails or fills up degrades the tier, visibly (`Capacity::health`); it never panics.
//! 5. **Durable when flushed.** What was written or removed before a flush that is `Done` is so after any crash, unless the
//!    medium lost it; what was not flushed may be there or not, but never wrong.

use serde::{Deserialize, Serialize};

use crate::memory::{ReadHold, WriteHold};
use crate::types::{BlockKey, Layout, Owner};

use super::Place;

/// Names an operation under way; chosen by the caller, who never uses a number twice.
pub type OpId = u64;

/// What is known of a block besides its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its key, and where it stands in its prefix.
    pub place: Place,
    /// Whose it is.
    pub owner: Owner,
    /// How it is cut into strips.
    pub layout: Layout,
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fate {
    /// As asked.
    Done,
    /// Reads and verifications: no such block (any more). Writes: it was removed while it was under way.
    Missing,
    /// The same: the bytes are not those that were written; the block has been dropped.
    Corrupt,
    /// Writes: more is waiting to be written than the tier queues. Go on without.
    Busy,
    /// Writes: no room can be made (everything is being read, or the limit is too small for the block).
    Full,
    /// The medium failed.
    Failed,
}

/// What a tier tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TierEvent {
    /// An operation is over.
    Ended {
        /// Which.
        op: OpId,
        /// How.
        fate: Fate,
    },
    /// The tier has let go of a block by itself.
    Dropped(BlockKey),
}

/// How a medium does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Health {
    /// As it should.
    #[default]
    Good,
    /// Reads work; writes fail or are too slow, and are tried again now and then.
    ReadOnly,
    /// Nothing works. It is tried again now and then.
    Failed,
}

/// Numbers of a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Bytes it may take.
    pub limit: u64,
    /// Bytes it takes now, with all it keeps for itself.
    pub used: u64,
    /// Blocks that `find` knows.
    pub blocks: u64,
    /// Bytes that wait to be written.
    pub waiting: u64,
    /// How the medium does.
    pub health: Health,
}

/// Which blocks are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Whose {
    /// All of a namespace.
    Namespace(u64),
    /// All of a tenant, in every namespace.
    Tenant(u64),
}

impl Whose {
    /// True if blocks of this owner are meant.
    pub fn has(self, owner: Owner) -> bool {
        match self {
            Self::Namespace(namespace) => owner.namespace == namespace,
            Self::Tenant(tenant) => owner.tenant == tenant,
        }
    }
}

/// One medium that keeps blocks. See the module's head for its promises.
pub trait Tier: Send {
    /// Begins to write a sealed block. A key that is there already ends `Done` at once; one that is under way already ends
    /// no sooner than that.
    fn write(&mut self, op: OpId, record: Record, block: ReadHold);
    /// Begins to read a block into all strips of an open slot.
    fn read(&mut self, op: OpId, key: &BlockKey, into: WriteHold);
    /// Begins to read a block for no other end than to see whether it is as it was written. `Done` if so; else as for
    /// [`Tier::read`]: what is not has been dropped. False: nothing begins, as this tier keeps nothing that could rot.
    fn verify(&mut self, _op: OpId, _key: &BlockKey) -> bool {
        false
    }
    /// Forgets a block, also one whose write is under way. True if there was one. A read under way still ends.
    fn remove(&mut self, key: &BlockKey) -> bool;
    /// Forgets all blocks of an owner; returns their keys.
    fn clear(&mut self, whose: Whose) -> Vec<BlockKey>;
    /// What is known of a block that can be read.
    fn find(&self, key: &BlockKey) -> Option<Record>;
    /// All that can be read, in no order.
    fn records(&self) -> Box<dyn Iterator<Item = Record> + '_>;
    /// What can be read among the next `count` places from this one on, and where to go on, if there are more. A block keeps
    /// its place while it is not written anew; what is may be missed or told twice. So a walk over ten million blocks comes in short steps.
    fn page(&self, from: u32, count: u32) -> (Vec<Record>, Option<u32>);
    /// How many blocks each owner has, by layout.
    fn usage(&self) -> Vec<(Owner, Layout, u64)> {
        let mut usage: Vec<(Owner, Layout, u64)> = Vec::new();
        for Record { owner, layout, .. } in self.records() {
            match usage.iter_mut().find(|known| (known.0, known.1) == (owner, layout)) {
                Some((_, _, blocks)) => *blocks += 1,
                None => usage.push((owner, layout, 1)),
            }
        }
        usage
    }
    /// Begins to make durable all that was written and removed so far.
    fn flush(&mut self, op: OpId);
    /// What has happened since the last call.
    fn poll(&mut self) -> Vec<TierEvent>;
    /// Its numbers.
    fn capacity(&self) -> Capacity;
    /// How bytes get there and back, for whoever looks; empty if there is nothing to say.
    fn io(&self) -> &'static str {
        ""
    }
    /// How the part of the medium does that this block is on.
    fn health_of(&self, _: &BlockKey) -> Health {
        self.capacity().health
    }
    /// Ends well: what waits is written and made durable within `within`, so that the next start is quick. Operations that
    /// are not over then never end.
    fn close(&mut self, within: std::time::Duration);
}

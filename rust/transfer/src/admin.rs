//! What whoever runs a daemon says to it, over its unix socket: questions, and orders that change no answer of the cluster.
//!
//! One request, one reply, in order. What may be long comes in stretches: each reply says from where to ask on, so that
//! neither side ever holds all of it, and the daemon serves between two stretches. A block that moves between two stretches
//! may be told twice or not at all.

// Fields are explained by their variant.
#![allow(missing_docs)]

mod client;

use serde::{Deserialize, Serialize};

use crate::engine::{Keeping, Kept};
use crate::error::Error;
use crate::pool::tier::Whose;
use crate::types::{BlockKey, Incarnation, Medium, Owner};

pub use client::AdminClient;

/// Most keys of one request.
pub const KEYS_LIMIT: usize = 1 << 17;

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdminRequest {
    /// How does it do?
    Status,
    /// All counters.
    Counters,
    /// The next stretch of published blocks whose keys begin so; of one medium, or of all.
    Keys { from: Cursor, prefix: Prefix, medium: Option<Medium> },
    /// Computes the checksums of the next stretch of blocks on one medium, or on all. What is rotten is dropped from it.
    Verify { from: Cursor, medium: Option<Medium> },
    /// Drops these blocks, unless somebody holds them.
    Evict { keys: Vec<BlockKey> },
    /// Drops the next stretch of blocks that nobody holds; of one owner, or of all.
    EvictAll { from: Cursor, whose: Option<Whose> },
    /// Keeps these blocks in memory for so long, in somebody's name.
    Keep { keys: Vec<BlockKey>, ttl_ms: u64, by: String },
    /// Keeps them no more in this name, or in any.
    Unkeep { keys: Vec<BlockKey>, by: Option<String> },
    /// Who keeps what?
    Pins,
    /// What do owners have, and what may they have?
    Accounts,
    /// Takes on nothing new (or again), and answers when nothing is held, at the latest after so long.
    Drain { on: bool, within_ms: u64 },
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdminReply {
    Status(Box<Status>),
    Counters(Vec<(String, u64)>),
    /// `next`: where to ask on, if there is more.
    Keys {
        blocks: Vec<Listed>,
        next: Option<Cursor>,
    },
    /// `medium`: where this stretch was.
    Verified {
        medium: Medium,
        found: Verified,
        next: Option<Cursor>,
    },
    Evicted {
        evicted: Evicted,
        next: Option<Cursor>,
    },
    /// By key.
    Kept {
        outcomes: Vec<Keeping>,
    },
    Pins(Kept),
    Accounts(Vec<AccountStatus>),
    Drain {
        draining: bool,
        held: Held,
        moving: Moving,
    },
    /// It cannot be answered: why, and what to do.
    Refused(String),
}

/// How far a walk over all blocks has come. Only the daemon knows what it means; the default is the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Which of the places where blocks are.
    pub store: u32,
    /// How far in it.
    pub slot: u32,
}

/// How keys begin: some hex digits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prefix {
    key: [u8; 16],
    digits: u8,
}

impl Prefix {
    /// From hex digits, at most 32.
    ///
    /// # Errors
    /// Give up: no such text.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let digits: Option<Vec<u8>> = text.chars().map(|c| c.to_digit(16).map(|digit| digit as u8)).collect();
        let digits = digits.filter(|digits| digits.len() <= 32).ok_or_else(|| {
            Error::give_up(format!("{text:?} is no key, nor the beginning of one: write at most 32 hex digits"))
        })?;
        let mut key = [0; 16];
        for (index, digit) in digits.iter().enumerate() {
            key[index / 2] |= digit << if index % 2 == 0 { 4 } else { 0 };
        }
        Ok(Self { key, digits: digits.len() as u8 })
    }

    /// The key, if all its digits are there.
    pub fn whole(&self) -> Option<BlockKey> {
        (self.digits == 32).then_some(BlockKey(self.key))
    }

    /// True if the key begins so.
    pub fn begins(&self, key: &BlockKey) -> bool {
        // Whoever is spoken to may have sent any number.
        let (whole, half) = (usize::from(self.digits.min(32)) / 2, self.digits < 32 && self.digits % 2 == 1);
        self.key[..whole] == key.0[..whole] && (!half || self.key[whole] >> 4 == key.0[whole] >> 4)
    }
}

/// A key as people write it.
pub fn hex(key: &BlockKey) -> String {
    key.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A daemon, as seen by whoever runs it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub node: String,
    /// Where peers dial; empty: no peers.
    pub address: String,
    /// Which life.
    pub incarnation: Incarnation,
    pub version: String,
    pub uptime_ms: u64,
    /// Takes on nothing new.
    pub draining: bool,
    /// Accepts connections.
    pub listening: bool,
    pub conductor: Option<ConductorStatus>,
    /// Where metrics and health are.
    pub http: Option<String>,
    pub tiers: Vec<TierStatus>,
    pub layouts: Vec<LayoutStatus>,
    pub clients: Vec<ClientStatus>,
    pub peers: Vec<PeerStatus>,
    pub held: Held,
}

/// The conductor, as seen from here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConductorStatus {
    pub address: String,
    pub connected: bool,
}

/// One medium.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierStatus {
    /// `dram` or `ssd`.
    pub medium: String,
    pub limit_bytes: u64,
    /// All that blocks and what is kept beside them take now.
    pub used_bytes: u64,
    /// Published ones.
    pub blocks: u64,
    /// `good`, `read-only` or `failed`.
    pub health: String,
    /// How bytes get there and back, `io_uring` or `threads`; empty if there is nothing to say.
    pub io: String,
}

/// The blocks of one layout in DRAM. The five states add up to `slots`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayoutStatus {
    pub strips: u32,
    pub strip_bytes: u32,
    pub slots: u32,
    pub free: u32,
    pub cached: u32,
    pub pinned: u32,
    pub reserved: u32,
    pub quarantine: u32,
}

/// A worker that is attached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientStatus {
    pub client: u64,
    /// Tags that it has not ended yet.
    pub tags: u64,
}

/// Another node's daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerStatus {
    pub node: String,
    pub address: String,
    pub incarnation: Incarnation,
    /// A session stands.
    pub connected: bool,
    /// Copies to it that are under way or wait.
    pub copies: u64,
}

/// What owners have, and may have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccountStatus {
    /// None in either: of all; in both: of all whom nothing else names.
    pub namespace: Option<u64>,
    pub tenant: Option<u64>,
    pub share: u32,
    pub dram_bytes: u64,
    pub dram_limit: Option<u64>,
    pub ssd_bytes: u64,
    pub ssd_limit: Option<u64>,
}

/// What is held, awaited or under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Tags that clients have not ended yet.
    pub tags: u64,
    /// Grants that are held.
    pub grants: u64,
    /// Grants that wait for room.
    pub waiting: u64,
    /// Grants elsewhere that clients fill, or wait for.
    pub opens: u64,
    /// Those who fill grants here, or wait for them.
    pub visits: u64,
    /// Fetches from peers.
    pub fetches: u64,
    /// Fetches by peers.
    pub serving: u64,
    /// Copies to peers.
    pub copies: u64,
    /// Objects that only this node has, and that are to go to others.
    pub leaving: u64,
    /// Slots that may still be written by who lost them.
    pub quarantine: u64,
}

impl Held {
    /// Nothing at all.
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// What becomes of the blocks and objects of a daemon that drains and that no other node has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moving {
    /// Blocks that the conductor had other nodes copy.
    pub blocks: u64,
    /// Objects that have gone to other nodes.
    pub objects: u64,
    /// Blocks that are still to be copied.
    pub left: u64,
    /// No more are to be: all are elsewhere that anybody would miss, or there is no conductor who would have it done.
    pub over: bool,
}

/// A published block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    pub key: BlockKey,
    pub parent: BlockKey,
    /// Its index in the prefix.
    pub position: u32,
    pub medium: Medium,
    pub bytes: u64,
    pub owner: Owner,
    /// Somebody holds it, or it is being copied.
    pub held: bool,
}

/// What a verification has found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verified {
    /// Blocks that were read.
    pub blocks: u64,
    pub bytes: u64,
    /// Blocks that were gone before their turn came.
    pub gone: u64,
    /// Blocks that the medium could not read.
    pub failed: u64,
    /// Those whose bytes do not fit their checksums.
    pub bad: Vec<BlockKey>,
}

/// What has become of blocks that were to be dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evicted {
    pub dropped: u64,
    /// Somebody holds them.
    pub held: u64,
    /// Not published here.
    pub missing: u64,
}

#[cfg(test)]
mod tests {
    //! Goal: prefixes mean what their digits say. Method: examples, and against the text of the key.
    use super::*;
    use crate::wire;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_prefix_begins_just_the_keys_whose_text_begins_so(key: [u8; 16], other: [u8; 16], digits in 0..=32usize) {
            let (key, other) = (BlockKey(key), BlockKey(other));
            let text: String = hex(&key).chars().take(digits).collect();
            let prefix = Prefix::parse(&text).expect("hex");
            prop_assert!(prefix.begins(&key));
            prop_assert_eq!(prefix.begins(&other), hex(&other).starts_with(&text));
            prop_assert_eq!(prefix.whole(), (digits == 32).then_some(key));
        }
    }

    proptest! {
        #[test]
        fn messages_round_trip_and_noise_is_refused(keys in proptest::collection::vec(any::<[u8; 16]>(), 0..20), store: u32,
                                                    slot: u32, noise in proptest::collection::vec(any::<u8>(), 0..200)) {
            let from = Cursor { store, slot };
            let keys: Vec<BlockKey> = keys.into_iter().map(BlockKey).collect();
            let request = AdminRequest::Evict { keys: keys.clone() };
            prop_assert_eq!(wire::decode::<AdminRequest>(&wire::encode(&request)), Ok(request));
            let found = Verified { blocks: 1, bytes: 2, gone: 3, failed: 4, bad: keys };
            let reply = AdminReply::Verified { medium: Medium::Ssd, found, next: Some(from) };
            prop_assert_eq!(wire::decode::<AdminReply>(&wire::encode(&reply)), Ok(reply));
            let _ = wire::decode::<AdminReply>(&noise);
            if let Ok(AdminRequest::Keys { prefix, .. }) = wire::decode::<AdminRequest>(&noise) {
                // Whatever a stranger sends, it is some prefix.
                let _ = (prefix.begins(&BlockKey([0; 16])), prefix.whole());
            }
        }
    }

    #[test]
    fn what_is_no_prefix_is_refused() {
        for wrong in ["xyz", "0x12", " 1", &"0".repeat(33), "ü"] {
            assert!(Prefix::parse(wrong).is_err(), "{wrong:?}");
        }
        assert!(Prefix { key: [1; 16], digits: 255 }.begins(&BlockKey([1; 16])), "a stranger's number of digits");
    }
}

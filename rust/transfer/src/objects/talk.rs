//! What daemons say to each other about objects.
//!
//! Members are those who have said `Join` on a session that stands. A name's home ([`super::homes`]) is told who holds it,
//! and asked; it decides who may put it.

// Fields are explained by their variant.
#![allow(missing_docs)]

use serde::{Deserialize, Serialize};

use super::hints::Head;
use crate::messages::Ticket;
use crate::types::{BlockKey, NodeId};

/// What a home says to a wish to put a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Permit {
    /// Nobody else may, until `Unclaim` or the news that it is there.
    Free,
    /// There is one, or somebody else is putting one.
    Taken,
    /// As `Free`, but not all members have told yet what they hold: they are to be asked.
    Unsure,
}

/// What is known of a name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spot {
    /// Which object it is.
    pub head: Option<Head>,
    /// Who has it; empty without a head.
    pub holders: Vec<NodeId>,
    /// If nobody is known to have it, nobody has.
    pub sure: bool,
}

/// Between two daemons.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Talk {
    /// The sender shares its objects with the receiver. Answered by the same, once for each session.
    Join,
    /// To a home: what the sender holds (true), or no more, in this order. `all`: it has now told all that it holds, as
    /// homes are among the members of this view. `heard`: to be answered by `Heard`, so that not too much is under way.
    Told {
        news: Vec<(Head, bool)>,
        all: Option<u64>,
        heard: bool,
    },
    Heard,
    /// To a home: may these names be put?
    Claim {
        ticket: Ticket,
        keys: Vec<BlockKey>,
    },
    /// Per key.
    Claimed {
        ticket: Ticket,
        permits: Vec<Permit>,
    },
    /// These puts have ended without an object, or with one that another home was told of.
    Unclaim {
        keys: Vec<BlockKey>,
    },
    /// Who has these? `own`: only what the receiver has itself.
    Where {
        ticket: Ticket,
        keys: Vec<BlockKey>,
        own: bool,
    },
    /// Per key.
    There {
        ticket: Ticket,
        spots: Vec<Spot>,
    },
    /// On a connection that is for this only: are these anywhere? Answered by the thread that has it.
    Exist {
        keys: Vec<BlockKey>,
    },
    /// Per key; `None`: the receiver of the question is not sure.
    Existing {
        found: Vec<Option<bool>>,
    },
    /// These objects, by key and value, are to go, and must not come back.
    Remove {
        ticket: Ticket,
        objects: Vec<(BlockKey, BlockKey)>,
    },
    /// Per object: whether the sender had it.
    Removed {
        ticket: Ticket,
        removed: Vec<bool>,
    },
    /// From a home: these are to go there. They were removed by one who could perhaps not say so, or another value of the
    /// name stays.
    Drop {
        objects: Vec<(BlockKey, BlockKey)>,
    },
    /// Copy these here, each from any of these members. With the keys of its other blocks, if the sender knows them.
    Copy {
        ticket: Ticket,
        objects: Vec<ToCopy>,
    },
    /// Which are here now (by place in the list), and which will not be. None: it goes on.
    Copied {
        ticket: Ticket,
        ended: Vec<(u32, bool)>,
    },
    /// What are the keys of this object's other blocks?
    Parts {
        ticket: Ticket,
        head: Head,
    },
    /// `None`: it is not here.
    PartsOf {
        ticket: Ticket,
        parts: Option<Vec<BlockKey>>,
    },
    /// To a home: this member, or the sender itself, does not give this object.
    Doubt {
        head: Head,
        holder: NodeId,
    },
    /// From a home: are these there? Those that are not, `Told` says.
    Check {
        heads: Vec<Head>,
    },
    /// From a home that has forgotten some: all that the receiver holds of its names is to be told. `Told` has this number at
    /// the end, in place of a view.
    Anew {
        number: u64,
    },
}

/// An object to be copied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToCopy {
    pub head: Head,
    pub parts: Option<Vec<BlockKey>>,
    pub from: Vec<NodeId>,
}

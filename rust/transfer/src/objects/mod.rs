//! Objects: the pool as a key-value store, for anybody on the host.
//!
//! | file | question |
//! |---|---|
//! | `classes` | how does a value lie in blocks? |
//! | `messages` | what do client and daemon say? |
//! | `catalog` | which objects are here, and how are they read without the engine? |
//! | `reader` | the daemon's side of reads |
//! | `engine/objects` | the daemon's side of writes, and of what lies on the SSD |
//! | `homes`, `hints`, `book` | across nodes: whose word on a name counts, and what does it know? |
//! | `talk` | what do daemons say? |
//! | `engine/cluster`, `quests`, `copying`, `doubts`, `anew` | what follows |
//! | `pool`, `visit`, `copies`, `road`, `unused` | the client |
//!
//! `pool`, `visit` and `road` are shells, beside `client`; the engine uses the others.

pub mod book;
pub mod catalog;
pub mod classes;
mod copies;
pub mod hints;
pub mod homes;
pub mod messages;
pub mod pool;
pub mod reader;
pub mod road;
pub mod talk;
mod unused;
mod visit;

pub use pool::{Pool, Value};

//! Objects: the pool as a key-value store, for anybody on the host.
//!
//! | file | question |
//! |---|---|
//! | `classes` | how does a value lie in blocks? |
//! | `messages` | what do client and daemon say? |
//! | `catalog` | which objects are here, and how are they read without the engine? |
//! | `reader` | the daemon's side of reads |
//! | `engine/objects` | the daemon's side of writes, and of what lies on the SSD |
//! | `pool`, `visit`, `road`, `unused` | the client |
//!
//! `pool`, `visit` and `road` are shells, beside `client`; the engine uses the others.

pub mod catalog;
pub mod classes;
pub mod messages;
pub mod pool;
pub mod reader;
pub mod road;
mod unused;
mod visit;

pub use pool::{Pool, Value};

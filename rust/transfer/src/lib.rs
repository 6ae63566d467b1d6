//! Moves KV blocks between nodes and keeps a node's pool of them.
//!
//! Floors, imports go down only: bindings, then `daemon`/`client`/`report` (the shells: sockets and time), then
//! [`engine`], then `session`, [`transport`] and [`pool`], then `wire` and [`memory`], then [`types`] and [`error`].
//! Everything below the shells is sans-IO: bytes and time come in as arguments.

pub mod admin;
pub mod carrier;
pub mod client;
pub mod config;
pub mod daemon;
pub mod endpoint;
pub mod engine;
pub mod error;
pub mod http;
pub mod incarnation;
pub mod keys;
pub mod link;
mod lives;
pub mod mailbox;
pub mod memory;
pub mod messages;
pub mod metrics;
pub mod mover;
pub mod objects;
pub mod packed;
pub mod paths;
pub mod pool;
pub mod random;
pub mod region;
pub mod report;
pub mod server;
pub mod session;
pub mod stats;
pub mod tls;
pub mod transport;
pub mod types;
pub mod wire;

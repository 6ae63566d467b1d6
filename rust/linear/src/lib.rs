//! `y = x @ W.T` on the CPU, where `W` is constant: the linear layers of a model.
//!
//! # What is promised
//!
//! **A row of `y` depends on its row of `x` and on `W`, to the last bit, and on nothing else**: not on the rows beside it,
//! not on the number of threads, not on the processor's vector width. So a token does not depend on its batch. This holds
//! because each number of `y` is computed in one order, which is part of the format: the depth is cut into chunks of
//! [`CHUNK`], each chunk is summed from zero by fused multiply-adds in the order of the depth, and the sums of the chunks
//! are added up in their order. (Chunks also keep the error of a long sum small.)
//!
//! # How it is fast
//!
//! `W` is packed once (`panels.rs`): 32 columns of `y` are a panel, which lies in memory in the order in which it is read.
//! A kernel (`kernel.rs`) computes a tile of a few rows and one panel in registers, over one chunk. With few rows the weights
//! stream from memory once, and each is used for all rows while it is in the first cache. With many rows `x` is packed
//! too, in blocks that stay in the second cache, and the panels pass by. Both are one loop (`product.rs`): few rows are
//! one block. The parts (block and panel) are shared out to threads (`threads.rs`).
//!
//! The memory that a product needs beside its operands is kept by the calling thread and reused.

mod cores;
mod kernel;
pub mod lanes;
mod matrix;
mod panels;
mod product;
mod shared;
mod threads;

pub use kernel::Level;
pub use matrix::{Bf16, Rows, RowsMut};
pub use panels::{CHUNK, Error, Kind, PANEL, Packed, Part, Weights, lanes as packed_lanes, pack_into};
pub use product::multiply;
pub use shared::Shared;
pub use threads::Threads;

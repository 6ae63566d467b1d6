//! The contracts of `kernels/` on the CPU, beside the products of `linear`, on its threads and at its levels.
//!
//! # What is promised
//!
//! **A token's result depends on its own row and on the KV that it sees, to the last bit, and on nothing else**: not on the
//! rows beside it, not on how its prompt was cut into chunks, not on threads or on the processor's vector width. Each sum
//! has one order. Along a row (`rows.rs`): 32 sums, which are added up by halves. Over keys (`attention.rs`): segments of
//! [`SEGMENT`] positions from position 0 on, each computed from zero, merged in their order.
//!
//! Functions here take addresses: the memory is a tensor's, and its owner in Python says that it is there.

mod attention;
mod levels;
mod numbers;
mod rows;
mod strips;
mod tile;

pub use attention::{Attention, Pages, Plan, SEGMENT, Sequence};
pub use linear::{Bf16, Level, Threads};
pub use numbers::Number;
pub use rows::{Norms, RmsNorm, Rope, Swiglu};
pub use strips::{Copied, Strips};

/// The widest head: rows of queries and scores are so many numbers apart.
pub const WIDEST_HEAD: usize = 256;

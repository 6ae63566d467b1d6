//! The products of `linear` and the contracts of `kernels` as XLA calls them on a CPU, so that a compiled program of JAX
//! computes with them: same bits, same threads.
//!
//! Arrays are XLA's, dense. Of what all layers have one above the other (weights, pages) a call gets the whole and the
//! number of a layer: a part of it would be copied for the call. Results that are written in place have the memory of an
//! argument; who compiles the program says so to XLA.

mod frame;
mod handlers;

pub use frame::{CallFrame, Handler, XlaError};
pub use handlers::{HANDLERS, use_threads};

//! Which holder has which block, and on which medium: the contract is `Index` in `scheduler/prefix_index.py`, where its
//! plain twin stands.
//!
//! Blocks are entries of a table that name their holders (`table.rs`), those of a prefix side by side. A holder is named
//! there by its **life**: a number that is its own until it is cleared or replaced. Then it has another life, and what the
//! old one had is not seen any more; it is swept out page by page while changes come in. A dump is staged as a life of its
//! own that is not seen until it is adopted.
//!
//! `inflight.rs` knows which holder will have which block: what planned requests will leave.
//!
//! A match does not rely on a holder of a block to hold what is before it: pools evict any block. It looks at each.

pub mod changes;
mod index;
pub mod inflight;
mod matching;
mod table;

pub use changes::{CHANGE_BYTES, Change, Malformed};
pub use index::{Error, Index, MAX_HOLDERS, Place};
pub use matching::Run;

/// Name of a block.
pub type Key = [u8; 16];
/// A holder's row in every match.
pub type Slot = usize;
/// One time of a holder, from when it is known or cleared to when it is cleared or forgotten.
pub(crate) type Life = u16;

/// Spreads keys that are not random already: those of tests and simulations are numbers.
pub(crate) fn hash(key: &Key) -> u64 {
    let half = |at: usize| u64::from_le_bytes(*key[at..at + 8].first_chunk().expect("eight bytes"));
    // Odd constants without a pattern (fractions of the square roots of 2 and 3): no key of a plain form makes a factor 0.
    let product = u128::from(half(0) ^ 0x6A09_E667_F3BC_C909) * u128::from(half(8) ^ 0xBB67_AE85_84CA_A73B);
    product as u64 ^ (product >> 64) as u64
}

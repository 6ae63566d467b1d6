//! Which unpinned block goes first when room is needed. One seam, one file per policy.

pub mod lru;

/// An eviction order over the slots that may be evicted now. The pool adds a slot when the last reference to its
/// published block is gone and removes it when the block is referenced again, so a policy never sees a pinned or an
/// uncommitted block. The pool adds the blocks of a prefix from tail to head.
pub trait Evict: Send {
    /// The slot may be evicted; it was used just now. Adding it again renews that.
    fn add(&mut self, slot: u32);
    /// The slot may not be evicted any more. Unknown slots are ignored.
    fn remove(&mut self, slot: u32);
    /// Chooses a victim and removes it.
    fn pop(&mut self) -> Option<u32>;
    /// The victim that `pop` would choose now.
    fn peek(&self) -> Option<u32>;
    /// How many slots may be evicted.
    fn len(&self) -> usize;
    /// True if none may.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// True if this slot may be evicted.
    fn contains(&self, slot: u32) -> bool;
    /// Slots in the order in which `pop` would choose them (for `check`).
    fn order(&self) -> Vec<u32>;
}

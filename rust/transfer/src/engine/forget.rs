//! Orders of the conductor to forget copies: it sees how many nodes have a block, and that nobody asks for it.

use crate::types::BlockKey;

use super::Engine;

impl Engine {
    /// Drops these blocks from DRAM, as far as nobody holds them. What the medium behind has of them stays there: it takes
    /// no room here.
    pub(super) fn forget(&mut self, keys: &[BlockKey]) {
        // The conductor hears of no objects, so it cannot mean any.
        for store in self.stores.iter_mut().filter(|store| !store.objects) {
            for key in keys {
                store.pool.drop_block(key);
            }
        }
    }
}

//! Memory whose parts are written by different threads.

/// Numbers of which each thread writes its own.
#[derive(Clone, Copy)]
pub struct Shared(*mut f32);

// SAFETY: it hands out addresses only; whoever writes to one says which part is whose.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// first: the address of number 0.
    pub fn new(first: *mut f32) -> Self {
        Self(first)
    }

    /// The address of one number. To use it is as unsafe as with the pointer that it began with.
    pub fn at(self, index: usize) -> *mut f32 {
        self.0.wrapping_add(index)
    }
}

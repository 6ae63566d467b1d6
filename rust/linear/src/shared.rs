//! Memory whose parts are written by different threads.

/// Numbers of which each thread writes its own.
#[derive(Debug)]
pub struct Shared<T>(*mut T);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Shared<T> {}

// SAFETY: it hands out addresses only; whoever writes to one says which part is whose.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// first: the address of number 0.
    pub fn new(first: *mut T) -> Self {
        Self(first)
    }

    /// The address of one number. To use it is as unsafe as with the pointer that it began with.
    pub fn at(self, index: usize) -> *mut T {
        self.0.wrapping_add(index)
    }
}

//! Memory whose parts are written by different threads.

/// Its first number.
#[derive(Debug)]
pub struct Shared<T>(pub *mut T);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Shared<T> {}

// SAFETY: whoever uses it says which part is whose.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The address of a number.
    pub fn at(self, index: usize) -> *mut T {
        self.0.wrapping_add(index)
    }
}

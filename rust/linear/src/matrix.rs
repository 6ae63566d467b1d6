//! Matrices that lie in somebody else's memory.

use std::marker::PhantomData;

/// The upper half of an f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

impl From<Bf16> for f32 {
    fn from(half: Bf16) -> f32 {
        f32::from_bits(u32::from(half.0) << 16)
    }
}

impl From<f32> for Bf16 {
    /// To nearest, ties to even. NaN stays NaN.
    fn from(number: f32) -> Bf16 {
        let bits = number.to_bits();
        if number.is_nan() {
            return Bf16((bits >> 16) as u16 | 0x40);
        }
        Bf16(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16)
    }
}

/// Rows of numbers, each dense, `stride` numbers from one to the next.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a, T> {
    first: *const T,
    count: usize,
    width: usize,
    stride: usize,
    owner: PhantomData<&'a [T]>,
}

// SAFETY: it is a shared slice, seen as rows.
unsafe impl<T: Sync> Send for Rows<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Rows<'_, T> {}

impl<'a, T: Copy> Rows<'a, T> {
    /// The slice cut into rows of `width` numbers. Panics if it is no whole number of rows.
    pub fn new(numbers: &'a [T], count: usize, width: usize) -> Self {
        assert_eq!(numbers.len(), count * width, "{count} rows of {width}");
        // SAFETY: just checked, and the slice is borrowed for as long.
        unsafe { Self::from_raw(numbers.as_ptr(), count, width, width) }
    }

    /// Rows at an address.
    ///
    /// # Safety
    ///
    /// `width` numbers can be read at `first + row * stride` for each row below `count`, and nobody changes them, during `'a`.
    pub unsafe fn from_raw(first: *const T, count: usize, width: usize, stride: usize) -> Self {
        Self { first, count, width, stride, owner: PhantomData }
    }

    /// How many rows.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Numbers in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// One row.
    pub fn row(&self, index: usize) -> &'a [T] {
        assert!(index < self.count);
        if self.width == 0 {
            return &[];
        }
        // SAFETY: by the promise of `from_raw`.
        unsafe { std::slice::from_raw_parts(self.first.add(index * self.stride), self.width) }
    }

    /// Some of the rows.
    pub fn some(&self, first: usize, count: usize) -> Self {
        assert!(first + count <= self.count);
        Self { first: self.first.wrapping_add(first * self.stride), count, ..*self }
    }
}

/// Rows that can be written.
#[derive(Debug)]
pub struct RowsMut<'a, T> {
    first: *mut T,
    count: usize,
    width: usize,
    stride: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: it is an exclusive slice, seen as rows.
unsafe impl<T: Send> Send for RowsMut<'_, T> {}

impl<'a, T: Copy> RowsMut<'a, T> {
    /// The slice cut into rows of `width` numbers. Panics if it is no whole number of rows.
    pub fn new(numbers: &'a mut [T], count: usize, width: usize) -> Self {
        assert_eq!(numbers.len(), count * width, "{count} rows of {width}");
        // SAFETY: just checked, and the slice is borrowed for as long.
        unsafe { Self::from_raw(numbers.as_mut_ptr(), count, width, width) }
    }

    /// Rows at an address.
    ///
    /// # Safety
    ///
    /// `width` numbers can be written at `first + row * stride` for each row below `count`, and nobody else looks at them,
    /// during `'a`. Rows do not overlap.
    pub unsafe fn from_raw(first: *mut T, count: usize, width: usize, stride: usize) -> Self {
        Self { first, count, width, stride, owner: PhantomData }
    }

    /// How many rows.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Numbers in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Where a number is written. Panics if there is none.
    pub(crate) fn at(&mut self, row: usize, column: usize) -> *mut T {
        assert!(row < self.count && column < self.width);
        self.first.wrapping_add(row * self.stride + column)
    }

    pub(crate) fn stride(&self) -> usize {
        self.stride
    }
}

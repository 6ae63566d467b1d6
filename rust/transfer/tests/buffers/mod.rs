//! What lies in a buffer, before and after an engine moves it.

// Not every test that includes this file needs all of it.
#![allow(dead_code)]

use pyengine_transfer::region::Buffer;

/// All bytes. No copy to the buffer may be under way: it has completed, or the region is quiet.
pub fn content(buffer: &Buffer) -> Vec<u8> {
    // SAFETY: the buffer owns its bytes, and by the rule above nobody writes meanwhile.
    unsafe { std::slice::from_raw_parts(buffer.pointer().as_ptr(), buffer.bytes() as usize) }.to_vec()
}

/// Puts bytes at the beginning. No copy from or to the buffer may be under way.
pub fn fill(buffer: &Buffer, bytes: &[u8]) {
    assert!(bytes.len() as u64 <= buffer.bytes(), "{} bytes do not fit", bytes.len());
    // SAFETY: in range, and by the rule above nobody reads or writes meanwhile.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.pointer().as_ptr(), bytes.len()) };
}

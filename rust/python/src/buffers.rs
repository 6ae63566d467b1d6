//! Bytes arguments: anything with the buffer protocol that is contiguous, whatever its items are.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use transfer::types::BlockKey;

use crate::errors::bug;

/// A readable buffer, kept alive and exported (so not resized) while this value lives.
pub struct Readable(PyUntypedBuffer);

impl Readable {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        slice(&self.0)
    }

    /// Exactly N bytes.
    pub fn exactly<const N: usize>(&self, name: &str) -> PyResult<[u8; N]> {
        let bytes = self.bytes();
        bytes.try_into().map_err(|_| bug(format!("{name} has {} bytes, not {N}", bytes.len())))
    }

    /// Block keys, 16 bytes each.
    pub fn keys(&self) -> PyResult<Vec<BlockKey>> {
        let (keys, rest) = self.bytes().as_chunks();
        if rest.is_empty() {
            Ok(keys.iter().copied().map(BlockKey).collect())
        } else {
            Err(bug(format!("{} bytes are no whole number of 16-byte keys", self.bytes().len())))
        }
    }
}

impl<'py> FromPyObject<'_, 'py> for Readable {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        contiguous(&object).map(Self)
    }
}

/// A writable buffer, kept alive and exported (so not resized) while this value lives.
pub struct Writable(PyUntypedBuffer);

impl Writable {
    /// The bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        let length = self.0.len_bytes();
        if length == 0 {
            return &mut [];
        }
        // SAFETY: the exporter keeps `length` contiguous writable bytes there until the buffer is released, which
        // `self` does only when dropped. The caller hands the memory over for the call: using it from another thread
        // meanwhile is a race that the stub's contract ("use from one thread") excludes, as with `readinto`.
        unsafe { std::slice::from_raw_parts_mut(self.0.buf_ptr().cast(), length) }
    }
}

impl<'py> FromPyObject<'_, 'py> for Writable {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let buffer = contiguous(&object)?;
        if buffer.readonly() { Err(bug("the buffer is read-only")) } else { Ok(Self(buffer)) }
    }
}

fn contiguous(object: &Bound<'_, PyAny>) -> PyResult<PyUntypedBuffer> {
    let buffer = PyUntypedBuffer::get(object)?;
    if buffer.is_c_contiguous() { Ok(buffer) } else { Err(bug("the buffer is not contiguous: copy it first")) }
}

fn slice(buffer: &PyUntypedBuffer) -> &[u8] {
    let length = buffer.len_bytes();
    if length == 0 {
        return &[];
    }
    // SAFETY: the exporter keeps `length` contiguous bytes there until the buffer is released, which its owner does only
    // when dropped. Changing them from another thread meanwhile is excluded by the stub's contract.
    unsafe { std::slice::from_raw_parts(buffer.buf_ptr().cast_const().cast(), length) }
}

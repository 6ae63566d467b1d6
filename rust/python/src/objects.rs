//! `ObjectPool` and its views.

use std::collections::HashMap;
use std::os::raw::c_int;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::{PyBufferError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use transfer::config::{open_key, session_key};
use transfer::engine::Keeping;
use transfer::error::Error;
use transfer::objects::messages::{Cursor, ObjectStats};
use transfer::objects::{self, Value};
use transfer::types::{BlockKey, Medium};

use crate::buffers::{Readable, Writable};
use crate::errors::{bug, exception};
use crate::pool::{keep_time, keeping};
use crate::values::{Living, forks, seconds};

/// A key as its user gives it: text, which counts as UTF-8, or bytes.
pub struct Name(Vec<u8>);

impl<'py> FromPyObject<'_, 'py> for Name {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        Ok(Self(name_bytes(&object)?.to_vec()))
    }
}

fn name_bytes<'a>(object: &'a Bound<'_, PyAny>) -> PyResult<&'a [u8]> {
    if let Ok(text) = object.cast::<PyString>() {
        return Ok(text.to_str()?.as_bytes());
    }
    match object.cast::<PyBytes>() {
        Ok(bytes) => Ok(bytes.as_bytes()),
        Err(_) => Err(bug(format!("a key is str or bytes, not {}", object.get_type().name()?))),
    }
}

/// Several of them, in one piece of memory.
pub struct Names {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl<'py> FromPyObject<'_, 'py> for Names {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if object.is_instance_of::<PyString>() || object.is_instance_of::<PyBytes>() {
            return Err(PyTypeError::new_err("one key, where a list of keys is wanted"));
        }
        let count = object.len()?;
        let (mut bytes, mut ends) = (Vec::with_capacity(32 * count), Vec::with_capacity(count));
        for object in object.try_iter()? {
            let object = object?;
            bytes.extend_from_slice(name_bytes(&object)?);
            ends.push(bytes.len());
        }
        Ok(Self { bytes, ends })
    }
}

impl Names {
    fn all(&self) -> Vec<&[u8]> {
        let mut begin = 0;
        let name = |end: &usize| &self.bytes[std::mem::replace(&mut begin, *end)..*end];
        self.ends.iter().map(name).collect()
    }
}

/// A pool of objects.
#[pyclass(frozen, module = "pyengine._native")]
pub struct ObjectPool(Living<objects::Pool>);

impl ObjectPool {
    pub fn new(pool: objects::Pool) -> Self {
        Self(Living::new(pool))
    }

    fn with<R: Send>(
        &self,
        py: Python<'_>,
        what: impl FnOnce(&objects::Pool) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        self.0.with(py, what)?.map_err(exception)
    }
}

#[pymethods]
impl ObjectPool {
    /// Dials the daemon's unix socket and proves the session key both ways.
    #[staticmethod]
    fn connect(
        py: Python<'_>,
        socket: PathBuf,
        session_key: Readable,
        object_key: Readable,
        timeout: f64,
    ) -> PyResult<Self> {
        let session_key = self::session_key(session_key.bytes()).map_err(exception)?.unwrap_or_else(open_key);
        let object_key = object_key.exactly("object_key")?;
        let timeout = seconds(timeout)?;
        py.detach(|| objects::Pool::connect(&socket, session_key, object_key, timeout))
            .map(Self::new)
            .map_err(exception)
    }

    #[pyo3(signature = (keys, values, copies = 1))]
    fn put(&self, py: Python<'_>, keys: Names, values: Vec<Readable>, copies: u32) -> PyResult<Vec<bool>> {
        let names = keys.all();
        same(names.len(), values.len())?;
        let items: Vec<_> = names.into_iter().zip(&values).map(|(name, value)| (name, value.bytes())).collect();
        let outcomes = self.with(py, |pool| pool.put_copies(&items, copies))?;
        outcomes.into_iter().collect::<Result<_, _>>().map_err(exception)
    }

    fn get(&self, py: Python<'_>, keys: Names) -> PyResult<Vec<Option<View>>> {
        let names = keys.all();
        let values = self.with(py, |pool| pool.get(&names))?;
        Ok(values.into_iter().map(|value| value.map(View::new)).collect())
    }

    fn get_into(&self, py: Python<'_>, keys: Names, mut buffers: Vec<Writable>) -> PyResult<Vec<Option<usize>>> {
        let names = keys.all();
        same(names.len(), buffers.len())?;
        let mut items: Vec<_> = names.into_iter().zip(buffers.iter_mut().map(Writable::bytes)).collect();
        apart(&items)?;
        self.with(py, |pool| pool.get_into(&mut items))
    }

    fn exists(&self, py: Python<'_>, keys: Names) -> PyResult<Vec<bool>> {
        let names = keys.all();
        self.with(py, |pool| pool.exists(&names))
    }

    /// Per key: "dram", "ssd" or None.
    fn media(&self, py: Python<'_>, keys: Names) -> PyResult<Vec<Option<&'static str>>> {
        let names = keys.all();
        let media = self.with(py, |pool| pool.media(&names))?;
        Ok(media.into_iter().map(|medium| medium.map(Medium::name)).collect())
    }

    /// True if all that could be got outlives the daemon's process.
    fn flush(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, objects::Pool::flush)
    }

    fn remove(&self, py: Python<'_>, keys: Names) -> PyResult<Vec<bool>> {
        let names = keys.all();
        self.with(py, |pool| pool.remove(&names))
    }

    fn replicate(&self, py: Python<'_>, keys: Names, copies: u32) -> PyResult<Vec<u32>> {
        let names = keys.all();
        self.with(py, |pool| pool.replicate(&names, copies))
    }

    fn pin(&self, py: Python<'_>, keys: Names, ttl: f64, by: String) -> PyResult<Vec<&'static str>> {
        let (names, ttl_ms) = (keys.all(), keep_time(ttl, &by)?);
        Ok(self.with(py, |pool| pool.keep(&names, ttl_ms, &by))?.into_iter().map(keeping).collect())
    }

    fn unpin(&self, py: Python<'_>, keys: Names, by: String) -> PyResult<Vec<bool>> {
        let names = keys.all();
        let outcomes = self.with(py, |pool| pool.unkeep(&names, &by))?;
        Ok(outcomes.into_iter().map(|outcome| outcome == Keeping::Done).collect())
    }

    /// Some (key, bytes), and where the list goes on.
    #[expect(clippy::type_complexity, reason = "the tuple of the Python method")]
    fn list<'py>(
        &self,
        py: Python<'py>,
        prefix: Name,
        cursor: Option<(u32, Option<Readable>)>,
        limit: u32,
    ) -> PyResult<(Vec<(Bound<'py, PyBytes>, u64)>, Option<(u32, Option<Bound<'py, PyBytes>>)>)> {
        let from = match &cursor {
            None => None,
            Some((shard, None)) => Some(Cursor { shard: *shard, after: None }),
            Some((shard, Some(after))) => {
                Some(Cursor { shard: *shard, after: Some(BlockKey(after.exactly("the cursor's key")?)) })
            }
        };
        let (listed, next) = self.with(py, |pool| pool.list(&prefix.0, from, limit))?;
        let listed = listed.into_iter().map(|object| (PyBytes::new(py, &object.name), object.bytes)).collect();
        let next = next.map(|next| (next.shard, next.after.map(|after| PyBytes::new(py, &after.0))));
        Ok((listed, next))
    }

    /// By the names of `PoolStats`.
    fn stats(&self, py: Python<'_>) -> PyResult<HashMap<&'static str, u64>> {
        let ObjectStats { objects, bytes, capacity, ssd_objects, ssd_bytes, ssd_capacity, hits, misses } =
            self.with(py, objects::Pool::stats)?;
        Ok(HashMap::from([
            ("objects", objects),
            ("bytes", bytes),
            ("capacity", capacity),
            ("ssd_objects", ssd_objects),
            ("ssd_bytes", ssd_bytes),
            ("ssd_capacity", ssd_capacity),
            ("hits", hits),
            ("misses", misses),
        ]))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.0.close(py)
    }
}

fn same(keys: usize, others: usize) -> PyResult<()> {
    if keys == others { Ok(()) } else { Err(bug(format!("{keys} keys and {others} values: give one for each"))) }
}

/// Two buffers that share memory would get each other's bytes.
fn apart(items: &[(&[u8], &mut [u8])]) -> PyResult<()> {
    let mut ranges: Vec<_> = items.iter().map(|(_, buffer)| buffer.as_ptr_range()).collect();
    ranges.retain(|range| !range.is_empty());
    ranges.sort_unstable_by_key(|range| range.start);
    let overlap = ranges.windows(2).any(|pair| pair[1].start < pair[0].end);
    if overlap { Err(bug("two of the buffers share memory: give one for each key")) } else { Ok(()) }
}

/// A value in the pool, read-only.
#[pyclass(frozen, module = "pyengine._native")]
pub struct View {
    forks: u32,
    inner: Mutex<Inner>,
}

struct Inner {
    /// `None`: closed.
    value: Option<Value>,
    /// Buffers of it that are in use.
    exports: usize,
}

impl View {
    fn new(value: Value) -> Self {
        Self { forks: forks(), inner: Mutex::new(Inner { value: Some(value), exports: 0 }) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing under the lock panics, and it is held for moments.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<R>(&self, what: impl FnOnce(&Value) -> R) -> PyResult<R> {
        self.lock().value.as_ref().map(what).ok_or_else(|| bug("the view is closed"))
    }
}

#[pymethods]
impl View {
    fn __len__(&self) -> PyResult<usize> {
        self.with(Value::len)
    }

    /// True if it lies in the pool itself; false if it is a copy.
    #[getter]
    fn pinned(&self) -> PyResult<bool> {
        self.with(|value| matches!(value, Value::Pinned(..)))
    }

    #[getter]
    fn closed(&self) -> bool {
        self.lock().value.is_none()
    }

    fn verify(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| self.with(Value::verify))?.map_err(exception)
    }

    fn close(&self) -> PyResult<()> {
        let mut inner = self.lock();
        if inner.exports > 0 {
            return Err(PyBufferError::new_err(format!(
                "{} buffers of this view are in use (memoryview, numpy, torch): let go of them first",
                inner.exports
            )));
        }
        self.end(inner.value.take());
        Ok(())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: Bound<'_, PyAny>) -> PyResult<()> {
        self.close()
    }

    fn __repr__(&self) -> String {
        match &self.lock().value {
            None => "<View, closed>".into(),
            Some(value) => format!("<View of {} bytes>", value.len()),
        }
    }

    /// # Safety
    /// As CPython calls it.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut pyo3::ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        let mut inner = this.lock();
        let Some(value) = &inner.value else { return Err(PyBufferError::new_err("the view is closed")) };
        let (pointer, length) = (value.pointer().cast_mut(), value.len());
        // SAFETY: `view` is CPython's to fill. The bytes stay, and nobody writes them, while the value lives: `close`
        // keeps it while exports are out, and they keep this object. It is marked read-only.
        let result =
            unsafe { pyo3::ffi::PyBuffer_FillInfo(view, slf.as_ptr(), pointer.cast(), length as isize, 1, flags) };
        if result != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        inner.exports += 1;
        Ok(())
    }

    /// # Safety
    /// As CPython calls it, once for each `__getbuffer__`.
    unsafe fn __releasebuffer__(&self, _view: *mut pyo3::ffi::Py_buffer) {
        self.lock().exports -= 1;
    }
}

impl View {
    fn end(&self, value: Option<Value>) {
        // A forked child has the pin of its parent, not one of its own, and nothing to say to the daemon.
        if self.forks != forks() {
            std::mem::forget(value);
        }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        let value = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).value.take();
        self.end(value);
    }
}

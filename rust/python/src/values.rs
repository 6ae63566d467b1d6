//! Small values, and objects with threads behind them.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use transfer::messages::{GrantedSlot, Refusal};
use transfer::types;

use crate::errors::bug;

/// Where a node's daemon listens, and which life of it is meant.
#[pyclass(frozen, eq, hash, module = "pyengine._native")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct NodeAddress(pub types::NodeAddress);

#[pymethods]
impl NodeAddress {
    #[new]
    fn new(node: String, address: String, incarnation: u64) -> Self {
        Self(types::NodeAddress { node, address, incarnation })
    }

    #[getter]
    fn node(&self) -> &str {
        &self.0.node
    }

    #[getter]
    fn address(&self) -> &str {
        &self.0.address
    }

    #[getter]
    fn incarnation(&self) -> u64 {
        self.0.incarnation
    }

    fn __repr__(&self) -> String {
        format!("NodeAddress({:?}, {:?}, {})", self.0.node, self.0.address, self.0.incarnation)
    }
}

/// One attempt of one request on one worker's life.
#[pyclass(frozen, eq, hash, module = "pyengine._native")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tag(pub types::Tag);

#[pymethods]
impl Tag {
    #[new]
    fn new(request: u64, attempt: u32, worker: u64) -> PyResult<Self> {
        if request >> 63 != 0 {
            return Err(bug(format!("request {request} is not below 2**63")));
        }
        Ok(Self(types::Tag { request, attempt, worker }))
    }

    #[getter]
    fn request(&self) -> u64 {
        self.0.request
    }

    #[getter]
    fn attempt(&self) -> u32 {
        self.0.attempt
    }

    #[getter]
    fn worker(&self) -> u64 {
        self.0.worker
    }

    fn __repr__(&self) -> String {
        format!("Tag({}, {}, {})", self.0.request, self.0.attempt, self.0.worker)
    }
}

/// Where one block of a grant lies in the local arena.
#[pyclass(frozen, module = "pyengine._native")]
#[derive(Clone, Copy)]
pub struct Slot(pub GrantedSlot);

#[pymethods]
impl Slot {
    #[getter]
    fn slot(&self) -> u32 {
        self.0.slot.slot
    }

    #[getter]
    fn generation(&self) -> u32 {
        self.0.slot.generation
    }

    #[getter]
    fn committed(&self) -> bool {
        self.0.committed
    }

    fn __repr__(&self) -> String {
        let state = if self.0.committed { "committed" } else { "wanted" };
        format!("Slot({}, generation {}, {state})", self.0.slot.slot, self.0.slot.generation)
    }
}

/// A refusal's name.
pub fn refusal_name(refusal: Refusal) -> &'static str {
    match refusal {
        Refusal::Full => "full",
        Refusal::TooLarge => "too_large",
        Refusal::Ended => "ended",
        Refusal::Unreachable => "unreachable",
        Refusal::Deadline => "deadline",
        Refusal::Protocol => "protocol",
        Refusal::Corrupt => "corrupt",
        Refusal::Missing => "missing",
    }
}

/// Counters as a dict.
pub fn counters<'py>(py: Python<'py>, values: Vec<(String, u64)>) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, value) in values {
        dict.set_item(name, value)?;
    }
    Ok(dict)
}

/// Seconds as Python gives them.
pub fn seconds(value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value).map_err(|_| bug(format!("{value} is no number of seconds to wait")))
}

/// How often this process has come out of a fork: what was made in its parent knows it by that, with no system call.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Which process of a line of forks this is.
pub fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// Begins to count forks. Once, before anything asks.
pub fn count_forks() {
    extern "C" fn forked() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }

    type Handler = Option<extern "C" fn()>;
    unsafe extern "C" {
        fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> std::os::raw::c_int;
    }
    // SAFETY: POSIX declares it so. The handler touches one atomic, which is allowed in a forked child, and lives as long
    // as the module, which Python never unloads. It fails only without memory; then a fork goes uncounted.
    let _ = unsafe { pthread_atfork(None, None, Some(forked)) };
}

/// Something with threads behind it: it can be closed, and it does not survive a fork.
///
/// A forked child has the object but not its threads. Waiting for those would hang, so in the child every call is
/// refused with a sentence, and the object is forgotten instead of dropped.
pub struct Living<T> {
    process: u32,
    inner: RwLock<Option<T>>,
}

impl<T> Living<T> {
    /// Of this process.
    pub fn new(value: T) -> Self {
        Self { process: std::process::id(), inner: RwLock::new(Some(value)) }
    }

    fn check(&self) -> PyResult<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        Err(bug(
            "this object was made before a fork, and its threads stayed with the parent: make a new one in the child, \
                 or start the child with multiprocessing's \"spawn\"",
        ))
    }

    /// Uses it.
    pub fn with<R>(&self, py: Python<'_>, what: impl FnOnce(&T) -> R + Send) -> PyResult<R>
    where
        T: Send + Sync,
        R: Send,
    {
        self.check()?;
        py.detach(|| {
            let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
            inner.as_ref().map(what)
        })
        .ok_or_else(|| bug("it is closed"))
    }

    /// Uses it for a moment, without letting go of the GIL.
    pub fn inside<R>(&self, what: impl FnOnce(&T) -> R) -> PyResult<R> {
        self.check()?;
        let inner = self.inner.read().unwrap_or_else(PoisonError::into_inner);
        inner.as_ref().map(what).ok_or_else(|| bug("it is closed"))
    }

    /// Drops it now, once.
    pub fn close(&self, py: Python<'_>) -> PyResult<()>
    where
        T: Send + Sync,
    {
        self.check()?;
        py.detach(|| drop(self.inner.write().unwrap_or_else(PoisonError::into_inner).take()));
        Ok(())
    }
}

impl<T> Drop for Living<T> {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            std::mem::forget(self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

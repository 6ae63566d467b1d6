//! `PrefixIndex` over the index crate. `scheduler/native_index.py` makes the contract's types of what it returns.

use std::sync::{Mutex, MutexGuard, PoisonError};

use index::changes::{DRAM, SSD};
use index::{Index, Key, Run};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyModule};

use crate::buffers::Readable;

/// How much of one prefix each holder has.
#[pyclass(frozen, module = "pyengine._native")]
pub struct Match {
    #[pyo3(get)]
    best: usize,
    #[pyo3(get)]
    held: Py<PyAny>,
    #[pyo3(get)]
    ssd: Py<PyAny>,
}

/// Block keys to holders.
#[pyclass(frozen, subclass, module = "pyengine._native")]
pub struct PrefixIndex(Mutex<Index>);

/// Node, first and last block, medium.
type Listed = (String, usize, usize, &'static str);

#[pymethods]
impl PrefixIndex {
    #[new]
    fn new() -> Self {
        Self(Mutex::new(Index::new()))
    }

    #[getter]
    fn epoch(&self) -> u64 {
        self.lock().epoch()
    }

    #[getter]
    fn size(&self) -> usize {
        self.lock().bytes()
    }

    fn slot(&self, node: &str) -> isize {
        row(&self.lock(), node)
    }

    fn slots<'py>(&self, py: Python<'py>, nodes: Vec<PyBackedStr>) -> PyResult<Bound<'py, PyAny>> {
        let index = self.lock();
        let rows: Vec<_> = nodes.iter().map(|node| row(&index, node) as i64).collect();
        drop(index);
        array(py, &rows)
    }

    fn name(&self, slot: isize) -> String {
        let slot = usize::try_from(slot).ok();
        slot.and_then(|slot| self.lock().name(slot).map(String::from)).unwrap_or_default()
    }

    fn count(&self, node: &str) -> u64 {
        self.lock().count(node)
    }

    fn digest<'py>(&self, py: Python<'py>, node: &str) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.lock().digest(node))
    }

    fn holds(&self, node: &str, key: Readable) -> PyResult<bool> {
        Ok(self.lock().holds(node, &key.exactly("key")?))
    }

    fn holders(&self, key: Readable) -> PyResult<Vec<String>> {
        let key = key.exactly("key")?;
        let index = self.lock();
        Ok(index.holders(&key).into_iter().map(|slot| name(&index, slot)).collect())
    }

    // The lock is never held while the GIL is waited for: within `detach`, and wherever it is taken without, nothing
    // calls into Python.

    fn apply(&self, py: Python<'_>, node: &str, changes: Readable) -> PyResult<()> {
        let bytes = changes.bytes();
        py.detach(|| self.lock().apply(node, bytes)).map_err(refused)
    }

    fn clear(&self, node: &str) -> PyResult<()> {
        self.lock().clear(node).map_err(refused)
    }

    fn forget(&self, node: &str) {
        self.lock().forget(node);
    }

    fn replace(&self, py: Python<'_>, node: &str, changes: Readable) -> PyResult<()> {
        let bytes = changes.bytes();
        py.detach(|| self.lock().replace(node, bytes)).map_err(refused)
    }

    fn begin(&self, node: &str) -> PyResult<()> {
        self.lock().begin(node).map_err(refused)
    }

    fn stage(&self, py: Python<'_>, node: &str, changes: Readable) -> PyResult<()> {
        let bytes = changes.bytes();
        py.detach(|| self.lock().stage(node, bytes)).map_err(refused)
    }

    fn adopt(&self, node: &str) -> PyResult<()> {
        self.lock().adopt(node).map_err(refused)
    }

    fn dump<'py>(&self, py: Python<'py>, node: &str) -> Bound<'py, PyBytes> {
        let packed = py.detach(|| self.lock().dump(node));
        PyBytes::new(py, &packed)
    }

    #[pyo3(name = "match")]
    fn find_matches(&self, py: Python<'_>, keys: Readable) -> PyResult<Match> {
        let keys = whole(&keys)?;
        let index = self.lock();
        let rows = index.rows() + 1;
        let (mut held, mut ssd) = (vec![0; rows], vec![0; rows]);
        let best = index.find_matches(keys, &mut held, &mut ssd);
        drop(index);
        Ok(Match { best, held: array(py, &held)?.unbind(), ssd: array(py, &ssd)?.unbind() })
    }

    /// Runs as plain tuples.
    fn _runs(&self, keys: Readable, first: usize, avoid: Vec<PyBackedStr>) -> PyResult<Vec<Listed>> {
        let keys = whole(&keys)?;
        let index = self.lock();
        let runs = index.runs(keys, first, avoid.iter().map(|node| &**node));
        Ok(runs.into_iter().map(|run| (name(&index, run.slot), run.first, run.last, medium(run.tier))).collect())
    }

    /// Who else has the run's blocks, and up to which.
    fn _shared(
        &self,
        keys: Readable,
        first: usize,
        last: usize,
        on_ssd: bool,
        avoid: Vec<PyBackedStr>,
    ) -> PyResult<Vec<(String, usize)>> {
        let run = Run { slot: 0, first, last, tier: if on_ssd { SSD } else { DRAM } };
        let keys = whole(&keys)?;
        let index = self.lock();
        let shared = index.shared(keys, run, avoid.iter().map(|node| &**node));
        Ok(shared.into_iter().map(|(slot, last)| (name(&index, slot), last)).collect())
    }

    /// Parent and position of a block that only this node and the others have.
    fn _only_at<'py>(
        &self,
        py: Python<'py>,
        key: Readable,
        node: &str,
        others: Vec<PyBackedStr>,
    ) -> PyResult<Option<(Bound<'py, PyBytes>, u32)>> {
        let place = self.lock().only_at(&key.exactly("key")?, node, others.iter().map(|node| &**node));
        Ok(place.map(|place| (PyBytes::new(py, &place.parent), place.position)))
    }

    /// First and last blocks of the runs.
    fn _only_on_ssd(&self, keys: Readable, node: &str) -> PyResult<Vec<(usize, usize)>> {
        Ok(self.lock().only_on_ssd(whole(&keys)?, node))
    }

    fn check(&self, py: Python<'_>) {
        py.detach(|| self.lock().check());
    }
}

impl PrefixIndex {
    fn lock(&self) -> MutexGuard<'_, Index> {
        // A panic under the lock is a bug that its caller has seen; `check` says whether the index is whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn row(index: &Index, node: &str) -> isize {
    index.slot(node).map_or(-1, |slot| slot as isize)
}

fn name(index: &Index, slot: usize) -> String {
    index.name(slot).unwrap_or_default().into()
}

fn medium(tier: u8) -> &'static str {
    if tier == SSD { "ssd" } else { "dram" }
}

fn refused(error: index::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn whole(keys: &Readable) -> PyResult<&[Key]> {
    let (whole, rest) = keys.bytes().as_chunks();
    if rest.is_empty() {
        return Ok(whole);
    }
    Err(PyValueError::new_err(format!("{} bytes are no whole number of 16-byte keys", keys.bytes().len())))
}

/// A numpy array of 64-bit integers, read-only. Without numpy's own interface, which the stable ABI has not.
fn array<'py>(py: Python<'py>, values: &[i64]) -> PyResult<Bound<'py, PyAny>> {
    static FROM_BUFFER: PyOnceLock<(Py<PyAny>, Py<PyAny>)> = PyOnceLock::new();
    let (make, kind) = FROM_BUFFER.get_or_try_init(py, || {
        let numpy = PyModule::import(py, "numpy")?;
        let kind = numpy.getattr("dtype")?.call1(("int64",))?;
        Ok::<_, PyErr>((numpy.getattr("frombuffer")?.unbind(), kind.unbind()))
    })?;
    let bytes = PyBytes::new_with(py, size_of_val(values), |bytes| {
        for (bytes, value) in bytes.chunks_exact_mut(8).zip(values) {
            bytes.copy_from_slice(&value.to_ne_bytes());
        }
        Ok(())
    })?;
    make.bind(py).call1((bytes, kind))
}

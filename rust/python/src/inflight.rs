//! `Inflight` over the index crate: an `inflight.Expectations` of the scheduler as it is.

use std::sync::{Mutex, MutexGuard, PoisonError};

use index::Key;
use index::inflight::Number;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::PyDict;

use crate::buffers::Readable;

/// Blocks that are not there yet and will be.
#[pyclass(frozen, module = "pyengine._native")]
pub struct Inflight(Mutex<index::inflight::Inflight>);

/// Its gateway, and its number there.
type Request = (PyBackedStr, Numbered);

/// What msgpack takes for an integer.
#[derive(FromPyObject)]
enum Numbered {
    Signed(i64),
    Unsigned(u64),
}

impl From<Numbered> for Number {
    fn from(number: Numbered) -> Self {
        match number {
            Numbered::Signed(number) => number.into(),
            Numbered::Unsigned(number) => number.into(),
        }
    }
}

#[pymethods]
impl Inflight {
    #[new]
    fn new() -> Self {
        Self(Mutex::default())
    }

    fn __len__(&self) -> usize {
        self.lock().len()
    }

    fn add(
        &self,
        request: Request,
        keys: Readable,
        block_tokens: usize,
        workers: &Bound<'_, PyDict>,
        now: f64,
    ) -> PyResult<()> {
        let workers: Vec<(PyBackedStr, f64)> =
            workers.iter().map(|(name, ready)| Ok((name.extract()?, ready.extract()?))).collect::<PyResult<_>>()?;
        let workers = workers.iter().map(|(name, ready)| (&**name, *ready));
        self.lock().add(&request.0, request.1.into(), blocks(&keys), block_tokens, workers, now);
        Ok(())
    }

    fn end(&self, request: Request) {
        self.lock().end(&request.0, request.1.into());
    }

    fn lost(&self, worker: &str) {
        self.lock().lost(worker);
    }

    fn expire(&self, now: f64) {
        self.lock().expire(now);
    }

    fn find<'py>(
        &self,
        py: Python<'py>,
        keys: Readable,
        block_tokens: usize,
        now: f64,
    ) -> PyResult<Bound<'py, PyDict>> {
        let found = PyDict::new(py);
        let mut inflight = self.lock();
        for each in inflight.find(blocks(&keys), block_tokens, now) {
            found.set_item(inflight.name(each.worker), (each.blocks, each.ready))?;
        }
        Ok(found)
    }

    fn check(&self) {
        self.lock().check();
    }
}

impl Inflight {
    fn lock(&self) -> MutexGuard<'_, index::inflight::Inflight> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whole keys; what is behind the last is none.
fn blocks(keys: &Readable) -> &[Key] {
    keys.bytes().as_chunks().0
}

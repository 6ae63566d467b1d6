//! `PoolModel`.

use std::sync::Mutex;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use transfer::pool::model;
use transfer::pool::policy::{POLICIES, Policy, cost::Costs};
use transfer::types::BlockKey;

use crate::buffers::Readable;
use crate::errors::{bug, exception};

/// Names of the eviction policies, the default first.
pub fn policies() -> impl ExactSizeIterator<Item = &'static str> {
    POLICIES.iter().map(|policy| policy.name)
}

/// A node's pool without a memory.
#[pyclass(frozen, module = "pyengine._native")]
pub struct PoolModel {
    model: Mutex<model::PoolModel>,
    #[pyo3(get)]
    policy: &'static str,
}

impl PoolModel {
    fn with<T>(&self, run: impl FnOnce(&mut model::PoolModel) -> T) -> PyResult<T> {
        let mut model = self.model.lock().map_err(|_| bug("this model has failed in an earlier call"))?;
        Ok(run(&mut model))
    }
}

#[pymethods]
impl PoolModel {
    #[new]
    #[pyo3(signature = (policy, dram_blocks, ssd_blocks = 0, *, costs = None, changes = false))]
    fn new(
        policy: &str,
        dram_blocks: u32,
        ssd_blocks: u32,
        costs: Option<(f64, f64, f64)>,
        changes: bool,
    ) -> PyResult<Self> {
        let policy = Policy::named(policy).map_err(exception)?;
        let given = |(per_token, per_pair, block_tokens)| Costs { per_token, per_pair, block_tokens };
        let all = costs.map_or_else(Costs::default, given);
        let model = model::PoolModel::new(policy, &all, dram_blocks, ssd_blocks, changes).map_err(exception)?;
        Ok(Self { model: Mutex::new(model), policy: policy.name })
    }

    fn access(&self, py: Python<'_>, ids: Readable) -> PyResult<(u64, u64)> {
        let bytes = ids.bytes();
        let (numbers, rest) = bytes.as_chunks();
        if !rest.is_empty() {
            return Err(bug(format!("{} bytes are no whole number of 8-byte ids: use numpy.uint64", bytes.len())));
        }
        let ids: Vec<u64> = numbers.iter().copied().map(u64::from_le_bytes).collect();
        let hits = py.detach(|| self.with(|model| model.access(&ids)))?.map_err(exception)?;
        Ok((hits.dram, hits.ssd))
    }

    fn find<'py>(&self, py: Python<'py>, keys: Readable) -> PyResult<Bound<'py, PyBytes>> {
        let keys = keys.keys()?;
        let found = self.with(|model| model.find(&keys))?;
        PyBytes::new_with(py, found.len(), |bytes| {
            bytes.iter_mut().zip(found).for_each(|(byte, tier)| *byte = tier as u8);
            Ok(())
        })
    }

    #[pyo3(signature = (tag, keys, private = 0, *, position = 0, parent = None))]
    fn take(&self, tag: u64, keys: Readable, private: u32, position: u32, parent: Option<Readable>) -> PyResult<bool> {
        let keys = keys.keys()?;
        let parent = parent.map_or(Ok(BlockKey::default()), |parent| parent.exactly("parent").map(BlockKey))?;
        self.with(|model| model.take(tag, keys, private, position, parent))?.map_err(exception)
    }

    fn commit(&self, tag: u64, keys: Readable) -> PyResult<()> {
        let keys = keys.keys()?;
        self.with(|model| model.commit(tag, &keys))?.map_err(exception)
    }

    fn release(&self, tag: u64) -> PyResult<bool> {
        self.with(|model| model.release(tag))
    }

    fn drop(&self, keys: Readable) -> PyResult<u64> {
        let keys = keys.keys()?;
        self.with(|model| model.drop_blocks(&keys))
    }

    fn restart(&self) -> PyResult<()> {
        self.with(|model| model.restart())
    }

    fn changes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let changes = self.with(|model| model.take_changes())?;
        Ok(PyBytes::new(py, &changes))
    }

    fn digest<'py>(&self, py: Python<'py>) -> PyResult<(u64, Bound<'py, PyBytes>)> {
        let (count, xor) = self.with(|model| model.digest())?;
        Ok((count, PyBytes::new(py, &xor)))
    }

    #[getter]
    fn available(&self) -> PyResult<u64> {
        self.with(|model| model.available())
    }

    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = self.with(|model| model.counts())?;
        let all = PyDict::new(py);
        for (name, value) in [
            ("requests", counts.requests),
            ("blocks", counts.blocks),
            ("dram_hits", counts.hits.dram),
            ("ssd_hits", counts.hits.ssd),
            ("evictions", counts.evictions),
            ("dropped", counts.dropped),
            ("in_dram", counts.in_dram),
            ("in_ssd", counts.in_ssd),
        ] {
            all.set_item(name, value)?;
        }
        Ok(all)
    }

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.with(|model| model.check()))
    }
}

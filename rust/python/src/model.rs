//! `CacheModel`.

use std::sync::Mutex;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use transfer::pool::model;
use transfer::pool::policy::{POLICIES, Policy, cost::Costs};

use crate::buffers::Readable;
use crate::errors::{bug, exception};

/// Names of the eviction policies, the default first.
pub fn policies() -> impl ExactSizeIterator<Item = &'static str> {
    POLICIES.iter().map(|policy| policy.name)
}

/// A node's cache without a memory.
#[pyclass(frozen, module = "pyengine._native")]
pub struct CacheModel {
    model: Mutex<model::CacheModel>,
    #[pyo3(get)]
    policy: &'static str,
}

impl CacheModel {
    fn with<T>(&self, run: impl FnOnce(&mut model::CacheModel) -> T) -> PyResult<T> {
        let mut model = self.model.lock().map_err(|_| bug("this model has failed in an earlier call"))?;
        Ok(run(&mut model))
    }
}

#[pymethods]
impl CacheModel {
    #[new]
    #[pyo3(signature = (policy, dram_blocks, ssd_blocks = 0, *, costs = None))]
    fn new(policy: &str, dram_blocks: u32, ssd_blocks: u32, costs: Option<(f64, f64, f64)>) -> PyResult<Self> {
        let policy = Policy::named(policy).map_err(exception)?;
        let given = |(per_token, per_pair, block_tokens)| Costs { per_token, per_pair, block_tokens };
        let all = costs.map_or_else(Costs::default, given);
        let model = model::CacheModel::new(policy, &all, dram_blocks, ssd_blocks).map_err(exception)?;
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

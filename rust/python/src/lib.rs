//! `pyengine._native`: converts between Python and the Rust crates, and releases the GIL. Nothing else.
//!
//! The contract is in `pyengine/_native.pyi`.

mod buffers;
mod daemon;
mod errors;
mod index;
mod inflight;
mod kernels;
mod keys;
mod linear;
mod model;
mod objects;
mod pool;
mod report;
mod transfer;
mod values;
mod xla;

use pyo3::prelude::*;

/// The Rust side: block keys, a node's pool, and the links between nodes.
#[pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use super::daemon::{Daemon, transferd_main};
    #[pymodule_export]
    use super::errors::{BugError, GiveUpError, RetryError, TransferError};
    #[pymodule_export]
    use super::index::{Match, PrefixIndex};
    #[pymodule_export]
    use super::inflight::Inflight;
    #[pymodule_export]
    use super::kernels::{AttentionPlan, CpuKernels};
    #[pymodule_export]
    use super::keys::{block_keys, derive_key, root_key};
    #[pymodule_export]
    use super::linear::{LinearThreads, LinearWeights, pack_linear};
    #[pymodule_export]
    use super::model::PoolModel;
    #[pymodule_export]
    use super::objects::{ObjectPool, View};
    #[pymodule_export]
    use super::pool::{
        Arrived, Complete, Counters, Disconnected, Fetched, Flushed, Granted, Kept, Located, Opened, PoolClient,
        Pushed, Refused, SharedSlots,
    };
    #[pymodule_export]
    use super::report::{
        BlockDump, BlocksChanged, Cleared, DaemonGone, DaemonHeartbeat, DaemonHello, Replicated, ReportEndpoint,
    };
    #[pymodule_export]
    use super::transfer::{Copies, Endpoint, Notification, Peer, Region, RemoteRegion, Transfer, Watcher};
    #[pymodule_export]
    use super::values::{NodeAddress, Slot, Tag};
    #[pymodule_export]
    use super::xla::xla_handlers;
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::values::count_forks();
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("KEY_BYTES", size_of::<::transfer::types::BlockKey>())?;
        module.add("NOTE_LIMIT", ::transfer::messages::NOTE_LIMIT)?;
        module.add("NOTIFICATION_LIMIT", ::transfer::messages::NOTIFICATION_LIMIT)?;
        module.add("EVICTION_POLICIES", pyo3::types::PyTuple::new(module.py(), super::model::policies())?)?;
        module.add("PANEL", ::linear::PANEL)?;
        module.add("LINEAR_LEVELS", pyo3::types::PyTuple::new(module.py(), super::linear::levels())?)?;
        let events =
            "Granted Located Refused Opened Arrived Complete Fetched Pushed Counters Flushed Kept Disconnected";
        module.add("PoolEvent", union(module, events)?)?;
        let reports = "DaemonHello BlocksChanged BlockDump DaemonHeartbeat Replicated Cleared DaemonGone";
        module.add("DaemonReport", union(module, reports)?)?;
        // The stub is the list of names; a second one would have to be kept like it.
        module.delattr("__all__")
    }

    /// `A | B | …`, as annotations name it.
    fn union<'py>(module: &Bound<'py, PyModule>, names: &str) -> PyResult<Bound<'py, PyAny>> {
        let mut names = names.split_whitespace();
        let first = module.getattr(names.next().unwrap_or_default())?;
        names.try_fold(first, |union, name| union.bitor(module.getattr(name)?))
    }
}

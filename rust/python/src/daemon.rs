//! `Daemon`, and the command line.

use std::ffi::OsString;
use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use transfer::config::{Config, session_key};
use transfer::daemon;
use transfer::types::Layout;

use crate::buffers::Readable;
use crate::errors::exception;
use crate::objects::ObjectPool;
use crate::pool::PoolClient;
use crate::values::{Living, NodeAddress, counters};

/// A node's daemon inside this process.
#[pyclass(frozen, module = "pyengine._native")]
pub struct Daemon {
    living: Living<daemon::Daemon>,
    address: NodeAddress,
}

#[pymethods]
impl Daemon {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "Python gives them by name")]
    #[pyo3(signature = (*, node, dram_bytes, session_key, listen = None, socket = None, conductor = None,
                        peers = Vec::new(), transport = "auto", tls = false, ssd_dirs = Vec::new(), ssd_bytes = 0))]
    fn new(
        py: Python<'_>,
        node: String,
        dram_bytes: u64,
        session_key: Readable,
        listen: Option<String>,
        socket: Option<PathBuf>,
        conductor: Option<String>,
        peers: Vec<String>,
        transport: &str,
        tls: bool,
        ssd_dirs: Vec<PathBuf>,
        ssd_bytes: u64,
    ) -> PyResult<Self> {
        let session_key = self::session_key(session_key.bytes()).map_err(exception)?;
        let transport = transport.parse().map_err(exception)?;
        let default = Config::new(node, dram_bytes);
        let config =
            Config { listen, transport, socket, conductor, peers, session_key, tls, ssd_dirs, ssd_bytes, ..default };
        let daemon = py.detach(|| daemon::Daemon::start(&config)).map_err(exception)?;
        let address = NodeAddress(daemon.address().clone());
        Ok(Self { living: Living::new(daemon), address })
    }

    #[getter]
    fn address(&self) -> NodeAddress {
        self.address.clone()
    }

    #[pyo3(signature = (incarnation, strips, strip_bytes, namespace = 0))]
    fn attach(
        &self,
        py: Python<'_>,
        incarnation: u64,
        strips: u32,
        strip_bytes: u32,
        namespace: u64,
    ) -> PyResult<PoolClient> {
        let layout = Layout { strips, strip_bytes };
        self.living
            .with(py, |daemon| daemon.attach(incarnation, layout, namespace))?
            .map(PoolClient::new)
            .map_err(exception)
    }

    fn objects(&self, py: Python<'_>, object_key: Readable) -> PyResult<ObjectPool> {
        let key = object_key.exactly("object_key")?;
        self.living.with(py, |daemon| daemon.objects(key))?.map(ObjectPool::new).map_err(exception)
    }

    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let values = self.living.with(py, daemon::Daemon::counters)?.map_err(exception)?;
        counters(py, values)
    }

    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        self.living.close(py)
    }
}

/// The `transferd` command line.
#[pyfunction]
pub fn transferd_main(py: Python<'_>, arguments: Vec<OsString>) -> i32 {
    py.detach(|| transferd::run(arguments.into_iter()))
}

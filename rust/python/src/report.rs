//! `ReportEndpoint` and its events.

use std::os::fd::AsRawFd;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use transfer::config::session_key;
use transfer::incarnation::new_incarnation;
use transfer::messages::{DaemonOrder, DaemonReport};
use transfer::pool::tier::Whose;
use transfer::report::{self, EndpointEvent};
use transfer::types::BlockKey;

use crate::buffers::Readable;
use crate::errors::{bug, exception};
use crate::pool::event;
use crate::values::{Living, NodeAddress, counters};

event!(
    /// A daemon has dialled in.
    DaemonHello { node: NodeAddress, socket: String, next_sequence: u64 }
);
event!(
    /// Consecutive changes of its blocks, packed.
    BlocksChanged { node: NodeAddress, sequence: u64, changes: Py<PyBytes> }
);
event!(
    /// Part of a dump, packed.
    BlockDump { node: NodeAddress, sequence: u64, part: u32, blocks: Py<PyBytes>, last: bool }
);
event!(
    /// Each second.
    DaemonHeartbeat {
        node: NodeAddress,
        next_sequence: u64,
        count: u64,
        xor: Py<PyBytes>,
        counters: Py<PyDict>,
        draining: bool
    }
);
event!(
    /// How an ordered replication went.
    Replicated { node: NodeAddress, order: u64, stored: u32, missing: u32 }
);
event!(
    /// An ordered clearing is done.
    Cleared { node: NodeAddress, order: u64, dropped: u64, held: u64, durable: bool }
);
event!(
    /// The session ended.
    DaemonGone { node: NodeAddress }
);

/// Where daemons dial in to the conductor.
#[pyclass(frozen, module = "pyengine._native")]
pub struct ReportEndpoint {
    living: Living<report::ReportEndpoint>,
    address: String,
}

#[pymethods]
impl ReportEndpoint {
    #[new]
    #[pyo3(signature = (listen, session_key, *, tls = false))]
    fn new(py: Python<'_>, listen: String, session_key: Readable, tls: bool) -> PyResult<Self> {
        let key = self::session_key(session_key.bytes()).map_err(exception)?;
        let start = || report::ReportEndpoint::new(&listen, key, tls, new_incarnation());
        let endpoint = py.detach(start).map_err(exception)?;
        let address = endpoint.address().to_string();
        Ok(Self { living: Living::new(endpoint), address })
    }

    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.living.with(py, |endpoint| endpoint.descriptor().as_raw_fd())
    }

    fn events<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let events = self.living.with(py, report::ReportEndpoint::events)?;
        events.into_iter().map(|event| convert(py, event)).collect()
    }

    fn order_dump(&self, py: Python<'_>, node: String) -> PyResult<()> {
        self.living.with(py, |endpoint| endpoint.order(&node, &DaemonOrder::Dump))?.map_err(exception)
    }

    fn order_members(&self, py: Python<'_>, node: String, members: Vec<PyRef<'_, NodeAddress>>) -> PyResult<()> {
        let order = DaemonOrder::Members { members: members.iter().map(|member| member.0.clone()).collect() };
        self.living.with(py, |endpoint| endpoint.order(&node, &order))?.map_err(exception)
    }

    #[expect(clippy::too_many_arguments, reason = "the arguments of the Python method")]
    fn order_replicate(
        &self,
        py: Python<'_>,
        node: String,
        order: u64,
        keys: Readable,
        parent: Readable,
        position: u32,
        source: &NodeAddress,
    ) -> PyResult<()> {
        let parent = BlockKey(parent.exactly("parent")?);
        let from = source.0.clone();
        let order = DaemonOrder::Replicate { order, keys: keys.keys()?, parent, position, from };
        self.living.with(py, |endpoint| endpoint.order(&node, &order))?.map_err(exception)
    }

    fn order_moved(&self, py: Python<'_>, node: String, blocks: u64, left: u64) -> PyResult<()> {
        let order = DaemonOrder::Moved { blocks, left };
        self.living.with(py, |endpoint| endpoint.order(&node, &order))?.map_err(exception)
    }

    fn order_clear(
        &self,
        py: Python<'_>,
        node: String,
        order: u64,
        namespace: Option<u64>,
        tenant: Option<u64>,
    ) -> PyResult<()> {
        let whose = match (namespace, tenant) {
            (Some(namespace), None) => Whose::Namespace(namespace),
            (None, Some(tenant)) => Whose::Tenant(tenant),
            _ => return Err(bug("say which namespace or which tenant is to be cleared, one of them")),
        };
        let order = DaemonOrder::Clear { order, whose };
        self.living.with(py, |endpoint| endpoint.order(&node, &order))?.map_err(exception)
    }

    fn order_forget(&self, py: Python<'_>, node: String, keys: Readable) -> PyResult<()> {
        let order = DaemonOrder::Forget { keys: keys.keys()? };
        self.living.with(py, |endpoint| endpoint.order(&node, &order))?.map_err(exception)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.living.close(py)
    }
}

fn convert<'py>(py: Python<'py>, event: EndpointEvent) -> PyResult<Bound<'py, PyAny>> {
    let bytes = |bytes: &[u8]| PyBytes::new(py, bytes).unbind();
    Ok(match event {
        EndpointEvent::Gone(node) => Bound::new(py, DaemonGone { node: NodeAddress(node) })?.into_any(),
        EndpointEvent::Changed(node, sequence, changes) => {
            let changes = bytes(&changes);
            Bound::new(py, BlocksChanged { node: NodeAddress(node), sequence, changes })?.into_any()
        }
        EndpointEvent::Dumped { node, sequence, part, blocks, last } => {
            let (node, blocks) = (NodeAddress(node), bytes(&blocks));
            Bound::new(py, BlockDump { node, sequence, part, blocks, last })?.into_any()
        }
        EndpointEvent::Report(from, report) => {
            let from = NodeAddress(from);
            match report {
                DaemonReport::Hello { node, socket, next_sequence } => {
                    let node = NodeAddress(node);
                    Bound::new(py, DaemonHello { node, socket, next_sequence })?.into_any()
                }
                DaemonReport::Heartbeat { next_sequence, count, xor, counters: values, draining } => {
                    let (node, xor, counters) = (from, bytes(&xor.0), counters(py, values)?.unbind());
                    let heartbeat = DaemonHeartbeat { node, next_sequence, count, xor, counters, draining };
                    Bound::new(py, heartbeat)?.into_any()
                }
                DaemonReport::Replicated { order, stored, missing } => {
                    Bound::new(py, Replicated { node: from, order, stored, missing })?.into_any()
                }
                DaemonReport::Cleared { order, dropped, held, durable } => {
                    Bound::new(py, Cleared { node: from, order, dropped, held, durable })?.into_any()
                }
                DaemonReport::Stored { .. } | DaemonReport::Removed { .. } | DaemonReport::Dump { .. } => {
                    unreachable!("the endpoint packs them")
                }
            }
        }
    })
}

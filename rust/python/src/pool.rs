//! `PoolClient` and its events.

use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use transfer::client::{self, ClientEvent};
use transfer::config::{open_key, session_key};
use transfer::engine::{Keeping, keep};
use transfer::memory::{Arena, Runs};
use transfer::messages::{Found, GrantMode, GrantedSlot, LocalEvent, LocalRequest};
use transfer::types::{BlockKey, Layout, Medium, SlotRef};

use crate::buffers::{Readable, Writable};
use crate::errors::{bug, exception};
use crate::values::{Living, NodeAddress, Slot, Tag, counters, refusal_name, seconds};

/// Declares an event: a frozen class with getters, a repr and `__match_args__`.
macro_rules! event {
    ($(#[$meta:meta])* $name:ident { $($field:ident: $type:ty),+ }) => {
        $(#[$meta])*
        #[pyclass(frozen, get_all, module = "pyengine._native")]
        pub struct $name {
            $(pub $field: $type),+
        }

        #[pymethods]
        impl $name {
            #[classattr]
            fn __match_args__(py: Python<'_>) -> PyResult<Py<pyo3::types::PyTuple>> {
                Ok(pyo3::types::PyTuple::new(py, [$(stringify!($field)),+])?.unbind())
            }

            fn __repr__(slf: Bound<'_, Self>) -> PyResult<String> {
                let mut fields = Vec::new();
                $(fields.push(slf.getattr(stringify!($field))?.repr()?.to_string());)+
                Ok(format!("{}({})", stringify!($name), fields.join(", ")))
            }
        }
    };
}
pub(crate) use event;

event!(
    /// The grant is held.
    Granted { tag: Tag, slots: Py<PyList> }
);
event!(
    /// The pinned leading blocks.
    Located { tag: Tag, slots: Py<PyList>, behind: u32 }
);
event!(
    /// A grant, open, push or the whole tag failed.
    Refused { tag: Tag, refusal: &'static str }
);
event!(
    /// Answer to `open`.
    Opened { tag: Tag, committed: Py<PyList>, slots: Py<PyList> }
);
event!(
    /// These blocks of the own grant have become readable.
    Arrived { tag: Tag, indices: Py<PyList> }
);
event!(
    /// Every block of the own grant is readable and the pusher's note is here.
    Complete { tag: Tag, note: Py<PyBytes> }
);
event!(
    /// Outcome of one index of a `fetch`.
    Fetched { tag: Tag, index: u32, refusal: Option<&'static str>, slot: Option<Slot>, origin: Option<&'static str> }
);
event!(
    /// These pushed blocks are applied and verified at the destination.
    Pushed { tag: Tag, indices: Py<PyList>, note: bool }
);
event!(
    /// The daemon's counters.
    Counters { values: Py<PyDict> }
);
event!(
    /// Answer to `flush`.
    Flushed { ok: bool }
);
event!(
    /// Answer to `keep` and `unkeep`: per key "done", "coming", "missing" or "full".
    Kept { outcomes: Vec<&'static str> }
);
event!(
    /// The daemon is gone.
    Disconnected { reason: String }
);

/// A worker's link to its node's pool.
#[pyclass(frozen, module = "pyengine._native")]
pub struct PoolClient {
    living: Living<client::PoolClient>,
    node: NodeAddress,
    slots: u32,
}

impl PoolClient {
    pub fn new(client: client::PoolClient) -> Self {
        let (node, slots) = (NodeAddress(client.node().clone()), client.arena().slots());
        Self { living: Living::new(client), node, slots }
    }

    fn request(&self, py: Python<'_>, request: LocalRequest) -> PyResult<()> {
        self.living.with(py, |client| client.request(request))?.map_err(exception)
    }
}

#[pymethods]
impl PoolClient {
    /// Dials the daemon's unix socket, proves the session key both ways, maps the arena.
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "the arguments of the Python method")]
    #[pyo3(signature = (socket, session_key, incarnation, strips, strip_bytes, namespace = 0, timeout = 5.0))]
    fn connect(
        py: Python<'_>,
        socket: PathBuf,
        session_key: Readable,
        incarnation: u64,
        strips: u32,
        strip_bytes: u32,
        namespace: u64,
        timeout: f64,
    ) -> PyResult<Self> {
        let key = self::session_key(session_key.bytes()).map_err(exception)?.unwrap_or_else(open_key);
        let layout = Layout { strips, strip_bytes };
        let timeout = seconds(timeout)?;
        py.detach(|| client::PoolClient::connect(&socket, key, incarnation, layout, namespace, timeout))
            .map(Self::new)
            .map_err(exception)
    }

    #[getter]
    fn node(&self) -> NodeAddress {
        self.node.clone()
    }

    #[getter]
    fn slots(&self) -> u32 {
        self.slots
    }

    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.living.with(py, |client| client.descriptor().as_raw_fd())
    }

    fn events<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let events = self.living.with(py, client::PoolClient::events)?;
        events.into_iter().filter_map(|event| convert(py, event).transpose()).collect()
    }

    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<bool> {
        let timeout = seconds(timeout)?;
        self.living.with(py, |client| client.wait(timeout))
    }

    #[expect(clippy::too_many_arguments, reason = "the arguments of the Python method")]
    #[pyo3(signature = (tag, keys, private, parent, position, mode, tenant = 0))]
    fn grant(
        &self,
        py: Python<'_>,
        tag: &Tag,
        keys: Readable,
        private: bool,
        parent: Readable,
        position: u32,
        mode: &str,
        tenant: u64,
    ) -> PyResult<()> {
        let request = LocalRequest::Grant {
            tag: tag.0,
            keys: keys.keys()?,
            private: private.into(),
            parent: BlockKey(parent.exactly("parent")?),
            position,
            mode: grant_mode(mode)?,
            tenant,
        };
        self.request(py, request)
    }

    fn lookup(&self, py: Python<'_>, tag: &Tag, keys: Readable) -> PyResult<()> {
        self.request(py, LocalRequest::Lookup { tag: tag.0, keys: keys.keys()? })
    }

    fn commit(&self, py: Python<'_>, tag: &Tag, indices: Vec<u32>) -> PyResult<()> {
        self.request(py, LocalRequest::Commit { tag: tag.0, indices })
    }

    fn fetch(
        &self,
        py: Python<'_>,
        tag: &Tag,
        indices: Vec<u32>,
        sources: Vec<PyRef<'_, NodeAddress>>,
    ) -> PyResult<()> {
        let from = sources.into_iter().map(|source| source.0.clone()).collect();
        self.request(py, LocalRequest::Fetch { tag: tag.0, indices, from })
    }

    fn prefetch(
        &self,
        py: Python<'_>,
        keys: Readable,
        parent: Readable,
        position: u32,
        sources: Vec<PyRef<'_, NodeAddress>>,
    ) -> PyResult<()> {
        let parent = BlockKey(parent.exactly("parent")?);
        let from = sources.into_iter().map(|source| source.0.clone()).collect();
        self.request(py, LocalRequest::Prefetch { keys: keys.keys()?, parent, position, from })
    }

    fn open(&self, py: Python<'_>, tag: &Tag, to: &NodeAddress, within: f64) -> PyResult<()> {
        let within_ms = u64::try_from(seconds(within)?.as_millis()).unwrap_or(u64::MAX);
        self.request(py, LocalRequest::Open { tag: tag.0, to: to.0.clone(), within_ms })
    }

    #[expect(clippy::too_many_arguments, reason = "the arguments of the Python method")]
    #[pyo3(signature = (local, tag, indices, first = 0, note = None, strips = None))]
    fn push(
        &self,
        py: Python<'_>,
        local: &Tag,
        tag: &Tag,
        indices: Vec<u32>,
        first: u32,
        note: Option<Readable>,
        strips: Option<(u32, u32)>,
    ) -> PyResult<()> {
        let note = note.map(|note| note.bytes().to_vec());
        self.request(py, LocalRequest::Push { local: local.0, tag: tag.0, indices, first, strips, note })
    }

    fn corrupt(&self, py: Python<'_>, tag: &Tag, index: u32) -> PyResult<()> {
        self.request(py, LocalRequest::Corrupt { tag: tag.0, index })
    }

    fn end(&self, py: Python<'_>, tag: &Tag) -> PyResult<()> {
        self.request(py, LocalRequest::End { tag: tag.0 })
    }

    fn request_counters(&self, py: Python<'_>) -> PyResult<()> {
        self.request(py, LocalRequest::Counters { ticket: 0 })
    }

    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        self.request(py, LocalRequest::Flush { ticket: 0 })
    }

    fn keep(&self, py: Python<'_>, keys: Readable, ttl: f64, by: String) -> PyResult<()> {
        let (keys, ttl_ms) = (keys.keys()?, keep_time(ttl, &by)?);
        self.request(py, LocalRequest::Keep { ticket: 0, keys, ttl_ms, by })
    }

    fn unkeep(&self, py: Python<'_>, keys: Readable, by: String) -> PyResult<()> {
        self.request(py, LocalRequest::Unkeep { ticket: 0, keys: keys.keys()?, by })
    }

    #[expect(clippy::too_many_arguments, reason = "the arguments of the Python method")]
    #[pyo3(signature = (slot, generation, source, first_strip = 0, run = 1, stride = 1))]
    fn store(
        &self,
        py: Python<'_>,
        slot: u32,
        generation: u32,
        source: Readable,
        first_strip: u32,
        run: u32,
        stride: u32,
    ) -> PyResult<()> {
        let (slot, runs, bytes) =
            (SlotRef { slot, generation }, Runs { first: first_strip, run, stride }, source.bytes());
        self.living.with(py, |client| client.store(slot, runs, bytes))?.map_err(exception)
    }

    #[expect(clippy::too_many_arguments, reason = "the arguments of the Python method")]
    #[pyo3(signature = (slot, generation, into, first_strip = 0, run = 1, stride = 1))]
    fn load(
        &self,
        py: Python<'_>,
        slot: u32,
        generation: u32,
        mut into: Writable,
        first_strip: u32,
        run: u32,
        stride: u32,
    ) -> PyResult<bool> {
        let (slot, runs, bytes) =
            (SlotRef { slot, generation }, Runs { first: first_strip, run, stride }, into.bytes());
        self.living.with(py, |client| client.load(slot, runs, bytes))?.map_err(exception)
    }

    fn share(&self, py: Python<'_>) -> PyResult<(Vec<RawFd>, u64, u32)> {
        let shared = self.living.with(py, |client| {
            let (arena, socket) = client.share()?;
            let descriptors = [Some(arena), socket].into_iter().flatten().map(IntoRawFd::into_raw_fd).collect();
            Ok((descriptors, client.arena().bytes(), client.arena().slots()))
        })?;
        shared.map_err(exception)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.living.close(py)
    }
}

/// A pool's slots as another process of the same worker writes and reads them.
#[pyclass(frozen, module = "pyengine._native")]
pub struct SharedSlots {
    living: Living<(Arc<Arena>, Option<OwnedFd>)>,
}

#[pymethods]
impl SharedSlots {
    #[new]
    fn new(descriptors: Vec<RawFd>, arena_bytes: u64, slots: u32, strips: u32, strip_bytes: u32) -> PyResult<Self> {
        let [arena, rest @ ..] = &descriptors[..] else { return Err(bug("there is no descriptor")) };
        if rest.len() > 1 || descriptors.iter().any(|&descriptor| descriptor < 0) {
            return Err(bug(format!("{descriptors:?} are not what `share` has returned")));
        }
        // SAFETY: the stub says that they are the caller's own, and given away by this call.
        let owned = |descriptor: RawFd| unsafe { OwnedFd::from_raw_fd(descriptor) };
        let (arena, socket) = (owned(*arena), rest.first().copied().map(owned));
        let arena = Arena::open(arena, arena_bytes, slots, Layout { strips, strip_bytes }).map_err(exception)?;
        Ok(Self { living: Living::new((arena, socket)) })
    }

    #[expect(clippy::too_many_arguments, reason = "the arguments of the Python method")]
    #[pyo3(signature = (slot, generation, source, first_strip = 0, run = 1, stride = 1))]
    fn store(
        &self,
        py: Python<'_>,
        slot: u32,
        generation: u32,
        source: Readable,
        first_strip: u32,
        run: u32,
        stride: u32,
    ) -> PyResult<()> {
        let (slot, runs, bytes) =
            (SlotRef { slot, generation }, Runs { first: first_strip, run, stride }, source.bytes());
        self.living.with(py, |(arena, _)| arena.store_runs(slot, runs, bytes))?.map_err(exception)
    }

    #[expect(clippy::too_many_arguments, reason = "the arguments of the Python method")]
    #[pyo3(signature = (slot, generation, into, first_strip = 0, run = 1, stride = 1))]
    fn load(
        &self,
        py: Python<'_>,
        slot: u32,
        generation: u32,
        mut into: Writable,
        first_strip: u32,
        run: u32,
        stride: u32,
    ) -> PyResult<bool> {
        let (slot, runs, bytes) =
            (SlotRef { slot, generation }, Runs { first: first_strip, run, stride }, into.bytes());
        self.living.with(py, |(arena, _)| arena.load_runs(slot, runs, bytes))?.map_err(exception)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.living.close(py)
    }
}

/// For how long blocks are kept, in milliseconds, and the name that is said is one.
pub fn keep_time(ttl: f64, by: &str) -> PyResult<u64> {
    keep::time(seconds(ttl)?, by).map_err(exception)
}

pub fn keeping(outcome: Keeping) -> &'static str {
    match outcome {
        Keeping::Done => "done",
        Keeping::Coming => "coming",
        Keeping::Missing => "missing",
        Keeping::Full => "full",
    }
}

/// Where a fetched block came from, as Python spells it.
fn origin(found: Found) -> &'static str {
    match (found.peer, found.medium) {
        (false, Medium::Dram) => "dram",
        (false, Medium::Ssd) => "ssd",
        (true, Medium::Dram) => "peer_dram",
        (true, Medium::Ssd) => "peer_ssd",
    }
}

fn grant_mode(name: &str) -> PyResult<GrantMode> {
    match name {
        "wait" => Ok(GrantMode::Wait),
        "now" => Ok(GrantMode::Now),
        "staging" => Ok(GrantMode::Staging),
        _ => Err(bug(format!("a grant's mode is \"wait\", \"now\" or \"staging\", not {name:?}"))),
    }
}

/// An event as an object; `None` for what the client has already used itself.
fn convert<'py>(py: Python<'py>, event: ClientEvent) -> PyResult<Option<Bound<'py, PyAny>>> {
    let list = |slots: Vec<GrantedSlot>| -> PyResult<Py<PyList>> {
        Ok(PyList::new(py, slots.into_iter().map(Slot))?.unbind())
    };
    let numbers = |indices: Vec<u32>| -> PyResult<Py<PyList>> { Ok(PyList::new(py, indices)?.unbind()) };
    let event = match event {
        ClientEvent::Arena(_) => return Ok(None),
        ClientEvent::Disconnected(reason) => Bound::new(py, Disconnected { reason })?.into_any(),
        ClientEvent::Event(event) => match event {
            LocalEvent::Attached { .. } | LocalEvent::AttachRefused { .. } | LocalEvent::Objects(_) => return Ok(None),
            LocalEvent::Granted { tag, slots } => {
                Bound::new(py, Granted { tag: Tag(tag), slots: list(slots)? })?.into_any()
            }
            LocalEvent::Located { tag, slots, behind } => {
                let slots = slots.into_iter().map(|slot| GrantedSlot { slot, committed: true }).collect();
                Bound::new(py, Located { tag: Tag(tag), slots: list(slots)?, behind })?.into_any()
            }
            LocalEvent::Refused { tag, refusal } => {
                Bound::new(py, Refused { tag: Tag(tag), refusal: refusal_name(refusal) })?.into_any()
            }
            LocalEvent::Opened { tag, committed, slots } => {
                let committed = PyList::new(py, committed)?.unbind();
                Bound::new(py, Opened { tag: Tag(tag), committed, slots: list(slots)? })?.into_any()
            }
            LocalEvent::Arrived { tag, indices } => {
                Bound::new(py, Arrived { tag: Tag(tag), indices: numbers(indices)? })?.into_any()
            }
            LocalEvent::Complete { tag, note } => {
                Bound::new(py, Complete { tag: Tag(tag), note: PyBytes::new(py, &note).unbind() })?.into_any()
            }
            LocalEvent::Fetched { tag, index, found } => {
                let slot = found.ok().map(|found| Slot(GrantedSlot { slot: found.slot, committed: true }));
                let (origin, refusal) = (found.ok().map(origin), found.err().map(refusal_name));
                Bound::new(py, Fetched { tag: Tag(tag), index, refusal, slot, origin })?.into_any()
            }
            LocalEvent::Pushed { tag, indices, note } => {
                Bound::new(py, Pushed { tag: Tag(tag), indices: numbers(indices)?, note })?.into_any()
            }
            LocalEvent::Counters { values, .. } => {
                Bound::new(py, Counters { values: counters(py, values)?.unbind() })?.into_any()
            }
            LocalEvent::Kept { outcomes, .. } => {
                let outcomes = outcomes.into_iter().map(keeping).collect();
                Bound::new(py, Kept { outcomes })?.into_any()
            }
            LocalEvent::Flushed { ok, .. } => Bound::new(py, Flushed { ok })?.into_any(),
        },
    };
    Ok(Some(event))
}

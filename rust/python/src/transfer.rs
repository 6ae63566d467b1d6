//! The transfer engine: `Endpoint`, its regions, peers, lists of copies and transfers.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd};
use std::os::raw::c_int;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyInt, PyList, PyMemoryView, PyTuple};
use transfer::config::{encrypts, session_key};
use transfer::endpoint::{self, Copies as CopyList, How, KINDS, RegionHandle, Registration, Settings};
use transfer::mailbox::Mailbox;
use transfer::mover::{Ended, Failure, Priority, Via};
use transfer::region::{Access, Buffer};
use transfer::transport::{Kind, Op, Path};

use crate::buffers::Readable;
use crate::errors::{bug, exception};
use crate::values::{Living, NodeAddress, counters, seconds};

/// How long a wait goes on between two looks at signals, so that Ctrl-C ends it.
const SLICE: Duration = Duration::from_millis(100);
/// A wait without a limit: 30 years.
const LONG: Duration = Duration::from_secs(1 << 30);

/// The transfer engine of this process.
/// How long `submit` itself waits for a transfer that its caller waits for: any longer, and a signal must be heard.
const ATTEND: Duration = Duration::from_millis(5);

#[pyclass(frozen, module = "pyengine._native")]
pub struct Endpoint {
    living: Living<endpoint::Endpoint>,
    address: NodeAddress,
    transports: Vec<&'static str>,
    kept: Kept,
}

/// Regions by their number: they stay registered until `unregister` or `close`, whether or not the caller keeps them.
type Kept = Arc<Mutex<HashMap<u32, Py<Region>>>>;

#[pymethods]
impl Endpoint {
    #[new]
    #[pyo3(signature = (*, session_key, node = None, listen = None, advertise = None, transports = None, checksums = true,
                        inbox = 1024, tls = false))]
    #[expect(clippy::too_many_arguments, reason = "the arguments of the Python method")]
    fn new(
        py: Python<'_>,
        session_key: Readable,
        node: Option<String>,
        listen: Option<String>,
        advertise: Option<String>,
        transports: Option<Vec<String>>,
        checksums: bool,
        inbox: usize,
        tls: bool,
    ) -> PyResult<Self> {
        let key = self::session_key(session_key.bytes()).map_err(exception)?;
        let given = transports.is_some();
        let transports = match transports {
            None => KINDS.to_vec(),
            Some(names) => names.iter().map(|name| kind(name)).collect::<PyResult<Vec<Kind>>>()?,
        };
        if given && tls && transports.contains(&Kind::Rdma) {
            encrypts(Via::Only(Kind::Rdma)).map_err(exception)?;
        }
        let settings = Settings { node, key, listen, advertise, tls, transports, checksums, inbox, lanes: None };
        let endpoint = py.detach(|| endpoint::Endpoint::start(settings)).map_err(exception)?;
        let address = NodeAddress(endpoint.address().clone());
        let transports = endpoint.kinds().iter().map(|kind| kind.name()).collect();
        Ok(Self { living: Living::new(endpoint), address, transports, kept: Kept::default() })
    }

    #[getter]
    fn address(&self) -> NodeAddress {
        self.address.clone()
    }

    #[getter]
    fn transports(&self) -> Vec<&'static str> {
        self.transports.clone()
    }

    #[pyo3(signature = (memory, *, read = true, write = true, name = None))]
    fn register(
        &self,
        py: Python<'_>,
        memory: &Bound<'_, PyAny>,
        read: bool,
        write: bool,
        name: Option<String>,
    ) -> PyResult<Py<Region>> {
        release_exports();
        let access = Access { read, write };
        let (buffer, export, writable) = if memory.is_instance_of::<PyTuple>() {
            let (pointer, length): (usize, u64) = memory.extract()?;
            let Some(pointer) = NonNull::new(pointer as *mut u8) else { return Err(bug("a pointer of 0")) };
            if usize::try_from(length).ok().and_then(|length| pointer.addr().get().checked_add(length)).is_none() {
                return Err(bug(format!("{length} bytes from there are more than the machine's addresses")));
            }
            // SAFETY: the stub's contract: the caller keeps the memory mapped and writable until it is unregistered.
            (unsafe { Buffer::new(pointer, length, access, Box::new(())) }, None, true)
        } else {
            let exported = PyUntypedBuffer::get(memory)?;
            if !exported.is_c_contiguous() {
                return Err(bug("the buffer is not contiguous: copy it first"));
            }
            let writable = !exported.readonly();
            if write && !writable {
                return Err(bug("the buffer is read-only: register it with write=False, or give one that is not"));
            }
            let length = exported.len_bytes();
            let pointer = NonNull::new(exported.buf_ptr().cast()).unwrap_or(NonNull::dangling());
            let export = Arc::new(Export(Mutex::new(Some(exported))));
            // SAFETY: the exporter keeps `length` contiguous bytes there until the export is released, which happens
            // when the region is quiet (`Region::unregister`) or its last hold is gone (`Export::drop`), not before.
            // Nobody writes a read-only one: peers are not permitted to, and own reads into it are refused.
            let buffer = unsafe { Buffer::new(pointer, length as u64, access, Box::new(export.clone())) };
            (buffer, Some(export), writable)
        };
        let registered = self.living.with(py, |endpoint| {
            if writable {
                endpoint.register(buffer, name.as_deref())
            } else {
                endpoint.register_source(buffer, name.as_deref())
            }
        })?;
        self.keep(py, Region::new(registered.map_err(exception)?, export, name, &self.kept))
    }

    #[pyo3(signature = (length, *, read = true, write = true, name = None))]
    fn allocate(
        &self,
        py: Python<'_>,
        length: usize,
        read: bool,
        write: bool,
        name: Option<String>,
    ) -> PyResult<Py<Region>> {
        release_exports();
        let access = Access { read, write };
        let registered = self.living.with(py, |endpoint| endpoint.allocate(length, access, name.as_deref()))?;
        let mut region = Region::new(registered.map_err(exception)?, None, name, &self.kept);
        region.own = true;
        self.keep(py, region)
    }

    #[pyo3(signature = (address, *, transport = None, timeout = 10.0))]
    fn connect(&self, py: Python<'_>, address: &str, transport: Option<&str>, timeout: f64) -> PyResult<Peer> {
        let via = transport.map_or(Ok(Via::Auto), |name| kind(name).map(Via::Only))?;
        let timeout = seconds(timeout)?;
        let peer = self.living.with(py, |endpoint| endpoint.connect(address, via, timeout))?.map_err(exception)?;
        Ok(Peer { living: Living::new(peer) })
    }

    #[pyo3(signature = (peer, op, copies, *, priority = "normal", deadline = None, retries = None, notify = None, wait = 0.0, attend = false))]
    #[expect(clippy::too_many_arguments, reason = "the arguments of the Python method")]
    fn submit(
        &self,
        py: Python<'_>,
        peer: &Peer,
        op: &str,
        copies: &Copies,
        priority: &str,
        deadline: Option<f64>,
        retries: Option<u32>,
        notify: Option<Readable>,
        wait: f64,
        attend: bool,
    ) -> PyResult<Transfer> {
        let op = match op {
            "write" => Op::Write,
            "read" => Op::Read,
            _ => return Err(bug(format!("an operation is \"write\" or \"read\", not {op:?}"))),
        };
        let priority = match priority {
            "urgent" => Priority::Urgent,
            "normal" => Priority::Normal,
            "background" => Priority::Background,
            _ => return Err(bug(format!("a priority is \"urgent\", \"normal\" or \"background\", not {priority:?}"))),
        };
        let mut how = How { priority, wait: seconds(wait)?, ..How::default() };
        how.deadline = deadline.map(seconds).transpose()?;
        how.retries = retries.unwrap_or(how.retries);
        how.notify = notify.map(|notify| notify.bytes().to_vec());
        let (endpoint, peer) = (&self.living, &peer.living);
        let transfer = peer.with(py, |peer| {
            endpoint.inside(|endpoint| match attend {
                true => endpoint.run(peer, op, &copies.0, how, ATTEND),
                false => endpoint.submit(peer, op, &copies.0, how),
            })
        })??;
        Ok(Transfer { living: Living::new(transfer.map_err(exception)?) })
    }

    fn notifications(&self, py: Python<'_>, at_most: usize) -> PyResult<Vec<Notification>> {
        let taken = self.living.with(py, |endpoint| endpoint.notifications(at_most))?;
        let convert = |item: endpoint::Notification| Notification {
            node: item.from.node,
            incarnation: item.from.incarnation,
            payload: PyBytes::new(py, &item.payload).unbind(),
        };
        Ok(taken.into_iter().map(convert).collect())
    }

    fn wait_notification(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        patiently(py, timeout, |slice| self.living.with(py, |endpoint| endpoint.wait_notification(slice)))
    }

    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.living.with(py, |endpoint| endpoint.descriptor().as_raw_fd())
    }

    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        counters(py, self.living.with(py, endpoint::Endpoint::samples)?)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        // First what wakes the waiters, then, when they have gone, the object itself.
        let _ = self.living.with(py, endpoint::Endpoint::close);
        self.living.close(py)?;
        let regions = std::mem::take(&mut *lock(&self.kept));
        drop(regions);
        release_exports();
        Ok(())
    }
}

impl Endpoint {
    fn keep(&self, py: Python<'_>, region: Region) -> PyResult<Py<Region>> {
        let number = region.handle.region.0;
        let region = Py::new(py, region)?;
        lock(&self.kept).insert(number, region.clone_ref(py));
        Ok(region)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Single inserts and removes cannot be left half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// -- memory ----------------------------------------------------------------------------------------------------------

/// A buffer's export: the exporter may not move or free it meanwhile.
struct Export(Mutex<Option<PyUntypedBuffer>>);

/// Exports whose last user was not a Python thread. They are released when one comes by: an I/O thread must not wait
/// for the GIL.
static EXPORTS: Mutex<Vec<PyUntypedBuffer>> = Mutex::new(Vec::new());

impl Drop for Export {
    fn drop(&mut self) {
        if let Some(export) = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            lock(&EXPORTS).push(export);
        }
    }
}

fn release_exports() {
    let exports = std::mem::take(&mut *lock(&EXPORTS));
    // Releasing may run Python code, so not under the lock.
    drop(exports);
}

/// Registered memory.
#[pyclass(frozen, module = "pyengine._native")]
pub struct Region {
    living: Living<Registration>,
    handle: RegionHandle,
    export: Option<Arc<Export>>,
    name: Option<String>,
    /// The engine's own memory, which Python sees as a buffer.
    own: bool,
    kept: Weak<Mutex<HashMap<u32, Py<Region>>>>,
}

impl Region {
    fn new(registration: Registration, export: Option<Arc<Export>>, name: Option<String>, kept: &Kept) -> Self {
        let (handle, kept) = (registration.handle().clone(), Arc::downgrade(kept));
        Self { living: Living::new(registration), handle, export, name, own: false, kept }
    }

    fn release(&self) {
        if let Some(export) = &self.export {
            let export = lock(&export.0).take();
            drop(export);
        }
        release_exports();
    }
}

#[pymethods]
impl Region {
    #[getter]
    fn handle<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.handle.to_bytes())
    }

    #[getter]
    fn memory<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(slf)
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.handle.bytes
    }

    #[getter]
    fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    #[getter]
    fn registered(&self, py: Python<'_>) -> PyResult<bool> {
        self.living.with(py, |registration| !registration.is_fenced())
    }

    #[pyo3(signature = (timeout = 10.0))]
    fn unregister(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = seconds(timeout)?;
        self.living.with(py, |registration| registration.unregister(timeout))?.map_err(exception)?;
        self.release();
        let kept = self.kept.upgrade().and_then(|kept| lock(&kept).remove(&self.handle.region.0));
        drop(kept);
        Ok(())
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.unregister(py, 10.0)
    }

    fn __repr__(&self) -> String {
        let name = self.name.as_ref().map_or(String::new(), |name| format!(", name={name:?}"));
        format!("<Region {} of {}: {} bytes{name}>", self.handle.region.0, self.handle.node, self.handle.bytes)
    }

    /// # Safety
    /// As CPython calls it.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut pyo3::ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let this = slf.get();
        if !this.own {
            return Err(PyBufferError::new_err("only memory that the engine has allocated is a buffer: use your own"));
        }
        let (pointer, length) = this.living.inside(|registration| {
            let buffer = registration.buffer();
            (buffer.pointer(), buffer.bytes())
        })?;
        // SAFETY: `view` is CPython's to fill. The memory lives as long as the registration, which the region keeps
        // (also when it is unregistered) and the view keeps the region.
        let result = unsafe {
            pyo3::ffi::PyBuffer_FillInfo(view, slf.as_ptr(), pointer.as_ptr().cast(), length as isize, 0, flags)
        };
        if result == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

impl Drop for Region {
    /// The engine is closed, or the region unregistered: its export is released now if nobody touches it, else when the
    /// last one lets go.
    fn drop(&mut self) {
        let quiet = self.living.inside(|registration| {
            registration.fence();
            registration.is_quiet()
        });
        if matches!(quiet, Ok(true)) {
            self.release();
        }
    }
}

/// A peer's region.
#[pyclass(frozen, module = "pyengine._native")]
pub struct RemoteRegion(Arc<RegionHandle>);

#[pymethods]
impl RemoteRegion {
    #[new]
    fn new(handle: Readable) -> PyResult<Self> {
        RegionHandle::from_bytes(handle.bytes()).map(|handle| Self(Arc::new(handle))).map_err(exception)
    }

    #[getter]
    fn handle<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.to_bytes())
    }

    #[getter]
    fn node(&self) -> &str {
        &self.0.node
    }

    #[getter]
    fn incarnation(&self) -> u64 {
        self.0.incarnation
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.bytes
    }

    #[getter]
    fn readable(&self) -> bool {
        self.0.access.read
    }

    #[getter]
    fn writable(&self) -> bool {
        self.0.access.write
    }

    fn __repr__(&self) -> String {
        format!("<RemoteRegion {} of {}: {} bytes>", self.0.region.0, self.0.node, self.0.bytes)
    }
}

// -- copies ----------------------------------------------------------------------------------------------------------

/// A list of copies, checked, to be submitted as often as one likes.
#[pyclass(frozen, module = "pyengine._native")]
pub struct Copies(CopyList);

#[pymethods]
impl Copies {
    /// Each entry is (region, offset, remote region, offset, length); each number may be an array of them instead.
    #[new]
    fn new(copies: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut list = CopyList::build();
        for entry in copies.try_iter()? {
            let entry = entry?;
            let (local, local_offset, remote, remote_offset, length) = entry
                .extract::<(Bound<'_, Region>, Bound<'_, PyAny>, Bound<'_, RemoteRegion>, Bound<'_, PyAny>, Bound<'_, PyAny>)>()
                .map_err(|error| {
                    bug(format!("a copy is (Region, offset, RemoteRegion, offset, length), not {entry:?}: {error}"))
                })?;
            let remote = remote.get().0.clone();
            let numbers = [Numbers::of(&local_offset)?, Numbers::of(&remote_offset)?, Numbers::of(&length)?];
            let count = numbers.iter().find_map(Numbers::count);
            if numbers.iter().filter_map(Numbers::count).any(|other| Some(other) != count) {
                return Err(bug("arrays of offsets and lengths of different lengths"));
            }
            local
                .get()
                .living
                .inside(|local| {
                    (0..count.unwrap_or(1)).try_for_each(|index| {
                        let [local_offset, remote_offset, length] = [0, 1, 2].map(|which| numbers[which].at(index));
                        list.add(local, local_offset?, &remote, remote_offset?, length?)
                    })
                })?
                .map_err(exception)?;
        }
        Ok(Self(list.finish()))
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.bytes()
    }

    fn __repr__(&self) -> String {
        format!("<{} copies of {} bytes>", self.0.len(), self.0.bytes())
    }
}

/// One number for all copies of an entry, or one each.
enum Numbers {
    One(u64),
    Each(Readable, bool),
}

impl Numbers {
    fn of(value: &Bound<'_, PyAny>) -> PyResult<Self> {
        if value.is_instance_of::<PyInt>() {
            return value
                .extract()
                .map(Self::One)
                .map_err(|_| bug(format!("offsets and lengths are between 0 and 2**64, not {value}")));
        }
        if let Ok(index) = value.call_method0("__index__") {
            return Self::of(&index);
        }
        let array = PyUntypedBuffer::get(value)
            .map_err(|_| bug(format!("offsets and lengths are integers or arrays of them, not {value:?}")))?;
        let format = array.format().to_bytes();
        let signed = match format.strip_prefix(b"<").or(format.strip_prefix(b"=")).unwrap_or(format) {
            b"q" | b"l" => true,
            b"Q" | b"L" => false,
            _ => return Err(bug("arrays of offsets and lengths hold int64 or uint64: use astype(\"uint64\")")),
        };
        if array.item_size() != 8 {
            return Err(bug("arrays of offsets and lengths hold int64 or uint64: use astype(\"uint64\")"));
        }
        Ok(Self::Each(value.extract()?, signed))
    }

    fn count(&self) -> Option<usize> {
        match self {
            Self::One(_) => None,
            Self::Each(array, _) => Some(array.bytes().len() / 8),
        }
    }

    fn at(&self, index: usize) -> Result<u64, transfer::error::Error> {
        match self {
            Self::One(number) => Ok(*number),
            Self::Each(array, signed) => {
                let number = array.bytes().as_chunks().0.get(index).map_or(0, |bytes| u64::from_le_bytes(*bytes));
                if *signed && number >> 63 != 0 {
                    return Err(transfer::error::Error::bug(format!("offset or length {index} is negative")));
                }
                Ok(number)
            }
        }
    }
}

// -- peers -----------------------------------------------------------------------------------------------------------

/// A connection to another engine.
#[pyclass(frozen, module = "pyengine._native")]
pub struct Peer {
    living: Living<endpoint::Peer>,
}

#[pymethods]
impl Peer {
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<NodeAddress> {
        self.living.with(py, |peer| NodeAddress(peer.address()))
    }

    /// (transport, "up" | "connecting" | "down" | "none", why, taken), the preferred first.
    fn paths(&self, py: Python<'_>) -> PyResult<Vec<(&'static str, &'static str, String, bool)>> {
        let paths = self.living.with(py, endpoint::Peer::paths)?;
        let convert = |report: transfer::mover::PathReport| {
            let (state, why) = match report.path {
                Path::Up => ("up", String::new()),
                Path::Connecting => ("connecting", String::new()),
                Path::Down(why) => ("down", why),
                Path::None => ("none", String::new()),
            };
            (report.kind.name(), state, why, report.taken)
        };
        Ok(paths.into_iter().map(convert).collect())
    }

    /// Why its engine does not answer; `None` if it does.
    fn down(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.living.with(py, |peer| peer.down().map(|error| error.message))
    }

    #[pyo3(signature = (name, timeout = 10.0))]
    fn find(&self, py: Python<'_>, name: &str, timeout: f64) -> PyResult<RemoteRegion> {
        let timeout = seconds(timeout)?;
        let found = self.living.with(py, |peer| peer.find(name, timeout))?.map_err(exception)?;
        Ok(RemoteRegion(Arc::new(found)))
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.living.with(py, endpoint::Peer::close)
    }
}

/// A few bytes that a peer has sent.
#[pyclass(frozen, get_all, module = "pyengine._native")]
pub struct Notification {
    node: String,
    incarnation: u64,
    payload: Py<PyBytes>,
}

#[pymethods]
impl Notification {
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("<Notification of {}: {}>", self.node, self.payload.bind(py).repr()?))
    }
}

// -- transfers -------------------------------------------------------------------------------------------------------

/// A transfer that was submitted.
#[pyclass(frozen, module = "pyengine._native")]
pub struct Transfer {
    living: Living<endpoint::Transfer>,
}

#[pymethods]
impl Transfer {
    #[getter]
    fn number(&self, py: Python<'_>) -> PyResult<u64> {
        self.living.with(py, endpoint::Transfer::number)
    }

    /// True if it has ended.
    #[getter]
    fn done(&self) -> PyResult<bool> {
        self.living.inside(endpoint::Transfer::is_over)
    }

    /// Waits for its end, however it ends: false if the time was over before.
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        patiently(py, timeout, |slice| self.living.with(py, |transfer| transfer.wait(slice)))
    }

    /// Raises what went wrong, if something did.
    fn result(&self) -> PyResult<()> {
        self.living.inside(endpoint::Transfer::result)?.map_err(exception)
    }

    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        self.living.with(py, endpoint::Transfer::cancel)
    }

    /// (bytes done, all its bytes).
    fn progress(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let progress = self.living.with(py, endpoint::Transfer::progress)?;
        Ok((progress.bytes_done, progress.bytes))
    }

    /// (outcome, transport, fell back, retries).
    fn outcome(&self) -> PyResult<(&'static str, Option<&'static str>, bool, u32)> {
        Ok(match self.living.inside(endpoint::Transfer::outcome)? {
            None => ("pending", None, false, 0),
            Some(Ended::Done { via, fallback, retries }) => ("done", Some(via.name()), fallback, retries),
            Some(Ended::Cancelled) => ("cancelled", None, false, 0),
            Some(Ended::DeadlinePassed) => ("deadline", None, false, 0),
            Some(Ended::Failed { why, .. }) => {
                let name = match why {
                    Failure::Fenced => "fenced",
                    Failure::Denied => "denied",
                    Failure::Corrupt => "corrupt",
                    Failure::Unreachable => "unreachable",
                };
                (name, None, false, 0)
            }
        })
    }

    /// Puts `token` into the watcher when it has ended.
    fn watch(&self, py: Python<'_>, watcher: &Watcher, token: u64) -> PyResult<()> {
        let mailbox = watcher.0.clone();
        self.living.with(py, |transfer| transfer.then(move || mailbox.push_always(token)))
    }
}

/// Tells an event loop which transfers have ended.
#[pyclass(frozen, module = "pyengine._native")]
pub struct Watcher(Arc<Mailbox<u64>>);

#[pymethods]
impl Watcher {
    #[new]
    fn new() -> PyResult<Self> {
        // Bounded by the transfers that are watched.
        Mailbox::new(usize::MAX).map(|mailbox| Self(Arc::new(mailbox))).map_err(exception)
    }

    fn fileno(&self) -> i32 {
        self.0.as_fd().as_raw_fd()
    }

    fn take<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.0.take())
    }
}

/// Waits in slices, looking at signals between them.
fn patiently(py: Python<'_>, timeout: Option<f64>, wait: impl Fn(Duration) -> PyResult<bool>) -> PyResult<bool> {
    let timeout = timeout.map_or(Ok(LONG), seconds)?;
    let began = Instant::now();
    loop {
        let left = timeout.saturating_sub(began.elapsed());
        if wait(left.min(SLICE))? {
            return Ok(true);
        }
        py.check_signals()?;
        if left <= SLICE {
            return Ok(false);
        }
    }
}

fn kind(name: &str) -> PyResult<Kind> {
    [Kind::Shm, Kind::Rdma, Kind::Tcp]
        .into_iter()
        .find(|kind| kind.name() == name)
        .ok_or_else(|| bug(format!("a transport is \"shm\", \"rdma\" or \"tcp\", not {name:?}")))
}

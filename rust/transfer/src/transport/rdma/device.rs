//! Cards and what is made on them: the owners of libibverbs' objects.
//!
//! ```text
//! Rail (an opened port, its protection domain) <--- Registration (memory that the card knows)
//!                                              <--- Pair (queue pair, completion queue, event channel)
//! ```
//!
//! Each holds its rail, so a card is closed after all that was made on it.
//!
//! # `unsafe`
//!
//! Every call passes pointers that the library gave and that this value owns; structures that the library fills are
//! zeroed first. The library locks inside, except that one completion queue and one queue pair are each used by one
//! thread at a time here (`&mut`).

use std::ffi::{CStr, c_int};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use crate::error::Error;

use super::control::{PortAddress, QueueAddress};
use super::topology::{LinkLayer, Port};
use super::verbs::{self, Verbs, mask};

/// Work requests that a queue pair takes; more slices wait in memory of ours.
pub const DEPTH: usize = 128;
/// RDMA READs under way per queue pair, at most; cards have 16 or more.
const READS: u8 = 16;
/// A packet that is not acknowledged for 4.096 us x 2^16 = 268 ms is sent again …
const TIMEOUT: u8 = 16;
/// … six times, then the line has failed: after 1.9 s, within the 3 s of a stall. (7 would mean for ever on soft-RoCE.)
const RETRIES: u8 = 6;
/// Hops of a routed RoCE packet.
const HOPS: u8 = 64;

/// What the queue pair is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Reads and writes the other side's memory; its own cannot be touched through the queue pair.
    Initiator,
    /// Serves; issues nothing.
    Target,
}

/// An opened port.
pub struct Rail {
    verbs: &'static Verbs,
    context: NonNull<verbs::Context>,
    domain: NonNull<verbs::ProtectionDomain>,
    port: Port,
    gid_index: u8,
    gid: [u8; 16],
    reads_served: u8,
    reads_issued: u8,
    depth: usize,
}

// SAFETY: the library's calls on a context may come from any thread; nothing else is reached through the pointers.
unsafe impl Send for Rail {}
// SAFETY: as above.
unsafe impl Sync for Rail {}

impl Rail {
    /// Opens a port by the name of its device.
    ///
    /// # Errors
    /// Retry: a sentence that says what is missing.
    pub fn open(port: Port, gid_index: Option<u8>) -> Result<Self, Error> {
        let name = format!("{}/{}", port.device, port.port);
        let fail = |what: &str| Error::retry(format!("{name}: {what}"));
        let gid = port.gid(gid_index).ok_or_else(|| match gid_index {
            Some(index) => fail(&format!("its GID table has no entry {index}")),
            None => fail("its GID table is empty: give its network interface an address"),
        })?;
        let verbs = verbs::verbs().map_err(Error::retry)?;
        let context = open_device(verbs, &port.device)
            .ok_or_else(|| fail("cannot be opened: /dev/infiniband/uverbs* must exist and be writable"))?;
        // SAFETY: the context was just opened; on failure it is closed and not used again.
        let Some(domain) = NonNull::new(unsafe { (verbs.ibv_alloc_pd)(context.as_ptr()) }) else {
            let error = io::Error::last_os_error();
            // SAFETY: as above.
            unsafe { (verbs.ibv_close_device)(context.as_ptr()) };
            return Err(fail(&format!("no protection domain: {error}")));
        };
        // From here on the drop cleans up.
        let mut rail = Self {
            verbs,
            context,
            domain,
            port,
            gid_index: gid.index,
            gid: gid.gid,
            reads_served: READS,
            reads_issued: READS,
            depth: DEPTH,
        };
        // SAFETY: plain numbers, for which zero is valid.
        let mut limits: verbs::DeviceAttributes = unsafe { std::mem::zeroed() };
        // SAFETY: an open context, and a structure of the size that the library expects.
        if unsafe { (verbs.ibv_query_device)(rail.context.as_ptr(), &raw mut limits) } != 0 {
            return Err(Error::retry(format!("{}: cannot be asked for its limits", rail.name())));
        }
        let at_most = |limit: c_int, ours: u8| ours.min(u8::try_from(limit.max(1)).unwrap_or(u8::MAX));
        rail.reads_served = at_most(limits.max_qp_rd_atom, READS);
        rail.reads_issued = at_most(limits.max_qp_init_rd_atom, READS);
        rail.depth = DEPTH.min(usize::try_from(limits.max_qp_wr).unwrap_or(1).max(1));
        Ok(rail)
    }

    /// For people: device and port.
    pub fn name(&self) -> String {
        format!("{}/{}", self.port.device, self.port.port)
    }

    /// As sysfs described it.
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// How peers reach it; `None` while its link is down.
    pub fn address(&self) -> Option<PortAddress> {
        let mut port = verbs::PortAttributes::default();
        // SAFETY: an open context; the library fills no more than this structure has (it knows an older, shorter one).
        let code = unsafe { (self.verbs.ibv_query_port)(self.context.as_ptr(), self.port.port, &raw mut port) };
        (code == 0 && port.state == verbs::PORT_ACTIVE).then(|| PortAddress {
            gid: self.gid,
            lid: port.lid,
            infiniband: self.port.link == LinkLayer::InfiniBand,
            mtu: port.active_mtu as u8,
            reads: self.reads_served,
        })
    }
}

impl Drop for Rail {
    fn drop(&mut self) {
        // SAFETY: both were made by the library for this value; whatever was made on them holds the rail, so is gone.
        unsafe {
            (self.verbs.ibv_dealloc_pd)(self.domain.as_ptr());
            (self.verbs.ibv_close_device)(self.context.as_ptr());
        }
    }
}

fn open_device(verbs: &Verbs, name: &str) -> Option<NonNull<verbs::Context>> {
    let mut count = 0;
    // SAFETY: the list has `count` devices and stays valid until it is freed; an opened device outlives it.
    unsafe {
        let list = (verbs.ibv_get_device_list)(&raw mut count);
        if list.is_null() {
            return None;
        }
        let devices = std::slice::from_raw_parts(list, usize::try_from(count).unwrap_or(0));
        let device = devices
            .iter()
            .find(|device| CStr::from_ptr((verbs.ibv_get_device_name)(**device)).to_str() == Ok(name))
            .and_then(|device| NonNull::new((verbs.ibv_open_device)(*device)));
        (verbs.ibv_free_device_list)(list);
        device
    }
}

/// Memory that a card knows.
pub struct Registration {
    rail: Arc<Rail>,
    region: NonNull<verbs::MemoryRegion>,
    /// Opens it to work requests of this side.
    pub local_key: u32,
    /// Opens it to the other side.
    pub remote_key: u32,
}

// SAFETY: the pointer is used once more, at the end; the library allows any thread for it.
unsafe impl Send for Registration {}
// SAFETY: shared values only have their keys read.
unsafe impl Sync for Registration {}

impl Registration {
    /// Makes `bytes` from `address` on known to a card, which pins them.
    ///
    /// # Errors
    /// Retry: the kernel does not pin so much.
    ///
    /// # Safety
    /// The memory stays mapped as long as the value lives.
    pub unsafe fn new(rail: &Arc<Rail>, address: NonNull<u8>, bytes: usize, access: c_int) -> Result<Self, Error> {
        // SAFETY: a live domain; the caller promises the memory.
        let region = unsafe { (rail.verbs.ibv_reg_mr)(rail.domain.as_ptr(), address.as_ptr().cast(), bytes, access) };
        let Some(region) = NonNull::new(region) else {
            let error = io::Error::last_os_error();
            let advice = match error.raw_os_error() {
                Some(code) if code == nix::libc::ENOMEM => ": raise the limit on locked memory (ulimit -l unlimited)",
                _ => "",
            };
            return Err(Error::retry(format!("{} cannot pin {bytes} bytes: {error}{advice}", rail.name())));
        };
        // SAFETY: the library has just made it.
        let (local_key, remote_key) = unsafe { (region.as_ref().lkey, region.as_ref().rkey) };
        Ok(Self { rail: rail.clone(), region, local_key, remote_key })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: made for this value, and not used again. Afterwards the card refuses the keys.
        let code = unsafe { (self.rail.verbs.ibv_dereg_mr)(self.region.as_ptr()) };
        if code != 0 {
            tracing::error!("{}: memory stays registered: error {code}", self.rail.name());
        }
    }
}

/// One work request: a stretch of local memory and one of the other side's.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Work {
    pub write: bool,
    pub local: u64,
    pub local_key: u32,
    pub remote: u64,
    pub remote_key: u32,
    pub bytes: u32,
}

/// What has come of work requests: those up to number `.0` are done; then, perhaps, one has failed.
pub type Reaped = (Option<u64>, Option<String>);

/// A queue pair with its own completion queue.
pub struct Pair {
    rail: Arc<Rail>,
    queue: NonNull<verbs::QueuePair>,
    completions: NonNull<verbs::CompletionQueue>,
    channel: Option<NonNull<verbs::CompletionChannel>>,
    side: Side,
    packet: u32,
    /// Number that the next work request gets.
    next: u64,
    /// Scratch for chains.
    pieces: Vec<verbs::Piece>,
    chain: Vec<verbs::SendWork>,
    /// Its objects are gone.
    over: bool,
}

// SAFETY: all pointers are the library's objects of this value, used by the one thread that has it.
unsafe impl Send for Pair {}

impl Pair {
    /// Makes one that can be named to the other side, not connected. `packet` is random.
    ///
    /// # Errors
    /// Retry: the card has no more.
    pub fn new(rail: &Arc<Rail>, side: Side, packet: u32) -> Result<Self, Error> {
        let verbs = rail.verbs;
        let fail = |what: &str| Error::retry(format!("{}: {what}: {}", rail.name(), io::Error::last_os_error()));
        let channel = match side {
            // SAFETY: an open context.
            Side::Initiator => match NonNull::new(unsafe { (verbs.ibv_create_comp_channel)(rail.context.as_ptr()) }) {
                Some(channel) => Some(channel),
                None => return Err(fail("no event channel")),
            },
            Side::Target => None,
        };
        let free = |channel: Option<NonNull<verbs::CompletionChannel>>| {
            if let Some(channel) = channel {
                // SAFETY: made above, and not used again.
                unsafe { (verbs.ibv_destroy_comp_channel)(channel.as_ptr()) };
            }
        };
        let raw = channel.map_or(null_mut(), NonNull::as_ptr);
        let depth = rail.depth as c_int;
        // SAFETY: an open context, and a channel of it or null.
        let completions = unsafe { (verbs.ibv_create_cq)(rail.context.as_ptr(), depth + 8, null_mut(), raw, 0) };
        let Some(completions) = NonNull::new(completions) else {
            let error = fail("no completion queue");
            free(channel);
            return Err(error);
        };
        let mut init = verbs::QueueInit {
            qp_context: null_mut(),
            send_cq: completions.as_ptr(),
            recv_cq: completions.as_ptr(),
            srq: null_mut(),
            cap: verbs::QueueCapacity {
                max_send_wr: rail.depth as u32,
                max_recv_wr: 1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: verbs::QUEUE_RELIABLE,
            sq_sig_all: 0,
        };
        // SAFETY: a live domain and completion queue; the library changes only `cap`.
        let Some(queue) = NonNull::new(unsafe { (verbs.ibv_create_qp)(rail.domain.as_ptr(), &raw mut init) }) else {
            let error = fail("no queue pair");
            // SAFETY: made above, and not used again.
            unsafe { (verbs.ibv_destroy_cq)(completions.as_ptr()) };
            free(channel);
            return Err(error);
        };
        // From here on the drop cleans up.
        let pair = Self {
            rail: rail.clone(),
            queue,
            completions,
            channel,
            side,
            packet: packet & 0xff_ffff,
            next: 0,
            pieces: Vec::new(),
            chain: Vec::new(),
            over: false,
        };
        if let Some(channel) = channel {
            // SAFETY: the library's descriptor, open as long as the channel is.
            let fd = unsafe { BorrowedFd::borrow_raw(channel.as_ref().fd) };
            nix::fcntl::fcntl(fd, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK))
                .map_err(|errno| Error::retry(format!("{}: its event channel: {errno}", rail.name())))?;
        }
        let access = match side {
            Side::Initiator => 0,
            Side::Target => verbs::ACCESS_REMOTE_WRITE | verbs::ACCESS_REMOTE_READ,
        };
        pair.modify(
            "INIT",
            verbs::QueueAttributes {
                qp_state: verbs::STATE_INIT,
                port_num: rail.port.port,
                qp_access_flags: access as u32,
                ..Default::default()
            },
            mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::ACCESS_FLAGS,
        )?;
        Ok(pair)
    }

    /// How the other side reaches it.
    pub fn address(&self) -> QueueAddress {
        // SAFETY: the queue pair lives as long as this value.
        QueueAddress { number: unsafe { self.queue.as_ref().qp_num }, packet: self.packet }
    }

    /// The card's port that it is on.
    pub fn rail(&self) -> &Arc<Rail> {
        &self.rail
    }

    /// Connects it with the other side's.
    ///
    /// # Errors
    /// Retry: no route to there, or the link is down.
    pub fn join(&mut self, port: &PortAddress, queue: QueueAddress) -> Result<(), Error> {
        let ours =
            self.rail.address().ok_or_else(|| Error::retry(format!("{}: its link is down", self.rail.name())))?;
        if ours.infiniband != port.infiniband {
            return Err(Error::retry(format!("{}: InfiniBand at one end, Ethernet at the other", self.rail.name())));
        }
        let route = verbs::GlobalRoute {
            dgid: verbs::Gid(port.gid),
            sgid_index: self.rail.gid_index,
            hop_limit: HOPS,
            ..Default::default()
        };
        let address = verbs::AddressVector {
            grh: route,
            dlid: port.lid,
            is_global: u8::from(!port.infiniband),
            port_num: self.rail.port.port,
            ..Default::default()
        };
        // An initiator serves no reads, a target issues none; yet both fields must be set.
        let (serves, issues) = match self.side {
            Side::Initiator => (0, self.rail.reads_issued.min(port.reads)),
            Side::Target => (self.rail.reads_served, 0),
        };
        self.modify(
            "RTR",
            verbs::QueueAttributes {
                qp_state: verbs::STATE_READY_TO_RECEIVE,
                path_mtu: u32::from(ours.mtu.min(port.mtu)),
                dest_qp_num: queue.number,
                rq_psn: queue.packet & 0xff_ffff,
                max_dest_rd_atomic: serves,
                min_rnr_timer: 12,
                ah_attr: address,
                ..Default::default()
            },
            mask::STATE
                | mask::ADDRESS
                | mask::PATH_MTU
                | mask::PEER_QUEUE
                | mask::RECEIVE_PSN
                | mask::MAX_READS_SERVED
                | mask::MIN_RNR_TIMER,
        )?;
        self.modify(
            "RTS",
            verbs::QueueAttributes {
                qp_state: verbs::STATE_READY_TO_SEND,
                sq_psn: self.packet,
                timeout: TIMEOUT,
                retry_cnt: RETRIES,
                rnr_retry: RETRIES,
                max_rd_atomic: issues,
                ..Default::default()
            },
            mask::STATE | mask::TIMEOUT | mask::RETRY_COUNT | mask::RNR_RETRY | mask::SEND_PSN | mask::MAX_READS,
        )
    }

    fn modify(&self, what: &str, mut attributes: verbs::QueueAttributes, mask: c_int) -> Result<(), Error> {
        // SAFETY: a live queue pair, and a structure of the size that the library expects.
        match unsafe { (self.rail.verbs.ibv_modify_qp)(self.queue.as_ptr(), &raw mut attributes, mask) } {
            0 => Ok(()),
            code => {
                let error = io::Error::from_raw_os_error(code.abs());
                Err(Error::retry(format!("{}: a queue pair does not get to {what}: {error}", self.rail.name())))
            }
        }
    }

    /// Most work requests that may be under way.
    pub fn depth(&self) -> usize {
        self.rail.depth
    }

    /// Posts work requests as one chain; the last of them, and every sixteenth, reports its completion and with it that
    /// of those before it. Returns the number of the first; they are numbered on. At most `depth` may be under way.
    ///
    /// # Errors
    /// The card takes no more, against its own word: the line has failed, and how many were posted is not known.
    ///
    /// # Safety
    /// The local memory stays registered and is nobody else's until the completion, or until this value is dropped.
    pub unsafe fn post(&mut self, work: &[Work]) -> Result<u64, Error> {
        let first = self.next;
        self.pieces.clear();
        self.pieces.extend(work.iter().map(|work| verbs::Piece {
            addr: work.local,
            length: work.bytes,
            lkey: work.local_key,
        }));
        self.chain.clear();
        let work_total = work.len();
        for (index, work) in work.iter().enumerate() {
            let signalled = index + 1 == work_total || index % 16 == 15;
            // SAFETY: plain numbers and pointers, for which zero is valid.
            let mut request: verbs::SendWork = unsafe { std::mem::zeroed() };
            request.wr_id = self.next;
            request.num_sge = 1;
            request.opcode = if work.write { verbs::WORK_WRITE } else { verbs::WORK_READ };
            request.send_flags = if signalled { verbs::SEND_SIGNALED } else { 0 };
            request.remote_addr = work.remote;
            request.rkey = work.remote_key;
            self.chain.push(request);
            self.next += 1;
        }
        let Some(last) = self.chain.len().checked_sub(1) else { return Ok(first) };
        let (chain, pieces) = (self.chain.as_mut_ptr(), self.pieces.as_mut_ptr());
        for index in 0..=last {
            // SAFETY: within both vectors, which do not grow any more; through the raw pointers only, until the call.
            unsafe {
                (*chain.add(index)).sg_list = pieces.add(index);
                (*chain.add(index)).next = if index < last { chain.add(index + 1) } else { null_mut() };
            }
        }
        // SAFETY: the library filled the table of operations when it opened the context.
        let post = unsafe { self.rail.context.as_ref().ops.post_send }
            .ok_or_else(|| Error::bug(format!("{}: its driver posts nothing", self.rail.name())))?;
        let mut bad = null_mut();
        // SAFETY: a live queue pair, a well-formed chain; the caller promises the memory.
        match unsafe { post(self.queue.as_ptr(), chain, &raw mut bad) } {
            0 => Ok(first),
            code => {
                let error = io::Error::from_raw_os_error(code.abs());
                Err(Error::retry(format!("{}: work is not taken: {error}", self.rail.name())))
            }
        }
    }

    /// Takes the completions that have come.
    pub fn reap(&mut self) -> Reaped {
        // SAFETY: the library filled the table of operations when it opened the context.
        let Some(poll) = (unsafe { self.rail.context.as_ref().ops.poll_cq }) else {
            return (None, Some("its driver polls nothing".into()));
        };
        let mut done = None;
        let mut batch = [verbs::WorkCompletion::default(); 16];
        loop {
            // SAFETY: a live completion queue, and room for as many as are asked for.
            let count = unsafe { poll(self.completions.as_ptr(), batch.len() as c_int, batch.as_mut_ptr()) };
            let Ok(count) = usize::try_from(count) else {
                return (done, Some("its completion queue has overrun".into()));
            };
            for completion in &batch[..count.min(batch.len())] {
                if completion.status != verbs::WC_SUCCESS {
                    return (done, Some(self.status(completion.status)));
                }
                done = Some(completion.wr_id);
            }
            if count < batch.len() {
                return (done, None);
            }
        }
    }

    fn status(&self, status: u32) -> String {
        // SAFETY: the library returns a constant string for every number.
        let text = unsafe { CStr::from_ptr((self.rail.verbs.ibv_wc_status_str)(status)) };
        text.to_string_lossy().into_owned()
    }

    /// Has the next completion make the descriptor readable. Whoever armed looks once more before it waits: what came
    /// before arming is not announced.
    pub fn arm(&mut self) {
        self.take_events();
        // SAFETY: the library filled the table of operations; a live completion queue.
        unsafe {
            if let Some(request) = self.rail.context.as_ref().ops.req_notify_cq {
                request(self.completions.as_ptr(), 0);
            }
        }
    }

    /// What an armed completion makes readable; only the initiator's.
    pub fn events(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the library's descriptor, open as long as this value.
        self.channel.map(|channel| unsafe { BorrowedFd::borrow_raw(channel.as_ref().fd) })
    }

    fn take_events(&mut self) {
        let Some(channel) = self.channel else { return };
        let (mut queue, mut context) = (null_mut(), null_mut());
        // SAFETY: a live channel, whose descriptor does not block; every event taken is acknowledged, without which
        // destroying the completion queue would wait for ever.
        unsafe {
            while (self.rail.verbs.ibv_get_cq_event)(channel.as_ptr(), &raw mut queue, &raw mut context) == 0 {
                (self.rail.verbs.ibv_ack_cq_events)(queue, 1);
            }
        }
    }

    /// Ends it: afterwards the card touches no memory for it, in either direction. False if the kernel refuses: then
    /// whatever it could touch must be kept for ever.
    pub fn destroy(mut self) -> bool {
        self.end()
    }

    fn end(&mut self) -> bool {
        if std::mem::replace(&mut self.over, true) {
            return true;
        }
        let verbs = self.rail.verbs;
        self.take_events();
        // SAFETY: all were made for this value, in the reverse order, and are not used again.
        unsafe {
            let code = (verbs.ibv_destroy_qp)(self.queue.as_ptr());
            if code != 0 {
                tracing::error!("{}: a queue pair cannot be destroyed: error {code}", self.rail.name());
                return false;
            }
            (verbs.ibv_destroy_cq)(self.completions.as_ptr());
            if let Some(channel) = self.channel {
                (verbs.ibv_destroy_comp_channel)(channel.as_ptr());
            }
        }
        true
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.end();
    }
}

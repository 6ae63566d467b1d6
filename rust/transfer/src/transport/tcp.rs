//! The tcp transport: block bytes straight from one arena into another over a lane, one connection per peer.
//!
//! ```text
//! submit -> queue -> [sending lane: its own thread] == frames ==> [receiving lane: its own thread] -> WriteHold
//!                      ReadHold until written      <=== acks ====   CRC per strip while it is in cache
//! ```
//!
//! The sender hands header, table and strips to the kernel in one vectored write; the receiver reads into the slot. No
//! byte of a body is copied in user space on either side. A lane holds a slot until the body ends or the lane is
//! closed; one on which nothing moves for [`STALLED_AFTER`] is closed. Frames are drawn in `wire`.

use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSlice, Read};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::socket::{MsgFlags, sendmsg};

use crate::keys::Key;
use crate::link::{Connection, DIAL_WITHIN, Link, Stream, dial_tcp, nonce, now, ready, retry, set_buffers};
use crate::mailbox::poll_timeout;
use crate::memory::{Arena, ReadHold, WriteHold, checksum};
use crate::messages::Purpose;
use crate::region::Regions;
use crate::session::{Event, Session};
use crate::transport::{Busy, Completion, Copy, CopyId, Outcome, Path, Transport};
use crate::types::{NodeAddress, NodeId, SlotRef, Span};
use crate::wire::{ACK_BYTES, Ack, BLOCK_HEADER_BYTES, BlockHeader};

/// A lane on which a frame or an acknowledgement is due and nothing moves for so long is closed.
pub const STALLED_AFTER: Duration = Duration::from_secs(3);
/// Copies that may be queued and under way to one peer; more is `Busy`.
const QUEUE_LIMIT: usize = 4096;
/// Frames written and not acknowledged: enough to keep a long link busy, few enough to lose little with it.
const WINDOW: usize = 64;
/// Frames that one vectored write takes.
const GATHER: usize = 8;
/// Bytes read before their checksums are computed: they are still in the second-level cache then.
const CHUNK_BYTES: u32 = 256 << 10;
/// Bytes thrown away at once from the body of a fenced frame.
const DISCARD_BYTES: usize = 64 << 10;

/// What the transport's owner, its lanes, and the acceptor of incoming lanes share.
pub struct Shared {
    key: Key,
    me: NodeAddress,
    regions: OnceLock<Arc<Regions>>,
    completions: Mutex<Vec<Completion>>,
    notify: Box<dyn Fn() + Send + Sync>,
}

/// The slot that a span of a whole block names.
fn slot_of(arena: &Arena, span: Span) -> Option<SlotRef> {
    let (slot, _) = arena.strips_at(span.offset, arena.layout().block_bytes() as u64)?;
    Some(SlotRef { slot, generation: span.life })
}

impl Shared {
    fn arena(&self) -> Option<Arc<Arena>> {
        self.regions.get()?.arena()
    }

    fn complete(&self, completions: impl IntoIterator<Item = Completion>) {
        self.completions.lock().unwrap_or_else(PoisonError::into_inner).extend(completions);
        (self.notify)();
    }
}

/// The transport of one daemon.
pub struct TcpTransport {
    shared: Arc<Shared>,
    lanes: HashMap<NodeId, Lane>,
    /// Threads of closed lanes; they end by themselves, `drop` waits for them.
    ending: Vec<JoinHandle<()>>,
}

struct Lane {
    peer: NodeAddress,
    queue: Arc<LaneQueue>,
    thread: JoinHandle<()>,
}

struct LaneQueue {
    state: Mutex<LaneState>,
    link: Link,
}

#[derive(Default)]
struct LaneState {
    waiting: VecDeque<Copy>,
    /// Taken by the lane and not complete.
    taken: usize,
    over: bool,
}

impl LaneQueue {
    fn lock(&self) -> MutexGuard<'_, LaneState> {
        // No code that could panic runs under the lock, so a poisoned state is still whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TcpTransport {
    /// `me` is told to peers; `notify` is called (from lanes' threads) when completions wait for `poll`.
    pub fn new(key: Key, me: NodeAddress, notify: Box<dyn Fn() + Send + Sync>) -> Self {
        let shared = Shared { key, me, regions: OnceLock::new(), completions: Mutex::default(), notify };
        Self { shared: Arc::new(shared), lanes: HashMap::new(), ending: Vec::new() }
    }

    /// For the acceptor of incoming lanes, see [`serve_lane`].
    pub fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    fn reap(&mut self) {
        let (done, ending) = self.ending.drain(..).partition(JoinHandle::is_finished);
        self.ending = ending;
        for thread in done {
            // A lane's panic is a bug that its guard has already turned into `Lost` copies.
            let _ = thread.join();
        }
    }
}

impl Transport for TcpTransport {
    fn register(&mut self, regions: Arc<Regions>) {
        // Called once by contract; other regions would not be the ones that copies name.
        let _ = self.shared.regions.set(regions);
    }

    fn connect(&mut self, peer: &NodeAddress) {
        if let Some(lane) = self.lanes.get(&peer.node) {
            if lane.peer == *peer && !lane.queue.lock().over {
                return;
            }
            self.close(&peer.node);
        }
        self.reap();
        let Ok(link) = Link::new() else {
            // Out of descriptors: submit finds no lane and reports its copies as lost.
            return;
        };
        let queue = Arc::new(LaneQueue { state: Mutex::default(), link });
        let (shared, lane, to) = (self.shared.clone(), queue.clone(), peer.clone());
        let thread = std::thread::Builder::new().name("tcp-lane-out".into()).spawn(move || {
            let _end = EndLane { shared: &shared, queue: &lane };
            if let Err(error) = run_lane(&shared, &lane, &to) {
                tracing::warn!(peer = %to.node, "lane ended: {error}");
            }
        });
        if let Ok(thread) = thread {
            self.lanes.insert(peer.node.clone(), Lane { peer: peer.clone(), queue, thread });
        }
    }

    fn path(&self, peer: &NodeId) -> Path {
        match self.lanes.get(peer) {
            None => Path::None,
            Some(lane) if lane.queue.lock().over => Path::Down("the lane has ended".into()),
            Some(_) => Path::Up,
        }
    }

    fn submit(&mut self, peer: &NodeId, copies: &[Copy]) -> Result<(), Busy> {
        let lost = |copy: &Copy| Completion { id: copy.id, outcome: Outcome::Lost };
        let Some(lane) = self.lanes.get(peer) else {
            self.shared.complete(copies.iter().map(lost));
            return Ok(());
        };
        let mut state = lane.queue.lock();
        if state.over {
            drop(state);
            self.shared.complete(copies.iter().map(lost));
            return Ok(());
        }
        let queued = state.waiting.len() + state.taken;
        if queued > 0 && queued + copies.len() > QUEUE_LIMIT {
            return Err(Busy);
        }
        state.waiting.extend(copies);
        drop(state);
        lane.queue.link.wake().set();
        Ok(())
    }

    fn poll(&mut self, into: &mut Vec<Completion>) {
        into.append(&mut self.shared.completions.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn close(&mut self, peer: &NodeId) {
        if let Some(lane) = self.lanes.remove(peer) {
            lane.queue.link.close("closed");
            self.ending.push(lane.thread);
        }
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        for (_, lane) in self.lanes.drain() {
            lane.queue.link.close("the daemon stops");
            self.ending.push(lane.thread);
        }
        for thread in self.ending.drain(..) {
            let _ = thread.join();
        }
    }
}

/// However a lane's thread ends, what still waits in its queue is lost, and later submissions are told so.
struct EndLane<'a> {
    shared: &'a Shared,
    queue: &'a LaneQueue,
}

impl Drop for EndLane<'_> {
    fn drop(&mut self) {
        let waiting = {
            let mut state = self.queue.lock();
            state.over = true;
            std::mem::take(&mut state.waiting)
        };
        self.shared.complete(waiting.into_iter().map(|copy| Completion { id: copy.id, outcome: Outcome::Lost }));
    }
}

/// Copies that a lane has taken and not completed; what is left when it is dropped is lost.
struct Taken<'a> {
    shared: &'a Shared,
    queue: &'a LaneQueue,
    writing: VecDeque<Sending>,
    unacknowledged: VecDeque<CopyId>,
}

struct Sending {
    id: CopyId,
    head: Vec<u8>,
    hold: ReadHold,
    sent: usize,
}

impl Taken<'_> {
    fn len(&self) -> usize {
        self.writing.len() + self.unacknowledged.len()
    }

    /// Takes queued copies up to the window.
    fn refill(&mut self, arena: &Arc<Arena>) {
        while self.len() < WINDOW {
            let next = {
                let mut state = self.queue.lock();
                let next = state.waiting.pop_front();
                state.taken += usize::from(next.is_some());
                next
            };
            let Some(copy) = next else { return };
            let hold = slot_of(arena, copy.local).and_then(|source| arena.begin_read(source));
            let Some(destination) = slot_of(arena, copy.remote) else {
                self.complete(copy.id, Outcome::Denied);
                continue;
            };
            match hold {
                Some(hold) => {
                    let header = BlockHeader { id: copy.id, destination, layout: arena.layout() };
                    let head = header.encode(&hold.checksums());
                    self.writing.push_back(Sending { id: copy.id, head, hold, sent: 0 });
                }
                // The source is not readable, against the contract; nothing was sent, so nothing was applied.
                None => self.complete(copy.id, Outcome::Lost),
            }
        }
    }

    fn complete(&mut self, id: CopyId, outcome: Outcome) {
        self.queue.lock().taken -= 1;
        self.shared.complete([Completion { id, outcome }]);
    }

    /// Writes what the kernel takes; returns the number of bytes.
    fn write(&mut self, stream: &TcpStream) -> io::Result<usize> {
        let mut total = 0;
        while !self.writing.is_empty() {
            let mut slices = Vec::with_capacity(2 * GATHER);
            for sending in self.writing.iter().take(GATHER) {
                let body = sending.hold.bytes();
                if sending.sent < sending.head.len() {
                    slices.push(IoSlice::new(&sending.head[sending.sent..]));
                    slices.push(IoSlice::new(body));
                } else {
                    slices.push(IoSlice::new(&body[sending.sent - sending.head.len()..]));
                }
            }
            let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
            let mut written = match sendmsg::<()>(stream.as_raw_fd(), &slices, &[], flags, None) {
                Ok(written) => written,
                Err(Errno::EAGAIN) => break,
                Err(Errno::EINTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            total += written;
            while let Some(sending) = self.writing.front_mut() {
                let whole = sending.head.len() + sending.hold.bytes().len();
                let step = written.min(whole - sending.sent);
                sending.sent += step;
                written -= step;
                if sending.sent < whole {
                    break;
                }
                self.unacknowledged.push_back(sending.id);
                // The hold ends here: the kernel has the bytes.
                self.writing.pop_front();
            }
        }
        Ok(total)
    }

    fn acknowledged(&mut self, ack: Ack) -> io::Result<()> {
        // The receiver answers in order; anything else is another program.
        if self.unacknowledged.pop_front() != Some(ack.id) {
            return Err(io::Error::other("an acknowledgement of nothing that was sent"));
        }
        self.complete(ack.id, ack.outcome);
        Ok(())
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        // First, so that whoever sees the losses and connects again gets a new lane.
        self.queue.lock().over = true;
        let ids: Vec<CopyId> =
            self.unacknowledged.drain(..).chain(self.writing.drain(..).map(|sending| sending.id)).collect();
        for id in ids {
            self.complete(id, Outcome::Lost);
        }
    }
}

/// The sending side's thread.
fn run_lane(shared: &Shared, queue: &LaneQueue, peer: &NodeAddress) -> Result<(), crate::error::Error> {
    let stream = dial_lane(shared, queue, peer)?;
    let arena = &shared.arena().ok_or_else(|| crate::error::Error::bug("a lane before the arena"))?;
    let mut taken = Taken { shared, queue, writing: VecDeque::new(), unacknowledged: VecDeque::new() };
    send_all(&stream, arena, &mut taken)
        .map_err(|error| crate::error::Error::retry(format!("lane to {}: {error}", peer.address)))
}

fn dial_lane(shared: &Shared, queue: &LaneQueue, peer: &NodeAddress) -> Result<TcpStream, crate::error::Error> {
    let stream = dial_tcp(&peer.address, &queue.link, DIAL_WITHIN)
        .map_err(|error| crate::error::Error::retry(format!("cannot reach {}: {error}", peer.address)))?;
    let session = Session::dial(shared.key, Purpose::Lane { node: shared.me.clone() }, nonce()?, now());
    let mut connection = Connection::new(Stream::Tcp(stream), session, queue.link.clone())?;
    match connection.handshake()? {
        Event::Established(node) if node.node == peer.node && node.incarnation == peer.incarnation => {
            Ok(connection.into_lane()?)
        }
        Event::Established(node) => Err(crate::error::Error::retry(format!(
            "{} is {} in life {}, not {} in life {}",
            peer.address, node.node, node.incarnation, peer.node, peer.incarnation
        ))),
        event => Err(crate::error::Error::give_up(format!("{event:?} from an acceptor"))),
    }
}

fn send_all(stream: &TcpStream, arena: &Arc<Arena>, taken: &mut Taken<'_>) -> io::Result<()> {
    let link = taken.queue.link.clone();
    let mut acks = [0; ACK_BYTES * WINDOW];
    let mut filled = 0;
    let mut moved = Instant::now();
    loop {
        link.wake().clear();
        if link.is_closed() {
            return Ok(());
        }
        let idle = taken.len() == 0;
        taken.refill(arena);
        if idle {
            moved = Instant::now();
        }
        if taken.write(stream)? > 0 {
            moved = Instant::now();
        }
        let busy = taken.len() > 0;
        let left = STALLED_AFTER.saturating_sub(moved.elapsed());
        if busy && left.is_zero() {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "nothing moved for 3 s"));
        }
        let wants = if taken.writing.is_empty() { PollFlags::POLLIN } else { PollFlags::POLLIN | PollFlags::POLLOUT };
        let mut wait = [PollFd::new(stream.as_fd(), wants), PollFd::new(link.wake().as_fd(), PollFlags::POLLIN)];
        match poll(&mut wait, poll_timeout(busy.then_some(left))) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        if !wait[0].revents().is_some_and(|events| events.intersects(!PollFlags::POLLOUT)) {
            continue;
        }
        match (&mut &*stream).read(&mut acks[filled..]) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the receiver hung up")),
            Ok(bytes) => {
                moved = Instant::now();
                filled += bytes;
                let (whole, _) = acks[..filled].as_chunks::<ACK_BYTES>();
                for ack in whole {
                    taken.acknowledged(Ack::decode(ack).map_err(io::Error::other)?)?;
                }
                let used = whole.len() * ACK_BYTES;
                acks.copy_within(used..filled, 0);
                filled -= used;
            }
            Err(error) if retry(&error) => {}
            Err(error) => return Err(error),
        }
    }
}

/// The receiving side: applies blocks until the lane ends or `link` is closed. Runs on the acceptor's thread; the
/// dialler has proven the session key.
pub fn serve_lane(shared: &Shared, stream: &TcpStream, link: &Link) -> io::Result<()> {
    set_buffers(stream);
    let mut lane = Receiving { shared, stream, link, table: Vec::new(), discard: Vec::new() };
    loop {
        let mut header = [0; BLOCK_HEADER_BYTES];
        // Between frames a lane may idle for ever; its session tells whether the peer lives.
        if !lane.fill(&mut header, true)? {
            return Ok(());
        }
        let ack = lane.block(&header)?;
        lane.answer(&ack.encode())?;
    }
}

/// Nothing behind such a header can be trusted, so the lane ends; its copies are lost and may be sent again.
fn damaged(error: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}

struct Receiving<'a> {
    shared: &'a Shared,
    stream: &'a TcpStream,
    link: &'a Link,
    table: Vec<u8>,
    discard: Vec<u8>,
}

impl Receiving<'_> {
    fn block(&mut self, front: &[u8; BLOCK_HEADER_BYTES]) -> io::Result<Ack> {
        let header = BlockHeader::peek(front).map_err(damaged)?;
        let arena = &self.shared.arena().ok_or_else(|| io::Error::other("a block before the arena exists"))?;
        if header.layout != arena.layout() {
            // Also what a damaged header most likely shows; either way nothing behind it can be trusted.
            return Err(damaged(format!("blocks of {:?}, this pool has {:?}", header.layout, arena.layout())));
        }
        let mut table = std::mem::take(&mut self.table);
        table.clear();
        table.extend(front);
        table.resize(BLOCK_HEADER_BYTES + 4 * header.layout.strips as usize, 0);
        self.fill(&mut table[BLOCK_HEADER_BYTES..], false)?;
        let sums = BlockHeader::verify(&table).map_err(damaged)?;
        self.table = table;
        let outcome = match arena.begin_write(header.destination, 0..arena.layout().strips) {
            Ok(mut hold) => self.apply(&mut hold, &sums, arena)?,
            Err(_) => {
                self.skip(arena.layout().block_bytes())?;
                if header.destination.slot < arena.slots() { Outcome::Fenced } else { Outcome::Denied }
            }
        };
        Ok(Ack { id: header.id, outcome })
    }

    fn apply(&self, hold: &mut WriteHold, sums: &[u32], arena: &Arena) -> io::Result<Outcome> {
        let strip_bytes = arena.layout().strip_bytes;
        let strips = arena.layout().strips;
        let run = (CHUNK_BYTES / strip_bytes).max(1);
        let mut outcome = Outcome::Done;
        for first in (0..strips).step_by(run as usize) {
            let last = first.saturating_add(run).min(strips);
            let bytes = hold.strips_mut(first..last);
            self.fill(bytes, false)?;
            let held: Vec<bool> = bytes
                .chunks_exact(strip_bytes as usize)
                .zip(&sums[first as usize..])
                .map(|(strip, &sum)| checksum(strip) == sum)
                .collect();
            for (strip, good) in (first..last).zip(held) {
                if good {
                    hold.set_checksum(strip, sums[strip as usize]);
                } else {
                    outcome = Outcome::Corrupt;
                }
            }
        }
        Ok(outcome)
    }

    fn skip(&mut self, mut bytes: usize) -> io::Result<()> {
        let mut discard = std::mem::take(&mut self.discard);
        discard.resize(DISCARD_BYTES, 0);
        while bytes > 0 {
            let step = bytes.min(DISCARD_BYTES);
            self.fill(&mut discard[..step], false)?;
            bytes -= step;
        }
        self.discard = discard;
        Ok(())
    }

    /// Fills the buffer. False: the sender has hung up before its first byte, and `idle` allows that.
    fn fill(&self, buffer: &mut [u8], idle: bool) -> io::Result<bool> {
        let mut filled = 0;
        while filled < buffer.len() {
            match (&mut &*self.stream).read(&mut buffer[filled..]) {
                Ok(0) if filled == 0 && idle => return Ok(false),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => filled += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let limit = if idle && filled == 0 { None } else { Some(STALLED_AFTER) };
                    self.wait(PollFlags::POLLIN, limit)?;
                }
                Err(error) if retry(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    fn answer(&self, mut bytes: &[u8]) -> io::Result<()> {
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        while !bytes.is_empty() {
            match sendmsg::<()>(self.stream.as_raw_fd(), &[IoSlice::new(bytes)], &[], flags, None) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(Errno::EAGAIN) => self.wait(PollFlags::POLLOUT, Some(STALLED_AFTER))?,
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn wait(&self, wants: PollFlags, limit: Option<Duration>) -> io::Result<()> {
        let until = limit.map(|limit| Instant::now() + limit);
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "nothing moved for 3 s"));
            }
            let mut wait =
                [PollFd::new(self.stream.as_fd(), wants), PollFd::new(self.link.wake().as_fd(), PollFlags::POLLIN)];
            match poll(&mut wait, poll_timeout(left)) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            if ready(&wait[1]) {
                self.link.wake().clear();
            }
            if self.link.is_closed() {
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "closed here"));
            }
            if ready(&wait[0]) {
                return Ok(());
            }
        }
    }
}

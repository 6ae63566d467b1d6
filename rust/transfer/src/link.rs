//! Drives a session over a socket: one thread per connection, any number of senders.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, SockaddrIn, SockaddrIn6, connect,
    getsockopt, recvmsg, sendmsg, setsockopt, socket, sockopt,
};

use crate::error::Error;
use crate::mailbox::{Full, Wake, poll_timeout};
use crate::memory::Arena;
use crate::session::{Ended, Event, MESSAGE_LIMIT, Session};
use crate::tls::{Encrypted, Shaken, Side};
use crate::types::Nanos;
use crate::wire::WireError;

/// Kernel buffer of every TCP connection, each way: about what 10 Gbit/s and 0.4 ms round trip need.
pub const SOCKET_BUFFER: usize = 512 << 10;
/// Bytes of messages that may wait for a slow receiver before the link is full.
const QUEUE_LIMIT: usize = 64 << 20;
/// Bytes taken from a socket at once.
const READ_BYTES: usize = 256 << 10;
/// How long a dial may take before the peer counts as unreachable.
pub const DIAL_WITHIN: Duration = Duration::from_secs(3);
/// How long a side that ends a session waits for its reason to be read.
const FAREWELL: Duration = Duration::from_millis(300);

/// Monotonic time of this process.
pub fn now() -> Nanos {
    static START: OnceLock<Instant> = OnceLock::new();
    // 2^64 ns are 584 years.
    START.get_or_init(Instant::now).elapsed().as_nanos() as Nanos
}

/// Random bytes of the operating system, which nobody can guess.
///
/// # Errors
/// Retry: it has none yet.
pub fn random<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| Error::retry(format!("no random numbers: {error}")))?;
    Ok(bytes)
}

/// What a session proves that it is new by.
///
/// # Errors
/// As [`random`].
pub fn nonce() -> Result<[u8; 32], Error> {
    random()
}

/// A connected stream socket.
#[derive(Debug)]
pub enum Stream {
    /// To another host, or another process over loopback.
    Tcp(TcpStream),
    /// To a process of this host; may carry descriptors.
    Unix(UnixStream),
    /// Over TCP, encrypted.
    Tls(Box<Encrypted>),
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
            Self::Tls(encrypted) => encrypted.socket.as_fd(),
        }
    }
}

impl Stream {
    /// Puts TLS between a TCP connection and its user, where `tls` says so; a unix socket stays as it is. The handshake
    /// is [`Connection::handshake`]'s.
    ///
    /// # Errors
    /// Retry: this process could make no key.
    pub fn secured(self, tls: bool, side: Side) -> Result<Self, Error> {
        match self {
            Self::Tcp(stream) if tls => Ok(Self::Tls(Box::new(Encrypted::new(stream, side)?))),
            other => Ok(other),
        }
    }

    fn prepare(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => prepare_tcp(stream),
            Self::Tls(encrypted) => prepare_tcp(&encrypted.socket),
            Self::Unix(stream) => stream.set_nonblocking(true),
        }
    }

    pub(crate) fn shutdown(&self, how: std::net::Shutdown) {
        // It fails only if the other side has already ended the connection.
        let _ = match self {
            Self::Tcp(stream) => stream.shutdown(how),
            Self::Unix(stream) => stream.shutdown(how),
            Self::Tls(encrypted) => {
                if how == std::net::Shutdown::Write {
                    let (socket, mut tls) = encrypted.parts();
                    tls.close(socket);
                }
                encrypted.socket.shutdown(how)
            }
        };
    }

    /// True if `read` has something though the socket may have nothing.
    pub(crate) fn has_rest(&self) -> bool {
        matches!(self, Self::Tls(encrypted) if encrypted.parts().1.has_rest())
    }

    fn read(&self, buffer: &mut [u8], descriptors: &mut VecDeque<OwnedFd>) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => (&mut &*stream).read(buffer),
            Self::Tls(encrypted) => {
                let (socket, mut tls) = encrypted.parts();
                tls.receive(socket, &mut [IoSliceMut::new(buffer)])?.ok_or(io::ErrorKind::WouldBlock.into())
            }
            Self::Unix(stream) => {
                let mut space = nix::cmsg_space!([RawFd; 1]);
                let mut slices = [IoSliceMut::new(buffer)];
                let received = recvmsg::<()>(
                    stream.as_raw_fd(),
                    &mut slices,
                    Some(&mut space),
                    MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT,
                )?;
                for message in received.cmsgs()? {
                    if let ControlMessageOwned::ScmRights(list) = message {
                        for raw in list {
                            // SAFETY: the kernel has just made this descriptor for us; nobody else knows it.
                            let descriptor = unsafe { OwnedFd::from_raw_fd(raw) };
                            // One is ever expected; a flood must not use up our table.
                            if descriptors.len() < 2 {
                                descriptors.push_back(descriptor);
                            }
                        }
                    }
                }
                Ok(received.bytes)
            }
        }
    }

    fn write(&self, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => (&mut &*stream).write(bytes),
            Self::Tls(encrypted) => {
                let (socket, mut tls) = encrypted.parts();
                tls.send(socket, &[IoSlice::new(bytes)])?.ok_or(io::ErrorKind::WouldBlock.into())
            }
            Self::Unix(stream) => {
                let raw = descriptor.map(|descriptor| [descriptor.as_raw_fd()]);
                let control = raw.as_ref().map(|raw| ControlMessage::ScmRights(raw));
                let slices = [IoSlice::new(bytes)];
                let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
                Ok(sendmsg::<()>(stream.as_raw_fd(), &slices, control.as_slice(), flags, None)?)
            }
        }
    }
}

fn prepare_tcp(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)
}

/// Dials `host:port`. Closing `link` ends the attempt early.
pub fn dial_tcp(address: &str, link: &Link, within: Duration) -> io::Result<TcpStream> {
    let resolved: Vec<SocketAddr> = address.to_socket_addrs()?.take(8).collect();
    let mut last = io::Error::new(io::ErrorKind::NotFound, format!("{address} names no address"));
    for address in resolved {
        match dial_one(address, link, within) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn dial_one(address: SocketAddr, link: &Link, within: Duration) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let descriptor = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)?;
    let stream = TcpStream::from(descriptor);
    set_buffers(&stream);
    let begun = match address {
        SocketAddr::V4(address) => connect(stream.as_raw_fd(), &SockaddrIn::from(address)),
        SocketAddr::V6(address) => connect(stream.as_raw_fd(), &SockaddrIn6::from(address)),
    };
    match begun {
        Ok(()) => return Ok(stream),
        Err(Errno::EINPROGRESS) => {}
        Err(errno) => return Err(errno.into()),
    }
    let until = Instant::now() + within;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut wait =
            [PollFd::new(stream.as_fd(), PollFlags::POLLOUT), PollFd::new(link.wake().as_fd(), PollFlags::POLLIN)];
        match poll(&mut wait, poll_timeout(Some(left))) {
            Err(Errno::EINTR) => continue,
            Err(errno) => return Err(errno.into()),
            Ok(_) => {}
        }
        if ready(&wait[1]) {
            link.wake().clear();
        }
        if link.is_closed() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        if ready(&wait[0]) {
            return match getsockopt(&stream, sockopt::SocketError)? {
                0 => Ok(stream),
                code => Err(io::Error::from_raw_os_error(code)),
            };
        }
    }
}

/// Sets both kernel buffers. The kernel may give less; then it is only slower.
pub fn set_buffers(socket: &impl AsFd) {
    let _ = setsockopt(socket, sockopt::SndBuf, &SOCKET_BUFFER);
    let _ = setsockopt(socket, sockopt::RcvBuf, &SOCKET_BUFFER);
}

/// True if poll found anything on it, an error or a hang-up included.
pub fn ready(wait: &PollFd<'_>) -> bool {
    wait.revents().is_some_and(|events| !events.is_empty())
}

/// The senders' end of a connection. Clones are the same link.
#[derive(Clone, Debug)]
pub struct Link(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    wake: Wake,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Outgoing>,
    bytes: usize,
    closed: Option<String>,
    cut: bool,
}

#[derive(Debug)]
struct Outgoing {
    payload: Vec<u8>,
    arena: Option<Arc<Arena>>,
}

impl Link {
    /// A link whose connection is still to come.
    pub fn new() -> Result<Self, Error> {
        Ok(Self(Arc::new(Shared { state: Mutex::default(), wake: Wake::new()? })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code that could panic runs under the lock, so a poisoned state is still whole.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a message. What is queued on a closed link is dropped: its end is reported by the driving thread.
    pub fn send(&self, payload: Vec<u8>) -> Result<(), Full> {
        self.enqueue(Outgoing { payload, arena: None })
    }

    /// Queues a message with the arena's descriptor beside it (unix sockets only).
    pub fn send_with_arena(&self, payload: Vec<u8>, arena: Arc<Arena>) -> Result<(), Full> {
        self.enqueue(Outgoing { payload, arena: Some(arena) })
    }

    fn enqueue(&self, outgoing: Outgoing) -> Result<(), Full> {
        let mut state = self.lock();
        if state.closed.is_some() || state.cut {
            return Ok(());
        }
        if outgoing.payload.len() > MESSAGE_LIMIT || state.bytes + outgoing.payload.len() > QUEUE_LIMIT {
            return Err(Full);
        }
        // A hundred bytes stand for what a short message costs beside its payload.
        state.bytes += outgoing.payload.len() + 100;
        state.queue.push_back(outgoing);
        drop(state);
        self.0.wake.set();
        Ok(())
    }

    /// Bytes that wait to be sent, as they are counted against the limit.
    pub fn queued(&self) -> usize {
        self.lock().bytes
    }

    /// Ends the connection from this side.
    pub fn close(&self, reason: &str) {
        self.lock().closed.get_or_insert_with(|| reason.into());
        self.0.wake.set();
    }

    /// True once `close` was called.
    pub fn is_closed(&self) -> bool {
        self.lock().closed.is_some()
    }

    /// Says no more, but goes on listening until the other side ends the connection. So a local client that no longer
    /// reads is asked to let go of the arena, and has let go when its end comes.
    pub fn cut(&self) {
        let mut state = self.lock();
        state.cut = true;
        state.queue.clear();
        drop(state);
        self.0.wake.set();
    }

    /// Drops what is queued: it was meant for a connection that is over.
    pub fn forget(&self) {
        let mut state = self.lock();
        state.queue.clear();
        state.bytes = 0;
    }

    /// True if both are clones of one link.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// What `close` makes readable.
    pub fn wake(&self) -> &Wake {
        &self.0.wake
    }
}

/// A session on its socket. The thread that owns it drives it.
pub struct Connection {
    stream: Stream,
    session: Session,
    link: Link,
    /// Bytes under way, from `sent` on; the arena whose descriptor goes beside the first of them.
    pending: Vec<u8>,
    sent: usize,
    arena: Option<Arc<Arena>>,
    cut: bool,
    farewells: bool,
    buffer: Vec<u8>,
    /// What has come with, and behind, the end of the handshake.
    events: Vec<Event>,
    /// Descriptors that have come and nobody has taken yet.
    pub descriptors: VecDeque<OwnedFd>,
}

impl Connection {
    /// Takes a socket; nothing is sent yet.
    pub fn new(stream: Stream, session: Session, link: Link) -> Result<Self, Ended> {
        stream.prepare().map_err(closed)?;
        Ok(Self {
            stream,
            session,
            link,
            pending: Vec::new(),
            sent: 0,
            arena: None,
            cut: false,
            farewells: true,
            buffer: vec![0; READ_BYTES],
            events: Vec::new(),
            descriptors: VecDeque::new(),
        })
    }

    /// Blocks until the other side is proven: `Event::Proven` (answer with `welcome` or `refuse`) or `Event::Established`.
    pub fn handshake(&mut self) -> Result<Event, Ended> {
        self.secure()?;
        while self.events.is_empty() {
            if let Err(ended) = self.step() {
                self.farewell();
                return Err(ended);
            }
        }
        // An acceptor may say something right behind its welcome: the rest is for `drive`.
        Ok(self.events.remove(0))
    }

    /// The handshake of TLS, if the connection has it, and the session bound to it. It counts into the session's time.
    fn secure(&mut self) -> Result<(), Ended> {
        let Stream::Tls(encrypted) = &self.stream else { return Ok(()) };
        let (socket, mut tls) = encrypted.parts();
        loop {
            self.session.tick(now())?;
            let wants = match tls.shake(socket) {
                Ok(Shaken::Waits(wants)) => wants,
                Ok(Shaken::Done) => {
                    let exporter = tls.exporter().map_err(|error| Ended::Closed(error.message))?;
                    self.session.bind(&exporter);
                    return Ok(());
                }
                Err(error) => {
                    let clear = error.get_ref().is_some_and(|inner| inner.downcast_ref() == Some(&WireError::Clear));
                    drop(tls);
                    if !clear {
                        return Err(closed(error));
                    }
                    self.answer_clear();
                    return Err(WireError::Clear.into());
                }
            };
            let left = self.session.next_tick().map(|at| Duration::from_nanos(at.saturating_sub(now())));
            let mut wait = [PollFd::new(socket, wants), PollFd::new(self.link.wake().as_fd(), PollFlags::POLLIN)];
            match poll(&mut wait, poll_timeout(left)) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(closed(errno.into())),
            }
            if ready(&wait[1]) {
                self.link.wake().clear();
            }
            if let Some(reason) = &self.link.lock().closed {
                return Err(Ended::Closed(reason.clone()));
            }
        }
    }

    /// Tells a side that speaks no TLS so, in words that it can read.
    fn answer_clear(&mut self) {
        let Stream::Tls(encrypted) = &self.stream else { return };
        // Out of descriptors: then it sees the end only.
        let Ok(stream) = encrypted.socket.try_clone() else { return };
        self.stream = Stream::Tcp(stream);
        // What a dialler had to say was meant for the channel.
        self.session.take_output();
        self.session.refuse(&WireError::Tls.to_string(), now());
        self.farewell();
    }

    /// Welcomes a proven dialler.
    pub fn welcome(&mut self) {
        self.session.welcome(now());
    }

    /// Turns a proven dialler away.
    pub fn refuse(mut self, reason: &str) {
        self.session.refuse(reason, now());
        self.farewell();
    }

    /// From now on it ends by being closed, and without a last word, which would shut the socket down: if other processes
    /// hold it too, the other side is to learn of the end when all have let go.
    pub fn end_by_closing(&mut self) {
        self.farewells = false;
    }

    /// On a unix socket: no heartbeat.
    pub fn unwatch(&mut self) {
        self.session.unwatch();
    }

    /// Sends what is pending and gives the socket away, as a data lane.
    pub fn into_lane(mut self) -> Result<Stream, Ended> {
        self.pending.extend(self.session.take_output());
        while self.sent < self.pending.len() {
            self.write()?;
            let mut wait = [PollFd::new(self.stream.as_fd(), PollFlags::POLLOUT)];
            poll(&mut wait, poll_timeout(Some(FAREWELL))).map_err(|errno| closed(errno.into()))?;
        }
        if self.session.has_rest() || !self.events.is_empty() {
            return Err(Ended::Closed("more than a handshake came on a lane".into()));
        }
        Ok(self.stream)
    }

    /// Gives socket and session to a caller that drives them itself, with the bytes that are still to be sent and what
    /// has come already.
    pub fn into_parts(mut self) -> (Stream, Session, Vec<u8>, Vec<Event>) {
        let pending = self.pending.split_off(self.sent);
        (self.stream, self.session, pending, self.events)
    }

    /// Runs until the connection ends; returns why. `deliver` gets each message. The socket closes with the connection.
    pub fn drive(&mut self, mut deliver: impl FnMut(Vec<u8>, &mut VecDeque<OwnedFd>) -> Result<(), Ended>) -> Ended {
        self.converse(|payload, descriptors| deliver(payload, descriptors).map(|()| None))
    }

    /// As `drive`, and `deliver` may answer at once: no thread is woken for that.
    pub fn converse(
        &mut self,
        mut deliver: impl FnMut(Vec<u8>, &mut VecDeque<OwnedFd>) -> Result<Option<Vec<u8>>, Ended>,
    ) -> Ended {
        let mut result = Ok(());
        loop {
            for event in std::mem::take(&mut self.events) {
                let Event::Message(payload) = event else { continue };
                match deliver(payload, &mut self.descriptors) {
                    Ok(None) => {}
                    Ok(Some(answer)) => {
                        self.session.send(&answer, now());
                        self.pending.extend(self.session.take_output());
                        // It asks and does not listen.
                        if self.pending.len() - self.sent > QUEUE_LIMIT {
                            self.link.cut();
                        }
                    }
                    Err(ended) => {
                        self.session.refuse(&ended.to_string(), now());
                        result = Err(ended);
                        break;
                    }
                }
            }
            if let Err(ended) = result {
                self.farewell();
                return ended;
            }
            result = self.step();
        }
    }

    /// Waits until the other side has hung up, however this side came to its end, or until the link is closed. Only then
    /// has everybody let go who shares the other side's socket, and writes by what came over it.
    pub fn outlast(&mut self) {
        self.stream.shutdown(std::net::Shutdown::Write);
        while !self.link.is_closed() {
            let mut wait = [
                PollFd::new(self.stream.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.link.wake().as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut wait, poll_timeout(None)) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(_) => return,
            }
            if ready(&wait[1]) {
                self.link.wake().clear();
            }
            match self.stream.read(&mut self.buffer, &mut self.descriptors) {
                Ok(0) => return,
                Ok(_) => self.descriptors.clear(),
                Err(error) if retry(&error) => {}
                Err(_) => return,
            }
        }
    }

    /// For a caller that drives an established connection itself, a question at a time: sends these messages and returns
    /// the next one that comes. `None`: nothing came until then.
    pub fn ask(&mut self, payloads: &[Vec<u8>], until: Instant) -> Result<Option<Vec<u8>>, Ended> {
        payloads.iter().for_each(|payload| self.session.send(payload, now()));
        loop {
            if !self.events.is_empty() {
                if let Event::Message(payload) = self.events.remove(0) {
                    return Ok(Some(payload));
                }
            } else if Instant::now() >= until {
                return Ok(None);
            } else {
                self.step_until(Some(until))?;
            }
        }
    }

    /// As `ask`, where no answer is wanted. Sends what can be sent at once; the rest goes with what is said next.
    pub fn tell(&mut self, payload: &[u8]) -> Result<(), Ended> {
        self.session.send(payload, now());
        self.pending.extend(self.session.take_output());
        self.write()
    }

    fn step(&mut self) -> Result<(), Ended> {
        self.step_until(None)
    }

    /// Waits for one thing to happen, or until then, and does what can be done.
    fn step_until(&mut self, until: Option<Instant>) -> Result<(), Ended> {
        self.session.tick(now())?;
        // Until the queue is empty or the socket full; to wait earlier would leave the rest until the next wake.
        loop {
            let more = self.refill()?;
            self.write()?;
            if !more || self.sent < self.pending.len() {
                break;
            }
        }
        let wants =
            if self.sent < self.pending.len() { PollFlags::POLLIN | PollFlags::POLLOUT } else { PollFlags::POLLIN };
        let rest = self.stream.has_rest();
        let left = self.session.next_tick().map(|at| Duration::from_nanos(at.saturating_sub(now())));
        let within = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = if rest { Some(Duration::ZERO) } else { left.into_iter().chain(within).min() };
        let mut wait =
            [PollFd::new(self.stream.as_fd(), wants), PollFd::new(self.link.wake().as_fd(), PollFlags::POLLIN)];
        match poll(&mut wait, poll_timeout(left)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(closed(errno.into())),
        }
        let readable = rest || wait[0].revents().is_some_and(|events| events.intersects(!PollFlags::POLLOUT));
        if ready(&wait[1]) {
            self.link.wake().clear();
        }
        if readable {
            match self.stream.read(&mut self.buffer, &mut self.descriptors) {
                Ok(0) => return Err(Ended::Closed("the other side hung up".into())),
                Ok(bytes) => self.session.receive(&self.buffer[..bytes], now(), &mut self.events)?,
                Err(error) if retry(&error) => {}
                Err(error) => return Err(closed(error)),
            }
        }
        Ok(())
    }

    /// Moves queued messages into the session, as long as little is pending. True if some are left that could go next.
    fn refill(&mut self) -> Result<bool, Ended> {
        self.pending.extend(self.session.take_output());
        let mut state = self.link.lock();
        if let Some(reason) = &state.closed {
            return Err(Ended::Closed(reason.clone()));
        }
        if state.cut && !self.cut {
            self.cut = true;
            self.stream.shutdown(std::net::Shutdown::Write);
        }
        if self.cut {
            self.pending.clear();
            self.sent = 0;
            return Ok(false);
        }
        // What is queued before the session stands waits for it.
        while self.session.stands() && self.pending.len() - self.sent < READ_BYTES && self.arena.is_none() {
            // A descriptor goes beside the first byte of its message, so what is before it must be gone.
            if state.queue.front().is_none_or(|next| next.arena.is_some() && self.sent < self.pending.len()) {
                break;
            }
            if let Some(next) = state.queue.pop_front() {
                state.bytes = state.bytes.saturating_sub(next.payload.len() + 100);
                self.session.send(&next.payload, now());
                self.pending.extend(self.session.take_output());
                self.arena = next.arena;
            }
        }
        Ok(self.session.stands() && !state.queue.is_empty())
    }

    fn write(&mut self) -> Result<(), Ended> {
        while self.sent < self.pending.len() {
            let descriptor = self.arena.as_ref().map(|arena| arena.fd());
            match self.stream.write(&self.pending[self.sent..], descriptor) {
                Ok(bytes) => {
                    self.sent += bytes;
                    self.arena = None;
                }
                Err(error) if retry(&error) => return Ok(()),
                Err(error) => return Err(closed(error)),
            }
        }
        self.pending.clear();
        self.sent = 0;
        Ok(())
    }

    /// Sends the last word and waits a moment for it to be read: closing at once would let unread input of the other
    /// side destroy it.
    fn farewell(&mut self) {
        self.pending.extend(self.session.take_output());
        if !self.farewells || self.link.is_closed() || self.pending.is_empty() || self.write().is_err() {
            return;
        }
        self.stream.shutdown(std::net::Shutdown::Write);
        let until = Instant::now() + FAREWELL;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let mut wait = [
                PollFd::new(self.stream.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.link.wake().as_fd(), PollFlags::POLLIN),
            ];
            if left.is_zero() || poll(&mut wait, poll_timeout(Some(left))).is_err() || ready(&wait[1]) {
                return;
            }
            match self.stream.read(&mut self.buffer, &mut self.descriptors) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if retry(&error) => {}
                Err(_) => return,
            }
        }
    }
}

/// True if the call would only have to be made again.
pub fn retry(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

fn closed(error: io::Error) -> Ended {
    Ended::Closed(error.to_string())
}

#[cfg(test)]
mod tests {
    //! Goal: a link keeps its order, its limits and its manners at the end. Method: two connections over a socket pair,
    //! each on its own thread, as daemon and client have them.
    use std::sync::mpsc;

    use super::*;
    use crate::messages::Purpose;
    use crate::types::{Layout, NodeAddress};

    const KEY: [u8; 32] = [3; 32];
    const PATIENCE: Duration = Duration::from_secs(60);

    struct Side {
        link: Link,
        messages: mpsc::Receiver<(Vec<u8>, Option<OwnedFd>)>,
        thread: std::thread::JoinHandle<Ended>,
    }

    fn pair() -> (Side, Side) {
        let (left, right) = UnixStream::pair().expect("a socket pair");
        let node = NodeAddress { node: "acceptor".into(), address: String::new(), incarnation: 1 };
        let dialling = Session::dial(KEY, Purpose::Local { incarnation: 1 }, [1; 32], now());
        let accepting = Session::accept(KEY, node, [2; 32], now());
        (side(left, dialling), side(right, accepting))
    }

    fn side(stream: UnixStream, session: Session) -> Side {
        let link = Link::new().expect("an eventfd");
        let mut connection = Connection::new(Stream::Unix(stream), session, link.clone()).expect("a socket");
        let (deliver, messages) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            if let Event::Proven(_) = connection.handshake().expect("both know the key") {
                connection.welcome();
            }
            connection.unwatch();
            connection.drive(|payload, descriptors| {
                // One read may bring it with the message before.
                let descriptor = if payload == b"arena" { descriptors.pop_front() } else { None };
                // The test may have heard enough.
                let _ = deliver.send((payload, descriptor));
                Ok(())
            })
        });
        Side { link, messages, thread }
    }

    #[test]
    fn descriptors_travel_beside_their_message_and_order_is_kept() {
        let (client, daemon) = pair();
        client.link.send(b"queued before the session stands".to_vec()).expect("room");
        assert_eq!(daemon.messages.recv_timeout(PATIENCE).expect("comes").0, b"queued before the session stands");
        let arena = Arena::create(1 << 16, Layout { strips: 1, strip_bytes: 64 }).expect("fits");
        let long = vec![7; 3 << 20];
        daemon.link.send(long.clone()).expect("room");
        daemon.link.send_with_arena(b"arena".to_vec(), arena.clone()).expect("room");
        daemon.link.send(long.clone()).expect("room");
        assert_eq!(client.messages.recv_timeout(PATIENCE).expect("comes").0, long);
        let (payload, descriptor) = client.messages.recv_timeout(PATIENCE).expect("comes");
        assert_eq!(payload, b"arena");
        let mine = Arena::open(descriptor.expect("beside it"), arena.bytes(), arena.slots(), arena.layout());
        assert!(mine.is_ok(), "{mine:?}");
        assert_eq!(client.messages.recv_timeout(PATIENCE).expect("comes").0, long);
        client.link.close("enough");
        assert!(matches!(client.thread.join().expect("no panic"), Ended::Closed(reason) if reason == "enough"));
        assert!(matches!(daemon.thread.join().expect("no panic"), Ended::Closed(reason) if reason.contains("hung up")));
    }

    #[test]
    fn a_full_link_says_so_and_a_cut_one_listens_to_the_end() {
        let (client, daemon) = pair();
        client.link.send(b"the session stands".to_vec()).expect("room");
        daemon.messages.recv_timeout(PATIENCE).expect("comes");
        assert_eq!(daemon.link.send(vec![0; MESSAGE_LIMIT + 1]), Err(Full));
        let fills = (0..).take_while(|_| daemon.link.send(vec![0; MESSAGE_LIMIT]).is_ok()).take(10_000).count();
        assert!(fills < 10_000, "a link that takes everything");
        daemon.link.cut();
        // The client sees the end of the stream and lets go; only then does the daemon's side end.
        assert!(matches!(client.thread.join().expect("no panic"), Ended::Closed(reason) if reason.contains("hung up")));
        assert!(matches!(daemon.thread.join().expect("no panic"), Ended::Closed(reason) if reason.contains("hung up")));
    }

    /// Processes of one client share its socket. That one of them said what nobody understands does not mean that the
    /// others have let go.
    #[test]
    fn a_connection_outlasts_its_own_end_until_all_of_the_other_side_hang_up() {
        let (left, right) = UnixStream::pair().expect("a socket pair");
        let other = left.try_clone().expect("a descriptor");
        let client = side(left, Session::dial(KEY, Purpose::Local { incarnation: 1 }, [1; 32], now()));
        let node = NodeAddress { node: "acceptor".into(), address: String::new(), incarnation: 1 };
        let accepting = Session::accept(KEY, node, [2; 32], now());
        let link = Link::new().expect("an eventfd");
        let (tell, told) = mpsc::channel();
        let daemon = std::thread::spawn(move || {
            let mut connection = Connection::new(Stream::Unix(right), accepting, link).expect("a socket");
            connection.handshake().expect("both know the key");
            connection.welcome();
            connection.unwatch();
            let ended = connection.drive(|_, _| Err(Ended::Closed("what is this?".into())));
            tell.send(ended.to_string()).expect("heard");
            connection.outlast();
            tell.send("all have hung up".into()).expect("heard");
        });
        client.link.send(b"nonsense".to_vec()).expect("room");
        assert!(
            matches!(client.thread.join().expect("no panic"), Ended::Refused(reason) if reason.contains("is this"))
        );
        assert!(told.recv_timeout(PATIENCE).expect("comes").contains("what is this?"));
        // It can only pass too easily: on a machine so slow that nothing is said within this time.
        assert_eq!(told.recv_timeout(Duration::from_millis(100)), Err(mpsc::RecvTimeoutError::Timeout));
        drop(other);
        assert_eq!(told.recv_timeout(PATIENCE).expect("comes"), "all have hung up");
        daemon.join().expect("no panic");
    }
}

//! Frames on their way out of a socket: headers and tables into this engine's memory, bodies straight into the
//! registered one.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::body::{Body, DISCARD_BYTES};
use super::frames::{self, ENTRY_BYTES, FrameError, HEADER_BYTES, Header, Table};
use super::socket::Slices;
use crate::link::Stream;
use crate::transport::STALLED_AFTER;

/// Bytes read for a header if nothing is known: a whole frame with a copy of 4 KiB, and room to see that it was all. Its body is copied once more then,
/// from cache, which takes a tenth of the system call that it saves.
const FRONT_BYTES: usize = 4096 + 2 * NEXT_BYTES;
/// Bytes read for the next header behind a body: just a frame's front with one copy and one checksum. Of a stream of large
/// bodies nothing has to be copied.
const NEXT_BYTES: usize = HEADER_BYTES + ENTRY_BYTES + 4;
/// Bytes of a body that one call takes at most: they are still in the second-level cache when they are verified.
const CHUNK_BYTES: usize = 256 << 10;
/// A frame that comes more slowly than so many bytes a second, beyond 3 s, is one of a peer that wants to hold memory.
const SLOWEST: u64 = 64 << 10;

/// Descriptors that may wait for their frames.
const DESCRIPTORS_LIMIT: usize = 8;

enum Stage {
    Front,
    Table { header: Header, table: Vec<u8>, have: usize },
    Body(Header, Box<Body>),
}

/// What has come.
pub enum Step {
    /// A header and its table. If it has a body, call [`Inflow::expect`] next.
    Frame(Header, Table),
    /// All of a body.
    Body(Header, Box<Body>),
    /// Nothing more now; the socket will say when.
    Dry,
    /// The budget is used up.
    Spent,
}

/// What comes in on one lane.
pub struct Inflow {
    front: Box<[u8; FRONT_BYTES]>,
    from: usize,
    to: usize,
    stage: Stage,
    discard: Vec<u8>,
    socket: State,
    /// When the frame that has begun must be here.
    due: Option<Instant>,
}

/// What is known of the socket.
struct State {
    readable: bool,
    /// The other side has said that it sends no more: read until the end is seen.
    hangup: bool,
    /// What has come beside the bytes and nobody has taken yet; `None`: not a unix socket.
    descriptors: Option<Vec<OwnedFd>>,
}

impl Inflow {
    /// Nothing has come.
    pub fn new(unix: bool) -> Self {
        let descriptors = unix.then(Vec::new);
        Self {
            front: Box::new([0; FRONT_BYTES]),
            from: 0,
            to: 0,
            stage: Stage::Front,
            discard: Vec::new(),
            socket: State { readable: true, hangup: false, descriptors },
            due: None,
        }
    }

    /// The socket has something.
    pub fn set_readable(&mut self, hangup: bool) {
        self.socket.readable = true;
        self.socket.hangup |= hangup;
    }

    /// A descriptor that has come beside the frames so far.
    pub fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.socket.descriptors.as_mut().filter(|list| !list.is_empty()).map(|list| list.remove(0))
    }

    /// By when the frame that has begun must be here; `None` between frames.
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Says where the body of the frame just returned goes.
    pub fn expect(&mut self, header: Header, body: Body) {
        self.stage = Stage::Body(header, Box::new(body));
    }

    /// Reads on, at most `budget` bytes, which it takes off.
    ///
    /// # Errors
    /// The connection is over, or what came is no frame.
    pub fn next(&mut self, socket: &Stream, now: Instant, budget: &mut usize) -> io::Result<Step> {
        loop {
            match &mut self.stage {
                Stage::Front => {
                    if let Some(bytes) = self.front[self.from..self.to].first_chunk::<HEADER_BYTES>() {
                        let header = frames::parse_header(bytes).map_err(damaged)?;
                        self.from += HEADER_BYTES;
                        let more = Duration::from_millis(header.body * 1000 / SLOWEST);
                        self.due = Some(now + STALLED_AFTER + more);
                        self.stage = Stage::Table { header, table: vec![0; header.table as usize], have: 0 };
                        continue;
                    }
                    self.front.copy_within(self.from..self.to, 0);
                    (self.from, self.to) = (0, self.to - self.from);
                    let mut slices = Slices::new();
                    let rest = &mut self.front[self.to..];
                    slices.push(rest.as_mut_ptr(), rest.len());
                    // SAFETY: the list is of `front`, which is ours.
                    match unsafe { self.socket.receive(&mut slices, socket, budget) }? {
                        Ok(bytes) => self.to += bytes,
                        Err(step) => return Ok(step),
                    }
                    self.due = self.due.or(Some(now + STALLED_AFTER));
                }
                Stage::Table { header, table, have } => {
                    let step = (table.len() - *have).min(self.to - self.from);
                    table[*have..*have + step].copy_from_slice(&self.front[self.from..self.from + step]);
                    *have += step;
                    self.from += step;
                    if *have == table.len() {
                        let parsed = frames::parse_table(header, table).map_err(damaged)?;
                        let header = *header;
                        self.stage = Stage::Front;
                        if header.body == 0 {
                            self.ended(now);
                        }
                        return Ok(Step::Frame(header, parsed));
                    }
                    let mut slices = Slices::new();
                    slices.push(table[*have..].as_mut_ptr(), table.len() - *have);
                    // SAFETY: the list is of `table`, which is ours.
                    match unsafe { self.socket.receive(&mut slices, socket, budget) }? {
                        Ok(bytes) => *have += bytes,
                        Err(step) => return Ok(step),
                    }
                }
                Stage::Body(_, body) => {
                    let before = body.left();
                    body.copy_from(&self.front[self.from..self.to]);
                    self.from += (before - body.left()) as usize;
                    if body.left() == 0 {
                        let Stage::Body(header, body) = std::mem::replace(&mut self.stage, Stage::Front) else {
                            unreachable!("it was matched just now")
                        };
                        self.ended(now);
                        return Ok(Step::Body(header, body));
                    }
                    // The front is used up, so its room takes the next frame's header in the same call.
                    (self.from, self.to) = (0, 0);
                    if self.discard.is_empty() {
                        self.discard = vec![0; DISCARD_BYTES];
                    }
                    let mut slices = Slices::new();
                    let listed = body.list(&mut slices, CHUNK_BYTES, &mut self.discard);
                    if listed as u64 == body.left() {
                        slices.push(self.front.as_mut_ptr(), NEXT_BYTES);
                    }
                    // SAFETY: the list is of the body's holds, `discard` and `front`; all are ours.
                    match unsafe { self.socket.receive(&mut slices, socket, budget) }? {
                        Ok(bytes) => {
                            body.advance(bytes.min(listed));
                            self.to = bytes.saturating_sub(listed);
                        }
                        Err(step) => return Ok(step),
                    }
                }
            }
        }
    }

    /// A frame is whole; if the next one has begun already, its time runs.
    fn ended(&mut self, now: Instant) {
        self.due = (self.to > self.from).then(|| now + STALLED_AFTER);
    }
}

impl State {
    /// One call. `Err`: nothing came.
    ///
    /// # Safety
    /// As `Slices::receive`.
    unsafe fn receive(
        &mut self,
        slices: &mut Slices,
        socket: &Stream,
        budget: &mut usize,
    ) -> io::Result<Result<usize, Step>> {
        if !self.readable {
            return Ok(Err(Step::Dry));
        }
        if *budget == 0 {
            return Ok(Err(Step::Spent));
        }
        // SAFETY: by the caller's promise.
        match unsafe { slices.receive(socket, self.descriptors.as_mut()) }? {
            Some(bytes) => {
                // A flood of descriptors must not use up our table.
                if self.descriptors.as_ref().is_some_and(|list| list.len() > DESCRIPTORS_LIMIT) {
                    return Err(io::Error::other("descriptors without frames that name them"));
                }
                // Less than there was room for: the socket is empty, and the next call would only say so. Where
                // descriptors may come, a call ends at them too.
                self.readable = self.hangup || self.descriptors.is_some() || bytes == slices.bytes();
                *budget = budget.saturating_sub(bytes);
                Ok(Ok(bytes))
            }
            None => {
                self.readable = false;
                Ok(Err(Step::Dry))
            }
        }
    }
}

/// Nothing behind such bytes can be trusted, so the lane ends.
fn damaged(error: FrameError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}

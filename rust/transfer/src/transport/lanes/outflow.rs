//! Frames on their way into a socket: heads from this engine's memory, bodies straight from the registered one.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use crate::link::Stream;
use crate::region::Reading;

use super::socket::Slices;

/// Bytes that one call sends at most.
const SEND_BYTES: usize = 512 << 10;

struct Frame {
    head: Vec<u8>,
    /// Goes beside the first byte.
    descriptor: Option<OwnedFd>,
    bodies: Vec<Reading>,
    /// Which part is being sent (0: the head), and how much of it is gone.
    part: usize,
    at: usize,
}

/// What waits to be sent on one lane.
pub struct Outflow {
    frames: VecDeque<Frame>,
    writable: bool,
}

impl Outflow {
    /// Nothing.
    pub fn new() -> Self {
        Self { frames: VecDeque::new(), writable: true }
    }

    /// The socket may take bytes again.
    pub fn set_writable(&mut self) {
        self.writable = true;
    }

    /// False: the socket is full, and will say when it is not.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// True if nothing waits.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Frames that are not wholly sent.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Appends a frame: header and table, and the memory that follows them. It is held until the kernel has it.
    pub fn push(&mut self, head: Vec<u8>, bodies: Vec<Reading>) {
        self.frames.push_back(Frame { head, descriptor: None, bodies, part: 0, at: 0 });
    }

    /// Appends a frame without a body, and a descriptor beside it (unix sockets only).
    pub fn push_with(&mut self, head: Vec<u8>, descriptor: Option<OwnedFd>) {
        self.frames.push_back(Frame { head, descriptor, bodies: Vec::new(), part: 0, at: 0 });
    }

    /// Sends what the socket takes, in one call; returns the number of bytes, of which 0 means none now.
    ///
    /// # Errors
    /// The connection is over.
    pub fn flush(&mut self, socket: &Stream) -> io::Result<usize> {
        if !self.writable || self.frames.is_empty() {
            return Ok(0);
        }
        let mut slices = Slices::new();
        let descriptor = self.frames.front().and_then(|first| first.descriptor.as_ref()).map(AsFd::as_fd);
        'frames: for (index, frame) in self.frames.iter().enumerate() {
            if index > 0 && (frame.descriptor.is_some() || descriptor.is_some()) {
                // One descriptor at a time, beside its own frame.
                break;
            }
            let mut at = frame.at;
            for part in frame.part..=frame.bodies.len() {
                let bytes = frame.bytes(part);
                let step = (bytes.len() - at).min(SEND_BYTES - slices.bytes());
                if !slices.push(bytes[at..].as_ptr().cast_mut(), step) || slices.bytes() == SEND_BYTES {
                    break 'frames;
                }
                at = 0;
            }
        }
        // SAFETY: heads and holds are owned by the frames, which stay.
        match unsafe { slices.send(socket, descriptor) }? {
            Some(sent) => {
                // Less than was offered: the socket is full, and the next call would only say so.
                self.writable = sent == slices.bytes();
                self.advance(sent);
                Ok(sent)
            }
            None => {
                self.writable = false;
                Ok(0)
            }
        }
    }

    fn advance(&mut self, mut bytes: usize) {
        while let Some(frame) = self.frames.front_mut() {
            let step = (frame.bytes(frame.part).len() - frame.at).min(bytes);
            frame.at += step;
            bytes -= step;
            if step > 0 {
                // It went with the first byte.
                frame.descriptor = None;
            }
            if frame.at < frame.bytes(frame.part).len() {
                return;
            }
            (frame.part, frame.at) = (frame.part + 1, 0);
            if frame.part > frame.bodies.len() {
                // The holds end here: the kernel has the bytes.
                self.frames.pop_front();
            }
        }
    }
}

impl Frame {
    fn bytes(&self, part: usize) -> &[u8] {
        match part.checked_sub(1) {
            None => &self.head,
            Some(body) => self.bodies[body].bytes(),
        }
    }
}

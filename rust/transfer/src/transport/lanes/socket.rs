//! Vectored system calls on lists of raw memory, never blocking.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use nix::libc;

/// Pieces that one call takes: 2 KiB on the stack, and a call per 1 MiB of 4 KiB copies or more often.
const SLICES: usize = 128;

/// Memory for one call.
pub struct Slices {
    list: [libc::iovec; SLICES],
    count: usize,
    bytes: usize,
}

impl Slices {
    /// Nothing.
    pub fn new() -> Self {
        Self { list: [libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; SLICES], count: 0, bytes: 0 }
    }

    /// Appends memory; neighbours become one piece. False: the list is full.
    pub fn push(&mut self, pointer: *mut u8, bytes: usize) -> bool {
        if bytes == 0 {
            return true;
        }
        if let Some(last) = self.list[..self.count].last_mut()
            && last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == pointer
        {
            last.iov_len += bytes;
            self.bytes += bytes;
            return true;
        }
        if self.count == SLICES {
            return false;
        }
        self.list[self.count] = libc::iovec { iov_base: pointer.cast(), iov_len: bytes };
        self.count += 1;
        self.bytes += bytes;
        true
    }

    /// All bytes of the list.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn message(&mut self) -> libc::msghdr {
        // SAFETY: all zero is a valid msghdr (null pointers with zero lengths), and its padding is not ours to name.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.list.as_mut_ptr();
        message.msg_iovlen = self.count as _;
        message
    }

    /// Fills the memory from the socket. `None`: nothing is there now.
    ///
    /// # Safety
    /// Every piece is memory that stays mapped and may be written during the call.
    ///
    /// # Errors
    /// The connection is over; also at its regular end.
    pub unsafe fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<Option<usize>> {
        let mut message = self.message();
        // SAFETY: the message points at this list, which is as long as it says; its pieces by the caller's promise.
        match again(|| unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) })? {
            Some(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the other side hung up")),
            other => Ok(other),
        }
    }

    /// Sends the memory. `None`: the socket takes nothing now.
    ///
    /// # Safety
    /// Every piece is memory that stays mapped during the call.
    ///
    /// # Errors
    /// The connection is over.
    pub unsafe fn send(&mut self, socket: BorrowedFd<'_>) -> io::Result<Option<usize>> {
        let message = self.message();
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: as above.
        again(|| unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) })
    }
}

/// Makes a call until no signal interrupts it.
fn again(mut call: impl FnMut() -> isize) -> io::Result<Option<usize>> {
    loop {
        if let Ok(bytes) = usize::try_from(call()) {
            return Ok(Some(bytes));
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::WouldBlock => return Ok(None),
            io::ErrorKind::Interrupted => {}
            _ => return Err(error),
        }
    }
}

//! Vectored system calls on lists of raw memory, never blocking; on unix sockets with descriptors beside them, over TLS
//! with a cipher in between.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::link::Stream;

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

    /// Fills the memory from the socket. `None`: nothing is there now. Descriptors that come beside the bytes are appended
    /// to `descriptors` (none: this is no unix socket).
    ///
    /// # Safety
    /// Every piece is memory that stays mapped and may be written during the call.
    ///
    /// # Errors
    /// The connection is over; also at its regular end.
    pub unsafe fn receive(
        &mut self,
        socket: &Stream,
        descriptors: Option<&mut Vec<OwnedFd>>,
    ) -> io::Result<Option<usize>> {
        let received = match socket {
            Stream::Tls(encrypted) => {
                let (socket, mut tls) = encrypted.parts();
                let list = self.list[..self.count].as_mut_ptr().cast::<IoSliceMut<'_>>();
                // SAFETY: an `IoSliceMut` has the layout of an iovec; the list is that long, and its pieces are memory
                // that may be written during the call, by the caller's promise.
                tls.receive(socket, unsafe { std::slice::from_raw_parts_mut(list, self.count) })?
            }
            // SAFETY: by the caller's promise.
            clear => unsafe { self.receive_clear(clear.as_fd(), descriptors) }?,
        };
        match received {
            Some(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the other side hung up")),
            other => Ok(other),
        }
    }

    /// # Safety
    /// As `receive`.
    unsafe fn receive_clear(
        &mut self,
        socket: BorrowedFd<'_>,
        descriptors: Option<&mut Vec<OwnedFd>>,
    ) -> io::Result<Option<usize>> {
        let mut message = self.message();
        let mut control = Control([0; CONTROL_BYTES]);
        if descriptors.is_some() {
            message.msg_control = control.0.as_mut_ptr().cast();
            message.msg_controllen = CONTROL_BYTES as _;
        }
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        // SAFETY: the message points at this list, which is as long as it says; its pieces by the caller's promise.
        let received = again(|| unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, flags) })?;
        if let (Some(descriptors), Some(_)) = (descriptors, received) {
            // SAFETY: the kernel has just filled the message's control buffer, which is still there.
            unsafe { take_descriptors(&message, descriptors) };
        }
        Ok(received)
    }

    /// Sends the memory, and a descriptor beside its first byte. `None`: the socket takes nothing now.
    ///
    /// # Safety
    /// Every piece is memory that stays mapped during the call.
    ///
    /// # Errors
    /// The connection is over.
    pub unsafe fn send(&mut self, socket: &Stream, descriptor: Option<BorrowedFd<'_>>) -> io::Result<Option<usize>> {
        match socket {
            Stream::Tls(encrypted) => {
                let (socket, mut tls) = encrypted.parts();
                let list = self.list[..self.count].as_ptr().cast::<IoSlice<'_>>();
                // SAFETY: an `IoSlice` has the layout of an iovec; the list is that long, and its pieces are memory
                // that stays mapped during the call, by the caller's promise.
                tls.send(socket, unsafe { std::slice::from_raw_parts(list, self.count) })
            }
            // SAFETY: by the caller's promise.
            clear => unsafe { self.send_clear(clear.as_fd(), descriptor) },
        }
    }

    /// # Safety
    /// As `send`.
    unsafe fn send_clear(
        &mut self,
        socket: BorrowedFd<'_>,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> io::Result<Option<usize>> {
        let mut message = self.message();
        let mut control = Control([0; CONTROL_BYTES]);
        if let Some(descriptor) = descriptor {
            let bytes = size_of::<RawFd>() as u32;
            message.msg_control = control.0.as_mut_ptr().cast();
            // SAFETY: arithmetic only.
            message.msg_controllen = unsafe { libc::CMSG_SPACE(bytes) } as _;
            // SAFETY: the control buffer is aligned, and larger than one header with one descriptor.
            unsafe {
                let header = libc::CMSG_FIRSTHDR(&message);
                (*header).cmsg_level = libc::SOL_SOCKET;
                (*header).cmsg_type = libc::SCM_RIGHTS;
                (*header).cmsg_len = libc::CMSG_LEN(bytes) as _;
                libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(descriptor.as_raw_fd());
            }
        }
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: as above.
        again(|| unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) })
    }
}

/// Room for four descriptors; one is ever sent at once, and the kernel closes what has no room.
const CONTROL_BYTES: usize = 64;

/// As aligned as a control message's header must be.
#[repr(align(8))]
struct Control([u8; CONTROL_BYTES]);

/// # Safety
/// The message was just received, and its control buffer still exists.
unsafe fn take_descriptors(message: &libc::msghdr, into: &mut Vec<OwnedFd>) {
    // SAFETY: the CMSG macros walk the buffer that the kernel has filled; each descriptor in it was made for us, and is
    // taken once.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                let first = libc::CMSG_DATA(header).cast::<RawFd>();
                for index in 0..bytes / size_of::<RawFd>() {
                    into.push(OwnedFd::from_raw_fd(first.add(index).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

/// True if the other side of a unix socket has shut it down both ways, or is dead.
pub fn is_hung_up(socket: BorrowedFd<'_>) -> bool {
    // A hang-up is told without being asked for.
    let mut wait = [PollFd::new(socket, PollFlags::empty())];
    let answered = poll(&mut wait, PollTimeout::ZERO);
    // What cannot be asked cannot be trusted.
    answered.is_err() || wait[0].revents().is_none_or(|events| !events.is_empty())
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

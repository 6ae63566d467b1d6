//! Waking and handing over between threads: a descriptor that is readable while something waits.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::error::Error;

/// An eventfd: set by any thread, waited for with poll.
#[derive(Debug)]
pub struct Wake(EventFd);

impl Wake {
    /// Makes one, not set.
    pub fn new() -> Result<Self, Error> {
        EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map(Self)
            .map_err(|errno| Error::retry(format!("no eventfd: {errno}: raise the limit on open files")))
    }

    /// Makes it readable.
    pub fn set(&self) {
        // It can fail only when 2^64 - 2 sets wait, and then it is readable anyway.
        let _ = self.0.write(1);
    }

    /// Makes it unreadable again.
    pub fn clear(&self) {
        // EAGAIN: it was not set.
        let _ = self.0.read();
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A bounded queue between threads whose descriptor is readable while something waits.
#[derive(Debug)]
pub struct Mailbox<T> {
    queue: Mutex<Queue<T>>,
    wake: Wake,
    limit: usize,
}

#[derive(Debug)]
struct Queue<T> {
    items: VecDeque<T>,
    closed: bool,
}

/// The mailbox is full: its reader has stopped reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

impl<T> Mailbox<T> {
    /// Holds at most `limit` items, and one last word.
    pub fn new(limit: usize) -> Result<Self, Error> {
        let queue = Mutex::new(Queue { items: VecDeque::new(), closed: false });
        Ok(Self { queue, wake: Wake::new()?, limit })
    }

    fn lock(&self) -> MutexGuard<'_, Queue<T>> {
        // No code that could panic runs under the lock, so a poisoned queue is still whole.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an item; one put in after the last word is dropped.
    pub fn push(&self, item: T) -> Result<(), Full> {
        let mut queue = self.lock();
        if queue.closed {
            return Ok(());
        }
        if queue.items.len() >= self.limit {
            return Err(Full);
        }
        queue.items.push_back(item);
        self.wake.set();
        Ok(())
    }

    /// Adds an item that must not be lost, beyond the limit. Only for what the sender itself bounds.
    pub fn push_always(&self, item: T) {
        let mut queue = self.lock();
        if !queue.closed {
            queue.items.push_back(item);
            self.wake.set();
        }
    }

    /// Adds the last word, beyond the limit; nothing follows it. Only the first one counts.
    pub fn close(&self, last: T) {
        let mut queue = self.lock();
        if !queue.closed {
            queue.closed = true;
            queue.items.push_back(last);
            self.wake.set();
        }
    }

    /// True once `close` was called, whether or not the last word has been taken.
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Takes all that waits.
    pub fn take(&self) -> Vec<T> {
        let mut queue = self.lock();
        self.wake.clear();
        queue.items.drain(..).collect()
    }

    /// Takes one.
    pub fn pop(&self) -> Option<T> {
        let mut queue = self.lock();
        let item = queue.items.pop_front();
        if queue.items.is_empty() {
            self.wake.clear();
        }
        item
    }

    /// Blocks until something waits or the time is over; true if something waits.
    pub fn wait(&self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        loop {
            if !self.lock().items.is_empty() {
                return true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let mut wait = [PollFd::new(self.wake.as_fd(), PollFlags::POLLIN)];
            // An error here is an interrupted call: look again.
            let _ = poll(&mut wait, poll_timeout(Some(left)));
        }
    }
}

impl<T> AsFd for Mailbox<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// A duration for poll: rounded up to a millisecond, so that a loop does not spin before its deadline.
pub fn poll_timeout(left: Option<Duration>) -> PollTimeout {
    match left {
        None => PollTimeout::NONE,
        Some(left) => {
            let millis = left.as_nanos().div_ceil(1_000_000);
            PollTimeout::try_from(millis.min(60_000) as i32).unwrap_or(PollTimeout::ZERO)
        }
    }
}

#[cfg(test)]
mod tests {
    //! Goal: bounded, in order, and readable just while something waits. Method: one thread, then two.
    use super::*;

    fn readable(mailbox: &Mailbox<u32>) -> bool {
        let mut wait = [PollFd::new(mailbox.as_fd(), PollFlags::POLLIN)];
        poll(&mut wait, PollTimeout::ZERO).expect("poll works on an eventfd") == 1
    }

    #[test]
    fn bounded_and_readable_while_something_waits() {
        let mailbox = Mailbox::new(2).expect("an eventfd");
        assert!(!readable(&mailbox) && !mailbox.wait(Duration::ZERO));
        assert_eq!((mailbox.push(1), mailbox.push(2), mailbox.push(3)), (Ok(()), Ok(()), Err(Full)));
        assert!(readable(&mailbox));
        assert_eq!(mailbox.pop(), Some(1));
        assert!(readable(&mailbox));
        mailbox.close(9);
        mailbox.close(10);
        assert_eq!(mailbox.push(3), Ok(()));
        assert_eq!(mailbox.take(), [2, 9]);
        assert!(!readable(&mailbox) && mailbox.is_closed());
    }

    #[test]
    fn a_waiter_is_woken() {
        let mailbox = Mailbox::new(2).expect("an eventfd");
        std::thread::scope(|scope| {
            scope.spawn(|| mailbox.push(5));
            assert!(mailbox.wait(Duration::from_secs(60)));
        });
        assert_eq!(mailbox.take(), [5]);
    }
}

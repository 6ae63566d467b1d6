//! Signals as events among others: SIGTERM, SIGINT, and SIGHUP, which means the same here: a terminal that closes ends its
//! programs, and there is nothing to read again.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, pthread_sigmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use transfer::error::Error;
use transfer::mailbox::poll_timeout;

/// The signals that stop a program, held back until they are waited for.
pub struct Signals(SignalFd);

/// What has ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Woken {
    /// A signal.
    Signal(Signal),
    /// The descriptor of this index is readable.
    Ready(usize),
    /// The time is over.
    Late,
}

impl Signals {
    /// Runs `work` with the signals held back. Before any other thread starts: all inherit it, and only `wait` takes them.
    pub fn held_back(work: impl FnOnce(&Self) -> Result<(), Error>) -> Result<(), Error> {
        let signals: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect();
        let mut before = SigSet::empty();
        let masking = |errno| Error::give_up(format!("cannot block signals: {errno}"));
        pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&signals), Some(&mut before)).map_err(masking)?;
        let outcome = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
            .map_err(|errno| Error::give_up(format!("cannot wait for signals: {errno}")))
            .and_then(|descriptor| work(&Self(descriptor)));
        pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&before), None).map_err(masking)?;
        outcome
    }

    /// Waits for a signal, for one of these descriptors, or until then. The first descriptor counts most, a signal least.
    pub fn wait(&self, others: &[BorrowedFd<'_>], until: Option<Instant>) -> Result<Woken, Error> {
        let problem = |errno: Errno| Error::give_up(format!("cannot wait for signals: {errno}"));
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let mut wait: Vec<PollFd<'_>> = others.iter().map(|other| PollFd::new(*other, PollFlags::POLLIN)).collect();
            wait.push(PollFd::new(self.0.as_fd(), PollFlags::POLLIN));
            match poll(&mut wait, poll_timeout(left)) {
                Ok(_) => {}
                Err(Errno::EINTR) => continue,
                Err(errno) => return Err(problem(errno)),
            }
            if let Some(index) = wait[..others.len()].iter().position(|wait| wait.any() == Some(true)) {
                return Ok(Woken::Ready(index));
            }
            if let Some(info) = self.0.read_signal().map_err(problem)? {
                // Only these come by this descriptor.
                return Ok(Woken::Signal(Signal::try_from(info.ssi_signo as i32).unwrap_or(Signal::SIGTERM)));
            }
            if left == Some(Duration::ZERO) {
                return Ok(Woken::Late);
            }
        }
    }
}

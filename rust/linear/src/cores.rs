//! Which core a thread runs on, and how it leaves one.
//!
//! A helper that wakes up is often put on its waker's core, where both get half of the time while another core is idle. Pinned
//! threads would collide with those of every other process that pins; so a helper only keeps off one core.

#[cfg(target_os = "linux")]
mod linux {
    use nix::sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
    use nix::unistd::Pid;

    /// The cores that a thread may use.
    pub struct Cores(Option<CpuSet>);

    impl Cores {
        /// Of this thread.
        pub fn of_this_thread() -> Self {
            Self(sched_getaffinity(Pid::from_raw(0)).ok())
        }

        /// This thread's core.
        pub fn current() -> Option<usize> {
            sched_getcpu().ok()
        }

        /// Moves this thread to another core, of those it might use, and keeps it off this one. If there is no other, or
        /// the system refuses, it stays.
        pub fn leave(&self, core: usize) {
            let Some(mut others) = self.0 else { return };
            if others.unset(core).is_ok() {
                // An empty set is refused.
                let _ = sched_setaffinity(Pid::from_raw(0), &others);
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    /// Nothing is known.
    pub struct Cores;

    impl Cores {
        /// Of this thread.
        pub fn of_this_thread() -> Self {
            Self
        }

        /// This thread's core.
        pub fn current() -> Option<usize> {
            None
        }

        /// Does nothing.
        pub fn leave(&self, _: usize) {}
    }
}

#[cfg(not(target_os = "linux"))]
pub use elsewhere::Cores;
#[cfg(target_os = "linux")]
pub use linux::Cores;

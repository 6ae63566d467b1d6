//! Pins of which a client has let go. The daemon is told of them with the next question, which costs nothing; if there is
//! none, a thread does it a moment later. (A message of its own for each batch would cost as much as all the rest of a
//! small read: it wakes the daemon a second time, and takes the core from whoever reads.)

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::Thread;
use std::time::Duration;

use crate::error::Error;

/// How long the daemon may think that a view is used when it is not. Whoever finds no room waits longer than this.
pub const LINGER: Duration = Duration::from_millis(5);
/// Looks in vain after which the thread sleeps until it is woken: waking it costs as much as one of its looks.
const IDLE_LOOKS: u32 = 20;
/// It calls one function.
const STACK: usize = 128 << 10;

/// See the module's head.
#[derive(Debug, Default)]
pub struct Unused {
    pins: Mutex<Vec<u64>>,
    /// The thread looks when it is woken, and not before.
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

impl Unused {
    /// Nobody uses this pin any more.
    pub fn add(&self, pin: u64) {
        self.lock().push(pin);
        if self.asleep.swap(false, SeqCst) {
            self.wake();
        }
    }

    /// Takes what the daemon is to be told.
    pub fn take(&self) -> Vec<u64> {
        std::mem::take(&mut *self.lock())
    }

    /// Begins to look after the pins of `owner`, who tells the daemon in `release`.
    ///
    /// # Errors
    /// Retry: no thread can be started.
    pub fn watch<T: Send + Sync + 'static>(
        owner: &Arc<T>,
        unused: fn(&T) -> &Self,
        release: fn(&T),
    ) -> Result<(), Error> {
        let weak = Arc::downgrade(owner);
        let thread = std::thread::Builder::new().name("views".into()).stack_size(STACK);
        let started = thread.spawn(move || watch(&weak, unused, release));
        let handle = started.map_err(|error| Error::retry(format!("no thread: {error}")))?;
        // Set once: it is called once.
        let _ = unused(owner).thread.set(handle.thread().clone());
        Ok(())
    }

    /// Wakes the thread: also when its owner is gone, for it to end.
    pub fn wake(&self) {
        self.thread.get().into_iter().for_each(Thread::unpark);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u64>> {
        // Nothing under it panics.
        self.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn watch<T>(owner: &Weak<T>, unused: fn(&T) -> &Unused, release: fn(&T)) {
    let mut idle = 0;
    loop {
        std::thread::sleep(LINGER);
        let Some(living) = owner.upgrade() else { return };
        let books = unused(&living);
        idle = if books.lock().is_empty() { idle + 1 } else { 0 };
        if idle < IDLE_LOOKS {
            release(&living);
            continue;
        }
        books.asleep.store(true, SeqCst);
        // Whoever has added one before that has woken nobody.
        if !books.lock().is_empty() {
            books.asleep.store(false, SeqCst);
            continue;
        }
        drop(living);
        // Also when there was no reason to wake: then it looks once more.
        std::thread::park();
        idle = 0;
    }
}

#[cfg(test)]
mod tests {
    //! Goal: whatever is let go of is told, also after a long silence; the thread ends with its owner. Method: an owner that
    //! writes down what it is to tell.
    use std::sync::mpsc;

    use super::*;

    struct Owner {
        unused: Unused,
        told: Mutex<mpsc::Sender<Vec<u64>>>,
    }

    impl Drop for Owner {
        fn drop(&mut self) {
            self.unused.wake();
        }
    }

    fn release(owner: &Owner) {
        let pins = owner.unused.take();
        if !pins.is_empty() {
            owner.told.lock().expect("nobody panics").send(pins).expect("the test listens");
        }
    }

    #[test]
    fn all_is_told_and_the_thread_ends() {
        let (told, heard) = mpsc::channel();
        let owner = Arc::new(Owner { unused: Unused::default(), told: Mutex::new(told) });
        Unused::watch(&owner, |owner| &owner.unused, release).expect("a thread");
        for pin in 0..3 {
            owner.unused.add(pin);
            assert_eq!(heard.recv().expect("it is told"), [pin]);
            // Until it sleeps.
            while !owner.unused.asleep.load(SeqCst) {
                std::thread::yield_now();
            }
        }
        drop(owner);
        // The sender goes with the owner: nobody holds it.
        assert!(heard.recv().is_err());
    }
}

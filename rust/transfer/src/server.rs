//! Accepting connections and owning their threads, for the daemon and for the conductor's endpoint.

use std::collections::HashMap;
use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use nix::poll::{PollFd, PollFlags, poll};

use crate::config::resolve;
use crate::error::Error;
use crate::link::{Link, Stream, retry, set_buffers};
use crate::mailbox::poll_timeout;

/// Connections that may stand at once; one more is closed at once.
const CONNECTION_LIMIT: usize = 1024;

/// All threads of a daemon or an endpoint, each with the link that ends it.
#[derive(Default)]
pub struct Threads {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    stopping: bool,
    next: u64,
    links: HashMap<u64, Link>,
    handles: Vec<JoinHandle<()>>,
}

impl Threads {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // No code that could panic runs under the lock, so a poisoned state is still whole.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number that no other connection of this owner has.
    pub fn number(&self) -> u64 {
        let mut inner = self.lock();
        inner.next += 1;
        inner.next
    }

    /// Runs `work` on a thread that `link.close` ends. Refused while stopping and at the limit of connections.
    pub fn spawn(self: &Arc<Self>, name: &str, link: &Link, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let mut inner = self.lock();
        if inner.stopping {
            return Err(Error::retry("stopping"));
        }
        if inner.links.len() >= CONNECTION_LIMIT {
            return Err(Error::retry(format!("{CONNECTION_LIMIT} connections stand already")));
        }
        inner.next += 1;
        let id = inner.next;
        let threads = self.clone();
        let handle = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                let _forget = Forget { threads, id };
                work();
            })
            .map_err(|error| Error::retry(format!("no thread: {error}")))?;
        inner.links.insert(id, link.clone());
        inner.handles.retain(|handle| !handle.is_finished());
        inner.handles.push(handle);
        Ok(())
    }

    /// Tells all threads to end, and starts no more.
    pub fn close(&self, reason: &str) {
        let mut inner = self.lock();
        inner.stopping = true;
        inner.links.values().for_each(|link| link.close(reason));
    }

    /// True once `close` or `stop` was called.
    pub fn is_closed(&self) -> bool {
        self.lock().stopping
    }

    /// Ends all threads and waits for them. Must not be called on one of them.
    pub fn stop(&self, reason: &str) {
        self.close(reason);
        let handles = std::mem::take(&mut self.lock().handles);
        for handle in handles {
            // A thread's panic has been printed by the hook; the others must still be waited for.
            let _ = handle.join();
        }
    }
}

/// Takes a thread's link out of the list, however the thread ends.
struct Forget {
    threads: Arc<Threads>,
    id: u64,
}

impl Drop for Forget {
    fn drop(&mut self) {
        self.threads.lock().links.remove(&self.id);
    }
}

/// A socket that connections come in by.
pub enum Listener {
    /// For peers.
    Tcp(TcpListener),
    /// For local workers.
    Unix(UnixListener),
}

impl Listener {
    /// Binds `host:port`.
    ///
    /// # Errors
    /// Give up, with what to do.
    pub fn tcp(listen: &str) -> Result<(Self, std::net::SocketAddr), Error> {
        let refuse = |error: io::Error| match error.kind() {
            io::ErrorKind::AddrInUse => Error::give_up(format!(
                "{listen} is in use: end the process that listens there, or choose another port (0: any free one)"
            )),
            _ => Error::give_up(format!("cannot listen at {listen}: {error}")),
        };
        let listener = TcpListener::bind(&resolve(listen)?[..]).map_err(refuse)?;
        listener.set_nonblocking(true).map_err(refuse)?;
        // Accepted sockets inherit the buffers, and the window is negotiated from them.
        set_buffers(&listener);
        let address = listener.local_addr().map_err(refuse)?;
        Ok((Self::Tcp(listener), address))
    }

    /// Binds a unix socket that only this user can reach. A dead daemon's socket is replaced, a living one's is not.
    ///
    /// # Errors
    /// Give up, with what to do.
    pub fn unix(path: &Path) -> Result<Self, Error> {
        let refuse = |error: io::Error| Error::give_up(format!("cannot listen at {}: {error}", path.display()));
        if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(refuse)?;
            let mode = std::fs::metadata(directory).map_err(refuse)?.permissions().mode();
            if mode & 0o022 != 0 {
                return Err(Error::give_up(format!(
                    "others may write to {}: put the socket into a directory with mode 0700",
                    directory.display()
                )));
            }
        }
        if UnixStream::connect(path).is_ok() {
            return Err(Error::give_up(format!(
                "another daemon listens at {}: end it, or choose another socket",
                path.display()
            )));
        }
        match std::fs::remove_file(path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(refuse(error)),
        }
        let listener = UnixListener::bind(path).map_err(refuse)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).map_err(refuse)?;
        listener.set_nonblocking(true).map_err(refuse)?;
        Ok(Self::Unix(listener))
    }

    fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Tcp(listener) => listener.accept().map(|(stream, _)| Stream::Tcp(stream)),
            Self::Unix(listener) => listener.accept().map(|(stream, _)| Stream::Unix(stream)),
        }
    }
}

/// Accepts until `link` is closed. `welcome` starts a thread for each connection.
pub fn accept_all(listeners: &[Listener], link: &Link, mut welcome: impl FnMut(Stream)) {
    while !link.is_closed() {
        link.wake().clear();
        let mut wait = vec![PollFd::new(link.wake().as_fd(), PollFlags::POLLIN)];
        wait.extend(listeners.iter().map(|listener| match listener {
            Listener::Tcp(listener) => PollFd::new(listener.as_fd(), PollFlags::POLLIN),
            Listener::Unix(listener) => PollFd::new(listener.as_fd(), PollFlags::POLLIN),
        }));
        if link.is_closed() {
            return;
        }
        // An error here is an interrupted call: look again.
        let _ = poll(&mut wait, poll_timeout(None));
        for listener in listeners {
            match listener.accept() {
                Ok(stream) => welcome(stream),
                Err(error) if retry(&error) => {}
                Err(error) => {
                    tracing::warn!("accepting: {error}");
                    // Out of descriptors, most likely: the connection stays in the queue, and polling would spin.
                    std::thread::sleep(std::time::Duration::from_millis(50));
                }
            }
        }
    }
}

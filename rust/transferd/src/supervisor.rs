//! What systemd is told by whoever it started with `Type=notify`: one datagram a state, to the socket in `NOTIFY_SOCKET`
//! (`man 3 sd_notify`). Without that variable nobody is told anything.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The daemon serves.
pub fn ready(status: &str) {
    tell(&format!("READY=1\nSTATUS={status}\n"));
}

/// The daemon is about to stop, which takes at most so long.
pub fn stopping(status: &str, within: Duration) {
    tell(&format!("STOPPING=1\nSTATUS={status}\nEXTEND_TIMEOUT_USEC={}\n", within.as_micros()));
}

fn tell(state: &str) {
    if let Some(socket) = std::env::var_os("NOTIFY_SOCKET")
        && let Err(error) = send(&socket, state)
    {
        tracing::warn!("the supervisor at {} was not told: {error}", socket.to_string_lossy());
    }
}

fn send(socket: &OsStr, state: &str) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        [b'/', ..] => SocketAddr::from_pathname(socket)?,
        _ => return Err(io::ErrorKind::Unsupported.into()),
    };
    let sender = UnixDatagram::unbound()?;
    // A supervisor that does not read must not hold the daemon up.
    sender.set_nonblocking(true)?;
    sender.send_to_addr(state.as_bytes(), &address).map(|_| ())
}

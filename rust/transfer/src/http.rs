//! Just enough of HTTP/1.1 for metrics and health checks: GET and HEAD, one request a connection.
//!
//! A request is read up to a limit of bytes and of time, by at most so many connections at once; whoever exceeds one is
//! told so, or cut. Nothing is read beyond the head: there is nothing to upload.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, poll};

use crate::error::Error;
use crate::link::{Link, Stream, retry};
use crate::mailbox::poll_timeout;
use crate::server::{Listener, Threads, accept_all};

/// Longest head of a request: scrapers send some hundred bytes, proxies in front of them a few thousand.
pub const HEAD_LIMIT: usize = 8 << 10;
/// A connection that is not over by then is cut.
const WITHIN: Duration = Duration::from_secs(5);
/// Connections at once: some scrapers and checkers, twice over. A request takes well below a millisecond.
const CONNECTIONS: usize = 16;
/// What is read of a request that was answered early, so that the answer is not lost with it.
const REST_LIMIT: usize = 64 << 10;

/// What is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    /// Such as 200.
    pub status: u16,
    /// The body's media type.
    pub kind: &'static str,
    /// The body.
    pub body: String,
}

impl Response {
    /// Plain text.
    pub fn text(status: u16, body: String) -> Self {
        Self { status, kind: "text/plain; version=0.0.4; charset=utf-8", body }
    }

    /// JSON.
    pub fn json(status: u16, body: String) -> Self {
        Self { status, kind: "application/json", body }
    }

    /// As it is sent. Without a body if only the head was asked for.
    pub fn encode(&self, head_only: bool) -> Vec<u8> {
        let reason = match self.status {
            200 => "OK",
            400 => "Bad Request",
            401 => "Unauthorized",
            404 => "Not Found",
            405 => "Method Not Allowed",
            408 => "Request Timeout",
            431 => "Request Header Fields Too Large",
            503 => "Service Unavailable",
            505 => "HTTP Version Not Supported",
            _ => "Error",
        };
        let allow = match self.status {
            401 => "WWW-Authenticate: Bearer\r\n",
            405 => "Allow: GET, HEAD\r\n",
            _ => "",
        };
        let head = format!(
            "HTTP/1.1 {} {reason}\r\nContent-Type: {}\r\nContent-Length: {}\r\n{allow}Cache-Control: no-store\r\n\
             Connection: close\r\n\r\n",
            self.status,
            self.kind,
            self.body.len()
        );
        let mut bytes = head.into_bytes();
        if !head_only {
            bytes.extend(self.body.as_bytes());
        }
        bytes
    }
}

/// A request that can be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Without its query.
    pub path: &'a str,
    /// HEAD.
    pub head_only: bool,
    /// What `Authorization: Bearer` has.
    pub bearer: Option<&'a str>,
}

/// Reads the request at the front of `bytes`; `None` if more are needed.
///
/// # Errors
/// What to answer instead.
pub fn parse(bytes: &[u8]) -> Result<Option<Request<'_>>, Response> {
    let refuse = |status, why: &str| Err(Response::text(status, format!("{why}\n")));
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n");
    // A first line that cannot become one of ours is answered at once: who speaks another protocol may wait for us.
    let line = bytes.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let whole_line = line.len() < bytes.len();
    if !whole_line {
        let plausible = line.iter().all(|byte| (b' '..=b'~').contains(byte) || *byte == b'\r');
        return match (plausible, bytes.len() >= HEAD_LIMIT) {
            (false, _) => refuse(400, "this is not HTTP"),
            (true, true) => refuse(431, "the request is too long"),
            (true, false) => Ok(None),
        };
    }
    let text = std::str::from_utf8(line).ok().and_then(|line| line.strip_suffix('\r'));
    let words: Vec<&str> = text.unwrap_or_default().split(' ').collect();
    let [method, target, version] = words[..] else { return refuse(400, "this is not HTTP") };
    if !matches!(version, "HTTP/1.1" | "HTTP/1.0") {
        let known = version.starts_with("HTTP/");
        return if known { refuse(505, "HTTP/1.1 is spoken here") } else { refuse(400, "this is not HTTP") };
    }
    if !matches!(method, "GET" | "HEAD") {
        return refuse(405, "there is nothing to do here, only to look: GET or HEAD");
    }
    if !target.starts_with('/') || !target.bytes().all(|byte| (b'!'..=b'~').contains(&byte)) {
        return refuse(400, "this is no path");
    }
    match end {
        Some(end) => {
            let path = target.split(['?', '#']).next().unwrap_or(target);
            let mut keys = bytes[..end].split(|&byte| byte == b'\n').skip(1).filter_map(authorization);
            let bearer = keys.next();
            if keys.next().is_some() {
                return refuse(400, "there are several Authorization headers: send one");
            }
            Ok(Some(Request { path, head_only: method == "HEAD", bearer: bearer.and_then(bearer_of) }))
        }
        None if bytes.len() >= HEAD_LIMIT => refuse(431, "the request is too long"),
        None => Ok(None),
    }
}

/// The value of an `Authorization` line.
fn authorization(line: &[u8]) -> Option<&str> {
    let (name, value) = std::str::from_utf8(line).ok()?.split_once(':')?;
    name.eq_ignore_ascii_case("authorization").then(|| value.trim())
}

/// The key in it, if it is of that scheme.
fn bearer_of(value: &str) -> Option<&str> {
    let (scheme, key) = value.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

/// Answers at this listener until `link` is closed.
///
/// # Errors
/// Retry: no thread is to be had.
pub fn serve(
    listener: Listener,
    link: &Link,
    threads: &Arc<Threads>,
    answer: impl Fn(&Request<'_>) -> Response + Send + Sync + 'static,
) -> Result<(), Error> {
    let (until, within, answer) = (link.clone(), threads.clone(), Arc::new(answer));
    let open = Arc::new(AtomicUsize::new(0));
    threads.spawn("http-accept", link, move || {
        accept_all(&[listener], &until, |stream| {
            let Stream::Tcp(stream) = stream else { return };
            let Ok(link) = Link::new() else { return };
            let place = Place(open.clone());
            if place.0.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS {
                let full = Response::text(503, format!("{CONNECTIONS} connections stand already\n"));
                // Who gets no place gets no time either; if it is not even to be told, it sees the end.
                let _ = stream.set_nonblocking(true).and_then(|()| (&stream).write(&full.encode(false)));
                return;
            }
            let (at, to) = (link.clone(), answer.clone());
            let started = within.spawn("http", &link, move || {
                let _place = place;
                if let Err(error) = converse(&stream, &at, &*to) {
                    tracing::debug!("an HTTP connection: {error}");
                }
            });
            if let Err(error) = started {
                tracing::debug!("an HTTP connection was closed: {error}");
            }
        });
    })
}

/// A connection's place among those that may stand.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One request and its answer.
fn converse(mut stream: &TcpStream, link: &Link, answer: impl Fn(&Request<'_>) -> Response) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    let until = Instant::now() + WITHIN;
    let mut head = Vec::new();
    let mut buffer = [0; 2048];
    let bytes = loop {
        match parse(&head) {
            Ok(Some(request)) => break answer(&request).encode(request.head_only),
            Err(refusal) => break refusal.encode(false),
            Ok(None) => {}
        }
        match stream.read(&mut buffer) {
            Ok(0) if head.is_empty() => return Ok(()),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => head.extend(&buffer[..count]),
            Err(error) if retry(&error) => {
                if !wait(stream, link, PollFlags::POLLIN, until)? {
                    break Response::text(408, "the request did not come in time\n".into()).encode(false);
                }
            }
            Err(error) => return Err(error),
        }
    };
    // An answer that is late because its request was still has a moment.
    let until = until.max(Instant::now() + WITHIN / 5);
    let mut sent = 0;
    while sent < bytes.len() {
        match stream.write(&bytes[sent..]) {
            Ok(count) => sent += count,
            Err(error) if retry(&error) && wait(stream, link, PollFlags::POLLOUT, until)? => {}
            Err(error) => return Err(error),
        }
    }
    stream.shutdown(Shutdown::Write)?;
    // Closing over unread input would take the answer back.
    let mut rest = 0;
    while rest < REST_LIMIT {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => rest += count,
            Err(error) if retry(&error) && wait(stream, link, PollFlags::POLLIN, until)? => {}
            Err(_) => break,
        }
    }
    Ok(())
}

/// Waits for the socket; false if the time is over.
fn wait(stream: &TcpStream, link: &Link, events: PollFlags, until: Instant) -> io::Result<bool> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Ok(false);
    }
    let mut wait = [PollFd::new(stream.as_fd(), events), PollFd::new(link.wake().as_fd(), PollFlags::POLLIN)];
    // An error here is an interrupted call: the caller tries again.
    let _ = poll(&mut wait, poll_timeout(Some(left)));
    if link.is_closed() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(true) }
}

#[cfg(test)]
mod tests {
    //! Goal: good requests are understood however they are cut, bad ones get an answer, and nothing panics or waits for more
    //! than its limit. Method: examples, and proptest over cuts and noise.
    use super::*;
    use proptest::prelude::*;

    fn status(bytes: &[u8]) -> u16 {
        parse(bytes).expect_err("refused").status
    }

    #[test]
    fn requests_and_refusals() {
        let path = |text: &'static str| parse(text.as_bytes()).expect("good").expect("whole");
        assert_eq!(path("GET /metrics HTTP/1.1\r\n\r\n"), Request { path: "/metrics", head_only: false, bearer: None });
        assert_eq!(path("HEAD / HTTP/1.0\r\nHost: x\r\n\r\n"), Request { path: "/", head_only: true, bearer: None });
        assert_eq!(path("GET /a?b=c#d HTTP/1.1\r\nA: b\r\n\r\nrest").path, "/a");
        let bearer = |text: &'static str| parse(text.as_bytes()).expect("good").expect("whole").bearer;
        assert_eq!(bearer("GET / HTTP/1.1\r\nA: b\r\nauthorization:  bearer abc \r\n\r\n"), Some("abc"));
        assert_eq!(bearer("GET / HTTP/1.1\r\nAuthorization: Basic abc\r\n\r\n"), None);
        assert_eq!(bearer("GET / HTTP/1.1\r\nAuthorization: abc\r\n\r\nAuthorization: Bearer x\r\n\r\n"), None);
        assert_eq!(status(b"GET / HTTP/1.1\r\nAuthorization: Bearer a\r\nAUTHORIZATION: Bearer b\r\n\r\n"), 400);
        assert_eq!(parse(b""), Ok(None));
        assert_eq!(parse(b"GET /metrics HTTP/1.1\r\nHost: x\r\n"), Ok(None));
        assert_eq!(status(b"POST / HTTP/1.1\r\n"), 405);
        assert_eq!(status(b"GET / HTTP/2\r\n"), 505);
        assert_eq!(status(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), 505);
        for wrong in [
            "hello\n",
            "\r\n",
            "GET  / HTTP/1.1\r\n",
            "GET / HTTP/1.1\n",
            "GET / gopher\r\n",
            "GET x HTTP/1.1\r\n",
            "\u{16}\u{3}",
        ] {
            assert_eq!(status(wrong.as_bytes()), 400, "{wrong:?}");
        }
        assert_eq!(status("GET /ü HTTP/1.1\r\n".as_bytes()), 400);
        assert_eq!(status(&[b'G'; HEAD_LIMIT]), 431);
        let long = format!("GET / HTTP/1.1\r\nCookie: {}", "x".repeat(HEAD_LIMIT));
        assert_eq!(status(long.as_bytes()), 431);
        let refusal =
            String::from_utf8(parse(b"PUT / HTTP/1.1\r\n").expect_err("refused").encode(false)).expect("text");
        assert!(
            refusal.starts_with("HTTP/1.1 405 Method Not Allowed\r\n") && refusal.contains("\r\nAllow: GET, HEAD\r\n")
        );
    }

    proptest! {
        #[test]
        fn a_cut_request_is_waited_for(path in "/[a-z/._-]{0,40}", headers in proptest::collection::vec("[A-Za-z-]{1,9}: [ -~]{0,20}", 0..5),
                                       cut in 0.0..1.0f64) {
            let mut text = format!("GET {path} HTTP/1.1\r\n");
            headers.iter().for_each(|header| text += &format!("{header}\r\n"));
            text += "\r\n";
            let request = parse(text.as_bytes()).expect("good").expect("whole");
            prop_assert_eq!(request.path, &path[..]);
            let cut = ((text.len() as f64) * cut) as usize;
            prop_assert_eq!(parse(&text.as_bytes()[..cut]), Ok(None));
        }

        #[test]
        fn noise_is_answered_or_waited_for(noise in proptest::collection::vec(any::<u8>(), 0..200), tail in 0..HEAD_LIMIT) {
            let _ = parse(&noise);
            // However it goes on, at the limit there is an answer.
            let mut long = noise;
            long.resize(HEAD_LIMIT + tail, b'x');
            prop_assert!(!matches!(parse(&long), Ok(None)));
        }
    }
}

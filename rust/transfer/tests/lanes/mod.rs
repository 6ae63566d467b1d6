//! A sender and a receiver of the tcp transport with nothing above them: what a daemon does for its lanes, and no more.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use pyengine_transfer::link::{Connection, Link, Stream, nonce, now};
use pyengine_transfer::memory::Arena;
use pyengine_transfer::region::Regions;
use pyengine_transfer::server::{Listener, Threads, accept_all};
use pyengine_transfer::session::Session;
use pyengine_transfer::transport::Transport;
use pyengine_transfer::transport::tcp::{TcpTransport, serve_lane};
use pyengine_transfer::types::NodeAddress;

/// The key of both sides.
pub const KEY: [u8; 32] = [7; 32];

/// Accepts lanes into an arena, until it is killed or dropped.
pub struct Receiver {
    /// Where.
    pub address: NodeAddress,
    accepting: Link,
    threads: Arc<Threads>,
}

impl Receiver {
    /// Listens on a free port.
    pub fn new(arena: Arc<Arena>) -> Self {
        let (listener, at) = Listener::tcp("127.0.0.1:0").expect("binds");
        let address = NodeAddress { node: "destination".into(), address: at.to_string(), incarnation: 1 };
        let mut transport = TcpTransport::new(KEY, address.clone(), Box::new(|| {}));
        transport.register(Regions::of(arena));
        let shared = transport.shared();
        let (threads, accepting) = (Arc::new(Threads::default()), Link::new().expect("an eventfd"));
        let (all, until, me) = (threads.clone(), accepting.clone(), address.clone());
        let accept = move || {
            accept_all(&[listener], &until, |stream| {
                let (shared, me, link) = (shared.clone(), me.clone(), Link::new().expect("an eventfd"));
                let within = link.clone();
                let serve = move || serve(&shared, me, stream, &within);
                all.spawn("lane", &link, serve).expect("not stopping");
            });
        };
        threads.spawn("accept", &accepting, accept).expect("starts");
        Self { address, accepting, threads }
    }

    /// Ends the listener and all lanes.
    pub fn kill(&self) {
        self.accepting.close("killed");
        self.threads.stop("killed");
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.kill();
    }
}

fn serve(shared: &pyengine_transfer::transport::tcp::Shared, me: NodeAddress, stream: Stream, link: &Link) {
    let session = Session::accept(KEY, me, nonce().expect("random"), now());
    let mut connection = Connection::new(stream, session, link.clone()).expect("a socket");
    if connection.handshake().is_ok() {
        connection.welcome();
        if let Ok(stream) = connection.into_lane() {
            // How a lane ends is the sender's to see.
            let _ = serve_lane(shared, &stream, link);
        }
    }
}

/// A sending transport, and what tells that completions wait.
pub fn sender(arena: Arc<Arena>) -> (TcpTransport, mpsc::Receiver<()>) {
    let (wake, woken) = mpsc::channel();
    let wake = Mutex::new(wake);
    let me = NodeAddress { node: "source".into(), address: "127.0.0.1:1".into(), incarnation: 2 };
    let notify = Box::new(move || {
        // Nobody listens any more when the test is over.
        let _ = wake.lock().expect("whole").send(());
    });
    let mut transport = TcpTransport::new(KEY, me, notify);
    transport.register(Regions::of(arena));
    (transport, woken)
}

/// What a completion may take before the test fails.
pub const PATIENCE: Duration = Duration::from_secs(60);

//! A sender and a receiver of the tcp transport with nothing above them: what a daemon does for its lanes, and no more.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use pyengine_transfer::link::{Connection, Link, Stream, nonce, now};
use pyengine_transfer::memory::Arena;
use pyengine_transfer::messages::Purpose;
use pyengine_transfer::region::Regions;
use pyengine_transfer::server::{Listener, Threads, accept_all};
use pyengine_transfer::session::{Event, Session};
use pyengine_transfer::transport::Transport;
use pyengine_transfer::transport::lanes::{Acceptor, LaneTransport, Settings};
use pyengine_transfer::transport::tcp;
use pyengine_transfer::types::NodeAddress;

/// The key of both sides.
pub const KEY: [u8; 32] = [7; 32];

/// Accepts lanes into an arena, until it is killed or dropped.
pub struct Receiver {
    /// Where.
    pub address: NodeAddress,
    accepting: Link,
    threads: Arc<Threads>,
    /// Its I/O threads serve the lanes.
    transport: Mutex<Option<LaneTransport>>,
}

impl Receiver {
    /// Listens on a free port.
    pub fn new(arena: Arc<Arena>) -> Self {
        let (listener, at) = Listener::tcp("127.0.0.1:0").expect("binds");
        let address = NodeAddress { node: "destination".into(), address: at.to_string(), incarnation: 1 };
        let mut transport = transport(&address, Box::new(|| {}));
        transport.register(Regions::of(arena));
        let acceptor = transport.acceptor();
        let (threads, accepting) = (Arc::new(Threads::default()), Link::new().expect("an eventfd"));
        let (all, until, me) = (threads.clone(), accepting.clone(), address.clone());
        let accept = move || {
            accept_all(&[listener], &until, |stream| {
                let (acceptor, me, link) = (acceptor.clone(), me.clone(), Link::new().expect("an eventfd"));
                let within = link.clone();
                let serve = move || serve(&acceptor, me, stream, &within);
                all.spawn("lane", &link, serve).expect("not stopping");
            });
        };
        threads.spawn("accept", &accepting, accept).expect("starts");
        Self { address, accepting, threads, transport: Mutex::new(Some(transport)) }
    }

    /// Ends the listener and all lanes.
    pub fn kill(&self) {
        self.accepting.close("killed");
        self.threads.stop("killed");
        drop(self.transport.lock().expect("whole").take());
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.kill();
    }
}

fn serve(acceptor: &Acceptor, me: NodeAddress, stream: Stream, link: &Link) {
    let session = Session::accept(KEY, me, nonce().expect("random"), now());
    let mut connection = Connection::new(stream, session, link.clone()).expect("a socket");
    if let Ok(Event::Proven(Purpose::Lane { node })) = connection.handshake() {
        connection.welcome();
        if let Ok(stream) = connection.into_lane() {
            // It fails only when the test is over.
            let _ = acceptor.adopt(stream, &node);
        }
    }
}

fn transport(me: &NodeAddress, notify: Box<dyn Fn() + Send + Sync>) -> LaneTransport {
    // A short queue, so that tests can fill it.
    let settings = Settings { queue_copies: 64, ..Settings::default() };
    tcp::transport(KEY, me.clone(), settings, notify).expect("threads and descriptors")
}

/// A sending transport, and what tells that completions wait.
pub fn sender(arena: Arc<Arena>) -> (LaneTransport, mpsc::Receiver<()>) {
    let (wake, woken) = mpsc::channel();
    let wake = Mutex::new(wake);
    let me = NodeAddress { node: "source".into(), address: "127.0.0.1:1".into(), incarnation: 2 };
    let notify = Box::new(move || {
        // Nobody listens any more when the test is over.
        let _ = wake.lock().expect("whole").send(());
    });
    let mut transport = transport(&me, notify);
    transport.register(Regions::of(arena));
    (transport, woken)
}

/// What a completion may take before the test fails.
pub const PATIENCE: Duration = Duration::from_secs(60);

//! Senders and receivers of the lane transports with nothing above them: what a daemon does for its lanes, and no more.

// Not every test that includes this file needs all of it.
#![allow(dead_code)]

use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use pyengine_transfer::incarnation::new_incarnation;
use pyengine_transfer::link::{Connection, Link, Stream, nonce, now};
use pyengine_transfer::memory::Arena;
use pyengine_transfer::messages::Purpose;
use pyengine_transfer::region::Regions;
use pyengine_transfer::server::{Listener, Threads, accept_all};
use pyengine_transfer::session::{Event, Session};
use pyengine_transfer::tls::Side;
use pyengine_transfer::transport::Transport;
use pyengine_transfer::transport::fence::Fences;
use pyengine_transfer::transport::lanes::{Acceptor, LaneTransport, Settings};
use pyengine_transfer::transport::shm::{self as shm_transport, ShmTransport};
use pyengine_transfer::transport::tcp;
use pyengine_transfer::types::{Incarnation, NodeAddress};

/// The key of both sides.
pub const KEY: [u8; 32] = [7; 32];

/// Accepts lanes into an arena, until it is killed or dropped.
pub struct Receiver {
    /// Where.
    pub address: NodeAddress,
    fences: Fences,
    accepting: Link,
    threads: Arc<Threads>,
    /// Its I/O threads serve the lanes.
    transport: Mutex<Option<LaneTransport>>,
}

impl Receiver {
    /// Listens on a free port.
    pub fn new(arena: Arc<Arena>) -> Self {
        Self::with(Regions::of(arena))
    }

    /// Serves these regions.
    pub fn with(regions: Arc<Regions>) -> Self {
        Self::life(regions, 1)
    }

    /// Serves these regions, as this life of the node.
    pub fn life(regions: Arc<Regions>, incarnation: Incarnation) -> Self {
        Self::start("127.0.0.1:0", regions, incarnation, short_queue())
    }

    /// Serves these regions there.
    pub fn at(listen: &str, regions: Arc<Regions>, settings: Settings) -> Self {
        Self::start(listen, regions, 1, settings)
    }

    /// Serves these regions there, as this life of the node.
    pub fn start(listen: &str, regions: Arc<Regions>, incarnation: Incarnation, settings: Settings) -> Self {
        let (listener, at) = Listener::tcp(listen).expect("binds");
        let address = NodeAddress { node: "destination".into(), address: at.to_string(), incarnation };
        let tls = settings.tls;
        let fences = Fences::default();
        let mut transport = transport(&address, settings, fences.clone(), Box::new(|| {}));
        transport.register(regions);
        let acceptor = transport.acceptor();
        let (threads, accepting) = (Arc::new(Threads::default()), Link::new().expect("an eventfd"));
        let (all, until, me) = (threads.clone(), accepting.clone(), address.clone());
        let accept = move || {
            accept_all(&[listener], &until, |stream| {
                let (acceptor, me, link) = (acceptor.clone(), me.clone(), Link::new().expect("an eventfd"));
                let within = link.clone();
                let serve = move || serve(&acceptor, me, stream.secured(tls, Side::Acceptor).expect("a key"), &within);
                all.spawn("lane", &link, serve).expect("not stopping");
            });
        };
        threads.spawn("accept", &accepting, accept).expect("starts");
        Self { address, fences, accepting, threads, transport: Mutex::new(Some(transport)) }
    }

    /// Ends the lanes of a peer.
    pub fn close_lanes(&self, node: &str) {
        let closing = self.fences.close(&node.to_owned(), Incarnation::MAX, "closed by a test");
        while !closing.is_over() {
            std::thread::yield_now();
        }
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
    if let Ok(Event::Proven(Purpose::Lane { node, path })) = connection.handshake() {
        // It is refused when the test is over, or wants that.
        let _ = acceptor.welcome(connection, &node, path);
    }
}

fn transport(
    me: &NodeAddress,
    settings: Settings,
    fences: Fences,
    notify: Box<dyn Fn() + Send + Sync>,
) -> LaneTransport {
    tcp::transport(KEY, me.clone(), settings, fences, notify).expect("threads and descriptors")
}

/// A short queue, so that tests can fill it.
pub fn short_queue() -> Settings {
    Settings { queue_copies: 64, ..Settings::default() }
}

/// A `notify`, and what tells that it was called.
pub fn alarm() -> (Box<dyn Fn() + Send + Sync>, mpsc::Receiver<()>) {
    let (wake, woken) = mpsc::channel();
    let wake = Mutex::new(wake);
    let notify = Box::new(move || {
        // Nobody listens any more when the test is over.
        let _ = wake.lock().expect("whole").send(());
    });
    (notify, woken)
}

/// An engine's end of the shm transport under this name, in a life that no other test of this host has.
pub fn shm(node: &str, arena: Arc<Arena>) -> (NodeAddress, ShmTransport, mpsc::Receiver<()>) {
    shm_with(node, Regions::of(arena), short_queue())
}

/// The same with any regions and settings.
pub fn shm_with(
    node: &str,
    regions: Arc<Regions>,
    settings: Settings,
) -> (NodeAddress, ShmTransport, mpsc::Receiver<()>) {
    let me = NodeAddress { node: node.into(), address: String::new(), incarnation: new_incarnation() };
    let (notify, woken) = alarm();
    let mut transport =
        ShmTransport::new(KEY, me.clone(), settings, Fences::default(), notify).expect("threads and descriptors");
    transport.register(regions);
    (me, transport, woken)
}

/// A sending transport, and what tells that completions wait.
pub fn sender(arena: Arc<Arena>) -> (LaneTransport, mpsc::Receiver<()>) {
    sender_with(Regions::of(arena), short_queue())
}

/// The same with any regions and settings.
pub fn sender_with(regions: Arc<Regions>, settings: Settings) -> (LaneTransport, mpsc::Receiver<()>) {
    let (notify, woken) = alarm();
    let mut transport = transport(&source(), settings, Fences::default(), notify);
    transport.register(regions);
    (transport, woken)
}

/// A raw connection that has proven itself as that path of what `sender` makes.
pub fn raw_lane(to: &NodeAddress, path: u64) -> TcpStream {
    let stream = TcpStream::connect(&to.address).expect("listening");
    let keep = stream.try_clone().expect("clones");
    assert!(prove(Stream::Tcp(stream), path));
    keep.set_nonblocking(false).expect("a socket");
    keep.set_read_timeout(Some(PATIENCE)).expect("a socket");
    keep
}

/// The same on the host.
pub fn raw_shm_lane(to: &NodeAddress, path: u64) -> UnixStream {
    let stream = shm_transport::reach(to).expect("listening");
    let keep = stream.try_clone().expect("clones");
    assert!(prove(Stream::Unix(stream), path));
    keep.set_nonblocking(false).expect("a socket");
    keep.set_read_timeout(Some(PATIENCE)).expect("a socket");
    keep
}

/// Makes a connection that path. False: it is refused.
pub fn prove(stream: Stream, path: u64) -> bool {
    let purpose = Purpose::Lane { node: source(), path };
    let session = Session::dial(KEY, purpose, nonce().expect("random"), now());
    let mut connection = Connection::new(stream, session, Link::new().expect("an eventfd")).expect("a socket");
    matches!(connection.handshake(), Ok(Event::Established(_))) && connection.into_lane().is_ok()
}

/// Who sends.
pub fn source() -> NodeAddress {
    NodeAddress { node: "source".into(), address: "127.0.0.1:1".into(), incarnation: 2 }
}

/// What a completion may take before the test fails.
pub const PATIENCE: Duration = Duration::from_secs(60);

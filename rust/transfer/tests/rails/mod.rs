//! Nodes with an rdma transport and nothing above it: what a daemon does for its paths, and no more.
//!
//! Where there are devices, a test's two sides use different ones, as two hosts would: of four rails, the first two and
//! the last two. `tests/rdma/vm.sh` makes four.

// Each test program uses a part of this.
#![allow(dead_code)]

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use pyengine_transfer::link::{Connection, Link, Stream, nonce, now};
use pyengine_transfer::messages::Purpose;
use pyengine_transfer::region::Regions;
use pyengine_transfer::server::{Listener, Threads, accept_all};
use pyengine_transfer::session::{Event, Session};
use pyengine_transfer::transport::Transport;
use pyengine_transfer::transport::fence::Fences;
use pyengine_transfer::transport::rdma::{self, RdmaTransport, Settings, Shared};
use pyengine_transfer::types::NodeAddress;

/// The key of all sides.
pub const KEY: [u8; 32] = [7; 32];

/// Emulated devices on a busy machine are much slower than real ones.
const SLOWNESS: u32 = 4;

/// What a completion may take before the test fails: the devices are emulated.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Names of the devices here.
pub fn devices() -> Vec<String> {
    let found = std::fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
    let mut names: Vec<String> = found.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Why there is no rdma here, to be printed by a test that then ends. Where it is required, that is a failure.
pub fn absent() -> Option<String> {
    let none = devices().is_empty();
    assert!(!none || std::env::var_os("PYENGINE_TEST_RDMA").is_none(), "no RDMA devices, but they are required");
    none.then(|| "no RDMA devices here: make test-rdma runs this in a VM".into())
}

/// The devices of the sending (0) or receiving (1) side.
pub fn side(which: usize) -> Settings {
    let all = devices();
    let half = (all.len() / 2).max(1);
    let mine = if all.len() < 2 { all } else { all[which * half..(which + 1) * half].to_vec() };
    Settings { devices: mine, slowness: SLOWNESS, ..Settings::default() }
}

/// A node that accepts paths and can make some.
pub struct Node {
    /// Where it listens.
    pub address: NodeAddress,
    /// What peers may name.
    pub regions: Arc<Regions>,
    /// Its own paths.
    pub transport: RdmaTransport,
    /// Has an item when there is something to poll.
    pub woken: mpsc::Receiver<()>,
    accepting: Link,
    threads: Arc<Threads>,
}

impl Node {
    /// Listens on a free port.
    pub fn new(name: &str, incarnation: u64, settings: Settings, regions: Arc<Regions>) -> Self {
        let (listener, at) = Listener::tcp("127.0.0.1:0").expect("binds");
        let address = NodeAddress { node: name.into(), address: at.to_string(), incarnation };
        let (wake, woken) = mpsc::channel();
        let wake = Mutex::new(wake);
        let notify = Box::new(move || {
            // Nobody listens any more when the test is over.
            let _ = wake.lock().expect("whole").send(());
        });
        let mut transport = RdmaTransport::new(KEY, address.clone(), settings, Fences::default(), notify);
        transport.register(regions.clone());
        // Opening emulated devices may take longer than a peer waits for an answer. A test of their absence goes on.
        let _ = transport.available();
        let shared = transport.shared();
        let (threads, accepting) = (Arc::new(Threads::default()), Link::new().expect("an eventfd"));
        let (all, until, me) = (threads.clone(), accepting.clone(), address.clone());
        let accept = move || {
            accept_all(&[listener], &until, |stream| {
                let (shared, me, link) = (shared.clone(), me.clone(), Link::new().expect("an eventfd"));
                let within = link.clone();
                // Refused when the node is being killed.
                let _ = all.spawn("rdma", &link, move || serve(&shared, me, stream, &within));
            });
        };
        threads.spawn("accept", &accepting, accept).expect("starts");
        Self { address, regions, transport, woken, accepting, threads }
    }

    /// Ends the listener and all incoming paths.
    pub fn kill(&self) {
        self.accepting.close("killed");
        self.threads.stop("killed");
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}

fn serve(shared: &Shared, me: NodeAddress, stream: Stream, link: &Link) {
    let mut session = Session::accept(KEY, me, nonce().expect("random"), now());
    session.slow_down(SLOWNESS);
    let mut connection = Connection::new(stream, session, link.clone()).expect("a socket");
    if let Ok(Event::Proven(Purpose::Rdma { node, path })) = connection.handshake() {
        // How a path ends is the initiator's to see.
        let _ = rdma::serve(shared, connection, &node, path, link);
    }
}

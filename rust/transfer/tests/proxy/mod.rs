//! A network that is unkind when told: a proxy between two processes' sockets that flips bytes, stalls, and cuts.

// Not every test that includes this file needs all of it.
#![allow(dead_code)]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// One connection through a proxy.
struct Connection {
    dialler: TcpStream,
    acceptor: TcpStream,
    gate: Arc<Gate>,
}

/// Lets bytes pass, or not, and knows when none will come any more.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    changes: Condvar,
}

#[derive(Default)]
struct GateState {
    closed: bool,
    /// Directions in which all is said.
    over: u32,
}

impl Gate {
    fn change(&self, change: impl FnOnce(&mut GateState)) {
        change(&mut self.state.lock().expect("whole"));
        self.changes.notify_all();
    }

    fn wait_while(&self, condition: impl FnMut(&mut GateState) -> bool) {
        let state = self.state.lock().expect("whole");
        drop(self.changes.wait_while(state, condition).expect("whole"));
    }
}

/// Passes bytes on between diallers of its address and an acceptor.
pub struct Proxy {
    /// Where it listens.
    pub address: String,
    /// Flips the byte this far into the dialler's bytes after the next call; below zero: none.
    pub flip: Arc<AtomicI64>,
    connections: Arc<Mutex<Vec<Connection>>>,
}

impl Proxy {
    /// Before this address.
    pub fn new(to: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
        let address = listener.local_addr().expect("bound").to_string();
        let flip = Arc::new(AtomicI64::new(-1));
        let connections = Arc::<Mutex<Vec<Connection>>>::default();
        let (to, flipping, all) = (to.to_owned(), flip.clone(), connections.clone());
        std::thread::spawn(move || {
            for dialler in listener.incoming().map_while(Result::ok) {
                let Ok(acceptor) = TcpStream::connect(&to) else { continue };
                let twice = |stream: &TcpStream| stream.try_clone().expect("clones");
                let gate = Arc::<Gate>::default();
                let known = Connection { dialler: twice(&dialler), acceptor: twice(&acceptor), gate: gate.clone() };
                all.lock().expect("whole").push(known);
                let (there, back) = (twice(&dialler), twice(&acceptor));
                let (flip, through) = (flipping.clone(), gate.clone());
                std::thread::spawn(move || relay(there, acceptor, Some(&flip), &through));
                std::thread::spawn(move || relay(back, dialler, None, &gate));
            }
        });
        Self { address, flip, connections }
    }

    /// Waits until both ends of the first connection have closed it, and so have taken all that it carried.
    pub fn wait_for_first(&self) {
        let gate = self.connections.lock().expect("whole")[0].gate.clone();
        gate.wait_while(|gate| gate.over < 2);
    }

    fn each(&self, what: impl Fn(&Connection)) {
        self.connections.lock().expect("whole").iter().for_each(what);
    }

    /// Breaks all connections, at both ends.
    pub fn cut(&self) {
        self.each(|connection| {
            let _ = (connection.dialler.shutdown(Shutdown::Both), connection.acceptor.shutdown(Shutdown::Both));
        });
    }

    /// Breaks all connections as far as the dialler sees; what it had sent is still on its way.
    pub fn cut_dialler(&self) {
        self.each(|connection| {
            let _ = connection.dialler.shutdown(Shutdown::Both);
        });
    }

    /// Nothing passes any more on the connections that there are, until `release`.
    pub fn stall(&self) {
        self.each(|connection| connection.gate.change(|gate| gate.closed = true));
    }

    /// All goes on.
    pub fn release(&self) {
        self.each(|connection| connection.gate.change(|gate| gate.closed = false));
    }
}

fn relay(mut from: TcpStream, mut to: TcpStream, flip: Option<&AtomicI64>, gate: &Gate) {
    let mut buffer = [0; 65536];
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        if let Some(flip) = flip {
            let at = flip.load(Ordering::SeqCst);
            if (0..bytes as i64).contains(&at) {
                buffer[at as usize] ^= 4;
                flip.store(-1, Ordering::SeqCst);
            } else if at >= 0 {
                flip.store(at - bytes as i64, Ordering::SeqCst);
            }
        }
        gate.wait_while(|gate| gate.closed);
        // What the other end does not want any more is still taken.
        let _ = to.write_all(&buffer[..bytes]);
    }
    let _ = to.shutdown(Shutdown::Write);
    gate.change(|gate| gate.over += 1);
}

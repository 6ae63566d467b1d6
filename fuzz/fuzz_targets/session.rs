//! Goal: whatever a stranger or a peer sends on a control connection, a session answers or ends; it never panics and never
//! keeps more than a frame. Method: the bytes, cut where they say, into a session that dials or accepts; the first byte
//! picks how far the handshake had come before.
#![no_main]

use libfuzzer_sys::fuzz_target;
use transfer::messages::Purpose;
use transfer::session::{Event, Session};
use transfer::types::NodeAddress;

const KEY: [u8; 32] = [3; 32];

fn node() -> NodeAddress {
    NodeAddress { node: "acceptor".into(), address: "127.0.0.1:1".into(), incarnation: 1 }
}

fuzz_target!(|data: &[u8]| {
    let [how, cut, bytes @ ..] = data else { return };
    let mut dialler = Session::dial(KEY, Purpose::Peer { node: node() }, [1; 32], 0);
    let mut acceptor = Session::accept(KEY, node(), [2; 32], 0);
    let mut events = Vec::new();
    // So many legs of a good handshake, then the bytes.
    for leg in 0..how % 5 {
        let (from, to) = if leg % 2 == 0 { (&mut dialler, &mut acceptor) } else { (&mut acceptor, &mut dialler) };
        to.receive(&from.take_output(), 0, &mut events).expect("both are honest");
        if events.drain(..).any(|event| matches!(event, Event::Proven(_))) {
            acceptor.welcome(0);
        }
    }
    let victim = if how & 0x80 == 0 { &mut acceptor } else { &mut dialler };
    let mut now = 0;
    for piece in bytes.chunks(usize::from(*cut).max(1)) {
        now += 1_000_000;
        if victim.receive(piece, now, &mut events).is_err() {
            break;
        }
        for event in events.drain(..) {
            match event {
                Event::Proven(_) => victim.welcome(now),
                // Without the key nobody makes a message that is believed.
                Event::Message(payload) => panic!("a forged message was believed: {payload:?}"),
                _ => {}
            }
        }
        if victim.tick(now).is_err() {
            break;
        }
    }
    // Its last word is a frame or nothing.
    let _ = victim.take_output();
});

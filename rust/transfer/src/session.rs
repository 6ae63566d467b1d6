//! A session, sans-IO: mutual proof of the session key, then framed messages with a heartbeat.
//!
//! ```text
//! dialler                                              acceptor
//!    | -- Hello     nonce_d, purpose -------------------> |
//!    | <- Challenge nonce_a, who I am, proof_a ---------- |   proof_x = MAC(key, "x" ‖ transcript)
//!    | -- Proof     proof_d ----------------------------> |   transcript = Hello ‖ nonce_a ‖ who I am
//!    |                                     Event::Proven  |   the shell looks at the purpose and decides
//!    | <- Welcome (or Refuse with a reason) ------------- |
//!    | Event::Established            Message, Ping <----> |   each with a MAC over (its number ‖ kind ‖ payload)
//! ```
//!
//! Both nonces are in both proofs, so no recorded session can be replayed; the labels differ, so no proof can be sent
//! back to its maker. Over TLS the key of the MACs is made from the secret's and the channel's exporter (`bind`), so no
//! proof can be carried from one channel to another. Behind the handshake every frame carries 16 bytes of a MAC under a
//! key of this session and direction, over a running number: frames cannot be altered, dropped, repeated or moved
//! between sessions.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::error::Error as TransferError;
use crate::keys::Key;
use crate::messages::Purpose;
use crate::types::{Nanos, NodeAddress};
use crate::wire::{self, BODY_LIMIT, HANDSHAKE_LIMIT, Kind, WireError};

const SECOND: Nanos = 1_000_000_000;
/// A side that has said nothing for so long sends a ping.
pub const PING_EVERY: Nanos = SECOND;
/// A side that has heard nothing for so long holds the other one dead.
pub const DEAD_AFTER: Nanos = 3 * SECOND;
/// A handshake that takes longer is given up.
pub const HANDSHAKE_WITHIN: Nanos = 5 * SECOND;
/// Bytes of the MAC before each payload.
const MAC_BYTES: usize = 16;
/// Longest payload of a message.
pub const MESSAGE_LIMIT: usize = BODY_LIMIT - MAC_BYTES;

/// What has happened on a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Acceptor: the dialler knows the key and wants this. Answer with `welcome` or `refuse`.
    Proven(Purpose),
    /// Dialler: the acceptor knows the key, is this one, and welcomes us.
    Established(NodeAddress),
    /// The other side said something.
    Message(Vec<u8>),
}

/// Why a session is over.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Ended {
    /// The other side does not know our key.
    #[error("the other side does not know this cluster's secret: give both the same secret file")]
    Secret,
    /// The other side ended it and said why.
    #[error("refused by the other side: {0}")]
    Refused(String),
    /// Nothing came for too long.
    #[error("nothing heard for {} s", DEAD_AFTER / SECOND)]
    Silent,
    /// The handshake was not finished in time.
    #[error("no handshake within {} s", HANDSHAKE_WITHIN / SECOND)]
    Slow,
    /// The bytes are not a session's.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// A frame that has no place here.
    #[error("{0:?} out of turn")]
    OutOfTurn(Kind),
    /// A frame behind the handshake was altered, repeated or lost.
    #[error("a frame was altered on its way")]
    Altered,
    /// The connection broke or was closed.
    #[error("the connection ended: {0}")]
    Closed(String),
}

impl From<Ended> for TransferError {
    fn from(ended: Ended) -> Self {
        let message = ended.to_string();
        match ended {
            Ended::Secret | Ended::Refused(_) | Ended::Wire(_) | Ended::OutOfTurn(_) => Self::give_up(message),
            Ended::Silent | Ended::Slow | Ended::Altered | Ended::Closed(_) => Self::retry(message),
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Hello {
    nonce: [u8; 32],
    purpose: Purpose,
}

#[derive(Serialize, Deserialize)]
struct Challenge {
    nonce: [u8; 32],
    node: NodeAddress,
    proof: [u8; 32],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Acceptor, before Hello.
    AwaitHello,
    /// Dialler, before Challenge.
    AwaitChallenge,
    /// Acceptor, before Proof.
    AwaitProof,
    /// Acceptor, before its shell's decision.
    Deciding,
    /// Dialler, before Welcome.
    AwaitWelcome,
    /// Both.
    Established,
    /// Over.
    Over,
}

/// One side of a session. Give it what arrives and the time; send what `take_output` returns.
pub struct Session {
    key: Key,
    state: State,
    nonce: [u8; 32],
    /// Who we are (acceptor) or who answers (dialler).
    node: NodeAddress,
    transcript: Vec<u8>,
    purpose: Option<Purpose>,
    send: Direction,
    receive: Direction,
    input: Vec<u8>,
    output: Vec<u8>,
    began: Nanos,
    last_sent: Nanos,
    last_heard: Nanos,
    watched: bool,
    /// How many times longer its limits are than the constants say.
    slowness: u64,
}

/// Key and running number of one direction; both are set by the handshake.
#[derive(Clone, Copy, Default)]
struct Direction {
    key: Key,
    number: u64,
}

impl Direction {
    fn mac(&mut self, kind: Kind, payload: &[u8]) -> [u8; MAC_BYTES] {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&self.number.to_le_bytes()).update(&[kind as u8]).update(payload);
        self.number += 1;
        let mut mac = [0; MAC_BYTES];
        mac.copy_from_slice(&hasher.finalize().as_bytes()[..MAC_BYTES]);
        mac
    }
}

impl Session {
    /// The dialling side. `nonce` must be fresh and random.
    pub fn dial(key: Key, purpose: Purpose, nonce: [u8; 32], now: Nanos) -> Self {
        let unknown = NodeAddress { node: String::new(), address: String::new(), incarnation: 0 };
        let mut session = Self::new(key, State::AwaitChallenge, unknown, nonce, now);
        let hello = wire::encode(&Hello { nonce, purpose: purpose.clone() });
        session.purpose = Some(purpose);
        session.transcript.extend(&hello);
        session.push(Kind::Hello, &hello, now);
        session
    }

    /// The accepting side, which says that it is `node`. `nonce` must be fresh and random.
    pub fn accept(key: Key, node: NodeAddress, nonce: [u8; 32], now: Nanos) -> Self {
        Self::new(key, State::AwaitHello, node, nonce, now)
    }

    fn new(key: Key, state: State, node: NodeAddress, nonce: [u8; 32], now: Nanos) -> Self {
        Self {
            key,
            state,
            nonce,
            node,
            transcript: Vec::new(),
            purpose: None,
            send: Direction::default(),
            receive: Direction::default(),
            input: Vec::new(),
            output: Vec::new(),
            began: now,
            last_sent: now,
            last_heard: now,
            watched: true,
            slowness: 1,
        }
    }

    /// Binds the proofs to the channel under the session, of which these 32 bytes are known to its two ends only.
    /// Before anything is received.
    pub fn bind(&mut self, exporter: &[u8; 32]) {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        // No label of `proof` begins so: its length comes first there.
        hasher.update(b"bound to the channel").update(exporter);
        self.key = *hasher.finalize().as_bytes();
    }

    /// Turns the heartbeat off: on a unix socket the kernel reports a death, and a stopped process is not a dead one.
    pub fn unwatch(&mut self) {
        self.watched = false;
    }

    /// Waits so many times longer before it gives the other side up: for machines whose time is emulated.
    pub fn slow_down(&mut self, times: u32) {
        self.slowness = u64::from(times.max(1));
    }

    /// Takes bytes that have arrived and appends what they mean. After an error the session is over; what
    /// `take_output` then returns (a refusal) should still be sent.
    pub fn receive(&mut self, bytes: &[u8], now: Nanos, events: &mut Vec<Event>) -> Result<(), Ended> {
        if self.state == State::Over {
            return Err(Ended::Closed("already over".into()));
        }
        self.last_heard = now;
        self.input.extend(bytes);
        let mut used = 0;
        let result = loop {
            let established = self.state == State::Established;
            let limit = if established { BODY_LIMIT } else { HANDSHAKE_LIMIT };
            match wire::parse(&self.input[used..], limit) {
                Ok(Some(frame)) => {
                    let (kind, from) = (frame.kind, used + wire::HEADER_BYTES);
                    used += frame.bytes;
                    let body = self.input[from..used].to_vec();
                    if let Err(ended) = self.react(kind, body, now, events) {
                        break Err(ended);
                    }
                }
                Ok(None) => break Ok(()),
                Err(error) => break Err(Ended::Wire(error)),
            }
        };
        self.input.drain(..used);
        if let Err(ended) = &result {
            // A refusal is not answered by a refusal.
            if !matches!(ended, Ended::Refused(_)) {
                let reason = match ended {
                    Ended::Secret => "the secrets differ: give both sides the same secret file".into(),
                    other => other.to_string(),
                };
                self.refuse(&reason, now);
            }
            self.state = State::Over;
        }
        result
    }

    fn react(&mut self, kind: Kind, body: Vec<u8>, now: Nanos, events: &mut Vec<Event>) -> Result<(), Ended> {
        match (kind, self.state) {
            (Kind::Refuse, _) => {
                let text: String = String::from_utf8_lossy(&body).chars().take(500).collect();
                return Err(Ended::Refused(text));
            }
            (Kind::Hello, State::AwaitHello) => {
                let hello: Hello = wire::decode(&body)?;
                self.transcript = body;
                self.purpose = Some(hello.purpose);
                self.transcript.extend(self.nonce);
                self.transcript.extend(wire::encode(&self.node));
                let challenge = Challenge { nonce: self.nonce, node: self.node.clone(), proof: self.proof("acceptor") };
                self.push(Kind::Challenge, &wire::encode(&challenge), now);
                self.state = State::AwaitProof;
            }
            (Kind::Challenge, State::AwaitChallenge) => {
                let challenge: Challenge = wire::decode(&body)?;
                self.transcript.extend(challenge.nonce);
                self.transcript.extend(wire::encode(&challenge.node));
                if !equal(&challenge.proof, &self.proof("acceptor")) {
                    return Err(Ended::Secret);
                }
                self.node = challenge.node;
                let proof = self.proof("dialler");
                self.push(Kind::Proof, &proof, now);
                self.send.key = self.proof("from dialler");
                self.receive.key = self.proof("from acceptor");
                self.state = State::AwaitWelcome;
            }
            (Kind::Proof, State::AwaitProof) => {
                if body.len() != 32 || !equal(&body, &self.proof("dialler")) {
                    return Err(Ended::Secret);
                }
                self.send.key = self.proof("from acceptor");
                self.receive.key = self.proof("from dialler");
                self.state = State::Deciding;
                // Hello came before Proof, so the purpose is known.
                events.extend(self.purpose.clone().map(Event::Proven));
            }
            (Kind::Welcome, State::AwaitWelcome) => {
                self.open(kind, &body)?;
                self.state = State::Established;
                events.push(Event::Established(self.node.clone()));
            }
            (Kind::Message, State::Established) => {
                self.open(kind, &body)?;
                let mut payload = body;
                payload.drain(..MAC_BYTES);
                events.push(Event::Message(payload));
            }
            (Kind::Ping, State::Established) => self.open(kind, &body)?,
            (other, _) => return Err(Ended::OutOfTurn(other)),
        }
        Ok(())
    }

    /// Acceptor, after `Proven`: the session stands.
    pub fn welcome(&mut self, now: Nanos) {
        debug_assert_eq!(self.state, State::Deciding);
        self.state = State::Established;
        self.seal(Kind::Welcome, &[], now);
    }

    /// Ends the session with a reason that the other side's user reads.
    pub fn refuse(&mut self, reason: &str, now: Nanos) {
        let reason: String = reason.chars().take(200).collect();
        self.push(Kind::Refuse, reason.as_bytes(), now);
        self.state = State::Over;
    }

    /// True while messages can be sent.
    pub fn stands(&self) -> bool {
        self.state == State::Established
    }

    /// Sends a message of at most `MESSAGE_LIMIT` bytes; does nothing unless the session stands.
    pub fn send(&mut self, payload: &[u8], now: Nanos) {
        if self.state == State::Established {
            self.seal(Kind::Message, payload, now);
        }
    }

    /// Time has passed: pings, or ends a session whose other side is silent.
    pub fn tick(&mut self, now: Nanos) -> Result<(), Ended> {
        let ended = match self.state {
            State::Over => return Err(Ended::Closed("already over".into())),
            State::Established if !self.watched => return Ok(()),
            State::Established if now >= self.last_heard + DEAD_AFTER * self.slowness => Ended::Silent,
            State::Established => {
                if now >= self.last_sent + PING_EVERY {
                    self.seal(Kind::Ping, &[], now);
                }
                return Ok(());
            }
            _ if now >= self.began + HANDSHAKE_WITHIN * self.slowness => Ended::Slow,
            _ => return Ok(()),
        };
        self.state = State::Over;
        Err(ended)
    }

    /// When `tick` has something to do next; `None`: never.
    pub fn next_tick(&self) -> Option<Nanos> {
        match self.state {
            State::Over => None,
            State::Established if !self.watched => None,
            State::Established => Some((self.last_sent + PING_EVERY).min(self.last_heard + DEAD_AFTER * self.slowness)),
            _ => Some(self.began + HANDSHAKE_WITHIN * self.slowness),
        }
    }

    /// Bytes to send, in order.
    pub fn take_output(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.output)
    }

    /// True if bytes have come that no frame has used: then the stream may not be handed on as a data lane.
    pub fn has_rest(&self) -> bool {
        !self.input.is_empty()
    }

    fn proof(&self, label: &str) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&(label.len() as u64).to_le_bytes()).update(label.as_bytes()).update(&self.transcript);
        *hasher.finalize().as_bytes()
    }

    fn push(&mut self, kind: Kind, body: &[u8], now: Nanos) {
        self.output.extend(wire::frame(kind, body));
        self.last_sent = now;
    }

    fn seal(&mut self, kind: Kind, payload: &[u8], now: Nanos) {
        debug_assert!(payload.len() <= MESSAGE_LIMIT, "a message of {} bytes", payload.len());
        let mut body = Vec::with_capacity(MAC_BYTES + payload.len());
        body.extend(self.send.mac(kind, payload));
        body.extend(payload);
        self.push(kind, &body, now);
    }

    fn open(&mut self, kind: Kind, body: &[u8]) -> Result<(), Ended> {
        let (mac, payload) = body.split_at_checked(MAC_BYTES).ok_or(Ended::Altered)?;
        if equal(mac, &self.receive.mac(kind, payload)) { Ok(()) } else { Err(Ended::Altered) }
    }
}

/// Compares without telling by its time where the first difference lies.
fn equal(left: &[u8], right: &[u8]) -> bool {
    left.len() == right.len() && left.iter().zip(right).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    //! Goal: only who knows the key gets in, nothing recorded or altered is believed, silence is noticed, and everybody
    //! gets a readable reason. Method: two sessions joined by hand, in virtual time, with a hostile middle.
    use super::*;
    use proptest::prelude::*;

    const KEY: Key = [7; 32];

    fn node(name: &str) -> NodeAddress {
        NodeAddress { node: name.into(), address: "127.0.0.1:1".into(), incarnation: 5 }
    }

    fn pair(dial_key: Key, accept_key: Key) -> (Session, Session) {
        let purpose = Purpose::Peer { node: node("a") };
        (Session::dial(dial_key, purpose, [1; 32], 0), Session::accept(accept_key, node("b"), [2; 32], 0))
    }

    fn pass(from: &mut Session, to: &mut Session, now: Nanos) -> Result<Vec<Event>, Ended> {
        let mut events = Vec::new();
        to.receive(&from.take_output(), now, &mut events).map(|()| events)
    }

    fn established() -> (Session, Session) {
        let (mut a, mut b) = pair(KEY, KEY);
        assert_eq!(pass(&mut a, &mut b, 0), Ok(vec![]));
        assert_eq!(pass(&mut b, &mut a, 0), Ok(vec![]));
        assert_eq!(pass(&mut a, &mut b, 0), Ok(vec![Event::Proven(Purpose::Peer { node: node("a") })]));
        b.welcome(0);
        assert_eq!(pass(&mut b, &mut a, 0), Ok(vec![Event::Established(node("b"))]));
        (a, b)
    }

    #[test]
    fn messages_pass_both_ways_byte_by_byte() {
        let (mut a, mut b) = established();
        a.send(b"one", 1);
        a.send(b"", 1);
        b.send(b"two", 1);
        let mut events = Vec::new();
        for byte in a.take_output() {
            b.receive(&[byte], 1, &mut events).expect("whole frames");
        }
        assert_eq!(events, [Event::Message(b"one".to_vec()), Event::Message(vec![])]);
        assert_eq!(pass(&mut b, &mut a, 1), Ok(vec![Event::Message(b"two".to_vec())]));
        assert!(!a.has_rest() && !b.has_rest());
    }

    #[test]
    fn a_wrong_secret_is_refused_on_both_sides() {
        let (mut a, mut b) = pair([8; 32], KEY);
        pass(&mut a, &mut b, 0).expect("a hello proves nothing yet");
        assert_eq!(pass(&mut b, &mut a, 0), Err(Ended::Secret));
        let refused = pass(&mut a, &mut b, 0).expect_err("the dialler has said why");
        assert!(refused.to_string().contains("secret"), "{refused}");

        // A dialler that does not care and sends some proof.
        let (mut a, mut b) = pair(KEY, KEY);
        pass(&mut a, &mut b, 0).expect("hello");
        let mut events = Vec::new();
        assert_eq!(b.receive(&wire::frame(Kind::Proof, &[0; 32]), 0, &mut events), Err(Ended::Secret));
        assert!(events.is_empty());
        assert!(matches!(pass(&mut b, &mut a, 0), Err(Ended::Refused(_)) | Ok(_)));
    }

    #[test]
    fn a_recorded_session_cannot_be_replayed_or_reflected() {
        let (mut a, mut b) = pair(KEY, KEY);
        let hello = a.take_output();
        b.receive(&hello, 0, &mut Vec::new()).expect("hello");
        pass(&mut b, &mut a, 0).expect("challenge");
        let proof = a.take_output();
        let mut fresh = Session::accept(KEY, node("b"), [3; 32], 0);
        fresh.receive(&hello, 0, &mut Vec::new()).expect("a hello proves nothing yet");
        assert_eq!(fresh.receive(&proof, 0, &mut Vec::new()), Err(Ended::Secret));

        // The acceptor's own proof sent back to it.
        let (mut a, mut b) = pair(KEY, KEY);
        pass(&mut a, &mut b, 0).expect("hello");
        let challenge = b.take_output();
        let body = wire::parse(&challenge, HANDSHAKE_LIMIT).expect("own frame").expect("whole").body;
        let proof = body[body.len() - 32..].to_vec();
        assert_eq!(b.receive(&wire::frame(Kind::Proof, &proof), 0, &mut Vec::new()), Err(Ended::Secret));
    }

    #[test]
    fn a_repeated_or_altered_frame_ends_the_session() {
        let (mut a, mut b) = established();
        a.send(b"pay 1", 0);
        let frame = a.take_output();
        let mut events = Vec::new();
        b.receive(&frame, 0, &mut events).expect("once");
        assert_eq!(b.receive(&frame, 0, &mut events), Err(Ended::Altered));
        assert_eq!(events.len(), 1);
        assert!(b.receive(&frame, 0, &mut events).is_err(), "over is over");
    }

    #[test]
    fn silence_is_noticed_and_pings_prevent_it() {
        let (mut a, mut b) = established();
        for second in 1..=10 {
            let now = second * SECOND;
            a.tick(now).expect("alive");
            b.tick(now).expect("alive");
            assert_eq!(pass(&mut a, &mut b, now), Ok(vec![]));
            assert_eq!(pass(&mut b, &mut a, now), Ok(vec![]));
        }
        assert_eq!(a.tick(12 * SECOND), Ok(()));
        assert_eq!(a.next_tick(), Some(13 * SECOND));
        assert_eq!(a.tick(13 * SECOND), Err(Ended::Silent));
        let (mut local, _other) = established();
        local.unwatch();
        assert_eq!(local.tick(3600 * SECOND), Ok(()));
        let (mut slow, _other) = pair(KEY, KEY);
        assert_eq!(slow.tick(HANDSHAKE_WITHIN), Err(Ended::Slow));
    }

    #[test]
    fn another_version_gets_a_readable_reason() {
        let (mut a, mut b) = pair(KEY, KEY);
        let mut hello = a.take_output();
        hello[4] = 99;
        let ended = b.receive(&hello, 0, &mut Vec::new()).expect_err("another version");
        assert!(ended.to_string().contains("speaks protocol 99"), "{ended}");
        let mut refusal = b.take_output();
        refusal[4] = 98;
        let ended = a.receive(&refusal, 0, &mut Vec::new()).expect_err("refused");
        assert!(ended.to_string().contains("upgrade the older one"), "{ended}");
    }

    #[test]
    fn before_the_proof_frames_are_short() {
        let (_, mut b) = pair(KEY, KEY);
        let long = wire::frame(Kind::Hello, &[0; HANDSHAKE_LIMIT + 1]);
        assert!(matches!(b.receive(&long, 0, &mut Vec::new()), Err(Ended::Wire(WireError::TooLong { .. }))));
    }

    proptest! {
        #[test]
        fn noise_never_panics_and_never_proves(noise in proptest::collection::vec(any::<u8>(), 1..300), cut in 0usize..200) {
            let mut b = Session::accept(KEY, node("b"), [2; 32], 0);
            let mut events = Vec::new();
            let _ = b.receive(&noise, 0, &mut events);
            let (mut a, mut b) = pair(KEY, KEY);
            let mut hello = a.take_output();
            hello.truncate(cut.min(hello.len()));
            hello.extend(&noise);
            let _ = b.receive(&hello, 0, &mut events);
            prop_assert!(events.is_empty());
        }

        #[test]
        fn every_flipped_bit_is_noticed(bit in 0usize..400) {
            let (mut a, mut b) = established();
            a.send(b"a message of some length, sent once", 0);
            let mut frame = a.take_output();
            let bit = bit % (frame.len() * 8);
            frame[bit / 8] ^= 1 << (bit % 8);
            let mut events = Vec::new();
            let result = b.receive(&frame, 0, &mut events);
            // A changed length may leave the frame unfinished; byte 7 has no meaning.
            prop_assert!(events.is_empty() && (result.is_err() || b.has_rest()) || bit / 8 == 7);
        }
    }
}

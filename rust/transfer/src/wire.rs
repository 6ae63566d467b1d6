//! Frames: the bytes that processes exchange. Decoders never panic and never trust a declared length.
//!
//! A session frame (all numbers little-endian):
//!
//! ```text
//! offset  bytes  field
//!      0      4  magic "pyEN"
//!      4      2  version; a reader of another version answers with a Refuse frame and closes
//!      6      1  kind (see `Kind`); 0 = Refuse is UTF-8 text and the same in all versions
//!      7      1  zero
//!      8      4  length of the body, limited
//!     12      n  body (postcard, or as `session` says)
//! ```
//!
//! What travels on a data lane is in `transport/lanes/frames`.

use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

/// Version of the session protocol and of all messages in it.
pub const VERSION: u16 = 4;
/// Bytes of a session frame's header.
pub const HEADER_BYTES: usize = 12;
/// Most bytes in a frame's body once a session stands: a grant of a million tokens in blocks of 16, four times over.
pub const BODY_LIMIT: usize = 4 << 20;
/// Most bytes in a frame's body before the peer has proven itself.
pub const HANDSHAKE_LIMIT: usize = 1024;

const MAGIC: [u8; 4] = *b"pyEN";
/// First byte of a connection that begins with a TLS handshake.
const TLS_HANDSHAKE: u8 = 22;

/// What a session frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The sender ends the session; the body says why, in UTF-8.
    Refuse = 0,
    /// Dialler: nonce and purpose.
    Hello = 1,
    /// Acceptor: nonce, who it is, and its proof.
    Challenge = 2,
    /// Dialler: its proof.
    Proof = 3,
    /// Acceptor: the session stands.
    Welcome = 4,
    /// A message of either side.
    Message = 5,
    /// Still here.
    Ping = 6,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        [Self::Refuse, Self::Hello, Self::Challenge, Self::Proof, Self::Welcome, Self::Message, Self::Ping]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// Why bytes are not what they should be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum WireError {
    /// The other side is no pyengine process, or the stream is damaged.
    #[error("not a pyengine frame")]
    Magic,
    /// The other side speaks TLS.
    #[error("the other side speaks TLS and this one does not: start both with --tls or neither")]
    Tls,
    /// The other side speaks no TLS.
    #[error("the other side speaks no TLS and this one does: start both with --tls or neither")]
    Clear,
    /// Another version of the protocol.
    #[error("the other side speaks protocol {0}, this side {VERSION}: upgrade the older one")]
    Version(u16),
    /// A kind this version does not know.
    #[error("unknown frame kind {0}")]
    Kind(u8),
    /// Longer than allowed here.
    #[error("a frame of {length} bytes, at most {limit} are allowed")]
    TooLong {
        /// What the header declares.
        length: usize,
        /// What is allowed.
        limit: usize,
    },
    /// The body does not decode.
    #[error("a frame's body does not decode: {0}")]
    Body(String),
}

/// Puts a header before a body.
pub fn frame(kind: Kind, body: &[u8]) -> Vec<u8> {
    debug_assert!(body.len() <= BODY_LIMIT, "a message of {} bytes", body.len());
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend([kind as u8, 0]);
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(body);
    bytes
}

/// A frame at the front of a buffer: its kind and its body. `bytes` is how much it takes with the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// What it is.
    pub kind: Kind,
    /// Its body.
    pub body: &'a [u8],
    /// Header and body.
    pub bytes: usize,
}

/// True unless these bytes cannot be the beginning of a session.
pub fn begins(buffer: &[u8]) -> bool {
    let seen = buffer.len().min(MAGIC.len());
    buffer[..seen] == MAGIC[..seen]
}

/// Reads the frame at the front of `buffer`; `None` if more bytes are needed. `limit` bounds the body.
pub fn parse(buffer: &[u8], limit: usize) -> Result<Option<Frame<'_>>, WireError> {
    if !begins(buffer) {
        return Err(if buffer[0] == TLS_HANDSHAKE { WireError::Tls } else { WireError::Magic });
    }
    if buffer.len() < HEADER_BYTES {
        return Ok(None);
    }
    let version = u16::from_le_bytes([buffer[4], buffer[5]]);
    // A refusal is readable in every version, so that the user of the older side gets a reason too.
    if version != VERSION && buffer[6] != Kind::Refuse as u8 {
        return Err(WireError::Version(version));
    }
    let kind = Kind::from_byte(buffer[6]).ok_or(WireError::Kind(buffer[6]))?;
    let length = u32::from_le_bytes([buffer[8], buffer[9], buffer[10], buffer[11]]) as usize;
    if length > limit {
        return Err(WireError::TooLong { length, limit });
    }
    let bytes = HEADER_BYTES + length;
    Ok(buffer.get(HEADER_BYTES..bytes).map(|body| Frame { kind, body, bytes }))
}

/// Encodes a message.
pub fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    // Postcard fails only for sequences of unknown length and for custom serializers; the messages have neither.
    postcard::to_stdvec(message).unwrap_or_else(|error| unreachable!("messages always encode: {error}"))
}

/// Decodes a message; every byte must belong to it.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, WireError> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(WireError::Body(format!("{} bytes too many", rest.len()))),
        Err(error) => Err(WireError::Body(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    //! Goal: what is encoded decodes to the same; what is not ours is refused without panic or big allocations.
    //! Method: proptest over messages, cut frames, flipped bytes and noise.
    use super::*;
    use crate::messages::{
        DaemonOrder, DaemonReport, EngineMessage, GrantMode, GrantedSlot, LocalEvent, LocalRequest, PeerMessage,
        Purpose, Refusal,
    };
    use crate::types::{BlockKey, NodeAddress, Owner, RegionId, SlotRef, Tag};
    use proptest::prelude::*;

    fn tag() -> impl Strategy<Value = Tag> {
        (any::<u64>(), any::<u32>(), any::<u64>()).prop_map(|(request, attempt, worker)| Tag {
            request,
            attempt,
            worker,
        })
    }

    fn key() -> impl Strategy<Value = BlockKey> {
        any::<[u8; 16]>().prop_map(BlockKey)
    }

    fn address() -> impl Strategy<Value = NodeAddress> {
        ("[a-z0-9-]{0,64}", "[0-9.:]{0,21}", any::<u64>()).prop_map(|(node, address, incarnation)| NodeAddress {
            node,
            address,
            incarnation,
        })
    }

    fn slots() -> impl Strategy<Value = Vec<GrantedSlot>> {
        proptest::collection::vec(
            (any::<u32>(), any::<u32>(), any::<bool>()).prop_map(|(slot, generation, committed)| GrantedSlot {
                slot: SlotRef { slot, generation },
                committed,
            }),
            0..50,
        )
    }

    proptest! {
        #[test]
        fn local_messages_round_trip(tag in tag(), keys in proptest::collection::vec(key(), 0..50),
                                     parent in key(), position: u32, to in address(), slots in slots(),
                                     note in proptest::option::of(proptest::collection::vec(any::<u8>(), 0..100))) {
            for request in [
                LocalRequest::Grant { tag, keys: keys.clone(), private: 1, parent, position, mode: GrantMode::Wait, tenant: 7 },
                LocalRequest::Keep { ticket: 1, keys: keys.clone(), ttl_ms: u64::MAX, by: "somebody".into() },
                LocalRequest::Unkeep { ticket: 2, keys: keys.clone(), by: String::new() },
                LocalRequest::Lookup { tag, keys },
                LocalRequest::Open { tag, to, within_ms: 7 },
                LocalRequest::Push { local: tag, tag, indices: vec![0, position], first: 0, strips: Some((1, position)), note },
            ] {
                prop_assert_eq!(decode::<LocalRequest>(&encode(&request)).expect("own encoding"), request);
            }
            let event = LocalEvent::Granted { tag, slots };
            prop_assert_eq!(decode::<LocalEvent>(&encode(&event)).expect("own encoding"), event);
        }

        #[test]
        fn peer_and_report_messages_round_trip(tag in tag(), key in key(), node in address(), slots in slots(),
                                               number: u64, place: u32) {
            for message in [
                PeerMessage::Opened { tag, region: RegionId(1), slots },
                PeerMessage::Fetched { ticket: number, place, copied: Err(Refusal::Missing) },
                PeerMessage::Fetched {
                    ticket: number,
                    place,
                    copied: Ok((crate::types::Kind::Tcp, crate::types::Medium::Ssd, Owner { namespace: number, tenant: 7 })),
                },
                PeerMessage::Commit { tag, indices: vec![place], via: Some(crate::types::Kind::Tcp), note: Some(vec![1, 2]) },
            ] {
                prop_assert_eq!(decode::<PeerMessage>(&encode(&message)).expect("own encoding"), message);
            }
            let report = DaemonReport::Dump { sequence: number, part: place, blocks: vec![(key, key, place, crate::types::Medium::Ssd)], last: true };
            prop_assert_eq!(decode::<DaemonReport>(&encode(&report)).expect("own encoding"), report);
            let order = DaemonOrder::Replicate { order: number, keys: vec![key], parent: key, position: place, from: node };
            prop_assert_eq!(decode::<DaemonOrder>(&encode(&order)).expect("own encoding"), order);
            let order = DaemonOrder::Forget { keys: vec![key; 3] };
            prop_assert_eq!(decode::<DaemonOrder>(&encode(&order)).expect("own encoding"), order);
        }

        #[test]
        fn noise_is_refused_and_never_panics(noise in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse(&noise, BODY_LIMIT);
            let _ = decode::<LocalRequest>(&noise);
            let _ = decode::<LocalEvent>(&noise);
            let _ = decode::<PeerMessage>(&noise);
            let _ = decode::<DaemonReport>(&noise);
            let _ = decode::<DaemonOrder>(&noise);
            let _ = decode::<EngineMessage>(&noise);
            let _ = decode::<Purpose>(&noise);
            let mut framed = frame(Kind::Message, &noise);
            prop_assert_eq!(parse(&framed, BODY_LIMIT).expect("own frame").expect("whole").body, &noise[..]);
            framed.truncate(framed.len() - 1);
            prop_assert_eq!(parse(&framed, BODY_LIMIT), Ok(None));
        }
    }

    #[test]
    fn another_version_and_a_long_body_are_refused_with_a_reason() {
        let mut other = frame(Kind::Hello, b"x");
        other[4] = 9;
        assert_eq!(parse(&other, 10), Err(WireError::Version(9)));
        other[6] = Kind::Refuse as u8;
        assert_eq!(parse(&other, 10).expect("readable in all versions").expect("whole").body, b"x");
        let mut long = frame(Kind::Message, b"x");
        long[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(parse(&long, 10), Err(WireError::TooLong { length: u32::MAX as usize, limit: 10 }));
        assert_eq!(parse(b"GET / HTTP/1.1", 10), Err(WireError::Magic));
        assert!(matches!(decode::<u8>(&[1, 2]), Err(WireError::Body(_))));
    }
}

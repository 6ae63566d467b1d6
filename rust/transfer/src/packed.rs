//! Lists of keys as one piece of bytes in messages: thirty-two keys cost one copy, not five hundred numbers.
//!
//! For `#[serde(with = "crate::packed")]`.

use std::fmt;

use serde::de::{Error, Visitor};
use serde::{Deserializer, Serializer};

use crate::types::BlockKey;

/// Bytes of a key.
const BYTES: usize = 16;

/// Writes them, one behind the other.
pub fn serialize<S: Serializer>(keys: &[BlockKey], serializer: S) -> Result<S::Ok, S::Error> {
    let mut bytes = Vec::with_capacity(keys.len() * BYTES);
    keys.iter().for_each(|key| bytes.extend_from_slice(&key.0));
    serializer.serialize_bytes(&bytes)
}

/// Reads them.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<BlockKey>, D::Error> {
    deserializer.deserialize_bytes(Keys)
}

struct Keys;

impl Visitor<'_> for Keys {
    type Value = Vec<BlockKey>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the bytes of some keys")
    }

    fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Self::Value, E> {
        let (keys, rest) = bytes.as_chunks::<BYTES>();
        if rest.is_empty() {
            Ok(keys.iter().copied().map(BlockKey).collect())
        } else {
            Err(E::invalid_length(bytes.len(), &self))
        }
    }
}

#[cfg(test)]
mod tests {
    //! Goal: what is written is read again; bytes that are no keys are refused. Method: some of each length.
    use serde::{Deserialize, Serialize};

    use super::*;
    use crate::wire;

    #[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
    struct Message {
        before: u8,
        #[serde(with = "super")]
        keys: Vec<BlockKey>,
        after: u8,
    }

    #[test]
    fn keys_come_back_and_nothing_else_does() {
        for count in [0, 1, 2, 300] {
            let keys = (0..count).map(|number| BlockKey([number as u8; BYTES])).collect();
            let message = Message { before: 1, keys, after: 2 };
            let bytes = wire::encode(&message);
            assert_eq!(wire::decode::<Message>(&bytes).expect("as written"), message);
            for length in 0..bytes.len() {
                assert!(wire::decode::<Message>(&bytes[..length]).is_err(), "{length} bytes of {}", bytes.len());
            }
        }
        // Seventeen bytes, of which it says so.
        let odd: Vec<u8> = [1, 17].into_iter().chain([0; 17]).chain([2]).collect();
        assert!(wire::decode::<Message>(&odd).is_err());
    }
}

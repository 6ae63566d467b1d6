//! Keys: what is derived from the cluster secret, and the names of blocks.

use crate::error::Error;
use crate::types::BlockKey;

/// A 32-byte symmetric key.
pub type Key = [u8; 32];

/// Derives the key for one purpose from the cluster secret (BLAKE3 `derive_key`).
///
/// `purpose` is `session`, `hash`, `object`, `watch` or `curve:<name>`: the keys are independent, so the session key can be
/// rotated while block keys stay as they are.
pub fn derive_key(secret: &[u8], purpose: &str) -> Result<Key, Error> {
    let known = matches!(purpose, "session" | "hash" | "object" | "watch")
        || purpose.strip_prefix("curve:").is_some_and(|name| !name.is_empty() && name.len() <= 64);
    if !known {
        return Err(Error::bug(format!(
            "no key purpose {purpose:?}: use session, hash, object, watch or curve:<name>"
        )));
    }
    // The context is fixed in the program but for the name of a curve pair, which the check above bounds.
    Ok(blake3::derive_key(&format!("pyengine-llm 2026-11 v1 {purpose}"), secret))
}

/// What opens the daemons' `/metrics` and `/health` beyond loopback, as it is sent: 64 hex digits. It opens nothing else.
///
/// # Errors
/// None that a caller could cause.
pub fn watch_key(session_key: &Key) -> Result<String, Error> {
    Ok(derive_key(session_key, "watch")?.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// `key[-1]` of a chain: keyed BLAKE3 over the three fields, each behind its length as u64 LE, cut to 16 bytes.
pub fn root_key(namespace: &[u8], adapter: &[u8], salt: &[u8], hash_key: &Key) -> BlockKey {
    let mut hasher = blake3::Hasher::new_keyed(hash_key);
    for field in [namespace, adapter, salt] {
        hasher.update(&(field.len() as u64).to_le_bytes());
        hasher.update(field);
    }
    cut(hasher.finalize())
}

/// Keys of all full blocks of `tokens` (u32 LE ids): `key[i] = H(key[i-1] ‖ tokens[i])`, cut to 16 bytes.
///
/// Tokens behind the last full block have no key. Fails with a bug if `tokens` is no whole number of ids or
/// `block_tokens` is 0.
pub fn block_keys(
    tokens: &[u8],
    block_tokens: usize,
    parent: BlockKey,
    hash_key: &Key,
) -> Result<Vec<BlockKey>, Error> {
    if block_tokens == 0 {
        return Err(Error::bug("block_tokens is 0"));
    }
    if !tokens.len().is_multiple_of(4) {
        return Err(Error::bug(format!("{} bytes are no whole number of u32 token ids", tokens.len())));
    }
    let mut parent = parent;
    let block_bytes = block_tokens.saturating_mul(4);
    Ok(tokens
        .chunks_exact(block_bytes)
        .map(|block| {
            let mut hasher = blake3::Hasher::new_keyed(hash_key);
            hasher.update(&parent.0).update(block);
            parent = cut(hasher.finalize());
            parent
        })
        .collect())
}

/// Key of an object's first block, made from its name under the *object-key key* (`derive_key` with `object`), so that no
/// name can be found whose key is that of KV.
pub fn object_key(name: &[u8], object_key: &Key) -> BlockKey {
    // In one piece: for a short name a hasher is most of the work.
    let mut short = [0; 64];
    match short.get_mut(1..=name.len()) {
        Some(space) => {
            space.copy_from_slice(name);
            cut(blake3::keyed_hash(object_key, &short[..=name.len()]))
        }
        None => cut(blake3::Hasher::new_keyed(object_key).update(&[0]).update(name).finalize()),
    }
}

/// Keys of the `count` blocks after the first of a value that was put under `head`, and for which `nonce` was drawn.
pub fn chunk_keys(head: BlockKey, nonce: &[u8; 16], count: u32, object_key: &Key) -> Vec<BlockKey> {
    let make = |index: u32| {
        let mut hasher = blake3::Hasher::new_keyed(object_key);
        // The first byte tells them from names.
        cut(hasher.update(&[1]).update(&head.0).update(nonce).update(&index.to_le_bytes()).finalize())
    };
    (1..=count).map(make).collect()
}

fn cut(hash: blake3::Hash) -> BlockKey {
    let mut key = [0; 16];
    key.copy_from_slice(&hash.as_bytes()[..16]);
    BlockKey(key)
}

#[cfg(test)]
mod tests {
    //! Goal: the chain is what the design says. Method: compare with a composition written with one-shot BLAKE3 calls.
    use super::*;

    #[test]
    fn chain_is_keyed_blake3_of_parent_and_tokens() {
        let hash_key = derive_key(b"secret", "hash").expect("a known purpose");
        let root = root_key(b"namespace", b"", b"salt", &hash_key);
        let mut joined = Vec::new();
        for field in [&b"namespace"[..], b"", b"salt"] {
            joined.extend((field.len() as u64).to_le_bytes());
            joined.extend(field);
        }
        assert_eq!(root.0, blake3::keyed_hash(&hash_key, &joined).as_bytes()[..16]);

        let tokens: Vec<u8> = (0u32..37).flat_map(|token| (token * 977).to_le_bytes()).collect();
        let keys = block_keys(&tokens, 16, root, &hash_key).expect("whole ids");
        assert_eq!(keys.len(), 2);
        let first = blake3::keyed_hash(&hash_key, &[&root.0[..], &tokens[..64]].concat());
        assert_eq!(keys[0].0, first.as_bytes()[..16]);
        let second = blake3::keyed_hash(&hash_key, &[&keys[0].0[..], &tokens[64..128]].concat());
        assert_eq!(keys[1].0, second.as_bytes()[..16]);
        assert_eq!(block_keys(&tokens[64..], 16, keys[0], &hash_key).expect("whole ids"), keys[1..]);
    }

    #[test]
    fn objects_have_keys_of_their_own() {
        let (object, hash) =
            (derive_key(b"secret", "object").expect("known"), derive_key(b"secret", "hash").expect("known"));
        let head = object_key(b"a name", &object);
        assert_eq!(head.0, blake3::keyed_hash(&object, b"\0a name").as_bytes()[..16]);
        assert_ne!(head, object_key(b"a name", &hash));
        let chunks = chunk_keys(head, &[1; 16], 3, &object);
        assert_ne!(chunks, chunk_keys(head, &[2; 16], 3, &object));
        let mut all = [&[head], &chunks[..]].concat();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 4);
    }

    #[test]
    fn purposes_and_fields_do_not_mix() {
        let session = derive_key(b"secret", "session").expect("known");
        assert_ne!(session, derive_key(b"secret", "hash").expect("known"));
        assert_ne!(derive_key(b"secret", "curve:a").expect("known"), derive_key(b"secret", "curve:b").expect("known"));
        assert!(derive_key(b"secret", "sesion").is_err());
        assert_ne!(root_key(b"ab", b"c", b"", &session), root_key(b"a", b"bc", b"", &session));
        assert!(block_keys(&[0; 7], 16, BlockKey([0; 16]), &session).is_err());
        assert!(block_keys(&[0; 8], 0, BlockKey([0; 16]), &session).is_err());
    }
}

//! Key derivation.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use transfer::keys;
use transfer::types::BlockKey;

use crate::buffers::Readable;
use crate::errors::exception;

/// 32 bytes derived from the cluster secret for one purpose.
#[pyfunction]
pub fn derive_key<'py>(py: Python<'py>, secret: Readable, purpose: &str) -> PyResult<Bound<'py, PyBytes>> {
    let key = keys::derive_key(secret.bytes(), purpose).map_err(exception)?;
    Ok(PyBytes::new(py, &key))
}

/// key[-1] of the chain.
#[pyfunction]
pub fn root_key<'py>(
    py: Python<'py>,
    namespace: Readable,
    adapter: Readable,
    salt: Readable,
    hash_key: Readable,
) -> PyResult<Bound<'py, PyBytes>> {
    let hash_key = hash_key.exactly("hash_key")?;
    let root = keys::root_key(namespace.bytes(), adapter.bytes(), salt.bytes(), &hash_key);
    Ok(PyBytes::new(py, &root.0))
}

/// Keys of all full blocks, 16 bytes each.
#[pyfunction]
pub fn block_keys<'py>(
    py: Python<'py>,
    tokens: Readable,
    block_tokens: usize,
    parent: Readable,
    hash_key: Readable,
) -> PyResult<Bound<'py, PyBytes>> {
    let hash_key = hash_key.exactly("hash_key")?;
    let parent = BlockKey(parent.exactly("parent")?);
    let keys = py.detach(|| keys::block_keys(tokens.bytes(), block_tokens, parent, &hash_key)).map_err(exception)?;
    Ok(PyBytes::new(py, &keys.iter().flat_map(|key| key.0).collect::<Vec<u8>>()))
}

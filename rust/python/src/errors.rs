//! Errors: each kind says what the caller does next, and becomes one class.

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use transfer::error::{Error, ErrorKind};

create_exception!(pyengine._native, TransferError, PyException, "Root of the tree. Its three children say what to do.");
create_exception!(pyengine._native, RetryError, TransferError, "Not now: the same call may succeed later.");
create_exception!(pyengine._native, GiveUpError, TransferError, "Never: a repetition does not change it.");
create_exception!(pyengine._native, BugError, TransferError, "The caller broke the contract.");

/// The exception for an error.
pub fn exception(error: Error) -> PyErr {
    match error.kind {
        ErrorKind::Retry => RetryError::new_err(error.message),
        ErrorKind::GiveUp => GiveUpError::new_err(error.message),
        ErrorKind::Bug => BugError::new_err(error.message),
    }
}

/// A broken contract that is found while converting.
pub fn bug(message: impl Into<String>) -> PyErr {
    BugError::new_err(message.into())
}

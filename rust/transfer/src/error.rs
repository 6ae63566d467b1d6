//! Errors say what the caller should do next: retry, give up, or fix a bug.

use std::fmt;

/// What the caller does with an error. Python turns each into one exception class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// Not now: unreachable, restarting or busy. The same call may succeed later (`RetryError`).
    Retry,
    /// Never: secret, layout, size, version or configuration is refused (`GiveUpError`).
    GiveUp,
    /// The caller broke the contract (`BugError`).
    Bug,
}

/// An error with a sentence that says what is wrong and, where possible, what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Error {
    /// What to do.
    pub kind: ErrorKind,
    /// What is wrong, for a person.
    pub message: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error {
    /// The same call may succeed later.
    pub fn retry(message: impl Into<String>) -> Self {
        Self { kind: ErrorKind::Retry, message: message.into() }
    }

    /// Repeating does not help.
    pub fn give_up(message: impl Into<String>) -> Self {
        Self { kind: ErrorKind::GiveUp, message: message.into() }
    }

    /// The caller broke the contract.
    pub fn bug(message: impl Into<String>) -> Self {
        Self { kind: ErrorKind::Bug, message: message.into() }
    }
}

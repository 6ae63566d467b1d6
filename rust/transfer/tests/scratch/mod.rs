//! Directories that tests leave nothing of.
#![allow(dead_code, reason = "each test program uses its part")]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A directory of its own, which whoever is given it makes; removed in the end.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new() -> Self {
        Self::under(std::env::temp_dir())
    }

    pub fn under(base: impl AsRef<Path>) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Self(base.as_ref().join(format!("pyengine-test-{}-{number}", std::process::id())))
    }

    /// For a daemon's socket.
    pub fn socket(&self) -> PathBuf {
        self.0.join("d.sock")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Not there if the test never used it.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

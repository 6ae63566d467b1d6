//! Directories and file systems that tests leave nothing of.
#![allow(dead_code, reason = "each test program uses its part")]

use std::path::{Path, PathBuf};
use std::process::Command;
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

/// A file system of its own.
pub struct Mount(pub Scratch);

impl Mount {
    /// Of this kind, with these options, for its owner alone; `None` where that is not allowed.
    pub fn new(kind: &str, options: &str) -> Option<Self> {
        let scratch = Scratch::new();
        std::fs::create_dir_all(&scratch.0).expect("a directory");
        let options = format!("mode=0700,{options}");
        let words = ["-t", kind, "-o", options.trim_end_matches(','), "none"];
        let mounted = Command::new("mount").args(words).arg(&scratch.0).output();
        mounted.is_ok_and(|output| output.status.success()).then_some(Self(scratch))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // The test is over; what stays mounted shows in the next line.
        let _ = Command::new("umount").arg(&self.0.0).status();
    }
}

//! A medium in memory that fails when it is told to, and that forgets in a crash what was not synced.
//!
//! Names and lengths of files are durable at once, as they are on a real disk when `allocate` and `remove` return. Bytes are
//! when they were synced; of the rest a crash keeps a random part, page by page, so that writes are torn.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::random::Random;

use super::format::PAGE;
use super::io::{FileId, Medium};

#[derive(Clone, Debug, Default)]
struct Bytes {
    now: Vec<u8>,
    durable: Vec<u8>,
    /// Pages that differ, maybe.
    unsynced: BTreeSet<usize>,
}

#[derive(Clone, Debug, Default)]
struct Disk {
    files: BTreeMap<FileId, Bytes>,
    /// Operations so far.
    operations: u64,
    /// All operations from this one on fail.
    stops_at: Option<u64>,
    reads_fail: bool,
    writes_fail: bool,
    /// Bytes it has room for.
    room: Option<u64>,
    /// The most that ever lay on it.
    peak: u64,
}

impl Disk {
    fn bytes(&self) -> u64 {
        self.files.values().map(|file| file.now.len() as u64).sum()
    }

    /// Counts an operation, and fails if it has to.
    fn step(&mut self, writes: bool) -> io::Result<()> {
        let number = self.operations;
        self.operations += 1;
        let stopped = self.stops_at.is_some_and(|at| number >= at);
        if stopped || if writes { self.writes_fail } else { self.reads_fail } {
            return Err(io::Error::other(format!("operation {number} fails on purpose")));
        }
        Ok(())
    }

    fn file(&mut self, file: FileId) -> io::Result<&mut Bytes> {
        self.files.get_mut(&file).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// The medium. Clones are the same disk.
#[derive(Clone, Debug, Default)]
pub struct MemoryDisk(Arc<Mutex<Disk>>);

impl MemoryDisk {
    /// All operations after so many more fail; `None`: none does.
    pub fn stop_after(&self, operations: Option<u64>) {
        let mut disk = self.disk();
        disk.stops_at = operations.map(|count| disk.operations + count);
    }

    /// Operations so far.
    pub fn operations(&self) -> u64 {
        self.disk().operations
    }

    /// Reads or writes fail from now on, or do so no more.
    pub fn fail(&self, reads: bool, writes: bool) {
        let mut disk = self.disk();
        (disk.reads_fail, disk.writes_fail) = (reads, writes);
    }

    /// No more bytes than this fit.
    pub fn set_room(&self, bytes: Option<u64>) {
        self.disk().room = bytes;
    }

    /// The most bytes that ever lay on it.
    pub fn peak(&self) -> u64 {
        self.disk().peak
    }

    /// Its files and their bytes.
    pub fn files(&self) -> Vec<(FileId, u64)> {
        self.disk().files.iter().map(|(&file, bytes)| (file, bytes.now.len() as u64)).collect()
    }

    /// Changes bytes behind everybody's back.
    pub fn alter(&self, file: FileId, change: impl FnOnce(&mut Vec<u8>)) {
        if let Some(bytes) = self.disk().files.get_mut(&file) {
            change(&mut bytes.now);
            bytes.durable = bytes.now.clone();
            bytes.unsynced.clear();
        }
    }

    /// Another disk with the same content.
    pub fn copy(&self) -> Self {
        let files = self.disk().files.clone();
        Self(Arc::new(Mutex::new(Disk { files, ..Disk::default() })))
    }

    /// What a crash leaves: all that was synced, and any part of the rest.
    pub fn crashed(&self, random: &mut Random) -> Self {
        let mut files = self.disk().files.clone();
        for file in files.values_mut() {
            file.durable.resize(file.now.len(), 0);
            for page in std::mem::take(&mut file.unsynced) {
                let page = page * PAGE..((page + 1) * PAGE).min(file.now.len());
                if page.start < page.end && random.permille(500) {
                    file.durable[page.clone()].copy_from_slice(&file.now[page]);
                }
            }
            file.now = file.durable.clone();
        }
        Self(Arc::new(Mutex::new(Disk { files, ..Disk::default() })))
    }

    fn disk(&self) -> MutexGuard<'_, Disk> {
        // A test that panicked has failed already.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Medium for MemoryDisk {
    fn list(&self) -> io::Result<Vec<(FileId, u64)>> {
        self.disk().step(false)?;
        Ok(self.files())
    }

    fn allocate(&self, file: FileId, bytes: u64) -> io::Result<()> {
        let mut disk = self.disk();
        disk.step(true)?;
        let old = disk.files.get(&file).map_or(0, |file| file.now.len() as u64);
        if disk.room.is_some_and(|room| disk.bytes() - old + bytes > room) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let entry = disk.files.entry(file).or_default();
        entry.now.resize(bytes as usize, 0);
        entry.durable.resize(bytes as usize, 0);
        disk.peak = disk.peak.max(disk.bytes());
        Ok(())
    }

    fn remove(&self, file: FileId) -> io::Result<()> {
        let mut disk = self.disk();
        disk.step(true)?;
        disk.files.remove(&file).map(|_| ()).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn read(&self, file: FileId, offset: u64, into: &mut [u8]) -> io::Result<()> {
        check_whole_pages(offset, into);
        let mut disk = self.disk();
        disk.step(false)?;
        let from = &disk.file(file)?.now;
        let bytes = from.get(offset as usize..offset as usize + into.len());
        into.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write(&self, file: FileId, offset: u64, parts: &mut [IoSlice<'_>]) -> io::Result<()> {
        let mut disk = self.disk();
        disk.step(true)?;
        let file = disk.file(file)?;
        let mut at = offset as usize;
        for part in parts {
            check_whole_pages(at as u64, part);
            let into = file.now.get_mut(at..at + part.len()).expect("the log writes within its files");
            into.copy_from_slice(part);
            file.unsynced.extend(at / PAGE..(at + part.len()) / PAGE);
            at += part.len();
        }
        Ok(())
    }

    fn sync(&self, file: FileId) -> io::Result<()> {
        let mut disk = self.disk();
        disk.step(true)?;
        let file = disk.file(file)?;
        for page in std::mem::take(&mut file.unsynced) {
            let page = page * PAGE..((page + 1) * PAGE).min(file.now.len());
            if page.start < page.end {
                file.durable[page.clone()].copy_from_slice(&file.now[page]);
            }
        }
        Ok(())
    }

    fn store(&self) -> u64 {
        1
    }

    fn name(&self) -> String {
        "memory".into()
    }
}

/// What direct I/O would refuse.
fn check_whole_pages(offset: u64, bytes: &[u8]) {
    assert!(offset.is_multiple_of(PAGE as u64) && bytes.len().is_multiple_of(PAGE), "whole pages");
    assert!((bytes.as_ptr() as usize).is_multiple_of(PAGE), "page aligned");
}

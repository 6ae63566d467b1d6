//! How a log begins: from the footers of its segments, and where one is missing from the chain of its batches.
//!
//! Every entry has been verified by a checksum before it is believed; blocks are verified when they are read. The chain of a
//! segment without a footer ends where the next batch is not whole: what follows was not flushed.
//!
//! A device that fails meanwhile is no torn end: what it did not show would be cut off for good, and what was removed by
//! an entry there would be back. Then the log does not begin.

use std::collections::BTreeMap;
use std::io;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustc_hash::FxHashMap;

use super::super::tier::Whose;
use super::format::{
    Batch, Entry, Invalid, Life, PAGE, Says, VERSION, batch_header_pages, block_pages, decode_batch, decode_life,
    decode_table, decode_trailer, footer_pages,
};
use super::index::Location;
use super::io::{FileId, Medium, Pages, Workers, holds};
use super::log::{Log, Segment, Stage};
use super::ring::Ring;
use crate::error::Error;

/// Files that are looked through at once: as many reads as a disk wants before it.
const SCANNERS: usize = 16;

/// One segment as it lies there.
struct Scanned {
    life: Life,
    bytes: u64,
    entries: Vec<Entry>,
    /// Page behind the last batch.
    end: u32,
    footer: bool,
}

enum Seen {
    Segment(Scanned),
    /// Nothing that can be used.
    Nothing,
    /// Of another directory.
    Foreign,
    /// Of this version, which this program does not know.
    Newer(u32),
}

fn read(medium: &dyn Medium, file: FileId, page: u32, pages: u32) -> io::Result<Pages> {
    let mut into = Pages::zeroed(pages);
    medium.read(file, u64::from(page) * PAGE as u64, into.bytes_mut())?;
    Ok(into)
}

/// As `read`; `None`: somebody has cut the file, and the pages are not there.
fn read_there(medium: &dyn Medium, file: FileId, page: u32, pages: u32) -> io::Result<Option<Pages>> {
    match read(medium, file, page, pages) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        other => other.map(Some),
    }
}

/// The entries of the footer, if there is one.
fn footer(medium: &dyn Medium, file: FileId, life: Life, pages: u32) -> io::Result<Option<(Vec<Entry>, u32)>> {
    let Some(last) = read_there(medium, file, pages - 1, 1)? else { return Ok(None) };
    let Ok(trailer) = decode_trailer(last.bytes(), life, pages) else { return Ok(None) };
    let Some(table) = read_there(medium, file, trailer.table, pages - 1 - trailer.table)? else { return Ok(None) };
    Ok(decode_table(table.bytes(), trailer).ok().map(|entries| (entries, trailer.end)))
}

/// The batch on this page, if it is whole.
fn batch(medium: &dyn Medium, file: FileId, life: Life, page: u32, pages: u32) -> io::Result<Option<Batch>> {
    let Some(first) = read_there(medium, file, page, 1)? else { return Ok(None) };
    let header = batch_header_pages(first.bytes(), life, page).ok().filter(|header| *header <= pages - page);
    let whole = match header {
        None => None,
        Some(1) => Some(first),
        Some(header) => read_there(medium, file, page, header)?,
    };
    Ok(whole.and_then(|whole| decode_batch(whole.bytes(), life, page, pages).ok()))
}

/// The entries of all batches up to the first that is not whole.
fn chain(medium: &dyn Medium, file: FileId, life: Life, pages: u32) -> io::Result<(Vec<Entry>, u32)> {
    let (mut entries, mut page) = (Vec::new(), 1);
    while page < pages
        && let Some(batch) = batch(medium, file, life, page, pages)?
    {
        entries.extend(batch.entries);
        page += batch.pages;
    }
    Ok((entries, page))
}

fn scan(medium: &dyn Medium, file: FileId, bytes: u64) -> io::Result<Seen> {
    let pages = (bytes / PAGE as u64) as u32;
    // An empty file is one whose making was cut short.
    if pages < 2 {
        return Ok(Seen::Nothing);
    }
    let life = match decode_life(read(medium, file, 0, 1)?.bytes()) {
        Ok(life) => life,
        Err(Invalid::Version(version)) => return Ok(Seen::Newer(version)),
        Err(Invalid::Bytes) => return Ok(Seen::Nothing),
    };
    if life.store != medium.store() {
        return Ok(Seen::Foreign);
    }
    let (entries, end, footer) = match footer(medium, file, life, pages)? {
        Some((entries, end)) => (entries, end, true),
        None => {
            let (entries, end) = chain(medium, file, life, pages)?;
            (entries, end, false)
        }
    };
    Ok(Seen::Segment(Scanned { life, bytes, entries, end, footer }))
}

/// What lies in each of these files: many at once, as a chain is read page by page. With `threads` 0 one after the other, so that it is
/// repeatable; it ends at the first that fails.
fn scan_all(medium: &dyn Medium, files: &[(FileId, u64)], threads: usize) -> io::Result<Vec<Seen>> {
    if threads == 0 {
        return files.iter().map(|&(file, bytes)| scan(medium, file, bytes)).collect();
    }
    let next = AtomicUsize::new(0);
    let labour = || {
        let mut seen = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(&(file, bytes)) = files.get(at) else { return seen };
            seen.push((at, scan(medium, file, bytes)));
        }
    };
    let mut seen: Vec<(usize, io::Result<Seen>)> = std::thread::scope(|scope| {
        let scanners: Vec<_> = (0..SCANNERS.min(files.len())).map(|_| scope.spawn(labour)).collect();
        // A panic there is one here.
        scanners.into_iter().flat_map(|scanner| scanner.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    seen.sort_unstable_by_key(|(at, _)| *at);
    seen.into_iter().map(|(_, seen)| seen).collect()
}

/// True if all bytes of an entry's block are as they were written.
fn is_whole(medium: &dyn Medium, file: FileId, entry: &Entry) -> io::Result<bool> {
    let Says::Block(record, expected) = entry.says else { return Ok(true) };
    let pages = read_there(medium, file, entry.page, block_pages(record.layout))?;
    Ok(pages.is_some_and(|pages| holds(&pages, record.layout, expected)))
}

/// When something was said: the segment's number, and the page.
type When = (u64, u32);

#[derive(Default)]
struct Cleared {
    all: When,
    namespaces: FxHashMap<u64, When>,
    tenants: FxHashMap<u64, When>,
}

impl Log {
    /// Begins with what lies on the medium.
    pub(super) fn recover(
        medium: Arc<dyn Medium>,
        threads: usize,
        ring: Option<Ring>,
        notify: Arc<dyn Fn() + Send + Sync>,
        limit: u64,
        seed: u64,
    ) -> Result<Self, Error> {
        let failed = |error: io::Error| {
            Error::retry(format!(
                "the SSD directory {} fails: {error}: try again; if it stays so, its device fails: give another \
                 directory, or empty this one",
                medium.name()
            ))
        };
        let workers = Workers::new(medium.clone(), threads, ring, notify)?;
        let mut log = Self::empty(workers, limit, super::segment_bytes(limit), seed);
        let mut by_number = BTreeMap::new();
        let files = medium.list().map_err(failed)?;
        let seen = scan_all(&*medium, &files, threads).map_err(failed)?;
        for ((file, bytes), seen) in files.into_iter().zip(seen) {
            match seen {
                Seen::Segment(scanned) if !scanned.entries.is_empty() => {
                    // Somebody has copied a segment: one of them is as good as none.
                    if let Some((file, twin)) = by_number.insert(scanned.life.number, (file, scanned)) {
                        log.adopt(file, Segment::vacant(Life { store: 0, number: 0, nonce: 0 }, twin.bytes));
                    }
                }
                Seen::Segment(_) | Seen::Nothing => {
                    let life = Life { store: 0, number: 0, nonce: 0 };
                    log.adopt(file, Segment::vacant(life, bytes));
                }
                Seen::Foreign => {
                    tracing::warn!(
                        "{}: segment {file:04x} is of another directory: it is left alone and counted in nothing",
                        medium.name()
                    );
                    log.foreign.insert(file);
                }
                // What it says was removed would be back without it, and what it holds is not ours to write over.
                Seen::Newer(version) => {
                    return Err(Error::give_up(format!(
                        "the SSD directory {}: segment {file:04x} was written in format {version}, and this daemon knows \
                         {VERSION}: run the newer daemon, or empty the directory",
                        medium.name()
                    )));
                }
            }
        }
        let mut cleared = Cleared::default();
        for (number, (file, scanned)) in by_number {
            log.next_number = number + 1;
            let mut entries = Vec::with_capacity(scanned.entries.len());
            for entry in scanned.entries {
                // A block that was moved, but perhaps not all of it: then the old copy is still what it was. The footer does
                // not name it, as the next start believes the footer.
                if !scanned.footer && log.has_another(&entry) && !is_whole(&*medium, file, &entry).map_err(failed)? {
                    continue;
                }
                log.apply(file, number, &entry, &mut cleared);
                entries.push(entry);
            }
            let mut segment = Segment::vacant(scanned.life, scanned.bytes);
            let whole = scanned.end + footer_pages(entries.len());
            if scanned.footer || whole > (scanned.bytes / PAGE as u64) as u32 {
                // Only a file that somebody cut has no room for its footer: the next start looks through it again.
                segment.stage = Stage::Sealed;
            } else {
                // It gets its footer as soon as there is time, and the torn rest is cut off.
                segment.stage = Stage::Sealing { begun: false };
                log.unsealed += 1;
                (segment.cursor, segment.hole) = (scanned.end, true);
                segment.table = entries;
            }
            log.order.push_back(file);
            log.adopt(file, segment);
        }
        log.apply_cleared(&cleared);
        log.shrink(&*medium).map_err(failed)?;
        log.pump();
        Ok(log)
    }

    fn adopt(&mut self, file: FileId, segment: Segment) {
        self.used += segment.bytes;
        self.segments.insert(file, segment);
    }

    /// True if an older copy of this block is known.
    fn has_another(&self, entry: &Entry) -> bool {
        matches!(entry.says, Says::Block(record, _) if self.index.number(&record.place.key).is_some())
    }

    fn apply(&mut self, file: FileId, number: u64, entry: &Entry, cleared: &mut Cleared) {
        let when = (number, entry.page);
        match entry.says {
            Says::Block(record, digest) => self.index.insert(record, Location { file, page: entry.page }, digest),
            Says::Removed(key) => {
                self.index.remove(&key);
            }
            Says::Cleared(Whose::Namespace(namespace)) => {
                cleared.namespaces.insert(namespace, when);
            }
            Says::Cleared(Whose::Tenant(tenant)) => {
                cleared.tenants.insert(tenant, when);
            }
            Says::ClearedAll => cleared.all = when,
        }
    }

    /// What was written before its owner's blocks were cleared goes.
    fn apply_cleared(&mut self, cleared: &Cleared) {
        if cleared.all == When::default() && cleared.namespaces.is_empty() && cleared.tenants.is_empty() {
            return;
        }
        let last = |times: &FxHashMap<u64, When>, owner: u64| times.get(&owner).copied().unwrap_or_default();
        let gone = self.index.iter().filter(|found| {
            let (owner, location) = (found.record.owner, found.location);
            let written = (self.segments[&location.file].life.number, location.page);
            let of_owner = last(&cleared.namespaces, owner.namespace).max(last(&cleared.tenants, owner.tenant));
            written < cleared.all.max(of_owner)
        });
        let gone: Vec<_> = gone.map(|found| found.record.place.key).collect();
        for key in gone {
            self.index.remove(&key);
        }
    }

    /// The limit may be lower than it was: what is too much goes, the oldest first.
    fn shrink(&mut self, medium: &dyn Medium) -> io::Result<()> {
        while self.used > self.limit {
            let vacant =
                self.segments.iter().find(|(_, segment)| segment.stage == Stage::Vacant).map(|(&file, _)| file);
            let Some(file) = vacant.or_else(|| self.order.pop_front()) else { break };
            for key in self.index.keys_in(file) {
                self.index.remove(&key);
            }
            medium.remove(file)?;
            if let Some(segment) = self.segments.remove(&file) {
                self.used -= segment.bytes;
                self.unsealed -= usize::from(segment.stage == Stage::Sealing { begun: false });
            }
        }
        Ok(())
    }
}

//! The seam under the log: files of pages, and who waits for them.
//!
//! A [`Medium`] does one thing at a time and blocks. [`Workers`] bring it jobs and tell their ends; without threads they do
//! a job when its end is asked for, so that a log over a memory medium is deterministic. Blocks can go by io_uring
//! (`ring.rs`); what is rare and has several steps is left to threads.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{self, IoSlice};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::mailbox::Wake;
use crate::memory::{ReadHold, WriteHold, checksum, checksum_cold};
use crate::types::Layout;

use super::format::{PAGE, block_pages, digest};
use super::ring::Ring;

/// Number of a segment file.
pub type FileId = u16;

/// A directory of segment files. Offsets and lengths are whole pages, memory is page aligned.
pub trait Medium: Send + Sync {
    /// Its files and their bytes. What is not a segment file is left out, and told to the log.
    fn list(&self) -> io::Result<Vec<(FileId, u64)>>;
    /// Makes a file (if need be) and makes it just so long, with room for all of it. Durable when it returns.
    fn allocate(&self, file: FileId, bytes: u64) -> io::Result<()>;
    /// Removes a file. Durable when it returns.
    fn remove(&self, file: FileId) -> io::Result<()>;
    /// Reads all of `into`.
    fn read(&self, file: FileId, offset: u64, into: &mut [u8]) -> io::Result<()>;
    /// Writes all parts, one behind the other.
    fn write(&self, file: FileId, offset: u64, parts: &mut [IoSlice<'_>]) -> io::Result<()>;
    /// Makes durable what was written to this file.
    fn sync(&self, file: FileId) -> io::Result<()>;
    /// Which directory this is: the number that its segments carry.
    fn store(&self) -> u64;
    /// How errors and the log call it.
    fn name(&self) -> String;
    /// The file as the kernel knows it, if there is such a thing.
    fn descriptor(&self, _: FileId) -> Option<io::Result<Arc<File>>> {
        None
    }
}

/// How blocks get from and to real files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// One thread, by io_uring.
    Ring,
    /// A thread for each request under way.
    Threads,
}

impl By {
    /// As it is shown.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ring => "io_uring",
            Self::Threads => "threads",
        }
    }
}

/// Memory of whole pages, page aligned.
#[derive(Debug)]
pub struct Pages {
    memory: Vec<u8>,
    start: usize,
    length: usize,
}

impl Pages {
    /// So many pages of zeros.
    pub fn zeroed(pages: u32) -> Self {
        let length = pages as usize * PAGE;
        let memory = vec![0; length + PAGE - 1];
        // The address does not change when the value moves.
        let start = memory.as_ptr().align_offset(PAGE);
        Self { memory, start, length }
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.length]
    }

    /// Its bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.length]
    }
}

/// A piece of what is written.
#[derive(Debug)]
pub(super) enum Part {
    /// Own memory.
    Pages(Pages),
    /// A slot of the arena.
    Block(ReadHold),
}

impl Part {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Pages(pages) => pages.bytes(),
            Self::Block(block) => block.pages(),
        }
    }
}

/// What can be asked of a file.
#[derive(Debug)]
pub(super) enum Work {
    /// A block into its slot, verified.
    Load { offset: u64, into: WriteHold, digest: u32 },
    /// A block into memory of its own, only to be verified.
    Check { offset: u64, layout: Layout, digest: u32 },
    /// Pages as they are.
    Fetch { offset: u64, pages: u32 },
    /// Parts, one behind the other.
    Write { offset: u64, parts: Vec<Part> },
    /// A new use of the file: it gets its length and its header, durably.
    Prepare { bytes: u64, header: Pages },
    /// The end of a use: footer written, and the file cut behind it.
    Finish { offset: u64, footer: Pages },
    /// What was written so far becomes durable.
    Sync,
    /// The file goes.
    Remove,
}

/// What became of it.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Done.
    Done,
    /// Loads and checks: the bytes are not those that were written.
    Corrupt,
    /// Fetches: the pages.
    Fetched(Pages),
    /// The medium failed.
    Failed(io::Error),
}

fn part_slices(parts: &[Part]) -> Vec<IoSlice<'_>> {
    parts.iter().map(|part| IoSlice::new(part.bytes())).collect()
}

/// Whether a block's bytes are those that were written; if so, its checksums are set.
fn intact(into: &mut WriteHold, expected: u32) -> bool {
    let (strips, strip_bytes) = (into.strips(), into.strip_bytes());
    let mut sums = Vec::with_capacity(strips.len());
    let mut rest: &[u8] = into.strips_mut(strips.clone());
    while !rest.is_empty() {
        let (strip, behind) = rest.split_at(strip_bytes);
        sums.push(checksum_cold(strip, behind));
        rest = behind;
    }
    let same = digest(sums.iter().copied()) == expected;
    if same {
        strips.zip(sums).for_each(|(strip, sum)| into.set_checksum(strip, sum));
    }
    same
}

/// Whether these pages hold the block that was written.
pub(super) fn holds(pages: &Pages, layout: Layout, expected: u32) -> bool {
    let strips = pages.bytes()[..layout.block_bytes()].chunks_exact(layout.strip_bytes as usize);
    digest(strips.map(checksum)) == expected
}

/// What became of a block that was read: `intact` if its bytes have come.
fn verified(read: io::Result<()>, intact: impl FnOnce() -> bool) -> Outcome {
    match read {
        Ok(()) if intact() => Outcome::Done,
        Ok(()) => Outcome::Corrupt,
        // Somebody took the file away or cut it: the device works, and the block is gone.
        Err(error) if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::NotFound) => {
            Outcome::Corrupt
        }
        Err(error) => Outcome::Failed(error),
    }
}

/// What became of a load.
pub(super) fn loaded(mut into: WriteHold, digest: u32, read: io::Result<()>) -> Outcome {
    verified(read, || intact(&mut into, digest))
}

/// What became of a check.
pub(super) fn checked(pages: &Pages, layout: Layout, digest: u32, read: io::Result<()>) -> Outcome {
    verified(read, || holds(pages, layout, digest))
}

/// What became of a fetch.
pub(super) fn fetched(pages: Pages, read: io::Result<()>) -> Outcome {
    read.map_or_else(Outcome::Failed, |()| Outcome::Fetched(pages))
}

/// What became of anything else.
pub(super) fn ended(result: io::Result<()>) -> Outcome {
    result.map_or_else(Outcome::Failed, |()| Outcome::Done)
}

/// Does it. What it holds is let go of by then.
fn run(medium: &dyn Medium, file: FileId, work: Work) -> Outcome {
    match work {
        Work::Load { offset, mut into, digest } => {
            let read = medium.read(file, offset, into.pages_mut());
            loaded(into, digest, read)
        }
        Work::Check { offset, layout, digest } => {
            let mut pages = Pages::zeroed(block_pages(layout));
            let read = medium.read(file, offset, pages.bytes_mut());
            checked(&pages, layout, digest, read)
        }
        Work::Fetch { offset, pages } => {
            let mut pages = Pages::zeroed(pages);
            let read = medium.read(file, offset, pages.bytes_mut());
            fetched(pages, read)
        }
        Work::Write { offset, parts } => ended(medium.write(file, offset, &mut part_slices(&parts))),
        Work::Prepare { bytes, header } => ended(
            medium
                .allocate(file, bytes)
                .and_then(|()| medium.write(file, 0, &mut [IoSlice::new(header.bytes())]))
                .and_then(|()| medium.sync(file)),
        ),
        Work::Finish { offset, footer } => ended(finish(medium, file, offset, &footer)),
        Work::Sync => ended(medium.sync(file)),
        Work::Remove => ended(medium.remove(file)),
    }
}

/// Writes a segment's footer and cuts the file behind it. In this order: a footer is believed, so what it names is durable
/// first; and were the file cut first, a crash between would leave one whose end is neither footer nor room.
pub(super) fn finish(medium: &dyn Medium, file: FileId, offset: u64, footer: &Pages) -> io::Result<()> {
    medium.sync(file)?;
    medium.write(file, offset, &mut [IoSlice::new(footer.bytes())])?;
    medium.sync(file)?;
    medium.allocate(file, offset + footer.bytes().len() as u64)
}

/// Names a job; whoever submits it chooses.
pub(super) type JobId = u64;

pub(super) struct Job {
    pub id: JobId,
    pub file: FileId,
    pub work: Work,
}

impl Job {
    /// True for what io_uring does, where it is used.
    fn is_transfer(&self) -> bool {
        matches!(self.work, Work::Load { .. } | Work::Check { .. } | Work::Fetch { .. } | Work::Write { .. })
    }
}

#[derive(Default)]
pub(super) struct Desk {
    /// For the threads.
    waiting: VecDeque<Job>,
    /// For the ring.
    pub transfers: VecDeque<Job>,
    /// The ring sleeps: nothing waits for it.
    pub asleep: bool,
    /// The ring has failed: nothing of what it has, or is given, ever ends.
    pub lost: bool,
    /// Since when.
    pub running: BTreeMap<JobId, Instant>,
    finished: Vec<(JobId, Outcome)>,
    pub stopping: bool,
}

pub(super) struct Shared {
    pub medium: Arc<dyn Medium>,
    desk: Mutex<Desk>,
    /// Something waits, or all is to stop.
    work: Condvar,
    /// Something has finished.
    news: Condvar,
    notify: Arc<dyn Fn() + Send + Sync>,
}

impl Shared {
    pub fn desk(&self) -> MutexGuard<'_, Desk> {
        // Every critical section is a push or a pop.
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn labour(&self) {
        let mut desk = self.desk();
        loop {
            let Some(job) = desk.waiting.pop_front() else {
                if desk.stopping {
                    return;
                }
                desk = self.work.wait(desk).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            desk.running.insert(job.id, Instant::now());
            drop(desk);
            let outcome = run(&*self.medium, job.file, job.work);
            self.finish([(job.id, outcome)]);
            desk = self.desk();
        }
    }

    /// These are done.
    pub fn finish(&self, jobs: impl IntoIterator<Item = (JobId, Outcome)>) {
        let mut desk = self.desk();
        let before = desk.finished.len();
        for (id, outcome) in jobs {
            desk.running.remove(&id);
            desk.finished.push((id, outcome));
        }
        let first = before == 0 && !desk.finished.is_empty();
        self.news.notify_all();
        drop(desk);
        // One call tells of all that is there.
        if first {
            (self.notify)();
        }
    }
}

/// Do the jobs of one medium.
pub(super) struct Workers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Wakes the ring, if there is one.
    bell: Option<Arc<Wake>>,
    born: Instant,
    /// How often finished jobs were asked for: what stands for the time where there are no threads.
    asked: u64,
}

/// A device that has not answered for so long has failed. Disks retry by themselves for a second or two.
const SILENCE: Duration = Duration::from_secs(5);
/// Milliseconds that one look counts where there are no threads.
const LOOK_MILLIS: u64 = 10;

impl Workers {
    /// `threads` may be 0. `notify` is called by them when something has finished. A ring does what moves blocks, the threads
    /// the rest.
    pub fn new(
        medium: Arc<dyn Medium>,
        threads: usize,
        ring: Option<Ring>,
        notify: Arc<dyn Fn() + Send + Sync>,
    ) -> Result<Self, Error> {
        let (desk, work, news) = (Mutex::default(), Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { medium, desk, work, news, notify });
        let mut workers = Self { shared, threads: Vec::new(), bell: None, born: Instant::now(), asked: 0 };
        for _ in 0..threads {
            workers.start(|shared| shared.labour())?;
        }
        if let Some(ring) = ring {
            workers.bell = Some(ring.bell());
            workers.start(|shared| ring.labour(&shared))?;
        }
        Ok(workers)
    }

    fn start(&mut self, labour: impl FnOnce(Arc<Shared>) + Send + 'static) -> Result<(), Error> {
        let shared = self.shared.clone();
        let started = std::thread::Builder::new().name("ssd".into()).spawn(move || labour(shared));
        let failed = |error| Error::retry(format!("a thread for the disk cannot be started: {error}"));
        self.threads.push(started.map_err(failed)?);
        Ok(())
    }

    /// How blocks move.
    pub fn by(&self) -> By {
        if self.bell.is_some() { By::Ring } else { By::Threads }
    }

    /// What they work on.
    pub fn medium(&self) -> &dyn Medium {
        &*self.shared.medium
    }

    /// Tells whoever polls that it should.
    pub fn notify(&self) {
        (self.shared.notify)();
    }

    /// Begins a job.
    pub fn submit(&self, id: JobId, file: FileId, work: Work) {
        let (mut desk, job) = (self.shared.desk(), Job { id, file, work });
        if let Some(bell) = self.bell.as_ref().filter(|_| job.is_transfer()) {
            desk.transfers.push_back(job);
            if std::mem::take(&mut desk.asleep) {
                bell.set();
            }
            return;
        }
        desk.waiting.push_back(job);
        drop(desk);
        if self.threads.is_empty() {
            (self.shared.notify)();
        } else {
            self.shared.work.notify_one();
        }
    }

    /// What has finished since the last call.
    pub(super) fn finished(&mut self) -> Vec<(JobId, Outcome)> {
        self.asked += 1;
        let mut desk = self.shared.desk();
        if self.threads.is_empty() {
            let jobs = std::mem::take(&mut desk.waiting);
            drop(desk);
            return jobs.into_iter().map(|job| (job.id, run(&*self.shared.medium, job.file, job.work))).collect();
        }
        std::mem::take(&mut desk.finished)
    }

    /// Takes back the loads that nobody has begun, and lets go of what they hold.
    pub fn drop_loads(&self) -> Vec<JobId> {
        let mut desk = self.shared.desk();
        let queue = if self.bell.is_some() { &mut desk.transfers } else { &mut desk.waiting };
        let (loads, others): (VecDeque<Job>, VecDeque<Job>) = std::mem::take(queue)
            .into_iter()
            .partition(|job| matches!(job.work, Work::Load { .. } | Work::Check { .. }));
        *queue = others;
        drop(desk);
        loads.into_iter().map(|job| job.id).collect()
    }

    /// Waits until something has finished, or until then. True if something has.
    pub fn wait(&self, until: Instant) -> bool {
        let mut desk = self.shared.desk();
        loop {
            let news = !desk.finished.is_empty() || (self.threads.is_empty() && !desk.waiting.is_empty());
            let left = until.saturating_duration_since(Instant::now());
            if news || left.is_zero() || self.threads.is_empty() {
                return news;
            }
            desk = self.shared.news.wait_timeout(desk, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// True if the device has not answered for seconds.
    pub fn silent(&self) -> bool {
        let desk = self.shared.desk();
        desk.lost || desk.running.values().any(|since| since.elapsed() > SILENCE)
    }

    /// Milliseconds since the start; where there are no threads, as many as is repeatable.
    pub fn millis(&self) -> u64 {
        if self.threads.is_empty() { self.asked * LOOK_MILLIS } else { self.born.elapsed().as_millis() as u64 }
    }

    /// Ends: what waits is not begun any more. Threads that hang in the device are left behind.
    pub fn stop(&mut self) {
        let mut desk = self.shared.desk();
        desk.stopping = true;
        let dropped = (std::mem::take(&mut desk.waiting), std::mem::take(&mut desk.transfers));
        drop(desk);
        drop(dropped);
        self.shared.work.notify_all();
        self.bell.iter().for_each(|bell| bell.set());
        let until = Instant::now() + SILENCE;
        let mut desk = self.shared.desk();
        while !desk.running.is_empty() && Instant::now() < until {
            let left = until.saturating_duration_since(Instant::now());
            desk = self.shared.news.wait_timeout(desk, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let hangs = !desk.running.is_empty();
        drop(desk);
        for thread in self.threads.drain(..) {
            if !hangs || thread.is_finished() {
                // It has nothing more to do. A panic in it has been printed.
                let _ = thread.join();
            }
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::super::twin::MemoryDisk;
    use super::*;
    use crate::random::Random;

    // Goal: a power failure never leaves a footer without what it names. Method: pages that nobody made durable, then their footer,
    // stopped at each operation; what survives of the rest is chance.
    #[test]
    fn a_footer_is_never_alone() {
        let page = |byte: u8| {
            let mut page = Pages::zeroed(1);
            page.bytes_mut().fill(byte);
            page
        };
        let (bytes, footer, mut seen) = (4 * PAGE as u64, page(7), 0);
        for (stop, seed) in (0..6).flat_map(|stop| (0..40).map(move |seed| (stop, seed))) {
            let disk = MemoryDisk::default();
            disk.allocate(3, bytes).expect("there is room");
            disk.write(3, PAGE as u64, &mut [IoSlice::new(page(5).bytes())]).expect("it works");
            disk.stop_after((stop < 5).then_some(stop));
            let finished = finish(&disk, 3, 2 * PAGE as u64, &footer).is_ok();
            let left = disk.crashed(&mut Random(seed));
            let mut there = [Pages::zeroed(1), Pages::zeroed(1)];
            for (number, page) in (1..).zip(&mut there) {
                left.read(3, number * PAGE as u64, page.bytes_mut()).expect("it works");
            }
            if there[1].bytes() == footer.bytes() {
                seen += 1;
                assert_eq!(there[0].bytes()[0], 5, "stopped after {stop}, seed {seed}");
            }
            assert!(!finished || there[1].bytes() == footer.bytes(), "it was said to be done");
        }
        assert!(seen > 40, "{seen}");
    }
}

//! Blocks from and to real files by io_uring: one thread for all that is under way with a device, instead of one for each.
//!
//! ```text
//!   transfers (Desk) ---take---> a flight: submitted ---completed---> all bytes moved? ---yes---> verified, finished
//!                                     ^-------------- the rest ------------no--'
//! ```
//!
//! The kernel writes into the memory of a flight until its completion has been seen. So flights own what they move, and a
//! thread that has to end with some of them in the air leaves them behind for good rather than let go of their memory.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Instant;

use io_uring::{IoUring, Probe, opcode, squeue, types};
use nix::libc::iovec;

use crate::error::Error;
use crate::mailbox::Wake;
use crate::memory::WriteHold;
use crate::types::Layout;

use super::format::block_pages;
use super::io::{Job, JobId, Outcome, Pages, Part, Shared, Work, checked, ended, fetched, loaded};

/// Requests that a device has before it at once: twice as many as threads would be. What waits behind them can still be taken
/// back when the device hangs.
const DEPTH: usize = 32;
/// Parts that one call takes (IOV_MAX).
const PARTS: usize = 1024;
/// What the completion of the bell carries, instead of the number of a flight.
const BELL: u64 = u64::MAX;

/// A ring that nothing has gone through yet.
pub(super) struct Ring {
    ring: IoUring,
    bell: Arc<Wake>,
}

impl Ring {
    /// Asks the kernel for one.
    ///
    /// # Errors
    /// Give up: it has none for us, and why.
    pub fn new() -> Result<Self, Error> {
        let refused = |why: &dyn std::fmt::Display| Error::give_up(format!("the kernel gives no io_uring: {why}"));
        // One more, for the bell.
        let ring = IoUring::new((DEPTH + 1).next_power_of_two() as u32).map_err(|error| refused(&error))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe).map_err(|error| refused(&error))?;
        let needed = [opcode::Readv::CODE, opcode::Writev::CODE, opcode::PollAdd::CODE];
        if !needed.iter().all(|&code| probe.is_supported(code)) {
            return Err(refused(&"it lacks operations"));
        }
        Ok(Self { ring, bell: Arc::new(Wake::new()?) })
    }

    /// Rung when something waits, or all is to stop.
    pub fn bell(&self) -> Arc<Wake> {
        self.bell.clone()
    }

    /// Does all transfers until it is to stop.
    pub fn labour(self, shared: &Shared) {
        let Self { mut ring, bell } = self;
        let mut flights = Flights::default();
        if let Err(error) = fly(&mut ring, &bell, &mut flights, shared) {
            // The device counts as silent, and is gone on without.
            tracing::error!("{}: io_uring: {error}", shared.medium.name());
            shared.desk().lost = true;
        }
    }
}

/// Something under way, and the memory that the kernel has.
struct Flight {
    id: JobId,
    file: Arc<File>,
    offset: u64,
    reads: bool,
    /// What is left to move: parts from this one on.
    parts: Vec<iovec>,
    at: usize,
    load: Load,
}

/// Whose memory it is.
enum Load {
    Block { into: WriteHold, digest: u32 },
    Check { pages: Pages, layout: Layout, digest: u32 },
    Pages(Pages),
    Parts { _parts: Vec<Part> },
}

impl Flight {
    /// `None`: no transfer.
    fn new(id: JobId, file: Arc<File>, work: Work) -> Option<Self> {
        let part = |bytes: &[u8]| iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let part_mut = |bytes: &mut [u8]| iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let (offset, reads, parts, load) = match work {
            Work::Load { offset, mut into, digest } => {
                (offset, true, vec![part_mut(into.pages_mut())], Load::Block { into, digest })
            }
            Work::Check { offset, layout, digest } => {
                let mut pages = Pages::zeroed(block_pages(layout));
                (offset, true, vec![part_mut(pages.bytes_mut())], Load::Check { pages, layout, digest })
            }
            Work::Fetch { offset, pages } => {
                let mut pages = Pages::zeroed(pages);
                (offset, true, vec![part_mut(pages.bytes_mut())], Load::Pages(pages))
            }
            Work::Write { offset, parts } => {
                let all = parts.iter().map(|of| part(of.bytes())).collect();
                (offset, false, all, Load::Parts { _parts: parts })
            }
            _ => return None,
        };
        Some(Self { id, file, offset, reads, parts, at: 0, load })
    }

    fn entry(&self, number: u64) -> squeue::Entry {
        let (file, rest) = (types::Fd(self.file.as_raw_fd()), &self.parts[self.at..]);
        let (first, count) = (rest.as_ptr(), rest.len().min(PARTS) as u32);
        let entry = if self.reads {
            opcode::Readv::new(file, first, count).offset(self.offset).build()
        } else {
            opcode::Writev::new(file, first, count).offset(self.offset).build()
        };
        entry.user_data(number)
    }

    /// Takes in what the kernel says. `None`: the rest is still to be moved.
    fn moved(&mut self, result: i32) -> Option<io::Result<()>> {
        if result < 0 {
            let error = io::Error::from_raw_os_error(-result);
            return (!passes(&error)).then_some(Err(error));
        }
        if result == 0 {
            let kind = if self.reads { io::ErrorKind::UnexpectedEof } else { io::ErrorKind::WriteZero };
            return Some(Err(kind.into()));
        }
        self.offset += result as u64;
        let mut left = result as usize;
        while let Some(part) = self.parts.get_mut(self.at).filter(|_| left > 0) {
            let some = left.min(part.iov_len);
            part.iov_base = part.iov_base.wrapping_byte_add(some);
            part.iov_len -= some;
            left -= some;
            self.at += usize::from(part.iov_len == 0);
        }
        (self.at == self.parts.len()).then_some(Ok(()))
    }

    /// Lets go of what it holds.
    fn land(self, result: io::Result<()>) -> (JobId, Outcome) {
        let outcome = match self.load {
            Load::Block { into, digest } => loaded(into, digest, result),
            Load::Check { pages, layout, digest } => checked(&pages, layout, digest, result),
            Load::Pages(pages) => fetched(pages, result),
            Load::Parts { .. } => ended(result),
        };
        (self.id, outcome)
    }
}

/// All that are in the air, by their numbers.
#[derive(Default)]
struct Flights {
    seats: Vec<Option<Flight>>,
    count: usize,
}

impl Flights {
    /// What is to be submitted for it.
    fn board(&mut self, flight: Flight) -> squeue::Entry {
        let free = self.seats.iter().position(Option::is_none).unwrap_or(self.seats.len());
        if free == self.seats.len() {
            self.seats.push(None);
        }
        self.count += 1;
        self.seats[free].insert(flight).entry(free as u64)
    }

    fn at(&mut self, number: u64) -> Option<&mut Flight> {
        self.seats.get_mut(number as usize)?.as_mut()
    }

    fn leave(&mut self, number: u64) -> Option<Flight> {
        let flight = self.seats.get_mut(number as usize)?.take();
        self.count -= usize::from(flight.is_some());
        flight
    }
}

impl Drop for Flights {
    fn drop(&mut self) {
        // The kernel may still write there.
        self.seats.drain(..).flatten().for_each(std::mem::forget);
    }
}

/// What becomes of a transfer whose file cannot be had.
fn refused(work: Work, error: io::Error) -> Outcome {
    match work {
        Work::Load { into, digest, .. } => loaded(into, digest, Err(error)),
        _ => Outcome::Failed(error),
    }
}

/// Goes on until it is to stop and nothing is in the air.
fn fly(ring: &mut IoUring, bell: &Wake, flights: &mut Flights, shared: &Shared) -> io::Result<()> {
    let listen = opcode::PollAdd::new(types::Fd(bell.as_fd().as_raw_fd()), nix::libc::POLLIN as u32).build();
    let listen = listen.user_data(BELL);
    let (mut entries, mut begun, mut done) = (vec![listen.clone()], Vec::new(), Vec::new());
    let mut landed: Vec<(Flight, io::Result<()>)> = Vec::new();
    loop {
        let mut desk = shared.desk();
        while flights.count + begun.len() < DEPTH
            && let Some(job) = desk.transfers.pop_front()
        {
            desk.running.insert(job.id, Instant::now());
            begun.push(job);
        }
        if desk.stopping && flights.count + begun.len() + landed.len() == 0 {
            return Ok(());
        }
        desk.asleep = desk.transfers.is_empty();
        drop(desk);
        for Job { id, file, work } in begun.drain(..) {
            match shared.medium.descriptor(file).unwrap_or_else(|| Err(io::ErrorKind::Unsupported.into())) {
                Ok(file) => {
                    let Some(flight) = Flight::new(id, file, work) else { continue };
                    entries.push(flights.board(flight));
                }
                Err(error) => done.push((id, refused(work, error))),
            }
        }
        for entry in entries.drain(..) {
            // SAFETY: what the entry names (file, parts, their memory) belongs to a flight that stays until its completion has
            // been seen, or for good; the bell lives as long as this function.
            unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
        }
        // What has come is verified when the device has its next requests.
        let nothing_to_do = landed.is_empty() && done.is_empty();
        match ring.submit_and_wait(usize::from(nothing_to_do)) {
            Err(error) if !passes(&error) => return Err(error),
            _ => {}
        }
        // One by one: whoever waits for the first does not wait for the others' checksums.
        for (flight, result) in landed.drain(..) {
            shared.finish([flight.land(result)]);
        }
        if !done.is_empty() {
            shared.finish(done.drain(..));
        }
        for completion in ring.completion() {
            let number = completion.user_data();
            if number == BELL {
                bell.clear();
                entries.push(listen.clone());
            } else if let Some(flight) = flights.at(number) {
                match flight.moved(completion.result()) {
                    Some(result) => landed.extend(flights.leave(number).map(|flight| (flight, result))),
                    None => entries.push(flight.entry(number)),
                }
            }
        }
    }
}

/// True for what is over if it is tried again.
fn passes(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy)
}

#[cfg(test)]
mod tests {
    use super::super::format::digest;
    use super::super::io::{FileId, Medium, Workers};
    use super::*;
    use crate::memory::{Arena, checksum};
    use crate::types::Layout;
    use std::io::{IoSlice, Write};
    use std::os::fd::{FromRawFd, OwnedFd};
    use std::sync::mpsc;
    use std::time::Duration;

    const PATIENCE: Duration = Duration::from_secs(120);
    const LAYOUT: Layout = Layout { strips: 1, strip_bytes: 4096 };

    /// Its files are the ends of a pipe: who reads waits until something is written.
    struct Pipe(Arc<File>);

    impl Medium for Pipe {
        fn list(&self) -> io::Result<Vec<(FileId, u64)>> {
            Ok(Vec::new())
        }
        fn allocate(&self, _: FileId, _: u64) -> io::Result<()> {
            Ok(())
        }
        fn remove(&self, _: FileId) -> io::Result<()> {
            Ok(())
        }
        fn read(&self, _: FileId, _: u64, _: &mut [u8]) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }
        fn write(&self, _: FileId, _: u64, _: &mut [IoSlice<'_>]) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }
        fn sync(&self, _: FileId) -> io::Result<()> {
            Ok(())
        }
        fn store(&self) -> u64 {
            1
        }
        fn name(&self) -> String {
            "pipe".into()
        }
        fn descriptor(&self, file: FileId) -> Option<io::Result<Arc<File>>> {
            Some(if file == 0 { Ok(self.0.clone()) } else { Err(io::ErrorKind::NotFound.into()) })
        }
    }

    struct Bench {
        workers: Workers,
        into: File,
        arena: Arc<Arena>,
        rung: mpsc::Receiver<()>,
    }

    /// `None`, and the reason is told, where the kernel has no ring.
    fn bench() -> Option<Bench> {
        let ring = Ring::new().inspect_err(|error| eprintln!("skipped: {error}")).ok()?;
        let (from, into) = nix::unistd::pipe().expect("a pipe");
        let arena = Arena::create(64 * 8192, LAYOUT).expect("a small arena");
        let (bell, rung) = mpsc::channel();
        // The test may have ended.
        let notify = Arc::new(move || {
            let _ = bell.send(());
        });
        let workers = Workers::new(Arc::new(Pipe(Arc::new(from.into()))), 1, Some(ring), notify).expect("threads");
        Some(Bench { workers, into: into.into(), arena, rung })
    }

    impl Bench {
        fn load(&self, slot: u32, file: FileId) {
            let life = self.arena.issue(slot);
            let into = self.arena.begin_write(life, 0..1).expect("a new life");
            // The hold is what keeps it.
            self.arena.retire(life);
            let digest = digest(std::iter::once(checksum(&[7; 4096])));
            self.workers.submit(slot.into(), file, Work::Load { offset: 0, into, digest });
        }

        fn next(&mut self) -> Vec<(JobId, Outcome)> {
            self.rung.recv_timeout(PATIENCE).expect("something ends");
            self.workers.finished()
        }
    }

    // Goal: of what a device that hangs has not begun nothing is lost, and what it has begun ends when it answers, in pieces
    // too. Method: more reads of a pipe than the ring takes, with nothing in it; then bytes, half a page at a time.
    #[test]
    fn what_hangs_ends_when_it_is_let() {
        let Some(mut bench) = bench() else { return };
        let all = DEPTH as u32 + 8;
        (0..all).for_each(|slot| bench.load(slot, 0));
        let mut taken = bench.workers.drop_loads();
        while taken.len() > 8 {
            // It had not looked yet: what was taken back is given again.
            taken.iter().for_each(|&slot| bench.load(slot as u32, 0));
            std::thread::yield_now();
            taken = bench.workers.drop_loads();
        }
        assert_eq!(taken.len(), 8);
        assert!((0..all).all(|slot| bench.arena.quiet(slot) == taken.contains(&slot.into())));
        for _ in 0..2 * DEPTH {
            bench.into.write_all(&[7; 2048]).expect("the ring reads");
        }
        let mut ended = 0;
        while ended < DEPTH {
            for (id, outcome) in bench.next() {
                assert!(matches!(outcome, Outcome::Done), "{outcome:?}");
                assert!(bench.arena.quiet(id as u32), "it has let go");
                ended += 1;
            }
        }
    }

    // Goal: nobody waits for a ring that has failed, though it had nothing under way. Method: its descriptor is another file's.
    #[test]
    fn a_ring_that_fails_is_gone_on_without() {
        let Ok(ring) = Ring::new().inspect_err(|error| eprintln!("skipped: {error}")) else { return };
        let other = File::open("/dev/null").expect("there");
        // SAFETY: the ring's own descriptor, which nobody else has; the ring closes what it has become.
        let mut own = unsafe { OwnedFd::from_raw_fd(ring.ring.as_raw_fd()) };
        nix::unistd::dup2(&other, &mut own).expect("descriptors");
        std::mem::forget(own);
        let arena = Arena::create(64 * 8192, LAYOUT).expect("a small arena");
        let (from, into) = nix::unistd::pipe().expect("a pipe");
        let pipe = Arc::new(Pipe(Arc::new(from.into())));
        let workers = Workers::new(pipe, 1, Some(ring), Arc::new(|| ())).expect("threads");
        let (_, rung) = mpsc::channel();
        let mut bench = Bench { workers, into: into.into(), arena, rung };
        let until = Instant::now() + PATIENCE;
        while !bench.workers.silent() {
            assert!(Instant::now() < until, "it is waited for");
            std::thread::yield_now();
        }
        bench.load(0, 0);
        assert_eq!(bench.workers.drop_loads(), [0]);
        bench.load(1, 0);
        bench.workers.stop();
        assert!(bench.arena.quiet(0) && bench.arena.quiet(1), "both were given up");
    }

    // Goal: memory that the kernel may still write is kept, whoever ends. Method: a read hangs while the workers are stopped.
    #[test]
    fn what_the_kernel_has_is_kept() {
        let Some(mut bench) = bench() else { return };
        bench.load(0, 0);
        // A file that is not there: by its end the ring has seen the first.
        bench.load(1, 1);
        assert!(matches!(bench.next()[..], [(1, Outcome::Corrupt)]));
        bench.workers.stop();
        assert!(bench.workers.silent() && !bench.arena.quiet(0), "it waits for the pipe");
        drop(bench.workers);
        assert!(!bench.arena.quiet(0), "and is kept without the workers");
        bench.into.write_all(&[7; 4096]).expect("the ring reads");
        bench.rung.recv_timeout(PATIENCE).expect("it ends");
        assert!(bench.arena.quiet(0));
    }
}

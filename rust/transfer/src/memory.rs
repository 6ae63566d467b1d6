//! The arena: a node's DRAM for blocks, one sealed memfd that its daemon owns and local workers map.
//!
//! ```text
//! offset                    bytes                     what
//! 0                         4096                      header: magic u64, version u32, slots u32, strips u32, strip_bytes u32
//! 4096                      slots x stride            slot i at 4096 + i x stride; stride = block_bytes, rounded up to a page
//! 4096 + slots x stride     slots x 4 x (1 + strips)  table: per slot its generation u32 (0: no life), then per strip
//!                                                     CRC-32C of the strip, XOR a mix of the generation, u32
//! ```
//!
//! The file is sparse: it has room for all the blocks that its node may ever hold in this layout, and a page becomes memory
//! when it is first written. A node with several layouts has an arena for each, and moves memory between them by giving
//! pages of one back ([`Arena::release`]) before it writes as many of another. What is kept per slot in this process comes
//! to be when the slot is first used.
//!
//! The mix makes checksums of an earlier life invalid: a strip that nobody wrote in this life fails its check, though
//! its old bytes and old checksum fit each other. The daemon decides from its own private state (`SlotState`); the
//! shared copy of generations and checksums is for the clients, and a client that scribbles over it harms only reads.
//!
//! # Shared memory and `unsafe`
//!
//! All `unsafe` about memory is in this file (`link` has one more, about received descriptors). Other processes map the
//! same pages, so Rust's aliasing rules cannot be proven here; they are kept by protocol: a strip is written only while
//! its slot's life is open, by one writer, and read only after the slot is sealed, or by its own node after the client has
//! said that it writes this strip no more. Inside this process [`WriteHold`] and [`ReadHold`] enforce it; clients copy through
//! raw pointers ([`Arena::store`], [`Arena::load`]) and never hold references. The bytes are plain `u8`, for which any
//! value is valid, and no control decision is taken from them. A neighbour that breaks the protocol can so make wrong
//! bytes, and the checksums catch those; sealing against resizing makes it unable to cause a bus error.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crc::Crc;
use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use nix::sys::stat::fstat;
use nix::unistd::ftruncate;

use crate::error::Error;
use crate::types::{Layout, SlotRef};

const PAGE: u64 = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"pyengine");
const VERSION: u32 = 1;
/// A block above this is a mistake in the layout, not a model: 70B at fp32 with 16 tokens has 10 MiB.
const BLOCK_LIMIT: u64 = 1 << 30;

/// Slots whose states come to be together: one allocation of 28 KiB, and a pointer per 1024 slots that may be.
const STATES: usize = 1024;

/// Bytes that `load` copies at once: 4 KiB strips load at 7.6 GB/s so, at 1.7 GB/s in one piece (EPYC, glibc).
const COPY_PIECE: usize = 1024;

/// CRC-32C (iSCSI) of a strip, as stored and as sent.
pub fn checksum(bytes: &[u8]) -> u32 {
    let mut crc = Crc::new();
    crc.update(bytes);
    crc.sum()
}

/// Bytes that are fetched while as many are read. The processor itself looks ahead within a page of 4 KiB, and no further.
const AHEAD_BYTES: usize = 4096;

/// Tells the processor that the first of these bytes are read soon.
fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes[..bytes.len().min(AHEAD_BYTES)].chunks(64) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// As [`checksum`], of bytes that are not in cache; `next` is what is read after them. (Xeon, blocks of 4 KiB: 10 GB/s
/// instead of 7; of 64 KiB and more a fifth faster.)
pub fn checksum_cold(bytes: &[u8], next: &[u8]) -> u32 {
    let mut crc = Crc::new();
    let mut chunks = bytes.chunks(AHEAD_BYTES).peekable();
    while let Some(chunk) = chunks.next() {
        prefetch(chunks.peek().copied().unwrap_or(next));
        crc.update(chunk);
    }
    crc.sum()
}

/// The slot's life is over, or somebody else is writing it: nothing may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fenced;

/// Which strips of a block somebody means: `run` of every `stride` from `first` on. One who has some of the heads has a
/// run of them in each half layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// The first strip.
    pub first: u32,
    /// Strips one behind the other.
    pub run: u32,
    /// From the beginning of a run to that of the next.
    pub stride: u32,
}

impl Runs {
    /// All from this one on.
    pub const fn from(first: u32) -> Self {
        Self { first, run: 1, stride: 1 }
    }

    /// The strips, in order; of a checked range all are within the block.
    fn strips(self, count: usize) -> impl Iterator<Item = u32> {
        let runs = (0..).map(move |number: u32| self.first + number * self.stride);
        runs.flat_map(move |first| first..first.saturating_add(self.run)).take(count)
    }

    /// One behind the last of so many strips. `None`: there are no such runs.
    fn end(self, count: usize) -> Option<u64> {
        let Some(last) = (count as u64).checked_sub(1) else { return Some(u64::from(self.first)) };
        let (run, stride) = (u64::from(self.run), u64::from(self.stride));
        if run == 0 || run > stride {
            return None;
        }
        (last / run).checked_mul(stride)?.checked_add(u64::from(self.first) + last % run + 1)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No life: never issued, or retired.
    Over,
    /// Reserved: may be written.
    Open,
    /// Committed: may be read, and is written no more.
    Sealed,
}

/// A bit per strip that a write hold claims, then a bit per strip whose checksum was set by a `WriteHold` in this life.
/// (In a box of its own: so a state takes one pointer for it.)
#[derive(Debug)]
struct Strips(Box<[u64]>);

/// The pointer to them, aligned as numbers of 32 bits are: so a state with its lock takes 28 bytes and not 32.
#[repr(C, packed(4))]
struct Packed(Option<Box<Strips>>);

impl Packed {
    const NONE: Self = Self(None);

    fn with<R>(&mut self, act: impl FnOnce(&mut Option<Box<Strips>>) -> R) -> R {
        let Self(mut strips) = std::mem::replace(self, Self::NONE);
        let outcome = act(&mut strips);
        *self = Self(strips);
        outcome
    }
}

/// The daemon's own truth about one slot.
struct SlotState {
    generation: u32,
    readers: u32,
    /// While it is open and somebody has written, or writes, into it. So what is cached, which is most, needs none.
    strips: Packed,
    /// Write holds that are out.
    writers: u16,
    phase: Phase,
}

impl SlotState {
    const fn new() -> Self {
        Self { generation: 0, readers: 0, strips: Packed::NONE, writers: 0, phase: Phase::Over }
    }

    /// Claims strips for one writer, of a block of so many. False if another one has any of them.
    fn claim(&mut self, strips: Range<u32>, of: u32) -> bool {
        let may = self.writers < u16::MAX;
        let free = self.strips.with(|known| {
            let Strips(bits) = &mut **known.get_or_insert_with(|| Box::new(Strips(vec![0; 2 * words(of)].into())));
            let free = may && strips.clone().all(|strip| bits[word(strip)] & bit(strip) == 0);
            if free {
                strips.for_each(|strip| bits[word(strip)] |= bit(strip));
            }
            free
        });
        self.writers += u16::from(free);
        free
    }

    fn unclaim(&mut self, strips: Range<u32>) {
        self.strips.with(|known| {
            if let Some(Strips(bits)) = known.as_deref_mut() {
                strips.for_each(|strip| bits[word(strip)] &= !bit(strip));
            }
        });
        self.writers -= 1;
        self.forget_strips();
    }

    /// Notes that a strip has arrived, or has not.
    fn mark(&mut self, strip: u32, arrived: bool) {
        self.strips.with(|known| {
            if let Some(Strips(bits)) = known.as_deref_mut() {
                let at = bits.len() / 2 + word(strip);
                if arrived { bits[at] |= bit(strip) } else { bits[at] &= !bit(strip) }
            }
        });
    }

    fn arrived(&mut self) -> u32 {
        self.strips.with(|known| {
            let arrived = known.as_deref().map(|Strips(bits)| &bits[bits.len() / 2..]);
            arrived.into_iter().flatten().map(|word| word.count_ones()).sum()
        })
    }

    /// Once nobody writes and nobody may begin to.
    fn forget_strips(&mut self) {
        if self.phase != Phase::Open && self.writers == 0 {
            self.strips = Packed::NONE;
        }
    }
}

fn words(strips: u32) -> usize {
    (strips as usize).div_ceil(64)
}

fn word(strip: u32) -> usize {
    strip as usize / 64
}

fn bit(strip: u32) -> u64 {
    1 << (strip % 64)
}

/// Some slots' states.
type States = Box<[Mutex<SlotState>]>;

/// One node's block memory. See the module's head for the byte table.
pub struct Arena {
    fd: OwnedFd,
    mapping: Mapping,
    bytes: u64,
    layout: Layout,
    slots: u32,
    stride: u64,
    /// By [`STATES`]; empty in a client.
    states: Box<[OnceLock<States>]>,
    /// Writes refused because the life was over.
    fenced: AtomicU64,
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Arena({} slots of {:?})", self.slots, self.layout)
    }
}

impl Arena {
    /// Makes an arena of at most `bytes` bytes for blocks of this layout. Pages become memory when first written.
    ///
    /// # Errors
    /// Give up: an impossible layout, no room for one block, or more than the machine's available memory.
    pub fn create(bytes: u64, layout: Layout) -> Result<Arc<Self>, Error> {
        if let Some(available) = available_memory()
            && bytes > available
        {
            return Err(Error::give_up(format!(
                "the arena wants {bytes} bytes of memory, but this machine has {available} available: lower --dram-bytes"
            )));
        }
        Self::sparse(bytes, layout)
    }

    /// As `create`, for one of several arenas that together take no more memory than was found to be available.
    ///
    /// # Errors
    /// Give up: an impossible layout, or no room for one block.
    pub fn sparse(bytes: u64, layout: Layout) -> Result<Arc<Self>, Error> {
        let (stride, per_slot) = geometry(layout)?;
        let slots = u32::try_from(bytes.saturating_sub(PAGE) / per_slot).unwrap_or(u32::MAX);
        if slots == 0 {
            return Err(Error::give_up(format!(
                "an arena of {bytes} bytes holds no block of {} bytes: give at least {} bytes",
                layout.block_bytes(),
                PAGE + per_slot
            )));
        }
        let length = file_length(slots, stride, layout);
        let fd = sealed_memory("pyengine-arena", length)?;
        let states = (0..(slots as usize).div_ceil(STATES)).map(|_| OnceLock::new()).collect();
        let arena = Self {
            mapping: Mapping::new(&fd, length, true)?,
            fd,
            bytes: length,
            layout,
            slots,
            stride,
            states,
            fenced: AtomicU64::new(0),
        };
        for (index, word) in arena.header().into_iter().enumerate() {
            arena.word(4 * index as u64).store(word, Ordering::Relaxed);
        }
        Ok(Arc::new(arena))
    }

    /// Maps an arena that a daemon has made, as one of its clients.
    ///
    /// # Errors
    /// Give up: the descriptor is not a sealed arena of just this shape.
    pub fn open(fd: OwnedFd, bytes: u64, slots: u32, layout: Layout) -> Result<Arc<Self>, Error> {
        let (stride, _) = geometry(layout)?;
        let refuse = |why: &str| Error::give_up(format!("the descriptor is not the daemon's arena: {why}"));
        let size = fstat(&fd).map_err(|errno| refuse(errno.desc()))?.st_size as u64;
        if slots == 0 || size != bytes || bytes != file_length(slots, stride, layout) {
            return Err(refuse(&format!("{size} bytes, {bytes} announced for {slots} slots")));
        }
        if !is_sealed(&fd) {
            return Err(refuse("it is not sealed against shrinking"));
        }
        let arena = Self {
            mapping: Mapping::new(&fd, bytes, true)?,
            fd,
            bytes,
            layout,
            slots,
            stride,
            states: Box::default(),
            fenced: AtomicU64::new(0),
        };
        for (index, word) in arena.header().into_iter().enumerate() {
            if arena.word(4 * index as u64).load(Ordering::Relaxed) != word {
                return Err(refuse("its header says another version or layout"));
            }
        }
        Ok(Arc::new(arena))
    }

    /// The descriptor, to pass to a client.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Bytes of the whole mapping.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How blocks are cut into strips.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// Where a strip lies within the mapping: slots are `stride` apart.
    pub fn offset_of(&self, slot: u32, strip: u32) -> u64 {
        PAGE + u64::from(slot) * self.stride + u64::from(strip) * u64::from(self.layout.strip_bytes)
    }

    /// The slot and the strips that lie at these bytes of the mapping; `None` if they are not whole strips of one slot.
    pub fn strips_at(&self, offset: u64, bytes: u64) -> Option<(u32, Range<u32>)> {
        let strip_bytes = u64::from(self.layout.strip_bytes);
        let within = offset.checked_sub(PAGE)?;
        let (slot, inside) = (within / self.stride, within % self.stride);
        let (first, count) = (inside / strip_bytes, bytes / strip_bytes);
        let whole = inside.is_multiple_of(strip_bytes) && bytes.is_multiple_of(strip_bytes) && bytes > 0;
        let fits = slot < u64::from(self.slots) && first.checked_add(count)? <= u64::from(self.layout.strips);
        (whole && fits).then_some((slot as u32, first as u32..(first + count) as u32))
    }

    // -- the owner's side --------------------------------------------------------------------------------------------

    /// Begins a new life of a quiet slot: open for writing, nothing has arrived.
    pub fn issue(&self, slot: u32) -> SlotRef {
        let first = slot as usize / STATES * STATES;
        let count = STATES.min(self.slots as usize - first);
        let states = self.states[slot as usize / STATES]
            .get_or_init(|| (0..count).map(|_| Mutex::new(SlotState::new())).collect());
        let mut state = lock(&states[slot as usize % STATES]);
        debug_assert!(state.phase == Phase::Over && state.readers == 0 && state.writers == 0, "slot {slot} is in use");
        // 0 says "no life" in the shared table.
        state.generation = state.generation.checked_add(1).unwrap_or(1);
        state.phase = Phase::Open;
        state.strips = Packed::NONE;
        self.generation_word(slot).store(state.generation, Ordering::Release);
        SlotRef { slot, generation: state.generation }
    }

    /// Committed: it may be read from now on, and is written no more. False if that life is not open or being written.
    pub fn seal(&self, slot: SlotRef) -> bool {
        let Some(mut state) = self.state(slot.slot) else { return false };
        if state.generation != slot.generation || state.phase != Phase::Open || state.writers > 0 {
            return false;
        }
        state.phase = Phase::Sealed;
        state.forget_strips();
        true
    }

    /// The life is over: no new holds. Those that are out end in their own time (see [`Arena::quiet`]).
    pub fn retire(&self, slot: SlotRef) {
        let Some(mut state) = self.state(slot.slot) else { return };
        if state.generation == slot.generation {
            state.phase = Phase::Over;
            state.forget_strips();
            self.generation_word(slot.slot).store(0, Ordering::Release);
        }
    }

    /// True if no hold of this process is out on the slot.
    pub fn quiet(&self, slot: u32) -> bool {
        self.state(slot).is_none_or(|state| state.readers == 0 && state.writers == 0)
    }

    /// True if the slot is open, and every strip was written through a [`WriteHold`] in this life.
    pub fn arrived_all(&self, slot: SlotRef) -> bool {
        self.state(slot.slot).is_some_and(|mut state| {
            state.generation == slot.generation && state.phase == Phase::Open && state.arrived() == self.layout.strips
        })
    }

    /// Gives the memory of these quiet slots, which have no life, back to the system; what is there reads as zeros. Its
    /// place in the file stays, and becomes memory again when it is written.
    pub fn release(&self, slots: &[u32]) {
        let mut slots = slots.to_vec();
        slots.sort_unstable();
        for run in slots.chunk_by(|one, next| one + 1 == *next) {
            debug_assert!(run.iter().all(|&slot| self.quiet(slot)), "{run:?} are in use");
            let (at, bytes) = (self.offset_of(run[0], 0), run.len() as u64 * self.stride);
            let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            if let Err(errno) = fallocate(&self.fd, flags, at as i64, bytes as i64) {
                tracing::warn!("{bytes} bytes of the arena could not be given back to the system: {errno}");
            }
        }
    }

    /// Bytes that are memory now: of slots that were written, and of what is kept beside them.
    pub fn resident(&self) -> u64 {
        fstat(&self.fd).map_or(0, |stat| stat.st_blocks as u64 * 512)
    }

    /// Takes strips of a slot for writing; others may write other strips of it meanwhile.
    ///
    /// # Errors
    /// `Fenced` if that life is not open, the slot has no such strips, another `WriteHold` has some of them, or any of the
    /// slot is being read.
    pub fn begin_write(self: &Arc<Self>, slot: SlotRef, strips: Range<u32>) -> Result<WriteHold, Fenced> {
        let of = self.layout.strips;
        let state = self.state(slot.slot).filter(|_| strips.start < strips.end && strips.end <= of);
        let claimed = state.is_some_and(|mut state| {
            let open = state.generation == slot.generation && state.phase == Phase::Open;
            open && state.readers == 0 && state.claim(strips.clone(), of)
        });
        if !claimed {
            self.fenced.fetch_add(1, Ordering::Relaxed);
            return Err(Fenced);
        }
        Ok(WriteHold { arena: self.clone(), slot, strips })
    }

    /// How many writes were refused by [`Arena::begin_write`] so far.
    pub fn fenced(&self) -> u64 {
        self.fenced.load(Ordering::Relaxed)
    }

    /// True if every strip of a sealed slot fits its stored checksum; false also if the life is over.
    pub fn intact(self: &Arc<Self>, slot: SlotRef) -> bool {
        self.intact_strips(slot, 0..self.layout.strips)
    }

    /// As `intact`, of some strips, as [`Arena::begin_read_written`] reads them.
    pub fn intact_strips(self: &Arc<Self>, slot: SlotRef, strips: Range<u32>) -> bool {
        let Some(hold) = self.begin_read_written(slot, strips) else { return false };
        let strips = hold.bytes().chunks_exact(self.layout.strip_bytes as usize);
        strips.zip(hold.checksums()).all(|(strip, sum)| checksum(strip) == sum)
    }

    /// Takes a sealed slot for reading; `None` if that life is over or not sealed.
    pub fn begin_read(self: &Arc<Self>, slot: SlotRef) -> Option<ReadHold> {
        self.begin_read_strips(slot, 0..self.layout.strips)
    }

    /// As `begin_read`, of some strips.
    pub fn begin_read_strips(self: &Arc<Self>, slot: SlotRef, strips: Range<u32>) -> Option<ReadHold> {
        self.read(slot, strips, |state| state.phase == Phase::Sealed)
    }

    /// As `begin_read_strips`, also of an open slot: for whoever knows that its client has written these strips and writes
    /// them no more. `None` also if somebody of this process is writing the slot.
    pub fn begin_read_written(self: &Arc<Self>, slot: SlotRef, strips: Range<u32>) -> Option<ReadHold> {
        self.read(slot, strips, |state| match state.phase {
            Phase::Sealed => true,
            Phase::Open => state.writers == 0,
            Phase::Over => false,
        })
    }

    fn read(self: &Arc<Self>, slot: SlotRef, strips: Range<u32>, may: impl Fn(&SlotState) -> bool) -> Option<ReadHold> {
        let mut state =
            self.state(slot.slot).filter(|_| strips.start < strips.end && strips.end <= self.layout.strips)?;
        if state.generation != slot.generation || !may(&state) {
            return None;
        }
        state.readers += 1;
        drop(state);
        Some(ReadHold { arena: self.clone(), slot, strips })
    }

    // -- the client's side -------------------------------------------------------------------------------------------

    /// Copies whole strips into a reserved slot and stores their checksums, taken from `source`.
    ///
    /// Into a life that is over nothing is written, and that is no error: the event that says so is on its way.
    ///
    /// # Errors
    /// Bug: out of range, or not whole strips.
    pub fn store(&self, slot: SlotRef, first_strip: u32, source: &[u8]) -> Result<(), Error> {
        self.store_runs(slot, Runs::from(first_strip), source)
    }

    /// As `store`, into these strips: others may write other strips meanwhile.
    ///
    /// # Errors
    /// As `store`.
    pub fn store_runs(&self, slot: SlotRef, runs: Runs, source: &[u8]) -> Result<(), Error> {
        let count = self.check_range(slot, runs, source.len())?;
        for (strip, bytes) in runs.strips(count).zip(source.chunks_exact(self.layout.strip_bytes as usize)) {
            if self.generation_word(slot.slot).load(Ordering::Acquire) != slot.generation {
                return Ok(());
            }
            // Strip by strip, so that the copy finds in cache what the checksum has read.
            let sum = checksum(bytes);
            // SAFETY: the range was checked; source is private memory and cannot overlap the mapping. Another process
            // may race only by breaking the protocol; raw copies of u8 then store garbage that the checksum catches.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.strip_pointer(slot.slot, strip), bytes.len()) };
            self.checksum_word(slot.slot, strip).store(sum ^ mix(slot.generation), Ordering::Release);
        }
        Ok(())
    }

    /// Copies whole strips out of a slot and verifies the checksums on the copy.
    ///
    /// False: a checksum did not hold, or the life is over; `into` holds garbage then.
    ///
    /// # Errors
    /// Bug: out of range, or not whole strips.
    pub fn load(&self, slot: SlotRef, first_strip: u32, into: &mut [u8]) -> Result<bool, Error> {
        self.load_runs(slot, Runs::from(first_strip), into)
    }

    /// As `load`, out of these strips.
    ///
    /// # Errors
    /// As `load`.
    pub fn load_runs(&self, slot: SlotRef, runs: Runs, into: &mut [u8]) -> Result<bool, Error> {
        let count = self.check_range(slot, runs, into.len())?;
        let alive = || self.generation_word(slot.slot).load(Ordering::Acquire) == slot.generation;
        Ok(alive() && self.copy_out(slot, runs.strips(count), into) && alive())
    }

    /// As `load`, for whoever knows that the slot has a [`ReadHold`]: its life may be over, but its bytes and checksums stay
    /// as they are until the hold ends.
    ///
    /// # Errors
    /// Bug: out of range, or not whole strips.
    pub fn load_held(&self, slot: SlotRef, first_strip: u32, into: &mut [u8]) -> Result<bool, Error> {
        let runs = Runs::from(first_strip);
        let count = self.check_range(slot, runs, into.len())?;
        Ok(self.copy_out(slot, runs.strips(count), into))
    }

    /// False: a checksum did not hold. The strips are in range.
    fn copy_out(&self, slot: SlotRef, strips: impl Iterator<Item = u32>, into: &mut [u8]) -> bool {
        for (strip, bytes) in strips.zip(into.chunks_exact_mut(self.layout.strip_bytes as usize)) {
            // SAFETY: the range was checked; `into` is private memory and cannot overlap the mapping. A racing writer
            // breaks the protocol; the checksum is taken over the copy, so what is verified is what is used.
            unsafe {
                let from = self.strip_pointer(slot.slot, strip);
                // In pieces: above 2 KiB the C library copies by `rep movsb`, whose result is then read back slowly.
                for (index, piece) in bytes.chunks_mut(COPY_PIECE).enumerate() {
                    std::ptr::copy_nonoverlapping(from.add(index * COPY_PIECE), piece.as_mut_ptr(), piece.len());
                }
            };
            let expected = self.checksum_word(slot.slot, strip).load(Ordering::Acquire) ^ mix(slot.generation);
            if checksum(bytes) != expected {
                return false;
            }
        }
        true
    }

    /// Copies bytes out of a block as they are, from so far behind its start: whoever has pinned it, and checks them itself.
    ///
    /// # Errors
    /// Bug: out of range.
    pub fn peek(&self, slot: u32, offset: usize, into: &mut [u8]) -> Result<(), Error> {
        let block = self.layout.block_bytes();
        if slot >= self.slots || offset.checked_add(into.len()).is_none_or(|end| end > block) {
            return Err(Error::bug(format!("{} bytes at {offset} of slot {slot} are outside a block", into.len())));
        }
        // SAFETY: the range was checked; `into` is private memory and cannot overlap the mapping. A racing writer breaks
        // the protocol, and the caller has checksums.
        unsafe {
            let from = self.strip_pointer(slot, 0).add(offset);
            std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len());
        };
        Ok(())
    }

    /// Where a block begins in this process: for views, whose maker pins the block as long as they live.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn block_pointer(&self, slot: u32) -> NonNull<u8> {
        assert!(slot < self.slots, "slot {slot} is outside the arena of {}", self.slots);
        NonNull::new(self.strip_pointer(slot, 0)).expect("inside a mapping")
    }

    /// Flips one bit of a strip behind everybody's back: a test's way to make memory rot.
    #[doc(hidden)]
    pub fn corrupt_for_test(&self, slot: u32, strip: u32) {
        assert!(slot < self.slots && strip < self.layout.strips);
        // SAFETY: in range; a single byte of plain data.
        unsafe { *self.strip_pointer(slot, strip) ^= 1 };
    }

    // -- inside ------------------------------------------------------------------------------------------------------

    /// How many strips so many bytes are, all of them within the block.
    fn check_range(&self, slot: SlotRef, runs: Runs, length: usize) -> Result<usize, Error> {
        let strip_bytes = self.layout.strip_bytes as usize;
        if slot.slot >= self.slots {
            return Err(Error::bug(format!("slot {} is outside the arena of {} slots", slot.slot, self.slots)));
        }
        let strips = length / strip_bytes;
        let within = runs.end(strips).is_some_and(|end| end <= u64::from(self.layout.strips));
        if !length.is_multiple_of(strip_bytes) || !within {
            return Err(Error::bug(format!(
                "{length} bytes from strip {} on, runs of {} strips every {}, are not whole strips of {strip_bytes} bytes \
                 within {}",
                runs.first, runs.run, runs.stride, self.layout.strips
            )));
        }
        Ok(strips)
    }

    fn header(&self) -> [u32; 6] {
        let Layout { strips, strip_bytes } = self.layout;
        [MAGIC as u32, (MAGIC >> 32) as u32, VERSION, self.slots, strips, strip_bytes]
    }

    /// `None`: the slot was never issued, or there is no such slot.
    fn state(&self, slot: u32) -> Option<MutexGuard<'_, SlotState>> {
        let states = self.states.get(slot as usize / STATES)?.get()?;
        Some(lock(states.get(slot as usize % STATES)?))
    }

    /// The state of a slot that somebody holds.
    fn held(&self, slot: u32) -> MutexGuard<'_, SlotState> {
        self.state(slot).expect("a slot with a hold was issued")
    }

    fn strip_pointer(&self, slot: u32, strip: u32) -> *mut u8 {
        debug_assert!(slot < self.slots && strip < self.layout.strips);
        let offset = self.offset_of(slot, strip);
        // SAFETY: slot and strip are in range (checked by every caller), so the offset is inside the mapping.
        unsafe { self.mapping.pointer().as_ptr().add(offset as usize) }
    }

    fn generation_word(&self, slot: u32) -> &AtomicU32 {
        self.word(self.table_offset(slot))
    }

    fn checksum_word(&self, slot: u32, strip: u32) -> &AtomicU32 {
        self.word(self.table_offset(slot) + 4 * (1 + u64::from(strip)))
    }

    fn table_offset(&self, slot: u32) -> u64 {
        PAGE + u64::from(self.slots) * self.stride + u64::from(slot) * 4 * (1 + u64::from(self.layout.strips))
    }

    fn word(&self, offset: u64) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.bytes, "table offset outside the arena");
        // SAFETY: aligned (the mapping is page aligned) and inside the mapping, which lives as long as `self`; header
        // and table are touched only as atomics, here and in every other process.
        unsafe { AtomicU32::from_ptr(self.mapping.pointer().as_ptr().add(offset as usize).cast()) }
    }
}

/// The right to write some strips of one open slot: no two hold the same strip. Dropping it gives the right back.
#[derive(Debug)]
pub struct WriteHold {
    arena: Arc<Arena>,
    slot: SlotRef,
    strips: Range<u32>,
}

impl WriteHold {
    /// Which slot, in which life.
    pub fn slot(&self) -> SlotRef {
        self.slot
    }

    /// Bytes of a strip.
    pub fn strip_bytes(&self) -> usize {
        self.arena.layout.strip_bytes as usize
    }

    /// Which strips.
    pub fn strips(&self) -> Range<u32> {
        self.strips.clone()
    }

    /// The bytes of these strips, which count as not arrived until their checksums are set (again).
    ///
    /// # Panics
    /// If the range is not within the strips that are held.
    pub fn strips_mut(&mut self, strips: Range<u32>) -> &mut [u8] {
        let held = &self.strips;
        assert!(
            strips.start < strips.end && held.start <= strips.start && strips.end <= held.end,
            "strips {strips:?} are outside {held:?}"
        );
        let mut state = self.arena.held(self.slot.slot);
        strips.clone().for_each(|strip| state.mark(strip, false));
        drop(state);
        let length = (strips.end - strips.start) as usize * self.arena.layout.strip_bytes as usize;
        // SAFETY: in range; this hold is the only one on these strips, no read hold exists on the slot while a write hold
        // is out, and sealing waits for this hold to end. Clients write it only by breaking the protocol (module's head).
        unsafe { std::slice::from_raw_parts_mut(self.arena.strip_pointer(self.slot.slot, strips.start), length) }
    }

    /// All strips and the padding to whole pages behind them, which count as not arrived until their checksums are set.
    ///
    /// # Panics
    /// If not all strips are held.
    pub fn pages_mut(&mut self) -> &mut [u8] {
        let strips = 0..self.arena.layout.strips;
        assert!(self.strips == strips, "only strips {:?} of {strips:?} are held", self.strips);
        let pointer = self.strips_mut(strips).as_mut_ptr();
        // SAFETY: as for `strips_mut`; up to `stride` the padding belongs to the slot, and nobody else touches it.
        unsafe { std::slice::from_raw_parts_mut(pointer, self.arena.stride as usize) }
    }

    /// Stores a strip's checksum, which marks it as arrived. The caller has verified it on the bytes that lie there.
    pub fn set_checksum(&mut self, strip: u32, sum: u32) {
        assert!(self.strips.contains(&strip), "strip {strip} is outside {:?}", self.strips);
        self.arena.checksum_word(self.slot.slot, strip).store(sum ^ mix(self.slot.generation), Ordering::Release);
        self.arena.held(self.slot.slot).mark(strip, true);
    }
}

impl Drop for WriteHold {
    fn drop(&mut self) {
        self.arena.held(self.slot.slot).unclaim(self.strips.clone());
    }
}

/// The right to read strips of one slot, which nobody writes any more: its bytes stay while any hold is out.
#[derive(Debug)]
pub struct ReadHold {
    arena: Arc<Arena>,
    slot: SlotRef,
    strips: Range<u32>,
}

impl ReadHold {
    /// The arena that the slot is in.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Which slot, in which life.
    pub fn slot(&self) -> SlotRef {
        self.slot
    }

    /// Bytes of a strip.
    pub fn strip_bytes(&self) -> usize {
        self.arena.layout.strip_bytes as usize
    }

    /// The strips that are held.
    pub fn bytes(&self) -> &[u8] {
        let pointer = self.arena.strip_pointer(self.slot.slot, self.strips.start);
        let length = self.strips.len() * self.strip_bytes();
        // SAFETY: in range; the slot is sealed, so nobody writes it, or its client has said that it writes these strips no
        // more (and if it does, see the module's head); no write hold is taken, and it is not issued again, while this
        // hold is out.
        unsafe { std::slice::from_raw_parts(pointer, length) }
    }

    /// All strips, and the padding to whole pages behind them.
    ///
    /// # Panics
    /// If not all strips are held.
    pub fn pages(&self) -> &[u8] {
        let strips = 0..self.arena.layout.strips;
        assert!(self.strips == strips, "only strips {:?} of {strips:?} are held", self.strips);
        let pointer = self.arena.strip_pointer(self.slot.slot, 0);
        // SAFETY: as for `bytes`; the padding up to `stride` belongs to the slot.
        unsafe { std::slice::from_raw_parts(pointer, self.arena.stride as usize) }
    }

    /// The stored checksum of every strip that is held, as their maker computed them (not verified here).
    pub fn checksums(&self) -> Vec<u32> {
        self.strips.clone().map(|strip| self.checksum(strip)).collect()
    }

    /// The stored checksum of one strip.
    ///
    /// # Panics
    /// If that strip is not held.
    pub fn checksum(&self, strip: u32) -> u32 {
        assert!(self.strips.contains(&strip), "strip {strip} is outside {:?}", self.strips);
        self.arena.checksum_word(self.slot.slot, strip).load(Ordering::Acquire) ^ mix(self.slot.generation)
    }
}

impl Drop for ReadHold {
    fn drop(&mut self) {
        self.arena.held(self.slot.slot).readers -= 1;
    }
}

fn lock(state: &Mutex<SlotState>) -> MutexGuard<'_, SlotState> {
    // Every critical section is a few assignments that cannot leave it half done, so poison says nothing here.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Spreads a generation over 32 bits (odd multiplier: one to one), so that checksums of two lives never agree by chance
/// of equal bytes.
fn mix(generation: u32) -> u32 {
    generation.wrapping_mul(0x9E37_79B1)
}

/// Bytes that an arena takes besides its slots.
pub const ARENA_BYTES: u64 = PAGE;

/// Bytes that one slot takes in all, with its checksums.
///
/// # Errors
/// Give up: an impossible layout.
pub fn slot_bytes(layout: Layout) -> Result<u64, Error> {
    geometry(layout).map(|(_, per_slot)| per_slot)
}

/// (bytes from slot to slot, bytes that one slot costs in all).
fn geometry(layout: Layout) -> Result<(u64, u64), Error> {
    let block = u64::from(layout.strips) * u64::from(layout.strip_bytes);
    if block == 0 || block > BLOCK_LIMIT {
        return Err(Error::give_up(format!("a block of {block} bytes is impossible: between 1 and {BLOCK_LIMIT}")));
    }
    let stride = block.next_multiple_of(PAGE);
    Ok((stride, stride + 4 * (1 + u64::from(layout.strips))))
}

fn file_length(slots: u32, stride: u64, layout: Layout) -> u64 {
    PAGE + u64::from(slots) * (stride + 4 * (1 + u64::from(layout.strips)))
}

/// New memory that other processes can map by its descriptor, and nobody can resize.
pub(crate) fn sealed_memory(name: &str, bytes: u64) -> Result<OwnedFd, Error> {
    let system = |what: &str, errno: nix::errno::Errno| Error::give_up(format!("{name}: {what}: {errno}"));
    let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)
        .map_err(|errno| system("memfd_create", errno))?;
    ftruncate(&fd, bytes as i64).map_err(|errno| system("ftruncate", errno))?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&fd, FcntlArg::F_ADD_SEALS(seals)).map_err(|errno| system("sealing", errno))?;
    Ok(fd)
}

/// True if nobody can shrink this memory. Other memory could be cut short under us, and a read would then kill the process.
pub(crate) fn is_sealed(fd: &OwnedFd) -> bool {
    fcntl(fd, FcntlArg::F_GET_SEALS)
        .is_ok_and(|seals| SealFlag::from_bits_truncate(seals).contains(SealFlag::F_SEAL_SHRINK))
}

/// Mapped memory of a descriptor.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory that lives as long as the value. All access to it is through raw pointers, and whoever makes one
// says why that is right.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` bytes.
    pub fn new(fd: &OwnedFd, bytes: u64, writable: bool) -> Result<Self, Error> {
        let length = usize::try_from(bytes).ok().and_then(NonZeroUsize::new);
        let length = length.ok_or_else(|| Error::give_up(format!("{bytes} bytes cannot be mapped on this machine")))?;
        let protection = if writable { ProtFlags::PROT_READ | ProtFlags::PROT_WRITE } else { ProtFlags::PROT_READ };
        // SAFETY: a new mapping at an address of the kernel's choice; nothing else is affected.
        let base = unsafe { mmap(None, length, protection, MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE, fd, 0) }
            .map_err(|errno| Error::give_up(format!("mmap of {length} bytes: {errno}")))?;
        Ok(Self { base: base.cast(), bytes: length.get() }.in_huge_pages())
    }

    /// New private memory, zeroed.
    pub fn anonymous(bytes: u64) -> Result<Self, Error> {
        let length = usize::try_from(bytes).ok().and_then(NonZeroUsize::new);
        let length = length.ok_or_else(|| Error::give_up(format!("{bytes} bytes cannot be mapped on this machine")))?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: as above.
        let base = unsafe { mmap_anonymous(None, length, protection, MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE) }
            .map_err(|errno| Error::give_up(format!("mmap of {length} bytes: {errno}")))?;
        Ok(Self { base: base.cast(), bytes: length.get() }.in_huge_pages())
    }

    /// Asks for huge pages: scattered blocks of 4 KiB are else as slow by their page tables as by their bytes.
    fn in_huge_pages(self) -> Self {
        // SAFETY: just this mapping; the advice changes no content. Where it is not to be had, small pages serve.
        let _ = unsafe { madvise(self.base.cast(), self.bytes, MmapAdvise::MADV_HUGEPAGE) };
        self
    }

    /// Its first byte.
    pub fn pointer(&self) -> NonNull<u8> {
        self.base
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: just what `mmap` returned, and no reference into it outlives the value (holds keep its owner). A
        // failure would only leak the mapping.
        let _ = unsafe { munmap(self.base.cast(), self.bytes) };
    }
}

/// Bytes that can be used without swapping, if the kernel says so.
pub(crate) fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { strips: 3, strip_bytes: 64 };

    fn client_of(arena: &Arena) -> Arc<Arena> {
        let fd = arena.fd().try_clone_to_owned().expect("a descriptor can be duplicated");
        Arena::open(fd, arena.bytes(), arena.slots(), arena.layout()).expect("the daemon's own arena opens")
    }

    // Goal: what a client stores, another reads, and only within the life. Method: two maps of one memfd.
    #[test]
    fn store_and_load_within_one_life() {
        let arena = Arena::create(1 << 16, LAYOUT).expect("fits");
        let client = client_of(&arena);
        let block: Vec<u8> = (0..192).map(|i| i as u8).collect();
        let slot = arena.issue(2);
        client.store(slot, 0, &block).expect("in range");
        let mut out = vec![0; 192];
        assert!(client.load(slot, 0, &mut out).expect("in range"));
        assert_eq!(out, block);
        assert!(arena.seal(slot));
        assert_eq!(arena.begin_read(slot).expect("sealed").bytes(), block);
        arena.retire(slot);
        assert!(!client.load(slot, 0, &mut out).expect("in range"), "its life is over");
        let next = arena.issue(2);
        assert!(!client.load(next, 0, &mut out).expect("in range"), "nothing was written in this life");
        client.store(slot, 0, &block).expect("a late store is dropped");
        assert!(!client.load(next, 0, &mut out).expect("in range"), "and changed nothing");
        assert!(client.store(next, 2, &block[..128]).is_err());
        assert!(client.store(next, 0, &block[..63]).is_err());
    }

    // Goal: several writers fill one block, each its own runs, and each reads its own back; what one has not written is not
    // intact. Method: three ranks of one head each over two layers, and every shape of runs that is none.
    #[test]
    fn ranks_share_a_block() {
        let layout = Layout { strips: 12, strip_bytes: 8 };
        let arena = Arena::create(1 << 16, layout).expect("fits");
        let slot = arena.issue(0);
        let runs = |rank| Runs { first: rank, run: 1, stride: 3 };
        let part = |rank: u8| -> Vec<u8> { (0..4).flat_map(|strip| [10 * rank + strip; 8]).collect() };
        for rank in [2, 0] {
            client_of(&arena).store_runs(slot, runs(u32::from(rank)), &part(rank)).expect("in range");
        }
        let mut whole = [0; 96];
        assert!(!arena.load(slot, 0, &mut whole).expect("in range"), "rank 1 has written nothing");
        let mut out = [0; 32];
        assert!(!arena.load_runs(slot, runs(1), &mut out).expect("in range"));
        assert!(arena.load_runs(slot, runs(2), &mut out).expect("in range") && out[..] == part(2));
        arena.store_runs(slot, runs(1), &part(1)).expect("in range");
        assert!(arena.load(slot, 0, &mut whole).expect("in range"));
        let strips: Vec<u8> = whole.iter().step_by(8).copied().collect();
        assert_eq!(strips, [0, 10, 20, 1, 11, 21, 2, 12, 22, 3, 13, 23]);
        let mut pair = [0; 48];
        assert!(arena.load_runs(slot, Runs { first: 3, run: 2, stride: 3 }, &mut pair).expect("in range"));
        assert_eq!(pair.iter().step_by(8).copied().collect::<Vec<u8>>(), [1, 11, 2, 12, 3, 13]);
        for (first, run, stride) in [(1, 2, 0), (0, 0, 0), (0, 0, 3), (0, 2, 1), (2, 2, 3), (4, 2, 3), (0, u32::MAX, 1)]
        {
            let refused = arena.load_runs(slot, Runs { first, run, stride }, &mut whole[..64]);
            assert!(refused.is_err_and(|error| error.kind == crate::error::ErrorKind::Bug), "{first} {run} {stride}");
        }
        assert!(arena.store_runs(slot, Runs { first: 0, run: 1, stride: u32::MAX }, &[0; 64]).is_err());
    }

    // Goal: rot is found. Method: flip a bit of each strip in turn.
    #[test]
    fn a_flipped_bit_is_found() {
        let arena = Arena::create(1 << 16, LAYOUT).expect("fits");
        let slot = arena.issue(0);
        arena.store(slot, 0, &[7; 192]).expect("in range");
        let mut out = vec![0; 192];
        for strip in 0..3 {
            arena.corrupt_for_test(0, strip);
            assert!(!arena.load(slot, 0, &mut out).expect("in range"));
            arena.corrupt_for_test(0, strip);
            assert!(arena.load(slot, 0, &mut out).expect("in range"));
        }
    }

    // Goal: who holds a slot reads it to the end, also when its life ends meanwhile. Method: retire it under a hold.
    #[test]
    fn a_held_slot_is_read_after_its_life() {
        let arena = Arena::create(1 << 16, LAYOUT).expect("fits");
        let slot = arena.issue(0);
        arena.store(slot, 0, &[7; 192]).expect("in range");
        assert!(arena.seal(slot));
        let hold = arena.begin_read(slot).expect("sealed");
        arena.retire(slot);
        let mut out = vec![0; 192];
        assert!(!arena.load(slot, 0, &mut out).expect("in range"), "nobody knows who asks");
        assert!(arena.load_held(slot, 0, &mut out).expect("in range") && out == [7; 192]);
        arena.corrupt_for_test(0, 1);
        assert!(!arena.load_held(slot, 0, &mut out).expect("in range"));
        drop(hold);
    }

    // Goal: one writer, none after the life, readers only after the seal, and quiet tells. Method: walk the phases.
    #[test]
    fn holds_fence_each_other() {
        let arena = Arena::create(1 << 16, LAYOUT).expect("fits");
        let slot = arena.issue(1);
        assert!(arena.begin_read(slot).is_none());
        let mut hold = arena.begin_write(slot, 0..3).expect("open");
        assert_eq!(arena.begin_write(slot, 0..3).map(|_| ()), Err(Fenced));
        assert!(!arena.seal(slot), "it is being written");
        for strip in 0..3 {
            assert!(!arena.arrived_all(slot));
            hold.strips_mut(strip..strip + 1).fill(strip as u8);
            hold.set_checksum(strip, checksum(&[strip as u8; 64]));
        }
        assert!(arena.arrived_all(slot) && !arena.quiet(1));
        hold.strips_mut(1..2);
        assert!(!arena.arrived_all(slot), "it may be half written again");
        hold.set_checksum(1, checksum(&[1; 64]));
        drop(hold);
        assert!(arena.quiet(1) && arena.seal(slot));
        assert_eq!(arena.begin_write(slot, 0..3).map(|_| ()), Err(Fenced));
        let read = arena.begin_read(slot).expect("sealed");
        assert_eq!(read.checksums()[2], checksum(&[2; 64]));
        arena.retire(slot);
        assert!(arena.begin_read(slot).is_none() && !arena.quiet(1));
        drop(read);
        assert!(arena.quiet(1));
        let next = arena.issue(1);
        assert!(next.generation == slot.generation + 1 && !arena.arrived_all(next));
    }

    // Goal: of an open slot strips that are written can be read, never beside a writer of this process, and a reader keeps
    // the slot from being used again. Method: walk the phases.
    #[test]
    fn written_strips_are_read_before_the_seal() {
        let arena = Arena::create(1 << 16, LAYOUT).expect("fits");
        let client = client_of(&arena);
        let slot = arena.issue(0);
        client.store(slot, 1, &[5; 64]).expect("in range");
        assert!(arena.begin_read(slot).is_none() && arena.begin_read_strips(slot, 1..2).is_none(), "it is not sealed");
        assert!(arena.begin_read_written(slot, 1..4).is_none() && arena.begin_read_written(slot, 1..1).is_none());
        assert!(arena.intact_strips(slot, 1..2) && !arena.intact_strips(slot, 0..2), "the first was never written");
        let read = arena.begin_read_written(slot, 1..2).expect("open");
        assert!(read.bytes() == [5; 64] && read.checksums() == [checksum(&[5; 64])]);
        assert!(arena.begin_write(slot, 2..3).is_err(), "it is being read");
        client.store(slot, 0, &[4; 64]).expect("in range");
        client.store(slot, 2, &[6; 64]).expect("in range");
        assert!(arena.seal(slot) && arena.intact(slot) && arena.begin_read_written(slot, 0..3).is_some());
        arena.retire(slot);
        assert!(!arena.quiet(0) && arena.begin_read_written(slot, 1..2).is_none() && read.bytes() == [5; 64]);
        drop(read);
        let next = arena.issue(0);
        let write = arena.begin_write(next, 0..1).expect("open");
        assert!(arena.begin_read_written(next, 1..2).is_none(), "it is being written");
        drop(write);
        assert!(arena.begin_read_written(next, 1..2).is_some() && !arena.intact_strips(next, 1..2), "but not intact");
    }

    // Goal: writers of different strips do not meet, writers of the same one do. Method: claims that touch and overlap.
    #[test]
    fn strips_have_one_writer_each() {
        let arena = Arena::create(1 << 16, LAYOUT).expect("fits");
        let slot = arena.issue(0);
        let first = arena.begin_write(slot, 0..1).expect("open");
        let rest = arena.begin_write(slot, 1..3).expect("other strips");
        assert!(arena.begin_write(slot, 2..3).is_err() && arena.begin_write(slot, 0..1).is_err());
        drop(rest);
        let last = arena.begin_write(slot, 2..3).expect("given back");
        drop(first);
        assert!(!arena.seal(slot) && !arena.quiet(0), "the last strip is being written");
        assert!(arena.begin_write(slot, 0..4).is_err() && arena.begin_write(slot, 1..1).is_err(), "no such strips");
        drop(last);
        assert!(arena.quiet(0) && arena.seal(slot));
        assert_eq!(arena.fenced(), 4);
    }

    // Goal: released slots are no memory any more, their neighbours keep theirs, and they can be used again. Method: write
    // all slots of an arena, give some back, and ask the kernel.
    #[test]
    fn released_slots_are_no_memory() {
        let arena = Arena::create(1 << 20, LAYOUT).expect("fits");
        let lives: Vec<SlotRef> = (0..100).map(|slot| arena.issue(slot)).collect();
        for slot in &lives {
            arena.store(*slot, 0, &[slot.slot as u8; 192]).expect("in range");
            assert!(arena.seal(*slot));
        }
        let full = arena.resident();
        assert!(full >= 100 * 4096);
        let gone: Vec<u32> = (0..100).filter(|slot| slot % 3 != 0).rev().collect();
        gone.iter().for_each(|slot| arena.retire(lives[*slot as usize]));
        arena.release(&gone);
        assert!(arena.resident() <= full - gone.len() as u64 * 4096);
        assert!((0..100).step_by(3).all(|slot| arena.intact(lives[slot])));
        let mut out = vec![0; 192];
        let again = arena.issue(gone[0]);
        assert!(!arena.load(again, 0, &mut out).expect("in range"), "nothing was written in this life");
        arena.store(again, 0, &[7; 192]).expect("in range");
        assert!(arena.load(again, 0, &mut out).expect("in range") && out == [7; 192]);
    }

    // Goal: impossible arenas are refused with a sentence. Method: the cases.
    #[test]
    fn impossible_arenas_are_refused() {
        assert!(Arena::create(u64::MAX, LAYOUT).is_err_and(|error| error.message.contains("--dram-bytes")));
        assert!(Arena::create(5000, LAYOUT).is_err_and(|error| error.message.contains("at least")));
        assert!(Arena::create(1 << 16, Layout { strips: 0, strip_bytes: 64 }).is_err());
        let arena = Arena::create(1 << 16, LAYOUT).expect("fits");
        let fd = arena.fd().try_clone_to_owned().expect("a descriptor can be duplicated");
        assert!(Arena::open(fd, arena.bytes(), arena.slots(), Layout { strips: 4, strip_bytes: 64 }).is_err());
    }
}

//! Registered memory: the only memory that copies can name, at either end.
//!
//! ```text
//! register ---> open ---- begin_read, begin_write ----> holds
//!                |                                        |
//!                close: new holds are refused             | dropped, the last one wakes who waits
//!                v                                        v
//!              closing --------------------------------> quiet: nobody here touches the memory any more
//! ```
//!
//! Whoever moves bytes takes a hold first, so a region is given back only when nobody touches it. A peer's copy is
//! checked here, at the side whose memory it is: region, life, bounds and permission.
//!
//! # `unsafe`
//!
//! A [`Buffer`] is memory of the caller, who promised at registration that it stays mapped until the buffer is quiet.
//! Other threads of the caller may touch it meanwhile, as with any memory given to a device: holds hand out raw
//! pointers for system calls, and slices only for checksums and plain copies of bytes, for which any value is valid.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::memory::{Arena, Mapping, ReadHold, WriteHold, checksum, checksum_cold, sealed_memory};
use crate::types::{RegionId, SlotRef, Span};

/// What peers may do with a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Read from it.
    pub read: bool,
    /// Write into it.
    pub write: bool,
}

/// Who wants to touch the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The engine's own user, for the local end of a copy: may do anything.
    Owner,
    /// A peer: only what was permitted at registration.
    Peer,
}

/// Why a hold was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// The region is not (or no more) registered, that life of it is over, or somebody else is writing there.
    Fenced,
    /// Outside the region, or not whole strips of one slot of an arena.
    Bounds,
    /// Not permitted to peers.
    Permission,
}

/// Memory of the caller, as a region.
pub struct Buffer {
    pointer: NonNull<u8>,
    bytes: u64,
    access: Access,
    state: Mutex<BufferState>,
    quiet: Condvar,
    /// Of memory that other processes of this host can map.
    descriptor: Option<OwnedFd>,
    /// Keeps the memory alive; dropped with the last hold.
    _owner: Box<dyn Send + Sync>,
}

#[derive(Default)]
struct BufferState {
    closed: bool,
    holds: u32,
}

// SAFETY: the memory is plain bytes that stay mapped as long as the value lives (promise of `Buffer::new`), and access
// from several threads goes through raw pointers, see the module's head.
unsafe impl Send for Buffer {}
// SAFETY: as above; the state is behind a mutex.
unsafe impl Sync for Buffer {}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes, {:?})", self.bytes, self.access)
    }
}

impl Buffer {
    /// Memory that `owner` keeps alive.
    ///
    /// # Safety
    /// `pointer..pointer + bytes` stays mapped, and writable if anybody is to write it, until `owner` is dropped.
    pub unsafe fn new(pointer: NonNull<u8>, bytes: u64, access: Access, owner: Box<dyn Send + Sync>) -> Self {
        let (state, quiet) = (Mutex::default(), Condvar::new());
        Self { pointer, bytes, access, state, quiet, descriptor: None, _owner: owner }
    }

    /// Memory of the engine's own, zeroed, that engines of this host can map: a copy between them reads it there.
    ///
    /// # Errors
    /// Give up: no memory, or no bytes.
    pub fn shared(bytes: u64, access: Access) -> Result<Self, Error> {
        let fd = sealed_memory("pyengine-buffer", bytes)?;
        let mapping = Mapping::new(&fd, bytes, true)?;
        let pointer = mapping.pointer();
        // SAFETY: the mapping is writable and lives until the buffer drops it.
        let buffer = unsafe { Self::new(pointer, bytes, access, Box::new(Mapped(mapping))) };
        Ok(Self { descriptor: Some(fd), ..buffer })
    }

    /// The descriptor of memory that other processes can map.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.descriptor.as_ref().map(AsFd::as_fd)
    }

    /// Memory of the engine's own, zeroed.
    ///
    /// # Panics
    /// If there is no memory, as any allocation does.
    pub fn owned(bytes: usize, access: Access) -> Self {
        if bytes == 0 {
            // SAFETY: no byte is ever touched.
            return unsafe { Self::new(NonNull::dangling(), 0, access, Box::new(())) };
        }
        let mapping = Mapping::anonymous(bytes as u64).unwrap_or_else(|error| panic!("a buffer: {error}"));
        let pointer = mapping.pointer();
        // SAFETY: the mapping is writable and lives until the buffer drops it.
        unsafe { Self::new(pointer, bytes as u64, access, Box::new(Mapped(mapping))) }
    }

    /// Bytes of the region.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What peers may do with it.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Where it lies, for transports that register memory with a device.
    pub fn pointer(&self) -> NonNull<u8> {
        self.pointer
    }

    /// Refuses new holds from now on.
    pub fn close(&self) {
        self.lock().closed = true;
    }

    /// How many hold some of it now.
    pub fn holds(&self) -> u32 {
        self.lock().holds
    }

    /// True if it is closed and no hold is out.
    pub fn is_quiet(&self) -> bool {
        let state = self.lock();
        state.closed && state.holds == 0
    }

    /// Waits until a closed buffer is quiet. False if it is not within `within`.
    pub fn wait_quiet(&self, within: Duration) -> bool {
        let until = Instant::now() + within;
        let mut state = self.lock();
        while !(state.closed && state.holds == 0) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.quiet.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    fn lock(&self) -> MutexGuard<'_, BufferState> {
        // Two assignments cannot be left half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hold(self: &Arc<Self>) -> Result<Arc<BufferHold>, Denied> {
        let mut state = self.lock();
        if state.closed {
            return Err(Denied::Fenced);
        }
        state.holds += 1;
        drop(state);
        Ok(Arc::new(BufferHold(self.clone())))
    }
}

/// Keeps what a buffer points into.
struct Mapped(#[expect(dead_code, reason = "held for its memory only")] Mapping);

/// Keeps a buffer mapped, and its owner waiting.
struct BufferHold(Arc<Buffer>);

impl BufferHold {
    fn piece(
        self: &Arc<Self>,
        at: Span,
        bytes: u64,
        by: By,
        permitted: impl Fn(Access) -> bool,
    ) -> Result<Piece, Denied> {
        let buffer = &self.0;
        if by == By::Peer && !permitted(buffer.access) {
            return Err(Denied::Permission);
        }
        if at.offset.checked_add(bytes).is_none_or(|end| end > buffer.bytes) {
            return Err(Denied::Bounds);
        }
        // SAFETY: the offset is within the memory (just checked), so the sum is too.
        let pointer = unsafe { buffer.pointer.add(at.offset as usize) };
        Ok(Piece { _hold: self.clone(), pointer, bytes: bytes as usize })
    }
}

impl Drop for BufferHold {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.holds -= 1;
        if state.closed && state.holds == 0 {
            self.0.quiet.notify_all();
        }
    }
}

/// Some bytes of a buffer that is held.
struct Piece {
    _hold: Arc<BufferHold>,
    pointer: NonNull<u8>,
    bytes: usize,
}

// SAFETY: see `Buffer`: plain bytes that the hold keeps mapped.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Sync for Piece {}

/// One region.
#[derive(Clone, Debug)]
pub enum Region {
    /// A node's block memory: slots with lives, a checksum per strip.
    Arena(Arc<Arena>),
    /// A caller's memory.
    Buffer(Arc<Buffer>),
}

/// All regions of one engine. Shared by its transports.
#[derive(Default)]
pub struct Regions {
    table: RwLock<HashMap<RegionId, Region>>,
    last: AtomicU32,
    fenced: AtomicU64,
    removal: RwLock<Vec<Removed>>,
}

/// Told that the memory of these bytes of a region is gone, or will be.
type Removed = Box<dyn Fn(RegionId, Range<u64>) + Send + Sync>;

impl Regions {
    /// No regions.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// A node's arena and nothing else.
    pub fn of(arena: Arc<Arena>) -> Arc<Self> {
        let regions = Self::new();
        regions.set_arena(RegionId::ARENA, arena);
        regions
    }

    /// Makes an arena of the node nameable, under a number of an arena. Peers may read its committed slots and write its
    /// open ones, whose lives only its pool tells them.
    pub fn set_arena(&self, id: RegionId, arena: Arc<Arena>) {
        debug_assert!(id.is_arena(), "{id:?} is a buffer's number");
        self.table.write().unwrap_or_else(PoisonError::into_inner).insert(id, Region::Arena(arena));
    }

    /// The memory of these bytes of an arena was given back: whoever made it known to a device forgets it.
    pub fn released(&self, id: RegionId, bytes: Range<u64>) {
        self.tell_removed(id, bytes);
    }

    /// Registers a buffer under a new number.
    pub fn add(&self, buffer: Arc<Buffer>) -> RegionId {
        // 2^32 registrations are a thousand a second for seven weeks; a wrap would overwrite a live number only then.
        let id = RegionId(self.last.fetch_add(1, Ordering::Relaxed) + RegionId::ARENAS);
        self.table.write().unwrap_or_else(PoisonError::into_inner).insert(id, Region::Buffer(buffer));
        id
    }

    /// Forgets a buffer: no new hold from now on. The caller waits for [`Buffer::wait_quiet`] before the memory goes.
    pub fn remove(&self, id: RegionId) -> Option<Arc<Buffer>> {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        match table.get(&id) {
            Some(Region::Buffer(buffer)) => {
                let buffer = buffer.clone();
                table.remove(&id);
                drop(table);
                buffer.close();
                self.tell_removed(id, 0..u64::MAX);
                Some(buffer)
            }
            _ => None,
        }
    }

    /// Has `tell` called within every removal, after it, and when part of an arena was given back: for transports that
    /// made the memory known to a device. What they must undo before the memory goes, they undo there, or hold the memory
    /// until they have.
    pub fn on_removal(&self, tell: Removed) {
        self.removal.write().unwrap_or_else(PoisonError::into_inner).push(tell);
    }

    /// A region by its number.
    pub fn get(&self, id: RegionId) -> Option<Region> {
        self.read().get(&id).cloned()
    }

    /// Numbers of all regions.
    pub fn ids(&self) -> Vec<RegionId> {
        self.read().keys().copied().collect()
    }

    /// How many holds were refused to peers because region or life were over.
    pub fn fenced(&self) -> u64 {
        self.fenced.load(Ordering::Relaxed)
    }

    /// Takes bytes for reading. In an arena they are whole strips of one committed slot; for the owner also of an open one,
    /// whose client has said that they are written.
    ///
    /// # Errors
    /// [`Denied`], and counted if a peer was fenced.
    pub fn begin_read(&self, at: Span, bytes: u64, by: By) -> Result<Reading, Denied> {
        self.taker(by).read(at, bytes)
    }

    /// Takes bytes for writing. In an arena they are whole strips of one open slot that nobody else is writing.
    ///
    /// # Errors
    /// [`Denied`], and counted if a peer was fenced.
    pub fn begin_write(&self, at: Span, bytes: u64, by: By) -> Result<Writing, Denied> {
        self.taker(by).write(at, bytes)
    }

    /// For many holds at once: a buffer that several of them name, one after the other, is looked up and counted once.
    pub fn taker(&self, by: By) -> Taker<'_> {
        Taker { regions: self, by, last: None }
    }

    fn tell_removed(&self, id: RegionId, bytes: Range<u64>) {
        self.removal.read().unwrap_or_else(PoisonError::into_inner).iter().for_each(|tell| tell(id, bytes.clone()));
    }

    fn count<T>(&self, by: By, held: Result<T, Denied>) -> Result<T, Denied> {
        if by == By::Peer && matches!(held, Err(Denied::Fenced)) {
            self.fenced.fetch_add(1, Ordering::Relaxed);
        }
        held
    }

    fn read(&self) -> RwLockReadGuard<'_, HashMap<RegionId, Region>> {
        // Single inserts and removes cannot be left half done.
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes holds for one party, see [`Regions::taker`].
pub struct Taker<'r> {
    regions: &'r Regions,
    by: By,
    last: Option<(RegionId, Held)>,
}

/// A region that stays.
enum Held {
    Arena(Arc<Arena>),
    Buffer(Arc<BufferHold>),
}

impl Taker<'_> {
    /// As [`Regions::begin_read`].
    ///
    /// # Errors
    /// As there.
    pub fn read(&mut self, at: Span, bytes: u64) -> Result<Reading, Denied> {
        let (by, regions) = (self.by, self.regions);
        let held = self.hold(at.region).and_then(|held| match held {
            Held::Arena(arena) => {
                let (slot, strips) = strips_of(arena, at, bytes)?;
                let hold = match by {
                    By::Owner => arena.begin_read_written(slot, strips),
                    By::Peer => arena.begin_read_strips(slot, strips),
                };
                Ok(Reading(Source::Arena(hold.ok_or(Denied::Fenced)?)))
            }
            Held::Buffer(hold) => Ok(Reading(Source::Buffer(hold.piece(at, bytes, by, |access| access.read)?))),
        });
        regions.count(by, held)
    }

    /// As [`Regions::begin_write`].
    ///
    /// # Errors
    /// As there.
    pub fn write(&mut self, at: Span, bytes: u64) -> Result<Writing, Denied> {
        let (by, regions) = (self.by, self.regions);
        let held = self.hold(at.region).and_then(|held| match held {
            Held::Arena(arena) => {
                let (slot, strips) = strips_of(arena, at, bytes)?;
                Ok(Writing(Sink::Arena(arena.begin_write(slot, strips).map_err(|_| Denied::Fenced)?)))
            }
            Held::Buffer(hold) => Ok(Writing(Sink::Buffer(hold.piece(at, bytes, by, |access| access.write)?))),
        });
        regions.count(by, held)
    }

    fn hold(&mut self, id: RegionId) -> Result<&Held, Denied> {
        if self.last.as_ref().is_none_or(|(last, _)| *last != id) {
            let held = match self.regions.read().get(&id) {
                None => return Err(Denied::Fenced),
                Some(Region::Arena(arena)) => Held::Arena(arena.clone()),
                Some(Region::Buffer(buffer)) => Held::Buffer(buffer.hold()?),
            };
            self.last = Some((id, held));
        }
        self.last.as_ref().map(|(_, held)| held).ok_or(Denied::Fenced)
    }
}

fn strips_of(arena: &Arena, at: Span, bytes: u64) -> Result<(SlotRef, Range<u32>), Denied> {
    let (slot, strips) = arena.strips_at(at.offset, bytes).ok_or(Denied::Bounds)?;
    Ok((SlotRef { slot, generation: at.life }, strips))
}

/// The right to read some bytes; they stay until it is dropped.
pub struct Reading(Source);

enum Source {
    Arena(ReadHold),
    Buffer(Piece),
}

impl Reading {
    /// The bytes. In a buffer the caller's other threads may change them meanwhile: use them as bytes only.
    pub fn bytes(&self) -> &[u8] {
        match &self.0 {
            Source::Arena(hold) => hold.bytes(),
            // SAFETY: the hold keeps these bytes mapped; see the module's head about other threads.
            Source::Buffer(piece) => unsafe { std::slice::from_raw_parts(piece.pointer.as_ptr(), piece.bytes) },
        }
    }

    /// Appends a checksum per `grain` bytes (0: one for all): an arena's own, made where the bytes were made, if its
    /// strips have that size; else computed now.
    pub fn checksums(&self, grain: u32, into: &mut Vec<u32>) {
        self.checksums_before(&[], grain, into);
    }

    /// As `checksums`; `next` is what is read after these bytes.
    fn checksums_before(&self, next: &[u8], grain: u32, into: &mut Vec<u32>) {
        match &self.0 {
            Source::Arena(hold) if hold.strip_bytes() == grain as usize => into.extend(hold.checksums()),
            _ => {
                let mut pieces = pieces(self.bytes(), grain).peekable();
                while let Some(piece) = pieces.next() {
                    into.push(checksum_cold(piece, pieces.peek().copied().unwrap_or(next)));
                }
            }
        }
    }
}

/// The checksums of bytes that travel together, in order, each with its grain: one per `grain` bytes (0: one for all).
pub fn checksums_of<'r>(readings: impl Iterator<Item = (&'r Reading, u32)>) -> Vec<u32> {
    let mut sums = Vec::new();
    let mut readings = readings.peekable();
    while let Some((reading, grain)) = readings.next() {
        reading.checksums_before(readings.peek().map_or(&[], |(next, _)| next.bytes()), grain, &mut sums);
    }
    sums
}

/// The right to write some bytes, alone in an arena; in a buffer the caller's copies may overlap, as it likes.
pub struct Writing(Sink);

enum Sink {
    Arena(WriteHold),
    Buffer(Piece),
}

impl Writing {
    /// Where to write. In an arena the strips count as not arrived until [`Writing::finish`].
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Sink::Arena(hold) => hold.strips_mut(hold.strips()),
            // SAFETY: the hold keeps these bytes mapped; see the module's head about other threads.
            Sink::Buffer(piece) => unsafe { std::slice::from_raw_parts_mut(piece.pointer.as_ptr(), piece.bytes) },
        }
    }

    /// The bytes are there and fit these checksums, one per `grain` bytes (0: one for all), as the caller has verified.
    /// Without checksums (an empty slice) an arena computes its own.
    pub fn finish(mut self, grain: u32, sums: &[u32]) {
        if let Sink::Arena(hold) = &mut self.0 {
            let (strips, strip_bytes) = (hold.strips(), hold.strip_bytes());
            if strip_bytes == grain as usize && sums.len() == strips.len() {
                strips.zip(sums).for_each(|(strip, &sum)| hold.set_checksum(strip, sum));
            } else {
                let sums: Vec<u32> = hold.strips_mut(strips.clone()).chunks_exact(strip_bytes).map(checksum).collect();
                strips.zip(sums).for_each(|(strip, sum)| hold.set_checksum(strip, sum));
            }
        }
    }
}

/// Cuts bytes as their checksums do: every `grain` bytes, or (0) not at all.
pub fn pieces(bytes: &[u8], grain: u32) -> impl Iterator<Item = &[u8]> {
    bytes.chunks(if grain == 0 { bytes.len().max(1) } else { grain as usize })
}

/// How many checksums a copy of `bytes` has.
pub fn sum_count(bytes: u64, grain: u32) -> usize {
    if grain == 0 { usize::from(bytes > 0) } else { bytes.div_ceil(u64::from(grain)) as usize }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Layout;

    const ALL: Access = Access { read: true, write: true };

    fn at(region: RegionId, offset: u64) -> Span {
        Span { region, life: 0, offset }
    }

    // Goal: a peer gets only what is registered, within bounds, and permitted. Method: the cases, on one buffer.
    #[test]
    fn peers_are_checked() {
        let regions = Regions::new();
        let id = regions.add(Arc::new(Buffer::owned(100, Access { read: true, write: false })));
        assert!(regions.begin_read(at(id, 90), 10, By::Peer).is_ok());
        assert_eq!(regions.begin_read(at(id, 91), 10, By::Peer).map(|_| ()), Err(Denied::Bounds));
        assert_eq!(regions.begin_read(at(id, u64::MAX), 10, By::Peer).map(|_| ()), Err(Denied::Bounds));
        assert_eq!(regions.begin_write(at(id, 0), 10, By::Peer).map(|_| ()), Err(Denied::Permission));
        assert!(regions.begin_write(at(id, 0), 10, By::Owner).is_ok(), "its owner may");
        assert_eq!(regions.begin_read(at(RegionId(7777), 0), 1, By::Peer).map(|_| ()), Err(Denied::Fenced));
        assert_eq!(regions.fenced(), 1);
    }

    // Goal: no bytes are a region too. Method: an empty buffer, and the one span that is within it.
    #[test]
    fn an_empty_buffer_has_no_bytes_and_no_memory() {
        let regions = Regions::new();
        let id = regions.add(Arc::new(Buffer::owned(0, ALL)));
        assert!(regions.begin_read(at(id, 0), 0, By::Peer).is_ok_and(|reading| reading.bytes().is_empty()));
        assert_eq!(regions.begin_write(at(id, 0), 1, By::Peer).map(|_| ()), Err(Denied::Bounds));
        assert!(Buffer::shared(0, ALL).is_err(), "there is nothing to map");
    }

    // Goal: a buffer goes only when nobody touches it, and its number never comes back. Method: remove it under a hold.
    #[test]
    fn removal_waits_for_holds() {
        let regions = Regions::new();
        let id = regions.add(Arc::new(Buffer::owned(10, ALL)));
        let mut writing = regions.begin_write(at(id, 0), 10, By::Peer).expect("registered");
        let buffer = regions.remove(id).expect("registered");
        assert!(regions.remove(id).is_none() && !buffer.is_quiet());
        assert_eq!(regions.begin_write(at(id, 0), 10, By::Owner).map(|_| ()), Err(Denied::Fenced));
        assert!(!buffer.wait_quiet(Duration::from_millis(1)));
        writing.bytes_mut().fill(1);
        let waiting = std::thread::spawn(move || buffer.wait_quiet(Duration::from_secs(30)));
        drop(writing);
        assert!(waiting.join().expect("no panic"));
        assert_ne!(regions.add(Arc::new(Buffer::owned(10, ALL))), id);
    }

    // Goal: spans of an arena are whole strips of a slot's life. Method: aligned, crooked, foreign and stale ones.
    #[test]
    fn arenas_take_whole_strips_of_a_life() {
        let arena = Arena::create(1 << 16, Layout { strips: 3, strip_bytes: 64 }).expect("fits");
        let regions = Regions::new();
        regions.set_arena(RegionId::ARENA, arena.clone());
        let slot = arena.issue(2);
        let span = |strip, extra| Span {
            region: RegionId::ARENA,
            life: slot.generation,
            offset: arena.offset_of(2, strip) + extra,
        };
        let write = |span, bytes| regions.begin_write(span, bytes, By::Peer);
        assert_eq!(write(span(0, 1), 64).map(|_| ()), Err(Denied::Bounds));
        assert_eq!(write(span(1, 0), 63).map(|_| ()), Err(Denied::Bounds));
        assert_eq!(write(span(2, 0), 128).map(|_| ()), Err(Denied::Bounds));
        assert_eq!(write(Span { life: 9, ..span(0, 0) }, 64).map(|_| ()), Err(Denied::Fenced));
        let (mut first, mut rest) = (write(span(0, 0), 64).expect("open"), write(span(1, 0), 128).expect("open"));
        first.bytes_mut().fill(1);
        rest.bytes_mut().fill(2);
        first.finish(64, &[checksum(&[1; 64])]);
        assert!(!arena.arrived_all(slot));
        rest.finish(0, &[checksum(&[2; 128])]);
        assert!(arena.arrived_all(slot) && arena.seal(slot) && arena.intact(slot));
        let reading = regions.begin_read(span(1, 0), 128, By::Peer).expect("sealed");
        let sums = checksums_of([(&reading, 64), (&reading, 0)].into_iter());
        assert_eq!(sums, [checksum(&[2; 64]), checksum(&[2; 64]), checksum(&[2; 128])]);
        assert_eq!((sum_count(128, 64), sum_count(130, 64), sum_count(128, 0), sum_count(0, 0)), (2, 3, 1, 0));
    }
}

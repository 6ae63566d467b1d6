//! Weights as they are read.
//!
//! ```text
//! panel 0: columns 0..32 of y     panel 1: columns 32..64         ...
//! [depth 0: 32 numbers][depth 1: 32 numbers]...                   f32: 128 bytes a step
//! [depth 0, 1: 32 pairs][depth 2, 3: 32 pairs]...                 bf16: two steps of the depth in each lane
//! ```
//!
//! What is missing in the last panel, and behind an odd depth, is zero.

use std::alloc::{Layout, alloc, dealloc};
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::matrix::{Bf16, Rows};
use crate::shared::Shared;
use crate::threads::Threads;

/// Columns of a panel: two registers of AVX-512, four of AVX2. More would leave registers for fewer rows.
pub const PANEL: usize = 32;
/// The depth that is summed before it is added to the sum so far: 24 KiB of weights, which stay in the first cache while
/// rows pass by. **Part of what a product means, so the same on all machines.**
pub const CHUNK: usize = 192;
const _: () = assert!(CHUNK.is_multiple_of(2), "a pair of numbers would lie in two chunks");

/// What large pages are aligned to.
const LARGE_PAGE: usize = 2 << 20;

/// What a packed weight is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Four bytes.
    F32,
    /// Two: half of the memory's time, a relative error of 2^-9 in each weight. Sums are f32.
    Bf16,
}

impl Kind {
    /// Numbers of the depth in a lane.
    pub(crate) fn per_lane(self) -> usize {
        match self {
            Kind::F32 => 1,
            Kind::Bf16 => 2,
        }
    }
}

/// Weights as they come: `[out][in]`.
#[derive(Clone, Copy, Debug)]
pub enum Part<'a> {
    /// Four bytes each.
    F32(Rows<'a, f32>),
    /// Two.
    Bf16(Rows<'a, Bf16>),
}

impl Part<'_> {
    /// Outputs and inputs.
    pub fn shape(&self) -> (usize, usize) {
        match self {
            Part::F32(rows) => (rows.count(), rows.width()),
            Part::Bf16(rows) => (rows.count(), rows.width()),
        }
    }
}

/// Weights that cannot be packed.
#[derive(Debug, PartialEq, Eq)]
pub enum Error {
    /// One above the other, so they have to be equally wide.
    Widths(usize, usize),
    /// No memory for so many bytes.
    Memory(usize),
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Widths(first, other) => {
                write!(formatter, "parts of {first} and of {other} inputs cannot be packed as one")
            }
            Error::Memory(bytes) => {
                write!(formatter, "packed weights need {bytes} bytes, which this machine does not give")
            }
        }
    }
}

impl std::error::Error for Error {}

/// A packed matrix, in memory of its own.
#[derive(Debug)]
pub struct Weights {
    memory: Memory,
    kind: Kind,
    outputs: usize,
    depth: usize,
}

impl Weights {
    /// Packs parts as one matrix, one above the other: y then has the columns of the first, of the second, ...
    pub fn pack(parts: &[Part<'_>], kind: Kind, threads: &Threads) -> Result<Self, Error> {
        let (outputs, depth) = shape(parts)?;
        let memory = Memory::new(lanes(kind, outputs, depth))?;
        fill_all(parts, kind, depth, memory.at(0).cast(), threads);
        Ok(Self { memory, kind, outputs, depth })
    }

    /// The matrix.
    pub fn packed(&self) -> Packed<'_> {
        let Self { memory, kind, outputs, depth } = self;
        Packed { first: memory.at(0), kind: *kind, outputs: *outputs, depth: *depth, owner: PhantomData }
    }

    /// The memory that they take.
    pub fn bytes(&self) -> usize {
        self.memory.lanes * 4
    }
}

/// Packs parts as `Weights::pack` does, into memory of the caller's.
///
/// Panics if that has not as many numbers as [`lanes`] says.
pub fn pack_into(parts: &[Part<'_>], kind: Kind, to: &mut [u32], threads: &Threads) -> Result<(), Error> {
    let (outputs, depth) = shape(parts)?;
    assert_eq!(to.len(), lanes(kind, outputs, depth), "lanes of {outputs} x {depth} numbers");
    fill_all(parts, kind, depth, to.as_mut_ptr(), threads);
    Ok(())
}

/// Lanes of 32 bits that a packed matrix takes.
pub fn lanes(kind: Kind, outputs: usize, depth: usize) -> usize {
    outputs.div_ceil(PANEL) * depth.div_ceil(kind.per_lane()) * PANEL
}

/// A packed matrix in somebody's memory.
#[derive(Clone, Copy, Debug)]
pub struct Packed<'a> {
    first: *const f32,
    kind: Kind,
    outputs: usize,
    depth: usize,
    owner: PhantomData<&'a [f32]>,
}

// SAFETY: it is a shared slice, seen as panels.
unsafe impl Send for Packed<'_> {}
// SAFETY: as above.
unsafe impl Sync for Packed<'_> {}

impl<'a> Packed<'a> {
    /// Panics if there are not as many numbers as [`lanes`] says.
    pub fn new(numbers: &'a [f32], kind: Kind, outputs: usize, depth: usize) -> Self {
        assert_eq!(numbers.len(), lanes(kind, outputs, depth), "lanes of {outputs} x {depth} numbers");
        Self { first: numbers.as_ptr(), kind, outputs, depth, owner: PhantomData }
    }

    /// Columns of y.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Columns of x.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// What each weight is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// A panel from a number of the depth on.
    pub(crate) fn panel(&self, panel: usize, depth: usize) -> *const f32 {
        let steps = self.depth.div_ceil(self.kind.per_lane());
        let lane = (panel * steps + depth / self.kind.per_lane()) * PANEL;
        assert!(lane <= lanes(self.kind, self.outputs, self.depth));
        self.first.wrapping_add(lane)
    }
}

/// Outputs and depth of parts one above the other.
fn shape(parts: &[Part<'_>]) -> Result<(usize, usize), Error> {
    let depth = parts.first().map_or(0, |part| part.shape().1);
    if let Some(part) = parts.iter().find(|part| part.shape().1 != depth) {
        return Err(Error::Widths(depth, part.shape().1));
    }
    Ok((parts.iter().map(|part| part.shape().0).sum(), depth))
}

/// Writes all panels of parts whose shape is known; `to` has as many lanes as they need.
fn fill_all(parts: &[Part<'_>], kind: Kind, depth: usize, to: *mut u32, threads: &Threads) {
    let panels = parts.iter().map(|part| part.shape().0).sum::<usize>().div_ceil(PANEL);
    let each = depth.div_ceil(kind.per_lane()) * PANEL;
    let to = Shared::new(to);
    threads.run(panels, &|panel| {
        // SAFETY: each panel is written by one thread alone, and has so many lanes.
        let to = unsafe { std::slice::from_raw_parts_mut(to.at(panel * each), each) };
        match kind {
            Kind::F32 => fill(parts, panel, to, bits),
            Kind::Bf16 => fill(parts, panel, to, |row, step| halves(row, 2 * step) | halves(row, 2 * step + 1) << 16),
        }
    });
}

/// One row of a part.
#[derive(Clone, Copy)]
enum Row<'a> {
    F32(&'a [f32]),
    Bf16(&'a [Bf16]),
    /// Beyond the last.
    None,
}

fn bits(row: Row<'_>, step: usize) -> u32 {
    match row {
        Row::F32(row) => row[step].to_bits(),
        Row::Bf16(row) => f32::from(row[step]).to_bits(),
        Row::None => 0,
    }
}

fn halves(row: Row<'_>, index: usize) -> u32 {
    match row {
        Row::F32(row) => row.get(index).map_or(0, |number| Bf16::from(*number).0.into()),
        Row::Bf16(row) => row.get(index).map_or(0, |half| half.0.into()),
        Row::None => 0,
    }
}

/// Writes a panel: lane `column` of each step is what `lane` says of that column's row.
fn fill(parts: &[Part<'_>], panel: usize, to: &mut [u32], lane: impl Fn(Row<'_>, usize) -> u32) {
    for column in 0..PANEL {
        let row = find(parts, panel * PANEL + column);
        for (step, lanes) in to.as_chunks_mut::<PANEL>().0.iter_mut().enumerate() {
            lanes[column] = lane(row, step);
        }
    }
}

fn find<'a>(parts: &[Part<'a>], mut row: usize) -> Row<'a> {
    for part in parts {
        let (count, _) = part.shape();
        if row < count {
            return match part {
                Part::F32(rows) => Row::F32(rows.row(row)),
                Part::Bf16(rows) => Row::Bf16(rows.row(row)),
            };
        }
        row -= count;
    }
    Row::None
}

/// Lanes of 32 bits that nobody has written yet, on large pages where the system has some: the streams of weights then
/// miss no address translations.
#[derive(Debug)]
struct Memory {
    first: NonNull<u32>,
    lanes: usize,
}

// SAFETY: plain memory; who writes it, and when, is the business of `Weights::pack`, after which it is only read.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(lanes: usize) -> Result<Self, Error> {
        if lanes == 0 {
            return Ok(Self { first: NonNull::dangling(), lanes });
        }
        let layout = Self::layout(lanes).ok_or(Error::Memory(lanes.saturating_mul(4)))?;
        // SAFETY: the layout is not of size zero.
        let first: NonNull<u32> = NonNull::new(unsafe { alloc(layout) }.cast()).ok_or(Error::Memory(layout.size()))?;
        #[cfg(target_os = "linux")]
        if layout.size() >= LARGE_PAGE {
            use nix::sys::mman::{MmapAdvise, madvise};
            // SAFETY: the range was just allocated, and the advice changes nothing that a program could see. Whether the
            // system follows it does not matter.
            let _ = unsafe { madvise(first.cast(), layout.size(), MmapAdvise::MADV_HUGEPAGE) };
        }
        Ok(Self { first, lanes })
    }

    fn layout(lanes: usize) -> Option<Layout> {
        let bytes = lanes.checked_mul(4)?;
        Layout::from_size_align(bytes, if bytes < LARGE_PAGE { 64 } else { LARGE_PAGE }).ok()
    }

    /// The address of a lane.
    fn at(&self, lane: usize) -> *mut f32 {
        assert!(lane <= self.lanes);
        // SAFETY: within the memory, or just behind it.
        unsafe { self.first.as_ptr().cast::<f32>().add(lane) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.lanes).filter(|layout| layout.size() > 0) {
            // SAFETY: allocated with this layout.
            unsafe { dealloc(self.first.as_ptr().cast(), layout) }
        }
    }
}

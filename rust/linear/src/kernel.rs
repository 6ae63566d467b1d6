//! A tile of `y`: a few rows of one panel's columns, over one chunk of the depth, in registers.
//!
//! It is written once, over registers of any width; each level is that function compiled for its instructions.

use crate::lanes::Lanes;
use crate::panels::PANEL;

/// How far ahead of the weights in use the next are asked for, in steps of 128 bytes: about what memory brings in the time
/// that it takes to answer (100 ns at 20 GB/s and core are 2 KB).
const AHEAD: usize = 16;
/// Numbers in a cache line.
const LINE: usize = 16;

/// What a tile is computed from, and where it goes.
#[derive(Clone, Copy)]
pub struct Operands {
    /// The panel's weights of this chunk: [steps\][PANEL] of 32 bits.
    pub weights: *const f32,
    /// The rows' numbers of this chunk: \[depth\]\[rows\].
    pub x: *const f32,
    /// Rows of the panel in this chunk: numbers of the depth, or pairs of them.
    pub steps: usize,
    /// The sum of the chunks before, `[rows][PANEL]`; null for the first.
    pub before: *const f32,
    /// Where the sum goes.
    pub to: *mut f32,
    /// From one row to the next there.
    pub stride: usize,
    /// Weights of the chunk to come, to be brought into the second cache meanwhile: from here on, so many numbers a step.
    /// While a tile that finds its weights in the first cache is computed, memory would have nothing to do.
    pub next: *const f32,
    /// See `next`; 0: none.
    pub next_step: usize,
}

/// Computes one tile.
///
/// # Safety
///
/// The processor has the level's instructions, and the operands' pointers are good for the tile's rows.
pub type Tile = unsafe fn(&Operands);

/// How weights lie in a panel's row of 32-bit lanes.
pub trait Element {
    /// Numbers of the depth that lie in one lane.
    const PER_LANE: usize;
    /// The lanes' numbers, by their place in the depth; the second is used only if there are two per lane.
    ///
    /// # Safety
    ///
    /// As for `Lanes::load`.
    unsafe fn load<V: Lanes>(at: *const f32) -> [V; 2];
}

/// An f32 per lane.
pub struct Single;
/// Two bf16 per lane.
pub struct Pair;

impl Element for Single {
    const PER_LANE: usize = 1;

    #[inline(always)]
    unsafe fn load<V: Lanes>(at: *const f32) -> [V; 2] {
        // SAFETY: by the caller's promise.
        let numbers = unsafe { V::load(at) };
        [numbers, numbers]
    }
}

impl Element for Pair {
    const PER_LANE: usize = 2;

    #[inline(always)]
    unsafe fn load<V: Lanes>(at: *const f32) -> [V; 2] {
        // SAFETY: by the caller's promise.
        unsafe { V::load_pairs(at) }
    }
}

/// ROWS x VECTORS registers of sums; where these are less than a panel's width, one part of its columns after the other.
/// COLD: the weights are not in the first cache yet.
///
/// # Safety
///
/// As for `Tile`.
#[inline(always)]
unsafe fn compute<V: Lanes, E: Element, const ROWS: usize, const VECTORS: usize, const COLD: bool>(tile: &Operands) {
    const { assert!(PANEL.is_multiple_of(VECTORS * V::WIDTH)) };
    for part in 0..PANEL / (VECTORS * V::WIDTH) {
        let column = part * VECTORS * V::WIDTH;
        // SAFETY: weights are [steps][PANEL], x [steps][PER_LANE][ROWS], before [ROWS][PANEL], and `to` has a panel's width in
        // each row; all that is read and written lies there. What is only prefetched may lie anywhere.
        unsafe {
            let mut sums = [[V::splat(0.0); VECTORS]; ROWS];
            let (mut weights, mut x, mut next) = (tile.weights.add(column), tile.x, tile.next);
            for _ in 0..tile.steps {
                if COLD {
                    for line in 0..(VECTORS * V::WIDTH).div_ceil(LINE) {
                        V::prefetch(weights.wrapping_add(AHEAD * PANEL + LINE * line));
                    }
                }
                if part == 0 {
                    V::prefetch_far(next);
                    next = next.wrapping_add(tile.next_step);
                }
                let mut loaded = [[V::splat(0.0); 2]; VECTORS];
                for (vector, loaded) in loaded.iter_mut().enumerate() {
                    *loaded = E::load(weights.add(vector * V::WIDTH));
                }
                for half in 0..E::PER_LANE {
                    for (row, sums) in sums.iter_mut().enumerate() {
                        let number = V::splat(*x.add(half * ROWS + row));
                        for (sum, loaded) in sums.iter_mut().zip(&loaded) {
                            *sum = number.times_plus(loaded[half], *sum);
                        }
                    }
                }
                (weights, x) = (weights.add(PANEL), x.add(E::PER_LANE * ROWS));
            }
            for (row, sums) in sums.iter().enumerate() {
                for (vector, sum) in sums.iter().enumerate() {
                    let column = column + vector * V::WIDTH;
                    let to = tile.to.add(row * tile.stride + column);
                    if tile.before.is_null() {
                        sum.store(to);
                    } else {
                        V::load(tile.before.add(row * PANEL + column)).plus(*sum).store(to);
                    }
                }
            }
        }
    }
}

/// The instructions that a product uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// None in particular: right everywhere, and slow.
    Scalar,
    /// x86-64: AVX2 and FMA.
    Avx2,
    /// x86-64: AVX-512F.
    Avx512,
    /// aarch64.
    Neon,
}

impl Level {
    /// Those that this processor has, the best last.
    pub fn available() -> &'static [Level] {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            if avx2 && is_x86_feature_detected!("avx512f") {
                return &[Level::Scalar, Level::Avx2, Level::Avx512];
            }
            if avx2 {
                return &[Level::Scalar, Level::Avx2];
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            return &[Level::Scalar, Level::Neon];
        }
        &[Level::Scalar]
    }

    /// The best that this processor has.
    pub fn best() -> Level {
        Self::available().last().copied().unwrap_or(Level::Scalar)
    }

    /// What one writes.
    pub fn name(self) -> &'static str {
        match self {
            Level::Scalar => "scalar",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
            Level::Neon => "neon",
        }
    }

    /// The kernels for 1, 2, ... rows, as many as registers hold: [warm, cold].
    ///
    /// Panics if the processor lacks the instructions: no kernel is handed out that could not run.
    pub(crate) fn tiles<E: Element>(self) -> &'static [[Tile; 2]] {
        assert!(Self::available().contains(&self), "this processor has no {}", self.name());
        match self {
            Level::Scalar => scalar::tiles::<E>(),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::tiles::<E>(),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => avx512::tiles::<E>(),
            #[cfg(target_arch = "aarch64")]
            Level::Neon => neon::tiles::<E>(),
            #[allow(unreachable_patterns)]
            _ => unreachable!("not among those available"),
        }
    }
}

/// A level's kernels. `rows: vectors` says how many registers wide a tile of so many rows is.
macro_rules! level {
    ($name:ident, $lanes:ty, $(#[$features:meta])? { $($rows:literal: $vectors:literal),+ }) => {
        mod $name {
            use super::{Element, Operands, Tile, compute};

            $(#[$features])?
            unsafe fn run<E: Element, const ROWS: usize, const VECTORS: usize, const COLD: bool>(tile: &Operands) {
                // SAFETY: the caller's promise is the same.
                unsafe { compute::<$lanes, E, ROWS, VECTORS, COLD>(tile) }
            }

            pub fn tiles<E: Element>() -> &'static [[Tile; 2]] {
                const { &[$([run::<E, $rows, $vectors, false>, run::<E, $rows, $vectors, true>]),+] }
            }
        }
    };
}

level!(scalar, f32, { 1: 32, 2: 32, 3: 32, 4: 32 });

// 32 registers: 24 sums, 2 of weights, and the rows' numbers come from memory.
#[cfg(target_arch = "x86_64")]
level!(avx512, std::arch::x86_64::__m512, #[target_feature(enable = "avx512f")] {
    1: 2, 2: 2, 3: 2, 4: 2, 5: 2, 6: 2, 7: 2, 8: 2, 9: 2, 10: 2, 11: 2, 12: 2
});

// 16 registers: 12 sums, 2 of weights and one of the rows. Few rows are as wide as the panel, for one pass over it.
#[cfg(target_arch = "x86_64")]
level!(avx2, std::arch::x86_64::__m256, #[target_feature(enable = "avx2,fma")] {
    1: 4, 2: 4, 3: 4, 4: 2, 5: 2, 6: 2
});

// 32 registers: 24 sums, 4 of weights, the rest for the rows.
#[cfg(target_arch = "aarch64")]
level!(neon, std::arch::aarch64::float32x4_t, #[target_feature(enable = "neon")] {
    1: 8, 2: 8, 3: 4, 4: 4, 5: 4, 6: 4
});

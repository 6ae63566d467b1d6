//! A product of a few rows with a panel of 32 columns, in registers: scores, and weighted sums of values.

use linear::lanes::Lanes;

use crate::WIDEST_HEAD;

/// Columns of a panel.
pub const PANEL: usize = 32;
/// From one row to the next in all that a tile reads and writes, but for panels.
pub const STRIDE: usize = WIDEST_HEAD;
/// Rows of the largest tile, at any level: 24 registers of sums with AVX-512.
pub const ROWS: usize = 12;

/// `out[row][column] = sum over steps of x[row][step] * panel[step][column]`, each by fused multiply-adds from zero.
///
/// # Safety
///
/// The processor has the instructions; x: \[rows\]\[STRIDE\], of which `steps` numbers are read; panel: \[steps\][PANEL]; out:
/// \[rows\]\[STRIDE\], of which PANEL are written.
pub type Tile = unsafe fn(x: *const f32, panel: *const f32, steps: usize, out: *mut f32);

#[inline(always)]
unsafe fn compute<V: Lanes, const COUNT: usize, const VECTORS: usize>(
    x: *const f32,
    panel: *const f32,
    steps: usize,
    out: *mut f32,
) {
    for part in 0..PANEL / (VECTORS * V::WIDTH) {
        let column = part * VECTORS * V::WIDTH;
        // SAFETY: by the promise of `Tile`.
        unsafe {
            let mut sums = [[V::splat(0.0); VECTORS]; COUNT];
            let mut weights = panel.add(column);
            for step in 0..steps {
                let mut loaded = [V::splat(0.0); VECTORS];
                for (vector, loaded) in loaded.iter_mut().enumerate() {
                    *loaded = V::load(weights.add(vector * V::WIDTH));
                }
                for (row, sums) in sums.iter_mut().enumerate() {
                    let number = V::splat(*x.add(row * STRIDE + step));
                    for (sum, loaded) in sums.iter_mut().zip(&loaded) {
                        *sum = number.times_plus(*loaded, *sum);
                    }
                }
                weights = weights.add(PANEL);
            }
            for (row, sums) in sums.iter().enumerate() {
                for (vector, sum) in sums.iter().enumerate() {
                    sum.store(out.add(row * STRIDE + column + vector * V::WIDTH));
                }
            }
        }
    }
}

/// Registers of a level that has tiles.
pub trait Tiled: Lanes {
    /// For 1, 2, ... rows.
    const TILES: &'static [Tile];

    /// A square of WIDTH rows, `STRIDE` apart, turned: columns become rows, PANEL apart.
    ///
    /// # Safety
    ///
    /// The processor has the instructions, and the numbers are there.
    unsafe fn turn_square(from: *const f32, to: *mut f32);

    /// The rows of a panel, \[PANEL\]\[STRIDE\], turned: \[width\][PANEL].
    ///
    /// # Safety
    ///
    /// As for `turn_square`.
    #[inline(always)]
    unsafe fn turn(from: *const f32, width: usize, to: *mut f32) {
        let squares = width / Self::WIDTH * Self::WIDTH;
        for row in (0..PANEL).step_by(Self::WIDTH) {
            for column in (0..squares).step_by(Self::WIDTH) {
                // SAFETY: by the caller's promise.
                unsafe { Self::turn_square(from.add(row * STRIDE + column), to.add(column * PANEL + row)) };
            }
        }
        for column in squares..width {
            for row in 0..PANEL {
                // SAFETY: as above.
                unsafe { *to.add(column * PANEL + row) = *from.add(row * STRIDE + column) };
            }
        }
    }
}

macro_rules! tiles {
    ($lanes:ty, $square:ident, $(#[$features:meta])? { $($rows:literal: $vectors:literal),+ }) => {
        impl Tiled for $lanes {
            const TILES: &'static [Tile] = {
                $(#[$features])?
                unsafe fn run<const COUNT: usize, const VECTORS: usize>(
                    x: *const f32,
                    panel: *const f32,
                    steps: usize,
                    out: *mut f32,
                ) {
                    // SAFETY: the caller's promise is the same.
                    unsafe { compute::<$lanes, COUNT, VECTORS>(x, panel, steps, out) }
                }
                &[$(run::<$rows, $vectors>),+]
            };

            #[inline(always)]
            unsafe fn turn_square(from: *const f32, to: *mut f32) {
                // SAFETY: the caller's promise is the same.
                unsafe { $square(from, to) }
            }
        }
    };
}

tiles!(f32, one, { 1: 32, 2: 32, 3: 32, 4: 32 });
#[cfg(target_arch = "x86_64")]
tiles!(std::arch::x86_64::__m512, sixteen, #[target_feature(enable = "avx512f")] {
    1: 2, 2: 2, 3: 2, 4: 2, 5: 2, 6: 2, 7: 2, 8: 2, 9: 2, 10: 2, 11: 2, 12: 2
});
#[cfg(target_arch = "x86_64")]
tiles!(std::arch::x86_64::__m256, eight, #[target_feature(enable = "avx2,fma")] {
    1: 4, 2: 4, 3: 4, 4: 2, 5: 2, 6: 2
});
#[cfg(target_arch = "aarch64")]
tiles!(std::arch::aarch64::float32x4_t, four, #[target_feature(enable = "neon")] {
    1: 8, 2: 8, 3: 4, 4: 4, 5: 4, 6: 4
});

#[inline(always)]
unsafe fn one(from: *const f32, to: *mut f32) {
    // SAFETY: by the promise of `turn_square`.
    unsafe { *to = *from }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn sixteen(from: *const f32, to: *mut f32) {
    use std::arch::x86_64::*;
    // SAFETY: by the promise of `turn_square`.
    unsafe {
        let row = |index: usize| _mm512_loadu_ps(from.add(index * STRIDE));
        let mut fours = [_mm512_setzero_ps(); 16]; // [4 i + j]: in its part k, column 4 k + j of rows 4 i ..
        for i in 0..4 {
            let (low, high) =
                (_mm512_unpacklo_ps(row(4 * i), row(4 * i + 1)), _mm512_unpackhi_ps(row(4 * i), row(4 * i + 1)));
            let (low2, high2) = (
                _mm512_unpacklo_ps(row(4 * i + 2), row(4 * i + 3)),
                _mm512_unpackhi_ps(row(4 * i + 2), row(4 * i + 3)),
            );
            let pairs = [low, low2, high, high2].map(|half| _mm512_castps_pd(half));
            fours[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pairs[0], pairs[1]));
            fours[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pairs[0], pairs[1]));
            fours[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pairs[2], pairs[3]));
            fours[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pairs[2], pairs[3]));
        }
        for j in 0..4 {
            let even = _mm512_shuffle_f32x4::<0x88>(fours[j], fours[4 + j]);
            let odd = _mm512_shuffle_f32x4::<0xDD>(fours[j], fours[4 + j]);
            let even2 = _mm512_shuffle_f32x4::<0x88>(fours[8 + j], fours[12 + j]);
            let odd2 = _mm512_shuffle_f32x4::<0xDD>(fours[8 + j], fours[12 + j]);
            _mm512_storeu_ps(to.add(j * PANEL), _mm512_shuffle_f32x4::<0x88>(even, even2));
            _mm512_storeu_ps(to.add((4 + j) * PANEL), _mm512_shuffle_f32x4::<0x88>(odd, odd2));
            _mm512_storeu_ps(to.add((8 + j) * PANEL), _mm512_shuffle_f32x4::<0xDD>(even, even2));
            _mm512_storeu_ps(to.add((12 + j) * PANEL), _mm512_shuffle_f32x4::<0xDD>(odd, odd2));
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn eight(from: *const f32, to: *mut f32) {
    use std::arch::x86_64::*;
    // SAFETY: by the promise of `turn_square`.
    unsafe {
        let row = |index: usize| _mm256_loadu_ps(from.add(index * STRIDE));
        let mut fours = [_mm256_setzero_ps(); 8]; // as above
        for i in 0..2 {
            let (low, high) =
                (_mm256_unpacklo_ps(row(4 * i), row(4 * i + 1)), _mm256_unpackhi_ps(row(4 * i), row(4 * i + 1)));
            let (low2, high2) = (
                _mm256_unpacklo_ps(row(4 * i + 2), row(4 * i + 3)),
                _mm256_unpackhi_ps(row(4 * i + 2), row(4 * i + 3)),
            );
            let pairs = [low, low2, high, high2].map(|half| _mm256_castps_pd(half));
            fours[4 * i] = _mm256_castpd_ps(_mm256_unpacklo_pd(pairs[0], pairs[1]));
            fours[4 * i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(pairs[0], pairs[1]));
            fours[4 * i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(pairs[2], pairs[3]));
            fours[4 * i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(pairs[2], pairs[3]));
        }
        for j in 0..4 {
            _mm256_storeu_ps(to.add(j * PANEL), _mm256_permute2f128_ps::<0x20>(fours[j], fours[4 + j]));
            _mm256_storeu_ps(to.add((4 + j) * PANEL), _mm256_permute2f128_ps::<0x31>(fours[j], fours[4 + j]));
        }
    }
}

#[cfg(target_arch = "aarch64")]
#[inline(always)]
unsafe fn four(from: *const f32, to: *mut f32) {
    use std::arch::aarch64::*;
    // SAFETY: by the promise of `turn_square`.
    unsafe {
        let row = |index: usize| vld1q_f32(from.add(index * STRIDE));
        let (even, odd) = (vzip1q_f32(row(0), row(2)), vzip1q_f32(row(1), row(3)));
        vst1q_f32(to, vzip1q_f32(even, odd));
        vst1q_f32(to.add(PANEL), vzip2q_f32(even, odd));
        let (even, odd) = (vzip2q_f32(row(0), row(2)), vzip2q_f32(row(1), row(3)));
        vst1q_f32(to.add(2 * PANEL), vzip1q_f32(even, odd));
        vst1q_f32(to.add(3 * PANEL), vzip2q_f32(even, odd));
    }
}

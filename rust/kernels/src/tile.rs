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
}

macro_rules! tiles {
    ($lanes:ty, $(#[$features:meta])? { $($rows:literal: $vectors:literal),+ }) => {
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
        }
    };
}

tiles!(f32, { 1: 32, 2: 32, 3: 32, 4: 32 });
#[cfg(target_arch = "x86_64")]
tiles!(std::arch::x86_64::__m512, #[target_feature(enable = "avx512f")] {
    1: 2, 2: 2, 3: 2, 4: 2, 5: 2, 6: 2, 7: 2, 8: 2, 9: 2, 10: 2, 11: 2, 12: 2
});
#[cfg(target_arch = "x86_64")]
tiles!(std::arch::x86_64::__m256, #[target_feature(enable = "avx2,fma")] { 1: 4, 2: 4, 3: 4, 4: 2, 5: 2, 6: 2 });
#[cfg(target_arch = "aarch64")]
tiles!(std::arch::aarch64::float32x4_t, #[target_feature(enable = "neon")] { 1: 8, 2: 8, 3: 4, 4: 4, 5: 4, 6: 4 });

//! 256 and 512 bits.

use std::arch::x86_64::{
    __m256, __m512, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm256_add_ps, _mm256_and_si256, _mm256_castsi256_ps,
    _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_set1_epi32, _mm256_set1_ps, _mm256_slli_epi32,
    _mm256_storeu_ps, _mm512_add_ps, _mm512_and_si512, _mm512_castsi512_ps, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_set1_epi32, _mm512_set1_ps, _mm512_slli_epi32, _mm512_storeu_ps,
};

use super::Lanes;

/// The upper half of 32 bits.
const UPPER: i32 = 0xFFFF_0000_u32 as i32;

// `inline(always)`: the methods have to become part of a function that has the instructions; called as functions they
// would pass registers through memory.

/// AVX2 and FMA.
impl Lanes for __m256 {
    const WIDTH: usize = 8;

    #[inline(always)]
    unsafe fn splat(number: f32) -> Self {
        // SAFETY: by the trait's contract the processor has the instruction, here and below.
        unsafe { _mm256_set1_ps(number) }
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: as above, and the memory is readable.
        unsafe { _mm256_loadu_ps(at) }
    }

    #[inline(always)]
    unsafe fn load_pairs(at: *const f32) -> [Self; 2] {
        // SAFETY: as above.
        unsafe {
            let pairs = _mm256_loadu_si256(at.cast());
            let upper = _mm256_and_si256(pairs, _mm256_set1_epi32(UPPER));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)), _mm256_castsi256_ps(upper)]
        }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: as above, and the memory is writable.
        unsafe { _mm256_storeu_ps(at, self) }
    }

    #[inline(always)]
    unsafe fn plus(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm256_add_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn times_plus(self, factor: Self, summand: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm256_fmadd_ps(self, factor, summand) }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const f32) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    #[inline(always)]
    unsafe fn prefetch_far(at: *const f32) {
        // SAFETY: as above.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
}

/// AVX-512F.
impl Lanes for __m512 {
    const WIDTH: usize = 16;

    #[inline(always)]
    unsafe fn splat(number: f32) -> Self {
        // SAFETY: by the trait's contract the processor has the instruction, here and below.
        unsafe { _mm512_set1_ps(number) }
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: as above, and the memory is readable.
        unsafe { _mm512_loadu_ps(at) }
    }

    #[inline(always)]
    unsafe fn load_pairs(at: *const f32) -> [Self; 2] {
        // SAFETY: as above.
        unsafe {
            let pairs = _mm512_loadu_si512(at.cast());
            let upper = _mm512_and_si512(pairs, _mm512_set1_epi32(UPPER));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)), _mm512_castsi512_ps(upper)]
        }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: as above, and the memory is writable.
        unsafe { _mm512_storeu_ps(at, self) }
    }

    #[inline(always)]
    unsafe fn plus(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm512_add_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn times_plus(self, factor: Self, summand: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { _mm512_fmadd_ps(self, factor, summand) }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const f32) {
        // SAFETY: a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    #[inline(always)]
    unsafe fn prefetch_far(at: *const f32) {
        // SAFETY: as above.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
}

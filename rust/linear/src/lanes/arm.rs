//! 128 bits.

use std::arch::aarch64::{
    float32x4_t, vaddq_f32, vandq_u32, vdupq_n_f32, vdupq_n_u32, vfmaq_f32, vld1q_f32, vld1q_u32,
    vreinterpretq_f32_u32, vshlq_n_u32, vst1q_f32,
};

use super::Lanes;

/// NEON.
impl Lanes for float32x4_t {
    const WIDTH: usize = 4;

    #[inline(always)]
    unsafe fn splat(number: f32) -> Self {
        // SAFETY: every aarch64 that this is built for has NEON, here and below.
        unsafe { vdupq_n_f32(number) }
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: as above, and the memory is readable by the trait's contract.
        unsafe { vld1q_f32(at) }
    }

    #[inline(always)]
    unsafe fn load_pairs(at: *const f32) -> [Self; 2] {
        // SAFETY: as above.
        unsafe {
            let pairs = vld1q_u32(at.cast());
            let upper = vandq_u32(pairs, vdupq_n_u32(0xFFFF_0000));
            [vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs)), vreinterpretq_f32_u32(upper)]
        }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: as above, and the memory is writable.
        unsafe { vst1q_f32(at, self) }
    }

    #[inline(always)]
    unsafe fn plus(self, other: Self) -> Self {
        // SAFETY: as in `splat`.
        unsafe { vaddq_f32(self, other) }
    }

    #[inline(always)]
    unsafe fn times_plus(self, factor: Self, summand: Self) -> Self {
        // SAFETY: as in `splat`. (The summand comes first.)
        unsafe { vfmaq_f32(summand, self, factor) }
    }

    /// Nothing: the intrinsic is not stable, and these processors follow a single stream by themselves.
    #[inline(always)]
    unsafe fn prefetch(_: *const f32) {}

    #[inline(always)]
    unsafe fn prefetch_far(_: *const f32) {}
}

//! Numbers as tensors hold them, and the functions that all levels compute alike.

use linear::Bf16;

/// Sums along a row, side by side: two registers of AVX-512. **Part of what a sum means, so the same on all machines.**
pub const LANES: usize = 32;

/// What a tensor holds. Everything is computed in f32.
pub trait Number: Copy + Send + Sync + 'static {
    /// As it is.
    fn widen(self) -> f32;
    /// The nearest.
    fn narrow(number: f32) -> Self;
}

impl Number for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(number: f32) -> Self {
        number
    }
}

impl Number for Bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    /// As `Bf16::from`, without a branch, so that loops over it become vectors.
    #[inline(always)]
    fn narrow(number: f32) -> Self {
        let bits = number.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1));
        let nan = (bits & 0x7FFF_FFFF) > 0x7F80_0000;
        Bf16(((if nan { bits | 0x40_0000 } else { rounded }) >> 16) as u16)
    }
}

/// e to the power of `x`, at most 2 units in the last place off; 0 below -87.3, that of 88 above it; NaN of NaN.
///
/// Source: the polynomial of Cephes' `expf` (Moshier, 1989). No branch, no call: loops over it become vectors.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    /// Adding it leaves a whole number in the lower bits: 1.5 * 2^23.
    const WHOLE: f32 = 12_582_912.0;
    let within = if x > 88.0 { 88.0 } else { x };
    let shifted = within.mul_add(std::f32::consts::LOG2_E, WHOLE);
    let power = shifted - WHOLE;
    // ln 2 in two parts, the first with few bits: its product with a small whole number is exact.
    let rest = power.mul_add(-0.693_359_4, within);
    let rest = power.mul_add(2.121_944_4e-4, rest);
    let mut sum = 1.987_569_2e-4_f32;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        sum = sum.mul_add(rest, coefficient);
    }
    let fraction = sum.mul_add(rest * rest, rest) + 1.0;
    let scale = f32::from_bits(shifted.to_bits().wrapping_shl(23).wrapping_add(127 << 23));
    if x < -87.3 { 0.0 } else { fraction * scale }
}

/// The sum of lanes, by halves.
#[inline(always)]
pub fn total(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// The larger; NaN, which is no larger than anything, gives way.
#[inline(always)]
pub fn larger(one: f32, other: f32) -> f32 {
    if one > other { one } else { other }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_right() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(f32::INFINITY).is_finite());
        for step in -873_000..880_000 {
            let x = step as f32 * 1e-4;
            let right = f64::from(x).exp();
            let error = (f64::from(exp(x)) - right).abs() / right;
            assert!(error < 2.0 * 2.0_f64.powi(-23), "exp({x}) is {error:e} off");
        }
    }

    #[test]
    fn narrowing_is_to_the_nearest() {
        for bits in (0..u32::MAX - 9973).step_by(9973).chain([0x7F7F_FFFF, 0x7F80_0000, 0xFF80_0001, 0x7FFF_FFFF]) {
            let number = f32::from_bits(bits);
            let (ours, theirs) = (<Bf16 as Number>::narrow(number), Bf16::from(number));
            assert_eq!(ours.0, theirs.0, "{number}");
        }
    }
}

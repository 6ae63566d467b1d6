//! A register of numbers, on each kind of processor.

#[cfg(target_arch = "aarch64")]
pub mod arm;
#[cfg(target_arch = "x86_64")]
pub mod x86;

/// Some f32 side by side.
///
/// # Safety
///
/// Callers of any method run on a processor that has the instructions of the implementing module; `at` is readable or
/// writable for `WIDTH` numbers, at any alignment.
#[expect(clippy::missing_safety_doc, reason = "the trait's own says it for all")]
pub trait Lanes: Copy {
    /// How many.
    const WIDTH: usize;
    /// All the same.
    unsafe fn splat(number: f32) -> Self;
    /// From memory.
    unsafe fn load(at: *const f32) -> Self;
    /// From pairs of bf16, the lower half of each 32 bits and the upper half.
    unsafe fn load_pairs(at: *const f32) -> [Self; 2];
    /// To memory.
    unsafe fn store(self, at: *mut f32);
    /// `self + other`.
    unsafe fn plus(self, other: Self) -> Self;
    /// `self * factor + summand`, rounded once.
    unsafe fn times_plus(self, factor: Self, summand: Self) -> Self;
    /// Asks for the cache line at an address, which need not exist.
    unsafe fn prefetch(at: *const f32);
    /// The same, into the second cache.
    unsafe fn prefetch_far(at: *const f32);
}

/// One number: what every processor has. Where it has no fused multiply-add the library's function computes it, slowly.
impl Lanes for f32 {
    const WIDTH: usize = 1;

    unsafe fn splat(number: f32) -> Self {
        number
    }

    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: by the trait's contract.
        unsafe { at.read_unaligned() }
    }

    unsafe fn load_pairs(at: *const f32) -> [Self; 2] {
        // SAFETY: by the trait's contract.
        let bits = unsafe { at.cast::<u32>().read_unaligned() };
        [f32::from_bits(bits << 16), f32::from_bits(bits & 0xFFFF_0000)]
    }

    unsafe fn store(self, at: *mut f32) {
        // SAFETY: by the trait's contract.
        unsafe { at.write_unaligned(self) }
    }

    unsafe fn plus(self, other: Self) -> Self {
        self + other
    }

    unsafe fn times_plus(self, factor: Self, summand: Self) -> Self {
        self.mul_add(factor, summand)
    }

    unsafe fn prefetch(_: *const f32) {}

    unsafe fn prefetch_far(_: *const f32) {}
}

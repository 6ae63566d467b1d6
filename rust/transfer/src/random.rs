//! Repeatable random numbers: for jitter, and for tests that must tell the same story twice.

/// A generator (SplitMix64) that gives the same numbers for the same seed. Not for secrets.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.bits() % bound
    }

    /// True `chances` times in a thousand.
    pub fn permille(&mut self, chances: u64) -> bool {
        self.below(1000) < chances
    }
}

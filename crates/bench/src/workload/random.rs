//! Random numbers: xoroshiro128++, fast and reproducible from a seed on every machine.

/// Random number generator.
#[derive(Clone, Debug)]
pub struct Random(u64, u64);

impl Random {
    /// Creates a generator that depends only on `seed`.
    pub fn new(seed: u64) -> Random {
        Random(mix(seed), mix(seed.wrapping_add(1)) | 1)
    }

    /// Returns the next number.
    #[inline]
    pub fn draw(&mut self) -> u64 {
        let (a, b) = (self.0, self.1);
        let result = a.wrapping_add(b).rotate_left(17).wrapping_add(a);
        let b = b ^ a;
        self.0 = a.rotate_left(49) ^ b ^ (b << 21);
        self.1 = b.rotate_left(28);
        result
    }

    /// Returns a number below `bound`, which must not be 0.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        // The bias is below bound / 2^64.
        ((u128::from(self.draw()) * u128::from(bound)) >> 64) as u64
    }

    /// Returns a number in [0, 1).
    #[inline]
    pub fn unit(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Scrambles the bits of a number bijectively.
#[inline]
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

//! Random permutation of all numbers below a bound, without a table.
//!
//! A counter runs to the next power of two, and bijective steps (odd multiplication, xor with the upper bits) scramble each value. Values
//! not below the bound are skipped.

/// Iteration over all numbers below a bound.
#[derive(Clone, Debug)]
pub struct Permutation {
    bound: u64,
    mask: u64,
    shift: u32,
    keys: [u64; 3],
    at: u64,
}

impl Permutation {
    /// Creates a permutation of the numbers below `bound`, selected by `seed`.
    pub fn new(bound: u64, seed: u64) -> Permutation {
        let bits = (64 - bound.saturating_sub(1).leading_zeros()).max(1);
        Permutation {
            bound,
            mask: u64::MAX >> (64 - bits),
            shift: bits.div_ceil(2),
            keys: [mix(seed), mix(seed ^ 0x5555) | 1, mix(seed ^ 0xaaaa) | 1],
            at: 0,
        }
    }

    /// Maps a number to another, bijectively below the bound. `value` must be below the bound.
    #[inline]
    pub fn place(&self, value: u64) -> u64 {
        let mut place = self.spread(value);
        // Repeated steps form a cycle within the next power of two, which contains `value`; so the loop ends.
        while place >= self.bound {
            place = self.spread(place);
        }
        place
    }

    #[inline]
    fn spread(&self, value: u64) -> u64 {
        let [add, first, second] = self.keys;
        let mut x = value.wrapping_add(add) & self.mask;
        x = x.wrapping_mul(first) & self.mask;
        x ^= x >> self.shift;
        x = x.wrapping_mul(second) & self.mask;
        x ^ (x >> self.shift)
    }
}

impl Iterator for Permutation {
    type Item = u64;

    #[inline]
    fn next(&mut self) -> Option<u64> {
        while self.at <= self.mask {
            let value = self.spread(self.at);
            self.at += 1;
            if value < self.bound {
                return Some(value);
            }
        }
        None
    }
}

/// Scrambles the bits of a number bijectively.
#[inline]
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_comes_once() {
        for bound in [1, 2, 3, 64, 100, 1000, 4097] {
            for seed in 0..4 {
                let mut seen: Vec<u64> = Permutation::new(bound, seed).collect();
                assert!(
                    bound < 64 || seen.windows(2).any(|w| w[0] > w[1]),
                    "{bound}"
                );
                seen.sort_unstable();
                assert!(seen.into_iter().eq(0..bound), "{bound} {seed}");
                let one = Permutation::new(bound, seed);
                let mut places: Vec<u64> = (0..bound).map(|value| one.place(value)).collect();
                places.sort_unstable();
                assert!(places.into_iter().eq(0..bound), "{bound} {seed}");
            }
        }
    }
}

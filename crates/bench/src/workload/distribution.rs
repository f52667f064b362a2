//! Non-uniform distributions of offsets: zipf, pareto, normal, zones.

use fastrand::Rng;

use super::Permutation;
use crate::job::{Amount, Distribution, Zone};

/// Generator of block indexes.
#[derive(Clone, Debug)]
pub enum Sampler {
    /// Uniform.
    Uniform {
        /// Number of blocks.
        count: u64,
    },
    /// Algorithm: J. Gray et al., "Quickly Generating Billion-Record Synthetic Databases" (1994).
    Zipf {
        /// Number of blocks.
        count: u64,
        /// Skew.
        theta: f64,
        /// Sum of 1 / i^theta over all blocks.
        zeta: f64,
        /// 1 / (1 - theta).
        alpha: f64,
        /// Constant of the algorithm.
        eta: f64,
        /// Maps ranks to blocks, so that frequent blocks are not adjacent.
        places: Permutation,
    },
    /// Power law.
    Pareto {
        /// Number of blocks.
        count: u64,
        /// log h / log (1 - h).
        power: f64,
        /// Maps ranks to blocks.
        places: Permutation,
    },
    /// As in fio: the mean of twelve uniform numbers, shifted by up to half of the deviation.
    Normal {
        /// Number of blocks.
        count: u64,
        /// Deviation in blocks.
        deviation: f64,
        /// Maps ranks to blocks.
        places: Permutation,
    },
    /// Zones.
    Zoned(Vec<Part>),
}

/// A zone.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Cumulative percentage of requests up to this zone.
    below: u8,
    first: u64,
    count: u64,
}

/// Fixed seed: the same blocks are frequent regardless of the seed of the requests.
const SCATTER: u64 = 0x6c75_6e65;

/// Number of exact terms of the sum; the rest is an integral with an error below 1e-6 of it.
const EXACT_TERMS: u64 = 10_000;

fn zeta(count: u64, theta: f64) -> f64 {
    let exact = count.min(EXACT_TERMS);
    let sum: f64 = (1..=exact).map(|i| (i as f64).powf(-theta)).sum();
    if count <= EXACT_TERMS {
        return sum;
    }
    let (low, high) = (exact as f64 + 0.5, count as f64 + 0.5);
    sum + (high.powf(1.0 - theta) - low.powf(1.0 - theta)) / (1.0 - theta)
}

impl Sampler {
    /// Creates a sampler of `count` blocks.
    pub fn new(distribution: &Distribution, count: u64, unit: u64) -> Sampler {
        let count = count.max(1);
        match *distribution {
            Distribution::Uniform => Sampler::Uniform { count },
            Distribution::Zipf(theta) => {
                let whole = zeta(count, theta);
                let two = zeta(2, theta);
                Sampler::Zipf {
                    count,
                    theta,
                    zeta: whole,
                    alpha: 1.0 / (1.0 - theta),
                    eta: (1.0 - (2.0 / count as f64).powf(1.0 - theta)) / (1.0 - two / whole),
                    places: Permutation::new(count, SCATTER),
                }
            }
            Distribution::Pareto(h) => Sampler::Pareto {
                count,
                power: h.ln() / (1.0 - h).ln(),
                places: Permutation::new(count, SCATTER),
            },
            Distribution::Normal(percent) => Sampler::Normal {
                count,
                // The deviation is limited to half of the disk.
                deviation: (count as f64 * percent / 100.0).min(count as f64 / 2.0),
                places: Permutation::new(count, SCATTER),
            },
            Distribution::Zoned(ref zones) => Sampler::Zoned(parts(zones, count, unit)),
        }
    }

    /// Returns the next index, below the count.
    #[inline]
    pub fn draw(&self, random: &mut Rng) -> u64 {
        match *self {
            Sampler::Zoned(ref parts) => {
                let point = random.u8(..100);
                let part = parts.iter().find(|part| point < part.below);
                part.map_or(0, |part| part.first + random.u64(..part.count))
            }
            Sampler::Uniform { count } => random.u64(..count),
            Sampler::Zipf {
                count,
                theta,
                zeta,
                alpha,
                eta,
                ref places,
            } => {
                let u = random.f64();
                let uz = u * zeta;
                let rank = if uz < 1.0 {
                    0
                } else if uz < 1.0 + 0.5f64.powf(theta) {
                    1
                } else {
                    (count as f64 * (eta * u - eta + 1.0).powf(alpha)) as u64
                };
                places.place(rank.min(count - 1))
            }
            Sampler::Pareto {
                count,
                power,
                ref places,
            } => {
                let rank = ((count - 1) as f64 * random.f64().powf(power)) as u64;
                places.place(rank.min(count - 1))
            }
            Sampler::Normal {
                count,
                deviation,
                ref places,
            } => {
                let sum: f64 = (0..12).map(|_| random.f64()).sum();
                let middle = sum / 12.0 * count as f64;
                let mut at = deviation * (random.f64() - 0.5);
                // An index outside the disk moves towards the middle.
                while !(0.0..count as f64).contains(&(middle + at)) {
                    at /= 2.0;
                }
                places.place(((middle + at) as u64).min(count - 1))
            }
        }
    }
}

/// Returns the zones as consecutive block ranges within the disk, each with at least one block.
fn parts(zones: &[Zone], count: u64, unit: u64) -> Vec<Part> {
    let (mut below, mut at, mut percent) = (0, 0, 0);
    let part = |zone: &Zone| {
        let end = match zone.extent {
            Amount::Percent(more) => {
                percent += u64::from(more);
                (u128::from(count) * u128::from(percent) / 100) as u64
            }
            Amount::Bytes(bytes) => at + bytes / unit,
        };
        let first = at.min(count - 1);
        let end = end.clamp(first + 1, count);
        below += zone.access;
        at = end;
        Part {
            below,
            first,
            count: end - first,
        }
    };
    zones.iter().map(part).collect()
}

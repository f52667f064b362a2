//! Places that are hit with different frequency: zipf, pareto, normal.

use super::random::{Random, mix};
use crate::job::Distribution;

/// Draws places.
#[derive(Clone, Debug)]
pub enum Sampler {
    /// All alike.
    Uniform {
        /// Places.
        count: u64,
    },
    /// After J. Gray et al., "Quickly Generating Billion-Record Synthetic Databases" (1994).
    Zipf {
        /// Places.
        count: u64,
        /// Skew.
        theta: f64,
        /// Sum of 1 / i^theta over all places.
        zeta: f64,
        /// 1 / (1 - theta).
        alpha: f64,
        /// A constant of the method.
        eta: f64,
    },
    /// Power law.
    Pareto {
        /// Places.
        count: u64,
        /// log h / log (1 - h).
        power: f64,
    },
    /// Around the middle.
    Normal {
        /// Places.
        count: u64,
        /// In places.
        deviation: f64,
    },
}

/// Up to here the sum is made term by term, from there on as an integral: the error is below 1e-6 of it.
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
    /// For `count` places.
    pub fn new(distribution: Distribution, count: u64) -> Sampler {
        let count = count.max(1);
        match distribution {
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
                }
            }
            Distribution::Pareto(h) => Sampler::Pareto {
                count,
                power: h.ln() / (1.0 - h).ln(),
            },
            Distribution::Normal(percent) => Sampler::Normal {
                count,
                deviation: count as f64 * percent / 100.0,
            },
        }
    }

    /// The next place, below the count.
    #[inline]
    pub fn draw(&self, random: &mut Random) -> u64 {
        match *self {
            Sampler::Uniform { count } => random.below(count),
            Sampler::Zipf {
                count,
                theta,
                zeta,
                alpha,
                eta,
            } => {
                let u = random.unit();
                let uz = u * zeta;
                let rank = if uz < 1.0 {
                    0
                } else if uz < 1.0 + 0.5f64.powf(theta) {
                    1
                } else {
                    (count as f64 * (eta * u - eta + 1.0).powf(alpha)) as u64
                };
                // The popular ones do not lie side by side.
                spread(rank.min(count - 1), count)
            }
            Sampler::Pareto { count, power } => {
                let rank = ((count - 1) as f64 * random.unit().powf(power)) as u64;
                spread(rank.min(count - 1), count)
            }
            Sampler::Normal { count, deviation } => {
                // Box and Muller; what falls off the disk is drawn again.
                loop {
                    let radius = (-2.0 * (1.0 - random.unit()).ln()).sqrt();
                    let angle = std::f64::consts::TAU * random.unit();
                    let at = count as f64 / 2.0 + deviation * radius * angle.cos();
                    if at >= 0.0 && at < count as f64 {
                        return at as u64;
                    }
                }
            }
        }
    }
}

#[inline]
fn spread(rank: u64, count: u64) -> u64 {
    mix(rank) % count
}

//! Latencies of one direction and their report. Every sample is stored: exact percentiles, for short runs.

use serde::Serialize;
use std::time::Duration;

/// Latencies in nanoseconds, and failures.
#[derive(Default)]
pub struct Samples {
    latencies_ns: Vec<u64>,
    errors: u64,
    first_error: Option<String>,
}

/// Report of one direction.
#[derive(Serialize)]
pub struct Summary {
    ios: u64,
    errors: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_error: Option<String>,
    iops: f64,
    bytes_per_second: f64,
    mean_us: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    max_us: f64,
}

impl Samples {
    /// Records a successful I/O.
    pub fn record(&mut self, latency: Duration) {
        self.latencies_ns.push(latency.as_nanos() as u64);
    }

    /// Records a failed I/O.
    pub fn fail(&mut self, message: String) {
        self.errors += 1;
        self.first_error.get_or_insert(message);
    }

    /// Adds the samples of another thread.
    pub fn merge(&mut self, other: Samples) {
        self.latencies_ns.extend(other.latencies_ns);
        self.errors += other.errors;
        if self.first_error.is_none() {
            self.first_error = other.first_error;
        }
    }

    /// Returns true after a failure.
    pub fn failed(&self) -> bool {
        self.errors > 0
    }

    /// Returns the report for a time of `elapsed` and I/Os of `block_size` bytes.
    pub fn summary(mut self, block_size: u64, elapsed: Duration) -> Summary {
        self.latencies_ns.sort_unstable();
        let sorted = &self.latencies_ns;
        let ios = sorted.len() as u64;
        let seconds = elapsed.as_secs_f64().max(1e-9);
        let sum: u128 = sorted.iter().map(|&ns| u128::from(ns)).sum();
        Summary {
            ios,
            errors: self.errors,
            first_error: self.first_error,
            iops: ios as f64 / seconds,
            bytes_per_second: (ios * block_size) as f64 / seconds,
            mean_us: sum as f64 / (ios.max(1) as f64) / 1e3,
            p50_us: percentile_us(sorted, 0.5),
            p99_us: percentile_us(sorted, 0.99),
            p999_us: percentile_us(sorted, 0.999),
            max_us: percentile_us(sorted, 1.0),
        }
    }
}

/// Returns the nearest-rank percentile of sorted nanoseconds, in microseconds; 0 without samples.
fn percentile_us(sorted_ns: &[u64], fraction: f64) -> f64 {
    let rank = (fraction * sorted_ns.len() as f64).ceil() as usize;
    sorted_ns
        .get(rank.saturating_sub(1))
        .map_or(0.0, |&ns| ns as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        let sorted: Vec<u64> = (1..=1000).map(|n| n * 1000).collect();
        assert_eq!(percentile_us(&sorted, 0.5), 500.0);
        assert_eq!(percentile_us(&sorted, 0.99), 990.0);
        assert_eq!(percentile_us(&sorted, 0.999), 999.0);
        assert_eq!(percentile_us(&sorted, 1.0), 1000.0);
        assert_eq!(percentile_us(&[], 0.5), 0.0);
        assert_eq!(percentile_us(&[7000], 0.01), 7.0);
    }
}

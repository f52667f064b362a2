//! Results of a study of latencies: its layers, and the requests that all instruments saw.

use bench::run::{Disturbance, Interval};
use bench::study::{MATTERS, next_value};

/// Latency of the requests that an instrument saw.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    pub mean_ns: f64,
    pub requests: usize,
    /// Number of requests of the run. The instrument may miss some: a polling device is not notified of every request.
    pub of_requests: usize,
}

/// Result of one layer.
#[derive(Clone, Debug)]
pub struct Layer {
    pub name: String,
    /// `Err`: reason for a missing result.
    pub found: Result<Measured, String>,
    /// The application's mean in the same run, in nanoseconds.
    pub control_ns: Option<f64>,
    /// Part of the layer above it.
    pub is_part: bool,
    /// Other load on the machine in that run.
    pub load: Disturbance,
}

/// All layers of one transport and pattern.
pub struct Study {
    pub title: String,
    /// The application's means in runs without instruments, in nanoseconds.
    pub plain_ns: Vec<f64>,
    pub layers: Vec<Layer>,
    pub matched: MatchedRequests,
}

/// Requests seen by all instruments of the guest.
#[derive(Default)]
pub struct MatchedRequests {
    /// Means between adjacent instruments: name and nanoseconds.
    pub parts: Vec<(String, f64)>,
    /// Number of requests.
    pub requests: usize,
    /// The application's mean in that run, in nanoseconds.
    pub control_ns: f64,
    /// Other load on the machine in that run.
    pub load: Disturbance,
}

impl Study {
    /// Returns the expected range of the application's latency in a further run: the spread of the runs without instruments, but at least the
    /// smallest difference that matters.
    pub fn expected(&self) -> Option<Interval> {
        let found = next_value(&self.plain_ns)?;
        let margin = found.value * MATTERS;
        Some(Interval {
            value: found.value,
            low: found.low.min(found.value - margin),
            high: found.high.max(found.value + margin),
        })
    }

    /// Returns half of the width of the expected range: smaller differences of two runs have no meaning.
    pub fn spread_ns(&self) -> f64 {
        self.expected()
            .map_or(0.0, |range| range.high - range.value)
    }

    /// Returns the distance of a control from the expected range; 0 inside of it.
    pub fn apart_ns(&self, control_ns: Option<f64>) -> f64 {
        match (control_ns, self.expected()) {
            (Some(control), Some(range)) => {
                (range.low - control).max(control - range.high).max(0.0)
            }
            _ => 0.0,
        }
    }

    /// Returns true if the application had its usual latency in the run of a layer.
    pub fn is_steady(&self, layer: &Layer) -> bool {
        self.apart_ns(layer.control_ns) == 0.0
    }

    /// Returns true if the means of all runs can be subtracted from each other.
    pub fn is_comparable(&self) -> bool {
        self.layers.iter().all(|layer| self.is_steady(layer))
    }

    /// Returns the reasons against a comparison of the layers.
    pub fn cautions(&self) -> Vec<String> {
        let mut cautions = Vec::new();
        let layers = self.layers.iter().filter(|layer| !layer.is_part);
        let loads = layers
            .clone()
            .map(|layer| (layer.name.as_str(), layer.load));
        for (name, load) in loads.chain([("matched requests", self.matched.load)]) {
            if load.is_disturbed() {
                cautions.push(format!("{name}: {}", load.describe()));
            }
        }
        let Some(range) = self.expected() else {
            return cautions;
        };
        for layer in layers.filter(|layer| !self.is_steady(layer)) {
            cautions.push(format!(
                "{}: the application took {:.0} ns in this run, and {:.0} to {:.0} ns are expected from {} runs without instruments: the layer cannot be \
                 compared with the others; hint: repeat the study on a quiet machine, with a longer --time",
                layer.name,
                layer.control_ns.unwrap_or(0.0),
                range.low,
                range.high,
                self.plain_ns.len()
            ));
        }
        cautions
    }
}

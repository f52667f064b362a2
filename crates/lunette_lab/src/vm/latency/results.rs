//! Results of a study of latencies: its layers, and the requests that all instruments saw.

use bench::run::Disturbance;

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

/// Largest ratio of two controls of a study with comparable layers.
const CONTROLS_APART: f64 = 1.2;

impl Study {
    /// Returns the ratio of the largest to the smallest latency that the application measured.
    fn controls_apart(&self) -> f64 {
        let application = self
            .layers
            .first()
            .and_then(|layer| layer.found.as_ref().ok());
        let application = application.map(|found| found.mean_ns);
        let controls = self.layers.iter().filter_map(|layer| layer.control_ns);
        let all: Vec<f64> = controls
            .chain(application)
            .filter(|mean| *mean > 0.0)
            .collect();
        let most = all.iter().copied().fold(0.0, f64::max);
        let least = all.iter().copied().fold(most, f64::min);
        if least > 0.0 { most / least } else { 1.0 }
    }

    /// Returns true if the means of different runs can be subtracted from each other.
    pub fn is_comparable(&self) -> bool {
        self.controls_apart() <= CONTROLS_APART
    }

    /// Returns the reasons against a comparison of the layers.
    pub fn cautions(&self) -> Vec<String> {
        let mut cautions = Vec::new();
        let layers = self.layers.iter().filter(|layer| !layer.is_part);
        let loads = layers.map(|layer| (layer.name.as_str(), layer.load));
        for (name, load) in loads.chain([("matched requests", self.matched.load)]) {
            if load.is_disturbed() {
                cautions.push(format!("{name}: {}", load.describe()));
            }
        }
        if !self.is_comparable() {
            cautions.push(format!(
                "the controls differ by a factor of {:.2}: the layers cannot be compared with each other; hint: repeat the study on a quiet machine, \
                 with a longer --time",
                self.controls_apart()
            ));
        }
        cautions
    }
}

//! Tables and JSON of a study.

use bench::report::columns;
use serde_json::{Value, json};

use super::{Measured, Study};

/// Returns the number of requests of a layer, with that of the run if the instrument missed some.
fn count(found: &Measured) -> String {
    match found.requests == found.of_requests {
        true => found.requests.to_string(),
        false => format!("{} of {}", found.requests, found.of_requests),
    }
}

impl Study {
    pub fn text(&self) -> String {
        let mut lines = vec![vec![
            "layer".to_owned(),
            "mean ns".to_owned(),
            "delta ns".to_owned(),
            "share".to_owned(),
            "control ns".to_owned(),
            "requests".to_owned(),
        ]];
        let whole = self
            .layers
            .first()
            .and_then(|layer| layer.found.as_ref().ok())
            .map(|found| found.mean_ns);
        let mut above: Option<f64> = None;
        let mut notes = Vec::new();
        for layer in &self.layers {
            let (mean, delta, share, requests) = match &layer.found {
                Ok(found) => {
                    let mean = found.mean_ns;
                    let delta = above.filter(|_| !layer.is_part).map(|above| above - mean);
                    let of = if layer.is_part { Some(mean) } else { delta };
                    let share = of
                        .zip(whole)
                        .map(|(part, whole)| format!("{:.1} %", part * 100.0 / whole));
                    if !layer.is_part {
                        above = Some(mean);
                    }
                    let delta = delta.map(|delta| format!("{delta:.0}"));
                    (format!("{mean:.0}"), delta, share, count(found))
                }
                Err(why) => {
                    notes.push(format!("{}: {why}", layer.name));
                    ("-".to_owned(), None, None, "-".to_owned())
                }
            };
            let dash = || "-".to_owned();
            lines.push(vec![
                layer.name.clone(),
                mean,
                delta.unwrap_or_else(dash),
                share.unwrap_or_else(dash),
                layer
                    .control_ns
                    .map_or_else(dash, |control| format!("{control:.0}")),
                requests,
            ]);
        }
        let mut text = format!("{}\n\n{}", self.title, columns(&lines));
        for note in notes {
            text.push_str(&format!("- {note}\n"));
        }
        text + &self.parts_text()
    }

    fn parts_text(&self) -> String {
        if self.matched.requests == 0 {
            return String::new();
        }
        let sum: f64 = self.matched.parts.iter().map(|(_, mean)| mean).sum();
        let mut lines = vec![vec![
            "part of a request in the guest".to_owned(),
            "mean ns".to_owned(),
            "share".to_owned(),
        ]];
        let remainder = self.matched.control_ns - sum;
        let parts = self
            .matched
            .parts
            .iter()
            .map(|(name, mean)| (name.as_str(), *mean));
        for (name, mean) in parts.chain([("remainder: outside the guest's block layer", remainder)])
        {
            let share = mean * 100.0 / self.matched.control_ns.max(1.0);
            lines.push(vec![
                name.to_owned(),
                format!("{mean:.0}"),
                format!("{share:.1} %"),
            ]);
        }
        format!(
            "\n{} requests matched one to one with all instruments on; application: {:.0} ns\n{}",
            self.matched.requests,
            self.matched.control_ns,
            columns(&lines)
        )
    }

    pub fn json(&self) -> Value {
        let layers = self.layers.iter().map(|layer| match &layer.found {
            Ok(found) => {
                json!({"layer": layer.name.trim(), "mean_ns": found.mean_ns, "requests": found.requests,
                "of_requests": found.of_requests, "control_ns": layer.control_ns, "is_part": layer.is_part})
            }
            Err(why) => {
                json!({"layer": layer.name.trim(), "why_not": why, "is_part": layer.is_part})
            }
        });
        let parts = self
            .matched
            .parts
            .iter()
            .map(|(name, mean)| json!({"part": name, "mean_ns": mean}));
        json!({"study": self.title, "layers": layers.collect::<Vec<_>>(), "parts": parts.collect::<Vec<_>>(),
            "matched": self.matched.requests, "matched_control_ns": self.matched.control_ns})
    }
}

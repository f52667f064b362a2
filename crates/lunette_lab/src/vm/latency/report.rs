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
        // A part is compared with the whole of its own run.
        let is_comparable = self.is_comparable();
        let mut notes = self.cautions();
        for layer in &self.layers {
            let (mean, delta, share, requests) = match &layer.found {
                Ok(found) => {
                    let mean = found.mean_ns;
                    let delta = above.filter(|_| !layer.is_part && is_comparable);
                    let delta = delta.map(|above| above - mean);
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
                "of_requests": found.of_requests, "control_ns": layer.control_ns, "is_part": layer.is_part,
                    "load": layer.load, "disturbed": layer.load.is_disturbed()})
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
            "matched": self.matched.requests, "matched_control_ns": self.matched.control_ns,
            "comparable": self.is_comparable(), "cautions": self.cautions()})
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Layer, MatchedRequests, all_seen};
    use super::*;
    use bench::run::Disturbance;

    fn study(control_ns: f64, foreign_cpus: f64) -> Study {
        let layer = |name: &str, mean, control_ns| Layer {
            name: name.to_owned(),
            found: Ok(all_seen(mean, 9)),
            control_ns,
            is_part: false,
            load: Disturbance::default(),
        };
        let mut block = layer("Guest block", 90_000.0, Some(control_ns));
        block.load.foreign_cpus = foreign_cpus;
        Study {
            title: "blk".to_owned(),
            layers: vec![layer("Guest application", 100_000.0, None), block],
            matched: MatchedRequests::default(),
        }
    }

    #[test]
    fn layers_with_different_controls_are_not_subtracted() {
        let text = study(105_000.0, 0.02).text();
        assert!(
            text.contains(" 10000 ") && !text.contains("differ"),
            "{text}"
        );
        for control in [160_000.0, 60_000.0] {
            let text = study(control, 0.02).text();
            assert!(
                text.contains("the controls differ by a factor of 1.6"),
                "{text}"
            );
            assert!(!text.contains(" 10000 "), "{text}");
            assert_eq!(study(control, 0.0).json()["comparable"], false);
        }
    }

    #[test]
    fn other_load_is_named_with_its_layer() {
        let disturbed = study(100_000.0, 0.8);
        let wanted = "Guest block: disturbed: others used 0.80 CPUs, the hypervisor took 0.00";
        assert!(disturbed.text().contains(wanted), "{}", disturbed.text());
        assert_eq!(disturbed.json()["cautions"][0], wanted);
        assert_eq!(disturbed.json()["layers"][1]["disturbed"], true);
    }
}

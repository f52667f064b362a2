//! Tables and JSON of a study.

use bench::report::columns;
use serde_json::{Value, json};

use super::{Layer, Measured, Study};

/// Returns the number of requests of a layer, with that of the run if the instrument missed some.
fn count(found: &Measured) -> String {
    match found.requests == found.of_requests {
        true => found.requests.to_string(),
        false => format!("{} of {}", found.requests, found.of_requests),
    }
}

/// Difference between a layer and the one above it.
#[derive(Clone, Copy)]
struct Delta {
    ns: f64,
    /// Larger than the spread of the runs, or of one run.
    is_certain: bool,
}

impl Study {
    /// Returns the difference of a layer from the one above it; `None` if their runs are not comparable.
    fn delta(&self, above: &Layer, layer: &Layer) -> Option<Delta> {
        let mean = |layer: &Layer| layer.found.as_ref().ok().map(|found| found.mean_ns);
        let ns = mean(above)? - mean(layer)?;
        // The layers of a device have one run, and so one control.
        let is_one_run = above.control_ns.is_some() && above.control_ns == layer.control_ns;
        let is_certain = is_one_run || ns.abs() > self.spread_ns();
        (self.is_steady(above) && self.is_steady(layer)).then_some(Delta { ns, is_certain })
    }

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
        let mut above: Option<&Layer> = None;
        let mut notes = self.cautions();
        for layer in &self.layers {
            let (mean, delta, share, requests) = match &layer.found {
                Ok(found) => {
                    let mean = found.mean_ns;
                    let delta = above.filter(|_| !layer.is_part);
                    let delta = delta.and_then(|above| self.delta(above, layer));
                    let of = match layer.is_part {
                        // A part is compared with the whole of its own run.
                        true => Some(mean),
                        false => delta.map(|delta| delta.ns),
                    };
                    let share = of
                        .zip(whole)
                        .map(|(part, whole)| format!("{:.1} %", part * 100.0 / whole));
                    if let Some(delta) = delta.filter(|delta| delta.ns < 0.0 && delta.is_certain) {
                        notes.push(format!("{}: {:.0} ns longer than the layer above it, more than the spread of the runs", layer.name, -delta.ns));
                    }
                    if !layer.is_part {
                        above = Some(layer);
                    }
                    let mark = |delta: Delta| if delta.is_certain { "" } else { "~" };
                    let delta = delta.map(|delta| format!("{}{:.0}", mark(delta), delta.ns));
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
        if let Some(range) = self.expected() {
            notes.insert(0, format!(
                "the application without instruments: {:.0} ns in {} runs, {:.0} to {:.0} ns expected in a further one (95 %); ~: a difference of two runs \
                 within this spread",
                range.value, self.plain_ns.len(), range.low, range.high
            ));
        }
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
                    "comparable": self.is_steady(layer), "load": layer.load, "disturbed": layer.load.is_disturbed()})
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
        json!({"study": self.title, "application_runs_ns": self.plain_ns, "expected_control_ns": self.expected(), "layers": layers.collect::<Vec<_>>(), "parts": parts.collect::<Vec<_>>(),
            "matched": self.matched.requests, "matched_control_ns": self.matched.control_ns,
            "comparable": self.is_comparable(), "cautions": self.cautions()})
    }
}

#[cfg(test)]
mod tests {
    use super::super::results::MatchedRequests;
    use super::super::{Layer, all_seen};
    use super::*;
    use bench::run::Disturbance;

    fn study(plain_ns: [f64; 3], control_ns: f64, foreign_cpus: f64) -> Study {
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
            plain_ns: plain_ns.to_vec(),
            layers: vec![layer("Guest application", 100_000.0, None), block],
            matched: MatchedRequests::default(),
        }
    }

    const QUIET: [f64; 3] = [99_000.0, 100_000.0, 101_000.0];
    const NOISY: [f64; 3] = [80_000.0, 100_000.0, 120_000.0];

    /// A quiet study with a control 10 % apart is not comparable, a noisy one with a control 50 % apart is.
    #[test]
    fn controls_are_judged_by_the_spread_of_the_runs() {
        for (plain, control, is_comparable) in [
            (QUIET, 103_000.0, true),
            (QUIET, 110_000.0, false),
            (QUIET, 90_000.0, false),
            (NOISY, 150_000.0, true),
            (NOISY, 210_000.0, false),
        ] {
            let study = study(plain, control, 0.02);
            assert_eq!(study.is_comparable(), is_comparable, "{plain:?} {control}");
            let text = study.text();
            assert_eq!(text.contains("10.0 %"), is_comparable, "{text}");
            assert_eq!(text.contains("cannot be compared"), !is_comparable);
            assert_eq!(study.json()["comparable"], is_comparable);
            assert_eq!(study.json()["layers"][1]["comparable"], is_comparable);
        }
    }

    #[test]
    fn differences_within_the_spread_are_marked() {
        assert!(study(QUIET, 100_000.0, 0.0).text().contains(" 10000 "));
        let noisy = study(NOISY, 100_000.0, 0.0).text();
        assert!(noisy.contains(" ~10000 "), "{noisy}");
        assert!(noisy.contains("a difference of two runs within this spread"));
        let mut longer = study(QUIET, 100_000.0, 0.0);
        longer.layers[1].found = Ok(all_seen(140_000.0, 9));
        let text = longer.text();
        assert!(
            text.contains("40000 ns longer than the layer above it"),
            "{text}"
        );
    }

    #[test]
    fn other_load_is_named_with_its_layer() {
        let disturbed = study(QUIET, 100_000.0, 0.8);
        let wanted = "Guest block: disturbed: others used 0.80 CPUs, the hypervisor took 0.00";
        assert!(disturbed.text().contains(wanted), "{}", disturbed.text());
        assert_eq!(disturbed.json()["cautions"][0], wanted);
        assert_eq!(disturbed.json()["layers"][1]["disturbed"], true);
    }
}

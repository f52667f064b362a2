//! Prometheus' text format, version 0.0.4: families with help and type, samples with labels, cumulative histograms.
//!
//! <https://prometheus.io/docs/instrumenting/exposition_formats/>

use std::fmt::{Display, Write};

use latency::SparseHistogram;

/// Content type of the text of a `Page`.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

#[derive(Debug, Default)]
pub struct Page {
    text: String,
}

/// Type of a metric family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    /// Cumulative counts by upper bound.
    Histogram,
}

pub struct Family<'p> {
    page: &'p mut Page,
    name: &'static str,
}

/// Label names and values in print order.
pub type Pairs<'l> = &'l [(&'l str, &'l str)];

impl Page {
    pub fn family(&mut self, name: &'static str, kind: Kind, help: &str) -> Family<'_> {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let help = help.replace('\\', "\\\\").replace('\n', "\\n");
        self.line(format_args!("# HELP {name} {help}"));
        self.line(format_args!("# TYPE {name} {kind}"));
        Family { page: self, name }
    }

    pub fn into_text(self) -> String {
        self.text
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.text, "{line}").expect("a String takes all that is written to it");
    }
}

impl Family<'_> {
    pub fn sample(&mut self, labels: Pairs, value: impl Display) {
        let name = self.name;
        let labels = braced(labels, None);
        self.page.line(format_args!("{name}{labels} {value}"));
    }

    /// Writes one histogram, in seconds. `bounds_ns` are the upper bounds in nanoseconds, ascending.
    pub fn histogram(&mut self, labels: Pairs, bounds_ns: &[u64], histogram: &SparseHistogram) {
        let name = self.name;
        let mut buckets = histogram.buckets.iter().peekable();
        let mut cumulative = 0u64;
        for bound in bounds_ns {
            while let Some((_, count)) = buckets.next_if(|(value, _)| value <= bound) {
                cumulative = cumulative.saturating_add(*count);
            }
            let bound = seconds(*bound as f64);
            let labels = braced(labels, Some(&bound));
            self.page
                .line(format_args!("{name}_bucket{labels} {cumulative}"));
        }
        let infinite = braced(labels, Some("+Inf"));
        let count = histogram.count;
        self.page
            .line(format_args!("{name}_bucket{infinite} {count}"));
        let labels = braced(labels, None);
        let sum = seconds(histogram.sum_ns);
        self.page.line(format_args!("{name}_sum{labels} {sum}"));
        self.page.line(format_args!("{name}_count{labels} {count}"));
    }
}

/// Formats nanoseconds as seconds: the shortest decimal number that parses to the same value.
fn seconds(nanos: f64) -> String {
    // Division, not multiplication by 1e-9, gives 1000 ns exactly as 0.000001.
    (nanos / 1e9).to_string()
}

fn braced(labels: Pairs, bound: Option<&str>) -> String {
    let bound = bound.map(|bound| ("le", bound));
    let all: Vec<String> = labels
        .iter()
        .copied()
        .chain(bound)
        .map(|(name, value)| format!("{name}=\"{}\"", escaped(value)))
        .collect();
    match all.as_slice() {
        [] => String::new(),
        all => format!("{{{}}}", all.join(",")),
    }
}

fn escaped(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_and_histograms_follow_the_text_format() {
        let mut page = Page::default();
        let mut counter = page.family("a_total", Kind::Counter, "What\nit \\ is.");
        counter.sample(&[], 3);
        counter.sample(&[("x", "a\"b\\c\nd"), ("y", "")], 1.5);
        let times = SparseHistogram::from_nanos([500, 1_000, 1_001, 2_000_000_000]);
        page.family("t_seconds", Kind::Histogram, "Time.")
            .histogram(&[("q", "0")], &[100, 1_000, 2_500], &times);
        let expected = r#"# HELP a_total What\nit \\ is.
# TYPE a_total counter
a_total 3
a_total{x="a\"b\\c\nd",y=""} 1.5
# HELP t_seconds Time.
# TYPE t_seconds histogram
t_seconds_bucket{q="0",le="0.0000001"} 0
t_seconds_bucket{q="0",le="0.000001"} 2
t_seconds_bucket{q="0",le="0.0000025"} 3
t_seconds_bucket{q="0",le="+Inf"} 4
t_seconds_sum{q="0"} 2.000002501
t_seconds_count{q="0"} 4
"#;
        assert_eq!(page.into_text(), expected);
    }
}

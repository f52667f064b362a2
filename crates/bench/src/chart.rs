//! Charts as SVG: grouped bars with error bars, and stacked bars, in colours for colour-blind readers.

/// Colours of Okabe and Ito, without yellow, which is faint on white. Further series are hatched.
const COLOURS: [&str; 7] = [
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000",
];
const WIDTH: f64 = 1180.0;
const PLOT_HEIGHT: f64 = 300.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 40.0;
const NOTE_ROW: f64 = 15.0;
/// Maximum characters of a line of notes.
const NOTE_LENGTH: usize = 165;
const LEGEND_ROW: f64 = 22.0;
const LABEL_ROOM: f64 = 46.0;

/// A value with the range of its repetitions.
#[derive(Clone, Copy, Debug, Default)]
pub struct Point {
    /// Value to plot.
    pub value: f64,
    /// Smallest repetition.
    pub low: f64,
    /// Largest repetition.
    pub high: f64,
    /// Ratio to the value that the others are compared with. It is printed on the bar.
    pub ratio: Option<f64>,
}

/// Bars of one colour: one per group.
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// One point per group; `None` draws no bar.
    pub points: Vec<Option<Point>>,
}

/// A bar chart.
pub struct Chart {
    /// Title above the chart.
    pub title: String,
    /// Unit of the values.
    pub unit: String,
    /// Conditions of the measurement, below the title.
    pub notes: Vec<String>,
    /// Names of the groups of bars.
    pub groups: Vec<String>,
    /// Series of bars.
    pub series: Vec<Series>,
    /// Stack the series instead of drawing them side by side.
    pub stacked: bool,
    /// Logarithmic scale: each line is ten times the one below.
    pub logarithmic: bool,
}

/// Mapping of values to heights.
struct Scale {
    low: f64,
    top: f64,
    logarithmic: bool,
    /// Vertical position of the largest value.
    margin: f64,
}

impl Scale {
    fn y(&self, value: f64) -> f64 {
        let part = if self.logarithmic {
            let value = value.max(self.low);
            (value / self.low).ln() / (self.top / self.low).ln()
        } else {
            value / self.top
        };
        self.margin + PLOT_HEIGHT * (1.0 - part)
    }
}

/// Escapes text for HTML and SVG.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// Returns a step of 1, 2 or 5 times a power of ten, so that about five steps reach `top`.
fn step_for(top: f64) -> f64 {
    let rough = (top / 5.0).max(1e-12);
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .find(|f| f * power >= rough);
    factor.unwrap_or(10.0) * power
}

/// Formats a number with as many digits as necessary.
pub fn number(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 100.0 || v == 0.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

/// Breaks a text into lines of at most `longest` characters, at blanks.
pub fn broken(text: &str, longest: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let length = |text: &str| text.chars().count();
        if let Some(line) = lines.last_mut().filter(|line| !line.is_empty()) {
            if length(line) + 1 + length(word) <= longest {
                line.push(' ');
                line.push_str(word);
                continue;
            }
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            line.push_str(word);
        }
    }
    lines
}

impl Chart {
    /// Returns the lines of the notes.
    fn note_lines(&self) -> Vec<String> {
        let lines = self.notes.iter().flat_map(|note| broken(note, NOTE_LENGTH));
        lines.collect()
    }

    /// Returns the vertical position of the plot.
    fn margin(&self) -> f64 {
        TOP + NOTE_ROW * self.note_lines().len() as f64
    }

    fn top(&self) -> f64 {
        let highest = if self.stacked {
            (0..self.groups.len())
                .map(|group| {
                    let parts = self
                        .series
                        .iter()
                        .filter_map(|s| s.points.get(group).copied().flatten());
                    parts.map(|point| point.value).sum::<f64>()
                })
                .fold(0.0, f64::max)
        } else {
            let all = self
                .series
                .iter()
                .flat_map(|series| series.points.iter().flatten());
            all.map(|point| point.high.max(point.value))
                .fold(0.0, f64::max)
        };
        if highest > 0.0 { highest } else { 1.0 }
    }

    /// Returns the scale and the positions of its lines.
    fn scale(&self) -> (Scale, Vec<f64>) {
        if !self.logarithmic {
            let step = step_for(self.top());
            let count = (self.top() / step).ceil();
            let lines = (0..=count as usize)
                .map(|line| line as f64 * step)
                .collect();
            let scale = Scale {
                low: 0.0,
                top: count * step,
                logarithmic: false,
                margin: self.margin(),
            };
            return (scale, lines);
        }
        let points = self
            .series
            .iter()
            .flat_map(|series| series.points.iter().flatten());
        let least = points
            .map(|point| {
                if point.low > 0.0 {
                    point.low
                } else {
                    point.value
                }
            })
            .filter(|value| *value > 0.0)
            .fold(self.top(), f64::min);
        // Starts a decade below the smallest value, so that its bar is visible.
        let first = (least.log10().floor() - 1.0) as i32;
        let last = (self.top().log10().ceil() as i32).max(first + 1);
        let scale = Scale {
            low: 10f64.powi(first),
            top: 10f64.powi(last),
            logarithmic: true,
            margin: self.margin(),
        };
        (
            scale,
            (first..=last).map(|power| 10f64.powi(power)).collect(),
        )
    }

    /// Returns the values as rows of a table: a heading, then a row per series. Repeated values have their range.
    pub fn rows(&self) -> Vec<Vec<String>> {
        let groups = self.groups.iter().map(|group| group.replace('\n', ", "));
        let heading = std::iter::once(String::new()).chain(groups).collect();
        let cell = |point: &Option<Point>| match point {
            None => "-".to_owned(),
            Some(point) if point.high > point.low && !self.stacked => {
                let values = [point.value, point.low, point.high];
                let [value, low, high] = values.map(number);
                format!("{value} ({low} to {high})")
            }
            Some(point) => number(point.value),
        };
        let series = self.series.iter().map(|series| {
            let cells = series.points.iter().map(cell);
            std::iter::once(series.name.clone()).chain(cells).collect()
        });
        std::iter::once(heading).chain(series).collect()
    }

    /// Returns the fill of a series. After the last colour, the colours repeat with a hatch.
    fn fill(index: usize) -> String {
        if index < COLOURS.len() {
            COLOURS[index].to_owned()
        } else {
            format!("url(#hatch{})", index % COLOURS.len())
        }
    }

    /// Returns the chart as a self-contained SVG.
    pub fn svg(&self) -> String {
        let (scale, lines) = self.scale();
        let columns = 3;
        let rows = self.series.len().div_ceil(columns) as f64;
        let height = scale.margin + PLOT_HEIGHT + LABEL_ROOM + rows * LEGEND_ROW + 8.0;
        let y = |value: f64| scale.y(value);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
             font-family=\"DejaVu Sans, Verdana, sans-serif\" font-size=\"12\" role=\"img\" aria-label=\"{}\">\n<defs>\n",
            escape(&self.title)
        );
        for (colour, index) in COLOURS.iter().zip(0..) {
            svg.push_str(&format!(
                "<pattern id=\"hatch{index}\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
                 <rect width=\"6\" height=\"6\" fill=\"#fff\"/><rect width=\"3\" height=\"6\" fill=\"{colour}\"/></pattern>\n"
            ));
        }
        svg.push_str(&format!(
            "</defs>\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n\
             <text x=\"{LEFT}\" y=\"22\" font-size=\"16\" font-weight=\"bold\">{}</text>\n\
             <text x=\"{}\" y=\"22\" text-anchor=\"end\" fill=\"#444\">{}</text>\n",
            escape(&self.title),
            WIDTH - 10.0,
            escape(&self.unit)
        ));
        for (line, row) in self.note_lines().iter().zip(0..) {
            svg.push_str(&format!(
                "<text x=\"{LEFT}\" y=\"{:.1}\" font-size=\"11\" fill=\"#444\">{}</text>\n",
                TOP + NOTE_ROW * f64::from(row),
                escape(line)
            ));
        }
        for (value, line) in lines.into_iter().zip(0..) {
            svg.push_str(&format!(
                "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"{}\"/>\n\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
                WIDTH - 10.0,
                y(value),
                y(value),
                if line == 0 { "#444" } else { "#ddd" },
                LEFT - 8.0,
                y(value) + 4.0,
                number(value)
            ));
        }
        self.bars(&mut svg, &y, scale.margin);
        self.legend(&mut svg, columns, scale.margin);
        svg.push_str("</svg>\n");
        svg
    }

    fn bars(&self, svg: &mut String, y: &impl Fn(f64) -> f64, margin: f64) {
        let room = (WIDTH - LEFT - 10.0) / self.groups.len().max(1) as f64;
        let side_by_side = if self.stacked { 1 } else { self.series.len() };
        let bar = (room * 0.84 / side_by_side.max(1) as f64).min(48.0);
        let base = y(0.0);
        for (group, index) in self.groups.iter().zip(0..) {
            let middle = LEFT + room * (index as f64 + 0.5);
            let first = middle - bar * side_by_side as f64 / 2.0;
            let mut below = 0.0;
            for (series, at) in self.series.iter().zip(0..) {
                let Some(point) = series.points.get(index).copied().flatten() else {
                    continue;
                };
                let (x, from) = if self.stacked {
                    (first, below)
                } else {
                    (first + bar * at as f64, 0.0)
                };
                let (upper, lower) = (
                    y(from + point.value),
                    if self.stacked { y(from) } else { base },
                );
                // A rectangle of height 0 is invalid for the renderer.
                if lower - upper >= 0.05 {
                    svg.push_str(&format!(
                        "<rect x=\"{x:.1}\" y=\"{upper:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\" stroke=\"#fff\" stroke-width=\"0.5\">\
                         <title>{}, {}: {} {}</title></rect>\n",
                        bar,
                        lower - upper,
                        Chart::fill(at),
                        escape(&series.name),
                        escape(group),
                        number(point.value),
                        escape(&self.unit)
                    ));
                }
                if !self.stacked && point.high > point.low {
                    let x = x + bar / 2.0;
                    let path = format!(
                        "M{x:.1} {:.1}V{:.1}M{:.1} {:.1}h{:.1}M{:.1} {:.1}h{:.1}",
                        y(point.low),
                        y(point.high),
                        x - bar * 0.25,
                        y(point.low),
                        bar * 0.5,
                        x - bar * 0.25,
                        y(point.high),
                        bar * 0.5
                    );
                    // A light line below the dark one is visible on every colour.
                    for (stroke, width) in [("#fff", 3), ("#222", 1)] {
                        svg.push_str(&format!(
                            "<path d=\"{path}\" stroke=\"{stroke}\" stroke-width=\"{width}\" fill=\"none\"/>\n"
                        ));
                    }
                }
                if let Some(ratio) = point.ratio {
                    let top = y(point.value.max(if self.stacked { 0.0 } else { point.high }));
                    svg.push_str(&format!(
                        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"11\">{} %</text>\n",
                        x + bar / 2.0,
                        top - 4.0,
                        number((ratio * 100.0).round())
                    ));
                }
                below += point.value;
            }
            for (line, row) in group.split('\n').zip(0..) {
                svg.push_str(&format!(
                    "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"11\">{}</text>\n",
                    margin + PLOT_HEIGHT + 16.0 + f64::from(row) * 13.0,
                    escape(line)
                ));
            }
        }
    }

    fn legend(&self, svg: &mut String, columns: usize, margin: f64) {
        let width = (WIDTH - LEFT) / columns as f64;
        for (series, index) in self.series.iter().zip(0usize..) {
            let x = LEFT + width * (index % columns) as f64;
            let y = margin + PLOT_HEIGHT + LABEL_ROOM + LEGEND_ROW * (index / columns) as f64;
            svg.push_str(&format!(
                "<rect x=\"{x}\" y=\"{y}\" width=\"14\" height=\"14\" fill=\"{}\" stroke=\"#444\"/>\
                 <text x=\"{}\" y=\"{}\">{}</text>\n",
                Chart::fill(index),
                x + 20.0,
                y + 12.0,
                escape(&series.name)
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round_and_numbers_short() {
        assert_eq!(step_for(100.0), 20.0);
        assert_eq!(step_for(7.0), 2.0);
        assert!((step_for(0.3) - 0.1).abs() < 1e-12);
        for (value, text) in [
            (1234.0, "1234"),
            (12.5, "12.5"),
            (2.0, "2"),
            (0.25, "0.25"),
            (0.0, "0"),
        ] {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn a_picture_without_values_is_still_one() {
        let chart = Chart {
            title: "a <b>".to_owned(),
            unit: "x".to_owned(),
            notes: Vec::new(),
            groups: vec!["g".to_owned()],
            series: vec![Series {
                name: "s".to_owned(),
                points: vec![None],
            }],
            stacked: false,
            logarithmic: false,
        };
        let svg = chart.svg();
        assert!(svg.contains("a &lt;b&gt;") && !svg.contains("NaN") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn notes_are_below_the_title_and_ratios_on_the_bars() {
        let long = "word ".repeat(60);
        let chart = Chart {
            title: "t".to_owned(),
            unit: "IOPS".to_owned(),
            notes: vec!["TCG, 4 turns".to_owned(), long.trim().to_owned()],
            groups: vec!["g".to_owned()],
            series: vec![Series {
                name: "s".to_owned(),
                points: vec![Some(Point {
                    value: 5.0,
                    low: 4.0,
                    high: 6.0,
                    ratio: Some(0.974),
                })],
            }],
            stacked: false,
            logarithmic: false,
        };
        let svg = chart.svg();
        assert!(svg.contains(">TCG, 4 turns</text>") && svg.contains(">97 %</text>"));
        // 299 characters need two lines, and the plot begins below three lines.
        assert_eq!(chart.note_lines().len(), 3);
        assert_eq!(chart.margin(), 85.0);
        assert!(
            chart
                .note_lines()
                .iter()
                .all(|line| line.len() <= NOTE_LENGTH)
        );
    }

    #[test]
    fn a_step_that_took_no_time_is_no_rectangle_without_height() {
        let series = |name: &str, value| Series {
            name: name.to_owned(),
            points: vec![Some(Point {
                value,
                low: value,
                high: value,
                ratio: None,
            })],
        };
        for stacked in [true, false] {
            let svg = Chart {
                title: String::new(),
                unit: "us".to_owned(),
                notes: Vec::new(),
                groups: vec!["g".to_owned()],
                series: vec![series("reaped", 5.0), series("notified", 0.0)],
                stacked,
                logarithmic: false,
            }
            .svg();
            assert!(svg.contains("reaped, g: 5") && !svg.contains("height=\"0.0\""));
        }
    }
}

//! Draws layers as bars below each other, with their mean as length.

use std::fmt::Write;

use bench::chart::{broken, escape};

use super::Study;

const WIDTH: f64 = 900.0;
const LEFT: f64 = 250.0;
const RIGHT: f64 = 110.0;
const ROW: f64 = 24.0;
const NOTE_ROW: f64 = 15.0;
/// Maximum characters of a line of notes.
const NOTE_LENGTH: usize = 150;
/// Distinguishable with colour vision deficiencies; parts are grey.
const COLOUR: &str = "#0072B2";
const PART: &str = "#999999";

/// Draws all studies below each other, after the conditions of the measurement.
pub fn svg(studies: &[Study], notes: &[String]) -> String {
    let notes: Vec<String> = notes
        .iter()
        .flat_map(|note| broken(note, NOTE_LENGTH))
        .collect();
    let rows: usize = studies.iter().map(|study| study.layers.len() + 2).sum();
    let height = rows as f64 * ROW + ROW + (notes.len() as f64 + 0.5) * NOTE_ROW;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    // One scale for all studies.
    let layers = studies.iter().flat_map(|study| &study.layers);
    let means = layers.filter_map(|layer| layer.found.as_ref().ok());
    let longest = means.map(|found| found.mean_ns).fold(1.0, f64::max);
    let mut y = ROW;
    for note in &notes {
        let words = format!("<tspan font-size=\"11\">{}</tspan>", escape(note));
        text(&mut svg, 10.0, y, "start", &words);
        y += NOTE_ROW;
    }
    y += NOTE_ROW / 2.0;
    for study in studies {
        text(
            &mut svg,
            10.0,
            y,
            "start",
            &format!(
                "<tspan font-weight=\"bold\">{}</tspan>",
                escape(&study.title)
            ),
        );
        y += ROW;
        for layer in &study.layers {
            text(&mut svg, LEFT - 8.0, y, "end", &escape(layer.name.trim()));
            match &layer.found {
                Ok(found) => {
                    let mean = found.mean_ns;
                    let width = mean / longest * (WIDTH - LEFT - RIGHT);
                    let (colour, inset) = if layer.is_part {
                        (PART, 5.0)
                    } else {
                        (COLOUR, 2.0)
                    };
                    let (top, tall) = (y - 16.0 + inset, 20.0 - 2.0 * inset);
                    writeln!(svg, "<rect x=\"{LEFT}\" y=\"{top}\" width=\"{width:.1}\" height=\"{tall}\" fill=\"{colour}\"/>").unwrap_or(());
                    text(
                        &mut svg,
                        LEFT + width + 6.0,
                        y,
                        "start",
                        &format!("{:.1} us", mean / 1e3),
                    );
                }
                Err(_) => text(&mut svg, LEFT, y, "start", "-"),
            }
            y += ROW;
        }
        y += ROW;
    }
    svg + "</svg>\n"
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, words: &str) {
    writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"#222222\">{words}</text>"
    )
    .unwrap_or(());
}

#[cfg(test)]
mod tests {
    use super::super::Layer;
    use super::*;

    #[test]
    fn layers_are_bars_as_long_as_their_means() {
        let layer = |name: &str, found: Result<f64, String>| Layer {
            name: name.to_owned(),
            found: found.map(|mean| super::super::all_seen(mean, 5)),
            control_ns: None,
            is_part: false,
            load: bench::run::Disturbance::default(),
        };
        let study = |title: &str, layers| Study {
            title: title.to_owned(),
            plain_ns: Vec::new(),
            layers,
            matched: super::super::results::MatchedRequests::default(),
        };
        let layers = vec![
            layer("one", Ok(200_000.0)),
            layer("none", Err("why".to_owned())),
        ];
        // Both studies have one scale.
        let studies = [
            study("a < b", layers),
            study("c", vec![layer("two", Ok(100_000.0))]),
        ];
        let svg = svg(&studies, &["TCG, 5 turns".to_owned()]);
        assert!(svg.contains(">TCG, 5 turns</tspan>"), "{svg}");
        assert!(
            svg.contains("width=\"540.0\"") && svg.contains("width=\"270.0\""),
            "{svg}"
        );
        assert!(svg.contains("a &lt; b") && svg.contains("100.0 us"));
    }
}

//! The study as a self-contained page, and its charts as files.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::advice::advice;
use super::study::{Configuration, Record, Study};
use super::{DEPTHS, MIXTURES};
use crate::chart::{Chart, Point, Series, number};
use crate::picture::Painter;
use crate::run::spread;

/// Returns the configurations in display order.
fn configurations(study: &Study) -> Vec<Configuration> {
    let mut list: Vec<Configuration> = study
        .records
        .iter()
        .map(|r| r.configuration.clone())
        .collect();
    list.sort();
    list.dedup();
    list
}

fn point(
    study: &Study,
    configuration: &Configuration,
    case: (&str, u16),
    of: &impl Fn(&Record) -> f64,
) -> Option<Point> {
    let same = study.records.iter().filter(|record| {
        record.configuration == *configuration && record.mixture == case.0 && record.depth == case.1
    });
    let values: Vec<f64> = same.map(of).collect();
    if values.is_empty() {
        return None;
    }
    let values = spread(&values);
    Some(Point {
        value: values.median,
        low: values.min,
        high: values.max,
    })
}

/// Returns all cases as groups: name and key.
fn cases() -> Vec<(String, (&'static str, u16))> {
    let each = MIXTURES.iter().flat_map(|(name, _, _)| {
        DEPTHS.map(|depth| (format!("{name}\nQD{depth}"), (*name, depth)))
    });
    each.collect()
}

fn by_case(study: &Study, title: &str, unit: &str, of: impl Fn(&Record) -> f64) -> Chart {
    let cases = cases();
    let series = configurations(study)
        .into_iter()
        .map(|configuration| Series {
            name: configuration.name(),
            points: cases
                .iter()
                .map(|(_, case)| point(study, &configuration, *case, &of))
                .collect(),
        });
    Chart {
        title: title.to_owned(),
        unit: unit.to_owned(),
        series: series.collect(),
        groups: cases.into_iter().map(|(name, _)| name).collect(),
        stacked: false,
        logarithmic: false,
    }
}

/// Creates the chart of latency percentiles of random reads, by depth.
fn percentiles(study: &Study) -> Chart {
    let names = ["p50", "p99", "p99.9"];
    let groups = DEPTHS
        .iter()
        .flat_map(|depth| names.map(|name| format!("{name}\nQD{depth}")));
    let series = configurations(study)
        .into_iter()
        .map(|configuration| Series {
            name: configuration.name(),
            points: DEPTHS
                .iter()
                .flat_map(|depth| {
                    let of = |index: usize| {
                        let value = move |record: &Record| record.latency_ns[index] / 1e3;
                        point(study, &configuration, ("randread", *depth), &value)
                    };
                    [of(1), of(2), of(3)]
                })
                .collect(),
        });
    Chart {
        title: "Latency percentiles of random reads by depth".to_owned(),
        unit: "microseconds, logarithmic".to_owned(),
        groups: groups.collect(),
        series: series.collect(),
        stacked: false,
        logarithmic: true,
    }
}

/// Creates the stacked chart of the device's steps for random reads at the middle depth.
fn steps(study: &Study) -> Chart {
    let configurations = configurations(study);
    let first = study
        .records
        .iter()
        .find(|record| !record.steps_ns.is_empty());
    let names: Vec<String> = first.map_or(Vec::new(), |record| {
        record
            .steps_ns
            .iter()
            .map(|(name, _)| name.clone())
            .collect()
    });
    let series = names.into_iter().map(|name| Series {
        points: configurations
            .iter()
            .map(|configuration| {
                let of = |record: &Record| {
                    let step = record.steps_ns.iter().find(|(step, _)| *step == name);
                    step.map_or(0.0, |(_, ns)| ns / 1e3)
                };
                point(study, configuration, ("randread", DEPTHS[1]), &of)
            })
            .collect(),
        name,
    });
    Chart {
        title: format!(
            "Time of a random read in the device by stage, QD{}",
            DEPTHS[1]
        ),
        unit: "microseconds, mean".to_owned(),
        groups: configurations
            .iter()
            .map(|configuration| configuration.name().replacen(", ", "\n", 1))
            .collect(),
        series: series.collect(),
        stacked: true,
        logarithmic: false,
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

fn table(chart: &Chart) -> String {
    let mut html = "<details open><summary>Table</summary><table><tr><th></th>".to_owned();
    for group in &chart.groups {
        html.push_str(&format!("<th>{}</th>", escape(&group.replace('\n', " "))));
    }
    html.push_str("</tr>\n");
    for series in &chart.series {
        html.push_str(&format!("<tr><th>{}</th>", escape(&series.name)));
        for point in &series.points {
            match point {
                Some(point) if point.high > point.low && !chart.stacked => html.push_str(&format!(
                    "<td>{}<br><small>{} to {}</small></td>",
                    number(point.value),
                    number(point.low),
                    number(point.high)
                )),
                Some(point) => html.push_str(&format!("<td>{}</td>", number(point.value))),
                None => html.push_str("<td>-</td>"),
            }
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</table></details>\n");
    html
}

const STYLE: &str = "body{font-family:DejaVu Sans,Verdana,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#111;background:#fff}\
svg{max-width:100%;height:auto}table{border-collapse:collapse;font-size:12px;margin:.5em 0 1em}\
th,td{border:1px solid #bbb;padding:.2em .5em;text-align:right}th{background:#f2f2f2}\
tr>th:first-child{text-align:left;white-space:nowrap}details{overflow-x:auto;margin-bottom:2em}summary{cursor:pointer}small{color:#555}li{margin:.3em 0}";

/// Writes the page, and each chart as SVG and PNG next to it. Returns all paths.
pub fn report(study: &Study, page: &Path) -> Result<Vec<PathBuf>> {
    let charts = charts(study);
    let mut html = head(study);
    let painter = Painter::new();
    let folder = page.parent().unwrap_or(Path::new("."));
    let mut written = vec![page.to_owned()];
    for (name, chart) in &charts {
        let svg = chart.svg();
        // Identifiers within one page must be unique.
        let inline = svg.replace("hatch", &format!("{name}-hatch"));
        html.push_str(&format!(
            "<h2>{}</h2>\n{inline}{}",
            escape(&chart.title),
            table(chart)
        ));
        let files = [
            ("svg", svg.clone().into_bytes()),
            ("png", painter.png(&svg)?),
        ];
        for (extension, bytes) in files {
            let path = folder.join(format!("{name}.{extension}"));
            std::fs::write(&path, bytes)
                .with_context(|| format!("cannot write {}", path.display()))?;
            written.push(path);
        }
    }
    html.push_str("</body></html>\n");
    std::fs::write(page, html).with_context(|| format!("cannot write {}", page.display()))?;
    Ok(written)
}

fn charts(study: &Study) -> [(&'static str, Chart); 6] {
    [
        (
            "read-bandwidth",
            by_case(study, "Combined read bandwidth", "MB/s", |r| {
                r.read_bandwidth / 1e6
            }),
        ),
        (
            "write-bandwidth",
            by_case(study, "Combined write bandwidth", "MB/s", |r| {
                r.write_bandwidth / 1e6
            }),
        ),
        (
            "iops",
            by_case(
                study,
                "Combined I/Os per second",
                "thousands per second",
                |r| r.iops() / 1e3,
            ),
        ),
        ("latency", percentiles(study)),
        (
            "cpu",
            by_case(study, "CPU of the device per I/O", "microseconds", |r| {
                r.device_cpu_us
            }),
        ),
        ("stages", steps(study)),
    ]
}

/// Formats the head of the page: environment and advice.
fn head(study: &Study) -> String {
    let environment = &study.environment;
    let turns = study
        .records
        .iter()
        .map(|record| record.turn)
        .max()
        .unwrap_or(0);
    let mut html = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Lunette: which transport, how many workers and queues</title>\
         <style>{STYLE}</style></head><body>\n<h1>Which transport, how many workers and queues</h1>\n\
         <p>{} concurrent RAM disks, 4 KiB requests, {} turns of {} ms, driver {}. 75/25: 75 % reads, 25 % writes; QD: requests in flight \
         of each disk and queue. Bars are medians, lines extend from the minimum to the maximum of the turns.<br>{}, {} CPUs {}, lunette {}.</p>\n<h2>Advice</h2>\n<ul>\n",
        study.disks,
        turns,
        study.turn_ms,
        if study.polling {
            "polling"
        } else {
            "waiting for interrupts"
        },
        escape(&environment.kernel),
        environment.cpus,
        escape(&environment.cpu),
        escape(&environment.build()),
    );
    for sentence in advice(study) {
        html.push_str(&format!("<li>{}</li>\n", escape(&sentence)));
    }
    html.push_str("</ul>\n");
    html
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Environment;

    fn study() -> Study {
        let mut records = Vec::new();
        for transport in ["blk", "scsi"] {
            for (mixture, _, _) in MIXTURES {
                for (depth, turn) in DEPTHS.iter().flat_map(|depth| [(*depth, 1), (*depth, 2)]) {
                    records.push(Record {
                        configuration: Configuration {
                            transport: transport.to_owned(),
                            workers: 1,
                            queues: 1,
                        },
                        mixture: mixture.to_owned(),
                        depth,
                        turn,
                        read_iops: 1000.0 * f64::from(depth),
                        write_iops: 500.0 * f64::from(turn),
                        read_bandwidth: 4e6,
                        write_bandwidth: 2e6,
                        latency_ns: [5e3, 4e3, 9e3, 2e4],
                        device_cpu_us: 1.5,
                        steps_ns: vec![("popped".to_owned(), 100.0), ("reaped".to_owned(), 900.0)],
                        disturbed: false,
                    });
                }
            }
        }
        Study {
            environment: Environment {
                cpu: "<script src=http://evil>".to_owned(),
                ..Environment::default()
            },
            disks: 2,
            turn_ms: 10,
            polling: false,
            records,
            polls: Vec::new(),
            planned: 0,
        }
    }

    #[test]
    fn the_page_needs_nothing_from_outside_and_each_picture_is_a_file_too() {
        let folder = tempfile::tempdir().unwrap();
        let page = folder.path().join("index.html");
        let written = report(&study(), &page).unwrap();
        assert_eq!(written.len(), 13);
        let html = std::fs::read_to_string(&page).unwrap();
        assert_eq!(html.matches("<svg").count(), 6);
        // A namespace URL is not fetched.
        let html = html.replace("http://www.w3.org/2000/svg", "");
        for outside in [
            "://", "<script", "<link", "<img", "<iframe", "@import", "src=\"",
        ] {
            let found = html.replace("&lt;script src=http://evil&gt;", "");
            assert!(!found.contains(outside), "{outside}");
        }
        // Only links within the page: each pattern has its own ID.
        for link in html.split("url(").skip(1) {
            assert!(link.starts_with('#'), "{}", &link[..20.min(link.len())]);
        }
        for path in &written[1..] {
            let bytes = std::fs::read(path).unwrap();
            let begins: &[u8] = match path.extension().and_then(|e| e.to_str()) {
                Some("png") => b"\x89PNG\r\n\x1a\n",
                _ => b"<svg",
            };
            assert!(bytes.starts_with(begins), "{}", path.display());
        }
    }
}

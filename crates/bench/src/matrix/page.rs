//! The study as a self-contained page, and its charts as files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::study::{Configuration, Record, Study};
use super::{DEPTHS, MIXTURES, case_name, polling};
use crate::chart::{Chart, Series};
use crate::picture::Painter;
use crate::run::spread;
use crate::study::{self, METHOD, Page, Report, Run, Variant, draw, write_file};

/// Writes the page, and each chart as SVG and PNG next to it. Returns all paths.
pub fn report(study: &Study, page: &Path) -> Result<Vec<PathBuf>> {
    let records = study.records.iter();
    let mut configurations: Vec<&Configuration> = records.map(|r| &r.configuration).collect();
    configurations.sort();
    configurations.dedup();
    let variants: Vec<Variant> = configurations
        .into_iter()
        .map(Configuration::variant)
        .collect();
    let cases = MIXTURES
        .iter()
        .flat_map(|(mixture, ..)| DEPTHS.map(|depth| case_name(mixture, depth)));
    let report = Report {
        runs: &study.records,
        variants: variants.iter().collect(),
        cases: cases.collect(),
        notes: vec![about(study), study.header.environment.provenance()],
    };
    let mut contents = Page {
        title: "Which transport, how many workers and queues".to_owned(),
        about: report
            .notes
            .iter()
            .cloned()
            .chain([format!("Conclusions: {METHOD}.")])
            .collect(),
        advice: advice(study, &report),
        ..Page::default()
    };
    let folder = page.parent().unwrap_or(Path::new("."));
    let painter = Painter::new();
    let mut pictures = Vec::new();
    for (name, chart) in charts(&report) {
        contents.add_chart(name, &chart);
        contents.tables.push((chart.title.clone(), chart.rows()));
        pictures.extend(draw(&chart, folder, name, &painter)?);
    }
    let name = page.file_name().unwrap_or_default().to_string_lossy();
    let mut written = vec![write_file(folder, &name, contents.html().as_bytes())?];
    written.extend(pictures);
    Ok(written)
}

fn about(study: &Study) -> String {
    let header = &study.header;
    let turns = study.records.iter().map(|record| record.turn).max();
    format!(
        "{} concurrent RAM disks, 4 KiB requests, {} turns of {} ms, driver {}. 75/25: 75 % reads, 25 % writes; depth: requests in flight \
         of each disk and queue. Bars are medians, lines extend from the minimum to the maximum of the turns.",
        header.disks,
        turns.unwrap_or(0),
        header.turn_ms,
        if header.polling {
            "polling"
        } else {
            "waiting for interrupts"
        }
    )
}

fn charts(report: &Report<'_, Record>) -> [(&'static str, Chart); 6] {
    let bar = |title: &str, unit: &str, value: fn(&Record) -> f64| report.chart(title, unit, value);
    [
        (
            "read-bandwidth",
            bar("Combined read bandwidth", "MB/s", |r| {
                r.read_bandwidth / 1e6
            }),
        ),
        (
            "write-bandwidth",
            bar("Combined write bandwidth", "MB/s", |r| {
                r.write_bandwidth / 1e6
            }),
        ),
        (
            "iops",
            bar("Combined I/Os per second", "thousands per second", |r| {
                (r.read_iops + r.write_iops) / 1e3
            }),
        ),
        ("latency", percentiles(report)),
        (
            "cpu",
            bar("CPU of the device per I/O", "microseconds", |r| {
                r.device_cpu_us
            }),
        ),
        ("stages", stages(report)),
    ]
}

/// Creates the chart of latency percentiles of random reads, by depth.
fn percentiles(report: &Report<'_, Record>) -> Chart {
    let names = ["p50", "p99", "p99.9"];
    let groups = DEPTHS.map(|depth| names.map(|name| format!("{name}\ndepth {depth}")));
    let series = report.variants.iter().map(|variant| {
        let points = DEPTHS.iter().flat_map(|depth| {
            [1, 2, 3].map(|index| {
                let value = |record: &Record| record.latency_ns[index] / 1e3;
                report.point(&variant.name, &case_name("randread", depth), value)
            })
        });
        Series {
            name: variant.name.clone(),
            points: points.collect(),
        }
    });
    Chart {
        title: "Latency percentiles of random reads by depth".to_owned(),
        unit: "microseconds, logarithmic".to_owned(),
        notes: report.notes.clone(),
        groups: groups.concat(),
        series: series.collect(),
        stacked: false,
        logarithmic: true,
    }
}

/// Creates the stacked chart of the device's stages for random reads at the middle depth.
fn stages(report: &Report<'_, Record>) -> Chart {
    let mut records = report.runs.iter().map(|record| &record.steps_ns);
    let stages = records.find(|stages| !stages.is_empty());
    let case = case_name("randread", DEPTHS[1]);
    let series = stages.into_iter().flatten().map(|(name, _)| {
        let value = |record: &Record| {
            let stage = record.steps_ns.iter().find(|(stage, _)| stage == name);
            stage.map_or(0.0, |(_, ns)| ns / 1e3)
        };
        let variants = report.variants.iter();
        Series {
            name: name.clone(),
            points: variants
                .map(|variant| report.point(&variant.name, &case, value))
                .collect(),
        }
    });
    let variants = report.variants.iter();
    Chart {
        title: format!(
            "Time of a random read in the device by stage, depth {}",
            DEPTHS[1]
        ),
        unit: "microseconds, mean".to_owned(),
        notes: report.notes.clone(),
        groups: variants
            .map(|variant| variant.name.replacen(", ", "\n", 1))
            .collect(),
        series: series.collect(),
        stacked: true,
        logarithmic: false,
    }
}

/// Returns sentences, the most important first.
fn advice(study: &Study, report: &Report<'_, Record>) -> Vec<String> {
    let mut sentences = Vec::new();
    if study.records.len() < study.planned {
        sentences.push(format!(
            "The study was interrupted after {} of {} runs: the results are those of its complete turns. The same command continues it.",
            study.records.len(),
            study.planned
        ));
    }
    sentences.extend(study::advice(report));
    let costs = report.variants.iter().filter_map(|variant| {
        let cost = report.mean(&[*variant], |record| Some(record.device_cpu_us))?;
        Some((&variant.name, cost))
    });
    if let Some((name, cost)) = costs.min_by(|a, b| a.1.total_cmp(&b.1)) {
        sentences.push(format!("Least CPU per I/O: {name}, {cost:.2} us."));
    }
    sentences.extend(polling::advice(&study.polls));
    sentences.extend(outside(study));
    let runs = study.records.iter().map(|record| record as &dyn Run);
    let polls = study.polls.iter().map(|record| record as &dyn Run);
    sentences.extend(study::cautions(runs.chain(polls)));
    sentences
}

/// Describes the part of the latency outside the device.
fn outside(study: &Study) -> Option<String> {
    let how = if study.header.polling {
        "polled"
    } else {
        "waited for interrupts"
    };
    // Per turn: total time of requests, and time inside the device.
    let mut turns: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
    for record in study.records.iter().filter(|record| record.depth == 1) {
        let device: f64 = record.steps_ns.iter().map(|(_, ns)| ns).sum();
        if device > 0.0 {
            let turn = turns.entry(record.turn).or_default();
            turn.0 += record.latency_ns[0];
            turn.1 += device;
        }
    }
    let share = |(seen, inside): &(f64, f64)| 100.0 * (1.0 - (inside / seen).min(1.0));
    let shares: Vec<f64> = turns.values().filter(|t| t.0 > 0.0).map(share).collect();
    let over = spread(&shares);
    let sure = match shares.len() {
        0 => return None,
        1..=2 => "too few turns to be sure".to_owned(),
        count => format!("{:.0} to {:.0} % over {count} turns", over.min, over.max),
    };
    Some(format!(
        "The driver {how}: at depth 1, {:.0} % of a request's time passed outside of the device, in kicks, interrupts and waking up \
         ({sure}).",
        over.median
    ))
}

#[cfg(test)]
mod tests {
    use super::super::Header;
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
            header: Header {
                environment: Environment {
                    cpu: "<script src=http://evil>".to_owned(),
                    ..Environment::default()
                },
                disks: 2,
                turn_ms: 10,
                polling: false,
            },
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
        assert_eq!(html.matches("<table").count(), 6);
        assert!(html.contains("Conclusions: paired t-test"));
        assert!(html.contains("Least CPU per I/O: blk, 1 worker, 1 queue, 1.50 us."));
        let html = html.replace("&lt;script src=http://evil&gt;", "");
        assert!(!html.contains("evil") && !html.contains("<script"));
        for path in written {
            assert!(path.exists(), "{}", path.display());
        }
    }
}

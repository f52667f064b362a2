//! Measures the layers of a disk of a guest, each in a run of its own.

use std::cell::RefCell;

use anyhow::{Context, Result};
use bench::run::{Disturbance, allowed_retries};
use bench::study::Progress;
use cli_common::print_line;
use latency::Snapshot;

use super::host_kvm::HostTrace;
use super::instruments::{BLOCK, DRIVER, Instrument, SCSI, VIRTIO_PCI, all_of};
use super::qemu_trace::QemuTrace;
use super::results::{Layer, MatchedRequests, Study};
use super::trace::{Point, parts, spans};
use super::{Device, LatencyArguments, all_seen, application, seen};
use crate::vm::study::guest::StudyGuest;
use crate::vm::study::{Case, DiskRoute, quietly};

/// Runs of the application without instruments. Their spread is that of the layers' runs.
const PLAIN_RUNS: u32 = 3;
/// Maximum number of repetitions of a run, if its control differs from the runs without instruments.
const RETRIES: u32 = 1;

/// Measurement of a disk with one pattern.
pub struct Measuring<'a> {
    pub arguments: &'a LatencyArguments,
    pub qemu: Option<&'a QemuTrace>,
    pub guest: &'a StudyGuest,
    pub disk: &'a str,
    /// Name of the disk in the daemon.
    pub served: String,
    pub case: Case,
    pub progress: &'a RefCell<Progress>,
}

fn is_scsi(way: &DiskRoute) -> bool {
    way.variant.name == "virtio-scsi"
}

/// Instruments of the layers of a guest.
fn instruments(is_scsi: bool) -> &'static [Instrument] {
    match is_scsi {
        true => &[BLOCK, DRIVER, SCSI, VIRTIO_PCI],
        false => &[BLOCK, DRIVER, VIRTIO_PCI],
    }
}

impl Measuring<'_> {
    fn run(&self) -> Result<(f64, usize)> {
        let milliseconds = (self.arguments.time * 1e3) as u64;
        let job = self.case.job(&[self.disk.to_owned()], milliseconds, true);
        let document = self.guest.run(&job)?;
        application(&document, &self.case.pattern).map_err(anyhow::Error::msg)
    }

    pub fn empty_study(&self, way: &DiskRoute) -> Study {
        Study {
            title: format!(
                "{}, {}, 4 KiB, one in flight",
                way.variant.name, self.case.pattern
            ),
            plain_ns: Vec::new(),
            layers: Vec::new(),
            matched: MatchedRequests::default(),
        }
    }

    /// Number of runs of all patterns on all disks of a guest.
    pub fn runs_of(arguments: &LatencyArguments, ways: &[DiskRoute]) -> u32 {
        let runs = ways
            .iter()
            .map(|way| Measuring::runs(arguments, is_scsi(way)));
        arguments.rw.len() as u32 * runs.sum::<u32>()
    }

    /// Number of runs of a disk with one pattern.
    fn runs(arguments: &LatencyArguments, is_scsi: bool) -> u32 {
        let warm_up = 1;
        // KVM, and the block layers and drivers of the guest.
        let layers = 1 + instruments(is_scsi).len() as u32;
        let device = u32::from(arguments.device != Device::Lunette);
        let matched = 1;
        let host = u32::from(arguments.delay.is_none());
        warm_up + PLAIN_RUNS + layers + device + matched + host
    }

    /// Measures all layers. After an error the study has those that were measured before.
    pub fn measure(&self, study: &mut Study, way: &DiskRoute) -> Result<()> {
        let is_scsi = is_scsi(way);
        // Warm-up.
        self.run()?;
        let name = "Guest application";
        let measure = || -> Result<_> {
            let before = self.device()?;
            let runs = (0..PLAIN_RUNS)
                .map(|_| self.run())
                .collect::<Result<Vec<_>>>()?;
            Ok((before, runs, self.device()?))
        };
        let ((before, runs, after), load) = quietly(name, self.guest, measure)?;
        study.plain_ns = runs.iter().map(|(mean, _)| *mean).collect();
        let ios: usize = runs.iter().map(|(_, ios)| ios).sum();
        let sum: f64 = runs.iter().map(|(mean, ios)| mean * *ios as f64).sum();
        let whole = sum / ios as f64;
        study.layers.push(Layer {
            name: name.to_owned(),
            found: Ok(all_seen(whole, ios)),
            control_ns: None,
            is_part: false,
            load,
        });
        self.count(name, PLAIN_RUNS + 1);
        for instrument in instruments(is_scsi) {
            self.add(study, instrument.name, || Ok(vec![self.layer(instrument)?]))?;
        }
        self.add(study, "Host kvm", || Ok(vec![self.host_kvm()?]))?;
        match self.arguments.device {
            Device::Lunette => study.layers.extend(self.of_device(before, after, whole)),
            Device::Qemu | Device::QemuIothread => self.add(study, "Device", || self.of_qemu())?,
        }
        let (instrument, points) = all_of(is_scsi);
        let measure = || self.matched(&instrument, &points);
        let (mut matched, load) = quietly("matched requests", self.guest, measure)?;
        matched.load = load;
        self.count("matched requests", 1);
        study.matched = matched;
        Ok(())
    }

    /// Adds layers of a run. The run is repeated if other load disturbs it, or if the application's latency in it is outside of the spread
    /// of the runs without instruments.
    fn add(
        &self,
        study: &mut Study,
        name: &str,
        measure: impl Fn() -> Result<Vec<Layer>>,
    ) -> Result<()> {
        let control = |layers: &[Layer]| layers.first().and_then(|layer| layer.control_ns);
        let (mut layers, mut load) = quietly(name, self.guest, &measure)?;
        for _ in 0..allowed_retries(RETRIES) {
            let apart = study.apart_ns(control(&layers));
            if apart == 0.0 || vm::interrupted() {
                break;
            }
            print_line(&format_args!(
                "{name}: the application's latency is {:.0} us beyond the spread of the runs without instruments; repeated",
                apart / 1e3
            ));
            let (again, load_again) = quietly(name, self.guest, &measure)?;
            if study.apart_ns(control(&again)) < apart {
                (layers, load) = (again, load_again);
            }
        }
        self.count(name, 1);
        let layers = layers.into_iter().map(|layer| Layer { load, ..layer });
        study.layers.extend(layers);
        Ok(())
    }

    /// Prints the progress after `runs` further runs.
    pub fn count(&self, name: &str, runs: u32) {
        let progress = self.progress.borrow_mut().advance(runs as usize);
        print_line(&format_args!("{name}: {progress}"));
    }

    /// Measures between the exit for a notification and the injection of its interrupt.
    fn host_kvm(&self) -> Result<Layer> {
        let mut layer = Layer {
            name: "Host kvm".to_owned(),
            found: Err(match self.guest.accelerator() {
                "KVM" => String::new(),
                other => format!("no KVM: the guest runs under {other}"),
            }),
            control_ns: None,
            is_part: false,
            load: Disturbance::default(),
        };
        if self.guest.accelerator() != "KVM" {
            return Ok(layer);
        }
        let trace = match HostTrace::start(&self.guest.processes()) {
            Ok(trace) => trace,
            Err(error) => {
                layer.found = Err(format!("{error:#}"));
                return Ok(layer);
            }
        };
        let control = self.run();
        let events = trace.stop()?;
        let (control, ios) = control?;
        let found = spans(&events, Point::Exited, Point::Injected);
        layer.control_ns = Some(control);
        layer.found = seen(&found, ios);
        Ok(layer)
    }

    /// Measures QEMU's device and the block device below it, by trace events.
    fn of_qemu(&self) -> Result<Vec<Layer>> {
        let names = [
            "Device (received to notified)",
            "Block device (I/O of QEMU)",
        ];
        let layer = |name: &str, found, control_ns| Layer {
            name: name.to_owned(),
            found,
            control_ns,
            is_part: false,
            load: Disturbance::default(),
        };
        let traced = self.qemu.context("QEMU is not traced")?;
        match traced.around(&self.guest.monitor(), || self.run()) {
            Ok(((control, ios), spans)) => {
                let found = [&spans.whole, &spans.io].map(|each| seen(each, ios));
                let layers = names.into_iter().zip(found);
                Ok(layers
                    .map(|(name, found)| layer(name, found, Some(control)))
                    .collect())
            }
            Err(error) => {
                let why = format!("{error:#}");
                Ok(vec![layer(names[0], Err(why), None)])
            }
        }
    }

    fn layer(&self, instrument: &Instrument) -> Result<Layer> {
        let mut layer = Layer {
            name: instrument.name.to_owned(),
            found: Err(String::new()),
            control_ns: None,
            is_part: false,
            load: Disturbance::default(),
        };
        if let Err(error) = instrument.start(self.guest) {
            layer.found = Err(format!("{error:#}"));
            return Ok(layer);
        }
        let control = self.run();
        let events = instrument.stop(self.guest, self.disk)?;
        let (control, ios) = control?;
        let found = spans(&events, instrument.from, instrument.to);
        layer.control_ns = Some(control);
        layer.found = seen(&found, ios);
        Ok(layer)
    }

    fn matched(&self, instrument: &Instrument, points: &[Point]) -> Result<MatchedRequests> {
        if instrument.start(self.guest).is_err() {
            return Ok(MatchedRequests::default());
        }
        let control = self.run();
        let events = instrument.stop(self.guest, self.disk)?;
        let requests = parts(&events, points);
        let names = points
            .windows(2)
            .map(|pair| format!("{:?} to {:?}", pair[0], pair[1]).to_lowercase());
        let of = |at: usize| {
            let each: Vec<u64> = requests.iter().map(|parts| parts[at]).collect();
            let sum: u64 = each.iter().sum();
            sum as f64 / each.len().max(1) as f64
        };
        let parts = names.enumerate().map(|(at, name)| (name, of(at))).collect();
        Ok(MatchedRequests {
            parts,
            requests: requests.len(),
            control_ns: control?.0,
            load: Disturbance::default(),
        })
    }

    /// Latency snapshot of the daemon; `None` if QEMU emulates the device.
    fn device(&self) -> Result<Option<Snapshot>> {
        match self.guest.control() {
            None => Ok(None),
            Some(control) => {
                // Limited to this disk, because the guest may still be probing another one.
                let path = control::latency_path(Some(&self.served), 0);
                let snapshot = control::Client::new(control).get(&path);
                snapshot
                    .map(Some)
                    .context("the daemon's measurements are incomplete")
            }
        }
    }

    /// Layers of the device, of its stages, and of the block device below it.
    fn of_device(
        &self,
        before: Option<Snapshot>,
        after: Option<Snapshot>,
        control: f64,
    ) -> Vec<Layer> {
        let layer = |name: String, found, is_part| Layer {
            name,
            found,
            control_ns: Some(control),
            is_part,
            load: Disturbance::default(),
        };
        let (Some(before), Some(after)) = (before, after) else {
            let why = "no daemon runs".to_owned();
            return vec![layer("Device".to_owned(), Err(why), false)];
        };
        let since = after.since(&before);
        let operation = match self.case.pattern.ends_with("write") {
            true => latency::Operation::Write,
            false => latency::Operation::Read,
        };
        let spans = device_spans(&since, operation);
        let mut layers = Vec::new();
        let missing = || Err("no request passed this layer".to_owned());
        for (name, title) in [
            ("whole", "Device (noticed to notified)"),
            ("reaped", "Block device (submitted to reaped)"),
        ] {
            let found = spans.iter().find(|(span, ..)| span == name);
            let found = found.map_or_else(missing, |(_, mean, count)| Ok(all_seen(*mean, *count)));
            layers.push(layer(title.to_owned(), found, false));
        }
        let stages = spans.into_iter().filter(|(span, ..)| span != "whole");
        let stages = stages
            .map(|(span, mean, count)| layer(format!("  {span}"), Ok(all_seen(mean, count)), true));
        layers.splice(1..1, stages.collect::<Vec<_>>());
        layers
    }
}

/// Means of a daemon's spans for one operation, the whole first: name, nanoseconds, requests.
fn device_spans(snapshot: &Snapshot, operation: latency::Operation) -> Vec<(String, f64, usize)> {
    // Other requests of the driver (identification, flushes) do not belong to the job.
    let merged = snapshot.merged();
    let Some(all) = merged.operations.get(&operation) else {
        return Vec::new();
    };
    let order = [latency::Span::Total]
        .into_iter()
        .chain(latency::Span::STEPS);
    let spans = order.filter_map(|span| {
        let histogram = all.spans.get(&span)?;
        let name = match span {
            latency::Span::Total => "whole",
            step => step.name(),
        };
        let count = histogram.count as usize;
        (count > 0).then(|| (name.to_owned(), histogram.mean_ns(), count))
    });
    spans.collect()
}

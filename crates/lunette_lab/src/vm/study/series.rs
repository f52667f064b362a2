//! Series of the matrix: its guests, their ways, and the settings of each way.

use bench::study::Variant;

use super::kernel_target::VHOST_SCSI;
use super::matrix::MatrixArguments;
use super::{DiskRoute, Setup};

/// Parameters of a guest of the matrix.
struct Guest<'a> {
    threads: u32,
    /// Poll time of workers; `None`: the daemon's default.
    poll: Option<&'a str>,
}

/// Shape of a device, independent of the emulator: suffix of its name, words, settings.
struct Shape {
    name: String,
    words: String,
    settings: Vec<(&'static str, String)>,
}

/// Shapes by number of queues, with and without indirect descriptors.
fn device_shapes(arguments: &MatrixArguments) -> Vec<Shape> {
    let mut shapes = Vec::new();
    let queues = arguments.queues.iter().copied().map(Some);
    let queues: Vec<Option<u32>> = match arguments.queues.is_empty() {
        true => vec![None],
        false => queues.collect(),
    };
    for count in queues {
        let mut shape = Shape {
            name: String::new(),
            words: String::new(),
            settings: Vec::new(),
        };
        if let Some(count) = count {
            shape.words = format!(",queues={count}");
            if arguments.queues.len() > 1 {
                let plural = if count == 1 { "" } else { "s" };
                shape.name = format!(", {count} queue{plural}");
                shape.settings.push(("queues", count.to_string()));
            }
        }
        if arguments.chained {
            let mut settings = shape.settings.clone();
            settings.push(("descriptors", "chained".to_owned()));
            let chained = Shape {
                name: format!("{}, chained", shape.name),
                words: format!("{},indirect=off", shape.words),
                settings,
            };
            shape.settings.push(("descriptors", "indirect".to_owned()));
            shapes.push(shape);
            shapes.push(chained);
        } else {
            shapes.push(shape);
        }
    }
    shapes
}

fn ways_of(guest: &Guest<'_>, arguments: &MatrixArguments, folder: &str) -> Vec<DiskRoute> {
    let devices: Vec<String> = arguments
        .block
        .iter()
        .map(|device| device.display().to_string())
        .collect();
    let backings = match arguments.memory {
        _ if !devices.is_empty() => {
            let devices = format!("backing=block:{}", devices.join("+"));
            [devices.clone(), devices]
        }
        true => [
            format!("backing=ram:{}", arguments.size),
            format!("backing=tmpfs:/dev/shm,size={}", arguments.size),
        ],
        false => {
            let file = format!("backing=file:{folder},size={}", arguments.size);
            [file.clone(), file]
        }
    };
    let [ours, theirs] = &backings;
    let disks = arguments.disks;
    let transport = |layout: &String| match layout.as_str() {
        "blk" => ("blk", format!("blk:{disks}")),
        "scsi" => ("scsi", format!("scsi:{disks}x1")),
        _ => ("scsi LUNs", format!("scsi:1x{disks}")),
    };
    let transports: Vec<_> = arguments.layouts.iter().map(transport).collect();
    let mut ways = Vec::new();
    for shape in device_shapes(arguments) {
        for (transport, units) in &transports {
            let words = format!("{units}{},{ours}", shape.words);
            ways.push(guest.ours(arguments, &shape, transport, words));
        }
        for (transport, units) in &transports {
            let words = format!("{units}{}", shape.words);
            ways.extend(guest.theirs(arguments, &shape, transport, &words, theirs));
        }
    }
    if guest.threads == 0 && guest.is_first(arguments) {
        for via in &arguments.baseline {
            match via.as_str() {
                VHOST_SCSI => ways.extend(kernel_targets(guest, arguments, folder)),
                via => ways.push(guest.baseline(arguments, via, theirs)),
            }
        }
    }
    let is_wanted = |way: &DiskRoute| {
        arguments.series.is_empty()
            || arguments
                .series
                .iter()
                .any(|word| way.variant.name.contains(word))
    };
    ways.retain(is_wanted);
    ways
}

/// Returns the disks of targets in the host's kernel, which are logical units of one controller.
fn kernel_targets(guest: &Guest<'_>, arguments: &MatrixArguments, folder: &str) -> Vec<DiskRoute> {
    let shapes = device_shapes(arguments).into_iter();
    let route = |shape: Shape| {
        let variant = Variant {
            name: format!("LIO vhost-scsi, kernel threads{}", shape.name),
            settings: guest.settings("LIO", "scsi LUNs", &shape),
        };
        DiskRoute::of_kernel(variant, folder, arguments.disks, &shape.words)
    };
    shapes.map(route).collect()
}

impl Guest<'_> {
    fn settings(
        &self,
        device: &str,
        transport: &str,
        shape: &Shape,
    ) -> Vec<(&'static str, String)> {
        let mut settings = vec![
            ("device", device.to_owned()),
            ("transport", transport.to_owned()),
            ("threads", self.threads.to_string()),
        ];
        settings.extend(shape.settings.clone());
        settings
    }

    fn ours(
        &self,
        arguments: &MatrixArguments,
        shape: &Shape,
        transport: &str,
        words: String,
    ) -> DiskRoute {
        let workers = match self.threads {
            0 => "shared workers".to_owned(),
            1 => "1 worker".to_owned(),
            n => format!("{n} workers"),
        };
        let polls = self
            .poll
            .map_or(String::new(), |poll| format!(", poll {poll}"));
        let mut settings = self.settings("Lunette", transport, shape);
        if arguments.polls.len() > 1
            && let Some(poll) = self.poll
        {
            settings.push(("polling", poll.to_owned()));
        }
        let name = format!("Lunette {transport}, {workers}{}{polls}", shape.name);
        DiskRoute {
            variant: Variant { name, settings },
            words: Some(words),
            disks: arguments.disks,
            wwpn: None,
        }
    }

    /// Returns true in the guest with the first poll time.
    fn is_first(&self, arguments: &MatrixArguments) -> bool {
        let first = arguments.polls.first();
        first.is_none_or(|first| self.poll == Some(first.as_str()))
    }

    /// Returns ATA disks, which have one queue.
    fn baseline(&self, arguments: &MatrixArguments, via: &str, backing: &str) -> DiskRoute {
        let shape = Shape {
            name: String::new(),
            words: String::new(),
            settings: Vec::new(),
        };
        DiskRoute {
            variant: Variant {
                name: format!("QEMU {via}, main loop"),
                settings: self.settings("QEMU", via, &shape),
            },
            words: Some(format!("blk:{},via={via},{backing}", arguments.disks)),
            disks: arguments.disks,
            wwpn: None,
        }
    }

    /// QEMU's devices do not poll as workers do, so they are only in the first guest. A SCSI controller has one
    /// thread.
    fn theirs(
        &self,
        arguments: &MatrixArguments,
        shape: &Shape,
        transport: &str,
        words: &str,
        backing: &str,
    ) -> Option<DiskRoute> {
        if !self.is_first(arguments) || (transport != "blk" && self.threads > 1) {
            return None;
        }
        let (via, threads) = match (self.threads, transport) {
            (0, _) => ("via=qemu".to_owned(), "main loop".to_owned()),
            (n, "blk") => {
                let plural = if n == 1 { "" } else { "s" };
                (
                    format!("via=qemu-iothread,iothreads={n}"),
                    format!("{n} iothread{plural}"),
                )
            }
            // A controller has one thread.
            _ => ("via=qemu-iothread".to_owned(), "1 iothread".to_owned()),
        };
        let name = format!("QEMU {transport}, {threads}{}", shape.name);
        let settings = self.settings("QEMU", transport, shape);
        Some(DiskRoute {
            variant: Variant { name, settings },
            words: Some(format!("{words},{via},{backing}")),
            disks: arguments.disks,
            wwpn: None,
        })
    }
}

/// Guests of a matrix with their ways.
pub fn setups(arguments: &MatrixArguments, threads: &[u32], folder: &str) -> Vec<Setup> {
    let polls: Vec<Option<&str>> = match arguments.polls.as_slice() {
        [] => vec![None],
        given => given.iter().map(|poll| Some(poll.as_str())).collect(),
    };
    let guests = threads
        .iter()
        .flat_map(|threads| polls.iter().map(move |poll| (*threads, *poll)));
    let setup = |(threads, poll): (u32, Option<&str>)| {
        let mut options = match threads {
            0 => Vec::new(),
            n => vec![format!("--daemon-arg=--workers={n}")],
        };
        options.extend(poll.map(|poll| format!("--daemon-arg=--poll={poll}")));
        let polls = poll.map_or(String::new(), |poll| format!(", poll {poll}"));
        Setup {
            name: format!("{threads} threads{polls}"),
            options,
            ways: ways_of(&Guest { threads, poll }, arguments, folder),
        }
    };
    let setups: Vec<Setup> = guests.map(setup).collect();
    if arguments.block.is_empty() {
        return setups
            .into_iter()
            .filter(|setup| !setup.ways.is_empty())
            .collect();
    }
    // Each way needs exclusive use of the devices.
    let alone = setups.into_iter().flat_map(|setup| {
        let Setup {
            name,
            options,
            ways,
        } = setup;
        ways.into_iter().map(move |way| Setup {
            name: format!("{name}, {}", way.variant.name),
            options: options.clone(),
            ways: vec![way],
        })
    });
    alone.collect()
}

//! Series of the matrix: its guests, their ways, and the choices of each way.

use super::matrix::MatrixArguments;
use super::{Setup, Way};

/// Parameters of a guest of the matrix.
struct Guest<'a> {
    threads: u32,
    /// Poll time of workers; `None`: the daemon's default.
    poll: Option<&'a str>,
}

/// Variant of a device, independent of the emulator: suffix of its name, words, choices.
struct Variant {
    name: String,
    words: String,
    choices: Vec<(&'static str, String)>,
}

/// Variants by number of queues, with and without indirect descriptors.
fn variants(arguments: &MatrixArguments) -> Vec<Variant> {
    let mut variants = Vec::new();
    let queues = arguments.queues.iter().copied().map(Some);
    let queues: Vec<Option<u32>> = match arguments.queues.is_empty() {
        true => vec![None],
        false => queues.collect(),
    };
    for count in queues {
        let mut variant = Variant {
            name: String::new(),
            words: String::new(),
            choices: Vec::new(),
        };
        if let Some(count) = count {
            variant.words = format!(",queues={count}");
            if arguments.queues.len() > 1 {
                let plural = if count == 1 { "" } else { "s" };
                variant.name = format!(", {count} queue{plural}");
                variant.choices.push(("queues", count.to_string()));
            }
        }
        if arguments.chained {
            let mut choices = variant.choices.clone();
            choices.push(("descriptors", "chained".to_owned()));
            let chained = Variant {
                name: format!("{}, chained", variant.name),
                words: format!("{},indirect=off", variant.words),
                choices,
            };
            variant.choices.push(("descriptors", "indirect".to_owned()));
            variants.push(variant);
            variants.push(chained);
        } else {
            variants.push(variant);
        }
    }
    variants
}

fn ways_of(guest: &Guest<'_>, arguments: &MatrixArguments, folder: &str) -> Vec<Way> {
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
    let shapes = [
        ("blk", format!("blk:{disks}")),
        ("scsi", format!("scsi:{disks}x1")),
    ];
    let mut ways = Vec::new();
    for variant in variants(arguments) {
        for (transport, shape) in &shapes {
            let words = format!("{shape}{},{ours}", variant.words);
            ways.push(guest.ours(arguments, &variant, transport, words));
        }
        for (transport, shape) in &shapes {
            let words = format!("{shape}{}", variant.words);
            ways.extend(guest.theirs(arguments, &variant, transport, &words, theirs));
        }
    }
    let is_wanted = |way: &Way| {
        arguments.series.is_empty() || arguments.series.iter().any(|word| way.name.contains(word))
    };
    ways.retain(is_wanted);
    ways
}

impl Guest<'_> {
    fn choices(
        &self,
        device: &str,
        transport: &str,
        variant: &Variant,
    ) -> Vec<(&'static str, String)> {
        let mut choices = vec![
            ("device", device.to_owned()),
            ("transport", transport.to_owned()),
            ("threads", self.threads.to_string()),
        ];
        choices.extend(variant.choices.clone());
        choices
    }

    fn ours(
        &self,
        arguments: &MatrixArguments,
        variant: &Variant,
        transport: &str,
        words: String,
    ) -> Way {
        let workers = match self.threads {
            0 => "shared workers".to_owned(),
            1 => "1 worker".to_owned(),
            n => format!("{n} workers"),
        };
        let polls = self
            .poll
            .map_or(String::new(), |poll| format!(", poll {poll}"));
        let mut choices = self.choices("Lunette", transport, variant);
        if arguments.poll_us.len() > 1
            && let Some(poll) = self.poll
        {
            choices.push(("polling", poll.to_owned()));
        }
        Way {
            name: format!("Lunette {transport}, {workers}{}{polls}", variant.name),
            words: Some(words),
            disks: arguments.disks,
            choices,
        }
    }

    /// QEMU's devices do not poll as workers do, so they are only in the first guest. A SCSI controller has one
    /// thread.
    fn theirs(
        &self,
        arguments: &MatrixArguments,
        variant: &Variant,
        transport: &str,
        words: &str,
        backing: &str,
    ) -> Option<Way> {
        let mut polls = arguments.poll_us.iter();
        let is_first = polls
            .next()
            .is_none_or(|first| self.poll == Some(first.as_str()));
        if !is_first || (transport == "scsi" && self.threads > 1) {
            return None;
        }
        let (via, threads) = match (self.threads, transport) {
            (0, _) => ("via=qemu".to_owned(), "main loop".to_owned()),
            (1, "scsi") => ("via=qemu-iothread".to_owned(), "1 iothread".to_owned()),
            (n, _) => {
                let plural = if n == 1 { "" } else { "s" };
                (
                    format!("via=qemu-iothread,iothreads={n}"),
                    format!("{n} iothread{plural}"),
                )
            }
        };
        Some(Way {
            name: format!("QEMU {transport}, {threads}{}", variant.name),
            words: Some(format!("{words},{via},{backing}")),
            disks: arguments.disks,
            choices: self.choices("QEMU", transport, variant),
        })
    }
}

/// Guests of a matrix with their ways.
pub fn setups(arguments: &MatrixArguments, threads: &[u32], folder: &str) -> Vec<Setup> {
    let polls: Vec<Option<&str>> = match arguments.poll_us.as_slice() {
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
        options.extend(poll.map(|poll| format!("--daemon-arg=--poll-us={poll}")));
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
            name: format!("{name}, {}", way.name),
            options: options.clone(),
            ways: vec![way],
        })
    });
    alone.collect()
}

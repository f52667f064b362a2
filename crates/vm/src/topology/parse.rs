//! Parser for the words of a topology: `scsi:4x1,queues=2`, `blk:4`, `via=qemu`, `backing=ram:700M`.
//!
//! `scsi:` and `blk:` words describe groups of disks. Separate `via=` and `backing=` words are defaults for all groups. Every error names
//! the word, the permitted values and an example.

use super::words::{Aio, Backing, Group, Shape, Topology, TopologyError, Via};
use std::path::PathBuf;
use std::str::FromStr;

/// Maximum number of targets that QEMU's controllers support.
const TARGETS_MAX: u32 = 256;

/// Maximum number of logical units of one target.
const LUNS_MAX: u32 = 16384;

/// Maximum number of disks of one group; guests with more do not boot in a reasonable time.
const DISKS_MAX: u32 = 4096;

/// Maximum number of request queues of one export of the daemon.
const BLK_QUEUES_MAX: u32 = 256;
const SCSI_QUEUES_MAX: u32 = 254;

/// Default size of a disk in bytes.
const SIZE: u64 = 256 << 20;

/// Sizes are multiples of the largest sector size.
const SIZE_UNIT: u64 = 4096;

const GROUP_KEYS: &str = "queues, virtqueue_size, packed, indirect, via, backing, size, aio, ioeventfd, scsi, iothreads, iothread_vq_mapping, and for scsi removable, cmd_per_lun and wwpn";

/// Options after a word's colon and commas.
struct Options<'a> {
    word: &'a str,
    pairs: Vec<(String, Option<&'a str>)>,
}

/// Defaults for all groups.
#[derive(Default)]
struct Defaults {
    via: Option<Via>,
    backing: Option<(Backing, Option<u64>)>,
}

impl Topology {
    /// Parses words. Each string may contain several words, separated by spaces.
    ///
    /// # Errors
    /// The first invalid word.
    pub fn parse<S: AsRef<str>>(words: &[S]) -> Result<Topology, TopologyError> {
        let words: Vec<&str> = words
            .iter()
            .flat_map(|word| word.as_ref().split_whitespace())
            .collect();
        let mut defaults = Defaults::default();
        for word in &words {
            defaults.read(word)?;
        }
        let groups = words.iter().filter(|word| !is_default(word));
        let groups = groups
            .map(|word| group(word, &defaults))
            .collect::<Result<Vec<_>, _>>()?;
        if groups.is_empty() {
            return Err(TopologyError::new(
                "TOPOLOGY",
                "no word specifies disks",
                "scsi:4x1 is one controller with four targets, blk:4 four virtio-blk devices",
            ));
        }
        Ok(Topology { groups })
    }
}

impl FromStr for Topology {
    type Err = TopologyError;

    fn from_str(text: &str) -> Result<Topology, TopologyError> {
        Topology::parse(&[text])
    }
}

fn is_default(word: &str) -> bool {
    word.starts_with("via=") || word.starts_with("backing=")
}

impl Defaults {
    fn read(&mut self, word: &str) -> Result<(), TopologyError> {
        let duplicate = |key: &str| {
            TopologyError::new(
                word,
                format!("{key} is given twice for all groups"),
                format!("give one group its own, as in blk:2,{word}"),
            )
        };
        if let Some(value) = word.strip_prefix("via=") {
            if self.via.replace(via(word, value)?).is_some() {
                return Err(duplicate("via"));
            }
        } else if let Some(value) = word.strip_prefix("backing=") {
            let (value, size) = match value.split_once(",size=") {
                Some((value, text)) => (value, Some(size(word, text)?)),
                None => (value, None),
            };
            let (backing, own) = backing(word, value)?;
            if size.is_some() && own.is_some() {
                return Err(TopologyError::new(
                    word,
                    "the size is given twice",
                    "backing=ram:700M",
                ));
            }
            let has = self.backing.replace((backing, size.or(own)));
            if has.is_some() {
                return Err(duplicate("backing"));
            }
        }
        Ok(())
    }
}

fn group(word: &str, defaults: &Defaults) -> Result<Group, TopologyError> {
    let (head, rest) = match word.split_once(',') {
        Some((head, rest)) => (head, Some(rest)),
        None => (word, None),
    };
    let shape = shape(word, head)?;
    let mut options = Options::new(word, rest);
    let via = match options.take("via") {
        Some(value) => via(word, value.unwrap_or_default())?,
        None => defaults.via.unwrap_or(Via::Lunette),
    };
    let own_size = match options.take("size") {
        Some(value) => Some(size(word, value.unwrap_or_default())?),
        None => None,
    };
    let backing = match options.take("backing") {
        Some(value) => Some(backing(word, value.unwrap_or_default())?),
        None => defaults.backing.clone(),
    };
    let (backing, size) = match options.take("wwpn") {
        None if via != Via::VhostScsi => default_backing(backing, via),
        wwpn => (
            kernel_target(word, via, wwpn.flatten(), backing.is_some())?,
            None,
        ),
    };
    let is_scsi = matches!(shape, Shape::Scsi { .. });
    let queues_max = if is_scsi {
        SCSI_QUEUES_MAX
    } else {
        BLK_QUEUES_MAX
    };
    let group = Group {
        word: word.to_owned(),
        shape,
        queues: options.number("queues", 1, queues_max)?,
        queue_size: options.queue_size()?,
        cmd_per_lun: options.number("cmd_per_lun", 1, 1024)?,
        removable: options
            .number("removable", 0, shape.disks())?
            .unwrap_or_default(),
        packed: options.switch("packed")?.unwrap_or_default(),
        indirect: options.switch("indirect")?.unwrap_or(true),
        via,
        size: size_of(word, own_size.or(size), &backing)?,
        backing,
        aio: options.aio()?,
        ioeventfd: options.switch("ioeventfd")?,
        scsi_commands: options.switch("scsi")?,
        vq_mapping: options.number("iothread_vq_mapping", 1, 64)?,
        iothreads: options.number("iothreads", 1, 64)?,
    };
    options.none_is_left()?;
    check(&group)?;
    Ok(group)
}

/// Returns the default backing, which needs no preparation and disappears with its owner or the machine.
fn default_backing(configured: Option<(Backing, Option<u64>)>, via: Via) -> (Backing, Option<u64>) {
    configured.unwrap_or_else(|| match via {
        Via::Lunette => (Backing::Ram, None),
        _ => (Backing::Tmpfs(PathBuf::from("/dev/shm")), None),
    })
}

/// Returns the backing of `via=vhost-scsi`: the target with this WWPN.
fn kernel_target(
    word: &str,
    via: Via,
    wwpn: Option<&str>,
    has_backing: bool,
) -> Result<Backing, TopologyError> {
    const EXAMPLE: &str = "scsi:1x4,via=vhost-scsi,wwpn=naa.5001405bf0e7a2c4";
    let wrong = |problem: &str, hint: &str| Err(TopologyError::new(word, problem, hint));
    if via != Via::VhostScsi {
        return wrong("wwpn is for via=vhost-scsi", EXAMPLE);
    }
    if has_backing {
        return wrong(
            "via=vhost-scsi has no backing: its disks are those of a target in the host's kernel",
            "omit backing, or give each other group its own",
        );
    }
    let is_naa = |wwpn: &&str| {
        let digits = wwpn.strip_prefix("naa.").unwrap_or_default();
        digits.len() == 16 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    match wwpn.filter(is_naa) {
        Some(wwpn) => Ok(Backing::KernelTarget(wwpn.to_owned())),
        None => wrong(
            "via=vhost-scsi needs the wwpn of a target: naa. and 16 hexadecimal digits",
            EXAMPLE,
        ),
    }
}

fn size_of(word: &str, size: Option<u64>, backing: &Backing) -> Result<Option<u64>, TopologyError> {
    match (backing, size) {
        (Backing::Block(_) | Backing::Daemon(_) | Backing::KernelTarget(_), Some(_)) => {
            Err(TopologyError::new(
                word,
                "size does not apply to disks with a fixed size",
                "omit size; it applies to backing=ram, file and tmpfs",
            ))
        }
        (Backing::Block(_) | Backing::Daemon(_) | Backing::KernelTarget(_), None) => Ok(None),
        (_, size) => Ok(Some(size.unwrap_or(SIZE))),
    }
}

fn shape(word: &str, head: &str) -> Result<Shape, TopologyError> {
    let unknown = || {
        TopologyError::new(
            word,
            "not a word of a topology; allowed are scsi:TARGETSxLUNS, blk:COUNT, via=WHO and backing=WHAT",
            "scsi:4x1,queues=2 or blk:4 via=qemu",
        )
    };
    let (kind, numbers) = head.split_once(':').ok_or_else(unknown)?;
    let shape = match kind {
        "scsi" => {
            let (targets, luns) = numbers.split_once('x').ok_or_else(|| {
                TopologyError::new(
                    word,
                    format!("{numbers:?} is not of the form TARGETSxLUNS"),
                    "scsi:4x1 has four targets of one LUN, scsi:1x4 one target of four LUNs",
                )
            })?;
            Shape::Scsi {
                targets: number(word, "TARGETS", targets, 1, TARGETS_MAX)?,
                luns: number(word, "LUNS", luns, 1, LUNS_MAX)?,
            }
        }
        "blk" => Shape::Blk {
            count: number(word, "COUNT", numbers, 1, DISKS_MAX)?,
        },
        _ => return Err(unknown()),
    };
    if shape.disks() > DISKS_MAX {
        return Err(TopologyError::new(
            word,
            format!("{} disks; one group has at most {DISKS_MAX}", shape.disks()),
            "scsi:64x64",
        ));
    }
    Ok(shape)
}

fn number(
    word: &str,
    quantity: &str,
    text: &str,
    from: u32,
    to: u32,
) -> Result<u32, TopologyError> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let value = text.parse().ok().filter(|_| digits);
    value
        .filter(|value| (from..=to).contains(value))
        .ok_or_else(|| {
            TopologyError::new(
                word,
                format!("{quantity} is {text:?}; allowed are {from} to {to}"),
                format!("a whole number, such as {}", from.max(4.min(to))),
            )
        })
}

/// Parses a size with K, M, G or T, in bytes.
fn size(word: &str, text: &str) -> Result<u64, TopologyError> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K') => (&text[..text.len() - 1], 10),
        Some(b'M') => (&text[..text.len() - 1], 20),
        Some(b'G') => (&text[..text.len() - 1], 30),
        Some(b'T') => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let bytes = digits.parse::<u64>().ok().filter(|_| is_number);
    let bytes = bytes.and_then(|number| number.checked_mul(1 << shift));
    bytes
        .filter(|bytes| *bytes > 0 && bytes % SIZE_UNIT == 0 && i64::try_from(*bytes).is_ok())
        .ok_or_else(|| {
            TopologyError::new(
                word,
                format!("the size is {text:?}; allowed are multiples of {SIZE_UNIT} bytes, with K, M, G or T (powers of 1024)"),
                "700M",
            )
        })
}

fn via(word: &str, value: &str) -> Result<Via, TopologyError> {
    chosen(word, "via", value, &Via::WORDS)
}

fn chosen<T: Copy>(
    word: &str,
    key: &str,
    value: &str,
    words: &[(&str, T)],
) -> Result<T, TopologyError> {
    let found = words.iter().find(|(name, _)| *name == value);
    found.map(|(_, chosen)| *chosen).ok_or_else(|| {
        let names: Vec<&str> = words.iter().map(|(name, _)| *name).collect();
        TopologyError::new(
            word,
            format!("{key} is {value:?}; allowed are {}", names.join(", ")),
            format!("{key}={}", names.first().copied().unwrap_or_default()),
        )
    })
}

fn backing(word: &str, value: &str) -> Result<(Backing, Option<u64>), TopologyError> {
    let (kind, rest) = value.split_once(':').unwrap_or((value, ""));
    let needs = |part: &str, example: &str| {
        TopologyError::new(
            word,
            format!("backing={kind} needs {part}"),
            format!("backing={kind}:{example}"),
        )
    };
    let list = |part: &str, example: &str| {
        let names: Vec<&str> = rest.split('+').collect();
        match names.iter().any(|name| name.is_empty()) {
            true => Err(needs(part, example)),
            false => Ok(names),
        }
    };
    Ok(match kind {
        "ram" => (Backing::Ram, Some(size(word, rest)?)),
        "file" if rest.is_empty() => return Err(needs("a folder", "/var/lib/lunette")),
        "file" => (Backing::File(PathBuf::from(rest)), None),
        "tmpfs" if rest.is_empty() => return Err(needs("a folder", "/dev/shm")),
        "tmpfs" => (Backing::Tmpfs(PathBuf::from(rest)), None),
        "block" => {
            let devices = list("devices, with + between them", "/dev/sdb+/dev/sdc")?;
            let devices = devices.into_iter().map(PathBuf::from).collect();
            (Backing::Block(devices), None)
        }
        "daemon" => {
            let disks = list("disks of a running daemon, with + between them", "d0+d1")?;
            let disks = disks.into_iter().map(str::to_owned).collect();
            (Backing::Daemon(disks), None)
        }
        _ => {
            return Err(TopologyError::new(
                word,
                format!(
                    "backing is {value:?}; allowed are ram:SIZE, file:FOLDER, tmpfs:FOLDER, block:DEVICE+DEVICE and daemon:DISK+DISK"
                ),
                "backing=ram:700M",
            ));
        }
    })
}

impl<'a> Options<'a> {
    fn new(word: &'a str, rest: Option<&'a str>) -> Options<'a> {
        let pairs = rest.into_iter().flat_map(|rest| rest.split(','));
        let pairs = pairs.map(|pair| match pair.split_once('=') {
            Some((key, value)) => (key.replace('-', "_"), Some(value)),
            None => (pair.replace('-', "_"), None),
        });
        Options {
            word,
            pairs: pairs.collect(),
        }
    }

    /// Removes a key and returns its value; the inner option is `None` for a key without a value.
    fn take(&mut self, key: &str) -> Option<Option<&'a str>> {
        let at = self.pairs.iter().position(|(name, _)| name == key)?;
        Some(self.pairs.remove(at).1)
    }

    fn number(&mut self, key: &str, from: u32, to: u32) -> Result<Option<u32>, TopologyError> {
        let value = self.take(key);
        value
            .map(|value| number(self.word, key, value.unwrap_or_default(), from, to))
            .transpose()
    }

    fn switch(&mut self, key: &str) -> Result<Option<bool>, TopologyError> {
        match self.take(key) {
            None => Ok(None),
            Some(None | Some("on")) => Ok(Some(true)),
            Some(Some("off")) => Ok(Some(false)),
            Some(Some(other)) => Err(TopologyError::new(
                self.word,
                format!("{key} is {other:?}; allowed are on and off"),
                format!("{key}=on"),
            )),
        }
    }

    fn queue_size(&mut self) -> Result<Option<u32>, TopologyError> {
        let size = self.number("virtqueue_size", 16, 1024)?;
        match size {
            Some(size) if !size.is_power_of_two() => Err(TopologyError::new(
                self.word,
                format!("virtqueue_size is {size}; allowed are powers of two from 16 to 1024"),
                format!("virtqueue_size={}", size.next_power_of_two()),
            )),
            size => Ok(size),
        }
    }

    fn aio(&mut self) -> Result<Option<Aio>, TopologyError> {
        let value = self.take("aio");
        value
            .map(|value| chosen(self.word, "aio", value.unwrap_or_default(), &Aio::WORDS))
            .transpose()
    }

    fn none_is_left(&self) -> Result<(), TopologyError> {
        match self.pairs.first() {
            None => Ok(()),
            Some((key, _)) => Err(TopologyError::new(
                self.word,
                format!("the key {key:?} is unknown or given twice; allowed are {GROUP_KEYS}"),
                "scsi:4x1,queues=2,cmd_per_lun=64",
            )),
        }
    }
}

/// Rejects options that exclude each other.
fn check(group: &Group) -> Result<(), TopologyError> {
    let wrong = |problem: String, hint: &str| Err(TopologyError::new(&group.word, problem, hint));
    let is_scsi = matches!(group.shape, Shape::Scsi { .. });
    if !is_scsi && (group.removable > 0 || group.cmd_per_lun.is_some()) {
        return wrong(
            "removable and cmd_per_lun are for scsi: virtio-blk has neither".to_owned(),
            "scsi:4x1,removable=2",
        );
    }
    if is_scsi && group.packed {
        return wrong(
            "packed is for blk: QEMU does not support packed rings for vhost-user-scsi".to_owned(),
            "blk:4,packed",
        );
    }
    if let Some(most) = group.via.ata_disks() {
        check_ata(group, most)?;
    }
    if group.via == Via::VhostScsi {
        check_vhost_scsi(group)?;
    }
    if group.via == Via::Lunette {
        let keys = [
            ("aio", group.aio.is_some()),
            ("ioeventfd", group.ioeventfd.is_some()),
            ("scsi", group.scsi_commands.is_some()),
            ("iothreads", group.iothreads.is_some()),
            ("iothread_vq_mapping", group.vq_mapping.is_some()),
        ];
        if let Some((key, _)) = keys.iter().find(|(_, is_given)| *is_given) {
            return wrong(
                format!("{key} applies to QEMU's devices only, these are Lunette's"),
                "add via=qemu or via=qemu-iothread, or omit the key",
            );
        }
    }
    if group.vq_mapping.is_some() && group.via != Via::QemuIothread {
        return wrong(
            "iothread_vq_mapping is for via=qemu-iothread".to_owned(),
            "blk:4,via=qemu-iothread,iothread_vq_mapping=2",
        );
    }
    if group.iothreads.is_some() && (group.via != Via::QemuIothread || group.vq_mapping.is_some()) {
        return wrong(
            "iothreads is for via=qemu-iothread without iothread_vq_mapping".to_owned(),
            "blk:4,via=qemu-iothread,iothreads=2",
        );
    }
    if group.scsi_commands.is_some() && !matches!(group.shape, Shape::Blk { .. }) {
        return wrong(
            "scsi is a property of virtio-blk".to_owned(),
            "blk:4,via=qemu,scsi=off",
        );
    }
    if group.via == Via::QemuIothread && group.ioeventfd == Some(false) {
        return wrong(
            "an iothread needs an eventfd, so ioeventfd=off cannot be combined with via=qemu-iothread".to_owned(),
            "via=qemu,ioeventfd=off",
        );
    }
    check_backing(group)
}

/// Rejects shapes and options that the kernel's target does not have.
fn check_vhost_scsi(group: &Group) -> Result<(), TopologyError> {
    let wrong = |problem: String, hint: String| Err(TopologyError::new(&group.word, problem, hint));
    let disks = group.shape.disks();
    if !matches!(group.shape, Shape::Scsi { targets: 1, .. }) {
        return wrong(
            "via=vhost-scsi has SCSI disks of one target: LUNs of a portal group".to_owned(),
            format!("scsi:1x{disks}"),
        );
    }
    let keys = [
        ("removable", group.removable > 0),
        ("aio", group.aio.is_some()),
        ("ioeventfd", group.ioeventfd.is_some()),
        ("iothreads", group.iothreads.is_some()),
        ("iothread_vq_mapping", group.vq_mapping.is_some()),
    ];
    match keys.iter().find(|(_, is_given)| *is_given) {
        None => Ok(()),
        Some((key, _)) => wrong(
            format!("{key} does not apply to via=vhost-scsi: the host's kernel serves these disks"),
            format!("omit {key}"),
        ),
    }
}

/// Rejects shapes and options of virtio devices.
fn check_ata(group: &Group, most: u32) -> Result<(), TopologyError> {
    let via = group.via.word();
    let wrong = |problem: String, hint: String| Err(TopologyError::new(&group.word, problem, hint));
    if matches!(group.shape, Shape::Scsi { .. }) {
        return wrong(
            format!("via={via} is for blk: an ATA controller has no SCSI targets"),
            format!("blk:4,via={via}"),
        );
    }
    // The ports of a PC's IDE controller have fixed addresses.
    if group.via == Via::Ide && group.shape.disks() > most {
        return wrong(
            format!("the IDE controller has at most {most} disks"),
            format!("blk:{most},via=ide, or via=ahci"),
        );
    }
    let keys = [
        ("queues", group.queues.is_some()),
        ("virtqueue_size", group.queue_size.is_some()),
        ("packed", group.packed),
        ("indirect", !group.indirect),
        ("ioeventfd", group.ioeventfd.is_some()),
        ("scsi", group.scsi_commands.is_some()),
    ];
    match keys.iter().find(|(_, is_given)| *is_given) {
        None => Ok(()),
        Some((key, _)) => wrong(
            format!("{key} is for virtio devices, but via={via} has ATA disks"),
            format!("omit {key}"),
        ),
    }
}

fn check_backing(group: &Group) -> Result<(), TopologyError> {
    let wrong = |problem: String, hint: String| Err(TopologyError::new(&group.word, problem, hint));
    let named = match &group.backing {
        Backing::Ram if group.via.is_qemu() => {
            return wrong(
                "backing=ram is memory of Lunette's daemon, which QEMU cannot access".to_owned(),
                "backing=tmpfs:/dev/shm works with both".to_owned(),
            );
        }
        Backing::Daemon(_) if group.via.is_qemu() => {
            return wrong(
                format!(
                    "backing=daemon needs a daemon, but via={} serves disks with QEMU",
                    group.via.word()
                ),
                "via=lunette, or backing=file:FOLDER".to_owned(),
            );
        }
        Backing::Tmpfs(_) if group.aio == Some(Aio::Native) => {
            return wrong(
                "aio=native needs O_DIRECT, which is not used on tmpfs".to_owned(),
                "aio=threads or aio=io_uring, or backing=file:FOLDER".to_owned(),
            );
        }
        Backing::Daemon(_) if group.removable > 0 => {
            return wrong(
                "removable is a property of an added disk, but backing=daemon uses existing disks"
                    .to_owned(),
                "lunette disk add NAME=ram:1G,removable".to_owned(),
            );
        }
        Backing::Block(devices) => devices.len(),
        Backing::Daemon(disks) => disks.len(),
        _ => return Ok(()),
    };
    let disks = group.shape.disks() as usize;
    if named == disks {
        return Ok(());
    }
    wrong(
        format!("{disks} disks, but backing names {named}"),
        "give one for each disk, with + between them".to_owned(),
    )
}

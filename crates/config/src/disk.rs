//! Keys of a disk, and relations between them.

use block::{CacheMode, DelayTime, DiscardMode, FileLock, NamedFiles, OnError, RbdLock};
use serde_json::{Value, json};

use super::device_keys::{DiskKey, device_key};
use super::devices::{BlockDeviceConfig, DEVICE_KINDS, DelayStorage, DeviceKind, Persist};
use super::diagnostics::{Diagnostics, Mistake, MistakeKind};
use super::key::{KeyValue, Kind, NONE, REQUIRED, RunTime, differing, key_values, words};
use super::location::Located;
use super::model::{DiskConfig, LimitsConfig, SERIAL_MAX};
use super::nbd_disk::NBD_DISK_KEYS;
use super::passthrough::{self, PASSTHROUGH_KEYS};
use super::rbd::RBD_KEYS;
use super::readers::NAME;
use super::remote::{REMOTE_KEYS, REMOTE_LOGIN_KEYS};
use super::setting::{Choice, Setting, key};
use super::size::SIZE_MAX;
use super::value::{Draft, Fields, Reader};

/// For keys that `lunette disk set` changes at run time.
pub const DISK_SET: RunTime = RunTime("`lunette disk set`, reload");
const DISK_LIMIT: RunTime = RunTime("`lunette disk limit`, reload");
const DISK_RESIZE: RunTime = RunTime("`lunette disk resize`, reload");

const WWN_ALLOWED: &str =
    "16 hexadecimal digits, the first 2, 3 or 5, such as \"3a5b000000000001\"";
const PHYSICAL_MAX: u32 = 65_536;
/// Maximum rate limit in requests per second, higher than any disk's rate.
const IOPS_MAX: u64 = 1_000_000_000;
/// Maximum time limit in seconds.
const DAY: u64 = 86_400;

/// Returns all keys of a disk.
pub fn disk_keys() -> impl Iterator<Item = &'static DiskKey> {
    let groups = [
        LOCAL_KEYS,
        RBD_KEYS,
        NBD_DISK_KEYS,
        REMOTE_KEYS,
        REMOTE_LOGIN_KEYS,
        PASSTHROUGH_KEYS,
        COMMON_KEYS,
    ];
    groups.into_iter().flatten()
}

/// Name, back end, and keys of disks in memory and in files.
static LOCAL_KEYS: &[DiskKey] = &[
    key! { "name": NAME; REQUIRED; RunTime::ADD_AGAIN; "name for exports and commands"; both name },
    key! { "backend": Kind::Word(&const { words(&DEVICE_KINDS) }); REQUIRED; RunTime::ADD_AGAIN;
        "kind of the disk: see the sections below";
        read |key, reader, disk| {
            if let Some(kind) = reader.choice(key.name, &DEVICE_KINDS) {
                disk.backend = kind.value.config();
            }
        };
        get |disk| Some(json!(disk.backend.word()))
    },
    key! { "size": Kind::Size(": a multiple of the block size", 512..=SIZE_MAX); NONE; DISK_RESIZE;
        "`ram`, `null`, `delay`: required. `file`: a missing file is created sparse with this size; without this key the \
            disk follows the size of the file. `image`, `rbd`, `iscsi`, `nbd`, `scsi_generic`: not allowed, because the image, unit or export has a size";
        read |key, reader, disk| {
            if let Some(size) = reader.size(key.name) {
                disk.backend = disk.backend.with_size(Some(size.value));
            }
        };
        get |disk| disk.backend.size().value()
    },
    device_key! { "path": Kind::Text("path of a file or a device", "the path of a file or a device"); REQUIRED;
        "`image`: a qcow2 image. `scsi_generic`: `/dev/sgN`, or a block device that is a SCSI device. `file`: the content \
            is served as raw bytes; an image format causes a warning";
        [File Image ScsiGeneric] { path }
    },
    device_key! { "data_file": Kind::Text("path of a file", "the path of a file or a block device");
        "for reading: the file that the image names";
        "external data file of the image. Required for writing, because an image from an untrusted source can name any file";
        [Image] { data_file }
    },
    device_key! { "named_files": NamedFiles::KIND;
        "`any`; `folder` for a disk or a job's target that a request to the API names";
        "allowed names of backing images and data files in the image and in its backing images. `any`: every file, logical unit, RBD image and NBD export. \
            `folder`: files in the folder of the image that names them. `none`: an image that names a file is refused";
        [Image] { named_files }
    },
    device_key! { "cache": CacheMode::KIND; "`none`";
        "`none`: O_DIRECT. `writeback`: the page cache holds written data until a flush. `writethrough`: each write is durable when it completes";
        [File Image] { cache } always
    },
    device_key! { "lock": FileLock::KIND; "`always`";
        "duration of the lock against other writers. `while-active`: only while clients or jobs use the disk, so that another daemon \
            may open it for a [live migration](migration.md#two-daemons)";
        [File Image] { lock }
    },
    key! { "lock_timeout": Kind::Number("seconds", 0..=DAY); "`0`"; RunTime::ADD_AGAIN, of &["file", "image", "rbd"];
        "with `lock = \"while-active\"`: time after which requests fail if another process has the lock. 0: requests wait for the lock";
        set errors.lock_timeout; get |disk| disk.errors.lock_timeout.value_unless(&0)
    },
    device_key! { "time": Kind::Text("`250us`, `50us-2ms` (any time between) or `exp:3ms` (exponentially distributed)", DelayTime::FORMS);
        REQUIRED; "duration of each I/O"; [Delay] { time }
    },
    device_key! { "storage": DelayStorage::KIND; "`null`"; "storage of the data"; [Delay] { storage } always },
    device_key! { "persist": Persist::KIND; "`none`";
        "`memfd`: the content survives the end of the daemon, also a kill, if the service manager stores descriptors: see \
            [RAM disks that stay](operations.md#ram-disks-that-stay)"; [Ram] { persist }
    },
];

/// Keys that every disk has, except for name and back end.
static COMMON_KEYS: &[DiskKey] = &[
    key! { "block_size": Kind::Numbers(&[512, 4096]); "512 bytes; of a block device, a remote unit or an NBD export its own"; RunTime::ADD_AGAIN;
        "logical block size; may be smaller than that of the device";
        both block_size
    },
    key! { "discard": DiscardMode::KIND; "`unmap`";
        RunTime::ADD_AGAIN, of &["ram", "null", "delay", "file", "image", "rbd", "iscsi", "nbd"];
        "effect of a discard. `unmap`: forwarded to the device. `zeroes`: the blocks read as zeroes; if the device does not \
            guarantee this, zeroes are written. `ignore`: none. `lunette disk mirror` and `disk commit` set it if clients need it";
        set discard; get |disk| disk.discard.value_unless(&DiscardMode::Unmap)
    },
    key! { "read_only": Kind::Boolean; "`false`"; RunTime::ADD_AGAIN; "refuses writes. Short form in a flag: `ro`"; both read_only },
    key! { "require": Kind::Boolean; "`false`"; RunTime::NEXT_START;
        "`true`: the daemon does not start without the disk. `false`: it starts, shows the disk as unavailable and retries it"; both require
    },
    key! {
        "serial": Kind::ShortText("at most 20 printable ASCII characters", "1 to 20 printable ASCII characters", SERIAL_MAX, |c| matches!(c, ' '..='~'));
        "from the disk's [identity](operations.md#identity)"; RunTime::ADD_AGAIN; "serial number reported to clients"; both serial
    },
    key! { "wwn": Kind::Text("16 hexadecimal digits, the first 2, 3 or 5", WWN_ALLOWED);
        "from the disk's [identity](operations.md#identity)"; RunTime::ADD_AGAIN;
        "NAA identifier. Set it only if two daemons serve one medium as one disk";
        read |key, reader, disk| disk.shown.wwn = key.parsed(reader, parse_wwn).map(|at| at.value);
        get |disk| Some(json!(format!("{:016x}", disk.shown.wwn?)))
    },
    key! { "physical_block_size": Kind::Size(": a power of two, 512 to 65536", 512..=PHYSICAL_MAX as u64);
        "that of the file or device"; RunTime::ADD_AGAIN; "physical block size reported to clients";
        both shown.physical_block_size
    },
    key! { "removable": Kind::Boolean; "`false`"; RunTime::ADD_AGAIN; "SCSI initiators may eject and load the medium"; both shown.removable },
    key! { "copy_across_targets": Kind::Boolean; "`false`"; RunTime::ADD_AGAIN;
        "EXTENDED COPY through targets without this disk may use it, by its NAA identifier"; both shown.copy_across_targets
    },
    key! { "iops": Kind::Number("requests per second", 1..=IOPS_MAX); NONE; DISK_LIMIT; "limit for the sum of all clients";
        both limits.iops
    },
    key! { "iops_burst": Kind::Number("requests", 1..=IOPS_MAX); "a twentieth of `iops`"; DISK_LIMIT;
        "requests admitted at once after a pause"; both limits.iops_burst
    },
    key! { "bandwidth": Kind::Size(", per second", 1..=SIZE_MAX); NONE; DISK_LIMIT;
        "limit for the sum of reads and writes of all clients";
        both limits.bandwidth
    },
    key! { "bandwidth_burst": Kind::Size("", 1..=SIZE_MAX); "a twentieth of `bandwidth`"; DISK_LIMIT;
        "bytes admitted at once after a pause";
        both limits.bandwidth_burst
    },
    key! { "on_error": OnError::KIND; "`report`; with `lock = \"while-active\"`: `stop`"; DISK_SET;
        "handling of failed I/Os. `report`: the client receives the error. `stop`: the I/O \
            [waits](operations.md#when-a-disk-fails). `enospc`: it waits if the device is full";
        read |key, reader, disk| {
            if disk.backend.takes_turns() {
                // Requests wait while another process has the lock.
                disk.errors.on_error = OnError::Stop;
            }
            key.set(reader, &mut disk.errors.on_error);
        };
        get |disk| disk.errors.on_error.value()
    },
    key! { "io_timeout": Kind::Number("seconds", 0..=DAY); "`0`"; DISK_SET;
        "time after which the device is asked to cancel an I/O. 0: never";
        set errors.io_timeout; get |disk| disk.errors.io_timeout.value_unless(&0)
    },
];

impl DiskConfig {
    /// Returns the values of the disk, in the order of its keys.
    pub fn values(&self) -> Vec<KeyValue> {
        key_values(disk_keys(), self)
    }

    /// Returns the values for the body of a request, which has fields of its own for name and kind.
    pub fn body_values(&self) -> Vec<(String, Value)> {
        let values = self.values().into_iter();
        let values = values.filter(|one| !matches!(one.name, "name" | "backend"));
        values.map(|one| (one.name.to_owned(), one.value)).collect()
    }

    /// Returns the values for a file: without the size of an image, which stores it.
    pub fn file_values(&self) -> Vec<KeyValue> {
        let is_image = self.backend.keeps_size();
        let is_written = |key: &&DiskKey| !(is_image && key.run_time == DISK_RESIZE);
        key_values(disk_keys().filter(is_written), self)
    }

    /// Returns the first differing key that makes this another disk than `other`.
    pub fn differs_in(&self, other: &DiskConfig) -> Option<&'static str> {
        let fixed = disk_keys().filter(|key| key.run_time == RunTime::ADD_AGAIN);
        let key = differing(fixed, self, other).next()?;
        Some(key.name)
    }
}

fn read_keys(reader: &mut Reader<'_, '_>, disk: &mut DiskConfig, which: fn(&DiskKey) -> bool) {
    for key in disk_keys().filter(|key| which(key)) {
        let device = reader.fields.text("backend").and_then(DeviceKind::named);
        let device = device.map(DeviceKind::word);
        if !key.is_of(device) {
            continue;
        }
        if key.default == REQUIRED && (key.of.is_empty() || device.is_some()) {
            reader.require(key.name, &key.kind.allowed());
        }
        (key.read)(key, reader, disk);
    }
}

/// Reads a disk.
pub fn read_disk(fields: &Fields, diagnostics: &mut Diagnostics) -> Draft<DiskConfig> {
    let mut reader = Reader::new(fields, "disk", diagnostics);
    let mut config = DiskConfig::default();
    read_keys(&mut reader, &mut config, |_| true);
    relate_limits(&mut reader);
    passthrough::relate(&mut reader, &config.backend);
    relate_discard(&mut reader, &config.backend);
    relate_size(&mut reader, &config);
    relate_block_sizes(&mut reader, &config);
    reader.finish(|key| {
        let key = disk_keys().find(|known| known.name == key)?;
        let (key, owner) = (key.name, key.of.first()?);
        Some(format!(
            "disk: `{key}` belongs to the back end `{owner}`, and this disk has another"
        ))
    });
    Draft {
        config,
        fields: fields.clone(),
    }
}

/// Reads the limits only.
pub fn read_limits(fields: &Fields, diagnostics: &mut Diagnostics) -> LimitsConfig {
    let mut reader = Reader::new(fields, "limits", diagnostics);
    let mut disk = DiskConfig::default();
    read_keys(&mut reader, &mut disk, |key| key.run_time == DISK_LIMIT);
    relate_limits(&mut reader);
    reader.finish(|_| None);
    disk.limits
}

/// Applies the keys that `lunette disk set` changes to a disk; other keys are unchanged.
pub fn read_settings(fields: &Fields, disk: &mut DiskConfig, diagnostics: &mut Diagnostics) {
    let mut reader = Reader::new(fields, "disk", diagnostics);
    read_keys(&mut reader, disk, |key| key.run_time == DISK_SET);
    reader.finish(|_| None);
}

/// Refuses `discard` if it has no effect: the daemon does not process commands of a pass-through unit, and no layer forwards the
/// reservations of a shared RBD image.
fn relate_discard(reader: &mut Reader<'_, '_>, backend: &BlockDeviceConfig) {
    let Some(location) = reader.valid("discard") else {
        return;
    };
    let other = match backend {
        BlockDeviceConfig::Iscsi(remote) if remote.passthrough.is_some() => "passthrough",
        BlockDeviceConfig::Rbd(rbd) if rbd.lock == RbdLock::Shared => "lock = \"shared\"",
        _ => return,
    };
    let message = format!("`discard` cannot be combined with `{other}`");
    reader
        .diagnostics
        .conflict(location, message, "remove `discard`");
}

/// Checks that a size is given if the back end needs it, and refuses it if it does not.
fn relate_size(reader: &mut Reader<'_, '_>, disk: &DiskConfig) {
    use DeviceKind::{Delay, File, Image, Iscsi, Nbd, Null, Ram, Rbd, ScsiGeneric};
    let Some(device) = reader.fields.text("backend").and_then(DeviceKind::named) else {
        return;
    };
    if matches!(device, Ram | Null | Delay) {
        reader.require("size", super::size::SIZE_ALLOWED);
    }
    let Some(location) = reader.valid("size") else {
        return;
    };
    let (owner, help) = match device {
        Ram | Null | Delay | File => {
            let size = Located::new(disk.backend.size().unwrap_or(0), location.clone());
            check_size(reader, &size, disk.block_size.unwrap_or(512));
            return;
        }
        Rbd => (
            "image determines the size",
            "change it with `lunette disk resize` or `rbd resize`",
        ),
        Image => (
            "image determines the size",
            "change it with `lunette disk resize`, or `lunette image resize` while it is not served",
        ),
        Nbd => (
            "server determines the size of the export",
            "resize it at its server",
        ),
        Iscsi | ScsiGeneric => (
            "logical unit determines the size",
            "resize it at its target",
        ),
    };
    let message = format!("`size`: not allowed, because the {owner}");
    let mistake = Mistake::new(MistakeKind::Key, location, message);
    reader.diagnostics.push(mistake.help(help));
}

/// Returns true if the size is a positive multiple of the block size.
pub fn check_size(reader: &mut Reader<'_, '_>, size: &Located<u64>, block_size: u32) -> bool {
    if size.value > 0 && size.value.is_multiple_of(u64::from(block_size)) {
        return true;
    }
    let message = format!(
        "`size`: {} bytes are not a whole number of blocks of {block_size} bytes",
        size.value
    );
    let allowed = format!("a multiple of {block_size}, at least {block_size}");
    reader.diagnostics.refuse(&size.location, message, allowed);
    false
}

/// Checks the limits. A burst without a rate is a mistake, because it has no effect.
fn relate_limits(reader: &mut Reader<'_, '_>) {
    for (rate, burst) in [("iops", "iops_burst"), ("bandwidth", "bandwidth_burst")] {
        if let (Some(location), None) = (reader.valid(burst), reader.valid(rate)) {
            let message = format!("`{burst}` needs `{rate}`");
            let help = format!("add `{rate}`, or remove `{burst}`");
            reader.diagnostics.conflict(location, message, help);
        }
    }
}

/// Refuses a physical block size that is no power of two, or smaller than the logical one.
fn relate_block_sizes(reader: &mut Reader<'_, '_>, disk: &DiskConfig) {
    let least = disk.block_size.unwrap_or(512);
    let physical = disk
        .shown
        .physical_block_size
        .zip(reader.location("physical_block_size"));
    if let Some((size, at)) = physical.filter(|(size, _)| !size.is_power_of_two() || *size < least)
    {
        let message = format!("`physical_block_size`: found {size}");
        let allowed = format!("a power of two from {least}, the block size, to {PHYSICAL_MAX}");
        reader.diagnostics.refuse(at, message, allowed);
    }
}

/// Parses an NAA identifier of 64 bits, as `lsblk`, udev and initiators print it, also with prefix `naa.` or `0x`.
fn parse_wwn(text: &str) -> Result<u64, String> {
    let mut prefixes = ["naa.", "0x"].into_iter();
    let digits = prefixes
        .find_map(|prefix| text.strip_prefix(prefix))
        .unwrap_or(text);
    let all_hexadecimal = digits.len() == 16 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    let wwn = u64::from_str_radix(digits, 16).ok();
    let wwn = wwn.filter(|wwn| all_hexadecimal && matches!(wwn >> 60, 2 | 3 | 5));
    wwn.ok_or_else(String::new)
}

#[cfg(test)]
mod tests {
    use crate::{Flags, Surroundings, parse};

    #[test]
    fn limit_of_zero_names_the_way_to_remove_it() {
        let flags = Flags {
            disk: vec!["d0=ram:1M,bandwidth=0".to_owned()],
            ..Flags::default()
        };
        let found = parse(None, &flags, &Surroundings::of_this_process()).unwrap_err();
        assert!(found.to_string().contains("remove the key"), "{found}");
    }

    #[test]
    fn wrong_value_is_reported_once() {
        for options in [
            "ram:1M,iops_burst=0",
            "iscsi://h/iqn.2026-11.org.example:t0/0,pr=x",
            "iscsi://h/iqn.2026-11.org.example:t0/0,passthrough,discard=x",
        ] {
            let disk = vec![format!("d0={options}")];
            let flags = Flags {
                disk,
                ..Flags::default()
            };
            let found = parse(None, &flags, &Surroundings::of_this_process()).unwrap_err();
            assert_eq!(found.iter().count(), 1, "{found}");
        }
    }
}

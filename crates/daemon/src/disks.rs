//! Opens disks from their configuration: creates each block device with all its options.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use bdev::{BlockDevice, Disk, DiskOptions, ImageFormat, OpenError, RateLimits};

use block::Identity;
use scsi::Store;

use crate::bitmaps::{FileStamp, OpenedStamps};
use crate::block_devices;
use crate::identities::{self, Claim, Identities, Unwritten};
use crate::objects::ToClose;
use crate::unit_records;
use config::{BlockDeviceConfig, Config, DiskConfig, LimitsConfig};

pub(crate) type Disks = HashMap<String, Arc<Disk>>;

/// A device without a disk yet. Dropping it removes a file that was created for it.
pub struct OpenDevice {
    device: Option<Arc<dyn BlockDevice>>,
    /// Identity on the medium, or the reason why it is unusable; `None` without a medium.
    claim: Option<Result<Claim, String>>,
    stamps: OpenedStamps,
}

impl OpenDevice {
    /// Opens the device of a disk and reads its identity. May block.
    ///
    /// # Errors
    /// The reason and a hint.
    pub(crate) fn open(config: &DiskConfig, store: &dyn Store) -> Result<OpenDevice, OpenError> {
        let known = unit_records::load(config, store)?;
        let stamp = || FileStamp::of(&block_devices::files_of(&config.backend));
        let before = stamp();
        let device = block_devices::open_known(config, known.clone())?;
        unit_records::check(config, &known, &*device)?;
        let claim = identities::claim(&config.name, &*device, store);
        let device = Some(device);
        Ok(OpenDevice {
            device,
            claim,
            stamps: OpenedStamps {
                before,
                after: stamp(),
            },
        })
    }
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        if let Some(device) = &self.device {
            device.remove_if_created();
        }
    }
}

/// An attempt to open the device of a disk: the configuration used, and the result.
pub type Attempt = (DiskConfig, Result<OpenDevice, OpenError>);

pub type Devices = HashMap<String, Attempt>;

/// A disk that was opened.
struct Opened {
    disk: Arc<Disk>,
    claim: Claim,
    /// Place of its storage.
    place: String,
    stamps: OpenedStamps,
}

/// Result of opening several disks.
#[derive(Default)]
pub(crate) struct Opening {
    opened: Vec<Opened>,
    /// Names of disks that cannot be opened, with the reason.
    pub failed: Vec<(String, String)>,
    /// Devices that no disk has.
    pub discarded: Vec<ToClose>,
}

impl Opening {
    pub fn disks(&self) -> Disks {
        let disks = self.opened.iter();
        disks
            .map(|one| (one.disk.name().to_owned(), one.disk.clone()))
            .collect()
    }

    /// Returns the disks with the states of their files.
    pub fn stamped(&self) -> impl Iterator<Item = (&Arc<Disk>, &OpenedStamps)> {
        self.opened.iter().map(|one| (&one.disk, &one.stamps))
    }

    pub fn reasons(&self) -> Vec<String> {
        let failed = self.failed.iter();
        failed
            .map(|(name, reason)| format!("disk {name}: {reason}"))
            .collect()
    }

    /// Returns the identities to write, each with the place of its storage.
    pub fn unwritten(&self) -> Vec<(String, Unwritten)> {
        let opened = self.opened.iter();
        let unwritten = opened.filter_map(|one| {
            let unwritten = Unwritten::of(&one.disk, &one.claim)?;
            Some((one.place.clone(), unwritten))
        });
        unwritten.collect()
    }
}

/// Opens disks in addition to `known`. `ready` has devices that are open already.
pub(crate) fn open_all<'a>(
    configs: impl IntoIterator<Item = &'a DiskConfig>,
    mut ready: Devices,
    known: &Disks,
    identities: &Identities,
    store: &dyn Store,
) -> Opening {
    let mut opening = Opening::default();
    let (mut devices, mut claims) = (Vec::new(), Vec::new());
    for config in configs {
        let ready = ready.remove(&config.name);
        let opened = match ready {
            Some((opened_with, opened)) if opened_with == *config => Some(opened),
            Some((_, Ok(unused))) => {
                opening.discarded.push(ToClose::Unused(unused));
                None
            }
            Some((_, Err(_))) | None => None,
        };
        match opened.unwrap_or_else(|| OpenDevice::open(config, store)) {
            Ok(mut opened) => {
                let claim = opened.claim.take();
                match claim.unwrap_or_else(|| identities.claim_volatile(config)) {
                    Ok(claim) => {
                        if let Some(device) = opened.device.take() {
                            claims.push((config, claim));
                            devices.push((device, std::mem::take(&mut opened.stamps)));
                        }
                    }
                    Err(reason) => {
                        opening.discarded.push(ToClose::Unused(opened));
                        opening.failed.push((config.name.clone(), reason));
                    }
                }
            }
            Err(error) => opening
                .failed
                .push((config.name.clone(), error.to_string())),
        }
    }
    let mut refused = Vec::new();
    identities::resolve_conflicts(&mut claims, known, &mut refused);
    let names: HashSet<String> = refused.iter().map(|(name, _)| name.clone()).collect();
    opening.failed.extend(refused);
    for ((device, stamps), (config, claim)) in devices.into_iter().zip(claims) {
        if names.contains(&config.name) {
            opening.discarded.push(ToClose::Refused(device));
            continue;
        }
        match open(config, claim.identity, device.clone()) {
            Ok(disk) => {
                let place = config.backend.blocking_storage().unwrap_or_default();
                opening.opened.push(Opened {
                    disk: Arc::new(disk),
                    claim,
                    place,
                    stamps,
                });
            }
            Err(error) => {
                opening.discarded.push(ToClose::Refused(device));
                opening
                    .failed
                    .push((config.name.clone(), error.to_string()));
            }
        }
    }
    let unused = ready.into_values().filter_map(|(_, opened)| opened.ok());
    opening.discarded.extend(unused.map(ToClose::Unused));
    opening
}

/// Returns warnings about valid configurations: images of other formats served as raw bytes, missing files, targets without initiators, NBD
/// exports without TLS, and RAM disks that are larger than the memory.
pub fn warnings(config: &Config) -> Vec<String> {
    let disks = config.disks.iter();
    let warnings = disks.filter_map(|disk| {
        let BlockDeviceConfig::File { path, size, .. } = &disk.backend else {
            return None;
        };
        let warning = match ImageFormat::of_path(path) {
            Some(format) => format.warning(),
            None if size.is_none() && matches!(path.try_exists(), Ok(false)) => {
                "the file does not exist, and the disk is unavailable until it does; hint: set a size to create it, or correct the path"
                    .to_owned()
            }
            None => return None,
        };
        Some(format!("disk {}: {}: {warning}", disk.name, path.display()))
    });
    let exports = config.exports().filter_map(|export| {
        let warning = export.warning(config.tls.nbd_client_ca.is_some())?;
        Some(format!("{} {}: {warning}", export.kind(), export.name))
    });
    let memory = memory_warning(config, rustix::system::sysinfo());
    warnings.chain(exports).chain(memory).collect()
}

/// Logs a warning if the RAM disks of a configuration are larger than the memory of the host, and some of them are new.
pub(crate) fn warn_of_memory(config: &Config, added: &[DiskConfig]) {
    let is_ram = |disk: &DiskConfig| matches!(disk.backend, BlockDeviceConfig::Ram { .. });
    if added.iter().any(is_ram)
        && let Some(warning) = memory_warning(config, rustix::system::sysinfo())
    {
        tracing::warn!("{warning}");
    }
}

/// Returns a warning if the RAM disks are larger than the memory of the host.
fn memory_warning(config: &Config, host: rustix::system::Sysinfo) -> Option<String> {
    let sizes = config.disks.iter().map(|disk| match disk.backend {
        BlockDeviceConfig::Ram { size, .. } => size,
        _ => 0,
    });
    let wanted = sizes.fold(0, u64::saturating_add);
    // `totalram` has the width of a machine word.
    #[allow(clippy::useless_conversion)]
    let memory = u64::from(host.totalram).saturating_mul(u64::from(host.mem_unit));
    (wanted > memory).then(|| {
        let gib = |bytes: u64| bytes.div_ceil(1 << 30);
        let (wanted, memory) = (gib(wanted), gib(memory));
        format!(
            "RAM disks have {wanted} GiB, and this host {memory} GiB of memory: the kernel ends the daemon when clients have written more than \
             that; hint: use smaller RAM disks, or files"
        )
    })
}

fn open(
    config: &DiskConfig,
    identity: Identity,
    device: Arc<dyn BlockDevice>,
) -> Result<Disk, OpenError> {
    let options = DiskOptions {
        identity: Some(identity),
        serial: config.serial.as_deref(),
        wwn: config.shown.wwn,
        physical_block_size: config.shown.physical_block_size,
        removable: config.shown.removable,
        copy_across_targets: config.shown.copy_across_targets,
    };
    let disk = Disk::with_options(&config.name, options, device)?;
    disk.set_limits(limits(&config.limits));
    disk.set_error_policy(config.errors);
    Ok(disk)
}

/// Returns the limits of a disk ([`Disk::set_limits`]) with defaults filled in.
pub(crate) fn limits(config: &LimitsConfig) -> RateLimits {
    let burst = |burst: Option<u64>, rate: Option<u64>| {
        burst.unwrap_or(RateLimits::usual_burst(rate.unwrap_or(0)))
    };
    RateLimits {
        iops: config.iops.unwrap_or(0),
        iops_burst: burst(config.iops_burst, config.iops),
        bandwidth: config.bandwidth.unwrap_or(0),
        bandwidth_burst: burst(config.bandwidth_burst, config.bandwidth),
    }
}

#[cfg(test)]
mod tests {
    use scsi::MemoryStore;

    use super::*;
    use config::{Flags, Surroundings, parse};

    fn opened(flags: &[String]) -> (Disks, Vec<String>) {
        let flags = Flags {
            disk: flags.to_vec(),
            ..Flags::default()
        };
        let config = parse(None, &flags, &Surroundings::of_this_process());
        let config = config.unwrap_or_else(|mistakes| panic!("{mistakes}"));
        let (known, store) = (Disks::new(), MemoryStore::default());
        let identities = Identities::default();
        let opening = open_all(&config.disks, Devices::new(), &known, &identities, &store);
        (opening.disks(), opening.reasons())
    }

    #[test]
    fn every_back_end_honours_size_block_size_read_only_and_serial() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("f.raw");
        for device in [
            "ram:1M",
            "null:1M",
            "delay:1ms,size=1M",
            "delay:exp:50us,size=1M,storage=ram",
            &format!("file:{},size=1M", file.display()),
        ] {
            for (block_size, read_only) in [(512, "off"), (4096, "off"), (4096, "on")] {
                let flag = format!("d={device},block_size={block_size},ro={read_only},serial=S-1");
                let flag = flag
                    + ",wwn=3a5b000000000001,physical_block_size=8192,removable=on,copy_across_targets"
                    + ",on_error=enospc,io_timeout=30,iops=1000,bandwidth=1M,bandwidth_burst=2M";
                let (disks, reasons) = opened(std::slice::from_ref(&flag));
                assert_eq!(reasons, [""; 0], "{flag}");
                let info = disks["d"].info();
                assert_eq!(info.geometry.capacity_bytes(), 1 << 20, "{flag}");
                assert_eq!(info.geometry.block_size(), block_size, "{flag}");
                assert_eq!(info.read_only, read_only == "on", "{flag}");
                assert_eq!(info.serial, "S-1", "{flag}");
                assert_eq!(info.naa, 0x3a5b_0000_0000_0001, "{flag}");
                assert_eq!(info.physical_block_size, 8192, "{flag}");
                assert!(disks["d"].is_removable(), "{flag}");
                assert!(disks["d"].may_be_copied_across_targets(), "{flag}");
                let limits = RateLimits {
                    iops: 1000,
                    iops_burst: 50,
                    bandwidth: 1 << 20,
                    bandwidth_burst: 2 << 20,
                };
                assert_eq!(disks["d"].throttle().limits(), limits, "{flag}");
                assert_eq!(disks["d"].on_error(), bdev::OnError::Enospc, "{flag}");
                let timeout = disks["d"].io_timeout();
                assert_eq!(timeout, Some(std::time::Duration::from_secs(30)), "{flag}");
            }
        }
    }

    #[test]
    fn ram_disks_larger_than_the_memory_are_warned_of() {
        let memory_of = |size: &str| {
            let flags = Flags {
                disk: vec![format!("d=ram:{size}")],
                ..Flags::default()
            };
            let config = parse(None, &flags, &Surroundings::of_this_process());
            warnings(&config.unwrap_or_else(|mistakes| panic!("{mistakes}")))
        };
        assert_eq!(memory_of("1M"), [""; 0]);
        let found = memory_of("1P");
        assert!(
            found[0].starts_with("RAM disks have 1048576 GiB"),
            "{found:?}"
        );
    }

    #[test]
    fn failed_disk_is_named_and_others_are_checked() {
        let (disks, reasons) = opened(&[
            "a=file:/nonexistent/a.raw,size=1M".to_owned(),
            "b=ram:1M".to_owned(),
            "c=file:/nonexistent/c.raw,size=1M".to_owned(),
        ]);
        assert_eq!(disks.len(), 1);
        assert_eq!(reasons.len(), 2, "{reasons:?}");
        assert!(reasons[0].starts_with("disk a: ") && reasons[0].contains("/nonexistent/a.raw"));
    }
}

//! Accelerator of guests: KVM if it works, otherwise emulation (TCG).
//!
//! The presence of `/dev/kvm` is not sufficient: on some machines virtual machines can be created but hang. Therefore a guest is booted
//! once with a short timeout, and the result is cached until the host reboots.

use crate::guest::GuestBuilder;
use crate::initramfs::Equipment;
use crate::places::guest_directory;
use anyhow::{Result, bail};
use std::fs::OpenOptions;
use std::sync::OnceLock;
use std::time::Duration;

/// Accelerator of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// Hardware virtualization.
    Kvm,
    /// QEMU's translator: slow, available everywhere.
    Tcg,
}

/// Timeout of the probe; with a working KVM a guest boots in a second.
const PROBE_LIMIT: Duration = Duration::from_secs(8);

impl Accelerator {
    /// Returns the accelerator: `$LUNETTE_ACCEL` (`kvm` or `tcg`), otherwise the result of the probe.
    pub fn detect() -> Result<Accelerator> {
        match std::env::var("LUNETTE_ACCEL").as_deref() {
            Ok("kvm") => return Ok(Accelerator::Kvm),
            Ok("tcg") => return Ok(Accelerator::Tcg),
            Ok(other) => bail!("LUNETTE_ACCEL is {other:?}, allowed are kvm and tcg"),
            Err(_) => {}
        }
        static DETECTED: OnceLock<Accelerator> = OnceLock::new();
        Ok(*DETECTED.get_or_init(cached_or_probed))
    }

    /// Returns the name for users.
    pub fn word(self) -> &'static str {
        match self {
            Accelerator::Kvm => "KVM",
            Accelerator::Tcg => "TCG",
        }
    }

    /// Returns the value of QEMU's `-accel`.
    pub fn qemu_option(self) -> &'static str {
        match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg,thread=multi",
        }
    }
}

fn cached_or_probed() -> Accelerator {
    if OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_err()
    {
        return Accelerator::Tcg;
    }
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let cache_file = guest_directory().join("accelerator");
    match std::fs::read_to_string(&cache_file)
        .unwrap_or_default()
        .split_once(' ')
    {
        Some(("kvm", boot)) if boot == boot_id => return Accelerator::Kvm,
        Some(("tcg", boot)) if boot == boot_id => return Accelerator::Tcg,
        _ => {}
    }
    let has_kvm = GuestBuilder::new("kvm-probe")
        .accelerator(Accelerator::Kvm)
        .equipment(Equipment::User)
        .boot_limit(PROBE_LIMIT)
        .boot()
        .is_ok();
    let (found, word) = if has_kvm {
        (Accelerator::Kvm, "kvm")
    } else {
        (Accelerator::Tcg, "tcg")
    };
    // The cache only saves the next probe, so a failed write is ignored.
    std::fs::write(cache_file, format!("{word} {boot_id}")).unwrap_or(());
    found
}

//! Checks of the targets in this host's kernel that a plan uses with `via=vhost-scsi`. QEMU reports only that it cannot start.

use crate::topology::{PORTAL_GROUP, Plan};
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::Path;

/// Device of the kernel's module.
const DEVICE: &str = "/dev/vhost-scsi";
/// Targets in configfs.
const TARGETS: &str = "/sys/kernel/config/target/vhost";

/// Checks that this host's kernel has the targets and LUNs of a plan, and that this user may use them.
///
/// # Errors
/// The first missing object, with the command that creates it.
pub fn check(plan: &Plan) -> Result<()> {
    for (index, device) in plan.devices.iter().enumerate() {
        if let Some(wwpn) = &device.wwpn {
            let luns = plan.disks_of(index).count();
            check_device(Path::new(DEVICE))
                .and_then(|()| check_target(Path::new(TARGETS), wwpn, luns))
                .with_context(|| format!("controller {} with via=vhost-scsi", device.id))?;
        }
    }
    Ok(())
}

fn check_device(device: &Path) -> Result<()> {
    use std::io::ErrorKind;
    let opened = fs::File::options().read(true).write(true).open(device);
    let Err(error) = opened else {
        return Ok(());
    };
    let path = device.display();
    let hint = match error.kind() {
        ErrorKind::NotFound => "modprobe vhost_scsi, on a kernel with CONFIG_VHOST_SCSI".to_owned(),
        ErrorKind::PermissionDenied => format!("run as root, or setfacl -m u:USER:rw {path}"),
        _ => "see the kernel's log: dmesg".to_owned(),
    };
    bail!("cannot open {path}: {error}; hint: {hint}")
}

fn check_target(targets: &Path, wwpn: &str, luns: usize) -> Result<()> {
    let group = targets.join(format!("{wwpn}/tpgt_{PORTAL_GROUP}"));
    let path = group.display();
    if let Err(error) = fs::metadata(&group) {
        let entries = fs::read_dir(targets).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let others: Vec<String> = names.filter(|name| name.starts_with("naa.")).collect();
        let others = match others.as_slice() {
            [] => "no targets".to_owned(),
            others => format!("the targets {}", others.join(", ")),
        };
        bail!(
            "no portal group {PORTAL_GROUP} of target {wwpn}: {path}: {error}; {} has {others}; hint: targetcli /vhost create {wwpn}",
            targets.display()
        );
    }
    // Without a nexus the kernel ignores the portal group.
    let nexus = group.join("nexus");
    fs::read_to_string(&nexus).with_context(|| {
        let nexus = nexus.display();
        format!("portal group {PORTAL_GROUP} of target {wwpn} has no nexus: cannot read {nexus}; hint: echo naa.5001405000000001 >{nexus}")
    })?;
    for lun in 0..luns {
        let unit = group.join(format!("lun/lun_{lun}"));
        ensure!(
            unit.is_dir(),
            "target {wwpn} has no LUN {lun}, but the topology has {luns}: {} is missing; hint: targetcli /vhost/{wwpn}/tpg{PORTAL_GROUP}/luns create \
             /backstores/block/NAME",
            unit.display()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const WWPN: &str = "naa.5001405bf0e7a2c4";

    #[test]
    fn a_missing_module_is_named_with_its_command() {
        let folder = tempfile::tempdir().unwrap();
        let device = folder.path().join("vhost-scsi");
        let error = check_device(&device).unwrap_err().to_string();
        assert!(
            error.contains("vhost-scsi: No such file")
                && error.contains("hint: modprobe vhost_scsi"),
            "{error}"
        );
        fs::write(&device, "").unwrap();
        check_device(&device).unwrap();
    }

    #[test]
    fn each_missing_part_of_a_target_has_its_command() {
        let folder = tempfile::tempdir().unwrap();
        let targets = folder.path();
        let make = |path: &str| fs::create_dir_all(targets.join(path)).unwrap();
        let refused = |missing: &str, hint: &str| {
            let error = format!("{:#}", check_target(targets, WWPN, 2).unwrap_err());
            assert!(error.contains(missing) && error.contains(hint), "{error}");
        };
        let create = "hint: targetcli /vhost create naa.5001405bf0e7a2c4";
        refused("has no targets", create);
        make("naa.5001405aaaaaaaaa");
        refused("has the targets naa.5001405aaaaaaaaa;", create);
        make("naa.5001405bf0e7a2c4/tpgt_1/lun/lun_0");
        refused("has no nexus", "hint: echo naa.5001405000000001 >");
        let nexus = targets.join("naa.5001405bf0e7a2c4/tpgt_1/nexus");
        fs::write(nexus, "naa.5001405000000001").unwrap();
        refused(
            "has no LUN 1, but the topology has 2",
            "/tpg1/luns create /backstores/block/NAME",
        );
        make("naa.5001405bf0e7a2c4/tpgt_1/lun/lun_1");
        check_target(targets, WWPN, 2).unwrap();
    }
}

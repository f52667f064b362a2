//! Name under which an image records its backing file.

use bdev::{BackingName, BlockDevice, ImageDevice};
use config::BlockDeviceConfig;

use crate::objects::Refusal;

/// Returns the device of a disk as an image with a backing image.
///
/// # Errors
/// The disk is no image, or has no backing image.
pub(super) fn backed_image<'a>(
    disk: &str,
    device: &'a dyn BlockDevice,
) -> Result<&'a dyn ImageDevice, Refusal> {
    let image = device.capabilities().image;
    let backed = image.filter(|image| image.backing().is_some());
    backed.ok_or_else(|| no_backing(disk))
}

/// The refusal of a job that needs a backing image.
pub(super) fn no_backing(disk: &str) -> Refusal {
    Refusal::conflict(
        format!("disk {disk} has no backing image"),
        "lunette disk snapshot makes an image with a backing image",
    )
}

/// Reason why a device cannot be a backing file, and a hint.
pub(super) type Obstacle = (String, &'static str);

pub(super) fn backing_name(backend: &BlockDeviceConfig) -> Result<BackingName, Obstacle> {
    match backend {
        BlockDeviceConfig::File { path, .. } | BlockDeviceConfig::Image { path, .. } => {
            let path = std::path::absolute(path).unwrap_or(path.clone());
            let Some(name) = path.to_str().map(str::to_owned) else {
                return Err((
                    "the path of its file is not UTF-8, so an image cannot name it".to_owned(),
                    "rename it while the disk is not served",
                ));
            };
            let format = match backend {
                BlockDeviceConfig::Image { .. } => "qcow2",
                _ => "raw",
            };
            Ok(BackingName { name, format })
        }
        BlockDeviceConfig::Rbd(rbd) if rbd.lock == bdev::RbdLock::Shared => Err((
            "other clients may write its RBD image (lock=shared), but a backing image must not change".to_owned(),
            "create a snapshot with rbd snap create, and an image over that snapshot",
        )),
        BlockDeviceConfig::Rbd(rbd) => Ok(BackingName::of_rbd(&rbd.image, &rbd.cluster)),
        BlockDeviceConfig::Iscsi(remote) if remote.passthrough.is_some() => Err((
            "it uses passthrough, so its unit can change under an image".to_owned(),
            "take snapshots of that unit at its target",
        )),
        BlockDeviceConfig::Iscsi(remote) => {
            let unit = remote.unit.as_ref().filter(|unit| unit.user.is_none());
            unit.map(BackingName::of_unit).ok_or((
                "its target needs CHAP, but an image cannot hold the secret".to_owned(),
                "admit this host's initiator without CHAP, or copy the disk into an image with lunette disk mirror",
            ))
        }
        BlockDeviceConfig::Nbd(nbd) => Ok(BackingName::of_export(&nbd.address)),
        other => Err((
            format!("a {} disk cannot be a backing image", other.word()),
            "move the disk into an image with lunette disk mirror",
        )),
    }
}

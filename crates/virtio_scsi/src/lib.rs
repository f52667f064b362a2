//! virtio-scsi device.

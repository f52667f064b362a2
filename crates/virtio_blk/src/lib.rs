//! virtio-blk device.

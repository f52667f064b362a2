//! virtio split and packed rings, device and driver side.

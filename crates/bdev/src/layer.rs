//! A block device over another one.

use std::io;
use std::sync::Arc;

use block::{Capacity, DiskInfo};

use crate::{Attach, BlockDevice, Capabilities, ImageDevice, IoChannel};

/// A block device over `inner` with channels of its own. Size and most capabilities are those of the inner device.
pub trait Layer: Send + Sync {
    /// Returns the device below.
    fn inner(&self) -> &dyn BlockDevice;

    /// See [`BlockDevice::kind`].
    fn layer_kind(&self) -> &'static str;

    /// Returns the info of the device below as shown by this layer.
    fn layer_info(&self, inner: DiskInfo) -> DiskInfo {
        inner
    }

    /// See [`BlockDevice::attach`].
    ///
    /// # Errors
    /// As there.
    fn attach_layer(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>>;
}

impl<L: Layer> BlockDevice for L {
    fn info(&self) -> DiskInfo {
        self.layer_info(self.inner().info())
    }

    fn capacity(&self) -> &Arc<Capacity> {
        self.inner().capacity()
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        self.inner().set_size(bytes)
    }

    fn kind(&self) -> &'static str {
        self.layer_kind()
    }

    fn below(&self) -> Option<&dyn BlockDevice> {
        Some(self.inner())
    }

    /// Lists every field: a new capability needs a decision here.
    fn capabilities(&self) -> Capabilities<'_> {
        let inner = self.inner().capabilities();
        Capabilities {
            medium: inner.medium,
            files: inner.files,
            lockable: inner.lockable,
            turns: inner.turns,
            // Jobs on the image below would bypass the layer.
            image: None,
            remote: inner.remote,
            // The layer may change the visible content.
            shared_state: None,
            removable: inner.removable,
        }
    }

    fn attach(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        self.attach_layer(attach)
    }
}

/// Calls `visit` for a device and for all layers and backing images below it, from the top down.
pub(crate) fn visit_stack(top: &dyn BlockDevice, mut visit: impl FnMut(&dyn BlockDevice)) {
    let mut backing = visit_layers(top, &mut visit);
    while let Some(device) = backing {
        backing = visit_layers(&*device, &mut visit);
    }
}

/// Visits a device and the layers below it. Returns the backing image of the lowest one.
fn visit_layers(
    top: &dyn BlockDevice,
    visit: &mut impl FnMut(&dyn BlockDevice),
) -> Option<Arc<dyn BlockDevice>> {
    let mut backing = None;
    for device in std::iter::successors(Some(top), |device| device.below()) {
        visit(device);
        backing = device.capabilities().image.and_then(ImageDevice::backing);
    }
    backing
}

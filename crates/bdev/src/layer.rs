//! A block device over another one.

use std::io;
use std::sync::Arc;

use block::{Capacity, DiskInfo};

use crate::{Attach, BlockDevice, DiskState, IoChannel, Medium};

/// A block device over `inner` with channels of its own. Other methods are those of the inner device.
///
/// State shared among daemons ([`BlockDevice::shared_state`]) is not passed on: a layer may change the visible content.
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

    fn on_change(&self, changed: Box<dyn Fn() + Send + Sync>) {
        self.inner().on_change(changed);
    }

    fn found_size(&self) -> io::Result<Option<u64>> {
        self.inner().found_size()
    }

    fn known_size(&self) -> io::Result<Option<u64>> {
        self.inner().known_size()
    }

    fn remove_if_created(&self) {
        self.inner().remove_if_created();
    }

    fn forget(&self) -> bool {
        self.inner().forget()
    }

    fn check_file(&self) -> io::Result<()> {
        self.inner().check_file()
    }

    fn give_up_writing(&self) -> io::Result<()> {
        self.inner().give_up_writing()
    }

    fn release_locks(&self) -> io::Result<()> {
        self.inner().release_locks()
    }

    fn take_locks(&self) -> io::Result<()> {
        self.inner().take_locks()
    }

    fn medium(&self) -> Option<&dyn Medium> {
        self.inner().medium()
    }

    fn state(&self) -> DiskState {
        self.inner().state()
    }

    fn kind(&self) -> &'static str {
        self.layer_kind()
    }

    fn below(&self) -> Option<&dyn BlockDevice> {
        Some(self.inner())
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
        backing = device.backing();
    }
    backing
}

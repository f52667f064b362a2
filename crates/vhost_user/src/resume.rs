//! Refuses queues that resume on another disk: their requests are meant for the old disk.
//!
//! virtio-blk cannot notify a driver of a replaced disk. After the disk of an export has changed, a queue is served only if its driver
//! starts it from the beginning. The check runs on the session's thread when a queue starts.

use std::collections::BTreeSet;

use virtio_device::VirtioDevice;

/// Decides which queues of a session may resume.
pub(crate) struct ResumeCheck {
    /// The disk differs from that of the export's last driver.
    is_replaced: bool,
    /// Queues that were started from the beginning in this session: their driver uses the new disk.
    restarted: BTreeSet<u16>,
}

impl ResumeCheck {
    pub fn new(device: &dyn VirtioDevice) -> ResumeCheck {
        ResumeCheck {
            is_replaced: device.is_replaced(),
            restarted: BTreeSet::new(),
        }
    }

    /// Checks queue `index` at its start; `resumes` returns whether it was in use before.
    ///
    /// # Errors
    /// Returns a description if it resumes on another disk.
    pub fn start(
        &mut self,
        index: u16,
        device: &dyn VirtioDevice,
        resumes: impl FnOnce() -> bool,
    ) -> Result<(), String> {
        if self.is_replaced && !self.restarted.contains(&index) {
            if resumes() {
                device.driver_resumes();
                return Err(format!(
                    "queue {index} cannot resume: the export's disk was replaced after its driver started; hint: reset or restart the virtual machine, or restore the export's disk"
                ));
            }
            self.restarted.insert(index);
        }
        device.driver_started();
        Ok(())
    }
}

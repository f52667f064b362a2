//! Refuses queues that resume on another disk: what is in them was meant for the disk before.
//!
//! virtio-blk cannot tell a driver that its disk is another one. After the disk of an export has changed, a queue is served only
//! if its driver starts it anew. The check runs on the session's thread, when a queue starts.

use std::collections::BTreeSet;

use virtio_device::VirtioDevice;

/// Which queues of a session may resume.
pub(crate) struct ResumeCheck {
    /// The disk is another one than that of the export's last driver.
    is_replaced: bool,
    /// Queues that were started anew in this session: they know the disk.
    started_anew: BTreeSet<u16>,
}

impl ResumeCheck {
    pub fn new(device: &dyn VirtioDevice) -> ResumeCheck {
        ResumeCheck {
            is_replaced: device.is_replaced(),
            started_anew: BTreeSet::new(),
        }
    }

    /// Queue `index` starts; `resumes` says whether it was in use before.
    ///
    /// # Errors
    /// When it resumes on another disk, in words.
    pub fn start(
        &mut self,
        index: u16,
        device: &dyn VirtioDevice,
        resumes: impl FnOnce() -> bool,
    ) -> Result<(), String> {
        if self.is_replaced && !self.started_anew.contains(&index) {
            if resumes() {
                device.driver_resumes();
                return Err(format!(
                    "queue {index} resumes, but the export has another disk since its driver started; \
                     hint: reset or restart the virtual machine, or give the export its disk back"
                ));
            }
            self.started_anew.insert(index);
        }
        device.driver_started();
        Ok(())
    }
}

//! A control group whose processes the kernel kills when they need more memory than a limit. For tests that run as root.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use vm::wait_until;

/// The memory controller of cgroup v1.
const V1: &str = "/sys/fs/cgroup/memory";
/// The hierarchy of cgroup v2.
const V2: &str = "/sys/fs/cgroup";

/// A control group. Removed on drop, when its processes have ended.
pub struct MemoryGroup {
    folder: PathBuf,
    limit: &'static str,
}

impl MemoryGroup {
    /// Creates a group. Returns `None` if this process lacks the permission, or if the kernel has no memory controller.
    pub fn new() -> Option<MemoryGroup> {
        let name = format!("lunette-test-{}", std::process::id());
        let is_v1 = Path::new(V1).join("memory.limit_in_bytes").exists();
        let (parent, limit) = match is_v1 {
            true => (V1, "memory.limit_in_bytes"),
            false => (V2, "memory.max"),
        };
        let folder = Path::new(parent).join(name);
        if !is_v1 {
            // The kernel refuses this if the controller is already enabled or does not exist.
            fs::write(Path::new(V2).join("cgroup.subtree_control"), "+memory").ok();
        }
        fs::create_dir(&folder).ok()?;
        let group = MemoryGroup { folder, limit };
        group.folder.join(group.limit).exists().then_some(group)
    }

    /// Moves a process into the group, and limits the memory that it gets from now on. It does not swap.
    ///
    /// # Errors
    /// The kernel refuses the move or the limit.
    pub fn limit(&self, process: u32, bytes: u64) -> Result<()> {
        // The first is cgroup v1, the second v2.
        for (name, value) in [("memory.swappiness", "0"), ("memory.swap.max", "0")] {
            let file = self.folder.join(name);
            if file.exists() {
                fs::write(file, value)?;
            }
        }
        fs::write(self.folder.join("cgroup.procs"), process.to_string())?;
        fs::write(self.folder.join(self.limit), bytes.to_string())?;
        Ok(())
    }

    /// Lifts the limit.
    ///
    /// # Errors
    /// The kernel refuses the new limit.
    pub fn lift(&self) -> Result<()> {
        let none = if self.limit == "memory.max" {
            "max"
        } else {
            "-1"
        };
        Ok(fs::write(self.folder.join(self.limit), none)?)
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // Busy for a moment after the end of the last process.
        let removed = || fs::remove_dir(&self.folder).ok();
        wait_until(Duration::from_secs(5), removed);
    }
}

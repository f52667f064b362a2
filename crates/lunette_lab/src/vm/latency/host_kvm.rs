//! Time in the host's KVM between a guest's notification and its interrupt, from the host's tracepoints. Requires root.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::trace::{Event, events};

const TRACEFS: &str = "/sys/kernel/tracing";
/// Exits by a write to a device's notification register, and interrupt messages. Intel processors have the first kind of exit, AMD's and
/// older ones the others.
const EVENTS: [&str; 5] = [
    "kvm/kvm_fast_mmio",
    "kvm/kvm_mmio",
    "kvm/kvm_pio",
    "kvm/kvm_msi_set_irq",
    "kvm/kvm_set_irq",
];
/// KiB of trace per CPU.
const BUFFER_KIB: u32 = 16_384;

/// A private trace instance, removed on drop.
pub struct HostTrace {
    folder: PathBuf,
}

impl HostTrace {
    /// Starts to trace these processes: QEMU, for the exits of its guest, and the daemon, for interrupts.
    pub fn start(processes: &[u32]) -> Result<HostTrace> {
        let instances = Path::new(TRACEFS).join("instances");
        ensure!(
            instances.is_dir(),
            "cannot read the host's {TRACEFS}; hint: as root, mount -t tracefs tracefs {TRACEFS}"
        );
        let folder = instances.join(format!("lunette-{}", std::process::id()));
        fs::create_dir(&folder)
            .with_context(|| format!("cannot create {}; hint: run as root", folder.display()))?;
        let trace = HostTrace { folder };
        trace.write("tracing_on", "0")?;
        trace.write("buffer_size_kb", &BUFFER_KIB.to_string())?;
        trace.write("set_event_pid", &threads(processes).join(" "))?;
        let mut enabled = 0;
        for event in EVENTS {
            let file = format!("events/{event}/enable");
            // A kernel lacks some of them but has others.
            enabled += usize::from(trace.write(&file, "1").is_ok());
        }
        ensure!(enabled > 1, "this kernel has no tracepoints of KVM");
        trace.write("tracing_on", "1")?;
        Ok(trace)
    }

    /// Stops the trace and returns its events.
    pub fn stop(self) -> Result<Vec<Event>> {
        self.write("tracing_on", "0")?;
        let file = self.folder.join("trace");
        let text =
            fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        Ok(events(&text))
    }

    fn write(&self, file: &str, text: &str) -> Result<()> {
        let file = self.folder.join(file);
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))
    }
}

impl Drop for HostTrace {
    fn drop(&mut self) {
        // The kernel removes the files of an instance's folder.
        fs::remove_dir(&self.folder).ok();
    }
}

fn threads(processes: &[u32]) -> Vec<String> {
    let folders = processes
        .iter()
        .filter_map(|process| fs::read_dir(format!("/proc/{process}/task")).ok());
    let threads = folders.flatten().flatten();
    threads
        .map(|thread| thread.file_name().to_string_lossy().into_owned())
        .collect()
}

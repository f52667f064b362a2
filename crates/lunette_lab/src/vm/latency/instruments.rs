//! Instruments for the layers of a guest, and the retrieval of their traces.

use anyhow::{Context, Result};

use super::trace::{Event, Point, events, of_disk};
use crate::vm::study::guest::StudyGuest;

/// An instrument: tracefs events and the probes that they need.
#[derive(Clone, Copy, Debug)]
pub struct Instrument {
    pub name: &'static str,
    pub from: Point,
    pub to: Point,
    events: &'static [&'static str],
    has_probes: bool,
}

/// Layers of a guest, from top to bottom.
pub const BLOCK: Instrument = Instrument {
    name: "Guest block layer",
    from: Point::Queued,
    to: Point::Completed,
    events: &["block/block_bio_queue", "block/block_rq_complete"],
    has_probes: false,
};
pub const DRIVER: Instrument = Instrument {
    name: "Guest driver",
    from: Point::Issued,
    to: Point::Completed,
    events: &["block/block_rq_issue", "block/block_rq_complete"],
    has_probes: false,
};
pub const SCSI: Instrument = Instrument {
    name: "Guest SCSI",
    from: Point::Dispatched,
    to: Point::Done,
    events: &[
        "scsi/scsi_dispatch_cmd_start",
        "scsi/scsi_dispatch_cmd_done",
    ],
    has_probes: false,
};
pub const VIRTIO_PCI: Instrument = Instrument {
    name: "Guest virtio-pci",
    from: Point::Kicked,
    to: Point::Interrupted,
    events: &["lunette/notify", "lunette/interrupt"],
    has_probes: true,
};

/// All instruments of a transport together, to divide each request into parts.
pub fn all_of(is_scsi: bool) -> (Instrument, Vec<Point>) {
    const BLK: &[&str] = &[
        "block/block_bio_queue",
        "block/block_rq_issue",
        "block/block_rq_complete",
        "lunette/notify",
        "lunette/interrupt",
    ];
    const SCSI: &[&str] = &[
        "block/block_bio_queue",
        "block/block_rq_issue",
        "block/block_rq_complete",
        "scsi/scsi_dispatch_cmd_start",
        "scsi/scsi_dispatch_cmd_done",
        "lunette/notify",
        "lunette/interrupt",
    ];
    let instrument = Instrument {
        name: "all",
        from: Point::Queued,
        to: Point::Completed,
        events: if is_scsi { SCSI } else { BLK },
        has_probes: true,
    };
    let points = match is_scsi {
        true => vec![
            Point::Queued,
            Point::Issued,
            Point::Dispatched,
            Point::Kicked,
            Point::Interrupted,
            Point::Done,
            Point::Completed,
        ],
        false => vec![
            Point::Queued,
            Point::Issued,
            Point::Kicked,
            Point::Interrupted,
            Point::Completed,
        ],
    };
    (instrument, points)
}

/// KiB of trace per CPU, in the guest's memory.
const BUFFER_KIB: u32 = 32_768;

impl Instrument {
    /// Enables the instrument. Fails if this guest does not support it.
    pub fn start(&self, guest: &StudyGuest) -> Result<()> {
        let mut script = "cd /sys/kernel/tracing 2>/dev/null || exit 1\n\
            test -e trace || mount -t tracefs tracefs . || { echo 'no tracefs in this kernel' >&2; exit 1; }\n\
            cd /sys/kernel/tracing\necho 0 > tracing_on; echo 0 > events/enable; echo > kprobe_events; echo > trace\n"
            .to_owned();
        script.push_str(&format!("echo {BUFFER_KIB} > buffer_size_kb || exit 1\n"));
        if self.has_probes {
            script.push_str(
                "test -e kprobe_events || { echo 'no kprobes in this kernel' >&2; exit 1; }\n\
                 echo 'p:lunette/notify vp_notify vq=$arg1:x64' >> kprobe_events || exit 1\n\
                 echo 'p:lunette/interrupt vring_interrupt vq=$arg2:x64' >> kprobe_events || exit 1\n",
            );
        }
        for event in self.events {
            script.push_str(&format!("echo 1 > events/{event}/enable || exit 1\n"));
        }
        script.push_str("echo 1 > tracing_on\n");
        guest.script(&script).map(drop)
    }

    /// Disables the instrument and returns the events of a disk.
    pub fn stop(&self, guest: &StudyGuest, disk: &str) -> Result<Vec<Event>> {
        let script = format!(
            "cd /sys/kernel/tracing\necho 0 > tracing_on\ncat /sys/class/block/{}/dev\ncat trace\n\
             echo 0 > events/enable; echo > kprobe_events; echo > trace\n",
            disk.trim_start_matches("/dev/")
        );
        let text = guest.script(&script)?;
        let (device, trace) = text
            .split_once('\n')
            .context("the guest did not report its disk")?;
        // 254:0 in sysfs, 254,0 in events
        Ok(of_disk(&events(trace), &device.trim().replace(':', ",")))
    }
}

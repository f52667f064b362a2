//! Parses a guest's trace (tracefs, `trace`) and computes latencies of requests, one in flight at a time.

use std::collections::HashMap;

/// Point in the life of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Point {
    /// The block layer receives it (`block_bio_queue`).
    Queued,
    /// The driver receives it (`block_rq_issue`).
    Issued,
    /// SCSI passes the command to the host adapter's driver (`scsi_dispatch_cmd_start`).
    Dispatched,
    /// The driver notifies the device (`vp_notify`).
    Kicked,
    /// The device's interrupt arrives (`vring_interrupt`).
    Interrupted,
    /// SCSI receives the completion (`scsi_dispatch_cmd_done`).
    Done,
    /// The block layer receives the completion (`block_rq_complete`).
    Completed,
    /// On the host: the guest exits for a device's notification register.
    Exited,
    /// On the host: an interrupt is injected.
    Injected,
}

impl Point {
    fn of(event: &str) -> Option<Point> {
        Some(match event {
            "block_bio_queue" => Point::Queued,
            "block_rq_issue" => Point::Issued,
            "scsi_dispatch_cmd_start" => Point::Dispatched,
            "notify" => Point::Kicked,
            "interrupt" => Point::Interrupted,
            "scsi_dispatch_cmd_done" => Point::Done,
            "block_rq_complete" => Point::Completed,
            "kvm_fast_mmio" | "kvm_mmio" | "kvm_pio" => Point::Exited,
            "kvm_msi_set_irq" | "kvm_set_irq" => Point::Injected,
            _ => return None,
        })
    }
}

/// An event: point, time, and its block device or virtqueue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub point: Point,
    pub at_ns: u64,
    pub whose: String,
}

/// Parses a trace; other lines are ignored.
pub fn events(text: &str) -> Vec<Event> {
    text.lines().filter_map(event).collect()
}

/// `  dd-126  [000] d.h1.  2.287728: interrupt: (vring_interrupt+0x0/0xd0 [virtio_ring]) vq=0xff33`
fn event(line: &str) -> Option<Event> {
    // A task's name may contain any character; a CPU number follows it.
    let (_, rest) = line.split_once("] ")?;
    let mut words = rest.split_whitespace();
    let flags = words.next()?;
    let time = words.next()?.strip_suffix(':')?;
    let name = words.next()?.strip_suffix(':')?;
    if flags.len() > 8 {
        return None;
    }
    let point = Point::of(name)?;
    let whose = match point {
        Point::Queued | Point::Issued | Point::Completed => words.next()?.to_owned(),
        Point::Dispatched | Point::Done | Point::Injected => String::new(),
        // Events with an access type are notifications only for writes.
        Point::Exited if name != "kvm_fast_mmio" => {
            let is_write = |word: &str| matches!(word, "write" | "pio_write");
            words.find(|word| is_write(word))?;
            String::new()
        }
        Point::Exited => String::new(),
        Point::Kicked | Point::Interrupted => {
            words.find_map(|word| word.strip_prefix("vq="))?.to_owned()
        }
    };
    Some(Event {
        point,
        at_ns: nanos(time)?,
        whose,
    })
}

/// Parses seconds such as `2.287728`.
fn nanos(text: &str) -> Option<u64> {
    let (seconds, fraction) = text.split_once('.')?;
    let digits = u32::try_from(fraction.len())
        .ok()
        .filter(|n| (1..=9).contains(n))?;
    let fraction: u64 = fraction.parse().ok()?;
    let seconds: u64 = seconds.parse().ok()?;
    seconds
        .checked_mul(1_000_000_000)?
        .checked_add(fraction * 10_u64.pow(9 - digits))
}

/// Events of one disk: those of its block device, and of the most frequently used virtqueue.
pub fn of_disk(events: &[Event], device: &str) -> Vec<Event> {
    let mut queues: HashMap<&str, usize> = HashMap::new();
    let is_of_queue = |event: &&Event| matches!(event.point, Point::Kicked | Point::Interrupted);
    for event in events.iter().filter(is_of_queue) {
        *queues.entry(&event.whose).or_default() += 1;
    }
    let queue = queues
        .into_iter()
        .max_by_key(|(_, count)| *count)
        .map(|(queue, _)| queue);
    let is_its = |event: &&Event| match event.point {
        Point::Queued | Point::Issued | Point::Completed => event.whose == device,
        Point::Dispatched | Point::Done | Point::Exited | Point::Injected => true,
        Point::Kicked | Point::Interrupted => Some(event.whose.as_str()) == queue,
    };
    events.iter().filter(is_its).cloned().collect()
}

/// Times between two points of each request. Requests without both points are ignored.
pub fn spans(events: &[Event], from: Point, to: Point) -> Vec<u64> {
    let mut begun = None;
    let mut spans = Vec::new();
    for event in events {
        if event.point == from {
            begun = Some(event.at_ns);
        } else if event.point == to
            && let Some(begin) = begun.take()
        {
            spans.push(event.at_ns.saturating_sub(begin));
        }
    }
    spans
}

/// Times between adjacent points, for requests that passed each point once and in order.
pub fn parts(events: &[Event], points: &[Point]) -> Vec<Vec<u64>> {
    let mut requests = Vec::new();
    let mut times: Vec<u64> = Vec::new();
    for event in events.iter().filter(|event| points.contains(&event.point)) {
        if Some(&event.point) == points.first() {
            times.clear();
        } else if points.get(times.len()) != Some(&event.point) {
            times.clear();
            continue;
        }
        times.push(event.at_ns);
        if times.len() == points.len() {
            let parts = times.windows(2).map(|pair| pair[1].saturating_sub(pair[0]));
            requests.push(parts.collect());
            times.clear();
        }
    }
    requests
}

/// Mean without the longest hundredth, which contains pauses of the guest.
pub fn mean(values: &[u64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    sorted.truncate(sorted.len() - sorted.len() / 100);
    let sum: u64 = sorted.iter().sum();
    (!sorted.is_empty()).then(|| sum as f64 / sorted.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A virtio-scsi disk and a console in a guest with Linux 6.1.
    const TRACE: &str = "\
# tracer: nop
    kworker/0:1H-36      [000] .....     2.298000: notify: (vp_notify+0x0/0x20 [virtio_pci]) vq=0xaaaa
              dd-127     [000] .....     2.298286: block_bio_queue: 8,0 RS 0 + 8 [dd]
    kworker/0:1H-36      [000] .....     2.298628: block_rq_issue: 8,0 RS 4096 () 0 + 8 [kworker/0:1H]
    kworker/0:1H-36      [000] .....     2.298711: scsi_dispatch_cmd_start: host_no=0 channel=0 id=0 lun=0 data_sgl=1
    kworker/0:1H-36      [000] .....     2.298797: notify: (vp_notify+0x0/0x20 [virtio_pci]) vq=0xff33
          <idle>-0       [000] d.h1.     2.299080: interrupt: (vring_interrupt+0x0/0xd0 [virtio_ring]) vq=0xff33
          <idle>-0       [000] d.h2.     2.299141: scsi_dispatch_cmd_done: host_no=0 channel=0 id=0 lun=0
          <idle>-0       [000] d.h2.     2.299204: block_rq_complete: 8,0 RS () 0 + 8 [0]
            a b] c-1     [000] .....     2.299300: block_bio_queue: 254,0 RS 8 + 8 [dd]
              dd-127     [000] .....     2.299320: block_bio_queue: 8,0 RS 8 + 8 [dd]
";

    #[test]
    fn events_of_a_disk_are_told_from_others() {
        let all = events(TRACE);
        assert_eq!(all.len(), 9);
        assert_eq!(all[1].at_ns, 2_298_286_000);
        let its = of_disk(&all, "8,0");
        assert_eq!(its.len(), 8);
        assert_eq!(spans(&its, Point::Queued, Point::Completed), [918_000]);
        assert_eq!(spans(&its, Point::Kicked, Point::Interrupted), [283_000]);
        let points = [
            Point::Queued,
            Point::Issued,
            Point::Dispatched,
            Point::Kicked,
            Point::Interrupted,
            Point::Done,
            Point::Completed,
        ];
        let requests = parts(&its, &points);
        assert_eq!(
            requests,
            [[342_000, 83_000, 86_000, 283_000, 61_000, 63_000]]
        );
        // The sum of a request's parts is its total.
        assert_eq!(requests[0].iter().sum::<u64>(), 918_000);
    }

    /// Format of the kernel's tracepoints.
    #[test]
    fn exits_and_injections_of_a_host_are_read() {
        let trace = "\
 qemu-system-x86-4242    [001] ....1   100.000100: kvm_fast_mmio: fast mmio at gpa 0xfe003000
        worker-0-4250    [000] d..1.   100.000190: kvm_msi_set_irq: dst 1 vec 36 (Fixed|physical|edge)
 qemu-system-x86-4242    [001] ....1   100.000200: kvm_mmio: mmio read len 4 gpa 0xfee00000 val 0x0
 qemu-system-x86-4242    [001] ....1   100.000300: kvm_mmio: mmio write len 2 gpa 0xfe003000 val 0x0
        worker-0-4250    [000] d..1.   100.000370: kvm_msi_set_irq: dst 1 vec 36 (Fixed|physical|edge)
 qemu-system-x86-4242    [001] ....1   100.000400: kvm_pio: pio_write at 0xc010 size 2 count 1 val 0x0
        worker-0-4250    [000] d..1.   100.000450: kvm_set_irq: gsi 24 level 1 source 0
";
        let all = events(trace);
        assert_eq!(all.len(), 6);
        assert_eq!(
            spans(&all, Point::Exited, Point::Injected),
            [90_000, 70_000, 50_000]
        );
    }

    #[test]
    fn what_is_no_event_is_passed_over() {
        for line in [
            "",
            "x",
            "] ",
            "a [0] . 1.5: notify: nothing",
            "a [0] . 1.x: block_bio_queue: 8,0",
            "a [0] ..... 1.5 block_bio_queue 8,0",
        ] {
            assert_eq!(event(line), None, "{line}");
        }
        let torn = events(TRACE);
        let torn: Vec<Event> = torn
            .into_iter()
            .filter(|event| event.point != Point::Kicked)
            .collect();
        assert!(parts(&torn, &[Point::Queued, Point::Kicked, Point::Completed]).is_empty());
        assert!(spans(&torn, Point::Kicked, Point::Interrupted).is_empty());
    }

    #[test]
    fn a_mean_leaves_out_the_longest_hundredth() {
        let mut values = vec![100; 199];
        values.push(1_000_000);
        assert_eq!(mean(&values[1..]), Some(100.0));
        assert_eq!(mean(&[]), None);
    }
}

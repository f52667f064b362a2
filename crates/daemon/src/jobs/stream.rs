//! Copies the data of the backing image into the image, which then has no backing image. Clusters that clients write belong to the image
//! already.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bdev::ImageDevice;
use control::objects::JobState;

use super::backing_name::backed_image;
use super::exchange::failed;
use super::{Context, Job, JobKind};
use crate::objects::Refusal;

/// Most bytes of one step. Client allocations wait for a step of the image's owner.
const PART_MAX: u64 = 1 << 20;
/// Bytes of the first step.
const PART_MIN: u64 = 64 << 10;
/// Target duration of a step. Longer steps reduce the length, because a cancellation waits for one step.
const STEP_TIME: Duration = Duration::from_millis(100);

/// Interval at which a completed stream checks whether all workers have closed the backing image.
const CLOSE_STEP: Duration = Duration::from_millis(5);

/// Starts to copy the backing data of a disk's image. Blocks.
///
/// # Errors
/// Nothing has changed then.
pub fn start_stream(context: &Context, disk: &str, speed: u64) -> Result<Arc<Job>, Refusal> {
    let (disk, config) = context.disk(disk, JobKind::Stream)?;
    let name = disk.name().to_owned();
    let device = disk.device();
    backed_image(&name, &*device)?;
    if config.read_only {
        return Err(Refusal::conflict(
            format!("disk {name} is read-only"),
            "remove the disk and add it again without read_only",
        ));
    }
    let job = Job::new(&disk, JobKind::Stream, None);
    job.set(None, Some(speed));
    let job = context.jobs.begin(job)?;
    context.event_bus.publish("job.started", &name);
    let (running, events) = (Arc::clone(&job), context.event_bus.clone());
    let started = context.jobs.run(move || {
        let image = device.capabilities().image;
        let streamed = image.map_or(Ok(false), |image| stream(image, &running));
        let (state, event, reason) = match streamed {
            Ok(true) => (JobState::Done, "job.done", None),
            Ok(false) => (JobState::Cancelled, "job.cancelled", None),
            Err(error) => (JobState::Failed, "job.failed", Some(error.to_string())),
        };
        if let Some(reason) = &reason {
            tracing::error!(disk = running.disk, "stream failed: {reason}");
        }
        // The device is free before the end of the job is announced.
        drop(device);
        running.set_state(state, reason);
        events.publish(event, &running.disk);
    });
    started.map_err(|error| failed(&name, &format!("cannot start a thread: {error}")))?;
    Ok(job)
}

/// Returns false if the job was cancelled. Copied data stays in the image.
fn stream(image: &dyn ImageDevice, job: &Job) -> std::io::Result<bool> {
    let mut part = None;
    let (mut at, mut length) = (0, PART_MIN);
    while at < job.total {
        if !job.may_continue(part) {
            return Ok(false);
        }
        let began = Instant::now();
        let copied = image.copy_up(at, length)?;
        at = copied.end.min(job.total);
        job.advance(at, copied.bytes);
        part = (copied.bytes > 0).then_some((began, copied.bytes));
        length = match began.elapsed() > STEP_TIME {
            true => PART_MIN,
            false => (length * 2).min(PART_MAX),
        };
    }
    job.set_state(JobState::Finishing, None);
    image.detach_backing()?;
    // Workers close their files of the backing image when their reads there have ended.
    while !image.close_backing()? {
        std::thread::sleep(CLOSE_STEP);
    }
    Ok(true)
}

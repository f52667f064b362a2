//! Starts and drives [`jobs::stream`]: copies the data of the backing image into the image, which then has no backing image.

use std::sync::Arc;
use std::time::Duration;

use bdev::ImageDevice;
use control::EventKind;
use control::objects::JobState;
use jobs::stream::{Action, Stream};
use jobs::{Early, Event, Now, Outcome, Span};

use super::backing_name::backed_image;
use super::copy_range::result;
use super::exchange::failed;
use super::{Context, Job, JobKind};
use crate::objects::Refusal;

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
    context.event_bus.publish(EventKind::JobStarted, &name);
    let (running, events) = (Arc::clone(&job), context.event_bus.clone());
    let started = context.jobs.run(move || {
        let image = device.capabilities().image;
        let streamed = image.map_or(Err(Early::Cancelled), |image| stream(image, &running));
        let (state, event, reason) = match streamed {
            Ok(()) => (JobState::Done, EventKind::JobDone, None),
            Err(Early::Cancelled) => (JobState::Cancelled, EventKind::JobCancelled, None),
            Err(Early::Failed(reason)) => (JobState::Failed, EventKind::JobFailed, Some(reason)),
        };
        if let Some(reason) = &reason {
            tracing::error!(disk = running.disk, "stream failed: {reason}");
        }
        // The device is free before the end of the job is announced.
        drop(device);
        running.set_state(state, reason);
        events.publish(event, &running.disk);
    });
    if let Err(error) = started {
        let refusal = failed(&name, &format!("cannot start a thread: {error}"));
        job.give_up(&context.jobs, &refusal);
        return Err(refusal);
    }
    Ok(job)
}

/// Drives the job. Copied data stays in the image after a cancellation.
fn stream(image: &dyn ImageDevice, job: &Job) -> Outcome {
    let mut machine = Stream::new(job.total);
    let mut event = Event::Done;
    loop {
        let now = Now {
            time: job.started.elapsed(),
            orders: job.orders(),
            lost: None,
        };
        event = match machine.step(&now, event) {
            Action::Wait(time) => job.wait_for_orders(now.orders, time),
            Action::CopyUp(Span { from, end }) => match image.copy_up(from, end - from) {
                Ok(copied) => Event::CopiedUp {
                    end: copied.end,
                    bytes: copied.bytes,
                },
                Err(error) => Event::Failed(error.to_string()),
            },
            Action::Advance { end, bytes } => {
                job.advance(end, bytes);
                Event::Done
            }
            Action::Finish => {
                job.set_state(JobState::Finishing, None);
                Event::Done
            }
            Action::Detach => result(image.detach_backing()),
            Action::Close => match image.close_backing() {
                Ok(true) => Event::Done,
                // Workers close their files of the backing image when their reads there have ended.
                Ok(false) => {
                    std::thread::sleep(CLOSE_STEP);
                    Event::Busy
                }
                Err(error) => Event::Failed(error.to_string()),
            },
            Action::End(outcome) => return outcome,
        };
    }
}

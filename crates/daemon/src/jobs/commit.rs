//! Commits an overlay image into its backing image and switches the disk to the backing image. Clusters allocated in the overlay are copied
//! as a mirror copies a disk ([`super::copy`]). The overlay remains and holds no data that its backing image lacks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bdev::{BlockDevice, Committable, DiscardMode, Disk, Mirror, RangeLock};
use jobs::Event;
use jobs::commit::{Action, Begin};
use jobs::exchange::ExchangeAction;

use super::backing_name::{backed_image, no_backing};
use super::copy::{keep_discards, run_copying};
use super::copying::Copying;
use super::exchange::{Change, failed, hold_one};
use super::{Context, Job, JobKind};
use crate::objects::{NewDevice, Refusal};
use config::{BlockDeviceConfig, DiskConfig};

/// Longest wait for a failed attempt to close the files that it opened.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(5);

/// Starts to commit a disk's image. Blocks.
///
/// # Errors
/// Nothing has changed then.
pub fn start_commit(context: &Context, disk: &str, speed: u64) -> Result<Arc<Job>, Refusal> {
    let (disk, config) = context.disk(disk, JobKind::Commit)?;
    let name = disk.name().to_owned();
    let device = disk.device();
    let BlockDeviceConfig::Image {
        cache, named_files, ..
    } = config.backend
    else {
        return Err(no_backing(&name));
    };
    backed_image(&name, &*device)?;
    super::check_served_alone(&config)?;
    if config.read_only {
        return Err(Refusal::conflict(
            format!("disk {name} is read-only"),
            "remove the disk and add it again without read_only",
        ));
    }
    let job = Job::new(&disk, JobKind::Commit, None);
    job.set(None, Some(speed));
    job.control().orders.switches = true;
    let job = context.jobs.begin(job)?;
    let unchanged = context.check_unchanged(&disk, &job);
    let begun = unchanged.and_then(|()| begin(context, &disk, &device));
    let (opened, mirror, discard) = match begun {
        Ok(begun) => begun,
        Err(refusal) => {
            job.give_up(&context.jobs, &refusal);
            return Err(refusal);
        }
    };
    let path = opened.base_path.clone();
    job.set_target(format!("{}", path.display()));
    let backend = match opened.base_is_image {
        true => BlockDeviceConfig::Image {
            // The image has already written to this data file, which the user permitted.
            data_file: bdev::data_file_of(&path),
            path,
            size: None,
            named_files,
            cache,
            lock: Default::default(),
        },
        false => BlockDeviceConfig::File {
            path,
            size: opened.base_size,
            cache,
            lock: Default::default(),
        },
    };
    let copying = Copying {
        context: context.clone(),
        job: Arc::clone(&job),
        disk,
        source: opened.overlay,
        target: opened.base,
        config: DiskConfig {
            backend,
            discard,
            ..config
        },
        begun: Some(mirror),
        incremental: None,
        new_image: None,
        partial: None,
    };
    run_copying(copying)?;
    Ok(job)
}

/// Reopens the image over a writable backing image and switches the disk to an empty mirror.
fn begin(
    context: &Context,
    disk: &Arc<Disk>,
    before: &Arc<dyn BlockDevice>,
) -> Result<(Committable, Arc<Mirror>, DiscardMode), Refusal> {
    let mut driver = Driver {
        change: None,
        held: None,
        context,
        disk,
        before,
        opened: None,
    };
    let mut job = Begin::default();
    let (mut event, mut refusal) = (Event::Done, None);
    loop {
        let done = match job.step(event) {
            Action::End(_) => break,
            action => driver.execute(&action),
        };
        event = match done {
            Ok(()) => Event::Done,
            Err(error) => {
                let reason = error.to_string();
                refusal = Some(error);
                Event::Failed(reason)
            }
        };
    }
    match (refusal, driver.opened) {
        (None, Some(opened)) => Ok(opened),
        (refusal, _) => Err(refusal.unwrap_or(Refusal::Ending)),
    }
}

/// Executes the actions of the start of a commit.
struct Driver<'a> {
    change: Option<Change>,
    held: Option<RangeLock>,
    context: &'a Context,
    disk: &'a Arc<Disk>,
    before: &'a Arc<dyn BlockDevice>,
    opened: Option<(Committable, Arc<Mirror>, DiscardMode)>,
}

impl Driver<'_> {
    fn execute(&mut self, action: &Action) -> Result<(), Refusal> {
        match action {
            Action::Hold => self.held = Some(hold_one(self.disk)?),
            Action::Reopen => self.reopen()?,
            Action::Prepare => self.prepare()?,
            Action::Replace => {
                if let Some(change) = &mut self.change {
                    change.execute(self.context, ExchangeAction::Replace(()))?;
                }
            }
            Action::Detach => self.change = None,
            Action::Undo => {
                if self.opened.take().is_some() {
                    lock_again(self.disk.name(), &**self.before);
                }
            }
            Action::Release => self.held = None,
            Action::End(_) => {}
        }
        Ok(())
    }

    fn reopen(&mut self) -> Result<(), Refusal> {
        let name = self.disk.name();
        let reopened = backed_image(name, &**self.before)?.reopen_to_commit();
        let mut reopened = reopened.map_err(|error| failed(name, &error))?;
        let discard;
        (reopened.base, discard) = keep_discards(self.disk, reopened.base, DiscardMode::Unmap);
        let (overlay, base) = (&reopened.overlay, &reopened.base);
        let mirror = Arc::new(Mirror::new(Arc::clone(overlay), Arc::clone(base)));
        let kept = self.disk.check_device(&**base);
        self.opened = Some((reopened, mirror, discard));
        kept.map_err(|broken| {
            failed(
                name,
                &format!("its backing image cannot replace it: {broken}"),
            )
        })
    }

    fn prepare(&mut self) -> Result<(), Refusal> {
        if let Some((_, mirror, _)) = &self.opened {
            let change = NewDevice {
                disk: Arc::clone(self.disk),
                device: Arc::clone(mirror) as Arc<dyn BlockDevice>,
                config: None,
            };
            self.change = Some(Change::prepare(&self.context.servers.pool, &[change])?);
        }
        Ok(())
    }
}

/// Takes the locks of a device again. Retries while channels of the failed attempt are closing.
fn lock_again(disk: &str, device: &dyn BlockDevice) {
    let Some(lockable) = device.capabilities().lockable else {
        return;
    };
    let until = Instant::now() + CLOSE_WAIT_MAX;
    while let Err(error) = lockable.take_locks() {
        if Instant::now() > until {
            tracing::error!(disk, "cannot lock the image again: {error}");
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

//! Commits an overlay image into its backing image and switches the disk to the backing image. Clusters allocated in the overlay are copied
//! as a mirror copies a disk ([`super::copy`]). The overlay remains and holds no data that its backing image lacks.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bdev::{BlockDevice, Committable, DiscardMode, Disk, Mirror};

use super::backing_name::{backed_image, no_backing};
use super::copy::{keep_discards, run_copying};
use super::copying::Copying;
use super::exchange::{exchange_held, failed};
use super::{Context, Job, JobKind};
use crate::objects::Refusal;
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
    let begun = begin(context, &disk, &device);
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
    let name = disk.name();
    let opened = RefCell::new(None);
    let make = || {
        let reopened = backed_image(name, &**before)?.reopen_to_commit();
        let mut reopened = reopened.map_err(|error| failed(name, &error))?;
        let discard;
        (reopened.base, discard) = keep_discards(disk, reopened.base, DiscardMode::Unmap);
        let (overlay, base) = (&reopened.overlay, &reopened.base);
        let mirror = Arc::new(Mirror::new(Arc::clone(overlay), Arc::clone(base)));
        let kept = disk.check_device(&**base);
        *opened.borrow_mut() = Some((reopened, Arc::clone(&mirror), discard));
        kept.map_err(|broken| {
            failed(
                name,
                &format!("its backing image cannot replace it: {broken}"),
            )
        })?;
        Ok(mirror as Arc<dyn BlockDevice>)
    };
    // Closes the reopened image before the first client writes to the disk again.
    let undo = || {
        if opened.take().is_some() {
            lock_again(name, &**before);
        }
    };
    exchange_held(&context.manager, &context.servers.pool, disk, make, undo)?;
    opened
        .into_inner()
        .ok_or_else(|| failed(name, &"nothing was opened"))
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

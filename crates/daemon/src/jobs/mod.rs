//! Long operations on disks while clients use them: copies to a target (`copy`), backing data copied up into an image (`stream`), an image
//! committed into its backing image (`commit`), and snapshots (`snapshot`), which are short. A disk has at most one job, on a thread of its
//! own. If the daemon ends or is killed, the disk stays as it was before the job, and no disk uses the unfinished target.
//!
//! ```text
//!   running ⇄ paused ──▶ ready (a mirror that waits for its switch) ──▶ finishing ──▶ done
//!      ├────────┴──────────┴──▶ cancelling (while its I/O hangs) ──▶ cancelled
//!      └──▶ failed, as soon as the target is given up
//! ```

mod backing_name;
mod backup;
mod commit;
mod copy;
mod copy_range;
mod copying;
mod exchange;
mod incremental;
mod own_target;
mod partial;
mod point_in_time;
mod points;
mod pull;
mod push;
mod snapshot;
mod stream;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bdev::{BlockDevice, Disk, Mirror, MirrorProgress};
use control::objects::JobState;
use jobs::{Event, Orders};

use crate::bitmaps::Bitmaps;
use crate::objects::{EventBus, Fault, Manager, Refusal, Servers};
use config::{BlockDeviceConfig, DiskConfig};
use copy::is_same_file;

use backup::BackupOfJob;

pub(crate) use backup::no_backup;
pub use backup::{Destination, NewBackup, pull_address, start_backup};
pub use commit::start_commit;
pub(crate) use copy::shown;
pub use copy::{Copy, start_copy};
pub use incremental::{CheckpointNames, remove_bitmap};
pub use point_in_time::ScratchOptions;
pub use snapshot::{Overlay, snapshot};
pub use stream::start_stream;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobKind {
    /// Copies the disk, then switches it to the copy.
    Mirror,
    /// Copies or serves the disk as of the start of the job, or copies it as of the end.
    Backup,
    /// Copies the data of the backing image into the image.
    Stream,
    /// Copies the data of the image into its backing image.
    Commit,
    /// Switches the disk to a new image over the old device.
    Snapshot,
}

impl JobKind {
    pub fn word(self) -> &'static str {
        match self {
            JobKind::Mirror => "mirror",
            JobKind::Backup => "backup",
            JobKind::Stream => "stream",
            JobKind::Commit => "commit",
            JobKind::Snapshot => "snapshot",
        }
    }

    /// Returns true if the job can end with another configuration of the disk.
    fn changes_configuration(self) -> bool {
        match self {
            JobKind::Mirror | JobKind::Commit | JobKind::Snapshot => true,
            JobKind::Backup | JobKind::Stream => false,
        }
    }
}

/// Services that jobs use.
#[derive(Clone)]
pub struct Context {
    /// Handle of the owner, which makes changes.
    pub manager: Manager,
    pub servers: Arc<Servers>,
    pub jobs: Jobs,
    pub bitmaps: Arc<Bitmaps>,
    /// Receives the events of jobs.
    pub event_bus: EventBus,
}

impl Context {
    /// Returns a served disk and its configuration, for a job of a kind.
    fn disk(&self, name: &str, kind: JobKind) -> Result<(Arc<Disk>, DiskConfig), Refusal> {
        let name = name.to_owned();
        self.manager.call(move |owner| {
            let disk = owner.disk(&name)?;
            let config = owner.is_there(&disk)?.clone();
            if kind.changes_configuration() {
                owner.keeps_changes_of(&name)?;
            }
            if !owner.configs.is_shown_by_scsi(&name) {
                // Only SCSI reports that unmapped blocks read as zeroes (LBPRZ).
                disk.withdraw_discard_zeroes();
            }
            Ok((disk, config))
        })
    }

    /// Refuses a device that is the medium of a disk, because a copy would overwrite that disk.
    fn check_medium(&self, disk: &str, device: &dyn BlockDevice) -> Result<(), Refusal> {
        let Some(key) = device.medium().map(bdev::Medium::key) else {
            return Ok(());
        };
        let taken = self
            .manager
            .call(move |owner| Ok(owner.disks.of_medium(&key)))?;
        match taken {
            None => Ok(()),
            Some(other) => Err(same_medium(disk, &other)),
        }
    }

    /// Refuses a target that leads to a disk of this daemon through a loop device or an export.
    fn check_own_target(&self, disk: &str, target: &BlockDeviceConfig) -> Result<(), Refusal> {
        let (exports, disks) = self.manager.call(|owner| {
            let config = owner.configs.wanted();
            let exports: Vec<_> = config.exports().cloned().collect();
            Ok((exports, config.disks.clone()))
        })?;
        let file = target.file();
        let is_loop = file.is_some_and(|path| own_target::file_below(path) != path);
        // `check_medium` finds other files. Looking at them may block.
        let may_lead = |path: &Path| is_loop || path.starts_with("/dev");
        let is_below = |other: &&DiskConfig| {
            let path = other.backend.file().filter(|path| may_lead(path));
            file.is_some() && path.is_some() && is_same_file(path, file)
        };
        let other = match own_target::disk_behind(target, exports.iter()) {
            // An export of another disk is a valid target.
            Some(name) => (name == disk).then_some(name),
            None => disks.iter().find(is_below).map(|other| other.name.as_str()),
        };
        other.map_or(Ok(()), |other| Err(same_medium(disk, other)))
    }
}

fn same_medium(disk: &str, other: &str) -> Refusal {
    let detail = format!("disk {disk}: the target is the medium of disk {other}");
    Refusal::conflict(detail, "name another target")
}

/// Checks that no other daemon serves the file of the disk: it would continue with the old file.
///
/// # Errors
/// The disk has `lock = "while-active"`.
fn check_served_alone(config: &DiskConfig) -> Result<(), Refusal> {
    if !config.backend.takes_turns() {
        return Ok(());
    }
    Err(Refusal::conflict(
        format!(
            "disk {}: another daemon may serve its file, because lock=while-active, and would continue with the old file",
            config.name
        ),
        "copy the disk with lunette disk backup --at end, or add it again with lock=always",
    ))
}

struct Control {
    state: JobState,
    orders: Orders,
    reason: Option<String>,
    ended: Option<Instant>,
}

pub struct Job {
    disk: String,
    kind: JobKind,
    target: OnceLock<String>,
    incremental: Option<String>,
    /// Backup of several disks that the job belongs to.
    backup: Option<BackupOfJob>,
    total: u64,
    done: AtomicU64,
    copied: AtomicU64,
    started: Instant,
    control: Mutex<Control>,
    changed: Condvar,
    /// Abandoned at a cancellation, so that client writes stop waiting for the target.
    mirror: OnceLock<Arc<MirrorProgress>>,
    /// Start of the I/O on the target that the job waits for.
    target_wait: Mutex<Option<Instant>>,
}

impl Job {
    pub(crate) fn new(disk: &Disk, kind: JobKind, target: Option<String>) -> Job {
        Job {
            disk: disk.name().to_owned(),
            kind,
            target: target.map(OnceLock::from).unwrap_or_default(),
            incremental: None,
            backup: None,
            total: disk.info().geometry.capacity_bytes(),
            done: AtomicU64::new(0),
            copied: AtomicU64::new(0),
            started: Instant::now(),
            control: Mutex::new(Control {
                state: JobState::Running,
                orders: Orders::default(),
                reason: None,
                ended: None,
            }),
            changed: Condvar::new(),
            mirror: OnceLock::new(),
            target_wait: Mutex::default(),
        }
    }

    fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the job has ended, with any result.
    pub fn has_ended(&self) -> bool {
        self.control().ended.is_some()
    }

    /// Returns the job as an API object.
    pub fn body(&self) -> control::objects::Job {
        let control = self.control();
        let until = control.ended.unwrap_or_else(Instant::now);
        let is_paused = control.orders.is_paused;
        control::objects::Job {
            disk: self.disk.clone(),
            kind: self.kind.word().to_owned(),
            target: self.target.get().cloned(),
            incremental: self.incremental.clone(),
            backup: self.backup.as_ref().map(|backup| backup.name.clone()),
            state: match control.state {
                JobState::Failed => JobState::Failed,
                _ if control.orders.is_cancelled && control.ended.is_none() => JobState::Cancelling,
                JobState::Running if is_paused => JobState::Paused,
                state => state,
            },
            done: self.done.load(Ordering::Relaxed),
            copied: self.copied.load(Ordering::Relaxed),
            total: self.total,
            speed: (control.orders.speed > 0).then_some(control.orders.speed),
            seconds: until.saturating_duration_since(self.started).as_secs(),
            reason: control.reason.clone().or_else(|| self.target_delay()),
        }
    }

    /// Records that an I/O on the target begins or has ended.
    fn waits_for_target(&self, waits: bool) {
        *self.target_wait() = waits.then(Instant::now);
    }

    fn target_wait(&self) -> MutexGuard<'_, Option<Instant>> {
        let wait = self.target_wait.lock();
        wait.unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the reason of a job that waits for its target.
    fn target_delay(&self) -> Option<String> {
        let waited = self.target_wait().map(|since| since.elapsed());
        let waited = waited.filter(|waited| *waited >= TARGET_DELAY)?;
        let target = self.target.get().map_or("", String::as_str);
        let seconds = waited.as_secs();
        Some(format!(
            "the target {target} has not responded for {seconds} s"
        ))
    }

    /// Returns true if the mirror has given up its target.
    fn has_lost_target(&self) -> bool {
        let mirror = self.mirror.get();
        mirror.is_some_and(|mirror| mirror.error().is_some())
    }

    /// Marks the job as failed before it ends: it still waits for I/O on its target.
    fn fail(&self, reason: &str) {
        let mut control = self.control();
        control.state = JobState::Failed;
        control.reason = Some(reason.to_owned());
        self.changed.notify_all();
    }

    /// Returns true if the job has failed and has not ended.
    fn is_failing(&self) -> bool {
        let control = self.control();
        control.state == JobState::Failed && control.ended.is_none()
    }

    /// Sets the target, for jobs that learn it after their creation.
    fn set_target(&self, target: String) {
        self.target.set(target).ok();
    }

    /// Marks a job that could not start as failed and removes it.
    fn give_up(self: &Arc<Job>, jobs: &Jobs, refusal: &Refusal) {
        let state = match self.is_cancelled() {
            true => JobState::Cancelled,
            false => JobState::Failed,
        };
        self.set_state(state, Some(refusal.to_string()));
        jobs.take_back(self);
    }

    /// Runs the start of the job, which may block, on a thread of its own. Returns early if the job is cancelled; the job then ends with
    /// the thread, which undoes the start.
    fn begin_while_wanted<T: Send + 'static>(
        self: &Arc<Job>,
        jobs: &Jobs,
        work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
        undo: fn(&T),
    ) -> Result<T, Refusal> {
        // With capacity 0, the caller receives the result or the thread keeps it.
        let (result, begun) = mpsc::sync_channel(0);
        let job = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name("begin-job".to_owned())
            .stack_size(bdev::STACK_BYTES);
        let spawned = thread.spawn(move || {
            if let Err(mpsc::SendError(unwanted)) = result.send(work()) {
                if let Ok(begun) = &unwanted {
                    undo(begun);
                }
                // The files of the target are closed before the job ends.
                drop(unwanted);
                job.set_state(JobState::Cancelled, None);
            }
        });
        if let Err(error) = spawned {
            let refusal = exchange::failed(&self.disk, &format!("cannot start a thread: {error}"));
            self.give_up(jobs, &refusal);
            return Err(refusal);
        }
        loop {
            match begun.recv_timeout(BEGIN_STEP) {
                Ok(begun) => return begun.inspect_err(|refusal| self.give_up(jobs, refusal)),
                Err(mpsc::RecvTimeoutError::Timeout) if self.is_cancelled() => {
                    let detail = format!("disk {}: the job was cancelled", self.disk);
                    return Err(Refusal::Conflict(vec![Fault::new(detail)]));
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    let detail = format!(
                        "disk {}: the thread that starts the job has panicked",
                        self.disk
                    );
                    let refusal =
                        Refusal::Failed(vec![Fault::new(detail).help("see the daemon's log")]);
                    self.give_up(jobs, &refusal);
                    return Err(refusal);
                }
            }
        }
    }

    /// Returns the conflict of a change or another job with this running one.
    fn in_the_way(&self) -> Fault {
        let (disk, kind) = (&self.disk, self.kind.word());
        let help = match &self.backup {
            Some(backup) if backup.address.is_some() => {
                let name = &backup.name;
                format!("lunette backup end {name}, or lunette backup cancel {name}")
            }
            Some(backup) => {
                let name = &backup.name;
                format!("wait for it, or cancel it with lunette backup cancel {name}")
            }
            None => format!("wait for it, or cancel it with lunette job cancel {disk}"),
        };
        Fault::new(format!("disk {disk} has a running {kind}")).help(help)
    }

    /// Pauses or resumes the job and sets its speed limit, for a user.
    ///
    /// # Errors
    /// The job copies nothing: its disk is served for a backup.
    pub fn change(&self, paused: Option<bool>, speed: Option<u64>) -> Result<(), Refusal> {
        let backup = self.backup.as_ref();
        let pull = backup.filter(|backup| backup.address.is_some() && !self.has_ended());
        if let Some(BackupOfJob { name, .. }) = pull {
            return Err(Refusal::conflict(
                format!(
                    "disk {} is served for the backup {name}, which has no speed and no pause",
                    self.disk
                ),
                &format!("lunette backup end {name}, or lunette backup cancel {name}"),
            ));
        }
        self.set(paused, speed);
        Ok(())
    }

    /// Cancels the job, for a user.
    ///
    /// # Errors
    /// The job is one of several that end together.
    pub fn cancel_alone(&self) -> Result<(), Refusal> {
        let backup = self.backup.as_ref();
        let pull = backup.filter(|backup| backup.address.is_some() && backup.disks > 1);
        if let Some(BackupOfJob { name, .. }) = pull {
            return Err(Refusal::conflict(
                format!(
                    "disk {} is served for the backup {name}, and all disks of a backup end together",
                    self.disk
                ),
                &format!("lunette backup cancel {name}"),
            ));
        }
        self.cancel();
        Ok(())
    }

    /// Pauses or resumes the job and sets its speed limit.
    pub fn set(&self, paused: Option<bool>, speed: Option<u64>) {
        let mut control = self.control();
        control.orders.is_paused = paused.unwrap_or(control.orders.is_paused);
        control.orders.speed = speed.unwrap_or(control.orders.speed);
        self.changed.notify_all();
    }

    /// Requests the switch of a mirror to its target: now, or as soon as it is complete. `accepts_loss`: although the disk cannot be flushed.
    ///
    /// # Errors
    /// If the job has no switch, has failed or has ended.
    pub fn switch(&self, accepts_loss: bool) -> Result<(), Refusal> {
        let mut control = self.control();
        // A commit switches without a request, unless its switch failed once.
        let switches = matches!(self.kind, JobKind::Mirror | JobKind::Commit);
        let is_over = control.state == JobState::Failed || control.orders.is_cancelled;
        if switches && (is_over || self.has_lost_target()) {
            let (disk, kind) = (&self.disk, self.kind.word());
            let reason = control.reason.as_deref();
            let is_cancelled = control.orders.is_cancelled && control.state != JobState::Failed;
            let detail = match (is_cancelled, reason) {
                (true, _) => format!("disk {disk}: the {kind} was cancelled"),
                (false, Some(reason)) => format!("disk {disk}: the {kind} has failed: {reason}"),
                (false, None) => format!("disk {disk}: the {kind} has failed"),
            };
            let help = "see lunette job list, and start the job again";
            return Err(Refusal::conflict(detail, help));
        }
        if !switches || control.ended.is_some() {
            let detail = format!("disk {} has no mirror to switch to", self.disk);
            return Err(Refusal::Conflict(vec![Fault::new(detail)]));
        }
        (control.orders.switches, control.orders.is_paused) = (true, false);
        control.orders.accepts_loss = accepts_loss;
        if control.state == JobState::Ready {
            // That of the last attempt.
            control.reason = None;
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Registers the mirror to which clients write.
    fn register_mirror(&self, mirror: &Mirror) {
        let control = self.control();
        self.mirror.set(Arc::clone(mirror.progress())).ok();
        if control.orders.is_cancelled {
            mirror.progress().abandon();
        }
    }

    /// Cancels the job. The disk is unchanged.
    pub fn cancel(&self) {
        let mut control = self.control();
        control.orders.is_cancelled = true;
        if let Some(mirror) = self.mirror.get() {
            mirror.abandon();
        }
        self.changed.notify_all();
    }

    /// Waits until the job has ended. Returns false after `time`.
    pub fn wait(&self, time: Duration) -> bool {
        let control = self.control();
        let waited = self
            .changed
            .wait_timeout_while(control, time, |control| control.ended.is_none());
        let (control, _) = waited.unwrap_or_else(PoisonError::into_inner);
        control.ended.is_some()
    }

    fn set_state(&self, state: JobState, reason: Option<String>) {
        let mut control = self.control();
        control.state = state;
        if reason.is_some() {
            control.reason = reason;
        }
        let has_ended = matches!(
            state,
            JobState::Done | JobState::Failed | JobState::Cancelled
        );
        if has_ended {
            control.ended = Some(Instant::now());
        }
        self.changed.notify_all();
    }

    fn is_cancelled(&self) -> bool {
        self.orders().is_cancelled
    }

    fn orders(&self) -> Orders {
        self.control().orders
    }

    /// Waits until the orders differ from those that the job has seen, or for this time.
    fn wait_for_orders(&self, seen: Orders, time: Duration) -> Event {
        let control = self.control();
        let waited = self
            .changed
            .wait_timeout_while(control, time, |control| control.orders == seen);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        Event::Done
    }

    fn advance(&self, done: u64, copied: u64) {
        self.done.store(done, Ordering::Relaxed);
        self.copied.fetch_add(copied, Ordering::Relaxed);
    }
}

/// Interval at which the start of a job checks for cancellation.
const BEGIN_STEP: Duration = Duration::from_millis(50);
/// Longest wait for job threads at the end. A thread with a hung I/O ends with the process.
const END_PATIENCE: Duration = Duration::from_secs(30);

/// Minimum duration of an I/O on the target before the job shows it.
const TARGET_DELAY: Duration = Duration::from_secs(2);
/// Time that a new job of a disk waits for the end of a failed one.
const FAILED_PATIENCE: Duration = Duration::from_secs(5);

/// Removes a job from the list when dropped, without an announcement.
struct Unannounced(Jobs, Arc<Job>);

impl Drop for Unannounced {
    fn drop(&mut self) {
        let mut all = self.0.lock();
        if all.has(&self.1) {
            all.jobs.remove(&self.1.disk);
        }
    }
}

#[derive(Default)]
struct All {
    jobs: BTreeMap<String, Arc<Job>>,
    /// Predecessors of `jobs`, restored if the new job does not start.
    before: BTreeMap<String, Arc<Job>>,
    threads: Vec<JoinHandle<()>>,
    /// Names of backups that begin.
    beginning: BTreeSet<String>,
    is_ending: bool,
}

impl All {
    /// Returns true if this is the last job of its disk.
    fn has(&self, job: &Arc<Job>) -> bool {
        let known = self.jobs.get(&job.disk);
        known.is_some_and(|known| Arc::ptr_eq(known, job))
    }
}

/// The last job of each disk.
#[derive(Clone, Default)]
pub struct Jobs(Arc<Mutex<All>>);

impl Jobs {
    fn lock(&self) -> MutexGuard<'_, All> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn all(&self) -> Vec<Arc<Job>> {
        self.lock().jobs.values().cloned().collect()
    }

    /// Returns the job of a disk.
    ///
    /// # Errors
    /// If the disk has no job.
    pub fn of(&self, disk: &str) -> Result<Arc<Job>, Refusal> {
        let none = || {
            Refusal::NotFound(Fault::new(format!(
                "disk `{disk}` has no job; hint: lunette job list"
            )))
        };
        self.lock().jobs.get(disk).cloned().ok_or_else(none)
    }

    /// Returns the conflict of a change with the running job of a disk.
    pub fn at_work(&self, disk: &str) -> Option<Fault> {
        let all = self.lock();
        let job = all.jobs.get(disk).filter(|job| !job.has_ended());
        job.map(|job| job.in_the_way())
    }

    pub fn forget(&self, disk: &str) {
        let mut all = self.lock();
        if all.jobs.get(disk).is_some_and(|job| job.has_ended()) {
            all.jobs.remove(disk);
        }
    }

    /// Removes a job that did not start and restores its predecessor, unless another job of the disk has begun meanwhile.
    fn take_back(&self, job: &Arc<Job>) {
        let mut all = self.lock();
        if !all.has(job) {
            return;
        }
        match all.before.remove(&job.disk) {
            Some(before) => all.jobs.insert(job.disk.clone(), before),
            None => all.jobs.remove(&job.disk),
        };
    }

    fn begin(&self, job: Job) -> Result<Arc<Job>, Refusal> {
        let before = self.of(&job.disk);
        if let Some(failed) = before.ok().filter(|before| before.is_failing()) {
            failed.wait(FAILED_PATIENCE);
        }
        let mut all = self.lock();
        if all.is_ending {
            return Err(Refusal::Ending);
        }
        let known = all.jobs.get(&job.disk).filter(|known| !known.has_ended());
        if let Some(known) = known {
            if known.is_failing() {
                let (disk, kind) = (&job.disk, known.kind.word());
                let detail =
                    format!("disk {disk} has a failed {kind}, and its target has not responded");
                let help = "restore the target, or try again later: lunette job list";
                return Err(Refusal::conflict(detail, help));
            }
            return Err(Refusal::Conflict(vec![known.in_the_way()]));
        }
        let job = Arc::new(job);
        match all.jobs.insert(job.disk.clone(), Arc::clone(&job)) {
            Some(before) => all.before.insert(job.disk.clone(), before),
            None => all.before.remove(&job.disk),
        };
        Ok(job)
    }

    fn run(&self, work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        let thread = std::thread::Builder::new()
            .name("job".to_owned())
            .stack_size(bdev::STACK_BYTES);
        let thread = thread.spawn(work)?;
        let mut all = self.lock();
        all.threads.retain(|thread| !thread.is_finished());
        all.threads.push(thread);
        Ok(())
    }

    fn is_ending(&self) -> bool {
        self.lock().is_ending
    }

    /// Cancels all jobs and waits for their threads. Their disks are unchanged.
    pub fn end(&self) {
        let (jobs, threads) = {
            let mut all = self.lock();
            all.is_ending = true;
            (
                std::mem::take(&mut all.jobs),
                std::mem::take(&mut all.threads),
            )
        };
        jobs.values().for_each(|job| job.cancel());
        let until = Instant::now() + END_PATIENCE;
        for thread in threads {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(BEGIN_STEP / 10);
            }
            if thread.is_finished() {
                // A panic was logged already.
                thread.join().ok();
            } else {
                tracing::warn!("an I/O of a job is still in flight");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ram() -> Arc<dyn BlockDevice> {
        let options = bdev::RamOptions {
            size: 1 << 20,
            ..bdev::RamOptions::default()
        };
        Arc::new(bdev::Ram::create(options).unwrap())
    }

    fn begin(jobs: &Jobs) -> Arc<Job> {
        let disk = Disk::new("d", None, ram()).unwrap();
        let target = Some("nbd://h/e".to_owned());
        let job = jobs.begin(Job::new(&disk, JobKind::Mirror, target));
        job.unwrap()
    }

    fn mirror_job() -> (Arc<Job>, Mirror, Jobs) {
        let mirror = Mirror::new(ram(), ram());
        let jobs = Jobs::default();
        let job = begin(&jobs);
        job.register_mirror(&mirror);
        (job, mirror, jobs)
    }

    fn text(refused: Result<(), Refusal>) -> String {
        refused.unwrap_err().to_string()
    }

    #[test]
    fn switch_is_refused_from_the_moment_in_which_the_target_is_given_up() {
        let (job, mirror, jobs) = mirror_job();
        let reason = Some("cannot flush".to_owned());
        job.set_state(JobState::Ready, reason);
        job.switch(true).unwrap();
        assert!(job.orders().accepts_loss && job.body().reason.is_none());
        job.switch(false).unwrap();
        assert!(!job.orders().accepts_loss);
        mirror.progress().abandon();
        assert!(text(job.switch(false)).contains("the mirror has failed"));

        job.fail("cannot write to the target");
        let body = job.body();
        assert_eq!(body.state, JobState::Failed);
        assert_eq!(body.reason.as_deref(), Some("cannot write to the target"));
        let refused = text(job.switch(false));
        assert!(
            refused.contains("has failed: cannot write to the target"),
            "{refused}"
        );
        assert!(!job.has_ended(), "its I/O may be in flight");
        let fault = jobs.at_work("d").unwrap();
        assert_eq!(fault.detail, "disk d has a running mirror");
        job.cancel();
        assert_eq!(job.body().state, JobState::Failed);

        job.set_state(JobState::Failed, None);
        assert!(job.has_ended());
        assert!(text(job.switch(false)).contains("cannot write to the target"));
    }

    #[test]
    fn job_names_a_target_that_does_not_respond() {
        let (job, ..) = mirror_job();
        job.waits_for_target(true);
        assert_eq!(job.body().reason, None);
        *job.target_wait() = Instant::now().checked_sub(Duration::from_secs(7));
        let reason = "the target nbd://h/e has not responded for 7 s";
        assert_eq!(job.body().reason.as_deref(), Some(reason));
        job.waits_for_target(false);
        assert_eq!(job.body().reason, None);
    }

    #[test]
    fn job_that_does_not_start_leaves_its_successor_in_the_list() {
        let jobs = Jobs::default();
        let first = begin(&jobs);
        first.set_state(JobState::Failed, None);
        // Another job begins before the failed one is removed.
        let next = begin(&jobs);
        jobs.take_back(&first);
        assert!(jobs.at_work("d").is_some());
        next.give_up(&jobs, &Refusal::Ending);
        assert!(Arc::ptr_eq(&jobs.of("d").unwrap(), &first));
    }
}

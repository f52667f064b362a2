//! Long work on disks while clients use them: copies to another place (`copy`), what lies below an image brought up into it (`stream`) or the other way round (`commit`), and
//! snapshots (`snapshot`), which are short. One job at a time for each disk, on a thread of its own. A daemon that ends, or is killed,
//! leaves the disk as it was before the job: what a job has made so far is no disk of anybody.
//!
//! ```text
//!   running ⇄ paused ──▶ ready (a mirror that waits for its switch) ──▶ finishing ──▶ done
//!      └────────┴──────────┴──▶ cancelling (while its I/O hangs) ──▶ cancelled, failed
//! ```

mod backing_name;
mod commit;
mod copy;
mod exchange;
mod incremental;
mod snapshot;
mod stream;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bdev::{BlockDevice, Disk, Mirror, MirrorProgress};
use control::objects::JobState;

use crate::bitmaps::Bitmaps;
use crate::objects::{EventBus, Fault, Manager, Refusal, Servers};
use config::DiskConfig;

pub use commit::start_commit;
pub(crate) use copy::shown;
pub use copy::{Copy, start_copy};
pub use incremental::remove_bitmap;
pub use snapshot::{Overlay, snapshot};
pub use stream::start_stream;

/// What a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobKind {
    /// A copy of the disk that it goes on in.
    Mirror,
    /// A copy of the disk as it is when the copy is complete.
    Backup,
    /// What an image stands on comes into the image.
    Stream,
    /// What an image has goes into what it stands on.
    Commit,
    /// The disk goes on in a new image.
    Snapshot,
}

impl JobKind {
    /// The word for it in the API.
    pub fn word(self) -> &'static str {
        match self {
            JobKind::Mirror => "mirror",
            JobKind::Backup => "backup",
            JobKind::Stream => "stream",
            JobKind::Commit => "commit",
            JobKind::Snapshot => "snapshot",
        }
    }
}

/// What a job works with.
#[derive(Clone)]
pub struct Context {
    /// Who makes changes.
    pub manager: Manager,
    /// Workers.
    pub servers: Arc<Servers>,
    /// All jobs.
    pub jobs: Jobs,
    /// What has changed on disks since their backups.
    pub bitmaps: Arc<Bitmaps>,
    /// Whom they are announced to.
    pub event_bus: EventBus,
}

impl Context {
    /// A disk that is served, and how it is configured.
    fn disk(&self, name: &str) -> Result<(Arc<Disk>, DiskConfig), Refusal> {
        let name = name.to_owned();
        self.manager.call(move |owner| {
            let disk = owner.disk(&name)?;
            let config = owner.is_there(&disk)?.clone();
            owner.keeps_changes_of(&name)?;
            if !owner.is_shown_by_scsi(&name) {
                // Virtio-blk clients have no such promise: only SCSI has LBPRZ.
                disk.withdraw_discard_zeroes();
            }
            Ok((disk, config))
        })
    }

    /// Refuses a device if a disk has the same medium: a copy onto it would overwrite that disk.
    fn check_medium(&self, disk: &str, device: &dyn BlockDevice) -> Result<(), Refusal> {
        let Some(key) = device.medium().map(bdev::Medium::key) else {
            return Ok(());
        };
        let taken = self
            .manager
            .call(move |owner| Ok(owner.disk_of_medium(&key)))?;
        match taken {
            None => Ok(()),
            Some(other) => Err(same_medium(disk, &other)),
        }
    }
}

/// The refusal of a target that is the medium of disk `other`.
fn same_medium(disk: &str, other: &str) -> Refusal {
    let detail = format!("disk {disk}: the target is the medium of disk {other}");
    Refusal::conflict(detail, "name another target")
}

struct Control {
    state: JobState,
    /// Bytes that it may copy in a second; 0: as many as it can.
    speed: u64,
    is_paused: bool,
    switches: bool,
    is_cancelled: bool,
    reason: Option<String>,
    ended: Option<Instant>,
}

/// One job.
pub struct Job {
    disk: String,
    kind: JobKind,
    target: OnceLock<String>,
    /// The bitmap of a backup.
    incremental: Option<String>,
    total: u64,
    done: AtomicU64,
    copied: AtomicU64,
    started: Instant,
    control: Mutex<Control>,
    changed: Condvar,
    /// Writes of clients do not wait for its target any more when the job is cancelled.
    mirror: OnceLock<Arc<MirrorProgress>>,
}

impl Job {
    fn new(disk: &Disk, kind: JobKind, target: Option<String>) -> Job {
        Job {
            disk: disk.name().to_owned(),
            kind,
            target: target.map(OnceLock::from).unwrap_or_default(),
            incremental: None,
            total: disk.info().geometry.capacity_bytes(),
            done: AtomicU64::new(0),
            copied: AtomicU64::new(0),
            started: Instant::now(),
            control: Mutex::new(Control {
                state: JobState::Running,
                speed: 0,
                is_paused: false,
                switches: false,
                is_cancelled: false,
                reason: None,
                ended: None,
            }),
            changed: Condvar::new(),
            mirror: OnceLock::new(),
        }
    }

    fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has it ended, in whatever way?
    pub fn has_ended(&self) -> bool {
        self.control().ended.is_some()
    }

    /// As the API shows it.
    pub fn body(&self) -> control::objects::Job {
        let control = self.control();
        let until = control.ended.unwrap_or_else(Instant::now);
        let is_paused = control.is_paused;
        control::objects::Job {
            disk: self.disk.clone(),
            kind: self.kind.word().to_owned(),
            target: self.target.get().cloned(),
            incremental: self.incremental.clone(),
            state: match control.state {
                _ if control.is_cancelled && control.ended.is_none() => JobState::Cancelling,
                JobState::Running if is_paused => JobState::Paused,
                state => state,
            },
            done: self.done.load(Ordering::Relaxed),
            copied: self.copied.load(Ordering::Relaxed),
            total: self.total,
            speed: (control.speed > 0).then_some(control.speed),
            seconds: until.saturating_duration_since(self.started).as_secs(),
            reason: control.reason.clone(),
        }
    }

    /// Where it goes is known only now.
    fn has_target(&self, target: String) {
        self.target.set(target).ok();
    }

    /// It was not begun after all.
    fn give_up(&self, jobs: &Jobs, refusal: &Refusal) {
        self.set_state(JobState::Failed, Some(refusal.to_string()));
        jobs.take_back(&self.disk);
    }

    /// Runs the start of the job, which may block, on a thread of its own. Returns early if the job is cancelled; the job ends when the
    /// thread does.
    fn begin_while_wanted<T: Send + 'static>(
        self: &Arc<Job>,
        jobs: &Jobs,
        work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        // The result is handed over or comes back to the thread.
        let (result, begun) = mpsc::sync_channel(0);
        let job = Arc::clone(self);
        let thread = std::thread::Builder::new()
            .name("begin-job".to_owned())
            .stack_size(bdev::STACK_BYTES);
        let spawned = thread.spawn(move || {
            if let Err(unwanted) = result.send(work()) {
                // Its files are closed before the job ends.
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
                        "disk {}: the thread that began the job has failed",
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

    /// Changes how it is done.
    pub fn set(&self, paused: Option<bool>, speed: Option<u64>) {
        let mut control = self.control();
        control.is_paused = paused.unwrap_or(control.is_paused);
        control.speed = speed.unwrap_or(control.speed);
        self.changed.notify_all();
    }

    /// Has a mirror switch to its target: now, or as soon as it is complete.
    ///
    /// # Errors
    /// When it does not switch.
    pub fn switch(&self) -> Result<(), Refusal> {
        let mut control = self.control();
        // A commit switches by itself, unless that has failed once.
        let switches = matches!(self.kind, JobKind::Mirror | JobKind::Commit);
        if !switches || control.ended.is_some() {
            let detail = format!("disk {} has no mirror that could be switched to", self.disk);
            return Err(Refusal::Conflict(vec![Fault::new(detail)]));
        }
        (control.switches, control.is_paused) = (true, false);
        self.changed.notify_all();
        Ok(())
    }

    /// Clients of its disk write to this mirror.
    fn has_mirror(&self, mirror: &Mirror) {
        let control = self.control();
        self.mirror.set(Arc::clone(mirror.progress())).ok();
        if control.is_cancelled {
            mirror.progress().abandon();
        }
    }

    /// Has it end, with the disk as it was.
    pub fn cancel(&self) {
        let mut control = self.control();
        control.is_cancelled = true;
        if let Some(mirror) = self.mirror.get() {
            mirror.abandon();
        }
        self.changed.notify_all();
    }

    /// Waits until it has ended. False: not in time.
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

    /// Waits while it is paused, and as long as the part that was done last has to take by its speed. False: it is cancelled.
    fn goes_on(&self, part: Option<(Instant, u64)>) -> bool {
        let mut control = self.control();
        loop {
            if control.is_cancelled {
                return false;
            }
            let rest = part.and_then(|(began, bytes)| rest(began, bytes, control.speed));
            let time = match (control.is_paused, rest) {
                (true, _) => PAUSE,
                (false, Some(rest)) => rest,
                (false, None) => return true,
            };
            let waited = self.changed.wait_timeout(control, time);
            control = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until a copy that is complete is to be used. False: it is cancelled, or not `is_well` any more.
    fn waits_for_switch(&self, is_well: impl Fn() -> bool) -> bool {
        // The check may block: nothing is locked meanwhile.
        while is_well() {
            let control = self.control();
            if control.is_cancelled {
                return false;
            }
            if control.switches {
                return true;
            }
            let waited = self.changed.wait_timeout(control, PAUSE);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
        false
    }

    fn is_cancelled(&self) -> bool {
        self.control().is_cancelled
    }

    fn advance(&self, done: u64, copied: u64) {
        self.done.store(done, Ordering::Relaxed);
        self.copied.fetch_add(copied, Ordering::Relaxed);
    }
}

/// Interval at which the start of a job looks whether it is cancelled.
const BEGIN_STEP: Duration = Duration::from_millis(50);
/// Longest wait for the threads of jobs when the daemon ends. A thread with an I/O that hangs ends with the process.
const END_PATIENCE: Duration = Duration::from_secs(30);

/// How often it is looked whether a job that waits may go on: what it waits for may have failed.
const PAUSE: Duration = Duration::from_millis(500);

/// How long a part has to take yet.
fn rest(began: Instant, bytes: u64, speed: u64) -> Option<Duration> {
    if speed == 0 {
        return None;
    }
    let due = Duration::from_secs_f64(bytes as f64 / speed as f64);
    due.checked_sub(began.elapsed())
        .filter(|rest| !rest.is_zero())
}

/// A job that nobody has to hear of when it is over.
struct Unannounced(Jobs, Arc<Job>);

impl Drop for Unannounced {
    fn drop(&mut self) {
        let mut all = self.0.lock();
        let is_this = |known: &Arc<Job>| Arc::ptr_eq(known, &self.1);
        if all.jobs.get(&self.1.disk).is_some_and(is_this) {
            all.jobs.remove(&self.1.disk);
        }
    }
}

#[derive(Default)]
struct All {
    jobs: BTreeMap<String, Arc<Job>>,
    /// The jobs before these, for those that are not begun after all.
    before: BTreeMap<String, Arc<Job>>,
    threads: Vec<JoinHandle<()>>,
    is_ending: bool,
}

/// The jobs of a daemon: of each disk the last one.
#[derive(Clone, Default)]
pub struct Jobs(Arc<Mutex<All>>);

impl Jobs {
    fn lock(&self) -> MutexGuard<'_, All> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All of them, by disk.
    pub fn all(&self) -> Vec<Arc<Job>> {
        self.lock().jobs.values().cloned().collect()
    }

    /// The job of a disk.
    ///
    /// # Errors
    /// That there is none.
    pub fn of(&self, disk: &str) -> Result<Arc<Job>, Refusal> {
        let none = || Refusal::NotFound(Fault::new(format!("disk `{disk}` has no job")));
        self.lock().jobs.get(disk).cloned().ok_or_else(none)
    }

    /// The job that is at work on a disk, in words.
    pub fn at_work(&self, disk: &str) -> Option<&'static str> {
        let all = self.lock();
        let job = all.jobs.get(disk).filter(|job| !job.has_ended());
        job.map(|job| job.kind.word())
    }

    /// Forgets the job of a disk that has ended.
    pub fn forget(&self, disk: &str) {
        let mut all = self.lock();
        if all.jobs.get(disk).is_some_and(|job| job.has_ended()) {
            all.jobs.remove(disk);
        }
    }

    /// Removes a job that was not begun after all. The job before it is shown again.
    fn take_back(&self, disk: &str) {
        let mut all = self.lock();
        match all.before.remove(disk) {
            Some(before) => all.jobs.insert(disk.to_owned(), before),
            None => all.jobs.remove(disk),
        };
    }

    /// Enters a job.
    fn begin(&self, job: Job) -> Result<Arc<Job>, Refusal> {
        let mut all = self.lock();
        if all.is_ending {
            return Err(Refusal::Ending);
        }
        let known = all.jobs.get(&job.disk).filter(|known| !known.has_ended());
        if let Some(known) = known {
            let detail = format!("disk {} has a {} at work", job.disk, known.kind.word());
            let help = "wait for it, lunette job wait, or end it, lunette job cancel";
            return Err(Refusal::Conflict(vec![Fault::new(detail).help(help)]));
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

    /// Ends all jobs, and waits for their threads: the daemon ends. Their disks are as they were.
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
                // A panic was logged.
                thread.join().ok();
            } else {
                tracing::warn!("a job's I/O has not ended");
            }
        }
    }
}

//! Backups of a point in time at their start, of several disks at one moment. A push copies each disk to a target. A pull serves each disk
//! read-only over NBD until the backup is ended. Clients write meanwhile: see [`bdev::PointInTime`].
//!
//! Each disk has a job of its own. Jobs with one backup name belong together. The checkpoint of a disk is complete with its job.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bdev::Disk;
use config::DiskConfig;
use control::EventKind;
use control::objects::{Backup as Body, JobState};
use nbd_server::{Address, DirtyContext, ExportOptions, Server};
use reactor::Rights;

use super::copy::{begin, prepare_target, shown};
use super::copying::Copying;
use super::exchange::failed;
use super::incremental::{CheckpointNames, Incremental, check_on_all};
use super::point_in_time::{PointOfDisk, ScratchOptions};
use super::{Context, Job, JobKind, Jobs};
use crate::objects::{Fault, Refusal};

/// Number of the next backup.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// Destination of the point in time of one disk.
#[derive(Clone, Debug)]
pub enum Destination {
    /// Copied to this target. All other settings are those of the disk.
    Push(Box<DiskConfig>),
    /// Served at this address.
    Pull(Address),
}

/// A backup of several disks.
#[derive(Clone, Debug)]
pub struct NewBackup {
    /// Name; `None`: a new one.
    pub name: Option<String>,
    pub disks: Vec<(String, Destination)>,
    pub checkpoints: CheckpointNames,
    pub scratch: ScratchOptions,
    /// Speed limit of each push in bytes per second; 0 for none.
    pub speed: u64,
}

/// Backup that a job belongs to.
#[derive(Clone, Debug)]
pub(super) struct BackupOfJob {
    pub name: String,
    /// Number of the backup. Names are reused.
    pub number: u64,
    pub checkpoints: CheckpointNames,
    pub address: Option<String>,
    /// Number of disks.
    pub disks: usize,
    pub stage: Arc<Mutex<Stage>>,
}

/// Stage of a backup, which its jobs share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The jobs of the backup are prepared one after the other.
    Beginning,
    /// All jobs run. Each job processes a cancellation itself.
    Running,
    /// A pull that completes its checkpoints.
    Ending,
    Cancelled,
}

/// Name of a backup that begins. No other backup begins with it until this is dropped, when the jobs of the backup have the name.
struct BeginningBackup {
    jobs: Jobs,
    name: String,
    number: u64,
}

impl Drop for BeginningBackup {
    fn drop(&mut self) {
        self.jobs.lock().beginning.remove(&self.name);
    }
}

/// A disk of a backup before the cut.
pub(super) struct Prepared {
    pub job: Arc<Job>,
    pub disk: Arc<Disk>,
    pub point: Arc<PointOfDisk>,
    pub work: Work,
}

pub(super) enum Work {
    Push(Box<Copying>),
    Pull(Box<Pull>),
}

pub(super) struct Pull {
    address: Address,
    /// Name of the export for clients.
    export_name: String,
    checkpoints: CheckpointNames,
    incremental: Option<Incremental>,
}

pub(super) fn take<T>(cell: &Mutex<Option<T>>) -> Option<T> {
    cell.lock().unwrap_or_else(PoisonError::into_inner).take()
}

impl Work {
    pub fn incremental(&mut self) -> Option<&mut Incremental> {
        match self {
            Work::Push(copying) => copying.incremental.as_mut(),
            Work::Pull(pull) => pull.incremental.as_mut(),
        }
    }
}

/// Starts a backup. Returns its name when the point in time has begun and the jobs run. Blocks.
///
/// # Errors
/// Nothing has changed then.
pub fn start_backup(context: &Context, backup: &NewBackup) -> Result<String, Refusal> {
    let begun = context.jobs.backup_name(backup.name.as_deref())?;
    if let Some(since) = &backup.checkpoints.since {
        let names = backup.disks.iter().map(|(disk, _)| disk.as_str());
        // `prepare` refuses the others.
        let usable = names.filter(|disk| context.disk(disk, JobKind::Backup).is_ok());
        check_on_all(&context.bitmaps, &usable.collect::<Vec<_>>(), since)?;
    }
    let of_jobs = BackupOfJob {
        name: begun.name.clone(),
        number: begun.number,
        checkpoints: backup.checkpoints.clone(),
        address: None,
        disks: backup.disks.len(),
        stage: Arc::new(Mutex::new(Stage::Beginning)),
    };
    let mut prepared: Vec<Prepared> = Vec::new();
    let is_prepared = backup.disks.iter().try_for_each(|(disk, destination)| {
        of_jobs.enter(Stage::Beginning)?;
        prepared.push(prepare(context, backup, &of_jobs, disk, destination)?);
        Ok(())
    });
    if let Err(refusal) = is_prepared {
        for one in prepared {
            one.abandon(context, &refusal);
        }
        return Err(refusal);
    }
    let prepared = super::points::begin(context, &of_jobs, prepared)?;
    let is_pull = |one: &Prepared| matches!(one.work, Work::Pull(_));
    let (pulls, pushes): (Vec<_>, Vec<_>) = prepared.into_iter().partition(is_pull);
    // A failure of one copy does not concern the others from here on.
    for push in pushes {
        run(context, vec![push], super::push::back_up);
    }
    if !pulls.is_empty() {
        run(context, pulls, super::pull::serve);
    }
    Ok(of_jobs.name)
}

impl BackupOfJob {
    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters the next stage.
    ///
    /// # Errors
    /// The backup was cancelled.
    pub fn enter(&self, next: Stage) -> Result<(), Refusal> {
        let mut stage = self.stage();
        if *stage == Stage::Cancelled {
            let detail = format!("the backup {} was cancelled", self.name);
            return Err(Refusal::Conflict(vec![Fault::new(detail)]));
        }
        *stage = next;
        Ok(())
    }
}

fn prepare(
    context: &Context,
    backup: &NewBackup,
    of_jobs: &BackupOfJob,
    disk: &str,
    destination: &Destination,
) -> Result<Prepared, Refusal> {
    let (disk, now) = context.disk(disk, JobKind::Backup)?;
    if now.backend.takes_turns() {
        return Err(Refusal::conflict(
            format!(
                "disk {}: another daemon may change it during the backup, because lock=while-active",
                now.name
            ),
            "copy it as of the end, lunette disk backup --at end, or add it again with lock=always",
        ));
    }
    let mut export_name = String::new();
    let (target, address) = match destination {
        Destination::Push(target) => (shown(&target.backend), None),
        Destination::Pull(address) => {
            let nbd = context.servers.transports().ok_or(Refusal::Ending)?.nbd;
            export_name = export_name_at(&nbd, address, disk.name(), &of_jobs.name);
            let tls = nbd.requires_tls(address);
            (url(address, &export_name, tls), Some(address.clone()))
        }
    };
    let mut job = Job::new(&disk, JobKind::Backup, Some(target));
    job.set(None, Some(backup.speed));
    job.incremental.clone_from(&backup.checkpoints.since);
    job.backup = Some(BackupOfJob {
        address: address.map(|address| shown_address(&address)),
        ..of_jobs.clone()
    });
    let job = context.jobs.begin(job)?;
    let (of_thread, its_job) = (context.clone(), Arc::clone(&job));
    let (backup, destination) = (backup.clone(), destination.clone());
    let prepare = move || {
        let context = of_thread;
        if let (Destination::Pull(_), Some(name), 2..) = (
            &destination,
            &backup.checkpoints.checkpoint,
            backup.disks.len(),
        ) {
            check_new(&context, disk.name(), name)?;
        }
        let names = Some(&backup.checkpoints).filter(|names| !names.is_empty());
        let work = match destination {
            Destination::Push(target) => {
                let config = prepare_target(&now, &target, &disk)?;
                let copying = begin(&context, &its_job, &disk, config, names)?;
                Work::Push(Box::new(copying))
            }
            Destination::Pull(address) => {
                super::copy::check_source(&context, &disk, &its_job)?;
                let incremental =
                    names.map(|names| Incremental::prepare(&context, &disk, names, None));
                let incremental = incremental.transpose()?;
                Work::Pull(Box::new(Pull {
                    address,
                    export_name,
                    checkpoints: backup.checkpoints,
                    incremental: incremental.map(|(incremental, _)| incremental),
                }))
            }
        };
        let count = backup.disks.len() as u64;
        let point = PointOfDisk::prepare(&context, &disk, &now, &backup.scratch, count);
        let point = point.inspect_err(|_| work.remove_target())?;
        Ok(Prepared {
            job: its_job,
            disk,
            point,
            work,
        })
    };
    let undo = |prepared: &Prepared| prepared.work.remove_target();
    job.begin_while_wanted(&context.jobs, prepare, undo)
}

/// Refuses a checkpoint that exists. A pull of several disks creates the checkpoints of all disks or of none. It could not restore a
/// replaced one.
fn check_new(context: &Context, disk: &str, name: &str) -> Result<(), Refusal> {
    let known = context.bitmaps.of(disk);
    match known.iter().any(|known| known.name == name) {
        false => Ok(()),
        true => Err(Refusal::conflict(
            format!(
                "disk {disk}: checkpoint {name} exists, and a pull of several disks replaces none"
            ),
            &format!(
                "name another checkpoint, or remove this one with lunette disk bitmap remove {disk} {name}"
            ),
        )),
    }
}

impl Work {
    /// Removes the target if this backup has created it.
    fn remove_target(&self) {
        if let Work::Push(copying) = self {
            copying.remove_target();
        }
    }
}

/// Returns the name of a pulled disk's export. The address may have an export of the disk's name already, such as that of the disk itself.
fn export_name_at(nbd: &Server, address: &Address, disk: &str, backup: &str) -> String {
    match nbd.has_export(address, disk) {
        true => format!("{disk}@{backup}"),
        false => disk.to_owned(),
    }
}

fn shown_address(address: &Address) -> String {
    match address {
        Address::Unix(path) => format!("unix:{}", path.display()),
        Address::Tcp(address) => format!("tcp:{address}"),
    }
}

/// Returns the address of an export for clients. `tls`: the daemon serves it with TLS only.
fn url(address: &Address, export: &str, tls: bool) -> String {
    let scheme = if tls { "nbds" } else { "nbd" };
    match address {
        Address::Unix(path) => format!("{scheme}+unix:///{export}?socket={}", path.display()),
        Address::Tcp(address) => format!("{scheme}://{address}/{export}"),
    }
}

impl Prepared {
    /// Ends the job of a backup that does not start.
    pub fn abandon(self, context: &Context, refusal: &Refusal) {
        self.work.remove_target();
        self.job.give_up(&context.jobs, refusal);
    }

    /// Returns the name of the export in the daemon, which no configured export can have.
    fn export(&self) -> String {
        let backup = self.job.backup.as_ref();
        let backup = backup.map_or("", |backup| backup.name.as_str());
        format!("backup/{backup}/{}", self.disk.name())
    }

    /// Exports the point in time of a pull.
    pub fn serve(&self, context: &Context) -> Result<(), Refusal> {
        let Work::Pull(pull) = &self.work else {
            return Ok(());
        };
        let name = self.disk.name();
        let transports = context.servers.transports().ok_or(Refusal::Ending)?;
        let since = pull.checkpoints.since.as_ref();
        let frozen = pull.incremental.as_ref().and_then(Incremental::frozen);
        let dirty = since.zip(frozen).map(|(since, bits)| DirtyContext {
            name: since.clone(),
            bits: Arc::clone(bits),
        });
        let served = Disk::new(name, None, self.point.point.reader());
        let served = served.map_err(|error| failed(name, &error))?;
        let options = ExportOptions {
            name: self.export(),
            export_name: pull.export_name.clone(),
            description: format!("point in time of disk {name}"),
            read_only: true,
            addresses: vec![pull.address.clone()],
            dirty,
            // As the other exports of the address.
            tls: transports.nbd.requires_tls(&pull.address),
        };
        let open = transports
            .nbd
            .add_export(options, Rights::default(), Arc::new(served));
        match open.map_err(|error| failed(name, &error))?.is_empty() {
            false => Ok(()),
            true => {
                let export = self.export();
                let mut waiting = transports.nbd.waiting_listeners().into_iter();
                let found = waiting.find(|(name, _)| *name == export);
                let address = shown_address(&pull.address);
                let reason = found.map_or_else(
                    || format!("cannot listen on {address}"),
                    |(_, one)| one.reason,
                );
                Err(failed(name, &reason))
            }
        }
    }

    /// Removes the export of a pull, if there is one.
    pub fn unserve(&self, context: &Context) {
        let nbd: Option<Arc<Server>> = context.servers.transports().map(|all| all.nbd);
        if let (Work::Pull(_), Some(nbd)) = (&self.work, nbd)
            && !nbd.remove_export(&self.export())
        {
            tracing::warn!(
                disk = self.disk.name(),
                "NBD connections of the backup did not end in time"
            );
        }
    }
}

/// Runs the jobs of disks on one thread.
fn run(context: &Context, prepared: Vec<Prepared>, work: fn(&Context, Vec<Prepared>)) {
    let jobs: Vec<Arc<Job>> = prepared.iter().map(|one| Arc::clone(&one.job)).collect();
    for job in &jobs {
        context.event_bus.publish(EventKind::JobStarted, &job.disk);
    }
    // Stays here if the thread cannot start.
    let prepared = Arc::new(Mutex::new(Some(prepared)));
    let (of_thread, its_context) = (Arc::clone(&prepared), context.clone());
    let started = context.jobs.run(move || {
        if let Some(prepared) = take(&of_thread) {
            work(&its_context, prepared);
        }
    });
    if let Err(error) = started {
        for one in take(&prepared).into_iter().flatten() {
            one.unserve(context);
            one.point.end();
            let refusal = failed(&one.job.disk, &format!("cannot start a thread: {error}"));
            one.abandon(context, &refusal);
        }
    }
}

/// Announces the end of a backup of one disk.
pub(super) fn finish(
    job: &Job,
    events: &crate::objects::EventBus,
    state: JobState,
    reason: Option<String>,
) {
    let name = job.disk.clone();
    let event = match state {
        JobState::Done => EventKind::JobDone,
        JobState::Cancelled => EventKind::JobCancelled,
        _ => EventKind::JobFailed,
    };
    match &reason {
        Some(reason) => tracing::error!(disk = name, "backup failed: {reason}"),
        None => tracing::info!(disk = name, "backup ended: {}", event.word()),
    }
    job.set_state(state, reason);
    events.publish(event, &name);
}

impl Jobs {
    /// Returns the name and the number of a new backup.
    fn backup_name(&self, wanted: Option<&str>) -> Result<BeginningBackup, Refusal> {
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let mut all = self.lock();
        let running = |name: &str| {
            let mut jobs = all.jobs.values().filter(|job| !job.has_ended());
            all.beginning.contains(name) || jobs.any(|job| job.is_of_backup(name))
        };
        let name = match wanted {
            Some(name) if !crate::bitmaps::is_name(name) => {
                let fault = Fault::at("/name", format!("{name:?} is not a valid backup name"));
                let help = crate::bitmaps::NAMES;
                Err(Refusal::Invalid(vec![fault.help(help)]))
            }
            Some(name) if running(name) => Err(Refusal::conflict(
                format!("a backup named {name} is running"),
                "end it with lunette backup end, or choose another name",
            )),
            Some(name) => Ok(name.to_owned()),
            None => {
                let mut names = (number..).map(|number| format!("backup-{number}"));
                Ok(names.find(|name| !running(name)).unwrap_or_default())
            }
        }?;
        all.beginning.insert(name.clone());
        drop(all);
        Ok(BeginningBackup {
            jobs: self.clone(),
            name,
            number,
        })
    }

    /// Returns the backups with running jobs, and the last jobs of others.
    pub fn backups(&self) -> Vec<Body> {
        let mut all: BTreeMap<u64, Body> = BTreeMap::new();
        for job in self.all() {
            let Some(backup) = &job.backup else { continue };
            let known = all.entry(backup.number).or_insert_with(|| Body {
                name: backup.name.clone(),
                pull: backup.address.clone(),
                checkpoint: backup.checkpoints.checkpoint.clone(),
                since: backup.checkpoints.since.clone(),
                jobs: Vec::new(),
            });
            known.jobs.push(job.body());
        }
        all.into_values().collect()
    }

    /// Returns the jobs of the last backup with a name.
    ///
    /// # Errors
    /// If there is no backup of this name.
    pub fn of_backup(&self, name: &str) -> Result<Vec<Arc<Job>>, Refusal> {
        let mut jobs = self.all();
        jobs.retain(|job| job.is_of_backup(name));
        let number = |job: &Arc<Job>| job.backup.as_ref().map(|backup| backup.number);
        let last = jobs.iter().map(number).max();
        jobs.retain(|job| Some(number(job)) == last);
        match jobs.is_empty() {
            false => Ok(jobs),
            true => Err(no_backup(name)),
        }
    }
}

impl Jobs {
    /// Ends a pull. Its checkpoints are complete.
    ///
    /// # Errors
    /// The backup is not a pull, or a part of it does not wait for its end. Nothing has changed then.
    pub fn end_backup(&self, name: &str) -> Result<Vec<Arc<Job>>, Refusal> {
        let known = self.of_backup(name)?;
        let Some(backup) = known.iter().find_map(|job| job.backup.as_ref()) else {
            return Ok(known);
        };
        if backup.address.is_none() {
            let detail = format!("the backup {name} is not served");
            let help = "a backup to a target ends by itself; see lunette backup list";
            return Err(Refusal::conflict(detail, help));
        }
        let mut stage = backup.stage();
        // Includes the jobs that have begun before the stage was locked.
        let jobs = self.of_backup(name)?;
        let why = match *stage {
            Stage::Beginning => Some("has not begun on all disks".to_owned()),
            Stage::Cancelled => Some("was cancelled".to_owned()),
            // A repeated request waits for the same end.
            Stage::Ending => return Ok(jobs),
            Stage::Running => {
                // A job that ends because of a failure has a reason already.
                let has_reason = |job: &Job| job.body().reason.is_some();
                let ended = jobs
                    .iter()
                    .find(|job| job.has_ended() || job.is_cancelled() || has_reason(job));
                ended.map(|job| match job.body().reason {
                    Some(reason) => {
                        let named = format!("disk {}: ", job.disk);
                        let reason = reason.strip_prefix(&named).unwrap_or(&reason);
                        format!("has failed on disk {}: {reason}", job.disk)
                    }
                    None => format!("has ended on disk {}", job.disk),
                })
            }
        };
        if let Some(why) = why {
            let help =
                "see lunette backup list; lunette backup cancel ends it without its checkpoints";
            return Err(Refusal::conflict(format!("the backup {name} {why}"), help));
        }
        *stage = Stage::Ending;
        for job in &jobs {
            job.end_pull();
        }
        drop(stage);
        Ok(jobs)
    }

    /// Cancels a backup. Its checkpoints are not created.
    ///
    /// # Errors
    /// If there is no backup of this name, or its checkpoints become complete.
    pub fn cancel_backup(&self, name: &str) -> Result<Vec<Arc<Job>>, Refusal> {
        let jobs = self.of_backup(name)?;
        if let Some(backup) = jobs.iter().find_map(|job| job.backup.as_ref()) {
            let mut stage = backup.stage();
            if *stage == Stage::Ending && jobs.iter().any(|job| !job.has_ended()) {
                let detail = format!("the backup {name} is about to end");
                return Err(Refusal::conflict(detail, "see lunette backup list"));
            }
            *stage = Stage::Cancelled;
        }
        // Jobs that began meanwhile are among these, or see the stage.
        let jobs = self.of_backup(name).unwrap_or(jobs);
        for job in jobs.iter().filter(|job| !job.has_ended()) {
            job.cancel();
        }
        Ok(jobs)
    }
}

impl Job {
    fn is_of_backup(&self, name: &str) -> bool {
        let backup = self.backup.as_ref();
        backup.is_some_and(|backup| backup.name == name)
    }

    /// Ends a pull: its checkpoint is complete.
    fn end_pull(&self) {
        self.control().orders.switches = true;
        self.changed.notify_all();
    }
}

/// Parses the address of a pull: `unix:PATH` or `tcp:IP:PORT`.
///
/// # Errors
/// If it is neither.
pub fn pull_address(text: &str) -> Result<Address, Fault> {
    let address = match text.split_once(':') {
        Some(("unix", path)) if !path.is_empty() => Some(Address::Unix(PathBuf::from(path))),
        Some(("tcp", address)) => address.parse().ok().map(Address::Tcp),
        _ => None,
    };
    let Some(address) = address else {
        let fault = Fault::at("/pull", format!("{text:?} is not an address"));
        return Err(fault.help("unix:PATH, or tcp:IP:PORT"));
    };
    if matches!(address, Address::Tcp(address) if address.port() == 0) {
        let fault = Fault::at(
            "/pull",
            format!("{text:?} has port 0, so no client could find it"),
        );
        return Err(fault.help("name a free port, such as 10809"));
    }
    Ok(address)
}

/// Returns the refusal of a name that no backup has.
pub(crate) fn no_backup(name: &str) -> Refusal {
    let fault = Fault::new(format!("there is no backup `{name}`"));
    Refusal::NotFound(fault.help("lunette backup list"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_beginning_backup_is_in_use() {
        let jobs = Jobs::default();
        let begun = jobs.backup_name(Some("mon")).unwrap();
        let refused = jobs.backup_name(Some("mon")).err().unwrap().to_string();
        assert!(
            refused.contains("a backup named mon is running"),
            "{refused}"
        );
        drop(begun);
        assert_eq!(jobs.backup_name(Some("mon")).unwrap().name, "mon");
    }

    #[test]
    fn address_of_a_pull_has_a_port_and_states_tls() {
        let address = pull_address("tcp:192.0.2.1:10809").unwrap();
        assert_eq!(url(&address, "d0", false), "nbd://192.0.2.1:10809/d0");
        assert_eq!(url(&address, "d0", true), "nbds://192.0.2.1:10809/d0");
        let socket = pull_address("unix:/run/b.sock").unwrap();
        assert_eq!(
            url(&socket, "d0", true),
            "nbds+unix:///d0?socket=/run/b.sock"
        );
        let fault = pull_address("tcp:127.0.0.1:0").unwrap_err();
        assert!(fault.detail.contains("port 0"), "{}", fault.detail);
    }
}

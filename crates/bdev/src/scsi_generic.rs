//! A disk on a SCSI device of this machine: `/dev/sgN`, or a block device with SG_IO. Commands are passed through.
//!
//! SG_IO blocks until the device has answered, hence threads of the disk call it. They start with the disk: workers may not start threads
//! or make such calls. A running command cannot be aborted; one that waits for a thread can.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use block::PassedReservations;
use iscsi_initiator::{
    CommandDone, CommandError, CommandSink, Ended, KnownUnits, Sameness, Sense, UnitCommand,
    UnitEvent, UnitInfo, carry_out, checked, is_change,
};
use sys::sg_io::{self, Answer, Transfer};

use crate::OpenError;
use crate::network_medium::NetworkMedium;
use crate::scsi::{CommandUnit, ScsiDisk, ScsiDiskParts, Watch};

/// Threads: Linux has at most 16 commands in flight per `/dev/sgN` descriptor.
const THREADS: usize = 16;
/// Time limit of a read or write, enforced by the kernel.
const IO_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit of any other command: formatting takes hours.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// Time limit for a busy device.
const BUSY_LIMIT: Duration = Duration::from_secs(120);
/// Maximum unit attentions of a new descriptor, one per command.
const ATTENTIONS_MAX: u32 = 16;
/// CHECK CONDITION, ILLEGAL REQUEST, INVALID FIELD IN CDB in fixed format.
const INVALID_FIELD: [u8; 18] = [0x70, 0, 5, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x24, 0, 0, 0, 0, 0];

/// Options for opening a SCSI device.
#[derive(Clone, Debug)]
pub struct ScsiGenericOptions {
    /// Path of `/dev/sgN` or of a block device.
    pub path: PathBuf,
    /// Refuse writes.
    pub read_only: bool,
    /// Handling of commands for reservations.
    pub reservations: PassedReservations,
    /// Bytes per logical block: the device's own, or `None`.
    pub block_size: Option<u32>,
}

impl ScsiDisk {
    /// Opens and queries a SCSI device of this machine.
    ///
    /// # Errors
    /// The device cannot be opened or used; with a hint.
    pub fn open_generic(options: &ScsiGenericOptions) -> Result<ScsiDisk, OpenError> {
        let failed = |reason: String| OpenError::ScsiDevice {
            path: options.path.clone(),
            reason,
        };
        let device = Device::open(options).map_err(failed)?;
        let info = device
            .query_unit()
            .map_err(|error| failed(error.to_string()))?;
        let key = medium_key(&options.path, &info);
        let mut medium = NetworkMedium::new(key);
        if options.path.parent() == Some(Path::new("/dev")) {
            // The kernel assigns the path, which may lead to another device after a restart of the machine.
            medium = medium.with_units(KnownUnits::of_scsi_device(&info.identity));
        }
        let watch = Arc::new(Watch::default());
        let threads = Arc::new(Threads {
            device,
            info: Mutex::new(info.clone()),
            watch: Arc::clone(&watch),
            has_changed: AtomicBool::new(false),
            queue: Mutex::default(),
            work: Condvar::new(),
        });
        let unit = GenericUnit(threads);
        unit.start()
            .map_err(|error| failed(format!("cannot start a thread for its commands: {error}")))?;
        let parts = ScsiDiskParts {
            kind: "scsi_generic",
            unit: Box::new(unit),
            info,
            medium,
            watch,
            read_only: options.read_only,
            passthrough: Some(options.reservations),
            block_size: options.block_size,
        };
        ScsiDisk::new(parts, failed)
    }
}

/// Returns the key of a device's medium. A name that is unique only within its target cannot distinguish devices of several targets, so
/// the path is used instead.
fn medium_key(path: &Path, info: &UnitInfo) -> String {
    let path = path.display();
    let identity = &info.identity;
    match (
        identity.world_wide_name(),
        identity.local_name(),
        &info.serial,
    ) {
        (Some(name), ..) => format!("iscsi:{name}"),
        (None, Some(name), _) => format!("scsi:{path}/{name}"),
        (None, None, Some(serial)) => format!("scsi:{}/{}/{serial}", info.vendor, info.product),
        (None, None, None) => format!("scsi:{path}"),
    }
}

struct Device {
    file: File,
    transfer_max: usize,
}

impl Device {
    fn open(options: &ScsiGenericOptions) -> Result<Device, String> {
        let path = &options.path;
        // The kernel requires write access even for most reading commands. The layers above decide about commands of clients.
        let opened = OpenOptions::new().read(true).write(true).open(path);
        let file = match opened {
            Err(error) if is_read_only(&error) => File::open(path),
            other => other,
        };
        let file = file.map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => sandbox::refusal(path, true).unwrap_or_else(|| {
                format!("{error}; hint: give the daemon's user read and write permission (group disk, or a udev rule)")
            }),
            io::ErrorKind::NotFound => {
                format!("{error}; hint: list devices with `lsscsi -g`; /dev/sgN needs the kernel's module sg")
            }
            _ => error.to_string(),
        })?;
        sg_io::check(file.as_fd()).map_err(|error| {
            format!("it does not accept SCSI commands: {error}; hint: name /dev/sgN, or a block device that is a SCSI device")
        })?;
        let kind = file.metadata().map_err(|error| error.to_string())?;
        let is_block = kind.file_type().is_block_device();
        if !is_block && kind.rdev() == 0 {
            return Err("it is not a device".to_owned());
        }
        let most = sg_io::transfer_max(file.as_fd(), is_block);
        Ok(Device {
            file,
            transfer_max: most.unwrap_or(usize::MAX),
        })
    }

    /// Executes a command; `None`: the device cannot be reached.
    fn execute(&self, command: &UnitCommand) -> Option<CommandDone> {
        let length = match command.cdb_length {
            0 => cdb_length(command.cdb[0]),
            given => usize::from(given).min(16),
        };
        let cdb = &command.cdb[..length];
        if command.out.len().max(command.read as usize) > self.transfer_max {
            return Some(refused());
        }
        let timeout = match command.as_is {
            true => COMMAND_TIMEOUT,
            false => IO_TIMEOUT,
        };
        let mut data = vec![0; command.read as usize];
        let transfer = match (command.out.is_empty(), data.is_empty()) {
            (false, _) => Transfer::Out(&command.out),
            (true, false) => Transfer::In(&mut data),
            (true, true) => Transfer::None,
        };
        match sg_io::execute(self.file.as_fd(), cdb, transfer, timeout) {
            Ok(answer) if answer.host_status == 0 => Some(done(answer, data)),
            Ok(answer) => {
                tracing::debug!(
                    host_status = answer.host_status,
                    "SCSI command did not reach the device"
                );
                None
            }
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Some(refused()),
            // The kernel's filter for users without the right to send all commands.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => Some(refused()),
            Err(error) => {
                tracing::debug!("cannot send a command to the SCSI device: {error}");
                None
            }
        }
    }

    fn query(&self, name: &'static str, cdb: &[u8], read: u32) -> Result<Vec<u8>, CommandError> {
        let mut command = UnitCommand {
            read,
            cdb_length: cdb.len() as u8,
            ..UnitCommand::default()
        };
        command.cdb[..cdb.len()].copy_from_slice(cdb);
        let mut attentions = 0;
        loop {
            let done = self.execute(&command).ok_or_else(|| CommandError::Answer {
                command: name,
                reason: "the device is unreachable".to_owned(),
            })?;
            match checked(name, done) {
                Err(CommandError::Refused {
                    sense: Some(sense), ..
                }) if sense.key == Sense::UNIT_ATTENTION && attentions < ATTENTIONS_MAX => {
                    attentions += 1;
                }
                other => return other.map(|done| done.data),
            }
        }
    }

    fn query_unit(&self) -> Result<UnitInfo, CommandError> {
        let mut info = UnitInfo::default();
        let mut query = |name, cdb: &[u8], read| self.query(name, cdb, read);
        // Clears a new descriptor's unit attentions; without a medium the unit is not ready.
        query("TEST UNIT READY", &[0; 6], 0).ok();
        info.take_identity(&mut query)?;
        info.take_size(&mut query)?;
        let (most, block) = (self.transfer_max as u64, u64::from(info.block_size.max(1)));
        let most = u32::try_from(most / block).unwrap_or(u32::MAX).max(1);
        info.transfer_max = Some(info.transfer_max.map_or(most, |limit| limit.min(most)));
        Ok(info)
    }
}

fn is_read_only(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ReadOnlyFilesystem
}

/// Returns the CDB length assumed by Linux (SPC-5, 4.2.5.1).
fn cdb_length(opcode: u8) -> usize {
    const LENGTHS: [usize; 8] = [6, 10, 10, 12, 16, 12, 10, 10];
    LENGTHS[usize::from(opcode >> 5)]
}

fn done(answer: Answer, mut data: Vec<u8>) -> CommandDone {
    let missing = usize::try_from(answer.residual)
        .unwrap_or(0)
        .min(data.len());
    data.truncate(data.len() - missing);
    CommandDone {
        status: answer.status,
        sense: answer.sense,
        data,
        residual: -i64::from(answer.residual),
        ..CommandDone::default()
    }
}

fn refused() -> CommandDone {
    CommandDone {
        status: 0x02,
        sense: INVALID_FIELD.to_vec(),
        ..CommandDone::default()
    }
}

struct Task {
    sink: Arc<dyn CommandSink>,
    token: u64,
    command: UnitCommand,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    is_closed: bool,
}

/// State shared by the threads.
struct Threads {
    device: Device,
    /// Properties reported to users.
    info: Mutex<UnitInfo>,
    watch: Arc<Watch>,
    /// The device has reported a change.
    has_changed: AtomicBool,
    queue: Mutex<Queue>,
    work: Condvar,
}

struct GenericUnit(Arc<Threads>);

impl Threads {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        sg_io::block_signals();
        while let Some(task) = self.next() {
            let ended = self.carry_out(&task.command);
            if self.has_changed.swap(false, Ordering::AcqRel) {
                self.requery_unit();
            }
            task.sink.ended(task.token, ended);
        }
    }

    /// Waits for the next task. `None`: the thread ends.
    fn next(&self) -> Option<Task> {
        let mut queue = self.queue();
        loop {
            if let Some(task) = queue.tasks.pop_front() {
                return Some(task);
            }
            if queue.is_closed {
                return None;
            }
            let waited = self.work.wait(queue);
            queue = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn carry_out(&self, command: &UnitCommand) -> Ended {
        let on_event = |done: &CommandDone| {
            if is_change(done) || command.changes_unit() {
                self.has_changed.store(true, Ordering::Release);
            }
        };
        match carry_out(
            command,
            BUSY_LIMIT,
            |one| self.device.execute(one),
            on_event,
        ) {
            Some(done) => Ended::Done(done),
            None => Ended::Lost,
        }
    }

    /// Flushes a write cache that the device has enabled.
    fn flush_new_cache(&self) {
        let mut flush = UnitCommand {
            repeatable: true,
            ..UnitCommand::default()
        };
        flush.cdb[0] = scsi::opcode::SYNCHRONIZE_CACHE_10;
        self.carry_out(&flush);
    }

    /// Queries the device again. With another block size it is another disk, which is not to be used.
    fn requery_unit(&self) {
        let mut known = self.info.lock().unwrap_or_else(PoisonError::into_inner);
        match self.device.query_unit() {
            Ok(info) if info.compare(&known, true) == Sameness::Different => {
                tracing::error!(
                    before = known.block_size,
                    now = info.block_size,
                    "SCSI device or its block size changed, I/O fails; hint: remove the disk and add it again"
                );
                self.watch.on_event(UnitEvent::Down {
                    reason: "the device or its block size has changed; hint: remove the disk and add it again",
                    next_try: Duration::ZERO,
                });
                self.close();
            }
            Ok(info) if info != *known => {
                let gains_cache = info.gains_write_cache(&known);
                *known = info;
                self.watch.on_event(UnitEvent::Changed(&known));
                if gains_cache {
                    self.flush_new_cache();
                }
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!("SCSI device changed, but its properties cannot be read: {error}")
            }
        }
    }
}

impl Threads {
    /// Ends the threads; waiting commands fail.
    fn close(&self) {
        let mut queue = self.queue();
        queue.is_closed = true;
        let left = std::mem::take(&mut queue.tasks);
        drop(queue);
        for task in left {
            task.sink.ended(task.token, Ended::Lost);
        }
        self.work.notify_all();
    }
}

impl CommandUnit for GenericUnit {
    fn submit(&self, command: UnitCommand, sink: Arc<dyn CommandSink>, token: u64) {
        let threads = &self.0;
        let mut queue = threads.queue();
        if queue.is_closed {
            drop(queue);
            return sink.ended(token, Ended::Lost);
        }
        let task = Task {
            sink,
            token,
            command,
        };
        queue.tasks.push_back(task);
        drop(queue);
        threads.work.notify_one();
    }

    fn abort(&self, sink: &Arc<dyn CommandSink>, token: u64) {
        let mut queue = self.0.queue();
        let is_it = |task: &Task| task.token == token && Arc::ptr_eq(&task.sink, sink);
        let found = queue.tasks.iter().position(is_it);
        if let Some(task) = found.and_then(|at| queue.tasks.remove(at)) {
            drop(queue);
            task.sink.ended(task.token, Ended::Cancelled);
        }
    }
}

impl GenericUnit {
    fn start(&self) -> io::Result<()> {
        for _ in 0..THREADS {
            let threads = Arc::clone(&self.0);
            let thread = std::thread::Builder::new().name("scsi-generic".to_owned());
            thread.spawn(move || threads.run())?;
        }
        Ok(())
    }
}

impl Drop for GenericUnit {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_data_are_not_reported_as_transferred() {
        let answer = Answer {
            residual: 30,
            ..Answer::default()
        };
        let short = done(answer.clone(), vec![1; 36]);
        assert_eq!((short.data.len(), short.residual), (6, -30));
        // A driver with a wrong residual.
        assert_eq!(done(answer, vec![1; 8]).data.len(), 0);
    }

    #[test]
    fn non_scsi_device_is_refused_with_a_hint() {
        let options = ScsiGenericOptions {
            path: "/dev/null".into(),
            read_only: false,
            reservations: PassedReservations::Refuse,
            block_size: None,
        };
        let error = ScsiDisk::open_generic(&options).err().unwrap().to_string();
        assert!(
            error.contains("/dev/null") && error.contains("hint: "),
            "{error}"
        );
    }
}

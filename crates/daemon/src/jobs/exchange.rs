//! Switches disks to other devices. Fallible and long steps run before, while clients do I/O. The disks are then held, and clients wait
//! only for a flush and one message to each worker.

use std::io;
use std::sync::Arc;

use bdev::{BlockDevice, BlockingIo, Disk, LocalFiles, RangeLock};
use block::IoRequest;
use jobs::exchange::ExchangeAction;
use reactor::Pool;

use super::Context;
use crate::identities::Identities;
use crate::objects::{Fault, Manager, NewDevice, Refusal, Servers};

/// Workers attached to devices that are not in use yet. Dropping it detaches them.
struct Prepared {
    pool: Arc<Pool>,
    disks: Vec<Arc<Disk>>,
    is_used: bool,
}

impl Drop for Prepared {
    fn drop(&mut self) {
        if self.is_used {
            return;
        }
        for worker in self.pool.workers() {
            for disk in &self.disks {
                let disk = Arc::clone(disk);
                worker.call(move |w| w.io().drop_prepared(&disk)).ok();
            }
        }
    }
}

impl Prepared {
    fn attach(&mut self, disk: &Arc<Disk>, device: &Arc<dyn BlockDevice>) -> Result<(), Refusal> {
        self.disks.push(Arc::clone(disk));
        for worker in self.pool.workers() {
            let (disk, device) = (Arc::clone(disk), Arc::clone(device));
            let name = disk.name().to_owned();
            let attached = worker.call(move |w| w.io().prepare_device(&disk, &device));
            // A worker that has ended does no I/O.
            attached.unwrap_or(Ok(())).map_err(|error| {
                failed(
                    &name,
                    &format!("cannot attach a worker to the device: {error}"),
                )
            })?;
        }
        Ok(())
    }
}

/// Checks that no other program has changed the files of a device.
///
/// # Errors
/// See [`LocalFiles::check_file`].
pub(super) fn check_files(device: &dyn BlockDevice) -> io::Result<()> {
    let files = device.capabilities().files;
    files.map_or(Ok(()), LocalFiles::check_file)
}

pub(super) fn failed(disk: &str, cause: &dyn std::fmt::Display) -> Refusal {
    Refusal::Failed(vec![Fault::new(format!("disk {disk}: {cause}"))])
}

/// Flushes a device while its disk is held. Attached before.
pub(super) struct Flush {
    disk: String,
    io: BlockingIo,
}

impl Flush {
    /// Attaches to a device; `limit` sets how long a flush may take.
    pub fn prepare(
        disk: &str,
        device: Arc<dyn BlockDevice>,
        limit: impl FnOnce(BlockingIo) -> BlockingIo,
    ) -> Result<Flush, Refusal> {
        let disk = disk.to_owned();
        let io = BlockingIo::new(device).map_err(|error| failed(&disk, &error))?;
        let io = limit(io);
        Ok(Flush { disk, io })
    }

    pub fn limit(self, limit: impl FnOnce(BlockingIo) -> BlockingIo) -> Flush {
        let Flush { disk, io } = self;
        let io = limit(io);
        Flush { disk, io }
    }

    pub fn run(&mut self) -> Result<(), Refusal> {
        let flushed = self.io.run_plain(&IoRequest::flush());
        flushed.map_err(|error| failed(&self.disk, &format!("cannot flush: {error}")))
    }
}

/// Disks that are being switched to other devices. Dropping it unlocks the disks, and detaches workers from devices that are not used.
pub(super) struct Change {
    held: Vec<RangeLock>,
    prepared: Prepared,
    changes: Vec<NewDevice>,
}

impl Change {
    /// Checks the devices and attaches the workers to them.
    pub fn prepare(pool: &Arc<Pool>, changes: &[NewDevice]) -> Result<Change, Refusal> {
        let mut prepared = Prepared {
            pool: Arc::clone(pool),
            disks: Vec::new(),
            is_used: false,
        };
        for NewDevice { disk, device, .. } in changes {
            let kept = disk.check_device(&**device);
            kept.map_err(|broken| failed(disk.name(), &broken))?;
            prepared.attach(disk, device)?;
        }
        Ok(Change {
            held: Vec::new(),
            prepared,
            changes: changes.to_vec(),
        })
    }

    /// Executes a step of the exchange that does not depend on the job.
    pub fn execute<D>(
        &mut self,
        context: &Context,
        action: ExchangeAction<D>,
    ) -> Result<(), Refusal> {
        match action {
            ExchangeAction::Hold => self.held = hold(&self.changes)?,
            ExchangeAction::Persist => self.persist(&context.servers)?,
            ExchangeAction::Replace(_) => self.replace(&context.manager)?,
            ExchangeAction::Release => self.held.clear(),
            ExchangeAction::Prepare(_)
            | ExchangeAction::Check
            | ExchangeAction::Flush
            | ExchangeAction::Record
            | ExchangeAction::Detach => {}
        }
        Ok(())
    }

    /// Writes the identities of the disks to their devices. Here and not on the thread of the owner: the storage may not answer.
    fn persist(&self, servers: &Servers) -> Result<(), Refusal> {
        let changes = self.changes.iter();
        for change in changes.filter(|change| change.config.is_some()) {
            let (disk, store) = (&change.disk, servers.units.store());
            let written = Identities::carry_over(disk, &*change.device, store);
            written.map_err(|reason| failed(disk.name(), &reason))?;
        }
        Ok(())
    }

    fn replace(&mut self, manager: &Manager) -> Result<(), Refusal> {
        let wanted = self.changes.clone();
        manager.call(move |owner| owner.replace_devices(&wanted))?;
        self.prepared.is_used = true;
        Ok(())
    }
}

/// Holds disks in the order of their names, so that two changes do not deadlock.
fn hold(changes: &[NewDevice]) -> Result<Vec<RangeLock>, Refusal> {
    let mut disks: Vec<&Arc<Disk>> = changes.iter().map(|change| &change.disk).collect();
    disks.sort_by_key(|disk| disk.name());
    disks.into_iter().map(hold_one).collect()
}

/// Holds all of a disk.
pub(super) fn hold_one(disk: &Arc<Disk>) -> Result<RangeLock, Refusal> {
    disk.hold(0, u64::MAX).map_err(|_| {
        let detail = format!(
            "disk {}: its I/Os in flight did not complete in time",
            disk.name()
        );
        let help = "see its state with lunette disk show, and try again";
        Refusal::Conflict(vec![Fault::new(detail).help(help)])
    })
}

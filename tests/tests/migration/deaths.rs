//! Ends of each party of a migration, without a guest.

use super::{LIMIT, queues_served, two_daemons};
use end_to_end::{Context, Result, Rig, ensure};
use vhost_frontend::{BlkQueue, FrontEnd, Layout, LogMemory, Options, QueueOptions, status};

/// A party of a migration that is killed. A front end stands for its QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    SourceFrontEnd,
    SourceDaemon,
    DestinationFrontEnd,
    DestinationDaemon,
}

/// Progress of a migration when a party is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Progress {
    /// Only the source is connected.
    Begun,
    /// Both sides are connected, and the source logs its writes.
    Copied,
    /// The source has stopped its queue.
    Stopped,
    /// The destination has started its queue.
    Switched,
}

/// A disk of a side of a migration, without a guest.
struct DiskEnd {
    front_end: FrontEnd,
    queue: Option<BlkQueue>,
    log: LogMemory,
}

impl DiskEnd {
    fn connect(rig: &Rig, export: &str) -> Result<DiskEnd> {
        let front_end = FrontEnd::connect(&rig.socket(export), &Options::default())?;
        let ends = front_end.memory().regions().iter();
        let ends = ends.map(|region| region.spec.guest_address + region.spec.size);
        let log = LogMemory::below(ends.max().unwrap_or_default())?;
        Ok(DiskEnd {
            front_end,
            queue: None,
            log,
        })
    }

    /// Starts the queue if necessary. Checks that the disk has `written` writes, and writes once more.
    fn serves(&mut self, written: u8) -> Result<()> {
        let options = QueueOptions::default();
        let start =
            |end: &mut FrontEnd| BlkQueue::start(end, 0, &options, 4, 4096, Layout::Separate);
        let mut queue = match self.queue.take() {
            Some(queue) => queue,
            None => start(&mut self.front_end)?,
        };
        for number in 0..written {
            let mut read = [0; 4096];
            let done = queue.read(offset(number), &mut read)?;
            ensure!(done == status::OK, "read {number}: status {done}");
            ensure!(read == [number + 1; 4096], "write {number} is lost");
        }
        let done = queue.write(offset(written), &[written + 1; 4096])?;
        ensure!(done == status::OK, "write {written}: status {done}");
        self.queue = Some(queue);
        Ok(())
    }
}

/// A side of a migration, with a raw disk and an image.
struct End([DiskEnd; 2]);

impl End {
    fn connect(rig: &Rig) -> Result<End> {
        Ok(End([
            DiskEnd::connect(rig, "d")?,
            DiskEnd::connect(rig, "e")?,
        ]))
    }

    fn serves(&mut self, written: &mut u8) -> Result<()> {
        for disk in &mut self.0 {
            disk.serves(*written)?;
        }
        *written += 1;
        Ok(())
    }

    /// Logs the next write.
    fn serves_with_log(&mut self, written: &mut u8) -> Result<()> {
        for disk in &self.0 {
            disk.front_end.set_log(&disk.log)?;
            disk.front_end.log_data(true)?;
        }
        self.serves(written)?;
        let has_log = self.0.iter().all(|disk| !disk.log.pages().is_empty());
        ensure!(has_log, "nothing is logged");
        Ok(())
    }

    fn stop(&mut self) -> Result<()> {
        for disk in &mut self.0 {
            disk.front_end.stop_queue(0)?;
            disk.queue = None;
        }
        Ok(())
    }
}

/// Returns the position of a write. Each write allocates a cluster of an image.
fn offset(number: u8) -> u64 {
    u64::from(number) << 17
}

/// After each death the guest continues, or starts again, on one side, with all acknowledged writes. The other side serves nothing. The
/// destination's front end is not connected before the copy, and the source's not after the switch: they cannot die then.
#[test]
fn one_side_serves_all_data_after_each_death() -> Result<()> {
    use Progress::{Begun, Copied, Stopped, Switched};
    use Victim::{DestinationDaemon, DestinationFrontEnd, SourceDaemon, SourceFrontEnd};
    let (_folder, mut first, mut second) = two_daemons()?;
    let mut written = 0;
    for progress in [Begun, Copied, Stopped, Switched] {
        for victim in [
            SourceFrontEnd,
            SourceDaemon,
            DestinationFrontEnd,
            DestinationDaemon,
        ] {
            let is_absent = matches!(
                (progress, victim),
                (Begun, DestinationFrontEnd) | (Switched, SourceFrontEnd)
            );
            if is_absent {
                continue;
            }
            survives(&mut written, &mut first, &mut second, progress, victim)
                .with_context(|| format!("{victim:?} dies, {progress:?}"))?;
        }
    }
    drop(second);
    Ok(())
}

/// Kills a party of a migration. `written`: number of acknowledged writes.
fn survives(
    written: &mut u8,
    source: &mut Rig,
    destination: &mut Rig,
    progress: Progress,
    victim: Victim,
) -> Result<()> {
    let mut from = End::connect(source)?;
    from.serves(written)?;
    let mut to = None;
    if progress >= Progress::Copied {
        to = Some(End::connect(destination)?);
        from.serves_with_log(written)?;
    }
    if progress >= Progress::Stopped {
        from.stop()?;
    }
    if let (Some(to), Progress::Switched) = (&mut to, progress) {
        to.serves(written)?;
    }
    // QEMU ends after the switch.
    let mut from = (progress != Progress::Switched).then_some(from);
    match victim {
        Victim::SourceFrontEnd => from = None,
        Victim::SourceDaemon => source.daemon.kill()?,
        Victim::DestinationFrontEnd => to = None,
        Victim::DestinationDaemon => destination.daemon.kill()?,
    }
    let (mut serving, other) = match victim {
        Victim::SourceFrontEnd | Victim::SourceDaemon => {
            let connect = || End::connect(destination);
            (to.map_or_else(connect, Ok)?, &mut *source)
        }
        _ if progress == Progress::Switched => (End::connect(source)?, &mut *destination),
        _ => (from.context("no source")?, &mut *destination),
    };
    serving.serves(written)?;
    if matches!(victim, Victim::SourceDaemon | Victim::DestinationDaemon) {
        other.daemon.start_again()?;
    }
    vm::wait_until(LIMIT, || (queues_served(other).ok()? == 0).then_some(()))
        .context("both sides serve the disk")?;
    serving.serves(written)
}

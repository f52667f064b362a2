//! Moves of disks in use: the start of `lunette disk mirror` and `disk commit`, which `copying` continues, and `disk stream`. The copier
//! uses its own ring.

use std::path::PathBuf;
use std::sync::Arc;

use bdev::stepped::shape_new_images;
use bdev::{
    Attach, BlockDevice, Disk, File, FileOptions, Finished, Image, ImageDevice, ImageOptions,
    IoChannel, Submission, Tag,
};
use block::{IoError, IoRequest};
use guest_memory::IoBuffer;
use uring::simulated::Files;
use uring::{Owner, Ring, Wait};

use super::copying::{Copying, SimGoal};
use super::{World, disks};
use crate::files;
use crate::life::Lies;
use crate::model::BLOCK;
use crate::random::Random;

/// Maximum number of blocks of a copied part.
const PART_MAX: u64 = 24;
/// Maximum number of attempts to close a backing image, with I/O of clients in between.
const CLOSE_STEPS_MAX: usize = 10_000;

/// A device with the copier's ring and channel.
pub(super) struct DeviceChannel {
    pub ring: Ring,
    pub channel: Box<dyn IoChannel>,
}

impl DeviceChannel {
    /// Returns the I/Os that completed since the last call.
    pub fn step(&mut self) -> Vec<Finished> {
        let (mut completions, mut finished) = (Vec::new(), Vec::new());
        let entered = self.ring.enter(Wait::No, &mut completions);
        entered.expect("a ring without a kernel");
        for completion in completions {
            self.channel
                .complete(&mut self.ring, completion, &mut finished);
        }
        finished
    }
}

impl World {
    /// Mirrors a disk to another file.
    pub(super) fn mirror(&mut self, detail: u64) {
        let mut random = Random::new(detail);
        let disk = 1 + random.below(self.plans.len() as u64 - 1) as usize;
        Files::set_faults(self.corruption);
        let of = self.life().disks[disk].clone();
        let Some((target, path, lies)) = self.new_target(disk, &of, &mut random) else {
            return;
        };
        let file = path.file_name().unwrap_or_default().display();
        log_step!(self, "d{disk}: move to {file}");
        let source = of.device();
        let goal = SimGoal::Mirror { path, lies };
        let mut copying = Copying::new((disk, &of), goal, source, target, &mut random);
        self.copy(&mut copying, &mut random);
    }

    /// Commits a disk's image into its backing image and switches the disk to that.
    pub(super) fn commit(&mut self, detail: u64) {
        let mut random = Random::new(detail);
        let disk = 1 + random.below(self.plans.len() as u64 - 1) as usize;
        let of = self.life().disks[disk].clone();
        let before = of.device();
        // Images with internal snapshots are the bottom of a chain. The image may have no backing image if the daemon ended at that
        // point.
        let image = before.capabilities().image;
        let backed = image.filter(|image| image.backing().is_some());
        let Some(image) = backed.filter(|_| !self.plans[disk].lower.is_empty()) else {
            return;
        };
        Files::set_faults(self.corruption);
        log_step!(self, "d{disk}: commit");
        let Some(held) = self.hold(&of, 0, u64::MAX) else {
            return;
        };
        let opened = image.reopen_to_commit();
        self.check_faults();
        let opened = match opened {
            Ok(opened) => opened,
            Err(error) => {
                let is_wanted = self.is_over() || self.is_troubled;
                assert!(is_wanted, "d{disk} cannot be committed: {error}");
                return;
            }
        };
        if self.is_over() {
            return;
        }
        let of_disk = (disk, &of);
        let (overlay, base) = (opened.overlay, opened.base);
        let mut copying = Copying::new(of_disk, SimGoal::Commit, overlay, base, &mut random);
        let mirror: Arc<dyn BlockDevice> = copying.mirror.clone();
        self.prepare(&of, &mirror);
        self.replace(&of, &mirror);
        drop((held, before));
        self.copy(&mut copying, &mut random);
    }

    /// Streams the backing image into a disk's image.
    pub(super) fn stream(&mut self, detail: u64) {
        let mut random = Random::new(detail);
        let disk = 1 + random.below(self.plans.len() as u64 - 1) as usize;
        let plan = &self.plans[disk];
        let has_snapshots = self.snapshots.iter().any(|one| one.path == plan.path);
        let stands_alone = plan.lower.is_empty() && plan.below.is_empty();
        if plan.lies != Lies::Image || stands_alone || has_snapshots {
            return;
        }
        log_step!(self, "d{disk}: stream");
        let device = self.life().disks[disk].device();
        // The daemon may have ended after the image left its backing image.
        let image = device.capabilities().image;
        let Some(image) = image.filter(|image| image.backing().is_some()) else {
            return;
        };
        let total = device.capacity().bytes();
        let mut at = 0;
        while at < total {
            let part = (1 + random.below(PART_MAX)) * BLOCK as u64;
            let length = part.min(total - at);
            let copied = image.copy_up(at, length);
            self.check_faults();
            if self.is_over() || copied.is_err() {
                assert!(
                    self.is_over() || self.is_troubled,
                    "cannot copy up data at {at} of d{disk}: {copied:?}"
                );
                return;
            }
            at = copied.map_or(total, |copied| copied.end);
            self.run_clients(&mut random);
            if self.is_over() {
                return;
            }
        }
        let left = image.detach_backing();
        self.check_faults();
        if left.is_ok() && !self.is_over() {
            let plan = &mut self.plans[disk];
            plan.lower.clear();
            plan.below.clear();
            log_step!(self, "d{disk}: streamed");
        }
        assert!(
            left.is_ok() || self.is_over() || self.is_troubled,
            "d{disk} still has a backing image: {left:?}"
        );
        if left.is_ok() {
            self.close_backing(disk, image, &mut random);
        }
    }

    /// Closes the backing image that a disk's image has left, while clients continue.
    fn close_backing(&mut self, disk: usize, image: &dyn ImageDevice, random: &mut Random) {
        for _ in 0..CLOSE_STEPS_MAX {
            if self.is_over() {
                return;
            }
            let closed = image.close_backing();
            self.check_faults();
            match closed {
                Ok(true) => return,
                Ok(false) => self.run_clients(random),
                Err(error) => {
                    let is_expected = self.is_over() || self.is_troubled;
                    assert!(is_expected, "the backing image of d{disk}: {error}");
                    return;
                }
            }
        }
        assert!(
            self.is_over() || self.is_troubled,
            "the backing image of d{disk} is not closed"
        );
    }

    /// Creates a file or image of the disk's size.
    fn new_target(
        &mut self,
        disk: usize,
        of: &Arc<Disk>,
        random: &mut Random,
    ) -> Option<(Arc<dyn BlockDevice>, PathBuf, Lies)> {
        let number = self.tick();
        let bytes = of.device().capacity().bytes();
        let plan = &self.plans[disk];
        let cache = plan.cache;
        let (made, path, lies) = match random.one_in(3) {
            true => {
                let path = plan.path.with_file_name(format!("moved{number}"));
                files::create_raw(&path, bytes / BLOCK as u64, 0);
                let made = File::open(FileOptions {
                    cache,
                    ..FileOptions::new(&path)
                });
                let made = made.map(|file| Arc::new(file) as Arc<dyn BlockDevice>);
                (made, path, Lies::File)
            }
            false => {
                let path = plan.path.with_file_name(format!("moved{number}.qcow2"));
                shape_new_images(disks::shape(0, random));
                let options = ImageOptions {
                    cache,
                    ..ImageOptions::new(&path)
                };
                let made = Image::create(&options, bytes);
                let made = made.map(|image| Arc::new(image) as Arc<dyn BlockDevice>);
                (made, path, Lies::Image)
            }
        };
        self.check_faults();
        let target = match made {
            Ok(target) if !self.is_over() => target,
            Ok(_) => return None,
            Err(error) => {
                assert!(
                    self.is_over(),
                    "cannot create a target for d{disk}: {error}"
                );
                return None;
            }
        };
        Files::add_file(&files::open(&path)).expect("a file of the simulation");
        let compatible = of.check_device(&*target);
        compatible.unwrap_or_else(|broken| panic!("d{disk} cannot move: {broken}"));
        Some((target, path, lies))
    }

    pub(super) fn channel_of(&mut self, device: &Arc<dyn BlockDevice>) -> DeviceChannel {
        let by = self.clock.clone();
        let mut ring = Ring::simulated(self.random.next(), move || by.elapsed());
        let mut owners = (0..).map(Owner);
        let mut next_owner = || owners.next().unwrap_or(Owner(u32::MAX));
        let channel = device.attach(&mut Attach::new(&mut ring, &mut next_owner));
        let channel = channel.expect("a copier attaches to a device");
        DeviceChannel { ring, channel }
    }

    /// Clients send requests and receive responses.
    pub(super) fn run_clients(&mut self, random: &mut Random) {
        for _ in 0..random.below(3) {
            self.submit(random.next());
        }
        let mut rounds = random.below(3);
        self.rounds_until(|_| {
            rounds = rounds.saturating_sub(1);
            rounds == 0
        });
    }

    pub(super) fn run(
        &mut self,
        device: &mut DeviceChannel,
        io: &IoRequest,
        bytes: usize,
    ) -> Option<Result<IoBuffer, IoError>> {
        let buffer = match bytes {
            0 => IoBuffer::default(),
            bytes => IoBuffer::owned(bytes),
        };
        self.run_with(device, io, buffer)
    }

    /// Runs one I/O. Returns `None` if the daemon has ended.
    pub(super) fn run_with(
        &mut self,
        device: &mut DeviceChannel,
        io: &IoRequest,
        mut buffer: IoBuffer,
    ) -> Option<Result<IoBuffer, IoError>> {
        let submitted = device
            .channel
            .submit(&mut device.ring, io, &mut buffer, Tag(0));
        self.check_faults();
        if self.is_over() {
            return None;
        }
        if let Submission::Done(outcome) = submitted {
            return Some(outcome.map(|()| buffer));
        }
        let mut ended = None;
        self.rounds_until(|world| {
            ended = device.step().pop();
            world.check_faults();
            ended.is_some()
        });
        let one = ended.filter(|_| !self.is_over())?;
        Some(one.outcome.map(|()| one.buffer))
    }
}

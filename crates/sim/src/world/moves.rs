//! Moves of disks in use: the daemon's part of `lunette disk mirror`, `disk commit` and `disk stream`. The copier uses its own ring and
//! copies one part at a time; clients write before, during and after that.

use std::path::PathBuf;
use std::sync::Arc;

use bdev::stepped::shape_new_images;
use bdev::{
    Attach, BlockDevice, Disk, File, FileOptions, Finished, Image, ImageDevice, ImageOptions,
    IoChannel, Lockable, Mirror, Submission, Tag,
};
use block::{Allocation, IoError, IoFlags, IoRequest, STATUS_BYTES, decode_extents};
use guest_memory::IoBuffer;
use uring::simulated::Files;
use uring::{Owner, Ring, Wait};

use super::{World, disks};
use crate::files;
use crate::life::{Lies, Lower};
use crate::model::BLOCK;
use crate::random::Random;

/// Maximum number of blocks of a copied part.
const PART_MAX: u64 = 24;
/// Maximum number of attempts to close a backing image, with I/O of clients in between.
const CLOSE_STEPS_MAX: usize = 10_000;

/// A device with the copier's ring and channel.
struct DeviceChannel {
    ring: Ring,
    channel: Box<dyn IoChannel>,
}

impl DeviceChannel {
    /// Returns the I/Os that completed since the last call.
    fn step(&mut self) -> Vec<Finished> {
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

/// A copy job in progress.
struct Copying {
    of: Arc<Disk>,
    mirror: Arc<Mirror>,
    source: Arc<dyn BlockDevice>,
    target: Arc<dyn BlockDevice>,
    from: DeviceChannel,
    to: DeviceChannel,
    /// The target already contains the data that is unallocated in the source.
    is_commit: bool,
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
        let copying = self.copying(&of, of.device(), target, false);
        let mirror: Arc<dyn BlockDevice> = copying.mirror.clone();
        if self.change_over(&of, &mirror, |_| true) && self.copy(copying, &mut random) {
            let plan = &mut self.plans[disk];
            plan.path = path;
            plan.lies = lies;
            plan.data_file = None;
            plan.below.clear();
            plan.lower.clear();
            log_step!(self, "d{disk}: moved");
        }
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
        let base = Arc::clone(&opened.base);
        let copying = self.copying(&of, opened.overlay, opened.base, true);
        let mirror: Arc<dyn BlockDevice> = copying.mirror.clone();
        self.prepare(&of, &mirror);
        self.replace(&of, &mirror);
        drop((held, before));
        if self.copy(copying, &mut random) {
            let plan = &mut self.plans[disk];
            let Some(Lower {
                path,
                data_file,
                is_image,
            }) = plan.lower.pop()
            else {
                return;
            };
            plan.path = path;
            plan.data_file = data_file;
            plan.lies = match is_image {
                true => Lies::Image,
                false => Lies::File,
            };
            log_step!(self, "d{disk} is committed");
        } else if !self.is_over() {
            let lockable = base.capabilities().lockable;
            let given_up = lockable.map_or(Ok(()), Lockable::become_read_only);
            self.check_faults();
            assert!(
                given_up.is_ok() || self.is_over() || self.is_troubled,
                "the backing image of d{disk} is not closed: {given_up:?}"
            );
        }
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
        let Some(image) = device.capabilities().image else {
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

    fn channel_of(&mut self, device: &Arc<dyn BlockDevice>) -> DeviceChannel {
        let by = self.clock.clone();
        let mut ring = Ring::simulated(self.random.next(), move || by.elapsed());
        let mut owners = (0..).map(Owner);
        let mut next_owner = || owners.next().unwrap_or(Owner(u32::MAX));
        let channel = device.attach(&mut Attach::new(&mut ring, &mut next_owner));
        let channel = channel.expect("a copier attaches to a device");
        DeviceChannel { ring, channel }
    }

    fn copying(
        &mut self,
        of: &Arc<Disk>,
        source: Arc<dyn BlockDevice>,
        target: Arc<dyn BlockDevice>,
        is_commit: bool,
    ) -> Copying {
        Copying {
            of: Arc::clone(of),
            mirror: Arc::new(Mirror::new(Arc::clone(&source), Arc::clone(&target))),
            from: self.channel_of(&source),
            to: self.channel_of(&target),
            source,
            target,
            is_commit,
        }
    }

    /// Runs the mirror and then switches to the target, or back to the source, or stops when the daemon ends.
    fn copy(&mut self, mut copying: Copying, random: &mut Random) -> bool {
        if random.one_in(4) {
            self.set_faults(random.next());
        }
        let (of, target) = (Arc::clone(&copying.of), Arc::clone(&copying.target));
        let is_there = self.copy_parts(&mut copying, random)
            && self.change_over(&of, &target, |world| {
                let flushed = world.run(&mut copying.to, &IoRequest::flush(), 0);
                matches!(flushed, Some(Ok(_))) && copying.mirror.progress().error().is_none()
            });
        Files::set_faults(self.corruption);
        while !is_there && !self.is_over() {
            log_step!(self, "it did not");
            if self.change_over(&of, &copying.source, |_| true) {
                break;
            }
        }
        for device in [&mut copying.from, &mut copying.to] {
            device.channel.close(&mut device.ring);
            self.rounds_until(|_| {
                device.step();
                device.channel.is_closed()
            });
        }
        is_there && !self.is_over()
    }

    /// Clients send requests and receive responses.
    fn run_clients(&mut self, random: &mut Random) {
        for _ in 0..random.below(3) {
            self.submit(random.next());
        }
        let mut rounds = random.below(3);
        self.rounds_until(|_| {
            rounds = rounds.saturating_sub(1);
            rounds == 0
        });
    }

    fn copy_parts(&mut self, copying: &mut Copying, random: &mut Random) -> bool {
        let total = copying.mirror.capacity().bytes();
        let progress = Arc::clone(copying.mirror.progress());
        while progress.copied() < total {
            self.run_clients(random);
            let from = progress.copied();
            let end = total.min(from + (1 + random.below(PART_MAX)) * BLOCK as u64);
            if self.is_over() || progress.error().is_some() {
                return false;
            }
            let of = Arc::clone(&copying.of);
            let Some(held) = self.hold(&of, from, end - from) else {
                return false;
            };
            if !self.copy_held(copying, from, end) {
                return false;
            }
            progress.advance(end);
            drop(held);
        }
        true
    }

    fn copy_held(&mut self, copying: &mut Copying, from: u64, end: u64) -> bool {
        if !copying.is_commit {
            return self.copy_range(copying, from, end);
        }
        let pieces = match copying.source.capabilities().image {
            Some(image) => image.own_pieces(from, end - from),
            None => Ok(vec![(end, true)]),
        };
        self.check_faults();
        let Ok(pieces) = pieces else {
            return false;
        };
        let mut at = from;
        for (piece_end, is_own) in pieces {
            if is_own && !self.copy_range(copying, at, piece_end) {
                return false;
            }
            at = piece_end;
        }
        true
    }

    fn copy_range(&mut self, copying: &mut Copying, from: u64, end: u64) -> bool {
        let length = end - from;
        let status = IoRequest::block_status(from, length);
        let Some(Ok(status)) = self.run(&mut copying.from, &status, STATUS_BYTES) else {
            return false;
        };
        let mut bytes = vec![0; STATUS_BYTES];
        status.read_at(0, &mut bytes);
        let first = decode_extents(&bytes).next();
        let is_hole =
            first.is_some_and(|first| first.allocation == Allocation::Hole && first.end >= end);
        if is_hole {
            let zeroes = IoRequest::write_zeroes(from, length).flagged(IoFlags::UNMAP);
            if matches!(self.run(&mut copying.to, &zeroes, 0), Some(Ok(_))) {
                return true;
            }
        }
        let read = IoRequest::read(from, length);
        let Some(Ok(content)) = self.run(&mut copying.from, &read, length as usize) else {
            return false;
        };
        let write = IoRequest::write(from, length);
        let written = self.run_with(&mut copying.to, &write, content);
        matches!(written, Some(Ok(_)))
    }

    fn run(
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
    fn run_with(
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

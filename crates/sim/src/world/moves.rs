//! Moves of disks in use: the start of `lunette disk mirror` and `disk commit`, which `copying` continues, and a driver of
//! [`jobs::stream`]. The copier uses its own ring.

use std::path::PathBuf;
use std::sync::Arc;

use bdev::stepped::shape_new_images;
use bdev::{
    Attach, BlockDevice, Disk, File, FileOptions, Finished, Image, ImageDevice, ImageOptions,
    IoChannel, RangeLock, Submission, Tag,
};
use block::{IoError, IoRequest};
use guest_memory::IoBuffer;
use jobs::commit::Begin;
use jobs::stream::Stream;
use jobs::{Early, Event, Now, Orders, Span};
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

/// The start of a commit.
struct Begun {
    disk: usize,
    of: Arc<Disk>,
    before: Option<Arc<dyn BlockDevice>>,
    copying: Option<Copying>,
    held: Option<RangeLock>,
    /// A failure was injected.
    has_failed: bool,
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
        let mut begun = Begun {
            disk,
            of,
            before: Some(Arc::clone(&before)),
            copying: None,
            held: None,
            has_failed: false,
        };
        let mut job = Begin::default();
        let mut event = Event::Done;
        let outcome = loop {
            event = match job.step(event) {
                jobs::commit::Action::End(outcome) => break outcome,
                action => self.begin_step(&mut begun, image, &action, &mut random),
            };
            if self.is_over() {
                return;
            }
        };
        assert!(begun.held.is_none(), "the commit leaves d{disk} locked");
        drop((begun.before, before));
        match (outcome, begun.copying) {
            (Ok(()), Some(mut copying)) => {
                self.copy(&mut copying, &mut random);
            }
            (outcome, _) => assert!(
                (self.is_troubled || begun.has_failed) && outcome.is_err(),
                "d{disk} cannot be committed: {outcome:?}"
            ),
        }
    }

    fn begin_step(
        &mut self,
        begun: &mut Begun,
        image: &dyn ImageDevice,
        action: &jobs::commit::Action,
        random: &mut Random,
    ) -> Event {
        use jobs::commit::Action;
        let of = Arc::clone(&begun.of);
        match action {
            Action::Hold => begun.held = self.hold(&of, 0, u64::MAX),
            Action::Reopen if random.one_in(10) => {
                begun.has_failed = true;
                return Event::Failed("injected: the images cannot be reopened".to_owned());
            }
            Action::Reopen => {
                let is_held = begun.held.is_some() || self.is_over();
                assert!(is_held, "the images of d{} are reopened in use", begun.disk);
                let opened = image.reopen_to_commit();
                self.check_faults();
                let opened = match opened {
                    Ok(opened) => opened,
                    Err(error) => return Event::Failed(error.to_string()),
                };
                let of_disk = (begun.disk, &of);
                let (overlay, base) = (opened.overlay, opened.base);
                let copying = Copying::new(of_disk, SimGoal::Commit, overlay, base, random);
                begun.copying = Some(copying);
            }
            Action::Prepare | Action::Replace => {
                let copying = begun.copying.as_ref();
                let mirror = copying.expect("the image is reopened").mirror.clone();
                let mirror: Arc<dyn BlockDevice> = mirror;
                match action {
                    Action::Prepare => self.prepare(&of, &mirror),
                    _ => self.replace(&of, &mirror),
                }
            }
            Action::Detach => self.detach(&of),
            Action::Undo => begun.copying = None,
            Action::Release => begun.held = None,
            Action::End(_) => {}
        }
        Event::Done
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
        let mut job = Stream::new(device.capacity().bytes());
        let mut orders = Orders::default();
        let (mut event, mut closing) = (Event::Done, 0);
        let outcome = loop {
            orders.is_paused = random.one_in(20);
            orders.is_cancelled |= random.one_in(60);
            let now = Now {
                time: self.clock.elapsed(),
                orders,
                lost: None,
            };
            event = match job.step(&now, event) {
                jobs::stream::Action::End(outcome) => break outcome,
                action => self.stream_step(disk, image, &action, &mut random),
            };
            if self.is_over() {
                return;
            }
            if event == Event::Busy {
                closing += 1;
                self.round_of_wait(closing);
            }
            assert!(
                closing < CLOSE_STEPS_MAX || self.is_troubled,
                "the backing image of d{disk} is not closed"
            );
            self.run_clients(&mut random);
            if self.is_over() {
                return;
            }
        };
        match outcome {
            Ok(()) => assert!(
                image.backing().is_none(),
                "d{disk} has a backing image after a stream"
            ),
            Err(Early::Cancelled) => assert!(orders.is_cancelled),
            Err(Early::Failed(reason)) => {
                assert!(self.is_troubled, "the stream of d{disk} fails: {reason}");
            }
        }
    }

    fn stream_step(
        &mut self,
        disk: usize,
        image: &dyn ImageDevice,
        action: &jobs::stream::Action,
        random: &mut Random,
    ) -> Event {
        use jobs::stream::Action;
        let failed = |error: std::io::Error| Event::Failed(error.to_string());
        let event = match action {
            Action::CopyUp(Span { from, end }) => {
                let part = (1 + random.below(PART_MAX)) * BLOCK as u64;
                let copied = image.copy_up(*from, part.min(end - from));
                copied.map_or_else(failed, |copied| Event::CopiedUp {
                    end: copied.end,
                    bytes: copied.bytes,
                })
            }
            Action::Detach => {
                let left = image.detach_backing();
                self.check_faults();
                if left.is_ok() && !self.is_over() {
                    let plan = &mut self.plans[disk];
                    plan.lower.clear();
                    plan.below.clear();
                    log_step!(self, "d{disk}: streamed");
                }
                left.map_or_else(failed, |()| Event::Done)
            }
            Action::Close => match image.close_backing() {
                Ok(true) => Event::Done,
                Ok(false) => Event::Busy,
                Err(error) => failed(error),
            },
            Action::Wait(_) | Action::Advance { .. } | Action::Finish | Action::End(_) => {
                Event::Done
            }
        };
        self.check_faults();
        event
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

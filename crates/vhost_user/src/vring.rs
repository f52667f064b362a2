//! One queue's state, as a front end's messages build it up, and the queue itself while it runs on a worker.
//!
//! A vring starts when its kick arrives (vhost-user protocol, "Ring states") and stops with `GET_VRING_BASE`, after
//! everything in flight has been answered.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, mpsc};

use guest_memory::{MemoryTable, RingMemory};
use latency::Labels;
use reactor::{Source, SourceId, WorkerHandle};
use rustix::event::epoll;
use virtio_device::{OnBroken, QueueChange, QueueControl, QueueSetup, VirtioDevice};
use virtqueue::QueueConfig;

const F_EVENT_IDX: u64 = 1 << 29;
const F_RING_PACKED: u64 = 1 << 34;

/// Bytes of a descriptor, split or packed; its first eight are an address.
const DESCRIPTOR_SIZE: u64 = 16;

type Control = fn(&mut dyn Source) -> Option<&mut dyn QueueControl>;

/// A queue on its worker.
struct Running {
    worker: WorkerHandle,
    source: SourceId,
    control: Control,
}

/// Addresses in the front end's own space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UserAddresses {
    pub descriptor: u64,
    pub available: u64,
    pub used: u64,
}

/// A vring between messages.
#[derive(Default)]
pub(crate) struct Vring {
    pub size: u16,
    pub addresses: Option<UserAddresses>,
    /// Where to start; `None`: at the beginning, which for a packed ring is not 0.
    pub base: Option<u32>,
    pub enabled: bool,
    call: Option<OwnedFd>,
    error: Option<OwnedFd>,
    running: Option<Running>,
}

/// What a vring needs of its session to start.
pub(crate) struct Context<'a> {
    pub device: &'a Arc<dyn VirtioDevice>,
    pub features: u64,
    pub inflight: Option<RingMemory>,
    pub memory: &'a Arc<MemoryTable>,
    pub on_broken: &'a OnBroken,
}

impl Vring {
    /// Back to the initial state; the front end's notifications stay until it gives others.
    pub fn reset(&mut self) {
        (self.size, self.addresses, self.base, self.enabled) = (0, None, None, false);
    }

    /// Does the ring go on elsewhere than at its start?
    pub fn goes_on(&self, start: u32) -> bool {
        self.base.is_some_and(|base| base != start)
    }

    /// Has a driver filled descriptors in? It has where the ring has come round to its start.
    pub fn is_used(&self, memory: &MemoryTable) -> bool {
        let bytes = u64::from(self.size) * DESCRIPTOR_SIZE;
        let descriptors = self
            .addresses
            .and_then(|user| memory.user_to_guest(user.descriptor))
            .and_then(|address| memory.ring(address, bytes).ok());
        // A ring that is nowhere is refused when it starts.
        descriptors.is_some_and(|ring| {
            let mut entries = (0..bytes).step_by(DESCRIPTOR_SIZE as usize);
            entries.any(|at| ring.read::<u64>(at as usize) != 0)
        })
    }

    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Starts the queue on `worker`; `kick` is what wakes it.
    ///
    /// # Errors
    /// When the front end has not said enough, or has said nonsense.
    pub fn start(
        &mut self,
        index: u16,
        kick: Option<OwnedFd>,
        worker: &WorkerHandle,
        context: Context<'_>,
    ) -> Result<(), String> {
        check_kick(kick.as_ref())?;
        let Some(user) = self.addresses else {
            return Err("its addresses were never set".into());
        };
        let translate = |what: &str, address: u64| {
            context
                .memory
                .user_to_guest(address)
                .ok_or_else(|| format!("its {what} at {address:#x} is not in the client's memory"))
        };
        let descriptor = translate("descriptor area", user.descriptor)?;
        let driver = translate("driver area", user.available)?;
        let device = translate("device area", user.used)?;
        let has = |bit: u64| context.features & bit != 0;
        let mut config = if has(F_RING_PACKED) {
            QueueConfig::packed(self.size, descriptor, driver, device)
        } else {
            QueueConfig::split(self.size, descriptor, driver, device)
        };
        config.event_idx = has(F_EVENT_IDX);
        config.base = self.base.unwrap_or(config.base);
        let setup = QueueSetup {
            index,
            features: context.features,
            config,
            memory: context.memory.clone(),
            inflight: context.inflight,
            kick,
            call: clone_fd(self.call.as_ref())?,
            error: clone_fd(self.error.as_ref())?,
            enabled: self.enabled,
            on_broken: context.on_broken.clone(),
            labels: Labels {
                export: context.device.name().to_owned(),
                disk: String::new(),
                queue: u32::from(index),
                worker: worker.index(),
            },
        };
        let make = context.device.queue(setup, worker);
        let made = worker.call(move |w| {
            let mut control = None;
            let id = w.add(|io, id| {
                let built = make(io, id)?;
                control = Some(built.control);
                Ok::<_, String>(built.source)
            })?;
            Ok::<_, String>((id, control))
        });
        let (source, control) = made.map_err(|gone| gone.to_string())??;
        let control = control.ok_or("the queue was not made")?;
        context.device.queue_placed(index, worker, source);
        self.running = Some(Running {
            worker: worker.clone(),
            source,
            control,
        });
        // A device before this one may have answered, and ended before it said so.
        self.change(QueueChange::Call(clone_fd(self.call.as_ref())?))
    }

    /// Stops the queue and waits until everything in flight is answered. Gives where it stands.
    pub fn stop(&mut self, index: u16, device: &Arc<dyn VirtioDevice>) -> Option<u32> {
        self.end(index, device, false)
    }

    /// Stops the queue, whose front end is gone: requests that fail are left to the next device, where it can know of them.
    pub fn leave(&mut self, index: u16, device: &Arc<dyn VirtioDevice>) {
        self.end(index, device, true);
    }

    fn end(&mut self, index: u16, device: &Arc<dyn VirtioDevice>, leaves: bool) -> Option<u32> {
        let Running {
            worker,
            source,
            control,
        } = self.running.take()?;
        let (reply, answer) = mpsc::sync_channel(1);
        worker.send(move |w| {
            if leaves
                && let Some((queue, _io)) = w.source(source)
                && let Some(queue) = control(queue)
            {
                queue.leave_failed();
            }
            w.stop(source, move |mut source, _io| {
                let base = control(&mut *source).map(|queue| queue.base());
                // The session waits for it, or the process ends.
                reply.send(base).ok();
            });
        });
        let base = answer.recv().ok().flatten();
        device.queue_stopped(index);
        self.base = base.or(self.base);
        base
    }

    /// Applies a change to the queue if it runs, and waits until it is in force.
    pub fn change(&self, change: QueueChange) -> Result<(), String> {
        let Some(Running {
            worker,
            source,
            control,
        }) = &self.running
        else {
            return Ok(());
        };
        let (source, control) = (*source, *control);
        let changed = worker.call(move |w| {
            let kick = matches!(change, QueueChange::Kick(_));
            let Some((queue, _io)) = w.source(source) else {
                return Ok(());
            };
            let Some(queue) = control(queue) else {
                return Ok(());
            };
            let changed = queue.change(change).map_err(|error| error.to_string());
            if kick {
                w.rewatch(source);
            }
            // There may be requests that nobody will kick for again.
            w.wake(source);
            changed
        });
        changed.map_err(|gone| gone.to_string())?
    }

    /// Another kick for a queue that runs.
    pub fn set_kick(&mut self, kick: Option<OwnedFd>) -> Result<(), String> {
        check_kick(kick.as_ref())?;
        self.change(QueueChange::Kick(kick))
    }

    pub fn set_call(&mut self, call: Option<OwnedFd>) -> Result<(), String> {
        check_event("interrupt", call.as_ref())?;
        self.change(QueueChange::Call(clone_fd(call.as_ref())?))?;
        self.call = call;
        Ok(())
    }

    pub fn set_error(&mut self, error: Option<OwnedFd>) -> Result<(), String> {
        check_event("error notification", error.as_ref())?;
        self.change(QueueChange::Error(clone_fd(error.as_ref())?))?;
        self.error = error;
        Ok(())
    }

    pub fn set_enabled(&mut self, enabled: bool) -> Result<(), String> {
        self.enabled = enabled;
        self.change(QueueChange::Enabled(enabled))
    }
}

fn clone_fd(fd: Option<&OwnedFd>) -> Result<Option<OwnedFd>, String> {
    fd.map(OwnedFd::try_clone)
        .transpose()
        .map_err(|error| format!("cannot duplicate a descriptor: {error}"))
}

/// What a descriptor is of that can be waited for, written to and closed without asking anybody, as the kernel names it
/// (proc(5), /proc/pid/fd); paths begin otherwise.
const EVENTS: [&[u8]; 2] = [b"anon_inode:[eventfd]", b"pipe:["];

/// A file may be on a file system of the front end's own (FUSE): whoever polls it, writes to it or closes it waits until that
/// answers. Whoever closes a socket may wait for its peer (SO_LINGER), or for that of another one, which lies in a message that
/// it has not read. To tell what it is asks nobody.
fn check_event(what: &str, fd: Option<&OwnedFd>) -> Result<(), String> {
    let Some(fd) = fd else { return Ok(()) };
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let name = rustix::fs::readlink(link, Vec::new())
        .map_err(|errno| format!("cannot find the type of its {what} descriptor: {errno}"))?;
    match EVENTS.iter().any(|kind| name.to_bytes().starts_with(kind)) {
        true => Ok(()),
        false => Err(format!(
            "its {what} descriptor is neither an eventfd nor a pipe: {name:?}"
        )),
    }
}

/// A pipe's end that nobody writes to any more is always ready: whoever waited for it would never sleep.
fn check_kick(kick: Option<&OwnedFd>) -> Result<(), String> {
    check_event("kick", kick)?;
    let Some(kick) = kick else { return Ok(()) };
    let flags = epoll::EventFlags::IN;
    epoll::create(epoll::CreateFlags::CLOEXEC)
        .and_then(|set| epoll::add(set, kick, epoll::EventData::new_u64(0), flags))
        .map_err(|errno| format!("its kick descriptor cannot be polled: {errno}"))
}

//! State of one queue, built by a front end's messages, and the queue itself while it runs on a worker.
//!
//! A vring starts when its kick arrives (vhost-user protocol, "Ring states"). It stops with `GET_VRING_BASE`, after all requests in flight
//! were answered.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use guest_memory::{MemoryTable, RingMemory};
use latency::Labels;
use reactor::{Source, SourceId, WorkerHandle};
use rustix::event::epoll;
use virtio_device::{LogSetup, OnBroken, QueueChange, QueueControl, QueueSetup, VirtioDevice};
use virtqueue::QueueConfig;

use crate::queue_times::{QueueTime, QueueTimes};

const F_EVENT_IDX: u64 = 1 << 29;
const F_RING_PACKED: u64 = 1 << 34;

/// Length of a descriptor, split or packed. The first eight bytes are an address.
const DESCRIPTOR_SIZE: u64 = 16;

/// Poll interval of a queue that is disabled when its requests have ended.
const DISABLE_POLL_INTERVAL: Duration = Duration::from_millis(1);

type Control = fn(&mut dyn Source) -> Option<&mut dyn QueueControl>;

/// A queue on its worker.
struct Running {
    worker: WorkerHandle,
    source: SourceId,
    control: Control,
}

impl Running {
    /// Executes an operation of the queue on its worker, and waits for its result. `None`: the queue has ended.
    ///
    /// # Errors
    /// The worker has ended.
    fn call<T: Send + 'static>(
        &self,
        has_new_kick: bool,
        operation: impl FnOnce(&mut dyn QueueControl) -> T + Send + 'static,
    ) -> Result<Option<T>, String> {
        let (source, control) = (self.source, self.control);
        let result = self.worker.call(move |w| {
            let (queue, _io) = w.source(source)?;
            let result = operation(control(queue)?);
            if has_new_kick {
                w.rewatch(source);
            }
            // The driver may not kick again for requests that are already in the ring.
            w.wake(source);
            Some(result)
        });
        result.map_err(|error| error.to_string())
    }
}

/// Reason for the stop of a queue.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StopKind {
    /// The front end stops the queue or sets it up again.
    Answered,
    /// The front end has left.
    Left,
    /// Another process continues the session.
    HandedOver { retains_failed: bool },
}

impl StopKind {
    fn retains_failed(self) -> bool {
        match self {
            StopKind::Answered => false,
            StopKind::Left => true,
            StopKind::HandedOver { retains_failed } => retains_failed,
        }
    }

    fn waits_for_locks(self) -> bool {
        !matches!(self, StopKind::HandedOver { .. })
    }
}

/// Addresses in the front end's address space.
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
    /// Guest-physical address at which writes to the used ring are marked in the dirty log (`VHOST_VRING_F_LOG`).
    pub log_address: Option<u64>,
    /// Start position; `None`: the beginning, which is not 0 for a packed ring.
    pub base: Option<u32>,
    pub enabled: bool,
    call: Option<OwnedFd>,
    error: Option<OwnedFd>,
    running: Option<Running>,
}

/// Session state that a vring needs to start.
pub(crate) struct Context<'a> {
    pub device: &'a Arc<dyn VirtioDevice>,
    pub features: u64,
    pub inflight: Option<RingMemory>,
    pub log: Option<LogSetup>,
    pub memory: &'a Arc<MemoryTable>,
    pub on_broken: &'a OnBroken,
}

/// Position of a stopped queue, and the time that its requests in flight took.
struct Stopped {
    base: u32,
    drain: Duration,
}

impl Vring {
    /// Resets the vring. Keeps the front end's eventfds until it sends others.
    pub fn reset(&mut self) {
        (self.size, self.addresses, self.base, self.enabled) = (0, None, None, false);
        self.log_address = None;
    }

    /// Returns true if the ring starts at another position than its beginning.
    pub fn is_mid_ring(&self, start: u32) -> bool {
        self.base.is_some_and(|base| base != start)
    }

    /// Returns true if a driver has written descriptors. Detects a ring that has wrapped to its beginning.
    pub fn is_used(&self, memory: &MemoryTable) -> bool {
        let bytes = u64::from(self.size) * DESCRIPTOR_SIZE;
        let descriptors = self
            .addresses
            .and_then(|user| memory.user_to_guest(user.descriptor))
            .and_then(|address| memory.ring(address, bytes).ok());
        // A ring outside of the memory is refused when it starts.
        descriptors.is_some_and(|ring| {
            let mut entries = (0..bytes).step_by(DESCRIPTOR_SIZE as usize);
            entries.any(|at| ring.read::<u64>(at as usize) != 0)
        })
    }

    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Starts the queue on `worker`; `kick` wakes it.
    ///
    /// # Errors
    /// Fails if the front end's parameters are incomplete or invalid.
    pub fn start(
        &mut self,
        index: u16,
        kick: Option<OwnedFd>,
        worker: &WorkerHandle,
        context: Context<'_>,
    ) -> Result<(), String> {
        check_kick(kick.as_ref())?;
        let Some(user) = self.addresses else {
            return Err("its addresses are not set".into());
        };
        let translate = |part: &str, address: u64| {
            context
                .memory
                .user_to_guest(address)
                .ok_or_else(|| format!("its {part} at {address:#x} is not in the client's memory"))
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
            log: context.log,
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
        let created = worker.call(move |w| {
            let mut control = None;
            let id = w.add(|io, id| {
                let built = make(io, id)?;
                control = Some(built.control);
                Ok::<_, String>(built.source)
            })?;
            Ok::<_, String>((id, control))
        });
        let (source, control) = created.map_err(|error| error.to_string())??;
        let control = control.ok_or("cannot create the queue")?;
        context.device.queue_placed(index, worker, source);
        self.running = Some(Running {
            worker: worker.clone(),
            source,
            control,
        });
        // The previous device may have answered requests and stopped before its interrupt.
        self.change(QueueChange::Call(clone_fd(self.call.as_ref())?))
    }

    /// Stops the queue and waits until all requests in flight are answered. Returns its position.
    pub fn stop(
        &mut self,
        index: u16,
        device: &Arc<dyn VirtioDevice>,
        times: &QueueTimes,
    ) -> Option<u32> {
        self.end(index, device, times, StopKind::Answered)
    }

    /// Stops the queue for another process. Does not wait for the release of locks: the other process gets the session meanwhile, and its
    /// requests wait for the locks. `retains_failed`: see [`Vring::stop_retaining_failed`].
    pub fn stop_for_handover(
        &mut self,
        index: u16,
        device: &Arc<dyn VirtioDevice>,
        times: &QueueTimes,
        retains_failed: bool,
    ) {
        self.end(
            index,
            device,
            times,
            StopKind::HandedOver { retains_failed },
        );
    }

    /// Stops the queue after its front end has left. Failed requests stay unanswered for the next device, if an in-flight region records
    /// them.
    pub fn stop_retaining_failed(
        &mut self,
        index: u16,
        device: &Arc<dyn VirtioDevice>,
        times: &QueueTimes,
    ) {
        self.end(index, device, times, StopKind::Left);
    }

    fn end(
        &mut self,
        index: u16,
        device: &Arc<dyn VirtioDevice>,
        times: &QueueTimes,
        kind: StopKind,
    ) -> Option<u32> {
        let start = Instant::now();
        let Running {
            worker,
            source,
            control,
        } = self.running.take()?;
        let (reply, answer) = mpsc::sync_channel(1);
        worker.send(move |w| {
            if kind.retains_failed()
                && let Some((queue, _io)) = w.source(source)
                && let Some(queue) = control(queue)
            {
                queue.retain_failed();
            }
            let drain_start = Instant::now();
            w.stop(source, move |mut source, _io| {
                let stopped = control(&mut *source).map(|queue| Stopped {
                    base: queue.base(),
                    drain: drain_start.elapsed(),
                });
                // Fails only if the session no longer waits, at the end of the process.
                reply.send(stopped).ok();
            });
        });
        let stopped = answer.recv().ok().flatten();
        device.queue_stopped(index);
        if kind.waits_for_locks() {
            device.wait_for_release();
        }
        let Stopped { base, drain } = stopped?;
        let stop = start.elapsed();
        times.record(QueueTime::Drain, drain);
        times.record(QueueTime::Stop, stop);
        times.record(QueueTime::Rest, stop.saturating_sub(drain));
        self.base = Some(base);
        self.base
    }

    /// Applies a change to a running queue, and waits until it has taken effect.
    pub fn change(&self, change: QueueChange) -> Result<(), String> {
        let Some(running) = &self.running else {
            return Ok(());
        };
        let has_new_kick = matches!(change, QueueChange::Kick(_));
        let apply = |queue: &mut dyn QueueControl| queue.change(change);
        match running.call(has_new_kick, apply)? {
            Some(changed) => changed.map_err(|error| error.to_string()),
            None => Ok(()),
        }
    }

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

    /// Disables a running queue once all requests in its ring are answered. Returns false if some are not within `limit`: the queue is
    /// then still enabled.
    pub fn disable_when_idle(&self, limit: Duration) -> Result<bool, String> {
        let Some(running) = &self.running else {
            return Ok(true);
        };
        let until = Instant::now() + limit;
        let disable = |queue: &mut dyn QueueControl| match queue.is_idle() {
            true => Some(queue.change(QueueChange::Enabled(false))),
            false => None,
        };
        loop {
            match running.call(false, disable)? {
                Some(Some(disabled)) => {
                    return disabled.map(|()| true).map_err(|error| error.to_string());
                }
                Some(None) => {}
                None => return Ok(true),
            }
            if Instant::now() >= until {
                return Ok(false);
            }
            std::thread::sleep(DISABLE_POLL_INTERVAL);
        }
    }
}

pub(crate) fn clone_fd(fd: Option<&OwnedFd>) -> Result<Option<OwnedFd>, String> {
    fd.map(OwnedFd::try_clone)
        .transpose()
        .map_err(|error| format!("cannot duplicate a descriptor: {error}"))
}

/// Types of descriptors that can be polled, written and closed without depending on a third party, by their names in proc(5), /proc/pid/fd.
/// Paths begin differently.
const EVENTS: [&[u8]; 2] = [b"anon_inode:[eventfd]", b"pipe:["];

/// Refuses other types. A file may be on a FUSE file system of the front end: polling, writing and closing it would wait for that. Closing
/// a socket may wait for its peer (SO_LINGER), or for the peer of another socket in a message that it has not read. Determining the type
/// blocks on none of them.
pub(crate) fn check_event(role: &str, fd: Option<&OwnedFd>) -> Result<(), String> {
    let Some(fd) = fd else { return Ok(()) };
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let name = rustix::fs::readlink(link, Vec::new())
        .map_err(|errno| format!("cannot determine the type of its {role} descriptor: {errno}"))?;
    match EVENTS.iter().any(|kind| name.to_bytes().starts_with(kind)) {
        true => Ok(()),
        false => Err(format!(
            "its {role} descriptor is neither an eventfd nor a pipe: {name:?}"
        )),
    }
}

/// Also refuses descriptors that cannot be polled. A pipe without a writer is always ready, so its waiter would never sleep.
fn check_kick(kick: Option<&OwnedFd>) -> Result<(), String> {
    check_event("kick", kick)?;
    let Some(kick) = kick else { return Ok(()) };
    let flags = epoll::EventFlags::IN;
    epoll::create(epoll::CreateFlags::CLOEXEC)
        .and_then(|set| epoll::add(set, kick, epoll::EventData::new_u64(0), flags))
        .map_err(|errno| format!("its kick descriptor cannot be polled: {errno}"))
}

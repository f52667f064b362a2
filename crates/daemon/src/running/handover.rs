//! End of a daemon in favour of the next one: hands over descriptors, then closes the disks. The next daemon opens them when all are closed.

use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bdev::{BlockDevice, Disk};
use config::Config;
use latency::Clock;
use reactor::OwnedQueue;

use super::Running;
use crate::control;
use crate::disks::Disks;
use crate::handover::{DiskMemory, Handover, Item};
use crate::helper_threads::HelperThreads;
use crate::metrics;
use crate::notify::Notifier;
use crate::objects::Servers;
use crate::writing_ahead::write_ahead;

/// Maximum time for the removal of queues after their clients have ended.
const QUEUE_WAIT_MAX: Duration = Duration::from_millis(500);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

impl Running {
    /// Hands over sessions, sockets and the memory of RAM disks to `to`. No client is served afterwards. Then waits for at most `lock_wait` for
    /// the release of locks that end with the last use of a disk, because the end of the process would interrupt it.
    pub fn hand_over(&mut self, to: &Notifier, memory: Option<&DiskMemory>, lock_wait: Duration) {
        let control = self.control.take().and_then(control::Server::hand_over);
        let api = self.api.take().and_then(control::TcpServer::hand_over);
        let metrics = self.metrics.take().and_then(metrics::Listener::hand_over);
        self.overview.jobs.end();
        write_ahead(&self.overview.live());
        let transports = self.overview.servers.transports();
        let served = transports.map(|transports| {
            let portals = transports.iscsi.hand_over_portals();
            let exports = transports.vhost.hand_over_sockets();
            let nbd = transports.nbd.hand_over_sockets();
            (transports.vhost.hand_over_sessions(), portals, exports, nbd)
        });
        let (sessions, portals, exports, nbd) = served.unwrap_or_default();
        let count = sessions.len();
        let mut others = Handover::default();
        if let Some(memory) = memory {
            memory.hand_over(&mut others);
        }
        others.push_all(&Item::Portal, portals);
        others.push_all(&Item::Export, exports);
        others.push_all(&Item::Nbd, nbd);
        if let Some(control) = control {
            others.push_control(control);
        }
        others.push_all(&Item::Api, api);
        others.push_all(&Item::Metrics, metrics);
        if count == 0 && others.is_empty() {
            return;
        }
        let mut handover = Handover::default();
        let stored = handover.push_sessions(sessions).and_then(|()| {
            handover.store(to)?;
            others.store(to)
        });
        match stored {
            Ok(()) => tracing::info!(sessions = count, "sessions handed over"),
            Err(error) => {
                tracing::error!("cannot hand over sessions, front ends must reconnect: {error}");
            }
        }
        // The sessions are stored, so that a slow release ends none of them. One deadline: the lock service of the disks may be the same.
        let until = Clock::shared().elapsed() + lock_wait;
        let disks = Arc::clone(&self.overview.live().disks);
        for (_, disk) in disks.iter() {
            disk.wait_for_release(until);
        }
    }

    /// Ends all clients and closes the disks, for the next daemon. Returns false if a disk may still be open. Disks remain for the drop if queues
    /// still use them, because an I/O or a front end does not respond. Blocks while the storage of another disk does not respond.
    pub fn release(&mut self) -> bool {
        // A service manager starts the next daemon after the end of this one, which closes the bitmaps.
        self.overview.bitmaps.hand_over();
        self.end_clients();
        let servers = &self.overview.servers;
        let mut live = self.overview.write_live();
        let config = Arc::clone(&live.config);
        let until = Instant::now() + QUEUE_WAIT_MAX;
        let mut in_use = disks_in_use(&config, &servers.pool.queues());
        while !in_use.is_empty() && Instant::now() < until {
            std::thread::sleep(POLL_INTERVAL);
            in_use = disks_in_use(&config, &servers.pool.queues());
        }
        let disks = live.take_disks();
        let open = disks
            .iter()
            .map(|(name, disk)| (name.clone(), Arc::clone(disk)));
        let (left, closing): (Disks, Disks) = open.partition(|(name, _)| in_use.contains(name));
        live.disks = Arc::new(left);
        drop(live);
        drop(disks);
        for disk in in_use {
            tracing::warn!(
                disk,
                "disk not released to the next daemon: an I/O or a front end does not respond"
            );
        }
        let count = closing.len();
        let (closed, each_closed) = mpsc::channel();
        let threads = HelperThreads::default();
        for (name, disk) in closing {
            let location = location(&config, &name);
            let (servers, closed) = (Arc::clone(servers), closed.clone());
            let close = move || {
                close_disk(&servers, disk);
                // The receiver may have ended.
                closed.send(()).ok();
            };
            if let Err(error) = threads.run(&location, close) {
                tracing::warn!(disk = name, %error, "cannot start a thread to close the disk");
            }
        }
        drop(closed);
        each_closed.iter().count() == count
    }
}

/// Closes a disk. Returns when no thread uses its device, and its files and locks are free.
fn close_disk(servers: &Servers, disk: Arc<Disk>) {
    servers.detach_disk(&disk);
    let device = disk.device();
    let name = disk.name().to_owned();
    drop(disk);
    while Arc::strong_count(&device) > 1 {
        std::thread::sleep(POLL_INTERVAL);
    }
    // A worker drops its channel after the device, in the same iteration.
    for worker in servers.pool.workers() {
        worker.call(|_| ()).ok();
    }
    flush_last(&name, &device);
    drop(device);
}

/// Flushes a device that no later flush would cover.
fn flush_last(disk: &str, device: &Arc<dyn BlockDevice>) {
    if let Err(error) = bdev::flush_before_close(device) {
        tracing::error!(
            disk,
            "cannot flush the disk before its connection ends: {error}. Writes since its last flush may be lost, and later flushes of the next daemon do not report that; hint: check the data. A server with MULTI_CONN has no such loss"
        );
    }
}

/// Flushes disks that no later flush would cover, at the same time. Their clients have ended.
pub(super) fn flush_before_close(config: &Config, disks: &Disks) {
    let threads = HelperThreads::default();
    let (flushed, all_flushed) = mpsc::channel::<()>();
    for (name, disk) in disks {
        let device = disk.device();
        if !bdev::needs_flush_before_close(&*device) {
            continue;
        }
        let location = location(config, name);
        let (disk, flushed) = (name.clone(), flushed.clone());
        let flush = move || {
            flush_last(&disk, &device);
            drop(device);
            drop(flushed);
        };
        if let Err(error) = threads.run(&location, flush) {
            tracing::warn!(disk = name, %error, "cannot start a thread to flush the disk");
        }
    }
    drop(flushed);
    // Nothing is sent: this returns when the last thread has dropped its sender.
    all_flushed.recv().ok();
}

/// Returns the place of a disk's storage, for [`HelperThreads`].
fn location(config: &Config, disk: &str) -> String {
    let disk = config.disk(disk);
    let location = disk.and_then(|disk| disk.backend.blocking_storage());
    location.unwrap_or_default()
}

/// Returns the disks of the exports of these queues.
fn disks_in_use(config: &Config, queues: &[OwnedQueue]) -> BTreeSet<String> {
    let exports: BTreeSet<&str> = queues.iter().map(|queue| &*queue.export).collect();
    let exports = exports.into_iter().filter_map(|name| config.export(name));
    exports
        .flat_map(|export| export.disks().map(str::to_owned))
        .collect()
}

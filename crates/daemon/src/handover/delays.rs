//! Conditions that would delay a handover, checked before anything stops. During a handover all clients wait until the I/O of every disk has
//! ended, and a thread that a file system blocks prevents the end of the process.

use std::collections::BTreeSet;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::helper_threads::HelperThreads;
use crate::objects::{Fault, Live, Transports};

/// Maximum time for the I/O in flight, and for operations of helper threads.
const IO_WAIT_MAX: Duration = Duration::from_secs(1);
/// Maximum time for the current message of a session. A session ends itself if a message is not complete within 3 s.
const MESSAGE_WAIT_MAX: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Returns everything that would delay a handover now. Takes milliseconds if there is nothing. Clients are served meanwhile.
pub(crate) fn find(live: &Live, transports: &Transports, helpers: &HelperThreads) -> Vec<Fault> {
    let until = Instant::now() + IO_WAIT_MAX;
    let (to, drained) = mpsc::channel();
    let mut disks = BTreeSet::new();
    for (name, disk) in &*live.disks {
        disks.insert(name.clone());
        let (to, name) = (to.clone(), name.clone());
        // An empty range delays no I/O. It is granted when the I/O that is in flight now has ended.
        disk.range_locks().acquire(0, 0, move |lock| {
            drop(lock);
            // Fails after the wait.
            to.send(name).ok();
        });
    }
    drop(to);
    let is_folder = |location: &String| location.starts_with('/');
    let mut locations = helpers.busy();
    // Connections to targets and clusters end with the process.
    locations.retain(is_folder);
    let sessions = transports.vhost.unresponsive_sessions(MESSAGE_WAIT_MAX);
    let left = || until.saturating_duration_since(Instant::now());
    while let Ok(disk) = drained.recv_timeout(left()) {
        disks.remove(&disk);
    }
    loop {
        let busy = helpers.busy();
        locations.retain(|location| busy.contains(location));
        if locations.is_empty() || left().is_zero() {
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    let seconds = IO_WAIT_MAX.as_secs();
    let disks = disks.into_iter().map(|disk| {
        format!(
            "cannot upgrade: an I/O of disk {disk} takes longer than {seconds} s, and all clients would wait for it"
        )
    });
    let locations = locations.into_iter().map(|location| {
        format!("cannot upgrade: a file operation at {location} takes longer than {seconds} s, and the daemon could not end")
    });
    let storage = disks
        .chain(locations)
        .map(|detail| Fault::new(detail).help("check the storage, or add --force"));
    let sessions = sessions.into_iter().map(|export| {
        let detail = format!(
            "cannot upgrade: the front end of export {export} blocks its session for longer than {} s",
            MESSAGE_WAIT_MAX.as_secs()
        );
        Fault::new(detail).help("end the front end, or add --force")
    });
    storage.chain(sessions).collect()
}

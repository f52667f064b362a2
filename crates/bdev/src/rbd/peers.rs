//! Membership of the daemons that serve one image, and the state that they share.
//!
//! ```text
//!   ReplaceState --> calls thread: compare and replace the object --> notify --> all have acknowledged? --> done
//!                                                                       |            no: blocklist them, take them off the list
//!   events thread of each daemon: <-- notification, reread, observer --+--> acknowledge
//!                                  <-- watch lost, or not confirmed for a while: not current until it has joined again
//! ```
//!
//! Two threads, because a daemon that waits for acknowledgements must also acknowledge. No code here runs on a worker. The object is not
//! trusted: [`SharedRecord::decode`]. Tests: `record.rs`, and `tests/tests/rbd_reservations.rs` against a real cluster.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use block::Identity;
use latency::Clock;
use librbd::{Error, Image, Notification, Object, Watch};

use super::SharedRbd;
use super::record::{MEMBERS_MAX, Member, RECORD_MAX, SharedRecord};
use super::reopening::LossReason;
use crate::shared_state::STATE_VERSION_LENGTH;
use crate::{StateMembership, StateObserver};

/// Time limit for acknowledgements. A daemon only rereads the object; the rest is for busy machines.
const NOTIFY_LIMIT: Duration = Duration::from_secs(10);

/// Maximum age of the watch's last confirmation, sent every five seconds. Beyond it, notifications may have been missed.
const AGE_MAX: Duration = Duration::from_secs(12);

/// Interval of the watch checks.
const LOOK: Duration = Duration::from_secs(1);

/// Lease: this long after the last confirmation no daemon uses its cached state, even if it was about to read the object. Wait time if a
/// daemon cannot be blocklisted.
const LEASE: Duration = Duration::from_secs(25);

/// Time after which the cluster considers a watcher dead.
const WATCH_TIMEOUT: Duration = Duration::from_secs(15);

/// Pause between two attempts to join.
const RETRY: Duration = Duration::from_secs(2);

/// Time limit, and interval of the checks, for the end of commands that a replacement ends.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);
const SETTLE_LOOK: Duration = Duration::from_millis(100);

/// Time limit for leaving; afterwards the caller continues.
const LEAVE_LIMIT: Duration = Duration::from_secs(2);

/// Maximum attempts to replace the object when other daemons come first.
const ATTEMPTS_MAX: usize = 64;

/// Returns random bytes for an instance or a record.
pub(super) fn random() -> [u8; 16] {
    Identity::random().bits().to_be_bytes()
}

type Done = Box<dyn FnOnce(Result<u64, i32>) + Send>;

enum PeerCall {
    /// Version and state; and the callback for the result.
    Replace(Vec<u8>, Done),
    /// This daemon has joined: checks that others answer and have the current state.
    Announce,
}

enum PeerEvent {
    Notified(Notification),
    Lost(i32),
    /// Result of the announcement of this instance.
    Announced([u8; 16], Result<(), Error>),
    Stop(SyncSender<()>),
}

#[derive(Default)]
struct PeerView {
    object: Option<Arc<Object>>,
    /// Instance of this daemon since its last attempt to join.
    instance: [u8; 16],
    /// Last instance that was on the member list.
    entered: Option<[u8; 16]>,
    record: Option<SharedRecord>,
    is_current: bool,
    /// The daemon has never been current.
    is_new: bool,
    /// Reason why the daemon is not current, after a failure.
    problem: Option<String>,
}

/// Membership of this daemon.
pub(super) struct Peers {
    shared: Weak<SharedRbd>,
    image: String,
    observer: Arc<dyn StateObserver>,
    view: Mutex<PeerView>,
    events: Sender<PeerEvent>,
    /// `None` once the daemon has left.
    calls: Mutex<Option<Sender<PeerCall>>>,
}

fn failed(operation: impl Into<String>, errno: i32) -> Error {
    Error::Failed {
        operation: operation.into(),
        errno,
        hint: String::new(),
    }
}

fn not_a_member() -> Error {
    failed("remain a member of the shared state", libc::ECONNABORTED)
}

/// Encodes a notification or answer: instance, version, all excluded commands ended.
fn message(instance: [u8; 16], version: u64, settled: bool) -> Vec<u8> {
    let mut bytes = instance.to_vec();
    bytes.extend(version.to_be_bytes());
    bytes.push(settled.into());
    bytes
}

fn read_message(bytes: &[u8]) -> Option<([u8; 16], u64, bool)> {
    let (instance, rest) = bytes.split_first_chunk::<16>()?;
    let (version, rest) = rest.split_first_chunk::<8>()?;
    Some((*instance, u64::from_be_bytes(*version), rest == [1]))
}

/// Returns an image's object with the shared state.
fn object_of(image: &Arc<Image>) -> Result<Arc<Object>, Error> {
    Object::beside(image, &format!("lunette_state.{}", image.id()?))
}

fn reread(object: &Arc<Object>) -> Result<SharedRecord, Error> {
    let bytes = object.read(RECORD_MAX + 1)?;
    let record = bytes.as_deref().map(SharedRecord::decode);
    record
        .ok_or_else(|| failed("read the shared state", libc::ENOENT))?
        .ok_or_else(|| failed("parse the shared state", libc::EBADMSG))
}

/// Joins the shared state of an image; starts the two threads.
pub(super) fn join(shared: &Arc<SharedRbd>, observer: Arc<dyn StateObserver>) -> StateMembership {
    let (event_sender, events) = mpsc::channel();
    let (call_sender, calls) = mpsc::channel();
    let peers = Arc::new(Peers {
        shared: Arc::downgrade(shared),
        image: shared.options.image.to_string(),
        observer,
        view: Mutex::new(PeerView {
            is_new: true,
            ..PeerView::default()
        }),
        events: event_sender,
        calls: Mutex::new(Some(call_sender)),
    });
    shared.set_peers(Some(Arc::clone(&peers)));
    let (follower, caller) = (Arc::clone(&peers), Arc::clone(&peers));
    let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
        let thread = std::thread::Builder::new().name(name.to_owned());
        if let Err(error) = thread.spawn(work) {
            tracing::error!(image = %peers.image, "cannot start a thread for the shared state: {error}");
        }
    };
    spawn("rbd-peers", Box::new(move || follower.follow(&events)));
    spawn("rbd-state", Box::new(move || caller.carry_out(&calls)));
    let shared = Arc::downgrade(shared);
    StateMembership::new(move || {
        if let Some(shared) = shared.upgrade() {
            shared.set_peers(None);
        }
        let (left, wait) = mpsc::sync_channel(1);
        lock(&peers.calls).take();
        if peers.events.send(PeerEvent::Stop(left)).is_ok() {
            wait.recv_timeout(LEAVE_LIMIT).ok();
        }
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Peers {
    /// Replaces the state. `done` is called on another thread, or at once with ENOTCONN after leaving. Does not block.
    pub(super) fn replace(&self, bytes: Vec<u8>, done: Done) {
        let sent = match &*lock(&self.calls) {
            Some(calls) => calls.send(PeerCall::Replace(bytes, done)),
            None => Err(mpsc::SendError(PeerCall::Replace(bytes, done))),
        };
        if let Err(mpsc::SendError(PeerCall::Replace(_, done))) = sent {
            done(Err(libc::ENOTCONN));
        }
    }

    /// Returns true if another daemon has removed this one from the member list. Reads the object over `image`.
    pub(super) fn is_excluded(&self, image: &Arc<Image>) -> bool {
        let entered = lock(&self.view).entered;
        let record = object_of(image).and_then(|object| reread(&object));
        record.is_ok_and(|record| entered.is_some_and(|instance| !record.has(&instance)))
    }

    /// Returns why the state is unknown; `None` while it is current.
    pub(super) fn unknown(&self) -> Option<String> {
        let view = lock(&self.view);
        let problem = || view.problem.clone();
        (!view.is_current)
            .then(|| problem().unwrap_or_else(|| "reservations are being read".to_owned()))
    }

    /// Waits until this daemon is current. Returns false after `limit`.
    pub(super) fn wait_until_current(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        while !lock(&self.view).is_current {
            if Instant::now() >= end {
                return false;
            }
            std::thread::sleep(SETTLE_LOOK);
        }
        true
    }

    fn set_current(&self, current: bool) {
        let mut view = lock(&self.view);
        view.is_current = current;
        view.is_new &= !current;
        if current {
            view.problem = None;
        }
        self.observer.set_current(current);
    }

    /// Extends the validity of the state to `AGE_MAX` after the last confirmation of the watch.
    fn extend(&self, watch: &Watch) -> Result<(), i32> {
        // Read first: if the process stops in between, the validity ends too early, not too late.
        let now = Clock::shared().elapsed();
        let left = AGE_MAX
            .checked_sub(watch.age()?)
            .filter(|left| !left.is_zero());
        let left = left.ok_or(libc::ETIMEDOUT)?;
        self.observer.set_valid_until(now + left);
        Ok(())
    }

    /// Acts on a record, unless a later one was adopted.
    fn adopt(&self, record: SharedRecord) -> Result<(), Error> {
        let mut view = lock(&self.view);
        if let Some(before) = &view.record
            && before.version >= record.version
        {
            return Ok(());
        }
        let adopted = self.observer.changed(record.version, &record.state);
        adopted
            .map_err(|reason| failed(format!("parse the shared state: {reason}"), libc::EBADMSG))?;
        view.record = Some(record);
        Ok(())
    }

    /// Replaces the record with the result of `change`; retries if another daemon was first. `None` of `change` only adopts.
    fn update(
        &self,
        object: &Arc<Object>,
        change: impl Fn(&SharedRecord) -> Option<SharedRecord>,
    ) -> Result<(), Error> {
        for _ in 0..ATTEMPTS_MAX {
            let before = reread(object)?;
            let Some(next) = change(&before) else {
                return self.adopt(before);
            };
            let bytes = next.encode();
            let bytes = bytes.ok_or_else(|| failed("write the shared state", libc::E2BIG))?;
            if object.replace(&before.guard(), &bytes)? {
                return self.adopt(next);
            }
        }
        Err(failed("replace the shared state", libc::EBUSY))
    }

    // The events thread.

    fn follow(&self, events: &Receiver<PeerEvent>) {
        let mut shown = false;
        loop {
            let watch = self.enter();
            let problem = match watch {
                Ok(watch) => match self.serve(&watch, events) {
                    ServeEnd::Stopped(left) => {
                        self.leave(&watch);
                        drop(watch);
                        left.send(()).ok();
                        return;
                    }
                    ServeEnd::Lost(error) => {
                        shown &= !lock(&self.view).is_current;
                        // Set before the watch is dropped, because dropping may block for a moment.
                        self.set_current(false);
                        error
                    }
                },
                Err(error) => error,
            };
            if problem.errno() == libc::ESHUTDOWN
                && let Some(shared) = self.shared.upgrade()
            {
                shared.lose(shared.generation(), LossReason::Blocklisted);
            }
            lock(&self.view).problem = Some(problem.to_string());
            if !shown {
                shown = true;
                tracing::error!(image = %self.image, "reservations unknown, SCSI reads and writes get BUSY: {problem}");
            }
            // Events received meanwhile belong to the watch that has ended.
            let end = Instant::now() + RETRY;
            while let Some(left) = end.checked_duration_since(Instant::now()) {
                match events.recv_timeout(left) {
                    Ok(PeerEvent::Stop(left)) => {
                        left.send(()).ok();
                        return;
                    }
                    Ok(_) => {}
                    Err(_) => break,
                }
            }
        }
    }

    /// Watches the object and joins the member list.
    fn enter(&self) -> Result<Watch, Error> {
        let shared = self.shared.upgrade();
        let shared = shared.filter(|shared| !shared.is_closed());
        let image = shared.map(|shared| shared.image());
        let image = image.ok_or_else(|| failed("access a closed image", libc::EBADF))?;
        let object = object_of(&image)?;
        let instance = random();
        let address = object.cluster().address().unwrap_or_default();
        // The old entry stays until the new one is there: otherwise no daemon could exclude this one in between.
        let before = {
            let mut view = lock(&self.view);
            // An object that was created again starts with another version.
            (view.record, view.object) = (None, None);
            view.instance = instance;
            view.entered
        };
        if object.read(1)?.is_none() {
            object.create(SharedRecord::default().encode().unwrap_or_default())?;
        }
        let (notified, lost, own) = (
            self.events.clone(),
            self.events.clone(),
            Arc::clone(&object),
        );
        let watch = object.watch(
            WATCH_TIMEOUT,
            move |notification| match read_message(&notification.bytes) {
                // The sender already has the state that it has announced.
                Some((sender, version, _)) if sender == instance => {
                    own.acknowledge(&notification, &message(instance, version, true));
                }
                _ => drop(notified.send(PeerEvent::Notified(notification))),
            },
            move |errno| drop(lost.send(PeerEvent::Lost(errno))),
        )?;
        lock(&self.view).object = Some(Arc::clone(&object));
        self.update(&object, |record| {
            let mut next = record.next();
            next.members.retain(|one| Some(one.instance) != before);
            next.members.push(Member {
                instance,
                address: address.clone(),
            });
            if next.members.len() > MEMBERS_MAX {
                // Safe: an excluded daemon joins again.
                next.members.remove(0);
            }
            Some(next)
        })?;
        lock(&self.view).entered = Some(instance);
        if let Some(calls) = &*lock(&self.calls) {
            calls.send(PeerCall::Announce).ok();
        }
        Ok(watch)
    }

    fn serve(&self, watch: &Watch, events: &Receiver<PeerEvent>) -> ServeEnd {
        let object = watch.object();
        let lost = |errno| ServeEnd::Lost(failed("watch the shared state", errno));
        loop {
            match events.recv_timeout(LOOK) {
                Ok(PeerEvent::Notified(notification)) => {
                    if let Err(error) = self.take_over(object, &notification) {
                        return ServeEnd::Lost(error);
                    }
                }
                Ok(PeerEvent::Announced(instance, _)) if instance != lock(&self.view).instance => {}
                Ok(PeerEvent::Announced(_, Ok(()))) => {
                    if let Err(errno) = self.extend(watch) {
                        return lost(errno);
                    }
                    tracing::info!(image = %self.image, "reservations known");
                    self.set_current(true);
                }
                Ok(PeerEvent::Announced(_, Err(error))) => return ServeEnd::Lost(error),
                Ok(PeerEvent::Lost(errno)) => return lost(errno),
                Ok(PeerEvent::Stop(left)) => return ServeEnd::Stopped(left),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return lost(libc::ESHUTDOWN),
            }
            if let Err(errno) = self.extend(watch) {
                return lost(errno);
            }
        }
    }

    fn take_over(&self, object: &Arc<Object>, notification: &Notification) -> Result<(), Error> {
        let record = reread(object)?;
        let (version, instance) = (record.version, lock(&self.view).instance);
        let is_member = record.has(&instance);
        let is_excluded = |one: &Member| !record.has(&one.instance);
        let some_left = {
            let view = lock(&self.view);
            let before = view.record.iter().flat_map(|record| &record.members);
            before.into_iter().any(is_excluded)
        };
        if some_left {
            // After this, no OSD serves excluded members once it has served this daemon.
            object.cluster().wait_for_map()?;
        }
        self.adopt(record)?;
        let settled = self.observer.is_settled();
        object.acknowledge(notification, &message(instance, version, settled));
        match is_member {
            true => Ok(()),
            // The acknowledgement was late, and the other daemons have excluded this one.
            false => Err(not_a_member()),
        }
    }

    fn leave(&self, watch: &Watch) {
        self.observer.set_current(false);
        let instance = lock(&self.view).instance;
        let left = self.update(watch.object(), |record| {
            let mut next = record.next();
            next.members.retain(|one| one.instance != instance);
            record.has(&instance).then_some(next)
        });
        if let Err(error) = left {
            tracing::warn!(image = %self.image, "leaving without notifying the other daemons: {error}");
        }
    }

    // Functions of the thread that executes calls.

    fn carry_out(&self, calls: &Receiver<PeerCall>) {
        let mut joined = false;
        loop {
            if std::mem::take(&mut joined) {
                let instance = lock(&self.view).instance;
                let announced = self.announce_joined(instance, &mut || {});
                self.events
                    .send(PeerEvent::Announced(instance, announced))
                    .ok();
            }
            match calls.recv() {
                Ok(PeerCall::Replace(bytes, done)) => {
                    // Replacements that must end before this one may be queued behind it. Their version is outdated: they fail.
                    let mut meanwhile = || {
                        for call in calls.try_iter() {
                            match call {
                                PeerCall::Replace(_, done) => done(Err(libc::EILSEQ)),
                                PeerCall::Announce => joined = true,
                            }
                        }
                    };
                    done(self.replace_now(&bytes, &mut meanwhile));
                }
                Ok(PeerCall::Announce) => joined = true,
                Err(mpsc::RecvError) => return,
            }
        }
    }

    fn replace_now(&self, bytes: &[u8], meanwhile: &mut dyn FnMut()) -> Result<u64, i32> {
        let (version, state) = bytes
            .split_first_chunk::<STATE_VERSION_LENGTH>()
            .ok_or(libc::EINVAL)?;
        let version = u64::from_be_bytes(*version);
        let (object, before, instance) = {
            let view = lock(&self.view);
            match (&view.object, &view.record) {
                (Some(object), Some(record)) if view.is_current => {
                    (Arc::clone(object), record.clone(), view.instance)
                }
                _ => return Err(libc::ETIMEDOUT),
            }
        };
        if before.version != version {
            return Err(libc::EILSEQ);
        }
        let mut next = before.next();
        next.state = state.to_vec();
        let encoded = next.encode().ok_or(libc::E2BIG)?;
        let replaced = object.replace(&before.guard(), &encoded).and_then(|done| {
            if !done {
                let now = reread(&object)?;
                // This daemon's own replacement, if its answer was lost.
                if now.nonce != next.nonce {
                    self.adopt(now)?;
                    return Ok(false);
                }
            }
            self.adopt(next)?;
            self.announce(&object, instance, meanwhile)?;
            Ok(true)
        });
        match replaced {
            Ok(true) => Ok(0),
            Ok(false) => Err(libc::EILSEQ),
            Err(error) => {
                tracing::warn!(image = %self.image, "reservations may not have changed: {error}");
                Err(error.errno())
            }
        }
    }

    /// Announces the record to all. A new daemon that is the only member also replaces the state by the one after power on.
    fn announce_joined(
        &self,
        instance: [u8; 16],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), Error> {
        let (object, is_new) = {
            let view = lock(&self.view);
            (view.object.clone(), view.is_new)
        };
        let object = object.ok_or_else(not_a_member)?;
        loop {
            self.announce(&object, instance, meanwhile)?;
            let record = self.record_of(instance)?;
            if !is_new || record.members.len() > 1 {
                return Ok(());
            }
            let Some(state) = self.observer.after_power_on(record.version, &record.state) else {
                return Ok(());
            };
            let mut next = record.next();
            next.state = state;
            let bytes = next.encode();
            let bytes = bytes.ok_or_else(|| failed("write the shared state", libc::E2BIG))?;
            if object.replace(&record.guard(), &bytes)? {
                self.adopt(next)?;
            } else {
                // Another daemon has joined in the meantime.
                self.adopt(reread(&object)?)?;
            }
        }
    }

    /// Returns the record of this instance. Fails after the watch was lost: the record may be outdated.
    fn record_of(&self, instance: [u8; 16]) -> Result<SharedRecord, Error> {
        let view = lock(&self.view);
        let record = view.record.as_ref().filter(|_| view.instance == instance);
        record.cloned().ok_or_else(not_a_member)
    }

    /// Makes all members adopt the record and excludes the others. Calls `meanwhile` while commands begun before are ending.
    fn announce(
        &self,
        object: &Arc<Object>,
        instance: [u8; 16],
        meanwhile: &mut dyn FnMut(),
    ) -> Result<(), Error> {
        let begun = Instant::now();
        loop {
            let SharedRecord {
                version, members, ..
            } = self.record_of(instance)?;
            let asked = Instant::now();
            let answers = object.notify(&message(instance, version, true), NOTIFY_LIMIT)?;
            let answers: Vec<_> = answers.iter().filter_map(|one| read_message(one)).collect();
            let has_answered = |member: &Member| {
                let knows = |answer: &&([u8; 16], u64, bool)| {
                    answer.0 == member.instance && answer.1 >= version
                };
                answers.iter().any(|answer| knows(&answer))
            };
            let others = members.into_iter().filter(|one| one.instance != instance);
            let missing: Vec<Member> = others.filter(|one| !has_answered(one)).collect();
            if !missing.is_empty() {
                self.exclude(object, &missing, asked)?;
                // The other members must adopt the new list too.
                continue;
            }
            let settled = self.observer.is_settled() && answers.iter().all(|answer| answer.2);
            if settled {
                // This daemon itself may have been excluded in the meantime.
                return self.record_of(instance).map(drop);
            }
            if begun.elapsed() > SETTLE_LIMIT {
                return Err(failed(
                    "end the commands that a reservation excludes",
                    libc::ETIMEDOUT,
                ));
            }
            meanwhile();
            std::thread::sleep(SETTLE_LOOK);
        }
    }

    /// Stops all I/O of these daemons to the image and removes them from the list. `asked`: time of the request to them.
    fn exclude(
        &self,
        object: &Arc<Object>,
        missing: &[Member],
        asked: Instant,
    ) -> Result<(), Error> {
        let cluster = object.cluster();
        let own = cluster.address().unwrap_or_default();
        for member in missing {
            let address = &member.address;
            if *address == own && !own.is_empty() {
                continue;
            }
            match cluster.blocklist(address) {
                Ok(()) => {
                    tracing::warn!(image = %self.image, address, "daemon excluded and blocklisted: it did not acknowledge a change of reservations");
                }
                Err(error) => {
                    tracing::error!(image = %self.image, address, "cannot blocklist a daemon, its writes in flight may still arrive: {error}");
                    std::thread::sleep(LEASE.saturating_sub(asked.elapsed()));
                }
            }
        }
        self.update(object, |record| {
            let mut next = record.next();
            let is_missing = |one: &Member| missing.iter().any(|it| it.instance == one.instance);
            next.members.retain(|one| !is_missing(one));
            (next.members != record.members).then_some(next)
        })
    }
}

/// Reason why a watch is not served any more.
enum ServeEnd {
    Stopped(SyncSender<()>),
    Lost(Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_decoded_and_other_bytes_refused() {
        let bytes = message([3; 16], 0x0102, true);
        assert_eq!(bytes[16..], [0, 0, 0, 0, 0, 0, 1, 2, 1]);
        assert_eq!(read_message(&bytes), Some(([3; 16], 0x0102, true)));
        assert_eq!(read_message(&bytes[..23]), None);
        let unsettled = message([3; 16], 7, false);
        assert_eq!(read_message(&unsettled), Some(([3; 16], 7, false)));
        assert_ne!(random(), random());
    }
}

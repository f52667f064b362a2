//! A small object shared by all clients of an image: replaced by compare-and-swap, watched, and the target of notifications.
//!
//! Control plane only: every call may block. Calls have a timeout, except those documented to wait for an unreachable cluster. An
//! object has its own I/O context, so no call waits behind I/O on the image. Tests: `tests/tests/rbd_reservations.rs`.

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use crate::cluster::{CALL_LIMIT, c_text};
use crate::deadline::within;
use crate::error::check;
use crate::raw::Library;
use crate::{Cluster, Error, Image, Pool};

/// `LIBRADOS_CREATE_EXCLUSIVE`.
const EXCLUSIVE: c_int = 1;

/// First result of a failed comparison: `-MAX_ERRNO` minus the offset of the first different byte.
const MISMATCH: c_int = -4095;

/// Maximum time to wait for the end of a watch; after that it ends in the background.
const UNWATCH_LIMIT: Duration = Duration::from_secs(3);

/// An object, which may not exist.
pub struct Object {
    pool: Pool,
    name: CString,
}

impl Object {
    /// Returns the object with this name in the pool and namespace of an image.
    ///
    /// # Errors
    /// Ceph's error, or a timeout.
    pub fn beside(image: &Arc<Image>, name: &str) -> Result<Arc<Object>, Error> {
        let of = image.name();
        Ok(Arc::new(Object {
            pool: Pool::of(image.cluster(), &of.pool, of.namespace.as_deref())?,
            name: c_text("object", name)?,
        }))
    }

    /// Connection to its cluster.
    pub fn cluster(&self) -> &Arc<Cluster> {
        self.pool.cluster()
    }

    fn library(&self) -> &'static Library {
        self.pool.cluster().library()
    }

    fn operation(&self, verb: &str) -> String {
        let name = self.name.to_string_lossy();
        format!("{verb} object {name} of {}", self.pool.name())
    }

    /// Reads up to `limit` bytes. `None` if the object does not exist.
    ///
    /// # Errors
    /// Ceph's error, or a timeout.
    pub fn read(self: &Arc<Object>, limit: usize) -> Result<Option<Vec<u8>>, Error> {
        let object = Arc::clone(self);
        within(CALL_LIMIT, &self.operation("read"), move || {
            let mut bytes = vec![0_u8; limit];
            let (name, buffer) = (object.name.as_ptr(), bytes.as_mut_ptr().cast());
            // SAFETY: a context, a text that ends with NUL, and a buffer with its length; all outlive the call.
            let read = unsafe {
                (object.library().rados_read)(object.pool.handle(), name, buffer, limit, 0)
            };
            if read == -libc::ENOENT {
                return Ok(None);
            }
            let read = check(read, |errno| {
                Error::failed(object.operation("read"), errno, "")
            })?;
            bytes.truncate(usize::try_from(read).unwrap_or(0));
            Ok(Some(bytes))
        })
    }

    /// Creates the object. Returns false if it exists.
    ///
    /// # Errors
    /// Ceph's error, or a timeout.
    pub fn create(self: &Arc<Object>, bytes: Vec<u8>) -> Result<bool, Error> {
        let object = Arc::clone(self);
        within(CALL_LIMIT, &self.operation("create"), move || {
            let created = object.write(&bytes, |library, op| {
                // SAFETY: `write` created `op`. A null category is allowed.
                unsafe { (library.rados_write_op_create)(op, EXCLUSIVE, ptr::null()) };
            });
            match created {
                errno if errno == -libc::EEXIST => Ok(false),
                other => check(other, |errno| {
                    Error::failed(object.operation("create"), errno, "")
                })
                .map(|_| true),
            }
        })
    }

    /// Replaces the contents atomically if they begin with `expected`; otherwise returns false. Waits for an unreachable cluster,
    /// because a timeout would leave the outcome unknown.
    ///
    /// # Errors
    /// Ceph's error.
    pub fn replace(&self, expected: &[u8], bytes: &[u8]) -> Result<bool, Error> {
        let mut compared = 0;
        let replaced = self.write(bytes, |library, op| {
            let (at, length) = (expected.as_ptr().cast(), expected.len());
            // SAFETY: an operation that was created by `write`; bytes and result outlive it.
            unsafe { (library.rados_write_op_cmpext)(op, at, length, 0, &mut compared) };
        });
        match replaced {
            errno if errno <= MISMATCH || errno == -libc::ECANCELED || errno == -libc::ENOENT => {
                Ok(false)
            }
            other => check(other, |errno| {
                Error::failed(self.operation("replace"), errno, "")
            })
            .map(|_| true),
        }
    }

    fn write(
        &self,
        bytes: &[u8],
        guard: impl FnOnce(&'static Library, crate::raw::WriteOp),
    ) -> c_int {
        let library = self.library();
        // SAFETY: the function has no arguments.
        let op = unsafe { (library.rados_create_write_op)() };
        guard(library, op);
        // SAFETY: the operation was created above, is executed once, and is released once; bytes and name outlive the call.
        unsafe {
            (library.rados_write_op_write_full)(op, bytes.as_ptr().cast(), bytes.len());
            let done = (library.rados_write_op_operate)(
                op,
                self.pool.handle(),
                self.name.as_ptr(),
                ptr::null_mut(),
                0,
            );
            (library.rados_release_write_op)(op);
            done
        }
    }

    /// Sends bytes to all watchers of the object and waits for their acknowledgements: for at most `limit`, and for an unreachable
    /// cluster. Returns the bytes in the acknowledgements received.
    ///
    /// # Errors
    /// Ceph's error.
    pub fn notify(&self, bytes: &[u8], limit: Duration) -> Result<Vec<Vec<u8>>, Error> {
        let library = self.library();
        let (mut reply, mut length) = (ptr::null_mut::<c_char>(), 0);
        // SAFETY: a context, a text that ends with NUL, bytes with their length, and valid pointers for the results; all outlive the
        // call.
        let notified = unsafe {
            (library.rados_notify2)(
                self.pool.handle(),
                self.name.as_ptr(),
                bytes.as_ptr().cast(),
                c_length(bytes),
                u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
                &mut reply,
                &mut length,
            )
        };
        let mut answer = Vec::new();
        if !reply.is_null() {
            // SAFETY: librados allocated a buffer of this length, which is released here, once.
            unsafe {
                answer.extend_from_slice(std::slice::from_raw_parts(reply.cast::<u8>(), length));
                (library.rados_buffer_free)(reply);
            }
        }
        // On a timeout the reply lists the watchers that have acknowledged.
        if notified != -libc::ETIMEDOUT {
            check(notified, |errno| {
                Error::failed(self.operation("notify watchers of"), errno, "")
            })?;
        }
        acknowledgements(&answer).ok_or_else(|| {
            let operation = self.operation("parse the watchers' acknowledgements of");
            Error::failed(operation, libc::EBADMSG, "")
        })
    }

    /// Watches the object, which must exist. Calls `notified` with every notification and `lost` when some may have been missed. Both
    /// run on a thread of librados: they must not block and must not call this module, except [`Object::acknowledge`]. The cluster
    /// removes a watcher after `timeout` without contact.
    ///
    /// # Errors
    /// Ceph's error, or a timeout.
    pub fn watch(
        self: &Arc<Object>,
        timeout: Duration,
        notified: impl Fn(Notification) + Send + Sync + 'static,
        lost: impl Fn(i32) + Send + Sync + 'static,
    ) -> Result<Watch, Error> {
        let object = Arc::clone(self);
        let calls = Box::new(Calls {
            notified: Box::new(notified),
            lost: Box::new(lost),
        });
        within(CALL_LIMIT, &self.operation("watch"), move || {
            let seconds = u32::try_from(timeout.as_secs()).unwrap_or(u32::MAX);
            let calls = Box::into_raw(calls);
            let mut cookie = 0;
            // SAFETY: a context, a text that ends with NUL and a valid pointer for the result, which outlive the call. The argument of
            // the callbacks lives until the watch has ended and librados does not call them any more.
            let watching = unsafe {
                (object.library().rados_watch3)(
                    object.pool.handle(),
                    object.name.as_ptr(),
                    &mut cookie,
                    notification,
                    watch_error,
                    seconds,
                    calls.cast(),
                )
            };
            // On an error the calls are leaked: librados may still refer to them.
            check(watching, |errno| {
                Error::failed(object.operation("watch"), errno, "")
            })?;
            Ok(Watch {
                object,
                cookie,
                calls,
            })
        })
    }

    /// Acknowledges a notification with an answer. Does not block.
    pub fn acknowledge(&self, notification: &Notification, answer: &[u8]) {
        // SAFETY: a context, a text that ends with NUL, and bytes with their length, which outlive the call.
        unsafe {
            (self.library().rados_notify_ack)(
                self.pool.handle(),
                self.name.as_ptr(),
                notification.id,
                notification.cookie,
                answer.as_ptr().cast(),
                c_length(answer),
            );
        }
    }
}

fn c_length(bytes: &[u8]) -> c_int {
    c_int::try_from(bytes.len()).expect("the notification is too short")
}

/// A notification to acknowledge.
#[derive(Clone, Debug)]
pub struct Notification {
    id: u64,
    cookie: u64,
    /// Contents.
    pub bytes: Vec<u8>,
}

struct Calls {
    notified: Box<dyn Fn(Notification) + Send + Sync>,
    lost: Box<dyn Fn(i32) + Send + Sync>,
}

unsafe extern "C" fn notification(
    argument: *mut c_void,
    id: u64,
    cookie: u64,
    _notifier: u64,
    data: *mut c_void,
    length: usize,
) {
    // SAFETY: the argument of `rados_watch3`, freed only after librados has stopped calling back.
    let calls = unsafe { &*argument.cast::<Calls>() };
    let bytes = if data.is_null() {
        Vec::new()
    } else {
        // SAFETY: librados passes a buffer of this length, valid during the call.
        unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length) }.to_vec()
    };
    (calls.notified)(Notification { id, cookie, bytes });
}

unsafe extern "C" fn watch_error(argument: *mut c_void, _cookie: u64, error: c_int) {
    // SAFETY: as in `notification`.
    let calls = unsafe { &*argument.cast::<Calls>() };
    (calls.lost)(-error);
}

/// A watch on an object. Dropping it ends the watch.
pub struct Watch {
    object: Arc<Object>,
    cookie: u64,
    calls: *mut Calls,
}

// SAFETY: the calls are only called through shared references, and freed once, by `drop`; they are `Send` and `Sync` themselves.
unsafe impl Send for Watch {}
// SAFETY: as above.
unsafe impl Sync for Watch {}

impl Watch {
    /// Watched object.
    pub fn object(&self) -> &Arc<Object> {
        &self.object
    }

    /// Time since the cluster last confirmed that no notification was missed. Does not contact the cluster.
    ///
    /// # Errors
    /// Cause of the loss of the watch, as an errno.
    pub fn age(&self) -> Result<Duration, i32> {
        // SAFETY: a context, and an active watch of it.
        let age = unsafe {
            (self.object.library().rados_watch_check)(self.object.pool.handle(), self.cookie)
        };
        match u64::try_from(age) {
            Ok(milliseconds) => Ok(Duration::from_millis(milliseconds)),
            Err(_) => Err(-age),
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        struct Freed(*mut Calls);
        // SAFETY: as for `Watch`.
        unsafe impl Send for Freed {}
        let (object, cookie, calls) = (Arc::clone(&self.object), self.cookie, Freed(self.calls));
        let ended = within(
            UNWATCH_LIMIT,
            &self.object.operation("unwatch"),
            move || {
                let calls = calls;
                let library = object.library();
                // SAFETY: the watch ends here, once. An error means that it was lost before; then too no call follows the flush.
                let flushed = unsafe {
                    (library.rados_unwatch2)(object.pool.handle(), cookie);
                    (library.rados_watch_flush)(object.cluster().handle())
                };
                if flushed >= 0 {
                    // SAFETY: created by `watch`; librados does not call back any more.
                    drop(unsafe { Box::from_raw(calls.0) });
                }
                Ok(())
            },
        );
        if let Err(error) = ended {
            // The argument of the callbacks is leaked.
            tracing::warn!("{error}");
        }
    }
}

/// Parses the reply of `rados_notify2`: watchers that have acknowledged, with their answers, then those that timed out.
fn acknowledgements(mut bytes: &[u8]) -> Option<Vec<Vec<u8>>> {
    fn number<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
        let (number, rest) = bytes.split_first_chunk::<N>()?;
        *bytes = rest;
        Some(*number)
    }
    if bytes.is_empty() {
        return Some(Vec::new());
    }
    let count = u32::from_le_bytes(number(&mut bytes)?);
    let mut answers = Vec::new();
    for _ in 0..count {
        // Numbers of the client and of the watch.
        number::<16>(&mut bytes)?;
        let length = u32::from_le_bytes(number(&mut bytes)?);
        let (answer, rest) = bytes.split_at_checked(usize::try_from(length).ok()?)?;
        answers.push(answer.to_vec());
        bytes = rest;
    }
    Some(answers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acknowledgements_are_taken_apart_and_never_read_beyond_their_end() {
        let mut bytes = 2_u32.to_le_bytes().to_vec();
        for answer in [&b"one"[..], b""] {
            bytes.extend([7; 16]);
            bytes.extend((answer.len() as u32).to_le_bytes());
            bytes.extend(answer);
        }
        let whole = bytes.len();
        // number of timeouts
        bytes.extend(0_u32.to_le_bytes());
        let expected = vec![b"one".to_vec(), Vec::new()];
        assert_eq!(acknowledgements(&bytes), Some(expected));
        assert_eq!(acknowledgements(&[]), Some(Vec::new()));
        for length in 1..whole {
            assert_eq!(acknowledgements(&bytes[..length]), None, "{length}");
        }
        assert_eq!(acknowledgements(&[0xff; 64]), None);
    }
}

//! One worker's I/O on an image: submitted here, completed by librbd's threads into the channel's queue.
//!
//! The callback runs on a thread of librbd. It stores the result, pushes the I/O's link onto the channel's lock-free list, and
//! writes the eventfd if the list was empty: one system call for all I/Os that complete while the worker is busy. The worker
//! takes the whole list with one exchange. A link is allocated only when more I/Os are in flight than ever before; nothing else
//! is allocated here. Buffers stay in the worker's slots; the callback does not access them.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicPtr, AtomicU64, Ordering};

use guest_memory::IoBuffer;
use rustix::event::{EventfdFlags, eventfd};

use crate::Image;
use crate::raw::{self, THICK};

/// Maximum segments per read or write (Linux: `IOV_MAX`).
pub const SEGMENTS_MAX: usize = 1024;

/// A completed I/O.
#[derive(Debug)]
pub struct Finished {
    /// Token given at submission.
    pub token: u64,
    /// Buffer given at submission.
    pub buffer: IoBuffer,
    /// Bytes read, or 0; or an errno.
    pub result: Result<u64, i32>,
}

/// State shared by the callback and the worker.
struct Queue {
    /// Head of the list of completed I/Os that were not reaped, newest first.
    newest: AtomicPtr<Link>,
    wake: OwnedFd,
}

/// An I/O, as the callback sees it.
struct Link {
    older: AtomicPtr<Link>,
    result: AtomicI64,
    /// Offset at which a compare-and-write found a mismatch, written by librbd.
    mismatch: AtomicU64,
    slot: u32,
    library: &'static raw::Library,
    queue: Arc<Queue>,
}

impl Queue {
    /// Adds a link. Returns true if the list was empty.
    fn push(&self, link: *mut Link) -> bool {
        let mut newest = self.newest.load(Ordering::Relaxed);
        loop {
            // SAFETY: links live as long as their I/O is in flight, and this one is not on the list yet.
            unsafe { (*link).older.store(newest, Ordering::Relaxed) };
            // Release: makes the result and the link visible to the thread that takes the list.
            let pushed = self.newest.compare_exchange_weak(
                newest,
                link,
                Ordering::Release,
                Ordering::Relaxed,
            );
            match pushed {
                Ok(_) => return newest.is_null(),
                Err(found) => newest = found,
            }
        }
    }

    /// Takes all links, the oldest first.
    fn take(&self) -> *mut Link {
        let mut newest = self.newest.swap(ptr::null_mut(), Ordering::Acquire);
        let mut oldest = ptr::null_mut();
        while !newest.is_null() {
            // SAFETY: an I/O on the list is still in flight for the channel, so its link lives; it is on no list now.
            let older = unsafe { &(*newest).older };
            let next = older.load(Ordering::Relaxed);
            older.store(oldest, Ordering::Relaxed);
            oldest = newest;
            newest = next;
        }
        oldest
    }
}

/// Called by librbd on its own thread or during submission, once for every accepted I/O.
unsafe extern "C" fn completed(completion: raw::Completion, argument: *mut c_void) {
    let link = argument.cast::<Link>();
    // SAFETY: the link of an I/O in flight; it is shared only through atomics until the push below.
    let (library, queue) = unsafe { ((*link).library, Arc::clone(&(*link).queue)) };
    // SAFETY: librbd passes its own completion, which is complete, and which is released here, once.
    let result = unsafe {
        let result = (library.rbd_aio_get_return_value)(completion);
        (library.rbd_aio_release)(completion);
        result
    };
    // SAFETY: as above.
    unsafe { (*link).result.store(result as i64, Ordering::Relaxed) };
    // After the push the link may be reused for another I/O: the code below accesses only `queue`, of which this call holds a
    // reference.
    if queue.push(link) {
        // Fails only if the counter is full; then the worker is already notified.
        rustix::io::write(&queue.wake, &1_u64.to_ne_bytes()).ok();
    }
}

/// Wakes the owner of a channel in the same way as a completion.
pub struct Waker(Arc<Queue>);

impl Waker {
    /// Writes the channel's eventfd.
    pub fn wake(&self) {
        // Fails only if the counter is full; then the worker is already notified.
        rustix::io::write(&self.0.wake, &1_u64.to_ne_bytes()).ok();
    }
}

struct Slot {
    link: Arc<Link>,
    in_flight: bool,
    token: u64,
    buffer: IoBuffer,
}

/// One worker's I/O on an image. If dropped with I/O in flight, it leaks the memory of these I/Os.
pub struct Channel {
    image: Arc<Image>,
    queue: Arc<Queue>,
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl Channel {
    /// Creates a channel without I/O.
    ///
    /// # Errors
    /// When no eventfd is available.
    pub fn new(image: &Arc<Image>) -> io::Result<Channel> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let queue = Queue {
            newest: AtomicPtr::default(),
            wake,
        };
        Ok(Channel {
            image: Arc::clone(image),
            queue: Arc::new(queue),
            slots: Vec::new(),
            free: Vec::new(),
        })
    }

    /// Returns an eventfd that is written on a completion while the list is empty. It need not be read: watch it edge-triggered.
    ///
    /// # Errors
    /// When no descriptor is available.
    pub fn wake_fd(&self) -> io::Result<OwnedFd> {
        self.queue.wake.as_fd().try_clone_to_owned()
    }

    /// Returns a handle that wakes the channel's owner from another thread.
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.queue))
    }

    /// Image of the channel.
    pub fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// Sends later I/O to this image.
    ///
    /// # Panics
    /// When I/O is in flight on the previous image.
    pub fn set_image(&mut self, image: &Arc<Image>) {
        assert_eq!(
            self.in_flight(),
            0,
            "I/O is in flight on the previous image"
        );
        self.image = Arc::clone(image);
    }

    /// Number of I/Os submitted and not reaped.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Allocates a slot with an empty buffer.
    fn occupy(&mut self, token: u64) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            let index = u32::try_from(self.slots.len()).expect("fewer I/Os than memory");
            let link = Link {
                older: AtomicPtr::default(),
                result: AtomicI64::new(0),
                mismatch: AtomicU64::new(0),
                slot: index,
                library: self.image.library(),
                queue: Arc::clone(&self.queue),
            };
            self.slots.push(Slot {
                link: Arc::new(link),
                in_flight: false,
                token,
                buffer: IoBuffer::default(),
            });
            self.free.reserve(self.slots.len());
            index
        });
        let slot = &mut self.slots[index as usize];
        (slot.token, slot.in_flight) = (token, true);
        index
    }

    fn vacate(&mut self, index: u32) -> IoBuffer {
        let slot = &mut self.slots[index as usize];
        slot.in_flight = false;
        self.free.push(index);
        std::mem::take(&mut slot.buffer)
    }

    /// Submits by `start`, which receives the slot and the completion. On failure returns an errno and restores the buffer.
    #[inline]
    fn submit(
        &mut self,
        token: u64,
        buffer: &mut IoBuffer,
        start: impl FnOnce(&Image, &mut Slot, raw::Completion) -> i64,
    ) -> Result<(), i32> {
        let index = self.occupy(token);
        let slot = &mut self.slots[index as usize];
        slot.buffer = std::mem::take(buffer);
        let argument = Arc::as_ptr(&slot.link).cast_mut().cast::<c_void>();
        let library = self.image.library();
        let mut completion = ptr::null_mut();
        // SAFETY: the link lives until the I/O was reaped, or is leaked; `completion` is valid for the result.
        let made =
            unsafe { (library.rbd_aio_create_completion)(argument, completed, &mut completion) };
        let mut started = i64::from(made);
        if made >= 0 {
            started = start(&self.image, slot, completion);
            if started < 0 {
                // SAFETY: librbd has not accepted the I/O and will not call back; the completion was made above.
                unsafe { (library.rbd_aio_release)(completion) };
            }
        }
        if started < 0 {
            *buffer = self.vacate(index);
            return Err(i32::try_from(-started).unwrap_or(libc::EIO));
        }
        Ok(())
    }

    /// Reads from byte `offset` into the window of the buffer, at most [`SEGMENTS_MAX`] segments.
    ///
    /// # Errors
    /// An errno; the caller then keeps the buffer. This holds for all operations.
    pub fn read(&mut self, offset: u64, buffer: &mut IoBuffer, token: u64) -> Result<(), i32> {
        self.submit(token, buffer, |image, slot, completion| {
            let (segments, count) = vector(&slot.buffer);
            // SAFETY: an open image. The segments and their memory are owned by the slot until the callback has run.
            let started = unsafe {
                (image.library().rbd_aio_readv)(image.handle(), segments, count, offset, completion)
            };
            started.into()
        })
    }

    /// Writes the window of the buffer, at most [`SEGMENTS_MAX`] segments, to byte `offset`.
    ///
    /// # Errors
    /// As [`Channel::read`].
    pub fn write(&mut self, offset: u64, buffer: &mut IoBuffer, token: u64) -> Result<(), i32> {
        self.submit(token, buffer, |image, slot, completion| {
            let (segments, count) = vector(&slot.buffer);
            // SAFETY: as in `read`.
            let started = unsafe {
                (image.library().rbd_aio_writev)(
                    image.handle(),
                    segments,
                    count,
                    offset,
                    completion,
                )
            };
            started.into()
        })
    }

    /// Makes all previously completed writes durable. The buffer is not accessed, as for the next two operations.
    ///
    /// # Errors
    /// As [`Channel::read`].
    pub fn flush(&mut self, buffer: &mut IoBuffer, token: u64) -> Result<(), i32> {
        self.submit(token, buffer, |image, _, completion| {
            // SAFETY: an open image.
            unsafe { (image.library().rbd_aio_flush)(image.handle(), completion) }.into()
        })
    }

    /// Frees the space of a range.
    ///
    /// # Errors
    /// As [`Channel::read`].
    pub fn discard(
        &mut self,
        offset: u64,
        length: u64,
        buffer: &mut IoBuffer,
        token: u64,
    ) -> Result<(), i32> {
        self.submit(token, buffer, |image, _, completion| {
            let library = image.library();
            // SAFETY: an open image.
            unsafe { (library.rbd_aio_discard)(image.handle(), offset, length, completion) }.into()
        })
    }

    /// Zeroes a range. With `allocate`, its space stays or becomes allocated.
    ///
    /// # Errors
    /// As [`Channel::read`]; `EOPNOTSUPP` when librbd is too old.
    pub fn write_zeroes(
        &mut self,
        offset: u64,
        length: u64,
        allocate: bool,
        buffer: &mut IoBuffer,
        token: u64,
    ) -> Result<(), i32> {
        let Some(write_zeroes) = self.image.library().rbd_aio_write_zeroes else {
            return Err(libc::EOPNOTSUPP);
        };
        let length = usize::try_from(length).map_err(|_| libc::EINVAL)?;
        let flags = if allocate { THICK } else { 0 };
        self.submit(token, buffer, |image, _, completion| {
            // SAFETY: an open image.
            unsafe { write_zeroes(image.handle(), offset, length, completion, flags, 0) }.into()
        })
    }

    /// Writes the second half of the window to byte `offset` if the image has the first half there, as one atomic operation of
    /// the cluster. The range must lie within one object. A mismatch completes with `EILSEQ`. The window is one segment.
    ///
    /// # Errors
    /// As [`Channel::read`]; `EINVAL` when the window is not one segment of an even length.
    pub fn compare_and_write(
        &mut self,
        offset: u64,
        buffer: &mut IoBuffer,
        token: u64,
    ) -> Result<(), i32> {
        let [one] = buffer.segments() else {
            return Err(libc::EINVAL);
        };
        let (base, half) = (one.base(), one.len() / 2);
        if half == 0 || one.len() % 2 != 0 {
            return Err(libc::EINVAL);
        }
        self.submit(token, buffer, |image, slot, completion| {
            let (compared, written) = (
                base.cast_const().cast(),
                base.wrapping_add(half).cast_const().cast(),
            );
            let library = image.library();
            // SAFETY: an open image. Both halves lie inside of the segment, which the slot owns until the callback has run. The
            // mismatch is written to the link, which lives as long and is shared by atomics only.
            let started = unsafe {
                (library.rbd_aio_compare_and_write)(
                    image.handle(),
                    offset,
                    half,
                    compared,
                    written,
                    completion,
                    slot.link.mismatch.as_ptr(),
                    0,
                )
            };
            started as i64
        })
    }

    /// Passes all completed I/Os to `each`, in order of completion.
    pub fn reap(&mut self, mut each: impl FnMut(Finished)) {
        let mut link = self.queue.take();
        while !link.is_null() {
            // SAFETY: the link of a completed I/O that still has its slot, which holds the link.
            let (index, result, next) = unsafe {
                let link = &*link;
                (
                    link.slot,
                    link.result.load(Ordering::Relaxed),
                    link.older.load(Ordering::Relaxed),
                )
            };
            let token = self.slots[index as usize].token;
            let buffer = self.vacate(index);
            each(Finished {
                token,
                buffer,
                result: u64::try_from(result)
                    .map_err(|_| i32::try_from(-result).unwrap_or(libc::EIO)),
            });
            link = next;
        }
    }
}

fn vector(buffer: &IoBuffer) -> (*const libc::iovec, c_int) {
    let segments = buffer.segments();
    // librbd refuses a count beyond `IOV_MAX`.
    let count = c_int::try_from(segments.len()).unwrap_or(c_int::MAX);
    (segments.as_ptr().cast(), count)
}

impl Drop for Channel {
    fn drop(&mut self) {
        // Completed I/Os need not be leaked.
        self.reap(drop);
        if self.in_flight() == 0 {
            return;
        }
        tracing::warn!(
            image = %self.image.name(),
            in_flight = self.in_flight(),
            "channel of the image closed with I/Os in flight, their memory is leaked"
        );
        // librbd still uses the image, the buffers and the links of these I/Os, so they are leaked.
        std::mem::forget(Arc::clone(&self.image));
        let in_flight = std::mem::take(&mut self.slots);
        for slot in in_flight.into_iter().filter(|slot| slot.in_flight) {
            std::mem::forget(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue and its links, without an image.
    struct Links {
        queue: Arc<Queue>,
        links: Vec<AtomicPtr<Link>>,
    }

    #[test]
    fn completion_is_reaped_once_and_wakes_once() {
        let queue = Arc::new(Queue {
            newest: AtomicPtr::default(),
            wake: eventfd(0, EventfdFlags::NONBLOCK).unwrap(),
        });
        // Only the addresses and the field `older` are used.
        let mut nodes: Vec<Box<std::mem::MaybeUninit<Link>>> = Vec::new();
        for _ in 0..4000 {
            let mut node = Box::new(std::mem::MaybeUninit::<Link>::uninit());
            // SAFETY: a field of allocated memory.
            unsafe { (&raw mut (*node.as_mut_ptr()).older).write(AtomicPtr::default()) };
            nodes.push(node);
        }
        let links = Links {
            queue: Arc::clone(&queue),
            links: nodes
                .iter_mut()
                .map(|node| AtomicPtr::new(node.as_mut_ptr()))
                .collect(),
        };
        let first = |queue: &Queue| {
            let mut count = 0;
            let mut link = queue.take();
            while !link.is_null() {
                count += 1;
                // SAFETY: one of the nodes above.
                link = unsafe { (*link).older.load(Ordering::Relaxed) };
            }
            count
        };
        let (mut reaped, mut woken) = (0, 0);
        std::thread::scope(|scope| {
            let halves = links.links.split_at(2000);
            let pushers: Vec<_> = [halves.0, halves.1]
                .map(|part| {
                    let queue = &links.queue;
                    scope.spawn(move || {
                        let pushed = part
                            .iter()
                            .map(|link| queue.push(link.load(Ordering::Relaxed)));
                        pushed.filter(|was_empty| *was_empty).count()
                    })
                })
                .into_iter()
                .collect();
            let mut looks = 0;
            while reaped < 4000 {
                let found = first(&queue);
                reaped += found;
                looks += usize::from(found > 0);
            }
            for pusher in pushers {
                woken += pusher.join().unwrap();
            }
            assert_eq!(woken, looks, "one wake for each list that was found");
        });
        assert_eq!(reaped, 4000);
        assert!(queue.take().is_null());
    }
}

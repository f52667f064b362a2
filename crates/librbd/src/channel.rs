//! One worker's I/O on an image: submitted here, completed by librbd's threads into a queue of its own.
//!
//! The callback runs on a thread of librbd. It notes the result, pushes the I/O's link onto the channel's list, which takes
//! no lock, and writes the eventfd if the list was empty: one system call for all I/Os that end while the worker is busy.
//! The worker reaps the whole list with one exchange. Links are made when more I/Os are in flight than ever before and are
//! used again; nothing else is allocated here. Buffers stay in the worker's slots: the callback never sees them.

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

/// The most segments of one read or write (Linux: `IOV_MAX`).
pub const SEGMENTS_MAX: usize = 1024;

/// An I/O that is over.
#[derive(Debug)]
pub struct Finished {
    /// What its submitter called it.
    pub token: u64,
    /// The buffer that it was given.
    pub buffer: IoBuffer,
    /// Bytes read, or 0; or an errno.
    pub result: Result<u64, i32>,
}

/// What the callback shares with the worker.
struct Queue {
    /// The newest I/O that is over and was not reaped, and through it the others.
    newest: AtomicPtr<Link>,
    wake: OwnedFd,
}

/// What the callback knows of an I/O.
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
    /// Adds a link; true when there was none.
    fn push(&self, link: *mut Link) -> bool {
        let mut newest = self.newest.load(Ordering::Relaxed);
        loop {
            // SAFETY: links live for as long as their I/O is in flight, and this one is not on the list yet.
            unsafe { (*link).older.store(newest, Ordering::Relaxed) };
            // Release: whoever takes the list sees the result and the link.
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
            // SAFETY: what was on the list is in flight as far as the channel knows, and so its link lives; it is on no list now.
            let older = unsafe { &(*newest).older };
            let next = older.load(Ordering::Relaxed);
            older.store(oldest, Ordering::Relaxed);
            oldest = newest;
            newest = next;
        }
        oldest
    }
}

/// Called by librbd, on a thread of its own or inside of the submission, once for every I/O that was accepted.
unsafe extern "C" fn completed(completion: raw::Completion, argument: *mut c_void) {
    let link = argument.cast::<Link>();
    // SAFETY: the link of an I/O in flight; it is shared only through atomics until the push below.
    let (library, queue) = unsafe { ((*link).library, Arc::clone(&(*link).queue)) };
    // SAFETY: librbd gives its own completion, which is complete, and which is released here, once.
    let result = unsafe {
        let result = (library.rbd_aio_get_return_value)(completion);
        (library.rbd_aio_release)(completion);
        result
    };
    // SAFETY: as above.
    unsafe { (*link).result.store(result as i64, Ordering::Relaxed) };
    // From the push on the link may be used for another I/O: only `queue` is touched, which this call holds.
    if queue.push(link) {
        // It fails only when the counter is full, and then the worker has been woken.
        rustix::io::write(&queue.wake, &1_u64.to_ne_bytes()).ok();
    }
}

/// Wakes the owner of a channel as the end of an I/O does.
pub struct Waker(Arc<Queue>);

impl Waker {
    /// Writes the channel's eventfd.
    pub fn wake(&self) {
        // It fails only when the counter is full, and then the worker has been woken.
        rustix::io::write(&self.0.wake, &1_u64.to_ne_bytes()).ok();
    }
}

struct Slot {
    link: Arc<Link>,
    in_flight: bool,
    token: u64,
    buffer: IoBuffer,
}

/// One worker's I/O on an image. Dropped with I/O in flight, it leaks what that needs.
pub struct Channel {
    image: Arc<Image>,
    queue: Arc<Queue>,
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl Channel {
    /// A channel without I/O.
    ///
    /// # Errors
    /// When there is no eventfd left.
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

    /// An eventfd that is written when something ends while nothing waits to be reaped. It need not be read: watch it for
    /// its edges.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub fn wake_fd(&self) -> io::Result<OwnedFd> {
        self.queue.wake.as_fd().try_clone_to_owned()
    }

    /// Wakes the channel's owner from another thread.
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.queue))
    }

    /// The image.
    pub fn image(&self) -> &Arc<Image> {
        &self.image
    }

    /// From now on I/O goes to this image.
    ///
    /// # Panics
    /// When I/O is in flight on the one before.
    pub fn set_image(&mut self, image: &Arc<Image>) {
        assert_eq!(self.in_flight(), 0, "the image is in use");
        self.image = Arc::clone(image);
    }

    /// I/Os that were submitted and not reaped.
    pub fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Takes a slot; its buffer is empty.
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

    /// Submits by `start`, which gets the slot and the completion. What was not accepted has its buffer back and an errno.
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
        // SAFETY: the link lives until the I/O was reaped, or for ever; a place for the answer.
        let made =
            unsafe { (library.rbd_aio_create_completion)(argument, completed, &mut completion) };
        let mut started = i64::from(made);
        if made >= 0 {
            started = start(&self.image, slot, completion);
            if started < 0 {
                // SAFETY: librbd has not accepted the I/O, and so calls nobody back; the completion was made above.
                unsafe { (library.rbd_aio_release)(completion) };
            }
        }
        if started < 0 {
            *buffer = self.vacate(index);
            return Err(i32::try_from(-started).unwrap_or(libc::EIO));
        }
        Ok(())
    }

    /// Fills the window of the buffer from byte `offset`: at most [`SEGMENTS_MAX`] segments.
    ///
    /// # Errors
    /// An errno; the buffer is where it was then. So it is with the other operations.
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

    /// Writes the window of the buffer to byte `offset`: at most [`SEGMENTS_MAX`] segments.
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

    /// What was answered before is on stable storage when this ends. The buffer is only kept, as with the next two.
    ///
    /// # Errors
    /// As [`Channel::read`].
    pub fn flush(&mut self, buffer: &mut IoBuffer, token: u64) -> Result<(), i32> {
        self.submit(token, buffer, |image, _, completion| {
            // SAFETY: an open image.
            unsafe { (image.library().rbd_aio_flush)(image.handle(), completion) }.into()
        })
    }

    /// Gives the space of a range back.
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

    /// Zeroes a range; with `allocate` it keeps, or gets, its space.
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

    /// Writes the second half of the window to byte `offset` if the first half is what stands there, as one atomic operation
    /// of the cluster; both lie within one object. A mismatch ends with `EILSEQ`. The window is one segment.
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

    /// Appends all I/Os that are over, in the order in which they ended.
    pub fn reap(&mut self, mut each: impl FnMut(Finished)) {
        let mut link = self.queue.take();
        while !link.is_null() {
            // SAFETY: the link of an I/O that is over and still has its slot, which holds the link.
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
    // A count beyond `IOV_MAX` is refused by librbd.
    let count = c_int::try_from(segments.len()).unwrap_or(c_int::MAX);
    (segments.as_ptr().cast(), count)
}

impl Drop for Channel {
    fn drop(&mut self) {
        // What has ended since the last look needs nothing to be kept.
        self.reap(drop);
        if self.in_flight() == 0 {
            return;
        }
        tracing::warn!(
            "rbd image {}: dropped with {} I/Os in flight",
            self.image.name(),
            self.in_flight()
        );
        // librbd still has the image, the buffers and the links of these: better lost than reused.
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

    /// Links without an image: of a queue nothing else is needed.
    struct Links {
        queue: Arc<Queue>,
        links: Vec<AtomicPtr<Link>>,
    }

    #[test]
    fn what_ends_is_reaped_once_and_wakes_once() {
        let queue = Arc::new(Queue {
            newest: AtomicPtr::default(),
            wake: eventfd(0, EventfdFlags::NONBLOCK).unwrap(),
        });
        // Only the addresses and the list's own word are used.
        let mut nodes: Vec<Box<std::mem::MaybeUninit<Link>>> = Vec::new();
        for _ in 0..4000 {
            let mut node = Box::new(std::mem::MaybeUninit::<Link>::uninit());
            // SAFETY: the place of a field of memory that is there.
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

//! Blocking calls of devices: block status (lseek on a network file system, librbd) and file locks. A thread of the device makes the calls.
//! An event on the worker's ring signals answers of block status.
//!
//! [`BlockingCalls`] is per device: at most one thread, which ends without calls, so that frequent callers delay themselves.
//! [`StatusCalls`] is per channel. An aborted I/O ends at once; its call's later result is dropped.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use block::{IoError, IoErrorKind, IoOutcome, STATUS_BYTES};
use guest_memory::IoBuffer;
use uring::{Event, Owner, Ring, WatchId};

use crate::{Finished, Submission, Tag};

type Call = Box<dyn FnOnce() + Send>;

/// Blocking calls of one device, made one after the other.
#[derive(Clone, Default)]
pub(crate) struct BlockingCalls(Arc<Mutex<Calls>>);

#[derive(Default)]
struct Calls {
    waiting: VecDeque<Call>,
    /// A thread makes the calls.
    running: bool,
}

impl std::fmt::Debug for BlockingCalls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("BlockingCalls")
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BlockingCalls {
    pub fn make(&self, call: Call) -> io::Result<()> {
        #[cfg(feature = "simulated")]
        if uring::simulated::Files::are_simulated() {
            call();
            return Ok(());
        }
        let mut calls = lock(&self.0);
        calls.waiting.push_back(call);
        if !calls.running {
            let shared = Arc::clone(&self.0);
            let thread = std::thread::Builder::new().name("device-calls".to_owned());
            let spawned = thread.spawn(move || {
                while let Some(call) = next(&shared) {
                    call();
                }
            });
            if let Err(error) = spawned {
                calls.waiting.pop_back();
                return Err(error);
            }
            calls.running = true;
        }
        Ok(())
    }
}

fn next(calls: &Mutex<Calls>) -> Option<Call> {
    let mut calls = lock(calls);
    let call = calls.waiting.pop_front();
    calls.running = call.is_some();
    call
}

/// Result of a call: the output of [`block::encode_extents`].
pub(crate) type StatusAnswer = Result<Vec<u8>, IoError>;

/// Calls of one channel.
pub(crate) struct StatusCalls {
    owner: Owner,
    /// Created for the first I/O.
    wake: Option<(Arc<Event>, WatchId)>,
    answers: Arc<Mutex<Vec<(u64, StatusAnswer)>>>,
    next: u64,
    waiting: Vec<(u64, Tag, IoBuffer)>,
}

impl StatusCalls {
    /// Completions of `owner` go to [`StatusCalls::complete`].
    pub fn new(owner: Owner) -> StatusCalls {
        StatusCalls {
            owner,
            wake: None,
            answers: Arc::default(),
            next: 0,
            waiting: Vec::new(),
        }
    }

    /// Queues `ask` for the device's thread.
    pub fn submit(
        &mut self,
        ring: &mut Ring,
        calls: &BlockingCalls,
        buffer: &mut IoBuffer,
        tag: Tag,
        ask: impl FnOnce() -> StatusAnswer + Send + 'static,
    ) -> Submission {
        let begun = self.begin(ring, calls, ask);
        match begun {
            Ok(number) => {
                self.waiting.push((number, tag, std::mem::take(buffer)));
                Submission::Pending
            }
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(0);
                let error = IoError::with_errno(IoErrorKind::ReadMedium, errno);
                Submission::Done(Err(error))
            }
        }
    }

    fn begin(
        &mut self,
        ring: &mut Ring,
        calls: &BlockingCalls,
        ask: impl FnOnce() -> StatusAnswer + Send + 'static,
    ) -> io::Result<u64> {
        let event = match &self.wake {
            Some((event, _)) => Arc::clone(event),
            None => {
                let event = Arc::new(ring.event()?);
                let watch = ring.watch_event(self.owner, 0, &event)?;
                self.wake = Some((Arc::clone(&event), watch));
                event
            }
        };
        self.next += 1;
        let (number, answers) = (self.next, Arc::clone(&self.answers));
        calls.make(Box::new(move || {
            let answer = ask();
            lock(&answers).push((number, answer));
            event.notify();
        }))?;
        Ok(number)
    }

    /// Handles answers; `more`: the event is still watched.
    pub fn complete(&mut self, ring: &mut Ring, more: bool, finished: &mut Vec<Finished>) {
        if let (false, Some((event, watch))) = (more, &mut self.wake) {
            // The kernel has ended the watch, possibly for lack of memory.
            match ring.watch_event(self.owner, 0, event) {
                Ok(again) => *watch = again,
                Err(error) => tracing::error!("cannot watch for block status results: {error}"),
            }
        }
        let answers = std::mem::take(&mut *lock(&self.answers));
        for (number, answer) in answers {
            let Some(at) = self.waiting.iter().position(|(one, ..)| *one == number) else {
                continue;
            };
            let (_, tag, buffer) = self.waiting.swap_remove(at);
            let outcome = answer.map(|bytes| answer_with(&buffer, &bytes));
            finished.push(Finished {
                tag,
                buffer,
                outcome,
            });
        }
    }

    /// Cancels an I/O of this channel before its call has ended.
    pub fn abort(&mut self, tag: Tag) {
        let found = self.waiting.iter().find(|(_, one, _)| *one == tag);
        if let (Some((number, ..)), Some((event, _))) = (found, &self.wake) {
            let answer = Err(IoErrorKind::Cancelled.into());
            lock(&self.answers).push((*number, answer));
            event.notify();
        }
    }

    pub fn close(&mut self, ring: &mut Ring) {
        if let Some((_, watch)) = self.wake.take() {
            ring.unwatch(watch);
        }
    }

    pub fn is_of(&self, owner: Owner) -> bool {
        owner == self.owner
    }

    pub fn in_flight(&self) -> usize {
        self.waiting.len()
    }
}

fn answer_with(buffer: &IoBuffer, bytes: &[u8]) {
    buffer.write_at(0, &bytes[..bytes.len().min(STATUS_BYTES)]);
}

/// Writes the answer of a device that does not block.
pub(crate) fn answer_at_once(buffer: &IoBuffer, bytes: &[u8]) -> IoOutcome {
    answer_with(buffer, bytes);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use uring::Wait;

    use super::*;

    struct Bed {
        ring: Ring,
        calls: BlockingCalls,
        status: StatusCalls,
    }

    impl Bed {
        fn submit(&mut self, tag: u64, ask: impl FnOnce() -> StatusAnswer + Send + 'static) {
            let mut buffer = IoBuffer::owned(STATUS_BYTES);
            let submitted =
                self.status
                    .submit(&mut self.ring, &self.calls, &mut buffer, Tag(tag), ask);
            assert_eq!(submitted, Submission::Pending);
        }

        fn finished(&mut self) -> Vec<(u64, IoOutcome)> {
            let (mut completions, mut finished) = (Vec::new(), Vec::new());
            while finished.is_empty() {
                self.ring
                    .enter(Wait::Until(None), &mut completions)
                    .unwrap();
                for completion in completions.drain(..) {
                    assert!(self.status.is_of(completion.owner));
                    self.status
                        .complete(&mut self.ring, completion.more, &mut finished);
                }
            }
            let outcome = |one: Finished| (one.tag.0, one.outcome);
            finished.into_iter().map(outcome).collect()
        }
    }

    #[test]
    fn calls_run_in_order_and_an_aborted_one_is_answered_at_once() {
        let mut bed = Bed {
            ring: Ring::new(4).unwrap(),
            calls: BlockingCalls::default(),
            status: StatusCalls::new(Owner(7)),
        };
        let (release, wait) = mpsc::channel::<()>();
        bed.submit(1, move || {
            wait.recv().ok();
            Ok(vec![1; STATUS_BYTES])
        });
        bed.submit(2, || Ok(vec![2; STATUS_BYTES]));
        bed.submit(3, || Err(IoErrorKind::Offline.into()));
        bed.status.abort(Tag(1));
        assert_eq!(bed.finished(), [(1, Err(IoErrorKind::Cancelled.into()))]);
        assert_eq!(bed.status.in_flight(), 2);
        drop(release);
        let mut over = bed.finished();
        while over.len() < 2 {
            over.extend(bed.finished());
        }
        assert_eq!(over, [(2, Ok(())), (3, Err(IoErrorKind::Offline.into()))]);
        assert_eq!(bed.status.in_flight(), 0);
        // The thread has ended or will soon; the next call is still made.
        bed.submit(4, || Ok(vec![4; STATUS_BYTES]));
        assert_eq!(bed.finished(), [(4, Ok(()))]);
        bed.status.close(&mut bed.ring);
    }
}

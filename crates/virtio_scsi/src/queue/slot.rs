//! A request as the SCSI executor's transport. Its chain contains the data-out and has room for the data-in.

use reactor::Io;
use scsi_exec::{Data, Parts, Transport, Waiter};
use virtio_device::Request;

use super::RequestQueue;
use crate::control;
use crate::pending::Pending;
use crate::request::{REQUEST_SIZE, RESPONSE_SIZE};

pub(super) struct CommandSlot<'a> {
    pub queue: &'a mut RequestQueue,
    pub request: &'a mut Request<Pending>,
}

impl Transport for CommandSlot<'_> {
    #[inline(always)]
    fn parts(&mut self) -> Parts<'_> {
        let (queue, request) = (&mut *self.queue, &mut *self.request);
        let slow_path = &mut *request.state.slow_path;
        Parts {
            task: &mut slow_path.task,
            job: &mut request.job,
            disks: &mut queue.disks,
            units: &queue.shared.units,
            memory: &queue.shared.memory,
            data_in: slow_path.data_in_room,
            data_out: request.chain.readable.saturating_sub(REQUEST_SIZE as u32),
        }
    }

    #[inline]
    fn data_in(&mut self, _io: &mut Io) -> Data {
        let (chain, pending) = (&mut self.request.chain, &mut self.request.state);
        // A transfer is far below 4 GiB.
        let length = self.request.job.io.length as u32;
        pending.data_in = length.min(pending.slow_path.data_in_room);
        let start = chain.readable as usize + RESPONSE_SIZE;
        chain.buffer.set_window(start, pending.data_in as usize);
        Data::Ready
    }

    #[inline]
    fn data_out(&mut self, length: usize) -> Data {
        let chain = &mut self.request.chain;
        let room = (chain.readable as usize).saturating_sub(REQUEST_SIZE);
        chain.buffer.set_window(REQUEST_SIZE, length.min(room));
        Data::Ready
    }

    fn copy_data_out(&self, data: &mut [u8]) {
        self.request.chain.buffer.read_whole(REQUEST_SIZE, data);
    }

    /// Numbers each wait: a task aborted while waiting is answered at once, and another request may use its slot at the end of the wait.
    fn waiter(&mut self) -> Waiter {
        self.queue.waits += 1;
        let (worker, wait) = (self.queue.worker.clone(), self.queue.waits);
        let slow_path = &mut self.request.state.slow_path;
        slow_path.wait = wait;
        let tag = slow_path.tag;
        Box::new(move |granted| {
            let Some(tag) = tag else { return };
            worker.send(move |w| {
                control::with_queue::<RequestQueue>(w, tag.source, |queue, io| {
                    let is_meant = |pending: &Pending| pending.slow_path.wait == wait;
                    queue.proceed(io, tag.slot, is_meant, |queue, io, request| {
                        queue.grant(io, request, granted)
                    });
                });
                w.wake(tag.source);
            });
        })
    }
}

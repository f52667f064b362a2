//! A request as the executor sees it: its data-out came with it, and there is room for its data-in in its chain.

use block::IoRequest;
use reactor::{DiskHandle, Io};
use scsi::DiskId;
use scsi_exec::{DataIn, DataOut, Parts, TaskStep, Transport, Units, Waiter};
use virtio_device::Request;

use super::RequestQueue;
use crate::control;
use crate::pending::Pending;
use crate::request::REQUEST_SIZE;

pub(super) struct CommandSlot<'a> {
    pub queue: &'a mut RequestQueue,
    pub request: &'a mut Request<Pending>,
}

impl Transport for CommandSlot<'_> {
    fn parts(&mut self) -> Parts<'_> {
        let (chain, pending) = (&self.request.chain, &mut self.request.state);
        Parts {
            task: &mut pending.task,
            data_in: pending.unusual.data_in_room,
            data_out: chain.readable.saturating_sub(REQUEST_SIZE as u32),
            held: &mut pending.unusual.held,
            memory: &self.queue.shared.memory,
        }
    }

    fn units(&self) -> &Units {
        &self.queue.shared.units
    }

    #[inline]
    fn disk(&mut self, io: &mut Io, id: DiskId) -> Option<DiskHandle> {
        self.queue.disk(io, id)
    }

    #[inline]
    fn data_out(&mut self, _length: usize) -> DataOut {
        DataOut::There
    }

    fn copy_data_out(&mut self, length: usize) -> Vec<u8> {
        let chain = &self.request.chain;
        let offered = (chain.readable as usize).saturating_sub(REQUEST_SIZE);
        let mut data = vec![0; length.min(offered)];
        chain.buffer.read_whole(REQUEST_SIZE, &mut data);
        data
    }

    #[inline]
    fn data_in(&mut self, _io: &mut Io, _disk: DiskHandle, _request: &IoRequest) -> DataIn {
        DataIn::There
    }

    /// The queue counts them itself.
    fn may_use_scratch(&mut self) -> bool {
        true
    }

    /// All data is there always: no step has to be kept.
    fn keep(&mut self, _step: TaskStep) {}

    fn waiter(&mut self) -> Waiter {
        let wait = self.queue.next_wait(&mut self.request.state);
        let (worker, tag) = (self.queue.worker.clone(), self.request.state.unusual.tag);
        Box::new(move |granted| {
            let Some(tag) = tag else { return };
            worker.send(move |w| {
                control::with_queue::<RequestQueue>(w, tag.source, |queue, io| {
                    let is_meant = |pending: &Pending| pending.unusual.wait == wait;
                    queue.proceed(io, tag.slot, is_meant, |queue, io, request| {
                        queue.go_on_with(io, request, granted)
                    });
                });
                w.wake(tag.source);
            });
        })
    }
}

//! The control queue (virtio 1.3, 5.6.6.2): task management and asynchronous notification queries.
//!
//! Tasks run on the workers of the request queues. A function is sent to each of them; it marks the tasks that it
//! means and waits until the driver has been shown their answers, so that none of them touches a disk or is answered
//! after the function's own answer. A [`Hold`] is kept by every message and every such task: the last one to let go answers.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::IoOutcome;
use guest_memory::IoBuffer;
use latency::Operation;
use reactor::{Io, SourceId, Tag, Worker, WorkerHandle};
use scsi::{Managed, TaskManagementFunction};
use scsi_exec::{Call, Effect, Hold, Runner, Want};
use virtio_device::{Answer, Malformed, Protocol, Queue, Request, Start, Step};
use virtqueue::ErrorPlace;

use crate::device::Shared;
use crate::queue::RequestQueue;
use crate::request::{Address, ControlRequest, S_ABORTED, S_BAD_TARGET, S_FAILURE, S_RESET};

const FUNCTION_COMPLETE: u8 = 0;
const FUNCTION_SUCCEEDED: u8 = 10;
const FUNCTION_REJECTED: u8 = 11;
const INCORRECT_LUN: u8 = 12;

/// Task management functions, by VIRTIO_SCSI_T_TMF's subtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Function {
    AbortTask,
    AbortTaskSet,
    ClearTaskSet,
    NexusReset,
    UnitReset,
    QueryTask,
    QueryTaskSet,
}

impl Function {
    fn parse(subtype: u32) -> Option<Function> {
        Some(match subtype {
            0 => Function::AbortTask,
            1 => Function::AbortTaskSet,
            // 2 is CLEAR ACA: no unit has such a condition, as NORMACA says (SPC-5, 6.7.2), so there is nothing to clear.
            3 => Function::ClearTaskSet,
            4 => Function::NexusReset,
            5 => Function::UnitReset,
            6 => Function::QueryTask,
            7 => Function::QueryTaskSet,
            _ => return None,
        })
    }

    /// Does it mean this task, of those that only the transport knows?
    fn means(self, key: (u8, u16), id: u64, task: (Option<(u8, u16)>, u64)) -> bool {
        let Some(task_key) = task.0 else { return false };
        match self {
            Function::AbortTask | Function::QueryTask => task_key == key && task.1 == id,
            Function::QueryTaskSet => task_key == key,
            _ => false,
        }
    }
}

/// Answers control request `slot` of the queue at `place` with this code, from any thread.
fn complete(place: (WorkerHandle, SourceId), slot: u32, code: u8) {
    let (worker, source) = place;
    worker.send(move |w| {
        with_queue::<ControlQueue>(w, source, |queue, _| {
            queue.resume_waiting(slot, |_| true, |pending| pending.code = code);
        });
        w.wake(source);
    });
}

/// How calls reach a request queue: the message marks the tasks that are meant.
pub(crate) fn runner(place: (WorkerHandle, SourceId)) -> Runner {
    let (worker, source) = place;
    Arc::new(move |call: &Call, hold: Hold| {
        let call = call.clone();
        worker.send(move |w| {
            let Some(queue) = queue_of::<RequestQueue>(w, source) else {
                return;
            };
            queue.for_each_request(|queue, task, waits| {
                let Some(tag) = queue.task_tag(task.key()) else {
                    return false;
                };
                let begun = task.slow_path.parked.is_none();
                match call.effect(tag, &task.task, begun, false) {
                    Some(Effect::Abort) => {
                        let code = match call.want {
                            Want::Reset => S_RESET,
                            Want::Abort | Want::End => S_ABORTED,
                        };
                        return task.abort(code, &hold, waits);
                    }
                    Some(Effect::Wait) => task.keep(&hold),
                    None => {}
                }
                false
            });
            end_waits_for_disks(w, source);
        });
    })
}

/// Tasks that were aborted do not wait any more for a disk that has failed them.
pub(crate) fn end_waits_for_disks(worker: &mut Worker, source: SourceId) {
    with_queue::<RequestQueue>(worker, source, |queue, io| {
        io.cancel_waiting(source, |slot| {
            let task = queue.state(slot);
            task.is_some_and(|task| task.slow_path.aborted.is_some() && !task.task.survives_abort())
        });
    });
    worker.wake(source);
}

fn queue_of<P: Protocol>(worker: &mut Worker, source: SourceId) -> Option<&mut Queue<P>> {
    let (source, _io) = worker.source(source)?;
    (source as &mut dyn Any).downcast_mut()
}

/// Calls `with` for a queue that is still there.
pub(crate) fn with_queue<P: Protocol>(
    worker: &mut Worker,
    source: SourceId,
    with: impl FnOnce(&mut Queue<P>, &mut Io),
) {
    if let Some((source, io)) = worker.source(source)
        && let Some(queue) = (source as &mut dyn Any).downcast_mut()
    {
        with(queue, io);
    }
}

/// The control queue's half of a virtqueue.
pub(crate) struct ControlQueue {
    shared: Arc<Shared>,
    worker: WorkerHandle,
}

/// What a control request remembers.
#[derive(Default)]
pub(crate) struct Pending {
    /// VIRTIO_SCSI_T_AN_*: the response begins with four more bytes.
    notification: bool,
    code: u8,
}

impl ControlQueue {
    pub(crate) fn new(shared: Arc<Shared>, worker: WorkerHandle) -> ControlQueue {
        ControlQueue { shared, worker }
    }

    /// ABORT TASK, QUERY TASK and QUERY TASK SET: bookkeeping of this controller's queues. The answer comes by itself,
    /// when every message and every task that is being aborted has let go.
    fn look_for(&self, function: Function, key: (u8, u16), id: u64, tag: Tag) {
        let place = (self.worker.clone(), tag.source);
        let found = Arc::new(AtomicBool::new(false));
        let seen = found.clone();
        let hold = Hold::new(move || {
            let code = match function {
                Function::QueryTask | Function::QueryTaskSet if seen.load(Ordering::Acquire) => {
                    FUNCTION_SUCCEEDED
                }
                _ => FUNCTION_COMPLETE,
            };
            complete(place, tag.slot, code);
        });
        for (worker, source) in self.shared.request_queues() {
            let (hold, found) = (hold.clone(), found.clone());
            worker.send(move |w| {
                let Some(queue) = queue_of::<RequestQueue>(w, source) else {
                    return;
                };
                queue.for_each_request(|_, task, waits| {
                    if !function.means(key, id, (task.key(), task.id)) {
                        return false;
                    }
                    found.store(true, Ordering::Release);
                    function == Function::AbortTask && task.abort(S_ABORTED, &hold, waits)
                });
                end_waits_for_disks(w, source);
            });
        }
    }

    /// Functions that the unit takes part in: they reach the tasks of every initiator, through every transport.
    fn manage(
        &self,
        function: TaskManagementFunction,
        address: &Address,
        tag: Tag,
    ) -> Result<(), u8> {
        let (target, nexus) = self.shared.target(address.target).ok_or(S_BAD_TARGET)?;
        let scope = match target.view().manage(&nexus, address.lun, function) {
            Managed::Abort(scope) => scope,
            Managed::IncorrectLun => return Err(INCORRECT_LUN),
        };
        let reset = matches!(
            function,
            TaskManagementFunction::LogicalUnitReset | TaskManagementFunction::NexusReset
        );
        let want = if reset { Want::Reset } else { Want::Abort };
        let call = Call::new(Arc::new(scope), want);
        let place = (self.worker.clone(), tag.source);
        let done = move || complete(place, tag.slot, FUNCTION_COMPLETE);
        self.shared.units.runners().call(&call, done);
        Ok(())
    }

    fn begin_function(&self, subtype: u32, lun: &[u8; 8], id: u64, tag: Tag) -> Result<(), u8> {
        let function = Function::parse(subtype).ok_or(FUNCTION_REJECTED)?;
        let address = Address::parse(lun).ok_or(INCORRECT_LUN)?;
        match function {
            Function::AbortTaskSet => {
                return self.manage(TaskManagementFunction::AbortTaskSet, &address, tag);
            }
            Function::ClearTaskSet => {
                return self.manage(TaskManagementFunction::ClearTaskSet, &address, tag);
            }
            Function::NexusReset => {
                return self.manage(TaskManagementFunction::NexusReset, &address, tag);
            }
            Function::UnitReset => {
                return self.manage(TaskManagementFunction::LogicalUnitReset, &address, tag);
            }
            Function::AbortTask | Function::QueryTask | Function::QueryTaskSet => {}
        }
        match self.shared.has_unit(&address) {
            None => return Err(S_BAD_TARGET),
            Some(false) => return Err(INCORRECT_LUN),
            Some(true) => {}
        }
        self.look_for(function, address.key(), id, tag);
        Ok(())
    }
}

impl Protocol for ControlQueue {
    type State = Pending;

    /// Each function may have all requests of all queues looked at.
    fn batch_limit(&self) -> usize {
        1
    }

    fn begin(
        &mut self,
        _io: &mut Io,
        request: &mut Request<Pending>,
        tag: Tag,
    ) -> Result<Start, Malformed> {
        let (chain, pending) = (&request.chain, &mut request.state);
        let mut bytes = [0; ControlRequest::MAX_SIZE];
        let length = bytes.len().min(chain.readable as usize);
        chain.buffer.read_whole(0, &mut bytes[..length]);
        let request = ControlRequest::parse(&bytes[..length])
            .ok_or(Malformed("control request is shorter than its type"))?;
        pending.notification = request == ControlRequest::AsynchronousNotification;
        let room = if pending.notification { 5 } else { 1 };
        if chain.writable < room {
            return Err(Malformed("control no room for the response"));
        }
        let begun = match request {
            ControlRequest::TaskManagement { function, lun, id } => {
                self.begin_function(function, &lun, id, tag)
            }
            // No event of SPC's asynchronous notification classes is offered: none is subscribed to.
            ControlRequest::AsynchronousNotification => Err(FUNCTION_COMPLETE),
            ControlRequest::Unknown => Err(FUNCTION_REJECTED),
        };
        let step = match begun {
            Ok(()) => Step::Wait,
            Err(code) => {
                pending.code = code;
                Step::Answer
            }
        };
        Ok(Start {
            step,
            operation: Operation::Other,
            bytes: 0,
        })
    }

    fn resume(
        &mut self,
        _: &mut Io,
        _: &mut Request<Pending>,
        _: IoOutcome,
        _: Option<IoBuffer>,
    ) -> Step {
        Step::Answer
    }

    fn answer(&mut self, request: &mut Request<Pending>) -> Answer {
        let (chain, pending) = (&request.chain, &request.state);
        let at = chain.readable as usize;
        if pending.notification {
            chain.buffer.write_whole(at, &[0, 0, 0, 0, pending.code]);
            return Answer {
                written: 5,
                good: true,
            };
        }
        chain.buffer.write_whole(at, &[pending.code]);
        Answer {
            written: 1,
            good: matches!(pending.code, FUNCTION_COMPLETE | FUNCTION_SUCCEEDED),
        }
    }

    /// What was asked is not known: the response of task management is the first byte, that of a notification the fifth, behind
    /// the events that were asked about.
    fn refuse(&mut self, request: &mut Request<Pending>, place: ErrorPlace) -> u32 {
        const RESPONSES: [u8; 5] = [S_FAILURE, 0, 0, 0, S_FAILURE];
        let bytes = &RESPONSES[..RESPONSES.len().min(place.front as usize)];
        let chain = &request.chain;
        chain.buffer.write_whole(chain.readable as usize, bytes);
        bytes.len() as u32
    }

    fn close(&mut self, _io: &mut Io) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_mean_the_tasks_that_sam_says() {
        let task = (Some((1, 2)), 7);
        assert!(Function::AbortTask.means((1, 2), 7, task));
        assert!(!Function::AbortTask.means((1, 2), 8, task));
        assert!(!Function::AbortTask.means((1, 3), 7, task));
        assert!(Function::QueryTaskSet.means((1, 2), 0, task));
        assert!(!Function::QueryTaskSet.means((1, 3), 0, task));
    }

    #[test]
    fn subtypes_are_those_of_5_6_6_2() {
        let all: Vec<_> = (0..9).map(Function::parse).collect();
        assert_eq!(all[0], Some(Function::AbortTask));
        assert_eq!(all[2], None);
        assert_eq!(all[5], Some(Function::UnitReset));
        assert_eq!(all[7], Some(Function::QueryTaskSet));
        assert_eq!(all[8], None);
    }
}

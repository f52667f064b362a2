//! The control queue (virtio 1.3, 5.6.6.2): task management and asynchronous notification queries.
//!
//! Tasks run on the workers of the request queues. A function is sent to each queue, which marks the matching tasks. The function is
//! answered after the driver has seen the responses of these tasks, so that none of them accesses a disk or gets a response later. Every
//! message and every such task has a clone of a [`Hold`]; dropping the last clone sends the answer.

use std::any::Any;
use std::sync::Arc;

use block::IoOutcome;
use guest_memory::IoBuffer;
use latency::{Operation, UnitAddress};
use reactor::{Io, SourceId, Tag, Worker, WorkerHandle};
use scsi::{Managed, TaskManagementFunction};
use scsi_exec::{Call, Effect, Hold, Known, Runner, TaskOperation, Tasks};
use virtio_device::{Answer, Malformed, ParsedRequest, Protocol, Queue, Request, Step};
use virtqueue::ResponseSpace;

use crate::device::{ControllerState, QueueHandle};
use crate::queue::RequestQueue;
use crate::request::{Address, ControlRequest, S_ABORTED, S_BAD_TARGET, S_FAILURE, S_RESET};

const FUNCTION_COMPLETE: u8 = 0;
const FUNCTION_SUCCEEDED: u8 = 10;
const FUNCTION_REJECTED: u8 = 11;
const INCORRECT_LUN: u8 = 12;

/// Task management functions, by subtype of VIRTIO_SCSI_T_TMF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Function {
    AbortTask,
    QueryTask,
    QueryTaskSet,
    /// Executed by the unit.
    Managed(TaskManagementFunction),
}

impl Function {
    fn parse(subtype: u32) -> Option<Function> {
        use TaskManagementFunction::*;
        Some(match subtype {
            0 => Function::AbortTask,
            1 => Function::Managed(AbortTaskSet),
            // 2 is CLEAR ACA. No unit supports that condition, consistent with NORMACA (SPC-5, 6.7.2).
            3 => Function::Managed(ClearTaskSet),
            4 => Function::Managed(NexusReset),
            5 => Function::Managed(LogicalUnitReset),
            6 => Function::QueryTask,
            7 => Function::QueryTaskSet,
            _ => return None,
        })
    }
}

/// Answers control request `slot` of the queue at `handle` with this code, from any thread.
fn complete(handle: (WorkerHandle, SourceId), slot: u32, code: u8) {
    let (worker, source) = handle;
    worker.send(move |w| {
        with_queue::<ControlQueue>(w, source, |queue, _| {
            queue.resume_waiting(slot, |_| true, |pending| pending.code = code);
        });
        w.wake(source);
    });
}

/// Creates the function that delivers task management calls to a request queue.
pub(crate) fn runner(handle: QueueHandle) -> Runner {
    Arc::new(move |call: &Call, hold: Hold| send_call(&handle, call, hold))
}

/// Sends a call to a request queue, which marks the matching tasks.
pub(crate) fn send_call(handle: &QueueHandle, call: &Call, hold: Hold) {
    let (call, source) = (call.clone(), handle.1);
    handle.0.send(move |w| {
        with_queue::<RequestQueue>(w, source, |queue, _| {
            queue.for_each_request(|queue, request, waits| {
                let key = request.key();
                let known = Known {
                    task: &request.slow_path.task,
                    tag: queue.task_tag(key),
                    unit: key.map(|(target, lun)| UnitAddress { target, lun }),
                    id: request.id,
                    started: request.slow_path.parked.is_none(),
                    later: false,
                    open: true,
                };
                let code = match (call.effect(&known), call.operation) {
                    (None, _) => return false,
                    (Some(Effect::Wait), _) => {
                        request.keep(&hold);
                        return false;
                    }
                    (Some(Effect::Abort), TaskOperation::Reset) => S_RESET,
                    (Some(Effect::Abort), TaskOperation::Remove) => S_BAD_TARGET,
                    (Some(Effect::Abort), _) => S_ABORTED,
                };
                request.abort(code, &hold, waits)
            });
        });
        end_waits_for_disks(w, source);
    });
}

/// Cancels the retries of aborted tasks after disk errors.
fn end_waits_for_disks(worker: &mut Worker, source: SourceId) {
    with_queue::<RequestQueue>(worker, source, |queue, io| {
        io.cancel_waiting(source, |slot| {
            let slow_path = queue.state(slot).map(|pending| &pending.slow_path);
            slow_path.is_some_and(|slow| slow.aborted.is_some() && !slow.task.survives_abort())
        });
    });
    worker.wake(source);
}

/// Calls `with` for a queue, if it exists.
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

/// The control queue's [`Protocol`].
pub(crate) struct ControlQueue {
    shared: Arc<ControllerState>,
    worker: WorkerHandle,
}

/// State of a control request.
#[derive(Default)]
pub(crate) struct Pending {
    /// VIRTIO_SCSI_T_AN_*: the response begins with four more bytes.
    notification: bool,
    code: u8,
}

impl ControlQueue {
    pub(crate) fn new(shared: Arc<ControllerState>, worker: WorkerHandle) -> ControlQueue {
        ControlQueue { shared, worker }
    }

    /// Executes ABORT TASK, QUERY TASK or QUERY TASK SET on this controller's queues. The answer follows when every message and every
    /// aborted task has dropped its hold.
    fn find_tasks(&self, tasks: Tasks, operation: TaskOperation, tag: Tag) {
        let handle = (self.worker.clone(), tag.source);
        let call = Call::new(tasks, operation);
        let asked = call.clone();
        let hold = Hold::new(move || {
            let code = match asked.has_found() {
                true => FUNCTION_SUCCEEDED,
                false => FUNCTION_COMPLETE,
            };
            complete(handle, tag.slot, code);
        });
        for queue in self.shared.request_queues() {
            send_call(&queue, &call, hold.clone());
        }
    }

    /// Executes functions of the unit. They apply to the tasks of all initiators in all transports.
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
        let call = Call::of_scope(scope, TaskOperation::of(function));
        let handle = (self.worker.clone(), tag.source);
        let done = move || complete(handle, tag.slot, FUNCTION_COMPLETE);
        self.shared.units.runners().call(&call, done);
        Ok(())
    }

    fn begin_function(&self, subtype: u32, lun: &[u8; 8], id: u64, tag: Tag) -> Result<(), u8> {
        let function = Function::parse(subtype).ok_or(FUNCTION_REJECTED)?;
        let address = Address::parse(lun).ok_or(INCORRECT_LUN)?;
        let (target, lun) = address.key();
        let unit = UnitAddress { target, lun };
        let (tasks, operation) = match function {
            Function::Managed(function) => return self.manage(function, &address, tag),
            Function::AbortTask => (Tasks::One(unit, id), TaskOperation::Abort),
            Function::QueryTask => (Tasks::One(unit, id), TaskOperation::Find),
            Function::QueryTaskSet => (Tasks::Set(unit, None), TaskOperation::Find),
        };
        match self.shared.has_unit(&address) {
            None => return Err(S_BAD_TARGET),
            Some(false) => return Err(INCORRECT_LUN),
            Some(true) => {}
        }
        self.find_tasks(tasks, operation, tag);
        Ok(())
    }
}

impl Protocol for ControlQueue {
    type State = Pending;

    /// Each function may scan all requests of all queues.
    fn batch_limit(&self) -> usize {
        1
    }

    fn parse(
        &mut self,
        _io: &mut Io,
        request: &mut Request<Pending>,
        tag: Tag,
    ) -> Result<ParsedRequest, Malformed> {
        let (chain, pending) = (&request.chain, &mut request.state);
        let mut bytes = [0; ControlRequest::MAX_SIZE];
        let length = bytes.len().min(chain.readable as usize);
        chain.buffer.read_whole(0, &mut bytes[..length]);
        let request = ControlRequest::parse(&bytes[..length])
            .ok_or(Malformed("control request is shorter than its type"))?;
        pending.notification = request == ControlRequest::AsynchronousNotification;
        let room = if pending.notification { 5 } else { 1 };
        if chain.writable < room {
            return Err(Malformed("control request has no room for the response"));
        }
        let started = match request {
            ControlRequest::TaskManagement { function, lun, id } => {
                self.begin_function(function, &lun, id, tag)
            }
            // No asynchronous notification class of SPC is supported, so no event is subscribed.
            ControlRequest::AsynchronousNotification => Err(FUNCTION_COMPLETE),
            ControlRequest::Unknown => Err(FUNCTION_REJECTED),
        };
        let step = match started {
            Ok(()) => Step::Wait,
            Err(code) => {
                pending.code = code;
                Step::Answer
            }
        };
        Ok(ParsedRequest {
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

    /// The request type is unknown: task management expects the response code in the first byte, a notification in the fifth, after the
    /// event mask.
    fn refuse(&mut self, request: &mut Request<Pending>, space: ResponseSpace) -> u32 {
        const RESPONSES: [u8; 5] = [S_FAILURE, 0, 0, 0, S_FAILURE];
        let bytes = &RESPONSES[..RESPONSES.len().min(space.front as usize)];
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
    fn subtypes_are_those_of_5_6_6_2() {
        let all: Vec<_> = (0..9).map(Function::parse).collect();
        assert_eq!(all[0], Some(Function::AbortTask));
        assert_eq!(all[2], None);
        let reset = TaskManagementFunction::LogicalUnitReset;
        assert_eq!(all[5], Some(Function::Managed(reset)));
        assert_eq!(all[7], Some(Function::QueryTaskSet));
        assert_eq!(all[8], None);
    }
}

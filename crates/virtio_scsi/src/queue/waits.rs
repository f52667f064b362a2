//! What a request waits for before it goes on: its turn, a range of its disk, the end of tasks that it aborts. Each wait has
//! a number, for whoever is aborted while it waits is answered at once, and another request may be in its slot when the wait is over.

use std::sync::Arc;

use latency::Operation;
use reactor::Io;
use scsi::{AbortScope, Command, TaskAttribute, UnitId};
use scsi_exec::{Admission, Call, Granted, TaskOrder, Ticket, Want};
use virtio_device::{Request, Start, Step};

use super::RequestQueue;
use super::command_slot::CommandSlot;
use crate::control;
use crate::pending::Pending;
use crate::request::{self, Header, REQUEST_SIZE};

impl RequestQueue {
    /// Numbers a wait that begins.
    pub(super) fn next_wait(&mut self, pending: &mut Pending) -> u64 {
        self.waits += 1;
        pending.unusual.wait = self.waits;
        self.waits
    }

    /// PREEMPT AND ABORT: the answer waits until the tasks of the scope have ended, on all workers.
    #[cold]
    pub(super) fn abort_first(&mut self, scope: Box<AbortScope>, pending: &mut Pending) -> Step {
        let Some(tag) = pending.unusual.tag else {
            return Step::Answer;
        };
        let scope = Arc::from(scope);
        pending.unusual.aborting = Some(Arc::clone(&scope));
        let wait = self.next_wait(pending);
        let place = (self.worker.clone(), tag.source);
        let want = Want::Abort;
        self.shared
            .units
            .runners()
            .call(&Call::new(scope, want), move || {
                let is_meant = move |pending: &Pending| pending.unusual.wait == wait;
                control::resume::<RequestQueue>(place, tag.slot, is_meant, |pending| {
                    pending.unusual.aborting = None;
                });
            });
        Step::Wait
    }

    /// What a request waited for is there.
    pub(super) fn go_on_with(
        &mut self,
        io: &mut Io,
        request: &mut Request<Pending>,
        granted: Granted,
    ) -> Step {
        match granted {
            Granted::Turn(ticket) => self.begin_parked(io, request, ticket).step,
            Granted::Range(lock) => {
                let step = request.state.task.granted(lock);
                self.step(io, request, step)
            }
        }
    }

    /// A command that is not SIMPLE, or comes while such a one is there: it begins when its turn has come.
    #[cold]
    pub(super) fn take_turn(
        &mut self,
        io: &mut Io,
        request: &mut Request<Pending>,
        header: &[u8; REQUEST_SIZE],
        attribute: TaskAttribute,
        order: &Arc<TaskOrder>,
        unit: Option<UnitId>,
    ) -> Start {
        // What no unit gets is in no task set.
        let Some(unit) = unit else {
            return self.begin_in_turn(io, request, header, None);
        };
        let queue = &mut *self;
        match scsi_exec::take_turn(&mut CommandSlot { queue, request }, order, unit, attribute) {
            Admission::Now(ticket) => self.begin_in_turn(io, request, header, ticket),
            Admission::Defer => {
                request.state.unusual.parked = Some(Box::new(*header));
                Start {
                    step: Step::Wait,
                    operation: Operation::Other,
                    bytes: 0,
                }
            }
        }
    }

    /// The turn of a command that had to wait for it has come.
    fn begin_parked(
        &mut self,
        io: &mut Io,
        request: &mut Request<Pending>,
        ticket: Option<Ticket>,
    ) -> Start {
        // Without one it names no target, and is answered so.
        let header = request
            .state
            .unusual
            .parked
            .take()
            .unwrap_or_else(|| Box::new([0; REQUEST_SIZE]));
        self.begin_in_turn(io, request, &header, ticket)
    }

    fn begin_in_turn(
        &mut self,
        io: &mut Io,
        request: &mut Request<Pending>,
        header: &[u8; REQUEST_SIZE],
        ticket: Option<Ticket>,
    ) -> Start {
        let (chain, pending) = (&request.chain, &mut request.state);
        pending.unusual.ticket = ticket;
        let header = Header::parse(header);
        let seen = match header.address {
            Some(address) => self.target(address.target).map(|seen| (address.lun, seen)),
            None => None,
        };
        let (Some((lun, seen)), None) = (seen, pending.unusual.aborted) else {
            // aborted, or its target went, while it waited
            pending.task.abandon();
            if pending.unusual.aborted.is_none() {
                pending.unusual.code = request::S_BAD_TARGET;
            }
            return Start {
                step: Step::Answer,
                operation: Operation::Other,
                bytes: 0,
            };
        };
        seen.view.refresh();
        let plan = seen.view.begin(&Command {
            nexus: &seen.nexus,
            lun,
            cdb: header.cdb,
            attribute: header.attribute,
            data_out_length: u64::from(chain.readable) - REQUEST_SIZE as u64,
            data_in_length: u64::from(pending.unusual.data_in_room),
        });
        self.begin_planned(io, request, header.cdb[0], plan)
    }
}

//! PERSISTENT RESERVE OUT on a unit that several daemons serve. One I/O replaces the shared state; it ends when all daemons have adopted
//! the new state, including this one.
//!
//! If another daemon's change came first, this daemon has adopted it, and the service is repeated on the new state.

use std::sync::Arc;

use block::{IoErrorKind, IoOutcome, IoRequest};

use super::{Request, answer, change};
use crate::logical_unit::LogicalUnit;
use crate::nexus::Nexus;
use crate::plan::{Plan, PlanStep, Program, Run};
use crate::reservations::{Refusal, Registrant, SHARED_STATE_MAX};
use crate::response::{Response, Status};

/// Number of attempts before the command ends with BUSY.
const ATTEMPTS_MAX: u32 = 32;

/// Length of the replaced version, which precedes the state.
const VERSION_LENGTH: usize = 8;

pub(super) fn plan(unit: Arc<LogicalUnit>, nexus: Arc<Nexus>, request: Request) -> Plan {
    let program = Replacement {
        unit,
        nexus,
        request,
        attempts: 0,
        aborts_own: false,
    };
    Run::plan(program, VERSION_LENGTH + SHARED_STATE_MAX)
}

struct Replacement {
    unit: Arc<LogicalUnit>,
    nexus: Arc<Nexus>,
    request: Request,
    attempts: u32,
    /// Other tasks of the initiator are aborted too: it has preempted itself.
    aborts_own: bool,
}

impl Replacement {
    fn attempt(&mut self, scratch: &mut [u8]) -> Result<PlanStep, Refusal> {
        self.attempts += 1;
        let state = self.unit.state();
        let Some(sharing) = state.sharing.as_ref().filter(|_| !state.is_out_of_date()) else {
            return Ok(PlanStep::Done(Response::status(Status::Busy)));
        };
        let (reservations, effects) = change(&state, &self.nexus, &self.request)?;
        if reservations == state.reservations {
            return Ok(PlanStep::Done(Response::good()));
        }
        let who = Registrant::of(&self.nexus);
        self.aborts_own = effects.aborts.contains(&who);
        let (version, bytes) = sharing.changed(reservations, &effects, &who)?;
        let length = VERSION_LENGTH + bytes.len();
        scratch[..VERSION_LENGTH].copy_from_slice(&version.to_be_bytes());
        scratch[VERSION_LENGTH..length].copy_from_slice(&bytes);
        Ok(PlanStep::Io {
            disk: self.unit.disk(),
            request: IoRequest::replace_state(length as u64),
            scratch: 0..length,
        })
    }

    fn end(&self) -> Response {
        let own = self.aborts_own.then(|| Registrant::of(&self.nexus));
        answer(&self.unit, &self.unit.state(), own.as_slice())
    }
}

impl Program for Replacement {
    fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> PlanStep {
        match last {
            Some(Ok(())) => PlanStep::Done(self.end()),
            // The result is unknown, or nothing has changed: the initiator reads the keys, or repeats the command.
            Some(Err(error))
                if error.kind != IoErrorKind::Miscompare || self.attempts >= ATTEMPTS_MAX =>
            {
                PlanStep::Done(Response::status(Status::Busy))
            }
            None | Some(Err(_)) => {
                let attempt = self.attempt(scratch);
                attempt.unwrap_or_else(|refusal| PlanStep::Done(refusal.into()))
            }
        }
    }
}

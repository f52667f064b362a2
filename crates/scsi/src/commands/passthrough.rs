//! Commands to a pass-through unit, executed by its device: initiators see the device's INQUIRY data, mode pages and sense.
//!
//! Plain READs and WRITEs are I/Os, in `request_path`. These other commands do not reach the device unchanged:
//!
//! - REPORT LUNS is answered by the target;
//! - commands of the copy manager could reach units of the device's target that this daemon does not export;
//! - CDBs of more than 16 bytes, and commands with data in both directions, are refused;
//! - commands for reservations are refused, emulated or forwarded according to [`PassedReservations`], because all initiators use the
//!   device through one I_T nexus.

use block::{
    COMMAND_HEADER, IoOutcome, IoRequest, PassedReservations, Passthrough, ScsiAnswer, ScsiCommand,
};

use super::{Context, Planned, inquiry, port_groups};
use crate::command::{Cdb, cdb_length, opcode::*};
use crate::logical_unit::DiskId;
use crate::plan::{Pending, Plan, PlanStep, Program, Run};
use crate::response::{Residual, Response, Status};
use crate::sense::{Sense, SenseCode, SenseKey};
use crate::table::{self, Access, Needs};

/// Maximum data length of a pass-through command in bytes; longer READs and WRITEs are I/Os.
pub const PASSED_MAX: u64 = 4 << 20;
/// Peripheral device type of MMC units (SPC-5, 6.7.2).
const CD_DVD: u8 = 0x05;
/// CDBs of other lengths (SPC-5, 4.2.5.1).
const EXTENDED_CDB: u8 = 0x7e;
const VARIABLE_LENGTH_CDB: u8 = 0x7f;
/// CDB length that Linux assumes for vendor specific operation codes.
const VENDOR_CDB: usize = 10;

/// `given`: length of the CDB from the transport, in bytes.
pub(super) fn begin(c: &Context<'_>, passthrough: Passthrough, given: usize) -> Planned {
    let opcode = c.cdb[0];
    let invalid = || Err(Sense::illegal_request(SenseCode::INVALID_OPCODE));
    let is_for_reservations = matches!(
        opcode,
        PERSISTENT_RESERVE_IN
            | PERSISTENT_RESERVE_OUT
            | RESERVE_6
            | RESERVE_10
            | RELEASE_6
            | RELEASE_10
    );
    match opcode {
        REPORT_LUNS => return emulated(c, given),
        MAINTENANCE_OUT
            if is_set_port_groups(passthrough, c.cdb) && !port_groups::may_set(c.nexus.port()) =>
        {
            return invalid();
        }
        EXTENDED_COPY | RECEIVE_COPY_RESULTS | EXTENDED_CDB | VARIABLE_LENGTH_CDB => {
            return invalid();
        }
        _ if is_for_reservations => match passthrough.reservations {
            PassedReservations::Refuse => return invalid(),
            PassedReservations::Emulate => return emulated(c, given),
            PassedReservations::Forward => {}
        },
        _ => {}
    }
    if passthrough.read_only && !is_harmless(passthrough, c.cdb) {
        return Err(Sense::new(
            SenseKey::DataProtect,
            SenseCode::WRITE_PROTECTED,
        ));
    }
    let length = match cdb_length(opcode) {
        0 => VENDOR_CDB,
        length => length,
    };
    if given < length {
        return Err(Sense::illegal_request(SenseCode::INVALID_FIELD_IN_CDB));
    }
    if (c.data_in > 0 && c.data_out > 0) || c.data_out > PASSED_MAX {
        return Err(Sense::illegal_request(
            SenseCode::INVALID_FIELD_IN_INFORMATION_UNIT,
        ));
    }
    let mut cdb = *c.cdb;
    cdb[length..].fill(0);
    let command = ScsiCommand {
        cdb,
        cdb_length: length as u8,
        data_out: c.data_out as u32,
        // The initiator's buffer may exceed every device's response.
        data_in: c.data_in.min(PASSED_MAX) as u32,
    };
    let passed = Passed {
        disk: c.unit.disk(),
        command,
        data_out: Vec::new(),
        is_inaccessible: opcode == INQUIRY && inquiry::is_inaccessible(c),
    };
    if command.data_out == 0 {
        return Ok(passed.plan());
    }
    let wanted = c.data_out;
    Ok(Pending::keeping(wanted, wanted, move |data_out| {
        Passed { data_out, ..passed }.plan()
    }))
}

fn emulated(c: &Context<'_>, given: usize) -> Planned {
    super::check_cdb(c.cdb, given)?;
    super::dispatch(c)
}

/// Returns true if a command changes neither the medium nor the device's settings.
///
/// Operation codes depend on the device type: 51h is READ DISC INFORMATION of an optical unit, and XPWRITE of a disk; A3h is MAINTENANCE IN
/// of a disk, and SEND KEY of an optical unit.
pub(super) fn is_harmless(passthrough: Passthrough, cdb: &Cdb) -> bool {
    const SYNCHRONIZE: [u8; 2] = [SYNCHRONIZE_CACHE_10, SYNCHRONIZE_CACHE_16];
    // MMC-6: READ FORMAT CAPACITIES, READ TOC/PMA/ATIP, GET CONFIGURATION, GET EVENT STATUS NOTIFICATION, READ DISC INFORMATION,
    // READ TRACK INFORMATION, READ BUFFER CAPACITY, MECHANISM STATUS, READ CD, READ DISC STRUCTURE.
    const OF_OPTICAL_UNITS: [u8; 10] = [0x23, 0x43, 0x46, 0x4a, 0x51, 0x52, 0x5c, 0xbd, 0xbe, 0xad];
    let is_optical = is_optical(passthrough);
    let opcode = cdb[0];
    let by_table = table::find(cdb).map(|row| table::access(row, cdb));
    SYNCHRONIZE.contains(&opcode)
        || (is_optical && OF_OPTICAL_UNITS.contains(&opcode))
        || (!(is_optical && opcode == MAINTENANCE_IN)
            && matches!(by_table, Some(Access::Always | Access::Read)))
}

fn is_optical(passthrough: Passthrough) -> bool {
    passthrough.device_type == CD_DVD
}

/// Returns true for SET TARGET PORT GROUPS. A4h means REPORT KEY to optical units.
fn is_set_port_groups(passthrough: Passthrough, cdb: &Cdb) -> bool {
    !is_optical(passthrough) && cdb[1] & 0x1f == port_groups::TARGET_PORT_GROUPS
}

/// Returns the required state of a unit for a command of the device. Ports in standby and unavailable ports accept the same commands as for
/// emulated units, and the other commands that SPC-4, 5.15.2.4, lists. Commands with unknown effects need an active port.
pub(super) fn needs(passthrough: Passthrough, cdb: &Cdb) -> Needs {
    const RECEIVE_DIAGNOSTIC_RESULTS: u8 = 0x1c;
    const WRITE_BUFFER: u8 = 0x3b;
    const READ_BUFFER: u8 = 0x3c;
    const LOG_SELECT: u8 = 0x4c;
    /// Modes of READ and WRITE BUFFER.
    const ECHO_BUFFER: u8 = 0x0a;
    const ECHO_BUFFER_DESCRIPTOR: u8 = 0x0b;
    match (cdb[0], cdb[1] & 0x1f) {
        (READ_BUFFER, ECHO_BUFFER | ECHO_BUFFER_DESCRIPTOR) | (WRITE_BUFFER, ECHO_BUFFER) => {
            Needs::Nothing
        }
        (LOG_SELECT | RECEIVE_DIAGNOSTIC_RESULTS, _) => Needs::Port,
        // REPORT KEY and SEND KEY.
        (MAINTENANCE_IN | MAINTENANCE_OUT, _) if is_optical(passthrough) => Needs::Medium,
        _ => table::find(cdb).map_or(Needs::Medium, |row| row.needs),
    }
}

struct Passed {
    disk: DiskId,
    command: ScsiCommand,
    data_out: Vec<u8>,
    /// INQUIRY through an unavailable port: the response has the peripheral qualifier 001b.
    is_inaccessible: bool,
}

impl Passed {
    fn plan(self) -> Plan {
        let length = self.command.buffer_length();
        Run::plan(self, length)
    }

    fn begin(&mut self, scratch: &mut [u8]) -> PlanStep {
        let header = self.command.encode();
        let (head, data) = scratch.split_at_mut(COMMAND_HEADER);
        head[..header.len()].copy_from_slice(&header);
        let out = std::mem::take(&mut self.data_out);
        data[..out.len()].copy_from_slice(&out);
        PlanStep::Io {
            disk: self.disk,
            request: IoRequest::scsi_command(&self.command),
            scratch: 0..self.command.buffer_length(),
        }
    }
}

impl Program for Passed {
    fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> PlanStep {
        PlanStep::Done(match last {
            None => return self.begin(scratch),
            Some(Err(error)) => Response::check(Sense::of_io_error(error)),
            Some(Ok(())) => {
                let mut response = answer(scratch, self.command.data_out > 0);
                if let (true, Some(first)) = (self.is_inaccessible, response.data.first_mut()) {
                    *first = inquiry::NOT_CONNECTED | *first & 0x1f;
                }
                response
            }
        })
    }
}

/// Returns the device's response unchanged.
fn answer(buffer: &[u8], is_out: bool) -> Response {
    let answer = ScsiAnswer::decode(buffer);
    let Some((answer, status)) =
        answer.and_then(|answer| Status::from_byte(answer.status).map(|status| (answer, status)))
    else {
        return Response::aborted();
    };
    let data = buffer[COMMAND_HEADER..][..answer.data_in as usize].to_vec();
    Response {
        residual: match answer.residual {
            more @ 1.. => Residual::Overflow(more.unsigned_abs()),
            less @ ..=-1 if is_out => Residual::Underflow(less.unsigned_abs()),
            // For data-in it follows from the length of the data: the initiator's buffer may exceed the length sent to the device.
            _ => Residual::None,
        },
        data,
        device_sense: answer.sense.into_boxed_slice(),
        ..Response::status(status)
    }
}

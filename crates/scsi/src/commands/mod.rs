//! Plans commands: one dispatch `match`, preceded by checks for special states.
//!
//! `begin` reads the unit's word and the nexus' filter. Both are usually zero: a plain READ or WRITE is then planned in `request_path`, and
//! another command goes directly to its function. A nexus that neither a reservation nor the access state of its port restricts takes the
//! same path, after `begin_special` has established this. Otherwise `begin_special` first checks unit attentions, reservations and
//! readiness. Each function gets a [`Context`] and returns a plan, or the sense of a CHECK CONDITION.

mod capacity;
mod compare_write;
mod extended_copy;
mod format_unit;
mod inquiry;
mod lba_status;
mod log_sense;
mod medium;
mod mode_select;
mod mode_sense;
mod overwriting;
mod parameter_list;
mod passthrough;
mod persistent_reserve;
mod port_groups;
mod provisioning;
mod read_write;
mod receive_copy;
mod replaced;
mod report_luns;
mod request_path;
mod request_sense;
mod reserve;
mod sanitize;
mod supported;
mod verify;
mod vital_product_data;
mod without_unit;

use std::sync::Arc;

use block::{Blocks, IoRequest, Lba};

use crate::command::{Cdb, Command, TaskAttribute, cdb_length, opcode::*};
use crate::logical_unit::{DiskId, LogicalUnit, Word};
use crate::lun::LunAddress;
use crate::nexus::Nexus;
use crate::plan::{Answering, DirectIo, Plan};
use crate::response::{Residual, Response, Status};
use crate::sense::{Sense, SenseCode, SenseKey};
use crate::table::{self, Access};
use crate::target::TargetView;
use crate::unit_state::Operation;

pub(crate) use overwriting::resume as resume_operation;
pub use passthrough::PASSED_MAX;
pub use read_write::TRANSFER_MAX;
pub use request_path::PlainParameters;
pub(crate) use without_unit::begin_without_unit;

/// A plan, or the sense data of CHECK CONDITION.
pub(crate) type Planned = Result<Plan, Sense>;

/// Input of a command's function.
pub(crate) struct Context<'a> {
    pub view: &'a TargetView,
    pub unit: &'a Arc<LogicalUnit>,
    pub nexus: &'a Arc<Nexus>,
    /// Number of the unit's LUN.
    pub lun: u16,
    pub cdb: &'a Cdb,
    pub word: Word,
    pub data_in: u64,
    pub data_out: u64,
}

impl Context<'_> {
    /// Returns the byte range of a range of blocks, or LBA OUT OF RANGE.
    #[inline]
    pub fn range(&self, lba: u64, blocks: u64) -> Result<(u64, u64), Sense> {
        let (lba, blocks) = (Lba(lba), Blocks(blocks));
        let range = self.unit.geometry().check(lba, blocks);
        let range = range.or_else(|_| self.unit.geometry_of_refused().check(lba, blocks));
        range.map_err(|_| Sense::illegal_request(SenseCode::LBA_OUT_OF_RANGE))
    }

    #[inline]
    pub fn check_writable(&self) -> Result<(), Sense> {
        if self.word.has(Word::WRITE_PROTECTED) {
            return Err(Sense::new(
                SenseKey::DataProtect,
                SenseCode::WRITE_PROTECTED,
            ));
        }
        Ok(())
    }

    /// Returns data-in, cut to the CDB's allocation length.
    pub fn data(&self, data: Vec<u8>, allocation_length: u32) -> Planned {
        Ok(Plan::Done(Response::data(data, allocation_length as usize)))
    }
}

/// GOOD without data.
pub(crate) fn good() -> Planned {
    Ok(Plan::Done(Response::good()))
}

/// Plans one I/O without data.
pub(crate) fn without_data(disk: DiskId, request: IoRequest, descriptor_sense: bool) -> Plan {
    Plan::Io(DirectIo {
        disk,
        request,
        exclusive: false,
        residual: Residual::None,
        success: Status::Good,
        expected: 0,
        descriptor_sense,
    })
}

/// Returns true if unit attentions, reservations or readiness must be checked for a command.
#[inline(always)]
fn is_special(unit: &LogicalUnit, word: Word, nexus: &Nexus) -> bool {
    let privileged = word.depends_on_nexus() && nexus.is_privileged(unit.id(), word.epoch());
    (word.is_slow() && !privileged) || nexus.may_have_attention(unit.id())
}

/// Plans a plain READ or WRITE in the normal state; `None` for all other commands.
#[inline(always)]
pub(crate) fn begin_direct(
    unit: &LogicalUnit,
    command: &Command<'_>,
    cdb: &Cdb,
) -> Option<DirectIo> {
    let word = unit.word();
    if is_special(unit, word, command.nexus) || command.cdb.len() < 10 {
        return None;
    }
    let (data_in, data_out) = (command.data_in_length, command.data_out_length);
    let parameters = PlainParameters::new(unit.geometry(), word);
    Some(parameters.begin(cdb, data_in, data_out)?.on(unit.disk()))
}

/// Returns the parameters of [`begin_direct`] in the normal state, for a nexus with this filter bit for the unit. A nexus that is
/// privileged under a reservation does not take this path.
#[inline(always)]
pub(crate) fn plain_parameters(
    unit: &LogicalUnit,
    nexus: &Nexus,
    filter_bit: u64,
) -> Option<PlainParameters> {
    let word = unit.word();
    if word.is_slow() || nexus.has_in_filter(filter_bit) {
        return None;
    }
    Some(PlainParameters::new(unit.geometry(), word))
}

#[inline]
pub(crate) fn begin(
    view: &TargetView,
    unit: &Arc<LogicalUnit>,
    command: &Command<'_>,
    cdb: &Cdb,
) -> Plan {
    // ACA conditions, the only state that allows such a task, do not exist here (SAM-5, 8.6.4).
    if command.attribute == TaskAttribute::Aca {
        let sense = Sense::illegal_request(SenseCode::INVALID_MESSAGE);
        return finish(Err(sense), command, unit.word());
    }
    match begin_direct(unit, command, cdb) {
        Some(io) => Plan::Io(io),
        None => begin_general(view, unit, command, cdb),
    }
}

/// Returns true if a command changes the medium's content or the access to it. For initiators with read-only access.
pub(crate) fn changes(unit: &LogicalUnit, cdb: &Cdb) -> bool {
    if let Some(how) = unit.passthrough() {
        // The device's other commands have unknown effects.
        return !passthrough::is_harmless(how, cdb)
            || matches!(cdb[0], RESERVE_6 | RESERVE_10 | PERSISTENT_RESERVE_OUT);
    }
    matches!(
        cdb[0],
        WRITE_6
            | WRITE_10
            | WRITE_12
            | WRITE_16
            | WRITE_AND_VERIFY_10
            | WRITE_AND_VERIFY_12
            | WRITE_AND_VERIFY_16
            | WRITE_SAME_10
            | WRITE_SAME_16
            | UNMAP
            | SANITIZE
            | COMPARE_AND_WRITE
            | ORWRITE_16
            | WRITE_ATOMIC_16
            | EXTENDED_COPY
            | MODE_SELECT_6
            | MODE_SELECT_10
            | START_STOP_UNIT
            | PREVENT_ALLOW
            | RESERVE_6
            | RESERVE_10
            | PERSISTENT_RESERVE_OUT
            | MAINTENANCE_OUT
            | FORMAT_UNIT
    )
}

/// Returns a response that refuses a command, in the unit's sense format.
pub(crate) fn refuse(unit: &LogicalUnit, command: &Command<'_>, sense: Sense) -> Plan {
    finish(Err(sense), command, unit.word())
}

#[inline(never)]
fn begin_general(
    view: &TargetView,
    unit: &Arc<LogicalUnit>,
    command: &Command<'_>,
    cdb: &Cdb,
) -> Plan {
    let word = unit.word();
    let context = Context {
        view,
        unit,
        nexus: command.nexus,
        lun: match command.lun.address() {
            LunAddress::Unit(number) => number,
            // These address no unit.
            LunAddress::ReportLuns | LunAddress::Unknown => 0,
        },
        cdb,
        word,
        data_in: command.data_in_length,
        data_out: command.data_out_length,
    };
    let planned = if is_special(unit, word, command.nexus) {
        begin_special(&context)
    } else {
        Ok(None)
    };
    let planned = match (planned, unit.passthrough()) {
        (Ok(None), Some(how)) => passthrough::begin(&context, how, command.cdb.len()),
        (Ok(None), None) => check_cdb(cdb, command.cdb.len())
            .and_then(|()| dispatch(&context))
            .and_then(|plan| replaced::check_length(&context, plan)),
        (Ok(Some(response)), _) => Ok(Plan::Done(response)),
        (Err(sense), _) => Err(sense),
    };
    match planned {
        Ok(Plan::Io(io)) if io.request.moves_data() => Plan::Io(io),
        planned => finish(planned, command, word),
    }
}

fn finish(planned: Planned, command: &Command<'_>, word: Word) -> Plan {
    let answering = Answering {
        expected_in: command.data_in_length,
        expected_out: command.data_out_length,
        wanted_out: match &planned {
            Ok(Plan::NeedData(pending)) => pending.wanted(),
            _ => 0,
        },
        descriptor_sense: word.has(Word::DESCRIPTOR_SENSE),
    };
    answering.finish_plan(planned.unwrap_or_else(|sense| Plan::Done(Response::check(sense))))
}

/// Checks that the CDB is complete and that all its bits are honoured. NACA is not (SAM-5, 5.2: NORMACA is 0 here).
#[inline]
fn check_cdb(cdb: &Cdb, given: usize) -> Result<(), Sense> {
    if given < cdb_length(cdb[0]).max(1) {
        return Err(Sense::illegal_request(SenseCode::INVALID_FIELD_IN_CDB));
    }
    table::check_bits(cdb)
}

/// Checks unit attentions, reservations and readiness, if the word or the filter is not zero. Returns a response, or `None` if the command
/// may proceed.
#[cold]
fn begin_special(c: &Context<'_>) -> Result<Option<Response>, Sense> {
    let row = table::find(c.cdb);
    // A unit attention does not stop INQUIRY, REPORT LUNS and REQUEST SENSE (SAM-5, 5.14.3).
    if !matches!(c.cdb[0], INQUIRY | REPORT_LUNS | REQUEST_SENSE)
        && let Some(code) = c.nexus.pop_attention(c.unit.id())
    {
        return Err(Sense::new(SenseKey::UnitAttention, code));
    }
    replaced::check_known(c)?;
    let (access, needs) = match (row, c.unit.passthrough()) {
        (Some(row), None) => (table::access(row, c.cdb), row.needs),
        (Some(row), Some(how)) => (table::access(row, c.cdb), passthrough::needs(how, c.cdb)),
        // The device may write, as with a vendor specific command (SPC-5, 5.14.1).
        (None, Some(how)) => (Access::Write, passthrough::needs(how, c.cdb)),
        // Refused during dispatch.
        (None, None) => return Ok(None),
    };
    let state = c.unit.state();
    if state.is_out_of_date() && (access != Access::Always || persistent_reserve::is_one(c.cdb[0]))
    {
        return Ok(Some(Response::status(Status::Busy)));
    }
    if state
        .reservations
        .conflicts(c.nexus, access, table::allowed_under_reserve(c.cdb))
    {
        return Ok(Some(Response::status(Status::ReservationConflict)));
    }
    let access_state = state.access_state(c.nexus.port().group);
    if state.reservations.privileges(c.nexus) && access_state.is_active() {
        // The lock is held, so the word belongs to this state.
        c.nexus
            .remember_privilege(c.unit.id(), c.unit.word().epoch());
    }
    let leaves_failure = match c.cdb[0] {
        SANITIZE => state.progress.is_repaired_by(Operation::Sanitize),
        FORMAT_UNIT => state.progress.is_repaired_by(Operation::Format),
        _ => false,
    };
    if !leaves_failure {
        state.check_ready(c.nexus, needs)?;
    }
    Ok(None)
}

fn dispatch(c: &Context<'_>) -> Planned {
    match c.cdb[0] {
        opcode if supported::needs_sole_daemon(opcode, c.unit) => {
            Err(Sense::illegal_request(SenseCode::INVALID_OPCODE))
        }
        MAINTENANCE_OUT if !port_groups::may_set(c.nexus.port()) => {
            Err(Sense::illegal_request(SenseCode::INVALID_OPCODE))
        }
        TEST_UNIT_READY => good(),
        READ_6 => read_write::read_6(c),
        WRITE_6 => read_write::write_6(c),
        READ_10 => read_write::read_10(c),
        WRITE_10 => read_write::write_10(c),
        READ_16 => read_write::read_16(c),
        WRITE_16 => read_write::write_16(c),
        READ_12 => read_write::read_12(c),
        WRITE_12 => read_write::write_12(c),
        SYNCHRONIZE_CACHE_10 => read_write::synchronize_cache_10(c),
        SYNCHRONIZE_CACHE_16 => read_write::synchronize_cache_16(c),
        UNMAP => provisioning::unmap(c),
        WRITE_SAME_10 => provisioning::write_same_10(c),
        WRITE_SAME_16 => provisioning::write_same_16(c),
        VERIFY_10 => verify::verify_10(c),
        VERIFY_12 => verify::verify_12(c),
        VERIFY_16 => verify::verify_16(c),
        INQUIRY => inquiry::inquiry(c),
        REQUEST_SENSE => request_sense::request_sense(c),
        MODE_SELECT_6 => mode_select::mode_select_6(c),
        MODE_SELECT_10 => mode_select::mode_select_10(c),
        RESERVE_6 | RESERVE_10 => reserve::reserve(c),
        RELEASE_6 | RELEASE_10 => reserve::release(c),
        PERSISTENT_RESERVE_IN => persistent_reserve::persistent_reserve_in(c),
        PERSISTENT_RESERVE_OUT => persistent_reserve::persistent_reserve_out(c),
        MODE_SENSE_6 => mode_sense::mode_sense_6(c),
        MODE_SENSE_10 => mode_sense::mode_sense_10(c),
        START_STOP_UNIT => medium::start_stop_unit(c),
        SEND_DIAGNOSTIC => log_sense::send_diagnostic(c),
        PREVENT_ALLOW => medium::prevent_allow(c),
        PRE_FETCH_10 => read_write::pre_fetch_10(c),
        PRE_FETCH_16 => read_write::pre_fetch_16(c),
        WRITE_ATOMIC_16 => read_write::write_atomic_16(c),
        WRITE_AND_VERIFY_10 => compare_write::write_and_verify_10(c),
        WRITE_AND_VERIFY_12 => compare_write::write_and_verify_12(c),
        WRITE_AND_VERIFY_16 => compare_write::write_and_verify_16(c),
        ORWRITE_16 => compare_write::orwrite_16(c),
        COMPARE_AND_WRITE => compare_write::compare_and_write(c),
        SANITIZE => sanitize::sanitize(c),
        FORMAT_UNIT => format_unit::format_unit(c),
        EXTENDED_COPY => extended_copy::extended_copy(c),
        RECEIVE_COPY_RESULTS => receive_copy::receive_copy_results(c),
        LOG_SENSE => log_sense::log_sense(c),
        READ_DEFECT_DATA_10 => log_sense::read_defect_data_10(c),
        READ_DEFECT_DATA_12 => log_sense::read_defect_data_12(c),
        READ_CAPACITY_10 => capacity::read_capacity_10(c),
        REPORT_LUNS => report_luns::report_luns(c),
        SERVICE_ACTION_IN_16 => match c.cdb[1] & 0x1f {
            capacity::READ_CAPACITY_16 => capacity::read_capacity_16(c),
            lba_status::GET_LBA_STATUS => lba_status::get_lba_status(c),
            _ => invalid_service_action(),
        },
        MAINTENANCE_IN => match c.cdb[1] & 0x1f {
            supported::OPERATION_CODES => supported::operation_codes(c),
            supported::TASK_MANAGEMENT_FUNCTIONS => supported::task_management_functions(c),
            port_groups::TARGET_PORT_GROUPS => port_groups::report(c),
            _ => invalid_service_action(),
        },
        MAINTENANCE_OUT => match c.cdb[1] & 0x1f {
            port_groups::TARGET_PORT_GROUPS => port_groups::set(c),
            _ => invalid_service_action(),
        },
        _ => Err(Sense::illegal_request(SenseCode::INVALID_OPCODE)),
    }
}

/// Returns the error for an unsupported service action: byte 1, bits 4 to 0.
fn invalid_service_action() -> Planned {
    Err(Sense::cdb_bit(1, 4))
}

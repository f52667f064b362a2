//! REPORT SUPPORTED OPERATION CODES (SPC-5, 6.35), from the command table, and REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS.

use super::{Context, Planned, compare_write, port_groups, provisioning, read_write};
use crate::command::{be16, be32, opcode};
use crate::logical_unit::LogicalUnit;
use crate::sense::Sense;
use crate::table::{COMMANDS, Row};

/// Service action of MAINTENANCE IN.
pub(super) const OPERATION_CODES: u8 = 0x0c;

/// Service action of MAINTENANCE IN.
pub(super) const TASK_MANAGEMENT_FUNCTIONS: u8 = 0x0d;

pub(super) fn operation_codes(c: &Context<'_>) -> Planned {
    let timeouts = c.cdb[2] & 0x80 != 0;
    let (opcode, action) = (c.cdb[3], be16(c.cdb, 4));
    let rows = || supported(c).filter(|row| row.opcode() == opcode);
    let with_actions = rows().any(|row| row.action.is_some());
    let matching = rows().find(|row| row.action.is_none_or(|own| u16::from(own) == action));
    let data = match c.cdb[2] & 0x07 {
        0b000 => all(supported(c), timeouts),
        0b001 if with_actions => return Err(Sense::cdb_bit(2, 2)),
        0b001 => one(rows().next(), timeouts),
        0b010 if !with_actions => return Err(Sense::cdb_bit(2, 2)),
        0b010 => one(matching, timeouts),
        0b011 if with_actions || action == 0 => one(matching, timeouts),
        0b011 => one(None, timeouts),
        _ => return Err(Sense::cdb_bit(2, 2)),
    };
    c.data(data, be32(c.cdb, 6))
}

fn supported(c: &Context<'_>) -> impl Iterator<Item = &'static Row> {
    let may_unmap = provisioning::may_unmap(c);
    let may_compare_and_write = compare_write::is_there(c);
    let may_write_atomically = read_write::atomic_writes(c).is_some();
    let may_set_port_groups = port_groups::may_set(c.nexus.port());
    let unit = c.unit.clone();
    let is_there = move |row: &&Row| match row.opcode() {
        opcode if needs_sole_daemon(opcode, &unit) => false,
        opcode::UNMAP => may_unmap,
        opcode::WRITE_ATOMIC_16 => may_write_atomically,
        opcode::COMPARE_AND_WRITE => may_compare_and_write,
        opcode::MAINTENANCE_OUT => may_set_port_groups,
        _ => true,
    };
    COMMANDS.iter().filter(is_there)
}

/// Returns true for commands with promises that fail if other daemons serve the medium: reservations by RESERVE, which SPC-3 made obsolete,
/// persistent reservations without shared state, and an atomic ORWRITE.
#[inline]
pub(super) fn needs_sole_daemon(opcode: u8, unit: &LogicalUnit) -> bool {
    use opcode::*;
    match opcode {
        PERSISTENT_RESERVE_IN | PERSISTENT_RESERVE_OUT => {
            let state = unit.state();
            state.info.shared && state.sharing.is_none()
        }
        RESERVE_6 | RESERVE_10 | RELEASE_6 | RELEASE_10 | ORWRITE_16 => unit.state().info.shared,
        _ => false,
    }
}

/// Returns all commands: descriptors of 8 bytes, followed by timeouts of 12 if requested.
fn all(rows: impl Iterator<Item = &'static Row>, timeouts: bool) -> Vec<u8> {
    let mut list = Vec::new();
    for row in rows {
        let flags = if timeouts { 0x02 } else { 0x00 } | u8::from(row.action.is_some());
        let action = row.action.unwrap_or_default();
        list.extend([
            row.opcode(),
            0,
            0,
            action,
            0,
            flags,
            0,
            row.usage.len() as u8,
        ]);
        if timeouts {
            list.extend(TIMEOUTS);
        }
    }
    let mut data = (list.len() as u32).to_be_bytes().to_vec();
    data.extend(list);
    data
}

/// Returns one command: supported in conformance with the standard (011b) with its usage data, or not supported (001b).
fn one(row: Option<&Row>, timeouts: bool) -> Vec<u8> {
    let Some(row) = row else {
        return vec![0, 0x01, 0, 0];
    };
    let mut data = vec![0, 0x03, 0, row.usage.len() as u8];
    data.extend(row.usage);
    if timeouts {
        data[1] |= 0x80;
        data.extend(TIMEOUTS);
    }
    data
}

/// Command timeouts descriptor: nominal not specified, recommended 30 seconds.
const TIMEOUTS: [u8; 12] = [0x00, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 30];

/// REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS (SPC-5, 6.37): all except CLEAR ACA and WAKEUP.
pub(super) fn task_management_functions(c: &Context<'_>) -> Planned {
    let mut data = vec![0xde, 0x07, 0, 0];
    if c.cdb[2] & 0x80 != 0 {
        data[3] = 0x0c; // REPD: no time-outs given
        data.extend([0; 12]);
    }
    c.data(data, be32(c.cdb, 6))
}

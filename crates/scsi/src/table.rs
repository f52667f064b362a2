//! Every supported command, once: its CDB usage map and what a reservation does to it.
//!
//! REPORT SUPPORTED OPERATION CODES reports this table, and the path for special states asks it. A row's
//! `access` is the command's line in SPC-5, tables 66 and 67, and SBC-4, table 14, which a reader can hold
//! against it.

use crate::command::{Cdb, opcode::*};

/// What a reservation of another nexus does to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Allowed under every reservation.
    Always,
    /// Conflicts with an exclusive access reservation.
    Read,
    /// Conflicts with an exclusive access and with a write exclusive reservation.
    Write,
}

/// What a command needs of the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Works in every state.
    Nothing,
    /// Works unless the port's state is worse than standby, or the unit is being sanitized.
    Unit,
    /// Needs the medium.
    Medium,
}

/// One command.
#[derive(Debug)]
pub(crate) struct Row {
    /// The CDB usage data: the operation code (and service action) as they are, then a 1 for each bit that
    /// is looked at. As long as the CDB.
    pub usage: &'static [u8],
    /// Service action, for operation codes that have them.
    pub action: Option<u8>,
    /// What reservations do.
    pub access: Access,
    /// What it needs of the unit: a loaded medium, no sanitize operation.
    pub needs: Needs,
}

impl Row {
    pub fn opcode(&self) -> u8 {
        self.usage.first().copied().unwrap_or_default()
    }
}

const fn row(access: Access, needs: Needs, usage: &'static [u8]) -> Row {
    Row {
        usage,
        action: None,
        access,
        needs,
    }
}

const fn action(access: Access, needs: Needs, action: u8, usage: &'static [u8]) -> Row {
    Row {
        usage,
        action: Some(action),
        access,
        needs,
    }
}

use Access::{Always, Read, Write};
use Needs::{Medium, Nothing, Unit};

const X: u8 = 0xff;

/// Ascending by operation code and service action.
#[rustfmt::skip]
pub(crate) static COMMANDS: &[Row] = &[
    row(Always, Medium, &[TEST_UNIT_READY, 0, 0, 0, 0, 0x04]),
    row(Always, Nothing, &[REQUEST_SENSE, 0x01, 0, 0, X, 0x04]),
    row(Read,   Medium, &[READ_6, 0x1f, X, X, X, 0x04]),
    row(Write,  Medium, &[WRITE_6, 0x1f, X, X, X, 0x04]),
    row(Always, Nothing, &[INQUIRY, 0x01, X, X, X, 0x04]),
    row(Write,  Unit,   &[MODE_SELECT_6, 0x11, 0, 0, X, 0x04]),
    row(Always, Unit,   &[RESERVE_6, 0, 0, 0, 0, 0x04]),
    row(Always, Unit,   &[RELEASE_6, 0, 0, 0, 0, 0x04]),
    row(Read,   Unit,   &[MODE_SENSE_6, 0x08, X, X, X, 0x04]),
    row(Write,  Unit,   &[START_STOP_UNIT, 0x01, 0, 0x0f, 0xf7, 0x04]),
    row(Write,  Unit,   &[SEND_DIAGNOSTIC, 0xe4, 0, X, X, 0x04]),
    row(Write,  Unit,   &[PREVENT_ALLOW, 0, 0, 0, 0x03, 0x04]),
    row(Always, Medium, &[READ_CAPACITY_10, 0, X, X, X, X, 0, 0, 0x01, 0x04]),
    row(Read,   Medium, &[READ_10, 0xf8, X, X, X, X, 0, X, X, 0x04]),
    row(Write,  Medium, &[WRITE_10, 0xf8, X, X, X, X, 0, X, X, 0x04]),
    row(Write,  Medium, &[WRITE_AND_VERIFY_10, 0xf6, X, X, X, X, 0, X, X, 0x04]),
    row(Read,   Medium, &[VERIFY_10, 0xf6, X, X, X, X, 0, X, X, 0x04]),
    row(Read,   Medium, &[PRE_FETCH_10, 0x02, X, X, X, X, 0, X, X, 0x04]),
    row(Write,  Medium, &[SYNCHRONIZE_CACHE_10, 0x02, X, X, X, X, 0, X, X, 0x04]),
    row(Read,   Medium, &[READ_DEFECT_DATA_10, 0, 0x1f, 0, 0, 0, 0, X, X, 0x04]),
    row(Write,  Medium, &[WRITE_SAME_10, 0xf8, X, X, X, X, 0, X, X, 0x04]),
    row(Write,  Medium, &[UNMAP, 0x01, 0, 0, 0, 0, 0, X, X, 0x04]),
    action(Write, Medium, 0x01, &[SANITIZE, 0xa1, 0, 0, 0, 0, 0, X, X, 0x04]),
    action(Write, Medium, 0x02, &[SANITIZE, 0xa2, 0, 0, 0, 0, 0, X, X, 0x04]),
    action(Write, Medium, 0x03, &[SANITIZE, 0xa3, 0, 0, 0, 0, 0, X, X, 0x04]),
    action(Write, Medium, 0x1f, &[SANITIZE, 0xbf, 0, 0, 0, 0, 0, X, X, 0x04]),
    row(Always, Unit,   &[LOG_SENSE, 0x01, X, X, 0, X, X, X, X, 0x04]),
    row(Write,  Unit,   &[MODE_SELECT_10, 0x11, 0, 0, 0, 0, 0, X, X, 0x04]),
    row(Always, Unit,   &[RESERVE_10, 0, 0, 0, 0, 0, 0, 0, 0, 0x04]),
    row(Always, Unit,   &[RELEASE_10, 0, 0, 0, 0, 0, 0, 0, 0, 0x04]),
    row(Read,   Unit,   &[MODE_SENSE_10, 0x18, X, X, 0, 0, 0, X, X, 0x04]),
    action(Always, Nothing, 0x00, &[PERSISTENT_RESERVE_IN, 0x00, 0, 0, 0, 0, 0, X, X, 0x04]),
    action(Always, Nothing, 0x01, &[PERSISTENT_RESERVE_IN, 0x01, 0, 0, 0, 0, 0, X, X, 0x04]),
    action(Always, Nothing, 0x02, &[PERSISTENT_RESERVE_IN, 0x02, 0, 0, 0, 0, 0, X, X, 0x04]),
    action(Always, Nothing, 0x03, &[PERSISTENT_RESERVE_IN, 0x03, 0, 0, 0, 0, 0, X, X, 0x04]),
    action(Always, Nothing, 0x00, &[PERSISTENT_RESERVE_OUT, 0x00, X, 0, 0, X, X, X, X, 0x04]),
    action(Always, Nothing, 0x01, &[PERSISTENT_RESERVE_OUT, 0x01, X, 0, 0, X, X, X, X, 0x04]),
    action(Always, Nothing, 0x02, &[PERSISTENT_RESERVE_OUT, 0x02, X, 0, 0, X, X, X, X, 0x04]),
    action(Always, Nothing, 0x03, &[PERSISTENT_RESERVE_OUT, 0x03, X, 0, 0, X, X, X, X, 0x04]),
    action(Always, Nothing, 0x04, &[PERSISTENT_RESERVE_OUT, 0x04, X, 0, 0, X, X, X, X, 0x04]),
    action(Always, Nothing, 0x05, &[PERSISTENT_RESERVE_OUT, 0x05, X, 0, 0, X, X, X, X, 0x04]),
    action(Always, Nothing, 0x06, &[PERSISTENT_RESERVE_OUT, 0x06, X, 0, 0, X, X, X, X, 0x04]),
    action(Always, Nothing, 0x07, &[PERSISTENT_RESERVE_OUT, 0x07, X, 0, 0, X, X, X, X, 0x04]),
    action(Write, Medium, 0x00, &[EXTENDED_COPY, 0x00, 0, 0, 0, 0, 0, 0, 0, 0, X, X, X, X, 0, 0x04]),
    action(Write, Medium, 0x01, &[EXTENDED_COPY, 0x01, 0, 0, 0, 0, 0, 0, 0, 0, X, X, X, X, 0, 0x04]),
    action(Read, Unit, 0x00, &[RECEIVE_COPY_RESULTS, 0x00, X, 0, 0, 0, 0, 0, 0, 0, X, X, X, X, 0, 0x04]),
    action(Read, Unit, 0x03, &[RECEIVE_COPY_RESULTS, 0x03, X, 0, 0, 0, 0, 0, 0, 0, X, X, X, X, 0, 0x04]),
    action(Read, Unit, 0x04, &[RECEIVE_COPY_RESULTS, 0x04, X, 0, 0, 0, 0, 0, 0, 0, X, X, X, X, 0, 0x04]),
    action(Read, Unit, 0x05, &[RECEIVE_COPY_RESULTS, 0x05, X, X, X, X, 0, 0, 0, 0, X, X, X, X, 0, 0x04]),
    row(Read,   Medium, &[READ_16, 0xf8, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Write,  Medium, &[COMPARE_AND_WRITE, 0xf8, X, X, X, X, X, X, X, X, 0, 0, 0, X, 0, 0x04]),
    row(Write,  Medium, &[WRITE_16, 0xf8, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Write,  Medium, &[ORWRITE_16, 0xf8, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Write,  Medium, &[WRITE_AND_VERIFY_16, 0xf6, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Read,   Medium, &[VERIFY_16, 0xf6, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Read,   Medium, &[PRE_FETCH_16, 0x02, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Write,  Medium, &[SYNCHRONIZE_CACHE_16, 0x02, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Write,  Medium, &[WRITE_SAME_16, 0xf9, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Write,  Medium, &[WRITE_ATOMIC_16, 0xf8, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0x04]),
    action(Always, Medium, 0x10, &[SERVICE_ACTION_IN_16, 0x10, X, X, X, X, X, X, X, X, X, X, X, X, 0x01, 0x04]),
    action(Read, Medium, 0x12, &[SERVICE_ACTION_IN_16, 0x12, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Always, Nothing, &[REPORT_LUNS, 0, X, 0, 0, 0, X, X, X, X, 0, 0x04]),
    action(Always, Nothing, 0x0a, &[MAINTENANCE_IN, 0x2a, 0, 0, 0, 0, X, X, X, X, 0, 0x04]),
    action(Read, Nothing, 0x0c, &[MAINTENANCE_IN, 0x0c, 0x87, X, X, X, X, X, X, X, 0, 0x04]),
    action(Read, Nothing, 0x0d, &[MAINTENANCE_IN, 0x0d, 0x80, 0, 0, 0, X, X, X, X, 0, 0x04]),
    action(Write, Nothing, 0x0a, &[MAINTENANCE_OUT, 0x0a, 0, 0, 0, 0, X, X, X, X, 0, 0x04]),
    row(Read,   Medium, &[READ_12, 0xf8, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Write,  Medium, &[WRITE_12, 0xf8, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Write,  Medium, &[WRITE_AND_VERIFY_12, 0xf6, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Read,   Medium, &[VERIFY_12, 0xf6, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Read,   Medium, &[READ_DEFECT_DATA_12, 0x1f, 0, 0, 0, 0, X, X, X, X, 0, 0x04]),
];

/// A command's class for a reservation: that of its row, but for the commands whose fields decide.
pub(crate) fn access(row: &Row, cdb: &Cdb) -> Access {
    match row.opcode() {
        // starting is allowed, stopping, ejecting and power conditions are not
        START_STOP_UNIT if cdb[4] & 0xf3 == 0x01 => Always,
        // allowing removal is allowed, preventing it is not
        PREVENT_ALLOW if cdb[4] & 0x03 == 0 => Always,
        _ => row.access,
    }
}

/// The few commands that go on under another nexus' RESERVE (SPC-2, table 10).
pub(crate) fn allowed_under_reserve(cdb: &Cdb) -> bool {
    matches!(
        cdb[0],
        INQUIRY | REPORT_LUNS | REQUEST_SENSE | RESERVE_6 | RESERVE_10 | RELEASE_6 | RELEASE_10
    )
}

/// The row of a CDB: service actions are in bits 4 to 0 of byte 1.
pub(crate) fn find(cdb: &Cdb) -> Option<&'static Row> {
    COMMANDS.iter().find(|row| {
        row.opcode() == cdb[0] && row.action.is_none_or(|action| action == cdb[1] & 0x1f)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::cdb_length;

    #[test]
    fn rows_ascend_and_usage_maps_are_as_long_as_the_cdb() {
        for row in COMMANDS {
            assert_eq!(
                row.usage.len(),
                cdb_length(row.opcode()),
                "{:02x}",
                row.opcode()
            );
            if let Some(action) = row.action {
                assert_eq!(row.usage[1] & 0x1f, action, "{:02x}", row.opcode());
            }
        }
        for pair in COMMANDS.windows(2) {
            assert!(
                (pair[0].opcode(), pair[0].action) < (pair[1].opcode(), pair[1].action),
                "{:02x}",
                pair[1].opcode()
            );
        }
    }
}

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
    /// Needs the medium: not answered while the unit is stopped, ejected or being sanitized.
    pub medium: bool,
}

impl Row {
    pub fn opcode(&self) -> u8 {
        self.usage.first().copied().unwrap_or_default()
    }
}

const fn row(access: Access, medium: bool, usage: &'static [u8]) -> Row {
    Row {
        usage,
        action: None,
        access,
        medium,
    }
}

const fn action(access: Access, medium: bool, action: u8, usage: &'static [u8]) -> Row {
    Row {
        usage,
        action: Some(action),
        access,
        medium,
    }
}

use Access::{Always, Read, Write};

const X: u8 = 0xff;

/// Ascending by operation code and service action.
#[rustfmt::skip]
pub(crate) static COMMANDS: &[Row] = &[
    row(Always, true,  &[TEST_UNIT_READY, 0, 0, 0, 0, 0x04]),
    row(Always, false, &[REQUEST_SENSE, 0x01, 0, 0, X, 0x04]),
    row(Read,   true,  &[READ_6, 0x1f, X, X, X, 0x04]),
    row(Write,  true,  &[WRITE_6, 0x1f, X, X, X, 0x04]),
    row(Always, false, &[INQUIRY, 0x01, X, X, X, 0x04]),
    row(Read,   false, &[MODE_SENSE_6, 0x08, X, X, X, 0x04]),
    row(Always, false, &[START_STOP_UNIT, 0x01, 0, 0x0f, 0xf7, 0x04]),
    row(Always, true,  &[READ_CAPACITY_10, 0, X, X, X, X, 0, 0, 0x01, 0x04]),
    row(Read,   true,  &[READ_10, 0xf8, X, X, X, X, 0, X, X, 0x04]),
    row(Write,  true,  &[WRITE_10, 0xf8, X, X, X, X, 0, X, X, 0x04]),
    row(Read,   true,  &[VERIFY_10, 0xf6, X, X, X, X, 0, X, X, 0x04]),
    row(Write,  true,  &[SYNCHRONIZE_CACHE_10, 0x02, X, X, X, X, 0, X, X, 0x04]),
    row(Write,  true,  &[WRITE_SAME_10, 0xf8, X, X, X, X, 0, X, X, 0x04]),
    row(Write,  true,  &[UNMAP, 0x01, 0, 0, 0, 0, 0, X, X, 0x04]),
    row(Read,   false, &[MODE_SENSE_10, 0x18, X, X, 0, 0, 0, X, X, 0x04]),
    row(Read,   true,  &[READ_16, 0xf8, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Write,  true,  &[WRITE_16, 0xf8, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Read,   true,  &[VERIFY_16, 0xf6, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Write,  true,  &[SYNCHRONIZE_CACHE_16, 0x02, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Write,  true,  &[WRITE_SAME_16, 0xf9, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0x04]),
    action(Always, true, 0x10, &[SERVICE_ACTION_IN_16, 0x10, X, X, X, X, X, X, X, X, X, X, X, X, 0x01, 0x04]),
    row(Always, false, &[REPORT_LUNS, 0, X, 0, 0, 0, X, X, X, X, 0, 0x04]),
    action(Read, false, 0x0c, &[MAINTENANCE_IN, 0x0c, 0x87, X, X, X, X, X, X, X, 0, 0x04]),
    row(Read,   true,  &[READ_12, 0xf8, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Write,  true,  &[WRITE_12, 0xf8, X, X, X, X, X, X, X, X, 0, 0x04]),
    row(Read,   true,  &[VERIFY_12, 0xf6, X, X, X, X, X, X, X, X, 0, 0x04]),
];

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

//! Table of all supported commands: CDB usage maps and effects of reservations.
//!
//! REPORT SUPPORTED OPERATION CODES reports this table, and the path for special states uses it. A row's `access` is the command's line in
//! SPC-5, tables 66 and 67, and SBC-4, table 14, for comparison by the reader. [`check_bits`] refuses every bit of a CDB that is neither
//! honoured nor [`ignored`]; a test in `tests/cdb_bits.rs` compares the whole list with literals.

use crate::command::{Cdb, opcode::*};
use crate::sense::Sense;

/// Effect of another nexus' reservation on a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Allowed under every reservation.
    Always,
    /// Conflicts with an exclusive access reservation.
    Read,
    /// Conflicts with an exclusive access and with a write exclusive reservation.
    Write,
}

/// Required state of the unit for a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Any state.
    Nothing,
    /// A port that is not unavailable or offline.
    Port,
    /// A port in standby or better, and no sanitize or format operation.
    Unit,
    /// An active port, and no sanitize or format operation.
    Active,
    /// The medium; a port in standby suffices, so that initiators find the unit's size when they scan it.
    Capacity,
    /// The medium.
    Medium,
}

impl Needs {
    /// Returns true if a port in standby accepts the command (SPC-4, 5.15.2.4.4).
    pub fn allows_standby(self) -> bool {
        match self {
            Needs::Nothing | Needs::Port | Needs::Unit | Needs::Capacity => true,
            Needs::Active | Needs::Medium => false,
        }
    }
}

/// A supported command.
#[derive(Debug)]
pub(crate) struct Row {
    /// CDB usage data, as long as the CDB: the operation code (and service action), then a 1 for each bit that is honoured.
    pub usage: &'static [u8],
    /// Service action, for operation codes with service actions.
    pub action: Option<u8>,
    /// Effect of reservations.
    pub access: Access,
    /// Required state of the unit.
    pub needs: Needs,
}

impl Row {
    pub const fn opcode(&self) -> u8 {
        self.usage[0]
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
use Needs::{Active, Capacity, Medium, Nothing, Port, Unit};

const X: u8 = 0xff;

/// Rows in ascending order of operation code and service action.
#[rustfmt::skip]
const ROWS: &[Row] = &[
    row(Always, Medium, &[TEST_UNIT_READY, 0, 0, 0, 0, 0]),
    row(Always, Nothing, &[REQUEST_SENSE, 0x01, 0, 0, X, 0]),
    row(Write,  Medium, &[FORMAT_UNIT, 0x38, 0, 0, 0, 0]),
    row(Read,   Medium, &[READ_6, 0x1f, X, X, X, 0]),
    row(Write,  Medium, &[WRITE_6, 0x1f, X, X, X, 0]),
    row(Always, Nothing, &[INQUIRY, 0x01, X, X, X, 0]),
    row(Write,  Unit,   &[MODE_SELECT_6, 0x11, 0, 0, X, 0]),
    row(Always, Active, &[RESERVE_6, 0, 0, 0, 0, 0]),
    row(Always, Active, &[RELEASE_6, 0, 0, 0, 0, 0]),
    row(Read,   Unit,   &[MODE_SENSE_6, 0x08, X, X, X, 0]),
    row(Write,  Active, &[START_STOP_UNIT, 0x01, 0, 0x0f, 0xf7, 0]),
    row(Write,  Unit,   &[SEND_DIAGNOSTIC, 0x17, 0, 0, 0, 0]),
    row(Write,  Active, &[PREVENT_ALLOW, 0, 0, 0, 0x01, 0]),
    row(Always, Capacity, &[READ_CAPACITY_10, 0, X, X, X, X, 0, 0, 0x01, 0]),
    row(Read,   Medium, &[READ_10, 0x1a, X, X, X, X, 0, X, X, 0]),
    row(Write,  Medium, &[WRITE_10, 0x1a, X, X, X, X, 0, X, X, 0]),
    row(Write,  Medium, &[WRITE_AND_VERIFY_10, 0x16, X, X, X, X, 0, X, X, 0]),
    row(Read,   Medium, &[VERIFY_10, 0x16, X, X, X, X, 0, X, X, 0]),
    row(Read,   Medium, &[PRE_FETCH_10, 0x02, X, X, X, X, 0, X, X, 0]),
    row(Write,  Medium, &[SYNCHRONIZE_CACHE_10, 0x06, X, X, X, X, 0, X, X, 0]),
    row(Read,   Medium, &[READ_DEFECT_DATA_10, 0, 0x1f, 0, 0, 0, 0, X, X, 0]),
    row(Write,  Medium, &[WRITE_SAME_10, 0x18, X, X, X, X, 0, X, X, 0]),
    row(Write,  Medium, &[UNMAP, 0x01, 0, 0, 0, 0, 0, X, X, 0]),
    action(Write, Medium, 0x01, &[SANITIZE, 0xa1, 0, 0, 0, 0, 0, X, X, 0]),
    action(Write, Medium, 0x02, &[SANITIZE, 0xa2, 0, 0, 0, 0, 0, 0, 0, 0]),
    action(Write, Medium, 0x03, &[SANITIZE, 0xa3, 0, 0, 0, 0, 0, 0, 0, 0]),
    action(Write, Medium, 0x1f, &[SANITIZE, 0xbf, 0, 0, 0, 0, 0, 0, 0, 0]),
    row(Always, Unit,   &[LOG_SENSE, 0, X, X, 0, X, X, X, X, 0]),
    row(Write,  Unit,   &[MODE_SELECT_10, 0x11, 0, 0, 0, 0, 0, X, X, 0]),
    row(Always, Active, &[RESERVE_10, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    row(Always, Active, &[RELEASE_10, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    row(Read,   Unit,   &[MODE_SENSE_10, 0x18, X, X, 0, 0, 0, X, X, 0]),
    action(Always, Port, 0x00, &[PERSISTENT_RESERVE_IN, 0x00, 0, 0, 0, 0, 0, X, X, 0]),
    action(Always, Port, 0x01, &[PERSISTENT_RESERVE_IN, 0x01, 0, 0, 0, 0, 0, X, X, 0]),
    action(Always, Port, 0x02, &[PERSISTENT_RESERVE_IN, 0x02, 0, 0, 0, 0, 0, X, X, 0]),
    action(Always, Port, 0x03, &[PERSISTENT_RESERVE_IN, 0x03, 0, 0, 0, 0, 0, X, X, 0]),
    action(Always, Port, 0x00, &[PERSISTENT_RESERVE_OUT, 0x00, X, 0, 0, X, X, X, X, 0]),
    action(Always, Port, 0x01, &[PERSISTENT_RESERVE_OUT, 0x01, X, 0, 0, X, X, X, X, 0]),
    action(Always, Port, 0x02, &[PERSISTENT_RESERVE_OUT, 0x02, X, 0, 0, X, X, X, X, 0]),
    action(Always, Port, 0x03, &[PERSISTENT_RESERVE_OUT, 0x03, X, 0, 0, X, X, X, X, 0]),
    action(Always, Port, 0x04, &[PERSISTENT_RESERVE_OUT, 0x04, X, 0, 0, X, X, X, X, 0]),
    action(Always, Port, 0x05, &[PERSISTENT_RESERVE_OUT, 0x05, X, 0, 0, X, X, X, X, 0]),
    action(Always, Port, 0x06, &[PERSISTENT_RESERVE_OUT, 0x06, X, 0, 0, X, X, X, X, 0]),
    action(Always, Port, 0x07, &[PERSISTENT_RESERVE_OUT, 0x07, X, 0, 0, X, X, X, X, 0]),
    action(Write, Medium, 0x00, &[EXTENDED_COPY, 0x00, 0, 0, 0, 0, 0, 0, 0, 0, X, X, X, X, 0, 0]),
    action(Write, Medium, 0x01, &[EXTENDED_COPY, 0x01, 0, 0, 0, 0, 0, 0, 0, 0, X, X, X, X, 0, 0]),
    action(Read, Active, 0x00, &[RECEIVE_COPY_RESULTS, 0x00, X, 0, 0, 0, 0, 0, 0, 0, X, X, X, X, 0, 0]),
    action(Read, Active, 0x03, &[RECEIVE_COPY_RESULTS, 0x03, X, 0, 0, 0, 0, 0, 0, 0, X, X, X, X, 0, 0]),
    action(Read, Active, 0x04, &[RECEIVE_COPY_RESULTS, 0x04, X, 0, 0, 0, 0, 0, 0, 0, X, X, X, X, 0, 0]),
    action(Read, Active, 0x05, &[RECEIVE_COPY_RESULTS, 0x05, X, X, X, X, 0, 0, 0, 0, X, X, X, X, 0, 0]),
    row(Read,   Medium, &[READ_16, 0x1a, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0]),
    row(Write,  Medium, &[COMPARE_AND_WRITE, 0x1a, X, X, X, X, X, X, X, X, 0, 0, 0, X, 0, 0]),
    row(Write,  Medium, &[WRITE_16, 0x1a, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0]),
    row(Write,  Medium, &[ORWRITE_16, 0x1a, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0]),
    row(Write,  Medium, &[WRITE_AND_VERIFY_16, 0x16, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0]),
    row(Read,   Medium, &[VERIFY_16, 0x16, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0]),
    row(Read,   Medium, &[PRE_FETCH_16, 0x02, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0]),
    row(Write,  Medium, &[SYNCHRONIZE_CACHE_16, 0x06, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0]),
    row(Write,  Medium, &[WRITE_SAME_16, 0x19, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0]),
    row(Write,  Medium, &[WRITE_ATOMIC_16, 0x18, X, X, X, X, X, X, X, X, 0, 0, X, X, 0, 0]),
    action(Always, Capacity, 0x10, &[SERVICE_ACTION_IN_16, 0x10, X, X, X, X, X, X, X, X, X, X, X, X, 0x01, 0]),
    action(Read, Medium, 0x12, &[SERVICE_ACTION_IN_16, 0x12, X, X, X, X, X, X, X, X, X, X, X, X, 0, 0]),
    row(Always, Nothing, &[REPORT_LUNS, 0, X, 0, 0, 0, X, X, X, X, 0, 0]),
    action(Always, Nothing, 0x0a, &[MAINTENANCE_IN, 0x2a, 0, 0, 0, 0, X, X, X, X, 0, 0]),
    action(Read, Port, 0x0c, &[MAINTENANCE_IN, 0x0c, 0x87, X, X, X, X, X, X, X, 0, 0]),
    action(Read, Port, 0x0d, &[MAINTENANCE_IN, 0x0d, 0x80, 0, 0, 0, X, X, X, X, 0, 0]),
    action(Write, Nothing, 0x0a, &[MAINTENANCE_OUT, 0x0a, 0, 0, 0, 0, X, X, X, X, 0, 0]),
    row(Read,   Medium, &[READ_12, 0x1a, X, X, X, X, X, X, X, X, 0, 0]),
    row(Write,  Medium, &[WRITE_12, 0x1a, X, X, X, X, X, X, X, X, 0, 0]),
    row(Write,  Medium, &[WRITE_AND_VERIFY_12, 0x16, X, X, X, X, X, X, X, X, 0, 0]),
    row(Read,   Medium, &[VERIFY_12, 0x16, X, X, X, X, X, X, X, X, 0, 0]),
    row(Read,   Medium, &[READ_DEFECT_DATA_12, 0x1f, 0, 0, 0, 0, X, X, X, X, 0, 0]),
];

pub(crate) static COMMANDS: &[Row] = ROWS;

/// Returns a command's class for reservations: that of its row, except for commands with fields that decide it.
pub(crate) fn access(row: &Row, cdb: &Cdb) -> Access {
    match row.opcode() {
        // Starting is allowed; stopping, ejecting and power conditions are not.
        START_STOP_UNIT if cdb[4] & 0xf3 == 0x01 => Always,
        // Allowing removal is allowed; preventing it is not.
        PREVENT_ALLOW if cdb[4] & 0x03 == 0 => Always,
        _ => row.access,
    }
}

/// Returns true for the few commands that are allowed under another nexus' RESERVE (SPC-2, table 10).
pub(crate) fn allowed_under_reserve(cdb: &Cdb) -> bool {
    matches!(
        cdb[0],
        INQUIRY | REPORT_LUNS | REQUEST_SENSE | RESERVE_6 | RESERVE_10 | RELEASE_6 | RELEASE_10
    )
}

/// Index of the first row of each operation code; the number of rows if there is none.
static FIRST: [u8; 256] = {
    const { assert!(ROWS.len() < 256) };
    let mut first = [ROWS.len() as u8; 256];
    let mut at = ROWS.len();
    while at > 0 {
        at -= 1;
        first[ROWS[at].opcode() as usize] = at as u8;
    }
    first
};

/// Returns the index of a CDB's row. Service actions are in bits 4 to 0 of byte 1.
fn row_index(cdb: &Cdb) -> Option<usize> {
    let first = usize::from(FIRST[usize::from(cdb[0])]);
    let rows = COMMANDS.get(first..).unwrap_or_default().iter();
    let mut of_opcode = rows.take_while(|row| row.opcode() == cdb[0]);
    let at = of_opcode.position(|row| row.action.is_none_or(|action| action == cdb[1] & 0x1f))?;
    Some(first + at)
}

pub(crate) fn find(cdb: &Cdb) -> Option<&'static Row> {
    COMMANDS.get(row_index(cdb)?)
}

/// Operation codes of SCSI-2 that have ignored the three highest bits of byte 1 since then.
const SCSI_2: &[u8] = &[
    TEST_UNIT_READY,
    REQUEST_SENSE,
    READ_6,
    WRITE_6,
    INQUIRY,
    MODE_SELECT_6,
    RESERVE_6,
    RELEASE_6,
    MODE_SENSE_6,
    START_STOP_UNIT,
    PREVENT_ALLOW,
    READ_CAPACITY_10,
    PRE_FETCH_10,
    SYNCHRONIZE_CACHE_10,
    READ_DEFECT_DATA_10,
    LOG_SENSE,
    MODE_SELECT_10,
    RESERVE_10,
    RELEASE_10,
    MODE_SENSE_10,
];

/// Returns the offset of the GROUP NUMBER field for an operation code.
const fn group_number_at(opcode: u8) -> Option<usize> {
    match opcode {
        READ_10 | WRITE_10 | WRITE_AND_VERIFY_10 | VERIFY_10 | PRE_FETCH_10
        | SYNCHRONIZE_CACHE_10 | WRITE_SAME_10 | UNMAP => Some(6),
        READ_12 | WRITE_12 | WRITE_AND_VERIFY_12 | VERIFY_12 => Some(10),
        READ_16 | COMPARE_AND_WRITE | WRITE_16 | ORWRITE_16 | WRITE_AND_VERIFY_16 | VERIFY_16
        | PRE_FETCH_16 | SYNCHRONIZE_CACHE_16 | WRITE_SAME_16 | WRITE_ATOMIC_16 => Some(14),
        _ => None,
    }
}

/// Returns the bits of a CDB that are ignored, because initiators set them and nothing depends on them:
///
/// - the LUN of SCSI-2, which SCSI-2 initiators also put into byte 1, and Linux until it has read INQUIRY data;
/// - GROUP NUMBER, which selects a group of statistics, if there are any (SBC-3, 4.22).
const fn ignored(opcode: u8) -> u128 {
    let mut bytes = [0; 16];
    let mut at = 0;
    while at < SCSI_2.len() {
        if SCSI_2[at] == opcode {
            bytes[1] = 0xe0;
        }
        at += 1;
    }
    if let Some(at) = group_number_at(opcode) {
        bytes[at] = 0x3f;
    }
    u128::from_be_bytes(bytes)
}

/// Permitted bits for each row's command, first byte highest. Bytes after the CDB are not checked.
static ALLOWED: [u128; ROWS.len()] = {
    let mut allowed = [0; ROWS.len()];
    let mut row = 0;
    while row < ROWS.len() {
        let mut bytes = [0xff; 16];
        let mut at = 1;
        while at < ROWS[row].usage.len() {
            bytes[at] = ROWS[row].usage[at];
            at += 1;
        }
        allowed[row] = u128::from_be_bytes(bytes) | ignored(ROWS[row].opcode());
        row += 1;
    }
    allowed
};

/// A field of several bits, some or all of them refused: sense data points to its first bit (SPC-5, 4.4.2.4.2).
struct Field {
    opcodes: &'static [u8],
    first: u8,
    last: u8,
    /// Bits within one byte.
    mask: u8,
}

const FIELDS: &[Field] = &[
    // FMTPINFO
    Field {
        opcodes: &[FORMAT_UNIT],
        first: 1,
        last: 1,
        mask: 0xc0,
    },
    // DEFECT LIST FORMAT
    Field {
        opcodes: &[FORMAT_UNIT],
        first: 1,
        last: 1,
        mask: 0x07,
    },
    // RDPROTECT, WRPROTECT, VRPROTECT, ORPROTECT
    Field {
        opcodes: &[
            READ_10,
            WRITE_10,
            WRITE_AND_VERIFY_10,
            VERIFY_10,
            WRITE_SAME_10,
            READ_12,
            WRITE_12,
            WRITE_AND_VERIFY_12,
            VERIFY_12,
            READ_16,
            COMPARE_AND_WRITE,
            WRITE_16,
            ORWRITE_16,
            WRITE_AND_VERIFY_16,
            VERIFY_16,
            WRITE_SAME_16,
            WRITE_ATOMIC_16,
        ],
        first: 1,
        last: 1,
        mask: 0xe0,
    },
    // SELF-TEST CODE, PARAMETER DATA FORMAT
    Field {
        opcodes: &[SEND_DIAGNOSTIC, MAINTENANCE_IN],
        first: 1,
        last: 1,
        mask: 0xe0,
    },
    // PARAMETER LIST LENGTH
    Field {
        opcodes: &[SEND_DIAGNOSTIC],
        first: 3,
        last: 4,
        mask: 0xff,
    },
    Field {
        opcodes: &[SANITIZE],
        first: 7,
        last: 8,
        mask: 0xff,
    },
    // ATOMIC BOUNDARY
    Field {
        opcodes: &[WRITE_ATOMIC_16],
        first: 10,
        last: 11,
        mask: 0xff,
    },
    // ADDRESS DESCRIPTOR INDEX
    Field {
        opcodes: &[READ_DEFECT_DATA_12],
        first: 2,
        last: 5,
        mask: 0xff,
    },
];

/// Returns an error if a CDB has bits that are not honoured.
#[inline]
pub(crate) fn check_bits(cdb: &Cdb) -> Result<(), Sense> {
    // An unknown command is refused during dispatch.
    let Some(allowed) = row_index(cdb).and_then(|at| ALLOWED.get(at)) else {
        return Ok(());
    };
    match u128::from_be_bytes(*cdb) & !allowed {
        0 => Ok(()),
        refused => Err(refusal(cdb[0], refused)),
    }
}

/// Points to the first bit that is refused, or to its field.
#[cold]
fn refusal(opcode: u8, refused: u128) -> Sense {
    let first = refused.leading_zeros();
    let (byte, bit) = ((first / 8) as u8, 7 - (first % 8) as u8);
    let field = FIELDS.iter().find(|field| {
        field.opcodes.contains(&opcode)
            && (field.first..=field.last).contains(&byte)
            && field.mask & 1 << bit != 0
    });
    match field {
        None => Sense::cdb_bit(byte.into(), bit),
        Some(field) if field.mask == 0xff => Sense::cdb_field(field.first.into()),
        Some(field) => Sense::cdb_bit(byte.into(), 7 - field.mask.leading_zeros() as u8),
    }
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

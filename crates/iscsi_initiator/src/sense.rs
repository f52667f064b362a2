//! Sense data as text (SPC-4, 4.5).

use std::fmt;

/// Sense key, additional sense code and qualifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sense {
    /// Sense key.
    pub key: u8,
    /// Additional sense code.
    pub code: u8,
    /// Additional sense code qualifier.
    pub qualifier: u8,
}

/// Sense keys by their values (SPC-4, table 43).
const KEYS: [&str; 16] = [
    "NO SENSE",
    "RECOVERED ERROR",
    "NOT READY",
    "MEDIUM ERROR",
    "HARDWARE ERROR",
    "ILLEGAL REQUEST",
    "UNIT ATTENTION",
    "DATA PROTECT",
    "BLANK CHECK",
    "VENDOR SPECIFIC",
    "COPY ABORTED",
    "ABORTED COMMAND",
    "reserved",
    "VOLUME OVERFLOW",
    "MISCOMPARE",
    "COMPLETED",
];

/// Additional sense codes of disks (SPC-4, annex F).
const CODES: [(u8, u8, &str); 26] = [
    (0x04, 0x01, "becoming ready"),
    (0x04, 0x02, "initializing command required"),
    (0x0c, 0x00, "write error"),
    (0x11, 0x00, "unrecovered read error"),
    (0x1d, 0x00, "miscompare during verify operation"),
    (0x20, 0x00, "invalid command operation code"),
    (0x21, 0x00, "logical block address out of range"),
    (0x24, 0x00, "invalid field in CDB"),
    (0x25, 0x00, "logical unit not supported"),
    (0x26, 0x00, "invalid field in parameter list"),
    (0x26, 0x04, "invalid release of persistent reservation"),
    (0x27, 0x00, "write protected"),
    (0x27, 0x07, "space allocation failed write protect"),
    (0x29, 0x00, "power on, reset, or bus device reset occurred"),
    (0x29, 0x07, "I_T nexus loss occurred"),
    (0x2a, 0x01, "mode parameters changed"),
    (0x2a, 0x03, "reservations preempted"),
    (0x2a, 0x04, "reservations released"),
    (0x2a, 0x05, "registrations preempted"),
    (0x2a, 0x09, "capacity data has changed"),
    (0x2f, 0x00, "commands cleared by another initiator"),
    (0x3a, 0x00, "medium not present"),
    (0x3f, 0x03, "INQUIRY data has changed"),
    (0x3f, 0x0e, "reported LUNs data has changed"),
    (0x44, 0x00, "internal target failure"),
    (0x55, 0x03, "insufficient resources"),
];

impl Sense {
    /// UNIT ATTENTION.
    pub const UNIT_ATTENTION: u8 = 6;

    /// Returns true for deferred sense data (SPC-4, 4.5.5): they concern an earlier command, and the command that they arrive
    /// with was not executed.
    pub fn is_deferred(data: &[u8]) -> bool {
        matches!(data.first().map(|first| first & 0x7f), Some(0x71 | 0x73))
    }

    /// Returns true if a command with CHECK CONDITION was executed: NO SENSE or RECOVERED ERROR, not deferred.
    pub fn is_success(data: &[u8]) -> bool {
        let sense = Sense::parse(data);
        sense.is_some_and(|sense| sense.key <= 1) && !Sense::is_deferred(data)
    }

    /// Parses fixed and descriptor format.
    pub fn parse(data: &[u8]) -> Option<Sense> {
        let at = |index: usize| data.get(index).copied().unwrap_or(0);
        let (key, code, qualifier) = match data.first()? & 0x7f {
            0x70 | 0x71 => (at(2), at(12), at(13)),
            0x72 | 0x73 => (at(1), at(2), at(3)),
            _ => return None,
        };
        Some(Sense {
            key: key & 0x0f,
            code,
            qualifier,
        })
    }
}

impl fmt::Display for Sense {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sense {
            key,
            code,
            qualifier,
        } = *self;
        let name = KEYS.get(usize::from(key)).unwrap_or(&"reserved");
        write!(f, "{name}, {code:02x}h/{qualifier:02x}h")?;
        let known = CODES.iter().find(|(c, q, _)| (*c, *q) == (code, qualifier));
        match known {
            Some((.., text)) => write!(f, " ({text})"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sense_formats_are_described() {
        let fixed = [
            0xf0, 0, 0x06, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x2a, 0x09, 0, 0, 0, 0,
        ];
        let descriptor = [0x72, 0x06, 0x2a, 0x09, 0, 0, 0, 0];
        for data in [&fixed[..], &descriptor[..]] {
            let sense = Sense::parse(data).unwrap();
            let expected = "UNIT ATTENTION, 2ah/09h (capacity data has changed)";
            assert_eq!(sense.to_string(), expected);
        }
        assert_eq!(Sense::parse(&[]), None);
        assert_eq!(Sense::parse(&[0x7f, 1, 2]), None);
        assert_eq!(
            Sense::parse(&[0x72, 0x05]).unwrap().to_string(),
            "ILLEGAL REQUEST, 00h/00h"
        );
    }
}

//! FORMAT UNIT (SBC-3, 5.3; SBC-4, 5.4).
//!
//! There are no defects to manage, and without an initialization pattern nothing is written: the content of the blocks is then vendor
//! specific, and they stay unchanged. With a pattern every block is overwritten, as by SANITIZE. After a failure the medium is format
//! corrupted until a format or sanitize operation succeeds.

use std::sync::Arc;

use super::overwriting::{erasing_pass, pattern_block, plan};
use super::parameter_list::check_bits;
use super::{Context, Planned};
use crate::logical_unit::LogicalUnit;
use crate::plan::{Pending, Plan};
use crate::response::Response;
use crate::sanitizing::{Pass, SavedOperation};
use crate::sense::{Sense, SenseCode};
use crate::unit_state::{Operation, Progress};

const LONGLIST: u8 = 0x20;
const FMTDATA: u8 = 0x10;

/// Flags of the parameter list header.
const FOV: u8 = 0x80;
/// DPRY, DCRT and STPF: accepted with any value, because there is no defect list and no certification.
const DEFECTS: u8 = 0x70;
const IP: u8 = 0x08;
const IMMED: u8 = 0x02;

const DESCRIPTOR_LENGTH: usize = 4;
/// Initialization pattern types.
const DEFAULT_PATTERN: u8 = 0x00;
const REPEATED_PATTERN: u8 = 0x01;

/// FORMAT UNIT. LONGLIST and CMPLST are ignored without FMTDATA, and CMPLST without a list.
pub(super) fn format_unit(c: &Context<'_>) -> Planned {
    c.check_writable()?;
    let unit = Arc::clone(c.unit);
    if c.cdb[1] & FMTDATA == 0 {
        return Ok(Format::default().begin(unit));
    }
    let header_length = if c.cdb[1] & LONGLIST == 0 { 4 } else { 8 };
    let block_size = unit.geometry().block_size() as usize;
    // The CDB does not contain the length of the list: all data-out is accepted up to the maximum.
    let longest = header_length + DESCRIPTOR_LENGTH + block_size;
    Ok(Pending::plan(
        c.data_out.min(longest as u64),
        c.data_out,
        move |list: &[u8]| match Format::parse(list, header_length, block_size) {
            Ok(format) => format.begin(unit),
            Err(sense) => Plan::Done(sense.into()),
        },
    ))
}

/// Content of the blocks after the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pattern<'a> {
    Default,
    Repeated(&'a [u8]),
}

#[derive(Default)]
struct Format<'a> {
    immediate: bool,
    pattern: Option<Pattern<'a>>,
}

impl<'a> Format<'a> {
    fn parse(list: &'a [u8], header_length: usize, block_size: usize) -> Result<Format<'a>, Sense> {
        let too_short = Sense::illegal_request(SenseCode::PARAMETER_LIST_LENGTH_ERROR);
        let (header, rest) = list.split_at_checked(header_length).ok_or(too_short)?;
        let (&[protection, flags], header) = header.split_first_chunk().ok_or(too_short)?;
        // PROTECTION FIELDS USAGE 000b.
        check_bits(0, protection, 0, &[0x07])?;
        // DSP is obsolete, bit 0 vendor specific; without FOV there are no options.
        let options = if flags & FOV == 0 { 0 } else { DEFECTS | IP };
        check_bits(1, flags, FOV | IMMED | options, &[])?;
        let defects = match *header {
            [reserved, interval, ref defects @ ..] if !defects.is_empty() => {
                check_bits(2, reserved, 0, &[])?;
                // P_I_INFORMATION, PROTECTION INTERVAL EXPONENT.
                check_bits(3, interval, 0, &[0xf0, 0x0f])?;
                defects
            }
            _ => header,
        };
        // DEFECT LIST LENGTH: no block can be reassigned.
        if defects.iter().any(|&byte| byte != 0) {
            return Err(Sense::parameter_field(
                (header_length - defects.len()) as u16,
            ));
        }
        let pattern = match flags & IP {
            0 => None,
            _ => Some(Pattern::parse(rest, header_length as u16, block_size)?),
        };
        Ok(Format {
            immediate: flags & IMMED != 0,
            pattern,
        })
    }

    fn begin(self, unit: Arc<LogicalUnit>) -> Plan {
        let corrupted = Progress::Failed(Operation::Format);
        let pattern = match self.pattern {
            None if unit.state().progress == corrupted => Pattern::Default,
            None => return Plan::Done(Response::good()),
            Some(pattern) => pattern,
        };
        let pass = match pattern {
            Pattern::Default => erasing_pass(&unit),
            Pattern::Repeated(bytes) => {
                let block_size = unit.geometry().block_size() as usize;
                Pass::Write(pattern_block(bytes, block_size))
            }
        };
        let saved = SavedOperation {
            operation: Operation::Format,
            failed: false,
            may_exit: false,
            pass: 0,
            passes: vec![pass],
        };
        plan(unit, saved, self.immediate)
    }
}

impl Pattern<'_> {
    /// Parses the initialization pattern descriptor. `at`: its offset in the list.
    fn parse(descriptor: &[u8], at: u16, block_size: usize) -> Result<Pattern<'_>, Sense> {
        let too_short = Sense::illegal_request(SenseCode::PARAMETER_LIST_LENGTH_ERROR);
        let (&[flags, kind, high, low], rest) = descriptor.split_first_chunk().ok_or(too_short)?;
        // IP MODIFIER 00b. SI is refused: it would include blocks that are no longer in use.
        check_bits(at, flags, 0, &[0xc0])?;
        let length = usize::from(u16::from_be_bytes([high, low]));
        match kind {
            DEFAULT_PATTERN if length == 0 => Ok(Pattern::Default),
            REPEATED_PATTERN if (1..=block_size).contains(&length) => {
                rest.get(..length).map(Pattern::Repeated).ok_or(too_short)
            }
            DEFAULT_PATTERN | REPEATED_PATTERN => Err(Sense::parameter_field(at + 2)),
            _ => Err(Sense::parameter_field(at + 1)),
        }
    }
}

//! Commands that read, compare or combine, and write: COMPARE AND WRITE, ORWRITE, WRITE AND VERIFY (SBC-4, 5.3, 5.9 and 5.50). The first
//! two lock their range, except for a COMPARE AND WRITE executed by the device.

use std::sync::Arc;

use block::{CompareAndWrite as By, DiskInfo, IoFlags, IoOutcome, IoRequest};

use super::read_write::{force_unit_access, write_length};
use super::verify::Verify;
use super::{Context, Planned, good};
use crate::command::{be16, be32, be64};
use crate::logical_unit::DiskId;
use crate::plan::{DATA_OUT_MAX, Exclusive, Pending, Plan, PlanStep, Program, Run, SCRATCH_MAX};
use crate::response::Response;
use crate::sense::{Sense, SenseCode, SenseKey};

/// Maximum length that COMPARE AND WRITE compares, in bytes. The write has the same length.
const COMPARE_AND_WRITE_MAX: u64 = 2 << 20;
const _: () = assert!(2 * COMPARE_AND_WRITE_MAX <= DATA_OUT_MAX as u64);

/// Maximum number of blocks of COMPARE AND WRITE, for the block limits page; 0 if the unit does not support the command.
pub(super) fn compare_and_write_blocks_max(info: &DiskInfo) -> u64 {
    let bytes = match info.compare_and_write {
        None => 0,
        Some(By::Emulated) => COMPARE_AND_WRITE_MAX,
        Some(By::Device { boundary }) => boundary.min(SCRATCH_MAX as u64 / 2),
    };
    (bytes >> info.geometry.block_shift()).min(255)
}

pub(super) fn is_there(c: &Context<'_>) -> bool {
    compare_and_write_blocks_max(&c.unit.state().info) > 0
}

/// A validated range of the unit's disk.
#[derive(Clone, Copy)]
struct Target {
    disk: DiskId,
    offset: u64,
    length: u64,
    flags: IoFlags,
}

impl Target {
    fn exclusive(&self) -> Option<Exclusive> {
        Some(Exclusive {
            disk: self.disk,
            offset: self.offset,
            length: self.length,
        })
    }

    fn scratch(&self) -> usize {
        self.length.min(SCRATCH_MAX as u64) as usize
    }
}

fn target(c: &Context<'_>, lba: u64, blocks: u64, flags: IoFlags) -> Result<Target, Sense> {
    c.check_writable()?;
    let (offset, length) = c.range(lba, blocks)?;
    Ok(Target {
        disk: c.unit.disk(),
        offset,
        length,
        flags,
    })
}

pub(super) fn compare_and_write(c: &Context<'_>) -> Planned {
    let (blocks_max, by) = {
        let state = c.unit.state();
        let info = &state.info;
        (compare_and_write_blocks_max(info), info.compare_and_write)
    };
    if blocks_max == 0 {
        return Err(Sense::illegal_request(SenseCode::INVALID_OPCODE));
    }
    let blocks = u64::from(c.cdb[13]);
    let target = target(c, be64(c.cdb, 2), blocks, force_unit_access(c))?;
    if blocks > blocks_max {
        return Err(Sense::cdb_field(13));
    }
    // Exactly both halves.
    let wanted = 2 * target.length;
    if c.data_out != wanted {
        return Err(Sense::cdb_field(13));
    }
    if blocks == 0 {
        return good();
    }
    if let Some(by @ By::Device { .. }) = by {
        return on_device(c, by, target);
    }
    Ok(Pending::keeping(wanted, c.data_out, move |mut compare| {
        let write = compare.split_off(compare.len() / 2);
        let program = CompareAndWrite {
            target,
            compare,
            write: Write {
                target,
                data: Arc::new(write),
                done: 0,
            },
            done: 0,
            compared: false,
        };
        Run::exclusive(program, target.scratch(), target.exclusive())
    }))
}

/// Plans a COMPARE AND WRITE executed by the device. A range that the device does not support is refused: emulation would not be atomic for
/// other hosts.
fn on_device(c: &Context<'_>, by: By, target: Target) -> Planned {
    if !by.is_done_by_device(target.offset, target.length) {
        return Err(Sense::cdb_field(13));
    }
    let wanted = 2 * target.length;
    Ok(Pending::keeping(wanted, c.data_out, move |data| {
        let program = OnDevice { target, data };
        Run::plan(program, wanted as usize)
    }))
}

struct OnDevice {
    target: Target,
    data: Vec<u8>,
}

impl Program for OnDevice {
    fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> PlanStep {
        match last {
            Some(Ok(())) => return PlanStep::Done(Response::good()),
            // No INFORMATION field: devices do not report the offset of the difference reliably.
            Some(Err(error)) => return PlanStep::Done(Sense::of_io_error(error).into()),
            None => {}
        }
        let length = self.data.len();
        if let Some(scratch) = scratch.get_mut(..length) {
            scratch.copy_from_slice(&self.data);
        }
        let Target { offset, flags, .. } = self.target;
        PlanStep::Io {
            disk: self.target.disk,
            request: IoRequest::compare_and_write(offset, self.target.length).flagged(flags),
            scratch: 0..length,
        }
    }
}

struct CompareAndWrite {
    target: Target,
    compare: Vec<u8>,
    write: Write,
    done: usize,
    compared: bool,
}

impl Program for CompareAndWrite {
    fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> PlanStep {
        if self.compared {
            return self.write.next(last, scratch);
        }
        let rest = self.compare.get(self.done..).unwrap_or_default();
        let piece = rest.len().min(SCRATCH_MAX);
        match last {
            None => {}
            Some(Err(error)) => return PlanStep::Done(Sense::of_io_error(error).into()),
            Some(Ok(())) => {
                if let Some(at) = rest.iter().zip(&*scratch).position(|(a, b)| a != b)
                    && at < piece
                {
                    let code = SenseCode::MISCOMPARE_DURING_VERIFY;
                    let sense = Sense::new(SenseKey::Miscompare, code);
                    let at = (self.done + at) as u64;
                    return PlanStep::Done(sense.with_information(at).into());
                }
                self.done += piece;
            }
        }
        let piece = (self.compare.len() - self.done).min(SCRATCH_MAX);
        if piece == 0 {
            self.compared = true;
            return self.write.next(None, scratch);
        }
        let request = IoRequest::read(self.target.offset + self.done as u64, piece as u64);
        PlanStep::Io {
            disk: self.target.disk,
            request,
            scratch: 0..piece,
        }
    }
}

/// Writes data in pieces through scratch memory.
struct Write {
    target: Target,
    data: Arc<Vec<u8>>,
    done: usize,
}

impl Write {
    fn piece(&self) -> &[u8] {
        let rest = self.data.get(self.done..).unwrap_or_default();
        rest.get(..SCRATCH_MAX).unwrap_or(rest)
    }
}

impl Program for Write {
    fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> PlanStep {
        match last {
            None => {}
            Some(Err(error)) => return PlanStep::Done(Sense::of_io_error(error).into()),
            Some(Ok(())) => self.done += self.piece().len(),
        }
        let piece = self.piece();
        if piece.is_empty() {
            return PlanStep::Done(Response::good());
        }
        let length = piece.len();
        if let Some(scratch) = scratch.get_mut(..length) {
            scratch.copy_from_slice(piece);
        }
        let offset = self.target.offset + self.done as u64;
        let request = IoRequest::write(offset, length as u64).flagged(self.target.flags);
        PlanStep::Io {
            disk: self.target.disk,
            request,
            scratch: 0..length,
        }
    }
}

/// Plans a command that needs its data in memory. Short data-out is handled as for WRITE.
fn with_whole_blocks(
    c: &Context<'_>,
    target: Target,
    length_at: u16,
    plan: impl FnOnce(Target, Vec<u8>) -> Plan + Send + 'static,
) -> Planned {
    if target.length > DATA_OUT_MAX as u64 {
        return Err(Sense::cdb_field(length_at));
    }
    let fits = match write_length(c, target.length) {
        Ok(fits) => fits,
        Err(response) => return Ok(Plan::Done(response)),
    };
    Ok(Pending::keeping(
        target.length,
        c.data_out,
        move |mut data| {
            data.truncate(fits as usize);
            plan(
                Target {
                    length: fits,
                    ..target
                },
                data,
            )
        },
    ))
}

pub(super) fn orwrite_16(c: &Context<'_>) -> Planned {
    let flags = force_unit_access(c);
    let target = target(c, be64(c.cdb, 2), be32(c.cdb, 10).into(), flags)?;
    with_whole_blocks(c, target, 10, |target, data| {
        let program = OrWrite {
            target,
            data,
            done: 0,
            read: false,
        };
        Run::exclusive(program, target.scratch(), target.exclusive())
    })
}

struct OrWrite {
    target: Target,
    data: Vec<u8>,
    done: usize,
    /// The piece was read and combined, and is being written.
    read: bool,
}

impl Program for OrWrite {
    fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> PlanStep {
        let piece = (self.data.len() - self.done).min(SCRATCH_MAX);
        match last {
            None => {}
            Some(Err(error)) => return PlanStep::Done(Sense::of_io_error(error).into()),
            Some(Ok(())) if self.read => {
                self.read = false;
                self.done += piece;
            }
            Some(Ok(())) => {
                self.read = true;
                let data = self.data.get(self.done..).unwrap_or_default();
                for (on_disk, new) in scratch.iter_mut().zip(data) {
                    *on_disk |= new;
                }
            }
        }
        let piece = (self.data.len() - self.done).min(SCRATCH_MAX);
        if piece == 0 {
            return PlanStep::Done(Response::good());
        }
        let offset = self.target.offset + self.done as u64;
        let request = if self.read {
            IoRequest::write(offset, piece as u64).flagged(self.target.flags)
        } else {
            IoRequest::read(offset, piece as u64)
        };
        PlanStep::Io {
            disk: self.target.disk,
            request,
            scratch: 0..piece,
        }
    }
}

pub(super) fn write_and_verify_10(c: &Context<'_>) -> Planned {
    write_and_verify(c, be32(c.cdb, 2).into(), be16(c.cdb, 7).into(), 7)
}

pub(super) fn write_and_verify_12(c: &Context<'_>) -> Planned {
    write_and_verify(c, be32(c.cdb, 2).into(), be32(c.cdb, 6).into(), 6)
}

pub(super) fn write_and_verify_16(c: &Context<'_>) -> Planned {
    write_and_verify(c, be64(c.cdb, 2), be32(c.cdb, 10).into(), 10)
}

fn write_and_verify(c: &Context<'_>, lba: u64, blocks: u64, length_at: u16) -> Planned {
    // FUA, because verification is meaningful only for data on the medium.
    let target = target(c, lba, blocks, IoFlags::FUA)?;
    let compares = match (c.cdb[1] >> 1) & 0b11 {
        0b00 => false,
        0b01 => true,
        _ => return Err(Sense::cdb_bit(1, 2)),
    };
    with_whole_blocks(c, target, length_at, move |target, data| {
        let data = Arc::new(data);
        let expected = compares.then(|| Arc::clone(&data));
        let program = WriteAndVerify {
            write: Write {
                target,
                data,
                done: 0,
            },
            verify: Verify::new(
                target.disk,
                target.offset,
                target.length,
                expected.unwrap_or_default(),
            ),
            written: false,
        };
        Run::plan(program, target.scratch())
    })
}

struct WriteAndVerify {
    write: Write,
    verify: Verify,
    written: bool,
}

impl Program for WriteAndVerify {
    fn next(&mut self, last: Option<IoOutcome>, scratch: &mut [u8]) -> PlanStep {
        if self.written {
            return self.verify.next(last, scratch);
        }
        match self.write.next(last, scratch) {
            PlanStep::Done(Response { sense: None, .. }) => {
                self.written = true;
                self.verify.next(None, scratch)
            }
            step => step,
        }
    }
}

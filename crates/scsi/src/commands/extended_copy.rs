//! EXTENDED COPY, LID1 and LID4 (SPC-4, 6.4 and 6.5): block to block copies by the copy manager.
//!
//! The parameter list is parsed completely before the copy starts. Units are looked up in the same target, and in other targets of the
//! daemon only if a unit allows that.

use std::sync::Arc;

use block::{Blocks, Geometry, IoFlags, IoOutcome, IoRequest, Lba};

use super::parameter_list::{check_bits, check_zero};
use super::{Context, Planned, good};
use crate::command::be32;
use crate::copy_results::{CopyResult, CopyStatus};
use crate::logical_unit::{LogicalUnit, UnitId, Word};
use crate::nexus::Nexus;
use crate::plan::{Pending, Plan, PlanStep, Program, Run, SCRATCH_MAX};
use crate::response::{Response, Status};
use crate::sense::{Sense, SenseCode, SenseKey};
use crate::table::Access;

pub(super) const TARGETS_MAX: usize = 16;
pub(super) const SEGMENTS_MAX: usize = 64;
pub(super) const DESCRIPTORS_LENGTH_MAX: usize = 4096;
pub(super) const SEGMENT_BYTES_MAX: u64 = 64 << 20;

/// Descriptor type codes (SPC-4, tables 117 and 143).
pub(super) const BLOCK_TO_BLOCK: u8 = 0x02;
pub(super) const BLOCK_TO_BLOCK_OFFSET: u8 = 0x0a;
pub(super) const IDENTIFICATION: u8 = 0xe4;

const LID4: u8 = 0x01;

pub(super) fn extended_copy(c: &Context<'_>) -> Planned {
    let lid4 = match c.cdb[1] & 0x1f {
        0x00 => false,
        LID4 => true,
        _ => return Err(Sense::cdb_bit(1, 4)),
    };
    let length = be32(c.cdb, 10) as usize;
    if length == 0 {
        return good();
    }
    if length > 48 + 2 * DESCRIPTORS_LENGTH_MAX {
        return Err(length_error());
    }
    let map = c.view.map().clone();
    let (unit, nexus) = (Arc::clone(c.unit), Arc::clone(c.nexus));
    Ok(Pending::plan(
        length as u64,
        c.data_out,
        move |list: &[u8]| {
            let found = |naa: u64| {
                let mut mapped = map.iter().map(|(_, unit)| unit);
                let here = mapped.find(|unit| unit.naa() == naa).map(Arc::clone);
                here.or_else(|| {
                    unit.directory()
                        .find_naa(naa)
                        .filter(|unit| unit.copies_from_anywhere())
                })
            };
            let parsed = if list.len() < length {
                Err(length_error())
            } else {
                List::parse(list, lid4)
            };
            parsed
                .and_then(|list| Copy::plan(&unit, &nexus, list, found))
                .unwrap_or_else(|sense| Plan::Done(sense.into()))
        },
    ))
}

const fn length_error() -> Sense {
    Sense::illegal_request(SenseCode::PARAMETER_LIST_LENGTH_ERROR)
}

const fn aborted(code: SenseCode) -> Sense {
    Sense::new(SenseKey::CopyAborted, code)
}

struct List {
    /// Identifier for the retrieval of results, unless the initiator does not want them.
    identifier: Option<u32>,
    targets: Vec<CopyTarget>,
    segments: Vec<Segment>,
}

/// An identification descriptor.
#[derive(Clone, Copy)]
struct CopyTarget {
    naa: Option<u64>,
    block_length: u32,
    /// Offset in the parameter list.
    at: u16,
}

struct Segment {
    /// Offset in the parameter list.
    at: u16,
    source: usize,
    destination: usize,
    source_lba: u64,
    destination_lba: u64,
    length: Length,
}

enum Length {
    SourceBlocks(u16),
    DestinationBlocks(u16),
    Bytes(u32),
}

impl List {
    fn parse(list: &[u8], lid4: bool) -> Result<List, Sense> {
        let header_length: u16 = if lid4 { 48 } else { 16 };
        let (header, rest) = list
            .split_at_checked(header_length.into())
            .ok_or(length_error())?;
        let be = |at: usize, length: usize| {
            let bytes = header.get(at..at + length).unwrap_or_default();
            bytes
                .iter()
                .fold(0usize, |value, &byte| value << 8 | usize::from(byte))
        };
        let (targets, segments, inline, identifier) = if lid4 {
            if header[0] != 0x01 {
                return Err(Sense::parameter_field(0));
            }
            check_zero(4, &header[4..15])?;
            // IMMED and G_SENSE are not supported and must be zero.
            check_zero(15, &header[15..16])?;
            check_zero(17, &header[17..20])?;
            check_zero(24, &header[24..42])?;
            (be(42, 2), be(44, 2), be(46, 2), be(20, 4) as u32)
        } else {
            check_zero(4, &header[4..8])?;
            (be(2, 2), be(8, 4), be(12, 4), u32::from(header[0]))
        };
        // STR and PRIORITY are hints; LIST ID USAGE.
        check_bits(1, header[1], 0x3f, &[])?;
        if targets.saturating_add(segments) > DESCRIPTORS_LENGTH_MAX || targets % 32 != 0 {
            return Err(length_error());
        }
        if inline > 0 {
            return Err(Sense::illegal_request(
                SenseCode::INLINE_DATA_LENGTH_EXCEEDED,
            ));
        }
        // At most DESCRIPTORS_LENGTH_MAX more.
        let segments_at = header_length + targets as u16;
        let (targets, rest) = rest.split_at_checked(targets).ok_or(length_error())?;
        let (segments, _) = rest.split_at_checked(segments).ok_or(length_error())?;
        let wanted = match (header[1] >> 3) & 0b11 {
            0b11 if identifier != 0 => return Err(Sense::parameter_field(0)),
            0b11 => None,
            0b01 => return Err(Sense::parameter_field(1)),
            _ => Some(identifier),
        };
        Ok(List {
            identifier: wanted,
            targets: parse_targets(targets, header_length)?,
            segments: parse_segments(segments, segments_at)?,
        })
    }
}

/// `at`: offset of the descriptors in the parameter list.
fn parse_targets(descriptors: &[u8], at: u16) -> Result<Vec<CopyTarget>, Sense> {
    let (descriptors, _) = descriptors.as_chunks::<32>();
    if descriptors.len() > TARGETS_MAX {
        return Err(Sense::illegal_request(
            SenseCode::TOO_MANY_TARGET_DESCRIPTORS,
        ));
    }
    let places = (at..).step_by(32);
    let parse = |(at, descriptor): (u16, &[u8; 32])| parse_target(descriptor, at);
    places.zip(descriptors).map(parse).collect()
}

/// Parses an identification descriptor (SPC-4, 6.4.5.2).
fn parse_target(d: &[u8; 32], at: u16) -> Result<CopyTarget, Sense> {
    if d[0] != IDENTIFICATION || d[1] & 0x1f != 0 {
        return Err(Sense::illegal_request(
            SenseCode::UNSUPPORTED_TARGET_DESCRIPTOR,
        ));
    }
    // LU ID TYPE has no meaning in this descriptor. The initiator port (bytes 2 and 3) is not needed to reach a unit of this device. NUL is
    // refused: null devices are not supported.
    check_bits(at + 1, d[1], 0xdf, &[])?;
    check_bits(at + 4, d[4], 0x0f, &[])?;
    check_bits(at + 5, d[5], 0x3f, &[])?;
    check_zero(at + 6, &d[6..7])?;
    let designator = d[8..28].split_at_checked(d[7].into());
    let (designator, rest) = designator.ok_or(Sense::parameter_field(at + 7))?;
    check_zero(at + 8 + u16::from(d[7]), rest)?;
    // PAD applies to partial blocks, which are never copied.
    check_bits(at + 28, d[28], 0x04, &[])?;
    // Only NAA designators of logical units are supported.
    let is_naa = d[4] == 0x01 && d[5] == 0x03;
    let naa = designator.try_into().ok().filter(|_| is_naa);
    Ok(CopyTarget {
        naa: naa.map(u64::from_be_bytes),
        block_length: u32::from_be_bytes([0, d[29], d[30], d[31]]),
        at,
    })
}

/// `at`: offset of the descriptors in the parameter list.
fn parse_segments(mut rest: &[u8], mut at: u16) -> Result<Vec<Segment>, Sense> {
    let mut segments = Vec::new();
    while !rest.is_empty() {
        let head = rest.first_chunk::<4>().ok_or(length_error())?;
        let length: u16 = match head[0] {
            BLOCK_TO_BLOCK => 28,
            BLOCK_TO_BLOCK_OFFSET => 32,
            _ => {
                return Err(Sense::illegal_request(
                    SenseCode::UNSUPPORTED_SEGMENT_DESCRIPTOR,
                ));
            }
        };
        if segments.len() == SEGMENTS_MAX {
            return Err(Sense::illegal_request(
                SenseCode::TOO_MANY_SEGMENT_DESCRIPTORS,
            ));
        }
        let (descriptor, after) = rest.split_at_checked(length.into()).ok_or(length_error())?;
        segments.push(parse_segment(descriptor, at)?);
        (rest, at) = (after, at + length);
    }
    Ok(segments)
}

/// Parses a block to block segment, with or without byte offsets (SPC-4, 6.4.6.4 and 6.4.6.12).
fn parse_segment(descriptor: &[u8], at: u16) -> Result<Segment, Sense> {
    let d: &[u8; 28] = descriptor.first_chunk().ok_or(length_error())?;
    let described = usize::from(u16::from_be_bytes([d[2], d[3]])) + 4;
    if described != descriptor.len() {
        return Err(Sense::parameter_field(at + 2));
    }
    let eight = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&d[at..at + 8]);
        u64::from_be_bytes(bytes)
    };
    // CAT, like PAD, applies to partial blocks. DC selects the unit that the block count refers to.
    let length = if d[0] == BLOCK_TO_BLOCK {
        check_bits(at + 1, d[1], 0x03, &[])?;
        check_zero(at + 8, &d[8..10])?;
        let blocks = u16::from_be_bytes([d[10], d[11]]);
        match d[1] & 0x02 {
            0 => Length::SourceBlocks(blocks),
            _ => Length::DestinationBlocks(blocks),
        }
    } else {
        check_bits(at + 1, d[1], 0x01, &[])?;
        Length::Bytes(u32::from_be_bytes([d[8], d[9], d[10], d[11]]))
    };
    // Whole blocks only: byte offsets of source and destination within a block are not supported.
    let (offsets, _) = descriptor.get(28..).unwrap_or_default().as_chunks::<2>();
    if let Some(offset) = (at + 28..)
        .step_by(2)
        .zip(offsets)
        .find(|(_, offset)| **offset != [0; 2])
    {
        return Err(Sense::parameter_field(offset.0));
    }
    Ok(Segment {
        at,
        source: u16::from_be_bytes([d[4], d[5]]).into(),
        destination: u16::from_be_bytes([d[6], d[7]]).into(),
        source_lba: eight(12),
        destination_lba: eight(20),
        length,
    })
}

/// A segment in bytes, within the limits of both disks.
struct Move {
    source: (Arc<LogicalUnit>, u64),
    destination: (Arc<LogicalUnit>, u64),
    length: u64,
}

/// Reason why a segment cannot be copied.
enum Obstacle {
    Sense(Sense),
    Conflict,
}

struct Copy {
    unit: Arc<LogicalUnit>,
    nexus: Arc<Nexus>,
    list: Option<u32>,
    moves: Vec<Result<Move, Obstacle>>,
    at: usize,
    done: u64,
    total: u64,
    written: bool,
    is_finished: bool,
}

impl Copy {
    fn plan(
        unit: &Arc<LogicalUnit>,
        nexus: &Arc<Nexus>,
        list: List,
        find: impl Fn(u64) -> Option<Arc<LogicalUnit>>,
    ) -> Planned {
        let identifier = list.identifier;
        if let Some(identifier) = identifier
            && unit.state().copies.running(nexus.id(), identifier)
        {
            return Err(Sense::parameter_field(0));
        }
        let targets: Vec<_> = list
            .targets
            .iter()
            .map(|target| target.naa.and_then(&find).map(|unit| (unit, *target)))
            .collect();
        let moves: Vec<_> = list
            .segments
            .iter()
            .map(|segment| prepare(segment, &targets, nexus))
            .collect();
        let copy = Copy {
            unit: Arc::clone(unit),
            nexus: Arc::clone(nexus),
            list: identifier,
            moves,
            at: 0,
            done: 0,
            total: 0,
            written: false,
            is_finished: false,
        };
        copy.record(CopyStatus::Running, Vec::new());
        Ok(Run::plan(copy, SCRATCH_MAX))
    }

    fn record(&self, status: CopyStatus, sense: Vec<u8>) {
        let Some(list) = self.list else { return };
        let (nexus, segments) = (self.nexus.id(), self.at as u16);
        let result = CopyResult {
            nexus,
            list,
            status,
            segments,
            bytes: self.total,
            sense,
        };
        self.unit.state().copies.put(result);
    }

    fn fail(&mut self, sense: Sense) -> PlanStep {
        self.is_finished = true;
        self.record(CopyStatus::Failed, sense.encode().to_vec());
        PlanStep::Done(sense.into())
    }

    fn done(&mut self, response: Response, status: CopyStatus) -> PlanStep {
        self.is_finished = true;
        self.record(status, Vec::new());
        PlanStep::Done(response)
    }
}

type Found = Option<(Arc<LogicalUnit>, CopyTarget)>;

fn prepare(segment: &Segment, targets: &[Found], nexus: &Nexus) -> Result<Move, Obstacle> {
    let target = |index: usize| match targets.get(index) {
        Some(Some((unit, target))) if target.block_length == unit.geometry().block_size() => {
            Ok(unit)
        }
        Some(Some((_, target))) => Err(Obstacle::Sense(Sense::parameter_field(target.at + 29))),
        Some(None) => Err(Obstacle::Sense(aborted(
            SenseCode::COPY_TARGET_NOT_REACHABLE,
        ))),
        None => Err(Obstacle::Sense(aborted(SenseCode::UNREACHABLE_COPY_TARGET))),
    };
    let (source, destination) = (target(segment.source)?, target(segment.destination)?);
    let (from, to) = (source.geometry(), destination.geometry());
    let length = match segment.length {
        Length::SourceBlocks(blocks) => u64::from(blocks) << from.block_shift(),
        Length::DestinationBlocks(blocks) => u64::from(blocks) << to.block_shift(),
        Length::Bytes(bytes) => bytes.into(),
    };
    if length > SEGMENT_BYTES_MAX {
        return Err(Obstacle::Sense(Sense::parameter_field(segment.at + 8)));
    }
    let beyond = || Obstacle::Sense(aborted(SenseCode::NONE));
    let range = |geometry: Geometry, lba: u64| {
        let whole = length.is_multiple_of(geometry.block_size().into());
        let blocks = Blocks(length >> geometry.block_shift());
        geometry.check(Lba(lba), blocks).ok().filter(|_| whole)
    };
    let (source_offset, _) = range(from, segment.source_lba).ok_or_else(beyond)?;
    let (destination_offset, _) = range(to, segment.destination_lba).ok_or_else(beyond)?;
    check_unit(source, nexus, Access::Read)?;
    check_unit(destination, nexus, Access::Write)?;
    Ok(Move {
        source: (Arc::clone(source), source_offset),
        destination: (Arc::clone(destination), destination_offset),
        length,
    })
}

/// Checks reservations, readiness and write protection, as for a command.
fn check_unit(unit: &LogicalUnit, nexus: &Nexus, access: Access) -> Result<(), Obstacle> {
    let state = unit.state();
    if state.reservations.conflicts(nexus, access, false) {
        return Err(Obstacle::Conflict);
    }
    if !state.ready() || state.is_out_of_date() {
        return Err(Obstacle::Sense(aborted(
            SenseCode::COPY_TARGET_NOT_REACHABLE,
        )));
    }
    if access == Access::Write && unit.word().has(Word::WRITE_PROTECTED) {
        let sense = Sense::new(SenseKey::DataProtect, SenseCode::WRITE_PROTECTED);
        return Err(Obstacle::Sense(sense));
    }
    Ok(())
}

impl Program for Copy {
    fn writes_to(&self, unit: UnitId) -> bool {
        let mut moves = self.moves.iter().flatten();
        moves.any(|to| to.destination.0.id() == unit)
    }

    fn next(&mut self, last: Option<IoOutcome>, _scratch: &mut [u8]) -> PlanStep {
        if let Some(Err(error)) = last {
            let sense = Sense::of_io_error(error);
            return self.fail(Sense {
                key: SenseKey::CopyAborted,
                ..sense
            });
        }
        let read = last.is_some() && !self.written;
        loop {
            let current = match self.moves.get(self.at) {
                None => return self.done(Response::good(), CopyStatus::Done),
                Some(Err(Obstacle::Sense(sense))) => {
                    let sense = *sense;
                    return self.fail(sense);
                }
                Some(Err(Obstacle::Conflict)) => {
                    let response = Response::status(Status::ReservationConflict);
                    return self.done(response, CopyStatus::Failed);
                }
                Some(Ok(current)) => current,
            };
            let piece = (current.length - self.done).min(SCRATCH_MAX as u64);
            let scratch = 0..piece as usize;
            if read {
                let (unit, offset) = &current.destination;
                // Checked again, because the initiator may have been fenced during the copy.
                if let Err(obstacle) = check_unit(unit, &self.nexus, Access::Write) {
                    self.moves[self.at] = Err(obstacle);
                    continue;
                }
                let flags = match unit.word().has(Word::WRITE_THROUGH) {
                    true => IoFlags::FUA,
                    false => IoFlags::NONE,
                };
                self.written = true;
                return PlanStep::Io {
                    disk: unit.disk(),
                    request: IoRequest::write(offset + self.done, piece).flagged(flags),
                    scratch,
                };
            }
            if self.written {
                self.written = false;
                self.done += piece;
                self.total += piece;
                continue;
            }
            if piece == 0 {
                self.at += 1;
                self.done = 0;
                continue;
            }
            let (unit, offset) = &current.source;
            if let Err(obstacle) = check_unit(unit, &self.nexus, Access::Read) {
                self.moves[self.at] = Err(obstacle);
                continue;
            }
            return PlanStep::Io {
                disk: unit.disk(),
                request: IoRequest::read(offset + self.done, piece),
                scratch,
            };
        }
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        if !self.is_finished {
            self.record(CopyStatus::Failed, Vec::new());
        }
    }
}

//! Encodes I/O as SBC-4 commands, and decodes responses. Contains no I/O.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use block::{
    COMMAND_HEADER, DeviceSense, Extent, IoError, IoErrorKind, IoFlags, IoKind, IoOutcome,
    IoRequest, ScsiAnswer, ScsiCommand, encode_extents,
};
use guest_memory::IoBuffer;
use iscsi_initiator::{CommandDone, Sense, UnitCommand, UnitInfo, parse_extents};
use scsi::cdb::{self, FUA, UNMAP_BIT, cdb10, cdb16};
use scsi::opcode::{
    READ_10, READ_16, SYNCHRONIZE_CACHE_10, SYNCHRONIZE_CACHE_16, WRITE_16, WRITE_SAME_16,
};

/// Maximum bytes per command if the unit reports no limit.
const TRANSFER_BYTES: u64 = 1 << 20;
/// Maximum bytes per command for every unit: they are in memory.
const TRANSFER_BYTES_MAX: u64 = 4 << 20;
/// Maximum blocks per WRITE SAME or UNMAP if the unit reports no limit.
const RANGE_BLOCKS: u64 = 1 << 16;
/// Extents per GET LBA STATUS: the maximum of a block status I/O.
const EXTENTS: u32 = 256;

/// Commands and limits used for a unit.
#[derive(Clone, Debug)]
pub(super) struct UnitProfile {
    block_size: u64,
    transfer_max: u64,
    unmaps: Unmaps,
    /// Unmapped blocks read as zeroes. Updated when the unit reports a change.
    pub unmapped_zeroes: Arc<AtomicBool>,
    /// The disk promises clients that discarded blocks read as zeroes.
    promises_zeroes: bool,
    unmap_max: u64,
    write_same_max: u64,
    write_cache: Option<bool>,
    /// The unit may have a write cache, which it had not when the disk was opened. Clients do not flush, so every write must be durable.
    /// Updated when the unit reports a change.
    pub must_write_through: Arc<AtomicBool>,
    fua: bool,
    /// The unit supports the 10-byte commands only (MMC-6).
    is_optical: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unmaps {
    No,
    ByUnmap,
    ByWriteSame,
}

#[derive(Debug)]
pub(super) struct UnitStep {
    pub command: UnitCommand,
    /// Bytes of the I/O that the step covers.
    pub bytes: u64,
    /// The data are durable with the response.
    pub has_fua: bool,
}

impl UnitProfile {
    pub fn of(unit: &UnitInfo) -> UnitProfile {
        let block_size = u64::from(unit.block_size);
        let properties = &unit.properties;
        let reported = unit
            .transfer_max
            .map(|blocks| u64::from(blocks) * block_size);
        let range = |blocks: Option<u64>| {
            blocks.unwrap_or(RANGE_BLOCKS).min(u64::from(u32::MAX)) * block_size
        };
        let unmaps = match () {
            // WRITE SAME must write the blocks that it does not unmap. UNMAP is a hint and may leave blocks unchanged.
            () if unit.thin && unit.zeroes && properties.unmap_by_write_same => Unmaps::ByWriteSame,
            () if unit.thin && properties.unmap => Unmaps::ByUnmap,
            () if unit.thin && properties.unmap_by_write_same => Unmaps::ByWriteSame,
            () => Unmaps::No,
        };
        UnitProfile {
            block_size,
            transfer_max: reported
                .unwrap_or(TRANSFER_BYTES)
                .clamp(block_size, TRANSFER_BYTES_MAX),
            is_optical: unit.is_optical(),
            unmaps,
            unmapped_zeroes: Arc::new(AtomicBool::new(unit.zeroes)),
            promises_zeroes: unmaps == Unmaps::ByWriteSame && unit.zeroes,
            unmap_max: range(properties.unmap_max.map(u64::from)),
            write_same_max: range(properties.write_same_max),
            write_cache: properties.write_cache,
            must_write_through: Arc::default(),
            fua: properties.fua,
        }
    }

    /// Returns true if all discarded ranges read as zeroes.
    pub fn discards_to_zeroes(&self) -> bool {
        self.unmaps == Unmaps::ByWriteSame && self.has_zeroes_in_holes()
    }

    /// Returns true if unmapped blocks read as zeroes.
    fn has_zeroes_in_holes(&self) -> bool {
        self.unmapped_zeroes.load(Ordering::Relaxed)
    }

    /// Returns true if the unit can unmap ranges.
    pub fn unmaps(&self) -> bool {
        self.unmaps != Unmaps::No
    }

    /// Returns the step of an I/O after `done` bytes. `read_out` returns a part of its buffer: offset, bytes. `by_writing`: without WRITE
    /// SAME, zeroes are sent.
    pub fn step(
        &self,
        io: &IoRequest,
        done: u64,
        by_writing: bool,
        read_out: impl FnOnce(u64, u64) -> Vec<u8>,
    ) -> UnitStep {
        let left = io.length - done;
        let block = (io.offset + done) / self.block_size;
        let blocks = |bytes: u64| (bytes / self.block_size) as u32;
        let step = |cdb: [u8; 16], out: Vec<u8>, read: u32, bytes: u64| UnitStep {
            command: UnitCommand {
                cdb,
                out,
                read,
                repeatable: io.kind != IoKind::CompareAndWrite,
                ..UnitCommand::default()
            },
            bytes,
            has_fua: false,
        };
        match io.kind {
            IoKind::Read => {
                let bytes = left.min(self.transfer_max);
                step(
                    self.read(block, blocks(bytes)),
                    Vec::new(),
                    bytes as u32,
                    bytes,
                )
            }
            IoKind::Write => {
                let bytes = left.min(self.transfer_max);
                let mut cdb = cdb16(WRITE_16, block, blocks(bytes));
                let has_fua = self.is_durable(io) && self.fua;
                cdb[1] = if has_fua { FUA } else { 0 };
                let mut written = step(cdb, read_out(done, bytes), 0, bytes);
                written.has_fua = has_fua;
                written
            }
            IoKind::CompareAndWrite => {
                let cdb = cdb::compare_and_write(block, blocks(io.length) as u8);
                step(cdb, read_out(0, 2 * io.length), 0, io.length)
            }
            IoKind::WriteZeroes if by_writing => {
                let bytes = left.min(self.transfer_max);
                let cdb = cdb16(WRITE_16, block, blocks(bytes));
                step(cdb, vec![0; bytes as usize], 0, bytes)
            }
            IoKind::WriteZeroes => {
                let bytes = left.min(self.write_same_max);
                let mut cdb = cdb16(WRITE_SAME_16, block, blocks(bytes));
                // Without LBPRZ, unmapped blocks may read as anything.
                if io.flags.has(IoFlags::UNMAP) && self.discards_to_zeroes() {
                    cdb[1] = UNMAP_BIT;
                }
                step(cdb, vec![0; self.block_size as usize], 0, bytes)
            }
            IoKind::Discard if self.unmaps == Unmaps::ByWriteSame => {
                let bytes = left.min(self.write_same_max);
                let mut cdb = cdb16(WRITE_SAME_16, block, blocks(bytes));
                if !self.promises_zeroes || self.has_zeroes_in_holes() {
                    cdb[1] = UNMAP_BIT;
                }
                step(cdb, vec![0; self.block_size as usize], 0, bytes)
            }
            IoKind::Discard => {
                let bytes = left.min(self.unmap_max);
                let (cdb, list) = cdb::unmap(block, blocks(bytes));
                step(cdb, list.to_vec(), 0, bytes)
            }
            IoKind::BlockStatus => {
                let length = 8 + 16 * EXTENTS;
                step(cdb::get_lba_status(block, length), Vec::new(), length, left)
            }
            IoKind::Flush | IoKind::ReplaceState | IoKind::ScsiCommand => self.flush(),
        }
    }

    fn read(&self, block: u64, blocks: u32) -> [u8; 16] {
        match self.is_optical {
            true => cdb10(READ_10, block as u32, blocks as u16),
            false => cdb16(READ_16, block, blocks),
        }
    }

    /// Returns the step that makes all previous writes durable.
    pub fn flush(&self) -> UnitStep {
        let cdb = match self.is_optical {
            true => cdb10(SYNCHRONIZE_CACHE_10, 0, 0),
            false => cdb16(SYNCHRONIZE_CACHE_16, 0, 0),
        };
        let command = UnitCommand {
            cdb,
            repeatable: true,
            ..UnitCommand::default()
        };
        UnitStep {
            command,
            bytes: 0,
            has_fua: false,
        }
    }

    /// A unit without SYNCHRONIZE CACHE has nothing to flush, unless it reports a write cache.
    pub fn is_flush_needless(&self) -> bool {
        self.write_cache != Some(true) && !self.writes_through()
    }

    /// Returns true if the unit may have a cache that clients do not know of.
    fn writes_through(&self) -> bool {
        self.write_cache == Some(false) && self.must_write_through.load(Ordering::Relaxed)
    }

    /// Returns true if the data must be durable with the response.
    fn is_durable(&self, io: &IoRequest) -> bool {
        io.flags.has(IoFlags::FUA) || self.writes_through()
    }

    /// Returns true if a flush must follow: the unit may have a cache, and a command of the I/O was sent without FUA. The unit may have
    /// enabled the cache since.
    pub fn flushes_after(&self, io: &IoRequest, has_fua: bool) -> bool {
        let may_cache = self.write_cache != Some(false) || self.writes_through();
        io.modifies() && self.is_durable(io) && may_cache && !has_fua
    }

    /// Converts GET LBA STATUS data to the block status of a range. Unmapped blocks are holes only if they read as zeroes; blocks without a
    /// descriptor are data.
    pub fn block_status(&self, io: &IoRequest, data: &[u8], blocks: u64) -> Vec<u8> {
        let first = io.offset / self.block_size;
        let has_holes = self.has_zeroes_in_holes();
        let extents = parse_extents(data, first, blocks);
        encode_extents(io.offset..io.offset + io.length, |from| {
            let at = from / self.block_size;
            let found = extents
                .iter()
                .find(|extent| at < extent.block + extent.blocks);
            match found {
                Some(extent) => {
                    let end = (extent.block + extent.blocks) * self.block_size;
                    match has_holes && !extent.mapped {
                        true => Extent::hole(end),
                        false => Extent::data(end),
                    }
                }
                None => Extent::UNKNOWN,
            }
        })
    }
}

/// Decodes the command in the buffer of an I/O.
pub(super) fn command_in(io: &IoRequest, buffer: &IoBuffer) -> Option<ScsiCommand> {
    let mut header = [0; ScsiCommand::ENCODED];
    if buffer.len() < COMMAND_HEADER {
        return None;
    }
    buffer.read_at(0, &mut header);
    ScsiCommand::decode(&header, io.length)
}

/// Returns true if the command may be executed twice on every device type: it changes nothing.
fn is_repeatable(command: &ScsiCommand) -> bool {
    // TEST UNIT READY, READ, INQUIRY, MODE SENSE, READ CAPACITY, SYNCHRONIZE CACHE, LOG SENSE, PERSISTENT RESERVE IN, READ TOC,
    // GET CONFIGURATION, SERVICE ACTION IN, MAINTENANCE IN.
    const READING: [u8; 17] = [
        0x00, 0x08, 0x12, 0x1a, 0x25, 0x28, 0x35, 0x43, 0x46, 0x4d, 0x5a, 0x5e, 0x88, 0x91, 0x9e,
        0xa3, 0xa8,
    ];
    // Operation codes with another meaning on an optical unit, such as SEND KEY, have data-out.
    command.data_out == 0 && READING.contains(&command.cdb[0])
}

/// Returns the only step of a passed-through command.
pub(super) fn passed_through(io: &IoRequest, buffer: &IoBuffer) -> UnitStep {
    // The command was checked on submission, so the default is not used.
    let command = command_in(io, buffer).unwrap_or_default();
    let mut out = vec![0; command.data_out as usize];
    buffer.read_at(COMMAND_HEADER, &mut out);
    UnitStep {
        command: UnitCommand {
            repeatable: is_repeatable(&command),
            cdb: command.cdb,
            cdb_length: command.cdb_length,
            out,
            read: command.data_in,
            as_is: true,
        },
        bytes: io.length,
        has_fua: false,
    }
}

/// Writes the response to a passed-through command into its buffer.
pub(super) fn answer_command(buffer: &IoBuffer, done: CommandDone) -> IoOutcome {
    if done.response != 0 {
        return Err(IoErrorKind::Cancelled.into());
    }
    let room = buffer.len() - COMMAND_HEADER;
    let data = &done.data[..done.data.len().min(room)];
    let answer = ScsiAnswer {
        status: done.status,
        data_in: data.len() as u32,
        residual: done.residual,
        sense: done.sense,
    };
    buffer.write_at(ScsiAnswer::OFFSET, &answer.encode());
    buffer.write_at(COMMAND_HEADER, data);
    Ok(())
}

/// SCSI status (SAM-5, 5.3).
const GOOD: u8 = 0x00;
const CHECK_CONDITION: u8 = 0x02;
const RESERVATION_CONFLICT: u8 = 0x18;

/// Returns the outcome of a step.
pub(super) fn outcome(io: &IoRequest, step_bytes: u64, done: &CommandDone) -> IoOutcome {
    let medium = match io.modifies() || io.kind == IoKind::Flush {
        true => IoErrorKind::WriteMedium,
        false => IoErrorKind::ReadMedium,
    };
    if done.response != 0 {
        return Err(medium.into());
    }
    // The missing part of partial data is not zeroes. A unit may also end a transfer at a recovered error (DTE, SBC-4, 6.5).
    let is_partial = match io.kind {
        IoKind::Read => done.data.len() as u64 != step_bytes || done.residual < 0,
        IoKind::BlockStatus => false,
        _ => done.residual < 0,
    };
    match done.status {
        GOOD if is_partial => Err(medium.into()),
        GOOD => Ok(()),
        CHECK_CONDITION if Sense::is_success(&done.sense) => match is_partial {
            true => Err(medium.into()),
            false => Ok(()),
        },
        CHECK_CONDITION => refused(medium, done),
        RESERVATION_CONFLICT => Err(IoError::with_errno(medium, libc::EBADE)),
        _ => Err(medium.into()),
    }
}

fn refused(medium: IoErrorKind, done: &CommandDone) -> IoOutcome {
    let Some(sense) = Sense::parse(&done.sense) else {
        return Err(medium.into());
    };
    let kind = match (sense.key, sense.code, sense.qualifier) {
        (2, ..) | (5, 0x25, _) => IoErrorKind::Offline,
        (5, 0x21, _) => IoErrorKind::OutOfRange,
        (5, ..) => IoErrorKind::Unsupported,
        (7, 0x27, 0x07) | (0x0d, ..) => IoErrorKind::NoSpace,
        (7, ..) => IoErrorKind::ReadOnly,
        (0x0e, ..) => IoErrorKind::Miscompare,
        _ => medium,
    };
    let sense = DeviceSense {
        key: sense.key,
        code: sense.code,
        qualifier: sense.qualifier,
    };
    Err(IoError::with_sense(kind, sense, 0))
}

/// Returns true if the unit does not support this command or form.
pub(super) fn is_unknown_command(done: &CommandDone) -> bool {
    const ILLEGAL_REQUEST: u8 = 5;
    let sense = Sense::parse(&done.sense);
    done.status == CHECK_CONDITION
        && sense
            .is_some_and(|sense| sense.key == ILLEGAL_REQUEST && matches!(sense.code, 0x20 | 0x24))
}

#[cfg(test)]
mod tests {
    use iscsi_initiator::UnitProperties;

    use super::*;

    fn unit() -> UnitInfo {
        UnitInfo {
            block_size: 512,
            blocks: 1 << 20,
            thin: true,
            transfer_max: Some(16),
            properties: UnitProperties {
                unmap: true,
                fua: true,
                unmap_max: Some(256),
                write_same_max: Some(64),
                compare_and_write_max: 1,
                ..UnitProperties::default()
            },
            ..UnitInfo::default()
        }
    }

    fn step(profile: &UnitProfile, io: &IoRequest, done: u64) -> UnitStep {
        profile.step(io, done, false, |offset, bytes| {
            vec![offset as u8; bytes as usize]
        })
    }

    /// Returns true if a flush follows the only step of an I/O that is sent and ends now.
    fn flushes_after(profile: &UnitProfile, io: &IoRequest) -> bool {
        profile.flushes_after(io, step(profile, io, 0).has_fua)
    }

    #[test]
    fn commands_follow_sbc_and_the_limits_of_the_unit() {
        let profile = UnitProfile::of(&unit());
        let read = step(&profile, &IoRequest::read(1 << 20, 10_240), 0);
        assert_eq!(
            read.command.cdb,
            [0x88, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 16, 0, 0]
        );
        assert_eq!((read.bytes, read.command.read), (8192, 8192));
        let rest = step(&profile, &IoRequest::read(1 << 20, 10_240), 8192);
        assert_eq!(
            rest.command.cdb,
            [0x88, 0, 0, 0, 0, 0, 0, 0, 8, 16, 0, 0, 0, 4, 0, 0]
        );

        let write = IoRequest::write(0, 512).flagged(IoFlags::FUA);
        let written = step(&profile, &write, 0);
        assert_eq!(
            written.command.cdb,
            [0x8a, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]
        );
        assert_eq!(written.command.out.len(), 512);
        assert!(written.command.repeatable && !flushes_after(&profile, &write));

        let flush = step(&profile, &IoRequest::flush(), 0);
        assert_eq!(
            flush.command.cdb,
            [0x91, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        );

        let discard = step(&profile, &IoRequest::discard(512 * 0x0102, 1 << 20), 0);
        assert_eq!(
            discard.command.cdb,
            [0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(
            discard.command.out,
            [
                0, 22, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 1, 0, 0, 0, 0, 0
            ]
        );
        assert_eq!(discard.bytes, 256 * 512);

        let zeroes = IoRequest::write_zeroes(0, 1 << 20).flagged(IoFlags::UNMAP);
        let zeroed = step(&profile, &zeroes, 0);
        assert_eq!(
            zeroed.command.cdb,
            [0x93, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0]
        );
        assert_eq!(zeroed.command.out, [0; 512]);
        let kept = step(&profile, &IoRequest::write_zeroes(0, 512), 0);
        assert_eq!(kept.command.cdb[1], 0);
        let sent = profile.step(&zeroes, 0, true, |_, _| Vec::new());
        assert_eq!((sent.command.cdb[0], sent.command.out.len()), (0x8a, 8192));

        let compared = step(&profile, &IoRequest::compare_and_write(512, 512), 0);
        assert_eq!(
            compared.command.cdb,
            [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0]
        );
        assert!(compared.command.out.len() == 1024 && !compared.command.repeatable);
    }

    #[test]
    fn durable_write_to_a_cached_unit_without_fua_is_flushed() {
        let mut unit = unit();
        unit.properties.fua = false;
        let profile = UnitProfile::of(&unit);
        let write = IoRequest::write(0, 512).flagged(IoFlags::FUA);
        assert_eq!(step(&profile, &write, 0).command.cdb[1], 0);
        assert!(flushes_after(&profile, &write));
        assert!(!flushes_after(&profile, &IoRequest::write(0, 512)));
        unit.properties.write_cache = Some(false);
        assert!(!flushes_after(&UnitProfile::of(&unit), &write));
        assert!(UnitProfile::of(&unit).is_flush_needless());
        // A cached unit that cannot be flushed cannot promise durability.
        unit.properties.write_cache = Some(true);
        assert!(
            flushes_after(&UnitProfile::of(&unit), &write)
                && !UnitProfile::of(&unit).is_flush_needless()
        );
    }

    #[test]
    fn every_write_is_durable_after_a_unit_has_got_a_cache() {
        let mut unit = unit();
        unit.properties.write_cache = Some(false);
        for fua in [true, false] {
            unit.properties.fua = fua;
            let profile = UnitProfile::of(&unit);
            let write = IoRequest::write(0, 512);
            let before = step(&profile, &write, 0);
            assert_eq!((before.command.cdb[1], before.has_fua), (0, false));
            assert!(!flushes_after(&profile, &write));
            profile.must_write_through.store(true, Ordering::Relaxed);
            assert!(profile.flushes_after(&write, before.has_fua), "in flight");
            let flag = if fua { FUA } else { 0 };
            assert_eq!(step(&profile, &write, 0).command.cdb[1], flag);
            assert_eq!(flushes_after(&profile, &write), !fua);
            assert!(flushes_after(&profile, &IoRequest::write_zeroes(0, 512)));
            assert!(!flushes_after(&profile, &IoRequest::read(0, 512)));
        }
    }

    #[test]
    fn unit_without_unmap_gets_write_same() {
        let mut unit = unit();
        unit.properties.unmap = false;
        assert!(!UnitProfile::of(&unit).unmaps());
        unit.properties.unmap_by_write_same = true;
        let discard = step(&UnitProfile::of(&unit), &IoRequest::discard(0, 512), 0);
        assert_eq!(discard.command.cdb[..2], [0x93, 8]);
        unit.thin = false;
        assert!(!UnitProfile::of(&unit).unmaps());
    }

    /// SANITIZE and other commands rely on this property.
    #[test]
    fn discard_zeroes_needs_a_command_that_guarantees_it() {
        let mut unit = unit();
        assert!(!UnitProfile::of(&unit).discards_to_zeroes());
        unit.zeroes = true;
        let by_unmap = UnitProfile::of(&unit);
        assert_eq!(
            step(&by_unmap, &IoRequest::discard(0, 512), 0).command.cdb[0],
            0x42
        );
        assert!(!by_unmap.discards_to_zeroes());
        unit.properties.unmap_by_write_same = true;
        let by_write_same = UnitProfile::of(&unit);
        let discard = step(&by_write_same, &IoRequest::discard(0, 512), 0).command;
        assert_eq!(
            (discard.cdb[..2].to_vec(), discard.out),
            (vec![0x93, 8], vec![0; 512])
        );
        assert!(by_write_same.discards_to_zeroes());
        let zeroes = IoRequest::write_zeroes(0, 512).flagged(IoFlags::UNMAP);
        assert_eq!(step(&by_write_same, &zeroes, 0).command.cdb[..2], [0x93, 8]);
        assert_eq!(step(&by_unmap, &zeroes, 0).command.cdb[..2], [0x93, 0]);
    }

    #[test]
    fn answers_are_outcomes_with_the_units_sense() {
        let answer = |status, sense: [u8; 3]| CommandDone {
            status,
            sense: vec![0x72, sense[0], sense[1], sense[2], 0, 0, 0, 0],
            data: vec![0; 512],
            ..CommandDone::default()
        };
        let read = IoRequest::read(0, 512);
        let kind = |done: &CommandDone| outcome(&read, 512, done).map_err(|error| error.kind);
        assert_eq!(kind(&answer(GOOD, [0; 3])), Ok(()));
        assert_eq!(kind(&answer(CHECK_CONDITION, [1, 0, 0])), Ok(()));
        for (sense, expected) in [
            ([3, 0x11, 0], IoErrorKind::ReadMedium),
            ([5, 0x21, 0], IoErrorKind::OutOfRange),
            ([5, 0x25, 0], IoErrorKind::Offline),
            ([7, 0x27, 7], IoErrorKind::NoSpace),
            ([7, 0x27, 0], IoErrorKind::ReadOnly),
            ([0x0e, 0x1d, 0], IoErrorKind::Miscompare),
        ] {
            let error = outcome(&read, 512, &answer(CHECK_CONDITION, sense)).unwrap_err();
            assert_eq!(error.kind, expected);
            assert_eq!(
                error.sense.map(|s| [s.key, s.code, s.qualifier]),
                Some(sense)
            );
        }
        let conflict = outcome(&read, 512, &answer(RESERVATION_CONFLICT, [0; 3])).unwrap_err();
        assert_eq!(conflict.errno, libc::EBADE);
        // Partial data.
        assert_eq!(
            outcome(&read, 1024, &answer(GOOD, [0; 3])).map_err(|e| e.kind),
            Err(IoErrorKind::ReadMedium)
        );
    }

    #[test]
    fn recovered_error_with_partial_data_or_deferred_is_an_error() {
        let answer = |format: u8, bytes: usize, residual: i64| CommandDone {
            status: CHECK_CONDITION,
            sense: vec![format, 1, 0x18, 0, 0, 0, 0, 0],
            data: vec![0; bytes],
            residual,
            ..CommandDone::default()
        };
        let kind = |io: &IoRequest, done: &CommandDone| {
            outcome(io, io.length, done).map_err(|error| error.kind)
        };
        let read = IoRequest::read(0, 1024);
        assert_eq!(kind(&read, &answer(0x72, 1024, 0)), Ok(()));
        let partial = Err(IoErrorKind::ReadMedium);
        assert_eq!(kind(&read, &answer(0x72, 512, -512)), partial);
        for io in [IoRequest::write(0, 1024), IoRequest::flush()] {
            assert_eq!(kind(&io, &answer(0x72, 0, 0)), Ok(()));
            let lost = Err(IoErrorKind::WriteMedium);
            assert_eq!(kind(&io, &answer(0x73, 0, 0)), lost, "deferred");
        }
        let partial = Err(IoErrorKind::WriteMedium);
        let write = IoRequest::write(0, 1024);
        assert_eq!(kind(&write, &answer(0x72, 0, -512)), partial);
    }

    #[test]
    fn implausible_block_status_of_a_unit_is_read_as_data() {
        let profile = profile_with_zeroes();
        let mut data = vec![0, 0, 0, 36, 0, 0, 0, 0];
        for (block, blocks, state) in [(8u64, 8u32, 1u8), (16, 8, 0)] {
            data.extend(block.to_be_bytes());
            data.extend(blocks.to_be_bytes());
            data.extend([state, 0, 0, 0]);
        }
        let io = IoRequest::block_status(8 * 512, 32 * 512);
        let status = profile.block_status(&io, &data, 1 << 20);
        let extents: Vec<Extent> = block::decode_extents(&status).collect();
        assert_eq!(extents, [Extent::hole(16 * 512), Extent::data(40 * 512)]);
        let status = profile.block_status(&io, &data[..20], 1 << 20);
        let extents: Vec<Extent> = block::decode_extents(&status).collect();
        assert_eq!(extents, [Extent::data(40 * 512)]);
    }

    fn profile_with_zeroes() -> UnitProfile {
        let mut unit = unit();
        unit.zeroes = true;
        unit.properties.unmap_by_write_same = true;
        UnitProfile::of(&unit)
    }

    #[test]
    fn blocks_of_every_other_provisioning_status_are_data() {
        let io = IoRequest::block_status(0, 16 * 512);
        let statuses = |profile: &UnitProfile| {
            let has_hole = |status: &u8| {
                let mut data = vec![0, 0, 0, 20, 0, 0, 0, 0];
                data.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, *status, 0, 0, 0]);
                let status = profile.block_status(&io, &data, 1 << 20);
                let first = block::decode_extents(&status).next();
                first == Some(Extent::hole(16 * 512))
            };
            (0..=u8::MAX).filter(has_hole).collect::<Vec<u8>>()
        };
        let profile = profile_with_zeroes();
        assert_eq!(statuses(&profile), [1, 2]);
        // After a reconnection the unit no longer reports LBPRZ.
        profile.unmapped_zeroes.store(false, Ordering::Relaxed);
        assert_eq!(statuses(&profile), [0; 0]);
        assert_eq!(statuses(&UnitProfile::of(&unit())), [0; 0]);
    }

    #[test]
    fn zeroes_are_written_when_a_unit_has_lost_lbprz() {
        let profile = profile_with_zeroes();
        let zeroes = IoRequest::write_zeroes(0, 4096).flagged(IoFlags::UNMAP);
        let discard = IoRequest::discard(0, 4096);
        for io in [&zeroes, &discard] {
            assert_eq!(step(&profile, io, 0).command.cdb[..2], [0x93, 0x08]);
        }
        profile.unmapped_zeroes.store(false, Ordering::Relaxed);
        for io in [&zeroes, &discard] {
            assert_eq!(step(&profile, io, 0).command.cdb[..2], [0x93, 0x00]);
        }
    }
}

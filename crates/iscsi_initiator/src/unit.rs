//! A logical unit: the SPC and SBC commands for copying, comparing and inspecting disks.
//!
//! Data from a unit is checked before use: sizes, lengths, and the completeness of reads.

use std::collections::HashMap;
use std::time::Duration;

use iscsi::initiator::{CommandDone, Initiator, Request};
use scsi::cdb::{self, UNMAP_BIT, cdb12, cdb16};
use scsi::opcode;

use crate::access_state::{Access, access, port_group, ports_differ};
use crate::sense::Sense;
use crate::session::{Session, SessionError};
use crate::unit_info::UnitInfo;
use iscsi::address::Lun;

/// SCSI status (SAM-5, 5.3).
const GOOD: u8 = 0x00;
const CHECK_CONDITION: u8 = 0x02;
const BUSY: u8 = 0x08;
const RESERVATION_CONFLICT: u8 = 0x18;
const TASK_SET_FULL: u8 = 0x28;
/// Maximum number of unit attentions in a row. A new nexus reports several, one per command; a unit with more never stops.
const ATTENTIONS_MAX: u32 = 16;
/// Number of retries on a busy unit, with a pause that doubles.
const BUSY_MAX: u32 = 8;
const BUSY_PAUSE: Duration = Duration::from_millis(20);
/// Size of a LUN list in bytes: all LUNs of flat space addressing, more than most targets report.
const LUNS_BYTES: u32 = 8 + 8 * 16_384;
/// Maximum size of a LUN list in bytes.
const LUNS_BYTES_MAX: u32 = 8 + 8 * (1 << 20);
/// Number of descriptors per GET LBA STATUS.
const EXTENTS: u32 = 512;
/// PROVISIONING STATUS of blocks without data (SBC-4, 5.6.2.3).
const DEALLOCATED: u8 = 1;
const ANCHORED: u8 = 2;

/// Reason for a failed command.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The session has ended.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The unit refused the command.
    #[error("{command}: {}", refusal(*status, sense.as_ref()))]
    Refused {
        /// The command's name.
        command: &'static str,
        /// SCSI status.
        status: u8,
        /// Sense data.
        sense: Option<Sense>,
    },
    /// The path leads to another unit than the disk had before.
    #[error("{message}")]
    OtherUnit {
        /// The path, the unit found, the unit expected, and a hint.
        message: String,
    },
    /// The response is invalid.
    #[error("{command}: {reason}")]
    Answer {
        /// The command's name.
        command: &'static str,
        /// The problem.
        reason: String,
    },
}

fn refusal(status: u8, sense: Option<&Sense>) -> String {
    match (status, sense) {
        (CHECK_CONDITION, Some(sense)) => sense.to_string(),
        (CHECK_CONDITION, None) => "CHECK CONDITION without sense data".to_owned(),
        (RESERVATION_CONFLICT, _) => {
            "RESERVATION CONFLICT; hint: another initiator has reserved the unit; see `lunette-lab iscsi persist`"
                .to_owned()
        }
        (BUSY, _) => "BUSY".to_owned(),
        (TASK_SET_FULL, _) => "TASK SET FULL".to_owned(),
        (status, _) => format!("status {status:#04x}"),
    }
}

type Result<T> = std::result::Result<T, CommandError>;

/// A range of blocks with the same state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First block.
    pub block: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// The blocks may hold data. Otherwise the unit reports them as deallocated or anchored.
    pub mapped: bool,
}

/// A logical unit with a session of its own.
pub struct Unit {
    session: Session,
    lun: u64,
    info: UnitInfo,
    /// Expected bytes of each read in flight; none for a write.
    expected: HashMap<u32, Option<u32>>,
}

impl Unit {
    /// Opens a unit: processes initial unit attentions and reads its properties.
    ///
    /// # Errors
    /// If it is not a disk, or is not ready.
    pub fn open(mut session: Session, lun: Lun) -> Result<Unit> {
        let lun = field_of(&mut session, lun)?;
        let info = Unit::inspect(&mut session, lun)?;
        Ok(Unit {
            session,
            lun,
            info,
            expected: HashMap::new(),
        })
    }

    /// Reads identity and size of the unit with this LUN field. The session can be used for other units afterwards.
    ///
    /// # Errors
    /// If the unit does not exist or is not ready.
    pub fn inspect(session: &mut Session, lun: u64) -> Result<UnitInfo> {
        command(session, lun, "TEST UNIT READY", &[0; 6], 0)?;
        read_unit_info(session, lun)
    }

    /// Returns the unit's properties.
    pub fn info(&self) -> &UnitInfo {
        &self.info
    }

    pub(crate) fn lun(&self) -> u64 {
        self.lun
    }

    /// Reads the properties again after the unit reported a change.
    pub(crate) fn measure_again(&mut self) -> Result<()> {
        self.info = read_unit_info(&mut self.session, self.lun)?;
        match self.info.is_disk() {
            true => Ok(()),
            false => {
                let other = self.info.device_type;
                let reason = format!("device type {other:#04x} is not a disk");
                Err(answer("INQUIRY", reason))
            }
        }
    }

    /// Returns the access state of the session's port. A unit without a report has equal access on all ports.
    ///
    /// # Errors
    /// If the session has ended.
    pub(crate) fn access(&mut self) -> Result<Access> {
        let supported = |result: Result<Vec<u8>>| match result {
            Err(CommandError::Refused { .. }) => Ok(Vec::new()),
            other => other,
        };
        if !ports_differ(&supported(self.inquiry(None))?) {
            return Ok(Access::EQUAL);
        }
        let Some(group) = port_group(&supported(self.inquiry(Some(0x83)))?) else {
            return Ok(Access::EQUAL);
        };
        const LENGTH: u32 = 4096;
        let cdb = cdb12(opcode::MAINTENANCE_IN, 0x0a, LENGTH);
        let data = supported(self.command("REPORT TARGET PORT GROUPS", &cdb, LENGTH))?;
        Ok(access(&data, group).unwrap_or(Access::EQUAL))
    }

    /// Returns the session.
    pub fn session(&mut self) -> &mut Session {
        &mut self.session
    }

    /// Logs the session out.
    ///
    /// # Errors
    /// If the session had already ended.
    pub fn close(self) -> Result<()> {
        Ok(self.session.logout()?)
    }

    /// Runs INQUIRY, with a page code for vital product data.
    ///
    /// # Errors
    /// If the unit does not have this page.
    pub fn inquiry(&mut self, page: Option<u8>) -> Result<Vec<u8>> {
        self.command("INQUIRY", &cdb::inquiry(page, 1024), 1024)
    }

    /// Starts READ (16). [`Unit::finish`] returns the complete data.
    ///
    /// # Errors
    /// If the session has ended.
    pub fn start_read(&mut self, block: u64, blocks: u32) -> Result<u32> {
        let length = blocks * self.info.block_size;
        let request = Initiator::read(self.lun, &cdb16(opcode::READ_16, block, blocks), length);
        let itt = self.session.submit(request)?;
        self.expected.insert(itt, Some(length));
        Ok(itt)
    }

    /// Starts WRITE (16) of whole blocks.
    ///
    /// # Errors
    /// If the session has ended.
    pub fn start_write(&mut self, block: u64, data: Vec<u8>) -> Result<u32> {
        let blocks = data.len() as u32 / self.info.block_size;
        let request = Initiator::write(self.lun, &cdb16(opcode::WRITE_16, block, blocks), data);
        let itt = self.session.submit(request)?;
        self.expected.insert(itt, None);
        Ok(itt)
    }

    /// Waits for the next completed read or write. Returns its ITT and the read data.
    ///
    /// # Errors
    /// If the command failed, or transferred less than its length. A unit attention is also an error here, because its
    /// meaning for several commands in flight depends on the caller.
    pub fn finish(&mut self) -> Result<(u32, Vec<u8>)> {
        let done = self.session.wait()?;
        let itt = done.itt;
        match self.expected.remove(&itt).flatten() {
            None => written("WRITE(16)", checked("WRITE(16)", done)?).map(|()| (itt, Vec::new())),
            Some(length) => {
                read_whole("READ(16)", checked("READ(16)", done)?, length).map(|data| (itt, data))
            }
        }
    }

    /// Zeroes blocks: WRITE SAME (16), with the UNMAP bit if `unmaps`.
    ///
    /// # Errors
    /// If the unit refuses.
    pub fn write_zeroes(&mut self, block: u64, blocks: u32, unmaps: bool) -> Result<()> {
        let mut cdb = cdb16(opcode::WRITE_SAME_16, block, blocks);
        if unmaps {
            cdb[1] = UNMAP_BIT;
        }
        let zeroes = vec![0; self.info.block_size as usize];
        self.command_out("WRITE SAME(16)", &cdb, &zeroes)
    }

    /// Makes written data durable: SYNCHRONIZE CACHE (16) of the whole unit.
    ///
    /// # Errors
    /// If the unit refuses.
    pub fn flush(&mut self) -> Result<()> {
        let cdb = cdb16(opcode::SYNCHRONIZE_CACHE_16, 0, 0);
        self.command("SYNCHRONIZE CACHE(16)", &cdb, 0).map(drop)
    }

    /// Returns the extents of one GET LBA STATUS response, from `block` on. Blocks without a valid descriptor are data.
    ///
    /// # Errors
    /// If the session has ended.
    pub fn extents(&mut self, block: u64) -> Result<Vec<Extent>> {
        const NAME: &str = "GET LBA STATUS";
        let all = Extent {
            block,
            blocks: self.info.blocks.saturating_sub(block),
            mapped: true,
        };
        let length = 8 + 16 * EXTENTS;
        let cdb = cdb::get_lba_status(block, length);
        let data = match self.command(NAME, &cdb, length) {
            Ok(data) => data,
            Err(CommandError::Refused { .. }) => return Ok(vec![all]),
            Err(error) => return Err(error),
        };
        let extents = parse_extents(&data, block, self.info.blocks);
        Ok(if extents.is_empty() {
            vec![all]
        } else {
            extents
        })
    }

    /// Executes a command that reads up to `length` bytes. Skips unit attentions and retries while the unit is busy.
    pub(crate) fn command(
        &mut self,
        name: &'static str,
        cdb: &[u8],
        length: u32,
    ) -> Result<Vec<u8>> {
        command(&mut self.session, self.lun, name, cdb, length)
    }

    /// Executes a command that writes `data`.
    pub(crate) fn command_out(
        &mut self,
        name: &'static str,
        cdb: &[u8],
        data: &[u8],
    ) -> Result<()> {
        let lun = self.lun;
        let done = retried(&mut self.session, name, || {
            Initiator::write(lun, cdb, data.to_vec())
        })?;
        written(name, done)
    }
}

/// A logical unit in a target's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReportedLun {
    /// The number for addresses.
    pub lun: Lun,
    /// The LUN field, as reported.
    pub field: u64,
}

/// The logical units of a target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LunList {
    /// The reported units, in the order of their numbers.
    pub luns: Vec<ReportedLun>,
    /// Number of further units that are not included.
    pub missing: u64,
}

/// Reads the logical units of a target with REPORT LUNS.
///
/// # Errors
/// If the target does not answer, or the response is too short.
pub fn luns(session: &mut Session) -> Result<LunList> {
    let mut data = report_luns(session, LUNS_BYTES)?;
    let length = |data: &[u8]| {
        data.first_chunk::<4>()
            .map_or(0, |length| u32::from_be_bytes(*length))
    };
    let wanted = length(&data).saturating_add(8).min(LUNS_BYTES_MAX);
    if wanted > LUNS_BYTES {
        data = report_luns(session, wanted)?;
    }
    if data.len() < 8 {
        let reason = format!("the response of the unit has only {} bytes", data.len());
        return Err(answer("REPORT LUNS", reason));
    }
    Ok(lun_list(&data, length(&data)))
}

fn report_luns(session: &mut Session, length: u32) -> Result<Vec<u8>> {
    let cdb = cdb12(opcode::REPORT_LUNS, 0, length);
    Ok(retried(session, "REPORT LUNS", || Initiator::read(0, &cdb, length))?.data)
}

/// Parses REPORT LUNS parameter data (SPC-5, 6.33) with LUN LIST LENGTH `length`.
fn lun_list(data: &[u8], length: u32) -> LunList {
    let list = data.get(8..).unwrap_or_default();
    let list = list.get(..length as usize).unwrap_or(list);
    let (fields, _) = list.as_chunks::<8>();
    let missing = u64::from(length / 8) - fields.len() as u64;
    let mut fields: Vec<u64> = fields
        .iter()
        .map(|field| u64::from_be_bytes(*field))
        .collect();
    let order = |field: &u64| (Lun::number_of(*field).unwrap_or(u16::MAX), *field);
    fields.sort_unstable_by_key(order);
    fields.dedup();
    let names = fields.iter().map(|field| {
        // If two units have the same number, the second is named by its field.
        let number = Lun::number_of(*field).map(Lun::Number);
        let number = number.filter(|number| number.field_among(&fields) == *field);
        ReportedLun {
            lun: number.unwrap_or(Lun::Field(*field)),
            field: *field,
        }
    });
    LunList {
        luns: names.collect(),
        missing,
    }
}

/// Returns the LUN field that the target uses for a unit. Some targets (LIO) report numbers above 255 in a format other
/// than SAM-5 requires, and accept only that format.
fn field_of(session: &mut Session, lun: Lun) -> Result<u64> {
    if let Lun::Field(field) = lun {
        return Ok(field);
    }
    match luns(session) {
        Ok(list) => {
            let fields: Vec<u64> = list.luns.iter().map(|one| one.field).collect();
            Ok(lun.field_among(&fields))
        }
        Err(CommandError::Session(error)) => Err(error.into()),
        // The target does not support REPORT LUNS.
        Err(_) => Ok(lun.standard_field()),
    }
}

/// Parses GET LBA STATUS parameter data (SBC-4, 5.6.2) from block `from` on, for a unit of `blocks` blocks.
///
/// Only PROVISIONING STATUS 1h (deallocated) and 2h (anchored) mark a hole. 0h, 3h (mapped), 4h (unknown) and reserved
/// values are data. Parsing stops at the first descriptor that does not start at the end of the previous one. Blocks after
/// the last extent are not described; the caller treats them as data.
pub fn parse_extents(data: &[u8], from: u64, blocks: u64) -> Vec<Extent> {
    let mut extents = Vec::new();
    let Some((length, _)) = data.split_first_chunk::<4>() else {
        return extents;
    };
    // PARAMETER DATA LENGTH excludes its own four bytes.
    let end = (u32::from_be_bytes(*length) as usize).saturating_add(4);
    let list = data.get(8..end.min(data.len())).unwrap_or_default();
    let mut next = from;
    for descriptor in list.chunks_exact(16) {
        let number = |field: &[u8]| {
            field
                .iter()
                .fold(0u64, |number, byte| number << 8 | u64::from(*byte))
        };
        let (first, count) = (number(&descriptor[..8]), number(&descriptor[8..12]));
        let count = count.min(blocks.saturating_sub(first));
        if first != next || count == 0 {
            break;
        }
        extents.push(Extent {
            block: first,
            blocks: count,
            mapped: !matches!(descriptor[12], DEALLOCATED | ANCHORED),
        });
        next = first + count;
    }
    extents
}

/// Reads identity and size of a unit.
fn read_unit_info(session: &mut Session, lun: u64) -> Result<UnitInfo> {
    let mut info = UnitInfo::default();
    let mut ask = |name, cdb: &[u8], length| command(session, lun, name, cdb, length);
    info.take_identity(&mut ask)?;
    info.take_size(&mut ask)?;
    Ok(info)
}

fn command(
    session: &mut Session,
    lun: u64,
    name: &'static str,
    cdb: &[u8],
    length: u32,
) -> Result<Vec<u8>> {
    retried(session, name, || match length {
        0 => Request {
            read_length: None,
            ..Initiator::read(lun, cdb, 0)
        },
        length => Initiator::read(lun, cdb, length),
    })
    .map(|done| done.data)
}

fn retried(
    session: &mut Session,
    command: &'static str,
    request: impl Fn() -> Request,
) -> Result<CommandDone> {
    let (mut attentions, mut busy) = (0, 0);
    loop {
        let done = session.run(request())?;
        match checked(command, done) {
            Err(CommandError::Refused {
                sense: Some(sense), ..
            }) if sense.key == Sense::UNIT_ATTENTION && attentions < ATTENTIONS_MAX => {
                attentions += 1;
            }
            Err(CommandError::Refused { status, .. })
                if matches!(status, BUSY | TASK_SET_FULL) && busy < BUSY_MAX =>
            {
                std::thread::sleep(BUSY_PAUSE * (1 << busy));
                busy += 1;
            }
            outcome => return outcome,
        }
    }
}

/// Checks that a read returned all data. After a short read with status GOOD the missing data is unknown.
fn read_whole(command: &'static str, done: CommandDone, length: u32) -> Result<Vec<u8>> {
    match done.data.len() {
        came if came == length as usize => Ok(done.data),
        came => Err(answer(
            command,
            format!("received {came} of {length} bytes"),
        )),
    }
}

/// Checks that a write transferred all data. After a short write with status GOOD some data is not written.
fn written(command: &'static str, done: CommandDone) -> Result<()> {
    match done.residual {
        0.. => Ok(()),
        short => Err(answer(
            command,
            format!("target did not accept {} bytes", -short),
        )),
    }
}

/// Returns a response with status GOOD.
///
/// # Errors
/// Any other response.
pub fn checked(command: &'static str, done: CommandDone) -> Result<CommandDone> {
    if done.response != 0 {
        let reason = format!("iSCSI response {:#04x}", done.response);
        return Err(answer(command, reason));
    }
    match done.status {
        GOOD => Ok(done),
        status => Err(CommandError::Refused {
            command,
            status,
            sense: Sense::parse(&done.sense),
        }),
    }
}

pub(crate) fn answer(command: &'static str, reason: impl Into<String>) -> CommandError {
    CommandError::Answer {
        command,
        reason: reason.into(),
    }
}

/// Converts text of a target for a terminal: replaces control characters.
pub(crate) fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim_matches([' ', '\0']);
    text.replace(char::is_control, "?")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn luns_of_every_format_are_listed() {
        let fields: [[u8; 8]; 7] = [
            [0x40, 0x07, 0, 0, 0, 0, 0, 0],
            // LIO: the plain number, and flat space addressing.
            [0x01, 0x2c, 0, 0, 0, 0, 0, 0],
            [0x41, 0x2d, 0, 0, 0, 0, 0, 0],
            [0x41, 0x2c, 0, 0, 0, 0, 0, 0],
            // Logical unit and extended addressing, and a second level.
            [0x80, 0x05, 0, 0, 0, 0, 0, 0],
            [0xd2, 0x00, 0x01, 0x00, 0x00, 0, 0, 0],
            [0x00, 0x01, 0x00, 0x02, 0, 0, 0, 0],
        ];
        let mut data = vec![0, 0, 0, 56, 0, 0, 0, 0];
        data.extend(fields.as_flattened());
        let list = lun_list(&data, 56);
        assert_eq!(list.missing, 0);
        let names: Vec<String> = list.luns.iter().map(|one| one.lun.to_string()).collect();
        assert_eq!(
            names,
            [
                "7",
                "0x012c000000000000",
                "300",
                "301",
                "0x0001000200000000",
                "0x8005000000000000",
                "0xd200010000000000",
            ]
        );
        let reported: Vec<u64> = list.luns.iter().map(|one| one.field).collect();
        for one in &list.luns {
            let again: Lun = one.lun.to_string().parse().unwrap();
            let field = match again {
                Lun::Field(field) => field,
                number => number.field_among(&reported),
            };
            assert_eq!(field, one.field, "{}", one.lun);
        }
    }

    #[test]
    fn missing_luns_are_counted() {
        let mut data = vec![0, 0, 0, 40, 0, 0, 0, 0];
        data.extend([0; 8]);
        data.extend([0, 1, 0, 0, 0, 0, 0, 0, 0xff]);
        let list = lun_list(&data, 40);
        assert_eq!((list.luns.len(), list.missing), (2, 3));
        // Bytes after the LUN LIST LENGTH are not part of the list.
        let list = lun_list(&data, 8);
        assert_eq!((list.luns.len(), list.missing), (1, 0));
        for cut in 0..data.len() {
            lun_list(&data[..cut], u32::MAX);
        }
    }

    /// Builds GET LBA STATUS parameter data with these descriptors: first block, blocks, PROVISIONING STATUS.
    fn lba_status(descriptors: &[(u64, u32, u8)]) -> Vec<u8> {
        let mut data = (4 + 16 * descriptors.len() as u32).to_be_bytes().to_vec();
        data.extend([0; 4]);
        for (block, blocks, status) in descriptors {
            data.extend(block.to_be_bytes());
            data.extend(blocks.to_be_bytes());
            data.extend([*status, 0, 0, 0]);
        }
        data
    }

    fn parsed(data: &[u8]) -> Vec<(u64, u64, bool)> {
        let extents = parse_extents(data, 8, 100);
        let each = extents.iter();
        each.map(|extent| (extent.block, extent.blocks, extent.mapped))
            .collect()
    }

    #[test]
    fn only_deallocated_and_anchored_blocks_are_holes() {
        for status in 0..=u8::MAX {
            let is_hole = status == 1 || status == 2;
            let extents = parsed(&lba_status(&[(8, 4, status)]));
            assert_eq!(extents, [(8, 4, !is_hole)], "{status:02x}h");
        }
    }

    #[test]
    fn lba_status_descriptors_count_up_to_the_first_that_does_not_follow() {
        let hole = (8, 4, false);
        for next in [(11, 4, 1), (13, 4, 1), (8, 4, 1), (0, 100, 1), (12, 0, 1)] {
            let data = lba_status(&[(8, 4, 1), next, (16, 4, 1)]);
            assert_eq!(parsed(&data), [hole], "{next:?}");
        }
        // The first descriptor must start at the requested block.
        for first in [(0, 50, 1), (9, 4, 1), (u64::MAX, 4, 1)] {
            assert_eq!(parsed(&lba_status(&[first])), [], "{first:?}");
        }
        // A descriptor that extends beyond the end of the unit.
        assert_eq!(parsed(&lba_status(&[(8, u32::MAX, 2)])), [(8, 92, false)]);
    }

    #[test]
    fn lba_status_ends_at_the_parameter_data_length() {
        let mut data = lba_status(&[(8, 4, 1), (12, 4, 1)]);
        assert_eq!(parsed(&data).len(), 2);
        for cut in 0..data.len() {
            assert_eq!(parsed(&data[..cut]).len(), cut.saturating_sub(8) / 16);
        }
        // The rest of the buffer is not part of the response.
        data[..4].copy_from_slice(&[0, 0, 0, 20]);
        assert_eq!(parsed(&data).len(), 1);
        data[..4].copy_from_slice(&[0, 0, 0, 0]);
        assert_eq!(parsed(&data).len(), 0);
        data[..4].copy_from_slice(&[0xff; 4]);
        assert_eq!(parsed(&data).len(), 2);
    }

    #[test]
    fn text_of_a_target_has_no_control_characters() {
        assert_eq!(printable(b"  LUN\x1b[2J 0\0\0"), "LUN?[2J 0");
    }

    #[test]
    fn short_read_is_an_error() {
        let done = CommandDone {
            data: vec![0; 512],
            ..CommandDone::default()
        };
        assert_eq!(
            read_whole("READ(16)", done.clone(), 512).unwrap().len(),
            512
        );
        let error = read_whole("READ(16)", done, 1024).unwrap_err().to_string();
        assert_eq!(error, "READ(16): received 512 of 1024 bytes");
    }

    #[test]
    fn short_write_is_an_error() {
        let done = |residual| CommandDone {
            residual,
            ..CommandDone::default()
        };
        assert!(written("WRITE(16)", done(0)).is_ok());
        let error = written("WRITE(16)", done(-512)).unwrap_err().to_string();
        assert_eq!(error, "WRITE(16): target did not accept 512 bytes");
    }

    #[test]
    fn refusals_have_a_description() {
        let error = |status, sense| CommandError::Refused {
            command: "WRITE(16)",
            status,
            sense,
        };
        let protected = Sense {
            key: 7,
            code: 0x27,
            qualifier: 0,
        };
        assert_eq!(
            error(CHECK_CONDITION, Some(protected)).to_string(),
            "WRITE(16): DATA PROTECT, 27h/00h (write protected)"
        );
        assert!(
            error(RESERVATION_CONFLICT, None)
                .to_string()
                .contains("hint: ")
        );
    }
}

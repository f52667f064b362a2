//! Recovery within a connection, error recovery level 1 (RFC 7143, 7.1.4 and 7.8): data segments with a wrong digest are
//! requested again.
//!
//! Read data is requested from the first missing PDU to the last one sent. PDUs that arrive before the first missing one
//! are ignored. A response is requested by its StatSN, and held until the preceding data has arrived. ExpStatSN does not
//! advance past a missing response.

use zerocopy::big_endian::U32;

use super::events::InitiatorError;
use super::requests::Kind;
use super::session::Initiator;
use crate::pdu::{Bhs, DataIn, DataOut, NO_TAG, NopIn, Opcode, SnackRequest, SnackType, encode};
use crate::serial::before;

/// Maximum number of SNACKs per command, and of responses received ahead of a missing one.
const SNACKS_MAX: u32 = 64;
const AHEAD_MAX: usize = 1024;
/// Maximum number of retransmissions of a command after the target reported a data digest error.
const REPEATS_MAX: u32 = 4;

/// Result of checking a StatSN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counted {
    /// First reception.
    New,
    /// Duplicate.
    Again,
}

impl Initiator {
    pub(super) fn recovers_digests(&self) -> bool {
        self.parameters.error_recovery_level > 0
    }

    /// Handles a full-feature PDU with a valid header and a wrong data digest.
    pub(super) fn digest_failed(&mut self, cid: u16, bhs: &Bhs) -> Result<(), InitiatorError> {
        let fields = NopIn::from_bhs(bhs);
        match bhs.kind() {
            Some(Opcode::DataIn) => {
                let data_sn = DataIn::from_bhs(bhs).data_sn.get();
                let itt = bhs.itt.get();
                let command = self.command_task(cid, itt)?;
                // Later PDUs are sent again together with the first missing one.
                if data_sn != command.data_sn {
                    return Ok(());
                }
                command.snacks += 1;
                if command.snacks > SNACKS_MAX {
                    return Err(InitiatorError::DataDigest);
                }
                let lun = self.tasks.get(&itt).map_or([0; 8], |task| task.lun);
                self.send_snack(cid, SnackType::Data, itt, lun, data_sn, 0)
            }
            // The data of a ping is not used.
            Some(Opcode::NopIn) if fields.itt.get() == NO_TAG => Ok(()),
            _ => {
                let link = self.link(cid)?;
                link.responses_asked += 1;
                if link.responses_asked > SNACKS_MAX {
                    return Err(InitiatorError::DataDigest);
                }
                let stat_sn = fields.stat_sn.get();
                self.send_snack(cid, SnackType::Status, NO_TAG, [0; 8], stat_sn, 1)
            }
        }
    }

    fn send_snack(
        &mut self,
        cid: u16,
        kind: SnackType,
        itt: u32,
        lun: [u8; 8],
        begin: u32,
        length: u32,
    ) -> Result<(), InitiatorError> {
        let link = self.link(cid)?;
        let mut header = SnackRequest::blank();
        header.flags |= kind.wire();
        header.lun = lun;
        header.itt = U32::new(itt);
        header.ttt = U32::new(NO_TAG);
        header.exp_stat_sn = U32::new(link.exp_stat_sn);
        header.begin_run = U32::new(begin);
        header.run_length = U32::new(length);
        encode(&mut link.out, header.to_bhs(), &[], &[], link.digests);
        Ok(())
    }

    /// Counts a StatSN that may be out of order.
    pub(super) fn count_any(
        &mut self,
        cid: u16,
        stat_sn: u32,
        shows: bool,
    ) -> Result<Counted, InitiatorError> {
        let link = self.link(cid)?;
        if shows {
            return Ok(Counted::New);
        }
        if before(stat_sn, link.exp_stat_sn) || !link.ahead.insert(stat_sn) {
            return Ok(Counted::Again);
        }
        while link.ahead.remove(&link.exp_stat_sn) {
            link.exp_stat_sn = link.exp_stat_sn.wrapping_add(1);
            link.responses_asked = 0;
        }
        match link.ahead.len() > AHEAD_MAX {
            true => Err(InitiatorError::Protocol("StatSNs are missing")),
            false => Ok(Counted::New),
        }
    }

    /// Holds a response that arrived before all the data that it counts. Returns true if it is held.
    pub(super) fn hold_early_response(&mut self, cid: u16, bhs: &Bhs, segment: &[u8]) -> bool {
        let exp_data_sn = crate::pdu::ScsiResponse::from_bhs(bhs).exp_data_sn.get();
        let Ok(command) = self.command_task(cid, bhs.itt.get()) else {
            return false;
        };
        let is_early = command.snacks > 0 && before(command.data_sn, exp_data_sn);
        if is_early {
            command.held = Some((*bhs, segment.to_vec()));
        }
        is_early
    }

    /// Returns the held response of a task if its data is complete.
    pub(super) fn release_held(&mut self, cid: u16, itt: u32) -> Option<(Bhs, Vec<u8>)> {
        let command = self.command_task(cid, itt).ok()?;
        let (bhs, _) = command.held.as_ref()?;
        let exp_data_sn = crate::pdu::ScsiResponse::from_bhs(bhs).exp_data_sn.get();
        match before(command.data_sn, exp_data_sn) {
            true => None,
            false => command.held.take(),
        }
    }

    /// Interprets a Reject when digest errors are recovered.
    pub(super) fn judge_reject(
        &mut self,
        cid: u16,
        reason: u8,
        bhs: &Bhs,
    ) -> Result<Rejection, InitiatorError> {
        const DATA_DIGEST: u8 = 0x02;
        const PROTOCOL: u8 = 0x04;
        let (kind, itt) = (bhs.kind(), bhs.itt.get());
        if !self.recovers_digests() {
            return Ok(Rejection::Final);
        }
        if kind == Some(Opcode::SnackRequest) {
            return Err(InitiatorError::DataDigest);
        }
        match (kind, reason) {
            // The target requests the data with an R2T, or fails the command.
            (Some(Opcode::DataOut), DATA_DIGEST) => Ok(Rejection::Recovered),
            (Some(Opcode::ScsiCommand), DATA_DIGEST) => {
                self.repeat_unless_received(cid, itt)?;
                Ok(Rejection::Recovered)
            }
            // Unsolicited data of a repeated command, which may have ended in the meantime.
            (Some(Opcode::DataOut), PROTOCOL) if DataOut::from_bhs(bhs).ttt.get() == NO_TAG => {
                match self.command_task(cid, itt) {
                    Ok(command) if command.repeats == 0 => Ok(Rejection::Final),
                    _ => Ok(Rejection::Recovered),
                }
            }
            _ => Ok(Rejection::Final),
        }
    }

    /// Repeats a command unless the target received it. Some targets drop a command with corrupt immediate data; others
    /// request the data. ExpCmdSN shows which, and duplicates are ignored (4.2.2.1).
    fn repeat_unless_received(&mut self, cid: u16, itt: u32) -> Result<(), InitiatorError> {
        let exp_cmd_sn = self.exp_cmd_sn;
        let Some(task) = self.tasks.get_mut(&itt).filter(|task| task.cid == cid) else {
            return Ok(());
        };
        let (cmd_sn, numbered) = (task.cmd_sn, task.numbered);
        let Kind::Command(command) = &mut task.kind else {
            return Ok(());
        };
        if numbered && !before(cmd_sn, exp_cmd_sn) {
            command.repeats += 1;
            if command.repeats > REPEATS_MAX {
                return Err(InitiatorError::DataDigest);
            }
            if let Some(request) = command.request.clone() {
                self.send_as(*request, cmd_sn);
            }
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rejection {
    /// The request has ended.
    Final,
    /// The request continues.
    Recovered,
}

//! Processes PDUs from the target and checks them against the outstanding requests.

use zerocopy::big_endian::U32;

use super::events::{CommandDone, Event, InitiatorError};
use super::requests::{CommandTask, Kind, Task, send_data};
use super::session::{Initiator, Phase};
use super::snack::{Counted, Rejection};
use crate::login::LoginProgress;
use crate::pdu::{
    AsyncMessage, Bhs, CONTINUE, DataIn, Digests, FINAL, IMMEDIATE, LoginResponse, LogoutResponse,
    LogoutResponseCode, NO_TAG, NopIn, NopOut, Opcode, Progress, ReadyToTransfer, Reject,
    ScsiResponse, TaskManagementResponse, TextResponse, encode,
};
use crate::serial::before;

type Outcome = Result<Option<Event>, InitiatorError>;

/// Maximum number of R2T requests per byte at error recovery levels above 0.
const REQUESTS_MAX: usize = 4;

const UNKNOWN_TASK: InitiatorError = InitiatorError::Protocol("response to an unknown task");

impl Initiator {
    /// Processes received bytes of a connection and returns the events. After an error the connection is unusable.
    pub fn receive(&mut self, cid: u16, input: &[u8]) -> Result<Vec<Event>, InitiatorError> {
        let mut events = Vec::new();
        self.receive_into(cid, input, &mut events)?;
        Ok(events)
    }

    /// As `receive`, but also delivers the events before an error.
    ///
    /// # Errors
    /// The connection is unusable.
    pub fn receive_into(
        &mut self,
        cid: u16,
        mut input: &[u8],
        events: &mut Vec<Event>,
    ) -> Result<(), InitiatorError> {
        // A data segment that is complete in the input; it is not copied.
        let mut whole: &[u8] = &[];
        loop {
            let link = self.link(cid)?;
            let (used, progress) = link.decoder.push(input)?;
            input = &input[used..];
            match progress {
                Progress::NeedMore(_) => {
                    link.inline.extend_from_slice(whole);
                    return Ok(());
                }
                Progress::Header => link.inline.clear(),
                Progress::Data(_) if input.is_empty() => return Ok(()),
                Progress::Data(left) => {
                    let (piece, rest) = input.split_at(input.len().min(left as usize));
                    link.decoder.take_data(piece);
                    match link.inline.is_empty() && piece.len() == left as usize {
                        true => whole = piece,
                        false => {
                            // Reserved once, because the segment arrives in pieces. The decoder has checked the length.
                            link.inline.reserve(left as usize);
                            link.inline.extend_from_slice(piece);
                        }
                    }
                    input = rest;
                }
                Progress::End { digest_ok: false } => {
                    let bhs = link.decoder.bhs();
                    let is_open = matches!(link.phase, Phase::Full);
                    if !is_open || !self.recovers_digests() {
                        return Err(InitiatorError::DataDigest);
                    }
                    self.digest_failed(cid, &bhs)?;
                    whole = &[];
                }
                Progress::End { digest_ok: true } => {
                    let bhs = link.decoder.bhs();
                    let inline = std::mem::take(&mut link.inline);
                    let segment = match whole {
                        [] => inline.as_slice(),
                        whole => whole,
                    };
                    self.pdu(cid, &bhs, segment, events)?;
                    self.link(cid)?.inline = inline;
                    whole = &[];
                }
            }
        }
    }

    fn pdu(
        &mut self,
        cid: u16,
        bhs: &Bhs,
        segment: &[u8],
        events: &mut Vec<Event>,
    ) -> Result<(), InitiatorError> {
        let in_login = matches!(self.link(cid)?.phase, Phase::Login(_));
        let kind = bhs.kind();
        if in_login != (kind == Some(Opcode::LoginResponse)) {
            return Err(InitiatorError::Protocol(
                "PDU does not belong to this phase",
            ));
        }
        if in_login {
            events.extend(self.login(cid, &LoginResponse::from_bhs(bhs), segment)?);
            return Ok(());
        }
        if self.recovers_digests()
            && bhs.kind() == Some(Opcode::ScsiResponse)
            && self.hold_early_response(cid, bhs, segment)
        {
            return Ok(());
        }
        let held_for = (bhs.kind() == Some(Opcode::DataIn)).then(|| bhs.itt.get());
        let event = self.counted(cid, bhs, segment, events)?;
        events.extend(event);
        if let Some((bhs, segment)) = held_for.and_then(|itt| self.release_held(cid, itt)) {
            let event = self.counted(cid, &bhs, &segment, events)?;
            events.extend(event);
        }
        Ok(())
    }

    /// Processes a PDU of the full feature phase in StatSN order.
    fn counted(&mut self, cid: u16, bhs: &Bhs, segment: &[u8], events: &mut Vec<Event>) -> Outcome {
        let kind = bhs.kind();
        // StatSN, ExpCmdSN and MaxCmdSN have the same offsets in all responses.
        let numbers = NopIn::from_bhs(bhs);
        self.moved(numbers.exp_cmd_sn.get(), numbers.max_cmd_sn.get());
        let passes_over = self.is_unexpected_data(cid, bhs);
        if passes_over || self.count_status(cid, bhs, numbers.stat_sn.get())? == Counted::Again {
            return Ok(None);
        }
        match kind {
            Some(Opcode::ScsiResponse) => {
                self.scsi_response(cid, &ScsiResponse::from_bhs(bhs), segment)
            }
            Some(Opcode::DataIn) => self.data_in(cid, &DataIn::from_bhs(bhs), segment),
            Some(Opcode::ReadyToTransfer) => {
                self.ready_to_transfer(cid, &ReadyToTransfer::from_bhs(bhs))
            }
            Some(Opcode::TaskManagementResponse) => {
                let response = TaskManagementResponse::from_bhs(bhs);
                if let Some(Kind::Reassign { referenced }) =
                    self.tasks.get(&bhs.itt.get()).map(|task| &task.kind)
                {
                    let referenced = *referenced;
                    self.finish(cid, bhs.itt.get(), |kind| {
                        matches!(kind, Kind::Reassign { .. })
                    })?;
                    return self.reassigned(referenced, response.response);
                }
                self.finish(cid, bhs.itt.get(), |kind| {
                    matches!(kind, Kind::TaskManagement)
                })?;
                Ok(Some(Event::TaskManagement {
                    itt: bhs.itt.get(),
                    response: response.response,
                }))
            }
            Some(Opcode::TextResponse) => {
                self.text_response(cid, &TextResponse::from_bhs(bhs), segment)
            }
            Some(Opcode::NopIn) => self.nop_in(cid, &numbers, segment, events),
            Some(Opcode::LogoutResponse) => {
                self.logout_response(cid, &LogoutResponse::from_bhs(bhs), events)
            }
            Some(Opcode::Reject) => self.rejected(cid, &Reject::from_bhs(bhs), segment),
            Some(Opcode::AsyncMessage) => {
                let message = AsyncMessage::from_bhs(bhs);
                let parameters = [
                    message.parameter_1,
                    message.parameter_2,
                    message.parameter_3,
                ]
                .map(|p| p.get());
                let (event, lun, data) = (message.event, message.lun, segment.to_vec());
                Ok(Some(Event::Async {
                    event,
                    lun,
                    parameters,
                    data,
                }))
            }
            _ => Err(InitiatorError::Protocol("opcode that targets do not send")),
        }
    }

    /// Counts StatSN, which increases by one with every status (4.2.2.2). R2Ts, pings and Data-In without status only show
    /// it.
    fn count_status(
        &mut self,
        cid: u16,
        bhs: &Bhs,
        stat_sn: u32,
    ) -> Result<Counted, InitiatorError> {
        let shows = match bhs.kind() {
            Some(Opcode::DataIn) if bhs.flags & DataIn::STATUS == 0 => return Ok(Counted::New),
            Some(Opcode::ReadyToTransfer) => true,
            Some(Opcode::NopIn) => bhs.itt.get() == NO_TAG,
            _ => false,
        };
        if self.recovers_digests() {
            return self.count_any(cid, stat_sn, shows);
        }
        let link = self.link(cid)?;
        if stat_sn != link.exp_stat_sn {
            return Err(InitiatorError::Protocol("StatSN out of order"));
        }
        if !shows {
            link.exp_stat_sn = stat_sn.wrapping_add(1);
        }
        Ok(Counted::New)
    }

    /// Returns true for read data that is a duplicate or precedes data requested again.
    fn is_unexpected_data(&mut self, cid: u16, bhs: &Bhs) -> bool {
        if !self.recovers_digests() || bhs.kind() != Some(Opcode::DataIn) {
            return false;
        }
        let data_sn = DataIn::from_bhs(bhs).data_sn.get();
        match self.command_task(cid, bhs.itt.get()) {
            Ok(command) => command.snacks > 0 && data_sn != command.data_sn,
            // A duplicate for a task that has ended.
            Err(_) => true,
        }
    }

    fn login(&mut self, cid: u16, response: &LoginResponse, segment: &[u8]) -> Outcome {
        let link = self.link(cid)?;
        let Phase::Login(login) = &mut link.phase else {
            return Ok(None);
        };
        if response.itt.get() != link.login_itt {
            return Err(UNKNOWN_TASK);
        }
        match login.handle(response, segment)? {
            LoginProgress::Send(mut request, text) => {
                request.itt = U32::new(link.login_itt);
                encode(
                    &mut link.out,
                    request.to_bhs(),
                    &[],
                    &text,
                    Digests::default(),
                );
                Ok(None)
            }
            LoginProgress::Done(result) => {
                self.logged_in(cid, &result)?;
                Ok(Some(Event::LoggedIn(result)))
            }
        }
    }

    pub(super) fn command_task(
        &mut self,
        cid: u16,
        itt: u32,
    ) -> Result<&mut CommandTask, InitiatorError> {
        match self
            .tasks
            .get_mut(&itt)
            .filter(|task| task.cid == cid)
            .map(|task| &mut task.kind)
        {
            Some(Kind::Command(command)) => Ok(command),
            _ => Err(UNKNOWN_TASK),
        }
    }

    fn finish(
        &mut self,
        cid: u16,
        itt: u32,
        is_right: impl Fn(&Kind) -> bool,
    ) -> Result<Kind, InitiatorError> {
        match self.tasks.get(&itt) {
            Some(task) if task.cid == cid && is_right(&task.kind) => {}
            _ => return Err(UNKNOWN_TASK),
        }
        self.tasks
            .remove(&itt)
            .map(|task| task.kind)
            .ok_or(UNKNOWN_TASK)
    }

    fn data_in(&mut self, cid: u16, header: &DataIn, segment: &[u8]) -> Outcome {
        let itt = header.itt.get();
        let command = self.command_task(cid, itt)?;
        if header.data_sn.get() != command.data_sn {
            return Err(InitiatorError::Protocol("DataSN out of order"));
        }
        command.data_sn = command.data_sn.wrapping_add(1);
        let offset = header.buffer_offset.get() as usize;
        if offset != command.data.len() {
            return Err(InitiatorError::Protocol("read data out of order"));
        }
        if segment.len() > command.read_length as usize - command.data.len() {
            return Err(InitiatorError::Protocol("more read data than expected"));
        }
        if command.data.is_empty() {
            command.data.reserve_exact(command.read_length as usize);
        }
        command.data.extend_from_slice(segment);
        if header.flags & DataIn::STATUS == 0 {
            return Ok(None);
        }
        if header.flags & FINAL == 0 {
            return Err(InitiatorError::Protocol("status without the F bit"));
        }
        let residual = signed(
            header.residual.get(),
            header.flags & DataIn::OVERFLOW != 0,
            header.flags & DataIn::UNDERFLOW != 0,
        );
        let data = std::mem::take(&mut command.data);
        let written = std::mem::take(&mut command.write);
        self.finish(cid, itt, |kind| matches!(kind, Kind::Command(_)))?;
        let status = header.status;
        Ok(Some(Event::Command(CommandDone {
            itt,
            status,
            data,
            written,
            residual,
            ..CommandDone::default()
        })))
    }

    fn scsi_response(&mut self, cid: u16, header: &ScsiResponse, segment: &[u8]) -> Outcome {
        let itt = header.itt.get();
        let command = self.command_task(cid, itt)?;
        // Targets that follow RFC 3720 include R2Ts in the count; others do not.
        if before(command.data_sn, header.exp_data_sn.get()) {
            return Err(InitiatorError::Protocol(
                "data PDUs are missing before the response",
            ));
        }
        let sense = match segment.split_first_chunk::<2>() {
            None => Vec::new(),
            Some((length, rest)) => {
                let length = usize::from(u16::from_be_bytes(*length));
                rest.get(..length)
                    .ok_or(InitiatorError::Protocol(
                        "sense data shorter than SenseLength",
                    ))?
                    .to_vec()
            }
        };
        let flag = |bit: u8| header.flags & bit != 0;
        let done = CommandDone {
            itt,
            response: header.response,
            status: header.status,
            sense,
            data: std::mem::take(&mut command.data),
            written: std::mem::take(&mut command.write),
            residual: signed(
                header.residual.get(),
                flag(ScsiResponse::OVERFLOW),
                flag(ScsiResponse::UNDERFLOW),
            ),
            bidirectional_residual: signed(
                header.bidirectional_residual.get(),
                flag(ScsiResponse::BIDIRECTIONAL_OVERFLOW),
                flag(ScsiResponse::BIDIRECTIONAL_UNDERFLOW),
            ),
        };
        self.finish(cid, itt, |kind| matches!(kind, Kind::Command(_)))?;
        Ok(Some(Event::Command(done)))
    }

    fn ready_to_transfer(&mut self, cid: u16, header: &ReadyToTransfer) -> Outcome {
        let itt = header.itt.get();
        let max_burst = self.parameters.max_burst_length as usize;
        let most = if self.recovers_digests() {
            REQUESTS_MAX
        } else {
            1
        };
        let lun = self.tasks.get(&itt).ok_or(UNKNOWN_TASK)?.lun;
        let command = self.command_task(cid, itt)?;
        if std::mem::take(&mut command.takes_any_r2t) {
            command.data_sn = header.r2t_sn.get();
        }
        if header.r2t_sn.get() != command.data_sn {
            return Err(InitiatorError::Protocol("R2TSN out of order"));
        }
        command.data_sn = command.data_sn.wrapping_add(1);
        let (offset, length) = (
            header.buffer_offset.get() as usize,
            header.desired_length.get() as usize,
        );
        if length == 0 || length > max_burst {
            return Err(InitiatorError::Protocol(
                "R2T for 0 bytes, or for more than MaxBurstLength",
            ));
        }
        let end = offset
            .checked_add(length)
            .filter(|end| *end <= command.write.len());
        let end = end.ok_or(InitiatorError::Protocol(
            "R2T beyond the data of the command",
        ))?;
        // At error recovery level 0 no byte is requested twice. Otherwise a target could queue unlimited data.
        command.sent = command.sent.saturating_add(length);
        if command.sent > command.write.len().saturating_mul(most) {
            return Err(InitiatorError::Protocol(
                "R2Ts exceed the data of the command",
            ));
        }
        // Moved out during the call, because `link` is borrowed at the same time.
        let write = std::mem::take(&mut command.write);
        let link = self.link(cid)?;
        send_data(
            link,
            itt,
            header.ttt.get(),
            lun,
            offset,
            &write[offset..end],
        );
        self.command_task(cid, itt)?.write = write;
        Ok(None)
    }

    fn text_response(&mut self, cid: u16, header: &TextResponse, segment: &[u8]) -> Outcome {
        let itt = header.itt.get();
        let limit = self.settings.text_limit;
        let task = self
            .tasks
            .get_mut(&itt)
            .filter(|task| task.cid == cid)
            .ok_or(UNKNOWN_TASK)?;
        let Kind::Text { text } = &mut task.kind else {
            return Err(UNKNOWN_TASK);
        };
        if segment.len() > limit.saturating_sub(text.len()) {
            return Err(InitiatorError::Protocol("text longer than the limit"));
        }
        text.extend_from_slice(segment);
        let is_final = header.flags & FINAL != 0;
        if is_final && header.flags & CONTINUE != 0 {
            return Err(InitiatorError::Protocol("text with both F and C"));
        }
        if !is_final {
            if header.ttt.get() == NO_TAG {
                return Err(InitiatorError::Protocol("text with C and without a tag"));
            }
            self.continue_text(cid, itt, header.ttt.get());
            return Ok(None);
        }
        let text = std::mem::take(text);
        self.finish(cid, itt, |kind| matches!(kind, Kind::Text { .. }))?;
        self.unsent_text.remove(&itt);
        Ok(Some(Event::Text { itt, text }))
    }

    fn nop_in(
        &mut self,
        cid: u16,
        header: &NopIn,
        segment: &[u8],
        events: &mut Vec<Event>,
    ) -> Outcome {
        let itt = header.itt.get();
        if let Some(Kind::Probe { tasks_of }) = self.tasks.get(&itt).map(|task| &task.kind) {
            let tasks_of = *tasks_of;
            self.finish(cid, itt, |kind| matches!(kind, Kind::Probe { .. }))?;
            self.continue_tasks(tasks_of, cid, events)?;
            return Ok(None);
        }
        if itt != NO_TAG {
            self.finish(cid, itt, |kind| matches!(kind, Kind::Nop))?;
            return Ok(Some(Event::Nop {
                itt,
                data: segment.to_vec(),
            }));
        }
        if header.ttt.get() != NO_TAG {
            let cmd_sn = U32::new(self.cmd_sn);
            let link = self.link(cid)?;
            let mut answer = NopOut::idle();
            answer.opcode |= IMMEDIATE;
            answer.lun = header.lun;
            answer.ttt = header.ttt;
            answer.cmd_sn = cmd_sn;
            answer.exp_stat_sn = U32::new(link.exp_stat_sn);
            encode(&mut link.out, answer.to_bhs(), &[], segment, link.digests);
        }
        Ok(None)
    }

    fn logout_response(
        &mut self,
        cid: u16,
        header: &LogoutResponse,
        events: &mut Vec<Event>,
    ) -> Outcome {
        let itt = header.itt.get();
        let kind = self.finish(cid, itt, |kind| matches!(kind, Kind::Logout { .. }))?;
        if let Kind::Logout { closes: Some(lost) } = kind
            && lost != cid
            && self
                .links
                .get(usize::from(lost))
                .is_some_and(|link| link.recovers)
        {
            // Success or unknown CID. With any other response, tasks may still be running on the old connection.
            if header.response > LogoutResponseCode::CidNotFound.wire() {
                return Err(InitiatorError::Protocol(
                    "a lost connection is not removed for recovery",
                ));
            }
            self.continue_tasks(lost, cid, events)?;
            return Ok(None);
        }
        if header.response == 0 {
            let closes = match kind {
                Kind::Logout { closes } => closes,
                _ => None,
            };
            for (index, link) in self.links.iter_mut().enumerate() {
                if closes.is_none_or(|closed| index == usize::from(closed)) {
                    link.phase = Phase::Over;
                }
            }
        }
        Ok(Some(Event::LoggedOut {
            itt,
            response: header.response,
        }))
    }

    fn rejected(&mut self, cid: u16, header: &Reject, segment: &[u8]) -> Outcome {
        let rejected = <Bhs as zerocopy::FromBytes>::read_from_prefix(segment)
            .ok()
            .map(|(bhs, _)| bhs);
        if let Some(bhs) = &rejected
            && self.judge_reject(cid, header.reason, bhs)? == Rejection::Recovered
        {
            return Ok(None);
        }
        // Data-Out and SNACK PDUs start no task; the command is answered separately.
        let begins =
            |bhs: &Bhs| !matches!(bhs.kind(), Some(Opcode::DataOut | Opcode::SnackRequest));
        let mut written = Vec::new();
        if let Some(bhs) = rejected.filter(begins) {
            if let Some(Task {
                kind: Kind::Command(command),
                ..
            }) = self.tasks.remove(&bhs.itt.get())
            {
                written = command.write;
            }
            self.unsent_text.remove(&bhs.itt.get());
        }
        Ok(Some(Event::Rejected {
            reason: header.reason,
            header: rejected,
            written,
        }))
    }
}

fn signed(count: u32, over: bool, under: bool) -> i64 {
    match (over, under) {
        (true, false) => i64::from(count),
        (false, true) => -i64::from(count),
        _ => 0,
    }
}

//! Writes results of the SCSI core into chains (virtio 1.3, 5.6.6.1). `queue` writes the response of a successful plain command: zeroes.

use scsi::{Residual, Response, Status};
use scsi_exec::Hold;
use virtio_device::Answer;
use virtqueue::{Chain, ResponseSpace};

use crate::pending::Pending;
use crate::request::{self, RESPONSE_SIZE, SENSE_SIZE};

/// Answers a command outside of the fast path. Moves holds that wait for the response to `held_until_published`.
#[inline(never)]
pub(crate) fn answer_any(
    chain: &Chain,
    pending: &mut Pending,
    held_until_published: &mut Vec<Hold>,
) -> Answer {
    let code = pending.slow_path.aborted.unwrap_or(pending.slow_path.code);
    if code == request::S_OK
        && let Some((status, residual)) = pending.slow_path.task.take_plain()
    {
        let (residual, code) = residual_fields(residual);
        let header = request::response_header(0, residual, status as u8, code);
        chain
            .buffer
            .write_second_half(chain.readable as usize, header);
        pending.answered(held_until_published);
        return Answer {
            written: RESPONSE_SIZE as u32 + pending.data_in,
            good: true,
        };
    }
    if code != request::S_OK {
        pending.slow_path.task.abandon();
        chain.buffer.write_whole(
            chain.readable as usize,
            &request::response_header(0, 0, 0, code),
        );
        pending.answered(held_until_published);
        return Answer {
            written: RESPONSE_SIZE as u32,
            // A bus scan addresses every target, so a missing one is no error.
            good: code == request::S_BAD_TARGET,
        };
    }
    let response = pending.slow_path.task.take_response();
    let good = matches!(response.status, Status::Good | Status::ConditionMet);
    if let (false, Residual::Underflow(bytes)) = (good, response.residual) {
        // Before an error, only a device that reports it has transferred data.
        let missing = u32::try_from(bytes).unwrap_or(u32::MAX);
        let room = chain.writable.saturating_sub(RESPONSE_SIZE as u32);
        let transferred = room.saturating_sub(missing);
        pending.data_in = pending.data_in.min(transferred);
    }
    write_response(chain, pending, &response);
    pending.answered(held_until_published);
    Answer {
        written: RESPONSE_SIZE as u32 + pending.data_in,
        good: !response.is_error(),
    }
}

/// Answers a malformed command with VIRTIO_SCSI_S_FAILURE. Returns the bytes written.
#[cold]
pub(crate) fn refuse(chain: &Chain, space: ResponseSpace) -> u32 {
    const HEADER: u32 = request::RESPONSE_HEADER_SIZE as u32;
    const WHOLE: u32 = RESPONSE_SIZE as u32;
    if space.front < HEADER {
        return 0;
    }
    let header = request::response_header(0, 0, 0, request::S_FAILURE);
    chain.buffer.write_whole(chain.readable as usize, &header);
    match space.front {
        HEADER..WHOLE => HEADER,
        _ => WHOLE,
    }
}

/// Returns residual and response code of an executed command.
#[inline(always)]
fn residual_fields(residual: Residual) -> (u32, u8) {
    match residual {
        Residual::None => (0, request::S_OK),
        Residual::Underflow(bytes) => (u32::try_from(bytes).unwrap_or(u32::MAX), request::S_OK),
        // 5.6.6.1: OVERRUN means that the driver's buffer is too small for the command.
        Residual::Overflow(_) => (0, request::S_OVERRUN),
    }
}

fn write_response(chain: &Chain, pending: &mut Pending, response: &Response) {
    let at = chain.readable as usize;
    if !response.data.is_empty() {
        let length = response
            .data
            .len()
            .min(pending.slow_path.data_in_room as usize);
        chain
            .buffer
            .write_whole(at + RESPONSE_SIZE, &response.data[..length]);
        pending.data_in = length as u32;
    }
    let (residual, code) = residual_fields(response.residual);
    let sense = response.sense_data();
    let sense_length = sense.len().min(SENSE_SIZE);
    if sense_length > 0 {
        chain
            .buffer
            .write_whole(at + request::RESPONSE_HEADER_SIZE, &sense[..sense_length]);
    }
    let header =
        request::response_header(sense_length as u32, residual, response.status as u8, code);
    chain.buffer.write_whole(at, &header);
}

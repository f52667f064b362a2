//! Buffer format of an [`IoKind::ScsiCommand`](crate::IoKind): a SCSI command for the device, and its response.
//!
//! ```text
//!   0         32          64                316       512
//!   | command | answer    | sense data      | nothing | data: data-out, replaced by data-in |
//! ```
//!
//! Both sides are in this process; numbers have native byte order.

/// Bytes of the buffer before the data.
pub const COMMAND_HEADER: usize = 512;
/// Maximum length of sense data in bytes (SPC-5, 4.4.1: 252).
pub const SENSE_MAX: usize = 252;

const ANSWER_AT: usize = 32;
const SENSE_AT: usize = 64;

/// A command with at most one direction of data transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScsiCommand {
    /// The CDB, padded with zeroes.
    pub cdb: [u8; 16],
    /// Length of the CDB in bytes.
    pub cdb_length: u8,
    /// Length of data-out in bytes.
    pub data_out: u32,
    /// Maximum length of data-in in bytes.
    pub data_in: u32,
}

impl ScsiCommand {
    /// Returns the length of the buffer in bytes.
    pub const fn buffer_length(&self) -> usize {
        COMMAND_HEADER + self.data_out as usize + self.data_in as usize
    }

    /// Returns the start of the buffer.
    pub fn encode(&self) -> [u8; ANSWER_AT] {
        let mut bytes = [0; ANSWER_AT];
        bytes[..16].copy_from_slice(&self.cdb);
        bytes[16] = self.cdb_length;
        bytes[20..24].copy_from_slice(&self.data_out.to_ne_bytes());
        bytes[24..28].copy_from_slice(&self.data_in.to_ne_bytes());
        bytes
    }

    /// Decodes the command at the start of a buffer; `None` if its data exceed the buffer.
    pub fn decode(header: &[u8; ANSWER_AT], buffer_length: u64) -> Option<ScsiCommand> {
        let mut cdb = [0; 16];
        cdb.copy_from_slice(&header[..16]);
        let command = ScsiCommand {
            cdb,
            cdb_length: header[16],
            data_out: number(header, 20),
            data_in: number(header, 24),
        };
        let whole =
            COMMAND_HEADER as u64 + u64::from(command.data_out) + u64::from(command.data_in);
        let is_one = whole == buffer_length
            && command.cdb_length <= 16
            && (command.data_out == 0 || command.data_in == 0);
        is_one.then_some(command)
    }

    /// Length of the encoded command in bytes.
    pub const ENCODED: usize = ANSWER_AT;
}

/// Response of a device to a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScsiAnswer {
    /// SCSI status.
    pub status: u8,
    /// Length of the received data-in in bytes, stored after the header.
    pub data_in: u32,
    /// Residual; negative for an underflow, positive for an overflow.
    pub residual: i64,
    /// Sense data, at most [`SENSE_MAX`] bytes.
    pub sense: Vec<u8>,
}

impl ScsiAnswer {
    /// Offset of the encoded response in the buffer.
    pub const OFFSET: usize = ANSWER_AT;

    /// Returns the contents of the buffer from [`ScsiAnswer::OFFSET`] on.
    pub fn encode(&self) -> Vec<u8> {
        let sense = &self.sense[..self.sense.len().min(SENSE_MAX)];
        let mut bytes = vec![0; SENSE_AT - ANSWER_AT];
        (bytes[0], bytes[1]) = (self.status, sense.len() as u8);
        bytes[4..8].copy_from_slice(&self.data_in.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.residual.to_ne_bytes());
        bytes.extend(sense);
        bytes
    }

    /// Decodes the response in a buffer; `None` if the buffer is too short or the data exceed it.
    pub fn decode(buffer: &[u8]) -> Option<ScsiAnswer> {
        let header: &[u8; COMMAND_HEADER] = buffer.first_chunk()?;
        let bytes = &header[ANSWER_AT..];
        let length = usize::from(bytes[1]).min(SENSE_MAX);
        let data_in = number(bytes, 4);
        let mut residual = [0; 8];
        residual.copy_from_slice(&bytes[8..16]);
        if data_in as usize > buffer.len() - COMMAND_HEADER {
            return None;
        }
        Some(ScsiAnswer {
            status: bytes[0],
            data_in,
            residual: i64::from_ne_bytes(residual),
            sense: header[SENSE_AT..SENSE_AT + length].to_vec(),
        })
    }
}

fn number(bytes: &[u8], at: usize) -> u32 {
    let mut four = [0; 4];
    four.copy_from_slice(&bytes[at..at + 4]);
    u32::from_ne_bytes(four)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_answers_survive_a_round_trip() {
        let command = ScsiCommand {
            cdb: [0x5e, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0],
            cdb_length: 10,
            data_out: 0,
            data_in: 256,
        };
        let length = command.buffer_length();
        assert_eq!(length, 768);
        let header = command.encode();
        assert_eq!(ScsiCommand::decode(&header, 768), Some(command));
        assert_eq!(ScsiCommand::decode(&header, 767), None);
        let answer = ScsiAnswer {
            status: 2,
            data_in: 100,
            residual: -156,
            sense: (0..252).map(|byte| byte as u8).collect(),
        };
        let mut buffer = vec![0; length];
        let bytes = answer.encode();
        buffer[ScsiAnswer::OFFSET..][..bytes.len()].copy_from_slice(&bytes);
        assert_eq!(ScsiAnswer::decode(&buffer), Some(answer));
        assert_eq!(ScsiAnswer::decode(&buffer[..511]), None);
        assert_eq!(ScsiAnswer::decode(&buffer[..600]), None);
    }

    #[test]
    fn longer_sense_data_are_cut_and_both_directions_are_refused() {
        let answer = ScsiAnswer {
            sense: vec![1; 300],
            ..ScsiAnswer::default()
        };
        let mut buffer = vec![0; COMMAND_HEADER];
        let bytes = answer.encode();
        buffer[ScsiAnswer::OFFSET..][..bytes.len()].copy_from_slice(&bytes);
        assert_eq!(ScsiAnswer::decode(&buffer).unwrap().sense.len(), SENSE_MAX);
        let both = ScsiCommand {
            cdb_length: 6,
            data_out: 8,
            data_in: 8,
            ..ScsiCommand::default()
        };
        assert_eq!(ScsiCommand::decode(&both.encode(), 528), None);
    }
}

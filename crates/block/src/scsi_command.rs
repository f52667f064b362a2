//! A SCSI command for a device to carry out itself, and its answer, in the buffer of an [`IoKind::ScsiCommand`](crate::IoKind).
//!
//! ```text
//!   0         32          64                316       512
//!   | command | answer    | sense data      | nothing | data: data-out, replaced by data-in |
//! ```
//!
//! Both sides are of this process; the numbers are in its own byte order.

/// Bytes of the buffer before the data.
pub const COMMAND_HEADER: usize = 512;
/// Most bytes of sense data (SPC-5, 4.4.1: 252).
pub const SENSE_MAX: usize = 252;

const ANSWER_AT: usize = 32;
const SENSE_AT: usize = 64;

/// A command that moves data one way or not at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScsiCommand {
    /// The CDB, padded with zeroes.
    pub cdb: [u8; 16],
    /// Bytes of it.
    pub cdb_length: u8,
    /// Bytes of data-out.
    pub data_out: u32,
    /// Most bytes of data-in.
    pub data_in: u32,
}

impl ScsiCommand {
    /// Bytes of its buffer.
    pub const fn buffer_length(&self) -> usize {
        COMMAND_HEADER + self.data_out as usize + self.data_in as usize
    }

    /// What its buffer begins with.
    pub fn encode(&self) -> [u8; ANSWER_AT] {
        let mut bytes = [0; ANSWER_AT];
        bytes[..16].copy_from_slice(&self.cdb);
        bytes[16] = self.cdb_length;
        bytes[20..24].copy_from_slice(&self.data_out.to_ne_bytes());
        bytes[24..28].copy_from_slice(&self.data_in.to_ne_bytes());
        bytes
    }

    /// The command of a buffer that begins with these bytes, if its data fit into the buffer.
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

    /// Bytes that [`ScsiCommand::decode`] needs.
    pub const ENCODED: usize = ANSWER_AT;
}

/// How a device has answered a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScsiAnswer {
    /// SCSI status.
    pub status: u8,
    /// Bytes of data-in that have come: the buffer has them after its header.
    pub data_in: u32,
    /// Residual: negative for an underflow, positive for an overflow.
    pub residual: i64,
    /// Sense data, at most [`SENSE_MAX`] bytes.
    pub sense: Vec<u8>,
}

impl ScsiAnswer {
    /// Where in the buffer [`ScsiAnswer::encode`] belongs.
    pub const OFFSET: usize = ANSWER_AT;

    /// What its buffer holds from [`ScsiAnswer::OFFSET`] on.
    pub fn encode(&self) -> Vec<u8> {
        let sense = &self.sense[..self.sense.len().min(SENSE_MAX)];
        let mut bytes = vec![0; SENSE_AT - ANSWER_AT];
        (bytes[0], bytes[1]) = (self.status, sense.len() as u8);
        bytes[4..8].copy_from_slice(&self.data_in.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.residual.to_ne_bytes());
        bytes.extend(sense);
        bytes
    }

    /// The answer in a buffer; `None`: it is too short, or its data are longer than what there was room for.
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
    fn commands_and_answers_come_back_as_they_were() {
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

//! Encoding and decoding of frames.

use std::fmt;

/// Length of a frame's header in bytes.
pub const HEADER: usize = 12;
/// Maximum length of a frame's payload in bytes: the kernel's virtio-serial transfers 32 KiB at a time.
pub const PAYLOAD_MAX: usize = 32 << 10;
/// Maximum length of a script in bytes: Linux limits an argument to `MAX_ARG_STRLEN`, including its NUL.
pub const SCRIPT_MAX: usize = (128 << 10) - 1;
/// Protocol version. Both sides have the same release, so another version is an error.
pub const VERSION: u32 = 1;

/// First byte of every header. In UTF-8 it is a continuation byte, so no character begins with it.
const MARK: u8 = 0xa7;
/// Start of a greeting, after its header.
pub(crate) const MAGIC: [u8; 16] = *b"\xa7lunette-guest\r\n";
/// Length of magic, version and random number in bytes.
pub(crate) const GREETING: usize = 36;

pub(crate) const HELLO: u8 = 1;
pub(crate) const WELCOME: u8 = 2;
const SCRIPT: u8 = 3;
const START: u8 = 4;
const INPUT: u8 = 5;
const INPUT_END: u8 = 6;
const OUTPUT: u8 = 7;
const ERRORS: u8 = 8;
const CREDIT: u8 = 9;
const EXIT: u8 = 10;
const FAILED: u8 = 11;
const SIGNAL: u8 = 12;

/// A stream of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// Standard input of the command.
    Input,
    /// Standard output.
    Output,
    /// Standard error.
    Errors,
}

/// A decoded frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The agent has started; with its random number.
    Hello([u8; 16]),
    /// The host has received the greeting with this number.
    Welcome([u8; 16]),
    /// A part of the script that [`Frame::Start`] runs.
    Script(Vec<u8>),
    /// Runs the script with a shell.
    Start,
    /// Bytes for stdin.
    Input(Vec<u8>),
    /// End of stdin.
    InputEnd,
    /// Bytes of stdout.
    Output(Vec<u8>),
    /// Bytes of stderr.
    Errors(Vec<u8>),
    /// Raises the send window of a stream by a number of bytes.
    Credit(Stream, u32),
    /// The command has ended with this code, 128 + n after signal n.
    Exit(u32),
    /// The channel has ended without an exit code, for this reason.
    Failed(String),
    /// Sends a signal to the command's process group.
    Signal(u8),
}

/// Description of a peer's protocol violation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub String);

impl fmt::Display for Violation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Violation {}

/// Returns the bytes before the agent's greeting, which complete any frame truncated by a reboot.
pub fn lead_in() -> Vec<u8> {
    vec![0; HEADER + PAYLOAD_MAX]
}

impl Frame {
    /// Appends the encoded frame. The payload must not exceed [`PAYLOAD_MAX`].
    pub fn encode(&self, channel: u32, bytes: &mut Vec<u8>) {
        let (kind, payload) = match self {
            Frame::Hello(number) => (HELLO, greeting(number)),
            Frame::Welcome(number) => (WELCOME, greeting(number)),
            Frame::Script(text) => return put(SCRIPT, channel, text, bytes),
            Frame::Start => (START, Vec::new()),
            Frame::Input(data) => return put(INPUT, channel, data, bytes),
            Frame::InputEnd => (INPUT_END, Vec::new()),
            Frame::Output(data) => return put(OUTPUT, channel, data, bytes),
            Frame::Errors(data) => return put(ERRORS, channel, data, bytes),
            Frame::Credit(stream, count) => {
                let mut payload = vec![*stream as u8];
                payload.extend(count.to_le_bytes());
                (CREDIT, payload)
            }
            Frame::Exit(code) => (EXIT, code.to_le_bytes().to_vec()),
            Frame::Failed(reason) => {
                let mut end = reason.len().min(PAYLOAD_MAX);
                while !reason.is_char_boundary(end) {
                    end -= 1;
                }
                (FAILED, reason.as_bytes()[..end].to_vec())
            }
            Frame::Signal(number) => (SIGNAL, vec![*number]),
        };
        put(kind, channel, &payload, bytes);
    }

    /// Returns the encoded frame.
    pub fn bytes(&self, channel: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.encode(channel, &mut bytes);
        bytes
    }

    /// Decodes a payload. The header must be validated before.
    pub(crate) fn read(kind: u8, payload: &[u8]) -> Result<Frame, Violation> {
        let wrong = || {
            Violation(format!(
                "a malformed frame of kind {kind} with a payload of {} bytes",
                payload.len()
            ))
        };
        let frame = match kind {
            HELLO => Frame::Hello(number_of(payload).ok_or_else(wrong)?),
            WELCOME => Frame::Welcome(number_of(payload).ok_or_else(wrong)?),
            SCRIPT => Frame::Script(payload.to_vec()),
            START => Frame::Start,
            INPUT => Frame::Input(payload.to_vec()),
            INPUT_END => Frame::InputEnd,
            OUTPUT => Frame::Output(payload.to_vec()),
            ERRORS => Frame::Errors(payload.to_vec()),
            CREDIT => read_credit(payload).ok_or_else(wrong)?,
            EXIT => Frame::Exit(u32::from_le_bytes(payload.try_into().map_err(|_| wrong())?)),
            FAILED => Frame::Failed(String::from_utf8_lossy(payload).into_owned()),
            SIGNAL => Frame::Signal(*payload.first().ok_or_else(wrong)?),
            _ => return Err(wrong()),
        };
        Ok(frame)
    }
}

/// Decodes a header: kind, channel and payload length.
pub(crate) fn read_header(header: &[u8; HEADER]) -> Result<(u8, u32, usize), Violation> {
    if header.iter().all(|byte| *byte == 0) {
        let lead_in = "new session: the guest rebooted or its agent restarted";
        return Err(Violation(lead_in.to_owned()));
    }
    let [mark, kind, zero, also_zero, rest @ ..] = *header;
    let word = |at: usize| u32::from_le_bytes([rest[at], rest[at + 1], rest[at + 2], rest[at + 3]]);
    let (channel, length) = (word(0), word(4) as usize);
    let allowed = match kind {
        HELLO | WELCOME => length == GREETING,
        // Empty data frames are invalid, because flow control does not limit their number.
        SCRIPT | INPUT | OUTPUT | ERRORS => (1..=PAYLOAD_MAX).contains(&length),
        START | INPUT_END => length == 0,
        CREDIT => length == 5,
        EXIT => length == 4,
        FAILED => length <= PAYLOAD_MAX,
        SIGNAL => length == 1,
        _ => false,
    };
    if mark != MARK || zero != 0 || also_zero != 0 || !allowed {
        return Err(Violation(format!("malformed frame header: {header:02x?}")));
    }
    Ok((kind, channel, length))
}

/// Returns the header of a greeting, which precedes its magic.
pub(crate) fn greeting_header(kind: u8) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    (header[0], header[1], header[8]) = (MARK, kind, GREETING as u8);
    header
}

fn greeting(number: &[u8; 16]) -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_le_bytes(), number].concat()
}

fn number_of(payload: &[u8]) -> Option<[u8; 16]> {
    let rest = payload.strip_prefix(&MAGIC)?;
    rest.strip_prefix(&VERSION.to_le_bytes())?.try_into().ok()
}

fn read_credit(payload: &[u8]) -> Option<Frame> {
    let (&stream, count) = payload.split_first()?;
    let stream = match stream {
        0 => Stream::Input,
        1 => Stream::Output,
        2 => Stream::Errors,
        _ => return None,
    };
    let count = u32::from_le_bytes(count.try_into().ok()?);
    (count > 0).then_some(Frame::Credit(stream, count))
}

fn put(kind: u8, channel: u32, payload: &[u8], bytes: &mut Vec<u8>) {
    assert!(
        payload.len() <= PAYLOAD_MAX,
        "a frame of {} bytes is too long",
        payload.len()
    );
    bytes.extend([MARK, kind, 0, 0]);
    bytes.extend(channel.to_le_bytes());
    bytes.extend((payload.len() as u32).to_le_bytes());
    bytes.extend(payload);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_has_the_documented_bytes() {
        assert_eq!(
            Frame::Output(b"hi".to_vec()).bytes(0x0102),
            *b"\xa7\x07\0\0\x02\x01\0\0\x02\0\0\0hi"
        );
        assert_eq!(
            Frame::Credit(Stream::Errors, 65536).bytes(1),
            *b"\xa7\x09\0\0\x01\0\0\0\x05\0\0\0\x02\0\0\x01\0"
        );
    }

    #[test]
    fn a_long_reason_is_cut_at_a_character() {
        let long = "é".repeat(PAYLOAD_MAX);
        let bytes = Frame::Failed(long).bytes(0);
        assert_eq!(bytes.len(), HEADER + PAYLOAD_MAX);
        let odd = format!("x{}", "é".repeat(PAYLOAD_MAX));
        assert_eq!(Frame::Failed(odd).bytes(0).len(), HEADER + PAYLOAD_MAX - 1);
    }
}

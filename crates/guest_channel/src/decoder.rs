//! Decoder of frames, and search for the start of a session.

use crate::frame::{
    Frame, GREETING, HEADER, HELLO, MAGIC, PAYLOAD_MAX, Violation, WELCOME, greeting_header,
    read_header,
};

/// Decodes frames from pieces of any size. Stores at most one incomplete frame.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
}

impl Decoder {
    /// Consumes `input` and passes each complete frame with its channel to `each`. Stops at the first error, of the decoder or of `each`;
    /// the decoder must not be used afterwards.
    ///
    /// # Errors
    /// A violation of the protocol.
    pub fn feed(
        &mut self,
        mut input: &[u8],
        mut each: impl FnMut(u32, Frame) -> Result<(), Violation>,
    ) -> Result<(), Violation> {
        loop {
            let missing = self.missing()?;
            if missing == 0 {
                let header = self.header().unwrap_or([0; HEADER]);
                let (kind, channel, _) = read_header(&header)?;
                let frame = Frame::read(kind, &self.bytes[HEADER..])?;
                self.bytes.clear();
                each(channel, frame)?;
                continue;
            }
            if input.is_empty() {
                return Ok(());
            }
            let (piece, rest) = input.split_at(missing.min(input.len()));
            self.bytes.extend_from_slice(piece);
            input = rest;
        }
    }

    /// Returns the number of stored bytes of an incomplete frame.
    pub fn held(&self) -> usize {
        self.bytes.len()
    }

    fn header(&self) -> Option<[u8; HEADER]> {
        self.bytes.get(..HEADER)?.try_into().ok()
    }

    /// Returns the number of bytes missing from the header, or from the frame if the header is complete.
    fn missing(&self) -> Result<usize, Violation> {
        match self.header() {
            None => Ok(HEADER - self.bytes.len()),
            Some(header) => {
                let (_, _, length) = read_header(&header)?;
                debug_assert!(length <= PAYLOAD_MAX);
                Ok(HEADER + length - self.bytes.len())
            }
        }
    }
}

/// Skips bytes until a contiguous greeting: header, magic, version and random number.
#[derive(Debug)]
pub struct Hunter {
    wanted: Vec<u8>,
    window: Vec<u8>,
}

impl Hunter {
    /// Searches for any agent's [`Frame::Hello`], on the host.
    pub fn for_hello() -> Hunter {
        Hunter::new(HELLO, None)
    }

    /// Searches for the [`Frame::Welcome`] with this number, in the agent.
    pub fn for_welcome(number: [u8; 16]) -> Hunter {
        Hunter::new(WELCOME, Some(number))
    }

    fn new(kind: u8, number: Option<[u8; 16]>) -> Hunter {
        let version = crate::frame::VERSION.to_le_bytes();
        let mut wanted = [&greeting_header(kind)[..], &MAGIC, &version].concat();
        wanted.extend(number.into_iter().flatten());
        Hunter {
            wanted,
            window: Vec::new(),
        }
    }

    /// Consumes bytes. Returns the number of a complete greeting and the bytes after it.
    pub fn feed<'a>(&mut self, input: &'a [u8]) -> Option<([u8; 16], &'a [u8])> {
        for (at, &byte) in input.iter().enumerate() {
            self.window.push(byte);
            // Drops bytes from the front that cannot begin a greeting.
            while !self.may_begin() {
                self.window.remove(0);
            }
            if self.window.len() == HEADER + GREETING {
                let number = self.window[HEADER + GREETING - 16..].try_into().ok()?;
                self.window.clear();
                return Some((number, &input[at + 1..]));
            }
        }
        None
    }

    fn may_begin(&self) -> bool {
        let compared = self.window.len().min(self.wanted.len());
        self.window[..compared] == self.wanted[..compared]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lead_in;

    #[test]
    fn a_greeting_is_found_behind_a_frame_that_a_reboot_has_cut_off() {
        let number = *b"0123456789abcdef";
        let mut cut = Frame::Output(vec![b'x'; PAYLOAD_MAX]).bytes(3);
        cut.truncate(100);
        let mut decoder = Decoder::default();
        decoder.feed(&cut, |_, _| Ok(())).unwrap();
        let mut stream = lead_in();
        stream.extend(Frame::Hello(number).bytes(0));
        stream.extend(b"rest");
        // The zeroes complete the frame. The following bytes are not a header, so the search begins before the greeting.
        let mut filled = 0;
        let refused = decoder.feed(&stream[..HEADER + PAYLOAD_MAX], |_, _| {
            filled += 1;
            Ok(())
        });
        assert!(refused.is_err() && filled == 1);
        let found = Hunter::for_hello().feed(&stream);
        assert_eq!(found, Some((number, &b"rest"[..])));
    }

    #[test]
    fn the_agent_waits_for_the_welcome_with_its_own_number() {
        let (old, new) = ([1; 16], [2; 16]);
        let mut stream = Frame::Start.bytes(9)[3..].to_vec();
        stream.extend(Frame::Welcome(old).bytes(0));
        stream.extend(Frame::Start.bytes(4));
        stream.extend(Frame::Welcome(new).bytes(0));
        stream.extend(Frame::Start.bytes(5));
        let (number, rest) = Hunter::for_welcome(new).feed(&stream).unwrap();
        assert_eq!((number, rest), (new, &Frame::Start.bytes(5)[..]));
    }
}

//! Client side of the fixed newstyle handshake: replies and contexts are negotiated one after the other, then the export is opened.

use std::fmt;

use zerocopy::{FromBytes, IntoBytes};

use crate::fields::{FieldReader, string};
use crate::wire::{
    INIT_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, OptionHeader, OptionReplyHeader, PAYLOAD_MAX,
    STRING_MAX, ZEROES, handshake_flag, info, option, option_reply,
};
use crate::{BlockSizes, Style, Violation};

/// Maximum length of a reply to an option: two strings.
const REPLY_MAX: u32 = 4 * STRING_MAX as u32;
/// Maximum number of contexts that a server may report, against hostile servers.
const CONTEXTS_MAX: usize = 256;

/// Properties that a client asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Export name; empty for the default export.
    pub export: String,
    /// Best style. Servers that do not have it are used with a simpler one.
    pub style: Style,
    /// Names of metadata contexts.
    pub contexts: Vec<String>,
}

/// An open export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Size in bytes.
    pub size: u64,
    /// Transmission flags.
    pub flags: u16,
    /// Size constraints.
    pub block_sizes: BlockSizes,
    /// Form of requests and replies.
    pub style: Style,
    /// Selected contexts: ID and name.
    pub contexts: Vec<(u32, String)>,
    /// Canonical name of the export, if the server reports one.
    pub name: Option<String>,
}

/// Reason for the end of a handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The server breaks the protocol.
    Violation(Violation),
    /// The peer is no NBD server, or one with the handshake from before 2011.
    NotNewstyle,
    /// The server refuses TLS: reply type and message.
    NoTls(u32, String),
    /// The server refuses to open the export: reply type and message.
    Refused(u32, String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Violation(violation) => write!(f, "server violates the protocol: {violation}"),
            Failure::NotNewstyle => f.write_str("peer does not use the newstyle handshake of NBD"),
            Failure::NoTls(reply, message) => {
                write!(
                    f,
                    "server refuses TLS, reply {reply:#x}: {message}; hint: use nbd:// if the network is trusted"
                )
            }
            Failure::Refused(option_reply::ERR_TLS_REQD, _) => {
                f.write_str("server requires TLS; hint: use nbds://")
            }
            Failure::Refused(option_reply::ERR_UNKNOWN, message) => {
                write!(f, "server has no such export: {message}")
            }
            Failure::Refused(reply, message) => {
                write!(f, "server refuses the export, reply {reply:#x}: {message}")
            }
        }
    }
}

impl std::error::Error for Failure {}

impl From<Violation> for Failure {
    fn from(violation: Violation) -> Failure {
        Failure::Violation(violation)
    }
}

/// Progress of a handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// More bytes are needed, after the output was sent.
    More,
    /// TLS begins now. Then the caller continues with [`Handshake::continue_with_tls`].
    StartTls,
    /// The export is open. Later bytes belong to the transmission phase.
    Open(Box<Session>),
}

/// Message that is expected next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Greeting,
    /// Reply to this option.
    Reply(u32),
    /// Reply to `NBD_OPT_EXPORT_NAME`.
    ExportName,
    /// Nothing before TLS is active.
    TlsAccepted,
}

/// State of a handshake.
#[derive(Debug)]
pub struct Handshake {
    wanted: Wanted,
    state: State,
    /// No option is sent before TLS is active.
    needs_tls: bool,
    has_zeroes: bool,
    style: Style,
    contexts: Vec<(u32, String)>,
    export: Option<(u64, u16)>,
    block_sizes: Option<BlockSizes>,
    name: Option<String>,
}

impl Handshake {
    /// Creates the state before the server's greeting.
    pub fn new(wanted: Wanted) -> Handshake {
        Handshake {
            wanted,
            state: State::Greeting,
            needs_tls: false,
            has_zeroes: true,
            style: Style::Simple,
            contexts: Vec::new(),
            export: None,
            block_sizes: None,
            name: None,
        }
    }

    /// Requires TLS: an export is not opened without it.
    #[must_use]
    pub fn with_tls(self) -> Handshake {
        Handshake {
            needs_tls: true,
            ..self
        }
    }

    /// Appends the first option for the encrypted connection to `output`.
    pub fn continue_with_tls(&mut self, output: &mut Vec<u8>) {
        self.needs_tls = false;
        self.negotiate(output);
    }

    /// Parses all complete messages at the start of `bytes`, and appends options to `output`. Returns the number of bytes used; the caller
    /// presents the others again.
    ///
    /// # Errors
    /// If the export cannot be opened. The connection must end.
    pub fn receive(
        &mut self,
        bytes: &[u8],
        output: &mut Vec<u8>,
    ) -> Result<(usize, Step), Failure> {
        let mut used = 0;
        loop {
            let rest = &bytes[used..];
            let Some((length, session)) = self.message(rest, output)? else {
                return Ok((used, Step::More));
            };
            used += length;
            if self.state == State::TlsAccepted {
                // The server waits for the client. Bytes before TLS may come from a third party.
                return match used == bytes.len() {
                    true => Ok((used, Step::StartTls)),
                    false => Err(Violation::BytesBeforeTls.into()),
                };
            }
            if let Some(session) = session {
                return Ok((used, Step::Open(Box::new(session))));
            }
        }
    }

    /// Parses one message. Returns its length, and the session after the last message; `None` if the message is incomplete.
    fn message(
        &mut self,
        bytes: &[u8],
        output: &mut Vec<u8>,
    ) -> Result<Option<(usize, Option<Session>)>, Failure> {
        match self.state {
            State::Greeting => self.greeting(bytes, output),
            State::ExportName => Ok(self.opened_by_name(bytes)),
            State::TlsAccepted => Ok(None),
            State::Reply(option) => {
                let Ok((header, rest)) = OptionReplyHeader::read_from_prefix(bytes) else {
                    return Ok(None);
                };
                if header.magic != OPTION_REPLY_MAGIC {
                    return Err(Violation::Magic.into());
                }
                if header.option != option {
                    return Err(Violation::Reply("reply to another option").into());
                }
                let length = header.length.get();
                if length > REPLY_MAX {
                    return Err(Violation::PayloadLength(length.into()).into());
                }
                let Some(data) = rest.get(..length as usize) else {
                    return Ok(None);
                };
                let session = self.option_reply(option, header.kind.get(), data, output)?;
                Ok(Some((OptionReplyHeader::LENGTH + data.len(), session)))
            }
        }
    }

    fn greeting(
        &mut self,
        bytes: &[u8],
        output: &mut Vec<u8>,
    ) -> Result<Option<(usize, Option<Session>)>, Failure> {
        let mut fields = FieldReader(bytes);
        let (Some(init), Some(magic), Some(flags)) = (fields.u64(), fields.u64(), fields.u16())
        else {
            return Ok(None);
        };
        if init != INIT_MAGIC || magic != OPTION_MAGIC {
            return Err(Failure::NotNewstyle);
        }
        self.has_zeroes = flags & handshake_flag::NO_ZEROES == 0;
        let known = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        output.extend_from_slice(&u32::from(flags & known).to_be_bytes());
        match flags & handshake_flag::FIXED_NEWSTYLE {
            0 if self.needs_tls => return Err(Failure::NotNewstyle),
            0 => self.open_by_name(output),
            _ if self.needs_tls => self.ask(option::STARTTLS, &[], output),
            _ => self.negotiate(output),
        }
        Ok(Some((18, None)))
    }

    fn negotiate(&mut self, output: &mut Vec<u8>) {
        match self.wanted.style {
            Style::Simple => self.open(output),
            Style::Structured => self.ask(option::STRUCTURED_REPLY, &[], output),
            Style::Extended => self.ask(option::EXTENDED_HEADERS, &[], output),
        }
    }

    fn ask(&mut self, option: u32, data: &[u8], output: &mut Vec<u8>) {
        let header = OptionHeader {
            magic: OPTION_MAGIC.into(),
            option: option.into(),
            length: (data.len() as u32).into(),
        };
        output.extend_from_slice(header.as_bytes());
        output.extend_from_slice(data);
        self.state = State::Reply(option);
    }

    fn open_by_name(&mut self, output: &mut Vec<u8>) {
        let name = self.wanted.export.clone();
        self.ask(option::EXPORT_NAME, name.as_bytes(), output);
        self.state = State::ExportName;
    }

    fn open(&mut self, output: &mut Vec<u8>) {
        let mut data = counted(&self.wanted.export);
        for field in [2, info::BLOCK_SIZE, info::NAME] {
            data.extend_from_slice(&field.to_be_bytes());
        }
        self.ask(option::GO, &data, output);
    }

    fn select_contexts(&mut self, output: &mut Vec<u8>) {
        if self.wanted.contexts.is_empty() {
            return self.open(output);
        }
        let mut data = counted(&self.wanted.export);
        data.extend_from_slice(&(self.wanted.contexts.len() as u32).to_be_bytes());
        data.extend(self.wanted.contexts.iter().flat_map(|name| counted(name)));
        self.ask(option::SET_META_CONTEXT, &data, output);
    }

    fn option_reply(
        &mut self,
        option: u32,
        kind: u32,
        data: &[u8],
        output: &mut Vec<u8>,
    ) -> Result<Option<Session>, Failure> {
        let is_error = kind & option_reply::ERROR != 0;
        match option {
            option::STARTTLS if kind == option_reply::ACK => self.state = State::TlsAccepted,
            option::STARTTLS if is_error => {
                let message = String::from_utf8_lossy(data).into_owned();
                return Err(Failure::NoTls(kind, message));
            }
            option::EXTENDED_HEADERS if kind == option_reply::ACK => {
                self.style = Style::Extended;
                self.select_contexts(output);
            }
            option::EXTENDED_HEADERS if is_error => {
                self.ask(option::STRUCTURED_REPLY, &[], output);
            }
            option::STRUCTURED_REPLY if kind == option_reply::ACK => {
                self.style = Style::Structured;
                self.select_contexts(output);
            }
            // Contexts need structured replies.
            option::STRUCTURED_REPLY if is_error => self.open(output),
            option::SET_META_CONTEXT if kind == option_reply::META_CONTEXT => {
                let mut fields = FieldReader(data);
                let id = fields.u32();
                let name = string(fields.0).filter(|_| self.contexts.len() < CONTEXTS_MAX);
                let (Some(id), Some(name)) = (id, name) else {
                    return Err(Violation::Reply("malformed metadata context").into());
                };
                self.contexts.push((id, name.to_owned()));
            }
            option::SET_META_CONTEXT if kind == option_reply::ACK || is_error => {
                if is_error {
                    self.contexts.clear();
                }
                self.open(output);
            }
            option::GO if kind == option_reply::INFO => self.take_information(data)?,
            option::GO if kind == option_reply::ACK => {
                let opened = self.export.map(|(size, flags)| self.session(size, flags));
                let opened = opened.ok_or(Violation::Reply("export without size"))?;
                return Ok(Some(opened));
            }
            option::GO if kind == option_reply::ERR_UNSUP && self.style != Style::Extended => {
                self.open_by_name(output);
            }
            option::GO if is_error => {
                let message = String::from_utf8_lossy(data).into_owned();
                return Err(Failure::Refused(kind, message));
            }
            _ => return Err(Violation::Reply("unexpected reply to an option").into()),
        }
        Ok(None)
    }

    fn take_information(&mut self, data: &[u8]) -> Result<(), Failure> {
        let mut fields = FieldReader(data);
        let malformed = Violation::Reply("malformed information about the export");
        match fields.u16().ok_or(malformed)? {
            info::EXPORT => {
                let export = fields.u64().zip(fields.u16());
                self.export = Some(export.filter(|_| fields.is_empty()).ok_or(malformed)?);
            }
            info::BLOCK_SIZE => {
                let [minimum, preferred, maximum_payload] =
                    [(); 3].map(|()| fields.u32().unwrap_or_default());
                let is_valid = minimum.is_power_of_two()
                    && minimum <= 1 << 16
                    && preferred.is_power_of_two()
                    && preferred >= minimum
                    && maximum_payload >= minimum
                    && fields.is_empty();
                if !is_valid {
                    return Err(malformed.into());
                }
                self.block_sizes = Some(BlockSizes {
                    minimum,
                    preferred,
                    maximum_payload,
                });
            }
            info::NAME => self.name = Some(string(fields.0).ok_or(malformed)?.to_owned()),
            // Unknown information is ignored.
            _ => {}
        }
        Ok(())
    }

    fn opened_by_name(&mut self, bytes: &[u8]) -> Option<(usize, Option<Session>)> {
        let mut fields = FieldReader(bytes);
        let (size, flags) = (fields.u64()?, fields.u16()?);
        if self.has_zeroes {
            fields.bytes(ZEROES)?;
        }
        let used = bytes.len() - fields.0.len();
        Some((used, Some(self.session(size, flags))))
    }

    fn session(&mut self, size: u64, flags: u16) -> Session {
        Session {
            size,
            flags,
            block_sizes: self.block_sizes.unwrap_or(BlockSizes {
                minimum: 512,
                preferred: 4096,
                maximum_payload: PAYLOAD_MAX,
            }),
            style: self.style,
            contexts: std::mem::take(&mut self.contexts),
            name: self.name.take(),
        }
    }
}

/// Encodes a string with its length.
fn counted(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

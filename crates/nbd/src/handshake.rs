//! Server side of the fixed newstyle handshake.
//!
//! [`greeting`] is sent first. [`Handshake::receive`] then takes bytes and appends replies until the client enters the transmission phase. It
//! returns after each option, so that the caller can wait until the replies were sent.

use zerocopy::{FromBytes, IntoBytes};

use crate::fields::{FieldReader, string};
use crate::wire::{
    INIT_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, OptionHeader, OptionReplyHeader, ZEROES,
    handshake_flag, info, option, option_reply, transmission,
};
use crate::{BlockSizes, ExportInfo, Style, Violation};

/// Maximum length of option data that is parsed. Longer data is skipped and answered with `NBD_REP_ERR_TOO_BIG`.
pub const OPTION_DATA_MAX: usize = 16 << 10;
/// Maximum length of option data that is skipped. A longer option ends the connection.
pub const OPTION_SKIP_MAX: u32 = 1 << 20;
/// Maximum number of queries in one option.
const QUERIES_MAX: u32 = 256;

/// First length of option data that ends the connection.
const OPTION_TOO_LONG: u32 = OPTION_SKIP_MAX + 1;

const SERVER_FLAGS: u16 = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;

/// The exports of a listener.
pub trait Exports {
    /// Handle of an export.
    type Export;

    /// Returns the export with this name; an empty name selects the default export. Flags exclude `SEND_DF`, which the handshake adds.
    fn find(&self, name: &str) -> Option<(Self::Export, ExportInfo)>;

    /// Calls `visit` with the name and description of each export.
    fn list(&self, visit: &mut dyn FnMut(&str, &str));
}

/// Result of a handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session<E> {
    /// The chosen export.
    pub export: E,
    /// Properties of the export as advertised.
    pub info: ExportInfo,
    /// Form of requests and replies.
    pub style: Style,
    /// IDs of the selected metadata contexts: indices into the contexts of `info`.
    pub contexts: Vec<u32>,
    /// The client has requested the size constraints and must obey them.
    pub knows_block_sizes: bool,
}

/// Progress of a handshake.
#[derive(Debug, PartialEq, Eq)]
pub enum Step<E> {
    /// More bytes are needed.
    More,
    /// An option was answered. There may be further bytes.
    Answered,
    /// The transmission phase begins after the output was sent.
    Transmission(Box<Session<E>>),
    /// TLS begins after the output was sent. Later bytes arrive through TLS.
    StartTls,
    /// The client has ended the handshake. The connection ends after the output was sent.
    Aborted,
    /// The connection ends now.
    Violated(Violation),
}

/// Use of TLS on a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tls {
    /// `NBD_OPT_STARTTLS` is refused.
    #[default]
    Refused,
    /// Before `NBD_OPT_STARTTLS` no other option is executed.
    Required,
    /// The connection is encrypted.
    Active,
}

/// Part of the input that is expected next.
#[derive(Clone, Copy, Debug)]
enum State {
    ClientFlags,
    OptionHeader,
    OptionData {
        option: u32,
        length: usize,
    },
    /// Data of an option that is too long to be parsed.
    SkippedData {
        option: u32,
        left: u32,
    },
}

/// State of a handshake.
#[derive(Debug)]
pub struct Handshake {
    state: State,
    tls: Tls,
    /// Received bytes of the expected part.
    partial: Vec<u8>,
    style: Style,
    sends_zeroes: bool,
    /// Canonical export name and IDs of the last `NBD_OPT_SET_META_CONTEXT`.
    contexts: Option<(String, Vec<u32>)>,
}

impl Default for Handshake {
    fn default() -> Handshake {
        Handshake::new(Tls::Refused)
    }
}

/// Returns the first message of a server.
pub fn greeting() -> Vec<u8> {
    let mut bytes = Vec::with_capacity(18);
    bytes.extend_from_slice(&INIT_MAGIC.to_be_bytes());
    bytes.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    bytes.extend_from_slice(&SERVER_FLAGS.to_be_bytes());
    bytes
}

impl Handshake {
    /// Creates the state before the client flags.
    pub fn new(tls: Tls) -> Handshake {
        Handshake {
            state: State::ClientFlags,
            tls,
            partial: Vec::new(),
            style: Style::Simple,
            sends_zeroes: true,
            contexts: None,
        }
    }

    /// Parses bytes up to the end of the next option, and appends its replies to `output`. Returns the number of bytes used and the step.
    pub fn receive<X: Exports>(
        &mut self,
        bytes: &[u8],
        exports: &X,
        output: &mut Vec<u8>,
    ) -> (usize, Step<X::Export>) {
        let mut used = 0;
        let step = loop {
            match self.state {
                State::ClientFlags => {
                    if !self.fill(bytes, &mut used, 4) {
                        break Step::More;
                    }
                    let flags = FieldReader(&self.partial).u32().unwrap_or_default();
                    if flags & !u32::from(SERVER_FLAGS) != 0 {
                        break Step::Violated(Violation::ClientFlags(flags));
                    }
                    self.sends_zeroes = flags & u32::from(handshake_flag::NO_ZEROES) == 0;
                    self.expect(State::OptionHeader);
                }
                State::OptionHeader => {
                    if !self.fill(bytes, &mut used, OptionHeader::LENGTH) {
                        break Step::More;
                    }
                    match expected_data(&self.partial) {
                        Ok(state) => self.expect(state),
                        Err(violation) => break Step::Violated(violation),
                    }
                }
                State::OptionData { option, length } => {
                    if !self.fill(bytes, &mut used, length) {
                        break Step::More;
                    }
                    let data = std::mem::take(&mut self.partial);
                    self.expect(State::OptionHeader);
                    let step = self.answer(option, &data, exports, output);
                    // A client waits for the reply to STARTTLS. Bytes before it may come from a third party.
                    break match step {
                        Step::StartTls if used < bytes.len() => {
                            Step::Violated(Violation::BytesBeforeTls)
                        }
                        step => step,
                    };
                }
                State::SkippedData { option, left } => {
                    let here = left.min((bytes.len() - used) as u32);
                    used += here as usize;
                    if here < left {
                        let left = left - here;
                        self.state = State::SkippedData { option, left };
                        break Step::More;
                    }
                    self.expect(State::OptionHeader);
                    if option == option::SET_META_CONTEXT {
                        self.contexts = None;
                    }
                    match self.tls {
                        Tls::Required => refuse_before_tls(output, option),
                        _ => refuse(output, option, option_reply::ERR_TOO_BIG, "option too long"),
                    }
                    break Step::Answered;
                }
            }
        };
        (used, step)
    }

    /// Collects the expected part. Returns true if all its `length` bytes have arrived.
    fn fill(&mut self, bytes: &[u8], used: &mut usize, length: usize) -> bool {
        let missing = length.saturating_sub(self.partial.len());
        let rest = &bytes[*used..];
        let here = missing.min(rest.len());
        self.partial.extend_from_slice(&rest[..here]);
        *used += here;
        here == missing
    }

    fn expect(&mut self, state: State) {
        self.partial.clear();
        self.state = state;
    }

    fn answer<X: Exports>(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &X,
        output: &mut Vec<u8>,
    ) -> Step<X::Export> {
        match option {
            option::EXPORT_NAME if self.tls == Tls::Required => {
                return Step::Violated(Violation::TlsRequired);
            }
            option::STARTTLS | option::ABORT => {}
            _ if self.tls == Tls::Required => {
                refuse_before_tls(output, option);
                return Step::Answered;
            }
            _ => {}
        }
        match option {
            option::EXPORT_NAME => return self.export_name(data, exports, output),
            option::ABORT => {
                reply(output, option, option_reply::ACK, &[]);
                return Step::Aborted;
            }
            option::INFO | option::GO => {
                if let Some(session) = self.info(option, data, exports, output) {
                    return Step::Transmission(session);
                }
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.meta_context(option, data, exports, output);
            }
            option::LIST
            | option::STARTTLS
            | option::STRUCTURED_REPLY
            | option::EXTENDED_HEADERS
                if !data.is_empty() =>
            {
                refuse(
                    output,
                    option,
                    option_reply::ERR_INVALID,
                    "unexpected option data",
                );
            }
            option::LIST => {
                exports.list(&mut |name, description| {
                    let mut entry = (name.len() as u32).to_be_bytes().to_vec();
                    entry.extend_from_slice(name.as_bytes());
                    entry.extend_from_slice(description.as_bytes());
                    reply(output, option, option_reply::SERVER, &entry);
                });
                reply(output, option, option_reply::ACK, &[]);
            }
            option::STARTTLS => return self.start_tls(output),
            option::STRUCTURED_REPLY | option::EXTENDED_HEADERS => {
                self.set_style(option, output);
            }
            _ => refuse(output, option, option_reply::ERR_UNSUP, "unknown option"),
        }
        Step::Answered
    }

    /// Answers `NBD_OPT_STARTTLS`. TLS resets the handshake, except for the client flags.
    fn start_tls<E>(&mut self, output: &mut Vec<u8>) -> Step<E> {
        let (error, message) = match self.tls {
            Tls::Refused => (option_reply::ERR_POLICY, "TLS is not configured"),
            Tls::Active => (option_reply::ERR_INVALID, "TLS is active already"),
            Tls::Required => {
                *self = Handshake {
                    state: State::OptionHeader,
                    sends_zeroes: self.sends_zeroes,
                    ..Handshake::new(Tls::Active)
                };
                reply(output, option::STARTTLS, option_reply::ACK, &[]);
                return Step::StartTls;
            }
        };
        refuse(output, option::STARTTLS, error, message);
        Step::Answered
    }

    fn set_style(&mut self, option: u32, output: &mut Vec<u8>) {
        let wanted = match option {
            option::EXTENDED_HEADERS => Style::Extended,
            _ => Style::Structured,
        };
        if self.style < wanted {
            self.style = wanted;
            return reply(output, option, option_reply::ACK, &[]);
        }
        let (error, message) = match self.style == wanted {
            true => (option_reply::ERR_INVALID, "already negotiated"),
            false => (
                option_reply::ERR_EXT_HEADER_REQD,
                "extended headers were negotiated",
            ),
        };
        refuse(output, option, error, message);
    }

    /// Adds the flags that depend on the style.
    fn completed(&self, mut info: ExportInfo) -> ExportInfo {
        info.flags |= transmission::HAS_FLAGS;
        if self.style > Style::Simple {
            info.flags |= transmission::SEND_DF;
        }
        info
    }

    fn session<E>(&mut self, export: E, info: ExportInfo, knows: bool) -> Box<Session<E>> {
        let contexts = self.contexts.take().filter(|(name, _)| *name == info.name);
        Box::new(Session {
            export,
            contexts: contexts.map_or_else(Vec::new, |(_, ids)| ids),
            style: self.style,
            knows_block_sizes: knows,
            info,
        })
    }

    fn export_name<X: Exports>(
        &mut self,
        data: &[u8],
        exports: &X,
        output: &mut Vec<u8>,
    ) -> Step<X::Export> {
        // This option has no error reply.
        let found = string(data).and_then(|name| exports.find(name));
        let Some((export, info)) = found.filter(|_| self.style != Style::Extended) else {
            return Step::Violated(Violation::ExportName);
        };
        let info = self.completed(info);
        output.extend_from_slice(&info.size.to_be_bytes());
        output.extend_from_slice(&info.flags.to_be_bytes());
        if self.sends_zeroes {
            output.resize(output.len() + ZEROES, 0);
        }
        Step::Transmission(self.session(export, info, false))
    }

    /// Answers `NBD_OPT_INFO` and `NBD_OPT_GO`. Returns the session if the client enters the transmission phase.
    fn info<X: Exports>(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &X,
        output: &mut Vec<u8>,
    ) -> Option<Box<Session<X::Export>>> {
        let Some((name, requests)) = info_request(data) else {
            refuse(
                output,
                option,
                option_reply::ERR_INVALID,
                "malformed option",
            );
            return None;
        };
        let Some((export, info)) = exports.find(name) else {
            refuse(
                output,
                option,
                option_reply::ERR_UNKNOWN,
                "no export of this name",
            );
            return None;
        };
        let info = self.completed(info);
        let mut tell = |kind: u16, payload: &[&[u8]]| {
            let data = [&[kind.to_be_bytes().as_slice()], payload]
                .concat()
                .concat();
            reply(output, option, option_reply::INFO, &data);
        };
        if requests.contains(&info::NAME) {
            tell(info::NAME, &[info.name.as_bytes()]);
        }
        if requests.contains(&info::DESCRIPTION) && !info.description.is_empty() {
            tell(info::DESCRIPTION, &[info.description.as_bytes()]);
        }
        let knows_block_sizes = requests.contains(&info::BLOCK_SIZE);
        if knows_block_sizes {
            let BlockSizes {
                minimum,
                preferred,
                maximum_payload,
            } = info.block_sizes;
            let sizes = [minimum, preferred, maximum_payload].map(u32::to_be_bytes);
            tell(info::BLOCK_SIZE, &[sizes.as_flattened()]);
        }
        tell(
            info::EXPORT,
            &[&info.size.to_be_bytes(), &info.flags.to_be_bytes()],
        );
        reply(output, option, option_reply::ACK, &[]);
        (option == option::GO).then(|| self.session(export, info, knows_block_sizes))
    }

    fn meta_context<X: Exports>(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &X,
        output: &mut Vec<u8>,
    ) {
        let sets = option == option::SET_META_CONTEXT;
        if sets {
            self.contexts = None;
        }
        let mut fail = |error, message| refuse(output, option, error, message);
        if self.style == Style::Simple {
            return fail(
                option_reply::ERR_INVALID,
                "structured replies were not negotiated",
            );
        }
        let (name, queries) = match context_request(data) {
            Ok(request) => request,
            Err((error, message)) => return fail(error, message),
        };
        let Some((_, info)) = exports.find(name) else {
            return fail(option_reply::ERR_UNKNOWN, "no export of this name");
        };
        let is_wanted = |context: &str| {
            (queries.is_empty() && !sets)
                || queries.iter().any(|query| match query.ends_with(':') {
                    // An empty leaf name lists a namespace and selects nothing.
                    true => !sets && context.starts_with(query),
                    false => context == *query,
                })
        };
        let mut ids = Vec::new();
        for (context, id) in info.contexts.iter().zip(0u32..) {
            if is_wanted(context) {
                ids.push(id);
                // An ID is only meaningful if the context is selected.
                let shown = if sets { id } else { 0 };
                let mut entry = shown.to_be_bytes().to_vec();
                entry.extend_from_slice(context.as_bytes());
                reply(output, option, option_reply::META_CONTEXT, &entry);
            }
        }
        reply(output, option, option_reply::ACK, &[]);
        if sets {
            self.contexts = Some((info.name, ids));
        }
    }
}

/// Parses the header of an option.
fn expected_data(bytes: &[u8]) -> Result<State, Violation> {
    let header = OptionHeader::read_from_bytes(bytes);
    let header = header.ok().filter(|header| header.magic == OPTION_MAGIC);
    let header = header.ok_or(Violation::Magic)?;
    let (option, length) = (header.option.get(), header.length.get());
    match length {
        OPTION_TOO_LONG.. => Err(Violation::OptionLength(length)),
        _ if length as usize > OPTION_DATA_MAX => Ok(State::SkippedData {
            option,
            left: length,
        }),
        _ => Ok(State::OptionData {
            option,
            length: length as usize,
        }),
    }
}

/// Parses the data of `NBD_OPT_INFO` and `NBD_OPT_GO`: the export's name and the requested information.
fn info_request(data: &[u8]) -> Option<(&str, Vec<u16>)> {
    let mut fields = FieldReader(data);
    let name = fields.counted_string()?;
    let count = fields.u16()?;
    let requests: Option<Vec<u16>> = (0..count).map(|_| fields.u16()).collect();
    requests
        .filter(|_| fields.is_empty())
        .map(|requests| (name, requests))
}

type Refusal = (u32, &'static str);

/// Parses the data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`: the export's name and the queries.
fn context_request(data: &[u8]) -> Result<(&str, Vec<&str>), Refusal> {
    let malformed: Refusal = (option_reply::ERR_INVALID, "malformed option");
    let mut fields = FieldReader(data);
    let name = fields.counted_string().ok_or(malformed)?;
    let count = fields.u32().ok_or(malformed)?;
    if count > QUERIES_MAX {
        return Err((option_reply::ERR_TOO_BIG, "too many queries"));
    }
    let mut queries = Vec::new();
    for _ in 0..count {
        let query = fields.counted_string().ok_or(malformed)?;
        if !query.contains(':') {
            return Err((option_reply::ERR_INVALID, "query without a namespace"));
        }
        queries.push(query);
    }
    match fields.is_empty() {
        true => Ok((name, queries)),
        false => Err(malformed),
    }
}

/// Appends a reply to an option.
fn reply(output: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    let header = OptionReplyHeader {
        magic: OPTION_REPLY_MAGIC.into(),
        option: option.into(),
        kind: kind.into(),
        length: (data.len() as u32).into(),
    };
    output.extend_from_slice(header.as_bytes());
    output.extend_from_slice(data);
}

fn refuse_before_tls(output: &mut Vec<u8>, option: u32) {
    let error = option_reply::ERR_TLS_REQD;
    refuse(output, option, error, "TLS is required");
}

/// Appends an error reply with a message for humans.
fn refuse(output: &mut Vec<u8>, option: u32, error: u32, message: &str) {
    reply(output, option, error, message.as_bytes());
}

//! Runs a command in a guest: client side of the agent's socket.

use anyhow::{Context, Result, bail};
use guest_channel::{
    Allowance, Budget, Decoder, Frame, PAYLOAD_MAX, SCRIPT_MAX, Stream, Violation,
};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Standard input of the command.
pub enum ExecInput {
    /// Empty.
    Nothing,
    /// These bytes.
    Bytes(Vec<u8>),
    /// Data from a reader.
    Reader(Box<dyn Read + Send>),
}

/// End of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandEnd {
    /// Exit code, 128 + n after signal n.
    Code(u32),
    /// The reader of the output has closed it.
    OutputClosed,
}

/// Runs a shell script in the guest of this agent socket. Its output is written to `output` and `errors` as it arrives; signals from
/// `signals` are forwarded.
pub fn exec(
    socket: &Path,
    script: &[u8],
    input: ExecInput,
    output: &mut impl Write,
    errors: &mut impl Write,
    signals: Option<Receiver<u8>>,
) -> Result<CommandEnd> {
    if script.len() > SCRIPT_MAX {
        bail!(
            "a command of {} bytes is too long, the maximum is {SCRIPT_MAX}; hint: copy it into the guest as a file",
            script.len()
        );
    }
    let stream = UnixStream::connect(socket)
        .with_context(|| format!("cannot connect to {}", socket.display()))?;
    let sender = Sender::new(stream.try_clone()?);
    let mut bytes = Vec::new();
    for piece in script.chunks(PAYLOAD_MAX) {
        Frame::Script(piece.to_vec()).encode(0, &mut bytes);
    }
    Frame::Start.encode(0, &mut bytes);
    sender.write(&bytes).context("cannot start the command")?;
    // Both threads are detached: a read from a terminal ends only with user input.
    let feeder = sender.clone();
    std::thread::spawn(move || feeder.feed(input));
    if let Some(signals) = signals {
        let sender = sender.clone();
        std::thread::spawn(move || {
            for number in signals {
                sender.send(&Frame::Signal(number));
            }
        });
    }
    let ended = receive(&stream, &sender, output, errors);
    // This makes the threads' next write fail.
    stream.shutdown(std::net::Shutdown::Both).unwrap_or(());
    ended
}

fn receive(
    mut stream: &UnixStream,
    sender: &Sender,
    output: &mut impl Write,
    errors: &mut impl Write,
) -> Result<CommandEnd> {
    let (mut output_used, mut errors_used) = (Allowance::default(), Allowance::default());
    let mut decoder = Decoder::default();
    let mut buffer = vec![0; 2 * PAYLOAD_MAX];
    let mut ended = None;
    let mut broken = None;
    while ended.is_none() && broken.is_none() {
        let count = stream
            .read(&mut buffer)
            .context("cannot read from the guest's supervisor")?;
        if count == 0 {
            bail!("the guest's supervisor has ended; hint: lunette vm list");
        }
        let fed = decoder.feed(&buffer[..count], |_, frame| {
            let (written, used, stream, count) = match frame {
                Frame::Output(data) => {
                    let written = output.write_all(&data).and_then(|()| output.flush());
                    (written, &mut output_used, Stream::Output, data.len())
                }
                Frame::Errors(data) => {
                    let written = errors.write_all(&data).and_then(|()| errors.flush());
                    (written, &mut errors_used, Stream::Errors, data.len())
                }
                Frame::Credit(Stream::Input, count) => return sender.grant(count),
                Frame::Exit(code) => {
                    ended = Some(Ok(code));
                    return Ok(());
                }
                Frame::Failed(reason) => {
                    ended = Some(Err(reason));
                    return Ok(());
                }
                frame => {
                    return Err(Violation(format!("an unexpected frame: {frame:?}")));
                }
            };
            if let Err(error) = written {
                broken.get_or_insert(error);
                return Ok(());
            }
            used.receive(count)?;
            if let Some(more) = used.consume(count as u32) {
                sender.send(&Frame::Credit(stream, more));
            }
            Ok(())
        });
        fed.context("invalid message of the guest's supervisor")?;
    }
    match (broken, ended) {
        (Some(error), _) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            Ok(CommandEnd::OutputClosed)
        }
        (Some(error), _) => Err(error).context("cannot write the command's output"),
        (None, Some(Err(reason))) => bail!("{reason}"),
        (None, Some(Ok(code))) => Ok(CommandEnd::Code(code)),
        (None, None) => bail!("the result of the command is unknown"),
    }
}

/// Sending side of the connection to the supervisor, shared by several threads.
#[derive(Clone)]
struct Sender {
    shared: Arc<Shared>,
}

struct Shared {
    stream: Mutex<UnixStream>,
    input: Mutex<Budget>,
    more: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sender {
    fn new(stream: UnixStream) -> Sender {
        Sender {
            shared: Arc::new(Shared {
                stream: Mutex::new(stream),
                input: Mutex::default(),
                more: Condvar::new(),
            }),
        }
    }

    fn write(&self, bytes: &[u8]) -> std::io::Result<()> {
        lock(&self.shared.stream).write_all(bytes)
    }

    /// Sends a frame. The reading thread detects failures as the end of the stream.
    fn send(&self, frame: &Frame) {
        self.write(&frame.bytes(0)).unwrap_or(());
    }

    fn grant(&self, count: u32) -> Result<(), Violation> {
        lock(&self.shared.input).grant(count)?;
        self.shared.more.notify_all();
        Ok(())
    }

    fn feed(&self, input: ExecInput) {
        let mut reader: Box<dyn Read + Send> = match input {
            ExecInput::Nothing => Box::new(std::io::empty()),
            ExecInput::Bytes(bytes) => Box::new(std::io::Cursor::new(bytes)),
            ExecInput::Reader(reader) => reader,
        };
        let mut buffer = vec![0; PAYLOAD_MAX];
        loop {
            let budget = lock(&self.shared.input);
            let budget = self
                .shared
                .more
                .wait_while(budget, |budget| budget.left() == 0);
            let budget = budget.unwrap_or_else(PoisonError::into_inner);
            let room = (budget.left() as usize).min(PAYLOAD_MAX);
            drop(budget);
            let count = match reader.read(&mut buffer[..room]) {
                Ok(count) => count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(_) => 0,
            };
            if count == 0 {
                return self.send(&Frame::InputEnd);
            }
            lock(&self.shared.input).spend(count as u32);
            let frame = Frame::Input(buffer[..count].to_vec());
            if self.write(&frame.bytes(0)).is_err() {
                return;
            }
        }
    }
}

//! One command: process, three streams, and end.

use super::{Agent, lock};
use guest_channel::{Allowance, Budget, Frame, PAYLOAD_MAX, SCRIPT_MAX, Stream, Violation};
use rustix::process::{Pid, Signal, kill_process_group};
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// State shared by the port's reader and a command's threads.
#[derive(Default)]
pub struct Channel {
    /// The last frame of the command has been sent.
    pub ended: AtomicBool,
    /// Send window of stdout.
    pub output: Credit,
    /// Send window of stderr.
    pub errors: Credit,
    input: Mutex<Input>,
    more_input: Condvar,
    process: Mutex<Process>,
}

/// Bytes queued for stdin. The host sends at most a window.
#[derive(Default)]
struct Input {
    pieces: VecDeque<Vec<u8>>,
    at_end: bool,
    over: bool,
}

#[derive(Default)]
struct Process {
    group: Option<Pid>,
    // A signal that arrived before the process started.
    pending: Option<u8>,
}

/// Send window of one stream.
#[derive(Default)]
pub struct Credit {
    budget: Mutex<Budget>,
    more: Condvar,
}

impl Credit {
    /// Raises the send window by `count` bytes.
    pub fn grant(&self, count: u32) -> Result<(), Violation> {
        lock(&self.budget).grant(count)?;
        self.more.notify_all();
        Ok(())
    }

    /// Waits until the send window is open. Returns its size.
    fn wait(&self) -> usize {
        let budget = lock(&self.budget);
        let budget = self.more.wait_while(budget, |budget| budget.left() == 0);
        budget.unwrap_or_else(PoisonError::into_inner).left() as usize
    }

    fn spend(&self, count: usize) {
        lock(&self.budget).spend(count as u32);
    }
}

impl Channel {
    /// Queues bytes for the command's stdin, or its end.
    pub fn input(&self, data: Option<Vec<u8>>) {
        let mut input = lock(&self.input);
        match data {
            Some(data) if !input.over => input.pieces.push_back(data),
            Some(_) => {}
            None => input.at_end = true,
        }
        self.more_input.notify_all();
    }

    /// Sends a signal to the command's process group.
    pub fn signal(&self, number: u8) {
        let mut process = lock(&self.process);
        match process.group {
            Some(group) => send_signal(group, number),
            None => process.pending = Some(number),
        }
    }

    /// Returns the next input; `None` at the end, or after the command has ended.
    fn next_input(&self) -> Option<Vec<u8>> {
        let input = lock(&self.input);
        let waiting = |input: &mut Input| input.pieces.is_empty() && !input.at_end && !input.over;
        let input = self.more_input.wait_while(input, waiting);
        let mut input = input.unwrap_or_else(PoisonError::into_inner);
        input.pieces.pop_front().filter(|_| !input.over)
    }

    fn started(&self, id: u32) {
        let mut process = lock(&self.process);
        process.group = Pid::from_raw(id as i32);
        if let (Some(group), Some(number)) = (process.group, process.pending.take()) {
            send_signal(group, number);
        }
    }

    fn over(&self) {
        lock(&self.process).group = None;
        lock(&self.input).over = true;
        self.more_input.notify_all();
    }
}

/// Sends a signal to the remaining processes of the group. An empty group is not an error.
fn send_signal(group: Pid, number: u8) {
    if let Some(signal) = Signal::from_named_raw(i32::from(number)) {
        kill_process_group(group, signal).unwrap_or(());
    }
}

/// Runs a script to its end.
pub fn run(agent: &Arc<Agent>, id: u32, channel: &Arc<Channel>, script: Option<Vec<u8>>) {
    let Some(script) = script else {
        let reason = format!("the script is longer than {SCRIPT_MAX} bytes");
        return agent.send(id, channel, &Frame::Failed(reason));
    };
    let mut command = Command::new("/bin/sh");
    command
        .arg("-c")
        .arg(OsString::from_vec(script))
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            let reason = format!("cannot start a shell in the guest: {error}");
            return agent.send(id, channel, &Frame::Failed(reason));
        }
    };
    channel.started(child.id());
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    if let Some(stdin) = stdin {
        let (agent, channel) = (Arc::clone(agent), Arc::clone(channel));
        // The thread is detached: a process left behind by the command may keep stdin open without reading it.
        std::thread::spawn(move || feed(&agent, id, &channel, stdin));
    }
    let status = std::thread::scope(|scope| {
        scope.spawn(|| pump(agent, id, channel, Stream::Output, stdout));
        scope.spawn(|| pump(agent, id, channel, Stream::Errors, stderr));
        child.wait()
    });
    channel.over();
    let last = match status {
        Ok(status) => {
            let signal = || 128 + status.signal().unwrap_or(0);
            Frame::Exit(status.code().unwrap_or_else(signal) as u32)
        }
        Err(error) => Frame::Failed(format!("cannot wait for a shell in the guest: {error}")),
    };
    agent.send(id, channel, &last);
}

/// Forwards output of the command to the host within the send window.
fn pump(agent: &Agent, id: u32, channel: &Channel, stream: Stream, pipe: Option<impl Read>) {
    let Some(mut pipe) = pipe else { return };
    let credit = match stream {
        Stream::Output => &channel.output,
        _ => &channel.errors,
    };
    let mut buffer = vec![0; PAYLOAD_MAX];
    loop {
        let room = credit.wait().min(PAYLOAD_MAX);
        let count = match pipe.read(&mut buffer[..room]) {
            Ok(count) if count > 0 => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            _ => return,
        };
        credit.spend(count);
        let data = buffer[..count].to_vec();
        let frame = match stream {
            Stream::Output => Frame::Output(data),
            _ => Frame::Errors(data),
        };
        agent.send(id, channel, &frame);
    }
}

/// Forwards input from the host to the command. Input after the command has closed its stdin is dropped.
fn feed(agent: &Agent, id: u32, channel: &Channel, stdin: ChildStdin) {
    let mut stdin = Some(stdin);
    let mut allowance = Allowance::default();
    while let Some(piece) = channel.next_input() {
        if let Some(pipe) = &mut stdin
            && pipe.write_all(&piece).is_err()
        {
            stdin = None;
        }
        let count = piece.len() as u32;
        if allowance.receive(piece.len()).is_ok()
            && let Some(more) = allowance.consume(count)
        {
            agent.send(id, channel, &Frame::Credit(Stream::Input, more));
        }
    }
}

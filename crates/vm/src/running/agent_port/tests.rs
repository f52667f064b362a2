//! Clients over sockets, and a guest simulated by the test.

use super::super::client::{CommandEnd, ExecInput, exec};
use super::*;
use guest_channel::{WINDOW, lead_in};
use std::io::Write;
use std::path::PathBuf;

struct Guest {
    stream: UnixStream,
    decoder: Decoder,
}

struct Rig {
    folder: tempfile::TempDir,
    port: AgentPort,
    guest: Guest,
}

impl Rig {
    fn new() -> Rig {
        let folder = tempfile::tempdir().unwrap();
        let (host, guest) = UnixStream::pair().unwrap();
        guest
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let port = AgentPort::start(host).unwrap();
        port.serve(UnixListener::bind(folder.path().join("agent.sock")).unwrap());
        let guest = Guest {
            stream: guest,
            decoder: Decoder::default(),
        };
        Rig {
            folder,
            port,
            guest,
        }
    }

    fn greeted() -> Rig {
        let mut rig = Rig::new();
        rig.guest.greet([7; 16]);
        rig
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("agent.sock")
    }

    fn exec(&self, script: &str, input: ExecInput) -> Running {
        let (socket, script) = (self.socket(), script.to_owned());
        std::thread::spawn(move || {
            let (mut output, mut errors) = (Vec::new(), Vec::new());
            let ended = exec(
                &socket,
                script.as_bytes(),
                input,
                &mut output,
                &mut errors,
                None,
            );
            ended.map(|ended| (ended, output, errors))
        })
    }
}

type Running = std::thread::JoinHandle<Result<(CommandEnd, Vec<u8>, Vec<u8>)>>;

impl Guest {
    fn greet(&mut self, number: [u8; 16]) {
        let mut bytes = lead_in();
        Frame::Hello(number).encode(0, &mut bytes);
        self.stream.write_all(&bytes).unwrap();
        let mut hunter = Hunter::for_welcome(number);
        let mut byte = [0];
        while hunter.feed(&byte[..1]).is_none() {
            self.stream.read_exact(&mut byte).unwrap();
        }
        self.decoder = Decoder::default();
    }

    /// Reads frames until `wanted` accepts one.
    fn expect<T>(&mut self, mut wanted: impl FnMut(u32, Frame) -> Option<T>) -> T {
        let mut found = None;
        let mut byte = [0];
        while found.is_none() {
            self.stream.read_exact(&mut byte).unwrap();
            let fed = self.decoder.feed(&byte, |id, frame| {
                found = found.take().or(wanted(id, frame));
                Ok(())
            });
            fed.unwrap();
        }
        found.unwrap()
    }

    fn started(&mut self) -> u32 {
        self.expect(|id, frame| (frame == Frame::Start).then_some(id))
    }

    fn send(&mut self, id: u32, frame: Frame) {
        self.stream.write_all(&frame.bytes(id)).unwrap();
    }
}

#[test]
fn a_commands_streams_and_its_code_reach_their_own_client() {
    let mut rig = Rig::greeted();
    let first = rig.exec("one", ExecInput::Nothing);
    let one = rig.guest.started();
    let second = rig.exec("two", ExecInput::Nothing);
    let two = rig.guest.started();
    rig.guest.send(two, Frame::Output(b"of two".to_vec()));
    rig.guest.send(one, Frame::Errors(b"of one".to_vec()));
    rig.guest.send(one, Frame::Exit(3));
    rig.guest.send(two, Frame::Exit(0));
    let ended = |running: Running| running.join().unwrap().unwrap();
    assert_eq!(
        ended(first),
        (CommandEnd::Code(3), Vec::new(), b"of one".to_vec())
    );
    assert_eq!(
        ended(second),
        (CommandEnd::Code(0), b"of two".to_vec(), Vec::new())
    );
}

#[test]
fn bad_frame_ends_every_command_until_the_next_greeting() {
    let mut rig = Rig::greeted();
    let first = rig.exec("one", ExecInput::Nothing);
    rig.guest.started();
    rig.guest
        .stream
        .write_all(b"these bytes are not a frame")
        .unwrap();
    let error = first.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("malformed frame header"), "{error}");
    let refused = rig
        .exec("two", ExecInput::Nothing)
        .join()
        .unwrap()
        .unwrap_err();
    assert!(
        refused.to_string().contains("does not respond"),
        "{refused}"
    );
    rig.guest.greet([8; 16]);
    assert_eq!(rig.port.boots(), 2);
    let third = rig.exec("three", ExecInput::Nothing);
    let id = rig.guest.started();
    rig.guest.send(id, Frame::Exit(0));
    assert_eq!(third.join().unwrap().unwrap().0, CommandEnd::Code(0));
}

#[test]
fn protocol_violations_of_an_agent_end_its_session() {
    for attack in 0..3 {
        let mut rig = Rig::greeted();
        // A client that never reads.
        let mut client = UnixStream::connect(rig.socket()).unwrap();
        client.write_all(&Frame::Start.bytes(0)).unwrap();
        let id = rig.guest.started();
        match attack {
            0 => {
                for _ in 0..=WINDOW as usize / PAYLOAD_MAX {
                    rig.guest.send(id, Frame::Output(vec![0; PAYLOAD_MAX]));
                }
            }
            1 => rig.guest.send(id + 1, Frame::Exit(0)),
            _ => rig.guest.send(id, Frame::Start),
        }
        let until = std::time::Instant::now() + Duration::from_secs(20);
        while rig.port.last_problem().is_none() && std::time::Instant::now() < until {
            rig.port.wait(Duration::from_millis(10));
        }
        let problem = rig.port.last_problem().unwrap_or_default();
        let words = [
            "bytes allowed on a stream",
            "the unknown channel",
            "(host to guest)",
        ];
        assert!(problem.contains(words[attack]), "{attack}: {problem}");
    }
}

#[test]
fn commands_during_a_long_migration_are_refused_and_later_ones_run() {
    let mut rig = Rig::greeted();
    rig.port.pause();
    let refused = rig.exec("one", ExecInput::Nothing).join().unwrap();
    assert_eq!(refused.unwrap_err().to_string(), IS_MIGRATING);
    rig.port.resume();
    let running = rig.exec("two", ExecInput::Nothing);
    let id = rig.guest.started();
    rig.guest.send(id, Frame::Exit(0));
    assert_eq!(running.join().unwrap().unwrap().0, CommandEnd::Code(0));
}

#[test]
fn a_client_that_leaves_has_its_command_killed_and_its_output_dropped() {
    let mut rig = Rig::greeted();
    let mut client = UnixStream::connect(rig.socket()).unwrap();
    client.write_all(&Frame::Start.bytes(0)).unwrap();
    let id = rig.guest.started();
    drop(client);
    rig.guest
        .expect(|_, frame| (frame == Frame::Signal(9)).then_some(()));
    // The output of the killed command must not wait for a reader: window updates continue.
    let mut sent = 0;
    while sent < 2 * WINDOW {
        rig.guest.send(id, Frame::Output(vec![0; PAYLOAD_MAX]));
        sent += PAYLOAD_MAX as u32;
        rig.guest
            .expect(|_, frame| matches!(frame, Frame::Credit(Stream::Output, _)).then_some(()));
    }
    rig.guest.send(id, Frame::Exit(137));
    assert_eq!(rig.port.last_problem(), None);
}

#[test]
fn input_goes_in_windows_and_output_has_no_length_limit() {
    let mut rig = Rig::greeted();
    let data: Vec<u8> = (0..10 * WINDOW).map(|at| (at % 251) as u8).collect();
    let running = rig.exec("cat", ExecInput::Bytes(data.clone()));
    let id = rig.guest.started();
    let (mut budget, mut allowance) = (Budget::default(), Allowance::default());
    let mut held = std::collections::VecDeque::new();
    let mut at_end = false;
    let mut buffer = vec![0; 4096];
    // Echoes input to output within the credit.
    while !(at_end && held.is_empty()) {
        let count = rig.guest.stream.read(&mut buffer).unwrap();
        let mut taken = 0;
        let fed = rig.guest.decoder.feed(&buffer[..count], |_, frame| {
            match frame {
                Frame::Input(piece) => {
                    allowance.receive(piece.len())?;
                    taken += piece.len() as u32;
                    held.push_back(piece);
                }
                Frame::InputEnd => at_end = true,
                Frame::Credit(Stream::Output, count) => budget.grant(count)?,
                other => panic!("{other:?}"),
            }
            Ok(())
        });
        fed.unwrap();
        if let Some(more) = allowance.consume(taken) {
            rig.guest.send(id, Frame::Credit(Stream::Input, more));
        }
        while held
            .front()
            .is_some_and(|piece: &Vec<u8>| piece.len() as u32 <= budget.left())
        {
            let piece = held.pop_front().unwrap();
            budget.spend(piece.len() as u32);
            rig.guest.send(id, Frame::Output(piece));
        }
    }
    rig.guest.send(id, Frame::Exit(0));
    let (ended, output, _) = running.join().unwrap().unwrap();
    assert!(ended == CommandEnd::Code(0) && output == data);
}

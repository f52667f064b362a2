//! Sessions of front ends in a handover: a memfd with their messages, and their descriptors by number.

use std::collections::BTreeMap;
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;

use control::HANDOVER_VERSION;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};
use vhost_user::SessionHandover;

use super::{Handover, Item};

/// Largest state in bytes. A front end has at most a few hundred messages in effect.
const STATE_MAX: u64 = 64 << 20;

#[derive(Serialize, Deserialize)]
struct HandoverState {
    version: u32,
    sessions: Vec<Session>,
}

#[derive(Serialize, Deserialize)]
struct Session {
    export: String,
    stream: usize,
    channel: Option<usize>,
    messages: Vec<Message>,
}

#[derive(Serialize, Deserialize)]
struct Message {
    /// Message of the vhost-user protocol.
    bytes: Vec<u8>,
    descriptors: Vec<usize>,
}

impl Handover {
    /// Adds sessions. The last descriptor describes the others.
    ///
    /// # Errors
    /// If descriptors or memory run out.
    pub(crate) fn push_sessions(&mut self, sessions: Vec<SessionHandover>) -> io::Result<()> {
        let mut last = 0;
        let mut number = |descriptor: OwnedFd| {
            let number = last;
            self.push(Item::SessionDescriptor(number), descriptor);
            last += 1;
            number
        };
        let sessions = sessions.into_iter().map(|one| Session {
            stream: number(one.stream),
            channel: one.channel.map(&mut number),
            messages: one
                .messages
                .into_iter()
                .map(|(bytes, fds)| Message {
                    bytes,
                    descriptors: fds.into_iter().map(&mut number).collect(),
                })
                .collect(),
            export: one.export,
        });
        let state = HandoverState {
            version: HANDOVER_VERSION,
            sessions: sessions.collect(),
        };
        let text = serde_json::to_vec(&state).map_err(io::Error::other)?;
        let mut file = std::fs::File::from(memfd_create("lunette-handover", MemfdFlags::CLOEXEC)?);
        file.write_all(&text)?;
        self.push(Item::Sessions, file);
        Ok(())
    }

    /// Removes and returns the sessions, and closes unknown items. Omits a session if the store had no room for one of its descriptors;
    /// its front end reconnects.
    ///
    /// # Errors
    /// The reason why there are no sessions. All their descriptors are closed.
    pub(crate) fn take_sessions(&mut self) -> Result<Vec<SessionHandover>, String> {
        let mut by_number: BTreeMap<usize, OwnedFd> = BTreeMap::new();
        let (mut state, mut is_empty) = (None, true);
        let is_of_sessions = |one: &mut (Item, OwnedFd)| {
            matches!(
                one.0,
                Item::Sessions | Item::SessionDescriptor(_) | Item::Unknown(_)
            )
        };
        for (item, fd) in self.0.extract_if(.., is_of_sessions) {
            is_empty = false;
            match item {
                Item::SessionDescriptor(number) => drop(by_number.insert(number, fd)),
                Item::Sessions => state = Some(fd),
                _ => {}
            }
        }
        if is_empty {
            return Ok(Vec::new());
        }
        let Some(state) = state else {
            return Err("the handover has no state descriptor".to_owned());
        };
        let state =
            read(state).map_err(|error| format!("cannot read the handover state: {error}"))?;
        if state.version != HANDOVER_VERSION {
            return Err(format!(
                "the previous daemon uses handover version {}, this one {HANDOVER_VERSION}",
                state.version
            ));
        }
        let mut take = |number: usize| {
            let found = by_number.remove(&number);
            found.ok_or_else(|| format!("descriptor {number} of the handover is missing"))
        };
        let sessions = state.sessions.into_iter().map(|one| {
            let export = one.export.clone();
            let messages = one.messages.into_iter().map(|message| {
                let fds = message.descriptors.into_iter().map(&mut take);
                Ok((message.bytes, fds.collect::<Result<_, String>>()?))
            });
            let whole = messages
                .collect::<Result<_, String>>()
                .and_then(|messages| {
                    Ok(SessionHandover {
                        export: one.export,
                        stream: take(one.stream)?,
                        channel: one.channel.map(&mut take).transpose()?,
                        messages,
                    })
                });
            whole
                .inspect_err(|error| {
                    tracing::warn!(
                        export,
                        "cannot take over the session, its front end must reconnect: {error}"
                    );
                })
                .ok()
        });
        Ok(sessions.flatten().collect())
    }
}

fn read(state: OwnedFd) -> io::Result<HandoverState> {
    let mut file = std::fs::File::from(state);
    // The descriptor shares its file position with the previous process.
    file.rewind()?;
    let mut text = Vec::new();
    file.take(STATE_MAX).read_to_end(&mut text)?;
    serde_json::from_slice(&text).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn session(export: &str, channel: bool) -> SessionHandover {
        let fd = || OwnedFd::from(UnixStream::pair().unwrap().0);
        SessionHandover {
            export: export.to_owned(),
            stream: fd(),
            channel: channel.then(fd),
            messages: vec![(vec![1, 2, 3], vec![fd(), fd()]), (vec![4], Vec::new())],
        }
    }

    #[test]
    fn sessions_round_trip_in_any_descriptor_order() {
        let mut handover = Handover::default();
        let sessions = vec![session("a", true), session("b", false)];
        handover.push_sessions(sessions).unwrap();
        assert_eq!(handover.0.len(), 1 + 4 + 3);
        handover.0.reverse();
        let fd = || OwnedFd::from(UnixStream::pair().unwrap().0);
        handover.push(Item::Export, fd());
        handover.push(Item::Unknown("handover.later".to_owned()), fd());
        let sessions = handover.take_sessions().unwrap();
        assert_eq!(handover.names(), ["handover.export"]);
        let shapes = sessions.iter().map(|one| {
            let fds = one
                .messages
                .iter()
                .map(|(bytes, fds)| (bytes.clone(), fds.len()));
            (
                one.export.as_str(),
                one.channel.is_some(),
                fds.collect::<Vec<_>>(),
            )
        });
        let messages = vec![(vec![1, 2, 3], 2), (vec![4], 0)];
        let expected = [("a", true, messages.clone()), ("b", false, messages)];
        assert_eq!(shapes.collect::<Vec<_>>(), expected);
        assert!(handover.take_sessions().unwrap().is_empty());
    }

    /// The state of version 1, as all daemons write it.
    #[test]
    fn state_has_the_form_of_the_protocol() {
        let mut handover = Handover::default();
        let sessions = vec![session("a", true), session("b", false)];
        handover.push_sessions(sessions).unwrap();
        let names = handover.names();
        assert_eq!(names[..2], ["handover.0", "handover.1"]);
        assert_eq!(names[6..], ["handover.6", "handover"]);
        let mut file = std::fs::File::from(handover.take(&Item::Sessions).unwrap());
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        let sample = include_str!("../../../../tests/compat/0.9/handover/frame.json");
        assert_eq!(text, sample.trim_end());
    }

    /// Export, whether there is a channel, messages, number of the messages' descriptors.
    type Shape = (String, bool, Vec<Vec<u8>>, usize);

    /// Takes over the sessions of a frame with seven descriptors.
    fn taken_over(frame: &[u8]) -> Result<Vec<Shape>, String> {
        let memory = memfd_create("frame", MemfdFlags::CLOEXEC).unwrap();
        let mut memory = std::fs::File::from(memory);
        memory.write_all(frame).unwrap();
        let mut handover = Handover::default();
        handover.push(Item::Sessions, memory);
        for number in 0..7 {
            let fd = UnixStream::pair().unwrap().0;
            handover.push(Item::SessionDescriptor(number), fd);
        }
        let sessions = handover.take_sessions()?.into_iter().map(|one| {
            let descriptors = one.messages.iter().map(|(_, all)| all.len()).sum();
            let bytes = one.messages.into_iter().map(|(bytes, _)| bytes).collect();
            (one.export, one.channel.is_some(), bytes, descriptors)
        });
        Ok(sessions.collect())
    }

    /// The sessions of every recorded frame.
    fn expected() -> Vec<Shape> {
        let messages = vec![vec![1, 2, 3], vec![4]];
        vec![
            ("a".to_owned(), true, messages.clone(), 2),
            ("b".to_owned(), false, messages, 2),
        ]
    }

    #[test]
    fn frame_of_each_release_is_taken_over() {
        let releases = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/compat");
        let releases = std::fs::read_dir(releases).unwrap();
        let folders = releases.map(|entry| entry.unwrap().path().join("handover"));
        let folders: Vec<_> = folders.filter(|folder| folder.is_dir()).collect();
        assert!(!folders.is_empty());
        for folder in folders {
            let frame = std::fs::read(folder.join("frame.json")).unwrap();
            assert_eq!(taken_over(&frame), Ok(expected()), "{}", folder.display());
            let items = std::fs::read_to_string(folder.join("items.txt")).unwrap();
            for name in items.lines() {
                let item = Item::parse(name).unwrap();
                assert!(!matches!(item, Item::Unknown(_)), "{name}");
                assert_eq!(item.name(), name);
            }
        }
    }

    /// A daemon with another name for a field of the recorded frame loses its content.
    #[test]
    fn each_renamed_field_of_a_frame_is_found() {
        let frame = include_str!("../../../../tests/compat/0.9/handover/frame.json");
        for field in [
            "version",
            "sessions",
            "export",
            "stream",
            "channel",
            "messages",
            "bytes",
            "descriptors",
        ] {
            let (old, new) = (format!("\"{field}\":"), format!("\"{field}_1\":"));
            let renamed = frame.replace(&old, &new);
            assert_ne!(renamed, frame, "{field}");
            assert_ne!(taken_over(renamed.as_bytes()), Ok(expected()), "{field}");
        }
    }

    #[test]
    fn incomplete_or_newer_handover_is_refused_with_a_reason() {
        let mut handover = Handover::default();
        let sessions = vec![session("a", true), session("b", true)];
        handover.push_sessions(sessions).unwrap();
        drop(handover.take(&Item::SessionDescriptor(0)));
        let whole = handover.take_sessions().unwrap();
        let whole: Vec<&str> = whole.iter().map(|one| one.export.as_str()).collect();
        assert_eq!(whole, ["b"]);
        let mut handover = Handover::default();
        handover.push_sessions(Vec::new()).unwrap();
        let mut file = std::fs::File::from(handover.take(&Item::Sessions).unwrap());
        file.rewind().unwrap();
        file.write_all(br#"{"version":9,"sessions":[]}       "#)
            .unwrap();
        handover.push(Item::Sessions, file);
        let error = handover.take_sessions().err().unwrap();
        assert!(error.contains("version 9"), "{error}");
        let unknown = Item::Unknown("handover.later".to_owned());
        handover.push(unknown, UnixStream::pair().unwrap().0);
        let error = handover.take_sessions().err().unwrap();
        assert!(error.contains("no state descriptor"), "{error}");
    }
}

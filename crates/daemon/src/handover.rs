//! Handover to the next daemon, as named descriptors: front-end sessions, listening sockets and memory of RAM disks. The receiver speaks
//! the protocol of systemd's descriptor store (sd_notify(3), `FDSTORE=1`): systemd itself at a restart, or the next daemon (`lunette
//! upgrade`).
//!
//! ```text
//!   handover         a memfd: version, and each session's messages, with the numbers of their descriptors
//!   handover.N       descriptor N: connections, channels, memory, rings' eventfds
//!   handover.portal  listening socket of an iSCSI portal
//!   handover.export  listening socket of a vhost-user export
//!   handover.control the control socket; handover.control-passed if a service manager listens there
//!   handover.api     the socket of the API over TCP
//!   handover.metrics the socket of metrics
//!   ram.DISK         the memory of a RAM disk (`retained_disks`)
//! ```

use std::collections::BTreeMap;
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use control::HANDOVER_VERSION;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};
use signal_hook::iterator::Handle;
use vhost_user::HandedOver;

use crate::control::Left;

const STATE: &str = "handover";

const PORTAL: &str = "handover.portal";
const EXPORT: &str = "handover.export";
const CONTROL: &str = "handover.control";
const CONTROL_PASSED: &str = "handover.control-passed";
const API: &str = "handover.api";
const METRICS: &str = "handover.metrics";

/// Largest state in bytes. A front end has at most a few hundred messages in effect.
const STATE_MAX: u64 = 64 << 20;

/// A descriptor and its name.
pub type Named = (String, OwnedFd);

/// Returns true if a descriptor of this name belongs to a handover.
pub fn is_handover(name: &str) -> bool {
    name.strip_prefix(STATE)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

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

/// Encodes sessions as named descriptors. The last one describes the others.
///
/// # Errors
/// If descriptors or memory run out.
pub fn encode(sessions: Vec<HandedOver>) -> io::Result<Vec<Named>> {
    let mut named: Vec<Named> = Vec::new();
    let mut name = |fd: OwnedFd| {
        let number = named.len();
        named.push((format!("{STATE}.{number}"), fd));
        number
    };
    let sessions = sessions.into_iter().map(|one| Session {
        stream: name(one.stream),
        channel: one.channel.map(&mut name),
        messages: one
            .messages
            .into_iter()
            .map(|(bytes, fds)| Message {
                bytes,
                descriptors: fds.into_iter().map(&mut name).collect(),
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
    named.push((STATE.to_owned(), file.into()));
    Ok(named)
}

/// Listening sockets. Clients that connect while no daemon accepts wait in the listen queue.
#[derive(Debug, Default)]
pub struct Sockets {
    /// Sockets of iSCSI portals.
    pub portals: Vec<OwnedFd>,
    /// Sockets of vhost-user exports.
    pub exports: Vec<OwnedFd>,
    /// Control socket.
    pub control: Option<Left>,
    /// Socket of the API over TCP.
    pub api: Option<OwnedFd>,
    /// Socket of metrics.
    pub metrics: Option<OwnedFd>,
}

impl Sockets {
    /// Removes and returns the sockets among named descriptors.
    pub fn take(named: &mut Vec<Named>) -> Sockets {
        let mut take = |wanted: &str| {
            let found = named.extract_if(.., |(name, _)| name == wanted);
            found.map(|(_, socket)| socket).collect::<Vec<_>>()
        };
        let mut control = |name, is_passed| {
            let socket = take(name).pop()?;
            Some(Left { socket, is_passed })
        };
        let control = control(CONTROL, false).or_else(|| control(CONTROL_PASSED, true));
        Sockets {
            control,
            portals: take(PORTAL),
            exports: take(EXPORT),
            api: take(API).pop(),
            metrics: take(METRICS).pop(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        let Sockets {
            portals,
            exports,
            control,
            api,
            metrics,
        } = self;
        let is_alone = control.is_none() && api.is_none() && metrics.is_none();
        is_alone && portals.is_empty() && exports.is_empty()
    }

    pub(crate) fn named(self) -> impl Iterator<Item = Named> {
        let name = |name: &'static str| move |socket| (name.to_owned(), socket);
        let control = self.control.map(|left| {
            let name = if left.is_passed {
                CONTROL_PASSED
            } else {
                CONTROL
            };
            (name.to_owned(), left.socket)
        });
        let services = [
            control,
            self.api.map(name(API)),
            self.metrics.map(name(METRICS)),
        ];
        let portals = self.portals.into_iter().map(name(PORTAL));
        let exports = self.exports.into_iter().map(name(EXPORT));
        portals.chain(exports).chain(services.into_iter().flatten())
    }
}

/// Decodes the sessions of named descriptors. Omits a session if the store had no room for one of its descriptors; its front end
/// reconnects.
///
/// # Errors
/// The reason why there are no sessions. All descriptors are closed.
pub fn decode(named: Vec<Named>) -> Result<Vec<HandedOver>, String> {
    let mut by_number: BTreeMap<usize, OwnedFd> = BTreeMap::new();
    let mut state = None;
    for (name, fd) in named {
        match name.strip_prefix("handover.").map(str::parse) {
            Some(Ok(number)) => drop(by_number.insert(number, fd)),
            Some(Err(_)) => {}
            None => state = Some(fd),
        }
    }
    let Some(state) = state else {
        return Err("the handover has no state descriptor".to_owned());
    };
    let state = read(state).map_err(|error| format!("cannot read the handover state: {error}"))?;
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
                Ok(HandedOver {
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

fn read(state: OwnedFd) -> io::Result<HandoverState> {
    let mut file = std::fs::File::from(state);
    // The descriptor shares its file position with the previous process.
    file.rewind()?;
    let mut text = Vec::new();
    file.take(STATE_MAX).read_to_end(&mut text)?;
    serde_json::from_slice(&text).map_err(io::Error::other)
}

/// Ends the daemon from another thread, with a handover to a listening process.
#[derive(Clone)]
pub struct Ending {
    signals: Handle,
    to: Arc<Mutex<Option<PathBuf>>>,
}

impl Ending {
    pub(crate) fn new(signals: Handle) -> Ending {
        Ending {
            signals,
            to: Arc::default(),
        }
    }

    /// Ends the daemon. Returns false if it is already ending.
    pub fn begin(&self, to: PathBuf) -> bool {
        let mut slot = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        if self.signals.is_closed() {
            return false;
        }
        *slot = Some(to);
        // Wakes the thread that waits for signals.
        self.signals.close();
        true
    }

    /// Returns the socket of the process that receives the handover.
    pub fn heir(&self) -> Option<PathBuf> {
        let slot = self.to.lock().unwrap_or_else(PoisonError::into_inner);
        slot.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn session(export: &str, channel: bool) -> HandedOver {
        let fd = || OwnedFd::from(UnixStream::pair().unwrap().0);
        HandedOver {
            export: export.to_owned(),
            stream: fd(),
            channel: channel.then(fd),
            messages: vec![(vec![1, 2, 3], vec![fd(), fd()]), (vec![4], Vec::new())],
        }
    }

    #[test]
    fn sessions_round_trip_in_any_descriptor_order() {
        let mut named = encode(vec![session("a", true), session("b", false)]).unwrap();
        assert!(named.iter().all(|(name, _)| is_handover(name)));
        assert_eq!(named.len(), 1 + 4 + 3);
        named.reverse();
        let fd = || OwnedFd::from(UnixStream::pair().unwrap().0);
        let sockets = Sockets {
            portals: vec![fd()],
            exports: vec![fd(), fd()],
            control: Some(Left {
                socket: fd(),
                is_passed: true,
            }),
            api: Some(fd()),
            metrics: None,
        };
        named.extend(sockets.named());
        assert!(named.iter().all(|(name, _)| is_handover(name)));
        let sockets = Sockets::take(&mut named);
        assert_eq!((sockets.portals.len(), sockets.exports.len()), (1, 2));
        assert!(sockets.control.is_some_and(|left| left.is_passed));
        assert!(sockets.api.is_some() && sockets.metrics.is_none());
        let sessions = decode(named).unwrap();
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
    }

    #[test]
    fn incomplete_or_newer_handover_is_refused_with_a_reason() {
        let mut named = encode(vec![session("a", true), session("b", true)]).unwrap();
        named.remove(0);
        let left = decode(named).unwrap();
        let left: Vec<&str> = left.iter().map(|one| one.export.as_str()).collect();
        assert_eq!(left, ["b"]);
        let mut named = encode(Vec::new()).unwrap();
        let mut file = std::fs::File::from(named.pop().unwrap().1);
        file.rewind().unwrap();
        file.write_all(br#"{"version":9,"sessions":[]}       "#)
            .unwrap();
        let other = vec![(STATE.to_owned(), file.into())];
        assert!(decode(other).err().unwrap().contains("version 9"));
        assert!(
            decode(Vec::new())
                .err()
                .unwrap()
                .contains("no state descriptor")
        );
        assert!(!is_handover("ram.handover") && !is_handover("handovers"));
    }
}

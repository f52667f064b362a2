//! Access control of the control socket, by the peer's credentials (SO_PEERCRED) and the configured groups.
//!
//! Root and the daemon's own user have all rights. Without groups, no other user can connect: the socket has mode 0600. With groups, every
//! user can connect, and the connection of a user in none of them is closed at once. Members of `control_group` may name the files that
//! [`super::allowed_paths`] permits. Membership is that of the peer's own group and of `/etc/group`.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::extract::{ConnectInfo, Request};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use reactor::RateLimit;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::ErrorResponse;
use config::{AccessConfig, account, user_name};

/// Most connections. Further ones wait. Each may carry a body of some megabytes.
const CONNECTIONS_MAX: usize = 512;
/// Most connections of readers. Further ones are closed, so that readers do not shut others out.
const READERS_MAX: usize = CONNECTIONS_MAX / 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Right {
    /// May only read.
    Read,
    /// May change everything, but name only files in `allow_paths`.
    Control,
    /// All rights: root and the daemon's own user.
    Administrator,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Peer {
    pub(super) right: Right,
    pub(super) origin: Origin,
}

/// Origin of a connection, for the log.
#[derive(Clone, Copy, Debug)]
pub(super) enum Origin {
    /// User of a client of the control socket.
    User(u32),
    /// Address of a client over TCP; `None` if the connection has ended.
    Address(Option<SocketAddr>),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::User(uid) => write!(f, "user {}", user_name(*uid)),
            Origin::Address(Some(address)) => address.fmt(f),
            Origin::Address(None) => f.write_str("unknown address"),
        }
    }
}

/// Limit of log lines about users that are not admitted.
static REFUSED_LOG: RateLimit = RateLimit::new(Duration::from_secs(10));

/// Returns true if the user is a member of the named group.
fn is_member(users: &str, groups: &str, (uid, gid): (u32, u32), group: &str) -> bool {
    let Some(group) = account(groups, 0, group) else {
        return false;
    };
    if group[2] == gid.to_string() {
        return true;
    }
    let Some(user) = account(users, 2, &uid.to_string()) else {
        return false;
    };
    group[3].split(',').any(|member| member.trim() == user[0])
}

fn right(access: &AccessConfig, uid: u32, gid: u32) -> Option<Right> {
    if uid == 0 || uid == rustix::process::geteuid().as_raw() {
        return Some(Right::Administrator);
    }
    if !access.has_groups() {
        return None;
    }
    // Read for each connection, because a member may have been removed.
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let (users, groups) = (read("/etc/passwd"), read("/etc/group"));
    let is_in = |group: &Option<String>| {
        let group = group.as_ref();
        group.is_some_and(|group| is_member(&users, &groups, (uid, gid), group))
    };
    if is_in(&access.control_group) {
        Some(Right::Control)
    } else if is_in(&access.control_readers) {
        Some(Right::Read)
    } else {
        None
    }
}

/// Warns about missing groups. They admit no user, and rejected clients get no reason.
fn warn_of_unknown(access: &AccessConfig) {
    let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let named = [
        ("control_group", &access.control_group),
        ("control_readers", &access.control_readers),
    ];
    for (key, group) in named {
        if let Some(group) = group
            && account(&groups, 0, group).is_none()
        {
            tracing::warn!(
                "{key}: /etc/group has no group `{group}`, so this key admits no client"
            );
        }
    }
}

/// Accepts connections of permitted users.
pub(super) struct Guarded {
    listener: UnixListener,
    access: AccessConfig,
    room: Arc<Semaphore>,
    readers: Arc<Semaphore>,
}

impl Guarded {
    pub fn new(listener: UnixListener, access: AccessConfig) -> Guarded {
        warn_of_unknown(&access);
        Guarded {
            listener,
            access,
            room: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            readers: Arc::new(Semaphore::new(READERS_MAX)),
        }
    }

    pub async fn accept(&self) -> (Conversation, Peer) {
        loop {
            let Ok(room) = Arc::clone(&self.room).acquire_owned().await else {
                // The semaphore is never closed.
                std::future::pending::<()>().await;
                continue;
            };
            let accepted = self.listener.accept().await;
            let peer = accepted.and_then(|(stream, _)| {
                let credentials = stream.peer_cred()?;
                let right = right(&self.access, credentials.uid(), credentials.gid());
                Ok((stream, credentials.uid(), right))
            });
            match peer {
                Ok((stream, uid, Some(right))) => {
                    let reader = match right {
                        Right::Control | Right::Administrator => None,
                        Right::Read => match Arc::clone(&self.readers).try_acquire_owned() {
                            Ok(place) => Some(place),
                            Err(_) => {
                                tracing::debug!(
                                    user = %user_name(uid),
                                    "control socket: too many read-only connections"
                                );
                                continue;
                            }
                        },
                    };
                    let conversation = Conversation {
                        stream,
                        _room: room,
                        _reader: reader,
                    };
                    let origin = Origin::User(uid);
                    return (conversation, Peer { right, origin });
                }
                Ok((_, uid, None)) => {
                    if let Some(suppressed) = REFUSED_LOG.pass() {
                        tracing::warn!(
                            user = %user_name(uid),
                            suppressed,
                            "control socket: user not admitted; hint: control_group and control_readers name the groups with access"
                        );
                    }
                }
                Err(error) => {
                    tracing::debug!("control socket: cannot accept a connection: {error}");
                    // The error may be a lack of descriptors.
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        }
    }
}

/// Refuses changes by readers, and logs all changes.
pub(super) async fn check(
    ConnectInfo(peer): ConnectInfo<Peer>,
    request: Request,
    next: Next,
) -> Response {
    if matches!(*request.method(), Method::GET | Method::HEAD) {
        return next.run(request).await;
    }
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let response = match peer.right {
        Right::Read => {
            let detail = "this client may only read";
            ErrorResponse::new(StatusCode::FORBIDDEN, detail).into_response()
        }
        Right::Control | Right::Administrator => next.run(request).await,
    };
    let status = response.status().as_u16();
    tracing::info!(%method, path, peer = %peer.origin, status, "API request for a change");
    response
}

/// A connection and its place among [`CONNECTIONS_MAX`].
pub(super) struct Conversation {
    stream: UnixStream,
    _room: OwnedSemaphorePermit,
    /// Place among [`READERS_MAX`].
    _reader: Option<OwnedSemaphorePermit>,
}

impl AsyncRead for Conversation {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Conversation {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USERS: &str =
        "root:x:0:0::/root:/bin/sh\nann:x:1000:1000::/:/bin/sh\nbob:x:1001:1001::/:\n";
    const GROUPS: &str = "root:x:0:\nann:x:1000:\ndisks:x:500:bob,carl\nempty:x:501:\n";

    #[test]
    fn members_are_those_of_the_own_group_and_of_the_list() {
        let is_in = |who, group| is_member(USERS, GROUPS, who, group);
        assert!(is_in((1001, 1001), "disks"));
        assert!(is_in((1000, 500), "disks"));
        assert!(!is_in((1000, 1000), "disks"));
        assert!(!is_in((1001, 1001), "empty"));
        assert!(!is_in((1001, 1001), "nothing"));
        assert!(!is_in((7, 7), "disks"), "an unknown user");
    }

    #[test]
    fn without_groups_only_root_and_the_own_user_may_ask() {
        let none = AccessConfig::default();
        assert_eq!(right(&none, 0, 0), Some(Right::Administrator));
        let own = rustix::process::geteuid().as_raw();
        assert_eq!(right(&none, own, 12345), Some(Right::Administrator));
        assert_eq!(right(&none, own + 54321, 12345), None);
        let some = AccessConfig {
            control_group: Some("no-such-group".to_owned()),
            control_readers: Some("root".to_owned()),
            ..AccessConfig::default()
        };
        assert_eq!(right(&some, own + 54321, 12345), None);
        assert_eq!(right(&some, own + 54321, 0), Some(Right::Read));
    }
}

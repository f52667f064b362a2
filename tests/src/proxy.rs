//! A TCP connection that goes wrong: what stands between an initiator and a target in tests of recovery.

use anyhow::Result;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// What is done to connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harm {
    /// Both sides see a reset.
    Reset,
    /// A byte is flipped in what comes next, in the one direction or the other.
    Flip,
    /// What comes next is cut off in the middle, then the connection is closed.
    Half,
    /// Nothing comes through any more, in both directions; the connection stays.
    Silence,
}

const NONE: u8 = 0;
const FLIP: u8 = 1;
const HALF: u8 = 2;

/// Both ends of a connection, and whether it is silent.
type Ends = (TcpStream, TcpStream, Arc<AtomicBool>);

#[derive(Default)]
struct State {
    streams: Mutex<Vec<Ends>>,
    next: AtomicU8,
    stop: AtomicBool,
}

impl State {
    fn streams(&self) -> std::sync::MutexGuard<'_, Vec<Ends>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reset_all(&self) {
        for (near, far, _) in self.streams().drain(..) {
            for stream in [near, far] {
                // With no time to linger a close is a reset. Fails where the connection is over.
                rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).ok();
                stream.shutdown(Shutdown::Both).ok();
            }
        }
    }
}

/// Passes connections on to one address.
pub struct Proxy {
    address: SocketAddr,
    state: Arc<State>,
}

impl Proxy {
    /// In front of `to`.
    pub fn start(to: SocketAddr) -> Result<Proxy> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for near in listener.incoming() {
                if shared.stop.load(Ordering::Relaxed) {
                    return;
                }
                // A target that is not there refuses, and so does this.
                let (Ok(near), Ok(far)) = (near, TcpStream::connect(to)) else {
                    continue;
                };
                if pass(&shared, near, far).is_err() {
                    return;
                }
            }
        });
        Ok(Proxy { address, state })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Does harm to the connections that there are.
    pub fn harm(&self, harm: Harm) {
        match harm {
            Harm::Reset => self.state.reset_all(),
            Harm::Flip => self.state.next.store(FLIP, Ordering::Relaxed),
            Harm::Silence => {
                for (_, _, is_silent) in self.state.streams().iter() {
                    is_silent.store(true, Ordering::Relaxed);
                }
            }
            Harm::Half => self.state.next.store(HALF, Ordering::Relaxed),
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Relaxed);
        self.state.reset_all();
        // Wakes the thread that accepts.
        TcpStream::connect(self.address).ok();
    }
}

fn pass(state: &Arc<State>, near: TcpStream, far: TcpStream) -> Result<()> {
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let is_silent = Arc::new(AtomicBool::new(false));
    let ends = (near.try_clone()?, far.try_clone()?, Arc::clone(&is_silent));
    state.streams().push(ends);
    let ways = [
        (near.try_clone()?, far.try_clone()?),
        (far.try_clone()?, near.try_clone()?),
    ];
    for (from, to) in ways {
        let (state, is_silent) = (Arc::clone(state), Arc::clone(&is_silent));
        std::thread::spawn(move || copy(&state, &is_silent, from, to));
    }
    Ok(())
}

fn copy(state: &State, is_silent: &AtomicBool, mut from: TcpStream, mut to: TcpStream) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let read = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        if is_silent.load(Ordering::Relaxed) {
            continue;
        }
        let bytes = &mut buffer[..read];
        // Not into logins, which have no digests: those are shorter than a command with data.
        let next = match read > 1024 {
            true => state.next.swap(NONE, Ordering::Relaxed),
            false => NONE,
        };
        let length = if next == HALF { read / 2 } else { read };
        if next == FLIP {
            bytes[read / 2] ^= 0x10;
        }
        if to.write_all(&bytes[..length]).is_err() || next == HALF {
            break;
        }
    }
    // The other side may have gone already.
    from.shutdown(Shutdown::Both).ok();
    to.shutdown(Shutdown::Both).ok();
}

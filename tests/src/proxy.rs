//! A TCP proxy between an initiator and a target that injects connection faults.

use anyhow::Result;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A fault to inject.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harm {
    /// Resets both sides of all connections.
    Reset,
    /// Flips one byte of the next data, in either direction.
    Flip,
    /// Truncates the next data in the middle and closes the connection.
    Half,
    /// Drops all data in both directions and keeps the connection open.
    Silence,
}

const NONE: u8 = 0;
const FLIP: u8 = 1;
const HALF: u8 = 2;

/// Both ends of a connection, and whether it drops all data.
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
                // With a linger time of zero, close sends a reset. Fails if the connection has already ended.
                rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).ok();
                stream.shutdown(Shutdown::Both).ok();
            }
        }
    }
}

/// Forwards connections to one address.
pub struct Proxy {
    address: SocketAddr,
    state: Arc<State>,
}

impl Proxy {
    /// Starts a proxy for `to`.
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
                // Closes the connection if the target refuses it.
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

    /// Listening address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Injects a fault into the current connections.
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
        // Wakes the accepting thread.
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
        // Login PDUs have no digests and must stay intact. They are shorter than a command with data.
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
    // Fails if the peer has already closed.
    from.shutdown(Shutdown::Both).ok();
    to.shutdown(Shutdown::Both).ok();
}

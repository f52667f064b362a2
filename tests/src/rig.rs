//! The daemon and the temporary folders of one test.

use crate::{Daemon, DaemonBuilder, Scratch};
use anyhow::{Result, bail, ensure};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use vm::{Guest, wait_until};

/// Ports for [`free_portal`].
const PORTS: std::ops::Range<u16> = 20_000..32_000;

static TURN: Mutex<()> = Mutex::new(());

/// A daemon, its temporary folders, and the lock for exclusive use of the machine.
pub struct Rig {
    /// Stopped first.
    pub daemon: Daemon,
    /// Removed after the daemon stopped.
    pub scratch: Scratch,
    /// `None` if another rig of the test holds the lock.
    _turn: Option<MutexGuard<'static, ()>>,
}

impl Rig {
    /// Starts the daemon that `describe` configures.
    pub fn new(describe: impl FnOnce(DaemonBuilder) -> DaemonBuilder) -> Result<Rig> {
        Rig::prepared(|_, builder| Ok(describe(builder)))
    }

    /// Like [`Rig::new`], but `describe` can also create files before the start.
    pub fn prepared(
        describe: impl FnOnce(&Scratch, DaemonBuilder) -> Result<DaemonBuilder>,
    ) -> Result<Rig> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let scratch = Scratch::new()?;
        let daemon = describe(&scratch, DaemonBuilder::new(&scratch))?.start()?;
        Ok(Rig {
            daemon,
            scratch,
            _turn: Some(turn),
        })
    }

    /// Starts another daemon with its own folders. Drop it before this one.
    pub fn beside(&self, describe: impl FnOnce(DaemonBuilder) -> DaemonBuilder) -> Result<Rig> {
        let scratch = Scratch::new()?;
        let daemon = describe(DaemonBuilder::new(&scratch)).start()?;
        Ok(Rig {
            daemon,
            scratch,
            _turn: None,
        })
    }

    /// Returns the socket path of an export.
    pub fn socket(&self, export: &str) -> PathBuf {
        self.scratch.socket(&format!("{export}.sock"))
    }

    /// Waits for the portal of an iSCSI target in the log. The last matching line counts.
    pub fn iscsi_portal(&mut self, target: &str) -> Result<String> {
        let announced = format!("ready iscsi {target} ");
        let process = self.daemon.process();
        let portal = wait_until(Duration::from_secs(60), || {
            let log = process.log();
            let line = log
                .lines()
                .rev()
                .find_map(|line| line.strip_prefix(&announced));
            match (line, process.check_running()) {
                (Some(portal), _) => Some(Ok(portal.trim().to_owned())),
                (None, Err(error)) => Some(Err(error)),
                (None, Ok(())) => None,
            }
        });
        portal.unwrap_or_else(|| bail!("no iSCSI portal:\n{}", self.daemon.process().log_tail()))
    }

    /// Returns the allocated bytes of a disk's file on the host.
    pub fn allocated(&self, file: &str) -> Result<u64> {
        // st_blocks counts units of 512 bytes, independent of the file system's block size: stat(3type).
        Ok(std::fs::metadata(self.scratch.file(file))?.blocks() * 512)
    }
}

/// Returns an unused portal, for a daemon that must restart on the same address. Its port is below those that Linux assigns to sockets
/// without one (`ip_local_port_range`), so no other socket gets it in between. Processes begin at different ports.
pub fn free_portal() -> Result<SocketAddr> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    for _ in 0..PORTS.len() {
        let number = std::process::id() * 61 + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = PORTS.start + u16::try_from(number % u32::from(PORTS.end - PORTS.start))?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        if TcpListener::bind(address).is_ok() {
            return Ok(address);
        }
    }
    bail!("no free port in {PORTS:?}")
}

/// Fails if the guest's kernel logged an I/O error, a hung task or a similar problem.
pub fn kernel_is_content(guest: &mut Guest) -> Result<()> {
    const COMPLAINTS: &str = "I/O error|critical|blocked for more|Call Trace|BUG:|WARNING:|Sense Key|timed out|abort|host reset|bus reset|EXT4-fs error|Buffer I/O";
    let output = guest.run(&format!("dmesg | grep -B 4 -A 8 -E '{COMPLAINTS}'"))?;
    ensure!(
        output.stdout.is_empty(),
        "the guest's kernel complains:\n{}",
        output.stdout
    );
    Ok(())
}

/// Reads a block layer attribute: a file below `/sys/block/<disk>`.
pub fn attribute(guest: &mut Guest, disk: &str, name: &str) -> Result<String> {
    Ok(guest
        .ok(&format!("cat /sys/block/{disk}/{name}"))?
        .trim()
        .to_owned())
}

/// Reads a block layer attribute as a number.
pub fn number(guest: &mut Guest, disk: &str, name: &str) -> Result<u64> {
    Ok(attribute(guest, disk, name)?.parse()?)
}

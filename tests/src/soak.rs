//! A verifying load in a guest.

use crate::{Guest, Result, bail, ensure};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use vm::{Output, Running};

/// Time limit for the first I/O, and for the last verification of all blocks.
const LIMIT: Duration = Duration::from_secs(240);

/// Writes random blocks and verifies them until [`Soak::finish`].
pub struct Soak {
    running: Running,
    /// The load ends when this file of the guest is removed.
    file: String,
}

impl Soak {
    /// Starts `guest-agent soak` with these options and waits for its first I/O.
    pub fn start(guest: &mut Guest, options: &str) -> Result<Soak> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let file = format!("/tmp/soak{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let running = guest.start(&format!("guest-agent soak --while {file} {options}"))?;
        let begin = Instant::now();
        while guest.run(&format!("test -e {file}"))?.code != 0 {
            if let Some(ended) = guest.poll(running)? {
                bail!("the load has ended: {ended:?}");
            }
            ensure!(begin.elapsed() < LIMIT, "the load does not begin");
        }
        Ok(Soak { running, file })
    }

    /// Ends the load, which verifies all blocks. Fails if an I/O failed or data were wrong.
    pub fn finish(self, guest: &mut Guest) -> Result<()> {
        let ended = self.end(guest)?;
        let is_right = ended.code == 0 && ended.stdout.contains("\"mismatches\":0");
        ensure!(is_right, "{ended:?}");
        Ok(())
    }

    /// Ends the load and returns its report.
    pub fn end(self, guest: &mut Guest) -> Result<Output> {
        guest.ok(&format!("rm {}", self.file))?;
        guest.wait(self.running, LIMIT)
    }
}

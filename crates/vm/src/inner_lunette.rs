//! Lunette in a guest, beside what only a guest has.

use crate::guest::Guest;
use anyhow::Result;

/// Where it listens for commands.
const CONTROL: &str = "/tmp/control.sock";

impl Guest {
    /// Starts `lunette serve` with these options in a guest that was built with [`crate::GuestBuilder::lunette`], and waits for it.
    pub fn start_lunette(&mut self, config: &str, options: &str) -> Result<()> {
        self.ok("set -e
            ip link set lo up
            ip link set eth0 up
            ip addr add 10.0.2.15/24 dev eth0")?;
        self.ok(&format!("cat >/tmp/lunette.toml <<'END'\n{config}\nEND"))?;
        self.ok(&format!(
            "lunette serve --config /tmp/lunette.toml --control {CONTROL} {options} >/tmp/lunette.log 2>&1 &
            for _ in $(seq 300); do
                lunette status --socket {CONTROL} >/dev/null 2>&1 && exit 0
                sleep 0.1
            done
            cat /tmp/lunette.log
            exit 1"
        ))?;
        Ok(())
    }
}

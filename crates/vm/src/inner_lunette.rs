//! Lunette in a guest.

use crate::guest::Guest;
use anyhow::Result;

const CONTROL: &str = "/tmp/control.sock";

impl Guest {
    /// Configures the network card: address with prefix length, and MTU.
    pub fn join_network(&mut self, address: &str, mtu: u16) -> Result<()> {
        self.ok(&format!(
            "set -e
            ip link set lo up
            ip link set eth0 mtu {mtu} up
            ip addr add {address} dev eth0
            [ $(cat /sys/class/net/eth0/mtu) = {mtu} ]"
        ))?;
        Ok(())
    }

    /// Starts `lunette serve` with this configuration and waits for it. Requires [`crate::GuestBuilder::lunette`].
    pub fn start_lunette(&mut self, config: &str, options: &str) -> Result<()> {
        self.join_network("10.0.2.15/24", 1500)?;
        self.ok(&format!("cat >/tmp/lunette.toml <<'END'\n{config}\nEND"))?;
        self.serve_lunette(&format!("--config /tmp/lunette.toml {options}"))
    }

    /// Starts `lunette serve` with these options and waits for it.
    pub fn serve_lunette(&mut self, options: &str) -> Result<()> {
        self.ok(&format!(
            "lunette serve --control {CONTROL} {options} >/tmp/lunette.log 2>&1 &
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

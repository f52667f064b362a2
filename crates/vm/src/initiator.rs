//! Linux's iSCSI initiator in a guest: open-iscsi, over QEMU's user network.

use crate::guest::Guest;
use crate::initramfs::INITIATOR_NAME;
use anyhow::{Context, Result};
use std::net::SocketAddr;
use std::time::Duration;

/// Timeout of a login, which includes the scans of the kernel and udev.
const LOGIN_LIMIT: Duration = Duration::from_secs(240);

/// A target as seen by the guest.
pub struct RemoteTarget {
    target: String,
    portal: String,
}

impl Guest {
    /// Name of the initiator.
    pub const INITIATOR_NAME: &str = INITIATOR_NAME;

    /// Configures the network and starts `iscsid`. Requires [`crate::GuestBuilder::initiator`].
    pub fn start_initiator(&mut self) -> Result<()> {
        self.ok(
            "ip link set lo up && ip link set eth0 up && ip addr add 10.0.2.15/24 dev eth0 && /tools/iscsid",
        )?;
        Ok(())
    }

    /// Discovers the targets at a portal on the host's loopback. Returns the output of `iscsiadm`.
    pub fn discover(&mut self, portal: SocketAddr) -> Result<String> {
        let portal = from_inside(portal);
        // A new iscsid may not listen yet.
        self.ok(&format!(
            "n=0; until /tools/iscsiadm -m discovery -t sendtargets -p {portal} 2>/tmp/said; do n=$((n+1)); [ $n -lt 20 ] || {{ cat /tmp/said >&2; exit 1; }}; sleep 0.5; done"
        ))
    }

    /// Logs in to a target at a portal on the host's loopback, after changing these node settings.
    pub fn iscsi_login(
        &mut self,
        portal: SocketAddr,
        target: &str,
        settings: &[(&str, &str)],
    ) -> Result<RemoteTarget> {
        let remote = RemoteTarget {
            target: target.to_owned(),
            portal: from_inside(portal),
        };
        self.node(&remote, "-o new")?;
        for (name, value) in settings {
            self.node(&remote, &format!("-o update -n {name} -v {value}"))?;
        }
        self.node(&remote, "--login")
            .with_context(|| format!("logging in to {target} at {}", remote.portal))?;
        Ok(remote)
    }

    /// Logs out.
    pub fn iscsi_logout(&mut self, remote: &RemoteTarget) -> Result<()> {
        self.node(remote, "--logout")
    }

    /// Returns the report of `iscsiadm` about sessions, disks and negotiated parameters.
    pub fn iscsi_sessions(&mut self) -> Result<String> {
        self.ok("/tools/iscsiadm -m session -P 3")
    }

    fn node(&mut self, remote: &RemoteTarget, what: &str) -> Result<()> {
        let RemoteTarget { target, portal } = remote;
        self.ok_within(
            LOGIN_LIMIT,
            &format!("/tools/iscsiadm -m node -T {target} -p {portal} {what}"),
        )?;
        Ok(())
    }
}

/// Returns the address of the host's loopback in QEMU's user network.
fn from_inside(portal: SocketAddr) -> String {
    format!("10.0.2.2:{}", portal.port())
}

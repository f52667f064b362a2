//! Linux's own iSCSI initiator in a guest: open-iscsi, over QEMU's user network.

use crate::guest::Guest;
use crate::initramfs::INITIATOR_NAME;
use anyhow::{Context, Result};
use std::net::SocketAddr;
use std::time::Duration;

/// A log-in waits for udev's and the kernel's scan.
const LOGIN_LIMIT: Duration = Duration::from_secs(240);

/// A target, as the guest sees it.
pub struct RemoteTarget {
    target: String,
    portal: String,
}

impl Guest {
    /// The initiator's name.
    pub const INITIATOR_NAME: &str = INITIATOR_NAME;

    /// Brings the network up and starts `iscsid`. The guest was built with [`crate::GuestBuilder::initiator`].
    pub fn start_initiator(&mut self) -> Result<()> {
        self.ok(
            "ip link set lo up && ip link set eth0 up && ip addr add 10.0.2.15/24 dev eth0 && /tools/iscsid",
        )?;
        Ok(())
    }

    /// Discovers the targets at a portal on the host's loopback; gives what `iscsiadm` prints.
    pub fn discover(&mut self, portal: SocketAddr) -> Result<String> {
        let portal = from_inside(portal);
        // A new iscsid may not listen yet.
        self.ok(&format!(
            "n=0; until /tools/iscsiadm -m discovery -t sendtargets -p {portal} 2>/tmp/said; do n=$((n+1)); [ $n -lt 20 ] || {{ cat /tmp/said >&2; exit 1; }}; sleep 0.5; done"
        ))
    }

    /// Logs in to a target at a portal on the host's loopback, with these settings of the node changed before.
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

    /// Logs out of it.
    pub fn iscsi_logout(&mut self, remote: &RemoteTarget) -> Result<()> {
        self.node(remote, "--logout")
    }

    /// What `iscsiadm` says of its sessions, disks and negotiated parameters.
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

/// The host's loopback, as QEMU's user network shows it.
fn from_inside(portal: SocketAddr) -> String {
    format!("10.0.2.2:{}", portal.port())
}

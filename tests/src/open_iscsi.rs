//! Linux's iSCSI initiator in a guest: open-iscsi, over QEMU's user network.

use std::net::SocketAddr;
use std::time::Duration;

use vm::Guest;

use crate::{Context, Result};

/// Timeout of a login, which includes the scans of the kernel and udev.
const LOGIN_LIMIT: Duration = Duration::from_secs(240);

/// A target as seen by the guest.
pub struct Remote {
    target: String,
    portal: String,
}

/// Configures the network and starts `iscsid`. Requires [`GuestBuilder::initiator`](vm::GuestBuilder::initiator).
pub fn start(guest: &mut Guest) -> Result<()> {
    guest.ok(
        "ip link set lo up && ip link set eth0 up && ip addr add 10.0.2.15/24 dev eth0 && /tools/iscsid",
    )?;
    Ok(())
}

/// Discovers the targets at a portal on the host's loopback. Returns the output of `iscsiadm`.
pub fn discover(guest: &mut Guest, portal: SocketAddr) -> Result<String> {
    let portal = from_inside(portal);
    // A new iscsid may not listen yet.
    guest.ok(&format!(
        "n=0; until /tools/iscsiadm -m discovery -t sendtargets -p {portal} 2>/tmp/errors; do n=$((n+1)); [ $n -lt 20 ] || {{ cat /tmp/errors >&2; exit 1; }}; sleep 0.5; done"
    ))
}

/// Logs in to a target at a portal on the host's loopback, after changing these node settings.
pub fn login(
    guest: &mut Guest,
    portal: SocketAddr,
    target: &str,
    settings: &[(&str, &str)],
) -> Result<Remote> {
    let remote = Remote {
        target: target.to_owned(),
        portal: from_inside(portal),
    };
    node(guest, &remote, "-o new")?;
    for (name, value) in settings {
        node(guest, &remote, &format!("-o update -n {name} -v {value}"))?;
    }
    node(guest, &remote, "--login")
        .with_context(|| format!("logging in to {target} at {}", remote.portal))?;
    Ok(remote)
}

/// Logs out.
pub fn logout(guest: &mut Guest, remote: &Remote) -> Result<()> {
    node(guest, remote, "--logout")
}

/// Returns the report of `iscsiadm` about sessions, disks and negotiated parameters.
pub fn sessions(guest: &mut Guest) -> Result<String> {
    guest.ok("/tools/iscsiadm -m session -P 3")
}

fn node(guest: &mut Guest, remote: &Remote, options: &str) -> Result<()> {
    let Remote { target, portal } = remote;
    guest.run_within_limit(
        LOGIN_LIMIT,
        &format!("/tools/iscsiadm -m node -T {target} -p {portal} {options}"),
    )?;
    Ok(())
}

/// Returns the address of the host's loopback in QEMU's user network.
fn from_inside(portal: SocketAddr) -> String {
    format!("10.0.2.2:{}", portal.port())
}

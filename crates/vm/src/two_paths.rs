//! Two sessions of Linux's iSCSI initiator in a guest, combined by dm-multipath.

use crate::guest::Guest;
use anyhow::{Context, Result};
use std::time::Duration;

/// Timeout of both logins, which include scans of the kernel.
const LOGIN_LIMIT: Duration = Duration::from_secs(240);

/// Disks of two sessions.
pub struct TwoPaths {
    /// Disk of the first session.
    pub first: String,
    /// The map, which uses both sessions at the same time.
    pub map: String,
}

impl Guest {
    /// Logs in to `target` at two portals, with these settings of open-iscsi. Requires [`crate::GuestBuilder::paths_on_cable`] and a network.
    pub fn two_paths(
        &mut self,
        target: &str,
        portals: [&str; 2],
        settings: &[(&str, &str)],
    ) -> Result<TwoPaths> {
        let settings: String = settings
            .iter()
            .map(|(name, value)| format!("$node -p $portal -o update -n {name} -v {value}\n"))
            .collect();
        let [one, other] = portals;
        let login = format!(
            "set -e
            /tools/iscsid
            node='/tools/iscsiadm -m node -T {target}'
            for portal in {one} {other}; do
                $node -p $portal -o new
                {settings}
                n=0
                # A new iscsid may not listen yet.
                until $node -p $portal --login 2>/tmp/errors; do
                    n=$((n + 1))
                    [ $n -lt 20 ] || {{ cat /tmp/errors >&2; exit 1; }}
                    sleep 0.5
                done
            done"
        );
        self.run_within_limit(LOGIN_LIMIT, &login)?;
        self.wait_for_disks(&["sda", "sdb"])?;
        // multipath accepts only disks in udev's database. The default policy uses one path at a time.
        let map = self.ok(
            "set -e
            sed -i 's/^defaults {/defaults {\\n    path_grouping_policy multibus/' /etc/multipath.conf
            mkdir -p /run/udev/data /var/lib /etc/multipath
            for disk in /sys/block/sd*; do echo I:1 >/run/udev/data/b$(cat $disk/dev); done
            /tools/multipath -v3 >/tmp/multipath.log 2>&1 || true
            name=$(/tools/dmsetup table --target multipath | sed -n 's/: .*//p')
            [ -n \"$name\" ] || { cat /tmp/multipath.log >&2; exit 1; }
            echo /dev/$(/tools/dmsetup info -c --noheadings -o blkdevname $name)",
        );
        let map = map.context("dm-multipath has no map of both sessions")?;
        Ok(TwoPaths {
            first: "/dev/sda".to_owned(),
            map: map.trim().to_owned(),
        })
    }
}

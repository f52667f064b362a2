//! tgt, an iSCSI target in user space, in a guest.

use crate::guest::Guest;
use anyhow::Result;

impl Guest {
    /// Serves a file of `mib` MiB in memory as LUN 1 of `target` to any initiator at port 3260 of all addresses, with login parameters such
    /// as `MaxConnections`. LUN 0 is tgt's controller. Requires [`crate::GuestBuilder::tgt_on_cable`] and a network.
    pub fn serve_tgt(&mut self, target: &str, mib: u32, parameters: &[(&str, &str)]) -> Result<()> {
        let parameters: String = parameters
            .iter()
            .map(|(name, value)| {
                format!("$adm --op update --mode target --tid 1 --name {name} --value {value}\n")
            })
            .collect();
        self.ok(&format!(
            "set -e
            mkdir -p /var/run
            truncate -s {mib}M /tmp/disk
            /tools/tgtd >/tmp/tgtd.log 2>&1
            adm='/tools/tgtadm --lld iscsi'
            for _ in $(seq 300); do
                $adm --op show --mode sys >/dev/null 2>&1 && break
                sleep 0.1
            done
            $adm --op new --mode target --tid 1 -T {target}
            $adm --op new --mode logicalunit --tid 1 --lun 1 -b /tmp/disk
            {parameters}
            $adm --op bind --mode target --tid 1 -I ALL"
        ))?;
        Ok(())
    }
}

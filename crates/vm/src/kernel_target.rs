//! Linux's iSCSI target (LIO) in a guest, configured in configfs like targetcli does.

use crate::guest::Guest;
use anyhow::Result;

/// The target's first RAM disk in configfs.
pub const DISK: &str = "/sys/kernel/config/target/core/rd_mcp_0/disk";
/// iSCSI targets in configfs.
pub const ISCSI: &str = "/sys/kernel/config/target/iscsi";

impl Guest {
    /// Serves a RAM disk of `mib` MiB as LUN 0 of `target` to any initiator at port 3260 of all addresses, with an error recovery level and
    /// other login parameters such as `MaxConnections`. Requires [`crate::GuestBuilder::target`] and a network.
    pub fn serve_kernel_target(
        &mut self,
        target: &str,
        mib: u32,
        level: u8,
        parameters: &[(&str, &str)],
    ) -> Result<()> {
        let pages = mib * 256;
        let parameters: String = parameters
            .iter()
            .map(|(name, value)| format!("echo {value} >$tpg/param/{name}\n"))
            .collect();
        self.ok(&format!(
            "set -e
            mount -t configfs configfs /sys/kernel/config
            disk={DISK}
            mkdir -p $disk
            echo rd_pages={pages} >$disk/control
            echo 1 >$disk/enable
            echo 5b3a0001 >$disk/wwn/vpd_unit_serial
            tpg={ISCSI}/{target}/tpgt_1
            mkdir -p $tpg/lun/lun_0
            ln -s $disk $tpg/lun/lun_0/disk
            mkdir -p $tpg/np/0.0.0.0:3260
            echo 0 >$tpg/attrib/authentication
            echo 1 >$tpg/attrib/generate_node_acls
            echo 1 >$tpg/attrib/cache_dynamic_acls
            echo 0 >$tpg/attrib/demo_mode_write_protect
            echo {level} >$tpg/attrib/default_erl
            {parameters}
            echo 1 >$tpg/enable"
        ))?;
        Ok(())
    }

    /// Adds an initiator that may take 60 s to send the data of a write, instead of 3 s. With many requests in flight, emulated guests need
    /// longer than 3 s, and LIO then closes the connection.
    pub fn allow_slow_initiator(&mut self, target: &str, initiator: &str) -> Result<()> {
        self.ok(&format!(
            "set -e
            tpg={ISCSI}/{target}/tpgt_1
            mkdir -p $tpg/acls/{initiator}/lun_0
            ln -s $tpg/lun/lun_0 $tpg/acls/{initiator}/lun_0/lun
            echo 60 >$tpg/acls/{initiator}/attrib/dataout_timeout"
        ))?;
        Ok(())
    }
}

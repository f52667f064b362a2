//! Linux's own iSCSI target in a guest, LIO, over QEMU's user network: set up in configfs, as targetcli does.

use crate::guest::Guest;
use anyhow::Result;

impl Guest {
    /// Serves a RAM disk of so many MiB as LUN 0 to any initiator, at an error recovery level and with these other parameters of the
    /// login (`MaxConnections`). The guest was built with [`crate::GuestBuilder::target`].
    pub fn start_target(
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
            ip link set lo up
            ip link set eth0 up
            ip addr add 10.0.2.15/24 dev eth0
            mount -t configfs configfs /sys/kernel/config
            disk=/sys/kernel/config/target/core/rd_mcp_0/disk
            mkdir -p $disk
            echo rd_pages={pages} >$disk/control
            echo 1 >$disk/enable
            echo 5b3a0001 >$disk/wwn/vpd_unit_serial
            tpg=/sys/kernel/config/target/iscsi/{target}/tpgt_1
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
}

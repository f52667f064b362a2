//! Linux's iSCSI target (LIO) in a guest, over QEMU's user network, configured in configfs like targetcli does.

use vm::Guest;

use crate::Result;

const DISK: &str = "/sys/kernel/config/target/core/rd_mcp_0/disk";
const ISCSI: &str = "/sys/kernel/config/target/iscsi";

/// Serves a RAM disk of `mib` MiB as LUN 0 to any initiator, with an error recovery level and other login parameters
/// (`MaxConnections`). Requires [`GuestBuilder::target`](vm::GuestBuilder::target).
pub fn start_target(
    guest: &mut Guest,
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
    guest.ok(&format!(
        "set -e
        ip link set lo up
        ip link set eth0 up
        ip addr add 10.0.2.15/24 dev eth0
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

/// Adds a second target portal group at port 3261. Its port is in a separate ALUA group, so the unit has two paths. See
/// [`set_access_state`].
pub fn add_target_path(guest: &mut Guest, target: &str) -> Result<()> {
    guest.ok(&format!(
        "set -e
        disk={DISK}
        iscsi={ISCSI}/{target}
        mkdir -p $iscsi/tpgt_2/lun/lun_0
        ln -s $disk $iscsi/tpgt_2/lun/lun_0/disk
        mkdir -p $iscsi/tpgt_2/np/0.0.0.0:3261
        echo 0 >$iscsi/tpgt_2/attrib/authentication
        echo 1 >$iscsi/tpgt_2/attrib/generate_node_acls
        echo 1 >$iscsi/tpgt_2/attrib/cache_dynamic_acls
        echo 0 >$iscsi/tpgt_2/attrib/demo_mode_write_protect
        echo 1 >$iscsi/tpgt_2/enable
        for group in 1 2; do
            mkdir $disk/alua/group$group
            echo $group >$disk/alua/group$group/tg_pt_gp_id
            echo group$group >$iscsi/tpgt_$group/lun/lun_0/alua_tg_pt_gp
        done"
    ))?;
    Ok(())
}

/// Sets the asymmetric access state of path 1 or 2: 0 optimized, 1 non-optimized, 2 standby (SPC-4, 5.11.2).
pub fn set_access_state(guest: &mut Guest, path: u8, state: u8) -> Result<()> {
    guest.ok(&format!(
        "echo {state} >{DISK}/alua/group{path}/alua_access_state"
    ))?;
    Ok(())
}

/// Returns true if the path has a session.
pub fn path_has_session(guest: &mut Guest, target: &str, path: u8) -> Result<bool> {
    let sessions = guest.ok(&format!(
        "cat {ISCSI}/{target}/tpgt_{path}/dynamic_sessions"
    ))?;
    Ok(!sessions.trim_matches(['\0', '\n', ' ']).is_empty())
}

//! Linux's iSCSI target (LIO) in a guest, over QEMU's user network: paths and access states.

use vm::Guest;
use vm::kernel_target::{DISK, ISCSI};

use crate::Result;

/// Serves a RAM disk of `mib` MiB, see [`Guest::serve_kernel_target`]. Requires [`GuestBuilder::target`](vm::GuestBuilder::target).
pub fn start_target(
    guest: &mut Guest,
    target: &str,
    mib: u32,
    level: u8,
    parameters: &[(&str, &str)],
) -> Result<()> {
    guest.join_network("10.0.2.15/24", 1500)?;
    guest.serve_kernel_target(target, mib, level, parameters)
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

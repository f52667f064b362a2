//! INQUIRY: standard data (SPC-5, 6.7.2). `vital_product_data` has the pages.

use super::{Context, Planned, port_groups, vital_product_data};
use crate::command::{Cdb, be16};
use crate::nexus::TargetPort;
use crate::sense::Sense;
use crate::unit_state::AccessState;

/// Vendor identification, 8 bytes.
pub(super) const VENDOR: &[u8; 8] = b"LUNETTE ";
/// Product identification, 16 bytes.
pub(super) const PRODUCT: &[u8; 16] = b"VIRTUAL DISK    ";
/// Product revision level, 4 bytes.
const REVISION: &[u8; 4] = b"0001";

/// Claimed standards (SPC-5, table 149), from general to specific.
const VERSION_DESCRIPTORS: [u16; 4] = [
    0x00a0, // SAM-5
    0x0460, // SPC-4
    0x04c0, // SBC-3
    0x0960, // iSCSI
];

/// Peripheral qualifier 001b in byte 0, with the device type of disks.
pub(super) const NOT_CONNECTED: u8 = 0x20;

/// Byte 0: peripheral qualifier and device type.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Peripheral {
    /// A direct access block device.
    Disk = 0x00,
    /// A direct access block device that is not accessible through this port at present (qualifier 001b).
    Inaccessible = NOT_CONNECTED as isize,
    WellKnown = 0x1e,
    /// No logical unit can exist here (qualifier 011b).
    Missing = 0x7f,
}

impl Peripheral {
    /// Returns the peripheral of a disk, which depends on the access state of the port.
    fn of(c: &Context<'_>) -> Peripheral {
        match is_inaccessible(c) {
            false => Peripheral::Disk,
            true => Peripheral::Inaccessible,
        }
    }
}

/// Returns true if the unit is not accessible through the port of the nexus: INQUIRY data then has the peripheral qualifier 001b (SPC-4,
/// 5.15.2.4.5).
pub(super) fn is_inaccessible(c: &Context<'_>) -> bool {
    let access = c.unit.access_state(c.nexus.port().group);
    matches!(access, AccessState::Unavailable | AccessState::Offline)
}

pub(super) fn inquiry(c: &Context<'_>) -> Planned {
    let allocation_length = be16(c.cdb, 3).into();
    if checked_evpd(c.cdb)? {
        let page = vital_product_data::page(c, Peripheral::of(c), c.cdb[2]);
        return c.data(page.ok_or(Sense::cdb_field(2))?, allocation_length);
    }
    let data = standard(Peripheral::of(c), c.unit.removable(), c.nexus.port());
    c.data(data, allocation_length)
}

/// Returns EVPD. A page code without EVPD is an error.
pub(super) fn checked_evpd(cdb: &Cdb) -> Result<bool, Sense> {
    let evpd = cdb[1] & 0x01 != 0;
    if !evpd && cdb[2] != 0 {
        return Err(Sense::cdb_field(2));
    }
    Ok(evpd)
}

/// Returns TPGS in byte 5 of the standard INQUIRY data: implicit (01b), or implicit and explicit (11b).
fn tpgs(port: &TargetPort) -> u8 {
    match port_groups::may_set(port) {
        false => 0x10,
        true => 0x30,
    }
}

/// Returns the standard INQUIRY data, 96 bytes.
pub(super) fn standard(peripheral: Peripheral, removable: bool, port: &TargetPort) -> Vec<u8> {
    let mut data = [0; 96];
    data[0] = peripheral as u8;
    data[1] = if removable { 0x80 } else { 0x00 };
    data[2] = 0x06; // SPC-4
    data[3] = 0x12; // HISUP, response data format 2
    data[4] = 96 - 5;
    data[5] = 0x08 | tpgs(port); // 3PC
    data[6] = 0x10; // MULTIP
    data[7] = 0x02; // CMDQUE
    data[8..16].copy_from_slice(VENDOR);
    data[16..32].copy_from_slice(PRODUCT);
    data[32..36].copy_from_slice(REVISION);
    for (at, version) in VERSION_DESCRIPTORS.iter().enumerate() {
        data[58 + 2 * at..60 + 2 * at].copy_from_slice(&version.to_be_bytes());
    }
    data.into()
}

//! INQUIRY: standard data (SPC-5, 6.7.2). The pages are in `vital_product_data`.

use super::{Context, Planned, vital_product_data};
use crate::command::{Cdb, be16};
use crate::sense::Sense;

/// Vendor identification, 8 bytes.
pub(super) const VENDOR: &[u8; 8] = b"LUNETTE ";
/// Product identification, 16 bytes.
pub(super) const PRODUCT: &[u8; 16] = b"VIRTUAL DISK    ";
/// Product revision level, 4 bytes.
const REVISION: &[u8; 4] = b"0001";

/// Claimed standards (SPC-5, table 149), in the order of how general they are.
const VERSION_DESCRIPTORS: [u16; 4] = [
    0x00a0, // SAM-5
    0x0460, // SPC-4
    0x04c0, // SBC-3
    0x0960, // iSCSI
];

/// What stands in byte 0: peripheral qualifier and device type.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Peripheral {
    /// A direct access block device.
    Disk = 0x00,
    /// A well-known logical unit.
    WellKnown = 0x1e,
    /// Nothing can be here (qualifier 011b).
    Missing = 0x7f,
}

pub(super) fn inquiry(c: &Context<'_>) -> Planned {
    let allocation_length = be16(c.cdb, 3).into();
    if checked_evpd(c.cdb)? {
        let data = vital_product_data::page(c, c.cdb[2]).ok_or(Sense::cdb_field(2))?;
        return c.data(data, allocation_length);
    }
    let data = standard(Peripheral::Disk, c.unit.removable());
    c.data(data, allocation_length)
}

/// EVPD; a page code needs it.
pub(super) fn checked_evpd(cdb: &Cdb) -> Result<bool, Sense> {
    let evpd = cdb[1] & 0x01 != 0;
    if !evpd && cdb[2] != 0 {
        return Err(Sense::cdb_field(2));
    }
    Ok(evpd)
}

/// Standard INQUIRY data of 96 bytes.
pub(super) fn standard(peripheral: Peripheral, removable: bool) -> Vec<u8> {
    let mut data = [0; 96];
    data[0] = peripheral as u8;
    data[1] = if removable { 0x80 } else { 0x00 };
    data[2] = 0x06; // SPC-4
    data[3] = 0x12; // HISUP, response data format 2
    data[4] = 96 - 5;
    data[5] = 0x38; // TPGS: implicit and explicit; 3PC
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

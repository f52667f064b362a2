//! Encoder of CDBs and parameter lists: the initiator's counterpart of `commands`.
//!
//! CDBs are padded with zeroes to 16 bytes. Fields that no function sets, such as FUA in byte 1, are set by the caller.

use crate::command::{Cdb, opcode};

/// FUA bit in byte 1 of READ and WRITE.
pub const FUA: u8 = 0x08;
/// UNMAP bit in byte 1 of WRITE SAME.
pub const UNMAP_BIT: u8 = 0x08;
/// Bytes of UNMAP's parameter list with one descriptor (SBC-4, 5.32).
pub const UNMAP_LIST: usize = 24;

/// Returns a 10-byte CDB with a block address and a length.
#[inline]
pub fn cdb10(opcode: u8, block: u32, length: u16) -> Cdb {
    let mut cdb = Cdb::default();
    cdb[0] = opcode;
    cdb[2..6].copy_from_slice(&block.to_be_bytes());
    cdb[7..9].copy_from_slice(&length.to_be_bytes());
    cdb
}

/// Returns a 12-byte CDB with a service action and an allocation length, such as REPORT LUNS.
pub fn cdb12(opcode: u8, service_action: u8, length: u32) -> Cdb {
    let mut cdb = Cdb::default();
    (cdb[0], cdb[1]) = (opcode, service_action);
    cdb[6..10].copy_from_slice(&length.to_be_bytes());
    cdb
}

/// Returns a 16-byte CDB with a block address and a length.
#[inline]
pub fn cdb16(opcode: u8, block: u64, length: u32) -> Cdb {
    let mut cdb = Cdb::default();
    cdb[0] = opcode;
    cdb[2..10].copy_from_slice(&block.to_be_bytes());
    cdb[10..14].copy_from_slice(&length.to_be_bytes());
    cdb
}

/// Returns INQUIRY, with a page code for vital product data.
pub fn inquiry(page: Option<u8>, length: u16) -> [u8; 6] {
    let [high, low] = length.to_be_bytes();
    let evpd = u8::from(page.is_some());
    [opcode::INQUIRY, evpd, page.unwrap_or(0), high, low, 0]
}

/// Returns MODE SENSE(6) without block descriptors.
pub fn mode_sense_6(page: u8, length: u8) -> [u8; 6] {
    [opcode::MODE_SENSE_6, 0x08, page, 0, length, 0]
}

/// Returns READ CAPACITY(16), which reads 32 bytes.
pub fn read_capacity_16() -> Cdb {
    let mut cdb = cdb16(opcode::SERVICE_ACTION_IN_16, 0, 32);
    cdb[1] = 0x10;
    cdb
}

/// Returns GET LBA STATUS.
pub fn get_lba_status(block: u64, length: u32) -> Cdb {
    let mut cdb = cdb16(opcode::SERVICE_ACTION_IN_16, block, length);
    cdb[1] = 0x12;
    cdb
}

/// Returns COMPARE AND WRITE.
pub fn compare_and_write(block: u64, blocks: u8) -> Cdb {
    let mut cdb = cdb16(opcode::COMPARE_AND_WRITE, block, 0);
    cdb[13] = blocks;
    cdb
}

/// Returns PERSISTENT RESERVE IN or OUT with a service action, scope and type, and a length.
pub fn persistent_reserve(opcode: u8, service_action: u8, kind: u8, length: u16) -> Cdb {
    let mut cdb = cdb10(opcode, 0, length);
    (cdb[1], cdb[2]) = (service_action, kind);
    cdb
}

/// Returns UNMAP of one range: CDB and parameter list.
pub fn unmap(block: u64, blocks: u32) -> (Cdb, [u8; UNMAP_LIST]) {
    let mut list = [0; UNMAP_LIST];
    (list[1], list[3]) = (22, 16);
    list[8..16].copy_from_slice(&block.to_be_bytes());
    list[16..20].copy_from_slice(&blocks.to_be_bytes());
    (cdb10(opcode::UNMAP, 0, UNMAP_LIST as u16), list)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cdbs_have_the_bytes_of_the_standards() {
        // READ(10), SYNCHRONIZE CACHE(10) of SBC-4.
        assert_eq!(
            cdb10(0x28, 0x0102_0304, 0x0506),
            [0x28, 0, 1, 2, 3, 4, 0, 5, 6, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(
            cdb10(0x35, 0, 0),
            [0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        );
        // READ(16), WRITE(16) of SBC-4.
        assert_eq!(
            cdb16(0x88, 0x0102_0304_0506_0708, 0x090a_0b0c),
            [0x88, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0]
        );
        assert_eq!(
            cdb16(0x8a, 1 << 32, 1),
            [0x8a, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]
        );
        // REPORT LUNS, REPORT TARGET PORT GROUPS of SPC-5.
        assert_eq!(
            cdb12(0xa0, 0, 0x0102_0304)[..12],
            [0xa0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 0, 0]
        );
        assert_eq!(
            cdb12(0xa3, 0x0a, 4096)[..12],
            [0xa3, 0x0a, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0]
        );
        // INQUIRY, MODE SENSE(6) of SPC-5.
        assert_eq!(inquiry(None, 1024), [0x12, 0, 0, 4, 0, 0]);
        assert_eq!(inquiry(Some(0x83), 255), [0x12, 1, 0x83, 0, 255, 0]);
        assert_eq!(mode_sense_6(0x3f, 192), [0x1a, 0x08, 0x3f, 0, 192, 0]);
        // READ CAPACITY(16), GET LBA STATUS, COMPARE AND WRITE of SBC-4.
        assert_eq!(
            read_capacity_16(),
            [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0]
        );
        assert_eq!(
            get_lba_status(8, 24),
            [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 24, 0, 0]
        );
        assert_eq!(
            compare_and_write(3, 2),
            [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0]
        );
        // PERSISTENT RESERVE IN and OUT of SPC-5.
        assert_eq!(
            persistent_reserve(0x5e, 1, 0, 8192)[..10],
            [0x5e, 1, 0, 0, 0, 0, 0, 0x20, 0, 0]
        );
        assert_eq!(
            persistent_reserve(0x5f, 6, 5, 24)[..10],
            [0x5f, 6, 5, 0, 0, 0, 0, 0, 24, 0]
        );
        // UNMAP of SBC-4, 5.32.
        let (cdb, list) = unmap(0x0102_0304_0506_0708, 0x090a_0b0c);
        assert_eq!(cdb[..10], [0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0]);
        assert_eq!(
            list,
            [
                0, 22, 0, 16, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0, 0, 0
            ]
        );
    }
}

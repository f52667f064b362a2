//! Wire format of requests, responses, task management and events (virtio 1.3, 5.6.6). Pure.

use scsi::{Lun, LunAddress, TaskAttribute};

/// Length of a request header.
pub const REQUEST_SIZE: usize = 51;
/// Length of the part that a plain command needs, with 16 bytes of CDB.
pub const PLAIN_SIZE: usize = 35;
/// Length of a response before its data-in.
pub const RESPONSE_SIZE: usize = 108;
/// Length of a response before its sense data.
pub const RESPONSE_HEADER_SIZE: usize = 12;
/// Length of the sense data field.
pub const SENSE_SIZE: usize = 96;
/// Length of the CDB field.
pub const CDB_SIZE: usize = 32;

/// VIRTIO_SCSI_S_OK.
pub const S_OK: u8 = 0;
/// VIRTIO_SCSI_S_OVERRUN: the driver's buffer is too small.
pub const S_OVERRUN: u8 = 1;
/// VIRTIO_SCSI_S_ABORTED.
pub const S_ABORTED: u8 = 2;
/// VIRTIO_SCSI_S_BAD_TARGET.
pub const S_BAD_TARGET: u8 = 3;
/// VIRTIO_SCSI_S_RESET.
pub const S_RESET: u8 = 4;
/// VIRTIO_SCSI_S_FAILURE: other driver errors.
pub const S_FAILURE: u8 = 9;

/// Target and logical unit of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// Target number.
    pub target: u8,
    /// Logical unit number in SAM-5 format.
    pub lun: Lun,
}

impl Address {
    /// Parses a LUN field. Returns `None` for formats not listed in 5.6.6.1.
    #[inline(always)]
    pub fn parse(field: &[u8; 8]) -> Option<Address> {
        let word = u64::from_be_bytes(*field);
        if word & 0xff00_0000_ffff_ffff == 0x0100_0000_0000_0000 {
            return Some(Address {
                target: field[1],
                lun: Lun::single_level([field[2], field[3]]),
            });
        }
        (word == 0xc101_0000_0000_0000).then_some(Address {
            target: 0,
            lun: Lun::REPORT_LUNS,
        })
    }

    /// Returns target and unit number, independent of the LUN's format. A LUN of no unit gets a number outside of the valid range.
    pub fn key(&self) -> (u8, u16) {
        let [high, low, ..] = self.lun.0;
        let number = match self.lun.address() {
            LunAddress::Unit(number) => number,
            LunAddress::ReportLuns | LunAddress::Unknown => u16::from_be_bytes([high | 0x80, low]),
        };
        (self.target, number)
    }

    /// Encodes a unit's LUN field as in REPORT LUNS: Linux compares the two.
    pub fn encode(target: u8, lun: u16) -> [u8; 8] {
        let [first, second, ..] = Lun::unit(lun).0;
        [1, target, first, second, 0, 0, 0, 0]
    }
}

/// A request header, over one copy of its bytes from guest memory.
#[derive(Clone, Copy, Debug)]
pub struct Header<'a> {
    /// LUN field.
    pub lun: &'a [u8; 8],
    /// Address; `None`: unsupported LUN format.
    pub address: Option<Address>,
    /// The driver's tag.
    pub id: u64,
    /// SIMPLE, ORDERED, HEAD OF QUEUE or ACA.
    pub attribute: TaskAttribute,
    /// Command descriptor block.
    pub cdb: &'a [u8; CDB_SIZE],
}

impl Header<'_> {
    /// Parses a header.
    #[inline(always)]
    pub fn parse(bytes: &[u8; REQUEST_SIZE]) -> Header<'_> {
        let (lun, rest) = split::<8>(bytes);
        let (id, rest) = split::<8>(rest);
        // Byte 17 is the command priority, byte 18 the CRN: both are ignored.
        let (attributes, rest) = split::<3>(rest);
        let attribute = match attributes[0] {
            1 => TaskAttribute::Ordered,
            2 => TaskAttribute::HeadOfQueue,
            3 => TaskAttribute::Aca,
            _ => TaskAttribute::Simple,
        };
        Header {
            lun,
            address: Address::parse(lun),
            id: u64::from_le_bytes(*id),
            attribute,
            cdb: split::<CDB_SIZE>(rest).0,
        }
    }
}

/// Header of a SIMPLE command, limited to the part for plain commands: the fast path of [`Header`], with equal results.
#[derive(Clone, Copy, Debug)]
pub struct PlainHeader<'a> {
    /// LUN field, in any format.
    pub lun: [u8; 8],
    /// The driver's tag.
    pub id: u64,
    /// First bytes of the command.
    pub cdb: &'a [u8; 16],
}

impl PlainHeader<'_> {
    /// Parses the first bytes of a header. Returns `None` if the command is not SIMPLE.
    #[inline(always)]
    pub fn parse(bytes: &[u8; PLAIN_SIZE]) -> Option<PlainHeader<'_>> {
        let (lun, rest) = split::<8>(bytes);
        let (id, rest) = split::<8>(rest);
        let (attributes, rest) = split::<3>(rest);
        (attributes[0] == 0).then(|| PlainHeader {
            lun: *lun,
            id: u64::from_le_bytes(*id),
            cdb: split::<16>(rest).0,
        })
    }
}

/// Splits the first `N` bytes from a header.
#[inline(always)]
fn split<const N: usize>(bytes: &[u8]) -> (&[u8; N], &[u8]) {
    bytes.split_first_chunk().expect("a header is long enough")
}

/// Encodes the first bytes of a response: lengths, status, response code.
#[inline(always)]
pub fn response_header(
    sense_length: u32,
    residual: u32,
    status: u8,
    response: u8,
) -> [u8; RESPONSE_HEADER_SIZE] {
    let mut bytes = [0; RESPONSE_HEADER_SIZE];
    bytes[0..4].copy_from_slice(&sense_length.to_le_bytes());
    bytes[4..8].copy_from_slice(&residual.to_le_bytes());
    // Bytes 8 and 9, the status qualifier, are zero.
    bytes[10] = status;
    bytes[11] = response;
    bytes
}

/// A request on the control queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlRequest {
    /// VIRTIO_SCSI_T_TMF.
    TaskManagement {
        /// Subtype.
        function: u32,
        /// LUN field.
        lun: [u8; 8],
        /// Tag of the task, if the function has one.
        id: u64,
    },
    /// VIRTIO_SCSI_T_AN_QUERY or VIRTIO_SCSI_T_AN_SUBSCRIBE.
    AsynchronousNotification,
    /// A type not listed in 5.6.6.2.
    Unknown,
}

impl ControlRequest {
    /// Length of the longest control request.
    pub const MAX_SIZE: usize = 24;

    /// Parses a control request. Returns `None` if it is too short for its type.
    pub fn parse(bytes: &[u8]) -> Option<ControlRequest> {
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        Some(match word(0)? {
            0 => ControlRequest::TaskManagement {
                function: word(4)?,
                lun: bytes.get(8..16)?.try_into().ok()?,
                id: u64::from_le_bytes(bytes.get(16..24)?.try_into().ok()?),
            },
            1 | 2 => {
                bytes.get(0..16)?;
                ControlRequest::AsynchronousNotification
            }
            _ => ControlRequest::Unknown,
        })
    }
}

/// Length of an event.
pub const EVENT_SIZE: usize = 16;

/// Encodes an event.
pub fn event(event: u32, lun: [u8; 8], reason: u32) -> [u8; EVENT_SIZE] {
    let mut bytes = [0; EVENT_SIZE];
    bytes[0..4].copy_from_slice(&event.to_le_bytes());
    bytes[4..12].copy_from_slice(&lun);
    bytes[12..16].copy_from_slice(&reason.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn header_fields_lie_where_5_6_6_1_puts_them() {
        let mut bytes = [0; 51];
        bytes[0..8].copy_from_slice(&[1, 7, 0x40, 3, 0, 0, 0, 0]);
        bytes[8..16].copy_from_slice(&[0xef, 0xcd, 0xab, 0, 0, 0, 0, 1]);
        bytes[16] = 2;
        bytes[19] = 0x28;
        bytes[50] = 0x99;
        let header = Header::parse(&bytes);
        assert_eq!(
            header.address,
            Some(Address {
                target: 7,
                lun: Lun::single_level([0x40, 3])
            })
        );
        assert_eq!(header.id, 0x0100_0000_00ab_cdef);
        assert_eq!(header.attribute, TaskAttribute::HeadOfQueue);
        assert_eq!((header.cdb[0], header.cdb[31]), (0x28, 0x99));
    }

    #[test]
    fn lun_of_another_format_names_no_unit() {
        for field in [
            [0; 8],
            [1, 0, 0, 0, 1, 0, 0, 0],
            [0xc1, 2, 0, 0, 0, 0, 0, 0],
            [2, 0, 0, 0, 0, 0, 0, 0],
        ] {
            assert_eq!(Address::parse(&field), None, "{field:?}");
        }
        let well_known = Address::parse(&[0xc1, 1, 0, 0, 0, 0, 0, 0]).unwrap();
        assert_eq!(well_known.lun, Lun::REPORT_LUNS);
        let key = |high, low| Address::parse(&[1, 5, high, low, 0, 0, 0, 0]).map(|it| it.key());
        assert_eq!(key(0, 7), key(0x40, 7));
        assert_eq!(key(0x41, 0x2c), Some((5, 300)));
        // Not unit 257 or 300.
        assert_eq!(key(0xc1, 1), Some((5, 0xc101)));
        assert_eq!(key(1, 0x2c), Some((5, 0x812c)));
        assert_eq!(Address::encode(3, 0x1234), [1, 3, 0x52, 0x34, 0, 0, 0, 0]);
        assert_eq!(Address::encode(3, 0x100), [1, 3, 0x41, 0, 0, 0, 0, 0]);
        assert_eq!(Address::encode(3, 0xff), [1, 3, 0, 0xff, 0, 0, 0, 0]);
    }

    #[test]
    fn response_has_its_status_at_10_and_its_code_at_11() {
        assert_eq!(
            response_header(18, 0x200, 2, 0),
            [18, 0, 0, 0, 0, 2, 0, 0, 0, 0, 2, 0]
        );
    }

    #[test]
    fn task_management_is_read() {
        let mut bytes = [0; 24];
        bytes[4] = 5;
        bytes[8..12].copy_from_slice(&[1, 2, 0x40, 9]);
        bytes[16] = 77;
        let want = ControlRequest::TaskManagement {
            function: 5,
            lun: [1, 2, 0x40, 9, 0, 0, 0, 0],
            id: 77,
        };
        assert_eq!(ControlRequest::parse(&bytes), Some(want));
        assert_eq!(ControlRequest::parse(&bytes[..23]), None);
        assert_eq!(
            ControlRequest::parse(&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            Some(ControlRequest::AsynchronousNotification)
        );
        assert_eq!(
            ControlRequest::parse(&[9, 0, 0, 0]),
            Some(ControlRequest::Unknown)
        );
    }

    #[test]
    fn event_is_16_bytes() {
        let got = event(2, [1, 4, 0x40, 0, 0, 0, 0, 0], 0x092a);
        assert_eq!(got, [2, 0, 0, 0, 1, 4, 0x40, 0, 0, 0, 0, 0, 0x2a, 9, 0, 0]);
    }

    proptest! {
        #[test]
        fn plain_header_equals_the_general_parser(bytes in prop::array::uniform(any::<u8>()), simple: bool) {
            let mut bytes: [u8; REQUEST_SIZE] = bytes;
            if simple {
                bytes[16] = 0;
            }
            let header = Header::parse(&bytes);
            let Some(plain) = PlainHeader::parse(bytes.first_chunk().unwrap()) else {
                prop_assert!(bytes[16] != 0);
                return Ok(());
            };
            prop_assert_eq!(header.attribute, TaskAttribute::Simple);
            prop_assert_eq!((&plain.lun, plain.id), (header.lun, header.id));
            prop_assert_eq!(&plain.cdb[..], &header.cdb[..16]);
        }

        #[test]
        fn no_bytes_panic(header in prop::array::uniform(any::<u8>()), control in prop::collection::vec(any::<u8>(), 0..40)) {
            Header::parse(&header);
            ControlRequest::parse(&control);
        }
    }
}

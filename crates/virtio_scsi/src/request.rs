//! The wire format of requests, responses, task management and events (virtio 1.3, 5.6.6). Pure.

use scsi::{Lun, LunAddress, TaskAttribute};

/// Bytes of a request's header.
pub const REQUEST_SIZE: usize = 51;
/// Bytes of a request's header that a plain command needs: 16 of its CDB.
pub const PLAIN_SIZE: usize = 35;
/// Bytes of a response before its data-in.
pub const RESPONSE_SIZE: usize = 108;
/// Bytes of a response before its sense data.
pub const RESPONSE_HEADER_SIZE: usize = 12;
/// Bytes of sense data in a response.
pub const SENSE_SIZE: usize = 96;
/// Bytes of a command.
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
/// VIRTIO_SCSI_S_FAILURE: another error of the driver's.
pub const S_FAILURE: u8 = 9;

/// Which of a controller's targets, and which of its logical units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The target.
    pub target: u8,
    /// The logical unit, as SAM-5 writes it.
    pub lun: Lun,
}

impl Address {
    /// Reads a LUN field; `None` when its form is not one that 5.6.6.1 knows.
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

    /// Target and unit number: the same whichever way the LUN was written. What names no unit has a number that none has.
    pub fn key(&self) -> (u8, u16) {
        let [high, low, ..] = self.lun.0;
        let number = match self.lun.address() {
            LunAddress::Unit(number) => number,
            LunAddress::ReportLuns | LunAddress::Unknown => u16::from_be_bytes([high | 0x80, low]),
        };
        (self.target, number)
    }

    /// The LUN field of a unit, in the form in which REPORT LUNS lists it: Linux holds one against the other.
    pub fn encode(target: u8, lun: u16) -> [u8; 8] {
        let [first, second, ..] = Lun::unit(lun).0;
        [1, target, first, second, 0, 0, 0, 0]
    }
}

/// A request's header, over its bytes: copied out of the driver's memory once, and no second time.
#[derive(Clone, Copy, Debug)]
pub struct Header<'a> {
    /// The LUN field.
    pub lun: &'a [u8; 8],
    /// Whom it is for; `None`: no form of LUN that we know.
    pub address: Option<Address>,
    /// The driver's tag.
    pub id: u64,
    /// SIMPLE, ORDERED, HEAD OF QUEUE or ACA.
    pub attribute: TaskAttribute,
    /// The command.
    pub cdb: &'a [u8; CDB_SIZE],
}

impl Header<'_> {
    /// Reads a header.
    #[inline(always)]
    pub fn parse(bytes: &[u8; REQUEST_SIZE]) -> Header<'_> {
        let (lun, rest) = split::<8>(bytes);
        let (id, rest) = split::<8>(rest);
        // Byte 17 is the command priority, byte 18 its CRN: neither is used.
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

/// The header of a SIMPLE command, as far as a plain one needs it: the fast path of [`Header`], which says the same.
#[derive(Clone, Copy, Debug)]
pub struct PlainHeader<'a> {
    /// The LUN field, in whatever form.
    pub lun: [u8; 8],
    /// The driver's tag.
    pub id: u64,
    /// The first bytes of the command.
    pub cdb: &'a [u8; 16],
}

impl PlainHeader<'_> {
    /// Reads the first bytes of a header; `None`: it is not a SIMPLE command's.
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

/// The first bytes of a header's, and the rest.
#[inline(always)]
fn split<const N: usize>(bytes: &[u8]) -> (&[u8; N], &[u8]) {
    bytes.split_first_chunk().expect("a header is long enough")
}

/// The first bytes of a response: lengths, status, response code.
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

/// What comes on the control queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlRequest {
    /// VIRTIO_SCSI_T_TMF.
    TaskManagement {
        /// Which function.
        function: u32,
        /// The LUN field.
        lun: [u8; 8],
        /// The tag of the task that is meant, if one is.
        id: u64,
    },
    /// VIRTIO_SCSI_T_AN_QUERY or VIRTIO_SCSI_T_AN_SUBSCRIBE.
    AsynchronousNotification,
    /// A type that 5.6.6.2 does not know.
    Unknown,
}

impl ControlRequest {
    /// Bytes of the longest control request.
    pub const MAX_SIZE: usize = 24;

    /// Reads as much of a control request as came; `None` when it is too short for its type.
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

/// Bytes of an event.
pub const EVENT_SIZE: usize = 16;

/// An event as the driver reads it.
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
    fn lun_of_another_form_is_nobodys() {
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
        // Not unit 257, nor 300.
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
        fn plain_header_says_what_a_header_says(bytes in prop::array::uniform(any::<u8>()), simple: bool) {
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

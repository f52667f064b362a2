//! Parses virtio-blk requests with arbitrary header, lengths and ranges. Rule: an accepted I/O is on the disk, in whole sectors.

use crate::input::Input;
use block::{DiskInfo, Geometry, IoRequest};
use virtio_blk::request::{RANGE_SIZE, Request, parse, parse_range};

fn info(choice: u8) -> DiskInfo {
    let block_size = 512 << (choice & 3);
    DiskInfo {
        geometry: Geometry::new(block_size, 1 << (20 + (choice >> 2 & 15))),
        physical_block_size: 4096,
        io_alignment: 512,
        optimal_io_size: 0,
        read_only: choice & 0x40 != 0,
        write_cache: true,
        discard_granularity: (choice & 0x80 != 0).then_some(4096),
        discard_zeroes: true,
        write_zeroes: choice & 0x80 != 0,
        anchors: false,
        atomic_writes: None,
        shared: false,
        compare_and_write: None,
        rotational: false,
        passthrough: None,
        identity: block::Identity::UNSET,
        serial: String::new(),
        naa: 0,
    }
}

fn check(io: &IoRequest, info: &DiskInfo) {
    let capacity = info.geometry.capacity_bytes();
    let mask = u64::from(block::SECTOR_BYTES) - 1;
    assert!(
        io.length <= capacity && io.offset <= capacity - io.length,
        "{io:?}"
    );
    assert_eq!((io.offset | io.length) & mask, 0, "{io:?}");
    assert!(!(info.read_only && io.modifies()), "{io:?}");
}

/// Parses the request and the ranges in `data`.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let choice = input.byte();
    let header = input.array();
    let (readable, writable) = (input.be32(), input.be32());
    let info = info(choice);
    match parse(&header, readable, writable, &info) {
        Ok(Request::Io(io)) => {
            check(&io, &info);
            // The buffer has the length of the I/O.
            assert!(!io.moves_data() || [readable, writable].map(u64::from).contains(&io.length));
        }
        Ok(Request::Ranges { kind, count }) => {
            assert!(count as usize * RANGE_SIZE <= readable as usize);
            for range in input.0.as_chunks::<RANGE_SIZE>().0 {
                if let Ok(Some(io)) = parse_range(kind, range, &info) {
                    check(&io, &info);
                }
            }
        }
        Ok(Request::Nothing(_) | Request::GetId) | Err(1 | 2) => {}
        Err(status) => panic!("status {status}"),
    }
}

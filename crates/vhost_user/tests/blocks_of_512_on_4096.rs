//! Logical blocks of 512 bytes on a device with blocks of 4096, over virtio-blk and virtio-scsi. Wire bytes are those of virtio 1.3, SPC-5
//! and SBC-4.

mod support;

use std::path::PathBuf;
use std::sync::Arc;

use bdev::{BlockDevice, Disk, FaultPlan, Faulty};
use scsi::MemoryStore;
use scsi_exec::Units;
use support::{Rig, connect, ram, start_blk};
use vhost_frontend::{FrontEnd, Layout, Options, QueueOptions, ScsiQueue, ScsiRequest, status};
use virtio_scsi::{ScsiDevice, ScsiOptions};

const BLK_SIZE: u64 = 1 << 6;
const GOOD: u8 = 0x00;
const CHECK_CONDITION: u8 = 0x02;

fn coarse() -> Arc<dyn BlockDevice> {
    larger_blocks(ram(1 << 20))
}

/// Accepts multiples of 4096 bytes only.
fn larger_blocks(device: Arc<dyn BlockDevice>) -> Arc<dyn BlockDevice> {
    Arc::new(Faulty::new(device, FaultPlan::default()).with_alignment(4096))
}

#[test]
fn virtio_blk_serves_sectors_with_and_without_blk_size() {
    let rig = Rig::new(1);
    let socket = rig.serve("d", coarse(), 1);
    for device_features in [u64::MAX, !BLK_SIZE] {
        let options = Options {
            device_features,
            ..Options::default()
        };
        let mut front_end = FrontEnd::connect(&socket, &options).unwrap();
        // blk_size 512, physical_block_exp 3
        let config = front_end.config(20, 5).unwrap();
        assert_eq!(config, [0, 2, 0, 0, 3]);
        let mut queue = start_blk(&mut front_end, 0);
        for sector in 0..24u8 {
            let data = [sector + 1; 512];
            let written = queue.write(u64::from(sector) * 512, &data).unwrap();
            assert_eq!(written, status::OK);
        }
        let mut bytes = [0; 24 * 512];
        assert_eq!(queue.read(0, &mut bytes).unwrap(), status::OK);
        let sectors = bytes.chunks(512).zip(1u8..);
        assert!(sectors.clone().all(|(sector, byte)| sector == [byte; 512]));
    }
}

/// The protocol counts in sectors for any blk_size (5.2.4).
#[test]
fn disk_with_blocks_of_4096_bytes_takes_sectors() {
    let rig = Rig::new(1);
    let options = bdev::RamOptions {
        size: 1 << 20,
        block_size: 4096,
        huge_pages: false,
        ..bdev::RamOptions::default()
    };
    let large: Arc<dyn BlockDevice> = Arc::new(bdev::Ram::create(options).unwrap());
    let devices = [large.clone(), larger_blocks(large)];
    for (name, device) in ["fine", "coarse"].into_iter().zip(devices) {
        let socket = rig.serve(name, device, 1);
        let mut front_end = connect(&socket);
        assert_eq!(front_end.config(20, 4).unwrap(), [0, 0x10, 0, 0]);
        let mut queue = start_blk(&mut front_end, 0);
        assert_eq!(queue.write(512, &[7; 512]).unwrap(), status::OK, "{name}");
        let mut bytes = [0; 1536];
        assert_eq!(queue.read(0, &mut bytes).unwrap(), status::OK, "{name}");
        assert!(bytes[512..1024] == [7; 512] && bytes[..512] == [0; 512]);
    }
}

fn serve_scsi(rig: &Rig) -> PathBuf {
    let units = Units::new(Box::<MemoryStore>::default());
    let options = ScsiOptions {
        name: "c".into(),
        queues: 1,
    };
    let controller = Arc::new(ScsiDevice::new(units, options));
    let disk = Arc::new(Disk::new("d", None, coarse()).unwrap());
    controller.add_lun(0, 0, &disk).unwrap();
    let socket = rig.socket("c");
    rig.server.listen(&socket, controller).unwrap();
    socket
}

#[test]
fn scsi_commands_work_on_parts_of_blocks() {
    let rig = Rig::new(1);
    let mut front_end = connect(&serve_scsi(&rig));
    let options = QueueOptions::default();
    let mut queue =
        ScsiQueue::start(&mut front_end, 2, &options, 4, 8192, Layout::Separate).unwrap();
    let mut run = |cdb: &[u8], out: &[u8], into: usize| {
        let mut data = vec![0; into];
        let request = ScsiRequest {
            target: 0,
            lun: 0,
            tag: 1,
            cdb,
        };
        let done = queue.run(&request, out, &mut data).unwrap();
        let code = done.sense.get(12..14).map(<[u8]>::to_vec);
        (done.status, code.unwrap_or_default(), data)
    };
    while run(&[0; 6], &[], 0).0 != GOOD {}

    // READ CAPACITY(16): last block 2047, blocks of 512 bytes, 2^3 of them in a physical one.
    let capacity = run(
        &[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0],
        &[],
        32,
    );
    assert_eq!(
        capacity.2[..14],
        [0, 0, 0, 0, 0, 0, 7, 0xff, 0, 0, 2, 0, 0, 3]
    );

    // WRITE(10) of blocks 0 to 7, then of blocks 3 and 4.
    let whole: Vec<u8> = (0..8u8).flat_map(|block| [block; 512]).collect();
    assert_eq!(run(&[0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0], &whole, 0).0, GOOD);
    let two = [[0x33; 512], [0x44; 512]].concat();
    assert_eq!(run(&[0x2a, 8, 0, 0, 0, 3, 0, 0, 2, 0], &two, 0).0, GOOD);

    // COMPARE AND WRITE of block 5: the first one matches, the second one does not.
    let compare = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 1, 0, 0];
    let parameters = [[5; 512], [0x55; 512]].concat();
    assert_eq!(run(&compare, &parameters, 0).0, GOOD);
    let (failed, code, _) = run(&compare, &parameters, 0);
    assert_eq!(
        (failed, code),
        (CHECK_CONDITION, vec![0x1d, 0x00]),
        "MISCOMPARE"
    );

    // WRITE SAME(16) of block 6 and UNMAP of block 7.
    let same = [0x93, 0, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 1, 0, 0];
    assert_eq!(run(&same, &[0x66; 512], 0).0, GOOD);
    let mut list = [0; 24];
    (list[1], list[3], list[15], list[19]) = (22, 16, 7, 1);
    assert_eq!(run(&[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &list, 0).0, GOOD);

    let (_, _, read) = run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0], &[], 4096);
    let blocks: Vec<u8> = read.chunks(512).map(|block| block[0]).collect();
    assert_eq!(blocks, [0, 1, 2, 0x33, 0x44, 0x55, 0x66, 0]);
    assert!(read.chunks(512).all(|block| block == [block[0]; 512]));

    // GET LBA STATUS from block 5 on: the first descriptor begins there.
    let lba_status = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 24, 0, 0];
    let (found, _, data) = run(&lba_status, &[], 24);
    assert_eq!((found, &data[8..16]), (GOOD, &[0, 0, 0, 0, 0, 0, 0, 5][..]));
}

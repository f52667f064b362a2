//! Requests of virtio-blk (virtio 1.3, 5.2.6).

use vhost_frontend::{
    BlkQueue, FrontEnd, Layout, Options, QueueOptions, Range, Verifier, kind, status,
};

use crate::config::{Config, bit};
use crate::io::{BLOCK, run_blk};
use crate::{Devices, Target, Test, Verdict, equal, failed, needs};

const fn test(title: &'static str, clause: &'static str, run: fn(&Target) -> Verdict) -> Test {
    Test::new("requests", Devices::Blk, title, clause, run)
}

const OPERATION: &str = "virtio 1.3, 5.2.6.2";
const LENGTH: &str = "virtio 1.3, 2.7.8.2: used length";
const DISCARD: &str = "virtio 1.3, 5.2.6.2: VIRTIO_BLK_T_DISCARD";
const ZEROES: &str = "virtio 1.3, 5.2.6.2: VIRTIO_BLK_T_WRITE_ZEROES";

pub(crate) const TESTS: &[Test] = &[
    test("written data is read back", OPERATION, |target| {
        let mut disk = Disk::open(target)?;
        disk.needs_writable()?;
        let mut verifier = Verifier::new(0, 64, 1);
        for _ in 0..20 {
            verifier.round(&mut disk.queue, DEPTH)?;
        }
        Ok(verifier.check_all(&mut disk.queue)?)
    })
    .writing(),
    test(
        "many requests in flight complete once each",
        OPERATION,
        |target| {
            let mut disk = Disk::open(target)?;
            let mut in_flight = vec![false; usize::from(DEPTH)];
            for round in 0..20 {
                while let Some(slot) = disk.queue.take() {
                    in_flight[usize::from(slot)] = true;
                    let sector = 8 * (round % 4) + u64::from(slot % 4);
                    disk.queue.submit(slot, kind::IN, sector & !7, 0, BLOCK);
                }
                disk.queue.publish();
                for _ in 0..DEPTH {
                    let done = disk.queue.wait()?;
                    let was = std::mem::take(&mut in_flight[usize::from(done.slot)]);
                    equal("the completed request was in flight", was, true)?;
                    equal("status of the read", done.status, status::OK)?;
                    disk.queue.release(done.slot);
                }
            }
            Ok(())
        },
    ),
    test(
        "a read has used length of data and status",
        LENGTH,
        |target| {
            let mut disk = Disk::open(target)?;
            for length in [BLOCK, 2 * BLOCK] {
                let done = run_blk(&mut disk.queue, kind::IN, 0, &[], &mut vec![0; length])?;
                equal("used length of the read", done.written as usize, length + 1)?;
            }
            Ok(())
        },
    ),
    test("a failed read claims no data", LENGTH, |target| {
        let mut disk = Disk::open(target)?;
        let mut data = vec![0xee; BLOCK];
        let sector = disk.config.capacity;
        let done = run_blk(&mut disk.queue, kind::IN, sector, &[], &mut data)?;
        equal("status of the read", done.status, status::IOERR)?;
        let written = data.iter().filter(|byte| **byte != 0xee).count();
        match done.written as usize {
            length if length <= 1 + written => Ok(()),
            length => failed(format!(
                "used length: expected at most {}, the bytes that were written, got {length}",
                1 + written
            )),
        }
    }),
    test("a flush succeeds", OPERATION, |target| {
        let mut disk = Disk::open(target)?;
        needs(disk.front_end.has(bit::FLUSH), "VIRTIO_BLK_F_FLUSH")?;
        disk.expect("the flush", kind::FLUSH, 0, &[], status::OK)?;
        let done = run_blk(&mut disk.queue, kind::FLUSH, 0, &[], &mut [])?;
        equal("used length of the flush", done.written, 1)
    }),
    test(
        "the serial number has 20 bytes",
        "virtio 1.3, 5.2.6: VIRTIO_BLK_T_GET_ID",
        |target| {
            let mut disk = Disk::open(target)?;
            let mut id = [0xee; 20];
            let done = run_blk(&mut disk.queue, kind::GET_ID, 0, &[], &mut id)?;
            needs(done.status != status::UNSUPP, "VIRTIO_BLK_T_GET_ID")?;
            equal("status of the request", done.status, status::OK)?;
            let end = id.iter().position(|byte| *byte == 0).unwrap_or(20);
            let is_text = id[..end].iter().all(|byte| (0x20..0x7f).contains(byte));
            equal(
                &format!("serial {id:x?} is ASCII with zeroes at its end"),
                is_text,
                true,
            )?;
            let mut again = [0; 20];
            run_blk(&mut disk.queue, kind::GET_ID, 0, &[], &mut again)?;
            equal("serial of the second request", &again[..end], &id[..end])
        },
    ),
    test("the last sectors are read", OPERATION, |target| {
        let mut disk = Disk::open(target)?;
        let last = disk.config.capacity - 8;
        let done = run_blk(&mut disk.queue, kind::IN, last, &[], &mut [0; BLOCK])?;
        equal("status of the read", done.status, status::OK)
    }),
    test("a read beyond the capacity fails", OPERATION, |target| {
        let mut disk = Disk::open(target)?;
        let end = disk.config.capacity;
        for sector in [end, end - 4, end + 8, u64::MAX / 512, u64::MAX - 7] {
            let done = run_blk(&mut disk.queue, kind::IN, sector, &[], &mut [0; BLOCK])?;
            let object = format!("status of a read of 8 sectors at {sector}");
            equal(&object, done.status, status::IOERR)?;
        }
        Ok(())
    }),
    test("a write beyond the capacity fails", OPERATION, |target| {
        let mut disk = Disk::open(target)?;
        let end = disk.config.capacity;
        for sector in [end, end + 8, u64::MAX / 512, u64::MAX - 7] {
            let object = format!("a write of 8 sectors at {sector}");
            disk.fails(&object, kind::OUT, sector, &[0; BLOCK])?;
        }
        Ok(())
    })
    .writing(),
    test(
        "an unknown request type is unsupported",
        OPERATION,
        |target| {
            let mut disk = Disk::open(target)?;
            for kind in [2, 3, 5, 9, 14, 24, 0x1234, u32::MAX] {
                let object = format!("a request of type {kind:#x}");
                disk.expect(&object, kind, 0, &[], status::UNSUPP)?;
            }
            Ok(())
        },
    ),
    test(
        "a write to a read-only disk fails",
        "virtio 1.3, 5.2.6.2: VIRTIO_BLK_F_RO",
        |target| {
            let mut disk = Disk::open(target)?;
            needs(disk.front_end.offered() & bit::RO != 0, "VIRTIO_BLK_F_RO")?;
            disk.expect("a write", kind::OUT, 0, &[0; BLOCK], status::IOERR)
        },
    )
    .writing(),
    test(
        "a request may have seg_max segments",
        "virtio 1.3, 5.2.4: seg_max",
        segments,
    ),
    test(
        "a read of partial sectors does not end the queue",
        OPERATION,
        |target| {
            let mut disk = Disk::open(target)?;
            for length in [0, 1, 511, 513] {
                let mut data = vec![0xee; length];
                let done = run_blk(&mut disk.queue, kind::IN, 0, &[], &mut data)?;
                let object = format!("status of a read of {length} bytes");
                // The standard requires whole sectors and names no status.
                equal(
                    &format!("{object} is written"),
                    done.status != status::NONE,
                    true,
                )?;
                if target.is_strict && length > 0 {
                    equal(&object, done.status, status::IOERR)?;
                }
                let is_read = done.status == status::OK;
                let claimed = (done.written as usize).min(length + 2);
                equal(
                    &format!(
                        "used length {} of a read of {length} bytes is right",
                        done.written
                    ),
                    claimed <= length + 1 && (!is_read || claimed == length + 1),
                    true,
                )?;
                disk.expect("the flush", kind::FLUSH, 0, &[], disk.flush_status())?;
            }
            Ok(())
        },
    ),
    test("write zeroes reads zeroes", ZEROES, |target| {
        for flags in [0, 1] {
            let mut disk = Disk::open(target)?;
            disk.needs_kind(bit::WRITE_ZEROES, "VIRTIO_BLK_F_WRITE_ZEROES")?;
            disk.expect("the write", kind::OUT, 0, &[0xa5; 2 * BLOCK], status::OK)?;
            let zeroes = range(0, 8, flags);
            let object = format!("write zeroes with flags {flags}");
            disk.expect(&object, kind::WRITE_ZEROES, 0, &zeroes, status::OK)?;
            let mut data = [1; 2 * BLOCK];
            let done = run_blk(&mut disk.queue, kind::IN, 0, &[], &mut data)?;
            equal("status of the read", done.status, status::OK)?;
            let is_zero = data[..BLOCK].iter().all(|byte| *byte == 0);
            equal("zeroes in the range", is_zero, true)?;
            let is_kept = data[BLOCK..].iter().all(|byte| *byte == 0xa5);
            equal("unchanged data behind the range", is_kept, true)?;
        }
        Ok(())
    })
    .writing(),
    test("write zeroes beyond the capacity fails", ZEROES, |target| {
        beyond(target, kind::WRITE_ZEROES, bit::WRITE_ZEROES)
    })
    .writing(),
    test(
        "write zeroes with unknown flags is unsupported",
        ZEROES,
        |target| {
            let mut disk = Disk::open(target)?;
            disk.needs_kind(bit::WRITE_ZEROES, "VIRTIO_BLK_F_WRITE_ZEROES")?;
            let zeroes = range(0, 8, 2);
            disk.expect(
                "the request",
                kind::WRITE_ZEROES,
                0,
                &zeroes,
                status::UNSUPP,
            )
        },
    )
    .writing(),
    test(
        "write zeroes above max_write_zeroes_sectors fails",
        ZEROES,
        |target| too_long(target, kind::WRITE_ZEROES, bit::WRITE_ZEROES, 48),
    )
    .writing(),
    test(
        "discard keeps the data behind its range",
        DISCARD,
        |target| {
            let mut disk = Disk::open(target)?;
            disk.needs_kind(bit::DISCARD, "VIRTIO_BLK_F_DISCARD")?;
            disk.expect("the write", kind::OUT, 0, &[0xa5; 2 * BLOCK], status::OK)?;
            disk.expect("the discard", kind::DISCARD, 0, &range(0, 8, 0), status::OK)?;
            let mut data = [1; BLOCK];
            let done = run_blk(&mut disk.queue, kind::IN, 8, &[], &mut data)?;
            equal("status of the read", done.status, status::OK)?;
            let is_kept = data.iter().all(|byte| *byte == 0xa5);
            equal("unchanged data behind the range", is_kept, true)
        },
    )
    .writing(),
    test("discard of several ranges succeeds", DISCARD, |target| {
        let mut disk = Disk::open(target)?;
        disk.needs_kind(bit::DISCARD, "VIRTIO_BLK_F_DISCARD")?;
        let most = disk.config.word(40).clamp(1, 16);
        let ranges: Vec<u8> = (0..most)
            .flat_map(|n| range(u64::from(n) * 8, 8, 0))
            .collect();
        disk.expect("the discard", kind::DISCARD, 0, &ranges, status::OK)
    })
    .writing(),
    test(
        "discard of more ranges than max_discard_seg fails",
        DISCARD,
        |target| {
            let mut disk = Disk::open(target)?;
            disk.needs_kind(bit::DISCARD, "VIRTIO_BLK_F_DISCARD")?;
            let most = disk.config.word(40);
            needs(most <= 256, "a max_discard_seg of at most 256")?;
            let ranges: Vec<u8> = (0..=most).flat_map(|_| range(0, 8, 0)).collect();
            disk.fails("the discard", kind::DISCARD, 0, &ranges)
        },
    )
    .writing(),
    test(
        "discard above max_discard_sectors fails",
        DISCARD,
        |target| too_long(target, kind::DISCARD, bit::DISCARD, 36),
    )
    .writing(),
    test("discard beyond the capacity fails", DISCARD, |target| {
        beyond(target, kind::DISCARD, bit::DISCARD)
    })
    .writing(),
    test(
        "discard with the unmap flag is unsupported",
        DISCARD,
        |target| {
            let mut disk = Disk::open(target)?;
            disk.needs_kind(bit::DISCARD, "VIRTIO_BLK_F_DISCARD")?;
            for flags in [1, 2] {
                let object = format!("a discard with flags {flags}");
                let range = range(0, 8, flags);
                disk.expect(&object, kind::DISCARD, 0, &range, status::UNSUPP)?;
            }
            Ok(())
        },
    )
    .writing(),
    test(
        "requests in descriptors of any length",
        "virtio 1.3, 2.7.4: message framing",
        |target| {
            for packed in [false, true] {
                for indirect in [None, Some(128)] {
                    divisions(target, packed, indirect)?;
                }
            }
            Ok(())
        },
    )
    .writing(),
];

const DEPTH: u16 = 16;
/// Maximum length of a request here.
const MAX_IO: usize = 1 << 20;

/// A disk with a running queue.
struct Disk {
    front_end: FrontEnd,
    config: Config,
    queue: BlkQueue,
    is_strict: bool,
}

impl Disk {
    fn open(target: &Target) -> Verdict<Disk> {
        Disk::with_queue(target, &QueueOptions::default())
    }

    fn with_queue(target: &Target, options: &QueueOptions) -> Verdict<Disk> {
        let mut front_end = target.connect(&Options::default())?;
        let config = Config::read(&front_end)?;
        let queue = BlkQueue::start(&mut front_end, 0, options, DEPTH, MAX_IO, Layout::Separate)?;
        Ok(Disk {
            front_end,
            config,
            queue,
            is_strict: target.is_strict,
        })
    }

    fn needs_writable(&self) -> Verdict {
        needs(self.front_end.offered() & bit::RO == 0, "a writable disk")
    }

    fn needs_kind(&self, bit: u64, name: &str) -> Verdict {
        self.needs_writable()?;
        needs(self.front_end.has(bit), name)
    }

    /// Status of a flush, which a device without the feature does not support.
    fn flush_status(&self) -> u8 {
        match self.front_end.has(bit::FLUSH) {
            true => status::OK,
            false => status::UNSUPP,
        }
    }

    /// Runs a request that must fail. The standard names no status; Lunette's is IOERR.
    fn fails(&mut self, object: &str, kind: u32, sector: u64, out: &[u8]) -> Verdict {
        let done = run_blk(&mut self.queue, kind, sector, out, &mut [])?;
        match done.status {
            status::UNSUPP if !self.is_strict => Ok(()),
            status => equal(&format!("status of {object}"), status, status::IOERR),
        }
    }

    /// Runs a request with data for the device and checks its status.
    fn expect(&mut self, object: &str, kind: u32, sector: u64, out: &[u8], right: u8) -> Verdict {
        let done = run_blk(&mut self.queue, kind, sector, out, &mut [])?;
        equal(&format!("status of {object}"), done.status, right)
    }
}

fn range(sector: u64, sectors: u32, flags: u32) -> [u8; 16] {
    let range = Range {
        sector,
        sectors,
        flags,
    };
    range.bytes()
}

/// Runs each request with many divisions into descriptors.
fn divisions(target: &Target, packed: bool, indirect: Option<u16>) -> Verdict {
    let mut front_end = target.connect(&Options {
        packed,
        ..Options::default()
    })?;
    needs(front_end.offered() & bit::RO == 0, "a writable disk")?;
    let options = QueueOptions {
        size: 128,
        indirect,
        polled: false,
    };
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 1, BLOCK, Layout::Separate)?;
    let lengths = [1, 3, 5, 8, 15, 16, 17, 100].map(Layout::MaxLength);
    let layouts = [Layout::Merged, Layout::Separate]
        .into_iter()
        .chain(lengths);
    for (round, layout) in layouts.enumerate() {
        queue.set_layout(layout);
        // The ring limits the number of descriptors.
        let bytes = match layout {
            Layout::MaxLength(1..8) => 0,
            Layout::MaxLength(_) => 512,
            Layout::Separate | Layout::Merged => BLOCK,
        };
        let case = |object: &str| format!("status of the {object} with {layout:?}");
        let sector = round as u64 * 8;
        let data: Vec<u8> = (0..bytes).map(|at| (at + round) as u8).collect();
        let mut got = vec![0; bytes];
        if bytes > 0 {
            let done = run_blk(&mut queue, kind::OUT, sector, &data, &mut [])?;
            equal(&case("write"), done.status, status::OK)?;
            let done = run_blk(&mut queue, kind::IN, sector, &[], &mut got)?;
            equal(&case("read"), done.status, status::OK)?;
            equal(&format!("data with {layout:?}"), got == data, true)?;
        }
        let done = run_blk(&mut queue, kind::GET_ID, 0, &[], &mut [0; 20])?;
        equal(&case("GET_ID"), done.status, status::OK)?;
        if front_end.has(bit::WRITE_ZEROES) {
            let zeroes = range(sector, 8, 0);
            let done = run_blk(&mut queue, kind::WRITE_ZEROES, 0, &zeroes, &mut [])?;
            equal(&case("write zeroes"), done.status, status::OK)?;
            run_blk(&mut queue, kind::IN, sector, &[], &mut got)?;
            let is_zero = got.iter().all(|byte| *byte == 0);
            equal(&format!("zeroes with {layout:?}"), is_zero, true)?;
        }
    }
    Ok(())
}

/// Sends ranges that end beyond the capacity.
fn beyond(target: &Target, kind: u32, bit: u64) -> Verdict {
    let mut disk = Disk::open(target)?;
    disk.needs_kind(bit, "the request")?;
    let end = disk.config.capacity;
    for sector in [end, end - 4, u64::MAX / 512, u64::MAX - 7] {
        let object = format!("a range of 8 sectors at {sector}");
        disk.fails(&object, kind, 0, &range(sector, 8, 0))?;
    }
    for sector in [0, u64::MAX] {
        let object = format!("a range of 2^32 - 1 sectors at {sector}");
        disk.fails(&object, kind, 0, &range(sector, u32::MAX, 0))?;
    }
    Ok(())
}

/// Sends a range that is longer than the field at `at` permits.
fn too_long(target: &Target, kind: u32, bit: u64, at: usize) -> Verdict {
    let mut disk = Disk::open(target)?;
    disk.needs_kind(bit, "the request")?;
    let most = disk.config.word(at);
    let has_limit = u64::from(most) < disk.config.capacity;
    needs(has_limit, "a limit below the capacity")?;
    let object = format!("a range of {most} + 8 sectors");
    disk.fails(&object, kind, 0, &range(0, most + 8, 0))
}

/// Reads with the maximum number of data segments, in an indirect table.
fn segments(target: &Target) -> Verdict {
    let options = QueueOptions {
        indirect: Some(256),
        ..QueueOptions::default()
    };
    let mut disk = Disk::with_queue(target, &options)?;
    needs(disk.front_end.has(bit::SEG_MAX), "VIRTIO_BLK_F_SEG_MAX")?;
    // A chain has at most as many descriptors as the ring (2.7.5.3.1).
    let count = disk.config.word(12).min(u32::from(options.size) - 2) as usize;
    let data = disk.front_end.allocate(count * 1024, BLOCK as u64)?;
    let header = disk.front_end.allocate(BLOCK, BLOCK as u64)?;
    header.write(0, &[0; 16]);
    header.write(64, &[0xff]);
    // None continues its predecessor.
    let mut writable: Vec<_> = (0..count)
        .map(|nth| data.part(1024 * nth, 512).element())
        .collect();
    // The total is a multiple of 4096.
    writable.truncate(count / 8 * 8);
    let length = 512 * writable.len();
    writable.push(header.part(64, 1).element());
    let queue = disk.queue.queue();
    if !queue.add(&[header.part(0, 16).element()], &writable, 0) {
        return failed("the test's chain does not fit in the ring");
    }
    queue.publish();
    queue.wait(crate::io::LIMIT)?;
    let written = queue.pop_used().map(|used| used.written as usize);
    let mut answer = [0];
    header.read(64, &mut answer);
    equal("status of the read", answer[0], status::OK)?;
    equal("used length of the read", written, Some(length + 1))
}

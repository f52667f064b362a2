//! A RAM disk allocates memory on access and releases it. Alone in its process, which it measures.

mod common;

use bdev::{IoChannel, Prefetch, Ram, RamOptions};
use block::{IoFlags, IoRequest};
use common::Worker;

const MIB: u64 = 1 << 20;

fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("RssAnon:")).unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib >> 10
}

/// Announces I/Os that never come, some beyond the end.
fn expect_much(backend: &dyn IoChannel) {
    assert!(backend.wants_prefetch());
    let expect = |io: IoRequest| {
        backend.prefetch(&io, Prefetch::Later);
        backend.prefetch(&io, Prefetch::Next);
    };
    for n in 0..64 {
        expect(IoRequest::read(n * MIB, MIB));
        expect(IoRequest::write(n * MIB, MIB));
        expect(IoRequest::write(n * MIB, 4096));
    }
    for offset in [1 << 40, u64::MAX - 511, u64::MAX] {
        for length in [0, 512, MIB, u64::MAX] {
            expect(IoRequest::read(offset, length));
            expect(IoRequest::write(offset, length));
        }
    }
    expect(IoRequest::discard(0, MIB));
}

#[test]
fn memory_is_allocated_by_writes_and_released_by_discards() {
    for huge_pages in [false, true] {
        let options = RamOptions {
            size: 1 << 40,
            huge_pages,
            ..RamOptions::default()
        };
        let mut worker = Worker::new(&Ram::create(options).unwrap());
        let start = resident_mib();
        expect_much(&*worker.backend);
        assert!(resident_mib() <= start + 1, "{}", resident_mib());
        let data = vec![7; MIB as usize];
        for n in 0..64 {
            worker.write((1 << 30) + n * MIB, &data).unwrap();
        }
        let full = resident_mib();
        assert!((60..100).contains(&(full - start)), "{full} - {start}");
        let discard = IoRequest::discard((1 << 30) + 512, 32 * MIB - 1024);
        worker.do_plain(discard).unwrap();
        assert!(full - resident_mib() >= 25, "{}", resident_mib());
        let zeroes = IoRequest::write_zeroes(1 << 30, 64 * MIB).flagged(IoFlags::UNMAP);
        worker.do_plain(zeroes).unwrap();
        assert!(resident_mib() <= start + 10, "{}", resident_mib());
        assert_eq!(worker.read((1 << 30) + 63 * MIB, 512).unwrap(), [0; 512]);
    }
}

//! Rings byte by byte: literals of virtio 1.3 without constants of this crate.

mod common;

use common::{Bench, Pair};

#[test]
fn split_chain_and_used_element_are_laid_out_by_clause_2_7() {
    let mut b = Bench::split(4);
    let write = |at: u64, bytes: &[u8]| b.memory.mapping.write(at as usize, bytes);
    // Descriptor 2: 16 readable bytes at 0x80010, then descriptor 1.
    write(32, &[0x10, 0, 8, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 1, 0, 1, 0]);
    // Descriptor 1: 513 writable bytes at 0x81000.
    write(16, &[0, 0x10, 8, 0, 0, 0, 0, 0, 1, 2, 0, 0, 2, 0, 9, 9]);
    // Available ring: flags 0, idx 1, ring[0] = 2.
    write(b.layout.driver_area, &[0, 0, 1, 0, 2, 0]);
    assert_eq!(b.device.available(), 1);
    assert_eq!(b.pop(), Ok(true));
    assert_eq!((b.chain.id, b.chain.descriptors), (2, 2));
    assert_eq!((b.chain.readable, b.chain.writable), (16, 513));
    assert_eq!(
        b.memory.elements(&b.chain),
        [(0x8_0010, 16), (0x8_1000, 513)]
    );
    assert_eq!(b.pop(), Ok(false));
    b.device.push(2, 2, 0x0102);
    assert_eq!(
        b.memory.bytes(b.layout.device_area, 4),
        [0; 4],
        "not before publish"
    );
    assert!(b.device.publish());
    // Used ring: flags 0, idx 1, ring[0] = { id 2, len 0x102 }.
    assert_eq!(
        b.memory.bytes(b.layout.device_area, 12),
        [0, 0, 1, 0, 2, 0, 0, 0, 2, 1, 0, 0]
    );
    assert!(!b.device.publish(), "nothing new");
}

#[test]
fn split_events_lie_after_the_rings() {
    let mut b = Bench::new(4, false, |c| c.event_idx = true);
    b.memory
        .mapping
        .write(b.layout.driver_area as usize, &[0, 0, 3, 0]);
    for _ in 0..3 {
        b.raw.set_descriptor(0, common::DATA, 1, 0, 0);
        assert_eq!(b.pop(), Ok(true));
    }
    assert!(!b.device.enable_notifications());
    // avail_event: after flags, idx and four elements of eight bytes.
    assert_eq!(
        b.memory.bytes(b.layout.device_area + 4 + 32, 2),
        [3, 0],
        "no kick before index 3 is passed"
    );
    b.device.push(0, 1, 0);
    assert!(b.device.publish(), "first answer");
    // used_event: after flags, idx and four entries of two bytes.
    let used_event = b.layout.driver_area as usize + 4 + 8;
    b.memory.mapping.write(used_event, &[2, 0]);
    b.device.push(0, 1, 0);
    assert!(!b.device.publish());
    b.device.push(0, 1, 0);
    assert!(b.device.publish(), "index passes 2");
}

#[test]
fn passed_split_used_event_is_found_when_asked_for() {
    let mut b = Bench::new(4, false, |c| c.event_idx = true);
    b.device.push(0, 1, 0);
    assert!(b.device.publish(), "first answer");
    let used_event = b.layout.driver_area as usize + 4 + 8;
    for (event, answers, passed) in [(2, 2, true), (4, 1, false), (4, 1, true)] {
        b.memory.mapping.write(used_event, &[event, 0]);
        for _ in 0..answers {
            b.device.push(0, 1, 0);
            b.device.publish_unchecked();
            assert!(b.device.is_unchecked() && !b.device.must_check_suppression());
        }
        assert_eq!(
            b.device.check_suppression(),
            passed,
            "index {event} is passed"
        );
        assert!(
            !b.device.is_unchecked() && !b.device.check_suppression(),
            "once"
        );
    }
    // Index after five answers, published without a check.
    assert_eq!(b.memory.bytes(b.layout.device_area + 2, 2), [5, 0]);
}

#[test]
fn driver_has_to_be_asked_before_its_event_could_be_passed_twice() {
    let mut split = Bench::new(4, false, |c| c.event_idx = true);
    let mut published = 0;
    while !split.device.must_check_suppression() {
        split.device.push(0, 1, 0);
        split.device.publish_unchecked();
        published += 1;
    }
    // Together with a ring of 32768 entries, fewer than 65536 indices.
    assert_eq!(published, 4096);
    split.device.check_suppression();
    assert!(!split.device.must_check_suppression());
    let mut packed = Bench::new(8, true, |c| c.event_idx = true);
    packed.device.push(0, 1, 0);
    packed.device.publish_unchecked();
    assert!(packed.device.must_check_suppression());
}

#[test]
fn split_avail_event_names_the_next_request_until_disabled() {
    let mut b = Bench::new(4, false, |c| c.event_idx = true);
    // avail_event: after flags, idx and four elements of eight bytes.
    let avail_event = b.layout.device_area + 4 + 32;
    assert!(!b.device.enable_notifications());
    let bytes = b.memory.bytes(avail_event, 2);
    assert_eq!(bytes, [0, 0], "the request with index 0");
    b.device.disable_notifications();
    let bytes = b.memory.bytes(avail_event, 2);
    assert_eq!(bytes, [0xff, 0xff], "65535 requests from now");
}

#[test]
fn split_flags_suppress_without_event_idx() {
    let mut b = Bench::split(4);
    b.device.push(0, 1, 0);
    assert!(b.device.publish());
    b.memory
        .mapping
        .write(b.layout.driver_area as usize, &[1, 0]);
    b.device.push(0, 1, 0);
    assert!(!b.device.publish(), "VIRTQ_AVAIL_F_NO_INTERRUPT");
    b.device.disable_notifications();
    assert_eq!(b.memory.bytes(b.layout.device_area, 2), [1, 0]);
    assert!(!b.device.enable_notifications());
    assert_eq!(b.memory.bytes(b.layout.device_area, 2), [0, 0]);
}

#[test]
fn packed_chain_and_used_element_are_laid_out_by_clause_2_8() {
    let mut b = Bench::packed(3);
    let mapping = b.memory.mapping.clone();
    let write = |at: usize, bytes: &[u8]| mapping.write(at, bytes);
    // Descriptor 0: 16 readable bytes at 0x80010, NEXT and AVAIL.
    write(0, &[0x10, 0, 8, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0x81, 0]);
    // Descriptor 1: 513 writable bytes at 0x81000, ID 2, WRITE and AVAIL.
    write(16, &[0, 0x10, 8, 0, 0, 0, 0, 0, 1, 2, 0, 0, 2, 0, 0x82, 0]);
    assert_eq!(b.device.available(), 1);
    assert_eq!(b.pop(), Ok(true));
    assert_eq!((b.chain.id, b.chain.descriptors), (2, 2));
    assert_eq!((b.chain.readable, b.chain.writable), (16, 513));
    assert_eq!(
        b.memory.elements(&b.chain),
        [(0x8_0010, 16), (0x8_1000, 513)]
    );
    assert_eq!(b.pop(), Ok(false));
    b.device.push(2, 2, 0x0102);
    assert_eq!(b.memory.bytes(14, 2), [0x81, 0], "not before publish");
    assert!(b.device.publish());
    // Length 0x102, ID 2, AVAIL, USED and WRITE.
    assert_eq!(b.memory.bytes(8, 8), [2, 1, 0, 0, 2, 0, 0x82, 0x80]);
    // Available and used position: descriptor 2, wrap counter 1.
    assert_eq!(b.device.base(), 0x8002_8002);
    // The last descriptor: then the ring wraps and the counters change.
    write(32, &[0, 0, 8, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0x80, 0]);
    assert_eq!(b.pop(), Ok(true));
    b.device.push(1, 1, 0);
    b.device.publish();
    assert_eq!(b.memory.bytes(32 + 8, 8), [0, 0, 0, 0, 1, 0, 0x80, 0x80]);
    assert_eq!(b.device.base(), 0);
    assert_eq!(b.pop(), Ok(false), "AVAIL now means: USED set, AVAIL not");
    b.memory.mapping.write(14, &[0, 0x80]);
    assert_eq!(b.pop(), Ok(true));
    b.device.push(0, 1, 7);
    b.device.publish();
    assert_eq!(b.memory.bytes(14, 2), [2, 0]);
}

#[test]
fn packed_event_suppression_is_offset_and_wrap_then_flags() {
    let mut b = Bench::new(8, true, |c| c.event_idx = true);
    let area = b.layout.device_area;
    assert!(!b.device.enable_notifications());
    assert_eq!(
        b.memory.bytes(area, 4),
        [0, 0x80, 2, 0],
        "RING_EVENT_FLAGS_DESC at descriptor 0, wrap counter 1"
    );
    b.device.disable_notifications();
    assert_eq!(b.memory.bytes(area, 4), [0, 0x80, 1, 0]);
    let mut without = Bench::packed(8);
    without.device.disable_notifications();
    assert!(!without.device.enable_notifications());
    let area = without.layout.device_area;
    assert_eq!(without.memory.bytes(area, 4), [0, 0, 0, 0]);

    let events = b.layout.driver_area as usize;
    let mut answer = |bytes: [u8; 4]| {
        b.memory.mapping.write(events, &bytes);
        b.device.push(0, 1, 0);
        b.device.publish()
    };
    assert!(!answer([0, 0, 1, 0]), "RING_EVENT_FLAGS_DISABLE");
    assert!(answer([0, 0, 0, 0]), "RING_EVENT_FLAGS_ENABLE");
    assert!(answer([2, 0x80, 2, 0]), "descriptor 2 is used now");
    assert!(!answer([2, 0x80, 2, 0]), "descriptor 3 was asked for");
    assert!(!answer([4, 0, 2, 0]), "the other round");
}

#[test]
fn driver_lays_a_split_chain_out_as_clause_2_7_says() {
    let mut p = Pair::new(4, false, false, 0);
    let id = p
        .driver
        .add(&[(0x8_0010, 16)], &[(0x8_1000, 513)], 77)
        .unwrap();
    assert_eq!(id, 0);
    assert_eq!(
        p.memory.bytes(0, 32),
        [
            0x10, 0, 8, 0, 0, 0, 0, 0, 16, 0, 0, 0, 1, 0, 1, 0, //
            0, 0x10, 8, 0, 0, 0, 0, 0, 1, 2, 0, 0, 2, 0, 0, 0,
        ]
    );
    assert_eq!(p.memory.bytes(p.layout.driver_area, 6), [0; 6]);
    assert!(p.driver.publish());
    assert_eq!(p.memory.bytes(p.layout.driver_area, 6), [0, 0, 1, 0, 0, 0]);
}

#[test]
fn driver_lays_a_packed_chain_out_as_clause_2_8_says() {
    let mut p = Pair::new(4, true, false, 0);
    p.driver
        .add(&[(0x8_0010, 16)], &[(0x8_1000, 513)], 77)
        .unwrap();
    assert_eq!(p.memory.bytes(14, 2), [0, 0], "not before publish");
    assert!(p.driver.publish());
    assert_eq!(
        p.memory.bytes(0, 32),
        [
            0x10, 0, 8, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0x81, 0, //
            0, 0x10, 8, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0x82, 0,
        ]
    );
}

//! Violations by a driver, and the device's errors: an error of the ring breaks the queue, reported once; an error of a request refuses
//! that request only.

mod common;

use common::{Bench, DATA, MEMORY, Memory};
use virtqueue::driver::RingLayout;
use virtqueue::{DeviceQueue, QueueConfig, QueueError};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const AVAIL: u16 = 0x80;
const USED: u16 = 0x8000;
const TABLE: u64 = 0x4_0000;

#[test]
fn split_loop_of_two_descriptors_is_refused() {
    let mut b = Bench::split(4);
    b.raw.set_descriptor(0, DATA, 1, NEXT, 1);
    b.raw.set_descriptor(1, DATA, 1, NEXT, 0);
    assert_eq!(
        b.refused(),
        QueueError::TooManyDescriptors { head: 0, limit: 4 }
    );
}

#[test]
fn split_descriptor_that_is_its_own_next_is_refused() {
    let mut b = Bench::split(4);
    b.raw.set_descriptor(0, DATA, 1, NEXT, 0);
    assert!(matches!(b.refused(), QueueError::TooManyDescriptors { .. }));
}

#[test]
fn split_chain_of_all_descriptors_is_accepted() {
    let mut b = Bench::split(4);
    for i in 0..3 {
        b.raw.set_descriptor(i, DATA, 1, NEXT, i + 1);
    }
    b.raw.set_descriptor(3, DATA, 1, 0, 0);
    b.raw.set_available_entry(0, 0);
    b.raw.set_available_index(1);
    assert_eq!(b.pop(), Ok(true));
    assert_eq!((b.chain.descriptors, b.chain.readable), (4, 4));
}

#[test]
fn split_head_outside_of_the_table_is_refused() {
    for head in [4, 5, 0xffff] {
        let mut b = Bench::split(4);
        b.raw.set_available_entry(0, head);
        b.raw.set_available_index(1);
        assert_eq!(b.refused_as_is(), QueueError::Head { head, size: 4 });
    }
}

#[test]
fn split_next_outside_of_the_table_is_refused() {
    let mut b = Bench::split(4);
    b.raw.set_descriptor(0, DATA, 1, NEXT, 4);
    assert_eq!(b.refused(), QueueError::Next { next: 4, length: 4 });
}

#[test]
fn split_next_without_its_flag_is_ignored() {
    let mut b = Bench::split(4);
    b.raw.set_descriptor(0, DATA, 1, 0, 0xffff);
    b.raw.set_available_index(1);
    assert_eq!(b.pop(), Ok(true));
}

#[test]
fn split_available_index_too_far_ahead_is_refused() {
    for (index, ok) in [(4, true), (5, false), (0x8000, false), (0xffff, false)] {
        let mut b = Bench::split(4);
        b.raw.set_descriptor(0, DATA, 1, 0, 0);
        b.raw.set_available_index(index);
        if ok {
            assert_eq!(b.pop(), Ok(true));
        } else {
            let want = QueueError::AvailableIndex {
                index,
                expected: 0,
                ahead: index,
                size: 4,
            };
            assert_eq!(b.refused_as_is(), want);
        }
    }
}

#[test]
fn split_entry_that_was_seen_is_not_read_again() {
    let mut b = Bench::split(4);
    b.raw.set_descriptor(1, DATA, 1, 0, 0);
    b.raw.set_descriptor(2, DATA, 2, 0, 0);
    b.raw.set_available_entry(0, 1);
    b.raw.set_available_entry(1, 2);
    b.raw.set_available_index(2);
    assert_eq!((b.pop(), b.chain.id), (Ok(true), 1));
    b.raw.set_available_entry(1, 0xffff);
    assert_eq!((b.pop(), b.chain.id, b.chain.readable), (Ok(true), 2, 2));
}

#[test]
fn overfull_split_ring_is_answered_round_its_end() {
    for offered in [4u16, 5, 10, 130, 300] {
        let mut b = Bench::split(4);
        b.raw.set_descriptor(0, DATA, 1, 0, 0);
        // Memory is zeroed, so all heads are 0: the same buffer repeatedly, while still in flight.
        for at in 0..offered {
            b.raw.set_available_index(at + 1);
            assert_eq!(b.pop(), Ok(true));
            b.device.push(b.chain.id, 1, u32::from(at) + 1);
        }
        assert_eq!(b.used().0, 0, "not published yet");
        b.device.publish();
        let lengths =
            [0, 1, 2, 3].map(|remainder| (0..offered).rev().find(|at| at % 4 == remainder));
        assert_eq!(
            b.used(),
            (
                offered,
                lengths.map(|at| at.map_or(0, |at| u32::from(at) + 1))
            )
        );
    }
}

#[test]
fn split_available_index_that_goes_back_is_refused() {
    let mut b = Bench::split(4);
    b.raw.set_descriptor(0, DATA, 1, 0, 0);
    b.raw.set_available_index(2);
    assert_eq!(b.pop(), Ok(true));
    assert_eq!(b.pop(), Ok(true));
    b.raw.set_available_index(1);
    assert!(matches!(
        b.refused_as_is(),
        QueueError::AvailableIndex { ahead: 0xffff, .. }
    ));
}

#[test]
fn split_indirect_in_indirect_is_refused_alone() {
    let mut b = Bench::split(4);
    b.table(TABLE, &[(TABLE + 64, 16, INDIRECT, 0)]);
    b.raw.set_descriptor(0, TABLE, 16, INDIRECT, 0);
    assert_eq!(
        b.refused_alone().0,
        QueueError::IndirectInIndirect { table: TABLE }
    );
}

#[test]
fn split_indirect_with_next_is_refused_alone() {
    let mut b = Bench::split(4);
    b.table(TABLE, &[(DATA, 16, 0, 0)]);
    b.raw.set_descriptor(0, TABLE, 16, INDIRECT | NEXT, 1);
    b.raw.set_descriptor(1, DATA, 16, 0, 0);
    assert_eq!(
        b.refused_alone().0,
        QueueError::IndirectLinked { table: TABLE }
    );
}

#[test]
fn indirect_length_of_zero_or_of_no_multiple_of_16_is_refused_alone() {
    for length in [0, 1, 15, 17, 0xffff_ffff] {
        let mut b = Bench::split(4);
        b.raw.set_descriptor(0, TABLE, length, INDIRECT, 0);
        let table = TABLE;
        assert_eq!(
            b.refused_alone().0,
            QueueError::IndirectLength { table, length }
        );
        let mut b = Bench::packed(4);
        b.raw.set_packed(0, TABLE, length, 0, INDIRECT | AVAIL);
        let want = QueueError::IndirectLength { table, length };
        assert_eq!(b.refused_alone_as_is().0, want);
    }
}

#[test]
fn split_indirect_next_outside_of_its_table_is_refused_alone() {
    let mut b = Bench::split(4);
    // The third descriptor exists, but the table ends before it.
    b.table(
        TABLE,
        &[(DATA, 1, NEXT, 2), (DATA, 1, 0, 0), (DATA, 1, 0, 0)],
    );
    b.raw.set_descriptor(0, TABLE, 32, INDIRECT, 0);
    assert_eq!(b.refused_alone().0, QueueError::Next { next: 2, length: 2 });
}

#[test]
fn split_loop_in_an_indirect_table_is_refused_alone() {
    let mut b = Bench::new(4, false, |c| c.max_chain_descriptors = 8);
    b.table(TABLE, &[(DATA, 1, NEXT, 1), (DATA, 1, NEXT, 0)]);
    b.raw.set_descriptor(0, TABLE, 32, INDIRECT, 0);
    assert_eq!(
        b.refused_alone().0,
        QueueError::TooManyDescriptors { head: 0, limit: 8 }
    );
}

#[test]
fn indirect_table_outside_of_memory_is_refused_alone() {
    for table in [
        MEMORY as u64 - 16,
        MEMORY as u64,
        u64::MAX - 15,
        u64::MAX - 31,
    ] {
        let mut b = Bench::split(4);
        if table < MEMORY as u64 {
            b.table(table, &[(DATA, 1, NEXT, 1)]);
        }
        b.raw.set_descriptor(0, table, 32, INDIRECT, 0);
        let (address, length) = (table, 32);
        assert_eq!(
            b.refused_alone().0,
            QueueError::NotMapped { address, length }
        );
    }
}

#[test]
fn split_indirect_table_is_read_by_its_links_in_any_order() {
    let (header, data, answer) = ((DATA, 16), (DATA + 512, 128), (DATA + 1024, 1));
    let whole = [
        (header.0, header.1, NEXT, 1),
        (data.0, data.1, NEXT | WRITE, 2),
        (answer.0, answer.1, WRITE, 0),
    ];
    let element = |at: usize, next| (whole[at].0, whole[at].1, whole[at].2, next);
    let tables = [
        vec![element(0, 1), element(1, 2), element(2, 7)],
        vec![element(0, 2), element(2, 0), element(1, 1)],
        // No link leads to the descriptors between and after those of the chain.
        vec![
            element(0, 3),
            element(2, 1),
            whole[0],
            element(1, 4),
            element(2, 0),
            whole[0],
        ],
    ];
    let mut b = Bench::split(8);
    // The first chains give the fast path the memory and the chain its capacity.
    for (round, table) in tables.iter().cycle().take(9).enumerate() {
        b.table(TABLE, table);
        let bytes = 16 * table.len() as u32;
        b.raw.set_descriptor(0, TABLE, bytes, INDIRECT, 0);
        b.raw.set_available_entry(round as u16 % 8, 0);
        b.raw.set_available_index(round as u16 + 1);
        assert_eq!(b.pop(), Ok(true), "{round}");
        assert_eq!((b.chain.readable, b.chain.writable), (16, 129), "{round}");
        assert_eq!(
            b.memory.elements(&b.chain),
            [header, data, answer],
            "{round}"
        );
        b.device.push(0, 1, 129);
        b.device.publish();
    }
}

#[test]
fn split_direct_descriptors_before_an_indirect_one_are_accepted() {
    let mut b = Bench::split(4);
    b.table(
        TABLE,
        &[(DATA + 16, 16, NEXT | WRITE, 1), (DATA + 32, 16, WRITE, 0)],
    );
    b.raw.set_descriptor(0, DATA, 16, NEXT, 1);
    // "The device MUST ignore the write-only flag in the descriptor that refers to an indirect table".
    b.raw.set_descriptor(1, TABLE, 32, INDIRECT | WRITE, 0);
    b.raw.set_available_index(1);
    assert_eq!(b.pop(), Ok(true));
    assert_eq!((b.chain.readable, b.chain.writable), (16, 32));
}

#[test]
fn readable_element_after_a_writable_one_is_refused_alone() {
    let mut b = Bench::split(4);
    b.raw.set_descriptor(0, DATA, 16, NEXT | WRITE, 1);
    b.raw.set_descriptor(1, DATA + 16, 16, 0, 0);
    let address = DATA + 16;
    assert_eq!(
        b.refused_alone().0,
        QueueError::ReadableAfterWritable { address }
    );
    let mut b = Bench::packed(4);
    b.raw.set_packed(0, DATA, 16, 0, NEXT | WRITE | AVAIL);
    b.raw.set_packed(1, DATA + 16, 16, 0, AVAIL);
    let want = QueueError::ReadableAfterWritable { address };
    assert_eq!(b.refused_alone_as_is().0, want);
}

#[test]
fn zero_length_elements_are_skipped_wherever_they_are() {
    let mut b = Bench::split(8);
    b.raw.set_descriptor(0, DATA, 0, NEXT | WRITE, 1);
    b.raw.set_descriptor(1, DATA, 16, NEXT, 2);
    b.raw.set_descriptor(2, u64::MAX, 0, NEXT, 3);
    b.raw.set_descriptor(3, DATA + 16, 8, NEXT | WRITE, 4);
    b.raw.set_descriptor(4, DATA, 0, 0, 0);
    b.raw.set_available_index(1);
    assert_eq!(b.pop(), Ok(true));
    assert_eq!((b.chain.readable, b.chain.writable), (16, 8));
    assert_eq!(b.memory.elements(&b.chain), [(DATA, 16), (DATA + 16, 8)]);
    let mut b = Bench::packed(4);
    b.raw.set_packed(0, DATA, 0, 3, AVAIL);
    assert_eq!(b.pop(), Ok(true));
    assert_eq!((b.chain.id, b.chain.buffer.total_len()), (3, 0));
}

#[test]
fn refused_chain_has_the_place_of_its_error_where_there_is_one() {
    let good = |b: &Bench| {
        b.raw.set_descriptor(1, DATA, 16, NEXT, 2);
        b.raw.set_descriptor(2, DATA + 64, 100, NEXT | WRITE, 3);
        b.raw.set_descriptor(3, DATA + 256, 100, NEXT | WRITE, 4);
        b.raw.set_descriptor(4, DATA + 512, 1, WRITE, 0);
    };
    // A readable element outside of memory comes first. Cases: the remaining response space if other elements are invalid, too.
    type Change = fn(&Bench);
    let cases: [(Change, u32, bool); 5] = [
        (|_| {}, 128, true),
        (
            |b| b.raw.set_descriptor(4, u64::MAX, 1, WRITE, 0),
            128,
            false,
        ),
        (
            |b| b.raw.set_descriptor(3, 1 << 40, 100, NEXT | WRITE, 4),
            100,
            true,
        ),
        (
            |b| b.raw.set_descriptor(2, 1 << 40, 100, NEXT | WRITE, 3),
            0,
            true,
        ),
        (|b| b.raw.set_descriptor(4, DATA + 512, 1, 0, 0), 128, true),
    ];
    for (change, front, last) in cases {
        let mut b = Bench::split(8);
        b.raw.set_descriptor(0, 1 << 50, 8, NEXT, 1);
        good(&b);
        change(&b);
        let (error, space) = b.refused_alone();
        let (address, length) = (1 << 50, 8);
        assert_eq!(error, QueueError::NotMapped { address, length });
        assert_eq!((space.front, space.last), (front, last));
        assert_eq!((b.chain.id, b.chain.descriptors), (0, 5));
        assert_eq!(b.chain.readable, 0);
        let wanted = front as usize + usize::from(last);
        assert_eq!(b.chain.buffer.total_len(), wanted);
        b.device.push(b.chain.id, b.chain.descriptors, 0);
        b.device.publish();
        assert_eq!(b.used(), (1, [0; 4]));
    }
}

#[test]
fn packed_chain_that_is_refused_keeps_its_place_in_the_ring() {
    let mut b = Bench::packed(4);
    b.raw.set_packed(0, 1 << 50, 16, 0, NEXT | AVAIL);
    b.raw.set_packed(1, DATA, 16, 0, NEXT | AVAIL | WRITE);
    b.raw.set_packed(2, DATA + 16, 1, 2, AVAIL | WRITE);
    b.raw.set_packed(3, DATA, 7, 1, AVAIL);
    let Err(virtqueue::PopError::Request(refusal)) = b.pop() else {
        panic!("it has to be refused");
    };
    assert_eq!((refusal.space.front, refusal.space.last), (17, true));
    assert_eq!((b.chain.id, b.chain.descriptors), (2, 3));
    b.device.push(2, 3, 1);
    assert_eq!(b.pop(), Ok(true));
    assert_eq!((b.chain.id, b.chain.readable), (1, 7));
}

/// The status is the last byte of a table of any length; an endless table has none.
#[test]
fn place_in_a_table_that_is_too_long_is_its_end() {
    for packed in [false, true] {
        for (entries, ends) in [(1000u16, true), (1000, false)] {
            let mut b = Bench::new(4, packed, |c| c.max_chain_descriptors = 8);
            for i in 0..entries {
                let next = if i + 1 < entries { i + 1 } else { 0 };
                let more = if next != 0 || !ends { NEXT } else { 0 };
                let (flags, id) = if packed {
                    (0, WRITE)
                } else {
                    (WRITE | more, next)
                };
                let address = DATA + u64::from(i) * 32;
                b.table(TABLE + 16 * u64::from(i), &[(address, 16, flags, id)]);
            }
            let bytes = 16 * u32::from(entries);
            let (error, space) = if packed {
                // Flags are in the place of split descriptors' `next`.
                b.raw.set_packed(0, TABLE, bytes, 0, INDIRECT | AVAIL);
                b.refused_alone_as_is()
            } else {
                b.raw.set_descriptor(0, TABLE, bytes, INDIRECT, 0);
                b.refused_alone()
            };
            let (head, limit) = (0, 8);
            assert_eq!(error, QueueError::TooManyDescriptors { head, limit });
            assert_eq!((space.front, space.last), (128, ends || packed));
            if space.last {
                b.chain.buffer.write_last(0xa5);
                let end = DATA + 999 * 32 + 15;
                assert_eq!(b.memory.bytes(end, 1), [0xa5]);
            }
        }
    }
}

#[test]
fn element_outside_of_memory_is_refused_alone() {
    let end = MEMORY as u64;
    for (address, length) in [(end, 1), (end - 1, 2), (0, u32::MAX), (u64::MAX, 2)] {
        let want = QueueError::NotMapped {
            address,
            length: u64::from(length),
        };
        let mut b = Bench::split(4);
        b.raw.set_descriptor(0, address, length, 0, 0);
        assert_eq!(b.refused_alone().0, want);
        let mut b = Bench::packed(4);
        b.raw.set_packed(0, address, length, 0, AVAIL);
        assert_eq!(b.refused_alone_as_is().0, want);
    }
}

#[test]
fn chain_longer_than_the_limit_is_refused_alone() {
    let mut b = Bench::new(4, false, |c| c.max_chain_bytes = 4096);
    b.raw.set_descriptor(0, DATA, 4096, NEXT, 1);
    b.raw.set_descriptor(1, DATA, 1, WRITE, 0);
    let want = QueueError::TooLong {
        length: 4097,
        limit: 4096,
    };
    assert_eq!(b.refused_alone().0, want);
}

#[test]
fn chain_above_32_bits_of_bytes_is_refused_before_overflow() {
    // Elements may refer to the same memory repeatedly.
    let length = MEMORY as u32;
    let mut b = Bench::new(4, false, |c| c.max_chain_descriptors = 0xffff);
    for i in 0..4096u16 {
        b.table(TABLE + 16 * u64::from(i), &[(0, length, NEXT, i + 1)]);
    }
    b.table(TABLE + 16 * 4095, &[(0, length, 0, 0)]);
    b.raw.set_descriptor(0, TABLE, 16 * 4096, INDIRECT, 0);
    let want = QueueError::TooLong {
        length: 1 << 32,
        limit: u32::MAX,
    };
    assert_eq!(b.refused_alone().0, want);
}

#[test]
fn chain_through_a_table_may_be_longer_than_the_queue_up_to_the_limit() {
    let mut b = Bench::new(2, false, |c| c.max_chain_descriptors = 3);
    for i in 0..4u16 {
        b.table(TABLE + 16 * u64::from(i), &[(DATA, 1, NEXT, i + 1)]);
    }
    b.table(TABLE + 32, &[(DATA, 1, 0, 0)]);
    b.raw.set_descriptor(0, TABLE, 64, INDIRECT, 0);
    b.raw.set_available_index(1);
    assert_eq!(b.pop(), Ok(true));
    b.table(TABLE + 32, &[(DATA, 1, NEXT, 3)]);
    b.raw.set_available_index(2);
    assert_eq!(
        b.refused_alone_as_is().0,
        QueueError::TooManyDescriptors { head: 0, limit: 3 }
    );
}

#[test]
fn packed_chain_that_is_not_wholly_available_is_refused() {
    let mut b = Bench::packed(4);
    b.raw.set_packed(0, DATA, 16, 0, NEXT | AVAIL);
    b.raw.set_packed(1, DATA, 16, 0, 0);
    assert_eq!(b.refused_as_is(), QueueError::Incomplete { head: 0 });
}

#[test]
fn packed_chain_round_the_ring_is_refused() {
    let mut b = Bench::packed(4);
    for i in 0..4 {
        b.raw.set_packed(i, DATA, 16, 0, NEXT | AVAIL);
    }
    assert_eq!(b.refused_as_is(), QueueError::Incomplete { head: 0 });
    // A ring cannot also appear available in the next round: one descriptor would need two states.
    let mut b = Bench::packed(1);
    b.raw.set_packed(0, DATA, 16, 0, NEXT | AVAIL);
    assert_eq!(b.refused_as_is(), QueueError::Incomplete { head: 0 });
}

#[test]
fn packed_buffer_id_outside_of_the_queue_is_refused() {
    let mut b = Bench::packed(4);
    b.raw.set_packed(0, DATA, 16, 4, AVAIL);
    assert_eq!(b.refused_as_is(), QueueError::BufferId { id: 4, size: 4 });
}

#[test]
fn packed_indirect_linked_with_others_is_refused_alone() {
    let mut b = Bench::packed(4);
    b.raw.set_packed(0, TABLE, 16, 0, INDIRECT | NEXT | AVAIL);
    b.raw.set_packed(1, DATA, 16, 0, AVAIL);
    let want = QueueError::IndirectLinked { table: TABLE };
    assert_eq!(b.refused_alone_as_is().0, want);
    let mut b = Bench::packed(4);
    b.raw.set_packed(0, DATA, 16, 0, NEXT | AVAIL);
    b.raw.set_packed(1, TABLE, 16, 0, INDIRECT | AVAIL);
    assert_eq!(b.refused_alone_as_is().0, want);
}

#[test]
fn packed_indirect_table_longer_than_the_limit_is_refused_alone() {
    let mut b = Bench::new(4, true, |c| c.max_chain_descriptors = 2);
    b.table(TABLE, &[(DATA, 1, 0, 0); 3]);
    b.raw.set_packed(0, TABLE, 48, 0, INDIRECT | AVAIL);
    assert_eq!(
        b.refused_alone_as_is().0,
        QueueError::TooManyDescriptors { head: 0, limit: 2 }
    );
}

#[test]
fn packed_indirect_table_heeds_no_flag_but_write() {
    let mut b = Bench::packed(4);
    // Fields: address, length, id, flags.
    let all = NEXT | INDIRECT | AVAIL | USED;
    b.table(TABLE, &[(DATA, 16, 0xffff, all), (DATA, 8, 7, all | WRITE)]);
    b.raw.set_packed(0, TABLE, 32, 3, INDIRECT | WRITE | AVAIL);
    assert_eq!(b.pop(), Ok(true));
    assert_eq!((b.chain.id, b.chain.descriptors), (3, 1));
    assert_eq!((b.chain.readable, b.chain.writable), (16, 8));
}

#[test]
fn nothing_available_is_no_mistake() {
    for mut b in [Bench::split(4), Bench::packed(4)] {
        assert_eq!(b.pop(), Ok(false));
        assert_eq!(b.device.available(), 0);
        assert!(!b.device.enable_notifications());
    }
}

fn refusal(config: QueueConfig) -> QueueError {
    DeviceQueue::new(config, &Memory::new().table).unwrap_err()
}

#[test]
fn queue_sizes_that_the_standard_forbids_are_refused() {
    for size in [0, 3, 1000, 0x8001, 0xffff] {
        let error = refusal(QueueConfig::split(size, 0, 0x1000, 0x2000));
        assert!(matches!(error, QueueError::Size { .. }), "{size}: {error}");
    }
    for size in [0, 0x8001, 0xffff] {
        let error = refusal(QueueConfig::packed(size, 0, 0x1000, 0x2000));
        assert!(matches!(error, QueueError::Size { .. }), "{size}: {error}");
    }
    let layout = RingLayout::at(0, 1000, true);
    assert!(DeviceQueue::new(layout.device_config(), &Memory::new().table).is_ok());
}

#[test]
fn unaligned_rings_are_refused() {
    for (d, a, u) in [
        (8, 0x1000, 0x2000),
        (0, 0x1001, 0x2000),
        (0, 0x1000, 0x2002),
    ] {
        let error = refusal(QueueConfig::split(4, d, a, u));
        assert!(matches!(error, QueueError::Unaligned { .. }), "{error}");
    }
    for (d, a, u) in [
        (8, 0x1000, 0x2000),
        (0, 0x1002, 0x2000),
        (0, 0x1000, 0x2002),
    ] {
        let error = refusal(QueueConfig::packed(4, d, a, u));
        assert!(matches!(error, QueueError::Unaligned { .. }), "{error}");
    }
}

#[test]
fn rings_outside_of_memory_are_refused() {
    let end = MEMORY as u64;
    for (d, a, u) in [
        (end - 48, 0, 0x1000),
        (0, end, 0x1000),
        (0, 0x1000, end - 4),
        (0u64.wrapping_sub(16), 0, 0x1000),
    ] {
        let error = refusal(QueueConfig::split(4, d, a, u));
        assert!(matches!(error, QueueError::RingNotMapped { .. }), "{error}");
    }
}

#[test]
fn packed_base_outside_of_the_ring_is_refused() {
    for base in [4, 0x8004, 4 << 16, 0xffff_ffff] {
        let config = QueueConfig {
            base,
            ..QueueConfig::packed(4, 0, 0x1000, 0x2000)
        };
        assert_eq!(refusal(config), QueueError::Base { base, size: 4 });
    }
}

#[test]
fn removed_ring_memory_is_refused_and_the_old_one_stays() {
    let mut b = Bench::split(4);
    let size = MEMORY as u64;
    let without = b.memory.table.without_region(0, 0x7f00_0000_0000, size);
    let error = b.device.set_memory(&without.unwrap()).unwrap_err();
    assert!(matches!(error, QueueError::RingNotMapped { .. }));
    b.raw.set_descriptor(0, DATA, 1, 0, 0);
    b.raw.set_available_index(1);
    assert_eq!(b.pop(), Ok(true));
}

#[test]
fn errors_name_the_values() {
    let error = QueueError::Next { next: 9, length: 4 };
    assert_eq!(
        error.to_string(),
        "next descriptor 9 is outside of a table of 4 descriptors"
    );
    let error = QueueError::NotMapped {
        address: 0x10,
        length: 3,
    };
    assert_eq!(
        error.to_string(),
        "address 0x10 + 3 bytes is not in the client's memory"
    );
}

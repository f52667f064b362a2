//! Ring layouts and notifications: data through every kind of ring, with full rings and odd descriptors.

use vhost_frontend::{Layout, Options, QueueOptions, feature};

use crate::io::{BLOCK, Io};
use crate::{Devices, Target, Test, Verdict, equal, needs};

/// Kind of ring.
#[derive(Clone, Copy)]
struct Ring {
    packed: bool,
    event_idx: bool,
    indirect: bool,
    size: u16,
    layout: Layout,
}

const SPLIT: Ring = Ring {
    packed: false,
    event_idx: false,
    indirect: false,
    size: 64,
    layout: Layout::Separate,
};
const PACKED: Ring = Ring {
    packed: true,
    ..SPLIT
};

const fn with_events(ring: Ring) -> Ring {
    Ring {
        event_idx: true,
        ..ring
    }
}

const fn with_tables(ring: Ring) -> Ring {
    Ring {
        indirect: true,
        ..ring
    }
}

const fn of_size(ring: Ring, size: u16) -> Ring {
    Ring { size, ..ring }
}

const fn with_layout(ring: Ring, layout: Layout) -> Ring {
    Ring { layout, ..ring }
}

const fn test(title: &'static str, clause: &'static str, run: fn(&Target) -> Verdict) -> Test {
    Test::new("rings", Devices::Any, title, clause, run)
}

const SPLIT_CLAUSE: &str = "virtio 1.3, 2.7";
const PACKED_CLAUSE: &str = "virtio 1.3, 2.8";
const EVENT_CLAUSE: &str = "virtio 1.3, 2.7.10: VIRTIO_F_EVENT_IDX";
const PACKED_EVENTS: &str = "virtio 1.3, 2.8.10";
const TABLE_CLAUSE: &str = "virtio 1.3, 2.7.5.3";
const PACKED_TABLE: &str = "virtio 1.3, 2.8.7";
const FRAMING: &str = "virtio 1.3, 2.7.4: message framing";

pub(crate) const TESTS: &[Test] = &[
    test("split", SPLIT_CLAUSE, |t| check(t, SPLIT)),
    test("packed", PACKED_CLAUSE, |t| check(t, PACKED)),
    test("split with event index", EVENT_CLAUSE, |t| {
        check(t, with_events(SPLIT))
    }),
    test("packed with event index", PACKED_EVENTS, |t| {
        check(t, with_events(PACKED))
    }),
    test("split with indirect tables", TABLE_CLAUSE, |t| {
        check(t, with_tables(SPLIT))
    }),
    test("packed with indirect tables", PACKED_TABLE, |t| {
        check(t, with_tables(PACKED))
    }),
    test("split with event index and tables", EVENT_CLAUSE, |t| {
        check(t, with_tables(with_events(SPLIT)))
    }),
    test("packed with event index and tables", PACKED_EVENTS, |t| {
        check(t, with_tables(with_events(PACKED)))
    }),
    test("split of 4 entries", SPLIT_CLAUSE, |t| {
        check(t, of_size(SPLIT, 4))
    }),
    test("packed of 4 entries", PACKED_CLAUSE, |t| {
        check(t, of_size(PACKED, 4))
    }),
    test("packed of 5 entries", PACKED_CLAUSE, |t| {
        check(t, of_size(PACKED, 5))
    }),
    test("split of 1024 entries", SPLIT_CLAUSE, |t| {
        check(t, of_size(SPLIT, 1024))
    }),
    test("packed of 1024 entries", PACKED_CLAUSE, |t| {
        check(t, of_size(PACKED, 1024))
    }),
    test("header and data in one descriptor", FRAMING, |t| {
        check(t, with_layout(SPLIT, Layout::Merged))
    }),
    test("header and data in one packed descriptor", FRAMING, |t| {
        check(t, with_layout(PACKED, Layout::Merged))
    }),
    test("header over several descriptors", FRAMING, |t| {
        check(t, with_layout(of_size(SPLIT, 1024), Layout::MaxLength(15)))
    }),
    test("header over several packed descriptors", FRAMING, |t| {
        check(t, with_layout(of_size(PACKED, 1024), Layout::MaxLength(15)))
    }),
    test("data in unaligned descriptors", FRAMING, |t| {
        check(t, with_layout(of_size(SPLIT, 256), Layout::MaxLength(1001)))
    }),
    test("data in unaligned packed descriptors", FRAMING, |t| {
        check(
            t,
            with_layout(of_size(PACKED, 256), Layout::MaxLength(1001)),
        )
    }),
    test("unaligned descriptors in tables", FRAMING, |t| {
        let ring = with_layout(SPLIT, Layout::MaxLength(1001));
        check(t, with_tables(ring))
    }),
];

/// Reads twice and compares. Writes first if the disk may be written.
fn check(target: &Target, ring: Ring) -> Verdict {
    let options = Options {
        event_idx: ring.event_idx,
        ..Options::default()
    };
    let mut front_end = target.connect_ring(ring.packed, &options)?;
    let has = |bit| front_end.has(bit);
    needs(
        !ring.event_idx || has(feature::EVENT_IDX),
        "VIRTIO_F_EVENT_IDX",
    )?;
    needs(
        !ring.indirect || has(feature::INDIRECT_DESC),
        "VIRTIO_F_INDIRECT_DESC",
    )?;
    let options = QueueOptions {
        size: ring.size,
        indirect: ring.indirect.then_some(32),
        polled: false,
    };
    let mut io = Io::start(target, &mut front_end, 0, &options, ring.layout)?;
    // More chains than entries, so that the ring wraps.
    let rounds = 8 + u64::from(ring.size.min(128)) / 2;
    for round in 0..rounds {
        let offset = (round % 8) * BLOCK as u64;
        let (mut first, mut second) = ([0xaa; BLOCK], [0x55; BLOCK]);
        if target.is_destructive {
            let pattern: [u8; BLOCK] = std::array::from_fn(|at| (at as u64 + 7 * round) as u8);
            io.write(offset, &pattern)?;
            first = pattern;
        } else {
            io.read(offset, &mut first)?;
        }
        io.read(offset, &mut second)?;
        let same = first == second;
        equal(&format!("equal data at byte {offset}"), same, true)?;
    }
    Ok(())
}

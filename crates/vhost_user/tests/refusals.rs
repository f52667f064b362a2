//! Invalid requests that some drivers send: each is served, or refused alone with an error response if there is room for one, and the
//! session continues. `vhost_frontend::hostile` lists errors that end the session. Decisions:
//! `docs/adr/0003-a-broken-queue-ends-its-session.md`.

mod support;

use std::path::Path;
use std::time::{Duration, Instant};

use reactor::PollLimit;
use support::Rig;
use vhost_frontend::{Area, FrontEnd, Options, Queue, QueueOptions, feature};

const LIMIT: Duration = Duration::from_secs(30);

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const AVAIL: u16 = 0x80;
const USED: u16 = 0x8000;
/// Entries of the queue.
const SIZE: u16 = 512;
/// An address outside of all regions.
const NOWHERE: u64 = 1 << 50;

/// Offsets in the request's memory, 8 MiB from a multiple of 4096 on.
const HEADER: u64 = 0;
const STATUS: u64 = 1024;
const DATA: u64 = 4096;
const TABLE: u64 = 1 << 20;
const LARGE: u64 = 4 << 20;

/// Address, length, flags.
type Element = (u64, u32, u16);

/// Form of the chain.
#[derive(Clone, Copy, PartialEq)]
enum Layout {
    Direct,
    Table,
    /// A table with this declared length, and these flags besides INDIRECT.
    TableOf(u32, u16),
    /// A table with a last descriptor that links to this one; split rings only.
    TableEndsAt(u16),
}

/// Bytes written as reported by the device, and the byte in the response space.
type Outcome = (u32, u8);

/// No response space.
const NO_PLACE: Outcome = (0, 0xee);

struct Setup {
    front_end: FrontEnd,
    queue: Queue,
    at: Area,
    packed: bool,
    requests: u16,
    /// Number of used descriptors of a packed ring.
    places: u16,
}

impl Setup {
    fn start(socket: &Path, index: u16, packed: bool) -> Setup {
        let options = Options {
            packed,
            // Raw rings are driven here without a driver's wrap and used_event.
            event_idx: false,
            memory: 32 << 20,
            ..Options::default()
        };
        let mut front_end = FrontEnd::connect(socket, &options).unwrap();
        assert_eq!(front_end.has(feature::RING_PACKED), packed);
        let options = QueueOptions {
            size: SIZE,
            polled: true,
            ..QueueOptions::default()
        };
        let queue = front_end.start_queue(index, &options).unwrap();
        let at = front_end.allocate(16 << 20, 4096).unwrap();
        Setup {
            front_end,
            queue,
            at,
            packed,
            requests: 0,
            places: 0,
        }
    }

    /// Converts an offset in the request's memory to an address.
    fn address(&self, address: u64) -> u64 {
        match address {
            NOWHERE.. => address,
            offset => self.at.address + offset,
        }
    }

    /// Sends a chain and waits for its return. Returns the bytes written.
    fn send(&mut self, layout: Layout, elements: &[Element]) -> u32 {
        let mut chain: Vec<Element> = elements
            .iter()
            .map(|(address, length, flags)| (self.address(*address), *length, *flags))
            .collect();
        if layout != Layout::Direct {
            let mut bytes = Vec::new();
            for (i, (address, length, flags)) in chain.iter().enumerate() {
                let last = i + 1 == chain.len();
                let (next, more) = match layout {
                    Layout::TableEndsAt(next) if last => (next, NEXT),
                    _ if last => (0, 0),
                    _ => (i as u16 + 1, NEXT),
                };
                bytes.extend(address.to_le_bytes());
                bytes.extend(length.to_le_bytes());
                let words = match self.packed {
                    // An ID, and flags with WRITE as the only valid one.
                    true => [0, *flags],
                    false => [flags | more, next],
                };
                bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
            }
            self.at.write(TABLE as usize, &bytes);
            let (length, more) = match layout {
                Layout::TableOf(length, more) => (length, more),
                _ => (bytes.len() as u32, 0),
            };
            chain = vec![(self.at.address + TABLE, length, INDIRECT)];
            // The descriptor linked with the table; its position is unspecified.
            chain.extend((more == NEXT).then_some((self.address(DATA), 1, WRITE)));
        }
        self.give(&chain)
    }

    /// Puts a chain's descriptors into the ring and waits for its return.
    fn give(&mut self, chain: &[Element]) -> u32 {
        let (ring, number) = (self.queue.raw(), self.requests);
        self.requests += 1;
        let last = chain.len() - 1;
        let first = self.places;
        // The head is written last, because a packed ring's device checks it first.
        for (i, (address, length, flags)) in chain.iter().enumerate().rev() {
            let (at, more) = (i as u16, if i < last { NEXT } else { 0 });
            match self.packed {
                true => ring.set_packed(first + at, *address, *length, 5, flags | more | AVAIL),
                false => ring.set_descriptor(at, *address, *length, flags | more, at + 1),
            }
        }
        if self.packed {
            self.places += chain.len() as u16;
            assert!(self.places < SIZE, "once around the ring at most");
        } else {
            ring.set_available_entry(number, 0);
            ring.set_available_index(number + 1);
        }
        self.queue.kick();
        let ring = self.queue.raw();
        let until = Instant::now() + LIMIT;
        loop {
            assert!(!self.front_end.channel().is_closed(), "the session ended");
            assert!(Instant::now() < until, "it is not returned");
            if self.packed && ring.packed(first).flags.get() & (AVAIL | USED) == AVAIL | USED {
                let used = ring.packed(first);
                assert_eq!(used.id.get(), 5);
                return used.length.get();
            }
            if !self.packed && ring.used_index() == number + 1 {
                return ring.used_element(number).length.get();
            }
            std::thread::yield_now();
        }
    }

    fn byte(&self, at: u64) -> u8 {
        let mut byte = [0];
        self.at.read(at as usize, &mut byte);
        byte[0]
    }
}

/// Sends each case to a queue with either ring layout: an invalid request, then a valid one.
fn check_cases(
    (socket, index): (&Path, u16),
    header: &[u8],
    status: u64,
    good: &[Element],
    cases: &[Case],
) {
    for packed in [false, true] {
        let mut setup = Setup::start(socket, index, packed);
        setup.at.write(HEADER as usize, header);
        for Case(name, layout, elements, outcome) in cases {
            let only_split = matches!(layout, Layout::TableEndsAt(_))
                || elements.iter().any(|element| element.2 & INDIRECT != 0);
            if packed && only_split {
                continue;
            }
            setup.at.write(status as usize, &[0xee]);
            let written = setup.send(*layout, elements);
            let got = (written, setup.byte(status));
            let outcome = match packed && *layout == HUGE {
                true => NO_PLACE,
                false => *outcome,
            };
            assert_eq!(got, outcome, "{name}, packed {packed}");
            setup.at.write(status as usize, &[0xee]);
            setup.send(Layout::Direct, good);
            assert_eq!(setup.byte(status), 0, "good after {name}, packed {packed}");
        }
    }
}

/// A table with a declared length of 2^28 descriptors.
const HUGE: Layout = Layout::TableOf(0xffff_fff0, 0);

struct Case(&'static str, Layout, Vec<Element>, Outcome);

#[test]
#[allow(clippy::too_many_lines, reason = "a table of cases")]
fn disk_serves_or_refuses_alone_what_is_odd() {
    let (header, data, status) = ((HEADER, 16, 0), (DATA, 512, WRITE), (STATUS, 1, WRITE));
    let good = [header, data, status];
    // 1024 elements of 4 MiB in the same memory.
    let four_gib = std::iter::once(header)
        .chain(std::iter::repeat_n((LARGE, 4 << 20, WRITE), 1024))
        .chain([status]);
    let many = |count| {
        std::iter::once(header)
            .chain(std::iter::repeat_n((DATA, 1, WRITE), count))
            .chain([status])
            .collect::<Vec<_>>()
    };
    const OK: Outcome = (513, 0);
    const IOERR: Outcome = (1, 1);
    use Layout::{Direct, Table, TableEndsAt, TableOf};
    let cases = [
        Case("an indirect table", Table, good.to_vec(), OK),
        Case("no status", Direct, vec![header], NO_PLACE),
        Case("no header", Direct, vec![data, status], IOERR),
        Case(
            "a short header",
            Direct,
            vec![(HEADER, 15, 0), data, status],
            IOERR,
        ),
        Case(
            "a short header in a table",
            Table,
            vec![(HEADER, 15, 0), status],
            IOERR,
        ),
        Case("no bytes at all", Direct, vec![(HEADER, 0, 0)], NO_PLACE),
        Case(
            "elements without bytes",
            Direct,
            vec![
                (NOWHERE, 0, WRITE),
                header,
                (DATA, 0, 0),
                data,
                (DATA, 0, WRITE),
                status,
                (DATA, 0, 0),
            ],
            OK,
        ),
        Case(
            "elements without bytes in a table",
            Table,
            vec![header, (DATA, 0, 0), data, status, (NOWHERE, 0, WRITE)],
            OK,
        ),
        Case(
            "readable after writable",
            Direct,
            vec![header, data, (DATA, 512, 0), status],
            IOERR,
        ),
        Case(
            "readable after writable in a table",
            Table,
            vec![header, data, (DATA, 512, 0), status],
            IOERR,
        ),
        Case(
            "a header that is not there",
            Direct,
            vec![(NOWHERE, 16, 0), data, status],
            IOERR,
        ),
        Case(
            "data that are not there",
            Direct,
            vec![header, (NOWHERE, 512, WRITE), status],
            IOERR,
        ),
        Case(
            "data that are not there, in a table",
            Table,
            vec![header, (NOWHERE, 512, WRITE), status],
            IOERR,
        ),
        Case(
            "data beyond all addresses",
            Table,
            vec![header, (u64::MAX - 8, 512, WRITE), status],
            IOERR,
        ),
        Case(
            "a status that is not there",
            Direct,
            vec![header, data, (NOWHERE, 1, WRITE)],
            NO_PLACE,
        ),
        Case("more than 4 GiB", Table, four_gib.collect(), IOERR),
        Case("a table of 1,026 descriptors", Table, many(1024), (1025, 0)),
        Case("a table of 1,027 descriptors", Table, many(1025), IOERR),
        Case("a table of 5,000 descriptors", Table, many(4998), IOERR),
        Case("a table of 32,000 descriptors", Table, many(31_998), IOERR),
        Case("a table of nothing", TableOf(0, 0), good.to_vec(), NO_PLACE),
        Case(
            "a table of half a descriptor",
            TableOf(8, 0),
            good.to_vec(),
            NO_PLACE,
        ),
        Case(
            "a table of two and a half descriptors",
            TableOf(40, 0),
            good.to_vec(),
            NO_PLACE,
        ),
        // A split ring's table is read by its links, which end.
        Case("a table of 2^28 descriptors", HUGE, good.to_vec(), OK),
        Case(
            "a table in a table",
            Table,
            vec![header, (TABLE, 16, INDIRECT), data, status],
            IOERR,
        ),
        Case(
            "a table with a next index beyond its end",
            TableEndsAt(3),
            good.to_vec(),
            NO_PLACE,
        ),
        Case(
            "a table with a loop to its start",
            TableEndsAt(0),
            good.to_vec(),
            NO_PLACE,
        ),
        Case(
            "a table that is linked with others",
            TableOf(48, NEXT),
            good.to_vec(),
            NO_PLACE,
        ),
    ];
    let rig = Rig::polling(1, PollLimit::Never);
    let socket = rig.serve_ram("d", 1);
    // A read of sector 0.
    check_cases((&socket, 0), &[0; 16], STATUS, &good, &cases);
}

#[test]
#[allow(clippy::too_many_lines, reason = "a table of cases")]
fn controller_serves_or_refuses_alone_what_is_odd() {
    const RESPONSE: u64 = 2048;
    /// The response's last header byte.
    const CODE: u64 = RESPONSE + 11;
    const FAILURE: Outcome = (108, 9);
    let (request, response) = ((HEADER, 51, 0), (RESPONSE, 108, WRITE));
    // TEST UNIT READY, to target 0, unit 0.
    let good = [request, response];
    let data = (DATA, 512, WRITE);
    use Layout::{Direct, Table, TableEndsAt, TableOf};
    let many = std::iter::once(request)
        .chain([response])
        .chain(std::iter::repeat_n((DATA, 1, WRITE), 1100));
    let cases = [
        Case("an indirect table", Table, good.to_vec(), (108, 0)),
        Case("no response", Direct, vec![request], NO_PLACE),
        Case(
            "a short request",
            Direct,
            vec![(HEADER, 50, 0), response, data],
            FAILURE,
        ),
        Case(
            "a short response",
            Direct,
            vec![request, (RESPONSE, 107, WRITE)],
            (12, 9),
        ),
        Case(
            "no place for a code",
            Direct,
            vec![request, (RESPONSE, 11, WRITE)],
            NO_PLACE,
        ),
        Case(
            "a response in two pieces",
            Direct,
            vec![
                (HEADER, 50, 0),
                (RESPONSE, 10, WRITE),
                (RESPONSE + 10, 98, WRITE),
            ],
            FAILURE,
        ),
        Case(
            "data that are not there",
            Table,
            vec![request, response, (NOWHERE, 512, WRITE)],
            FAILURE,
        ),
        Case(
            "a response that is not there",
            Direct,
            vec![request, (NOWHERE, 108, WRITE), data],
            NO_PLACE,
        ),
        Case(
            "readable after writable",
            Direct,
            vec![request, response, (DATA, 512, 0)],
            FAILURE,
        ),
        Case(
            "a table of 1,102 descriptors",
            Table,
            many.collect(),
            FAILURE,
        ),
        Case(
            "elements without bytes",
            Direct,
            vec![(DATA, 0, WRITE), request, (DATA, 0, 0), response],
            (108, 0),
        ),
        Case(
            "a table of half a descriptor",
            TableOf(8, 0),
            good.to_vec(),
            NO_PLACE,
        ),
        Case(
            "a table with a next index beyond its end",
            TableEndsAt(3),
            good.to_vec(),
            FAILURE,
        ),
        Case(
            "a table with a loop to its start",
            TableEndsAt(0),
            good.to_vec(),
            FAILURE,
        ),
    ];
    let rig = Rig::polling(1, PollLimit::Never);
    let socket = rig.serve_controller(Duration::ZERO);
    check_cases((&socket, 2), &[1, 0, 0x40, 0], CODE, &good, &cases);
    // The control queue: the request type is unknown, so both response formats contain the error.
    let control = (HEADER, 3, 0);
    let good = [(HEADER, 24, 0), (STATUS, 1, WRITE)];
    let cases = [
        Case("no type", Direct, vec![control, (STATUS, 1, WRITE)], (1, 9)),
        Case(
            "no type, and room",
            Direct,
            vec![control, (STATUS, 5, WRITE)],
            (5, 9),
        ),
        Case("no response", Direct, vec![(HEADER, 24, 0)], NO_PLACE),
        Case(
            "a type that is not there",
            Direct,
            vec![(NOWHERE, 24, 0), (STATUS, 1, WRITE)],
            (1, 9),
        ),
    ];
    // ABORT TASK of a missing task.
    let abort = [[0; 8], [1, 0, 0x40, 0, 0, 0, 0, 0]].concat();
    check_cases((&socket, 0), &abort, STATUS, &good, &cases);
}

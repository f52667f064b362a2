//! Violations in a running ring.

use std::path::Path;
use std::time::{Duration, Instant};

use virtqueue::driver::RawRing;
use virtqueue::layout::{AVAIL, INDIRECT, NEXT, WRITE};

use super::{Case, LIMIT, case, started};
use crate::memory::Area;
use crate::{Error, FrontEnd, Queue, Result};

/// Size of the area that descriptors may point to.
const ROOM: usize = 16 << 10;

pub const CASES: &[Case] = &[
    case("a loop of descriptors", |socket| {
        split(socket, ends, 1, |ring, at| {
            ring.set_descriptor(0, at.address, 16, NEXT, 1);
            ring.set_descriptor(1, at.address, 16, NEXT, 0);
        })
    }),
    case("a descriptor that is its own next", |socket| {
        split(socket, ends, 1, |ring, at| {
            ring.set_descriptor(0, at.address, 1, NEXT, 0)
        })
    }),
    case("a next descriptor that does not exist", |socket| {
        split(socket, ends, 1, |ring, at| {
            ring.set_descriptor(0, at.address, 16, NEXT, 128)
        })
    }),
    case("a head that does not exist", |socket| {
        split(socket, ends, 1, |ring, _| {
            ring.set_available_entry(0, 65535)
        })
    }),
    case("an address outside of memory", |socket| {
        one(socket, |_| 0x10, 16)
    }),
    case("an address at the end of all addresses", |socket| {
        one(socket, |_| u64::MAX - 8, 16)
    }),
    case("a buffer that ends outside of memory", |socket| {
        one(socket, |at| at.address + ROOM as u64, 1 << 30)
    }),
    case("a length of 2^32 - 1", |socket| {
        one(socket, |at| at.address, u32::MAX)
    }),
    case("a length of 0", |socket| one(socket, |at| at.address, 0)),
    case("lengths with an overflowing sum", |socket| {
        split(socket, served, 1, |ring, at| {
            for index in 0..127 {
                ring.set_descriptor(index, at.address, 1 << 21, NEXT, index + 1);
            }
            ring.set_descriptor(127, at.address, u32::MAX, WRITE, 0);
        })
    }),
    case("a chain without room for a header", |socket| {
        split(socket, served, 1, |ring, at| {
            ring.set_descriptor(0, at.address, 15, NEXT, 1);
            ring.set_descriptor(1, at.address, 1, WRITE, 0);
        })
    }),
    case("a chain without room for a status", |socket| {
        split(socket, served, 1, |ring, at| {
            ring.set_descriptor(0, at.address, 16, 0, 0)
        })
    }),
    case("a chain without a header", |socket| {
        split(socket, served, 1, |ring, at| {
            ring.set_descriptor(0, at.address, 512, WRITE, 0)
        })
    }),
    case("a buffer to be read after one to be written", |socket| {
        split(socket, served, 1, |ring, at| {
            ring.set_descriptor(0, at.address, 16, NEXT, 1);
            ring.set_descriptor(1, at.address, 16, NEXT | WRITE, 2);
            ring.set_descriptor(2, at.address, 16, 0, 0);
        })
    }),
    case("an available index that jumps", |socket| {
        split(socket, ends, 129, |_, _| {})
    }),
    case("an available index that goes back", |socket| {
        split(socket, ends, 65535, |_, _| {})
    }),
    case("a head that is in flight already", |socket| {
        split(socket, ended_or_served, 2, |ring, _| {
            ring.set_available_entry(1, 0)
        })
    }),
    case("an indirect table of no descriptors", |socket| {
        indirect(socket, 0, |_| {})
    }),
    case("an indirect table of half a descriptor", |socket| {
        indirect(socket, 24, |_| {})
    }),
    case("an indirect table of 2^28 descriptors", |socket| {
        indirect(socket, 0xffff_fff0, |at| {
            for index in 0..(ROOM / 16) as u16 {
                entry(at, index, at.address, 1, NEXT, index + 1);
            }
        })
    }),
    case("an indirect table that is its own next", |socket| {
        indirect(socket, 32, |at| {
            entry(at, 0, at.address, 16, NEXT, 1);
            entry(at, 1, at.address, 16, NEXT, 0);
        })
    }),
    case("an indirect table within an indirect table", |socket| {
        indirect(socket, 16, |at| entry(at, 0, at.address, 16, INDIRECT, 0))
    }),
    case(
        "an indirect table with a next index beyond its end",
        |socket| indirect(socket, 32, |at| entry(at, 0, at.address, 16, NEXT, 2)),
    ),
    case("an indirect table outside of memory", |socket| {
        split(socket, served, 1, |ring, _| {
            ring.set_descriptor(0, u64::MAX - 15, 32, INDIRECT, 0);
        })
    }),
    case("an indirect table with a next descriptor", |socket| {
        split(socket, served, 1, |ring, at| {
            entry(at, 0, at.address, 16, 0, 0);
            ring.set_descriptor(0, at.address, 16, INDIRECT | NEXT, 1);
        })
    }),
    case(
        "a packed chain of the whole ring without an end",
        |socket| {
            packed(socket, ends, |ring, at| {
                for index in 0..128 {
                    ring.set_packed(index, at.address, 16, 0, AVAIL | NEXT);
                }
            })
        },
    ),
    case("a packed buffer that does not exist", |socket| {
        packed(socket, ends, |ring, at| {
            ring.set_packed(0, at.address, 16, 128, AVAIL);
        })
    }),
    case("a packed buffer that is in flight already", |socket| {
        packed(socket, ended_or_served, |ring, at| {
            for index in [0, 2] {
                ring.set_packed(index + 1, at.address + 64, 1, 7, AVAIL | WRITE);
                ring.set_packed(index, at.address, 16, 7, AVAIL | NEXT);
            }
        })
    }),
    case("a packed buffer outside of memory", |socket| {
        packed(socket, served, |ring, _| {
            ring.set_packed(0, 0x10, 16, 0, AVAIL)
        })
    }),
    case("a packed buffer of 2^32 - 1 bytes", |socket| {
        packed(socket, served, |ring, at| {
            ring.set_packed(0, at.address, u32::MAX, 0, AVAIL);
        })
    }),
    case("a packed chain without room for a status", |socket| {
        packed(socket, served, |ring, at| {
            ring.set_packed(0, at.address, 16, 0, AVAIL);
        })
    }),
    case(
        "a packed indirect table within an indirect table",
        |socket| {
            packed(socket, served, |ring, at| {
                // Address, length, ID, flags.
                let mut bytes = at.address.to_le_bytes().to_vec();
                bytes.extend([16, 0, 0, 0, 0, 0]);
                bytes.extend(INDIRECT.to_le_bytes());
                at.write(0, &bytes);
                ring.set_packed(0, at.address, 16, 0, AVAIL | INDIRECT);
            })
        },
    ),
    case("a packed indirect table of half a descriptor", |socket| {
        packed(socket, served, |ring, at| {
            ring.set_packed(0, at.address, 8, 0, AVAIL | INDIRECT);
        })
    }),
    case("random bytes all over the ring", |socket| {
        random_ring(socket, false)
    }),
    case("random bytes all over the packed ring", |socket| {
        random_ring(socket, true)
    }),
];

/// Expected result for the session.
type Expectation = fn(&FrontEnd, &mut Queue) -> Result<()>;

/// Expects the end of the session, because the ring is invalid.
fn ends(front_end: &FrontEnd, _: &mut Queue) -> Result<()> {
    super::ends(front_end)
}

/// Expects a completed request and an open session.
fn served(front_end: &FrontEnd, queue: &mut Queue) -> Result<()> {
    queue.wait(LIMIT)?;
    match front_end.channel().is_closed() {
        true => Err(Error::Wrong("the session has ended".into())),
        false => Ok(()),
    }
}

/// Accepts both results: a queue that handles one request at a time may have answered the first one already.
fn ended_or_served(front_end: &FrontEnd, queue: &mut Queue) -> Result<()> {
    let until = Instant::now() + LIMIT;
    while !queue.driver().has_used() && !front_end.channel().is_closed() {
        if Instant::now() > until {
            return Err(Error::Timeout(LIMIT));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Overwrites a valid request with the violation and makes `available` requests available.
fn split(
    socket: &Path,
    expectation: Expectation,
    available: u16,
    corrupt: fn(&RawRing, &Area),
) -> Result<()> {
    let (mut front_end, mut queue) = started(socket, false)?;
    let at = front_end.allocate(ROOM, 4096)?;
    good(queue.raw(), &at);
    corrupt(queue.raw(), &at);
    queue.raw().set_available_index(available);
    queue.kick();
    expectation(&front_end, &mut queue)
}

/// Writes a read of one sector into descriptors 0 to 2.
fn good(ring: &RawRing, at: &Area) {
    at.write(0, &[0; 16]);
    ring.set_descriptor(0, at.address, 16, NEXT, 1);
    ring.set_descriptor(1, at.address + 512, 512, NEXT | WRITE, 2);
    ring.set_descriptor(2, at.address + 64, 1, WRITE, 0);
    ring.set_available_entry(0, 0);
}

fn one(socket: &Path, address: fn(&Area) -> u64, length: u32) -> Result<()> {
    let (mut front_end, mut queue) = started(socket, false)?;
    let at = front_end.allocate(ROOM, 4096)?;
    queue.raw().set_descriptor(0, address(&at), length, 0, 0);
    queue.raw().set_available_entry(0, 0);
    queue.raw().set_available_index(1);
    queue.kick();
    served(&front_end, &mut queue)
}

fn indirect(socket: &Path, length: u32, fill: fn(&Area)) -> Result<()> {
    let (mut front_end, mut queue) = started(socket, false)?;
    let at = front_end.allocate(ROOM, 4096)?;
    fill(&at);
    queue
        .raw()
        .set_descriptor(0, at.address, length, INDIRECT, 0);
    queue.raw().set_available_entry(0, 0);
    queue.raw().set_available_index(1);
    queue.kick();
    served(&front_end, &mut queue)
}

/// Writes a descriptor of an indirect table.
fn entry(table: &Area, index: u16, address: u64, length: u32, flags: u16, next: u16) {
    let mut bytes = address.to_le_bytes().to_vec();
    bytes.extend(length.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend(next.to_le_bytes());
    table.write(usize::from(index) * 16, &bytes);
}

fn packed(socket: &Path, expectation: Expectation, corrupt: fn(&RawRing, &Area)) -> Result<()> {
    let (mut front_end, mut queue) = started(socket, true)?;
    let at = front_end.allocate(ROOM, 4096)?;
    corrupt(queue.raw(), &at);
    queue.kick();
    expectation(&front_end, &mut queue)
}

/// Writes random bytes into a ring until the device ends the session.
fn random_ring(socket: &Path, packed: bool) -> Result<()> {
    let (front_end, mut queue) = started(socket, packed)?;
    let region = front_end.memory().regions()[0].area();
    let start = (queue.layout().descriptor_area - region.address) as usize;
    let ring = region.part(
        start,
        (queue.layout().end - queue.layout().descriptor_area) as usize,
    );
    let mut random = fastrand::Rng::with_seed(0x0dd0_5eed);
    let mut bytes = vec![0; ring.length];
    for _ in 0..10_000 {
        random.fill(&mut bytes);
        ring.write(0, &bytes);
        queue.kick();
        if front_end.channel().is_closed() {
            return Ok(());
        }
    }
    super::ends(&front_end)
}

//! Violations in a running ring.

use vhost_frontend::{Area, Error, FrontEnd, Queue};
use virtqueue::driver::RawRing;
use virtqueue::layout::{AVAIL, INDIRECT, NEXT, WRITE};

use super::{ended_or_served, started};
use crate::{Target, Test, Verdict};

/// Size of the area that descriptors may point to.
const ROOM: usize = 16 << 10;

const fn case(title: &'static str, run: fn(&Target) -> Verdict) -> Test {
    super::case(title, "virtio 1.3, 2.7.5, 2.8.6: descriptors", run)
}

pub const CASES: &[Test] = &[
    case("a loop of descriptors", |target| {
        split(target, ends, 1, |ring, at| {
            ring.set_descriptor(0, at.address, 16, NEXT, 1);
            ring.set_descriptor(1, at.address, 16, NEXT, 0);
        })
    }),
    case("a descriptor that is its own next", |target| {
        split(target, ends, 1, |ring, at| {
            ring.set_descriptor(0, at.address, 1, NEXT, 0)
        })
    }),
    case("a next descriptor that does not exist", |target| {
        split(target, ends, 1, |ring, at| {
            ring.set_descriptor(0, at.address, 16, NEXT, 128)
        })
    }),
    case("a head that does not exist", |target| {
        split(target, ends, 1, |ring, _| {
            ring.set_available_entry(0, 65535)
        })
    }),
    case("an address outside of memory", |target| {
        one(target, |_| 0x10, 16)
    }),
    case("an address at the end of all addresses", |target| {
        one(target, |_| u64::MAX - 8, 16)
    }),
    case("a buffer that ends outside of memory", |target| {
        one(target, |at| at.address + ROOM as u64, 1 << 30)
    }),
    case("a length of 2^32 - 1", |target| {
        one(target, |at| at.address, u32::MAX)
    }),
    case("a length of 0", |target| one(target, |at| at.address, 0)),
    case("lengths with an overflowing sum", |target| {
        split(target, served, 1, |ring, at| {
            for index in 0..127 {
                ring.set_descriptor(index, at.address, 1 << 21, NEXT, index + 1);
            }
            ring.set_descriptor(127, at.address, u32::MAX, WRITE, 0);
        })
    }),
    case("a chain without room for a header", |target| {
        split(target, served, 1, |ring, at| {
            ring.set_descriptor(0, at.address, 15, NEXT, 1);
            ring.set_descriptor(1, at.address, 1, WRITE, 0);
        })
    }),
    case("a chain without room for a status", |target| {
        split(target, served, 1, |ring, at| {
            ring.set_descriptor(0, at.address, 16, 0, 0)
        })
    }),
    case("a chain without a header", |target| {
        split(target, served, 1, |ring, at| {
            ring.set_descriptor(0, at.address, 512, WRITE, 0)
        })
    }),
    case("a buffer to be read after one to be written", |target| {
        split(target, served, 1, |ring, at| {
            ring.set_descriptor(0, at.address, 16, NEXT, 1);
            ring.set_descriptor(1, at.address, 16, NEXT | WRITE, 2);
            ring.set_descriptor(2, at.address, 16, 0, 0);
        })
    }),
    case("an available index that jumps", |target| {
        split(target, ends, 129, |_, _| {})
    }),
    case("an available index that goes back", |target| {
        split(target, ends, 65535, |_, _| {})
    }),
    case("a head that is in flight already", |target| {
        split(target, ended_or_served, 2, |ring, _| {
            ring.set_available_entry(1, 0)
        })
    }),
    case("an indirect table of no descriptors", |target| {
        indirect(target, 0, |_| {})
    }),
    case("an indirect table of half a descriptor", |target| {
        indirect(target, 24, |_| {})
    }),
    case("an indirect table of 2^28 descriptors", |target| {
        indirect(target, 0xffff_fff0, |at| {
            for index in 0..(ROOM / 16) as u16 {
                entry(at, index, at.address, 1, NEXT, index + 1);
            }
        })
    }),
    case("an indirect table that is its own next", |target| {
        indirect(target, 32, |at| {
            entry(at, 0, at.address, 16, NEXT, 1);
            entry(at, 1, at.address, 16, NEXT, 0);
        })
    }),
    case("an indirect table within an indirect table", |target| {
        indirect(target, 16, |at| entry(at, 0, at.address, 16, INDIRECT, 0))
    }),
    case(
        "an indirect table with a next index beyond its end",
        |target| indirect(target, 32, |at| entry(at, 0, at.address, 16, NEXT, 2)),
    ),
    case("an indirect table outside of memory", |target| {
        split(target, served, 1, |ring, _| {
            ring.set_descriptor(0, u64::MAX - 15, 32, INDIRECT, 0);
        })
    }),
    case("an indirect table with a next descriptor", |target| {
        split(target, served, 1, |ring, at| {
            entry(at, 0, at.address, 16, 0, 0);
            ring.set_descriptor(0, at.address, 16, INDIRECT | NEXT, 1);
        })
    }),
    case(
        "a packed chain of the whole ring without an end",
        |target| {
            packed(target, ends, |ring, at| {
                for index in 0..128 {
                    ring.set_packed(index, at.address, 16, 0, AVAIL | NEXT);
                }
            })
        },
    ),
    case("a packed buffer that does not exist", |target| {
        packed(target, ends, |ring, at| {
            ring.set_packed(0, at.address, 16, 128, AVAIL);
        })
    }),
    case("a packed buffer that is in flight already", |target| {
        packed(target, ended_or_served, |ring, at| {
            for index in [0, 2] {
                ring.set_packed(index + 1, at.address + 64, 1, 7, AVAIL | WRITE);
                ring.set_packed(index, at.address, 16, 7, AVAIL | NEXT);
            }
        })
    }),
    case("a packed buffer outside of memory", |target| {
        packed(target, served, |ring, _| {
            ring.set_packed(0, 0x10, 16, 0, AVAIL)
        })
    }),
    case("a packed buffer of 2^32 - 1 bytes", |target| {
        packed(target, served, |ring, at| {
            ring.set_packed(0, at.address, u32::MAX, 0, AVAIL);
        })
    }),
    case("a packed chain without room for a status", |target| {
        packed(target, served, |ring, at| {
            ring.set_packed(0, at.address, 16, 0, AVAIL);
        })
    }),
    case(
        "a packed indirect table within an indirect table",
        |target| {
            packed(target, served, |ring, at| {
                // Address, length, ID, flags.
                let mut bytes = at.address.to_le_bytes().to_vec();
                bytes.extend([16, 0, 0, 0, 0, 0]);
                bytes.extend(INDIRECT.to_le_bytes());
                at.write(0, &bytes);
                ring.set_packed(0, at.address, 16, 0, AVAIL | INDIRECT);
            })
        },
    ),
    case("a packed indirect table of half a descriptor", |target| {
        packed(target, served, |ring, at| {
            ring.set_packed(0, at.address, 8, 0, AVAIL | INDIRECT);
        })
    }),
    case("random bytes all over the ring", |target| {
        random_ring(target, false)
    })
    .writing(),
    case("random bytes all over the packed ring", |target| {
        random_ring(target, true)
    })
    .writing(),
];

/// Expected result for the session.
type Expectation = fn(&Target, &FrontEnd, &mut Queue) -> Verdict;

/// Expects the end of the session, because the ring is invalid.
fn ends(target: &Target, front_end: &FrontEnd, _: &mut Queue) -> Verdict {
    super::ends(target, front_end)
}

/// Expects a completed request and an open session.
fn served(target: &Target, front_end: &FrontEnd, queue: &mut Queue) -> Verdict {
    match queue.wait(target.patience()) {
        Err(Error::Timeout(_)) if !target.is_strict => return Ok(()),
        other => other?,
    }
    match front_end.channel().is_closed() {
        true => target.tolerated("the session has ended"),
        false => Ok(()),
    }
}

/// Overwrites a valid request with the violation and makes `available` requests available.
fn split(
    target: &Target,
    expectation: Expectation,
    available: u16,
    corrupt: fn(&RawRing, &Area),
) -> Verdict {
    let (mut front_end, mut queue) = started(target, false)?;
    let at = front_end.allocate(ROOM, 4096)?;
    good(queue.raw(), &at);
    corrupt(queue.raw(), &at);
    queue.raw().set_available_index(available);
    queue.kick();
    expectation(target, &front_end, &mut queue)
}

/// Writes a read of one sector into descriptors 0 to 2.
fn good(ring: &RawRing, at: &Area) {
    at.write(0, &[0; 16]);
    ring.set_descriptor(0, at.address, 16, NEXT, 1);
    ring.set_descriptor(1, at.address + 512, 512, NEXT | WRITE, 2);
    ring.set_descriptor(2, at.address + 64, 1, WRITE, 0);
    ring.set_available_entry(0, 0);
}

fn one(target: &Target, address: fn(&Area) -> u64, length: u32) -> Verdict {
    let (mut front_end, mut queue) = started(target, false)?;
    let at = front_end.allocate(ROOM, 4096)?;
    queue.raw().set_descriptor(0, address(&at), length, 0, 0);
    queue.raw().set_available_entry(0, 0);
    queue.raw().set_available_index(1);
    queue.kick();
    served(target, &front_end, &mut queue)
}

fn indirect(target: &Target, length: u32, fill: fn(&Area)) -> Verdict {
    let (mut front_end, mut queue) = started(target, false)?;
    let at = front_end.allocate(ROOM, 4096)?;
    fill(&at);
    queue
        .raw()
        .set_descriptor(0, at.address, length, INDIRECT, 0);
    queue.raw().set_available_entry(0, 0);
    queue.raw().set_available_index(1);
    queue.kick();
    served(target, &front_end, &mut queue)
}

/// Writes a descriptor of an indirect table.
fn entry(table: &Area, index: u16, address: u64, length: u32, flags: u16, next: u16) {
    let mut bytes = address.to_le_bytes().to_vec();
    bytes.extend(length.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend(next.to_le_bytes());
    table.write(usize::from(index) * 16, &bytes);
}

fn packed(target: &Target, expectation: Expectation, corrupt: fn(&RawRing, &Area)) -> Verdict {
    let (mut front_end, mut queue) = started(target, true)?;
    let at = front_end.allocate(ROOM, 4096)?;
    corrupt(queue.raw(), &at);
    queue.kick();
    expectation(target, &front_end, &mut queue)
}

/// Writes random bytes into a ring until the device ends the session.
fn random_ring(target: &Target, packed: bool) -> Verdict {
    let (front_end, mut queue) = started(target, packed)?;
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
    super::ends(target, &front_end)
}

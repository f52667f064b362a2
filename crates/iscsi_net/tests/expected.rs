//! What a disk is told of I/Os that come next: those of commands that came with the one before them.

mod common;

use std::sync::{Arc, Mutex};

use backend::{Backend, Engine, Finished, LATER, Soon, Submission, Tag};
use common::{BLOCK, Client, Door, cdb10, ram, settings, target};
use disk::{Capacity, DiskInfo, IoRequest};
use guest_memory::IoBuffer;
use iscsi::initiator::{Event, Initiator};
use iscsi::negotiation::Offer;
use iscsi_net::DoorLimits;
use ring::{Completion, Owner, Ring};

/// What a disk heard, by the first block of each I/O.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Heard {
    Later(u64),
    Next(u64),
    Now(u64),
}

type Story = Arc<Mutex<Vec<Heard>>>;

/// A RAM disk that remembers what it was told.
struct Listening {
    inner: Arc<dyn Engine>,
    heard: Story,
}

impl Engine for Listening {
    fn info(&self) -> DiskInfo {
        self.inner.info()
    }

    fn capacity(&self) -> &Arc<Capacity> {
        self.inner.capacity()
    }

    fn set_size(&self, bytes: u64) -> std::io::Result<()> {
        self.inner.set_size(bytes)
    }

    fn kind(&self) -> &'static str {
        "listening"
    }

    fn open(&self, owner: Owner, ring: &mut Ring) -> std::io::Result<Box<dyn Backend>> {
        Ok(Box::new(ListeningBackend {
            inner: self.inner.open(owner, ring)?,
            heard: self.heard.clone(),
        }))
    }
}

struct ListeningBackend {
    inner: Box<dyn Backend>,
    heard: Story,
}

impl ListeningBackend {
    fn note(&self, heard: Heard) {
        self.heard.lock().unwrap().push(heard);
    }
}

impl Backend for ListeningBackend {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        self.note(Heard::Now(io.offset / BLOCK as u64));
        self.inner.submit(ring, io, buffer, tag)
    }

    fn wants_to_know(&self) -> bool {
        true
    }

    fn expect(&self, io: &IoRequest, soon: Soon) {
        let block = io.offset / BLOCK as u64;
        self.note(match soon {
            Soon::Next => Heard::Next(block),
            Soon::Later => Heard::Later(block),
        });
        self.inner.expect(io, soon);
    }

    fn look(&self, io: &IoRequest, buffer: &mut IoBuffer) -> bool {
        self.note(Heard::Now(io.offset / BLOCK as u64));
        self.inner.look(io, buffer)
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        self.inner.complete(ring, completion, finished);
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}

const TOGETHER: u32 = 8;
const BLOCKS: u32 = 2;

/// Sends commands with one write to the socket, and takes what the disk heard of them.
fn together(client: &mut Client, story: &Story, lba: u32, write: bool) -> Vec<Heard> {
    story.lock().unwrap().clear();
    let length = BLOCKS as usize * BLOCK;
    for n in 0..TOGETHER {
        let lba = lba + n * BLOCKS;
        let request = match write {
            true => {
                let cdb = cdb10(0x2a, lba, BLOCKS as u16);
                Initiator::write(0, &cdb, vec![lba as u8; length])
            }
            false => Initiator::read(0, &cdb10(0x28, lba, BLOCKS as u16), length as u32),
        };
        client.initiator.command(0, request).unwrap();
    }
    let is_done = |(_, event): &(u16, Event)| matches!(event, Event::Command(_));
    client.until(|client| {
        let done = client.events.iter().filter(|event| is_done(event));
        done.count() == TOGETHER as usize
    });
    for (_, event) in client.events.drain(..) {
        let Event::Command(done) = event else {
            continue;
        };
        assert_eq!(done.status, 0);
        assert_eq!(done.data.len(), if write { 0 } else { length });
        assert!(
            done.data
                .chunks(length)
                .all(|data| data == vec![data[0]; length])
        );
    }
    std::mem::take(&mut story.lock().unwrap())
}

fn submitted(heard: &[Heard]) -> Vec<u64> {
    let blocks = heard.iter().filter_map(|one| match one {
        Heard::Now(block) => Some(*block),
        Heard::Next(_) | Heard::Later(_) => None,
    });
    blocks.collect()
}

#[test]
fn a_disk_that_wants_to_know_is_told_of_the_next_of_several_commands_that_came_together() {
    let story = Story::default();
    let engine = Arc::new(Listening {
        inner: ram(16),
        heard: story.clone(),
    });
    let door = Door::open(engine, target(), DoorLimits::default());
    let mut client = Client::login(door.portal, settings(1, Offer::default()), 1);
    client.settle();
    for write in [true, false] {
        let mut told = 0;
        // How many the socket hands over at once is the kernel's business: mostly all, so that few rounds do.
        for round in 0..100 {
            let heard = together(&mut client, &story, round * 16, write);
            assert_eq!(submitted(&heard).len(), TOGETHER as usize);
            for (at, one) in heard.iter().enumerate() {
                // So many are submitted before it.
                let (block, before) = match *one {
                    Heard::Next(block) => (block, 1),
                    Heard::Later(block) => (block, LATER),
                    Heard::Now(_) => continue,
                };
                told += 1;
                assert_eq!(submitted(&heard[at..])[before], block, "{heard:?}");
            }
            if told > 0 {
                break;
            }
        }
        assert!(told > 0, "never told, writing: {write}");
    }
}

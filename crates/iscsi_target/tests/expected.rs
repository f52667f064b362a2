//! Prefetch hints to a disk, for commands that arrive together with the command before them.

mod common;
#[path = "../../bdev/tests/common/listening.rs"]
mod listening;

use std::sync::Arc;

use bdev::PREFETCH_DISTANCE;
use common::{BLOCK, Client, Rig, ram, settings, target};
use iscsi::initiator::{Event, Initiator};
use iscsi::negotiation::Offer;
use iscsi_target::ServerLimits;
use listening::{Announcement, Announcements, Recording};
use scsi::cdb::cdb10;

const TOGETHER: u32 = 8;
const BLOCKS: u32 = 2;

/// Sends commands with one write to the socket. Returns the hints and I/Os that the disk received.
fn together(
    client: &mut Client,
    announced: &Announcements,
    lba: u32,
    write: bool,
) -> Vec<Announcement> {
    announced.lock().unwrap().clear();
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
    std::mem::take(&mut announced.lock().unwrap())
}

fn submitted(announced: &[Announcement]) -> Vec<u64> {
    let blocks = announced.iter().filter_map(|one| match one {
        Announcement::Now(block) => Some(*block),
        Announcement::Next(_) | Announcement::Later(_) => None,
    });
    blocks.collect()
}

#[test]
fn prefetch_hint_names_the_next_of_several_commands() {
    let announced = Announcements::default();
    let device = Arc::new(Recording {
        inner: ram(16),
        announced: announced.clone(),
    });
    let rig = Rig::open(device, target(), ServerLimits::default());
    let mut client = Client::login(rig.portal, settings(1, Offer::default()), 1);
    client.settle();
    for write in [true, false] {
        let mut announced_count = 0;
        // The kernel decides how many arrive at once. Usually all do, so a few rounds suffice.
        for round in 0..100 {
            let announced = together(&mut client, &announced, round * 16, write);
            assert_eq!(submitted(&announced).len(), TOGETHER as usize);
            for (at, one) in announced.iter().enumerate() {
                // Number of I/Os submitted before it.
                let (block, before) = match *one {
                    Announcement::Next(block) => (block, 1),
                    Announcement::Later(block) => (block, PREFETCH_DISTANCE),
                    Announcement::Now(_) => continue,
                };
                announced_count += 1;
                assert_eq!(submitted(&announced[at..])[before], block, "{announced:?}");
            }
            if announced_count > 0 {
                break;
            }
        }
        assert!(announced_count > 0, "not notified, writing: {write}");
    }
}

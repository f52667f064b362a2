//! One session over six connections on two workers, under verified load, while connections are lost and reinstated.

mod common;

use std::collections::HashMap;

use common::{BLOCK, Client, Rig, settings, verify_image};
use fastrand::Rng;
use iscsi::initiator::{Event, Initiator, Request};
use iscsi::negotiation::{DigestOffer, Offer};
use scsi::cdb::cdb10;

const CONNECTIONS: u16 = 6;
const REGION: u64 = 2048;
const REGIONS: u64 = 16;

/// A command in flight, and the range that a read must return.
struct Under {
    request: Request,
    expected: Option<(usize, usize)>,
    cid: u16,
}

struct Session {
    client: Client,
    image: Vec<u8>,
    random: Rng,
    under: HashMap<u32, Under>,
}

impl Session {
    fn submit(&mut self, under: Under) {
        let itt = self
            .client
            .initiator
            .command(under.cid, under.request.clone());
        self.under.insert(itt.unwrap(), under);
    }

    /// Submits one command per region, because concurrent commands must not overlap.
    fn submit_round(&mut self) {
        for region in 0..REGIONS {
            let blocks = 1 + self.random.u64(0..if region % 4 == 0 { 700 } else { 9 });
            let lba = region * REGION + self.random.u64(..REGION - blocks);
            let (from, to) = (lba as usize * BLOCK, (lba + blocks) as usize * BLOCK);
            let writes = self.random.bool();
            let cdb = cdb10(if writes { 0x2a } else { 0x28 }, lba as u32, blocks as u16);
            let request = if writes {
                for byte in &mut self.image[from..to] {
                    *byte = self.random.u8(..);
                }
                Initiator::write(0, &cdb, self.image[from..to].to_vec())
            } else {
                Initiator::read(0, &cdb, (to - from) as u32)
            };
            let cid = self.random.u16(..CONNECTIONS);
            let expected = (!writes).then_some((from, to));
            self.submit(Under {
                request,
                expected,
                cid,
            });
        }
    }

    fn take_events(&mut self) {
        for (_, event) in std::mem::take(&mut self.client.events) {
            match event {
                Event::Command(done) => {
                    let under = self.under.remove(&done.itt).expect("unsolicited data");
                    assert_eq!((done.response, done.status), (0, 0), "{done:?}");
                    if let Some((from, to)) = under.expected {
                        assert!(done.data == self.image[from..to], "data differs");
                    }
                }
                Event::Nop { .. } | Event::LoggedIn(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    /// Loses a connection, reinstates it under its CID, and repeats the lost commands.
    fn lose(&mut self, cid: u16) {
        // The target has not noticed the loss: the new connection displaces the old one.
        let (lost, old) = self.client.reinstate(cid);
        self.client.until(|client| client.initiator.is_ready(cid));
        drop(old);
        self.take_events();
        for itt in lost {
            if let Some(under) = self.under.remove(&itt) {
                self.submit(under);
            }
        }
    }

    fn finish_round(&mut self) {
        while !self.under.is_empty() {
            self.client.until(|client| !client.events.is_empty());
            self.take_events();
        }
    }
}

fn lose_connections(offer: Offer, seed: u64) {
    let rig = Rig::ram();
    let mut client = Client::login(rig.portal, settings(1, offer), CONNECTIONS.into());
    client.settle();
    let mut session = Session {
        client,
        image: vec![0; (REGIONS * REGION) as usize * BLOCK],
        random: Rng::with_seed(seed),
        under: HashMap::new(),
    };
    for _ in 0..60 {
        session.submit_round();
        for _ in 0..session.random.u64(..6) {
            session.client.pump();
        }
        // the leading connection too
        let cid = session.random.u16(..CONNECTIONS);
        session.lose(cid);
        session.finish_round();
    }
    let status = &rig.server.status()[0];
    assert_eq!(
        (status.sessions, status.connections),
        (1, CONNECTIONS.into())
    );
    let Session {
        mut client,
        mut image,
        ..
    } = session;
    verify_image(&mut client, CONNECTIONS, 10, 5, &mut image);
    drop(client);
    rig.wait_for_connections(0);
}

/// At error recovery level 0 a failed connection ends its session (7.1.4.4: session recovery).
#[test]
fn lost_connection_ends_its_session_and_written_data_stays() {
    let rig = Rig::ram();
    let mut client = Client::login(
        rig.portal,
        settings(1, Offer::default()),
        CONNECTIONS.into(),
    );
    client.settle();
    let mut image = vec![0; (REGIONS * REGION) as usize * BLOCK];
    verify_image(&mut client, CONNECTIONS, 3, 1, &mut image);
    client.hang_up(3);
    client.until(|client| (0..CONNECTIONS).all(|cid| client.is_closed(cid)));
    rig.wait_for_connections(0);
    assert_eq!(rig.server.status()[0].sessions, 0);
    let mut client = Client::login(
        rig.portal,
        settings(1, Offer::default()),
        CONNECTIONS.into(),
    );
    client.settle();
    verify_image(&mut client, CONNECTIONS, 3, 2, &mut image);
}

#[test]
fn lost_connections_come_back_under_their_cid_and_no_data_is_lost() {
    lose_connections(Offer::default(), 21);
}

#[test]
fn lost_connections_come_back_with_digests_and_solicited_data() {
    let mut offer = Offer {
        header_digest: DigestOffer::Crc32c,
        data_digest: DigestOffer::Crc32c,
        max_recv_data_segment_length: 8192,
        ..Offer::default()
    };
    offer.session.max_burst_length = 16 << 10;
    (offer.session.initial_r2t, offer.session.immediate_data) = (true, false);
    lose_connections(offer, 22);
}

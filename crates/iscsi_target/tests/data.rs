//! Written data reads back: over one connection and several, with and without digests, small and large segments.

mod common;

use common::{Client, Rig, image, settings, target, verify, verify_image};
use iscsi::negotiation::{DigestOffer, Offer};
use iscsi_target::ServerLimits;

fn small() -> Offer {
    let mut offer = Offer {
        max_recv_data_segment_length: 4096,
        ..Offer::default()
    };
    offer.session.max_burst_length = 16 << 10;
    offer.session.first_burst_length = 8 << 10;
    offer
}

#[test]
fn blocks_read_back_over_one_connection() {
    let rig = Rig::ram();
    let mut client = Client::login(rig.portal, settings(1, Offer::default()), 1);
    client.settle();
    verify(&mut client, 1, 40, 7);
    assert_eq!(rig.server.status()[0].connections, 1);
}

#[test]
fn blocks_read_back_with_solicited_data_only_and_short_bursts() {
    let rig = Rig::ram();
    let mut offer = small();
    (offer.session.initial_r2t, offer.session.immediate_data) = (true, false);
    let mut client = Client::login(rig.portal, settings(1, offer), 1);
    client.settle();
    verify(&mut client, 1, 20, 8);
}

#[test]
fn blocks_read_back_with_digests() {
    let rig = Rig::ram();
    let offer = Offer {
        header_digest: DigestOffer::Crc32c,
        data_digest: DigestOffer::Crc32c,
        ..small()
    };
    let mut client = Client::login(rig.portal, settings(1, offer), 1);
    client.settle();
    verify(&mut client, 1, 20, 9);
}

/// Runs enough single commands for the connection to switch to watching its socket. Checks that the written data reads back.
fn one_at_a_time(client: &mut Client, image: &mut [u8], seed: u8) {
    for n in 0..24u8 {
        let lba = usize::from(n) * 64;
        let block = vec![n.wrapping_add(seed); 4096];
        image[lba * 512..][..4096].copy_from_slice(&block);
        assert_eq!(client.write(0, lba as u32, block.clone()).status, 0);
        let read = client.read(0, lba as u32, 8);
        assert_eq!((read.status, read.data), (0, block));
    }
}

#[test]
fn client_that_asks_singly_and_much_at_once_by_turns_gets_its_answers() {
    let rig = Rig::ram();
    let mut client = Client::login(rig.portal, settings(1, Offer::default()), 1);
    client.settle();
    let mut known = image();
    for round in 0..4 {
        one_at_a_time(&mut client, &mut known, round);
        verify_image(&mut client, 1, 3, u64::from(round) + 50, &mut known);
    }
    one_at_a_time(&mut client, &mut known, 9);
    drop(client);
    rig.wait_for_connections(0);
}

#[test]
fn commands_that_come_singly_and_in_pieces_are_put_together() {
    let rig = Rig::ram();
    let mut client = Client::login(rig.portal, settings(1, small()), 1);
    client.settle();
    for piece in [1500, 20, 47, 49, 5000] {
        one_at_a_time(&mut client, &mut image(), piece as u8);
        // More than a segment, so that some of it is solicited.
        let data: Vec<u8> = (0..20_480)
            .map(|n: u32| (n / 7 + piece as u32) as u8)
            .collect();
        let cdb = scsi::cdb::cdb10(0x2a, 3, 40);
        let write = iscsi::initiator::Initiator::write(0, &cdb, data.clone());
        let before = client.initiator.tasks_len();
        client.initiator.command(0, write).unwrap();
        client.push_in_pieces(0, piece);
        client.until(|client| client.initiator.tasks_len() == before);
        client.events.clear();
        let read = client.read(0, 3, 40);
        assert!(read.status == 0 && read.data == data, "pieces of {piece}");
    }
}

#[test]
fn blocks_read_back_over_four_connections_on_two_workers() {
    let rig = Rig::ram();
    let mut client = Client::login(rig.portal, settings(1, Offer::default()), 4);
    client.settle();
    verify(&mut client, 4, 40, 10);
    let status = &rig.server.status()[0];
    assert_eq!((status.sessions, status.connections), (1, 4));
    drop(client);
    rig.wait_for_connections(0);
}

#[test]
fn data_passes_over_16_connections_and_a_17th_is_refused() {
    let rig = Rig::ram();
    let mut client = Client::login(rig.portal, settings(1, Offer::default()), 16);
    client.settle();
    verify(&mut client, 16, 20, 11);
    let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let cid = client.connect();
        client.until(|client| client.initiator.is_ready(cid));
    }));
    assert!(refused.is_err(), "a seventeenth connection has joined");
    let status = &rig.server.status()[0];
    assert_eq!((status.sessions, status.connections), (1, 16));
}

#[test]
fn commands_wait_for_memory_and_all_are_answered() {
    let limits = ServerLimits {
        data_bytes: 64 << 10,
        output_bytes: 32 << 10,
        ..ServerLimits::default()
    };
    let rig = Rig::open(common::ram(16), target(), limits);
    let mut client = Client::login(rig.portal, settings(1, Offer::default()), 2);
    client.settle();
    verify(&mut client, 2, 20, 11);
}

#[test]
fn sessions_do_not_disturb_each_other() {
    let rig = Rig::ram();
    let mut first = Client::login(rig.portal, settings(1, Offer::default()), 1);
    first.settle();
    let mut image = image();
    for number in 2..12 {
        let mut other = Client::login(rig.portal, settings(number, Offer::default()), 2);
        other.settle();
        verify_image(&mut first, 1, 2, u64::from(number), &mut image);
        // Disconnects without a logout.
        drop(other);
    }
    verify_image(&mut first, 1, 5, 99, &mut image);
    rig.wait_for_connections(1);
}

//! Our initiator against our target over pipes that split the streams anywhere: data transfers with all combinations of the
//! relevant keys, over one connection and several.

mod common;

use common::{BLOCK, Pipes, Policy, read10, settings, small_offer, write10};
use iscsi::initiator::Initiator;
use iscsi::negotiation::{DigestOffer, Offer};
use iscsi::target::Completion;
use proptest::prelude::*;

#[derive(Clone, Debug)]
struct Combination {
    initial_r2t: bool,
    immediate_data: bool,
    header_digest: bool,
    data_digest: bool,
    first_burst: u32,
    max_burst: u32,
    max_recv: [u32; 2],
    outstanding: u16,
    connections: usize,
    piece: usize,
    seed: u64,
}

fn combination() -> impl Strategy<Value = Combination> {
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let sizes = (512u32..3000, 512u32..6000, [512u32..3000, 512u32..3000]);
    (
        flags,
        sizes,
        1u16..4,
        1usize..5,
        prop_oneof![1usize..64, 64usize..6000],
        any::<u64>(),
    )
        .prop_map(
            |(flags, sizes, outstanding, connections, piece, seed)| Combination {
                initial_r2t: flags.0,
                immediate_data: flags.1,
                header_digest: flags.2,
                data_digest: flags.3,
                first_burst: sizes.0,
                max_burst: sizes.1,
                max_recv: sizes.2,
                outstanding,
                connections,
                piece,
                seed,
            },
        )
}

fn offer(combination: &Combination, side: usize) -> Offer {
    let digest = |on: bool| {
        if on {
            DigestOffer::Crc32c
        } else {
            DigestOffer::None
        }
    };
    let mut offer = small_offer();
    offer.header_digest = digest(combination.header_digest);
    offer.data_digest = digest(combination.data_digest);
    offer.max_recv_data_segment_length = combination.max_recv[side];
    offer.session.initial_r2t = combination.initial_r2t;
    offer.session.immediate_data = combination.immediate_data;
    offer.session.first_burst_length = combination.first_burst;
    offer.session.max_burst_length = combination.max_burst;
    offer.session.max_outstanding_r2t = combination.outstanding;
    offer.session.max_connections = 4;
    offer
}

fn pattern(seed: u64, length: usize) -> Vec<u8> {
    (0..length as u64)
        .map(|n| (n.wrapping_mul(seed | 1) >> 3) as u8)
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_negotiated_combination_transfers_data(combination in combination(), sizes in prop::collection::vec(1u16..13, 8)) {
        let policy = Policy::open(offer(&combination, 1));
        let mut pipes = Pipes::ready(policy, settings(offer(&combination, 0)), combination.connections, combination.seed);
        pipes.piece = combination.piece;
        let mut model = pipes.disk.clone();
        let cid = |n: usize| (n % combination.connections) as u16;
        for (n, &blocks) in sizes.iter().enumerate() {
            let lba = n as u32 * 16;
            let data = pattern(combination.seed.wrapping_add(n as u64), usize::from(blocks) * BLOCK as usize);
            let start = (lba * BLOCK) as usize;
            model[start..start + data.len()].copy_from_slice(&data);
            pipes.initiator.command(cid(n), Initiator::write(0, &write10(lba, blocks), data)).unwrap();
        }
        pipes.run();
        prop_assert_eq!(&pipes.error, &None);
        let done = pipes.commands_done();
        prop_assert_eq!(done.len(), sizes.len());
        prop_assert!(done.iter().all(|done| done.status == 0 && done.residual == 0));
        prop_assert_eq!(&pipes.disk, &model);
        let mut wanted = std::collections::HashMap::new();
        for (n, &blocks) in sizes.iter().enumerate() {
            let length = u32::from(blocks) * BLOCK;
            let itt = pipes.initiator.command(cid(n + 1), Initiator::read(0, &read10(n as u32 * 16, blocks), length)).unwrap();
            let start = n * 16 * BLOCK as usize;
            wanted.insert(itt, &model[start..start + length as usize]);
        }
        pipes.run();
        prop_assert_eq!(&pipes.error, &None);
        let done = pipes.commands_done();
        prop_assert_eq!(done.len(), sizes.len());
        for done in done {
            prop_assert_eq!(&done.data[..], wanted[&done.itt]);
            prop_assert_eq!((done.status, done.residual), (0, 0));
        }
        // Commands start in CmdSN order, regardless of their connection.
        let first = pipes.messages.begun[0];
        let order: Vec<u32> = pipes.messages.begun.iter().map(|n| n.wrapping_sub(first)).collect();
        prop_assert_eq!(order, (0..2 * sizes.len() as u32).collect::<Vec<_>>());
        prop_assert_eq!(pipes.initiator.tasks_len(), 0);
        prop_assert!(pipes.target_ends.iter().all(|target_end| target_end.connection.tasks().count() == 0 && target_end.buffers.is_empty()));
    }
}

#[test]
fn more_commands_than_the_window_wait_and_all_are_done() {
    let mut pipes = Pipes::ready(Policy::open(small_offer()), settings(small_offer()), 2, 7);
    for n in 0..400u32 {
        let request = Initiator::read(0, &read10(n % 200, 1), BLOCK);
        pipes.initiator.command((n % 2) as u16, request).unwrap();
    }
    assert!(pipes.initiator.waiting_len() > 0);
    pipes.run();
    assert_eq!(pipes.error, None);
    assert_eq!(pipes.commands_done().len(), 400);
}

#[test]
fn residuals_compare_actual_with_expected_length() {
    let mut pipes = Pipes::ready(Policy::open(small_offer()), settings(small_offer()), 1, 3);
    // The cases of libiscsi's residual tests: (blocks in the CDB, expected length, residual, received bytes).
    for (blocks, expected, residual, comes) in [
        (1, 0, 512, 0),
        (1, 10_000, -9488, 512),
        (1, 200, 312, 200),
        (2, 512, 512, 512),
        (1, 1024, -512, 512),
    ] {
        pipes
            .initiator
            .command(0, Initiator::read(0, &read10(3, blocks), expected))
            .unwrap();
        pipes.run();
        let done = pipes.commands_done().remove(0);
        assert_eq!(
            (done.status, done.residual, done.data.len()),
            (0, residual, comes),
            "read {blocks} as {expected}"
        );
        if expected > 0 {
            let data = vec![0x5a; expected as usize];
            pipes
                .initiator
                .command(0, Initiator::write(0, &write10(9, blocks), data))
                .unwrap();
            pipes.run();
            let done = pipes.commands_done().remove(0);
            assert_eq!(
                (done.status, done.residual),
                (0, residual),
                "write {blocks} as {expected}"
            );
        }
    }
    assert_eq!(pipes.error, None);
}

/// The caller has released its buffer with the response. For a later part of the data it would allocate another one, which no
/// later step releases.
#[test]
fn data_that_arrive_after_the_response_get_no_buffer() {
    const BUSY: u8 = 0x08;
    let mut pipes = Pipes::ready(Policy::open(small_offer()), settings(small_offer()), 1, 5);
    // Immediate and unsolicited data of a command that stays unanswered.
    let write = Initiator::write(0, &[0xff; 10], vec![0x5a; 2048]);
    pipes.initiator.command(0, write).unwrap();
    let bytes = std::mem::take(pipes.initiator.outgoing(0));
    let (first, rest) = bytes.split_at(bytes.len() - 100);
    let target_end = &mut pipes.target_ends[0];
    target_end.feed(first, &mut pipes.disk, &mut pipes.messages);
    let task = target_end.held.pop().unwrap();
    assert!(target_end.buffers.remove(&task).is_some());
    let completion = Completion {
        status: BUSY,
        ..Completion::default()
    };
    target_end.connection.respond(task, &completion).unwrap();
    assert!(target_end.connection.outgoing().is_empty());
    target_end.feed(rest, &mut pipes.disk, &mut pipes.messages);
    assert!(target_end.buffers.is_empty());
    pipes.run();
    assert_eq!(pipes.error, None);
    let statuses: Vec<u8> = pipes
        .commands_done()
        .iter()
        .map(|done| done.status)
        .collect();
    assert_eq!(statuses, [BUSY]);
}

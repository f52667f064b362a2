//! A device of a packed ring that dies at any point, between any two stores, and its successor on the same in-flight region: each request
//! is answered once.

mod common;

use std::collections::VecDeque;
use std::sync::Arc;

use common::{DATA, Pair};
use guest_memory::{Mapping, RingMemory};
use proptest::prelude::*;
use virtqueue::{Chain, DeviceQueue, Inflight, PackedInflight, QueueError};

const SIZE: u16 = 8;
const RING_BYTES: usize = 16 * SIZE as usize;

#[derive(Clone, Debug)]
enum Step {
    /// A request with this number of descriptors, or with an indirect table if 0.
    Add(u8),
    Pop,
    /// Answers one request in flight.
    Answer(usize),
    Publish,
    /// Kills the process between two steps.
    Crash,
    /// Kills the process while it records a popped chain: some stores are visible, but not the last.
    CrashPopping(u64),
    /// Kills the process while it publishes a batch. Visible are some of the stores before the publication, or all of these and some of
    /// those after it.
    CrashPublishing(bool, u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..4u8).prop_map(Step::Add),
        4 => Just(Step::Pop),
        4 => any::<prop::sample::Index>().prop_map(|at| Step::Answer(at.index(usize::from(SIZE)))),
        3 => Just(Step::Publish),
        1 => Just(Step::Crash),
        1 => any::<u64>().prop_map(Step::CrashPopping),
        1 => any::<(bool, u64)>().prop_map(|(is_published, mask)| Step::CrashPublishing(is_published, mask)),
    ];
    prop::collection::vec(step, 1..300)
}

fn token(p: &Pair, chain: &Chain) -> u64 {
    (p.memory.elements(chain)[0].0 - DATA) / 8
}

fn restart_device(p: &mut Pair, region: &Arc<Mapping>) {
    // The front end may send any base: the region decides.
    p.device = DeviceQueue::new(p.device.config().clone(), &p.memory.table).unwrap();
    let part = RingMemory::new(region.clone(), 0, PackedInflight::stride(SIZE));
    p.device.track(part).unwrap();
}

fn image(region: &Mapping) -> Vec<u8> {
    let mut bytes = vec![0; PackedInflight::stride(SIZE)];
    region.read(0, &mut bytes);
    bytes
}

/// Returns true if this byte of the region is stored before a publication: `free_head`, `used_idx`, `used_wrap_counter`, links.
fn is_stored_before(at: usize) -> bool {
    match at {
        0..32 => matches!(at, 12 | 13 | 16 | 17 | 20),
        entry => matches!(entry % 32, 2 | 3),
    }
}

/// Mixes two images in words of two bytes, selected by `mask`. This covers more than any order of stores could leave.
fn mixed(
    before: &[u8],
    after: &[u8],
    mask: u64,
    is_written: impl Fn(usize, bool) -> bool,
) -> Vec<u8> {
    let mut picked = mask;
    let mut bytes = before.to_vec();
    for at in (0..bytes.len()).step_by(2) {
        picked = picked.rotate_left(7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let pick = picked >> 63 == 1;
        for at in at..at + 2 {
            if is_written(at, pick) {
                bytes[at] = after[at];
            }
        }
    }
    bytes
}

proptest! {
    #[test]
    fn every_request_is_answered_once_wherever_the_device_dies(steps in steps()) {
        let region = Mapping::anonymous(4096).unwrap();
        let mut p = Pair::new(SIZE, true, false, 0);
        restart_device(&mut p, &region);
        let mut chain = Chain::default();
        let mut added = 0_u64;
        // Requests that the current device has popped, in order, and answered without publishing.
        let mut taken: Vec<(u64, u16, u16)> = Vec::new();
        let mut unpublished: Vec<(u64, u16, u16)> = Vec::new();
        let mut expected_next = 0_u64;
        let mut to_repeat: VecDeque<u64> = VecDeque::new();
        let mut seen: Vec<u64> = Vec::new();
        let all = steps.into_iter().chain([Step::Crash]);
        // Finally, everything is popped and answered.
        let rest = std::iter::repeat_n([Step::Pop, Step::Answer(0), Step::Publish], 2 * usize::from(SIZE)).flatten();
        for step in all.chain(rest) {
            let crashes = matches!(step, Step::Crash | Step::CrashPopping(_) | Step::CrashPublishing(..));
            match step {
                Step::Add(descriptors) => {
                    let first = (DATA + 8 * added, 1);
                    let elements = [first, (DATA, 1), (DATA, 1)];
                    let added_now = match descriptors {
                        0 => p.driver.add_indirect(&elements[..2], &[], added),
                        count => p.driver.add(&elements[..usize::from(count)], &[], added),
                    };
                    if added_now.is_some() {
                        p.driver.publish();
                        added += 1;
                    }
                }
                Step::Pop | Step::CrashPopping(_) => {
                    let more = !to_repeat.is_empty() || expected_next < added;
                    prop_assert_eq!(p.device.available() > 0, more);
                    let before = image(&region);
                    let noted = to_repeat.is_empty();
                    let popped = p.device.pop(&p.memory.view, &mut chain).unwrap();
                    prop_assert_eq!(popped, more);
                    if let Step::CrashPopping(mask) = step && noted {
                        // All but `old_free_head`, which is the last.
                        let bytes = mixed(&before, &image(&region), mask, |at, pick| pick && !(14..16).contains(&at));
                        region.write(0, &bytes);
                    } else if popped {
                        let expected = to_repeat.pop_front().unwrap_or_else(|| {
                            expected_next += 1;
                            expected_next - 1
                        });
                        prop_assert_eq!(token(&p, &chain), expected);
                        taken.push((expected, chain.id, chain.descriptors));
                    }
                }
                Step::Answer(at) if !taken.is_empty() => {
                    let one = taken.remove(at % taken.len());
                    p.device.push(one.1, one.2, 0);
                    unpublished.push(one);
                }
                Step::Answer(_) => {}
                Step::Publish => {
                    p.device.publish();
                    unpublished.clear();
                }
                Step::CrashPublishing(is_published, mask) => {
                    let ring = p.memory.bytes(0, RING_BYTES);
                    let before = image(&region);
                    p.device.publish();
                    let bytes = mixed(&before, &image(&region), mask, |at, pick| {
                        // The old used position, 18 to 21, is stored last, in one store.
                        let last = matches!(at, 18 | 19 | 21);
                        is_stored_before(at) && (is_published || pick) || is_published && pick && !last
                    });
                    region.write(0, &bytes);
                    if is_published {
                        unpublished.clear();
                    } else {
                        p.memory.mapping.write(0, &ring);
                    }
                }
                Step::Crash => {}
            }
            if crashes {
                // Original order: requests that were to be repeated come first.
                let mut open: Vec<u64> = to_repeat.drain(..).collect();
                open.extend(taken.drain(..).chain(unpublished.drain(..)).map(|(token, ..)| token));
                open.sort_unstable();
                to_repeat.extend(open);
                restart_device(&mut p, &region);
            }
            while let Some(used) = p.driver.pop_used() {
                prop_assert!(!seen.contains(&used.token), "{} was answered twice", used.token);
                seen.push(used.token);
            }
        }
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..added).collect::<Vec<_>>());
    }

    /// The front end can write arbitrary bytes: creating the device succeeds or fails, and its queue works or breaks.
    #[test]
    fn any_bytes_as_a_region_harm_nobody(
        bytes in prop::collection::vec(prop_oneof![0..9_u8, any::<u8>()], PackedInflight::stride(SIZE)),
        small in any::<bool>(),
    ) {
        let region = Mapping::anonymous(4096).unwrap();
        region.write(0, &bytes);
        if small {
            // Values small enough to be mostly valid.
            let few: Vec<u8> = bytes.iter().map(|byte| byte % 9 * (byte % 2)).collect();
            region.write(12, &few[12..]);
        }
        region.write(8, &[1, 0, SIZE as u8, 0]);
        let mut p = Pair::new(SIZE, true, false, 0);
        let part = RingMemory::new(region, 0, PackedInflight::stride(SIZE));
        if p.device.track(part).is_err() {
            return Ok(());
        }
        let mut chain = Chain::default();
        for token in 0..3 * u64::from(SIZE) {
            p.driver.add(&[(DATA, 1)], &[], token);
            p.driver.publish();
            if let Ok(true) = p.device.pop(&p.memory.view, &mut chain) {
                p.device.push(chain.id, chain.descriptors, 0);
            }
            p.device.publish();
        }
    }

    /// The front end can write any IDs to the region. No two chains may be popped with one ID, because an answer names its chain by ID
    /// only.
    #[test]
    fn any_ids_in_a_region_harm_nobody(
        ids in prop::collection::vec(0..SIZE + 1, 5),
        lengths in prop::collection::vec(1..3_usize, 5),
        answers in prop::collection::vec(any::<prop::sample::Index>(), 40),
    ) {
        let region = Mapping::anonymous(4096).unwrap();
        let mut p = Pair::new(SIZE, true, false, 0);
        restart_device(&mut p, &region);
        let mut chain = Chain::default();
        let mut last = Vec::new();
        let mut free_descriptors = usize::from(SIZE);
        for count in lengths.into_iter().take_while(|count| free_descriptors.checked_sub(*count).map(|left| free_descriptors = left).is_some()) {
            p.driver.add(&[(DATA, 1); 2][..count], &[], 0).unwrap();
            p.driver.publish();
            prop_assert_eq!(p.device.pop(&p.memory.view, &mut chain), Ok(true));
            last.push(last.last().map_or(0, |at| at + 1) + count - 1);
        }
        for (entry, id) in last.iter().zip(&ids) {
            region.write(32 + 32 * entry + 16, &id.to_le_bytes());
        }
        let ids = &ids[..last.len()];
        let good = ids.iter().all(|id| *id < SIZE && ids.iter().filter(|other| *other == id).count() == 1);
        let part = RingMemory::new(region, 0, PackedInflight::stride(SIZE));
        p.device = DeviceQueue::new(p.device.config().clone(), &p.memory.table).unwrap();
        prop_assert_eq!(p.device.track(part).is_ok(), good);
        let mut taken: Vec<(u16, u16)> = Vec::new();
        for at in answers.iter().filter(|_| good) {
            // The driver frees each answered chain and ignores IDs that it never used.
            while p.device.pop(&p.memory.view, &mut chain) == Ok(true) {
                prop_assert!(taken.iter().all(|(id, _)| *id != chain.id), "{} twice", chain.id);
                taken.push((chain.id, chain.descriptors));
            }
            if !taken.is_empty() {
                let (id, descriptors) = taken.swap_remove(at.index(taken.len()));
                p.device.push(id, descriptors, 0);
                p.device.publish();
            }
            p.driver.add(&[(DATA, 1)], &[], 0);
            p.driver.publish();
        }
    }
}

#[test]
fn region_that_is_too_small_or_of_another_layout_is_refused() {
    let region = Mapping::anonymous(4096).unwrap();
    let mut p = Pair::new(SIZE, true, false, 0);
    let short = RingMemory::new(region.clone(), 0, PackedInflight::stride(SIZE) - 64);
    assert!(matches!(
        p.device.track(short),
        Err(QueueError::Inflight { .. })
    ));
    region.write(8, &[2, 0, SIZE as u8, 0]);
    let part = RingMemory::new(region, 0, PackedInflight::stride(SIZE));
    assert!(matches!(
        p.device.track(part),
        Err(QueueError::Inflight { .. })
    ));
}

/// The layout is that of the protocol, so that other back ends can continue (vhost-user, "For packed virtqueue").
#[test]
fn region_is_laid_out_as_the_protocol_says() {
    let region = Mapping::anonymous(4096).unwrap();
    let mut p = Pair::new(SIZE, true, false, 0);
    restart_device(&mut p, &region);
    let mut chain = Chain::default();
    let elements = [(DATA, 1), (DATA + 16, 2)];
    for token in 0..2 {
        p.driver.add(&elements, &[], token).unwrap();
        p.driver.publish();
        assert_eq!(p.device.pop(&p.memory.view, &mut chain), Ok(true));
    }
    p.device.push(chain.id, 2, 0);
    p.device.publish();
    let bytes = image(&region);
    // features, version 1, desc_num 8
    assert_eq!(bytes[..12], [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 8, 0]);
    // free_head 2, old_free_head 2, used_idx 2, old_used_idx 2, both wrap counters 1
    assert_eq!(bytes[12..22], [2, 0, 2, 0, 2, 0, 2, 0, 1, 1]);
    let state = |entry: usize| &bytes[32 + 32 * entry..][..32];
    // inflight, padding, next 1, last 1, num 2, counter 0
    assert_eq!(state(0)[..8], [1, 0, 1, 0, 1, 0, 2, 0]);
    assert_eq!(state(0)[8..16], [0; 8]);
    // id 0 in both; flags: AVAIL and NEXT in the first, AVAIL in the last; len 1 and 2; addr
    assert_eq!(
        (&state(0)[16..18], &state(1)[16..18]),
        (&[0; 2][..], &[0; 2][..])
    );
    assert_eq!(state(0)[18..24], [0x81, 0, 1, 0, 0, 0]);
    assert_eq!(state(0)[24..], DATA.to_le_bytes());
    assert_eq!(state(1)[18..24], [0x80, 0, 2, 0, 0, 0]);
    assert_eq!(state(1)[24..], (DATA + 16).to_le_bytes());
    // The second chain is free: its two entries are linked, and the last leads from 3 to 4.
    assert_eq!(state(2)[..8], [0, 0, 3, 0, 3, 0, 2, 0]);
    assert_eq!(state(2)[8..16], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(state(3)[2..4], [4, 0]);
}

/// After an orderly stop the front end has the ring's position, or sets the ring up again.
#[test]
fn part_that_is_settled_believes_the_front_end() {
    let region = Mapping::anonymous(4096).unwrap();
    let part = || RingMemory::new(region.clone(), 0, PackedInflight::stride(SIZE));
    let mut p = Pair::new(SIZE, true, false, 0);
    restart_device(&mut p, &region);
    let mut chain = Chain::default();
    for token in 0..2 {
        p.driver.add(&[(DATA, 1)], &[], token).unwrap();
        p.driver.publish();
        assert_eq!(p.device.pop(&p.memory.view, &mut chain), Ok(true));
        PackedInflight::reset_unused(&part(), SIZE);
        assert_eq!(region_version(&region), 1, "with something in flight");
        p.device.push(chain.id, 1, 0);
        p.device.publish();
    }
    let base = p.device.base();
    PackedInflight::reset_unused(&part(), SIZE);
    assert_eq!(region_version(&region), 0);
    let mut restarted = Pair::new(SIZE, true, false, 0);
    restarted.device.track(part()).unwrap();
    assert_ne!(restarted.device.base(), base);
    restarted.driver.add(&[(DATA, 1)], &[], 7).unwrap();
    restarted.driver.publish();
    assert_eq!(
        restarted.device.pop(&restarted.memory.view, &mut chain),
        Ok(true)
    );
}

fn region_version(region: &Mapping) -> u8 {
    let mut version = [0];
    region.read(8, &mut version);
    version[0]
}

/// Firmware may use the queue as split, and the kernel it starts as packed, with the same region.
#[test]
fn part_of_a_split_queue_that_has_stopped_serves_a_packed_one() {
    let region = Mapping::anonymous(4096).unwrap();
    let part = || RingMemory::new(region.clone(), 0, PackedInflight::stride(SIZE));
    let mut p = Pair::new(SIZE, false, false, 0);
    p.device.track(part()).unwrap();
    let mut chain = Chain::default();
    for token in 0..3 {
        p.driver.add(&[(DATA, 1)], &[], token).unwrap();
        p.driver.publish();
        assert_eq!(p.device.pop(&p.memory.view, &mut chain), Ok(true));
        p.device.push(chain.id, 1, 0);
        p.device.publish();
    }
    Inflight::reset_unused(&part(), SIZE);
    let mut restarted = Pair::new(SIZE, true, false, 0);
    restarted.device.track(part()).unwrap();
    restarted.driver.add(&[(DATA, 1)], &[], 7).unwrap();
    restarted.driver.publish();
    assert_eq!(
        restarted.device.pop(&restarted.memory.view, &mut chain),
        Ok(true)
    );
}

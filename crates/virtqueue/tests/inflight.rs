//! A device that dies at any point, and its successor on the same in-flight region: each request is answered once.

mod common;

use common::{DATA, Pair};
use guest_memory::{Mapping, RingMemory};
use proptest::prelude::*;
use virtqueue::{Chain, DeviceQueue, Inflight, QueueConfig, QueueError};

const SIZE: u16 = 8;

#[derive(Clone, Debug)]
enum Step {
    Add,
    Pop,
    /// Answers one request in flight.
    Answer(usize),
    Publish,
    /// Kills the process between two steps.
    Crash,
    /// Kills the process after publishing a batch and before recording that.
    CrashAfterPublish,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => Just(Step::Add),
        4 => Just(Step::Pop),
        4 => any::<prop::sample::Index>().prop_map(|at| Step::Answer(at.index(usize::from(SIZE)))),
        3 => Just(Step::Publish),
        1 => Just(Step::Crash),
        1 => Just(Step::CrashAfterPublish),
    ];
    prop::collection::vec(step, 1..300)
}

/// Returns the driver's token: the offset of the chain's first element.
fn token(p: &Pair, chain: &Chain) -> u64 {
    p.memory.elements(chain)[0].0 - DATA
}

fn restart_device(p: &mut Pair, region: &std::sync::Arc<Mapping>, base: u16) {
    let config = QueueConfig {
        base: base.into(),
        ..p.device.config().clone()
    };
    p.device = DeviceQueue::new(config, &p.memory.table).unwrap();
    let part = RingMemory::new(region.clone(), 0, Inflight::stride(SIZE));
    p.device.track(part).unwrap();
}

proptest! {
    #[test]
    fn every_request_is_answered_once_wherever_the_device_dies(steps in steps(), start in any::<u16>()) {
        let region = Mapping::anonymous(4096).unwrap();
        let mut p = Pair::new(SIZE, false, false, start);
        restart_device(&mut p, &region, start);
        let mut chain = Chain::default();
        let mut added = 0_u64;
        // Requests that the current device has popped, in order, and answered without publishing.
        let mut taken: Vec<(u64, u16)> = Vec::new();
        let mut unpublished: Vec<(u64, u16)> = Vec::new();
        let mut expected_next = 0_u64;
        let mut to_repeat: std::collections::VecDeque<u64> = Default::default();
        let mut seen: Vec<u64> = Vec::new();
        let all = steps.into_iter().chain([Step::Crash]);
        // Finally, everything is popped and answered.
        let rest = std::iter::repeat_n([Step::Pop, Step::Answer(0), Step::Publish], 2 * usize::from(SIZE)).flatten();
        for step in all.chain(rest) {
            match step {
                Step::Add => {
                    if p.driver.add(&[(DATA + added, 1)], &[], added).is_some() {
                        p.driver.publish();
                        added += 1;
                    }
                }
                Step::Pop => {
                    let more = !to_repeat.is_empty() || expected_next < added;
                    prop_assert_eq!(p.device.available() > 0, more);
                    let popped = p.device.pop(&p.memory.view, &mut chain).unwrap();
                    prop_assert_eq!(popped, more);
                    if popped {
                        let expected = to_repeat.pop_front().unwrap_or_else(|| {
                            expected_next += 1;
                            expected_next - 1
                        });
                        prop_assert_eq!(token(&p, &chain), expected);
                        taken.push((expected, chain.id));
                    }
                }
                Step::Answer(at) if !taken.is_empty() => {
                    let one = taken.remove(at % taken.len());
                    p.device.push(one.1, 1, 0);
                    unpublished.push(one);
                }
                Step::Answer(_) => {}
                Step::Publish => {
                    p.device.publish();
                    unpublished.clear();
                }
                Step::Crash | Step::CrashAfterPublish => {
                    if matches!(step, Step::CrashAfterPublish) {
                        let mut before = vec![0; Inflight::stride(SIZE)];
                        region.read(0, &mut before);
                        p.device.publish();
                        unpublished.clear();
                        region.write(0, &before);
                    }
                    // Original order: requests that were to be repeated come first.
                    let mut open: Vec<u64> = to_repeat.drain(..).collect();
                    open.extend(taken.drain(..).chain(unpublished.drain(..)).map(|(token, _)| token));
                    open.sort_unstable();
                    to_repeat.extend(open);
                    // The front end may send any base: the region decides.
                    restart_device(&mut p, &region, 7);
                }
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
    fn any_bytes_as_a_region_harm_nobody(bytes in prop::collection::vec(any::<u8>(), Inflight::stride(SIZE)), version in any::<bool>()) {
        let region = Mapping::anonymous(4096).unwrap();
        region.write(0, &bytes);
        if version {
            region.write(8, &[1, 0, SIZE as u8, 0]);
        }
        let mut p = Pair::new(SIZE, false, false, 0);
        let part = RingMemory::new(region, 0, Inflight::stride(SIZE));
        if p.device.track(part).is_err() {
            return Ok(());
        }
        let mut chain = Chain::default();
        for _ in 0..=SIZE {
            if let Ok(true) = p.device.pop(&p.memory.view, &mut chain) {
                p.device.push(chain.id, chain.descriptors, 0);
            }
        }
        p.device.publish();
    }
}

#[test]
fn region_that_is_too_small_or_of_another_layout_is_refused() {
    let region = Mapping::anonymous(4096).unwrap();
    let mut p = Pair::new(SIZE, false, false, 0);
    let short = RingMemory::new(region.clone(), 0, Inflight::stride(SIZE) - 64);
    assert!(matches!(
        p.device.track(short),
        Err(QueueError::Inflight { .. })
    ));
    region.write(8, &[2, 0, SIZE as u8, 0]);
    let part = RingMemory::new(region, 0, Inflight::stride(SIZE));
    assert!(matches!(
        p.device.track(part),
        Err(QueueError::Inflight { .. })
    ));
}

/// The layout is that of the protocol, so that other back ends can continue (vhost-user, "queue region for split virtqueues").
#[test]
fn region_is_laid_out_as_the_protocol_says() {
    let region = Mapping::anonymous(4096).unwrap();
    let mut p = Pair::new(SIZE, false, false, 0);
    restart_device(&mut p, &region, 0);
    let mut chain = Chain::default();
    for token in 0..2 {
        p.driver.add(&[(DATA + token, 1)], &[], token).unwrap();
        p.driver.publish();
        assert_eq!(p.device.pop(&p.memory.view, &mut chain), Ok(true));
    }
    let second = chain.id;
    p.device.push(second, 1, 0);
    p.device.publish();
    let mut bytes = vec![0; 16 + 16 * usize::from(SIZE)];
    region.read(0, &mut bytes);
    // features, version 1, desc_num 8, last_batch_head, used_idx 1
    assert_eq!(bytes[..12], [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 8, 0]);
    assert_eq!(bytes[12..16], [second as u8, 0, 1, 0]);
    let state = |head: u16| &bytes[16 + 16 * usize::from(head)..][..16];
    let first = u16::from(second == 0);
    // inflight, padding, next, counter
    assert_eq!(state(first)[0], 1);
    assert_eq!(state(first)[8..], [0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(state(second)[0], 0);
    assert_eq!(state(second)[8..], [1, 0, 0, 0, 0, 0, 0, 0]);
}

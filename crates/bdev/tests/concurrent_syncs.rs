//! Two concurrent flushes on a simulated ring, one failing. The kernel reports that once; neither flush may succeed.

use std::time::Duration;

use bdev::{
    Attach, BlockDevice, CacheMode, File, FileOptions, Finished, IoChannel, Submission, Tag,
};
use block::{IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use uring::simulated::{Faults, Files};
use uring::{Owner, Ring, Wait};

fn submit(ring: &mut Ring, channel: &mut dyn IoChannel, io: IoRequest, tag: u64) {
    let mut buffer = IoBuffer::owned(4096);
    buffer.set_window(0, io.length as usize);
    let submitted = channel.submit(ring, &io, &mut buffer, Tag(tag));
    assert!(matches!(submitted, Submission::Pending));
}

/// Returns the outcomes in the order of their ends.
fn finish(ring: &mut Ring, channel: &mut dyn IoChannel, count: usize) -> Vec<IoOutcome> {
    let (mut completions, mut finished) = (Vec::new(), Vec::<Finished>::new());
    for _ in 0..1000 {
        ring.enter(Wait::No, &mut completions).unwrap();
        for completion in completions.drain(..) {
            channel.complete(ring, completion, &mut finished);
        }
        if finished.len() == count {
            return finished.iter().map(|one| one.outcome).collect();
        }
    }
    panic!("{} of {count} I/Os ended", finished.len());
}

fn flushes(seed: u64) -> Vec<IoOutcome> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, [0; 64 << 10]).unwrap();
    Files::begin(seed);
    Files::add_file(&std::fs::File::open(&path).unwrap()).unwrap();
    let file = File::open(FileOptions {
        cache: CacheMode::Writeback,
        ..FileOptions::new(&path)
    });
    let mut ring = Ring::simulated(seed, || Duration::ZERO);
    let mut owners = (0..).map(Owner);
    let mut owner = || owners.next().unwrap();
    let channel = file
        .unwrap()
        .attach(&mut Attach::new(&mut ring, &mut owner));
    let mut channel = channel.unwrap();
    submit(&mut ring, channel.as_mut(), IoRequest::write(0, 4096), 1);
    finish(&mut ring, channel.as_mut(), 1);
    Files::set_faults(Faults {
        sync: 2,
        ..Faults::default()
    });
    submit(&mut ring, channel.as_mut(), IoRequest::flush(), 2);
    submit(&mut ring, channel.as_mut(), IoRequest::flush(), 3);
    let outcomes = finish(&mut ring, channel.as_mut(), 2);
    drop((channel, ring));
    Files::end();
    outcomes
}

#[test]
fn flush_beside_one_that_fails_fails_in_any_order() {
    let (mut failed, mut passed) = (0, 0);
    for seed in 0..300 {
        let outcomes = flushes(seed);
        let good = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
        assert_ne!(good, 1, "seed {seed}: {outcomes:?}");
        failed += usize::from(good == 0);
        passed += usize::from(good == 2);
    }
    assert!(
        failed > 30 && passed > 30,
        "{failed} failed, {passed} passed"
    );
}

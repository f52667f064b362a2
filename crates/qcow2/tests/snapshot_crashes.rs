//! Creates, applies and deletes snapshots, and examines every state that a killed process or a power cut may leave: the next open finds
//! the old or the new disk, without faults. `LUNETTE_SEEDS=10000` runs more seeds.

mod common;

use common::{Bytes, Event, Recorded, SECTOR, apply, read, tear, write};
use fastrand::Rng;
use qcow2::{CreateOptions, Image, OpenOptions, Repair, create};

const WRITABLE: OpenOptions = OpenOptions::READ_WRITE;

fn content(storage: &Recorded) -> Vec<u8> {
    let mut image = Image::open(storage, WRITABLE).unwrap();
    let mut content = vec![0; image.header().size as usize];
    read(&mut image, &mut None::<Bytes>, 0, &mut content);
    image.close().unwrap();
    content
}

fn scribble(storage: &Recorded, random: &mut Rng) {
    let mut image = Image::open(storage, WRITABLE).unwrap();
    let sectors = image.header().size / 512;
    for _ in 0..8 {
        let from = random.u64(..sectors);
        let count = (1 + random.u64(..40)).min(sectors - from) as usize;
        let content = vec![1 + random.u64(..250) as u8; count * SECTOR];
        write(&mut image, &mut None, from * 512, &content).unwrap();
    }
    image.close().unwrap();
}

#[derive(Clone, Copy, Debug)]
enum Change {
    Create,
    Apply,
    Delete,
}

fn make(storage: &Recorded, change: Change, name: &str) {
    let image = Image::open(storage, WRITABLE).unwrap();
    match change {
        Change::Create => image.create_snapshot(name, 1).map(drop).unwrap(),
        Change::Apply => image.apply_snapshot(name).unwrap(),
        Change::Delete => image.delete_snapshot(name).unwrap(),
    }
}

/// Checks that the remaining image has no faults once opened and has one of two contents.
fn examine(left: Vec<u8>, allowed: [&[u8]; 2], case: &str) {
    let storage = Recorded::of(left);
    let found = content(&storage);
    assert!(allowed.contains(&&*found), "{case}: another disk");
    let report = Image::check(&storage, Repair::Leaks).unwrap();
    assert!(report.is_clean(), "{case}: {:?}", report.findings);
    let report = Image::check(&storage, Repair::Nothing).unwrap();
    assert_eq!((report.leaks, report.corruptions), (0, 0), "{case}");
}

fn left_at(before: &[u8], events: &[Event]) -> Vec<u8> {
    let mut left = before.to_vec();
    events.iter().for_each(|event| apply(&mut left, event));
    left
}

#[test]
fn crash_during_a_snapshot_change_leaves_the_old_or_the_new_disk() {
    let seeds = std::env::var("LUNETTE_SEEDS").ok();
    let seeds: u64 = seeds.and_then(|seeds| seeds.parse().ok()).unwrap_or(6);
    for seed in 0..seeds {
        let random = &mut Rng::with_seed(seed);
        let first = Recorded::default();
        let extended_l2 = seed % 3 == 2;
        let options = CreateOptions {
            cluster_bits: match extended_l2 {
                true => 14,
                false => 9 + random.u64(..4) as u32,
            },
            extended_l2,
            ..CreateOptions::new((64 + random.u64(..600)) * 512)
        };
        create(&&first, &options).unwrap();
        scribble(&first, random);
        make(&first, Change::Create, "kept");
        let kept = content(&first);
        scribble(&first, random);
        for (change, name) in [
            (Change::Create, "new"),
            (Change::Apply, "kept"),
            (Change::Delete, "kept"),
        ] {
            let before = first.bytes();
            let old = content(&Recorded::of(before.clone()));
            let changed = Recorded::of(before.clone());
            make(&changed, change, name);
            let new = content(&Recorded::of(changed.bytes()));
            match change {
                Change::Apply => assert_eq!(new, kept),
                Change::Create | Change::Delete => assert_eq!(new, old),
            }
            let events = changed.history();
            for last in 0..=events.len() {
                let case = format!("seed {seed}, {change:?}, {last} of {} writes", events.len());
                examine(left_at(&before, &events[..last]), [&old, &new], &case);
                let is_sync = |event: &Event| matches!(event, Event::Sync);
                let durable = events[..last].iter().rposition(is_sync);
                let durable = durable.map_or(0, |at| at + 1);
                let mut left = left_at(&before, &events[..durable]);
                for event in &events[durable..last] {
                    tear(event, 1 + random.u64(..3), random, &mut left);
                }
                examine(left, [&old, &new], &format!("{case}, power cut"));
            }
        }
    }
}

#[test]
fn images_that_cannot_have_snapshots_are_refused_unchanged() {
    let storage = Recorded::default();
    let options = CreateOptions {
        refcount_order: 3,
        ..CreateOptions::new(1 << 20)
    };
    create(&&storage, &options).unwrap();
    let before = storage.bytes();
    let image = Image::open(&storage, WRITABLE).unwrap();
    let refused = image.create_snapshot("one", 1).unwrap_err();
    assert!(refused.to_string().contains("8 bits"), "{refused}");
    assert_eq!(storage.bytes(), before);
    let image = Image::open(&storage, WRITABLE).unwrap();
    assert!(image.create_snapshot("", 1).is_err());
    let image = Image::open(&storage, WRITABLE).unwrap();
    assert!(image.delete_snapshot("none").is_err());
    assert_eq!(storage.bytes(), before);
}

/// Compares all sectors of an image with a disk of its size.
fn holds(image: &mut Image<&Recorded>, below: &[u8], disk: &[u8], case: &str) {
    let mut found = vec![0; disk.len()];
    read(image, &mut Some(Bytes(below.to_vec())), 0, &mut found);
    let differs = found.iter().zip(disk).position(|(one, other)| one != other);
    assert_eq!(differs, None, "{case}");
}

/// If any write or sync of a resize fails, the disk and the image remain usable.
#[test]
fn a_resize_that_fails_leaves_an_image_without_faults() {
    for seed in 0..12 {
        let random = &mut Rng::with_seed(seed);
        let first = Recorded::default();
        let cluster_bits = 9 + random.u64(..3) as u32;
        let sectors = 64 + random.u64(..300);
        let options = CreateOptions {
            cluster_bits,
            ..CreateOptions::new(sectors * 512)
        };
        create(&&first, &options).unwrap();
        let below: Vec<u8> = vec![9; ((sectors + 3) * 512) as usize];
        let write_some = |image: &mut Image<&Recorded>, disk: &mut Vec<u8>, random: &mut Rng| {
            for _ in 0..4 {
                let from = random.u64(..disk.len() as u64 / 512);
                let byte = 1 + random.u64(..250) as u8;
                let below = &mut Some(Bytes(below.clone()));
                write(image, below, from * 512, &[byte; SECTOR]).unwrap();
                disk[from as usize * 512..][..512].fill(byte);
            }
        };
        let mut disk = vec![9; (sectors * 512) as usize];
        let mut image = Image::open(&first, WRITABLE).unwrap();
        write_some(&mut image, &mut disk, random);
        image.close().unwrap();
        make(&first, Change::Create, "kept");
        for new in [sectors + 1, sectors + 20, sectors * 200, sectors / 2] {
            for failing in 0.. {
                let case = format!("seed {seed}, {new} for {sectors} sectors, {failing} well");
                let storage = Recorded::of(first.bytes());
                let mut disk = disk.clone();
                let mut image = Image::open(&storage, WRITABLE).unwrap();
                write_some(&mut image, &mut disk, random);
                storage.fails_after.set(Some(storage.events() + failing));
                let mut backing = Bytes(below.clone());
                let resized = image.resize(new * 512, Some(&mut backing));
                let has_failed = storage.fails_after.take().is_none();
                let size = image.header().size;
                assert!(resized.is_err() || size == new * 512, "{case}");
                assert!(resized.is_ok() || size == sectors * 512, "{case}");
                if resized.is_err() && new < sectors {
                    // The part to be removed may be zeroed already.
                    let kept = (new * 512) as usize;
                    read(
                        &mut image,
                        &mut Some(Bytes(below.clone())),
                        0,
                        &mut disk[..kept],
                    );
                    let mut all = disk.clone();
                    read(&mut image, &mut Some(Bytes(below.clone())), 0, &mut all);
                    disk = all;
                }
                disk.resize(size as usize, 0);
                holds(&mut image, &below, &disk, &case);
                write_some(&mut image, &mut disk, random);
                image.release().unwrap();
                write_some(&mut image, &mut disk, random);
                holds(&mut image, &below, &disk, &case);
                image.close().unwrap();
                let report = Image::check(&storage, Repair::Nothing).unwrap();
                assert_eq!(report.corruptions, 0, "{case}: {:?}", report.findings);
                let mut image = Image::open(&storage, WRITABLE).unwrap();
                disk.resize(image.header().size as usize, 0);
                holds(&mut image, &below, &disk, &case);
                if !has_failed {
                    break;
                }
            }
        }
    }
}

//! Images with damaged bytes in the header and the tables. `LUNETTE_SEEDS=100000` runs more seeds.

mod common;

use common::hostile::use_in_every_way;
use common::{Bytes, Recorded, read, write};
use fastrand::Rng;
use qcow2::{Backing, CreateOptions, Image, Mapping, OpenOptions, Repair, create};

/// Creates an image with tables, data and zeroes.
fn image(random: &mut Rng) -> Vec<u8> {
    let storage = Recorded::default();
    let extended_l2 = random.u64(..4) == 0;
    let options = CreateOptions {
        cluster_bits: match extended_l2 {
            true => 14,
            false => 9 + random.u64(..3) as u32,
        },
        refcount_order: random.u64(..7) as u32,
        extended_l2,
        ..CreateOptions::new(512 * (100 + random.u64(..1000)))
    };
    create(&&storage, &options).unwrap();
    let mut image = Image::open(&storage, OpenOptions::READ_WRITE).unwrap();
    for _ in 0..10 {
        let sector = random.u64(..options.size / 512);
        write(&mut image, &mut None, sector * 512, &[9; 512]).unwrap();
    }
    image.close().unwrap();
    storage.bytes()
}

#[test]
fn damaged_images_are_refused_or_served_with_errors() {
    let seeds = std::env::var("LUNETTE_SEEDS").ok();
    let seeds = seeds.and_then(|seeds| seeds.parse().ok()).unwrap_or(400);
    for seed in 0..seeds {
        let random = &mut Rng::with_seed(seed);
        let mut bytes = image(random);
        for _ in 0..1 + random.u64(..4) {
            // Most offsets are in the first clusters.
            let region = if random.u64(..3) == 0 {
                112
            } else {
                bytes.len().min(if random.u64(..2) == 0 {
                    16_384
                } else {
                    131_072
                })
            };
            let at = random.u64(..region as u64) as usize;
            match random.u64(..4) {
                0 => bytes[at] = random.u64(..256) as u8,
                1 => bytes[at] ^= 1 << random.u64(..8),
                2 => {
                    let at = at / 8 * 8;
                    let target = random.u64(..bytes.len() as u64 * 2) & !511;
                    let entry = (1_u64 << 63 | target).to_be_bytes();
                    let end = bytes.len().min(at + 8);
                    bytes[at..end].copy_from_slice(&entry[..end - at]);
                }
                _ => {
                    let at = at / 8 * 8;
                    let end = bytes.len().min(at + 8);
                    let entry = random.u64(..).to_be_bytes();
                    bytes[at..end].copy_from_slice(&entry[..end - at]);
                }
            }
        }
        use_in_every_way(bytes);
    }
}

#[test]
fn impossible_sizes_are_refused_before_allocation() {
    let mut sound = image(&mut Rng::with_seed(1));
    sound.resize(1 << 20, 0);
    for (at, field, reason) in [
        (20, &[0, 0, 0, 40][..], "cluster size 2^40 bytes"),
        (24, &[0x80; 8], "disk size"),
        (36, &[0xff; 4], "L1 table of"),
        (40, &[0; 8], "L1 table has an invalid location: offset 0"),
        (48, &[0xff; 8], "refcount table has an invalid location"),
        (56, &[0xff; 4], "refcount table of"),
        (60, &[0xff; 4], "snapshots: 4294967295"),
        (72, &[0, 0, 0, 0, 0, 0, 0, 4], "external data file"),
        (72, &[0, 0, 0, 0, 0, 0, 1, 0], "bits 0x100"),
        (96, &[0, 0, 0, 7], "2^7 bits"),
    ] {
        let mut bytes = sound.clone();
        bytes[at..at + field.len()].copy_from_slice(field);
        let storage = Recorded::of(bytes);
        let opened = Image::open(&storage, OpenOptions::READ_ONLY);
        let error = opened
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default();
        assert!(error.contains(reason), "{at}: {error:?}");
    }
}

/// QEMU reads zeroes from such an image, and `qemu-img check` reports it.
#[test]
fn l1_entry_with_a_flag_and_no_table_is_unallocated() {
    for extended_l2 in [false, true] {
        let storage = Recorded::default();
        let options = CreateOptions {
            extended_l2,
            ..CreateOptions::new(64 << 20)
        };
        create(&&storage, &options).unwrap();
        let mut bytes = storage.bytes();
        let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap()) as usize;
        bytes[l1..l1 + 8].copy_from_slice(&(1_u64 << 63).to_be_bytes());
        let storage = Recorded::of(bytes);
        let mut image = Image::open(&storage, OpenOptions::READ_ONLY).unwrap();
        image.load(0).unwrap();
        let segment = image.map().segment(0, 4096);
        assert_eq!(segment.mapping, Mapping::Unallocated);
        drop(image);
        let report = Image::check(&storage, Repair::Nothing).unwrap();
        assert!(!report.is_clean(), "{report:?}");
        Image::check(&storage, Repair::All).unwrap();
        let report = Image::check(&storage, Repair::Nothing).unwrap();
        assert!(report.is_clean(), "{report:?}");
    }
}

/// Another program has cut the disk by its header alone: its L2 table has valid and damaged entries beyond the end.
#[test]
fn growth_clears_entries_beyond_the_old_end() {
    const CLUSTER: u64 = 1 << 16;
    for (extended_l2, backing) in [(false, 0), (true, 0), (false, 14), (true, 14)] {
        let storage = Recorded::default();
        let options = CreateOptions {
            extended_l2,
            ..CreateOptions::new(20 * CLUSTER)
        };
        create(&&storage, &options).unwrap();
        let mut image = Image::open(&storage, OpenOptions::READ_WRITE).unwrap();
        for cluster in [0, 10, 12, 17] {
            let content = vec![9; CLUSTER as usize];
            write(&mut image, &mut None, cluster * CLUSTER, &content).unwrap();
        }
        image.close().unwrap();
        drop(image);
        let mut bytes = storage.bytes();
        bytes[24..32].copy_from_slice(&(10 * CLUSTER - 512).to_be_bytes());
        let be64 = |bytes: &[u8], at: usize| {
            u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) & !(1 << 63)
        };
        let l1 = be64(&bytes, 40) as usize;
        let entry_bytes = 8 << usize::from(extended_l2);
        let damaged = be64(&bytes, l1) as usize + 15 * entry_bytes;
        bytes[damaged] = 1;

        let storage = Recorded::of(bytes);
        let mut image = Image::open(&storage, OpenOptions::READ_WRITE).unwrap();
        let mut below = (backing > 0).then(|| Bytes(vec![5; (backing * CLUSTER) as usize]));
        let resized = {
            let below = below.as_mut().map(|below| below as &mut dyn Backing);
            image.resize(20 * CLUSTER, below)
        };
        let case = format!("extended {extended_l2}, backing image of {backing} clusters");
        resized.unwrap_or_else(|error| panic!("{case}: {error}"));
        let mut content = vec![1; (10 * CLUSTER + 512) as usize];
        read(&mut image, &mut below, 10 * CLUSTER - 512, &mut content);
        let stale = content.iter().position(|byte| *byte != 0);
        assert_eq!(stale, None, "{case}");
        let mut first = [0; 512];
        read(&mut image, &mut below, 0, &mut first);
        assert_eq!(first, [9; 512], "{case}");
        image.close().unwrap();
        drop(image);
        let report = Image::check(&storage, Repair::Nothing).unwrap();
        assert_eq!((report.leaks, report.corruptions), (0, 0), "{case}");
    }
}

/// All entries of an L1 table refer to one full L2 table: the check costs as much as for one table.
#[test]
fn a_table_that_is_named_a_million_times_is_read_twice() {
    const ENTRIES: usize = 1 << 20;
    let storage = Recorded::default();
    let options = CreateOptions {
        cluster_bits: 9,
        ..CreateOptions::new(ENTRIES as u64 * 64 * 512)
    };
    create(&&storage, &options).unwrap();
    let mut bytes = storage.bytes();
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap()) as usize;
    let table = bytes.len() as u64;
    bytes.resize(bytes.len() + 512, 0x80);
    for entry in bytes[l1..l1 + ENTRIES * 8].chunks_exact_mut(8) {
        entry.copy_from_slice(&(1_u64 << 63 | table).to_be_bytes());
    }
    let storage = Recorded::of(bytes);
    let report = Image::check(&storage, Repair::Nothing).unwrap();
    assert!(!report.is_clean());
    let blocks = ENTRIES as u64 * 8 / 512 / 256;
    assert!(
        storage.reads.get() < 2 * blocks + 200,
        "{} reads",
        storage.reads.get()
    );
    // One image does not map an L2 table twice: the second use is rejected when the table is loaded.
    let mut image = Image::open(&storage, OpenOptions::READ_ONLY).unwrap();
    image.load(0).unwrap();
    assert!(
        image
            .load(64 * 512)
            .unwrap_err()
            .to_string()
            .contains("two L2 tables")
    );
}

//! Uses an image at random and examines every state that a killed process or a power cut may leave: leaked clusters are the only faults,
//! and written data is present.
//!
//! A killed process leaves all writes up to a point. A power cut leaves all writes up to the last sync, and any sectors of later writes.
//! `LUNETTE_SEEDS=100000` runs more seeds; a failure shows its seed.

mod common;

use common::{Bytes, Event, Recorded, SECTOR, apply, read, tear, write};
use std::ops::Range;

use fastrand::Rng;
use qcow2::{CheckReport, CreateOptions, Image, OpenOptions, Repair, Storage, create};

const WRITABLE: OpenOptions = OpenOptions::READ_WRITE;

/// History of each sector of the disk: event number of the storage and value.
struct Model {
    sectors: Vec<Vec<(usize, u8)>>,
}

impl Model {
    fn new(content: &[u8]) -> Model {
        let first = |sector: &[u8]| vec![(0, sector[0])];
        Model {
            sectors: content.chunks(SECTOR).map(first).collect(),
        }
    }

    /// Records that a sector may have the value from `begun` on and has it from `done` on.
    fn put(&mut self, sectors: std::ops::Range<usize>, begun: usize, done: usize, value: u8) {
        for sector in &mut self.sectors[sectors] {
            sector.push((begun, value));
            sector.push((done, value));
        }
    }

    /// Returns the permitted values of a sector if all events up to `durable` and any events up to `last` took effect.
    fn allowed(&self, sector: usize, durable: usize, last: usize) -> Vec<u8> {
        let history = &self.sectors[sector];
        // The last value that was completed before `durable`: entries are pairs of begun and done.
        let mut base = 0;
        for (n, (at, _)) in history.iter().enumerate() {
            let is_done = n % 2 == 0;
            if is_done && *at <= durable {
                base = n;
            }
        }
        let possible = history[base..].iter().filter(|(at, _)| *at <= last);
        possible.map(|(_, value)| *value).collect()
    }
}

struct Run {
    is_closed: bool,
    history: Vec<Event>,
    model: Model,
    backing: Option<Vec<u8>>,
    size: u64,
}

/// Sets the zero flag of some data clusters, as QEMU does when it zeroes preallocated clusters. Returns their sectors.
fn zero_and_keep(storage: &&Recorded, random: &mut Rng) -> Vec<Range<usize>> {
    const COPIED: u64 = 1 << 63;
    let number = |at: u64| {
        let mut bytes = [0; 8];
        storage.read_at(at, &mut bytes).unwrap();
        u64::from_be_bytes(bytes)
    };
    let cluster_bits = number(20) >> 32;
    let is_extended = number(72) & 1 << 4 != 0;
    let entry_bytes = if is_extended { 16 } else { 8 };
    let per_table = (1 << cluster_bits) / entry_bytes;
    let (entries, l1) = (number(32) & 0xffff_ffff, number(40));
    let mut zeroed = Vec::new();
    for table in 0..entries {
        let at = number(l1 + table * 8);
        for index in (0..per_table).filter(|_| at & COPIED != 0) {
            let place = (at & !COPIED) + index * entry_bytes;
            let entry = number(place);
            if entry & COPIED == 0 || random.u64(..4) != 0 {
                continue;
            }
            let first = ((table * per_table + index) << (cluster_bits - 9)) as usize;
            if is_extended {
                // Each subcluster of a 16 KiB cluster has one sector.
                let zero = random.u64(..1 << 32);
                let parts = number(place + 8) & !zero | zero << 32;
                storage.write_at(place + 8, &parts.to_be_bytes()).unwrap();
                let sectors = (0..32).filter(|part| zero >> part & 1 == 1);
                zeroed.extend(sectors.map(|part| first + part..first + part + 1));
            } else {
                storage.write_at(place, &(entry | 1).to_be_bytes()).unwrap();
                zeroed.push(first..first + (1 << (cluster_bits - 9)));
            }
        }
    }
    storage.sync().unwrap();
    zeroed
}

/// Creates the content of a backing image.
fn backing_of(size: u64, random: &mut Rng) -> Vec<u8> {
    let sectors = 1 + random.u64(..size / 512 + 20);
    (0..sectors)
        .flat_map(|n| [(n % 250 + 1) as u8; SECTOR])
        .collect()
}

fn use_at_random(seed: u64) -> Run {
    let random = &mut Rng::with_seed(seed);
    let extended_l2 = random.u64(..3) == 0;
    let cluster_bits = match extended_l2 {
        true => 14,
        false => 9 + random.u64(..4) as u32,
    };
    // Small clusters and wide counts cause many blocks and growing tables.
    let (refcount_order, size) = match random.u64(..3) {
        0 => (6, (64 + random.u64(..6000)) * 512),
        _ => (random.u64(..7) as u32, (64 + random.u64(..600)) * 512),
    };
    let longest = size / 512 / 25 + 1;
    let backing = (random.u64(..2) == 0).then(|| backing_of(size, random));
    let storage = Recorded::default();
    let options = CreateOptions {
        cluster_bits,
        refcount_order,
        extended_l2,
        ..CreateOptions::new(size)
    };
    create(&&storage, &options).unwrap();
    let mut first: Vec<u8> = backing.clone().unwrap_or_default();
    first.resize(size as usize, 0);
    let mut model = Model::new(&first);
    let mut below = backing.clone().map(Bytes);
    let mut image = Image::open(&storage, WRITABLE).unwrap();
    let backing_bytes = backing.as_ref().map_or(0, |backing| backing.len() as u64);
    for _ in 0..30 + random.u64(..60) {
        let sectors = size / 512;
        let from = random.u64(..sectors);
        let to = (from + 1 + random.u64(..longest)).min(sectors);
        let range = from as usize..to as usize;
        let begun = storage.events() + 1;
        match random.u64(..10) {
            0..6 => {
                let value = random.u64(..256) as u8;
                let content = vec![value; range.len() * SECTOR];
                write(&mut image, &mut below, from * 512, &content).unwrap();
                model.put(range, begun, storage.events(), value);
            }
            6..8 => {
                let cluster = 1 << cluster_bits;
                let start = (from * 512).next_multiple_of(cluster);
                let end = match to * 512 {
                    end if end == size => end,
                    end => end / cluster * cluster,
                };
                if start < end {
                    let length = end - start;
                    image.zero_clusters(start, length, backing_bytes).unwrap();
                    let range = (start / 512) as usize..(end / 512) as usize;
                    model.put(range, begun, storage.events(), 0);
                }
            }
            8 => image.release().unwrap(),
            _ if random.u64(..3) == 0 => {
                image.close().unwrap();
                let begun = storage.events() + 1;
                let end = size as usize / 512;
                for Range { start, end: last } in zero_and_keep(&&storage, random) {
                    model.put(start.min(end)..last.min(end), begun, storage.events(), 0);
                }
                image = Image::open(&storage, WRITABLE).unwrap();
            }
            _ => Storage::sync(&&storage).unwrap(),
        }
    }
    let is_closed = random.u64(..2) == 0;
    if is_closed {
        image.close().unwrap();
    }
    Run {
        is_closed,
        history: storage.history(),
        model,
        backing,
        size,
    }
}

impl Run {
    /// Examines the remaining image: it has no faults, and every sector has a permitted value.
    fn examine(&self, left: Vec<u8>, durable: usize, last: usize, case: &str) {
        let storage = Recorded::of(left);
        let report: CheckReport = Image::check(&storage, Repair::Nothing).unwrap();
        assert_eq!(report.corruptions, 0, "{case}: {:?}", report.findings);
        let mut image = Image::open(&storage, WRITABLE).unwrap();
        let mut below = self.backing.clone().map(Bytes);
        let mut content = vec![0; self.size as usize];
        read(&mut image, &mut below, 0, &mut content);
        for (sector, bytes) in content.chunks(SECTOR).enumerate() {
            let allowed = self.model.allowed(sector, durable, last);
            assert!(
                allowed.contains(&bytes[0]) && bytes.iter().all(|byte| *byte == bytes[0]),
                "{case}: sector {sector} holds {}, may hold {allowed:?}",
                bytes[0]
            );
        }
        drop(image);
        let report = Image::check(&storage, Repair::Leaks).unwrap();
        assert!(report.is_clean(), "{case}: {:?}", report.findings);
        let report = Image::check(&storage, Repair::Nothing).unwrap();
        assert_eq!((report.leaks, report.corruptions), (0, 0), "{case}");
    }

    /// Returns the content of the storage after the first `last` events.
    fn left_at(&self, last: usize) -> Vec<u8> {
        let mut left = Vec::new();
        for event in &self.history[..last] {
            apply(&mut left, event);
        }
        left
    }

    fn kill_at(&self, last: usize, seed: u64) {
        self.examine(
            self.left_at(last),
            last,
            last,
            &format!("seed {seed}, killed after {last} writes"),
        );
    }

    fn cut_power_at(&self, last: usize, random: &mut Rng, seed: u64) {
        let is_sync = |event: &Event| matches!(event, Event::Sync);
        let durable = self.history[..last]
            .iter()
            .rposition(is_sync)
            .map_or(0, |at| at + 1);
        let mut left = self.left_at(durable);
        let chance = random.u64(..5);
        for event in &self.history[durable..last] {
            tear(event, chance, random, &mut left);
        }
        let case = format!("seed {seed}, power cut after {last} writes, {durable} of them durable");
        self.examine(left, durable, last, &case);
    }
}

fn seeds() -> u64 {
    let seeds = std::env::var("LUNETTE_SEEDS").ok();
    seeds.and_then(|seeds| seeds.parse().ok()).unwrap_or(60)
}

#[test]
fn every_crash_leaves_a_consistent_image() {
    for seed in 0..seeds() {
        let run = use_at_random(seed);
        let random = &mut Rng::with_seed(seed ^ 0xc0ff_ee00);
        // The image exists after the sync of the header.
        let is_header = |event: &Event| matches!(event, Event::Write(0, _));
        let first = run.history.iter().position(is_header).unwrap() + 2;
        for _ in 0..40 {
            let last = first + random.u64(..(run.history.len() - first + 1) as u64) as usize;
            run.kill_at(last, seed);
            run.cut_power_at(last, random, seed);
            // Most changes are not durable just before a sync.
            let is_sync = |event: &Event| matches!(event, Event::Sync);
            let next = run.history[last..].iter().position(is_sync);
            let last = next.map_or(last, |next| last + next);
            run.cut_power_at(last, random, seed);
        }
        run.kill_at(run.history.len(), seed);
        if run.is_closed {
            let storage = Recorded::of(run.left_at(run.history.len()));
            let report = Image::check(&storage, Repair::Nothing).unwrap();
            assert_eq!(report.leaks, 0, "seed {seed}: {:?}", report.findings);
        }
    }
}

#[test]
fn full_file_system_fails_only_writes() {
    for seed in 0..seeds() / 3 {
        let random = &mut Rng::with_seed(seed);
        let storage = Recorded::default();
        let options = CreateOptions {
            cluster_bits: 9 + random.u64(..4) as u32,
            ..CreateOptions::new(512 * 512)
        };
        create(&&storage, &options).unwrap();
        let mut image = Image::open(&storage, WRITABLE).unwrap();
        let mut model = vec![0; 512];
        let limit = Storage::size(&&storage).unwrap() + random.u64(..100_000);
        *storage.limit.borrow_mut() = Some(limit);
        let mut failed = 0;
        for _ in 0..300 {
            let sector = random.u64(..512) as usize;
            let value = random.u64(..255) as u8 + 1;
            match write(&mut image, &mut None, sector as u64 * 512, &[value; SECTOR]) {
                Ok(()) => model[sector] = value,
                Err(error) => {
                    assert_eq!(error.errno(), 28, "{error}");
                    failed += 1;
                }
            }
        }
        assert!(failed > 0, "seed {seed}: {limit} bytes were enough");
        let mut content = vec![0; 512 * 512];
        read(&mut image, &mut None, 0, &mut content);
        for (sector, bytes) in content.chunks(SECTOR).enumerate() {
            assert_eq!(
                bytes, [model[sector]; SECTOR],
                "seed {seed}, sector {sector}"
            );
        }
        // With space available, writes succeed again.
        *storage.limit.borrow_mut() = None;
        for sector in 0..512 {
            write(&mut image, &mut None, sector * 512, &[7; SECTOR]).unwrap();
        }
        image.close().unwrap();
        let report = Image::check(&storage, Repair::Nothing).unwrap();
        assert_eq!(
            (report.corruptions, report.leaks),
            (0, 0),
            "seed {seed}: {report:?}"
        );
    }
}

/// The next allocation zeroes the clusters of the old refcount table.
#[test]
fn old_refcount_table_stays_until_the_new_one_is_named_durably() {
    const REFCOUNT_TABLE_FIELD: u64 = 48;
    let storage = Recorded::default();
    // The first table covers 2 MiB.
    let options = CreateOptions {
        cluster_bits: 9,
        refcount_order: 6,
        ..CreateOptions::new(4 << 20)
    };
    create(&&storage, &options).unwrap();
    let mut image = Image::open(&storage, WRITABLE).unwrap();
    write(&mut image, &mut None, 0, &vec![1; 3 << 20]).unwrap();
    let history = storage.history();
    let is_name = |event: &Event| matches!(event, Event::Write(REFCOUNT_TABLE_FIELD, _));
    let named = history.iter().position(is_name).unwrap();
    let is_sync = |event: &Event| matches!(event, Event::Sync);
    let next = history[named..].iter().position(is_sync).unwrap() + named;
    // The power cut loses the name alone.
    let mut left = Vec::new();
    for event in history[..named].iter().chain(&history[named + 1..next]) {
        apply(&mut left, event);
    }
    let report = Image::check(&Recorded::of(left), Repair::Nothing).unwrap();
    assert_eq!(report.corruptions, 0, "{:?}", report.findings);
}

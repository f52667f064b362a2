//! Disks of a run: one in memory, a raw file, and images of several kinds with backing images.

use std::path::Path;

use bdev::CacheMode;
use qcow2::{CreateOptions, DataFileOptions};

use crate::files;
use crate::life::{DataFile, DiskPlan, Lies};
use crate::model::{BLOCK, Model, Value, fill};
use crate::random::Random;

const RAM_BLOCKS: u64 = 64;
const FILE_BLOCKS: u64 = 96;
const IMAGE_BLOCKS: u64 = 160;
const IMAGES: u64 = 2;

pub(super) fn plan(folder: &Path, random: &mut Random) -> (Vec<DiskPlan>, Vec<Model>) {
    let mut plans = Vec::new();
    let mut models = Vec::new();
    let disk = |lies, name: &str, cache| DiskPlan {
        lies,
        path: folder.join(name),
        data_file: None,
        cache,
        below: Vec::new(),
        lower: Vec::new(),
    };
    plans.push(disk(Lies::Ram, "ram", CacheMode::Writeback));
    models.push(Model::new((0..RAM_BLOCKS).map(|_| 0)));
    let cache = match random.below(3) {
        0 => CacheMode::Writethrough,
        _ => CacheMode::Writeback,
    };
    plans.push(disk(Lies::File, "raw", cache));
    files::create_raw(&plans[1].path, FILE_BLOCKS, 0);
    models.push(Model::new((0..FILE_BLOCKS).map(|_| 0)));
    for number in 0..IMAGES {
        let name = format!("{number}.qcow2");
        let mut plan = disk(Lies::Image, &name, cache);
        let below = stands_on(folder, number, random);
        let options = CreateOptions {
            data_file: data_file(number, below.name.is_some(), random),
            backing: below.name,
            ..shape(IMAGE_BLOCKS, random)
        };
        files::create_image(&plan.path, &options);
        if let Some(data_file) = &options.data_file {
            let (path, is_raw) = (folder.join(&data_file.name), data_file.is_raw);
            match is_raw {
                true => files::fill_tables(&plan.path, &path),
                // The file has stale content, which must not be visible through the image.
                false => files::create_raw(&path, IMAGE_BLOCKS, 5_000_000),
            }
            plan.data_file = Some(DataFile { path, is_raw });
        }
        plan.below = below.content;
        plans.push(plan);
        let value = |lba| below.values.get(lba as usize).copied().unwrap_or(0);
        models.push(Model::new((0..IMAGE_BLOCKS).map(value)));
    }
    (plans, models)
}

pub(super) fn shape(blocks: u64, random: &mut Random) -> CreateOptions {
    let extended_l2 = random.below(3) == 0;
    CreateOptions {
        cluster_bits: match extended_l2 {
            true => 14,
            false => 9 + random.below(4) as u32,
        },
        extended_l2,
        refcount_order: 4 + random.below(2) as u32,
        ..CreateOptions::new(blocks * BLOCK as u64)
    }
}

/// Selects an external data file for some images.
fn data_file(number: u64, has_backing: bool, random: &mut Random) -> Option<DataFileOptions> {
    random.one_in(4).then(|| DataFileOptions {
        name: format!("{number}.data"),
        is_raw: !has_backing && random.one_in(2),
    })
}

/// Backing image of an image: name and format, content, and values of its blocks.
#[derive(Default)]
struct Below {
    name: Option<(String, String)>,
    content: Vec<u8>,
    values: Vec<Value>,
}

/// Selects no backing image, a raw file, or an image over a raw file. Each may be shorter than the image.
fn stands_on(folder: &Path, number: u64, random: &mut Random) -> Below {
    let blocks = match random.below(3) {
        0 => return Below::default(),
        1 => IMAGE_BLOCKS,
        _ => 1 + random.below(IMAGE_BLOCKS - 1),
    };
    let first = 1_000_000 * (number + 1);
    let raw = format!("base{number}");
    files::create_raw(&folder.join(&raw), blocks, first);
    let mut values: Vec<Value> = (0..blocks).map(|lba| first + lba).collect();
    let mut content = vec![0; blocks as usize * BLOCK];
    for (lba, block) in content.chunks_exact_mut(BLOCK).enumerate() {
        fill(block, values[lba], lba as u64);
    }
    let mut name = (raw, "raw".to_owned());
    if random.one_in(2) {
        let blocks = 1 + random.below(IMAGE_BLOCKS);
        let options = CreateOptions {
            backing: Some(name),
            ..shape(blocks, random)
        };
        let own = (0..random.below(12)).map(|_| {
            let lba = random.below(blocks);
            (lba, first + 500_000 + lba)
        });
        let own: Vec<(u64, Value)> = own.collect();
        let between = format!("between{number}");
        files::create_between(&folder.join(&between), &options, &own, &mut content);
        values.resize(blocks as usize, 0);
        for (lba, value) in own {
            values[lba as usize] = value;
        }
        name = (between, "qcow2".to_owned());
    }
    Below {
        name: Some(name),
        content,
        values,
    }
}

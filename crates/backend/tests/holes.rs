//! What an engine says of its holes: nothing before its next data is other than zero.

mod common;

use backend::{CacheMode, Engine, File, FileOptions, Ram, RamOptions};
use common::Worker;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;

fn check(name: &str, engine: &dyn Engine) {
    let mut worker = Worker::new(engine);
    let written = [0, 3 * MIB + 4096, 40 * MIB, SIZE - 4096];
    for at in written {
        worker.write(at, &[7; 4096]).unwrap();
    }
    let mut offset = 0;
    while offset < SIZE {
        let next = engine.next_data(offset);
        assert!(
            (offset..=SIZE).contains(&next),
            "{name}: {next} from {offset}"
        );
        for at in written {
            assert!(!(offset..next).contains(&at), "{name}: {at} is no hole");
        }
        offset = next.max(offset + 4096);
    }
    assert_eq!(engine.next_data(SIZE), SIZE, "{name}");
}

#[test]
fn no_data_lies_in_a_hole() {
    let folder = tempfile::tempdir().unwrap();
    for cache in [CacheMode::None, CacheMode::Writeback] {
        let options = FileOptions {
            size: Some(SIZE),
            cache,
            ..FileOptions::new(folder.path().join(format!("{cache}.raw")))
        };
        check(&format!("file, {cache}"), &File::open(options).unwrap());
    }
    let options = RamOptions {
        size: SIZE,
        ..RamOptions::default()
    };
    check("ram", &Ram::create(options).unwrap());
}

#[test]
fn a_sparse_file_is_a_hole_from_end_to_end() {
    let folder = tempfile::tempdir().unwrap();
    let options = FileOptions {
        size: Some(SIZE),
        ..FileOptions::new(folder.path().join("f.raw"))
    };
    let file = File::open(options).unwrap();
    assert_eq!(file.next_data(4096), SIZE);
}

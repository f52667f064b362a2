//! Any bytes as an image: no panic, and no more memory than the image has bytes.
//!
//! `cargo fuzz run qcow2_image`. What is done with it is what the test `hostile` of `qcow2` does.

#![no_main]

#[path = "../../crates/qcow2/tests/common/mod.rs"]
mod common;

libfuzzer_sys::fuzz_target!(|changes: (u8, Vec<(u16, u64)>)| {
    let storage = common::Recorded::default();
    let extended_l2 = changes.0 >= 192;
    let options = qcow2::CreateOptions {
        cluster_bits: if extended_l2 {
            14
        } else {
            9 + u32::from(changes.0 % 3)
        },
        extended_l2,
        refcount_order: u32::from(changes.0 / 3 % 7),
        ..qcow2::CreateOptions::new(64 << 10)
    };
    qcow2::create(&&storage, &options).expect("a new image");
    let mut bytes = storage.bytes();
    for (at, entry) in changes.1.iter().take(64) {
        let at = usize::from(*at);
        if let Some(field) = bytes.get_mut(at..at + 8) {
            field.copy_from_slice(&entry.to_be_bytes());
        }
    }
    common::hostile::use_in_every_way(bytes);
});

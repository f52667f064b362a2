//! `cargo fuzz run virtio_blk_request`: the body is `fuzz_targets::virtio_blk_request`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_targets::virtio_blk_request::run(data));

//! `cargo fuzz run vhost_user_messages`: the body is `fuzz_targets::vhost_user_messages`.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_targets::vhost_user_messages::run(data));

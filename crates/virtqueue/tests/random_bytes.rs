//! Arbitrary bytes in the ring's memory: no panic, and always an end. The fuzz target `chain` runs the same body.

use proptest::prelude::*;
use virtqueue::fuzzing::ring_of_bytes;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn random_bytes_never_panic_and_always_end(
        choices in prop::array::uniform8(any::<u8>()),
        // Mostly small numbers: plausible flags, indices and lengths.
        image in prop::collection::vec(prop_oneof![6 => 0u8..8, 1 => any::<u8>()], 0..1200)
    ) {
        let mut data = choices.to_vec();
        data.extend(image);
        ring_of_bytes(&data);
    }
}

#[test]
fn some_bytes_are_accepted() {
    // Split, one descriptor at address 0, one byte; available index 1.
    let mut data = vec![0; 8 + 128 + 8];
    data[8 + 8] = 1;
    data[8 + 128 + 2] = 1;
    assert_eq!(ring_of_bytes(&data), 1);
}

/// Also run by `make miri`, which has no time for random bytes.
#[test]
fn rings_of_the_corpus_are_walked() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/chain");
    for entry in std::fs::read_dir(folder).unwrap() {
        ring_of_bytes(&std::fs::read(entry.unwrap().path()).unwrap());
    }
}

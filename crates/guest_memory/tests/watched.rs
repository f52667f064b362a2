//! Every mapping survives truncation, for any number of clients. A separate test program, because the test
//! exhausts the watch table of the process.

use std::os::fd::AsFd;

use guest_memory::Mapping;

#[test]
fn mapping_that_could_not_be_watched_is_refused() {
    guest_memory::sigbus::install().unwrap();
    let (first, file) = Mapping::memfd("many", 4096).unwrap();
    let mut mappings = vec![first];
    let refused = loop {
        match Mapping::shared_file(file.as_fd(), 0, 4096) {
            Ok(mapping) => mappings.push(mapping),
            Err(error) => break error,
        }
    };
    assert!(refused.to_string().contains("truncation"), "{refused}");
    // The last mapping took the last watch.
    file.set_len(0).unwrap();
    let mut read = [1];
    mappings.last().unwrap().read(0, &mut read);
    assert_eq!(read, [0]);
    assert!(mappings.last().unwrap().is_poisoned());
    drop(mappings);
    file.set_len(4096).unwrap();
    assert!(Mapping::shared_file(file.as_fd(), 0, 4096).is_ok());
}

//! Model of an extended entry of a qcow2 image.

use std::sync::Arc;

use loom::thread;

use crate::explore;
use crate::sync::AtomicU64;
use crate::word_pair;

/// The owner discards a cluster and allocates another one while a worker looks it up. No cluster with allocated parts would be damage.
pub fn lookup_never_combines_words_of_two_clusters() {
    const NONE: u64 = 0;
    const ALL: u64 = 0xffff_ffff;
    const OLD: u64 = 1 << 63 | 0x5_0000;
    const NEW: u64 = 1 << 63 | 0x6_0000;
    explore(4, || {
        let words = Arc::new([AtomicU64::new(OLD), AtomicU64::new(ALL)]);
        let reader = {
            let words = words.clone();
            thread::spawn(move || word_pair::load(&words[..], 0))
        };
        word_pair::store_first_word_last(&words[..], 0, (0, NONE));
        word_pair::store_second_word_last(&words[..], 0, (NEW, ALL));
        let found = reader.join().unwrap();
        let possible = [(OLD, ALL), (OLD, NONE), (0, NONE), (NEW, NONE), (NEW, ALL)];
        assert!(possible.contains(&found), "{found:x?}");
    });
}

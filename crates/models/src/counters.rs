//! Model of a counter with one writer.

use std::sync::Arc;

use loom::thread;

use crate::explore;
use crate::word::Word;

/// The owner counts without locked instructions. A reader sees a growing sequence of values, and the exact sum after the owner has
/// ended.
pub fn counts_grow_and_are_exact_when_the_owner_has_ended() {
    explore(3, || {
        let word = Arc::<Word>::default();
        let owner = {
            let word = word.clone();
            thread::spawn(move || [1, 2, 4].map(|more| word.add(more)))
        };
        let seen = [(); 3].map(|()| word.get());
        assert!(seen.is_sorted(), "{seen:?}");
        assert!(
            seen.iter().all(|seen| [0, 1, 3, 7].contains(seen)),
            "{seen:?}"
        );
        owner.join().unwrap();
        assert_eq!(word.get(), 7);
    });
}

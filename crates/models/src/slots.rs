//! Model of a slot of the SIGBUS handler's table.

use std::sync::Arc;

use loom::thread;

use crate::explore;
use crate::slot::{FREE, Slot};
use crate::sync::{AtomicU32, AtomicUsize};

/// A mapping ends and another one takes its slot while the handler reads it.
pub fn range_is_never_a_mixture_of_two_mappings() {
    explore(3, || {
        let slot = Arc::new(Slot {
            word: AtomicU32::new(FREE),
            start: AtomicUsize::new(0),
            length: AtomicUsize::new(0),
        });
        let handler = {
            let slot = slot.clone();
            thread::spawn(move || slot.range())
        };
        let mappings = [(0x1000, 0x100), (0x8000, 0x800)];
        for (start, length) in mappings {
            assert!(slot.claim());
            slot.watch(start, length);
            slot.set_state(FREE);
        }
        if let Some(range) = handler.join().unwrap() {
            assert!(mappings.contains(&range), "{range:x?}");
        }
    });
}

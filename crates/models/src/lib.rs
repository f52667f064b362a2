//! Models of code that threads share, run by loom in every order that the memory orderings allow.
//!
//! The modules are source files of other crates. They take their primitives from `crate::sync`, which is loom's here, so the model runs the
//! code of the product. A model fails if an order of the threads loses a message, never wakes a thread, lets two accesses to the same
//! data overlap, or gives a value that was never written. loom treats sequentially consistent loads and stores as acquire and release.
//! Code that needs more than that has no model: `CommandWindow` of `iscsi` and the notifications of virtqueues. Tests: `tests/loom.rs`.
#![forbid(unsafe_code)]
// Models use a part of each file.
#![allow(dead_code, missing_docs)]
// Their comments link to names of their own crates.
#![allow(rustdoc::broken_intra_doc_links)]

mod buckets;
mod counters;
mod event;
mod mail;
mod ranges;
mod slots;
mod sync;
mod word_pairs;

#[path = "../../bdev/src/bucket.rs"]
mod bucket;
#[path = "../../bdev/src/conditions.rs"]
mod conditions;
#[path = "../../bdev/src/inbox.rs"]
mod inbox;
#[path = "../../reactor/src/mailbox.rs"]
mod mailbox;
#[path = "../../bdev/src/range_lock.rs"]
mod range_lock;
#[path = "../../guest_memory/src/sigbus/slot.rs"]
mod slot;
#[path = "../../latency/src/word.rs"]
mod word;
#[path = "../../qcow2/src/word_pair.rs"]
mod word_pair;

// The source files find `uring::Event` in this crate.
extern crate self as uring;

pub use buckets::bucket_is_charged_at_its_present_rate;
pub use counters::counts_grow_and_are_exact_when_the_owner_has_ended;
pub use event::Event;
pub use mail::{
    callers_of_an_ending_worker_return, every_answer_wakes_the_worker,
    every_message_wakes_the_worker,
};
pub use ranges::{closed_disk_is_its_closers_alone, held_range_is_its_holders_alone};
pub use slots::range_is_never_a_mixture_of_two_mappings;
pub use word_pairs::lookup_never_combines_words_of_two_clusters;

/// The worker in the model of its mailbox.
#[derive(Default)]
pub struct Worker {
    executed: u32,
}

/// Runs a model with at most `preemptions` involuntary switches between threads.
fn explore(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

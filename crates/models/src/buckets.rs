//! Model of a token bucket with a rate that changes.

use std::sync::Arc;

use loom::thread;

use crate::bucket::{Bucket, SECOND};
use crate::explore;

/// A request reserves a token while the rate changes from one token per second to one per time unit. The next request pays for the first
/// one at the new rate at most.
pub fn bucket_is_charged_at_its_present_rate() {
    explore(3, || {
        let bucket = Arc::new(Bucket::default());
        bucket.set(1, 0, 1);
        let of_thread = Arc::clone(&bucket);
        let now = 5;
        let reserving = thread::spawn(move || of_thread.reserve(now, 1));
        bucket.set(SECOND as u64, 0, 2);
        reserving.join().unwrap();
        let start = bucket.reserve(now, 1);
        assert!(start <= now + 1, "start at {start}");
    });
}

//! Durations of queue starts and stops: a stop includes the wait for requests in flight, and all sessions of an export count.

mod support;

use std::time::Duration;

use support::{Rig, Watched, connect, ram, start_blk};
use vhost_frontend::kind;

#[test]
fn stop_includes_the_requests_in_flight() {
    const DELAY: Duration = Duration::from_millis(50);
    let rig = Rig::new(1);
    let socket = rig.serve("d", Watched::new(ram(1 << 20), DELAY), 1);
    let times = || rig.server.queue_times().remove(0).1;
    assert!(times().start.is_empty() && times().stop.is_empty());
    for session in 1..=2 {
        let mut front_end = connect(&socket);
        let mut queue = start_blk(&mut front_end, 0);
        // Without requests in flight.
        front_end.stop_queue(0).unwrap();
        queue = {
            drop(queue);
            start_blk(&mut front_end, 0)
        };
        let slot = queue.take().unwrap();
        assert!(queue.submit(slot, kind::IN, 0, 0, 4096));
        queue.publish();
        front_end.stop_queue(0).unwrap();
        let found = times();
        let counts = [&found.start, &found.drain, &found.stop, &found.rest].map(|one| one.count);
        assert_eq!(counts, [2 * session; 4]);
        assert!(found.drain.quantile_ns(1.0) > 40_000_000, "{found:?}");
        assert!(found.stop.max_ns >= found.drain.max_ns, "{found:?}");
        // The difference of each stop, not of the quantiles.
        let difference = found.stop.sum_ns - found.drain.sum_ns - found.rest.sum_ns;
        assert!(difference.abs() < 100.0, "{found:?}");
        assert!(found.stop.quantile_ns(0.0) < 40_000_000, "{found:?}");
    }
    assert_eq!(rig.server.queue_times().remove(0).0, "d");
}

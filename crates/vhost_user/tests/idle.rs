//! Any number of idle exports costs no CPU. The only test of its program, because it measures the whole process.

mod support;

use std::time::{Duration, Instant};

use support::{Rig, ram};
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, status};

#[test]
fn thousand_idle_exports_use_no_cpu() {
    const EXPORTS: usize = 1000;
    // Fifty exports have a session. The others wait for a front end.
    let rig = Rig::new(2);
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    assert!(
        limit.maximum.is_none_or(|most| most >= 4 * EXPORTS as u64),
        "{EXPORTS} exports take {} descriptors of {limit:?}: raise it (ulimit -Hn)",
        4 * EXPORTS
    );
    let raised = rustix::process::Rlimit {
        current: limit.maximum,
        ..limit
    };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    let sockets: Vec<_> = (0..EXPORTS)
        .map(|number| rig.serve(&format!("d{number}"), ram(1 << 20), 1))
        .collect();
    let mut connected: Vec<_> = sockets
        .iter()
        .take(50)
        .map(|socket| {
            let options = Options {
                memory: 1 << 20,
                ..Options::default()
            };
            let mut front_end = FrontEnd::connect(socket, &options).unwrap();
            let queue = BlkQueue::start(
                &mut front_end,
                0,
                &QueueOptions::default(),
                2,
                4096,
                Layout::Separate,
            );
            (queue.unwrap(), front_end)
        })
        .collect();
    for (queue, _) in &mut connected {
        assert_eq!(queue.write(0, &[1; 4096]).unwrap(), status::OK);
    }
    // Their worker may still be polling.
    std::thread::sleep(Duration::from_millis(100));
    let before = (rig.pool.counters(), cpu_of_server());
    let begun = Instant::now();
    std::thread::sleep(Duration::from_secs(2));
    let used = cpu_of_server() - before.1;
    let iterations: u64 = rig
        .pool
        .counters()
        .iter()
        .zip(&before.0)
        .map(|((_, now), (_, then))| {
            now.busy_iterations + now.empty_iterations
                - then.busy_iterations
                - then.empty_iterations
        })
        .sum();
    let elapsed = begun.elapsed();
    assert!(
        u128::from(used) * 10 * 100 <= elapsed.as_millis(),
        "{used} ticks of 10 ms in {elapsed:?}, {iterations} iterations"
    );
    // The two calls of this test, with one iteration after each.
    assert!(iterations < 20, "{iterations} iterations while idle");
}

/// Returns the ticks of 10 ms that the workers and the accepting thread have used.
fn cpu_of_server() -> u64 {
    let mut ticks = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let Ok(stat) = std::fs::read_to_string(task.path().join("stat")) else {
            continue;
        };
        let (Some(open), Some(close)) = (stat.find('('), stat.rfind(')')) else {
            continue;
        };
        let name = &stat[open + 1..close];
        if name.starts_with("worker") || name == "vhost-user" || name.starts_with("session-d") {
            // proc(5): utime and stime are fields 14 and 15, the state after the name is field 3.
            let fields: Vec<&str> = stat[close + 2..].split(' ').collect();
            ticks += fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        }
    }
    ticks
}

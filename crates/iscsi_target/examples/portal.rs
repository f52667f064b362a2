//! Exports a RAM disk through a portal, for tests with initiators: `portal 127.0.0.1:3260 SIZE_MIB [BLOCK_SIZE]`.

use std::sync::Arc;

use bdev::{Disk, Ram, RamOptions};
use iscsi_target::{DemoMode, Server, ServerLimits, TargetOptions};
use reactor::{PollLimit, Pool, WorkerOptions};
use scsi::MemoryStore;
use scsi_exec::Units;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let word = |at: usize, default: &str| words.get(at).map_or(default, String::as_str).to_owned();
    let options = RamOptions {
        size: word(1, "256").parse::<u64>().expect("a size in MiB") << 20,
        block_size: word(2, "512").parse().expect("a block size"),
        ..RamOptions::default()
    };
    let device = Arc::new(Ram::create(options).expect("memory"));
    let disk = Arc::new(Disk::new("d0", None, device).expect("a disk"));
    let workers = WorkerOptions {
        count: 1,
        cpus: Vec::new(),
        poll: PollLimit::Micros(50).into(),
    };
    let pool = Arc::new(Pool::start(&workers).expect("workers"));
    let units = Units::new(Box::new(MemoryStore::default()));
    let server = Server::start(pool, units, ServerLimits::default()).expect("a server");
    let target = TargetOptions {
        name: "iqn.2026-11.org.example:t0".to_owned(),
        portals: vec![word(0, "127.0.0.1:3260").parse().expect("a portal")],
        demo_mode: DemoMode::ReadWrite,
        ..TargetOptions::default()
    };
    let portals = server.add_target(target, &[(0, disk)]).expect("a target");
    println!("ready {portals:?}");
    // Runs until standard input ends.
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).ok();
}

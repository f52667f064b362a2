//! The iSCSI driver with a target of this process: content, counts, digests, several sessions, and a target that disconnects.

mod support;

use std::sync::Arc;

use bdev::{BlockDevice, Disk, Ram, RamOptions};
use bench::driver::{DriverOptions, Subject};
use iscsi_target::{DemoMode, Server, ServerLimits, TargetOptions};
use reactor::{PollLimit, Pool, WorkerOptions};
use scsi::MemoryStore;
use scsi_exec::Units;
use support::{job, outcome, plan};

const TARGET: &str = "iqn.2026-11.org.example:t0";

fn ram() -> Arc<dyn BlockDevice> {
    let options = RamOptions {
        size: 16 << 20,
        huge_pages: false,
        ..RamOptions::default()
    };
    Arc::new(Ram::create(options).unwrap())
}

/// Starts a target with two units; the second is read-only.
fn serve() -> (Server, String) {
    let workers = WorkerOptions {
        count: 2,
        cpus: Vec::new(),
        poll: PollLimit::Micros(20).into(),
    };
    let pool = Arc::new(Pool::start(&workers).unwrap());
    let units = Units::new(Box::new(MemoryStore::default()));
    let server = Server::start(pool, units, ServerLimits::default()).unwrap();
    let options = TargetOptions {
        name: TARGET.to_owned(),
        portals: vec!["127.0.0.1:0".parse().unwrap()],
        demo_mode: DemoMode::ReadWrite,
        ..TargetOptions::default()
    };
    let read_only = RamOptions {
        size: 1 << 20,
        read_only: true,
        huge_pages: false,
        ..RamOptions::default()
    };
    let disks = [
        Arc::new(Disk::new("d0", None, ram()).unwrap()),
        Arc::new(Disk::new("d1", None, Arc::new(Ram::create(read_only).unwrap())).unwrap()),
    ];
    let luns: Vec<_> = (0..).zip(disks.iter().cloned()).collect();
    let portals = server.add_target(options, &luns).unwrap();
    (server, format!("iscsi://{}/{TARGET}", portals[0]))
}

#[test]
fn what_is_written_is_read_again_with_digests_and_without() {
    let (_server, place) = serve();
    for (digests, polling) in [(0, true), (1, false)] {
        let subject = Subject::parse(&format!("{place}/0,digests={digests}")).unwrap();
        // Small writes fit into the command PDU; large ones need unsolicited data and R2Ts.
        for size in ["4k", "1m"] {
            let jobs = vec![job(&[
                ("rw", "randwrite"),
                ("bs", size),
                ("size", "8m"),
                ("iodepth", "8"),
                ("verify", "crc32c"),
            ])];
            let driver = DriverOptions {
                polling,
                ..DriverOptions::default()
            };
            let outcome = outcome(&plan(vec![subject.clone()], jobs, driver));
            let one = &outcome.subjects[0].repetitions[0];
            assert_eq!((one.errors(), one.jobs[0].tallies[1].bytes), (0, 8 << 20));
            assert_eq!(one.jobs[0].verified_bytes, 8 << 20);
        }
    }
}

#[test]
fn a_session_of_four_connections_reads_what_it_wrote() {
    let (_server, place) = serve();
    for (keys, polling) in [
        ("", true),
        (",max_burst=65536,first_burst=4096,max_segment=8192", false),
        (",immediate_data=0,initial_r2t=1,digests=1", false),
    ] {
        let subject = Subject::parse(&format!("{place}/0,connections=4{keys}")).unwrap();
        let jobs = vec![job(&[
            ("rw", "randwrite"),
            ("bs", "256k"),
            ("size", "8m"),
            ("iodepth", "16"),
            ("verify", "crc32c"),
        ])];
        let driver = DriverOptions {
            polling,
            ..DriverOptions::default()
        };
        let outcome = outcome(&plan(vec![subject], jobs, driver));
        let one = &outcome.subjects[0].repetitions[0];
        assert_eq!((one.errors(), one.jobs[0].verified_bytes), (0, 8 << 20));
    }
}

#[test]
fn every_clone_has_a_session_and_makes_its_ios() {
    let (server, place) = serve();
    let jobs = vec![job(&[
        ("rw", "randread"),
        ("size", "4m"),
        ("iodepth", "16"),
        ("numjobs", "3"),
    ])];
    let subject = Subject::parse(&format!("{place}/0")).unwrap();
    let outcome = outcome(&plan(vec![subject], jobs, DriverOptions::default()));
    let one = &outcome.subjects[0].repetitions[0];
    let ios: Vec<u64> = one.jobs.iter().map(bench::run::JobResult::ios).collect();
    assert_eq!((one.errors(), ios.iter().sum::<u64>()), (0, 3 * 1024));
    drop(server);
}

#[test]
fn discards_are_unmap_commands_and_leave_the_data_of_writes_alone() {
    let (_server, place) = serve();
    let subject = Subject::parse(&format!("{place}/0")).unwrap();
    let run = |options: &[(&str, &str)]| {
        let jobs = vec![job(options)];
        let plan = plan(vec![subject.clone()], jobs, DriverOptions::default());
        outcome(&plan).subjects[0].repetitions[0].jobs[0].clone()
    };
    run(&[("rw", "write"), ("size", "1m"), ("verify", "crc32c")]);
    let trimmed = run(&[("rw", "randtrim"), ("size", "256k"), ("iodepth", "8")]);
    assert_eq!((trimmed.tallies[3].ios, trimmed.errors), (64, 0));
    let read = run(&[("rw", "read"), ("size", "1m"), ("verify", "crc32c")]);
    assert_eq!((read.differences, read.verified_bytes), (64, 768 << 10));
    let options = [("rw", "trimwrite"), ("size", "1m"), ("iodepth", "4")];
    let both = run(&options);
    assert_eq!((both.tallies[1].ios, both.tallies[3].ios), (256, 256));
    assert_eq!(both.errors, 0, "{:?}", both.complaints);
}

#[test]
fn unit_that_may_only_be_read_is_known_before_the_run() {
    let (_server, place) = serve();
    let subject = Subject::parse(&format!("{place}/1")).unwrap();
    let options = DriverOptions::default();
    let session = bench::driver::Session::open(
        &subject,
        &options,
        bench::driver::Demand::default(),
        1,
        None,
    )
    .unwrap();
    let info = session.info();
    assert_eq!((info.capacity, info.block_size), (1 << 20, 512));
    assert!(info.read_only);
}

/// Returns the error of a subject that cannot be opened.
fn refused(subject: &str) -> String {
    let subject = Subject::parse(subject).unwrap();
    let opened = bench::driver::Session::open(
        &subject,
        &DriverOptions::default(),
        bench::driver::Demand::default(),
        1,
        None,
    );
    format!("{:#}", opened.err().unwrap())
}

#[test]
fn wrong_target_is_said() {
    let (_server, place) = serve();
    let error = refused(&format!("{place}x/0"));
    for part in ["cannot log in", "target not found", "0x0203"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn wrong_unit_is_said() {
    let (_server, place) = serve();
    let error = refused(&format!("{place}/7"));
    for part in [
        &format!("LUN 7 of {TARGET}"),
        "sense 5h/25h/00h",
        "no such unit",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn host_that_is_none_and_a_user_are_said() {
    let error = refused("iscsi://no-such-host.invalid/iqn.2026-11.org.example:t0/0");
    assert!(error.contains("no-such-host.invalid"), "{error}");
    let text = "iscsi://ann%secret@127.0.0.1/iqn.2026-11.org.example:t0/0";
    let error = format!("{:#}", Subject::parse(text).err().unwrap());
    assert!(
        error.contains("without CHAP") && !error.contains("secret"),
        "{error}"
    );
}

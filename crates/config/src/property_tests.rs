//! Generated configurations: each is read back as it was written, and no damage causes a panic.

use std::path::PathBuf;

use block::ExportPlacement;
use proptest::prelude::*;

use super::tests::{from_file, here};
use super::*;

fn shown() -> impl Strategy<Value = ShownConfig> {
    let wwn = proptest::option::of((3u64 << 60..4 << 60).prop_map(|wwn| wwn & !0xfff));
    let physical = prop_oneof![Just(None), Just(Some(4096)), Just(Some(65536))];
    (wwn, physical, any::<[bool; 2]>()).prop_map(
        |(wwn, physical_block_size, [removable, copy_across_targets])| ShownConfig {
            wwn,
            physical_block_size,
            removable,
            copy_across_targets,
        },
    )
}

fn limits() -> impl Strategy<Value = LimitsConfig> {
    use proptest::option::of;
    let (rate, burst) = (1u64..1_000_000_000, 1u64..1_000_000_000);
    (of((rate.clone(), of(burst.clone()))), of((rate, of(burst)))).prop_map(|(iops, bandwidth)| {
        LimitsConfig {
            iops: iops.map(|(rate, _)| rate),
            iops_burst: iops.and_then(|(_, burst)| burst),
            bandwidth: bandwidth.map(|(rate, _)| rate),
            bandwidth_burst: bandwidth.and_then(|(_, burst)| burst),
        }
    })
}

type AnyDisk = (
    BlockDeviceConfig,
    Option<u32>,
    bool,
    Option<String>,
    (ShownConfig, LimitsConfig),
);

fn disk() -> impl Strategy<Value = AnyDisk> {
    let block_size = prop_oneof![Just(None), Just(Some(512u32)), Just(Some(4096))];
    let cache = prop_oneof![
        Just(CacheMode::None),
        Just(CacheMode::Writeback),
        Just(CacheMode::Writethrough)
    ];
    let serial = proptest::option::of("[ -~]{1,20}");
    (
        block_size,
        0..5u8,
        1u64..1 << 40,
        cache,
        "[^\0]{1,12}",
        any::<bool>(),
        serial,
        (shown(), limits()),
    )
        .prop_map(
            |(block_size, kind, blocks, cache, path, read_only, serial, shown)| {
                let size = blocks * u64::from(block_size.unwrap_or(512));
                let path = PathBuf::from(format!("/nonexistent/{path}"));
                let backend = match kind {
                    0 => BlockDeviceConfig::Ram {
                        size,
                        persist: crate::devices::Persist::None,
                    },
                    1 => BlockDeviceConfig::Null { size },
                    2 => BlockDeviceConfig::Delay {
                        size,
                        time: block::DelayTime::Uniform(
                            std::time::Duration::from_nanos(size % 1000),
                            std::time::Duration::from_micros(size % 1_000_000 + 1),
                        ),
                        storage: match size % 2 {
                            0 => DelayStorage::Ram,
                            _ => DelayStorage::Null,
                        },
                    },
                    3 => BlockDeviceConfig::File {
                        path,
                        size: Some(size),
                        cache,
                        lock: block::FileLock::Always,
                    },
                    _ => BlockDeviceConfig::Rbd(Box::new(any_image(path, size))),
                };
                (backend, block_size, read_only, serial, shown)
            },
        )
}

fn any_image(path: PathBuf, number: u64) -> RbdConfig {
    let text = || path.to_string_lossy().into_owned();
    let is_set = |bit: u64| number >> bit & 1 != 0;
    let options = [
        ("rbd_cache".to_owned(), "true".to_owned()),
        ("a.b".to_owned(), text()),
    ];
    RbdConfig {
        image: block::ImageName {
            pool: "pool".to_owned(),
            namespace: is_set(0).then(|| "tenant".to_owned()),
            image: "image".to_owned(),
            snapshot: is_set(1).then(|| "snapshot".to_owned()),
        },
        cluster: block::ClusterConfig {
            conf: is_set(2).then(|| path.clone()),
            id: is_set(3).then(text),
            keyring: is_set(4).then(|| path.clone()),
            mon_host: is_set(5).then(text),
            options: options.into_iter().filter(|_| is_set(6)).collect(),
        },
        lock: block::RbdLock::WORDS[(number >> 7) as usize % 4].1,
        size: None,
    }
}

/// Generates valid configurations: names and sockets differ by number, and references are to existing disks.
#[allow(
    clippy::too_many_lines,
    reason = "one test, from its beginning to its end"
)]
fn config() -> impl Strategy<Value = Config> {
    let mode = proptest::sample::select(&[PollMode::Off, PollMode::Auto, PollMode::Always]);
    let poll = prop_oneof![
        Just(PollLimit::Never),
        Just(PollLimit::Always),
        (1..=POLL_MICROS_MAX).prop_map(PollLimit::Micros)
    ];
    let placement = prop_oneof![
        // The exports may have up to 4 dedicated workers.
        (1..=WORKERS_MAX - 4).prop_map(Placement::Count),
        Just(Placement::Cpus(vec![3, 0, 1]))
    ];
    let luns = proptest::collection::btree_map((0..=255u8, 0..LUNS_MAX), 0..100usize, 0..5);
    (
        proptest::collection::vec(disk(), 1..4),
        proptest::collection::vec((0..100usize, 1..=BLK_QUEUES_MAX), 0..3),
        proptest::collection::vec((1..=SCSI_QUEUES_MAX, luns), 0..3),
        placement,
        (mode, [(); 3].map(|()| proptest::option::of(poll.clone()))),
        proptest::option::of("[^\0]{1,20}"),
    )
        .prop_map(|(disks, blk, scsi, placement, (poll, limits), control)| {
            let [ring_poll, network_poll, disk_poll] = limits;
            let count = disks.len();
            let disks: Vec<DiskConfig> = disks
                .into_iter()
                .enumerate()
                .map(
                    |(i, (mut backend, block_size, read_only, serial, (mut shown, limits)))| {
                        // All values must differ.
                        shown.wwn = shown.wwn.map(|wwn| wwn + i as u64);
                        if let BlockDeviceConfig::File { path, .. } = &mut backend {
                            path.set_file_name(format!("{i}\"'\\\n.raw"));
                        }
                        if let BlockDeviceConfig::Rbd(rbd) = &mut backend {
                            rbd.image.image = format!("image {i}\"'\\\n");
                        }
                        let keeps_discards = match &backend {
                            BlockDeviceConfig::Rbd(rbd) => rbd.lock == block::RbdLock::Shared,
                            BlockDeviceConfig::Iscsi(remote) => remote.passthrough.is_some(),
                            BlockDeviceConfig::ScsiGeneric { .. } => true,
                            _ => false,
                        };
                        DiskConfig {
                            name: format!("disk-{i}"),
                            backend,
                            discard: match keeps_discards {
                                true => block::DiscardMode::Unmap,
                                false => block::DiscardMode::WORDS[i % 3].1,
                            },
                            block_size,
                            read_only,
                            require: false,
                            serial,
                            shown,
                            limits,
                            errors: block::ErrorPolicy {
                                on_error: block::OnError::WORDS[i % 3].1,
                                io_timeout: [0, 1, 86_400][i % 3],
                                lock_timeout: 0,
                            },
                        }
                    },
                )
                .collect();
            let disk_name = |index: usize| format!("disk-{}", index % count);
            let blk = blk
                .into_iter()
                .enumerate()
                .map(|(i, (disk, queues))| ExportConfig {
                    transport: Transport::VhostBlk,
                    name: format!("blk{i}"),
                    disk: Some(disk_name(disk)),
                    socket: Some(PathBuf::from(format!("/run/b{i}"))),
                    rights: SocketRights {
                        mode: [None, Some(0o660)][i % 2],
                        owner: None,
                        group: [None, Some("0".to_owned())][i % 2].clone(),
                    },
                    queues,
                    ..ExportConfig::default()
                });
            let scsi = scsi
                .into_iter()
                .enumerate()
                .map(|(i, (queues, luns))| ExportConfig {
                    transport: Transport::VhostScsi,
                    name: format!("scsi{i}"),
                    socket: Some(PathBuf::from(format!("/run/s{i}"))),
                    queues,
                    nexus: (i % 2 == 1).then(|| "scsi0".to_owned()),
                    placement: ExportPlacement::Dedicated,
                    luns: luns
                        .into_iter()
                        .map(|((target, lun), disk)| LunConfig {
                            target,
                            lun,
                            disk: disk_name(disk),
                        })
                        .collect(),
                    ..ExportConfig::default()
                });
            Config {
                access: AccessConfig {
                    control_group: control.clone(),
                    control_readers: None,
                    token_file: control
                        .as_ref()
                        .map(|path| PathBuf::from(format!("/etc/{path}"))),
                    readers_token_file: None,
                    api_client_ca: control.as_ref().map(PathBuf::from),
                    api_names: control.iter().cloned().collect(),
                    allow_paths: control.iter().map(PathBuf::from).collect(),
                    api_listen: control
                        .as_ref()
                        .map(|text| ([127, 0, 0, 1], text.len() as u16).into()),
                },
                tls: TlsConfig {
                    certificate: control.as_ref().map(PathBuf::from),
                    key: control.as_ref().map(PathBuf::from),
                    nbd_client_ca: control.as_ref().map(PathBuf::from),
                },
                state: control
                    .as_ref()
                    .map(|path| PathBuf::from(format!("/var/{path}"))),
                metrics_listen: control
                    .as_ref()
                    .map(|text| ([127, 0, 0, 1], text.len() as u16).into()),
                sandbox: sandbox::Mode::WORDS[count % 4].1,
                sandbox_paths: control.iter().map(PathBuf::from).collect(),
                control: control.map(|path| PathBuf::from(format!("/run/control/{path}"))),
                workers: WorkersConfig {
                    placement,
                    poll,
                    ring_poll,
                    network_poll,
                    disk_poll,
                },
                exports: blk.chain(scsi).collect(),
                discovery_auth: None,
                iscsi_limits: IscsiLimits::default(),
                disks,
            }
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_rendered_configuration_reads_back(config in config()) {
        let text = render(&config);
        match from_file(&text) {
            Ok(read) => prop_assert_eq!(read, config),
            Err(error) => prop_assert!(false, "{}\n{}", text, error),
        }
    }

    #[test]
    fn any_text_is_read_without_panic(text in "\\PC{0,80}", flag in ".{0,40}") {
        let flags = Flags {
            disk: vec![flag.clone()],
            vhost_blk: vec![flag.clone()],
            vhost_scsi: vec![flag.clone()],
            lun: vec![flag.clone()],
            iscsi: vec![flag.clone()],
            nbd: vec![flag.clone()],
            portal: vec![flag.clone()],
            announce: vec![flag.clone()],
            demo_mode: Some(flag.clone()),
            chap_user: Some(flag.clone()),
            daemon: DAEMON_KEYS.iter().filter_map(|key| Some((key.flag.as_ref()?.name, flag.clone()))).collect(),
        };
        if let Err(error) = parse(Some(("f", &text)), &flags, &here()) {
            prop_assert!(!error.to_string().is_empty());
        }
    }

    #[test]
    fn any_damage_to_a_configuration_is_read_without_panic(
        config in config(), at in any::<prop::sample::Index>(), length in 0..20usize, insert in "\\PC{0,4}"
    ) {
        let text: Vec<char> = render(&config).chars().collect();
        let at = at.index(text.len());
        let end = (at + length).min(text.len());
        let damaged: String = text[..at].iter().copied()
            .chain(insert.chars()).chain(text[end..].iter().copied()).collect();
        if let Err(error) = from_file(&damaged) {
            prop_assert!(error.iter().all(|mistake| mistake.location.line_column().0 > 0));
            prop_assert!(!error.to_string().is_empty());
        }
    }
}

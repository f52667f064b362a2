//! `lunette vhost-user-blk` and `vhost-user-scsi`: serve one device according to QEMU's conventions for back-end
//! programs (docs/interop/vhost-user, "Backend program conventions"). No control socket, no daemonising.

use std::ffi::OsString;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::Path;

use config::{
    AccessConfig, BLK_QUEUES_MAX, BlockDeviceConfig, CacheMode, Config, DiskConfig, ExportConfig,
    IscsiLimits, LUNS_MAX, LimitsConfig, LunConfig, Placement, SCSI_QUEUES_MAX, ShownConfig,
    TlsConfig, Transport, WorkersConfig, nearest,
};
use daemon::{Inherited, Signals, StartOptions};
use serde_json::{Value, json};

use crate::cli::{BlkProgram, ProgramArguments, ScsiProgram};
use crate::failure::{self, Failure, Outcome};
use crate::serve;

/// Kind of program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Blk,
    Scsi,
}

/// Returns the kind of program if the command line has `--print-capabilities`. All other options are then ignored,
/// even missing ones.
pub fn asked_for_capabilities(arguments: &[OsString]) -> Option<Kind> {
    let kind = match arguments.get(1)?.to_str()? {
        "vhost-user-blk" => Kind::Blk,
        "vhost-user-scsi" => Kind::Scsi,
        _ => return None,
    };
    arguments
        .iter()
        .any(|argument| argument == "--print-capabilities")
        .then_some(kind)
}

pub fn print_capabilities(kind: Kind) -> Outcome {
    let mut stdout = cli_common::stdout();
    writeln!(stdout, "{:#}", capabilities(kind))?;
    Ok(())
}

/// `VHostUserBackendCapabilities`; the schema defines features for `block` only.
fn capabilities(kind: Kind) -> Value {
    match kind {
        Kind::Blk => json!({"type": "block", "features": ["read-only", "blk-file"]}),
        Kind::Scsi => json!({"type": "scsi", "features": []}),
    }
}

/// Serves one file as virtio-blk.
pub fn run_blk(arguments: BlkProgram) -> Outcome {
    let common = &arguments.common;
    let disk = disk(&arguments.blk_file, common)?;
    let export = ExportConfig {
        transport: Transport::VhostBlk,
        name: "vhost-user-blk".to_owned(),
        disk: Some(disk.name.clone()),
        socket: Some(common.socket_path.clone().unwrap_or_default()),
        queues: common.num_queues.unwrap_or(BLK_QUEUES_MAX),
        ..ExportConfig::default()
    };
    let name = export.name.clone();
    let config = Config {
        disks: vec![disk],
        exports: vec![export],
        ..empty()
    };
    serve_one(config, name, common)
}

/// Serves files as a virtio-scsi controller.
pub fn run_scsi(arguments: ScsiProgram) -> Outcome {
    let common = &arguments.common;
    let queues = queues(common)?;
    let mut disks = Vec::new();
    let mut luns = Vec::new();
    for (path, lun) in arguments.blk_file.iter().zip(0..LUNS_MAX) {
        let disk = disk(path, common)?;
        luns.push(LunConfig {
            target: 0,
            lun,
            disk: disk.name.clone(),
        });
        disks.push(disk);
    }
    let export = ExportConfig {
        transport: Transport::VhostScsi,
        name: "vhost-user-scsi".to_owned(),
        socket: Some(common.socket_path.clone().unwrap_or_default()),
        queues,
        luns,
        ..ExportConfig::default()
    };
    let name = export.name.clone();
    let config = Config {
        disks,
        exports: vec![export],
        ..empty()
    };
    serve_one(config, name, common)
}

fn queues(common: &ProgramArguments) -> Result<u16, Failure> {
    match common.num_queues {
        Some(count) if count > SCSI_QUEUES_MAX => Err(Failure::mistake(format!(
            "--num-queues {count}: a SCSI controller has at most {SCSI_QUEUES_MAX} request queues"
        ))),
        count => Ok(count.unwrap_or(SCSI_QUEUES_MAX)),
    }
}

fn empty() -> Config {
    let surroundings = config::Surroundings::of_this_process();
    Config {
        tls: TlsConfig::default(),
        control: None,
        state: None,
        access: AccessConfig::default(),
        metrics_listen: None,
        sandbox: surroundings.sandbox,
        sandbox_paths: surroundings.sandbox_paths,
        workers: WorkersConfig {
            placement: Placement::Count(1),
            ..WorkersConfig::default()
        },
        disks: Vec::new(),
        exports: Vec::new(),
        discovery_auth: None,
        iscsi_limits: IscsiLimits::default(),
    }
}

fn disk(path: &Path, common: &ProgramArguments) -> Result<DiskConfig, Failure> {
    let known = CacheMode::WORDS.map(|(word, _)| word);
    let cache = CacheMode::WORDS
        .into_iter()
        .find(|(word, _)| *word == common.cache)
        .map(|(_, mode)| mode)
        .ok_or_else(|| {
            let guess = nearest(&common.cache, known)
                .map(|guess| format!("; did you mean {guess}?"))
                .unwrap_or_default();
            Failure::mistake(format!(
                "--cache {}: must be {}{guess}",
                common.cache,
                known.join(", ")
            ))
        })?;
    if !path.try_exists().unwrap_or(true) {
        let shown = path.display();
        return Err(Failure::because(format!(
            "--blk-file {shown}: does not exist; hint: correct the path, or create the file with truncate -s 10G {shown}"
        )));
    }
    // The name is the path: serial number and identifiers derive from it and differ between such programs.
    let name = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    Ok(DiskConfig {
        name: name.to_string_lossy().into_owned(),
        backend: BlockDeviceConfig::File {
            path: path.to_owned(),
            size: None,
            cache,
            lock: Default::default(),
        },
        discard: Default::default(),
        block_size: None,
        read_only: common.read_only,
        require: true,
        serial: None,
        shown: ShownConfig::default(),
        limits: LimitsConfig::default(),
        errors: Default::default(),
    })
}

fn serve_one(config: Config, export: String, common: &ProgramArguments) -> Outcome {
    let inherited = match common.fd {
        Some(number) => vec![Inherited {
            export,
            socket: inherited_descriptor(number)?,
        }],
        None => Vec::new(),
    };
    let options = StartOptions {
        inherited,
        ..StartOptions::default()
    };
    daemon::confine(&config, &options, None).map_err(failure::not_started)?;
    let signals = Signals::listen()
        .map_err(|error| Failure::because(format!("cannot handle signals: {error}")))?;
    serve::serve(config, options, signals, serve::ServiceContext::default())
}

/// Duplicates an inherited descriptor.
pub fn inherited_descriptor(number: i32) -> Result<OwnedFd, Failure> {
    sys::inherited(number).map_err(|error| {
        Failure::because(format!(
            "--fd {number}: {error}; hint: pass the number of an open descriptor, such as --fd 3 with 3<>..."
        ))
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn words(list: &[&str]) -> Vec<OsString> {
        list.iter().map(OsString::from).collect()
    }

    #[test]
    fn print_capabilities_ignores_every_other_option() {
        let asked = |list: &[&str]| asked_for_capabilities(&words(list));
        let blk = [
            "lunette",
            "vhost-user-blk",
            "--what",
            "--print-capabilities",
        ];
        assert_eq!(asked(&blk), Some(Kind::Blk));
        let scsi = [
            "lunette",
            "vhost-user-scsi",
            "--print-capabilities",
            "--fd=x",
        ];
        assert_eq!(asked(&scsi), Some(Kind::Scsi));
        assert_eq!(asked(&["lunette", "vhost-user-blk", "--fd", "3"]), None);
        assert_eq!(asked(&["lunette", "serve", "--print-capabilities"]), None);
        assert_eq!(asked(&["lunette"]), None);
    }

    #[test]
    fn capabilities_are_those_of_the_schema() {
        assert_eq!(
            capabilities(Kind::Blk).to_string(),
            r#"{"features":["read-only","blk-file"],"type":"block"}"#
        );
        assert_eq!(capabilities(Kind::Scsi)["type"], "scsi");
    }

    #[test]
    fn a_descriptor_that_is_not_open_is_named() {
        match inherited_descriptor(9999) {
            Err(Failure::Reasons(reasons)) => assert!(reasons[0].starts_with("--fd 9999: ")),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_open_descriptor_is_taken() {
        use std::os::fd::AsRawFd;
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        inherited_descriptor(ours.as_raw_fd()).unwrap();
    }

    #[test]
    fn disks_of_different_files_have_different_names() {
        let common = ProgramArguments {
            socket_path: Some(PathBuf::from("s")),
            fd: None,
            print_capabilities: false,
            read_only: true,
            cache: "none".to_owned(),
            num_queues: None,
        };
        let folder = tempfile::tempdir().unwrap();
        let [a, b] = ["a.raw", "b.raw"].map(|name| {
            let path = folder.path().join(name);
            assert!(disk(&path, &common).is_err());
            std::fs::write(&path, []).unwrap();
            disk(&path, &common).unwrap()
        });
        assert_ne!(a.name, b.name);
        assert!(a.read_only);
    }
}

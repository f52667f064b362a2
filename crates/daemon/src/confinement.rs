//! Files that the sandbox permits: those of the configuration, `sandbox_paths`, and files that libraries read.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use config::{BlockDeviceConfig, Config, look_at_files};
use sandbox::{Mode, Paths};

use crate::running::{StartError, StartOptions};
use crate::state;

/// System files that libraries and the daemon read: host and group databases, late shared libraries, attributes of disks and of the
/// process.
const SYSTEM: [&str; 11] = [
    "/etc",
    "/usr",
    "/lib",
    "/lib64",
    "/proc",
    "/sys",
    "/dev/urandom",
    "/dev/random",
    "/run/systemd/resolve",
    "/run/NetworkManager",
    "/run/resolvconf",
];
/// Longest wait for the storage of all disks, as for their opens at the start.
const PATIENCE: Duration = crate::objects::START_PATIENCE;
/// Folders of Ceph's libraries for sockets and logs.
const CEPH: [&str; 3] = ["/run/ceph", "/var/log/ceph", "/var/lib/ceph"];

/// Confines the process, before it has any other thread. `config_file` can be read again later.
///
/// # Errors
/// If the kernel refuses.
pub fn confine(
    config: &Config,
    options: &StartOptions,
    config_file: Option<&Path>,
) -> Result<(), StartError> {
    let paths = match config.sandbox {
        Mode::Enforce => paths(config, options, config_file),
        Mode::Off | Mode::Log | Mode::Threads => Paths::default(),
    };
    let report = sandbox::begin(config.sandbox, &paths).map_err(|error| error.to_string())?;
    if report.mode != Mode::Off {
        tracing::debug!(mode = %report.mode, "sandbox active");
    }
    for missing in &report.missing {
        tracing::warn!("sandbox incomplete: this kernel lacks {missing}");
    }
    Ok(())
}

fn paths(config: &Config, options: &StartOptions, config_file: Option<&Path>) -> Paths {
    let mut paths = Paths {
        // A service manager in a container may listen on an abstract socket.
        abstract_sockets: std::env::var_os("NOTIFY_SOCKET")
            .is_some_and(|socket| socket.to_string_lossy().starts_with('@')),
        ..Paths::default()
    };
    paths.read.extend(SYSTEM.iter().map(PathBuf::from));
    paths.write.push(PathBuf::from("/dev/null"));
    let access = &config.access;
    let secrets = [
        &access.token_file,
        &access.readers_token_file,
        &access.api_client_ca,
        &config.tls.certificate,
        &config.tls.key,
        &config.tls.nbd_client_ca,
        &config.discovery_auth,
    ];
    let secrets = secrets.into_iter().filter_map(Option::as_deref);
    let users = config.exports().filter_map(|export| export.chap_users());
    let disks = config.disks.iter();
    let of_disks = disks.filter_map(|disk| disk.backend.chap_file());
    for file in secrets.chain(users).chain(of_disks).chain(config_file) {
        paths.read.extend(folders_of(file));
    }

    let inherited = options.inherited_control.as_ref();
    let inherited = inherited.map(|control| &control.path);
    let control = config.control.as_ref().or(inherited);
    let control = control
        .or(options.control.as_ref())
        .map(|path| folder_of(path));
    let state = config.state.clone().or_else(state::default_folder);
    for folder in [control, state].into_iter().flatten() {
        // Created here because a rule needs an existing folder. A failure is reported when the folder is used.
        fs::create_dir_all(&folder).ok();
        paths.write.push(folder);
    }
    for socket in config.exports().filter_map(|export| export.socket()) {
        let folder = folder_of(socket);
        match folder.exists() {
            true => paths.write.push(folder),
            // A rule needs an existing folder. A socket in a later folder cannot be removed at the end.
            false => paths.make_sockets.extend(nearest_folder(&folder)),
        }
    }
    let files = config
        .disks
        .iter()
        .flat_map(|disk| disk_files(&disk.backend));
    let places = granted_paths(files.map(Path::to_owned).collect());
    // Files on storage that does not answer have no rule.
    let granted_path = |path: &Path| places.get(path).cloned();
    for disk in &config.disks {
        let list = match disk.read_only {
            true => &mut paths.read,
            false => &mut paths.write,
        };
        match &disk.backend {
            BlockDeviceConfig::File { path, .. } => list.extend(granted_path(path)),
            BlockDeviceConfig::Image {
                path, data_file, ..
            } => {
                list.extend(granted_path(path));
                list.extend(data_file.as_deref().and_then(granted_path));
            }
            // Any SCSI command needs write access to the node.
            BlockDeviceConfig::ScsiGeneric { path, .. } => paths.write.extend(granted_path(path)),
            BlockDeviceConfig::Rbd(rbd) => {
                paths.write.extend(CEPH.iter().map(PathBuf::from));
                let own = [&rbd.cluster.conf, &rbd.cluster.keyring];
                let own = own.into_iter().flatten();
                paths.read.extend(own.flat_map(|file| folders_of(file)));
            }
            BlockDeviceConfig::Ram { .. }
            | BlockDeviceConfig::Null { .. }
            | BlockDeviceConfig::Delay { .. }
            | BlockDeviceConfig::Iscsi(_) => {}
            // Landlock has no right for connections to Unix sockets.
            BlockDeviceConfig::Nbd(nbd) => {
                paths.read.extend(nbd.certificates().map(Path::to_path_buf))
            }
        }
    }
    paths.write.extend(config.sandbox_paths.iter().cloned());
    paths
}

/// Returns the files of a disk that the sandbox permits.
fn disk_files(backend: &BlockDeviceConfig) -> impl Iterator<Item = &Path> {
    let (path, data) = match backend {
        BlockDeviceConfig::File { path, .. } | BlockDeviceConfig::ScsiGeneric { path, .. } => {
            (Some(path), None)
        }
        // Only the configured data file: the image may come from an untrusted source.
        BlockDeviceConfig::Image {
            path, data_file, ..
        } => (Some(path), data_file.as_ref()),
        _ => (None, None),
    };
    path.into_iter().chain(data).map(PathBuf::as_path)
}

/// Returns the place of each file. A file without an answer of its storage in [`PATIENCE`] is left out, and its disk cannot be opened before
/// the next start.
fn granted_paths(files: BTreeSet<PathBuf>) -> HashMap<PathBuf, PathBuf> {
    let known = look_at_files(&files, PATIENCE, |file| {
        let place = granted_path(file);
        // The rules are made of an open file. This must not block either.
        fs::metadata(&place).ok();
        place
    });
    for file in files.iter().filter(|file| !known.contains_key(*file)) {
        tracing::error!(
            file = %file.display(),
            "storage does not answer, and the sandbox denies the file; hint: restart the daemon when it answers"
        );
    }
    known
}

pub(crate) fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Returns the folder of the path and, for a link, that of the file that it leads to. The file is read again later, and may be replaced.
fn folders_of(path: &Path) -> [PathBuf; 2] {
    let found = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    [folder_of(path), folder_of(&found)]
}

/// Returns the nearest existing ancestor of a missing folder.
fn nearest_folder(missing: &Path) -> Option<PathBuf> {
    let missing = std::path::absolute(missing).ok()?;
    let found = missing.ancestors().find(|folder| folder.is_dir());
    found.map(Path::to_owned)
}

/// Returns the folder of a file, which may be replaced, or the node of a device, because its folder has all other devices. A missing device
/// has no node yet, so its folder is returned.
fn granted_path(path: &Path) -> PathBuf {
    let found = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    match found.starts_with("/dev") && found.exists() {
        true => found,
        false => folder_of(&found),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;
    use config::{Flags, Surroundings};

    #[test]
    fn a_missing_folder_of_a_socket_has_its_nearest_ancestor() {
        let nearest = |path| nearest_folder(Path::new(path)).unwrap();
        assert_eq!(nearest("/etc/none/such"), Path::new("/etc"));
        assert_eq!(nearest("/none"), Path::new("/"));
        assert_eq!(nearest("none"), std::env::current_dir().unwrap());
    }

    #[test]
    fn files_with_secrets_are_read_from_their_folders() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = |name: &str| {
            let folder = scratch.path().join(name);
            fs::create_dir(&folder).unwrap();
            fs::canonicalize(folder).unwrap()
        };
        let [links, files] = ["links", "files"].map(folder);
        let file = |name: &str, text: &str| {
            let path = files.join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            symlink(path, links.join(name)).unwrap();
        };
        file("chap", "host secretsecret1\n");
        let text = format!(
            "workers = 1\n[[disk]]\nname = \"d\"\nbackend = \"iscsi\"\n\
             unit = \"iscsi://host@[::1]/iqn.2026-11.org.example:d/0\"\nchap_file = \"{}\"\n",
            links.join("chap").display()
        );
        let text = Some(("lunette.toml", text.as_str()));
        let config = config::parse(text, &Flags::default(), &Surroundings::of_this_process());
        let config = config.unwrap_or_else(|mistakes| panic!("{mistakes}"));
        file("lunette.toml", "");
        let paths = paths(
            &config,
            &StartOptions::default(),
            Some(&links.join("lunette.toml")),
        );
        for folder in [links, files] {
            let count = paths.read.iter().filter(|path| **path == folder).count();
            assert_eq!(count, 2, "{}: {paths:?}", folder.display());
        }
    }

    #[test]
    fn device_is_allowed_alone_and_a_file_with_its_folder() {
        assert_eq!(granted_path(Path::new("/dev/null")), Path::new("/dev/null"));
        assert_eq!(granted_path(Path::new("/etc/hostname")), Path::new("/etc"));
        assert_eq!(granted_path(Path::new("d0.raw")), Path::new("."));
        assert_eq!(
            granted_path(Path::new("/dev/none/d0")),
            Path::new("/dev/none")
        );
    }
}

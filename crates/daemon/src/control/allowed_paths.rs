//! Restricts the local files that a client of the API may use.
//!
//! Root and the daemon's own user may name every file. Requests of other clients (members of `control_group` and holders of the token) run
//! with the rights of the daemon's user, so these clients may only name files below the folders in `allow_paths`. By default these are the
//! folders of the disks and sockets in the configuration file.
//!
//! A path is compared as written, and symbolic links on the way are followed. This is safe: from an allowed folder down to the file only
//! root and the daemon's user may write to any folder, so no other user can place a link or exchange a folder after the check.
//!
//! Clients can write image headers, and images name files. Images of such a client may only name files in their own folder
//! ([`NamedFiles::Folder`]), or none ([`NamedFiles::None`]) if their own path, such as that of a device, is an entry of `allow_paths`.

use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use axum::extract::{ConnectInfo, FromRequestParts};
use axum::http::request::Parts;

use super::ErrorResponse;
use super::access::{Peer, Right};
use super::api::Api;
use super::server::blocking;
use crate::confinement::folder_of;
use crate::jobs::{Overlay, ScratchOptions};
use crate::objects::{Fault, Refusal};
use bdev::{ClusterConfig, NamedFiles};
use config::{BlockDeviceConfig, Config, DiskConfig, ExportConfig};
use nbd_server::Address;

/// Sender of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller(Right);

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = ErrorResponse;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ErrorResponse> {
        let peer = parts.extensions.get::<ConnectInfo<Peer>>();
        // A request without a listener's mark has the fewest rights.
        Ok(Caller(
            peer.map_or(Right::Read, |ConnectInfo(peer)| peer.right),
        ))
    }
}

impl Caller {
    /// Fails unless the caller is root or the daemon's user.
    pub fn must_be_administrator(self) -> Result<(), Refusal> {
        match self.0 {
            Right::Administrator => Ok(()),
            Right::Control | Right::Read => {
                let fault = Fault::new("only root and the daemon's user may do this");
                Err(Refusal::Forbidden(vec![fault.help(
                    "run the command as one of them, over the control socket",
                )]))
            }
        }
    }

    /// Fails if the caller may only read.
    pub fn must_change(self) -> Result<(), Refusal> {
        match self.0 {
            Right::Control | Right::Administrator => Ok(()),
            Right::Read => {
                let fault = Fault::new("this client may only read");
                Err(Refusal::Forbidden(vec![fault]))
            }
        }
    }

    /// Checks all paths of a disk and limits the files that an image may name. Returns the disk.
    pub async fn check_disk(
        self,
        api: &Api,
        disk: DiskConfig,
    ) -> Result<DiskConfig, ErrorResponse> {
        self.examine(api, disk, |allowed, known, disk, faults| {
            let before = known.disk(&disk.name);
            allowed.check_disk(disk, before, "", faults);
        })
        .await
    }

    /// Checks all paths of a job's target and limits the files that an image may name. Returns the target.
    pub async fn check_target(
        self,
        api: &Api,
        target: DiskConfig,
    ) -> Result<DiskConfig, ErrorResponse> {
        self.examine(api, target, |allowed, _, target, faults| {
            allowed.check_disk(target, None, "/target", faults);
        })
        .await
    }

    pub async fn check_export(
        self,
        api: &Api,
        export: ExportConfig,
    ) -> Result<ExportConfig, ErrorResponse> {
        self.examine(api, export, |allowed, known, export, faults| {
            allowed.check_export(export, known.export(export.name()), "", faults);
        })
        .await
    }

    pub async fn check_all(self, api: &Api, wanted: Config) -> Result<Config, ErrorResponse> {
        self.examine(api, wanted, |allowed, known, wanted, faults| {
            for (index, disk) in wanted.disks.iter_mut().enumerate() {
                let at = format!("/disks/{index}");
                let before = known.disk(&disk.name);
                allowed.check_disk(disk, before, &at, faults);
            }
            for (index, export) in wanted.exports().enumerate() {
                let at = format!("/exports/{index}");
                allowed.check_export(export, known.export(export.name()), &at, faults);
            }
        })
        .await
    }

    /// Checks the files of new overlays.
    pub async fn check_overlays(
        self,
        api: &Api,
        overlays: Vec<Overlay>,
    ) -> Result<Vec<Overlay>, ErrorResponse> {
        self.examine(api, overlays, |allowed, _, overlays, faults| {
            for (index, overlay) in overlays.iter().enumerate() {
                let at = format!("/disks/{index}/path");
                faults.extend(allowed.check(&overlay.path, &at).err());
            }
        })
        .await
    }

    /// Checks the folder of the scratch files of a backup. The default folders need no check.
    pub async fn check_scratch(
        self,
        api: &Api,
        folder: Option<String>,
        limit: Option<u64>,
    ) -> Result<ScratchOptions, ErrorResponse> {
        if folder.as_deref() == Some("") {
            let fault = Fault::at(
                "/scratch",
                "scratch is empty; omit it for the default folder",
            );
            return Err(Refusal::Invalid(vec![fault]).into());
        }
        let options = ScratchOptions {
            folder: folder.map(PathBuf::from),
            limit,
        };
        self.examine(api, options, |allowed, _, options, faults| {
            // The name of the file is chosen by the daemon.
            let file = options.folder.as_ref().map(|folder| folder.join("scratch"));
            faults.extend(file.and_then(|file| allowed.check(&file, "/scratch").err()));
        })
        .await
    }

    /// Checks the address at which a backup is served.
    pub async fn check_pull(self, api: &Api, address: Address) -> Result<Address, ErrorResponse> {
        self.examine(api, address, |allowed, _, address, faults| {
            if let Address::Unix(path) = address {
                faults.extend(allowed.check(path, "/pull").err());
            }
        })
        .await
    }

    /// Runs a check on a thread of its own, because a file system that does not answer would block all clients of the API. The check has
    /// the configuration in effect. Returns the checked object.
    async fn examine<T: Send + 'static>(
        self,
        api: &Api,
        mut object: T,
        check: impl FnOnce(&AllowedPaths, &Config, &mut T, &mut Vec<Fault>) + Send + 'static,
    ) -> Result<T, ErrorResponse> {
        if matches!(self.0, Right::Administrator) {
            return Ok(object);
        }
        let live = api.overview()?.live();
        let examined = blocking(move || {
            let mut faults = Vec::new();
            let allowed = AllowedPaths::of(&live.base);
            check(&allowed, &live.config, &mut object, &mut faults);
            (object, faults)
        });
        let (object, faults) = examined.await?;
        refuse(faults)?;
        Ok(object)
    }

    /// Checks the backing image of a disk, because a commit writes to it.
    pub async fn check_commit(self, api: &Api, disk: &str) -> Result<(), ErrorResponse> {
        let live = api.overview()?.live();
        let backend = live.config.disk(disk).map(|disk| &disk.backend);
        let Some(BlockDeviceConfig::Image { path, .. }) = backend else {
            return Ok(());
        };
        let written = self.examine(api, path.clone(), |allowed, _, path, faults| {
            let base = bdev::backing_path_of(path);
            let data = base.as_deref().and_then(bdev::data_file_of);
            let written = base.into_iter().chain(data);
            faults.extend(written.filter_map(|path| allowed.check(&path, "").err()));
        });
        written.await.map(drop)
    }
}

fn refuse(faults: Vec<Fault>) -> Result<(), ErrorResponse> {
    match faults.is_empty() {
        true => Ok(()),
        false => Err(Refusal::Forbidden(faults).into()),
    }
}

#[derive(Debug)]
struct AllowedPaths {
    /// Folders, and single files such as device nodes. Absolute paths, as configured.
    places: Vec<PathBuf>,
    /// The administrator's configuration.
    base: Arc<Config>,
}

impl AllowedPaths {
    fn of(base: &Arc<Config>) -> AllowedPaths {
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or(path.to_owned());
        let places = match base.access.allow_paths.as_slice() {
            [] => {
                let files = base.disks.iter().flat_map(|disk| disk.backend.paths());
                // Secret files are excluded: their folders must not become accessible.
                let files = files.filter(|(key, _)| matches!(*key, "path" | "data_file"));
                let files = files.map(|(_, path)| checked_path(&absolute(path)));
                let sockets = base.exports().filter_map(|export| export.socket());
                let mut places: Vec<PathBuf> = files
                    .chain(sockets.map(|path| folder_of(&absolute(path))))
                    .collect();
                places.sort();
                places.dedup();
                places
            }
            given => given.iter().map(|path| absolute(path)).collect(),
        };
        AllowedPaths {
            places,
            base: Arc::clone(base),
        }
    }

    fn check_disk(
        &self,
        disk: &mut DiskConfig,
        known: Option<&DiskConfig>,
        at: &str,
        faults: &mut Vec<Fault>,
    ) {
        let is_known = known.is_some_and(|known| {
            known.backend.with_size(None) == disk.backend.with_size(None)
                && (disk.read_only || !known.read_only)
        });
        if is_known {
            return;
        }
        for (key, path) in disk.backend.paths() {
            // Ceph's own files are compared below.
            if !matches!(disk.backend, BlockDeviceConfig::Rbd(_)) {
                faults.extend(self.check(path, &format!("{at}/{key}")).err());
            }
        }
        let is_entry = disk.backend.file().is_some_and(|path| self.has(path));
        let (most, help) = match is_entry {
            true => (NamedFiles::None, "use named_files=none"),
            false => (NamedFiles::Folder, "use named_files=folder or none"),
        };
        if !disk.backend.limit_named_files(most) {
            let detail = "this client may not open the files that the image names";
            faults.push(Fault::at(format!("{at}/named_files"), detail).help(help));
        }
        if let BlockDeviceConfig::Rbd(rbd) = &disk.backend {
            let own = self.base.disks.iter();
            let is_known = own.map(|disk| &disk.backend).any(
                |own| matches!(own, BlockDeviceConfig::Rbd(known) if known.cluster == rbd.cluster),
            );
            if rbd.cluster != ClusterConfig::default() && !is_known {
                // These keys name files, libraries and commands for this process. Monitors can set them, too.
                let detail = "this client may use only the Ceph cluster settings of a disk in the configuration file";
                faults.push(Fault::at(at, detail).help(AS_ADMINISTRATOR));
            }
        }
    }

    fn check_export(
        &self,
        export: &ExportConfig,
        known: Option<&ExportConfig>,
        at: &str,
        faults: &mut Vec<Fault>,
    ) {
        let paths = |export: &ExportConfig| {
            (
                export.socket().cloned(),
                export.chap_users().map(Path::to_owned),
            )
        };
        let wanted = paths(export);
        if known.is_some_and(|known| paths(known) == wanted) {
            return;
        }
        let (socket, chap_users) = wanted;
        for (key, path) in [("socket", socket), ("chap_users", chap_users)] {
            let fault = path.and_then(|path| self.check(&path, &format!("{at}/{key}")).err());
            faults.extend(fault);
        }
    }

    /// Returns true if the path itself is an entry.
    fn has(&self, path: &Path) -> bool {
        std::path::absolute(path).is_ok_and(|path| self.places.contains(&path))
    }

    fn check(&self, path: &Path, at: &str) -> Result<(), Fault> {
        let path = std::path::absolute(path).unwrap_or(path.to_owned());
        let refused = |reason: String| Fault::at(at, reason).help(AS_ADMINISTRATOR);
        let shown = path.display();
        if path.components().any(|part| part == Component::ParentDir) {
            let detail = format!("{shown}: this client may not use `..` in paths");
            return Err(Fault::at(at, detail).help("write the path without `..`"));
        }
        if self.has(&path) {
            return Ok(());
        }
        let above = |place: &&PathBuf| path.starts_with(place);
        let Some(place) = self.places.iter().find(above) else {
            let places = self.places.iter().map(|place| place.display().to_string());
            let places = match self.places.is_empty() {
                true => "no folder".to_owned(),
                false => places.collect::<Vec<_>>().join(", "),
            };
            return Err(refused(format!(
                "this client may not use the file {shown}; it may use files in {places}"
            )));
        };
        for folder in path.ancestors().skip(1) {
            let folder_is = folder.display();
            let found = std::fs::metadata(folder).map_err(|error| {
                refused(format!("cannot examine the folder {folder_is}: {error}"))
            })?;
            let own = rustix::process::geteuid().as_raw();
            if ![0, own].contains(&found.uid()) || found.mode() & 0o022 != 0 {
                return Err(Fault::at(
                    at,
                    format!(
                        "this client may not use the file {shown}: users other than root and the daemon's can write to {folder_is} and could place a link there"
                    ),
                )
                .help("remove their write permission (chmod go-w), or run the command as root or as the daemon's user"));
            }
            if folder == place {
                break;
            }
        }
        Ok(())
    }
}

const AS_ADMINISTRATOR: &str = "add its folder to allow_paths and restart the daemon, or run the command as root or as the daemon's user";

/// Returns the folder of a file, or the node of a device, because its folder has all other devices.
fn checked_path(path: &Path) -> PathBuf {
    match std::fs::canonicalize(path) {
        Ok(found) if found.starts_with("/dev") => path.to_owned(),
        _ => folder_of(path),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;
    use config::{Flags, Surroundings};

    fn config(text: &str) -> Arc<Config> {
        let text = format!("workers = 1\n{text}");
        let file = Some(("lunette.toml", text.as_str()));
        let parsed = config::parse(file, &Flags::default(), &Surroundings::of_this_process());
        Arc::new(parsed.unwrap_or_else(|error| panic!("{error}")))
    }

    #[test]
    fn only_readers_may_not_make_changes() {
        assert!(matches!(
            Caller(Right::Read).must_change(),
            Err(Refusal::Forbidden(_))
        ));
        assert!(Caller(Right::Control).must_change().is_ok());
        assert!(Caller(Right::Administrator).must_change().is_ok());
    }

    #[test]
    fn default_is_the_folders_of_disks_and_sockets() {
        let base = config(
            "[[disk]]\nname = \"a\"\nbackend = \"file\"\npath = \"/srv/a/disk\"\nsize = \"1M\"\n\
             [[disk]]\nname = \"b\"\nbackend = \"file\"\npath = \"/dev/null\"\n\
             [[disk]]\nname = \"c\"\nbackend = \"iscsi\"\nunit = \"iscsi://u@[::1]/iqn.2026-11.org.example:c/0\"\nchap_file = \"/etc/keys/c\"\n\
             [[vhost_blk]]\nname = \"v\"\ndisk = \"a\"\nsocket = \"/run/vm/v.sock\"\n",
        );
        let expected = ["/dev/null", "/run/vm", "/srv/a"].map(PathBuf::from);
        assert_eq!(AllowedPaths::of(&base).places, expected);
        let given = config("allow_paths = [\"/srv/only\"]\n");
        assert_eq!(
            AllowedPaths::of(&given).places,
            [PathBuf::from("/srv/only")]
        );
    }

    #[test]
    fn path_is_allowed_below_a_folder_that_only_the_daemon_can_change() {
        let scratch = tempfile::tempdir().unwrap();
        let (allowed, outside) = (scratch.path().join("allowed"), scratch.path().join("out"));
        for folder in [
            &allowed,
            &outside,
            &allowed.join("below"),
            &allowed.join("open"),
        ] {
            fs::create_dir(folder).unwrap();
            fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
        }
        fs::set_permissions(allowed.join("open"), fs::Permissions::from_mode(0o775)).unwrap();
        fs::set_permissions(&outside, fs::Permissions::from_mode(0o777)).unwrap();
        symlink(&outside, allowed.join("link")).unwrap();
        let paths = AllowedPaths {
            places: vec![allowed.clone(), PathBuf::from("/dev/null")],
            base: config(""),
        };
        let check = |path: &Path| paths.check(path, "/path");
        for good in ["a", "below/a"] {
            assert_eq!(check(&allowed.join(good)), Ok(()), "{good}");
        }
        assert_eq!(check(Path::new("/dev/null")), Ok(()));
        for bad in [
            outside.join("a"),
            allowed.join("open/a"),
            allowed.join("link/a"),
            allowed.join("missing/a"),
            allowed.join("../out/a"),
            allowed.with_file_name("allowed2").join("a"),
            PathBuf::from("/dev/zero"),
            PathBuf::from("/dev/null/a"),
            PathBuf::from("relative"),
        ] {
            let fault = check(&bad).expect_err(&bad.display().to_string());
            assert_eq!(fault.pointer, "/path");
            assert!(fault.help.is_some(), "{fault}");
        }
    }

    #[test]
    fn known_disk_is_allowed_and_a_read_only_one_stays_read_only() {
        let text = "[[disk]]\nname = \"a\"\nbackend = \"file\"\npath = \"/srv/a\"\nsize = \"1M\"\nread_only = true\n";
        let base = config(&format!("allow_paths = [\"/none\"]\n{text}"));
        let paths = AllowedPaths::of(&base);
        let known = base.disk("a");
        let refused = |disk: &DiskConfig| {
            let mut faults = Vec::new();
            paths.check_disk(&mut disk.clone(), known, "", &mut faults);
            !faults.is_empty()
        };
        let mut disk = base.disks[0].clone();
        assert!(!refused(&disk));
        disk.backend = disk.backend.with_size(Some(2 << 20));
        assert!(!refused(&disk));
        disk.read_only = false;
        assert!(refused(&disk));
    }

    #[test]
    fn image_may_not_name_any_file_and_ceph_uses_known_files() {
        let base = config("allow_paths = [\"/\", \"/etc/passwd\"]\n");
        let faults = |text: &str| {
            let wanted = config(&format!("[[disk]]\nname = \"x\"\n{text}"));
            let (mut disk, mut faults) = (wanted.disks[0].clone(), Vec::new());
            AllowedPaths::of(&base).check_disk(&mut disk, None, "", &mut faults);
            faults
                .into_iter()
                .map(|fault| fault.pointer)
                .collect::<Vec<_>>()
        };
        let image = "backend = \"image\"\npath = \"/etc/hostname\"\n";
        assert_eq!(
            faults(&format!("{image}named_files = \"any\"\n")),
            ["/named_files"]
        );
        assert_eq!(faults(image), [""; 0]);
        let entry = "backend = \"image\"\npath = \"/etc/passwd\"\n";
        let folder = format!("{entry}named_files = \"folder\"\n");
        assert_eq!(faults(&folder), ["/named_files"]);
        assert_eq!(faults(entry), [""; 0]);
        assert_eq!(
            faults(&format!("{image}named_files = \"folder\"\n")),
            [""; 0]
        );
        let rbd = "backend = \"rbd\"\nimage = \"p/i\"\n";
        assert_eq!(faults(rbd), [""; 0]);
        assert_eq!(faults(&format!("{rbd}mon_host = \"[::1]\"\n")), [""]);
        assert_eq!(faults(&format!("{rbd}conf = \"/srv/ceph.conf\"\n")), [""]);
        assert_eq!(
            faults(&format!("{rbd}option = {{ log_file = \"/etc/x\" }}\n")),
            [""]
        );
    }
}

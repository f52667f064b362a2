//! Names of other files in the header of an image: syntax and policy.
//!
//! ```text
//!   PATH, file:PATH                                             a file or block device, relative to the image
//!   json:{"driver":"qcow2","file":{"driver":"file","filename":"PATH"}}
//!   json:{"driver":"qcow2","file.driver":"file","file.filename":"PATH"}
//!   iscsi://..., nbd://..., rbd:...                             see `remote_backing`
//! ```

use std::io;
use std::path::{Path, PathBuf};

pub use block::NamedFiles;
use qcow2::Header;
use rustix::fs::{Mode, OFlags};
use serde_json::{Map, Value};

use super::open::fail;
use super::remote_backing::is_remote;
use crate::{File, OpenError};

/// Checks of the policy for files that an image names.
pub trait CheckNamed {
    /// Refuses a file that an image names. `subject`: "backing image" or "data file".
    ///
    /// # Errors
    /// The policy forbids the file.
    fn check(self, image: &Path, subject: &str, named: &Path) -> Result<(), OpenError>;

    /// Checks that an opened file is the one that [`CheckNamed::check`] has permitted: a user with write access to a folder below that of
    /// the image can replace the file with a symbolic link before it is opened.
    ///
    /// # Errors
    /// Another file was opened.
    fn check_opened(
        self,
        image: &Path,
        subject: &str,
        named: &Path,
        opened: &File,
    ) -> Result<(), OpenError>;
}

impl CheckNamed for NamedFiles {
    fn check(self, image: &Path, subject: &str, named: &Path) -> Result<(), OpenError> {
        let why = match self {
            NamedFiles::Any => return Ok(()),
            NamedFiles::Folder if lies_below(named, folder_of(image)) => return Ok(()),
            NamedFiles::Folder => "is not in the folder of the image",
            NamedFiles::None => "is named only by the image",
        };
        Err(fail(
            image,
            format!(
                "its {subject} {} {why}, and is not opened, because the image may be untrusted; hint: to allow it, set named_files=any (--named-files any)",
                named.display()
            ),
        ))
    }

    fn check_opened(
        self,
        image: &Path,
        subject: &str,
        named: &Path,
        opened: &File,
    ) -> Result<(), OpenError> {
        if self != NamedFiles::Folder {
            return Ok(());
        }
        let found = find_below(named, folder_of(image));
        let is_same = found.is_ok_and(|found| opened.id().is_ok_and(|id| id == found));
        match is_same {
            true => Ok(()),
            false => Err(fail(
                image,
                format!(
                    "its {subject} {} was replaced while it was opened, and is not used; hint: let only root and the user of the daemon write to its folder",
                    named.display()
                ),
            )),
        }
    }
}

/// The format of a backing image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackingFormat {
    /// Raw bytes.
    Raw,
    /// A qcow2 image.
    Qcow2,
}

impl BackingFormat {
    fn parse(word: &str) -> Option<BackingFormat> {
        match word {
            "raw" | "file" | "host_device" => Some(BackingFormat::Raw),
            "qcow2" => Some(BackingFormat::Qcow2),
            _ => None,
        }
    }
}

/// The backing image of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingImage {
    /// A file or block device, or the name of a logical unit, an RBD image or an NBD export.
    pub path: PathBuf,
    /// Format stated by the image.
    pub format: BackingFormat,
}

/// Returns the backing image that the header of an image names.
///
/// # Errors
/// The name or the format is not supported, or the image states no format. The content of the backing image never decides the format.
pub fn backing_of(image: &Path, header: &Header) -> Result<Option<BackingImage>, OpenError> {
    let format = header.backing_format.as_deref();
    let name = header.backing_file.as_deref();
    name.map(|name| backing_named(image, name, format))
        .transpose()
}

/// Parses the name and format of a backing image in the header of `image`.
///
/// # Errors
/// As [`backing_of`].
pub fn backing_named(
    image: &Path,
    name: &str,
    format: Option<&str>,
) -> Result<BackingImage, OpenError> {
    let refused = |problem: &str| fail(image, format!("its backing image {name} {problem}"));
    let not_served = "is not a file, a logical unit, an RBD image or an NBD export, and is not supported; hint: convert the chain to one image with qemu-img convert";
    let (path, driver) = if let Some(json) = name.strip_prefix("json:") {
        json_path(json).map_err(|problem| refused(&problem))?
    } else if is_remote(name) {
        (PathBuf::from(name), None)
    } else {
        let path = plain_path(name).ok_or_else(|| refused(not_served))?;
        (path.to_owned(), None)
    };
    let stated = match (format, driver.as_deref()) {
        (Some(format), Some(driver))
            if BackingFormat::parse(format) != BackingFormat::parse(driver) =>
        {
            return Err(refused(&format!(
                "has the driver {driver}, which contradicts the format {format} in the image; hint: set one format with qemu-img rebase -u"
            )));
        }
        (Some(stated), _) | (None, Some(stated)) => stated,
        (None, None) => {
            return Err(refused(
                "has no format in the image, and detection by content is unsafe; hint: set it with lunette image rebase --unsafe --backing NAME --backing-format raw (or qcow2)",
            ));
        }
    };
    let Some(format) = BackingFormat::parse(stated) else {
        return Err(refused(&format!(
            "has the format {stated}, which is not supported; hint: convert the chain to one image with qemu-img convert"
        )));
    };
    if is_remote(name) {
        return match format {
            BackingFormat::Raw => Ok(BackingImage { path, format }),
            BackingFormat::Qcow2 => Err(refused(
                "is remote and therefore raw, which contradicts the format in the image; hint: lunette image rebase --unsafe --backing NAME --backing-format raw",
            )),
        };
    }
    Ok(BackingImage {
        path: folder_of(image).join(path),
        format,
    })
}

/// Returns the path in a name without JSON; `None` if it has a QEMU protocol.
fn plain_path(name: &str) -> Option<&Path> {
    if let Some(path) = name.strip_prefix("file:") {
        return Some(Path::new(path));
    }
    let protocol = name.split_once(':').map(|(protocol, _)| protocol);
    let has_protocol = protocol.is_some_and(|protocol| !protocol.contains('/'));
    (!has_protocol && !name.is_empty()).then_some(Path::new(name))
}

const JSON_HINT: &str =
    "hint: use only driver, file.driver and file.filename, and name a plain file";

/// Returns the plain file in a `json:` name, and the driver above it.
fn json_path(text: &str) -> Result<(PathBuf, Option<String>), String> {
    let parsed: Map<String, Value> = serde_json::from_str(text)
        .map_err(|error| format!("is not a JSON object: {error}; {JSON_HINT}"))?;
    let mut options = Vec::new();
    flatten("", parsed, &mut options)?;
    let (mut driver, mut protocol, mut path) = (None, None, None);
    for (key, value) in options {
        let place = match key.as_str() {
            "driver" => &mut driver,
            "file.driver" => &mut protocol,
            "filename" | "file.filename" => {
                if path.is_some() {
                    return Err(format!("has two file names; {JSON_HINT}"));
                }
                path = Some((key == "filename", value));
                continue;
            }
            _ => {
                return Err(format!(
                    "has the option {key}, which is not supported; {JSON_HINT}"
                ));
            }
        };
        if place.replace(value).is_some() {
            return Err(format!("has the option {key} twice; {JSON_HINT}"));
        }
    }
    let is_file = |driver: &String| matches!(driver.as_str(), "file" | "host_device");
    let Some((is_protocol_node, path)) = path.filter(|(_, path)| !path.is_empty()) else {
        return Err(format!("names no file; {JSON_HINT}"));
    };
    // A protocol node names its file directly and is raw.
    let protocol = match is_protocol_node {
        true if protocol.is_some() => return Err(format!("has two protocols; {JSON_HINT}")),
        true => driver.clone(),
        false => protocol,
    };
    if let Some(protocol) = protocol.as_ref().filter(|protocol| !is_file(protocol)) {
        return Err(format!(
            "has the driver {protocol}, which is not supported; {JSON_HINT}"
        ));
    }
    let path = match protocol {
        Some(_) => PathBuf::from(path),
        None => plain_path(&path)
            .map(Path::to_owned)
            .ok_or_else(|| format!("names {path}, which is not a plain file; {JSON_HINT}"))?,
    };
    Ok((path, driver))
}

/// Lists the options of nested objects, with QEMU's dotted keys.
fn flatten(
    prefix: &str,
    object: Map<String, Value>,
    options: &mut Vec<(String, String)>,
) -> Result<(), String> {
    for (key, value) in object {
        let key = format!("{prefix}{key}");
        match value {
            Value::String(text) => options.push((key, text)),
            Value::Object(object) => flatten(&format!("{key}."), object, options)?,
            _ => {
                return Err(format!(
                    "has the option {key}, which is not supported; {JSON_HINT}"
                ));
            }
        }
    }
    Ok(())
}

/// Returns the base folder of relative names in an image.
pub(super) fn folder_of(image: &Path) -> &Path {
    image.parent().unwrap_or(Path::new(""))
}

fn canonical(path: Option<&Path>) -> io::Result<PathBuf> {
    let path = path.filter(|path| *path != Path::new(""));
    std::fs::canonicalize(path.unwrap_or(Path::new(".")))
}

/// Finds a file in or below a folder without following symbolic links on the way from there. Returns its device and inode.
fn find_below(file: &Path, folder: &Path) -> io::Result<(u64, u64)> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let (parent, folder) = (canonical(file.parent())?, canonical(Some(folder))?);
    let below = parent.strip_prefix(&folder).map_err(io::Error::other)?;
    let name = file.file_name().ok_or(io::ErrorKind::NotFound)?;
    let mut at = rustix::fs::open(&folder, flags | OFlags::DIRECTORY, Mode::empty())?;
    for part in below.components() {
        let part = part.as_os_str();
        at = rustix::fs::openat(&at, part, flags | OFlags::DIRECTORY, Mode::empty())?;
    }
    let found = rustix::fs::openat(&at, name, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&found)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Returns true if a file lies in or below a folder and is no symbolic link.
pub(super) fn lies_below(file: &Path, folder: &Path) -> bool {
    let is_link = std::fs::symlink_metadata(file).is_ok_and(|found| found.is_symlink());
    match (canonical(file.parent()), canonical(Some(folder))) {
        (Ok(its), Ok(folder)) => !is_link && its.starts_with(folder),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str, format: Option<&str>) -> Result<BackingImage, String> {
        let named = backing_named(Path::new("/vm/top.qcow2"), name, format);
        named.map_err(|error| error.to_string())
    }

    fn is(name: &str, format: Option<&str>, path: &str, found: BackingFormat) {
        let path = PathBuf::from(path);
        let expected = BackingImage {
            path,
            format: found,
        };
        assert_eq!(named(name, format), Ok(expected), "{name}");
    }

    /// The file is replaced between the check and the open, in a folder that other users can write.
    #[test]
    fn file_replaced_during_its_open_is_refused() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(path("vm/below")).unwrap();
        std::fs::create_dir(path("secrets")).unwrap();
        for name in ["vm/below/base", "secrets/base"] {
            std::fs::write(path(name), [7; 512]).unwrap();
        }
        let (image, named) = (path("vm/top.qcow2"), path("vm/below/base"));
        let policy = NamedFiles::Folder;
        let open = || {
            let options = crate::FileOptions {
                cache: crate::CacheMode::Writeback,
                read_only: true,
                ..crate::FileOptions::new(&named)
            };
            File::open(options).unwrap()
        };
        let checked = |opened: &File| policy.check_opened(&image, "backing image", &named, opened);
        policy.check(&image, "backing image", &named).unwrap();
        checked(&open()).unwrap();
        // A symbolic link in place of the file, while it is opened and also afterwards.
        std::fs::rename(&named, path("vm/below/kept")).unwrap();
        symlink(path("secrets/base"), &named).unwrap();
        let opened = open();
        assert!(checked(&opened).is_err());
        std::fs::rename(path("vm/below/kept"), &named).unwrap();
        assert!(
            checked(&opened)
                .unwrap_err()
                .to_string()
                .contains("was replaced")
        );
        // A symbolic link in place of the folder.
        std::fs::rename(path("vm/below"), path("vm/kept")).unwrap();
        symlink(path("secrets"), path("vm/below")).unwrap();
        let opened = open();
        assert!(checked(&opened).is_err());
        std::fs::remove_file(path("vm/below")).unwrap();
        std::fs::rename(path("vm/kept"), path("vm/below")).unwrap();
        assert!(checked(&opened).is_err());
        checked(&open()).unwrap();
    }

    #[test]
    fn plain_names_are_relative_to_the_image() {
        is(
            "base.qcow2",
            Some("qcow2"),
            "/vm/base.qcow2",
            BackingFormat::Qcow2,
        );
        is("file:b/base", Some("raw"), "/vm/b/base", BackingFormat::Raw);
        is(
            "/dev/vg/base",
            Some("host_device"),
            "/dev/vg/base",
            BackingFormat::Raw,
        );
        is("./a:b", Some("raw"), "/vm/./a:b", BackingFormat::Raw);
    }

    #[test]
    fn json_names_of_plain_files_are_paths() {
        let (qcow2, raw) = (BackingFormat::Qcow2, BackingFormat::Raw);
        for (name, format, found) in [
            (
                r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"/b"}}"#,
                Some("qcow2"),
                qcow2,
            ),
            (
                r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"/b"}}"#,
                None,
                qcow2,
            ),
            (
                r#"json:{"driver":"qcow2","file.driver":"file","file.filename":"/b"}"#,
                Some("qcow2"),
                qcow2,
            ),
            (
                r#"json:{"driver":"raw","file":{"driver":"host_device","filename":"/b"}}"#,
                Some("raw"),
                raw,
            ),
            (
                r#"json:{"driver":"file","filename":"/b"}"#,
                Some("raw"),
                raw,
            ),
            (r#"json:{"file.filename":"/b"}"#, Some("qcow2"), qcow2),
            (r#"json:{"file":{"filename":"file:/b"}}"#, Some("raw"), raw),
        ] {
            is(name, format, "/b", found);
        }
    }

    #[test]
    fn other_names_are_refused_by_name() {
        for (name, format, why) in [
            ("nbd:192.0.2.1:10809", Some("raw"), "is not a file"),
            ("ssh://host/a", Some("raw"), "is not a file"),
            ("fat:rw:/etc", Some("raw"), "is not a file"),
            ("a-b:c", Some("raw"), "is not a file"),
            ("", Some("raw"), "is not a file"),
            ("base", None, "has no format in the image"),
            ("base", Some("vmdk"), "has the format vmdk"),
            (
                "iscsi://192.0.2.1/iqn.2026-11.org.example:t/0",
                Some("qcow2"),
                "therefore raw",
            ),
            ("json:", Some("raw"), "is not a JSON object"),
            ("json:[]", Some("raw"), "is not a JSON object"),
            ("json:{}", Some("raw"), "names no file"),
            (
                r#"json:{"driver":"raw","file":{"driver":"nbd","host":"h"}}"#,
                Some("raw"),
                "has the option file.host",
            ),
            (
                r#"json:{"driver":"raw","file":{"driver":"ssh","filename":"/b"}}"#,
                Some("raw"),
                "has the driver ssh",
            ),
            (
                r#"json:{"driver":"nbd","filename":"/b"}"#,
                Some("raw"),
                "has the driver nbd",
            ),
            (
                r#"json:{"file":{"filename":"nbd://192.0.2.1/a"}}"#,
                Some("raw"),
                "is not a plain file",
            ),
            (
                r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"/b"},"backing":{"driver":"file","filename":"/c"}}"#,
                Some("qcow2"),
                "has the option backing.",
            ),
            (
                r#"json:{"driver":"raw","offset":512,"file":{"driver":"file","filename":"/b"}}"#,
                Some("raw"),
                "has the option offset",
            ),
            (
                r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"/b"}}"#,
                Some("raw"),
                "has the driver qcow2, which contradicts the format raw",
            ),
            (
                r#"json:{"file":{"filename":"/b"},"file.filename":"/c"}"#,
                Some("raw"),
                "two file names",
            ),
        ] {
            let error = named(name, format).unwrap_err();
            assert!(
                error.contains(why) && error.contains("hint"),
                "{name}: {error}"
            );
        }
    }

    #[test]
    fn policy_limits_the_files_that_images_may_name() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("vm/top.qcow2");
        std::fs::create_dir_all(folder.path().join("vm/below")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", folder.path().join("vm/link")).unwrap();
        for (named, is_in_folder) in [
            ("vm/base", true),
            ("vm/below/base", true),
            ("base", false),
            ("vm/../base", false),
            ("vm/link", false),
        ] {
            let named = folder.path().join(named);
            let is_followed =
                |policy: NamedFiles| policy.check(&image, "backing image", &named).is_ok();
            assert!(is_followed(NamedFiles::Any));
            assert_eq!(is_followed(NamedFiles::Folder), is_in_folder, "{named:?}");
            assert!(!is_followed(NamedFiles::None));
        }
        let unit = Path::new("iscsi://192.0.2.1/iqn.2026-11.org.example:t/0");
        assert!(
            NamedFiles::Folder
                .check(&image, "backing image", unit)
                .is_err()
        );
    }
}

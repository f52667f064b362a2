//! Reason for "Permission denied": Landlock and file modes give the same error, and need different remedies.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::Paths;

/// Files and folders that the process may use, with links resolved, once Landlock is in effect.
static ALLOWED: OnceLock<Paths> = OnceLock::new();

/// Records the paths that Landlock allows. Folders that do not exist have no rule.
pub(crate) fn record(paths: &Paths) {
    let resolved = |list: &[PathBuf]| -> Vec<PathBuf> {
        let paths = list.iter();
        paths
            .filter_map(|path| fs::canonicalize(path).ok())
            .collect()
    };
    let allowed = Paths {
        read: resolved(&paths.read),
        write: resolved(&paths.write),
        ..Paths::default()
    };
    // The process is confined once.
    ALLOWED.set(allowed).ok();
}

/// Returns the reason and the key to change if the sandbox denies access to `path`. `None` if the sandbox allows the access, and
/// "Permission denied" comes from file permissions.
pub fn refusal(path: &Path, writes: bool) -> Option<String> {
    refusal_of(ALLOWED.get()?, path, writes)
}

/// Explains why `path` cannot be read. For "Permission denied" the text has a hint.
pub fn unreadable(path: &Path, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::PermissionDenied => refusal(path, false)
            .unwrap_or_else(|| format!("{error}; hint: let this user read it (chown, chmod)")),
        _ => error.to_string(),
    }
}

fn refusal_of(allowed: &Paths, path: &Path, writes: bool) -> Option<String> {
    let place = resolved(path);
    let mut folders = allowed.write.iter();
    let may_write = folders.any(|folder| place.starts_with(folder));
    let may_read = !writes && allowed.read.iter().any(|folder| place.starts_with(folder));
    if may_write || may_read {
        return None;
    }
    // For a device only its node is suggested, because /dev contains all devices.
    let folder = match place.starts_with("/dev") {
        true => place.as_path(),
        false => place.parent().unwrap_or(&place),
    };
    let (path, folder) = (path.display(), folder.display());
    Some(format!(
        "the sandbox does not allow {path} (sandbox = \"enforce\"); hint: add {folder} to sandbox_paths and restart the daemon"
    ))
}

/// Resolves links. A file that does not exist yet is in the folder that its path names.
fn resolved(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| {
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let folder = fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
        folder.join(path.file_name().unwrap_or_else(|| OsStr::new("")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_outside_of_the_allowed_folders_are_refused() {
        let allowed = Paths {
            read: vec!["/etc".into()],
            write: vec!["/usr/share".into(), "/dev/null".into()],
            ..Paths::default()
        };
        let refused = |path: &str, writes| refusal_of(&allowed, Path::new(path), writes);
        for (path, writes) in [
            ("/etc/hostname", false),
            ("/usr/share/new", true),
            ("/usr/share/new", false),
            ("/dev/null", true),
        ] {
            assert_eq!(refused(path, writes), None, "{path}");
        }
        for (path, writes, key) in [
            ("/etc/hostname", true, "add /etc to sandbox_paths"),
            (
                "/nonexistent/d0.raw",
                false,
                "add /nonexistent to sandbox_paths",
            ),
            // A folder name is no prefix of a longer name.
            (
                "/usr/shared/d0.sock",
                true,
                "add /usr/shared to sandbox_paths",
            ),
            ("/dev/zero", true, "add /dev/zero to sandbox_paths"),
        ] {
            let text = refused(path, writes).unwrap_or_default();
            assert!(text.contains(key) && text.contains(path), "{path}: {text}");
        }
    }
}

//! Finds the other program (`lunette` or `lunette-lab`) next to this one, or in PATH.

use std::env;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::Failure;

/// Returns the path of the program `name`.
///
/// # Errors
/// The program is in neither place.
pub fn find(name: &str) -> Result<PathBuf, Failure> {
    let own = env::current_exe()?;
    let folder = own.parent().unwrap_or(Path::new("/"));
    let path = env::var_os("PATH").unwrap_or_default();
    find_in(name, folder, env::split_paths(&path)).ok_or_else(|| {
        Failure::because(format!(
            "there is no {name} in {} or in PATH; hint: install the package that has {name}, or build both programs with `make build`",
            folder.display()
        ))
    })
}

fn find_in(name: &str, own: &Path, path: impl Iterator<Item = PathBuf>) -> Option<PathBuf> {
    let mut candidates = std::iter::once(own.to_owned())
        .chain(path)
        .map(|folder| folder.join(name));
    candidates.find(|path| is_executable(path))
}

fn is_executable(path: &Path) -> bool {
    let metadata = std::fs::metadata(path);
    metadata.is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_folder_precedes_path_and_only_executables_count() {
        let root = tempfile::tempdir().unwrap();
        let folder = |name: &str| root.path().join(name);
        let make = |name: &str, mode: u32| {
            std::fs::create_dir_all(folder(name)).unwrap();
            let program = folder(name).join("lunette-lab");
            std::fs::write(&program, "").unwrap();
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(mode)).unwrap();
            program
        };
        let find = |own: &str| {
            let path = ["first", "second"].map(folder).into_iter();
            find_in("lunette-lab", &folder(own), path)
        };
        assert_eq!(find("own"), None);
        let second = make("second", 0o755);
        make("first", 0o644);
        std::fs::create_dir_all(folder("own/lunette-lab")).unwrap();
        assert_eq!(find("own"), Some(second));
        let beside = make("beside", 0o755);
        assert_eq!(find("beside"), Some(beside));
    }
}

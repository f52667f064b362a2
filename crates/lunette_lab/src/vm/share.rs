//! Shares a folder of this machine with the guest by virtiofs; virtiofsd serves it over vhost-user.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};
use vm::running::{OwnDaemon, Program, RuntimeFolder};

/// Paths of virtiofsd in distributions, which are not in PATH: the separate program first, then that of QEMU before 8.0.
const PROGRAMS: [&str; 4] = [
    "/usr/libexec/virtiofsd",
    "/usr/lib/virtiofsd",
    "/usr/bin/virtiofsd",
    "/usr/lib/qemu/virtiofsd",
];
/// Mount tag in the guest.
pub const TAG: &str = "share";
/// Word on the kernel's command line that makes the small system mount it at `/share`.
pub const KERNEL_WORD: &str = "lunette.share";

/// Parses `--share`, an existing folder.
pub fn folder(text: &str) -> Result<PathBuf, String> {
    let wrong =
        |error: std::io::Error| format!("{error}; hint: give an existing folder, --share FOLDER");
    let path = std::fs::canonicalize(text).map_err(wrong)?;
    match path.is_dir() {
        true => Ok(path),
        false => Err(
            "it is not a folder; hint: copy single files into a guest with lunette vm copy"
                .to_owned(),
        ),
    }
}

/// Variant of virtiofsd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The separate program, which needs no privileges.
    Own,
    /// The program of QEMU until 7.2. Needs root, and no comma in the path.
    Qemu,
}

impl Kind {
    fn of_help(help: &str) -> Kind {
        match help.contains("--shared-dir") {
            true => Kind::Own,
            false => Kind::Qemu,
        }
    }

    fn arguments(self, folder: &Path, socket: &Path) -> Result<Vec<String>> {
        let socket = format!("--socket-path={}", socket.display());
        let folder = folder.display().to_string();
        match self {
            Kind::Own => Ok(vec![socket, "--shared-dir".to_owned(), folder]),
            Kind::Qemu if folder.contains(',') => {
                bail!(
                    "--share {folder}: QEMU's virtiofsd does not support a comma in the path; hint: rename the folder, or apt-get install virtiofsd"
                )
            }
            Kind::Qemu if !rustix::process::geteuid().is_root() => {
                bail!(
                    "--share: QEMU's virtiofsd needs root; hint: apt-get install virtiofsd, where the distribution has it, or lunette vm copy"
                )
            }
            Kind::Qemu => Ok(vec![
                socket,
                "-f".to_owned(),
                "-o".to_owned(),
                format!("source={folder}"),
            ]),
        }
    }
}

/// Returns the program that serves the folder to this guest.
pub fn daemon(folder: &Path, place: &RuntimeFolder) -> Result<OwnDaemon> {
    let found = PROGRAMS
        .iter()
        .map(PathBuf::from)
        .find(|path| path.is_file());
    let Some(path) = found else {
        bail!(
            "--share needs virtiofsd, but none of {} exists; hint: apt-get install virtiofsd, on Debian 12 qemu-system-common",
            PROGRAMS.join(", ")
        );
    };
    let help = Command::new(&path).arg("--help").output()?;
    let socket = place.file(SOCKET);
    let arguments =
        Kind::of_help(&String::from_utf8_lossy(&help.stdout)).arguments(folder, &socket)?;
    Ok(OwnDaemon {
        program: Program { path, arguments },
        sockets: vec![socket],
    })
}

/// Name of virtiofsd's socket in the folder of sockets.
pub const SOCKET: &str = "share.sock";

/// QEMU's arguments. `properties` contains the device's address.
pub fn device(socket: &Path, properties: &str) -> Vec<String> {
    // A comma in a value is written twice.
    let path = socket.display().to_string().replace(',', ",,");
    vec![
        "-chardev".to_owned(),
        format!("socket,id=share-socket,path={path}"),
        "-device".to_owned(),
        format!("vhost-user-fs-pci,id=share,chardev=share-socket,tag={TAG}{properties}"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_virtiofsd_gets_its_own_arguments() {
        let (folder, socket) = (Path::new("/a,b"), Path::new("/run/s"));
        let own = Kind::of_help("  --shared-dir <SHARED_DIR>\n").arguments(folder, socket);
        assert_eq!(
            own.unwrap(),
            ["--socket-path=/run/s", "--shared-dir", "/a,b"]
        );
        let refused = Kind::of_help("    -o source=PATH\n").arguments(folder, socket);
        assert!(refused.unwrap_err().to_string().contains("comma"));
    }

    #[test]
    fn only_a_folder_can_be_shared() {
        assert!(folder("/proc/version").unwrap_err().contains("vm copy"));
        assert!(folder("/no/such/folder").unwrap_err().contains("hint:"));
        assert_eq!(folder("/proc/.").unwrap(), Path::new("/proc"));
    }
}

//! Restrictions of a systemd unit, for hints: the unit hides or protects files that other programs of this host see.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::accounts;

/// Folders that `ProtectHome=` hides.
const HOMES: [&str; 3] = ["/home", "/root", "/run/user"];

/// Returns true if systemd has started this process as a service.
fn is_service() -> bool {
    // Set for the process itself, not for its children (systemd.exec(5)).
    let main = std::env::var("SYSTEMD_EXEC_PID");
    main.is_ok_and(|pid| pid == std::process::id().to_string())
}

/// Returns the setting of the unit that hides `path`. `None` if this process is no service, or if no usual setting hides it.
pub fn hidden_by_unit(path: &Path) -> Option<String> {
    is_service().then(|| hidden(path)).flatten()
}

fn hidden(path: &Path) -> Option<String> {
    let settings = if HOMES.iter().any(|home| path.starts_with(home)) {
        "ProtectHome=no"
    } else if path.starts_with("/tmp") || path.starts_with("/var/tmp") {
        "PrivateTmp=no"
    } else if path.starts_with("/dev") {
        "PrivateDevices=no, DeviceAllow=block-* rw and SupplementaryGroups=disk"
    } else {
        return None;
    };
    let path = path.display();
    Some(format!(
        "the service may not see {path}; hint: systemctl edit lunette, add {settings} below [Service], and restart it"
    ))
}

/// Returns the remedy for a read-only file system.
pub fn make_writable(path: &Path) -> String {
    remedy(path, is_service())
}

fn remedy(path: &Path, is_service: bool) -> String {
    if !is_service {
        return "remount it writable".to_owned();
    }
    let folder = path.parent().unwrap_or(path).display();
    format!(
        "the service sees it read-only (ProtectSystem=strict): systemctl edit lunette, add ReadWritePaths={folder} below [Service], and restart \
         it"
    )
}

/// Returns the remedy for a file that AppArmor may deny to this process. `None` if the packaged profile is not enforced.
pub fn allow_in_profile(path: &Path, read_only: bool) -> Option<String> {
    let label = std::fs::read_to_string("/proc/self/attr/current").ok()?;
    allow_in(&label, path, read_only)
}

/// `label`: profile and mode. Containers have other profiles, and other security modules other labels.
fn allow_in(label: &str, path: &Path, read_only: bool) -> Option<String> {
    (label.trim_end() == "lunette (enforce)").then(|| {
        let access = if read_only { "rk" } else { "rwk" };
        let path = path.display();
        format!(
            "the AppArmor profile lunette may deny it: add the line `{path} {access},` to /etc/apparmor.d/local/lunette, and load the profile \
             (apparmor_parser -r /etc/apparmor.d/lunette)"
        )
    })
}

/// Returns the name of this process's user, or its number.
pub fn this_user() -> String {
    // procfs gives the folder to the effective user of the process.
    match std::fs::metadata("/proc/self") {
        Ok(own) => accounts::user_name(own.uid()),
        Err(_) => "of the daemon".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_hidden_path_has_its_setting() {
        let (homes, root) = (HOMES[0], HOMES[1]);
        for (path, setting) in [
            (format!("{homes}/me/d.raw"), Some("ProtectHome=no")),
            (format!("{root}/d.raw"), Some("ProtectHome=no")),
            ("/var/tmp/d.raw".to_owned(), Some("PrivateTmp=no")),
            ("/dev/sdb".to_owned(), Some("PrivateDevices=no")),
            (format!("{homes}s/d.raw"), None),
            ("/srv/d.raw".to_owned(), None),
        ] {
            let found = hidden(Path::new(&path));
            let is_meant = match (&found, setting) {
                (Some(found), Some(setting)) => found.contains(setting),
                (found, setting) => found.is_none() && setting.is_none(),
            };
            assert!(is_meant, "{path}: {found:?}");
        }
        // A test is no service.
        assert_eq!(hidden_by_unit(Path::new("/var/tmp/d.raw")), None);
    }

    #[test]
    fn only_the_packaged_profile_has_a_remedy() {
        let path = Path::new("/data/d.raw");
        for (read_only, rule) in [(false, "`/data/d.raw rwk,`"), (true, "`/data/d.raw rk,`")] {
            let remedy = allow_in("lunette (enforce)\n", path, read_only);
            assert!(remedy.is_some_and(|remedy| remedy.contains(rule)));
        }
        for label in [
            "unconfined\n",
            "lunette (complain)\n",
            "docker-default (enforce)\n",
            "system_u:system_r:init_t:s0\0",
            "",
        ] {
            assert_eq!(allow_in(label, path, false), None, "{label}");
        }
    }

    #[test]
    fn read_only_file_system_of_a_service_has_a_drop_in() {
        let path = Path::new("/srv/vm/d.raw");
        assert_eq!(remedy(path, false), "remount it writable");
        assert!(remedy(path, true).contains("ReadWritePaths=/srv/vm "));
    }
}

//! CHAP secrets of all files of a configuration, compared with each other.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use bdev::iscsi_initiator::{read_private, secrets_of};

use super::devices::BlockDeviceConfig;
use super::model::Config;

/// Returns an error if a secret that a target proves is also one that an initiator proves, in any of the files: with one secret for
/// both directions each side can prove itself with the answers of the other (RFC 7143, 9.2.1). A file that cannot be read is passed
/// over, because the object that needs it reports that.
pub fn equal_chap_secrets(config: &Config) -> Option<String> {
    let of_targets = config.iscsi.iter().map(|target| &target.chap_users);
    let of_disks = config.disks.iter().map(|disk| match &disk.backend {
        BlockDeviceConfig::Iscsi(remote) => &remote.chap_file,
        _ => &None,
    });
    let all = of_targets.chain(of_disks).chain([&config.discovery_auth]);
    let paths: BTreeSet<&Path> = all.flatten().map(AsRef::as_ref).collect();
    let texts: Vec<(&Path, String)> = paths
        .into_iter()
        .filter_map(|path| Some((path, read_private(path, "CHAP secrets").ok()?)))
        .collect();
    let mut initiators = HashMap::new();
    for (path, text) in &texts {
        for secrets in secrets_of(text) {
            initiators.insert(secrets.initiator, (*path, secrets.line));
        }
    }
    texts.iter().find_map(|(path, text)| {
        secrets_of(text).into_iter().find_map(|secrets| {
            let (other, line) = initiators.get(secrets.target?)?;
            Some(format!(
                "{}:{}: the target's secret equals the initiator's secret in {}:{line} (RFC 7143, 9.2.1)",
                path.display(),
                secrets.line,
                other.display()
            ))
        })
    })
}

/// What to do about equal secrets.
pub const EQUAL_SECRETS_HELP: &str = "give target and initiators different secrets";

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::{Flags, Surroundings};

    #[test]
    fn secret_of_a_target_is_no_initiators_secret_in_any_file() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| format!("{}/{name}", folder.path().display());
        let write = |name: &str, text: &str| {
            std::fs::write(at(name), text).unwrap();
            std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(0o600)).unwrap();
        };
        write("users", "ann annsecret1234 t0 targetsecret1\n");
        write("disk", "host hostsecret123\n");
        write("finders", "eve evesecret1234\n");
        let flags = Flags {
            disk: vec![
                "d0=ram:1M".to_owned(),
                format!(
                    "d1=iscsi://host@192.0.2.1/iqn.2026-11.org.example:t1/0,chap_file={}",
                    at("disk")
                ),
            ],
            iscsi: vec!["iqn.2026-11.org.example:t0=d0".to_owned()],
            portal: vec!["127.0.0.1".to_owned()],
            chap_user: Some(at("users")),
            ..Flags::default()
        };
        let flags = flags.with("discovery-auth", &at("finders"));
        let config = crate::parse(None, &flags, &Surroundings::of_this_process());
        let config = config.unwrap_or_else(|mistakes| panic!("{mistakes}"));
        assert_eq!(equal_chap_secrets(&config), None);
        for (file, text) in [
            ("disk", "# host\nhost targetsecret1\n"),
            ("finders", "# eve\neve targetsecret1\n"),
        ] {
            let before = std::fs::read_to_string(at(file)).unwrap();
            write(file, text);
            let found = equal_chap_secrets(&config).unwrap();
            let (own, other) = (at("users"), at(file));
            assert!(found.starts_with(&format!("{own}:1: ")), "{found}");
            assert!(found.contains(&format!(" in {other}:2 ")), "{found}");
            assert!(!found.contains("targetsecret1"), "{found}");
            write(file, &before);
        }
        assert_eq!(equal_chap_secrets(&config), None);
    }
}

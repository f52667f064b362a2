//! CHAP secrets of all files of a configuration, compared with each other.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use bdev::iscsi_initiator::{read_private, secrets_of};

use config::Config;

/// Returns an error if a target and an initiator have the same secret, in any of the files: each side could then answer a challenge with
/// the response of the other (RFC 7143, 9.2.1). An unreadable file is skipped, because the object that needs it reports that.
pub fn equal_chap_secrets(config: &Config) -> Option<String> {
    equal_secrets_of(config, |_| true)
}

/// Returns the error of [`equal_chap_secrets`] for files of targets and disks in `next` that are new or changed since `now`. Reads no file
/// if there are none: a change is not refused because of an unrelated file.
pub fn equal_chap_secrets_of_new(now: &Config, next: &Config) -> Option<String> {
    let of_targets = next.exports().filter_map(|target| {
        let path = target.chap_users()?;
        let known = now.export(&target.name);
        let known = known.and_then(|known| known.chap_users());
        (known != Some(path)).then_some(path)
    });
    let of_disks = next.disks.iter().filter_map(|disk| {
        let path = disk.backend.chap_file()?;
        let known = now.disk(&disk.name);
        let known = known.and_then(|known| known.backend.chap_file());
        (known != Some(path)).then_some(path)
    });
    let new: BTreeSet<&Path> = of_targets.chain(of_disks).collect();
    match new.is_empty() {
        true => None,
        false => equal_secrets_of(next, |path| new.contains(path)),
    }
}

/// Compares the secrets of all files. Reports only pairs with a secret of a file that `is_meant`.
fn equal_secrets_of(config: &Config, is_meant: impl Fn(&Path) -> bool) -> Option<String> {
    let of_targets = config.exports().map(|target| target.chap_users());
    let of_disks = config.disks.iter().map(|disk| disk.backend.chap_file());
    let all = of_targets
        .chain(of_disks)
        .chain([config.discovery_auth.as_deref()]);
    let paths: BTreeSet<&Path> = all.flatten().collect();
    let texts: Vec<(&Path, String)> = paths
        .into_iter()
        .filter_map(|path| Some((path, read_private(path, "CHAP secrets").ok()?)))
        .collect();
    let mut initiators: HashMap<_, Vec<_>> = HashMap::new();
    for (path, text) in &texts {
        for secrets in secrets_of(text) {
            let places = initiators.entry(secrets.initiator).or_default();
            places.push((*path, secrets.line));
        }
    }
    texts.iter().find_map(|(path, text)| {
        secrets_of(text).into_iter().find_map(|secrets| {
            let mut places = initiators.get(secrets.target?)?.iter();
            let (other, line) = places.find(|(other, _)| is_meant(path) || is_meant(other))?;
            Some(format!(
                "{}:{}: the target's secret equals the initiator's secret in {}:{line} (RFC 7143, 9.2.1)",
                path.display(),
                secrets.line,
                other.display()
            ))
        })
    })
}

/// Remedy for equal secrets.
pub const EQUAL_SECRETS_HELP: &str = "give target and initiators different secrets";

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use config::{Flags, Surroundings};

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
        let config = config::parse(None, &flags, &Surroundings::of_this_process());
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

    #[test]
    fn only_changes_with_secrets_are_compared() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| format!("{}/{name}", folder.path().display());
        for (name, text) in [
            ("users", "ann annsecret1234 t0 targetsecret1\n"),
            ("equal", "host targetsecret1\n"),
            ("other", "host hostsecret123\n"),
        ] {
            std::fs::write(at(name), text).unwrap();
            std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(0o600)).unwrap();
        }
        let config = |disks: &[(&str, &str)]| {
            let disk = |(name, file): &(&str, &str)| match *file {
                "" => format!("{name}=ram:1M"),
                file => format!(
                    "{name}=iscsi://host@192.0.2.1/iqn.2026-11.org.example:{name}/0,chap_file={}",
                    at(file)
                ),
            };
            let flags = Flags {
                disk: disks.iter().map(disk).collect(),
                iscsi: vec!["iqn.2026-11.org.example:t0=d0".to_owned()],
                portal: vec!["127.0.0.1".to_owned()],
                chap_user: Some(at("users")),
                ..Flags::default()
            };
            let config = config::parse(None, &flags, &Surroundings::of_this_process());
            config.unwrap_or_else(|mistakes| panic!("{mistakes}"))
        };
        let (ram, equal, other) = (("d0", ""), ("d1", "equal"), ("d2", "other"));
        let now = config(&[ram, equal]);
        assert!(equal_chap_secrets(&now).is_some());
        // The file of `d1` was edited while it was in use.
        let new = |disks: &[(&str, &str)]| equal_chap_secrets_of_new(&now, &config(disks));
        assert_eq!(new(&[ram, equal, ("d3", "")]), None);
        assert_eq!(new(&[ram, equal, other]), None);
        assert!(new(&[ram, equal, ("d3", "equal")]).is_some());
    }
}

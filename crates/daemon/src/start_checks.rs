//! Checks of a start that need files of this host: secrets, sockets and the relations of objects. `lunette check` makes them without a
//! start.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use ::control::Token;

use crate::certificates;
use crate::exports;
use crate::objects::{Fault, StateStore, check_start};
use crate::state;
use config::{AccessConfig, Config};

/// Result of the checks.
#[derive(Debug, Default)]
pub struct StartChecks {
    /// Reasons for which a start fails.
    pub mistakes: Vec<Fault>,
    /// Files that only another user can check, and values of the file that a change at run time replaces.
    pub warnings: Vec<String>,
}

impl StartChecks {
    /// Makes the checks of a start. Opens no disk and binds no socket.
    pub fn of(config: &Config) -> StartChecks {
        let mut checks = StartChecks {
            mistakes: check_start(config),
            warnings: Vec::new(),
        };
        for path in token_files(&config.access) {
            checks.add_file(path, Token::read(path).map(drop));
        }
        if let Some(path) = &config.discovery_auth {
            checks.add_file(path, exports::discovery_users(config).map(drop));
        }
        if let Some(path) = &config.tls.key {
            let read = certificates::read(config);
            let fault = read.as_ref().ok().and_then(|read| read.fault(config));
            checks.warnings.extend(fault);
            checks.add_file(path, read.map(drop));
        }
        for export in config.exports() {
            if let Some(path) = export.chap_users() {
                let read = exports::chap_users(Some(path)).map(drop);
                let read =
                    read.map_err(|error| format!("{} {}: {error}", export.kind(), export.name()));
                checks.add_file(path, read);
            }
        }
        if let Some(folder) = config.state.clone().or_else(state::default_folder) {
            let shadowed = StateStore::kept_in(&folder).shadowing_lines(config);
            let shadowed = shadowed.into_iter();
            checks.warnings.extend(shadowed.map(|change| {
                format!("value of the file not in effect: changed at run time: {change}")
            }));
        }
        let sockets = config.exports().filter_map(|export| {
            let socket = export.socket()?;
            Some((format!("{} {}", export.kind(), export.name()), socket))
        });
        let control = config.control.as_ref();
        let control = control.map(|path| ("control socket".to_owned(), path));
        for (object, path) in sockets.chain(control) {
            let mistake =
                socket_mistake(path).map(|reason| Fault::new(format!("{object}: {reason}")));
            checks.mistakes.extend(mistake);
        }
        checks
    }

    /// Adds the error of a file. A file of another user may be right for a daemon that runs as that user.
    fn add_file(&mut self, path: &Path, read: Result<(), String>) {
        let Err(error) = read else { return };
        let own = rustix::process::geteuid().as_raw();
        let is_of_another = fs::metadata(path).is_ok_and(|found| ![0, own].contains(&found.uid()));
        if is_of_another {
            self.warnings.push(error);
            return;
        }
        let fault = match error.split_once("; hint: ") {
            Some((detail, hint)) => Fault::new(detail).help(hint),
            None => Fault::new(error),
        };
        self.mistakes.push(fault);
    }
}

/// Returns the token files of a configuration.
pub(crate) fn token_files(access: &AccessConfig) -> impl Iterator<Item = &PathBuf> {
    access.token_file.iter().chain(&access.readers_token_file)
}

/// Returns the reason why a socket can never be bound at a path.
fn socket_mistake(path: &Path) -> Option<String> {
    let shown = path.display();
    if let Ok(found) = fs::symlink_metadata(path) {
        let is_socket = found.file_type().is_socket();
        return (!is_socket).then(|| format!("{shown} exists and is not a socket"));
    }
    let mut folders = path.ancestors().skip(1);
    let found = folders.find_map(|folder| Some((folder, fs::metadata(folder).ok()?)));
    let (folder, found) = found?;
    (!found.is_dir()).then(|| format!("{shown}: {} is not a folder", folder.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use config::{Flags, Surroundings};

    fn found(text: &str) -> StartChecks {
        let text = format!("workers = 1\n{text}");
        let file = Some(("lunette.toml", text.as_str()));
        let config = config::parse(file, &Flags::default(), &Surroundings::of_this_process());
        StartChecks::of(&config.unwrap_or_else(|mistakes| panic!("{mistakes}")))
    }

    #[test]
    fn files_that_a_start_refuses_are_mistakes() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str, mode| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            path.display().to_string()
        };
        let token = |path: &str| format!("api_listen = \"127.0.0.1:1\"\ntoken_file = \"{path}\"\n");
        let good = write("good", "a-token-of-more-than-16-bytes", 0o600);
        assert!(found(&token(&good)).mistakes.is_empty());
        let open = write("open", "a-token-of-more-than-16-bytes", 0o644);
        let short = write("short", "short", 0o600);
        let missing = folder.path().join("missing").display().to_string();
        let target = |users: &str| {
            format!(
                "[[iscsi]]\nname = \"iqn.2026-11.org.example:t\"\nportals = [\"127.0.0.1\"]\nchap_users = \"{users}\"\n"
            )
        };
        let blk = |socket: &str| {
            format!(
                "[[disk]]\nname = \"d\"\nbackend = \"ram\"\nsize = \"1M\"\n[[vhost_blk]]\ndisk = \"d\"\nsocket = \"{socket}\"\n"
            )
        };
        for (text, words) in [
            (token(&open), "has mode 644"),
            (token(&short), "has no token"),
            (token(&missing), "cannot read the token"),
            (
                token(&good) + &format!("readers_token_file = \"{open}\"\n"),
                "has mode 644",
            ),
            (format!("discovery_auth = \"{open}\"\n"), "has mode 644"),
            (target(&open), "iscsi iqn.2026-11.org.example:t: "),
            (blk(&good), "exists and is not a socket"),
            (blk(&format!("{good}/d.sock")), "is not a folder"),
            (format!("control = \"{good}\"\n"), "control socket: "),
        ] {
            let found = found(&text);
            let [mistake] = &found.mistakes[..] else {
                panic!("{text}: {found:?}");
            };
            assert!(mistake.to_string().contains(words), "{mistake}");
        }
        let later = folder.path().join("later/d.sock");
        assert!(
            found(&blk(&later.display().to_string()))
                .mistakes
                .is_empty()
        );
    }
}

//! Checks a changed configuration: relations between its objects, and the secrets in its files.

use std::path::{Path, PathBuf};

use super::refusal::Fault;
use crate::equal_secrets::{EQUAL_SECRETS_HELP, equal_chap_secrets, equal_chap_secrets_of_new};
use config::Config;

/// Checks a whole configuration: [`check_objects`] and the secrets in all CHAP files. Used for a start, a reload and an upgrade.
pub fn check(next: &Config) -> Vec<Fault> {
    with_equal_secrets(next, equal_chap_secrets(next))
}

/// Checks a change at run time: [`check_objects`] and the secrets in the CHAP files that the change adds.
pub fn check_change(now: &Config, next: &Config) -> Vec<Fault> {
    with_equal_secrets(next, equal_chap_secrets_of_new(now, next))
}

fn with_equal_secrets(next: &Config, equal_secrets: Option<String>) -> Vec<Fault> {
    let secrets = equal_secrets.map(|detail| Fault::new(detail).help(EQUAL_SECRETS_HELP));
    check_objects(next).into_iter().chain(secrets).collect()
}

/// Returns all conflicts in `next`, except those of CHAP secrets.
pub fn check_objects(next: &Config) -> Vec<Fault> {
    config::conflicts(next).iter().map(Fault::from).collect()
}

/// Returns an absolute path. Two paths to one file through links are detected by the file's lock.
pub(crate) fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

//! Landlock rules: which files the process reaches, and that a confined thread reaches none.
//!
//! Rules hold for paths that are opened from now on, also by io_uring; what is open stays open. Rights that this kernel does not know
//! are left out, and named.

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};

use crate::{Error, Paths};

/// The newest version of Landlock that is used: scopes came with it. An older kernel gives less.
const NEWEST: ABI = ABI::V6;

fn failed(what: &str, error: impl std::fmt::Display) -> Error {
    Error(format!("cannot confine {what} with Landlock: {error}"))
}

/// Effect of the rules on the process.
pub struct Restriction {
    /// Other files are closed to the process.
    pub is_enforced: bool,
    /// Parts that this kernel lacks, if any.
    pub missing: Option<String>,
}

/// Closes all files but these to the process.
pub fn restrict(paths: &Paths) -> Result<Restriction, Error> {
    let failed = |error: landlock::RulesetError| failed("the process", error);
    let everything = AccessFs::from_all(NEWEST);
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(everything)
        .map_err(failed)?
        .scope(Scope::Signal)
        .map_err(failed)?;
    if !paths.abstract_sockets {
        ruleset = ruleset.scope(Scope::AbstractUnixSocket).map_err(failed)?;
    }
    let mut created = ruleset.create().map_err(failed)?;
    for (list, access) in [
        (
            &paths.read,
            AccessFs::from_read(NEWEST) & !AccessFs::Execute,
        ),
        (&paths.write, everything & !AccessFs::Execute),
        (&paths.make_sockets, AccessFs::MakeSock.into()),
    ] {
        for path in list {
            // What is not there cannot be opened either.
            let Ok(opened) = PathFd::new(path) else {
                continue;
            };
            // A file has no right that is about a folder's entries.
            let access = match path.is_dir() {
                true => access,
                false => access & AccessFs::from_file(NEWEST),
            };
            created = created
                .add_rule(PathBeneath::new(opened, access))
                .map_err(failed)?;
        }
    }
    let status = created.restrict_self().map_err(failed)?;
    let missing = match status.ruleset {
        RulesetStatus::FullyEnforced => None,
        RulesetStatus::PartiallyEnforced => Some(
            "some of Landlock (Linux 6.12 has all of it): files are confined, sockets and signals may not be"
                .to_owned(),
        ),
        RulesetStatus::NotEnforced => {
            Some("Landlock (Linux 5.13, in the list of lsm=): files are not confined".to_owned())
        }
    };
    Ok(Restriction {
        is_enforced: status.ruleset != RulesetStatus::NotEnforced,
        missing,
    })
}

/// Closes all files, and connections to and from new TCP sockets, to this thread and those that it starts.
pub fn close_all() -> Result<(), Error> {
    let failed = |error: landlock::RulesetError| failed("a thread", error);
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))
        .map_err(failed)?
        .handle_access(AccessNet::from_all(NEWEST))
        .map_err(failed)?
        .create()
        .map_err(failed)?
        .restrict_self()
        .map(drop)
        .map_err(failed)
}

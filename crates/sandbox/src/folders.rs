//! Landlock rules: the process reaches only listed files, a confined thread reaches none.
//!
//! Rules apply to paths that are opened later, also by io_uring; open files stay open. Rights that this kernel lacks are left out and
//! reported.

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};

use crate::{Error, Paths};

/// Newest Landlock version in use: the first with scopes. Older kernels restrict less.
const NEWEST: ABI = ABI::V6;

fn failed(subject: &str, error: impl std::fmt::Display) -> Error {
    Error(format!("cannot confine {subject} with Landlock: {error}"))
}

/// Effect of the rules on the process.
pub struct Restriction {
    /// The rules are in effect.
    pub is_enforced: bool,
    /// Restrictions that this kernel lacks, if any.
    pub missing: Option<String>,
}

/// Denies the process access to all files except these.
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
            // A path that does not exist needs no rule.
            let Ok(opened) = PathFd::new(path) else {
                continue;
            };
            // Rights on folder entries are invalid for files.
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
            "some features of Landlock (complete since Linux 6.12): sockets and signals may not be confined"
                .to_owned(),
        ),
        RulesetStatus::NotEnforced => {
            Some("Landlock (since Linux 5.13, enabled with lsm=): files are not confined".to_owned())
        }
    };
    Ok(Restriction {
        is_enforced: status.ruleset != RulesetStatus::NotEnforced,
        missing,
    })
}

/// Denies this thread, and threads that it starts, access to all files and new TCP sockets.
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

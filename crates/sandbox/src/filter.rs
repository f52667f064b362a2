//! seccomp filters from the lists of system calls in `calls`.
//!
//! The process has a list of calls that are denied, for libraries that it loads make calls that change with their versions. Threads
//! that clients drive have lists of calls that are allowed. Both hold: a thread's filter comes on top of the process's.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

use crate::calls::{self, Argument, Call};
use crate::{Error, Mode, Thread};

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn failed(error: impl std::fmt::Display) -> Error {
    Error(format!("cannot set a seccomp filter: {error}"))
}

/// A violation of the list.
fn violation(mode: Mode) -> SeccompAction {
    match mode {
        Mode::Enforce => SeccompAction::KillProcess,
        Mode::Log | Mode::Off => SeccompAction::Log,
    }
}

/// Denies the process, and all threads that it starts from now on, what none of them needs.
pub fn process(mode: Mode) -> Result<(), Error> {
    let mut rules = rules(calls::DENIED.iter().copied())?;
    // Signals go to this process alone.
    let own = u64::from(std::process::id());
    for number in [libc::SYS_kill, libc::SYS_tgkill, libc::SYS_rt_sigqueueinfo] {
        let other = condition(0, &SeccompCmpOp::Ne, own)?;
        rules.insert(number, vec![SeccompRule::new(vec![other]).map_err(failed)?]);
    }
    apply(rules, SeccompAction::Allow, violation(mode))
}

/// Allows the calling thread what its kind needs.
pub fn thread(mode: Mode, thread: Thread) -> Result<(), Error> {
    if mode == Mode::Enforce {
        // glibc looks at a file of /proc when memory is freed, and goes on without it: opening fails, and ends nothing.
        let opening = rules([(libc::SYS_openat, Argument::Any)].into_iter())?;
        let refused = SeccompAction::Errno(libc::EACCES.unsigned_abs());
        apply(opening, SeccompAction::Allow, refused)?;
    }
    let own = u64::from(std::process::id());
    let session = match thread {
        Thread::Worker => &[][..],
        Thread::Session => calls::SESSION,
        Thread::Device => calls::DEVICE,
    };
    let allowed = calls::WORKER.iter().chain(session).copied();
    let mut rules = rules(allowed)?;
    let itself = condition(0, &SeccompCmpOp::Eq, own)?;
    rules.insert(
        libc::SYS_tgkill,
        vec![SeccompRule::new(vec![itself]).map_err(failed)?],
    );
    // Refused above, which is no violation.
    rules.insert(libc::SYS_openat, Vec::new());
    apply(rules, violation(mode), SeccompAction::Allow)
}

fn condition(at: u8, operator: &SeccompCmpOp, value: u64) -> Result<SeccompCondition, Error> {
    SeccompCondition::new(at, SeccompCmpArgLen::Dword, operator.clone(), value).map_err(failed)
}

fn rules(calls: impl Iterator<Item = Call>) -> Result<Rules, Error> {
    let mut rules = Rules::new();
    for (number, argument) in calls {
        let chain = rules.entry(number).or_default();
        match argument {
            Argument::Any => {}
            Argument::Is(at, values) => {
                for value in values {
                    let is = condition(at, &SeccompCmpOp::Eq, *value)?;
                    chain.push(SeccompRule::new(vec![is]).map_err(failed)?);
                }
            }
            Argument::Has(at, bits) => {
                let has = condition(at, &SeccompCmpOp::MaskedEq(bits), bits)?;
                chain.push(SeccompRule::new(vec![has]).map_err(failed)?);
            }
        }
    }
    Ok(rules)
}

fn apply(rules: Rules, otherwise: SeccompAction, listed: SeccompAction) -> Result<(), Error> {
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(failed)?;
    let filter = SeccompFilter::new(rules, otherwise, listed, arch).map_err(failed)?;
    let program = BpfProgram::try_from(filter).map_err(failed)?;
    seccompiler::apply_filter(&program).map_err(failed)
}

//! seccomp filters from the lists of system calls in `calls`.
//!
//! The process has a deny list, because the calls of its libraries change with their versions. Threads driven by clients have allow lists.
//! A thread's filter applies in addition to the process's.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, sock_filter,
};

use crate::calls::{self, Argument, Call};
use crate::{Error, Mode, Thread};

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn failed(error: impl std::fmt::Display) -> Error {
    Error(format!("cannot set a seccomp filter: {error}"))
}

/// Result of a call in [`calls::DENIED`]. In [`Mode::Threads`] it fails with EPERM and does not end the process: different versions of the
/// libraries make different calls.
fn denied(mode: Mode) -> SeccompAction {
    match mode {
        Mode::Enforce => SeccompAction::KillProcess,
        Mode::Threads => SeccompAction::Errno(libc::EPERM.unsigned_abs()),
        Mode::Log | Mode::Off => SeccompAction::Log,
    }
}

/// Result of a call that is not on a thread's allow list.
fn unlisted(mode: Mode) -> SeccompAction {
    match mode {
        Mode::Enforce | Mode::Threads => SeccompAction::KillProcess,
        Mode::Log | Mode::Off => SeccompAction::Log,
    }
}

/// First x32 system call number. x32 calls have the architecture value of x86-64, and no list of numbers covers them.
#[cfg(target_arch = "x86_64")]
const X32_CALLS: u32 = 0x4000_0000;

/// Returns a filter that gives x32 system calls the result `action` and allows all others.
#[cfg(target_arch = "x86_64")]
fn x32(action: SeccompAction) -> BpfProgram {
    // BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JGE | BPF_K, BPF_RET | BPF_K of linux/bpf_common.h
    const LOAD: u16 = 0x20;
    const JUMP_IF_AT_LEAST: u16 = 0x35;
    const RETURN: u16 = 0x06;
    let instruction = |code, jt, k| sock_filter { code, jt, jf: 0, k };
    vec![
        // The number is the first field of seccomp_data.
        instruction(LOAD, 0, 0),
        instruction(JUMP_IF_AT_LEAST, 1, X32_CALLS),
        instruction(RETURN, 0, SeccompAction::Allow.into()),
        instruction(RETURN, 0, action.into()),
    ]
}

/// Sets the filters of the process. Threads started later inherit them.
pub fn process(mode: Mode) -> Result<(), Error> {
    if mode.confines_threads() {
        for (call, errno) in calls::FAILING {
            let answer = SeccompAction::Errno(errno.unsigned_abs());
            apply(rules([*call].into_iter())?, SeccompAction::Allow, answer)?;
        }
    }
    #[cfg(target_arch = "x86_64")]
    seccompiler::apply_filter(&x32(denied(mode))).map_err(failed)?;
    let mut rules = rules(calls::DENIED.iter().copied())?;
    // Signals to other processes are denied.
    let own = u64::from(std::process::id());
    for number in [libc::SYS_kill, libc::SYS_tgkill, libc::SYS_rt_sigqueueinfo] {
        let other = condition(0, &SeccompCmpOp::Ne, own)?;
        rules.insert(number, vec![SeccompRule::new(vec![other]).map_err(failed)?]);
    }
    apply(rules, SeccompAction::Allow, denied(mode))
}

/// Sets the allow list of the calling thread.
pub fn thread(mode: Mode, thread: Thread) -> Result<(), Error> {
    if mode.confines_threads() {
        // glibc opens a file in /proc when it frees memory, and works without it: opening fails and does not end the process.
        let opening = rules([(libc::SYS_openat, Argument::Any)].into_iter())?;
        let refused = SeccompAction::Errno(libc::EACCES.unsigned_abs());
        apply(opening, SeccompAction::Allow, refused)?;
    }
    let own = u64::from(std::process::id());
    let session = match thread {
        // The ring of a device thread is created before the thread is confined.
        Thread::Worker | Thread::Device => &[][..],
        Thread::Session => calls::SESSION,
    };
    let allowed = calls::WORKER.iter().chain(session).copied();
    let mut rules = rules(allowed)?;
    let itself = condition(0, &SeccompCmpOp::Eq, own)?;
    rules.insert(
        libc::SYS_tgkill,
        vec![SeccompRule::new(vec![itself]).map_err(failed)?],
    );
    // The filter above refuses it, which is not a violation.
    rules.insert(libc::SYS_openat, Vec::new());
    apply(rules, unlisted(mode), SeccompAction::Allow)
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
            Argument::HasOneOf(at, flags) => {
                for flag in flags {
                    let has = condition(at, &SeccompCmpOp::MaskedEq(*flag), *flag)?;
                    chain.push(SeccompRule::new(vec![has]).map_err(failed)?);
                }
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

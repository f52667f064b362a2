//! System calls that the sandbox denies and that no safe function makes. Each probe runs in a separate process, because a violation
//! ends it. Calls of safe functions: `crates/reactor/tests/confined.rs`.

use std::io::Error;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use sandbox::{Mode, Paths, Thread};

/// Environment variable with the mode, the thread and the call of a probe.
const PROBE: &str = "LUNETTE_TEST_DENIED_CALL";
/// Exit status of a probe after a successful call. A failed call exits with its errno.
const DONE: i32 = 200;

/// Creates a process by clone(2) with `flags` without waiting; the new process exits at once.
fn clone(flags: libc::c_int) -> i64 {
    let flags = i64::from(flags | libc::SIGCHLD);
    // SAFETY: as fork(2): no stack, no addresses; the new process calls only _exit.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    if pid == 0 {
        // SAFETY: ends the new process without running destructors that belong to this one.
        unsafe { libc::_exit(0) };
    }
    pid
}

fn call(name: &str) -> i64 {
    match name {
        "clone" => clone(0),
        "clone of a user namespace" => clone(libc::CLONE_NEWUSER),
        "clone of two namespaces" => clone(libc::CLONE_NEWNET | libc::CLONE_NEWNS),
        // SAFETY: the kernel refuses a size of 0 before it reads the address.
        "clone3" => unsafe { libc::syscall(libc::SYS_clone3, 0, 0) },
        // SAFETY: the kernel refuses the null path.
        "mknod" => unsafe { libc::syscall(libc::SYS_mknod, 0, libc::S_IFIFO, 0) },
        // SAFETY: takes no argument.
        "getpid of x32" => unsafe { libc::syscall(0x4000_0000 + 39) },
        // SAFETY: raises no privilege: level 0 is the default.
        "iopl" => unsafe { libc::syscall(libc::SYS_iopl, 0) },
        "thread" => i64::from(std::thread::spawn(|| ()).join().is_err()),
        other => panic!("there is no probe {other}"),
    }
}

fn exit_status(name: &str) -> i32 {
    match call(name) {
        0.. => DONE,
        _ => Error::last_os_error().raw_os_error().unwrap_or(0),
    }
}

/// Runs one probe if [`PROBE`] is set. Does nothing as a test.
#[test]
fn denied_call_probe() {
    let Ok(words) = std::env::var(PROBE) else {
        return;
    };
    let words: Vec<&str> = words.split('/').collect();
    let mode = Mode::WORDS.iter().find(|(word, _)| *word == words[0]);
    sandbox::begin(mode.expect("a mode").1, &Paths::default()).expect("a sandbox");
    let name = words[2].to_owned();
    let status = match words[1] {
        "worker" => std::thread::spawn(move || {
            sandbox::confine(Thread::Worker).expect("a confined thread");
            exit_status(&name)
        })
        .join()
        .expect("the probe's thread"),
        _ => exit_status(&name),
    };
    std::process::exit(status);
}

/// Result of a probe.
#[derive(Debug, PartialEq)]
enum Outcome {
    Done,
    Failed(i32),
    Killed,
}

use Outcome::{Done, Failed, Killed};

fn run(mode: &str, thread: &str, name: &str) -> Outcome {
    let status = Command::new(std::env::current_exe().expect("the path of this program"))
        .args(["--exact", "denied_call_probe", "--test-threads=1"])
        .env(PROBE, format!("{mode}/{thread}/{name}"))
        .stdout(Stdio::null())
        .status()
        .expect("a process");
    match (status.code(), status.signal()) {
        (Some(DONE), _) => Done,
        (Some(errno), _) => Failed(errno),
        (None, Some(libc::SIGSYS)) => Killed,
        _ => panic!("{name} in a {thread} with {mode}: {status}"),
    }
}

#[test]
fn workers_create_threads_and_no_namespaces() {
    for mode in ["threads", "enforce"] {
        for (name, expected) in [
            ("thread", Done),
            ("clone", Done),
            ("clone of a user namespace", Failed(libc::EPERM)),
            ("clone of two namespaces", Failed(libc::EPERM)),
            ("clone3", Failed(libc::ENOSYS)),
            ("mknod", Killed),
            ("iopl", Killed),
            ("getpid of x32", Killed),
        ] {
            assert_eq!(run(mode, "worker", name), expected, "{name} with {mode}");
        }
    }
}

#[test]
fn process_creates_no_namespaces_and_makes_no_x32_calls() {
    for (mode, is_fatal) in [("threads", false), ("enforce", true)] {
        let denied = || match is_fatal {
            true => Killed,
            false => Failed(libc::EPERM),
        };
        for (name, expected) in [
            ("thread", Done),
            ("clone", Done),
            ("clone of a user namespace", Failed(libc::EPERM)),
            ("clone of two namespaces", Failed(libc::EPERM)),
            ("clone3", Failed(libc::ENOSYS)),
            ("mknod", denied()),
            ("iopl", denied()),
            ("getpid of x32", denied()),
        ] {
            assert_eq!(run(mode, "process", name), expected, "{name} with {mode}");
        }
    }
}

#[test]
fn log_mode_carries_calls_out() {
    assert_eq!(run("log", "worker", "clone"), Done);
    // Results of the kernel: EFAULT, and an unknown number or a kernel with x32.
    assert_eq!(run("log", "worker", "mknod"), Failed(libc::EFAULT));
    assert_ne!(run("log", "worker", "getpid of x32"), Killed);
}

//! Permissions of confined worker and session threads. Each probe runs inside the thread, in a process of its own, because
//! a violation ends the process.
#![forbid(unsafe_code)]

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;

use reactor::{PollLimit, PollLimits, Pool, WorkerOptions};
use rustix::net::{AddressFamily, SocketType};
use rustix::process::{Pid, Signal};
use sandbox::{Mode, Paths, Thread};

/// Environment variable with the name of the probe; absent in the test itself.
const PROBE: &str = "LUNETTE_TEST_PROBE";
/// Exit status of a probe with a successful call.
const DONE: i32 = 20;
/// Exit status of a probe with a refused call.
const REFUSED: i32 = 21;
/// Linux, signal(7).
const SIGSYS: i32 = 31;

fn outcome<T, E>(result: Result<T, E>) -> i32 {
    match result {
        Ok(_) => DONE,
        Err(_) => REFUSED,
    }
}

/// Makes the named call and returns the exit status.
fn probe(name: &str) -> i32 {
    match name {
        "nothing" => DONE,
        "open" => outcome(std::fs::File::open("/etc/hostname")),
        "create" => outcome(std::fs::File::create("/tmp/lunette-probe")),
        "unlink" => outcome(std::fs::remove_file("/tmp/lunette-probe")),
        "kill" => {
            let parent = rustix::process::getppid().unwrap_or(Pid::INIT);
            outcome(rustix::process::kill_process(parent, Signal::CONT))
        }
        // The program replaces this process and exits with the status.
        "execute" => {
            let script = format!("exit {DONE}");
            outcome(Err::<(), _>(
                Command::new("sh").args(["-c", &script]).exec(),
            ))
        }
        "connect" => outcome(std::net::TcpStream::connect("127.0.0.1:9")),
        "socket" => outcome(rustix::net::socket(
            AddressFamily::UNIX,
            SocketType::STREAM,
            None,
        )),
        "ring" => outcome(uring::Ring::new(4)),
        other => panic!("there is no probe {other}"),
    }
}

fn run_in_worker(name: String) -> i32 {
    let pool = Pool::start(&WorkerOptions {
        count: 1,
        cpus: Vec::new(),
        poll: PollLimits {
            rings: PollLimit::Never,
            network: PollLimit::Never,
            disk: PollLimit::Never,
        },
    })
    .expect("a worker");
    let (sender, receiver) = channel();
    let worker = pool.workers().remove(0);
    worker.send(move |_| sender.send(probe(&name)).expect("the main thread listens"));
    receiver.recv().expect("the worker's word")
}

fn run_in_session(name: String) -> i32 {
    let thread = std::thread::spawn(move || {
        sandbox::confine(Thread::Session).expect("a confined thread");
        probe(&name)
    });
    thread.join().expect("the session's word")
}

/// Helper process of the other tests; not a test of its own.
#[test]
fn probe_process() {
    let Ok(words) = std::env::var(PROBE) else {
        return;
    };
    let mut words = words.split(' ').map(str::to_owned);
    let [mode, thread, name] = std::array::from_fn(|_| words.next().expect("three words"));
    let mode = Mode::WORDS.into_iter().find(|(word, _)| *word == mode);
    // The process may read /etc, so that a refusal comes from the thread's confinement.
    let paths = Paths {
        read: vec!["/etc".into(), "/proc".into()],
        ..Paths::default()
    };
    sandbox::begin(mode.expect("a mode").1, &paths).expect("a sandbox");
    let exit_status = match thread.as_str() {
        "worker" => run_in_worker(name),
        "session" => run_in_session(name),
        _ => probe(&name),
    };
    std::process::exit(exit_status);
}

fn run(mode: &str, thread: &str, name: &str) -> ExitStatus {
    let program = std::env::current_exe().expect("this program's path");
    Command::new(program)
        .args([
            "--exact",
            "probe_process",
            "--test-threads=1",
            "--nocapture",
        ])
        .env(PROBE, format!("{mode} {thread} {name}"))
        .stdout(Stdio::null())
        .status()
        .expect("a process")
}

/// Names the result. The main thread of the test program does not run the test, so `process` probes run on the confined
/// thread.
fn came_to(status: ExitStatus) -> &'static str {
    match (status.code(), status.signal()) {
        (Some(DONE), None) => "done",
        (Some(REFUSED), None) => "refused",
        (None, Some(SIGSYS)) => "killed",
        _ => "something else",
    }
}

#[test]
fn confined_threads_open_no_path() {
    let threads = [
        ("threads", "worker"),
        ("enforce", "worker"),
        ("enforce", "session"),
    ];
    for (mode, thread) in threads {
        for (name, expected) in [
            ("nothing", "done"),
            ("open", "refused"),
            ("create", "refused"),
            ("unlink", "killed"),
            ("kill", "killed"),
            ("execute", "killed"),
            ("connect", "killed"),
            ("socket", "killed"),
            ("ring", "killed"),
        ] {
            let status = run(mode, thread, name);
            assert_eq!(
                came_to(status),
                expected,
                "{name} in a {thread} with {mode}: {status}"
            );
        }
    }
}

#[test]
fn confined_process_reads_allowed_paths_and_executes_nothing() {
    for (name, expected) in [
        ("open", "done"),
        ("create", "refused"),
        ("unlink", "refused"),
        ("kill", "killed"),
        ("execute", "killed"),
        ("ring", "done"),
    ] {
        let status = run("enforce", "process", name);
        assert_eq!(came_to(status), expected, "{name}: {status}");
    }
}

#[test]
fn process_fails_to_execute_and_reaches_files_with_threads_confined() {
    for (name, expected) in [
        ("open", "done"),
        ("create", "done"),
        ("unlink", "done"),
        ("kill", "refused"),
        ("execute", "refused"),
        ("ring", "done"),
    ] {
        let status = run("threads", "process", name);
        assert_eq!(came_to(status), expected, "{name}: {status}");
    }
}

#[test]
fn violations_are_carried_out_in_the_other_modes() {
    for mode in ["off", "log"] {
        for name in ["open", "socket", "execute", "ring"] {
            let status = run(mode, "worker", name);
            assert_eq!(came_to(status), "done", "{name} with {mode}: {status}");
        }
    }
}

//! `lunette vm run` and related commands as installed programs: use of a guest, and clean-up after every kind of end.
#![forbid(unsafe_code)]

use end_to_end::user_guests::kill_hard;
use end_to_end::{Context, Daemon, DaemonBuilder, Result, Scratch, UserGuests, ensure};
use rustix::process::{Pid, Signal};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use vm::running::Phase;

/// Larger than any window or buffer on the path.
const MUCH: usize = 10_000_000;

/// Returns pseudo-random bytes without repeated parts.
fn bytes(count: usize) -> Vec<u8> {
    let words = (0..count as u64 / 8 + 1).map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    bytes.truncate(count);
    bytes
}

fn create_image(path: &Path) -> Result<()> {
    let program = vm::lunette_program(vm::Profile::Dev)?;
    let mut create = Command::new(program);
    create.args(["image", "create"]).arg(path).arg("16M");
    ensure!(create.status()?.success(), "no image");
    Ok(())
}

/// Starts a daemon with two files and a qcow2 image that another one can serve in turns.
fn shared_daemon(scratch: &Scratch, guests: &UserGuests) -> Result<Daemon> {
    let mut daemon = DaemonBuilder::new(scratch).arguments([guests.sandbox_path().as_str()]);
    for (name, kind) in [("d0", "file"), ("d1", "image"), ("d2", "file")] {
        let file = guests.file(name);
        match file.exists() {
            true => {}
            false if kind == "image" => create_image(&file)?,
            false => std::fs::write(&file, vec![0; 16 << 20])?,
        }
        let file = file.display();
        daemon = daemon.disk(&format!("{name}={kind}:{file},lock=while-active"));
    }
    daemon.start()
}

#[test]
fn detached_guests_take_commands_and_files() -> Result<()> {
    let guests = UserGuests::new()?;
    let run = |name: &str, more: &[&str]| {
        let size = ["--smp", "1", "--memory", "192M"];
        let started = guests.ok(&[&["run", "--detach", "--name", name][..], &size, more].concat());
        planned_as_run(&guests, name, &[&size, more].concat())?;
        started
    };
    let disks = ["scsi:2x1", "blk:1,queues=1", "backing=ram:16M"];
    ensure!(run("one", &disks)?.trim() == "one");
    let taken = guests.refused(&["run", "--name", "one", "blk:1"])?;
    ensure!(
        taken.contains("a guest named one is already running")
            && taken.contains("lunette vm stop one"),
        "{taken}"
    );
    let scratches = [Scratch::new()?, Scratch::new()?];
    let first = shared_daemon(&scratches[0], &guests)?;
    let mut second = shared_daemon(&scratches[1], &guests)?;
    let socket = first.control().display().to_string();
    let mut words = "--net user --mac 52:54:00:aa:bb:cc --control"
        .split(' ')
        .collect::<Vec<_>>();
    words.push(&socket);
    words.extend([
        "scsi:2x1,backing=daemon:d0+d1",
        "blk:1,queues=1,backing=daemon:d2",
    ]);
    run("two", &words)?;
    let list = guests.ok(&["list"])?;
    for name in ["one", "two"] {
        let line = list
            .lines()
            .find(|line| line.starts_with(name))
            .context("not listed")?;
        ensure!(
            ["running", "scsi:2x1", " blk:1"]
                .iter()
                .all(|word| line.contains(word)),
            "{list}"
        );
    }
    commands(&guests)?;
    files(&guests)?;

    let block = guests.ok(&["monitor", "two", "info", "status"])?;
    ensure!(block.contains("running"), "{block}");
    let network = guests.ok(&[
        "exec",
        "two",
        "ip -4 address show eth0; cat /sys/class/net/eth0/address",
    ])?;
    ensure!(
        network.contains("10.0.2.15/24") && network.contains("52:54:00:aa:bb:cc"),
        "{network}"
    );
    guests.ok(&["exec", "one", "touch /tmp/before"])?;
    guests.ok(&["reboot", "one"])?;
    let gone = guests.vm(&["exec", "one", "test -e /tmp/before"])?;
    ensure!(gone.status.code() == Some(1), "{gone:?}");
    guests.ok(&["stop", "one"])?;
    ensure!(guests.state("one").is_none() && guests.state("two").is_some());
    let stopped = guests.refused(&["exec", "one", "true"])?;
    ensure!(
        stopped.contains("there is no guest one; running: two"),
        "{stopped}"
    );
    migrations(&guests, &first, &mut second)?;
    guests.ok(&["kill", "two"])?;
    for daemon in [first, second] {
        let exports = daemon.lunette(&["export", "list"])?;
        ensure!(!exports.contains("vhost"), "{exports}");
    }
    guests.nothing_is_left()
}

/// Clears the reservation of [`reserve`].
const CLEAR: &str = "sg_persist -n -o -C -K 0x7 /dev/sda";
const WRITE: &str = "dd if=/dev/zero of=/dev/sda bs=4k count=1 oflag=direct";

const RESERVE: &str =
    "sg_persist -n -o -G -S 0x7 /dev/sda && sg_persist -n -o -R -K 0x7 -T 3 /dev/sda";

/// Reserves a disk for the guest alone. The kernel has repeated the command after the unit attention of a migration.
fn reserve(guests: &UserGuests) -> Result<()> {
    guests.ok(&["exec", "two", &format!("{WRITE} && {RESERVE}")])?;
    Ok(())
}

/// Moves a guest under a verifying load, which is itself a command in the guest: to another daemon, to a second QEMU there, and back. A
/// cancelled move has left exports in the other daemon, and a user has removed one of them.
fn migrations(guests: &UserGuests, first: &Daemon, second: &mut Daemon) -> Result<()> {
    guests.ok(&["plug", "two", "scsi", "plugged=ram:1M"])?;
    let refused = guests.refused(&["migrate", "two"])?;
    ensure!(
        refused.contains("hint: lunette vm unplug two plugged"),
        "{refused}"
    );
    guests.ok(&["unplug", "two", "plugged"])?;
    // The limit is exceeded at once. The guest is paused, and stays so.
    guests.ok(&["monitor", "two", "stop"])?;
    let cancelled = guests.refused(&["migrate", "two", "--within", "0"])?;
    ensure!(
        cancelled.contains("guest two continues")
            && cancelled.contains("hint: set a longer --within"),
        "{cancelled}"
    );
    guests.ok(&["monitor", "two", "cont"])?;
    let load = "guest-agent soak --file /dev/vda --seed 7 --depth 4 --while /tmp/load";
    let load = guests
        .command(&["exec", "two", load])
        .stdout(Stdio::piped())
        .spawn()?;
    wait_for(|| {
        let begun = guests.vm(&["exec", "two", "test -e /tmp/load"])?;
        Ok(begun.status.success())
    })?;
    fails_to_move(guests, second)?;
    keeps_a_new_reservation(guests, first, second)?;
    let [first, second] = [first, &*second].map(|daemon| daemon.control().display().to_string());
    reserve(guests)?;
    let refused = guests.refused(&["migrate", "two", "--to-daemon", &second])?;
    ensure!(refused.contains("has persistent reservations"), "{refused}");
    guests.ok(&["exec", "two", CLEAR])?;
    let moves: [(&str, &[&str]); 2] = [("", &["--to-daemon", &second]), (".2", &[])];
    for (suffix, more) in moves {
        let is_same_daemon = more.is_empty();
        if is_same_daemon {
            reserve(guests)?;
        }
        let words = [&["migrate", "two", "--json"][..], more].concat();
        let result: Value = serde_json::from_str(&guests.ok(&words)?)?;
        println!("{result}");
        ensure!(result["downtime_ms"].is_u64(), "{result}");
        let queues = result["queues"].as_array().context("queues")?;
        ensure!(queues.len() == 2, "{result}");
        for queue in queues {
            let name = queue["export"].as_str().context("export")?;
            ensure!(name.ends_with(".2") != suffix.is_empty(), "{result}");
            let stops = queue["stops_ns"].as_array().context("stops")?;
            ensure!(!stops.is_empty(), "{result}");
        }
        ensure!(guests.ok(&["exec", "two", "echo here"])?.trim() == "here");
        if is_same_daemon {
            guests.ok(&["exec", "two", WRITE])?;
            guests.ok(&["exec", "two", CLEAR])?;
        }
    }
    let control = guests.state("two").and_then(|state| state.control);
    ensure!(
        control.as_deref() == Some(Path::new(&second)),
        "{control:?}"
    );
    guests.ok(&["exec", "two", "rm /tmp/load"])?;
    let load = load.wait_with_output()?;
    let report = String::from_utf8_lossy(&load.stdout);
    ensure!(
        load.status.success() && report.contains("\"mismatches\":0"),
        "{report}"
    );
    let back = ["--to-daemon", &first, "--downtime-limit", "50"];
    let printed = guests.ok(&[&["migrate", "two"][..], &back].concat())?;
    ensure!(
        printed.contains("downtime: ") && printed.contains("queue stops of "),
        "{printed}"
    );
    let state = guests.ok(&["monitor", "two", "info", "status"])?;
    ensure!(state.contains("running"), "{state}");
    Ok(())
}

/// Interrupts a migration, and kills the other daemon during another one. A user removes an export that is left over.
fn fails_to_move(guests: &UserGuests, second: &mut Daemon) -> Result<()> {
    let ended = unfinished_migration(guests, second, |client, _| {
        let migration = guests.ok(&["monitor", "two", "info", "migrate"])?;
        ensure!(migration.contains("active"), "{migration}");
        rustix::process::kill_process(Pid::from_child(client), Signal::TERM)?;
        Ok(())
    })?;
    ensure!(ended.is_empty(), "{ended}");
    let ended = unfinished_migration(guests, second, |_, second| second.kill())?;
    ensure!(
        ended.contains("the destination's daemon does not respond")
            && ended.contains("guest two continues"),
        "{ended}"
    );
    second.start_again()?;
    let status: Value = serde_json::from_str(&second.lunette(&["status", "--json"])?)?;
    let left_over = status["exports"].as_array().into_iter().flatten();
    let mut names = left_over.filter_map(|export| export["name"].as_str());
    let name = names
        .find(|name| name.ends_with(".2"))
        .context("no export is left over")?;
    second.lunette(&["export", "remove", name])?;
    Ok(())
}

/// The guest reserves a disk while its memory is copied. The migration fails, because the reservation would be lost.
fn keeps_a_new_reservation(guests: &UserGuests, first: &Daemon, second: &mut Daemon) -> Result<()> {
    // Commands that begin during a long migration are refused.
    let reserve = format!(
        "touch /tmp/waits; until [ $(cat /sys/block/vda/size) = 65536 ]; do sleep 0.1; done; {RESERVE}"
    );
    let mut reserving = guests.start(&["exec", "two", &reserve])?;
    wait_for(|| {
        let started = guests.vm(&["exec", "two", "test -e /tmp/waits"])?;
        Ok(started.status.success())
    })?;
    let mut monitor = None;
    let ended = unfinished_migration(guests, second, |_, _| {
        first.lunette(&["disk", "resize", "d2", "32M"])?;
        wait_for(|| {
            let show = |disk| first.lunette(&["disk", "show", disk, "--json"]);
            Ok([show("d0")?, show("d1")?].concat().contains("reservations"))
        })?;
        // The supervisor uses the other monitor.
        let mut human = UnixStream::connect(guests.folder("two").join("monitor.sock"))?;
        writeln!(human, "migrate_set_parameter max-bandwidth 4096M")?;
        monitor = Some(human);
        Ok(())
    })?;
    ensure!(
        ended.contains("guest two continues") && ended.contains("has persistent reservations"),
        "{ended}"
    );
    drop(monitor);
    ensure!(reserving.wait()?.success());
    guests.ok(&["exec", "two", &format!("{WRITE} && {CLEAR}")])?;
    Ok(())
}

/// Ends a migration to another daemon with `end` while memory is copied. The guest continues in its daemon. Returns the error.
fn unfinished_migration(
    guests: &UserGuests,
    second: &mut Daemon,
    end: impl FnOnce(&Child, &mut Daemon) -> Result<()>,
) -> Result<String> {
    let control = second.control().display().to_string();
    // The copy takes longer than the end.
    let words = [
        "migrate",
        "two",
        "--bandwidth",
        "1",
        "--to-daemon",
        &control,
    ];
    let mut client = guests
        .command(&words)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut stderr = BufReader::new(client.stderr.take().context("no pipe")?);
    let mut line = String::new();
    while !line.contains(" remaining") {
        line.clear();
        ensure!(stderr.read_line(&mut line)? > 0, "no progress");
    }
    end(&client, second)?;
    let mut rest = String::new();
    stderr.read_to_string(&mut rest)?;
    ensure!(!client.wait()?.success(), "{rest}");
    wait_for(|| {
        Ok(guests
            .ok(&["monitor", "two", "info", "migrate"])?
            .contains("cancelled"))
    })?;
    wait_for(|| {
        Ok(guests
            .ok(&["monitor", "two", "info", "status"])?
            .contains("running"))
    })?;
    let lines = rest.lines().filter(|line| !line.contains(" remaining"));
    Ok(lines.collect::<Vec<_>>().join("\n"))
}

/// Checks exit codes, separate output streams, large data, and the clean-up of a command whose exec was killed.
fn commands(guests: &UserGuests) -> Result<()> {
    let failing = guests.vm(&["exec", "one", "echo out; echo err >&2; exit 7"])?;
    ensure!(
        failing.status.code() == Some(7)
            && failing.stdout == b"out\n"
            && failing.stderr == b"err\n",
        "{failing:?}"
    );
    let killed = guests.vm(&["exec", "one", "kill -9 $$"])?;
    ensure!(killed.status.code() == Some(137), "{killed:?}");
    let words = guests.vm(&["exec", "one", "echo", "a  b", "it's", "$HOME"])?;
    ensure!(words.stdout == b"a  b it's $HOME\n", "{words:?}");
    let disks = guests.ok(&["exec", "one", "ls /sys/block"])?;
    ensure!(
        disks.split_whitespace().eq(["sda", "sdb", "vda"]),
        "{disks}"
    );

    let much = bytes(MUCH);
    let echoed = guests.with_input(&["exec", "one", "cat; echo done >&2"], &much)?;
    ensure!(
        echoed.status.success() && echoed.stderr == b"done\n",
        "{:?}",
        echoed.status
    );
    ensure!(
        echoed.stdout == much,
        "{} of {MUCH} bytes came back",
        echoed.stdout.len()
    );

    let sleeps = || guests.ok(&["exec", "one", "ps | grep '[s]leep 4242' | wc -l"]);
    let start = || -> Result<Child> {
        let sleeping = guests.start(&["exec", "one", "exec sleep 4242"])?;
        wait_for(|| Ok(sleeps()?.trim() == "1"))?;
        Ok(sleeping)
    };
    kill_hard(&mut start()?)?;
    wait_for(|| Ok(sleeps()?.trim() == "0"))?;
    // The first Ctrl-C ends the command, which is a child of a background process of the guest's init.
    let mut sleeping = start()?;
    let pid = rustix::process::Pid::from_child(&sleeping);
    rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
    let ended = sleeping.wait()?;
    ensure!(ended.code() == Some(130), "{ended}");
    ensure!(sleeps()?.trim() == "0", "the command continues");
    Ok(())
}

/// Compares the command line of `vm plan` with that of the QEMU that `vm run` started with the same words.
fn planned_as_run(guests: &UserGuests, name: &str, words: &[&str]) -> Result<()> {
    let plan = ["plan", "--as-run", "--format", "json", "--name", name];
    let plan: Value = serde_json::from_str(&guests.ok(&[&plan[..], words].concat())?)?;
    let planned = plan["qemu"].as_array().context("no command line")?;
    let planned: Vec<&str> = planned.iter().filter_map(Value::as_str).collect();
    let state = guests.state(name).context("no guest")?;
    let id = state.qemu.context("no QEMU")?;
    let running = std::fs::read(format!("/proc/{id}/cmdline"))?;
    let running = String::from_utf8(running)?;
    let running: Vec<&str> = running.trim_end_matches('\0').split('\0').collect();
    ensure!(
        running[0].ends_with(planned[0]) && running[1..] == planned[1..],
        "planned {planned:?}, running {running:?}"
    );
    Ok(())
}

fn files(guests: &UserGuests) -> Result<()> {
    let (first, back) = (guests.file("first"), guests.file("back"));
    std::fs::write(&first, bytes(MUCH))?;
    let text = |path: &Path| path.display().to_string();
    guests.ok(&["copy", "two", &text(&first), ":/tmp/"])?;
    let sum = guests.ok(&["exec", "two", "sha256sum < /tmp/first; ls /tmp"])?;
    let host = Command::new("sha256sum")
        .stdin(std::fs::File::open(&first)?)
        .output()?;
    let host = String::from_utf8(host.stdout)?;
    // Only the complete file exists, no temporary file.
    ensure!(sum == format!("{host}first\n"), "{sum} instead of {host}");
    guests.ok(&["copy", "two", ":/tmp/first", &text(&back)])?;
    ensure!(
        std::fs::read(&back)? == std::fs::read(&first)?,
        "the copy differs"
    );
    let missing = guests.refused(&["copy", "two", ":/tmp/nothing", &text(&back)])?;
    ensure!(
        missing.contains("/tmp/nothing") && missing.contains("No such file"),
        "{missing}"
    );
    Ok(())
}

fn wait_for(mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
    for _ in 0..600 {
        if condition()? {
            return Ok(());
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    anyhow::bail!("it has not come so far")
}

#[test]
fn killed_supervisor_leaves_no_part_of_its_guest() -> Result<()> {
    let guests = UserGuests::new()?;
    let start = |name: &str, more: &[&str]| {
        let words = [
            "run",
            "--name",
            name,
            "--smp",
            "1",
            "--memory",
            "128M",
            "blk:1",
            "backing=ram:8M",
        ];
        guests.start(&[&words[..], more].concat())
    };
    let end = |mut child: Child| -> Result<()> {
        kill_hard(&mut child)?;
        guests.nothing_is_left()
    };

    guests.wrap_daemon("sleep 30; exec $REAL \"$@\"")?;
    let child = start("daemon", &[])?;
    guests.wait_for("daemon", |state| state.daemon)?;
    end(child)?;

    guests.wrap_daemon("exec $REAL \"$@\"")?;
    guests.wrap_qemu("case $* in *-name*) sleep 30;; esac; exec $REAL \"$@\"")?;
    let child = start("qemu", &[])?;
    let control = guests.folder("qemu").join("control.sock");
    guests.wait_for("qemu", |_| control.exists().then_some(()))?;
    end(child)?;

    // QEMU does not end on request, because this shell ignores the signal.
    guests.wrap_qemu("trap '' TERM; $REAL \"$@\"")?;
    let is = |phase: Phase| move |state: &vm::running::State| (state.phase == phase).then_some(());
    let child = start("booting", &[])?;
    guests.wait_for("booting", is(Phase::Booting))?;
    end(child)?;

    let child = start("running", &[])?;
    guests.wait_for("running", is(Phase::Running))?;
    terminate(&child);
    guests.wait_for("running", is(Phase::Stopping))?;
    end(child)?;

    // Objects that the guest added to a running daemon are removed, and no others.
    let scratch = Scratch::new()?;
    let daemon = DaemonBuilder::new(&scratch)
        .disk("own=ram:8M")
        .arguments([guests.sandbox_path().as_str()])
        .start()?;
    let control = daemon.control().display().to_string();
    let child = start(
        "added",
        &["blk:1,backing=daemon:own", "--control", &control],
    )?;
    guests.wait_for("added", is(Phase::Booting))?;
    let names = |kind: &str| daemon.lunette(&[kind, "list"]);
    ensure!(names("export")?.contains("own") && names("disk")?.contains("8M"));
    end(child)?;
    let (exports, disks) = (names("export")?, names("disk")?);
    ensure!(
        !exports.contains("vhost") && disks.contains("own"),
        "{exports}{disks}"
    );
    ensure!(
        disks.lines().filter(|line| line.contains("ram")).count() == 1,
        "{disks}"
    );

    // In the background: kills first the waiting command, then the guest's supervisor.
    let child = start("detached", &["--detach"])?;
    guests.wait_for("detached", is(Phase::Booting))?;
    end(child)?;
    let mut child = start("detached", &["--detach"])?;
    let supervisor = guests.wait_for("detached", |state| {
        (state.phase == Phase::Running).then_some(state.supervisor)
    })?;
    child.wait()?;
    vm::running::terminate(supervisor, true);
    guests.nothing_is_left()
}

/// Sends SIGTERM.
fn terminate(child: &Child) {
    vm::running::terminate(child.id(), false);
}

/// Returns a kernel in the format for boot loaders (Linux, Documentation/arch/x86/boot.rst) that prints "stuck" on the serial port
/// and halts.
fn kernel_that_hangs() -> Vec<u8> {
    const SETUP: usize = 0x200;
    const CODE: usize = 0x26c;
    let mut image = vec![0; 0x8000];
    // setup_sects, boot_flag
    image[0x1f1] = 4;
    image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    // jmp CODE
    image[SETUP..SETUP + 2].copy_from_slice(&[0xeb, (CODE - SETUP - 2) as u8]);
    image[0x202..0x206].copy_from_slice(b"HdrS");
    // version 2.2, loadflags: LOADED_HIGH
    image[0x206..0x208].copy_from_slice(&[0x02, 0x02]);
    image[0x211] = 1;
    let mut code = vec![0xba, 0xf8, 0x03]; // mov dx, 0x3f8
    for letter in b"stuck\n" {
        code.extend([0xb0, *letter, 0xee]); // mov al, LETTER; out dx, al
    }
    code.extend([0xf4, 0xeb, 0xfd]); // hlt; jmp to it
    image[CODE..CODE + code.len()].copy_from_slice(&code);
    image
}

#[test]
fn failed_guest_start_prints_its_console() -> Result<()> {
    let guests = UserGuests::new()?;
    let kernel = guests.file("stuck");
    std::fs::write(&kernel, kernel_that_hangs())?;
    let kernel = kernel.display().to_string();
    let words = [
        "run",
        "--name",
        "stuck",
        "blk:1",
        "backing=ram:8M",
        "--kernel",
        &kernel,
        "--boot-limit",
        "6",
    ];
    for detached in [false, true] {
        let mut words = words.to_vec();
        words.extend(detached.then_some("--detach"));
        let complaint = guests.refused(&words)?;
        for part in [
            "did not boot within 6 s",
            "stuck\n",
            "hint: --kernel alone needs built-in virtio drivers",
        ] {
            ensure!(complaint.contains(part), "no {part:?} in: {complaint}");
        }
        guests.nothing_is_left()?;
    }
    // QEMU refuses its command line.
    let refused = guests.refused(&["run", "blk:1", "backing=ram:8M", "--qemu-arg=-nonsense"])?;
    ensure!(refused.contains("nonsense: invalid option"), "{refused}");
    guests.nothing_is_left()
}

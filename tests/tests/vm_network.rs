//! Guests on a bridge: `lunette vm run` creates tap devices without a helper, in the test's own network namespace.
#![forbid(unsafe_code)]

use end_to_end::{Context, Result, Rig, Scratch, UserGuests, bail, ensure};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use vm::{Process, tool, wait_until};

/// A network namespace with a bridge. It ends with its process.
struct Namespace {
    holder: Process,
    _scratch: Scratch,
}

impl Namespace {
    fn new() -> Result<Namespace> {
        ensure!(
            Path::new("/dev/net/tun").exists(),
            "there is no /dev/net/tun for tap devices\nhint: modprobe tun, or pass the device node into the container"
        );
        ensure!(
            rustix::process::geteuid().is_root(),
            "a network namespace and tap devices need CAP_SYS_ADMIN and CAP_NET_ADMIN\nhint: run the tests as root"
        );
        let scratch = Scratch::new()?;
        let mut command = Command::new(tool("unshare")?);
        command.args(["--net", "sleep", "3600"]);
        let holder = Process::start("a network namespace", &command, &scratch.file("holder.log"))?;
        let namespace = Namespace {
            holder,
            _scratch: scratch,
        };
        let own = std::fs::read_link("/proc/self/ns/net")?;
        let link = format!("/proc/{}/ns/net", namespace.holder.id());
        let is_made = || {
            let found = std::fs::read_link(&link).ok()?;
            (found != own).then_some(())
        };
        wait_until(Duration::from_secs(30), is_made).context("no namespace")?;
        namespace.ip("link add br0 type bridge")?;
        namespace.ip("link set lo up")?;
        namespace.ip("link set br0 up")?;
        namespace.ip("address add 10.9.0.1/24 dev br0")?;
        Ok(namespace)
    }

    /// Returns the command prefix that runs a program in this namespace.
    fn words(&self) -> Result<[String; 3]> {
        Ok([
            tool("nsenter")?.display().to_string(),
            format!("--net=/proc/{}/ns/net", self.holder.id()),
            "--".to_owned(),
        ])
    }

    fn ip(&self, words: &str) -> Result<String> {
        let [program, net, end] = self.words()?;
        let output = Command::new(program)
            .args([net, end])
            .arg(tool("busybox")?)
            .arg("ip")
            .args(words.split(' '))
            .output()?;
        ensure!(
            output.status.success(),
            "ip {words}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Runs `lunette vm WORDS` in this namespace.
    fn vm(&self, guests: &UserGuests, words: &[&str]) -> Result<(bool, String)> {
        let command = guests.command(words);
        let [program, net, end] = self.words()?;
        let mut here = Command::new(program);
        here.args([net, end])
            .arg(command.get_program())
            .args(command.get_args())
            .stdin(Stdio::null());
        for (key, value) in command.get_envs() {
            here.env(key, value.context("a variable that is to be removed")?);
        }
        let output = here.output()?;
        Ok((
            output.status.success(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        ))
    }
}

const TARGET: &str = "iqn.2026-11.org.example:bridge";

#[test]
fn two_guests_on_a_bridge_reach_each_other_and_a_target() -> Result<()> {
    let namespace = Namespace::new()?;
    let words = namespace.words()?;
    let rig = Rig::prepared(|scratch, builder| {
        let file = scratch.file("target.toml");
        let text = format!(
            "[[disk]]\nname = \"m\"\nbackend = \"ram\"\nsize = \"16M\"\n\n\
             [[iscsi]]\nname = \"{TARGET}\"\nportals = [\"10.9.0.1:3260\"]\ndemo_mode = \"rw\"\ndisks = [\"m\"]\n"
        );
        std::fs::write(&file, text)?;
        let words = words.each_ref().map(String::as_str);
        let file = file.display().to_string();
        Ok(builder.under(&words).arguments(["--config", &file]))
    })?;
    let guests = UserGuests::new()?;
    let run = |name: &str, net: &str| {
        let words = [
            "run",
            "--detach",
            "--name",
            name,
            "--smp",
            "2",
            "--memory",
            "384M",
            "--net",
            net,
            "blk:1",
            "backing=ram:8M",
        ];
        namespace.vm(&guests, &words)
    };
    let (is_up, log) = run(
        "one",
        "tap,bridge=br0,vhost=on,queues=2,address=10.9.0.2/24",
    )?;
    ensure!(is_up, "{log}");
    let has_vhost = Path::new("/dev/vhost-net").exists();
    ensure!(
        log.contains("there is no /dev/vhost-net") != has_vhost,
        "{log}"
    );
    let net = "tap,bridge=br0,mac=52:54:00:aa:bb:02,address=10.9.0.3/24";
    let (is_up, log) = run("two", net)?;
    ensure!(is_up, "{log}");
    let links = namespace.ip("link show")?;
    ensure!(
        links.contains("lunette0") && links.contains("lunette1"),
        "{links}"
    );
    for (name, other) in [
        ("one", "10.9.0.3"),
        ("two", "10.9.0.2"),
        ("two", "10.9.0.1"),
    ] {
        guests.ok(&["exec", name, &format!("ping -c 2 -W 20 {other}")])?;
    }
    let card = guests.ok(&[
        "exec",
        "one",
        "ls -d /sys/class/net/eth0/queues/rx-* | wc -l",
    ])?;
    ensure!(card.trim() == "2", "{card} queues");
    let card = guests.ok(&["exec", "two", "cat /sys/class/net/eth0/address"])?;
    ensure!(card.trim() == "52:54:00:aa:bb:02", "{card}");
    iscsi_session(&guests, "one")?;
    let reads = rig.daemon.lunette(&["session", "list"]);
    reads.context("the target has gone")?;

    for name in ["one", "two"] {
        guests.ok(&["stop", name])?;
    }
    guests.nothing_is_left()?;
    let links = namespace.ip("link show")?;
    ensure!(!links.contains("lunette"), "{links}");
    Ok(())
}

/// The command line initiator writes and compares a unit from inside the guest.
fn iscsi_session(guests: &UserGuests, name: &str) -> Result<()> {
    let lab = guests.command(&[]).get_program().to_owned();
    let stripped = guests.file("lab");
    let output = Command::new(tool("strip")?)
        .arg("-o")
        .arg(&stripped)
        .arg(&lab)
        .output()?;
    ensure!(output.status.success(), "strip: {output:?}");
    let libraries = Command::new("ldd").arg(&lab).output()?;
    let libraries = String::from_utf8(libraries.stdout)?;
    let libraries = libraries
        .split_whitespace()
        .filter(|word| word.starts_with('/') && !word.contains("ld-linux"));
    for library in libraries {
        guests.ok(&["copy", name, library, ":/tmp/"])?;
    }
    guests.ok(&["copy", name, &stripped.display().to_string(), ":/tmp/lab"])?;
    let unit = format!("iscsi://10.9.0.1/{TARGET}/0");
    let script = format!(
        "export LD_LIBRARY_PATH=/tmp; chmod +x /tmp/lab; head -c 16777216 /dev/urandom > /tmp/content; \
         /tmp/lab iscsi copy /tmp/content {unit} --connections 2 && /tmp/lab iscsi verify /tmp/content {unit}"
    );
    let output = guests.vm(&["exec", name, &script])?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

#[test]
fn missing_tap_requirement_is_named_with_an_alternative() -> Result<()> {
    let namespace = Namespace::new()?;
    let guests = UserGuests::new()?;
    let net = "tap,bridge=br7";
    let (is_up, log) = namespace.vm(&guests, &["run", "--net", net, "blk:1"])?;
    ensure!(
        !is_up && log.contains("there is no interface br7; hint: ip link add br7 type bridge"),
        "{log}"
    );
    let (is_up, log) = namespace.vm(&guests, &["run", "--net", "tap,bridge=lo", "blk:1"])?;
    ensure!(
        !is_up && log.contains("cannot join lunette0 to lo"),
        "{log}"
    );
    // Runs without CAP_NET_ADMIN, like an ordinary user.
    let command = guests.command(&["run", "--net", "tap", "blk:1"]);
    let mut bounded = Command::new(tool("setpriv")?);
    bounded
        .args(["--bounding-set", "-net_admin", "--"])
        .arg(command.get_program())
        .args(command.get_args());
    for (key, value) in command.get_envs() {
        bounded.env(key, value.context("a variable that is to be removed")?);
    }
    let output = bounded.output()?;
    let log = String::from_utf8_lossy(&output.stderr);
    ensure!(
        !output.status.success()
            && log.contains("lacks the capability CAP_NET_ADMIN")
            && log.contains("--net user"),
        "{log}"
    );
    let links = namespace.ip("link show")?;
    ensure!(!links.contains("lunette"), "{links}");
    guests.nothing_is_left()
}

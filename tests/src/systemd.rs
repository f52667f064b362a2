//! A host with systemd: a service manager as process 1 of its own namespaces, on a temporary Debian. Needs root, mmdebstrap and util-linux.

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use crate::Scratch;
use anyhow::{Context, Result, bail, ensure};
use vm::wait_until;

const BOOT_LIMIT: Duration = Duration::from_secs(60);
/// Time limit of a command in seconds. A hanging command must fail the test, not block it.
const COMMAND_LIMIT: &str = "90";

/// Packages of a host, besides apt.
const DEBIAN_PACKAGES: &str = "systemd,systemd-sysv,adduser";

/// Boot script. Arguments: folder to use, cgroup name, root file system to copy. The script enters the cgroup before the cgroup namespace
/// is created, so that systemd creates its own cgroups below it.
const BOOT: &str = r#"
set -eu
cgroups=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/self/mounts)
[ -n "$cgroups" ] || { echo "no cgroup2 is mounted" >&2; exit 1; }
mkdir -p "$cgroups/$2"
echo $$ > "$cgroups/$2/cgroup.procs"
exec unshare --mount --pid --uts --ipc --cgroup --net --fork --kill-child sh -euc '
mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=$2,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 none sys/fs/cgroup
for folder in run tmp dev; do mount -t tmpfs none $folder; done
for node in null:3 zero:5 full:7 random:8 urandom:9; do mknod -m 666 "dev/${node%:*}" c 1 "${node#*:}"; done
mkdir dev/shm dev/pts
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
systemd-id128 new > etc/machine-id
rm -f usr/sbin/policy-rc.d
ip link set lo up || true
exec env container=test chroot . /lib/systemd/systemd --system --log-target=journal --unit=basic.target
' sh "$1" "$3"
"#;

/// Kills all processes in the cgroup and removes it.
const CLEAN: &str = r#"
cgroups=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/self/mounts)
[ -d "$cgroups/$1" ] || exit 0
echo 1 > "$cgroups/$1/cgroup.kill"
for try in $(seq 50); do
    find "$cgroups/$1" -depth -type d -exec rmdir {} + 2>/dev/null && exit 0
    sleep 0.1
done
echo "$cgroups/$1 cannot be removed" >&2
exit 1
"#;

/// A host that runs systemd.
pub struct SystemdHost {
    booted: Child,
    /// Process ID of its init, in the namespace of this process.
    init: u32,
    group: String,
}

fn as_root(program: &str) -> Result<Command> {
    if rustix::process::geteuid().is_root() {
        return Ok(Command::new(program));
    }
    let may = Command::new("sudo").args(["-n", "true"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        bail!("only root can boot systemd; hint: run the tests as root, or `sudo -v` before them");
    }
    let mut command = Command::new("sudo");
    command.args(["-n", "--", program]);
    Ok(command)
}

/// Root file system of a small Debian. Its files belong to root, so root must remove them.
pub struct DebianRoot(PathBuf);

impl Drop for DebianRoot {
    fn drop(&mut self) {
        let removed = as_root("rm").and_then(|mut command| {
            let status = command.arg("-rf").arg(&self.0).status()?;
            ensure!(status.success(), "{status}");
            Ok(())
        });
        if let Err(error) = removed {
            eprintln!("{} stays: {error}", self.0.display());
        }
    }
}

/// Creates a small Debian of a release from that release's packages.
///
/// # Errors
/// Fails if mmdebstrap is missing or cannot get the packages.
pub fn debian(release: &str, scratch: &Scratch) -> Result<DebianRoot> {
    let root = DebianRoot(scratch.file(release));
    let mut command = as_root("mmdebstrap")?;
    command.args(["--mode=root", "--variant=apt", "--quiet"]);
    command.arg(format!("--include={DEBIAN_PACKAGES}"));
    let made = command.arg(release).arg(&root.0).output();
    let made = made.context("cannot run mmdebstrap; hint: apt-get install mmdebstrap")?;
    let wrong = String::from_utf8_lossy(&made.stderr).into_owned();
    ensure!(
        made.status.success(),
        "no packages of Debian {release} can be had: {wrong}"
    );
    Ok(root)
}

impl SystemdHost {
    /// Boots a Debian and waits for the basic units.
    ///
    /// # Errors
    /// Fails without root, or if the boot does not complete.
    pub fn boot(root: &DebianRoot, scratch: &Scratch) -> Result<SystemdHost> {
        let root = &root.0;
        ensure!(
            root.join("lib/systemd/systemd").exists(),
            "there is no systemd; hint: apt-get install systemd"
        );
        let folder = scratch.file("systemd");
        std::fs::create_dir(&folder)?;
        let group = format!("lunette-test-{}", std::process::id());
        let log = scratch.file("systemd.log");
        let booted = as_root("sh")?
            .args(["-c", BOOT, "sh"])
            .arg(&folder)
            .arg(&group)
            .arg(root)
            .stdin(Stdio::null())
            .stdout(std::fs::File::create(&log)?)
            .stderr(std::fs::File::options().append(true).open(&log)?)
            .spawn();
        let booted = booted.context("cannot run sh")?;
        let mut host = SystemdHost {
            booted,
            init: 0,
            group,
        };
        let is_up = wait_until(BOOT_LIMIT, || {
            host.init = first_process(host.booted.id())?;
            let state = host.run(&["systemctl", "is-system-running"]).ok()?;
            let state = String::from_utf8_lossy(&state.stdout).into_owned();
            matches!(state.trim(), "running" | "degraded").then_some(())
        });
        is_up.with_context(|| {
            let log = std::fs::read_to_string(&log).unwrap_or_default();
            format!("systemd does not boot: {log}")
        })?;
        Ok(host)
    }

    /// Translates a path of the host to a path for this process.
    pub fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.init))
    }

    /// Runs a command on the host.
    ///
    /// # Errors
    /// Fails if the command cannot be run.
    pub fn run(&self, words: &[&str]) -> Result<Output> {
        let mut command = as_root("timeout")?;
        command.args(["-s", "KILL", COMMAND_LIMIT, "nsenter", "--target"]);
        command.arg(self.init.to_string());
        command.args(["-m", "-p", "-u", "-i", "-n", "-C", "-r", "-w"]);
        command.args(words).stdin(Stdio::null());
        command
            .output()
            .context("cannot run nsenter; hint: apt-get install util-linux")
    }

    /// Runs a command that must succeed and returns its standard output.
    ///
    /// # Errors
    /// Fails if the command fails.
    pub fn succeeds(&self, words: &[&str]) -> Result<String> {
        let ran = self.run(words)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (output_text, wrong) = (text(&ran.stdout), text(&ran.stderr));
        ensure!(ran.status.success(), "{words:?}: {output_text}{wrong}");
        Ok(output_text)
    }

    /// Returns a unit's journal.
    ///
    /// # Errors
    /// Fails if the journal cannot be read.
    pub fn journal(&self, unit: &str) -> Result<String> {
        self.succeeds(&["journalctl", "--no-pager", "-o", "cat", "-u", unit])
    }

    /// Returns a unit's property.
    ///
    /// # Errors
    /// Fails if the property cannot be read.
    pub fn property(&self, unit: &str, name: &str) -> Result<String> {
        let shown = self.succeeds(&["systemctl", "show", "--value", "-p", name, unit])?;
        Ok(shown.trim().to_owned())
    }
}

/// Finds process 1 of the new PID namespace below `starter`, by its name.
fn first_process(starter: u32) -> Option<u32> {
    let children = |pid: u32| -> Vec<u32> {
        let path = format!("/proc/{pid}/task/{pid}/children");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.split_whitespace()
            .filter_map(|pid| pid.parse().ok())
            .collect()
    };
    let mut next = vec![starter];
    while let Some(pid) = next.pop() {
        let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        if name.trim() == "systemd" {
            return Some(pid);
        }
        next.extend(children(pid));
    }
    None
}

impl Drop for SystemdHost {
    fn drop(&mut self) {
        // All mounts end with the processes.
        let cleaned = as_root("sh").and_then(|mut command| {
            let output = command.args(["-c", CLEAN, "sh", &self.group]).output()?;
            let wrong = String::from_utf8_lossy(&output.stderr).into_owned();
            ensure!(output.status.success(), "{wrong}");
            Ok(())
        });
        if let Err(error) = cleaned {
            eprintln!("after a host with systemd: {error}");
        }
        // Kills the host's init, for kernels without cgroup.kill.
        if let Some(init) = first_process(self.booted.id())
            && let Ok(mut command) = as_root("kill")
        {
            command.args(["-9", &init.to_string()]).output().ok();
        }
        self.booted.kill().ok();
        self.booted.wait().ok();
    }
}

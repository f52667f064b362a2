//! The watcher process, which outlives a guest's supervisor. It reads a pipe from the supervisor; at the end of the pipe it kills the
//! supervisor's processes and removes the guest's folder.
//!
//! Each child of the supervisor joins the watcher's process group before exec. A forked child that has not joined yet still holds the
//! pipe, so the pipe does not end before the group is complete.

use super::registry::Registry;
use anyhow::{Context, Result};
use control::{Client, Method};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

/// Timeout for the kernel to end a process with much memory.
const KILL_LIMIT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Supervisor side of the watcher.
#[derive(Debug)]
pub struct Watcher {
    child: Child,
    pipe: Option<ChildStdin>,
}

impl Watcher {
    /// Starts the watcher. `command` is the command line of this program that calls [`watch_parent`].
    pub fn start(mut command: Command) -> Result<Watcher> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context("cannot start the cleanup process")?;
        let pipe = child.stdin.take();
        Ok(Watcher { child, pipe })
    }

    /// Returns its process ID, which is also the group of the supervisor's children.
    pub fn group(&self) -> u32 {
        self.child.id()
    }

    /// Registers `path` of the daemon at `control` for deletion at the end, unless [`Watcher::forget`] revokes it. Must be called before
    /// the object is created.
    pub fn delete_at_end(&mut self, control: &Path, path: &str) -> Result<()> {
        self.send_line(&format!("+ {path} {}", control.display()))
    }

    /// Revokes a registration.
    pub fn forget(&mut self, control: &Path, path: &str) -> Result<()> {
        self.send_line(&format!("- {path} {}", control.display()))
    }

    fn send_line(&mut self, line: &str) -> Result<()> {
        let pipe = self
            .pipe
            .as_mut()
            .context("the cleanup process has ended")?;
        writeln!(pipe, "{line}").context("the cleanup process has ended")
    }

    /// Closes the pipe and waits until the watcher has cleaned up.
    pub fn finish(mut self) -> Result<()> {
        self.pipe = None;
        self.child.wait()?;
        Ok(())
    }
}

/// Runs the watcher: waits for the end of stdin and cleans up.
pub fn watch_parent(registry: &Registry, name: &str) -> Result<()> {
    // A truncated line refers to an object that has not been created.
    let mut bytes = Vec::new();
    std::io::stdin().read_to_end(&mut bytes).unwrap_or_default();
    let lines = String::from_utf8_lossy(&bytes);
    let group = std::process::id();
    kill_group(group, |_| true);
    delete_all(&lines);
    registry.remove_owned(name, group)
}

/// Deletes the objects registered by [`Watcher::delete_at_end`], last first.
fn delete_all(lines: &str) {
    let mut left: Vec<&str> = Vec::new();
    for line in lines
        .split_inclusive('\n')
        .filter_map(|line| line.strip_suffix('\n'))
    {
        match line.split_once(' ') {
            Some(("+", record)) => left.push(record),
            Some(("-", record)) => left.retain(|other| *other != record),
            _ => {}
        }
    }
    for record in left.iter().rev() {
        if let Some((path, control)) = record.split_once(' ') {
            // The daemon may have ended, or may not have created the object.
            let client = Client::new(Path::new(control));
            let _gone = client.change(Method::DELETE, &format!("{path}?force=true"), None);
        }
    }
}

/// Sends SIGTERM or SIGKILL to a process, which may have ended meanwhile.
pub fn terminate(pid: u32, force: bool) {
    let signal = if force { Signal::KILL } else { Signal::TERM };
    if let Some(number) = Pid::from_raw(pid as i32)
        && let Ok(process) = pidfd_open(number, PidfdFlags::empty())
    {
        pidfd_send_signal(&process, signal).unwrap_or(());
    }
}

/// Kills the remaining processes of a dead guest: members of its group with its folder in the command line.
pub(super) fn kill_left_over(group: u32, folder: &Path) {
    let folder = format!("{}/", folder.display());
    kill_group(group, |pid| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&words).contains(&folder)
    });
}

/// Kills all members of a process group except this process and waits until they are gone.
fn kill_group(group: u32, includes: impl Fn(u32) -> bool) {
    let end = Instant::now() + KILL_LIMIT;
    loop {
        let members: Vec<u32> = processes()
            .filter(|pid| *pid != std::process::id() && is_member(*pid, group) && includes(*pid))
            .collect();
        if members.is_empty() || Instant::now() > end {
            return;
        }
        for pid in members {
            kill(pid, group);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Uses a descriptor, so that a reused process ID is not affected.
fn kill(pid: u32, group: u32) {
    let Some(number) = Pid::from_raw(pid as i32) else {
        return;
    };
    if let Ok(process) = pidfd_open(number, PidfdFlags::empty())
        && is_member(pid, group)
    {
        // The process may have ended meanwhile.
        pidfd_send_signal(&process, Signal::KILL).unwrap_or(());
    }
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns true if the process is in this group and not a zombie.
fn is_member(pid: u32, group: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Fields after the name in parentheses, which may contain spaces: state, parent, process group (proc(5)).
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    let mut fields = fields.split(' ');
    let state = fields.next();
    state.is_some_and(|state| state != "Z" && state != "X")
        && fields.nth(1).and_then(|field| field.parse().ok()) == Some(group)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_in_the_group_is_killed_and_nobody_else() {
        let _alone = crate::process::no_other_starts();
        let leader = Command::new("sleep").arg("100").process_group(0).spawn();
        let mut leader = leader.unwrap();
        let group = leader.id();
        let script = "sleep 100 & sleep 100 & wait";
        let mut member = Command::new("sh");
        let member = member.args(["-c", script]).process_group(group as i32);
        let mut member = member.spawn().unwrap();
        let mut other = Command::new("sleep")
            .arg("100")
            .process_group(0)
            .spawn()
            .unwrap();
        kill_group(group, |_| true);
        assert!(!processes().any(|pid| is_member(pid, group)));
        leader.wait().unwrap();
        member.wait().unwrap();
        assert_eq!(other.try_wait().unwrap(), None);
        other.kill().unwrap();
        other.wait().unwrap();
    }
}

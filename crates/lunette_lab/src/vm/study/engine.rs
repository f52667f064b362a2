//! Runs a study in guests and on the host.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bench::run::{children_ns, environment};
use bench::study::{Position, Report, Results, Subject, run_until_sure};
use cli_common::{Failure, print_line};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use vm::GuestProgram;
use vm::setup::program_for_guests;
use vm::vhost_scsi::Target;

use super::content::Content;
use super::guest::{Planned, StudyGuest};
use super::{Case, DiskRoute, Files, Run, Setup, quietly};

/// Output of the guest's command, for the analysis of failures.
const GUEST_LOG: &str = "guest.log";

/// Parameters of a study.
pub struct Study {
    pub setups: Vec<Setup>,
    pub cases: Vec<Case>,
    pub turns: u32,
    /// Largest number of turns, if further turns follow until all conclusions are certain.
    pub until_sure: Option<u32>,
    pub turn: Duration,
    /// Folder for files of disks, results and pictures.
    pub folder: PathBuf,
    /// Additional words of every guest's plan.
    pub guest: Vec<String>,
    pub direct: bool,
    /// Bytes per disk.
    pub size: u64,
    pub content: Content,
    /// Block devices that are the disks; empty: files, memory, or disks of a daemon.
    pub devices: Vec<PathBuf>,
    /// A series that this host cannot serve, with the reason.
    pub left_out: Option<String>,
}

impl Study {
    fn header(&self) -> Value {
        let ways = self.setups.iter().flat_map(|setup| &setup.ways);
        let ways: Vec<_> = ways
            .map(|way| json!([way.variant.name, way.words]))
            .collect();
        let cases: Vec<_> = self
            .cases
            .iter()
            .map(|case| match &case.files {
                None => json!([case.name, case.job(&[], 0, self.direct)]),
                Some(files) => json!([case.name, files.words("", 0, self.size), files.barriers]),
            })
            .collect();
        let mut header = json!({"ways": ways, "cases": cases, "turn_ms": self.turn.as_millis() as u64, "size": self.size,
            "guest": self.guest});
        // Folders of earlier versions, which always wrote the disks, are continued.
        if self.content.unwritten {
            header["unwritten"] = true.into();
        }
        header
    }

    /// Runs the missing measurements, and further turns if `missing` estimates some. Returns all results, also after an interruption.
    pub fn run(&self, missing: impl Fn(&Report<'_, Run>) -> Option<u32>) -> Result<Results<Run>> {
        std::fs::create_dir_all(&self.folder)
            .with_context(|| format!("cannot create {}", self.folder.display()))?;
        let path = self.folder.join("runs.jsonl");
        let mut results = Results::read(&path)?;
        ensure!(
            results.header.is_null() || results.header["study"] == self.header(),
            "{} contains the runs of another study; hint: give another --folder, or remove it",
            path.display()
        );
        if let Some(left_out) = &self.left_out {
            print_line(left_out);
        }
        if !results.runs.is_empty() {
            print_line(&format_args!(
                "{} runs already measured",
                results.runs.len()
            ));
        }
        if results.runs.is_empty() {
            for device in &self.devices {
                self.content.device(device)?;
            }
        }
        let missing = |runs: &[Run]| missing(&self.report(runs));
        let limit = self.until_sure.unwrap_or(self.turns);
        run_until_sure(self, 0..self.turns, limit, &mut results, missing)?;
        remove_host_files(&self.folder);
        std::fs::remove_file(self.folder.join(GUEST_LOG)).ok();
        Ok(results)
    }

    /// Runs in a folder of the study, on its file system.
    fn files_on_host(&self, files: &Files, milliseconds: u64) -> Result<Value> {
        let folder = self.folder.join(format!("{HOST_FILES}files"));
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        let words = files.words(&folder.display().to_string(), milliseconds, self.size);
        let measured = generator_on_host(
            Command::new(program_for_guests(GuestProgram::Bench)?)
                .arg("files")
                .args(words),
        );
        std::fs::remove_dir_all(&folder).ok();
        measured
    }
}

/// A running guest and the files of its disks.
pub struct GuestRig {
    guest: StudyGuest,
    /// Targets in the host's kernel, which are removed after the end of the guest and before their files.
    targets: Vec<Target>,
    files: DiskFiles,
}

/// Files of disks, removed on drop.
#[derive(Default)]
pub struct DiskFiles(Vec<PathBuf>);

impl DiskFiles {
    /// Creates the files of a guest.
    pub fn create(planned: &Planned, content: Content) -> Result<DiskFiles> {
        let mut files = DiskFiles::default();
        for (file, size) in planned.files() {
            files.add(&file, size, content)?;
        }
        Ok(files)
    }

    /// Creates a file.
    pub fn add(&mut self, file: &Path, size: u64, content: Content) -> Result<()> {
        self.0.push(file.to_owned());
        content.file(file, size)
    }
}

impl Drop for DiskFiles {
    fn drop(&mut self) {
        for file in &self.0 {
            std::fs::remove_file(file).ok();
        }
    }
}

impl Subject for Study {
    type Run = Run;
    type Rig = GuestRig;

    fn groups(&self) -> Vec<Vec<String>> {
        let name = |way: &DiskRoute| way.variant.name.clone();
        let names = |setup: &Setup| setup.ways.iter().map(name).collect();
        self.setups.iter().map(names).collect()
    }

    fn cases(&self) -> Vec<String> {
        self.cases.iter().map(|case| case.name.clone()).collect()
    }

    fn start(&self, group: usize, results: &mut Results<Run>) -> Result<GuestRig> {
        let setup = &self.setups[group];
        let name = format!("study-{}", std::process::id());
        let planned = Planned::new(setup, &name, &self.guest)?;
        let mut files = DiskFiles::create(&planned, self.content)?;
        let targets = self.targets(setup, &mut files)?;
        let guest = planned.start(setup, &name, &self.folder.join(GUEST_LOG))?;
        // Results are comparable only on comparable hosts.
        results.begin(
            &json!({"study": self.header(), "accelerator": guest.accelerator(),
            "guest": guest.describe()?, "environment": environment()}),
        )?;
        ensure!(
            accelerator(results) == guest.accelerator(),
            "earlier runs used a guest under {}, this one runs under {}; hint: give another --folder",
            accelerator(results),
            guest.accelerator()
        );
        let ways = setup.ways.iter().filter_map(|way| way.words.as_ref());
        for (words, disks) in ways.zip(guest.disks()) {
            if words.contains("backing=ram:") {
                self.content.in_guest(&guest, disks)?;
            }
        }
        Ok(GuestRig {
            guest,
            targets,
            files,
        })
    }

    fn measure(&self, rig: &GuestRig, position: Position) -> Result<Run> {
        let ways = &self.setups[position.group].ways;
        let (way, case) = (&ways[position.variant], &self.cases[position.case]);
        let milliseconds = self.turn.as_millis() as u64;
        // The host has no disks in the guest.
        let before = ways[..position.variant].iter();
        let guests = before.filter(|way| way.words.is_some()).count();
        let disks = way
            .words
            .as_ref()
            .and_then(|_| rig.guest.disks().get(guests));
        let measure = || match (disks, &case.files) {
            (Some(disks), None) => rig.guest.run(&case.job(disks, milliseconds, true)),
            (Some(disks), Some(files)) => {
                rig.guest
                    .run_files(&disks[0], files, milliseconds, self.size)
            }
            (None, None) => on_host(&self.folder, self.content, way.disks, self.size, &|files| {
                case.job(files, milliseconds, self.direct)
            }),
            (None, Some(files)) => self.files_on_host(files, milliseconds),
        };
        let title = format!("{}, {}", way.variant.name, case.name);
        let measured = quietly(&title, &rig.guest, measure);
        let (document, load) = measured.context(title)?;
        Ok(Run {
            load,
            ..Run::of(&document, way, case, position.turn)
        })
    }

    fn end(&self, rig: GuestRig) -> Result<()> {
        let ended = rig.guest.end();
        drop(rig.targets);
        drop(rig.files);
        ended
    }

    fn is_interrupted(&self) -> bool {
        vm::interrupted()
    }

    fn print(&self, line: &str) {
        print_line(&line);
    }
}

/// Returns `KVM` or `TCG`, or an empty string before the first run.
pub fn accelerator(results: &Results<Run>) -> &str {
    results.header["accelerator"].as_str().unwrap_or_default()
}

/// Runs the generator on files of a folder, without a guest. Returns its result and the CPU time of its process.
pub fn on_host(
    folder: &Path,
    content: Content,
    disks: u32,
    size: u64,
    job: &dyn Fn(&[String]) -> String,
) -> Result<Value> {
    let files = (0..disks).map(|number| folder.join(format!("{HOST_FILES}{number}.raw")));
    let files: Vec<PathBuf> = files.collect();
    for file in &files {
        content.file(file, size)?;
    }
    job_on_host(folder, &files, job)
}

/// Runs the generator on existing files or devices, without a guest. `folder` is for the file of the job.
pub fn job_on_host(
    folder: &Path,
    files: &[PathBuf],
    job: &dyn Fn(&[String]) -> String,
) -> Result<Value> {
    let names: Vec<String> = files
        .iter()
        .map(|file| file.display().to_string())
        .collect();
    let text = folder.join(format!("{HOST_FILES}job.fio"));
    std::fs::write(&text, job(&names))?;
    generator_on_host(Command::new(program_for_guests(GuestProgram::Bench)?).arg(&text))
}

/// Returns the generator's output and the CPU time of its process.
fn generator_on_host(generator: &mut Command) -> Result<Value> {
    let before = children_ns();
    let generator = generator.stdout(Stdio::piped()).stderr(Stdio::piped());
    let generator = generator.spawn().context("cannot run the generator")?;
    let id = Pid::from_child(&generator);
    let is_over = AtomicBool::new(false);
    let ran = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(20));
                if vm::interrupted() {
                    // Fails after the end of the generator.
                    kill_process(id, Signal::TERM).unwrap_or(());
                }
            }
        });
        let ran = generator.wait_with_output();
        is_over.store(true, Ordering::Relaxed);
        ran
    })?;
    // A partial measurement is no result of a study.
    ensure!(!vm::interrupted(), "interrupted");
    let spent = children_ns()
        .zip(before)
        .map(|(after, before)| after - before);
    let wrong = String::from_utf8_lossy(&ran.stderr);
    ensure!(ran.status.success(), "{}", wrong.trim());
    let mut document: Value = serde_json::from_slice(&ran.stdout)?;
    document["vm"] = json!({"guest_cpu_ns": {}, "host_cpu_ns": {"generator": spent}});
    Ok(document)
}

/// Prefix of the files for the host's own I/O.
const HOST_FILES: &str = "host-";

/// Removes the files of [`on_host`].
pub fn remove_host_files(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(HOST_FILES) {
            std::fs::remove_file(entry.path()).ok();
        }
    }
}

/// Creates the folder of a study, if it is missing, and returns its path. `hint` is the advice if the folder does not support direct
/// I/O; `None` skips the check.
pub fn study_folder(folder: &Path, hint: Option<&str>) -> Result<PathBuf, Failure> {
    let cannot = |error: std::io::Error| {
        Failure::because(format!("cannot create {}: {error}", folder.display()))
    };
    std::fs::create_dir_all(folder).map_err(cannot)?;
    let folder = std::fs::canonicalize(folder).map_err(cannot)?;
    match hint.filter(|_| !has_direct_io(&folder)) {
        None => Ok(folder),
        Some(hint) => Err(Failure::because(format!(
            "{}: its file system has no direct I/O (O_DIRECT), so the page cache would be measured; hint: {hint}",
            folder.display()
        ))),
    }
}

/// Returns the file system of a folder for a description, such as ` on nfs4`, or an empty string if it is unknown.
pub fn on_file_system(folder: &Path) -> String {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let folder = std::fs::canonicalize(folder).ok();
    let kind = folder.and_then(|folder| mounted_kind(&mounts, &folder).map(str::to_owned));
    kind.map_or(String::new(), |kind| format!(" on {kind}"))
}

/// Returns the type of the file system that contains a path. A later mount hides an earlier one of the same folder.
fn mounted_kind<'a>(mounts: &'a str, path: &Path) -> Option<&'a str> {
    let mounts = mounts.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(1);
        let (folder, kind) = (words.next()?, words.next()?);
        // Blanks are escaped as octal numbers.
        let folder = folder.replace("\\040", " ");
        path.starts_with(&folder).then_some((folder.len(), kind))
    });
    mounts
        .max_by_key(|(length, _)| *length)
        .map(|(_, kind)| kind)
}

/// Converts seconds to the time of a turn.
pub fn turn_time(option: &str, seconds: f64) -> Result<Duration, Failure> {
    match (0.05..=3600.0).contains(&seconds) {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => Err(Failure::mistake(format!(
            "{option}: must be 0.05 to 3600 seconds"
        ))),
    }
}

/// Returns true if files in a folder support direct I/O.
fn has_direct_io(folder: &Path) -> bool {
    const O_DIRECT: i32 = rustix::fs::OFlags::DIRECT.bits() as i32;
    let probe = folder.join("direct");
    let made = std::fs::write(&probe, [0; 4096]);
    let opened = File::options()
        .read(true)
        .custom_flags(O_DIRECT)
        .open(&probe);
    std::fs::remove_file(&probe).ok();
    made.is_ok() && opened.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_and_last_mount_determines_the_file_system() {
        let mounts = "/dev/vda / ext4 rw 0 0\nserver:/v /srv/vm nfs4 rw 0 0\nold:/b /srv/a\\040b nfs rw 0 0\nnew:/b /srv/a\\040b xfs rw 0 0\n";
        let kind = |path: &str| mounted_kind(mounts, Path::new(path));
        assert_eq!(kind("/srv/vm/matrix"), Some("nfs4"));
        assert_eq!(kind("/srv/vmware"), Some("ext4"));
        assert_eq!(kind("/srv/a b/c"), Some("xfs"));
    }
}

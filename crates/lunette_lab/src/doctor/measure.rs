//! Measures the effect of a change on this host: the same load without and with it, alternately. Restores all values at
//! the end.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cli_common::{Failure, print_line};
use doctor::{Area, Change, Finding};
use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};

/// Runs with and without the change.
const ROUNDS: usize = 5;
const FILE_BYTES: u64 = 64 << 20;

/// Results without and with a change: 4 KiB random reads per second at depth 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Effect {
    without: Vec<f64>,
    with: Vec<f64>,
}

impl Effect {
    /// Returns true if the worst run with the change is better than the best without it.
    pub fn is_beyond_spread(&self) -> bool {
        let least = self.with.iter().copied().fold(f64::INFINITY, f64::min);
        let most = self.without.iter().copied().fold(0.0, f64::max);
        least > most
    }

    fn ratio(&self) -> f64 {
        median(&self.with) / median(&self.without).max(1.0)
    }

    pub fn to_json(&self) -> Value {
        json!({
            "load": "randread 4k depth 1",
            "iops_without": self.without,
            "iops_with": self.with,
            "ratio": self.ratio(),
            "beyond_spread": self.is_beyond_spread(),
        })
    }
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (before, after) = (median(&self.without), median(&self.with));
        write!(
            f,
            "measured: {before:.0} -> {after:.0} random reads of 4 KiB per second at depth 1 (x{:.2}), ",
            self.ratio()
        )?;
        f.write_str(match self.is_beyond_spread() {
            true => "beyond the spread",
            false => "within the spread: no effect here",
        })
    }
}

/// Previous values of files, restored on drop.
struct SavedValues(Vec<(String, String)>);

impl SavedValues {
    fn of(change: &Change) -> std::io::Result<SavedValues> {
        let files = change.files.iter();
        let read = |file: &String| Ok((file.clone(), value_of(&std::fs::read_to_string(file)?)));
        Ok(SavedValues(
            files.map(read).collect::<std::io::Result<_>>()?,
        ))
    }

    fn put_back(&self) {
        for (file, value) in &self.0 {
            if let Err(error) = std::fs::write(file, value) {
                print_line(&format_args!(
                    "lunette: cannot restore {file} to {value:?}: {error}"
                ));
            }
        }
    }
}

impl Drop for SavedValues {
    fn drop(&mut self) {
        self.put_back();
    }
}

/// Returns the text that sets a file to its current value: the word in brackets if the file lists all values.
fn value_of(text: &str) -> String {
    let chosen = text
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'));
    chosen.map_or(text.trim(), |(word, _)| word).to_owned()
}

/// Measures all changes that are possible on this host.
pub fn run(findings: &mut [(Finding, Option<Effect>)], folder: &Path) -> Result<(), Failure> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted))?;
    }
    let load = Load::prepare(folder)?;
    for (finding, effect) in findings {
        // The load reads a file and does not depend on memory or network settings.
        let shows = !matches!(finding.area, Area::Memory | Area::Network);
        let change = finding.change.clone();
        let Some(change) = change.filter(|_| finding.is_worth_changing && shows) else {
            continue;
        };
        print_line(&format_args!(
            "measuring {}: {}",
            finding.check, finding.found
        ));
        match effect_of(&change, &load, &interrupted) {
            Ok(measured) => *effect = Some(measured),
            Err(Failure::Reasons(reasons)) => {
                for reason in reasons {
                    print_line(&format_args!(
                        "lunette: {}: not measured: {reason}",
                        finding.check
                    ));
                }
            }
            Err(other) => return Err(other),
        }
    }
    Ok(())
}

fn effect_of(change: &Change, load: &Load, interrupted: &AtomicBool) -> Result<Effect, Failure> {
    let unwritable = |error| {
        Failure::because(format!(
            "cannot change {}: {error}; hint: run as root",
            change.files[0]
        ))
    };
    let before = SavedValues::of(change).map_err(unwritable)?;
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        before.put_back();
        without.push(load.run(interrupted)?);
        for file in &change.files {
            std::fs::write(file, &change.value).map_err(unwritable)?;
        }
        with.push(load.run(interrupted)?);
    }
    Ok(Effect { without, with })
}

/// A file to read.
struct Load {
    file: PathBuf,
}

impl Load {
    fn prepare(folder: &Path) -> Result<Load, Failure> {
        let file = folder.join(format!(".lunette-doctor-{}", std::process::id()));
        let failed = |error| {
            Failure::because(format!(
                "cannot write {}: {error}; hint: choose another --folder",
                file.display()
            ))
        };
        let load = Load { file: file.clone() };
        let made = File::create_new(&file).map_err(failed)?;
        // The file is filled with data, because holes are not read from the device.
        let block = vec![0x5a; 1 << 20];
        for _ in 0..FILE_BYTES >> 20 {
            std::io::Write::write_all(&mut &made, &block).map_err(failed)?;
        }
        made.sync_all().map_err(failed)?;
        Ok(load)
    }

    /// Runs the load and returns I/Os per second.
    fn run(&self, interrupted: &AtomicBool) -> Result<f64, Failure> {
        let program = std::env::current_exe();
        let program = program.map_err(Failure::cannot("find this program, which runs the load"))?;
        let subject = format!("file:{}", self.file.display());
        let mut command = Command::new(program);
        command.args([
            "bench",
            &subject,
            "--rw",
            "randread",
            "--bs",
            "4k",
            "--iodepth",
            "1",
        ]);
        command.args([
            "--runtime",
            "0.4",
            "--retries",
            "0",
            "--output-format",
            "json",
        ]);
        let output = command.stdin(Stdio::null()).output();
        let output = output.map_err(Failure::cannot("run the load"))?;
        if interrupted.load(Ordering::Relaxed) {
            return Err(Failure::Interrupted);
        }
        let result: Option<Value> = serde_json::from_slice(&output.stdout).ok();
        let iops = result
            .as_ref()
            .and_then(|result| result["jobs"][0]["read"]["iops"].as_f64());
        iops.ok_or_else(|| {
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            Failure::because(format!("the load failed: {}", stderr.trim()))
        })
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        // The file may not exist.
        std::fs::remove_file(&self.file).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chosen_word_is_what_is_put_back() {
        assert_eq!(value_of("none [mq-deadline] kyber\n"), "mq-deadline");
        assert_eq!(value_of("60\n"), "60");
    }

    #[test]
    fn files_are_put_back_also_when_measuring_ends_early() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("knob").display().to_string();
        std::fs::write(&file, "always madvise [never]\n").unwrap();
        let change = Change {
            files: vec![file.clone()],
            value: "madvise".to_owned(),
        };
        let load = Load {
            file: folder.path().join("missing"),
        };
        let failed = effect_of(&change, &load, &AtomicBool::new(true));
        assert!(failed.is_err());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "never");
    }

    #[test]
    fn change_counts_if_its_worst_run_beats_the_best_without() {
        let effect = |with: [f64; 3]| Effect {
            without: vec![100.0, 90.0, 95.0],
            with: with.to_vec(),
        };
        assert!(effect([101.0, 120.0, 110.0]).is_beyond_spread());
        assert!(!effect([99.0, 120.0, 110.0]).is_beyond_spread());
        assert!(effect([190.0, 190.0, 190.0]).to_string().contains("x2.00"));
    }
}

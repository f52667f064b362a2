//! The result file of a study: a header line, then one run per line.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Runs of a study, in memory and in their file.
#[derive(Debug)]
pub struct Results<R> {
    /// Runs in order of execution.
    pub runs: Vec<R>,
    /// First line of the file; null before the first run.
    pub header: Value,
    path: PathBuf,
}

impl<R: Serialize + DeserializeOwned> Results<R> {
    /// Reads earlier results. Removes an incomplete last line, left by a kill.
    ///
    /// # Errors
    /// The file cannot be read, or one of its lines is malformed.
    pub fn read(path: &Path) -> Result<Results<R>> {
        let shown = path.display();
        let mut results = Results {
            runs: Vec::new(),
            header: Value::Null,
            path: path.to_owned(),
        };
        let bytes = match std::fs::read(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(results),
            read => read.with_context(|| format!("cannot read {shown}"))?,
        };
        let end = bytes.iter().rposition(|byte| *byte == b'\n');
        let whole = end.map_or(0, |at| at + 1);
        if whole < bytes.len() {
            let file = OpenOptions::new().write(true).open(path);
            file.and_then(|file| file.set_len(whole as u64))
                .with_context(|| format!("cannot write {shown}"))?;
        }
        for (number, line) in bytes[..whole].split(|byte| *byte == b'\n').enumerate() {
            let malformed = || {
                let number = number + 1;
                format!("line {number} of {shown} is malformed; hint: remove it")
            };
            match number {
                _ if line.is_empty() => {}
                0 => results.header = serde_json::from_slice(line).with_context(malformed)?,
                _ => {
                    let run = serde_json::from_slice(line).with_context(malformed)?;
                    results.runs.push(run);
                }
            }
        }
        Ok(results)
    }

    /// Writes the header, if the file has none.
    pub fn begin(&mut self, header: &impl Serialize) -> Result<()> {
        if self.header.is_null() {
            self.header = serde_json::to_value(header)?;
            let file = File::create(&self.path);
            let file = file.with_context(|| format!("cannot write {}", self.path.display()))?;
            self.append(file, header)?;
        }
        Ok(())
    }

    /// Appends a run to the file, then to the runs in memory.
    pub fn add(&mut self, run: R) -> Result<()> {
        let file = OpenOptions::new().append(true).open(&self.path);
        let file = file.with_context(|| format!("cannot open {}", self.path.display()))?;
        self.append(file, &run)?;
        self.runs.push(run);
        Ok(())
    }

    fn append(&self, mut file: File, line: &impl Serialize) -> Result<()> {
        let line = serde_json::to_string(line)? + "\n";
        file.write_all(line.as_bytes())
            .with_context(|| format!("cannot write {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Plain, run};
    use super::*;

    #[test]
    fn an_incomplete_line_is_removed_and_a_malformed_one_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("runs.jsonl");
        let read = || Results::<Plain>::read(&file);
        let mut results = read().unwrap();
        assert!(results.header.is_null());
        results.begin(&serde_json::json!({"turn_ms": 5})).unwrap();
        results.add(run("a", "c", 0, 1.0)).unwrap();
        let mut text = std::fs::read_to_string(&file).unwrap();
        text.push_str("{\"variant\":\"a\",\"ca");
        std::fs::write(&file, &text).unwrap();
        let mut results = read().unwrap();
        assert_eq!(results.header["turn_ms"], 5);
        assert_eq!(results.runs.len(), 1);
        results.begin(&serde_json::json!({"turn_ms": 6})).unwrap();
        results.add(run("a", "c", 1, 1.0)).unwrap();
        let turns: Vec<u32> = read().unwrap().runs.iter().map(|run| run.turn).collect();
        assert_eq!(turns, [0, 1]);
        std::fs::write(&file, text.replace("{\"variant\"", "x")).unwrap();
        let error = read().unwrap_err().to_string();
        assert!(error.contains("line 2"), "{error}");
    }
}

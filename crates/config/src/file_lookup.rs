//! Looks at files on storage that may not answer, such as a network file system whose server is unreachable.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Calls `look` for each file, on one thread for each folder, and waits for `patience` at most. Files without an answer are left out.
pub fn look_at_files<T: Send + 'static>(
    files: &BTreeSet<PathBuf>,
    patience: Duration,
    look: fn(&Path) -> T,
) -> HashMap<PathBuf, T> {
    let mut folders: BTreeMap<&Path, Vec<PathBuf>> = BTreeMap::new();
    for file in files {
        let folder = file.parent().unwrap_or(file);
        folders.entry(folder).or_default().push(file.clone());
    }
    let (found, answers) = mpsc::channel();
    for group in folders.into_values() {
        let found = found.clone();
        let look_at_all = move || {
            for file in group {
                let answer = look(&file);
                // The caller may have ceased to wait.
                found.send((file, answer)).ok();
            }
        };
        let thread = std::thread::Builder::new().name("file-lookup".to_owned());
        // Without a thread the files are left out.
        thread.spawn(look_at_all).ok();
    }
    drop(found);
    let end = Instant::now() + patience;
    let mut known = HashMap::new();
    while let Ok((file, answer)) =
        answers.recv_timeout(end.saturating_duration_since(Instant::now()))
    {
        known.insert(file, answer);
    }
    known
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_on_hung_storage_is_skipped() {
        let files = ["/hung/a", "/well/b", "/well/c"].map(PathBuf::from);
        let look = |file: &Path| {
            if file.starts_with("/hung") {
                std::thread::sleep(Duration::from_secs(60));
            }
            file.ends_with("c")
        };
        let found = look_at_files(&files.into(), Duration::from_secs(2), look);
        let expected = [("/well/b", false), ("/well/c", true)];
        let expected = expected.map(|(file, is_c)| (PathBuf::from(file), is_c));
        assert_eq!(found, HashMap::from(expected));
    }
}

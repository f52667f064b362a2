//! Compares names of an interface with the samples of releases (`tests/compat`), in unit tests. `LUNETTE_RECORD=0.9 cargo test -p daemon releases`
//! records them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Names with their properties.
pub type Names = BTreeMap<String, BTreeSet<String>>;

/// Checks that each release's names and properties in `file` exist in `now`.
pub fn check(file: &str, now: &Names) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/compat");
    if let Some(release) = std::env::var_os("LUNETTE_RECORD") {
        let lines = now.iter().map(|(name, properties)| {
            let properties: Vec<&str> = properties.iter().map(String::as_str).collect();
            format!("{name}: {}\n", properties.join(" "))
        });
        let path = folder.join(release).join(file);
        std::fs::write(path, lines.collect::<String>()).unwrap();
        return;
    }
    let releases = std::fs::read_dir(&folder).unwrap();
    let releases = releases.map(|entry| entry.unwrap().path());
    for path in releases.filter(|path| path.is_dir()) {
        let path = path.join(file);
        let text = std::fs::read_to_string(&path).expect(file);
        assert!(!text.is_empty());
        for line in text.lines() {
            let (name, properties) = line.split_once(": ").unwrap_or((line, ""));
            let known = now.get(name);
            let known = known.unwrap_or_else(|| panic!("{}: {name} is gone", path.display()));
            for property in properties.split_whitespace() {
                assert!(
                    known.contains(property),
                    "{}: {name} has no longer {property}; hint: RELEASE_POLICY.md",
                    path.display()
                );
            }
        }
    }
}

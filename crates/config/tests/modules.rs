//! Modules of this crate import each other in one direction only, so that each can be read without those above it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Returns the modules that the text of a module imports, without its tests.
fn imports(text: &str) -> BTreeSet<String> {
    let product = text.split("#[cfg(test)]\nmod tests").next().unwrap_or(text);
    let lines = product
        .lines()
        .map(|line| line.split("//").next().unwrap_or(line));
    let code: String = lines.collect::<Vec<_>>().join("\n");
    let paths = code
        .split("super::")
        .skip(1)
        .chain(code.split("crate::").skip(1));
    let is_word = |c: char| c.is_ascii_lowercase() || c == '_';
    let words = paths.map(|path| path.split(|c| !is_word(c)).next().unwrap_or_default());
    words.map(str::to_owned).collect()
}

#[test]
fn modules_import_in_one_direction() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut modules: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        if !matches!(&*name, "lib" | "tests" | "example_tests" | "property_tests") {
            let mut imported = imports(&std::fs::read_to_string(&path).unwrap());
            // Its own macros.
            imported.remove(&name);
            modules.insert(name, imported);
        }
    }
    assert!(modules["disk"].contains("key") && modules["key"].contains("value"));
    // A module that imports none of those that are left is in no circle.
    let mut left: BTreeSet<String> = modules.keys().cloned().collect();
    while let Some(last) = left
        .iter()
        .find(|name| modules[*name].is_disjoint(&left))
        .cloned()
    {
        left.remove(&last);
    }
    assert!(
        left.is_empty(),
        "these modules import each other in a circle: {left:?}; move the shared items to a module of their own"
    );
}

//! Each kind of block device is declared once, in `src/devices.rs`. This test compares the places that do not follow from the
//! declaration: the syntax of flags, the example, and the page of the daemon.

use config::{DEVICE_KINDS, Flags, Surroundings, parse};

const EXAMPLE: &str = include_str!("../../../contrib/lunette.toml");
const PAGE: &str = include_str!("../../page/web/src/changes.ts");

/// Returns an example of a flag: its syntax with a value for each placeholder.
fn example(form: &str) -> String {
    let values = [
        ("SIZE", "1M"),
        ("TIME", "1ms"),
        ("PATH", "/nonexistent/d0"),
        ("POOL/IMAGE", "rbd/d0"),
        ("HOST/TARGET/LUN", "h/iqn.2026-11.org.example:t0/0"),
        ("HOST/EXPORT", "h/d0"),
    ];
    let values = values.into_iter();
    values.fold(form.to_owned(), |text, (placeholder, value)| {
        text.replace(placeholder, value)
    })
}

#[test]
fn declared_syntax_of_each_flag_is_read_as_its_kind() {
    for (word, kind) in DEVICE_KINDS {
        let (argument, form) = kind.flag();
        let flags = Flags {
            disk: vec![format!("d0={}", example(form))],
            ..Flags::default()
        };
        let read = parse(None, &flags, &Surroundings::of_another_process());
        let read = read.unwrap_or_else(|mistakes| panic!("{word}: {mistakes}"));
        let disk = &read.disks[0];
        assert_eq!(disk.backend.word(), word);
        let mut values = disk.values().into_iter();
        assert!(values.any(|value| value.name == argument), "{word}");
    }
}

#[test]
fn example_has_a_disk_of_each_kind() {
    for (word, _) in DEVICE_KINDS {
        let line = format!("backend = \"{word}\"");
        assert!(EXAMPLE.contains(&line), "contrib/lunette.toml: no {line}");
    }
}

#[test]
fn page_knows_the_key_of_each_storage_that_it_offers() {
    let (_, table) = PAGE.split_once("const STORAGE").expect("the table");
    let (table, _) = table.split_once("\n};").expect("its end");
    let offered = |word: &str| table.contains(&format!("\n  {word}: {{"));
    for (word, kind) in DEVICE_KINDS.iter().filter(|(word, _)| offered(word)) {
        let (_, row) = table.split_once(&format!("\n  {word}: {{")).expect("a row");
        let key = format!("key: \"{}\"", kind.flag().0);
        assert!(
            row.lines().next().unwrap_or_default().contains(&key),
            "{word}: no {key}"
        );
    }
    let absent = DEVICE_KINDS
        .map(|(word, _)| word)
        .into_iter()
        .filter(|word| !offered(word));
    let absent: Vec<_> = absent.collect();
    // Memory is a choice of its own. The others are for measurements, or need rights of root.
    assert_eq!(absent, ["ram", "null", "delay", "scsi_generic"]);
}

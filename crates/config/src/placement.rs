//! Workers that serve an export: `workers = [1, 3]` or `dedicated = true`. In a flag `workers=1+3` and `dedicated=on`.

use block::ExportPlacement;
use serde_json::{Value, json};

use super::diagnostics::MistakeKind;
use super::key::Key;
use super::location::Location;
use super::model::WORKERS_MAX;
use super::value::{Fields, Raw, Reader, items_of, number_of};

const WORKERS_KEY: &str = "workers";
pub(super) const WORKERS_ALLOWED: &str =
    "a list of numbers of workers from 0, such as [1, 3] (in a flag: workers=1+3)";

/// Returns the location of a worker in the list of an export.
pub(super) fn location(export: &Fields, worker: u32) -> Option<&Location> {
    let number = Raw::Integer(worker.into());
    let mut items = export.items(WORKERS_KEY).iter();
    let item = items.find(|item| item.value == number);
    item.map_or_else(|| export.at(WORKERS_KEY), |item| Some(&item.location))
}

/// Remedy for a worker that does not exist.
pub(super) const WORKER_HELP: &str =
    "start the daemon with more `workers`, or start a worker for this export with `dedicated`";

/// Returns the message that a worker does not exist.
pub(super) fn no_worker(worker: u32) -> String {
    format!("`{WORKERS_KEY}`: there is no worker {worker}")
}

/// Returns the existing workers for messages.
pub(super) fn range(count: usize) -> String {
    match count {
        0 | 1 => "0, the only worker".to_owned(),
        count => format!("workers 0 to {}", count - 1),
    }
}

/// Returns the workers that a placement names, as the value of a key.
pub(super) fn workers_value(placement: &ExportPlacement) -> Option<Value> {
    match placement {
        ExportPlacement::Workers(workers) => Some(json!(workers)),
        ExportPlacement::Shared | ExportPlacement::Dedicated => None,
    }
}

/// Reads the named workers.
pub(super) fn read_workers<D, T>(key: &Key<D, T>, reader: &mut Reader<'_, '_>) -> Option<Vec<u32>> {
    let value = reader.raw(key.name)?;
    let items = items_of(value).unwrap_or_default();
    if items.is_empty() {
        reader.refuse(key.name, value, WORKERS_ALLOWED);
    }
    let mut workers: Vec<u32> = Vec::new();
    for item in &items {
        let last = WORKERS_MAX as u64 - 1;
        let Some(number) = number_of(key.name, item, 0..=last, reader.diagnostics) else {
            continue;
        };
        let worker = number.value as u32;
        if workers.contains(&worker) {
            let message = format!("`{}`: worker {worker} is given twice", key.name);
            reader.diagnostics.remedy(
                MistakeKind::Value,
                &item.location,
                message,
                "name each worker once",
            );
        } else {
            workers.push(worker);
        }
    }
    Some(workers)
}

#[cfg(test)]
mod tests {
    use super::super::{Config, Flags, Surroundings, parse, render};
    use super::*;

    fn read(text: &str, flags: &Flags) -> Result<Config, String> {
        let file = (!text.is_empty()).then_some(("lunette.toml", text));
        parse(file, flags, &Surroundings::of_this_process()).map_err(|error| error.to_string())
    }

    const EXPORTS: &str = r#"
        workers = 4
        [[disk]]
        name = "d0"
        backend = "ram"
        size = "1M"
        [[vhost_blk]]
        disk = "d0"
        socket = "/run/d0.sock"
        workers = [3, 1]
        [[vhost_scsi]]
        name = "vm0"
        socket = "/run/vm0.sock"
        dedicated = true
        [[iscsi]]
        name = "iqn.2026-11.org.example:t0"
        disks = ["d0"]
        portals = ["127.0.0.1"]
        workers = [0]
    "#;

    #[test]
    fn every_kind_of_export_has_a_placement_that_is_written_as_it_is_read() {
        let config = read(EXPORTS, &Flags::default()).unwrap();
        let placements: Vec<_> = config.exports().map(|e| e.placement.clone()).collect();
        let expected = [
            ExportPlacement::Workers(vec![3, 1]),
            ExportPlacement::Dedicated,
            ExportPlacement::Workers(vec![0]),
        ];
        assert_eq!(placements, expected);
        let again = read(&render(&config), &Flags::default()).unwrap();
        assert_eq!(again, config);
    }

    #[test]
    fn flags_place_exports() {
        let flags = Flags {
            disk: vec!["d0=ram:1M".to_owned()],
            vhost_blk: vec!["d0:/run/d0.sock,workers=1+0".to_owned()],
            vhost_scsi: vec!["vm0:/run/vm0.sock,dedicated".to_owned()],
            ..Flags::default()
        };
        let flags = flags.with("workers", "2");
        let config = read("", &flags).unwrap();
        let placements: Vec<_> = config.exports().map(|e| e.placement.clone()).collect();
        let expected = [
            ExportPlacement::Workers(vec![1, 0]),
            ExportPlacement::Dedicated,
        ];
        assert_eq!(placements, expected);
    }

    #[test]
    fn worker_that_does_not_exist_is_a_mistake_with_the_range_and_a_hint() {
        let text = EXPORTS.replace("[3, 1]", "[3, 4]");
        let error = read(&text, &Flags::default()).unwrap_err();
        for part in ["there is no worker 4", "workers 0 to 3", "`dedicated`"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn placements_that_contradict_themselves_are_mistakes() {
        for (from, to, expected_text) in [
            ("[3, 1]", "[1, 1]", "worker 1 is given twice"),
            ("[3, 1]", "[]", "an empty array"),
            ("[3, 1]", "\"1\"", "found \"1\""),
            ("[0]", "[0]\ndedicated = true", "exclude each other"),
        ] {
            let error = read(&EXPORTS.replace(from, to), &Flags::default()).unwrap_err();
            assert!(error.contains(expected_text), "{expected_text}: {error}");
        }
    }
}

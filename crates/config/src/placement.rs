//! Workers that serve an export: `workers = [1, 3]` or `dedicated = true`. In a flag `workers=1+3` and `dedicated=on`.

use block::ExportPlacement;
use serde_json::{Value, json};

use super::diagnostics::{Diagnostics, Mistake, MistakeKind};
use super::location::Located;
use super::model::WORKERS_MAX;
use super::value::{Reader, items_of, number_of};

const WORKERS_KEY: &str = "workers";
pub(super) const WORKERS_ALLOWED: &str =
    "a list of numbers of workers from 0, such as [1, 3] (in a flag: workers=1+3)";

/// Values given for the placement of an export.
#[derive(Default)]
pub struct PlacementDraft {
    /// Named workers.
    pub workers: Vec<Located<u32>>,
    /// The export has a dedicated worker.
    pub dedicated: Option<Located<bool>>,
}

impl PlacementDraft {
    /// Returns the placement.
    pub fn placement(&self) -> ExportPlacement {
        match (self.is_dedicated(), self.workers.is_empty()) {
            (true, _) => ExportPlacement::Dedicated,
            (false, true) => ExportPlacement::Shared,
            (false, false) => {
                ExportPlacement::Workers(self.workers.iter().map(|at| at.value).collect())
            }
        }
    }

    fn is_dedicated(&self) -> bool {
        self.dedicated.as_ref().is_some_and(|at| at.value)
    }

    /// Reports that both keys are given.
    pub fn relate(&self, reader: &mut Reader<'_, '_>) {
        let Some(at) = self.dedicated.as_ref().filter(|at| at.value) else {
            return;
        };
        if !self.workers.is_empty() {
            let message = "`workers` and `dedicated` exclude each other";
            let mistake = Mistake::new(MistakeKind::Key, &at.location, message);
            let help = "use `workers` to select shared workers, or `dedicated` to start one for this export alone";
            reader.diagnostics().push(mistake.help(help));
        }
    }

    /// Reports workers that do not exist among `count`.
    pub fn check(&self, count: usize, diagnostics: &mut Diagnostics) {
        for worker in self.workers.iter().filter(|at| at.value as usize >= count) {
            let message = no_worker(worker.value);
            let mistake = Mistake::new(MistakeKind::Relation, &worker.location, message);
            diagnostics.push(mistake.allowed(range(count)).help(WORKER_HELP));
        }
    }
}

/// Remedy for a worker that does not exist.
pub const WORKER_HELP: &str =
    "start the daemon with more `workers`, or start a worker for this export with `dedicated`";

/// Returns the message that a worker does not exist.
pub fn no_worker(worker: u32) -> String {
    format!("`{WORKERS_KEY}`: there is no worker {worker}")
}

/// Returns the existing workers for messages.
pub fn range(count: usize) -> String {
    match count {
        0 | 1 => "0, the only worker".to_owned(),
        count => format!("workers 0 to {}", count - 1),
    }
}

/// Returns the workers that a placement names, as the value of a key.
pub fn workers_value(placement: &ExportPlacement) -> Option<Value> {
    match placement {
        ExportPlacement::Workers(workers) => Some(json!(workers)),
        ExportPlacement::Shared | ExportPlacement::Dedicated => None,
    }
}

/// Reads the named workers.
pub fn read_workers(reader: &mut Reader<'_, '_>) -> Vec<Located<u32>> {
    let Some(value) = reader.raw(WORKERS_KEY) else {
        return Vec::new();
    };
    let items = items_of(value).unwrap_or_default();
    if items.is_empty() {
        reader.refuse(WORKERS_KEY, value, WORKERS_ALLOWED);
    }
    let mut workers: Vec<Located<u32>> = Vec::new();
    for item in &items {
        let last = WORKERS_MAX as u64 - 1;
        let Some(number) = number_of(WORKERS_KEY, item, 0..=last, reader.diagnostics()) else {
            continue;
        };
        if workers
            .iter()
            .any(|known| u64::from(known.value) == number.value)
        {
            let message = format!("`{WORKERS_KEY}`: worker {} is given twice", number.value);
            let mistake = Mistake::new(MistakeKind::Value, &number.location, message);
            reader
                .diagnostics()
                .push(mistake.help("name each worker once"));
            continue;
        }
        workers.push(Located::new(number.value as u32, number.location));
    }
    workers
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
        let placements: Vec<_> = config.exports().map(|e| e.placement().clone()).collect();
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
        let placements: Vec<_> = config.exports().map(|e| e.placement().clone()).collect();
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

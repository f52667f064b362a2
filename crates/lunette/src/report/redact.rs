//! Replaces names in a report for other readers. Equal names have equal replacements.

use std::collections::BTreeMap;

use serde_json::Value;

/// Fields that identify objects or users.
const FIELDS: [&str; 21] = [
    "address",
    "client",
    "file",
    "guest",
    "hint",
    "host",
    // The ID of a session begins with the name of its export.
    "id",
    "initiator",
    "identity",
    "naa",
    "path",
    "peer",
    "portal",
    "problem",
    "reason",
    "serial",
    "socket",
    "target",
    // Contains the path of the control socket.
    "upgrade_command",
    "user",
    "uuid",
];

/// Fields with fixed words, which may also be names of disks.
const WORDS: [&str; 5] = ["backend", "kind", "operation", "state", "version"];

/// Names and their replacements.
#[derive(Debug, Default)]
pub(super) struct Names(BTreeMap<String, String>);

impl Names {
    /// Collects all names of a report.
    pub fn of(moment: &Value) -> Names {
        let mut names = Names::default();
        for sample in list(&moment["samples"]) {
            let status = &sample["status"];
            for disk in list(&status["disks"]) {
                names.add("disk", &disk["name"]);
            }
            for export in list(&status["exports"]) {
                names.add("export", &export["name"]);
            }
        }
        names.collect(moment);
        names
    }

    fn add(&mut self, kind: &str, name: &Value) {
        let Some(name) = name.as_str().filter(|name| !name.is_empty()) else {
            return;
        };
        let number = self.0.len() + 1;
        self.0
            .entry(name.to_owned())
            .or_insert_with(|| format!("{kind}-{number}"));
    }

    fn collect(&mut self, value: &Value) {
        match value {
            Value::Object(fields) => {
                for (field, value) in fields {
                    if FIELDS.contains(&field.as_str()) {
                        self.add(field, value);
                    }
                    // Names of state files contain names of objects.
                    if field == "problems" {
                        for problem in list(value) {
                            self.add("name", &problem["name"]);
                        }
                    }
                    // Sessions and queues have the name of their export in this field.
                    if field == "export" {
                        self.add("export", value);
                    }
                    self.collect(value);
                }
            }
            Value::Array(values) => values.iter().for_each(|value| self.collect(value)),
            _ => {}
        }
    }

    pub fn replace(&self, value: &mut Value) {
        match value {
            Value::String(text) => {
                if let Some(other) = self.0.get(text) {
                    text.clone_from(other);
                }
            }
            Value::Array(values) => values.iter_mut().for_each(|value| self.replace(value)),
            Value::Object(fields) => {
                for (field, value) in fields {
                    match value {
                        Value::String(_) if WORDS.contains(&field.as_str()) => {}
                        // Measurements of a queue by disk.
                        Value::Object(of_disks) if field == "disks" => {
                            let named = std::mem::take(of_disks).into_iter();
                            of_disks.extend(named.map(|(name, mut value)| {
                                self.replace(&mut value);
                                (self.0.get(&name).cloned().unwrap_or(name), value)
                            }));
                        }
                        value => self.replace(value),
                    }
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn no_name_is_left_and_the_same_one_is_the_same_everywhere() {
        let mut moment = json!({
            "samples": [{
                "status": {
                    "version": "1.0",
                    "upgrade_command": "lunette upgrade --socket /run/bank.sock",
                    "disks": [{ "name": "payroll", "backend": "file", "serial": "S-1234" }],
                    "exports": [{ "name": "accounts", "kind": "iscsi", "socket": "/run/accounts.sock",
                        "luns": [{ "target": 0, "lun": 0, "disk": "payroll" }] }],
                    "problems": [{ "object": "state", "name": "payroll.saved", "problem": "payroll is damaged", "hint": "reset payroll" }],
                    "damaged_state": [{ "file": "payroll.saved", "reason": "damaged" }],
                },
                "statistics": { "queues": [{ "labels": { "disk": "payroll", "export": "accounts" },
                    "disks": { "payroll": { "operations": {} } } }] },
            }],
            "sessions": [{ "export": "accounts", "kind": "iscsi", "id": "accounts/3", "initiator": "iqn.2001-04.com.bank:host" }],
            "slowest": [{ "disk": "payroll", "found": {} }],
        });
        Names::of(&moment).replace(&mut moment);
        let text = moment.to_string();
        for name in ["payroll", "accounts", "S-1234", "bank"] {
            assert!(!text.contains(name), "{name} in {text}");
        }
        let disk = moment["samples"][0]["status"]["disks"][0]["name"].clone();
        assert_eq!(moment["slowest"][0]["disk"], disk);
        let queue = &moment["samples"][0]["statistics"]["queues"][0];
        assert_eq!(queue["labels"]["disk"], disk);
        assert!(queue["disks"].get(disk.as_str().unwrap()).is_some());
        let export = moment["samples"][0]["status"]["exports"][0]["name"].clone();
        assert_eq!(moment["sessions"][0]["export"], export);
        // Values that are not names stay.
        assert_eq!(
            moment["samples"][0]["status"]["disks"][0]["backend"],
            "file"
        );
        assert_eq!(
            moment["samples"][0]["status"]["exports"][0]["kind"],
            "iscsi"
        );
    }

    #[test]
    fn disk_that_is_called_like_an_operation_changes_no_other_word() {
        let mut moment = json!({
            "samples": [{
                "status": { "disks": [{ "name": "read", "backend": "ram" }, { "name": "ram", "backend": "ram" }] },
                "statistics": { "queues": [{ "disks": { "read": { "operations": { "read": {} } } } }] },
            }],
        });
        Names::of(&moment).replace(&mut moment);
        let sample = &moment["samples"][0];
        assert_eq!(sample["status"]["disks"][1]["backend"], "ram");
        let name = sample["status"]["disks"][0]["name"].as_str().unwrap();
        assert_ne!(name, "read");
        let of_disk = &sample["statistics"]["queues"][0]["disks"][name];
        assert!(of_disk["operations"].get("read").is_some());
    }
}

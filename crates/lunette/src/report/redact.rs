//! Names in a report that somebody else is to read: each becomes another one, the same at every place.

use std::collections::BTreeMap;

use serde_json::Value;

/// Fields whose text names somebody or something.
const FIELDS: [&str; 12] = [
    "address",
    "initiator",
    "identity",
    "naa",
    "path",
    "peer",
    "portal",
    "reason",
    "serial",
    "socket",
    "target",
    "uuid",
];

/// Names, and what stands in their place.
#[derive(Debug, Default)]
pub(super) struct Names(BTreeMap<String, String>);

impl Names {
    /// All names that a report has.
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
                    // Sessions and queues name their export.
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

    /// Puts them into their places.
    pub fn replace(&self, value: &mut Value) {
        match value {
            Value::String(text) => {
                if let Some(other) = self.0.get(text) {
                    text.clone_from(other);
                }
            }
            Value::Array(values) => values.iter_mut().for_each(|value| self.replace(value)),
            Value::Object(fields) => {
                let before = std::mem::take(fields);
                for (field, mut value) in before {
                    self.replace(&mut value);
                    let field = self.0.get(&field).cloned().unwrap_or(field);
                    fields.insert(field, value);
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
                    "disks": [{ "name": "payroll", "backend": "file", "serial": "S-1234" }],
                    "exports": [{ "name": "accounts", "kind": "iscsi", "socket": "/run/accounts.sock",
                        "luns": [{ "target": 0, "lun": 0, "disk": "payroll" }] }],
                },
                "statistics": { "queues": [{ "labels": { "disk": "payroll", "export": "accounts" },
                    "disks": { "payroll": { "operations": {} } } }] },
            }],
            "sessions": [{ "export": "accounts", "kind": "iscsi", "initiator": "iqn.2001-04.com.bank:host" }],
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
        // What names nobody stays.
        assert_eq!(
            moment["samples"][0]["status"]["disks"][0]["backend"],
            "file"
        );
        assert_eq!(
            moment["samples"][0]["status"]["exports"][0]["kind"],
            "iscsi"
        );
    }
}

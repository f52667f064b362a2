//! Lists the files of the state folder and resets damaged ones.
//!
//! A reset moves the file aside for inspection. Unreadable state has its default value at once, except the cache mode of a virtio-blk
//! export, which is read when the export is opened. State in memory is saved again. The record of a disk's unit may also be reset while it
//! is good, and is then not saved again.

use control::{EventKind, StateFile};

use super::owner::{Owner, refused};
use super::refusal::{Fault, Refusal};
use crate::state_files::{self, Condition, Kind};
use crate::unit_records;

impl Owner {
    /// Lists the files of the state folder.
    pub fn state_files(&self) -> Vec<StateFile> {
        let Some(folder) = self.configs.state_folder() else {
            return Vec::new();
        };
        let names = state_files::names(&folder);
        let files = names.into_iter().map(|file| {
            let condition = state_files::condition(&folder, &file);
            let kind = state_files::kind_of(&file);
            StateFile {
                kind: kind.map_or("", |kind| kind.word).to_owned(),
                object: kind.map_or_else(String::new, |kind| self.object(kind, &file)),
                condition: match condition {
                    Condition::Good => "good",
                    Condition::Unchecked => "unchecked",
                    Condition::Damaged(_) => "damaged",
                    Condition::Reset => "reset",
                }
                .to_owned(),
                reason: match condition {
                    Condition::Damaged(reason) => Some(reason),
                    _ => None,
                },
                file,
            }
        });
        files.collect()
    }

    /// Returns the name of the object that a file describes, or an empty string.
    fn object(&self, kind: &Kind, file: &str) -> String {
        let subject = kind.subject(file);
        let of_identity = |text: &str| {
            let mut disks = self.disks.open.iter();
            disks.find(|(_, disk)| disk.info().identity.to_string() == text)
        };
        match kind.word {
            "reservations" | "mode-pages" | "sanitize" => {
                of_identity(&subject).map_or_else(String::new, |(name, _)| name.clone())
            }
            // The subject is the export's name and the disk's identity.
            "cache-mode" => subject.split(' ').next().unwrap_or_default().to_owned(),
            "last-disk" => format!("/{subject}"),
            "bitmaps" => state_files::key_of(&subject),
            "unit" => subject,
            _ => String::new(),
        }
    }

    /// Resets a damaged file.
    ///
    /// # Errors
    /// If the file does not exist, is not damaged, or cannot be moved.
    pub fn reset_state(&mut self, file: &str) -> Result<(), Refusal> {
        let folder = self.configs.state_folder();
        let known = self.state_files();
        let (Some(folder), Some(found)) = (folder, known.iter().find(|one| one.file == file))
        else {
            let fault = Fault::new(format!("there is no state file {file:?}"));
            return Err(Refusal::NotFound(
                fault.help("list them with lunette state list"),
            ));
        };
        let Some(kind) = state_files::kind_of(file) else {
            let detail = format!("{file} is not a state file of this daemon");
            return Err(Refusal::conflict(detail, "move or remove it manually"));
        };
        // A valid record of a unit is reset so that the disk accepts another unit.
        let is_unit = kind.word == "unit" && found.condition == "good";
        if !is_unit && !matches!(&*found.condition, "damaged" | "unchecked") {
            let detail = format!("state file {file} is not damaged");
            return Err(Refusal::conflict(
                detail,
                "to reset it anyway, stop the daemon and move the file away",
            ));
        }
        let path = folder.join(file);
        let done = match (kind.key(file), kind.word) {
            (Some(_), _) if state_files::is_superseded(&folder, file) => {
                state_files::move_aside(&path)
            }
            (Some(key), "identity") => {
                let units = &self.servers.units;
                let saved = units.reset_saved(&key);
                saved.and_then(|()| self.save_identity_again(&key))
            }
            (Some(key), "unit") => {
                let units = &self.servers.units;
                let reset = units.reset_saved(&key);
                match self.disks.open.get(&found.object).filter(|_| !is_unit) {
                    Some(disk) => reset.and_then(|()| {
                        unit_records::save(disk.name(), &*disk.device(), units.store())
                    }),
                    None => reset,
                }
            }
            (Some(key), _) => self.servers.units.reset_saved(&key),
            (None, "identities") => self.disks.identities.reset(),
            (None, "bitmaps") => {
                let reset = self.disks.bitmaps.reset(&kind.subject(file));
                reset.and_then(|()| state_files::move_aside(&path))
            }
            (None, _) => state_files::move_aside(&path),
        };
        done.map_err(|error| refused(vec![format!("cannot reset {}: {error}", path.display())]))?;
        self.damaged.cleared(file);
        if kind.word == "changes" {
            // The changes are in memory. A start would fail without this file.
            self.keep(&self.configs.wanted, false)?;
        }
        tracing::warn!(
            file,
            kind = kind.word,
            object = found.object,
            "state file reset"
        );
        self.event_bus.publish(EventKind::StateReset, file);
        self.waiting.retry_now();
        Ok(())
    }
}

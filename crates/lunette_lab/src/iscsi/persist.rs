//! Shows and changes persistent reservations.

use std::io::Write;

use cli_common::{Failure, Outcome};
use iscsi_initiator::{ReservationKind, SessionOptions, UnitAddress, installation};
use serde_json::json;

use super::arguments::PersistAction;
use super::{because, open};

/// ISID if the identity of this installation cannot be stored.
const ISID: [u8; 6] = [0x80, 0, 0, 0, 0, 1];

/// Returns the ISID for all runs on this host. A registration belongs to an initiator port, whose name
/// includes the ISID.
fn isid() -> Result<[u8; 6], Failure> {
    let own = installation().map_err(Failure::because)?;
    Ok(match own.is_stored() {
        true => own.isid(&["persist"]),
        false => ISID,
    })
}

pub fn run(address: &UnitAddress, options: &SessionOptions, action: &PersistAction) -> Outcome {
    let options = SessionOptions {
        isid: Some(isid()?),
        ..options.clone()
    };
    let mut unit = open(address, &options)?;
    let done = match action {
        PersistAction::Show { json } => {
            let status = unit.reservations().map_err(because)?;
            unit.close().map_err(because)?;
            return show(&status, *json);
        }
        PersistAction::Register { key, persist } => unit.register(*key, *persist),
        PersistAction::Unregister => unit.register(0, false),
        PersistAction::Reserve { key, kind } => unit.reserve(*key, parse(kind)?),
        PersistAction::Release { key, kind } => unit.release(*key, parse(kind)?),
        PersistAction::Clear { key } => unit.clear_reservations(*key),
        PersistAction::Preempt {
            key,
            other,
            kind,
            abort,
        } => unit.preempt(*key, *other, parse(kind)?, *abort),
    };
    done.map_err(because)?;
    unit.close().map_err(because)
}

fn parse(kind: &str) -> Result<ReservationKind, Failure> {
    let mut words = ReservationKind::WORDS.iter();
    let found = words.find(|(word, ..)| *word == kind);
    found.map(|(_, kind, _)| *kind).ok_or_else(|| {
        let words: Vec<&str> = ReservationKind::WORDS
            .iter()
            .map(|(word, ..)| *word)
            .collect();
        Failure::mistake(format!(
            "{kind:?} is not a reservation type: {}",
            words.join(", ")
        ))
    })
}

fn show(status: &iscsi_initiator::ReservationStatus, json: bool) -> Outcome {
    let mut stdout = cli_common::stdout();
    let hex = |key: u64| format!("{key:#x}");
    let kind = |kind: Option<ReservationKind>| kind.map_or("unknown".to_owned(), |k| k.to_string());
    if json {
        let keys: Vec<String> = status.keys.iter().map(|key| hex(*key)).collect();
        let held = status.reservation;
        let held = held.map(|(key, of)| json!({"key": hex(key), "kind": kind(of)}));
        let body = json!({"generation": status.generation, "keys": keys, "reservation": held});
        return Ok(writeln!(stdout, "{body:#}")?);
    }
    writeln!(stdout, "generation   {}", status.generation)?;
    for key in &status.keys {
        writeln!(stdout, "registered   {}", hex(*key))?;
    }
    match status.reservation {
        Some((key, of)) => writeln!(stdout, "reserved     {} by {}", kind(of), hex(key))?,
        None => writeln!(stdout, "reserved     no")?,
    }
    Ok(())
}

//! `lunette session` and `lunette reservation`.

use control::objects::{Reservation, Session};
use control::{Method, escape};

use super::arguments::{ReservationAction, ReservationCommand, SessionAction, SessionCommand};
use super::table::Table;
use crate::failure::{Failure, Outcome};

pub fn run(command: SessionCommand) -> Outcome {
    let ask = &command.ask;
    match command.action {
        SessionAction::List => {
            let sessions: Vec<Session> = ask.daemon.client()?.get("/v1/sessions")?;
            ask.print(&sessions, table)
        }
        SessionAction::Show { session } => {
            let mut sessions: Vec<Session> = ask.daemon.client()?.get("/v1/sessions")?;
            sessions.retain(|found| found.id == session);
            if sessions.is_empty() {
                return Err(Failure::because(format!(
                    "session {session} does not exist"
                )));
            }
            ask.print(&sessions, details)
        }
        SessionAction::Remove { session } => {
            let path = format!("/v1/sessions/{}", escape(&session));
            ask.change(Method::DELETE, &path, None)
        }
    }
}

fn counted(number: Option<u64>) -> String {
    number.map_or_else(|| "-".to_owned(), |number| number.to_string())
}

/// Returns the initiator name of an iSCSI session, or the address of an NBD client.
fn client(session: &Session) -> Option<&str> {
    session.initiator.as_deref().or(session.client.as_deref())
}

fn table(sessions: &[Session]) -> Table {
    let head = Table::new(&[
        "ID",
        "EXPORT",
        "CLIENT",
        "CONNECTIONS",
        "REQUESTS",
        "BYTES",
        "ERRORS",
    ]);
    sessions.iter().fold(head, |table, session| {
        table.row([
            session.id.clone(),
            session.export.clone(),
            client(session).unwrap_or("-").to_owned(),
            session.connections.to_string(),
            counted(session.requests),
            counted(session.bytes),
            counted(session.errors),
        ])
    })
}

/// Table of one session with its negotiated keys.
fn details(sessions: &[Session]) -> Table {
    let mut table = Table::new(&["KEY", "VALUE"]);
    for session in sessions {
        let mut row = |key: &str, value: String| {
            let rows = std::mem::take(&mut table);
            table = rows.row([key.to_owned(), value]);
        };
        row("id", session.id.clone());
        row("export", session.export.clone());
        if let Some(initiator) = &session.initiator {
            row("initiator", initiator.clone());
        }
        if let Some(client) = &session.client {
            row("client", client.clone());
        }
        row("connections", session.connections.to_string());
        for (key, value) in [
            ("requests", session.requests),
            ("bytes", session.bytes),
            ("errors", session.errors),
        ] {
            row(key, counted(value));
        }
        for (key, value) in &session.negotiated {
            row(key, value.clone());
        }
    }
    table
}

/// Prints reservations and registrations of initiators.
pub fn reservations(command: ReservationCommand) -> Outcome {
    let ask = &command.ask;
    let mut held: Vec<Reservation> = ask.daemon.client()?.get("/v1/reservations")?;
    if let ReservationAction::Show { disk } = &command.action {
        // A missing disk is an error; a disk without reservations is not.
        let path = format!("/v1/disks/{}", escape(disk));
        ask.daemon.client()?.get::<serde_json::Value>(&path)?;
        held.retain(|reservation| reservation.disk == *disk);
    }
    ask.print(&held, reservation_table)?;
    match held.iter().any(|reservation| reservation.unknown.is_some()) {
        true => Err(Failure::Reported),
        false => Ok(()),
    }
}

fn reservation_table(held: &[Reservation]) -> Table {
    let head = Table::new(&[
        "DISK",
        "RESERVATION",
        "KEY",
        "DAEMON",
        "PORT",
        "HOLDS",
        "INITIATOR",
    ]);
    held.iter().fold(head, |mut table, reservation| {
        let kind = || match &reservation.unknown {
            Some(reason) => format!("unknown: {reason}"),
            None => reservation.kind.clone().unwrap_or_else(|| "-".to_owned()),
        };
        if reservation.registrations.is_empty() {
            let none = || "-".to_owned();
            table = table.row([
                reservation.disk.clone(),
                kind(),
                none(),
                none(),
                none(),
                none(),
                none(),
            ]);
        }
        for registration in &reservation.registrations {
            table = table.row([
                reservation.disk.clone(),
                kind(),
                registration.key.clone(),
                registration
                    .daemon
                    .clone()
                    .unwrap_or_else(|| "this".to_owned()),
                registration.port.to_string(),
                super::yes(registration.holder),
                registration.initiator.clone(),
            ]);
        }
        table
    })
}

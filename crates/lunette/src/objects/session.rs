//! `lunette session` and `lunette reservation`.

use std::collections::BTreeSet;

use control::objects::{Disk, Reservation, Session};
use control::{Method, escape};

use super::arguments::{Ask, ReservationAction, ReservationCommand, SessionAction, SessionCommand};
use super::table::Table;
use crate::failure::{Failure, Outcome};

pub fn run(command: SessionCommand) -> Outcome {
    let ask = &command.ask;
    match command.action {
        SessionAction::List => {
            let sessions = read(ask)?;
            ask.print(&sessions, table)
        }
        SessionAction::Show { session } => {
            let mut sessions = read(ask)?;
            sessions.retain(|found| found.id == session);
            if sessions.is_empty() {
                return Err(Failure::because(format!(
                    "session {session} does not exist; hint: lunette session list"
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

fn read(ask: &Ask) -> Result<Vec<Session>, Failure> {
    let mut sessions: Vec<Session> = ask.daemon.client()?.get("/v1/sessions")?;
    if ask.daemon.is_local() {
        add_guests(&mut sessions);
    }
    Ok(sessions)
}

fn counted(number: Option<u64>) -> String {
    number.map_or_else(|| "-".to_owned(), |number| number.to_string())
}

/// Returns the name of an iSCSI initiator with its IP addresses, the address of an NBD client, or the process of a vhost-user front end.
fn client(session: &Session) -> Option<String> {
    let front_end = || session.front_end.as_ref().map(ToString::to_string);
    let initiator = session.initiator.as_ref().map(|name| {
        let connections = session.each_connection.iter();
        let addresses = connections.filter_map(|one| Some(one.client.rsplit_once(':')?.0));
        let addresses: BTreeSet<&str> = addresses.collect();
        match addresses.is_empty() {
            true => name.clone(),
            false => format!("{name} at {}", Vec::from_iter(addresses).join(", ")),
        }
    });
    initiator
        .or_else(|| session.client.clone())
        .or_else(front_end)
}

/// Adds the names of guests that the daemon could not read: it usually may not see processes of other users.
fn add_guests(sessions: &mut [Session]) {
    for front_end in sessions.iter_mut().flat_map(|one| &mut one.front_end) {
        if front_end.guest.is_none() {
            front_end.guest = front_end.pid.and_then(sys::guest_of);
        }
    }
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
            client(session).unwrap_or_else(|| "-".to_owned()),
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
        if let Some(front_end) = &session.front_end {
            row("front end", front_end.to_string());
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
        for connection in &session.each_connection {
            let of = format!("connection {}", connection.id);
            row(&format!("{of}: address"), connection.client.clone());
            for (key, value) in &connection.negotiated {
                row(&format!("{of}: {key}"), value.clone());
            }
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
        ask.daemon.client()?.get::<Disk>(&path)?;
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

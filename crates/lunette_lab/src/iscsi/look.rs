//! Queries: targets, logical units, negotiated parameters, response times.

use std::io::Write;
use std::time::Duration;

use cli_common::{Failure, Outcome, printable};
use iscsi::negotiation::SessionParameters;
use iscsi_initiator::{
    CommandError, Lun, Portal, ReportedLun, Session, SessionOptions, Unit, UnitAddress, UnitInfo,
    discover, luns,
};
use serde_json::{Value, json};

use super::arguments::Login;
use super::{because, open};

pub fn targets(portal: &Portal, options: &SessionOptions, json: bool) -> Outcome {
    let found = discover(portal, options).map_err(because)?;
    let mut stdout = cli_common::stdout();
    if json {
        let each: Vec<Value> = found
            .iter()
            .map(|target| json!({"name": target.name, "addresses": target.addresses}))
            .collect();
        return Ok(writeln!(stdout, "{:#}", json!(each))?);
    }
    for target in &found {
        writeln!(stdout, "{}", printable(&target.name))?;
        for address in &target.addresses {
            writeln!(stdout, "    {}", printable(address))?;
        }
    }
    if found.is_empty() {
        cli_common::print_line(&"no target admits this initiator");
    }
    Ok(())
}

fn log_in(target: &str, login: &Login) -> Result<Session, Failure> {
    let (user, portal, name) = parsed(target)?;
    let options = login.options(user.as_deref())?;
    Session::login(&portal, &name, &options).map_err(because)
}

/// Parses the address of a target.
fn parsed(target: &str) -> Result<(Option<String>, Portal, String), Failure> {
    UnitAddress::target(target).map_err(|why| {
        let hint = "iscsi://HOST/TARGET; lunette iscsi discover HOST lists targets";
        Failure::mistake(format!("{why}; hint: {hint}"))
    })
}

/// Prints the logical units of a target, all queried in one session. A unit that ends the session causes another login.
pub fn units(target: &str, login: &Login, json: bool) -> Outcome {
    let mut session = log_in(target, login)?;
    let (_, _, name) = parsed(target)?;
    let found = luns(&mut session).map_err(because)?;
    let mut live = Some(session);
    let mut infos = Vec::new();
    for ReportedLun { lun, field } in found.luns {
        let mut session = match live.take() {
            Some(session) => session,
            None => log_in(target, login)?,
        };
        let info = Unit::inspect(&mut session, field);
        if !matches!(info, Err(CommandError::Session(_))) {
            live = Some(session);
        }
        // Units that are not ready are listed too.
        infos.push((
            lun,
            info.map_err(|error| format!("LUN {lun} of {name}: {error}")),
        ));
    }
    if let Some(session) = live {
        session.logout().map_err(because)?;
    }
    print_units(&infos, json)?;
    match found.missing {
        0 => Ok(()),
        missing => Err(Failure::because(format!(
            "incomplete list: {name} has {missing} more logical units that it did not report"
        ))),
    }
}

fn print_units(infos: &[(Lun, Result<UnitInfo, String>)], json: bool) -> Outcome {
    let mut stdout = cli_common::stdout();
    if json {
        let each: Vec<Value> = infos
            .iter()
            .map(|(lun, info)| match info {
                Ok(info) => json!({"lun": number(*lun), "info": body(info)}),
                Err(error) => json!({"lun": number(*lun), "error": error}),
            })
            .collect();
        return Ok(writeln!(stdout, "{:#}", json!(each))?);
    }
    for (lun, info) in infos {
        match info {
            Ok(info) => writeln!(
                stdout,
                "{lun:>5}  {:>14}  {} {}  {}",
                size(info.bytes()),
                info.vendor,
                info.product,
                info.serial.as_deref().unwrap_or("-"),
            )?,
            Err(error) => writeln!(stdout, "{lun:>5}  {}", printable(error))?,
        }
    }
    Ok(())
}

/// A LUN as JSON: a number, or text for a LUN field.
fn number(lun: Lun) -> Value {
    match lun {
        Lun::Number(number) => number.into(),
        Lun::Field(_) => lun.to_string().into(),
    }
}

/// Prints the properties of a logical unit.
pub fn unit(address: &UnitAddress, options: &SessionOptions, json: bool) -> Outcome {
    let unit = open(address, options)?;
    let info = unit.info().clone();
    unit.close().map_err(because)?;
    let mut stdout = cli_common::stdout();
    if json {
        return Ok(writeln!(stdout, "{:#}", body(&info))?);
    }
    let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let yes = |is: bool| if is { "yes" } else { "no" }.to_owned();
    for (property, value) in [
        ("vendor", info.vendor.clone()),
        ("product", info.product.clone()),
        ("revision", info.revision.clone()),
        ("device type", format!("{:#04x}", info.device_type)),
        ("serial number", or_dash(&info.serial)),
        ("NAA identifier", or_dash(&info.naa)),
        (
            "size",
            format!("{} ({} bytes)", size(info.bytes()), info.bytes()),
        ),
        ("block size", info.block_size.to_string()),
        ("read-only", yes(info.read_only)),
        ("unmaps blocks", yes(info.thin)),
        ("unmapped blocks read as zeroes", yes(info.zeroes)),
    ] {
        writeln!(stdout, "{property:<31} {value}")?;
    }
    Ok(())
}

fn body(info: &UnitInfo) -> Value {
    json!({
        "vendor": info.vendor,
        "product": info.product,
        "revision": info.revision,
        "device_type": info.device_type,
        "serial": info.serial,
        "naa": info.naa,
        "bytes": info.bytes(),
        "block_size": info.block_size,
        "read_only": info.read_only,
        "unmap": info.thin,
        "unmapped_reads_zeroes": info.zeroes,
        "transfer_blocks_max": info.transfer_max,
    })
}

/// Formats bytes with powers of 1024, as elsewhere.
fn size(bytes: u64) -> String {
    let units = ["", "K", "M", "G", "T", "P", "E"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => bytes.to_string(),
        _ => format!("{value:.1}{}", units[unit]),
    }
}

/// Prints the negotiated parameters with the names of RFC 7143.
pub fn parameters(target: &str, login: &Login, json: bool) -> Outcome {
    let session = log_in(target, login)?;
    let settled = session.parameters().clone();
    let connections = session.connections();
    session.logout().map_err(because)?;
    let SessionParameters {
        max_connections,
        initial_r2t,
        immediate_data,
        max_burst_length,
        first_burst_length,
        time_to_wait,
        time_to_retain,
        max_outstanding_r2t,
        data_pdu_in_order,
        data_sequence_in_order,
        error_recovery_level,
        ..
    } = settled;
    let yes = |is: bool| Value::from(if is { "Yes" } else { "No" });
    let lines = [
        ("MaxConnections", Value::from(max_connections)),
        ("InitialR2T", yes(initial_r2t)),
        ("ImmediateData", yes(immediate_data)),
        ("MaxBurstLength", Value::from(max_burst_length)),
        ("FirstBurstLength", Value::from(first_burst_length)),
        ("DefaultTime2Wait", Value::from(time_to_wait)),
        ("DefaultTime2Retain", Value::from(time_to_retain)),
        ("MaxOutstandingR2T", Value::from(max_outstanding_r2t)),
        ("DataPDUInOrder", yes(data_pdu_in_order)),
        ("DataSequenceInOrder", yes(data_sequence_in_order)),
        ("ErrorRecoveryLevel", Value::from(error_recovery_level)),
        ("connections", Value::from(connections)),
    ];
    let mut stdout = cli_common::stdout();
    if json {
        let object: serde_json::Map<String, Value> = lines
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value))
            .collect();
        return Ok(writeln!(stdout, "{:#}", Value::Object(object))?);
    }
    for (key, value) in lines {
        let value = value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned);
        writeln!(stdout, "{key:<20} {value}")?;
    }
    Ok(())
}

/// Prints each response time, then minimum, mean and maximum.
pub fn ping(target: &str, count: u32, interval: f64, login: &Login) -> Outcome {
    let pause = Duration::try_from_secs_f64(interval).map_err(|_| {
        Failure::mistake(format!(
            "--interval {interval}: must be a number of seconds, such as 0.5"
        ))
    })?;
    let mut session = log_in(target, login)?;
    let data = [0x2a; 56];
    let mut times = Vec::new();
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    for number in 0..count {
        if number > 0 {
            std::thread::sleep(pause);
        }
        for cid in 0..session.connections() as u16 {
            let time = session.ping(cid, &data).map_err(because)?;
            times.push(micros(time));
            let portal = session.portal();
            let line = format!(
                "{portal}: number {number}, connection {cid}: {:.1} us\n",
                micros(time)
            );
            cli_common::stdout().write_all(line.as_bytes())?;
        }
    }
    session.logout().map_err(because)?;
    let sum: f64 = times.iter().sum();
    let least = times.iter().copied().fold(f64::INFINITY, f64::min);
    let most = times.iter().copied().fold(0.0, f64::max);
    let mean = sum / times.len() as f64;
    let mut stdout = cli_common::stdout();
    Ok(writeln!(
        stdout,
        "{} responses: minimum {least:.1}, mean {mean:.1}, maximum {most:.1} us",
        times.len()
    )?)
}

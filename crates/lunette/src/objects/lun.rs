//! `lunette lun`.

use control::objects::{Export, Lun};
use control::{Client, Method, escape};
use serde::Serialize;
use serde_json::json;

use super::arguments::{LunAction, LunCommand};
use super::force;
use super::table::Table;
use crate::failure::{Failure, Outcome};

/// A logical unit with its export.
#[derive(Serialize)]
struct Row {
    export: String,
    #[serde(flatten)]
    lun: Lun,
}

pub fn run(command: LunCommand) -> Outcome {
    let ask = &command.ask;
    match command.action {
        LunAction::List { export } => {
            let rows = list(&ask.daemon.client()?, export)?;
            ask.print(&rows, table)
        }
        LunAction::Show { export, address } => {
            let lun: Lun = ask.daemon.client()?.get(&path(&export, &address))?;
            ask.print(&[Row { export, lun }], table)
        }
        LunAction::Add {
            export,
            address,
            disk,
            force: forced,
        } => {
            let path = format!("{}{}", path(&export, &address), force(forced));
            ask.change(Method::PUT, &path, Some(&json!({ "disk": disk })))
        }
        LunAction::Remove {
            export,
            address,
            force: forced,
        } => {
            let path = format!("{}{}", path(&export, &address), force(forced));
            ask.change(Method::DELETE, &path, None)
        }
    }
}

fn path(export: &str, address: &str) -> String {
    format!("/v1/exports/{}/luns/{}", escape(export), escape(address))
}

fn list(client: &Client, export: Option<String>) -> Result<Vec<Row>, Failure> {
    let with = |export: &str, luns: Vec<Lun>| -> Vec<Row> {
        let row = |lun| Row {
            export: export.to_owned(),
            lun,
        };
        luns.into_iter().map(row).collect()
    };
    if let Some(export) = export {
        let luns = client.get(&format!("/v1/exports/{}/luns", escape(&export)))?;
        return Ok(with(&export, luns));
    }
    let exports: Vec<Export> = client.get("/v1/exports")?;
    let rows = exports
        .iter()
        .flat_map(|export| with(&export.name, export.luns().unwrap_or_default()));
    Ok(rows.collect())
}

fn table(rows: &[Row]) -> Table {
    let head = Table::new(&["EXPORT", "ADDRESS", "DISK"]);
    rows.iter().fold(head, |table, Row { export, lun }| {
        let address = format!("{}:{}", lun.target, lun.lun);
        table.row([export.clone(), address, lun.disk.clone()])
    })
}

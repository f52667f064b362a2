//! `lunette check`: reports all mistakes of a configuration without starting anything.

use std::io::Write;

use config::{Config, Surroundings, Transport};
use daemon::{Fault, StartChecks, warnings};
use serde_json::{Value, json};

use crate::cli::CheckArguments;
use crate::failure::{Failure, Outcome, mistaken};

pub fn run(arguments: &CheckArguments) -> Outcome {
    let configuration = &arguments.configuration;
    let read = config::load(
        configuration.config.as_deref(),
        &configuration.flags(),
        &Surroundings::of_this_process(),
    );
    let mut stdout = cli_common::stdout();
    match read {
        Ok(config) => {
            let checks = StartChecks::of(&config);
            let warnings = [checks.warnings, warnings(&config)].concat();
            let mistakes = checks.mistakes;
            let is_valid = mistakes.is_empty();
            if arguments.json {
                let mistakes: Vec<Value> = mistakes.iter().map(shown).collect();
                let answer = json!({"valid": is_valid, "mistakes": mistakes, "warnings": warnings});
                writeln!(stdout, "{answer}")?;
            } else {
                for warning in warnings {
                    writeln!(stdout, "warning: {warning}")?;
                }
            }
            match is_valid {
                true if arguments.json => Ok(()),
                true => Ok(writeln!(stdout, "valid: {}", summary(&config))?),
                false if arguments.json => Err(Failure::Reported),
                false => Err(Failure::Reasons(mistakes.iter().map(text).collect())),
            }
        }
        Err(mistakes) if arguments.json => {
            writeln!(
                stdout,
                "{}",
                json!({"valid": false, "mistakes": mistakes, "warnings": []})
            )?;
            Err(Failure::Mistaken)
        }
        Err(mistakes) => Err(mistaken(mistakes)),
    }
}

/// Returns a mistake without a place in the file, as JSON.
fn shown(fault: &Fault) -> Value {
    json!({"kind": "relation", "message": fault.detail, "help": fault.help})
}

fn text(fault: &Fault) -> String {
    match &fault.help {
        Some(help) => format!("{}; hint: {help}", fault.detail),
        None => fault.detail.clone(),
    }
}

fn summary(config: &Config) -> String {
    let luns: usize = config.exports().map(|export| export.luns.len()).sum();
    let count = |transport| config.exports_over(transport).count();
    let parts = [
        (config.disks.len(), "disk"),
        (count(Transport::VhostBlk), "vhost-blk export"),
        (count(Transport::VhostScsi), "vhost-scsi controller"),
        (count(Transport::Iscsi), "iSCSI target"),
        (count(Transport::Nbd), "NBD export"),
        (luns, "LUN"),
        (config.workers.placement.count(), "worker"),
    ];
    let counted = parts.map(|(count, noun)| match count {
        1 => format!("1 {noun}"),
        count => format!("{count} {noun}s"),
    });
    counted.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_of_another_format_is_warned_of() {
        let folder = tempfile::tempdir().unwrap();
        let (raw, image) = (folder.path().join("raw"), folder.path().join("image"));
        std::fs::write(&raw, [0; 4096]).unwrap();
        let mut content = b"QFI\xfb".to_vec();
        content.resize(4096, 0);
        std::fs::write(&image, content).unwrap();
        let flags = config::Flags {
            disk: vec![
                format!("d0=file:{}", raw.display()),
                format!("d1=file:{}", image.display()),
                "d2=ram:1M".to_owned(),
            ],
            ..config::Flags::default()
        };
        let read = config::parse(None, &flags, &Surroundings::of_this_process());
        let found = warnings(&read.unwrap_or_else(|mistakes| panic!("{mistakes}")));
        let shown = image.display();
        assert_eq!(found.len(), 1);
        assert!(
            found[0].starts_with(&format!("disk d1: {shown}: ")),
            "{found:?}"
        );
        assert!(found[0].contains("qcow2"), "{found:?}");
    }

    #[test]
    fn exports_that_need_no_client_certificate_are_warned_of() {
        let text = "tls_certificate = \"c.pem\"\ntls_key = \"k.pem\"\nnbd_client_ca = \"ca.pem\"\n\
                    [[disk]]\nname = \"d\"\nbackend = \"ram\"\nsize = \"1M\"\n\
                    [[nbd]]\nname = \"a\"\ndisk = \"d\"\nlisten = \"127.0.0.1:10809\"\n\
                    [[nbd]]\nname = \"b\"\ndisk = \"d\"\nlisten = \"127.0.0.1:10810\"\ntls = true\n\
                    [[nbd]]\nname = \"c\"\ndisk = \"d\"\nsocket = \"c.sock\"\n";
        let surroundings = Surroundings::of_this_process();
        let flags = config::Flags::default();
        let read = config::parse(Some(("a.toml", text)), &flags, &surroundings);
        let found = warnings(&read.unwrap_or_else(|mistakes| panic!("{mistakes}")));
        assert_eq!(found.len(), 1, "{found:?}");
        let expected = "nbd a: clients at 127.0.0.1:10809 need no certificate";
        assert!(found[0].starts_with(expected), "{found:?}");
    }

    #[test]
    fn units_of_controllers_and_of_targets_are_counted() {
        let text = "workers = 1\n[[disk]]\nname = \"d\"\nbackend = \"ram\"\nsize = \"1M\"\n\
                    [[vhost_scsi]]\nname = \"c\"\nsocket = \"c.sock\"\n\
                    lun = [{ target = 0, lun = 0, disk = \"d\" }]\n\
                    [[iscsi]]\nname = \"iqn.2026-11.org.example:t\"\nportals = [\"127.0.0.1\"]\n\
                    lun = [{ lun = 0, disk = \"d\" }, { lun = 9, disk = \"d\" }]\n";
        let surroundings = Surroundings::of_this_process();
        let read = config::parse(
            Some(("a.toml", text)),
            &config::Flags::default(),
            &surroundings,
        );
        let config = read.unwrap_or_else(|mistakes| panic!("{mistakes}"));
        let summary_text = summary(&config);
        assert!(
            summary_text.contains("1 iSCSI target, 0 NBD exports, 3 LUNs, 1 worker"),
            "{summary_text}"
        );
    }
}

//! Top-level keys of a file: those of the daemon, and its lists of objects. Keys that are also flags are declared here.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;

use block::PollMode;
use serde_json::json;

use super::diagnostics::Diagnostics;
use super::disk::read_disk;
use super::export_keys::{ExportKind, texts};
use super::export_kinds::{ISCSI, NBD, VHOST_BLK, VHOST_SCSI};
use super::iscsi_limits::read_iscsi_limits;
use super::key::{
    Item, Key, KeyLine, KeyValue, Kind, NONE, RunTime, differing, json_of, key_values,
};
use super::location::{Located, Location};
use super::model::{Config, DiskConfig, ExportConfig, LunConfig, Placement, WORKERS_MAX};
use super::readers::{
    ADDRESS, CPUS_ALLOWED, FOLDER_ALLOWED, NAMES_ALLOWED, PATHS_ALLOWED, PEM_ALLOWED, PEM_FILE,
    SECRET_FILE, SOCKET, read_cpus, read_texts,
};
use super::setting::{Choice, Setting, key};
use super::value::{Draft, Fields, Reader};

const GROUP_ALLOWED: &str = "the name of a group in /etc/group";

/// Values given for workers.
#[derive(Default)]
pub struct WorkersDraft {
    pub count: Option<Located<usize>>,
    pub cpus: Option<Located<Vec<Located<usize>>>>,
}

/// All values of a file. Those that are checked against other objects or this machine have locations. The others are in the configuration.
#[derive(Default)]
pub struct ConfigDraft {
    /// Locations of the daemon's own keys.
    pub given: BTreeMap<&'static str, Location>,
    pub workers: WorkersDraft,
    pub disks: Vec<Draft<DiskConfig>>,
    pub exports: Vec<Draft<ExportConfig>>,
    /// Logical units from flags, with their controller's name.
    pub luns: Vec<(Located<String>, Draft<LunConfig>)>,
    /// The other values.
    pub config: Config,
}

impl Deref for ConfigDraft {
    type Target = Config;

    fn deref(&self) -> &Config {
        &self.config
    }
}

impl DerefMut for ConfigDraft {
    fn deref_mut(&mut self) -> &mut Config {
        &mut self.config
    }
}

/// A top-level key, which may be a flag.
pub struct DaemonKey {
    /// Key in files.
    pub key: Key<ConfigDraft, Config>,
    /// Flag on the command line.
    pub flag: Option<Flag>,
}

/// A flag with one value of the configuration.
pub struct Flag {
    /// Name without dashes.
    pub name: &'static str,
    /// Placeholder of the value in help.
    pub value_name: &'static str,
}

const fn flag(name: &'static str, value_name: &'static str) -> Option<Flag> {
    Some(Flag { name, value_name })
}

impl DaemonKey {
    /// Returns true if the flag may be repeated: it has one item of a list.
    pub fn is_repeated(&self) -> bool {
        matches!(&self.key.kind, Kind::List(_, _, Item::Text))
    }

    /// Returns the row in the documentation.
    pub fn row(&self) -> String {
        let row = self.key.row();
        let row = row.trim_end_matches(" |");
        match &self.flag {
            None => format!("{row} |"),
            Some(flag) if self.is_repeated() => {
                format!("{row}. Flag `--{}`, which may be repeated |", flag.name)
            }
            Some(flag) => format!("{row}. Flag `--{}` |", flag.name),
        }
    }

    /// Returns the line in a page of `lunette help`.
    pub(super) fn help_line(&self) -> KeyLine {
        let mut line = self.key.help_line();
        if let Some(flag) = &self.flag {
            line[3].push_str(&format!(". Flag --{}", flag.name));
        }
        line
    }

    /// Returns the help of the flag: meaning, words and default of its key.
    pub fn flag_help(&self) -> String {
        let [name, _, default, meaning] = self.key.help_line();
        let values = match &self.key.kind {
            Kind::List(_, _, Item::Text) => "; may be given several times".to_owned(),
            Kind::Word(words) => format!(": {}", words.join(", ")),
            Kind::Sections(..) => format!(": see `lunette help {}`", name.replace('_', "-")),
            _ => String::new(),
        };
        let default = match default.as_str() {
            NONE | "see its section" => String::new(),
            default => format!(" [default: {default}]"),
        };
        let (first, rest) = meaning.split_at(1);
        let first = first.to_uppercase();
        format!("{first}{rest}{values}{default}")
    }
}

fn read_exports(kind: &'static ExportKind, reader: &mut Reader<'_, '_>, draft: &mut ConfigDraft) {
    for fields in reader.objects(kind.table, kind.example) {
        draft.exports.push(kind.read(fields, reader.diagnostics));
    }
}

/// Declares a top-level key, with its flag.
macro_rules! daemon_key {
    ($flag:expr, $($key:tt)+) => {
        DaemonKey { key: key! { $($key)+ }, flag: $flag }
    };
}

/// Declares a list of objects, which are written with their own keys.
macro_rules! sections {
    ($name:literal: $documented:literal; $example:expr; $help:literal; $read:expr) => {
        daemon_key! { None, $name: Kind::Sections($documented, $example); NONE; RunTime::RELOAD; $help; read $read; get |_| None }
    };
}

/// All top-level keys.
pub static DAEMON_KEYS: &[DaemonKey] = &[
    daemon_key! { flag("control", "PATH"),
        "control": SOCKET;
        "`/run/lunette/lunette.sock` for root, else `$XDG_RUNTIME_DIR/lunette.sock`"; RunTime::RESTART;
        "control socket: commands, API, metrics"; both control
    },
    daemon_key! { None, "control_group": Kind::Text("a group of `/etc/group`", GROUP_ALLOWED); NONE; RunTime::RESTART;
        "members may change all objects over the control socket, and name files in `allow_paths` only"; both access.control_group
    },
    daemon_key! { None, "control_readers": Kind::Text("a group of `/etc/group`", GROUP_ALLOWED); NONE; RunTime::RESTART;
        "members may read over the control socket"; both access.control_readers
    },
    daemon_key! { flag("state", "DIR"),
        "state": Kind::Text("path of a folder", FOLDER_ALLOWED);
        "`$STATE_DIRECTORY`, `/var/lib/lunette` for root, else `~/.local/state/lunette`"; RunTime::RESTART;
        "[persistent state](operations.md#state). Changes at run time survive a restart only if this key, `--state` or systemd \
            chose the folder"; both state
    },
    daemon_key! { flag("metrics-listen", "ADDRESS:PORT"),
        "metrics_listen": ADDRESS; NONE; RunTime::RESTART; "serves `/metrics` over TCP";
        both metrics_listen
    },
    daemon_key! { flag("sandbox", "MODE"),
        "sandbox": sandbox::Mode::KIND; "`threads`"; RunTime::RESTART;
        "[confinement](security.md#the-sandbox) of the process and its threads to the necessary system calls and files";
        both sandbox
    },
    daemon_key! { flag("sandbox-path", "PATH"),
        "sandbox_paths": Kind::List("list of paths", PATHS_ALLOWED, Item::Text); NONE; RunTime::RESTART;
        "folders and files that the sandbox allows in addition to those of disks, sockets and state";
        read |key, reader, draft| draft.sandbox_paths.extend(read_texts::<_, _, PathBuf>(key, reader));
        get |config| texts(config.sandbox_paths.iter().map(|path| path.to_string_lossy()))
    },
    daemon_key! { flag("api-listen", "ADDRESS:PORT"),
        "api_listen": ADDRESS; NONE; RunTime::RESTART;
        "serves the [API](api.md) over TCP to clients with a token; needs `token_file`";
        both access.api_listen
    },
    daemon_key! { flag("api-name", "NAME"),
        "api_names": Kind::List("list of host names", NAMES_ALLOWED, Item::Text); NONE; RunTime::RESTART;
        "names that browsers may use for the [API](api.md#access), besides `localhost` and IP addresses";
        read |key, reader, draft| draft.access.api_names.extend(read_texts::<_, _, String>(key, reader));
        get |config| texts(&config.access.api_names)
    },
    daemon_key! { flag("allow-path", "PATH"),
        "allow_paths": Kind::List("list of paths", PATHS_ALLOWED, Item::Text);
        "the folders of the disks and sockets in the configuration file"; RunTime::RESTART;
        "folders and devices that members of `control_group` and clients with the token may name in requests; root and the \
            daemon's user may name every file";
        read |key, reader, draft| draft.access.allow_paths.extend(read_texts::<_, _, PathBuf>(key, reader));
        get |config| texts(config.access.allow_paths.iter().map(|path| path.to_string_lossy()))
    },
    daemon_key! { flag("token-file", "FILE"),
        "token_file": SECRET_FILE; NONE; RunTime::RESTART_REREAD;
        "token that allows changes, with files in `allow_paths` only"; both access.token_file
    },
    daemon_key! { flag("readers-token-file", "FILE"),
        "readers_token_file": SECRET_FILE; NONE; RunTime::RESTART_REREAD; "token that allows reading";
        both access.readers_token_file
    },
    daemon_key! { flag("tls-certificate", "FILE"),
        "tls_certificate": PEM_FILE; NONE; RunTime::ONLY_RELOAD_REREAD;
        "certificate of the daemon and those of intermediate authorities. The API and metrics over TCP are then served with \
            [TLS](security.md#tls); needs `tls_key`"; both tls.certificate
    },
    daemon_key! { flag("tls-key", "FILE"),
        "tls_key": Kind::Text("path of a PEM file of mode 600 or 640", PEM_ALLOWED); NONE; RunTime::ONLY_RELOAD_REREAD;
        "private key of `tls_certificate`"; both tls.key
    },
    daemon_key! { flag("api-client-ca", "FILE"),
        "api_client_ca": PEM_FILE; NONE; RunTime::ONLY_RELOAD_REREAD;
        "certificate authorities: clients of the API and metrics over TCP need a certificate of one of them, in addition to the token; \
            needs `tls_certificate`"; both access.api_client_ca
    },
    daemon_key! { flag("nbd-client-ca", "FILE"),
        "nbd_client_ca": PEM_FILE; NONE; RunTime::ONLY_RELOAD_REREAD;
        "certificate authorities: clients of NBD exports with `tls` need a certificate of one of them; needs `tls_certificate`"; both tls.nbd_client_ca
    },
    daemon_key! { flag("discovery-auth", "FILE"),
        "discovery_auth": SECRET_FILE; NONE; RunTime::ONLY_RELOAD;
        "CHAP users of iSCSI discovery sessions"; both discovery_auth
    },
    daemon_key! { flag("workers", "N"),
        "workers": Kind::Number("", 1..=WORKERS_MAX as u64); "half of the CPUs, at most 4"; RunTime::RESTART; "number of threads for I/O";
        set workers.count; get |config| match &config.workers.placement {
            Placement::Count(count) => count.value(),
            Placement::Cpus(_) => None,
        }
    },
    daemon_key! { flag("cpus", "N,N,..."),
        "cpus": Kind::List("list of CPU numbers, at most 128", CPUS_ALLOWED, Item::Number); NONE; RunTime::RESTART;
        "starts one worker for each CPU, pinned to it, instead of `workers`";
        read |key, reader, draft| draft.workers.cpus = read_cpus(reader, key.name);
        get |config| match &config.workers.placement {
            Placement::Count(_) => None,
            Placement::Cpus(cpus) => Some(json!(cpus)),
        }
    },
    daemon_key! { flag("poll", "off|auto|always"),
        "poll": <PollMode as Choice>::KIND; "`auto`"; RunTime::RESTART;
        "[polling](performance.md#polling) of workers before they sleep. `auto`: while polling finds work, at most 50 µs for clients and 100 µs \
            for disks, and not while another thread wants the CPU. `off`: never. `always`: workers never sleep";
        set config.workers.poll; get |config| config.workers.poll.value()
    },
    daemon_key! { flag("poll-us", "N|always"),
        "poll_us": Kind::Poll; NONE; RunTime::RESTART;
        "replaces `poll` for workers with guests: maximum polling time before a worker sleeps. The actual time adapts below it. 0: no polling";
        set config.workers.ring_poll; get |config| config.workers.ring_poll.value()
    },
    daemon_key! { flag("network-poll-us", "N|always"),
        "network_poll_us": Kind::Poll; NONE; RunTime::RESTART; "replaces `poll` for workers with iSCSI and NBD connections only: maximum polling time before a worker sleeps";
        set config.workers.network_poll; get |config| config.workers.network_poll.value()
    },
    daemon_key! { flag("disk-poll-us", "N|always"),
        "disk_poll_us": Kind::Poll; NONE; RunTime::RESTART;
        "replaces `poll` for disks: maximum polling time of a worker that waits for a disk. It sleeps if it expects a longer wait";
        set config.workers.disk_poll; get |config| config.workers.disk_poll.value()
    },
    sections! { "disk": "list of tables, `[[disk]]`"; "tables with the header [[disk]]"; "[disks](#disks)";
        |key, reader, draft| {
            for fields in reader.objects(key.name, &key.kind.allowed()) {
                draft.disks.push(read_disk(fields, reader.diagnostics));
            }
        }
    },
    sections! { "vhost_blk": "list of tables, `[[vhost_blk]]`"; VHOST_BLK.example; "[virtio-blk exports](#virtio-blk-exports)";
        |_, reader, draft| read_exports(&VHOST_BLK, reader, draft)
    },
    sections! { "vhost_scsi": "list of tables, `[[vhost_scsi]]`"; VHOST_SCSI.example; "[virtio-scsi exports](#virtio-scsi-exports)";
        |_, reader, draft| read_exports(&VHOST_SCSI, reader, draft)
    },
    sections! { "iscsi": "list of tables, `[[iscsi]]`"; ISCSI.example; "[iSCSI targets](#iscsi-targets)";
        |_, reader, draft| read_exports(&ISCSI, reader, draft)
    },
    sections! { "nbd": "list of tables, `[[nbd]]`"; NBD.example; "[NBD exports](#nbd-exports)";
        |_, reader, draft| read_exports(&NBD, reader, draft)
    },
    daemon_key! { flag("iscsi-limits", "KEY=VALUE,..."),
        "iscsi_limits": Kind::Sections("table, `[iscsi_limits]`", "a table with the header [iscsi_limits]");
        "see its section"; RunTime::RESTART; "[limits of iSCSI initiators](#limits-of-iscsi-initiators)";
        read |key, reader, draft| {
            if let Some(fields) = reader.table(key.name, &key.kind.allowed()) {
                draft.iscsi_limits = read_iscsi_limits(fields, reader.diagnostics);
            }
        };
        get |config| Some(json_of(config.iscsi_limits.values()))
    },
];

/// Reads the top-level table of a file.
pub fn read_file(fields: &Fields, diagnostics: &mut Diagnostics) -> ConfigDraft {
    let mut reader = Reader::new(fields, "configuration", diagnostics);
    let mut draft = ConfigDraft::default();
    for DaemonKey { key, .. } in DAEMON_KEYS {
        draft.read(key, &mut reader);
    }
    reader.finish(|key| match key {
        "disks" => Some("write one table with the header [[disk]] for each disk".to_owned()),
        _ => None,
    });
    draft
}

impl Config {
    /// Returns the values of the daemon's own keys.
    pub fn daemon_values(&self) -> Vec<KeyValue> {
        key_values(DAEMON_KEYS.iter().map(|known| &known.key), self)
    }

    /// Returns the keys with values in `next` that a running daemon cannot adopt.
    pub fn fixed_difference(&self, next: &Config) -> Vec<&'static str> {
        let restart = [RunTime::RESTART, RunTime::RESTART_REREAD];
        let keys = DAEMON_KEYS.iter().map(|known| &known.key);
        let fixed = keys.filter(|key| restart.contains(&key.run_time));
        differing(fixed, self, next).map(|key| key.name).collect()
    }
}

impl ConfigDraft {
    /// Reads a key, and keeps its location.
    pub fn read(&mut self, key: &'static Key<ConfigDraft, Config>, reader: &mut Reader<'_, '_>) {
        (key.read)(key, reader, self);
        let given = reader.location(key.name).cloned();
        self.given.extend(given.map(|at| (key.name, at)));
    }
}

#[cfg(test)]
mod tests {
    use block::PollLimit;

    use crate::model::WorkersConfig;
    use crate::{Flags, Surroundings, parse};

    use super::*;

    fn polling(text: &str, flags: &Flags) -> WorkersConfig {
        let config = parse(Some(("f", text)), flags, &Surroundings::of_this_process());
        config.unwrap_or_else(|error| panic!("{error}")).workers
    }

    #[test]
    fn workers_poll_automatically_without_limits_of_their_own_by_default() {
        let workers = polling("", &Flags::default());
        let limits = [workers.ring_poll, workers.network_poll, workers.disk_poll];
        assert_eq!((workers.poll, limits), (PollMode::Auto, [None; 3]));
    }

    #[test]
    fn limits_of_each_kind_are_read_beside_the_mode_from_flags_and_files() {
        let flags = Flags::default()
            .with("poll", "off")
            .with("poll-us", "always")
            .with("network-poll-us", "20")
            .with("disk-poll-us", "0");
        let file = "poll = 'off'\npoll_us = 'always'\nnetwork_poll_us = 20\ndisk_poll_us = 0\n";
        for workers in [
            polling("poll = 'always'\npoll_us = 7\n", &flags),
            polling(file, &Flags::default()),
        ] {
            let limits = [workers.ring_poll, workers.network_poll, workers.disk_poll];
            let read = [PollLimit::Always, PollLimit::Micros(20), PollLimit::Never];
            assert_eq!((workers.poll, limits), (PollMode::Off, read.map(Some)));
            let used = workers.poll_limits();
            assert_eq!([used.rings, used.network, used.disk], read);
        }
    }
}

//! Keys of disks on exports of NBD servers: address and connections.

use nbd::address::ExportAddress;
use serde_json::json;

use super::devices::{BlockDeviceConfig, ExportCache, NbdDiskConfig};
use super::diagnostics::{Mistake, MistakeKind};
use super::disk_draft::DiskKey;
use super::key::{Kind, REQUIRED, RunTime};
use super::model::DiskConfig;
use super::setting::{Choice, Setting, key};
use super::value::Reader;

/// Returns the configuration of a disk on an export.
pub fn config(disk: &DiskConfig) -> Option<&NbdDiskConfig> {
    match &disk.backend {
        BlockDeviceConfig::Nbd(nbd) => Some(nbd),
        _ => None,
    }
}

const NBD: &[&str] = &["nbd"];

pub const URI: DiskKey = key! {
    "uri": Kind::Text("`nbd://HOST[:PORT]/EXPORT` or `nbd+unix:///EXPORT?socket=PATH`", ExportAddress::FORM);
    REQUIRED; RunTime::AddAnew, of NBD; "the export of an [NBD server](nbd.md#disks-on-an-nbd-server). TLS (`nbds://`) is not supported yet";
    read |key, reader, disk| disk.nbd.address = read_uri(key, reader);
    get |disk| Some(json!(config(disk)?.address.to_string()))
};

fn read_uri(key: &DiskKey, reader: &mut Reader<'_, '_>) -> Option<ExportAddress> {
    let text = key.text(reader)?;
    match text.value.parse() {
        Ok(address) => Some(address),
        Err(reason) => {
            let message = format!("`{}`: {reason}", key.name);
            let mistake = Mistake::new(MistakeKind::Value, &text.location, message);
            reader
                .diagnostics()
                .push(mistake.allowed(ExportAddress::FORM));
            None
        }
    }
}

pub const CACHE: DiskKey = key! {
    "cache": ExportCache::KIND; "`writeback`"; RunTime::AddAnew, of NBD;
    "`writeback`: the server may have a cache until a flush. `writethrough`: each write is durable when it completes (FUA, or a flush after it)";
    set nbd.cache; get |disk| config(disk)?.cache.value_unless(&ExportCache::default())
};
pub const MULTI_CONN: DiskKey = key! {
    "multi_conn": Kind::Boolean; "`true`"; RunTime::AddAnew, of NBD;
    "each worker has its own connection, if the server announces that its connections see each other's writes (`CAN_MULTI_CONN`). `false`: \
        one connection for all workers";
    set nbd.multi_conn; get |disk| config(disk)?.multi_conn.value_unless(&true)
};
pub const RESPONSE_TIMEOUT: DiskKey = key! {
    "response_timeout": Kind::Number("seconds", 0..=86_400); "`60`"; RunTime::AddAnew, of NBD;
    "time without a reply to requests in flight after which a connection is regarded as lost. 0: no limit";
    set nbd.response_timeout; get |disk| config(disk)?.response_timeout.value_unless(&NbdDiskConfig::RESPONSE_TIMEOUT)
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Flags, Surroundings, parse, render};

    fn by_flag(disk: &str) -> Result<NbdDiskConfig, String> {
        let flags = Flags {
            disk: vec![disk.to_owned()],
            ..Flags::default()
        };
        let parsed = parse(None, &flags, &Surroundings::of_this_process());
        let parsed = parsed.map_err(|mistakes| mistakes.to_string())?;
        let text = render(&parsed);
        let again = parse(
            Some(("lunette.toml", &text)),
            &Flags::default(),
            &Surroundings::of_this_process(),
        );
        let again = again.map_err(|mistakes| mistakes.to_string())?;
        assert_eq!(again.disks, parsed.disks, "{text}");
        Ok(config(&parsed.disks[0]).expect("an NBD disk").clone())
    }

    #[test]
    fn flag_and_file_describe_the_same_disk() {
        let tcp =
            by_flag("d=nbd://[::1]:10810/a%2Cb,multi_conn=off,queue_depth=8,cache=writethrough,ro")
                .unwrap();
        assert_eq!(tcp.address.export, "a,b");
        assert_eq!(tcp.address.to_string(), "nbd://[::1]:10810/a,b");
        assert_eq!((tcp.multi_conn, tcp.queue_depth), (false, 8));
        assert_eq!(tcp.cache, ExportCache::Writethrough);
        assert_eq!((tcp.replacement_timeout, tcp.response_timeout), (120, 60));
        let unix = "d=nbd+unix:///vm?socket=/run/n.sock,replacement_timeout=0,response_timeout=5";
        let unix = by_flag(unix).unwrap();
        assert_eq!(unix.socket(), Some(&"/run/n.sock".into()));
        assert_eq!((unix.replacement_timeout, unix.response_timeout), (0, 5));
    }

    #[test]
    fn wrong_addresses_and_keys_of_other_disks_are_refused() {
        for (wrong, part) in [
            ("d=nbds://h/a", "TLS is not supported yet"),
            ("d=nbd", "uri"),
            ("d=nbd:h:10809", "nbd://HOST[:PORT]/EXPORT"),
            ("d=nbd+unix:///a", "nbd+unix:///EXPORT?socket=PATH"),
            ("d=nbd://h/a,size=1M", "the server determines the size"),
            (
                "d=nbd://h/a,connections=2",
                "`connections` belongs to the back end `iscsi`",
            ),
            ("d=nbd://h/a,cache=none", "`writeback` or `writethrough`"),
        ] {
            let refused = by_flag(wrong).unwrap_err();
            assert!(refused.contains(part), "{wrong}: {refused}");
        }
    }
}

//! Keys of disks on exports of NBD servers: address and connections.

use nbd::address::ExportAddress;

use super::device_keys::{DiskKey, device_key};
use super::key::{Kind, REQUIRED};

/// Keys of disks on exports of NBD servers.
pub static NBD_DISK_KEYS: &[DiskKey] = &[
    device_key! {
        "uri": Kind::Text("`nbd://HOST[:PORT]/EXPORT`, `nbds://HOST[:PORT]/EXPORT` or `nbd+unix:///EXPORT?socket=PATH`", ExportAddress::FORM); REQUIRED;
        "the export of an [NBD server](nbd.md#disks-on-an-nbd-server). `nbds://` uses TLS";
        [Nbd] (address)
    },
    device_key! {
        "cache": Kind::Word(&["writeback", "writethrough"]); "`writeback`";
        "`writeback`: the server may have a cache until a flush. `writethrough`: each write is durable when it completes (FUA, or a flush after it)";
        [Nbd] (cache)
    },
    device_key! {
        "multi_conn": Kind::Boolean; "`true`";
        "each worker has its own connection, if the server announces that its connections see each other's writes (`CAN_MULTI_CONN`). `false`: \
            one connection for all workers"; [Nbd] (multi_conn)
    },
    device_key! {
        "response_timeout": Kind::Number("seconds", 0..=86_400); "`60`";
        "time without a reply to requests in flight after which a connection is regarded as lost. 0: no limit"; [Nbd] (response_timeout)
    },
];

#[cfg(test)]
mod tests {
    use crate::{BlockDeviceConfig, CacheMode, Flags, NbdDiskConfig, Surroundings, parse, render};

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
        match &parsed.disks[0].backend {
            BlockDeviceConfig::Nbd(nbd) => Ok(NbdDiskConfig::clone(nbd)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn flag_and_file_describe_the_same_disk() {
        let tcp =
            by_flag("d=nbd://[::1]:10810/a%2Cb,multi_conn=off,queue_depth=8,cache=writethrough,ro")
                .unwrap();
        assert_eq!(tcp.address.export, "a,b");
        assert_eq!(tcp.address.to_string(), "nbd://[::1]:10810/a,b");
        assert_eq!((tcp.multi_conn, tcp.queue_depth), (false, 8));
        assert_eq!(tcp.cache, CacheMode::Writethrough);
        assert_eq!((tcp.replacement_timeout, tcp.response_timeout), (120, 60));
        let unix = "d=nbd+unix:///vm?socket=/run/n.sock,replacement_timeout=0,response_timeout=5";
        let unix = by_flag(unix).unwrap();
        assert_eq!(unix.socket(), Some(std::path::Path::new("/run/n.sock")));
        assert_eq!((unix.replacement_timeout, unix.response_timeout), (0, 5));
    }

    #[test]
    fn wrong_addresses_and_keys_of_other_disks_are_refused() {
        for (wrong, part) in [
            (
                "d=nbds+unix:///a?socket=/s",
                "TLS is supported over TCP only",
            ),
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

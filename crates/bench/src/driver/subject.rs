//! Subjects of a measurement and their syntax: `vhost-user-blk:SOCKET`, `vhost-user-scsi:SOCKET:TARGET:LUN`, `file:PATH`,
//! `iscsi://HOST/TARGET/LUN`, `nbd://HOST/EXPORT`, `nbd+unix:///EXPORT?socket=PATH`.

use std::path::PathBuf;

use anyhow::{Result, bail};

use nbd::address::ExportAddress;

use super::{SessionKeys, UnitAddress, parse_address};

/// Kinds of subjects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A virtio-blk device on a vhost-user socket.
    VhostBlk,
    /// A logical unit of a virtio-scsi controller on a vhost-user socket.
    VhostScsi {
        /// Target number.
        target: u8,
        /// Logical unit number.
        lun: u16,
    },
    /// A file or a block device, through io_uring.
    File,
    /// A logical unit of an iSCSI target.
    Iscsi,
    /// An export of an NBD server.
    Nbd,
}

impl Kind {
    fn is_vhost(self) -> bool {
        matches!(self, Kind::VhostBlk | Kind::VhostScsi { .. })
    }
}

/// A device to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// Name in reports: the subject as written, or `name=`.
    pub name: String,
    /// Kind of device.
    pub kind: Kind,
    /// Socket or file; for iSCSI the part after `iscsi://`; for NBD the address.
    pub path: PathBuf,
    /// Process ID of the device; `None`: the process that listens on the socket or accepted the connection.
    pub pid: Option<u32>,
    /// Control socket of the Lunette daemon.
    pub control: Option<PathBuf>,
    /// Use O_DIRECT for files, unless the job sets it.
    pub direct: bool,
    /// Use CRC32C digests (iSCSI).
    pub digests: bool,
    /// Log the pages that the device writes, as during a live migration (vhost-user).
    pub dirty_log: bool,
    /// Login keys (iSCSI).
    pub keys: SessionKeys,
}

/// Syntax of subjects.
pub const FORMS: &str = "vhost-user-blk:SOCKET, vhost-user-scsi:SOCKET[:TARGET:LUN], file:PATH, iscsi://HOST[:PORT]/TARGET/LUN, nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH, then ,pid=N ,control=SOCKET ,name=NAME ,direct=0|1 ,digests=0|1 ,dirty_log=0|1; for a session of several connections ,connections=N and with it ,max_burst=BYTES ,first_burst=BYTES ,max_segment=BYTES ,immediate_data=0|1 ,initial_r2t=0|1";

impl Subject {
    /// Returns true if `text` begins like a subject.
    pub fn looks_like_one(text: &str) -> bool {
        ["vhost-user-blk:", "vhost-user-scsi:", "file:", "iscsi:"]
            .iter()
            .any(|word| text.starts_with(word))
            || ExportAddress::looks_like_one(text)
    }

    /// Parses a subject.
    pub fn parse(text: &str) -> Result<Subject> {
        let mut parts = text.split(',');
        let place = parts.next().unwrap_or_default();
        let (kind, path) = match place.split_once(':') {
            Some(("vhost-user-blk", path)) => (Kind::VhostBlk, path),
            Some(("vhost-user-scsi", path)) => scsi(text, path)?,
            Some(("file", path)) => (Kind::File, path),
            Some(("iscsi", place)) => {
                let Some(place) = place.strip_prefix("//") else {
                    bail!("`{text}` is not a subject: {FORMS}");
                };
                UnitAddress::parse(place)?;
                (Kind::Iscsi, place)
            }
            _ if ExportAddress::looks_like_one(place) => {
                parse_address(place)?;
                (Kind::Nbd, place)
            }
            _ => bail!("`{text}` is not a subject: {FORMS}"),
        };
        if path.is_empty() {
            bail!("`{text}` names no path: {FORMS}");
        }
        let mut subject = Subject {
            name: place.to_owned(),
            kind,
            path: PathBuf::from(path),
            pid: None,
            control: None,
            direct: true,
            digests: false,
            dirty_log: false,
            keys: SessionKeys::default(),
        };
        for part in parts {
            match part.split_once('=') {
                Some(("pid", pid)) => match pid.parse() {
                    Ok(pid) => subject.pid = Some(pid),
                    Err(_) => bail!("`{text}`: pid={pid} is not a process number"),
                },
                Some(("control", socket)) => subject.control = Some(PathBuf::from(socket)),
                Some(("name", name)) => subject.name = name.to_owned(),
                Some(("direct", "0")) if kind == Kind::File => subject.direct = false,
                Some(("direct", "1")) if kind == Kind::File => subject.direct = true,
                Some(("digests", "0")) if kind == Kind::Iscsi => subject.digests = false,
                Some(("digests", "1")) if kind == Kind::Iscsi => subject.digests = true,
                Some(("dirty_log", "0")) if kind.is_vhost() => subject.dirty_log = false,
                Some(("dirty_log", "1")) if kind.is_vhost() => subject.dirty_log = true,
                Some((key, value)) if kind == Kind::Iscsi && subject.keys.take(key, value) => {}
                _ => bail!("`{text}`: `{part}` is not an option of this subject: {FORMS}"),
            }
        }
        if subject.keys.is_idle() {
            bail!("`{text}`: keys of the login need connections=N; hint: add connections=1");
        }
        Ok(subject)
    }

    /// Parses a job file's `filename`: a subject or a path.
    pub fn of_filename(name: &str, direct: bool) -> Result<Subject> {
        if Subject::looks_like_one(name) {
            return Subject::parse(name);
        }
        Ok(Subject {
            name: name.to_owned(),
            kind: Kind::File,
            path: PathBuf::from(name),
            pid: None,
            control: None,
            direct,
            digests: false,
            dirty_log: false,
            keys: SessionKeys::default(),
        })
    }
}

fn scsi<'a>(text: &str, place: &'a str) -> Result<(Kind, &'a str)> {
    let mut parts = place.splitn(3, ':');
    let path = parts.next().unwrap_or_default();
    let (target, lun) = match (parts.next(), parts.next()) {
        (None, None) => (0, 0),
        (Some(target), Some(lun)) => match (target.parse(), lun.parse()) {
            (Ok(target), Ok(lun)) if lun < 16_384 => (target, lun),
            _ => bail!("`{text}`: the target is 0 to 255, the LUN 0 to 16383"),
        },
        _ => bail!("`{text}`: a target without a LUN; hint: SOCKET:TARGET:LUN"),
    };
    Ok((Kind::VhostScsi { target, lun }, path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_read() {
        let subject = Subject::parse("vhost-user-scsi:/s:3:40,pid=12,control=/c,name=x").unwrap();
        assert_eq!(subject.kind, Kind::VhostScsi { target: 3, lun: 40 });
        assert_eq!((subject.name.as_str(), subject.pid), ("x", Some(12)));
        assert_eq!(subject.control, Some(PathBuf::from("/c")));
        let file = Subject::parse("file:/d,direct=0").unwrap();
        assert!(file.kind == Kind::File && !file.direct);
        let logged = Subject::parse("vhost-user-blk:/s,dirty_log=1").unwrap();
        assert!(logged.dirty_log && !subject.dirty_log);
        let iscsi = Subject::parse("iscsi://h:3261/iqn.a:b/0,digests=1,pid=4").unwrap();
        assert!(iscsi.kind == Kind::Iscsi && iscsi.digests);
        for address in ["nbd://h:10810/d0", "nbd+unix:///d0?socket=/s"] {
            let nbd = Subject::parse(&format!("{address},name=n")).unwrap();
            assert_eq!((nbd.kind, nbd.path), (Kind::Nbd, PathBuf::from(address)));
        }
        let blk = Subject::parse("vhost-user-blk:/s").unwrap();
        assert_eq!(
            (blk.kind, blk.name.as_str()),
            (Kind::VhostBlk, "vhost-user-blk:/s")
        );
    }

    #[test]
    fn what_is_none_is_explained() {
        for text in [
            "/s",
            "file:",
            "vhost-user-scsi:/s:1",
            "vhost-user-scsi:/s:1:99999",
            "vhost-user-blk:/s,pid=x",
            "vhost-user-blk:/s,direct=0",
            "vhost-user-blk:/s,depth=3",
            "vhost-user-blk:/s,digests=1",
            "iscsi://h/iqn.a:b/0,dirty_log=1",
            "iscsi://h/iqn.a:b",
            "iscsi:h/iqn.a:b/0",
            "iscsi://h/iqn.a:b/0,connections=17",
            "iscsi://h/iqn.a:b/0,max_burst=65536",
            "file:/d,connections=2",
            "nbd://h/d0,digests=1",
            "nbds://h/d0",
        ] {
            let error = Subject::parse(text).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }
}

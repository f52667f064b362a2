//! NBD export of one disk, for any number of clients.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use nbd_server::{Address, ExportOptions, Server};
use reactor::Rights;
use scsi_exec::Hold;

use super::vhost::numbers;
use super::{Endpoint, ExportDevice, Opening};
use crate::objects::absolute;
use config::{ExportConfig, LunConfig, SOCKET_PATH_MAX};

/// Opens an NBD export.
pub(super) fn open(
    export: &ExportConfig,
    opening: Opening<'_>,
) -> Result<(Arc<dyn ExportDevice>, Endpoint), String> {
    if opening.inherited.is_some() {
        return Err("an NBD export cannot use a socket of the parent process; hint: remove it from --fd or from the socket unit".to_owned());
    }
    let disk = opening.only_disk(export)?;
    let unix = export.socket.as_deref().map(from_root).map(Address::Unix);
    let tcp = export.nbd.listen.map(Address::Tcp);
    let options = ExportOptions {
        dirty: None,
        name: export.name.clone(),
        export_name: export.export_name().to_owned(),
        description: export.nbd.description.clone().unwrap_or_default(),
        read_only: export.nbd.read_only,
        tls: export.nbd.tls,
        addresses: unix.into_iter().chain(tcp).collect(),
    };
    // Creating the unit resumes a sanitize operation that a restart interrupted, on any transport.
    let unit = opening.units.unit(disk);
    // NBD cannot report a missing medium, so SCSI initiators must not eject it.
    let medium = disk.is_removable().then(|| unit.hold_medium());
    let server = Arc::clone(&opening.transports.nbd);
    let rights: Rights = numbers(&export.rights)?;
    let open = server.add_export(options, rights, Arc::clone(disk));
    let open = open.map_err(|error| error.to_string())?;
    let endpoint = match open.is_empty() {
        true => Endpoint::Waiting,
        false => Endpoint::Nbd(open),
    };
    let device = OpenNbd {
        name: export.name.clone(),
        server,
        _medium: medium,
    };
    Ok((Arc::new(device), endpoint))
}

/// Returns the path from the root, so that a socket has one name for all exports. A path that would be too long for a socket stays as it is.
fn from_root(path: &Path) -> PathBuf {
    let absolute = absolute(path);
    match absolute.as_os_str().len() <= SOCKET_PATH_MAX {
        true => absolute,
        false => path.to_owned(),
    }
}

struct OpenNbd {
    name: String,
    server: Arc<Server>,
    _medium: Option<scsi::MediumHold>,
}

impl ExportDevice for OpenNbd {
    fn close(&self) {
        if !self.server.remove_export(&self.name) {
            tracing::warn!(
                export = self.name,
                "connections did not end in time, removing the export anyway"
            );
        }
    }

    fn detach_luns(&self, _luns: &[LunConfig]) {}

    fn end_tasks(&self, _luns: &[LunConfig], _abort: bool, _hold: &Hold) {}

    fn notify_removed(&self, _luns: &[LunConfig]) {}

    /// Requests are checked against the new size. A client sees it when it connects again: the protocol has no notification.
    fn notify_resized(&self, _luns: &[LunConfig]) {}
}

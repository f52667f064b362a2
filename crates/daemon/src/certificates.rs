//! Certificates of the daemon, from the files of its configuration.

use config::Config;
use tls::{Identity, ServerFiles};

/// Reads the files for the API and metrics over TCP; `None`: these are not encrypted.
///
/// # Errors
/// The reason why a file is unusable.
pub(crate) fn of_api(config: &Config) -> Result<Option<Identity>, String> {
    let Some(files) = files_of_api(config) else {
        return Ok(None);
    };
    let read = files.read().map(Some);
    read.map_err(|error| format!("TLS: {error}"))
}

/// Returns the files for the API and metrics over TCP.
pub(crate) fn files_of_api(config: &Config) -> Option<ServerFiles> {
    Some(ServerFiles {
        certificate: config.tls.certificate.clone()?,
        key: config.tls.key.clone()?,
        client_ca: config.access.api_client_ca.clone(),
    })
}

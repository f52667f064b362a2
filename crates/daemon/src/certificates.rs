//! Certificates of the daemon, from the files of its configuration.

use std::path::PathBuf;

use config::Config;
use tls::{Identity, ServerFiles};

/// Identities of the daemon's servers. `None`: a server has no TLS.
pub(crate) struct Identities {
    /// For the API and metrics over TCP.
    pub api: Option<Identity>,
    /// For NBD exports with TLS.
    pub nbd: Option<Identity>,
}

/// Reads the files of all servers.
///
/// # Errors
/// The reason why a file is unusable.
pub(crate) fn read(config: &Config) -> Result<Identities, String> {
    let (certificate, key) = (&config.tls.certificate, &config.tls.key);
    let read = |client_ca: &Option<PathBuf>| {
        let Some((certificate, key)) = certificate.clone().zip(key.clone()) else {
            return Ok(None);
        };
        let files = ServerFiles {
            certificate,
            key,
            client_ca: client_ca.clone(),
        };
        let identity = files.read().map(Some);
        identity.map_err(|error| format!("TLS: {error}"))
    };
    Ok(Identities {
        api: read(&config.access.api_client_ca)?,
        nbd: read(&config.tls.nbd_client_ca)?,
    })
}

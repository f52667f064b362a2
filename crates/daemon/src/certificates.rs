//! Certificates of the daemon, from the files of its configuration.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use ::control::CertificateStatus;
use config::Config;
use tls::{Identity, ServerFiles, Validity};

use crate::objects::Servers;

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

impl Identities {
    /// Returns the reason why clients refuse the certificate at present.
    pub fn fault(&self, config: &Config) -> Option<String> {
        let certificate = config.tls.certificate.as_ref()?;
        let identity = self.api.as_ref().or(self.nbd.as_ref())?;
        let fault = fault(identity.validity()?)?;
        Some(format!("TLS: {}: {fault}", certificate.display()))
    }

    /// Logs the reason why clients refuse the certificate at present.
    pub fn warn(&self, config: &Config) {
        if let Some(fault) = self.fault(config) {
            tracing::warn!("{fault}");
        }
    }
}

/// Returns the certificate of the servers with its validity.
pub(crate) fn status(config: &Config, servers: &Servers) -> Vec<CertificateStatus> {
    let status = || {
        let file = config.tls.certificate.as_ref()?;
        let validity = servers.api_tls.validity()?;
        Some(CertificateStatus {
            file: file.display().to_string(),
            not_before: validity.not_before,
            not_after: validity.not_after,
            warning: fault(validity),
        })
    };
    status().into_iter().collect()
}

/// Returns the reason why clients refuse a certificate at present.
fn fault(validity: Validity) -> Option<String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    let fault = validity.fault_at(i64::try_from(now.as_secs()).ok()?)?;
    Some(format!(
        "{fault}; hint: renew it, then run lunette reload; or correct the clock"
    ))
}

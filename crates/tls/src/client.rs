//! Configuration of clients.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;

use crate::files::{certificates, private_key, store_of};
use crate::provider;

/// Files with the certificate authorities of common Linux distributions.
const SYSTEM_AUTHORITIES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Files of a client.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientFiles {
    /// Authorities of server certificates; `None`: those of the system.
    pub ca: Option<PathBuf>,
    /// Certificate of the client and its private key, for servers that require one.
    pub certificate: Option<(PathBuf, PathBuf)>,
}

impl ClientFiles {
    /// Reads the files.
    ///
    /// # Errors
    /// The reason why a file is unusable, without any of its content.
    pub fn read(&self) -> Result<Arc<ClientConfig>, String> {
        let system = || {
            let mut paths = SYSTEM_AUTHORITIES.iter().map(PathBuf::from);
            paths.find(|path| path.exists())
        };
        let Some(ca) = self.ca.clone().or_else(system) else {
            return Err("this system has no file with certificate authorities".to_owned());
        };
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| format!("cannot set up TLS: {error}"))?
            .with_root_certificates(store_of(&ca, certificates(&ca)?)?);
        let config = match &self.certificate {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => builder
                .with_client_auth_cert(certificates(certificate)?, private_key(key)?)
                .map_err(|error| {
                    format!(
                        "cannot use certificate {} with key {}: {error}",
                        certificate.display(),
                        key.display()
                    )
                })?,
        };
        Ok(Arc::new(config))
    }
}

/// Returns a host name or IP address, without brackets, in the form that certificates are compared with.
///
/// # Errors
/// If it is neither.
pub fn server_name(host: &str) -> Result<ServerName<'static>, String> {
    let host = host.strip_prefix('[').unwrap_or(host);
    let host = host.strip_suffix(']').unwrap_or(host);
    ServerName::try_from(host.to_owned())
        .map_err(|_| format!("{host} is neither a host name nor an IP address"))
}

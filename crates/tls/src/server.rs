//! Configuration of servers, which a reload of the daemon replaces.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use rustls::server::WebPkiClientVerifier;

use crate::files::{certificates, private_key, store_of};
use crate::provider;
use crate::validity::Validity;

/// Files of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerFiles {
    /// Certificate of the server, then those of intermediate authorities.
    pub certificate: PathBuf,
    /// Private key of the certificate.
    pub key: PathBuf,
    /// Authorities of client certificates. With them, clients without such a certificate are refused.
    pub client_ca: Option<PathBuf>,
}

impl ServerFiles {
    /// Reads the files.
    ///
    /// # Errors
    /// The reason why a file is unusable, without any of its content.
    pub fn read(&self) -> Result<Identity, String> {
        let chain = certificates(&self.certificate)?;
        let validity = Validity::of_chain(&chain);
        let mut content = vec![chain.clone()];
        let key = private_key(&self.key)?;
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| format!("cannot set up TLS: {error}"))?;
        let builder = match &self.client_ca {
            Some(path) => {
                let authorities = certificates(path)?;
                content.push(authorities.clone());
                let store = Arc::new(store_of(path, authorities)?);
                let verifier = WebPkiClientVerifier::builder_with_provider(store, provider());
                let verifier = verifier.build();
                builder.with_client_cert_verifier(
                    verifier.map_err(|error| format!("{}: {error}", path.display()))?,
                )
            }
            None => builder.with_no_client_auth(),
        };
        let config = builder.with_single_cert(chain, key).map_err(|error| {
            format!(
                "cannot use certificate {} with key {}: {error}",
                self.certificate.display(),
                self.key.display()
            )
        })?;
        let config = Arc::new(config);
        Ok(Identity {
            config,
            content,
            validity,
        })
    }
}

/// Content of a server's files.
#[derive(Clone, Debug)]
pub struct Identity {
    config: Arc<ServerConfig>,
    /// The certificates of each file. A new key has a new certificate.
    content: Vec<Vec<CertificateDer<'static>>>,
    validity: Option<Validity>,
}

impl Identity {
    /// Returns the validity of the server's certificates; `None` if it is unknown.
    pub fn validity(&self) -> Option<Validity> {
        self.validity
    }
}

/// Present identity of a server, shared with its listeners. `None`: connections are not encrypted.
#[derive(Clone, Debug, Default)]
pub struct ServerTls(Arc<RwLock<Option<Identity>>>);

impl ServerTls {
    /// Returns the configuration for a new connection.
    pub fn get(&self) -> Option<Arc<ServerConfig>> {
        let identity = self.0.read().unwrap_or_else(PoisonError::into_inner);
        identity.as_ref().map(|present| Arc::clone(&present.config))
    }

    /// Returns the validity of the certificates; `None` without TLS, or if it is unknown.
    pub fn validity(&self) -> Option<Validity> {
        let identity = self.0.read().unwrap_or_else(PoisonError::into_inner);
        identity.as_ref().and_then(Identity::validity)
    }

    /// Returns true if clients need a certificate.
    pub fn checks_clients(&self) -> bool {
        let identity = self.0.read().unwrap_or_else(PoisonError::into_inner);
        identity.as_ref().is_some_and(|it| it.content.len() > 1)
    }

    /// Replaces the identity for new connections. Returns false if its certificates are the present ones.
    pub fn set(&self, identity: Option<Identity>) -> bool {
        let mut present = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let content = |identity: &Option<Identity>| identity.as_ref().map(|it| it.content.clone());
        if content(&present) == content(&identity) {
            return false;
        }
        *present = identity;
        true
    }
}

//! TLS 1.2 and 1.3 of servers and clients, with rustls: reads certificates and keys, and builds configurations. Does no network I/O.
//!
//! Servers: the API, metrics and NBD exports. Clients: commands and NBD disks.
#![forbid(unsafe_code)]

mod client;
mod files;
mod server;
mod session;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
mod validity;

pub use client::{ClientFiles, server_name};
pub use rustls;
pub use server::{Identity, ServerFiles, ServerTls};
pub use session::{Decrypted, RECORD_BYTES, Session};
pub use validity::Validity;

use std::sync::Arc;

use rustls::crypto::CryptoProvider;

/// Returns the cryptography, which every configuration names: no process-wide default is set.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

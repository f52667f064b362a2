//! PEM files: chains of certificates, certificate authorities, and private keys.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Maximum length of a file in bytes, more than the certificate authorities of any system.
const FILE_MAX: u64 = 4 << 20;

fn read(path: &Path, kind: &str, is_secret: bool) -> Result<Vec<u8>, String> {
    let shown = path.display();
    let failed = |error: io::Error| {
        let reason = sandbox::unreadable(path, &error);
        format!("cannot read {kind} from {shown}: {reason}")
    };
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(format!("cannot read {kind} from {shown}: not a file"));
    }
    // Packages such as ssl-cert admit a group to keys.
    if is_secret && metadata.mode() & 0o027 != 0 {
        return Err(format!(
            "{shown} has mode {:o}, so others may read or change the private key; hint: chmod 600 {shown}",
            metadata.mode() & 0o777
        ));
    }
    let mut bytes = Vec::new();
    file.take(FILE_MAX)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    Ok(bytes)
}

/// Reads the certificates of a file, in their order.
pub(crate) fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let shown = path.display();
    let bytes = read(path, "certificates", false)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let found = found.map_err(|error| format!("{shown}: malformed certificate: {error}"))?;
    match found.is_empty() {
        true => Err(format!(
            "{shown} has no certificate; hint: PEM is expected, which begins with -----BEGIN CERTIFICATE-----"
        )),
        false => Ok(found),
    }
}

/// Reads a private key, which no other user may read.
pub(crate) fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, String> {
    let shown = path.display();
    let bytes = read(path, "the private key", true)?;
    // The error of the parser may contain parts of the file.
    PrivateKeyDer::from_pem_slice(&bytes).map_err(|_| {
        format!(
            "{shown} has no private key without a password; hint: PEM is expected, as `openssl pkey -in {shown}` prints it"
        )
    })
}

/// Returns the certificate authorities that were read from a file.
pub(crate) fn store_of(
    path: &Path,
    authorities: Vec<CertificateDer<'static>>,
) -> Result<RootCertStore, String> {
    let mut store = RootCertStore::empty();
    let (added, ignored) = store.add_parsable_certificates(authorities);
    match added {
        0 => Err(format!(
            "{}: none of its {ignored} certificates can be parsed",
            path.display()
        )),
        _ => Ok(store),
    }
}

//! Handshakes in memory between servers and clients of this crate, and files that are refused. Certificates are made by openssl.

use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use rustls::{ClientConnection, ServerConnection};

use super::testing::Authority;
use super::*;

fn config_of(files: &ServerFiles) -> Result<Arc<rustls::ServerConfig>, String> {
    let shared = ServerTls::default();
    shared.set(Some(files.read()?));
    Ok(shared.get().unwrap())
}

/// Runs a handshake in memory and returns the first error.
fn shake(server: &ServerFiles, client: &ClientFiles, name: &str) -> Result<(), String> {
    let mut server =
        ServerConnection::new(config_of(server)?).map_err(|error| error.to_string())?;
    let name = server_name(name)?;
    let mut client =
        ClientConnection::new(client.read()?, name).map_err(|error| error.to_string())?;
    for _ in 0..8 {
        let mut bytes = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut bytes).unwrap();
        }
        server.read_tls(&mut bytes.as_slice()).unwrap();
        let of_server = server.process_new_packets();
        bytes.clear();
        while server.wants_write() {
            server.write_tls(&mut bytes).unwrap();
        }
        if !bytes.is_empty() {
            client.read_tls(&mut bytes.as_slice()).unwrap();
        }
        let of_client = client.process_new_packets();
        of_client.map_err(|error| format!("client: {error}"))?;
        of_server.map_err(|error| format!("server: {error}"))?;
    }
    assert!(!client.is_handshaking() && !server.is_handshaking());
    client.writer().write_all(b"ping").unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    server.read_tls(&mut bytes.as_slice()).unwrap();
    server.process_new_packets().unwrap();
    let mut text = [0; 4];
    server.reader().read_exact(&mut text).unwrap();
    assert_eq!(&text, b"ping");
    Ok(())
}

#[test]
fn both_sides_check_names_and_authorities() {
    let folder = tempfile::tempdir().unwrap();
    let [ca, other] = ["ca", "other"].map(|name| Authority::new(folder.path(), name).unwrap());
    let host = ca.issue("host", "IP:127.0.0.1,DNS:storage1").unwrap();
    let guest = ca.issue("guest", "DNS:guest").unwrap();
    let stranger = other.issue("stranger", "DNS:stranger").unwrap();
    let server = |client_ca: Option<&Authority>| ServerFiles {
        certificate: host.certificate.clone(),
        key: host.key.clone(),
        client_ca: client_ca.map(Authority::certificate),
    };
    let client = |ca: &Authority, own: Option<&testing::Issued>| ClientFiles {
        ca: Some(ca.certificate()),
        certificate: own.map(|own| (own.certificate.clone(), own.key.clone())),
    };
    for name in ["127.0.0.1", "storage1"] {
        shake(&server(None), &client(&ca, None), name).unwrap();
    }
    for name in ["127.0.0.2", "storage2"] {
        let error = shake(&server(None), &client(&ca, None), name).unwrap_err();
        assert!(error.contains("not valid for name"), "{error}");
    }
    let error = shake(&server(None), &client(&other, None), "storage1").unwrap_err();
    assert!(error.contains("UnknownIssuer"), "{error}");

    shake(&server(Some(&ca)), &client(&ca, Some(&guest)), "storage1").unwrap();
    let error = shake(&server(Some(&ca)), &client(&ca, None), "storage1").unwrap_err();
    assert!(error.contains("CertificateRequired"), "{error}");
    let wrong = client(&ca, Some(&stranger));
    let error = shake(&server(Some(&ca)), &wrong, "storage1").unwrap_err();
    assert!(error.contains("received fatal alert"), "{error}");
}

#[test]
fn unusable_files_are_refused_with_reason() {
    let folder = tempfile::tempdir().unwrap();
    let ca = Authority::new(folder.path(), "ca").unwrap();
    let [one, two] = ["one", "two"].map(|name| ca.issue(name, "DNS:one").unwrap());
    let read = |certificate: &std::path::Path, key: &std::path::Path| {
        let (certificate, key) = (certificate.to_owned(), key.to_owned());
        ServerFiles {
            certificate,
            key,
            client_ca: None,
        }
        .read()
    };
    assert!(read(&one.certificate, &one.key).is_ok());
    let empty = folder.path().join("empty");
    fs::write(&empty, "").unwrap();
    fs::set_permissions(&empty, Permissions::from_mode(0o600)).unwrap();
    let missing = folder.path().join("missing");
    for (certificate, key, expected) in [
        (&one.certificate, &two.key, "cannot use certificate"),
        (&empty, &one.key, "has no certificate"),
        (&one.certificate, &empty, "has no private key"),
        (&one.certificate, &one.certificate, "has mode 644"),
        (&missing, &one.key, "cannot read certificates"),
        (&one.certificate, &missing, "cannot read the private key"),
    ] {
        let error = read(certificate, key).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    // A group of readers is usual for keys; others are not.
    for (mode, is_fine) in [(0o640, true), (0o604, false), (0o660, false)] {
        fs::set_permissions(&one.key, Permissions::from_mode(mode)).unwrap();
        let read = read(&one.certificate, &one.key);
        assert_eq!(read.is_ok(), is_fine, "{mode:o}");
    }
}

#[test]
fn a_new_configuration_is_for_new_connections() {
    let folder = tempfile::tempdir().unwrap();
    let ca = Authority::new(folder.path(), "ca").unwrap();
    let one = ca.issue("one", "DNS:one").unwrap();
    let files = ServerFiles {
        certificate: one.certificate,
        key: one.key,
        client_ca: None,
    };
    let shared = ServerTls::default();
    let listener = shared.clone();
    assert!(listener.get().is_none());
    assert!(shared.set(Some(files.read().unwrap())));
    let first = listener.get().unwrap();
    // The same files keep the sessions that clients resume.
    assert!(!shared.set(Some(files.read().unwrap())));
    assert!(Arc::ptr_eq(&listener.get().unwrap(), &first));
    ca.issue("one", "DNS:one").unwrap();
    assert!(shared.set(Some(files.read().unwrap())));
    assert!(!Arc::ptr_eq(&listener.get().unwrap(), &first));
    assert!(shared.set(None) && listener.get().is_none());
}

#[test]
fn validity_is_that_of_the_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let ca = Authority::new(folder.path(), "ca").unwrap();
    let host = ca.issue("host", "DNS:localhost").unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = now.unwrap().as_secs() as i64;
    let validity = ServerFiles {
        certificate: host.certificate,
        key: host.key,
        client_ca: None,
    };
    let validity = validity.read().unwrap().validity().unwrap();
    assert!((now - 60..=now).contains(&validity.not_before));
    assert_eq!(validity.not_after - validity.not_before, 2 * 86400);
    assert_eq!(validity.fault_at(now), None);
    assert!(validity.fault_at(now + 3 * 86400).is_some());
    assert!(validity.fault_at(now - 3600).is_some());
}

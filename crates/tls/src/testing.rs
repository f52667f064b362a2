//! Certificates for tests, made by the program `openssl`.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A certificate authority in a folder.
#[derive(Clone, Debug)]
pub struct Authority {
    folder: PathBuf,
    name: String,
}

/// Files of a certificate.
#[derive(Clone, Debug)]
pub struct Issued {
    /// Certificate.
    pub certificate: PathBuf,
    /// Private key, of mode 600.
    pub key: PathBuf,
}

fn openssl(arguments: &[&str]) -> io::Result<()> {
    let output = Command::new("openssl").args(arguments).output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "openssl {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr)
        ))),
    }
}

impl Authority {
    /// Creates an authority with a certificate that is valid for two days.
    ///
    /// # Errors
    /// If openssl fails or is missing.
    pub fn new(folder: &Path, name: &str) -> io::Result<Authority> {
        let authority = Authority {
            folder: folder.to_owned(),
            name: name.to_owned(),
        };
        authority.make(
            name,
            &[
                "-addext",
                "basicConstraints=critical,CA:TRUE",
                "-addext",
                "keyUsage=critical,keyCertSign,cRLSign",
            ],
        )?;
        Ok(authority)
    }

    /// Returns the certificate of the authority.
    pub fn certificate(&self) -> PathBuf {
        self.folder.join(format!("{}.pem", self.name))
    }

    /// Issues a certificate for a subject with alternative names, for example `IP:127.0.0.1,DNS:localhost`.
    ///
    /// # Errors
    /// If openssl fails or is missing.
    pub fn issue(&self, subject: &str, names: &str) -> io::Result<Issued> {
        let own_key = self.folder.join(format!("{}.key", self.name));
        let names = format!("subjectAltName={names}");
        self.make(
            subject,
            &[
                "-CA",
                &self.certificate().to_string_lossy(),
                "-CAkey",
                &own_key.to_string_lossy(),
                "-addext",
                "basicConstraints=critical,CA:FALSE",
                "-addext",
                &names,
            ],
        )
    }

    fn make(&self, subject: &str, more: &[&str]) -> io::Result<Issued> {
        let issued = Issued {
            certificate: self.folder.join(format!("{subject}.pem")),
            key: self.folder.join(format!("{subject}.key")),
        };
        let (certificate, key) = (issued.certificate.to_string_lossy(), &issued.key);
        let (key, subject) = (key.to_string_lossy(), format!("/CN={subject}"));
        // Without a configuration file: its extensions differ between systems.
        let always = [
            "req",
            "-x509",
            "-config",
            "/dev/null",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
            "-subj",
            &subject,
            "-keyout",
            &key,
            "-out",
            &certificate,
        ];
        openssl(&[&always[..], more].concat())?;
        Ok(issued)
    }
}

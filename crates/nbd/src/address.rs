//! Address of an export: the URIs of libnbd and QEMU.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::wire::STRING_MAX;

/// TCP port of NBD.
const PORT: u16 = 10_809;

/// Socket of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ServerAddress {
    /// TCP socket.
    Tcp {
        /// Host name or IP address.
        host: String,
        /// Port.
        port: u16,
    },
    /// Path of a Unix socket.
    Unix(PathBuf),
}

/// An export of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ExportAddress {
    /// The server.
    pub server: ServerAddress,
    /// Name of the export; empty for the default export.
    pub export: String,
    /// Use of TLS; `None`: the connection is not encrypted.
    pub tls: Option<TlsFolder>,
}

/// Certificates for TLS, as libnbd and QEMU name them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct TlsFolder {
    /// Folder with `ca-cert.pem` and, for a client with a certificate, `client-cert.pem` and `client-key.pem`; `None`: the authorities of
    /// the system.
    pub path: Option<PathBuf>,
}

impl ExportAddress {
    /// Accepted forms, for messages.
    pub const FORM: &str = "nbd://HOST[:PORT]/EXPORT, nbds://HOST[:PORT]/EXPORT[?tls-certificates=FOLDER] or nbd+unix:///EXPORT?socket=PATH, such as nbd://192.0.2.1/d0";

    /// Returns true if the text has the form of an NBD address, including the forms that are not supported.
    pub fn looks_like_one(text: &str) -> bool {
        let scheme = text.split_once("://").map(|(scheme, _)| scheme);
        matches!(
            scheme,
            Some("nbd" | "nbds" | "nbd+unix" | "nbds+unix" | "nbd+vsock" | "nbds+vsock")
        )
    }
}

impl FromStr for ExportAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<ExportAddress, String> {
        let malformed = || format!("{text:?} is not {}", ExportAddress::FORM);
        let (scheme, rest) = text.split_once("://").ok_or_else(malformed)?;
        let (place, query) = match rest.split_once('?') {
            Some((place, query)) => (place, Some(query)),
            None => (rest, None),
        };
        let (authority, path) = place.split_once('/').unwrap_or((place, ""));
        let tls = match scheme {
            "nbds" => Some(TlsFolder {
                path: match query {
                    Some(query) => Some(path_of("tls-certificates=", query).ok_or_else(malformed)?),
                    None => None,
                },
            }),
            _ => None,
        };
        let server = match scheme {
            "nbds" => tcp(authority).ok_or_else(malformed)?,
            "nbd" if query.is_some() => return Err(malformed()),
            "nbd" => tcp(authority).ok_or_else(malformed)?,
            "nbd+unix" if !authority.is_empty() => return Err(malformed()),
            "nbd+unix" => {
                let path = path_of("socket=", query.unwrap_or_default());
                ServerAddress::Unix(path.ok_or_else(malformed)?)
            }
            "nbds+unix" | "nbds+vsock" => {
                return Err(format!(
                    "{text:?}: TLS is supported over TCP only; hint: use nbds:// or nbd+unix://"
                ));
            }
            _ => return Err(malformed()),
        };
        let export = decode(path).ok_or_else(malformed)?;
        if export.len() > STRING_MAX || export.contains('\0') {
            return Err(malformed());
        }
        Ok(ExportAddress {
            server,
            export,
            tls,
        })
    }
}

fn tcp(authority: &str) -> Option<ServerAddress> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']')?;
            match rest.is_empty() {
                true => (host, None),
                false => (host, Some(rest.strip_prefix(':')?)),
            }
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    // A user has a meaning only with TLS.
    if host.is_empty() || host.contains(['@', '%', ' ']) {
        return None;
    }
    let port = match port {
        None => PORT,
        Some(port) => port.parse().ok().filter(|port| *port > 0)?,
    };
    let host = host.to_owned();
    Some(ServerAddress::Tcp { host, port })
}

/// Parses a query of one parameter and returns its value as a path.
fn path_of(parameter: &str, query: &str) -> Option<PathBuf> {
    let path = decode(query.strip_prefix(parameter)?)?;
    let is_path = !path.is_empty() && !path.contains(['\0', '&']);
    is_path.then(|| PathBuf::from(path))
}

/// Decodes `%XX`. Returns `None` for malformed escapes and for text that is not UTF-8.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || char::from(rest.next()?).to_digit(16);
        let value = digit()? * 16 + digit()?;
        bytes.push(value as u8);
    }
    String::from_utf8(bytes).ok()
}

/// Encodes all bytes that would end a part of a URI or are not printable.
fn encode(text: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for byte in text.bytes() {
        let is_plain = byte.is_ascii_alphanumeric() || b"-._~/:@+=,".contains(&byte);
        match is_plain {
            true => write!(f, "{}", char::from(byte))?,
            false => write!(f, "%{byte:02X}")?,
        }
    }
    Ok(())
}

impl fmt::Display for ExportAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.server {
            ServerAddress::Tcp { host, port } => {
                f.write_str(match self.tls {
                    Some(_) => "nbds://",
                    None => "nbd://",
                })?;
                match host.contains(':') {
                    true => write!(f, "[{host}]")?,
                    false => f.write_str(host)?,
                }
                if *port != PORT {
                    write!(f, ":{port}")?;
                }
                f.write_str("/")?;
                encode(&self.export, f)?;
                if let Some(TlsFolder { path: Some(path) }) = &self.tls {
                    f.write_str("?tls-certificates=")?;
                    encode(&path.to_string_lossy(), f)?;
                }
                Ok(())
            }
            ServerAddress::Unix(path) => {
                f.write_str("nbd+unix:///")?;
                encode(&self.export, f)?;
                f.write_str("?socket=")?;
                encode(&path.to_string_lossy(), f)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_of_libnbd_and_qemu_are_parsed() {
        let tcp = |host: &str, port| ServerAddress::Tcp {
            host: host.to_owned(),
            port,
        };
        let unix = |path: &str| ServerAddress::Unix(PathBuf::from(path));
        for (text, server, export) in [
            ("nbd://store/vm", tcp("store", 10_809), "vm"),
            ("nbd://192.0.2.1:10810/", tcp("192.0.2.1", 10_810), ""),
            ("nbd://store", tcp("store", 10_809), ""),
            ("nbd://[2001:db8::1]/a/b", tcp("2001:db8::1", 10_809), "a/b"),
            ("nbd://[::1]:5/x", tcp("::1", 5), "x"),
            (
                "nbd+unix:///d0?socket=/run/n.sock",
                unix("/run/n.sock"),
                "d0",
            ),
            ("nbd+unix://?socket=n.sock", unix("n.sock"), ""),
            ("nbd+unix:///a%20b%3F?socket=/s%25p", unix("/s%p"), "a b?"),
        ] {
            let address: ExportAddress = text.parse().unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(
                (&address.server, address.export.as_str()),
                (&server, export)
            );
            assert_eq!(address.to_string().parse(), Ok(address));
        }
    }

    #[test]
    fn uris_with_tls_name_a_folder_or_use_the_authorities_of_the_system() {
        for (text, folder) in [
            ("nbds://store/d0", None),
            (
                "nbds://store/d0?tls-certificates=/etc/pki%20a",
                Some("/etc/pki a"),
            ),
        ] {
            let address: ExportAddress = text.parse().unwrap();
            let path = folder.map(PathBuf::from);
            assert_eq!(address.tls, Some(TlsFolder { path }));
            assert_eq!(address.to_string(), text);
        }
    }

    #[test]
    fn malformed_uris_are_refused() {
        for wrong in [
            "nbd:store:10809",
            "nbd://",
            "nbd:///d0",
            "nbd://store:0/d0",
            "nbd://store:65536/d0",
            "nbd://user@store/d0",
            "nbd://[::1/d0",
            "nbd://store/d0?socket=/s",
            "nbd://store/%4",
            "nbd://store/%ff",
            "nbd://store/%00",
            "nbd+unix:///d0",
            "nbd+unix:///d0?socket=",
            "nbd+unix:///d0?socket=/s&tls-verify-peer=0",
            "nbd+unix://host/d0?socket=/s",
            "nbd+vsock://2/d0",
            "nbds://store/d0?tls-verify-peer=0",
            "nbds://store/d0?tls-certificates=",
            "nbd://store/d0?tls-certificates=/t",
            "http://store/d0",
        ] {
            let refused = wrong.parse::<ExportAddress>();
            assert!(refused.is_err(), "{wrong}: {refused:?}");
        }
        let refused = "nbds+unix:///d0?socket=/s".parse::<ExportAddress>();
        let refused = refused.unwrap_err();
        assert!(refused.contains("over TCP only"), "{refused}");
        assert!(ExportAddress::looks_like_one("nbds://store/d0"));
        assert!(!ExportAddress::looks_like_one("/srv/nbd://a"));
    }
}

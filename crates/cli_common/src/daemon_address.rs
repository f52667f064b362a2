//! Address of the daemon for a command: a control socket, or TCP with a token.

use std::path::PathBuf;

use clap::Args;
use control::{Client, Token};
use tls::ClientFiles;

use crate::Failure;

/// Address of the daemon.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Daemon address")]
pub struct DaemonAddress {
    /// Control socket of the daemon [default: /run/lunette/lunette.sock; for other users than root $XDG_RUNTIME_DIR/lunette.sock if it exists]
    #[arg(long, visible_alias = "control", value_name = "PATH", global = true)]
    pub socket: Option<PathBuf>,
    /// Address of the API over TCP (serve --api-listen), instead of a control socket; needs --token-file
    #[arg(long, value_name = "http[s]://ADDRESS:PORT", global = true)]
    pub api: Option<String>,
    /// File with the token for --api: mode 600, one line
    #[arg(long, value_name = "FILE", global = true)]
    pub token_file: Option<PathBuf>,
    /// File with the certificate authorities (PEM) of an https --api [default: those of the system]
    #[arg(long, value_name = "FILE", global = true)]
    pub ca: Option<PathBuf>,
    /// File with a certificate of this client (PEM), for a daemon with --api-client-ca
    #[arg(long, value_name = "FILE", global = true, requires = "client_key")]
    pub client_certificate: Option<PathBuf>,
    /// File with the private key of --client-certificate: mode 600 or 640
    #[arg(
        long,
        value_name = "FILE",
        global = true,
        requires = "client_certificate"
    )]
    pub client_key: Option<PathBuf>,
}

/// Returns the user's own socket if it exists, otherwise the system's. The user's group may have access to the
/// latter.
fn usual_socket() -> PathBuf {
    let own = control::default_socket().filter(|own| own.exists());
    own.unwrap_or_else(|| PathBuf::from(control::SYSTEM_SOCKET))
}

impl DaemonAddress {
    /// Returns true if the daemon runs on this host: it is addressed by its control socket.
    pub fn is_local(&self) -> bool {
        self.api.is_none()
    }

    /// Creates a client of that daemon.
    ///
    /// # Errors
    /// The options do not select one daemon, or the token cannot be read.
    pub fn client(&self) -> Result<Client, Failure> {
        let certificate = self.client_certificate.clone();
        let files = ClientFiles {
            ca: self.ca.clone(),
            certificate: certificate.zip(self.client_key.clone()),
        };
        if self.api.is_none() && files != ClientFiles::default() {
            return Err(Failure::mistake(
                "--ca and --client-certificate are for --api; the control socket needs no certificates",
            ));
        }
        match (&self.socket, &self.api, &self.token_file) {
            (Some(_), Some(_), _) => Err(Failure::mistake("--socket and --api exclude each other")),
            (_, Some(url), Some(file)) => {
                let token = Token::read(file).map_err(Failure::because)?;
                Client::over_tcp(url, token, &files)
                    .map_err(|why| Failure::mistake(format!("--api: {why}")))
            }
            (_, Some(_), None) => Err(Failure::mistake(
                "--api needs a token; hint: name its file with --token-file",
            )),
            (_, None, Some(_)) => Err(Failure::mistake(
                "--token-file is for --api; the control socket needs no token",
            )),
            (socket, None, None) => {
                let chosen = socket.clone().unwrap_or_else(usual_socket);
                Ok(Client::new(&chosen))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Asked {
        #[command(flatten)]
        daemon: DaemonAddress,
    }

    #[test]
    fn the_control_socket_may_be_named_as_serve_names_it() {
        for flag in ["--socket", "--control"] {
            let asked = Asked::parse_from(["lunette", flag, "/run/one.sock"]);
            assert_eq!(
                asked.daemon.socket.as_deref(),
                Some("/run/one.sock".as_ref())
            );
        }
    }
}

//! TLS of the API and of metrics, with certificates of openssl: curl, commands, client certificates, reload, hostile clients.
#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use end_to_end::rig::free_portal;
use end_to_end::{Context, Daemon, DaemonBuilder, Profile, Result, Scratch, ensure};
use tls::testing::{Authority, Issued};
use vm::lunette_program;

const TOKEN: &str = "Qm9fTm90X1RlbGxfVGhpcw==";
/// Time limit for a silent client, above the daemon's 15 s.
const LIMIT: Duration = Duration::from_secs(60);

/// A daemon that serves the API and metrics with TLS.
struct Served {
    daemon: Daemon,
    ca: Authority,
    api: String,
    metrics: String,
    scratch: Scratch,
}

/// Writes the configuration file. `more` are further lines.
fn write_configuration(scratch: &Scratch, metrics: &str, more: &str) -> Result<()> {
    let file = |name: &str| scratch.file(name).display().to_string();
    let text = format!(
        "api_listen = \"127.0.0.1:0\"\nmetrics_listen = \"{metrics}\"\ntoken_file = \"{}\"\n\
         tls_certificate = \"{}\"\ntls_key = \"{}\"\n{more}[[disk]]\nname = \"d\"\nbackend = \"ram\"\nsize = \"1M\"\n",
        file("token"),
        file("host.pem"),
        file("host.key"),
    );
    Ok(std::fs::write(scratch.file("lunette.toml"), text)?)
}

impl Served {
    fn new() -> Result<Served> {
        let scratch = Scratch::new()?;
        std::fs::write(scratch.file("token"), TOKEN)?;
        std::fs::set_permissions(
            scratch.file("token"),
            std::fs::Permissions::from_mode(0o600),
        )?;
        let folder = scratch.file("");
        let ca = Authority::new(&folder, "ca")?;
        ca.issue("host", "IP:127.0.0.1,DNS:localhost")?;
        let metrics = free_portal()?.to_string();
        write_configuration(&scratch, &metrics, "")?;
        let config = scratch.file("lunette.toml").display().to_string();
        let mut daemon = DaemonBuilder::new(&scratch)
            .arguments(["--config", &config])
            .start()?;
        let log = daemon.process().log();
        let line = log
            .lines()
            .find(|line| line.contains("API served over TCP"));
        let line = line.with_context(|| log.clone())?;
        let api = line
            .rsplit("address=")
            .next()
            .unwrap_or_default()
            .trim()
            .to_owned();
        Ok(Served {
            api,
            metrics,
            daemon,
            ca,
            scratch,
        })
    }

    /// Runs curl, which checks the daemon's certificate, with a token.
    fn curl(&self, url: &str, own: Option<&Issued>) -> Result<Output> {
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--fail", "--max-time", "30"]);
        curl.arg("--cacert").arg(self.ca.certificate());
        curl.args(["--header", &format!("Authorization: Bearer {TOKEN}")]);
        if let Some(own) = own {
            curl.arg("--cert").arg(&own.certificate);
            curl.arg("--key").arg(&own.key);
        }
        Ok(curl.arg(url).output()?)
    }

    /// Runs a command of lunette over the API.
    fn lunette(&self, url: &str, more: &[&Path]) -> Result<Output> {
        Ok(Command::new(lunette_program(Profile::Dev)?)
            .args(["disk", "list", "--api", url, "--token-file"])
            .arg(self.scratch.file("token"))
            .args(more)
            .output()?)
    }
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

#[test]
fn api_and_metrics_are_served_over_https_only() -> Result<()> {
    let served = Served::new()?;
    let (api, metrics) = (&served.api, &served.metrics);
    for url in [
        format!("https://{api}/v1/disks"),
        format!("https://{metrics}/metrics"),
    ] {
        let output = served.curl(&url, None)?;
        ensure!(output.status.success(), "{url}: {}", text(&output));
        // The certificate does not contain this name.
        let output = served.curl(&url.replace("127.0.0.1", "127.0.0.2"), None)?;
        ensure!(!output.status.success());
        let address = url.split('/').nth(2).context("no address")?;
        let mut plain = TcpStream::connect(address)?;
        plain.set_read_timeout(Some(LIMIT))?;
        plain.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")?;
        let mut answer = String::new();
        plain.read_to_string(&mut answer)?;
        ensure!(
            answer.starts_with("HTTP/1.1 400") && answer.contains("https://"),
            "{answer}"
        );
    }
    let status = served.daemon.lunette(&["status", "--json"])?;
    let file = served.scratch.file("host.pem").display().to_string();
    ensure!(
        status.contains("not_after") && status.contains(&file),
        "{status}"
    );
    let page = text(&served.curl(&format!("https://{metrics}/metrics"), None)?);
    let sample = format!("lunette_tls_certificate_expiry_timestamp_seconds{{file=\"{file}\"}} ");
    ensure!(page.contains(&sample), "{page}");
    let ca = served.ca.certificate();
    let url = format!("https://{api}");
    let output = served.lunette(&url, &[Path::new("--ca"), &ca])?;
    ensure!(output.status.success(), "{}", text(&output));
    let output = served.lunette(&format!("https://localhost:{}", port(api)), &[])?;
    ensure!(
        output.status.code() == Some(1) && text(&output).contains("--ca"),
        "{}",
        text(&output)
    );
    let output = served.lunette(&format!("http://{api}"), &[])?;
    ensure!(text(&output).contains("needs TLS"), "{}", text(&output));
    let output = served.lunette(&format!("http://{api}"), &[Path::new("--ca"), &ca])?;
    ensure!(text(&output).contains("use https"), "{}", text(&output));
    Ok(())
}

fn port(address: &str) -> &str {
    address.rsplit(':').next().unwrap_or_default()
}

/// Checks the messages of the command line and of the log about connections without an accepted certificate.
fn explains_refused_certificates(
    served: &mut Served,
    other: &Authority,
    own: &Issued,
    stranger: &Issued,
) -> Result<()> {
    let api = format!("https://{}", served.api);
    let ca = served.ca.certificate();
    let output = served.lunette(&api, &[Path::new("--ca"), &ca])?;
    let message = text(&output);
    ensure!(
        !output.status.success() && message.contains("--client-certificate and --client-key"),
        "{message}"
    );
    let with_stranger = [
        Path::new("--ca"),
        &ca,
        Path::new("--client-certificate"),
        &stranger.certificate,
        Path::new("--client-key"),
        &stranger.key,
    ];
    let message = text(&served.lunette(&api, &with_stranger)?);
    ensure!(
        message.contains("does not accept the certificate"),
        "{message}"
    );
    let message = text(&served.lunette(&api, &[Path::new("--ca"), &other.certificate()])?);
    ensure!(
        message.contains("hint: name the authority of the daemon's certificate with --ca"),
        "{message}"
    );
    served.daemon.logs("TLS handshake failed")?;
    served.daemon.logs("service=\"api\"")?;
    let with_own = [
        Path::new("--ca"),
        &ca,
        Path::new("--client-certificate"),
        &own.certificate,
        Path::new("--client-key"),
        &own.key,
    ];
    let output = served.lunette(&api, &with_own)?;
    ensure!(output.status.success(), "{}", text(&output));
    Ok(())
}

#[test]
fn reload_replaces_the_certificate_and_demands_those_of_clients() -> Result<()> {
    let mut served = Served::new()?;
    let url = format!("https://{}/v1/disks", served.api);
    ensure!(served.daemon.lunette(&["reload"])?.contains("no changes"));
    let other = Authority::new(&served.scratch.file(""), "other")?;
    other.issue("host", "IP:127.0.0.1")?;
    // The files are read at a reload only.
    ensure!(served.curl(&url, None)?.status.success());
    let report = served.daemon.lunette(&["reload"])?;
    ensure!(report.contains("1 change of certificates"), "{report}");
    ensure!(!served.curl(&url, None)?.status.success());
    served.ca.issue("host", "IP:127.0.0.1")?;
    served.daemon.lunette(&["reload"])?;
    ensure!(served.curl(&url, None)?.status.success());

    // A wrong key refuses the reload, and the present certificate stays.
    let key = served.scratch.file("host.key");
    let good = std::fs::read(&key)?;
    std::fs::copy(served.scratch.file("other.key"), &key)?;
    let output = served.daemon.ask(&["reload"])?;
    ensure!(
        output.status.code() == Some(1) && text(&output).contains("cannot use certificate"),
        "{}",
        text(&output)
    );
    ensure!(served.curl(&url, None)?.status.success());
    std::fs::write(&key, good)?;

    let authorities = served.ca.certificate().display().to_string();
    write_configuration(
        &served.scratch,
        &served.metrics,
        &format!("api_client_ca = \"{authorities}\"\n"),
    )?;
    served.daemon.lunette(&["reload"])?;
    let own = served.ca.issue("admin", "DNS:admin")?;
    let stranger = other.issue("stranger", "DNS:stranger")?;
    let metrics = format!("https://{}/metrics", served.metrics);
    for url in [&url, &metrics] {
        let output = served.curl(url, Some(&own))?;
        ensure!(output.status.success(), "{}", text(&output));
        for refused in [None, Some(&stranger)] {
            ensure!(!served.curl(url, refused)?.status.success());
        }
    }
    explains_refused_certificates(&mut served, &other, &own, &stranger)
}

#[test]
fn silent_and_hostile_clients_do_not_stay() -> Result<()> {
    let served = Served::new()?;
    let begun = Instant::now();
    let open = |bytes: &[u8]| -> Result<TcpStream> {
        let mut stream = TcpStream::connect(&served.api)?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.write_all(bytes)?;
        Ok(stream)
    };
    // A record header that announces 16 KiB of handshake, and its beginning.
    let half = [&[22, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc][..], &[0; 100]].concat();
    let mut silent = [open(b"")?, open(&[22])?, open(&half)?];
    // Records of no TLS version end the connection at once.
    let mut hostile = open(&[22, 0xff, 0xff, 0xff, 0xff, 0, 0, 0])?;
    let mut rest = Vec::new();
    hostile.read_to_end(&mut rest).ok();
    ensure!(
        begun.elapsed() < Duration::from_secs(10),
        "{:?}",
        begun.elapsed()
    );
    let output = served.curl(&format!("https://{}/v1/version", served.api), None)?;
    ensure!(output.status.success(), "{}", text(&output));
    for stream in &mut silent {
        stream.read_to_end(&mut rest).ok();
    }
    ensure!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());
    Ok(())
}

#[test]
fn start_is_refused_without_usable_files() -> Result<()> {
    let scratch = Scratch::new()?;
    let ca = Authority::new(&scratch.file(""), "ca")?;
    let host = ca.issue("host", "IP:127.0.0.1")?;
    let name = |path: &Path| path.display().to_string();
    let (certificate, key) = (name(&host.certificate), name(&host.key));
    for (arguments, expected) in [
        (vec!["--tls-certificate", &certificate], "needs `tls_key`"),
        (vec!["--tls-key", &key], "`tls_key` needs `tls_certificate`"),
        (
            vec!["--tls-certificate", &certificate, "--tls-key", &certificate],
            "has mode 644",
        ),
        (
            vec!["--tls-certificate", &key, "--tls-key", &key],
            "has no certificate",
        ),
    ] {
        let (status, log) = DaemonBuilder::new(&scratch)
            .arguments(arguments)
            .start_refused()?;
        ensure!(!status.success() && log.contains(expected), "{log}");
        ensure!(!log.contains("PRIVATE KEY"), "{log}");
    }
    Ok(())
}

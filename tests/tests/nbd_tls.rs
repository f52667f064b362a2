//! NBD exports with TLS: the clients of libnbd and QEMU, certificates of clients, reload, hostile clients. Needs: openssl, nbdinfo,
//! nbdcopy, qemu-img. Takes: 25 s, most of it for the time limit of handshakes.
#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use end_to_end::rig::free_portal;
use end_to_end::{Context, Daemon, DaemonBuilder, Result, Scratch, ensure};
use tls::testing::Authority;
use vm::wait_until;

/// Time limit, above the daemon's 15 s for a handshake.
const LIMIT: Duration = Duration::from_secs(60);
const SIZE: usize = 48 << 20;
const GREETING: usize = 18;
const FLAGS: &[u8] = &[0, 0, 0, 3];
const STARTTLS: &[u8] = b"IHAVEOPT\0\0\0\x05\0\0\0\0";
const STARTTLS_ACK: &[u8] = b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x05\0\0\0\x01\0\0\0\0";
const GO: &[u8] = b"IHAVEOPT\0\0\0\x07\0\0\0\x07\0\0\0\x01d\0\0";

struct Nbd {
    daemon: Daemon,
    ca: Authority,
    port: u16,
    scratch: Scratch,
}

impl Nbd {
    /// Serves `d` with TLS, to clients with a certificate of `ca`.
    fn new() -> Result<Nbd> {
        let scratch = Scratch::new()?;
        let ca = Authority::new(&scratch.file(""), "ca")?;
        ca.issue("host", "DNS:localhost,IP:127.0.0.1")?;
        let address = free_portal()?;
        let path = |name: &str| scratch.file(name).display().to_string();
        let text = format!(
            "tls_certificate = \"{}\"\ntls_key = \"{}\"\nnbd_client_ca = \"{}\"\n[[disk]]\nname = \"d\"\nbackend = \"ram\"\n\
             size = {SIZE}\n[[nbd]]\ndisk = \"d\"\nlisten = \"{address}\"\ntls = true\n",
            path("host.pem"),
            path("host.key"),
            path("ca.pem"),
        );
        std::fs::write(scratch.file("lunette.toml"), text)?;
        let daemon = DaemonBuilder::new(&scratch)
            .arguments(["--config", &path("lunette.toml")])
            .start()?;
        Ok(Nbd {
            daemon,
            ca,
            port: address.port(),
            scratch,
        })
    }

    /// Makes a folder with the names of files that libnbd and QEMU expect. `own`: with a certificate of this authority for the client.
    fn credentials(&self, name: &str, own: Option<&Authority>) -> Result<PathBuf> {
        let folder = self.scratch.file(name);
        std::fs::create_dir(&folder)?;
        std::fs::copy(self.ca.certificate(), folder.join("ca-cert.pem"))?;
        if let Some(authority) = own {
            let issued = authority.issue(name, "DNS:client")?;
            std::fs::copy(issued.certificate, folder.join("client-cert.pem"))?;
            std::fs::copy(issued.key, folder.join("client-key.pem"))?;
        }
        Ok(folder)
    }

    fn uri(&self, credentials: &Path) -> String {
        let (port, folder) = (self.port, credentials.display());
        format!("nbds://localhost:{port}/d?tls-certificates={folder}")
    }

    /// Runs a tool. Returns its exit status and output.
    fn run(&self, words: &[&str]) -> Result<(bool, String)> {
        let (program, arguments) = words.split_first().context("no program")?;
        let output = Command::new("timeout")
            .args(["--kill-after=2", "60", program])
            .args(arguments)
            .output()?;
        let text = [output.stdout, output.stderr].concat();
        Ok((
            output.status.success(),
            String::from_utf8_lossy(&text).into_owned(),
        ))
    }

    fn ok(&self, words: &[&str]) -> Result<String> {
        let (is_ok, text) = self.run(words)?;
        let log = std::fs::read_to_string(self.scratch.file("lunette.log")).unwrap_or_default();
        ensure!(is_ok, "{words:?} failed:\n{text}\n{log}");
        Ok(text)
    }

    /// Connects, reads the greeting and sends these bytes.
    fn open(&self, bytes: &[u8]) -> Result<TcpStream> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.read_exact(&mut [0; GREETING])?;
        stream.write_all(bytes)?;
        Ok(stream)
    }
}

/// Reads until the end of the connection.
fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A reset is an end, too.
    stream.read_to_end(&mut bytes).ok();
    bytes
}

fn random_bytes() -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    let words = (0..SIZE / 8).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.collect()
}

#[test]
fn libnbd_and_qemu_read_and_write_with_certificates() -> Result<()> {
    let nbd = Nbd::new()?;
    let own = nbd.credentials("own", Some(&nbd.ca))?;
    let uri = nbd.uri(&own);
    let info = nbd.ok(&["nbdinfo", &uri])?;
    ensure!(info.contains("with TLS"), "{info}");

    let data = random_bytes();
    let [file, copy] =
        ["in.raw", "out.raw"].map(|name| nbd.scratch.file(name).display().to_string());
    std::fs::write(&file, &data)?;
    // Several connections, several requests in flight, requests of 256 KiB and of 4 KiB.
    nbd.ok(&["nbdcopy", "--connections=4", "--flush", &file, &uri])?;
    nbd.ok(&[
        "nbdcopy",
        "--connections=4",
        "--request-size=4096",
        &uri,
        &copy,
    ])?;
    ensure!(std::fs::read(&copy)? == data, "nbdcopy: other data");

    let object = format!("tls-creds-x509,id=t,endpoint=client,dir={}", own.display());
    let image = format!(
        "driver=nbd,host=localhost,port={},export=d,tls-creds=t",
        nbd.port
    );
    let convert = [
        "qemu-img",
        "convert",
        "--object",
        &object,
        "--image-opts",
        &image,
    ];
    nbd.ok(&[&convert[..], &["-O", "raw", &copy]].concat())?;
    ensure!(std::fs::read(&copy)? == data, "qemu-img: other data");

    // Without TLS, only the fact that TLS is required is visible.
    let plain = format!("nbd://localhost:{}/d", nbd.port);
    let (is_ok, text) = nbd.run(&["nbdinfo", &plain])?;
    ensure!(!is_ok && !text.contains("export-size"), "{text}");
    let (is_ok, text) = nbd.run(&["nbdinfo", "--list", &plain])?;
    ensure!(!is_ok, "{text}");
    Ok(())
}

#[test]
fn clients_without_a_certificate_of_the_authority_are_refused() -> Result<()> {
    let nbd = Nbd::new()?;
    let other = Authority::new(&nbd.scratch.file(""), "other")?;
    let own = nbd.credentials("own", Some(&nbd.ca))?;
    let stranger = nbd.credentials("stranger", Some(&other))?;
    let none = nbd.credentials("none", None)?;
    nbd.ok(&["nbdinfo", &nbd.uri(&own)])?;
    for refused in [&stranger, &none] {
        let (is_ok, text) = nbd.run(&["nbdinfo", &nbd.uri(refused)])?;
        ensure!(!is_ok && !text.contains("export-size"), "{text}");
    }
    let log = std::fs::read_to_string(nbd.scratch.file("lunette.log"))?;
    ensure!(log.contains("NBD client disconnected: TLS failed"), "{log}");

    // A reload replaces the certificate of the server and the authorities of clients.
    other.issue("host", "DNS:localhost")?;
    let authorities = nbd.scratch.file("ca.pem");
    let before = std::fs::read(&authorities)?;
    std::fs::copy(other.certificate(), &authorities)?;
    let report = nbd.daemon.lunette(&["reload"])?;
    ensure!(report.contains("1 change of certificates"), "{report}");
    std::fs::copy(other.certificate(), stranger.join("ca-cert.pem"))?;
    nbd.ok(&["nbdinfo", &nbd.uri(&stranger)])?;
    ensure!(!nbd.run(&["nbdinfo", &nbd.uri(&own)])?.0);
    std::fs::write(&authorities, before)?;
    Ok(())
}

#[test]
fn plain_bytes_after_starttls_and_silence_end_the_connection() -> Result<()> {
    let nbd = Nbd::new()?;
    let begun = Instant::now();
    // A third party adds options to the packet with STARTTLS. None of them is executed.
    let mut injected = nbd.open(&[FLAGS, STARTTLS, GO].concat())?;
    let answer = rest(&mut injected);
    ensure!(answer.is_empty(), "{answer:?}");
    // It adds them behind the reply.
    let mut late = nbd.open(&[FLAGS, STARTTLS].concat())?;
    let mut ack = [0; STARTTLS_ACK.len()];
    late.read_exact(&mut ack)?;
    ensure!(ack == STARTTLS_ACK, "{ack:?}");
    late.write_all(GO)?;
    let answer = rest(&mut late);
    // A fatal TLS alert (21), or nothing.
    ensure!(
        answer.is_empty() || (answer[0] == 21 && answer.len() < 16),
        "{answer:?}"
    );
    // Without TLS: NBD_REP_ERR_TLS_REQD.
    let mut plain = nbd.open(&[FLAGS, GO].concat())?;
    let mut reply = [0; 20];
    plain.read_exact(&mut reply)?;
    ensure!(reply[12..16] == [0x80, 0, 0, 5], "{reply:?}");
    ensure!(
        begun.elapsed() < Duration::from_secs(12),
        "{:?}",
        begun.elapsed()
    );

    // A silent client and one that sends half of a record occupy a connection for 15 s.
    let mut silent = [FLAGS, &[FLAGS, STARTTLS].concat()].map(|bytes| nbd.open(bytes));
    let mut half = nbd.open(&[FLAGS, STARTTLS].concat())?;
    half.read_exact(&mut ack)?;
    half.write_all(&[22, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc, 3, 3])?;
    for stream in silent.iter_mut().flatten().chain([&mut half]) {
        rest(stream);
    }
    ensure!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());
    let own = nbd.credentials("own", Some(&nbd.ca))?;
    nbd.ok(&["nbdinfo", &nbd.uri(&own)])?;
    Ok(())
}

#[test]
fn export_with_tls_needs_a_certificate() -> Result<()> {
    let scratch = Scratch::new()?;
    let export = format!("d:{},tls", scratch.socket("nbd.sock").display());
    let (status, log) = DaemonBuilder::new(&scratch)
        .disk("d=ram:1M")
        .arguments(["--nbd", &export])
        .start_refused()?;
    ensure!(
        !status.success() && log.contains("tls_certificate"),
        "{log}"
    );
    let daemon = DaemonBuilder::new(&scratch).disk("d=ram:1M").start()?;
    let output = daemon.ask(&["export", "add", "nbd", &export])?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(1) && text.contains("needs a certificate"),
        "{text}"
    );
    Ok(())
}

/// Copies random data to a disk on an export with TLS, through another daemon, and back.
fn copy_through(nbd: &Nbd, uri: &str, data: &[u8]) -> Result<()> {
    let scratch = Scratch::new()?;
    let socket = scratch.socket("near.sock");
    let disk = format!("r={uri}");
    let export = format!("r:{}", socket.display());
    let _near = DaemonBuilder::new(&scratch)
        .disk(&disk)
        .arguments(["--nbd", &export, "--workers", "2"])
        .start()?;
    let near = format!("nbd+unix:///r?socket={}", socket.display());
    let [file, copy] = ["in.raw", "out.raw"].map(|name| scratch.file(name).display().to_string());
    std::fs::write(&file, data)?;
    nbd.ok(&["nbdcopy", "--flush", &file, &near])?;
    nbd.ok(&["nbdcopy", &near, &copy])?;
    ensure!(std::fs::read(&copy)? == data, "{uri}: other data");
    let small = ["nbdcopy", "--request-size=4096", &near, &copy];
    nbd.ok(&small)?;
    ensure!(std::fs::read(&copy)? == data, "{uri}: other data at 4 KiB");
    Ok(())
}

#[test]
fn disk_uses_tls_and_certificates() -> Result<()> {
    let nbd = Nbd::new()?;
    let own = nbd.credentials("own", Some(&nbd.ca))?;
    let data = random_bytes();
    copy_through(&nbd, &nbd.uri(&own), &data)?;

    // nbdkit expects the names of a server's files.
    std::fs::copy(nbd.scratch.file("host.pem"), own.join("server-cert.pem"))?;
    std::fs::copy(nbd.scratch.file("host.key"), own.join("server-key.pem"))?;
    let port = free_portal()?.port();
    let [port_option, folder] = [
        format!("--port={port}"),
        format!("--tls-certificates={}", own.display()),
    ];
    let size = SIZE.to_string();
    let mut nbdkit = Command::new("nbdkit")
        .args([
            "--foreground",
            "--tls=require",
            "--tls-verify-peer",
            &port_option,
            &folder,
        ])
        .args(["memory", &size])
        .spawn()
        .context("nbdkit")?;
    let is_open = || TcpStream::connect(("127.0.0.1", port)).ok().map(drop);
    let result = match wait_until(LIMIT, is_open) {
        Some(()) => {
            let uri = format!(
                "nbds://localhost:{port}/?tls-certificates={}",
                own.display()
            );
            copy_through(&nbd, &uri, &data)
        }
        None => Err(std::io::Error::other("nbdkit does not listen").into()),
    };
    nbdkit.kill()?;
    nbdkit.wait()?;
    result
}

#[test]
fn disk_refuses_servers_without_tls_or_with_another_certificate() -> Result<()> {
    let nbd = Nbd::new()?;
    let other = Authority::new(&nbd.scratch.file(""), "other")?;
    let own = nbd.credentials("own", Some(&nbd.ca))?;
    let wrong = nbd.credentials("wrong", Some(&nbd.ca))?;
    std::fs::copy(other.certificate(), wrong.join("ca-cert.pem"))?;
    let plain = nbd.scratch.socket("plain.sock");
    nbd.daemon.lunette(&[
        "export",
        "add",
        "nbd",
        &format!("d:{},name=plain", plain.display()),
    ])?;
    let port = nbd.port;
    for (disk, reason) in [
        (format!("x={}", nbd.uri(&wrong)), "UnknownIssuer"),
        (format!("x=nbd://localhost:{port}/d"), "server requires TLS"),
        (
            format!(
                "x=nbds://127.0.0.2:{port}/d?tls-certificates={}",
                own.display()
            ),
            "cannot connect",
        ),
        (
            format!("x=nbds://localhost:{port}/d?tls-certificates=/nonexistent"),
            "cannot read certificates",
        ),
    ] {
        let output = nbd.daemon.ask(&["disk", "add", &disk])?;
        let text = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.code() == Some(1) && text.contains(reason),
            "{disk}: {text}"
        );
    }
    Ok(())
}

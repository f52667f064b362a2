//! NBD exports with the clients of libnbd, QEMU and fio: data, extents, changes at run time, killed and hostile clients. Needs: nbdinfo,
//! nbdcopy, python3-libnbd, qemu-img, qemu-io, fio. Takes: 20 s.
#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use end_to_end::{Context, Daemon, DaemonBuilder, Profile, Result, Scratch, ensure};
use serde_json::Value;
use vm::{lunette_program, wait_until};

const LIMIT: Duration = Duration::from_secs(30);
const SIZE: usize = 8 << 20;

struct Nbd {
    scratch: Scratch,
    daemon: Daemon,
}

impl Nbd {
    /// Serves these disks at one socket, each as an export with its name.
    fn new(disks: &[&str], more: &[&str]) -> Result<Nbd> {
        let scratch = Scratch::new()?;
        let socket = scratch.socket("nbd.sock");
        let mut daemon = DaemonBuilder::new(&scratch);
        for disk in disks {
            let name = disk.split('=').next().context("no name")?;
            let export = format!("{name}:{}", socket.display());
            daemon = daemon.disk(disk).arguments(["--nbd", &export]);
        }
        let daemon = daemon.arguments(more.iter().copied()).start()?;
        Ok(Nbd { scratch, daemon })
    }

    fn uri(&self, export: &str) -> String {
        let socket = self.scratch.socket("nbd.sock");
        format!("nbd+unix:///{export}?socket={}", socket.display())
    }

    /// Runs a tool in the folder for files. Returns its exit status and output.
    fn run(&self, words: &[&str]) -> Result<(bool, String)> {
        let (program, arguments) = words.split_first().context("no program")?;
        let output = Command::new("timeout")
            .args(["--kill-after=2", "60", program])
            .args(arguments)
            .current_dir(self.scratch.files())
            .stdin(Stdio::null())
            .output()?;
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        Ok((output.status.success(), text))
    }

    fn ok(&self, words: &[&str]) -> Result<String> {
        let (is_ok, text) = self.run(words)?;
        ensure!(
            is_ok,
            "{words:?} failed; hint: apt-get install libnbd-bin python3-libnbd qemu-utils fio\n{text}\n{}",
            self.log()
        );
        Ok(text)
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.scratch.file("lunette.log")).unwrap_or_default()
    }

    /// Writes a file with random content.
    fn random_file(&self, name: &str) -> Result<()> {
        let mut state = 0x2545_f491_4f6c_dd1du64;
        let words = (0..SIZE / 8).flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        });
        std::fs::write(self.scratch.file(name), words.collect::<Vec<u8>>())?;
        Ok(())
    }

    fn sessions(&self) -> Result<usize> {
        let text = self.daemon.lunette(&["session", "list", "--json"])?;
        let sessions: Value = serde_json::from_str(&text)?;
        Ok(sessions.as_array().map_or(0, Vec::len))
    }

    fn wait_for_sessions(&self, count: usize) -> Result<()> {
        wait_until(LIMIT, || match self.sessions() {
            Ok(now) if now != count => None,
            other => Some(other.map(drop)),
        })
        .with_context(|| format!("not {count} sessions"))?
    }

    /// Starts fio with 32 requests in flight for a minute, and waits until its requests have reached the daemon. fio's
    /// first connection only reads the size and ends.
    fn load(&self, export: &str) -> Result<Child> {
        let uri = format!("--uri={}", self.uri(export));
        let load = Command::new("fio")
            .args([
                "--name=load",
                "--thread",
                "--ioengine=nbd",
                &uri,
                "--rw=randrw",
            ])
            .args(["--bs=64k", "--iodepth=32", "--time_based", "--runtime=60"])
            .current_dir(self.scratch.files())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("fio; hint: apt-get install fio")?;
        let is_busy = || -> Result<bool> {
            let text = self.daemon.lunette(&["session", "list", "--json"])?;
            let sessions: Value = serde_json::from_str(&text)?;
            let mut sessions = sessions.as_array().into_iter().flatten();
            Ok(sessions.any(|session| {
                session["export"] == export && session["requests"].as_u64() > Some(32)
            }))
        };
        wait_until(LIMIT, || match is_busy() {
            Ok(false) => None,
            other => Some(other.map(drop)),
        })
        .context("fio sends no requests")??;
        Ok(load)
    }
}

fn same(one: &Path, other: &Path) -> Result<()> {
    ensure!(
        std::fs::read(one)? == std::fs::read(other)?,
        "{} and {} differ",
        one.display(),
        other.display()
    );
    Ok(())
}

#[test]
fn tools_copy_compare_and_map_disks() -> Result<()> {
    let size = format!("{}M", SIZE >> 20);
    let scratch = Scratch::new()?;
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .args([scratch.file("i.qcow2"), size.clone().into()])
        .status()
        .context("qemu-img; hint: apt-get install qemu-utils")?;
    ensure!(made.success(), "qemu-img create");
    let path = scratch.file("i.qcow2");
    let image = format!("image=image:{}", path.display());
    let ram = format!("ram=ram:{size}");
    let file = format!("file=file:f.raw,size={size}");
    let tcp = "ram:127.0.0.1:0,name=t,ro,description=over-TCP";
    let nbd = Nbd::new(&[&ram, &file, &image], &["--nbd", tcp])?;
    nbd.random_file("random")?;
    let list = nbd.ok(&["nbdinfo", "--list", &nbd.uri("")])?;
    for part in [
        "\"ram\"",
        "\"file\"",
        "\"image\"",
        "base:allocation",
        "can_multi_conn: true",
    ] {
        ensure!(list.contains(part), "no {part} in {list}");
    }
    for export in ["ram", "file", "image"] {
        let uri = nbd.uri(export);
        nbd.ok(&["nbdcopy", "random", &uri])?;
        nbd.ok(&["nbdcopy", &uri, "copy"])?;
        same(&nbd.scratch.file("random"), &nbd.scratch.file("copy"))?;
        nbd.ok(&[
            "qemu-img", "compare", "-f", "raw", "-F", "raw", "random", &uri,
        ])?;
        // A hole in the middle, and zeroes with space.
        let commands = [
            "discard 1M 1M",
            "write -z 3M 64k",
            "write -f -P 7 4M 64k",
            "flush",
        ];
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let words: Vec<&str> = ["qemu-io", "-f", "raw", "-d", "unmap"]
            .into_iter()
            .chain(commands)
            .chain([
                "-c",
                "read -P 0 1M 1M",
                "-c",
                "read -P 0 3M 64k",
                "-c",
                "read -P 7 4M 64k",
                &uri,
            ])
            .collect();
        nbd.ok(&words)?;
        let map = nbd.ok(&["qemu-img", "map", "--output=json", "-f", "raw", &uri])?;
        let extents: Value = serde_json::from_str(&map)?;
        let hole = extents.as_array().and_then(|all| {
            all.iter()
                .find(|one| one["start"] == 1 << 20 && one["zero"] == true)
        });
        ensure!(
            hole.is_some_and(|hole| hole["length"] == 1 << 20),
            "{export}: {map}"
        );
        nbd.ok(&[
            "qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", "random", &uri,
        ])?;
        nbd.ok(&[
            "qemu-img", "convert", "-f", "raw", "-O", "raw", &uri, "copy",
        ])?;
        same(&nbd.scratch.file("random"), &nbd.scratch.file("copy"))?;
        // The driver of the benchmarks verifies its own writes, on two connections.
        let lunette = lunette_program(Profile::Dev)?;
        let lunette = lunette.to_str().context("program")?;
        let bench = format!(
            "{lunette} bench {uri} --rw write --bs 64k --iodepth 8 --numjobs 2 --set offset_increment=4m --size 4m --verify crc32c"
        );
        nbd.ok(&bench.split(' ').collect::<Vec<_>>())?;
    }
    Ok(())
}

#[test]
fn libnbd_reads_extents_and_errors() -> Result<()> {
    let nbd = Nbd::new(&["d=file:d.raw,size=8M"], &[])?;
    let program = r"
import nbd, sys
h = nbd.NBD()
h.add_meta_context('base:allocation')
h.set_strict_mode(0)
h.connect_uri(sys.argv[1])
assert h.get_size() == 8 << 20 and h.can_multi_conn() and h.can_df() and h.can_fast_zero()
h.pwrite(b'a' * 4096, 1 << 20, nbd.CMD_FLAG_FUA)
found = []
h.block_status(8 << 20, 0, lambda context, offset, entries, error: found.append((context, list(entries))))
assert found == [('base:allocation', [1 << 20, 3, 4096, 0, (7 << 20) - 4096, 3])], found
found.clear()
h.block_status(4096, 0, lambda c, o, entries, e: found.append(list(entries)), nbd.CMD_FLAG_REQ_ONE)
assert found == [[4096, 3]], found
for call, errno in [
    (lambda: h.pread(512, 1), 'EINVAL'),
    (lambda: h.pread(512, 8 << 20), 'EINVAL'),
    (lambda: h.pwrite(b'b' * 512, 8 << 20), 'ENOSPC'),
    (lambda: h.zero(512, 0, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_NO_HOLE), 'ENOTSUP'),
]:
    try:
        call()
        assert False, errno
    except nbd.Error as error:
        assert error.errno == errno or (errno, error.errno) == ('ENOTSUP', 'EOPNOTSUPP'), (errno, error)
h.zero(1 << 20, 1 << 20, nbd.CMD_FLAG_FAST_ZERO)
assert h.pread(4096, 1 << 20) == bytes(4096)
h.trim(8 << 20, 0, nbd.CMD_FLAG_FUA)
h.flush()
others = []
for n in range(64):
    other = nbd.NBD()
    other.connect_uri(sys.argv[1])
    other.pwrite(bytes([n]) * 4096, n * 4096)
    others.append(other)
others[0].flush()
for n, other in enumerate(others):
    assert h.pread(4096, n * 4096) == bytes([n]) * 4096
for other in others:
    other.shutdown()
h.shutdown()
";
    nbd.ok(&["/usr/bin/python3", "-c", program, &nbd.uri("d")])?;
    nbd.wait_for_sessions(0)
}

#[test]
fn exports_change_under_load() -> Result<()> {
    let nbd = Nbd::new(&["a=ram:16M", "b=file:b.raw,size=16M"], &[])?;
    let mut load = nbd.load("a")?;
    let session = nbd.daemon.lunette(&["session", "list"])?;
    ensure!(
        session.contains("nbd-") && session.contains("unix:pid="),
        "{session}"
    );
    // The disk grows: new clients see it. The export in use is removed only by force.
    nbd.daemon.lunette(&["disk", "resize", "a", "32M"])?;
    let info = nbd.ok(&["nbdinfo", "--size", &nbd.uri("a")])?;
    ensure!(info.trim() == (32 << 20).to_string(), "{info}");
    let refused = nbd.daemon.ask(&["export", "remove", "a"])?;
    ensure!(!refused.status.success(), "an export in use was removed");
    nbd.daemon.lunette(&["export", "remove", "a", "--force"])?;
    load.wait()?;
    nbd.wait_for_sessions(0)?;
    ensure!(
        !nbd.run(&["nbdinfo", &nbd.uri("a")])?.0,
        "the export is still there"
    );
    // It comes back read-only, with another name for clients.
    let socket = nbd.scratch.socket("nbd.sock");
    let export = format!(
        "a:{},export_name=again,ro,description=read only",
        socket.display()
    );
    nbd.daemon.lunette(&["export", "add", "nbd", &export])?;
    let info = nbd.ok(&["nbdinfo", &nbd.uri("again")])?;
    ensure!(
        info.contains("is_read_only: true") && info.contains("read only"),
        "{info}"
    );
    let write = [
        "qemu-io",
        "-f",
        "raw",
        "-c",
        "write 0 4k",
        &nbd.uri("again"),
    ];
    ensure!(!nbd.run(&write)?.0, "a read-only export was written to");
    let taken = format!("b:{},name=c,export_name=again", socket.display());
    let refused = nbd.daemon.ask(&["export", "add", "nbd", &taken])?;
    let reason = String::from_utf8_lossy(&refused.stderr);
    ensure!(reason.contains("already has an export"), "{reason}");
    // A client is killed with requests in flight.
    let mut load = nbd.load("b")?;
    load.kill()?;
    load.wait()?;
    nbd.wait_for_sessions(0)?;
    nbd.ok(&["nbdinfo", &nbd.uri("b")])?;
    let status = nbd.daemon.lunette(&["export", "list"])?;
    ensure!(
        status.contains("nbd") && status.contains("nbd.sock"),
        "{status}"
    );
    Ok(())
}

#[test]
fn hostile_clients_end_their_own_connection() -> Result<()> {
    let mut nbd = Nbd::new(&["d=ram:8M"], &[])?;
    let mut load = nbd.load("d")?;
    let socket = nbd.scratch.socket("nbd.sock");
    for round in 0..200u32 {
        let mut stream = UnixStream::connect(&socket)?;
        stream.read_exact(&mut [0; 18])?;
        let junk: Vec<u8> = (0..512).map(|at: u32| (at * round) as u8).collect();
        stream.write_all(&junk)?;
        ensure!(stream.read(&mut [0])? == 0, "round {round} is not over");
    }
    nbd.wait_for_sessions(1)?;
    ensure!(
        load.try_wait()?.is_none(),
        "the other client ended\n{}",
        nbd.log()
    );
    load.kill()?;
    load.wait()?;
    let log = nbd.log();
    let lines = log
        .lines()
        .filter(|line| line.contains("protocol violation"));
    let count = lines.count();
    ensure!((1..50).contains(&count), "{count} lines\n{log}");
    // A daemon that is started again serves the same clients' requests.
    nbd.daemon.kill()?;
    nbd.daemon.start_again()?;
    nbd.ok(&["nbdinfo", &nbd.uri("d")])?;
    nbd.daemon.stop(LIMIT)?;
    ensure!(!socket.exists(), "the socket stays behind");
    Ok(())
}

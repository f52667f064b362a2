//! NBD exports with the clients of libnbd, QEMU and fio: data, extents, changes at run time, killed and hostile clients. Needs: nbdinfo,
//! nbdcopy, nbdfuse, python3-libnbd, qemu-img, qemu-io, fio. Takes: 20 s.
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

    /// Measures an export. The benchmark finds it in the daemon's status.
    fn bench(&self, uri: &str, job: &str) -> Result<()> {
        let lunette = lunette_program(Profile::Dev)?.display().to_string();
        let control = self.scratch.socket("control.sock");
        let subject = format!("{uri},control={}", control.display());
        let words = [&lunette, "bench", &subject].into_iter();
        self.ok(&words.chain(job.split(' ')).collect::<Vec<_>>())?;
        Ok(())
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
        let write = "--rw write --bs 64k --iodepth 8 --numjobs 2 --set offset_increment=4m --size 4m --verify crc32c";
        nbd.bench(&uri, write)?;
    }
    let exports = nbd.daemon.lunette(&["export", "show", "t", "--json"])?;
    let export: Value = serde_json::from_str(&exports)?;
    let address = export[0]["status"]["addresses"][0].as_str();
    let address = address.with_context(|| format!("no address: {export}"))?;
    nbd.bench(&format!("nbd://{address}/t"), "--rw read --size 1m")
}

/// Mounts an export as a file, in a mount namespace of its own: `$1` is the URI. If a command fails, nbdfuse is killed: it would keep the
/// pipe of the output open. The mount ends with the namespace.
const NBDFUSE: &str = r#"
set -e
mkdir mounted
nbdfuse -P nbdfuse.pid mounted "$1" &
trap 'kill -9 $! 2>/dev/null || true' EXIT
n=0
until [ -s nbdfuse.pid ]; do
    n=$((n + 1))
    [ $n -lt 300 ]
    sleep 0.1
done
dd if=random of=mounted/nbd bs=1M conv=notrunc,fsync
cmp random mounted/nbd
umount mounted
wait
"#;

/// Writes a disk with nbdfuse, and a range of it with fio, which verifies its data.
fn nbdfuse_and_fio_read_their_own_data(nbd: &Nbd) -> Result<()> {
    let uri = nbd.uri("d");
    // Without root, a mount needs a user namespace.
    let as_user: &[&str] = match rustix::process::geteuid().is_root() {
        true => &["unshare"],
        false => &["unshare", "--user", "--map-root-user"],
    };
    let script = ["--mount", "sh", "-c", NBDFUSE, "sh", &uri];
    nbd.random_file("random")?;
    nbd.ok(&[as_user, &script].concat())?;
    nbd.ok(&["nbdcopy", &uri, "copy"])?;
    same(&nbd.scratch.file("random"), &nbd.scratch.file("copy"))?;
    let uri = format!("--uri={uri}");
    let fio = "fio --name=verify --thread --ioengine=nbd --rw=randwrite --bs=16k --iodepth=8 --offset=2M --size=4M --verify=crc32c --verify_fatal=1";
    let words: Vec<&str> = fio.split(' ').chain([uri.as_str()]).collect();
    nbd.ok(&words).map(drop)
}

/// The base of the image has data at 0, the image itself at 1 MiB.
fn layers_have_numbers(nbd: &Nbd) -> Result<()> {
    std::fs::write(nbd.scratch.file("base.raw"), [7; 65536])?;
    let (base, image) = (nbd.scratch.file("base.raw"), nbd.scratch.file("over.qcow2"));
    let (base, image) = (base.display().to_string(), image.display().to_string());
    nbd.ok(&["truncate", "-s", "8M", &base])?;
    let create = ["qemu-img", "create", "-q", "-f", "qcow2"];
    nbd.ok(&[&create[..], &["-b", &base, "-F", "raw", &image]].concat())?;
    nbd.daemon
        .lunette(&["disk", "add", &format!("over=image:{image}")])?;
    let socket = nbd.scratch.socket("nbd.sock").display().to_string();
    let export = format!("over:{socket}");
    nbd.daemon.lunette(&["export", "add", "nbd", &export])?;
    let uri = nbd.uri("over");
    nbd.ok(&["qemu-io", "-f", "raw", "-c", "write 1M 64k", &uri])?;
    let map = nbd.ok(&["nbdinfo", "--map=qemu:allocation-depth", &uri])?;
    let mut found = Vec::new();
    for line in map.lines() {
        let numbers = line.split_whitespace().take(3).map(str::parse);
        found.push(numbers.collect::<Result<Vec<u64>, _>>()?);
    }
    let (piece, mib) = (65536, 1 << 20);
    let expected = [
        [0, piece, 2],
        [piece, mib - piece, 0],
        [mib, piece, 1],
        [mib + piece, 7 * mib - piece, 0],
    ];
    ensure!(found == expected, "{map}");
    Ok(())
}

#[test]
fn libnbd_reads_extents_and_errors() -> Result<()> {
    let nbd = Nbd::new(&["d=file:d.raw,size=8M"], &[])?;
    layers_have_numbers(&nbd)?;
    nbdfuse_and_fio_read_their_own_data(&nbd)?;
    let program = r"
import nbd, sys
h = nbd.NBD()
h.add_meta_context('base:allocation')
h.set_strict_mode(0)
h.connect_uri(sys.argv[1])
h.trim(8 << 20, 0)
assert h.get_size() == 8 << 20 and h.can_multi_conn() and h.can_df() and h.can_fast_zero()
assert h.can_cache()
h.cache(4096, 0)
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

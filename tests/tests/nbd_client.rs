//! Disks on exports of NBD servers: qemu-nbd, nbdkit with its filters and another Lunette. Servers are killed, restarted and changed under
//! verified I/O; jobs and image tools use exports. Needs: qemu-nbd, qemu-img, nbdkit. Takes: 15 s.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use end_to_end::{Context, Result, Rig, Scratch, ensure};
use rustix::process::Signal;
use serde_json::Value;
use vhost_frontend::kind;
use vhost_frontend::{
    BlkQueue, FrontEnd, Layout, Options, QueueOptions, ScsiQueue, ScsiRequest, VerifiedLoad,
    Verifier, status,
};
use vm::{Process, wait_until};

const SOON: Duration = Duration::from_secs(30);
const MIB: u64 = 1 << 20;
const INSTALL: &str = "hint: apt-get install qemu-utils nbdkit";

/// A server of others, on a Unix socket.
struct Server {
    scratch: Scratch,
    process: Process,
    command: Vec<String>,
}

impl Server {
    /// Starts a program; `{socket}` and `{file}` in its arguments are the socket and a file of 32 MiB.
    fn start(command: &[&str]) -> Result<Server> {
        let scratch = Scratch::new()?;
        let file = scratch.file("served.raw");
        std::fs::File::create(&file)?.set_len(32 * MIB)?;
        let socket = scratch.socket("n.sock").display().to_string();
        let file = file.display().to_string();
        let command: Vec<String> = command
            .iter()
            .map(|word| word.replace("{socket}", &socket).replace("{file}", &file))
            .collect();
        let process = Server::run(&scratch, &command)?;
        Ok(Server {
            scratch,
            process,
            command,
        })
    }

    fn run(scratch: &Scratch, command: &[String]) -> Result<Process> {
        let socket = scratch.socket("n.sock");
        std::fs::remove_file(&socket).ok();
        let (program, arguments) = command.split_first().context("no program")?;
        let mut started = Command::new(program);
        started.args(arguments);
        let log = scratch.file("server.log");
        let process = Process::start(program, &started, &log).context(INSTALL)?;
        wait_until(SOON, || socket.exists().then_some(())).context(INSTALL)?;
        Ok(process)
    }

    fn kill(&mut self) -> Result<()> {
        self.process.kill()
    }

    fn start_again(&mut self) -> Result<()> {
        self.process = Server::run(&self.scratch, &self.command)?;
        Ok(())
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket().display())
    }

    fn socket(&self) -> PathBuf {
        self.scratch.socket("n.sock")
    }
}

fn served(uri: &str, keys: &str) -> Result<Rig> {
    let disk = format!("r={uri}{keys}");
    let sandbox = ["--sandbox", "enforce"];
    Rig::new(|daemon| daemon.disk(&disk).vhost_blk("r").arguments(sandbox))
}

fn status_of(rig: &Rig) -> Result<Value> {
    let disk: Value = control::get(&rig.daemon.control(), "/v1/disks/r")?;
    Ok(disk["status"].clone())
}

fn wait_for_state(rig: &Rig, state: &str) -> Result<Value> {
    let reached = wait_until(SOON, || {
        let status = status_of(rig).ok()?;
        (status["state"] == state).then_some(status)
    });
    reached.with_context(|| format!("not {state}: {:?}", status_of(rig)))
}

struct Queue {
    queue: BlkQueue,
    _front_end: FrontEnd,
}

fn queue(rig: &Rig) -> Result<Queue> {
    let mut front_end = FrontEnd::connect(&rig.socket("r"), &Options::default())?;
    let options = QueueOptions::default();
    let queue = BlkQueue::start(&mut front_end, 0, &options, 16, 1 << 20, Layout::Separate)?;
    Ok(Queue {
        queue,
        _front_end: front_end,
    })
}

/// Kills and restarts the server twice under verified I/O. `pause`: time without a server.
fn kill_under_load(server: &mut Server, near: &Rig, pause: Duration) -> Result<()> {
    let load = VerifiedLoad::start(&near.socket("r"))?;
    for _ in 0..2 {
        load.expect_progress(SOON)?;
        server.kill()?;
        let status = wait_for_state(near, "unavailable")?;
        ensure!(
            status["reason"]
                .as_str()
                .is_some_and(|text| !text.is_empty()),
            "{status}"
        );
        std::thread::sleep(pause);
        server.start_again()?;
        wait_for_state(near, "ready")?;
        load.expect_progress(SOON)?;
    }
    ensure!(load.finish()? > 0);
    Ok(())
}

#[test]
fn killed_qemu_nbd_with_multi_conn_loses_no_write() -> Result<()> {
    let mut server = Server::start(&[
        "qemu-nbd",
        "--shared=8",
        "--persistent",
        "--format=raw",
        "--socket={socket}",
        "{file}",
    ])?;
    let near = served(&server.uri(), ",replacement_timeout=1,on_error=stop")?;
    kill_under_load(&mut server, &near, Duration::from_millis(1500))?;
    let mut queue = queue(&near)?;
    ensure!(
        queue.queue.flush()? == status::OK,
        "its flush covers all connections"
    );
    Ok(())
}

#[test]
fn killed_qemu_nbd_without_multi_conn_fails_later_flushes() -> Result<()> {
    let mut server = Server::start(&[
        "qemu-nbd",
        "--shared=1",
        "--persistent",
        "--format=raw",
        "--socket={socket}",
        "{file}",
    ])?;
    let near = served(&server.uri(), "")?;
    kill_under_load(&mut server, &near, Duration::ZERO)?;
    let mut queue = queue(&near)?;
    ensure!(queue.queue.write(0, &[1; 512])? == status::OK);
    ensure!(
        queue.queue.flush()? == status::IOERR,
        "acknowledged writes may be lost"
    );
    let log = std::fs::read_to_string(near.scratch.file("lunette.log")).unwrap_or_default();
    ensure!(
        log.contains("all flushes fail from now on; hint: "),
        "{log}"
    );
    Ok(())
}

#[test]
fn filters_of_nbdkit_are_respected() -> Result<()> {
    // Blocks of 4096 bytes, at most 64 KiB per request, other requests fail; delayed replies; a third of the requests fails.
    let policy = [
        "nbdkit",
        "--foreground",
        "--unix={socket}",
        "--filter=blocksize-policy",
        "--filter=delay",
        "file",
        "{file}",
        "blocksize-minimum=4096",
        "blocksize-preferred=4096",
        "blocksize-maximum=65536",
        "blocksize-error-policy=error",
        "rdelay=2ms",
        "wdelay=1ms",
    ];
    let mut server = Server::start(&policy)?;
    let near = served(&server.uri(), ",block_size=512")?;
    let mut one = queue(&near)?;
    let mut verifier = Verifier::new(0, 256, 7);
    for _ in 0..8 {
        verifier.round(&mut one.queue, 16)?;
    }
    let mebibyte: Vec<u8> = (0..MIB).map(|at| (at / 1000) as u8).collect();
    ensure!(one.queue.write(8 * MIB, &mebibyte)? == status::OK);
    let mut read = vec![0; MIB as usize];
    ensure!(one.queue.read(8 * MIB, &mut read)? == status::OK && read == mebibyte);
    verifier.check_all(&mut one.queue)?;
    drop(one);
    kill_under_load(&mut server, &near, Duration::ZERO)?;
    // nbdkit keeps the size that a connection began with.
    let mut one = queue(&near)?;
    ensure!(one.queue.write(0, &[1; 4096])? == status::OK);
    let file = server.scratch.file("served.raw");
    let file = std::fs::File::options().write(true).open(file)?;
    file.set_len(40 * MIB)?;
    near.daemon.lunette(&["disk", "resize", "r"])?;
    ensure!(one.queue.write(39 * MIB, &[7; 4096])? == status::OK);
    ensure!(one.queue.flush()? == status::OK);
    drop((one, near));

    let failing = Server::start(&[
        "nbdkit",
        "--foreground",
        "--unix={socket}",
        "--filter=error",
        "memory",
        "size=16M",
        "error-pread-rate=100%",
        "error=EIO",
    ])?;
    let near = served(&failing.uri(), "")?;
    let mut one = queue(&near)?;
    ensure!(one.queue.write(0, &[1; 512])? == status::OK);
    let mut bytes = [0; 512];
    ensure!(one.queue.read(0, &mut bytes)? == status::IOERR);
    Ok(())
}

/// Runs a SCSI command on LUN 0 and returns its data-in and status.
fn scsi(queue: &mut ScsiQueue, cdb: &[u8], out: &[u8], length: usize) -> Result<(Vec<u8>, u8)> {
    let command = ScsiRequest {
        target: 0,
        lun: 0,
        tag: 1,
        cdb,
    };
    let mut data = vec![0xee; length];
    let mut done = queue.run(&command, out, &mut data)?;
    if done.sense.first().is_some_and(|_| done.sense[2] & 15 == 6) {
        // The first command reports a unit attention.
        done = queue.run(&command, out, &mut data)?;
    }
    ensure!(done.response == 0, "{done:?}");
    Ok((data, done.status))
}

#[test]
fn scsi_commands_reach_a_server_with_larger_blocks() -> Result<()> {
    let mut server = Server::start(&[
        "nbdkit",
        "--foreground",
        "--unix={socket}",
        "--filter=blocksize-policy",
        "file",
        "{file}",
        "blocksize-minimum=4096",
        "blocksize-preferred=4096",
        "blocksize-maximum=65536",
        "blocksize-error-policy=error",
    ])?;
    let disk = format!("r={},block_size=512", server.uri());
    let near = Rig::new(|daemon| daemon.disk(&disk).vhost_scsi("c").lun("c/0:0=r"))?;
    let mut front_end = FrontEnd::connect(&near.socket("c"), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = ScsiQueue::start(&mut front_end, 2, &options, 4, 1 << 18, Layout::Separate)?;
    // READ CAPACITY (16): the last of 65,536 blocks of 512 bytes, 8 in a physical block.
    let capacity = [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0];
    let (data, status) = scsi(&mut queue, &capacity, &[], 32)?;
    ensure!(status == 0 && data[..12] == [0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 2, 0]);
    ensure!(data[13] & 15 == 3, "{data:?}");
    // WRITE (10) of 300 blocks from block 5, after a lost connection.
    server.kill()?;
    server.start_again()?;
    let written: Vec<u8> = (0..300 * 512).map(|at| (at / 100) as u8).collect();
    let write = [
        0x2a,
        0,
        0,
        0,
        0,
        5,
        0,
        300u16.to_be_bytes()[0],
        300u16.to_be_bytes()[1],
        0,
    ];
    ensure!(scsi(&mut queue, &write, &written, 0)?.1 == 0);
    // WRITE SAME (16) with UNMAP of blocks 8 to 15, and SYNCHRONIZE CACHE (10).
    let same = [0x93, 8, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0];
    ensure!(scsi(&mut queue, &same, &[0; 512], 0)?.1 == 0);
    ensure!(scsi(&mut queue, &[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0)?.1 == 0);
    let read = [0x28, 0, 0, 0, 0, 5, 0, write[7], write[8], 0];
    let (data, status) = scsi(&mut queue, &read, &[], 300 * 512)?;
    let mut expected = written;
    expected[3 * 512..11 * 512].fill(0);
    ensure!(status == 0 && data == expected);
    // GET LBA STATUS finds data or a hole at the start.
    let lba_status = [0x9e, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 24, 0, 0];
    ensure!(scsi(&mut queue, &lba_status, &[], 24)?.1 == 0);
    // READ (10) beyond the end.
    let beyond = [0x28, 0, 0, 1, 0, 0, 0, 0, 1, 0];
    ensure!(scsi(&mut queue, &beyond, &[], 512)?.1 == 2);
    let file = std::fs::read(server.scratch.file("served.raw"))?;
    ensure!(file[5 * 512..305 * 512] == expected);
    Ok(())
}

/// A far daemon with an export, and a near daemon, which runs in the full sandbox.
#[test]
fn killed_daemon_loses_no_write_over_tcp_in_the_sandbox() -> Result<()> {
    let port = end_to_end::rig::free_portal()?;
    let nbd = format!("d:{port},export_name=far");
    let mut far = Rig::new(|daemon| {
        daemon
            .disk("d=file:far.raw,size=32M")
            .arguments(["--workers", "2", "--nbd", &nbd])
    })?;
    let disk = format!("r=nbd://{port}/far");
    let arguments = ["--workers", "2", "--sandbox", "enforce"];
    let near = far.beside(|daemon| daemon.disk(&disk).vhost_blk("r").arguments(arguments))?;
    let load = VerifiedLoad::start(&near.socket("r"))?;
    load.expect_progress(SOON)?;
    far.daemon.kill()?;
    wait_for_state(&near, "unavailable")?;
    far.daemon.start_again()?;
    wait_for_state(&near, "ready")?;
    load.expect_progress(SOON)?;
    ensure!(load.finish()? > 0);
    let mut one = queue(&near)?;
    ensure!(one.queue.flush()? == status::OK);
    // The protocol does not notify clients of a new size.
    far.daemon.lunette(&["disk", "resize", "d", "40M"])?;
    near.daemon.lunette(&["disk", "resize", "r"])?;
    let disk: Value = control::get(&near.daemon.control(), "/v1/disks/r")?;
    ensure!(disk["status"]["size"] == 40 * MIB, "{disk}");
    ensure!(one.queue.write(39 * MIB, &[7; 4096])? == status::OK);
    far.daemon.kill()?;
    let resized = near.daemon.ask(&["disk", "resize", "r"])?;
    let text = String::from_utf8_lossy(&resized.stderr);
    ensure!(text.contains("cannot connect to"), "{text}");
    Ok(())
}

#[test]
fn disk_waits_for_a_server_and_wrong_addresses_are_refused() -> Result<()> {
    let mut server = Server::start(&[
        "nbdkit",
        "--foreground",
        "--unix={socket}",
        "memory",
        "size=16M",
    ])?;
    server.kill()?;
    std::fs::remove_file(server.socket()).ok();
    let uri = server.uri();
    let near = Rig::new(|daemon| daemon.disk(&format!("r={uri}")))?;
    let status = wait_for_state(&near, "unavailable")?;
    let reason = status["reason"].as_str().unwrap_or_default();
    ensure!(
        reason.contains("cannot connect to ")
            && reason.contains("; hint: check that the NBD server runs"),
        "{status}"
    );
    server.start_again()?;
    wait_for_state(&near, "ready")?;
    for (wrong, part) in [
        ("x=nbds+unix:///d0?socket=/s", "over TCP only; hint: "),
        ("x=nbd:127.0.0.1:10809", "nbd+unix:///EXPORT?socket=PATH"),
        (
            &format!("x={uri},size=1M"),
            "the server determines the size",
        ),
        (&format!("x={uri}"), "is already used by disk r"),
    ] {
        let added = near.daemon.ask(&["disk", "add", wrong])?;
        let text = String::from_utf8_lossy(&added.stderr).into_owned();
        ensure!(
            !added.status.success() && text.contains(part),
            "{wrong}: {text}"
        );
    }
    let disk: Value = control::get(&near.daemon.control(), "/v1/disks/r")?;
    ensure!(disk["uri"] == uri && disk["backend"] == "nbd", "{disk}");
    Ok(())
}

#[test]
fn jobs_and_image_tools_use_exports() -> Result<()> {
    let server = Server::start(&[
        "qemu-nbd",
        "--shared=8",
        "--persistent",
        "--format=raw",
        "--socket={socket}",
        "{file}",
    ])?;
    let uri = server.uri();
    let near = Rig::new(|daemon| daemon.disk("r=file:r.raw,size=32M").vhost_blk("r"))?;
    let load = VerifiedLoad::start(&near.socket("r"))?;
    load.expect_progress(SOON)?;
    near.daemon
        .lunette(&["disk", "mirror", "r", &uri, "--wait", "--switch"])?;
    load.expect_progress(SOON)?;
    let disk: Value = control::get(&near.daemon.control(), "/v1/disks/r")?;
    ensure!(disk["backend"] == "nbd", "{disk}");
    load.finish()?;
    let file = near.scratch.file("copy.raw").display().to_string();
    let target = format!("file:{file}");
    near.daemon
        .lunette(&["disk", "backup", "r", &target, "--wait"])?;
    let copied = std::fs::read(&file)?;
    ensure!(copied == std::fs::read(server.scratch.file("served.raw"))?);
    let other = Server::start(&[
        "nbdkit",
        "--foreground",
        "--unix={socket}",
        "memory",
        "size=32M",
    ])?;
    near.daemon
        .lunette(&["disk", "backup", "r", &other.uri(), "--wait"])?;

    let image = near.scratch.file("i.qcow2").display().to_string();
    let program = vm::lunette_program(vm::Profile::Dev)?;
    let tool = |words: &[&str]| {
        let output = Command::new(&program).arg("image").args(words).output()?;
        ensure!(output.status.success(), "{words:?}: {output:?}");
        Ok(String::from_utf8(output.stdout)?)
    };
    tool(&["convert", &uri, &image, "--to", "qcow2"])?;
    tool(&["compare", &image, &uri])?;
    tool(&["compare", &uri, &other.uri()])?;
    let map = tool(&["map", &uri])?;
    ensure!(!map.is_empty());
    tool(&["convert", &image, &other.uri(), "--to", "raw", "-n"])?;
    tool(&["compare", &other.uri(), &file])?;
    Ok(())
}

/// Other disks of the backup are available for the next one, and their checkpoints are complete.
#[test]
fn disk_that_hangs_delays_no_other_job_of_its_backup() -> Result<()> {
    let server = Server::start(&["qemu-nbd", "--format=raw", "--socket={socket}", "{file}"])?;
    let disk = format!("r={}", server.uri());
    let near = Rig::new(|daemon| {
        daemon
            .disk(&disk)
            .disk("m=file:m.raw,size=4M")
            .vhost_blk("r")
    })?;
    let pull = format!("unix:{}", near.scratch.socket("b.sock").display());
    let begin = "backup begin r m --name b --checkpoint mon --pull".split(' ');
    let begin: Vec<&str> = begin.chain([pull.as_str()]).collect();
    near.daemon.lunette(&begin)?;
    let mut client_of_r = queue(&near)?;
    let queue = &mut client_of_r.queue;
    server.process.signal(Signal::STOP)?;
    let slot = queue.take().context("all requests are in flight")?;
    ensure!(queue.submit(slot, kind::OUT, 0, 4096, 0));
    queue.publish();
    let client = control::Client::new(&near.daemon.control());
    let is_hung = || {
        let metrics = client.text("/metrics").ok()?;
        let number = metrics
            .split_once("lunette_disk_io_in_flight{disk=\"r\"} ")?
            .1;
        (!number.starts_with('0')).then_some(())
    };
    wait_until(SOON, is_hung).context("the write does not reach the disk")?;
    let state = |disk| client.get::<Value>(&format!("/v1/disks/{disk}/job"));
    std::thread::scope(|scope| {
        let ending = scope.spawn(|| near.daemon.lunette(&["backup", "end", "b"]));
        let ended = wait_until(SOON, || (state("m").ok()?["state"] == "done").then_some(()));
        let hung = state("r");
        server.process.signal(Signal::CONT)?;
        ending.join().ok().context("the thread panicked")??;
        let hung = hung?["state"].clone();
        ensure!(ended.is_some() && hung == "finishing", "{hung}");
        ensure!(state("r")?["state"] == "done", "{}", state("r")?);
        Ok(())
    })
}

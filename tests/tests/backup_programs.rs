//! Programs that read a pulled backup over NBD: the recipes of docs/backup.md, and the readers of virtnbdbackup. Needs: nbdcopy, qemu-img,
//! python3-libnbd, virtnbdbackup. Takes: 3 s.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::Command;

use end_to_end::files::recipe;
use end_to_end::{Context, Result, Rig, ensure};
use serde_json::Value;
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, status};

const UNIT: u64 = 64 << 10;
const UNITS: u64 = 128;
const SIZE: u64 = UNITS * UNIT;

fn run(folder: &Path, words: &[&str]) -> Result<String> {
    let mut command = Command::new(words[0]);
    let ran = command.args(&words[1..]).current_dir(folder).output();
    let ran = ran.context(
        "a tool is missing; hint: apt-get install qemu-utils libnbd-bin python3-libnbd virtnbdbackup",
    )?;
    let text = [ran.stdout, ran.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    ensure!(ran.status.success(), "{words:?}: {text}");
    Ok(text)
}

/// Returns a recipe with the socket of the test.
fn recipe_at(part: &str, socket: &str) -> Result<String> {
    let text = recipe(include_str!("../../docs/backup.md"), part)?;
    Ok(text.replace("/tmp/backup.sock", socket))
}

/// Writes a byte to the start of some units of a disk.
fn write(rig: &Rig, units: &[u64], byte: u8) -> Result<()> {
    let mut front_end = FrontEnd::connect(&rig.socket("d0"), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 16, 1 << 20, Layout::Separate)?;
    for unit in units {
        ensure!(queue.write(unit * UNIT, &[byte; 4096])? == status::OK);
    }
    Ok(())
}

/// Begins a pull of the disk. Returns its content at this moment.
fn begin(rig: &Rig, socket: &str, more: &[&str]) -> Result<Vec<u8>> {
    let pull = format!("unix:{socket}");
    let words = ["backup", "begin", "d0", "--pull", &pull];
    rig.daemon.lunette(&[&words[..], more].concat())?;
    Ok(std::fs::read(rig.scratch.file("disk.raw"))?)
}

/// Changed units, as `qemu-img map` shows them.
fn changed_units(map: &str) -> Result<Vec<u64>> {
    let extents: Vec<Value> = serde_json::from_str(map)?;
    let mut units = Vec::new();
    for one in extents.iter().filter(|one| one["data"] == false) {
        let number = |key: &str| one[key].as_u64().with_context(|| format!("{key}: {one}"));
        let first = number("start")? / UNIT;
        units.extend(first..first + number("length")? / UNIT);
    }
    Ok(units)
}

/// Reads the extents and the data of a disk as virtnbdbackup does, and writes the data to a file. The context is empty for a full backup.
/// Later versions of virtnbdbackup use two contexts at once, and need the status of a disk below 4 GiB in one reply.
const VIRTNBDBACKUP: &str = r#"
import sys

import nbd
from libvirtnbdbackup.extenthandler import ExtentHandler
from libvirtnbdbackup.nbdcli import Unix, client

# It sleeps before it connects.
sys.modules["libvirtnbdbackup.nbdcli.client"].sleep = lambda seconds: None
socket, context, path = sys.argv[1:]
place = Unix("d0", context, socket)
connected = client(place).connect()
extents = ExtentHandler(connected, place).queryBlockStatus()
size = connected.nbd.get_size()
assert sum(one.length for one in extents) == size
with open(path, "r+b") as file:
    for one in extents:
        if one.data:
            file.seek(one.offset)
            file.write(connected.nbd.pread(one.length, one.offset))
connected.disconnect()

reached = {}
both = nbd.NBD()
both.add_meta_context("base:allocation")
both.add_meta_context("qemu:dirty-bitmap:mon")
both.connect_uri(place.uri)
both.block_status(size, 0, lambda name, at, found, error: reached.update({name: at + sum(found[::2])}))
both.shutdown()
assert list(reached.values()) == [size, size], reached
"#;

/// Checks that virtnbdbackup restores the point in time: from all data, and from the changes since the last copy.
fn check_virtnbdbackup(rig: &Rig, socket: &str, last: &[u8], expected: &[u8]) -> Result<()> {
    let file = rig.scratch.file("virtnbdbackup.raw");
    let path = file.display().to_string();
    let empty = vec![0; SIZE as usize];
    for (context, base) in [("", &empty[..]), ("qemu:dirty-bitmap:mon", last)] {
        std::fs::write(&file, base)?;
        let program = ["/usr/bin/python3", "-c", VIRTNBDBACKUP];
        let words = [&program[..], &[socket, context, &path]].concat();
        run(rig.scratch.files(), &words)?;
        ensure!(std::fs::read(&file)? == expected, "{context:?} differs");
    }
    Ok(())
}

#[test]
fn recipes_and_virtnbdbackup_read_a_pulled_backup() -> Result<()> {
    let rig = Rig::prepared(|scratch, daemon| {
        let file = scratch.file("disk.raw").display().to_string();
        let disk = format!("d0=file:{file},size={SIZE},cache=writeback");
        Ok(daemon.disk(&disk).vhost_blk("d0"))
    })?;
    let folder = rig.scratch.files();
    let socket = rig.scratch.socket("backup.sock").display().to_string();
    let even: Vec<u64> = (0..UNITS).step_by(2).collect();
    write(&rig, &even, 1)?;
    let monday = begin(&rig, &socket, &["--checkpoint", "mon", "--name", "mon"])?;
    let copy = recipe_at("nbdcopy", &socket)?;
    let copy = copy.lines().find(|line| line.starts_with("nbdcopy"));
    run(folder, &["sh", "-c", copy.context("no nbdcopy")?])?;
    rig.daemon.lunette(&["backup", "end", "mon"])?;
    let file = rig.scratch.file("d0.raw");
    ensure!(std::fs::read(&file)? == monday, "nbdcopy");
    let changes = [3, 4, 5, 60, 127];
    write(&rig, &changes, 2)?;
    let keys = ["--since", "mon", "--checkpoint", "tue", "--name", "tue"];
    let tuesday = begin(&rig, &socket, &keys)?;
    // Every second unit is in the scratch file, so that each piece of a status is one unit.
    write(&rig, &even, 3)?;
    check_virtnbdbackup(&rig, &socket, &monday, &tuesday)?;
    let program = recipe_at("import nbd", &socket)?;
    run(folder, &["/usr/bin/python3", "-c", &program])?;
    ensure!(std::fs::read(&file)? == tuesday, "the recipe's program");
    let map = run(folder, &["sh", "-c", &recipe_at("qemu-img map", &socket)?])?;
    ensure!(changed_units(&map)? == changes, "{map}");
    rig.daemon.lunette(&["backup", "end", "tue"])?;
    Ok(())
}

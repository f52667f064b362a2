//! Compares `lunette image` with qemu-img on the same images: exit codes, JSON, empty disks of 64 TiB, special characters in paths,
//! and existing destinations. Needs: qemu-img, qemu-io; root for a loop device. Takes: 10 s.
#![forbid(unsafe_code)]

use end_to_end::{Context, Result, Scratch, ensure};
use serde_json::Value;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Time limit. Reading every byte of an empty disk of 64 TiB would take minutes to hours.
const SOON: Duration = Duration::from_secs(60);

fn run(folder: &Path, program: &str, arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new(program);
    let ran = command.args(arguments).current_dir(folder).output();
    ran.with_context(|| format!("cannot run {program}; hint: apt-get install qemu-utils"))
}

fn succeeds(folder: &Path, program: &str, arguments: &[&str]) -> Result<String> {
    let ran = run(folder, program, arguments)?;
    let shown = format!("{ran:?}");
    ensure!(ran.status.success(), "{program} {arguments:?}: {shown}");
    Ok(String::from_utf8_lossy(&ran.stdout).into_owned())
}

fn image(folder: &Path, arguments: &[&str]) -> Result<Output> {
    let program = vm::lunette_program(vm::Profile::Dev)?.display().to_string();
    run(folder, &program, &[&["image"], arguments].concat())
}

fn code(folder: &Path, arguments: &[&str]) -> Result<Option<i32>> {
    Ok(image(folder, arguments)?.status.code())
}

fn json(output: &Output) -> Result<Value> {
    ensure!(output.status.success(), "{output:?}");
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Creates a chain of three: a raw image, an image that is smaller than its overlay, and an overlay with zeroes over data.
fn make_chain(folder: &Path) -> Result<()> {
    std::fs::write(folder.join("base.raw"), vec![7; 1 << 20])?;
    std::fs::File::options()
        .write(true)
        .open(folder.join("base.raw"))?
        .set_len(4 << 20)?;
    let create = |arguments: &[&str]| {
        let create = ["create", "-q", "-f", "qcow2"];
        succeeds(folder, "qemu-img", &[&create, arguments].concat())
    };
    create(&["-b", "base.raw", "-F", "raw", "middle.qcow2", "8M"])?;
    create(&["-b", "middle.qcow2", "-F", "qcow2", "top.qcow2", "16M"])?;
    let write = |image: &str, commands: [&str; 2]| {
        let all = ["-c", commands[0], "-c", commands[1], image];
        succeeds(folder, "qemu-io", &all)
    };
    write("middle.qcow2", ["write -P 1 512k 1M", "write -P 2 6M 64k"])?;
    write("top.qcow2", ["write -P 3 1M 192k", "write -z 6M 1M"])?;
    succeeds(folder, "qemu-img", &["snapshot", "-c", "s", "top.qcow2"])?;
    Ok(())
}

#[test]
fn map_has_the_extents_and_fields_of_qemu_img() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    make_chain(folder)?;
    let compressed = ["convert", "-c", "-O", "qcow2", "top.qcow2", "c.qcow2"];
    succeeds(folder, "qemu-img", &compressed)?;
    for (name, format) in [
        ("base.raw", "raw"),
        ("middle.qcow2", "qcow2"),
        ("top.qcow2", "qcow2"),
        ("c.qcow2", "qcow2"),
    ] {
        let ours = json(&image(folder, &["map", "--json", "-f", format, name])?)?;
        let arguments = ["map", "--output=json", "-f", format, name];
        let theirs: Value = serde_json::from_str(&succeeds(folder, "qemu-img", &arguments)?)?;
        ensure!(ours == theirs, "{name}: {ours:#} and {theirs:#}");
    }
    Ok(())
}

/// Creates images with snapshots, bitmaps, compressed clusters, leaks and subclusters, in both qcow2 versions.
fn make_variants(folder: &Path) -> Result<Vec<&'static str>> {
    make_chain(folder)?;
    let create = |options: &str, name: &str| {
        let create = ["create", "-q", "-f", "qcow2", "-o", options, name, "4M"];
        succeeds(folder, "qemu-img", &create)
    };
    create("compat=0.10", "old.qcow2")?;
    create("extended_l2=on", "sub.qcow2")?;
    create("data_file=data,data_file_raw=on", "external.qcow2")?;
    create("refcount_bits=32", "bitmaps.qcow2")?;
    let bitmap = |arguments: &[&str]| {
        let command = [&["bitmap"], arguments].concat();
        succeeds(folder, "qemu-img", &command)
    };
    bitmap(&["--add", "bitmaps.qcow2", "first"])?;
    bitmap(&["--add", "-g", "32768", "bitmaps.qcow2", "second one"])?;
    bitmap(&["--disable", "bitmaps.qcow2", "second one"])?;
    // Writes every second cluster first, so that the disk's clusters are not in order in the file.
    create("cluster_size=64k", "fragmented.qcow2")?;
    for first in [0, 64] {
        let writes = (0..16).flat_map(|nth| {
            let write = format!("write -q -P 7 {}k 64k", first + 128 * nth);
            ["-c".to_owned(), write]
        });
        let writes: Vec<String> = writes.chain(["fragmented.qcow2".to_owned()]).collect();
        let writes: Vec<&str> = writes.iter().map(String::as_str).collect();
        succeeds(folder, "qemu-io", &writes)?;
    }
    let compress = ["convert", "-q", "-c", "-O", "qcow2", "top.qcow2"];
    let compressed = [&compress[..], &["compressed.qcow2"]].concat();
    succeeds(folder, "qemu-img", &compressed)?;
    Ok(vec![
        "top.qcow2",
        "middle.qcow2",
        "old.qcow2",
        "sub.qcow2",
        "external.qcow2",
        "bitmaps.qcow2",
        "fragmented.qcow2",
        "compressed.qcow2",
    ])
}

/// Collects the fields of qemu-img that are missing in our output or differ.
fn differences(prefix: &str, ours: &Value, theirs: &Value, all: &mut Vec<String>) {
    match (ours, theirs) {
        (Value::Object(_), Value::Object(fields)) => {
            for (key, theirs) in fields {
                differences(&format!("{prefix}.{key}"), &ours[key], theirs, all);
            }
        }
        (Value::Array(our_items), Value::Array(items)) if our_items.len() == items.len() => {
            for (ours, theirs) in our_items.iter().zip(items) {
                differences(&format!("{prefix}[]"), ours, theirs, all);
            }
        }
        _ if ours == theirs => {}
        _ => all.push(format!("{prefix}: {ours} and {theirs}")),
    }
}

#[test]
fn info_and_check_have_the_values_of_qemu_img() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    let mut names = make_variants(folder)?;
    for command in ["info", "check"] {
        if command == "info" {
            names.push("base.raw");
        }
        for name in &names {
            let ours = json(&image(folder, &[command, "--output=json", name])?)?;
            let theirs = succeeds(folder, "qemu-img", &[command, "--output=json", name])?;
            let mut found = Vec::new();
            differences(command, &ours, &serde_json::from_str(&theirs)?, &mut found);
            ensure!(found.is_empty(), "{name}: {found:#?}");
        }
        names.retain(|name| *name != "base.raw");
    }
    let fragmented = json(&image(folder, &["check", "--json", "fragmented.qcow2"])?)?;
    ensure!(fragmented["fragmented-clusters"] == 31, "{fragmented}");
    let chain = ["info", "--backing-chain", "--json", "top.qcow2"];
    let chain = json(&image(folder, &chain)?)?;
    ensure!(chain.as_array().map(Vec::len) == Some(3), "{chain}");
    let text = image(folder, &["info", "bitmaps.qcow2"])?;
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    ensure!(
        text.contains("bitmap second one: 32768 bytes per bit, disabled"),
        "{text}"
    );
    Ok(())
}

#[test]
fn output_formats_are_spelled_as_for_qemu_img() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    make_chain(folder)?;
    for command in ["info", "map", "check", "snapshot"] {
        let print = |output: &[&str]| -> Result<Vec<u8>> {
            let printed = image(folder, &[&[command, "top.qcow2"], output].concat())?;
            ensure!(
                printed.status.success(),
                "{command} {output:?}: {printed:?}"
            );
            Ok(printed.stdout)
        };
        let json = print(&["--json"])?;
        ensure!(print(&["--output=json"])? == json, "{command}");
        ensure!(print(&["--output", "json"])? == json, "{command}");
        ensure!(print(&["--output=human"])? == print(&[])?, "{command}");
        ensure!(print(&["-f", "qcow2"])? == print(&[])?, "{command}");
        ensure!(print(&["--json", "--output=human"]).is_err(), "{command}");
    }
    let raw = ["snapshot", "-f", "raw", "top.qcow2"];
    ensure!(code(folder, &raw)? == Some(1));
    Ok(())
}

#[test]
fn exit_codes_are_those_of_qemu_img() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    make_chain(folder)?;
    let copy = ["convert", "-O", "qcow2", "top.qcow2", "same.qcow2"];
    succeeds(folder, "qemu-img", &copy)?;
    std::fs::write(folder.join("damaged.qcow2"), b"QFI\xfb\0\0\0\x03")?;
    // A shorter file. The other one has zeroes beyond its end.
    std::fs::write(folder.join("short.raw"), vec![7; 1 << 20])?;
    for (one, other, expected) in [
        ("top.qcow2", "same.qcow2", 0),
        ("top.qcow2", "middle.qcow2", 1),
        ("base.raw", "short.raw", 0),
        ("top.qcow2", "absent.qcow2", 2),
        ("absent.qcow2", "top.qcow2", 2),
        ("top.qcow2", "damaged.qcow2", 2),
    ] {
        let ours = code(folder, &["compare", one, other])?;
        let theirs = run(folder, "qemu-img", &["compare", one, other])?;
        let theirs = theirs.status.code();
        ensure!(ours == Some(expected), "{one} {other}: {ours:?}");
        ensure!(
            theirs == Some(expected),
            "qemu-img: {one} {other}: {theirs:?}"
        );
    }
    ensure!(code(folder, &["compare", "-s", "base.raw", "short.raw"])? == Some(1));
    ensure!(code(folder, &["compare", "top.qcow2"])? == Some(2));
    for (name, expected) in [
        ("top.qcow2", 0),
        ("absent.qcow2", 1),
        ("damaged.qcow2", 1),
        ("base.raw", 63),
    ] {
        let ours = code(folder, &["check", name])?;
        let theirs = run(folder, "qemu-img", &["check", name])?.status.code();
        ensure!(ours == Some(expected), "{name}: {ours:?}");
        ensure!(theirs == Some(expected), "qemu-img: {name}: {theirs:?}");
    }
    // Exit code 2 would mean that the image is damaged.
    ensure!(code(folder, &["check", "--unknown", "top.qcow2"])? == Some(1));
    Ok(())
}

#[test]
fn info_of_a_chain_without_an_end_fails() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    make_chain(folder)?;
    let rebase = ["rebase", "-u", "-b", "top.qcow2", "-F", "qcow2"];
    succeeds(
        folder,
        "qemu-img",
        &[&rebase[..], &["middle.qcow2"]].concat(),
    )?;
    for command in [&["info", "--chain"][..], &["map"]] {
        let failed = image(folder, &[command, &["top.qcow2"]].concat())?;
        let stderr = String::from_utf8_lossy(&failed.stderr);
        ensure!(failed.status.code() == Some(1), "{failed:?}");
        ensure!(stderr.contains("form a cycle"), "{stderr}");
    }
    Ok(())
}

#[test]
fn cost_follows_data_and_not_the_size() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    for name in ["a.qcow2", "b.qcow2"] {
        let create = ["create", "-q", "-f", "qcow2", name, "64T"];
        succeeds(folder, "qemu-img", &create)?;
    }
    let write = ["-c", "write -P 5 40T 192k", "a.qcow2"];
    succeeds(folder, "qemu-io", &write)?;
    let base = [
        "create", "-q", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2", "o.qcow2",
    ];
    succeeds(folder, "qemu-img", &base)?;
    let begun = Instant::now();
    ensure!(code(folder, &["compare", "a.qcow2", "b.qcow2"])? == Some(1));
    let convert = ["convert", "a.qcow2", "copy.qcow2", "-O", "qcow2"];
    ensure!(code(folder, &convert)? == Some(0));
    ensure!(code(folder, &["compare", "a.qcow2", "copy.qcow2"])? == Some(0));
    ensure!(code(folder, &[&convert[..], &["-n"]].concat())? == Some(0));
    ensure!(code(folder, &["map", "o.qcow2"])? == Some(0));
    let rebase = ["rebase", "o.qcow2", "--backing", "b.qcow2"];
    ensure!(code(folder, &rebase)? == Some(0));
    ensure!(code(folder, &["compare", "a.qcow2", "o.qcow2"])? == Some(0));
    let took = begun.elapsed();
    ensure!(took < SOON, "{took:?}");
    Ok(())
}

/// Options of qemu-img are accepted, and `-q` prints nothing.
#[test]
fn options_are_spelled_as_in_qemu_img() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = |name: &str| scratch.files().join(name);
    for name in ["ours", "theirs"] {
        std::fs::create_dir(folder(name))?;
    }
    for words in [
        &["create", "-q", "-f", "qcow2", "a.qcow2", "1M"][..],
        &["create", "-q", "-f", "raw", "r.raw", "1M"],
        &["create", "-q", "-f", "raw", "r.raw"],
        &[
            "create", "-q", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2", "o.qcow2",
        ],
        &["check", "-q", "-f", "qcow2", "a.qcow2"],
        &["check", "-q", "absent.qcow2"],
        &["snapshot", "-q", "-c", "s", "a.qcow2"],
        &["snapshot", "-q", "-a", "s", "a.qcow2"],
        &["snapshot", "-q", "-d", "s", "a.qcow2"],
        &[
            "rebase", "-q", "-u", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2", "o.qcow2",
        ],
        &["resize", "-q", "-f", "qcow2", "o.qcow2", "2M"],
    ] {
        let ours = image(&folder("ours"), words)?;
        let theirs = run(&folder("theirs"), "qemu-img", words)?;
        ensure!(
            ours.status.success() == theirs.status.success() && ours.stdout.is_empty(),
            "{words:?}: {ours:?}, {theirs:?}"
        );
    }
    ensure!(std::fs::metadata(folder("ours").join("r.raw"))?.len() == 1 << 20);
    ensure!(code(&folder("ours"), &["snapshot", "-l", "a.qcow2"])? == Some(0));
    let exists = image(
        &folder("ours"),
        &["convert", "a.qcow2", "r.raw", "-O", "raw"],
    )?;
    let text = String::from_utf8_lossy(&exists.stderr);
    ensure!(text.contains("already exists; hint: -n "), "{text}");
    Ok(())
}

#[test]
fn paths_may_have_special_characters() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files().join("a, b=c:d");
    std::fs::create_dir(&folder)?;
    let (one, two) = ("x,size=1,ro:y.qcow2", "ü %s'\"\\,,=.qcow2");
    let done = |arguments: &[&str]| -> Result<()> {
        let ran = image(&folder, arguments)?;
        ensure!(ran.status.success(), "{arguments:?}: {ran:?}");
        Ok(())
    };
    // QEMU would parse the part of a relative name before a colon as a protocol.
    let (one, two) = (format!("./{one}"), format!("./{two}"));
    let full = folder.join("over,lay.qcow2").display().to_string();
    done(&["create", &one, "4M"])?;
    done(&["convert", &one, &two, "-O", "qcow2"])?;
    done(&["create", &full, "--backing", &one])?;
    done(&["info", "--chain", &full])?;
    done(&["compare", &one, &full])?;
    done(&["map", &full])?;
    done(&["rebase", &full, "--backing", &two])?;
    done(&["commit", &full])?;
    done(&["check", &two])?;
    done(&["resize", &two, "8M"])?;
    done(&["snapshot", &two, "--create", "a,b"])
}

#[test]
fn convert_writes_over_existing_destinations() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    make_chain(folder)?;
    let old = vec![0xff; 16 << 20];
    std::fs::write(folder.join("there.raw"), &old)?;
    succeeds(
        folder,
        "qemu-img",
        &["convert", "-O", "qcow2", "there.raw", "there.qcow2"],
    )?;
    for (name, format) in [("there.raw", "raw"), ("there.qcow2", "qcow2")] {
        let convert = ["convert", "top.qcow2", name, "-O", format];
        ensure!(code(folder, &convert)? == Some(1), "{name} was overwritten");
        ensure!(code(folder, &[&convert[..], &["-n"]].concat())? == Some(0));
        succeeds(folder, "qemu-img", &["compare", "top.qcow2", name])?;
    }
    succeeds(folder, "qemu-img", &["check", "there.qcow2"])?;
    let absent = ["convert", "-n", "top.qcow2", "absent.raw", "-O", "raw"];
    ensure!(code(folder, &absent)? == Some(1) && !folder.join("absent.raw").exists());
    let small = ["convert", "-n", "top.qcow2", "base.raw", "-O", "raw"];
    ensure!(code(folder, &small)? == Some(1));
    ensure!(std::fs::metadata(folder.join("base.raw"))?.len() == 4 << 20);

    std::fs::write(folder.join("device"), &old)?;
    let find = ["-f", "--show", "device"];
    let device = succeeds(folder, "losetup", &find)?;
    let device = device.trim();
    let written = code(folder, &["convert", "top.qcow2", device, "-O", "raw"]);
    let second = code(
        folder,
        &["convert", "-f", "raw", device, device, "-O", "raw"],
    );
    std::fs::write(folder.join("large.raw"), vec![1; 17 << 20])?;
    let large = code(folder, &["convert", "large.raw", device, "-O", "raw"]);
    let odd = blocks_of_4096(folder);
    let same = run(
        folder,
        "qemu-img",
        &["compare", "-F", "raw", "top.qcow2", device],
    );
    // A hole over existing data.
    std::fs::write(folder.join("sparse.raw"), [9; 4096])?;
    let sparse = std::fs::File::options()
        .write(true)
        .open(folder.join("sparse.raw"))?;
    sparse.set_len(16 << 20)?;
    succeeds(
        folder,
        "dd",
        &[
            "if=large.raw",
            "bs=1M",
            "count=16",
            &format!("of={device}"),
            "conv=fsync",
            "status=none",
        ],
    )?;
    let program = vm::lunette_program(vm::Profile::Dev)?.display().to_string();
    let copied = run(folder, &program, &["iscsi", "copy", "sparse.raw", device]);
    let copied = copied.map(|copied| copied.status.code());
    let blocks = std::fs::metadata(folder.join("device"))?.blocks();
    succeeds(folder, "losetup", &["-d", device])?;
    ensure!(written? == Some(0) && large? == Some(1) && second? == Some(1));
    ensure!(copied? == Some(0), "iscsi copy");
    ensure!(
        blocks < 2048,
        "holes are written as zeroes: {blocks} sectors"
    );
    ensure!(
        std::fs::read(folder.join("device"))?
            == [vec![9; 4096], vec![0; (16 << 20) - 4096]].concat()
    );
    let same = same?;
    ensure!(same.status.success(), "{same:?}");
    odd
}

/// A disk that ends within a block of the destination. The rest of the block is unchanged.
fn blocks_of_4096(folder: &Path) -> Result<()> {
    std::fs::write(folder.join("large"), vec![0xff; 1 << 20])?;
    std::fs::write(folder.join("odd.raw"), vec![5; (512 << 10) + 512])?;
    let find = ["-f", "--show", "--sector-size", "4096", "large"];
    let device = succeeds(folder, "losetup", &find)?;
    let device = device.trim();
    let written = code(folder, &["convert", "odd.raw", device, "-O", "raw"]);
    succeeds(folder, "losetup", &["-d", device])?;
    ensure!(written? == Some(0));
    let mut expected = vec![0xff; 1 << 20];
    expected[..(512 << 10) + 512].fill(5);
    ensure!(std::fs::read(folder.join("large"))? == expected);
    Ok(())
}

/// `iscsi copy` with the locks and refusals of `image convert`.
#[test]
fn a_copy_of_bytes_overwrites_no_file_by_mistake() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    let program = vm::lunette_program(vm::Profile::Dev)?.display().to_string();
    let copy =
        |arguments: &[&str]| run(folder, &program, &[&["iscsi", "copy"], arguments].concat());
    let refused = |arguments: &[&str], why: &str| {
        let ran = copy(arguments)?;
        let text = String::from_utf8_lossy(&ran.stderr).into_owned();
        ensure!(
            !ran.status.success() && text.contains(why),
            "{arguments:?}: {ran:?}"
        );
        Ok(())
    };
    let accepted = |arguments: &[&str]| {
        let ran = copy(arguments)?;
        ensure!(ran.status.success(), "{arguments:?}: {ran:?}");
        Ok(())
    };
    let path = |name: &str| folder.join(name);
    let (new, old) = (vec![7; 2 << 20], vec![9; 4 << 20]);
    std::fs::write(path("new.raw"), &new)?;
    std::fs::write(path("old.raw"), &old)?;
    succeeds(
        folder,
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "vm.qcow2", "8M"],
    )?;
    let image_before = std::fs::read(path("vm.qcow2"))?;

    accepted(&["new.raw", "made.raw"])?;
    ensure!(std::fs::metadata(path("made.raw"))?.mode() & 0o777 == 0o600);
    refused(
        &["new.raw", "old.raw"],
        "old.raw: already exists; hint: -n writes",
    )?;
    refused(
        &["new.raw", "-n", "vm.qcow2"],
        "format qcow2, which raw bytes would destroy",
    )?;
    refused(
        &["new.raw", "-n", "none.raw"],
        "does not exist; hint: omit -n",
    )?;
    refused(&["old.raw", "-n", "new.raw"], "fewer than the source")?;
    refused(
        &["new.raw", "old.raw", "--from", "1048576"],
        "more than the 2097152 bytes",
    )?;
    refused(
        &["new.raw", "made.raw", "--from", "2097153"],
        "beyond the end of new.raw",
    )?;
    refused(&["new.raw", "/dev/lunette-test"], "not created below /dev")?;
    refused(&[".", "other.raw"], ".: is a directory")?;
    // A file that another program uses.
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(path("old.raw"))?;
    ensure!(sys::file_lock::lock(file.as_fd(), true)?.is_none());
    refused(
        &["new.raw", "-n", "old.raw"],
        "old.raw: is in use: another process",
    )?;
    refused(
        &["old.raw", "copy.raw"],
        "old.raw: is in use: another process",
    )?;
    ensure!(std::fs::read(path("old.raw"))? == old);
    ensure!(std::fs::read(path("vm.qcow2"))? == image_before);
    Ok(())
}

#[test]
fn a_copy_of_bytes_into_an_existing_file_keeps_the_rest() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    let program = vm::lunette_program(vm::Profile::Dev)?.display().to_string();
    let accepted = |arguments: &[&str]| {
        let words = [&["iscsi", "copy"], arguments].concat();
        let ran = run(folder, &program, &words)?;
        ensure!(ran.status.success(), "{arguments:?}: {ran:?}");
        Ok(())
    };
    let path = |name: &str| folder.join(name);
    let (new, old) = (vec![7; 2 << 20], vec![9; 4 << 20]);
    std::fs::write(path("new.raw"), &new)?;
    std::fs::write(path("old.raw"), &old)?;
    accepted(&["new.raw", "made.raw"])?;
    succeeds(
        folder,
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "vm.qcow2", "8M"],
    )?;

    accepted(&["new.raw", "-n", "old.raw"])?;
    let rest = &old[2 << 20..];
    ensure!(std::fs::read(path("old.raw"))? == [&new, rest].concat());
    // Holes of the source are zeroes in an existing file.
    std::fs::File::create(path("hole.raw"))?.set_len(1 << 20)?;
    accepted(&["hole.raw", "-n", "old.raw"])?;
    let first = [vec![0; 1 << 20], vec![7; 1 << 20]].concat();
    ensure!(std::fs::read(path("old.raw"))? == [&first[..], rest].concat());
    // The next run of an interrupted copy.
    let partial = std::fs::File::options()
        .write(true)
        .open(path("made.raw"))?;
    partial.set_len((1 << 20) + 100)?;
    accepted(&["new.raw", "made.raw", "--from", "1048576"])?;
    ensure!(std::fs::read(path("made.raw"))? == std::fs::read(path("new.raw"))?);
    std::fs::File::options()
        .write(true)
        .open(path("vm.qcow2"))?
        .set_len(4 << 20)?;
    accepted(&["new.raw", "-n", "vm.qcow2", "--format", "raw"])?;
    ensure!(std::fs::read(path("vm.qcow2"))?.starts_with(&new));
    Ok(())
}

#[test]
fn refused_convert_leaves_no_file() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    std::fs::write(folder.join("a.raw"), [7; 4096])?;
    for (arguments, why) in [
        (
            ["a.raw", "-"],
            "-: standard input and output are not supported",
        ),
        (
            ["-", "b.raw"],
            "-: standard input and output are not supported",
        ),
        (
            ["a.raw", "./a.raw"],
            "a.raw: source and destination are the same file",
        ),
        (["a.raw", "/dev/lunette-test"], "not created below /dev"),
        (
            ["a.raw", "/dev/none/lunette-test"],
            "not created below /dev",
        ),
    ] {
        let ran = image(
            folder,
            &[&["convert", "-n", "--to", "raw"], &arguments[..]].concat(),
        )?;
        let new = image(
            folder,
            &[&["convert", "--to", "raw"], &arguments[..]].concat(),
        )?;
        let text = String::from_utf8_lossy(&new.stderr).into_owned();
        ensure!(
            !ran.status.success() && !new.status.success(),
            "{ran:?} {new:?}"
        );
        ensure!(text.contains(why), "{new:?}");
    }
    ensure!(!folder.join("-").exists());
    // Clusters of 512 bytes are too small for this size. The new file is removed.
    std::fs::File::create(folder.join("large.raw"))?.set_len(256 << 30)?;
    let small = ["convert", "large.raw", "c.qcow2", "--cluster-size", "512"];
    let refused = image(folder, &[&small[..], &["--to", "qcow2"]].concat())?;
    let text = String::from_utf8_lossy(&refused.stderr);
    ensure!(text.contains("too large for clusters"), "{refused:?}");
    ensure!(!folder.join("c.qcow2").exists(), "the file is left");
    Ok(())
}

//! Formats and file names that a guest may have written: no command trusts them. Images of other formats are recognized and refused.
//! Needs: qemu-utils. Takes: 5 s.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::{Command, Output};

use end_to_end::{Context, Result, Rig, Scratch, ensure};

const SECRET: &[u8] = b"a secret of the host";
const MIB: usize = 1 << 20;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn qemu_img(folder: &Path, arguments: &[&str]) -> Result<()> {
    let mut command = Command::new("qemu-img");
    let ran = command.args(arguments).current_dir(folder).output();
    let ran = ran.context("cannot run qemu-img; hint: apt-get install qemu-utils")?;
    ensure!(ran.status.success(), "{arguments:?}: {}", text(&ran.stderr));
    Ok(())
}

fn image(folder: &Path, arguments: &[&str]) -> Result<Output> {
    let program = vm::lunette_program(vm::Profile::Dev)?;
    let mut command = Command::new(program);
    let command = command.arg("image").args(arguments).current_dir(folder);
    Ok(command.output()?)
}

fn succeeds(folder: &Path, arguments: &[&str]) -> Result<()> {
    let ran = image(folder, arguments)?;
    ensure!(ran.status.success(), "{arguments:?}: {ran:?}");
    Ok(())
}

fn refused(folder: &Path, arguments: &[&str], why: &str) -> Result<()> {
    let ran = image(folder, arguments)?;
    let error_text = text(&ran.stderr);
    ensure!(
        !ran.status.success() && error_text.contains(why) && error_text.contains("hint"),
        "{arguments:?}: {error_text}"
    );
    Ok(())
}

/// Creates raw disks whose guests have written qcow2 headers that name `secret` as backing image and as data file.
fn guests_disks(folder: &Path) -> Result<()> {
    let mut secret = SECRET.to_vec();
    secret.resize(MIB, b'.');
    std::fs::write(folder.join("secret"), &secret)?;
    let create = ["create", "-q", "-f", "qcow2"];
    let backing = ["-b", "secret", "-F", "raw", "header", "1M"];
    qemu_img(folder, &[&create[..], &backing].concat())?;
    let data = ["-o", "data_file=secret.data,data_file_raw=on", "data", "1M"];
    qemu_img(folder, &[&create[..], &data].concat())?;
    std::fs::rename(folder.join("secret.data"), folder.join("unused"))?;
    std::fs::copy(folder.join("secret"), folder.join("secret.data"))?;
    for (header, guest) in [("header", "guest.raw"), ("data", "guest2.raw")] {
        let mut disk = std::fs::read(folder.join(header))?;
        disk.resize(8 * MIB, 0);
        std::fs::write(folder.join(guest), disk)?;
    }
    qemu_img(folder, &["create", "-q", "-f", "qcow2", "own.qcow2", "1M"])
}

#[test]
fn content_of_a_raw_disk_never_makes_it_an_image() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    guests_disks(folder)?;
    let why = "signature of a qcow2 image";
    for guest in ["guest.raw", "guest2.raw"] {
        let before = std::fs::read(folder.join(guest))?;
        for arguments in [
            &["create", "clone.qcow2", "--backing", guest][..],
            &["convert", guest, "copy", "--to", "raw"],
            &["compare", guest, "secret"],
            &["compare", "secret", guest],
            &["resize", guest, "16M"],
            &["map", guest],
            &["commit", guest],
            &["rebase", guest, "--no-backing"],
            &["rebase", "own.qcow2", "--backing", guest],
            &["info", guest, "--chain"],
        ] {
            refused(folder, arguments, why)?;
        }
        succeeds(folder, &["info", guest])?;
        ensure!(std::fs::read(folder.join(guest))? == before);
        // The administrator states the format raw.
        succeeds(
            folder,
            &["convert", guest, "copy", "--to", "raw", "--from", "raw"],
        )?;
        ensure!(std::fs::read(folder.join("copy"))? == before);
        succeeds(
            folder,
            &[
                "compare",
                guest,
                "copy",
                "--format",
                "raw",
                "--other-format",
                "raw",
            ],
        )?;
        succeeds(folder, &["map", guest, "--format", "raw"])?;
        let create = ["create", "clone.qcow2", "--backing", guest];
        succeeds(
            folder,
            &[&create[..], &["--backing-format", "raw"]].concat(),
        )?;
        succeeds(
            folder,
            &["compare", "clone.qcow2", "copy", "--other-format", "raw"],
        )?;
        succeeds(folder, &["resize", guest, "16M", "--format", "raw"])?;
        ensure!(std::fs::metadata(folder.join(guest))?.len() == 16 << 20);
        for name in ["copy", "clone.qcow2"] {
            std::fs::remove_file(folder.join(name))?;
        }
    }
    let secret = std::fs::read(folder.join("secret"))?;
    ensure!(secret.starts_with(SECRET) && secret.len() == MIB);
    Ok(())
}

#[test]
fn images_name_files_of_their_own_folder_unless_more_is_allowed() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    std::fs::create_dir(folder.join("import"))?;
    std::fs::write(folder.join("secret"), [7; MIB])?;
    let at = folder.join("import");
    let create = ["create", "-q", "-f", "qcow2"];
    qemu_img(
        &at,
        &[
            &create[..],
            &["-b", "../secret", "-F", "raw", "image.qcow2"],
        ]
        .concat(),
    )?;
    let data = ["-o", "data_file=beside.data", "data.qcow2", "1M"];
    qemu_img(&at, &[&create[..], &data].concat())?;
    std::fs::remove_file(at.join("beside.data"))?;
    std::os::unix::fs::symlink("../secret", at.join("beside.data"))?;
    for name in ["image.qcow2", "data.qcow2"] {
        for arguments in [
            &["convert", name, "copy.raw", "--to", "raw"][..],
            &["compare", name, "../secret"],
            &["map", name],
        ] {
            refused(&at, arguments, "named_files=any")?;
        }
    }
    for arguments in [
        &["commit", "image.qcow2"][..],
        &["rebase", "image.qcow2", "--no-backing"],
        &["resize", "image.qcow2", "2M"],
        &["info", "image.qcow2", "--chain"],
    ] {
        refused(&at, arguments, "named_files=any")?;
    }
    succeeds(
        &at,
        &[
            "compare",
            "image.qcow2",
            "../secret",
            "--named-files",
            "any",
        ],
    )?;
    // A disk in an API request, and a job's target.
    let rig = Rig::new(|daemon| daemon.disk("d0=ram:1M").vhost_blk("d0"))?;
    let path = at.join("image.qcow2").display().to_string();
    let disk = format!("d1=image:{path}");
    let target = format!("image:{path}");
    for words in [
        &["disk", "add", &disk][..],
        &["disk", "mirror", "d0", &target],
        &["disk", "backup", "d0", &target],
    ] {
        let item = rig.daemon.ask(words)?;
        ensure!(
            !item.status.success() && text(&item.stderr).contains("named_files=any"),
            "{words:?}: {item:?}"
        );
    }
    rig.daemon
        .lunette(&["disk", "add", &format!("{disk},named_files=any")])?;
    Ok(())
}

#[test]
fn images_of_other_formats_are_named_and_refused() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    let mut disk = b"boot sector".to_vec();
    disk.resize(4 * MIB, 0);
    std::fs::write(folder.join("disk.raw"), disk)?;
    for (kind, name) in [
        ("vpc", "VHD"),
        ("vhdx", "VHDX"),
        ("vmdk", "VMDK"),
        ("vdi", "VDI"),
        ("qed", "QED"),
        ("parallels", "Parallels"),
        ("qcow", "qcow (version 1)"),
    ] {
        let file = format!("image.{kind}");
        qemu_img(folder, &["convert", "-O", kind, "disk.raw", &file])?;
        let why = format!("in the format {name}, which is not supported");
        for arguments in [
            &["convert", &file, "copy.raw", "--to", "raw"][..],
            &["compare", &file, "disk.raw"],
            &["map", &file],
            &["resize", &file, "8M"],
            &["create", "over.qcow2", "--backing", &file],
        ] {
            refused(folder, arguments, &why)?;
        }
        let forced = ["convert", &file, "copy.raw", "--to", "raw", "--from", "raw"];
        succeeds(folder, &forced)?;
        ensure!(std::fs::read(folder.join("copy.raw"))? == std::fs::read(folder.join(&file))?);
        std::fs::remove_file(folder.join("copy.raw"))?;
    }
    Ok(())
}

/// Includes a rebase that only changes the name of the backing image.
#[test]
fn images_are_not_rebased_onto_themselves_or_long_chains() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    let name = |nth: usize| format!("{nth}.qcow2");
    succeeds(folder, &["create", "0.qcow2", "1M"])?;
    let create = |nth: usize, below: &str| {
        let backing = ["--backing", below, "--backing-format", "qcow2"];
        succeeds(folder, &[&["create", &name(nth)][..], &backing].concat())
    };
    create(1, "0.qcow2")?;
    create(2, "1.qcow2")?;
    for mode in [&["--unsafe"][..], &[]] {
        for below in ["0.qcow2", "1.qcow2", "2.qcow2"] {
            let rebase = ["rebase", "0.qcow2", "--backing", below];
            refused(folder, &[&rebase[..], mode].concat(), "form a cycle")?;
        }
    }
    // Writes the headers of 512 images, each with the name of the image below.
    for nth in 3..=512 {
        let made = std::fs::read(folder.join("2.qcow2"))?;
        let below = name(nth - 1);
        let at = u64::from_be_bytes(made[8..16].try_into()?) as usize;
        let mut image = made;
        image[at..at + below.len()].copy_from_slice(below.as_bytes());
        image[16..20].copy_from_slice(&(below.len() as u32).to_be_bytes());
        std::fs::write(folder.join(name(nth)), image)?;
    }
    // Like qemu-img, `map` reads only headers and tables and accepts a chain of any length.
    succeeds(folder, &["map", "512.qcow2"])?;
    succeeds(folder, &["compare", "511.qcow2", "0.qcow2"])?;
    let compare = ["compare", "512.qcow2", "0.qcow2"];
    refused(folder, &compare, "more than 512 images")?;
    let create = ["create", "top.qcow2", "--backing", "511.qcow2"];
    refused(folder, &create, "more than 512 images")?;
    ensure!(!folder.join("top.qcow2").exists());
    succeeds(folder, &["create", "top.qcow2", "1M"])?;
    let rebase = ["rebase", "top.qcow2", "--backing", "511.qcow2"];
    refused(
        folder,
        &[&rebase[..], &["--unsafe"]].concat(),
        "would exceed 512 images",
    )?;
    refused(folder, &rebase, "would exceed 512 images")
}

/// An image that the daemon could not open is refused, and no partial result remains.
#[test]
fn images_that_could_not_be_opened_are_not_made() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    std::fs::write(folder.join("a:b.raw"), [0; MIB])?;
    let long = "x".repeat(1100);
    for (arguments, why) in [
        (&["create", "new.qcow2", "0"][..], "0 bytes"),
        (
            &[
                "create",
                "new.qcow2",
                "--backing",
                "a:b.raw",
                "--backing-format",
                "raw",
            ],
            "is not a file",
        ),
        (
            &["create", "new.qcow2", "1M", "--data-file", "json:x"],
            "json:",
        ),
        (
            &["create", "new.qcow2", "1M", "--data-file", &long],
            "too long",
        ),
    ] {
        let ran = image(folder, arguments)?;
        let error_text = text(&ran.stderr);
        ensure!(
            !ran.status.success() && error_text.contains(why),
            "{arguments:?}: {error_text}"
        );
        ensure!(!folder.join("new.qcow2").exists(), "{arguments:?}");
    }
    Ok(())
}

/// A snapshot, a commit and a mirror keep the disk's configured policy for named files.
#[test]
fn jobs_keep_the_policy_for_named_files() -> Result<()> {
    let mut rig = Rig::prepared(|scratch, daemon| {
        let at = scratch.files();
        std::fs::create_dir(at.join("elsewhere"))?;
        for name in ["d0.qcow2", "d1.qcow2"] {
            qemu_img(at, &["create", "-q", "-f", "qcow2", name, "1M"])?;
        }
        let disk = |name: &str, policy: &str| {
            let path = at.join(format!("{name}.qcow2"));
            format!("{name}=image:{},named_files={policy}", path.display())
        };
        let daemon = daemon.disk(&disk("d0", "folder")).disk(&disk("d1", "none"));
        Ok(daemon.vhost_blk("d0").vhost_blk("d1"))
    })?;
    let at = rig.scratch.files().to_owned();
    let path = |name: &str| at.join(name).display().to_string();
    let policy = |rig: &Rig| -> Result<String> {
        let shown: serde_json::Value = control::get(&rig.daemon.control(), "/v1/disks/d0")?;
        Ok(shown["named_files"].as_str().unwrap_or("any").to_owned())
    };
    for (disk, to, why) in [
        ("d0", "elsewhere/new.qcow2", "named_files=folder"),
        ("d1", "new.qcow2", "named_files=none"),
    ] {
        let snapshot = ["disk", "snapshot", disk, "--to", &path(to)];
        let reply = rig.daemon.ask(&snapshot)?;
        ensure!(
            !reply.status.success() && text(&reply.stderr).contains(why),
            "{disk}: {reply:?}"
        );
        ensure!(!at.join(to).exists(), "{to} is left behind");
    }
    let (snapshot, moved) = (path("snapshot.qcow2"), path("moved.qcow2"));
    let moved = format!("image:{moved}");
    for words in [
        &["disk", "snapshot", "d0", "--to", &snapshot][..],
        &["disk", "commit", "d0", "--wait"],
        &["disk", "snapshot", "d0", "--to", &path("second.qcow2")],
        &["disk", "mirror", "d0", &moved, "--switch", "--wait"],
    ] {
        rig.daemon.lunette(words)?;
        let now = policy(&rig)?;
        ensure!(now == "folder", "{words:?}: {now}");
        rig.daemon.kill()?;
        rig.daemon.start_again()?;
        let now = policy(&rig)?;
        ensure!(now == "folder", "{words:?}, after a restart: {now}");
    }
    Ok(())
}

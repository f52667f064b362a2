//! `lunette image commit`, `rebase` and `snapshot` on random images that QEMU creates and writes. qemu-img checks that the content
//! is unchanged and no image has errors. Needs: qemu-utils. Takes: 25 s.
#![forbid(unsafe_code)]

use end_to_end::{Context, Result, Scratch, ensure};
use std::path::Path;
use std::process::{Command, Output};

const KIB: u64 = 1 << 10;
/// Number of random images per test.
const SEEDS: u64 = 5;

fn run(folder: &Path, program: &str, arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new(program);
    let ran = command.args(arguments).current_dir(folder).output();
    ran.with_context(|| format!("cannot run {program}; hint: apt-get install qemu-utils"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a command that must succeed and returns its standard output.
fn succeeds(folder: &Path, program: &str, arguments: &[&str]) -> Result<String> {
    let ran = run(folder, program, arguments)?;
    let (stdout, stderr) = (text(&ran.stdout), text(&ran.stderr));
    ensure!(
        ran.status.success(),
        "{program} {arguments:?}: {stdout}{stderr}"
    );
    Ok(stdout)
}

/// Runs a command that must fail and returns its standard error.
fn refused(folder: &Path, arguments: &[&str]) -> Result<String> {
    let ran = run(folder, &lunette()?, &[&["image"], arguments].concat())?;
    ensure!(
        !ran.status.success(),
        "{arguments:?}: {}",
        text(&ran.stdout)
    );
    Ok(text(&ran.stderr))
}

fn lunette() -> Result<String> {
    Ok(vm::lunette_program(vm::Profile::Dev)?.display().to_string())
}

fn image(folder: &Path, arguments: &[&str]) -> Result<String> {
    succeeds(folder, &lunette()?, &[&["image"], arguments].concat())
}

/// Writes random data, zeroes and compressed clusters with QEMU.
fn scribble(
    folder: &Path,
    name: &str,
    format: &str,
    size: u64,
    random: &mut fastrand::Rng,
) -> Result<()> {
    let mut commands = Vec::new();
    for _ in 0..6 {
        let at = random.u64(..size / KIB / 4) * 4 * KIB;
        let length = ((1 + random.u64(..40)) * 4 * KIB).min(size - at);
        let pattern = 1 + random.u64(..250);
        commands.push(match random.u64(..4) {
            0 if format == "qcow2" => format!("write -z {at} {length}"),
            1 if format == "qcow2" && at.is_multiple_of(64 * KIB) && at + 64 * KIB <= size => {
                format!("write -c -P {pattern} {at} 64k")
            }
            _ => format!("write -P {pattern} {at} {length}"),
        });
    }
    for command in &commands {
        let arguments = ["-f", format, "-c", command, name];
        let ran = run(folder, "qemu-io", &arguments)?;
        // QEMU compresses only whole, unallocated clusters and fails for others.
        let may_fail = command.starts_with("write -c");
        ensure!(
            ran.status.success() || may_fail,
            "{}{}",
            text(&ran.stdout),
            text(&ran.stderr)
        );
    }
    Ok(())
}

/// Creates two raw or qcow2 bases of different sizes and an overlay on the first.
fn make(folder: &Path, seed: u64) -> Result<[&'static str; 2]> {
    let mut random = fastrand::Rng::with_seed(seed);
    let formats = match seed % 3 {
        0 => ["raw", "raw"],
        1 => ["qcow2", "raw"],
        _ => ["raw", "qcow2"],
    };
    let cluster = ["4k", "64k", "2M"][random.u64(..3) as usize];
    let size = |random: &mut fastrand::Rng| (256 + random.u64(..2048)) * 4 * KIB;
    for (name, format) in ["one", "two"].into_iter().zip(formats) {
        let bytes = size(&mut random);
        let text = bytes.to_string();
        succeeds(
            folder,
            "qemu-img",
            &["create", "-q", "-f", format, name, &text],
        )?;
        scribble(folder, name, format, bytes, &mut random)?;
    }
    let bytes = size(&mut random);
    let (text, options) = (bytes.to_string(), format!("cluster_size={cluster}"));
    let create = [
        "create", "-q", "-f", "qcow2", "-o", &options, "-b", "one", "-F", formats[0], "overlay",
        &text,
    ];
    succeeds(folder, "qemu-img", &create)?;
    scribble(folder, "overlay", "qcow2", bytes, &mut random)?;
    Ok(formats)
}

/// Returns the overlay's content, read by QEMU.
fn content(folder: &Path) -> Result<Vec<u8>> {
    succeeds(
        folder,
        "qemu-img",
        &["convert", "-O", "raw", "overlay", "content"],
    )?;
    Ok(std::fs::read(folder.join("content"))?)
}

fn is_clean(folder: &Path, name: &str) -> Result<()> {
    succeeds(folder, "qemu-img", &["check", "-f", "qcow2", name]).map(drop)
}

#[test]
fn rebased_images_keep_their_content() -> Result<()> {
    for seed in 0..SEEDS {
        let scratch = Scratch::new()?;
        let folder = scratch.files();
        let formats = make(folder, seed)?;
        let before = content(folder)?;
        image(
            folder,
            &[
                "rebase",
                "overlay",
                "--backing",
                "two",
                "--backing-format",
                formats[1],
            ],
        )?;
        is_clean(folder, "overlay")?;
        ensure!(
            content(folder)? == before,
            "seed {seed}: the content differs on two"
        );
        let info = succeeds(folder, "qemu-img", &["info", "overlay"])?;
        ensure!(
            info.contains("backing file: two")
                && info.contains(&format!("backing file format: {}", formats[1])),
            "{info}"
        );
        image(folder, &["rebase", "overlay", "--no-backing"])?;
        is_clean(folder, "overlay")?;
        std::fs::remove_file(folder.join("one"))?;
        std::fs::remove_file(folder.join("two"))?;
        ensure!(
            content(folder)? == before,
            "seed {seed}: the content differs alone"
        );
        let info = succeeds(folder, "qemu-img", &["info", "overlay"])?;
        ensure!(!info.contains("backing"), "{info}");
    }
    Ok(())
}

#[test]
fn committed_images_give_their_content_to_the_base() -> Result<()> {
    for seed in 100..100 + SEEDS {
        let scratch = Scratch::new()?;
        let folder = scratch.files();
        let formats = make(folder, seed)?;
        let before = content(folder)?;
        let rest = {
            succeeds(
                folder,
                "qemu-img",
                &["convert", "-f", formats[0], "-O", "raw", "one", "old"],
            )?;
            std::fs::read(folder.join("old"))?
        };
        image(folder, &["commit", "overlay"])?;
        succeeds(
            folder,
            "qemu-img",
            &["convert", "-f", formats[0], "-O", "raw", "one", "new"],
        )?;
        let after = std::fs::read(folder.join("new"))?;
        ensure!(
            after[..before.len()] == before,
            "seed {seed}: the base has not got the content"
        );
        // A commit does not change the base beyond the overlay's end.
        let beyond = before.len().min(rest.len());
        ensure!(
            after[before.len()..] == rest[beyond..],
            "seed {seed}: the base's end has changed"
        );
        ensure!(
            content(folder)? == before,
            "seed {seed}: the overlay has changed"
        );
        is_clean(folder, "overlay")?;
        if formats[0] == "qcow2" {
            is_clean(folder, "one")?;
        }
    }
    Ok(())
}

/// An unallocated range may begin in the middle of a cluster. The images below differ in the first half of the next cluster.
#[test]
fn rebase_of_an_image_with_subclusters_keeps_its_content() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    let mut below = vec![0; 256 << 10];
    std::fs::write(folder.join("new"), &below)?;
    below[64 << 10..96 << 10].fill(0x11);
    std::fs::write(folder.join("old"), &below)?;
    let options = "extended_l2=on,cluster_size=64k";
    let create = ["create", "-q", "-f", "qcow2", "-o", options];
    let backing = ["-b", "old", "-F", "raw", "overlay"];
    succeeds(folder, "qemu-img", &[&create[..], &backing].concat())?;
    let write = ["-f", "qcow2", "-c", "write -q -P 5 0 32k", "overlay"];
    succeeds(folder, "qemu-io", &write)?;
    let before = content(folder)?;
    let rebase = ["rebase", "overlay", "--backing", "new"];
    image(
        folder,
        &[&rebase[..], &["--backing-format", "raw"]].concat(),
    )?;
    ensure!(content(folder)? == before, "the content has changed");
    is_clean(folder, "overlay")
}

/// Clusters of 2 MiB are larger than the pieces in which rebase compares images.
#[test]
fn rebase_counts_each_large_cluster_once() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    let mut below = vec![0; 12 << 20];
    std::fs::write(folder.join("new"), &below)?;
    // Two whole clusters, and the second half of a third.
    below[..4 << 20].fill(0x11);
    below[7 << 20..8 << 20].fill(0x22);
    std::fs::write(folder.join("old"), &below)?;
    let create = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=2M"];
    let backing = ["-b", "old", "-F", "raw", "overlay"];
    succeeds(folder, "qemu-img", &[&create[..], &backing].concat())?;
    let before = content(folder)?;
    let rebase = ["rebase", "overlay", "--backing", "new"];
    let raw = ["--backing-format", "raw"];
    let report = image(folder, &[&rebase[..], &raw].concat())?;
    ensure!(report.contains(": 3 clusters copied"), "{report}");
    ensure!(content(folder)? == before, "the content has changed");
    is_clean(folder, "overlay")
}

#[test]
fn rebase_and_commit_refuse_content_changes() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    make(folder, 2)?;
    let message = refused(folder, &["rebase", "overlay", "--backing", "overlay"])?;
    ensure!(
        message.contains("overlay") && message.contains("hint"),
        "{message}"
    );
    let missing = ["rebase", "overlay", "--backing", "nowhere"];
    for words in [&missing[..], &[&missing[..], &["-F", "raw"]].concat()] {
        let message = refused(folder, words)?;
        ensure!(
            message.contains("nowhere") && !message.contains("create it"),
            "{message}"
        );
    }
    let message = refused(folder, &["commit", "two"])?;
    ensure!(message.contains("no backing image"), "{message}");
    // Only the name of the backing image changes, as after a move.
    std::fs::rename(folder.join("one"), folder.join("moved"))?;
    image(
        folder,
        &[
            "rebase",
            "overlay",
            "--backing",
            "moved",
            "--backing-format",
            "raw",
            "--unsafe",
        ],
    )?;
    let before = content(folder)?;
    succeeds(folder, "qemu-img", &["snapshot", "-c", "kept", "overlay"])?;
    for command in [
        &["rebase", "overlay", "--no-backing"][..],
        &["commit", "overlay"],
    ] {
        let message = refused(folder, command)?;
        ensure!(message.contains("snapshots"), "{message}");
    }
    is_clean(folder, "overlay")?;
    ensure!(content(folder)? == before);
    Ok(())
}

/// QEMU reads, applies and removes our snapshots, and Lunette those of QEMU.
#[test]
fn snapshots_are_those_of_qemu_and_keep_their_content() -> Result<()> {
    for seed in 200..200 + SEEDS {
        let scratch = Scratch::new()?;
        let folder = scratch.files();
        make(folder, seed)?;
        let mut random = fastrand::Rng::with_seed(seed);
        let size = content(folder)?.len() as u64;
        let mut kept = Vec::new();
        for (number, by_us) in [true, false, true].into_iter().enumerate() {
            let name = format!("s{number}");
            kept.push(content(folder)?);
            match by_us {
                true => image(folder, &["snapshot", "overlay", "--create", &name])?,
                false => succeeds(folder, "qemu-img", &["snapshot", "-c", &name, "overlay"])?,
            };
            is_clean(folder, "overlay")?;
            ensure!(
                content(folder)? == kept[number],
                "seed {seed}: the disk has changed"
            );
            scribble(folder, "overlay", "qcow2", size, &mut random)?;
        }
        let list = image(folder, &["snapshot", "overlay", "--json"])?;
        ensure!(
            ["s0", "s1", "s2"].iter().all(|name| list.contains(name)),
            "{list}"
        );
        let error = refused(folder, &["snapshot", "overlay", "--create", "s1"])?;
        ensure!(error.contains("already"), "{error}");
        let error = refused(folder, &["snapshot", "overlay", "--apply", "s9"])?;
        ensure!(error.contains("no snapshot s9"), "{error}");
        // Each program applies a snapshot of the other.
        image(folder, &["snapshot", "overlay", "--apply", "s1"])?;
        is_clean(folder, "overlay")?;
        ensure!(content(folder)? == kept[1], "seed {seed}: s1 differs");
        scribble(folder, "overlay", "qcow2", size, &mut random)?;
        succeeds(folder, "qemu-img", &["snapshot", "-a", "s2", "overlay"])?;
        ensure!(content(folder)? == kept[2], "seed {seed}: s2 differs");
        image(folder, &["snapshot", "overlay", "--delete", "s1"])?;
        is_clean(folder, "overlay")?;
        ensure!(
            content(folder)? == kept[2],
            "seed {seed}: a removal changes the disk"
        );
        succeeds(folder, "qemu-img", &["snapshot", "-a", "s0", "overlay"])?;
        ensure!(content(folder)? == kept[0], "seed {seed}: s0 differs");
        image(folder, &["snapshot", "overlay", "--delete", "s0"])?;
        image(folder, &["snapshot", "overlay", "--delete", "s2"])?;
        is_clean(folder, "overlay")?;
        ensure!(
            content(folder)? == kept[0],
            "seed {seed}: the last removal changes the disk"
        );
    }
    Ok(())
}

/// Persistent bitmaps remain valid if the disk's content is unchanged. Their loss is always reported.
#[test]
fn bitmaps_stay_valid_or_their_loss_is_announced() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    let create = ["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2"];
    succeeds(
        folder,
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "base", "8M"],
    )?;
    succeeds(folder, "qemu-img", &[&create[..], &["disk"]].concat())?;
    succeeds(folder, "qemu-io", &["-c", "write -P 4 0 1M", "base"])?;
    for name in ["base", "disk"] {
        succeeds(folder, "qemu-img", &["bitmap", "--add", name, "b"])?;
    }
    let has_bitmap = |name: &str| -> Result<bool> {
        let info = succeeds(folder, "qemu-img", &["info", "--output=json", name])?;
        is_clean(folder, name)?;
        image(folder, &["check", name])?;
        Ok(info.contains("\"bitmaps\""))
    };
    ensure!(has_bitmap("disk")? && has_bitmap("base")?);
    image(folder, &["snapshot", "disk", "--create", "s"])?;
    ensure!(has_bitmap("disk")?, "a snapshot keeps the content");
    let message = refused(folder, &["snapshot", "disk", "--apply", "s"])?;
    ensure!(
        message.contains("bitmaps") && message.contains("hint"),
        "{message}"
    );
    image(folder, &["snapshot", "disk", "--delete", "s"])?;
    ensure!(has_bitmap("disk")?, "a removal keeps the content");
    image(folder, &["rebase", "disk", "--no-backing"])?;
    ensure!(has_bitmap("disk")?, "a rebase keeps the content");
    let back = [
        "rebase",
        "disk",
        "--backing",
        "base",
        "--backing-format",
        "qcow2",
    ];
    image(folder, &back)?;
    ensure!(has_bitmap("disk")?, "a rebase keeps the content");
    for (command, name) in [
        (&["commit", "disk"][..], "base"),
        (&["resize", "disk", "16M", "--format", "qcow2"], "disk"),
    ] {
        let ran = run(folder, &lunette()?, &[&["image"], command].concat())?;
        let message = text(&ran.stderr);
        ensure!(
            ran.status.success() && message.contains("bitmaps are now invalid"),
            "{message}"
        );
        // The clusters of the lost bitmaps are leaks. Both programs find them.
        image(folder, &["check", name, "--repair", "leaks"])?;
        ensure!(!has_bitmap(name)?, "{name}");
    }
    Ok(())
}

/// The cost of a commit and of a rebase follows the allocated data. The limit is far above the time on a loaded machine.
#[test]
fn commit_and_rebase_of_large_empty_overlays_take_seconds() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    succeeds(
        folder,
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "base", "64T"],
    )?;
    let create = [
        "create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", "overlay",
    ];
    succeeds(folder, "qemu-img", &create)?;
    let writes = [
        "-c",
        "write -P 5 40T 64k",
        "-c",
        "write -z 50T 1M",
        "overlay",
    ];
    succeeds(folder, "qemu-io", &writes)?;
    let began = std::time::Instant::now();
    image(folder, &["commit", "overlay"])?;
    image(folder, &["rebase", "overlay", "--no-backing"])?;
    let took = began.elapsed();
    ensure!(took.as_secs() < 30, "{took:?}");
    let read = ["-c", "read -P 5 40T 64k", "-c", "read -P 0 50T 1M", "base"];
    succeeds(folder, "qemu-io", &read)?;
    is_clean(folder, "base")?;
    is_clean(folder, "overlay")
}

/// After a kill at any time, the overlay has its content, and repeating the command completes the work.
#[test]
fn killed_commits_and_rebases_keep_content_and_can_be_repeated() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    for (round, arguments) in [
        &["commit", "overlay"][..],
        &["rebase", "overlay", "--no-backing"],
    ]
    .into_iter()
    .cycle()
    .take(6)
    .enumerate()
    {
        make(folder, 300 + round as u64)?;
        let before = content(folder)?;
        let mut command = Command::new(lunette()?);
        let mut child = command
            .arg("image")
            .args(arguments)
            .current_dir(folder)
            .spawn()?;
        std::thread::sleep(std::time::Duration::from_millis(4 + 9 * round as u64));
        child.kill()?;
        child.wait()?;
        ensure!(
            content(folder)? == before,
            "round {round}: a kill changes the content"
        );
        image(folder, arguments)?;
        ensure!(
            content(folder)? == before,
            "round {round}: another run changes the content"
        );
        // Clusters that were reserved before the kill are leaks.
        image(folder, &["check", "overlay", "--repair", "leaks"])?;
        is_clean(folder, "overlay")?;
        for name in ["one", "two", "overlay"] {
            std::fs::remove_file(folder.join(name))?;
        }
    }
    Ok(())
}

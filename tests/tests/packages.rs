//! Debian packages: reproducible, free of lintian complaints, installed in a folder, upgraded, removed and purged; the installed
//! programs run. The container image: reproducible, its digests, its program, which runs rootless in runc. Needs: dpkg-dev, lintian, runc.
//! Takes: 60 s.
#![forbid(unsafe_code)]

use end_to_end::client::Client;
use end_to_end::packages::{built, packages, run, succeeds};
use end_to_end::{Context, Result, Scratch, ensure};
use std::ffi::OsStr;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use vm::{Profile, lunette_program};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs dpkg with a folder as root. Maintainer scripts run with DPKG_ROOT, which leaves this machine unchanged.
fn dpkg(root: &Path, arguments: &[&str], packages: &[PathBuf]) -> Result<()> {
    let mut command = Command::new("dpkg");
    command.arg(format!("--root={}", root.display()));
    command.args([
        "--force-not-root",
        "--force-script-chrootless",
        "--force-depends",
    ]);
    command.arg(format!("--log={}", root.join("dpkg.log").display()));
    succeeds(command.args(arguments).args(packages)).map(drop)
}

#[test]
fn packages_are_reproducible_install_upgrade_and_leave_nothing() -> Result<()> {
    let scratch = Scratch::new()?;
    let target = built(&scratch)?;
    let (one, two) = (scratch.file("one"), scratch.file("two"));
    let first = packages(&target, &one, "1")?;
    let again = packages(&target, &two, "1")?;
    ensure!(first.len() == 2);
    for (one, two) in first.iter().zip(&again) {
        ensure!(
            std::fs::read(one)? == std::fs::read(two)?,
            "{} differs",
            one.display()
        );
    }
    let mut lintian = Command::new("lintian");
    lintian.args(["--no-cfg", "--allow-root", "--fail-on", "warning,error"]);
    // Some of lintian's temporary files stay.
    let complaints = run(lintian.env("TMPDIR", scratch.files()).args(&first))?;
    ensure!(
        complaints.status.success(),
        "{}{}",
        text(&complaints.stdout),
        text(&complaints.stderr)
    );

    let root = scratch.file("root");
    for folder in [
        "var/lib/dpkg/info",
        "var/lib/dpkg/updates",
        "etc",
        "run",
        "tmp",
    ] {
        std::fs::create_dir_all(root.join(folder))?;
    }
    for file in ["var/lib/dpkg/status", "var/lib/dpkg/available"] {
        std::fs::write(root.join(file), "")?;
    }
    dpkg(&root, &["--install"], &first)?;
    installed(&root)?;
    let state = root.join("var/lib/lunette/identities.json");
    let disk = root.join("var/lib/lunette/disk.raw");
    std::fs::create_dir_all(root.join("var/lib/lunette"))?;
    for file in [&state, &disk] {
        std::fs::write(file, "")?;
    }
    std::fs::write(root.join("etc/lunette/lunette.toml"), "# of the user\n")?;
    let newer = packages(&target, &scratch.file("newer"), "2")?;
    dpkg(&root, &["--install"], &newer)?;
    installed(&root)?;
    ensure!(state.exists(), "an upgrade loses the daemon's state");
    dpkg(&root, &["--remove", "lunette-lab", "lunette"], &[])?;
    ensure!(!root.join("usr/bin/lunette").exists() && state.exists());
    dpkg(&root, &["--purge", "lunette-lab", "lunette"], &[])?;
    ensure!(!state.exists(), "purge leaves the daemon's state");
    ensure!(disk.exists(), "purge removes a disk");
    ensure!(
        root.join("etc/lunette/lunette.toml").exists(),
        "purge takes the user's configuration"
    );
    let left = succeeds(
        Command::new("find")
            .arg(root.join("usr"))
            .args(["-type", "f"]),
    )
    .unwrap_or_default();
    ensure!(left.is_empty(), "{left}");
    Ok(())
}

fn installed(root: &Path) -> Result<()> {
    for (file, mode) in [
        ("usr/bin/lunette", 0o755),
        ("usr/bin/lunette-lab", 0o755),
        ("usr/libexec/lunette/guest-bench", 0o755),
        ("usr/libexec/lunette-vhost-user-blk", 0o755),
        ("usr/lib/systemd/system/lunette.service", 0o644),
        ("usr/share/qemu/vhost-user/50-lunette-blk.json", 0o644),
        ("usr/share/man/man1/lunette-serve.1.gz", 0o644),
        ("usr/share/man/man1/lunette-vm-run.1.gz", 0o644),
        ("usr/share/man/man5/lunette.toml.5.gz", 0o644),
        ("usr/share/bash-completion/completions/lunette", 0o644),
        ("usr/share/doc/lunette/examples/lunette.toml", 0o644),
        ("usr/share/doc/lunette/docs/operations.md", 0o644),
        ("usr/share/doc/lunette/docs/lab/iscsi.md", 0o644),
        ("usr/share/doc/lunette/SECURITY.md", 0o644),
        ("usr/share/doc/lunette/contrib/jobs/four-disks.fio", 0o644),
        ("usr/share/doc/lunette/contrib/grafana/lunette.json", 0o644),
        (
            "usr/share/doc/lunette/contrib/prometheus/lunette.rules.yml",
            0o644,
        ),
        (
            "usr/share/doc/lunette/contrib/kubevirt/lunette-hook.py",
            0o755,
        ),
        (
            "usr/share/doc/lunette/contrib/openstack/lunette-volume.py",
            0o755,
        ),
        ("usr/share/doc/lunette/contrib/proxmox/lunette-hook", 0o755),
        ("etc/apparmor.d/lunette", 0o644),
        ("usr/share/doc/lunette-lab/copyright", 0o644),
    ] {
        let found =
            std::fs::metadata(root.join(file)).with_context(|| format!("{file} is missing"))?;
        let found = found.permissions().mode() & 0o777;
        ensure!(found == mode, "{file} has the mode {found:o}");
    }
    let users = std::fs::read_to_string(root.join("etc/passwd")).unwrap_or_default();
    ensure!(
        users.contains("lunette:"),
        "there is no user lunette: {users}"
    );
    ensure!(root.join("etc/lunette").is_dir());
    let version = succeeds(Command::new(root.join("usr/bin/lunette")).arg("--version"))?;
    ensure!(version.starts_with("lunette "), "{version}");
    // `lunette` finds the program of the other package.
    let helped = succeeds(Command::new(root.join("usr/bin/lunette")).args(["image", "--help"]))?;
    ensure!(helped.contains("convert"), "{helped}");
    apparmor_profile(root)?;
    bill_of_materials(root, "lunette")?;
    bill_of_materials(root, "lunette-lab")
}

/// Compiles the AppArmor profile without a kernel that has AppArmor. The profile denies everything by default: it permits no program, no
/// capability, and no folder of other programs.
fn apparmor_profile(root: &Path) -> Result<()> {
    let installed = root.join("etc/apparmor.d/lunette");
    let compile = |profile: &Path| {
        let mut parser = Command::new("/sbin/apparmor_parser");
        parser.args(["--skip-kernel-load", "--skip-cache"]);
        let output = parser.arg(profile).output();
        output.context("cannot run apparmor_parser; hint: apt-get install apparmor")
    };
    let compiled = compile(&installed)?;
    ensure!(compiled.status.success(), "{}", text(&compiled.stderr));
    let rules = std::fs::read_to_string(&installed)?;
    // For events of block devices, and for the identity of the iSCSI initiator.
    for needed in ["network netlink dgram,", "/var/lib/lunette/{,**} rwkl,"] {
        ensure!(rules.contains(needed), "no rule {needed}");
    }
    let broken = root.join("tmp/broken");
    std::fs::write(&broken, rules.replace("rwk,", "rwq,"))?;
    ensure!(!compile(&broken)?.status.success(), "an unknown permission");
    let lines = rules.lines().map(str::trim);
    for rule in lines.filter(|line| line.ends_with(',')) {
        let permissions = rule
            .trim_end_matches(',')
            .rsplit(' ')
            .next()
            .unwrap_or_default();
        let is_program = rule.contains('/') && permissions.contains('x');
        ensure!(!is_program && !rule.starts_with("capability"), "{rule}");
        ensure!(
            !rule.starts_with("/**") && !rule.starts_with("file"),
            "{rule}"
        );
    }
    Ok(())
}

/// Checks a CycloneDX 1.5 document: all linked crates with licences, checksums of registry crates, and complete dependency
/// references.
fn bill_of_materials(root: &Path, package: &str) -> Result<()> {
    let file = root.join(format!("usr/share/doc/{package}/{package}.cdx.json.gz"));
    let text = succeeds(Command::new("gzip").arg("-dc").arg(file))?;
    let bill: serde_json::Value = serde_json::from_str(&text)?;
    ensure!(bill["bomFormat"] == "CycloneDX" && bill["specVersion"] == "1.5");
    let crate_name = package.replace('-', "_");
    let program = &bill["metadata"]["component"];
    ensure!(program["name"] == crate_name.as_str(), "{program}");
    let components = bill["components"].as_array().context("no components")?;
    let locked = std::fs::read_to_string(vm::workspace().join("Cargo.lock"))?;
    let mut listed = vec![program["bom-ref"].clone()];
    for one in components {
        ensure!(one["licenses"][0]["expression"].is_string(), "{one}");
        let (name, version) = (one["name"].as_str(), one["version"].as_str());
        let (name, version) = (name.context("no name")?, version.context("no version")?);
        listed.push(one["bom-ref"].clone());
        if one["purl"] == format!("pkg:npm/{name}@{version}") {
            ensure!(name == "uplot", "{one}");
            ensure!(one["hashes"][0]["alg"] == "SHA-512", "{one}");
            continue;
        }
        let entry = format!("name = \"{name}\"\nversion = \"{version}\"\n");
        let entry = locked.split("\n\n").find(|text| text.contains(&entry));
        let entry = entry.with_context(|| format!("{name} is not in Cargo.lock"))?;
        match one["hashes"][0]["content"].as_str() {
            Some(sum) => ensure!(entry.contains(&format!("checksum = \"{sum}\"")), "{one}"),
            None => ensure!(!entry.contains("source = "), "{one} has no checksum"),
        }
    }
    let page = ["page", "uplot"].iter().filter(|_| package == "lunette");
    for name in ["tokio", "bdev", "clap"].iter().chain(page) {
        ensure!(
            components.iter().any(|one| one["name"] == *name),
            "{name} is missing"
        );
    }
    let needs = bill["dependencies"].as_array().context("no dependencies")?;
    ensure!(needs.len() == listed.len());
    let mut needed = needs
        .iter()
        .flat_map(|one| one["dependsOn"].as_array())
        .flatten();
    ensure!(needed.all(|reference| listed.contains(reference)));
    Ok(())
}

/// Builds the container image of this build's program. The program is linked dynamically and runs on this system only.
fn image(program: &Path, out: &Path) -> Result<PathBuf> {
    let mut command = Command::new(vm::workspace().join("scripts/oci"));
    command
        .arg(program)
        .arg(out)
        .env("SOURCE_DATE_EPOCH", "1795000000")
        .env("LUNETTE_COMMIT", "test")
        .env("OCI_LEVEL", "1");
    Ok(PathBuf::from(succeeds(&mut command)?.trim()))
}

/// Returns the path and JSON content of a descriptor's blob, after checking digest and size.
fn blob(layout: &Path, descriptor: &serde_json::Value) -> Result<(PathBuf, serde_json::Value)> {
    let digest = descriptor["digest"].as_str().context("no digest")?;
    let sum = digest.strip_prefix("sha256:").context("another digest")?;
    let path = layout.join("blobs/sha256").join(sum);
    let counted = succeeds(Command::new("sha256sum").arg(&path))?;
    ensure!(counted.starts_with(sum), "{digest}: {counted}");
    let size = std::fs::metadata(&path)?.len();
    ensure!(descriptor["size"].as_u64() == Some(size), "{descriptor}");
    let json = serde_json::from_slice(&std::fs::read(&path)?).unwrap_or_default();
    Ok((path, json))
}

#[test]
fn image_layout_is_reproducible_and_has_the_program() -> Result<()> {
    let scratch = Scratch::new()?;
    let program = lunette_program(Profile::Dev)?;
    let layout = scratch.file("oci");
    let packed = image(&program, &layout)?;
    let again = image(&program, &scratch.file("again"))?;
    ensure!(
        std::fs::read(packed)? == std::fs::read(again)?,
        "the same program gives other bytes"
    );

    let read = |name: &str| -> Result<serde_json::Value> {
        Ok(serde_json::from_slice(&std::fs::read(layout.join(name))?)?)
    };
    ensure!(read("oci-layout")?["imageLayoutVersion"] == "1.0.0");
    let index = read("index.json")?;
    // `ctr images import` stores the image under this name, which the manifest of Kubernetes has.
    let name = &index["manifests"][0]["annotations"]["io.containerd.image.name"];
    let name = name.as_str().context("no name for containerd")?;
    let manifest =
        std::fs::read_to_string(vm::workspace().join("contrib/kubernetes/lunette.yaml"))?;
    ensure!(manifest.contains(&format!("image: {name}\n")), "{name}");
    let (_, manifest) = blob(&layout, &index["manifests"][0])?;
    let (_, config) = blob(&layout, &manifest["config"])?;
    let (layer, _) = blob(&layout, &manifest["layers"][0])?;
    ensure!(config["config"]["Entrypoint"][0] == "/usr/bin/lunette");
    let mut unpacked = Command::new("sh");
    unpacked.args(["-c", "zcat \"$1\" | sha256sum", "sh"]);
    let unpacked = succeeds(unpacked.arg(&layer))?;
    let sum = unpacked.split(' ').next().unwrap_or_default();
    ensure!(
        config["rootfs"]["diff_ids"][0] == format!("sha256:{sum}"),
        "{config}"
    );

    let root = scratch.file("image-root");
    unpack(&layer, &root)?;
    let installed = root.join("usr/bin/lunette");
    let version = succeeds(Command::new(&installed).arg("--version"))?;
    ensure!(version.starts_with("lunette "), "{version}");
    let has_lines = |program: &Path| -> Result<bool> {
        let sections = succeeds(Command::new("readelf").args(["-SW"]).arg(program))?;
        Ok(sections.contains(" .debug_line "))
    };
    ensure!(
        has_lines(&program)? && !has_lines(&installed)?,
        "debug information"
    );
    ensure!(root.join("etc/lunette").is_dir() && root.join("run/lunette").is_dir());
    rootless(&scratch, &layer, &config["config"])
}

fn unpack(layer: &Path, root: &Path) -> Result<()> {
    std::fs::create_dir_all(root)?;
    let mut untar = Command::new("tar");
    untar.arg("--extract").arg("--gzip").arg("--file");
    succeeds(untar.arg(layer).arg("--directory").arg(root)).map(drop)
}

/// User that runs the container: `nobody`.
const USER: u32 = 65534;
const CONTAINER: &str = "lunette";

/// Returns a command of an ordinary user, without capabilities.
fn as_user(program: impl AsRef<OsStr>) -> Command {
    if !rustix::process::getuid().is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    let user = USER.to_string();
    command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]);
    command.arg(program);
    command
}

/// Runs the image in runc as an ordinary user, without capabilities and with a read-only root file system, and uses its export.
fn rootless(scratch: &Scratch, layer: &Path, image: &serde_json::Value) -> Result<()> {
    let bundle = scratch.socket("bundle");
    let root = bundle.join("rootfs");
    unpack(layer, &root)?;
    // The tested program is linked dynamically: its libraries are added to the image.
    let program = root.join("usr/bin/lunette");
    let libraries = succeeds(Command::new("ldd").arg(&program))?;
    for library in libraries
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
    {
        let copy = root.join(library.trim_start_matches('/'));
        std::fs::create_dir_all(copy.parent().context("no folder")?)?;
        std::fs::copy(library, copy)?;
    }
    let mounts = [
        ("etc", "/etc/lunette"),
        ("run", "/run/lunette"),
        ("state", "/var/lib/lunette"),
    ];
    for (folder, _) in mounts {
        std::fs::create_dir_all(bundle.join(folder))?;
    }
    std::fs::write(
        bundle.join("etc/lunette.toml"),
        "control = \"/run/lunette/lunette.sock\"\n[[disk]]\nname = \"d0\"\nbackend = \"ram\"\nsize = \"1M\"\n\
         [[vhost_blk]]\ndisk = \"d0\"\nsocket = \"/run/lunette/d0.sock\"\n",
    )?;
    if rustix::process::getuid().is_root() {
        let mut chown = Command::new("chown");
        succeeds(chown.arg("-R").arg(format!("{USER}:{USER}")).arg(&bundle))?;
    }
    succeeds(
        as_user("runc")
            .args(["spec", "--rootless"])
            .current_dir(&bundle),
    )?;
    let specification = bundle.join("config.json");
    let mut spec: serde_json::Value = serde_json::from_slice(&std::fs::read(&specification)?)?;
    let words = |key: &str| image[key].as_array().cloned().unwrap_or_default();
    let process = &mut spec["process"];
    process["terminal"] = false.into();
    process["args"] = [words("Entrypoint"), words("Cmd")].concat().into();
    process["env"] = words("Env").into();
    for set in ["bounding", "effective", "permitted", "ambient"] {
        process["capabilities"][set] = serde_json::json!([]);
    }
    let list = spec["mounts"].as_array_mut().context("no mounts")?;
    list.retain(|mount| mount["destination"] != "/sys/fs/cgroup");
    for (folder, destination) in mounts {
        let source = bundle.join(folder);
        let options = ["bind", "rw"];
        list.push(serde_json::json!({"destination": destination, "type": "bind", "source": source, "options": options}));
    }
    std::fs::write(&specification, spec.to_string())?;

    let runc = |words: &[&str]| {
        let mut command = as_user("runc");
        command.arg("--root").arg(bundle.join("containers"));
        command.args(words).current_dir(&bundle);
        command
    };
    let log = scratch.file("container.log");
    let mut container = vm::Process::start("runc", &runc(&["run", CONTAINER]), &log)?;
    let control = bundle.join("run/lunette.sock");
    // The daemon admits its own user, which is root inside of the container.
    let ready = vm::wait_until(Duration::from_secs(60), || {
        let mut status = as_user(&program);
        status.args(["disk", "list", "--socket"]).arg(&control);
        let listed = succeeds(&mut status).ok()?;
        listed.contains("ready").then_some(())
    });
    ready.with_context(|| format!("not ready: {}", container.log()))?;
    let socket = bundle.join("run/d0.sock");
    Client::connect(&socket)?.features()?;
    let owner = std::fs::metadata(&socket)?.uid();
    ensure!(owner != 0, "the daemon runs as root");
    succeeds(&mut runc(&["kill", CONTAINER, "TERM"]))?;
    let status = container.wait(Duration::from_secs(60))?;
    ensure!(status.success(), "{status}: {}", container.log());
    Ok(())
}

//! Files for Kubernetes, KubeVirt, OpenStack and Proxmox VE in contrib/: manifests match the schemas, hooks change sample domains, and
//! libvirt's schema and QEMU accept the results. No cluster is needed. Needs Python, xmllint, libvirt's schemas, QEMU. Takes: 10 s.
#![forbid(unsafe_code)]

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use end_to_end::packages::succeeds;
use end_to_end::{Context, Profile, Result, Rig, Scratch, ensure};
use serde_json::{Value, json};
use vm::{lunette_program, tool, wait_until, workspace};

const SCHEMA: &str = "/usr/share/libvirt/schemas/domain.rng";
const MANIFEST: &str = "contrib/kubernetes/lunette.yaml";
/// Group of QEMU in pods of KubeVirt.
const QEMU_GROUP: u32 = 107;

/// Returns a program of the environment that `make test` prepares below `build`.
fn validator(program: &str) -> Result<PathBuf> {
    let path = workspace().join("build/kubernetes/bin").join(program);
    ensure!(
        path.exists(),
        "{} does not exist; hint: scripts/setup test",
        path.display()
    );
    Ok(path)
}

/// Returns the documents of a YAML file.
fn documents(path: &Path) -> Result<Vec<Value>> {
    let program =
        "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(open(sys.argv[1])))))";
    let mut command = Command::new(validator("python3")?);
    let text = succeeds(command.args(["-c", program]).arg(path))?;
    Ok(serde_json::from_str(&text)?)
}

fn object<'a>(documents: &'a [Value], kind: &str) -> Result<&'a Value> {
    let found = documents.iter().find(|one| one["kind"] == kind);
    found.with_context(|| format!("no {kind}"))
}

/// Runs a program with text on its standard input.
fn with_input(command: &mut Command, input: &str) -> Result<Output> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut stdin = child.stdin.take().context("no input")?;
    stdin.write_all(input.as_bytes())?;
    drop(stdin);
    Ok(child.wait_with_output()?)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Checks a domain against libvirt's schema.
fn is_a_domain(scratch: &Scratch, domain: &str) -> Result<()> {
    let file = scratch.file("domain.xml");
    std::fs::write(&file, domain)?;
    let mut xmllint = Command::new(tool("xmllint")?);
    xmllint.args(["--noout", "--relaxng", SCHEMA]).arg(&file);
    succeeds(&mut xmllint).map(drop)
}

/// Checks a configuration file with `lunette check`. No file that it names has to exist.
fn is_a_configuration(scratch: &Scratch, configuration: &str) -> Result<()> {
    let file = scratch.file("lunette.toml");
    std::fs::write(&file, configuration)?;
    let mut check = Command::new(lunette_program(Profile::Dev)?);
    check.arg("check").arg("--config").arg(&file);
    succeeds(&mut check).map(drop)
}

#[test]
fn manifests_match_the_schemas_of_kubernetes() -> Result<()> {
    let scratch = Scratch::new()?;
    let path = workspace().join(MANIFEST);
    let validate = |path: &Path| -> Result<Output> {
        let mut command = Command::new(validator("kubernetes-validate")?);
        Ok(command.args(["--strict", "--quiet"]).arg(path).output()?)
    };
    let valid = validate(&path)?;
    ensure!(valid.status.success(), "{}", text(&valid.stdout));
    let misspelt = scratch.file("misspelt.yaml");
    let manifest = std::fs::read_to_string(&path)?;
    std::fs::write(&misspelt, manifest.replace("livenessProbe", "livenessProb"))?;
    ensure!(!validate(&misspelt)?.status.success(), "a misspelt key");
    Ok(())
}

#[test]
fn daemon_set_has_probes_limits_and_a_service_for_metrics() -> Result<()> {
    let documents = documents(&workspace().join(MANIFEST))?;
    let set = object(&documents, "DaemonSet")?;
    let template = &set["spec"]["template"];
    ensure!(template["metadata"]["labels"] == set["spec"]["selector"]["matchLabels"]);
    let containers = template["spec"]["containers"].as_array();
    let container = &containers.context("no containers")?[0];
    for (probe, path) in [
        ("startupProbe", "/healthz"),
        ("livenessProbe", "/healthz"),
        ("readinessProbe", "/readyz"),
    ] {
        let get = &container[probe]["httpGet"];
        ensure!(
            get["path"] == path && get["port"] == "metrics",
            "{probe}: {get}"
        );
    }
    ensure!(container["resources"]["requests"]["memory"].is_string());
    ensure!(container["resources"]["limits"]["memory"].is_string());
    let security = &container["securityContext"];
    ensure!(
        security["capabilities"]["drop"] == json!(["ALL"]),
        "{security}"
    );
    let port = &container["ports"][0];
    ensure!(port["name"] == "metrics", "{port}");
    let service = &object(&documents, "Service")?["spec"];
    ensure!(service["selector"] == template["metadata"]["labels"]);
    ensure!(service["ports"][0]["targetPort"] == "metrics", "{service}");
    // Each mounted volume is declared, and the version is that of the workspace.
    let volumes = template["spec"]["volumes"]
        .as_array()
        .context("no volumes")?;
    for mount in container["volumeMounts"].as_array().context("no mounts")? {
        let is_declared = volumes.iter().any(|one| one["name"] == mount["name"]);
        ensure!(is_declared, "{mount}");
    }
    let image = container["image"].as_str().unwrap_or_default();
    ensure!(
        image.ends_with(&format!(":{}", env!("CARGO_PKG_VERSION"))),
        "{image}"
    );

    let map = object(&documents, "ConfigMap")?;
    let configuration = map["data"]["lunette.toml"].as_str().context("no file")?;
    let listens = format!("metrics_listen = \"0.0.0.0:{}\"", port["containerPort"]);
    ensure!(configuration.contains(&listens), "{configuration}");
    is_a_configuration(&Scratch::new()?, configuration)
}

/// A domain in the form in which virt-launcher passes it to hooks, with two volumes. It was not recorded from a cluster.
const KUBEVIRT_DOMAIN: &str = r#"<domain type="kvm" xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0">
  <name>default_guest</name>
  <memory unit="b">1073741824</memory>
  <os><type arch="x86_64" machine="q35">hvm</type></os>
  <vcpu placement="static">2</vcpu>
  <cputune></cputune>
  <devices>
    <controller type="scsi" index="0" model="virtio-non-transitional"></controller>
    <disk device="disk" type="file">
      <source file="/var/run/kubevirt-ephemeral-disks/disk-data/system/disk.qcow2"></source>
      <target bus="virtio" dev="vda"></target>
      <driver cache="none" error_policy="stop" name="qemu" type="qcow2" discard="unmap"></driver>
      <alias name="ua-system"></alias>
    </disk>
    <disk device="disk" type="file">
      <source file="/var/run/kubevirt-private/vmi-disks/data/placeholder.img"></source>
      <target bus="virtio" dev="vdb"></target>
      <driver cache="none" error_policy="stop" name="qemu" type="raw" discard="unmap"></driver>
      <alias name="ua-data"></alias>
    </disk>
  </devices>
</domain>"#;

fn kubevirt_hook(annotation: Option<&str>) -> Result<Output> {
    let mut annotations = serde_json::Map::new();
    if let Some(annotation) = annotation {
        annotations.insert("lunette.storage/sockets".to_owned(), annotation.into());
    }
    let vmi = json!({"metadata": {"name": "guest", "annotations": annotations}});
    let mut command = Command::new(workspace().join("contrib/kubevirt/lunette-hook.py"));
    command.args(["--vmi", &vmi.to_string()]);
    Ok(command.args(["--domain", KUBEVIRT_DOMAIN]).output()?)
}

#[test]
fn kubevirt_hook_turns_annotated_volumes_into_vhost_user_disks() -> Result<()> {
    let scratch = Scratch::new()?;
    let changed = kubevirt_hook(Some(r#"{"data": "d0.sock"}"#))?;
    ensure!(changed.status.success(), "{}", text(&changed.stderr));
    let domain = text(&changed.stdout);
    is_a_domain(&scratch, &domain)?;
    let mut convert = Command::new(lunette_program(Profile::Dev)?);
    convert.args(["libvirt", "from-xml", "-"]);
    let command_line = with_input(&mut convert, &domain)?;
    ensure!(
        command_line.status.success(),
        "{}",
        text(&command_line.stderr)
    );
    let command_line = text(&command_line.stdout);
    for expected in [
        "path=/var/run/kubevirt-private/vmi-disks/data/d0.sock",
        "vhost-user-blk-pci",
        "memory-backend-memfd",
        "share=on",
        "/var/run/kubevirt-ephemeral-disks/disk-data/system/disk.qcow2",
    ] {
        ensure!(
            command_line.contains(expected),
            "no {expected}: {command_line}"
        );
    }
    ensure!(!command_line.contains("placeholder"), "{command_line}");

    // Without the annotation, disks stay.
    let same = text(&kubevirt_hook(None)?.stdout);
    ensure!(
        same.contains("placeholder.img") && !same.contains("vhostuser"),
        "{same}"
    );
    for (annotation, reason) in [
        ("[]", "is invalid"),
        ("{", "is invalid"),
        (r#"{"data": "../d0.sock"}"#, "is invalid"),
        (r#"{"other": "d0.sock"}"#, "there is no disk other"),
    ] {
        let refused = kubevirt_hook(Some(annotation))?;
        let reported = text(&refused.stderr);
        ensure!(
            !refused.status.success() && reported.contains(reason),
            "{annotation}: {reported}"
        );
        ensure!(
            reported.contains("; hint: ") && refused.stdout.is_empty(),
            "{reported}"
        );
    }
    Ok(())
}

#[test]
fn kubevirt_example_names_its_volume_and_the_socket_of_the_manifest() -> Result<()> {
    let guests = documents(&workspace().join("contrib/kubevirt/guest.yaml"))?;
    let template = &guests[0]["spec"]["template"];
    let annotations = &template["metadata"]["annotations"];
    let parsed = |name: &str| -> Result<Value> {
        Ok(serde_json::from_str(
            annotations[name].as_str().context(name.to_owned())?,
        )?)
    };
    let hook = &parsed("hooks.kubevirt.io/hookSidecars")?[0]["configMap"];
    ensure!(hook["hookPath"] == "/usr/bin/onDefineDomain", "{hook}");
    let daemons = documents(&workspace().join(MANIFEST))?;
    let map = object(&daemons, "ConfigMap")?;
    let configuration = map["data"]["lunette.toml"].as_str().context("no file")?;
    let security = &object(&daemons, "DaemonSet")?["spec"]["template"]["spec"]["securityContext"];
    let groups = security["supplementalGroups"].as_array().context("none")?;
    for (volume, socket) in parsed("lunette.storage/sockets")?
        .as_object()
        .context("no object")?
    {
        let volumes = template["spec"]["volumes"]
            .as_array()
            .context("no volumes")?;
        let found = volumes.iter().find(|one| one["name"] == volume.as_str());
        let path = found.context("no volume")?["hostDisk"]["path"].as_str();
        let folder = Path::new(path.context("no hostDisk")?)
            .parent()
            .context("no folder")?;
        let socket = folder.join(socket.as_str().unwrap_or_default());
        let line = format!("socket = \"{}\"", socket.display());
        let mut exports = configuration
            .split("\n[[")
            .filter(|one| one.contains(&line));
        let export = exports.next().with_context(|| format!("no {line}"))?;
        // QEMU in the guest's pod may connect, and the daemon needs no capability to set the group.
        let group = format!("socket_group = \"{QEMU_GROUP}\"");
        ensure!(
            export.contains(&group) && export.contains("socket_mode = \"0660\""),
            "{export}"
        );
        ensure!(groups.contains(&json!(QEMU_GROUP)), "{groups:?}");
    }
    Ok(())
}

/// Runs the script for Cinder volumes.
fn cinder(connection: &Value, arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new(workspace().join("contrib/openstack/lunette-volume.py"));
    with_input(command.args(arguments), &connection.to_string())
}

#[test]
fn cinder_volumes_become_disks_of_lunette_and_of_libvirt() -> Result<()> {
    let scratch = Scratch::new()?;
    let chap = scratch.file("chap");
    let chap_option = chap.display().to_string();
    // A file of other users: the script restricts it.
    std::fs::write(&chap, "an earlier and longer line of another secret")?;
    std::fs::set_permissions(&chap, Permissions::from_mode(0o644))?;
    let owner = std::fs::metadata(&chap)?.uid().to_string();
    let iscsi = json!({"connection_info": {"driver_volume_type": "iscsi", "data": {
        "target_portals": ["192.0.2.1:3260", "192.0.2.2:3260", "192.0.2.3:3260"],
        "target_iqns": ["iqn.2010-10.org.openstack:volume-3f7c", "iqn.2010-10.org.openstack:volume-3f7c", "iqn.2010-10.org.openstack:volume-3f7c"],
        "target_luns": [1, 1, 1], "auth_method": "CHAP", "auth_username": "user", "auth_password": "secret-secret-12"}}});
    let rbd = json!({"driver_volume_type": "rbd", "data": {"name": "volumes/volume-3f7c",
        "hosts": ["192.0.2.10", "192.0.2.11"], "ports": ["6789", "6789"], "auth_username": "cinder"}});
    // The columns of `openstack volume attachment create -f json`
    let printed = json!({"ID": "b44dbee6", "Volume ID": "aacf9944", "Instance ID": "5cc249db", "Status": "attaching",
        "Attach Mode": "rw", "Attached At": "", "Detached At": "", "Properties": {"driver_volume_type": "iscsi",
        "target_discovered": false, "target_portal": "192.0.2.9:3260", "target_iqn": "iqn.2010-10.org.openstack:volume-aacf", "target_lun": 0,
        "access_mode": "rw", "encrypted": false, "qos_specs": null, "attachment_id": "b44dbee6"}});
    for (connection, expected) in [
        (
            &printed,
            "unit = \"iscsi://192.0.2.9:3260/iqn.2010-10.org.openstack:volume-aacf/0\"",
        ),
        (
            &iscsi,
            "unit = \"iscsi://user@192.0.2.1:3260/iqn.2010-10.org.openstack:volume-3f7c/1\"",
        ),
        (&rbd, "image = \"volumes/volume-3f7c\""),
    ] {
        let arguments = [
            "--name",
            "volume",
            "--queues",
            "2",
            "--chap-file",
            &chap_option,
            "--chap-owner",
            &owner,
        ];
        let toml = cinder(connection, &[&arguments[..], &["toml"]].concat())?;
        ensure!(toml.status.success(), "{}", text(&toml.stderr));
        let toml = text(&toml.stdout);
        ensure!(
            toml.contains(expected) && !toml.contains("secret"),
            "{toml}"
        );
        let toml = toml.replace(
            "/run/lunette/",
            &format!("{}/", scratch.sockets().display()),
        );
        is_a_configuration(&scratch, &toml)?;
        // The domain needs no secret.
        let xml = cinder(connection, &["--name", "volume", "--queues", "2", "xml"])?;
        ensure!(xml.status.success(), "{}", text(&xml.stderr));
        let disk = text(&xml.stdout);
        let domain = format!(
            "<domain type='kvm'><name>instance-0000002a</name><memory unit='MiB'>1024</memory>\
             <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking><vcpu>2</vcpu>\
             <os><type arch='x86_64' machine='q35'>hvm</type></os><devices>{disk}</devices></domain>"
        );
        is_a_domain(&scratch, &domain)?;
    }
    ensure!(std::fs::read_to_string(&chap)? == "user secret-secret-12\n");
    ensure!(std::fs::metadata(&chap)?.mode() & 0o777 == 0o600);
    let refused = cinder(&iscsi, &["--name", "volume", "toml"])?;
    ensure!(
        text(&refused.stderr).contains("hint: name a file"),
        "{refused:?}"
    );
    let example = ["--name", "volume-3f7c", "--queues", "2", "xml"];
    let disk = text(&cinder(&rbd, &example)?.stdout);
    let page = std::fs::read_to_string(workspace().join("docs/openstack.md"))?;
    ensure!(page.contains(&format!("```xml\n{disk}```")), "{disk}");
    let mut read_only = printed.clone();
    read_only["Properties"]["access_mode"] = json!("ro");
    let toml = text(&cinder(&read_only, &["--name", "volume", "toml"])?.stdout);
    ensure!(toml.contains("\nread_only = true\n"), "{toml}");
    is_a_configuration(&scratch, &toml.replace("/run/lunette/", "/tmp/"))?;
    Ok(())
}

#[test]
fn cinder_volumes_that_cannot_be_served_are_refused() -> Result<()> {
    for (connection, reason) in [
        (
            json!({"driver_volume_type": "nfs", "data": {}}),
            "volumes of the type nfs",
        ),
        (
            json!({"driver_volume_type": "rbd", "data": {"name": "volumes/a", "encrypted": true}}),
            "the volume is encrypted",
        ),
        (
            json!({"Properties": {"driver_volume_type": "rbd", "name": "volumes/a", "encrypted": true}}),
            "the volume is encrypted",
        ),
        (
            json!({"Properties": "driver_volume_type='rbd'"}),
            "is not a JSON object",
        ),
        (
            json!({"driver_volume_type": "rbd", "data": "name='a'"}),
            "is not a JSON object",
        ),
    ] {
        for output in ["toml", "xml"] {
            let refused = cinder(&connection, &["--name", "volume", output])?;
            let message = text(&refused.stderr);
            ensure!(
                !refused.status.success() && message.starts_with("lunette-volume: "),
                "{message}"
            );
            ensure!(message.contains(reason), "{message}");
        }
    }
    Ok(())
}

#[test]
fn proxmox_hook_serves_the_disks_of_a_guest_while_it_runs() -> Result<()> {
    let rig = Rig::new(|daemon| daemon.disk("other=ram:1M"))?;
    let folder = rig.scratch.socket("vms");
    std::fs::create_dir(&folder)?;
    let disks = "# disks of the guest 101\nvm-101-data ram:16M\nvm-101-log ram:8M,serial=LOG";
    std::fs::write(folder.join("101"), disks)?;
    // A command that has the daemon's address, as the package's command has by default.
    let command = rig.scratch.socket("command");
    let (program, control) = (lunette_program(Profile::Dev)?, rig.daemon.control());
    let script = format!(
        "#!/bin/sh\nexec {} \"$@\" --socket {}\n",
        program.display(),
        control.display()
    );
    std::fs::write(&command, script)?;
    succeeds(Command::new("chmod").arg("755").arg(&command))?;
    let hook_with = |program: &Path, arguments: &[&str]| -> Result<String> {
        let mut hook = Command::new(workspace().join("contrib/proxmox/lunette-hook"));
        hook.args(arguments)
            .env("LUNETTE", program)
            .env("LUNETTE_VMS", &folder)
            .env("LUNETTE_SOCKETS", rig.scratch.sockets());
        succeeds(&mut hook)
    };
    let hook = |arguments: &[&str]| hook_with(&command, arguments);
    let exports = || rig.daemon.lunette(&["export", "list"]);
    // The second call finds disks that are there.
    hook(&["101", "pre-start"])?;
    hook(&["101", "pre-start"])?;
    hook(&["101", "post-start"])?;
    hook(&["102", "pre-start"])?;
    let listed = exports()?;
    ensure!(
        listed.contains("vm-101-data") && listed.contains("vm-101-log"),
        "{listed}"
    );

    // QEMU with the options of the line opens both disks.
    let line = hook(&["101", "args", "128"])?;
    let options = line.trim().strip_prefix("args: ").context(line.clone())?;
    let mut qemu = Command::new(tool("qemu-system-x86_64")?);
    qemu.args([
        "-machine",
        "q35,accel=tcg",
        "-m",
        "128",
        "-display",
        "none",
        "-nodefaults",
    ])
    .args(options.split(' '));
    let log = rig.scratch.file("qemu.log");
    let qemu = vm::Process::start("qemu", &qemu, &log)?;
    let connected = wait_until(Duration::from_secs(60), || {
        let sessions = rig.daemon.lunette(&["session", "list"]).ok()?;
        let both = sessions.contains("vm-101-data") && sessions.contains("vm-101-log");
        both.then_some(())
    });
    connected.with_context(|| qemu.log())?;
    drop(qemu);
    // Without a daemon that answers, the disks stay, and the hook reports this.
    let stopped = hook_with(Path::new("false"), &["101", "post-stop"]);
    let message = stopped.err().context("no error without a daemon")?;
    ensure!(
        message.to_string().contains("the disks of guest 101 stay"),
        "{message}"
    );
    hook(&["101", "post-stop"])?;
    hook(&["101", "post-stop"])?;
    let listed = exports()? + &rig.daemon.lunette(&["disk", "list"])?;
    ensure!(
        !listed.contains("vm-101") && listed.contains("other"),
        "{listed}"
    );
    Ok(())
}

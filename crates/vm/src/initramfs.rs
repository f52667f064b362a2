//! User space of a guest: busybox, `guest-agent`, some tools with their libraries, and the virtio modules.
//!
//! Built once and cached next to the kernel, under a name derived from the sizes and times of the contents.

use crate::build::{GuestProgram, Profile, lunette_program};
use crate::cpio::Archive;
use crate::places::{
    Kernel, guest_directory, initiator_tool, multipath_file, nbd_tool, tool, unpacked_libraries,
};
use crate::setup::{busybox, program_for_guests};
use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Contents of an initramfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Equipment {
    /// Modules for the vhost-user transports.
    Usual,
    /// Additionally network and open-iscsi, which slow down the boot.
    Initiator,
    /// Network and Linux's iSCSI target; optional tools if the host has them.
    Target,
    /// Network and Lunette; optional tools if the host has them.
    Daemon,
    /// Network and tgt; optional tools if the host has them.
    Tgt,
    /// dm-multipath and its tools.
    Multipath,
    /// open-iscsi and dm-multipath.
    InitiatorMultipath,
    /// Lunette, open-iscsi and dm-multipath.
    DaemonMultipath,
    /// For users' guests: more devices; optional tools if the host has them.
    User,
}

impl Equipment {
    /// Returns the name in file names of archives.
    fn word(self) -> &'static str {
        match self {
            Equipment::Usual => "initramfs",
            Equipment::Initiator => "initiator",
            Equipment::Target => "target",
            Equipment::Daemon => "daemon",
            Equipment::Tgt => "tgt",
            Equipment::Multipath => "multipath",
            Equipment::InitiatorMultipath => "initiator-multipath",
            Equipment::DaemonMultipath => "paths-daemon",
            Equipment::User => "user",
        }
    }

    fn has_initiator(self) -> bool {
        matches!(
            self,
            Equipment::Initiator | Equipment::InitiatorMultipath | Equipment::DaemonMultipath
        )
    }

    fn has_multipath(self) -> bool {
        matches!(
            self,
            Equipment::Multipath | Equipment::InitiatorMultipath | Equipment::DaemonMultipath
        )
    }

    fn has_daemon(self) -> bool {
        matches!(self, Equipment::Daemon | Equipment::DaemonMultipath)
    }

    /// Returns the modules without their dependencies.
    fn modules(self) -> Vec<&'static str> {
        let mut modules = MODULES.to_vec();
        if self.has_initiator() {
            modules.extend(INITIATOR_MODULES);
        }
        match self {
            Equipment::Target => modules.extend(TARGET_MODULES),
            Equipment::Daemon | Equipment::Tgt => modules.push("virtio_net"),
            Equipment::User => modules.extend(USER_MODULES),
            _ => {}
        }
        if self.has_multipath() {
            modules.extend(MULTIPATH_MODULES);
        }
        modules
    }
}

/// Modules for all guests; `modules.dep` determines the load order.
const MODULES: [&str; 5] = ["virtio_pci", "virtio_blk", "sd_mod", "virtio_scsi", "sg"];
const INITIATOR_MODULES: [&str; 3] = ["virtio_net", "iscsi_tcp", "libcrc32c"];

/// iSCSI digests use the kernel's crc32c.
const TARGET_MODULES: [&str; 3] = ["virtio_net", "libcrc32c", "iscsi_target_mod"];

const USER_MODULES: [&str; 4] = ["virtio_console", "virtio_balloon", "virtio_net", "virtiofs"];

/// Modules of ATA controllers, if the kernel has them. They are loaded only with [`ATA`] on the kernel command line, because they slow
/// down the boot.
const ATA_MODULES: [&str; 2] = ["ata_piix", "ahci"];

const MULTIPATH_MODULES: [&str; 2] = ["dm-multipath", "dm-service-time"];

/// Tools copied from the host with their libraries. Scripts call them as `/tools/NAME`, because busybox prefers its own programs of the
/// same name, regardless of the PATH.
const TOOLS: [&str; 27] = [
    "mke2fs",
    "e2fsck",
    "blkdiscard",
    "sg_raw",
    "sg_inq",
    "sg_vpd",
    "sg_luns",
    "sg_readcap",
    "sg_modes",
    "sg_persist",
    "sg_unmap",
    "sg_compare_and_write",
    "sg_xcopy",
    "sg_copy_results",
    "sg_reset",
    "sg_opcodes",
    "sg_write_same",
    "sg_get_lba_status",
    "sg_sanitize",
    "sg_format",
    "sg_rtpg",
    "sg_stpg",
    "sg_logs",
    "sg_requests",
    "sg_turs",
    "sg_verify",
    "sg_sync",
];
/// Unpacked by `scripts/setup`, because an installation on the host would start services.
const INITIATOR_TOOLS: [&str; 2] = ["iscsid", "iscsiadm"];

/// tgt of the host.
const TGT_TOOLS: [&str; 2] = ["tgtd", "tgtadm"];

/// Without udev, `multipath` reads VPD page 83h from the kernel and prefers the same designators. Disks with a single path also have a
/// map.
const MULTIPATH_CONF: &str = "defaults {
    uid_attribute \"\"
    find_multipaths no
    user_friendly_names no
    detect_prio no
    detect_checker no
    prio const
    path_checker tur
    no_path_retry fail
    skip_kpartx yes
}
";

const MULTIPATH_TOOLS: [&str; 2] = ["multipath", "dmsetup"];
/// Plugins that `multipath` loads at run time.
const MULTIPATH_PLUGINS: [&str; 2] = ["libchecktur.so", "libprioconst.so"];

/// All defaults; nodes are changed individually.
const ISCSID_CONF: &str = "node.startup = manual\n";
const PASSWD: &str = "root:x:0:0:root:/:/bin/sh\n";
/// Name of the initiator in a guest.
pub const INITIATOR_NAME: &str = "iqn.2026-11.org.example:guest";

/// The init script. By default the agent is process 1: when it ends, the kernel panics, which the host detects. With [`USER`] on the
/// kernel command line, the shell is process 1 and reaps children; it restarts an agent for `lunette vm exec` and a shell on the console.
/// With neither, it runs a shell on the console and powers off after it. A root file system named by [`ROOT`] has the same script and no
/// modules: see `tests/src/bootable.rs`.
const INIT: &str = "#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/tools:/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
load() { while read -r module; do insmod /$1/$module || echo \"init: insmod $module failed\"; done < /$1/order; }
load modules
if grep -q lunette.ata /proc/cmdline; then load ata; fi
root=$(sed -n 's/.*lunette.root=\\([^ ]*\\).*/\\1/p' /proc/cmdline)
if [ -n \"$root\" ] && [ -e /modules/virtio_blk.ko ]; then
    mount -t ext4 $root /mnt && umount /tmp /sys /proc && exec switch_root /mnt /init
fi
if grep -q lunette.user /proc/cmdline; then
    hostname $(sed -n 's/.*lunette.user=\\([^ ]*\\).*/\\1/p' /proc/cmdline)
    if grep -q lunette.share /proc/cmdline; then mount -t virtiofs share /share; fi
    net=$(sed -n 's/.*lunette.net=\\([^ ]*\\).*/\\1/p' /proc/cmdline)
    if [ \"$net\" = user ]; then
        ip link set eth0 up; ip address add 10.0.2.15/24 dev eth0; ip route add default via 10.0.2.2
        echo nameserver 10.0.2.3 > /etc/resolv.conf
    elif [ -n \"$net\" ]; then
        ip link set lo up; ip link set eth0 up; ip address add $net dev eth0
    fi
    while :; do guest-agent channel; sleep 1; done &
    export HOME=/root PS1='\\h:\\w# '
    cd /root
    echo; echo 'A shell in the guest. Its tools are busybox, guest-agent and the programs in /tools; \"poweroff -f\" ends it.'
    while :; do setsid cttyhack sh; done
fi
if grep -q lunette.agent /proc/cmdline; then exec /bin/guest-agent agent --file /dev/ttyS1; fi
echo; echo 'A shell in the guest. Its tools are busybox, guest-agent and the programs in /tools; \"poweroff -f\" ends it.'
setsid cttyhack sh
poweroff -f
";

/// Kernel parameter that starts the agent.
const AGENT: &str = "lunette.agent";

/// Kernel parameter that starts a user's guest; its value is the guest's name.
const USER: &str = "lunette.user";

/// Kernel parameter that loads the modules of ATA controllers.
pub const ATA: &str = "lunette.ata";

/// Kernel parameter that names a root file system.
pub const ROOT: &str = "lunette.root";

/// Kernel parameters of all guests. Without the self-tests of cryptographic modules, a guest starts with 0.3 s less CPU time.
const COMMON: &str = "console=ttyS0 panic=-1 loglevel=5 mitigations=off cryptomgr.notests";

/// Returns the kernel command line.
pub fn command_line() -> String {
    format!("{COMMON} {AGENT}")
}

/// Returns the kernel command line of a user's guest.
pub fn user_command_line(name: &str) -> String {
    format!("{COMMON} {USER}={name}")
}

/// Returns the path of the initramfs and creates it if it is outdated.
pub fn archive(kernel: &Kernel, equipment: Equipment) -> Result<PathBuf> {
    let files = ingredients(kernel, equipment)?;
    let mut hasher = DefaultHasher::new();
    (INIT, ISCSID_CONF, PASSWD, INITIATOR_NAME, MULTIPATH_CONF).hash(&mut hasher);
    for (inside, outside) in &files {
        let metadata = std::fs::metadata(outside)
            .with_context(|| format!("cannot stat {}", outside.display()))?;
        (
            inside,
            metadata.len(),
            metadata.mtime(),
            metadata.mtime_nsec(),
        )
            .hash(&mut hasher);
    }
    let directory = guest_directory();
    let kind = equipment.word();
    let path = directory.join(format!("{kind}-{:016x}.cpio", hasher.finish()));
    if path.exists() {
        return Ok(path);
    }
    let bytes = pack(&files)?;
    for stale in std::fs::read_dir(&directory)?.flatten() {
        let name = stale.file_name();
        if name.to_str().is_some_and(|name| is_archive(name, kind)) {
            std::fs::remove_file(stale.path()).or_else(|error| match error.kind() {
                std::io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            })?;
        }
    }
    let mut part = tempfile::NamedTempFile::new_in(&directory)?;
    std::io::Write::write_all(&mut part, &bytes)?;
    part.persist(&path).context("cannot store the initramfs")?;
    // A fixed name, for users that start QEMU themselves.
    let link = directory.join(format!("{kind}.cpio"));
    if link.is_symlink() {
        std::fs::remove_file(&link)?;
    }
    std::os::unix::fs::symlink(path.file_name().unwrap_or_default(), &link)?;
    Ok(path)
}

/// Returns true for the name of an archive of this kind, with any digest.
fn is_archive(name: &str, kind: &str) -> bool {
    let parts = name
        .strip_suffix(".cpio")
        .and_then(|name| name.rsplit_once('-'));
    parts.is_some_and(|(found, _)| found == kind)
}

/// Returns paths in the guest and on the host; modules come first, in load order.
fn ingredients(kernel: &Kernel, equipment: Equipment) -> Result<Vec<(String, PathBuf)>> {
    let (initiator, is_daemon) = (equipment.has_initiator(), equipment.has_daemon());
    let for_user = equipment == Equipment::User;
    let multipath = equipment.has_multipath();
    let modules = equipment.modules();
    let mut files: Vec<_> = module_order(kernel, &modules)?
        .into_iter()
        .map(|module| (format!("modules/{}", base_name(&module)), module))
        .collect();
    if for_user {
        files.extend(ata_modules(kernel)?);
    }
    files.push(("bin/busybox".into(), busybox()?));
    files.push((
        "bin/guest-agent".into(),
        program_for_guests(GuestProgram::Agent)?,
    ));
    let mut tools = Vec::new();
    let is_optional =
        for_user || is_daemon || matches!(equipment, Equipment::Target | Equipment::Tgt);
    for name in TOOLS {
        match tool(name) {
            Ok(path) => tools.push((name, path)),
            Err(_) if is_optional => {}
            Err(error) => return Err(error),
        }
    }
    if initiator {
        for name in INITIATOR_TOOLS {
            tools.push((name, initiator_tool(name)?));
        }
    }
    if equipment == Equipment::Initiator {
        tools.push(("nbd-client", nbd_tool("nbd-client")?));
        // Tests load it, because it creates devices.
        for module in module_order(kernel, &["nbd"])? {
            files.push((format!("tools/{}", base_name(&module)), module));
        }
    }
    if equipment == Equipment::Tgt {
        for name in TGT_TOOLS {
            tools.push((name, tool(name)?));
        }
    }
    if is_daemon {
        let daemon = lunette_program(Profile::Dev)?;
        tools.push(("lunette-lab", daemon.with_file_name("lunette-lab")));
        tools.push(("lunette", daemon));
    }
    let mut libraries = BTreeSet::new();
    if multipath {
        for name in MULTIPATH_TOOLS {
            tools.push((name, multipath_file(name)?));
        }
        for name in MULTIPATH_PLUGINS {
            let plugin = multipath_file(name)?;
            libraries.extend(needed_libraries(&plugin)?);
            files.push((format!("lib/multipath/{name}"), plugin));
        }
    }
    for (name, path) in tools {
        libraries.extend(needed_libraries(&path)?);
        files.push((format!("tools/{name}"), path));
    }
    for library in libraries {
        // The loader has a fixed path; the other libraries go to its first search path.
        let inside = if base_name(&library).starts_with("ld-linux") {
            "lib64"
        } else {
            "lib"
        };
        files.push((format!("{inside}/{}", base_name(&library)), library));
    }
    Ok(files)
}

/// Returns the modules of ATA controllers that the kernel has, in load order.
fn ata_modules(kernel: &Kernel) -> Result<Vec<(String, PathBuf)>> {
    let modules = ATA_MODULES.into_iter();
    let modules: Vec<&str> = modules.filter(|name| kernel.has_module(name)).collect();
    let modules = module_order(kernel, &modules)?.into_iter();
    let inside = |module: PathBuf| (format!("ata/{}", base_name(&module)), module);
    Ok(modules.map(inside).collect())
}

/// Returns a program without debug information, which is most of its size.
fn stripped(program: &Path) -> Result<Vec<u8>> {
    let part = tempfile::NamedTempFile::new_in(guest_directory())?;
    let status = Command::new("strip")
        .arg("-o")
        .args([part.path(), program])
        .status()
        .context("cannot run strip\nhint: apt-get install binutils")?;
    if !status.success() {
        bail!("strip {}: {status}", program.display());
    }
    Ok(std::fs::read(part.path())?)
}

fn pack(files: &[(String, PathBuf)]) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in [
        "bin",
        "tools",
        "lib",
        "lib/multipath",
        "lib64",
        "modules",
        "ata",
        "proc",
        "sys",
        "dev",
        "tmp",
        "mnt",
        "root",
        "share",
        "run",
        "run/lock",
        "etc",
        "etc/iscsi",
    ] {
        archive.directory(directory);
    }
    let mut order = BTreeMap::from(["modules", "ata"].map(|folder| (folder, String::new())));
    for (inside, outside) in files {
        let content = match inside.starts_with("tools/lunette") {
            true => stripped(outside)?,
            false => std::fs::read(outside)
                .with_context(|| format!("cannot read {}", outside.display()))?,
        };
        archive.file(inside, &content);
        if let Some((folder, module)) = inside.split_once('/')
            && let Some(order) = order.get_mut(folder)
        {
            order.push_str(module);
            order.push('\n');
        }
    }
    for (folder, order) in order {
        archive.file(&format!("{folder}/order"), order.as_bytes());
    }
    // mke2fs warns without it; e2fsck checks it for mounts.
    archive.symlink("etc/mtab", "/proc/mounts");
    archive.file("etc/iscsi/iscsid.conf", ISCSID_CONF.as_bytes());
    archive.file("etc/multipath.conf", MULTIPATH_CONF.as_bytes());
    let name = format!("InitiatorName={INITIATOR_NAME}\n");
    archive.file("etc/iscsi/initiatorname.iscsi", name.as_bytes());
    // iscsid looks up the user of its clients.
    archive.file("etc/passwd", PASSWD.as_bytes());
    archive.file("init", INIT.as_bytes());
    Ok(archive.finish())
}

/// Returns the modules and their dependencies, dependencies first.
fn module_order(kernel: &Kernel, modules: &[&str]) -> Result<Vec<PathBuf>> {
    let listing = kernel.modules.join("modules.dep");
    let text = std::fs::read_to_string(&listing)
        .with_context(|| format!("cannot read {}", listing.display()))?;
    let mut order: Vec<PathBuf> = Vec::new();
    for module in modules {
        let suffix = format!("/{module}.ko");
        let Some((own, needs)) = text
            .lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(own, _)| own.ends_with(&suffix))
        else {
            bail!("{} has no module {module}", listing.display());
        };
        // modules.dep lists dependencies in reverse order.
        for path in needs.split_whitespace().rev().chain([own]) {
            let path = kernel.modules.join(path);
            if !order.contains(&path) {
                order.push(path);
            }
        }
    }
    Ok(order)
}

/// Returns the loader and the shared libraries of a program, from `ldd`.
fn needed_libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd")
        .arg(program)
        .env("LD_LIBRARY_PATH", unpacked_libraries())
        .output()
        .context("cannot run ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if let Some(line) = text.lines().find(|line| line.ends_with("not found")) {
        bail!(
            "{} lacks the library {}\nhint: scripts/setup test",
            program.display(),
            line.trim()
        );
    }
    Ok(text
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from)
        .filter(|path| path.is_file())
        .collect())
}

fn base_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::is_archive;

    #[test]
    fn only_archives_of_the_same_kind_are_outdated() {
        let name = "initiator-multipath-0123456789abcdef.cpio";
        assert!(is_archive(name, "initiator-multipath"));
        assert!(!is_archive(name, "initiator"));
        assert!(is_archive("initiator-0123456789abcdef.cpio", "initiator"));
        assert!(!is_archive("initiator.cpio", "initiator"));
    }
}

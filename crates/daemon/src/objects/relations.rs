//! Checks objects against each other: names, references, sockets, files.
//!
//! The text of a configuration file is checked first by `config`, with positions. Objects of the API are checked only here.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use reactor::ExportPlacement;

use super::refusal::Fault;
use config::{
    BlockDeviceConfig, Config, ExportConfig, LunConfig, Transport, WORKERS_MAX, placement,
};

/// Checks a whole configuration: [`check_objects`] and the secrets in all CHAP files. Used for a start, a reload and an upgrade.
pub fn check(next: &Config) -> Vec<Fault> {
    let mut faults = check_objects(next);
    faults.extend(crate::equal_secrets::equal_chap_secrets(next).map(equal_secrets));
    faults
}

/// Checks a change at run time: [`check_objects`] and the secrets in the CHAP files that the change adds.
pub fn check_change(now: &Config, next: &Config) -> Vec<Fault> {
    let mut faults = check_objects(next);
    faults.extend(crate::equal_secrets::equal_chap_secrets_of_new(now, next).map(equal_secrets));
    faults
}

fn equal_secrets(detail: String) -> Fault {
    Fault::new(detail).help(crate::equal_secrets::EQUAL_SECRETS_HELP)
}

/// Returns all conflicts in `next`, except those of CHAP secrets.
pub fn check_objects(next: &Config) -> Vec<Fault> {
    let mut faults = Vec::new();
    let disks: HashSet<&str> = next.disks.iter().map(|disk| disk.name.as_str()).collect();
    check_files(next, &mut faults);
    check_names_and_sockets(next, &mut faults);
    for export in next.exports() {
        if let Some(disk) = export.disk()
            && !disks.contains(disk)
        {
            faults.push(Fault::at("/disk", no_disk(disk, export.name())));
        }
        check_luns(export, &disks, &mut faults);
    }
    let has_certificate = next.tls.certificate.is_some();
    for export in next
        .exports()
        .filter(|export| export.nbd.tls && !has_certificate)
    {
        let detail = format!("nbd {} needs a certificate for TLS", export.name);
        let help = "set tls_certificate and tls_key in the file, or start the daemon with --tls-certificate and --tls-key";
        faults.push(Fault::at("/tls", detail).help(help));
    }
    check_placements(next, &mut faults);
    faults
}

/// Checks that the workers of exports exist and that there are not too many in total.
fn check_placements(next: &Config, faults: &mut Vec<Fault>) {
    let count = next.workers.placement.count();
    let mut all = count;
    for export in next.exports() {
        match export.placement() {
            ExportPlacement::Shared => {}
            ExportPlacement::Dedicated => all += 1,
            ExportPlacement::Workers(workers) => {
                let missing = workers.iter().enumerate();
                for (index, worker) in missing.filter(|(_, worker)| **worker as usize >= count) {
                    let detail = format!(
                        "{} for {}: allowed: {}",
                        placement::no_worker(*worker),
                        export.name(),
                        placement::range(count)
                    );
                    let fault = Fault::at(format!("/workers/{index}"), detail);
                    faults.push(fault.help(placement::WORKER_HELP));
                }
            }
        }
    }
    if all > WORKERS_MAX {
        let detail = format!(
            "{all} workers, including the dedicated ones, exceed the maximum of {WORKERS_MAX}"
        );
        let help = "remove `dedicated` from some exports";
        faults.push(Fault::at("/dedicated", detail).help(help));
    }
}

fn no_disk(name: &str, shown_by: &str) -> String {
    format!("disk `{name}` of {shown_by} does not exist")
}

fn check_luns(export: &ExportConfig, disks: &HashSet<&str>, faults: &mut Vec<Fault>) {
    let luns = export.luns().unwrap_or_default();
    let mut seen = HashSet::with_capacity(luns.len());
    for (index, LunConfig { target, lun, disk }) in luns.iter().enumerate() {
        if !disks.contains(disk.as_str()) {
            let shown_by = format!("LUN {target}:{lun} of {}", export.name());
            faults.push(Fault::at(
                format!("/lun/{index}/disk"),
                no_disk(disk, &shown_by),
            ));
        }
        if !seen.insert((*target, *lun)) {
            let name = export.name();
            let detail = format!("target {target}, LUN {lun} of {name} is given twice");
            faults.push(Fault::at(format!("/lun/{index}"), detail));
        }
        if let Some(only) = export.only_target()
            && *target != only
        {
            let detail = format!("the target number of an iSCSI target is {only}, not {target}");
            faults.push(Fault::at(format!("/lun/{index}/target"), detail));
        }
    }
}

fn check_names_and_sockets(next: &Config, faults: &mut Vec<Fault>) {
    let mut names = HashSet::new();
    let mut sockets: HashMap<PathBuf, &str> = HashMap::new();
    if let Some(control) = &next.control {
        sockets.insert(absolute(control), "the control socket");
    }
    for export in next.exports() {
        let name = export.name();
        if !names.insert(name) {
            faults.push(Fault::at("/name", format!("export {name} is given twice")));
        }
        let Some(socket) = export.socket() else {
            continue;
        };
        if export.shares_socket() {
            continue;
        }
        if let Some(other) = sockets.insert(absolute(socket), name) {
            let detail = format!("the socket {} already belongs to {other}", socket.display());
            faults.push(Fault::at("/socket", detail));
        }
    }
    let nbd = || next.exports_over(Transport::Nbd);
    for (index, export) in nbd().enumerate() {
        if let Some(socket) = &export.socket
            && let Some(other) = sockets.get(&absolute(socket))
        {
            let detail = format!("the socket {} already belongs to {other}", socket.display());
            faults.push(Fault::at("/socket", detail));
        }
        if let Some(reason) = nbd().take(index).find_map(|other| export.conflict(other)) {
            faults.push(Fault::at("/export_name", reason));
        }
    }
}

fn check_files(next: &Config, faults: &mut Vec<Fault>) {
    let mut files: HashMap<PathBuf, &str> = HashMap::new();
    let (mut images, mut exports) = (HashMap::new(), HashMap::new());
    let mut identifiers: HashMap<u64, &str> = HashMap::new();
    for disk in &next.disks {
        if let Some(wwn) = disk.shown.wwn
            && let Some(other) = identifiers.insert(wwn, &disk.name)
        {
            let detail = format!("the identifier {wwn:016x} belongs to the disk {other}");
            faults.push(Fault::at("/wwn", detail));
        }
        if let BlockDeviceConfig::Rbd(rbd) = &disk.backend {
            let way = (&rbd.image, &rbd.cluster.conf, &rbd.cluster.mon_host);
            if rbd.image.snapshot.is_none()
                && let Some(other) = images.insert(way, &disk.name)
            {
                let detail = format!("the image {} belongs to the disk {other}", rbd.image);
                faults.push(Fault::at("/image", detail));
            }
        }
        if let BlockDeviceConfig::Nbd(nbd) = &disk.backend
            && let Some(other) = exports.insert(&nbd.address, &disk.name)
        {
            let detail = format!("the export {} belongs to the disk {other}", nbd.address);
            faults.push(Fault::at("/uri", detail));
        }
        let Some(path) = disk.backend.file() else {
            continue;
        };
        if let Some(other) = files.insert(absolute(path), &disk.name) {
            let detail = format!("the file {} belongs to the disk {other}", path.display());
            faults.push(Fault::at("/path", detail));
        }
    }
}

/// Returns an absolute path. Two paths to one file through links are detected by the file's lock.
pub(crate) fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

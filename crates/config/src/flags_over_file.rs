//! Flags over what a file says: objects of both add up, of a single value the flag's counts.

use std::sync::Arc;

use super::flag_source::{self, Flags, VHOST_BLK_FORM, VHOST_SCSI_FORM};
use super::objects::{self, Draft, WorkersDraft};
use super::place::{At, Source};
use super::value::{self, Field, Fields, Reader};
use super::{Diagnostics, disk, iscsi, iscsi_limits};

/// Reads a value by its key, as a file's reader does.
type Read<T> = fn(&mut Reader<'_, '_>, &'static str) -> Option<At<T>>;

/// Reads all flags, and puts what they say over the draft of a file.
pub fn add(draft: &mut Draft, flags: &Flags, diagnostics: &mut Diagnostics) {
    // The file is source 0; each flag is a source of its own, and mistakes are listed in the order of sources.
    let mut order = 0;
    let mut source = |flag: &str, text: &String| -> Arc<Source> {
        order += 1;
        Source::flag(flag, text, order)
    };
    add_objects(draft, flags, &mut source, diagnostics);
    add_workers(draft, flags, &mut source, diagnostics);
    let mut over = Over {
        source: &mut source,
        diagnostics,
    };
    over.put(
        "discovery_auth",
        &flags.discovery_auth,
        &mut draft.discovery_auth,
        objects::read_file_name,
    );
    for path in &flags.sandbox_path {
        let mut more = None;
        over.put(
            "sandbox_path",
            &Some(path.clone()),
            &mut more,
            objects::read_paths,
        );
        match (&mut draft.sandbox_paths, more) {
            (Some(paths), Some(more)) => paths.value.extend(more.value),
            (None, more) => draft.sandbox_paths = more,
            (Some(_), None) => {}
        }
    }
    over.put(
        "control",
        &flags.control,
        &mut draft.control,
        objects::read_socket,
    );
    over.put(
        "state",
        &flags.state,
        &mut draft.state,
        objects::read_folder,
    );
    over.put(
        "metrics_listen",
        &flags.metrics_listen,
        &mut draft.metrics_listen,
        objects::read_address,
    );
    over.put(
        "sandbox",
        &flags.sandbox,
        &mut draft.sandbox,
        objects::read_sandbox,
    );
    over.put(
        "api_listen",
        &flags.api_listen,
        &mut draft.api_listen,
        objects::read_address,
    );
    over.put(
        "token_file",
        &flags.token_file,
        &mut draft.token_file,
        objects::read_file_name,
    );
    over.put(
        "readers_token_file",
        &flags.readers_token_file,
        &mut draft.readers_token_file,
        objects::read_file_name,
    );
}

/// Disks and exports, and the limits of iSCSI initiators.
fn add_objects(
    draft: &mut Draft,
    flags: &Flags,
    source: &mut impl FnMut(&str, &String) -> Arc<Source>,
    diagnostics: &mut Diagnostics,
) {
    for text in &flags.disk {
        let fields = flag_source::disk_flag(&source("--disk", text), diagnostics);
        draft
            .disks
            .extend(fields.map(|fields| disk::read_disk(&fields, diagnostics)));
    }
    for text in &flags.vhost_blk {
        let source = source("--vhost-blk", text);
        let fields = flag_source::export_flag(&source, "disk", VHOST_BLK_FORM, diagnostics);
        let export = fields.map(|fields| objects::read_vhost_blk(&fields, diagnostics));
        draft.vhost_blk.extend(export);
    }
    for text in &flags.vhost_scsi {
        let source = source("--vhost-scsi", text);
        let fields = flag_source::export_flag(&source, "name", VHOST_SCSI_FORM, diagnostics);
        let controller = fields.map(|fields| objects::read_vhost_scsi(&fields, diagnostics));
        draft.vhost_scsi.extend(controller);
    }
    for text in &flags.lun {
        if let Some((controller, fields)) =
            flag_source::lun_flag(&source("--lun", text), diagnostics)
        {
            let lun = objects::read_lun(&fields, diagnostics);
            draft.luns.push((controller, lun));
        }
    }
    draft
        .iscsi
        .extend(iscsi::read_flags(flags, source, diagnostics));
    if let Some(text) = &flags.iscsi_limits {
        let fields = flag_source::options_flag(&source("--iscsi-limits", text));
        draft.iscsi_limits = Some(iscsi_limits::read_iscsi_limits(&fields, diagnostics));
    }
}

/// The threads that do the I/O, and how long they poll.
fn add_workers(
    draft: &mut Draft,
    flags: &Flags,
    source: &mut impl FnMut(&str, &String) -> Arc<Source>,
    diagnostics: &mut Diagnostics,
) {
    if flags.workers.is_some() || flags.cpus.is_some() {
        // Count and CPUs say one thing together: a flag for either replaces both.
        draft.workers = WorkersDraft::default();
    }
    if let Some(text) = &flags.workers {
        let value = flag_source::word_flag(&source("--workers", text));
        draft.workers.count = objects::read_workers(&value, diagnostics);
    }
    if let Some(text) = &flags.cpus {
        let value = flag_source::list_flag(&source("--cpus", text));
        draft.workers.cpus = objects::read_cpus(&value, diagnostics);
    }
    for (key, text, limit) in [
        (objects::POLL_KEY, &flags.poll_us, &mut draft.poll),
        (
            objects::NETWORK_POLL_KEY,
            &flags.network_poll_us,
            &mut draft.network_poll,
        ),
        (
            objects::DISK_POLL_KEY,
            &flags.disk_poll_us,
            &mut draft.disk_poll,
        ),
    ] {
        if let Some(text) = text {
            let value = flag_source::word_flag(&source(&flag_of(key), text));
            *limit = objects::read_poll(key, &value, diagnostics);
        }
    }
}

/// The flag that says the value of a key.
fn flag_of(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}

/// Single values of flags over those of a file.
struct Over<'s, 'd, S> {
    source: &'s mut S,
    diagnostics: &'d mut Diagnostics,
}

impl<S: FnMut(&str, &String) -> Arc<Source>> Over<'_, '_, S> {
    /// Where the flag is given, its value counts, also where it cannot be read.
    fn put<T>(
        &mut self,
        key: &'static str,
        text: &Option<String>,
        into: &mut Option<At<T>>,
        read: Read<T>,
    ) {
        if let Some(text) = text {
            let word = flag_source::word_flag(&(self.source)(&flag_of(key), text));
            let fields = single(key, word);
            *into = read(&mut Reader::new(&fields, key, self.diagnostics), key);
        }
    }
}

/// A flag's value as the only field of a table, so that the file's reader reads it.
fn single(key: &str, value: At<value::Raw>) -> Fields {
    let place = value.place.clone();
    let key = At::new(key.to_owned(), place.clone());
    Fields {
        place,
        entries: vec![Field { key, value }],
    }
}

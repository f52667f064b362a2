//! Table, flame graphs and JSON of profiles.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use bench::report::columns;
use bench::study::{Page, write_file};
use inferno::flamegraph;
use serde_json::{Value, json};

use super::figures::Profile;
use super::{Measured, Profiles, counted, document};
use crate::vm::study::report::PARTIAL;

/// Number of host functions in the table.
const HOST_FUNCTIONS: usize = 8;

/// Shortens function names for the table; JSON and pictures have the full names.
fn cut(name: &str) -> String {
    const LONGEST: usize = 56;
    match name.char_indices().nth(LONGEST) {
        Some((at, _)) => format!("{}...", &name[..at]),
        None => name.to_owned(),
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Tables, reasons against the results, and the conditions of the measurement.
pub fn text(profiles: &Profiles, top: usize) -> String {
    let mut text = table(&profiles.all, top);
    text.push('\n');
    for line in profiles.cautions().iter().chain(&profiles.notes) {
        text.push_str(&format!("{line}\n"));
    }
    text
}

/// Table of the guests side by side, followed by the host.
fn table(all: &[Measured], top: usize) -> String {
    let heads: Vec<String> = all.iter().map(|one| counted(one.queues)).collect();
    let line = |name: &str, cell: &dyn Fn(&Measured) -> String| -> Vec<String> {
        let cells = all.iter().map(cell);
        std::iter::once(cut(name)).chain(cells).collect()
    };
    let mut lines = vec![[vec!["in the guest".to_owned()], heads.clone()].concat()];
    lines.push(line("IOPS", &|one| format!("{:.0}", one.around.iops)));
    lines.push(line("CPU time without work", &|one| {
        percent(one.guest.idle_share())
    }));
    lines.push(line("waiting for locks", &|one| {
        percent(one.guest.spinning())
    }));
    lines.push(line("interrupts for each request", &|one| {
        format!("{:.2}", one.around.interrupts_per_io())
    }));
    lines.push(line(
        "exits for each request",
        &|one| match one.around.exits_per_io() {
            Ok(exits) => format!("{exits:.2}"),
            Err(_) => "-".to_owned(),
        },
    ));
    lines.push(line("CPU time on the host", &|one| {
        percent(one.around.steal_share())
    }));
    for function in top_functions(all, top) {
        lines.push(line(&function, &|one| percent(one.guest.share(&function))));
    }
    let mut text = columns(&lines);
    if let Some(Err(reason)) = all.first().map(|one| one.around.exits_per_io()) {
        text.push_str(&format!("exits: {reason}\n"));
    }
    text.push('\n');
    text.push_str(&host(all, &heads));
    text
}

/// Functions with the largest share in any guest.
fn top_functions(all: &[Measured], top: usize) -> Vec<String> {
    let mut functions: Vec<(String, f64)> = Vec::new();
    for (name, share) in all.iter().flat_map(|one| one.guest.functions()) {
        match functions.iter_mut().find(|(known, _)| *known == name) {
            Some((_, largest)) => *largest = largest.max(share),
            None => functions.push((name, share)),
        }
    }
    functions.sort_by(|one, other| other.1.total_cmp(&one.1));
    functions.truncate(top);
    functions.into_iter().map(|(name, _)| name).collect()
}

fn host(all: &[Measured], heads: &[String]) -> String {
    let mut lines = vec![[vec!["on the host".to_owned()], heads.to_vec()].concat()];
    let known: Vec<Option<&Profile>> = all.iter().map(|one| one.host.as_ref().ok()).collect();
    let mut functions: Vec<String> = Vec::new();
    for profile in known.iter().flatten() {
        for (name, _) in profile.functions().into_iter().take(HOST_FUNCTIONS) {
            if !functions.contains(&name) {
                functions.push(name);
            }
        }
    }
    for function in functions {
        let cells = known.iter().map(|profile| {
            profile.map_or("-".to_owned(), |profile| percent(profile.share(&function)))
        });
        lines.push(std::iter::once(cut(&function)).chain(cells).collect());
    }
    let mut text = columns(&lines);
    for (one, head) in all.iter().zip(heads) {
        match &one.host {
            Err(reason) => text.push_str(&format!("host, {head}: not sampled: {reason}\n")),
            Ok(profile) if !profile.has_kernel => {
                text.push_str("no permission to sample the host's kernel; hint: run as root, or set sysctl kernel.perf_event_paranoid=1\n");
                break;
            }
            Ok(_) => {}
        }
    }
    text
}

/// Writes the flame graphs, their profiles and a page. Returns the path of the page.
pub fn write(profiles: &Profiles, top: usize, folder: &Path) -> Result<PathBuf> {
    for one in &profiles.all {
        let queues = one.queues;
        let draw = |profile: &Profile, place: &str| {
            let title = format!("{place}, {}", counted(queues));
            let name = format!("{}-{queues}-queues.svg", place.to_lowercase());
            graph(profile, &title, &profiles.notes[0], &folder.join(name))
        };
        draw(&one.guest, "Guest")?;
        if let Ok(host) = &one.host
            && host.total() > 0
        {
            draw(host, "Host")?;
        }
    }
    let document = format!("{:#}\n", json(profiles));
    write_file(folder, "profile.json", document.as_bytes())?;
    std::fs::remove_file(folder.join(PARTIAL)).ok();
    let page = Page {
        title: "Functions of a guest with one queue and with several".to_owned(),
        about: profiles.notes.to_vec(),
        cautions: profiles.cautions(),
        texts: vec![table(&profiles.all, top)],
        ..Page::default()
    };
    write_file(folder, "report.html", page.html().as_bytes())
}

fn graph(profile: &Profile, title: &str, conditions: &str, path: &Path) -> Result<()> {
    let mut options = flamegraph::Options::default();
    title.clone_into(&mut options.title);
    options.subtitle = Some(conditions.to_owned());
    "samples".clone_into(&mut options.count_name);
    let folded = profile.folded();
    let mut svg = Vec::new();
    flamegraph::from_lines(&mut options, folded.iter().map(String::as_str), &mut svg)
        .context("cannot draw a flame graph")?;
    std::fs::write(path, svg).with_context(|| format!("cannot write {}", path.display()))
}

pub fn json(profiles: &Profiles) -> Value {
    let runs: Vec<Value> = profiles.all.iter().map(document).collect();
    json!({"environment": profiles.environment, "conditions": profiles.notes, "cautions": profiles.cautions(), "runs": runs})
}

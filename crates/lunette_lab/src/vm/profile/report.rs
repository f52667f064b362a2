//! Table, flame graphs and JSON of profiles.

use std::path::Path;

use anyhow::{Context, Result};
use bench::report::columns;
use bench::run::environment;
use inferno::flamegraph;
use serde_json::{Value, json};

use super::figures::Profile;
use super::{Measured, counted, document};

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

/// Table of the guests side by side, followed by the host.
pub fn table(all: &[Measured], top: usize) -> String {
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

/// Writes the flame graphs and their profiles.
pub fn draw(all: &[Measured], folder: &Path) -> Result<()> {
    for one in all {
        let queues = one.queues;
        graph(
            &one.guest,
            &format!("Guest, {}", counted(queues)),
            &folder.join(format!("guest-{queues}-queues.svg")),
        )?;
        if let Ok(host) = &one.host
            && host.total() > 0
        {
            graph(
                host,
                &format!("Host, {}", counted(queues)),
                &folder.join(format!("host-{queues}-queues.svg")),
            )?;
        }
    }
    let path = folder.join("profile.json");
    std::fs::write(&path, format!("{:#}\n", json(all)))
        .with_context(|| format!("cannot write {}", path.display()))
}

fn graph(profile: &Profile, title: &str, path: &Path) -> Result<()> {
    let mut options = flamegraph::Options::default();
    title.clone_into(&mut options.title);
    "samples".clone_into(&mut options.count_name);
    let folded = profile.folded();
    let mut svg = Vec::new();
    flamegraph::from_lines(&mut options, folded.iter().map(String::as_str), &mut svg)
        .context("cannot draw a flame graph")?;
    std::fs::write(path, svg).with_context(|| format!("cannot write {}", path.display()))
}

pub fn json(all: &[Measured]) -> Value {
    json!({"environment": environment(), "runs": all.iter().map(document).collect::<Vec<_>>()})
}

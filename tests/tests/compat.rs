//! Samples of releases in `tests/compat`: the present daemon reads their configuration and has their keys, options, API, metrics and events. The same daemon
//! has results for each query of the dashboard.
//! State of releases is tested in `saved_state`, handover frames and RBD records in their crates. Needs the built programs. Takes: 5 s.
//!
//! `LUNETTE_RECORD=1.0 cargo test --workspace --exclude lunette-fuzz --test compat` records the samples of a new release.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use control::objects::{Bitmap, Disk, Export, Job, Reservation, Session, Worker};
use control::statistics::Statistics;
use control::{Event, StateFile, Status, Version};
use end_to_end::dashboard::ensure_queries_have_results;
use end_to_end::http::{Answer, Events, ask};
use end_to_end::packages::succeeds;
use end_to_end::{Context, IscsiSession, Profile, Result, Rig, bail, ensure};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions};
use vm::{lunette_program, workspace};

const TARGET: &str = "iqn.2026-11.org.example:t0";

/// Names with their properties. A file has one line for each: `NAME: PROPERTY PROPERTY`.
type Names = BTreeMap<String, BTreeSet<String>>;

/// Returns the folders of the recorded releases, or the folder of the release that is being recorded.
fn releases() -> Result<Vec<PathBuf>> {
    let parent = workspace().join("tests/compat");
    if let Some(release) = recorded() {
        return Ok(vec![parent.join(release)]);
    }
    let entries = fs::read_dir(parent)?;
    let paths = entries.map(|entry| Ok(entry?.path()));
    let mut releases: Vec<PathBuf> = paths.collect::<Result<_>>()?;
    releases.retain(|path| path.is_dir());
    ensure!(!releases.is_empty(), "no recorded release");
    Ok(releases)
}

fn recorded() -> Option<String> {
    std::env::var("LUNETTE_RECORD").ok()
}

fn add<'a>(names: &mut Names, name: &str, properties: impl IntoIterator<Item = &'a str>) {
    let known = names.entry(name.to_owned()).or_default();
    known.extend(properties.into_iter().map(str::to_owned));
}

fn parse(text: &str) -> Names {
    let mut names = Names::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (name, properties) = line.rsplit_once(": ").unwrap_or((line, ""));
        add(&mut names, name, properties.split_whitespace());
    }
    names
}

/// Checks that names and properties of all releases still exist, or records them.
fn compare(file: &str, now: &Names) -> Result<()> {
    for release in releases()? {
        let path = release.join(file);
        if recorded().is_some() {
            let lines = now.iter().map(|(name, properties)| {
                let properties: Vec<&str> = properties.iter().map(String::as_str).collect();
                format!("{name}: {}\n", properties.join(" "))
            });
            fs::write(&path, lines.collect::<String>())?;
            continue;
        }
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let missing = missing(&parse(&text), now);
        ensure!(
            missing.is_empty(),
            "{}: gone, or changed: {}; hint: RELEASE_POLICY.md",
            path.display(),
            missing.join(", ")
        );
    }
    Ok(())
}

/// Returns the recorded names and properties that do not exist now, and new requirements of recorded names.
fn missing(then: &Names, now: &Names) -> Vec<String> {
    let mut missing = Vec::new();
    for (name, properties) in then {
        let Some(present) = now.get(name) else {
            missing.push(name.clone());
            continue;
        };
        let is_required = |property: &&String| property.starts_with("required=");
        let gone = properties
            .iter()
            .filter(|one| !is_required(one) && !present.contains(*one));
        let added = present
            .iter()
            .filter(|one| is_required(one) && !properties.contains(*one));
        missing.extend(gone.chain(added).map(|one| format!("{name}: {one}")));
    }
    missing
}

#[test]
fn removed_and_changed_names_are_found() {
    let then = parse("disk size: size\nPUT /v1/x: required=a 200\nlunette log: --json\n");
    assert_eq!(missing(&then, &then), Vec::<String>::new());
    let now =
        parse("disk size: size new\nPUT /v1/x: required=a required=b 200\nlunette logs: --json\n");
    assert_eq!(
        missing(&then, &now),
        ["PUT /v1/x: required=b", "lunette log"]
    );
}

/// Returns the keys of `docs/configuration.md`, whose rows are generated from the declarations of the keys: type, words and default.
fn keys() -> Result<Names> {
    let page = fs::read_to_string(workspace().join("docs/configuration.md"))?;
    let (mut keys, mut section) = (Names::new(), "");
    for line in page.lines() {
        if line.starts_with('#') || line.starts_with("Each ") {
            section = line.trim_start_matches('#').trim();
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let ["", key, value, default, _, _, ""] = cells[..] else {
            continue;
        };
        if let Some(key) = key.strip_prefix('`') {
            let words = value.split('`').skip(1).step_by(2);
            let kind = value.split([' ', ',', ':']).next();
            let name = format!("{section}, {}", key.trim_end_matches('`'));
            add(&mut keys, &name, words.chain(kind));
            // Other defaults are described in words.
            if let ["", literal, ""] = default.split('`').collect::<Vec<_>>()[..] {
                add(
                    &mut keys,
                    &name,
                    [&*format!("default={}", literal.replace(" ", "_"))],
                );
            }
        }
    }
    ensure!(keys.len() > 100, "{} keys", keys.len());
    Ok(keys)
}

#[test]
fn keys_of_releases_have_their_type_words_and_default() -> Result<()> {
    compare("keys.txt", &keys()?)
}

/// Changes the present keys as a later version would that breaks its promise.
#[test]
fn renamed_key_and_changed_default_are_found() -> Result<()> {
    if recorded().is_some() {
        return Ok(());
    }
    for release in releases()? {
        let then = parse(&fs::read_to_string(release.join("keys.txt"))?);
        let mut now = keys()?;
        let (key, limited) = ("virtio-blk exports, queues", "Disks, io_timeout");
        let properties = now.remove(key).context(key)?;
        now.insert(key.replace("queues", "queue_count"), properties);
        let changed = now.get_mut(limited).context(limited)?;
        ensure!(changed.remove("default=0"), "{changed:?}");
        changed.insert("default=30".to_owned());
        let expected = [format!("{limited}: default=0"), key.to_owned()];
        ensure!(
            missing(&then, &now) == expected,
            "{:?}",
            missing(&then, &now)
        );
    }
    Ok(())
}

/// Returns the commands of a program with their options, subcommands and words, from its completion script.
fn commands(program: &Path, names: &mut Names) -> Result<()> {
    let script = succeeds(Command::new(program).args(["completion", "bash"]))?;
    let mut command = String::new();
    for line in script.lines().map(str::trim) {
        if let Some(label) = line.strip_suffix(')')
            && label.starts_with("lunette")
        {
            command = label.replace("__subcmd__", " ").replace("__", "-");
        } else if let Some(words) = line.strip_prefix("opts=\"")
            && !command.is_empty()
        {
            if !format!("{command} ").contains(" help ") {
                add(names, &command, words.trim_end_matches('"').split(' '));
            }
            command.clear();
        }
    }
    Ok(())
}

#[test]
fn commands_of_releases_have_their_options() -> Result<()> {
    let program = lunette_program(Profile::Dev)?;
    let mut names = Names::new();
    commands(&program, &mut names)?;
    commands(&program.with_file_name("lunette-lab"), &mut names)?;
    ensure!(names.len() > 100, "{} commands", names.len());
    compare("commands.txt", &names)
}

/// Returns the type of a schema as one word: the name of a component, or a JSON type.
fn type_of(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str() {
        return name.rsplit('/').next().unwrap_or_default().to_owned();
    }
    if let Some(several) = schema["oneOf"].as_array().or(schema["anyOf"].as_array()) {
        return several.iter().map(type_of).collect::<Vec<_>>().join("|");
    }
    match &schema["type"] {
        Value::String(name) if name == "array" => format!("[{}]", type_of(&schema["items"])),
        Value::String(name) => name.clone(),
        Value::Array(names) => {
            let names = names.iter().filter_map(Value::as_str);
            names.collect::<Vec<_>>().join("|")
        }
        _ => "any".to_owned(),
    }
}

/// Returns the operations of the API with parameters, body and responses, and the fields of all types.
fn operations(document: &Value) -> Result<Names> {
    let mut names = Names::new();
    let content = |value: &Value| {
        let content = value["content"]
            .as_object()
            .and_then(|all| all.values().next());
        content.map_or_else(String::new, |content| type_of(&content["schema"]))
    };
    let mut bodies = BTreeSet::new();
    for (path, methods) in document["paths"].as_object().context("no paths")? {
        for (method, operation) in methods.as_object().into_iter().flatten() {
            let mut words = Vec::new();
            for parameter in operation["parameters"].as_array().into_iter().flatten() {
                let name = parameter["name"].as_str().unwrap_or_default();
                let kind = if parameter["required"] == true {
                    "required="
                } else {
                    "parameter="
                };
                words.push(format!("{kind}{name}"));
            }
            if operation["requestBody"].is_object() {
                let body = content(&operation["requestBody"]);
                words.push(format!("body={body}"));
                bodies.insert(body);
            }
            for (status, response) in operation["responses"].as_object().into_iter().flatten() {
                words.push(format!("{status}={}", content(response)));
            }
            let name = format!("{} {path}", method.to_uppercase());
            add(&mut names, &name, words.iter().map(String::as_str));
        }
    }
    for (name, schema) in document["components"]["schemas"]
        .as_object()
        .context("no types")?
    {
        // A type that contains another one is their combination.
        let combined = schema["allOf"].as_array().into_iter().flatten();
        let parts = std::iter::once(schema).chain(combined);
        let fields = parts.filter_map(|part| part["properties"].as_object());
        let mut words: Vec<String> = fields
            .flatten()
            .map(|(field, schema)| format!("{field}={}", type_of(schema)))
            .collect();
        let values = schema["enum"].as_array().into_iter().flatten();
        words.extend(values.filter_map(Value::as_str).map(str::to_owned));
        if bodies.contains(name) {
            let required = schema["required"].as_array().into_iter().flatten();
            let required = required.filter_map(Value::as_str);
            words.extend(required.map(|field| format!("required={field}")));
        }
        add(&mut names, name, words.iter().map(String::as_str));
    }
    Ok(names)
}

/// Returns the metrics of a page, with their type and the names of their labels.
fn metrics(page: &str) -> Names {
    let mut kinds: BTreeMap<&str, &str> = BTreeMap::new();
    let mut names = Names::new();
    for line in page.lines() {
        if let Some((name, kind)) = line
            .strip_prefix("# TYPE ")
            .and_then(|rest| rest.split_once(' '))
        {
            kinds.insert(name, kind);
        } else if !line.starts_with('#') {
            let (series, _) = line.rsplit_once(' ').unwrap_or((line, ""));
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            let labels = labels
                .split("=\"")
                .map(|part| part.rsplit([',', '"']).next().unwrap_or_default());
            let labels = labels.filter(|label| !matches!(*label, "" | "}"));
            let family = ["_bucket", "_sum", "_count"]
                .iter()
                .find_map(|end| name.strip_suffix(end));
            let kind = kinds
                .get(name)
                .or(family.and_then(|family| kinds.get(family)));
            add(&mut names, name, labels.chain(kind.copied()));
        }
    }
    names
}

/// Returns the members of `then` that `now` lacks or that have another value.
fn lost(then: &Value, now: &Value, at: &str, found: &mut Vec<String>) {
    match (then, now) {
        (Value::Object(then), Value::Object(now)) => {
            for (key, then) in then {
                let now = now.get(key).unwrap_or(&Value::Null);
                lost(then, now, &format!("{at}/{key}"), found);
            }
        }
        (Value::Array(then), Value::Array(now)) if then.len() == now.len() => {
            let pairs = then.iter().zip(now).enumerate();
            pairs.for_each(|(index, (then, now))| lost(then, now, &format!("{at}/{index}"), found));
        }
        _ if then == now => {}
        _ => found.push(at.to_owned()),
    }
}

/// Returns the fields of an answer that clients do not read.
fn unread<T: DeserializeOwned + Serialize>(answer: &str) -> Result<Vec<String>> {
    let then: Value = serde_json::from_str(answer)?;
    let read: T = serde_json::from_str(answer)?;
    let mut found = Vec::new();
    lost(&then, &serde_json::to_value(read)?, "", &mut found);
    Ok(found)
}

/// Checks that clients read all fields of an answer of a release.
fn is_read<T: DeserializeOwned + Serialize>(release: &Path, file: &str) -> Result<()> {
    let path = release.join("answers").join(file);
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let found = unread::<T>(&text).with_context(|| path.display().to_string())?;
    ensure!(
        found.is_empty(),
        "{}: not read: {}",
        path.display(),
        found.join(", ")
    );
    Ok(())
}

#[test]
fn answers_of_releases_are_read_with_all_fields() -> Result<()> {
    if recorded().is_some() {
        return Ok(());
    }
    for release in releases()? {
        is_read::<Version>(&release, "version.json")?;
        is_read::<Status>(&release, "status.json")?;
        is_read::<Statistics>(&release, "statistics.json")?;
        is_read::<Vec<Disk>>(&release, "disks.json")?;
        is_read::<Vec<Export>>(&release, "exports.json")?;
        is_read::<Vec<Session>>(&release, "sessions.json")?;
        is_read::<Vec<Job>>(&release, "jobs.json")?;
        is_read::<Vec<Bitmap>>(&release, "bitmaps.json")?;
        is_read::<Vec<Reservation>>(&release, "reservations.json")?;
        is_read::<Vec<Worker>>(&release, "workers.json")?;
        is_read::<Vec<StateFile>>(&release, "state.json")?;
        is_read::<Vec<Event>>(&release, "events.json")?;
    }
    Ok(())
}

#[test]
fn renamed_field_of_an_answer_is_found() -> Result<()> {
    if recorded().is_some() {
        return Ok(());
    }
    for release in releases()? {
        let answer = fs::read_to_string(release.join("answers/disks.json"))?;
        let renamed = |old, new| unread::<Vec<Disk>>(&answer.replace(old, new));
        let found = renamed("\"waiting\"", "\"waiting_ios\"")?;
        let first = found.first().map(String::as_str);
        ensure!(first == Some("/0/status/waiting_ios"), "{found:?}");
        // A mandatory field.
        let error = renamed("\"serial\"", "\"number\"").err();
        let error = error.context("the field was not missed")?;
        ensure!(format!("{error:#}").contains("serial"), "{error:#}");
    }
    Ok(())
}

/// Resources whose answers are recorded.
const ANSWERS: [&str; 11] = [
    "version",
    "status",
    "statistics",
    "disks",
    "exports",
    "sessions",
    "jobs",
    "bitmaps",
    "reservations",
    "workers",
    "state",
];

/// A daemon with the configuration of a release.
struct Served {
    rig: Rig,
    sockets: String,
}

impl Served {
    fn start(release: &Path) -> Result<Served> {
        let text = fs::read_to_string(release.join("lunette.toml"))?;
        let mut sockets = String::new();
        let rig = Rig::prepared(|scratch, builder| {
            sockets = scratch.sockets().display().to_string();
            let file = scratch.file("lunette.toml");
            fs::write(&file, text.replace("@SOCKETS@", &sockets))?;
            let file = file.display().to_string();
            Ok(builder.arguments(["--config", &file]))
        })?;
        Ok(Served { rig, sockets })
    }

    fn get(&self, path: &str) -> Result<Answer> {
        let stream = std::os::unix::net::UnixStream::connect(self.rig.daemon.control())?;
        let answer = ask(stream, "GET", path, &[], "")?;
        ensure!(answer.status == 200, "{path}: {}", answer.head);
        Ok(answer)
    }

    /// Causes events, counters and sessions of each kind. Returns the events.
    fn use_everything(&mut self) -> Result<(Vec<Value>, FrontEnd, IscsiSession)> {
        let mut events = Events::listen(&self.rig.daemon.control())?;
        let portal = self.rig.iscsi_portal(TARGET)?;
        let run = |words: &[&str]| self.rig.daemon.lunette(words);
        run(&["disk", "add", "e=ram:1M"])?;
        run(&["disk", "resize", "e", "2M"])?;
        run(&["disk", "limit", "e", "iops=100"])?;
        run(&["disk", "set", "e", "on_error=stop"])?;
        run(&["lun", "add", "vm0", "4:7", "e"])?;
        run(&["lun", "remove", "vm0", "4:7"])?;
        run(&[
            "export",
            "add",
            "vhost-blk",
            &format!("e:{}/e.sock", self.sockets),
        ])?;
        run(&["export", "place", "e", "dedicated"])?;
        run(&["export", "remove", "e"])?;
        run(&["export", "access-state", TARGET, "1", "standby"])?;
        run(&["export", "access-state", TARGET, "1", "active/optimized"])?;
        run(&["disk", "remove", "e"])?;
        let target = format!("file:{}", self.rig.scratch.file("backup").display());
        let backup = [
            "disk",
            "backup",
            "root",
            &target,
            "--incremental",
            "daily",
            "--wait",
        ];
        run(&backup)?;
        let mut front_end = FrontEnd::connect(
            &Path::new(&self.sockets).join("root.sock"),
            &Options::default(),
        )?;
        let options = QueueOptions::default();
        drop(BlkQueue::start(
            &mut front_end,
            0,
            &options,
            16,
            1 << 20,
            Layout::Separate,
        )?);
        drop(IscsiSession::login(&portal, TARGET, 2)?);
        let mut session = IscsiSession::login(&portal, TARGET, 1)?;
        // REGISTER (PERSISTENT RESERVE OUT), then READ(10).
        let mut register = [0; 24];
        register[15] = 7;
        let cdb = [0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0];
        ensure!(session.command_on(0, &cdb, Some(&register), 0)?.status == 0);
        let read = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
        ensure!(session.command_on(0, &read, None, 4096)?.status == 0);
        let (mut seen, mut of_initiators) = (Vec::new(), 0);
        loop {
            let (_, data) = events.hear()?;
            let event: Value = serde_json::from_str(&data)?;
            // The sessions of both initiators are open, and the first one is closed.
            of_initiators += usize::from(event["initiator"].is_string());
            seen.push(event);
            if of_initiators == 3 {
                return Ok((seen, front_end, session));
            }
        }
    }
}

/// Writes JSON with one member per line, without this run's folders.
fn write_sample(path: &Path, value: &Value, served: &Served) -> Result<()> {
    let files = served.rig.scratch.files().display().to_string();
    let text = serde_json::to_string_pretty(value)? + "\n";
    let text = text
        .replace(&served.sockets, "/run/lunette")
        .replace(&files, "/srv");
    Ok(fs::write(path, text)?)
}

#[test]
fn daemon_with_the_configuration_of_a_release_serves_its_interfaces() -> Result<()> {
    for release in releases()? {
        let mut served = Served::start(&release)?;
        let (events, _front_end, _session) = served.use_everything()?;
        let mut names = Names::new();
        for event in &events {
            let fields = event.as_object().context("no object")?.keys();
            let name = event["event"].as_str().context("no name")?;
            add(&mut names, name, fields.map(String::as_str));
        }
        let document: Value = serde_json::from_str(&served.get("/v1/openapi.json")?.body)?;
        let page = served.get("/metrics")?.body;
        let metrics = metrics(&page);
        let later = served.get("/metrics")?.body;
        ensure_queries_have_results(&served.rig.scratch, [&page, &later])?;
        let shown = served.rig.daemon.lunette(&["config", "show"])?;
        let shown: String = shown
            .replace(&served.sockets, "@SOCKETS@")
            .lines()
            // The test runner chooses the sandbox in the daemon's environment.
            .filter(|line| !line.starts_with("sandbox"))
            .map(|line| format!("{line}\n"))
            .collect();
        let effective = release.join("effective.toml");
        if recorded().is_some() {
            fs::write(&effective, &shown)?;
            fs::create_dir_all(release.join("answers"))?;
            for name in ANSWERS {
                let answer = served.get(&format!("/v1/{name}"))?.body;
                let path = release.join(format!("answers/{name}.json"));
                write_sample(&path, &serde_json::from_str(&answer)?, &served)?;
            }
            write_sample(
                &release.join("answers/events.json"),
                &Value::from(events),
                &served,
            )?;
        }
        // Later versions may add lines.
        let mut now = shown.lines();
        for line in fs::read_to_string(&effective)?.lines() {
            if !now.any(|other| other == line) {
                bail!(
                    "{}: the configuration has no longer {line:?}",
                    effective.display()
                );
            }
        }
        compare("events.txt", &names)?;
        compare("metrics.txt", &metrics)?;
        compare("api.txt", &operations(&document)?)?;
    }
    Ok(())
}

//! Compares `lunette bench` with Debian's fio: the same job files issue the same requests, our JSON has fio's keys and types, fio's
//! own tools read our output, and every fio option is recognized.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use end_to_end::{Context, Profile, Result, Scratch, bail, ensure};
use serde_json::Value;
use vm::lunette_program;

/// Size of the file that jobs run on, in bytes.
const FILE: u64 = 4 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    Fio,
    Lunette,
}

/// Runs a job file in `folder`, which is also the working directory, and returns standard output.
fn run(tool: Who, folder: &Path, text: &str, more: &[&str]) -> Result<String> {
    std::fs::write(folder.join("job.fio"), text)?;
    let mut command = match tool {
        Who::Fio => Command::new("fio"),
        Who::Lunette => {
            let mut command = Command::new(lunette_program(Profile::Dev)?);
            command.arg("bench");
            command
        }
    };
    let output = command
        .args(more)
        .arg("job.fio")
        .current_dir(folder)
        .output();
    let output =
        output.with_context(|| format!("cannot run {tool:?}; hint: apt-get install fio"))?;
    let complaints = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{tool:?}: {complaints}\n{text}");
    Ok(String::from_utf8(output.stdout)?)
}

/// A request: is a write, length in bytes, offset.
type Request = (bool, u64, u64);

/// Returns the requests of a job file's clones, each in the order of issue.
fn requests(tool: Who, case: &str) -> Result<Vec<Vec<Request>>> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    for name in ["a", "b"] {
        std::fs::write(folder.join(name), vec![0x5a; FILE as usize])?;
    }
    // In fio a second filename does not replace the first one.
    let file = if case.contains("filename=") {
        ""
    } else {
        "filename=a\n"
    };
    let text = format!(
        "[global]\nioengine=psync\nthread\n{file}write_lat_log=l\nlog_offset=1\n[j]\n{case}\n"
    );
    run(tool, folder, &text, &[])?;
    let mut clones = Vec::new();
    for number in 1.. {
        let Ok(text) = std::fs::read_to_string(folder.join(format!("l_lat.{number}.log"))) else {
            break;
        };
        let request = |line: &str| {
            let words: Vec<u64> = line.split(", ").filter_map(|w| w.parse().ok()).collect();
            match words[..] {
                [_, _, direction, size, offset, _] => Ok((direction == 1, size, offset)),
                _ => bail!("{tool:?} wrote `{line}` in its log"),
            }
        };
        clones.push(text.lines().map(request).collect::<Result<Vec<_>>>()?);
    }
    ensure!(!clones.is_empty(), "{tool:?} wrote no log for {case}");
    // fio numbers clones in the order in which their threads start.
    clones.sort();
    Ok(clones)
}

fn both(case: &str) -> Result<[Vec<Vec<Request>>; 2]> {
    Ok([requests(Who::Fio, case)?, requests(Who::Lunette, case)?])
}

/// Returns the log files by name. The columns that depend on timing are removed from each line.
fn logs(tool: Who, text: &str) -> Result<BTreeMap<String, Vec<Vec<u64>>>> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    std::fs::write(folder.join("a"), vec![0x5a; FILE as usize])?;
    run(tool, folder, text, &[])?;
    let mut logs = BTreeMap::new();
    for entry in std::fs::read_dir(folder)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !name.ends_with(".log") {
            continue;
        }
        let text = std::fs::read_to_string(folder.join(&name))?;
        let line = |line: &str| -> Result<Vec<u64>> {
            let words = line
                .split(", ")
                .map(str::parse)
                .collect::<Result<Vec<u64>, _>>();
            let mut words = words.with_context(|| format!("{name}: {line}"))?;
            ensure!(words.len() > 2, "{name}: {line}");
            words.drain(..if name.contains("_iops.") { 1 } else { 2 });
            Ok(words)
        };
        let mut lines = text.lines().map(line).collect::<Result<Vec<_>>>()?;
        // Requests of several clones or directions complete in any order.
        lines.sort_unstable();
        logs.insert(name.clone(), lines);
    }
    Ok(logs)
}

#[test]
fn log_files_have_the_names_the_lines_and_the_columns_of_fio_s() -> Result<()> {
    for more in [
        "",
        "log_offset=1\n",
        "numjobs=2\n",
        "[k]\nrw=write\nsize=64k\nwrite_lat_log\n",
    ] {
        let text = format!(
            "[global]\nioengine=psync\nthread\nfilename=a\nrw=read\nsize=128k\n[j]\n\
             write_bw_log=b\nwrite_lat_log\nwrite_iops_log=io\n{more}"
        );
        let (fio, ours) = (logs(Who::Fio, &text)?, logs(Who::Lunette, &text)?);
        ensure!(fio == ours, "{more}:\nfio  {fio:?}\nours {ours:?}");
    }
    // Averaged over time: files and columns are equal, and there is one line per interval.
    let text = "[j]\nioengine=psync\nthread\nfilename=a\nrw=read\nbs=4k\ntime_based\nruntime=300ms\n\
                write_bw_log=b\nwrite_lat_log=l\nwrite_iops_log=i\nlog_avg_msec=50\n";
    let (fio, ours) = (logs(Who::Fio, text)?, logs(Who::Lunette, text)?);
    ensure!(fio.keys().eq(ours.keys()), "{fio:?} {ours:?}");
    for (name, lines) in &ours {
        let width = |lines: &[Vec<u64>]| lines.first().map(Vec::len);
        ensure!(width(lines) == width(&fio[name]), "{name}: {lines:?}");
        ensure!(
            name.contains("slat") == lines.is_empty(),
            "{name}: {lines:?}"
        );
    }
    Ok(())
}

#[test]
fn jobs_in_sequence_make_just_the_requests_of_fio() -> Result<()> {
    for case in [
        "rw=read\nsize=1m",
        "rw=write\nsize=256k\nbs=16k\nloops=3",
        "rw=read\noffset=25%\nsize=50%\nbs=64k",
        "rw=read\noffset=1m\nsize=512k\nio_size=640k",
        "rw=read:8k\nsize=1m",
        "rw=write:12k\nsize=256k\nbs=8k",
        "rw=read\nnumber_ios=77",
        "rw=read\nsize=256k\nnumjobs=3\noffset_increment=1m",
        "rw=read\nfilename=a:b\nsize=1m",
        "rw=read\nfilename=a:b\nsize=25%",
        "rw=write\nbs=8k,32k\nsize=512k",
        "rw=write\nbs=8k,\nsize=64k",
        "rw=read\nbs=,8k\nsize=64k",
        "rw=read\nbs=4k\nsize=64k\n[k]\nstonewall\nrw=read\noffset=64k\nsize=64k",
    ] {
        let [fio, ours] = both(case)?;
        ensure!(fio == ours, "{case}:\nfio  {fio:?}\nours {ours:?}");
    }
    Ok(())
}

fn sorted(clones: &[Vec<Request>]) -> Vec<Request> {
    let mut all: Vec<Request> = clones.iter().flatten().copied().collect();
    all.sort_unstable();
    all
}

#[test]
fn random_jobs_with_a_map_hit_the_blocks_that_fio_hits() -> Result<()> {
    for case in [
        "rw=randread",
        "rw=randwrite\nsize=1m\noffset=2m\nbs=8k",
        "rw=randread\nfilename=a:b\nsize=2m",
        "rw=randread\nsize=1m\nloops=2",
        "rw=randread\nsize=1m\nnumjobs=2",
        "rw=randread\nsize=1m\nrandseed=7",
    ] {
        let [fio, ours] = both(case)?;
        ensure!(fio.len() == ours.len(), "{case}: {} logs", ours.len());
        ensure!(sorted(&fio) == sorted(&ours), "{case}");
    }
    Ok(())
}

/// Per 1000 requests: the number of each combination of direction and size.
fn shares(clones: &[Vec<Request>]) -> BTreeMap<(bool, u64), u64> {
    let mut shares = BTreeMap::new();
    let total = clones.iter().map(Vec::len).sum::<usize>() as u64;
    for (write, size, _) in clones.iter().flatten() {
        *shares.entry((*write, *size)).or_insert(0) += 1;
    }
    shares
        .values_mut()
        .for_each(|count| *count = *count * 1000 / total);
    shares
}

#[test]
fn mixtures_and_sizes_have_the_shares_of_fio() -> Result<()> {
    for case in [
        "rw=randrw\nrwmixread=70\nio_size=32m",
        "rw=randrw\nrwmixwrite=20\nio_size=32m",
        "rw=rw\nio_size=32m",
        "rw=randread\nnorandommap\nbssplit=4k/20:8k:16k/30\nio_size=64m",
        "rw=randread\nnorandommap\nbssplit=4k/20:8k/20\nio_size=64m",
        "rw=randread\nnorandommap\nbssplit=4k:8k:16k\nio_size=64m",
        "rw=randrw\nnorandommap\nbssplit=4k/90:64k/10,8k/50:16k/50\nio_size=64m",
        "rw=randread\nnorandommap\nbsrange=4k-16k\nio_size=64m",
        "rw=randrw\nnorandommap\nbsrange=4k-8k,16k-32k\nio_size=64m",
    ] {
        let [fio, ours] = both(case)?;
        let (fio, ours) = (shares(&fio), shares(&ours));
        let keys: std::collections::BTreeSet<_> = fio.keys().chain(ours.keys()).collect();
        for key in keys {
            let of = |shares: &BTreeMap<_, u64>| shares.get(key).copied().unwrap_or(0);
            // With some thousand draws, three standard deviations are below 30 per 1000.
            ensure!(
                of(&fio).abs_diff(of(&ours)) <= 35,
                "{case}:\n{fio:?}\n{ours:?}"
            );
        }
    }
    Ok(())
}

/// Requests per 1000 that address the most popular 1, 5, 10, 25 and 50 % of all blocks.
fn popularity(clones: &[Vec<Request>]) -> [u64; 5] {
    let blocks = (FILE / 4096) as usize;
    let mut counts = vec![0u64; blocks];
    for (_, _, offset) in clones.iter().flatten() {
        counts[(offset / 4096) as usize] += 1;
    }
    counts.sort_unstable_by(|a, b| b.cmp(a));
    let total: u64 = counts.iter().sum();
    [1, 5, 10, 25, 50].map(|percent| {
        let hot = blocks * percent / 100;
        counts[..hot].iter().sum::<u64>() * 1000 / total
    })
}

#[test]
fn popular_blocks_are_as_popular_as_with_fio() -> Result<()> {
    for distribution in [
        "random",
        "zipf:0.8",
        "zipf:1.2",
        "zipf",
        "pareto:0.2",
        "pareto:0.5",
        "normal:5",
        "normal:40",
        "zoned:60/10:30/20:8/30:2/40",
        "zoned_abs:70/400k:20/1m:10/2m",
    ] {
        let case =
            format!("rw=randread\nnorandommap\nio_size=128m\nrandom_distribution={distribution}");
        let [fio, ours] = both(&case)?;
        let (fio, ours) = (popularity(&fio), popularity(&ours));
        for (one, other) in fio.iter().zip(&ours) {
            ensure!(
                one.abs_diff(*other) <= 40,
                "{distribution}: fio {fio:?}, ours {ours:?}"
            );
        }
    }
    Ok(())
}

#[test]
fn zones_are_where_fio_has_them() -> Result<()> {
    for zones in [
        "zoned:60/10:30/20:8/30:2/40",
        "zoned_abs:70/400k:20/1m:10/2m",
    ] {
        let case = format!("rw=randread\nnorandommap\nio_size=64m\nrandom_distribution={zones}");
        let tenths = |clones: &[Vec<Request>]| {
            let mut tenths = [0u64; 10];
            for (_, _, offset) in clones.iter().flatten() {
                tenths[(offset * 10 / FILE) as usize] += 1;
            }
            let total: u64 = tenths.iter().sum();
            tenths.map(|count| count * 1000 / total)
        };
        let [fio, ours] = both(&case)?;
        let (fio, ours) = (tenths(&fio), tenths(&ours));
        let near = fio.iter().zip(&ours).all(|(a, b)| a.abs_diff(*b) <= 30);
        ensure!(near, "{zones}: fio {fio:?}, ours {ours:?}");
    }
    Ok(())
}

/// A run with a time limit has no exact counts, but its rate limit can be checked.
#[test]
fn rates_apply_from_the_end_of_the_ramp() -> Result<()> {
    let case = "rw=randread\ntime_based\nruntime=1s\nramp_time=300ms\nrate_iops=500";
    for tool in [Who::Fio, Who::Lunette] {
        let clones = requests(tool, case)?;
        let count = clones[0].len();
        ensure!((1..=505).contains(&count), "{tool:?}: {count}");
    }
    Ok(())
}

/// A job file with all syntax that may surround options.
#[test]
fn includes_variables_and_comments_are_fio_s() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    std::fs::write(folder.join("a"), vec![1; 1 << 20])?;
    std::fs::write(folder.join("more.fio"), "rw=read ; in sequence\nbs=8k\n")?;
    let text = "; a comment\n# another\n[global]\nioengine=psync\nfilename=${NAME}\n\n[j]# one\ninclude more.fio\nsize=${BLOCKS}k;size=1m\n\n  [k]\nstonewall\nsize=$pagesize\n";
    let mut ios = Vec::new();
    for tool in [Who::Fio, Who::Lunette] {
        std::fs::write(folder.join("job.fio"), text)?;
        let mut command = match tool {
            Who::Fio => Command::new("fio"),
            Who::Lunette => {
                let mut command = Command::new(lunette_program(Profile::Dev)?);
                command.arg("bench");
                command
            }
        };
        let output = command
            .args(["--output-format=json", "job.fio"])
            .envs([("NAME", "a"), ("BLOCKS", "64")])
            .current_dir(folder)
            .output()?;
        let complaints = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{tool:?}: {complaints}");
        let document: Value = serde_json::from_slice(&output.stdout)?;
        let jobs = document["jobs"].as_array().context("no jobs")?.clone();
        let one = |job: &Value| {
            let name = job["jobname"].as_str().unwrap_or_default().to_owned();
            let group = job["groupid"].as_u64();
            (name, group, job["read"]["total_ios"].as_u64())
        };
        ios.push(jobs.iter().map(one).collect::<Vec<_>>());
    }
    ensure!(ios[0] == ios[1], "{ios:?}");
    ensure!(ios[1][0] == ("j".to_owned(), Some(0), Some(8)), "{ios:?}");
    Ok(())
}

/// Collects fields that are missing in our document or have another type than in fio's.
fn apart(path: &str, fio: &Value, ours: &Value, found: &mut Vec<String>) {
    let kind = |value: &Value| match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "fraction",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "list",
        Value::Object(_) => "object",
    };
    if kind(fio) != kind(ours) {
        found.push(format!("{path}: fio {}, ours {}", kind(fio), kind(ours)));
        return;
    }
    if let (Value::Object(fio), Value::Object(ours)) = (fio, ours) {
        // The set of buckets depends on the machine. At least one bucket must exist.
        let buckets = path.ends_with("/bins");
        if buckets && ours.is_empty() {
            found.push(format!("{path}: empty"));
        }
        for (key, value) in fio.iter().filter(|_| !buckets) {
            match ours.get(key) {
                Some(other) => apart(&format!("{path}/{key}"), value, other, found),
                None => found.push(format!("{path}/{key}: not in ours")),
            }
        }
    }
    if let (Value::Array(fio), Value::Array(ours)) = (fio, ours)
        && let (Some(fio), Some(ours)) = (fio.first(), ours.first())
    {
        apart(&format!("{path}/0"), fio, ours, found);
    }
}

const JOB: &str = "[global]\nioengine=psync\nfilename=a\nsize=1m\n[j]\nrw=randrw\nlat_percentiles=1\npercentile_list=50:99:99.9\nfsync=16\n[k]\nstonewall\nrw=read\n";

fn documents(format: &str) -> Result<(Scratch, [Value; 2])> {
    let scratch = Scratch::new()?;
    std::fs::write(scratch.files().join("a"), vec![1; 1 << 20])?;
    let mut documents = [Value::Null, Value::Null];
    for (tool, document) in [Who::Fio, Who::Lunette].into_iter().zip(&mut documents) {
        let text = run(tool, scratch.files(), JOB, &[format])?;
        *document = serde_json::from_str(&text)?;
    }
    Ok((scratch, documents))
}

#[test]
fn our_json_has_fio_s_keys_and_types() -> Result<()> {
    for format in ["--output-format=json", "--output-format=json+"] {
        let (_scratch, [fio, mut ours]) = documents(format)?;
        // fio lists the options of [global] separately. Its tools accept them in either place.
        ours["global options"] = fio["global options"].clone();
        let mut found = Vec::new();
        apart("", &fio, &ours, &mut found);
        ensure!(found.is_empty(), "{format}:\n{}", found.join("\n"));
        for (theirs, job) in fio["jobs"].as_array().context("no jobs")?.iter().zip(0..) {
            let ours = &ours["jobs"][job];
            for key in ["total_ios", "io_bytes", "short_ios"] {
                let sum = |of: &Value| {
                    let each = ["read", "write"].map(|d| of[d][key].as_u64().unwrap_or(0));
                    each[0] + each[1]
                };
                ensure!(sum(theirs) == sum(ours), "{job} {key}");
            }
            ensure!(theirs["groupid"] == ours["groupid"], "group of {job}");
            ensure!(theirs["jobname"] == ours["jobname"], "name of {job}");
        }
    }
    Ok(())
}

/// Runs one of fio's own tools from its Debian package. Tools in the documentation folder are compressed.
fn reader(folder: &Path, program: &str, arguments: &[&str]) -> Result<String> {
    let packed = PathBuf::from(format!("/usr/share/doc/fio/{program}.py.gz"));
    let path = if packed.exists() {
        let path = folder.join(program);
        let text = Command::new("zcat").arg(&packed).output()?.stdout;
        std::fs::write(&path, text)?;
        path
    } else {
        PathBuf::from(format!("/usr/bin/{program}"))
    };
    let output = Command::new("/usr/bin/python3")
        .arg(&path)
        .args(arguments)
        .current_dir(folder)
        .output()
        .context("cannot run python3")?;
    let error_text = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{program} {arguments:?}: {error_text}"
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn readers_of_fio_parse_our_output() -> Result<()> {
    let scratch = Scratch::new()?;
    let folder = scratch.files();
    std::fs::write(folder.join("a"), vec![1; FILE as usize])?;
    let text = "[j]\nioengine=psync\nfilename=a\nrw=randrw\nio_size=32m\nwrite_bw_log\nwrite_lat_log\nwrite_iops_log\nlog_avg_msec=5\n";
    let more = ["--output-format=json+", "--output=ours.json"];
    run(Who::Lunette, folder, text, &more)?;

    // The tool checks its own result against the histograms.
    for check in [&[][..], &["--validate"]] {
        let arguments = [&["ours.json", "ours.csv"], check].concat();
        reader(folder, "fio_jsonplus_clat2csv", &arguments)?;
    }
    let csv = std::fs::read_to_string(folder.join("ours_job0.csv"))?;
    ensure!(csv.lines().count() > 10, "{csv}");
    let column = |name: &str| {
        let mut words = csv.lines().next().unwrap_or_default().split(", ");
        words.position(|word| word == name)
    };
    let counts = column("read_clat_ns_count").context("no such column")?;
    let sum: u64 = csv
        .lines()
        .skip(1)
        .filter_map(|line| line.split(", ").nth(counts)?.parse::<u64>().ok())
        .sum();
    let document: Value =
        serde_json::from_str(&std::fs::read_to_string(folder.join("ours.json"))?)?;
    ensure!(Some(sum) == document["jobs"][0]["read"]["total_ios"].as_u64());

    // Without gnuplot the tool only writes the data to draw.
    reader(folder, "fio2gnuplot", &["-p", "j_bw*.log", "-k", "-o", "x"])?;
    let average = std::fs::read_to_string(folder.join("j_bw.average"))?;
    let mean = average.split_whitespace().last().context("it is empty")?;
    ensure!(
        mean.parse::<f64>().is_ok_and(|mean| mean > 0.0),
        "{average}"
    );
    Ok(())
}

#[test]
fn every_option_of_fio_is_honoured_or_refused_by_its_name() -> Result<()> {
    let output = Command::new("fio").arg("--cmdhelp=all").output();
    let output = output.context("cannot run fio; hint: apt-get install fio")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let words = text
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    let options: Vec<&str> = words.map(|word| word.trim_end_matches(':')).collect();
    ensure!(options.len() > 150, "{text}");
    let scratch = Scratch::new()?;
    let file = scratch.files().join("all.fio");
    let lines = options.iter().map(|option| format!("{option}=\u{1}\n"));
    std::fs::write(&file, format!("[j]\n{}", lines.collect::<String>()))?;
    let output = Command::new(lunette_program(Profile::Dev)?)
        .arg("bench")
        .arg(&file)
        .output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success(), "it ran: {errors}");
    for (option, line) in options.iter().zip(2..) {
        // Free text options accept any value.
        if ["name", "description", "filename"].contains(option) || option.ends_with("_log") {
            continue;
        }
        let place = format!("all.fio:{line}: {option}: ");
        let reported = errors.lines().find(|reported| reported.contains(&place));
        let reported =
            reported.with_context(|| format!("{option} was taken as it is:\n{errors}"))?;
        ensure!(!reported.contains("unknown option"), "{reported}");
    }
    Ok(())
}

#[test]
fn the_job_files_of_contrib_are_fio_s_too() -> Result<()> {
    let folder = vm::workspace().join("contrib/jobs");
    let mut seen = 0;
    for entry in std::fs::read_dir(&folder)? {
        let text = std::fs::read_to_string(entry?.path())?;
        let scratch = Scratch::new()?;
        run(Who::Fio, scratch.files(), &text, &["--parse-only"])?;
        seen += 1;
    }
    ensure!(seen >= 2, "{seen} job files in {}", folder.display());
    Ok(())
}

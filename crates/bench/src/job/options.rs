//! Options by name. Each is applied, or refused with a reason.

use std::time::Duration;

use super::value::{
    amount, bytes, cpus, duration, filenames, fixed_sizes, number, size_ranges, size_splits, switch,
};
use super::{Amount, Checksum, Distribution, Job, Pattern, REFUSED, Rate, Trims, Verify, Zone};

/// Supported options.
pub const HONOURED: &[&str] = &[
    "allrandrepeat",
    "blocksize",
    "blocksize_range",
    "bs",
    "bsrange",
    "bssplit",
    "buffered",
    "clat_percentiles",
    "cpus_allowed",
    "cpus_allowed_policy",
    "description",
    "direct",
    "do_verify",
    "end_fsync",
    "fdatasync",
    "filename",
    "fsync",
    "group_reporting",
    "io_size",
    "iodepth",
    "ioengine",
    "lat_percentiles",
    "log_avg_msec",
    "log_offset",
    "loops",
    "name",
    "norandommap",
    "number_ios",
    "numjobs",
    "offset",
    "offset_increment",
    "per_job_logs",
    "percentile_list",
    "ramp_time",
    "random_distribution",
    "randrepeat",
    "randseed",
    "rate_iops",
    "readwrite",
    "runtime",
    "rw",
    "rw_sequencer",
    "rwmixread",
    "rwmixwrite",
    "size",
    "stonewall",
    "thread",
    "time_based",
    "verify",
    "verify_fatal",
    "wait_for_previous",
    "write_bw_log",
    "write_iops_log",
    "write_lat_log",
    "zero_buffers",
];

/// Maximum number of requests in flight per clone: the largest ring of any device here.
const IODEPTH_MAX: u16 = 1024;
const NUMJOBS_MAX: u16 = 4096;
const LOGS: [&str; 3] = ["write_bw_log", "write_lat_log", "write_iops_log"];
const RANDOM_WORDS: &str = "read, write, randread, randwrite, rw, readwrite, randrw, trim, randtrim, trimwrite, randtrimwrite";

/// Applies one option.
pub fn apply(job: &mut Job, option: &str, value: Option<&str>) -> Result<(), String> {
    set(job, option, value)?;
    let given = (option.to_owned(), value.unwrap_or("1").to_owned());
    job.given.push(given);
    Ok(())
}

fn set(job: &mut Job, option: &str, value: Option<&str>) -> Result<(), String> {
    if let Some(done) = switches(job, option, value) {
        return done;
    }
    if !HONOURED.contains(&option) {
        return Err(refusal(option));
    }
    let text = value.unwrap_or_default();
    // A log without a name is named after its job.
    if text.is_empty() && !LOGS.contains(&option) {
        return Err("needs a value".to_owned());
    }
    valued(job, option, text)
}

/// Returns the reason why an option is refused.
fn refusal(option: &str) -> String {
    if REFUSED.contains(&option) {
        return "an unsupported option of fio".to_owned();
    }
    let near = HONOURED
        .iter()
        .map(|known| (strsim::damerau_levenshtein(known, option), known))
        .min()
        .filter(|(distance, _)| *distance <= 2);
    match near {
        Some((_, known)) => format!("unknown option; did you mean {known}?"),
        None => "unknown option".to_owned(),
    }
}

/// Applies an option that may have no value.
fn switches(job: &mut Job, option: &str, value: Option<&str>) -> Option<Result<(), String>> {
    let set = |to: &mut bool| switch(value).map(|on| *to = on);
    Some(match option {
        "time_based" => set(&mut job.time_based),
        "norandommap" => set(&mut job.no_random_map),
        "stonewall" | "wait_for_previous" => set(&mut job.stonewall),
        "group_reporting" => match switch(value) {
            Ok(true) => Ok(()),
            Ok(false) => Err("not supported, because clones of a job are always reported together; hint: group_reporting=1".to_owned()),
            Err(error) => Err(error),
        },
        "end_fsync" => set(&mut job.flush_at_end),
        "zero_buffers" => set(&mut job.zero_buffers),
        "direct" => switch(value).map(|on| job.direct = Some(on)),
        "buffered" => switch(value).map(|on| job.direct = Some(!on)),
        "log_offset" => set(&mut job.logs.offset),
        "clat_percentiles" => set(&mut job.clat_percentiles),
        "lat_percentiles" => set(&mut job.lat_percentiles),
        "per_job_logs" => match switch(value) {
            Ok(true) => Ok(()),
            Ok(false) => Err("not supported, because each clone of a job has its own log files; hint: per_job_logs=1".to_owned()),
            Err(error) => Err(error),
        },
        // Clones are always threads.
        "thread" => match switch(value) {
            Ok(true) => Ok(()),
            Ok(false) => Err("not supported, because clones are always threads; hint: thread=1".to_owned()),
            Err(error) => Err(error),
        },
        "randrepeat" | "allrandrepeat" => match switch(value) {
            Ok(true) => Ok(()),
            Ok(false) => {
                let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
                job.seed = now.map_or(0, |time| time.as_nanos() as u64);
                Ok(())
            }
            Err(error) => Err(error),
        },
        "do_verify" => switch(value).map(|on| verify(job).read_back = on),
        "verify_fatal" => switch(value).map(|on| verify(job).fatal = on),
        _ => return None,
    })
}

/// Returns the job's verification, initialized with fio's defaults.
fn verify(job: &mut Job) -> &mut Verify {
    job.verify.get_or_insert(Verify {
        checksum: Checksum::Crc32c,
        read_back: true,
        fatal: false,
    })
}

fn valued(job: &mut Job, option: &str, text: &str) -> Result<(), String> {
    const SECOND: Duration = Duration::from_secs(1);
    match option {
        "name" => job.name = text.to_owned(),
        "description" => job.description = text.to_owned(),
        "filename" => job.filenames = filenames(text),
        "rw" | "readwrite" => order(job, text)?,
        "rw_sequencer" if text == "sequential" => {}
        "rw_sequencer" => {
            return Err(format!("`{text}` is not supported; use sequential"));
        }
        "number_ios" => job.ios_max = Some(number(text, 1, u64::MAX)?),
        "rwmixread" => {
            job.mix_read = Some(number(text, 0, 100)?);
            mix(job);
        }
        "rwmixwrite" => {
            job.mix_write = Some(number(text, 0, 100)?);
            mix(job);
        }
        "bs" | "blocksize" => fixed_sizes(text, &mut job.sizes)?,
        "bsrange" | "blocksize_range" => size_ranges(text, &mut job.sizes)?,
        "bssplit" => size_splits(text, &mut job.sizes)?,
        "iodepth" => job.iodepth = number(text, 1, IODEPTH_MAX)?,
        "numjobs" => job.numjobs = number(text, 1, NUMJOBS_MAX)?,
        "size" => job.size = Some(amount(text)?),
        "io_size" => job.io_size = Some(amount(text)?),
        "offset" => job.offset = amount(text)?,
        "offset_increment" => job.offset_increment = amount(text)?,
        "loops" => job.loops = number(text, 1, u32::MAX)?,
        "runtime" => job.runtime = Some(duration(text, SECOND)?),
        "ramp_time" => job.ramp_time = duration(text, SECOND)?,
        "rate_iops" => job.rate = Some(rate(text)?),
        "random_distribution" => job.distribution = distribution(text)?,
        "randseed" => job.seed = number(text, 0, u64::MAX)?,
        "verify" => verify(job).checksum = checksum(text)?,
        "fsync" | "fdatasync" => {
            let every = number(text, 0, u32::MAX)?;
            job.flush_every = (every > 0).then_some(every);
        }
        "ioengine" => job.engine = Some(engine(text)?),
        "cpus_allowed" => job.cpus = cpus(text)?,
        "cpus_allowed_policy" if text == "split" => {}
        "cpus_allowed_policy" => {
            return Err(format!(
                "`{text}` is not supported: each clone takes one CPU (split)"
            ));
        }
        "write_bw_log" => job.logs.bandwidth = Some(text.to_owned()),
        "write_lat_log" => job.logs.latency = Some(text.to_owned()),
        "write_iops_log" => job.logs.iops = Some(text.to_owned()),
        "log_avg_msec" => {
            let millis = number(text, 0, 86_400_000)?;
            job.logs.average = (millis > 0).then_some(Duration::from_millis(millis));
        }
        "percentile_list" => job.percentiles = percentiles(text)?,
        other => return Err(refusal(other)),
    }
    Ok(())
}

/// Parses `rw` with an optional part after a colon: number of sequential requests per random offset, or bytes skipped between two
/// sequential requests.
fn order(job: &mut Job, text: &str) -> Result<(), String> {
    let (word, more) = match text.split_once(':') {
        Some((word, more)) => (word, Some(more)),
        None => (text, None),
    };
    let pattern = pattern(job, word)?;
    (job.burst, job.skip) = (1, 0);
    match more {
        Some(more) if pattern.random => job.burst = number(more, 1, u32::MAX)?,
        Some(more) => job.skip = bytes(more)?,
        None => {}
    }
    job.pattern = pattern;
    Ok(())
}

fn pattern(job: &Job, text: &str) -> Result<Pattern, String> {
    let mixed = job
        .mix_read
        .or(job.mix_write.map(|write| 100 - write))
        .unwrap_or(50);
    Ok(match text {
        "read" => Pattern::new(false, 100),
        "write" => Pattern::new(false, 0),
        "randread" => Pattern::new(true, 100),
        "randwrite" => Pattern::new(true, 0),
        "rw" | "readwrite" => Pattern::new(false, mixed),
        "randrw" => Pattern::new(true, mixed),
        "trim" => Pattern::trimming(false, Trims::Only),
        "randtrim" => Pattern::trimming(true, Trims::Only),
        "trimwrite" => Pattern::trimming(false, Trims::ThenWrite),
        "randtrimwrite" => Pattern::trimming(true, Trims::ThenWrite),
        _ => return Err(format!("`{text}` is not one of {RANDOM_WORDS}")),
    })
}

/// Applies the mixture if the pattern has both directions.
fn mix(job: &mut Job) {
    if job.pattern.reads() && job.pattern.writes() {
        let read = job.mix_read.or(job.mix_write.map(|write| 100 - write));
        job.pattern.read_percent = read.unwrap_or(50);
    }
}

fn rate(text: &str) -> Result<Rate, String> {
    let parts: Vec<&str> = text.split(',').collect();
    let one = |part: &str| match part {
        "" => Ok(0),
        part => {
            let rate = bytes(part).map_err(|_| format!("`{part}` is not a rate"))?;
            u32::try_from(rate).map_err(|_| format!("`{part}` is more than {}", u32::MAX))
        }
    };
    match parts[..] {
        [both] => one(both).map(|rate| Rate {
            read: rate,
            write: rate,
            trim: rate,
        }),
        [read, write] => Ok(Rate {
            read: one(read)?,
            write: one(write)?,
            trim: one(write)?,
        }),
        [read, write, trim] => Ok(Rate {
            read: one(read)?,
            write: one(write)?,
            trim: one(trim)?,
        }),
        _ => Err(format!("`{text}` has more than three parts")),
    }
}

fn distribution(text: &str) -> Result<Distribution, String> {
    if text.contains(',') {
        return Err("different distributions for reads and writes are not supported".to_owned());
    }
    let (word, parameter) = text.split_once(':').unwrap_or((text, ""));
    let parameter_of = |default: f64, low: f64, high: f64| {
        if parameter.contains(':') {
            return Err(format!("the centre in `{parameter}` is not supported"));
        }
        if parameter.is_empty() {
            return Ok(default);
        }
        match parameter.parse::<f64>() {
            Ok(value) if value > low && value < high => Ok(value),
            _ => Err(format!(
                "`{parameter}` is not a number between {low} and {high}"
            )),
        }
    };
    match word {
        "random" if parameter.is_empty() => Ok(Distribution::Uniform),
        "zipf" => match parameter_of(1.1, 0.0, 10.0)? {
            1.0 => Err("zipf does not allow a theta of 1".to_owned()),
            theta => Ok(Distribution::Zipf(theta)),
        },
        "pareto" => parameter_of(0.2, 0.0, 1.0).map(Distribution::Pareto),
        "normal" => parameter_of(20.0, 0.0, 100.001).map(Distribution::Normal),
        "zoned" => zones(parameter, |size| match number(size, 0, 100)? {
            0 => Err("a zone has 1 to 100 % of the disk".to_owned()),
            percent => Ok(Amount::Percent(percent)),
        }),
        "zoned_abs" => zones(parameter, |size| bytes(size).map(Amount::Bytes)),
        _ => Err(format!(
            "`{text}` is not one of random, zipf:THETA, pareto:POWER, normal:DEVIATION, zoned:ACCESS/SIZE:..."
        )),
    }
}

/// Parses `60/10:30/20:10/70`: percentages of requests and of the disk.
fn zones(
    text: &str,
    extent: impl Fn(&str) -> Result<Amount, String>,
) -> Result<Distribution, String> {
    let mut zones: Vec<Zone> = Vec::new();
    for part in text.split(':') {
        let (access, size) = part
            .split_once('/')
            .ok_or_else(|| format!("`{part}` is not a zone such as 60/10"))?;
        zones.push(Zone {
            access: number(access, 1, 100)?,
            extent: extent(size)?,
        });
    }
    let access: u32 = zones.iter().map(|zone| u32::from(zone.access)).sum();
    if access != 100 {
        return Err(format!("the zones get {access} % of the requests"));
    }
    let percent = |zone: &Zone| match zone.extent {
        Amount::Percent(percent) => u32::from(percent),
        Amount::Bytes(_) => 0,
    };
    let sizes: u32 = zones.iter().map(percent).sum();
    if sizes > 100 {
        return Err(format!("the zones have {sizes} % of the disk"));
    }
    Ok(Distribution::Zoned(zones))
}

fn checksum(text: &str) -> Result<Checksum, String> {
    let found = Checksum::WORDS.iter().find(|(word, _)| *word == text);
    found.map(|(_, checksum)| *checksum).ok_or_else(|| {
        let words: Vec<&str> = Checksum::WORDS.iter().map(|(word, _)| *word).collect();
        format!(
            "`{text}` is not supported; supported are {}",
            words.join(", ")
        )
    })
}

/// Accepts engines that behave like the driver: requests are started together and waited for together.
fn engine(text: &str) -> Result<String, String> {
    const ENGINES: [&str; 3] = ["libaio", "io_uring", "posixaio"];
    const SYNCHRONOUS: [&str; 5] = ["sync", "psync", "vsync", "pvsync", "pvsync2"];
    if ENGINES.contains(&text) || SYNCHRONOUS.contains(&text) {
        return Ok(text.to_owned());
    }
    Err(format!(
        "`{text}` is not supported; supported are {} and {}, through the subject's own driver",
        ENGINES.join(", "),
        SYNCHRONOUS.join(", ")
    ))
}

fn percentiles(text: &str) -> Result<Vec<f64>, String> {
    let mut list = Vec::new();
    for part in text.split(':') {
        match part.parse::<f64>() {
            Ok(value) if (0.0..=100.0).contains(&value) => list.push(value),
            _ => return Err(format!("`{part}` is not a percentage")),
        }
    }
    if list.len() > 20 {
        return Err("more than 20 percentiles; at most 20 are allowed".to_owned());
    }
    list.sort_by(f64::total_cmp);
    Ok(list)
}

/// Checks the complete job. Returns the option at fault and the reason.
pub fn check(job: &Job) -> Result<(), (&'static str, String)> {
    if let (Some(read), Some(write)) = (job.mix_read, job.mix_write)
        && u16::from(read) + u16::from(write) != 100
    {
        let message = format!("{write} and rwmixread={read} do not add up to 100");
        return Err(("rwmixwrite", message));
    }
    if job.time_based && job.runtime.is_none_or(|time| time.is_zero()) {
        return Err(("time_based", "needs a runtime".to_owned()));
    }
    if !job.skip.is_multiple_of(512) {
        let message = format!("{} bytes left out are not a multiple of 512", job.skip);
        return Err(("rw", message));
    }
    for size in job.sizes.iter().flat_map(|sizes| sizes.named()) {
        if size % 512 != 0 {
            return Err(("bs", format!("{size} bytes are not a multiple of 512")));
        }
    }
    if job.verify.is_some() && job.zero_buffers {
        let message = "verified blocks cannot be zeroes".to_owned();
        return Err(("zero_buffers", message));
    }
    if job.verify.is_some() && job.distribution != Distribution::Uniform && job.loops > 1 {
        let message = "verify needs a random map".to_owned();
        return Err(("loops", message));
    }
    let apart = job.offset_increment != Amount::Bytes(0);
    if job.verify.is_some() && job.pattern.writes() && job.numjobs > 1 && !apart {
        let message =
            "clones that write the same blocks cannot be verified; give them an offset_increment";
        return Err(("numjobs", message.to_owned()));
    }
    if job.verify.is_some() && job.pattern.trims() {
        let message = "discards cannot be verified".to_owned();
        return Err(("verify", message));
    }
    let synchronous = job
        .engine
        .as_deref()
        .is_some_and(|e| e.ends_with("sync") || e == "pvsync2");
    if synchronous && job.iodepth > 1 {
        let message = format!("{} with a synchronous ioengine: it would be 1", job.iodepth);
        return Err(("iodepth", message));
    }
    Ok(())
}

//! `guest-bench profile`: samples the functions that CPUs execute with the kernel's clock (`perf_event_open(2)`). Output: folded stacks.
//!
//! In a guest all CPUs are sampled, without this program; on the host only given processes. Only the kernel has complete stacks. For a
//! program only the function is known, because programs are built without frame pointers.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use perf_event::events::Software;
use perf_event::{Builder, SampleFlag, Sampler};
use serde_json::json;
use signal_hook::consts::SIGINT;

use crate::symbols::{Kernel, Programs};

/// Size of a sample ring in bytes: several seconds of samples.
const RING_BYTES: usize = 4 << 20;
const PAUSE: Duration = Duration::from_millis(20);

/// Samples until SIGINT, but at most for a time, and prints a JSON object: stacks with counts, `comm;outermost;...;innermost`.
pub fn run(words: &[String]) -> Result<()> {
    let stopped = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGINT, Arc::clone(&stopped))?;
    let [time, hertz, pids @ ..] = words else {
        anyhow::bail!("usage: guest-bench profile MILLISECONDS HERTZ [PID...]");
    };
    let time = Duration::from_millis(time.parse().context("MILLISECONDS is not a number")?);
    let hertz: u64 = hertz.parse().context("HERTZ is not a number")?;
    ensure!((1..=10_000).contains(&hertz), "HERTZ: 1 to 10000");
    let pids: Vec<i32> = pids
        .iter()
        .map(|pid| pid.parse().context("PID is not a number"))
        .collect::<Result<_>>()?;
    let (mut samplers, has_kernel) = open(&pids, hertz)?;
    // Reading kernel symbols takes a while and must not be sampled.
    let mut samples = Samples::new(pids.is_empty().then(std::process::id));
    for sampler in &mut samplers {
        sampler.enable().context("cannot start sampling")?;
    }
    wait_until(Instant::now() + time, &stopped, || {
        samplers
            .iter_mut()
            .for_each(|sampler| samples.take(sampler));
    });
    for sampler in &mut samplers {
        sampler.disable().context("cannot stop sampling")?;
        samples.take(sampler);
    }
    let document = json!({"hertz": hertz, "has_kernel": has_kernel, "has_symbols": samples.kernel.has_symbols(),
        "idle": samples.idle, "lost": samples.lost, "stacks": samples.stacks});
    writeln!(std::io::stdout(), "{document}").context("cannot write the profile")
}

/// Calls `take` repeatedly until a time, or until the flag is set.
fn wait_until(end: Instant, stopped: &AtomicBool, mut take: impl FnMut()) {
    while Instant::now() < end && !stopped.load(Ordering::Relaxed) {
        std::thread::sleep(PAUSE.min(end.saturating_duration_since(Instant::now())));
        take();
    }
}

/// Opens a sampler per CPU, or per thread of the given processes. Returns them, and whether kernel samples are permitted.
fn open(pids: &[i32], hertz: u64) -> Result<(Vec<Sampler>, bool)> {
    match open_with(pids, hertz, true) {
        Ok(samplers) => Ok((samplers, true)),
        // Other users than root may sample their own programs (kernel.perf_event_paranoid).
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied && !pids.is_empty() => {
            let samplers = open_with(pids, hertz, false).context("perf_event_open")?;
            Ok((samplers, false))
        }
        Err(error) => Err(error)
            .context("perf_event_open; hint: sysctl kernel.perf_event_paranoid=1, or root"),
    }
}

fn open_with(pids: &[i32], hertz: u64, kernel: bool) -> std::io::Result<Vec<Sampler>> {
    let mut samplers = Vec::new();
    let mut add = |aim: &dyn Fn(&mut Builder<'_>)| -> std::io::Result<()> {
        let mut builder = Builder::new(Software::CPU_CLOCK);
        builder
            .sample_frequency(hertz)
            .sample(SampleFlag::IP | SampleFlag::TID | SampleFlag::CALLCHAIN)
            .exclude_kernel(!kernel)
            .exclude_hv(true);
        aim(&mut builder);
        samplers.push(builder.build()?.sampled(RING_BYTES)?);
        Ok(())
    };
    if pids.is_empty() {
        for cpu in online()? {
            add(&|builder| {
                builder.any_pid().one_cpu(cpu);
            })?;
        }
    }
    for pid in pids {
        for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
            let Some(thread) = thread?.file_name().to_string_lossy().parse().ok() else {
                continue;
            };
            match add(&|builder| {
                builder.observe_pid(thread).any_cpu();
            }) {
                // The thread has just ended.
                Err(error) if error.raw_os_error() == Some(ESRCH) => {}
                added => added?,
            }
        }
    }
    Ok(samplers)
}

const ESRCH: i32 = 3;

/// Returns the online CPUs, from text such as `0-3,8`.
fn online() -> std::io::Result<Vec<usize>> {
    let text = fs::read_to_string("/sys/devices/system/cpu/online")?;
    let number = |word: &str| word.trim().parse::<usize>().ok();
    let ranges = text
        .split(',')
        .filter_map(|range| match range.split_once('-') {
            Some((first, last)) => Some(number(first)?..=number(last)?),
            None => number(range).map(|only| only..=only),
        });
    Ok(ranges.flatten().collect())
}

struct Samples {
    kernel: Kernel,
    programs: Programs,
    names: HashMap<u32, String>,
    stacks: BTreeMap<String, u64>,
    idle: u64,
    lost: u64,
    /// Process to exclude.
    left_out: Option<u32>,
}

impl Samples {
    fn new(left_out: Option<u32>) -> Samples {
        Samples {
            kernel: Kernel::read(),
            programs: Programs::default(),
            names: HashMap::new(),
            stacks: BTreeMap::new(),
            idle: 0,
            lost: 0,
            left_out,
        }
    }

    /// Reads all records of a ring.
    fn take(&mut self, sampler: &mut Sampler) {
        use perf_event::data::Record;
        while let Some(record) = sampler.next_record() {
            match record.parse_record() {
                Ok(Record::Sample(sample)) => {
                    let (ip, pid) = (sample.ip().unwrap_or(0), sample.pid().unwrap_or(0));
                    let tid = sample.tid().unwrap_or(pid);
                    if pid == 0 {
                        self.idle += 1;
                        continue;
                    }
                    if Some(pid) == self.left_out {
                        continue;
                    }
                    let chain = sample.callchain().unwrap_or(&[]).to_vec();
                    self.add(pid, tid, ip, &chain);
                }
                Ok(Record::Lost(lost)) => self.lost += lost.lost,
                // An invalid sample counts as lost.
                Err(_) => self.lost += 1,
                Ok(_) => {}
            }
        }
    }

    fn add(&mut self, pid: u32, tid: u32, ip: u64, chain: &[u64]) {
        let name = self.names.entry(tid).or_insert_with(|| {
            let name = fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm"));
            let name = name.unwrap_or_else(|_| format!("process {pid}"));
            name.trim().replace([';', ' '], "_")
        });
        let mut stack = name.clone();
        if is_kernel(ip) {
            let mut frames: Vec<&str> = Vec::new();
            for address in chain.iter().rev().filter(|address| is_address(**address)) {
                frames.push(self.kernel.function(*address));
            }
            if frames.is_empty() {
                frames.push(self.kernel.function(ip));
            }
            for frame in frames {
                stack.push(';');
                stack.push_str(frame);
            }
        } else {
            stack.push(';');
            stack.push_str(&self.programs.function(pid, ip));
        }
        *self.stacks.entry(stack).or_insert(0) += 1;
    }
}

/// Kernel addresses are in the upper half.
fn is_kernel(address: u64) -> bool {
    address >> 63 == 1
}

/// Returns true for a kernel address, false for a context marker (PERF_CONTEXT_MAX).
fn is_address(address: u64) -> bool {
    is_kernel(address) && address < u64::MAX - 4095
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_of_a_call_chain_are_no_addresses() {
        // PERF_CONTEXT_KERNEL and PERF_CONTEXT_USER of linux/perf_event.h.
        assert!(!is_address((-128_i64) as u64) && !is_address((-512_i64) as u64));
        assert!(is_address(0xffff_ffff_8100_0000) && !is_address(0x5555_0000_0000));
    }

    #[test]
    fn samples_end_at_the_flag_or_at_the_time() {
        let stopped = AtomicBool::new(false);
        let mut taken = 0;
        wait_until(Instant::now() + Duration::from_secs(3600), &stopped, || {
            taken += 1;
            stopped.store(taken == 2, Ordering::Relaxed);
        });
        assert_eq!(taken, 2);
        wait_until(Instant::now() + PAUSE, &AtomicBool::new(false), || {
            taken += 1
        });
        assert!(taken > 2);
    }

    #[test]
    fn this_process_is_sampled_while_it_works() {
        let pid = std::process::id() as i32;
        let opened = open(&[pid], 1000);
        let hint = "hint: sysctl kernel.perf_event_paranoid=2, and a container that allows perf_event_open";
        let (mut samplers, _) = opened.unwrap_or_else(|error| panic!("{error:#}; {hint}"));
        samplers
            .iter_mut()
            .for_each(|sampler| sampler.enable().unwrap());
        let begin = Instant::now();
        let mut sum = 0_u64;
        while begin.elapsed() < Duration::from_millis(300) {
            // Most of the time must be in this program, not in the system's clock functions.
            for _ in 0..10_000 {
                sum = std::hint::black_box(sum.wrapping_mul(31).wrapping_add(1));
            }
        }
        samplers
            .iter_mut()
            .for_each(|sampler| sampler.disable().unwrap());
        let mut samples = Samples::new(None);
        samplers
            .iter_mut()
            .for_each(|sampler| samples.take(sampler));
        let is_here = |stack: &str| stack.contains(";guest_bench");
        let here = samples.stacks.iter().filter(|(stack, _)| is_here(stack));
        let count: u64 = here.map(|(_, count)| count).sum();
        assert!(count > 50 && samples.lost == 0, "{:?}", samples.stacks);
    }
}

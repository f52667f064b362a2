//! One phase: concurrent jobs on driver threads, with a watching thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use latency::Clock;

use super::machine::{CpuSnapshot, CpuUsage, cpu_of, pin};
use super::{JobResult, Plan, Progress};
use crate::drive::{Shared, Stream, ThreadResult, ThreadWork, Window};
use crate::driver::{
    Demand, DriverOptions, Kind, PendingQueue, Session, Subject, Waker, prepare_file,
};
use crate::job::{Amount, Job};
use crate::workload::{Extent, Generator};

/// Jobs that run at the same time.
pub struct Phase {
    jobs: Vec<Arc<Job>>,
}

/// Splits the jobs into phases.
pub fn phases(jobs: &[Job]) -> Vec<Phase> {
    let mut phases: Vec<Phase> = Vec::new();
    for job in jobs {
        match phases.last_mut() {
            Some(phase) if !job.stonewall => phase.jobs.push(Arc::new(job.clone())),
            _ => phases.push(Phase {
                jobs: vec![Arc::new(job.clone())],
            }),
        }
    }
    phases
}

/// Sums over the phases of a repetition.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Requests, including those that are not counted.
    pub ios: u64,
    /// Kicks in the measured time.
    pub kicks: u64,
    /// Interrupts in the measured time.
    pub interrupts: u64,
    /// CPU time of the devices, if known.
    pub device_cpu_ns: Option<u64>,
    /// CPU time of the driver's threads.
    pub driver_cpu_ns: u64,
    /// CPU time of other processes.
    pub foreign_ns: u64,
    /// Time taken by the hypervisor.
    pub stolen_ns: u64,
    /// Elapsed time.
    pub elapsed: Duration,
}

impl Totals {
    fn add(&mut self, spent: &CpuUsage, crews: &[ThreadResult]) {
        self.elapsed += spent.elapsed;
        self.foreign_ns += spent.foreign_ns;
        self.stolen_ns += spent.stolen_ns;
        if let Some(device_ns) = spent.device_ns {
            *self.device_cpu_ns.get_or_insert(0) += device_ns;
        }
        for crew in crews {
            self.kicks += crew.kicks;
            self.interrupts += crew.interrupts;
            self.driver_cpu_ns += crew.cpu_ns;
        }
    }
}

/// Plan of one thread: devices, streams and duration.
struct ThreadPlan {
    seeds: Vec<PendingQueue>,
    streams: Vec<Stream>,
    window: Window,
    cpu: Option<usize>,
    polling: bool,
}

/// Open sessions of a phase.
#[derive(Default)]
struct Open {
    /// Known process IDs of the devices.
    pids: Vec<u32>,
    /// Sessions, which must outlive their queues.
    sessions: Vec<(String, Session)>,
}

/// Jobs with the same targets and duration, which may share threads.
struct Group {
    targets: Vec<Subject>,
    window: Window,
    cpus: Vec<usize>,
    direct: Option<bool>,
    /// Job index in the phase and clone number.
    clones: Vec<(usize, u32)>,
}

const GLANCE: Duration = Duration::from_millis(50);
/// Polling interval shortly before the end.
const ENDING: Duration = Duration::from_millis(1);

impl Phase {
    fn groups(&self, plan: &Plan, subject: Option<&Subject>) -> Result<Vec<Group>> {
        let mut groups: Vec<Group> = Vec::new();
        for (job, index) in self.jobs.iter().zip(0..) {
            let targets = targets(job, subject)?;
            let window = Window {
                // A job that ends by its byte count is measured from its first request.
                ramp: if job.time_based {
                    job.ramp_time.max(plan.warm_up)
                } else {
                    job.ramp_time
                },
                runtime: job.runtime,
            };
            let cpus = if job.cpus.is_empty() {
                plan.cpus.clone()
            } else {
                job.cpus.clone()
            };
            let clones = (0..u32::from(job.numjobs)).map(|clone| (index, clone));
            let same = groups.iter_mut().find(|group| {
                group.targets == targets
                    && (group.window.ramp, group.window.runtime) == (window.ramp, window.runtime)
                    && group.cpus == cpus
                    && group.direct == job.direct
            });
            match same {
                Some(group) => group.clones.extend(clones),
                None => groups.push(Group {
                    targets,
                    window,
                    cpus,
                    direct: job.direct,
                    clones: clones.collect(),
                }),
            }
        }
        Ok(groups)
    }

    /// Opens the group's sessions and distributes its clones over threads.
    fn threads(
        &self,
        plan: &Plan,
        group: &Group,
        clock: &Clock,
        interrupted: &AtomicBool,
        open: &mut Open,
    ) -> Result<Vec<ThreadPlan>> {
        let (driver, whole) = self.demand(plan, group);
        let mut sessions = self.sessions(group, &driver, whole, interrupted, open)?;
        let room = sessions.iter().map(|session| session.info().queues).min();
        let room = usize::from(
            room.unwrap_or(1)
                .min(plan.driver.queues.unwrap_or(u16::MAX)),
        );
        let count = room.min(group.clones.len()).max(1);
        let mut threads = Vec::new();
        for thread in 0..count {
            let mine = || group.clones.iter().skip(thread).step_by(count);
            let slots: u32 = mine()
                .map(|(job, _)| u32::from(self.jobs[*job].iodepth))
                .sum();
            let demand = Demand {
                slots: u16::try_from(slots)
                    .map_err(|_| anyhow!("{slots} requests in flight on one queue"))?,
                ..whole
            };
            let streams = mine()
                .map(|(job, clone)| self.stream(*job, *clone, group, &sessions, clock))
                .collect::<Result<Vec<_>>>()?;
            let seeds = sessions
                .iter_mut()
                .zip(&group.targets)
                .map(|(session, target)| {
                    session
                        .queue(&driver, demand)
                        .with_context(|| target.name.clone())
                });
            threads.push(ThreadPlan {
                seeds: seeds.collect::<Result<_>>()?,
                streams,
                polling: driver.polling,
                window: group.window,
                cpu: (!group.cpus.is_empty()).then(|| group.cpus[thread % group.cpus.len()]),
            });
        }
        let names = group.targets.iter().map(|target| target.name.clone());
        open.sessions.extend(names.zip(sessions));
        Ok(threads)
    }

    /// Returns the driver options, and the combined demand of all jobs per device.
    fn demand(&self, plan: &Plan, group: &Group) -> (DriverOptions, Demand) {
        let jobs = || group.clones.iter().map(|(job, _)| &self.jobs[*job]);
        let whole = Demand {
            slots: jobs().map(|job| job.iodepth).max().unwrap_or(1),
            largest: jobs().map(|job| job.largest()).max().unwrap_or(512),
            zeroes: jobs().all(|job| job.zero_buffers),
        };
        let all_files = group.targets.iter().all(|target| target.kind == Kind::File);
        let driver = DriverOptions {
            // A thread with one device waits for it; with several it polls.
            polling: group.targets.len() > 1
                || if all_files {
                    plan.driver.poll_files
                } else {
                    plan.driver.polling
                },
            ..plan.driver.clone()
        };
        (driver, whole)
    }

    /// Opens a session with each target of the group.
    fn sessions(
        &self,
        group: &Group,
        driver: &DriverOptions,
        whole: Demand,
        interrupted: &AtomicBool,
        open: &mut Open,
    ) -> Result<Vec<Session>> {
        let jobs = || group.clones.iter().map(|(job, _)| &self.jobs[*job]);
        let mut sessions = Vec::new();
        for target in &group.targets {
            if let (Kind::File, Some(Amount::Bytes(size))) =
                (target.kind, jobs().find_map(|job| job.size))
            {
                let size = size / group.targets.len().max(1) as u64;
                prepare_file(&target.path, size, interrupted)?;
            }
            let count = group.clones.len();
            let session = Session::open(target, driver, whole, count, group.direct)?;
            let info = session.info();
            ensure!(
                !info.read_only || jobs().all(|job| !job.pattern.writes() && !job.pattern.trims()),
                "{} is read-only",
                target.name
            );
            let trims = jobs().filter(|job| job.pattern.trims());
            if let Some(longest) = trims.map(|job| job.longest()).max() {
                ensure!(
                    info.discard_max >= u64::from(longest),
                    "{} accepts discards of up to {} bytes, but a job needs {longest}; hint: use a smaller bs, or a disk that discards",
                    target.name,
                    info.discard_max
                );
            }
            let exists = |pid: &u32| cpu_of(*pid).is_some();
            if let Some(pid) = target.pid {
                ensure!(exists(&pid), "{}: no process {pid}", target.name);
            }
            open.pids
                .extend(target.pid.or(session.pid().filter(exists)));
            sessions.push(session);
        }
        Ok(sessions)
    }

    /// Creates the stream of one clone of a job, on all targets of the group.
    fn stream(
        &self,
        job: usize,
        clone: u32,
        group: &Group,
        sessions: &[Session],
        clock: &Clock,
    ) -> Result<Stream> {
        let generators = sessions
            .iter()
            .zip(&group.targets)
            .map(|(session, target)| {
                let info = session.info();
                let disk = Extent {
                    capacity: info.capacity,
                    block_size: info.block_size,
                    shared_by: group.targets.len() as u64,
                    cuts: !target.path.is_file(),
                };
                Generator::new(&self.jobs[job], clone, disk)
                    .with_context(|| format!("job {} on {}", self.jobs[job].name, target.name))
            });
        let generators = generators.collect::<Result<Vec<_>>>()?;
        let job_of = self.jobs[job].clone();
        Ok(Stream::new(job_of, job, clone, generators, clock))
    }

    /// Runs the phase until it ends or is interrupted.
    #[allow(
        clippy::too_many_arguments,
        reason = "one caller, and the arguments are unrelated"
    )]
    pub fn run(
        &self,
        plan: &Plan,
        subject: Option<&Subject>,
        number: usize,
        clock: &Clock,
        interrupted: &Arc<AtomicBool>,
        progress: &Progress,
        title: &str,
        totals: &mut Totals,
    ) -> Result<Vec<JobResult>> {
        let mut threads = Vec::new();
        let mut open = Open::default();
        for group in self.groups(plan, subject)? {
            threads.extend(self.threads(plan, &group, clock, interrupted, &mut open)?);
        }
        let Open { mut pids, sessions } = open;
        pids.sort_unstable();
        pids.dedup();
        let own = std::process::id();
        let devices: Vec<u32> = pids.into_iter().filter(|pid| *pid != own).collect();
        let wakers = threads
            .iter()
            .flat_map(|thread| &thread.seeds)
            .filter_map(|seed| seed.waker().transpose())
            .collect::<Result<Vec<Waker>>>()?;
        let longest = threads
            .iter()
            .map(|t| t.window.runtime.map(|time| time + t.window.ramp))
            .try_fold(Duration::ZERO, |longest, time| Some(longest.max(time?)));
        let shared = Shared {
            watcher: Some(std::thread::current()),
            ..Shared::default()
        };
        let before = CpuSnapshot::now(&devices);
        let watched = Watched {
            devices: &devices,
            sessions: &sessions,
            wakers: &wakers,
            longest,
            interrupted,
            shared: &shared,
        };
        let (results, after) = watched.run(threads, clock, |elapsed| {
            progress.show(title, elapsed, longest, &shared);
        });
        let gone = sessions.iter().find(|(_, session)| session.is_closed());
        if let (Some((name, _)), true) = (gone, shared.gone.load(Ordering::Relaxed)) {
            bail!("{name}: the device has ended the session; hint: see its log");
        }
        drop(sessions);
        let results = results.into_iter().collect::<Result<Vec<_>>>()?;
        totals.ios += shared.ios.load(Ordering::Relaxed);
        totals.add(&after.since(&before), &results);
        Ok(self.merge(number, results))
    }

    fn merge(&self, number: usize, crews: Vec<ThreadResult>) -> Vec<JobResult> {
        let mut jobs: Vec<JobResult> = self
            .jobs
            .iter()
            .map(|job| JobResult {
                name: job.name.clone(),
                phase: number,
                ..JobResult::default()
            })
            .collect();
        for stream in crews.into_iter().flat_map(|crew| crew.streams) {
            let job_logs = self.jobs[stream.job].logs.any();
            let job = &mut jobs[stream.job];
            for (sum, one) in job.tallies.iter_mut().zip(&stream.tallies) {
                sum.ios += one.ios;
                sum.bytes += one.bytes;
                sum.latency.merge(&one.latency);
            }
            for (sum, one) in job.moments.iter_mut().zip(&stream.moments) {
                sum.merge(one);
            }
            job.elapsed_ns = job.elapsed_ns.max(stream.elapsed_ns);
            job.errors += stream.errors;
            job.differences += stream.differences;
            job.verified_bytes += stream.verified_bytes;
            job.complaints.extend(stream.complaints);
            if job_logs {
                job.logs.push((stream.clone, stream.log));
            }
        }
        jobs
    }
}

/// State that is watched while the threads of a phase run.
struct Watched<'a> {
    devices: &'a [u32],
    sessions: &'a [(String, Session)],
    wakers: &'a [Waker],
    longest: Option<Duration>,
    interrupted: &'a AtomicBool,
    shared: &'a Shared,
}

impl Watched<'_> {
    /// Runs the threads to their end. Returns the CPU times up to the moment when all threads had finished the measured part, without
    /// verification.
    fn run(
        &self,
        threads: Vec<ThreadPlan>,
        clock: &Clock,
        mut show: impl FnMut(Duration),
    ) -> (Vec<Result<ThreadResult>>, CpuSnapshot) {
        let count = threads.len();
        let begin = Instant::now();
        let mut after: Option<CpuSnapshot> = None;
        let results = std::thread::scope(|scope| {
            let handles: Vec<_> = threads
                .into_iter()
                .map(|thread| {
                    let clock = clock.clone();
                    scope.spawn(move || drive(thread, clock, self.shared))
                })
                .collect();
            while !handles.iter().all(|handle| handle.is_finished()) {
                let longest = self.longest;
                let left = longest.map(|longest| longest.saturating_sub(begin.elapsed()));
                std::thread::park_timeout(left.unwrap_or(GLANCE).clamp(ENDING, GLANCE));
                if after.is_none() && self.shared.measured.load(Ordering::Relaxed) == count {
                    after = Some(CpuSnapshot::now(self.devices));
                }
                let elapsed = begin.elapsed();
                if self.must_stop() || longest.is_some_and(|longest| elapsed >= longest) {
                    for waker in self.wakers {
                        waker.wake();
                    }
                }
                show(elapsed);
            }
            handles
                .into_iter()
                .map(|handle| {
                    handle
                        .join()
                        .unwrap_or_else(|_| Err(anyhow!("a driver's thread panicked")))
                })
                .collect::<Vec<Result<ThreadResult>>>()
        });
        (
            results,
            after.unwrap_or_else(|| CpuSnapshot::now(self.devices)),
        )
    }

    /// Returns true if all threads must stop: a device disconnected, the run was interrupted, or a thread failed.
    fn must_stop(&self) -> bool {
        let shared = self.shared;
        let is_gone = shared.gone.load(Ordering::Relaxed)
            || self.sessions.iter().any(|(_, session)| session.is_closed());
        shared.gone.store(is_gone, Ordering::Relaxed);
        let stop = is_gone
            || self.interrupted.load(Ordering::Relaxed)
            || shared.stop.load(Ordering::Relaxed);
        shared.stop.store(stop, Ordering::Relaxed);
        stop
    }
}

fn targets(job: &Job, subject: Option<&Subject>) -> Result<Vec<Subject>> {
    if let Some(subject) = subject {
        return Ok(vec![subject.clone()]);
    }
    ensure!(
        !job.filenames.is_empty(),
        "job {}: neither a filename nor a subject on the command line",
        job.name
    );
    let direct = job.direct.unwrap_or(false);
    let names = job.filenames.iter();
    names
        .map(|name| Subject::of_filename(name, direct))
        .collect()
}

fn drive(thread: ThreadPlan, clock: Clock, shared: &Shared) -> Result<ThreadResult> {
    if let Some(cpu) = thread.cpu {
        pin(cpu)?;
    }
    let result = ThreadWork::new(thread.seeds, thread.streams, clock, thread.polling)
        .and_then(|crew| crew.run(thread.window, shared));
    if result.is_err() {
        shared.stop.store(true, Ordering::Relaxed);
    }
    result
}

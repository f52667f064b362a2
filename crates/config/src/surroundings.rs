//! Properties of this machine and process that a configuration depends on.

use std::path::PathBuf;

/// Properties of this machine and process that affect a configuration.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// CPUs that this process may run on.
    pub cpus: Vec<usize>,
    /// Missing files are mistakes. If false, the daemon checks them, because it may run as another user or on another machine.
    pub files_are_here: bool,
    /// Default sandbox mode: `LUNETTE_SANDBOX`, for tests and for the unit of a service manager.
    pub sandbox: sandbox::Mode,
    /// Default sandbox paths: `LUNETTE_SANDBOX_PATHS`, separated by colons.
    pub sandbox_paths: Vec<PathBuf>,
}

impl Surroundings {
    /// Returns the surroundings of this process.
    pub fn of_this_process() -> Surroundings {
        let cpus = match rustix::thread::sched_getaffinity(None) {
            Ok(set) => (0..rustix::thread::CpuSet::MAX_CPU)
                .filter(|cpu| set.is_set(*cpu))
                .collect(),
            Err(_) => vec![0],
        };
        Surroundings {
            cpus,
            files_are_here: true,
            sandbox: sandbox_of_environment(),
            sandbox_paths: std::env::var_os("LUNETTE_SANDBOX_PATHS")
                .map_or_else(Vec::new, |paths| std::env::split_paths(&paths).collect()),
        }
    }

    /// Returns the surroundings for a part of another process's configuration.
    pub fn of_another_process() -> Surroundings {
        Surroundings {
            files_are_here: false,
            ..Surroundings::of_this_process()
        }
    }

    /// Returns half of the CPUs, because guests need some too; more than four are useful only under high load.
    pub fn workers_default(&self) -> usize {
        (self.cpus.len() / 2).clamp(1, 4)
    }
}

fn sandbox_of_environment() -> sandbox::Mode {
    let word = std::env::var("LUNETTE_SANDBOX").unwrap_or_default();
    let named = sandbox::Mode::WORDS.iter().find(|(name, _)| *name == word);
    named.map_or_else(sandbox::Mode::default, |(_, mode)| *mode)
}

//! Standard process metrics of Prometheus' client libraries, read from `/proc/self`.

use std::time::{SystemTime, UNIX_EPOCH};

/// Metrics of this process. Values missing in `/proc` are `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Process {
    /// CPU time of all threads.
    pub cpu_seconds: Option<f64>,
    pub resident_bytes: Option<u64>,
    pub open_fds: Option<usize>,
    /// Limit of open descriptors.
    pub max_fds: Option<u64>,
}

impl Process {
    pub fn this() -> Process {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let folder = std::fs::read_dir("/proc/self/fd");
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        Process {
            // One of them is the descriptor of the folder itself.
            open_fds: folder.ok().map(|fds| fds.count().saturating_sub(1)),
            max_fds: limit.current,
            ..Process::from_stat(&stat)
        }
    }

    /// Parses `proc_pid_stat(5)`. The command in parentheses may contain any character; field 3 follows it.
    fn from_stat(stat: &str) -> Process {
        let numbers = stat.rsplit_once(") ").map_or("", |(_, numbers)| numbers);
        let fields: Vec<&str> = numbers.split_whitespace().collect();
        let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        let page = rustix::param::page_size() as u64;
        Process {
            cpu_seconds: number(14)
                .zip(number(15))
                .map(|(user, system)| (user + system) as f64 / ticks),
            resident_bytes: number(24).map(|pages| pages.saturating_mul(page)),
            ..Process::default()
        }
    }
}

pub fn unix_seconds() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_with_parentheses_does_not_shift_the_fields() {
        let stat = "1 (a) b) c) S 0 0 0 0 -1 0 0 0 0 0 300 100 0 0 20 0 1 0 5 6 7 8";
        let process = Process::from_stat(stat);
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        assert_eq!(process.cpu_seconds, Some(400.0 / ticks));
        let page = rustix::param::page_size() as u64;
        assert_eq!(process.resident_bytes, Some(7 * page));
        assert_eq!(Process::from_stat(""), Process::default());
        assert!(Process::this().open_fds.is_some_and(|fds| fds >= 3));
    }
}

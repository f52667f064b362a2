//! CPU use of an idle daemon.

use crate::Daemon;
use anyhow::{Result, ensure};
use std::time::{Duration, Instant};

/// Duration of one measurement.
const WATCHED: Duration = Duration::from_secs(10);
/// Limit of CPU use, as a share of one core.
const SHARE_MAX: f64 = 0.01;
/// Most measurements, if the host takes CPU time away from this machine during them.
const TIMES: usize = 6;
/// Most measurements otherwise: the daemon may still have work from before.
const TIMES_ALONE: usize = 2;

/// Fails if the daemon, idle except for `label`, uses `SHARE_MAX` of a core or more. A virtual machine's kernel counts stolen time
/// of a running thread as used, so stolen time is subtracted. The measurement is repeated, more often if the stolen time itself reaches the
/// limit. `refresh` runs before each measurement.
pub fn ensure_idle(
    daemon: &mut Daemon,
    label: &str,
    mut refresh: impl FnMut() -> Result<()>,
) -> Result<()> {
    let mut shares = Vec::new();
    for _ in 0..TIMES {
        refresh()?;
        let (used, stolen) = (daemon.process().cpu_time()?, stolen()?);
        let begun = Instant::now();
        std::thread::sleep(WATCHED);
        let used = daemon.process().cpu_time()? - used;
        let stolen = self::stolen()?.saturating_sub(stolen);
        let seconds = begun.elapsed().as_secs_f64();
        let share = used.saturating_sub(stolen).as_secs_f64() / seconds;
        shares.push(format!("{:.1} %", share * 100.0));
        if share < SHARE_MAX {
            println!("{label}: {} of a core", shares.join(", "));
            return Ok(());
        }
        if stolen.as_secs_f64() / seconds < SHARE_MAX && shares.len() >= TIMES_ALONE {
            break;
        }
    }
    ensure!(false, "{label} cost {} of a core", shares.join(", "));
    Ok(())
}

/// Returns the steal time of all processors since boot: the eighth number of the `cpu` line of `/proc/stat` (proc(5)).
fn stolen() -> Result<Duration> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let all = stat.lines().next().unwrap_or_default();
    let ticks: u64 = match all.split_whitespace().nth(8) {
        Some(ticks) => ticks.parse()?,
        None => 0,
    };
    Ok(Duration::from_secs_f64(
        ticks as f64 / rustix::param::clock_ticks_per_second() as f64,
    ))
}

//! What a daemon costs that has nothing to do.

use anyhow::{Result, ensure};
use std::time::{Duration, Instant};
use vm::Daemon;

/// How long it is watched at a time.
const WATCHED: Duration = Duration::from_secs(10);
/// The most of a core that it may take.
const SHARE_MAX: f64 = 0.01;
/// How often at most, where the host takes the machine's processors away meanwhile.
const TIMES: usize = 6;

/// Ends with an error when a daemon with nothing to do but `what` takes a hundredth of a core or more. A virtual machine's
/// kernel counts as used what its host takes from a thread that runs: that is subtracted, and where it was as much as the
/// bound, what is left says nothing and is watched again. `refresh` comes before each time.
pub fn ensure_idle(
    daemon: &mut Daemon,
    what: &str,
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
            println!("{what}: {} of a core", shares.join(", "));
            return Ok(());
        }
        if stolen.as_secs_f64() / seconds < SHARE_MAX {
            break;
        }
    }
    ensure!(false, "{what} cost {} of a core", shares.join(", "));
    Ok(())
}

/// What the host took from all processors of this machine since it booted: proc(5), the eighth number of `/proc/stat`.
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

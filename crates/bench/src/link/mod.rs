//! A line with delay, rate and loss between two network namespaces, to measure the effect of distance on a session.
//!
//! A thread joins two TUN devices with large packets (9000 bytes, like jumbo frames) and delays each packet. The model of one direction
//! is pure (`Direction`). The line has a buffer of one round trip, like a router, and drops packets when it is full. Needs `ip`,
//! `unshare` and `nsenter`, and root or user namespaces.

mod direction;
mod pump;

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

pub use direction::{Direction, LinkOptions};
use pump::Pump;

/// Address of the near end (driver).
const NEAR: &str = "10.98.0.1/30";
/// Address of the far end (target).
pub const FAR: &str = "10.98.0.2";
/// Packet size, as with jumbo frames.
const MTU: usize = 9000;
/// Transmit queue length in packets: a millisecond or two of the fastest line.
const QUEUE: &str = "2000";
/// Set in the environment when this process has its own network namespace.
const INSIDE: &str = "LUNETTE_BENCH_NAMESPACE";

impl FromStr for LinkOptions {
    type Err = String;

    /// Parses `delay=5ms,rate=4g,loss=0.05%`: one-way delay, bits per second, packet loss.
    fn from_str(text: &str) -> Result<LinkOptions, String> {
        const FORM: &str =
            "delay=TIME,rate=BITS,loss=PERCENT, such as delay=5ms,rate=4g,loss=0.05%";
        let mut options = LinkOptions::default();
        for part in text.split(',') {
            let (key, value) = part.split_once('=').ok_or(FORM)?;
            let wrong = || format!("{key}={value}: allowed is {FORM}");
            match key {
                "delay" => options.delay = time(value).ok_or_else(wrong)?,
                "rate" => options.rate = bits(value).ok_or_else(wrong)?,
                "loss" => options.loss = part_of(value).ok_or_else(wrong)?,
                _ => return Err(wrong()),
            }
        }
        Ok(options)
    }
}

fn time(text: &str) -> Option<Duration> {
    let (digits, unit) = match (text.strip_suffix("us"), text.strip_suffix("ms")) {
        (Some(digits), _) => (digits, 1),
        (_, Some(digits)) => (digits, 1000),
        _ => return None,
    };
    let micros = digits.parse::<u64>().ok()?.checked_mul(unit)?;
    (micros <= 1_000_000).then(|| Duration::from_micros(micros))
}

fn bits(text: &str) -> Option<u64> {
    let (digits, unit) = match text.chars().last()? {
        'g' | 'G' => (&text[..text.len() - 1], 1_000_000_000),
        'm' | 'M' => (&text[..text.len() - 1], 1_000_000),
        _ => (text, 1),
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

fn part_of(text: &str) -> Option<f64> {
    let percent: f64 = text.strip_suffix('%')?.parse().ok()?;
    (0.0..=50.0).contains(&percent).then_some(percent / 100.0)
}

/// Re-executes this program with the same arguments in its own network namespace. Returns if that has already happened.
pub fn enter_namespace() -> Result<()> {
    if std::env::var_os(INSIDE).is_some() {
        return ip(&["link", "set", "lo", "up"]);
    }
    let mut command = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command
        .arg("--net")
        .arg(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(INSIDE, "1");
    let error = command.exec();
    Err(error).context("cannot run unshare; hint: apt install util-linux")
}

fn ip(words: &[&str]) -> Result<()> {
    run(Command::new("ip").args(words), "ip", words)
}

fn run(command: &mut Command, name: &str, words: &[&str]) -> Result<()> {
    let ran = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {name}; hint: apt install iproute2 util-linux"))?;
    let wrong = String::from_utf8_lossy(&ran.stderr);
    ensure!(
        ran.status.success(),
        "{name} {}: {}",
        words.join(" "),
        wrong.trim()
    );
    Ok(())
}

/// An active line. Its far end is in a separate namespace.
pub struct Link {
    /// Idle process that holds the far namespace.
    holder: Child,
    _pump: Pump,
}

impl Link {
    /// Creates the line; this process is at its near end.
    pub fn new(options: LinkOptions) -> Result<Link> {
        let mut holder = Command::new("setpriv")
            .args([
                "--pdeathsig",
                "KILL",
                "unshare",
                "--net",
                "sleep",
                "infinity",
            ])
            .stdin(Stdio::null())
            .spawn()
            .context("cannot run unshare; hint: apt install util-linux")?;
        let made = Link::between(options, holder.id());
        match made {
            Ok(pump) => Ok(Link {
                holder,
                _pump: pump,
            }),
            Err(error) => {
                holder.kill().ok();
                holder.wait().ok();
                Err(error)
            }
        }
    }

    fn between(options: LinkOptions, far: u32) -> Result<Pump> {
        await_namespace(far)?;
        let (near_end, near_name) = tun()?;
        let (far_end, far_name) = tun()?;
        let mtu = MTU.to_string();
        ip(&["address", "add", NEAR, "dev", &near_name])?;
        let up = ["mtu", &mtu, "txqueuelen", QUEUE, "up"];
        ip(&[&["link", "set", &near_name][..], &up].concat())?;
        let far = far.to_string();
        ip(&["link", "set", &far_name, "netns", &far])?;
        let there = ["--target", &far, "--net", "ip"];
        let address = format!("{FAR}/30");
        let address = ["address", "add", &address, "dev", &far_name];
        let far_up = [&["link", "set", &far_name][..], &up].concat();
        for words in [&address[..], &far_up, &["link", "set", "lo", "up"]] {
            let all = [&there[..], words].concat();
            run(Command::new("nsenter").args(&all), "nsenter", &all)?;
        }
        Pump::start(near_end, far_end, options)
    }

    /// Returns the prefix of a command that is to run at the far end.
    pub fn far(&self) -> [String; 4] {
        [
            "nsenter".to_owned(),
            "--target".to_owned(),
            self.holder.id().to_string(),
            "--net".to_owned(),
        ]
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // The holder has no state to lose.
        self.holder.kill().ok();
        self.holder.wait().ok();
    }
}

/// Waits until a process has a different network namespace.
fn await_namespace(pid: u32) -> Result<()> {
    let of = |pid: &str| std::fs::read_link(Path::new("/proc").join(pid).join("ns/net"));
    let own = of("self")?;
    for _ in 0..500 {
        if of(&pid.to_string()).is_ok_and(|theirs| theirs != own) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    bail!("unshare --net did not create a namespace")
}

fn tun() -> Result<(std::fs::File, String)> {
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .context("cannot open /dev/net/tun; hint: modprobe tun")?;
    let name = sys::make_tun(&file, "lunette%d").context("cannot create a TUN device")?;
    rustix::io::ioctl_fionbio(&file, true)?;
    Ok((file, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read_with_their_units() {
        let options: LinkOptions = "delay=5ms,rate=4g,loss=0.05%".parse().unwrap();
        assert_eq!(options.delay, Duration::from_millis(5));
        assert_eq!(options.rate, 4_000_000_000);
        assert!((options.loss - 0.0005).abs() < 1e-12);
        for wrong in ["delay=5", "rate=4q", "loss=0.05", "speed=1", "delay"] {
            assert!(wrong.parse::<LinkOptions>().is_err(), "{wrong}");
        }
    }
}

//! Web page of the demonstration's daemon: address and token, and a report under load with a screenshot if a browser is installed.

use anyhow::{Context, Result, anyhow, ensure};
use end_to_end::{Daemon, DaemonBuilder, Profile, Scratch};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fmt::Write as _;
use std::io::{IsTerminal, Read, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use vm::{Process, interrupted, lunette_program, tool, workspace};

/// Duration of a report in seconds.
pub(super) const SECONDS: u32 = 12;
/// Timeout of a browser, which starts slowly on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
const BROWSERS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "chrome"];

/// Address and token of the page.
pub(super) struct Page {
    address: String,
    token: String,
    token_file: PathBuf,
}

impl Page {
    /// Selects a free port and creates a token.
    pub fn new(scratch: &Scratch) -> Result<Page> {
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
        let mut random = [0; 16];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
        let token = random.iter().fold(String::new(), |mut token, byte| {
            // Writing to a string cannot fail.
            write!(token, "{byte:02x}").ok();
            token
        });
        let token_file = scratch.file("token");
        let mut options = std::fs::OpenOptions::new();
        let options = options.write(true).create_new(true).mode(0o600);
        let mut file = options.open(&token_file)?;
        file.write_all(token.as_bytes())?;
        Ok(Page {
            address,
            token,
            token_file,
        })
    }

    /// Adds the page to the daemon.
    pub fn serve(&self, daemon: DaemonBuilder) -> DaemonBuilder {
        let token = self.token_file.display().to_string();
        daemon.arguments(["--api-listen", &self.address, "--token-file", &token])
    }

    /// Returns the URL. The token is in the fragment, so the browser does not send it.
    pub fn url(&self) -> String {
        format!("http://{}/#token={}", self.address, self.token)
    }

    /// Starts a report of a few seconds under load.
    pub fn begin_report(&self, daemon: &Daemon, scratch: &Scratch) -> Result<Report> {
        let file = scratch.file("report.html");
        let mut command = Command::new(lunette_program(Profile::Release)?);
        command
            .args(["report", "--seconds", &SECONDS.to_string(), "--socket"])
            .arg(daemon.control())
            .arg("--out")
            .arg(&file);
        let process = Process::start("report", &command, &scratch.file("report.log"))?;
        Ok(Report { file, process })
    }

    /// Prints the URL and keeps the daemon and the guest running. Without a time to stay, the URL is not printed, because it would be
    /// invalid when it is read.
    pub fn linger(&self, stay: Stay) -> Result<()> {
        let until = match stay {
            Stay::No => {
                println!(
                    "  no page of the daemon to open: the demonstration ends now; hint: DEMO_SECONDS=60 make demo"
                );
                return Ok(());
            }
            Stay::UntilEnter => None,
            Stay::Seconds(seconds) => Some(Instant::now() + Duration::from_secs(seconds)),
        };
        println!("  page of the daemon:  {}", self.url());
        match stay {
            Stay::Seconds(seconds) => {
                println!("  the daemon and the guest run for {seconds} s more, or until Ctrl-C");
            }
            _ => println!("  the daemon and the guest run until you press Enter"),
        }
        let input = std::io::stdin();
        let second = Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        while !interrupted() && until.is_none_or(|until| Instant::now() < until) {
            if until.is_some() {
                std::thread::sleep(Duration::from_millis(200));
                continue;
            }
            let mut waited = [PollFd::new(&input, PollFlags::IN)];
            if poll(&mut waited, Some(&second)).is_ok_and(|ready| ready > 0) {
                input.read_line(&mut String::new())?;
                break;
            }
        }
        Ok(())
    }
}

/// Time that the daemon and the guest stay after the measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stay {
    /// The demonstration ends at once.
    No,
    UntilEnter,
    Seconds(u64),
}

impl Stay {
    /// Returns the time for this terminal and the variable `DEMO_SECONDS`.
    ///
    /// # Errors
    /// The variable is no number.
    pub fn of_this_process() -> Result<Stay> {
        let is_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
        Stay::of(is_terminal, std::env::var("DEMO_SECONDS").ok().as_deref())
    }

    fn of(is_terminal: bool, seconds: Option<&str>) -> Result<Stay> {
        match seconds.filter(|text| !text.is_empty()) {
            Some("0") => Ok(Stay::No),
            Some(text) => text.parse().map(Stay::Seconds).map_err(|_| {
                anyhow!("DEMO_SECONDS={text} is no number; hint: DEMO_SECONDS=60 make demo")
            }),
            None if is_terminal => Ok(Stay::UntilEnter),
            None => Ok(Stay::No),
        }
    }
}

pub(super) struct Report {
    file: PathBuf,
    process: Process,
}

impl Report {
    /// Waits for the report and copies it to a permanent place.
    pub fn finish(mut self) -> Result<PathBuf> {
        self.process.wait(LIMIT)?;
        let kept = kept_at()?.join("report.html");
        std::fs::copy(&self.file, &kept).with_context(|| self.process.log_tail())?;
        Ok(kept)
    }
}

/// Creates a screenshot next to the report. Returns `None` if no browser is installed.
pub(super) fn picture(report: &Path, scratch: &Scratch) -> Result<Option<PathBuf>> {
    let Some(browser) = BROWSERS.into_iter().find_map(|name| tool(name).ok()) else {
        return Ok(None);
    };
    let file = report.with_file_name("page.png");
    // Removes the screenshot of an earlier run.
    std::fs::remove_file(&file).ok();
    let mut command = Command::new(browser);
    command
        // The page is trusted. As root, the browser cannot use its sandbox.
        .args(["--headless", "--no-sandbox", "--disable-gpu"])
        .args(["--hide-scrollbars", "--window-size=1280,1100"])
        .arg(format!(
            "--user-data-dir={}",
            scratch.file("browser").display()
        ))
        .arg(format!("--screenshot={}", file.display()))
        .arg(format!("file://{}", report.display()));
    let mut process = Process::start("browser", &command, &scratch.file("browser.log"))?;
    let status = process.wait(LIMIT)?;
    ensure!(
        file.exists(),
        "the browser ended with {status} without a picture\n{}",
        process.log_tail()
    );
    Ok(Some(file))
}

fn kept_at() -> Result<PathBuf> {
    let folder = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| workspace().join("target"), PathBuf::from);
    let folder = folder.join("demo");
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demonstration_stays_at_a_terminal_or_for_the_given_seconds() {
        for (is_terminal, seconds, expected) in [
            (true, None, Stay::UntilEnter),
            (true, Some(""), Stay::UntilEnter),
            (true, Some("5"), Stay::Seconds(5)),
            (false, None, Stay::No),
            (false, Some("60"), Stay::Seconds(60)),
            (false, Some("0"), Stay::No),
        ] {
            assert_eq!(Stay::of(is_terminal, seconds).unwrap(), expected);
        }
        let error = Stay::of(false, Some("a minute")).unwrap_err().to_string();
        assert!(error.contains("DEMO_SECONDS=a minute"), "{error}");
    }
}

//! `lunette top`: rates, and the stages of requests, updated every second.
//!
//! A separate thread queries the daemon, so that keys work while it does not respond. Contents and key handling
//! (`rates`, `screen`) and drawing (`draw`) are pure.

mod draw;
mod rates;
mod screen;
#[cfg(test)]
mod tests;
mod units;

use std::io::{IsTerminal, Write};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use control::{Client, ClientError};
use ratatui::Terminal;
use ratatui::backend::{Backend, TermionBackend};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::termion::cursor::Show;
use ratatui::termion::event::Key;
use ratatui::termion::input::TermRead;
use ratatui::termion::raw::IntoRawMode;
use ratatui::termion::screen::{IntoAlternateScreen, ToMainScreen};

use clap::Args;
use cli_common::{DaemonAddress, Failure, Outcome};
use rates::{DaemonSample, View};
use screen::{KeyAction, Screen};

/// `lunette top`
#[derive(Debug, Args)]
#[command(after_help = AFTER_TOP)]
pub struct TopArguments {
    /// View to start with: exports, queues, disks or workers
    #[arg(value_name = "VIEW", default_value = "exports")]
    pub view: String,
    /// Show only rows that contain this text, for example a name, a disk or a kind of export
    #[arg(long, value_name = "TEXT")]
    pub filter: Option<String>,
    /// Update interval in seconds, 0.1 to 3600
    #[arg(long, value_name = "SECONDS", default_value = "1")]
    pub interval: f64,
    /// Print one frame as plain text, for pipes
    #[arg(long)]
    pub once: bool,
    /// Address of the daemon
    #[command(flatten)]
    pub daemon: DaemonAddress,
}

const AFTER_TOP: &str = "\
Examples:
    lunette top                      all exports; press ? for the keys
    lunette top disks                start with the disks
    lunette top queues --filter vm0 --interval 5
    lunette top workers --once | head

The bars below the table show the time of each stage of the selected row, with the stage names
of lunette latency.";

/// Poll interval for the terminal size.
const SIZE_INTERVAL: Duration = Duration::from_millis(250);
/// Default width in columns; everything must fit in it.
const COLUMNS_DEFAULT: u16 = 80;
/// Maximum lines of a frame for a pipe.
const LINES_MAX: u16 = 2000;

/// Shows the screen until a key ends it, or prints it once.
pub fn run(arguments: &TopArguments) -> Outcome {
    let client = arguments.daemon.client()?;
    if !(0.1..=3600.0).contains(&arguments.interval) {
        return Err(Failure::mistake(format!(
            "--interval {}: must be 0.1 to 3600 seconds",
            arguments.interval
        )));
    }
    let interval = Duration::from_secs_f64(arguments.interval);
    let mut screen = Screen::default();
    screen.view = view(&arguments.view)?;
    screen.filter = arguments.filter.clone().unwrap_or_default();
    if arguments.once {
        return once(&client, interval, &mut screen);
    }
    if !std::io::stdout().is_terminal() {
        return Err(Failure::because(
            "stdout is not a terminal; hint: print one frame with --once",
        ));
    }
    // Before switching to the screen: a missing daemon is reported on an ordinary line.
    screen.add_sample(Ok(sample(&client)?));
    // Panic messages must appear on the normal screen.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        print!("{ToMainScreen}{Show}");
        report(info);
    }));
    // Dropping these restores the terminal, also after a panic.
    let output = std::io::stdout().into_raw_mode()?.into_alternate_screen()?;
    let mut terminal = Terminal::new(TermionBackend::new(output))?;
    let outcome = show(&mut terminal, client, interval, &mut screen);
    terminal.show_cursor()?;
    outcome
}

fn view(word: &str) -> Result<View, Failure> {
    let found = View::ALL.into_iter().find(|view| view.name() == word);
    found.ok_or_else(|| {
        let known = View::ALL.map(View::name).join(", ");
        Failure::mistake(format!("`{word}` is not a view: {known}"))
    })
}

fn sample(client: &Client) -> Result<DaemonSample, ClientError> {
    Ok(DaemonSample {
        status: client.get("/v1/status")?,
        statistics: client.get("/v1/statistics")?,
    })
}

/// Events for the screen.
enum Input {
    DaemonSample(Box<Result<DaemonSample, String>>),
    Key(Key),
    /// The keyboard input has ended, because the terminal was closed.
    NoKeys,
}

fn show<B: Backend<Error = std::io::Error>>(
    terminal: &mut Terminal<B>,
    client: Client,
    interval: Duration,
    screen: &mut Screen,
) -> Outcome {
    let (sender, inputs) = mpsc::channel();
    let samples = sender.clone();
    // Both threads end with their channel or with the process.
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(interval);
            let answer = sample(&client).map_err(|error| error.to_string());
            if samples.send(Input::DaemonSample(Box::new(answer))).is_err() {
                return;
            }
        }
    });
    let keys = std::fs::File::open("/dev/tty")?.keys();
    std::thread::spawn(move || {
        for key in keys.map_while(Result::ok) {
            if sender.send(Input::Key(key)).is_err() {
                return;
            }
        }
        sender.send(Input::NoKeys).ok();
    });
    loop {
        terminal.draw(|frame| draw::draw(screen, frame.area(), frame.buffer_mut()))?;
        let size = terminal.size()?;
        loop {
            match inputs.recv_timeout(SIZE_INTERVAL) {
                Ok(Input::DaemonSample(sample)) => screen.add_sample(*sample),
                Ok(Input::Key(key)) if screen.key(key) == KeyAction::Leave => return Ok(()),
                Ok(Input::Key(_)) => {}
                Ok(Input::NoKeys) => return Ok(()),
                Err(RecvTimeoutError::Timeout) if terminal.size()? == size => continue,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::because(
                        "the thread that polls the daemon has ended",
                    ));
                }
            }
            break;
        }
    }
}

/// Prints one frame as plain text without a height limit of the terminal.
fn once(client: &Client, interval: Duration, screen: &mut Screen) -> Outcome {
    screen.add_sample(Ok(sample(client)?));
    std::thread::sleep(interval);
    screen.add_sample(Ok(sample(client)?));
    let columns = std::env::var("COLUMNS").ok();
    let columns = columns.and_then(|text| text.parse().ok());
    let columns = columns
        .unwrap_or(COLUMNS_DEFAULT)
        .clamp(COLUMNS_DEFAULT, 500);
    let rows = u16::try_from(screen.rows().len()).unwrap_or(LINES_MAX);
    let lines = rows.saturating_add(13).clamp(24, LINES_MAX);
    let text = plain(screen, columns, lines);
    let mut stdout = cli_common::stdout();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    Ok(())
}

/// The screen without colours and without the line of keys.
fn plain(screen: &Screen, columns: u16, lines: u16) -> String {
    let mut buffer = Buffer::empty(Rect::new(0, 0, columns, lines));
    draw::draw(screen, buffer.area, &mut buffer);
    let mut text: Vec<String> = (0..lines.saturating_sub(1))
        .map(|line| {
            let symbols = (0..columns).filter_map(|column| buffer.cell((column, line)));
            let line: String = symbols.map(|cell| cell.symbol()).collect();
            line.trim_end().to_owned()
        })
        .collect();
    text.dedup_by(|a, b| a.is_empty() && b.is_empty());
    while text.last().is_some_and(String::is_empty) {
        text.pop();
    }
    text.join("\n") + "\n"
}

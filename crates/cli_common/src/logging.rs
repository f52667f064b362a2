//! Log to stderr, one line per event, filtered by `--log` or `RUST_LOG`; `lunette log` changes the filter at run time.
//!
//! Under systemd the lines have a priority and no time, because the journal adds its own.

use std::fmt;
use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};

use clap::{Args, ValueEnum};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, reload};

use crate::failure::Failure;
use crate::terminal::LogLines;

/// Valid filters, for messages.
const ALLOWED: &str = "a level (off, error, warn, info, debug, trace), or PART=LEVEL,...";

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people, and for the journal.
    Text,
    /// One JSON object a line.
    Json,
}

/// Filter and format of the log.
#[derive(Clone, Debug, Args)]
pub struct LogOptions {
    /// Log filter: a level (off, error, warn, info, debug, trace), or PART=LEVEL,... [default: $RUST_LOG, or info]
    #[arg(long, value_name = "FILTER", global = true, help_heading = "Log")]
    pub log: Option<String>,
    /// Log format: text (without time under systemd, because the journal adds it) or json
    #[arg(
        long,
        value_name = "FORMAT",
        global = true,
        help_heading = "Log",
        value_enum,
        default_value = "text",
        hide_possible_values = true
    )]
    pub log_format: LogFormat,
}

/// Current filter.
#[derive(Debug)]
pub struct Levels {
    handle: reload::Handle<Targets, Registry>,
    text: Mutex<String>,
}

impl Levels {
    /// Returns the filter as text.
    pub fn filter(&self) -> String {
        let text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        text.clone()
    }

    /// Replaces the filter.
    ///
    /// # Errors
    /// The filter is invalid; the previous one stays active.
    pub fn set_filter(&self, filter: &str) -> Result<(), String> {
        let read = read(filter)?;
        let mut text = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        self.handle
            .reload(read)
            .map_err(|error| error.to_string())?;
        *text = filter.to_owned();
        drop(text);
        tracing::info!(filter, "log changed");
        Ok(())
    }
}

impl LogOptions {
    /// Starts logging.
    ///
    /// # Errors
    /// The filter is invalid.
    pub fn start(&self) -> Result<Levels, Failure> {
        start(self.log.as_deref(), self.log_format)
    }
}

fn start(filter: Option<&str>, format: LogFormat) -> Result<Levels, Failure> {
    let (by, text) = match filter {
        Some(text) => ("--log", text.to_owned()),
        None => ("RUST_LOG", std::env::var("RUST_LOG").unwrap_or_default()),
    };
    let text = match text.as_str() {
        "" => "info".to_owned(),
        _ => text,
    };
    let filter = read(&text).map_err(|why| Failure::mistake(format!("{by} {text}: {why}")))?;
    let (filter, handle) = reload::Layer::new(filter);
    let has_colors = format == LogFormat::Text && !is_journal() && std::io::stderr().is_terminal();
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(move || LogLines::new(std::io::stderr(), has_colors));
    let lines = match format {
        LogFormat::Json => lines.json().boxed(),
        LogFormat::Text if is_journal() => {
            lines.with_ansi(false).event_format(Journal::new()).boxed()
        }
        LogFormat::Text => lines.with_ansi(false).boxed(),
    };
    tracing_subscriber::registry()
        .with(filter)
        .with(lines)
        .init();
    Ok(Levels {
        handle,
        text: Mutex::new(text),
    })
}

fn read(text: &str) -> Result<Targets, String> {
    for part in text.split(',').map(str::trim) {
        // The filter parser treats a misspelt level as a part of the program with all levels enabled.
        if !part.contains('=') && !LEVELS.contains(&part.to_lowercase().as_str()) {
            let guess = nearest_level(part);
            let guess = guess.map_or(String::new(), |guess| format!("; did you mean {guess}?"));
            return Err(format!("`{part}` is not a level: give {ALLOWED}{guess}"));
        }
    }
    text.parse::<Targets>()
        .map_err(|error| format!("{error}; give {ALLOWED}"))
}

fn nearest_level(word: &str) -> Option<&'static str> {
    let distances = LEVELS.map(|level| (strsim::damerau_levenshtein(word, level), level));
    let near = distances.into_iter().filter(|(distance, _)| *distance <= 2);
    near.min().map(|(_, level)| level)
}

/// Returns true if stderr is the journal. `$JOURNAL_STREAM` contains device and inode of its socket.
fn is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else {
        return false;
    };
    let stat = rustix::fs::fstat(std::io::stderr());
    stat.is_ok_and(|stat| stream == format!("{}:{}", stat.st_dev, stat.st_ino))
}

/// Formats a line with its priority first (`sd-daemon(3)`), without time and level.
struct Journal(Format<Full, ()>);

impl Journal {
    fn new() -> Journal {
        Journal(Format::default().without_time().with_level(false))
    }
}

fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

impl<S, N> FormatEvent<S, N> for Journal
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        write!(writer, "<{}>", priority(*event.metadata().level()))?;
        self.0.format_event(context, writer, event)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn misspelt_level_is_refused() {
        for good in ["info", "OFF", "warn,virtio=debug", "vhost_user=trace"] {
            assert!(read(good).is_ok(), "{good}");
        }
        let why = read("debgu").err().unwrap();
        assert!(why.contains("did you mean debug?"), "{why}");
        for bad in ["", "info,virtio", "virtio=loud"] {
            assert!(read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_filter_changes_at_run_time_and_a_wrong_one_leaves_it() {
        let (filter, handle) = reload::Layer::new(read("info").unwrap());
        let levels = Levels {
            handle,
            text: Mutex::new("info".to_owned()),
        };
        let subscriber = Registry::default().with(filter);
        tracing::subscriber::with_default(subscriber, || {
            assert!(!tracing::enabled!(Level::DEBUG));
            levels.set_filter("debug").unwrap();
            assert!(tracing::enabled!(Level::DEBUG));
            assert!(levels.set_filter("loud").is_err());
            assert_eq!(levels.filter(), "debug");
            assert!(tracing::enabled!(Level::DEBUG));
        });
    }

    /// Log lines of a test.
    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Sink {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    /// Initiator names and errors with text of images are in messages and in fields.
    #[test]
    fn events_are_single_lines_without_control_characters() {
        use crate::terminal::tests::HOSTILE;
        for (format, has_colors) in [
            (LogFormat::Text, false),
            (LogFormat::Text, true),
            (LogFormat::Json, false),
        ] {
            let sink = Sink::default();
            let to = sink.clone();
            let layer = tracing_subscriber::fmt::layer()
                .with_writer(move || LogLines::new(to.clone(), has_colors));
            let layer = match format {
                LogFormat::Json => layer.json().boxed(),
                LogFormat::Text => layer.with_ansi(false).boxed(),
            };
            tracing::subscriber::with_default(Registry::default().with(layer), || {
                tracing::warn!(initiator = HOSTILE, name = %HOSTILE, "refused: {HOSTILE}");
            });
            let text = sink.text();
            let line = text.strip_suffix('\n').unwrap();
            // The only escape sequences are the colors of time and level.
            let line = match has_colors {
                false => line.to_owned(),
                true => line
                    .replacen("\x1b[2m", "", 1)
                    .replacen("\x1b[33m", "", 1)
                    .replacen("\x1b[0m", "", 2),
            };
            let is_shown = |c: char| !c.is_control() && !"\u{202e}\u{2066}".contains(c);
            assert!(line.chars().all(is_shown), "{line:?}");
            assert!(line.contains("2J") && line.contains("WARN"), "{line:?}");
        }
    }

    #[test]
    fn the_journal_gets_priorities_and_no_time() {
        let sink = Sink::default();
        let to = sink.clone();
        let layer = tracing_subscriber::fmt::layer()
            .with_ansi(false)
            .with_writer(move || to.clone())
            .event_format(Journal::new());
        tracing::subscriber::with_default(Registry::default().with(layer), || {
            tracing::warn!(target: "part", disk = 3, "too slow");
        });
        assert_eq!(sink.text(), "<4>part: too slow disk=3\n");
    }
}

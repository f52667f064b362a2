//! The progress line on a terminal. Guests have none.

#[cfg(feature = "host")]
use std::io::Write;

#[cfg(feature = "host")]
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A line that is drawn over its previous content, and removed when it is dropped.
#[derive(Debug)]
pub(super) struct Bar {
    #[cfg(feature = "host")]
    bar: ProgressBar,
}

#[cfg(feature = "host")]
impl Bar {
    /// Creates a line on stderr, hidden if that is no terminal.
    pub fn on_stderr() -> Bar {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10));
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg}") {
            bar.set_style(style);
        }
        Bar { bar }
    }

    pub fn hidden() -> Bar {
        Bar {
            bar: ProgressBar::hidden(),
        }
    }

    /// Draws the line again if it is due.
    pub fn tick(&self) {
        self.bar.tick();
    }

    pub fn show(&self, text: &str) {
        self.bar
            .set_message(cli_common::printable(text).into_owned());
        self.bar.tick();
    }

    /// Prints a permanent line on stderr.
    pub fn print(&self, text: &str) {
        // The reader may have closed the pipe.
        let print = || writeln!(cli_common::stderr(), "{text}").ok();
        self.bar.suspend(print);
    }
}

#[cfg(feature = "host")]
impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(not(feature = "host"))]
impl Bar {
    pub fn on_stderr() -> Bar {
        Bar::hidden()
    }

    pub fn hidden() -> Bar {
        Bar {}
    }

    pub fn tick(&self) {}

    pub fn show(&self, _: &str) {}

    pub fn print(&self, _: &str) {}
}

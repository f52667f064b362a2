//! State of the screen and its changes by keys. Pure.

use latency::Operation;
use ratatui::termion::event::Key;

use super::rates::{DaemonSample, Interval, Row, View};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyAction {
    Stay,
    Leave,
}

/// The state of the screen.
#[derive(Debug)]
pub struct Screen {
    /// Kind of rows.
    pub view: View,
    /// Sort column: 0 is the name; other columns are sorted in descending order.
    pub sort: usize,
    pub reversed: bool,
    /// Filter for rows.
    pub filter: String,
    /// Keys edit the filter.
    pub typing: bool,
    /// Name of the selected row; its stages are shown.
    pub selected: Option<String>,
    /// Operation of the stages; `None`: all operations.
    pub operation: Option<Operation>,
    /// Updates are suspended.
    pub frozen: bool,
    /// Help is shown.
    pub helping: bool,
    /// Error of the last query.
    pub trouble: Option<String>,
    last: Option<DaemonSample>,
    interval: Option<Interval>,
}

impl Default for Screen {
    fn default() -> Self {
        Screen {
            view: View::Exports,
            sort: 1,
            reversed: false,
            filter: String::new(),
            typing: false,
            selected: None,
            operation: None,
            frozen: false,
            helping: false,
            trouble: None,
            last: None,
            interval: None,
        }
    }
}

impl Screen {
    /// Adds a sample of the daemon, or the error.
    pub fn add_sample(&mut self, sample: Result<DaemonSample, String>) {
        match sample {
            Ok(sample) => {
                self.trouble = None;
                if self.frozen {
                    return;
                }
                if let Some(interval) = self
                    .last
                    .as_ref()
                    .and_then(|l| Interval::between(l, &sample))
                {
                    self.interval = Some(interval);
                }
                self.last = Some(sample);
            }
            Err(why) => self.trouble = Some(why),
        }
    }

    /// Latest interval; `None` before the second sample.
    pub fn interval(&self) -> Option<&Interval> {
        self.interval.as_ref()
    }

    /// Visible rows, filtered and sorted.
    pub fn rows(&self) -> Vec<Row> {
        let Some(interval) = &self.interval else {
            return Vec::new();
        };
        let mut rows = interval.rows(self.view);
        let wanted = self.filter.to_lowercase();
        rows.retain(|row| {
            row.name.to_lowercase().contains(&wanted) || row.also.to_lowercase().contains(&wanted)
        });
        match self.sort.checked_sub(1) {
            None => rows.sort_by(|a, b| a.name.cmp(&b.name)),
            Some(column) => {
                let number = |row: &Row| row.cells.get(column).map_or(-1.0, |cell| cell.number());
                // Stable: rows without load keep the daemon's order.
                rows.sort_by(|a, b| number(b).total_cmp(&number(a)));
            }
        }
        if self.reversed {
            rows.reverse();
        }
        rows
    }

    /// Index of the selected row in `rows`; 0 if it is missing.
    pub fn position(&self, rows: &[Row]) -> usize {
        let selected = self.selected.as_deref();
        let found = rows
            .iter()
            .position(|row| Some(row.name.as_str()) == selected);
        found.unwrap_or(0)
    }

    pub fn key(&mut self, key: Key) -> KeyAction {
        if key == Key::Ctrl('c') {
            return KeyAction::Leave;
        }
        if self.typing {
            self.typed(key);
            return KeyAction::Stay;
        }
        if self.helping {
            self.helping = false;
            return KeyAction::Stay;
        }
        match key {
            Key::Char('q') => return KeyAction::Leave,
            Key::Esc if self.filter.is_empty() => return KeyAction::Leave,
            Key::Esc => self.filter.clear(),
            Key::Char('?' | 'h') => self.helping = true,
            Key::Char(' ') => self.frozen = !self.frozen,
            Key::Char('/') => self.typing = true,
            Key::Char(digit @ '1'..='4') => self.show(digit as usize - '1' as usize),
            Key::Char('\t') => self.show(self.view_index() + 1),
            Key::BackTab => self.show(self.view_index() + View::ALL.len() - 1),
            Key::Char('s') | Key::Right => self.sort_by(self.sort + 1),
            Key::Char('S') | Key::Left => {
                self.sort_by(self.sort + self.view.columns().len() - 1);
            }
            Key::Char('r') => self.reversed = !self.reversed,
            Key::Char('o') => self.next_operation(),
            Key::Down | Key::Char('j') => self.step(|at| at + 1),
            Key::Up | Key::Char('k') => self.step(|at| at.saturating_sub(1)),
            Key::PageDown => self.step(|at| at + 10),
            Key::PageUp => self.step(|at| at.saturating_sub(10)),
            Key::Home | Key::Char('g') => self.step(|_| 0),
            Key::End | Key::Char('G') => self.step(|_| usize::MAX),
            _ => {}
        }
        KeyAction::Stay
    }

    fn typed(&mut self, key: Key) {
        match key {
            Key::Char('\n') => self.typing = false,
            Key::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            Key::Backspace => drop(self.filter.pop()),
            Key::Char(c) => self.filter.push(c),
            _ => {}
        }
    }

    fn view_index(&self) -> usize {
        let same = |view: &View| *view == self.view;
        View::ALL.iter().position(same).unwrap_or(0)
    }

    fn show(&mut self, index: usize) {
        self.view = View::ALL[index % View::ALL.len()];
        self.selected = None;
        self.sort = 1;
    }

    fn sort_by(&mut self, column: usize) {
        self.sort = column % self.view.columns().len();
    }

    fn next_operation(&mut self) {
        self.operation = match self.operation {
            None => Operation::ALL.first().copied(),
            Some(one) => Operation::ALL.get(one as usize + 1).copied(),
        };
    }

    fn step(&mut self, to: impl Fn(usize) -> usize) {
        let rows = self.rows();
        let at = to(self.position(&rows)).min(rows.len().saturating_sub(1));
        self.selected = rows.get(at).map(|row| row.name.clone());
    }
}

//! What the screen shows and what keys do to it. Pure: keys in, state out.

use latency::Operation;
use ratatui::termion::event::Key;

use super::rates::{Interval, Look, Row, View};

/// What a key asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Go on.
    Stay,
    /// End.
    Leave,
}

/// The state of the screen.
#[derive(Debug)]
pub struct Screen {
    /// Which rows.
    pub view: View,
    /// Which column they are sorted by: 0 is the name, downwards from the largest otherwise.
    pub sort: usize,
    /// The other way round.
    pub reversed: bool,
    /// Only rows with this text.
    pub filter: String,
    /// Keys go into the filter.
    pub typing: bool,
    /// The name of the row whose stages are shown.
    pub selected: Option<String>,
    /// Whose stages: `None` is all operations together.
    pub operation: Option<Operation>,
    /// Numbers stand still.
    pub frozen: bool,
    /// Help covers the screen.
    pub helping: bool,
    /// Why there is nothing new.
    pub trouble: Option<String>,
    last: Option<Look>,
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
    /// A look at the daemon, or why there was none.
    pub fn looked(&mut self, look: Result<Look, String>) {
        match look {
            Ok(look) => {
                self.trouble = None;
                if self.frozen {
                    return;
                }
                if let Some(interval) = self.last.as_ref().and_then(|l| Interval::between(l, &look))
                {
                    self.interval = Some(interval);
                }
                self.last = Some(look);
            }
            Err(why) => self.trouble = Some(why),
        }
    }

    /// What happened last, once there were two looks.
    pub fn interval(&self) -> Option<&Interval> {
        self.interval.as_ref()
    }

    /// The rows to be shown, in their order.
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

    /// Where the selected row is among `rows`: the first when it is not there.
    pub fn position(&self, rows: &[Row]) -> usize {
        let selected = self.selected.as_deref();
        let found = rows
            .iter()
            .position(|row| Some(row.name.as_str()) == selected);
        found.unwrap_or(0)
    }

    /// A key was pressed.
    pub fn key(&mut self, key: Key) -> Wish {
        if key == Key::Ctrl('c') {
            return Wish::Leave;
        }
        if self.typing {
            self.typed(key);
            return Wish::Stay;
        }
        if self.helping {
            self.helping = false;
            return Wish::Stay;
        }
        match key {
            Key::Char('q') => return Wish::Leave,
            Key::Esc if self.filter.is_empty() => return Wish::Leave,
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
        Wish::Stay
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

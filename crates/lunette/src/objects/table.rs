//! Text tables with columns of minimal width, separated by two spaces.

use std::fmt;

#[derive(Default)]
pub struct Table {
    head: Vec<&'static str>,
    rows: Vec<Vec<String>>,
    /// Lines below the rows.
    notes: Vec<String>,
}

impl Table {
    pub fn new(head: &[&'static str]) -> Table {
        Table {
            head: head.to_vec(),
            rows: Vec::new(),
            notes: Vec::new(),
        }
    }

    #[must_use]
    pub fn row<const N: usize>(mut self, cells: [String; N]) -> Table {
        let cells = cells.iter();
        let cells = cells.map(|cell| cli_common::printable(cell).into_owned());
        self.rows.push(cells.collect());
        self
    }

    /// Adds a line below the rows.
    #[must_use]
    pub fn note(mut self, line: &str) -> Table {
        self.notes.push(cli_common::printable(line).into_owned());
        self
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            let widest = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
            widest.max(self.head[column].len())
        };
        let widths: Vec<usize> = (0..self.head.len()).map(width).collect();
        let mut line = |cells: &mut dyn Iterator<Item = &str>| {
            let mut text = String::new();
            for (cell, width) in cells.zip(&widths) {
                text.push_str(&format!("{cell:width$}  "));
            }
            writeln!(f, "{}", text.trim_end())
        };
        line(&mut self.head.iter().copied())?;
        for row in &self.rows {
            line(&mut row.iter().map(String::as_str))?;
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let table = Table::new(&["NAME", "SIZE"])
            .row(["a".to_owned(), "1M".to_owned()])
            .row(["long-name".to_owned(), "2G".to_owned()]);
        assert_eq!(
            table.to_string(),
            "NAME       SIZE\na          1M\nlong-name  2G\n"
        );
    }
}

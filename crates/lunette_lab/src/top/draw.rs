//! Drawing of the screen: head, rows, stages of the selected row as bars, keys.

use cli_common::printable;
use latency::table::time;
use latency::{Span, SparseHistogram};
use ratatui::buffer::Buffer;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span as Piece, Text};
use ratatui::widgets::{
    Cell as TableCell, Clear, Paragraph, Row as TableRow, StatefulWidget, Table, TableState, Widget,
};

use super::rates::{self, Row, View};
use super::screen::Screen;
use super::units;

/// Lines of head, views and keys.
const FRAME_LINES: u16 = 3;
/// Minimum lines left for rows; otherwise stages are hidden.
const ROWS_MIN: u16 = 7;

/// Help text of the key `?`.
pub const HELP: &str = "
  1 2 3 4, Tab    exports, queues, disks, workers
  up down, j k    select a row; its stages are shown below
  s S, left right sort by the next or the previous column
  r               reverse the order
  /               show only rows with a text (a name, a disk, a kind); Esc: all
  o               stages of all operations, or of one
  space           freeze or continue
  q               quit

  mean, p99     time of a request from noticed to notified
  depth         requests in flight
  kick/s        kicks from the client       intr/s  interrupts to the client
  held/s        I/Os delayed by limits of their disk
  iter/s        event loop iterations of a worker
  work, sleep   shares of a worker's time; found, empty: polling by result
  reaped        service time of the disk; other stages: queueing in the daemon";

pub fn draw(screen: &Screen, area: Rect, buffer: &mut Buffer) {
    let rows = screen.rows();
    let lines = stage_lines(screen, rows.get(screen.position(&rows)));
    let stages = match u16::try_from(lines.len()) {
        Ok(count) if area.height >= FRAME_LINES + ROWS_MIN + count => count,
        _ => 0,
    };
    let [head, tabs, table, bars, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(1),
        Constraint::Length(stages),
        Constraint::Length(1),
    ])
    .areas(area);
    draw_head(screen, head, buffer);
    draw_tabs(screen, tabs, buffer);
    draw_rows(screen, &rows, table, buffer);
    if stages > 0 {
        Paragraph::new(lines).render(bars, buffer);
    }
    draw_keys(screen, keys, buffer);
    if screen.helping {
        Clear.render(table.union(bars), buffer);
        Paragraph::new(HELP).render(table.union(bars), buffer);
    }
}

fn strong() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn weak() -> Style {
    Style::new().fg(Color::DarkGray)
}

fn draw_head(screen: &Screen, area: Rect, buffer: &mut Buffer) {
    let Some(interval) = screen.interval() else {
        return Line::from("lunette top")
            .style(strong())
            .render(area, buffer);
    };
    let status = interval.status();
    let (requests, bytes, errors) = interval.totals();
    let left = format!(
        "lunette {}  pid {}  up {}",
        printable(&status.version),
        status.pid,
        units::duration(status.uptime_seconds),
    );
    let right = format!(
        "{} req/s  {}B/s  {} err/s",
        units::text(rates::Cell::Count(requests)),
        units::text(rates::Cell::Bytes(bytes)),
        units::text(rates::Cell::Count(errors)),
    );
    Line::from(left).style(strong()).render(area, buffer);
    let style = match errors > 0.0 {
        true => strong().fg(Color::Red),
        false => strong(),
    };
    Line::from(right)
        .alignment(Alignment::Right)
        .style(style)
        .render(area, buffer);
}

fn draw_tabs(screen: &Screen, area: Rect, buffer: &mut Buffer) {
    let mut pieces = Vec::new();
    for (index, view) in View::ALL.into_iter().enumerate() {
        let text = format!(" {}:{} ", index + 1, view.name());
        let style = match view == screen.view {
            true => strong().add_modifier(Modifier::REVERSED),
            false => Style::new(),
        };
        pieces.push(Piece::styled(text, style));
    }
    let warning = Style::new().fg(Color::Yellow);
    if screen.frozen {
        pieces.push(Piece::styled("  frozen", warning));
    }
    if screen.typing || !screen.filter.is_empty() {
        let cursor = if screen.typing { "_" } else { "" };
        let text = format!("  filter: {}{cursor}", screen.filter);
        pieces.push(Piece::styled(text, warning));
    }
    Line::from(pieces).render(area, buffer);
}

fn draw_rows(screen: &Screen, rows: &[Row], area: Rect, buffer: &mut Buffer) {
    let columns = screen.view.columns();
    let title = |(index, (title, _)): (usize, &(&'static str, u16))| {
        let name = match index {
            0 => screen.view.name().trim_end_matches('s'),
            _ => title,
        };
        let style = match index == screen.sort {
            true => strong().add_modifier(Modifier::UNDERLINED),
            false => weak(),
        };
        let alignment = match index {
            0 => Alignment::Left,
            _ => Alignment::Right,
        };
        TableCell::from(Text::from(name).alignment(alignment)).style(style)
    };
    let head = TableRow::new(columns.iter().enumerate().map(title));
    let body = rows.iter().map(|row| {
        let name = TableCell::from(printable(&row.name));
        let cells = row.cells.iter().map(|cell| {
            TableCell::from(Text::from(units::text(*cell)).alignment(Alignment::Right))
        });
        TableRow::new(std::iter::once(name).chain(cells))
    });
    let widths = columns.iter().map(|(_, width)| match width {
        0 => Constraint::Min(8),
        width => Constraint::Length(*width),
    });
    let table = Table::new(body, widths)
        .header(head)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut state = TableState::default();
    state.select((!rows.is_empty()).then(|| screen.position(rows)));
    StatefulWidget::render(table, area, buffer, &mut state);
    if rows.is_empty() {
        let text = match (screen.interval().is_some(), screen.filter.is_empty()) {
            (false, _) => "waiting for the first second",
            (true, false) => "no row contains this text; Esc shows all",
            (true, true) => "no data yet",
        };
        let below = Rect {
            y: area.y + 1,
            height: area.height.saturating_sub(1).min(1),
            ..area
        };
        Line::from(text).style(weak()).render(below, buffer);
    }
}

/// Columns of a stage's bar: 80 minus its numbers.
const BAR_COLUMNS: usize = 46;

fn stage_lines(screen: &Screen, row: Option<&Row>) -> Vec<Line<'static>> {
    let Some(row) = row else {
        return Vec::new();
    };
    let operation = screen.operation.map_or("all", |operation| operation.name());
    let spans = match &row.latencies {
        Some(latencies) => rates::merged(latencies, screen.operation).spans,
        None => Default::default(),
    };
    let Some(total) = spans.get(&Span::Total).filter(|total| !total.is_empty()) else {
        let why = match row.latencies {
            None => "it has no queue of its own: see its controller",
            Some(_) => "no request completed",
        };
        let text = format!("{}, {operation}: {why}", row.name);
        let mut lines = vec![Line::from(text).style(weak())];
        // The number of common stages, so that the table does not move.
        lines.resize(Span::COMMON.len() + 2, Line::default());
        return lines;
    };
    let title = format!("{}, {operation}: time by stage", row.name);
    let head = format!("{:<10}{:>8} {:>5} {:>8}", "stage", "mean", "share", "p99");
    let mut lines = vec![
        Line::from(title).style(strong()),
        Line::from(head).style(weak()),
    ];
    for span in Span::STEPS {
        let empty = SparseHistogram::default();
        let step = match spans.get(&span) {
            Some(step) => step,
            None if Span::COMMON.contains(&span) => &empty,
            None => continue,
        };
        // Share of the time of all requests, because some requests lack some stages.
        let share = (step.sum_ns / total.sum_ns.max(1.0)).clamp(0.0, 1.0);
        let color = match span {
            Span::Reaped => Color::Green,
            _ => Color::Cyan,
        };
        lines.push(Line::from(vec![
            Piece::raw(stage_text(span.name(), step, Some(share))),
            Piece::styled(bar(share, BAR_COLUMNS), Style::new().fg(color)),
        ]));
    }
    lines.push(Line::from(stage_text("total", total, None)).style(strong()));
    lines
}

fn stage_text(name: &str, histogram: &SparseHistogram, share: Option<f64>) -> String {
    let share = share.map_or(String::new(), |share| format!("{:.0} %", share * 100.0));
    format!(
        "{name:<10}{:>8} {share:>5} {:>8}  ",
        time(histogram.mean_ns()),
        time(histogram.quantile_ns(0.99) as f64),
    )
}

/// A bar with a resolution of an eighth of a column.
fn bar(share: f64, room: usize) -> String {
    const PARTS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (share * room as f64 * 8.0).round() as usize;
    let mut bar = "█".repeat(eighths / 8);
    bar.push_str(PARTS[eighths % 8]);
    bar
}

fn draw_keys(screen: &Screen, area: Rect, buffer: &mut Buffer) {
    if let Some(trouble) = &screen.trouble {
        let style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
        return Line::from(printable(trouble))
            .style(style)
            .render(area, buffer);
    }
    let text = match (screen.typing, screen.helping) {
        (true, _) => "Enter: done   Esc: no filter",
        (false, true) => "any key: back",
        (false, false) => {
            "? help  Tab view  up/down select  s sort  r reverse  / filter  space freeze  q"
        }
    };
    Line::from(text).style(weak()).render(area, buffer);
}

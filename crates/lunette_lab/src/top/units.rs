//! Formats numbers in at most seven columns.

use latency::table::time;

use super::rates::Cell;

pub fn text(cell: Cell) -> String {
    match cell {
        Cell::Count(count) => count_text(count),
        Cell::Bytes(bytes) => scaled(bytes, &["", "k", "M", "G", "T"]),
        Cell::Time(ns) if ns.is_nan() => "-".to_owned(),
        Cell::Time(ns) => time(ns),
        Cell::Share(share) if share.is_nan() => "-".to_owned(),
        Cell::Share(share) => format!("{:.0} %", share * 100.0),
    }
}

/// Formats a count or a rate; below ten with one decimal, if it is not an integer.
fn count_text(count: f64) -> String {
    match count {
        ..10.0 if count.fract() != 0.0 => format!("{count:.1}"),
        ..999.5 => format!("{count:.0}"),
        _ => scaled(count, &["", "k", "M", "G", "T"]),
    }
}

/// Formats three digits and a power of 1000.
fn scaled(number: f64, powers: &[&str]) -> String {
    let mut number = number;
    for power in powers {
        if number < 999.5 {
            return match (power, number) {
                (&"", _) => format!("{number:.0}"),
                (_, number) if number < 9.995 => format!("{number:.2} {power}"),
                (_, number) if number < 99.95 => format!("{number:.1} {power}"),
                (_, number) => format!("{number:.0} {power}"),
            };
        }
        number /= 1000.0;
    }
    format!("{number:.0} P")
}

/// Formats a duration in seconds.
pub fn duration(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match days {
        0 => format!("{hours}:{minutes:02}:{:02}", seconds % 60),
        days => format!("{days} d {hours}:{minutes:02}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_three_digits_and_seven_columns() {
        let counts = [
            0.0, 0.3, 7.0, 12.4, 999.4, 1234.0, 54_321.0, 999_600.0, 7.3e6, 2e15,
        ];
        let texts = counts.map(|count| text(Cell::Count(count)));
        let expected = [
            "0", "0.3", "7", "12", "999", "1.23 k", "54.3 k", "1.00 M", "7.30 M", "2 P",
        ];
        assert_eq!(texts, expected);
        let times = [0.0, 1500.0, 43e6].map(|ns| text(Cell::Time(ns)));
        assert_eq!(times, ["0 ns", "1.50 us", "43.0 ms"]);
        assert_eq!(text(Cell::Bytes(4096.0 * 1e5)), "410 M");
        assert_eq!(text(Cell::Share(0.256)), "26 %");
        assert_eq!(text(Cell::Share(f64::NAN)), "-");
        assert_eq!(
            [59, 3725, 90_000].map(duration),
            ["0:00:59", "1:02:05", "1 d 1:00"]
        );
    }
}

//! Conversion of timestamps to dates, without a library.

/// Formats seconds since 1970 as `YYYY-MM-DD`, UTC (H. Hinnant, "chrono-Compatible Low-Level Date Algorithms").
pub fn date(seconds: u64) -> String {
    let days = seconds / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

/// Formats the time of day, UTC: `09:41:22`.
pub fn clock_time(seconds: u64) -> String {
    format!(
        "{:02}:{:02}:{:02}",
        seconds / 3600 % 24,
        seconds / 60 % 60,
        seconds % 60
    )
}

/// Formats a time like C's `ctime`, UTC: `Sat Nov 21 09:41:22 2026`.
pub fn clock(seconds: u64) -> String {
    const DAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let date = date(seconds);
    let mut parts = date.split('-');
    let year = parts.next().unwrap_or_default();
    let month = parts.next().and_then(|month| month.parse::<usize>().ok());
    let month = month.and_then(|month| MONTHS.get(month.wrapping_sub(1)));
    let day = parts.next().unwrap_or_default().trim_start_matches('0');
    format!(
        "{} {} {day:>2} {} {year}",
        DAYS[(seconds / 86_400 % 7) as usize],
        month.unwrap_or(&""),
        clock_time(seconds)
    )
}

#[cfg(test)]
mod tests {
    use super::{clock, date};

    #[test]
    fn moments_are_written_as_c_does() {
        assert_eq!(clock(0), "Thu Jan  1 00:00:00 1970");
        assert_eq!(clock(1_795_254_082), "Sat Nov 21 09:41:22 2026");
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01"),
            (951_782_400, "2000-02-29"),
            (1_763_683_200, "2025-11-21"),
            (4_107_542_399, "2100-02-28"),
            (4_107_542_400, "2100-03-01"),
        ] {
            assert_eq!(date(seconds), text);
        }
    }
}

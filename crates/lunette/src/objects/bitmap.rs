//! `lunette disk bitmap`: dirty bitmaps of incremental backups.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use control::objects::Bitmap;
use control::{Method, escape};

use super::arguments::{Ask, BitmapAction};
use super::size_text;
use super::table::Table;
use crate::failure::Outcome;

pub fn run(ask: &Ask, action: &BitmapAction) -> Outcome {
    match action {
        BitmapAction::List { disk } => {
            let mut all: Vec<Bitmap> = ask.daemon.client()?.get("/v1/bitmaps")?;
            all.retain(|one| disk.as_ref().is_none_or(|disk| *disk == one.disk));
            ask.print(&all, table)
        }
        BitmapAction::Remove { disk, bitmap } => {
            let path = format!("/v1/disks/{}/bitmaps/{}", escape(disk), escape(bitmap));
            ask.change(Method::DELETE, &path, None)
        }
    }
}

fn table(bitmaps: &[Bitmap]) -> Table {
    let head = Table::new(&["DISK", "BITMAP", "DIRTY", "LAST BACKUP", "TARGET", "REASON"]);
    bitmaps.iter().fold(head, |table, bitmap| {
        table.row([
            bitmap.disk.clone(),
            match bitmap.name.is_empty() {
                true => "(unknown)".to_owned(),
                false => bitmap.name.clone(),
            },
            size_text(bitmap.dirty),
            match bitmap.at {
                0 => "-".to_owned(),
                at => ago(at),
            },
            bitmap.target.clone(),
            bitmap.reason.clone().unwrap_or_default(),
        ])
    })
}

/// Age of a time (seconds since 1970) in the largest unit that fits.
fn ago(at: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let seconds = now
        .unwrap_or_default()
        .saturating_sub(Duration::from_secs(at))
        .as_secs();
    let units = [(86_400, "d"), (3_600, "h"), (60, "min")];
    let unit = units.into_iter().find(|(length, _)| seconds >= *length);
    let (length, unit) = unit.unwrap_or((1, "s"));
    format!("{} {unit} ago", seconds / length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_the_largest_fitting_unit() {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_secs();
        for (seconds, shown) in [
            (5, "s ago"),
            (121, "2 min ago"),
            (7300, "2 h ago"),
            (200_000, "2 d ago"),
        ] {
            assert!(
                ago(now - seconds).ends_with(shown),
                "{}",
                ago(now - seconds)
            );
        }
        assert!(ago(now + 100).ends_with("s ago"), "the clock was set back");
    }
}

//! Output of results: a text table, fio's JSON, log files, comparisons.

mod compare;
mod date;
mod fio;
mod logs;
mod text;

pub use compare::compare;
pub use date::{clock_time, date};
pub use fio::{read, to_json};
pub use logs::write_logs;
pub use text::{columns, per_second, rate, ratio, to_text};

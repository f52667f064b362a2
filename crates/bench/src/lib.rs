//! Workloads, drivers, statistics and reports: `lunette bench`.
//!
//! [`job`] reads what is to be done, [`workload`] makes requests of it, [`driver`] brings them to a device as a guest's
//! driver would, [`run`] repeats and compares, [`report`] prints. Nothing here is on a daemon's way.

#![forbid(unsafe_code)]

pub mod chart;
pub mod children;
pub mod drive;
pub mod driver;
pub mod job;
pub mod link;
pub mod matrix;
pub mod picture;
pub mod report;
pub mod run;
pub mod selfcheck;
pub mod stamps;
pub mod table;
pub mod verify;
pub mod workload;

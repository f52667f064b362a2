//! Workloads, drivers, statistics and reports: `lunette bench`.
//!
//! [`job`] parses jobs, [`workload`] generates their requests, [`driver`] submits them to a device as a guest's driver would, [`run`]
//! repeats and compares, [`report`] prints. The daemon uses none of this.

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
pub mod study;
pub mod table;
pub mod verify;
pub mod workload;

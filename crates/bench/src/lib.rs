//! Workloads, drivers, statistics and reports: `lunette bench`.
//!
//! [`job`] parses jobs, [`workload`] generates their requests, [`driver`] submits them to a device as a guest's driver would, [`run`]
//! repeats and compares, [`report`] prints. The daemon uses none of this.

#![forbid(unsafe_code)]

#[cfg(feature = "host")]
pub mod chart;
#[cfg(feature = "host")]
pub mod children;
pub mod drive;
pub mod driver;
pub mod job;
#[cfg(feature = "host")]
pub mod link;
#[cfg(feature = "host")]
pub mod matrix;
#[cfg(feature = "host")]
pub mod picture;
pub mod report;
pub mod run;
#[cfg(feature = "host")]
pub mod selfcheck;
#[cfg(feature = "host")]
pub mod stamps;
#[cfg(feature = "host")]
pub mod study;
#[cfg(feature = "host")]
pub mod table;
pub mod verify;
pub mod workload;

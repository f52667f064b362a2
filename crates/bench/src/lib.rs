//! Workloads, drivers, statistics and reports.

#![forbid(unsafe_code)]

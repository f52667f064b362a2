//! The daemon: what it is to serve (`config`), the objects that serve it, and the socket that it is asked through.
//!
//! The only library that knows all crates below it. Nothing here is on a request's way: configuration,
//! start and stop, and looking on.

#![forbid(unsafe_code)]

pub mod config;
pub mod control;

//! The demonstration.

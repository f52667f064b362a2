//! io_uring that owns every buffer until its completion.

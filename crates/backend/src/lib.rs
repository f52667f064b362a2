//! Engines that do a disk's I/O.

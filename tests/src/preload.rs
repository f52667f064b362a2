//! Faults of a host in one daemon: the kernel refuses threads, and the wall clock jumps. A library that is preloaded into the daemon
//! (`preload/preload.c`) acts in place of the kernel, so no rights are needed. Needs: cc.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;

use crate::Scratch;
use anyhow::{Context, Result, ensure};

/// Offsets of the fields of `struct faults`.
const CLOCK_OFFSET: u64 = 0;
const THREADS_LEFT: u64 = 8;

/// The library, and the file with the faults that it causes.
pub struct Preload {
    library: PathBuf,
    orders: PathBuf,
    file: File,
}

impl Preload {
    /// Compiles the library. It causes no fault at first.
    ///
    /// # Errors
    /// The error messages of the compiler.
    pub fn new(scratch: &Scratch) -> Result<Preload> {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/preload/preload.c");
        let library = scratch.file("preload.so");
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
            .arg(&library)
            .args([source, "-ldl"])
            .output()
            .context("cannot run cc; hint: apt-get install gcc libc6-dev")?;
        let errors = String::from_utf8_lossy(&compiled.stderr);
        ensure!(compiled.status.success(), "cc {source}: {errors}");
        let orders = scratch.file("preload.orders");
        let file = File::create(&orders)?;
        let preload = Preload {
            library,
            orders,
            file,
        };
        preload.move_clock(0)?;
        preload.allow_threads(i64::MAX)?;
        Ok(preload)
    }

    /// Words before the daemon's program.
    pub fn wrapper(&self) -> [String; 3] {
        [
            "env".to_owned(),
            format!("LD_PRELOAD={}", self.library.display()),
            format!("LUNETTE_TEST_FAULTS={}", self.orders.display()),
        ]
    }

    /// Sets how many seconds the wall clock is ahead of the true time.
    pub fn move_clock(&self, seconds: i64) -> Result<()> {
        self.write(CLOCK_OFFSET, seconds)
    }

    /// Sets how many more threads the daemon can create.
    pub fn allow_threads(&self, count: i64) -> Result<()> {
        self.write(THREADS_LEFT, count)
    }

    /// Number of threads that the daemon may still create. Negative after refusals.
    pub fn threads_left(&self) -> Result<i64> {
        let mut bytes = [0; 8];
        File::open(&self.orders)?.read_exact_at(&mut bytes, THREADS_LEFT)?;
        Ok(i64::from_ne_bytes(bytes))
    }

    fn write(&self, at: u64, value: i64) -> Result<()> {
        Ok(self.file.write_all_at(&value.to_ne_bytes(), at)?)
    }
}

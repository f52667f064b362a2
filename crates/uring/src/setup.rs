//! Sets up an io_uring with the best flags that the kernel supports.
//!
//! Best (Linux 6.1): single issuer, and completions processed only when this thread enters the kernel, so that no other work
//! interrupts an iteration. Next (5.19): no interrupts of this thread for completions. Last (5.13): no flags; all features
//! work, with an interrupt per completion. Older kernels are refused: they lack multishot poll.

use std::io;

use io_uring::{EnterFlags, IoUring};

use crate::restrict;

/// Completion slots per submission slot. More operations may be in flight than are submitted at once.
const COMPLETIONS_PER_SUBMISSION: u32 = 4;

/// Number of flag sets, best first.
pub(crate) const LEVELS: u32 = 3;

pub(crate) fn build(entries: u32) -> io::Result<IoUring> {
    let mut level = 0;
    loop {
        match build_level(entries, level) {
            Ok(ring) => return check_features(ring),
            // Unknown flag.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) && level + 1 < LEVELS => level += 1,
            Err(e) => return Err(explain(&e)),
        }
    }
}

pub(crate) fn build_level(entries: u32, level: u32) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder
        .setup_clamp()
        .dontfork()
        .setup_r_disabled()
        .setup_cqsize(entries.saturating_mul(COMPLETIONS_PER_SUBMISSION));
    match level {
        0 => {
            builder.setup_single_issuer().setup_defer_taskrun();
            builder.setup_taskrun_flag().setup_submit_all();
        }
        1 => {
            builder.setup_coop_taskrun().setup_taskrun_flag();
            builder.setup_submit_all();
        }
        _ => {}
    }
    let ring = builder.build(entries)?;
    restrict::restrict_and_enable(&ring)?;
    Ok(ring)
}

fn check_features(ring: IoUring) -> io::Result<IoUring> {
    let parameters = ring.params();
    // Multishot poll has no feature flag; it came with 5.13, as RSRC_TAGS did.
    if parameters.is_feature_ext_arg()
        && parameters.is_feature_nodrop()
        && parameters.is_feature_resource_tagging()
    {
        return Ok(ring);
    }
    Err(io::Error::new(
        io::ErrorKind::Unsupported,
        "io_uring of this kernel is too old; hint: use Linux 5.13 or later (see uname -r)",
    ))
}

fn explain(error: &io::Error) -> io::Error {
    let hint = match error.raw_os_error() {
        Some(libc::EPERM) => {
            "; hint: enable io_uring for this user with sysctl kernel.io_uring_disabled=0"
        }
        Some(libc::ENOSYS) => {
            "; hint: use Linux 5.13 with CONFIG_IO_URING, and allow io_uring_setup and io_uring_enter in the container's seccomp profile"
        }
        Some(libc::ENOMEM) => "; hint: raise the limit of locked memory (ulimit -l, LimitMEMLOCK=)",
        Some(libc::EMFILE) => "; hint: raise the limit of open files (ulimit -n, LimitNOFILE=)",
        _ => "",
    };
    io::Error::new(
        error.kind(),
        format!("cannot set up io_uring: {error}{hint}"),
    )
}

/// Waiting for clients is idle time. Without this flag (Linux 6.15) `top` and `vmstat` count the wait as disk wait (iowait).
pub(crate) fn flags_of_waiting(io: &IoUring) -> u32 {
    if io.params().is_feature_no_iowait() {
        EnterFlags::NO_IOWAIT.bits()
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_names_a_hint() {
        let text = explain(&io::Error::from_raw_os_error(libc::EPERM)).to_string();
        assert!(text.contains("kernel.io_uring_disabled=0"), "{text}");
    }
}

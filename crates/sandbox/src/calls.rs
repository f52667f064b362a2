//! System calls that the process may not make, and those that threads may make.
//!
//! A call that a library newly makes is added here after `--sandbox=log` has reported it.

/// A system call and a condition on an argument.
pub type Call = (i64, Argument);

/// Condition on an argument, with the argument's index.
#[derive(Clone, Copy, Debug)]
pub enum Argument {
    /// Any arguments.
    Any,
    /// The argument is one of these values.
    Is(u8, &'static [u64]),
    /// The argument has all of these bits.
    Has(u8, u64),
    /// The argument has at least one of these bits.
    HasOneOf(u8, &'static [u64]),
}

use Argument::{Any, Has, HasOneOf, Is};

/// Flags of clone(2) that create a namespace. CLONE_NEWTIME is valid in clone3 and unshare only.
const NEW_NAMESPACES: &[u64] = &[
    libc::CLONE_NEWNS as u64,
    libc::CLONE_NEWCGROUP as u64,
    libc::CLONE_NEWUTS as u64,
    libc::CLONE_NEWIPC as u64,
    libc::CLONE_NEWUSER as u64,
    libc::CLONE_NEWPID as u64,
    libc::CLONE_NEWNET as u64,
];

/// Calls that fail in every thread, with their errno. A filter cannot read the flags of clone3, because they are in memory; at ENOSYS the
/// C library falls back to clone, and a filter can check the flags of clone.
pub const FAILING: &[(Call, i32)] = &[
    ((libc::SYS_clone, HasOneOf(0, NEW_NAMESPACES)), libc::EPERM),
    ((libc::SYS_clone3, Any), libc::ENOSYS),
];

/// Calls that no thread of the daemon makes: running programs, debugging, mounting, loading code into the kernel, changing the user.
pub const DENIED: &[Call] = &[
    // Programs and other processes.
    (libc::SYS_execve, Any),
    (libc::SYS_execveat, Any),
    (libc::SYS_ptrace, Any),
    (libc::SYS_process_vm_readv, Any),
    (libc::SYS_process_vm_writev, Any),
    (libc::SYS_process_madvise, Any),
    (libc::SYS_process_mrelease, Any),
    (libc::SYS_pidfd_open, Any),
    (libc::SYS_pidfd_getfd, Any),
    (libc::SYS_pidfd_send_signal, Any),
    (libc::SYS_kcmp, Any),
    (libc::SYS_tkill, Any),
    (libc::SYS_rt_tgsigqueueinfo, Any),
    // Users, namespaces and mounts.
    (libc::SYS_setuid, Any),
    (libc::SYS_setgid, Any),
    (libc::SYS_setreuid, Any),
    (libc::SYS_setregid, Any),
    (libc::SYS_setresuid, Any),
    (libc::SYS_setresgid, Any),
    (libc::SYS_setfsuid, Any),
    (libc::SYS_setfsgid, Any),
    (libc::SYS_setgroups, Any),
    (libc::SYS_capset, Any),
    (libc::SYS_personality, Any),
    (libc::SYS_setns, Any),
    (libc::SYS_unshare, Any),
    (libc::SYS_chroot, Any),
    (libc::SYS_pivot_root, Any),
    (libc::SYS_mount, Any),
    (libc::SYS_umount2, Any),
    (libc::SYS_move_mount, Any),
    (libc::SYS_open_tree, Any),
    (libc::SYS_fsopen, Any),
    (libc::SYS_fsconfig, Any),
    (libc::SYS_fsmount, Any),
    (libc::SYS_fspick, Any),
    (libc::SYS_mount_setattr, Any),
    (libc::SYS_open_by_handle_at, Any),
    (libc::SYS_name_to_handle_at, Any),
    (libc::SYS_fanotify_init, Any),
    (libc::SYS_fanotify_mark, Any),
    (libc::SYS_mknodat, Any),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_mknod, Any),
    // The kernel and the machine.
    (libc::SYS_bpf, Any),
    (libc::SYS_perf_event_open, Any),
    (libc::SYS_userfaultfd, Any),
    (libc::SYS_init_module, Any),
    (libc::SYS_finit_module, Any),
    (libc::SYS_delete_module, Any),
    (libc::SYS_kexec_load, Any),
    (libc::SYS_kexec_file_load, Any),
    (libc::SYS_reboot, Any),
    (libc::SYS_swapon, Any),
    (libc::SYS_swapoff, Any),
    (libc::SYS_acct, Any),
    (libc::SYS_quotactl, Any),
    (SYS_QUOTACTL_FD, Any),
    (libc::SYS_syslog, Any),
    (libc::SYS_settimeofday, Any),
    (libc::SYS_clock_settime, Any),
    (libc::SYS_clock_adjtime, Any),
    (libc::SYS_adjtimex, Any),
    (libc::SYS_sethostname, Any),
    (libc::SYS_setdomainname, Any),
    (libc::SYS_vhangup, Any),
    (libc::SYS_add_key, Any),
    (libc::SYS_request_key, Any),
    (libc::SYS_keyctl, Any),
    (libc::SYS_nfsservctl, Any),
    (libc::SYS_lookup_dcookie, Any),
    // Placement of other processes' memory.
    (libc::SYS_move_pages, Any),
    (libc::SYS_migrate_pages, Any),
    // I/O ports, and calls of old kernels.
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_iopl, Any),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_ioperm, Any),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_modify_ldt, Any),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_uselib, Any),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_ustat, Any),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_sysfs, Any),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS__sysctl, Any),
];

/// quotactl_fd(2); the crate `libc` lacks it on some architectures.
const SYS_QUOTACTL_FD: i64 = 443;

/// Calls of a worker. Its ring is restricted to operations on descriptors (`uring`), so that it cannot bypass this list. The only calls
/// with a path are `openat`, which is refused, and calls that query a descriptor with an empty path.
pub const WORKER: &[Call] = &[
    // Ring and open descriptors.
    (libc::SYS_io_uring_enter, Any),
    (libc::SYS_io_uring_register, Any),
    (libc::SYS_read, Any),
    (libc::SYS_write, Any),
    (libc::SYS_readv, Any),
    (libc::SYS_writev, Any),
    (libc::SYS_pread64, Any),
    (libc::SYS_pwrite64, Any),
    (libc::SYS_preadv, Any),
    (libc::SYS_pwritev, Any),
    (libc::SYS_preadv2, Any),
    (libc::SYS_pwritev2, Any),
    (libc::SYS_close, Any),
    (libc::SYS_dup, Any),
    (libc::SYS_fcntl, Any),
    (libc::SYS_fstat, Any),
    (libc::SYS_newfstatat, Has(3, libc::AT_EMPTY_PATH as u64)),
    (libc::SYS_statx, Has(2, libc::AT_EMPTY_PATH as u64)),
    (libc::SYS_fstatfs, Any),
    (libc::SYS_lseek, Any),
    (libc::SYS_fallocate, Any),
    (libc::SYS_ftruncate, Any),
    (libc::SYS_fsync, Any),
    (libc::SYS_fdatasync, Any),
    (libc::SYS_sync_file_range, Any),
    // Cached pages of a file that another daemon changes.
    (libc::SYS_fadvise64, Any),
    (libc::SYS_ioctl, Is(1, CONTROLS)),
    // Client sockets.
    (libc::SYS_sendmsg, Any),
    (libc::SYS_sendto, Any),
    (libc::SYS_recvmsg, Any),
    (libc::SYS_recvfrom, Any),
    (libc::SYS_shutdown, Any),
    (libc::SYS_getsockopt, Any),
    (libc::SYS_setsockopt, Any),
    (libc::SYS_getsockname, Any),
    (libc::SYS_getpeername, Any),
    // Waiting.
    (libc::SYS_futex, Any),
    (libc::SYS_ppoll, Any),
    (libc::SYS_epoll_create1, Any),
    (libc::SYS_epoll_ctl, Any),
    (libc::SYS_epoll_pwait, Any),
    (libc::SYS_eventfd2, Any),
    (libc::SYS_nanosleep, Any),
    (libc::SYS_clock_nanosleep, Any),
    (libc::SYS_clock_gettime, Any),
    (libc::SYS_clock_getres, Any),
    (libc::SYS_gettimeofday, Any),
    (libc::SYS_sched_yield, Any),
    (libc::SYS_sched_getaffinity, Any),
    (libc::SYS_getcpu, Any),
    (libc::SYS_membarrier, Any),
    (libc::SYS_restart_syscall, Any),
    // Memory.
    (libc::SYS_mmap, Any),
    (libc::SYS_munmap, Any),
    (libc::SYS_mremap, Any),
    (libc::SYS_mprotect, Any),
    (libc::SYS_madvise, Any),
    (libc::SYS_mincore, Any),
    (libc::SYS_brk, Any),
    (libc::SYS_getrandom, Any),
    // Signals, and threads, which inherit this list.
    (libc::SYS_rt_sigaction, Any),
    (libc::SYS_rt_sigprocmask, Any),
    (libc::SYS_rt_sigreturn, Any),
    (libc::SYS_sigaltstack, Any),
    // Both are limited by FAILING.
    (libc::SYS_clone, Any),
    (libc::SYS_clone3, Any),
    (libc::SYS_set_robust_list, Any),
    (libc::SYS_rseq, Any),
    (libc::SYS_prctl, Is(0, NAMES)),
    (libc::SYS_getpid, Any),
    (libc::SYS_gettid, Any),
    (libc::SYS_getuid, Any),
    (libc::SYS_geteuid, Any),
    (libc::SYS_getrusage, Any),
    (libc::SYS_exit, Any),
    (libc::SYS_exit_group, Any),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_poll, Any),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_epoll_wait, Any),
];

/// Block devices: size, discard, zeroing. Sockets: readable bytes. Stderr: terminal check.
const CONTROLS: &[u64] = &[
    0x1277,      // BLKDISCARD
    0x127f,      // BLKZEROOUT
    0x1268,      // BLKSSZGET
    0x8008_1272, // BLKGETSIZE64
    0xc020_660b, // FS_IOC_FIEMAP
    0xc060_6610, // PAGEMAP_SCAN
    0x5421,      // FIONBIO
    0x541b,      // FIONREAD
    0x5401,      // TCGETS
];

/// Thread names, and malloc's names for its memory.
const NAMES: &[u64] = &[
    libc::PR_SET_NAME as u64,
    libc::PR_GET_NAME as u64,
    0x5356_4d41, // PR_SET_VMA
];

/// A session also creates memory files, and resolves received descriptors through /proc.
pub const SESSION: &[Call] = &[
    (libc::SYS_accept4, Any),
    (libc::SYS_memfd_create, Any),
    (libc::SYS_readlinkat, Any),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_readlink, Any),
];

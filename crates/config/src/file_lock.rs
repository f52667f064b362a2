//! Duration of the locks of a raw file, block device or image.

use block::{FileLock, OnError};
use serde_json::{Value, json};

use super::devices::BlockDeviceConfig;
use super::disk::DiskKey;
use super::key::{Key, Kind, RunTime, words};

pub const LOCK: DiskKey = Key {
    name: "lock",
    kind: Kind::Word(&const { words(&FileLock::WORDS) }),
    default: "`always`",
    run_time: RunTime::AddAnew,
    of: &["file", "image"],
    help: "duration of the lock against other writers. `while-active`: only while clients or jobs use the disk, so that another daemon \
        may open it for a [live migration](migration.md#two-daemons)",
    read: |key, reader, disk| {
        let lock = reader.choice(key.name, &FileLock::WORDS);
        disk.file_lock = lock.map_or(FileLock::default(), |at| at.value);
        if disk.file_lock == FileLock::WhileActive {
            // Default of `on_error`, which is read later: requests wait while another process has the lock.
            disk.errors.on_error = OnError::Stop;
        }
    },
    get: |disk| match &disk.backend {
        BlockDeviceConfig::File {
            lock: FileLock::WhileActive,
            ..
        }
        | BlockDeviceConfig::Image {
            lock: FileLock::WhileActive,
            ..
        } => Some(json!("while-active")),
        _ => None,
    },
};

pub const LOCK_TIMEOUT: DiskKey = Key {
    name: "lock_timeout",
    kind: Kind::Number("seconds", 0..=LOCK_TIMEOUT_MAX),
    default: "`0`",
    run_time: RunTime::AddAnew,
    of: &["file", "image"],
    help: "with `lock = \"while-active\"`: time after which requests fail if another process has the lock. 0: requests wait for the lock",
    read: |key, reader, disk| {
        if let Some(at) = key.number(reader) {
            disk.errors.lock_timeout = at.value as u32;
        }
    },
    get: |disk| {
        Some(disk.errors.lock_timeout)
            .filter(|seconds| *seconds > 0)
            .map(Value::from)
    },
};

/// Longest time limit for the wait for a lock, in seconds: one day.
const LOCK_TIMEOUT_MAX: u64 = 86_400;

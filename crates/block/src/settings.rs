//! Settings of disks and workers, as configurations name them and as the crates that apply them read them.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::{DiskInfo, IoError, IoErrorKind};

/// Implements the words of a setting in files and flags.
macro_rules! words {
    ($setting:ident: $($word:literal = $value:ident),+) => {
        impl $setting {
            /// All values with their words.
            pub const WORDS: [(&'static str, $setting); [$($word),+].len()] =
                [$(($word, $setting::$value)),+];

            /// Returns the word in files and flags.
            pub const fn word(self) -> &'static str {
                match self {
                    $($setting::$value => $word),+
                }
            }
        }
    };
}

/// Caches between a client's write and the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// No page cache (`O_DIRECT`); flushes reach the device.
    #[default]
    None,
    /// The host's page cache; flushes write it back.
    Writeback,
    /// The host's page cache for reads; each write is durable before it completes.
    Writethrough,
}

words!(CacheMode: "none" = None, "writeback" = Writeback, "writethrough" = Writethrough);

impl fmt::Display for CacheMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl FromStr for CacheMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = CacheMode::WORDS.into_iter();
        let found = words.find(|(word, _)| *word == text);
        found.map(|(_, mode)| mode).ok_or_else(|| {
            format!("unknown cache mode {text:?}: it must be none, writeback or writethrough")
        })
    }
}

/// Duration of the locks of a file against other writers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FileLock {
    /// From opening to closing.
    #[default]
    Always,
    /// While a worker uses the disk. Another process may use it before and after, for example the other side of a live migration.
    WhileActive,
    /// Never, for file systems without locks.
    Never,
}

impl FileLock {
    /// The values that a configuration may select, with their words.
    pub const WORDS: [(&'static str, FileLock); 2] = [
        ("always", FileLock::Always),
        ("while-active", FileLock::WhileActive),
    ];
}

/// Policy for the backing image and the data file that an image names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NamedFiles {
    /// Any file of this host, logical unit or RBD image.
    #[default]
    Any,
    /// Files in the folder of the image or below it; symbolic links are refused.
    Folder,
    /// No file: an image that names a file is refused.
    None,
}

words!(NamedFiles: "any" = Any, "folder" = Folder, "none" = None);

/// Service time of an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DelayTime {
    /// Constant time.
    Fixed(Duration),
    /// Uniformly distributed between these two times.
    Uniform(Duration, Duration),
    /// Exponentially distributed, with this mean.
    Exponential(Duration),
}

impl DelayTime {
    /// Description of the syntax.
    pub const FORMS: &'static str =
        "a time such as 250us, 2ms or 1s, MIN-MAX for any time between, or exp:MEAN";

    const MAX: Duration = Duration::from_secs(3600);

    /// Parses the syntax of [`DelayTime::FORMS`].
    pub fn parse(text: &str) -> Option<DelayTime> {
        if let Some(mean) = text.strip_prefix("exp:") {
            return Some(DelayTime::Exponential(duration(mean)?));
        }
        match text.split_once('-') {
            Some((least, most)) => {
                let (least, most) = (duration(least)?, duration(most)?);
                (least <= most).then_some(DelayTime::Uniform(least, most))
            }
            None => duration(text).map(DelayTime::Fixed),
        }
    }

    /// Returns the quantile `q` of the service time, `q` from 0 to 1.
    pub fn quantile(self, q: f64) -> Duration {
        let q = q.clamp(0.0, 1.0);
        match self {
            DelayTime::Fixed(time) => time,
            DelayTime::Uniform(least, most) => least + (most - least).mul_f64(q),
            DelayTime::Exponential(mean) => {
                let times = -(1.0 - q).max(f64::MIN_POSITIVE).ln();
                mean.mul_f64(times).min(DelayTime::MAX)
            }
        }
    }
}

impl From<Duration> for DelayTime {
    fn from(time: Duration) -> DelayTime {
        DelayTime::Fixed(time)
    }
}

impl std::fmt::Display for DelayTime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DelayTime::Fixed(time) => write!(f, "{}ns", time.as_nanos()),
            DelayTime::Uniform(least, most) => {
                write!(f, "{}ns-{}ns", least.as_nanos(), most.as_nanos())
            }
            DelayTime::Exponential(mean) => write!(f, "exp:{}ns", mean.as_nanos()),
        }
    }
}

/// Parses `250us` and the like, in whole units.
fn duration(text: &str) -> Option<Duration> {
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at_checked(digits)?;
    let nanos: u64 = match unit {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => return None,
    };
    let time = Duration::from_nanos(number.parse::<u64>().ok()?.checked_mul(nanos)?);
    (time <= DelayTime::MAX).then_some(time)
}

/// Effect of a discard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiscardMode {
    /// The discard is passed to the device.
    #[default]
    Unmap,
    /// The blocks read as zeroes; space is released if the device writes zeroes by unmapping.
    Zeroes,
    /// None: the blocks keep their content.
    Ignore,
}

words!(DiscardMode: "unmap" = Unmap, "zeroes" = Zeroes, "ignore" = Ignore);

impl DiscardMode {
    /// Returns the mode for a device to preserve the promises made to clients.
    pub fn needed(presented: &DiskInfo, device: &DiskInfo) -> DiscardMode {
        let discards = device.discard_granularity.is_some();
        match presented.discard_granularity.is_some() {
            true if presented.discard_zeroes && !(discards && device.discard_zeroes) => {
                DiscardMode::Zeroes
            }
            true if !discards => DiscardMode::Ignore,
            _ => DiscardMode::Unmap,
        }
    }
}

/// Handling of failed I/Os of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum OnError {
    /// The client gets the error.
    #[default]
    Report,
    /// The I/O waits after every error of the device.
    Stop,
    /// The I/O waits if the device is full; other errors are reported.
    Enospc,
}

words!(OnError: "report" = Report, "stop" = Stop, "enospc" = Enospc);

impl OnError {
    /// Returns true if an I/O with this error waits. Client errors and aborts never do.
    pub const fn holds(self, error: IoError) -> bool {
        match self {
            OnError::Report => false,
            OnError::Enospc => matches!(error.kind, IoErrorKind::NoSpace),
            OnError::Stop => matches!(
                error.kind,
                IoErrorKind::NoSpace
                    | IoErrorKind::ReadMedium
                    | IoErrorKind::WriteMedium
                    | IoErrorKind::Offline
                    | IoErrorKind::TimedOut
            ),
        }
    }
}

/// Error policy of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorPolicy {
    /// Handling of failed I/Os.
    pub on_error: OnError,
    /// Time limit in seconds, after which I/O is cancelled if the device can; 0: none.
    pub io_timeout: u32,
    /// Time in seconds after which I/O no longer waits for locks that another process has; 0: it waits for them.
    pub lock_timeout: u32,
}

/// Write access of other clients to an RBD image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RbdLock {
    /// One client at a time: librbd passes the exclusive lock to the writing client.
    #[default]
    Cooperative,
    /// No other client: the daemon holds the exclusive lock from opening on.
    Exclusive,
    /// No other client while a worker uses the disk. Another daemon may use the image before and after.
    WhileActive,
    /// All clients at the same time: the image has no exclusive lock, and therefore neither object map nor journal.
    Shared,
}

words!(RbdLock: "cooperative" = Cooperative, "exclusive" = Exclusive, "while-active" = WhileActive, "shared" = Shared);

/// Ceph cluster address and credentials.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ClusterConfig {
    /// Ceph's configuration file. `None`: Ceph's search path, where it is optional.
    pub conf: Option<PathBuf>,
    /// The user, without `client.`; `None`: `admin`.
    pub id: Option<String>,
    /// File with the user's key; `None`: from the configuration.
    pub keyring: Option<PathBuf>,
    /// Addresses of monitors; `None`: from the configuration.
    pub mon_host: Option<String>,
    /// Further options of Ceph. They override all other settings.
    pub options: BTreeMap<String, String>,
}

impl ClusterConfig {
    /// User name in Ceph's form, `client.ID`.
    pub fn user(&self) -> String {
        format!("client.{}", self.id.as_deref().unwrap_or("admin"))
    }
}

/// Name of an RBD image: `POOL[/NAMESPACE]/IMAGE[@SNAP]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ImageName {
    /// Name of the pool.
    pub pool: String,
    /// Namespace of the pool.
    pub namespace: Option<String>,
    /// Name of the image.
    pub image: String,
    /// Snapshot of the image, which is read-only.
    pub snapshot: Option<String>,
}

impl ImageName {
    /// Description of the syntax, for messages.
    pub const FORM: &'static str =
        "POOL/IMAGE or POOL/NAMESPACE/IMAGE, with or without @SNAPSHOT, such as rbd/vm1";

    /// Parses the syntax of [`ImageName::FORM`].
    pub fn parse(text: &str) -> Option<ImageName> {
        let (path, snapshot) = match text.split_once('@') {
            Some((path, snapshot)) => (path, Some(snapshot)),
            None => (text, None),
        };
        let words: Vec<&str> = path.split('/').collect();
        let (pool, namespace, image) = match words[..] {
            [pool, image] => (pool, None, image),
            [pool, namespace, image] => (pool, Some(namespace), image),
            _ => return None,
        };
        let all = [Some(pool), namespace, Some(image), snapshot];
        let wrong = |word: &str| word.is_empty() || word.contains(['\0', '@']);
        if all.into_iter().flatten().any(wrong) {
            return None;
        }
        Some(ImageName {
            pool: pool.to_owned(),
            namespace: namespace.map(str::to_owned),
            image: image.to_owned(),
            snapshot: snapshot.map(str::to_owned),
        })
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/", self.pool)?;
        if let Some(namespace) = &self.namespace {
            write!(f, "{namespace}/")?;
        }
        f.write_str(&self.image)?;
        match &self.snapshot {
            Some(snapshot) => write!(f, "@{snapshot}"),
            None => Ok(()),
        }
    }
}

/// Polling of the workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PollMode {
    /// Workers never poll.
    Off,
    /// Workers poll while it pays, within a limit for each kind of client and for disks.
    #[default]
    Auto,
    /// Workers never sleep.
    Always,
}

words!(PollMode: "off" = Off, "auto" = Auto, "always" = Always);

/// Limit on the polling of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollLimit {
    /// Sleep as soon as there is no work.
    Never,
    /// Poll for at most this many microseconds, or less if polling does not pay.
    Micros(u32),
    /// Never sleep; each worker occupies one CPU.
    Always,
}

/// Limits of a worker, by the next expected source of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollLimits {
    /// Limit while the worker serves rings in guest memory. Polling avoids the guest's kick and two wake-ups.
    pub rings: PollLimit,
    /// Limit while all clients are connections. Polling avoids a wake-up.
    pub network: PollLimit,
    /// Limit while only disk I/O is outstanding.
    pub disk: PollLimit,
}

impl From<PollLimit> for PollLimits {
    /// Uses the same limit for all.
    fn from(limit: PollLimit) -> PollLimits {
        PollLimits {
            rings: limit,
            network: limit,
            disk: limit,
        }
    }
}

impl From<PollMode> for PollLimits {
    fn from(mode: PollMode) -> PollLimits {
        match mode {
            PollMode::Off => PollLimit::Never.into(),
            PollMode::Always => PollLimit::Always.into(),
            PollMode::Auto => PollLimits {
                rings: PollLimit::Micros(50),
                network: PollLimit::Micros(50),
                disk: PollLimit::Micros(100),
            },
        }
    }
}

/// Workers for the queues and connections of an export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ExportPlacement {
    /// Any shared worker.
    #[default]
    Shared,
    /// These shared workers.
    Workers(Vec<u32>),
    /// A dedicated worker, which ends when the export is removed.
    Dedicated,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delay_times_survive_a_round_trip() {
        let us = Duration::from_micros;
        let ms = Duration::from_millis;
        for (text, time) in [
            ("250us", DelayTime::Fixed(us(250))),
            ("50us-2ms", DelayTime::Uniform(us(50), ms(2))),
            ("exp:3ms", DelayTime::Exponential(ms(3))),
        ] {
            assert_eq!(DelayTime::parse(text), Some(time), "{text}");
            assert_eq!(DelayTime::parse(&time.to_string()), Some(time));
        }
        for text in [
            "",
            "5",
            "us",
            "2ms-1ms",
            "1.5ms",
            "exp:",
            "7200s",
            "99999999999999999999s",
        ] {
            assert_eq!(DelayTime::parse(text), None, "{text}");
        }
    }

    #[test]
    fn only_device_errors_wait_and_enospc_only_for_no_space() {
        use IoErrorKind as K;
        let of_device = [
            K::NoSpace,
            K::ReadMedium,
            K::WriteMedium,
            K::Offline,
            K::TimedOut,
        ];
        for kind in K::ALL {
            let error = IoError::from(kind);
            assert!(!OnError::Report.holds(error), "{kind:?}");
            assert_eq!(OnError::Stop.holds(error), of_device.contains(&kind));
            assert_eq!(OnError::Enospc.holds(error), kind == K::NoSpace);
        }
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for text in ["rbd/a", "rbd/tenant/a", "rbd/a@monday", "p/n/i@s"] {
            assert_eq!(ImageName::parse(text).unwrap().to_string(), text);
        }
        for text in [
            "",
            "a",
            "/a",
            "rbd/",
            "a/b/c/d",
            "rbd/a@",
            "rbd/a@b@c",
            "@s",
            "rbd//a",
        ] {
            assert_eq!(ImageName::parse(text), None, "{text}");
        }
        let name = ImageName::parse("p/n/i@s").unwrap();
        assert_eq!(name.namespace.as_deref(), Some("n"));
        assert_eq!(name.snapshot.as_deref(), Some("s"));
    }
}

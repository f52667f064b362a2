//! Definition of `lunette iscsi`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use cli_common::Failure;
use iscsi::negotiation::DigestOffer;
use iscsi_initiator::{ChapAlgorithm, Portal, SessionOptions, UnitAddress, read_credentials};

/// `lunette iscsi`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct IscsiArguments {
    /// Subcommand
    #[command(subcommand)]
    pub action: Action,
}

const AFTER: &str = "\
A logical unit has the form iscsi://[USER@]HOST[:PORT]/TARGET/LUN. Each command is an iSCSI initiator of its own and needs
neither a kernel driver nor root.

Examples:
    lunette iscsi discover 192.0.2.1
    lunette iscsi luns iscsi://192.0.2.1/iqn.2026-11.org.example:t0
    lunette iscsi inquiry iscsi://192.0.2.1/iqn.2026-11.org.example:t0/0
    lunette iscsi parameters iscsi://192.0.2.1/iqn.2026-11.org.example:t0 --connections 4
    lunette iscsi copy vm.raw iscsi://192.0.2.1/iqn.2026-11.org.example:t0/0 --connections 4
    lunette iscsi verify vm.raw iscsi://192.0.2.1/iqn.2026-11.org.example:t0/0";

/// Actions of `lunette iscsi`.
#[derive(Debug, Subcommand)]
pub enum Action {
    /// List the targets of a portal and their addresses
    Discover {
        /// Address of the portal [default port: 3260]
        #[arg(value_name = "HOST[:PORT]")]
        portal: Portal,
        /// CHAP user of the discovery session
        #[arg(long, value_name = "NAME", requires = "chap_file")]
        user: Option<String>,
        /// Login options
        #[command(flatten)]
        login: Login,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// List the logical units of a target
    Luns {
        /// Address of the target
        #[arg(value_name = "iscsi://HOST/TARGET")]
        target: String,
        /// Login options
        #[command(flatten)]
        login: Login,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the properties of a logical unit: names, size, blocks, write protection
    Inquiry {
        /// Address of the logical unit
        #[arg(value_name = "iscsi://HOST/TARGET/LUN")]
        unit: UnitAddress,
        /// Login options
        #[command(flatten)]
        login: Login,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Log in, show the negotiated keys, and log out
    Parameters {
        /// Address of the target
        #[arg(value_name = "iscsi://HOST/TARGET")]
        target: String,
        /// Login options
        #[command(flatten)]
        login: Login,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Measure the time from NOP-Out to NOP-In, on each connection of a session
    Ping {
        /// Address of the target
        #[arg(value_name = "iscsi://HOST/TARGET")]
        target: String,
        /// Number of NOP-Outs on each connection
        #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
        count: u32,
        /// Interval between NOP-Outs in seconds
        #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
        interval: f64,
        /// Login options
        #[command(flatten)]
        login: Login,
    },
    /// Copy between files, block devices and logical units
    Copy(CopyArguments),
    /// Compare a file, block device or logical unit with another, up to the end of the source. Exit code 0: equal, 1: different, or an
    /// error
    Verify(Transfer),
    /// Show and change persistent reservations of a logical unit
    Persist {
        /// Address of the logical unit
        #[arg(value_name = "iscsi://HOST/TARGET/LUN")]
        unit: UnitAddress,
        /// Subcommand
        #[command(subcommand)]
        action: PersistAction,
        /// Login options
        #[command(flatten)]
        login: Login,
    },
}

/// Arguments of `lunette iscsi copy`.
#[derive(Debug, Args)]
pub struct CopyArguments {
    /// Both ends
    #[command(flatten)]
    pub transfer: Transfer,
    /// Write into an existing file and keep its size
    #[arg(long, short = 'n')]
    pub existing: bool,
    /// Write raw bytes even if the existing file has the signature of a disk image
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<RawFormat>,
}

/// Format of the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RawFormat {
    /// Raw bytes
    Raw,
}

/// `copy` and `verify`
#[derive(Debug, Args)]
pub struct Transfer {
    /// Source: a file, a block device, iscsi://HOST/TARGET/LUN, or - for standard input
    #[arg(value_name = "SOURCE")]
    pub source: String,
    /// Destination: a file, a block device, iscsi://HOST/TARGET/LUN, or - for standard output. `verify` only reads the destination
    #[arg(value_name = "DESTINATION")]
    pub destination: String,
    /// Byte offset at which to start. An interrupted run prints it
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    pub from: u64,
    /// Number of requests in flight, 1 to 128
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=128))]
    pub depth: u16,
    /// Bytes per request, 4096 to 16777216
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 10, value_parser = clap::value_parser!(u32).range(4096..=16 << 20))]
    pub block: u32,
    /// Print no progress
    #[arg(long)]
    pub quiet: bool,
    /// Login options
    #[command(flatten)]
    pub login: Login,
}

/// Actions of `lunette iscsi persist`.
#[derive(Debug, Subcommand)]
pub enum PersistAction {
    /// Show the keys of all registrations, and the reservation
    Show {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Register with a key
    Register {
        /// Reservation key to register, in hexadecimal
        #[arg(value_parser = key)]
        key: u64,
        /// Keep registrations and reservation through a power loss (APTPL)
        #[arg(long)]
        persist: bool,
    },
    /// Remove the registration of this initiator name and ISID
    Unregister,
    /// Reserve the unit
    Reserve {
        /// Registered reservation key of this initiator, in hexadecimal
        #[arg(value_parser = key)]
        key: u64,
        /// Type: write-exclusive or exclusive-access, each optionally with -registrants (registrants only) or -all (all registrants)
        #[arg(value_name = "KIND")]
        kind: String,
    },
    /// Release the reservation
    Release {
        /// Registered reservation key of this initiator, in hexadecimal
        #[arg(value_parser = key)]
        key: u64,
        /// Type of the reservation, as for reserve
        #[arg(value_name = "KIND")]
        kind: String,
    },
    /// Remove the reservation and all registrations
    Clear {
        /// Registered reservation key of this initiator, in hexadecimal
        #[arg(value_parser = key)]
        key: u64,
    },
    /// Remove the registrations of another key and take over its reservation
    Preempt {
        /// Registered reservation key of this initiator, in hexadecimal
        #[arg(value_parser = key)]
        key: u64,
        /// Reservation key of the other initiators, in hexadecimal
        #[arg(value_parser = key)]
        other: u64,
        /// Type of the reservation, as for reserve
        #[arg(value_name = "KIND")]
        kind: String,
        /// Abort the tasks of the other initiators (PREEMPT AND ABORT)
        #[arg(long)]
        abort: bool,
    },
}

fn key(text: &str) -> Result<u64, String> {
    let digits = text.trim_start_matches("0x");
    u64::from_str_radix(digits, 16).map_err(|_| format!("{text:?} is not a hexadecimal key"))
}

/// Names and keys of the login (RFC 7143).
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Login")]
pub struct Login {
    /// Number of connections of the session, 1 to 16. The target may allow fewer
    #[arg(long, global = true, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=16))]
    pub connections: u16,
    /// Initiator name [default: the name in /etc/iscsi/initiatorname.iscsi, otherwise the name in the default state folder]
    #[arg(long, global = true, value_name = "IQN")]
    pub initiator_name: Option<String>,
    /// File with CHAP secrets: mode 600, one line NAME SECRET [TARGET_NAME TARGET_SECRET] per user. USER in the address selects the line
    #[arg(long, global = true, value_name = "FILE")]
    pub chap_file: Option<PathBuf>,
    /// CHAP algorithms to offer, in order of preference [default: sha3-256,sha256,sha1,md5]
    #[arg(long, global = true, value_name = "LIST")]
    pub chap_algorithms: Option<Algorithms>,
    /// Time limit in seconds for a response of the target, 1 to 3600
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout: u64,
    /// Header digest and data digest to negotiate
    #[arg(long, global = true, value_name = "KIND", default_value = "none")]
    pub digests: Digests,
    /// MaxRecvDataSegmentLength: maximum data segment of a PDU from the target, 512 to 16777215 [default: 262144]
    #[arg(long, global = true, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(512..=16_777_215))]
    pub max_recv_data_segment_length: Option<u32>,
    /// MaxBurstLength: maximum data of a Data-In sequence or of an R2T, 512 to 16777215 [default: 1048576]
    #[arg(long, global = true, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(512..=16_777_215))]
    pub max_burst_length: Option<u32>,
    /// FirstBurstLength: maximum unsolicited data of a command, 512 to 16777215, at most MaxBurstLength [default: 262144]
    #[arg(long, global = true, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(512..=16_777_215))]
    pub first_burst_length: Option<u32>,
    /// ImmediateData: send data in the PDU of the command [default: yes]
    #[arg(long, global = true, value_name = "yes|no")]
    pub immediate_data: Option<YesNo>,
    /// InitialR2T: send other data only after an R2T of the target [default: no]
    #[arg(long, global = true, value_name = "yes|no")]
    pub initial_r2t: Option<YesNo>,
    /// MaxOutstandingR2T: maximum number of outstanding R2Ts per command, 1 to 65535 [default: 1]
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub max_outstanding_r2t: Option<u16>,
    /// ErrorRecoveryLevel, 0 to 2. 1: data with a wrong digest is requested again. 2: commands also survive the loss of a connection
    #[arg(long, global = true, value_name = "LEVEL", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=2))]
    pub error_recovery_level: u8,
}

/// CHAP algorithms in order of preference.
#[derive(Clone, Debug)]
pub struct Algorithms(Vec<ChapAlgorithm>);

impl std::str::FromStr for Algorithms {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let algorithms = ChapAlgorithm::parse_list(text).map(Algorithms);
        algorithms
            .ok_or("allowed: one or more of sha3-256, sha256, sha1 and md5, separated by commas")
    }
}

/// Digest types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Digests {
    /// No digests
    None,
    /// CRC32C of each header and data segment
    Crc32c,
}

/// Boolean in the syntax of iSCSI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum YesNo {
    /// Offer Yes
    Yes,
    /// Offer No
    No,
}

impl Login {
    /// Converts the arguments to session options. `user` is the CHAP user of the address.
    pub fn options(&self, user: Option<&str>) -> Result<SessionOptions, Failure> {
        let mut options = SessionOptions {
            connections: self.connections,
            timeout: Duration::from_secs(self.timeout),
            ..SessionOptions::default()
        };
        if let Some(name) = &self.initiator_name {
            if !iscsi::login::is_iscsi_name(name) {
                return Err(Failure::mistake(format!("{name:?} is not an iSCSI name")));
            }
            options.initiator_name = Some(name.clone());
        }
        options.credentials = match (user, &self.chap_file) {
            (Some(user), Some(file)) => {
                Some(read_credentials(file, user).map_err(Failure::because)?)
            }
            (Some(user), None) => {
                return Err(Failure::mistake(format!(
                    "the address names the CHAP user {user}, but --chap-file is not set; hint: set --chap-file to a file with its secret"
                )));
            }
            (None, Some(_)) => {
                return Err(Failure::mistake(
                    "--chap-file needs a user in the address: iscsi://USER@HOST/...",
                ));
            }
            (None, None) => None,
        };
        if let (Some(credentials), Some(algorithms)) =
            (&mut options.credentials, &self.chap_algorithms)
        {
            credentials.algorithms.clone_from(&algorithms.0);
        }
        if self.digests == Digests::Crc32c {
            options.offer.header_digest = DigestOffer::Crc32c;
            options.offer.data_digest = DigestOffer::Crc32c;
        }
        let session = &mut options.offer.session;
        let yes =
            |answer: Option<YesNo>, default| answer.map_or(default, |answer| answer == YesNo::Yes);
        session.immediate_data = yes(self.immediate_data, session.immediate_data);
        session.initial_r2t = yes(self.initial_r2t, session.initial_r2t);
        session.max_burst_length = self.max_burst_length.unwrap_or(session.max_burst_length);
        let first = self
            .first_burst_length
            .unwrap_or(session.first_burst_length);
        // RFC 7143, 13.14: it must not exceed MaxBurstLength.
        session.first_burst_length = first.min(session.max_burst_length);
        let r2t = self
            .max_outstanding_r2t
            .unwrap_or(session.max_outstanding_r2t);
        session.max_outstanding_r2t = r2t;
        session.error_recovery_level = self.error_recovery_level;
        let segment = self.max_recv_data_segment_length;
        let usual = options.offer.max_recv_data_segment_length;
        options.offer.max_recv_data_segment_length = segment.unwrap_or(usual);
        Ok(options)
    }
}

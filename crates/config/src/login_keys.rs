//! Login parameters (RFC 7143, 13) of iSCSI targets and iSCSI disks: one table declares the keys of both.

use iscsi::chap::Algorithm as ChapAlgorithm;
use serde_json::{Value, json};

use super::key::{Key, Kind};
use super::value::Reader;

/// Range of lengths in bytes (RFC 7143, 13.12 to 13.14).
pub const LENGTHS: std::ops::RangeInclusive<u64> = 512..=16_777_215;

/// Declares the keys. `$key` declares one of an object, by a field of [`iscsi::negotiation::Offer`]. Further arguments are values that
/// differ between targets and initiators: digests and their default, maximum segment to receive, default of `max_burst_length`, maximum
/// and default of outstanding R2Ts.
macro_rules! login_keys {
    ($key:ident; $digests:expr, $digest:literal; $receive_max:expr; $burst:literal; $r2ts_max:expr, $r2ts:literal) => {
        &[
            $key! { "header_digest": $digests; $digest;
                "checksum over each header. `none`: refused. `crc32c`: required. `any`: as the initiator prefers"; header_digest
            },
            $key! { "data_digest": $digests; $digest; "checksum over the data of each PDU, likewise"; data_digest },
            $key! { "max_recv_data_segment_length": Kind::Number("bytes", 512..=$receive_max); "`262144`";
                "maximum data of a PDU from the other side"; max_recv_data_segment_length
            },
            $key! { "max_burst_length": Kind::Number("bytes", $crate::login_keys::LENGTHS); $burst;
                "maximum data of one request (R2T) or sequence"; session.max_burst_length
            },
            $key! { "first_burst_length": Kind::Number("bytes", $crate::login_keys::LENGTHS); "`262144`";
                "maximum unsolicited data from an initiator; at most `max_burst_length`"; session.first_burst_length
            },
            $key! { "max_outstanding_r2t": Kind::Number("requests", 1..=$r2ts_max); $r2ts;
                "maximum outstanding data requests (R2T) per command"; session.max_outstanding_r2t
            },
            $key! { "immediate_data": Kind::Boolean; "`true`"; "initiators send data in the PDU of a command"; session.immediate_data },
            $key! { "initial_r2t": Kind::Boolean; "`false`"; "initiators send other data only on request"; session.initial_r2t },
        ]
    };
}
pub(crate) use login_keys;

/// CHAP algorithms.
pub const ALGORITHMS: Kind = Kind::Text(
    "names with blanks between them: `sha3-256`, `sha256`, `sha1`, `md5`",
    "one or more of sha3-256, sha256, sha1 and md5, with blanks between them",
);

/// Default of [`ALGORITHMS`] in the documentation.
pub const ALGORITHMS_DEFAULT: &str = "`sha3-256 sha256 sha1 md5`";

/// Reads a list of CHAP algorithms; `None`: absent, wrong, or the default.
pub fn read_algorithms<D, T>(
    key: &Key<D, T>,
    reader: &mut Reader<'_, '_>,
) -> Option<Vec<ChapAlgorithm>> {
    let parse = |text: &str| ChapAlgorithm::parse_list(text).ok_or_else(String::new);
    let algorithms = key.parsed(reader, parse)?.value;
    (algorithms != ChapAlgorithm::strongest_first()).then_some(algorithms)
}

/// Returns a list of CHAP algorithms as it is written.
pub fn algorithms_value(algorithms: Option<&[ChapAlgorithm]>) -> Option<Value> {
    Some(json!(ChapAlgorithm::list(algorithms?)))
}

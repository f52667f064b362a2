//! Keys of a target for its logins: limits of negotiation (RFC 7143, 13), and the command window.

use iscsi::negotiation::{DigestOffer, LoginBounds};
use serde_json::Value;

use super::export_keys::ExportKey;
use super::key::{Kind, RunTime};
use super::model::ExportConfig;
use super::remote::{ALGORITHMS_ALLOWED, algorithms_value, read_algorithms};
use super::setting::{Choice, Setting, key};

/// RFC 7143, 13.13 and 13.14: 512 to 2^24-1.
const LENGTHS: std::ops::RangeInclusive<u64> = 512..=16_777_215;
/// Maximum size of a connection's buffers.
const RECEIVE_MAX: u64 = 262_144;
/// Maximum number of outstanding R2Ts per task.
const R2T_MAX: u64 = 8;
const SECONDS_MAX: u64 = 3600;

/// Returns a value unless it is the default.
fn unless<S: Setting + PartialEq>(
    target: &ExportConfig,
    get: impl Fn(&LoginBounds) -> &S,
) -> Option<Value> {
    get(&target.iscsi.bounds).value_unless(get(&LoginBounds::default()))
}

/// Declares a key for a field of [`LoginBounds`]. The value is written unless it is the default.
macro_rules! bound {
    ($name:literal: $kind:expr; $default:expr; $help:expr; $($path:ident).+) => {
        key! {
            $name: $kind; $default; RunTime::RELOAD; $help;
            set iscsi.bounds.$($path).+; get |target| unless(target, |bounds| &bounds.$($path).+)
        }
    };
}

/// All login keys.
pub static TARGET_KEYS: &[ExportKey] = &[
    bound! { "header_digest": DigestOffer::KIND; "`any`";
        "checksum over each header: as the initiator prefers, refused, or required"; offer.header_digest
    },
    bound! { "data_digest": DigestOffer::KIND; "`any`";
        "checksum over the data of each PDU, likewise"; offer.data_digest
    },
    bound! { "max_recv_data_segment_length": Kind::Number("bytes", 512..=RECEIVE_MAX); "`262144`";
        "maximum data of a PDU from an initiator"; offer.max_recv_data_segment_length
    },
    bound! { "max_burst_length": Kind::Number("bytes", LENGTHS); "`16776704`";
        "maximum data of one request (R2T) or sequence"; offer.session.max_burst_length
    },
    bound! { "first_burst_length": Kind::Number("bytes", LENGTHS); "`262144`";
        "maximum unsolicited data from an initiator; at most `max_burst_length`"; offer.session.first_burst_length
    },
    bound! { "max_outstanding_r2t": Kind::Number("requests", 1..=R2T_MAX); "`8`";
        "maximum outstanding data requests (R2T) per command"; offer.session.max_outstanding_r2t
    },
    bound! { "immediate_data": Kind::Boolean; "`true`";
        "initiators may send data in the PDU of their command"; offer.session.immediate_data
    },
    bound! { "initial_r2t": Kind::Boolean; "`false`";
        "initiators send other data only on request"; offer.session.initial_r2t
    },
    bound! { "max_connections": Kind::Number("connections of a session", 1..=16); "`16`";
        "at most `connections_per_session` of the [limits](#limits-of-iscsi-initiators)"; offer.session.max_connections
    },
    bound! { "error_recovery_level": Kind::Number("", 0..=2); "`0`";
        "1: data with a wrong digest is sent again. 2: a session and its commands survive the loss of a connection, for the time \
            of the next two keys, and continue when the initiator has reconnected"; offer.session.error_recovery_level
    },
    bound! { "default_time2wait": Kind::Number("seconds", 0..=SECONDS_MAX); "`0`";
        "minimum time before an initiator reconnects"; offer.session.time_to_wait
    },
    bound! { "default_time2retain": Kind::Number("seconds", 0..=SECONDS_MAX); "`20`";
        "time to reconnect after that"; offer.session.time_to_retain
    },
    bound! { "queue_depth": Kind::Number("commands", 1..=1024); "that of the limits";
        "maximum commands in progress per session (command window); at most `commands_per_session` of the limits"; queue_depth
    },
    key! {
        "chap_algorithms": Kind::Text("names with blanks between them: `sha3-256`, `sha256`, `sha1`, `md5`", ALGORITHMS_ALLOWED);
        "`sha3-256 sha256 sha1 md5`"; RunTime::RELOAD;
        "CHAP algorithms that initiators may use; the first allowed one in the initiator's list is used";
        read |key, reader, target| target.iscsi.bounds.chap_algorithms = read_algorithms(key, reader);
        get |target| algorithms_value(target.iscsi.bounds.chap_algorithms.as_deref())
    },
];

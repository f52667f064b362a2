//! Keys of a target for its logins: limits of negotiation (RFC 7143, 13), and the command window.

use iscsi::negotiation::{DigestOffer, LoginBounds};
use serde_json::Value;

use super::export_keys::ExportKey;
use super::key::{Kind, RunTime};
use super::login_keys::{
    ALGORITHMS, ALGORITHMS_DEFAULT, algorithms_value, login_keys, read_algorithms,
};
use super::model::ExportConfig;
use super::setting::{Choice, Setting, key};

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

/// Declares a key for a field of the offer of a target.
macro_rules! offered {
    ($name:literal: $kind:expr; $default:expr; $help:expr; $($path:ident).+) => {
        bound! { $name: $kind; $default; $help; offer.$($path).+ }
    };
}

/// Keys of logins that disks on targets have, too.
pub static LOGIN_KEYS: &[ExportKey] =
    login_keys!(offered; DigestOffer::KIND, "`any`"; RECEIVE_MAX; "`16776704`"; R2T_MAX, "`8`");

/// All other keys of logins.
pub static TARGET_KEYS: &[ExportKey] = &[
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
        "chap_algorithms": ALGORITHMS; ALGORITHMS_DEFAULT; RunTime::RELOAD;
        "CHAP algorithms that initiators may use; the first allowed one in the initiator's list is used";
        read |key, reader, target| target.iscsi.bounds.chap_algorithms = read_algorithms(key, reader);
        get |target| algorithms_value(target.iscsi.bounds.chap_algorithms.as_deref())
    },
];

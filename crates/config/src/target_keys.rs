//! Keys of a target for its logins: limits of negotiation (RFC 7143, 13), and the command window.

use iscsi::chap::Algorithm as ChapAlgorithm;
use iscsi::negotiation::{DigestOffer, LoginBounds};
use serde_json::Value;

use super::iscsi::IscsiConfig;
use super::key::{self, Key, Kind, RunTime, words};
use super::remote::{ALGORITHMS_ALLOWED, unless_all};
use super::value::Reader;

/// A key of a target that limits its logins.
pub type TargetKey = Key<LoginBounds, IscsiConfig>;

/// RFC 7143, 13.13 and 13.14: 512 to 2^24-1.
const LENGTHS: std::ops::RangeInclusive<u64> = 512..=16_777_215;
/// Maximum size of a connection's buffers.
const RECEIVE_MAX: u64 = 262_144;
/// Maximum number of outstanding R2Ts per task.
const R2T_MAX: u64 = 8;
const SECONDS_MAX: u64 = 3600;

/// The initiator offers digests first; the target selects its preference if permitted (RFC 7143, 6.2.1).
const DIGESTS: [(&str, DigestOffer); 3] = [
    ("any", DigestOffer::PreferNone),
    ("none", DigestOffer::None),
    ("crc32c", DigestOffer::Crc32c),
];

fn digest_word(offer: DigestOffer) -> &'static str {
    let word = DIGESTS.iter().find(|(_, known)| *known == offer);
    word.map_or("any", |(word, _)| word)
}

/// Returns a value unless it is the default.
fn unless<T: PartialEq + Into<Value>>(
    target: &IscsiConfig,
    value: impl Fn(&LoginBounds) -> T,
) -> Option<Value> {
    let bound = value(&target.bounds);
    (bound != value(&LoginBounds::default())).then(|| bound.into())
}

fn number(
    key: &TargetKey,
    reader: &mut Reader<'_, '_>,
    bounds: &mut LoginBounds,
    set: fn(&mut LoginBounds, u32),
) {
    if let Some(at) = key.number(reader) {
        // The ranges of all keys fit.
        set(bounds, at.value as u32);
    }
}

const fn key(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    help: &'static str,
    read: fn(&TargetKey, &mut Reader<'_, '_>, &mut LoginBounds),
    get: fn(&IscsiConfig) -> Option<Value>,
) -> TargetKey {
    key::key(name, kind, default, RunTime::Reload, help, read, get)
}

/// All login keys.
pub static TARGET_KEYS: &[TargetKey] = &[
    key(
        "header_digest",
        Kind::Word(&const { words(&DIGESTS) }),
        "`any`",
        "checksum over each header: as the initiator prefers, refused, or required",
        |key, reader, bounds| {
            if let Some(at) = reader.choice(key.name, &DIGESTS) {
                bounds.offer.header_digest = at.value;
            }
        },
        |target| unless(target, |bounds| digest_word(bounds.offer.header_digest)),
    ),
    key(
        "data_digest",
        Kind::Word(&const { words(&DIGESTS) }),
        "`any`",
        "checksum over the data of each PDU, likewise",
        |key, reader, bounds| {
            if let Some(at) = reader.choice(key.name, &DIGESTS) {
                bounds.offer.data_digest = at.value;
            }
        },
        |target| unless(target, |bounds| digest_word(bounds.offer.data_digest)),
    ),
    key(
        "max_recv_data_segment_length",
        Kind::Number("bytes", 512..=RECEIVE_MAX),
        "`262144`",
        "maximum data of a PDU from an initiator",
        |key, reader, bounds| {
            number(key, reader, bounds, |bounds, value| {
                bounds.offer.max_recv_data_segment_length = value;
            });
        },
        |target| unless(target, |bounds| bounds.offer.max_recv_data_segment_length),
    ),
    key(
        "max_burst_length",
        Kind::Number("bytes", LENGTHS),
        "`16776704`",
        "maximum data of one request (R2T) or sequence",
        |key, reader, bounds| {
            number(key, reader, bounds, |bounds, value| {
                bounds.offer.session.max_burst_length = value;
            });
        },
        |target| unless(target, |bounds| bounds.offer.session.max_burst_length),
    ),
    key(
        "first_burst_length",
        Kind::Number("bytes", LENGTHS),
        "`262144`",
        "maximum unsolicited data from an initiator; at most `max_burst_length`",
        |key, reader, bounds| {
            number(key, reader, bounds, |bounds, value| {
                bounds.offer.session.first_burst_length = value;
            });
        },
        |target| unless(target, |bounds| bounds.offer.session.first_burst_length),
    ),
    key(
        "max_outstanding_r2t",
        Kind::Number("requests", 1..=R2T_MAX),
        "`8`",
        "maximum outstanding data requests (R2T) per command",
        |key, reader, bounds| {
            number(key, reader, bounds, |bounds, value| {
                bounds.offer.session.max_outstanding_r2t = value as u16;
            });
        },
        |target| unless(target, |bounds| bounds.offer.session.max_outstanding_r2t),
    ),
    key(
        "immediate_data",
        Kind::Boolean,
        "`true`",
        "initiators may send data in the PDU of their command",
        |key, reader, bounds| {
            if let Some(at) = reader.boolean(key.name) {
                bounds.offer.session.immediate_data = at.value;
            }
        },
        |target| unless(target, |bounds| bounds.offer.session.immediate_data),
    ),
    key(
        "initial_r2t",
        Kind::Boolean,
        "`false`",
        "initiators send other data only on request",
        |key, reader, bounds| {
            if let Some(at) = reader.boolean(key.name) {
                bounds.offer.session.initial_r2t = at.value;
            }
        },
        |target| unless(target, |bounds| bounds.offer.session.initial_r2t),
    ),
    key(
        "max_connections",
        Kind::Number("connections of a session", 1..=16),
        "`16`",
        "at most `connections_per_session` of the [limits](#limits-of-iscsi-initiators)",
        |key, reader, bounds| {
            number(key, reader, bounds, |bounds, value| {
                bounds.offer.session.max_connections = value as u16;
            });
        },
        |target| unless(target, |bounds| bounds.offer.session.max_connections),
    ),
    key(
        "error_recovery_level",
        Kind::Number("", 0..=2),
        "`0`",
        "1: data with a wrong digest is sent again. 2: a session and its commands survive the loss of a connection, for the time \
            of the next two keys, and continue when the initiator has reconnected",
        |key, reader, bounds| {
            number(key, reader, bounds, |bounds, value| {
                bounds.offer.session.error_recovery_level = value as u8;
            });
        },
        |target| unless(target, |bounds| bounds.offer.session.error_recovery_level),
    ),
    key(
        "default_time2wait",
        Kind::Number("seconds", 0..=SECONDS_MAX),
        "`0`",
        "minimum time before an initiator reconnects",
        |key, reader, bounds| {
            number(key, reader, bounds, |bounds, value| {
                bounds.offer.session.time_to_wait = value as u16;
            });
        },
        |target| unless(target, |bounds| bounds.offer.session.time_to_wait),
    ),
    key(
        "default_time2retain",
        Kind::Number("seconds", 0..=SECONDS_MAX),
        "`20`",
        "time to reconnect after that",
        |key, reader, bounds| {
            number(key, reader, bounds, |bounds, value| {
                bounds.offer.session.time_to_retain = value as u16;
            });
        },
        |target| unless(target, |bounds| bounds.offer.session.time_to_retain),
    ),
    key(
        "queue_depth",
        Kind::Number("commands", 1..=1024),
        "that of the limits",
        "maximum commands in progress per session (command window); at most `commands_per_session` of the limits",
        |key, reader, bounds| {
            number(key, reader, bounds, |bounds, value| {
                bounds.queue_depth = Some(value);
            });
        },
        |target| target.bounds.queue_depth.map(Value::from),
    ),
    key(
        "chap_algorithms",
        Kind::Text(
            "names with blanks between them: `sha3-256`, `sha256`, `sha1`, `md5`",
            ALGORITHMS_ALLOWED,
        ),
        "`sha3-256 sha256 sha1 md5`",
        "CHAP algorithms that initiators may use; the first allowed one in the initiator's list is used",
        |key, reader, bounds| {
            let Some(text) = key.text(reader) else {
                return;
            };
            match ChapAlgorithm::parse_list(&text.value) {
                Some(algorithms) => bounds.chap_algorithms = unless_all(algorithms),
                None => key.refuse(reader, &text),
            }
        },
        |target| {
            let algorithms = target.bounds.chap_algorithms.as_ref()?;
            Some(Value::from(ChapAlgorithm::list(algorithms)))
        },
    ),
];

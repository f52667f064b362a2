//! Validity period of X.509 certificates (RFC 5280, 4.1.2.5). rustls checks the certificates of peers, but not the own one.

use rustls::pki_types::CertificateDer;

const SEQUENCE: u8 = 0x30;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
/// Tag of the version, which version 1 omits.
const VERSION: u8 = 0xa0;

/// Period of validity of a chain of certificates, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// First second.
    pub not_before: i64,
    /// Last second.
    pub not_after: i64,
}

impl Validity {
    /// Returns the common period of validity of all certificates; `None` if one cannot be parsed.
    pub(crate) fn of_chain(chain: &[CertificateDer<'_>]) -> Option<Validity> {
        let all = chain.iter().map(|one| Validity::of(one));
        all.reduce(|a, b| {
            let (a, b) = (a?, b?);
            Some(Validity {
                not_before: a.not_before.max(b.not_before),
                not_after: a.not_after.min(b.not_after),
            })
        })?
    }

    fn of(certificate: &[u8]) -> Option<Validity> {
        let (certificate, _) = element(certificate, SEQUENCE)?;
        let (mut fields, _) = element(certificate, SEQUENCE)?;
        if fields.first() == Some(&VERSION) {
            fields = after_first(fields)?;
        }
        // Serial number, signature algorithm, issuer.
        for _ in 0..3 {
            fields = after_first(fields)?;
        }
        let (period, _) = element(fields, SEQUENCE)?;
        let (not_before, rest) = time(period)?;
        let (not_after, _) = time(rest)?;
        Some(Validity {
            not_before,
            not_after,
        })
    }

    /// Returns the reason why the certificates are not valid at `now`, in seconds since 1970.
    pub fn fault_at(&self, now: i64) -> Option<String> {
        let days = |seconds: i64| match seconds / 86400 {
            0 => "less than a day".to_owned(),
            1 => "1 day".to_owned(),
            days => format!("{days} days"),
        };
        if now > self.not_after {
            let ago = days(now - self.not_after);
            return Some(format!("the certificate expired {ago} ago"));
        }
        (now < self.not_before).then(|| {
            let until = days(self.not_before - now);
            format!("the certificate is not valid yet: it will be in {until}")
        })
    }
}

/// Splits a DER element into its tag, its content, and the bytes that follow it.
fn split(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = bytes.split_first()?;
    let (&first, mut rest) = rest.split_first()?;
    let mut length = usize::from(first);
    if first >= 0x80 {
        let (digits, after) = rest.split_at_checked(usize::from(first & 0x7f))?;
        if digits.len() > 4 {
            return None;
        }
        length = digits
            .iter()
            .fold(0, |length, digit| length << 8 | usize::from(*digit));
        rest = after;
    }
    let (content, rest) = rest.split_at_checked(length)?;
    Some((tag, content, rest))
}

/// Returns the content of an element with this tag, and the bytes that follow it.
fn element(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (found, content, rest) = split(bytes)?;
    (found == tag).then_some((content, rest))
}

/// Returns the bytes after the first element.
fn after_first(bytes: &[u8]) -> Option<&[u8]> {
    split(bytes).map(|(_, _, rest)| rest)
}

/// Parses a time. Returns it in seconds since 1970, and the bytes that follow it.
fn time(bytes: &[u8]) -> Option<(i64, &[u8])> {
    let (tag, content, rest) = split(bytes)?;
    let text = std::str::from_utf8(content).ok()?.strip_suffix('Z')?;
    let year_digits = match tag {
        UTC_TIME => 2,
        GENERALIZED_TIME => 4,
        _ => return None,
    };
    if text.len() != year_digits + 10 || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let (year, others) = text.split_at(year_digits);
    let mut year: i64 = year.parse().ok()?;
    if tag == UTC_TIME {
        year += if year < 50 { 2000 } else { 1900 };
    }
    let pair = |at: usize| others.get(2 * at..2 * at + 2)?.parse::<i64>().ok();
    let days = days_since_1970(year, pair(0)?, pair(1)?);
    let seconds = pair(2)? * 3600 + pair(3)? * 60 + pair(4)?;
    Some((days * 86400 + seconds, rest))
}

/// Returns the number of days from 1970-01-01 to a date of the Gregorian calendar.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    // Years begin in March, so that the leap day is the last one.
    let year = if month <= 2 { year - 1 } else { year };
    let month = (month + 9) % 12;
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    365 * year + leap_days + (153 * month + 2) / 5 + day - 1 - 719_468
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn element_of(tag: u8, content: &[u8]) -> Vec<u8> {
        let length = content.len() as u16;
        let mut bytes = vec![tag, 0x82];
        bytes.extend(length.to_be_bytes());
        bytes.extend(content);
        bytes
    }

    #[test]
    fn both_forms_of_time_are_read() {
        for (tag, text, seconds) in [
            (UTC_TIME, "700101000000Z", 0),
            (UTC_TIME, "261130104500Z", 1_796_035_500),
            (UTC_TIME, "491231235959Z", 2_524_607_999),
            (UTC_TIME, "500101000000Z", -631_152_000),
            (GENERALIZED_TIME, "20000301000000Z", 951_868_800),
            (GENERALIZED_TIME, "99991231235959Z", 253_402_300_799),
        ] {
            let bytes = element_of(tag, text.as_bytes());
            assert_eq!(time(&bytes), Some((seconds, &[][..])), "{text}");
        }
        for text in ["2611301045Z", "261130104500", "2611301045+0Z"] {
            assert_eq!(time(&element_of(UTC_TIME, text.as_bytes())), None);
        }
    }

    #[test]
    fn malformed_certificates_have_no_validity() {
        let period = [
            element_of(UTC_TIME, b"260101000000Z"),
            element_of(UTC_TIME, b"270101000000Z"),
        ];
        let period = element_of(SEQUENCE, &period.concat());
        let others = [2, SEQUENCE, SEQUENCE].map(|tag| element_of(tag, &[1]));
        let fields = [others.concat(), period].concat();
        let whole = element_of(SEQUENCE, &element_of(SEQUENCE, &fields));
        let found = Validity::of(&whole).unwrap();
        assert_eq!(found.not_after - found.not_before, 365 * 86400);
        assert!((0..whole.len()).all(|length| Validity::of(&whole[..length]).is_none()));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), tag in any::<u8>()) {
            Validity::of(&bytes);
            // Well-formed elements around them reach the inner parts.
            let inner = [element_of(2, &[1]), element_of(tag, &bytes), element_of(SEQUENCE, &bytes)].concat();
            Validity::of(&element_of(SEQUENCE, &element_of(SEQUENCE, &inner)));
            for tag in [UTC_TIME, GENERALIZED_TIME] {
                time(&element_of(tag, &bytes));
            }
        }

        #[test]
        fn no_digits_panic(text in "[0-9]{12}([0-9]{2})?Z") {
            for tag in [UTC_TIME, GENERALIZED_TIME] {
                time(&element_of(tag, text.as_bytes()));
            }
        }
    }

    #[test]
    fn fault_states_the_distance_in_days() {
        let validity = Validity {
            not_before: 86400,
            not_after: 10 * 86400,
        };
        assert_eq!(validity.fault_at(5 * 86400), None);
        let expired = validity.fault_at(12 * 86400 + 5).unwrap();
        assert_eq!(expired, "the certificate expired 2 days ago");
        let early = validity.fault_at(10).unwrap();
        assert!(early.ends_with("it will be in less than a day"), "{early}");
    }
}

//! Validity period of X.509 certificates (RFC 5280, 4.1.2.5). rustls checks the certificates of peers, but not the own one.

use std::time::Duration;

use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, Error, RootCertStore};

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
        let all = chain.iter().map(Validity::of);
        all.reduce(|a, b| {
            let (a, b) = (a?, b?);
            Some(Validity {
                not_before: a.not_before.max(b.not_before),
                not_after: a.not_after.min(b.not_after),
            })
        })?
    }

    /// Returns the period of one certificate. rustls has no function for it, but reports the limit that a time exceeds, before it looks
    /// for an issuer.
    fn of(certificate: &CertificateDer<'_>) -> Option<Validity> {
        let certificate = ParsedCertificate::try_from(certificate).ok()?;
        let fault_at = |seconds| {
            let now = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
            let no_roots = RootCertStore::empty();
            let checked =
                verify_server_cert_signed_by_trust_anchor(&certificate, &no_roots, &[], now, &[]);
            match checked {
                Err(Error::InvalidCertificate(fault)) => Some(fault),
                _ => None,
            }
        };
        let not_before = match fault_at(0)? {
            CertificateError::NotValidYetContext { not_before, .. } => not_before.as_secs(),
            _ => 0,
        };
        let CertificateError::ExpiredContext { not_after, .. } = fault_at(u64::MAX)? else {
            return None;
        };
        Some(Validity {
            not_before: i64::try_from(not_before).ok()?,
            not_after: i64::try_from(not_after.as_secs()).ok()?,
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

#[cfg(test)]
mod tests {
    use rustls::pki_types::pem::PemObject;

    use super::*;
    use crate::testing::Authority;

    #[test]
    fn changed_certificates_have_no_other_period() {
        let folder = tempfile::tempdir().unwrap();
        let ca = Authority::new(folder.path(), "ca").unwrap();
        let whole = CertificateDer::from_pem_file(ca.certificate()).unwrap();
        let found = Validity::of_chain(std::slice::from_ref(&whole)).unwrap();
        assert_eq!(found.not_after - found.not_before, 2 * 86400);
        let of = |bytes: &[u8]| Validity::of_chain(&[whole.clone(), CertificateDer::from(bytes)]);
        assert_eq!(of(&whole), Some(found));
        assert!((0..whole.len()).all(|length| of(&whole[..length]).is_none()));
        for at in 0..whole.len() {
            let mut changed = whole.to_vec();
            changed[at] ^= 0xff;
            // No digit remains one.
            assert!(
                of(&changed).is_none_or(|period| period == found),
                "byte {at}"
            );
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

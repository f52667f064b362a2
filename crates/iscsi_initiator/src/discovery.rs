//! Discovery of targets with SendTargets (RFC 7143, appendix C).

use crate::session::{Session, SessionError, SessionOptions};
use crate::unit::printable;
use iscsi::address::Portal;

/// A discovered target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundTarget {
    /// iSCSI name of the target.
    pub name: String,
    /// Addresses `HOST:PORT,GROUP` from the target; empty means the queried portal.
    pub addresses: Vec<String>,
}

/// Queries a portal for all targets that this initiator may log in to.
///
/// # Errors
/// The reason for a missing answer.
pub fn discover(
    portal: &Portal,
    options: &SessionOptions,
) -> Result<Vec<FoundTarget>, SessionError> {
    let mut session = Session::discovery(portal, options)?;
    let text = session.text(b"SendTargets=All\0")?;
    session.logout()?;
    Ok(targets_of(&text))
}

fn targets_of(text: &[u8]) -> Vec<FoundTarget> {
    let mut targets: Vec<FoundTarget> = Vec::new();
    for pair in text.split(|byte| *byte == 0) {
        let pair = printable(pair);
        match (pair.split_once('='), targets.last_mut()) {
            (Some(("TargetName", name)), _) => targets.push(FoundTarget {
                name: name.to_owned(),
                addresses: Vec::new(),
            }),
            (Some(("TargetAddress", address)), Some(target)) => {
                target.addresses.push(address.to_owned());
            }
            _ => {}
        }
    }
    targets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_belong_to_the_target_before_them() {
        let text = b"TargetName=iqn.a:1\0TargetAddress=192.0.2.1:3260,1\0TargetAddress=[::1]:3260,2\0TargetName=iqn.a:2\0";
        let found = targets_of(text);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].addresses, ["192.0.2.1:3260,1", "[::1]:3260,2"]);
        assert_eq!(
            (found[1].name.as_str(), found[1].addresses.len()),
            ("iqn.a:2", 0)
        );
        assert!(targets_of(b"TargetAddress=x\0=\0\0").is_empty());
    }
}

//! Finds the target of a connection from its first bytes.
//!
//! The first Login Request of a connection carries TargetName (RFC 7143, 13.4). This module only peeks at it, before the
//! connection's protocol state exists. Errors in the request are reported later, when it is processed.

use crate::pdu::{BHS_LENGTH, Opcode};
use crate::text;

/// The longest data segment before a negotiation (RFC 7143, 13.12).
const DATA_MAX: usize = 8192;
/// Mask of the opcode in byte 0; the other bits are flags.
const OPCODE_MASK: u8 = 0x3f;

/// Maximum number of bytes that [`first_target`] examines.
pub const FIRST_BYTES_MAX: usize = BHS_LENGTH + 255 * 4 + DATA_MAX;

/// Result of examining the first bytes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstTarget<'a> {
    /// The request is not complete yet.
    Incomplete,
    /// The target's name as the initiator spelled it.
    Named(&'a str),
    /// No target is named: a discovery session, or not a Login Request.
    None,
}

/// Examines the first bytes of a connection.
pub fn first_target(bytes: &[u8]) -> FirstTarget<'_> {
    match bytes.first() {
        None => return FirstTarget::Incomplete,
        Some(first) if first & OPCODE_MASK != Opcode::LoginRequest as u8 => {
            return FirstTarget::None;
        }
        Some(_) => {}
    }
    let Some(header) = bytes.get(..BHS_LENGTH) else {
        return FirstTarget::Incomplete;
    };
    let data_length = u32::from_be_bytes([0, header[5], header[6], header[7]]) as usize;
    if data_length > DATA_MAX {
        return FirstTarget::None;
    }
    let data = BHS_LENGTH + usize::from(header[4]) * 4;
    let Some(data) = bytes.get(data..data + data_length) else {
        return FirstTarget::Incomplete;
    };
    let pairs = text::parse(data).unwrap_or_default();
    let name = pairs.iter().find(|pair| pair.key == "TargetName");
    name.map_or(FirstTarget::None, |pair| FirstTarget::Named(pair.value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn login(text: &str) -> Vec<u8> {
        let mut bytes = vec![0; BHS_LENGTH];
        bytes[0] = 0x43;
        bytes[5..8].copy_from_slice(&(text.len() as u32).to_be_bytes()[1..]);
        bytes.extend_from_slice(text.as_bytes());
        bytes
    }

    #[test]
    fn first_login_request_names_the_target() {
        let bytes = login(
            "InitiatorName=iqn.2026-11.org.example:i\0TargetName=iqn.2026-11.org.example:t0\0",
        );
        let named = FirstTarget::Named("iqn.2026-11.org.example:t0");
        assert_eq!(first_target(&bytes), named);
        for length in 0..bytes.len() {
            assert_eq!(first_target(&bytes[..length]), FirstTarget::Incomplete);
        }
    }

    #[test]
    fn login_without_a_target_name_is_not_awaited() {
        assert_eq!(
            first_target(&login("SessionType=Discovery\0")),
            FirstTarget::None
        );
        assert_eq!(first_target(b"GET / HTTP/1.1"), FirstTarget::None);
        let mut long = login("");
        long[5] = 1;
        assert_eq!(first_target(&long), FirstTarget::None);
        assert_eq!(first_target(&login("no pair at all")), FirstTarget::None);
    }
}

//! The login phase, both sides (RFC 7143, 6.3), and what a target's owner decides in it.

mod authenticate;
mod initiator;
mod policy;
mod target;

pub use initiator::{
    Credentials, InitiatorLogin, LoginError, LoginProgress, LoginRequestSettings, LoginResult,
};
pub use policy::{Admission, ChapUser, Refusal, SendTargets, TargetPolicy, TargetRecord, Visitor};
pub use target::{LoggedIn, LoginOutcome, LoginReply, TargetLogin};

/// The longest iSCSI name (RFC 7143, 4.2.7.2).
pub const NAME_MAX: usize = 223;

/// Can this be an iSCSI name? Form only: prefix, length, characters.
pub fn is_iscsi_name(name: &str) -> bool {
    let prefix = ["iqn.", "eui.", "naa."]
        .iter()
        .any(|prefix| name.starts_with(prefix));
    prefix
        && name.len() <= NAME_MAX
        && name
            .chars()
            .all(|c| !c.is_control() && !c.is_whitespace() && c != ',')
}

//! The login phase of both sides (RFC 7143, 6.3), and the policy interface of a target.

mod authenticate;
mod first;
mod initiator;
mod policy;
mod target;

pub use authenticate::ChapFailure;
pub use first::{FIRST_BYTES_MAX, FirstTarget, first_target};
pub use initiator::{
    ChapProgress, Credentials, InitiatorLogin, LoginError, LoginProgress, LoginRequestSettings,
    LoginResult,
};
pub use iscsi_name::{NAME_MAX, is_iscsi_name};
pub use policy::{Admission, ChapUser, Refusal, SendTargets, TargetPolicy, TargetRecord, Visitor};
pub use target::{LoggedIn, LoginOutcome, LoginReply, TargetLogin};

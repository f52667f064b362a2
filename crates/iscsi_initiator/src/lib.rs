//! An iSCSI initiator for programs that wait for their commands: discovery, sessions with one to sixteen connections (MC/S),
//! and logical units with the commands of SPC and SBC that disks need.
//!
//! [`Session`] moves bytes between sockets and the sans-IO session of crate `iscsi`, which checks what a target sends. A command goes by the
//! connection that has the fewest commands in flight. Nothing waits longer than [`SessionOptions::timeout`] for a target that is silent.
//! Error recovery level 0: a connection that is lost ends the session. [`ReconnectingUnit`] logs in again, for programs that serve a unit on.
#![forbid(unsafe_code)]

mod access_state;
mod address;
mod attended;
mod chap_fallback;
mod credentials;
mod discovery;
mod installation;
mod link;
mod properties;
mod reconnecting;
mod recovery;
mod reservations;
mod sense;
mod session;
mod unit;
mod unit_identity;
mod unit_info;

pub use address::{Lun, Portal, UnitAddress};
pub use chap_fallback::ChapMemory;
pub use credentials::{LineSecrets, equal_secrets, read_credentials, read_private, secrets_of};
pub use discovery::{FoundTarget, discover};
pub use installation::{
    Installation, ReservedIsid, default_state_folder, installation, is_identity_text,
    set_state_folder,
};
pub use iscsi::chap::Algorithm as ChapAlgorithm;
pub use iscsi::initiator::CommandDone;
pub use iscsi::login::is_iscsi_name;
pub use iscsi::negotiation::{DigestOffer, SessionParameters};
pub use properties::UnitProperties;
pub use reconnecting::{
    CommandSink, Ended, ReconnectSettings, ReconnectingUnit, UnitCommand, UnitEvent, UnitObserver,
    carry_out, is_change,
};
pub use reservations::{ReservationKind, ReservationStatus};
pub use sense::Sense;
pub use session::{Session, SessionError, SessionOptions, random_isid};
pub use unit::{
    CommandError, Extent, LunList, ReportedLun, Unit, cdb16, checked, luns, parse_extents,
};
pub use unit_identity::{Evidence, UnitIdentity};
pub use unit_info::{Ask, Sameness, UnitInfo};

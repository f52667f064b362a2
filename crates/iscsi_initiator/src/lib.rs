//! A synchronous iSCSI initiator: discovery, sessions with one to sixteen connections (MC/S), and logical units with the
//! SPC and SBC commands for disks.
//!
//! [`Session`] moves bytes between sockets and the I/O-free session of crate `iscsi`, which validates all input from a
//! target. A command uses the connection with the fewest commands in flight. Waiting for a silent target is limited by
//! [`SessionOptions::timeout`]. At error recovery level 0 a lost connection ends the session. [`ReconnectingUnit`] logs in
//! again, for programs that serve a unit continuously.
#![forbid(unsafe_code)]

mod access_state;
mod attended;
mod chap_fallback;
mod credentials;
mod discovery;
mod installation;
mod known_units;
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

pub use chap_fallback::ChapMemory;
pub use credentials::{LineSecrets, equal_secrets, read_credentials, read_private, secrets_of};
pub use discovery::{FoundTarget, discover};
pub use installation::{
    Installation, ReservedIsid, default_state_folder, installation, is_identity_text,
    set_state_folder,
};
pub use iscsi::address::{Lun, Portal, UnitAddress};
pub use iscsi::chap::Algorithm as ChapAlgorithm;
pub use iscsi::initiator::CommandDone;
pub use iscsi::login::is_iscsi_name;
pub use iscsi::negotiation::{DigestOffer, SessionParameters};
pub use known_units::KnownUnits;
pub use link::connect_tcp;
pub use properties::UnitProperties;
pub use reconnecting::{
    CommandSink, Ended, ReconnectSettings, ReconnectingUnit, UnitCommand, UnitEvent, UnitObserver,
    carry_out, is_change,
};
pub use reservations::{ReservationKind, ReservationStatus};
pub use sense::Sense;
pub use session::{Session, SessionError, SessionOptions, random_isid};
pub use unit::{CommandError, Extent, LunList, ReportedLun, Unit, checked, luns, parse_extents};
pub use unit_identity::{Evidence, UnitIdentity};
pub use unit_info::{ExecuteCommand, Sameness, UnitInfo};

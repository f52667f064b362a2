//! The part of the request path that virtqueues and iSCSI connections share.
//!
//! The code is generic over the transport and monomorphised: no call per request goes through a table, and nothing here allocates or locks
//! per request. `docs/adr/0013-one-request-engine.md` lists the parts that are here and those that the transports implement.

#![forbid(unsafe_code)]

mod measurement;
mod pace;

pub use measurement::Measurement;
pub use pace::Pace;

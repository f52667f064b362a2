//! `lunette iscsi`: an initiator that queries targets and copies disks without a kernel driver.

mod arguments;
mod copy;
mod ends;
mod look;
mod persist;
mod whole_blocks;

pub use arguments::IscsiArguments;

use arguments::Action;
use cli_common::{Failure, Outcome};
use iscsi_initiator::{Session, SessionOptions, Unit, UnitAddress};

pub fn run(arguments: IscsiArguments) -> Outcome {
    match arguments.action {
        Action::Discover {
            portal,
            user,
            login,
            json,
        } => look::targets(&portal, &login.options(user.as_deref())?, json),
        Action::Luns {
            target,
            login,
            json,
        } => look::units(&target, &login, json),
        Action::Inquiry { unit, login, json } => {
            let options = login.options(unit.user.as_deref())?;
            look::unit(&unit, &options, json)
        }
        Action::Parameters {
            target,
            login,
            json,
        } => look::parameters(&target, &login, json),
        Action::Ping {
            target,
            count,
            interval,
            login,
        } => look::ping(&target, count, interval, &login),
        Action::Copy(transfer) => copy::copy(&transfer),
        Action::Verify(transfer) => copy::verify(&transfer),
        Action::Persist {
            unit,
            action,
            login,
        } => {
            let options = login.options(unit.user.as_deref())?;
            persist::run(&unit, &options, &action)
        }
    }
}

/// Converts an error to a failure.
fn because(error: impl std::fmt::Display) -> Failure {
    Failure::because(error.to_string())
}

/// Opens a logical unit in a new session.
fn open(address: &UnitAddress, options: &SessionOptions) -> Result<Unit, Failure> {
    let session = Session::login(&address.portal, &address.target, options).map_err(because)?;
    let place = || format!("LUN {} of {}", address.lun, address.target);
    Unit::open(session, address.lun)
        .map_err(|error| Failure::because(format!("{}: {error}", place())))
}

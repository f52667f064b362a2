//! Commands for a LUN without a logical unit: a missing one, or the well-known one.
//!
//! A missing logical unit supports INQUIRY, REPORT LUNS and REQUEST SENSE, and answers LOGICAL UNIT NOT SUPPORTED to all other commands
//! (SPC-5, 6.7.1 and 6.39). The well-known logical unit REPORT LUNS also supports TEST UNIT READY.

use super::inquiry::{Peripheral, checked_evpd, standard};
use super::report_luns;
use super::request_sense::descriptor_format;
use super::vital_product_data::{DEVICE_IDENTIFICATION, framed, well_known_identification};
use crate::command::{Cdb, Command, be16, opcode::*};
use crate::lun::LunAddress;
use crate::nexus::TargetPort;
use crate::plan::{Answering, Plan};
use crate::response::Response;
use crate::sense::{Sense, SenseCode, SenseKey};
use crate::target::Target;

/// Object addressed by a LUN without a logical unit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AddressedObject {
    MissingLun,
    ReportLunsUnit,
}

#[cold]
pub(crate) fn begin_without_unit(target: &Target, command: &Command<'_>, cdb: &Cdb) -> Plan {
    let stand = match command.lun.address() {
        LunAddress::ReportLuns => AddressedObject::ReportLunsUnit,
        LunAddress::Unit(_) | LunAddress::Unknown => AddressedObject::MissingLun,
    };
    let response = stand
        .check_serves(cdb[0])
        .and_then(|()| super::check_cdb(cdb, command.cdb.len()))
        .and_then(|()| match cdb[0] {
            INQUIRY => stand.inquiry(command.nexus.port(), cdb),
            REQUEST_SENSE => Ok(stand.request_sense(cdb)),
            REPORT_LUNS => report_luns::current(target, command.nexus, cdb),
            _ => Ok(Response::good()),
        })
        .unwrap_or_else(Response::check);
    let answering = Answering {
        expected_in: command.data_in_length,
        expected_out: command.data_out_length,
        wanted_out: 0,
        descriptor_sense: false,
    };
    Plan::Done(answering.finish(response))
}

impl AddressedObject {
    fn peripheral(&self) -> Peripheral {
        match self {
            AddressedObject::MissingLun => Peripheral::Missing,
            AddressedObject::ReportLunsUnit => Peripheral::WellKnown,
        }
    }

    /// Returns the vital product data pages in ascending order.
    fn pages(&self) -> &'static [u8] {
        match self {
            AddressedObject::MissingLun => &[0x00],
            AddressedObject::ReportLunsUnit => &[0x00, DEVICE_IDENTIFICATION],
        }
    }

    fn inquiry(&self, port: &TargetPort, cdb: &Cdb) -> Result<Response, Sense> {
        let data = match (checked_evpd(cdb)?, cdb[2]) {
            (false, _) => standard(self.peripheral(), false, port),
            (true, 0x00) => framed(self.peripheral(), 0x00, self.pages()),
            (true, DEVICE_IDENTIFICATION) if *self == AddressedObject::ReportLunsUnit => {
                well_known_identification(port)
            }
            (true, _) => return Err(Sense::cdb_field(2)),
        };
        Ok(Response::data(data, be16(cdb, 3).into()))
    }

    fn request_sense(&self, cdb: &Cdb) -> Response {
        let sense = match self {
            AddressedObject::MissingLun => {
                Sense::illegal_request(SenseCode::LOGICAL_UNIT_NOT_SUPPORTED)
            }
            AddressedObject::ReportLunsUnit => Sense::new(SenseKey::NoSense, SenseCode::NONE),
        };
        let sense = Sense {
            descriptor_format: descriptor_format(cdb[1]),
            ..sense
        };
        Response::data(sense.encode().to_vec(), cdb[4].into())
    }

    fn check_serves(&self, opcode: u8) -> Result<(), Sense> {
        match (self, opcode) {
            (_, INQUIRY | REQUEST_SENSE | REPORT_LUNS) => Ok(()),
            (AddressedObject::ReportLunsUnit, TEST_UNIT_READY) => Ok(()),
            (AddressedObject::ReportLunsUnit, _) => {
                Err(Sense::illegal_request(SenseCode::INVALID_OPCODE))
            }
            (AddressedObject::MissingLun, _) => Err(Sense::illegal_request(
                SenseCode::LOGICAL_UNIT_NOT_SUPPORTED,
            )),
        }
    }
}

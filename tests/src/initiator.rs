//! An iSCSI session over one TCP connection, one command at a time.

use anyhow::{Result, bail};
use iscsi::initiator::{CommandDone, Initiator};
use iscsi::negotiation::Offer;
use iscsi_initiator::{Lun, Session, SessionOptions};

/// A session in the full feature phase.
pub struct IscsiSession(Session);

impl IscsiSession {
    /// Logs in as initiator `number` and consumes the unit attentions of a new I_T nexus.
    pub fn login(portal: &str, target: &str, number: u16) -> Result<IscsiSession> {
        let mut session = IscsiSession::login_only(portal, target, number)?;
        for _ in 0..4 {
            if session.command(&[0; 6], None, 0)?.status == 0 {
                return Ok(session);
            }
        }
        bail!("the unit stays not ready")
    }

    /// Logs in. Unit attentions are left for the first commands.
    pub fn login_only(portal: &str, target: &str, number: u16) -> Result<IscsiSession> {
        let [high, low] = number.to_be_bytes();
        let options = SessionOptions {
            initiator_name: Some(format!("iqn.2026-11.org.example:i{number}")),
            isid: Some([0x80, 0, 0, 0, high, low]),
            offer: Offer::default(),
            ..SessionOptions::default()
        };
        let portal = portal.parse().map_err(anyhow::Error::msg)?;
        Ok(IscsiSession(Session::login(&portal, target, &options)?))
    }

    /// Executes a command on LUN 0.
    pub fn command(&mut self, cdb: &[u8], out: Option<&[u8]>, into: u32) -> Result<CommandDone> {
        self.command_on(0, cdb, out, into)
    }

    /// Executes a command on a LUN below 256.
    pub fn command_on(
        &mut self,
        lun: u8,
        cdb: &[u8],
        out: Option<&[u8]>,
        into: u32,
    ) -> Result<CommandDone> {
        let lun = Lun::Number(lun.into()).standard_field();
        let request = match out {
            Some(data) => Initiator::write(lun, cdb, data.to_vec()),
            None => Initiator::read(lun, cdb, into),
        };
        Ok(self.0.run(request)?)
    }
}

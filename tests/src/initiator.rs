//! An iSCSI session over one TCP connection, one command at a time.

use anyhow::{Context, Result, bail, ensure};
use iscsi::initiator::{CommandDone, Event, Initiator, InitiatorSettings};
use iscsi::negotiation::Offer;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Far above what a command takes.
const LIMIT: Duration = Duration::from_secs(30);

/// A session that is logged in.
pub struct IscsiSession {
    initiator: Initiator,
    stream: TcpStream,
    cid: u16,
}

impl IscsiSession {
    /// Logs in to a target as the initiator with this number, and takes what a new nexus is told.
    pub fn login(portal: &str, target: &str, number: u16) -> Result<IscsiSession> {
        let mut session = IscsiSession::login_only(portal, target, number)?;
        for _ in 0..4 {
            if session.command(&[0; 6], None, 0)?.status == 0 {
                return Ok(session);
            }
        }
        bail!("the unit stays not ready")
    }

    /// Logs in; whatever the unit has to tell comes with the first commands.
    pub fn login_only(portal: &str, target: &str, number: u16) -> Result<IscsiSession> {
        let [high, low] = number.to_be_bytes();
        let mut initiator = Initiator::new(InitiatorSettings {
            initiator_name: format!("iqn.2026-11.org.example:i{number}"),
            target_name: Some(target.to_owned()),
            isid: [0x80, 0, 0, 0, high, low],
            offer: Offer::default(),
            credentials: None,
            first_cmd_sn: 1,
            text_limit: 1 << 16,
        });
        let cid = initiator.connect();
        let stream = TcpStream::connect(portal).context("cannot connect")?;
        stream.set_read_timeout(Some(LIMIT))?;
        let mut session = IscsiSession {
            initiator,
            stream,
            cid,
        };
        while !session.initiator.is_ready(cid) {
            session.turn()?;
        }
        Ok(session)
    }

    /// One command on LUN 0.
    pub fn command(&mut self, cdb: &[u8], out: Option<&[u8]>, into: u32) -> Result<CommandDone> {
        self.command_on(0, cdb, out, into)
    }

    /// One command on a LUN below 256.
    pub fn command_on(
        &mut self,
        lun: u8,
        cdb: &[u8],
        out: Option<&[u8]>,
        into: u32,
    ) -> Result<CommandDone> {
        // SAM-5, 4.7.7.2: peripheral device addressing, the number in the second byte.
        let lun = u64::from(lun) << 48;
        let request = match out {
            Some(data) => Initiator::write(lun, cdb, data.to_vec()),
            None => Initiator::read(lun, cdb, into),
        };
        let itt = self.initiator.command(self.cid, request)?;
        loop {
            for event in self.turn()? {
                match event {
                    Event::Command(done) if done.itt == itt => return Ok(done),
                    Event::Nop { .. } | Event::LoggedIn(_) => {}
                    other => bail!("unexpected: {other:?}"),
                }
            }
        }
    }

    fn turn(&mut self) -> Result<Vec<Event>> {
        let out = std::mem::take(self.initiator.outgoing(self.cid));
        self.stream.write_all(&out)?;
        let mut bytes = [0; 16 << 10];
        let length = self.stream.read(&mut bytes).context("no answer")?;
        ensure!(length > 0, "the target closed the connection");
        Ok(self.initiator.receive(self.cid, &bytes[..length])?)
    }
}

//! Connection reinstatement (RFC 7143, 6.3.4): a new login under the CID of a lost connection. Its tasks end. Their CmdSNs
//! are consumed, because the session's other commands wait for them.

use zerocopy::big_endian::U32;

use super::events::InitiatorError;
use super::requests::{Kind, Task};
use super::session::Initiator;
use crate::pdu::{NopOut, encode};
use crate::serial::before;

impl Initiator {
    /// Starts a login with a CID that was in use. Returns the ITTs of the old tasks, which have ended without a response.
    ///
    /// # Panics
    /// If the connection never existed.
    pub fn reinstate(&mut self, cid: u16) -> Vec<u32> {
        let mine = |task: &&Task| task.cid == cid && task.numbered;
        let gaps = self.tasks.values().filter(mine).map(|task| task.cmd_sn);
        let gaps = gaps.collect();
        let lost = self.lost(cid);
        let mut link = self.login_link(cid);
        link.gaps = gaps;
        self.links[usize::from(cid)] = link;
        lost
    }

    /// Sends a NOP-Out for each CmdSN that the target does not acknowledge, because the target delivers commands without
    /// gaps (4.2.2.1).
    pub(super) fn fill_gaps(&mut self, cid: u16) -> Result<(), InitiatorError> {
        let mut gaps = std::mem::take(&mut self.link(cid)?.gaps);
        gaps.retain(|number| !before(*number, self.exp_cmd_sn));
        for number in gaps {
            let itt = self.take_itt();
            let link = self.link(cid)?;
            let mut header = NopOut::idle();
            header.itt = U32::new(itt);
            header.cmd_sn = U32::new(number);
            header.exp_stat_sn = U32::new(link.exp_stat_sn);
            encode(&mut link.out, header.to_bhs(), &[], &[], link.digests);
            let task = Task {
                cid,
                kind: Kind::Nop,
                cmd_sn: number,
                numbered: true,
                lun: [0; 8],
            };
            self.tasks.insert(itt, task);
        }
        Ok(())
    }
}

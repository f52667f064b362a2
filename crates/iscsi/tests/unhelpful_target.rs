//! Targets that agree to error recovery but do not support it: the initiator's output stays bounded, and a task that the
//! target may still execute is never returned for repetition.
#![forbid(unsafe_code)]

use iscsi::initiator::{Event, Initiator, InitiatorError, InitiatorSettings};
use iscsi::negotiation::Offer;

/// A session of one connection, driven with raw bytes.
struct Session {
    initiator: Initiator,
    stat_sn: u8,
}

fn settings(level: u8) -> InitiatorSettings {
    let mut offer = Offer::default();
    offer.session.error_recovery_level = level;
    InitiatorSettings {
        initiator_name: "iqn.2026-11.org.example:i".to_owned(),
        target_name: Some("iqn.2026-11.org.example:t".to_owned()),
        isid: [0x80, 0, 0, 0, 0, 1],
        offer,
        credentials: None,
        first_cmd_sn: 1,
        text_limit: 1 << 16,
    }
}

impl Session {
    fn new(level: u8) -> Session {
        let mut session = Session {
            initiator: Initiator::new(settings(level)),
            stat_sn: 0,
        };
        session.initiator.connect();
        session.log_in(level);
        session
    }

    /// Accepts all Login Requests (RFC 7143, 11.13) until none follows.
    fn log_in(&mut self, level: u8) {
        self.stat_sn = 0;
        loop {
            let request = std::mem::take(self.initiator.outgoing(0));
            if request.first().is_none_or(|opcode| opcode & 0x3f != 0x03) {
                // The next PDU on a restored connection is a NOP-Out; see `nop`.
                self.initiator.outgoing(0).extend(request);
                return;
            }
            let mut answer = vec![0; 48];
            (answer[0], answer[1]) = (0x23, request[1]);
            answer[8..14].copy_from_slice(&request[8..14]);
            answer[15] = 1;
            answer[16..20].copy_from_slice(&request[16..20]);
            answer[27] = self.stat_sn;
            // ExpCmdSN and MaxCmdSN.
            (answer[31], answer[35]) = (1, 64);
            if request[1] & 0x0c == 0x04 {
                let text = format!("ErrorRecoveryLevel={level}\0\0\0\0");
                answer[7] = 21;
                answer.extend_from_slice(&text.as_bytes()[..24]);
            }
            self.initiator.receive(0, &answer).expect("a login");
            self.stat_sn += 1;
        }
    }

    /// Sends a target header with its StatSN, followed by data.
    fn answer(
        &mut self,
        opcode: u8,
        itt: &[u8],
        exp_cmd_sn: u8,
        change: impl FnOnce(&mut [u8]),
        segment: &[u8],
    ) -> Result<Vec<Event>, InitiatorError> {
        let mut answer = vec![0; 48];
        (answer[0], answer[1]) = (opcode, 0x80);
        answer[7] = segment.len() as u8;
        answer[16..20].copy_from_slice(itt);
        answer[20..24].fill(0xff);
        answer[27] = self.stat_sn;
        (answer[31], answer[35]) = (exp_cmd_sn, exp_cmd_sn + 63);
        change(&mut answer);
        answer.extend_from_slice(segment);
        self.stat_sn += 1;
        self.initiator.receive(0, &answer)
    }
}

#[test]
fn command_that_is_rejected_without_end_is_sent_a_few_times() {
    let mut session = Session::new(1);
    let write = Initiator::write(0, &[0x8a; 16], vec![1; 4096]);
    let itt = session.initiator.command(0, write).expect("a session");
    let sent = std::mem::take(session.initiator.outgoing(0));
    assert_eq!(sent[16..20], itt.to_be_bytes());
    let mut times = 0;
    // Data (payload) digest error; ExpCmdSN shows that the command was not received.
    let result = loop {
        let reject = |answer: &mut [u8]| answer[2] = 0x02;
        let result = session.answer(0x3f, &[0xff; 4], 1, reject, &sent[..48]);
        if result.is_err() {
            break result;
        }
        times += 1;
        assert!(times < 100);
    };
    assert_eq!(
        (times, result.unwrap_err()),
        (4, InitiatorError::DataDigest)
    );
    assert_eq!(session.initiator.outgoing(0).len(), 4 * sent.len());
}

/// Loses the connection while the target executes a command, restores it, and answers TASK REASSIGN.
fn reassigned_with(response: u8) -> Result<Vec<Event>, InitiatorError> {
    let mut session = Session::new(2);
    let write = Initiator::write(0, &[0x8a; 16], vec![1; 512]);
    session.initiator.command(0, write).expect("a session");
    session.initiator.suspend(0);
    session.initiator.recover(0);
    session.log_in(2);
    let nop = std::mem::take(session.initiator.outgoing(0));
    assert_eq!(nop[0], 0x40, "a NOP-Out for immediate delivery");
    let nothing = |_: &mut [u8]| {};
    session.answer(0x20, &nop[16..20], 2, nothing, &[])?;
    let function = std::mem::take(session.initiator.outgoing(0));
    assert_eq!(function[..2], [0x42, 0x88], "TASK REASSIGN");
    let answer = |answer: &mut [u8]| answer[2] = response;
    session.answer(0x22, &function[16..20], 2, answer, &[])
}

#[test]
fn task_held_by_the_target_is_not_reassigned() {
    assert!(reassigned_with(0).expect("it continues").is_empty());
    let lost = reassigned_with(1).expect("it is not there");
    assert!(matches!(lost[..], [Event::Lost { .. }]), "{lost:?}");
    // Still allegiant, reassignment not supported, rejected.
    for kept in [3, 4, 255] {
        let refused = reassigned_with(kept);
        assert!(
            matches!(refused, Err(InitiatorError::Protocol(_))),
            "{kept}: {refused:?}"
        );
    }
}

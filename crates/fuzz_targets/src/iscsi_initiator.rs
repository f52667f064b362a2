//! Feeds arbitrary bytes as a target's responses to an initiator, in login and in full feature phase, with commands of each kind in
//! flight. Rules: no panic, and no more memory than the commands need.
//!
//! The first byte selects whether a login comes first, and the error recovery level. At level 2 the connection is lost halfway.

use iscsi::initiator::{Initiator, InitiatorSettings};
use iscsi::negotiation::Offer;

/// Builds a Login Response that accepts the stages of a Login Request (RFC 7143, 11.12 and 11.13).
fn login_response(request: &[u8]) -> [u8; 48] {
    let mut header = [0; 48];
    header[0] = 0x23;
    header[1] = request[1];
    header[8..14].copy_from_slice(&request[8..14]);
    header[15] = 1;
    header[16..20].copy_from_slice(&request[16..20]);
    // ExpCmdSN and MaxCmdSN.
    (header[31], header[35]) = (1, 64);
    header
}

/// Feeds `data` to an initiator.
pub fn run(data: &[u8]) {
    let Some((first, data)) = data.split_first() else {
        return;
    };
    let level = first >> 1 & 3;
    let mut offer = Offer::default();
    offer.session.error_recovery_level = level.min(2);
    let agrees = format!("ErrorRecoveryLevel={}\0\0\0\0", level.min(2));
    let mut initiator = Initiator::new(InitiatorSettings {
        initiator_name: "iqn.2026-11.org.example:i".to_owned(),
        target_name: Some("iqn.2026-11.org.example:t".to_owned()),
        isid: [0x80, 0, 0, 0, 0, 1],
        offer,
        credentials: None,
        first_cmd_sn: 1,
        text_limit: 1 << 16,
    });
    let cid = initiator.connect();
    if first & 1 == 1 {
        for number in 0..3 {
            let request = std::mem::take(initiator.outgoing(cid));
            if initiator.is_ready(cid) || request.len() < 48 {
                break;
            }
            let mut answer = login_response(&request).to_vec();
            answer[27] = number;
            // In the operational stage.
            if level > 0 && request[1] & 0x0c == 0x04 {
                answer[7] = 21;
                answer.extend_from_slice(&agrees.as_bytes()[..24]);
            }
            if initiator.receive(cid, &answer).is_err() {
                return;
            }
        }
        if initiator.is_ready(cid) {
            initiator
                .command(cid, Initiator::read(0, &[0x88; 16], 8192))
                .ok();
            initiator
                .command(cid, Initiator::write(0, &[0x8a; 16], vec![1; 100_000]))
                .ok();
            initiator.text(cid, b"SendTargets=All\0").ok();
            initiator.nop_out(cid, vec![2; 32], true).ok();
        }
    }
    for piece in data.chunks(61) {
        if initiator.receive(cid, piece).is_err() {
            if !initiator.recovers() {
                return;
            }
            initiator.suspend(cid);
            initiator.recover(cid);
        }
        // An R2T gets at most the data of its command.
        assert!(initiator.outgoing(cid).len() < 64 << 20);
        if initiator.outgoing(cid).len() > 1 << 20 {
            initiator.outgoing(cid).clear();
        }
    }
}

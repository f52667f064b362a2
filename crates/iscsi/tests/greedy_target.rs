//! A target that requests the same data repeatedly receives it once.
#![forbid(unsafe_code)]

use iscsi::initiator::{Initiator, InitiatorError, InitiatorSettings};
use iscsi::negotiation::Offer;

/// Builds the response that accepts a Login Request (RFC 7143, 11.12 and 11.13), with its stages and its task tag.
fn login_response(request: &[u8], stat_sn: u8) -> [u8; 48] {
    let mut header = [0; 48];
    header[0] = 0x23;
    header[1] = request[1];
    header[8..14].copy_from_slice(&request[8..14]);
    header[15] = 1;
    header[16..20].copy_from_slice(&request[16..20]);
    header[27] = stat_sn;
    // ExpCmdSN and MaxCmdSN.
    (header[31], header[35]) = (1, 64);
    header
}

/// Builds a Ready To Transfer (11.8) for 512 bytes at `offset`.
fn r2t(itt: u32, stat_sn: u8, number: u8, offset: u32) -> [u8; 48] {
    let mut header = [0; 48];
    (header[0], header[1]) = (0x31, 0x80);
    header[16..20].copy_from_slice(&itt.to_be_bytes());
    header[20..24].copy_from_slice(&7u32.to_be_bytes());
    header[27] = stat_sn;
    (header[31], header[35]) = (2, 65);
    header[39] = number;
    header[40..44].copy_from_slice(&offset.to_be_bytes());
    header[44..48].copy_from_slice(&512u32.to_be_bytes());
    header
}

#[test]
fn r2ts_for_more_than_the_data_of_a_command_are_refused() {
    let mut initiator = Initiator::new(InitiatorSettings {
        initiator_name: "iqn.2026-11.org.example:i".to_owned(),
        target_name: Some("iqn.2026-11.org.example:t".to_owned()),
        isid: [0x80, 0, 0, 0, 0, 1],
        offer: Offer::default(),
        credentials: None,
        first_cmd_sn: 1,
        text_limit: 1 << 16,
    });
    let cid = initiator.connect();
    let mut stat_sn = 0;
    while !initiator.is_ready(cid) {
        let request = std::mem::take(initiator.outgoing(cid));
        let answer = login_response(&request, stat_sn);
        initiator.receive(cid, &answer).expect("a login");
        stat_sn += 1;
    }
    // More than the immediate and unsolicited data under the defaults of section 13.
    let request = Initiator::write(0, &[0x8a; 16], vec![1; 65_536 + 1024]);
    let itt = initiator.command(cid, request).expect("a session");
    let unsolicited = initiator.outgoing(cid).len();
    initiator.outgoing(cid).clear();
    assert!(unsolicited > 48, "{unsolicited}");
    let mut refused = None;
    for number in 0..200 {
        let again = r2t(itt, stat_sn, number, 65_536);
        if let Err(error) = initiator.receive(cid, &again) {
            refused = Some(error);
            break;
        }
    }
    assert!(
        matches!(refused, Some(InitiatorError::Protocol(_))),
        "{refused:?}"
    );
    assert!(initiator.outgoing(cid).len() < 200 * 512);
}

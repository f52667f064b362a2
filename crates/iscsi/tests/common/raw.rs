//! A logged-in connection driven with raw bytes.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::sync::Arc;

use iscsi::Limits;
use iscsi::negotiation::Offer;
use iscsi::pdu::{Bhs, DataOut, Digests, LoginRequest, ScsiCommand, crc32c, encode};
use iscsi::text::push_pair;
use zerocopy::big_endian::U32;

use super::{INITIATOR, Messages, Policy, TARGET, TargetEnd, small_offer};

/// A logged-in connection driven with raw bytes.
pub struct Raw {
    pub target_end: TargetEnd,
    pub disk: Vec<u8>,
    pub messages: Messages,
    pub digests: Digests,
    pub cmd_sn: u32,
    pub policy: Arc<Policy>,
}

/// One PDU of the target.
#[derive(Debug, PartialEq)]
pub struct Answer {
    pub bhs: [u8; 48],
    pub data: Vec<u8>,
}

impl Answer {
    pub fn opcode(&self) -> u8 {
        self.bhs[0]
    }

    pub fn word(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.bhs[at..at + 4].try_into().unwrap())
    }
}

impl Raw {
    pub fn with(offer: Offer, limits: Limits, keys: &[(&str, &str)]) -> Self {
        let policy = Arc::new(Policy::open(offer));
        let mut raw = Raw {
            target_end: TargetEnd::new(policy.clone(), limits),
            disk: vec![0; 256 * 512],
            messages: Messages::default(),
            digests: Digests::default(),
            cmd_sn: 1,
            policy,
        };
        raw.log_in(0, 0, keys);
        raw
    }

    pub fn new(keys: &[(&str, &str)]) -> Self {
        Raw::with(small_offer(), Limits::default(), keys)
    }

    pub fn log_in(&mut self, tsih: u16, cid: u16, keys: &[(&str, &str)]) {
        let mut request = LoginRequest::blank();
        request.opcode = 0x43;
        request.flags = 0x87;
        request.isid = [0x80, 0, 0, 0, 0, 1];
        request.tsih.set(tsih);
        request.cid.set(cid);
        request.cmd_sn.set(1);
        let mut text = Vec::new();
        push_pair(&mut text, "InitiatorName", INITIATOR);
        push_pair(&mut text, "TargetName", TARGET);
        for (key, value) in keys {
            push_pair(&mut text, key, value);
        }
        let answers = self.send(request.to_bhs(), &[], &text);
        assert_eq!(
            (answers[0].opcode(), answers[0].word(36) >> 16),
            (0x23, 0),
            "{:?}",
            self.target_end.closed
        );
        self.digests = self.target_end.connection.digests();
    }

    /// Adds a connection to the same session.
    pub fn join(&self, cid: u16) -> Raw {
        self.join_session(self.target_end.connection.key().unwrap().tsih, cid)
    }

    /// Adds a connection to the session with this TSIH.
    pub fn join_session(&self, tsih: u16, cid: u16) -> Raw {
        let mut raw = Raw {
            target_end: TargetEnd::new(self.policy.clone(), Limits::default()),
            disk: vec![0; 256 * 512],
            messages: Messages::default(),
            digests: Digests::default(),
            cmd_sn: 1,
            policy: self.policy.clone(),
        };
        raw.log_in(tsih, cid, &[]);
        raw
    }

    pub fn send_bytes(&mut self, bytes: &[u8]) -> Vec<Answer> {
        self.target_end
            .feed(bytes, &mut self.disk, &mut self.messages);
        self.answers()
    }

    pub fn answers(&mut self) -> Vec<Answer> {
        let bytes = self.target_end.take_bytes();
        let mut left = &bytes[..];
        let mut answers = Vec::new();
        while !left.is_empty() {
            let bhs: [u8; 48] = left[..48].try_into().unwrap();
            assert_eq!(bhs[4], 0, "no additional headers");
            let length = u32::from_be_bytes([0, bhs[5], bhs[6], bhs[7]]) as usize;
            let mut at = 48;
            if self.digests.header {
                assert_eq!(left[48..52], crc32c(&left[..48]).to_le_bytes());
                at = 52;
            }
            let data = left[at..at + length].to_vec();
            let padded = length.next_multiple_of(4);
            if self.digests.data && length > 0 {
                assert_eq!(
                    left[at + padded..at + padded + 4],
                    crc32c(&left[at..at + padded]).to_le_bytes()
                );
                at += 4;
            }
            left = &left[at + padded..];
            answers.push(Answer { bhs, data });
        }
        answers
    }

    pub fn send(&mut self, header: Bhs, ahs: &[u8], data: &[u8]) -> Vec<Answer> {
        let mut bytes = Vec::new();
        encode(&mut bytes, header, ahs, data, self.digests);
        self.send_bytes(&bytes)
    }

    pub fn command(&mut self, itt: u32, flags: u8, expected: u32, cdb: &[u8]) -> ScsiCommand {
        let mut header = ScsiCommand::blank();
        header.flags = flags;
        header.itt = U32::new(itt);
        header.expected_length = U32::new(expected);
        header.cmd_sn = U32::new(self.cmd_sn);
        header.cdb[..cdb.len()].copy_from_slice(cdb);
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        header
    }

    pub fn test_unit_ready(&mut self, itt: u32) -> Vec<Answer> {
        let header = self.command(itt, 0x80, 0, &[0; 6]);
        self.send(header.to_bhs(), &[], &[])
    }

    /// Asserts that the connection still serves requests.
    pub fn still_serves(&mut self) {
        let answers = self.test_unit_ready(0xabcd);
        assert_eq!(answers.len(), 1, "{:?}", self.target_end.closed);
        assert_eq!((answers[0].opcode(), answers[0].bhs[3]), (0x21, 0));
    }
}

pub fn data_out(itt: u32, ttt: u32, data_sn: u32, offset: u32, is_final: bool) -> Bhs {
    let mut header = DataOut::blank();
    header.flags = if is_final { 0x80 } else { 0 };
    header.itt = U32::new(itt);
    header.ttt = U32::new(ttt);
    header.data_sn = U32::new(data_sn);
    header.buffer_offset = U32::new(offset);
    header.to_bhs()
}

pub fn assert_rejected(answers: &[Answer], reason: u8, header: &Bhs) {
    assert_eq!(answers.len(), 1, "{answers:?}");
    assert_eq!(
        (answers[0].opcode(), answers[0].bhs[1], answers[0].bhs[2]),
        (0x3f, 0x80, reason)
    );
    assert_eq!(answers[0].word(16), 0xffff_ffff);
    // The encoder sets the length fields of the sent header.
    assert_eq!(answers[0].data[..4], header.bytes()[..4]);
    assert_eq!(answers[0].data[8..48], header.bytes()[8..48]);
}

pub const CLOSED_BURSTS: [(&str, &str); 2] = [("InitialR2T", "Yes"), ("ImmediateData", "No")];

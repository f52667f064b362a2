//! Accounting for the write data of a command: immediate, unsolicited, and solicited with R2Ts (RFC 7143, 4.2.5.2, 11.7,
//! 11.8).
//!
//! All offsets and numbers come from the initiator and are checked here. After a fault, data is received and discarded
//! until the initiator has sent everything it may send.

use smallvec::SmallVec;

use crate::pdu::NO_TAG;

/// Negotiated parameters for write data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    pub initial_r2t: bool,
    pub immediate_data: bool,
    pub first_burst: u32,
    pub max_burst: u32,
    pub max_outstanding: usize,
    pub pdu_in_order: bool,
    pub sequence_in_order: bool,
    pub gaps: usize,
    /// Data with a wrong digest is requested again (7.8), at error recovery level 1 and above.
    pub requests_again: bool,
}

/// A fault in the data of a command (11.4.7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    UnexpectedUnsolicited,
    IncorrectAmount,
    Digest,
}

impl Fault {
    /// Returns fixed-format sense data, ABORTED COMMAND.
    pub fn sense(self) -> [u8; 18] {
        let (asc, ascq) = match self {
            Fault::UnexpectedUnsolicited => (0x0c, 0x0c),
            Fault::IncorrectAmount => (0x0c, 0x0d),
            Fault::Digest => (0x47, 0x05),
        };
        [
            0x70, 0, 0x0b, 0, 0, 0, 0, 10, 0, 0, 0, 0, asc, ascq, 0, 0, 0, 0,
        ]
    }
}

/// Destination of the data of a Data-Out PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Incoming {
    /// The command's buffer, at the PDU's offset.
    TaskBuffer,
    /// The data is discarded.
    Discard,
    /// No such sequence is open; protocol error.
    Unknown,
}

/// Relevant fields of a Data-Out header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DataOutFields {
    pub ttt: u32,
    pub data_sn: u32,
    pub offset: u32,
    pub length: u32,
    pub is_final: bool,
}

/// A sequence of Data-Out PDUs: unsolicited, or for one R2T.
#[derive(Clone, Debug)]
struct Sequence {
    ttt: u32,
    /// R2TSN; 0 for unsolicited data.
    r2t_sn: u32,
    start: u32,
    end: u32,
    data_sn: u32,
    /// Received ranges, sorted and disjoint.
    pieces: SmallVec<[(u32, u32); 2]>,
}

impl Sequence {
    fn new(ttt: u32, start: u32, end: u32) -> Self {
        Sequence {
            ttt,
            r2t_sn: 0,
            start,
            end,
            data_sn: 0,
            pieces: SmallVec::new(),
        }
    }

    /// Returns the end of the contiguous data from the start.
    fn contiguous(&self) -> u32 {
        self.pieces
            .first()
            .filter(|piece| piece.0 == self.start)
            .map_or(self.start, |piece| piece.1)
    }

    fn take(&mut self, fields: &DataOutFields, rules: &Rules) -> Result<(), Fault> {
        // A gap in DataSN means a lost PDU (7.8). At error recovery level 0 the task fails.
        let expected = self.data_sn;
        self.data_sn = self.data_sn.wrapping_add(1);
        if fields.data_sn != expected {
            return Err(Fault::Digest);
        }
        let (from, length) = (fields.offset, fields.length);
        if from < self.start
            || length > self.end - self.start
            || from - self.start > self.end - self.start - length
        {
            return Err(Fault::IncorrectAmount);
        }
        if rules.pdu_in_order && from != self.contiguous() {
            return Err(Fault::IncorrectAmount);
        }
        if length > 0 {
            self.insert(from, from + length, rules.gaps)
        } else {
            Ok(())
        }
    }

    fn insert(&mut self, from: u32, to: u32, limit: usize) -> Result<(), Fault> {
        let index = self.pieces.partition_point(|piece| piece.0 < from);
        let before = index
            .checked_sub(1)
            .and_then(|index| self.pieces.get(index).copied());
        let after = self.pieces.get(index).copied();
        // Repeated bytes would overwrite data that a running write may be using.
        if before.is_some_and(|piece| piece.1 > from) || after.is_some_and(|piece| piece.0 < to) {
            return Err(Fault::IncorrectAmount);
        }
        match (
            before.filter(|piece| piece.1 == from),
            after.filter(|piece| piece.0 == to),
        ) {
            (Some(_), Some(next)) => {
                self.pieces[index - 1].1 = next.1;
                self.pieces.remove(index);
            }
            (Some(_), None) => self.pieces[index - 1].1 = to,
            (None, Some(_)) => self.pieces[index].0 = from,
            (None, None) if self.pieces.len() >= limit => return Err(Fault::IncorrectAmount),
            (None, None) => self.pieces.insert(index, (from, to)),
        }
        Ok(())
    }
}

/// Write data of one command.
#[derive(Clone, Debug)]
pub(crate) struct WriteData {
    expected: u32,
    /// Open until the F bit.
    unsolicited: Option<Sequence>,
    /// Number of unsolicited bytes.
    prefix: u32,
    wanted: Option<u32>,
    requested: u32,
    outstanding: SmallVec<[Sequence; 1]>,
    fault: Option<Fault>,
    /// The data segment of a Data-Out PDU is being received.
    receiving: bool,
    /// The completion of the data was reported to the caller.
    is_reported: bool,
    /// Ranges to request again, and the number of such requests.
    again: Vec<(u32, u32)>,
    requested_again: u32,
}

/// Maximum number of repeated requests for the data of one command.
const REQUESTED_AGAIN_MAX: u32 = 64;

impl WriteData {
    /// Creates the state of a command without write data.
    pub fn none() -> Self {
        WriteData {
            expected: 0,
            unsolicited: None,
            prefix: 0,
            wanted: None,
            requested: 0,
            outstanding: SmallVec::new(),
            fault: None,
            receiving: false,
            is_reported: false,
            again: Vec::new(),
            requested_again: 0,
        }
    }

    /// Creates the state of a command with `expected` bytes of write data, `immediate` of them in its own PDU.
    /// `is_final` is the F bit of that PDU.
    pub fn begin(expected: u32, immediate: u32, is_final: bool, rules: &Rules) -> Self {
        let limit = expected.min(rules.first_burst);
        let mut data = WriteData {
            expected,
            ..WriteData::none()
        };
        if immediate > 0 && !rules.immediate_data {
            data.fault = Some(Fault::UnexpectedUnsolicited);
        } else if immediate > limit {
            data.fault = Some(Fault::IncorrectAmount);
        } else {
            data.prefix = immediate;
        }
        if !is_final {
            if rules.initial_r2t {
                data.fault = data.fault.or(Some(Fault::UnexpectedUnsolicited));
            } else {
                data.unsolicited = Some(Sequence::new(NO_TAG, data.prefix, limit));
            }
        }
        data
    }

    /// Processes a Data-Out header; [`WriteData::received`] follows at the end of its data segment.
    pub fn incoming(&mut self, fields: &DataOutFields, rules: &Rules) -> Incoming {
        let result = if fields.ttt == NO_TAG {
            let Some(sequence) = &mut self.unsolicited else {
                return Incoming::Unknown;
            };
            let mut result = sequence.take(fields, rules);
            if fields.is_final {
                let prefix = sequence.contiguous();
                if sequence.pieces.len() > 1
                    || sequence
                        .pieces
                        .first()
                        .is_some_and(|piece| piece.0 != sequence.start)
                {
                    result = Err(Fault::IncorrectAmount);
                }
                self.prefix = prefix;
                self.unsolicited = None;
            }
            result
        } else {
            let Some(index) = self
                .outstanding
                .iter()
                .position(|sequence| sequence.ttt == fields.ttt)
            else {
                return Incoming::Unknown;
            };
            let sequence = &mut self.outstanding[index];
            let mut result = sequence.take(fields, rules);
            if index > 0 && rules.sequence_in_order {
                result = Err(Fault::IncorrectAmount);
            }
            let complete = sequence.contiguous() == sequence.end;
            if fields.is_final || complete {
                if !complete {
                    result = result.and(Err(Fault::IncorrectAmount));
                }
                self.outstanding.remove(index);
            }
            result
        };
        if let Err(fault) = result {
            self.fault = self.fault.or(Some(fault));
        }
        self.receiving = true;
        if self.fault.is_some() {
            Incoming::Discard
        } else {
            Incoming::TaskBuffer
        }
    }

    /// Ends the data segment of the last Data-Out PDU.
    pub fn received(&mut self) {
        self.receiving = false;
    }

    /// Sets the wanted data to the first `wanted` bytes.
    pub fn set_wanted(&mut self, wanted: u32) {
        self.wanted = Some(wanted.min(self.expected));
    }

    /// Returns offset and length of the next range to request with this tag and R2TSN.
    pub fn next_r2t(&mut self, ttt: u32, r2t_sn: u32, rules: &Rules) -> Option<(u32, u32)> {
        let wanted = self.wanted?;
        if self.fault.is_some()
            || self.unsolicited.is_some()
            || self.outstanding.len() >= rules.max_outstanding
        {
            return None;
        }
        let mut sequence = match self.again.pop() {
            Some((from, to)) => Sequence::new(ttt, from, to),
            None => {
                let offset = self.requested.max(self.prefix);
                if offset >= wanted {
                    return None;
                }
                let length = (wanted - offset).min(rules.max_burst);
                self.requested = offset + length;
                Sequence::new(ttt, offset, offset + length)
            }
        };
        sequence.r2t_sn = r2t_sn;
        let (start, length) = (sequence.start, sequence.end - sequence.start);
        self.outstanding.push(sequence);
        Some((start, length))
    }

    /// Returns the unfulfilled R2Ts: R2TSN, tag, offset and length.
    pub fn open_r2ts(&self) -> impl Iterator<Item = (u32, u32, u32, u32)> + '_ {
        let open = self.outstanding.iter();
        open.map(|one| (one.r2t_sn, one.ttt, one.start, one.end - one.start))
    }

    /// Handles a wrong data digest: requests the range again, or fails the task.
    pub fn digest_failed(&mut self, from: u32, length: u32, rules: &Rules) {
        if length == 0 || self.fault.is_some() {
            return self.fail(Fault::Digest);
        }
        self.requested_again += 1;
        match rules.requests_again && self.requested_again <= REQUESTED_AGAIN_MAX {
            true => self.again.push((from, from + length)),
            false => self.fail(Fault::Digest),
        }
    }

    /// Records that completion is reported to the caller. Returns false if it was reported before.
    pub fn report_complete(&mut self) -> bool {
        !std::mem::replace(&mut self.is_reported, true)
    }

    /// Returns true if all wanted data has arrived.
    pub fn is_complete(&self) -> bool {
        let reached = self.requested.max(self.prefix);
        self.fault.is_none()
            && self.is_drained()
            && self.again.is_empty()
            && self.wanted.is_some_and(|wanted| reached >= wanted)
    }

    /// Returns true if no more data is expected from the initiator.
    pub fn is_drained(&self) -> bool {
        !self.receiving && self.unsolicited.is_none() && self.outstanding.is_empty()
    }

    /// Returns the first fault.
    pub fn fault(&self) -> Option<Fault> {
        self.fault
    }

    /// Records a fault found outside the headers.
    pub fn fail(&mut self, fault: Fault) {
        self.fault = self.fault.or(Some(fault));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rules() -> Rules {
        Rules {
            initial_r2t: false,
            immediate_data: true,
            first_burst: 4096,
            max_burst: 8192,
            max_outstanding: 2,
            pdu_in_order: true,
            sequence_in_order: true,
            gaps: 8,
            requests_again: false,
        }
    }

    fn take(data: &mut WriteData, fields: &DataOutFields, rules: &Rules) -> Incoming {
        let incoming = data.incoming(fields, rules);
        assert!(
            incoming == Incoming::Unknown || !data.is_drained(),
            "not before its data is in place"
        );
        data.received();
        incoming
    }

    fn pdu(ttt: u32, data_sn: u32, offset: u32, length: u32, is_final: bool) -> DataOutFields {
        DataOutFields {
            ttt,
            data_sn,
            offset,
            length,
            is_final,
        }
    }

    #[test]
    fn unsolicited_data_then_r2ts_of_max_burst() {
        let rules = rules();
        let mut data = WriteData::begin(20_000, 1000, false, &rules);
        data.set_wanted(20_000);
        assert_eq!(
            data.next_r2t(1, 0, &rules),
            None,
            "not before the unsolicited data has ended"
        );
        assert_eq!(
            take(&mut data, &pdu(NO_TAG, 0, 1000, 3096, true), &rules),
            Incoming::TaskBuffer
        );
        assert_eq!(data.next_r2t(1, 0, &rules), Some((4096, 8192)));
        assert_eq!(data.next_r2t(2, 0, &rules), Some((12288, 7712)));
        assert_eq!(data.next_r2t(3, 0, &rules), None);
        assert_eq!(
            take(&mut data, &pdu(1, 0, 4096, 8192, true), &rules),
            Incoming::TaskBuffer
        );
        assert!(!data.is_complete());
        assert_eq!(
            take(&mut data, &pdu(2, 0, 12288, 7000, false), &rules),
            Incoming::TaskBuffer
        );
        assert_eq!(
            take(&mut data, &pdu(2, 1, 19288, 712, true), &rules),
            Incoming::TaskBuffer
        );
        assert!(data.is_complete());
    }

    #[test]
    fn data_longer_than_its_r2t_fails_the_task_and_is_drained() {
        let rules = rules();
        let mut data = WriteData::begin(8192, 0, true, &rules);
        data.set_wanted(4096);
        assert_eq!(data.next_r2t(5, 0, &rules), Some((0, 4096)));
        assert_eq!(
            take(&mut data, &pdu(5, 0, 0, 8192, false), &rules),
            Incoming::Discard
        );
        assert!(!data.is_drained());
        assert_eq!(
            take(&mut data, &pdu(5, 1, 8192, 0, true), &rules),
            Incoming::Discard
        );
        assert!(data.is_drained());
        assert_eq!(data.fault(), Some(Fault::IncorrectAmount));
    }

    #[test]
    fn wrong_data_sn_offset_or_early_final_fails_the_task() {
        let rules = rules();
        for (first, fault) in [
            (pdu(5, 27, 0, 4096, true), Fault::Digest),
            (pdu(5, 0xffff_ffff, 0, 4096, true), Fault::Digest),
            (pdu(5, 0, 512, 3584, true), Fault::IncorrectAmount),
            (pdu(5, 0, 0, 512, true), Fault::IncorrectAmount),
            (pdu(5, 0, 0xffff_ff00, 512, true), Fault::IncorrectAmount),
        ] {
            let mut data = WriteData::begin(4096, 0, true, &rules);
            data.set_wanted(4096);
            data.next_r2t(5, 0, &rules);
            assert_eq!(
                take(&mut data, &first, &rules),
                Incoming::Discard,
                "{first:?}"
            );
            assert_eq!(data.fault(), Some(fault), "{first:?}");
            assert!(data.is_drained() && !data.is_complete());
        }
    }

    #[test]
    fn unsolicited_data_without_agreement_fails_the_task() {
        let strict = Rules {
            initial_r2t: true,
            immediate_data: false,
            ..rules()
        };
        assert_eq!(
            WriteData::begin(512, 512, true, &strict).fault(),
            Some(Fault::UnexpectedUnsolicited)
        );
        assert_eq!(
            WriteData::begin(512, 0, false, &strict).fault(),
            Some(Fault::UnexpectedUnsolicited)
        );
        assert_eq!(
            WriteData::begin(8192, 4097, true, &rules()).fault(),
            Some(Fault::IncorrectAmount)
        );
        assert_eq!(
            WriteData::begin(512, 513, true, &rules()).fault(),
            Some(Fault::IncorrectAmount)
        );
        let mut data = WriteData::begin(512, 0, true, &rules());
        assert_eq!(
            take(&mut data, &pdu(NO_TAG, 0, 0, 512, true), &rules()),
            Incoming::Unknown
        );
        assert_eq!(
            take(&mut data, &pdu(77, 0, 0, 512, true), &rules()),
            Incoming::Unknown
        );
    }

    #[test]
    fn same_bytes_twice_fail_the_task_also_out_of_order() {
        let loose = Rules {
            pdu_in_order: false,
            ..rules()
        };
        let mut data = WriteData::begin(4096, 0, true, &loose);
        data.set_wanted(4096);
        data.next_r2t(5, 0, &loose);
        assert_eq!(
            take(&mut data, &pdu(5, 0, 1024, 1024, false), &loose),
            Incoming::TaskBuffer
        );
        assert_eq!(
            take(&mut data, &pdu(5, 1, 0, 1025, false), &loose),
            Incoming::Discard
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

        /// Model: a bitmap. A conforming initiator fills every byte once, for any segmentation and order.
        #[test]
        fn every_byte_is_requested_and_stored_once(
            expected in 0u32..40_000,
            wanted in 0u32..40_000,
            immediate in 0u32..5000,
            unsolicited in any::<bool>(),
            segment in 1u32..3000,
            outstanding in 1usize..5,
            backwards in any::<bool>(),
            last_r2t_first in any::<bool>(),
        ) {
            let rules = Rules {
                initial_r2t: !unsolicited, max_outstanding: outstanding, pdu_in_order: !backwards,
                sequence_in_order: !last_r2t_first, gaps: 64, ..rules()
            };
            let limit = expected.min(rules.first_burst);
            let immediate = immediate.min(limit);
            let mut map = vec![false; expected as usize];
            map[..immediate as usize].fill(true);
            let open = unsolicited && immediate < limit;
            let mut data = WriteData::begin(expected, immediate, !open, &rules);
            let mut send = |data: &mut WriteData, ttt: u32, from: u32, to: u32| {
                let mut cuts: Vec<(u32, u32)> = Vec::new();
                let mut at = from;
                while at < to {
                    let length = segment.min(to - at);
                    cuts.push((at, length));
                    at += length;
                }
                if backwards { cuts.reverse(); }
                let count = cuts.len();
                for (sn, (at, length)) in cuts.into_iter().enumerate() {
                    let fields = pdu(ttt, sn as u32, at, length, sn + 1 == count);
                    assert_eq!(take(data, &fields, &rules), Incoming::TaskBuffer);
                    for byte in &mut map[at as usize..(at + length) as usize] {
                        assert!(!*byte, "placed twice");
                        *byte = true;
                    }
                }
            };
            if open { send(&mut data, NO_TAG, immediate, limit); }
            data.set_wanted(wanted);
            let mut requested: Vec<(u32, u32, u32)> = Vec::new();
            let mut ttt = 0;
            loop {
                while let Some((offset, length)) = data.next_r2t(ttt, 0, &rules) {
                    prop_assert!(length <= rules.max_burst);
                    requested.push((ttt, offset, offset + length));
                    ttt += 1;
                }
                prop_assert!(requested.len() <= outstanding);
                if requested.is_empty() { break; }
                let (ttt, from, to) = requested.remove(if last_r2t_first { requested.len() - 1 } else { 0 });
                // Limited gaps force runs of tiny PDUs to be sent in ascending order.
                send(&mut data, ttt, from, to);
            }
            prop_assert!(data.is_complete());
            prop_assert!(map[..wanted.min(expected) as usize].iter().all(|byte| *byte));
        }

        #[test]
        fn arbitrary_headers_never_panic(
            fields in prop::collection::vec((0u32..4, any::<u32>(), any::<u32>(), 0u32..0x00ff_ffff, any::<bool>()), 0..40),
            expected in any::<u32>(), immediate in any::<u32>(), open in any::<bool>(), in_order in any::<bool>(),
        ) {
            let rules = Rules { pdu_in_order: in_order, sequence_in_order: false, ..rules() };
            let mut data = WriteData::begin(expected, immediate, !open, &rules);
            data.set_wanted(expected);
            for (ttt, data_sn, offset, length, is_final) in fields {
                data.next_r2t(ttt, 0, &rules);
                let ttt = if ttt == 3 { NO_TAG } else { ttt };
                take(&mut data, &pdu(ttt, data_sn % 3, offset, length, is_final), &rules);
            }
        }
    }
}

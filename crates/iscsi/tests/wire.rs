//! Round trips of PDUs and text over streams split anywhere, and meaningless bytes.

use iscsi::pdu::{
    BHS_LENGTH, Bhs, Decoder, Digests, FormatError, Progress, ScsiCommand, additional_headers,
    crc32c, encode,
};
use iscsi::text::{
    parse, parse_binary, parse_list, parse_number, parse_range, push_pair, to_base64, to_hex,
};
use proptest::prelude::*;
use zerocopy::IntoBytes;
use zerocopy::big_endian::U32;

/// The READ(10) command of RFC 7143, appendix A, whose CRC the standard lists.
#[rustfmt::skip]
const READ10: [u8; 48] = [
    0x01, 0xc0, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
    0x14, 0x00, 0x00, 0x00, 0x00, 0x00, 0x04, 0x00, 0x00, 0x00, 0x00, 0x14, 0x00, 0x00, 0x00, 0x18,
    0x28, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
];

#[test]
fn scsi_command_of_appendix_a_round_trips() {
    let mut decoder = Decoder::new(0, 8192);
    decoder.set_digests(Digests {
        header: true,
        data: false,
    });
    let stream = [READ10.as_slice(), &[0x56, 0x3a, 0x96, 0xd9]].concat();
    assert_eq!(decoder.push(&stream), Ok((52, Progress::Header)));
    let command = ScsiCommand::from_bhs(&decoder.bhs());
    assert_eq!(
        (
            command.flags,
            command.itt.get(),
            command.expected_length.get()
        ),
        (0xc0, 0x1400_0000, 0x400)
    );
    assert_eq!(
        (command.cmd_sn.get(), command.exp_stat_sn.get()),
        (0x14, 0x18)
    );
    assert_eq!(
        command.cdb,
        [0x28, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]
    );
    assert_eq!(
        decoder.push(&[]),
        Ok((0, Progress::End { digest_ok: true }))
    );
    let mut built = ScsiCommand::blank();
    built.flags = 0x80 | ScsiCommand::READ;
    built.itt = U32::new(0x1400_0000);
    built.expected_length = U32::new(0x400);
    built.cmd_sn = U32::new(0x14);
    built.exp_stat_sn = U32::new(0x18);
    built.cdb[0] = 0x28;
    built.cdb[8] = 2;
    let mut out = Vec::new();
    encode(
        &mut out,
        built.to_bhs(),
        &[],
        &[],
        Digests {
            header: true,
            data: true,
        },
    );
    assert_eq!(out, stream);
}

#[test]
fn padding_is_zero_and_covered_by_the_data_digest() {
    let mut out = Vec::new();
    encode(
        &mut out,
        ScsiCommand::blank().to_bhs(),
        &[],
        b"abcde",
        Digests {
            header: false,
            data: true,
        },
    );
    assert_eq!(out[4..8], [0, 0, 0, 5]);
    assert_eq!(out[48..56], *b"abcde\0\0\0");
    assert_eq!(out[56..], crc32c(b"abcde\0\0\0").to_le_bytes());
}

#[test]
fn lengths_beyond_the_agreement_are_format_errors() {
    let mut bhs = [0; 48];
    bhs[4] = 2;
    assert_eq!(
        Decoder::new(4, 8192).push(&bhs),
        Err(FormatError::AdditionalHeadersTooLong {
            length: 8,
            limit: 4
        })
    );
    bhs[4..8].copy_from_slice(&[0, 0, 0x20, 1]);
    assert_eq!(
        Decoder::new(4, 8192).push(&bhs),
        Err(FormatError::DataSegmentTooLong {
            length: 8193,
            limit: 8192
        })
    );
}

#[derive(Clone, Debug)]
struct Pdu {
    bhs: [u8; 48],
    ahs: Vec<u8>,
    data: Vec<u8>,
}

fn pdu() -> impl Strategy<Value = Pdu> {
    let ahs = prop_oneof![3 => Just(0usize), 1 => 0usize..=255];
    let bytes = prop::collection::vec(any::<u8>(), 48);
    (
        bytes,
        ahs,
        prop::collection::vec(any::<u8>(), 0..300),
        any::<u8>(),
    )
        .prop_map(|(bytes, words, data, fill)| Pdu {
            bhs: bytes.try_into().unwrap(),
            ahs: vec![fill; words * 4],
            data,
        })
}

fn as_bhs(bytes: [u8; 48]) -> Bhs {
    zerocopy::transmute!(bytes)
}

/// Decodes a stream in pieces and returns its PDUs.
fn decode(decoder: &mut Decoder, pieces: &[&[u8]]) -> Result<Vec<Pdu>, FormatError> {
    let mut pdus = Vec::new();
    let mut data = Vec::new();
    for piece in pieces {
        let mut left = *piece;
        loop {
            let (used, progress) = decoder.push(left)?;
            left = &left[used..];
            match progress {
                Progress::NeedMore(more) => {
                    assert!(more > 0 && left.is_empty());
                    break;
                }
                Progress::Header => data.clear(),
                Progress::Data(_) if left.is_empty() => break,
                Progress::Data(wanted) => {
                    let take = left.len().min(wanted as usize);
                    decoder.take_data(&left[..take]);
                    data.extend_from_slice(&left[..take]);
                    left = &left[take..];
                }
                Progress::End { digest_ok } => {
                    assert!(digest_ok);
                    let bhs = decoder.bhs().as_bytes().try_into().unwrap();
                    pdus.push(Pdu {
                        bhs,
                        ahs: decoder.ahs().to_vec(),
                        data: data.clone(),
                    });
                }
            }
        }
    }
    Ok(pdus)
}

/// Returns true if the stream is one complete PDU with correct digests.
fn is_whole(stream: &[u8], digests: Digests) -> bool {
    let mut decoder = Decoder::new(1020, 8192);
    decoder.set_digests(digests);
    let mut left = stream;
    loop {
        let Ok((used, progress)) = decoder.push(left) else {
            return false;
        };
        left = &left[used..];
        match progress {
            Progress::Header => {}
            Progress::NeedMore(_) => return false,
            Progress::End { digest_ok } => return digest_ok && left.is_empty(),
            Progress::Data(wanted) => {
                let take = left.len().min(wanted as usize);
                if take == 0 {
                    return false;
                }
                decoder.take_data(&left[..take]);
                left = &left[take..];
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pdus_survive_a_stream_cut_anywhere(
        pdus in prop::collection::vec(pdu(), 1..6), header in any::<bool>(), data in any::<bool>(), cut in 1usize..200,
    ) {
        let digests = Digests { header, data };
        let mut stream = Vec::new();
        for pdu in &pdus {
            encode(&mut stream, as_bhs(pdu.bhs), &pdu.ahs, &pdu.data, digests);
        }
        let mut decoder = Decoder::new(1020, 8192);
        decoder.set_digests(digests);
        let pieces: Vec<&[u8]> = stream.chunks(cut).collect();
        let decoded = decode(&mut decoder, &pieces).unwrap();
        prop_assert!(decoder.is_idle() || pdus.last().unwrap().data.is_empty());
        // The end of a PDU without trailer is detected by the next push.
        let decoded = if decoded.len() < pdus.len() { [decoded, decode(&mut decoder, &[&[]]).unwrap()].concat() } else { decoded };
        prop_assert_eq!(decoded.len(), pdus.len());
        for (got, sent) in decoded.iter().zip(&pdus) {
            prop_assert_eq!((&got.ahs, &got.data), (&sent.ahs, &sent.data));
            prop_assert_eq!(&got.bhs[..4], &sent.bhs[..4]);
            prop_assert_eq!(&got.bhs[8..BHS_LENGTH], &sent.bhs[8..BHS_LENGTH]);
        }
    }

    #[test]
    fn digests_detect_one_flipped_bit(pdu in pdu(), place in any::<prop::sample::Index>(), bit in 0u8..8) {
        let digests = Digests { header: true, data: true };
        let mut stream = Vec::new();
        encode(&mut stream, as_bhs(pdu.bhs), &[], &pdu.data, digests);
        prop_assert!(is_whole(&stream, digests));
        let place = place.index(stream.len());
        stream[place] ^= 1 << bit;
        prop_assert!(!is_whole(&stream, digests), "bit {bit} of byte {place}");
    }

    #[test]
    fn arbitrary_bytes_never_panic_in_decoder_and_additional_headers(bytes in prop::collection::vec(any::<u8>(), 0..2000), cut in 1usize..100) {
        let mut decoder = Decoder::new(1020, 65_536);
        for piece in bytes.chunks(cut) {
            let mut left = piece;
            while let Ok((used, progress)) = decoder.push(left) {
                left = &left[used..];
                match progress {
                    Progress::NeedMore(_) => break,
                    Progress::Data(_) if left.is_empty() => break,
                    Progress::Data(wanted) => {
                        let take = left.len().min(wanted as usize);
                        decoder.take_data(&left[..take]);
                        left = &left[take..];
                    }
                    Progress::Header | Progress::End { .. } => {}
                }
            }
        }
        if let Ok(found) = additional_headers(&bytes) {
            prop_assert!(found.extended_cdb.len() <= 244);
        }
    }

    #[test]
    fn additional_headers_survive_a_round_trip(cdb in prop::collection::vec(any::<u8>(), 0..=244), read in prop::option::of(any::<u32>())) {
        let headers = iscsi::pdu::AdditionalHeaders { extended_cdb: cdb.into(), bidirectional_read_length: read };
        prop_assert_eq!(additional_headers(&headers.to_bytes()), Ok(headers));
    }

    #[test]
    fn text_and_values_survive_a_round_trip(
        pairs in prop::collection::vec(("[A-Z][A-Za-z0-9.+@_-]{0,62}", "[ -~]{0,100}"), 0..10),
        binary in prop::collection::vec(any::<u8>(), 1..200),
    ) {
        let mut text = Vec::new();
        for (key, value) in &pairs {
            push_pair(&mut text, key, value);
        }
        let found: Vec<(String, String)> = parse(&text).unwrap().iter().map(|pair| (pair.key.to_owned(), pair.value.to_owned())).collect();
        prop_assert_eq!(found, pairs);
        prop_assert_eq!(parse_binary(&to_hex(&binary), 200).unwrap().to_vec(), binary.clone());
        prop_assert_eq!(parse_binary(&to_base64(&binary), 200).unwrap().to_vec(), binary);
    }

    #[test]
    fn arbitrary_text_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..500), value in "\\PC{0,60}") {
        if let Ok(pairs) = parse(&bytes) {
            prop_assert!(pairs.iter().all(|pair| (1..=63).contains(&pair.key.len())));
        }
        parse_number(&value);
        parse_range(&value);
        parse_list(&value);
        if let Some(binary) = parse_binary(&value, 16) {
            prop_assert!(binary.len() <= 16);
        }
    }
}

//! Commands of virtio-scsi (virtio 1.3, 5.6.6.1; SPC-4, SBC-3).

use vhost_frontend::{Layout, Options, QueueOptions, ScsiDone, attribute, protocol_feature};

use crate::io::{BLOCK, Io, IoDevice, ScsiUnit, good};
use crate::{Device, Devices, Target, Test, Verdict, equal, failed, needs};

const CHECK_CONDITION: u8 = 2;
/// VIRTIO_SCSI_S_BAD_TARGET, VIRTIO_SCSI_S_FAILURE, VIRTIO_SCSI_S_INCORRECT_LUN.
const BAD_TARGET: u8 = 3;
const FAILURE: u8 = 9;
const INCORRECT_LUN: u8 = 12;
/// A target and a LUN that no controller is expected to have.
pub(crate) const ABSENT_TARGET: u8 = 201;
pub(crate) const ABSENT_LUN: u16 = 16_000;

const fn test(title: &'static str, clause: &'static str, run: fn(&Target) -> Verdict) -> Test {
    Test::new("scsi", Devices::Scsi, title, clause, run)
}

pub(crate) const TESTS: &[Test] = &[
    test(
        "the configuration space has the default sizes",
        "virtio 1.3, 5.6.4",
        |target| {
            let front_end = target.connect(&Options::default())?;
            let is_offered = front_end.has_protocol(protocol_feature::CONFIG);
            needs(is_offered, "VHOST_USER_PROTOCOL_F_CONFIG")?;
            let config = front_end.config(0, 36)?;
            let word = |at: usize| {
                let bytes = [config[at], config[at + 1], config[at + 2], config[at + 3]];
                u32::from_le_bytes(bytes)
            };
            equal("at least one request queue", word(0) >= 1, true)?;
            equal("event_info_size is at least 16", word(16) >= 16, true)?;
            equal("sense_size", word(20), 96)?;
            equal("cdb_size", word(24), 32)
        },
    ),
    test("INQUIRY describes a block device", "SPC-4, 6.6", |target| {
        let mut unit = open(target)?;
        let mut data = [0xee; 36];
        let done = unit.run(&[0x12, 0, 0, 0, 36, 0], &[], &mut data)?;
        good("INQUIRY", &done)?;
        equal("peripheral qualifier and device type", data[0], 0)?;
        let is_text = data[8..].iter().all(|byte| (0x20..0x7f).contains(byte));
        equal("vendor, product and revision are ASCII", is_text, true)
    }),
    test(
        "a short response has a residual",
        "virtio 1.3, 5.6.6.1: residual",
        |target| {
            let mut unit = open(target)?;
            let mut data = [0xee; 96];
            let done = unit.run(&[0x12, 0, 0, 0, 36, 0], &[], &mut data)?;
            good("INQUIRY", &done)?;
            equal("residual", done.residual, 60)?;
            equal("byte behind the data", data[36], 0xee)?;
            equal("used length", done.written, 108 + 36)
        },
    ),
    test(
        "each supported VPD page is returned",
        "SPC-4, 7.8",
        |target| {
            let mut unit = open(target)?;
            let pages = vpd(&mut unit, 0)?;
            equal("page 83h is supported", pages.contains(&0x83), true)?;
            for page in pages {
                vpd(&mut unit, page)?;
            }
            Ok(())
        },
    ),
    test(
        "an unsupported VPD page is refused",
        "SPC-4, 6.6",
        |target| {
            let mut unit = open(target)?;
            let done = unit.run(&[0x12, 1, 0x7f, 0, 255, 0], &[], &mut [0; 255])?;
            sense(&done, [5, 0x24, 0])
        },
    ),
    test("REPORT LUNS lists the unit", "SPC-4, 6.33", |target| {
        let mut unit = open(target)?;
        let mut data = vec![0; 4096];
        let cdb = [0xa0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0];
        good("REPORT LUNS", &unit.run(&cdb, &[], &mut data)?)?;
        let Device::Scsi(_, lun) = target.device else {
            return Ok(());
        };
        let length = u32::from_be_bytes([data[0], data[1], data[2], data[3]]) as usize;
        equal("rest of the list length", length % 8, 0)?;
        let mut luns = data[8..].chunks(8).take(length.min(4088) / 8);
        let has = luns.any(|one| u16::from_be_bytes([one[0] & 0x3f, one[1]]) == lun);
        equal(&format!("LUN {lun} is in the list"), has, true)
    }),
    test(
        "an absent target is a bad target",
        "virtio 1.3, 5.6.6.1",
        |target| {
            let mut unit = open(target)?;
            let done = unit.run_on(ABSENT_TARGET, 0, &[0; 6], &[], &mut [])?;
            equal("response", done.response, BAD_TARGET)
        },
    ),
    test(
        "an absent LUN has no unit",
        "SPC-4, 6.6; SAM-5, 4.7",
        |target| {
            let mut unit = open(target)?;
            let Device::Scsi(number, _) = target.device else {
                return Ok(());
            };
            let done = unit.run_on(number, ABSENT_LUN, &[0; 6], &[], &mut [])?;
            if !matches!(done.response, BAD_TARGET | INCORRECT_LUN) {
                sense(&done, [5, 0x25, 0])?;
            }
            let mut data = [0xee; 36];
            let inquiry = [0x12, 0, 0, 0, 36, 0];
            let done = unit.run_on(number, ABSENT_LUN, &inquiry, &[], &mut data)?;
            match (done.response, done.status) {
                (0, 0) => equal("peripheral qualifier", data[0] >> 5, 3),
                (BAD_TARGET | INCORRECT_LUN, _) => Ok(()),
                _ => sense(&done, [5, 0x25, 0]),
            }
        },
    ),
    test(
        "an unknown operation code is refused",
        "SPC-4, 4.5",
        |target| {
            let mut unit = open(target)?;
            let done = unit.run(&[0xff; 16], &[], &mut [])?;
            sense(&done, [5, 0x20, 0])
        },
    ),
    test(
        "a read beyond the last block is refused",
        "SBC-3, 4.5",
        |target| {
            let mut unit = open(target)?;
            let beyond = [0x28, 0, 0xff, 0xff, 0xff, 0xf0, 0, 0, 1, 0];
            let mut data = [0xee; 4096];
            let done = unit.run(&beyond, &[], &mut data)?;
            sense(&done, [5, 0x21, 0])?;
            equal("residual", done.residual, 4096)?;
            equal("unchanged data", data == [0xee; 4096], true)
        },
    ),
    test(
        "each task attribute is accepted",
        "virtio 1.3, 5.6.6.1: task_attr",
        |target| {
            let mut unit = open(target)?;
            for attribute in [
                attribute::SIMPLE,
                attribute::ORDERED,
                attribute::HEAD_OF_QUEUE,
            ] {
                unit.queue.set_attribute(attribute);
                good("TEST UNIT READY", &unit.run(&[0; 6], &[], &mut [])?)?;
            }
            Ok(())
        },
    ),
    test(
        "data in both directions fail",
        "virtio 1.3, 5.6.6.1: VIRTIO_SCSI_F_INOUT",
        |target| {
            let mut unit = open(target)?;
            let inquiry = [0x12, 0, 0, 0, 36, 0, 0, 0, 0, 0];
            let (read, write) = (unit.cdb(0x28, 0, BLOCK), unit.cdb(0x2a, 0, BLOCK));
            let mut commands = vec![inquiry, read];
            if target.is_destructive {
                commands.push(write);
            }
            for cdb in commands {
                for (out, into) in [(BLOCK, BLOCK), (BLOCK, 36), (1, BLOCK)] {
                    let (out, mut into) = (vec![9; out], vec![0xee; into]);
                    let done = unit.run(&cdb, &out, &mut into)?;
                    let object = format!("response of operation code {:#x}", cdb[0]);
                    equal(&object, done.response, FAILURE)?;
                    let is_kept = into.iter().all(|byte| *byte == 0xee);
                    equal("unchanged data", is_kept, true)?;
                }
            }
            let done = unit.run_on(ABSENT_TARGET, 0, &inquiry, &[9], &mut [0])?;
            let is_failure = matches!(done.response, FAILURE | BAD_TARGET);
            equal("failure of an absent target", is_failure, true)?;
            good("TEST UNIT READY", &unit.run(&[0; 6], &[], &mut [])?)
        },
    ),
];

/// Returns the unit of the first request queue, without unit attentions.
pub(crate) fn open(target: &Target) -> Verdict<ScsiUnit> {
    let mut front_end = target.connect(&Options::default())?;
    let options = QueueOptions::default();
    let io = Io::start(target, &mut front_end, 0, &options, Layout::Separate)?;
    match io.device {
        IoDevice::Scsi(unit) => Ok(unit.with_session(front_end)),
        IoDevice::Blk(_) => failed("the device is no controller"),
    }
}

/// Returns the contents of a VPD page.
fn vpd(unit: &mut ScsiUnit, page: u8) -> Verdict<Vec<u8>> {
    let mut data = [0; 1024];
    let done = unit.run(&[0x12, 1, page, 4, 0, 0], &[], &mut data)?;
    good(&format!("INQUIRY of page {page:#x}"), &done)?;
    equal("page code", data[1], page)?;
    let length = usize::from(u16::from_be_bytes([data[2], data[3]]));
    Ok(data[4..4 + length.min(1020)].to_vec())
}

/// Expects CHECK CONDITION with sense key, additional sense code and qualifier.
fn sense(done: &ScsiDone, expected: [u8; 3]) -> Verdict {
    let check = (done.response, done.status);
    equal("response and status", check, (0, CHECK_CONDITION))?;
    let actual = match *done.sense {
        [
            0x70 | 0xf0,
            _,
            key,
            _,
            _,
            _,
            _,
            _,
            _,
            _,
            _,
            _,
            code,
            qualifier,
            ..,
        ] => [key & 0xf, code, qualifier],
        [0x72, key, code, qualifier, ..] => [key & 0xf, code, qualifier],
        _ => return failed(format!("expected sense data, got {:x?}", done.sense)),
    };
    equal("sense key, ASC and ASCQ", actual, expected)
}

//! INQUIRY, REPORT LUNS, READ CAPACITY, MODE SENSE, REQUEST SENSE: the reported data of a disk, byte by byte.

mod common;

use block::DiskInfo;
use common::*;
use scsi::*;

#[test]
fn standard_inquiry_names_vendor_product_and_standards() {
    let mut bed = Bed::new(512, 2048);
    let answer = bed.run(0, &[0x12, 0, 0, 0, 96, 0], &[], 96);
    assert_eq!(answer.status, Status::Good);
    assert_eq!(answer.data.len(), 96);
    assert_eq!(answer.data[..5], [0x00, 0x00, 0x06, 0x12, 91]);
    assert_eq!(&answer.data[8..16], b"LUNETTE ");
    assert_eq!(&answer.data[16..32], b"VIRTUAL DISK    ");
    assert_eq!(
        answer.data[58..66],
        [0x00, 0xa0, 0x04, 0x60, 0x04, 0xc0, 0x09, 0x60]
    );
}

#[test]
fn inquiry_is_cut_to_the_allocation_length_with_residual() {
    let mut bed = Bed::new(512, 2048);
    let answer = bed.run(0, &[0x12, 0, 0, 0, 36, 0], &[], 255);
    assert_eq!(answer.data.len(), 36);
    assert_eq!(answer.residual, Residual::Underflow(219));
    let answer = bed.run(0, &[0x12, 0, 0, 0, 36, 0], &[], 20);
    assert_eq!(answer.data.len(), 20);
    assert_eq!(answer.residual, Residual::Overflow(16));
}

#[test]
fn inquiry_with_a_page_code_but_without_evpd_is_an_invalid_field() {
    let mut bed = Bed::new(512, 2048);
    let answer = bed.run(0, &[0x12, 0, 0x83, 0, 96, 0], &[], 96);
    assert_eq!(answer.code(), (0x05, 0x24, 0x00));
    assert_eq!(answer.sense[15..18], [0xc0, 0x00, 0x02]);
}

#[test]
fn supported_pages_ascend_and_can_all_be_read() {
    let mut bed = Bed::new(512, 2048);
    let pages = bed.run(0, &[0x12, 1, 0x00, 0, 255, 0], &[], 255).data;
    let codes = &pages[4..];
    assert!(codes.is_sorted());
    for &code in codes {
        let page = bed.run(0, &[0x12, 1, code, 0, 255, 0], &[], 255);
        assert_eq!(page.status, Status::Good, "{code:02x}");
        assert_eq!(page.data[1], code);
        assert_eq!(page.data.len(), 4 + usize::from(page.data[3]), "{code:02x}");
    }
}

#[test]
fn device_identification_has_naa_t10_ports_and_names() {
    let mut bed = Bed::new(512, 2048);
    let page = bed.run(0, &[0x12, 1, 0x83, 0, 255, 0], &[], 255).data;
    assert_eq!(page[4..16], [0x01, 0x03, 0, 8, 0x30, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(page[16..20], [0x02, 0x01, 0, 40]);
    assert_eq!(&page[20..60], b"LUNETTE 00000000000040008000000000000000");
    // Protocol identifier 5: iSCSI.
    assert_eq!(page[60..68], [0x51, 0x94, 0, 4, 0, 0, 0, 1]);
    assert_eq!(page[68..76], [0x51, 0x95, 0, 4, 0, 0, 0, 1]);
    assert_eq!(page[76..80], [0x53, 0x98, 0, 36]);
    assert_eq!(&page[80..116], b"iqn.2026-11.org.example:t0,t,0x0001\0");
    assert_eq!(page[116..120], [0x53, 0xa8, 0, 28]);
}

/// Disks with the same serial number, as from a template for many hosts, are different disks. Disks with the same `wwn` are one disk.
#[test]
fn unit_designators_come_from_identity_or_wwn_never_serial() {
    let designators = |identity: u128, naa: Option<u64>| {
        let disk = DiskInfo {
            identity: block::Identity::from_random_bits(identity),
            serial: "same".to_owned(),
            ..info(512, 2048, 0)
        };
        let naa = naa.unwrap_or(disk.identity.naa());
        let mut bed = Bed::with(DiskInfo { naa, ..disk }, false);
        let serial = bed.run(0, &[0x12, 1, 0x80, 0, 255, 0], &[], 255).data;
        assert_eq!(&serial[4..], b"same");
        let page = bed.run(0, &[0x12, 1, 0x83, 0, 255, 0], &[], 255).data;
        let length = usize::from(page[19]);
        assert_eq!(page[16..19], [0x02, 0x01, 0]);
        (page[8..16].to_vec(), page[20..20 + length].to_vec())
    };
    let (one, other) = (designators(1, None), designators(2, None));
    assert_ne!(one.0, other.0);
    assert_ne!(one.1, other.1);
    let given = Some(0x3a5b_0000_0000_0001);
    let shared = designators(1, given);
    assert_eq!(shared, designators(2, given));
    assert_eq!(shared.1, b"LUNETTE 3a5b000000000001");
}

#[test]
fn provisioning_pages_offer_unmap_and_write_same() {
    let mut bed = Bed::new(512, 2048);
    let limits = bed.run(0, &[0x12, 1, 0xb0, 0, 64, 0], &[], 64).data;
    assert_eq!(limits[..4], [0x00, 0xb0, 0x00, 0x3c]);
    assert_eq!(limits[4] & 1, 0); // WSNZ
    assert_eq!(limits[8..12], [0, 1, 0, 0]); // maximum transfer length
    assert_eq!(limits[20..28], [0xff, 0xff, 0xff, 0xff, 0, 0, 1, 0]);
    assert_eq!(limits[28..36], [0, 0, 0, 8, 0x80, 0, 0, 0]);
    assert_eq!(limits[36..44], [0, 0, 0, 0, 0, 0x10, 0, 0]);
    let rotation = bed.run(0, &[0x12, 1, 0xb1, 0, 64, 0], &[], 64).data;
    assert_eq!(rotation[..6], [0x00, 0xb1, 0x00, 0x3c, 0x00, 0x01]);
    let provisioning = bed.run(0, &[0x12, 1, 0xb2, 0, 64, 0], &[], 64).data;
    assert_eq!(
        provisioning,
        [0x00, 0xb2, 0x00, 0x04, 0x00, 0xe6, 0x02, 0x00]
    );
}

#[test]
fn provisioning_page_reports_no_anchor_support() {
    let disk = DiskInfo {
        anchors: false,
        ..info(512, 2048, 0)
    };
    let mut bed = Bed::with(disk, false);
    let provisioning = bed.run(0, &[0x12, 1, 0xb2, 0, 64, 0], &[], 64).data;
    assert_eq!(provisioning[4..], [0x00, 0xe4, 0x02, 0x00]);
}

#[test]
fn read_capacity_gives_the_last_block_and_provisioning() {
    let mut bed = Bed::new(512, 2048);
    let ten = bed.run(0, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 8).data;
    assert_eq!(ten, [0x00, 0x00, 0x07, 0xff, 0x00, 0x00, 0x02, 0x00]);
    let cdb = [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0];
    let sixteen = bed.run(0, &cdb, &[], 32).data;
    assert_eq!(
        sixteen[..16],
        [0, 0, 0, 0, 0, 0, 7, 0xff, 0, 0, 2, 0, 0, 3, 0xc0, 0]
    );
    assert_eq!(sixteen.len(), 32);
}

#[test]
fn report_luns_lists_units_and_the_well_known_one() {
    let mut bed = Bed::new(512, 2048);
    bed.add(300, info(512, 8, 1), false);
    let mut report = |select| bed.run(0, &[0xa0, 0, select, 0, 0, 0, 0, 0, 0, 64, 0, 0], &[], 64);
    let (zero, flat) = ([0u8; 8], [0x41, 0x2c, 0, 0, 0, 0, 0, 0]);
    let well_known = [0xc1, 0x01, 0, 0, 0, 0, 0, 0];
    assert_eq!(
        report(0).data,
        [[0, 0, 0, 16, 0, 0, 0, 0], zero, flat].concat()
    );
    assert_eq!(
        report(1).data,
        [[0, 0, 0, 8, 0, 0, 0, 0], well_known].concat()
    );
    assert_eq!(
        report(2).data,
        [[0, 0, 0, 24, 0, 0, 0, 0], zero, flat, well_known].concat()
    );
    assert_eq!(report(0x11).data, [0; 8]);
    assert_eq!(report(3).code(), (0x05, 0x24, 0x00));
}

#[test]
fn mode_sense_6_caching_page_has_the_write_cache() {
    let mut bed = Bed::new(512, 2048);
    let answer = bed.run(0, &[0x1a, 0x08, 0x08, 0, 255, 0], &[], 255).data;
    assert_eq!(answer[..7], [23, 0x00, 0x10, 0x00, 0x88, 0x12, 0x04]);
    assert_eq!(answer.len(), 24);
    let with_descriptor = bed.run(0, &[0x1a, 0, 0x48, 0, 255, 0], &[], 255).data;
    assert_eq!(
        with_descriptor[..12],
        [31, 0, 0x10, 8, 0, 0, 8, 0, 0, 0, 2, 0]
    );
    assert_eq!(with_descriptor[12..15], [0x88, 0x12, 0x04]); // changeable
}

#[test]
fn mode_sense_10_all_pages_with_a_long_descriptor() {
    let mut bed = Bed::new(512, 2048);
    let answer = bed
        .run(0, &[0x5a, 0x10, 0x3f, 0, 0, 0, 0, 2, 0, 0], &[], 512)
        .data;
    assert_eq!(
        usize::from(answer[0]) << 8 | usize::from(answer[1]),
        answer.len() - 2
    );
    assert_eq!(answer[2..8], [0, 0x10, 1, 0, 0, 16]);
    assert_eq!(
        answer[8..24],
        [0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 2, 0]
    );
    let mut codes = Vec::new();
    let mut rest = &answer[24..];
    while let [code, length, ..] = *rest {
        codes.push(code & 0x3f);
        rest = &rest[2 + usize::from(length)..];
    }
    assert_eq!(codes, [0x01, 0x08, 0x0a, 0x1c]);
}

#[test]
fn mode_sense_of_an_unknown_page_is_an_invalid_field() {
    let mut bed = Bed::new(512, 2048);
    assert_eq!(
        bed.run(0, &[0x1a, 0, 0x05, 0, 255, 0], &[], 255).code(),
        (0x05, 0x24, 0x00)
    );
    assert_eq!(
        bed.run(0, &[0x1a, 0, 0x3f, 7, 255, 0], &[], 255).code(),
        (0x05, 0x24, 0x00)
    );
}

#[test]
fn power_on_attention_reaches_each_nexus_once_not_inquiry() {
    let mut bed = Bed::new(512, 2048);
    let nexus = bed.target.attach_nexus(initiator(2), port(1));
    assert_eq!(
        bed.run_as(&nexus, 0, &[0x12, 0, 0, 0, 96, 0], &[], 96)
            .status,
        Status::Good
    );
    let ready = bed.run_as(&nexus, 0, &[0, 0, 0, 0, 0, 0], &[], 0);
    assert_eq!(ready.code(), (0x06, 0x29, 0x00));
    assert_eq!(
        bed.run_as(&nexus, 0, &[0, 0, 0, 0, 0, 0], &[], 0).status,
        Status::Good
    );
    assert_eq!(bed.run(0, &[0, 0, 0, 0, 0, 0], &[], 0).status, Status::Good);
}

#[test]
fn request_sense_takes_the_unit_attention_as_data() {
    let mut bed = Bed::new(512, 2048);
    let nexus = bed.target.attach_nexus(initiator(2), port(1));
    let sense = bed
        .run_as(&nexus, 0, &[0x03, 0, 0, 0, 252, 0], &[], 252)
        .data;
    assert_eq!(
        sense,
        [
            0x70, 0, 0x06, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x29, 0, 0, 0, 0, 0
        ]
    );
    let sense = bed
        .run_as(&nexus, 0, &[0x03, 1, 0, 0, 252, 0], &[], 252)
        .data;
    assert_eq!(sense, [0x72, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn resize_is_reported_to_every_nexus() {
    let mut bed = Bed::new(512, 2048);
    bed.unit(0).update(info(512, 4096, 0));
    assert_eq!(
        bed.run(0, &[0, 0, 0, 0, 0, 0], &[], 0).code(),
        (0x06, 0x2a, 0x09)
    );
    let ten = bed.run(0, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 8).data;
    assert_eq!(ten[..4], [0x00, 0x00, 0x0f, 0xff]);
}

#[test]
fn new_lun_is_reported_on_others_until_report_luns() {
    let mut bed = Bed::new(512, 2048);
    bed.add(1, info(512, 8, 1), false);
    bed.run(0, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0], &[], 64);
    assert_eq!(bed.run(0, &[0, 0, 0, 0, 0, 0], &[], 0).status, Status::Good);
    bed.target.detach_unit(1);
    assert_eq!(
        bed.run(0, &[0, 0, 0, 0, 0, 0], &[], 0).code(),
        (0x06, 0x3f, 0x0e)
    );
}

/// A worker that has not yet seen a change of the map must not report the old list and remove the unit attention.
#[test]
fn report_luns_through_an_older_view_lists_the_present_units() {
    let mut bed = Bed::new(512, 2048);
    let cdb = [0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0];
    for lun in [Lun::unit(0), Lun::unit(7), Lun::REPORT_LUNS] {
        let report = |view: &TargetView, bed: &mut Bed| {
            let plan = view.begin(&Command {
                nexus: &bed.nexus,
                lun,
                cdb: &cdb,
                attribute: TaskAttribute::Simple,
                data_out_length: 0,
                data_in_length: 64,
            });
            bed.carry_out(plan, &[], 64).data
        };
        let before = bed.target.view();
        bed.add(1, info(512, 8, 1), false);
        let during = bed.target.view();
        assert_eq!(report(&before, &mut bed)[..4], [0, 0, 0, 16]);
        let ready = bed.run(0, &[0, 0, 0, 0, 0, 0], &[], 0);
        assert_eq!(ready.status, Status::Good);
        bed.target.detach_unit(1);
        assert_eq!(report(&during, &mut bed)[..4], [0, 0, 0, 8]);
        let ready = bed.run(0, &[0, 0, 0, 0, 0, 0], &[], 0);
        assert_eq!(ready.status, Status::Good);
    }
}

#[test]
fn a_missing_lun_answers_inquiry_report_luns_and_request_sense_only() {
    let mut bed = Bed::new(512, 2048);
    let inquiry = bed.run(7, &[0x12, 0, 0, 0, 96, 0], &[], 96);
    assert_eq!(inquiry.data[0], 0x7f);
    let luns = bed.run(7, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0], &[], 16);
    assert_eq!(luns.data[..4], [0, 0, 0, 8]);
    let sense = bed.run(7, &[0x03, 0, 0, 0, 18, 0], &[], 18);
    assert_eq!(
        (sense.data[2], sense.data[12], sense.data[13]),
        (0x05, 0x25, 0x00)
    );
    assert_eq!(
        bed.run(7, &[0, 0, 0, 0, 0, 0], &[], 0).code(),
        (0x05, 0x25, 0x00)
    );
}

#[test]
fn the_well_known_unit_answers_report_luns() {
    let mut bed = Bed::new(512, 2048);
    let nexus = std::sync::Arc::clone(&bed.nexus);
    let mut run = |cdb: &[u8]| bed.run_lun(&nexus, Lun::REPORT_LUNS, cdb, &[], 96);
    assert_eq!(run(&[0x12, 0, 0, 0, 96, 0]).data[0], 0x1e);
    assert_eq!(run(&[0, 0, 0, 0, 0, 0]).status, Status::Good);
    assert_eq!(
        run(&[0xa0, 0, 1, 0, 0, 0, 0, 0, 0, 16, 0, 0]).data[8..10],
        [0xc1, 0x01]
    );
    assert_eq!(
        run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]).code(),
        (0x05, 0x20, 0x00)
    );
}

/// A well-known logical unit is identified by its port and device, because it has no name (SPC-4, 7.8.6).
#[test]
fn the_well_known_unit_identifies_its_port_and_device() {
    let mut bed = Bed::new(512, 2048);
    let nexus = std::sync::Arc::clone(&bed.nexus);
    let mut run = |lun, page| bed.run_lun(&nexus, lun, &[0x12, 1, page, 0, 255, 0], &[], 255);
    let pages = run(Lun::REPORT_LUNS, 0x00).data;
    assert_eq!(pages, [0x1e, 0x00, 0, 2, 0x00, 0x83]);
    let page = run(Lun::REPORT_LUNS, 0x83).data;
    assert_eq!(page[..4], [0x1e, 0x83, 0, 88]);
    assert_eq!(page[4..12], [0x51, 0x94, 0, 4, 0, 0, 0, 1]);
    assert_eq!(page[12..20], [0x51, 0x95, 0, 4, 0, 0, 0, 1]);
    assert_eq!(page[20..24], [0x53, 0x98, 0, 36]);
    assert_eq!(&page[24..60], b"iqn.2026-11.org.example:t0,t,0x0001\0");
    assert_eq!(page[60..64], [0x53, 0xa8, 0, 28]);
    assert_eq!(&page[64..], b"iqn.2026-11.org.example:t0\0\0");
    assert_eq!(run(Lun::REPORT_LUNS, 0x80).code(), (0x05, 0x24, 0x00));
    assert_eq!(run(Lun::unit(7), 0x00).data, [0x7f, 0x00, 0, 1, 0x00]);
    assert_eq!(run(Lun::unit(7), 0x83).code(), (0x05, 0x24, 0x00));
}

#[test]
fn unmap_is_no_supported_operation_code_of_a_unit_that_refuses_it() {
    for granularity in [None, Some(4096)] {
        let mut disk = info(512, 2048, 0);
        disk.discard_granularity = granularity;
        let mut bed = Bed::with(disk, false);
        let one = [0xa3, 0x0c, 0x01, 0x42, 0, 0, 0, 0, 1, 0, 0, 0];
        let support = bed.run(0, &one, &[], 256).data[1];
        let all = [0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0];
        let all = bed.run(0, &all, &[], 4096).data;
        let listed = all[4..].chunks(8).any(|row| row[0] == 0x42);
        let unmap = bed.run(0, &[0x42, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0);
        match granularity {
            None => {
                assert_eq!((support, listed), (0x01, false));
                assert_eq!(unmap.code(), (0x05, 0x20, 0x00));
            }
            Some(_) => assert_eq!((support, listed, unmap.status), (0x03, true, Status::Good)),
        }
    }
}

#[test]
fn supported_operation_codes_all_and_one() {
    let mut bed = Bed::new(512, 2048);
    let cdb = [0xa3, 0x0c, 0x80, 0, 0, 0, 0, 0, 0x10, 0, 0, 0];
    let all = bed.run(0, &cdb, &[], 4096).data;
    let length = u32::from_be_bytes([all[0], all[1], all[2], all[3]]) as usize;
    assert_eq!((length, length % 20), (all.len() - 4, 0));
    assert_eq!(all[4..16], [0x00, 0, 0, 0, 0, 0x02, 0, 6, 0x00, 0x0a, 0, 0]);
    let one = bed
        .run(
            0,
            &[0xa3, 0x0c, 0x01, 0x28, 0, 0, 0, 0, 1, 0, 0, 0],
            &[],
            256,
        )
        .data;
    let usage = [0x28, 0x1a, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, 0x00];
    assert_eq!(one, [&[0, 0x03, 0, 10][..], &usage].concat());
    let none = bed
        .run(
            0,
            &[0xa3, 0x0c, 0x01, 0xc0, 0, 0, 0, 0, 1, 0, 0, 0],
            &[],
            256,
        )
        .data;
    assert_eq!(none[1], 0x01);
    let actions = bed.run(
        0,
        &[0xa3, 0x0c, 0x01, 0x9e, 0, 0, 0, 0, 1, 0, 0, 0],
        &[],
        256,
    );
    assert_eq!(actions.code(), (0x05, 0x24, 0x00));
}

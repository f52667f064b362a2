//! INQUIRY's vital product data pages (SPC-5, 7.7; SBC-4, 6.6).

use std::sync::Arc;

use block::DiskInfo;

use super::Context;
use super::compare_write::compare_and_write_blocks_max;
use super::inquiry::{Peripheral, VENDOR};
use super::provisioning::{UNMAP_DESCRIPTORS_MAX, write_same_blocks_max};
use super::read_write::TRANSFER_MAX;
use super::receive_copy::third_party_copy_page;
use crate::nexus::TargetPort;

const SUPPORTED_PAGES: u8 = 0x00;
const UNIT_SERIAL_NUMBER: u8 = 0x80;
pub(super) const DEVICE_IDENTIFICATION: u8 = 0x83;
const EXTENDED_INQUIRY: u8 = 0x86;
const SCSI_PORTS: u8 = 0x88;
const THIRD_PARTY_COPY: u8 = 0x8f;
const BLOCK_LIMITS: u8 = 0xb0;
const BLOCK_DEVICE_CHARACTERISTICS: u8 = 0xb1;
const LOGICAL_BLOCK_PROVISIONING: u8 = 0xb2;
const REFERRALS: u8 = 0xb3;

/// All pages in ascending order, as listed in page 00h.
const PAGES: [u8; 10] = [
    SUPPORTED_PAGES,
    UNIT_SERIAL_NUMBER,
    DEVICE_IDENTIFICATION,
    EXTENDED_INQUIRY,
    SCSI_PORTS,
    THIRD_PARTY_COPY,
    BLOCK_LIMITS,
    BLOCK_DEVICE_CHARACTERISTICS,
    LOGICAL_BLOCK_PROVISIONING,
    REFERRALS,
];

/// Returns the page with this code, if it exists.
pub(super) fn page(c: &Context<'_>, peripheral: Peripheral, code: u8) -> Option<Vec<u8>> {
    let body = match code {
        SUPPORTED_PAGES => PAGES.to_vec(),
        UNIT_SERIAL_NUMBER => serial(&c.unit.state().info).into(),
        DEVICE_IDENTIFICATION => {
            let state = c.unit.state();
            device_identification(&state.info, c.nexus.port())
        }
        EXTENDED_INQUIRY => extended_inquiry(),
        SCSI_PORTS => scsi_ports(c.unit.state().ports()),
        THIRD_PARTY_COPY => third_party_copy_page(),
        BLOCK_LIMITS => block_limits(&c.unit.state().info),
        BLOCK_DEVICE_CHARACTERISTICS => block_device_characteristics(&c.unit.state().info),
        LOGICAL_BLOCK_PROVISIONING => logical_block_provisioning(&c.unit.state().info),
        // One user data segment: the whole unit.
        REFERRALS => vec![0; 12],
        _ => return None,
    };
    Some(framed(peripheral, code, &body))
}

/// Returns header and body of a page.
pub(super) fn framed(peripheral: Peripheral, code: u8, body: &[u8]) -> Vec<u8> {
    let [high, low] = (body.len() as u16).to_be_bytes();
    let mut page = vec![peripheral as u8, code, high, low];
    page.extend_from_slice(body);
    page
}

fn serial(info: &DiskInfo) -> String {
    info.serial
        .chars()
        .filter(char::is_ascii_graphic)
        .take(20)
        .collect()
}

/// Returns page 83h: designators of the unit, of the port of the nexus, and of its device.
fn device_identification(info: &DiskInfo, port: &TargetPort) -> Vec<u8> {
    let mut list = Vec::new();
    // NAA, 8 bytes; binary, of the logical unit.
    designator(&mut list, 0x01, 0x03, &info.naa.to_be_bytes());
    // T10 vendor ID based; ASCII, of the logical unit. Linux and sg3_utils prefer it to a locally assigned NAA identifier, so it must be as
    // unique: never a name or a chosen serial number.
    let unique = info.vendor_specific_identifier();
    designator(&mut list, 0x02, 0x01, &[VENDOR, unique.as_bytes()].concat());
    list.extend(port_identification(port));
    list
}

/// Returns page 83h of a well-known logical unit: it has no designator of its own (SAM-5, 4.7.4), only those of its port and device.
pub(super) fn well_known_identification(port: &TargetPort) -> Vec<u8> {
    let designators = port_identification(port);
    framed(Peripheral::WellKnown, DEVICE_IDENTIFICATION, &designators)
}

/// Returns the designators of a port and of its device.
fn port_identification(port: &TargetPort) -> Vec<u8> {
    let mut list = Vec::new();
    // Relative target port and target port group; binary, of the port. A port with a name is an iSCSI port (protocol identifier 5). A
    // guest's port has no standardised protocol, which PIV indicates.
    let (code_set, kind) = match port.name {
        Some(_) => (0x51, 0x90),
        None => (0x01, 0x10),
    };
    let [high, low] = port.relative_id.to_be_bytes();
    designator(&mut list, code_set, kind | 0x04, &[0, 0, high, low]);
    let [high, low] = port.group.to_be_bytes();
    designator(&mut list, code_set, kind | 0x05, &[0, 0, high, low]);
    // SCSI name strings; UTF-8, of the port and of its device.
    if let Some(name) = &port.name {
        designator(&mut list, 0x53, 0x98, &name_string(name));
    }
    if let Some(name) = &port.device_name {
        designator(&mut list, 0x53, 0xa8, &name_string(name));
    }
    list
}

fn designator(list: &mut Vec<u8>, code_set: u8, kind: u8, value: &[u8]) {
    list.extend([code_set, kind, 0, value.len() as u8]);
    list.extend_from_slice(value);
}

/// Returns a string with a final NUL, padded to a multiple of four (SPC-5, 7.7.6.11).
fn name_string(name: &str) -> Vec<u8> {
    let mut bytes: Vec<u8> = name.bytes().take(223).collect();
    bytes.push(0);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Page 86h: no protection; SIMPLE, ORDERED and HEAD OF QUEUE; LUICLR.
fn extended_inquiry() -> Vec<u8> {
    let mut body = [0; 60];
    body[1] = 0x07; // SIMPSUP, ORDSUP, HEADSUP
    body[2] = 0x01; // V_SUP: a volatile cache may be there
    body[3] = 0x01; // LUICLR: nexus losses clear only what the standard says
    body.into()
}

/// Returns page 88h: all ports of the unit, with their names.
fn scsi_ports<'a>(ports: impl Iterator<Item = &'a Arc<TargetPort>>) -> Vec<u8> {
    let mut body = Vec::new();
    for port in ports {
        let mut names = Vec::new();
        if let Some(name) = &port.name {
            designator(&mut names, 0x53, 0x98, &name_string(name));
        }
        let [high, low] = port.relative_id.to_be_bytes();
        body.extend([0, 0, high, low, 0, 0, 0, 0, 0, 0]);
        body.extend((names.len() as u16).to_be_bytes());
        body.extend(names);
    }
    body
}

/// Page B0h.
fn block_limits(info: &DiskInfo) -> Vec<u8> {
    let shift = info.geometry.block_shift();
    let blocks = |bytes: u64| ((bytes >> shift) as u32).to_be_bytes();
    let mut body = [0; 60];
    body[1] = compare_and_write_blocks_max(info) as u8;
    let granularity = (info.physical_block_size >> shift).max(1) as u16;
    body[2..4].copy_from_slice(&granularity.to_be_bytes());
    body[4..8].copy_from_slice(&blocks(TRANSFER_MAX));
    body[8..12].copy_from_slice(&blocks(info.optimal_io_size.into()));
    body[12..16].copy_from_slice(&blocks(TRANSFER_MAX)); // prefetch
    if let Some(discard) = info.discard_granularity {
        body[16..20].copy_from_slice(&u32::MAX.to_be_bytes()); // unmap: no limit of blocks
        body[20..24].copy_from_slice(&(UNMAP_DESCRIPTORS_MAX as u32).to_be_bytes());
        body[24..28].copy_from_slice(&(discard >> shift).max(1).to_be_bytes());
        body[28] = 0x80; // UGAVALID, alignment 0
    }
    body[32..40].copy_from_slice(&write_same_blocks_max(shift).to_be_bytes());
    // All zero: WRITE ATOMIC is not supported. Alignment and granularity 0: any block.
    if let Some(atomic) = info.atomic_writes {
        body[40..44].copy_from_slice(&blocks(atomic.bytes_max.into()));
        if atomic.unit >> shift > 1 {
            body[44..48].copy_from_slice(&blocks(atomic.unit.into())); // alignment
            body[48..52].copy_from_slice(&blocks(atomic.unit.into())); // granularity
        }
    }
    body.into()
}

/// Page B1h.
fn block_device_characteristics(info: &DiskInfo) -> Vec<u8> {
    let mut body = [0; 60];
    // MEDIUM ROTATION RATE: 0000h not reported, 0001h non-rotating.
    body[1] = if info.rotational { 0x00 } else { 0x01 };
    // WABEREQ and WACEREQ 01b: reads succeed after an erase.
    body[3] = 0x50;
    body.into()
}

/// Page B2h.
fn logical_block_provisioning(info: &DiskInfo) -> Vec<u8> {
    if info.discard_granularity.is_none() {
        return vec![0, 0, 0, 0];
    }
    // LBPU, LBPWS, LBPWS10.
    let zeroes = if info.discard_zeroes { 0x04 } else { 0x00 };
    let anchors = if info.anchors { 0x02 } else { 0x00 }; // ANC_SUP
    vec![0, 0xe0 | zeroes | anchors, 0x02, 0]
}

//! Sends PERSISTENT RESERVE OUT with arbitrary parameter lists from three initiators, one of them through another port. Rules: no
//! panic, and well-formed PERSISTENT RESERVE IN data afterwards.
//!
//! There are few keys and names, so that registrations collide.

use crate::common::{Answer, Bed, initiator, port};
use crate::input::Input;
use scsi::{Status, TransportId};
use std::sync::Arc;

struct Service<'a> {
    who: u8,
    action: u8,
    scope_and_type: u8,
    own: u8,
    new: u8,
    flags: u8,
    list: List<'a>,
    /// Difference between the length in the CDB and the length of the list.
    length: i8,
}

enum List<'a> {
    Plain,
    /// Numbers of the initiators in the list of TransportIDs.
    Ports(&'a [u8]),
    Any(&'a [u8]),
    /// Relative target port and initiator for REGISTER AND MOVE.
    Move(u8, u8),
}

impl<'a> Service<'a> {
    /// Reads eight bytes and the list.
    fn of(input: &mut Input<'a>) -> Service<'a> {
        let [who, action, scope_and_type, own, new, flags, kind, length] = input.array();
        let count = usize::from(kind >> 2);
        Service {
            who,
            action,
            scope_and_type,
            own,
            new,
            flags,
            list: match kind & 3 {
                0 => List::Plain,
                1 => List::Ports(input.bytes(count)),
                2 => List::Any(input.bytes(count)),
                _ => List::Move(input.byte(), input.byte()),
            },
            length: length as i8,
        }
    }
}

fn keys(service: &Service<'_>) -> Vec<u8> {
    let mut list = vec![0; 16];
    list[7] = service.own % 4;
    list[15] = service.new % 4;
    list
}

fn parameter_list(service: &Service<'_>) -> Vec<u8> {
    let mut list = keys(service);
    match &service.list {
        List::Plain => list.extend([0, 0, 0, 0, service.flags, 0, 0, 0]),
        List::Any(bytes) => list.extend(*bytes),
        List::Ports(ports) => {
            list.extend([0, 0, 0, 0, service.flags | 0x08, 0, 0, 0]);
            let ids: Vec<u8> = ports
                .iter()
                .flat_map(|&number| id(number).as_bytes().to_vec())
                .collect();
            list.extend((ids.len() as u32).to_be_bytes());
            list.extend(ids);
        }
        List::Move(relative_port, number) => {
            list.extend([0, service.flags, 0, relative_port % 3]);
            let id = id(*number);
            list.extend((id.as_bytes().len() as u32).to_be_bytes());
            list.extend(id.as_bytes());
        }
    }
    list
}

fn id(number: u8) -> TransportId {
    match number & 4 {
        0 => initiator(number % 4),
        _ => TransportId::iscsi_device("iqn.2026-11.org.example:i"),
    }
}

/// Sends PERSISTENT RESERVE IN from the first initiator, after its pending unit attentions.
fn read(bed: &mut Bed, action: u8) -> Answer {
    let cdb = [0x5e, action, 0, 0, 0, 0, 0, 0xff, 0xff, 0];
    for _ in 0..8 {
        let answer = bed.run(0, &cdb, &[], 0xffff);
        if answer.status == Status::Good {
            return answer;
        }
        let (key, ..) = answer.code();
        assert_eq!((answer.status, key), (Status::CheckCondition, 6));
    }
    panic!("unit attentions without end");
}

/// Executes the service actions in `data`.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let mut bed = Bed::new(512, 64);
    let second = bed.other_nexus(2);
    let third = bed.target.attach_nexus(initiator(3), port(2));
    let nexuses = [Arc::clone(&bed.nexus), second, third];
    for _ in 0..32 {
        if input.is_empty() {
            break;
        }
        let service = Service::of(&mut input);
        let list = parameter_list(&service);
        let length = (list.len() as i64 + i64::from(service.length)).clamp(0, 0xffff) as u32;
        let [a, b, c, d] = length.to_be_bytes();
        let cdb = [
            0x5f,
            service.action & 0x1f,
            service.scope_and_type,
            0,
            0,
            a,
            b,
            c,
            d,
            0,
        ];
        let nexus = &nexuses[usize::from(service.who % 3)];
        bed.run_as(nexus, 0, &cdb, &list, 0);

        let keys = read(&mut bed, 0);
        let list_length = u32::from_be_bytes(keys.data[4..8].try_into().unwrap()) as usize;
        assert_eq!(keys.data.len(), 8 + list_length);
        assert!(list_length.is_multiple_of(8));
        let held = read(&mut bed, 1);
        let list_length = u32::from_be_bytes(held.data[4..8].try_into().unwrap()) as usize;
        assert_eq!(held.data.len(), 8 + list_length);
        assert!(matches!(list_length, 0 | 16));
        // A reservation holder is registered.
        assert!(list_length == 0 || keys.data.len() > 8);
        let full = read(&mut bed, 3);
        let mut descriptors = full.data.get(8..).unwrap_or_default();
        let mut count = 0;
        while !descriptors.is_empty() {
            let more = u32::from_be_bytes(descriptors[20..24].try_into().unwrap()) as usize;
            descriptors = &descriptors[24 + more..];
            count += 1;
        }
        assert_eq!(count, (keys.data.len() - 8) / 8);
    }
}

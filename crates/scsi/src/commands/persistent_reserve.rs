//! PERSISTENT RESERVE IN and OUT (SPC-4, 6.15 and 6.16): parameter lists here, services in `reservations`. If other daemons serve the unit
//! too, PERSISTENT RESERVE OUT is a program: [`shared`].

mod shared;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};

use super::parameter_list::{check_bits, check_zero};
use super::{Context, Planned};
use crate::command::opcode::{PERSISTENT_RESERVE_IN, PERSISTENT_RESERVE_OUT};
use crate::command::{be16, be32};
use crate::logical_unit::LogicalUnit;
use crate::nexus::{Nexus, TransportId};
use crate::plan::{Pending, Plan};
use crate::reservations::{DaemonId, Effects, Kind, Refusal, Registrant, Reservations};
use crate::response::Response;
use crate::sense::{Sense, SenseCode};
use crate::task_management::AbortScope;
use crate::unit_state::UnitState;

/// Returns true for these two commands.
pub(super) fn is_one(opcode: u8) -> bool {
    matches!(opcode, PERSISTENT_RESERVE_IN | PERSISTENT_RESERVE_OUT)
}

pub(super) fn persistent_reserve_in(c: &Context<'_>) -> Planned {
    let state = c.unit.state();
    let reservations = &state.reservations;
    let data = match c.cdb[1] & 0x1f {
        0x00 => read_keys(reservations),
        0x01 => read_reservation(reservations),
        0x02 => report_capabilities(reservations),
        0x03 => read_full_status(reservations),
        _ => return Err(Sense::cdb_bit(1, 4)),
    };
    c.data(data, be16(c.cdb, 7).into())
}

fn with_header(reservations: &Reservations, list: Vec<u8>) -> Vec<u8> {
    let mut data = reservations.generation.to_be_bytes().to_vec();
    data.extend((list.len() as u32).to_be_bytes());
    data.extend(list);
    data
}

fn read_keys(reservations: &Reservations) -> Vec<u8> {
    let keys = reservations
        .registrations
        .iter()
        .flat_map(|known| known.key.to_be_bytes());
    with_header(reservations, keys.collect())
}

fn read_reservation(reservations: &Reservations) -> Vec<u8> {
    let mut list = Vec::new();
    if let Some(reservation) = &reservations.reservation {
        let holder = reservation.holder.as_ref();
        let known =
            holder.and_then(|who| reservations.registrations.iter().find(|it| it.who == *who));
        // All registrants are holders: the key is zero.
        list.extend(known.map_or(0, |known| known.key).to_be_bytes());
        list.extend([0, 0, 0, 0, 0, reservation.kind as u8, 0, 0]);
    }
    with_header(reservations, list)
}

fn report_capabilities(reservations: &Reservations) -> Vec<u8> {
    // SIP_C, ATP_C, PTPL_C; TMV and PTPL_A; all six types.
    let active = u8::from(reservations.persist);
    vec![0, 8, 0x0d, 0x80 | active, 0xea, 0x01, 0, 0]
}

fn read_full_status(reservations: &Reservations) -> Vec<u8> {
    let mut list = Vec::new();
    for known in &reservations.registrations {
        let holds = reservations.holds(&known.who);
        let kind = reservations
            .reservation
            .as_ref()
            .filter(|_| holds)
            .map_or(0, |it| it.kind as u8);
        let id = known.who.initiator.as_bytes();
        list.extend(known.key.to_be_bytes());
        list.extend([0, 0, 0, 0, u8::from(holds), kind, 0, 0, 0, 0]);
        list.extend(known.who.port.to_be_bytes());
        list.extend((id.len() as u32).to_be_bytes());
        list.extend(id);
    }
    with_header(reservations, list)
}

/// Service actions of PERSISTENT RESERVE OUT.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Service {
    Register,
    Reserve,
    Release,
    Clear,
    Preempt,
    PreemptAndAbort,
    RegisterAndIgnore,
    RegisterAndMove,
}

impl Service {
    fn from_code(code: u8) -> Option<Service> {
        use Service::*;
        let all = [
            Register,
            Reserve,
            Release,
            Clear,
            Preempt,
            PreemptAndAbort,
            RegisterAndIgnore,
            RegisterAndMove,
        ];
        all.get(usize::from(code)).copied()
    }
}

pub(super) fn persistent_reserve_out(c: &Context<'_>) -> Planned {
    let service = Service::from_code(c.cdb[1] & 0x1f).ok_or(Sense::cdb_bit(1, 4))?;
    let (scope, kind) = (c.cdb[2] >> 4, Kind::from_code(c.cdb[2] & 0x0f));
    // SPC-4, table 216: only these ignore the scope.
    let any_scope = matches!(
        service,
        Service::Register | Service::RegisterAndIgnore | Service::Clear
    );
    if !any_scope && scope != 0 {
        return Err(Sense::cdb_bit(2, 7));
    }
    if service == Service::Reserve && kind.is_none() {
        return Err(Sense::cdb_bit(2, 3));
    }
    let length = be32(c.cdb, 5) as usize;
    if !(24..=LIST_MAX).contains(&length) {
        return Err(Sense::illegal_request(
            SenseCode::PARAMETER_LIST_LENGTH_ERROR,
        ));
    }
    let (unit, nexus) = (Arc::clone(c.unit), Arc::clone(c.nexus));
    Ok(Pending::plan(
        length as u64,
        c.data_out,
        move |list: &[u8]| {
            let list = match List::parse(list, length, service) {
                Ok(list) => list,
                Err(sense) => return Plan::Done(sense.into()),
            };
            let request = Request {
                service,
                kind,
                list,
            };
            if unit.state().sharing.is_some() {
                return shared::plan(unit, nexus, request);
            }
            let served = serve(&unit, &nexus, &request);
            Plan::Done(served.unwrap_or_else(Response::from))
        },
    ))
}

/// Maximum length of a parameter list. TransportIDs for the maximum number of registrations do not fit; 64 KiB suffice.
const LIST_MAX: usize = 1 << 16;

#[derive(Clone)]
struct List {
    key: u64,
    new_key: u64,
    persist: bool,
    all_ports: bool,
    unregister: bool,
    move_to_port: u16,
    spec_i_pt: bool,
    /// TransportIDs of SPEC_I_PT, or the destination of a moved reservation.
    initiators: Vec<TransportId>,
}

impl List {
    fn parse(list: &[u8], length: usize, service: Service) -> Result<List, Sense> {
        let length_error = Sense::illegal_request(SenseCode::PARAMETER_LIST_LENGTH_ERROR);
        let Some((head, rest)) = list.split_first_chunk::<24>() else {
            return Err(length_error);
        };
        if list.len() < length {
            return Err(length_error);
        }
        let [key, new_key, tail] = [0, 8, 16].map(|at| {
            let mut eight = [0; 8];
            eight.copy_from_slice(&head[at..at + 8]);
            u64::from_be_bytes(eight)
        });
        let moves = service == Service::RegisterAndMove;
        let [_, move_flags, port_high, port_low, flags, ..] = tail.to_be_bytes();
        let registers = matches!(service, Service::Register | Service::RegisterAndIgnore);
        if moves {
            // UNREG, APTPL.
            check_zero(16, &head[16..17])?;
            check_bits(17, move_flags, 0x03, &[])?;
        } else {
            // SPEC_I_PT, ALL_TG_PT, APTPL; bytes 16 to 19 and 22 and 23 are obsolete.
            check_zero(16, &head[16..20])?;
            check_bits(20, flags, 0x0d, &[])?;
            check_zero(21, &head[21..])?;
        }
        let spec_i_pt = !moves && flags & 0x08 != 0;
        if spec_i_pt && service != Service::Register {
            return Err(Sense::parameter_bit(20, 3));
        }
        let ids = if moves {
            let id_length = u32::from_be_bytes([head[20], head[21], head[22], head[23]]);
            if id_length as usize != rest.len() {
                return Err(length_error);
            }
            rest
        } else if spec_i_pt {
            let (id_length, ids) = rest.split_first_chunk::<4>().ok_or(length_error)?;
            if u32::from_be_bytes(*id_length) as usize != ids.len() {
                return Err(length_error);
            }
            ids
        } else if rest.is_empty() {
            rest
        } else {
            return Err(length_error);
        };
        let initiators = parse_ids(ids)?;
        if moves && initiators.len() != 1 {
            return Err(Sense::parameter_field(24));
        }
        Ok(List {
            key,
            new_key,
            persist: if moves {
                move_flags & 0x01 != 0
            } else {
                flags & 0x01 != 0
            },
            all_ports: registers && flags & 0x04 != 0,
            unregister: moves && move_flags & 0x02 != 0,
            move_to_port: u16::from_be_bytes([port_high, port_low]),
            spec_i_pt,
            initiators,
        })
    }
}

fn parse_ids(mut ids: &[u8]) -> Result<Vec<TransportId>, Sense> {
    let mut parsed = Vec::new();
    while !ids.is_empty() {
        let (id, rest) = TransportId::parse(ids).ok_or(Sense::parameter_field(24))?;
        parsed.push(id);
        ids = rest;
    }
    Ok(parsed)
}

/// A PERSISTENT RESERVE OUT command.
struct Request {
    service: Service,
    kind: Option<Kind>,
    list: List,
}

fn serve(unit: &LogicalUnit, nexus: &Nexus, request: &Request) -> Result<Response, Refusal> {
    let mut state = unit.state();
    let (reservations, effects) = change(&state, nexus, request)?;
    let before = std::mem::replace(&mut state.reservations, reservations);
    if before.persist || state.reservations.persist {
        // GOOD promises that the state survives a power loss, so it must be durable first.
        if let Err(sense) = state.save_reservations(unit.directory().store()) {
            state.reservations = before;
            return Err(sense.into());
        }
    }
    unit.refresh_word(&state);
    state.establish(unit.id(), &effects);
    if matches!(request.service, Service::PreemptAndAbort | Service::Clear) {
        state.allow_removal_by_lost(&before);
    }
    Ok(answer(unit, &state, &effects.aborts))
}

/// Returns the new reservations, and the effects on other registrants.
fn change(
    state: &UnitState,
    nexus: &Nexus,
    request: &Request,
) -> Result<(Reservations, Effects), Refusal> {
    let (service, kind) = (request.service, request.kind);
    if state.reservations.reserved_by.is_some() {
        return Err(Refusal::Conflict);
    }
    let list = &List {
        initiators: initiator_ports(state, &request.list.initiators)?,
        ..request.list.clone()
    };
    let who = Registrant::of(nexus);
    let ports: Vec<u16> = state.ports().map(|port| port.relative_id).collect();
    let mut reservations = state.reservations.clone();
    let (key, new_key) = (list.key, list.new_key);
    let effects = match service {
        Service::Register | Service::RegisterAndIgnore => {
            let ignore = service == Service::RegisterAndIgnore;
            let registered = reservations.registration(nexus);
            // A wrong key still is a conflict.
            if list.spec_i_pt && registered.is_some_and(|known| known.key == key) {
                return Err(Sense::parameter_field(20).into());
            }
            let others = further_registrants(&who, list, &ports);
            let effects =
                reservations.register(&who, &others, key, new_key, ignore, list.persist)?;
            if new_key != 0 && names_registered(&state.reservations, &others, list) {
                return Err(Sense::parameter_field(24).into());
            }
            effects
        }
        Service::Reserve => match kind {
            Some(kind) => reservations.reserve(&who, key, kind)?,
            None => return Err(Sense::cdb_bit(2, 3).into()),
        },
        Service::Release => reservations.release(&who, key, kind)?,
        Service::Clear => reservations.clear(&who, key)?,
        Service::Preempt => reservations.preempt(&who, key, new_key, kind, false)?,
        Service::PreemptAndAbort => reservations.preempt(&who, key, new_key, kind, true)?,
        Service::RegisterAndMove => {
            if !ports.contains(&list.move_to_port) {
                return Err(Sense::parameter_field(18).into());
            }
            let [initiator] = list.initiators.as_slice() else {
                return Err(Sense::parameter_field(24).into());
            };
            let to = Registrant {
                daemon: DaemonId::THIS,
                initiator: initiator.clone(),
                port: list.move_to_port,
            };
            reservations.register_and_move(&who, key, to, new_key, list.unregister, list.persist)?
        }
    };
    Ok((reservations, effects))
}

/// Resolves TransportIDs to initiator ports: the name of an iSCSI node stands for all its known ports (SPC-4, 7.6.4.6). A node without
/// known ports is refused, because it would register no port.
fn initiator_ports(state: &UnitState, ids: &[TransportId]) -> Result<Vec<TransportId>, Sense> {
    if !ids.iter().any(TransportId::is_node) {
        return Ok(ids.to_vec());
    }
    let mut known: BTreeMap<TransportId, BTreeSet<TransportId>> = BTreeMap::new();
    for nexus in state.nexuses.iter().filter_map(Weak::upgrade) {
        let port = nexus.initiator();
        known.entry(port.node()).or_default().insert(port.clone());
    }
    let mut ports = BTreeSet::new();
    let ids: BTreeSet<_> = ids.iter().collect();
    for id in ids {
        if !id.is_node() {
            ports.insert(id.clone());
            continue;
        }
        let of_node = known.get(id).ok_or(Sense::parameter_field(24))?;
        ports.extend(of_node.iter().cloned());
    }
    Ok(ports.into_iter().collect())
}

/// Returns GOOD, to be sent after the abort of these registrants' tasks.
fn answer(unit: &LogicalUnit, state: &UnitState, aborts: &[Registrant]) -> Response {
    let nexuses = aborts.iter().flat_map(|who| state.nexuses_to_abort(who));
    let nexuses: Vec<_> = nexuses.map(|nexus| nexus.id()).collect();
    let mut response = Response::good();
    if !nexuses.is_empty() {
        response.abort = Some(Box::new(AbortScope::fencing(unit.id(), nexuses)));
    }
    response
}

/// Returns true if SPEC_I_PT names a port that is registered already, with its own key (SPC-4, table 67).
fn names_registered(reservations: &Reservations, others: &[Registrant], list: &List) -> bool {
    let named = |who: &Registrant| list.initiators.contains(&who.initiator);
    let mut registered = reservations.registrations.iter().map(|known| &known.who);
    registered.any(|who| named(who) && others.contains(who))
}

/// Returns the further registrants: the initiators of SPEC_I_PT, and with ALL_TG_PT all initiators at every port.
fn further_registrants(who: &Registrant, list: &List, ports: &[u16]) -> Vec<Registrant> {
    let own = [who.port];
    let ports = if list.all_ports { ports } else { &own };
    let initiators = std::iter::once(&who.initiator).chain(&list.initiators);
    let all = initiators.flat_map(|initiator| {
        ports.iter().map(|&port| Registrant {
            daemon: DaemonId::THIS,
            initiator: initiator.clone(),
            port,
        })
    });
    all.filter(|other| other != who).collect()
}

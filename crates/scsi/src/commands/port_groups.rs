//! REPORT and SET TARGET PORT GROUPS (SPC-5, 6.36 and 6.45): ALUA.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::parameter_list::{check_bits, check_zero};
use super::{Context, Planned, good};
use crate::command::be32;
use crate::logical_unit::LogicalUnit;
use crate::nexus::{Nexus, StateSetters, TargetPort};
use crate::plan::{Pending, Plan};
use crate::response::Response;
use crate::sense::{Sense, SenseCode};
use crate::unit_state::{AccessState, GroupState, StateReason, UnitState};

/// Service action of MAINTENANCE IN and of MAINTENANCE OUT.
pub(super) const TARGET_PORT_GROUPS: u8 = 0x0a;

/// T_SUP, U_SUP, S_SUP, AN_SUP, AO_SUP.
const SUPPORTED_STATES: u8 = 0x8f;

fn groups(state: &UnitState) -> BTreeMap<u16, Vec<u16>> {
    let mut groups: BTreeMap<u16, Vec<u16>> = BTreeMap::new();
    for port in state.ports() {
        groups.entry(port.group).or_default().push(port.relative_id);
    }
    groups
}

pub(super) fn report(c: &Context<'_>) -> Planned {
    let extended = match c.cdb[1] >> 5 {
        0b000 => false,
        0b001 => true,
        _ => return Err(Sense::cdb_bit(1, 7)),
    };
    let state = c.unit.state();
    let mut list = Vec::new();
    if extended {
        list.extend([0x10, 0, 0, 0]);
    }
    for (group, ports) in groups(&state) {
        let GroupState { access, reason } = state.group_state(group);
        let [high, low] = group.to_be_bytes();
        // TARGET PORT COUNT is one byte: a larger group has several descriptors.
        for ports in ports.chunks(u8::MAX.into()) {
            list.extend([
                access as u8,
                SUPPORTED_STATES,
                high,
                low,
                0,
                reason as u8,
                0,
                ports.len() as u8,
            ]);
            for port in ports {
                let [high, low] = port.to_be_bytes();
                list.extend([0, 0, high, low]);
            }
        }
    }
    let mut data = (list.len() as u32).to_be_bytes().to_vec();
    data.extend(list);
    c.data(data, be32(c.cdb, 6))
}

pub(super) fn set(c: &Context<'_>) -> Planned {
    let length = be32(c.cdb, 6);
    if length == 0 {
        return good();
    }
    if !(4..=4 + 4 * 256).contains(&length) {
        return Err(Sense::illegal_request(
            SenseCode::PARAMETER_LIST_LENGTH_ERROR,
        ));
    }
    let (unit, nexus) = (Arc::clone(c.unit), Arc::clone(c.nexus));
    Ok(Pending::plan(
        length.into(),
        c.data_out,
        move |list: &[u8]| {
            let set = match list.split_first_chunk::<4>() {
                Some((reserved, descriptors)) if list.len() == length as usize => {
                    check_zero(0, reserved).and_then(|()| set_states(&unit, &nexus, descriptors))
                }
                _ => Err(Sense::illegal_request(
                    SenseCode::PARAMETER_LIST_LENGTH_ERROR,
                )),
            };
            Plan::Done(set.map_or_else(Response::check, |()| Response::good()))
        },
    ))
}

fn set_states(unit: &LogicalUnit, nexus: &Nexus, descriptors: &[u8]) -> Result<(), Sense> {
    let (descriptors, rest) = descriptors.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(Sense::illegal_request(
            SenseCode::PARAMETER_LIST_LENGTH_ERROR,
        ));
    }
    let mut state = unit.state();
    let mut wanted = Vec::with_capacity(descriptors.len());
    for (at, &[access, reserved, high, low]) in descriptors.iter().enumerate() {
        let at = 4 + 4 * at as u16;
        check_bits(at, access, 0x0f, &[])?;
        check_zero(at + 1, &[reserved])?;
        let access = match access & 0x0f {
            0x0 => AccessState::ActiveOptimized,
            0x1 => AccessState::ActiveNonOptimized,
            0x2 => AccessState::Standby,
            0x3 => AccessState::Unavailable,
            _ => return Err(Sense::parameter_bit(at, 3)),
        };
        let group = u16::from_be_bytes([high, low]);
        let mut ports = state.ports().filter(|port| port.group == group);
        // Another target of the unit may reserve its states to the administrator.
        if !ports.next().is_some_and(|port| may_set(port)) {
            return Err(Sense::parameter_field(at + 2));
        }
        wanted.push((group, access));
    }
    let mut changed = false;
    for (group, access) in wanted {
        changed |= state.set_group(group, access, StateReason::Explicit);
    }
    if changed {
        let code = SenseCode::ASYMMETRIC_STATE_CHANGED;
        state.attention_all(unit.id(), code, Some(nexus));
        unit.refresh_word(&state);
    }
    Ok(())
}

pub(super) fn may_set(port: &TargetPort) -> bool {
    port.state_setters == StateSetters::Initiators
}

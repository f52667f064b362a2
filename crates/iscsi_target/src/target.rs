//! An iSCSI target: name, portal groups, logical units and access rights.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use bdev::Disk;
use iscsi::login::ChapUser;
use iscsi::negotiation::LoginBounds;
use request_engine::GroupMemory;
use scsi::{AccessState, AccessStates, AttachError, StateSetters, Target, TargetPort, UnitId};
use scsi_exec::Units;

use crate::shared::{lock, replace_users};
use iscsi::access::{AclEntry, Announced, DemoMode, Portal};

/// Configuration of a target.
#[derive(Clone, Debug, Default)]
pub struct TargetOptions {
    /// iSCSI name.
    pub name: String,
    /// TargetAlias: a name for humans.
    pub alias: Option<String>,
    /// Portals to listen on.
    pub portals: Vec<Portal>,
    /// Addresses that discovery lists instead of the portals of the same group.
    pub announce: Vec<Announced>,
    /// Access of unknown initiators.
    pub demo_mode: DemoMode,
    /// Access control list.
    pub acl: Vec<AclEntry>,
    /// CHAP users by name. If there are any, every initiator must authenticate as one of them.
    pub chap_users: HashMap<String, ChapUser>,
    /// Limits for login negotiation.
    pub bounds: LoginBounds,
    /// Access states of its portal groups.
    pub access_states: AccessStates,
    /// Initiators that may change these states.
    pub state_setters: StateSetters,
}

/// A portal group as a target port group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortGroupStatus {
    /// Target portal group tag.
    pub tag: u16,
    /// Number of the target port group, as initiators see it.
    pub port_group: u16,
    /// Access state that the administrator set.
    pub state: AccessState,
    /// Logical units with another state, set by initiators.
    pub changed: Vec<(u16, AccessState)>,
}

/// Returns how specifically a portal matches a local address: 2 for the address itself, 1 for the wildcard of its family, 0 for `[::]` and
/// an IPv4 address; `None`: no match.
fn closeness(portal: SocketAddr, address: SocketAddr) -> Option<u8> {
    let (named, ip) = (portal.ip().to_canonical(), address.ip().to_canonical());
    if portal.port() != address.port() {
        return None;
    }
    if named == ip {
        // Two links may have the same address.
        return is_on_link(portal, address).then_some(2);
    }
    match named.is_unspecified() {
        true if named.is_ipv4() == ip.is_ipv4() => Some(1),
        true if named.is_ipv6() => Some(0),
        _ => None,
    }
}

/// Returns false if both are link-local addresses of different links.
pub(crate) fn is_on_link(one: SocketAddr, other: SocketAddr) -> bool {
    match (one, other) {
        (SocketAddr::V6(one), SocketAddr::V6(other)) => {
            !one.ip().is_unicast_link_local()
                || one.scope_id() == 0
                || other.scope_id() == 0
                || one.scope_id() == other.scope_id()
        }
        _ => true,
    }
}

/// Rights of an initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Permission {
    pub read_only: bool,
}

/// Portals that one session may use together.
pub(crate) struct Group {
    pub tag: u16,
    pub port: Arc<TargetPort>,
    /// Bound addresses.
    pub portals: Vec<SocketAddr>,
}

pub(crate) struct IscsiTarget {
    pub options: TargetOptions,
    /// CHAP users: those of the options, until they are replaced.
    chap_users: Mutex<Arc<HashMap<String, ChapUser>>>,
    /// Access states: those of the options, with later changes by the administrator.
    access_states: Mutex<AccessStates>,
    pub scsi: Arc<Target>,
    /// Memory for the data of its sessions.
    pub memory: Arc<GroupMemory>,
    pub groups: Mutex<Vec<Arc<Group>>>,
    /// Disk name, if there is one disk at LUN 0.
    pub label: Mutex<String>,
}

impl IscsiTarget {
    /// Creates a target. `bound`: the bound portals of the options.
    /// `memory`: memory of its sessions.
    pub fn new(
        mut options: TargetOptions,
        bound: &[Portal],
        units: &Units,
        memory: Arc<GroupMemory>,
    ) -> IscsiTarget {
        let chap_users = std::mem::take(&mut options.chap_users);
        let access_states = std::mem::take(&mut options.access_states);
        // Initiators compare this name with the name that they logged in to (SPC-4, 7.8.6.10).
        let own = iscsi_name::normalised(&options.name);
        let own = own.map_or_else(|| options.name.clone(), |name| name.into_owned());
        let mut groups: Vec<Group> = Vec::new();
        for portal in bound {
            if let Some(group) = groups.iter_mut().find(|group| group.tag == portal.group) {
                group.portals.push(portal.address);
                continue;
            }
            let name = format!("{own},t,0x{:04x}", portal.group);
            let relative_id = units.port_id(&name);
            let port = TargetPort {
                relative_id,
                group: relative_id,
                name: Some(name),
                device_name: Some(own.clone()),
                state_setters: options.state_setters,
            };
            groups.push(Group {
                tag: portal.group,
                port: Arc::new(port),
                portals: vec![portal.address],
            });
        }
        let ports = groups.iter().map(|group| group.port.clone()).collect();
        IscsiTarget {
            scsi: Target::new(ports),
            groups: Mutex::new(groups.into_iter().map(Arc::new).collect()),
            options,
            memory,
            chap_users: Mutex::new(Arc::new(chap_users)),
            access_states: Mutex::new(access_states),
            label: Mutex::new(String::new()),
        }
    }

    pub fn add_luns(&self, units: &Units, luns: &[(u16, Arc<Disk>)]) -> Result<(), AttachError> {
        let attached = luns.iter().map(|(lun, disk)| (*lun, units.unit(disk)));
        let attached: Vec<_> = attached.collect();
        let view = self.scsi.view();
        let known: HashSet<UnitId> = view.map().iter().map(|(_, unit)| unit.id()).collect();
        // Done before the first command can arrive through the ports.
        for group in lock(&self.groups).iter() {
            let state = self.configured_state(group.tag);
            for (_, unit) in attached
                .iter()
                .filter(|(_, unit)| !known.contains(&unit.id()))
            {
                unit.set_access_state(group.port.group, state);
            }
        }
        self.scsi.attach_units(attached)?;
        let mut label = lock(&self.label);
        *label = match luns {
            [(0, disk)] if label.is_empty() => disk.name().to_owned(),
            _ => String::new(),
        };
        Ok(())
    }

    /// Returns the access state of a portal group that the administrator set.
    fn configured_state(&self, tag: u16) -> AccessState {
        let states = lock(&self.access_states);
        states.get(&tag).copied().unwrap_or_default()
    }

    /// Sets the access states of portal groups for all logical units. Overrides states that initiators have set.
    pub fn set_access_states(&self, states: &AccessStates) {
        lock(&self.access_states).extend(states);
        let view = self.scsi.view();
        for group in lock(&self.groups).iter() {
            let Some(state) = states.get(&group.tag) else {
                continue;
            };
            for (_, unit) in view.map().iter() {
                unit.set_access_state(group.port.group, *state);
            }
            tracing::info!(
                target = %self.options.name,
                portal_group = group.tag,
                state = state.name(),
                "access state set"
            );
        }
    }

    /// Returns the portal groups with their access states.
    pub fn port_groups(&self) -> Vec<PortGroupStatus> {
        let view = self.scsi.view();
        let status = |group: &Arc<Group>| {
            let (port_group, state) = (group.port.group, self.configured_state(group.tag));
            let states = view.map().iter();
            let states = states.map(|(lun, unit)| (lun, unit.access_state(port_group)));
            PortGroupStatus {
                tag: group.tag,
                port_group,
                state,
                changed: states.filter(|(_, unit)| *unit != state).collect(),
            }
        };
        lock(&self.groups).iter().map(status).collect()
    }

    /// Returns the group of a local address: that of the most specific portal.
    pub fn group_at(&self, address: SocketAddr) -> Option<Arc<Group>> {
        let groups = lock(&self.groups);
        let closeness = |group: &Arc<Group>| {
            let portals = group.portals.iter();
            portals
                .filter_map(|portal| closeness(*portal, address))
                .max()
        };
        let known = groups
            .iter()
            .filter_map(|group| Some((closeness(group)?, group)));
        // The first one, if several are equally specific.
        let found = known.min_by_key(|(closeness, _)| Reverse(*closeness));
        found.map(|(_, group)| group.clone())
    }

    pub fn chap_users(&self) -> Arc<HashMap<String, ChapUser>> {
        lock(&self.chap_users).clone()
    }

    /// Replaces the CHAP users. Returns false if they are unchanged.
    pub fn set_chap_users(&self, users: HashMap<String, ChapUser>) -> bool {
        replace_users(&mut lock(&self.chap_users), users)
    }

    /// Returns the rights of an initiator, apart from authentication, or `None` if it may not log in.
    pub fn permission(&self, initiator: &str, address: IpAddr) -> Option<Permission> {
        let TargetOptions { acl, demo_mode, .. } = &self.options;
        if let Some(entry) = acl.iter().find(|entry| entry.matches(initiator, address)) {
            return Some(Permission {
                read_only: entry.read_only,
            });
        }
        match demo_mode {
            DemoMode::ReadWrite => Some(Permission { read_only: false }),
            DemoMode::ReadOnly => Some(Permission { read_only: true }),
            // Without a list, the secret of a CHAP user suffices.
            DemoMode::None if acl.is_empty() && !self.chap_users().is_empty() => {
                Some(Permission { read_only: false })
            }
            DemoMode::None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use scsi::MemoryStore;

    use super::*;

    /// Returns the relative port identifier and target port group of each portal group.
    fn numbers(units: &Units, name: &str, portals: &[&str]) -> Vec<(u16, u16)> {
        let options = TargetOptions {
            name: name.to_owned(),
            ..TargetOptions::default()
        };
        let portals: Vec<Portal> = portals.iter().map(|text| text.parse().unwrap()).collect();
        let target = IscsiTarget::new(options, &portals, units, Arc::default());
        let groups = lock(&target.groups);
        let ports = groups.iter().map(|group| &group.port);
        ports.map(|port| (port.relative_id, port.group)).collect()
    }

    /// Returns tag, configured state and number of changed units of each portal group.
    fn states(target: &IscsiTarget) -> Vec<(u16, AccessState, usize)> {
        let groups = target.port_groups().into_iter();
        let states = groups.map(|group| (group.tag, group.state, group.changed.len()));
        states.collect()
    }

    #[test]
    fn access_states_hold_for_units_that_come_later() {
        let units = Units::new(Box::new(MemoryStore::default()));
        let disk = |name: &str| {
            let ram = bdev::Ram::create(bdev::RamOptions {
                size: 1 << 20,
                ..bdev::RamOptions::default()
            });
            Arc::new(Disk::new(name, None, Arc::new(ram.unwrap())).unwrap())
        };
        let options = TargetOptions {
            name: "iqn.2026-11.org.example:t0".to_owned(),
            access_states: AccessStates::from([(2, AccessState::Standby)]),
            ..TargetOptions::default()
        };
        let portals = ["192.0.2.1:3260,1", "192.0.2.2:3260,2"];
        let portals: Vec<Portal> = portals.iter().map(|text| text.parse().unwrap()).collect();
        let target = IscsiTarget::new(options, &portals, &units, Arc::default());
        let (first, second) = (disk("d0"), disk("d1"));
        target.add_luns(&units, &[(0, first.clone())]).unwrap();
        let (active, standby) = (AccessState::ActiveOptimized, AccessState::Standby);
        assert_eq!(states(&target), [(1, active, 0), (2, standby, 0)]);
        // Set as by an initiator.
        let group = lock(&target.groups)[1].port.group;
        units.unit(&first).set_access_state(group, active);
        target.add_luns(&units, &[(1, second)]).unwrap();
        let port_groups = target.port_groups();
        assert_eq!(port_groups[1].changed, [(0, active)]);
        target.set_access_states(&AccessStates::from([(2, standby)]));
        assert_eq!(states(&target), [(1, active, 0), (2, standby, 0)]);
        // A new target of that name starts with its own states.
        let options = TargetOptions {
            name: "iqn.2026-11.org.example:t0".to_owned(),
            ..TargetOptions::default()
        };
        let next = IscsiTarget::new(options, &portals, &units, Arc::default());
        next.add_luns(&units, &[(0, first)]).unwrap();
        drop(target);
        assert_eq!(states(&next), [(1, active, 0), (2, active, 0)]);
    }

    #[test]
    fn each_portal_group_is_a_target_port_group() {
        let units = Units::new(Box::new(MemoryStore::default()));
        let portals = ["192.0.2.1:3260,1", "192.0.2.2:3260,2", "192.0.2.3:3260,2"];
        let first = numbers(&units, "iqn.2026-11.org.example:t0", &portals);
        assert_eq!(first, [(1, 1), (2, 2)]);
        let second = numbers(&units, "iqn.2026-11.org.example:t1", &portals[..1]);
        assert_eq!(second, [(3, 3)]);
    }
}

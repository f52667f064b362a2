//! A target: its name, its portal groups, its logical units, and who may log in.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};

use bdev::Disk;
use iscsi::chap::Algorithm;
use iscsi::login::ChapUser;
use iscsi::negotiation::Offer;
use scsi::{AttachError, Target, TargetPort};
use scsi_exec::Units;

use crate::access::{AclEntry, Announced, DemoMode, Portal};
use crate::shared::{lock, replace_users};

/// How a target is exported.
#[derive(Clone, Debug, Default)]
pub struct TargetOptions {
    /// Its iSCSI name.
    pub name: String,
    /// What people call it.
    pub alias: Option<String>,
    /// Where it is found.
    pub portals: Vec<Portal>,
    /// Where initiators are told to find it, instead of the portals of the same group.
    pub announce: Vec<Announced>,
    /// What unknown initiators may do.
    pub demo_mode: DemoMode,
    /// Initiators that may log in.
    pub acl: Vec<AclEntry>,
    /// CHAP users by name; when there are any, every initiator has to be one.
    pub chap_users: HashMap<String, ChapUser>,
    /// What it agrees to in logins.
    pub bounds: LoginBounds,
}

/// What a target agrees to in logins, within the limits of the server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoginBounds {
    /// The values that it brings into the negotiation (RFC 7143, 13).
    pub offer: Offer,
    /// Commands of a session in progress at a time; `None`: as many as the server allows.
    pub queue_depth: Option<u32>,
    /// CHAP algorithms that initiators may use; `None`: all.
    pub chap_algorithms: Option<Vec<Algorithm>>,
}

/// How closely a portal names an address of ours: the address itself, all of its family, or with `[::]` those of the other one;
/// `None`: not at all.
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

/// Are they on one link, as far as addresses are a link's?
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

/// What an initiator may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Permission {
    pub read_only: bool,
}

/// Portals that one session may use together.
pub(crate) struct Group {
    pub tag: u16,
    pub port: Arc<TargetPort>,
    /// As they are bound.
    pub portals: Vec<SocketAddr>,
}

pub(crate) struct IscsiTarget {
    pub options: TargetOptions,
    /// Those of the options, or those that came after them.
    chap_users: Mutex<Arc<HashMap<String, ChapUser>>>,
    pub scsi: Arc<Target>,
    pub groups: Mutex<Vec<Arc<Group>>>,
    /// The disk's name, when it has one.
    pub label: Mutex<String>,
}

impl IscsiTarget {
    /// `bound`: the options' portals, as they were bound.
    pub fn new(mut options: TargetOptions, bound: &[Portal], units: &Units) -> IscsiTarget {
        let chap_users = std::mem::take(&mut options.chap_users);
        // What initiators compare with the name that they logged in to (SPC-4, 7.8.6.10).
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
                state_setters: scsi::StateSetters::default(),
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
            chap_users: Mutex::new(Arc::new(chap_users)),
            label: Mutex::new(String::new()),
        }
    }

    pub fn add_luns(&self, units: &Units, luns: &[(u16, Arc<Disk>)]) -> Result<(), AttachError> {
        let attached = luns.iter().map(|(lun, disk)| (*lun, units.unit(disk)));
        self.scsi.attach_units(attached.collect())?;
        let mut label = lock(&self.label);
        *label = match luns {
            [(0, disk)] if label.is_empty() => disk.name().to_owned(),
            _ => String::new(),
        };
        Ok(())
    }

    /// The group that an address of ours belongs to: of the portal that names it most closely.
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
        // the first of the closest
        let found = known.min_by_key(|(closeness, _)| Reverse(*closeness));
        found.map(|(_, group)| group.clone())
    }

    /// Who may log in, if there is anybody in it.
    pub fn chap_users(&self) -> Arc<HashMap<String, ChapUser>> {
        lock(&self.chap_users).clone()
    }

    /// From now on these may log in; false when they are those that might before.
    pub fn set_chap_users(&self, users: HashMap<String, ChapUser>) -> bool {
        replace_users(&mut lock(&self.chap_users), users)
    }

    /// May this initiator log in, its authentication set aside?
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
            // who knows a user's secret needs no list, where there is none
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

    /// Numbers of port and target port group of each portal group.
    fn numbers(units: &Units, name: &str, portals: &[&str]) -> Vec<(u16, u16)> {
        let options = TargetOptions {
            name: name.to_owned(),
            ..TargetOptions::default()
        };
        let portals: Vec<Portal> = portals.iter().map(|text| text.parse().unwrap()).collect();
        let target = IscsiTarget::new(options, &portals, units);
        let groups = lock(&target.groups);
        let ports = groups.iter().map(|group| &group.port);
        ports.map(|port| (port.relative_id, port.group)).collect()
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

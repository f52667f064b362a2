//! The decisions of the login phase, for all targets of a server.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use iscsi::chap::Algorithm;
use iscsi::login::{
    Admission, ChapUser, Refusal, SendTargets, TargetPolicy, TargetRecord, Visitor,
};
use iscsi::negotiation::Offer;
use iscsi::pdu::LoginStatus;
use iscsi::session::{Attachment, Claim, ConnectionKey, Session, SessionKind};
use scsi::TransportId;

use crate::memory::SessionMemory;
use crate::shared::{SessionNexus, Shared, lock};
use crate::target::{IscsiTarget, Permission};

/// Addresses are written by the connection itself, so they can be read.
fn addresses(visitor: &Visitor) -> Option<(IpAddr, SocketAddr)> {
    let initiator: SocketAddr = visitor.address.parse().ok()?;
    Some((initiator.ip(), visitor.portal.parse().ok()?))
}

fn permission(target: &IscsiTarget, visitor: &Visitor) -> Option<Permission> {
    target.permission(&visitor.initiator_name, addresses(visitor)?.0)
}

/// May a visitor that names this session be a part of it, or end it? What it may do was decided by who began it, and from where;
/// initiators' names are no secret.
fn may_take_part(visitor: &Visitor, session: &SessionNexus) -> bool {
    let may = permission(&session.target, visitor);
    may.is_some_and(|may| session.read_only || !may.read_only)
        && visitor.chap_user == session.chap_user
}

/// Is this target here, and may the visitor know of it?
fn is_visible(target: &IscsiTarget, visitor: &Visitor) -> bool {
    permission(target, visitor).is_some()
}

/// `TargetAddress` values of a target; a wildcard portal is told as the address that the visitor came to.
fn target_addresses(target: &IscsiTarget, came_to: SocketAddr) -> Vec<String> {
    let groups = lock(&target.groups);
    let portals = groups
        .iter()
        .flat_map(|group| group.portals.iter().map(|portal| (*portal, group.tag)));
    portals
        .map(|(portal, tag)| {
            let ip = if portal.ip().is_unspecified() {
                came_to.ip().to_canonical()
            } else {
                portal.ip()
            };
            format!("{},{tag}", SocketAddr::new(ip, portal.port()))
        })
        .collect()
}

impl Shared {
    fn visited(&self, visitor: &Visitor) -> Option<Arc<IscsiTarget>> {
        self.target(visitor.target_name.as_deref()?)
    }

    /// Gives up the nexus of a session that is gone.
    fn lose_nexus(&self, tsih: u16, nexus: &SessionNexus) {
        nexus.target.scsi.detach_nexus(&nexus.nexus);
        self.session_changed(tsih, nexus, false);
    }
}

impl TargetPolicy for Shared {
    fn admit(&self, visitor: &Visitor) -> Result<Admission, Refusal> {
        let mut offer = Offer::default();
        offer.session.max_connections = self.limits.connections_per_session;
        if visitor.target_name.is_none() {
            // Discovery: what is told is only what the visitor may see.
            return Ok(Admission {
                chap: Vec::new(),
                portal_group_tag: 1,
                target_alias: None,
                offer,
            });
        }
        let target = self.visited(visitor).ok_or(LoginStatus::NotFound)?;
        let portal = addresses(visitor).map(|(_, portal)| portal);
        let group = portal.and_then(|portal| target.group_at(portal));
        let group = group.ok_or(LoginStatus::NotFound)?;
        permission(&target, visitor).ok_or(LoginStatus::AuthorizationFailure)?;
        let chap = if target.chap_users().is_empty() {
            Vec::new()
        } else {
            Algorithm::ALL.into_iter().rev().collect()
        };
        Ok(Admission {
            chap,
            portal_group_tag: group.tag,
            target_alias: target.options.alias.clone(),
            offer,
        })
    }

    fn chap_user(&self, visitor: &Visitor, name: &str) -> Option<ChapUser> {
        let target = self.visited(visitor)?;
        target.chap_users().get(name).cloned()
    }

    fn session(&self, tsih: u16) -> Option<Arc<Session>> {
        self.sessions.session(tsih)
    }

    fn attach(&self, visitor: &Visitor, mut claim: Claim) -> Result<Attachment, LoginStatus> {
        if let Some(target) = self.visited(visitor) {
            // As it is written here, however it was asked for: sessions are told apart and found by it.
            claim.identity.target_name = Some(target.options.name.clone());
        }
        // Held throughout, so that a session and its nexus come and go together.
        let mut nexuses = lock(&self.nexuses);
        let identity = claim.identity.clone();
        // Which it joins, or ends by taking its place.
        let there = match claim.tsih {
            0 => {
                let mut sessions = self.sessions.sessions().into_iter();
                let same = sessions.find(|session| session.identity == identity);
                same.map_or(0, |session| session.tsih)
            }
            tsih => tsih,
        };
        if let Some(there) = nexuses.get(&there)
            && !may_take_part(visitor, there)
        {
            return Err(LoginStatus::AuthorizationFailure);
        }
        let attachment = self.sessions.attach(claim)?;
        let tsih = attachment.session.tsih;
        for old in &attachment.displaced {
            if old.tsih != tsih
                && let Some(nexus) = nexuses.remove(&old.tsih)
            {
                self.lose_nexus(old.tsih, &nexus);
            }
        }
        if identity.kind == SessionKind::Normal && !nexuses.contains_key(&tsih) {
            let found = self.visited(visitor).and_then(|target| {
                let group = target.group_at(addresses(visitor)?.1)?;
                let permission = permission(&target, visitor)?;
                Some((target, group, permission))
            });
            // The target went while its initiator logged in.
            let Some((target, group, permission)) = found else {
                self.sessions.detach(attachment.connection, true);
                return Err(LoginStatus::TargetRemoved);
            };
            let initiator = TransportId::iscsi_port(&identity.initiator_name, identity.isid);
            let nexus = SessionNexus {
                nexus: target.scsi.attach_nexus(initiator, group.port.clone()),
                read_only: permission.read_only,
                initiator: identity.initiator_name.clone(),
                chap_user: visitor.chap_user.clone(),
                memory: SessionMemory::new(self.limits.data_bytes),
                target,
            };
            self.session_changed(tsih, &nexus, true);
            nexuses.insert(tsih, nexus);
        }
        Ok(attachment)
    }

    fn detach(&self, connection: ConnectionKey, whole_session: bool) -> Vec<ConnectionKey> {
        let mut nexuses = lock(&self.nexuses);
        let dropped = self.sessions.detach(connection, whole_session);
        if self.sessions.session(connection.tsih).is_none()
            && let Some(nexus) = nexuses.remove(&connection.tsih)
        {
            self.lose_nexus(connection.tsih, &nexus);
        }
        dropped
    }

    fn targets(&self, visitor: &Visitor, which: SendTargets<'_>) -> Vec<TargetRecord> {
        let Some((_, came_to)) = addresses(visitor) else {
            return Vec::new();
        };
        let targets: Vec<Arc<IscsiTarget>> = match which {
            SendTargets::All => lock(&self.targets).values().cloned().collect(),
            SendTargets::Named(name) => self.target(name).into_iter().collect(),
        };
        let visible = targets.iter().filter(|target| is_visible(target, visitor));
        let record = |target: &Arc<IscsiTarget>| TargetRecord {
            name: target.options.name.clone(),
            addresses: target_addresses(target, came_to),
        };
        visible.map(record).collect()
    }
}

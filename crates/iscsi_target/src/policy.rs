//! Decisions of the login phase, for all targets of a server.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use iscsi::chap::{Algorithm, Secret};
use iscsi::login::{
    Admission, ChapUser, Refusal, SendTargets, TargetPolicy, TargetRecord, Visitor,
};
use iscsi::negotiation::Offer;
use iscsi::pdu::LoginStatus;
use iscsi::session::{
    Attachment, Claim, ConnectionKey, Leaving, Session, SessionIdentity, SessionKind,
};
use scsi::TransportId;

use crate::contest::Contest;
use crate::memory::SessionMemory;
use crate::shared::{SessionNexus, SharedServer, lock};
use crate::target::{IscsiTarget, Permission, is_on_link};

/// Parses addresses that the connection itself has formatted.
fn addresses(visitor: &Visitor) -> Option<(IpAddr, SocketAddr)> {
    let initiator: SocketAddr = visitor.address.parse().ok()?;
    Some((initiator.ip(), visitor.portal.parse().ok()?))
}

fn permission(target: &IscsiTarget, visitor: &Visitor) -> Option<Permission> {
    target.permission(&visitor.initiator_name, addresses(visitor)?.0)
}

/// Returns true if the visitor may join or end this session. It needs at least the rights of the session's first login, and the same CHAP
/// user; initiator names are not secret.
fn may_take_part(visitor: &Visitor, session: &SessionNexus) -> bool {
    let may = permission(&session.target, visitor);
    may.is_some_and(|may| session.read_only || !may.read_only)
        && visitor.chap_user == session.chap_user
}

/// Returns the CHAP algorithms that all of these targets allow, strongest first. If they have none in common, returns those that any of
/// them allows: otherwise no initiator could discover them.
fn algorithms_of(targets: &[Arc<IscsiTarget>]) -> Vec<Algorithm> {
    let allows = |target: &Arc<IscsiTarget>, algorithm: &Algorithm| {
        let allowed = target.options.bounds.chap_algorithms.as_ref();
        allowed.is_none_or(|allowed| allowed.contains(algorithm))
    };
    let (mut common, mut any) = (Algorithm::strongest_first(), Algorithm::strongest_first());
    common.retain(|algorithm| targets.iter().all(|target| allows(target, algorithm)));
    any.retain(|algorithm| targets.iter().any(|target| allows(target, algorithm)));
    match common.is_empty() {
        true => any,
        false => common,
    }
}

fn warn_of_contest(identity: &SessionIdentity, before: IpAddr, now: IpAddr) {
    let isid: String = identity.isid.iter().map(|b| format!("{b:02x}")).collect();
    tracing::warn!(
        initiator = identity.initiator_name,
        isid,
        target = identity.target_name.as_deref().unwrap_or("(none)"),
        addresses = %format!("{before} {now}"),
        "repeated session reinstatement by different hosts; hint: give each host its own initiator name"
    );
}

/// Returns the address of a portal for an initiator that connected to `local_address`, or `None` if it cannot reach the portal.
fn address_for(portal: SocketAddr, local_address: SocketAddr, is_here: bool) -> Option<SocketAddr> {
    let ip = portal.ip();
    if ip.is_unspecified() {
        // A wildcard is reachable at the address that the initiator used. An IPv4 wildcard does not serve IPv6.
        let mut found = local_address;
        found.set_ip(local_address.ip().to_canonical());
        found.set_port(portal.port());
        return (ip.is_ipv6() || found.is_ipv4()).then_some(found);
    }
    let is_links = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    let is_reached = match is_links {
        true => local_address.ip() == ip && is_on_link(portal, local_address),
        false => is_here || !ip.is_loopback(),
    };
    is_reached.then_some(portal)
}

/// Returns the `TargetAddress` values of a target that `asker` can reach: the announced addresses of each group, or else its portals.
///
/// Leaves out the portals in `unreachable`.
fn target_addresses(
    target: &IscsiTarget,
    asker: IpAddr,
    local_address: SocketAddr,
    unreachable: &BTreeSet<SocketAddr>,
) -> Vec<String> {
    let asker = asker.to_canonical();
    let is_here = asker.is_loopback() || asker == local_address.ip().to_canonical();
    let groups = lock(&target.groups).clone();
    let mut addresses = Vec::new();
    for group in groups {
        let tag = group.tag;
        let announced = target.options.announce.iter();
        let announced = announced.filter(|one| one.group == tag);
        let mut of_group: Vec<String> = announced.map(ToString::to_string).collect();
        if of_group.is_empty() {
            let portals = group.portals.iter();
            let portals = portals.filter(|portal| !unreachable.contains(portal));
            let found = portals.filter_map(|portal| address_for(*portal, local_address, is_here));
            // A more specific portal with this address may belong to another group.
            let is_ours = |at: &SocketAddr| target.group_at(*at).is_some_and(|g| g.tag == tag);
            // Without the scope ID, which is valid on this machine only.
            let written = |at: SocketAddr| format!("{},{tag}", SocketAddr::new(at.ip(), at.port()));
            of_group = found.filter(is_ours).map(written).collect();
        }
        for address in of_group {
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
    }
    addresses
}

impl SharedServer {
    fn visited(&self, visitor: &Visitor) -> Option<Arc<IscsiTarget>> {
        self.target(visitor.target_name.as_deref()?)
    }

    /// Returns the targets that a visitor may discover.
    fn visible<'a>(
        &self,
        visitor: &'a Visitor,
    ) -> impl Iterator<Item = Arc<IscsiTarget>> + use<'a> {
        let targets: Vec<_> = lock(&self.targets).values().cloned().collect();
        let targets = targets.into_iter();
        targets.filter(|target| permission(target, visitor).is_some())
    }

    /// Detaches the nexus of an ended session.
    fn lose_nexus(&self, tsih: u16, nexus: &SessionNexus) {
        self.retained.end(tsih);
        self.abort_detached(tsih);
        nexus.target.scsi.detach_nexus(&nexus.nexus);
        self.session_changed(tsih, nexus, false);
    }
}

impl SharedServer {
    /// Ends a session without connections. Returns false if there is none.
    pub fn end_abandoned(&self, tsih: u16) -> bool {
        self.end_waiting(tsih, &mut lock(&self.nexuses))
    }

    fn end_waiting(&self, tsih: u16, nexuses: &mut HashMap<u16, SessionNexus>) -> bool {
        let ended = self.sessions.end_abandoned(tsih);
        if ended && let Some(nexus) = nexuses.remove(&tsih) {
            self.lose_nexus(tsih, &nexus);
        }
        ended
    }
}

impl TargetPolicy for SharedServer {
    fn admit(&self, visitor: &Visitor) -> Result<Admission, Refusal> {
        let mut offer = Offer::default();
        offer.session.max_connections = self.limits.connections_per_session;
        if visitor.target_name.is_none() {
            // Discovery lists only targets that the visitor may access.
            let must_authenticate = !self.discovery_users().is_empty();
            let visible = self.visible(visitor);
            let with_users: Vec<_> = visible.filter(|t| !t.chap_users().is_empty()).collect();
            let can = must_authenticate || !with_users.is_empty();
            return Ok(Admission {
                chap: if can {
                    algorithms_of(&with_users)
                } else {
                    Vec::new()
                },
                must_authenticate,
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
        let must_authenticate = !target.chap_users().is_empty();
        let most = offer.session.max_connections;
        offer.clone_from(&target.options.bounds.offer);
        offer.session.max_connections = offer.session.max_connections.min(most);
        Ok(Admission {
            chap: if must_authenticate {
                algorithms_of(&[Arc::clone(&target)])
            } else {
                Vec::new()
            },
            must_authenticate,
            portal_group_tag: group.tag,
            target_alias: target.options.alias.clone(),
            offer,
        })
    }

    fn chap_users(&self, visitor: &Visitor, name: &str) -> Vec<ChapUser> {
        if visitor.target_name.is_some() {
            let target = self.visited(visitor);
            let user = target.and_then(|target| target.chap_users().get(name).cloned());
            return user.into_iter().collect();
        }
        let users = self.discovery_users();
        if !users.is_empty() {
            return users.get(name).cloned().into_iter().collect();
        }
        // CHAP-only initiators have the names and secrets of the targets that they want to discover.
        let of_targets = self.visible(visitor).map(|target| target.chap_users());
        of_targets
            .filter_map(|users| users.get(name).cloned())
            .collect()
    }

    fn is_secret_of_target(&self, secret: &Secret) -> bool {
        let targets: Vec<_> = lock(&self.targets).values().cloned().collect();
        let of_targets = targets.iter().map(|target| target.chap_users());
        let mut all = of_targets.chain([self.discovery_users()]);
        all.any(|users| {
            let mut proofs = users.values().filter_map(|user| user.mutual.as_ref());
            proofs.any(|(_, proof)| proof.matches(secret))
        })
    }

    fn session(&self, tsih: u16) -> Option<Arc<Session>> {
        self.sessions.session(tsih)
    }

    fn attach(&self, visitor: &Visitor, mut claim: Claim) -> Result<Attachment, LoginStatus> {
        if let Some(target) = self.visited(visitor) {
            claim.window = target.options.bounds.queue_depth;
            // Canonical spelling: sessions are compared and found by it.
            claim.identity.target_name = Some(target.options.name.clone());
        }
        // Held throughout, so that a session and its nexus are added and removed together.
        let mut nexuses = lock(&self.nexuses);
        let identity = claim.identity.clone();
        // Session that this login joins or replaces.
        let there: u16 = match claim.tsih {
            0 => {
                let mut sessions = self.sessions.sessions().into_iter();
                let same = sessions.find(|session| session.identity == identity);
                same.map_or(0, |session| session.tsih)
            }
            tsih => tsih,
        };
        if let Some(session) = nexuses.get(&there)
            && !may_take_part(visitor, session)
        {
            return Err(LoginStatus::AuthorizationFailure);
        }
        let attachment = match self.sessions.attach(claim.clone()) {
            // Without a free slot, a session without connections is ended.
            Err(LoginStatus::OutOfResources) => {
                let waits = |session: &Arc<Session>| session.connections().is_empty();
                let waiting = self.sessions.sessions().into_iter().find(waits);
                let waiting = waiting.ok_or(LoginStatus::OutOfResources)?;
                self.end_waiting(waiting.tsih, &mut nexuses);
                self.sessions.attach(claim)?
            }
            other => other?,
        };
        let tsih = attachment.session.tsih;
        let now = self.seconds();
        let address = addresses(visitor).map_or(Ipv4Addr::UNSPECIFIED.into(), |(ip, _)| ip);
        let mut contest = Contest::new(address, now);
        if there != tsih
            && let Some(nexus) = nexuses.remove(&there)
        {
            contest = nexus.contest;
            let has_displaced = !attachment.displaced.is_empty();
            if contest.take_over(address, has_displaced, now) {
                warn_of_contest(&identity, nexus.contest.address, address);
            }
            self.lose_nexus(there, &nexus);
        }
        if identity.kind == SessionKind::Normal && !nexuses.contains_key(&tsih) {
            let found = self.visited(visitor).and_then(|target| {
                let group = target.group_at(addresses(visitor)?.1)?;
                let permission = permission(&target, visitor)?;
                Some((target, group, permission))
            });
            // The target was removed during the login.
            let Some((target, group, permission)) = found else {
                self.sessions.detach(attachment.connection, Leaving::Lost);
                return Err(LoginStatus::TargetRemoved);
            };
            let initiator = TransportId::iscsi_port(&identity.initiator_name, identity.isid);
            let nexus = SessionNexus {
                nexus: target.scsi.attach_nexus(initiator, group.port.clone()),
                read_only: permission.read_only,
                initiator: identity.initiator_name.clone(),
                chap_user: visitor.chap_user.clone(),
                contest,
                memory: SessionMemory::new(&self.limits, target.memory.clone()),
                target,
            };
            self.session_changed(tsih, &nexus, true);
            nexuses.insert(tsih, nexus);
        }
        Ok(attachment)
    }

    fn detach(&self, connection: ConnectionKey, leaving: Leaving) -> Vec<ConnectionKey> {
        let mut nexuses = lock(&self.nexuses);
        let dropped = self.sessions.detach(connection, leaving);
        if self.sessions.session(connection.tsih).is_none()
            && let Some(nexus) = nexuses.remove(&connection.tsih)
        {
            self.lose_nexus(connection.tsih, &nexus);
        }
        dropped
    }

    fn targets(&self, visitor: &Visitor, which: SendTargets<'_>) -> Vec<TargetRecord> {
        let Some((asker, local_address)) = addresses(visitor) else {
            return Vec::new();
        };
        let named = match which {
            SendTargets::All => None,
            SendTargets::Named(name) => match self.target(name) {
                Some(target) => Some(target),
                None => return Vec::new(),
            },
        };
        let unreachable = lock(&self.unreachable_portals).clone();
        let visible = self.visible(visitor);
        let visible =
            visible.filter(|one| named.as_ref().is_none_or(|named| Arc::ptr_eq(named, one)));
        let record = |target: Arc<IscsiTarget>| {
            let addresses = target_addresses(&target, asker, local_address, &unreachable);
            // Without an address, the record would stand for the address that the initiator used (RFC 7143, appendix C).
            (!addresses.is_empty()).then(|| TargetRecord {
                name: target.options.name.clone(),
                addresses,
            })
        };
        visible.filter_map(record).collect()
    }
}

#[cfg(test)]
mod tests {
    use scsi::MemoryStore;
    use scsi_exec::Units;

    use super::*;
    use crate::target::TargetOptions;
    use iscsi::access::Portal;

    /// Returns the addresses that a target with these portals and announced addresses lists for an initiator at `asker`.
    fn announced_addresses(
        portals: &[&str],
        announce: &[&str],
        asker: &str,
        local_address: &str,
    ) -> Vec<String> {
        let portals: Vec<Portal> = portals.iter().map(|text| text.parse().unwrap()).collect();
        let options = TargetOptions {
            name: "iqn.2026-11.org.example:t0".to_owned(),
            announce: announce.iter().map(|text| text.parse().unwrap()).collect(),
            ..TargetOptions::default()
        };
        let units = Units::new(Box::new(MemoryStore::default()));
        let target = IscsiTarget::new(options, &portals, &units, Arc::default());
        let (asker, local_address) = (asker.parse().unwrap(), local_address.parse().unwrap());
        target_addresses(&target, asker, local_address, &BTreeSet::new())
    }

    #[test]
    #[allow(
        clippy::too_many_lines,
        reason = "one test, from its beginning to its end"
    )]
    fn discovery_lists_only_reachable_addresses() {
        let (four, six) = ("198.51.100.9", "2001:db8::9");
        let (at_four, at_six) = ("192.0.2.1:3260", "[2001:db8::1]:3260");
        for (portals, asker, local_address, wanted) in [
            // Wildcard portals: the address that the initiator connected to, if a portal has its family.
            (
                &["0.0.0.0:3260"][..],
                four,
                at_four,
                &["192.0.2.1:3260,1"][..],
            ),
            (&["0.0.0.0:3261"], four, at_four, &["192.0.2.1:3261,1"]),
            (&["0.0.0.0:3260"], six, at_six, &[]),
            (&["[::]:3260"], six, at_six, &["[2001:db8::1]:3260,1"]),
            (&["[::]:3260"], four, at_four, &["192.0.2.1:3260,1"]),
            (
                &["[::]:3260"],
                "::ffff:198.51.100.9",
                "[::ffff:192.0.2.1]:3260",
                &["192.0.2.1:3260,1"],
            ),
            // One wildcard per family, each in its own group.
            (
                &["[::]:3260,2", "0.0.0.0:3260,1"],
                four,
                at_four,
                &["192.0.2.1:3260,1"],
            ),
            (
                &["0.0.0.0:3260,1", "[::]:3260,2"],
                six,
                at_six,
                &["[2001:db8::1]:3260,2"],
            ),
            (
                &["[::]:3260", "0.0.0.0:3260"],
                four,
                at_four,
                &["192.0.2.1:3260,1"],
            ),
            (
                &["0.0.0.0:3260,1", "192.0.2.1:3260,2"],
                four,
                at_four,
                &["192.0.2.1:3260,2"],
            ),
            // Other interfaces are other paths.
            (
                &[
                    "192.0.2.1:3260,1",
                    "203.0.113.1:3260,2",
                    "[2001:db8::1]:3260,3",
                ],
                four,
                at_four,
                &[
                    "192.0.2.1:3260,1",
                    "203.0.113.1:3260,2",
                    "[2001:db8::1]:3260,3",
                ],
            ),
            // Loopback portals are listed only for initiators on this machine, including those that connect from another of its
            // addresses.
            (
                &["127.0.0.1:3260", "192.0.2.1:3260"],
                four,
                at_four,
                &["192.0.2.1:3260,1"],
            ),
            (&["[::1]:3260"], six, at_six, &[]),
            (
                &["127.0.0.1:3260"],
                "127.0.0.1",
                "127.0.0.1:3260",
                &["127.0.0.1:3260,1"],
            ),
            (
                &["127.0.0.1:3260"],
                "192.0.2.1",
                at_four,
                &["127.0.0.1:3260,1"],
            ),
            (
                &["192.0.2.1:3260", "[::1]:3260"],
                "::ffff:127.0.0.1",
                "[::ffff:127.0.0.1]:3260",
                &["192.0.2.1:3260,1", "[::1]:3260,1"],
            ),
            // Link-local addresses are listed on their link only, without the local scope ID.
            (
                &["[::]:3260"],
                "fe80::9",
                "[fe80::1%2]:3260",
                &["[fe80::1]:3260,1"],
            ),
            (
                &["[fe80::1%2]:3260"],
                "fe80::9",
                "[fe80::1%2]:3260",
                &["[fe80::1]:3260,1"],
            ),
            (&["[fe80::1%3]:3260"], "fe80::9", "[fe80::1%2]:3260", &[]),
            (&["[fe80::1%2]:3260"], six, at_six, &[]),
        ] {
            assert_eq!(
                announced_addresses(portals, &[], asker, local_address),
                wanted,
                "{portals:?} {asker} {local_address}"
            );
        }
    }

    #[test]
    fn algorithms_are_those_that_all_targets_allow() {
        let target = |allowed: Option<&str>| {
            let mut options = TargetOptions {
                name: "iqn.2026-11.org.example:t0".to_owned(),
                ..TargetOptions::default()
            };
            options.bounds.chap_algorithms = allowed.and_then(Algorithm::parse_list);
            let units = Units::new(Box::new(MemoryStore::default()));
            Arc::new(IscsiTarget::new(options, &[], &units, Arc::default()))
        };
        let allowed = |targets: &[Option<&str>]| {
            let targets: Vec<_> = targets.iter().map(|list| target(*list)).collect();
            Algorithm::list(&algorithms_of(&targets))
        };
        assert_eq!(allowed(&[None]), "sha3-256 sha256 sha1 md5");
        assert_eq!(allowed(&[Some("sha256 sha3")]), "sha3-256 sha256");
        assert_eq!(
            allowed(&[Some("sha256 md5"), None, Some("sha1 md5")]),
            "md5"
        );
        assert_eq!(
            allowed(&[Some("sha256"), Some("md5 sha1")]),
            "sha256 sha1 md5"
        );
        assert_eq!(allowed(&[]), "sha3-256 sha256 sha1 md5");
    }

    #[test]
    fn portals_that_are_not_open_yet_are_not_listed() {
        let portals = ["192.0.2.1:3260", "192.0.2.2:3260"].map(|text| text.parse().unwrap());
        let options = TargetOptions {
            name: "iqn.2026-11.org.example:t".to_owned(),
            portals: portals.to_vec(),
            ..TargetOptions::default()
        };
        let units = Units::new(Box::new(scsi::MemoryStore::default()));
        let target = IscsiTarget::new(options, &portals, &units, Arc::default());
        let local_address = portals[0].address;
        let unreachable = BTreeSet::from([portals[1].address]);
        let addresses = target_addresses(
            &target,
            "198.51.100.9".parse().unwrap(),
            local_address,
            &unreachable,
        );
        assert_eq!(addresses, ["192.0.2.1:3260,1"]);
    }

    #[test]
    fn announced_addresses_take_the_place_of_a_groups_portals() {
        let portals = ["10.0.0.5:3260,1", "127.0.0.1:3260,1", "10.0.1.5:3260,2"];
        let announce = ["203.0.113.7:13260", "san.example.org"];
        assert_eq!(
            announced_addresses(&portals, &announce, "198.51.100.9", "10.0.0.5:3260"),
            [
                "203.0.113.7:13260,1",
                "san.example.org:3260,1",
                "10.0.1.5:3260,2"
            ]
        );
    }
}

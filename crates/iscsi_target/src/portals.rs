//! Listening sockets of the portals.
//!
//! Several portals may share a socket: a wildcard serves every address of its family. IPv4 and IPv6 always have separate sockets, even for
//! `[::]`, so that targets can use `0.0.0.0` and `[::]` in any order. Control thread only.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use reactor::{Retry, address_can_heal, listen_tcp, listening_tcp};
use rustix::io::Errno;

/// Attempts to find a port that is free in both families.
const PORT_TRIES: usize = 16;

/// A portal that is configured and not open yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingPortal {
    /// The configured address.
    pub address: SocketAddr,
    /// The error of the last attempt.
    pub reason: String,
    /// Time of the next attempt.
    pub next_try: Instant,
}

/// Listening sockets of all portals.
#[derive(Default)]
pub(crate) struct Portals {
    open: BTreeMap<SocketAddr, Arc<TcpListener>>,
    /// Configured and bound address of each portal. They differ in the port if 0 was configured.
    bound: BTreeMap<SocketAddr, SocketAddr>,
    /// Listening sockets of the previous process, until portals need them.
    taken_over: BTreeMap<SocketAddr, TcpListener>,
    /// Sockets that could not be bound and are retried.
    waiting: BTreeMap<SocketAddr, Retry>,
    /// Sockets that were open or waiting before. They may wait again, so that a change of a target cannot lose it.
    known: BTreeSet<SocketAddr>,
    /// Sockets that cannot be bound yet wait, also new ones.
    may_wait: bool,
    /// Another process listens now; this one opens no more sockets.
    has_left: bool,
}

impl Portals {
    /// Listens on exactly these portals.
    ///
    /// # Errors
    /// The portal that cannot be opened, and the cause. The open portals then remain as before.
    pub fn set(&mut self, asked: &BTreeSet<SocketAddr>) -> Result<(), (SocketAddr, io::Error)> {
        if self.has_left {
            return Ok(());
        }
        let mut next = Portals::default();
        for &portal in asked {
            let address = match self.bound.get(&portal) {
                Some(known) => *known,
                None if portal.port() == 0 => {
                    let (address, sockets) = on_free_port(portal).map_err(|e| (portal, e))?;
                    next.open.extend(sockets);
                    address
                }
                None => canonical(portal),
            };
            next.bound.insert(portal, address);
        }
        let wanted = sockets(next.bound.values());
        let (kept, closed): (BTreeMap<_, _>, BTreeMap<_, _>) = self
            .open
            .iter()
            .map(|(address, listener)| (*address, listener.clone()))
            .partition(|(address, _)| wanted.contains(address));
        closed.values().for_each(|listener| shut(listener));
        next.waiting.clone_from(&self.waiting);
        next.waiting.retain(|address, _| wanted.contains(address));
        let missing = wanted.iter().filter(|address| !kept.contains_key(*address));
        for &address in missing {
            if next.waiting.contains_key(&address) || next.open.contains_key(&address) {
                continue;
            }
            let error = match self.obtain(address) {
                Ok(listener) => {
                    next.open.insert(address, Arc::new(listener));
                    continue;
                }
                // Without IPv4 on this machine, `[::]` consists of the IPv6 socket.
                Err(error) if is_no_family(&error) && address.is_ipv4() => continue,
                Err(error)
                    if address_can_heal(&error)
                        && (self.may_wait || self.known.contains(&address)) =>
                {
                    next.waiting
                        .insert(address, Retry::first(&error, Instant::now()));
                    continue;
                }
                Err(error) => error,
            };
            next.open.values().for_each(|listener| shut(listener));
            self.open = kept;
            for &address in closed.keys() {
                match open(address) {
                    Ok(listener) => drop(self.open.insert(address, Arc::new(listener))),
                    Err(error) => {
                        tracing::error!(portal = %address, %error, "cannot open portal, retrying");
                        let wait = Retry::first(&error, Instant::now());
                        self.waiting.insert(address, wait);
                    }
                }
            }
            let of = |bound: &SocketAddr| sockets([bound]).contains(&address);
            let portal = next.bound.iter().find(|(_, bound)| of(bound));
            return Err((portal.map_or(address, |(asked, _)| *asked), error));
        }
        next.open.extend(kept);
        next.known = std::mem::take(&mut self.known);
        next.known
            .extend(next.open.keys().chain(next.waiting.keys()));
        next.may_wait = self.may_wait;
        next.taken_over = std::mem::take(&mut self.taken_over);
        *self = next;
        Ok(())
    }

    /// Returns the inherited socket of this address, or a new one.
    fn obtain(&mut self, address: SocketAddr) -> io::Result<TcpListener> {
        if let Some(listener) = self.taken_over.remove(&address) {
            return Ok(listener);
        }
        match open(address) {
            // The configuration has changed: an unused inherited socket, such as a wildcard, may occupy the address.
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse && !self.taken_over.is_empty() =>
            {
                self.taken_over
                    .retain(|taken_over, _| taken_over.port() != address.port());
                open(address)
            }
            opened => opened,
        }
    }

    /// Sets whether sockets wait that cannot be bound yet. Otherwise only sockets wait that were open or waiting before.
    pub fn set_may_wait(&mut self, may_wait: bool) {
        self.may_wait = may_wait;
    }

    /// Retries the waiting sockets that are due. Returns the portals that opened.
    pub fn retry(&mut self, now: Instant) -> Vec<SocketAddr> {
        let before = self.waiting();
        let due = self.waiting.iter().filter(|(_, wait)| wait.is_due(now));
        let due: Vec<SocketAddr> = due.map(|(address, _)| *address).collect();
        for address in due {
            match open(address) {
                Ok(listener) => {
                    self.open.insert(address, Arc::new(listener));
                    self.waiting.remove(&address);
                }
                Err(error) => {
                    if let Some(wait) = self.waiting.get_mut(&address) {
                        wait.again(&error, now);
                    }
                }
            }
        }
        let waiting = self.waiting();
        let still = |portal: &SocketAddr| waiting.iter().any(|one| one.address == *portal);
        let before = before.into_iter().map(|portal| portal.address);
        before.filter(|portal| !still(portal)).collect()
    }

    /// Returns the time of the next retry, if a socket waits.
    pub fn next_try(&self) -> Option<Instant> {
        self.waiting.values().map(|wait| wait.next_try).min()
    }

    /// Returns the portals that need a waiting socket.
    pub fn waiting(&self) -> Vec<WaitingPortal> {
        let waiting = self.bound.iter().filter_map(|(asked, bound)| {
            let wait = self.wait_of(*bound)?;
            Some(WaitingPortal {
                address: *asked,
                reason: wait.reason.clone(),
                next_try: wait.next_try,
            })
        });
        waiting.collect()
    }

    fn wait_of(&self, bound: SocketAddr) -> Option<&Retry> {
        let needed = sockets([&bound]).into_iter();
        let mut needed = needed.flat_map(|one| [one, wildcard(one.is_ipv4(), one.port())]);
        needed.find_map(|address| self.waiting.get(&address))
    }

    /// Returns the bound addresses that nothing listens at yet: waiting sockets, and portals that a waiting wildcard will serve.
    pub fn unreachable(&self) -> BTreeSet<SocketAddr> {
        let portals = self.bound.values().copied();
        let portals =
            portals.filter(|bound| !bound.ip().is_unspecified() && self.wait_of(*bound).is_some());
        portals.chain(self.waiting.keys().copied()).collect()
    }

    /// Takes the listening sockets of the previous process. Initiators may be waiting in their backlogs.
    pub fn take_over(&mut self, sockets: Vec<OwnedFd>) {
        self.taken_over = listening_tcp(sockets).collect();
    }

    /// Closes unused inherited sockets after all portals were opened.
    pub fn forget_inherited(&mut self) {
        self.taken_over.clear();
    }

    /// Stops listening and returns the open sockets for another process, so that no initiator is refused.
    pub fn hand_over(&mut self) -> Vec<OwnedFd> {
        self.has_left = true;
        self.bound.clear();
        self.waiting.clear();
        let open = std::mem::take(&mut self.open).into_values();
        let handed_over = open.filter_map(|listener| listener.try_clone().ok());
        handed_over.map(OwnedFd::from).collect()
    }

    /// Returns true if this is one of the open sockets.
    pub fn has(&self, listener: &TcpListener) -> bool {
        let mut open = self.open.values();
        open.any(|one| std::ptr::eq(&**one, listener))
    }

    /// Returns the bound address of a portal.
    pub fn bound(&self, asked: SocketAddr) -> SocketAddr {
        self.bound.get(&asked).copied().unwrap_or(asked)
    }

    pub fn listeners(&self) -> Vec<Arc<TcpListener>> {
        self.open.values().cloned().collect()
    }
}

/// Returns the sockets that serve these addresses.
fn sockets<'a>(bound: impl IntoIterator<Item = &'a SocketAddr>) -> BTreeSet<SocketAddr> {
    let mut all = BTreeSet::new();
    for address in bound {
        all.insert(*address);
        if address.is_ipv6() && address.ip().is_unspecified() {
            all.insert((Ipv4Addr::UNSPECIFIED, address.port()).into());
        }
    }
    let wildcards: BTreeSet<SocketAddr> = all
        .iter()
        .filter(|address| address.ip().is_unspecified())
        .copied()
        .collect();
    all.retain(|address| {
        let wildcard = wildcard(address.is_ipv4(), address.port());
        *address == wildcard || !wildcards.contains(&wildcard)
    });
    all
}

fn wildcard(is_ipv4: bool, port: u16) -> SocketAddr {
    match is_ipv4 {
        true => (Ipv4Addr::UNSPECIFIED, port).into(),
        false => (Ipv6Addr::UNSPECIFIED, port).into(),
    }
}

/// Converts an IPv4-mapped IPv6 address to IPv4.
fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip if ip.is_ipv4() => SocketAddr::new(ip, address.port()),
        _ => address,
    }
}

type Open = (SocketAddr, Arc<TcpListener>);

/// Opens a free port, in both families if both are configured.
fn on_free_port(asked: SocketAddr) -> io::Result<(SocketAddr, Vec<Open>)> {
    let asked = canonical(asked);
    let mut tries = 0;
    loop {
        tries += 1;
        let first = open(asked)?;
        let address = first.local_addr()?;
        let mut sockets_open = vec![(address, Arc::new(first))];
        let others = sockets([&address]);
        let mut others = others.into_iter().filter(|other| *other != address);
        let Some(other) = others.next() else {
            return Ok((address, sockets_open));
        };
        match open(other) {
            Ok(listener) => sockets_open.push((other, Arc::new(listener))),
            Err(error) if is_no_family(&error) => {}
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && tries < PORT_TRIES => {
                continue;
            }
            Err(error) => return Err(error),
        }
        return Ok((address, sockets_open));
    }
}

fn is_no_family(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::AFNOSUPPORT.raw_os_error())
}

fn open(address: SocketAddr) -> io::Result<TcpListener> {
    listen_tcp(address, true)
}

/// Stops listening at once. The accepting thread may keep the socket open longer, while its address is needed again.
fn shut(listener: &TcpListener) {
    rustix::net::shutdown(listener, rustix::net::Shutdown::Both).ok();
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    fn addresses(texts: &[&str]) -> BTreeSet<SocketAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn port_of(portals: &mut Portals, asked: &str) -> u16 {
        portals.set(&addresses(&[asked])).unwrap();
        portals.bound(asked.parse().unwrap()).port()
    }

    fn is_heard(address: &str, port: u16) -> bool {
        TcpStream::connect(format!("{address}:{port}")).is_ok()
    }

    #[test]
    fn a_wildcard_serves_the_addresses_of_its_family() {
        let all = |texts: &[&str]| sockets(&addresses(texts));
        assert_eq!(
            all(&["0.0.0.0:1", "192.0.2.1:1"]),
            addresses(&["0.0.0.0:1"])
        );
        assert_eq!(all(&["[::]:1"]), addresses(&["0.0.0.0:1", "[::]:1"]));
        assert_eq!(
            all(&["[::]:1", "0.0.0.0:1", "192.0.2.1:1", "[2001:db8::1]:1"]),
            addresses(&["0.0.0.0:1", "[::]:1"])
        );
        let apart = ["0.0.0.0:1", "192.0.2.1:2", "[2001:db8::1]:1"];
        assert_eq!(all(&apart), addresses(&apart));
    }

    #[test]
    fn both_wildcards_and_an_address_come_and_go_in_any_order() {
        let mut portals = Portals::default();
        let port = port_of(&mut portals, "[::]:0");
        assert!(is_heard("[::1]", port) && is_heard("127.0.0.1", port));
        let portal = |address: &str| format!("{address}:{port}").parse::<SocketAddr>().unwrap();
        for (asked, six, four, two) in [
            (&["[::]", "0.0.0.0"][..], true, true, true),
            (&["0.0.0.0"], false, true, true),
            (&["127.0.0.1"], false, true, false),
            (&["127.0.0.1", "[::]"], true, true, true),
            (&["127.0.0.1", "[::1]"], true, true, false),
            (&["127.0.0.2", "[::1]"], true, false, true),
            (&["[::]"], true, true, true),
            (&["0.0.0.0", "127.0.0.2"], false, true, true),
            (&[], false, false, false),
        ] {
            let asked: BTreeSet<SocketAddr> = asked.iter().map(|a| portal(a)).collect();
            portals.set(&asked).unwrap();
            assert_eq!(is_heard("[::1]", port), six, "{asked:?}");
            assert_eq!(is_heard("127.0.0.1", port), four, "{asked:?}");
            assert_eq!(is_heard("127.0.0.2", port), two, "{asked:?}");
        }
    }

    #[test]
    fn inherited_sockets_include_waiting_clients() {
        let mut before = Portals::default();
        let port = port_of(&mut before, "127.0.0.1:0");
        let portal = addresses(&[&format!("127.0.0.1:{port}")]);
        let handed_over = before.hand_over();
        // A change during the end of the process takes nothing from its successor.
        before.set(&portal).unwrap();
        assert!(before.listeners().is_empty());
        drop(before);
        // Not accepted yet, but not refused.
        let waits = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let mut portals = Portals::default();
        portals.take_over(handed_over);
        portals.set(&portal).unwrap();
        portals.forget_inherited();
        let listeners = portals.listeners();
        assert!(portals.has(&listeners[0]));
        let (_, peer) = listeners[0].accept().unwrap();
        assert_eq!(peer, waits.local_addr().unwrap());
        // Inherited sockets do not block different portals.
        let handed_over = portals.hand_over();
        assert!(!portals.has(&listeners[0]));
        drop((portals, listeners));
        let mut portals = Portals::default();
        portals.take_over(handed_over);
        let wildcard = addresses(&[&format!("0.0.0.0:{port}")]);
        portals.set(&wildcard).unwrap();
        assert!(is_heard("127.0.0.2", port));
        // A socket that does not listen is not inherited.
        let connection = TcpStream::connect(("127.0.0.1", port)).unwrap();
        portals.take_over(vec![connection.into()]);
        assert!(portals.taken_over.is_empty());
    }

    #[test]
    fn unavailable_portal_does_not_affect_others() {
        let other = TcpListener::bind("127.0.0.2:0").unwrap();
        let port = other.local_addr().unwrap().port();
        let mut portals = Portals::default();
        let first = addresses(&[&format!("127.0.0.1:{port}")]);
        portals.set(&first).unwrap();
        let wildcard = addresses(&[&format!("[::]:{port}")]);
        let (portal, error) = portals
            .set(&first.union(&wildcard).copied().collect())
            .unwrap_err();
        assert_eq!(portal.to_string(), format!("[::]:{port}"));
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(is_heard("127.0.0.1", port) && !is_heard("[::1]", port));
        drop(other);
        portals.set(&wildcard).unwrap();
        assert!(is_heard("127.0.0.2", port) && is_heard("[::1]", port));
    }
    #[test]
    fn a_portal_in_use_waits_at_the_start_and_opens_when_the_port_is_free() {
        let other = TcpListener::bind("127.0.0.2:0").unwrap();
        let port = other.local_addr().unwrap().port();
        let both = addresses(&[&format!("127.0.0.1:{port}"), &format!("127.0.0.2:{port}")]);
        let busy: SocketAddr = format!("127.0.0.2:{port}").parse().unwrap();
        let mut portals = Portals::default();
        portals.set_may_wait(true);
        portals.set(&both).unwrap();
        portals.set_may_wait(false);
        assert!(is_heard("127.0.0.1", port));
        assert_eq!(portals.waiting()[0].address, busy);
        assert_eq!(portals.unreachable(), BTreeSet::from([busy]));
        let now = portals.next_try().unwrap();
        assert!(portals.retry(now).is_empty());
        assert!(portals.next_try().unwrap() > now);
        // A waiting portal can be removed and added again while the port is in use.
        portals.set(&BTreeSet::new()).unwrap();
        assert!(portals.waiting().is_empty() && portals.next_try().is_none());
        portals.set(&both).unwrap();
        assert_eq!(portals.waiting().len(), 1);
        drop(other);
        assert_eq!(portals.retry(portals.next_try().unwrap()), [busy]);
        assert!(is_heard("127.0.0.2", port));
        assert!(portals.waiting().is_empty() && portals.unreachable().is_empty());
    }

    #[test]
    fn a_missing_address_waits_and_open_portals_are_handed_over() {
        let mut portals = Portals::default();
        let port = port_of(&mut portals, "127.0.0.1:0");
        let here = format!("127.0.0.1:{port}");
        let absent = format!("192.0.2.77:{port}");
        let asked = addresses(&[&here, &absent]);
        assert!(portals.set(&asked).is_err());
        portals.set_may_wait(true);
        portals.set(&asked).unwrap();
        assert_eq!(portals.waiting()[0].address, absent.parse().unwrap());
        let mut next = Portals::default();
        next.take_over(portals.hand_over());
        assert!(portals.next_try().is_none());
        next.set_may_wait(true);
        next.set(&asked).unwrap();
        assert!(is_heard("127.0.0.1", port));
        assert_eq!(next.waiting().len(), 1);
    }

    #[test]
    fn a_waiting_wildcard_makes_its_portals_unreachable() {
        let other = TcpListener::bind("127.0.0.2:0").unwrap();
        let port = other.local_addr().unwrap().port();
        let asked = [format!("0.0.0.0:{port}"), format!("127.0.0.1:{port}")];
        let asked = addresses(&[&asked[0], &asked[1]]);
        let mut portals = Portals::default();
        portals.set_may_wait(true);
        portals.set(&asked).unwrap();
        assert_eq!(portals.waiting().len(), 2);
        assert_eq!(portals.unreachable(), asked);
    }
}

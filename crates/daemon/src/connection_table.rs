//! Limits the connections of a TCP service, so that clients without a token and readers cannot shut administrators out.
//!
//! A connection is unauthenticated until a request carries a token. With too many of those, per network or in total, the oldest is closed.
//! A client that sends its request at once is therefore served despite silent ones. Each kind of token has a limit of its own. Used on one
//! service thread. Does not block. Tests: below, and `tests/tests/access.rs`.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionLimits {
    /// Unauthenticated connections in total.
    pub unauthenticated: usize,
    /// Unauthenticated connections per IPv4 address or IPv6 /64 network.
    pub per_network: usize,
    /// Connections with the readers' token.
    pub readers: usize,
    /// Connections with the full token.
    pub administrators: usize,
}

/// Rights that a connection has proved with a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Unauthenticated,
    Reader,
    Administrator,
}

struct Entry {
    network: IpAddr,
    standing: Standing,
    /// Closes the connection when dropped.
    _open: oneshot::Sender<()>,
}

struct Table {
    limits: ConnectionLimits,
    next: u64,
    /// Ordered by arrival.
    entries: BTreeMap<u64, Entry>,
}

#[derive(Clone)]
pub(crate) struct ConnectionTable(Arc<Mutex<Table>>);

/// Entry of one connection. Dropping the last clone removes it from the table.
#[derive(Clone)]
pub(crate) struct ConnectionGuard(Arc<Registration>);

struct Registration {
    table: ConnectionTable,
    id: u64,
}

/// Completes with an error when the table closes the connection.
pub(crate) type Closed = oneshot::Receiver<()>;

/// Returns an IPv4 address, or the /64 network of an IPv6 address, which one host may own.
fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => {
            let prefix = address.to_bits() >> 64 << 64;
            IpAddr::V6(Ipv6Addr::from_bits(prefix))
        }
    }
}

impl ConnectionTable {
    pub fn new(limits: ConnectionLimits) -> ConnectionTable {
        ConnectionTable(Arc::new(Mutex::new(Table {
            limits,
            next: 0,
            entries: BTreeMap::new(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a connection. Closes the oldest unauthenticated one if there are too many.
    pub fn register(&self, address: IpAddr) -> (ConnectionGuard, Closed) {
        let network = network_of(address);
        let mut table = self.lock();
        let limits = table.limits;
        table.make_room(limits.per_network, |entry| entry.network == network);
        table.make_room(limits.unauthenticated, |_| true);
        let id = table.next;
        table.next += 1;
        let (open, closed) = oneshot::channel();
        table.entries.insert(
            id,
            Entry {
                network,
                standing: Standing::Unauthenticated,
                _open: open,
            },
        );
        drop(table);
        let table = self.clone();
        (
            ConnectionGuard(Arc::new(Registration { table, id })),
            closed,
        )
    }
}

impl Table {
    /// Closes the oldest unauthenticated connection that `counts` selects, if there are at least `limit`.
    fn make_room(&mut self, limit: usize, counts: impl Fn(&Entry) -> bool) {
        let counted = |entry: &Entry| entry.standing == Standing::Unauthenticated && counts(entry);
        let mut ids = self.entries.iter().filter(|(_, entry)| counted(entry));
        let oldest = ids.next().map(|(id, _)| *id);
        if let Some(oldest) = oldest
            && ids.count() + 1 >= limit
        {
            self.entries.remove(&oldest);
        }
    }
}

impl ConnectionGuard {
    /// Records that a request carried a token. Returns false with too many connections of that token.
    pub fn authenticate(&self, standing: Standing) -> bool {
        let mut table = self.0.table.lock();
        let limit = match standing {
            Standing::Unauthenticated => return true,
            Standing::Reader => table.limits.readers,
            Standing::Administrator => table.limits.administrators,
        };
        let has = |entry: &Entry| entry.standing == standing;
        if table.entries.get(&self.0.id).is_some_and(has) {
            return true;
        }
        let count = table.entries.values().filter(|entry| has(entry)).count();
        if count >= limit {
            return false;
        }
        if let Some(entry) = table.entries.get_mut(&self.0.id) {
            entry.standing = standing;
        }
        true
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.table.lock().entries.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ConnectionLimits = ConnectionLimits {
        unauthenticated: 4,
        per_network: 3,
        readers: 2,
        administrators: 1,
    };
    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn is_closed(closed: &mut Closed) -> bool {
        closed.try_recv() == Err(oneshot::error::TryRecvError::Closed)
    }

    #[test]
    fn oldest_silent_connection_of_a_network_is_closed() {
        let table = ConnectionTable::new(LIMITS);
        let mut all: Vec<_> = (0..4).map(|_| table.register(HERE)).collect();
        let closed: Vec<bool> = all
            .iter_mut()
            .map(|(_, closed)| is_closed(closed))
            .collect();
        assert_eq!(closed, [true, false, false, false]);
    }

    #[test]
    fn oldest_silent_connection_of_all_networks_is_closed() {
        let table = ConnectionTable::new(LIMITS);
        let from = [
            "192.0.2.1",
            "192.0.2.2",
            "2001:db8::1",
            "192.0.2.3",
            "192.0.2.4",
        ];
        let mut all: Vec<_> = from.map(|text| table.register(address(text))).into();
        let closed: Vec<bool> = all
            .iter_mut()
            .map(|(_, closed)| is_closed(closed))
            .collect();
        assert_eq!(closed, [true, false, false, false, false]);
    }

    #[test]
    fn authenticated_connections_are_not_closed_for_silent_ones() {
        let table = ConnectionTable::new(LIMITS);
        let (administrator, mut closed) = table.register(HERE);
        assert!(administrator.authenticate(Standing::Administrator));
        let silent: Vec<_> = (0..50).map(|_| table.register(HERE)).collect();
        assert!(!is_closed(&mut closed));
        drop(silent);
    }

    #[test]
    fn readers_leave_room_for_administrators() {
        let table = ConnectionTable::new(LIMITS);
        let readers: Vec<_> = (0..3)
            .map(|_| {
                let (guard, closed) = table.register(HERE);
                let is_admitted = guard.authenticate(Standing::Reader);
                // A second request does not count as a second connection.
                assert_eq!(guard.authenticate(Standing::Reader), is_admitted);
                (guard, closed, is_admitted)
            })
            .collect();
        let admitted: Vec<bool> = readers
            .iter()
            .map(|(.., is_admitted)| *is_admitted)
            .collect();
        assert_eq!(admitted, [true, true, false]);
        let (administrator, _closed) = table.register(HERE);
        assert!(administrator.authenticate(Standing::Administrator));
        drop(readers);
        let (reader, _closed) = table.register(HERE);
        assert!(
            reader.authenticate(Standing::Reader),
            "the others have left"
        );
    }

    #[test]
    fn addresses_of_one_host_are_one_network() {
        assert_eq!(
            network_of(address("2001:db8:1:2:3::4")),
            network_of(address("2001:db8:1:2:5::6"))
        );
        assert_ne!(
            network_of(address("2001:db8:1:2::1")),
            network_of(address("2001:db8:1:3::1"))
        );
        assert_eq!(
            network_of(address("::ffff:192.0.2.1")),
            address("192.0.2.1")
        );
    }
}

//! Assigns relative target port identifiers to port names, stable across restarts.
//!
//! Persistent registrations name their port by this number. The numbers are saved in the same store, before the registrations that use
//! them. While no registration is saved, no number is saved.
//!
//! If the saved numbers cannot be used, the ports of saved registrations are unknown. Saved reservations are then unusable too: their units
//! answer BUSY, and no registration is saved until the file is reset. Meanwhile ports get numbers from a random base, which they keep after
//! the reset. A registration with an old number then belongs to no port: it still fences, and admits no initiator.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use block::Identity;
use scsi::{Store, Unusable};

use crate::shared_units::DAEMON;

/// Key of the numbers in the store.
pub(crate) const KEY: &str = "ports";

/// Lowest random base after a loss of the saved numbers. Hosts have fewer ports than this.
const BASE_MIN: u16 = 1 << 10;
/// Highest random base.
const BASE_MAX: u16 = u16::MAX - (1 << 12);

#[derive(Default)]
struct Numbers {
    by_name: BTreeMap<String, u16>,
    taken: HashSet<u16>,
    /// Names that asked for their number in this process.
    used: HashSet<String>,
    /// All numbers are saved.
    written: bool,
    /// First number for a new port; 0 counts as 1.
    base: u16,
    /// Reason why the saved numbers cannot be used. They are not replaced until they are reset.
    unusable: Option<String>,
}

#[derive(Default)]
pub(crate) struct Ports(Mutex<Numbers>);

/// Returns the key of a port name: one line of the file. Names of iSCSI target ports are compared without regard to case.
fn key(name: &str) -> String {
    let name = name.replace('\n', " ");
    let parts = name.rsplit_once(",t,0x");
    let normalised = parts.and_then(|(target, group)| {
        Some(format!("{},t,0x{group}", iscsi_name::normalised(target)?))
    });
    normalised.unwrap_or(name)
}

impl Numbers {
    /// Parses one line per port: number, space, name. Malformed lines are ignored.
    fn decode(text: &[u8]) -> Numbers {
        let mut numbers = Numbers::default();
        for line in String::from_utf8_lossy(text).lines() {
            let Some((number, name)) = line.split_once(' ') else {
                continue;
            };
            let name = key(name);
            if let Ok(number @ 1..) = number.parse::<u16>()
                && !numbers.by_name.contains_key(&name)
                && numbers.taken.insert(number)
            {
                numbers.by_name.insert(name, number);
            }
        }
        numbers.written = true;
        numbers
    }

    fn encode(&self) -> Vec<u8> {
        let lines = self.by_name.iter();
        let lines = lines.map(|(name, number)| format!("{number} {name}\n"));
        lines.collect::<String>().into_bytes()
    }

    fn number(&mut self, name: &str) -> u16 {
        let name = key(name);
        self.used.insert(name.clone());
        if let Some(number) = self.by_name.get(&name) {
            return *number;
        }
        let base = self.base.max(1);
        let mut numbers = (base..=u16::MAX).chain(1..base);
        let free = numbers.find(|number| !self.taken.contains(number));
        let number = free.or_else(|| self.forget_one());
        let Some(number) = number else {
            tracing::error!(name, "more target ports than identifiers");
            return u16::MAX;
        };
        self.taken.insert(number);
        self.by_name.insert(name, number);
        self.written = false;
        number
    }

    /// Frees the number of a port that this process has not used.
    fn forget_one(&mut self) -> Option<u16> {
        let unused = self.by_name.keys().find(|name| !self.used.contains(*name));
        let name = unused.cloned()?;
        self.by_name.remove(&name)
    }
}

impl Ports {
    fn lock(&self) -> MutexGuard<'_, Numbers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if a restart would lose identifiers.
    pub fn is_unsaved(&self) -> bool {
        let numbers = self.lock();
        !numbers.written && !numbers.by_name.is_empty()
    }

    /// Returns the identifier of the port of this name, never 0.
    pub fn number(&self, name: &str) -> u16 {
        self.lock().number(name)
    }
}

/// Store that saves the ports' identifiers together with the state that refers to them.
pub(crate) struct WithPorts {
    inner: Box<dyn Store>,
    ports: Arc<Ports>,
}

impl WithPorts {
    /// Wraps a store and loads the identifiers saved in it.
    pub fn wrap(inner: Box<dyn Store>) -> (WithPorts, Arc<Ports>) {
        let numbers = match inner.load(KEY) {
            Ok(text) => text.map_or_else(Numbers::default, |text| Numbers::decode(&text)),
            Err(Unusable(reason)) => {
                tracing::error!(
                    "cannot read the target ports, disks with saved reservations respond BUSY: {reason}"
                );
                let random = Identity::random().bits() % u128::from(BASE_MAX - BASE_MIN);
                Numbers {
                    base: BASE_MIN + random as u16,
                    unusable: Some(reason),
                    ..Numbers::default()
                }
            }
        };
        let ports = Arc::new(Ports(Mutex::new(numbers)));
        let store = WithPorts {
            inner,
            ports: Arc::clone(&ports),
        };
        (store, ports)
    }
}

/// Returns true if the state under this key names ports by their numbers.
fn names_ports(key: &str) -> bool {
    key == DAEMON || key.starts_with("reservations-")
}

impl Store for WithPorts {
    fn load(&self, key: &str) -> Result<Option<Vec<u8>>, Unusable> {
        let loaded = self.inner.load(key)?;
        let is_something = loaded.as_ref().is_some_and(|bytes| !bytes.is_empty());
        match &self.ports.lock().unusable {
            Some(reason) if is_something && names_ports(key) => Err(Unusable(format!(
                "the identifiers of its target ports are unknown: {reason}"
            ))),
            _ => Ok(loaded),
        }
    }

    fn remove(&self, key: &str) {
        self.inner.remove(key);
    }

    fn discard_damaged(&self, key: &str) -> io::Result<()> {
        self.inner.discard_damaged(key)?;
        if key == KEY {
            let mut numbers = self.ports.lock();
            // Numbers that were read from the file, or saved to it, are still in use.
            if numbers.unusable.take().is_none() && numbers.written {
                numbers.written = false;
                self.inner.save(KEY, &numbers.encode())?;
                numbers.written = true;
            }
        }
        Ok(())
    }

    fn save(&self, key: &str, bytes: &[u8]) -> io::Result<()> {
        if names_ports(key) {
            let mut numbers = self.ports.lock();
            if let Some(reason) = &numbers.unusable {
                return Err(io::Error::other(format!(
                    "the identifiers of target ports are unknown: {reason}"
                )));
            }
            if !numbers.written {
                self.inner.save(KEY, &numbers.encode())?;
                numbers.written = true;
            }
        }
        self.inner.save(key, bytes)
    }
}

#[cfg(test)]
mod tests {
    use scsi::MemoryStore;

    use super::*;

    /// One store for several restarts.
    #[derive(Clone, Default)]
    struct SharedStore(Arc<MemoryStore>);

    impl Store for SharedStore {
        fn load(&self, key: &str) -> Result<Option<Vec<u8>>, Unusable> {
            self.0.load(key)
        }

        fn save(&self, key: &str, bytes: &[u8]) -> io::Result<()> {
            self.0.save(key, bytes)
        }
    }

    #[test]
    fn spellings_of_a_targets_name_are_one_port() {
        let mut numbers = Numbers::decode(b"7 iqn.2026-11.org.example:T0,t,0x0001\n");
        assert_eq!(numbers.number("iqn.2026-11.org.example:t0,t,0x0001"), 7);
        assert_eq!(numbers.number("IQN.2026-11.org.example:t0,t,0x0001"), 7);
        assert_ne!(numbers.number("iqn.2026-11.org.example:t0,t,0x0002"), 7);
        assert_ne!(numbers.number("C0"), numbers.number("c0"), "no iSCSI name");
    }

    #[test]
    fn port_retains_its_number_after_a_restart() {
        let shared_store = SharedStore::default();
        let (store, ports) = WithPorts::wrap(Box::new(shared_store.clone()));
        assert_eq!((ports.number("a"), ports.number("b")), (1, 2));
        assert_eq!(ports.number("a"), 1);
        assert_eq!(
            shared_store.load(KEY).expect("readable"),
            None,
            "nothing refers to them yet"
        );
        store.save("reservations-1", b"of b").unwrap();
        assert_eq!(
            shared_store.load(KEY).expect("readable").as_deref(),
            Some(&b"1 a\n2 b\n"[..])
        );

        let (store, ports) = WithPorts::wrap(Box::new(shared_store.clone()));
        assert_eq!(ports.number("c"), 3);
        assert_eq!((ports.number("b"), ports.number("a")), (2, 1));
        store.save("reservations-1", b"of c").unwrap();
        assert_eq!(
            shared_store.load(KEY).expect("readable").as_deref(),
            Some(&b"1 a\n2 b\n3 c\n"[..])
        );
    }

    #[test]
    fn damaged_numbers_stay_and_make_saved_reservations_unusable() {
        struct Damaged(SharedStore);
        impl Store for Damaged {
            fn load(&self, key: &str) -> Result<Option<Vec<u8>>, Unusable> {
                let loaded = self.0.load(key)?;
                match loaded.as_deref() {
                    Some(b"damaged") => Err(Unusable(format!("{key} is cut short"))),
                    _ => Ok(loaded),
                }
            }
            fn save(&self, key: &str, bytes: &[u8]) -> io::Result<()> {
                self.0.save(key, bytes)
            }
            fn discard_damaged(&self, key: &str) -> io::Result<()> {
                self.0.0.remove(key);
                Ok(())
            }
        }
        let shared_store = SharedStore::default();
        for (key, bytes) in [
            (KEY, &b"damaged"[..]),
            ("reservations-1", b"some"),
            ("reservations-2", b""),
            ("mode-pages-1", b"some"),
        ] {
            shared_store.save(key, bytes).unwrap();
        }
        let (store, ports) = WithPorts::wrap(Box::new(Damaged(shared_store.clone())));
        let (a, b) = (ports.number("a"), ports.number("b"));
        assert!(a >= BASE_MIN && b == a + 1, "{a} {b}");
        let error = store.load("reservations-1").expect_err("ports are unknown");
        assert!(error.0.contains("ports is cut short"), "{error}");
        assert_eq!(store.load("reservations-2"), Ok(Some(Vec::new())));
        assert_eq!(store.load("mode-pages-1"), Ok(Some(b"some".to_vec())));
        store.save("reservations-2", b"new").unwrap_err();
        store.save("mode-pages-1", b"new").unwrap();
        assert_eq!(
            shared_store.load(KEY),
            Ok(Some(b"damaged".to_vec())),
            "not replaced"
        );

        store.discard_damaged(KEY).unwrap();
        assert_eq!(store.load("reservations-1"), Ok(Some(b"some".to_vec())));
        assert_eq!((ports.number("b"), ports.number("a")), (b, a));
        store.save("reservations-2", b"new").unwrap();
        // The numbers are usable now: a second reset saves them again.
        store.discard_damaged(KEY).unwrap();
        let saved = format!("{a} a\n{b} b\n");
        assert_eq!(shared_store.load(KEY), Ok(Some(saved.into_bytes())));
    }

    #[test]
    fn port_numbers_are_reused_when_no_others_are_left() {
        let shared_store = SharedStore::default();
        let lines: String = (1..=u16::MAX).map(|n| format!("{n} old{n:05}\n")).collect();
        shared_store.save(KEY, lines.as_bytes()).unwrap();
        let (_, ports) = WithPorts::wrap(Box::new(shared_store));
        assert_eq!(ports.number("old00001"), 1);
        assert_eq!(ports.number("new"), 2);
        assert_eq!(ports.number("newer"), 3);
        assert_eq!(ports.number("old00001"), 1);
    }

    #[test]
    fn malformed_lines_are_ignored() {
        let numbers = Numbers::decode(b"0 zero\nx\n\xff\n70000 big\n5 a\n5 b\n6 a\n7 c d\n");
        let all: Vec<_> = numbers.by_name.iter().collect();
        assert_eq!(all, [(&"a".to_owned(), &5), (&"c d".to_owned(), &7)]);
    }
}

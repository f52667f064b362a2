//! Relative target port identifiers by the ports' names, the same after a restart whatever comes first.
//!
//! Registrations that persist name their port by this number. So the numbers are written down together with them, through
//! the same store and before them: as long as nothing is kept, nothing of this is either.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use scsi::{Store, Unusable};

/// The store's key for them.
const KEY: &str = "ports";

#[derive(Default)]
struct Numbers {
    by_name: BTreeMap<String, u16>,
    taken: HashSet<u16>,
    /// Names that this process has given out numbers for.
    used: HashSet<String>,
    /// Is what is written down all of them?
    written: bool,
}

/// The identifiers of all ports of a process.
#[derive(Default)]
pub(crate) struct Ports(Mutex<Numbers>);

/// What a port is known by: one line of the file, and for a port of an iSCSI target its name without regard to case.
fn key(name: &str) -> String {
    let name = name.replace('\n', " ");
    let parts = name.rsplit_once(",t,0x");
    let normalised = parts.and_then(|(target, group)| {
        Some(format!("{},t,0x{group}", iscsi_name::normalised(target)?))
    });
    normalised.unwrap_or(name)
}

impl Numbers {
    /// One line a port: its number, a space, its name. What makes no sense is passed over.
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
        let free = (1..=u16::MAX).find(|number| !self.taken.contains(number));
        let number = free.or_else(|| self.forget_one());
        let Some(number) = number else {
            tracing::error!(name, "more target ports than there are identifiers");
            return u16::MAX;
        };
        self.taken.insert(number);
        self.by_name.insert(name, number);
        self.written = false;
        number
    }

    /// Frees the number of a port that this process has never had.
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

    /// Are there identifiers that a restart would forget?
    pub fn is_unsaved(&self) -> bool {
        let numbers = self.lock();
        !numbers.written && !numbers.by_name.is_empty()
    }

    /// The identifier of the port of this name, never 0.
    pub fn number(&self, name: &str) -> u16 {
        self.lock().number(name)
    }
}

/// A store that keeps the ports' identifiers beside what refers to them.
pub(crate) struct WithPorts {
    inner: Box<dyn Store>,
    ports: Arc<Ports>,
}

impl WithPorts {
    /// The store, and the identifiers that were kept in it.
    pub fn over(inner: Box<dyn Store>) -> (WithPorts, Arc<Ports>) {
        let text = inner.load(KEY).unwrap_or_else(|error| {
            tracing::error!(%error, "numbers of target ports lost, initiators must register again");
            None
        });
        let numbers = text.map(|text| Numbers::decode(&text));
        let ports = Arc::new(Ports(Mutex::new(numbers.unwrap_or_default())));
        let store = WithPorts {
            inner,
            ports: Arc::clone(&ports),
        };
        (store, ports)
    }
}

impl Store for WithPorts {
    fn load(&self, key: &str) -> Result<Option<Vec<u8>>, Unusable> {
        self.inner.load(key)
    }

    fn remove(&self, key: &str) {
        self.inner.remove(key);
    }

    fn save(&self, key: &str, bytes: &[u8]) -> io::Result<()> {
        {
            let mut numbers = self.ports.lock();
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

    /// One store for several lives.
    #[derive(Clone, Default)]
    struct Kept(Arc<MemoryStore>);

    impl Store for Kept {
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
    fn a_port_keeps_its_number_whatever_comes_first_after_a_restart() {
        let kept = Kept::default();
        let (store, ports) = WithPorts::over(Box::new(kept.clone()));
        assert_eq!((ports.number("a"), ports.number("b")), (1, 2));
        assert_eq!(ports.number("a"), 1);
        assert_eq!(
            kept.load(KEY).expect("readable"),
            None,
            "nothing refers to them yet"
        );
        store.save("reservations", b"of b").unwrap();
        assert_eq!(
            kept.load(KEY).expect("readable").as_deref(),
            Some(&b"1 a\n2 b\n"[..])
        );

        let (store, ports) = WithPorts::over(Box::new(kept.clone()));
        assert_eq!(ports.number("c"), 3);
        assert_eq!((ports.number("b"), ports.number("a")), (2, 1));
        store.save("reservations", b"of c").unwrap();
        assert_eq!(
            kept.load(KEY).expect("readable").as_deref(),
            Some(&b"1 a\n2 b\n3 c\n"[..])
        );
    }

    #[test]
    fn port_numbers_are_reused_when_no_others_are_left() {
        let kept = Kept::default();
        let lines: String = (1..=u16::MAX).map(|n| format!("{n} old{n:05}\n")).collect();
        kept.save(KEY, lines.as_bytes()).unwrap();
        let (_, ports) = WithPorts::over(Box::new(kept));
        assert_eq!(ports.number("old00001"), 1);
        assert_eq!(ports.number("new"), 2);
        assert_eq!(ports.number("newer"), 3);
        assert_eq!(ports.number("old00001"), 1);
    }

    #[test]
    fn what_makes_no_sense_is_passed_over() {
        let numbers = Numbers::decode(b"0 zero\nx\n\xff\n70000 big\n5 a\n5 b\n6 a\n7 c d\n");
        let all: Vec<_> = numbers.by_name.iter().collect();
        assert_eq!(all, [(&"a".to_owned(), &5), (&"c d".to_owned(), &7)]);
    }
}

//! Command numbering of a session over all its connections (RFC 7143, 4.2.2.1).
//!
//! ExpCmdSN is one atomic word. The connection that holds the expected command claims it with one compare-and-swap, hands
//! the command to SCSI, and releases it with one store. Command n is therefore handed over before n + 1 is claimed. Only a
//! command that arrives early (from another connection, or after a gap) takes the lock, to register as a waiter for its
//! number. MaxCmdSN grows by one per finished command, so the window bounds the commands in progress.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use smallvec::SmallVec;

use super::ConnectionKey;

use crate::serial::{before, within};

const CLAIMED: u64 = 1 << 32;

/// Result of [`CommandWindow::claim`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The command is next; [`CommandWindow::release`] must follow.
    Claimed,
    /// Earlier commands are missing; call [`CommandWindow::park`].
    Early,
    /// The CmdSN was used before; ignore the command silently.
    Stale,
    /// The CmdSN is beyond MaxCmdSN; ignore the command silently.
    Outside,
}

/// CIDs of the connections that must check their parked requests again.
pub type Wake = SmallVec<[u16; 2]>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiter {
    /// The connection that received the command with this number.
    Connection(ConnectionKey),
    /// A connection that waits until all commands before the number are handed over.
    Listener(ConnectionKey),
    /// A command that was never received and counts as received (ABORT TASK, 11.5.1).
    Skipped,
}

/// ExpCmdSN, MaxCmdSN and the waiters.
#[derive(Debug)]
pub struct CommandWindow {
    /// ExpCmdSN in the low half, the claim flag above it.
    expected: AtomicU64,
    maximum: AtomicU32,
    size: u32,
    waiting: AtomicU32,
    waiters: Mutex<Vec<(u32, Waiter)>>,
}

impl CommandWindow {
    /// Creates a window of `size` commands that starts at `first`.
    pub fn new(first: u32, size: u32) -> Self {
        CommandWindow {
            expected: AtomicU64::new(first.into()),
            maximum: AtomicU32::new(first.wrapping_add(size).wrapping_sub(1)),
            size,
            waiting: AtomicU32::new(0),
            waiters: Mutex::new(Vec::new()),
        }
    }

    /// Returns ExpCmdSN, the next expected number. A command that is being handed over counts as received.
    pub fn exp_cmd_sn(&self) -> u32 {
        let word = self.expected.load(Ordering::Relaxed);
        (word as u32).wrapping_add((word >> 32) as u32)
    }

    /// Returns the maximum number of commands in progress.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Returns the first number that is not completely handed over.
    pub fn next_turn(&self) -> u32 {
        self.expected.load(Ordering::SeqCst) as u32
    }

    /// Returns MaxCmdSN, the largest allowed number.
    pub fn max_cmd_sn(&self) -> u32 {
        self.maximum.load(Ordering::Relaxed)
    }

    /// Claims the turn of command `n`.
    pub fn claim(&self, n: u32) -> Turn {
        loop {
            let word = self.expected.load(Ordering::SeqCst);
            let expected = word as u32;
            if before(n, expected) {
                return Turn::Stale;
            }
            if !within(n, expected, self.maximum.load(Ordering::SeqCst)) {
                return Turn::Outside;
            }
            if n != expected {
                return Turn::Early;
            }
            if word & CLAIMED != 0 {
                return Turn::Stale;
            }
            if self
                .expected
                .compare_exchange(word, word | CLAIMED, Ordering::SeqCst, Ordering::SeqCst)
                .is_ok()
            {
                return Turn::Claimed;
            }
        }
    }

    /// Releases the claimed turn. Returns the connections that wait for the next number.
    pub fn release(&self) -> Wake {
        let word = self.expected.load(Ordering::SeqCst);
        assert!(word & CLAIMED != 0, "released a turn without an owner");
        let next = (word as u32).wrapping_add(1);
        self.expected.store(next.into(), Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) == 0 {
            return Wake::new();
        }
        self.next_waiters(&mut self.lock())
    }

    /// Registers `connection` as waiter for `n`. The caller must then call [`CommandWindow::claim`] again, because the turn
    /// may have arrived in between. Returns `false` if the number is already registered and the command is stale.
    pub fn park(&self, n: u32, connection: ConnectionKey) -> bool {
        let mut waiters = self.lock();
        if is_taken(&waiters, n) {
            return false;
        }
        waiters.push((n, Waiter::Connection(connection)));
        self.waiting.store(waiters.len() as u32, Ordering::SeqCst);
        true
    }

    /// Registers `connection` to be woken when all commands before `n` are handed over. The caller must then check
    /// [`CommandWindow::next_turn`] again.
    pub fn listen(&self, n: u32, connection: ConnectionKey) {
        let mut waiters = self.lock();
        waiters.push((n, Waiter::Listener(connection)));
        self.waiting.store(waiters.len() as u32, Ordering::SeqCst);
    }

    /// Removes the registration after a claim.
    pub fn unpark(&self, n: u32, connection: ConnectionKey) {
        self.retain(|number, waiter| !(number == n && waiter == Waiter::Connection(connection)));
    }

    /// Removes all registrations of a closed connection.
    pub fn forget(&self, connection: ConnectionKey) {
        let removed = [Waiter::Connection(connection), Waiter::Listener(connection)];
        self.retain(|_, waiter| !removed.contains(&waiter));
    }

    /// Counts `n` as received although it never arrived. Returns the connections that wait for the next number.
    pub fn skip(&self, n: u32) -> Wake {
        let mut waiters = self.lock();
        let word = self.expected.load(Ordering::SeqCst);
        let taken = before(n, word as u32) || (n == word as u32 && word & CLAIMED != 0);
        let outside = !within(n, word as u32, self.maximum.load(Ordering::SeqCst));
        if taken || outside || is_taken(&waiters, n) {
            return Wake::new();
        }
        waiters.push((n, Waiter::Skipped));
        self.waiting.store(waiters.len() as u32, Ordering::SeqCst);
        self.next_waiters(&mut waiters)
    }

    /// Opens the window by one after a command has finished.
    pub fn finished(&self) {
        self.maximum.fetch_add(1, Ordering::SeqCst);
    }

    fn retain(&self, keep: impl Fn(u32, Waiter) -> bool) {
        let mut waiters = self.lock();
        waiters.retain(|(number, waiter)| keep(*number, *waiter));
        self.waiting.store(waiters.len() as u32, Ordering::SeqCst);
    }

    /// Advances over skipped numbers. Returns the waiters for the number after them.
    fn next_waiters(&self, waiters: &mut Vec<(u32, Waiter)>) -> Wake {
        let mut wake = Wake::new();
        loop {
            let word = self.expected.load(Ordering::SeqCst);
            let expected = word as u32;
            waiters.retain(|&(number, waiter)| match waiter {
                Waiter::Connection(_) => true,
                Waiter::Listener(connection) if !before(expected, number) => {
                    wake.push(connection.cid);
                    false
                }
                Waiter::Listener(_) => true,
                Waiter::Skipped => !before(number, expected),
            });
            self.waiting.store(waiters.len() as u32, Ordering::SeqCst);
            match waiters
                .iter()
                .find(|(number, _)| *number == expected)
                .map(|(_, waiter)| *waiter)
            {
                Some(Waiter::Skipped) if word & CLAIMED == 0 => {
                    let next = u64::from(expected.wrapping_add(1));
                    if self
                        .expected
                        .compare_exchange(word, next, Ordering::SeqCst, Ordering::SeqCst)
                        .is_ok()
                    {
                        self.finished();
                    }
                }
                Some(Waiter::Connection(connection)) => {
                    wake.push(connection.cid);
                    return wake;
                }
                // The holder of the claim checks this again on release.
                _ => return wake,
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(u32, Waiter)>> {
        // A poisoned lock is usable: no code under the lock can panic in the middle of a change.
        self.waiters
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn is_taken(waiters: &[(u32, Waiter)], n: u32) -> bool {
    waiters
        .iter()
        .any(|(number, waiter)| *number == n && !matches!(waiter, Waiter::Listener(_)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(cid: u16) -> ConnectionKey {
        ConnectionKey {
            tsih: 1,
            cid,
            serial: cid.into(),
        }
    }

    #[test]
    fn numbers_outside_the_window_are_distinguished() {
        let window = CommandWindow::new(0xffff_fffe, 4);
        assert_eq!(window.max_cmd_sn(), 1);
        assert_eq!(window.claim(0xffff_fffd), Turn::Stale);
        assert_eq!(window.claim(2), Turn::Outside);
        assert_eq!(window.claim(1), Turn::Early);
        assert_eq!(window.claim(0xffff_fffe), Turn::Claimed);
        assert_eq!(
            window.claim(0xffff_fffe),
            Turn::Stale,
            "the same number twice"
        );
        assert_eq!(window.exp_cmd_sn(), 0xffff_ffff);
        assert!(window.release().is_empty());
        assert_eq!(window.exp_cmd_sn(), 0xffff_ffff);
        window.finished();
        assert_eq!(window.max_cmd_sn(), 2);
    }

    #[test]
    fn full_window_opens_when_a_command_ends() {
        let window = CommandWindow::new(1, 2);
        for n in [1, 2] {
            assert_eq!(window.claim(n), Turn::Claimed);
            assert!(window.release().is_empty());
        }
        assert_eq!(window.claim(3), Turn::Outside);
        window.finished();
        assert_eq!(window.claim(3), Turn::Claimed);
    }

    #[test]
    fn skipped_numbers_are_stepped_over() {
        let window = CommandWindow::new(1, 8);
        assert_eq!(window.claim(4), Turn::Early);
        assert!(window.park(4, key(9)));
        assert!(window.skip(2).is_empty());
        assert_eq!(window.claim(2), Turn::Early);
        assert!(
            !window.park(2, key(7)),
            "a skipped command is ignored when it comes"
        );
        assert!(window.skip(3).is_empty());
        assert_eq!(window.claim(1), Turn::Claimed);
        assert_eq!(window.release().as_slice(), [9]);
        assert_eq!(window.claim(4), Turn::Claimed);
    }

    #[test]
    fn listener_is_notified_after_all_earlier_commands() {
        let window = CommandWindow::new(1, 8);
        window.listen(3, key(5));
        for (n, notified) in [(1, [].as_slice()), (2, &[5]), (3, &[])] {
            assert_eq!(window.claim(n), Turn::Claimed);
            assert_eq!(window.release().as_slice(), notified, "after {n}");
        }
    }

    /// Model: a sorted list. For any order of arrival, commands are handed over in CmdSN order.
    fn hand_over(first: u32, arrivals: &[(u32, u16)]) -> Vec<u32> {
        let window = CommandWindow::new(first, 64);
        let mut parked: Vec<Vec<u32>> = vec![Vec::new(); 4];
        let mut order = Vec::new();
        for &(offset, connection) in arrivals {
            let n = first.wrapping_add(offset);
            let mut turn = window.claim(n);
            if turn == Turn::Early && window.park(n, key(connection)) {
                turn = window.claim(n);
                assert_eq!(turn, Turn::Early);
                parked[connection as usize].push(n);
            }
            let mut current = (turn == Turn::Claimed).then_some(n);
            while let Some(n) = current.take() {
                order.push(n.wrapping_sub(first));
                if let Some(&next) = window.release().first() {
                    let expected = window.exp_cmd_sn();
                    assert!(parked[next as usize].contains(&expected));
                    assert_eq!(window.claim(expected), Turn::Claimed);
                    window.unpark(expected, key(next));
                    current = Some(expected);
                }
            }
        }
        order
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn commands_are_delivered_in_order_over_all_connections(
            first in any::<u32>(),
            shuffled in Just((0..40u32).collect::<Vec<_>>()).prop_shuffle(),
            connections in prop::collection::vec(0..4u16, 40),
            again in prop::collection::vec(0..40usize, 0..10),
        ) {
            let mut arrivals: Vec<(u32, u16)> = shuffled.into_iter().zip(connections).collect();
            for index in again {
                let (n, connection) = arrivals[index];
                arrivals.push((n, (connection + 1) % 4));
            }
            prop_assert_eq!(hand_over(first, &arrivals), (0..40).collect::<Vec<_>>());
        }
    }

    #[test]
    fn connections_on_four_threads_hand_over_in_order() {
        use std::sync::{Arc, Mutex, mpsc};
        const COMMANDS: u32 = 400;
        let window = Arc::new(CommandWindow::new(0xffff_ff00, COMMANDS));
        let order = Arc::new(Mutex::new(Vec::new()));
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..4).map(|_| mpsc::channel::<()>()).unzip();
        let threads: Vec<_> = receivers
            .into_iter()
            .enumerate()
            .map(|(me, wake)| {
                let (window, order, senders) = (window.clone(), order.clone(), senders.clone());
                std::thread::spawn(move || {
                    for k in 0..COMMANDS / 4 {
                        let n = 0xffff_ff00u32.wrapping_add(k * 4 + me as u32);
                        let mut turn = window.claim(n);
                        let parked = turn == Turn::Early && window.park(n, key(me as u16));
                        while turn == Turn::Early {
                            turn = window.claim(n);
                            if turn == Turn::Early {
                                wake.recv().unwrap();
                            }
                        }
                        assert_eq!(turn, Turn::Claimed);
                        if parked {
                            window.unpark(n, key(me as u16));
                        }
                        order.lock().unwrap().push(n);
                        for next in window.release() {
                            senders[next as usize].send(()).unwrap_or_default();
                        }
                    }
                })
            })
            .collect();
        drop(senders);
        for thread in threads {
            thread.join().unwrap();
        }
        let expected: Vec<u32> = (0..COMMANDS)
            .map(|n| 0xffff_ff00u32.wrapping_add(n))
            .collect();
        assert_eq!(*order.lock().unwrap(), expected);
    }
}

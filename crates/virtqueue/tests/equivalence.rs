//! Compares a split and a packed ring under the same operations: same chains in the same order, same answers, and every requested
//! notification.

mod common;

use common::{DATA, Pair};
use proptest::prelude::*;
use virtqueue::Chain;

#[derive(Clone, Debug)]
enum Op {
    Add(u32, u32, bool),
    Kick,
    Pop(u8),
    /// Number of the request in flight (modulo their count), bytes written.
    Complete(u16, u32),
    Publish,
    /// Publish without a check of the driver's event suppression, and the check.
    Show,
    Ask,
    Collect(u8),
    DeviceNotifications(bool),
    DriverInterrupts(bool),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0u32..4, 0u32..4, any::<bool>()).prop_map(|(r, w, t)| Op::Add(r, w, t)),
        3 => Just(Op::Kick),
        4 => (1u8..6).prop_map(Op::Pop),
        6 => (any::<u16>(), 0u32..100_000).prop_map(|(i, w)| Op::Complete(i, w)),
        3 => Just(Op::Publish),
        2 => Just(Op::Show),
        2 => Just(Op::Ask),
        3 => (1u8..9).prop_map(Op::Collect),
        1 => any::<bool>().prop_map(Op::DeviceNotifications),
        2 => any::<bool>().prop_map(Op::DriverInterrupts),
    ]
}

/// Elements, readable and writable bytes of a chain.
type Popped = (Vec<(u64, u32)>, u32, u32);

/// Visible results of one step.
#[derive(Debug, Default, PartialEq)]
struct Seen {
    added: bool,
    popped: Vec<Popped>,
    collected: Vec<(u64, u32)>,
    /// Kick or interrupt, if requested and due.
    notified: Option<bool>,
    more: bool,
}

struct Side {
    pair: Pair,
    event_idx: bool,
    chain: Chain,
    in_flight: Vec<(u16, u16)>,
    /// With event_idx: the next chain requires a notification.
    kick_armed: bool,
    interrupt_armed: bool,
    added: bool,
    pushed: bool,
    /// An interrupt is due for published chains, and the driver's event suppression is unchecked.
    owed: bool,
    token: u64,
}

impl Side {
    fn new(size: u16, packed: bool, event_idx: bool) -> Side {
        let mut pair = Pair::new(size, packed, event_idx, 0);
        pair.driver.enable_interrupts();
        pair.device.enable_notifications();
        Side {
            pair,
            event_idx,
            chain: Chain::default(),
            in_flight: Vec::new(),
            kick_armed: true,
            interrupt_armed: true,
            added: false,
            pushed: false,
            owed: false,
            token: 0,
        }
    }

    #[allow(
        clippy::too_many_lines,
        reason = "one test, from its beginning to its end"
    )]
    fn step(&mut self, op: &Op) -> Seen {
        let mut seen = Seen::default();
        let (driver, device) = (&mut self.pair.driver, &mut self.pair.device);
        match *op {
            Op::Add(readable, writable, through_table) => {
                let element = |i: u32| (DATA + u64::from(i) * 0x100 + self.token % 64, 0x80 + i);
                let r: Vec<_> = (0..readable).map(element).collect();
                let w: Vec<_> = (readable..readable + writable).map(element).collect();
                if r.is_empty() && w.is_empty() {
                    return seen;
                }
                let id = if through_table {
                    driver.add_indirect(&r, &w, self.token)
                } else {
                    driver.add(&r, &w, self.token)
                };
                self.token += 1;
                seen.added = id.is_some();
                self.added |= seen.added;
            }
            Op::Kick => {
                let kick = driver.publish();
                // Without event_idx both rings must agree; with it, only requested kicks must.
                let due = self.added && self.kick_armed;
                seen.notified = (due || !self.event_idx).then_some(kick);
                self.kick_armed &= !self.added;
                self.added = false;
            }
            Op::Pop(most) => {
                let waiting = usize::from(device.waiting()).min(usize::from(most));
                for _ in 0..most {
                    let view = &self.pair.memory.view;
                    if !device.pop(view, &mut self.chain).unwrap() {
                        break;
                    }
                    let elements = self.pair.memory.elements(&self.chain);
                    seen.popped
                        .push((elements, self.chain.readable, self.chain.writable));
                    self.in_flight.push((self.chain.id, self.chain.descriptors));
                }
                // A split ring returns the known chains; a packed ring counts the waiting ones.
                let counted = if self.pair.layout.packed {
                    seen.popped.len()
                } else {
                    waiting.min(seen.popped.len())
                };
                assert_eq!(waiting, counted, "chains wait, and these came");
            }
            Op::Complete(which, written) => {
                if !self.in_flight.is_empty() {
                    let (id, count) = self
                        .in_flight
                        .remove(usize::from(which) % self.in_flight.len());
                    device.push(id, count, written);
                    self.pushed = true;
                }
            }
            Op::Publish => {
                let interrupt = device.publish();
                let due = self.pushed && self.interrupt_armed || self.owed;
                self.owed = false;
                seen.notified = (due || !self.event_idx).then_some(interrupt);
                self.interrupt_armed &= !self.pushed;
                self.pushed = false;
            }
            Op::Show => {
                // A packed ring requires a check before the next publication, so both rings do it.
                let is_required = device.must_check_suppression();
                assert!(!is_required || self.pair.layout.packed, "so soon");
                let interrupt = device.check_suppression();
                seen.notified = (self.owed || !self.event_idx).then_some(interrupt);
                device.publish_unchecked();
                assert_eq!(device.is_unchecked(), self.pushed);
                self.owed = self.pushed && self.interrupt_armed;
                self.interrupt_armed &= !self.pushed;
                self.pushed = false;
            }
            Op::Ask => {
                let interrupt = device.check_suppression();
                seen.notified = (self.owed || !self.event_idx).then_some(interrupt);
                self.owed = false;
                assert!(
                    !device.is_unchecked() && !device.check_suppression(),
                    "checked twice"
                );
            }
            Op::Collect(most) => {
                for _ in 0..most {
                    let Some(used) = driver.pop_used() else {
                        break;
                    };
                    seen.collected.push((used.token, used.written));
                }
            }
            Op::DeviceNotifications(true) => {
                seen.more = device.enable_notifications();
                self.kick_armed = !seen.more;
            }
            Op::DeviceNotifications(false) => {
                device.disable_notifications();
                self.kick_armed = false;
            }
            Op::DriverInterrupts(true) => {
                seen.more = driver.enable_interrupts();
                self.interrupt_armed = !seen.more;
                // A driver that has seen all answers needs no interrupt for them.
                self.owed &= seen.more;
            }
            Op::DriverInterrupts(false) => {
                driver.disable_interrupts();
                (self.interrupt_armed, self.owed) = (false, false);
            }
        }
        if self.event_idx && seen.notified.is_some() {
            assert_eq!(seen.notified, Some(true), "requested, due, and not sent");
        }
        seen
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn packed_ring_shows_what_a_split_ring_shows(
        power in 0u32..6,
        event_idx in any::<bool>(),
        ops in prop::collection::vec(op(), 1..150)
    ) {
        let mut split = Side::new(1 << power, false, event_idx);
        let mut packed = Side::new(1 << power, true, event_idx);
        for op in &ops {
            prop_assert_eq!(split.step(op), packed.step(op), "{:?}", op);
            prop_assert_eq!(split.pair.driver.free(), packed.pair.driver.free());
        }
    }

    #[test]
    fn everything_added_is_answered_once_in_packed_rings_of_any_size(
        size in 1u16..40,
        rounds in prop::collection::vec((1u32..3, 0u32..3, any::<bool>(), any::<u16>()), 1..150)
    ) {
        let mut side = Side::new(size, true, true);
        let (mut added, mut answered) = (Vec::new(), Vec::new());
        for (readable, writable, through_table, which) in rounds {
            let token = side.token;
            if side.step(&Op::Add(readable, writable, through_table)).added {
                added.push(token);
            }
            side.step(&Op::Kick);
            side.step(&Op::Pop(2));
            if side.in_flight.len() > usize::from(size) / 2 {
                side.step(&Op::Complete(which, 1));
                side.step(&Op::Publish);
                answered.extend(side.step(&Op::Collect(9)).collected);
            }
        }
        while side.pair.driver.free() < size {
            side.step(&Op::Pop(9));
            side.step(&Op::Complete(0, 1));
            side.step(&Op::Publish);
            answered.extend(side.step(&Op::Collect(9)).collected);
        }
        let mut tokens: Vec<u64> = answered.iter().map(|a| a.0).collect();
        tokens.sort_unstable();
        prop_assert_eq!(tokens, added);
    }
}

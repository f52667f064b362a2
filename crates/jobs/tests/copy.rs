//! Random runs of [`jobs::copy`] against a model of the disk and its devices, which checks the order of all actions.

use jobs::copy::{Action, Announcement, Copy, Device, Goal, Lacking, Plan};
use jobs::exchange::ExchangeAction;
use jobs::range::RangeAction;
use jobs::{Early, Event, Now, Orders, Outcome, Piece, Span};
use proptest::prelude::*;

const TOTAL: u64 = 5 << 20;

/// Decisions of a run: results of actions and orders of users.
struct Choices {
    numbers: std::vec::IntoIter<u16>,
}

impl Choices {
    /// Returns true in one of `times` cases, and false after the last decision.
    fn one_in(&mut self, times: u16) -> bool {
        self.numbers
            .next()
            .is_some_and(|number| number % times == 0)
    }
}

/// State of the disk and its devices.
struct Model {
    plan: Plan,
    device: Device,
    is_prepared: Option<Device>,
    is_held: bool,
    part: Option<Span>,
    /// Bytes from the start that both devices have.
    copied: u64,
    /// Bytes of the held part that the target has.
    written: u64,
    is_open: bool,
    flush_is_open: bool,
    /// The target has unflushed data.
    is_dirty: bool,
    is_identified: bool,
    /// The source has lost acknowledged writes: no flush succeeds any more.
    has_lost_writes: bool,
    is_abandoned: bool,
    is_drained: bool,
    is_locked: bool,
    is_published: bool,
    is_complete: bool,
    orders: Orders,
    lost: Option<String>,
    has_failed: bool,
}

impl Model {
    fn new(plan: Plan) -> Model {
        let device = match plan.goal {
            Goal::Commit => Device::Mirror,
            Goal::Mirror | Goal::Backup => Device::Source,
        };
        Model {
            plan,
            device,
            is_prepared: None,
            is_held: false,
            part: None,
            copied: 0,
            written: 0,
            is_open: false,
            flush_is_open: false,
            is_dirty: false,
            is_identified: false,
            has_lost_writes: false,
            is_abandoned: false,
            is_drained: false,
            is_locked: plan.goal == Goal::Commit,
            is_published: false,
            is_complete: false,
            orders: Orders {
                switches: plan.goal == Goal::Commit,
                ..Orders::default()
            },
            lost: None,
            has_failed: false,
        }
    }

    /// Changes orders, and makes clients' writes fail on the target.
    fn pass_time(&mut self, choices: &mut Choices) {
        self.orders.is_cancelled |= choices.one_in(150);
        self.orders.is_paused = choices.one_in(20);
        self.orders.switches |= choices.one_in(5);
        self.orders.accepts_loss |= choices.one_in(100);
        let is_written = self.device == Device::Mirror && !self.is_held && self.copied > 0;
        if is_written && !self.is_abandoned {
            self.is_dirty = true;
            if choices.one_in(300) {
                self.lost = Some("lost".to_owned());
            }
        }
    }

    fn fails(&mut self, choices: &mut Choices, event: Event) -> Event {
        match choices.one_in(60) {
            true => {
                self.has_failed = true;
                Event::Failed("failed".to_owned())
            }
            false => event,
        }
    }

    fn execute(&mut self, action: &Action, choices: &mut Choices) -> Event {
        match action {
            Action::Exchange(action) => return self.exchange(*action, choices),
            Action::Open => {
                assert_eq!(self.device, Device::Mirror);
                self.is_open = true;
                return self.fails(choices, Event::Done);
            }
            Action::Check => return self.fails(choices, Event::Done),
            Action::Survey(span) => {
                assert_eq!(span.from, self.copied);
                let is_data = choices.one_in(2);
                let end = match choices.one_in(3) {
                    true => span.end,
                    false => span.end.min(span.from + 4096),
                };
                return Event::Piece(Piece { end, is_data });
            }
            Action::Hold(span) => {
                assert!(self.part.is_none() && span.from < span.end && span.end <= TOTAL);
                assert_eq!(span.from, self.copied);
                if choices.one_in(10) {
                    return Event::Busy;
                }
                self.part = Some(*span);
                self.written = span.from;
            }
            Action::Range(action) => return self.copy_range(*action, choices),
            Action::Advance { end, .. } => {
                let part = self.part.expect("the part is held");
                assert_eq!((part.from, part.end), (self.copied, *end));
                assert_eq!(self.written, *end, "the target has the part");
                self.copied = *end;
            }
            Action::Release => assert!(self.part.take().is_some()),
            Action::Announce(Announcement::Ready(reason)) => {
                assert_eq!(self.copied, TOTAL);
                if reason.is_some() {
                    self.orders.switches = false;
                }
            }
            Action::Announce(Announcement::Failed(_)) => assert!(self.is_abandoned),
            Action::FlushSource => return self.flush_source(choices),
            Action::OpenFlush => {
                self.flush_is_open = true;
                return self.fails(choices, Event::Done);
            }
            Action::Flush => return self.flush(choices),
            Action::Publish => {
                assert!(!self.is_dirty && self.device == Device::Source);
                self.is_published = true;
                return self.fails(choices, Event::Done);
            }
            Action::Complete => {
                assert!(self.is_published);
                return match self.fails(choices, Event::Done) {
                    Event::Done => {
                        self.is_complete = true;
                        Event::Done
                    }
                    failed => failed,
                };
            }
            Action::Abandon => self.is_abandoned = true,
            Action::Drain => {
                assert_eq!(self.device, Device::Source, "clients do not use the target");
                self.is_drained = true;
            }
            Action::Unlock => {
                assert!(self.is_drained && self.is_locked);
                self.is_locked = false;
            }
            Action::Announce(Announcement::Finishing)
            | Action::RetryLater(_)
            | Action::Wait(_)
            | Action::End(_) => {}
        }
        Event::Done
    }

    fn flush_source(&mut self, choices: &mut Choices) -> Event {
        assert_eq!((self.device, self.copied), (Device::Mirror, TOTAL));
        self.has_lost_writes |= choices.one_in(10);
        match self.has_lost_writes {
            true => Event::Failed("lost".to_owned()),
            false => Event::Done,
        }
    }

    fn flush(&mut self, choices: &mut Choices) -> Event {
        assert!(self.flush_is_open);
        match self.fails(choices, Event::Done) {
            Event::Done => {
                self.is_dirty = false;
                Event::Done
            }
            failed => failed,
        }
    }

    fn copy_range(&mut self, action: RangeAction, choices: &mut Choices) -> Event {
        let part = self.part.expect("the part is held");
        assert!(self.is_open);
        match action {
            RangeAction::Pieces(span) => {
                assert_eq!((span.from, span.end), (part.from, part.end));
                let middle = span.from + (span.end - span.from) / 2;
                let is_data = choices.one_in(2);
                let pieces = [(middle, is_data), (span.end, !is_data)];
                // The target has the other half.
                if !is_data {
                    self.written = middle;
                }
                let pieces = pieces.map(|(end, is_data)| Piece { end, is_data });
                let event = Event::Pieces(pieces.to_vec());
                return self.fails(choices, event);
            }
            RangeAction::Status(span) => {
                let is_data = choices.one_in(2);
                let end = span.end;
                return self.fails(choices, Event::Piece(Piece { end, is_data }));
            }
            RangeAction::Read(span) => assert_eq!(span.from, self.written),
            RangeAction::Zero(span) | RangeAction::Write(span) => {
                assert_eq!(span.from, self.written);
                assert!(span.end <= part.end);
                self.is_dirty = true;
                let event = self.fails(choices, Event::Done);
                if event == Event::Done {
                    self.written = span.end;
                    let has_rest = self.plan.lacking == Lacking::Pieces;
                    let middle = part.from + (part.end - part.from) / 2;
                    if has_rest && span.end == middle {
                        self.written = part.end;
                    }
                }
                return event;
            }
        }
        self.fails(choices, Event::Done)
    }

    fn exchange(&mut self, action: ExchangeAction<Device>, choices: &mut Choices) -> Event {
        match action {
            ExchangeAction::Prepare(device) => {
                assert!(!self.is_held && self.part.is_none());
                if device == Device::Source && self.device == Device::Source {
                    return Event::Unneeded;
                }
                let event = self.fails(choices, Event::Done);
                self.is_prepared = Some(device);
                return event;
            }
            ExchangeAction::Hold => {
                assert!(!self.is_held && self.is_prepared.is_some());
                let event = self.fails(choices, Event::Done);
                self.is_held = event == Event::Done;
                return event;
            }
            ExchangeAction::Flush => {
                assert!(self.is_held);
                return self.flush(choices);
            }
            ExchangeAction::Check | ExchangeAction::Record => assert!(self.is_held),
            ExchangeAction::Persist => {
                assert!(self.is_held && !self.is_dirty, "only of a durable target");
                let event = self.fails(choices, Event::Done);
                self.is_identified = event == Event::Done;
                return event;
            }
            ExchangeAction::Replace(device) => {
                assert!(self.is_held && self.is_prepared == Some(device));
                if device == Device::Target {
                    assert!(self.copied == TOTAL && !self.is_dirty && self.is_identified);
                    assert!(self.lost.is_none() && !self.is_abandoned);
                    assert_ne!(self.plan.goal, Goal::Backup);
                    assert!(!self.has_lost_writes || self.orders.accepts_loss);
                }
                let event = self.fails(choices, Event::Done);
                if event == Event::Done {
                    (self.device, self.is_prepared) = (device, None);
                }
                return event;
            }
            ExchangeAction::Release => {
                assert!(self.is_held);
                self.is_held = false;
                return Event::Done;
            }
            ExchangeAction::Detach => {
                assert!(self.is_prepared.is_some() && !self.is_held);
                self.is_prepared = None;
                return Event::Done;
            }
        }
        self.fails(choices, Event::Done)
    }

    fn check_end(&self, outcome: &Outcome) {
        assert!(!self.is_held && self.part.is_none(), "no lock is left");
        assert!(self.is_prepared.is_none(), "no unused device has workers");
        let expected = match (outcome, self.plan.goal) {
            (Ok(()), Goal::Mirror | Goal::Commit) => Device::Target,
            (Ok(()), Goal::Backup) | (Err(_), _) => Device::Source,
        };
        assert_eq!(self.device, expected);
        match outcome {
            Ok(()) => {
                assert!(self.copied == TOTAL && !self.is_dirty);
                assert_eq!(self.is_complete, self.plan.goal == Goal::Backup);
            }
            Err(early) => {
                assert!(self.is_abandoned && self.is_drained && !self.is_locked);
                match early {
                    Early::Cancelled => assert!(self.orders.is_cancelled),
                    Early::Failed(_) => assert!(self.has_failed || self.lost.is_some()),
                }
            }
        }
    }
}

fn run(plan: Plan, numbers: Vec<u16>) {
    let mut choices = Choices {
        numbers: numbers.into_iter(),
    };
    let (mut job, mut model) = (Copy::new(plan), Model::new(plan));
    let mut event = Event::Done;
    for step in 0..100_000 {
        model.pass_time(&mut choices);
        if step > 20_000 {
            // A mirror waits for its switch.
            model.orders.switches = true;
            model.orders.accepts_loss = true;
        }
        let now = Now {
            time: std::time::Duration::from_millis(step),
            orders: model.orders,
            lost: model.lost.clone(),
        };
        let action = job.step(&now, event);
        if let Action::End(outcome) = action {
            return model.check_end(&outcome);
        }
        event = model.execute(&action, &mut choices);
    }
    panic!("the job does not end");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn job_keeps_the_order_of_its_actions(
        goal in prop_oneof![Just(Goal::Mirror), Just(Goal::Commit), Just(Goal::Backup)],
        has_pieces in any::<bool>(),
        numbers in prop::collection::vec(any::<u16>(), 0..3000),
    ) {
        let lacking = match goal == Goal::Commit || has_pieces && goal == Goal::Backup {
            true => Lacking::Pieces,
            false => Lacking::All,
        };
        run(Plan { goal, lacking, total: TOTAL }, numbers);
    }
}

#[test]
fn disk_that_cannot_be_flushed_switches_only_if_the_loss_is_accepted() {
    let plan = Plan {
        goal: Goal::Mirror,
        lacking: Lacking::All,
        total: TOTAL,
    };
    let (mut job, mut model) = (Copy::new(plan), Model::new(plan));
    let mut choices = Choices {
        numbers: Vec::new().into_iter(),
    };
    let (mut now, mut event) = (Now::default(), Event::Done);
    now.orders.switches = true;
    let mut refusals = 0;
    for _ in 0..100_000 {
        let action = job.step(&now, event);
        event = match &action {
            Action::FlushSource => Event::Failed("lost".to_owned()),
            action => model.execute(action, &mut choices),
        };
        match action {
            Action::End(outcome) => {
                assert_eq!((&outcome, refusals), (&Ok(()), 2));
                return model.check_end(&outcome);
            }
            Action::Announce(Announcement::Ready(reason)) => {
                assert_eq!(reason.as_deref(), Some("lost"));
                refusals += 1;
                // The user tries again, then accepts the loss.
                now.orders.accepts_loss = refusals == 2;
            }
            Action::Exchange(ExchangeAction::Prepare(Device::Target)) => {
                assert!(now.orders.accepts_loss);
            }
            _ => {}
        }
    }
    panic!("the job does not end");
}

#[test]
fn speed_limit_and_pause_delay_the_next_part() {
    let plan = Plan {
        goal: Goal::Backup,
        lacking: Lacking::All,
        total: TOTAL,
    };
    let (mut job, mut model) = (Copy::new(plan), Model::new(plan));
    let mut choices = Choices {
        numbers: Vec::new().into_iter(),
    };
    let mut now = Now::default();
    now.orders.speed = 1 << 20;
    let mut event = Event::Done;
    let mut step = |now: &Now, model: &mut Model| {
        let action = job.step(now, event.clone());
        event = match action {
            Action::Survey(span) => Event::Piece(Piece {
                end: span.end,
                is_data: true,
            }),
            Action::Range(RangeAction::Status(span)) => Event::Piece(Piece {
                end: span.end,
                is_data: true,
            }),
            ref action => model.execute(action, &mut choices),
        };
        action
    };
    let limited = (0..100).map(|_| step(&now, &mut model));
    let limited = limited.into_iter().find_map(|action| match action {
        Action::Wait(time) => Some(time),
        _ => None,
    });
    assert_eq!(limited, Some(std::time::Duration::from_secs(1)));
    now.time += std::time::Duration::from_secs(1);
    now.orders.is_paused = true;
    assert_eq!(step(&now, &mut model), Action::Wait(jobs::PAUSE));
    now.orders.is_paused = false;
    assert_eq!(step(&now, &mut model), Action::Check);
}

//! Random runs of streams, snapshots, backups and starts of commits, which check the order of their actions.

use jobs::exchange::ExchangeAction;
use jobs::range::RangeAction;
use jobs::snapshot::Snapshot;
use jobs::stream::Stream;
use jobs::{Early, Event, Now, Orders, Piece, Span, commit, points, pull, push, snapshot, stream};
use proptest::prelude::*;

const TOTAL: u64 = 3 << 20;

/// Results of actions and orders of users.
struct Choices {
    numbers: std::vec::IntoIter<u16>,
    has_failed: bool,
    orders: Orders,
}

impl Choices {
    fn new(numbers: Vec<u16>) -> Choices {
        Choices {
            numbers: numbers.into_iter(),
            has_failed: false,
            orders: Orders::default(),
        }
    }

    fn one_in(&mut self, times: u16) -> bool {
        self.numbers
            .next()
            .is_some_and(|number| number % times == 0)
    }

    /// Returns the state at the next event.
    fn now(&mut self) -> Now {
        self.orders.is_cancelled |= self.one_in(100);
        self.orders.is_paused = self.one_in(20);
        Now {
            orders: self.orders,
            ..Now::default()
        }
    }

    fn done(&mut self) -> Event {
        match self.one_in(40) {
            true => {
                self.has_failed = true;
                Event::Failed("failed".to_owned())
            }
            false => Event::Done,
        }
    }

    fn check(&self, early: &Early) {
        match early {
            Early::Cancelled => assert!(self.orders.is_cancelled),
            Early::Failed(_) => assert!(self.has_failed),
        }
    }
}

fn run_stream(choices: &mut Choices) {
    let mut job = Stream::new(TOTAL);
    let (mut event, mut at, mut is_detached, mut is_closed) = (Event::Done, 0, false, false);
    loop {
        event = match job.step(&choices.now(), event) {
            stream::Action::CopyUp(Span { from, end }) => {
                assert!(from == at && end > from && !is_detached);
                match choices.done() {
                    Event::Done => {
                        at = end;
                        let bytes = end - from;
                        Event::CopiedUp { end, bytes }
                    }
                    failed => failed,
                }
            }
            stream::Action::Detach => {
                assert!(at >= TOTAL, "all data are in the image");
                let event = choices.done();
                is_detached = event == Event::Done;
                event
            }
            stream::Action::Close => {
                assert!(is_detached && !is_closed);
                is_closed = choices.one_in(2);
                match is_closed {
                    true => Event::Done,
                    false if choices.numbers.len() == 0 => Event::Done,
                    false => Event::Busy,
                }
            }
            stream::Action::End(Ok(())) => return assert!(is_detached),
            stream::Action::End(Err(early)) => return choices.check(&early),
            stream::Action::Wait(_) | stream::Action::Advance { .. } | stream::Action::Finish => {
                Event::Done
            }
        };
    }
}

fn run_snapshot(choices: &mut Choices) {
    let mut job = Snapshot::default();
    let (mut event, mut is_held, mut is_flushed, mut is_new) = (Event::Done, false, false, false);
    let mut is_prepared = false;
    loop {
        event = match job.step(event) {
            snapshot::Action::Exchange(action) => {
                let event = match action {
                    ExchangeAction::Release | ExchangeAction::Detach => Event::Done,
                    _ => choices.done(),
                };
                let is_done = event == Event::Done;
                match action {
                    ExchangeAction::Prepare(_) => is_prepared = true,
                    ExchangeAction::Hold => is_held = is_done,
                    ExchangeAction::Flush => is_flushed = is_done && is_held,
                    ExchangeAction::Replace(_) => {
                        assert!(is_held && is_flushed);
                        is_new = is_done;
                        is_prepared = !is_done;
                    }
                    ExchangeAction::Release => is_held = false,
                    ExchangeAction::Detach => is_prepared = false,
                    ExchangeAction::Check | ExchangeAction::Persist => assert!(is_held),
                    ExchangeAction::Record => panic!("a snapshot has no bitmaps"),
                }
                event
            }
            snapshot::Action::OpenFlush | snapshot::Action::Flush => choices.done(),
            snapshot::Action::Remove => {
                assert!(!is_new && !is_held && !is_prepared);
                Event::Done
            }
            snapshot::Action::Unlock => {
                assert!(is_new && !is_held);
                Event::Done
            }
            snapshot::Action::End(Ok(())) => return assert!(is_new && !is_held),
            snapshot::Action::End(Err(early)) => {
                assert!(!is_new && !is_held && !is_prepared);
                return choices.check(&early);
            }
        };
    }
}

fn run_push(choices: &mut Choices) {
    let mut job = push::Push::new(TOTAL);
    let (mut event, mut at, mut written) = (Event::Done, 0, 0);
    let (mut has_point, mut is_flushed, mut is_complete, mut is_removed) =
        (true, false, false, false);
    let mut is_published = false;
    loop {
        let mut now = choices.now();
        now.lost = (!has_point).then(|| "the point in time has ended".to_owned());
        event = match job.step(&now, event) {
            push::Action::Changed(Span { from, end }) => {
                assert!(from == at && has_point);
                let is_data = choices.one_in(2);
                if !is_data {
                    written = end;
                }
                Event::Piece(Piece { end, is_data })
            }
            push::Action::Range(action) => match action {
                RangeAction::Status(Span { end, .. }) => {
                    let is_data = choices.one_in(2);
                    Event::Piece(Piece { end, is_data })
                }
                RangeAction::Zero(span) | RangeAction::Write(span) => {
                    assert!(span.from == written && has_point);
                    let event = choices.done();
                    if event == Event::Done {
                        written = span.end;
                    }
                    event
                }
                RangeAction::Read(_) | RangeAction::Pieces(_) => choices.done(),
            },
            push::Action::Advance { end, .. } => {
                assert_eq!(written, end, "the target has the part");
                at = end;
                Event::Done
            }
            push::Action::EndPoint => {
                has_point = false;
                Event::Done
            }
            push::Action::Flush => {
                let event = choices.done();
                is_flushed = event == Event::Done;
                event
            }
            push::Action::Publish => {
                assert!(at == TOTAL && is_flushed && !has_point);
                let event = choices.done();
                is_published = event == Event::Done;
                event
            }
            push::Action::Complete => {
                assert!(is_published);
                let event = choices.done();
                is_complete = event == Event::Done;
                event
            }
            push::Action::Remove(_) => {
                is_removed = true;
                Event::Done
            }
            push::Action::Open | push::Action::Check | push::Action::OpenFlush => choices.done(),
            push::Action::Wait(_) | push::Action::Finish => Event::Done,
            push::Action::End(Ok(())) => return assert!(is_complete && !is_removed),
            push::Action::End(Err(early)) => {
                assert!(is_removed && !is_complete && !has_point);
                let of_the_end = Early::Failed("the point in time has ended".to_owned());
                assert_ne!(early, of_the_end, "hides the reason");
                return choices.check(&early);
            }
        };
    }
}

fn run_points(choices: &mut Choices) {
    let (mut job, mut event) = (points::Begin::default(), Event::Done);
    let (mut is_held, mut is_recorded, mut is_prepared, mut has_layers) =
        (false, false, false, false);
    let (mut is_exported, mut is_discarded) = (false, false);
    loop {
        event = match job.step(event) {
            points::Action::Exchange(action) => {
                let event = match action {
                    ExchangeAction::Release | ExchangeAction::Detach => Event::Done,
                    _ => choices.done(),
                };
                let is_done = event == Event::Done;
                match action {
                    ExchangeAction::Prepare(_) => is_prepared = true,
                    ExchangeAction::Hold => is_held = is_done,
                    ExchangeAction::Record => {
                        assert!(is_held);
                        is_recorded = is_done;
                    }
                    ExchangeAction::Replace(_) => {
                        assert!(is_held && is_recorded);
                        has_layers = is_done;
                        is_prepared = !is_done;
                    }
                    ExchangeAction::Release => is_held = false,
                    ExchangeAction::Detach => is_prepared = false,
                    other => panic!("{other:?} does not belong to a point in time"),
                }
                event
            }
            points::Action::CheckLayers => {
                assert!(has_layers && !is_held);
                choices.done()
            }
            points::Action::Export => {
                is_exported = true;
                choices.done()
            }
            points::Action::Enter => choices.done(),
            points::Action::Unexport => {
                is_exported = false;
                Event::Done
            }
            points::Action::EndPoints => {
                assert!(!is_exported, "a client would read an ended point in time");
                has_layers = false;
                Event::Done
            }
            points::Action::Discard => {
                assert!(!has_layers);
                is_discarded = true;
                Event::Done
            }
            points::Action::End(Ok(())) => return assert!(has_layers && !is_held && !is_discarded),
            points::Action::End(Err(early)) => {
                assert!(!has_layers && !is_held && !is_prepared && !is_exported && is_discarded);
                return choices.check(&early);
            }
        };
    }
}

fn run_restore(choices: &mut Choices) {
    let (mut job, mut event) = (points::Restore::default(), Event::Done);
    let (mut has_ended, mut is_held, mut is_prepared, mut has_layer) = (false, false, false, true);
    loop {
        event = match job.step(event) {
            points::RestoreAction::EndPoint => {
                has_ended = true;
                Event::Done
            }
            points::RestoreAction::Exchange(action) => {
                assert!(
                    has_ended,
                    "a client would wait for a copy while the disk is held"
                );
                let event = match action {
                    ExchangeAction::Prepare(_) if !has_layer => Event::Unneeded,
                    ExchangeAction::Release | ExchangeAction::Detach => Event::Done,
                    _ => choices.done(),
                };
                let is_done = event == Event::Done;
                match action {
                    ExchangeAction::Prepare(_) => is_prepared = true,
                    ExchangeAction::Hold => is_held = is_done,
                    ExchangeAction::Replace(_) => {
                        assert!(is_held && is_prepared);
                        has_layer = !is_done;
                        is_prepared = !is_done;
                    }
                    ExchangeAction::Release => is_held = false,
                    ExchangeAction::Detach => is_prepared = false,
                    other => panic!("{other:?} does not belong to the end of a point in time"),
                }
                event
            }
            points::RestoreAction::RetryLater(_) => {
                assert!(choices.has_failed && has_layer && !is_held && !is_prepared);
                Event::Done
            }
            points::RestoreAction::End => {
                return assert!(!has_layer && !is_held && !is_prepared);
            }
        };
    }
}

fn run_pull(choices: &mut Choices) {
    const DISKS: usize = 3;
    let (mut job, mut event) = (pull::Pull::new(DISKS), Event::Done);
    let mut lost: [Option<String>; DISKS] = Default::default();
    let (mut ended, mut complete) = ([false; DISKS], [false; DISKS]);
    let (mut is_exported, mut has_points, mut is_discarded) = (true, true, false);
    loop {
        let mut now = choices.now();
        now.orders.switches = choices.one_in(10) || choices.numbers.len() == 0;
        for one in lost.iter_mut().filter(|_| has_points) {
            if choices.one_in(40) {
                one.get_or_insert("lost".to_owned());
                choices.has_failed = true;
            }
        }
        event = match job.step(&now, &lost, event) {
            pull::Action::Wait(_) | pull::Action::Finish => {
                assert!(is_exported);
                Event::Done
            }
            pull::Action::Lose(disk, _) => {
                assert!(lost[disk].is_some() && !ended[disk]);
                ended[disk] = true;
                Event::Done
            }
            pull::Action::Unexport => {
                is_exported = false;
                Event::Done
            }
            pull::Action::EndPoints => {
                assert!(!is_exported, "a client would read an ended point in time");
                has_points = false;
                Event::Done
            }
            pull::Action::Complete(disk) => {
                assert!(!has_points && lost.iter().all(Option::is_none));
                let event = choices.done();
                complete[disk] = event == Event::Done;
                event
            }
            pull::Action::Revoke(disk) => {
                complete[disk] = false;
                Event::Done
            }
            pull::Action::Discard => {
                assert!(!has_points);
                is_discarded = true;
                Event::Done
            }
            pull::Action::End(Ok(())) => return assert!(complete == [true; DISKS]),
            pull::Action::End(Err(early)) => {
                assert!(complete == [false; DISKS] && is_discarded && !has_points);
                return choices.check(&early);
            }
        };
    }
}

fn run_start_of_commit(choices: &mut Choices) {
    let (mut job, mut event) = (commit::Begin::default(), Event::Done);
    let (mut is_held, mut is_open, mut is_prepared, mut is_new) = (false, false, false, false);
    loop {
        event = match job.step(event) {
            commit::Action::Hold => {
                let event = choices.done();
                is_held = event == Event::Done;
                event
            }
            commit::Action::Reopen => {
                assert!(is_held);
                is_open = true;
                choices.done()
            }
            commit::Action::Prepare => {
                assert!(is_open);
                is_prepared = true;
                choices.done()
            }
            commit::Action::Replace => {
                assert!(is_held && is_prepared);
                let event = choices.done();
                is_new = event == Event::Done;
                event
            }
            commit::Action::Detach => {
                assert!(is_held && !is_new);
                is_prepared = false;
                Event::Done
            }
            commit::Action::Undo => {
                assert!(is_held && !is_prepared && !is_new);
                is_open = false;
                Event::Done
            }
            commit::Action::Release => {
                assert!(is_new || !is_open && !is_prepared);
                is_held = false;
                Event::Done
            }
            commit::Action::End(Ok(())) => return assert!(is_new && !is_held),
            commit::Action::End(Err(early)) => {
                assert!(!is_held && !is_open && !is_prepared);
                return choices.check(&early);
            }
        };
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn other_jobs_keep_their_order(
        numbers in prop::collection::vec(any::<u16>(), 0..400),
    ) {
        run_stream(&mut Choices::new(numbers.clone()));
        run_snapshot(&mut Choices::new(numbers.clone()));
        run_push(&mut Choices::new(numbers.clone()));
        run_points(&mut Choices::new(numbers.clone()));
        run_restore(&mut Choices::new(numbers.clone()));
        run_pull(&mut Choices::new(numbers.clone()));
        run_start_of_commit(&mut Choices::new(numbers));
    }
}

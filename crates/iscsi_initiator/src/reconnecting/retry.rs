//! Detects temporary conditions in a unit's responses, after which a command is retried (SAM-5, 5.3; SPC-5, 4.4).

use std::time::{Duration, Instant};

use iscsi::initiator::CommandDone;

use super::UnitCommand;
use crate::sense::Sense;

const CHECK_CONDITION: u8 = 0x02;
const BUSY: u8 = 0x08;
const TASK_SET_FULL: u8 = 0x28;
const TASK_ABORTED: u8 = 0x40;

const NO_SENSE: u8 = 0;
const RECOVERED_ERROR: u8 = 1;
const NOT_READY: u8 = 2;
const ABORTED_COMMAND: u8 = 0x0b;
/// In the process of becoming ready.
const BECOMING_READY: (u8, u8) = (0x04, 0x01);
/// Transition between asymmetric access states.
const IN_TRANSITION: (u8, u8) = (0x04, 0x0a);

/// Maximum number of retries after unit attentions. A new nexus reports several, one per command; a unit with more never
/// stops.
const ATTENTIONS_MAX: u8 = 16;
/// Maximum number of attempts for a command that the target aborts.
const ABORTED_MAX: u8 = 4;
const PAUSE_FIRST: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Attempts {
    attentions: u8,
    aborted: u8,
    /// Start of the busy condition, and number of busy responses.
    busy: Option<(Instant, u32)>,
    /// Earliest time of the next attempt.
    pub not_before: Option<Instant>,
}

/// Action after a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Return the response to the caller.
    Over,
    /// Send the command again, not before [`Attempts::not_before`].
    Again,
}

/// Executes a command with `execute` and retries it while the condition is temporary; blocks in between. `on_done` receives
/// every response. Returns `None` if the unit was not reached.
pub fn carry_out(
    command: &UnitCommand,
    limit: Duration,
    execute: impl Fn(&UnitCommand) -> Option<CommandDone>,
    on_done: impl Fn(&CommandDone),
) -> Option<CommandDone> {
    let mut attempts = Attempts::default();
    loop {
        let done = execute(command)?;
        on_done(&done);
        let now = Instant::now();
        let verdict = attempts.judge(&done, command.repeatable, now, limit);
        if command.as_is || verdict == Verdict::Over {
            return Some(done);
        }
        if let Some(at) = attempts.not_before {
            std::thread::sleep(at.saturating_duration_since(now));
        }
    }
}

impl Attempts {
    /// Decides about a response. `repeatable` means that the command may be executed twice, because an aborted one may have
    /// taken effect. `limit` is the maximum busy time; zero means unlimited.
    pub fn judge(
        &mut self,
        done: &CommandDone,
        repeatable: bool,
        now: Instant,
        limit: Duration,
    ) -> Verdict {
        self.not_before = None;
        let sense = Sense::parse(&done.sense);
        let is = |key: u8| sense.is_some_and(|sense| sense.key == key);
        match done.status {
            CHECK_CONDITION if is(Sense::UNIT_ATTENTION) => {
                again(&mut self.attentions, ATTENTIONS_MAX)
            }
            CHECK_CONDITION if is(ABORTED_COMMAND) && repeatable => {
                again(&mut self.aborted, ABORTED_MAX)
            }
            TASK_ABORTED if repeatable => again(&mut self.aborted, ABORTED_MAX),
            // The error of an earlier command was recovered, and this command was not executed.
            CHECK_CONDITION
                if repeatable
                    && Sense::is_deferred(&done.sense)
                    && (is(NO_SENSE) || is(RECOVERED_ERROR)) =>
            {
                again(&mut self.aborted, ABORTED_MAX)
            }
            CHECK_CONDITION
                if is(NOT_READY)
                    && sense.is_some_and(|s| {
                        [BECOMING_READY, IN_TRANSITION].contains(&(s.code, s.qualifier))
                    }) =>
            {
                self.wait(now, limit)
            }
            BUSY | TASK_SET_FULL => self.wait(now, limit),
            _ => Verdict::Over,
        }
    }

    fn wait(&mut self, now: Instant, limit: Duration) -> Verdict {
        let (since, times) = self.busy.unwrap_or((now, 0));
        if !limit.is_zero() && now.duration_since(since) >= limit {
            return Verdict::Over;
        }
        self.busy = Some((since, times + 1));
        let pause = PAUSE_FIRST * (1 << times.min(10));
        self.not_before = Some(now + pause.min(PAUSE_MAX));
        Verdict::Again
    }
}

fn again(times: &mut u8, most: u8) -> Verdict {
    *times += 1;
    match *times <= most {
        true => Verdict::Again,
        false => Verdict::Over,
    }
}

/// Returns true if the response requires reading the unit's properties again.
pub fn is_change(done: &CommandDone) -> bool {
    let sense = Sense::parse(&done.sense).filter(|sense| sense.key == Sense::UNIT_ATTENTION);
    // Parameters changed, medium may have changed, microcode, INQUIRY data or reported LUNs changed.
    done.status == CHECK_CONDITION
        && sense.is_some_and(|sense| matches!(sense.code, 0x28 | 0x2a | 0x3f))
}

/// Returns true if the unit may have ended commands of this session without a response: after a reset (29h), after other
/// initiators' CLEAR TASK SET (2Fh) and PREEMPT AND ABORT (2Ah/03h, 2Ah/05h), if TAS of its Control mode page is 0 (SPC-4,
/// 7.5.8).
pub(super) fn ends_others(done: &CommandDone) -> bool {
    let sense = Sense::parse(&done.sense).filter(|sense| sense.key == Sense::UNIT_ATTENTION);
    done.status == CHECK_CONDITION
        && sense.is_some_and(|sense| {
            matches!(
                (sense.code, sense.qualifier),
                (0x29 | 0x2f, _) | (0x2a, 0x03 | 0x05)
            )
        })
}

/// Returns true if the response requires another path (SPC-5, 5.16: standby, unavailable, offline).
pub(super) fn is_other_path(done: &CommandDone) -> bool {
    let sense = Sense::parse(&done.sense).filter(|sense| sense.key == NOT_READY);
    done.status == CHECK_CONDITION
        && sense.is_some_and(|sense| {
            sense.code == 0x04 && matches!(sense.qualifier, 0x0b | 0x0c | 0x12)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(status: u8, key: u8, code: u8, qualifier: u8) -> CommandDone {
        CommandDone {
            status,
            sense: vec![0x72, key, code, qualifier, 0, 0, 0, 0],
            ..CommandDone::default()
        }
    }

    #[test]
    fn transient_errors_are_retried_and_others_final() {
        let now = Instant::now();
        let judge = |done: &CommandDone| Attempts::default().judge(done, true, now, Duration::ZERO);
        for again in [
            done(CHECK_CONDITION, 6, 0x29, 0),
            done(CHECK_CONDITION, 0x0b, 0, 0),
            done(CHECK_CONDITION, 2, 4, 1),
            done(BUSY, 0, 0, 0),
            done(TASK_SET_FULL, 0, 0, 0),
            done(TASK_ABORTED, 0, 0, 0),
        ] {
            assert_eq!(judge(&again), Verdict::Again, "{again:?}");
        }
        for over in [
            done(0, 0, 0, 0),
            done(CHECK_CONDITION, 3, 0x11, 0),
            done(CHECK_CONDITION, 2, 4, 2),
            done(CHECK_CONDITION, 5, 0x21, 0),
            done(0x18, 0, 0, 0),
        ] {
            assert_eq!(judge(&over), Verdict::Over, "{over:?}");
        }
        let mut deferred = done(CHECK_CONDITION, RECOVERED_ERROR, 0x18, 0);
        assert_eq!(judge(&deferred), Verdict::Over);
        deferred.sense[0] = 0x73;
        assert_eq!(judge(&deferred), Verdict::Again);
        // The command may have taken effect.
        let aborted = done(CHECK_CONDITION, 0x0b, 0, 0);
        let once = Attempts::default().judge(&aborted, false, now, Duration::ZERO);
        assert_eq!(once, Verdict::Over);
    }

    #[test]
    fn endless_busy_or_attention_ends_the_retries() {
        let (mut attempts, now) = (Attempts::default(), Instant::now());
        let attention = done(CHECK_CONDITION, 6, 0x29, 0);
        let tried = (0..100).take_while(|_| {
            attempts.judge(&attention, false, now, Duration::ZERO) == Verdict::Again
        });
        assert_eq!(tried.count(), 16);
        let (busy, limit) = (done(BUSY, 0, 0, 0), Duration::from_secs(10));
        let mut attempts = Attempts::default();
        assert_eq!(attempts.judge(&busy, false, now, limit), Verdict::Again);
        assert_eq!(attempts.not_before, Some(now + PAUSE_FIRST));
        assert_eq!(attempts.judge(&busy, false, now, limit), Verdict::Again);
        assert_eq!(attempts.not_before, Some(now + 2 * PAUSE_FIRST));
        assert_eq!(
            attempts.judge(&busy, false, now + limit, limit),
            Verdict::Over
        );
    }

    #[test]
    fn standby_means_another_path() {
        for qualifier in [0x0b, 0x0c, 0x12] {
            assert!(is_other_path(&done(CHECK_CONDITION, 2, 4, qualifier)));
        }
        assert!(
            !is_other_path(&done(CHECK_CONDITION, 2, 4, 0x0a)),
            "it is in transition"
        );
        assert!(!is_other_path(&done(CHECK_CONDITION, 3, 4, 0x0b)));
        assert!(!is_other_path(&done(BUSY, 2, 4, 0x0b)));
    }

    #[test]
    fn resets_and_preemptions_end_other_commands() {
        for (code, qualifier) in [(0x29, 0), (0x29, 3), (0x2f, 0), (0x2a, 3), (0x2a, 5)] {
            assert!(ends_others(&done(CHECK_CONDITION, 6, code, qualifier)));
        }
        assert!(!ends_others(&done(CHECK_CONDITION, 6, 0x2a, 9)));
        assert!(!ends_others(&done(CHECK_CONDITION, 5, 0x29, 0)));
    }

    #[test]
    fn another_size_is_a_change() {
        assert!(is_change(&done(CHECK_CONDITION, 6, 0x2a, 9)));
        assert!(is_change(&done(CHECK_CONDITION, 6, 0x3f, 0x0e)));
        assert!(!is_change(&done(CHECK_CONDITION, 6, 0x29, 7)));
        assert!(!is_change(&done(CHECK_CONDITION, 5, 0x2a, 9)));
    }
}

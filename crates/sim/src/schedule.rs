//! Schedule of a run: a list of steps that depends only on the seed and can be shrunk.

use crate::random::Random;

/// One step. Its details follow from its own number, so that removing a step changes no other step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduleStep {
    pub action: Action,
    pub detail: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A client sends requests.
    Submit,
    /// A worker runs an iteration.
    Iterate,
    /// The owners of images run their pending work.
    Own,
    /// A client polls for responses.
    Poll,
    /// The clock advances.
    Wait,
    /// One or several kinds of faults begin.
    Faults,
    /// All faults end.
    NoFaults,
    /// A connection breaks.
    Disconnect,
    /// A driver or an initiator aborts requests.
    Abort,
    /// A driver or an initiator resets a logical unit, or all that it reaches.
    Reset,
    /// A driver violates the specification.
    Misbehave,
    /// A disk's rate limit is set or removed.
    Limit,
    /// A client registers, reserves, releases or preempts.
    Reserve,
    /// A disk grows.
    Grow,
    /// A disk gets an external snapshot.
    Snapshot,
    /// A disk is mirrored to another file.
    Mirror,
    /// A disk's image is committed into its backing image.
    Commit,
    /// A disk is backed up to a file, in full or incrementally.
    BackUp,
    /// Disks are served as they are now.
    Pull,
    /// The backing image of a disk is streamed into it.
    Stream,
    /// The daemon is stopped and started again, and images get a snapshot.
    Restart,
    /// The daemon is killed after some more calls.
    Kill,
    /// The power is cut after some more calls.
    CutPower,
}

/// Frequency of each step, out of 1000.
const SHARES: [(Action, u64); 23] = [
    (Action::Submit, 303),
    (Action::Iterate, 280),
    (Action::Own, 130),
    (Action::Poll, 110),
    (Action::Wait, 70),
    (Action::Faults, 10),
    (Action::NoFaults, 14),
    (Action::Disconnect, 6),
    (Action::Abort, 20),
    (Action::Reset, 4),
    (Action::Misbehave, 3),
    (Action::Limit, 8),
    (Action::Reserve, 14),
    (Action::Grow, 5),
    (Action::Snapshot, 2),
    (Action::Mirror, 2),
    (Action::Commit, 3),
    (Action::BackUp, 3),
    (Action::Pull, 3),
    (Action::Stream, 2),
    (Action::Restart, 2),
    (Action::Kill, 3),
    (Action::CutPower, 3),
];

/// Returns the steps of a seed.
pub fn steps(seed: u64, count: usize) -> Vec<ScheduleStep> {
    let mut random = Random::new(!seed);
    let step = |_| {
        let mut drawn = random.below(1000);
        let chosen = SHARES.iter().find(|(_, share)| {
            let is_it = drawn < *share;
            drawn = drawn.saturating_sub(*share);
            is_it
        });
        ScheduleStep {
            action: chosen.map_or(Action::Iterate, |(action, _)| *action),
            detail: random.next(),
        }
    };
    (0..count).map(step).collect()
}

/// Removes steps while `fails` returns true. Calls it at most `tries` times.
pub fn shrink(
    mut steps: Vec<ScheduleStep>,
    mut tries: usize,
    mut fails: impl FnMut(&[ScheduleStep]) -> bool,
) -> Vec<ScheduleStep> {
    let mut part = steps.len() / 2;
    while part > 0 && tries > 0 {
        let mut at = 0;
        let before = steps.len();
        while at < steps.len() && tries > 0 {
            let mut fewer = steps.clone();
            fewer.drain(at..(at + part).min(steps.len()));
            tries -= 1;
            if fails(&fewer) {
                steps = fewer;
            } else {
                at += part;
            }
        }
        if part > 1 || steps.len() == before {
            part /= 2;
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shrinking_leaves_the_steps_that_are_needed() {
        let all = steps(1, 300);
        let (first, second) = (all[20], all[250]);
        let left = shrink(all, 10_000, |steps| {
            let at = |wanted: ScheduleStep| steps.iter().position(|step| *step == wanted);
            matches!((at(first), at(second)), (Some(a), Some(b)) if a < b)
        });
        assert_eq!(left, [first, second]);
    }

    #[test]
    fn shares_are_of_a_thousand() {
        let sum: u64 = SHARES.iter().map(|(_, share)| share).sum();
        assert_eq!(sum, 1000);
    }
}

//! The thread of a unit's session: takes commands from users, sends them, and logs in again after the session is lost.

use std::collections::{HashMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use block::Backoff;
use iscsi::initiator::{CommandDone, Request};
use iscsi::serial::before;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use scsi::opcode;

use super::paths;
use super::retry::{Attempts, Verdict, ends_others, is_change, is_other_path};
use super::takeovers::Takeovers;
use super::{
    CommandSink, Ended, ReconnectSettings, SharedSession, Task, UnitCommand, UnitEvent,
    UnitObserver,
};
use crate::attended::PING_AFTER;
use crate::installation::installation;
use crate::unit::{CommandError, Unit, answer};
use crate::unit_info::UnitInfo;

/// Pause before the second login attempt; it doubles.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Pause after a session without a completed command; it doubles.
const FRUITLESS_PAUSE: Duration = Duration::from_millis(20);
/// After this many lost sessions, a command in flight in each of them is regarded as the cause.
const LOSSES_MAX: u32 = 64;
/// Function complete, and task does not exist (RFC 7143, 11.6.1).
const FUNCTION_COMPLETE: u8 = 0;
const NO_SUCH_TASK: u8 = 1;

/// Maximum number of readiness checks in progress. There are several only if the unit ends or delays them.
const QUERIES_MAX: usize = 4;

/// Minimum interval between log lines about lost sessions.
const WARNINGS_APART: Duration = Duration::from_secs(1);

/// State without a session.
struct Down {
    since: Instant,
    /// Commands wait from this time on: the first loss of a session since the last response to a command.
    waiting_since: Instant,
    next_try: Instant,
    backoff: Backoff,
    /// Commands no longer wait for a session.
    is_expired: bool,
}

pub(super) struct Attendant {
    shared: Arc<SharedSession>,
    settings: ReconnectSettings,
    observer: UnitObserver,
    unit: Option<Unit>,
    route: Route,
    down: Option<Down>,
    /// Time of the first loss of a session since the last response to a command. A target that accepts logins and then answers no command
    /// is as unavailable as one that accepts none.
    outage: Option<Instant>,
    /// Unit properties last reported to users.
    info: UnitInfo,
    commands: Commands,
    reports: Reports,
    /// Time of the last completed command or readiness check.
    active: Instant,
    fruitless: FruitlessSessions,
    loss_log: LossLog,
    takeovers: Takeovers,
}

/// Paths of the sessions.
struct Route {
    /// Path of the current or last session.
    path: usize,
    /// Portal group of the current or last session.
    portal_group: Option<u16>,
    /// Path of the next attempt.
    next_path: usize,
}

/// Commands of users that have not ended.
#[derive(Default)]
struct Commands {
    waiting: VecDeque<Task>,
    /// Commands in flight by ITT.
    running: HashMap<u32, Task>,
    /// ITTs of ABORT TASK, with the ITT of the aborted command.
    aborting: HashMap<u32, u32>,
    /// ITTs of commands that the unit may have ended without a response. ABORT TASK shows whether it has them.
    doubtful: VecDeque<u32>,
}

impl Commands {
    /// Returns true if one more command of the thread itself may be sent.
    fn may_query(&self) -> bool {
        let all = self.running.values().chain(&self.waiting);
        all.filter(|task| task.sink.is_none()).count() < QUERIES_MAX
    }

    /// Returns true if the response to a command is progress for users. A readiness check says nothing about their commands.
    fn makes_progress(&self, answered: &Task) -> bool {
        let mut others = self.running.values().chain(&self.waiting);
        answered.sink.is_some() || others.all(|task| task.sink.is_none())
    }
}

/// Reports of the unit in this round.
#[derive(Default)]
struct Reports {
    /// The properties of the unit have changed.
    has_changed: bool,
    /// The unit is accessible by another path only.
    leads_nowhere: bool,
}

/// Counter of consecutive sessions without a completed command.
#[derive(Default)]
struct FruitlessSessions {
    count: u32,
    /// A command has completed in the present session.
    is_fruitful: bool,
}

impl FruitlessSessions {
    /// Counts the end of a session. Returns the pause before the next login.
    fn session_ended(&mut self) -> Duration {
        self.count = match std::mem::take(&mut self.is_fruitful) {
            true => 0,
            false => self.count + 1,
        };
        match self.count {
            0 => Duration::ZERO,
            times => (FRUITLESS_PAUSE * (1 << times.min(9))).min(PAUSE_MAX),
        }
    }
}

/// Rate limit of log lines about losses, because a target may come and go.
#[derive(Default)]
struct LossLog {
    /// Time of the last logged loss, and number of suppressed log lines since.
    logged: Option<Instant>,
    suppressed: u64,
}

impl LossLog {
    /// Returns the number of suppressed lines if a line may be logged now.
    fn pass(&mut self, now: Instant) -> Option<u64> {
        let is_early = |at: Instant| now.duration_since(at) < WARNINGS_APART;
        if self.logged.is_some_and(is_early) {
            self.suppressed += 1;
            return None;
        }
        self.logged = Some(now);
        Some(std::mem::take(&mut self.suppressed))
    }
}

impl Attendant {
    pub fn new(
        shared: Arc<SharedSession>,
        settings: ReconnectSettings,
        (mut unit, path): (Unit, usize),
        observer: UnitObserver,
    ) -> Attendant {
        Attendant {
            route: Route {
                path,
                portal_group: unit.session().portal_group(),
                next_path: path,
            },
            shared,
            settings,
            observer,
            info: unit.info().clone(),
            unit: Some(unit),
            down: None,
            outage: None,
            commands: Commands::default(),
            reports: Reports::default(),
            active: Instant::now(),
            fruitless: FruitlessSessions::default(),
            loss_log: LossLog::default(),
            takeovers: Takeovers::new(Instant::now()),
        }
    }

    pub fn run(mut self) {
        while self.take_inbox() {
            if self.unit.is_none() {
                self.reconnect();
                continue;
            }
            if let Err(error) = self.serve() {
                if self.takeovers.session_ended(&error, Instant::now()) {
                    self.warn_of_takeovers();
                }
                self.lost(&error.to_string());
            }
        }
        self.end();
    }

    /// Takes the queued requests of users. Returns false if the thread must end.
    fn take_inbox(&mut self) -> bool {
        let mut inbox = self.shared.inbox();
        let (commands, aborts) = (
            std::mem::take(&mut inbox.commands),
            std::mem::take(&mut inbox.aborts),
        );
        let stop = inbox.stop;
        drop(inbox);
        match &self.down {
            Some(down) if down.is_expired => {
                commands.into_iter().for_each(|task| task.end(Ended::Lost))
            }
            _ => self.commands.waiting.extend(commands),
        }
        for (sink, token) in aborts {
            self.abort(&sink, token);
        }
        !stop
    }

    /// Runs one round with a session: sends, waits, receives.
    fn serve(&mut self) -> Result<(), CommandError> {
        let now = Instant::now();
        self.send_waiting(now)?;
        let limit = self.next_wake(now);
        let shared = Arc::clone(&self.shared);
        shared.is_asleep.store(true, Ordering::SeqCst);
        let is_empty = {
            let inbox = shared.inbox();
            inbox.commands.is_empty() && inbox.aborts.is_empty() && !inbox.stop
        };
        let limit = if is_empty { limit } else { Duration::ZERO };
        let attended = match &mut self.unit {
            Some(unit) => unit.session().attend(shared.wake.as_fd(), limit),
            None => Ok(()),
        };
        self.clear_sleep();
        self.take_answers();
        self.take_lost();
        attended?;
        if std::mem::take(&mut self.reports.leads_nowhere) {
            let reason = "the unit is not accessible through this path".to_owned();
            return Err(answer("asymmetric access", reason));
        }
        if std::mem::take(&mut self.reports.has_changed) {
            self.refresh_unit_info()?;
        }
        Ok(())
    }

    fn clear_sleep(&self) {
        if !self.shared.is_asleep.swap(false, Ordering::SeqCst) {
            // Another thread has written the event or is about to; a leftover only causes an extra wake-up.
            rustix::io::read(&self.shared.wake, &mut [0u8; 8]).ok();
        }
    }

    fn send_waiting(&mut self, now: Instant) -> Result<(), CommandError> {
        let Some(unit) = &mut self.unit else {
            return Ok(());
        };
        let mut depth = self.settings.queue_depth;
        if now.duration_since(self.active) >= PING_AFTER && self.commands.may_query() {
            // A unit can report a change, or the end of all commands in flight, only in response to a command.
            self.active = now;
            let check = own_command(opcode::TEST_UNIT_READY);
            self.commands.waiting.push_front(check);
            depth = depth.max(self.commands.running.len() + 1);
        }
        for _ in 0..self.commands.waiting.len() {
            if self.commands.running.len() >= depth {
                break;
            }
            let Some(mut task) = self.commands.waiting.pop_front() else {
                break;
            };
            if task.attempts.not_before.is_some_and(|at| at > now) {
                self.commands.waiting.push_back(task);
                continue;
            }
            let out = std::mem::take(&mut task.command.out);
            let request = Request {
                lun: unit.lun().to_be_bytes(),
                cdb: task.command.cdb.to_vec(),
                write: (!out.is_empty()).then_some(out),
                read_length: (task.command.read > 0).then_some(task.command.read),
                ..Request::default()
            };
            match unit.session().queue(request) {
                Ok(itt) => drop(self.commands.running.insert(itt, task)),
                Err(error) => {
                    task.end(Ended::Lost);
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    /// Returns how long the thread may sleep without input.
    fn next_wake(&self, now: Instant) -> Duration {
        let due = self
            .commands
            .waiting
            .iter()
            .filter_map(|task| task.attempts.not_before);
        let next = due
            .min()
            .map_or(PING_AFTER, |at| at.saturating_duration_since(now));
        match self.commands.running.len() < self.settings.queue_depth {
            true => next.min(PING_AFTER),
            false => PING_AFTER,
        }
    }

    fn take_answers(&mut self) {
        let now = Instant::now();
        while let Some(done) = self
            .unit
            .as_mut()
            .and_then(|unit| unit.session().take_done())
        {
            if let Some(task) = self.commands.running.remove(&done.itt) {
                self.answered(task, done, now);
            }
        }
        while let Some((itt, response)) = self
            .unit
            .as_mut()
            .and_then(|unit| unit.session().take_managed())
        {
            let Some(command) = self.commands.aborting.remove(&itt) else {
                continue;
            };
            let Some(unit) = &mut self.unit else { return };
            let session = unit.session();
            // The response of a command precedes that of its ABORT TASK, unless it is sent again.
            let is_gone = match response {
                FUNCTION_COMPLETE => true,
                NO_SUCH_TASK => !session.may_send_again(),
                _ => false,
            };
            if is_gone && let Some(task) = self.commands.running.remove(&command) {
                let written = session.forget(command);
                self.ended_without_response(task, written);
            }
        }
        self.ask_for_doubtful();
    }

    /// Handles a command that the target no longer has.
    fn ended_without_response(&mut self, mut task: Task, written: Vec<u8>) {
        task.losses += 1;
        if task.is_aborted {
            task.end(Ended::Cancelled);
        } else if task.command.repeatable && task.losses < LOSSES_MAX {
            task.command.out = written;
            self.commands.waiting.push_front(task);
        } else {
            task.end(Ended::Lost);
        }
    }

    /// Sends ABORT TASK for the next command that the unit may have ended. One at a time: targets must accept only one
    /// immediate task management function (RFC 7143, 4.2.2.1).
    fn ask_for_doubtful(&mut self) {
        let Some(unit) = &mut self.unit else { return };
        let lun = unit.lun();
        while self.commands.aborting.is_empty() {
            let Some(itt) = self.commands.doubtful.pop_front() else {
                return;
            };
            // An ended session is detected by all its users; no error handling is needed here.
            if self.commands.running.contains_key(&itt)
                && let Ok(abort) = unit.session().abort(itt, lun)
            {
                self.commands.aborting.insert(abort, itt);
            }
        }
    }

    /// Handles the commands lost with a connection while the session continues: the target no longer has them.
    fn take_lost(&mut self) {
        let Some(unit) = &mut self.unit else { return };
        let session = unit.session();
        let (lost, losses) = (session.take_lost(), session.take_losses());
        for (itt, written) in lost {
            if let Some(task) = self.commands.running.remove(&itt) {
                self.ended_without_response(task, written);
            }
        }
        if losses > 0 {
            let reason = "error recovery level 2";
            self.warn(
                Instant::now(),
                "connection lost, its commands continue on another connection",
                reason,
            );
        }
    }

    fn answered(&mut self, mut task: Task, mut done: CommandDone, now: Instant) {
        self.active = now;
        if self.commands.makes_progress(&task) {
            self.fruitless.is_fruitful = true;
            self.outage = None;
        }
        self.reports.has_changed |= is_change(&done) || task.command.changes_unit();
        if ends_others(&done) {
            // The unit reports this to the first command that it begins afterwards. Older ones without a response may be gone.
            let older = self.commands.running.keys().copied();
            let older = older.filter(|itt| before(*itt, done.itt));
            self.commands.doubtful.extend(older);
        }
        let limit = self.settings.replacement_timeout;
        let verdict = match task.command.as_is {
            true => Verdict::Over,
            false => task
                .attempts
                .judge(&done, task.command.repeatable, now, limit),
        };
        let leads_nowhere = self.settings.path_count() > 1 && is_other_path(&done);
        if verdict == Verdict::Over && !leads_nowhere {
            task.end(Ended::Done(done));
        } else if task.is_aborted {
            task.end(Ended::Cancelled);
        } else {
            task.command.out = std::mem::take(&mut done.written);
            self.commands.waiting.push_back(task);
            self.reports.leads_nowhere |= leads_nowhere;
        }
    }

    fn abort(&mut self, sink: &Arc<dyn CommandSink>, token: u64) {
        let is_it = |task: &Task| {
            task.token == token && task.sink.as_ref().is_some_and(|one| Arc::ptr_eq(one, sink))
        };
        if let Some(at) = self.commands.waiting.iter().position(is_it) {
            // A command of a lost session may still be executing until a new session exists.
            if let Some(task) = self
                .commands
                .waiting
                .get_mut(at)
                .filter(|task| task.losses > 0 && self.unit.is_none())
            {
                task.is_aborted = true;
            } else if let Some(task) = self.commands.waiting.remove(at) {
                task.end(Ended::Cancelled);
            }
            return;
        }
        let running = self
            .commands
            .running
            .iter_mut()
            .find(|(_, task)| is_it(task));
        if let (Some((itt, task)), Some(unit)) = (running, &mut self.unit) {
            task.is_aborted = true;
            let (itt, lun) = (*itt, unit.lun());
            if unit.session().withdraw(itt) {
                if let Some(task) = self.commands.running.remove(&itt) {
                    task.end(Ended::Cancelled);
                }
                return;
            }
            // An ended session is detected by all its users; no error handling is needed here.
            if let Ok(abort) = unit.session().abort(itt, lun) {
                self.commands.aborting.insert(abort, itt);
            }
        }
    }

    /// Reads the properties of the unit again.
    fn refresh_unit_info(&mut self) -> Result<(), CommandError> {
        let Some(unit) = &mut self.unit else {
            return Ok(());
        };
        unit.measure_again()?;
        let has_better = self.settings.path_count() > 1 && unit.access()?.prefers_another_port();
        let info = unit.info().clone();
        let known = (&self.info, self.route.path);
        if !self.settings.is_usable((&info, self.route.path), known) {
            return Err(answer("INQUIRY", is_another(&info, &self.info)));
        }
        if info != self.info {
            let before = std::mem::replace(&mut self.info, info);
            (self.observer)(UnitEvent::Changed(&self.info));
            self.flush_new_cache(&before);
        }
        match has_better {
            true => Err(answer(
                "asymmetric access",
                "another path is better".to_owned(),
            )),
            false => Ok(()),
        }
    }

    /// Flushes a write cache that the unit has enabled.
    fn flush_new_cache(&mut self, before: &UnitInfo) {
        if self.info.gains_write_cache(before) {
            let flush = own_command(opcode::SYNCHRONIZE_CACHE_10);
            self.commands.waiting.push_front(flush);
        }
    }

    /// Ends a lost session and requeues its commands.
    fn lost(&mut self, reason: &str) {
        let now = Instant::now();
        // Includes the responses received before the loss.
        self.take_answers();
        let mut unsent = match &mut self.unit {
            Some(unit) => unit.session().take_commands().into_iter().collect(),
            None => HashMap::new(),
        };
        let wait = match &mut self.unit {
            // DefaultTime2Wait: the target needs this time to end the old tasks (RFC 7143, 13.15). On another path it has
            // none.
            Some(unit) if self.settings.path_count() == 1 => {
                unit.session().parameters().time_to_wait
            }
            _ => 0,
        };
        self.unit = None;
        self.commands.aborting.clear();
        self.commands.doubtful.clear();
        for (itt, mut task) in self.commands.running.drain() {
            task.losses += 1;
            match unsent.remove(&itt) {
                Some(out) if task.command.repeatable && task.losses < LOSSES_MAX => {
                    task.command.out = out;
                    self.commands.waiting.push_front(task);
                }
                _ => task.end(Ended::Lost),
            }
        }
        self.warn(now, "session lost, logging in again", reason);
        let pause = self.fruitless.session_ended();
        let next_try = pause.max(Duration::from_secs(wait.into()));
        self.route.next_path = (self.route.path + 1) % self.settings.path_count();
        self.shared.is_up.store(false, Ordering::Release);
        self.down = Some(Down {
            since: now,
            waiting_since: *self.outage.get_or_insert(now),
            next_try: now + next_try,
            backoff: Backoff::new(PAUSE_FIRST, PAUSE_MAX),
            is_expired: false,
        });
        (self.observer)(UnitEvent::Down { reason, next_try });
    }

    fn warn(&mut self, now: Instant, message: &str, reason: &str) {
        let Some(suppressed) = self.loss_log.pass(now) else {
            return;
        };
        let unit = self.settings.path_address(self.route.path);
        tracing::warn!(%unit, suppressed, "{message}: {reason}");
    }

    fn warn_of_takeovers(&self) {
        let unit = self.settings.path_address(self.route.path);
        let isid = self.settings.session.isid.unwrap_or_default();
        let isid: String = isid.iter().map(|byte| format!("{byte:02x}")).collect();
        let given = self.settings.session.initiator_name.clone();
        let name = given.or_else(|| Some(installation().ok()?.name.clone()));
        tracing::warn!(
            %unit,
            initiator = name.unwrap_or_default(),
            isid,
            "the target ends each session soon after its login, possibly because another host uses the same initiator name and ISID; hint: give each host its own state folder and initiator name"
        );
    }

    /// Runs one round without a session: logs in if it is time, or waits.
    fn reconnect(&mut self) {
        let now = Instant::now();
        let Some(down) = &mut self.down else {
            return;
        };
        let limit = self.settings.replacement_timeout;
        if !limit.is_zero() && !down.is_expired && now.duration_since(down.waiting_since) >= limit {
            down.is_expired = true;
            self.commands
                .waiting
                .drain(..)
                .for_each(|task| task.end(Ended::Lost));
        }
        if now < down.next_try {
            let mut wait = down.next_try - now;
            if !limit.is_zero() && !down.is_expired {
                wait = wait.min((down.waiting_since + limit).saturating_duration_since(now));
            }
            return self.sleep(wait);
        }
        match self.open_same() {
            Ok((unit, path)) => {
                self.route.path = path;
                self.back(unit);
            }
            Err(reason) => self.try_later(&reason),
        }
    }

    fn open_same(&self) -> Result<(Unit, usize), String> {
        let to_text = |error: CommandError| error.to_string();
        let (mut unit, path) =
            paths::open_better(&self.settings, self.route.next_path).map_err(to_text)?;
        let (is, was) = (unit.info(), &self.info);
        if !self.settings.is_usable((is, path), (was, self.route.path)) {
            return Err(is_another(is, was));
        }
        // A login to another portal group, for example after a redirection, does not end the old session (RFC 7143, 6.3.5).
        let same_session =
            path == self.route.path && unit.session().portal_group() == self.route.portal_group;
        if !same_session {
            paths::fence(&mut unit).map_err(to_text)?;
        }
        Ok((unit, path))
    }

    fn back(&mut self, mut unit: Unit) {
        self.route.portal_group = unit.session().portal_group();
        let waited = self
            .down
            .take()
            .map_or(Duration::ZERO, |down| down.since.elapsed());
        if self.loss_log.suppressed == 0 {
            let unit = self.settings.path_address(self.route.path);
            tracing::info!(%unit, seconds = format_args!("{:.1}", waited.as_secs_f32()), "session recovered");
        }
        let before = std::mem::replace(&mut self.info, unit.info().clone());
        self.unit = Some(unit);
        self.shared.is_up.store(true, Ordering::Release);
        self.active = Instant::now();
        self.takeovers.since = self.active;
        // The target has ended the tasks of the previous session.
        let waiting = std::mem::take(&mut self.commands.waiting);
        let (aborted, rest): (Vec<Task>, Vec<Task>) =
            waiting.into_iter().partition(|task| task.is_aborted);
        self.commands.waiting.extend(rest);
        if self.commands.waiting.is_empty() {
            // No command will show whether the target answers, so that a later loss begins another outage.
            self.outage = None;
        }
        aborted
            .into_iter()
            .for_each(|task| task.end(Ended::Cancelled));
        (self.observer)(UnitEvent::Up(&self.info));
        self.flush_new_cache(&before);
    }

    fn try_later(&mut self, reason: &str) {
        let Some(down) = &mut self.down else {
            return;
        };
        let unit = self.settings.path_address(self.route.next_path);
        tracing::debug!(%unit, "login failed: {reason}");
        self.route.next_path = (self.route.next_path + 1) % self.settings.path_count();
        // Tries every path once, then pauses.
        let has_other = self.route.next_path != (self.route.path + 1) % self.settings.path_count();
        let pause = match has_other {
            true => Duration::ZERO,
            false => down.backoff.pause(),
        };
        down.next_try = Instant::now() + pause;
        (self.observer)(UnitEvent::Down {
            reason,
            next_try: pause,
        });
    }

    /// Sleeps without a session until a user request arrives or the time has passed.
    fn sleep(&self, limit: Duration) {
        self.shared.is_asleep.store(true, Ordering::SeqCst);
        let is_empty = {
            let inbox = self.shared.inbox();
            inbox.commands.is_empty() && inbox.aborts.is_empty() && !inbox.stop
        };
        if is_empty {
            let mut wake = [PollFd::new(&self.shared.wake, PollFlags::IN)];
            // An early wake-up causes only an extra check.
            poll(&mut wake, Timespec::try_from(limit).ok().as_ref()).ok();
        }
        self.clear_sleep();
    }

    fn end(mut self) {
        let left = self
            .commands
            .waiting
            .drain(..)
            .chain(self.commands.running.drain().map(|(_, task)| task));
        left.for_each(|task| task.end(Ended::Lost));
        if let Some(mut unit) = self.unit.take() {
            unit.session().timeout = super::LOGOUT_TIMEOUT;
            // A target that does not answer detects the end of the connections.
            unit.close().ok();
        }
    }
}

fn is_another(is: &UnitInfo, was: &UnitInfo) -> String {
    let describe =
        |unit: &UnitInfo| format!("{} with blocks of {} bytes", unit.identity, unit.block_size);
    format!(
        "found another logical unit, or one without a proven identity: {}, expected {}",
        describe(is),
        describe(was)
    )
}

/// Creates a command of the thread itself, without parameters.
fn own_command(operation: u8) -> Task {
    let mut command = UnitCommand {
        repeatable: true,
        ..UnitCommand::default()
    };
    command.cdb[0] = operation;
    Task {
        sink: None,
        token: 0,
        command,
        attempts: Attempts::default(),
        losses: 0,
        is_aborted: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Ignored;

    impl CommandSink for Ignored {
        fn ended(&self, _token: u64, _ended: Ended) {}
    }

    /// A target that answers readiness checks, but no command in flight, is unavailable after `replacement_timeout`.
    #[test]
    fn readiness_checks_are_no_progress_for_commands_without_response() {
        let of_user = || Task {
            sink: Some(Arc::new(Ignored)),
            ..own_command(opcode::TEST_UNIT_READY)
        };
        let check = || own_command(opcode::TEST_UNIT_READY);
        let mut commands = Commands::default();
        assert!(commands.makes_progress(&check()));
        commands.running.insert(1, check());
        assert!(commands.makes_progress(&check()));
        commands.running.insert(2, of_user());
        assert!(!commands.makes_progress(&check()));
        assert!(commands.makes_progress(&of_user()));
        commands.running.clear();
        commands.waiting.push_back(of_user());
        assert!(!commands.makes_progress(&check()));
    }
}

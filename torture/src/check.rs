//! The invariants, judged from what was recorded. Pure: no file, no database, no clock is read here.

mod limits;

use crate::limits::{History, Limited};
use crate::record::{Begin, Line, MILLISECOND, Nanos, Outcome, SECOND, Span};
use crate::worker::{HEARTBEAT, LIMIT, LIMITED, REPEATABLE, SCRIPTED, THRESHOLD, fires_after};
use chrono::{DateTime, Utc};
use std::collections::{BTreeMap, HashMap, HashSet};

/// A worker that was cut off for this long may have been declared dead: its last heartbeat may be two intervals old.
const MAY_BE_DEAD_AFTER: Nanos = (THRESHOLD.as_millis() as u64 - 2 * HEARTBEAT.as_millis() as u64) * MILLISECOND;

/// How long a worker may need to reconnect after an outage; two outages with less than this between them count as one.
const RECONNECT: Nanos = SECOND;

/// A worker comes back to ticks for five minutes of the crontab's clock, which are 25 seconds. If the server was away for
/// about as long, ticks may be missing.
const TICKS_MAY_BE_MISSED_AFTER: Nanos = 20 * SECOND;

/// A worker adds a tick if it was ready this long before, and stays for this long after.
const READY_BEFORE_TICK: Nanos = 2 * SECOND;
const STAYS_AFTER_TICK: Nanos = 15 * SECOND;

/// How many transactions per second an idle worker may make: 2 heartbeats, 1 sweep, 1 poll, the crontab, and spare.
const IDLE_TRANSACTIONS: f64 = 20.0;

/// How much of a CPU an idle worker may use (an unoptimized build uses 1–2 %).
const IDLE_CPU: f64 = 0.10;

/// Memory may grow by this factor, and by this many bytes, before it counts as a leak.
const MEMORY_FACTOR: f64 = 1.5;
const MEMORY_BYTES: f64 = 24.0 * 1024.0 * 1024.0;

/// All that is known about a run of the torture.
#[derive(Debug, Default)]
pub(crate) struct Evidence {
    pub(crate) processes: Vec<Process>,
    /// When each slot was cut off from the server.
    pub(crate) cut_off: HashMap<usize, Vec<Span>>,
    /// When which hosts of scripts were killed, by process id.
    pub(crate) killed_hosts: HashMap<i32, Nanos>,
    /// Jobs that Node's workers held when they were killed, and how often. Freeing them refunds no attempt, as Node's
    /// worker has it.
    pub(crate) unlocked: HashMap<i64, i16>,
    /// When the server did not answer anybody.
    pub(crate) server_away: Vec<Span>,
    pub(crate) load: Load,
    pub(crate) ended: Ended,
    pub(crate) idle: Idle,
    pub(crate) cron: Option<Cron>,
}

/// The crontab's clock.
#[derive(Debug, Clone)]
pub(crate) struct Cron {
    /// When it started, in milliseconds since 1970 and as a time of the records.
    pub(crate) start: i64,
    pub(crate) started: Nanos,
    /// The first and the last moment at which ticks had to fire, on this clock.
    pub(crate) first: DateTime<Utc>,
    pub(crate) last: DateTime<Utc>,
}

/// A worker process.
#[derive(Debug, Clone, Default)]
pub(crate) struct Process {
    pub(crate) number: u32,
    pub(crate) slot: usize,
    pub(crate) pid: u32,
    pub(crate) started: Nanos,
    /// Whether it may not run jobs with the flag.
    pub(crate) forbids: bool,
    /// Seconds by which its clock is ahead.
    pub(crate) shift: i64,
    pub(crate) ended: Option<(Nanos, Ending)>,
    pub(crate) suspended: Vec<Span>,
    /// Resident memory, in bytes.
    pub(crate) memory: Vec<(Nanos, u64)>,
    pub(crate) lines: Vec<Line>,
}

impl Process {
    /// Whether a tick at this time is this worker's to add: ready before it, and not gone soon after it.
    fn is_there(&self, tick: Nanos) -> bool {
        let ready =
            self.lines.iter().any(|line| matches!(line, Line::Ready { at, .. } if *at + READY_BEFORE_TICK <= tick));
        ready && self.ended.as_ref().is_none_or(|(at, _)| *at >= tick + STAYS_AFTER_TICK)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ending {
    Killed,
    Terminated,
    /// It did not stop after SIGTERM and was killed.
    Stuck,
    /// It ended without being told to.
    ByItself(String),
}

/// What the load did.
#[derive(Debug, Default)]
pub(crate) struct Load {
    /// Jobs without a key whose add was acknowledged.
    pub(crate) jobs: Vec<AddedJob>,
    /// Events of keyed adds that were acknowledged.
    pub(crate) events: Vec<AddedEvent>,
    /// Jobs that an operator call returned as removed, completed or failed.
    pub(crate) operated: HashSet<i64>,
    /// The same for calls whose answer was lost.
    pub(crate) maybe_operated: HashSet<i64>,
    pub(crate) removed_events: HashSet<u64>,
    /// Removals by key whose answer was lost, and when the call failed.
    pub(crate) maybe_removed: Vec<(String, Nanos)>,
    pub(crate) errors: Vec<CallError>,
    pub(crate) calls: u64,
    /// Calls that failed because the server or the connection was away.
    pub(crate) outages: u64,
    /// Migrations that changed the schema.
    pub(crate) migrations: u64,
    /// Changes of limits.
    pub(crate) changes: History,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct AddedJob {
    pub(crate) id: i64,
    pub(crate) task: &'static str,
    /// A queue that one producer fills in order, and its position there.
    pub(crate) strict: Option<(String, u64)>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct AddedEvent {
    pub(crate) event: u64,
    pub(crate) key: String,
    pub(crate) job: i64,
    pub(crate) called: Nanos,
    pub(crate) acknowledged: Nanos,
}

/// An error of a driver call that is not an outage.
#[derive(Debug, Clone, Default)]
pub(crate) struct CallError {
    pub(crate) call: &'static str,
    pub(crate) code: String,
    pub(crate) message: String,
}

/// The database after the fleet has stopped.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    /// How long the drain took; `None`: it did not finish.
    pub(crate) drained: Option<Nanos>,
    /// All jobs that are in the table, as text.
    pub(crate) rows: BTreeMap<i64, String>,
    /// Those of them that should have run.
    pub(crate) left: Vec<i64>,
    pub(crate) locked: Vec<String>,
    pub(crate) dangling: Vec<String>,
    /// Limited queues that have the wrong limit.
    pub(crate) lanes: Vec<String>,
    /// The jobs that filled all limits at the end; `None` without limits, or if the fleet did not drain.
    pub(crate) probe: Option<Probe>,
}

/// Jobs that fill every limit.
#[derive(Debug)]
pub(crate) struct Probe {
    pub(crate) jobs: HashSet<i64>,
}

/// What the idle fleet did after the drain.
#[derive(Debug, Default)]
pub(crate) struct Idle {
    pub(crate) seconds: f64,
    pub(crate) transactions: i64,
    pub(crate) workers: usize,
    /// CPU seconds of each process.
    pub(crate) cpu: Vec<(u32, f64)>,
}

/// What came of one invariant.
#[derive(Debug)]
pub(crate) struct Verdict {
    pub(crate) name: &'static str,
    /// How much was checked.
    pub(crate) checked: String,
    pub(crate) violations: Vec<String>,
}

/// Judges all invariants.
pub(crate) fn check(evidence: &Evidence) -> Vec<Verdict> {
    let runs = runs(evidence);
    let outages = Outages::of(evidence);
    let mut verdicts = vec![
        every_job_ran(evidence, &runs),
        no_job_overlaps(evidence, &runs, &outages),
        no_dead_worker_begins(evidence, &runs),
        no_queue_overlaps(evidence, &runs, &outages),
        strict_queues_in_order(evidence, &runs),
        no_event_lost(evidence, &runs),
        each_tick_once(evidence, &runs),
        attempts_right(evidence, &runs),
        memory_flat(evidence),
        idle_is_idle(evidence),
        nothing_locked(evidence),
        nothing_dangling(evidence),
        driver_calls(evidence),
        processes_stay(evidence),
        limits_hold(evidence, &runs),
        flags_hold(evidence, &runs),
    ];
    verdicts.extend(limits::check(evidence, &runs, &outages));
    verdicts
}

/// One call of a handler.
#[derive(Debug, Clone)]
struct Run<'e> {
    process: &'e Process,
    begin: &'e Begin,
    end: Nanos,
    /// None: the process ended first.
    outcome: Option<Outcome>,
}

impl Run<'_> {
    fn describe(&self, zero: Nanos) -> String {
        let (begin, process) = (self.begin, self.process);
        let queue = match (&begin.queue, begin.seq, begin.queue_id) {
            (None, _, None) => String::new(),
            (_, seq, Some(id)) => format!(" (number {seq:?} in queue {id})"),
            (Some(_), seq, None) => format!(" (number {seq:?}, the row has lost its queue)"),
        };
        format!(
            "{} {}{queue} attempt {} on process {} (pid {}, {}) {}–{} {}",
            begin.task,
            begin.job,
            begin.attempt,
            process.number,
            process.pid,
            begin.worker,
            clock(begin.at, zero),
            clock(self.end, zero),
            match (&self.outcome, &process.ended) {
                (Some(outcome), _) => format!("{outcome:?}"),
                (None, _) if begin.host.is_some() => "did not end, its host may be killed".to_owned(),
                (None, Some((_, ending))) => format!("process ended: {ending:?}"),
                (None, None) => "still runs".to_owned(),
            }
        )
    }
}

/// Seconds since the first process started.
fn clock(at: Nanos, zero: Nanos) -> String {
    format!("{:.3}s", (at as f64 - zero as f64) / SECOND as f64)
}

fn zero(evidence: &Evidence) -> Nanos {
    evidence.processes.iter().map(|process| process.started).min().unwrap_or(0)
}

/// All runs in the order in which they began.
fn runs(evidence: &Evidence) -> Vec<Run<'_>> {
    let mut runs = Vec::new();
    for process in &evidence.processes {
        let ends: HashMap<u64, (Nanos, Outcome)> = process
            .lines
            .iter()
            .filter_map(|line| match line {
                Line::End { at, run, outcome } => Some((*run, (*at, *outcome))),
                _ => None,
            })
            .collect();
        for line in &process.lines {
            let Line::Begin(begin) = line else { continue };
            let end = ends.get(&begin.run);
            let process_end = process.ended.as_ref().map_or(Nanos::MAX, |(at, _)| *at);
            let host_end = begin.host.and_then(|host| evidence.killed_hosts.get(&host)).copied();
            runs.push(Run {
                process,
                begin,
                end: end.map_or(host_end.unwrap_or(process_end), |(at, _)| *at),
                outcome: end.map(|(_, outcome)| *outcome),
            });
        }
    }
    runs.sort_by_key(|run| run.begin.at);
    runs
}

/// When each process could not reach the server, or did not run at all.
struct Outages(HashMap<u32, Vec<Span>>);

impl Outages {
    fn of(evidence: &Evidence) -> Outages {
        let of_process = |process: &Process| {
            let stalls = process.lines.iter().filter_map(|line| match line {
                Line::Stalled { from, to } => Some(Span { from: *from, to: *to }),
                _ => None,
            });
            let cut_off = evidence.cut_off.get(&process.slot).into_iter().flatten().copied();
            let suspended = process.suspended.iter().copied();
            merged(suspended.chain(stalls).chain(cut_off).chain(evidence.server_away.iter().copied()).collect())
        };
        Outages(evidence.processes.iter().map(|process| (process.number, of_process(process))).collect())
    }

    /// Whether the worker of `run` may have been declared dead between the beginning of the run and `at`.
    fn may_be_dead(&self, run: &Run<'_>, at: Nanos) -> bool {
        self.0.get(&run.process.number).into_iter().flatten().any(|outage| {
            let over = outage.to + RECONNECT;
            over >= run.begin.at && over.min(at).saturating_sub(outage.from) >= MAY_BE_DEAD_AFTER
        })
    }
}

/// Joins spans with less than `RECONNECT` between them.
pub(crate) fn merged(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_by_key(|span| span.from);
    let mut merged: Vec<Span> = Vec::new();
    for span in spans {
        match merged.last_mut() {
            Some(last) if span.from <= last.to + RECONNECT => last.to = last.to.max(span.to),
            _ => merged.push(span),
        }
    }
    merged
}

fn every_job_ran(evidence: &Evidence, runs: &[Run<'_>]) -> Verdict {
    let load = &evidence.load;
    let mut best: HashMap<i64, Vec<&Run<'_>>> = HashMap::new();
    for run in runs {
        best.entry(run.begin.job).or_default().push(run);
    }
    let mut violations = Vec::new();
    for job in &load.jobs {
        if load.operated.contains(&job.id) || load.maybe_operated.contains(&job.id) {
            continue;
        }
        let its_runs = best.get(&job.id).map(Vec::as_slice).unwrap_or_default();
        let wanted = if job.task == "fatal" { Outcome::FailedForGood } else { Outcome::Ok };
        if !its_runs.iter().any(|run| run.outcome == Some(wanted)) {
            let row = evidence.ended.rows.get(&job.id).map_or("no row is left", String::as_str);
            let last = its_runs.last().map_or("it never ran".to_owned(), |run| run.describe(zero(evidence)));
            violations.push(format!("{} {}: {last}; {row}", job.task, job.id));
        }
    }
    if evidence.ended.drained.is_none() {
        violations.push(format!("the fleet did not drain; {} jobs are left", evidence.ended.left.len()));
        let rows = evidence.ended.left.iter().filter_map(|id| evidence.ended.rows.get(id));
        violations.extend(rows.take(5).cloned());
    }
    Verdict {
        name: "1 every acknowledged job ran",
        checked: format!("{} jobs, {} runs", load.jobs.len(), runs.len()),
        violations,
    }
}

/// Pairs of runs with the same key of which the second begins before the first ends, on workers that are alive.
fn overlaps<'e, K: std::hash::Hash + Eq>(
    runs: &'e [Run<'e>],
    outages: &Outages,
    key: impl Fn(&Begin) -> Option<K>,
) -> (usize, Vec<(&'e Run<'e>, &'e Run<'e>)>) {
    let mut open: HashMap<K, Vec<&Run<'_>>> = HashMap::new();
    let (mut excused, mut pairs) = (0, Vec::new());
    for run in runs {
        let Some(key) = key(run.begin) else { continue };
        let open = open.entry(key).or_default();
        open.retain(|earlier| earlier.end > run.begin.at);
        for earlier in open.iter() {
            if outages.may_be_dead(earlier, run.begin.at) {
                excused += 1;
            } else {
                pairs.push((*earlier, run));
            }
        }
        open.push(run);
    }
    (excused, pairs)
}

/// But for jobs of the repeatable task: a worker that loses a connection loses them at once, however short the fault is.
fn no_job_overlaps(evidence: &Evidence, runs: &[Run<'_>], outages: &Outages) -> Verdict {
    let (excused, mut pairs) = overlaps(runs, outages, |begin| Some(begin.job));
    let all = pairs.len();
    pairs.retain(|(first, _)| first.begin.task != REPEATABLE);
    let repeated = all - pairs.len();
    Verdict {
        name: "2a no job runs twice at once",
        checked: format!(
            "{} runs, {excused} overlaps of workers that were cut off, {repeated} of jobs of the repeatable task",
            runs.len()
        ),
        violations: pair_texts(evidence, &pairs),
    }
}

fn pair_texts(evidence: &Evidence, pairs: &[(&Run<'_>, &Run<'_>)]) -> Vec<String> {
    let zero = zero(evidence);
    pairs.iter().map(|(first, second)| format!("{} | {}", first.describe(zero), second.describe(zero))).collect()
}

/// When each worker that was declared dead was so for the first time.
fn declared_dead(processes: &[Process]) -> HashMap<&str, Nanos> {
    let mut dead: HashMap<&str, Nanos> = HashMap::new();
    for line in processes.iter().flat_map(|process| &process.lines) {
        if let Line::DeclaredDead { at, workers } = line {
            for worker in workers {
                let first = dead.entry(worker).or_insert(*at);
                *first = (*first).min(*at);
            }
        }
    }
    dead
}

/// All runs but those that 2b reports, which would only be reported again: a dead worker knows nothing of what has become
/// of the job meanwhile.
fn by_live_workers<'e>(evidence: &'e Evidence, runs: &'e [Run<'e>]) -> impl Iterator<Item = &'e Run<'e>> {
    let dead = declared_dead(&evidence.processes);
    runs.iter().filter(move |run| dead.get(run.begin.worker.as_str()).is_none_or(|declared| run.begin.at <= *declared))
}

fn no_dead_worker_begins(evidence: &Evidence, runs: &[Run<'_>]) -> Verdict {
    let dead = declared_dead(&evidence.processes);
    let zero = zero(evidence);
    let begun = runs.iter().filter_map(|run| {
        let declared = *dead.get(run.begin.worker.as_str())?;
        (run.begin.at > declared).then(|| format!("{}, declared dead at {}", run.describe(zero), clock(declared, zero)))
    });
    let violations = begun.collect();
    let checked = format!("{} workers declared dead", dead.len());
    Verdict { name: "2b no dead worker begins a job", checked, violations }
}

fn no_queue_overlaps(evidence: &Evidence, runs: &[Run<'_>], outages: &Outages) -> Verdict {
    // 12a checks the queues that run two jobs at a time.
    let serial = |begin: &Begin| begin.queue.clone().filter(|_| limits::limited(begin) != Some(Limited::Pairs));
    let (excused, pairs) = overlaps(runs, outages, serial);
    let queued = runs.iter().filter(|run| serial(run.begin).is_some()).count();
    let zero = zero(evidence);
    let violations = pairs
        .iter()
        .map(|(first, second)| {
            let queue = first.begin.queue.as_deref().unwrap_or_default();
            format!("{queue}: {} | {}", first.describe(zero), second.describe(zero))
        })
        .collect();
    Verdict {
        name: "3a a queue runs one job at a time",
        checked: format!("{queued} runs, {excused} overlaps of workers that were cut off"),
        violations,
    }
}

fn strict_queues_in_order(evidence: &Evidence, runs: &[Run<'_>]) -> Verdict {
    let mut first_run: HashMap<i64, &Run<'_>> = HashMap::new();
    for run in by_live_workers(evidence, runs) {
        first_run.entry(run.begin.job).or_insert(run);
    }
    let mut queues: BTreeMap<&str, Vec<(u64, &Run<'_>)>> = BTreeMap::new();
    for job in &evidence.load.jobs {
        if let (Some((queue, seq)), Some(run)) = (&job.strict, first_run.get(&job.id)) {
            queues.entry(queue).or_default().push((*seq, run));
        }
    }
    let zero = zero(evidence);
    let (mut checked, mut recovered, mut violations) = (0, 0, Vec::new());
    for (queue, mut jobs) in queues {
        jobs.sort_by_key(|(seq, _)| *seq);
        // From the end: each must have begun before all that come after it in the queue.
        let mut earliest: Option<(u64, &Run<'_>)> = None;
        for (seq, run) in jobs.into_iter().rev() {
            if run.begin.last_error.is_some() {
                // Its worker died before it could begin. Recovery puts it at the end.
                recovered += 1;
                continue;
            }
            checked += 1;
            match earliest {
                Some((later, overtook)) if overtook.begin.at < run.begin.at => violations.push(format!(
                    "{queue}: {later} before {seq}: {} | {}",
                    overtook.describe(zero),
                    run.describe(zero)
                )),
                _ => earliest = Some((seq, run)),
            }
        }
    }
    violations.reverse();
    Verdict {
        name: "3b strict queues run in order",
        checked: format!("{checked} jobs, {recovered} recovered before they began"),
        violations,
    }
}

fn no_event_lost(evidence: &Evidence, runs: &[Run<'_>]) -> Verdict {
    let load = &evidence.load;
    let seen: HashSet<u64> = runs.iter().flat_map(|run| run.begin.events.iter().copied()).collect();
    let zero = zero(evidence);
    let mut excused = 0;
    let mut lost: BTreeMap<i64, Vec<&AddedEvent>> = BTreeMap::new();
    for added in &load.events {
        if seen.contains(&added.event) {
            continue;
        }
        let maybe_removed = load.maybe_removed.iter().any(|(key, at)| *key == added.key && added.called < *at);
        // Freed before it began: the keyed add took it for a running job, as Node's worker has it.
        let unlocked = evidence.unlocked.contains_key(&added.job);
        if load.removed_events.contains(&added.event) || maybe_removed || unlocked {
            excused += 1;
        } else {
            lost.entry(added.job).or_default().push(added);
        }
    }
    let violations = lost
        .iter()
        .map(|(job, events)| {
            let row = evidence.ended.rows.get(job).map_or("no row is left", String::as_str);
            let ran = if runs.iter().any(|run| run.begin.job == *job) {
                "the job ran without them"
            } else {
                "the job never ran"
            };
            let numbers: Vec<u64> = events.iter().map(|added| added.event).collect();
            let (key, last) = (&events[0].key, events.iter().map(|added| added.acknowledged).max().unwrap_or(0));
            format!(
                "job {job}, key {key}, events {numbers:?}, last acknowledged at {}: {ran}; {row}",
                clock(last, zero)
            )
        })
        .collect();
    let events = lost.values().map(Vec::len).sum::<usize>();
    let checked = format!("{} events, {excused} removed, {events} lost", load.events.len());
    Verdict { name: "4 no keyed event lost", checked, violations }
}

fn each_tick_once(evidence: &Evidence, runs: &[Run<'_>]) -> Verdict {
    let mut ticks: BTreeMap<DateTime<Utc>, HashSet<i64>> = BTreeMap::new();
    for run in runs {
        if let Some(tick) = run.begin.tick {
            ticks.entry(tick).or_default().insert(run.begin.job);
        }
    }
    let mut violations: Vec<String> = ticks
        .iter()
        .filter(|(_, jobs)| jobs.len() > 1)
        .map(|(tick, jobs)| format!("tick {tick} was added {} times: jobs {jobs:?}", jobs.len()))
        .collect();
    let long_away =
        merged(evidence.server_away.clone()).iter().any(|away| away.to - away.from > TICKS_MAY_BE_MISSED_AFTER);
    let mut excused = 0;
    if let Some(cron) = evidence.cron.as_ref().filter(|_| !long_away) {
        let minute = chrono::TimeDelta::minutes(1);
        let first = cron.first.timestamp().div_euclid(60) * 60;
        let mut tick = DateTime::from_timestamp(first, 0).unwrap_or(cron.first) + minute;
        while tick <= cron.last {
            let fires = cron.started + fires_after(cron.start, tick).as_nanos() as Nanos;
            if ticks.contains_key(&tick) {
            } else if !evidence.processes.iter().any(|process| process.is_there(fires)) {
                excused += 1;
            } else {
                violations.push(format!("tick {tick} never fired (the first was {:?})", ticks.keys().next()));
            }
            tick += minute;
        }
    }
    let checked = format!("{} ticks, {excused} more while all workers were restarted", ticks.len());
    Verdict { name: "5 each cron tick once", checked, violations }
}

fn attempts_right(evidence: &Evidence, runs: &[Run<'_>]) -> Verdict {
    let mut history: HashMap<i64, (i16, i16)> = HashMap::new();
    let zero = zero(evidence);
    let (mut checked, mut violations) = (0, Vec::new());
    for run in by_live_workers(evidence, runs) {
        let begin = run.begin;
        // A keyed add resets the attempts; a script whose host was killed has failed and could not write that down.
        if begin.task == "keyed" || begin.task == SCRIPTED {
            continue;
        }
        checked += 1;
        let (failed, highest) = history.entry(begin.job).or_insert((0, 0));
        let error = begin.last_error.as_deref().unwrap_or_default();
        // A job whose workers keep dying is charged on purpose.
        let quarantined = error.contains("has died");
        let unlocked = evidence.unlocked.get(&begin.job).copied().unwrap_or(0);
        if begin.attempt < 1 || (begin.attempt > *failed + 1 + unlocked && !quarantined) {
            violations.push(format!("attempt {} after {failed} failures: {}", begin.attempt, run.describe(zero)));
        }
        if error.contains("meant to fail") && begin.attempt <= *highest {
            violations.push(format!("attempt {} again after it failed: {}", begin.attempt, run.describe(zero)));
        }
        *highest = (*highest).max(begin.attempt);
        if quarantined {
            *failed = (*failed).max(begin.attempt);
        }
        if run.outcome == Some(Outcome::Failed) {
            *failed += 1;
        }
    }
    Verdict { name: "6 attempts are counted right", checked: format!("{checked} runs"), violations }
}

fn memory_flat(evidence: &Evidence) -> Verdict {
    let (mut checked, mut most, mut violations) = (0, 0_u64, Vec::new());
    for process in &evidence.processes {
        most = process.memory.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0).max(most);
        // The first quarter is the start; fewer samples say nothing.
        let quarter = process.memory.len() / 4;
        if quarter < 8 {
            continue;
        }
        checked += 1;
        let mean = |samples: &[(Nanos, u64)]| {
            samples.iter().map(|(_, bytes)| *bytes as f64).sum::<f64>() / samples.len() as f64
        };
        let (before, after) = (mean(&process.memory[quarter..2 * quarter]), mean(&process.memory[3 * quarter..]));
        if after > before * MEMORY_FACTOR && after - before > MEMORY_BYTES {
            let megabytes = |bytes: f64| bytes / 1024.0 / 1024.0;
            violations.push(format!(
                "process {} (pid {}) grew from {:.0} MB to {:.0} MB",
                process.number,
                process.pid,
                megabytes(before),
                megabytes(after)
            ));
        }
    }
    let checked = format!("{checked} processes that lived long enough, at most {} MB", most / 1024 / 1024);
    Verdict { name: "7a memory stays flat", checked, violations }
}

fn idle_is_idle(evidence: &Evidence) -> Verdict {
    let idle = &evidence.idle;
    let rate = idle.transactions as f64 / idle.seconds.max(0.001) / idle.workers.max(1) as f64;
    let mut violations = Vec::new();
    if rate > IDLE_TRANSACTIONS {
        violations.push(format!("{rate:.1} transactions per second and worker, expected at most {IDLE_TRANSACTIONS}"));
    }
    for (process, seconds) in &idle.cpu {
        let share = seconds / idle.seconds.max(0.001);
        if share > IDLE_CPU {
            violations.push(format!("idle process {process} used {:.0} % of a CPU", share * 100.0));
        }
    }
    let cpu: f64 = idle.cpu.iter().map(|(_, seconds)| seconds).sum::<f64>() / idle.seconds.max(0.001);
    let checked = format!("{rate:.1} transactions per second and worker, {:.1} % CPU in all", cpu * 100.0);
    Verdict { name: "7b an idle fleet is idle", checked, violations }
}

fn nothing_locked(evidence: &Evidence) -> Verdict {
    Verdict {
        name: "8 nothing stays locked",
        checked: "jobs and queues".to_owned(),
        violations: evidence.ended.locked.clone(),
    }
}

fn nothing_dangling(evidence: &Evidence) -> Verdict {
    let violations = evidence.ended.dangling.clone();
    Verdict { name: "9a tasks and queues of all jobs exist", checked: "jobs that are left".to_owned(), violations }
}

fn driver_calls(evidence: &Evidence) -> Verdict {
    let load = &evidence.load;
    let mut kinds: BTreeMap<(&str, &str), (usize, &str)> = BTreeMap::new();
    for error in &load.errors {
        kinds.entry((error.call, &error.code)).or_insert((0, &error.message)).0 += 1;
    }
    let violations = kinds
        .iter()
        .map(|((call, code), (times, message))| format!("{call}: {code} {times} times: {message}"))
        .collect();
    let (calls, outages, migrations) = (load.calls, load.outages, load.migrations);
    let checked = format!("{calls} calls, {outages} of them failed in an outage, {migrations} migrations");
    Verdict { name: "9b driver calls do not fail", checked, violations }
}

fn processes_stay(evidence: &Evidence) -> Verdict {
    let zero = zero(evidence);
    let violations = evidence
        .processes
        .iter()
        .filter_map(|process| match &process.ended {
            Some((at, Ending::ByItself(status))) => {
                Some(format!("process {} ended by itself at {}: {status}", process.number, clock(*at, zero)))
            }
            Some((at, Ending::Stuck)) => {
                Some(format!("process {} did not stop after SIGTERM, killed at {}", process.number, clock(*at, zero)))
            }
            _ => None,
        })
        .collect();
    Verdict {
        name: "10 workers stay and stop when told",
        checked: format!("{} processes", evidence.processes.len()),
        violations,
    }
}

/// No process runs more jobs of the limited task at once than it may. An outage excuses nothing: the worker itself counts.
fn limits_hold(evidence: &Evidence, runs: &[Run<'_>]) -> Verdict {
    let mut open: HashMap<u32, Vec<&Run<'_>>> = HashMap::new();
    let (mut checked, mut most, mut violations) = (0, 0, Vec::new());
    for run in runs.iter().filter(|run| run.begin.task == LIMITED) {
        checked += 1;
        let open = open.entry(run.process.number).or_default();
        open.retain(|earlier| earlier.end > run.begin.at);
        open.push(run);
        most = most.max(open.len());
        if open.len() > LIMIT {
            let texts: Vec<String> = open.iter().map(|run| run.describe(zero(evidence))).collect();
            violations.push(format!("{} at once: {}", open.len(), texts.join(" | ")));
        }
    }
    let checked = format!("{checked} runs, at most {most} of {LIMIT} at once");
    Verdict { name: "11a a limited task keeps its limit", checked, violations }
}

fn flags_hold(evidence: &Evidence, runs: &[Run<'_>]) -> Verdict {
    let flagged = || runs.iter().filter(|run| run.begin.flag.is_some());
    let violations =
        flagged().filter(|run| run.process.forbids).map(|run| run.describe(zero(evidence))).collect::<Vec<_>>();
    let forbidding = evidence.processes.iter().filter(|process| process.forbids).count();
    let checked = format!("{} runs with a flag, {forbidding} processes that forbid it", flagged().count());
    Verdict { name: "11b forbidden flags do not run", checked, violations }
}

/// How many processes ran with a shifted clock, and which should have but did not. This is about the torture, not about
/// the workers.
pub(crate) fn shifted_clocks(evidence: &Evidence) -> (usize, Vec<u32>) {
    let Some(cron) = &evidence.cron else { return (0, Vec::new()) };
    let (mut shifted, mut failed) = (0, Vec::new());
    for process in evidence.processes.iter().filter(|process| process.shift != 0) {
        for line in &process.lines {
            let Line::Ready { at, clock } = line else { continue };
            let elapsed = i64::try_from(at.saturating_sub(cron.started) / SECOND).unwrap_or(0);
            if (cron.start / 1000 + elapsed + process.shift - clock).abs() < 30 {
                shifted += 1;
            } else {
                failed.push(process.number);
            }
        }
    }
    (shifted, failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) const S: Nanos = SECOND;

    pub(super) fn begin(at: Nanos, run: u64, job: i64) -> Begin {
        Begin { at, run, job, attempt: 1, worker: "w".to_owned(), task: "plain".to_owned(), ..Begin::default() }
    }

    pub(super) fn end(at: Nanos, run: u64) -> Line {
        Line::End { at, run, outcome: Outcome::Ok }
    }

    pub(super) fn process(number: u32, lines: Vec<Line>) -> Process {
        Process { number, slot: number as usize, lines, ..Process::default() }
    }

    pub(super) fn evidence(processes: Vec<Process>) -> Evidence {
        let ended = Ended { drained: Some(0), ..Ended::default() };
        Evidence { processes, ended, ..Evidence::default() }
    }

    pub(super) fn violations(evidence: &Evidence, name: &str) -> Vec<String> {
        let verdicts = check(evidence);
        let verdict = verdicts.into_iter().find(|verdict| verdict.name.starts_with(name));
        verdict.expect("an invariant with this number").violations
    }

    /// Job 1 runs on process 1 from 10 s to 20 s, and on process 2 from 15 s to 16 s.
    fn two_at_once() -> Evidence {
        evidence(vec![
            process(1, vec![Line::Begin(begin(10 * S, 0, 1)), end(20 * S, 0)]),
            process(2, vec![Line::Begin(begin(15 * S, 0, 1)), end(16 * S, 0)]),
        ])
    }

    #[test]
    fn two_runs_of_a_job_at_once_are_a_violation() {
        assert_eq!(violations(&two_at_once(), "2a").len(), 1);
    }

    #[test]
    fn jobs_of_the_repeatable_task_may_overlap() {
        let mut evidence = two_at_once();
        for line in evidence.processes.iter_mut().flat_map(|process| &mut process.lines) {
            if let Line::Begin(begin) = line {
                begin.task = REPEATABLE.to_owned();
            }
        }
        assert_eq!(violations(&evidence, "2a").len(), 0);
    }

    #[test]
    fn a_run_ends_when_its_process_is_killed() {
        let mut evidence = two_at_once();
        evidence.processes[0].lines.pop();
        assert_eq!(violations(&evidence, "2a").len(), 1);
        evidence.processes[0].ended = Some((12 * S, Ending::Killed));
        assert_eq!(violations(&evidence, "2a").len(), 0);
    }

    #[test]
    fn a_worker_that_was_suspended_beyond_the_threshold_may_overlap() {
        let mut evidence = two_at_once();
        evidence.processes[0].suspended.push(Span { from: 10 * S + 1, to: 11 * S });
        assert_eq!(violations(&evidence, "2a").len(), 1, "one second is too short");
        evidence.processes[0].suspended.push(Span { from: 11 * S, to: 18 * S });
        assert_eq!(violations(&evidence, "2a").len(), 0);
    }

    #[test]
    fn an_outage_that_began_just_before_the_overlap_does_not_excuse_it() {
        let mut evidence = two_at_once();
        evidence.cut_off.insert(1, vec![Span { from: 14 * S, to: 19 * S }]);
        assert_eq!(violations(&evidence, "2a").len(), 1);
        evidence.cut_off.insert(1, vec![Span { from: 11 * S, to: 19 * S }]);
        assert_eq!(violations(&evidence, "2a").len(), 0);
    }

    #[test]
    fn the_worker_that_was_not_cut_off_excuses_nothing() {
        let mut evidence = two_at_once();
        evidence.cut_off.insert(2, vec![Span { from: 5 * S, to: 19 * S }]);
        assert_eq!(violations(&evidence, "2a").len(), 1);
    }

    #[test]
    fn an_outage_of_the_server_excuses_all_workers() {
        let mut evidence = two_at_once();
        evidence.server_away.push(Span { from: 10 * S, to: 14 * S });
        assert_eq!(violations(&evidence, "2a").len(), 0);
    }

    #[test]
    fn a_worker_that_begins_a_job_after_it_was_declared_dead_is_found() {
        let declared = Line::DeclaredDead { at: 14 * S, workers: vec!["w".to_owned()] };
        let mut evidence =
            evidence(vec![process(1, vec![Line::Begin(begin(10 * S, 0, 1))]), process(2, vec![declared])]);
        assert_eq!(violations(&evidence, "2b").len(), 0);
        evidence.processes[0].lines.push(Line::Begin(begin(15 * S, 1, 2)));
        assert_eq!(violations(&evidence, "2b").len(), 1);
    }

    #[test]
    fn a_job_must_run_to_its_end_or_be_accounted_for() {
        let mut evidence =
            evidence(vec![process(1, vec![Line::Begin(begin(1, 0, 1)), end(2, 0), Line::Begin(begin(3, 1, 2))])]);
        for id in 1..=3 {
            evidence.load.jobs.push(AddedJob { id, task: "plain", strict: None });
        }
        assert_eq!(violations(&evidence, "1 ").len(), 2, "2 did not end, 3 never began");
        evidence.load.operated.insert(2);
        evidence.load.maybe_operated.insert(3);
        assert_eq!(violations(&evidence, "1 ").len(), 0);
    }

    /// Jobs 1 to 3 of a strict queue, which begin at these times.
    fn queue(times: [Nanos; 3]) -> Evidence {
        let lines = times.into_iter().enumerate().flat_map(|(index, at)| {
            let number = index as u64 + 1;
            let begin = Begin { queue: Some("q".to_owned()), seq: Some(number), ..begin(at, number, index as i64 + 1) };
            [Line::Begin(begin), end(at + 1, number)]
        });
        let mut evidence = evidence(vec![process(1, lines.collect())]);
        for number in 1..=3 {
            let strict = Some(("q".to_owned(), number));
            evidence.load.jobs.push(AddedJob { id: number as i64, task: "queued", strict });
        }
        evidence
    }

    #[test]
    fn a_strict_queue_runs_in_order() {
        assert_eq!(violations(&queue([10, 20, 30]), "3b").len(), 0);
        assert_eq!(violations(&queue([20, 10, 30]), "3b").len(), 1);
        assert_eq!(violations(&queue([30, 10, 20]), "3b").len(), 1);
    }

    #[test]
    fn a_job_that_was_recovered_before_it_began_may_come_later() {
        let mut evidence = queue([30, 10, 20]);
        for line in &mut evidence.processes[0].lines {
            if let Line::Begin(begin) = line
                && begin.job == 1
            {
                begin.last_error = Some("Job recovered after worker interruption".to_owned());
            }
        }
        assert_eq!(violations(&evidence, "3b").len(), 0);
    }

    #[test]
    fn two_jobs_of_a_queue_at_once_are_a_violation() {
        let mut evidence = queue([10, 20, 30]);
        assert_eq!(violations(&evidence, "3a").len(), 0);
        evidence.processes[0].lines.retain(|line| !matches!(line, Line::End { run: 1, .. }));
        evidence.processes[0].lines.push(end(25, 1));
        assert_eq!(violations(&evidence, "3a").len(), 1);
    }

    #[test]
    fn an_event_must_be_in_some_run_unless_it_was_removed() {
        let begin = Begin { events: vec![1, 2], task: "keyed".to_owned(), ..begin(5, 0, 1) };
        let mut evidence = evidence(vec![process(1, vec![Line::Begin(begin)])]);
        for event in 1..=5 {
            let added = AddedEvent { event, key: format!("k{event}"), job: event as i64, called: 10, acknowledged: 11 };
            evidence.load.events.push(added);
        }
        assert_eq!(violations(&evidence, "4").len(), 3);
        evidence.load.removed_events.insert(3);
        evidence.load.maybe_removed.push(("k4".to_owned(), 20));
        evidence.load.maybe_removed.push(("k5".to_owned(), 9));
        let left = violations(&evidence, "4");
        assert_eq!(left.len(), 1, "event 5 was added after the removal: {left:?}");
    }

    #[test]
    fn ticks_are_neither_doubled_nor_missed() {
        let time = |minute: u32| format!("2026-01-01T00:{minute:02}:00Z").parse::<DateTime<Utc>>().unwrap();
        let tick =
            |run: u64, minute: u32| Line::Begin(Begin { tick: Some(time(minute)), ..begin(run, run, run as i64) });
        let lines = vec![Line::Ready { at: 0, clock: 0 }, tick(1, 1), tick(2, 2), tick(3, 4)];
        let mut evidence = evidence(vec![process(1, lines)]);
        // The clock starts a day before it is started: minute 1 is 5 seconds later.
        let start = (time(0) + chrono::TimeDelta::days(1)).timestamp_millis();
        evidence.cron = Some(Cron { start, started: 0, first: time(0), last: time(4) });
        assert_eq!(violations(&evidence, "5").len(), 1, "minute 3 is missing");
        evidence.processes[0].ended = Some((16 * S, Ending::Killed));
        assert_eq!(violations(&evidence, "5").len(), 0, "no worker was there for the whole time");
        evidence.processes[0].lines.extend([tick(4, 3), tick(5, 2)]);
        assert_eq!(violations(&evidence, "5").len(), 1, "minute 2 is there twice");
    }

    #[test]
    fn attempts_count_failures_only() {
        let run = |number: u64, attempt: i16, error: Option<&str>| {
            let last_error = error.map(str::to_owned);
            Line::Begin(Begin { attempt, last_error, task: "failing".to_owned(), ..begin(number * 10, number, 1) })
        };
        let failed = |number: u64| Line::End { at: number * 10 + 1, run: number, outcome: Outcome::Failed };
        let fine = vec![
            run(1, 1, None),
            failed(1),
            run(2, 2, Some("this attempt is meant to fail")),
            run(3, 2, Some("Job recovered after worker interruption")),
        ];
        assert_eq!(violations(&evidence(vec![process(1, fine)]), "6").len(), 0);
        let not_refunded = vec![run(1, 1, None), run(2, 2, Some("Job recovered after worker interruption"))];
        assert_eq!(violations(&evidence(vec![process(1, not_refunded)]), "6").len(), 1);
        let not_charged = vec![run(1, 1, None), failed(1), run(2, 1, Some("this attempt is meant to fail"))];
        assert_eq!(violations(&evidence(vec![process(1, not_charged)]), "6").len(), 1);
    }

    #[test]
    fn memory_that_doubles_is_a_violation() {
        let megabyte = 1024 * 1024;
        let mut grows = process(1, Vec::new());
        grows.memory = (0..80).map(|second| (second * S, (20 + second) * megabyte)).collect();
        assert_eq!(violations(&evidence(vec![grows.clone()]), "7a").len(), 1);
        grows.memory = (0..80).map(|second| (second * S, 40 * megabyte)).collect();
        assert_eq!(violations(&evidence(vec![grows]), "7a").len(), 0);
    }

    #[test]
    fn a_process_runs_no_more_of_a_limited_task_than_its_limit() {
        let limited =
            |run: u64, at: Nanos| Line::Begin(Begin { task: LIMITED.to_owned(), ..begin(at, run, run as i64) });
        let lines = vec![limited(1, 10), limited(2, 11), end(20, 1), end(20, 2), limited(3, 20), end(30, 3)];
        let other = process(2, vec![limited(1, 12), end(13, 1)]);
        let mut evidence = evidence(vec![process(1, lines), other]);
        assert_eq!(violations(&evidence, "11a").len(), 0);
        evidence.processes[0].lines.push(limited(4, 15));
        assert_eq!(violations(&evidence, "11a").len(), 1, "three at once at 15");
    }

    #[test]
    fn a_flagged_job_runs_only_where_its_flag_is_allowed() {
        let flagged = Line::Begin(Begin { flag: Some("heavy".to_owned()), ..begin(10, 0, 1) });
        let plain = Line::Begin(begin(10, 0, 2));
        let mut evidence = evidence(vec![process(1, vec![flagged]), process(2, vec![plain])]);
        evidence.processes[1].forbids = true;
        assert_eq!(violations(&evidence, "11b").len(), 0);
        evidence.processes[0].forbids = true;
        assert_eq!(violations(&evidence, "11b").len(), 1);
    }

    #[test]
    fn a_job_that_was_freed_from_a_killed_node_worker_has_paid_an_attempt() {
        let second = Begin { attempt: 2, ..begin(20, 1, 1) };
        let lines = vec![Line::Begin(begin(10, 0, 1)), Line::Begin(second)];
        let mut evidence = evidence(vec![process(1, lines)]);
        assert_eq!(violations(&evidence, "6").len(), 1);
        evidence.unlocked.insert(1, 1);
        assert_eq!(violations(&evidence, "6").len(), 0);
    }

    #[test]
    fn a_clock_that_should_be_shifted_and_is_not_is_found() {
        let ready = |clock: i64| vec![Line::Ready { at: 10 * S, clock }];
        let mut evidence = evidence(vec![process(1, ready(5000 + 3610)), process(2, ready(5010))]);
        let (first, last) = (DateTime::UNIX_EPOCH, DateTime::UNIX_EPOCH);
        evidence.cron = Some(Cron { start: 5_000_000, started: 0, first, last });
        assert_eq!(shifted_clocks(&evidence), (0, Vec::new()));
        evidence.processes[0].shift = 3600;
        evidence.processes[1].shift = 3600;
        assert_eq!(shifted_clocks(&evidence), (1, vec![2]));
    }

    #[test]
    fn a_process_that_ends_by_itself_is_a_violation() {
        let mut ended = process(1, Vec::new());
        ended.ended = Some((5, Ending::ByItself("exit status: 1".to_owned())));
        assert_eq!(violations(&evidence(vec![ended]), "10").len(), 1);
    }
}

//! The invariants of limits across all workers. They use what the tasks recorded: when each run began and ended, and when its
//! job was claimed.
//!
//! A change applies to every claim after its commit. So a run is judged by the limits that may have been in force between the
//! claim of its job and its start: a job that was claimed before a limit was lowered may still start.

use super::{Evidence, Outages, Run, Verdict, by_live_workers, zero};
use crate::limits::{Limited, State, Until};
use crate::record::{Begin, MILLISECOND, Nanos};
use std::collections::{BTreeMap, HashMap};

/// Waiting jobs come under a new limit within this time. A worker moves them every two seconds, and locks may delay it.
const MOVED_WITHIN_MICROS: i64 = 10_000_000;

/// A claim computes in microseconds, and rounds.
const ROUNDING_MICROS: i64 = 10;

pub(super) fn check(evidence: &Evidence, runs: &[Run<'_>], outages: &Outages) -> Vec<Verdict> {
    vec![
        concurrency_holds(evidence, runs, outages),
        rates_hold(evidence, runs),
        pauses_hold(evidence, runs),
        jobs_come_under_limits(evidence, runs),
        no_slot_is_lost(evidence, runs),
    ]
}

pub(super) fn limited(begin: &Begin) -> Option<Limited> {
    Limited::of_job(&begin.task, begin.queue.as_deref())
}

/// Whether the job was under a limit when it was claimed, as its row says.
fn is_in_lane(begin: &Begin) -> bool {
    begin.queue_id.is_some_and(|id| id < 0)
}

/// A set of runs that share a limit and are counted together.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Scope {
    Task(Limited),
    Queue(String),
    Group,
}

/// The scopes in which a run counts, and how much it counts. A run outside a lane counts only in its queue: the lane begins when
/// no job of the queue runs.
fn scopes(begin: &Begin) -> Vec<(Scope, u32)> {
    let Some(limited) = limited(begin) else { return Vec::new() };
    let mut scopes = Vec::new();
    if limited == Limited::Pairs {
        scopes.extend(begin.queue.clone().map(|queue| (Scope::Queue(queue), 1)));
    }
    if is_in_lane(begin) && limited == Limited::Capped {
        scopes.push((Scope::Task(limited), 1));
    }
    if is_in_lane(begin) && limited.is_in_group() {
        scopes.push((Scope::Group, limited.cost()));
    }
    scopes
}

/// How many jobs may run at once in the scope when this run begins; `None` for any number.
fn allowed(evidence: &Evidence, scope: &Scope, begin: &Begin) -> Option<u32> {
    let history = &evidence.load.changes;
    let from = begin.claimed?;
    let possible = |limited| history.possible(limited, from, Until::Record(begin.at));
    let highest = |states: Vec<&State>| {
        states.iter().map(|state| state.concurrency).collect::<Option<Vec<u32>>>()?.into_iter().max()
    };
    match scope {
        Scope::Task(limited) => highest(possible(*limited)),
        // Without a limit, and under one without a concurrency, a queue is serial.
        Scope::Queue(_) => possible(Limited::Pairs).iter().map(|state| state.concurrency.unwrap_or(1)).max(),
        // A job that starts while its queue is in no group counts in the group later.
        Scope::Group => {
            let members = [Limited::Pairs, Limited::Rows];
            let all_are_set = members.iter().all(|member| possible(*member).iter().all(|state| state.is_set));
            if all_are_set { highest(possible(Limited::Group)) } else { None }
        }
    }
}

fn concurrency_holds(evidence: &Evidence, runs: &[Run<'_>], outages: &Outages) -> Verdict {
    let live: Vec<*const Begin> = by_live_workers(evidence, runs).map(|run| run.begin as *const Begin).collect();
    let live: std::collections::HashSet<*const Begin> = live.into_iter().collect();
    let mut open: HashMap<Scope, Vec<(&Run<'_>, u32)>> = HashMap::new();
    let (mut checked, mut full, mut violations) = (0, 0, Vec::new());
    for run in runs {
        for (scope, cost) in scopes(run.begin) {
            let open = open.entry(scope.clone()).or_default();
            open.retain(|(earlier, _)| earlier.end > run.begin.at);
            let allowed = allowed(evidence, &scope, run.begin);
            open.push((run, cost));
            let (Some(allowed), true) = (allowed, live.contains(&std::ptr::from_ref(run.begin))) else { continue };
            checked += 1;
            let counted = open
                .iter()
                .filter(|(earlier, _)| std::ptr::eq(*earlier, run) || !outages.may_be_dead(earlier, run.begin.at));
            let counted: Vec<&(&Run<'_>, u32)> = counted.collect();
            let in_use: u32 = counted.iter().map(|(_, cost)| cost).sum();
            full += usize::from(in_use == allowed);
            if in_use > allowed {
                let texts: Vec<String> = counted.iter().map(|(run, _)| run.describe(zero(evidence))).collect();
                violations.push(format!("{scope:?}: {in_use} at once of {allowed}: {}", texts.join(" | ")));
            }
        }
    }
    let changes = evidence.load.changes.0.iter().filter(|change| change.acknowledged.is_some()).count();
    Verdict {
        name: "12a limits of concurrency hold",
        checked: format!("{checked} runs, {full} of them took the last slot, {changes} changes"),
        violations,
    }
}

/// Every period has at most rate plus burst claims, by the database's clock. Checks only periods in which the rate did not change.
fn rates_hold(evidence: &Evidence, runs: &[Run<'_>]) -> Verdict {
    let metered = runs.iter().filter(|run| limited(run.begin) == Some(Limited::Metered) && is_in_lane(run.begin));
    let mut claims: Vec<(i64, &Run<'_>)> = metered.filter_map(|run| Some((run.begin.claimed?, run))).collect();
    claims.sort_by_key(|(claimed, _)| *claimed);
    let (mut checked, mut fullest, mut violations) = (0, 0, Vec::new());
    for (at, (from, first)) in claims.iter().enumerate() {
        let history = &evidence.load.changes;
        let rate = history.certain(Limited::Metered, *from, *from).and_then(|state| state.rate);
        let Some(rate) = rate else { continue };
        let until = from + i64::try_from(rate.per_ms).unwrap_or(0) * 1000 - ROUNDING_MICROS;
        if history.certain(Limited::Metered, *from, until).is_none() {
            continue;
        }
        checked += 1;
        let count = claims[at..].iter().take_while(|(claimed, _)| *claimed < until).count();
        let most = (rate.jobs + rate.burst) as usize;
        fullest = fullest.max(count * 100 / most);
        if count > most {
            let first = first.describe(zero(evidence));
            violations.push(format!("{count} starts in {} ms, at most {most} are allowed, from {first}", rate.per_ms));
        }
    }
    let checked = format!("{} starts, {checked} periods without a change, the fullest {fullest} %", claims.len());
    Verdict { name: "12b rates hold", checked, violations }
}

/// No job is claimed while its limit is paused. A worker releases the jobs that it claimed before as soon as it reads the pause.
fn pauses_hold(evidence: &Evidence, runs: &[Run<'_>]) -> Verdict {
    let history = &evidence.load.changes;
    let (mut earlier, mut violations) = (0, Vec::new());
    for run in runs.iter().filter(|run| is_in_lane(run.begin)) {
        let (Some(limited), Some(claimed)) = (limited(run.begin), run.begin.claimed) else { continue };
        let group = limited.is_in_group().then_some(Limited::Group);
        for limited in std::iter::once(limited).chain(group) {
            if history.certain(limited, claimed, claimed).is_some_and(|state| state.is_paused) {
                violations.push(format!("{} was paused: {}", limited.name(), run.describe(zero(evidence))));
            }
            let possible = history.possible(limited, claimed, Until::Record(run.begin.at));
            earlier += usize::from(possible.last().is_some_and(|state| state.is_paused));
        }
    }
    let pauses = history.0.iter().filter(|change| change.state.is_paused && change.acknowledged.is_some()).count();
    let checked = format!("{pauses} pauses, {earlier} jobs began in one that were claimed before");
    Verdict { name: "12c nothing is claimed while it is paused", checked, violations }
}

/// Jobs that waited when a limit was set come under it soon.
fn jobs_come_under_limits(evidence: &Evidence, runs: &[Run<'_>]) -> Verdict {
    let away: Nanos = evidence.server_away.iter().map(|away| away.to - away.from).max().unwrap_or(0);
    let within = MOVED_WITHIN_MICROS + i64::try_from(away / (MILLISECOND / 1000)).unwrap_or(0);
    let (mut outside, mut violations) = (0, Vec::new());
    for run in runs {
        let (Some(limited), Some(claimed)) = (limited(run.begin), run.begin.claimed) else { continue };
        if is_in_lane(run.begin) {
            continue;
        }
        outside += 1;
        let possible = evidence.load.changes.possible(limited, claimed - within, Until::Clock(claimed));
        if !possible.is_empty() && possible.iter().all(|state| state.is_set) {
            violations.push(format!("{} is set: {}", limited.name(), run.describe(zero(evidence))));
        }
    }
    let checked = format!("{outside} runs while a limit was dropped, or just set again");
    Verdict { name: "12d waiting jobs come under a limit", checked, violations }
}

/// After all jobs have ended, as many test jobs run at once as each limit allows. This also finds lanes that have lost their limit.
fn no_slot_is_lost(evidence: &Evidence, runs: &[Run<'_>]) -> Verdict {
    let mut violations = evidence.ended.lanes.clone();
    let Some(probe) = &evidence.ended.probe else {
        return Verdict { name: "12e no slot is lost", checked: "no probe".to_owned(), violations };
    };
    let mut most: BTreeMap<&'static str, u32> = BTreeMap::new();
    let mut open: HashMap<Scope, Vec<&Run<'_>>> = HashMap::new();
    for run in runs.iter().filter(|run| probe.jobs.contains(&run.begin.job)) {
        for (scope, _) in scopes(run.begin) {
            let limited = match &scope {
                Scope::Task(limited) => *limited,
                Scope::Queue(_) => Limited::Pairs,
                Scope::Group => Limited::Group,
            };
            let open = open.entry(scope).or_default();
            open.retain(|earlier| earlier.end > run.begin.at);
            open.push(run);
            let most = most.entry(limited.name()).or_default();
            *most = (*most).max(u32::try_from(open.len()).unwrap_or(u32::MAX));
        }
    }
    for limited in [Limited::Capped, Limited::Pairs, Limited::Group] {
        let (found, full) = (most.get(limited.name()).copied().unwrap_or(0), limited.base().concurrency.unwrap_or(1));
        if found < full {
            violations.push(format!("{}: only {found} of {full} jobs ran at once at the end", limited.name()));
        }
    }
    let ended = probe.jobs.iter().filter(|job| runs.iter().any(|run| run.begin.job == **job && run.outcome.is_some()));
    let ended = ended.count();
    if ended < probe.jobs.len() {
        violations.push(format!("{} of {} jobs of the probe did not end", probe.jobs.len() - ended, probe.jobs.len()));
    }
    Verdict {
        name: "12e no slot is lost",
        checked: format!("a probe of {} jobs at the end", probe.jobs.len()),
        violations,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{S, begin, end, evidence, process, violations};
    use super::super::{Ending, Probe};
    use super::*;
    use crate::limits::{CAPPED, Change, History, LINED, METERED, Moment, Rate};
    use crate::record::{Line, Span};

    /// In these tests, the database's clock is that of the records.
    fn micros(at: Nanos) -> i64 {
        i64::try_from(at / 1000).unwrap()
    }

    fn change(limited: Limited, at: Nanos, state: State) -> Change {
        let moment = |at| Moment { at, clock: micros(at) };
        Change { limited, state, called: moment(at), acknowledged: Some(moment(at + S / 100)) }
    }

    fn capped(at: Nanos, claimed: Nanos, run: u64) -> Line {
        let job = i64::try_from(run).unwrap();
        let begin = Begin {
            task: CAPPED.to_owned(),
            queue_id: Some(-1),
            claimed: Some(micros(claimed)),
            ..begin(at, run, job)
        };
        Line::Begin(begin)
    }

    /// Two jobs at once on one process, from 10 s to 20 s and from 12 s, under a limit that is lowered from two to one.
    fn lowered_at(at: Nanos) -> Evidence {
        let lines = vec![capped(10 * S, 10 * S, 1), capped(12 * S, 11 * S, 2), end(20 * S, 1), end(20 * S, 2)];
        let mut evidence = evidence(vec![process(1, lines)]);
        let state = |jobs| State::of(Some(jobs), None);
        evidence.load.changes =
            History(vec![change(Limited::Capped, S, state(2)), change(Limited::Capped, at, state(1))]);
        evidence
    }

    #[test]
    fn a_job_that_was_claimed_before_a_limit_was_lowered_may_begin() {
        assert_eq!(violations(&lowered_at(9 * S), "12a").len(), 1);
        assert_eq!(violations(&lowered_at(11 * S + S / 2), "12a").len(), 0, "claimed before, begun after");
        assert_eq!(violations(&lowered_at(13 * S), "12a").len(), 0);
    }

    #[test]
    fn a_killed_worker_and_one_that_may_be_dead_take_no_slot() {
        let mut evidence = lowered_at(9 * S);
        let lines = evidence.processes[0].lines.split_off(1);
        evidence.processes.push(process(2, lines));
        assert_eq!(violations(&evidence, "12a").len(), 1);
        evidence.processes[0].suspended.push(Span { from: 10 * S + 1, to: 19 * S });
        assert_eq!(violations(&evidence, "12a").len(), 1, "suspended for two seconds when the other began");
        evidence.processes[0].ended = Some((11 * S, Ending::Killed));
        evidence.processes[1].lines.retain(|line| !matches!(line, Line::End { run: 1, .. }));
        assert_eq!(violations(&evidence, "12a").len(), 0);
    }

    #[test]
    fn a_dropped_limit_allows_any_number() {
        let mut evidence = lowered_at(9 * S);
        evidence.load.changes.0[1].state = State::DROPPED;
        assert_eq!(violations(&evidence, "12a").len(), 0);
    }

    #[test]
    fn a_queue_is_serial_while_it_has_no_concurrency_and_a_group_counts_costs() {
        let run = |run: u64, queue: &str, lane: i32| {
            let queue = Some(queue.to_owned());
            let begin =
                Begin { task: LINED.to_owned(), queue, queue_id: Some(lane), ..begin(10 * S + run, run, run as i64) };
            Line::Begin(Begin { claimed: Some(micros(10 * S)), ..begin })
        };
        let lines = vec![run(1, "pair-1", -1), run(2, "pair-1", -1), run(3, "row-1", -2)];
        let mut evidence = evidence(vec![process(1, lines)]);
        let set = |evidence: &mut Evidence, pairs: Option<u32>, group: u32| {
            let states = [
                (Limited::Pairs, State::of(pairs, None)),
                (Limited::Rows, State::of(None, None)),
                (Limited::Group, State::of(Some(group), None)),
            ];
            evidence.load.changes = History(states.map(|(limited, state)| change(limited, S, state)).to_vec());
        };
        set(&mut evidence, Some(2), 4);
        assert_eq!(violations(&evidence, "12a").len(), 0);
        set(&mut evidence, Some(2), 3);
        assert_eq!(violations(&evidence, "12a").len(), 1, "two of a pair, and a row, which costs two");
        set(&mut evidence, None, 4);
        assert_eq!(violations(&evidence, "12a").len(), 1, "two of a serial queue");
    }

    #[test]
    fn a_period_has_at_most_rate_plus_burst_starts() {
        let metered = |run: u64, at: Nanos| {
            let begin = Begin { task: METERED.to_owned(), queue_id: Some(-1), ..begin(at, run, run as i64) };
            Line::Begin(Begin { claimed: Some(micros(at)), ..begin })
        };
        let lines = (0..4).map(|run| metered(run, 10 * S + run * S / 10)).collect();
        let mut evidence = evidence(vec![process(1, lines)]);
        let rate = |jobs| State::of(None, Some(Rate { jobs, per_ms: 1000, burst: 1 }));
        evidence.load.changes = History(vec![change(Limited::Metered, S, rate(3))]);
        assert_eq!(violations(&evidence, "12b").len(), 0);
        evidence.load.changes = History(vec![change(Limited::Metered, S, rate(2))]);
        assert_eq!(violations(&evidence, "12b").len(), 1);
        evidence.load.changes.0.push(change(Limited::Metered, 10 * S + S / 2, rate(9)));
        assert_eq!(violations(&evidence, "12b").len(), 0, "the rate changed within the period");
    }

    #[test]
    fn a_job_must_not_be_claimed_while_it_is_paused() {
        let mut evidence = lowered_at(9 * S);
        let paused = State { is_paused: true, ..State::of(Some(2), None) };
        evidence.load.changes = History(vec![
            change(Limited::Capped, S, State::of(Some(2), None)),
            change(Limited::Capped, 10 * S + S / 2, paused),
        ]);
        assert_eq!(violations(&evidence, "12c").len(), 1, "claimed at 11 s");
        evidence.load.changes.0.push(change(Limited::Capped, 10 * S + S * 3 / 4, State::of(Some(2), None)));
        assert_eq!(violations(&evidence, "12c").len(), 0);
    }

    #[test]
    fn a_job_that_is_claimed_outside_a_lane_long_after_the_limit_was_set_is_found() {
        let outside = Begin { task: CAPPED.to_owned(), claimed: Some(micros(15 * S)), ..begin(15 * S, 1, 1) };
        let mut evidence = evidence(vec![process(1, vec![Line::Begin(outside)])]);
        evidence.load.changes = History(vec![change(Limited::Capped, S, State::of(Some(2), None))]);
        assert_eq!(violations(&evidence, "12d").len(), 1);
        evidence.load.changes.0.insert(0, change(Limited::Capped, 0, State::DROPPED));
        assert_eq!(violations(&evidence, "12d").len(), 1, "dropped long before");
        evidence.load.changes.0[1] = change(Limited::Capped, 8 * S, State::of(Some(2), None));
        assert_eq!(violations(&evidence, "12d").len(), 0, "set seven seconds before");
    }

    #[test]
    fn a_limit_that_cannot_be_filled_at_the_end_has_lost_a_slot() {
        let mut evidence = evidence(vec![process(1, vec![capped(10 * S, 10 * S, 1), end(11 * S, 1)])]);
        assert_eq!(violations(&evidence, "12e").len(), 0, "no probe");
        evidence.ended.probe = Some(Probe { jobs: [1, 2].into() });
        let found = violations(&evidence, "12e");
        assert!(found.iter().any(|text| text == "task:capped: only 1 of 3 jobs ran at once at the end"), "{found:?}");
        assert!(found.iter().any(|text| text.contains("1 of 2 jobs")), "{found:?}");
    }
}

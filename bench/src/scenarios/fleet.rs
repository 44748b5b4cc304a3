//! How fast 1 to 16 processes drain one backlog together, whether they deadlock, and what their sessions wait for.

use super::drain::microseconds;
use super::{Bench, expect_jobs, figures, header, jobs_per_second, median};
use crate::Failure;
use crate::child::{Outcome, Run};
use crate::contestant::Contestant;
use crate::figures::{count, short, times};
use crate::plot::{Line, Plot, Shape};
use crate::report::{Details, Goal, Section};
use crate::server::{Database, Jobs};
use sqlx::{Connection, PgConnection};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

/// The limit runs over one connection per process.
const CONTESTANTS: [Contestant; 5] =
    [Contestant::Ours, Contestant::OursRepeatable, Contestant::NodeTuned, Contestant::PortTuned, Contestant::LimitOn1];

const PROCESSES: &[usize] = &[1, 2, 4, 8, 16];
const QUICK_PROCESSES: &[usize] = &[1, MANY];

/// The number of processes at which the waits are sampled, and which the goals are about.
const MANY: usize = 8;

const JOBS: u64 = 200_000;

const SAMPLES_EVERY: Duration = Duration::from_millis(100);

/// Waits with fewer sessions on average are not listed.
const FEWEST_SESSIONS: f64 = 0.05;

/// A contestant, and the number of its processes.
type Case = (Contestant, usize);

type Results = Vec<(Case, Vec<Turn>)>;

struct Turn {
    outcome: Outcome,
    deadlocks: u64,
    waits: Waits,
}

/// Samples of what the active sessions wait for.
#[derive(Default)]
struct Waits {
    samples: u32,
    /// For each wait, the number of sessions in all samples.
    sessions: BTreeMap<String, u32>,
}

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let numbers = if bench.quick { QUICK_PROCESSES } else { PROCESSES };
    let cases: Vec<Case> = numbers.iter().flat_map(|many| CONTESTANTS.map(|who| (who, *many))).collect();
    let label = |(contestant, processes): Case| format!("{}, {processes} processes", contestant.label());
    let results: Results = bench
        .alternate_between("fleet", &cases, label, async |(contestant, processes)| {
            let turn = drain_together(bench, contestant, processes).await?;
            let summary = format!("{} jobs/s", count(jobs_per_second(&turn.outcome)));
            Ok((turn, summary))
        })
        .await?;
    let speed =
        |contestant, processes| median(&results, (contestant, processes), |turn| jobs_per_second(&turn.outcome));
    let line = |contestant: Contestant| Line {
        label: contestant.label().to_owned(),
        points: numbers.iter().map(|many| (*many as f64, speed(contestant, *many))).collect(),
    };
    Ok(Section {
        title: "Fleet".to_owned(),
        method: "200,000 trivial jobs without a queue, drained by 1 to 16 processes together. All processes are \
                 connected and idle. They are paused while the jobs are inserted; the clock starts when they continue, \
                 and stops at the end of the last job. The peers run 24 jobs at a time in each process. The limit \
                 claims and deletes 1,000 at a time with plain SQL on our schema, over one connection per process. \
                 Deadlocks: of all rounds, as PostgreSQL counts them."
            .to_owned(),
        header: header(&["", "processes", "jobs/s", "PostgreSQL µs/job", "client µs/job", "deadlocks"]),
        rows: results.iter().map(row).collect(),
        details: vec![waits(&results)],
        plots: vec![Plot {
            name: "fleet".to_owned(),
            title: "Drain by several processes together".to_owned(),
            unit: "jobs/s".to_owned(),
            shape: Shape::Lines { x_unit: "processes".to_owned(), lines: CONTESTANTS.into_iter().map(line).collect() },
        }],
        goals: goals(&results, speed),
        ..Section::default()
    })
}

async fn drain_together(bench: &Bench, contestant: Contestant, processes: usize) -> Result<Turn, Failure> {
    let jobs = bench.size(JOBS);
    let database = bench.server.fresh_database(contestant).await?;
    let run = Run { processes, until: jobs, ..Run::of(contestant, "fleet", 0) };
    let mut started = run.start(&database).await?;
    started.pause_when_idle(&bench.server).await?;
    database.fill(&Jobs::ready(jobs)).await?;
    database.settle().await?;
    let mut watching = database.connect().await?;
    notify(&mut watching, jobs).await?;
    let mut waits = Waits::default();
    let outcome = tokio::select! {
        outcome = started.measure(&bench.server) => outcome?,
        Err(failure) = waits.watch(&mut watching), if processes == MANY => return Err(failure),
    };
    watching.close().await?;
    expect_jobs(contestant, outcome.jobs, jobs)?;
    expect_jobs(contestant, database.jobs_left().await?, 0)?;
    Ok(Turn { outcome, deadlocks: deadlocks(&database).await?, waits })
}

/// Notifies the workers as the functions that add jobs do. They get it when they continue.
async fn notify(connection: &mut PgConnection, jobs: u64) -> Result<(), Failure> {
    sqlx::query("select pg_notify('jobs:insert', json_build_object('r', random(), 'count', $1::bigint)::text)")
        .bind(i64::try_from(jobs)?)
        .execute(connection)
        .await?;
    Ok(())
}

/// The number of deadlocks so far; the sessions of the run have ended and reported theirs.
async fn deadlocks(database: &Database) -> Result<u64, Failure> {
    database.count("select deadlocks from pg_stat_database where datname = current_database()").await
}

impl Waits {
    /// Samples until it is dropped, or until a sample fails.
    async fn watch(&mut self, connection: &mut PgConnection) -> Result<Infallible, Failure> {
        let mut ticks = tokio::time::interval(SAMPLES_EVERY);
        loop {
            ticks.tick().await;
            let sample: Vec<(String, i32)> =
                sqlx::query_as(include_str!("../../sql/waits.sql")).fetch_all(&mut *connection).await?;
            self.samples += 1;
            for (waits_for, sessions) in sample {
                *self.sessions.entry(waits_for).or_default() += u32::try_from(sessions)?;
            }
        }
    }
}

fn row(((contestant, processes), turns): &(Case, Vec<Turn>)) -> Vec<String> {
    vec![
        contestant.label().to_owned(),
        processes.to_string(),
        figures(turns, |turn| jobs_per_second(&turn.outcome)).with_spread(count),
        short(figures(turns, |turn| microseconds(turn.outcome.server, &turn.outcome)).median()),
        short(figures(turns, |turn| microseconds(turn.outcome.client, &turn.outcome)).median()),
        deadlocks_of(turns).to_string(),
    ]
}

fn deadlocks_of(turns: &[Turn]) -> u64 {
    turns.iter().map(|turn| turn.deadlocks).sum()
}

/// For each wait, how many sessions of each contestant were in it on average. The most common waits of ours come first.
fn waits(results: &Results) -> Details {
    let watched: Vec<(Contestant, BTreeMap<&str, f64>)> = results
        .iter()
        .filter(|((_, processes), _)| *processes == MANY)
        .map(|((contestant, _), turns)| (*contestant, average_sessions(turns)))
        .collect();
    let sessions = |wait: &str| -> Vec<f64> {
        watched.iter().map(|(_, sessions)| sessions.get(wait).copied().unwrap_or(0.0)).collect()
    };
    let names: Vec<&str> = watched.iter().flat_map(|(_, sessions)| sessions.keys().copied()).collect();
    let mut found: Vec<(&str, Vec<f64>)> = names.into_iter().map(|name| (name, sessions(name))).collect();
    found.sort_by(|(one, of_one), (other, of_other)| of_other[0].total_cmp(&of_one[0]).then(one.cmp(other)));
    found.dedup_by(|(one, _), (other, _)| one == other);
    found.retain(|(_, sessions)| sessions.iter().any(|many| *many >= FEWEST_SESSIONS));
    let labels = watched.iter().map(|(contestant, _)| contestant.label());
    Details {
        caption: format!(
            "What the active sessions wait for at {MANY} processes: the average number of sessions in each state, from \
             ten samples of `pg_stat_activity` a second."
        ),
        header: ["active sessions"].into_iter().chain(labels).map(str::to_owned).collect(),
        rows: found
            .into_iter()
            .map(|(name, sessions)| [name.to_owned()].into_iter().chain(sessions.into_iter().map(short)).collect())
            .collect(),
    }
}

fn average_sessions(turns: &[Turn]) -> BTreeMap<&str, f64> {
    let samples: u32 = turns.iter().map(|turn| turn.waits.samples).sum();
    let mut average = BTreeMap::new();
    for (wait, sessions) in turns.iter().flat_map(|turn| &turn.waits.sessions) {
        *average.entry(wait.as_str()).or_default() += f64::from(*sessions) / f64::from(samples.max(1));
    }
    average
}

fn goals(results: &Results, speed: impl Fn(Contestant, usize) -> f64) -> Vec<Goal> {
    let best_peer = speed(Contestant::NodeTuned, MANY).max(speed(Contestant::PortTuned, MANY));
    let ours = speed(Contestant::Ours, MANY);
    let of_one = ours / speed(Contestant::Ours, 1);
    let mut goals = vec![
        Goal::at_least("fleet, 8 processes, nothing set: of 1 process", 0.9, of_one, short),
        Goal::at_least("fleet, 8 processes, nothing set: of the best tuned peer", 1.7, ours / best_peer, times),
    ];
    let repeatable = speed(Contestant::OursRepeatable, MANY) / best_peer;
    goals.push(Goal::at_least("fleet, 8 processes, repeatable tasks: of the best tuned peer", 3.0, repeatable, times));
    let ours = results.iter().filter(|((contestant, _), _)| contestant.is_ours());
    let deadlocks: u64 = ours.map(|(_, turns)| deadlocks_of(turns)).sum();
    goals.push(Goal::at_most("fleet: deadlocks of ours", 0.0, deadlocks as f64, count));
    goals
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(samples: u32, sessions: &[(&str, u32)]) -> Turn {
        let sessions = sessions.iter().map(|(wait, many)| ((*wait).to_owned(), *many)).collect();
        Turn { outcome: Outcome::default(), deadlocks: 0, waits: Waits { samples, sessions } }
    }

    #[test]
    fn waits_are_averaged_over_all_samples_and_sorted_by_ours() {
        let results = vec![
            ((Contestant::Ours, 1), vec![turn(10, &[("elsewhere", 10)])]),
            ((Contestant::Ours, MANY), vec![turn(10, &[("a", 10), ("rare", 1)]), turn(30, &[("a", 10), ("b", 40)])]),
            ((Contestant::NodeTuned, MANY), vec![turn(10, &[("a", 20), ("c", 5)])]),
        ];
        let details = waits(&results);
        assert_eq!(details.header, ["active sessions", "ours, nothing set", "Node, tuned"]);
        assert_eq!(details.rows, [["b", "1.00", "0"], ["a", "0.50", "2.00"], ["c", "0", "0.50"]]);
    }
}

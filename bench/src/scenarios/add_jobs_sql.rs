//! Adding jobs from SQL: our functions and Node's, called by the same statements over one connection.

use super::{Bench, figures, header};
use crate::Failure;
use crate::contestant::Contestant;
use crate::figures::{count, short, times};
use crate::progress::Progress;
use crate::report::{Goal, Section};
use sqlx::{Connection, PgConnection};
use std::time::Instant;

const BATCH: &str = include_str!("../../sql/add_batch.sql");
const SINGLY: &str = include_str!("../../sql/add_singly.sql");

const CONTESTANTS: [Contestant; 2] = [Contestant::Ours, Contestant::NodeSql];

struct Case {
    name: &'static str,
    sql: &'static str,
    /// Jobs per call.
    size: u64,
    queues: i32,
    keys: Keys,
    /// The goal that the case belongs to.
    goal: Option<&'static str>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Keys {
    None,
    New,
    /// Every job exists, and no worker has claimed it.
    Existing,
}

/// What one turn took, per job.
struct Turn {
    seconds: f64,
    server: f64,
}

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let cases = cases();
    let progress = Progress::new("adding through SQL", cases.len() * CONTESTANTS.len() * bench.rounds);
    let mut turns: Vec<[Vec<Turn>; 2]> = cases.iter().map(|_| [Vec::new(), Vec::new()]).collect();
    for _ in 0..bench.rounds {
        for (case, turns) in cases.iter().zip(&mut turns) {
            for (contestant, turns) in CONTESTANTS.into_iter().zip(turns) {
                progress.begin(&format!("{}, {}", contestant.label(), case.name));
                let turn = one_turn(bench, contestant, case).await?;
                progress.end(&format!("{} jobs/s", count(1.0 / turn.seconds)));
                turns.push(turn);
            }
        }
    }
    let speeds = |turns: &[Turn]| figures(turns, |turn| 1.0 / turn.seconds);
    let ratio = |[ours, node]: &[Vec<Turn>; 2]| speeds(ours).median() / speeds(node).median();
    let rows = cases.iter().zip(&turns).map(|(case, turns)| {
        let mut row = vec![case.name.to_owned()];
        row.extend(turns.iter().map(|turns| speeds(turns).with_spread(count)));
        row.push(format!("{:.2}", ratio(turns)));
        row.extend(turns.iter().map(|turns| short(figures(turns, |turn| turn.server * 1e6).median())));
        row
    });
    let goals = cases.iter().zip(&turns).filter_map(|(case, turns)| {
        let what = format!("add_jobs from SQL {}: of Node", case.goal?);
        Some(Goal::at_least(&what, 1.0, ratio(turns), times))
    });
    Ok(Section {
        title: "Adding through SQL".to_owned(),
        method:
            "20,000 jobs over one connection, in calls of `add_jobs` with 20,000 or 1,000 specs, each a transaction, \
                 or in one transaction with 20,000 calls of `add_job`; from sending the statement until its answer. \
                 The 100 queues exist; existing keys belong to waiting jobs."
                .to_owned(),
        header: header(&[
            "",
            "ours, jobs/s",
            "Node's functions, jobs/s",
            "ratio",
            "ours, PostgreSQL µs/job",
            "Node's, PostgreSQL µs/job",
        ]),
        rows: rows.collect(),
        goals: goals.collect(),
        ..Section::default()
    })
}

fn cases() -> Vec<Case> {
    let case = |name, size, queues, keys, goal| Case { name, sql: BATCH, size, queues, keys, goal };
    let singly = |name, queues, keys| Case { name, sql: SINGLY, size: 20_000, queues, keys, goal: None };
    vec![
        case("20,000 in a call", 20_000, 0, Keys::None, Some("without keys")),
        case("…, 100 queues", 20_000, 100, Keys::None, Some("with queues")),
        case("…, new keys", 20_000, 0, Keys::New, Some("with new keys")),
        case("…, existing keys", 20_000, 0, Keys::Existing, Some("with existing keys")),
        case("1,000 in a call", 1000, 0, Keys::None, None),
        case("…, 100 queues", 1000, 100, Keys::None, None),
        case("…, new keys", 1000, 0, Keys::New, None),
        case("…, existing keys", 1000, 0, Keys::Existing, None),
        singly("`add_job`", 0, Keys::None),
        singly("…, 100 queues", 100, Keys::None),
        singly("…, new keys", 0, Keys::New),
    ]
}

async fn one_turn(bench: &Bench, contestant: Contestant, case: &Case) -> Result<Turn, Failure> {
    let jobs = bench.size(20_000);
    let size = case.size.min(jobs);
    let database = bench.server.fresh_database(contestant).await?;
    let mut connection = database.connect().await?;
    // The queues and the plans.
    add(&mut connection, case, "warm ", 1, 200).await?;
    let prefix = match case.keys {
        Keys::Existing => {
            add_all(&mut connection, case, "key ", jobs, size).await?;
            "key "
        }
        _ => "new ",
    };
    database.settle().await?;
    let before = bench.server.processor_seconds()?;
    let start = Instant::now();
    add_all(&mut connection, case, prefix, jobs, size).await?;
    let seconds = start.elapsed().as_secs_f64();
    let server = bench.server.processor_seconds()? - before;
    connection.close().await?;
    Ok(Turn { seconds: seconds / jobs as f64, server: server / jobs as f64 })
}

async fn add_all(
    connection: &mut PgConnection,
    case: &Case,
    prefix: &str,
    jobs: u64,
    size: u64,
) -> Result<(), Failure> {
    for first in (1..=jobs).step_by(usize::try_from(size)?) {
        add(connection, case, prefix, first, first + size - 1).await?;
    }
    Ok(())
}

async fn add(connection: &mut PgConnection, case: &Case, prefix: &str, first: u64, last: u64) -> Result<(), Failure> {
    let added: i64 = sqlx::query_scalar(case.sql)
        .bind(i32::try_from(first)?)
        .bind(i32::try_from(last)?)
        .bind(case.queues)
        .bind((case.keys != Keys::None).then_some(prefix))
        .fetch_one(connection)
        .await?;
    if u64::try_from(added)? != last - first + 1 {
        return Err(format!("{}: {added} jobs were added", case.name).into());
    }
    Ok(())
}

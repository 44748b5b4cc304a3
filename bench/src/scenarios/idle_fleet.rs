//! What one added job costs if many workers wait for it: the claims that find nothing, the transactions and CPU time of
//! the server, and the latency. The same for a burst of as many jobs as there are workers.

use super::{Bench, expect_jobs, figures, header, median};
use crate::Failure;
use crate::child::Child;
use crate::contestant::Contestant;
use crate::figures::{milliseconds, quantile, short, times};
use crate::protocol::unix_seconds;
use crate::report::{Goal, Section};
use crate::server::Database;
use serde_json::json;
use sqlx::{Connection, PgConnection};
use std::time::Duration;

const PROCESSES: usize = 8;

/// Workers per process.
const MANY: u64 = 8;
const FEW: u64 = 1;

/// A contestant, and its workers per process.
type Case = (Contestant, u64);

const CASES: [Case; 4] = [
    (Contestant::Ours, FEW),
    (Contestant::Ours, MANY),
    (Contestant::NodeDefault, MANY),
    (Contestant::PortDefault, MANY),
];

/// How long the workers have been idle before the first add, and how long the last jobs may take.
const QUIET: Duration = Duration::from_secs(1);

/// Transactions of ended sessions. Sessions that still run report theirs later.
const TRANSACTIONS: &str = "\
select xact_commit + xact_rollback from pg_stat_database where datname = current_database()";

const OTHER_SESSIONS: &str = "\
select count(*) from pg_stat_activity
where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()";

/// How jobs are added: how many at a time, how often, and how long after the previous ones.
#[derive(Clone, Copy)]
struct Adds {
    jobs: u64,
    times: u64,
    pause: Duration,
}

/// The figures of one run, per added job.
struct Turn {
    transactions: f64,
    empty_claims: Option<f64>,
    server_ms: f64,
    p50: f64,
    p99: f64,
}

/// What workers have used.
struct Used {
    transactions: u64,
    server: f64,
    empty_claims: Option<u64>,
    latencies: Vec<f64>,
}

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let single = Adds { jobs: 1, times: bench.size(100), pause: Duration::from_millis(50) };
    let burst = Adds { jobs: 64, times: if bench.quick { 1 } else { 5 }, pause: Duration::from_secs(1) };
    // Autovacuum would be counted.
    bench.server.set("autovacuum", Some("off")).await?;
    let measured = async {
        let singles = turns(bench, "idle fleet, single jobs", single).await?;
        Ok::<_, Failure>((singles, turns(bench, "idle fleet, bursts", burst).await?))
    };
    let measured = measured.await;
    bench.server.set("autovacuum", None).await?;
    let (singles, bursts) = measured?;
    let rows = |what: &'static str, results: &[(Case, Vec<Turn>)]| -> Vec<Vec<String>> {
        results.iter().map(|(case, turns)| row(*case, what, turns)).collect()
    };
    let empty_claims = |workers| median(&singles, (Contestant::Ours, workers), |turn| turn.empty_claims.unwrap_or(0.0));
    Ok(Section {
        title: "Idle fleet".to_owned(),
        method: "Idle workers in 8 processes, with a poll interval of an hour, so that they claim only if something \
                 wakes them; those of the Rust port have 4 connections each instead of 20. Single jobs: 100 calls of SQL `add_job`, 50 ms apart. Bursts: five times 64 jobs in one \
                 transaction, a second apart. Figures per job, without the adding transactions, and without what the \
                 same workers use in the same time if no job is added. Claims that find nothing include the one that \
                 reports the finished job and finds no next one. The CPU time of PostgreSQL includes the adds."
            .to_owned(),
        header: header(&[
            "",
            "workers",
            "added",
            "claims that find nothing",
            "transactions",
            "PostgreSQL ms",
            "latency p50 ms",
            "latency p99 ms",
        ]),
        rows: [rows("1", &singles), rows("64 at once", &bursts)].concat(),
        goals: vec![Goal::at_most(
            "idle fleet, one job: claims that find nothing, 64 workers of 8",
            2.0,
            empty_claims(MANY) / empty_claims(FEW),
            times,
        )],
        ..Section::default()
    })
}

async fn turns(bench: &Bench, title: &str, adds: Adds) -> Result<Vec<(Case, Vec<Turn>)>, Failure> {
    let label = |case: Case| format!("{}, {} workers", case.0.label(), workers(case));
    bench
        .alternate_between(title, &CASES, label, async |case| {
            let turn = turn(bench, case, adds).await?;
            let summary = format!("{} transactions, {} ms a job", short(turn.transactions), short(turn.server_ms));
            Ok((turn, summary))
        })
        .await
}

async fn turn(bench: &Bench, case: Case, adds: Adds) -> Result<Turn, Failure> {
    let without = run(bench, case, Adds { jobs: 0, ..adds }).await?;
    let with = run(bench, case, adds).await?;
    let jobs = adds.jobs * adds.times;
    expect_jobs(case.0, with.latencies.len() as u64, jobs)?;
    let per_job = |figure: f64| figure / jobs as f64;
    Ok(Turn {
        transactions: per_job(with.transactions as f64 - without.transactions as f64),
        empty_claims: with.empty_claims.map(|claims| per_job(claims as f64)),
        server_ms: per_job(milliseconds(with.server - without.server)),
        p50: milliseconds(quantile(&with.latencies, 0.5)),
        p99: milliseconds(quantile(&with.latencies, 0.99)),
    })
}

async fn run(bench: &Bench, (contestant, workers): Case, adds: Adds) -> Result<Used, Failure> {
    let database = bench.server.fresh_database(contestant).await?;
    database.settle().await?;
    let mut adding = database.connect().await?;
    let mut children = Child::start_all(contestant, "idle", &database, workers, PROCESSES).await?;
    for child in &mut children {
        child.send_line("go").await?;
    }
    tokio::time::sleep(QUIET).await;
    let server_before = bench.server.processor_seconds()?;
    for _ in 0..adds.times {
        add(&mut adding, adds.jobs).await?;
        tokio::time::sleep(adds.pause).await;
    }
    tokio::time::sleep(QUIET).await;
    let server = bench.server.processor_seconds()? - server_before;
    let (mut latencies, mut empty_claims) = (Vec::new(), None);
    for child in &mut children {
        child.send_line("stop").await?;
    }
    for child in &mut children {
        let ran = child.figures().await?;
        latencies.extend(ran.latencies);
        empty_claims = ran.empty_claims.map(|claims| claims + empty_claims.unwrap_or(0));
    }
    for child in children {
        child.end().await?;
    }
    adding.close().await?;
    Ok(Used { transactions: transactions(&database).await?, server, empty_claims, latencies })
}

/// Adds jobs in one transaction. It is also made if there are no jobs, so that it is in the difference of two runs only
/// once.
async fn add(connection: &mut PgConnection, jobs: u64) -> Result<(), Failure> {
    sqlx::query("select graphile_worker.add_job('timed', $1::text::json) from generate_series(1, $2::int)")
        .bind(json!({ "at": unix_seconds() }).to_string())
        .bind(i32::try_from(jobs)?)
        .execute(connection)
        .await?;
    Ok(())
}

/// The number of transactions, after all sessions have ended.
async fn transactions(database: &Database) -> Result<u64, Failure> {
    while database.count(OTHER_SESSIONS).await? > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    database.count(TRANSACTIONS).await
}

fn workers((_, workers): Case) -> u64 {
    PROCESSES as u64 * workers
}

fn row(case: Case, what: &str, turns: &[Turn]) -> Vec<String> {
    let figure = |of: fn(&Turn) -> f64| figures(turns, of).with_spread(short);
    let is_counted = turns.iter().all(|turn| turn.empty_claims.is_some());
    vec![
        case.0.label().to_owned(),
        workers(case).to_string(),
        what.to_owned(),
        if is_counted { figure(|turn| turn.empty_claims.unwrap_or(0.0)) } else { "not counted".to_owned() },
        figure(|turn| turn.transactions),
        figure(|turn| turn.server_ms),
        figure(|turn| turn.p50),
        figure(|turn| turn.p99),
    ]
}

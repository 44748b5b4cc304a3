//! How long one claim takes, depending on what else is in the table: the worker's own statement, prepared, on a
//! connection with the worker's settings, in a transaction that is rolled back.

use super::{Bench, header};
use crate::Failure;
use crate::contestant::Contestant;
use crate::figures::{milliseconds, quantile, short, times};
use crate::plot::{Bar, Plot, Shape};
use crate::progress::Progress;
use crate::report::{Goal, Section};
use crate::server::{Database, Jobs, as_the_worker_connects};
use sqlx::types::chrono::{DateTime, Utc};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::time::Instant;

const EXCHANGE: &str = include_str!("../../../crates/graphile_worker/sql/queries/exchange.sql");

const EXECUTIONS: usize = 30;
const BATCHES: [i32; 2] = [1, 100];

/// The content of the table.
struct Case {
    name: &'static str,
    jobs: Vec<Jobs>,
    /// Whether another worker holds the queues.
    locked: bool,
    worker: Claiming,
}

/// The settings of the worker that claims.
#[derive(Default)]
struct Claiming {
    /// A task whose concurrency limit is reached.
    at_its_limit: Option<&'static str>,
    forbidden_flag: Option<&'static str>,
    /// The beginning of the names of tasks that it does not run.
    not_its_tasks: Option<&'static str>,
}

/// The median milliseconds of a case, for each batch size.
struct Times {
    fresh: Vec<f64>,
    analyzed: Vec<f64>,
}

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let cases = cases(bench);
    let progress = Progress::new("growth", cases.len());
    let mut results = Vec::new();
    for case in &cases {
        progress.begin(case.name);
        let times = one_case(bench, case).await?;
        progress.end(&format!(
            "{} / {} ms fresh, {} / {} ms analyzed",
            short(times.fresh[0]),
            short(times.fresh[1]),
            short(times.analyzed[0]),
            short(times.analyzed[1])
        ));
        results.push((case.name, times));
    }
    let rows = results.iter().map(|(name, times)| {
        let mut row = vec![(*name).to_owned()];
        row.extend(times.fresh.iter().chain(&times.analyzed).map(|ms| short(*ms)));
        row
    });
    let bar = |(name, times): &(&str, Times)| Bar { label: (*name).to_owned(), value: times.fresh[1], ours: true };
    Ok(Section {
        title: "Growth".to_owned(),
        method: "One claim with the worker's own statement, prepared, on a connection with the worker's settings, \
                 in a transaction that is rolled back; the median of 30 claims per case, in milliseconds. \
                 \"Fresh\": right after the rows were written, without vacuum or analyze."
            .to_owned(),
        header: header(&["in the table", "fresh, 1 job", "fresh, 100 jobs", "analyzed, 1 job", "analyzed, 100 jobs"]),
        rows: rows.collect(),
        plots: vec![Plot {
            name: "growth".to_owned(),
            title: "One claim of 100 jobs, right after the rows were written".to_owned(),
            unit: "milliseconds".to_owned(),
            shape: Shape::Bars(results.iter().map(bar).collect()),
        }],
        goals: goals(&results),
        ..Section::default()
    })
}

fn cases(bench: &Bench) -> Vec<Case> {
    let million = bench.size(1_000_000);
    let hundred_thousand = bench.size(100_000);
    let few = || Jobs::ready(1_000);
    let future = |count| Jobs { due_in_seconds: 86_400.0, ..Jobs::ready(count) };
    let case = |name, jobs| Case { name, jobs, locked: false, worker: Claiming::default() };
    let limited = || Claiming { at_its_limit: Some("limited"), ..Claiming::default() };
    vec![
        case("1k ready", vec![few()]),
        case("100k ready", vec![Jobs::ready(hundred_thousand)]),
        case("1M ready", vec![Jobs::ready(million)]),
        case("1M future, 1k ready", vec![future(million), few()]),
        case("1M future, nothing ready", vec![future(million)]),
        case("1M future at priority 0, 1k ready at 10", vec![future(million), Jobs { priority: 10, ..few() }]),
        case("1M failed, 1k ready", vec![Jobs { attempts: 25, ..Jobs::ready(million) }, few()]),
        Case { locked: true, ..case("1M behind a locked queue, 1k ready", vec![Jobs::queued(million, 1), few()]) },
        Case {
            worker: limited(),
            ..case("1M of a task at its limit, 1k ready", vec![Jobs { task: "limited", ..Jobs::ready(million) }, few()])
        },
        Case {
            worker: limited(),
            ..case(
                "300k of a task at its limit in queues of one job, 1k ready",
                vec![Jobs { task: "limited", ..Jobs::queued(bench.size(300_000), bench.size(300_000)) }, few()],
            )
        },
        case("100k queues of one job", vec![Jobs::queued(hundred_thousand, hundred_thousand)]),
        Case {
            worker: Claiming { not_its_tasks: Some("elsewhere"), ..Claiming::default() },
            ..case(
                "1M of tasks that it does not run, 1k ready",
                vec![Jobs { task: "elsewhere", tasks: 10, ..Jobs::ready(million) }, few()],
            )
        },
        Case {
            worker: Claiming { forbidden_flag: Some("slow"), ..Claiming::default() },
            ..case(
                "1M with a forbidden flag, 1k ready",
                vec![Jobs { flag: Some("slow"), ..Jobs::ready(million) }, few()],
            )
        },
        case("1k ready, of a worker with 10,000 tasks", vec![Jobs { task: "many", tasks: 10_000, ..few() }]),
    ]
}

async fn one_case(bench: &Bench, case: &Case) -> Result<Times, Failure> {
    let database = bench.server.fresh_database(Contestant::Ours).await?;
    // Autovacuum must not interfere, and there must be no statistics yet.
    database.run("alter table graphile_worker._private_jobs set (autovacuum_enabled = off)").await?;
    database.run("alter table graphile_worker._private_job_queues set (autovacuum_enabled = off)").await?;
    for jobs in &case.jobs {
        database.fill(jobs).await?;
    }
    if case.locked {
        database
            .run("update graphile_worker._private_job_queues set locked_at = now(), locked_by = 'another worker'")
            .await?;
    }
    database.run("checkpoint").await?;
    let fresh = claims(&database, &case.worker).await?;
    database.settle().await?;
    Ok(Times { fresh, analyzed: claims(&database, &case.worker).await? })
}

async fn claims(database: &Database, worker: &Claiming) -> Result<Vec<f64>, Failure> {
    let mut connection = PgConnection::connect_with(&as_the_worker_connects(database.options.clone())).await?;
    let tasks: Vec<i32> = sqlx::query_scalar(
        "select id from graphile_worker._private_tasks \
         where identifier is distinct from $1 and starts_with(identifier, $2) is not true",
    )
    .bind(worker.at_its_limit)
    .bind(worker.not_its_tasks)
    .fetch_all(&mut connection)
    .await?;
    // A worker that limits any task sends the number of jobs that it may claim of each other task.
    let limits: Option<Vec<Option<i32>>> = worker.at_its_limit.map(|_| vec![None; tasks.len()]);
    let forbidden: Option<Vec<String>> = worker.forbidden_flag.map(|flag| vec![flag.to_owned()]);
    let sql = EXCHANGE.replace(":\"schema\"", "graphile_worker").replace(":'schema'", "'graphile_worker'");
    let mut medians = Vec::new();
    for batch in BATCHES {
        let mut seconds = Vec::new();
        for _ in 0..EXECUTIONS {
            let mut transaction = connection.begin().await?;
            let started = Instant::now();
            claim(&mut transaction, &sql, &tasks, limits.as_deref(), forbidden.as_deref(), batch).await?;
            seconds.push(started.elapsed().as_secs_f64());
            transaction.rollback().await?;
        }
        medians.push(milliseconds(quantile(&seconds, 0.5)));
    }
    connection.close().await?;
    Ok(medians)
}

/// The exchange of a worker with nothing to report. The parameters are those in exchange.sql.
async fn claim(
    connection: &mut PgConnection,
    sql: &str,
    tasks: &[i32],
    limits: Option<&[Option<i32>]>,
    forbidden: Option<&[String]>,
    batch: i32,
) -> Result<(), Failure> {
    let no_ids: &[i64] = &[];
    let no_numbers: &[i32] = &[];
    let no_times: &[Option<DateTime<Utc>>] = &[];
    let no_texts: &[Option<String>] = &[];
    let no_seconds: &[Option<f64>] = &[];
    sqlx::query(AssertSqlSafe(sql.to_owned()))
        .bind("bench")
        .bind(no_ids)
        .bind(no_times)
        .bind(no_ids)
        .bind(no_times)
        .bind(no_texts)
        .bind(no_seconds)
        .bind(no_times)
        .bind(no_numbers)
        .bind(no_texts)
        .bind(no_numbers)
        .bind(tasks)
        .bind(batch)
        .bind(forbidden)
        .bind(None::<DateTime<Utc>>)
        .bind(no_texts)
        .bind(limits)
        .bind(None::<f64>)
        .bind(no_numbers)
        .bind(i32::MAX)
        .bind(None::<Vec<String>>)
        .bind(None::<serde_json::Value>)
        .bind(tasks)
        .fetch_all(connection)
        .await?;
    Ok(())
}

/// No case may take more than twice as long as the first one, which has a small table.
fn goals(results: &[(&str, Times)]) -> Vec<Goal> {
    let Some((_, base)) = results.first() else { return Vec::new() };
    let mut goals = Vec::new();
    for (state, of) in
        [("fresh", (|times| &times.fresh) as fn(&Times) -> &Vec<f64>), ("analyzed", |times| &times.analyzed)]
    {
        for (at, batch) in BATCHES.iter().enumerate() {
            let ratio = |times: &Times| of(times)[at] / of(base)[at];
            let worst = results.iter().max_by(|(_, one), (_, other)| ratio(one).total_cmp(&ratio(other)));
            if let Some((name, worst)) = worst {
                let what = format!("growth, {state}, batch {batch}: worst of the 1k case ({name})");
                goals.push(Goal::at_most(&what, 2.0, ratio(worst), times));
            }
        }
    }
    goals
}

//! Limits: what draining jobs under a limit costs, what limits beside cost other jobs, and one claim under limits, depending on
//! what else is in the table. Separate files measure what limits promise: rates, fairness, and how fast a change takes effect.

mod changes;
mod fairness;
mod rate;
mod slow;

use super::{Bench, expect_jobs, figures, header, jobs_per_second, median};
use crate::Failure;
use crate::child::{Outcome, Run};
use crate::contestant::Contestant;
use crate::figures::{count, milliseconds, quantile, short, times};
use crate::progress::Progress;
use crate::report::{Goal, Section};
use crate::server::{Database, Jobs, as_the_worker_connects};
use sqlx::{Connection, PgConnection};
use std::time::Instant;

const JOBS: u64 = 200_000;
const EXECUTIONS: usize = 30;
const BATCHES: [i32; 2] = [1, 100];

/// What one scenario adds to the results.
struct Part {
    method: String,
    rows: Vec<Vec<String>>,
    goals: Vec<Goal>,
}

/// What limits there are while a backlog is drained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Drain {
    NoLimit,
    PausedBeside,
    NeverBinding,
    OneOf100,
    OneOf10,
    Keys,
}

impl Drain {
    const ALL: [Drain; 6] =
        [Drain::NoLimit, Drain::PausedBeside, Drain::NeverBinding, Drain::OneOf100, Drain::OneOf10, Drain::Keys];

    fn label(self) -> &'static str {
        match self {
            Drain::NoLimit => "no limit",
            Drain::PausedBeside => "no limit, 1M jobs of a paused task beside",
            Drain::NeverBinding => "one limit of 1,000,000",
            Drain::OneOf100 => "one limit of 100",
            Drain::OneOf10 => "one limit of 10",
            Drain::Keys => "500 keys of 2 each",
        }
    }

    /// What to run after the table is filled.
    fn limit(self) -> Option<&'static str> {
        match self {
            Drain::NoLimit => None,
            Drain::PausedBeside => Some("select graphile_worker._rs_pause('task:limited')"),
            Drain::NeverBinding => Some("select graphile_worker._rs_set_limit('task:trivial', concurrency => 1000000)"),
            Drain::OneOf100 => Some("select graphile_worker._rs_set_limit('task:trivial', concurrency => 100)"),
            Drain::OneOf10 => Some("select graphile_worker._rs_set_limit('task:trivial', concurrency => 10)"),
            Drain::Keys => Some("select graphile_worker._rs_set_limit('queue:queue *', concurrency => 2)"),
        }
    }
}

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let drains = bench
        .alternate_between(
            "limits, drain",
            &Drain::ALL,
            |drain| drain.label().to_owned(),
            async |drain| turn(bench, drain).await,
        )
        .await?;
    let claims = claims(bench).await?;
    let mut rows: Vec<Vec<String>> = drains
        .iter()
        .map(|(drain, turns)| {
            vec![
                format!("drain, {}", drain.label()),
                format!("{} jobs/s", figures(turns, jobs_per_second).with_spread(count)),
            ]
        })
        .collect();
    rows.extend(claims.iter().map(|(name, ms)| {
        vec![format!("claim, {name}"), format!("{} ms for 1 job, {} ms for 100", short(ms[0]), short(ms[1]))]
    }));
    let speed = |drain| median(&drains, drain, jobs_per_second);
    let mut goals = vec![
        Goal::at_least(
            "limits: drain with 1M paused jobs beside, of without",
            0.95,
            speed(Drain::PausedBeside) / speed(Drain::NoLimit),
            short,
        ),
        Goal::at_least("limits: drain under one limit of 100, jobs/s", 40_000.0, speed(Drain::OneOf100), count),
        Goal::at_least("limits: drain under one limit of 10, jobs/s", 10_000.0, speed(Drain::OneOf10), count),
        Goal::at_least("limits: drain of 500 keys of 2 each, jobs/s", 30_000.0, speed(Drain::Keys), count),
    ];
    if let Some((_, base)) = claims.first() {
        for (at, batch) in BATCHES.iter().enumerate() {
            let worst = claims.iter().max_by(|(_, one), (_, other)| one[at].total_cmp(&other[at]));
            if let Some((name, worst)) = worst {
                let what = format!("limits: claim, batch {batch}: worst of the 1k case ({name})");
                goals.push(Goal::at_most(&what, 2.0, worst[at] / base[at], times));
            }
        }
    }
    let mut method =
        "Drain: 200,000 trivial jobs, inserted and put under the limit before the clock starts, by one process \
                 with nothing set. Claim: the statement of a claim under limits in a transaction that is rolled back, \
                 over a connection with the worker's settings; the median of 30."
            .to_owned();
    for part in [
        slow::measure(bench).await?,
        rate::measure(bench).await?,
        fairness::measure(bench).await?,
        changes::measure(bench).await?,
    ] {
        method = format!("{method} {}", part.method);
        rows.extend(part.rows);
        goals.extend(part.goals);
    }
    Ok(Section { title: "Limits".to_owned(), method, header: header(&["", ""]), rows, goals, ..Section::default() })
}

async fn turn(bench: &Bench, drain: Drain) -> Result<(Outcome, String), Failure> {
    let jobs = bench.size(JOBS);
    let run = Run { until: jobs, ..Run::of(Contestant::Ours, "drain", 0) };
    let paused = bench.size(1_000_000);
    let (outcome, _) = bench
        .run(&run, async |database| {
            let keys = if drain == Drain::Keys { 500 } else { 0 };
            database.fill(&Jobs { queues: keys, ..Jobs::ready(jobs) }).await?;
            if drain == Drain::PausedBeside {
                database.fill(&Jobs { task: "limited", ..Jobs::ready(paused) }).await?;
            }
            if let Some(limit) = drain.limit() {
                database.run(limit).await?;
                put_under_limits(database).await?;
            }
            database.settle().await
        })
        .await?;
    expect_jobs(Contestant::Ours, outcome.jobs, jobs)?;
    let summary = format!("{} jobs/s", count(jobs_per_second(&outcome)));
    Ok((outcome, summary))
}

/// Moves all waiting jobs under their limits.
async fn put_under_limits(database: &Database) -> Result<(), Failure> {
    while database.count("select coalesce(graphile_worker._rs_settle_lanes(100000), 1)").await? > 0 {}
    Ok(())
}

/// The content of the table, beside 1,000 jobs in ten open lanes.
const CLAIMS: [(&str, &str); 4] = [
    ("1k ready", "select"),
    (
        "1M behind a full limit, 1k ready",
        "insert into graphile_worker._rs_lanes (queue_name, limit_id) select 'full', id from graphile_worker._rs_limits;
         insert into graphile_worker._private_jobs (job_queue_id, task_id, locked_at, locked_by)
         select lanes.id, tasks.id, case when n <= 200 then now() end, case when n <= 200 then 'another' end
         from graphile_worker._rs_lanes as lanes, graphile_worker._private_tasks as tasks, generate_series(1, 1000000) as n
         where lanes.queue_name = 'full' and tasks.identifier = 'trivial'",
    ),
    (
        "100k full keys, 1k ready",
        "insert into graphile_worker._rs_lanes (queue_name, limit_id)
         select 'full' || n, id from graphile_worker._rs_limits, generate_series(1, 100000) as n;
         insert into graphile_worker._private_jobs (job_queue_id, task_id)
         select lanes.id, tasks.id
         from graphile_worker._rs_lanes as lanes, graphile_worker._private_tasks as tasks
         where lanes.queue_name like 'full%' and tasks.identifier = 'trivial'",
    ),
    (
        "100k keys that wait for tokens, 1k ready",
        "insert into graphile_worker._rs_lanes (queue_name, limit_id, ready_at)
         select 'full' || n, id, now() + interval '1 hour' from graphile_worker._rs_limits, generate_series(1, 100000) as n;
         insert into graphile_worker._private_jobs (job_queue_id, task_id)
         select lanes.id, tasks.id
         from graphile_worker._rs_lanes as lanes, graphile_worker._private_tasks as tasks
         where lanes.queue_name like 'full%' and tasks.identifier = 'trivial'",
    ),
];

async fn claims(bench: &Bench) -> Result<Vec<(&'static str, Vec<f64>)>, Failure> {
    let progress = Progress::new("limits, claim", CLAIMS.len());
    let mut results = Vec::new();
    for (name, beside) in CLAIMS {
        progress.begin(name);
        let database = bench.server.fresh_database(Contestant::Ours).await?;
        database.run("alter table graphile_worker._private_jobs set (autovacuum_enabled = off)").await?;
        database.run("select graphile_worker._rs_set_limit('queue:*', concurrency => 200)").await?;
        database.run(beside).await?;
        database
            .run(
                "insert into graphile_worker._rs_lanes (queue_name, limit_id, ready_at)
                 select 'open' || n, id, '-infinity' from graphile_worker._rs_limits, generate_series(1, 10) as n;
                 insert into graphile_worker._private_jobs (job_queue_id, task_id)
                 select lanes.id, tasks.id
                 from graphile_worker._rs_lanes as lanes, graphile_worker._private_tasks as tasks, generate_series(1, 100)
                 where lanes.queue_name like 'open%' and tasks.identifier = 'trivial'",
            )
            .await?;
        let ms = one_case(&database).await?;
        progress.end(&format!("{} / {} ms", short(ms[0]), short(ms[1])));
        results.push((name, ms));
    }
    Ok(results)
}

async fn one_case(database: &Database) -> Result<Vec<f64>, Failure> {
    let mut connection = PgConnection::connect_with(&as_the_worker_connects(database.options.clone())).await?;
    let tasks: Vec<i32> =
        sqlx::query_scalar("select id from graphile_worker._private_tasks").fetch_all(&mut connection).await?;
    let mut medians = Vec::new();
    for batch in BATCHES {
        let mut seconds = Vec::new();
        for _ in 0..EXECUTIONS {
            let mut transaction = connection.begin().await?;
            let started = Instant::now();
            let claimed = sqlx::query(
                "select * from graphile_worker._rs_claim_from_lanes(
                   'bench', '{}', '{}', '{}', $1, null, $2, null, null, null, null, null, 8000000, '{}', '{}', '{}', 1000, 0
                 )",
            )
            .bind(&tasks)
            .bind(batch)
            .fetch_all(&mut *transaction)
            .await?;
            seconds.push(started.elapsed().as_secs_f64());
            expect_jobs(Contestant::Ours, claimed.len() as u64, u64::from(batch.unsigned_abs()) + 1)?;
            transaction.rollback().await?;
        }
        medians.push(milliseconds(quantile(&seconds, 0.5)));
    }
    connection.close().await?;
    Ok(medians)
}

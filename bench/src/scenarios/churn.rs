//! Churn: jobs are added as fast as they run, for minutes. How speed and table size develop, once undisturbed and once
//! while another session's transaction blocks vacuum.

use super::{Bench, header};
use crate::Failure;
use crate::child::{Child, Message};
use crate::contestant::Contestant;
use crate::figures::{count, megabytes, short};
use crate::plot::{Line, Plot, Shape};
use crate::progress::Progress;
use crate::report::{Goal, Section};
use sqlx::{Connection, PgConnection};
use tokio::time::Instant;

const INTERVALS: usize = 12;

/// The interval in which the other transaction begins, and the one before which it ends.
const HELD_FROM: usize = 4;
const HELD_UNTIL: usize = 8;

/// Sizes of the jobs table and its indexes, in bytes.
const SIZES: &str = "\
select pg_table_size('graphile_worker._private_jobs'), pg_indexes_size('graphile_worker._private_jobs')";

/// One interval: when it ended, its speed, and the sizes at its end.
struct Interval {
    minutes: f64,
    speed: f64,
    table: f64,
    indexes: f64,
}

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    // Autovacuum normally runs once a minute. Scale that down, so that a few minutes stand for an hour.
    let nap = (bench.churn.as_secs_f64() / 60.0).ceil().max(1.0);
    bench.server.set("autovacuum_naptime", Some(&format!("{nap}s"))).await?;
    let progress = Progress::new("churn", 2 * INTERVALS);
    let undisturbed = churn(bench, &progress, false).await?;
    let held = churn(bench, &progress, true).await?;
    bench.server.set("autovacuum_naptime", None).await?;
    let mut rows = rows("undisturbed", &undisturbed);
    rows.extend(self::rows("held back", &held));
    let thirds = |intervals: &[Interval], from: usize, to: usize| {
        intervals[from..to].iter().map(|interval| interval.speed).sum::<f64>() / (to - from) as f64
    };
    let third = INTERVALS / 3;
    let steady = thirds(&undisturbed, INTERVALS - third, INTERVALS) / thirds(&undisturbed, 0, third);
    let recovered = thirds(&held, HELD_UNTIL, INTERVALS) / thirds(&held, 0, HELD_FROM);
    let while_held = thirds(&held, HELD_FROM, HELD_UNTIL) / thirds(&held, 0, HELD_FROM);
    // In the first interval, the table has grown to its working size.
    let growth = size(&undisturbed[INTERVALS - 1]) / size(&undisturbed[0]).max(1.0);
    Ok(Section {
        title: "Churn".to_owned(),
        method: format!(
            "A worker with its defaults, for {} minutes; the same process adds 500 jobs at a time while fewer than \
             5,000 wait. Autovacuum runs every {nap} seconds instead of every minute. In the second run, another \
             session keeps a `repeatable read` transaction open from interval {} to {}: during it, the speed is {} of \
             the speed before; afterwards, it is {}.",
            short(bench.churn.as_secs_f64() / 60.0),
            HELD_FROM + 1,
            HELD_UNTIL,
            short(while_held),
            short(recovered),
        ),
        header: header(&["", "interval", "jobs/s", "table MB", "indexes MB"]),
        rows,
        plots: vec![
            plot("churn-speed", "Churn: speed", "jobs/s", &undisturbed, &held, |interval| interval.speed),
            plot("churn-size", "Churn: table and indexes", "MB", &undisturbed, &held, size),
        ],
        goals: vec![
            Goal::at_least("churn: the last third of the first, undisturbed", 0.9, steady, short),
            Goal::at_least("churn: the last third of the first, after vacuum was held back", 0.9, recovered, short),
            Goal::at_most("churn: size at the end, of that after the first interval", 2.0, growth, short),
        ],
        ..Section::default()
    })
}

async fn churn(bench: &Bench, progress: &Progress, held: bool) -> Result<Vec<Interval>, Failure> {
    let database = bench.server.fresh_database(Contestant::Ours).await?;
    database.settle().await?;
    let mut elsewhere = database.connect().await?;
    let mut looking = database.connect().await?;
    let mut worker = Child::start(Contestant::Ours, "churn", &database.url, 0).await?;
    worker.send_line("go").await?;
    let began = Instant::now();
    let mut before = (0, began);
    let mut intervals = Vec::new();
    for number in 0..INTERVALS {
        progress.begin(if held { "held back" } else { "undisturbed" });
        if held && number == HELD_FROM {
            hold_vacuum_back(&mut elsewhere).await?;
        }
        if held && number == HELD_UNTIL {
            sqlx::raw_sql("commit").execute(&mut elsewhere).await?;
        }
        let end = began + bench.churn.mul_f64((number + 1) as f64 / INTERVALS as f64);
        let jobs = jobs_until(&mut worker, end, before.0).await?;
        let now = Instant::now();
        let (table, indexes): (i64, i64) = sqlx::query_as(SIZES).fetch_one(&mut looking).await?;
        let interval = Interval {
            minutes: (now - began).as_secs_f64() / 60.0,
            speed: (jobs - before.0) as f64 / (now - before.1).as_secs_f64(),
            table: megabytes(table as f64),
            indexes: megabytes(indexes as f64),
        };
        before = (jobs, now);
        progress.end(&format!("{} jobs/s, {} MB", count(interval.speed), short(size(&interval))));
        intervals.push(interval);
    }
    worker.send_line("stop").await?;
    worker.figures().await?;
    worker.end().await?;
    elsewhere.close().await?;
    looking.close().await?;
    Ok(intervals)
}

/// Opens a transaction with a snapshot, so that vacuum must keep the rows that it could still see.
pub(super) async fn hold_vacuum_back(connection: &mut PgConnection) -> Result<(), Failure> {
    sqlx::raw_sql("begin isolation level repeatable read; select count(*) from graphile_worker._private_tasks")
        .execute(connection)
        .await?;
    Ok(())
}

/// Waits until that time, and returns the number of jobs so far.
pub(super) async fn jobs_until(worker: &mut Child, end: Instant, mut jobs: u64) -> Result<u64, Failure> {
    loop {
        match tokio::time::timeout_at(end, worker.receive()).await {
            Ok(Ok(Message::At(at))) => jobs = at,
            Ok(Ok(Message::Figures(_))) => return Err("the worker stopped before `stop`".into()),
            Ok(Err(error)) => return Err(error),
            Err(_) => return Ok(jobs),
        }
    }
}

fn size(interval: &Interval) -> f64 {
    interval.table + interval.indexes
}

fn rows(what: &str, intervals: &[Interval]) -> Vec<Vec<String>> {
    let row = |(number, interval): (usize, &Interval)| {
        vec![
            what.to_owned(),
            (number + 1).to_string(),
            count(interval.speed),
            short(interval.table),
            short(interval.indexes),
        ]
    };
    intervals.iter().enumerate().map(row).collect()
}

fn plot(
    name: &str,
    title: &str,
    unit: &str,
    undisturbed: &[Interval],
    held: &[Interval],
    of: impl Fn(&Interval) -> f64,
) -> Plot {
    let line = |label: &str, intervals: &[Interval]| Line {
        label: label.to_owned(),
        points: intervals.iter().map(|interval| (interval.minutes, of(interval))).collect(),
    };
    Plot {
        name: name.to_owned(),
        title: title.to_owned(),
        unit: unit.to_owned(),
        shape: Shape::Lines {
            x_unit: "minutes".to_owned(),
            lines: vec![line("undisturbed", undisturbed), line("vacuum held back", held)],
        },
    }
}

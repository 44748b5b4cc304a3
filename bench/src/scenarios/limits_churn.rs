//! Whether the tables of limits stay small: a stream of jobs over a thousand limited queues, for minutes.

use super::churn::jobs_until;
use super::{Bench, header};
use crate::Failure;
use crate::child::Child;
use crate::contestant::Contestant;
use crate::figures::{count, short};
use crate::progress::Progress;
use crate::report::{Goal, Section};
use sqlx::Connection;
use tokio::time::Instant;

const INTERVALS: usize = 10;

const KEYS: u64 = 1_000;

/// The sizes of each table with its indexes, in bytes.
const SIZES: &str = "\
select
  pg_total_relation_size('graphile_worker._rs_limits'),
  pg_total_relation_size('graphile_worker._rs_lanes'),
  pg_total_relation_size('graphile_worker._rs_lane_calls')";

/// The speed in an interval, and the sizes at its end in kB.
struct Interval {
    speed: f64,
    limits: f64,
    lanes: f64,
    calls: f64,
}

impl Interval {
    fn size(&self) -> f64 {
        self.limits + self.lanes + self.calls
    }
}

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    // As in `churn`: a few minutes stand for an hour.
    let nap = (bench.churn.as_secs_f64() / 60.0).ceil().max(1.0);
    bench.server.set("autovacuum_naptime", Some(&format!("{nap}s"))).await?;
    let intervals = churn(bench).await;
    bench.server.set("autovacuum_naptime", None).await?;
    let intervals = intervals?;
    let rows = intervals.iter().enumerate().map(|(number, interval)| {
        let Interval { speed, limits, lanes, calls } = interval;
        vec![(number + 1).to_string(), count(*speed), short(*limits), short(*lanes), short(*calls)]
    });
    // In the first interval, all lanes are created, and the tables grow to their working size.
    let growth = intervals[INTERVALS - 1].size() / intervals[0].size().max(1.0);
    Ok(Section {
        title: "Limits, churn".to_owned(),
        method: format!(
            "A worker with its defaults, for {} minutes; the same process adds 500 jobs at a time, spread over {} queues \
             under a pattern of two each, while fewer than 5,000 wait. Autovacuum runs every {nap} seconds instead of \
             every minute. Tables with their indexes.",
            short(bench.churn.as_secs_f64() / 60.0),
            count(KEYS as f64)
        ),
        header: header(&["interval", "jobs/s", "limits kB", "lanes kB", "calls kB"]),
        rows: rows.collect(),
        goals: vec![Goal::at_most(
            "limits: size of their tables over 1,000 keys, of that at the start",
            2.0,
            growth,
            short,
        )],
        ..Section::default()
    })
}

async fn churn(bench: &Bench) -> Result<Vec<Interval>, Failure> {
    let progress = Progress::new("limits, churn", INTERVALS);
    let database = bench.server.fresh_database(Contestant::Ours).await?;
    database.run("select graphile_worker._rs_set_limit('queue:key *', concurrency => 2)").await?;
    database.settle().await?;
    let mut looking = database.connect().await?;
    let mut worker = Child::start(Contestant::Ours, "churn_keys", &database.url, KEYS).await?;
    worker.send_line("go").await?;
    let began = Instant::now();
    let mut before = (0, began);
    let mut intervals = Vec::new();
    for number in 0..INTERVALS {
        progress.begin("1,000 keys");
        let end = began + bench.churn.mul_f64((number + 1) as f64 / INTERVALS as f64);
        let jobs = jobs_until(&mut worker, end, before.0).await?;
        let now = Instant::now();
        let (limits, lanes, calls): (i64, i64, i64) = sqlx::query_as(SIZES).fetch_one(&mut looking).await?;
        let kilobytes = |bytes: i64| bytes as f64 / 1024.0;
        let interval = Interval {
            speed: (jobs - before.0) as f64 / (now - before.1).as_secs_f64(),
            limits: kilobytes(limits),
            lanes: kilobytes(lanes),
            calls: kilobytes(calls),
        };
        before = (jobs, now);
        progress.end(&format!("{} jobs/s, {} kB", count(interval.speed), short(interval.size())));
        intervals.push(interval);
    }
    worker.send_line("stop").await?;
    worker.figures().await?;
    worker.end().await?;
    looking.close().await?;
    Ok(intervals)
}

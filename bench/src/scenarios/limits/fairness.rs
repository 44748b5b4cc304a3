//! Whether tenants share the workers: a hundred of them, one with a million jobs, and now and then a newcomer.

use super::super::Bench;
use super::Part;
use crate::Failure;
use crate::child::{RecordedRun, Run};
use crate::contestant::Contestant;
use crate::figures::{count, milliseconds, quantile, short};
use crate::progress::Progress;
use crate::protocol::unix_seconds;
use crate::report::Goal;
use crate::server::Database;
use serde_json::json;
use std::collections::HashMap;
use std::convert::Infallible;
use std::time::Duration;

const TENANTS: i64 = 100;

/// How long a job takes. One process with 24 slots runs 2,400 of them a second, 24 of each tenant.
const JOB_MS: u64 = 10;

/// The tenant with many jobs, and the jobs of the others: more than run in that time, so that all tenants always have some.
const MANY: u64 = 1_000_000;
const OTHERS_PER_SECOND: u64 = 60;

const SECONDS: u64 = 20;
const QUICK_SECONDS: u64 = 4;

const NEWCOMER_EVERY: Duration = Duration::from_millis(50);

/// One job of each lane runs at a time, because the pattern has no concurrency. The last parameter is the number of jobs of tenant 0.
const FILL: &str = "\
with lanes as (
  insert into graphile_worker._rs_lanes (queue_name, limit_id, ready_at)
  select 'tenant ' || n, limits.id, '-infinity'
  from graphile_worker._rs_limits as limits, generate_series(0, $1::int - 1) as n
  returning id, substr(queue_name, 8)::int as n
)
insert into graphile_worker._private_jobs (task_id, payload, job_queue_id)
select tasks.id, json_build_object('queue', lanes.n), lanes.id
from lanes
cross join lateral generate_series(1, case when lanes.n = 0 then $3::int else $2::int end)
join graphile_worker._private_tasks as tasks on tasks.identifier = 'recorded'";

pub(super) async fn measure(bench: &Bench) -> Result<Part, Failure> {
    let seconds = if bench.quick { QUICK_SECONDS } else { SECONDS };
    let progress = Progress::new("limits, tenants", 1);
    progress.begin("100 tenants");
    let contestant = Contestant::OursWith24;
    let database = bench.server.fresh_database(contestant).await?;
    let run = Run { at_most: Duration::from_secs(seconds), ..Run::of(contestant, "recorded", JOB_MS) };
    let mut started = run.start(&database).await?;
    started.pause_when_idle(&bench.server).await?;
    let many = bench.size(MANY);
    fill(&database, many, OTHERS_PER_SECOND * seconds).await?;
    database.settle().await?;
    let mut newcomers = HashMap::new();
    let outcome = tokio::select! {
        outcome = started.measure(&bench.server) => outcome?,
        Err(failure) = add_newcomers(&database, &mut newcomers) => return Err(failure),
    };
    let runs: Vec<RecordedRun> = outcome.ran.into_iter().flat_map(|ran| ran.runs).collect();
    let index = jain(&time_of_tenants(&runs));
    let waited: Vec<f64> =
        runs.iter().filter_map(|run| Some(milliseconds(run.began - newcomers.get(&run.queue)?))).collect();
    let (p50, p99) = (quantile(&waited, 0.5), quantile(&waited, 0.99));
    if waited.is_empty() {
        return Err("no newcomer has started".into());
    }
    progress.end(&format!("Jain's index {index:.4}, newcomer {} ms", short(p99)));
    Ok(Part {
        method: format!(
            "Tenants: {TENANTS} queues under a pattern with a weight, so each runs one job of {JOB_MS} ms at a time; one has {} \
             jobs, the others have jobs for all of the {seconds} seconds. One process with 24 slots. A newcomer is a queue that \
             gets its first job, 20 times a second.",
            count(many as f64)
        ),
        rows: vec![
            vec![format!("{TENANTS} tenants, Jain's index of worker time"), format!("{index:.4}")],
            vec![
                "start of a newcomer's job".to_owned(),
                format!("{} ms, p99 {} ms, of {}", short(p50), short(p99), waited.len()),
            ],
        ],
        goals: vec![
            Goal::at_least("limits: 100 tenants, Jain's index of worker time", 0.99, index, |index| {
                format!("{index:.4}")
            }),
            Goal::at_most(
                "limits: start of a newcomer beside 100 tenants, p99 ms (one job + 10 ms)",
                JOB_MS as f64 + 10.0,
                p99,
                short,
            ),
        ],
    })
}

async fn fill(database: &Database, many: u64, others: u64) -> Result<(), Failure> {
    database.run("select graphile_worker._rs_set_limit('queue:tenant *', weight => 2)").await?;
    let mut connection = database.connect().await?;
    sqlx::query(FILL)
        .bind(i32::try_from(TENANTS)?)
        .bind(i32::try_from(others)?)
        .bind(i32::try_from(many)?)
        .execute(&mut connection)
        .await?;
    Ok(())
}

/// Adds a job of a new tenant again and again until it is dropped, and records the times.
async fn add_newcomers(database: &Database, added: &mut HashMap<i64, f64>) -> Result<Infallible, Failure> {
    let mut connection = database.connect().await?;
    let mut ticks = tokio::time::interval(NEWCOMER_EVERY);
    // The workers continue first.
    ticks.tick().await;
    for tenant in TENANTS.. {
        ticks.tick().await;
        added.insert(tenant, unix_seconds());
        sqlx::query(
            "select graphile_worker.add_job('recorded', $1::text::json, queue_name => 'tenant ' || $2::bigint)",
        )
        .bind(json!({ "queue": tenant }).to_string())
        .bind(tenant)
        .execute(&mut connection)
        .await?;
    }
    Err("there are no more numbers of tenants".into())
}

/// How long the jobs of each tenant ran, without newcomers.
fn time_of_tenants(runs: &[RecordedRun]) -> Vec<f64> {
    let mut times = vec![0.0; usize::try_from(TENANTS).unwrap_or(0)];
    for run in runs {
        if let Some(time) = usize::try_from(run.queue).ok().and_then(|tenant| times.get_mut(tenant)) {
            *time += run.ended - run.began;
        }
    }
    times
}

/// 1 if all shares are the same; 1/n if one of n has everything.
fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    sum * sum / (shares.len() as f64 * squares).max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jains_index_is_one_for_equal_shares_and_a_part_for_one_share() {
        assert_eq!(jain(&[3.0, 3.0, 3.0]), 1.0);
        assert_eq!(jain(&[0.0, 5.0]), 0.5);
    }

    #[test]
    fn newcomers_do_not_count_as_tenants() {
        let run = |queue, ended| RecordedRun { began: 1.0, ended, queue, ..RecordedRun::default() };
        let times = time_of_tenants(&[run(0, 2.0), run(0, 2.0), run(99, 4.0), run(100, 9.0)]);
        assert_eq!((times[0], times[99], times.len()), (2.0, 3.0, 100));
    }
}

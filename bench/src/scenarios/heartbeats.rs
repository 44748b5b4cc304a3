//! The cost of recovery: the server's CPU time for the heartbeats and sweeps of idle workers.

use super::{Bench, figures, header};
use crate::Failure;
use crate::contestant::Contestant;
use crate::figures::short;
use crate::report::{Goal, Section};
use crate::server::Database;
use graphile_worker::{Worker, WorkerContext, WorkerOptions, WorkerRecoveryConfig};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most that the server's default number of connections allows.
const WORKERS: u32 = 20;

/// Their heartbeats are this many times as frequent, so that 20 workers stand for 200.
const FASTER: u32 = 10;

const WINDOW: Duration = Duration::from_secs(60);

pub(super) async fn measure(bench: &Bench) -> Result<Section, Failure> {
    let database = bench.server.fresh_database(Contestant::Ours).await?;
    let mut with = Vec::new();
    let mut without = Vec::new();
    for _ in 0..bench.rounds {
        without.push(percent_of_a_core(bench, &database, false).await?);
        with.push(percent_of_a_core(bench, &database, true).await?);
    }
    let (with, without) = (figures(&with, |percent| *percent), figures(&without, |percent| *percent));
    let cost = with.median() - without.median();
    Ok(Section {
        title: "Heartbeats".to_owned(),
        method: "20 idle workers that neither listen nor poll, for a minute. Their heartbeats are ten times as \
                 frequent as by default, so that they stand for 200 workers. One of them sweeps in that time, as \
                 one of 200 would. The figure is the CPU time of all processes of the server."
            .to_owned(),
        header: header(&["", "% of a core"]),
        rows: vec![
            vec!["recovery off".to_owned(), without.with_spread(short)],
            vec!["recovery on".to_owned(), with.with_spread(short)],
        ],
        goals: vec![Goal::at_most("heartbeats of 200 workers: % of a core of the server's", 1.0, cost, short)],
        ..Section::default()
    })
}

async fn percent_of_a_core(bench: &Bench, database: &Database, recovery: bool) -> Result<f64, Failure> {
    let mut running = Vec::new();
    for _ in 0..WORKERS {
        let worker = Arc::new(idle_worker(database, recovery).await?);
        running.push((worker.clone(), tokio::spawn(async move { worker.run().await })));
    }
    let window = if bench.quick { WINDOW / 10 } else { WINDOW };
    // Do not measure the start.
    tokio::time::sleep(window / 5).await;
    let (began, before) = (Instant::now(), bench.server.processor_seconds()?);
    tokio::time::sleep(window).await;
    let percent = (bench.server.processor_seconds()? - before) / began.elapsed().as_secs_f64() * 100.0;
    for (worker, ended) in running {
        worker.request_shutdown();
        ended.await??;
    }
    Ok(percent)
}

async fn idle_worker(database: &Database, recovery: bool) -> Result<Worker, Failure> {
    let defaults = WorkerRecoveryConfig::default();
    let config = WorkerRecoveryConfig::default()
        .heartbeat_interval(defaults.heartbeat_interval / FASTER)
        // One worker sweeps per minute, whatever their number.
        .sweep_interval(defaults.sweep_interval)
        .sweep_threshold(defaults.sweep_threshold / FASTER)
        .enabled(recovery);
    let options = WorkerOptions::default()
        .database_url(&database.url)
        .max_pg_conn(1)
        .use_notifications(false)
        .poll_interval(Duration::from_secs(3600))
        .listen_os_shutdown_signals(false)
        .worker_recovery(config)
        .define_task("trivial", |_: serde_json::Value, _: WorkerContext| async {});
    Ok(options.init().await?)
}

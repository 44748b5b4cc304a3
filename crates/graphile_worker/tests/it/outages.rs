//! A network that fails between the worker and the database: a proxy that loses an answer, or stops passing anything on.

use crate::network::{Network, url_at};
use crate::support::{Db, Log, Started, until};
use crate::worker_support::until_worker_listens;
use graphile_worker::{
    CronTick, Error, FetchError, ListenConnecting, TaskOptions, TestClock, WorkerContext, WorkerOptions,
};
use serde_json::{Value, json};
use sqlx::PgPool;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

fn options(pool: PgPool) -> WorkerOptions {
    WorkerOptions::default().pg_pool(pool).listen_os_shutdown_signals(false).use_notifications(false).concurrency(1)
}

#[tokio::test]
async fn a_lost_answer_leaves_the_queue_locked_by_the_worker_that_has_its_job() {
    lose_an_answer(true, 0).await;
}

/// Behind a pooler an exchange is a transaction: whichever of its answers is lost, the same holds.
#[tokio::test]
async fn a_lost_answer_loses_nothing_behind_a_pooler() {
    for answers_before in 0..8 {
        lose_an_answer(false, answers_before).await;
    }
}

async fn lose_an_answer(prepared_statements: bool, answers_before: i64) {
    let db = Db::installed().await;
    db.run("select graphile_worker.add_job('t', to_json(n), 'q') from generate_series(1, 3) n").await;
    let network = Network::default();
    let (begun, mut begins) = mpsc::unbounded_channel();
    let finish = Arc::new(Notify::new());
    let (losing, finished) = (network.clone(), finish.clone());
    let options = options(network.pool(&db).await).use_prepared_statements(prepared_statements);
    let options = options.define_task("t", move |n: i64, _| {
        let (begun, losing, finished) = (begun.clone(), losing.clone(), finished.clone());
        async move {
            begun.send(n).unwrap();
            if n == 1 {
                // The worker loses the answer to its report, which contains the next job of the queue.
                losing.lose_answer_after.store(answers_before, Ordering::SeqCst);
            } else {
                finished.notified().await;
            }
        }
    });
    let started = Started::new(options).await;
    assert_eq!(begins.recv().await, Some(1));
    assert_eq!(begins.recv().await, Some(2), "it is found again");
    let locked_by = db.value("select locked_by from graphile_worker._private_job_queues").await;
    assert_eq!(locked_by, started.worker.worker_id(), "while the second job runs, its queue is taken");
    finish.notify_one();
    assert_eq!(begins.recv().await, Some(3));
    finish.notify_one();
    started.stop().await;
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
    assert_eq!(db.value("select locked_by from graphile_worker._private_job_queues").await, Value::Null);
}

#[tokio::test]
async fn a_locked_table_only_delays_a_worker_behind_a_pooler() {
    let db = Db::installed().await;
    let (sender, mut ran) = mpsc::unbounded_channel();
    let is_locked = CancellationToken::new();
    let locked = is_locked.clone();
    let task = move |n: i64, _: WorkerContext| {
        let _ = sender.send(n);
        // Until the table is locked, so that the outcome is reported only then.
        locked.clone().cancelled_owned()
    };
    let options = options(db.pool.clone()).use_prepared_statements(false).poll_interval(Duration::from_millis(50));
    let started = Started::new(options.define_task("t", task)).await;
    db.run("select graphile_worker.add_job('t', to_json(n), 'q') from generate_series(1, 4) n").await;
    assert_eq!(ran.recv().await, Some(1));
    let mut other = db.connect().await;
    sqlx::raw_sql("begin; lock table graphile_worker._private_jobs").execute(&mut other).await.unwrap();
    is_locked.cancel();
    let waits = "select min(query_start)::text from pg_stat_activity
                 where datname = current_database() and wait_event_type = 'Lock' and query like 'with recursive clock as %'";
    let since = until("an exchange waits for the table", async || match db.value(waits).await {
        Value::Null => None,
        since => Some(since),
    })
    .await;
    until("it gives up", async || (db.value(waits).await != since).then_some(())).await;
    sqlx::raw_sql("rollback").execute(&mut other).await.unwrap();
    for n in 2..=4 {
        assert_eq!(ran.recv().await, Some(n));
    }
    started.stop().await;
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
    assert_eq!(db.value("select locked_by from graphile_worker._private_job_queues").await, Value::Null);
}

#[tokio::test]
async fn outcomes_are_written_when_the_database_is_back_even_after_the_grace_period() {
    let db = Db::installed().await;
    db.add_job("'t', '1', 'q'").await;
    let network = Network::default();
    let begun = Arc::new(Notify::new());
    let (outage, begins) = (network.clone(), begun.clone());
    let options = options(network.pool(&db).await).shutdown_grace_period(Duration::from_millis(100)).define_task(
        "t",
        move |_: Value, ctx: WorkerContext| {
            let (outage, begins) = (outage.clone(), begins.clone());
            async move {
                begins.notify_one();
                ctx.cancellation_token().cancelled().await;
                outage.down.store(true, Ordering::SeqCst);
            }
        },
    );
    let started = Started::new(options).await;
    begun.notified().await;
    started.worker.request_shutdown();
    // Longer than the grace period, whose end no event marks. If this is too short, the test only shows less.
    tokio::time::sleep(Duration::from_millis(400)).await;
    network.down.store(false, Ordering::SeqCst);
    started.running.await.unwrap().unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
    assert_eq!(db.value("select locked_by from graphile_worker._private_job_queues").await, Value::Null);
}

#[tokio::test]
async fn a_second_shutdown_request_during_an_outage_stops_the_worker_with_an_error() {
    let db = Db::installed().await;
    db.add_job("'t', '1'").await;
    let network = Network::default();
    let begun = Arc::new(Notify::new());
    let begins = begun.clone();
    let options = options(network.pool(&db).await).shutdown_grace_period(Duration::from_secs(3600)).define_task(
        "t",
        move |_: Value, _| {
            begins.notify_one();
            std::future::pending::<()>()
        },
    );
    let started = Started::new(options).await;
    begun.notified().await;
    network.down.store(true, Ordering::SeqCst);
    started.worker.request_shutdown();
    started.worker.request_shutdown();
    let error = started.running.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::OutcomesNotWritten { .. }), "{error}");
    assert_eq!(
        db.row("select locked_by from graphile_worker.jobs").await,
        json!({"locked_by": started.worker.worker_id()})
    );
}

/// Takes as long as the worker needs to become suspicious of silence: about 25 seconds.
#[tokio::test]
async fn a_connection_that_cannot_listen_is_replaced() {
    let db = Db::installed().await;
    let network = Network::default();
    network.poll_only.store(true, Ordering::SeqCst);
    let (sender, mut ran) = mpsc::unbounded_channel();
    let (connecting, mut connects) = mpsc::unbounded_channel();
    let options = options(network.pool(&db).await)
        .use_notifications(true)
        .poll_interval(Duration::from_secs(3600))
        .on(ListenConnecting, move |_| {
            connecting.send(()).unwrap();
            async {}
        })
        .define_task("t", move |n: i64, _| {
            sender.send(n).unwrap();
            async {}
        });
    let started = Started::new(options).await;
    db.add_job("'t', '1'").await;
    assert_eq!(connects.recv().await, Some(()));
    assert_eq!(connects.recv().await, Some(()), "the second try");
    network.poll_only.store(false, Ordering::SeqCst);
    assert_eq!(ran.recv().await, Some(1));
    started.stop().await;
}

#[tokio::test]
async fn a_silent_listening_connection_is_detected_and_replaced() {
    let db = Db::installed().await;
    let network = Network::default();
    let (sender, mut ran) = mpsc::unbounded_channel();
    let url = network.url(&db, TcpListener::bind("127.0.0.1:0").await.unwrap());
    let options = at(&format!("{url}?keepalives_idle=6&keepalives_interval=1&keepalives_count=2"))
        .use_notifications(true)
        .poll_interval(Duration::from_secs(3600))
        .define_task("t", move |n: i64, _| {
            sender.send(n).unwrap();
            async {}
        });
    let started = Started::new(options).await;
    db.add_job("'t', '1'").await;
    assert_eq!(ran.recv().await, Some(1));
    until_worker_listens(&db).await;
    network.poll_only.store(true, Ordering::SeqCst);
    // Until the worker has nothing more to do of its own accord.
    tokio::time::sleep(Duration::from_secs(1)).await;
    db.add_job("'t', '2'").await;
    // The notification is on its way to a connection that will not pass it on; a new one would.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(ran.try_recv().is_err(), "nothing else has woken it");
    network.poll_only.store(false, Ordering::SeqCst);
    assert_eq!(ran.recv().await, Some(2));
    started.stop().await;
}

#[tokio::test]
async fn recurring_jobs_missed_during_an_outage_are_backfilled_as_configured() {
    let db = Db::installed().await;
    let network = Network::default();
    let time = |text: &str| format!("2026-03-10T{text}Z").parse().unwrap();
    let clock = TestClock::at(time("08:00:30"));
    let (sender, mut looks) = mpsc::unbounded_channel();
    let options = options(network.pool(&db).await)
        .cron_clock(&clock)
        .with_cron("0 * * * * filled ?fill=1d\n0 * * * * not_filled\n28 * * * * just_now")
        .unwrap()
        .on(CronTick, move |tick| {
            let _ = sender.send(tick.at);
            async {}
        });
    let started = Started::new(options).await;
    assert_eq!(looks.recv().await, Some(time("08:00:30")));
    network.down.store(true, Ordering::SeqCst);
    clock.set(time("11:30:00"));
    let connected =
        "select count(*) from pg_stat_activity where datname = current_database() and application_name like '% cron'";
    until("the connection is lost", async || (db.value(connected).await == 0).then_some(())).await;
    network.down.store(false, Ordering::SeqCst);
    assert_eq!(looks.recv().await, Some(time("11:30:00")));
    let jobs = "select json_agg(task_identifier || to_char(run_at at time zone 'UTC', ' HH24:MI') order by id)
        from graphile_worker.jobs";
    assert_eq!(db.value(jobs).await, json!(["filled 09:00", "filled 10:00", "filled 11:00", "just_now 11:28"]));
    started.stop().await;
}

/// Runs a job with these options, and returns the result.
async fn run_once(options: WorkerOptions) -> Result<(), Error> {
    options.define_task("t", |_: Value, _: WorkerContext| async {}).init().await?.run_once().await
}

fn at(url: &str) -> WorkerOptions {
    WorkerOptions::default().database_url(url).listen_os_shutdown_signals(false).use_notifications(false).concurrency(1)
}

#[tokio::test]
async fn a_worker_that_starts_before_the_database_waits_for_it() {
    for starting in [false, true] {
        let db = Db::installed().await;
        db.add_job("'t'").await;
        let (log, _guard) = Log::start();
        let network = Network::default();
        // Closed again at once: connections are refused.
        let address = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        if starting {
            network.starting.store(true, Ordering::SeqCst);
            network.url(&db, TcpListener::bind(address).await.unwrap());
        }
        let running = tokio::spawn(run_once(at(&url_at(&db, address)).heartbeat_interval(Duration::from_secs(1))));
        let line = until("it waits", async || log.line("waiting for the database")).await;
        let why = if starting { "the database system is starting up" } else { "Connection refused" };
        assert!(line.contains(why) && line.contains("at_most=30s"), "{line}");
        if starting {
            network.starting.store(false, Ordering::SeqCst);
        } else {
            network.url(&db, TcpListener::bind(address).await.unwrap());
        }
        running.await.unwrap().unwrap();
        assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
        assert_eq!(log.lines("waiting for the database").lines().count(), 1, "{}", log.text());
        assert_eq!(log.lines("the database is ready").lines().count(), 1, "{}", log.text());
    }
}

#[tokio::test]
async fn a_worker_that_starts_while_the_jobs_are_locked_waits_for_them() {
    let db = Db::installed().await;
    db.add_job("'t'").await;
    let (log, _guard) = Log::start();
    let mut locks = db.connect().await;
    sqlx::raw_sql("begin; lock table graphile_worker._private_jobs in access exclusive mode")
        .execute(&mut locks)
        .await
        .unwrap();
    let running = tokio::spawn(run_once(at(db.url())));
    let line = until("it waits", async || log.line("waiting for the database")).await;
    assert!(line.contains("look up the tasks") && line.contains("lock timeout"), "{line}");
    // The second attempt waits for the lock as well.
    let waits = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    until("it tries again", async || (db.value(waits).await == 1).then_some(())).await;
    sqlx::raw_sql("rollback").execute(&mut locks).await.unwrap();
    running.await.unwrap().unwrap();
    assert_eq!(db.value("select count(*) from graphile_worker.jobs").await, 0);
}

#[tokio::test]
async fn a_worker_that_waits_for_the_database_can_be_stopped() {
    let db = Db::installed().await;
    let (log, _guard) = Log::start();
    let mut locks = db.connect().await;
    sqlx::raw_sql("begin; lock table graphile_worker._private_jobs in access exclusive mode")
        .execute(&mut locks)
        .await
        .unwrap();
    let started = Started::new(at(db.url()).define_task("t", |_: Value, _: WorkerContext| async {})).await;
    until("it waits", async || log.line("waiting for the database")).await;
    started.stop().await;

    let stop = Arc::new(Notify::new());
    let stopped = stop.clone();
    let nowhere =
        at("postgres://postgres@127.0.0.1:1/nowhere").shutdown_signal(async move { stopped.notified().await });
    let starting = tokio::spawn(run_once(nowhere));
    until("it waits", async || log.line("127.0.0.1:1")).await;
    stop.notify_one();
    assert!(matches!(starting.await.unwrap(), Err(Error::StoppedBeforeStart)));
}

#[tokio::test]
async fn a_database_that_is_not_ready_in_time_is_an_error_with_the_time_waited() {
    let nowhere = at("postgres://postgres@127.0.0.1:1/nowhere");
    let error = run_once(nowhere.startup_timeout(Duration::from_millis(200))).await.unwrap_err();
    assert!(error.to_string().starts_with("the database was not ready after "), "{error}");
    let Error::DatabaseNotReady { waited, .. } = &error else { panic!("{error:?}") };
    assert!(*waited >= Duration::from_millis(200), "{error}");
    assert!(error.is_retryable());
    let last = std::error::Error::source(&error).unwrap().to_string();
    assert_eq!(last, "could not connect to 127.0.0.1:1");
}

#[tokio::test]
async fn an_error_that_is_not_transient_is_reported_at_once() {
    let db = Db::installed().await;
    let (log, _guard) = Log::start();
    let nowhere = db.options().database("nowhere").clone();
    let pool = sqlx::postgres::PgPoolOptions::new().connect_lazy_with(nowhere);
    let error = run_once(options(pool)).await.unwrap_err();
    assert!(format!("{error:?}").contains("database \\\"nowhere\\\" does not exist"), "{error:?}");
    let pool = sqlx::postgres::PgPoolOptions::new()
        .connect_lazy_with(db.options().host("127.0.0.1").ssl_mode(sqlx::postgres::PgSslMode::Require));
    assert!(run_once(options(pool)).await.is_err(), "the server has no TLS");
    let nowhere = at("postgres://postgres@127.0.0.1:1/nowhere").startup_timeout(Duration::ZERO);
    assert_eq!(run_once(nowhere).await.unwrap_err().to_string(), "could not connect to 127.0.0.1:1");
    assert_eq!(log.line("waiting for the database"), None);
}

/// Packets vanish and nothing is closed. What notices is the time that the server takes to answer, as set in code or, for
/// those who come from libpq, in the connection string.
#[tokio::test]
async fn a_silent_partition_ends_with_the_answer_timeout() {
    for in_code in [true, false] {
        let db = Db::installed().await;
        db.add_job("'t'").await;
        let (log, _guard) = Log::start();
        let network = Network::default();
        let url = network.url(&db, TcpListener::bind("127.0.0.1:0").await.unwrap());
        let options = if in_code {
            at(&url).answer_timeout(Duration::from_secs(1))
        } else {
            at(&format!("{url}?tcp_user_timeout=1000"))
        };
        let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (begins, goes_on) = (begun.clone(), go_on.clone());
        let started = Started::new(options.define_task("t", move |_: Value, _: WorkerContext| {
            begins.notify_one();
            let goes_on = goes_on.clone();
            async move { goes_on.notified().await }
        }))
        .await;
        begun.notified().await;
        // When it begins, a worker frees old locks. After that it asks nothing until the job has ended.
        let rests = "select count(*) from pg_stat_activity where datname = current_database() and state = 'idle'
            and application_name like 'graphile_worker rs-%' and query like '%4 hours%'";
        until("it rests", async || (db.value(rests).await == 1).then_some(())).await;
        network.partitions.fetch_add(1, Ordering::SeqCst);
        go_on.notify_one();
        until("the outcome is written", async || {
            (db.value("select count(*) from graphile_worker.jobs").await == 0).then_some(())
        })
        .await;
        // Mostly it is the report that was not answered. On a busy machine it may be a question before it.
        if let Some(line) = log.line("lost the database") {
            assert!(line.contains("the database did not answer within 1s"), "{line}");
        }
        started.stop().await;
    }
}

/// Nothing is closed and nothing is refused: not even new connections get an answer. The handler's query would wait for
/// ever; the timeout of its task ends it.
#[tokio::test]
async fn a_network_that_drops_new_connections_too_only_delays_jobs() {
    let db = Db::installed().await;
    let network = Network::default();
    let url = network.url(&db, TcpListener::bind("127.0.0.1:0").await.unwrap());
    let (begun, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begins, goes_on) = (begun.clone(), go_on.clone());
    let (sender, mut errors) = mpsc::unbounded_channel();
    let options = at(&format!("{url}?connect_timeout=2"))
        .answer_timeout(Duration::from_secs(1))
        .poll_interval(Duration::from_millis(100))
        .concurrency(2)
        .on(FetchError, move |ctx| {
            let _ = sender.send(ctx.error.unwrap_or_default());
            async {}
        })
        .task_options("t", TaskOptions::default().timeout(Duration::from_secs(3)))
        .define_task("t", move |_: Value, ctx: WorkerContext| {
            let (begins, goes_on) = (begins.clone(), goes_on.clone());
            async move {
                if ctx.job().attempts == 1 {
                    begins.notify_one();
                    goes_on.notified().await;
                }
                sqlx::query("select 1").execute(ctx.pg_pool()).await.map(drop)
            }
        });
    let started = Started::new(options).await;
    db.add_job("'t'").await;
    begun.notified().await;
    network.swallows.store(true, Ordering::SeqCst);
    network.partitions.fetch_add(1, Ordering::SeqCst);
    go_on.notify_one();
    while !errors.recv().await.unwrap().contains("no answer within 2 seconds") {}
    network.swallows.store(false, Ordering::SeqCst);
    until("the job failed, and ran again", async || {
        (db.value("select count(*) from graphile_worker.jobs").await == 0).then_some(())
    })
    .await;
    started.stop().await;
}

/// The server gives up sessions whose client is silent: the worker's own, and those of its handlers.
#[tokio::test]
async fn the_server_is_configured_to_detect_dead_clients() {
    let db = Db::installed().await;
    for (parameters, expected) in [
        ("", json!({"idle": "20", "interval": "5", "count": "3"})),
        ("?keepalives_idle=7&keepalives_count=2", json!({"idle": "7", "interval": "5", "count": "2"})),
        ("?options=-ctcp_keepalives_idle%3D9", json!({"idle": "9", "interval": "5", "count": "3"})),
    ] {
        let (sender, mut answers) = mpsc::unbounded_channel();
        let options = at(&format!("{}{parameters}", db.url())).define_task("t", move |_: Value, ctx: WorkerContext| {
            let sender = sender.clone();
            async move {
                let settings: Value = sqlx::query_scalar(
                    "select json_build_object('idle', current_setting('tcp_keepalives_idle'),
                       'interval', current_setting('tcp_keepalives_interval'), 'count', current_setting('tcp_keepalives_count'))",
                )
                .fetch_one(&mut ctx.pg_pool().acquire().await?.detach())
                .await?;
                let _ = sender.send(settings);
                Ok::<_, sqlx::Error>(())
            }
        });
        let worker = options.max_pg_conn(1).init().await.unwrap();
        // The pool's first connection is older than what the worker has found out.
        for _ in 0..2 {
            db.add_job("'t'").await;
            worker.run_once().await.unwrap();
        }
        answers.recv().await.unwrap();
        assert_eq!(answers.recv().await.unwrap(), expected, "{parameters}");
    }
}

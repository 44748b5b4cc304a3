//! A primary with a standby that takes over: behind a proxy that is pointed to it, or with both servers in the connection
//! string. Each test has two servers of its own.

use crate::cron::{Clocked, time};
use crate::network::Network;
use crate::support::{Log, Started, rows, until};
use crate::worker_support::Held;
use graphile_worker::{DatabaseConfig, WorkerContext, WorkerOptions};
use graphile_worker_devdb::{Cluster, ClusterOptions};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

/// How clients and workers find the server that can be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Proxy,
    SeveralHosts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Replication {
    Synchronous,
    Asynchronous,
}

/// A primary and a standby with the schema installed, and the way to them.
struct Pair {
    folder: PathBuf,
    primary: Option<Cluster>,
    standby: Option<Cluster>,
    network: Network,
    url: String,
}

impl Pair {
    async fn start(name: &str, replication: Replication, way: Way) -> Pair {
        let folder = std::env::temp_dir().join(format!("gw-failover-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let primary = Pair::options(folder.join("primary")).open().unwrap();
        let mut connection = PgConnection::connect_with(&primary.options("postgres")).await.unwrap();
        graphile_worker::migrate(&mut connection, "graphile_worker").await.unwrap();
        let standby = primary.standby(Pair::options(folder.join("standby"))).await.unwrap();
        if replication == Replication::Synchronous {
            for sql in ["alter system set synchronous_standby_names = '*'", "select pg_reload_conf()"] {
                sqlx::raw_sql(sql).execute(&mut connection).await.unwrap();
            }
        }
        let wanted = if replication == Replication::Synchronous { "sync" } else { "async" };
        let followed = format!(
            "select count(*) from pg_stat_replication where state = 'streaming' and sync_state = '{wanted}'
             and replay_lsn = pg_current_wal_lsn()"
        );
        until("the standby follows", async || {
            let count = sqlx::query_scalar::<_, i64>(AssertSqlSafe(followed.clone())).fetch_one(&mut connection).await;
            (count.unwrap() == 1).then_some(())
        })
        .await;
        let network = Network::default();
        let (servers, login) = ([&primary, &standby].map(server), login(&primary));
        let url = match way {
            Way::Proxy => {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                let address = listener.local_addr().unwrap();
                network.point_to(&servers[0]);
                network.listen_on(listener);
                format!("postgres://{login}@{address}/postgres")
            }
            Way::SeveralHosts => {
                format!("postgres://{login}@{}/postgres?target_session_attrs=read-write", servers.join(","))
            }
        };
        Pair { folder, primary: Some(primary), standby: Some(standby), network, url }
    }

    fn options(folder: PathBuf) -> ClusterOptions {
        // A server that is killed loses nothing that it has written, so fsync can be off. synchronous_commit must be on.
        ClusterOptions::new(folder)
            .setting("fsync", "off")
            .setting("full_page_writes", "off")
            .setting("shared_buffers", "16MB")
            .setting("wal_retrieve_retry_interval", "100ms")
    }

    fn primary(&self) -> &Cluster {
        self.primary.as_ref().unwrap()
    }

    fn standby(&self) -> &Cluster {
        self.standby.as_ref().unwrap()
    }

    fn worker(&self) -> WorkerOptions {
        WorkerOptions::default().database_url(&self.url).listen_os_shutdown_signals(false)
    }

    fn kill_primary(&self) {
        tokio::task::block_in_place(|| self.primary().kill()).unwrap();
    }

    /// In good order: the standby has received everything.
    fn stop_primary(&mut self) {
        let primary = self.primary.take().unwrap();
        tokio::task::block_in_place(|| primary.stop()).unwrap();
    }

    fn promote_standby(&self) {
        tokio::task::block_in_place(|| self.standby().promote()).unwrap();
        self.network.point_to(&server(self.standby()));
    }

    /// What the primary writes from now on does not reach the standby.
    fn stop_standby(&mut self) {
        let standby = self.standby.take().unwrap();
        tokio::task::block_in_place(|| standby.stop()).unwrap();
    }

    fn start_standby(&mut self) {
        let options = Pair::options(self.folder.join("standby"));
        self.standby = Some(tokio::task::block_in_place(|| options.open()).unwrap());
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for cluster in [self.primary.take(), self.standby.take()].into_iter().flatten() {
            // One that was killed cannot be stopped.
            let _ = cluster.stop();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn server(cluster: &Cluster) -> String {
    format!("127.0.0.1:{}", cluster.options("postgres").get_port())
}

fn login(cluster: &Cluster) -> String {
    let url = cluster.url("postgres");
    url.split_once("://").unwrap().1.split_once('@').unwrap().0.to_owned()
}

/// The only value of a query.
async fn value(cluster: &Cluster, sql: &str) -> Value {
    let mut connection = PgConnection::connect_with(&cluster.options("postgres")).await.unwrap();
    let rows = rows(&mut connection, sql).await.unwrap_or_else(|error| panic!("{error}\n{sql}"));
    connection.close().await.unwrap();
    rows[0].as_object().unwrap().values().next().unwrap().clone()
}

async fn run(cluster: &Cluster, sql: &str) {
    let mut connection = PgConnection::connect_with(&cluster.options("postgres")).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.unwrap_or_else(|error| panic!("{error}\n{sql}"));
    connection.close().await.unwrap();
}

/// Jobs and locks that are left.
const LEFT: &str = "select (select count(*) from graphile_worker._private_jobs)
    + (select count(*) from graphile_worker._private_job_queues where locked_at is not null)";

async fn until_nothing_is_left(cluster: &Cluster) {
    until("every job has ended and nothing is locked", async || (value(cluster, LEFT).await == 0).then_some(())).await;
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Load {
    n: usize,
    queue: Option<String>,
    key: Option<String>,
    /// Whether its first attempt fails.
    fails: bool,
}

impl Load {
    /// Plain, queued, keyed and failing jobs, by turns.
    fn new(n: usize) -> Load {
        Load {
            n,
            queue: (n % 4 == 1).then(|| format!("queue {}", n / 4 % 3)),
            key: (n % 4 == 2).then(|| format!("key {}", n / 4 % 5)),
            fails: n % 20 == 3,
        }
    }
}

/// Adds jobs one after the other, and notes those whose adding was acknowledged. One that was not acknowledged may have been
/// added all the same; it is not added again.
struct Client {
    config: DatabaseConfig,
    connection: Option<PgConnection>,
    next: usize,
    acknowledged: Vec<Load>,
}

impl Client {
    fn new(url: &str) -> Client {
        let config = DatabaseConfig::parse(url).unwrap();
        Client { config, connection: None, next: 0, acknowledged: Vec::new() }
    }

    async fn add(&mut self) {
        let load = Load::new(self.next);
        self.next += 1;
        if self.try_to_add(&load).await.is_ok() {
            self.acknowledged.push(load);
        } else {
            self.connection = None;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn try_to_add(&mut self, load: &Load) -> Result<(), Box<dyn std::error::Error>> {
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.config.connect().await?,
        };
        sqlx::query("select graphile_worker.add_job('load', $1::json, queue_name := $2, job_key := $3)")
            .bind(json!(load).to_string())
            .bind(&load.queue)
            .bind(&load.key)
            .execute(&mut connection)
            .await?;
        self.connection = Some(connection);
        Ok(())
    }
}

/// What the handlers say.
#[derive(Default)]
struct Record {
    /// Beginnings, in their order.
    begun: Vec<(Load, Instant)>,
    succeeded: HashMap<usize, usize>,
    running: HashSet<usize>,
    running_queues: HashSet<String>,
    problems: Vec<String>,
}

#[derive(Clone, Default)]
struct Handlers(Arc<Mutex<Record>>);

impl Handlers {
    async fn run(self, load: Load, ctx: WorkerContext) -> Result<(), String> {
        {
            let mut record = self.0.lock().unwrap();
            record.begun.push((load.clone(), Instant::now()));
            if !record.running.insert(load.n) {
                record.problems.push(format!("{load:?} runs twice at the same time"));
            }
            if let Some(queue) = &load.queue
                && !record.running_queues.insert(queue.clone())
            {
                record.problems.push(format!("{load:?} runs beside another job of its queue"));
            }
        }
        tokio::time::sleep(Duration::from_millis(2 + load.n as u64 % 5)).await;
        let mut record = self.0.lock().unwrap();
        record.running.remove(&load.n);
        load.queue.as_ref().map(|queue| record.running_queues.remove(queue));
        if load.fails && ctx.job().attempts == 1 {
            return Err("the first attempt fails".to_owned());
        }
        *record.succeeded.entry(load.n).or_default() += 1;
        Ok(())
    }

    fn begun(&self) -> usize {
        self.0.lock().unwrap().begun.len()
    }
}

async fn start_workers(pair: &Pair, handlers: &Handlers) -> Vec<Started> {
    let mut workers = Vec::new();
    for _ in 0..3 {
        let handlers = handlers.clone();
        let options = pair
            .worker()
            .concurrency(4)
            .heartbeat_interval(Duration::from_millis(500))
            .define_task("load", move |load: Load, ctx: WorkerContext| handlers.clone().run(load, ctx));
        workers.push(Started::new(options).await);
    }
    workers
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Crash,
    Switchover,
}

/// Workers under load while the standby takes over from the primary.
async fn take_over(name: &str, event: Event, replication: Replication, way: Way) {
    let mut pair = Pair::start(name, replication, way).await;
    let handlers = Handlers::default();
    let workers = start_workers(&pair, &handlers).await;
    let mut client = Client::new(&pair.url);
    let (stop, mut stopped) = tokio::sync::oneshot::channel();
    let adding = tokio::spawn(async move {
        while stopped.try_recv().is_err() {
            client.add().await;
        }
        client
    });
    until("the workers are at it", async || (handlers.begun() >= 100).then_some(())).await;
    match event {
        Event::Crash => pair.kill_primary(),
        Event::Switchover => pair.stop_primary(),
    }
    pair.promote_standby();
    let promoted = Instant::now();
    let after = |record: &Record| record.begun.iter().filter(|(_, at)| *at > promoted).count();
    until("the workers continue by themselves", async || (after(&handlers.0.lock().unwrap()) >= 100).then_some(()))
        .await;
    stop.send(()).unwrap();
    let mut client = adding.await.unwrap();
    // One that was added now is acknowledged by the promoted server.
    client.connection = None;
    let last = client.acknowledged.len();
    while client.acknowledged.len() < last + 20 {
        client.add().await;
    }
    until_nothing_is_left(pair.standby()).await;
    for worker in workers {
        worker.stop().await;
    }
    let record = handlers.0.lock().unwrap();
    let first = record.begun.iter().map(|(_, at)| *at).find(|at| *at > promoted).unwrap();
    let lost = client.acknowledged.iter().filter(|load| !is_done(load, &record)).count();
    println!(
        "{name}: the first job ran {:?} after the promotion; {} jobs acknowledged, {lost} lost",
        first - promoted,
        client.acknowledged.len()
    );
    for load in &client.acknowledged[last..] {
        assert!(is_done(load, &record), "{load:?} was acknowledged by the new primary and has not run");
    }
    // Jobs and claims that the standby had not received are lost: a job may run beside itself then.
    if event == Event::Crash && replication == Replication::Asynchronous {
        return;
    }
    assert_eq!(lost, 0, "acknowledged jobs that did not run");
    assert_eq!(record.problems, Vec::<String>::new());
    let mut last_of_queue: HashMap<&str, usize> = HashMap::new();
    let mut seen = HashSet::new();
    for (load, _) in record.begun.iter().filter(|(load, _)| seen.insert(load.n)) {
        let Some(queue) = &load.queue else { continue };
        let before = last_of_queue.insert(queue, load.n);
        assert!(before.is_none_or(|before| before < load.n), "{load:?} ran after {before:?}");
    }
    // No worker died, and what it held is in the promoted database: nothing runs again that has succeeded.
    let again: Vec<_> = record.succeeded.iter().filter(|(_, times)| **times > 1).collect();
    assert!(again.is_empty(), "succeeded more than once: {again:?}");
}

/// Whether the job has succeeded; of a keyed one, this or one that replaced it.
fn is_done(load: &Load, record: &Record) -> bool {
    let Some(key) = &load.key else { return record.succeeded.contains_key(&load.n) };
    let replaces = |(other, _): &(Load, Instant)| {
        other.n >= load.n && other.key.as_ref() == Some(key) && record.succeeded.contains_key(&other.n)
    };
    record.begun.iter().any(replaces)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_synchronous_replication_nothing_is_lost_behind_a_proxy() {
    take_over("sync-proxy", Event::Crash, Replication::Synchronous, Way::Proxy).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_synchronous_replication_nothing_is_lost_with_several_hosts() {
    take_over("sync-hosts", Event::Crash, Replication::Synchronous, Way::SeveralHosts).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_asynchronous_replication_workers_continue_behind_a_proxy() {
    take_over("async-proxy", Event::Crash, Replication::Asynchronous, Way::Proxy).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_asynchronous_replication_workers_continue_with_several_hosts() {
    take_over("async-hosts", Event::Crash, Replication::Asynchronous, Way::SeveralHosts).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_planned_switchover_loses_nothing() {
    take_over("switchover", Event::Switchover, Replication::Asynchronous, Way::SeveralHosts).await;
}

/// The worker has the primary's word that the job is done, but the standby did not receive that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_whose_outcome_was_lost_with_the_primary_runs_again_and_its_queue_continues() {
    let mut pair = Pair::start("end-lost", Replication::Asynchronous, Way::SeveralHosts).await;
    let held = Held::default();
    let runs = held.clone();
    let options = pair.worker().concurrency(1).poll_interval(Duration::from_secs(3600));
    let started = Started::new(options.define_task("t", move |_: Value, _| runs.clone().run())).await;
    run(pair.primary(), "select graphile_worker.add_job('t', queue_name := 'q') from generate_series(1, 2)").await;
    held.begun.notified().await;
    let claimed = "select count(*) from graphile_worker._private_jobs where locked_at is not null";
    until("the claim is on the standby", async || (value(pair.standby(), claimed).await != 0).then_some(())).await;
    pair.stop_standby();
    held.go_on.notify_one();
    held.begun.notified().await;
    held.go_on.notify_one();
    until_nothing_is_left(pair.primary()).await;
    pair.kill_primary();
    pair.start_standby();
    assert_eq!(value(pair.standby(), claimed).await, 1);
    pair.promote_standby();
    for _ in 0..2 {
        held.begun.notified().await;
        held.go_on.notify_one();
    }
    until_nothing_is_left(pair.standby()).await;
    assert_eq!(held.runs(), 4);
    started.stop().await;
}

/// The worker runs a job, but the standby did not receive that it was claimed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_whose_claim_was_lost_with_the_primary_does_not_run_twice_at_once() {
    for queue in ["null", "'q'"] {
        let mut pair = Pair::start("claim-lost", Replication::Asynchronous, Way::SeveralHosts).await;
        let held = Held::default();
        let runs = held.clone();
        let options = pair.worker().concurrency(2).poll_interval(Duration::from_millis(100));
        let options = options.define_task("t", move |_: Value, _| runs.clone().run());
        run(pair.primary(), &format!("select graphile_worker.add_job('t', queue_name := {queue})")).await;
        let jobs = "select count(*) from graphile_worker._private_jobs";
        until("the job is on the standby", async || (value(pair.standby(), jobs).await == 1).then_some(())).await;
        pair.stop_standby();
        let started = Started::new(options).await;
        held.begun.notified().await;
        pair.kill_primary();
        pair.start_standby();
        pair.promote_standby();
        let claimed = "select locked_by from graphile_worker._private_jobs";
        until("the worker has claimed it again", async || {
            (value(pair.standby(), claimed).await == started.worker.worker_id()).then_some(())
        })
        .await;
        // Once the worker runs a job that it has claimed after that, it has received the claim, too.
        run(pair.standby(), "select graphile_worker.add_job('t')").await;
        held.begun.notified().await;
        held.go_on.notify_one();
        held.go_on.notify_one();
        until_nothing_is_left(pair.standby()).await;
        assert_eq!(held.runs(), 2, "the outcome of the first job is written under the new claim");
        started.stop().await;
    }
}

/// Behind a pooler, a worker asks what became of a transaction whose commit was not answered. The new primary has never heard
/// of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_the_new_primary_does_not_know_stops_no_worker_behind_a_pooler() {
    let mut pair = Pair::start("commit-lost", Replication::Synchronous, Way::Proxy).await;
    let held = Held::default();
    let runs = held.clone();
    let options = pair.worker().concurrency(1).use_prepared_statements(false).use_notifications(false);
    let started = Started::new(options.define_task("t", move |_: Value, _| runs.clone().run())).await;
    run(pair.primary(), "select graphile_worker.add_job('t', queue_name := 'q')").await;
    held.begun.notified().await;
    pair.stop_standby();
    held.go_on.notify_one();
    let waits = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'";
    until("the report waits for the standby", async || (value(pair.primary(), waits).await != 0).then_some(())).await;
    pair.kill_primary();
    pair.start_standby();
    pair.promote_standby();
    until_nothing_is_left(pair.standby()).await;
    assert_eq!(held.runs(), 1, "its outcome is reported again");
    started.stop().await;
}

#[tokio::test]
async fn a_worker_that_starts_on_a_standby_waits_until_it_is_promoted() {
    let pair = Pair::start("starts", Replication::Asynchronous, Way::Proxy).await;
    let (log, _guard) = Log::start();
    run(pair.primary(), "select graphile_worker.add_job('t')").await;
    let standby = server(pair.standby());
    pair.network.point_to(&standby);
    let (sender, mut ran) = mpsc::unbounded_channel();
    let options = pair.worker().heartbeat_interval(Duration::from_secs(1)).startup_timeout(Duration::from_secs(120));
    let options = options.define_task("t", move |_: Value, _: WorkerContext| {
        let _ = sender.send(());
        async {}
    });
    let starting = tokio::spawn(Started::new(options));
    let line = until("it waits", async || log.line("waiting for the database")).await;
    assert!(line.contains("a read-only standby"), "{line}");
    let pair = tokio::task::spawn_blocking(move || {
        pair.standby().promote().unwrap();
        pair
    })
    .await
    .unwrap();
    ran.recv().await.unwrap();
    starting.await.unwrap().stop().await;
    assert!(log.line("the database is ready").is_some(), "{}", log.text());
    until_nothing_is_left(pair.standby()).await;
}

/// The old primary still answers, but nothing can be written there any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_whose_primary_becomes_read_only_moves_to_the_new_one_with_its_listener_and_its_pool() {
    let pair = Pair::start("demoted", Replication::Asynchronous, Way::SeveralHosts).await;
    run(pair.primary(), "create table notes (n int)").await;
    let (sender, mut ran) = mpsc::unbounded_channel();
    let options = WorkerOptions::default()
        .database_url(&format!("{}&keepalives_idle=1", pair.url))
        .listen_os_shutdown_signals(false)
        .poll_interval(Duration::from_secs(3600))
        .define_task("t", move |n: i32, ctx: WorkerContext| {
            let sender = sender.clone();
            async move {
                let note = sqlx::query("insert into notes values ($1)").bind(n);
                let noted = note.execute(ctx.pg_pool()).await.map(drop).map_err(|error| error.to_string());
                sender.send((n, noted)).unwrap();
            }
        });
    let started = Started::new(options).await;
    run(pair.primary(), "select graphile_worker.add_job('t', '1')").await;
    assert_eq!(ran.recv().await, Some((1, Ok(()))));
    until_nothing_is_left(pair.primary()).await;
    until("the standby has it all", async || {
        let noted =
            "select count(*) from notes, (select count(*) from graphile_worker._private_jobs) j where j.count = 0";
        (value(pair.standby(), noted).await == 1).then_some(())
    })
    .await;
    run(pair.primary(), "alter system set default_transaction_read_only = on").await;
    run(pair.primary(), "select pg_reload_conf()").await;
    pair.promote_standby();
    let listens = "select count(*) from pg_stat_activity where query ilike 'listen%'";
    until("the worker listens to the new primary", async || (value(pair.standby(), listens).await == 1).then_some(()))
        .await;
    for n in 2..=4 {
        run(pair.standby(), &format!("select graphile_worker.add_job('t', '{n}')")).await;
        assert_eq!(ran.recv().await, Some((n, Ok(()))));
    }
    until_nothing_is_left(pair.standby()).await;
    started.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recurring_jobs_are_added_once_for_each_time_across_a_failover() {
    let pair = Pair::start("cron", Replication::Synchronous, Way::SeveralHosts).await;
    let mut workers = Vec::new();
    for _ in 0..2 {
        let options = pair.worker().with_cron("* * * * * every_minute").unwrap();
        workers.push(Clocked::with(options, "08:00:30").await);
    }
    for now in ["08:01:00", "08:02:00"] {
        for worker in &workers {
            worker.clock.set(time(now));
        }
        for worker in &mut workers {
            worker.looked(time(now)).await;
        }
    }
    for worker in &workers {
        // One may be at it while the primary is killed.
        worker.clock.set(time("08:03:00"));
    }
    pair.kill_primary();
    for worker in &workers {
        worker.clock.set(time("08:04:00"));
    }
    pair.promote_standby();
    for worker in &mut workers {
        worker.looked(time("08:04:00")).await;
    }
    let jobs =
        "select json_agg(to_char(run_at at time zone 'UTC', 'HH24:MI') order by run_at) from graphile_worker.jobs";
    assert_eq!(value(pair.standby(), jobs).await, json!(["08:01", "08:02", "08:03", "08:04"]));
    for worker in workers {
        worker.started.stop().await;
    }
}

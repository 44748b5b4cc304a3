//! What every test needs: a database, and short ways to ask it things.

use graphile_worker::{Error, Worker, WorkerOptions};
use graphile_worker_devdb::{Cluster, PgBouncer, TestDatabase};
use serde_json::Value;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};
use std::hash::{Hash, Hasher};
use std::io::Write;
use std::sync::{Arc, LazyLock, Mutex, mpsc};
use std::time::{Duration, Instant};
use tracing::Dispatch;

/// Open for as long as this test process lives.
static CLUSTER: LazyLock<Cluster> =
    LazyLock::new(|| Cluster::for_tests().unwrap_or_else(|error| panic!("no PostgreSQL for the tests: {error}")));

/// Every SQL file: what the template's contents depend on.
pub(crate) fn sql_files() -> Vec<(String, String)> {
    let mut files = Vec::new();
    for folder in ["schema", "queries"] {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../graphile_worker/sql").join(folder);
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            files.push((name, std::fs::read_to_string(path).unwrap()));
        }
    }
    files.sort();
    files
}

pub(crate) struct Db {
    pub(crate) pool: PgPool,
    database: TestDatabase,
    _deadline: Deadline,
}

impl Db {
    /// A database with the schema installed.
    pub(crate) async fn installed() -> Db {
        let mut hasher = std::hash::DefaultHasher::new();
        sql_files().hash(&mut hasher);
        Db::from_template(&format!("graphile_worker {:x}", hasher.finish()), async |options| {
            let mut connection = PgConnection::connect_with(&options).await?;
            graphile_worker::migrate(&mut connection, "graphile_worker").await?;
            Ok(())
        })
        .await
    }

    /// A database with nothing in it.
    pub(crate) async fn empty() -> Db {
        Db::from_template("empty", async |_| Ok(())).await
    }

    pub(crate) async fn from_template(
        template: &str,
        install: impl AsyncFnOnce(PgConnectOptions) -> Result<(), Box<dyn std::error::Error + Send + Sync>>,
    ) -> Db {
        let database = CLUSTER.database(template, install).await.unwrap_or_else(|error| panic!("{error:?}"));
        let pool = PgPoolOptions::new().max_connections(20).connect_with(database.options()).await.unwrap();
        Db { pool, database, _deadline: Deadline::start() }
    }

    pub(crate) fn options(&self) -> PgConnectOptions {
        self.database.options()
    }

    pub(crate) fn url(&self) -> &str {
        self.database.url()
    }

    /// A PgBouncer in front of the server, with its defaults but for these settings, and this database's URL there.
    pub(crate) fn pgbouncer(&self, settings: &[(&str, &str)]) -> (PgBouncer, String) {
        let pooler = CLUSTER.pgbouncer(settings).unwrap_or_else(|error| panic!("no PgBouncer for the tests: {error}"));
        let url = pooler.url(self.database.name());
        (pooler, url)
    }

    /// A connection of its own, for tests about sessions.
    pub(crate) async fn connect(&self) -> PgConnection {
        PgConnection::connect_with(&self.database.options()).await.unwrap()
    }

    pub(crate) async fn connect_as(&self, role: &str) -> PgConnection {
        PgConnection::connect_with(&self.database.options().username(role)).await.unwrap()
    }

    /// Runs statements; a failure is the test's.
    pub(crate) async fn run(&self, sql: &str) {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&self.pool).await.unwrap_or_else(|error| panic!("{error}\n{sql}"));
    }

    /// The rows of a query, each as JSON.
    pub(crate) async fn rows(&self, sql: &str) -> Vec<Value> {
        rows(&mut self.pool.acquire().await.unwrap(), sql).await.unwrap_or_else(|error| panic!("{error}\n{sql}"))
    }

    /// The only row of a query.
    pub(crate) async fn row(&self, sql: &str) -> Value {
        let mut rows = self.rows(sql).await;
        assert_eq!(rows.len(), 1, "{sql}");
        rows.remove(0)
    }

    /// The only value of a query.
    pub(crate) async fn value(&self, sql: &str) -> Value {
        let row = self.row(sql).await;
        row.as_object().unwrap().values().next().unwrap().clone()
    }

    /// The job that `add_job` with these arguments returns.
    pub(crate) async fn add_job(&self, arguments: &str) -> Value {
        self.row(&format!("select * from graphile_worker.add_job({arguments})")).await
    }

    /// The SQLSTATE and message with which a statement fails; and nothing has changed by it.
    pub(crate) async fn failure(&self, sql: &str) -> (String, String) {
        let before = self.everything().await;
        let error = rows(&mut self.pool.acquire().await.unwrap(), sql).await.expect_err(sql);
        assert_eq!(self.everything().await, before, "a refused call changes nothing");
        let error = error.into_database_error().unwrap();
        (error.code().unwrap().into_owned(), error.message().to_owned())
    }

    /// All rows of all tables.
    pub(crate) async fn everything(&self) -> Value {
        self.value(
            "select json_build_array(
               (select json_agg(t order by id) from graphile_worker._private_jobs t),
               (select json_agg(t order by id) from graphile_worker._private_job_queues t),
               (select json_agg(t order by id) from graphile_worker._private_tasks t))",
        )
        .await
    }

    /// Claims the next job as a worker would, and returns it.
    pub(crate) async fn claim(&self) -> Value {
        let claimed = claim(&mut self.pool.acquire().await.unwrap(), "a-worker").await;
        claimed.expect("a job to claim")
    }
}

pub(crate) async fn rows(connection: &mut PgConnection, sql: &str) -> sqlx::Result<Vec<Value>> {
    let sql = format!("with answer as materialized ({sql}) select to_json(answer) from answer");
    sqlx::query_scalar(AssertSqlSafe(sql)).fetch_all(connection).await
}

/// Locks the next job the way the contract says: lock, worker, attempt.
pub(crate) async fn claim(connection: &mut PgConnection, worker: &str) -> Option<Value> {
    sqlx::query_scalar(
        "update graphile_worker._private_jobs as jobs
         set locked_at = now(), locked_by = $1, attempts = attempts + 1
         where id = (
           select id from graphile_worker._private_jobs
           where is_available and run_at <= now()
           order by priority, run_at, id limit 1 for update skip locked
         )
         returning to_json(jobs)",
    )
    .bind(worker)
    .fetch_optional(connection)
    .await
    .unwrap()
}

/// A listening session that can be asked what has arrived.
pub(crate) struct Listener(sqlx::postgres::PgListener);

impl Listener {
    pub(crate) async fn on(db: &Db, channel: &str) -> Listener {
        let mut listener = sqlx::postgres::PgListener::connect_with(&db.pool).await.unwrap();
        listener.listen_all([channel, "end of test"]).await.unwrap();
        Listener(listener)
    }

    /// The payloads received so far: sends a mark and reads up to it.
    pub(crate) async fn received(&mut self, db: &Db) -> Vec<Value> {
        db.run("notify \"end of test\"").await;
        let mut payloads = Vec::new();
        loop {
            let notification = self.0.recv().await.unwrap();
            if notification.channel() == "end of test" {
                return payloads;
            }
            payloads.push(serde_json::from_str(notification.payload()).unwrap());
        }
    }
}

/// A worker that runs in the background until `stop`.
pub(crate) struct Started {
    pub(crate) worker: Arc<Worker>,
    pub(crate) running: tokio::task::JoinHandle<Result<(), Error>>,
}

impl Started {
    pub(crate) async fn new(options: WorkerOptions) -> Started {
        let worker = Arc::new(options.init().await.unwrap());
        let runs = worker.clone();
        Started { worker, running: tokio::spawn(async move { runs.run().await }) }
    }

    pub(crate) async fn stop(self) {
        self.worker.request_shutdown();
        self.running.await.unwrap().unwrap();
    }
}

/// How long tests wait for what must happen. On a machine with much else to do, that takes a while.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

/// Ends the test process, with the name of the test, if the test still runs after this time: a test that hangs fails.
const LONGEST_TEST: Duration = Duration::from_secs(600);

/// Dropping it says that the test has ended.
struct Deadline(#[expect(dead_code, reason = "dropping it is what counts")] mpsc::Sender<()>);

impl Deadline {
    fn start() -> Deadline {
        let (sender, ended) = mpsc::channel::<()>();
        let test = std::thread::current().name().unwrap_or("a test").to_owned();
        std::thread::spawn(move || {
            if ended.recv_timeout(LONGEST_TEST) == Err(mpsc::RecvTimeoutError::Timeout) {
                // Not `eprintln!`, which the test harness captures.
                let _ = writeln!(std::io::stderr(), "{test} still runs after {LONGEST_TEST:?}: it hangs");
                std::process::exit(101);
            }
        });
        Deadline(sender)
    }
}

/// Waits until the question has an answer.
pub(crate) async fn until<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(Instant::now() < end, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// What this thread logs, and so all of a test that has only this one.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Until the guard is dropped.
    pub(crate) fn start() -> (Log, tracing::subscriber::DefaultGuard) {
        // With a single subscriber, a callsite that another thread reaches first would be disabled for this one as well.
        static ANOTHER: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(tracing_subscriber::registry()));
        LazyLock::force(&ANOTHER);
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        (log, tracing::subscriber::set_default(subscriber))
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }

    /// The first line with this text in it.
    pub(crate) fn line(&self, text: &str) -> Option<String> {
        self.text().lines().find(|line| line.contains(text)).map(str::to_owned)
    }

    /// Waits until this many lines have the text.
    pub(crate) async fn logged(&self, text: &str, times: usize) {
        until(text, async || (self.lines(text).lines().count() >= times).then_some(())).await;
    }

    /// All lines with this text.
    pub(crate) fn lines(&self, text: &str) -> String {
        self.text().lines().filter(|line| line.contains(text)).map(|line| line.to_owned() + "\n").collect()
    }
}

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
